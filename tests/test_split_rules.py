"""Every operator that can be split gives the same whole and in parts, along every dimension.

Tensors hold small integers wherever that makes all sums exact, so that results are compared to the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import op_def_registry

from graph_passes.analysis.split_rules import FIRST, Cut, Split, SplitRule, chosen_rule, split_rules
from graph_passes.analysis.split_table import ELEMENTWISE, OPERATORS
from graph_passes.ir.graph import Graph, Ref, dtype_attr, make_node
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import constant_value, is_stateful, output_dtypes
from graph_passes.passes.split_operators import split_operators

raw = tf.raw_ops
FLOAT = np.float32


class Case(NamedTuple):
    """An operator with inputs to try it on.

    Attributes:
        build: makes the operator, given tensors for ``inputs``.
        inputs: shapes of tensors of small integers, or arrays.
        dimensions: those that it can be split along, with their lengths.
        tolerance: relative; 0 where results are the same to the last bit.
        skipped: outputs that no one may look at.
    """

    build: Callable[..., Any]
    inputs: Sequence[Any]
    dimensions: dict[str, int]
    tolerance: float = 0.0
    skipped: tuple[int, ...] = ()


def tensor(shape: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(FLOAT)


def graph_of(case: Case) -> tuple[tf.Graph, dict[str, np.ndarray]]:
    """A graph in which node ``op`` reads placeholders, and what to feed."""
    feeds: dict[str, np.ndarray] = {}
    with tf.Graph().as_default() as graph:
        placeholders = []
        for number, given in enumerate(case.inputs):
            value = given if isinstance(given, np.ndarray) else tensor(given, number)
            placeholders.append(tf.compat.v1.placeholder(value.dtype, value.shape, name=f"x{number}"))
            feeds[f"x{number}:0"] = value
        case.build(*placeholders)
    return graph, feeds


def rules_of(graph: tf.Graph, name: str = "op", *, constants: bool = True) -> tuple[SplitRule, ...]:
    view = Graph(graph.as_graph_def())
    shapes = infer_shapes(view.graph, {}, {})
    node = view.nodes[name]
    producers = [view.nodes[ref.node] for ref in view.inputs(name)]
    known = {number: constant_value(made) for number, made in enumerate(producers) if made.op == "Const"}
    return split_rules(
        node,
        [shapes[ref] for ref in view.inputs(name)],
        [shapes[Ref(name, output)] for output in range(len(output_dtypes(node)))],
        known if constants else None,
    )


@functools.cache
def session_config() -> Any:
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def check(case: Case) -> None:
    graph, feeds = graph_of(case)
    rules = rules_of(graph)
    assert {rule.dimension: rule.length for rule in rules} == case.dimensions
    definition = graph.as_graph_def()
    shapes = infer_shapes(definition, {}, {})
    outputs = [Ref("op", output) for output in range(len(graph.get_operation_by_name("op").outputs))]
    outputs = [ref for ref in outputs if ref.output not in case.skipped]
    fetches: dict[str, list[Any]] = {"whole": [f"{ref.node}:{ref.output}" for ref in outputs]}
    with graph.as_default():
        given = {name: graph.get_tensor_by_name(name) for name in feeds}
        for rule in rules:
            for parts in sorted({2, 3, min(rule.length, 5), rule.length if rule.length < 9 else 2}):
                if parts > rule.length:
                    continue
                split = split_operators(definition, {"op": Split(rule.dimension, parts)}, shapes, outputs)
                names = [f"{split.joined[ref].node}:{split.joined[ref].output}" for ref in outputs]
                scope = f"{rule.dimension}_{parts}"
                fetches[scope] = tf.graph_util.import_graph_def(
                    split.graph, input_map=given, return_elements=names, name=scope
                )
    with tf.compat.v1.Session(graph=graph, config=session_config()) as session:
        results = session.run(fetches, feeds)
    for scope, values in results.items():
        for expected, value in zip(results["whole"], values, strict=True):
            assert value.shape == expected.shape, scope
            if case.tolerance:
                np.testing.assert_allclose(value, expected, rtol=case.tolerance, atol=case.tolerance, err_msg=scope)
            else:
                np.testing.assert_array_equal(value, expected, err_msg=scope)


def image(height: int = 7, channels: int = 6, batch: int = 5) -> tuple[int, ...]:
    return (batch, height, height + 1, channels)


def conv(**options: Any) -> Callable[..., Any]:
    return lambda x, w: raw.Conv2D(
        input=x, filter=w, name="op", **{"strides": [1, 1, 1, 1], "padding": "SAME"} | options
    )


def conv_input(shape: Sequence[int], **options: Any) -> Callable[..., Any]:
    kind = {"strides": [1, 1, 1, 1], "padding": "SAME"} | options
    return lambda w, dy: raw.Conv2DBackpropInput(input_sizes=list(shape), filter=w, out_backprop=dy, name="op", **kind)


def conv_filter(shape: Sequence[int], **options: Any) -> Callable[..., Any]:
    kind = {"strides": [1, 1, 1, 1], "padding": "SAME"} | options
    return lambda x, dy: raw.Conv2DBackpropFilter(input=x, filter_sizes=list(shape), out_backprop=dy, name="op", **kind)


def depthwise(op: Any, *shape: Sequence[int]) -> Callable[..., Any]:
    def build(one: Any, other: Any) -> Any:
        kind = {"strides": [1, 2, 2, 1], "padding": "SAME", "name": "op"}
        if op is raw.DepthwiseConv2dNative:
            return op(input=one, filter=other, **kind)
        if op is raw.DepthwiseConv2dNativeBackpropInput:
            return op(input_sizes=list(shape[0]), filter=one, out_backprop=other, **kind)
        return op(input=one, filter_sizes=list(shape[0]), out_backprop=other, **kind)

    return build


def unary(op: Any, **options: Any) -> Callable[..., Any]:
    return lambda x: op(x=x, name="op", **options)


STRIDED = {"strides": [1, 2, 2, 1], "padding": "VALID"}
EXPLICIT = {"padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 2, 0, 3, 0, 0]}
DILATED = {"dilations": [1, 2, 2, 1]}
POOL = {"ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "SAME", "name": "op"}
SPATIAL = {"batch": 5, "channel": 6, "axis1": 7, "axis2": 8}
LABELS = np.array([0, 3, 1, 2, 4], np.int32)

CASES = {
    "Conv2D": Case(conv(), [image(), (3, 2, 6, 4)], {"batch": 5, "channel": 4}),
    "Conv2D strided": Case(conv(**STRIDED), [image(9), (3, 2, 6, 4)], {"batch": 5, "channel": 4}),
    "Conv2D explicit": Case(conv(**EXPLICIT), [image(), (3, 2, 6, 4)], {"batch": 5, "channel": 4}),
    "Conv2D dilated": Case(conv(**DILATED), [image(), (3, 2, 6, 4)], {"batch": 5, "channel": 4}),
    "Conv2D in groups": Case(conv(), [image(), (3, 2, 3, 4)], {"batch": 5}),
    "Conv2DBackpropInput": Case(conv_input(image()), [(3, 2, 6, 4), image(channels=4)], {"batch": 5, "channel": 6}),
    "Conv2DBackpropInput strided": Case(
        conv_input(image(9), **STRIDED), [(3, 2, 6, 4), (5, 4, 5, 4)], {"batch": 5, "channel": 6}
    ),
    "Conv2DBackpropFilter": Case(
        conv_filter((3, 2, 6, 4)), [image(), image(channels=4)], {"batch": 5, "channel": 4, "input_channel": 6}
    ),
    "Conv2DBackpropFilter strided": Case(
        conv_filter((3, 2, 6, 4), **STRIDED), [image(9), (5, 4, 5, 4)], {"batch": 5, "channel": 4, "input_channel": 6}
    ),
    "DepthwiseConv2dNative": Case(
        depthwise(raw.DepthwiseConv2dNative), [image(), (3, 2, 6, 2)], {"batch": 5, "channel": 6}
    ),
    "DepthwiseConv2dNativeBackpropInput": Case(
        depthwise(raw.DepthwiseConv2dNativeBackpropInput, image()),
        [(3, 2, 6, 2), (5, 4, 4, 12)],
        {"batch": 5, "channel": 6},
    ),
    "DepthwiseConv2dNativeBackpropFilter": Case(
        depthwise(raw.DepthwiseConv2dNativeBackpropFilter, (3, 2, 6, 2)),
        [image(), (5, 4, 4, 12)],
        {"batch": 5, "channel": 6},
    ),
    "Conv3D": Case(
        lambda x, w: raw.Conv3D(input=x, filter=w, strides=[1] * 5, padding="SAME", name="op"),
        [(3, 4, 4, 3, 2), (2, 2, 2, 2, 4)],
        {"batch": 3, "channel": 4},
    ),
    "Conv3DBackpropInputV2": Case(
        lambda w, dy: raw.Conv3DBackpropInputV2(
            input_sizes=[3, 4, 4, 3, 2], filter=w, out_backprop=dy, strides=[1] * 5, padding="SAME", name="op"
        ),
        [(2, 2, 2, 2, 4), (3, 4, 4, 3, 4)],
        {"batch": 3, "channel": 2},
    ),
    "Conv3DBackpropFilterV2": Case(
        lambda x, dy: raw.Conv3DBackpropFilterV2(
            input=x, filter_sizes=[2, 2, 2, 2, 4], out_backprop=dy, strides=[1] * 5, padding="SAME", name="op"
        ),
        [(3, 4, 4, 3, 2), (3, 4, 4, 3, 4)],
        {"batch": 3, "channel": 4, "input_channel": 2},
    ),
    "MatMul": Case(
        lambda a, b: raw.MatMul(a=a, b=b, name="op"), [(5, 7), (7, 3)], {"batch": 5, "channel": 3, "inner": 7}
    ),
    "MatMul transpose_a": Case(
        lambda a, b: raw.MatMul(a=a, b=b, transpose_a=True, name="op"),
        [(7, 5), (7, 3)],
        {"row": 5, "channel": 3, "batch": 7},
    ),
    "MatMul transpose_b": Case(
        lambda a, b: raw.MatMul(a=a, b=b, transpose_b=True, name="op"),
        [(5, 7), (3, 7)],
        {"batch": 5, "channel": 3, "inner": 7},
    ),
    "BatchMatMulV2": Case(
        lambda x, y: raw.BatchMatMulV2(x=x, y=y, name="op"),
        [(2, 1, 5, 7), (3, 7, 4)],
        {"batch": 2, "axis1": 3, "row": 5, "channel": 4, "inner": 7},
    ),
    "BatchMatMulV2 in half precision": Case(  # A part of the sum may be larger than what it holds.
        lambda x, y: raw.BatchMatMulV2(x=tf.cast(x, tf.float16), y=tf.cast(y, tf.float16), name="op"),
        [(2, 5, 7), (2, 7, 4)],
        {"batch": 2, "row": 5, "channel": 4},
    ),
    "BatchMatMulV3": Case(
        lambda x, y: raw.BatchMatMulV3(x=x, y=y, adj_x=True, adj_y=True, Tout=tf.float32, name="op"),
        [(3, 7, 5), (3, 4, 7)],
        {"batch": 3, "row": 5, "channel": 4, "inner": 7},
    ),
    "Einsum": Case(
        lambda x, y: raw.Einsum(inputs=[x, y], equation="btnh,bsnh->bnts", name="op"),
        [(2, 3, 4, 5), (2, 6, 4, 5)],
        {"batch": 2, "axis1": 4, "axis2": 3, "channel": 6, "sum_h": 5},
    ),
    "Einsum of one": Case(
        lambda x: raw.Einsum(inputs=[x], equation="abc->ca", name="op"),
        [(2, 3, 4)],
        {"batch": 4, "channel": 2, "sum_b": 3},
    ),
    "BiasAdd": Case(lambda x, b: raw.BiasAdd(value=x, bias=b, name="op"), [image(), (6,)], {"batch": 5, "channel": 6}),
    "BiasAdd of vectors": Case(
        lambda x, b: raw.BiasAdd(value=x, bias=b, name="op"), [(5, 6), (6,)], {"batch": 5, "channel": 6}
    ),
    "BiasAdd NCHW": Case(
        lambda x, b: raw.BiasAdd(value=x, bias=b, data_format="NCHW", name="op"),
        [(5, 6, 3, 4), (6,)],
        {"batch": 5, "channel": 6},
    ),
    "BiasAddGrad": Case(lambda dy: raw.BiasAddGrad(out_backprop=dy, name="op"), [image()], {"batch": 5, "channel": 6}),
    "BiasAddGrad NCHW": Case(
        lambda dy: raw.BiasAddGrad(out_backprop=dy, data_format="NCHW", name="op"),
        [(5, 6, 3, 4)],
        {"batch": 5, "channel": 6},
    ),
    "MaxPool": Case(lambda x: raw.MaxPool(input=x, **POOL), [image()], {"batch": 5, "channel": 6}),
    "MaxPool of channels": Case(
        lambda x: raw.MaxPool(input=x, **POOL | {"ksize": [1, 1, 1, 2], "strides": [1, 1, 1, 2]}),
        [image()],
        {"batch": 5},
    ),
    "MaxPoolGrad": Case(
        lambda x, dy: raw.MaxPoolGrad(
            orig_input=x, orig_output=raw.MaxPool(input=x, **POOL | {"name": "y"}), grad=dy, **POOL
        ),
        [np.random.default_rng(0).permutation(5 * 7 * 8 * 6).reshape(5, 7, 8, 6).astype(FLOAT), (5, 4, 4, 6)],
        {"batch": 5, "channel": 6},
    ),
    "AvgPool": Case(lambda x: raw.AvgPool(value=x, **POOL), [image()], {"batch": 5, "channel": 6}, 1e-6),
    "AvgPoolGrad": Case(
        lambda dy: raw.AvgPoolGrad(orig_input_shape=list(image()), grad=dy, **POOL),
        [(5, 4, 4, 6)],
        {"batch": 5, "channel": 6},
        1e-6,
    ),
    "MaxPool3D": Case(
        lambda x: raw.MaxPool3D(input=x, ksize=[1, 2, 2, 2, 1], strides=[1] * 5, padding="SAME", name="op"),
        [(3, 4, 4, 3, 2)],
        {"batch": 3, "channel": 2},
    ),
    "AvgPool3D": Case(
        lambda x: raw.AvgPool3D(input=x, ksize=[1, 2, 2, 2, 1], strides=[1] * 5, padding="SAME", name="op"),
        [(3, 4, 4, 3, 2)],
        {"batch": 3, "channel": 2},
        1e-6,
    ),
    "MaxPool3DGrad": Case(
        lambda x, dy: raw.MaxPool3DGrad(
            orig_input=x,
            orig_output=raw.MaxPool3D(input=x, ksize=[1, 2, 2, 2, 1], strides=[1] * 5, padding="SAME"),
            grad=dy,
            ksize=[1, 2, 2, 2, 1],
            strides=[1] * 5,
            padding="SAME",
            name="op",
        ),
        [np.random.default_rng(0).permutation(288).reshape(3, 4, 4, 3, 2).astype(FLOAT), (3, 4, 4, 3, 2)],
        {"batch": 3, "channel": 2},
    ),
    "AvgPool3DGrad": Case(
        lambda dy: raw.AvgPool3DGrad(
            orig_input_shape=[3, 4, 4, 3, 2],
            grad=dy,
            ksize=[1, 2, 2, 2, 1],
            strides=[1] * 5,
            padding="SAME",
            name="op",
        ),
        [(3, 4, 4, 3, 2)],
        {"batch": 3, "channel": 2},
        1e-6,
    ),
    "ResizeNearestNeighbor": Case(
        lambda x: raw.ResizeNearestNeighbor(images=x, size=[5, 11], name="op"), [image()], {"batch": 5, "channel": 6}
    ),
    "ResizeNearestNeighborGrad": Case(
        lambda dy: raw.ResizeNearestNeighborGrad(grads=dy, size=[5, 11], name="op"),
        [image()],
        {"batch": 5, "channel": 6},
    ),
    "ResizeBilinear": Case(
        lambda x: raw.ResizeBilinear(images=x, size=[5, 11], name="op"), [image()], {"batch": 5, "channel": 6}, 1e-5
    ),
    "ResizeBilinearGrad": Case(
        lambda dy, x: raw.ResizeBilinearGrad(grads=dy, original_image=x, name="op"),
        [image(5), image()],
        {"batch": 5, "channel": 6},
        1e-5,
    ),
    "Softmax": Case(lambda x: raw.Softmax(logits=x, name="op"), [(5, 7)], {"batch": 5}, 1e-6),
    "LogSoftmax": Case(lambda x: raw.LogSoftmax(logits=x, name="op"), [(5, 3, 7)], {"batch": 5, "axis1": 3}, 1e-6),
    "SparseSoftmaxCrossEntropyWithLogits": Case(
        lambda x, y: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y, name="op"),
        [(5, 7), LABELS],
        {"batch": 5},
        1e-5,
    ),
    "SoftmaxCrossEntropyWithLogits": Case(
        lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y, name="op"),
        [(5, 7), (5, 7)],
        {"batch": 5},
        1e-5,
    ),
    "TopKV2": Case(
        lambda x: raw.TopKV2(input=x, k=2, name="op"),
        [np.random.default_rng(0).permutation(35).reshape(5, 7).astype(FLOAT)],
        {"batch": 5},
    ),
    "InTopKV2": Case(
        lambda x, y: raw.InTopKV2(predictions=x, targets=y, k=2, name="op"), [(5, 7), LABELS], {"batch": 5}
    ),
    "L2Loss": Case(lambda x: raw.L2Loss(t=x, name="op"), [image()], {"batch": 5}),
    "FusedBatchNormV3": Case(
        lambda x, s, b, m, v: raw.FusedBatchNormV3(x=x, scale=s, offset=b, mean=m, variance=v, name="op"),
        [image(), (6,), (6,), (0,), (0,)],
        {"channel": 6},
        1e-4,
        (5,),
    ),
    "FusedBatchNormV3 with averages": Case(
        lambda x, s, b, m, v: raw.FusedBatchNormV3(
            x=x, scale=s, offset=b, mean=m, variance=raw.Abs(x=v), exponential_avg_factor=0.5, name="op"
        ),
        [image(), (6,), (6,), (6,), (6,)],
        {"channel": 6},
        1e-4,
        (5,),
    ),
    "FusedBatchNormV3 of inference": Case(
        lambda x, s, b, m, v: raw.FusedBatchNormV3(
            x=x, scale=s, offset=b, mean=m, variance=raw.Square(x=v), is_training=False, name="op"
        ),
        [image(), (6,), (6,), (6,), (6,)],
        {"batch": 5, "channel": 6},
        1e-4,
        (1, 2, 3, 4, 5),  # Kernels that aren't oneDNN's leave them as they are.
    ),
    "FusedBatchNormGradV3": Case(
        lambda dy, x, s: raw.FusedBatchNormGradV3(
            y_backprop=dy,
            x=x,
            scale=s,
            reserve_space_1=tf.reduce_mean(x, [0, 1, 2]),
            reserve_space_2=tf.math.reduce_variance(x, [0, 1, 2]),
            reserve_space_3=tf.zeros([]),
            name="op",
        ),
        [image(), image(), (6,)],
        {"channel": 6},
        1e-4,
        (3, 4),
    ),
    "AddV2": Case(lambda x, y: raw.AddV2(x=x, y=y, name="op"), [image(), image()], SPATIAL),
    "Mul of channels": Case(lambda x, y: raw.Mul(x=x, y=y, name="op"), [image(), (6,)], SPATIAL),
    "Sub of a scalar": Case(lambda x, y: raw.Sub(x=y, y=x, name="op"), [image(), ()], SPATIAL),
    "Maximum of columns": Case(
        lambda x, y: raw.Maximum(x=x, y=y, name="op"), [(5, 1, 6), (1, 4, 6)], {"batch": 5, "axis1": 4, "channel": 6}
    ),
    "SelectV2": Case(lambda x, y: raw.SelectV2(condition=x > 0, t=x, e=y, name="op"), [image(), (7, 1, 6)], SPATIAL),
    "Select": Case(lambda x, y: raw.Select(condition=x > 0, x=x, y=y, name="op"), [image(), image()], SPATIAL),
    "Select of rows": Case(
        lambda c, x, y: raw.Select(condition=c > 0, x=x, y=y, name="op"), [(5,), (5, 2), (5, 2)], {}
    ),
    "ClipByValue": Case(
        lambda x: raw.ClipByValue(t=x, clip_value_min=-1.0, clip_value_max=2.0, name="op"),
        [(5, 3)],
        {"batch": 5, "channel": 3},
    ),
    "AddN": Case(lambda x, y, z: raw.AddN(inputs=[x, y, z], name="op"), [(5, 3)] * 3, {"batch": 5, "channel": 3}),
    "Relu": Case(lambda x: raw.Relu(features=x, name="op"), [image()], SPATIAL),
    "ReluGrad": Case(lambda dy, x: raw.ReluGrad(gradients=dy, features=x, name="op"), [image(), image()], SPATIAL),
    "LeakyRelu": Case(lambda x: raw.LeakyRelu(features=x, alpha=0.5, name="op"), [image()], SPATIAL),
    "TanhGrad": Case(lambda y, dy: raw.TanhGrad(y=y, dy=dy, name="op"), [(5, 3)] * 2, {"batch": 5, "channel": 3}),
    "Erf": Case(unary(raw.Erf), [(5, 3)], {"batch": 5, "channel": 3}, 1e-6),
    "Sigmoid": Case(unary(raw.Sigmoid), [(5, 3)], {"batch": 5, "channel": 3}, 1e-6),
    "Rsqrt": Case(lambda x: raw.Rsqrt(x=raw.Abs(x=x) + 1.0, name="op"), [(5, 3)], {"batch": 5, "channel": 3}, 1e-6),
    "Cast": Case(unary(raw.Cast, DstT=tf.int32), [(5,)], {"batch": 5}),
    "BroadcastTo": Case(
        lambda x: raw.BroadcastTo(input=x, shape=[5, 4, 6], name="op"), [(4, 1)], {"batch": 5, "axis1": 4, "channel": 6}
    ),
    "Fill": Case(lambda x: raw.Fill(dims=[5, 3], value=x, name="op"), [()], {"batch": 5, "channel": 3}),
    "IdentityN": Case(
        lambda x, y, z: raw.IdentityN(input=[x, y, z], name="op"), [(5, 3), (4,), (5,)], {"batch": 5, "channel": 3}
    ),
    "Pad": Case(
        lambda x: raw.Pad(input=x, paddings=[[0, 0], [1, 2], [3, 0], [0, 0]], name="op"),
        [image()],
        {"batch": 5, "channel": 6},
    ),
    "PadV2": Case(
        lambda x: raw.PadV2(input=x, paddings=[[0, 0], [1, 0]], constant_values=7.0, name="op"), [(5, 3)], {"batch": 5}
    ),
    "MirrorPad": Case(
        lambda x: raw.MirrorPad(input=x, paddings=[[0, 0], [1, 1]], mode="REFLECT", name="op"), [(5, 3)], {"batch": 5}
    ),
    "MirrorPadGrad": Case(
        lambda x: raw.MirrorPadGrad(input=x, paddings=[[0, 0], [1, 1]], mode="REFLECT", name="op"),
        [(5, 6)],
        {"batch": 5},
    ),
    "Tile": Case(lambda x: raw.Tile(input=x, multiples=[1, 2], name="op"), [(5, 3)], {"batch": 5}),
    "Slice": Case(
        lambda x: raw.Slice(input=x, begin=[0, 1, 0], size=[5, 2, -1], name="op"),
        [(5, 4, 3)],
        {"batch": 5, "channel": 3},
    ),
    "StridedSlice": Case(
        lambda x: raw.StridedSlice(
            input=x,
            begin=[0, 1, 2],
            end=[0, 4, 3],
            strides=[1, 2, 1],
            begin_mask=1,
            end_mask=1,
            shrink_axis_mask=4,
            name="op",
        ),
        [(5, 4, 3, 2)],
        {"batch": 5, "channel": 2},
    ),
    "StridedSlice backwards": Case(
        lambda x: raw.StridedSlice(input=x, begin=[0], end=[0], strides=[-1], begin_mask=1, end_mask=1, name="op"),
        [(5, 4)],
        {"channel": 4},
    ),
    "StridedSliceGrad": Case(
        lambda dy: raw.StridedSliceGrad(
            shape=[5, 4, 3, 2],
            begin=[0, 1, 2],
            end=[0, 4, 3],
            strides=[1, 2, 1],
            dy=dy,
            begin_mask=1,
            end_mask=1,
            shrink_axis_mask=4,
            name="op",
        ),
        [(5, 2, 2)],
        {"batch": 5, "channel": 2},
    ),
    "ConcatV2": Case(
        lambda x, y: raw.ConcatV2(values=[x, y], axis=2, name="op"), [(5, 3, 4), (5, 3, 2)], {"batch": 5, "axis1": 3}
    ),
    "Split": Case(
        lambda x: raw.Split(axis=1, value=x, num_split=2, name="op"), [(5, 4, 3)], {"batch": 5, "channel": 3}
    ),
    "SplitV": Case(
        lambda x: raw.SplitV(value=x, size_splits=[1, 3], axis=1, num_split=2, name="op"),
        [(5, 4, 3)],
        {"batch": 5, "channel": 3},
    ),
    "Pack": Case(lambda x, y: raw.Pack(values=[x, y], axis=1, name="op"), [(5, 3)] * 2, {"batch": 5, "channel": 3}),
    "Unpack": Case(lambda x: raw.Unpack(value=x, num=2, axis=-2, name="op"), [(5, 2, 3)], {"batch": 5, "channel": 3}),
    "Reshape": Case(
        lambda x: raw.Reshape(tensor=x, shape=[15, -1], name="op"), [(5, 3, 4)], {"batch": 5, "channel": 4}
    ),
    "Reshape in units": Case(lambda x: raw.Reshape(tensor=x, shape=[4, 9], name="op"), [(6, 6)], {"batch": 2}),
    "Reshape to heads": Case(
        lambda x: raw.Reshape(tensor=x, shape=[-1, 3, 4, 2], name="op"),
        [(2, 3, 8)],
        {"batch": 2, "axis1": 3, "axis2": 4},
    ),
    "Reshape of heads": Case(
        lambda x: raw.Reshape(tensor=x, shape=[1, 3, -1], name="op"), [(1, 3, 4, 2)], {"axis1": 3, "channel": 4}
    ),
    "Reshape to other runs": Case(
        lambda x: raw.Reshape(tensor=x, shape=[4, 9, 1, 5, 3], name="op"),
        [(6, 6, 15)],
        {"batch": 2, "axis3": 5},
    ),
    "Reshape to a row": Case(lambda x: raw.Reshape(tensor=x, shape=[1, 1, 6], name="op"), [(6,)], {"channel": 6}),
    "Reshape to a vector": Case(lambda x: raw.Reshape(tensor=x, shape=[6], name="op"), [(1, 1, 6)], {"channel": 6}),
    "Reshape of a column": Case(lambda x: raw.Reshape(tensor=x, shape=[6], name="op"), [(6, 1)], {"batch": 6}),
    "ExpandDims": Case(lambda x: raw.ExpandDims(input=x, axis=1, name="op"), [(5, 3)], {"batch": 5, "channel": 3}),
    "ExpandDims at the end": Case(lambda x: raw.ExpandDims(input=x, axis=-1, name="op"), [(5, 3)], {"batch": 5}),
    "Squeeze": Case(lambda x: raw.Squeeze(input=x, axis=[1, 2], name="op"), [(5, 1, 1, 3)], {"batch": 5, "channel": 3}),
    "Squeeze of all": Case(lambda x: raw.Squeeze(input=x, name="op"), [(5, 1, 3)], {}),
    "Transpose": Case(
        lambda x: raw.Transpose(x=x, perm=[1, 0, 2], name="op"), [(5, 5, 3)], {"batch": 5, "axis1": 5, "channel": 3}
    ),
    "Sum": Case(
        lambda x: raw.Sum(input=x, axis=[1, 2], name="op"),
        [image()],
        {"batch": 5, "axis1": 7, "axis2": 8, "channel": 6},
    ),
    "Sum of all": Case(lambda x: raw.Sum(input=x, axis=[0, 1], name="op"), [(5, 3)], {"batch": 5, "channel": 3}),
    "Sum kept": Case(
        lambda x: raw.Sum(input=x, axis=[0], keep_dims=True, name="op"), [(5, 3)], {"batch": 5, "channel": 3}
    ),
    "Mean": Case(lambda x: raw.Mean(input=x, axis=[1, 2], name="op"), [image()], SPATIAL, 1e-5),
    "Mean of the batch": Case(
        lambda x: raw.Mean(input=x, axis=[0, 1, 2], keep_dims=True, name="op"), [image()], SPATIAL, 1e-5
    ),
    "Max": Case(lambda x: raw.Max(input=x, axis=[-1], name="op"), [(5, 5, 3)], {"batch": 5, "axis1": 5}),
    "ArgMax": Case(lambda x: raw.ArgMax(input=x, dimension=-1, name="op"), [(5, 3)], {"batch": 5}),
    "Mean of halves": Case(
        lambda x: raw.Mean(input=tf.cast(x, tf.float16), axis=[0], name="op"), [(5, 3)], {"channel": 3}
    ),
    "UnsortedSegmentSum": Case(
        lambda x, i: raw.UnsortedSegmentSum(data=x, segment_ids=i, num_segments=6, name="op"),
        [(5, 3), LABELS],
        {"batch": 5, "channel": 3},
    ),
    "UnsortedSegmentSum of numbers": Case(
        lambda x, i: raw.UnsortedSegmentSum(data=x, segment_ids=i, num_segments=6, name="op"),
        [(5,), LABELS],
        {"batch": 5},
    ),
    "Bitcast": Case(lambda x: raw.Bitcast(input=x, type=tf.int32, name="op"), [(5, 3)], {"batch": 5, "channel": 3}),
    "Bitcast to bytes": Case(lambda x: raw.Bitcast(input=x, type=tf.uint8, name="op"), [(5, 3)], {}),
    "GatherV2": Case(
        lambda x, i: raw.GatherV2(params=x, indices=i, axis=0, name="op"),
        [(9, 3), np.array([[1, 8], [0, 0], [5, 4]], np.int32)],
        {"batch": 3, "axis1": 2, "channel": 3},
    ),
    "GatherV2 of columns": Case(
        lambda x, i: raw.GatherV2(params=x, indices=i, axis=1, name="op"), [(5, 9), LABELS], {}
    ),
    "OneHot": Case(
        lambda i: raw.OneHot(indices=i, depth=7, on_value=1.0, off_value=0.0, name="op"), [LABELS], {"batch": 5}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_give_what_the_whole_gives(name: str) -> None:
    check(CASES[name])


@functools.cache
def differentiates_dilated() -> bool:
    """Whether there are gradients of dilated convolutions here: of TensorFlow's CPU kernels only oneDNN's are."""
    with tf.Graph().as_default() as graph:
        x = tf.constant(tensor((1, 6, 6, 1), 1))
        y = tf.nn.conv2d(x, tf.constant(tensor((2, 2, 1, 1), 2)), 1, "VALID", dilations=2)
        (gradient,) = tf.gradients(y, [x])
    try:
        with tf.compat.v1.Session(graph=graph, config=session_config()) as session:
            session.run(gradient)
    except tf.errors.InvalidArgumentError:
        return False
    return True


@pytest.mark.parametrize("seed", range(12))
def test_convolutions_and_their_gradients_in_all_forms(seed: int) -> None:
    """Odd sizes, strides, paddings and dilations; each operator is split along another dimension."""
    draw = np.random.default_rng(seed)

    def some(low: int, high: int) -> int:
        return int(draw.integers(low, high + 1))

    batch, rows, columns, inputs, outputs = some(2, 6), some(6, 11), some(6, 11), some(2, 5), some(2, 5)
    stride, dilation = [(1, 1), (2, 1), (3, 1), (1, 2 if differentiates_dilated() else 1)][seed % 4]
    padding: Any = ["SAME", "VALID", [[0, 0], [some(0, 2), some(0, 2)], [some(0, 2), some(0, 2)], [0, 0]]][seed % 3]
    if dilation > 1 and not isinstance(padding, str):
        padding = "SAME"
    depthwise = seed >= 8
    with tf.Graph().as_default() as graph:
        x = tf.constant(tensor((batch, rows, columns, inputs), 1))
        w = tf.constant(tensor((some(1, 3), some(1, 3), inputs, outputs), 2))
        operation = tf.nn.depthwise_conv2d if depthwise else tf.nn.conv2d
        y = operation(x, w, [1, stride, stride, 1], padding, dilations=[dilation] * 2, name="y")
        results = [y, *tf.gradients(y, [x, w], tf.constant(tensor(y.shape, 3)))]
    definition = graph.as_graph_def()
    refs = [Ref.parse(result.name.removesuffix(":0")) for result in results]
    splits = {}
    for ref in refs:
        options = rules_of(graph, ref.node)
        assert options or dilation > 1
        if options:
            rule = options[draw.integers(len(options))]
            splits[ref.node] = Split(rule.dimension, some(2, min(4, rule.length)))
    split = split_operators(definition, splits, infer_shapes(definition, {}, {}), refs)
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="whole")
        tf.graph_util.import_graph_def(split.graph, name="split")
        fetches = [(f"whole/{ref}:0", f"split/{split.joined.get(ref, ref)}:0") for ref in refs]
        with tf.compat.v1.Session(graph=graph, config=session_config()) as session:
            for whole, joined in session.run(fetches):
                np.testing.assert_array_equal(joined, whole)


def test_asking_how_an_operator_can_be_split_leaves_it_as_it_was() -> None:
    """An attribute of a newer version of the operator was added to it by looking it up."""
    node = make_node("op", "BatchMatMulV2", [Ref("x"), Ref("y")], attrs={"T": dtype_attr(types_pb2.DT_FLOAT)})
    before = node.SerializeToString(deterministic=True)
    assert split_rules(node, [(2, 5, 7), (2, 7, 4)], [(2, 5, 4)])
    assert node.SerializeToString(deterministic=True) == before


def test_every_operator_is_tried() -> None:
    tried = {name.split()[0] for name in CASES}
    older = {
        "BatchMatMul",
        "FusedBatchNorm",
        "FusedBatchNormV2",
        "FusedBatchNormGrad",
        "FusedBatchNormGradV2",
        "Gather",
    }
    same = {"ConjugateTranspose", "Min", "Prod", "All", "Any", "ArgMin"}
    assert OPERATORS.keys() - tried - older - same <= set(ELEMENTWISE)


def test_elementwise_operators_are_elementwise() -> None:
    generator = np.random.default_rng(0)
    splits, names = {}, []
    with tf.Graph().as_default() as graph:
        for op in ELEMENTWISE:
            definition = op_def_registry.get(op)
            integer = op.startswith(("Bitwise", "Truncate"))
            dtype = tf.bool if op.startswith("Logical") else tf.int32 if integer else tf.float32
            values = [
                tf.cast(tf.constant(generator.uniform(0.1, 0.9, (5, 4)) * (9 if integer else 1)) + integer, dtype)
                for _ in definition.input_arg
            ]
            arguments: dict[str, Any] = {
                arg.name: value for arg, value in zip(definition.input_arg, values, strict=True)
            }
            if op == "AddN":
                arguments = {"inputs": values * 2}
            elif op == "Cast":
                arguments["DstT"] = tf.float64
            elif op.startswith("Select"):
                arguments[definition.input_arg[0].name] = values[0] > 0.5
            getattr(raw, op)(**arguments, name=f"op_{op}")
            splits[f"op_{op}"] = Split("batch" if len(op) % 2 else "channel", 3)
            names.append(Ref(f"op_{op}"))
        definition = graph.as_graph_def()
    split = split_operators(definition, splits, infer_shapes(definition, {}, {}), names)
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="whole")
        tf.graph_util.import_graph_def(split.graph, name="split")
        fetches = [(f"whole/{ref}:0", f"split/{split.joined[ref]}:0") for ref in names]
        with tf.compat.v1.Session(graph=graph, config=session_config()) as session:
            for ref, (whole, joined) in zip(names, session.run(fetches), strict=True):
                np.testing.assert_allclose(joined, whole, rtol=1e-6, err_msg=str(ref))


def test_no_operator_is_stateful_or_unknown() -> None:
    for op in OPERATORS:
        assert op_def_registry.get(op) is not None, op
        assert not is_stateful(op), op
    for op in ("RandomUniform", "StatelessRandomUniformV2", "ReadVariableOp", "AssignAddVariableOp", "PartitionedCall"):
        assert op not in OPERATORS


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
    node = make_node("op", "MaxPool", [Ref("x")], attrs={"data_format": "NCHW"})
    node.attr["ksize"].list.i.extend([1, 1, 2, 2])
    assert rule(split_rules(node, [(4, 6, 9, 9)], [(4, 6, 4, 4)]), "channel").output_axes == (1,)


@pytest.mark.parametrize("shapes", [(None, (4, 3)), ((None, 3), (4, 3)), ((4, 3), None), ((4, 3), (4, None))])
def test_nothing_is_known_without_shapes(shapes: Any) -> None:
    node = make_node("op", "Relu", [Ref("x")])
    assert split_rules(node, [shapes[0]], [shapes[1]]) == ()


def test_unknown_operators_and_short_dimensions() -> None:
    assert split_rules(make_node("op", "NoSuchOp", [Ref("x")]), [(4,)], [(4,)]) == ()
    assert split_rules(make_node("op", "Relu", [Ref("x")]), [(1, 1)], [(1, 1)]) == ()
    assert split_rules(make_node("op", "Relu", [Ref("x")]), [(0, 0)], [(0, 0)]) == ()
    assert split_rules(make_node("op", "Relu", [Ref("x")]), [()], [()]) == ()


def test_axes_that_shapes_tell_need_no_constants() -> None:
    def dimensions(
        op: str, before: tuple[int, ...], after: tuple[int, ...], **attrs: Any
    ) -> dict[str, tuple[Any, Any]]:
        node = make_node("op", op, [Ref("x"), Ref("axes")], attrs=attrs)
        return {r.dimension: (r.input_axes[0], r.output_axes[0]) for r in split_rules(node, [before, (2,)], [after])}

    assert dimensions("Mean", (4, 8, 8, 6), (4, 6)) == {"batch": (0, 0), "channel": (3, 1)}
    assert dimensions("Mean", (4, 8, 8, 4), (4, 4)) == {"batch": (0, 0), "channel": (3, 1)}
    assert dimensions("Mean", (4, 8, 8, 4), (4,)) == {}
    assert dimensions("Sum", (4, 8, 8, 6), (6,)) == {
        "batch": (0, None),
        "axis1": (1, None),
        "axis2": (2, None),
        "channel": (3, 0),
    }
    assert dimensions("Sum", (4, 8), (4, 8)) == {"batch": (0, 0), "channel": (1, 1)}
    assert dimensions("Mean", (4, 8, 6), (4, 1, 6), keep_dims=True) == {"batch": (0, 0), "channel": (2, 2)}
    assert dimensions("Transpose", (4, 5, 5, 6), (4, 5, 6, 5)) == {"batch": (0, 0), "axis2": (3, 2)}
    assert dimensions("Mean", (4, 5), (7,)) == {}


def test_cuts_are_equal_if_and_only_if_their_parts_are() -> None:
    for elements in range(2, 25):
        cuts: dict[tuple[int, ...], Cut] = {}
        for length in (length for length in range(2, elements + 1) if elements % length == 0):
            for parts in range(2, length + 1):
                cut = Cut.of(0, parts, length)
                sizes = cut.sizes(elements)
                assert sum(sizes) == elements and len(sizes) == parts and min(sizes) > 0
                assert cuts.setdefault(sizes, cut) == cut
        assert len(set(cuts.values())) == len(set(map(str, cuts.values()))) == len(cuts)


def test_what_cant_be_split_is_told() -> None:
    rules = (SplitRule("batch", 4, (0,), (0,)), SplitRule("channel", 3, (1,), (1,)))
    assert chosen_rule("op", rules, Split("channel", 3)) is rules[1]
    with pytest.raises(ValueError, match=r"'op' can't be split along 'row', only along batch \(4\), channel \(3\)"):
        chosen_rule("op", rules, Split("row", 2))
    with pytest.raises(ValueError, match="into 4 parts: it has length 3; take 2 to 3 parts"):
        chosen_rule("op", rules, Split("channel", 4))
