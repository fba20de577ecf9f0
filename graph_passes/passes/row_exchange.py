"""Rows of tables in shards, exchanged between devices: those looked up for a task, those of gradients for owners."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, Ref, dtype_attr
from graph_passes.ir.node_kinds import NodeKind, task_attrs
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.program import Lookup, Stage, Value, Variable, in_rows
from graph_passes.ir.storage import flatten, handle
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import empty_graph

if TYPE_CHECKING:
    from graph_passes.passes.replicate import Replicate

_INT32, _INT64 = types_pb2.DT_INT32, types_pb2.DT_INT64


class RowLookups:
    """Adds the nodes that look up rows for the forwards of tasks, to a step's top level.

        ids on 0 -> split -> ids of 0 -> look up on 0 -> join -> rows of ids on 0
                          -> ids of 1 -> look up on 1 ---^

    Indices go to the devices that keep these rows, and the rows come back: by edges of the graph, so that whoever keeps
    them needs no task of its own for that, and may have no samples. A table that devices keep whole is read on the
    replica's own.

    Args:
        options: the pass.
        builder: of the step's top level.
        functions: receives the functions that the nodes call.

    Attributes:
        rows: (forward task, rows) -> the rows on the task's device.
        waiting: forward task -> the node that computes its indices, which waits for its turn.
        reads: (stages of a parameter group, device) -> the nodes that read its shards there.
        reads_of_whole: (stage, replica) -> the nodes that read whole tables for it.
    """

    def __init__(self, options: Replicate, builder: Builder, functions: list[FunctionDef]) -> None:
        self.rows: dict[tuple[Task, Value], Ref] = {}
        self.waiting: dict[Task, str] = {}
        self.reads: dict[tuple[tuple[int, ...], str], tuple[str, ...]] = {}
        self.reads_of_whole: dict[tuple[int, int], tuple[str, ...]] = {}
        self._options, self._layout, self._builder, self._functions = options, options.layout, builder, functions
        self._exchanges: dict[tuple[int, tuple[int, ...]], _Exchange] = {}

    def add(self, stage: Stage, task: Task, variables: Mapping[str, Variable], indices: str) -> None:
        """Looks up the rows that a task's forward takes.

        Args:
            stage: the task's stage.
            task: its forward.
            variables: the program's variables.
            indices: the call of the stage's `indices` for this task.
        """
        assert stage.indices is not None
        self.waiting[task] = indices
        places = {value: Ref(indices, index) for index, value in enumerate(stage.indices.outputs)}
        whole: dict[int, list[Lookup]] = {}
        in_shards: dict[tuple[int, ...], list[Lookup]] = {}
        for lookup in stage.lookups:
            owners = tuple(self._options.owners[lookup.table])
            if lookup.table in self._options.in_shards:
                in_shards.setdefault(owners, []).append(lookup)
            else:
                whole.setdefault(stage.index if stage.index in owners else owners[0], []).append(lookup)
        for source, lookups in whole.items():
            self._read_whole(stage, task, source, lookups, variables, places)
        for owners, lookups in in_shards.items():
            key = (stage.index, owners)
            if key not in self._exchanges:
                self._exchanges[key] = self._exchange(stage, owners, lookups, variables)
            self._look_up(task, owners, lookups, self._exchanges[key], places)

    def _exchange(
        self, stage: Stage, owners: tuple[int, ...], lookups: Sequence[Lookup], variables: Mapping[str, Variable]
    ) -> _Exchange:
        devices = tuple(dict.fromkeys(device for own in owners for device in self._layout.owner_devices[own]))
        tables = [dataclasses.replace(variables[lookup.table], shards=len(devices)) for lookup in lookups]
        for table in tables:
            if not in_rows(table.shape, table.shards):
                raise PassError(
                    f"stage {stage.index} looks up rows of {table.name!r}, of which {table.shards} devices keep parts "
                    f"that aren't rows; leave row_shards out"
                )
        dtypes = [_index_dtype(stage, lookup) for lookup in lookups]
        name = f"{self._options.prefix}stage{stage.index}_of{'_'.join(map(str, owners))}_lookup"
        exchange = _Exchange(
            devices,
            _asking(f"{name}_indices", tables, dtypes),
            _reading(f"{name}_rows", tables, dtypes),
            _joining(f"{name}_joined", tables, dtypes),
        )
        self._functions += [exchange.asking, exchange.reading, exchange.joining]
        return exchange

    def _look_up(
        self,
        task: Task,
        owners: tuple[int, ...],
        lookups: Sequence[Lookup],
        exchange: _Exchange,
        places: Mapping[Value, Ref],
    ) -> None:
        """Sends indices to the devices that keep the rows, and joins what comes back."""
        device, count = self._layout.device_of(task), len(lookups)
        label = f"stage{task.stage}/replica{task.replica}/lookup{task.micro_batch}"
        indices = [places[lookup.indices] for lookup in lookups]
        asking = self._call(f"{label}/indices", exchange.asking, indices, device, task, NodeKind.SPLIT)
        rows: list[Ref] = []
        for number, keeper in enumerate(exchange.devices):
            asked = [Ref(asking, number * count + index) for index in range(count)]
            node = self._call(f"{label}/shard{number}", exchange.reading, asked, keeper, task, NodeKind.LOOKUP)
            self.reads[owners, keeper] = (*self.reads.get((owners, keeper), ()), node)
            rows += [Ref(node, index) for index in range(count)]
        first = len(exchange.devices) * count
        positions = [Ref(asking, first + index) for index in range(first)]
        inputs = [*indices, *rows, *positions]
        joined = self._call(f"{label}/rows", exchange.joining, inputs, device, task, NodeKind.CONCAT)
        for index, lookup in enumerate(lookups):
            self.rows[task, lookup.rows] = Ref(joined, index)

    def _read_whole(
        self,
        stage: Stage,
        task: Task,
        source: int,
        lookups: Sequence[Lookup],
        variables: Mapping[str, Variable],
        places: Mapping[Value, Ref],
    ) -> None:
        """Reads rows of tables that are whole on the device that keeps the variables of a task's stage, or another."""
        tables = [variables[lookup.table] for lookup in lookups]
        dtypes = [_index_dtype(stage, lookup) for lookup in lookups]
        function = _reading(f"{self._options.prefix}stage{stage.index}_lookup_from{source}", tables, dtypes)
        self._functions.append(function)
        device = self._layout.owner_devices[source][task.replica if source == stage.index else 0]
        name = f"stage{task.stage}/replica{task.replica}/lookup{task.micro_batch}"
        indices = [places[lookup.indices] for lookup in lookups]
        node = self._call(name, function, indices, device, task, NodeKind.LOOKUP)
        reader = (stage.index, task.replica)
        self.reads_of_whole[reader] = (*self.reads_of_whole.get(reader, ()), node)
        for index, lookup in enumerate(lookups):
            self.rows[task, lookup.rows] = Ref(node, index)

    def _call(
        self, name: str, function: FunctionDef, inputs: Sequence[Ref], device: str, task: Task, kind: NodeKind
    ) -> str:
        attrs = task_attrs(task, kind)
        node = call_node(self._builder.names.fresh(name), function, inputs, device=device, attrs=attrs)
        return self._builder.append(node).node


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The functions of a stage's lookups in shards that the same devices keep.

    Attributes:
        devices: these devices, in the order of shards.
        asking: see `_asking`.
        reading: see `_reading`.
        joining: see `_joining`.
    """

    devices: tuple[str, ...]
    asking: FunctionDef
    reading: FunctionDef
    joining: FunctionDef


def rows_by_shard(name: str, variable: Variable, own_dtype: int, dtype: int) -> FunctionDef:
    """Returns the function that separates rows of a parameter's gradient by the shard that they belong to.

        (values [rows, ...], indices [rows]) -> values of each shard's rows, and their indices in each shard

    Rows keep their order. Those of indices that the parameter doesn't have are left out.

    Args:
        name: the function's name.
        variable: the parameter, whose shards are rows.
        own_dtype: dtype of the indices.
        dtype: dtype of the results' indices.
    """
    builder = Builder(empty_graph())
    values = builder.append(placeholder("values", variable.dtype))
    given = builder.append(placeholder("indices", own_dtype))
    indices = _cast(builder, given, own_dtype, dtype)
    kind, count = dtype_attr(dtype), variable.shards
    rows = builder.const(variable.storage_shape[0], dtype)
    number = builder.add("number", "FloorDiv", [indices, rows], T=kind)
    local = builder.add("local", "FloorMod", [indices, rows], T=kind)
    nowhere = builder.const(count, dtype)
    before = builder.add("before", "Less", [indices, builder.const(0, dtype)], T=kind)
    bounded = builder.add("bounded", "Minimum", [number, nowhere], T=kind)
    shard = builder.add("shard", "SelectV2", [before, nowhere, bounded], T=kind)
    shard = _cast(builder, shard, dtype, _INT32)
    parts = [
        part
        for tensor, own in ((values, variable.dtype), (local, dtype))
        for part in _partition(builder, tensor, own, shard, count + 1)[:count]
    ]
    return outline(name, Graph(builder.graph), [values, given], parts)


def _asking(name: str, tables: Sequence[Variable], dtypes: Sequence[int]) -> FunctionDef:
    """Returns the function from indices of each lookup to those of each shard, and their positions.

        ids [...] of each table -> (ids in shard 0) of each table, (ids in shard 1) ..., positions in the same order

    Args:
        name: the function's name.
        tables: the tables, in shards by rows, one for each lookup.
        dtypes: of the indices.
    """
    builder = Builder(empty_graph())
    arguments, asked, positions = [], [], []
    for table, dtype in zip(tables, dtypes, strict=True):
        argument = builder.append(placeholder(builder.names.fresh("indices"), dtype))
        arguments.append(argument)
        wide = _wide(dtype)
        indices = flatten(builder, _cast(builder, argument, dtype, wide), wide)
        kind, rows = dtype_attr(wide), builder.const(table.storage_shape[0], wide)
        number = builder.add("number", "FloorDiv", [indices, rows], T=kind)
        number = builder.add("number", "Maximum", [number, builder.const(0, wide)], T=kind)
        number = builder.add("number", "Minimum", [number, builder.const(table.shards - 1, wide)], T=kind)
        local = builder.add("local", "Sub", [indices, builder.add("first", "Mul", [number, rows], T=kind)], T=kind)
        # The table ends before its last shard does: what is behind its end is behind the shard's, and so an error.
        inside = builder.add("inside", "Less", [indices, builder.const(table.shape[0], wide)], T=kind)
        local = builder.add("local", "SelectV2", [inside, local, rows], T=kind)
        shard = _cast(builder, number, wide, _INT32)
        size = builder.add("size", "Size", [indices], T=kind, out_type=dtype_attr(_INT32))
        bounds = [builder.const(0, _INT32), size, builder.const(1, _INT32)]
        places = builder.add("places", "Range", bounds, Tidx=dtype_attr(_INT32))
        asked.append(_partition(builder, local, wide, shard, table.shards))
        positions.append(_partition(builder, places, _INT32, shard, table.shards))
    results = [part for parts in (asked, positions) for shard in zip(*parts, strict=True) for part in shard]
    return outline(name, Graph(builder.graph), arguments, results)


def _reading(name: str, tables: Sequence[Variable], dtypes: Sequence[int]) -> FunctionDef:
    """Returns the function from indices to rows of the tables on the device that runs it: whole ones, or its shards."""
    builder = Builder(empty_graph())
    arguments, rows = [], []
    for table, dtype in zip(tables, dtypes, strict=True):
        wide = _wide(dtype)
        own_dtype = wide if table.shards > 1 else dtype
        indices = builder.append(placeholder(builder.names.fresh("indices"), own_dtype))
        arguments.append(indices)
        source = handle(builder, table.storage_name, table.dtype, table.storage_shape)
        inputs = [source, _cast(builder, indices, own_dtype, wide)]
        kinds = {"dtype": dtype_attr(table.dtype), "Tindices": dtype_attr(wide)}
        rows.append(builder.add("rows", "ResourceGather", inputs, **kinds))
    return outline(name, Graph(builder.graph), arguments, rows)


def _joining(name: str, tables: Sequence[Variable], dtypes: Sequence[int]) -> FunctionDef:
    """Returns the function that joins rows.

        ids of each table, (rows of shard 0) of each table, ..., positions as of `_asking` -> rows [..., columns]

    Args:
        name: the function's name.
        tables: the tables, in shards by rows, one for each lookup.
        dtypes: of the indices.
    """
    builder, shards, count = Builder(empty_graph()), tables[0].shards, len(tables)
    indices = [builder.append(placeholder(builder.names.fresh("indices"), dtype)) for dtype in dtypes]
    rows = [
        builder.append(placeholder(builder.names.fresh("rows"), table.dtype)) for _ in range(shards) for table in tables
    ]
    positions = [builder.append(placeholder(builder.names.fresh("positions"), _INT32)) for _ in range(shards * count)]
    results = []
    for index, (table, dtype) in enumerate(zip(tables, dtypes, strict=True)):
        kind = dtype_attr(table.dtype)
        parts = [*positions[index::count], *rows[index::count]]
        stitched = builder.add("joined", "DynamicStitch", parts, N=shards, T=kind)
        lengths = {"T": dtype_attr(dtype), "out_type": dtype_attr(_INT32)}
        shape = builder.add("shape", "Shape", [indices[index]], **lengths)
        shape = builder.concat("shape", [shape, builder.const(list(table.shape[1:]), _INT32)], _INT32, 0)
        results.append(builder.add("shaped", "Reshape", [stitched, shape], T=kind))
    return outline(name, Graph(builder.graph), [*indices, *rows, *positions], results)


def _index_dtype(stage: Stage, lookup: Lookup) -> int:
    assert stage.indices is not None
    return stage.indices.result_dtype(lookup.indices)


def _wide(dtype: int) -> int:
    """Returns the dtype in which indices are computed with: that of int16 hasn't all operators."""
    return dtype if dtype == _INT64 else _INT32


def _cast(builder: Builder, tensor: Ref, dtype: int, wanted: int) -> Ref:
    if dtype == wanted:
        return tensor
    return builder.add("cast", "Cast", [tensor], SrcT=dtype_attr(dtype), DstT=dtype_attr(wanted))


def _partition(builder: Builder, tensor: Ref, dtype: int, shard: Ref, count: int) -> list[Ref]:
    """Returns the elements, or rows, of a tensor for each number in ``shard``, in order."""
    node = builder.add("parts", "DynamicPartition", [tensor, shard], T=dtype_attr(dtype), num_partitions=count).node
    return [Ref(node, number) for number in range(count)]
