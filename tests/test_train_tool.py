"""The tool that trains: a run from beginning to end, and what is said of mistakes."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
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
from dapple_tf.models.registry import find_model
from dapple_tf.models.sources import DataSource
from dapple_tf.tools import command, train


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


@pytest.mark.slow
def test_a_run(own: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    flags = [own, "--plan=1:1", "--cluster=cpu:2", "--nomeasure", "--steps=8", f"--output_dir={out}"]
    flags += ["--global_batch_size=8", "--micro_batches=2", f"--checkpoint_dir={checkpoints}", "--learning_rate=0.05"]
    assert run(*flags, "--epochs=2", "--verify") == 0
    printed = capsys.readouterr().out
    plan = dapple.Plan.load(out / "plan.json")
    assert (plan.replicas, plan.micro_batches, plan.global_batch_size) == ((1, 1), 2, 8)
    assert str(plan) in printed
    assert "own: 130 parameters, on generated" not in printed  # 4*8+8 + 2*(8*8+8) + 8*2+2 = 202
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


@pytest.mark.slow
def test_only_steps_are_measured(own: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    flags = [own, "--plan=1:1", "--cluster=cpu:2", "--nomeasure", "--global_batch_size=8", "--micro_batches=2"]
    assert run(*flags, "--benchmark_steps=5", f"--output_dir={out}") == 0
    assert {path.name for path in out.iterdir()} == {"plan.json", "cluster.json", "benchmark.json", "step"}
    record = json.loads((out / "benchmark.json").read_text())
    assert record["steps"] == 5 and record["global_batch_size"] == 8 and record["devices"] == 2
    assert 0 < record["fastest_ms"] <= record["lower_quartile_ms"] <= record["step_ms"] <= record["upper_quartile_ms"]
    assert record["samples_per_second"] == pytest.approx(8e3 / record["step_ms"])
    assert record["predicted_step_ms"] is None  # --nomeasure
    assert record["machine"]["cores"] >= 1
    assert record["command"].startswith("python -m tools.train --") and "--benchmark_steps=5" in record["command"]
    assert "--epochs" not in record["command"]
    printed = capsys.readouterr().out
    assert "Measured 5 steps of own, " in printed and "benchmark.json  step times" in printed


@pytest.mark.thorough
@pytest.mark.slow
def test_measured_and_planned(own: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With nothing but a batch size: the model is measured and planned, and the prediction compared."""
    out = tmp_path / "run"
    assert run(own, "--global_batch_size=8", "--cluster=cpu:2", "--steps=12", f"--output_dir={out}") == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["predicted_step_ms"] > 0 and summary["step_ms"] > 0
    profile = dapple.Profile.load(out / "profile.json")
    cluster = dapple.Cluster.load(out / "cluster.json")
    plan = dapple.Plan.load(out / "plan.json")
    expected = dapple.simulate(plan, profile, cluster).latency
    assert summary["predicted_step_ms"] == pytest.approx(1e3 * expected)
    assert "were predicted (" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
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
    assert "operators.txt where each operator runs" in printed

    # A plan's file that places operators needs no flag; stages of several devices place theirs.
    assert run(*flags, f"--plan={out / 'plan.json'}", "--nomeasure") == 0
    assert dapple.OperatorCosts.load(tmp_path / "run-2" / "operator_costs.json").count == 0
    assert run(*flags, "--placement=fd_dps", "--plan=1:1", "--nomeasure", "--micro_batches=2") == 0
    assert dapple.Plan.load(tmp_path / "run-3" / "plan.json").operator_devices == (((0,),), ((1,),))
    assert "stage 1 on devices 1: " in (tmp_path / "run-3" / "operators.txt").read_text()


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
    ("flag", "in_files", "addresses", "on_workers"),
    [
        ((), True, ("10.0.0.1:2222",), True),
        ((), True, (), False),
        ((), False, ("10.0.0.1:2222",), False),
        (("--nodata_on_workers",), True, ("10.0.0.1:2222",), False),
        (("--data_on_workers",), False, (), True),
    ],
    ids=["files_on_a_cluster", "local", "generated", "switched_off", "asked_for"],
)
def test_workers_of_a_cluster_read_files(
    flag: tuple[str, ...], in_files: bool, addresses: tuple[str, ...], on_workers: bool
) -> None:
    data = DataSource("own", "numbers", lambda model, batch_size, seed: None, in_files=in_files)
    cluster = dataclasses.replace(dapple.Cluster.local(1, kind="cpu"), addresses=addresses)
    job = train.Job(keras.Model(), data, cluster, dapple.Plan.manual([], [[0]], 1, 5), None)
    train.FLAGS(["train", *flag])
    try:
        read = train.where_read(job, tf.data.Dataset.range(10).batch(5))
    finally:
        train.FLAGS.unparse_flags()
        train.FLAGS["data_on_workers"].unparse()
    assert isinstance(read, dapple.OnWorkers) == on_workers


def test_what_workers_cannot_read_the_client_reads(capsys: pytest.CaptureFixture[str]) -> None:
    data = DataSource("own", "numbers", lambda model, batch_size, seed: None, in_files=True)
    cluster = dataclasses.replace(dapple.Cluster.local(1, kind="cpu"), addresses=("10.0.0.1:2222",))
    job = train.Job(keras.Model(), data, cluster, dapple.Plan.manual([], [[0]], 1, 5), None)
    shuffled = tf.data.Dataset.range(10).batch(5).map(lambda n: n + tf.random.uniform([], maxval=9, dtype=tf.int64))
    train.FLAGS(["train"])
    assert train.where_read(job, shuffled) is shuffled
    assert "This process reads the data: this dataset can't be read on workers" in capsys.readouterr().out


def test_a_learning_rate_for_an_optimizer_with_a_schedule_of_its_own() -> None:
    model = find_model("vgg:tiny").build()
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
    numbers |= {"step_ms": None, "samples_per_second": None, "metrics": {}, "faults": 0, "epochs": 1}
    assert train.closing(numbers, tmp_path).splitlines()[:2] == [
        "Trained own for 1 epoch in 12 s",
        f"Everything is in {tmp_path}:",
    ]
