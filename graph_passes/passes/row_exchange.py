"""Rows of tables in shards, exchanged between devices: for tasks, and gradients for owners."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, Ref, dtype_attr
from graph_passes.ir.node_kinds import NodeKind, task_attrs
from graph_passes.ir.outline import FunctionDef, add_call, outline
from graph_passes.ir.program import Lookup, Stage, Value, Variable, in_rows
from graph_passes.ir.storage import flatten, handle
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import empty_graph

if TYPE_CHECKING:
    from graph_passes.passes.replicate import Replication

_INT32, _INT64 = types_pb2.DT_INT32, types_pb2.DT_INT64


class RowLookups:
    """Adds the nodes that look up rows for the forwards of tasks, to a step's top level.

        ids on 0 -> split -> ids of 0 -> look up on 0 -> join -> rows of ids on 0
                          -> ids of 1 -> look up on 1 ---^

    Indices go to the devices that keep these rows, and the rows come back: by edges of the graph, so that whoever keeps
    them needs no task of its own for that, and may have no samples. A table that devices keep whole is read on the
    replica's own.

    Args:
        step: the step's top level.

    Attributes:
        rows: (forward task, rows) -> the rows on the task's device.
    """

    def __init__(self, step: Replication) -> None:
        self.rows: dict[tuple[Task, Value], Ref] = {}
        self._step, self._options, self._layout, self._builder = step, step.options, step.layout, step.builder
        self._variables = step.program.variables
        self._exchanges: dict[tuple[int, tuple[int, ...]], _Exchange] = {}

    def add(self, stage: Stage, task: Task, indices: str) -> None:
        """Looks up the rows that a task's forward takes.

        Args:
            stage: the task's stage.
            task: its forward.
            indices: the call of the stage's `indices` for this task.
        """
        assert stage.indices is not None
        self._step.ahead[task].append(indices)
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
            self._read_whole(stage, task, source, lookups, places)
        for owners, lookups in in_shards.items():
            key = (stage.index, owners)
            if key not in self._exchanges:
                self._exchanges[key] = self._exchange(stage, owners, lookups)
            self._look_up(task, owners, lookups, self._exchanges[key], places)

    def _exchange(self, stage: Stage, owners: tuple[int, ...], lookups: Sequence[Lookup]) -> _Exchange:
        devices = tuple(dict.fromkeys(device for own in owners for device in self._layout.devices[own]))
        tables = [dataclasses.replace(self._variables[lookup.table], shards=len(devices)) for lookup in lookups]
        for table in tables:
            if not in_rows(table.shape, table.shards):
                raise PassError(
                    f"stage {stage.index} looks up rows of {table.name!r}, of which {table.shards} devices keep parts "
                    f"that aren't rows; leave row_shards out"
                )
        dtypes = [_index_dtype(stage, lookup) for lookup in lookups]
        name = f"{self._options.prefix}stage{stage.index}_of{'_'.join(map(str, owners))}_lookup"
        return _Exchange(
            devices,
            _asking(f"{name}_indices", tables, dtypes),
            _reading(f"{name}_rows", tables, dtypes),
            _joining(f"{name}_joined", tables, dtypes),
        )

    def _look_up(
        self,
        task: Task,
        owners: tuple[int, ...],
        lookups: Sequence[Lookup],
        exchange: _Exchange,
        places: Mapping[Value, Ref],
    ) -> None:
        """Sends indices to the devices that keep the rows, and joins what comes back."""
        device, count, shards = self._layout.device_of(task), len(lookups), len(exchange.devices)
        label = f"stage{task.stage}/replica{task.replica}/lookup{task.micro_batch}"
        indices = [places[lookup.indices] for lookup in lookups]
        asking = self._call(f"{label}/indices", exchange.asking, indices, device, task, NodeKind.SPLIT)
        results = len(exchange.asking.signature.output_arg)
        rows: list[Ref] = []
        for number, keeper in enumerate(exchange.devices):
            asked = [Ref(asking, index) for index in range(number, results - shards * count, shards)]
            node = self._call(f"{label}/shard{number}", exchange.reading, asked, keeper, task, NodeKind.LOOKUP)
            self._step.shard_reads[owners, keeper].append(node)
            rows += [Ref(node, index) for index in range(len(exchange.reading.signature.output_arg))]
        positions = [Ref(asking, index) for index in range(results - shards * count, results)]
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
        places: Mapping[Value, Ref],
    ) -> None:
        """Reads rows of tables that are whole on the device that keeps the variables of a task's stage, or another."""
        tables = [self._variables[lookup.table] for lookup in lookups]
        dtypes = [_index_dtype(stage, lookup) for lookup in lookups]
        function = _reading_whole(f"{self._options.prefix}stage{stage.index}_lookup_from{source}", tables, dtypes)
        device = self._layout.devices[source][task.replica if source == stage.index else 0]
        name = f"stage{task.stage}/replica{task.replica}/lookup{task.micro_batch}"
        indices = [places[lookup.indices] for lookup in lookups]
        node = self._call(name, function, indices, device, task, NodeKind.LOOKUP)
        self._step.reads[stage.index, task.replica].append(node)
        for index, lookup in enumerate(lookups):
            self.rows[task, lookup.rows] = Ref(node, index)

    def _call(
        self, name: str, function: FunctionDef, inputs: Sequence[Ref], device: str, task: Task, kind: NodeKind
    ) -> str:
        return add_call(self._builder, name, function, inputs, device=device, attrs=task_attrs(task, kind)).node


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


def rows_by_shard(name: str, variable: Variable, dtype: int) -> FunctionDef:
    """Returns the function that separates rows of a parameter's gradient by the shard that they belong to.

        (values [rows, ...], indices [rows]) -> values of each shard's rows, and their indices in each shard

    Rows keep their order. Those of indices that the parameter doesn't have are left out.

    Args:
        name: the function's name.
        variable: the parameter, whose shards are rows.
        dtype: dtype of the indices.
    """
    builder = Builder(empty_graph())
    values = builder.argument("values", variable.dtype)
    indices = builder.argument("indices", dtype)
    kind, count = dtype_attr(dtype), variable.shards
    rows = builder.const(variable.storage_shape[0], dtype)
    number = builder.add("number", "FloorDiv", [indices, rows], T=kind)
    local = builder.add("local", "FloorMod", [indices, rows], T=kind)
    nowhere = builder.const(count, dtype)
    before = builder.add("before", "Less", [indices, builder.const(0, dtype)], T=kind)
    bounded = builder.add("bounded", "Minimum", [number, nowhere], T=kind)
    shard = builder.add("shard", "SelectV2", [before, nowhere, bounded], T=kind)
    shard = builder.cast(shard, dtype, _INT32)
    parts = [
        part
        for tensor, own in ((values, variable.dtype), (local, dtype))
        for part in _partition(builder, tensor, own, shard, count + 1)[:count]
    ]
    return outline(name, Graph(builder.graph), [values, indices], parts)


def _asking(name: str, tables: Sequence[Variable], dtypes: Sequence[int]) -> FunctionDef:
    """Returns the function that separates indices by the shard that they belong to.

        ids [...] of each table -> ids in each shard, (numbers of these for each table,) positions in ids

    For each shard there is one vector of ids, those of one table after those of the other, and positions for each
    table. Numbers are left out if there is one table.

    Args:
        name: the function's name.
        tables: the tables, in shards by rows, one for each lookup.
        dtypes: of the indices.
    """
    builder = Builder(empty_graph())
    arguments, asked, positions, sent = [], [], [], _common(dtypes)
    for table, dtype in zip(tables, dtypes, strict=True):
        argument = builder.argument("indices", dtype)
        arguments.append(argument)
        indices = flatten(builder, builder.cast(argument, dtype, sent), sent)
        kind, rows = dtype_attr(sent), builder.const(table.storage_shape[0], sent)
        number = builder.add("number", "FloorDiv", [indices, rows], T=kind)
        number = builder.add("number", "Maximum", [number, builder.const(0, sent)], T=kind)
        number = builder.add("number", "Minimum", [number, builder.const(table.shards - 1, sent)], T=kind)
        local = builder.add("local", "Sub", [indices, builder.add("first", "Mul", [number, rows], T=kind)], T=kind)
        # The table ends before its last shard does: what is behind its end is behind the shard's, and so an error.
        inside = builder.add("inside", "Less", [indices, builder.const(table.shape[0], sent)], T=kind)
        local = builder.add("local", "SelectV2", [inside, local, rows], T=kind)
        shard = builder.cast(number, sent, _INT32)
        bounds = [builder.const(0, _INT32), _size(builder, indices, sent), builder.const(1, _INT32)]
        places = builder.add("places", "Range", bounds, Tidx=dtype_attr(_INT32))
        asked.append(_partition(builder, local, sent, shard, table.shards))
        positions.append(_partition(builder, places, _INT32, shard, table.shards))
    by_shard = list(zip(*asked, strict=True))
    results = [builder.concat("asked", parts, sent, 0) for parts in by_shard]
    if len(tables) > 1:
        results += [_packed(builder, [_size(builder, part, sent) for part in parts]) for parts in by_shard]
    results += [part for parts in zip(*positions, strict=True) for part in parts]
    return outline(name, Graph(builder.graph), arguments, results)


def _reading(name: str, tables: Sequence[Variable], dtypes: Sequence[int]) -> FunctionDef:
    """Returns the function from what `_asking` asks of a shard to its rows, in one vector for each of `_dtypes`."""
    builder, sent, count = Builder(empty_graph()), _common(dtypes), len(tables)
    arguments = [builder.argument("indices", sent)]
    sizes = None
    if count > 1:
        sizes = builder.argument("sizes", _INT32)
        arguments.append(sizes)
    parts = _split(builder, arguments[0], sent, sizes, count)
    rows: dict[int, list[Ref]] = {}
    for table, indices in zip(tables, parts, strict=True):
        rows.setdefault(table.dtype, []).append(flatten(builder, _rows(builder, table, indices, sent), table.dtype))
    vectors = [builder.concat("rows", rows[dtype], dtype, 0) for dtype in _dtypes(tables)]
    return outline(name, Graph(builder.graph), arguments, vectors)


def _joining(name: str, tables: Sequence[Variable], dtypes: Sequence[int]) -> FunctionDef:
    """Returns the function that joins rows.

        ids of each table, vectors of all shards as of `_reading`, positions as of `_asking` -> rows [..., columns]

    Args:
        name: the function's name.
        tables: the tables, in shards by rows, one for each lookup.
        dtypes: of the indices.
    """
    builder, shards = Builder(empty_graph()), tables[0].shards
    indices = [builder.argument("indices", dtype) for dtype in dtypes]
    vectors = [{dtype: builder.argument("rows", dtype) for dtype in _dtypes(tables)} for _ in range(shards)]
    positions = [[builder.argument("positions", _INT32) for _ in tables] for _ in range(shards)]
    rows = [_unpacked(builder, tables, *own) for own in zip(vectors, positions, strict=True)]
    results = []
    for index, (table, dtype) in enumerate(zip(tables, dtypes, strict=True)):
        kind = dtype_attr(table.dtype)
        parts = [*(own[index] for own in positions), *(own[index] for own in rows)]
        stitched = builder.add("joined", "DynamicStitch", parts, N=shards, T=kind)
        lengths = {"T": dtype_attr(dtype), "out_type": dtype_attr(_INT32)}
        shape = builder.add("shape", "Shape", [indices[index]], **lengths)
        shape = builder.concat("shape", [shape, builder.const(list(table.shape[1:]), _INT32)], _INT32, 0)
        results.append(builder.add("shaped", "Reshape", [stitched, shape], T=kind))
    of_shards = [ref for own in vectors for ref in own.values()]
    inputs = [*indices, *of_shards, *(ref for own in positions for ref in own)]
    return outline(name, Graph(builder.graph), inputs, results)


def _unpacked(
    builder: Builder, tables: Sequence[Variable], vectors: Mapping[int, Ref], positions: Sequence[Ref]
) -> list[Ref]:
    """Returns a shard's rows for each table, [rows, columns], from its vectors."""
    rows: dict[int, Ref] = {}
    for dtype, vector in vectors.items():
        own = [index for index, table in enumerate(tables) if table.dtype == dtype]
        sizes = None
        if len(own) > 1:
            each = [_elements(builder, tables[index], positions[index]) for index in own]
            sizes = _packed(builder, each)
        for index, part in zip(own, _split(builder, vector, dtype, sizes, len(own)), strict=True):
            shape = builder.const([-1, *tables[index].shape[1:]], _INT32)
            rows[index] = builder.add("shaped", "Reshape", [part, shape], T=dtype_attr(dtype))
    return [rows[index] for index in range(len(tables))]


def _elements(builder: Builder, table: Variable, positions: Ref) -> Ref:
    """Returns the number of elements of as many rows as there are positions."""
    width = builder.const(math.prod(table.shape[1:]), _INT32)
    return builder.add("elements", "Mul", [_size(builder, positions, _INT32), width], T=dtype_attr(_INT32))


def _reading_whole(name: str, tables: Sequence[Variable], dtypes: Sequence[int]) -> FunctionDef:
    """Returns the function from indices of each lookup to rows of tables that the device has whole."""
    builder = Builder(empty_graph())
    indices = [builder.argument("indices", dtype) for dtype in dtypes]
    rows = [_rows(builder, *each) for each in zip(tables, indices, dtypes, strict=True)]
    return outline(name, Graph(builder.graph), indices, rows)


def _rows(builder: Builder, table: Variable, indices: Ref, dtype: int) -> Ref:
    """Returns rows of what the device that runs it keeps of a table."""
    source, wide = handle(builder, table.storage_name, table.dtype, table.storage_shape), _common([dtype])
    kinds = {"dtype": dtype_attr(table.dtype), "Tindices": dtype_attr(wide)}
    return builder.add("rows", "ResourceGather", [source, builder.cast(indices, dtype, wide)], **kinds)


def _index_dtype(stage: Stage, lookup: Lookup) -> int:
    assert stage.indices is not None
    return stage.indices.result_dtype(lookup.indices)


def _common(dtypes: Sequence[int]) -> int:
    """Returns the dtype in which indices of these dtypes are computed and sent: int16 lacks operators."""
    return _INT64 if _INT64 in dtypes else _INT32


def _dtypes(tables: Sequence[Variable]) -> list[int]:
    """Returns the dtypes of tables, each once."""
    return sorted({table.dtype for table in tables})


def _size(builder: Builder, tensor: Ref, dtype: int) -> Ref:
    return builder.add("size", "Size", [tensor], T=dtype_attr(dtype), out_type=dtype_attr(_INT32))


def _packed(builder: Builder, numbers: Sequence[Ref]) -> Ref:
    return builder.add("sizes", "Pack", numbers, T=dtype_attr(_INT32), N=len(numbers), axis=0)


def _split(builder: Builder, vector: Ref, dtype: int, sizes: Ref | None, count: int) -> list[Ref]:
    """Splits a vector into parts of these sizes; None for a single part."""
    return [vector] if sizes is None else builder.parts("parts", vector, dtype, sizes, count)


def _partition(builder: Builder, tensor: Ref, dtype: int, shard: Ref, count: int) -> list[Ref]:
    """Returns the elements, or rows, of a tensor for each number in ``shard``, in order."""
    node = builder.add("parts", "DynamicPartition", [tensor, shard], T=dtype_attr(dtype), num_partitions=count).node
    return [Ref(node, number) for number in range(count)]
