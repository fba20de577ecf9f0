"""Schedules that papers describe: their bubbles, memory, worked examples and limits; the list scheduler behind them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hardware import cluster_of, profile_of
from schedule_runs import execute, straight, vee

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.planning.moves import stages_per_device
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import plan as find_plan
from dapple_tf.schedules.list_scheduling import (
    Timeline,
    best,
    critical_path,
    critical_path_first,
    deepest_first,
    fill_gaps,
    free_queues,
    merged_devices,
    oldest_first,
    run,
)
from dapple_tf.schedules.out_of_order import best_reverse_first_k
from dapple_tf.schedules.schedule_request import Job, ScheduleRequest
from dapple_tf.schedules.schedules import POLICIES, ScheduleError, in_flight, make_schedule, resolve_warm_up, validate
from dapple_tf.simulation.cost import CostModel
from graph_passes.ir.tasks import Phase, Schedule, Task

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD
UNIT = [1.0, 1.0, 1.0]


def ring(positions: int, chunks: int) -> list[list[int]]:
    """Stage i on device i mod p."""
    return straight(positions) * chunks


def activations(schedule: Schedule) -> list[int]:
    """The most micro-batches in flight on each device, summed over its stages."""
    peaks = []
    for tasks in schedule.orders.values():
        peaks.append(max(itertools.accumulate({F: 1, BW: -1}.get(task.phase, 0) for task in tasks)))
    return peaks


@pytest.mark.parametrize(
    ("policy", "devices", "message"),
    [
        ("interleaved", [[0], [1], [0]], "has 3 groups of stages on 2 lists of devices, which doesn't divide them;"),
        ("interleaved", [[0], [1], [0], [2]], "repeat every 2 stages, but stage 3 is on [2] where stage 1 is on [1];"),
        ("interleaved", [[0, 1], [1]], "has device 1 in stages 0 and 1, which have different lists of devices; use"),
        ("zb_v", [[0], [1], [0]], "zb_v wants stages i and 3 - 1 - i on the same devices"),
        ("zb_v", [[0], [1], [0], [0], [1], [0]], "zb_v wants stages i and 6 - 1 - i on the same devices"),
        ("zb_v", [[0, 1], [1], [1], [0, 1]], "zb_v wants stages i and 4 - 1 - i on the same devices"),
        *((policy, straight(3), f"{policy} wants stages i and 3 - 1 - i on the") for policy in ("v_min", "dualpipe_v")),
    ],
)
def test_other_placements_are_refused(policy: str, devices: list[list[int]], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule(policy, devices, 2)
    assert message in str(caught.value)


# ---- interleaved 1F1B


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("positions", "rounds"), [(2, 3), (3, 2), (4, 4)])
def test_the_bubble_is_v_times_smaller(positions: int, chunks: int, rounds: int) -> None:
    """SC'21, section 2.2: the bubble is (p - 1)/(v M) of the ideal time."""
    micro_batches = positions * rounds
    schedule = make_schedule("interleaved", ring(positions, chunks), micro_batches)
    ideal = 3 * chunks * micro_batches
    execution = execute(schedule, [[1, 1, 1]] * positions * chunks)
    assert (execution.makespan - ideal) / ideal == pytest.approx((positions - 1) / (chunks * micro_batches))
    if chunks == 1:
        plain = make_schedule("dapple_a", straight(positions), micro_batches)
        assert schedule.orders == plain.orders, "with one stage on each device it is 1F1B"
    for count in range(1, 14):
        validate(make_schedule("interleaved", ring(positions, chunks), count), ring(positions, chunks), count)


def test_groups_repeat_with_their_replicas() -> None:
    devices = [[0, 1], [0, 1], [2, 3], [0, 1], [0, 1], [2, 3]]
    schedule = make_schedule("interleaved", devices, 4)
    validate(schedule, devices, 4)
    assert str(schedule).splitlines()[1].startswith("1: 0F0.r1 1F0.r1 0F1.r1 1F1.r1 3F0.r1 4F0.r1")


# ---- zero bubble


def test_zb_h1_with_four_devices_and_eight_micro_batches_has_a_third_of_the_bubble_of_1f1b() -> None:
    """ICLR'24, figure 2: (p - 1)(T_F + T_B - T_W) = 3 idle units of 27, where 1F1B has 9 of 33."""
    h1, h2, plain = (make_schedule(policy, straight(4), 8) for policy in ("zb_h1", "zb_h2", "dapple_a"))
    zero_bubble, before = execute(h1, [UNIT] * 4), execute(plain, [UNIT] * 4)
    assert (zero_bubble.makespan, before.makespan) == (27, 33)
    assert zero_bubble.idle == [3] * 4 and before.idle == [9] * 4
    assert in_flight(h1) == (4, 4, 4, 4), "no more than 1F1B's fullest stage"
    assert execute(h2, [UNIT] * 4).idle_inside == [0] * 4 and in_flight(h2) == (7, 7, 7, 7)
    forwards = [next(i for i, task in enumerate(tasks) if task.phase is not F) for tasks in h2.orders.values()]
    assert forwards == [7, 5, 3, 1]
    groups = [[0, 1], [0, 1], [2], [2]]
    assert in_flight(make_schedule("zb_h1", groups, 4)) == resolve_warm_up("zb_h1", 4, 4, devices=groups) == (2,) * 4


@pytest.mark.parametrize(
    ("policy", "devices", "micro_batches"),
    [
        *itertools.product(("zb_h1", "zb_h2", "zero_bubble"), [straight(3)], [2]),
        *itertools.product(("zb_h1", "zb_h2", "zero_bubble"), [straight(4)], [8]),
        *itertools.product(("v_min", "v_half", "dualpipe_v"), [vee(4)], [8]),
        ("modulo", ring(2, 3), 7),
        ("interleaved", ring(3, 2), 6),
    ],
)
def test_less_memory_makes_a_step_no_shorter_down_to_one_micro_batch(
    policy: str, devices: list[list[int]], micro_batches: int
) -> None:
    """D counts slices of any stage of a device in V schedules; K, if given, takes the place of the policy's limit."""
    stages, before = len(devices), float("inf")
    summed = policy in ("v_min", "v_half", "dualpipe_v")
    for limit in (1, 2, 4, 6, 8, 10) if summed else range(1, 2 * stages + 1):
        schedule = make_schedule(policy, devices, micro_batches, holds=[limit] * stages)
        validate(schedule, devices, micro_batches, holds=[limit] * stages)
        assert max(in_flight(schedule)) <= limit and (not summed or max(activations(schedule)) <= max(limit, 2))
        if policy not in ("modulo", "interleaved"):
            time = execute(schedule, [UNIT] * stages).makespan
            assert time <= before
            before = time
    assert max(in_flight(make_schedule(policy, devices, micro_batches, warm_up=[1] * stages))) == 1
    free = make_schedule(policy, devices, micro_batches)
    most = resolve_warm_up(policy, stages, micro_batches, devices=devices)
    assert all(count <= limit for count, limit in zip(in_flight(free), most, strict=True))
    if policy in ("v_min", "v_half"):
        more = make_schedule(policy, devices, micro_batches, warm_up=[8] * 8)
        assert max(activations(more)) > max(activations(free)), "a given K replaces the policy's own limit"


def test_zero_bubble_is_never_slower_than_h1_and_h2_and_zb_v_on_a_v() -> None:
    for seconds in ([UNIT] * 4, [[1, 2, 1], [1, 1, 2], [3, 2, 1], [1, 1, 1]], [[2, 1, 3]] * 4):
        times = {
            policy: execute(make_schedule(policy, straight(4), 8, task_seconds=seconds), seconds).makespan
            for policy in ("zb_h1", "zb_h2", "zero_bubble")
        }
        assert times["zero_bubble"] <= min(times.values()) + 1e-9
    own, expected = (make_schedule(policy, [[0, 1], [2], [2], [0, 1]], 5) for policy in ("zero_bubble", "zb_v"))
    assert own.orders == expected.orders


@pytest.mark.parametrize(("positions", "micro_batches"), [(2, 4), (4, 13), (8, 16)])
def test_zb_v_idles_less_than_1f1b_at_no_more_memory(positions: int, micro_batches: int) -> None:
    """A device's stages together take as long as one of 1F1B's; the step has the ideal 6M + p - 1 half units."""
    devices = vee(positions)
    schedule = make_schedule("zb_v", devices, micro_batches)
    validate(schedule, devices, micro_batches)
    executed = execute(schedule, [[0.5, 0.5, 0.5]] * 2 * positions)
    plain = execute(make_schedule("dapple_a", straight(positions), micro_batches), [UNIT] * positions)
    assert executed.makespan == (6 * micro_batches + positions - 1) / 2
    assert max(executed.idle) < min(plain.idle) and max(executed.idle_inside) < max(plain.idle_inside)
    assert max(activations(schedule)) <= 2 * min(positions, micro_batches)
    assert max(activations(make_schedule("zb_v", vee(2), 8, warm_up=[8] * 4))) > 4


# ---- V-Min, V-Half and DualPipeV

V_BUBBLES = {
    "v_min": {2: 3, 3: 5, 4: 11, 5: 15, 6: 17, 8: 27, 12: 41},
    "v_half": {2: 1, 3: 5, 4: 5, 5: 11, 6: 11, 8: 17, 12: 29},
}
"""p -> tasks' time without work of a device, F = Bx = Bw = 1, for M of at least 2p: what the authors' own code
(sail-sg/zero-bubble-pipeline-parallelism) comes to; the paper says about 4p and 3p."""


def made(policy: str, positions: int, micro_batches: int) -> Schedule:
    schedule = make_schedule(policy, vee(positions), micro_batches)
    validate(schedule, vee(positions), micro_batches)
    return schedule


@pytest.mark.parametrize("policy", V_BUBBLES)
def test_bubble_and_memory_are_the_published_ones(policy: str) -> None:
    """Memory in stages: a device has two, so that 1F1B's p micro-batches are 2p of them."""
    for positions, expected in V_BUBBLES[policy].items():
        schedule = made(policy, positions, 2 * positions)
        executed = execute(schedule, [UNIT] * 2 * positions)
        assert expected - (1 if positions > 2 else 2) <= max(executed.idle) <= expected, positions
        held = (positions + 4) // 3 if policy == "v_min" else (positions + 2) // 2
        assert max(activations(schedule)) == 2 * held


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (2, 3, 2)])
@pytest.mark.parametrize("positions", [2, 4])
def test_dualpipe_v_idles_no_more_than_published(positions: int, times: tuple[int, int, int]) -> None:
    """Published: (P/2 - 1)(F&B + B - 3 Bw), with F&B = F + B where nothing overlaps. A Bx is sent on before its Bw."""
    forward, input_grad, weight_grad = times
    whole = input_grad + weight_grad
    published = (positions - 1) * (forward + whole + whole - 3 * weight_grad)
    schedule = made("dualpipe_v", positions, 3 * positions)
    executed = execute(schedule, [list(times)] * 2 * positions)
    assert max(executed.idle) <= published
    if forward == input_grad:
        assert set(executed.idle) == {published - (positions - 1) * input_grad}
    assert activations(schedule) == [2 * positions + 1] * positions


def test_positions_may_have_replicas_and_several_stages() -> None:
    devices = [[0, 1], [0, 1], [2], [2], [2], [2], [0, 1], [0, 1]]
    for policy, most in (("v_min", 8), ("v_half", 8), ("dualpipe_v", 10)):
        schedule = make_schedule(policy, devices, 6)
        validate(schedule, devices, 6)
        assert max(activations(schedule)) == most
        assert [str(task) for task in schedule.orders[1]] == [f"{task}.r1" for task in schedule.orders[0]]


def test_unequal_times_are_taken_into_account() -> None:
    times = [[1, 3, 1], [1, 1, 1], [2, 1, 1], [1, 1, 2], [1, 1, 1], [1, 2, 1], [1, 1, 1], [1, 1, 3]]
    for policy in ("v_min", "v_half"):
        fixed, timed = (make_schedule(policy, vee(4), 12, task_seconds=seconds) for seconds in (None, times))
        assert execute(timed, times).makespan <= execute(fixed, times).makespan
        assert max(activations(timed)) <= max(activations(fixed))


PROFILE = profile_of(8, parameters=10**4, residual=1e6)


def vee_plan(policy: str, micro_batches: int = 12) -> Plan:
    cuts = [layer.name for layer in PROFILE.layers[:7]]
    return Plan.manual(cuts, vee(4), micro_batches, micro_batches, policy)


def four(memory: int | None = None) -> Cluster:
    return cluster_of(1, 1, 1, 1, memory=memory, inter_bandwidth=1e12, inter_latency=0.0)


def test_they_are_planned_only_where_memory_limits_micro_batches() -> None:
    """With room for five stages' slices zb_v has two micro-batches of each, v_min three of one and one of the other."""
    fits = four(5_600_000)
    assert CostModel(vee_plan("zb_v"), PROFILE, fits).holds == (2,) * 8
    costs = CostModel(vee_plan("v_min"), PROFILE, fits)
    assert costs.holds == (5,) * 8
    assert max(activations(costs.schedule)) == 4 and max(costs.warm_up) > 2

    def tried(memory: int | None) -> set[str]:
        request = PlanRequest(PROFILE, four(memory), 12, micro_batches=12, schedule="auto")
        base = Plan.manual([layer.name for layer in PROFILE.layers[1:7:2]], straight(4), 12, 12)
        return {policy.name for policy, _ in stages_per_device(base, request)}

    assert tried(None) < tried(5_600_000) and tried(5_600_000) - tried(None) == {"v_min", "v_half", "dualpipe_v"}
    given: dict[str, Any] = {"micro_batches": 12, "recompute": "none", "least_gain": 0.0}
    chosen = find_plan(PROFILE, fits, 12, schedule="auto", **given)
    others = tuple(policy for policy in POLICIES if policy not in ("v_min", "v_half", "dualpipe_v"))
    before = find_plan(PROFILE, fits, 12, schedule=others, **given)
    assert chosen.report is not None and before.report is not None
    assert chosen.schedule == "v_min" and chosen.report.latency < before.report.latency


# ---- out-of-order backprop


def test_fast_forwarding_computes_weight_gradients_early_where_memory_demands_it() -> None:
    free = make_schedule("fast_forward_a", straight(3), 6)
    assert in_flight(free) == resolve_warm_up("fast_forward_a", 3, 6) == (3, 3, 3)
    tight = make_schedule("fast_forward_a", straight(3), 6, holds=[3, 2, 1])
    assert in_flight(tight) == resolve_warm_up("fast_forward_a", 3, 6, holds=[3, 2, 1]) == (3, 2, 1)
    assert str(tight).splitlines()[2] == "2: " + " ".join(f"2F{i} 2Bx{i} 2Bw{i}" for i in range(6))
    assert execute(free, [UNIT] * 3).makespan < execute(tight, [UNIT] * 3).makespan


@pytest.mark.parametrize(("base", "policy"), [("gpipe", "fast_forward"), ("dapple_a", "fast_forward_a")])
def test_fast_forwarding_keeps_the_order_of_forwards_and_backwards(base: str, policy: str) -> None:
    plain, split = make_schedule(base, straight(3), 6), make_schedule(policy, straight(3), 6)
    for device, tasks in plain.orders.items():
        kept = [str(task).replace("Bx", "B") for task in split.orders[device] if task.phase is not BW]
        assert kept == list(map(str, tasks))


def test_reversing_starts_the_first_reduction_first() -> None:
    """Figure 4: the first layer's gradient is complete before the second's."""
    for k, reverse in ((0, True), (3, False)):
        ended = execute(make_schedule("fast_forward", [[0]] * 3, 2, reverse_first_k=k), [UNIT] * 3).ends
        ends = [ended[Task(stage, BW, 1)] for stage in range(3)]
        assert ends == sorted(ends, reverse=reverse)


def counted(throughput: Callable[[int], float]) -> tuple[Callable[[int], float], list[int]]:
    asked: list[int] = []

    def measure(k: int) -> float:
        asked.append(k)
        return throughput(k)

    return measure, asked


@pytest.mark.parametrize("count", [1, 2, 7, 25, 121])
def test_the_search_finds_the_best_k_of_any_concave_throughput(count: int) -> None:
    for most in range(count):
        measure, asked = counted(lambda k, most=most: -abs(k - most))  # type: ignore[misc]
        assert best_reverse_first_k(count, measure) == most
        assert len(asked) == len(set(asked)) and set(asked) <= set(range(count)), "a k is measured once"


def test_the_search_takes_the_papers_steps() -> None:
    measure, asked = counted(lambda k: -((k - 57) ** 2))
    assert best_reverse_first_k(100, measure) == 57
    assert asked == [*range(0, 100, 10), 55, 65, 51, 53, 57, 59, 56, 58], "steps of 10, 5, 2 and 1"
    assert best_reverse_first_k(30, lambda k: 1.0) == 0
    with pytest.raises(ValueError, match="layers is 0; it must be at least 1"):
        best_reverse_first_k(0, float)


# ---- the list scheduler by itself


def asked(devices: list[list[int]], micro_batches: int = 1, **options: Any) -> ScheduleRequest:
    return ScheduleRequest.of("modulo", devices, micro_batches, **options)


def texts(jobs: list[Job]) -> str:
    return " ".join(f"{job.stage}{job.phase.value}{job.micro_batch}" for job in jobs)


def test_whole_backwards_take_both_times_and_idle_replicas_are_ordered_too() -> None:
    request = asked(straight(1), 2, task_seconds=[[1, 2, 3]])
    timeline = run(request, free_queues(request, split=False), oldest_first(request))
    assert texts(timeline.orders[0]) == "0F0 0B0 0F1 0B1" and timeline.makespan == 12
    request = asked([[0, 1, 2], [3]], 2, task_seconds=[[1, 1, 1], [1, 1, 5]])
    timeline = run(request, free_queues(request), oldest_first(request))
    assert (timeline.makespan, timeline.spans[0], timeline.longest_span) == (15, (0, 7), 14)
    assert timeline.orders[0] == timeline.orders[2] and set(timeline.spans) == {0, 1, 2, 3}


def test_sums_of_equal_times_are_one_moment_in_spite_of_rounding() -> None:
    """Bx of three tenths ends when three F of a tenth do; a difference by rounding must not start a Bw before it."""
    requests = [asked(vee(3), 6, task_seconds=[[unit] * 3] * 6) for unit in (1, 0.1, 1e-7 / 3, 1 / 7)]
    first, *others = (run(own, free_queues(own), oldest_first(own)).orders for own in requests)
    assert others == [first] * 3


@pytest.mark.parametrize("room", [2, 5])
def test_forwards_wait_for_room_on_their_device_without_deadlock(room: int) -> None:
    request = asked(vee(3), 6)
    for key in (oldest_first, deepest_first, critical_path_first):
        timeline = run(request, free_queues(request), key(request), room=dict.fromkeys(range(3), room))
        for jobs in timeline.orders.values():
            assert max(itertools.accumulate({F: 1, BW: -1}.get(job.phase, 0) for job in jobs)) <= room


def test_a_random_key_under_tight_limits_always_comes_to_the_end() -> None:
    draw = random.Random(7)
    for _ in range(50):
        positions = draw.randint(1, 4)
        request = asked(vee(positions), draw.randint(1, 6), task_seconds=[[draw.random()] * 3] * 2 * positions)
        room = {device: draw.randint(2, 5) for device in range(positions)}
        limits = [draw.randint(1, 4) for _ in range(2 * positions)]
        timeline = run(request, free_queues(request), lambda job, ready: (draw.random(),), limits=limits, room=room)
        assert sum(map(len, timeline.orders.values())) == 6 * positions * request.micro_batches
    stuck = asked(straight(1), 2)
    with pytest.raises(ScheduleError, match="modulo deadlocks after 0 jobs: device 0 before 0Bx0; run forwards"):
        run(stuck, {0: [[Job(0, BX, 0), Job(0, F, 0), Job(0, BW, 0)]]}, fill_gaps)


def test_devices_with_unlike_stages_are_told_apart() -> None:
    assert merged_devices(asked([[0, 1, 2], [3]], 2)) == {0: 0, 1: 0, 2: 0, 3: 3}
    assert merged_devices(asked([[0, 1, 2], [2]], 2)) == {0: 0, 1: 0, 2: 2}


def test_the_best_run_is_the_shortest_then_that_with_the_shortest_span() -> None:
    runs = [Timeline({}, makespan, {0: (start, makespan)}) for makespan, start in ((9, 0), (8, 0), (8, 1))]
    assert best(runs) is runs[2] and best(runs[:2]) is runs[1]


def test_the_critical_path_is_the_longest_way_to_the_steps_end() -> None:
    remaining = critical_path(asked(straight(3), 1, task_seconds=[[1, 0, 1], [2, 3, 4], [5, 6, 20]]))
    longest = [[remaining(Job(stage, phase, 0)) for stage in range(3)] for phase in (F, BX, BW)]
    assert longest == [[1 + 33, 2 + 31, 5 + 26], [1, 3 + 4, 6 + 20], [1, 4, 20]]
