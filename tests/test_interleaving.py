"""Interleaved 1F1B: the bubble's formula, any number of micro-batches, limits."""

from __future__ import annotations

import pytest
from schedule_runs import execute

from dapple_tf.schedules.schedules import ScheduleError, in_flight, make_schedule, validate


def ring(positions: int, chunks: int) -> list[list[int]]:
    """Stage i on device i mod p."""
    return [[index] for index in range(positions)] * chunks


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("positions", "rounds"), [(2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (4, 4)])
def test_the_bubble_is_v_times_smaller(positions: int, chunks: int, rounds: int) -> None:
    """SC'21, section 2.2: the bubble is (p - 1)/(v M) of the ideal time."""
    micro_batches = positions * rounds
    schedule = make_schedule("interleaved", ring(positions, chunks), micro_batches)
    ideal = 3 * chunks * micro_batches
    execution = execute(schedule, [[1, 1, 1]] * positions * chunks)
    assert (execution.makespan - ideal) / ideal == pytest.approx((positions - 1) / (chunks * micro_batches))


def test_two_devices_with_two_stages_each() -> None:
    assert str(make_schedule("interleaved", ring(2, 2), 4)).splitlines() == [
        "0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_every_number_of_micro_batches_is_legal() -> None:
    for positions in range(1, 5):
        for chunks in range(1, 4):
            for micro_batches in range(1, 14):
                devices = ring(positions, chunks)
                validate(make_schedule("interleaved", devices, micro_batches), devices, micro_batches)


def test_little_memory_is_kept_to() -> None:
    devices = ring(3, 2)
    for limit in (1, 2, 3, 5):
        schedule = make_schedule("interleaved", devices, 6, holds=[limit] * 6)
        validate(schedule, devices, 6, holds=[limit] * 6)
        assert max(in_flight(schedule)) <= limit


def test_with_one_stage_per_device_it_is_1f1b() -> None:
    devices = [[0, 1], [2], [3]]
    assert make_schedule("interleaved", devices, 5).orders == make_schedule("dapple_a", devices, 5).orders


def test_groups_repeat_with_their_replicas() -> None:
    devices = [[0, 1], [0, 1], [2, 3], [0, 1], [0, 1], [2, 3]]
    schedule = make_schedule("interleaved", devices, 4)
    validate(schedule, devices, 4)
    assert str(schedule).splitlines()[1].startswith("1: 0F0.r1 1F0.r1 0F1.r1 1F1.r1 3F0.r1 4F0.r1")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            [[0], [1], [0]],
            "interleaved has 3 groups of stages on 2 lists of devices, which doesn't divide them; use 2 or 4",
        ),
        (
            [[0], [1], [0], [2]],
            "interleaved wants devices that repeat every 2 stages, but stage 3 is on [2] where stage 1 is on [1]; use "
            "the same, such as [[0], [1], [0], [1]], or modulo",
        ),
        (
            [[0, 1], [1]],
            "interleaved has device 1 in stages 0 and 1, which have different lists of devices; use the same list or "
            "other devices, or modulo",
        ),
    ],
)
def test_devices_that_are_no_ring_are_refused(devices: list[list[int]], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule("interleaved", devices, 2)
    assert str(caught.value) == message
