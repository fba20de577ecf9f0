"""The planned timeline against closed forms, drawings of the papers, and an independent run of every policy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hardware import cluster_of, plan_of
from schedule_runs import execute, there_and_back, vee

from dapple_tf.describe.cluster import Cluster, Device, Server
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.schedules.schedules import POLICIES, ScheduleError, make_schedule
from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.timeline import Timeline
from graph_passes.ir.tasks import Schedule

NAMES = [f"layer{index}" for index in range(16)]
STRAIGHT = [policy for policy in POLICIES if not there_and_back(policy)]


def straight(stages: int, micro_batches: int, schedule: str = "dapple_a", **options: Any) -> Plan:
    return plan_of([[stage] for stage in range(stages)], micro_batches, schedule, **options)


def profile(times: Sequence[tuple[float, float]], size: float = 1.0, **layer: Any) -> Profile:
    """Layers that take (forward, backward) seconds for whatever slice, and send so many bytes per sample."""
    layers = [LayerProfile(NAMES[i], Cost(f), Cost(b), **layer) for i, (f, b) in enumerate(times)]
    tensors = [Tensor(i, (i + 1,), Cost(0.0, size)) for i in range(len(times) - 1)]
    return Profile("model", "none", (1, 2), tuple(layers), tuple(tensors))


def tasks(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Each task's start and end."""
    return {
        f"{span.stage}{span.kind}{span.micro_batch}.{span.replica}": (span.start, span.end) for span in timeline.spans
    }


@pytest.mark.parametrize("schedule", ["gpipe", "dapple_a", "dapple_b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (4, 8)])
def test_equal_stages_take_m_plus_s_minus_1_rounds(stages: int, micro_batches: int, schedule: str) -> None:
    timeline = planned(straight(stages, micro_batches, schedule))
    rounds = micro_batches + stages - 1
    assert (timeline.name, timeline.unit, timeline.latency) == ("planned", "F", rounds * 3.0)
    assert list(timeline.bubbles.values()) == pytest.approx([(stages - 1) / rounds] * stages)
    assert timeline.samples == micro_batches and timeline.throughput is None
    assert not timeline.memory and not timeline.limits


def policies() -> list[Any]:
    cases: list[Any] = []
    for policy in STRAIGHT:
        cases += [(policy, [[0], [1], [2], [3]], 6), (policy, [[0, 1, 2], [3]], 4)]
    for policy in ("modulo", "interleaved", "zero_bubble"):
        cases.append((policy, [[0], [1], [0], [1]], 4) if policy != "zero_bubble" else (policy, vee(2), 4))
    cases += [("zb_v", vee(3), 6), ("modulo", [[0, 1], [2], [0, 1]], 4), ("dapple_a", [[0, 1], [0, 1], [2]], 4)]
    return cases


@pytest.mark.parametrize("times", [None, 3])
@pytest.mark.parametrize(("policy", "devices", "micro_batches"), policies(), ids=str)
def test_every_policy_runs_as_in_an_independent_run(
    policy: str, devices: list[list[int]], micro_batches: int, times: int | None
) -> None:
    given = None if times is None else [(1.0 + stage, times + 1.0, 2.0 * stage) for stage in range(len(devices))]
    plan = plan_of(devices, micro_batches, policy, task_seconds=None if given is None else tuple(given))
    timeline = planned(plan)
    expected = execute(plan.order_tasks(), given or [(1.0, 1.0, 1.0)] * len(devices))
    ends = {
        f"{task.stage}{task.phase.value}{task.micro_batch}.{task.replica}": end for task, end in expected.ends.items()
    }
    assert {name: end for name, (_, end) in tasks(timeline).items()} == pytest.approx(ends)
    assert timeline.latency == pytest.approx(expected.makespan)
    assert timeline.busy == pytest.approx(expected.busy)
    assert timeline.unit == ("F" if times is None else "s")
    for span in timeline.spans:
        if span.cause is None:
            assert span.start == 0
        else:
            assert timeline.spans[span.cause].end == span.start


@pytest.mark.parametrize("recompute", ["boundary", "min_cut"])
def test_given_times_are_of_tasks_with_what_they_recompute(recompute: str) -> None:
    """A planner's `task_seconds` have it in them, so that it isn't counted twice."""
    plain = straight(3, 4, task_seconds=((1.0, 2.0, 1.0),) * 3)
    again = dataclasses.replace(plain, recompute=recompute)
    assert planned(again).spans == planned(plain).spans
    again = dataclasses.replace(again, task_seconds=None)
    assert planned(again).spans == planned(straight(3, 4)).spans


def test_a_profile_gives_times_updates_and_memory_and_links_cost_nothing() -> None:
    model = profile([(1.0, 2.0), (2.0, 3.0)], 9.0, parameter_bytes=1000, apply_seconds=0.5, residual_bytes=Cost(64.0))
    model = dataclasses.replace(model, step_seconds=7.0)
    plan = plan_of([[0, 1], [2]], 3)
    links = {"inter_bandwidth": 1.0, "intra_bandwidth": 1.0, "inter_latency": 3.0}
    cluster = cluster_of(2, 1, memory=2**20, servers=(Server(capacity=1.0), Server()), **links)
    timeline = planned(plan, model, cluster)
    assert timeline.unit == "s" and timeline.samples == 6 and timeline.throughput is not None
    assert {span.kind for span in timeline.spans} == {"F", "B", "apply"}
    assert timeline.latency == 1 + 3 * 5 + 2 + 0.5
    assert timeline.limits == {0: 2**20, 1: 2**20, 2: 2**20}
    assert timeline.peak_bytes == simulate(plan, model, cluster).peak_bytes
    assert planned(plan, model).latency == timeline.latency and not planned(plan, model).limits


def test_speeds_of_devices_count() -> None:
    cluster = Cluster((Device("a", 0), Device("b", 0, None, 2.0)), real=False)
    timeline = planned(straight(2, 2), profile([(1.0, 2.0)] * 2), cluster)
    assert tasks(timeline)["1F0.0"] == (1.0, 1.5)


def test_carried_updates_come_first() -> None:
    plan = straight(2, 2, carried_updates=1)
    timeline = planned(plan, profile([(1.0, 2.0)] * 2, parameter_bytes=4, apply_seconds=0.5))
    first = min((span for span in timeline.spans if span.device == 0), key=lambda span: span.start)
    assert (first.kind, first.start, first.end) == ("apply", 0.0, 0.5)


def test_a_schedule_of_ones_own_and_one_without_backwards() -> None:
    plan = straight(2, 4)
    mine = make_schedule("gpipe", plan.devices, 2)
    timeline = planned(plan, schedule=mine)
    assert timeline.latency == 9.0 and timeline.samples == 2
    forward = planned(plan, schedule=plan.order_tasks(forward_only=True))
    assert forward.latency == 5.0 and {span.kind for span in forward.spans} == {"F"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: 0F0 0B0", "no device runs 1F0; add it to device 1"),
        ("0: 0F0 0B0\n1: 1B0 1F0", "device 1 runs 1B0 before 1F0"),
        ("0: 1F0\n1: 0F0", "device 0 runs 1F0, which belongs on device 1"),
    ],
)
def test_a_schedule_for_another_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        planned(straight(2, 4), schedule=Schedule.parse(text))
    assert message in str(caught.value)


def test_memory_limits_the_schedule_as_it_does_in_a_real_step() -> None:
    cluster = cluster_of(2, memory=250)
    model = profile([(1.0, 2.0)] * 2, residual_bytes=Cost(100.0))
    orders = {limit: planned(straight(2, 4, "dapple_b"), model, limit) for limit in (None, cluster)}
    held = {limit: peak(timeline) for limit, timeline in orders.items()}
    assert held[None] == 3 and held[cluster] == 2


def peak(timeline: Timeline) -> int:
    """The most micro-batches in flight on the first device."""
    order = sorted((span for span in timeline.spans if span.device == 0), key=lambda span: span.start)
    return max(itertools.accumulate(1 if span.kind == "F" else -1 for span in order))
