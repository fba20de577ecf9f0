"""Monitoring: metrics in Keras' logs and for TensorBoard, what tracing costs, and stages off their prediction."""

from __future__ import annotations

import csv
import dataclasses
import logging
import math
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import classifier, plan, samples, transform
from profiles_for_tests import MS, measured_as, profile_of

import dapple_tf as dapple
from dapple_tf.describe.devices import Server
from dapple_tf.planning.replanning import Deployment
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tracing.monitoring import PipelineMonitor, StepMonitor, TraceBudget, step_metrics, tag
from dapple_tf.tracing.stage_drift import StageDrift
from dapple_tf.tracing.step_profile import simulated_tasks
from dapple_tf.view.timeline import LAUNCHES
from graph_passes.ir.tasks import Task

CLUSTER = dapple.Cluster.local(3, kind="cpu")
PROFILE = profile_of((1, 2), (3, 6), (0.5, 1))
PARTS = ("forward", "backward", "accumulate", "apply", "all_reduce", "transfers", "bubble", "host")
NAMES = {
    "samples_per_second", "step_ms", "input_ms", *(f"{part}_ms" for part in PARTS),
    "bubble_stage_0", "bubble_stage_1", "peak_mib_stage_0", "peak_mib_stage_1",
}  # fmt: skip


# ---- what tracing costs


@pytest.mark.parametrize(("step", "cost", "share"), [(0.002, 0.05, 0.01), (1.0, 0.2, 0.05)])
def test_tracing_stays_within_its_budget(step: float, cost: float, share: float) -> None:
    budget = TraceBudget(share)
    for number in range(1, 20_001):
        due = budget.due
        if due:
            budget.traced(cost)
        budget.step(step + cost * due)
        if budget.traces > 1:
            assert budget.spent <= share * budget.trained + 1e-9, number
    assert budget.spent == pytest.approx(cost * budget.traces)
    most = share * budget.trained / cost
    assert most - 2 <= budget.traces <= max(1, most)


def test_a_trace_costs_what_its_step_took_longer_than_others() -> None:
    own = plan(devices=[[0, 1], [2]])
    monitor = PipelineMonitor(budget=0.5)
    monitor.attach()
    step = measured_as(simulate(own, PROFILE, CLUSTER))
    for seconds in (9.0, 5.0, 0.2, 0.3, 0.1):  # The first two make graphs.
        monitor.stepped(7, seconds, 0.05)
    assert set(monitor.latest) == {"samples_per_second", "input_ms"}  # Others stood in Keras' bar as nan.
    monitor.sampled(step, 0.2, own, 6)
    monitor.stepped(7, 0.9, 0.05)
    assert monitor.budget.traces == 1
    assert monitor.budget.spent == pytest.approx(0.7)
    assert monitor.latest["samples_per_second"] == pytest.approx(35.0)  # of the others
    assert monitor.latest["input_ms"] == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": 0}, "budget is 0"),
        ({"budget": math.nan}, "budget is nan"),
        ({"tokens_per_sample": 0}, "sample is 0"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PipelineMonitor(**options)


# ---- metrics


def test_metrics_are_those_of_a_step_without_tracing() -> None:
    own = plan(devices=[[0, 1], [2]])
    simulation = simulate(own, PROFILE, CLUSTER)
    step = measured_as(simulation, host=1 * MS)
    working = step.timeline.latency - 2 * MS
    metrics = step_metrics(step, working / 2 + 1 * MS, own)
    assert {"samples_per_second", "input_ms", *metrics} == NAMES
    assert sum(metrics[f"{part}_ms"] for part in PARTS) == pytest.approx(metrics["step_ms"])
    assert metrics["forward_ms"] == pytest.approx(1000 * sum(p.forward for p in step.parts.values()) / 3 / 2)
    assert metrics["host_ms"] == pytest.approx(1.0)
    busy = step.parts[2].forward + step.parts[2].backward
    assert metrics["bubble_stage_1"] == pytest.approx(1 - busy / 2 / (working / 2 + 1 * MS))
    assert metrics["peak_mib_stage_1"] == pytest.approx(simulation.peak_bytes[2] / 2**20)


class Seen(keras.callbacks.Callback):
    """What a callback gets after each step and epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(dict(logs))


def test_all_callbacks_and_tensorboard_see_the_metrics_whatever_their_order(tmp_path: pathlib.Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pipelined = transform(classifier(metrics=["accuracy"]))
    x, y, _ = samples(35)
    before, after = Seen(), Seen()
    monitor = PipelineMonitor(tmp_path / "pipeline", budget=1.0, tokens_per_sample=4)
    table = tmp_path / "log.csv"
    callbacks = [before, keras.callbacks.CSVLogger(table), monitor, after]
    history = pipelined.fit(x, y, epochs=2, verbose=0, callbacks=callbacks, validation_data=(x[:7], y[:7])).history
    wanted = {*NAMES, "tokens_per_second", "loss", "accuracy"}
    for seen in (before, after):
        assert all(set(logs) == wanted for logs in seen.batches[4:])
        assert all(set(logs) == {*wanted, "val_loss", "val_accuracy"} for logs in seen.epochs)
    assert set(history) == {*wanted, "val_loss", "val_accuracy"}
    assert before.epochs == after.epochs
    assert all(np.isfinite(values).all() for values in history.values())
    assert "step_ms" not in before.batches[3] and "step_ms" in before.batches[4]  # The fifth step is traced.
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert set(rows[0]) == {"epoch", *history}
    assert [float(row["bubble_stage_1"]) for row in rows] == pytest.approx(history["bubble_stage_1"])
    assert history["tokens_per_second"] == pytest.approx([4 * rate for rate in history["samples_per_second"]])
    assert all(0 <= bubble <= 1 for stage in (0, 1) for bubble in history[f"bubble_stage_{stage}"])
    assert monitor.budget.traces >= 1 and monitor.budget.steps == 10
    assert set(pipelined.fit(x, y, verbose=0).history) == {"loss", "accuracy"}
    events = EventAccumulator(str(tmp_path / "pipeline"), size_guidance={"tensors": 0})
    events.Reload()
    assert set(events.Tags()["tensors"]) == {tag(name) for name in (*NAMES, "tokens_per_second")}
    recorded = events.Tensors("step_ms/whole")
    assert len(recorded) == monitor.budget.traces
    assert all(np.isfinite(tf.make_ndarray(event.tensor_proto)) for event in recorded)
    assert recorded[0].step == 5


def test_it_belongs_to_pipelined_training() -> None:
    x, y, _ = samples(7)
    with pytest.raises(ValueError, match="measures pipelined training"):
        classifier().fit(x, y, verbose=0, callbacks=[PipelineMonitor()])
    with pytest.raises(ValueError, match="got 2 PipelineMonitors"):
        transform(classifier()).fit(x, y, verbose=0, callbacks=[PipelineMonitor(), PipelineMonitor()])


# ---- predictions


def drift() -> tuple[StageDrift, dict[Task, float]]:
    simulation = simulate(plan(devices=[[0, 1], [2]]), PROFILE, CLUSTER)
    return StageDrift(simulation), simulated_tasks(simulation)


def slower(tasks: dict[Task, float], factors: dict[int, float]) -> dict[Task, float]:
    return {task: seconds * factors.get(task.stage, 1.0) for task, seconds in tasks.items()}


def test_a_stage_that_is_off_twice_in_a_row_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch, tasks = drift()
    assert watch.check(slower(tasks, {1: 1.3})) == []
    assert watch.suspected == {1}
    (warning,) = watch.check(slower(tasks, {1: 1.3}))
    assert warning == (
        "stage 1 takes 47.8 ms for a micro-batch, 30% more than the 36.8 ms that were predicted: profile the model "
        "again (dapple.profile(..., cache=False)) and make a new plan"
    )
    assert [record.getMessage() for record in caplog.records] == [warning]
    assert watch.off == {1} and not watch.suspected
    assert watch.check(slower(tasks, {1: 1.3})) == []
    assert watch.check(tasks) == [] and not watch.off
    assert watch.check(slower(tasks, {1: 0.7})) == []
    assert "30% less" in watch.check(slower(tasks, {0: 1.1, 1: 0.7}))[0]


def test_the_profile_is_not_blamed_where_devices_share_cores(caplog: pytest.LogCaptureFixture) -> None:
    cluster = dataclasses.replace(CLUSTER, servers=(Server(capacity=2.0),))
    simulation = simulate(plan(devices=[[0, 1], [2]]), PROFILE, cluster)
    watch, tasks = StageDrift(simulation), simulated_tasks(simulation)
    caplog.set_level(logging.INFO, "dapple_tf")
    for _ in range(2):
        assert watch.check(slower_replica(slower(tasks, {1: 1.3}), 1, 2.0)) == []
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.getMessage().endswith("were predicted: its devices share cores")


def slower_replica(tasks: dict[Task, float], replica: int, factor: float) -> dict[Task, float]:
    return {task: seconds * (factor if task.replica == replica else 1.0) for task, seconds in tasks.items()}


def unlike_drift(speeds: tuple[float, float], shares: Any) -> tuple[StageDrift, dict[Task, float]]:
    """Data parallelism on two devices, as simulated."""
    devices = tuple(dapple.Device(f"d{index}", 0, speed=speed) for index, speed in enumerate(speeds))
    own = dapple.Plan.data_parallel(2, 48, shares=shares)
    simulation = simulate(own, PROFILE, dapple.Cluster(devices, real=False))
    return StageDrift(simulation), simulated_tasks(simulation)


def test_a_slow_replica_is_told_with_the_speed_that_was_seen_and_the_gain_of_a_new_plan() -> None:
    watch, tasks = unlike_drift((1.0, 1.0), None)
    assert watch.check(slower_replica(tasks, 1, 2.0)) == []
    assert watch.suspects and watch.suspected_devices == {1}
    seen, advice = watch.check(slower_replica(tasks, 1, 2.0))
    assert seen == ("device 1 computes at speed 0.5, where 1 was expected: its tasks take 2 times as long as predicted")
    # 48 samples of 13.5 ms: 24 at half the speed, or in proportion at 1.5 together.
    assert advice == (
        "at the speeds that were seen, this plan takes 648 ms; a new plan takes 432 ms, 33% less (data parallel on 2, "
        "1 micro-batch, unequal shares): measure speeds again (dapple.measure_speeds(cluster, model, "
        "each_server=True)) and plan for them"
    )
    assert watch.off_devices == {1} and not watch.suspects
    assert watch.check(slower_replica(tasks, 1, 2.0)) == []
    assert watch.check(tasks) == [] and not watch.off_devices


def test_without_a_callback_the_tenth_step_is_traced_and_one_more_to_be_sure() -> None:
    simulation = simulate(plan(devices=[[0, 1], [2]]), PROFILE, CLUSTER)
    monitor = StepMonitor()
    monitor.expect(simulation)
    traced = []
    for number in range(1, 31):
        if monitor.due:
            traced.append(number)
            monitor.sampled(measured_as(simulation, {1: 2.0}), plan(devices=[[0, 1], [2]]), number)
        else:
            monitor.stepped(simulation.latency)
    assert traced == [10, 11]
    assert monitor.drift is not None and monitor.drift.off == {1}


def test_launches_are_not_compared_with_the_prediction() -> None:
    """Every stage on GPUs was warned of, and plans were offered for made-up speeds."""
    own = plan(devices=[[0, 1], [2]])
    simulation = simulate(own, PROFILE, CLUSTER)
    monitor = StepMonitor()
    monitor.expect(simulation)
    monitor.callback = PipelineMonitor(budget=1.0)
    step = measured_as(simulation, {0: 0.01, 1: 0.01})
    step = dataclasses.replace(step, timeline=dataclasses.replace(step.timeline, name=LAUNCHES))
    for _ in range(5):
        monitor.stepped(0.1)
    for _ in range(2):
        monitor.sampled(step, own, 3)
    assert monitor.drift is None
    known = set(monitor.callback.latest)
    assert known == {"step_ms", "peak_mib_stage_0", "peak_mib_stage_1"}


def test_a_stage_off_its_prediction_is_warned_of_during_training(caplog: pytest.LogCaptureFixture) -> None:
    pipelined = transform(classifier(), profile=PROFILE)  # which promises far more than these layers take
    x, y, _ = samples(84)
    with caplog.at_level(logging.WARNING, "dapple_tf.tracing.stage_drift"):
        pipelined.fit(x, y, verbose=0)
    told = [record.getMessage() for record in caplog.records if record.name == "dapple_tf.tracing.stage_drift"]
    assert len(told) == 2
    for stage, predicted in ((0, "10.5"), (1, "21")):
        assert f"stage {stage} takes" in told[stage] and f"less than the {predicted} ms" in told[stage]


def test_the_prediction_is_that_of_the_plan_that_runs() -> None:
    """After a fault there was none any more, not even when training had grown back to the plan of before."""
    pipelined = transform(classifier(), profile=PROFILE)
    x, y, _ = samples(7)

    def train(steps: int) -> int | None:
        for _ in range(steps):
            pipelined.train_on_batch(x, y)
        return None if pipelined.prediction is None else len(pipelined.prediction.steps)

    assert train(4) == 1
    full = pipelined._runtime.elastic.deployment
    left = Deployment(dapple.Cluster.local(1, kind="cpu"), dapple.Plan.manual([], [[0]], 1, 7))
    for deployment in (left, full):
        pipelined.sync()
        pipelined._runtime.elastic.restart(deployment)
        expected = simulate(deployment.plan, PROFILE, deployment.cluster).latency
        assert pipelined.prediction is not None and pipelined.prediction.predicted == expected
        assert pipelined.prediction is pipelined.prediction
        assert train(5) == 2  # The first three don't count.
        drift = pipelined._monitor.drift
        assert drift is not None and drift.predicted.keys() == set(range(deployment.plan.num_stages))
