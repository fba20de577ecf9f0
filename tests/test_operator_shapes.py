"""Shapes behind loops, branches, calls and lists, for a batch size that wasn't known when the graph was traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.function_work import FunctionWork
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import Topology
from graph_passes.analysis.operator_shapes import ShapeInference, operator_shapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import Shape


def traced(function: Callable[..., object], *shapes: tuple[int | None, ...]) -> GraphDef:
    """The graph of a function of float32 tensors, called ``x0``, ``x1``, ..."""
    specs = [tf.TensorSpec(shape, tf.float32, name=f"x{number}") for number, shape in enumerate(shapes)]
    return tf.function(function).get_concrete_function(*specs).graph.as_graph_def()


def unknown(shapes: dict[Ref, Shape | None]) -> set[Ref]:
    return {ref for ref, shape in shapes.items() if shape is None or None in shape}


def of_op(graph: GraphDef, shapes: dict[Ref, Shape | None], op: str, output: int = 0) -> list[Shape | None]:
    return [shapes[Ref(node.name, output)] for node in graph.node if node.op == op]


def test_a_loop_keeps_the_shapes_that_its_body_keeps() -> None:
    def loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        _, y = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h @ w), [0, x])
        return tf.nn.relu(y)

    graph = traced(loop, (None, 8), (8, 8))
    given = {"x0": (32, 8)}
    assert of_op(graph, infer_shapes(graph, given, {}), "Relu") == [(None, 8)]
    shapes = operator_shapes(graph, given)
    assert of_op(graph, shapes, "Relu") == [(32, 8)]
    assert unknown(shapes) == set()
    assert set(shapes) == set(infer_shapes(graph, given, {}))


def test_lists_of_a_growing_tensor_have_what_all_elements_have_in_common() -> None:
    """The gradient reads what each round has pushed: first 32 rows, then 64."""

    def gradient(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        invariants = [tf.TensorShape([]), tf.TensorShape([None, 8])]
        with tf.GradientTape() as tape:
            tape.watch(w)
            grown = lambda i, h: (i + 1, tf.concat([h, h @ w], 0))  # noqa: E731
            _, y = tf.while_loop(lambda i, h: i < 3, grown, [0, x], shape_invariants=invariants)
        return tape.gradient(y, w)

    graph = traced(gradient, (None, 8), (8, 8))
    elements = ShapeInference(graph.library).of(graph, {"x0": (32, 8)}).elements
    assert (32, 8) not in elements.values() and (None, 8) in elements.values()


def test_a_loop_whose_body_grows_a_tensor_does_not() -> None:
    def loop(x: tf.Tensor) -> tf.Tensor:
        invariants = [tf.TensorShape([]), tf.TensorShape([None, 8])]
        _, y = tf.while_loop(
            lambda i, h: i < 3, lambda i, h: (i + 1, tf.concat([h, h], 0)), [0, x], shape_invariants=invariants
        )
        return tf.nn.relu(y)

    graph = traced(loop, (None, 8))
    assert of_op(graph, operator_shapes(graph, {"x0": (32, 8)}), "Relu") == [(None, 8)]


def test_branches_and_calls() -> None:
    @tf.function
    def doubled(x: tf.Tensor) -> tf.Tensor:
        return x * 2.0

    def branch(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        large = tf.reduce_sum(y) > 0
        same = tf.cond(large, lambda: x + 1.0, lambda: doubled(x))
        other = tf.cond(large, lambda: x, lambda: tf.concat([x, x], 0))
        return tf.nn.relu(same), tf.nn.relu(other)

    graph = traced(branch, (None, 8), (2,))
    assert of_op(graph, operator_shapes(graph, {"x0": (32, 8)}), "Relu") == [(32, 8), (None, 8)]


def recurrent() -> GraphDef:
    """Forward and backward of two recurrent layers, as they are captured for an unknown batch size."""
    model = keras.Sequential(
        [
            keras.Input((10, 6)),
            keras.layers.GRU(8, return_sequences=True),
            keras.layers.SimpleRNN(4),
            keras.layers.Dense(3),
        ]
    )
    variables = [variable.value for variable in model.trainable_variables]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, variables)

    return captured(tf.function(step), tf.TensorSpec((None, 10, 6), tf.float32, name="x0"), variables)


def captured(function: Any, spec: tf.TensorSpec, variables: Sequence[tf.Variable]) -> GraphDef:
    """A traced graph with handles of its own where it captures variables."""
    graph = function.get_concrete_function(spec).graph
    definition = graph.as_graph_def()
    captured = {inside.op.name: outside for outside, inside in graph.captures if outside.dtype == tf.resource}
    for node in definition.node:
        if node.name in captured:
            variable = next(variable for variable in variables if variable.handle is captured[node.name])
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
            node.attr["shared_name"].s = node.name.encode()
    return definition


@pytest.mark.slow
def test_recurrent_layers_and_their_gradients_are_known_to_the_last_matrix_product() -> None:
    graph = recurrent()
    given = {"x0": (32, 10, 6)}
    before, after = unknown(infer_shapes(graph, given, {})), operator_shapes(graph, given)
    assert len(before) > 30
    ops = {node.name: node.op for node in graph.node}
    # What is left are shapes of shapes, and gradients of states that nobody reads.
    assert {ops[ref.node] for ref in unknown(after)} <= {
        *("BroadcastGradientArgs", "VariableShape", "StatelessWhile", "While", "Identity")
    }
    assert set(of_op(graph, after, "TensorListStack")) == {(10, 32, 8), (1, 32, 4)}
    work = FunctionWork(graph, OperatorCosts(), after)
    loops = [node for node in graph.node if "While" in node.op]
    assert len(loops) == 4 and {work.rounds(node) for node in loops} == {10}


@pytest.mark.parametrize("masked", [False, True])
def test_recurrent_layers_of_open_lengths_give_as_many_steps_as_they_take(masked: bool) -> None:
    """The length of a list that a loop fills was lost, so that models had to be run to find it."""
    x = keras.Input((None,), dtype="int32")
    h = keras.layers.Embedding(9, 4, mask_zero=masked)(x)
    h = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True))(h)
    model = keras.Model(x, keras.layers.GRU(5, return_sequences=True)(h))
    function = tf.function(lambda x: tf.nn.relu(model(x, training=False)))
    variables = [variable.value for variable in model.variables]
    graph = captured(function, tf.TensorSpec((None, None), tf.int32, name="x0"), variables)
    assert of_op(graph, operator_shapes(graph, {"x0": (7, 11)}), "Relu") == [(7, 11, 5)]


def test_a_list_that_a_loop_makes_longer_has_no_known_length() -> None:
    def growing(x: tf.Tensor) -> tf.Tensor:
        made = tf.TensorArray(tf.float32, tf.shape(x)[0], dynamic_size=True, element_shape=(8,))
        _, made = tf.while_loop(lambda i, a: i < 2 * tf.shape(x)[0], lambda i, a: (i + 1, a.write(i, x[0])), [0, made])
        return tf.nn.relu(made.stack())

    graph = traced(growing, (None, 8))
    assert of_op(graph, operator_shapes(graph, {"x0": (3, 8)}), "Relu") == [(None, 8)]


def test_a_list_of_unequal_tensors_has_only_what_they_have_in_common() -> None:
    def unequal(x: tf.Tensor) -> tf.Tensor:
        made = tf.TensorArray(tf.float32, 2, infer_shape=False).write(0, x).write(1, tf.concat([x, x], 0))
        return tf.nn.relu(made.read(0))

    graph = traced(unequal, (None, 8))
    assert of_op(graph, operator_shapes(graph, {"x0": (3, 8)}), "Relu") == [(None, 8)]


def test_loops_cost_as_much_as_their_bodies_do_for_this_batch() -> None:
    def scan(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        steps = tf.TensorArray(tf.float32, 5).unstack(x)
        made = tf.TensorArray(tf.float32, 5)
        loop = tf.while_loop(lambda i, a: i < 5, lambda i, a: (i + 1, a.write(i, steps.read(i) @ w)), [0, made])
        return loop[1].stack()

    graph = traced(scan, (5, None, 64), (64, 64))

    def seconds(samples: int) -> float:
        shapes = operator_shapes(graph, {"x0": (5, samples, 64)})
        assert of_op(graph, shapes, "TensorListStack") == [(5, samples, 64)]
        topology = Topology(("CPU:0",), *3 * [None])  # type: ignore[arg-type]
        op_graph = build_op_graph(graph, topology, OperatorCosts(), shapes)
        return float(sum(op_graph.seconds[["While" in op for op in op_graph.ops], 0]))

    assert seconds(40_000) > 20 * seconds(400)


def test_shapes_that_contradict_each_other_are_refused() -> None:
    graph = traced(lambda x, w: x @ w, (None, None), (8, 8))
    with pytest.raises(PassError, match="can't compute MatMul of tensors of shapes"):
        operator_shapes(graph, {"x0": (32, 7)})
