"""Shapes of an earlier stage's tensors, computed from the slice of the stage that reads them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from graph_passes.analysis.known_shapes import with_known_shapes
from graph_passes.analysis.slice_shapes import SliceShapes
from graph_passes.ir.graph import POSITION_ATTR, GraphDef, Ref
from graph_passes.ir.program import Program, Roles, Slice

SOURCE = 7
"""Position of the node that makes the tensor."""


def rewritten(make: Callable[[tf.Tensor], tf.Tensor]) -> tuple[GraphDef, frozenset[str]]:
    """The graph that tells the shape of ``make(x)`` as ``size``, x being sequences of vectors of 8; its even nodes."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, None, 8), name="x")
        scalars = [tf.compat.v1.placeholder(tf.int32, [], name=name).op.name for name in Slice._fields]
        tf.shape(tf.identity(make(x), name="y"), name="size")
    definition = graph.as_graph_def()
    for node in definition.node:
        node.attr[POSITION_ATTR].i = SOURCE if node.name == "y" else 99
    program = Program(definition, Roles((Ref("x"),), (), Slice(*map(Ref, scalars)), example_shapes=((None, 5, 8),)))
    shapes = SliceShapes.of(program).through_functions(program, [Ref("y")])
    return with_known_shapes(program, shapes, {"size"}, {"y": 0})


def size(graph: GraphDef, samples: int) -> list[int]:
    """What ``size`` is for a reader's slice of this many samples, where x is 3 sequences of 5."""
    with tf.Graph().as_default() as loaded, tf.compat.v1.Session() as session:
        tf.import_graph_def(graph, name="")
        fed = {"x:0": np.zeros((3, 5, 8), "float32"), "samples:0": samples}
        return session.run(loaded.get_tensor_by_name("size:0"), fed).tolist()


def test_the_shape_is_that_of_the_readers_slice() -> None:
    graph, _ = rewritten(lambda x: x)
    assert size(graph, 3) == [3, 5, 8]
    assert size(graph, 2) == [2, 5, 8]
    graph, _ = rewritten(lambda x: x[:, 0])
    assert size(graph, 2) == [2, 8]
    graph, _ = rewritten(lambda x: tf.reshape(x, (-1, 8)))
    assert size(graph, 3) == [15, 8]


def positions(graph: GraphDef) -> dict[str, int | None]:
    """Operators of the shape's own nodes -> where they are computed; None with whoever reads them."""
    nodes = [node for node in graph.node if node.name.startswith("size") and node.op != "Const"]
    return {node.name: node.attr[POSITION_ATTR].i if POSITION_ATTR in node.attr else None for node in nodes}


def test_only_what_is_read_of_the_tensor_is_computed_where_it_is_made() -> None:
    """All else depends on the reader's slice, and must not cross the cut."""
    graph, even = rewritten(lambda x: x)
    assert positions(graph) == {
        "size/scaled": None, "size/own": SOURCE, "size/lengths": SOURCE, "size/sum": None, "size": None,
    }  # fmt: skip
    assert even == {"size/lengths"}
    graph, even = rewritten(lambda x: tf.reshape(x, (-1, 8)))
    assert positions(graph) == {
        "size/own": SOURCE, "size/merged": SOURCE, "size/rows": SOURCE, "size/grown": None, "size": None,
    }  # fmt: skip
    assert even == {"size/rows"}
