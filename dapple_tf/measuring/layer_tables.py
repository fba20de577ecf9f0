"""Tables of layers: the parameters of which they only look up rows, and the bytes of these rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dapple_tf.describe.layer_profile import ZERO, Cost
from dapple_tf.measuring.cost_fit import cost_through
from dapple_tf.measuring.layer_memory import stage_shapes
from graph_passes.analysis.table_lookups import row_tables, with_lookups
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Program
from graph_passes.ir.storage import bytes_of
from graph_passes.ir.tensorflow_bridge import Shape, dtype_size

_SAMPLES = (2, 6)
_KEEPERS = ("first", "second")
"""Two devices: what can be kept in shards by them."""


class LayerTables(NamedTuple):
    """The tables of a layer.

    Attributes:
        bytes: their size.
        rows: bytes of the rows that it looks up, with their indices.
    """

    bytes: int
    rows: Cost


def layer_tables(program: Program, sample_shapes: Sequence[Sequence[int]]) -> list[LayerTables]:
    """Returns the tables of each layer, without those that several layers read.

    Args:
        program: a stage for each layer, with gradients.
        sample_shapes: the shape of one sample of each batch input.
    """
    reasons = row_tables(program, [_KEEPERS] * len(program.stages))
    readers = [name for stage in program.stages for name in stage.reads]
    own = [v for v in program.roles.variables if reasons.get(v.name) == "" and readers.count(v.name) == 1]
    if not own:
        return [LayerTables(0, ZERO)] * len(program.stages)
    shapes = [stage_shapes(program, sample_shapes, samples) for samples in _SAMPLES]
    tables = []
    for stage in program.stages:
        lookups = with_lookups(stage, own).lookups
        refs = [ref for lookup in lookups for ref in (lookup.indices.ref, lookup.rows.ref)]
        graph = Graph(stage.own_graph)
        sizes = [sum(_bytes(graph, ref, known[stage.index].get(ref)) for ref in refs) for known in shapes]
        names = {lookup.table for lookup in lookups}
        tables.append(LayerTables(bytes_of(v for v in own if v.name in names), cost_through(_SAMPLES, sizes)))
    return tables


def _bytes(graph: Graph, ref: Ref, shape: Shape | None) -> float:
    """Returns the bytes of a tensor; 0 if its shape is unknown."""
    if shape is None or any(size is None for size in shape):
        return 0.0
    return float(math.prod(size or 0 for size in shape) * dtype_size(dtype_of(graph, ref)))
