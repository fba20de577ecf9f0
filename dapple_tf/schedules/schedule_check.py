"""Checks of a schedule without running it: that it can finish, and how much it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dapple_tf.common.text import counted
from dapple_tf.schedules.schedule_request import (
    Active,
    ScheduleError,
    check_count,
    check_devices,
    check_per_stage,
)
from graph_passes.ir.tasks import Phase, Schedule, Task

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD

_GRID_COLUMNS = 12
"""Number of last steps that a deadlock's text shows."""


def validate(
    schedule: Schedule,
    devices: Sequence[Sequence[int]],
    micro_batches: int,
    *,
    holds: Sequence[int] | None = None,
    active: Active | None = None,
    forward_only: bool = False,
) -> None:
    """Checks a schedule without running it; it may come from any policy, or from a file.

    It checks that each active (stage, micro-batch, replica) has one forward and, unless ``forward_only``, a later
    backward: either one B or one Bx and one Bw, the same for all micro-batches of a stage, on its device; that no
    replica has more than its stage's ``holds`` micro-batches in flight, from F to B or Bw; that backwards that make
    weight gradients run in micro-batch order; and that the step finishes when 0F waits for nothing, iF for the same
    micro-batch's forwards on all replicas of stage i - 1, iB and iBx for its B or Bx on all replicas of stage i + 1,
    and iBw for its own Bx.

    Raises:
        ScheduleError: naming the task, the device and the fix; for a deadlock, with a device x step grid.
    """
    check_count("micro_batches", micro_batches)
    check_devices(devices)
    if holds is not None:
        check_per_stage("holds", holds, len(devices))
    device_of = _expected_tasks(schedule, devices, micro_batches, active, forward_only)
    _check_whole_or_split(schedule)
    _check_tasks(schedule, device_of)
    _check_device_orders(schedule, holds)
    _check_progress(schedule, device_of)
    _check_micro_batch_order(schedule)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Returns the most micro-batches that each stage has in flight on one replica, from F to B or Bw.

    For a schedule of forwards alone it is 0.
    """
    peaks = [0] * (1 + max((task.stage for task in schedule.tasks), default=-1))
    for _, task, count in _counts(schedule):
        peaks[task.stage] = max(peaks[task.stage], count)
    return tuple(peaks)


def lockstep(schedule: Schedule) -> list[dict[int, Task]]:
    """Runs a schedule as if all tasks took equally long: for each step, device -> the task that it runs then.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    return _check_progress(schedule, {task: device for device, tasks in schedule.orders.items() for task in tasks})


def _expected_tasks(
    schedule: Schedule,
    devices: Sequence[Sequence[int]],
    micro_batches: int,
    active: Active | None,
    forward_only: bool,
) -> dict[Task, int]:
    """Maps each task that the step must have to the device that must run it."""
    device_of = {}
    for stage, replicas in enumerate(devices):
        phases: tuple[Phase, ...] = (F,) if forward_only else (F, BX, BW) if stage in schedule.split else (F, B)
        for phase in phases:
            for micro_batch in range(micro_batches):
                for replica, device in enumerate(replicas):
                    if active is None or active(stage, micro_batch, replica):
                        device_of[Task(stage, phase, micro_batch, replica)] = device
    return device_of


def _check_whole_or_split(schedule: Schedule) -> None:
    for device, tasks in schedule.orders.items():
        for task in tasks:
            if task.phase is B and task.stage in schedule.split:
                raise ScheduleError(
                    f"device {device} runs {task}, but other backwards of stage {task.stage} are split; give all of "
                    f"them as Bx and Bw, or all as B"
                )


def _check_tasks(schedule: Schedule, device_of: Mapping[Task, int]) -> None:
    """Checks that every expected task is there once, on its device, and no other."""
    counts = Counter(schedule.tasks)
    for device, tasks in schedule.orders.items():
        for task in tasks:
            if task not in device_of:
                raise ScheduleError(
                    f"device {device} runs {task}, which isn't a task of this step of {len(device_of)} tasks; remove it"
                )
            if device != device_of[task]:
                raise ScheduleError(f"device {device} runs {task}, which belongs on device {device_of[task]}; move it")
            if counts[task] > 1:
                raise ScheduleError(f"device {device} runs {task} {counts[task]} times; it must run once")
    for task, device in device_of.items():
        if task not in counts:
            raise ScheduleError(f"no device runs {task}; add it to device {device}")


def _check_device_orders(schedule: Schedule, holds: Sequence[int] | None) -> None:
    """Checks what each device's order alone shows: F before Bx before Bw, and the micro-batches in flight."""
    for device, tasks in schedule.orders.items():
        places = {task: place for place, task in enumerate(tasks)}
        for task in tasks:
            for earlier in schedule.inputs(task):
                if earlier.stage == task.stage and places[earlier] > places[task]:
                    what = "a backward needs its forward" if earlier.phase is F else "a weight gradient needs its Bx"
                    raise ScheduleError(f"device {device} runs {task} before {earlier}; {what} first")
    if holds is None:
        return
    for device, task, count in _counts(schedule):
        if count > holds[task.stage]:
            raise ScheduleError(_too_many(device, task, count, holds))


def _too_many(device: int, task: Task, count: int, holds: Sequence[int]) -> str:
    return (
        f"device {device} has {counted(count, 'micro-batch')} in flight after {task}, but stage {task.stage} holds "
        f"{holds[task.stage]}; run a backward before it"
    )


def _counts(schedule: Schedule) -> Iterator[tuple[int, Task, int]]:
    """Yields (device, forward, micro-batches in flight after it)."""
    if not any(task.phase is not F for task in schedule.tasks):
        return
    for device, tasks in schedule.orders.items():
        counts: dict[int, int] = {}
        for task in tasks:
            if task.phase in (B, BW):
                counts[task.stage] = counts.get(task.stage, 0) - 1
            elif task.phase is F:
                counts[task.stage] = counts.get(task.stage, 0) + 1
                yield device, task, counts[task.stage]


def _check_micro_batch_order(schedule: Schedule) -> None:
    """Checks that weight gradients are added up in one order, so that results don't depend on the policy."""
    for device, tasks in schedule.orders.items():
        latest: dict[tuple[int, int], Task] = {}
        for task in tasks:
            if task.phase in (B, BW):
                before = latest.setdefault((task.stage, task.replica), task)
                if before.micro_batch > task.micro_batch:
                    raise ScheduleError(
                        f"device {device} runs {task} after {before}; weight gradients are added up in micro-batch "
                        f"order, so move it before"
                    )
                latest[task.stage, task.replica] = task


def _check_progress(schedule: Schedule, device_of: Mapping[Task, int]) -> list[dict[int, Task]]:
    """Runs the schedule in steps of one task per device, until its end or until no device can continue."""
    done: set[Task] = set()

    def waits_for(task: Task) -> list[Task]:
        return [other for other in schedule.inputs(task) if other not in done]

    steps: list[dict[int, Task]] = []
    positions = dict.fromkeys(schedule.orders, 0)
    while len(done) < len(device_of):
        heads = {
            device: tasks[positions[device]]
            for device, tasks in schedule.orders.items()
            if positions[device] < len(tasks)
        }
        step = {device: task for device, task in heads.items() if not waits_for(task)}
        if not step:
            waits = {device: (task, waits_for(task)) for device, task in heads.items()}
            raise ScheduleError(_deadlock_text(schedule, device_of, steps, waits))
        for device, task in step.items():
            positions[device] += 1
            done.add(task)
        steps.append(step)
    return steps


def _deadlock_text(
    schedule: Schedule,
    device_of: Mapping[Task, int],
    steps: Sequence[Mapping[int, Task]],
    waits: Mapping[int, tuple[Task, Sequence[Task]]],
) -> str:
    """Draws each device's last tasks, with an arrow to the stuck task and its missing inputs."""
    shown = steps[-_GRID_COLUMNS:]
    first = len(steps) - len(shown)
    rows = [["", *(str(first + column) for column in range(len(shown)))]]
    for device in schedule.orders:
        rows.append([f"device {device}", *(str(step[device]) if device in step else "." for step in shown)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines[0] = "step".ljust(widths[0]) + lines[0][widths[0] :]
    for number, device in enumerate(schedule.orders, start=1):
        if device in waits:
            task, missing = waits[device]
            needed = ", ".join(f"{other} on device {device_of[other]}" for other in missing)
            lines[number] += f"  -> {task} waits for {needed}"
        else:
            lines[number] += "  done"
    ran = sum(map(len, steps))
    return (
        f"schedule {schedule.name!r} deadlocks after {ran} of {len(device_of)} tasks; move the tasks that others wait "
        f"for forward, or the stuck ones (->) back\n" + "\n".join(line.rstrip() for line in lines)
    )
