"""Gradients that are rows of an embedding: joined where they were made, then gathered where they are applied."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.graph import PHASE_ATTR, REPLICA_ATTR, STAGE_ATTR, Builder, Ref
from graph_passes.program import Program, Value, ValueKind
from graph_passes.tasks import Task


class RowGradients:
    """The rows of gradients on the devices that ask for them; each set of rows is joined and gathered once.

        B0, B1 of a replica -> own rows -> rows,  those of the other replicas -> rows

    Args:
        program: a program with ordered tasks.
        builder: of the step's top level, which gets the nodes.
    """

    def __init__(self, program: Program, builder: Builder) -> None:
        assert program.step is not None
        self._program, self._builder, self._step = program, builder, program.step
        self._homes: Sequence[Sequence[str]] = program.step.layout.homes
        self._gathered: dict[tuple[str, str], tuple[Ref, Ref]] = {}
        self._own: dict[tuple[Value, int, int], Ref | None] = {}
        self._tasks: dict[Value, list[Task]] = {}

    def gather(self, variable: str, device: str) -> tuple[Ref, Ref]:
        """The rows of a parameter's gradient from all slices (by stage, replica, micro-batch), on one device.

        Returns:
            The values, [rows, ...], and their indices, [rows].
        """
        if (variable, device) not in self._gathered:
            ref = self._program.variables[variable].value or Ref("")
            found = []
            for kind in (ValueKind.SLICE_VALUES, ValueKind.SLICE_INDICES):
                value = Value(ref, kind)
                parts = [
                    self._rows_of(value, stage, replica)
                    for stage, devices in enumerate(self._homes)
                    for replica in range(len(devices))
                ]
                present = [part for part in parts if part is not None]
                with self._builder.marked({PHASE_ATTR: "concat"}):
                    found.append(self._builder.concat("rows", present, self.dtype(value), 0, device=device))
            self._gathered[variable, device] = (found[0], found[1])
        return self._gathered[variable, device]

    def dtype(self, value: Value) -> int:
        """The dtype (a ``DT_*`` number) of the values or indices of rows."""
        stage = next(stage for stage in self._program.stages if value in stage.results)
        _, function = stage.parameter_gradients
        assert function is not None
        return function.result_dtype(value)

    def _rows_of(self, value: Value, stage: int, replica: int) -> Ref | None:
        """The rows from one device, joined there before they are sent."""
        key = (value, stage, replica)
        if key not in self._own:
            own = sorted(task for task in self._tasks_with(value) if (task.stage, task.replica) == key[1:])
            parts = [self._step.values[task, value] for task in own]
            device = self._homes[stage][replica]
            name = f"stage{stage}/replica{replica}/own_rows"
            with self._builder.marked({PHASE_ATTR: "concat", STAGE_ATTR: stage, REPLICA_ATTR: replica}):
                joined = self._builder.concat(name, parts, self.dtype(value), 0, device=device) if parts else None
            self._own[key] = joined
        return self._own[key]

    def _tasks_with(self, value: Value) -> list[Task]:
        if value not in self._tasks:
            self._tasks[value] = [task for task, v in self._step.values if v == value]
        return self._tasks[value]
