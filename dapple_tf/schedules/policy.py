"""A scheduling policy as one value: order of tasks, refused options, use by the planner."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from dapple_tf.schedules.schedule_request import Active, Job, Orders, ScheduleError, ScheduleRequest
from graph_passes.ir.tasks import Phase, Task

__all__ = [
    "Active",
    "Job",
    "Orders",
    "Phase",
    "Placement",
    "Planning",
    "Policy",
    "ScheduleError",
    "ScheduleRequest",
    "Task",
    "any_request",
]

Place = TypeVar("Place")


class Placement(enum.Enum):
    """How stages lie on the places of a pipeline, each a list of devices."""

    STRAIGHT = "straight"
    """One stage on each place: 0 1 2."""
    PERIODIC = "periodic"
    """Several on each, repeating: 0 1 2 0 1 2."""
    VEE = "vee"
    """Two on each, there and back: 0 1 2 2 1 0."""

    def stages(self, places: Sequence[Place], count: int) -> list[Place] | None:
        """Returns each stage's place, with ``count`` stages on each; None if the placement has another number."""
        there = list(places)
        if self is Placement.STRAIGHT:
            return there if count == 1 else None
        if self is Placement.VEE:
            return there + there[::-1] if count == 2 else None
        return there * count if count > 1 else None


@dataclass(frozen=True)
class Planning:
    """The planner's use of a policy, and its cost.

    Attributes:
        placements: the placements that it is tried with; none for a policy that the planner leaves alone.
        rank: how likely it is to gain: policies of a higher rank are tried first.
        where_short: whether it is tried only where the devices' memory limits the micro-batches in flight.
        by_seconds: whether it orders tasks by their times, which go into the plan (`StagePlan.task_seconds`).
        list_runs: number of list schedules that it makes for one order.
        list_runs_per_stage: further list schedules for each stage.
        formula: whether it is one of DAPPLE's, which the search by formula covers; others are derived from its plans.
    """

    placements: tuple[Placement, ...] = (Placement.STRAIGHT,)
    rank: int = 0
    where_short: bool = False
    by_seconds: bool = False
    list_runs: int = 0
    list_runs_per_stage: int = 0
    formula: bool = False


def any_request(request: ScheduleRequest) -> None:
    """The check of a policy that takes all stages and devices."""


@dataclass(frozen=True)
class Policy:
    """A scheduling policy: the order in which each device runs its forwards and backwards in one step.

        def one_by_one(request):
            jobs = [Job(0, phase, i) for i in range(request.micro_batches) for phase in (Phase.FORWARD, Phase.BACKWARD)]
            return {device: jobs for device in request.devices[0]}

        ONE_BY_ONE = Policy("one_by_one", one_by_one)
        plan = dapple.Plan.data_parallel(2, 64, micro_batches=4, schedule=ONE_BY_ONE)

    docs/extending.md has a longer example. Every policy runs the weight gradients of a stage (B or Bw) in micro-batch
    order, so that results don't depend on it. All functions are pure: equal requests, equal orders.
    `schedule_check.validate` checks an order; orders of policies that aren't built in are checked before each use.

    Attributes:
        name: its name in plans and texts; built-in policies' names are taken.
        order: request -> for each device its jobs in order, for any number of micro-batches. A stage's devices all
            have its jobs. No stage may have more micro-batches in flight than `ScheduleRequest.limit` allows.
        summary: one line about it.
        in_flight: request -> the most micro-batches that each stage has in flight, from F to B or Bw; None derives it
            from the order.
        check: raises ScheduleError for stages, devices or options that the policy can't do, before anything is ordered.
        splits: True: each stage's backward is Bx and Bw; False: a whole B, unless an option splits it; None derives
            it from the order.
        reverses: whether it takes ``reverse_first_k``.
        needs_all: whether it keeps all micro-batches in flight, however little memory there is.
        shares_room: whether it limits the micro-batches in flight of all stages of a device together. A memory limit D
            then is the number of micro-batches' slices that a device holds, of any of its stages.
        planning: when the planner tries it.
        source: its reference in a plan's file: ``module:name`` or the path of a CSV file; None for a built-in one,
            and for one that is found by its name in the module that defines ``order``.

    Raises:
        ScheduleError: the name isn't a text, or could be a path or a module's attribute; or what must be a function
            isn't one.
    """

    name: str
    order: Callable[[ScheduleRequest], Orders]
    summary: str = ""
    in_flight: Callable[[ScheduleRequest], Sequence[int]] | None = None
    check: Callable[[ScheduleRequest], None] = any_request
    splits: bool | None = None
    reverses: bool = True
    needs_all: bool = False
    shares_room: bool = False
    planning: Planning = Planning()
    source: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or set(self.name) & set(":/\\\n"):
            raise ScheduleError(
                f"the policy's name is {self.name!r}; give a text without a colon and slashes, such as 'run_ahead'"
            )
        functions: dict[str, object] = {"order": self.order, "check": self.check}
        functions |= {} if self.in_flight is None else {"in_flight": self.in_flight}
        for what, function in functions.items():
            if not callable(function):
                raise ScheduleError(f"{what} of policy {self.name} is {function!r}; give a function of a request")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Policy):
            return NotImplemented
        return self.name == other.name and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def _parts(self) -> tuple[object, ...]:
        """All that it is. A copy of a ``functools.partial``, as pickling makes one, isn't equal to it by itself."""
        return tuple(_bound(getattr(self, field.name)) for field in fields(self))

    def __str__(self) -> str:
        return self.name


def _bound(part: object) -> object:
    """What a ``functools.partial`` calls with what; anything else is itself."""
    if not isinstance(part, functools.partial):
        return part
    return type(part), _bound(part.func), part.args, part.keywords
