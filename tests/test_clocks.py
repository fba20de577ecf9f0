"""Clocks: offsets from questions and answers, and what causality adds, with artificial skew and drift."""

from __future__ import annotations

import random

import pytest

from dapple_tf.clusters.clocks import ClockSample, Contradiction, Offset, Refinement, WorkerClock, estimate, refine

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


def test_no_answers_are_an_error() -> None:
    with pytest.raises(ValueError, match="from 0 samples"):
        estimate([])


@pytest.mark.parametrize("seed", range(20))
def test_times_are_right_within_the_error_whatever_skew_and_drift(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(rng.uniform(-5, 5) * SECOND, rng.uniform(-1e-4, 1e-4))
    start, end = 1000 * SECOND, 1000 * SECOND + rng.uniform(0.01, 2) * SECOND
    clock = WorkerClock(estimate(ask(machine, start, rng)), estimate(ask(machine, end, rng)))
    assert clock.error < 400e-6
    assert clock.jump == 0
    for _ in range(50):
        true = rng.uniform(clock.before.at, clock.after.at)
        assert abs(clock.aligned(machine.at(true)) - true) <= 1e9 * clock.error + 100


def test_a_clock_that_is_set_during_the_step_is_told() -> None:
    before, after = Offset(0, 100, 1000), Offset(SECOND, -30_000_000, 1000)
    clock = WorkerClock(before, after)
    assert clock.jump == pytest.approx(-0.0300001)
    assert clock.error > 0.03
    aligned = [clock.aligned(time) for time in range(0, 2 * SECOND, SECOND // 10)]
    assert aligned == sorted(aligned)  # What took time still does.
    assert WorkerClock(before, Offset(SECOND, 500_000, 1000)).jump == 0  # by drifting


def test_clocks_that_agree_with_all_causes_stay() -> None:
    assert refine({(0, 1): 0.0, (1, 0): 0.2, (1, 1): -3.0}, {0: 1.0, 1: 1.0}) == Refinement()
    assert refine({}, {0: 1.0}) == Refinement()


def test_the_less_exact_clock_is_moved_only_as_far_as_needed() -> None:
    refinement = refine({(0, 1): -0.2, (2, 3): 5.0, (3, 2): 5.0}, {0: 0.1, 1: 0.3, 2: 9.0, 3: 9.0})
    assert refinement.shifts == {1: pytest.approx(0.2)}
    assert refinement.contradictions == ()


def test_both_are_moved_where_one_is_not_enough() -> None:
    refinement = refine({(0, 1): -0.35}, {0: 0.1, 1: 0.3})
    assert refinement.shifts == {0: pytest.approx(-0.05), 1: pytest.approx(0.3)}
    assert refinement.contradictions == ()


def test_the_clock_of_this_process_stays() -> None:
    refinement = refine({(None, 0): -0.2, (0, None): 0.5}, {0: 0.3})
    assert refinement.shifts == {0: pytest.approx(0.2)}


def test_what_cannot_be_is_told() -> None:
    refinement = refine({(0, 1): -0.5, (1, 0): 2.0}, {0: 0.1, 1: 0.3})
    assert refinement.shifts == {0: pytest.approx(-0.1), 1: pytest.approx(0.3)}
    assert refinement.contradictions == (Contradiction(0, 1, pytest.approx(0.1)),)


def test_a_circle_that_cannot_be_is_shared_out() -> None:
    refinement = refine({(0, 1): -0.3, (1, 0): -0.1}, {0: 9.0, 1: 9.0})
    assert [(item.cause, item.effect) for item in refinement.contradictions] == [(0, 1), (1, 0)]
    assert [item.seconds for item in refinement.contradictions] == pytest.approx([0.2, 0.2])


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
