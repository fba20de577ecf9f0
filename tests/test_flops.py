"""Floating-point operations and bytes of operators, against counts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.operators import flops
from dapple_tf.operators.flops import Work, work
from dapple_tf.operators.rooflines import P100
from dapple_tf.operators.signatures import Fingerprints, OpSignature, TensorType, output_dtype_names, signature
from graph_passes.ir.graph import GraphDef, make_node
from graph_passes.ir.tensorflow_bridge import op_def, output_dtypes


def of(text: str) -> Work:
    return work(OpSignature.parse(text))


def conv(op: str, inputs: str, outputs: str, strides: str = "1:1:1:1", dilations: str = "1:1:1:1") -> Work:
    return of(f"{op} dilations={dilations} strides={strides} | {inputs} | {outputs}")


_IMAGES, _FILTER, _OUT = "float32[2,8,8,16]", "float32[3,3,16,32]", "float32[2,8,8,32]"
_CONV_FLOPS = 2 * (2 * 8 * 8 * 32) * (3 * 3 * 16)
_CONV_BYTES = 4 * (2 * 8 * 8 * 16 + 3 * 3 * 16 * 32 + 2 * 8 * 8 * 32)


def test_a_convolution_and_its_gradients_do_the_same_operations() -> None:
    shape = "int32[4]"
    forward = conv("Conv2D", f"{_IMAGES},{_FILTER}", _OUT)
    by_input = conv("Conv2DBackpropInput", f"{shape},{_FILTER},{_OUT}", _IMAGES)
    by_filter = conv("Conv2DBackpropFilter", f"{_IMAGES},{shape},{_OUT}", _FILTER)
    assert forward == ("winograd", _CONV_FLOPS, _CONV_BYTES, 144, "float32")
    assert by_input == ("winograd", _CONV_FLOPS, _CONV_BYTES + 16, 144, "float32")
    assert by_filter == ("winograd_filter", _CONV_FLOPS, _CONV_BYTES + 16, 144, "float32")


@pytest.mark.parametrize(
    ("inputs", "outputs", "options"),
    [
        ("float32[2,8,8,3],float32[3,3,3,32]", _OUT, {}),  # few channels
        (f"{_IMAGES},{_FILTER}", "float32[2,4,4,32]", {"strides": "1:2:2:1"}),
        (f"{_IMAGES},{_FILTER}", _OUT, {"dilations": "1:2:2:1"}),
        (f"{_IMAGES},float32[1,1,16,32]", _OUT, {}),
    ],
)
def test_winograd_is_for_3x3_windows_of_many_channels(inputs: str, outputs: str, options: dict[str, str]) -> None:
    assert conv("Conv2D", inputs, outputs, **options).kind == "conv"


def test_depthwise_convolutions() -> None:
    filters, out = "float32[5,5,16,1]", "float32[2,8,8,16]"
    flops = 2 * (2 * 8 * 8 * 16) * 25
    assert conv("DepthwiseConv2dNative", f"{_IMAGES},{filters}", out)[:2] == ("depthwise", flops)
    backward = conv("DepthwiseConv2dNativeBackpropInput", f"int32[4],{filters},{out}", _IMAGES)
    assert backward[:2] == ("depthwise", flops)
    backward = conv("DepthwiseConv2dNativeBackpropFilter", f"{_IMAGES},int32[4],{out}", filters)
    assert backward[:2] == ("depthwise_filter", flops)


@pytest.mark.parametrize(
    ("text", "flops", "depth"),
    [
        ("MatMul transpose_a=false transpose_b=false | float32[6,5],float32[5,7] | float32[6,7]", 2 * 6 * 5 * 7, 5),
        ("MatMul transpose_a=true transpose_b=false | float32[5,6],float32[5,7] | float32[6,7]", 2 * 6 * 5 * 7, 5),
        ("BatchMatMulV2 adj_x=true adj_y=true | float16[3,5,6],float16[3,7,5] | float16[3,6,7]", 2 * 3 * 6 * 5 * 7, 5),
        ("Einsum equation=abc,cde->abde | float32[2,3,4],float32[4,5,6] | float32[2,3,5,6]", 2 * 2 * 3 * 4 * 5 * 6, 4),
        ("Einsum equation=...bc,...cd->...bd | float32[9,2,3],float32[9,3,4] | float32[9,2,4]", 2 * 9 * 2 * 3 * 4, 3),
    ],
)
def test_matrix_products(text: str, flops: int, depth: int) -> None:
    op_work = of(text)
    assert (op_work.kind, op_work.flops, op_work.depth) == ("matmul", flops, depth)
    assert op_work.dtype == ("float16" if "float16" in text else "float32")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("AddV2 | float32[10,20],float32[20] | float32[10,20]", 4 * (200 + 20 + 200)),
        ("Mean keep_dims=false | float32[10,20],int32[1] | float32[20]", 4 * (200 + 1 + 20)),
        ("Cast Truncate=false | float32[100] | float16[100]", 600),
        ("Transpose | float32[10,20],int32[2] | float32[20,10]", 2 * 800),
        ("ConcatV2 | float32[10,5],float32[10,15],int32[] | float32[10,20]", 2 * 800),
        ("SplitV | float32[10,20],int64[2],int32[] | float32[10,5],float32[10,15]", 2 * 800),
        ("GatherV2 batch_dims=0 | float32[1000,8],int32[30],int32[] | float32[30,8]", 2 * 4 * 240 + 120),
        ("ResourceScatterAdd | resource[],int32[30],float32[30,8] | ", 3 * 4 * 240 + 120),
        ("Fill | int32[2],float32[] | float32[30,8]", 960),
        ("AssignAddVariableOp validate_shape=false | resource[],float32[100] | ", 1200),
        ("ResourceApplyMomentum | resource[],resource[],float32[],float32[100],float32[] | ", 2000),
        ("ResourceApplyAdam | resource[],resource[],resource[],float32[],float32[100] | ", 2800),
        ("MaxPool ksize=1:2:2:1 | float32[2,8,8,4] | float32[2,4,4,4]", 4 * (512 + 128)),
        ("FusedBatchNormV3 | float32[2,8,8,4],float32[4],float32[4] | float32[2,8,8,4],float32[4]", 3 * 4 * 512),
        ("SomethingNew | float32[100] | float32[100]", 800),
    ],
)
def test_operators_bound_by_memory(text: str, size: int) -> None:
    op_work = of(text)
    assert op_work.kind == ("pool" if "Pool" in text else "memory")
    assert op_work.bytes == size


@pytest.mark.parametrize(
    "text",
    [
        "Reshape | float32[10,20],int32[1] | float32[200]",
        "ReadVariableOp | resource[] | float32[10,20]",
        "Shape | float32[10,20] | int32[2]",
        "NoOp |  | ",
        "StridedSlice begin_mask=0 | int32[4],int32[1],int32[1],int32[1] | int32[]",  # a shape, on the host
        "Mul | int32[],int32[] | int32[]",
    ],
)
def test_operators_without_a_kernel(text: str) -> None:
    assert of(text) == Work("free", 0.0, 0.0)


@pytest.mark.parametrize("shape", [None, (), (None,), (None, 0, None, 4)])
def test_no_shape_is_too_little_to_go_by(shape: tuple[int | None, ...] | None) -> None:
    tensor = TensorType("float32", shape)
    for op in flops._RULES:
        op_work = work(OpSignature(op, (("equation", "abc,cd->abd"),), (tensor,) * 4, (tensor,)))
        assert all(0 <= value < math.inf for value in (op_work.flops, op_work.bytes, op_work.depth)), op
        assert P100.seconds(op_work) < 1


# ---- signatures


def test_a_signature_is_the_same_as_its_text() -> None:
    tensors = (TensorType("float32", (4, None)), TensorType("int32", ()), TensorType("variant", None))
    made = OpSignature("Einsum", (("equation", "ab, b->a | x=%"),), tensors, ())
    assert OpSignature.parse(str(made)) == made
    assert str(made).endswith("float32[4,?],int32[],variant[*] | ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Relu",
        "Relu | float32[2]",
        "Relu | float32[2] | float32",
        "Re lu | x[2] | y[2]",
        "R | a[1]b[2] | c[]",
        "R | a[1",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="isn't"):
        OpSignature.parse(text)


def test_names_seeds_and_hints_are_no_part_of_a_signature() -> None:
    attrs = {"transpose_a": True, "_dapple_stage": 3, "grad_a": True}
    made = signature(make_node("anything", "MatMul", attrs=attrs), [], [])
    assert made == OpSignature("MatMul", (("transpose_a", "true"), ("transpose_b", "false")), (), ())
    assert signature(make_node("n", "RandomUniform", attrs={"seed": 7}), [], []).attrs == ()


def test_a_default_is_the_same_as_the_value_written_out() -> None:
    bare, full = make_node("n", "Conv2D"), make_node("n", "Conv2D", attrs={"data_format": "NHWC"})
    assert signature(bare, [], []) == signature(full, [], [])


def _graph_with_loop(steps: int, name: str) -> GraphDef:
    with tf.Graph().as_default() as graph:
        start = tf.zeros([4])
        tf.while_loop(lambda i, x: i < steps, lambda i, x: (i + 1, x * 2.0), [0, start], name=name)
        return graph.as_graph_def()


def test_functions_are_told_apart_by_what_they_compute() -> None:
    def of_loop(graph: GraphDef) -> str:
        loop = next(node for node in graph.node if node.op == "StatelessWhile")
        return Fingerprints(graph.library).of(loop)

    one, same, other = (_graph_with_loop(*given) for given in ((5, "one"), (5, "two"), (6, "one")))
    assert of_loop(one) == of_loop(same) != of_loop(other)
    assert Fingerprints(one.library).of(make_node("n", "Relu")) == ""


def test_dtypes_of_outputs_are_as_the_bridge_tells_them() -> None:
    from graph_passes.ir.graph import dtype_name

    with tf.Graph().as_default() as graph:
        parts = tf.split(tf.zeros([4, 2], tf.float16), 2)
        tf.raw_ops.IdentityN(input=[parts[0], tf.constant(np.int64(3))])
        tf.nn.top_k(tf.cast(parts[1], tf.float64))
    for node in graph.as_graph_def().node:
        assert list(output_dtype_names(node)) == [dtype_name(dtype) for dtype in output_dtypes(node)], node.op
    assert op_def("TopKV2").output_arg
