"""Bringing the times that workers tell to one clock, this process's.

A worker is asked for its time again and again, before a step and after it (as in NTP). It answers somewhere between the
question and the answer's arrival, so that half of the shortest round trip bounds the error. What is known of causes
does the rest: no task begins before those end whose results it reads. Offsets are moved for that within their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

_FASTEST_DRIFT = 1e-3
"""Seconds per second. Computers' clocks drift by up to 1e-4, also while they are being set slowly."""
_TOLERANCE = 1e-6
"""Seconds; traces tell some times in whole microseconds."""
_HALVINGS = 40

_Key = TypeVar("_Key", bound=Hashable)


class ClockSample(NamedTuple):
    """One question for the time; nanoseconds since 1970.

    Attributes:
        sent: when the question was sent, by this process's clock.
        answered: when the answer was there, likewise.
        told: the worker's time.
    """

    sent: int
    answered: int
    told: int


class Offset(NamedTuple):
    """By how much a worker's clock is ahead.

    Attributes:
        at: when, in nanoseconds of this process's clock.
        nanoseconds: how much.
        error: how far that may be off.
    """

    at: int
    nanoseconds: int
    error: int


def estimate(samples: Sequence[ClockSample]) -> Offset:
    """Returns the offset by the answer that took the shortest time.

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
    """A worker's clock during a step: ahead by something between two offsets, as time goes on.

    Attributes:
        before: its offset before the step.
        after: its offset after the step.
    """

    before: Offset
    after: Offset

    def aligned(self, told: int) -> float:
        """Returns a time of the worker, in nanoseconds -> the same moment by this process's clock.

        Of a clock that has jumped nobody knows when it did: all times count as before that.
        """
        if self.jump:
            return told - self.before.nanoseconds
        start, end = (offset.at + offset.nanoseconds for offset in (self.before, self.after))
        part = min(1.0, max(0.0, (told - start) / (end - start))) if end > start else 0.0
        return told - self.before.nanoseconds - part * (self.after.nanoseconds - self.before.nanoseconds)

    @property
    def error(self) -> float:
        """How far `aligned` may be off, in seconds."""
        return max(self.before.error, self.after.error) / 1e9 + abs(self.jump)

    @property
    def jump(self) -> float:
        """Seconds by which the clock has moved besides drifting; 0 where it hasn't, as far as can be told."""
        moved = self.after.nanoseconds - self.before.nanoseconds
        drift = _FASTEST_DRIFT * abs(self.after.at - self.before.at)
        beyond = abs(moved) - self.before.error - self.after.error - drift
        return math.copysign(abs(moved), moved) / 1e9 if beyond > 0 else 0.0


class Contradiction(NamedTuple, Generic[_Key]):
    """What causality and the clocks' error bounds don't allow together.

    Attributes:
        cause: the clock by which something ended.
        effect: the clock by which something began that waited for it.
        seconds: by how much too early it began.
    """

    cause: _Key
    effect: _Key
    seconds: float


@dataclass(frozen=True)
class Refinement(Generic[_Key]):
    """How clocks are moved so that nothing begins before what it waits for.

    Attributes:
        shifts: clock -> seconds to add to its times; those that stay are missing.
        contradictions: what remains, the largest first.
    """

    shifts: Mapping[_Key, float] = field(default_factory=dict)
    contradictions: tuple[Contradiction[_Key], ...] = ()


def refine(slacks: Mapping[tuple[_Key, _Key], float], errors: Mapping[_Key, float]) -> Refinement[_Key]:
    """Moves clocks within their error bounds, only as far as needed; the most exact ones move last.

        slacks (0, 1): -0.2, errors 0: 0.1, 1: 0.3   becomes   shifts 1: 0.2

    Args:
        slacks: (clock of a cause, clock of its effect) -> the least time from an end to a beginning that waited for
            it, in seconds; negative where that contradicts.
        errors: clock -> seconds by which it may be moved in either direction; others stay.
    """
    cross = {pair: slack for pair, slack in slacks.items() if pair[0] != pair[1]}
    worst = min(cross.values(), default=0.0)
    if worst >= 0:
        return Refinement()
    keys = sorted(dict.fromkeys(key for pair in cross for key in pair), key=lambda key: errors.get(key, 0.0))
    place = {key: index for index, key in enumerate(keys, start=1)}  # 0 is a clock that doesn't move.

    def bounds(allowed: float) -> np.ndarray:
        """[i, j]: the most by which shift i may be above shift j, all told; with each slack that much larger."""
        found = np.full((len(keys) + 1, len(keys) + 1), np.inf)
        np.fill_diagonal(found, 0.0)
        for key, index in place.items():
            found[0, index] = found[index, 0] = errors.get(key, 0.0)
        for (cause, effect), slack in cross.items():
            pair = place[cause], place[effect]
            found[pair] = min(found[pair], slack + allowed)
        for index in range(len(found)):
            np.minimum(found, found[:, index, None] + found[None, index, :], out=found)
        return found

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
    found = {key: shifts[index] for key, index in place.items() if shifts[index]}
    left = [
        Contradiction(cause, effect, short)
        for (cause, effect), slack in cross.items()
        if (short := found.get(cause, 0.0) - found.get(effect, 0.0) - slack) > _TOLERANCE
    ]
    return Refinement(found, tuple(sorted(left, key=lambda item: -item.seconds)))


def _impossible(bounds: np.ndarray) -> bool:
    return bool((np.diagonal(bounds) < -1e-12).any())
