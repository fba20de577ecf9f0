"""Schedules in the CSV form of torch.distributed.pipelining, to be compared with that project's.

A row is a rank (here: a device), a cell an action: stage, kind and micro-batch. Empty cells are bubbles::

    0F0,0F1,,,0B0,,0B1        the same here: 0: 0F0 0F1 0B0 0B1
    ,1F0,1B0,1F1,1B1                         1: 1F0 1B0 1F1 1B1

    there   here   what it is
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

``zb_v`` and ScheduleZBVZeroBubble are of one idea, but order tasks otherwise. ScheduleLoopedBFS runs backwards from the
last micro-batch to the first, which policies here don't: gradients are added up in micro-batch order. The form is that
of the project's code (``torch/distributed/pipelining/schedules.py``, ``_Action`` and ``_load_csv``), which documents it
nowhere else.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dapple_tf.data_files import short
from dapple_tf.schedules.schedule_check import lockstep
from dapple_tf.schedules.schedule_request import ScheduleError
from graph_passes.ir.tasks import Phase, Schedule, Task

_KINDS = {Phase.FORWARD: "F", Phase.BACKWARD: "B", Phase.INPUT_GRAD: "I", Phase.WEIGHT_GRAD: "W"}
_PHASES = {kind: phase for phase, kind in _KINDS.items()}
_IMPLIED = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
_WHOLE_BEFORE = "BW"
"""How a whole backward was written when B was the input gradients' part."""
_ACTION = re.compile(rf"([0-9]{{1,9}})({'|'.join((*_IMPLIED, _WHOLE_BEFORE, *_PHASES))})([0-9]{{0,9}})")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule, *, aligned: bool = False) -> str:
    """Write a schedule in that form.

        >>> from dapple_tf.schedules.schedules import make_schedule
        >>> print(to_csv(make_schedule("dapple_a", [[0], [1]], 2), aligned=True), end="")
        0F0,0F1,,0B0,,0B1
        ,1F0,1B0,1F1,1B1,

    Args:
        schedule: what devices do. Its name isn't written.
        aligned: puts tasks of one moment into one column, with empty cells before and between, as if all took as long.

    Returns:
        A line for each device; one without tasks has an empty cell.

    Raises:
        ScheduleError: the form can't express it: replicas, waits besides data (`Schedule.after`), a stage on several
            devices, or devices other than 0, 1, ..., n - 1; or it is to be aligned and deadlocks.
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
    """Read a schedule in that form.

    What follows from the tasks here is left out: communication (``0SEND_F1``, ``1RECV_B0``), parameters that are
    gathered and gradients that are reduced (``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD``). Two tasks that overlap,
    ``(0F7;3B2)OVERLAP_F_B``, follow each other. Where a stage has whole and split backwards, which stages here don't,
    each whole one becomes Bx and Bw, one after the other. A file from before I was I is understood too, where B (with W
    for the same micro-batch) was the input gradients' part and BW the whole.

    Only the form is checked; `dapple_tf.schedules.schedules.validate` tells whether a step can run so.

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
    places: dict[Task, _Cell] = {}
    homes: dict[int, _Cell] = {}
    for cell in cells:
        home = homes.setdefault(cell.stage, cell)
        if home.device != cell.device:
            raise ScheduleError(f"{cell} is of a stage that {home.where} has on device {home.device}; keep it on one")
        if cell.kind == _WHOLE_BEFORE or (cell.kind == "B" and (cell.stage, "W", cell.micro_batch) not in written):
            phases = (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD) if cell.stage in split else (Phase.BACKWARD,)
        else:
            phases = (Phase.INPUT_GRAD if cell.kind == "B" else _PHASES[cell.kind],)
        for phase in phases:
            task = Task(cell.stage, phase, cell.micro_batch)
            if (first := places.setdefault(task, cell)) is not cell:
                raise ScheduleError(f"{cell} is {task}, which {first} is already; a task runs once")
            orders[cell.device].append(task)
    return Schedule(name, {device: tuple(tasks) for device, tasks in orders.items()})


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
    homes: dict[int, int] = {}
    for device, tasks in schedule.orders.items():
        for task in tasks:
            if task.replica:
                raise ScheduleError(
                    f"device {device} runs {task}, of another replica than the first; in the CSV form replicas are "
                    f"groups of ranks of their own: write the schedule of one replica of each stage"
                )
            if homes.setdefault(task.stage, device) != device:
                raise ScheduleError(
                    f"device {device} runs {task}, but stage {task.stage} is on device {homes[task.stage]} too; in the "
                    f"CSV form a stage is on one rank: leave out weight_devices"
                )
    if schedule.after:
        task, other = next(iter(schedule.after.items()))
        raise ScheduleError(
            f"{task} waits for {other} besides its data, which the CSV form can't say; leave such waits out"
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
    """The tasks that are written, row by row."""
    for device, row in enumerate(rows):
        for column, cell in enumerate(row):
            word = cell.strip()
            overlapping = _OVERLAP.fullmatch(word)
            for part in overlapping[1].split(";") if overlapping else [word]:
                if part.strip():
                    yield from _action(part.strip(), word, device, column)


def _action(part: str, word: str, device: int, column: int) -> Sequence[_Cell]:
    """The task of an action, if it is one of a task."""
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
