"""Rewrites means over the rows that a mask chooses as sums over row counts, which can be the whole batch's."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Sequence

from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_traits import ELEMENTWISE
from graph_passes.analysis.sample_dependence import SampleDependence
from graph_passes.ir.graph import (
    AttrValue,
    Builder,
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    computation,
    dtype_attr,
    make_const,
    make_node,
    own_attrs,
)
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Program
from graph_passes.ir.spreads import CONSTANT
from graph_passes.ir.tensorflow_bridge import Shape, constant_value, is_stateful

_BY_ROWS = ELEMENTWISE | {"Cast"}
"""Ops that compute each row of their result from one row of their inputs, which have the same rank."""
_LOSSES = ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
"""Losses by rows, of inputs of any rank."""
_ALONG = ("Sum", "Mean", "Max", "Min", "Prod", "Any", "All", "ArgMax", "ArgMin", "ExpandDims")
"""Ops along the axes that their second input names."""


def with_counted_rows(program: Program, dependence: SampleDependence, loss_nodes: Container[str]) -> Program | None:
    """Rewrites means of a loss or a metric over rows that a mask of batch inputs chooses.

        Mean(Gather(e, Where(m)))   becomes   Sum(Gather(e, Where(m))) / Sum(m)

    A slice's mean is over its own rows, however few; `scale_losses` can add up its sum and the number of the whole
    batch's rows.

    Returns:
        None where there is no such mean.
    """
    rows = _Rows(program, dependence)
    builder = Builder(GraphDef(versions=program.graph.versions, library=program.graph.library))
    builder.names = Names(rows.view.nodes)
    for node in program.graph.node:
        if node.op != "Mean" or node.name not in loss_nodes or not rows.count(node, builder):
            builder.graph.node.append(node)
    return program.replace(graph=builder.graph) if len(builder.graph.node) > len(program.graph.node) else None


class _Rows:
    """Where the rows of a graph's tensors come from."""

    def __init__(self, program: Program, dependence: SampleDependence) -> None:
        self.view = Graph(program.graph)
        self._spreads, self._shapes = dependence.spreads, dependence.shapes
        self._masks: dict[Ref, Ref | None] = {}

    def count(self, node: NodeDef, builder: Builder) -> bool:
        """Adds the replacement of a mean; returns False if it isn't over rows that a mask of inputs chooses."""
        ref, axes = self.view.inputs(node.name)
        spread, shape, over = self._spreads.get(ref, CONSTANT), self._shapes.get(ref), self._integers(axes)
        if not spread.partial or spread.axis != 0 or shape is None or over is None:
            return False
        over = [axis % len(shape) for axis in over]
        others = _product(shape, [axis for axis in over if axis])
        mask = self._mask(ref)
        if 0 not in over or others is None or mask is None or not self._spreads.get(mask, CONSTANT).known:
            return False
        dtype, int32 = node.attr["T"], dtype_attr(types_pb2.DT_INT32)

        def add(what: str, op: str, *inputs: Ref, **attrs: AttrValue) -> Ref:
            return builder.add(f"{node.name}/{what}", op, inputs, **attrs)

        def const(what: str, value: float | Sequence[int], dtype: int) -> Ref:
            return builder.append(make_const(builder.names.fresh(f"{node.name}/{what}"), value, dtype))

        with builder.marked(own_attrs(node)):
            total = add("total", "Sum", ref, axes, **{key: node.attr[key] for key in ("T", "Tidx", "keep_dims")})
            flags = add("flags", "Cast", mask, SrcT=dtype_attr(types_pb2.DT_BOOL), DstT=dtype)
            flat, first = (const(*own, types_pb2.DT_INT32) for own in (("flat", [-1]), ("first", [0])))
            row = add("row", "Reshape", flags, flat, T=dtype, Tshape=int32)
            count = add("rows", "Sum", row, first, T=dtype, Tidx=int32)
            divisor = add("divisor", "Mul", count, const("width", float(others), dtype.type), T=dtype)
            builder.append(make_node(node.name, "RealDiv", [total, divisor], attrs={"T": dtype}))
        return True

    def _mask(self, ref: Ref) -> Ref | None:
        """Returns the condition that has chosen a tensor's rows, if each row belongs to one true entry."""
        if ref not in self._masks:
            self._masks[ref] = self._mask_of(ref)
        return self._masks[ref]

    def _mask_of(self, ref: Ref) -> Ref | None:
        node, inputs = self.view.nodes[ref.node], self.view.inputs(ref.node)
        rank = len(self._shapes.get(inputs[0]) or ()) if inputs else 0
        if node.op == "GatherNd":
            return self._condition(inputs[1])
        if node.op == "GatherV2":
            return self._condition(inputs[1]) if self._integers(inputs[2]) == [0] else None
        if node.op in (*_ALONG, "Squeeze"):
            along = list(node.attr["squeeze_dims"].list.i) if node.op == "Squeeze" else self._integers(inputs[1])
            rank += node.op == "ExpandDims"
            return self._mask(inputs[0]) if along and rank and all(axis % rank for axis in along) else None
        if node.op in ("Softmax", "LogSoftmax"):
            return self._mask(inputs[0]) if rank > 1 else None
        if node.op not in _BY_ROWS and node.op not in _LOSSES:
            return None
        given = [own for own in inputs if self._spreads.get(own, CONSTANT).axis is not None]
        masks = [self._mask(own) for own in given]
        ranks = {len(self._shapes.get(own) or ()) for own in given}
        alike = len(ranks) == 1 or node.op in _LOSSES
        return masks[0] if alike and None not in masks and self._equal([mask for mask in masks if mask]) else None

    def _equal(self, refs: Sequence[Ref]) -> bool:
        """Returns whether tensors are computed by equal operations from the same inputs."""
        names = self.view.ordered(self.view.ancestors(refs, control=False)) if len(set(refs)) > 1 else []
        numbers: dict[Hashable, int] = {}
        number_of: dict[str, int] = {}
        for name in names:
            node = self.view.nodes[name]
            inputs = tuple((number_of[ref.node], ref.output) for ref in self.view.inputs(name))
            apart = name if node.op == "Placeholder" or is_stateful(node.op) else ""
            number_of[name] = numbers.setdefault((apart, computation(node, inputs)), len(numbers))
        return len({(number_of.get(ref.node, ref.node), ref.output) for ref in refs}) == 1

    def _condition(self, ref: Ref) -> Ref | None:
        """Returns the condition whose true entries are at these places."""
        node, inputs = self.view.nodes[ref.node], self.view.inputs(ref.node)
        if node.op == "StridedSlice":  # one of the columns
            all_rows = node.attr["begin_mask"].i & node.attr["end_mask"].i & 1 and self._integers(inputs[3]) == [1, 1]
            return self._condition(inputs[0]) if all_rows and node.attr["shrink_axis_mask"].i == 2 else None
        if node.op in ("Squeeze", "Identity") or (node.op == "Unpack" and node.attr["axis"].i == 1):
            return self._condition(inputs[0])
        if node.op in _BY_ROWS:
            conditions = {self._condition(own) for own in inputs if self._spreads.get(own, CONSTANT).partial}
            return conditions.pop() if len(conditions) == 1 else None
        if node.op != "Where":
            return None
        mask = inputs[0]
        while self.view.nodes[mask.node].op in ("Reshape", "Identity"):  # as many true entries in the same order
            mask = self.view.inputs(mask.node)[0]
        return mask if dtype_of(self.view, mask) == types_pb2.DT_BOOL else None

    def _integers(self, ref: Ref) -> list[int] | None:
        node = self.view.nodes[ref.node]
        return [int(number) for number in constant_value(node).ravel()] if node.op == "Const" else None


def _product(shape: Shape, axes: Sequence[int]) -> int | None:
    sizes = [shape[axis] for axis in axes]
    return None if None in sizes else math.prod(size or 0 for size in sizes)
