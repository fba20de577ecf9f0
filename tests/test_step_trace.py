"""Measured steps: every task once, where and when it ran, from traces of real steps of small models."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from models_for_tests import classifier, plan, samples

import dapple_tf as dapple
from dapple_tf.clusters.clocks import Offset, WorkerClock
from dapple_tf.frontend.capture import Mode
from dapple_tf.tracing.step_parts import StepParts, step_parts
from dapple_tf.tracing.step_trace import MeasuredStep, TracedDevice, TracedStep, measured, traced_devices
from dapple_tf.view.timeline import Span, Timeline
from graph_passes.ir.program import Step
from graph_passes.ir.tasks import Phase, Task

TASKS = {phase.value: phase for phase in Phase}


def run(
    pipelined: dapple.PipelinedModel, count: int = 7, mode: Mode = Mode.TRAIN
) -> tuple[MeasuredStep, TracedStep, Step]:
    """A traced step, after another one."""
    x, y, _ = samples(count)
    batch = pipelined._one_batch(mode, (x, y, None))
    for _ in range(2):
        traced = pipelined._runtime.run(mode, batch, trace=True).traced
    assert traced is not None
    steps = [step for built in pipelined._engine.builder.builds.values() for step in built.steps.values()]
    step = next(own.step for own in steps if own.name == traced.prefix)
    return pipelined._engine.measured(traced), traced, step


def tasks_of(step: Timeline) -> dict[Task, Span]:
    spans = {}
    for span in step.spans:
        if span.kind in TASKS:
            task = Task(span.stage, TASKS[span.kind], span.micro_batch, span.replica)
            assert task not in spans
            spans[task] = span
    return spans


def assert_whole(measured_step: MeasuredStep, traced: TracedStep, step: Step, own_plan: dapple.Plan) -> None:
    """What holds of every measured step."""
    timeline = measured_step.timeline
    assert timeline.name == "measured"
    assert timeline.samples == step.layout.batch
    assert 0 < timeline.latency <= (traced.called[1] - traced.called[0]) / 1e9
    assert all(0 <= span.start <= span.end <= timeline.latency for span in timeline.spans)
    tasks = tasks_of(timeline)
    assert set(tasks) == set(step.entry) == set(measured_step.tasks)
    assert step.schedule is not None
    for device, order in step.schedule.orders.items():
        assert all(tasks[task].device == device for task in order)
        starts = [tasks[task].start for task in order]
        assert starts == sorted(starts)
    for task, seconds in measured_step.tasks.items():
        assert seconds >= tasks[task].end - tasks[task].start - 1e-9
    assert set(measured_step.parts) == set(timeline.devices) == set(own_plan.device_labels())
    for device, parts in measured_step.parts.items():
        assert parts.total == pytest.approx(timeline.latency)
        assert min(dataclasses.astuple(parts)) >= 0
        assert 0 <= timeline.bubbles[device] <= 1
        busy = parts.forward + parts.backward + parts.accumulate + parts.apply
        assert busy == pytest.approx(timeline.busy[device])
    for span in timeline.spans:
        if span.kind == "send":
            assert span.device != span.target and span.target in timeline.devices
    assert set(timeline.memory) == set(timeline.devices)
    for device, curve in timeline.memory.items():
        assert curve[0] == (0.0, traced.stored[device])
        assert timeline.peak_bytes[device] >= traced.stored[device]
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)


def kinds(timeline: Timeline, kind: str) -> list[Span]:
    return [span for span in timeline.spans if span.kind == kind]


@pytest.fixture
def pipeline() -> Iterator[Any]:
    """Makes pipelined models that are closed in the end."""
    made = []

    def make(**changes: Any) -> dapple.PipelinedModel:
        options = {"optimizer": changes.pop("optimizer")} if "optimizer" in changes else {}
        model = classifier(metrics=["accuracy"], **options)
        made.append(dapple.transform(model, dapple.Cluster.local(4, kind="cpu"), plan(**changes)))
        return made[-1]

    yield make
    for pipelined in made:
        pipelined.close()


class Run(NamedTuple):
    """A model and its traced step."""

    pipelined: dapple.PipelinedModel
    found: MeasuredStep
    traced: TracedStep
    step: Step


@pytest.fixture(scope="module")
def uneven() -> Iterator[Run]:
    """Three replicas and one, for all tests that only read what was measured."""
    keras.utils.set_random_seed(0)
    model = classifier(metrics=["accuracy"])
    pipelined = dapple.transform(model, dapple.Cluster.local(4, kind="cpu"), plan(**SHAPES["3:1"]))
    yield Run(pipelined, *run(pipelined))
    pipelined.close()


SHAPES: dict[str, dict[str, Any]] = {
    "3:1": {"devices": [[0, 1, 2], [3]]},
    "zb_h1": {"cuts": ["first", "second"], "devices": [[0], [1], [2]], "micro_batches": 3, "schedule": "zb_h1"},
    "carried": {
        "cuts": ["first", "second"], "devices": [[0, 1]] * 3, "micro_batches": 1, "reverse_first_k": 1,
        "carried_updates": 1,
    },
}  # fmt: skip


# Replicas, split backwards, several stages on a device with updates carried over: all kinds of spans.
@pytest.mark.parametrize("shape", SHAPES)
def test_every_task_once_on_its_device_in_the_order_of_the_schedule(pipeline: Any, uneven: Run, shape: str) -> None:
    pipelined = uneven.pipelined if shape == "3:1" else pipeline(**SHAPES[shape])
    measured_step, traced, step = uneven[1:] if shape == "3:1" else run(pipelined)
    assert_whole(measured_step, traced, step, pipelined.plan)
    assert measured_step.remarks == () and measured_step.shifts == {}
    assert {span.device for span in kinds(measured_step.timeline, "apply")} == {
        device for devices in pipelined.plan.devices for device in devices
    }


def test_gradients_are_accumulated_after_each_backward(uneven: Run) -> None:
    measured_step = uneven.found
    tasks = tasks_of(measured_step.timeline)
    added = [span for span in kinds(measured_step.timeline, "accumulate") if span.micro_batch is not None]
    packed = [span for span in kinds(measured_step.timeline, "accumulate") if span.micro_batch is None]
    backwards = {task: span for task, span in tasks.items() if task.phase is Phase.BACKWARD}
    assert len(added) == len(backwards)
    for span in added:
        task = Task(span.stage, Phase.BACKWARD, span.micro_batch or 0, span.replica)
        assert span.start >= backwards[task].end
        assert measured_step.tasks[task] == pytest.approx(span.end - backwards[task].start)
    assert sorted(span.device for span in packed) == [0, 1, 2]


def test_transfers_have_their_ends_and_bytes(pipeline: Any) -> None:
    """7 samples of 6 floats: micro-batches of 4 and 3, for replicas of 2 and 2, of 2 and 1."""
    measured_step, _, _ = run(pipeline())
    tasks = tasks_of(measured_step.timeline)
    sends = {(s.stage, s.micro_batch, s.replica, s.device, s.target): s for s in kinds(measured_step.timeline, "send")}
    forward = {key: send for key, send in sends.items() if key[0] == 0}
    assert {key: send.bytes for key, send in forward.items()} == {
        (0, 0, 0, 0, 1): 48, (0, 0, 0, 0, 2): 48, (0, 1, 0, 0, 1): 48, (0, 1, 0, 0, 2): 24,
    }  # fmt: skip
    backward = {key: send.bytes for key, send in sends.items() if key[0] == 1 and key[4] == 0}
    assert backward == {(1, 0, 0, 1, 0): 48, (1, 0, 1, 2, 0): 48, (1, 1, 0, 1, 0): 48, (1, 1, 1, 2, 0): 24}
    for (_, micro_batch, _, _, target), send in forward.items():
        assert send.start >= tasks[Task(0, Phase.FORWARD, micro_batch)].end
        assert send.end <= tasks[Task(1, Phase.FORWARD, micro_batch, target - 1)].start


def test_the_first_accumulation_of_each_replica_frees_the_gradients_of_the_step_before(uneven: Run) -> None:
    freed = uneven.traced.replaced
    stages = {node: task.stage for task, nodes in uneven.step.exit.items() if task.micro_batch == 0 for node in nodes}
    assert Counter(stages[node] for node in freed) == Counter(dict(enumerate(uneven.pipelined.plan.replicas)))
    parameters = sum(4 * int(np.prod(v.shape)) for v in uneven.pipelined.model.trainable_variables)
    assert sum({stages[node]: size for node, size in freed.items()}.values()) == parameters


# ---- clocks


def skewed(traced: TracedStep, skews: dict[str, int], error: int) -> tuple[TracedStep, dict[str, TracedDevice]]:
    """The same step as of workers, one for each device, whose clocks are ahead by so many nanoseconds."""
    stats = copy.deepcopy(traced.stats)
    for own in stats.dev_stats:
        skew = skews[own.device]
        for node in own.node_stats:
            for kind in ("all_start", "scheduled"):
                nanos = (getattr(node, f"{kind}_nanos") or 1000 * getattr(node, f"{kind}_micros")) + skew
                setattr(node, f"{kind}_nanos", nanos)
                setattr(node, f"{kind}_micros", nanos // 1000)
            for memory in node.memory:
                for record in memory.allocation_records:
                    record.alloc_micros += skew // 1000
    devices = {device: TracedDevice(number, number) for number, device in enumerate(sorted(skews))}
    clocks = {}
    for device, own in devices.items():
        offsets = [
            Offset(at, skews[device] + sign * error, error) for at, sign in zip(traced.called, (1, 1), strict=True)
        ]
        clocks[own.worker] = WorkerClock(*offsets)
    return dataclasses.replace(traced, stats=stats, clocks=clocks), devices


def test_skewed_clocks_change_nothing_but_within_their_error(uneven: Run) -> None:
    error = 200_000
    pipelined, plain, traced, _ = uneven
    labels = pipelined.plan.device_labels()
    names = pipelined.cluster.device_names
    skews = dict(zip(names, (3_000_000_000, -2_500_000_000, 7_000, 86_400_000_000_000), strict=True))
    given, devices = skewed(traced, skews, error)
    measured_step = measured(given, devices, labels, {})
    assert measured_step.remarks == ()
    own, its = tasks_of(plain.timeline), tasks_of(measured_step.timeline)
    assert set(own) == set(its)
    for task, span in own.items():
        assert its[task].start == pytest.approx(span.start, abs=2.1 * error / 1e9 + 2e-6)
    for device in labels:
        assert measured_step.timeline.peak_bytes[device] == pytest.approx(plain.timeline.peak_bytes[device])
    for worker, shift in measured_step.shifts.items():
        assert abs(shift) <= given.clocks[worker].error + 1e-9
    for task, span in its.items():  # Whatever the clocks' error: no stage begins before the one before it has ended.
        if task.phase is Phase.FORWARD and task.stage == 1:
            senders = [its[other] for other in its if (other.stage, other.phase) == (0, Phase.FORWARD)]
            arrived = [other.end for other in senders if other.micro_batch == task.micro_batch]
            assert span.start >= max(arrived) - 2e-6


def test_a_contradiction_is_told(uneven: Run, caplog: pytest.LogCaptureFixture) -> None:
    pipelined, _, traced, _ = uneven
    names = pipelined.cluster.device_names
    given, devices = skewed(traced, dict.fromkeys(names, 0), 1000)
    off = Offset(traced.called[0], 50_000_000, 1000)
    given = dataclasses.replace(given, clocks={**given.clocks, 3: WorkerClock(off, off._replace(at=traced.called[1]))})
    measured_step = measured(given, devices, pipelined.plan.device_labels(), {})
    assert any("on worker 3 something begins" in remark for remark in measured_step.remarks)
    assert "are clocks being set?" in caplog.text


def on_gpus(traced: TracedStep, delay: int) -> tuple[TracedStep, dict[str, tuple[int, int]]]:
    """The same step as GPUs report it, and node -> microseconds in which its kernels run, some time after their launch.

    Each call and update launches two kernels, named by an operator inside.
    """
    stats, kernels, nodes = copy.deepcopy(traced.stats), {}, {}
    for own in [*stats.dev_stats]:
        own.device = own.device.replace("CPU", "GPU")
        gpu = "/device:" + own.device.rpartition("device:")[2]
        lists = {key: stats.dev_stats.add(device=gpu + key).node_stats for key in ("/stream:14", "/stream:all")}
        stats.dev_stats.add(device=gpu + "/sync").node_stats.add(node_name="cuStreamSynchronize")
        free = 0
        for node in sorted(own.node_stats, key=lambda node: node.all_start_nanos):
            name = node.node_name.removeprefix(f"{traced.prefix}/")
            if name not in traced.nodes or traced.nodes[name].kind not in (*TASKS, "apply"):
                continue
            for launched in (
                node.all_start_nanos // 1000,
                (node.all_start_nanos + node.all_end_rel_nanos // 2) // 1000,
            ):
                start, free = max(free, launched + delay), max(free, launched + delay) + 300
                kernels[name] = kernels.get(name, (start, 0))[0], free
                times = {"all_start_micros": start, "op_end_rel_micros": 300, "all_end_rel_micros": 300}
                for records in lists.values():
                    records.add(node_name=f"{node.node_name}:MatMul", scheduled_micros=launched, **times)
    for name, node in traced.nodes.items():
        nodes[name] = node._replace(device=node.device.replace("CPU", "GPU"))
    return dataclasses.replace(traced, stats=stats, nodes=nodes), kernels


def test_a_task_on_a_gpu_takes_as_long_as_its_kernels(uneven: Run) -> None:
    """Times were those of launching kernels; a kernel's record with a node's name replaced the node's run."""
    pipelined, plain, traced, _ = uneven
    given, kernels = on_gpus(traced, 50_000)
    devices = {name.replace("CPU", "GPU"): own for name, own in traced_devices(pipelined.cluster).items()}
    labels = pipelined.plan.device_labels()
    step = measured(given, devices, labels, {})
    assert step.remarks == () and step.timeline.name == "measured" and not step.launches
    assert step.timeline.peak_bytes == plain.timeline.peak_bytes
    assert set(tasks_of(step.timeline)) == set(tasks_of(plain.timeline))
    ends = {(span.kind, span.start): span.end for span in step.timeline.spans}
    for name, (start, end) in kernels.items():
        begun, ended = (max(0.0, (1000 * at - traced.called[0]) / 1e9) for at in (start, end))
        node = traced.nodes[name]
        with_metrics = (node.kind, node.stage) == ("F", 1)
        assert ends[node.kind, begun] > ended if with_metrics else ends[node.kind, begun] == ended, name
    for task, seconds in step.tasks.items():  # From its first kernel on, and accumulation follows its last one.
        assert 600e-6 <= seconds < plain.tasks[task] + 50e-3


def test_without_kernels_that_surely_belong_to_a_gpu_nothing_is_said_of_its_times(uneven: Run) -> None:
    pipelined, plain, traced, _ = uneven
    given, _ = on_gpus(traced, 50_000)
    devices = {name.replace("CPU", "GPU"): own for name, own in traced_devices(pipelined.cluster).items()}
    for own in [*given.stats.dev_stats]:
        if own.device.endswith("GPU:1/stream:all"):
            own.node_stats[0].scheduled_micros -= 10**9  # another clock
    step = measured(given, devices, pipelined.plan.device_labels(), {})
    assert step.launches and step.timeline.name == "launches" and not step.timeline.bubbles
    assert "times on GPUs are those of launching kernels" in step.remarks[0]
    assert step.timeline.spans == plain.timeline.spans and step.timeline.peak_bytes == plain.timeline.peak_bytes


def test_each_worker_of_a_server_has_a_clock_of_its_own() -> None:
    """Where several workers are one server, times were aligned by the clock of the worker of that server's number."""
    addresses = [f"10.0.0.{own // 2 + 1}:{2222 + own % 2}" for own in range(4)]
    cluster = dapple.Cluster.of_servers(addresses, devices_per_server=2).with_workers_per_server(2)
    devices = traced_devices(cluster)
    assert [devices[name].number for name in cluster.device_names] == list(range(8))
    assert [devices[name].worker for name in cluster.device_names] == [0, 0, 1, 1, 2, 2, 3, 3]


# ---- parts


def test_parts_are_told_apart() -> None:
    given = [("forward", (1.0, 2.0)), ("backward", (4.0, 6.0)), ("transfers", (3.0, 4.0)), ("all_reduce", (5.5, 7.0))]
    assert step_parts(given, (1.0, 8.0), 10.0) == StepParts(
        forward=1.0, backward=2.0, all_reduce=1.0, transfers=1.0, bubble=2.0, before=1.0, after=2.0
    )
