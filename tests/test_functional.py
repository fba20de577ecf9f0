"""What is known of a functional model without tracing it agrees with what tracing it shows."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.batch import declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.functional import cuts_are_safe, outputs_as_declared
from dapple_tf.frontend.variables import VariableTable
from graph_passes.errors import PassError
from graph_passes.pass_manager import run_passes
from graph_passes.passes.assign_stages import AssignStages


def dense(name: str) -> keras.layers.Layer:
    return keras.layers.Dense(4, name=name)


def chain() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), dense("a"), keras.layers.ReLU(name="relu"), dense("b"), dense("c")])


def branches() -> keras.Model:
    x = keras.Input((4,))
    a = dense("a")(x)
    b = dense("b")(a)
    c = dense("c")(keras.layers.add([a, b], name="sum"))
    return keras.Model(x, [c, keras.layers.concatenate([b, c], name="both")])


def shared() -> keras.Model:
    x = keras.Input((4,))
    layer = dense("a")
    return keras.Model(x, dense("c")(layer(dense("b")(layer(x)))))


def nested() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.Sequential([dense("a"), dense("b")], name="inner"), dense("c")])


def mixing() -> keras.Model:
    """A tensor whose first axis isn't the batch."""
    x = keras.Input((4,))
    turned = keras.ops.transpose(dense("a")(x))
    return keras.Model(x, dense("c")(keras.ops.transpose(turned)) + dense("b")(x))


def free_length() -> keras.Model:
    x = keras.Input((None, 4))
    return keras.Model(x, dense("c")(dense("b")(dense("a")(x))))


@pytest.mark.parametrize("make", [chain, branches, shared, nested, mixing, free_length])
def test_what_counts_as_safe_passes_the_whole_check(make) -> None:
    model = make()
    spec = declared_spec(model)
    assert spec is not None
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    names = ["a", "b", "c", "relu", "sum", "inner", "unknown"]
    safe = 0
    for cuts in [cuts for count in (0, 1, 2, 3) for cuts in itertools.permutations(names, count)]:
        if cuts_are_safe(model, cuts):
            run_passes(program, [AssignStages(cuts)])  # raises nothing
            safe += 1
        elif make is chain and "relu" not in cuts:  # A chain of dense layers has nothing that would need a trace.
            with pytest.raises(PassError):
                run_passes(program, [AssignStages(cuts)])
    assert safe >= (6 if make is chain else 1)


def test_subclassed_models_are_traced() -> None:
    class Own(keras.Model):
        def call(self, x):
            return x

    class OwnCall(keras.Sequential):
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs) * 2.0

    assert not cuts_are_safe(Own(), [])
    assert not cuts_are_safe(OwnCall([keras.Input((4,)), dense("a"), dense("b")]), ["a"])


@pytest.mark.parametrize("make", [chain, branches])
def test_outputs_as_declared(make) -> None:
    model = make()

    def traced():
        function = tf.function(lambda x: model(x)).get_concrete_function(tf.TensorSpec((None, 4)))
        return function.structured_outputs, len(function.graph.as_graph_def().node)

    with outputs_as_declared(model):
        outputs, few = traced()
    expected, many = traced()
    assert keras.tree.map_structure(str, outputs) == keras.tree.map_structure(str, expected)
    assert few < many
    assert "call" not in vars(model)
    model(np.zeros((2, 4), "float32"))
