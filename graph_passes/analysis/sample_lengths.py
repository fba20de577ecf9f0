"""Lengths that samples decide: which tensors have them, and which values depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graph_passes.analysis.operator_traits import (
    ASKING,
    ELEMENTWISE,
    GATHERS,
    KEEPING_ELEMENTS,
    KEEPING_ORDER,
    REPEATING,
)
from graph_passes.ir.graph import NodeDef, Ref
from graph_passes.ir.spreads import Coupling, Spread
from graph_passes.ir.tensorflow_bridge import takes_functions

if TYPE_CHECKING:
    from graph_passes.analysis.sample_interpreter import Interpreter

_PICKING = GATHERS | {"Slice", "Split", "SplitV", "StridedSlice", "Unpack", "Where"}
"""Ops that choose elements of an axis by places counted from its start."""
_ALONG = {"CumulativeLogsumexp": 1, "Cumprod": 1, "Cumsum": 1, "ReverseV2": 1, "Roll": 2}
"""Ops along axes that an input names, and its number."""
_TRANSPOSED = frozenset({"Conv2DBackpropInput", "Conv3DBackpropInputV2"})
_POOLING = frozenset({"AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D"})
_WINDOWS = _TRANSPOSED | _POOLING | {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
"""Ops whose result at a place depends on neighbours, or on padding beyond the ends."""
_ALONG_LAST = frozenset({"LogSoftmax", "Softmax", "TopK", "TopKV2"})
_COMPARING = {"Less": (0, 1), "LessEqual": (0, 1), "Greater": (1, 0), "GreaterEqual": (1, 0)}
"""Comparisons: the numbers of the smaller and of the larger input."""
_MASKING = frozenset({"LogicalAnd", "Mul", "MulNoNan"})
_KEEPING_ZEROS = KEEPING_ELEMENTS | REPEATING | {"DivNoNan", "Mean", "Neg", "RealDiv", "Square", "StridedSlice", "Sum"}
"""Ops whose result is zero where their first input is."""


def with_lengths(interpreter: Interpreter, node: NodeDef, outputs: Sequence[Spread]) -> Sequence[Spread]:
    """Marks outputs with lengths that samples decide, and notes values that depend on such lengths.

    An integer that several samples decide (the longest of all) is a length where an output has axes of unknown
    length. Elsewhere it chooses elements.
    """
    used = [(ref, interpreter.of(ref)) for ref in interpreter.graph.inputs(node.name)]
    decided = any(spread.decides and interpreter.is_integer(ref) for ref, spread in used)
    sized = [ref for ref, spread in used if spread.lengths]
    numbers = interpreter.numbers(Ref(node.name))
    follows = numbers is not None and not np.isnan(numbers[0]).any()
    if not (decided or sized) or follows or node.op in ASKING or takes_functions(node.op):
        return outputs
    before = max((_open_axes(interpreter, ref) for ref in sized), default=0)
    rows = any(spread.axis is not None for _, spread in used)
    results = []
    for output, spread in enumerate(outputs):
        ref = Ref(node.name, output)
        if interpreter.is_handle(ref):
            results.append(spread._replace(lengths=True))
            continue
        after = _open_axes(interpreter, ref, spread)
        if node.op == "Reshape" and spread.axis is not None:
            spread = spread._replace(partial=after < before or (spread.partial and not decided))
        elif (decided and _is_value(interpreter, node, after)) or _combines_places(
            interpreter, node, sized, after < before
        ):
            if rows:
                interpreter.couple(node, Coupling.NOT_LINEAR if interpreter.in_loss(node) else Coupling.TOGETHER)
            elif not spread.varies:
                spread = spread._replace(varies=True, linear=False)
        results.append(spread._replace(lengths=after > 0))
    return results


def _open_axes(interpreter: Interpreter, ref: Ref, spread: Spread | None = None) -> int:
    """Returns the number of a tensor's axes of unknown length, apart from the one with the samples."""
    shape, axis = interpreter.shape(ref), (spread or interpreter.of(ref)).axis
    return 1 if shape is None else sum(size is None for own, size in enumerate(shape) if own != axis)


def _is_value(interpreter: Interpreter, node: NodeDef, after: int) -> bool:
    """Returns whether a node uses an integer that samples decide as a value, not as a length of its output."""
    refs = interpreter.graph.inputs(node.name)
    if node.op == "Range":
        step = interpreter.numbers(refs[2])
        return interpreter.of(refs[0]).decides or step is None or not step[0] > 0
    begins = node.op in ("Slice", "StridedSlice") and interpreter.of(refs[1]).decides
    return not after or begins or node.op in ELEMENTWISE or node.op.startswith("Resize")


def _crosses_ends(interpreter: Interpreter, node: NodeDef, sized: Sequence[Ref]) -> bool:
    """Returns whether a window or a shift reaches beyond the end of an axis of unknown length."""
    refs = interpreter.graph.inputs(node.name)
    if node.op in _WINDOWS:
        sizes = node.attr["ksize"].list.i[1:-1] if node.op in _POOLING else (interpreter.shape(refs[1]) or (None,))[:-2]
        wide = not sizes or any(size != 1 for size in sizes)
        return wide and (node.op in _TRANSPOSED or node.attr["padding"].s != b"VALID")
    if node.op in ("ConcatV2", "Pad", "PadV2", "MirrorPad", "SpaceToBatchND"):
        shape = interpreter.shape(refs[0])
        if shape is None:
            return True
        axes = {axis for axis, size in enumerate(shape) if size is None} - {interpreter.of(refs[0]).axis}
        if node.op == "ConcatV2":
            along = interpreter.axes_of(refs[-1], len(shape))
            return bool(set(refs[:-2]) & set(sized)) and (along is None or not axes.isdisjoint(along))
        numbers = interpreter.integers(refs[-1 if node.op == "SpaceToBatchND" else 1])
        first = 1 if node.op == "SpaceToBatchND" else 0
        return numbers is None or any(numbers[2 * (axis - first) + 1] > 0 for axis in axes if axis >= first)
    return node.op.startswith("Resize")


def _combines_places(interpreter: Interpreter, node: NodeDef, sized: Sequence[Ref], merged: bool) -> bool:
    """Returns whether elements along an axis of unknown length are combined, or counted from its end.

    Args:
        interpreter: the interpreter of its graph.
        node: the node.
        sized: its inputs with such axes.
        merged: whether its output has fewer of them.
    """
    refs = interpreter.graph.inputs(node.name)
    if merged and node.op not in _PICKING and not (node.op == "Sum" and _is_masked(interpreter, refs[0])):
        return True
    if sized and _crosses_ends(interpreter, node, sized):
        return True
    shape = interpreter.shape(refs[0]) if refs[0] in sized else None
    if shape is None:
        return False
    if node.op in _ALONG_LAST:
        return shape[-1] is None
    if node.op in _ALONG:
        axes = interpreter.axes_of(refs[_ALONG[node.op]], len(shape))
        return axes is None or any(shape[axis] is None for axis in axes)
    if node.op != "StridedSlice" or node.attr["ellipsis_mask"].i or node.attr["new_axis_mask"].i:
        return False
    begin, stride = interpreter.integers(refs[1]) or (), interpreter.integers(refs[3]) or ()
    entries = zip(shape, begin, stride, strict=False)
    return any(size is None and (first < 0 or step < 0) for size, first, step in entries)


def _is_masked(interpreter: Interpreter, ref: Ref) -> bool:
    """Returns whether a tensor is zero but at each sample's places below a number, up to the largest of these."""
    node = interpreter.graph.nodes[ref.node]
    refs = interpreter.graph.inputs(node.name)
    if node.op in _COMPARING:
        place, limit = (_origin(interpreter, refs[index]) for index in _COMPARING[node.op])
        if interpreter.graph.nodes[place.node].op != "Range":
            return False
        largest = _origin(interpreter, interpreter.graph.inputs(place.node)[1])  # where the range ends
        numbers = interpreter.graph.inputs(largest.node)
        return interpreter.graph.nodes[largest.node].op == "Max" and _origin(interpreter, numbers[0]) == limit
    if node.op == "SelectV2":
        return _is_masked(interpreter, refs[0]) and interpreter.is_zero(refs[2])
    if node.op in _MASKING:
        return any(_is_masked(interpreter, own) for own in set(refs))
    return node.op in _KEEPING_ZEROS and _is_masked(interpreter, refs[0])


def _origin(interpreter: Interpreter, ref: Ref) -> Ref:
    """Returns the tensor whose numbers another one has, in another shape or dtype."""
    node = interpreter.graph.nodes[ref.node]
    refs = interpreter.graph.inputs(node.name)
    if node.op in KEEPING_ORDER or (node.op == "StridedSlice" and node.attr["new_axis_mask"].i):
        return _origin(interpreter, refs[0])
    zeros = [interpreter.is_zero(own) for own in refs] if node.op == "Maximum" else []
    return _origin(interpreter, refs[zeros.index(True) - 1]) if any(zeros) else ref
