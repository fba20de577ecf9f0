"""Alignment of the times that workers report to one clock, this process's.

A worker is asked for its time repeatedly, before and after a step (as in NTP). It answers somewhere between the
question and the answer's arrival, so that half of the shortest round trip bounds the error. Causality improves the
result: no task begins before the tasks end whose results it reads. Offsets are moved for that within their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

_FASTEST_DRIFT = 1e-3
"""Seconds per second. Computers' clocks drift by at most 1e-4, even while they are being adjusted."""
_TOLERANCE = 1e-6
"""Seconds; traces report some times in whole microseconds."""
_HALVINGS = 40

_Key = TypeVar("_Key", bound=Hashable)


class ClockSample(NamedTuple):
    """One question for the time; nanoseconds since 1970.

    Attributes:
        sent: when the question was sent, by this process's clock.
        answered: when the answer arrived, by the same clock.
        told: the worker's time.
    """

    sent: int
    answered: int
    told: int


class Offset(NamedTuple):
    """How far a worker's clock is ahead.

    Attributes:
        at: time of the measurement, in nanoseconds of this process's clock.
        nanoseconds: the offset.
        error: bound of its error.
    """

    at: int
    nanoseconds: int
    error: int


def estimate(samples: Sequence[ClockSample]) -> Offset:
    """Returns the offset by the answer with the shortest round trip.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a clock can't be estimated from 0 samples; ask for the time at least once")
    best = min(samples, key=lambda sample: sample.answered - sample.sent)
    middle = (best.sent + best.answered) // 2
    # The clock here may be set back meanwhile.
    return Offset(middle, best.told - middle, max(0, best.answered - best.sent + 1) // 2)


@dataclass(frozen=True)
class WorkerClock:
    """A worker's clock during a step: its offset moves from one value to another.

    Attributes:
        before: its offset before the step.
        after: its offset after the step.
    """

    before: Offset
    after: Offset

    def aligned(self, told: int) -> float:
        """Converts a time of the worker, in nanoseconds, to this process's clock.

        A jump's moment is unknown: all times count as before it.
        """
        if self.jump:
            return told - self.before.nanoseconds
        start, end = (offset.at + offset.nanoseconds for offset in (self.before, self.after))
        part = min(1.0, max(0.0, (told - start) / (end - start))) if end > start else 0.0
        return told - self.before.nanoseconds - part * (self.after.nanoseconds - self.before.nanoseconds)

    @property
    def error(self) -> float:
        """Bound of the error of `aligned`, in seconds."""
        return max(self.before.error, self.after.error) / 1e9 + abs(self.jump)

    @property
    def jump(self) -> float:
        """Seconds by which the clock has moved beyond drifting; 0 if it hasn't, as far as can be known."""
        moved = self.after.nanoseconds - self.before.nanoseconds
        drift = _FASTEST_DRIFT * abs(self.after.at - self.before.at)
        beyond = abs(moved) - self.before.error - self.after.error - drift
        return math.copysign(abs(moved), moved) / 1e9 if beyond > 0 else 0.0


class Contradiction(NamedTuple, Generic[_Key]):
    """A conflict between causality and the clocks' error bounds.

    Attributes:
        cause: clock by which something ended.
        effect: clock by which something began that waited for it.
        seconds: how much too early it began.
    """

    cause: _Key
    effect: _Key
    seconds: float


@dataclass(frozen=True)
class Refinement(Generic[_Key]):
    """Shifts of clocks with which nothing begins before its inputs.

    Attributes:
        shifts: clock -> seconds to add to its times; clocks that stay are missing.
        contradictions: remaining contradictions, the largest first.
    """

    shifts: Mapping[_Key, float] = field(default_factory=dict)
    contradictions: tuple[Contradiction[_Key], ...] = ()


def refine(slacks: Mapping[tuple[_Key, _Key], float], errors: Mapping[_Key, float]) -> Refinement[_Key]:
    """Shifts clocks within their error bounds, only as far as needed; the most exact ones move last.

        slacks (0, 1): -0.2, errors 0: 0.1, 1: 0.3   becomes   shifts 1: 0.2

    Args:
        slacks: (clock of a cause, clock of its effect) -> the least time from an end to a beginning that waited for
            it, in seconds; negative where that contradicts causality.
        errors: clock -> seconds by which it may be shifted in either direction; others stay.
    """
    cross = {pair: slack for pair, slack in slacks.items() if pair[0] != pair[1]}
    worst = min(cross.values(), default=0.0)
    if worst >= 0:
        return Refinement()
    keys = sorted(dict.fromkeys(key for pair in cross for key in pair), key=lambda key: errors.get(key, 0.0))
    place = {key: index for index, key in enumerate(keys, start=1)}  # 0 is a clock that doesn't move.

    def bounds(allowed: float) -> np.ndarray:
        """Returns [i, j]: how far shift i may exceed shift j at most, if every slack grows by ``allowed``."""
        limits = np.full((len(keys) + 1, len(keys) + 1), np.inf)
        np.fill_diagonal(limits, 0.0)
        for key, index in place.items():
            limits[0, index] = limits[index, 0] = errors.get(key, 0.0)
        for (cause, effect), slack in cross.items():
            pair = place[cause], place[effect]
            limits[pair] = min(limits[pair], slack + allowed)
        for index in range(len(limits)):
            np.minimum(limits, limits[:, index, None] + limits[None, index, :], out=limits)
        return limits

    most = bounds(0.0)
    if _impossible(most):
        low, high = 0.0, -worst
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if _impossible(bounds(middle)) else (low, middle)
        most = bounds(high)
    shifts = [0.0]
    for index in range(1, len(keys) + 1):
        lowest = max(shift - most[other, index] for other, shift in enumerate(shifts))
        highest = min(shift + most[index, other] for other, shift in enumerate(shifts))
        shifts.append(float(min(highest, max(lowest, 0.0))))
    moved = {key: shifts[index] for key, index in place.items() if shifts[index]}
    left = [
        Contradiction(cause, effect, short)
        for (cause, effect), slack in cross.items()
        if (short := moved.get(cause, 0.0) - moved.get(effect, 0.0) - slack) > _TOLERANCE
    ]
    return Refinement(moved, tuple(sorted(left, key=lambda item: -item.seconds)))


def _impossible(bounds: np.ndarray) -> bool:
    return bool((np.diagonal(bounds) < -1e-12).any())
