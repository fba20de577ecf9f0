"""What is known of a functional model without tracing it agrees with what tracing it shows."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_variables_after, pair, use_float64

import dapple_tf as dapple
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


def listed(outputs=list, inputs=list) -> keras.Model:
    """One output, in a list or another structure."""
    x = keras.Input((4,))
    return keras.Model(inputs([x]), outputs([dense("b")(dense("a")(x))]))


ANY_STRUCTURE = pytest.mark.filterwarnings("ignore:The structure of `inputs`")
"""Keras warns where a list of one input was declared and the input itself comes."""


@ANY_STRUCTURE
@pytest.mark.parametrize("make", [chain, branches, listed])
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


class Subclass(keras.Model):
    """A functional model's class without a call of its own."""


def again(model: keras.Model, kind: type[keras.Model] = keras.Model) -> keras.Model:
    return kind(model.inputs, model.outputs)


SINGLE = {
    "list": listed,
    "tuple": lambda: listed(tuple),
    "input as it is": lambda: listed(list, lambda tensors: tensors[0]),
    "dictionary": lambda: listed(lambda tensors: {"b": tensors[0]}),
    "list in a list": lambda: listed(lambda tensors: [tensors]),
    "of a sequential model": lambda: again(chain()),
    "of another model": lambda: again(shared()),
    "subclass": lambda: again(chain(), Subclass),
    "clone": lambda: keras.models.clone_model(listed()),
    "from a configuration": lambda: keras.Model.from_config(listed().get_config()),
    "inside another": lambda: keras.Model(x := keras.Input((4,)), [dense("out")(listed()([x])[0])]),
    "first of two": lambda: keras.Model((model := branches()).inputs, model.outputs[:1]),
}


@ANY_STRUCTURE
@pytest.mark.few(4)
@pytest.mark.parametrize(("make", "number"), [(make, n) for n, make in enumerate(SINGLE.values())], ids=list(SINGLE))
def test_one_output_in_a_list_is_trained_as_that_output(make, number: int) -> None:
    """Losses were built for a list, and read the first sample of each slice; the user's model did so ever after."""
    use_float64()

    def build() -> keras.Model:
        model = make()
        model.compile("sgd", ["mse", "mae", keras.losses.Huber()][number % 3], metrics=["mae"])
        return model

    model, plain = pair(build)
    x, y = np.random.default_rng(number).normal(size=(2, 6, 4))
    y = {"b": y} if isinstance(model.output, dict) else [y] if number % 2 else y
    plan = dapple.Plan.data_parallel(2, 6) if number % 4 > 1 else dapple.Plan.straight(["a"], 6, 2)
    pipelined = dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), plan)
    assert_same_variables_after(2, pipelined, plain, x, y)
    expected = plain.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(pipelined.evaluate(x, y, verbose=0), expected, rtol=1e-6)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), expected, rtol=1e-6)
    for own, other in zip(*(keras.tree.flatten(one.predict(x, verbose=0)) for one in (pipelined, plain)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-10)
