"""What follows from shapes alone becomes constants, and operators that then do nothing go away."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest
from program_text import read_program
from programs import show_changes
from step_programs import of_model
from tensorflow.core.framework import types_pb2

import dapple_tf as dapple
from dapple_tf.operators.step_placer import flat_step
from graph_passes.analysis.constant_folding import fold_shapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef, Ref, function_names
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.text import graph_text
from graph_passes.passes.fold_shapes import drop_no_ops

FORMS = {
    "shapes, and what is computed from them": (
        """
        x[6, 4]
        a/h = Relu(x)
        a/shape = Shape(a/h)
        a/back = ReverseV2(a/shape, [0])
        a/y = Reshape(x, a/back)
        size = Size(x, out_type=int64)
        divisor = Cast(size, DstT=float64)
        z = RealDiv(x, divisor)
        rank = Rank(x)
        axis = AddV2(rank, -1)
        sum = Sum(x, axis)
        """,
        (),
    ),
    "nodes with several outputs": (
        """
        x[6, 4], b[4]
        shapes = ShapeN(x, b)
        axes = BroadcastGradientArgs(shapes, shapes:1)
        dx = Sum(x, axes)
        db = Sum(x, axes:1)
        same = Reshape(b, shapes:1)
        """,
        (),
    ),
    "what isn't known, is large, or has effects": (
        """
        open[?, 4], big[100, 100], x[6, 4]
        unknown = Shape(open)
        dims = Shape(big)
        large = Fill(dims, 1.0)
        y = Relu(large)
        drawn = Shape(x)
        random = RandomStandardNormal(drawn, dtype=float64)
        """,
        ("unknown",),
    ),
    "what is waited for or named": (
        """
        x[6, 4]
        one = Shape(x) ^x
        two = Shape(x) ^x
        three = Shape(x) ^x
        end = NoOp() ^one
        """,
        ("two",),
    ),
}


def test_what_becomes_of_shapes(golden: Callable[[str, str], None]) -> None:
    texts = []
    for title, (text, kept) in FORMS.items():
        graph = read_program(text).graph
        before = graph_text(graph)
        folding = fold_shapes(graph, infer_shapes(graph, {}, {}), kept)
        assert graph_text(graph) == before
        shapes = infer_shapes(folding.graph, {}, {})
        constants = [Ref(node.name) for node in folding.graph.node if node.op == "Const"]
        assert {ref: folding.shapes[ref] for ref in constants} == {ref: shapes[ref] for ref in constants}
        texts.append(f"{title}\n{show_changes(before, graph_text(folding.graph))}")
    golden("fold_shapes_forms.txt", "\n".join(texts))


def test_results_may_become_constants() -> None:
    """A second output has no place under its own name: it is told where it went."""
    graph = read_program("x[6, 4], b[4]\nshapes = ShapeN(x, b)\nh = Relu(x)").graph
    folding = fold_shapes(graph, infer_shapes(graph, {}, {}), results=[Ref("shapes"), Ref("shapes", 1), Ref("h")])
    assert "shapes = Const() [6, 4]\nshapes/output1 = Const() [4]\n" in graph_text(folding.graph)
    assert folding.moved == {Ref("shapes"): Ref("shapes"), Ref("shapes", 1): Ref("shapes/output1")}


def test_a_value_that_cannot_be_computed_is_told_by_its_node() -> None:
    """Values are computed in a graph with other names, which the error had."""
    graph = read_program(
        "x[6, 4]\nsize = Size(x)\nquotient = FloorDiv(size, 0)\ny = Cast(quotient, DstT=float64)"
    ).graph
    with pytest.raises(PassError, match=r"node 'quotient' can't compute FloorDiv .* Integer division by zero"):
        fold_shapes(graph, infer_shapes(graph, {}, {}), ("y",))


def test_operators_that_give_what_they_are_given_go_away(golden: Callable[[str, str], None]) -> None:
    graph = read_program("""
        x[6, 4], column[6, 1], open[?, 4], asked int32[2]
        summed = Sum(x, [])
        shaped = Reshape(summed, [6, 4])
        spread = BroadcastTo(shaped, [6, 4])
        y = Square(spread)
        b/reshaped = Reshape(column, [2, 3])
        b/spread = BroadcastTo(column, [6, 4])
        b/summed = Sum(column, [1])
        b/unknown = Reshape(open, [-1, 4])
        b/by_argument = Reshape(column, asked)
        waited = Reshape(x, [6, 4])
        waits = Reshape(x, [6, 4]) ^waited
        z = AddV2(waited, waits)
    """).graph
    before = graph_text(graph)
    pruned, moved = drop_no_ops(graph, infer_shapes(graph, {}, {}))
    assert moved == {Ref(name): Ref("x") for name in ("summed", "shaped", "spread")}
    golden("drop_no_ops.txt", show_changes(before, graph_text(pruned)))
    assert graph_text(graph) == before


# ---- loops


def recurrent(kind: type[keras.layers.RNN], **options: float) -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 4, mask_zero=True)(tokens)
    x = kind(4, return_sequences=True, name="first", **options)(x)
    model = keras.Model(tokens, keras.layers.Dense(2)(x))
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


def test_gradients_of_loops_pop_no_integers() -> None:
    """Shapes and lengths are constant there, and positions in the sequence are counted down; placed operators' too."""
    cluster, options = dapple.Cluster.local(2, kind="cpu"), {"recurrent_dropout": 0.3, "seed": 3}
    staged = of_model(recurrent(keras.layers.LSTM), PLAN, cluster)
    placed = of_model(recurrent(keras.layers.SimpleRNN, **options), dapple.Plan.by_operators(2, 8), cluster)
    for program in (staged, flat_step(placed, [(8, 5), (8, 5, 2)]).program):
        popped = pops(program.graph)
        assert popped and types_pb2.DT_INT32 not in popped
