"""Operators' effects on the elements of their inputs."""

from __future__ import annotations

from graph_passes.ir.graph import NodeDef
from graph_passes.ir.tensorflow_bridge import is_stateful

_KEEPING_ORDER_NAMES = """
    Cast CheckNumerics EnsureShape ExpandDims Identity PlaceholderWithDefault PreventGradient Reshape Snapshot Squeeze
    StopGradient
"""
KEEPING_ORDER = frozenset(_KEEPING_ORDER_NAMES.split())
"""Their result has the elements of their first input, in row-major order."""
KEEPING_ELEMENTS = KEEPING_ORDER | {"Transpose", "ReverseV2", "InvertPermutation"}
"""Likewise, but perhaps in another order."""
_ELEMENTWISE_NAMES = """
    Abs Add AddN AddV2 AsString BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil ClipByValue Div DivNoNan Equal Exp
    Floor FloorDiv FloorMod Greater GreaterEqual Invert LeftShift Less LessEqual Log LogicalAnd LogicalNot LogicalOr
    LookupTableFind LookupTableFindV2 Maximum Minimum Mod Mul Neg NotEqual OnesLike Pow RealDiv Relu RightShift Rint
    Round Select SelectV2 Sigmoid Sign Sqrt Square SquaredDifference StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber Sub Tanh TruncateDiv TruncateMod ZerosLike
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
"""Each element of their result is computed from one of each input, which may be broadcast."""
JOINING = frozenset({"ConcatV2", "Pack"})
GATHERS = frozenset({"Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd"})
"""Elements of their first input, at the indices that the second one has."""
REPEATING = frozenset({"BroadcastTo", "Fill", "Tile"})
"""All parts of their result are equal along what they add to their input's shape."""
UNIQUE = frozenset({"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
"""Their first result has the different elements of their first input, their second one where these are."""
SEGMENT_GRADIENTS = frozenset({"SparseSegmentSumGradV2", "SparseSegmentMeanGradV2", "SparseSegmentSqrtNGradV2"})
"""Their second result has the different elements of their second input."""
ACCUMULATING = frozenset({"Cumsum", "Cumprod", "CumulativeLogsumexp", "TopK", "TopKV2"})
"""Their result at one place of an axis depends on others."""
SHAPE_OPERANDS = {
    "BroadcastTo": (1,),
    "ExpandDims": (1,),
    "Fill": (0,),
    "OneHot": (1,),
    "Pad": (1,),
    "PadV2": (1,),
    "Reshape": (1,),
    "Slice": (1, 2),
    "Split": (0,),
    "SplitV": (1, 2),
    "StridedSlice": (1, 2, 3),
    "Tile": (1,),
    "Transpose": (1,),
}
"""Numbers of the inputs that only determine the result's shape, or which part of another input it is."""


def draws(op: str) -> bool:
    """Returns whether an operator draws random numbers."""
    return any(told in op for told in ("Random", "Multinomial", "TruncatedNormal", "Shuffle"))


def draws_numbers(node: NodeDef) -> bool:
    """Returns whether a node draws random numbers, also by an operator that only its seeds reveal."""
    if "dropout" in node.attr and not node.attr["dropout"].f:  # cuDNN's recurrent layers
        return False
    return draws(node.op) or (is_stateful(node.op) and {"seed", "seed2"} <= set(node.attr))


def draws_anew(node: NodeDef) -> bool:
    """Returns whether a node draws other numbers each time that it runs, whatever its inputs."""
    return draws_numbers(node) and is_stateful(node.op)
