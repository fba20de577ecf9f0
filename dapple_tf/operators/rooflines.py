"""An operator's work, from its shapes, and rooflines: estimates of unmeasured work on a kind of device.

seconds = launch + max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))

Multiplications and additions count one each, as vendors count them. Bytes are those of a kernel that reads each input
and writes each output once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dapple_tf.operators.signatures import OpSignature, TensorType

FREE = "free"
"""No kernel: passes on a buffer, or returns something about it that the host knows."""
MEMORY = "memory"
"""Bound by memory: elementwise operators, reductions, copies."""
POOL = "pool"
MATMUL = "matmul"
CONV = "conv"
"""A convolution as a matrix product."""
CONV_FILTER = "conv_filter"
"""A convolution's gradient with respect to the filter, likewise."""
WINOGRAD = "winograd"
"""A convolution with Winograd's algorithm (Lavin and Gray, CVPR 2016): F(2x2, 3x3) needs 16 multiplications instead of
36 for four results. The flops are those of the convolution itself."""
WINOGRAD_FILTER = "winograd_filter"
DEPTHWISE = "depthwise"
DEPTHWISE_FILTER = "depthwise_filter"

_DIRECT = (MATMUL, CONV, CONV_FILTER, DEPTHWISE, DEPTHWISE_FILTER)
KINDS = (FREE, MEMORY, POOL, *_DIRECT, WINOGRAD, WINOGRAD_FILTER)

_FEWEST_CHANNELS = 16
"""With fewer channels, Winograd's transforms cost more than they save."""

_MOST_IN_A_SHAPE = 16
"""Integers; more are data."""


class Work(NamedTuple):
    """The work of one run of an operator, whatever the device.

    Attributes:
        kind: one of `KINDS`.
        flops: floating-point operations.
        bytes: read and written.
        depth: length of the inner products of a matrix product or convolution, else 0. Kernels are slow on short ones.
        dtype: in which it computes.
    """

    kind: str
    flops: float
    bytes: float
    depth: float = 0.0
    dtype: str = "float32"


def work(signature: OpSignature) -> Work:
    """Returns the work of a single operator. Unknown ops count as elementwise.

    Loops, branches and calls aren't single operators: see `build_op_graph.OperatorSeconds`.
    """
    if all(map(_on_host, signature.inputs)) and all(map(_on_host, signature.outputs)):
        return _free(signature)
    return _RULES.get(signature.op, _elementwise)(signature)


def _on_host(tensor: TensorType) -> bool:
    """Returns whether a tensor is a shape, an axis or the like, which the host handles while the device is busy."""
    return tensor.dtype in ("int32", "int64", "bool") and tensor.elements <= _MOST_IN_A_SHAPE


def _read(signature: OpSignature) -> int:
    return sum(tensor.bytes for tensor in signature.inputs)


def _written(signature: OpSignature) -> int:
    return sum(tensor.bytes for tensor in signature.outputs)


def _dtype(signature: OpSignature) -> str:
    tensors = (*signature.outputs, *signature.inputs)
    return next((tensor.dtype for tensor in tensors if "float" in tensor.dtype), "float32")


def _product(signature: OpSignature, kind: str, flops: float, depth: float = 0.0) -> Work:
    return Work(kind, flops, _read(signature) + _written(signature), depth, _dtype(signature))


def _sizes(tensor: TensorType) -> tuple[int, ...]:
    return tuple(1 if size is None else size for size in tensor.shape or ())


# ---- no work, and copies


def _free(signature: OpSignature) -> Work:
    return Work(FREE, 0.0, 0.0)


def _elementwise(signature: OpSignature) -> Work:
    """Reads all and writes all; a few operations per element are hidden behind these."""
    tensors = (*signature.inputs, *signature.outputs)
    return _product(signature, MEMORY, max((tensor.elements for tensor in tensors), default=0))


def _copied(factor: int) -> Callable[[OpSignature], Work]:
    """Returns the rule of an op that copies a part of its input: it reads as much as it writes."""

    def rule(signature: OpSignature) -> Work:
        return Work(MEMORY, 0.0, factor * _written(signature), 0.0, _dtype(signature))

    return rule


def _gather(signature: OpSignature) -> Work:
    """Reads the rows that it writes, and their numbers."""
    indices = signature.inputs[1].bytes if len(signature.inputs) > 1 else 0
    return Work(MEMORY, 0.0, 2 * _written(signature) + indices, 0.0, _dtype(signature))


def _scatter(signature: OpSignature) -> Work:
    """Reads rows (the last input) and their numbers, and reads and writes as many rows of a variable or tensor."""
    *_, indices, updates = signature.inputs if len(signature.inputs) > 1 else (*signature.inputs, *signature.inputs)
    copied = 2 * _written(signature)  # Of a tensor rather than a variable.
    return Work(MEMORY, updates.elements, 3 * updates.bytes + indices.bytes + copied, 0.0, _dtype(signature))


def _apply(passes: float) -> Callable[[OpSignature], Work]:
    """Returns the rule of an update of a variable and its slots: moves ``passes`` times the gradient's bytes."""

    def rule(signature: OpSignature) -> Work:
        largest = max(signature.inputs, key=lambda tensor: tensor.bytes, default=TensorType("float32", ()))
        return Work(MEMORY, passes * largest.elements, passes * largest.bytes, 0.0, largest.dtype)

    return rule


# ---- matrix products


def _matmul(signature: OpSignature) -> Work:
    first, out = _sizes(signature.inputs[0]), signature.outputs[0].elements
    flipped = "true" in (signature.attr("transpose_a"), signature.attr("adj_x"))
    depth = first[-2 if flipped else -1] if len(first) > 1 else 1
    return _product(signature, MATMUL, 2.0 * out * depth, depth)


def _einsum(signature: OpSignature) -> Work:
    """Counts 2 operations for each combination of all indices: a product and its sum."""
    left, _, right = signature.attr("equation").replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    shared = math.prod(_sizes(signature.outputs[0])[: _ellipsis(right, signature.outputs[0])])
    for labels, tensor in zip(left.split(","), signature.inputs, strict=False):
        dims = _sizes(tensor)
        before, _, after = labels.partition("...")
        sizes |= dict(zip(before, dims, strict=False))
        sizes |= dict(zip(reversed(after), reversed(dims), strict=False))
    combinations = math.prod(sizes.values()) * shared
    depth = math.prod(size for label, size in sizes.items() if label not in right)
    if len(signature.inputs) < 2:
        return _elementwise(signature)
    return _product(signature, MATMUL, 2.0 * combinations, depth)


def _ellipsis(labels: str, tensor: TensorType) -> int:
    """Returns the number of leading dimensions of ``...``, which comes first in Keras' and TensorFlow's texts."""
    return max(0, len(tensor.shape or ()) - len(labels.replace("...", ""))) if labels.startswith("...") else 0


# ---- convolutions and pooling


def _winograd(signature: OpSignature, filters: tuple[int, ...]) -> bool:
    plain = set(signature.numbers("strides")) <= {1} and set(signature.numbers("dilations")) <= {1}
    return plain and filters[:-2] == (3, 3) and min(filters[-2:]) >= _FEWEST_CHANNELS


def _forward(signature: OpSignature) -> Work:
    """(input, filter) -> output."""
    filters, out = _sizes(signature.inputs[1]), signature.outputs[0]
    return _convolution(signature, filters, out, (WINOGRAD, CONV))


def _backward_input(signature: OpSignature) -> Work:
    """(shape of the input, filter, gradient of the output) -> gradient of the input."""
    filters, out = _sizes(signature.inputs[1]), signature.inputs[2]
    return _convolution(signature, filters, out, (WINOGRAD, CONV))


def _backward_filter(signature: OpSignature) -> Work:
    """(input, shape of the filter, gradient of the output) -> gradient of the filter."""
    filters, out = _sizes(signature.outputs[0]), signature.inputs[2]
    return _convolution(signature, filters, out, (WINOGRAD_FILTER, CONV_FILTER))


def _convolution(signature: OpSignature, filters: tuple[int, ...], out: TensorType, kinds: tuple[str, str]) -> Work:
    """Counts an inner product over the filter's window and input channels for each element of the output."""
    depth = math.prod(filters[:-1])
    return _product(signature, kinds[not _winograd(signature, filters)], 2.0 * out.elements * depth, depth)


def _depthwise(kind: str, filters_of: Callable[[OpSignature], TensorType]) -> Callable[[OpSignature], Work]:
    """Returns a rule: an inner product over the filter's window alone for each element of the output."""

    def rule(signature: OpSignature) -> Work:
        out = signature.outputs[0] if len(signature.inputs) < 3 else signature.inputs[2]
        window = math.prod(_sizes(filters_of(signature))[:2])
        return _product(signature, kind, 2.0 * out.elements * window)

    return rule


def _pool(signature: OpSignature) -> Work:
    """Reads its windows, which cover the input about once, and writes."""
    window = math.prod(signature.numbers("ksize")) or 1
    pooled = min((*signature.inputs, *signature.outputs), key=lambda tensor: tensor.elements or math.inf)
    return _product(signature, POOL, float(window * pooled.elements))


# ---- normalization and reductions over rows


def _passes(read: int, write: int = 1) -> Callable[[OpSignature], Work]:
    """Returns a rule: ``read`` passes over the largest input, ``write`` over the largest output."""

    def rule(signature: OpSignature) -> Work:
        source = max(signature.inputs, key=lambda tensor: tensor.bytes)
        target = max(signature.outputs, key=lambda tensor: tensor.bytes)
        size = read * source.bytes + write * target.bytes
        return Work(MEMORY, float(4 * source.elements), size, 0.0, _dtype(signature))

    return rule


def _named(ops: str, rule: Callable[[OpSignature], Work]) -> dict[str, Callable[[OpSignature], Work]]:
    return dict.fromkeys(ops.split(), rule)


_RULES: Mapping[str, Callable[[OpSignature], Work]] = {
    # Nothing, or the same buffer under another shape or name.
    **_named(
        "NoOp Identity IdentityN Reshape ExpandDims Squeeze StopGradient PreventGradient Snapshot Const Placeholder "
        "PlaceholderWithDefault VarHandleOp ReadVariableOp EnsureShape Bitcast",
        _free,
    ),
    # Facts about a tensor that the host knows.
    **_named(
        "Shape ShapeN Size Rank BroadcastGradientArgs BroadcastArgs VariableShape VarIsInitializedOp Assert "
        "ControlTrigger MutexV2 MutexLock DestroyResourceOp",
        _free,
    ),
    # Handles of lists; their contents are counted when they are stacked or unstacked.
    **_named(
        "TensorListReserve EmptyTensorList TensorListLength TensorListElementShape TensorListSetItem TensorListGetItem "
        "TensorListPushBack TensorListPopBack TensorListResize TensorListPushBackBatch",
        _free,
    ),
    **_named(
        "Slice StridedSlice Split SplitV Unpack Pack Concat ConcatV2 Transpose Tile BroadcastTo Pad PadV2 MirrorPad "
        "Reverse ReverseV2 Roll SpaceToBatchND BatchToSpaceND SpaceToDepth DepthToSpace TensorListStack "
        "TensorListConcatV2 TensorListFromTensor TensorListGather TensorListSplit DeepCopy ParallelConcat Diag "
        "MatrixDiagV3 MatrixDiagPartV3",
        _copied(2),
    ),
    **_named("Fill ZerosLike OnesLike Range LinSpace Empty OneHot", _copied(1)),
    **_named("Gather GatherV2 GatherNd ResourceGather ResourceGatherNd DynamicPartition", _gather),
    **_named(
        "ScatterNd TensorScatterUpdate TensorScatterAdd ResourceScatterAdd ResourceScatterSub ResourceScatterUpdate "
        "ResourceScatterNdUpdate ResourceScatterNdAdd",
        _scatter,
    ),
    # An update reads the gradient, and reads and writes the variable and each slot.
    "AssignVariableOp": _apply(2.0),
    **_named("AssignAddVariableOp AssignSubVariableOp ResourceApplyGradientDescent", _apply(3.0)),
    **_named("ResourceApplyMomentum ResourceApplyKerasMomentum ResourceApplyAdagradV2", _apply(5.0)),
    **_named("ResourceApplyAdam ResourceApplyRMSProp ResourceApplyAdadelta ResourceApplyFtrlV2", _apply(7.0)),
    **_named("ResourceApplyAdamWithAmsgrad ResourceApplyCenteredRMSProp", _apply(9.0)),
    **_named("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3", _matmul),
    **_named("Einsum XlaEinsum", _einsum),
    **_named("Conv2D Conv3D", _forward),
    **_named("Conv2DBackpropInput Conv3DBackpropInputV2", _backward_input),
    **_named("Conv2DBackpropFilter Conv3DBackpropFilterV2", _backward_filter),
    "DepthwiseConv2dNative": _depthwise(DEPTHWISE, lambda signature: signature.inputs[1]),
    "DepthwiseConv2dNativeBackpropInput": _depthwise(DEPTHWISE, lambda signature: signature.inputs[1]),
    "DepthwiseConv2dNativeBackpropFilter": _depthwise(DEPTHWISE_FILTER, lambda signature: signature.outputs[0]),
    **_named(
        "MaxPool MaxPoolV2 AvgPool MaxPool3D AvgPool3D MaxPoolGrad MaxPoolGradV2 AvgPoolGrad MaxPool3DGrad "
        "AvgPool3DGrad MaxPoolWithArgmax MaxPoolGradWithArgmax",
        _pool,
    ),
    # Statistics first, then the result.
    **_named("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", _passes(2)),
    **_named("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3", _passes(4)),
    # Maximum and sum, then the result.
    **_named("Softmax LogSoftmax", _passes(2)),
    **_named("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits", _passes(3)),
}

# ---- rooflines

_WINOGRAD_SAVING = 36 / 16
"""F(2x2, 3x3): 36 multiplications become 16."""


@dataclass(frozen=True)
class Roofline:
    """The peak rates of a kind of device.

    Attributes:
        flops: peak float32 operations/s.
        bandwidth: peak bytes/s of its memory.
        launch: seconds of starting any kernel.
        compute: kind of work -> the share of ``flops`` that its kernels get; above 1 if an algorithm saves operations.
        memory: the share of ``bandwidth`` that kernels get.
        pool: the same for pooling.
        half_depth: length of inner products at which matrix products and convolutions get half of their share.
        dtypes: dtype -> peak as a multiple of ``flops``.

    Raises:
        ValueError: a number isn't finite and positive (``launch`` and ``half_depth`` may be 0), or a kind is unknown.
    """

    flops: float
    bandwidth: float
    launch: float
    compute: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.75
    pool: float = 0.75
    half_depth: float = 0.0
    dtypes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers: dict[str, Any] = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in ("compute", "dtypes")
        }
        for group in ("compute", "dtypes"):
            shares = getattr(self, group)
            if not isinstance(shares, Mapping):
                raise ValueError(f"{group} is {shares!r}; it must map names to numbers")
            numbers |= {f"{group} of {key!r}": value for key, value in shares.items()}
        for name, value in numbers.items():
            least_ok = value == 0 and name in ("launch", "half_depth")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not (least_ok or (value > 0 and math.isfinite(value))):
                raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")
        unknown = [kind for kind in self.compute if kind not in KINDS]
        if unknown:
            raise ValueError(f"unknown kind of work {unknown[0]!r}; the kinds are {', '.join(KINDS)}")

    def seconds(self, work: Work) -> float:
        """Returns the seconds of one run; 0 for work without a kernel."""
        if work.kind == FREE:
            return 0.0
        share = self.compute.get(work.kind, 1.0) * self.dtypes.get(work.dtype, 1.0)
        if work.depth:
            share *= work.depth / (work.depth + self.half_depth)
        return self.launch + max(work.flops / (self.flops * share), work.bytes / self._bytes_per_second(work.kind))

    def _bytes_per_second(self, kind: str) -> float:
        return self.bandwidth * (self.pool if kind == POOL else self.memory)

    @property
    def copy_seconds(self) -> float:
        """Seconds for each byte that is copied within the device: read and written."""
        return 2 / self._bytes_per_second(MEMORY)


P100 = Roofline(
    flops=10.6e12,
    bandwidth=732e9,
    launch=4e-6,
    compute={
        MATMUL: 0.75,
        CONV: 0.75,
        CONV_FILTER: 0.6,
        WINOGRAD: 0.65 * _WINOGRAD_SAVING,
        WINOGRAD_FILTER: 0.489 * _WINOGRAD_SAVING,
        DEPTHWISE: 0.1,
        DEPTHWISE_FILTER: 0.05,
        MEMORY: 0.5,
        POOL: 0.5,
    },
    memory=0.773,
    pool=1.0,
    half_depth=14.5,
    dtypes={"float16": 2.0, "float64": 0.5},
)
"""NVIDIA's Tesla P100 (SXM2): 10.6 TFLOPS in float32, 732 GB/s, by its data sheet. The shares are fitted to FD-DPS,
table 6 (VGG-16, 64 images of 224 x 224), see `OperatorCosts.p100`."""

GPU = Roofline(
    flops=14e12,
    bandwidth=900e9,
    launch=4e-6,
    compute=P100.compute,
    memory=0.8,
    pool=0.8,
    half_depth=14.0,
    dtypes={"float16": 4.0, "bfloat16": 4.0, "float64": 0.5},
)
"""An unknown GPU. Ratios between operators matter more than the level."""

CPU = Roofline(
    flops=60e9,
    bandwidth=12e9,
    launch=1.5e-6,
    compute={
        **{MATMUL: 0.7, CONV: 0.6, CONV_FILTER: 0.4, WINOGRAD: 0.7, WINOGRAD_FILTER: 0.5},
        **{DEPTHWISE: 0.1, DEPTHWISE_FILTER: 0.05, MEMORY: 0.2, POOL: 0.1},
    },
    memory=0.7,
    pool=0.5,
    half_depth=8.0,
    dtypes={"float64": 0.5},
)
"""An unknown logical CPU device: about one core with wide vectors."""
