"""Which TensorFlow operators can be split, and along which axes; see `split_signatures` for the notation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from graph_passes.analysis import split_signatures as by_shapes
from graph_passes.analysis.operator_traits import NUMERIC
from graph_passes.analysis.split_signatures import BATCH, CHANNEL, WHOLE, Known, Operator, Signature
from graph_passes.ir.graph import NodeDef
from graph_passes.ir.tensorflow_bridge import Shape

Derivation: TypeAlias = Callable[[Operator], tuple[Signature, ...]]


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

OPERATORS: dict[str, Derivation] = {
    **dict.fromkeys(_ROWS, _by_row),
    **dict.fromkeys((op for op in _ROWS if op.startswith("Conv")), _convolution),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), _batch_norm),
    **dict.fromkeys(("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"), _batch_norm_gradient),
    "MatMul": by_shapes.matmul_signatures,
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), by_shapes.batch_matmul_signatures),
    "Einsum": by_shapes.einsum_signatures,
    **dict.fromkeys(NUMERIC, by_shapes.elementwise_signatures),
    **dict.fromkeys(("Softmax", "LogSoftmax"), by_shapes.softmax_signatures),
    "Select": by_shapes.select_signatures,
    "BroadcastTo": by_shapes.broadcast_to_signatures,
    "Fill": by_shapes.fill_signatures,
    "IdentityN": by_shapes.identities_signatures,
    **dict.fromkeys(
        ("Pad", "PadV2", "MirrorPad", "MirrorPadGrad", "Tile", "Bitcast"), by_shapes.same_lengths_signatures
    ),
    "Slice": by_shapes.slice_signatures,
    **dict.fromkeys(("StridedSlice", "StridedSliceGrad"), by_shapes.strided_slice_signatures),
    "ConcatV2": by_shapes.concat_signatures,
    **dict.fromkeys(("Split", "SplitV"), by_shapes.split_signatures),
    **dict.fromkeys(("Pack", "Unpack"), by_shapes.pack_signatures),
    "Reshape": by_shapes.reshape_signatures,
    **dict.fromkeys(("ExpandDims", "Squeeze"), by_shapes.units_signatures),
    **dict.fromkeys(("Transpose", "ConjugateTranspose"), by_shapes.transpose_signatures),
    **dict.fromkeys(_REDUCTIONS.split(), by_shapes.reduction_signatures),
    **dict.fromkeys(("Gather", "GatherV2"), by_shapes.gather_signatures),
    "UnsortedSegmentSum": by_shapes.segment_sum_signatures,
    "OneHot": by_shapes.one_hot_signatures,
}
"""Operator type -> how its signature is derived. Stateful and random operators have none."""
