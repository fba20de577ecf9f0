"""What a device does in one step, as data: a `Task` is one call, a `Schedule` is every device's ordered tasks.

Both have a text form that parses back. ``2F0`` is stage 2, forward, micro-batch 0; ``0B3.r1`` is stage 0, backward,
micro-batch 3, replica 1. A schedule has one line per device::

    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@functools.total_ordering
class Phase(enum.Enum):
    """Which part of a stage's work a task is; ordered as a micro-batch meets them."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "Bx"
    WEIGHT_GRAD = "Bw"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Phase):
            return NotImplemented
        phases = list(Phase)
        return phases.index(self) < phases.index(other)


_TASK_PATTERN = re.compile(r"([0-9]+)(F|Bx|Bw|B)([0-9]+)(?:\.r([0-9]+))?(?:\.c([0-9]+))?")


@dataclass(frozen=True, order=True)
class Task:
    """One phase of one micro-batch (the slice of one replica) in one chunk of one stage; all numbers count from 0.

    Raises:
        ValueError: a number is negative.
    """

    stage: int
    phase: Phase
    micro_batch: int
    replica: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.stage < 0 or self.micro_batch < 0 or self.replica < 0 or self.chunk < 0:
            numbers = {name: getattr(self, name) for name in ("stage", "micro_batch", "replica", "chunk")}
            name, number = next((name, number) for name, number in numbers.items() if number < 0)
            raise ValueError(f"task's {name} is {number}; it must be 0 or more")
        # Tasks are looked up by the ten thousand, and an enum's own hash is slow.
        key = (self.stage, self.micro_batch, self.replica, self.chunk, self.phase._value_)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[type[Task], tuple[int, Phase, int, int, int]]:
        # Texts hash differently in another process.
        return Task, (self.stage, self.phase, self.micro_batch, self.replica, self.chunk)

    def __str__(self) -> str:
        replica = f".r{self.replica}" if self.replica else ""
        chunk = f".c{self.chunk}" if self.chunk else ""
        return f"{self.stage}{self.phase.value}{self.micro_batch}{replica}{chunk}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Return the task that prints as ``text``.

        Raises:
            ValueError: ``text`` isn't a task.
        """
        match = _TASK_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} isn't a task; write <stage><phase><micro-batch>[.r<replica>][.c<chunk>] "
                f"with a phase of F, B, Bx or Bw, such as '2F0' or '0B3.r1'"
            )
        stage, phase, micro_batch, replica, chunk = match.groups()
        return cls(int(stage), Phase(phase), int(micro_batch), int(replica or 0), int(chunk or 0))


@dataclass(frozen=True)
class Schedule:
    """The ordered tasks of one training step for every device.

    Attributes:
        name: the policy that made it.
        orders: device index -> its tasks in order. A device without tasks has an empty tuple. Read-only.
    """

    name: str
    orders: Mapping[int, tuple[Task, ...]]

    def __post_init__(self) -> None:
        orders = {device: tuple(tasks) for device, tasks in sorted(self.orders.items())}
        object.__setattr__(self, "orders", MappingProxyType(orders))

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.orders.items())))

    def __reduce__(self) -> tuple[type[Schedule], tuple[str, dict[int, tuple[Task, ...]]]]:
        return Schedule, (self.name, dict(self.orders))  # a read-only view doesn't copy or pickle by itself

    def __str__(self) -> str:
        return "\n".join(" ".join([f"{device}:", *map(str, tasks)]) for device, tasks in self.orders.items())

    @classmethod
    def parse(cls, text: str, name: str = "parsed") -> Schedule:
        """Return the schedule that prints as ``text``; blank lines are ignored.

        Raises:
            ValueError: a line isn't ``<device>: <task> <task> ...``, or a device has two lines.
        """
        orders: dict[int, tuple[Task, ...]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            head, colon, rest = line.partition(":")
            head = head.strip()
            if not colon or not (head.isascii() and head.isdigit()):
                raise ValueError(f"line {number} of the schedule is {line!r}; write <device>: <task> <task> ...")
            device = int(head)
            if device in orders:
                raise ValueError(f"line {number} of the schedule lists device {device} again; give it one line only")
            try:
                orders[device] = tuple(map(Task.parse, rest.split()))
            except ValueError as error:
                raise ValueError(f"line {number} of the schedule: {error}") from error
        return cls(name, orders)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task, device by device, each device's in its order."""
        return tuple(task for tasks in self.orders.values() for task in tasks)

    @functools.cached_property
    def _devices(self) -> dict[Task, int]:
        return {task: device for device, tasks in self.orders.items() for task in tasks}

    def device_of(self, task: Task) -> int:
        """Return the index of the device that runs ``task``.

        Raises:
            LookupError: no device runs it.
        """
        try:
            return self._devices[task]
        except KeyError:
            raise LookupError(
                f"no device runs {task} in schedule {self.name!r}, which has {len(self._devices)} tasks on "
                f"{len(self.orders)} devices"
            ) from None
