"""What ranges of a model's layers take when their operators are placed on groups of devices: a part of the profile."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class GroupCostsError(ValueError):
    """Costs on groups of devices contradict themselves."""


@dataclass(frozen=True)
class PlacedRange:
    """Layers whose operators are placed on a group of devices: one slice, forward, backward and update.

    Attributes:
        first: index of the first layer.
        stop: index of the layer after the last.
        samples: samples of the slice.
        forward: seconds of F.
        backward: seconds of B.
        apply: seconds of the update.
        whole: seconds of all of them where nothing divides them into tasks: a step of one slice and one stage.
        stored: for each device of the group, bytes of variables.
        residual: for each, bytes that F leaves to B.
        working: for each, bytes that are alive at most beyond these.
        sent: seconds once in a step, whatever its micro-batches, in which variables' parts are sent to their users.
        copies: for each device, bytes of such parts of others' variables, which stay as long as tasks need them; empty
            for none.
    """

    first: int
    stop: int
    samples: int
    forward: float
    backward: float
    apply: float
    whole: float
    stored: tuple[float, ...]
    residual: tuple[float, ...]
    working: tuple[float, ...]
    sent: float = 0.0
    copies: tuple[float, ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices of the group."""
        return len(self.stored)


class Relative(NamedTuple):
    """A range on a group of devices, relative to the same on one device.

    Attributes:
        forward: ratio of the seconds of F.
        backward: ratio of those of B.
        apply: ratio of those of the update.
        whole: ratio of those of all of them where nothing divides them into tasks.
        stored: for each device of the group, the ratio of its variables' bytes to all; they add up to 1.
        residual: for each, the ratio of its residuals' bytes; what several devices read is on each of them.
        working: for each, the ratio of its other bytes.
        sent: ratio of the seconds in which variables' parts are sent, once in a step, to those of F and B.
        copies: for each device, the ratio of the bytes of these parts to those of all variables.
    """

    forward: float
    backward: float
    apply: float
    whole: float
    stored: tuple[float, ...]
    residual: tuple[float, ...]
    working: tuple[float, ...]
    sent: float
    copies: tuple[float, ...]

    @property
    def held(self) -> tuple[float, ...]:
        """For each device, the ratio of the bytes of its variables, and of its copies of others, to all variables'."""
        return tuple(own + copied for own, copied in zip(self.stored, self.copies, strict=True))


@dataclass(frozen=True)
class GroupCosts:
    """What pieces of a model, and some longer ranges of its layers, take on one device and on groups of devices.

    Times and bytes are only used relative to one device: the profile's layers say what one device takes.

    Attributes:
        ends: index of the layer after the last of each piece; the last is the number of layers.
        ranges: the pieces, each on one device and on all sizes of groups; and ranges that were searched as a whole.

    Raises:
        GroupCostsError: a range is empty, or isn't given for one device; or a piece is missing.
    """

    ends: tuple[int, ...]
    ranges: tuple[PlacedRange, ...]

    def __post_init__(self) -> None:
        for name in ("ends", "ranges"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.ends or list(self.ends) != sorted({*self.ends}) or self.ends[0] < 1:
            raise GroupCostsError(f"the pieces end at layers {list(self.ends)}; give ascending numbers from 1 on")
        for entry in self.ranges:
            where = f"layers {entry.first} to {entry.stop} on {entry.devices} devices"
            if not 0 <= entry.first < entry.stop <= self.ends[-1] or entry.samples < 1:
                raise GroupCostsError(
                    f"{where}, {entry.samples} samples: a range has at least one of the {self.ends[-1]} layers, and a "
                    f"slice at least one sample"
                )
            lengths = {len(entry.residual), len(entry.working), *([len(entry.copies)] if entry.copies else [])}
            if not entry.devices or lengths != {entry.devices}:
                raise GroupCostsError(
                    f"{where}: give stored, residual and working bytes of each device, copies, too, or none"
                )
        for (first, stop, devices), entries in self._known.items():
            alone = {entry.samples for entry in self._known.get((first, stop, 1), ())}
            for entry in entries:
                if entry.samples not in alone:
                    raise GroupCostsError(
                        f"layers {first} to {stop} with {entry.samples} samples are given on {devices} devices and not "
                        f"on one, to which they are compared"
                    )
        for first, stop in itertools.pairwise((0, *self.ends)):
            for devices in (1, *self.sizes):
                if (first, stop, devices) not in self._known:
                    raise GroupCostsError(f"the piece of layers {first} to {stop} is missing for {devices} devices")

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices of the groups, ascending; without 1."""
        return tuple(sorted({entry.devices for entry in self.ranges} - {1}))

    @functools.cached_property
    def _known(self) -> Mapping[tuple[int, int, int], tuple[PlacedRange, ...]]:
        """(first layer, layer after the last, number of devices) -> the range, for slices of ascending sizes."""
        known: dict[tuple[int, int, int], list[PlacedRange]] = {}
        for entry in sorted(self.ranges, key=lambda entry: entry.samples):
            known.setdefault((entry.first, entry.stop, entry.devices), []).append(entry)
        return {key: tuple(entries) for key, entries in known.items()}

    def knows(self, first: int, stop: int, devices: int) -> bool:
        """Returns whether a range was searched as a whole for groups of this size."""
        return (first, stop, devices) in self._known

    def piece_of(self, layer: int) -> tuple[int, int]:
        """Returns the piece that has a layer: its first layer, and the one after its last."""
        index = bisect.bisect_right(self.ends, layer)
        return (self.ends[index - 1] if index else 0), self.ends[index]

    def relative(self, first: int, stop: int, devices: int, samples: float) -> Relative:
        """Returns what a searched range takes relative to one device.

        Between two sizes of slices that were searched, it changes in proportion; outside, not at all.

        Args:
            first: index of its first layer.
            stop: index of the layer after its last.
            devices: number of devices of a group.
            samples: samples of a slice.
        """
        entries = self._known[first, stop, devices]
        alone = {entry.samples: entry for entry in self._known[first, stop, 1]}
        ratios = [_ratios(entry, alone[entry.samples]) for entry in entries]
        sizes = [entry.samples for entry in entries]
        after = bisect.bisect_left(sizes, samples)
        if after == 0 or after == len(sizes):
            return ratios[min(after, len(sizes) - 1)]
        share = (samples - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return _between(ratios[after - 1], ratios[after], share)


def _ratios(entry: PlacedRange, alone: PlacedRange) -> Relative:
    def ratio(part: float, whole: float) -> float:
        return part / whole if whole else 1.0

    def parts(own: tuple[float, ...], whole: float) -> tuple[float, ...]:
        # Of nothing, the first device has all.
        return tuple(size / whole for size in own) if whole else (1.0, *[0.0] * (entry.devices - 1))

    return Relative(
        ratio(entry.forward, alone.forward),
        ratio(entry.backward, alone.backward),
        ratio(entry.apply, alone.apply),
        ratio(entry.whole, alone.whole),
        parts(entry.stored, alone.stored[0]),
        parts(entry.residual, alone.residual[0]),
        parts(entry.working, alone.working[0]),
        entry.sent / (alone.forward + alone.backward) if alone.forward + alone.backward else 0.0,
        tuple(size / alone.stored[0] if alone.stored[0] else 0.0 for size in entry.copies or (0.0,) * entry.devices),
    )


def _between(less: Relative, more: Relative, share: float) -> Relative:
    def line(few: float, many: float) -> float:
        return few + share * (many - few)

    def lines(few: tuple[float, ...], many: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(map(line, few, many))

    return Relative(
        line(less.forward, more.forward),
        line(less.backward, more.backward),
        line(less.apply, more.apply),
        line(less.whole, more.whole),
        lines(less.stored, more.stored),
        lines(less.residual, more.residual),
        lines(less.working, more.working),
        line(less.sent, more.sent),
        lines(less.copies, more.copies),
    )
