"""Replicas that keep a shard of the parameters each, too: training, evaluation and prediction are as in plain Keras."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import (
    TOLERANCE,
    assert_same_training,
    assert_same_variables,
    largest_difference,
    pair,
    pipeline,
    use_float64,
)
from shard_checks import (
    TABLE,
    check_deferred_models,
    check_evaluation_before_and_after_training,
    check_values_go_to,
    constrained,
    table,
)
from test_equivalence_shards import OPTIMIZERS, held_bytes
from zoo import ZOO, Specimen

import dapple_tf as dapple
from dapple_tf.describe.plan import PlanError
from dapple_tf.tools.hosts import LocalWorkers

SHARDS = {"optimizer_shards": True, "parameter_shards": True}
CHUNKS = [[0, 1]] * 4
PERIODIC = [[0, 1], [2, 3], [0, 1], [2, 3]]
CASES: dict[str, tuple[Specimen, list[list[int]], int, dict[str, Any]]] = {
    "data parallel": (ZOO["multi_output"], [[0, 1, 2]], 2, {}),
    "one micro-batch": (ZOO["cnn"], [[0, 1]], 1, {}),
    "two stages": (ZOO["cnn"], [[0, 1], [2, 3]], 2, {"bucket_bytes": 64}),
    "tied weights of two stages": (ZOO["tied"], [[0], [1, 2, 3]], 2, {}),
    "chunks": (ZOO["multi_output"], CHUNKS, 1, {"reverse_first_k": 2}),
    "chunks of tied weights": (ZOO["tied"], CHUNKS, 3, {"recompute": "min_cut"}),
    "chunks in another order": (ZOO["transformer"], PERIODIC, 4, {"schedule": "interleaved"}),
    "recomputed": (ZOO["transformer"], [[0, 1], [2]], 3, {"recompute": "boundary"}),
    "carried": (ZOO["multi_output"], [[0, 1], [2, 3]], 2, {"carried_updates": 2}),
    "carried chunks": (ZOO["multi_output"], CHUNKS, 2, {"carried_updates": 2}),
    "in pieces": (ZOO["multi_output"], [[0, 1]], 2, {"backward_cuts": ["from_a"]}),
    "split backwards": (ZOO["multi_output"], [[0, 1], [2]], 3, {"schedule": "zb_h1"}),
    "weights elsewhere": (ZOO["multi_output"], [[0, 1], [2]], 2, {"weight_devices": [[3, 4], [2]]}),
    "unlike shares": (ZOO["lstm"], [[0, 1, 2]], 2, {"shares": [[1, 2, 1]]}),
    "xla": (ZOO["multi_output"], [[0, 1]], 1, {"jit_compile": True}),
    "rows": (TABLE, [[0, 1, 2]], 2, {}),
    "rows with a constraint": (Specimen(constrained, TABLE.cuts, TABLE.batch), [[0, 1]], 1, {}),
}
KEPT = ("chunks of tied weights",)


def _train(specimen: Specimen, devices: list[list[int]], micro_batches: int, **options: Any) -> dapple.PipelinedModel:
    """Trains for three steps, one of them with fewer samples, evaluates and predicts, and compares everything."""
    use_float64()
    model, plain = pair(specimen.build)
    plan = dapple.Plan.manual(specimen.cuts_for(len(devices)), devices, micro_batches, 24, **SHARDS, **options)
    count = 1 + max(device for own in (*plan.devices, *(plan.weight_devices or ())) for device in own)
    pipelined = dapple.transform(model, dapple.Cluster.local(count, kind="cpu"), plan)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [specimen.batch(rng, size) for size in (24, 11, 24)])
    x, y, weights = specimen.batch(rng, 11)
    losses = [own.evaluate(x, y, sample_weight=weights, batch_size=11, verbose=0) for own in (pipelined, plain)]
    assert largest_difference(*map(np.ravel, losses)) <= 2e-5, "Keras' metrics are float32 whatever the model is"
    outputs = [keras.tree.flatten(own.predict(x, batch_size=11, verbose=0)) for own in (pipelined, plain)]
    for own, other in zip(*outputs, strict=True):
        assert largest_difference(own, other) <= TOLERANCE["float64"]
    return pipelined


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_training_evaluation_and_prediction_are_the_same(name: str) -> None:
    specimen, devices, micro_batches, options = CASES[name]
    _train(specimen, devices, micro_batches, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_that_updates_each_element_by_itself(name: str) -> None:
    def build() -> keras.Model:
        model = table()
        model.compile(OPTIMIZERS[name](), "mse")
        return model

    _train(Specimen(build, TABLE.cuts, TABLE.batch), [[0, 1]], 2)


def test_each_replica_holds_its_part_of_the_parameters_and_slots() -> None:
    pipelined = _train(TABLE, [[0, 1, 2]], 2)
    parameters = sum(np.asarray(variable.value).nbytes for variable in pipelined.model.trainable_variables)
    for slots, own in held_bytes(pipelined):
        assert own == pytest.approx(parameters / 3, rel=0.05)
        assert slots == pytest.approx(2 * parameters / 3, rel=0.05)


def test_parameters_need_slots_in_shards() -> None:
    with pytest.raises(PlanError, match=r"parameter_shards is True, but optimizer_shards is False: .*set optimizer_sh"):
        dapple.Plan.data_parallel(2, 8, parameter_shards=True)


@pytest.mark.thorough
def test_training_in_half_precision_is_the_same() -> None:
    """The whole parameters are cast by layers, as ever."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, plain = pair(ZOO["transformer"].build)
    pipelined = pipeline(model, (), [2], 2, 24, **SHARDS)
    rng = np.random.default_rng(0)
    batches = [ZOO["transformer"].batch(rng, size) for size in (24, 11)]
    assert_same_training(pipelined, plain, batches, tolerance=TOLERANCE["bfloat16"])


@pytest.mark.slow
def test_what_was_evaluated_before_training_is_moved_into_shards() -> None:
    """Only training tells which parameters are cut."""
    check_evaluation_before_and_after_training(**SHARDS)


@pytest.mark.slow
def test_values_go_from_shards_to_other_shards_by_files_and_by_hand(tmp_path: pathlib.Path) -> None:
    check_values_go_to([(2, SHARDS), (2, {"optimizer_shards": True}), (4, SHARDS)], tmp_path, **SHARDS)


@pytest.mark.slow
def test_parameters_of_deferred_models_are_made_in_shards() -> None:
    check_deferred_models(**SHARDS)


@pytest.mark.slow
def test_traces_and_drawings_show_the_gathers(tmp_path: pathlib.Path) -> None:
    x, y, _ = TABLE.batch(np.random.default_rng(0), 12)
    pipelined = pipeline(table(), (), [3], 2, 12, bucket_bytes=512, **SHARDS)
    profile = pipelined.profile_step(x, y, warm_up=0)
    spans = profile.step.timeline.spans
    first = {device: min(s.start for s in spans if s.kind == "F" and s.device == device) for device in range(3)}
    gathers = [span for span in spans if span.kind == "all_reduce" and span.end <= first[span.device]]
    assert {span.device for span in gathers} == {0, 1, 2}
    assert len(gathers) >= 3 * 2, "several buckets on each device"
    pipelined.dump(tmp_path / "dump")
    drawings = "".join(path.read_text() for path in (tmp_path / "dump").rglob("*.dot"))
    assert "AllGather 0" in drawings


@pytest.mark.slow
def test_workers_exchange_shards_and_write_whole_values(tmp_path: pathlib.Path, workers: LocalWorkers) -> None:
    use_float64()
    model, plain = pair(table)
    plan = dapple.Plan.data_parallel(4, 24, 2, **SHARDS)
    pipelined = dapple.transform(model, dapple.Cluster.of_servers(workers.addresses), plan)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [TABLE.batch(rng, size) for size in (24, 11, 24)])
    path = pipelined.save_checkpoint(tmp_path)
    pipelined.close()
    restored = table()
    dapple.load_checkpoint(path, restored)
    assert_same_variables(restored, plain, TOLERANCE["float64"])
