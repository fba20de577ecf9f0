"""Zero bubble schedules: the paper's bubbles and memory, limits, and the choice between them."""

from __future__ import annotations

import pytest
from schedule_runs import execute, straight, vee

from dapple_tf.schedules.schedules import ScheduleError, in_flight, make_schedule, resolve_warm_up, validate
from graph_passes.ir.tasks import Phase, Schedule

UNIT = [1.0, 1.0, 1.0]


def test_zb_h1_with_four_devices_and_eight_micro_batches_has_a_third_of_the_bubble_of_1f1b() -> None:
    """ICLR'24, figure 2: (p - 1)(T_F + T_B - T_W) = 3 idle units of 27, where 1F1B has 9 of 33."""
    h1, plain = (make_schedule(policy, straight(4), 8) for policy in ("zb_h1", "dapple_a"))
    zero_bubble, before = execute(h1, [UNIT] * 4), execute(plain, [UNIT] * 4)
    assert (zero_bubble.makespan, before.makespan) == (27, 33)
    assert zero_bubble.idle == [3] * 4 and before.idle == [9] * 4
    assert zero_bubble.idle[0] / before.makespan == pytest.approx(0.091, abs=0.001)
    assert before.idle[0] / before.makespan == pytest.approx(0.273, abs=0.001)
    assert in_flight(h1) == (4, 4, 4, 4), "no more than 1F1B's fullest stage"
    assert max(in_flight(plain)) == 4


def test_zb_h1_in_full() -> None:
    expected = [
        "0: 0F0 0F1 0Bx0 0Bw0 0F2 0Bx1 0Bw1 0F3 0Bx2 0Bw2 0Bx3 0Bw3",
        "1: 1F0 1Bx0 1F1 1Bx1 1Bw0 1F2 1Bx2 1Bw1 1F3 1Bx3 1Bw2 1Bw3",
    ]
    assert str(make_schedule("zb_h1", straight(2), 4)).splitlines() == expected


def test_zb_h2_has_no_bubble_between_a_devices_first_and_last_task() -> None:
    schedule = make_schedule("zb_h2", straight(4), 8)
    executed = execute(schedule, [UNIT] * 4)
    assert executed.idle_inside == [0] * 4
    assert in_flight(schedule) == (7, 7, 7, 7)
    forwards = [
        next(i for i, task in enumerate(tasks) if task.phase is not Phase.FORWARD) for tasks in schedule.orders.values()
    ]
    assert forwards == [7, 5, 3, 1]


@pytest.mark.parametrize("policy", ["zb_h1", "zb_h2", "zero_bubble"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (3, 2), (4, 8), (5, 12)])
def test_memory_limits_are_kept_down_to_one_micro_batch(policy: str, stages: int, micro_batches: int) -> None:
    before = None
    for limit in range(1, 2 * stages + 1):
        for name in ("holds", "warm_up"):
            schedule = make_schedule(policy, straight(stages), micro_batches, **{name: [limit] * stages})
            validate(schedule, straight(stages), micro_batches, holds=[limit] * stages)
        time = execute(schedule, [UNIT] * stages).makespan
        assert before is None or time <= before, "more memory doesn't make a step longer"
        before = time


def test_zb_h1_with_room_for_one_micro_batch_finishes_each_before_the_next() -> None:
    schedule = make_schedule("zb_h1", straight(2), 2, holds=[1, 1])
    assert str(schedule) == "0: 0F0 0Bx0 0Bw0 0F1 0Bx1 0Bw1\n1: 1F0 1Bx0 1Bw0 1F1 1Bx1 1Bw1"


def test_groups_of_stages_are_positions() -> None:
    devices = [[0, 1], [0, 1], [2], [2]]
    schedule = make_schedule("zb_h1", devices, 4)
    validate(schedule, devices, 4)
    assert in_flight(schedule) == resolve_warm_up("zb_h1", 4, 4, devices=devices) == (2, 2, 2, 2)


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_zero_bubble_is_never_slower_than_h1_and_h2(micro_batches: int) -> None:
    for seconds in ([UNIT] * 4, [[1, 2, 1], [1, 1, 2], [3, 2, 1], [1, 1, 1]], [[2, 1, 3]] * 4):
        times = {
            policy: execute(make_schedule(policy, straight(4), micro_batches, task_seconds=seconds), seconds).makespan
            for policy in ("zb_h1", "zb_h2", "zero_bubble")
        }
        assert times["zero_bubble"] <= min(times.values()) + 1e-9


@pytest.mark.parametrize(("positions", "micro_batches"), [(2, 4), (4, 8), (4, 13), (8, 16)])
def test_zb_v_idles_less_than_1f1b_at_no_more_memory(positions: int, micro_batches: int) -> None:
    """A device's stages together take as long as one of 1F1B's; the step has the ideal 6M + p - 1 half units."""
    devices = vee(positions)
    schedule = make_schedule("zb_v", devices, micro_batches)
    validate(schedule, devices, micro_batches)
    executed = execute(schedule, [[0.5, 0.5, 0.5]] * 2 * positions)
    plain = execute(make_schedule("dapple_a", straight(positions), micro_batches), [UNIT] * positions)
    assert executed.makespan == (6 * micro_batches + positions - 1) / 2
    assert max(executed.idle) < min(plain.idle) and max(executed.idle_inside) < max(plain.idle_inside)
    assert most_activations(schedule) <= 2 * min(positions, micro_batches)


def most_activations(schedule: Schedule) -> int:
    """The most micro-batches in flight on a device, summed over its stages."""
    most = 0
    for tasks in schedule.orders.values():
        count = 0
        for task in tasks:
            count += {Phase.FORWARD: 1, Phase.WEIGHT_GRAD: -1}.get(task.phase, 0)
            most = max(most, count)
    return most


def test_zero_bubble_on_a_v_is_zb_v() -> None:
    devices = [[0, 1], [2], [2], [0, 1]]
    schedule, expected = (make_schedule(policy, devices, 5) for policy in ("zero_bubble", "zb_v"))
    assert schedule.orders == expected.orders


def test_an_explicit_warm_up_replaces_zb_vs_limit() -> None:
    little = make_schedule("zb_v", vee(2), 8, warm_up=[1] * 4)
    much = make_schedule("zb_v", vee(2), 8, warm_up=[8] * 4)
    assert in_flight(little) == (1, 1, 1, 1)
    assert most_activations(much) > 4


@pytest.mark.parametrize(
    "devices", [[[0], [1]], [[0], [1], [0]], [[0], [1], [0], [0], [1], [0]], [[0, 1], [1], [1], [0, 1]]]
)
def test_what_is_no_v_is_refused(devices: list[list[int]]) -> None:
    with pytest.raises(ScheduleError, match=r"zb_v wants stages i and \d - 1 - i on the same devices"):
        make_schedule("zb_v", devices, 2)
