"""Which gradients are in a variable's new value: through branches, calls and other variables, and not by mere order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.gradient_flow import gradients_behind
from graph_passes.ir.graph import Ref
from graph_passes.ir.group_update import Captured
from graph_passes.ir.program import Variable, VariableKind

Update = Callable[[tf.Variable, tf.Variable, tf.Tensor, tf.Tensor], object]


def captured(update: Update) -> Captured:
    """An update of variables v and w by gradients g and h."""
    variables = {name: tf.Variable(np.ones(2), name=name) for name in "vw"}
    spec = tf.TensorSpec([2], tf.float64)

    @tf.function(autograph=False)
    def traced(g: tf.Tensor, h: tf.Tensor) -> None:
        update(variables["v"], variables["w"], g, h)

    graph = traced.get_concrete_function(spec, spec).graph
    names = {id(variable.handle): name for name, variable in variables.items()}
    places = {
        Ref.parse(inner.name): Variable(names[id(outer)], types_pb2.DT_DOUBLE, (2,), VariableKind.PARAMETER)
        for outer, inner in graph.captures
    }
    gradients = {name: Ref.parse(own.name) for name, own in zip("vw", graph.inputs, strict=False)}
    return Captured(graph.as_graph_def(), gradients, places)


def apart(v: tf.Variable, w: tf.Variable, g: tf.Tensor, h: tf.Tensor) -> None:
    first, second = tf.identity_n([g, h])
    v.assign_sub(first)
    w.assign_sub(second * w)


def by_a_norm(v: tf.Variable, w: tf.Variable, g: tf.Tensor, h: tf.Tensor) -> None:
    v.assign_sub(g / tf.linalg.global_norm([g, h]))
    w.assign_sub(h)


def through_a_variable(v: tf.Variable, w: tf.Variable, g: tf.Tensor, h: tf.Tensor) -> None:
    v.assign_sub(g)
    w.assign_sub(h + v)


def read_before(v: tf.Variable, w: tf.Variable, g: tf.Tensor, h: tf.Tensor) -> None:
    old = v.read_value()
    v.assign_sub(g)
    w.assign_sub(h + old)


def in_a_branch(v: tf.Variable, w: tf.Variable, g: tf.Tensor, h: tf.Tensor) -> None:
    def both() -> tf.Tensor:
        v.assign_sub(g)
        return w.assign_sub(h)

    tf.cond(w[0] > 0, both, lambda: w.read_value())


def which_branch(v: tf.Variable, w: tf.Variable, g: tf.Tensor, h: tf.Tensor) -> None:
    tf.cond(h[0] > 0, lambda: v.assign_sub(g), lambda: v.read_value())
    w.assign_sub(h)


def in_a_function(v: tf.Variable, w: tf.Variable, g: tf.Tensor, h: tf.Tensor) -> None:
    both = tf.function(lambda a, b: (a, a + b), autograph=False)
    one, other = both(g, h)
    v.assign_sub(one)
    w.assign_sub(other)


@pytest.mark.parametrize(
    ("update", "first", "second"),
    [
        (apart, "v", "w"),
        (by_a_norm, "vw", "w"),
        (through_a_variable, "v", "vw"),
        (read_before, "v", "w"),
        (in_a_branch, "v", "w"),
        (which_branch, "vw", "w"),
        (in_a_function, "v", "vw"),
    ],
)
def test_gradients_are_followed(update: Update, first: str, second: str) -> None:
    assert gradients_behind(captured(update)) == {"v": frozenset(first), "w": frozenset(second)}
