"""The result of a simulated or emulated step: spans of time, how busy devices were, and their memory over time."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dapple_tf.common.text_table import table
from dapple_tf.common.units import gib, ms_text
from dapple_tf.describe.plan import PlanError
from dapple_tf.simulation.activities import ActivityGraph
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.step_memory import StepMemory
from dapple_tf.view.notebook import Table, notebook_html
from dapple_tf.view.timeline import LINK_KINDS, Span, Timeline


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated step.

    Attributes:
        latency: seconds of the step.
        spans: everything that took time, in the order of its creation.
        graph: its activities.
    """

    latency: float
    spans: tuple[Span, ...] = field(repr=False)
    graph: ActivityGraph = field(repr=False)

    @property
    def costs(self) -> CostModel:
        """The costs it was computed from."""
        return self.graph.costs

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.costs.plan.global_batch_size / self.latency if self.latency else math.inf

    # ---- time

    @functools.cached_property
    def busy(self) -> Mapping[int, float]:
        """Device -> seconds in which it computes."""
        seconds = dict.fromkeys(self.costs.devices, 0.0)
        for span in self.spans:
            if span.device is not None and span.kind not in LINK_KINDS:
                seconds[span.device] += span.end - span.start
        return seconds

    @functools.cached_property
    def idle(self) -> Mapping[int, float]:
        """Device -> the fraction of the step in which it is idle, 0 to 1."""
        return {device: 1 - busy / self.latency if self.latency else 0.0 for device, busy in self.busy.items()}

    @functools.cached_property
    def bubbles(self) -> tuple[float, ...]:
        """For each stage the fraction of the step in which its devices are idle, 0 to 1.

        Stages that share their devices share their bubbles.
        """
        return tuple(sum(self.idle[device] for device in own) / len(own) for own in self.costs.plan.devices)

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """Spans that each waited for the previous one, up to the last to end: shorten these to be faster."""
        if not self.spans:
            return ()
        index: int | None = max(range(len(self.spans)), key=lambda i: self.spans[i].end)
        path = []
        while index is not None:
            path.append(self.spans[index])
            index = self.spans[index].cause
        return tuple(reversed(path))

    @property
    def timeline(self) -> Mapping[int, tuple[Span, ...]]:
        """Device -> its computations, in order of time."""
        by_device: dict[int, list[Span]] = {device: [] for device in self.costs.devices}
        for span in self.spans:
            if span.device is not None and span.kind not in LINK_KINDS:
                by_device[span.device].append(span)
        return {device: tuple(sorted(spans, key=lambda span: span.start)) for device, spans in by_device.items()}

    def drawn(self, name: str = "simulated") -> Timeline:
        """Returns the step as a timeline, which all pictures take.

        Args:
            name: its title.
        """
        costs = self.costs
        return Timeline(
            name,
            self.latency,
            self.spans,
            costs.plan.device_labels(),
            self.memory,
            {
                device: float(limit)
                for device in costs.devices
                if (limit := costs.cluster.devices[device].memory_bytes) is not None
            },
            {number: reduction.devices for number, reduction in enumerate(costs.reductions)},
            costs.plan.global_batch_size,
        )

    # ---- memory

    @functools.cached_property
    def memory(self) -> Mapping[int, tuple[tuple[float, float], ...]]:
        """Device -> (seconds, bytes in use from then on), its curve over the step.

        Residuals stay from F to B, or to Bx, which leaves the inputs of Bw. A running backward also needs its
        temporaries, a reduction its buffers. If the profile has buffers, each lives as long as in a real step.
        """
        changes = {device: _Changes(stored) for device, stored in self.costs.stored_bytes.items()}
        for device, start, end, size in StepMemory(self).lives():
            if start <= end:
                changes[device].add(start, end, size)
            else:
                changes[device].add(0.0, end, size)
                changes[device].add(start, self.latency, size)
        return {device: change.curve() for device, change in changes.items()}

    @functools.cached_property
    def peak_bytes(self) -> Mapping[int, float]:
        """Device -> the most memory that it uses."""
        return {device: max(level for _, level in curve) for device, curve in self.memory.items()}

    @property
    def fits(self) -> bool:
        """Whether no device needs more memory than it is known to have."""
        limits = ((device, self.costs.cluster.devices[device].memory_bytes) for device in self.peak_bytes)
        return all(limit is None or self.peak_bytes[device] <= limit for device, limit in limits)

    def check_memory(self) -> None:
        """Checks that no device needs more memory than it has, whatever the policy.

        Raises:
            PlanError: names the device that lacks most, the bytes that it needs and those that it has.
        """
        over = []
        for device, peak in self.peak_bytes.items():
            limit = self.costs.cluster.devices[device].memory_bytes
            if limit is not None and peak > limit:
                over.append((peak - limit, device))
        if over:
            lacking, device = max(over)
            raise PlanError(
                f"device {device} needs {gib(self.peak_bytes[device])}, {gib(lacking)} more than it has: use a "
                f"schedule that holds fewer micro-batches, such as dapple_a, smaller micro-batches, or more devices"
            )

    # ---- text

    def __str__(self) -> str:
        return "\n".join([self._summary(), table(self._rows()), self._shares()])

    def _repr_html_(self) -> str:
        """Returns the simulation in a notebook: what each stage does, and the step as a picture."""
        tables = [Table("", self._rows())]
        return notebook_html(self._summary(), tables, [self.drawn()], [self._shares()])

    def _summary(self) -> str:
        return f"step {ms_text(self.latency)} ms, {self.throughput:.4g} samples/s"

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns a row for each stage or group that shares devices, below a header."""
        rows: list[tuple[str, ...]] = [("stage", "devices", "bubble", "busy ms", "peak memory")]
        for stages, devices in device_rows(self.costs):
            busy = sum(self.busy[device] for device in devices) / len(devices)
            idle = sum(self.idle[device] for device in devices) / len(devices)
            peak = max(self.peak_bytes[device] for device in devices)
            rows.append((stages, shown(devices), f"{idle:.1%}", ms_text(busy), gib(peak)))
        return rows

    def _shares(self) -> str:
        """Returns the parts of the critical path, as text."""
        shares: dict[str, float] = {}
        path = self.critical_path
        for span, after in itertools.zip_longest(path, path[1:]):
            end = span.end if after is None else min(span.end, after.start)  # overlapped reductions start before
            shares[span.kind] = shares.get(span.kind, 0.0) + end - span.start
        if (once := self.costs.profile.step_seconds) > 0:  # feeding, metrics: after the last span
            shares["what a step takes once"] = once
        parts = ", ".join(f"{kind} {ms_text(seconds)} ms" for kind, seconds in shares.items())
        return f"critical path: {parts}"


class _Changes:
    """The changes of one device's memory."""

    def __init__(self, stored: float) -> None:
        self.stored = stored
        self.changes: list[tuple[float, float]] = []
        self.moments: defaultdict[float, float] = defaultdict(float)  # what rises and falls at one time is a peak too

    def add(self, start: float, end: float, size: float) -> None:
        """Adds a buffer."""
        self.changes += [(start, size), (end, -size)]
        if start == end:
            self.moments[start] = max(self.moments[start], size)

    def curve(self) -> tuple[tuple[float, float], ...]:
        """Returns the curve: (seconds, bytes from then on)."""
        level = self.stored
        points = [(0.0, level)]
        for time, group in itertools.groupby(sorted(self.changes), key=lambda event: event[0]):
            level += sum(change for _, change in group)
            if time in self.moments:
                points.append((time, level + self.moments[time]))
            points.append((time, level))
        return tuple(points)


def device_rows(costs: CostModel) -> list[tuple[str, tuple[int, ...]]]:
    """Returns rows (stages, devices) for reports: one for each list of devices, with the stages that share it."""
    rows: dict[tuple[int, ...], list[str]] = {}
    for stage, devices in enumerate(costs.plan.devices):
        rows.setdefault(devices, []).append(str(stage))
    return [(shown(stages), devices) for devices, stages in rows.items()]


def shown(entries: Sequence[object], limit: int = 8) -> str:
    """Returns the first ``limit`` entries of a list, as text."""
    return " ".join(map(str, entries[:limit])) + (" ..." if len(entries) > limit else "")
