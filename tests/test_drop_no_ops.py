"""Operators that give what they are given go away."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from programs import run

from graph_passes.ir.graph import Graph, GraphDef, Ref
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.passes.drop_no_ops import drop_no_ops


def dropped(graph: GraphDef) -> tuple[Graph, dict[Ref, Ref]]:
    before = graph.SerializeToString(deterministic=True)
    pruned, moved = drop_no_ops(graph, infer_shapes(graph, {}, {}))
    assert graph.SerializeToString(deterministic=True) == before
    return Graph(pruned), moved


def test_reshapes_and_sums_that_undo_broadcasting_where_there_was_none() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (6, 4), name="x")
        none = tf.constant([], tf.int32, (0,), name="none")
        summed = tf.raw_ops.Sum(input=x, axis=none, name="summed")
        shaped = tf.reshape(summed, [6, 4], name="shaped")
        spread = tf.broadcast_to(shaped, [6, 4], name="spread")
        tf.square(spread, name="y")
    pruned, moved = dropped(graph.as_graph_def())
    assert set(pruned.nodes) & {"summed", "shaped", "spread"} == set() and list(pruned.nodes["y"].input) == ["x"]
    assert moved == {Ref(name): Ref("x") for name in ("summed", "shaped", "spread")}
    value = np.arange(24, dtype="float32").reshape(6, 4)
    np.testing.assert_array_equal(run(pruned.graph, [Ref("y")], {Ref("x"): value})[0], value**2)


def test_those_that_do_something_stay() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (6, 1), name="x")
        open_length = tf.compat.v1.placeholder(tf.float32, (None, 4), name="open")
        tf.reshape(x, [2, 3], name="reshaped")
        tf.broadcast_to(x, [6, 4], name="spread")
        tf.raw_ops.Sum(input=x, axis=tf.constant([1]), name="summed")
        tf.reshape(open_length, [-1, 4], name="unknown")  # equal at run time, for all that shapes tell
        tf.reshape(x, tf.compat.v1.placeholder(tf.int32, (2,), name="asked"), name="by_argument")
    pruned, moved = dropped(graph.as_graph_def())
    assert not moved and len(pruned.nodes) == len(graph.as_graph_def().node)


@pytest.mark.parametrize("reason", ["waits", "is waited for"])
def test_what_others_name_stays(reason: str) -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (6, 4), name="x")
        shape, first = tf.constant([6, 4]), tf.no_op(name="first")
        with tf.control_dependencies([first] if reason == "waits" else []):
            same = tf.reshape(x, shape, name="same")
        with tf.control_dependencies([same] if reason == "is waited for" else []):
            tf.no_op(name="last")
        tf.square(same, name="y")
    pruned, moved = dropped(graph.as_graph_def())
    assert not moved and "same" in pruned.nodes
