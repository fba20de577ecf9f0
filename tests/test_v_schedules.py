"""V-Min, V-Half and DualPipeV: the published memory and bubbles, limits, and what the planner makes of them."""

from __future__ import annotations

import itertools

import pytest
from hardware import cluster_of, profile_of
from schedule_runs import execute, straight, vee

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.planning.out_of_order_plans import stages_per_device
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import plan as find_plan
from dapple_tf.schedules.schedules import POLICIES, ScheduleError, in_flight, make_schedule, resolve_warm_up, validate
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import simulate
from graph_passes.ir.tasks import Phase, Schedule

UNIT = [1.0, 1.0, 1.0]

V_MIN_BUBBLES = {2: 3, 3: 5, 4: 11, 5: 15, 6: 17, 7: 23, 8: 27, 12: 41}
V_HALF_BUBBLES = {2: 1, 3: 5, 4: 5, 5: 11, 6: 11, 7: 17, 8: 17, 12: 29}
"""p -> tasks' time without work of a device, F = Bx = Bw = 1, for M of at least 2p: what the authors' own code
(sail-sg/zero-bubble-pipeline-parallelism) comes to; the paper says about 4p and 3p."""


def activations(schedule: Schedule) -> list[int]:
    """The most micro-batches in flight on each device, summed over its stages."""
    peaks = []
    for tasks in schedule.orders.values():
        changes = ({Phase.FORWARD: 1, Phase.WEIGHT_GRAD: -1}.get(task.phase, 0) for task in tasks)
        peaks.append(max(itertools.accumulate(changes)))
    return peaks


def made(policy: str, positions: int, micro_batches: int) -> Schedule:
    schedule = make_schedule(policy, vee(positions), micro_batches)
    validate(schedule, vee(positions), micro_batches)
    return schedule


@pytest.mark.few(2)
@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize(
    ("policy", "published"), [("v_min", V_MIN_BUBBLES), ("v_half", V_HALF_BUBBLES)], ids=["v_min", "v_half"]
)
def test_the_bubble_is_the_published_one(policy: str, published: dict[int, int], micro_batches: int) -> None:
    for positions, expected in published.items():
        executed = execute(made(policy, positions, micro_batches * positions), [UNIT] * 2 * positions)
        assert expected - (1 if positions > 2 else 2) <= max(executed.idle) <= expected, positions
        assert max(executed.idle) <= (4 if policy == "v_min" else 3) * positions


@pytest.mark.parametrize("positions", [2, 3, 4, 5, 6, 7, 8, 12])
def test_the_memory_is_the_published_one(positions: int) -> None:
    """In stages: a device has two, so that 1F1B's p micro-batches are 2p of them."""
    held = {"v_min": (positions + 4) // 3, "v_half": (positions + 2) // 2}
    for policy, count in held.items():
        assert max(activations(made(policy, positions, 3 * positions))) == 2 * count
    assert activations(made("dualpipe_v", positions, 3 * positions)) == [2 * positions + 1] * positions


@pytest.mark.thorough
def test_few_micro_batches_need_no_more_and_take_no_longer() -> None:
    for policy, positions in itertools.product(("v_min", "v_half", "dualpipe_v"), (2, 3, 4, 6)):
        for micro_batches in range(1, 2 * positions):
            schedule = made(policy, positions, micro_batches)
            assert max(activations(schedule)) <= max(activations(made(policy, positions, 4 * positions)))
            whole = execute(schedule, [UNIT] * 2 * positions).makespan
            assert whole <= execute(made(policy, positions, micro_batches + 1), [UNIT] * 2 * positions).makespan


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 3, 2)])
@pytest.mark.parametrize("positions", [2, 3, 4])
def test_dualpipe_v_idles_no_more_than_published(positions: int, times: tuple[int, int, int]) -> None:
    """Published: (P/2 - 1)(F&B + B - 3 Bw), with F&B = F + B where nothing overlaps. A Bx is sent on before its Bw."""
    forward, input_grad, weight_grad = times
    whole = input_grad + weight_grad
    published = (positions - 1) * (forward + whole + whole - 3 * weight_grad)
    executed = execute(made("dualpipe_v", positions, 3 * positions), [list(times)] * 2 * positions)
    assert max(executed.idle) <= published
    if forward == input_grad:
        assert set(executed.idle) == {published - (positions - 1) * input_grad}


def test_v_min_in_full() -> None:
    assert str(made("v_min", 3, 3)).splitlines() == [
        "0: 0F0 0F1 0F2 5F0 5Bx0 5Bw0 5F1 5Bx1 5Bw1 0Bx0 0Bw0 5F2 5Bx2 0Bx1 0Bw1 5Bw2 0Bx2 0Bw2",
        "1: 1F0 1F1 4F0 4F1 4Bx0 4Bw0 1F2 1Bx0 1Bw0 4Bx1 4Bw1 4F2 1Bx1 4Bx2 1Bw1 4Bw2 1Bx2 1Bw2",
        "2: 2F0 3F0 2F1 3F1 3Bx0 2Bx0 3Bw0 2Bw0 2F2 3F2 3Bx1 2Bx1 3Bw1 2Bw1 3Bx2 2Bx2 3Bw2 2Bw2",
    ]


def test_dualpipe_v_in_full() -> None:
    assert str(made("dualpipe_v", 2, 4)).splitlines() == [
        "0: 0F0 0F1 0F2 3F0 3Bx0 3Bw0 3F1 0F3 3Bx1 3Bw1 3F2 0Bx0 0Bw0 3Bx2 3Bw2 3F3 0Bx1 0Bw1 3Bx3 3Bw3 0Bx2 0Bw2 "
        "0Bx3 0Bw3",
        "1: 1F0 2F0 1F1 2F1 1F2 2Bx0 2Bw0 2F2 1Bx0 1Bw0 1F3 2Bx1 2Bw1 2F3 1Bx1 1Bw1 2Bx2 2Bw2 1Bx2 1Bw2 2Bx3 1Bx3 "
        "2Bw3 1Bw3",
    ]


def test_positions_may_have_replicas_and_several_stages() -> None:
    devices = [[0, 1], [0, 1], [2], [2], [2], [2], [0, 1], [0, 1]]
    for policy, most in (("v_min", 8), ("v_half", 8), ("dualpipe_v", 10)):
        schedule = make_schedule(policy, devices, 6)
        validate(schedule, devices, 6)
        assert max(activations(schedule)) == most
        assert schedule.orders[0] == tuple(
            type(task)(task.stage, task.phase, task.micro_batch, 0) for task in schedule.orders[1]
        )


@pytest.mark.parametrize("policy", ["v_min", "v_half", "dualpipe_v"])
def test_less_memory_makes_a_step_no_shorter_down_to_one_micro_batch(policy: str) -> None:
    """D counts slices of any stage of a device; K, if given, takes the place of the policy's own limit."""
    before = None
    for limit in range(2, 12):
        schedule = make_schedule(policy, vee(4), 8, holds=[limit] * 8)
        validate(schedule, vee(4), 8, holds=[limit] * 8)
        assert max(activations(schedule)) <= limit
        time = execute(schedule, [UNIT] * 8).makespan
        assert limit % 2 or before is None or time <= before
        before = time if limit % 2 == 0 else before
    assert in_flight(make_schedule(policy, vee(2), 8, warm_up=[1] * 4)) == (1, 1, 1, 1)
    free = make_schedule(policy, vee(4), 8)
    assert policy == "dualpipe_v" or max(activations(make_schedule(policy, vee(4), 8, warm_up=[8] * 8))) > max(
        activations(free)
    )
    assert in_flight(free) == resolve_warm_up(policy, 8, 8, devices=vee(4))


def test_unequal_times_are_taken_into_account() -> None:
    times = [[1, 3, 1], [1, 1, 1], [2, 1, 1], [1, 1, 2], [1, 1, 1], [1, 2, 1], [1, 1, 1], [1, 1, 3]]
    for policy in ("v_min", "v_half"):
        fixed, timed = (make_schedule(policy, vee(4), 12, task_seconds=seconds) for seconds in (None, times))
        assert execute(timed, times).makespan <= execute(fixed, times).makespan
        assert max(activations(timed)) <= max(activations(fixed))


@pytest.mark.parametrize("policy", ["v_min", "v_half", "dualpipe_v"])
def test_what_is_no_v_is_refused(policy: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{policy} wants stages i and 3 - 1 - i on the same devices"):
        make_schedule(policy, straight(3), 2)


# ---- simulated and planned

PROFILE = profile_of(8, parameters=10**4, residual=1e6)
FAST = {"inter_bandwidth": 1e12, "inter_latency": 0.0}


def vee_plan(policy: str, positions: int = 4, micro_batches: int = 12) -> Plan:
    names = [layer.name for layer in PROFILE.layers]
    cuts = names[: 2 * positions - 1]
    return Plan.manual(cuts, vee(positions), micro_batches, micro_batches, policy)


def four(memory: int | None = None) -> Cluster:
    return cluster_of(1, 1, 1, 1, memory=memory, **FAST)


@pytest.mark.parametrize(("policy", "bubble"), [("v_min", 11), ("v_half", 5), ("dualpipe_v", 3)])
def test_simulated_steps_have_these_bubbles_and_this_memory(policy: str, bubble: int) -> None:
    """Within a task of 1 ms. The first stage sends nothing back: its Bw is all of its backward, which costs no more."""
    step = simulate(vee_plan(policy), PROFILE, four())
    idle = step.latency - 12 * 6e-3
    assert idle == pytest.approx(bubble * 1e-3, abs=1.01e-3)
    held = {"v_min": 4, "v_half": 6, "dualpipe_v": 9}[policy]
    kept = max(step.peak_bytes.values()) - max(
        simulate(vee_plan(policy, 4, 1), PROFILE, four()).peak_bytes[device] - 2e6 for device in (1, 2, 3)
    )
    assert kept == pytest.approx(held * 1e6, rel=0.1)


def test_a_device_holds_slices_of_any_of_its_stages() -> None:
    """With room for five stages' slices zb_v has two micro-batches of each, v_min three of one and one of the other."""
    fits = four(5_600_000)
    assert CostModel(vee_plan("zb_v"), PROFILE, fits).holds == (2,) * 8
    costs = CostModel(vee_plan("v_min"), PROFILE, fits)
    assert costs.holds == (5,) * 8
    assert max(activations(costs.schedule)) == 4 and max(costs.warm_up) > 2
    assert simulate(vee_plan("v_min"), PROFILE, fits).fits
    assert CostModel(vee_plan("v_min"), PROFILE, four()).holds is None


def test_they_are_tried_only_where_memory_limits_micro_batches() -> None:
    def tried(memory: int | None) -> set[str]:
        request = PlanRequest.of(PROFILE, four(memory), 12, micro_batches=12, schedule="auto")
        cuts = [layer.name for layer in PROFILE.layers[1:7:2]]
        base = Plan.manual(cuts, [[0], [1], [2], [3]], 12, 12)
        return {policy.name for policy, _ in stages_per_device(base, request)}

    assert tried(5_600_000) - tried(None) == {"v_min", "v_half", "dualpipe_v"}
    assert tried(None) < tried(5_600_000)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("memory", "expected"), [(5_600_000, "v_min"), (8_700_000, "v_half"), (10_100_000, "dualpipe_v")]
)
def test_the_planner_takes_them_where_memory_is_short(memory: int, expected: str) -> None:
    chosen = find_plan(PROFILE, four(memory), 12, micro_batches=12, schedule="auto", recompute="none", least_gain=0.0)
    assert chosen.report is not None
    assert chosen.schedule == expected
    others = tuple(policy for policy in POLICIES if policy not in ("v_min", "v_half", "dualpipe_v"))
    before = find_plan(PROFILE, four(memory), 12, micro_batches=12, schedule=others, recompute="none", least_gain=0.0)
    assert before.report is not None
    assert chosen.report.latency < before.report.latency
    step = simulate(chosen, PROFILE, four(memory))
    assert step.fits and step.latency == pytest.approx(chosen.report.latency)
