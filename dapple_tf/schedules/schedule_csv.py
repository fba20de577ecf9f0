"""Schedules in the CSV format of torch.distributed.pipelining, for comparison with that project's.

A row is a rank (here: a device), a cell an action: stage, kind and micro-batch. Empty cells are bubbles::

    0F0,0F1,,,0B0,,0B1        the same here: 0: 0F0 0F1 0B0 0B1
    ,1F0,1B0,1F1,1B1                         1: 1F0 1B0 1F1 1B1

    there   here   meaning
    F       F      forward
    B       B      whole backward
    I       Bx     backward, input gradients
    W       Bw     backward, weight gradients

Of the policies that both have, these give the same orders:

* ``gpipe`` and ScheduleGPipe.
* ``dapple_a`` and Schedule1F1B: the warm-up of stage i is min(M, S - i) forwards. That project's own table has the last
  of these next to the first backward, one column for each action; the order is the same.
* ``interleaved`` and ScheduleInterleaved1F1B, of two or more stages on each of two or more devices, for any M that the
  latter takes.
* ``zb_h1`` and ScheduleInterleavedZeroBubble with one stage on each rank, for M of at least S and a multiple of it.

``zb_v`` and ScheduleZBVZeroBubble share an idea, but order tasks differently. ScheduleLoopedBFS runs backwards from the
last micro-batch to the first, which policies here don't: gradients are added up in micro-batch order. The format is
defined only by the project's code (``torch/distributed/pipelining/schedules.py``, ``_Action`` and ``_load_csv``).
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dapple_tf.common.data_files import clip, read_text, short
from dapple_tf.common.text import counted
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedule_check import lockstep
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleError, ScheduleRequest
from graph_passes.ir.tasks import Phase, Schedule, Task

_KINDS = {Phase.FORWARD: "F", Phase.BACKWARD: "B", Phase.INPUT_GRAD: "I", Phase.WEIGHT_GRAD: "W"}
_PHASES = {kind: phase for phase, kind in _KINDS.items()}
_IMPLIED = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
_WHOLE_BEFORE = "BW"
"""How a whole backward was written when B was the input gradients' part."""
_ACTION = re.compile(rf"([0-9]{{1,9}})({'|'.join((*_IMPLIED, _WHOLE_BEFORE, *_PHASES))})([0-9]{{0,9}})")
SUFFIX = ".csv"
"""How the names of CSV files end."""
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule, *, aligned: bool = False) -> str:
    """Writes a schedule in that format.

        >>> from dapple_tf.schedules.schedules import make_schedule
        >>> print(to_csv(make_schedule("dapple_a", [[0], [1]], 2), aligned=True), end="")
        0F0,0F1,,0B0,,0B1
        ,1F0,1B0,1F1,1B1,

    Args:
        schedule: the schedule. Its name isn't written.
        aligned: puts tasks of one moment into one column, with empty cells before and between, as if all tasks took
            equally long.

    Returns:
        A line for each device; one without tasks has an empty cell.

    Raises:
        ScheduleError: the format can't express it: replicas, or devices other than 0, 1, ..., n - 1; or it is to be
            aligned and deadlocks.
    """
    _check_expressible(schedule)
    rows: list[list[str]] = [[_text(task) for task in tasks] or [""] for tasks in schedule.orders.values()]
    if aligned:
        steps = lockstep(schedule)
        rows = [[_text(step[device]) if device in step else "" for step in steps] or [""] for device in schedule.orders]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(text: str, name: str = "parsed") -> Schedule:
    """Reads a schedule in that form.

    Actions that follow from the tasks here are left out: communication (``0SEND_F1``, ``1RECV_B0``), gathering of
    parameters and reduction of gradients (``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD``). Two overlapping tasks,
    ``(0F7;3B2)OVERLAP_F_B``, follow each other. If a stage has both whole and split backwards, which stages here don't,
    each whole one becomes Bx and Bw in sequence. Files that predate the action I are understood too: there B (with W
    for the same micro-batch) was the input gradients' part and BW the whole.

    Only the format is checked; `dapple_tf.schedules.schedule_check.validate` tells whether a step can run like this.

    Args:
        text: the file's.
        name: the schedule's.

    Raises:
        ScheduleError: a cell that isn't an action, a task twice, or a stage on several devices; with row and column.
    """
    rows = _rows(text)
    cells = list(_cells(rows))
    written = {(cell.stage, cell.kind, cell.micro_batch) for cell in cells}
    split = {cell.stage for cell in cells if cell.kind in ("I", "W")}
    orders: dict[int, list[Task]] = {device: [] for device in range(len(rows))}
    cell_of: dict[Task, _Cell] = {}
    first_of: dict[int, _Cell] = {}
    for cell in cells:
        of_stage = first_of.setdefault(cell.stage, cell)
        if of_stage.device != cell.device:
            raise ScheduleError(
                f"{cell} is of a stage that {of_stage.where} has on device {of_stage.device}; keep it on one"
            )
        if cell.kind == _WHOLE_BEFORE or (cell.kind == "B" and (cell.stage, "W", cell.micro_batch) not in written):
            phases = (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD) if cell.stage in split else (Phase.BACKWARD,)
        else:
            phases = (Phase.INPUT_GRAD if cell.kind == "B" else _PHASES[cell.kind],)
        for phase in phases:
            task = Task(cell.stage, phase, cell.micro_batch)
            if (first := cell_of.setdefault(task, cell)) is not cell:
                raise ScheduleError(f"{cell} is {task}, which {first} is already; a task runs once")
            orders[cell.device].append(task)
    return Schedule(name, {device: tuple(tasks) for device, tasks in orders.items()})


def csv_policy(path: str | os.PathLike[str]) -> Policy:
    """Returns the policy with the order of a CSV file, for at most as many micro-batches as the file has.

    Row r is for the devices of the stages whose tasks it has; their lists must be equal: replicas share a row.

    Args:
        path: the file, with the suffix ``.csv``. The policy has its name.

    Raises:
        ScheduleError: it isn't a file of that form; with row and column.
    """
    file = Path(path)
    if file.suffix != SUFFIX:
        raise ScheduleError(f"{short(str(file))} isn't a CSV file's path; give one that ends in {SUFFIX}")
    try:
        if file.exists() and not file.is_file():  # a pipe, say, which may never end
            raise ScheduleError("it isn't a file; give a CSV file")
        schedule = from_csv(read_text(file, ScheduleError, encoding="utf-8-sig"), file.name)
    except OSError as error:
        raise ScheduleError(f"{short(str(file))} can't be read: {error.strerror}") from error
    except ValueError as error:  # also a path that can't be one
        raise ScheduleError(f"{short(str(file))}: {clip(str(error))}") from error
    if not schedule.tasks:
        raise ScheduleError(f"{short(str(file))} has no tasks; write a row for each rank")
    return Policy(
        re.sub(r"[:\\\n]", "_", file.name),
        _CsvOrder(schedule),
        f"the order of tasks in {file.name}",
        check=_CsvCheck(schedule),
        source=os.fspath(file.absolute()),
    )


@dataclass(frozen=True)
class _CsvOrder:
    """The order of tasks that a CSV file gives, as a policy's."""

    schedule: Schedule

    def __call__(self, request: ScheduleRequest) -> Orders:
        orders: Orders = {}
        for tasks in self.schedule.orders.values():
            jobs = [
                Job(task.stage, task.phase, task.micro_batch)
                for task in tasks
                if task.micro_batch < request.micro_batches
            ]
            if tasks:
                orders |= {device: list(jobs) for device in request.devices[tasks[0].stage]}
        return orders


@dataclass(frozen=True)
class _CsvCheck:
    """Checks that a request has the stages, rows and micro-batches of a CSV file."""

    schedule: Schedule

    def __call__(self, request: ScheduleRequest) -> None:
        tasks = self.schedule.tasks
        stages = 1 + max((task.stage for task in tasks), default=-1)
        if stages != request.stages:
            raise ScheduleError(
                f"{request.policy} has {counted(stages, 'stage')}, but there are {request.stages}; cut the model into "
                f"{stages}"
            )
        count = 1 + max(task.micro_batch for task in tasks)
        if request.micro_batches > count:
            raise ScheduleError(
                f"{request.policy} has {counted(count, 'micro-batch')}, but there are {request.micro_batches}; use at "
                f"most {count}"
            )
        row_of: dict[int, int] = {}
        for row, own in self.schedule.orders.items():
            for task in own:
                if request.devices[task.stage] != request.devices[own[0].stage]:
                    raise ScheduleError(
                        f"row {row + 1} of {request.policy} has stages {own[0].stage} and {task.stage}, which are "
                        f"on devices {list(request.devices[own[0].stage])} and {list(request.devices[task.stage])}; "
                        f"give both the same"
                    )
            for device in request.devices[own[0].stage] if own else ():
                if row_of.setdefault(device, row) != row:
                    raise ScheduleError(
                        f"rows {row_of[device] + 1} and {row + 1} of {request.policy} are both for device {device}; "
                        f"give the stages of each row devices of their own"
                    )


class _Cell(NamedTuple):
    """A task as it is written: ``F``, ``B``, ``I``, ``W`` or ``BW``."""

    stage: int
    kind: str
    micro_batch: int
    device: int
    column: int

    @property
    def where(self) -> str:
        """For people, who count from 1."""
        return f"row {self.device + 1}, column {self.column + 1}"

    def __str__(self) -> str:
        return f"{self.where}: {f'{self.stage}{self.kind}{self.micro_batch}'!r}"


def _text(task: Task) -> str:
    return f"{task.stage}{_KINDS[task.phase]}{task.micro_batch}"


def _check_expressible(schedule: Schedule) -> None:
    devices = list(schedule.orders)
    if devices != list(range(len(devices))):
        raise ScheduleError(
            f"the schedule is for devices {short(devices)}, but rows are ranks 0 to {len(devices) - 1}; number them so"
        )
    device_of: dict[int, int] = {}
    for device, tasks in schedule.orders.items():
        for task in tasks:
            if task.replica:
                raise ScheduleError(
                    f"device {device} runs {task}, of another replica than the first; in the CSV form replicas are "
                    f"groups of ranks of their own: write the schedule of one replica of each stage"
                )
            if device_of.setdefault(task.stage, device) != device:
                raise ScheduleError(
                    f"device {device} runs {task}, but stage {task.stage} is on device {device_of[task.stage]} too; in "
                    f"the CSV form a stage is on one rank"
                )


def _rows(text: str) -> list[list[str]]:
    """Rows of cells, without empty lines at the end."""
    try:
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
    except csv.Error as error:
        raise ScheduleError(f"the text isn't CSV: {error}") from error
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _cells(rows: Sequence[Sequence[str]]) -> Iterator[_Cell]:
    """Yields the tasks that are written, row by row."""
    for device, row in enumerate(rows):
        for column, cell in enumerate(row):
            word = cell.strip()
            overlapping = _OVERLAP.fullmatch(word)
            for part in overlapping[1].split(";") if overlapping else [word]:
                if part.strip():
                    yield from _action(part.strip(), word, device, column)


def _action(part: str, word: str, device: int, column: int) -> Sequence[_Cell]:
    """Returns the tasks of an action; none for actions that only follow from tasks."""
    match = _ACTION.fullmatch(part)
    if match is not None:
        stage, kind, number = match.groups()
        if kind in _IMPLIED:
            return []
        if number:
            return [_Cell(int(stage), kind, int(number), device, column)]
    raise ScheduleError(
        f"row {device + 1}, column {column + 1}: {short(word)} isn't an action; write <stage><F, B, I or W>"
        f"<micro-batch>, such as '2F0', or leave the cell empty"
    )
