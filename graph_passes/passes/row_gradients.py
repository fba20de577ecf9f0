"""Gradients that are rows of an embedding: joined where they are made, then gathered where they are applied."""

from __future__ import annotations

import functools

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Ref
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import add_call
from graph_passes.ir.program import OWN_ROWS, SHARED_ROWS, Program, Stage, Value, ValueKind, Variable
from graph_passes.ir.tasks import Task
from graph_passes.passes.build_backward import refusal
from graph_passes.passes.row_exchange import rows_by_shard


def index_dtype(program: Program, variable: Variable) -> int | None:
    """Returns the dtype (a ``DT_*`` number) of the indices of a parameter's rows: the widest; None without rows."""
    dtypes = {_stage_dtype(stage, variable) for stage in program.stages} - {None}
    return types_pb2.DT_INT64 if len(dtypes) > 1 else next(iter(dtypes), None)


def row_dtype(program: Program, variable: Variable) -> int:
    """Returns `index_dtype` for a parameter whose gradient is rows.

    Raises:
        PassError: it isn't.
    """
    dtype = index_dtype(program, variable)
    if dtype is None:
        raise PassError(f"no stage gives rows of the gradient of {variable.name!r}")
    return dtype


def _stage_dtype(stage: Stage, variable: Variable) -> int | None:
    _, function = stage.parameter_gradients
    for _, kind in (OWN_ROWS, SHARED_ROWS):
        value = Value(variable.value or Ref(""), kind)
        if function is not None and value in function.outputs:
            return function.result_dtype(value)
    return None


class RowGradients:
    """The rows of gradients on the devices that need them; each set of rows is joined and gathered once.

        B0, B1 of a replica -> own rows -> rows,  those of the other replicas -> rows

    Rows that all slices have in common are added up instead, as soon as tasks have made them.

        B0 -> rows -> sum -> sum over replicas -> rows
        B1 -> rows ---^

    Of a parameter in shards each device gets the rows of its own: they are separated where they are made.

    Args:
        program: a program with ordered tasks.
        builder: of the step's top level, which gets the nodes.

    Attributes:
        of: see `_rows`.

    Raises:
        PassError: it is unknown which rows of a gradient slices have in common, and there are several slices.
    """

    def __init__(self, program: Program, builder: Builder) -> None:
        self._program, self._builder, self._step = program, builder, program.own_step
        self._tasks: dict[Value, list[Task]] = {}
        for task, value in self._step.values:
            self._tasks.setdefault(value, []).append(task)
        self.of = functools.cache(self._rows)
        self._of_replica = functools.cache(self._rows_of_replica)
        self._separated = functools.cache(self._separate)
        for stage in program.stages:
            for name, why in stage.undecided_rows.items():
                value = Value(program.variables[name].value or Ref(""), OWN_ROWS[0])
                slices = sum(task.stage == stage.index for task in self._tasks.get(value, ()))
                if slices > 1:
                    raise refusal(name, why, stage.index, slices)

    def _rows(self, variable: Variable, device: str, shard: int | None = None) -> tuple[Ref, Ref]:
        """Returns the rows of a parameter's gradient from all slices (by stage, replica, micro-batch), on one device.

        Args:
            variable: the parameter; in shards that are rows if ``shard`` is given.
            device: the device.
            shard: number of the shard that it keeps; None for all rows.

        Returns:
            The values, [rows, ...], and their indices, [rows], in the shard if there is one.
        """
        values: list[Ref] = []
        indices: list[Ref] = []
        builder, dtype = self._builder, row_dtype(self._program, variable)
        for stage, devices in enumerate(self._step.layout.devices):
            for kinds in (OWN_ROWS, SHARED_ROWS):
                replicas = [(variable, kinds, stage, replica) for replica in range(len(devices))]
                if shard is None:
                    parts = [rows for each in replicas if (rows := self._of_replica(*each)) is not None]
                else:
                    calls = [self._separated(*each) for each in replicas if self._of_replica(*each) is not None]
                    parts = [(Ref(call, shard), Ref(call, variable.shards + shard)) for call in calls]
                if parts and kinds == SHARED_ROWS:
                    with builder.marked(NodeKind.SUM.marks(stage)):
                        total = builder.add_n("rows", [part for part, _ in parts], variable.dtype, device=device)
                    parts = [(total, parts[0][1])]
                values += [part for part, _ in parts]
                indices += [part for _, part in parts]
        with builder.marked(NodeKind.CONCAT.marks()):
            return (
                builder.concat("rows", values, variable.dtype, 0, device=device),
                builder.concat("rows", indices, dtype, 0, device=device),
            )

    def _rows_of_replica(
        self, variable: Variable, kinds: tuple[ValueKind, ValueKind], stage: int, replica: int
    ) -> tuple[Ref, Ref] | None:
        """Returns the rows of a replica's slices, joined or added up on its device; None if it has none."""
        made: list[list[Ref]] = []
        for kind in kinds:
            value = Value(variable.value or Ref(""), kind)
            tasks = sorted(t for t in self._tasks.get(value, ()) if (t.stage, t.replica) == (stage, replica))
            made.append([self._step.values[task, value] for task in tasks])
        values, indices = made
        if not values:
            return None
        builder, device = self._builder, self._step.layout.devices[stage][replica]
        name, own_dtype = f"stage{stage}/replica{replica}", _stage_dtype(self._program.stages[stage], variable)
        assert own_dtype is not None
        if kinds == SHARED_ROWS:
            with builder.marked(NodeKind.SUM.marks(stage, replica)):
                rows, where = builder.add_n(f"{name}/shared_rows", values, variable.dtype, device=device), indices[0]
        else:
            with builder.marked(NodeKind.CONCAT.marks(stage, replica)):
                rows = builder.concat(f"{name}/own_rows", values, variable.dtype, 0, device=device)
                where = builder.concat(f"{name}/own_rows", indices, own_dtype, 0, device=device)
        with builder.marked(NodeKind.CONCAT.marks(stage, replica)):
            dtype = row_dtype(self._program, variable)
            return rows, builder.cast(where, own_dtype, dtype, name=f"{name}/indices", device=device)

    def _separate(self, variable: Variable, kinds: tuple[ValueKind, ValueKind], stage: int, replica: int) -> str:
        """Returns the call that separates a replica's rows by shard, on its device."""
        rows = self._of_replica(variable, kinds, stage, replica)
        assert rows is not None
        number = [own.name for own in self._program.roles.variables].index(variable.name)
        name = f"{self._step.prefix}rows_of{number}_stage{stage}_by_shard"
        function = rows_by_shard(name, variable, row_dtype(self._program, variable))
        attrs, device = NodeKind.SPLIT.marks(stage, replica), self._step.layout.devices[stage][replica]
        name = f"stage{stage}/replica{replica}/rows_by_shard"
        return add_call(self._builder, name, function, rows, device=device, attrs=attrs).node
