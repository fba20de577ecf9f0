"""What a device does in one step, as data: a `Task` is one call, a `Schedule` is every device's ordered tasks.

Both have a text form that parses back. ``2F0`` is stage 2, forward, micro-batch 0; ``0B3.r1`` is stage 0, backward,
micro-batch 3, replica 1. A schedule has one line per device; ``1Bw0>2Bx0`` is a task that also waits for the end of
another, on any device::

    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@functools.total_ordering
class Phase(enum.Enum):
    """Which part of a stage's work a task is; ordered as a micro-batch meets them.

    A stage has either B for all micro-batches, or Bx (the gradients of what it received) and Bw (those of its
    parameters) for all.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "Bx"
    WEIGHT_GRAD = "Bw"

    __hash__ = object.__hash__  # Enum's own takes half of a list schedule's time.

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Phase):
            return NotImplemented
        phases = list(Phase)
        return phases.index(self) < phases.index(other)


_INPUTS = {
    Phase.FORWARD: ((-1, Phase.FORWARD),),
    Phase.BACKWARD: ((0, Phase.FORWARD), (1, Phase.BACKWARD), (1, Phase.INPUT_GRAD)),
    Phase.INPUT_GRAD: ((0, Phase.FORWARD), (1, Phase.BACKWARD), (1, Phase.INPUT_GRAD)),
    Phase.WEIGHT_GRAD: ((0, Phase.INPUT_GRAD),),
}


@functools.cache
def inputs(stage: int, phase: Phase) -> tuple[tuple[int, Phase], ...]:
    """Returns stage and phase of a task's predecessors in its micro-batch; a stage has either B or Bx.

    A predecessor in the same stage is on the same replica, and comes first; in another stage, every replica with some
    of the task's samples is one.
    """
    return tuple((stage + step, other) for step, other in _INPUTS[phase] if stage + step >= 0)


_TASK_PATTERN = re.compile(r"([0-9]+)(F|Bx|Bw|B)([0-9]+)(?:\.r([0-9]+))?")


@dataclass(frozen=True, order=True)
class Task:
    """One phase of one micro-batch (the slice of one replica) in one stage; all numbers count from 0.

    Raises:
        ValueError: a number is negative.
    """

    stage: int
    phase: Phase
    micro_batch: int
    replica: int = 0

    def __post_init__(self) -> None:
        if self.stage < 0 or self.micro_batch < 0 or self.replica < 0:
            numbers = {name: getattr(self, name) for name in ("stage", "micro_batch", "replica")}
            name, number = next((name, number) for name, number in numbers.items() if number < 0)
            raise ValueError(f"task's {name} is {number}; it must be 0 or more")
        # Tasks are looked up tens of thousands of times, and an enum's own hash is slow.
        key = (self.stage, self.micro_batch, self.replica, self.phase._value_)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[type[Task], tuple[int, Phase, int, int]]:
        # Texts hash differently in another process.
        return Task, (self.stage, self.phase, self.micro_batch, self.replica)

    def __str__(self) -> str:
        replica = f".r{self.replica}" if self.replica else ""
        return f"{self.stage}{self.phase.value}{self.micro_batch}{replica}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Returns the task that prints as ``text``.

        Raises:
            ValueError: ``text`` isn't a task.
        """
        match = _TASK_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} isn't a task; write <stage><phase><micro-batch>[.r<replica>] "
                f"with a phase of F, B, Bx or Bw, such as '2F0' or '0B3.r1'"
            )
        stage, phase, micro_batch, replica = match.groups()
        return cls(int(stage), Phase(phase), int(micro_batch), int(replica or 0))


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
        return Schedule, (self.name, dict(self.orders))  # a read-only view doesn't copy or pickle

    def __str__(self) -> str:
        return "\n".join(" ".join([f"{device}:", *map(str, tasks)]) for device, tasks in self.orders.items())

    @classmethod
    def parse(cls, text: str, name: str = "parsed") -> Schedule:
        """Returns the schedule that prints as ``text``; blank lines are ignored.

        Raises:
            ValueError: a line isn't ``<device>: <task> <task> ...``, a device has two lines, or as `Schedule`.
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
    def split(self) -> frozenset[int]:
        """The stages whose backward is two tasks, Bx and Bw."""
        return frozenset(
            task.stage for task in self.tasks if task.phase is Phase.INPUT_GRAD or task.phase is Phase.WEIGHT_GRAD
        )

    @functools.cached_property
    def last_gradients(self) -> Mapping[tuple[int, int], Task]:
        """(device, stage) -> the task that completes the stage's gradients there; empty for a forward schedule."""
        return {
            (device, task.stage): task
            for device, tasks in self.orders.items()
            for task in tasks
            if task.phase is Phase.BACKWARD or task.phase is Phase.WEIGHT_GRAD
        }

    @functools.cached_property
    def last_positions(self) -> Mapping[tuple[int, int], int]:
        """(device, stage) -> the position of the stage's last task in the device's order."""
        return {
            (device, task.stage): position
            for device, tasks in self.orders.items()
            for position, task in enumerate(tasks)
        }

    @functools.cached_property
    def _devices(self) -> dict[Task, int]:
        return {task: device for device, tasks in self.orders.items() for task in tasks}

    @functools.cached_property
    def _replicas(self) -> dict[tuple[int, Phase, int], list[Task]]:
        replicas: dict[tuple[int, Phase, int], list[Task]] = {}
        for task in self.tasks:
            replicas.setdefault((task.stage, task.phase, task.micro_batch), []).append(task)
        return replicas

    def inputs(self, task: Task) -> list[Task]:
        """Returns the predecessors of a task in this schedule, besides earlier tasks of its device.

        F waits for F of the stage before; B and Bx for their F, and for B or Bx of the stage after; Bw for its Bx. All
        replicas of other stages are taken as predecessors.
        """
        found: list[Task] = []
        for stage, phase in inputs(task.stage, task.phase):
            if stage != task.stage:
                found += self._replicas.get((stage, phase, task.micro_batch), ())
            elif (own := Task(stage, phase, task.micro_batch, task.replica)) in self._devices:
                found.append(own)
        return found

    def device_of(self, task: Task) -> int:
        """Returns the index of the device that runs ``task``.

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


def reduction_order(
    groups: Sequence[tuple[int, ...]], schedule: Schedule | None, devices: Sequence[Sequence[int]]
) -> list[int]:
    """Returns the order in which every device all-reduces groups, see `piece_order`: positions in ``groups``."""
    return [index for index, _ in piece_order(groups, schedule, devices, [1] * len(groups))]


def piece_order(
    groups: Sequence[tuple[int, ...]],
    schedule: Schedule | None,
    devices: Sequence[Sequence[int]],
    pieces: Sequence[int],
) -> list[tuple[int, int]]:
    """Returns the order in which every device all-reduces the pieces of groups: that in which they are complete.

    A group's rank is the position of its last gradient in the order of a device; devices that run several of its stages
    decide for each of them. Among groups that are complete at the same position, the one whose first stage is later
    goes first: backward ends with the first stage. All pieces of a group but the last are complete during that task, so
    before the last ones of other groups that it completes.

    Args:
        groups: the stages of each group.
        schedule: the order of tasks; None takes them all as complete at the same place.
        devices: for each stage the numbers of the devices, in the schedule, that compute its parameters' gradients.
        pieces: number of pieces of each group.

    Returns:
        (position in ``groups``, number of the piece).
    """
    last = {} if schedule is None else schedule.last_positions

    def complete(stages: tuple[int, ...]) -> int:
        return max((last.get((device, stage), 0) for stage in stages for device in devices[stage]), default=0)

    def rank(entry: tuple[int, int]) -> tuple[int, ...]:
        index, piece = entry
        first, final = groups[index][0], groups[index][-1]
        return complete(groups[index]), piece == pieces[index] - 1, -first, -final, piece

    return sorted(((index, piece) for index, count in enumerate(pieces) for piece in range(count)), key=rank)


def sources_of(
    maker: int, readers: Iterable[int], relays: Collection[int], devices: Sequence[Hashable]
) -> dict[int, int]:
    """Maps each reader of a tensor to the stage that it gets the tensor from: the nearest one that has it.

    Steps and their costs share this rule.

        made by 0, read by 1, 2 and 3, relays {1, 2}:   0 -> 1 -> 2 -> 3
        the same with stages 0 and 2 on one device:     0 -> 1 -> 3,  0 -> 2

    That is the last stage before it on the same devices, if there is one, else the last before it. Only the maker and
    the relays among the readers are considered. A gradient takes the same way back.

    Args:
        maker: the stage that makes the tensor.
        readers: later stages that read it.
        relays: the stages that hand on what they read.
        devices: each stage's devices, in the order of its replicas.
    """
    holders, sources = [maker], {}
    for reader in sorted(readers):
        near = [stage for stage in holders if devices[stage] == devices[reader]]
        sources[reader] = (near or holders)[-1]
        if reader in relays:
            holders.append(reader)
    return sources
