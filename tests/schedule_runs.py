"""Runs a Schedule with given times and free transfers, apart from the code that makes schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.schedules.policy import Placement
from dapple_tf.schedules.schedules import policy_of
from graph_passes.ir.tasks import Phase, Schedule, Task


@dataclass(frozen=True)
class Executed:
    """When tasks ended, and what devices did meanwhile."""

    makespan: float
    ends: dict[Task, float]
    busy: dict[int, float]
    spans: dict[int, float]

    @property
    def idle(self) -> list[float]:
        """Time without work of each device, of the whole step."""
        return [self.makespan - busy for busy in self.busy.values()]

    @property
    def idle_inside(self) -> list[float]:
        """Time without work between a device's first and last task."""
        return [self.spans[device] - self.busy[device] for device in self.busy]


def execute(schedule: Schedule, seconds: Sequence[Sequence[float]]) -> Executed:
    """Run every task as soon as its device and its inputs are there; ``seconds`` has F, Bx, Bw of each stage."""
    ends: dict[Task, float] = {}
    free = dict.fromkeys(schedule.orders, 0.0)
    busy = dict.fromkeys(schedule.orders, 0.0)
    starts: dict[int, float] = {}
    inputs = inputs_of(schedule)
    waiting = {device: list(tasks) for device, tasks in schedule.orders.items()}
    while any(waiting.values()):
        stuck = True
        for device, tasks in waiting.items():
            while tasks and all(task in ends for task in inputs[tasks[0]]):
                task = tasks.pop(0)
                forward, input_grad, weight_grad = seconds[task.stage]
                times = {"F": forward, "B": input_grad + weight_grad, "Bx": input_grad, "Bw": weight_grad}
                time = times[task.phase.value]
                start = max([free[device], *(ends[other] for other in inputs[task])])
                starts.setdefault(device, start)
                free[device] = ends[task] = start + time
                busy[device] += time
                stuck = False
        assert not stuck, waiting
    spans = {device: free[device] - starts.get(device, 0.0) for device in free}
    return Executed(max(ends.values()), ends, busy, spans)


def inputs_of(schedule: Schedule) -> dict[Task, list[Task]]:
    """What each task waits for besides its place in its device's order."""
    replicas: dict[tuple[int, bool, int], list[Task]] = {}
    for task in schedule.tasks:
        if task.phase is not Phase.WEIGHT_GRAD:
            replicas.setdefault((task.stage, task.phase is Phase.FORWARD, task.micro_batch), []).append(task)
    inputs: dict[Task, list[Task]] = {}
    for task in schedule.tasks:
        own = Task(task.stage, Phase.FORWARD, task.micro_batch, task.replica)
        if task.phase is Phase.FORWARD:
            inputs[task] = list(replicas.get((task.stage - 1, True, task.micro_batch), []))
        elif task.phase is Phase.WEIGHT_GRAD:
            inputs[task] = [Task(task.stage, Phase.INPUT_GRAD, task.micro_batch, task.replica)]
        else:
            inputs[task] = [own, *replicas.get((task.stage + 1, False, task.micro_batch), [])]
    return inputs


def straight(stages: int) -> list[list[int]]:
    """Stage i on device i."""
    return [[stage] for stage in range(stages)]


def there_and_back(policy: str) -> bool:
    """Whether a policy wants two stages on each device, there and back."""
    return policy_of(policy).planning.placements == (Placement.VEE,)


def vee(positions: int) -> list[list[int]]:
    """Stages i and 2p - 1 - i on device i."""
    return straight(positions) + straight(positions)[::-1]


def in_micro_batch_order(schedule: Schedule) -> bool:
    """Whether the tasks that make weight gradients run in micro-batch order in each stage and replica."""
    seen: dict[tuple[int, int], int] = {}
    for tasks in schedule.orders.values():
        for task in tasks:
            if task.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD):
                if seen.get((task.stage, task.replica), -1) > task.micro_batch:
                    return False
                seen[task.stage, task.replica] = task.micro_batch
    return True
