"""Every model of the registry, in its tiny form, through `tools.train`: profiled, planned, trained and saved."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import pathlib

import keras
import numpy as np
import pytest
from selection import sampled

import dapple_tf as dapple
from dapple_tf import automatic
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Tensor
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.layer_cuts import layer_stages
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.models.registry import MODELS, find_model
from dapple_tf.tools import command, train

MEASURED = ("ffnn:tiny", "vgg:tiny")
TINY = [name for name in MODELS if name.endswith(":tiny")]

STEPS = 4
COMMON = ["--cluster=cpu:3", "--global_batch_size=16", f"--steps={STEPS}", "--validation_steps=0", "--noprofile_step"]


def run(*arguments: str) -> int:
    return command.run(train.main, train.FLAGS, [*COMMON, *arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Of the runs of this module: one for each model that has been trained."""
    return tmp_path_factory.mktemp("runs")


def estimated(name: str) -> dapple.Profile:
    """A profile of the model's layers by their parameters: measuring all models would take minutes."""
    model = find_model(name).build()
    example, table = ExampleBatch.of(model), VariableTable(model)
    build(model, table, example.spec)
    training = capture(model, table, Mode.TRAIN, example.spec)
    stages = layer_stages(model, training, capture(model, table, Mode.PREDICT, BatchSpec(example.spec.x)))
    layers = []
    for layer, stage in zip(stages.names, stages.program.stages, strict=True):
        count = sum(math.prod(table.describe(read).shape) for read in stage.reads)
        forward = Cost(1e-4 + 1e-8 * count)
        layers.append(LayerProfile(layer, forward, forward * 2, parameter_bytes=4 * count, slot_bytes=8 * count))
    between = tuple(Tensor(index, (index + 1,), Cost(1e4)) for index in range(len(layers) - 1))
    return dapple.Profile(model.name, "estimated", (4,), tuple(layers), between)


def trained(folder: pathlib.Path, name: str) -> pathlib.Path:
    """What a run by an automatic plan leaves: of measured times, once each, or of `estimated` ones."""
    output_dir = folder / name.replace(":", "_")
    if not output_dir.exists():
        flags = ["--micro_batches=2", f"--model={name}", f"--output_dir={output_dir}"]
        if name not in MEASURED:
            estimated(name).save(folder / "profile.json")
            flags.append(f"--profile={folder / 'profile.json'}")
        with pytest.MonkeyPatch.context() as patch:
            quick = functools.partial(dapple.profile, repeats=1, cache=False, progress=False)
            patch.setattr(automatic, "profile", quick)
            patch.setattr(automatic, "slice_sizes", lambda batch, devices: (batch // 4,))
            patch.setattr(automatic, "measure_links", _with_links)
            patch.setattr(automatic, "measure_capacity", lambda model, cluster, profile, **_: cluster)
            assert run(*flags) == 0
    return output_dir


def _with_links(cluster: dapple.Cluster, **_: object) -> dapple.Cluster:
    return dataclasses.replace(cluster, intra_bandwidth=1e10, intra_latency=1e-5)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(TINY, 3))
def test_models_are_planned_trained_and_saved(name: str, folder: pathlib.Path) -> None:
    out = trained(folder, name)
    plan, profile = dapple.Plan.load(out / "plan.json"), dapple.Profile.load(out / "profile.json")
    cluster = dapple.Cluster.load(out / "cluster.json")
    assert plan.global_batch_size == 16
    assert {device for devices in plan.devices for device in devices} <= {0, 1, 2}
    assert set(plan.cuts) <= {layer.name for layer in profile.layers}
    summary = json.loads((out / "summary.json").read_text())
    expected = dapple.simulate(plan, profile, cluster).latency
    assert summary["predicted_step_ms"] == pytest.approx(1e3 * expected)
    with (out / "history.csv").open() as file:
        (epoch,) = csv.DictReader(file)
    assert 0 < float(epoch["loss"]) < 20
    saved = keras.saving.load_model(out / "model.keras")
    assert saved.count_params() == summary["parameters"]
    assert int(saved.optimizer.iterations) == STEPS
    values = [keras.ops.convert_to_numpy(variable.value) for variable in saved.trainable_variables]
    assert all(np.isfinite(value).all() for value in values) and math.isfinite(float(epoch["loss"]))
