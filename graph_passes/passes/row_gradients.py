"""Gradients that are rows of an embedding: joined where they are made, then gathered where they are applied."""

from __future__ import annotations

from collections.abc import Sequence

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Ref
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import add_call
from graph_passes.ir.program import OWN_ROWS, SHARED_ROWS, Program, Stage, Value, ValueKind, Variable
from graph_passes.ir.tasks import Task
from graph_passes.passes.row_exchange import rows_by_shard
from graph_passes.passes.row_sets import refusal


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

    Raises:
        PassError: it is unknown which rows of a gradient slices have in common, and there are several slices.
    """

    def __init__(self, program: Program, builder: Builder) -> None:
        self._program, self._builder, self._step = program, builder, program.own_step
        self._separated: dict[tuple[str, int, int, ValueKind], str] = {}  # the call that separates rows by shard
        self._devices: Sequence[Sequence[str]] = program.own_step.layout.devices
        self._gathered: dict[tuple[str, str], tuple[Ref, Ref]] = {}
        self._of_shards: dict[tuple[str, str], tuple[Ref, Ref]] = {}
        self._own: dict[tuple[Value, int, int], Ref | None] = {}
        self._tasks: dict[Value, list[Task]] = {}
        for stage in program.stages:
            for name, why in stage.undecided_rows.items():
                value = Value(program.variables[name].value or Ref(""), OWN_ROWS[0])
                slices = sum(task.stage == stage.index for task in self._tasks_with(value))
                if slices > 1:
                    raise refusal(name, why, stage.index, slices)

    def gather(self, name: str, device: str) -> tuple[Ref, Ref]:
        """Returns the rows of a parameter's gradient from all slices (by stage, replica, micro-batch), on one device.

        Returns:
            The values, [rows, ...], and their indices, [rows].
        """
        if (name, device) not in self._gathered:
            variable = self._program.variables[name]
            dtype = row_dtype(self._program, variable)
            values: list[Ref] = []
            indices: list[Ref] = []
            for stage in self._program.stages:
                own_values, own_indices = self._own_rows(variable, stage.index, device)
                values += own_values
                indices += [self._cast(index, stage, variable, dtype, device) for index in own_indices]
            with self._builder.marked(NodeKind.CONCAT.marks()):
                self._gathered[name, device] = (
                    self._builder.concat("rows", values, variable.dtype, 0, device=device),
                    self._builder.concat("rows", indices, dtype, 0, device=device),
                )
        return self._gathered[name, device]

    def of_shard(self, variable: Variable, number: int, device: str) -> tuple[Ref, Ref]:
        """Returns `gather`'s rows of a device's shard, in order, and their indices in it.

        Args:
            variable: a parameter in shards that are rows.
            number: number of the shard.
            device: the device that keeps it.
        """
        key = (variable.name, device)
        if key not in self._of_shards:
            values: list[Ref] = []
            indices: list[Ref] = []
            for stage, devices in enumerate(self._devices):
                own = [self._separate(variable, OWN_ROWS, stage, replica) for replica in range(len(devices))]
                values += [Ref(node, number) for node in own if node]
                indices += [Ref(node, variable.shards + number) for node in own if node]
                common = [self._separate(variable, SHARED_ROWS, stage, replica) for replica in range(len(devices))]
                if present := [node for node in common if node]:
                    parts = [Ref(node, number) for node in present]
                    with self._builder.marked(NodeKind.SUM.marks(stage)):
                        values.append(self._builder.add_n("rows", parts, variable.dtype, device=device))
                    indices.append(Ref(present[0], variable.shards + number))
            dtype = row_dtype(self._program, variable)
            with self._builder.marked(NodeKind.CONCAT.marks()):
                self._of_shards[key] = (
                    self._builder.concat("rows", values, variable.dtype, 0, device=device),
                    self._builder.concat("rows", indices, dtype, 0, device=device),
                )
        return self._of_shards[key]

    def _separate(self, variable: Variable, kinds: tuple[ValueKind, ValueKind], stage: int, replica: int) -> str:
        """Returns the call that separates a replica's rows by shard, on its device; empty if it has none."""
        key = (variable.name, stage, replica, kinds[0])
        if key not in self._separated:
            values, indices = (Value(variable.value or Ref(""), kind) for kind in kinds)
            if kinds == OWN_ROWS:
                own, where = self._rows_of(values, stage, replica), self._rows_of(indices, stage, replica)
            else:
                own, where = self._sum_of(values, variable, stage, replica), None
                if own is not None:
                    where = self._made((indices, stage, replica))[0][0]
            named = "" if own is None or where is None else self._call(variable, stage, replica, [own, where])
            self._separated[key] = named
        return self._separated[key]

    def _call(self, variable: Variable, stage: int, replica: int, rows: Sequence[Ref]) -> str:
        own_dtype, dtype = _stage_dtype(self._program.stages[stage], variable), row_dtype(self._program, variable)
        assert own_dtype is not None
        number = [own.name for own in self._program.roles.variables].index(variable.name)
        name = f"{self._step.prefix}rows_of{number}_stage{stage}_by_shard"
        function = rows_by_shard(name, variable, own_dtype, dtype)
        attrs = NodeKind.SPLIT.marks(stage, replica)
        node, device = f"stage{stage}/replica{replica}/rows_by_shard", self._devices[stage][replica]
        return add_call(self._builder, node, function, rows, device=device, attrs=attrs).node

    def _own_rows(self, variable: Variable, stage: int, device: str) -> tuple[list[Ref], list[Ref]]:
        """Returns the values and indices of a stage's rows: sets of each replica, and one that all have in common."""
        ref = variable.value or Ref("")
        rows: list[list[Ref]] = []
        for kind in OWN_ROWS:
            parts = [self._rows_of(Value(ref, kind), stage, replica) for replica in range(len(self._devices[stage]))]
            rows.append([part for part in parts if part is not None])
        values, indices = rows
        shared, shared_indices = (Value(ref, kind) for kind in SHARED_ROWS)
        sums = [self._sum_of(shared, variable, stage, replica) for replica in range(len(self._devices[stage]))]
        present = [part for part in sums if part is not None]
        if present:
            with self._builder.marked(NodeKind.SUM.marks(stage)):
                values.append(self._builder.add_n("rows", present, variable.dtype, device=device))
            first = min(task for task in self._tasks_with(shared_indices) if task.stage == stage)
            indices.append(self._step.values[first, shared_indices])
        return values, indices

    def _cast(self, indices: Ref, stage: Stage, variable: Variable, dtype: int, device: str) -> Ref:
        """Casts the indices of a stage to the common dtype of all stages."""
        own = _stage_dtype(stage, variable)
        assert own is not None
        with self._builder.marked(NodeKind.CONCAT.marks(stage.index)):
            return self._builder.cast(indices, own, dtype, name="indices", device=device)

    def _rows_of(self, value: Value, stage: int, replica: int) -> Ref | None:
        """Returns the rows from one device, joined there before they are sent."""
        key = (value, stage, replica)
        if key not in self._own:
            parts, device = self._made(key)
            _, function = self._program.stages[stage].parameter_gradients
            joined = None
            if parts:
                assert function is not None
                name, dtype = f"stage{stage}/replica{replica}/own_rows", function.result_dtype(value)
                with self._builder.marked(NodeKind.CONCAT.marks(stage, replica)):
                    joined = self._builder.concat(name, parts, dtype, 0, device=device)
            self._own[key] = joined
        return self._own[key]

    def _sum_of(self, value: Value, variable: Variable, stage: int, replica: int) -> Ref | None:
        """Returns the rows that all slices have in common, added up in sequence over the slices of one device."""
        key = (value, stage, replica)
        if key not in self._own:
            parts, device = self._made(key)
            total: Ref | None = None
            for part in parts:
                if total is None:
                    total = part
                    continue
                name = f"stage{stage}/replica{replica}/shared_rows"
                with self._builder.marked(NodeKind.SUM.marks(stage, replica)):
                    total = self._builder.add_n(name, [total, part], variable.dtype, device=device)
            self._own[key] = total
        return self._own[key]

    def _made(self, key: tuple[Value, int, int]) -> tuple[list[Ref], str]:
        """Returns the tensors of a value by a replica's tasks, and their device."""
        value, stage, replica = key
        own = sorted(task for task in self._tasks_with(value) if (task.stage, task.replica) == (stage, replica))
        return [self._step.values[task, value] for task in own], self._devices[stage][replica]

    def _tasks_with(self, value: Value) -> list[Task]:
        if value not in self._tasks:
            self._tasks[value] = [task for task, v in self._step.values if v == value]
        return self._tasks[value]
