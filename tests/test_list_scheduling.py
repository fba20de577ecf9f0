"""The list scheduler by itself: what it starts when, its limits, and what stops it."""

from __future__ import annotations

import random

import pytest
from schedule_runs import straight, vee

from dapple_tf.schedules import list_scheduling, priorities
from dapple_tf.schedules.list_scheduling import best, free_queues, merged_devices, run
from dapple_tf.schedules.schedule_request import Job, ScheduleError, ScheduleRequest
from graph_passes.ir.tasks import Phase

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD


def request(devices: list[list[int]], micro_batches: int = 1, **options: object) -> ScheduleRequest:
    return ScheduleRequest.of("modulo", devices, micro_batches, **options)  # type: ignore[arg-type]


def texts(jobs: list[Job]) -> str:
    return " ".join(f"{job.stage}{job.phase.value}{job.micro_batch}" for job in jobs)


def test_a_device_takes_the_ready_job_with_the_least_key() -> None:
    asked = request(straight(2), 2)
    timeline = run(asked, free_queues(asked), priorities.oldest_first(asked))
    assert texts(timeline.orders[0]) == "0F0 0F1 0Bx0 0Bw0 0Bx1 0Bw1"
    assert texts(timeline.orders[1]) == "1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1"
    assert timeline.makespan == 7
    assert timeline.spans == {0: (0, 7), 1: (1, 7)}
    assert timeline.longest_span == 7


def test_times_decide_what_is_ready() -> None:
    asked = request(straight(2), 2, task_seconds=[[1, 1, 1], [1, 1, 5]])
    timeline = run(asked, free_queues(asked), priorities.oldest_first(asked))
    assert timeline.makespan == 15 and timeline.spans[0] == (0, 7)


def test_keys_are_told_when_inputs_arrived() -> None:
    asked = request(straight(2), task_seconds=[[0.25, 1, 1], [0.125, 0.5, 1]])
    told: dict[str, float] = {}

    def key(job: Job, ready: float) -> tuple[float, ...]:
        told[texts([job])] = ready
        return (0.0,)

    run(asked, free_queues(asked), key)
    assert told == {"0F0": 0, "1F0": 0.25, "1Bx0": 0.375, "1Bw0": 0.875, "0Bx0": 0.875, "0Bw0": 1.875}


def test_sums_of_equal_times_are_one_moment_in_spite_of_rounding() -> None:
    """Bx of three tenths ends when three F of a tenth do; a difference by rounding must not start a Bw before it."""
    orders = [
        run(asked, free_queues(asked), priorities.oldest_first(asked)).orders
        for unit in (1, 0.1, 1e-7 / 3, 1 / 7)
        for asked in [request(vee(3), 6, task_seconds=[[unit, unit, unit]] * 6)]
    ]
    assert all(order == orders[0] for order in orders)


def test_tasks_of_no_length_are_run_too() -> None:
    asked = request(straight(2), 3, task_seconds=[[0, 0, 0], [0, 0, 0]])
    timeline = run(asked, free_queues(asked), priorities.critical_path_first(asked))
    assert timeline.makespan == 0 and sorted(map(len, timeline.orders.values())) == [9, 9]


def test_whole_backwards_take_both_times() -> None:
    asked = request(straight(1), 2, task_seconds=[[1, 2, 3]])
    timeline = run(asked, free_queues(asked, split=False), priorities.oldest_first(asked))
    assert texts(timeline.orders[0]) == "0F0 0B0 0F1 0B1" and timeline.makespan == 12


def test_forwards_wait_for_room_in_their_stage() -> None:
    asked = request(straight(2), 3)
    timeline = run(asked, free_queues(asked), priorities.oldest_first(asked), limits=[1, 1])
    assert texts(timeline.orders[0]) == "0F0 0Bx0 0Bw0 0F1 0Bx1 0Bw1 0F2 0Bx2 0Bw2"


@pytest.mark.parametrize("room", [2, 3, 4, 5])
def test_forwards_wait_for_room_on_their_device_without_deadlock(room: int) -> None:
    asked = request(vee(3), 6)
    for key in (priorities.oldest_first, priorities.deepest_first, priorities.critical_path_first):
        timeline = run(asked, free_queues(asked), key(asked), room=dict.fromkeys(range(3), room))
        for jobs in timeline.orders.values():
            count = most = 0
            for job in jobs:
                count += {F: 1, BW: -1}.get(job.phase, 0)
                most = max(most, count)
            assert most <= room


def test_a_random_key_under_tight_limits_always_comes_to_the_end() -> None:
    draw = random.Random(7)
    for _ in range(100):
        positions = draw.randint(1, 4)
        asked = request(vee(positions), draw.randint(1, 6), task_seconds=[[draw.random()] * 3] * 2 * positions)
        room = {device: draw.randint(2, 5) for device in range(positions)}
        limits = [draw.randint(1, 4) for _ in range(2 * positions)]
        timeline = run(asked, free_queues(asked), lambda job, ready: (draw.random(),), limits=limits, room=room)
        assert sum(map(len, timeline.orders.values())) == 6 * positions * asked.micro_batches


def test_replicas_are_simulated_once_but_all_ordered() -> None:
    asked = request([[0, 1, 2], [3]], 2)
    assert merged_devices(asked) == {0: 0, 1: 0, 2: 0, 3: 3}
    timeline = run(asked, free_queues(asked), priorities.oldest_first(asked))
    assert timeline.orders[0] == timeline.orders[1] == timeline.orders[2]
    assert set(timeline.spans) == {0, 1, 2, 3}


def test_an_order_that_can_not_go_on_is_refused() -> None:
    asked = request(straight(1), 2)
    queue = [Job(0, BX, 0), Job(0, F, 0), Job(0, BW, 0)]
    with pytest.raises(ScheduleError, match="modulo deadlocks after 0 jobs: device 0 before 0Bx0; run forwards"):
        run(asked, {0: [queue]}, priorities.fill_gaps)


def test_the_best_run_is_the_shortest_then_that_with_the_shortest_span() -> None:
    runs = [
        list_scheduling.Timeline({}, makespan, {0: (start, makespan)}) for makespan, start in ((9, 0), (8, 0), (8, 1))
    ]
    assert best(runs) is runs[2]
    assert best(runs[:2]) is runs[1]


def test_the_critical_path_is_the_longest_way_to_the_steps_end() -> None:
    asked = request(straight(3), 1, task_seconds=[[1, 0, 1], [2, 3, 4], [5, 6, 20]])
    remaining = priorities.critical_path(asked)
    longest = {(phase, stage): remaining(Job(stage, phase, 0)) for phase in (F, BX, BW) for stage in range(3)}
    assert longest == {
        (BW, 0): 1,
        (BW, 1): 4,
        (BW, 2): 20,
        (BX, 0): 1,
        (BX, 1): 3 + 4,
        (BX, 2): 6 + 20,
        (F, 2): 5 + 26,
        (F, 1): 2 + 31,
        (F, 0): 1 + 33,
    }
