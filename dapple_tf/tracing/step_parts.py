"""The parts of a device's time in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

Interval = tuple[float, float]
"""(start, end) in seconds."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of each part of a step on a device; they add up to the step.

    If several go on at once, the first in this list counts.

    Attributes:
        forward: computing F, metrics included.
        backward: computing B, or Bx and Bw.
        accumulate: accumulating gradients, and packing them for reduction.
        apply: updating parameters.
        all_reduce: in a reduction, from the moment when all devices take part, while computing nothing.
        transfers: waiting for a tensor on its way here, while nothing is computed: from the end of its producer until
            its reader is ready.
        bubble: waiting for other devices, or for a core that they use.
        before: before the first device begins: the host cuts the batch and starts the devices.
        after: after the last device has ended: the host collects results.
    """

    forward: float = 0.0
    backward: float = 0.0
    accumulate: float = 0.0
    apply: float = 0.0
    all_reduce: float = 0.0
    transfers: float = 0.0
    bubble: float = 0.0
    before: float = 0.0
    after: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, name) for name in NAMES)


NAMES = tuple(field.name for field in fields(StepParts))
_GIVEN = NAMES[:6]
_OF_KIND = {"F": "forward", "B": "backward", "Bx": "backward", "Bw": "backward"}


def part_of(kind: str) -> str:
    """Returns the part that a kind of spans belongs to."""
    return _OF_KIND.get(kind, kind)


def step_parts(given: Iterable[tuple[str, Interval]], working: Interval, latency: float) -> StepParts:
    """Returns the parts of one device's step.

    Args:
        given: (name of a part, interval), of parts up to ``transfers``; intervals may overlap.
        working: from the start of the first device to the end of the last one.
        latency: seconds of the step.
    """
    begin, end = working
    events: list[tuple[float, int, int]] = []
    for name, (start, stop) in given:
        start, stop = max(begin, start), min(end, stop)
        if stop > start:
            index = _GIVEN.index(name)
            events += [(start, index, 1), (stop, index, -1)]
    events.sort()
    open_ = [0] * len(_GIVEN)
    seconds = dict.fromkeys(NAMES, 0.0)
    now = begin
    for moment, index, change in [*events, (end, 0, 0)]:
        current = next((name for name, count in zip(_GIVEN, open_, strict=True) if count), "bubble")
        seconds[current] += moment - now
        now = moment
        open_[index] += change
    return StepParts(**seconds | {"before": max(0.0, begin), "after": max(0.0, latency - end)})


def mean(parts: Sequence[StepParts]) -> StepParts:
    """Returns the mean of each part over devices."""
    return StepParts(**{name: sum(getattr(own, name) for own in parts) / len(parts) for name in NAMES})
