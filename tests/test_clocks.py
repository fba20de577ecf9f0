"""Clocks: offsets from questions and answers, and what causality adds, with artificial skew and drift."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dapple_tf.clusters.clocks import ClockSample, Offset, WorkerClock, estimate, refine

SECOND = 1_000_000_000


class Machine:
    """A clock that is ahead by something and drifts; times are true ones, in nanoseconds."""

    def __init__(self, ahead: float, drift: float = 0.0) -> None:
        self.ahead, self.drift = ahead, drift

    def at(self, true: float) -> int:
        return round(true + self.ahead + self.drift * true)


def ask(machine: Machine, true: float, rng: random.Random, count: int = 8) -> list[ClockSample]:
    """Questions at a true time, which this process's clock tells; answers take their time, unevenly each way."""
    samples = []
    for _ in range(count):
        there, back = (rng.uniform(20_000, 400_000) for _ in range(2))
        samples.append(ClockSample(round(true), round(true + there + back), machine.at(true + there)))
        true += there + back + 1000
    return samples


def test_the_fastest_answer_counts() -> None:
    samples = [ClockSample(0, 1000, 5000), ClockSample(2000, 2100, 7055), ClockSample(3000, 3900, 9000)]
    assert estimate(samples) == Offset(2050, 5005, 50)
    with pytest.raises(ValueError, match="from 0 samples"):
        estimate([])


def test_a_clock_that_is_set_during_the_step_is_told() -> None:
    before, after = Offset(0, 100, 1000), Offset(SECOND, -30_000_000, 1000)
    clock = WorkerClock(before, after)
    assert clock.jump == pytest.approx(-0.0300001)
    assert clock.error > 0.03
    aligned = [clock.aligned(time) for time in range(0, 2 * SECOND, SECOND // 10)]
    assert aligned == sorted(aligned)  # What took time still does.
    assert WorkerClock(before, Offset(SECOND, 500_000, 1000)).jump == 0  # by drifting


@pytest.mark.parametrize(
    ("slacks", "errors", "shifts", "contradictions"),
    [
        ({(0, 1): 0.0, (1, 0): 0.2, (1, 1): -3.0}, {0: 1.0, 1: 1.0}, {}, []),
        # The less exact clock is moved only as far as needed; both are where one isn't enough; this process's stays.
        ({(0, 1): -0.2, (2, 3): 5.0, (3, 2): 5.0}, {0: 0.1, 1: 0.3, 2: 9.0, 3: 9.0}, {1: 0.2}, []),
        ({(0, 1): -0.35}, {0: 0.1, 1: 0.3}, {0: -0.05, 1: 0.3}, []),
        ({(None, 0): -0.2, (0, None): 0.5}, {0: 0.3}, {0: 0.2}, []),
        # What can't be is told, and shared out in a circle.
        ({(0, 1): -0.5, (1, 0): 2.0}, {0: 0.1, 1: 0.3}, {0: -0.1, 1: 0.3}, [(0, 1, 0.1)]),
        ({(0, 1): -0.3, (1, 0): -0.1}, {0: 9.0, 1: 9.0}, None, [(0, 1, 0.2), (1, 0, 0.2)]),
    ],
)
def test_clocks_are_moved_as_far_as_causes_need(
    slacks: dict[Any, float], errors: dict[int, float], shifts: dict[int, float] | None, contradictions: list[Any]
) -> None:
    refinement = refine(slacks, errors)
    if shifts is not None:
        assert refinement.shifts == pytest.approx(shifts)
    found = [(item.cause, item.effect, item.seconds) for item in refinement.contradictions]
    assert found == [(cause, effect, pytest.approx(seconds)) for cause, effect, seconds in contradictions]


@pytest.mark.parametrize("seed", range(20))
def test_a_step_of_skewed_workers_keeps_its_causes(seed: int) -> None:
    """Events of several machines, each caused by one before; after aligning and refining, none comes too early."""
    rng = random.Random(seed)
    workers = rng.randint(2, 6)
    machines = [Machine(rng.uniform(-3, 3) * SECOND, rng.uniform(-1e-4, 1e-4)) for _ in range(workers)]
    start, length = 500 * SECOND, 0.3 * SECOND
    asked = [ask(machine, start, rng) for machine in machines]
    again = [ask(machine, start + length + 0.01 * SECOND, rng) for machine in machines]
    clocks = [WorkerClock(estimate(one), estimate(other)) for one, other in zip(asked, again, strict=True)]
    for machine, clock in zip(machines, clocks, strict=True):
        assert clock.error < 400e-6 and clock.jump == 0
        for true in (clock.before.at, rng.uniform(clock.before.at, clock.after.at)):
            assert abs(clock.aligned(machine.at(true)) - true) <= 1e9 * clock.error + 100
    times = sorted(rng.uniform(start + 0.005 * SECOND, start + length) for _ in range(200))
    owner = [rng.randrange(workers) for _ in times]
    causes = [(rng.randrange(index), index) for index in range(1, len(times))]
    aligned = [clocks[own].aligned(machines[own].at(true)) for own, true in zip(owner, times, strict=True)]
    slacks: dict[tuple[int, int], float] = {}
    for before, after in causes:
        pair = owner[before], owner[after]
        slacks[pair] = min(slacks.get(pair, 1.0), (aligned[after] - aligned[before]) / 1e9)
    refinement = refine(slacks, {worker: clock.error for worker, clock in enumerate(clocks)})
    assert refinement.contradictions == ()
    for worker, shift in refinement.shifts.items():
        assert abs(shift) <= clocks[worker].error + 1e-9
    for (cause, effect), slack in slacks.items():
        if cause != effect:
            assert slack + refinement.shifts.get(effect, 0.0) - refinement.shifts.get(cause, 0.0) >= -1e-6
