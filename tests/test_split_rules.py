"""Every operator that can be split gives the same whole and in parts, along every dimension.

Tensors hold small integers wherever that makes all sums exact, so that results are compared to the last bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from graph_passes.analysis.operator_traits import NUMERIC
from graph_passes.analysis.split_rules import FIRST, Split, SplitRule, chosen_rule, split_rules
from graph_passes.analysis.split_signatures import OPERATORS
from graph_passes.ir.graph import Graph, GraphDef, Ref, make_node
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import constant_value, is_stateful, output_dtypes
from graph_passes.passes.split_operators import GraphSplitting


class Case(NamedTuple):
    """An operator with inputs to try it on.

    Attributes:
        op: its name.
        inputs: shapes of tensors of small integers, arrays, lists of such tensors, or constants.
        dimensions: those that it can be split along, with their lengths.
        attrs: its attributes.
        tolerance: relative; 0 where results are the same to the last bit.
        skipped: outputs that no one may look at.
    """

    op: str
    inputs: Sequence[Any]
    dimensions: dict[str, int]
    attrs: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = 0.0
    skipped: tuple[int, ...] = ()


def tensor(shape: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def operator(case: Case) -> GraphDef:
    """A graph in which node ``op`` reads tensors."""

    def made(given: Any) -> Any:
        if isinstance(given, list) and given and isinstance(given[0], tuple):
            return [made(each) for each in given]
        if isinstance(given, tuple):
            given = tensor(given, len(graph.get_operations()))
        return tf.constant(given) if not isinstance(given, np.ndarray) else tf.identity(tf.constant(given))

    with tf.Graph().as_default() as graph:
        make = getattr(tf.raw_ops, case.op)
        inputs = dict(zip(inspect.signature(make).parameters, map(made, case.inputs), strict=False))
        make(name="op", **inputs, **case.attrs)
    return graph.as_graph_def()


def rules_of(graph: GraphDef, name: str = "op") -> tuple[SplitRule, ...]:
    view, shapes = Graph(graph), infer_shapes(graph, {}, {})
    node = view.nodes[name]
    producers = [view.nodes[ref.node] for ref in view.inputs(name)]
    return split_rules(
        node,
        [shapes[ref] for ref in view.inputs(name)],
        [shapes[Ref(name, output)] for output in range(len(output_dtypes(node)))],
        {number: constant_value(made) for number, made in enumerate(producers) if made.op == "Const"},
    )


def assert_same(definition: GraphDef, splits: Sequence[dict[str, Split]], refs: Sequence[Ref], rtol: float = 0) -> None:
    """Fails unless tensors are the same in a graph, and in that with its operators split in any of these ways."""
    shapes = infer_shapes(definition, {}, {})
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="whole")
        fetches = [[f"whole/{ref.node}:{ref.output}" for ref in refs]]
        for number, split in enumerate(splits):
            made = GraphSplitting(definition, split, shapes).result(refs)
            tf.graph_util.import_graph_def(made.graph, name=f"split{number}")
            joined = [made.joined.get(ref, ref) for ref in refs]
            fetches.append([f"split{number}/{ref.node}:{ref.output}" for ref in joined])
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            whole, *results = session.run(fetches)
    for split, values in zip(splits, results, strict=True):
        for expected, value in zip(whole, values, strict=True):
            assert value.shape == expected.shape, split
            np.testing.assert_allclose(value, expected, rtol=rtol, atol=rtol, err_msg=str(split))


def image(height: int = 7, channels: int = 6, batch: int = 5) -> tuple[int, ...]:
    return (batch, height, height + 1, channels)


def distinct(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)


def halves(*shape: int) -> np.ndarray:
    return tensor(shape, 1).astype(np.float16)


def positive(*shape: int) -> np.ndarray:
    return np.abs(tensor(shape, 1)) + 1


SAME = {"strides": [1, 1, 1, 1], "padding": "SAME"}
STRIDED = {"strides": [1, 2, 2, 1], "padding": "VALID"}
EXPLICIT = {"strides": [1, 1, 1, 1], "padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 2, 0, 3, 0, 0]}
TWICE = {"strides": [1, 2, 2, 1], "padding": "SAME"}
VOLUME = {"strides": [1] * 5, "padding": "SAME"}
POOL = {"ksize": [1, 3, 3, 1], **TWICE}
POOL3 = {"ksize": [1, 2, 2, 2, 1], **VOLUME}
SPATIAL = {"batch": 5, "channel": 6, "axis1": 7, "axis2": 8}
LABELS = np.array([0, 3, 1, 2, 4], np.int32)
BC, BATCH, FILTER = {"batch": 5, "channel": 6}, {"batch": 5}, {"batch": 5, "channel": 4, "input_channel": 6}
DEEP, KERNEL = (3, 4, 4, 3, 2), (2, 2, 2, 2, 4)
NORM = [image(), (6,), (6,), (6,), positive(6)]
PIXELS, VOXELS = distinct(*image()), distinct(*DEEP)
POOLED = tf.raw_ops.MaxPool(input=PIXELS, **POOL).numpy()
POOLED3 = tf.raw_ops.MaxPool3D(input=VOXELS, **POOL3).numpy()

CASES = [
    Case("Conv2D", [image(9), (3, 2, 6, 4)], {"batch": 5, "channel": 4}, STRIDED),
    Case("Conv2D", [image(), (3, 2, 6, 4)], {"batch": 5, "channel": 4}, EXPLICIT),
    Case("Conv2D", [image(), (3, 2, 3, 4)], BATCH, SAME),  # in groups
    Case("Conv2DBackpropInput", [list(image(9)), (3, 2, 6, 4), (5, 4, 5, 4)], BC, STRIDED),
    Case("Conv2DBackpropFilter", [image(9), [3, 2, 6, 4], (5, 4, 5, 4)], FILTER, STRIDED),
    Case("DepthwiseConv2dNative", [image(), (3, 2, 6, 2)], BC, TWICE),
    Case("DepthwiseConv2dNativeBackpropInput", [list(image()), (3, 2, 6, 2), (5, 4, 4, 12)], BC, TWICE),
    Case("DepthwiseConv2dNativeBackpropFilter", [image(), [3, 2, 6, 2], (5, 4, 4, 12)], BC, TWICE),
    Case("Conv3D", [DEEP, KERNEL], {"batch": 3, "channel": 4}, VOLUME),
    Case("Conv3DBackpropInputV2", [list(DEEP), KERNEL, (3, 4, 4, 3, 4)], {"batch": 3, "channel": 2}, VOLUME),
    Case(
        "Conv3DBackpropFilterV2",
        [DEEP, list(KERNEL), (3, 4, 4, 3, 4)],
        {"batch": 3, "channel": 4, "input_channel": 2},
        VOLUME,
    ),
    Case("MatMul", [(5, 7), (7, 3)], {"batch": 5, "channel": 3, "inner": 7}),
    Case("MatMul", [(7, 5), (7, 3)], {"row": 5, "channel": 3, "batch": 7}, {"transpose_a": True}),
    Case("BatchMatMulV2", [(2, 1, 5, 7), (3, 7, 4)], {"batch": 2, "axis1": 3, "row": 5, "channel": 4, "inner": 7}),
    # In half precision, a part of the sum may be larger than the largest number.
    Case("BatchMatMulV2", [halves(2, 5, 7), halves(2, 7, 4)], {"batch": 2, "row": 5, "channel": 4}),
    Case(
        "BatchMatMulV3",
        [(3, 7, 5), (3, 4, 7)],
        {"batch": 3, "row": 5, "channel": 4, "inner": 7},
        {"adj_x": True, "adj_y": True, "Tout": tf.float32},
    ),
    Case(
        "Einsum",
        [[(2, 3, 4, 5), (2, 6, 4, 5)]],
        {"batch": 2, "axis1": 4, "axis2": 3, "channel": 6, "sum_h": 5},
        {"equation": "btnh,bsnh->bnts"},
    ),
    Case("Einsum", [[(2, 3, 4)]], {"batch": 4, "channel": 2, "sum_b": 3}, {"equation": "abc->ca"}),
    Case("BiasAdd", [image(), (6,)], BC),
    Case("BiasAdd", [(5, 6, 3, 4), (6,)], BC, {"data_format": "NCHW"}),
    Case("BiasAddGrad", [image()], BC),
    Case("BiasAddGrad", [(5, 6, 3, 4)], BC, {"data_format": "NCHW"}),
    Case("MaxPool", [image()], BC, POOL),
    Case("MaxPool", [image()], BATCH, POOL | {"ksize": [1, 1, 1, 2], "strides": [1, 1, 1, 2]}),  # of channels
    Case("MaxPoolGrad", [PIXELS, POOLED, (5, 4, 4, 6)], BC, POOL),
    Case("AvgPool", [image()], BC, POOL, 1e-6),
    Case("AvgPoolGrad", [list(image()), (5, 4, 4, 6)], BC, POOL, 1e-6),
    Case("MaxPool3D", [DEEP], {"batch": 3, "channel": 2}, POOL3),
    Case("AvgPool3D", [DEEP], {"batch": 3, "channel": 2}, POOL3, 1e-6),
    Case("MaxPool3DGrad", [VOXELS, POOLED3, DEEP], {"batch": 3, "channel": 2}, POOL3),
    Case("AvgPool3DGrad", [list(DEEP), DEEP], {"batch": 3, "channel": 2}, POOL3, 1e-6),
    Case("ResizeNearestNeighbor", [image(), [5, 11]], BC),
    Case("ResizeNearestNeighborGrad", [image(), [5, 11]], BC),
    Case("ResizeBilinear", [image(), [5, 11]], BC, {}, 1e-5),
    Case("ResizeBilinearGrad", [image(5), image()], BC, {}, 1e-5),
    Case("Softmax", [(5, 7)], BATCH, {}, 1e-6),
    Case("LogSoftmax", [(5, 3, 7)], {"batch": 5, "axis1": 3}, {}, 1e-6),
    Case("SparseSoftmaxCrossEntropyWithLogits", [(5, 7), LABELS], BATCH, {}, 1e-5),
    Case("SoftmaxCrossEntropyWithLogits", [(5, 7), (5, 7)], BATCH, {}, 1e-5),
    Case("TopKV2", [distinct(5, 7), 2], BATCH),
    Case("InTopKV2", [(5, 7), LABELS, 2], BATCH),
    Case("L2Loss", [image()], BATCH),
    Case("FusedBatchNormV3", NORM, {"channel": 6}, {"exponential_avg_factor": 0.5}, 1e-4, (5,)),
    # In inference, kernels that aren't oneDNN's leave all outputs but the first as they are.
    Case("FusedBatchNormV3", NORM, BC, {"is_training": False}, 1e-4, (1, 2, 3, 4, 5)),
    Case(
        "FusedBatchNormGradV3",
        [image(), image(), (6,), (6,), positive(6), np.zeros((), np.float32)],
        {"channel": 6},
        {},
        1e-4,
        (3, 4),
    ),
    Case("AddV2", [image(), image()], SPATIAL),
    Case("Mul", [image(), (6,)], SPATIAL),
    Case("Maximum", [(5, 1, 6), (1, 4, 6)], {"batch": 5, "axis1": 4, "channel": 6}),
    Case("SelectV2", [tensor(image(), 1) > 0, image(), (7, 1, 6)], SPATIAL),
    Case("Select", [tensor((5,), 1) > 0, (5, 2), (5, 2)], {}),  # of rows
    Case("ClipByValue", [(5, 6), np.float32(-1), np.float32(2)], BC),
    Case("AddN", [[(5, 6)] * 3], BC),
    Case("Cast", [(5,)], BATCH, {"DstT": tf.int32}),
    Case("BroadcastTo", [(4, 1), [5, 4, 6]], {"batch": 5, "axis1": 4, "channel": 6}),
    Case("Fill", [[5, 6], ()], BC),
    Case("IdentityN", [[(5, 6), (4,), (5,)]], BC),
    Case("Pad", [image(), [[0, 0], [1, 2], [3, 0], [0, 0]]], BC),
    Case("PadV2", [(5, 3), [[0, 0], [1, 0]], np.float32(7)], BATCH),
    Case("MirrorPad", [(5, 3), [[0, 0], [1, 1]]], BATCH, {"mode": "REFLECT"}),
    Case("MirrorPadGrad", [(5, 6), [[0, 0], [1, 1]]], BATCH, {"mode": "REFLECT"}),
    Case("Tile", [(5, 3), [1, 2]], BATCH),
    Case("Slice", [(5, 4, 6), [0, 1, 0], [5, 2, -1]], BC),
    Case(
        "StridedSlice",
        [(5, 4, 3, 6), [0, 1, 2], [0, 4, 3], [1, 2, 1]],
        BC,
        {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": 4},
    ),
    Case("StridedSlice", [(5, 4), [0], [0], [-1]], {"channel": 4}, {"begin_mask": 1, "end_mask": 1}),  # backwards
    Case(
        "StridedSliceGrad",
        [[5, 4, 3, 6], [0, 1, 2], [0, 4, 3], [1, 2, 1], (5, 2, 6)],
        BC,
        {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": 4},
    ),
    Case("ConcatV2", [[(5, 3, 4), (5, 3, 2)], 2], {"batch": 5, "axis1": 3}),
    Case("Split", [1, (5, 4, 6)], BC, {"num_split": 2}),
    Case("SplitV", [(5, 4, 6), [1, 3], 1], BC, {"num_split": 2}),
    Case("Pack", [[(5, 6)] * 2], BC, {"axis": 1}),
    Case("Unpack", [(5, 2, 6)], BC, {"num": 2, "axis": -2}),
    Case("Reshape", [(5, 3, 4), [15, -1]], {"batch": 5, "channel": 4}),
    Case("Reshape", [(6, 6), [4, 9]], {"batch": 2}),
    Case("Reshape", [(2, 3, 8), [-1, 3, 4, 2]], {"batch": 2, "axis1": 3, "axis2": 4}),
    Case("Reshape", [(6, 6, 15), [4, 9, 1, 5, 3]], {"batch": 2, "axis3": 5}),
    Case("Reshape", [(1, 1, 6), [6]], {"channel": 6}),
    Case("ExpandDims", [(5, 6), 1], BC),
    Case("Squeeze", [(5, 1, 1, 6)], BC, {"axis": [1, 2]}),
    Case("Transpose", [(5, 5, 3), [1, 0, 2]], {"batch": 5, "axis1": 5, "channel": 3}),
    Case("Sum", [image(), [1, 2]], SPATIAL),
    Case("Sum", [(5, 6), [0]], BC, {"keep_dims": True}),
    Case("Mean", [image(), [0, 1, 2]], SPATIAL, {"keep_dims": True}, 1e-5),
    Case("Mean", [halves(5, 3), [0]], {"channel": 3}),
    Case("Max", [(5, 5, 3), [-1]], {"batch": 5, "axis1": 5}),
    Case("ArgMax", [(5, 3), -1], BATCH),
    Case("UnsortedSegmentSum", [(5, 6), LABELS, 6], BC),
    Case("Bitcast", [(5, 6)], BC, {"type": tf.int32}),
    Case("GatherV2", [(9, 6), np.array([[1, 8], [0, 0], [5, 4]], np.int32), 0], {"batch": 3, "axis1": 2, "channel": 6}),
    Case("GatherV2", [(5, 9), LABELS, 1], {}),
    Case("OneHot", [LABELS, 7, 1.0, 0.0], BATCH),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_parts_give_what_the_whole_gives(case: Case) -> None:
    definition = operator(case)
    rules = rules_of(definition)
    assert {rule.dimension: rule.length for rule in rules} == case.dimensions
    outputs = len(output_dtypes(Graph(definition).nodes["op"]))
    refs = [Ref("op", output) for output in range(outputs) if output not in case.skipped]
    parts = [(rule, number) for rule in rules for number in sorted({min(3, rule.length), min(rule.length, 8)})]
    assert_same(definition, [{"op": Split(rule.dimension, number)} for rule, number in parts], refs, case.tolerance)


def test_every_operator_is_tried_and_none_is_stateful() -> None:
    older = {"BatchMatMul", "Gather", *(f"FusedBatchNorm{kind}" for kind in ("", "V2", "Grad", "GradV2"))}
    same = {"ConjugateTranspose", "Min", "Prod", "All", "Any", "ArgMin"}
    assert OPERATORS.keys() - {case.op for case in CASES} - older - same <= NUMERIC
    for op in OPERATORS:
        assert op_def_registry.get(op) is not None, op
        assert not is_stateful(op), op
    assert not {"StatelessRandomUniformV2", "PartitionedCall"} & OPERATORS.keys()


def test_elementwise_operators_are_elementwise() -> None:
    generator = np.random.default_rng(0)
    splits, names = {}, []
    with tf.Graph().as_default() as graph:
        for op in sorted(NUMERIC):
            definition = op_def_registry.get(op)
            integer = op.startswith(("Bitwise", "Truncate"))
            dtype = tf.bool if op.startswith("Logical") else tf.int32 if integer else tf.float32
            values = [
                tf.cast(tf.constant(generator.uniform(0.1, 0.9, (5, 4)) * (9 if integer else 1)) + integer, dtype)
                for _ in definition.input_arg
            ]
            arguments = dict(zip((arg.name for arg in definition.input_arg), values, strict=True))
            if op == "AddN":
                arguments = {"inputs": values * 2}
            elif op == "Cast":
                arguments["DstT"] = tf.float64
            elif op.startswith("Select"):
                arguments[definition.input_arg[0].name] = values[0] > 0.5
            getattr(tf.raw_ops, op)(name=f"op_{op}", **arguments)
            splits[f"op_{op}"] = Split("batch" if len(op) % 2 else "channel", 3)
            names.append(Ref(f"op_{op}"))
    assert_same(graph.as_graph_def(), [splits], names, 1e-6)


def rule(rules: Sequence[SplitRule], dimension: str) -> SplitRule:
    return next(rule for rule in rules if rule.dimension == dimension)


def test_formats_of_images() -> None:
    node = make_node("op", "Conv2D", [Ref("x"), Ref("w")], attrs={"data_format": "NCHW"})
    rules = split_rules(node, [(4, 6, 9, 9), (3, 3, 6, 8)], [(4, 8, 9, 9)])
    assert rules == (SplitRule("batch", 4, (0, None), (0,)), SplitRule("channel", 8, (None, 3), (1,)))
    node = make_node("op", "Conv2DBackpropFilter", [Ref("x"), Ref("s"), Ref("dy")], attrs={"data_format": "NCHW"})
    rules = split_rules(node, [(4, 6, 9, 9), (4,), (4, 8, 9, 9)], [(3, 3, 6, 8)])
    assert rule(rules, "channel") == SplitRule("channel", 8, (None, None, 1), (3,), {1: 3})
    assert rule(rules, "input_channel") == SplitRule("input_channel", 6, (1, None, None), (2,), {1: 2})
    assert rule(rules, "batch") == SplitRule("batch", 4, (0, None, 0), (None,))
    node = make_node("op", "FusedBatchNormV3", [Ref("x")] * 5, attrs={"data_format": "NCHW"})
    rules = split_rules(node, [(4, 6, 9, 9), *[(6,)] * 4], [(4, 6, 9, 9), *[(6,)] * 4, None])
    assert rules == (SplitRule("channel", 6, (1, 0, 0, 0, 0), (1, 0, 0, 0, 0, FIRST)),)
    assert split_rules(make_node("op", "Sum", [Ref("x"), Ref("axes")]), [(4, 6), (1,)], [None]) == ()
    node = make_node("op", "MaxPool", [Ref("x")], attrs={"data_format": "NCHW"})
    node.attr["ksize"].list.i.extend([1, 1, 2, 2])
    assert rule(split_rules(node, [(4, 6, 9, 9)], [(4, 6, 4, 4)]), "channel").output_axes == (1,)


def test_what_cant_be_split_is_told() -> None:
    rules = (SplitRule("batch", 4, (0,), (0,)), SplitRule("channel", 3, (1,), (1,)))
    assert chosen_rule("op", rules, Split("channel", 3)) is rules[1]
    with pytest.raises(ValueError, match=r"'op' can't be split along 'row', only along batch \(4\), channel \(3\)"):
        chosen_rule("op", rules, Split("row", 2))
    with pytest.raises(ValueError, match="into 4 parts: it has length 3; take 2 to 3 parts"):
        chosen_rule("op", rules, Split("channel", 4))
