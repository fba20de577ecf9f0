"""The tools that train: a run from beginning to end, and the text of mistakes."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import re
import textwrap
from typing import Any

import keras
import numpy as np
import planned_hardware as given
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dapple_tf as dapple
from dapple_tf.automatic import Planned
from dapple_tf.models.sources import DataSource
from dapple_tf.tools import command, step_times, train, train_gpt


def run(*arguments: str) -> int:
    return command.run(train.main, train.FLAGS, arguments)


OWN = """
    import keras
    import numpy as np
    import tensorflow as tf

    def build():
        layers = [keras.layers.Dense(8, activation="tanh", name=f"dense_{i}") for i in range(3)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2, name="out")], name="own")
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    def wide(batch_size):
        return np.ones((64, 5)), np.ones((64, 2))

    def single(batch_size):
        return tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones(64)))

    def fives(batch_size):
        return tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones((64, 2)))).batch(5)
"""


@pytest.fixture
def own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_model_to_train.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    return "--model=own_model_to_train:build"


def test_a_run(own: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    flags = [own, "--plan=1:1", "--cluster=cpu:2", "--nomeasure", "--steps=8", f"--output_dir={out}"]
    flags += ["--global_batch_size=8", "--micro_batches=2", f"--checkpoint_dir={checkpoints}", "--learning_rate=0.05"]
    assert run(*flags, "--epochs=2", "--verify") == 0
    printed = capsys.readouterr().out
    plan = dapple.Plan.load(out / "plan.json")
    assert (plan.replicas, plan.micro_batches, plan.global_batch_size) == ((1, 1), 2, 8)
    assert str(plan) in printed
    assert "own: 202 parameters, on generated" in printed
    assert f"Everything is in {out}" in printed
    assert {path.name for path in out.iterdir()} == {
        *("model.keras", "plan.json", "cluster.json", "history.csv", "logs", "step", "summary.json")
    }

    with (out / "history.csv").open() as file:
        epochs = list(csv.DictReader(file))
    assert float(epochs[1]["loss"]) < float(epochs[0]["loss"])
    assert float(epochs[1]["samples_per_second"]) > 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["parameters"] == 202 and summary["epochs"] == 2
    assert summary["predicted_step_ms"] is None  # --nomeasure
    assert summary["metrics"]["loss"] == pytest.approx(float(epochs[1]["loss"]))

    model = keras.saving.load_model(out / "model.keras")
    assert int(model.optimizer.iterations) == 16
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    logs = EventAccumulator(str(out / "logs" / "pipeline"))
    logs.Reload()
    assert "throughput/samples_per_second" in logs.Tags()["tensors"] + logs.Tags()["scalars"]
    epochs_log = EventAccumulator(str(out / "logs" / "train"))
    epochs_log.Reload()
    losses = [tf.make_ndarray(event.tensor_proto) for event in epochs_log.Tensors("epoch_loss")]
    np.testing.assert_allclose(losses, [float(epoch["loss"]) for epoch in epochs], rtol=1e-6)
    assert "epoch_learning_rate" in epochs_log.Tags()["tensors"]
    assert (out / "step" / "timeline.html").exists()

    # The second run goes on after the second epoch, in a folder of its own.
    assert run(*flags, "--epochs=3", "--resume", "--noprofile_step") == 0
    said = capsys.readouterr().out
    assert f"Everything goes to {tmp_path / 'run-2'}" in said and "Going on from " in said
    resumed = keras.saving.load_model(tmp_path / "run-2" / "model.keras")
    assert int(resumed.optimizer.iterations) == 24
    assert not (tmp_path / "run-2" / "step").exists()


def test_only_steps_are_measured(own: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    flags = [own, "--plan=1:1", "--cluster=cpu:2", "--nomeasure", "--global_batch_size=8", "--micro_batches=2"]
    assert run(*flags, "--benchmark_steps=5", f"--output_dir={out}") == 0
    assert {path.name for path in out.iterdir()} == {"plan.json", "cluster.json", "benchmark.json", "step"}
    record = json.loads((out / "benchmark.json").read_text())
    assert (record["steps"], record["global_batch_size"], record["devices"]) == (5, 8, 2)
    assert record["predicted_step_ms"] is None and record["machine"]["cores"] >= 1
    assert record["command"].startswith("python -m tools.train --") and "--benchmark_steps=5" in record["command"]
    printed = capsys.readouterr().out
    assert "Measured 5 steps of own, " in printed and "benchmark.json  step times" in printed


def test_single_operators_are_placed(own: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    flags = [own, "--cluster=cpu:2", "--steps=2", f"--output_dir={out}", "--global_batch_size=8", "--noprofile_step"]
    assert run(*flags, "--placement=fd_dps", "--recompute=none") == 0
    printed = capsys.readouterr().out
    plan = dapple.Plan.load(out / "plan.json")
    assert plan == dapple.Plan.by_operators(2, 8)
    assert dapple.OperatorCosts.load(out / "operator_costs.json").count > 10  # They were measured.
    assert not (out / "profile.json").exists()
    report = (out / "operators.txt").read_text().partition("\n\nqueue")[0]
    assert report.startswith("stage 0 on devices 0 1: ")
    assert "stage 0" + report.removeprefix("stage 0 on devices 0 1") in printed
    assert re.search(r"operators\.txt +where each operator runs", printed)

    # A plan's file that places operators needs no flag.
    assert run(*flags, f"--plan={out / 'plan.json'}", "--nomeasure") == 0
    assert dapple.OperatorCosts.load(tmp_path / "run-2" / "operator_costs.json").count == 0


def test_plans_are_sought_with_what_flags_say(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def planned(model: keras.Model, cluster: dapple.Cluster, batch: int, **options: Any) -> Planned:
        calls.append({"batch": batch} | options)
        return Planned(dapple.Plan.data_parallel(2, batch), given.profile(), cluster)

    monkeypatch.setattr("dapple_tf.automatic.plan_model", planned)
    train.FLAGS.unparse_flags()
    train.FLAGS(["train", own, "--cluster=cpu:2", "--schedule=zb_h1", "--micro_batches=2", "--recompute=none"])
    job = train.prepare()
    (call,) = calls
    assert call["batch"] == 32  # by default
    assert (call["schedule"], call["micro_batches"], call["recompute"]) == ("zb_h1", 2, "none")
    assert len(call["x"]) == 32
    assert job.plan.global_batch_size == 32 and job.profile == given.profile()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("wide", "x has shape (?, 5), but the model's input has (?, 4): feed arrays of that shape"),
        ("single", "y is a scalar; each array of a batch needs the batch as its first axis: are the data batched"),
        ("fives", "batches of 5 samples, but the plan's global batch size is 8: batch them by 8, or give"),
    ],
)
def test_data_that_do_not_fit_are_told_before_anything_is_measured(
    data: str,
    message: str,
    own: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dapple_tf.automatic.measured", lambda *_: pytest.fail("the model was measured"))
    folder = f"--output_dir={tmp_path / 'run'}"
    assert run(folder, f"{own}:{data}", "--cluster=cpu:2", "--plan=1:1", "--global_batch_size=8") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flag", "in_files", "on_cluster", "seeded", "on_workers"),
    [
        ((), True, True, True, True),
        ((), True, False, True, False),
        ((), False, True, True, False),
        (("--nodata_on_workers",), True, True, True, False),
        (("--data_on_workers",), False, False, True, True),
        ((), True, True, False, False),
    ],
    ids=["files_on_a_cluster", "local", "generated", "switched_off", "asked_for", "unseeded"],
)
def test_workers_of_a_cluster_read_files(
    flag: tuple[str, ...], in_files: bool, on_cluster: bool, seeded: bool, on_workers: bool
) -> None:
    data = DataSource("own", "numbers", lambda model, batch_size, seed: None, in_files=in_files)
    addresses = ("10.0.0.1:2222",) if on_cluster else ()
    cluster = dataclasses.replace(dapple.Cluster.local(1, kind="cpu"), addresses=addresses)
    job = train.Job(keras.Model(), data, cluster, dapple.Plan.manual([], [[0]], 1, 5), None)
    dataset = tf.data.Dataset.range(10).batch(5)
    if not seeded:
        dataset = dataset.map(lambda n: n + tf.random.uniform([], maxval=9, dtype=tf.int64))
    train.FLAGS(["train", *flag])
    try:
        read = train.where_read(job, dataset)
    finally:
        train.FLAGS.unparse_flags()
        train.FLAGS["data_on_workers"].unparse()
    assert isinstance(read, dapple.OnWorkers) == on_workers


def test_a_learning_rate_for_an_optimizer_with_a_schedule_of_its_own() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    train.set_learning_rate(model, 0.5)
    assert float(model.optimizer.learning_rate) == 0.5
    model.optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    with pytest.raises(train.app.UsageError, match=r"--learning_rate=0\.5"):
        train.set_learning_rate(model, 0.5)


def test_the_end_of_a_run(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plan.json").touch()
    numbers = {
        "model": "own",
        "epochs": 2,
        "training_seconds": 12.3,
        "samples_per_second": 1234.5,
        "metrics": {"loss": 0.5, "mae": 0.1, "val_loss": 0.75},
        "step_ms": 10.0,
        "predicted_step_ms": 9.0,
        "prediction_error": -0.1,
        "faults": 1,
    }
    assert train.closing(numbers, tmp_path).splitlines() == [
        "Trained own for 2 epochs in 12 s, 1,234 samples/s; loss 0.5, val_loss 0.75",
        "A step took 10 ms; 9 ms were predicted (-10.0%)",
        "Training went on after 1 lost worker",
        f"Everything is in {tmp_path}:",
        "  plan.json",
    ]


def test_step_times_are_between_ends_but_not_between_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 2.5, 10.0, 10.25])
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: next(clock))
    times = step_times.StepTimes()
    for epoch, batches in enumerate((3, 2)):
        times.on_epoch_begin(epoch)
        for batch in range(batches):
            times.on_train_batch_end(batch)
    assert times.seconds == [0.5, 1.0, 0.25]
    record = step_times.StepSummary.of([0.4, 0.1, 0.2, 0.3, 0.5]).record(6)
    quartiles = {"lower_quartile_ms": 200, "step_ms": 300, "upper_quartile_ms": 400}
    assert record == pytest.approx({"steps": 5, **quartiles, "fastest_ms": 100, "samples_per_second": 20})


# ---- train_gpt


def test_a_byte_level_gpt_learns_and_is_saved(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--depth=1", "--width=16", "--heads=1", "--sequence=16", "--validation_steps=1", "--evaluation_steps=2"]
    small += ["--plan=1:1", "--global_batch_size=16", "--epochs=2", "--steps=20", "--sample_bytes=5"]
    folder = tmp_path / "run"
    assert command.run(train_gpt.main, train_gpt.FLAGS, [*small, f"--output_dir={folder}"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert "What it writes at temperature 0.8:\n\ndef " in printed
    assert f"Bits per byte on held-out files: {summary['held_out_bits_per_byte']:.3f}" in printed
    with (folder / "history.csv").open() as file:
        losses = [float(epoch["loss"]) for epoch in csv.DictReader(file)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert summary["bytes_trained_on"] == 2 * 20 * 16 * 16
    model = keras.saving.load_model(folder / "model.keras")
    assert model.count_params() == summary["parameters"] and int(model.optimizer.iterations) == 40
    assert any((folder / "dump").iterdir())
    assert str(dapple.Plan.load(folder / "plan.json")) in printed
