"""A step over time: planned, simulated or measured, in the one form that every drawing takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from graph_passes.ir.tasks import Phase

TASKS = tuple(phase.value for phase in Phase)
"""Kinds of spans that are tasks of a schedule."""
SEND, ALL_REDUCE = "send", "all_reduce"
LINK_KINDS = frozenset({SEND, ALL_REDUCE})
"""Kinds of spans in which a link is busy, not a device."""

COLOURS = {
    "F": "#4a86c8",
    "B": "#58a55c",
    "Bx": "#33a09a",
    "Bw": "#a5c23f",
    "split": "#b3b8bd",
    "concat": "#8d959c",
    "relay": "#dcc779",
    "accumulate": "#f0963c",
    "all_reduce": "#8e63b5",
    "apply": "#b5523b",
    "send": "#c9a227",
    "read": "#cdd9e5",
    "metrics": "#9fc3e8",
    "other": "#e3e5e8",
}
"""Kind of a span or of a task node -> hex colour: one palette for timelines and graphs."""

CONTROL = "#d62728"
"""Hex colour of control edges."""

DATA = "#4d5359"
"""Hex colour of data edges."""

MEASURED, LAUNCHES = "measured", "launches"
"""Names of timelines of traced steps: of work, and of launches of GPUs' kernels, where these report nothing."""

MemoryCurve = tuple[tuple[float, float], ...]
"""(seconds from the start of the step, bytes in use from then on), by time."""


class Span(NamedTuple):
    """A span of time in a step.

    Attributes:
        kind: ``F``, ``B``, ``Bx``, ``Bw``, ``send``, ``all_reduce`` or ``apply``.
        start: seconds from the start of the step.
        end: seconds from the start of the step.
        device: index of the device; for a ``send``, the sender; None for an all-reduce, which has several, unless
            it was measured or gathers parameters.
        stage: its stage; for an all-reduce, the first one.
        micro_batch: its micro-batch; None if it comes once in a step.
        replica: its replica.
        target: receiving device of a ``send``.
        bytes: bytes of a ``send`` or an ``all_reduce``.
        cause: position of the span for whose end this one waited last; None for the first.
        reduction: for an ``all_reduce``, its position in `CostModel.reductions`.
        activity: number of its activity in a simulated or emulated step, otherwise -1.
    """

    kind: str
    start: float
    end: float
    device: int | None
    stage: int
    micro_batch: int | None = None
    replica: int = 0
    target: int | None = None
    bytes: float = 0.0
    cause: int | None = None
    reduction: int | None = None
    activity: int = -1

    def __str__(self) -> str:
        number = "" if self.micro_batch is None else str(self.micro_batch)
        replica = f".r{self.replica}" if self.replica else ""
        where = f" {self.device}->{self.target}" if self.target is not None else ""
        return f"{self.stage}{self.kind}{number}{replica}{where} {self.start:.6f}..{self.end:.6f}"


class Lane(NamedTuple):
    """A row of a timeline.

    Attributes:
        device: index of the device.
        row: ``compute``, ``send`` (what the device sends) or ``all_reduce``.
    """

    device: int
    row: str


def row_of(span: Span) -> str:
    """Returns the row of a device's lanes in which a span is shown."""
    if span.kind not in LINK_KINDS:
        return "compute"
    return ALL_REDUCE if span.kind == ALL_REDUCE else SEND


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step over time.

    Attributes:
        name: ``planned``, ``simulated``, ``measured`` or ``launches``; shown as a title.
        latency: seconds of the step.
        spans: all spans. A span of kind ``all_reduce`` without a device takes part on all devices of its reduction in
            `reduced_on`.
        devices: index of a device -> its label, in the order of the lanes.
        memory: device -> its curve; devices whose memory isn't known are missing.
        limits: device -> its memory in bytes; devices without a limit are missing.
        reduced_on: number of a reduction -> its devices.
        samples: samples of the step; None if that isn't known.
        untraced: seconds of the same step without tracing; None if it wasn't traced.
        waited: seconds before the step in which it waited for its batch; None if that isn't known.
        unit: ``s``; or ``F`` if times aren't known, where 1 is the time of a forward task.

    Raises:
        ValueError: a span ends before it starts, or is on a device that isn't among ``devices``; a time or a size isn't
            finite, or the step's time is negative.
    """

    name: str
    latency: float
    spans: tuple[Span, ...] = dataclasses.field(repr=False)
    devices: Mapping[int, str] = dataclasses.field(repr=False)
    memory: Mapping[int, MemoryCurve] = dataclasses.field(default_factory=dict, repr=False)
    limits: Mapping[int, float] = dataclasses.field(default_factory=dict, repr=False)
    reduced_on: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False)
    samples: int | None = None
    unit: str = "s"
    untraced: float | None = None
    waited: float | None = None

    def __post_init__(self) -> None:
        numbers = [self.latency, *(number for span in self.spans for number in (span.start, span.end, span.bytes))]
        numbers += (number for curve in self.memory.values() for point in curve for number in point)
        numbers += self.limits.values()
        if wrong := [number for number in numbers if not math.isfinite(number)]:
            raise ValueError(
                f"the {self.name} timeline has {len(wrong)} times or sizes that aren't finite, such as {wrong[0]}; "
                f"leave them out"
            )
        if self.latency < 0:
            raise ValueError(f"the {self.name} timeline takes {self.latency}; give 0 or more")
        for span in self.spans:
            if not span.start <= span.end:
                raise ValueError(f"{span} of the {self.name} timeline ends before it starts")
            for device in self.devices_of(span):
                if device not in self.devices:
                    raise ValueError(
                        f"{span} of the {self.name} timeline is on device {device}, which isn't among its "
                        f"{len(self.devices)} devices"
                    )

    def devices_of(self, span: Span) -> tuple[int, ...]:
        """Returns the devices whose lanes show a span."""
        if span.device is not None:
            return (span.device,)
        return () if span.reduction is None else self.reduced_on.get(span.reduction, ())

    @functools.cached_property
    def lanes(self) -> Mapping[Lane, tuple[Span, ...]]:
        """Spans of each lane by time; by device, computation first. Other lanes exist only if not empty."""
        lanes: dict[Lane, list[Span]] = {}
        for device in self.devices:
            lanes |= {Lane(device, "compute"): [], Lane(device, SEND): [], Lane(device, ALL_REDUCE): []}
        for span in self.spans:
            row = row_of(span)
            for device in self.devices_of(span):
                lanes[Lane(device, row)].append(span)
        return {
            lane: tuple(sorted(spans, key=lambda span: (span.start, span.end)))
            for lane, spans in lanes.items()
            if spans or lane.row == "compute"
        }

    @functools.cached_property
    def busy(self) -> Mapping[int, float]:
        """Device -> seconds in which it computes; overlapping spans count once."""
        return {device: covered(self.lanes[Lane(device, "compute")]) for device in self.devices}

    @functools.cached_property
    def bubbles(self) -> Mapping[int, float]:
        """Device -> the fraction of the step in which it computes nothing, 0 to 1; empty for launches."""
        if self.name == LAUNCHES:
            return {}
        return {
            device: max(0.0, 1 - busy / self.latency) if self.latency else 0.0 for device, busy in self.busy.items()
        }

    @property
    def peak_bytes(self) -> Mapping[int, float]:
        """Device -> its peak memory in bytes; devices whose memory isn't known are missing."""
        return {device: max(level for _, level in curve) for device, curve in self.memory.items() if curve}

    @property
    def throughput(self) -> float | None:
        """Samples per second; None if that isn't known."""
        if self.samples is None or self.unit != "s":
            return None
        return self.samples / self.latency if self.latency else math.inf


def covered(spans: tuple[Span, ...]) -> float:
    """Returns the seconds covered by at least one of these spans, which are ordered by their start."""
    total, end = 0.0, -math.inf
    for span in spans:
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


_DARK, _LIGHT = "#1f2328", "#ffffff"


def text_colour(background: str) -> str:
    """Returns dark or light, whichever reads better on a background (``#rrggbb``)."""
    red, green, blue = (int(background[start : start + 2], 16) for start in (1, 3, 5))
    return _DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else _LIGHT
