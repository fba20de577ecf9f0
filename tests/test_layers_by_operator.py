"""The forward nodes that a backward computes again, found layer by layer, against what the passes build."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import keras
import numpy as np
import pytest
from program_text import read_program
from programs import captured, compiled, dense, in_float64, staged, stateful_layers, tied_layers

from dapple_tf.measuring.layers_by_operator import needed_from
from graph_passes.ir.graph import FLOAT_DTYPES, Graph, Ref
from graph_passes.ir.node_kinds import METADATA
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Program
from graph_passes.passes.partition import Partition, StageForm


@functools.cache
def residual_layers() -> Program:
    """a: tanh(x v). b: h w. c: h + b. d: tanh(c + 2 h w), which skips c."""
    return read_program("""
        x[?, 2], v[2, 2], w[2, 2]
        a/matmul = MatMul(x, v)
        a/tanh = Tanh(a/matmul)
        b/matmul = MatMul(a/tanh, w)
        b/add = AddV2(b/matmul, b/matmul)
        c/sum = AddV2(a/tanh, b/matmul)
        d/sum = AddV2(c/sum, b/add)
        d/tanh = Tanh(d/sum)
        loss = L2Loss(d/tanh)
    """)


def test_results_that_only_later_backwards_need() -> None:
    """tanh' needs tanh; the gradients of sums need nothing; that of the loss needs the last tanh."""
    first = needed_from(staged(residual_layers(), "a", "b", "c"))
    assert [{name: by for name, by in own.items() if not name.startswith("gradients/")} for own in first] == [
        {"a/matmul": 0, "a/tanh": 0},
        {"b/matmul": 3, "b/add": 3},
        {"c/sum": 3},
        {"d/sum": 3, "d/tanh": 3, "loss": 4},
    ]


@functools.cache
@in_float64()
def long_skips() -> Program:
    """A sum of a product that was made three layers before, random draws, and labels that need gradients of logits."""
    x = h = keras.Input((4,), name="x")
    h = skipped = dense("early", 4)(h)
    h = keras.layers.Dropout(0.5, seed=1, name="drop", dtype="float64")(h)
    h = dense("hidden", 4, activation="tanh")(h)
    h = keras.layers.LayerNormalization(name="norm", dtype="float64")(h)
    h = keras.layers.Add(name="sum")([h, skipped])
    h = dense("linear", 4)(h)
    h = keras.layers.Activation("gelu", name="gelu")(h)
    model = compiled(x, dense("logits", 3)(h), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return captured(model, np.zeros((4, 4)), np.zeros((4,), "int32"))


@functools.cache
@in_float64()
def frozen() -> Program:
    """Layers before the first trainable one: no backward needs what they compute, but that layer's."""
    x = keras.Input((4,), name="x")
    h = dense("frozen_0", 4, activation="tanh", trainable=False)(x)
    h = dense("frozen_1", 4, activation="tanh", trainable=False)(h)
    h = dense("trained", 4, activation="tanh")(h)
    return captured(compiled(x, dense("last", 2)(h)), np.zeros((4, 4)), np.zeros((4, 2)))


PROGRAMS: dict[str, tuple[Callable[[], Program], tuple[str, ...]]] = {
    "residual": (residual_layers, ("a", "b", "c")),
    "stateful": (stateful_layers, ("a",)),
    "tied": (functools.partial(tied_layers, 3), ("layer_0", "layer_1")),
    "long skips": (long_skips, ("early", "drop", "hidden", "norm", "sum", "linear", "gelu")),
    "frozen": (frozen, ("frozen_0", "frozen_1", "trained")),
}

SAMPLES = 4
MOVES = {"Const", "Identity", "Reshape", "StopGradient", *METADATA}
"""Ops without work. Passes for slices of one size make constants of them, or drop them."""


def working(program: Program) -> set[str]:
    """The forward nodes that compute with floating-point numbers."""
    graph = Graph(program.flat_graph)
    return {node.name for node in graph if node.op not in MOVES and dtype_of(graph, Ref(node.name)) in FLOAT_DTYPES}


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_stages_compute_again_what_their_layers_tell(name: str) -> None:
    """For ranges of layers as a stage: what B of the real stage with recompute="boundary" has in it."""
    make, cuts = PROGRAMS[name]
    program = make()
    first = needed_from(staged(program, *cuts))
    every = list(itertools.combinations(range(len(cuts) + 2), 2))
    for start, stop in every[:: 1 + len(every) // 8]:
        ends = [cuts[bound - 1] for bound in (start, stop) if 0 < bound <= len(cuts)]
        again = staged(program, *ends)
        again = Partition(StageForm("boundary", samples=SAMPLES)).run(again)
        stage = again.stages[1 if start else 0]
        told = {node for layer in range(start, stop) for node, by in first[layer].items() if by < stop}
        computed = {node.name for node in stage.own_backward.function.node_def}
        assert computed & working(program) == told & working(program), (start, stop)
