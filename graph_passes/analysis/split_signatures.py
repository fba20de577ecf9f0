"""Signatures of TensorFlow's operators: one letter for each axis of their inputs and outputs, as in an einsum.

    Conv2D    bhwi xyio -> bHWo      batch b, channel o

A term stands for a tensor: equal letters are axes that are cut together, ``_`` an axis that is never cut. ``.`` is an
input that is read whole, ``*`` a tensor of which every part has its own (or all have the same), ``[bhwi]`` an input
that holds the shape of the first output. ``...`` stands for as many axes as a tensor has.

Which letters an operator may be cut along is part of its row: a row's author vouches that a part computes a slice of
each output that has the letter, and a partial sum of each that hasn't.
"""

from __future__ import annotations

import math
import string
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_traits import NUMERIC
from graph_passes.ir.graph import NodeDef
from graph_passes.ir.tensorflow_bridge import Shape

ANY = "*"
WHOLE = ""
"""The term of an input that is read whole, and of an output that all parts add to."""

Known: TypeAlias = tuple[int, ...]
"""A shape without unknown lengths."""

BATCH = (("batch", "b"),)
CHANNEL = (("channel", "c"),)


class Signature(NamedTuple):
    """The axes of an operator's inputs and outputs.

    Attributes:
        inputs: a letter for each axis of each data input; `WHOLE`, or `ANY`.
        outputs: the same of each output.
        dimensions: names of dimensions and the letters that are cut for them.
        shape_inputs: data inputs that hold the first output's shape; their term has a letter for each element.
        divisor: see `SplitRule`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dimensions: tuple[tuple[str, str], ...]
    shape_inputs: frozenset[int] = frozenset()
    divisor: int = 0


class Operator(NamedTuple):
    """The operator that a signature is derived from.

    Attributes:
        node: the operator.
        inputs: shapes of its data inputs; None where one isn't fully known.
        outputs: the same of its outputs.
        constants: data input -> its value, where that is known.
    """

    node: NodeDef
    inputs: tuple[Known | None, ...]
    outputs: tuple[Known | None, ...]
    constants: Mapping[int, np.ndarray]

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a boolean attribute."""
        return bool(self.node.attr[name].b) if name in self.node.attr else default

    def number(self, name: str, default: int = 0) -> int:
        """Returns an integer attribute."""
        return int(self.node.attr[name].i) if name in self.node.attr else default

    def numbers(self, name: str) -> list[int]:
        """Returns an attribute that is a list of integers."""
        return list(self.node.attr[name].list.i) if name in self.node.attr else []

    def text(self, name: str, default: str = "") -> str:
        """Returns an attribute that is a string."""
        return self.node.attr[name].s.decode() if name in self.node.attr else default

    def integers(self, argument: int) -> list[int] | None:
        """Returns the value of a constant input, flattened."""
        value = self.constants.get(argument)
        return None if value is None else [int(number) for number in np.ravel(value)]


def _matmul(operator: Operator) -> tuple[Signature, ...]:
    """Splits along rows, columns, or the inner axis, over which the result is a sum."""
    a, b = operator.flag("transpose_a"), operator.flag("transpose_b")
    # x' dy, the gradient of weights, is a sum over the batch.
    names = ("inner", "batch") if not a else ("batch", "row")
    dimensions = ((names[1], "i"), ("channel", "k"), (names[0], "j"))
    return (Signature(("ji" if a else "ij", "kj" if b else "jk"), ("ik",), dimensions),)


def _batch_matmul(operator: Operator) -> tuple[Signature, ...]:
    """Splits along the batch, which may be broadcast, rows, columns, or the inner axis, over which the result is a sum.

    Sums of half precision are left whole: their parts may be larger than it holds.
    """
    x, y, out = operator.inputs[0], operator.inputs[1], operator.outputs[0]
    if x is None or y is None or out is None:
        return ()
    letters = _letters(len(out) - 2)
    left = _aligned(letters, out[:-2], x[:-2]) + ("JI" if operator.flag("adj_x") else "IJ")
    right = _aligned(letters, out[:-2], y[:-2]) + ("KJ" if operator.flag("adj_y") else "JK")
    attrs = operator.node.attr  # Reading an attribute that isn't there would add it.
    result = attrs["Tout" if "Tout" in attrs else "T"].type
    inner = () if result in _HALF else (("inner", "J"),)
    dimensions = (*_axes(letters + "_"), ("row", "I"), ("channel", "K"), *inner)
    return (Signature((left, right), (letters + "IK",), dimensions),)


def _einsum(operator: Operator) -> tuple[Signature, ...]:
    """``abc,cd->abd``: a label that isn't in the output is summed over."""
    equation = operator.text("equation").replace(" ", "")
    if "." in equation or equation.count("->") != 1:
        return ()
    left, output = equation.split("->")
    inputs = tuple(left.split(","))
    if any(len(set(term)) < len(term) for term in (*inputs, output)):
        return ()
    contracted = sorted(set("".join(inputs)) - set(output))
    sums = tuple((f"sum_{label}", label) for label in contracted)
    return (Signature(inputs, (output,), _axes(output) + sums),)


def _letters(rank: int) -> str:
    return string.ascii_lowercase[:rank]


def _axes(letters: str) -> tuple[tuple[str, str], ...]:
    """Returns the names of a tensor's axes: batch is the first, channel the last, whatever they hold."""
    last = len(letters) - 1
    names = ("batch" if axis == 0 else "channel" if axis == last else f"axis{axis}" for axis in range(len(letters)))
    return tuple((name, letter) for name, letter in zip(names, letters, strict=True) if letter != "_")


def _aligned(letters: str, output: Known, shape: Known) -> str:
    """Returns the term of an input broadcast to the output: its axes are the output's last ones, or have length 1."""
    start = len(output) - len(shape)
    return "".join(
        letter if size == wanted else "_"
        for letter, wanted, size in zip(letters[start:], output[start:], shape, strict=True)
    )


def _elementwise(operator: Operator) -> tuple[Signature, ...]:
    """Splits along any axis of the output; inputs that are broadcast along it are read whole."""
    output = operator.outputs[0]
    if output is None or not output or any(shape is None or len(shape) > len(output) for shape in operator.inputs):
        return ()
    letters = _letters(len(output))
    terms = tuple(_aligned(letters, output, shape) for shape in operator.inputs if shape is not None)
    return (Signature(terms, (letters,), _axes(letters)),)


def _softmax(operator: Operator) -> tuple[Signature, ...]:
    """Splits along any axis but the last, over which the softmax is."""
    output = operator.outputs[0]
    if not output:
        return ()
    letters = _letters(len(output) - 1) + "_"
    return (Signature((letters,), (letters,), _axes(letters)),)


def _select(operator: Operator) -> tuple[Signature, ...]:
    """Splits Select; the old op's condition, if it isn't a scalar and has another shape, chooses among rows."""
    condition, output = operator.inputs[0], operator.outputs[0]
    return _elementwise(operator) if condition in ((), output) else ()


def _filled(operator: Operator) -> tuple[Signature, ...]:
    """Splits BroadcastTo and Fill along any axis of the output."""
    value = int(operator.node.op == "Fill")
    source, output = operator.inputs[value], operator.outputs[0]
    if source is None or output is None:
        return ()
    letters = _letters(len(output))
    terms = _aligned(letters, output, source), letters
    return (Signature(terms[::-1] if value else terms, (letters,), _axes(letters), frozenset({1 - value})),)


def _identities(operator: Operator) -> tuple[Signature, ...]:
    """Tensors that pass through; those are cut whose first, or last, axis is as long as that of the first tensor."""
    first = operator.inputs[0]
    if not first:
        return ()
    signatures = []
    for axis, dimension in ((0, BATCH), (-1, CHANNEL)):
        letter = dimension[0][1]
        terms = []
        for shape in operator.inputs:
            rest = "_" * (len(shape or ()) - 1)
            term = letter + rest if axis == 0 else rest + letter
            terms.append(term if shape and shape[axis] == first[axis] else WHOLE)
        signatures.append(Signature(tuple(terms), tuple(term or ANY for term in terms), dimension))
    return tuple(signatures)


def _same_lengths(operator: Operator) -> tuple[Signature, ...]:
    """Splits padding and the like along axes whose length doesn't change; other inputs are read whole."""
    source, output = operator.inputs[0], operator.outputs[0]
    if source is None or output is None or len(source) != len(output):
        return ()
    letters = _aligned(_letters(len(output)), output, source)
    rest = (WHOLE,) * (len(operator.inputs) - 1)
    return (Signature((letters, *rest), (letters,), _axes(letters)),)


def _slice(operator: Operator) -> tuple[Signature, ...]:
    """Splits along axes whose length doesn't change: they are taken whole; the slice's size is the output's shape."""
    return tuple(
        signature._replace(inputs=(signature.inputs[0], WHOLE, signature.outputs[0]), shape_inputs=frozenset({2}))
        for signature in _same_lengths(operator)
    )


def _strided_slice(operator: Operator) -> tuple[Signature, ...]:
    """Splits along axes that both masks and stride 1 leave whole. For the gradient, input and output change places."""
    backward = operator.node.op == "StridedSliceGrad"
    source = operator.outputs[0] if backward else operator.inputs[0]
    strides = operator.integers(3)
    if source is None or strides is None or operator.number("ellipsis_mask") or operator.number("new_axis_mask"):
        return ()
    whole = operator.number("begin_mask") & operator.number("end_mask")
    gone = operator.number("shrink_axis_mask")
    letters = "".join(
        letter if axis >= len(strides) or (whole >> axis & 1 and strides[axis] == 1) else "_"
        for axis, letter in enumerate(_letters(len(source)))
    )
    sliced = "".join(letter for axis, letter in enumerate(letters) if not gone >> axis & 1)
    # A removed axis is never whole: it is one element.
    letters = "".join("_" if gone >> axis & 1 else letter for axis, letter in enumerate(letters))
    rest = (WHOLE,) * 3
    if backward:
        return (Signature((letters, *rest, sliced), (letters,), _axes(letters), frozenset({0})),)
    return (Signature((letters, *rest), (sliced,), _axes(letters)),)


def _concat(operator: Operator) -> tuple[Signature, ...]:
    """Splits along another axis than that of the concatenation."""
    first, output = operator.inputs[0], operator.outputs[0]
    if first is None or output is None or len(operator.inputs) < 3:
        return ()
    letters = _aligned(_letters(len(output)), output, first)
    return (Signature((letters,) * (len(operator.inputs) - 1) + (WHOLE,), (letters,), _axes(letters)),)


def _split(operator: Operator) -> tuple[Signature, ...]:
    """Splits Split and SplitV along another axis than theirs."""
    value = 1 if operator.node.op == "Split" else 0
    source, output = operator.inputs[value], operator.outputs[0]
    if source is None or output is None or len(operator.outputs) < 2:
        return ()
    letters = _aligned(_letters(len(source)), source, output)
    inputs = (letters, WHOLE, WHOLE) if value == 0 else (WHOLE, letters)
    return (Signature(inputs, (letters,) * len(operator.outputs), _axes(letters)),)


def _pack(operator: Operator) -> tuple[Signature, ...]:
    """Splits Pack and Unpack: one of the two sides has one more axis."""
    unpack = operator.node.op == "Unpack"
    short = operator.outputs[0] if unpack else operator.inputs[0]
    if short is None:
        return ()
    letters = _letters(len(short))
    axis = operator.number("axis") % (len(short) + 1)
    long = letters[:axis] + "_" + letters[axis:]
    count = len(operator.outputs if unpack else operator.inputs)
    if unpack:
        return (Signature((long,), (letters,) * count, _axes(letters)),)
    return (Signature((letters,) * count, (long,), _axes(letters)),)


def _reshape(operator: Operator) -> tuple[Signature, ...]:
    """Elements keep their order: a run of axes that becomes another is cut along the first of each, in common units.

    [6, 4] becomes [4, 6]: two units of 12 elements, 3 rows before and 2 rows after it. [3, 8] becomes [3, 4, 2], heads
    of width 2: rows by rows, and features by heads.
    """
    source, output = operator.inputs[0], operator.outputs[0]
    if not source or not output or 0 in source:
        return ()
    before, after = ["_"] * len(source), ["_"] * len(output)
    for letter, (first, place) in zip(string.ascii_lowercase, _equal_runs(source, output), strict=False):
        before[first] = after[place] = letter
    source_term, output_term = "".join(before), "".join(after)
    # A vector's axis keeps its name: of [1, 1, 1, 8] to [8], sums over a batch, say, it is the channel.
    dimensions = _axes(output_term if len(output) > 1 else source_term)
    return (Signature((source_term, output_term), (output_term,), dimensions, frozenset({1})),)


def _equal_runs(source: Known, output: Known) -> Iterator[tuple[int, int]]:
    """Yields the first axes of the shortest runs of axes that hold as many elements in both shapes, without ones."""
    left = deque((axis, size) for axis, size in enumerate(source) if size != 1)
    right = deque((axis, size) for axis, size in enumerate(output) if size != 1)
    while left and right:
        (first, have), (place, want) = left.popleft(), right.popleft()
        yield first, place
        while have != want:
            if have < want:
                have *= left.popleft()[1]
            else:
                want *= right.popleft()[1]


def _units(operator: Operator) -> tuple[Signature, ...]:
    """Splits ExpandDims and Squeeze along the first axis and the last one, if they stay."""
    source, output = operator.inputs[0], operator.outputs[0]
    # Without a list, Squeeze would remove the batch of a part that has one sample.
    if not source or not output or (operator.node.op == "Squeeze" and not operator.numbers("squeeze_dims")):
        return ()
    rest = (WHOLE,) * (len(operator.inputs) - 1)
    signatures = []
    if source[0] == output[0]:
        signatures.append(Signature(("b" + "_" * (len(source) - 1), *rest), ("b" + "_" * (len(output) - 1),), BATCH))
    if source[-1] == output[-1]:
        signatures.append(Signature(("_" * (len(source) - 1) + "c", *rest), ("_" * (len(output) - 1) + "c",), CHANNEL))
    return tuple(signatures)


def _transpose(operator: Operator) -> tuple[Signature, ...]:
    """Splits by the permutation, or, if it is unknown, along axes of unique length."""
    source, output = operator.inputs[0], operator.outputs[0]
    if source is None or output is None:
        return ()
    letters, permutation = _letters(len(source)), operator.integers(1)
    if permutation is None:
        places = [source.index(size) if source.count(size) == 1 else None for size in output]
        after = "".join("_" if place is None else letters[place] for place in places)
        letters = "".join(letter if letter in after else "_" for letter in letters)
    else:
        after = "".join(letters[place] for place in permutation)
    return (Signature((letters, WHOLE), (after,), _axes(after)),)


def _kept_axes(operator: Operator) -> tuple[str, str] | None:
    """Returns the terms of a reduction's input and result; axes that may or may not stay are ``_``."""
    source, output, axes = operator.inputs[0], operator.outputs[0], operator.integers(1)
    if source is None or output is None:
        return None
    letters = _letters(len(source))
    if operator.flag("keep_dims"):
        return letters, "".join(a if size == new else "_" for a, size, new in zip(letters, source, output, strict=True))
    if axes is not None:
        gone = {axis % len(source) for axis in axes} if source else set()
        return letters, "".join(letter for axis, letter in enumerate(letters) if axis not in gone)
    first, last = _embedding(source, output), _embedding(source[::-1], output[::-1])
    if first is None or last is None:
        return None
    ends = [(low, len(source) - 1 - high) for low, high in zip(first, last[::-1], strict=True)]
    after = "".join(letters[low] if low == high else "_" for low, high in ends)
    possible = {axis for low, high in ends if low < high for axis in range(low, high + 1)}
    certain = {low for low, high in ends if low == high}
    return "".join("_" if axis in possible - certain else a for axis, a in enumerate(letters)), after


def _embedding(source: Known, output: Known) -> list[int] | None:
    """Returns the first place in ``source`` for each length of ``output``, in order."""
    places, axis = [], 0
    for size in output:
        while axis < len(source) and source[axis] != size:
            axis += 1
        if axis == len(source):
            return None
        places.append(axis)
        axis += 1
    return places


def _reduction(operator: Operator) -> tuple[Signature, ...]:
    """Splits along kept axes; sums and means also along reduced ones."""
    terms = _kept_axes(operator)
    if terms is None:
        return ()
    before, after = terms
    kept = tuple((name, letter) for name, letter in _axes(before) if letter in after)
    gone = tuple((name, letter) for name, letter in _axes(before) if letter not in after)
    op = operator.node.op
    if op == "Sum":
        return (Signature((before, WHOLE), (after,), kept + gone),)
    signature = Signature((before, WHOLE), (after,), kept)
    source, output = operator.inputs[0], operator.outputs[0]
    if op == "Mean" and gone and source and output is not None and operator.node.attr["T"].type in _SUMMED:
        averaged = math.prod(source) // max(1, math.prod(output))
        return signature, signature._replace(dimensions=gone, divisor=averaged)
    return (signature,)


_SUMMED = frozenset({types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE})
_HALF = frozenset({types_pb2.DT_HALF, types_pb2.DT_BFLOAT16})
"""Dtypes in which a sum can't overflow, or lose digits, where the mean would not."""


def _segment_sum(operator: Operator) -> tuple[Signature, ...]:
    """Sums of rows by their numbers: a sum over the rows, or along the axes of a row."""
    rows, numbers = operator.inputs[0], operator.inputs[1]
    if rows is None or numbers is None or len(rows) < len(numbers):
        return ()
    letters = _letters(len(rows))
    own = letters[len(numbers) :]
    dimensions = (
        _axes(letters) if own else tuple((f"axis{axis}" if axis else "batch", a) for axis, a in enumerate(letters))
    )
    return (Signature((letters, letters[: len(numbers)], WHOLE), ("_" + own,), dimensions),)


def _gather(operator: Operator) -> tuple[Signature, ...]:
    """Rows of a table: along the indices, or along the axes of a row."""
    table, indices = operator.inputs[0], operator.inputs[1]
    axis = operator.integers(2) if operator.node.op == "GatherV2" else [0]
    if table is None or indices is None or axis != [0] or operator.number("batch_dims"):
        return ()
    letters = _letters(len(indices) + len(table) - 1)
    rows = "_" + letters[len(indices) :]
    rest = (WHOLE,) * (len(operator.inputs) - 2)
    return (Signature((rows, letters[: len(indices)], *rest), (letters,), _axes(letters)),)


def _one_hot(operator: Operator) -> tuple[Signature, ...]:
    """Splits along any axis of the indices."""
    indices = operator.inputs[0]
    if indices is None or operator.number("axis", -1) != -1:
        return ()
    letters = _letters(len(indices))
    return (Signature((letters, WHOLE, WHOLE, WHOLE), (letters + "_",), _axes(letters + "_")),)


# ---- operators with a signature of their own: one row each

_BOTH = BATCH + CHANNEL
_CONVOLUTION = (("batch", "b"), ("channel", "o"))
_CONVOLUTION_INPUT = (("batch", "b"), ("channel", "i"))
_CONVOLUTION_FILTER = (("channel", "o"), ("input_channel", "i"), ("batch", "b"))

_ROWS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    # The filter's gradient is a sum over the batch.
    "Conv2D": ("bhwi xyio -> bHWo", _CONVOLUTION),
    "Conv2DBackpropInput": ("[bhwi] xyio bHWo -> bhwi", _CONVOLUTION_INPUT),
    "Conv2DBackpropFilter": ("bhwi [xyio] bHWo -> xyio", _CONVOLUTION_FILTER),
    "Conv3D": ("bdhwi xyzio -> bDHWo", _CONVOLUTION),
    "Conv3DBackpropInputV2": ("[bdhwi] xyzio bDHWo -> bdhwi", _CONVOLUTION_INPUT),
    "Conv3DBackpropFilterV2": ("bdhwi [xyzio] bDHWo -> xyzio", _CONVOLUTION_FILTER),
    # m outputs of each channel lie next to each other.
    "DepthwiseConv2dNative": ("bhwc xycm -> bHWc", _BOTH),
    "DepthwiseConv2dNativeBackpropInput": ("[bhwc] xycm bHWc -> bhwc", _BOTH),
    "DepthwiseConv2dNativeBackpropFilter": ("bhwc [xycm] bHWc -> xycm", CHANNEL + BATCH),
    "MaxPool": ("bhwc -> bHWc", _BOTH),
    "AvgPool": ("bhwc -> bHWc", _BOTH),
    "MaxPoolGrad": ("bhwc bHWc bHWc -> bhwc", _BOTH),
    "AvgPoolGrad": ("[bhwc] bHWc -> bhwc", _BOTH),
    "MaxPool3D": ("bdhwc -> bDHWc", _BOTH),
    "AvgPool3D": ("bdhwc -> bDHWc", _BOTH),
    "MaxPool3DGrad": ("bdhwc bDHWc bDHWc -> bdhwc", _BOTH),
    "AvgPool3DGrad": ("[bdhwc] bDHWc -> bdhwc", _BOTH),
    "BiasAdd": ("b...c c -> b...c", _BOTH),
    "BiasAddGrad": ("b...c -> c", _BOTH),
    "ResizeNearestNeighbor": ("bhwc . -> bHWc", _BOTH),
    "ResizeNearestNeighborGrad": ("bHWc . -> bhwc", _BOTH),
    "ResizeBilinear": ("bhwc . -> bHWc", _BOTH),
    "ResizeBilinearGrad": ("bHWc bhwc -> bhwc", _BOTH),
    "SparseSoftmaxCrossEntropyWithLogits": ("b_ b -> b b_", BATCH),
    "SoftmaxCrossEntropyWithLogits": ("b_ b_ -> b b_", BATCH),
    "TopKV2": ("b..._ . -> b..._ b..._", BATCH),
    "InTopKV2": ("b_ b . -> b", BATCH),
    "L2Loss": ("b... -> .", BATCH),
}

# Statistics of a training batch are those of the whole batch, so that only channels are independent. Behind the five
# outputs is a space that cuDNN may use: the parts of the gradient get it from the parts of the forward operator.
_BATCH_NORM = "bhwc c c c c -> bhwc c c c c *"
_BATCH_NORM_GRADIENT = "bhwc bhwc c c c * -> bhwc c c * *"
_BATCH_NORM_INFERENCE = "bhwc . . . . -> bhwc * * * * *"


def _row(text: str, dimensions: tuple[tuple[str, str], ...], operator: Operator) -> tuple[Signature, ...]:
    """Returns a row's signature, with the axes of images as ``data_format`` has them."""
    ranks = [shape for shape in operator.inputs if shape is not None]
    rank = len(ranks[0]) if ranks else 0
    first = operator.text("data_format", "NHWC").startswith("NC")
    shape_inputs: set[int] = set()
    sides = []
    for side in text.split(" -> "):
        terms: list[str] = []
        for term in side.split():
            if term.startswith("["):
                shape_inputs.add(len(terms))
                term = term[1:-1]
            if "..." in term:
                term = term.replace("...", "_" * max(0, rank - len(term) + 3))
            if first and term[0] == "b" and term[-1] in "cio" and len(term) > 2:
                term = term[0] + term[-1] + term[1:-1]
            terms.append(WHOLE if term == "." else term)
        sides.append(tuple(terms))
    return (Signature(sides[0], sides[1], dimensions, frozenset(shape_inputs)),)


def _by_row(operator: Operator) -> tuple[Signature, ...]:
    text, dimensions = _ROWS[operator.node.op]
    window = operator.numbers("ksize")
    if window:
        channel = 1 if operator.text("data_format", "NHWC").startswith("NC") else len(window) - 1
        dimensions = BATCH + (CHANNEL if window[channel] == 1 else ()) if window[0] == 1 else ()
    return _row(text, dimensions, operator)


def _convolution(operator: Operator) -> tuple[Signature, ...]:
    """Of a convolution in groups only the batch is free: each group reads some channels only."""
    text, dimensions = _ROWS[operator.node.op]
    rank = 5 if operator.node.op.startswith("Conv3D") else 4
    image, kernel = operator.inputs[0], operator.inputs[1]
    if "BackpropInput" in operator.node.op:
        image = operator.outputs[0]
    elif "BackpropFilter" in operator.node.op:
        kernel = operator.outputs[0]
    if image is None or kernel is None or len(image) != rank or len(kernel) != rank:
        return ()
    channel = 1 if operator.text("data_format", "NHWC").startswith("NC") else rank - 1
    if image[channel] != kernel[rank - 2]:
        dimensions = BATCH
    return _row(text, dimensions, operator)


def _batch_norm(operator: Operator) -> tuple[Signature, ...]:
    text = _BATCH_NORM if len(operator.outputs) == 6 else _BATCH_NORM.removesuffix(" *")
    signature = _row(text, CHANNEL, operator)[0]
    # In training there may be no moving averages to update.
    given = zip(signature.inputs, operator.inputs, strict=True)
    signature = signature._replace(inputs=tuple(WHOLE if shape == (0,) else term for term, shape in given))
    if operator.flag("is_training", True):
        return (signature,)
    inference = " ".join(_BATCH_NORM_INFERENCE.split()[: 6 + len(operator.outputs)])
    return (*_row(inference, BATCH, operator), signature)


def _batch_norm_gradient(operator: Operator) -> tuple[Signature, ...]:
    text = _BATCH_NORM_GRADIENT if len(operator.inputs) == 6 else _BATCH_NORM_GRADIENT.replace(" * ->", " ->")
    return _row(text, CHANNEL, operator)


_REDUCTIONS = "Sum Mean Max Min Prod All Any ArgMax ArgMin"

OPERATORS: dict[str, Callable[[Operator], tuple[Signature, ...]]] = {
    **dict.fromkeys(_ROWS, _by_row),
    **dict.fromkeys((op for op in _ROWS if op.startswith("Conv")), _convolution),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), _batch_norm),
    **dict.fromkeys(("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"), _batch_norm_gradient),
    "MatMul": _matmul,
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _batch_matmul),
    "Einsum": _einsum,
    **dict.fromkeys(NUMERIC, _elementwise),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    "Select": _select,
    **dict.fromkeys(("BroadcastTo", "Fill"), _filled),
    "IdentityN": _identities,
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad", "MirrorPadGrad", "Tile", "Bitcast"), _same_lengths),
    "Slice": _slice,
    **dict.fromkeys(("StridedSlice", "StridedSliceGrad"), _strided_slice),
    "ConcatV2": _concat,
    **dict.fromkeys(("Split", "SplitV"), _split),
    **dict.fromkeys(("Pack", "Unpack"), _pack),
    "Reshape": _reshape,
    **dict.fromkeys(("ExpandDims", "Squeeze"), _units),
    **dict.fromkeys(("Transpose", "ConjugateTranspose"), _transpose),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(("Gather", "GatherV2"), _gather),
    "UnsortedSegmentSum": _segment_sum,
    "OneHot": _one_hot,
}
"""Operator type -> how its signature is derived. Stateful and random operators have none."""


def signatures_of(
    node: NodeDef,
    input_shapes: Sequence[Shape | None],
    output_shapes: Sequence[Shape | None],
    constants: Mapping[int, np.ndarray],
) -> tuple[Signature, ...]:
    """Returns the signatures of an operator (some have one for each of their dimensions); none for unknown ones."""
    derive = OPERATORS.get(node.op)
    if derive is None:
        return ()
    return derive(Operator(node, tuple(map(_known, input_shapes)), tuple(map(_known, output_shapes)), constants))


def _known(shape: Shape | None) -> Known | None:
    # Most shapes are known; there is no faster way to tell mypy.
    return None if shape is None or None in shape else shape  # type: ignore[return-value]
