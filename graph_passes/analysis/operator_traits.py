"""Operators' effects on the elements of their inputs."""

from __future__ import annotations

from graph_passes.ir.graph import NodeDef
from graph_passes.ir.tensorflow_bridge import is_stateful

LOOPS = frozenset({"While", "StatelessWhile"})
"""Every input is an argument of condition and body, every output its value after the last round."""
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
"""The first input chooses a function, the others are its arguments."""
ASKING = frozenset({"Rank", "Shape", "Size"})
"""They tell something of their input's shape."""
_KEEPING_ORDER_NAMES = """
    Cast CheckNumerics EnsureShape ExpandDims Identity PlaceholderWithDefault PreventGradient Reshape Snapshot Squeeze
    StopGradient
"""
KEEPING_ORDER = frozenset(_KEEPING_ORDER_NAMES.split())
"""Their result has the elements of their first input, in row-major order."""
KEEPING_ELEMENTS = KEEPING_ORDER | {"Transpose", "ReverseV2", "InvertPermutation"}
"""Likewise, but perhaps in another order."""
_NUMERIC_NAMES = """
    Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil Cos Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1
    Floor Identity Inv IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PreventGradient
    Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt Square
    StopGradient Tan Tanh ZerosLike Add AddV2 Atan2 BitwiseAnd BitwiseOr BitwiseXor Div DivNoNan Equal FloorDiv
    FloorMod Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NotEqual Pow
    RealDiv SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlog1py Xlogy EluGrad InvGrad LeakyReluGrad
    ReciprocalGrad ReluGrad Relu6Grad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad
    AddN ClipByValue SelectV2
"""
NUMERIC = frozenset(_NUMERIC_NAMES.split())
"""Each number of their result is computed from one of each input, which may be broadcast."""
_OTHER_NAMES = """
    AsString Bucketize Invert LeftShift LookupTableFind LookupTableFindV2 RightShift Select StringToHashBucket
    StringToHashBucketFast StringToHashBucketStrong StringToNumber
"""
ELEMENTWISE = (NUMERIC - KEEPING_ORDER) | frozenset(_OTHER_NAMES.split())
"""Likewise, of numbers and texts, without `KEEPING_ORDER`."""
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
