"""What follows from shapes alone becomes constants."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_variables_after, pair, use_float64
from step_programs import of_model
from tensorflow.core.framework import types_pb2

import dapple_tf as dapple
from dapple_tf.operators.step_placer import flat_step
from graph_passes.analysis.constant_folding import Folded, fold_shapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, Ref, function_names
from graph_passes.ir.program import Layout, Program, Roles, Slice, Step
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import constant_value
from graph_passes.passes.fold_shapes import FoldShapes


def placeholder(name: str = "x", shape: tuple[int | None, ...] = (6, 4)) -> tf.Tensor:
    return tf.compat.v1.placeholder(tf.float32, shape, name=name)


def folded(graph: GraphDef, *kept: str) -> Folded:
    before = graph.SerializeToString(deterministic=True)
    folding = fold_shapes(graph, infer_shapes(graph, {}, {}), kept)
    assert graph.SerializeToString(deterministic=True) == before
    shapes = infer_shapes(folding.graph, {}, {})
    for node in folding.graph.node:
        if node.op == "Const":
            assert folding.shapes[Ref(node.name)] == shapes[Ref(node.name)]
    return folding


def values(folding: Folded) -> dict[str, list[object]]:
    return {node.name: constant_value(node).tolist() for node in folding.graph.node if node.op == "Const"}


def test_shapes_and_what_is_computed_from_them() -> None:
    with tf.Graph().as_default() as graph:
        x = placeholder()
        with tf.device("/device:CPU:0"):
            shape = tf.raw_ops.Shape(input=tf.nn.relu(x, name="h"), name="shape")
            rows = tf.stack([shape[0] * 2, shape[1] // 2], name="rows")
        tf.reshape(x, rows, name="y")
    definition = graph.as_graph_def()
    next(node for node in definition.node if node.name == "rows").attr["_dapple_layer"].s = b"a"
    folding = folded(definition)
    assert values(folding) == {"rows": [12, 2]}
    nodes = Graph(folding.graph).nodes
    assert list(nodes) == ["x", "h", "rows", "y"] and list(nodes["y"].input) == ["x", "rows"]
    assert nodes["rows"].device == "/device:CPU:0" and nodes["rows"].attr["_dapple_layer"].s == b"a"


def test_nodes_with_several_outputs() -> None:
    with tf.Graph().as_default() as graph:
        x, b = placeholder(), placeholder("b", (4,))
        one, other = tf.raw_ops.ShapeN(input=[x, b], name="shapes")
        left, right = tf.raw_ops.BroadcastGradientArgs(s0=one, s1=other, name="axes")
        tf.raw_ops.Sum(input=x, axis=left, name="dx")
        tf.raw_ops.Sum(input=x, axis=right, name="db")
        tf.raw_ops.Reshape(tensor=b, shape=other, name="same")
    folding = folded(graph.as_graph_def())
    assert values(folding) == {"axes": [], "axes/output1": [0], "shapes/output1": [4]}
    assert list(Graph(folding.graph).nodes["db"].input) == ["x", "axes/output1"]
    assert list(Graph(folding.graph).nodes["same"].input) == ["b", "shapes/output1"]
    assert infer_shapes(folding.graph, {}, {})[Ref("db")] == (4,)


def test_results_may_become_constants() -> None:
    """A second output has no place under its own name: it is told where it went."""
    with tf.Graph().as_default() as graph:
        x, b = placeholder(), placeholder("b", (4,))
        tf.raw_ops.ShapeN(input=[x, b], name="shapes")
        tf.nn.relu(x, name="h")
    definition = graph.as_graph_def()
    results = [Ref("shapes"), Ref("shapes", 1), Ref("h")]
    folding = fold_shapes(definition, infer_shapes(definition, {}, {}), results=results)
    assert values(folding) == {"shapes": [6, 4], "shapes/output1": [4]}
    assert folding.moved == {Ref("shapes"): Ref("shapes"), Ref("shapes", 1): Ref("shapes/output1")}
    assert "shapes" not in values(folded(definition))


@pytest.mark.parametrize("op, value", [("Size", 24), ("Rank", 2)])
def test_sizes_and_ranks(op: str, value: int) -> None:
    with tf.Graph().as_default() as graph:
        x = placeholder()
        count = getattr(tf.raw_ops, op)(input=x, name="count", **({"out_type": tf.int64} if op == "Size" else {}))
        tf.raw_ops.RealDiv(x=x, y=tf.cast(count, tf.float32, name="divisor"), name="y")
    assert values(folded(graph.as_graph_def())) == {"divisor": float(value)}


def test_what_isnt_known_is_large_or_has_effects_stays() -> None:
    with tf.Graph().as_default() as graph:
        tf.raw_ops.Shape(input=placeholder("open", (None, 4)), name="unknown")
        large = tf.fill(tf.raw_ops.Shape(input=placeholder("big", (100, 100)), name="dims"), 1.0, name="large")
        tf.random.normal(tf.raw_ops.Shape(input=placeholder(), name="drawn"), name="random")
        tf.nn.relu(large, name="y")
    folding = folded(graph.as_graph_def(), "unknown")
    assert values(folding)["dims"] == [100, 100] and values(folding)["drawn"] == [6, 4]
    nodes = Graph(folding.graph).nodes
    assert nodes["large"].op == "Fill" and nodes["unknown"].op == "Shape"
    assert any(node.op == "RandomStandardNormal" for node in nodes.values())


def test_what_is_waited_for_or_named_stays_and_constants_wait_for_nothing() -> None:
    with tf.Graph().as_default() as graph:
        x = placeholder()
        with tf.control_dependencies([x]):
            one, two, three = (tf.raw_ops.Shape(input=x, name=name) for name in ("one", "two", "three"))
        with tf.control_dependencies([one]):
            tf.no_op(name="end")
        assert two is not None and three is not None
    folding = folded(graph.as_graph_def(), "two")
    assert [(node.name, node.op, list(node.input)) for node in folding.graph.node] == [
        ("x", "Placeholder", []),
        ("one", "Const", []),
        ("two", "Const", []),
        ("end", "NoOp", ["^one"]),
    ]


def test_the_pass_keeps_what_the_step_names() -> None:
    with tf.Graph().as_default() as graph:
        x = placeholder()
        count = tf.raw_ops.Size(input=x, name="size")
        tf.cast(count, tf.float32, name="loss")
        tf.no_op(name="train")
    step = Step(Layout((("",),), 6, 6, 1), feeds={Ref("x"): Ref("x")}, loss=Ref("loss"), train="train")
    program = Program(graph.as_graph_def(), Roles((), (), Slice(Ref("x"), Ref("x"), Ref("x"))), step=step)
    rewritten = FoldShapes({}).run(program)
    assert [node.name for node in rewritten.graph.node] == ["x", "loss", "train"]
    assert rewritten.step is step and np.all(constant_value(rewritten.graph.node[1]) == 24.0)


def test_a_value_that_cannot_be_computed_is_told_by_its_node() -> None:
    """Values are computed in a graph with other names, which the error had."""
    with tf.Graph().as_default() as graph:
        size = tf.raw_ops.Size(input=placeholder(), name="size")
        tf.cast(tf.raw_ops.FloorDiv(x=size, y=size - size, name="quotient"), tf.float32, name="y")
    with pytest.raises(PassError, match=r"node 'quotient' can't compute FloorDiv .* Integer division by zero"):
        folded(graph.as_graph_def(), "y")


def recurrent(kind: type[keras.layers.RNN], **options: float) -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 4, mask_zero=True)(tokens)
    x = kind(4, return_sequences=True, name="first", **options)(x)
    model = keras.Model(tokens, keras.layers.Dense(2)(kind(3, **options)(x)))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def pops(graph: GraphDef) -> list[int]:
    """The dtypes of what a step's functions pop from lists."""
    nodes = {function.signature.name: function.node_def for function in graph.library.function}
    dtypes, done, pending = [], set(), [*graph.node]
    while pending:
        node = pending.pop()
        dtypes += [node.attr["element_dtype"].type] if node.op == "TensorListPopBack" else []
        called = set(function_names(node)) - done
        done |= called
        pending += [each for name in called for each in nodes[name]]
    return dtypes


PLAN = dapple.Plan.manual(["first"], [[0], [1]], 2, 8)
CELLS = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU, "simple": keras.layers.SimpleRNN}


@pytest.mark.parametrize("options", [{}, {"recurrent_dropout": 0.3, "seed": 3}], ids=["", "dropout"])
@pytest.mark.parametrize("kind", [keras.layers.LSTM, keras.layers.GRU])
def test_gradients_of_loops_pop_no_integers(kind: type[keras.layers.RNN], options: dict[str, float]) -> None:
    """Shapes and lengths are constant there, and positions in the sequence are counted down; placed operators' too."""
    cluster = dapple.Cluster.local(2, kind="cpu")
    staged = of_model(recurrent(kind, **options), PLAN, cluster)
    placed = of_model(recurrent(kind, **options), dapple.Plan.by_operators(2, 8), cluster)
    for program in (staged, flat_step(placed, [(8, 5), (8, 2)]).program):
        popped = pops(program.graph)
        assert popped and types_pb2.DT_INT32 not in popped


@pytest.mark.parametrize("kind", CELLS)
def test_folded_loops_train_as_plain_keras(kind: str) -> None:
    """A smaller last batch has functions of its own."""
    use_float64()
    own, plain = pair(lambda: recurrent(CELLS[kind]))
    pipelined, rng = dapple.transform(own, dapple.Cluster.local(2, kind="cpu"), PLAN), np.random.default_rng(0)
    x, y = rng.integers(0, 7, (12, 5)), rng.normal(size=(12, 2))
    for size in (8, 4, 8):
        assert_same_variables_after(1, pipelined, plain, x[:size], y[:size])
