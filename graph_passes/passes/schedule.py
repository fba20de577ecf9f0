"""Control edges that fix the order of tasks on every device."""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

from graph_passes.errors import PassError
from graph_passes.ir.graph import copied
from graph_passes.ir.program import Fact, Program
from graph_passes.ir.tasks import Schedule


@dataclasses.dataclass(frozen=True)
class OrderTasks:
    """Lowers a schedule to control edges: each task waits for the last nodes of the one before it on its device.

        0: 0F0 0F1 0B0   becomes   0F0 -> 0F1 -> 0B0
        1: 0Bw0>1Bx1     becomes   1Bx1 -> 0Bw0

    What a task needs besides begins one task ahead of it (`Step.ahead`), so that little waits in memory:

        0: 0F0 0F1 0F2   becomes   0F0 -> what 0F2 needs

    Attributes:
        schedule: the order of tasks on each device; devices are numbered as in ``device_names``.
        device_names: names of the devices.

    Source: DAPPLE (PPoPP'21), section 5.3 and figure 10.
    """

    name: ClassVar[str] = "schedule"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.ORDERED,)
    schedule: Schedule
    device_names: tuple[str, ...]

    def run(self, program: Program) -> Program:
        """Program with connected tasks -> the same with ``step.schedule`` and its control edges.

        Raises:
            PassError: the schedule's tasks aren't the program's, or a task is on another device.
        """
        step = program.own_step
        scheduled, present = set(self.schedule.tasks), set(step.entry)
        if scheduled != present:
            missing, unknown = sorted(map(str, present - scheduled)), sorted(map(str, scheduled - present))
            raise PassError(
                f"schedule {self.schedule.name!r} has {len(scheduled)} tasks but the program has {len(present)}; "
                f"not scheduled: {missing[:5]}, not in the program: {unknown[:5]}"
            )
        graph = copied(program.graph)
        nodes = {node.name: node for node in graph.node}
        for device, tasks in self.schedule.orders.items():
            for task in tasks:
                if nodes[step.entry[task]].device != self.device_names[device]:
                    raise PassError(
                        f"schedule {self.schedule.name!r} runs {task} on {self.device_names[device]}, but its stage is "
                        f"on {nodes[step.entry[task]].device}"
                    )
            for before, after in itertools.pairwise(tasks):
                nodes[step.entry[after]].input.extend(f"^{name}" for name in step.exit[before])
            begun: set[str] = set()  # What several tasks need begins for the first of them.
            for position, task in enumerate(tasks):
                for name in step.ahead.get(task, ()):
                    if position > 1 and name not in begun:
                        nodes[name].input.extend(f"^{done}" for done in step.exit[tasks[position - 2]])
                    begun.add(name)
        return program.replace(graph=graph, step=dataclasses.replace(step, schedule=self.schedule))
