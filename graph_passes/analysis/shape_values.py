"""Numbers that follow from shapes: computed in numpy for two sizes of a slice, to see how they grow with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes.analysis.operator_traits import ASKING
from graph_passes.ir.graph import FLOAT_DTYPES, Graph, NodeDef, Ref
from graph_passes.ir.tensorflow_bridge import Shape, constant_value

_LARGEST = 1 << 16
"""The most elements of a tensor whose value is computed: shapes, axes and counts are small."""
_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": np.array,
    "StopGradient": np.array,
    "Neg": np.negative,
    "Sqrt": np.sqrt,
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "Square": np.square,
    "Reciprocal": lambda x: 1 / x,
    "Log": np.log,
    "Exp": np.exp,
    "Abs": np.abs,
}
_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "RealDiv": np.divide,
    "Div": np.divide,
    "DivNoNan": np.divide,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Pow": np.power,
}
_REDUCED: dict[str, Any] = {"Prod": np.prod, "Sum": np.sum, "Max": np.max, "Min": np.min}


class ShapeValues:
    """The values of small tensors that follow from shapes and constants; not a number where a length is unknown.

    Attributes:
        values: those found so far.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: Mapping[Ref, Shape | None],
        scalars: Mapping[Ref, float],
        constants: dict[str, np.ndarray | None],
    ) -> None:
        """Knows nothing of the graph's nodes yet.

        Args:
            graph: a flat graph.
            shapes: of its tensors.
            scalars: values of some placeholders.
            constants: the values of the graph's constants that were looked at; others with this graph share it.
        """
        self._graph, self._shapes, self._constants = graph, shapes, constants
        self.values = {ref: np.array(value, np.float64) for ref, value in scalars.items()}

    def add(self, node: NodeDef, axis: int | None, length: int, others: int | None = None) -> None:
        """Computes a node's value, if it has one; those before it have been added.

        Args:
            node: the node.
            axis: the axis of its first input with the samples; None where there is none.
            length: its assumed length if unknown.
            others: the assumed length of other unknown axes.
        """
        own, refs = Ref(node.name), self._graph.inputs(node.name)
        if own in self.values:
            return
        inputs = [self.values.get(ref) for ref in refs]
        result = None
        with np.errstate(all="ignore"):
            if node.op in ASKING:
                shape = self._shapes.get(refs[0])
                if shape is not None and axis is not None:
                    lengths = [length if own == axis else others for own in range(len(shape))]
                    shape = tuple(a if b is None else b for a, b in zip(lengths, shape, strict=True))
                result = _asked(node.op, shape)
            elif node.op == "Const":
                if node.name not in self._constants:
                    self._constants[node.name] = _constant(node)
                result = self._constants[node.name]
            elif inputs and all(value is not None for value in inputs):
                with contextlib.suppress(IndexError, ValueError):  # A place or a shape that assumed lengths don't have.
                    result = _computed(node, [value for value in inputs if value is not None])
        if result is not None and result.size <= _LARGEST:
            self.values[own] = result


def _asked(op: str, shape: Shape | None) -> np.ndarray | None:
    if shape is None:
        return None
    sizes = np.array([math.nan if size is None else size for size in shape], np.float64)
    return {"Shape": sizes, "Size": np.asarray(np.prod(sizes)), "Rank": np.array(len(shape), np.float64)}[op]


def _constant(node: NodeDef) -> np.ndarray | None:
    dims = node.attr["value"].tensor.tensor_shape.dim
    if math.prod(dim.size for dim in dims) > _LARGEST:
        return None
    value = constant_value(node)
    return value.astype(np.float64) if value.dtype.kind in "iuf" else None


def _computed(node: NodeDef, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    op, first = str(node.op), inputs[0]
    if op == "Cast":
        return np.array(first) if node.attr["DstT"].type in FLOAT_DTYPES else np.trunc(first)
    if op in _UNARY:
        return _UNARY[op](first)
    if op in _BINARY:
        return _BINARY[op](first, inputs[1])
    integers: Any = [None if np.isnan(value).any() else value.astype(np.int64) for value in inputs]
    match op:
        case "StridedSlice" if all(value is not None for value in integers[1:]):
            return strided(node, first, *integers[1:])
        case "Pack" if len({value.shape for value in inputs}) == 1:
            return np.stack(inputs, node.attr["axis"].i)
        case "ConcatV2" if integers[-1] is not None:
            return np.concatenate(inputs[:-1], int(integers[-1]))
        case "GatherV2" if all(value is not None for value in integers[1:]):
            return np.take(first, integers[1], int(integers[2]))
        case "Prod" | "Sum" | "Max" | "Min" if integers[1] is not None:
            axes = tuple(map(int, integers[1].ravel()))
            return np.asarray(_REDUCED[op](first, axis=axes, keepdims=node.attr["keep_dims"].b))
        case "ExpandDims" if integers[1] is not None:
            return np.expand_dims(first, int(integers[1].ravel()[0]))
        case "Squeeze":
            axes = tuple(node.attr["squeeze_dims"].list.i)
            return np.squeeze(first, axes or None)
        case "Reshape" if integers[1] is not None:
            return first.reshape(integers[1])
        case "Range" if all(value is not None for value in integers) and abs(integers[1]) <= _LARGEST and integers[2]:
            return np.arange(*map(int, integers)).astype(np.float64)
    return None


def strided(node: NodeDef, value: np.ndarray, begin: np.ndarray, end: np.ndarray, stride: np.ndarray) -> np.ndarray:
    """Returns a `StridedSlice`, by its masks."""
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    index: list[Any] = []
    for place, bounds in enumerate(zip(*(map(int, given) for given in (begin, end, stride)), strict=True)):
        starts, stops, rest, new, one = (bool(node.attr[f"{name}_mask"].i >> place & 1) for name in names)
        part = slice(None if starts else bounds[0], None if stops else bounds[1], bounds[2])
        index.append(Ellipsis if rest else None if new else bounds[0] if one else part)
    return np.asarray(value[tuple(index)])
