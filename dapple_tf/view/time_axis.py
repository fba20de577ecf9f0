"""The axis that timelines share: its unit and ticks, and amounts as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from dapple_tf.common.text import bytes_text
from dapple_tf.view.timeline import Timeline

_SCALES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_TOLERANCE = 1e-6
"""Difference, as a part of a unit, up to which times are equal."""


def on_one_axis(timelines: Sequence[Timeline]) -> list[list[Timeline]]:
    """Groups timelines that can share an axis, those with the same unit of time, in the order in which units appear."""
    by_unit: dict[str, list[Timeline]] = {}
    for timeline in timelines:
        by_unit.setdefault(timeline.unit, []).append(timeline)
    return list(by_unit.values())


def shown_unit(unit: str, end: float) -> tuple[str, float]:
    """Returns (name, size) of the unit that labels an axis of ``end`` in a timeline's unit: (``ms``, 0.001)."""
    if unit != "s":
        return unit, 1.0
    return next(((name, size) for name, size in _SCALES if end >= size), _SCALES[-1] if end else _SCALES[0])


def time_text(value: float, unit: str) -> str:
    """Returns a time with its unit, in four digits: ``12.34 ms``, ``33 F``."""
    name, size = shown_unit(unit, value)
    return f"{value / size:.4g} {name}"


def step_text(timeline: Timeline) -> str:
    """Returns a step in a line: ``945.5 ms, 16.92 samples/s, bubbles 27.3%``: mean bubbles of all devices.

    For a traced step: ``276 ms traced, 3.07x the 90 ms without tracing, after 12 ms of waiting for its batch, ...``.
    """
    parts = [time_text(timeline.latency, timeline.unit)]
    if timeline.untraced:
        untraced = time_text(timeline.untraced, timeline.unit)
        parts = [f"{parts[0]} traced", f"{timeline.latency / timeline.untraced:.3g}x the {untraced} without tracing"]
    if timeline.waited is not None:
        parts.append(f"after {time_text(timeline.waited, timeline.unit)} of waiting for its batch")
    if timeline.throughput is not None and math.isfinite(timeline.throughput):
        parts.append(f"{timeline.throughput:.4g} samples/s")
    if timeline.bubbles:
        parts.append(f"bubbles {sum(timeline.bubbles.values()) / len(timeline.bubbles):.1%}")
    return ", ".join(parts)


def memory_text(timeline: Timeline, device: int) -> str:
    """Returns a device's peak and limit: ``1.25 of 16.0 GiB``."""
    number, unit = bytes_text(timeline.peak_bytes[device]).split()
    if device not in timeline.limits:
        return f"{number} {unit}"
    limit = bytes_text(timeline.limits[device])
    return f"{number} of {limit}" if limit.endswith(f" {unit}") else f"{number} {unit} of {limit}"


def ticks(end: float, most: int) -> list[float]:
    """Returns at most ``most`` round numbers from 0 to ``end``, in steps of 1, 2 or 5 times 10^n."""
    if not end > 0 or most < 2:
        return [0.0]
    least = end / (most - 1)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least * (1 - 1e-9))
    return [index * step for index in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def common_unit(times: Iterable[float], most: int) -> float | None:
    """Returns the largest time of which all ``times`` are multiples.

    Args:
        times: numbers of at least 0.
        most: maximum number of units in the longest of them.

    Returns:
        The time; None if there is none, or if all are 0.
    """
    distinct = sorted({time for time in times if time > 0}, reverse=True)
    if not distinct:
        return None
    smallest = distinct[0] / most * (1 - _TOLERANCE)
    unit = 0.0
    for time in distinct:
        unit = _common_divisor(time, unit, smallest)
        if not unit:
            return None
    close = all(abs(time / unit - round(time / unit)) <= _TOLERANCE * most for time in distinct)
    return distinct[0] / round(distinct[0] / unit) if close else None


def _common_divisor(one: float, other: float, smallest: float) -> float:
    """Returns the divisor by Euclid's algorithm with rounding errors; 0 if it goes below ``smallest``."""
    while other > smallest * _TOLERANCE * 10:
        rest = math.fmod(one, other)
        if other - rest < smallest * _TOLERANCE * 10:
            rest = 0.0
        one, other = other, rest
        if one < smallest:
            return 0.0
    return one


def short_label(label: str, most: int) -> str:
    """Returns a device's label in at most ``most`` characters, which still differs from other labels.

    >>> short_label("device 3: stages 1.r0, 2.r0", 20), short_label("device 3: stages 1.r0, 2.r0", 10)
    ('3: stages 1.r0, 2.r0', '3: 1…2.r0')
    """
    forms = [label, re.sub(r"^device (?=\d)", "", label)]
    forms.append(re.sub(r"(?<=: )stages? ", "", forms[-1]))
    fitting = next((form for form in forms if len(form) <= most), None)
    if fitting is not None:
        return fitting
    shortest, end = forms[-1], (most - 1) // 2
    return f"{shortest[: most - 1 - end]}…{shortest[len(shortest) - end :]}"
