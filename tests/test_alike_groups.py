"""One trace of an optimizer for equal layers gives what a trace of all would; which gradients an update reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from dapple_tf.frontend import optimizer as optimizers
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis.update_flow import gradients_behind
from graph_passes.ir.graph import Ref
from graph_passes.ir.group_update import Captured, GroupUpdate
from graph_passes.ir.program import Variable, VariableKind


def _groups(
    optimizer: keras.optimizers.Optimizer, monkeypatch: pytest.MonkeyPatch, model: keras.Model
) -> tuple[list[list[str]], tuple[GroupUpdate, ...], int]:
    """Returns the groups of a model of equal layers, their updates, and how many of them were traced."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    table = VariableTable(model)
    table.add_optimizer(optimizer)
    groups = [[table.name_of(weight) for weight in layer.trainable_variables] for layer in model.layers]
    traced: list[Sequence[str]] = []
    original = optimizers._Tracer.update

    def counted(*arguments: Any, **options: Any) -> Captured:
        traced.append(arguments[1])
        return original(*arguments, **options)

    monkeypatch.setattr(optimizers._Tracer, "update", counted)
    named = {(stage,): names for stage, names in enumerate(groups)}
    updates = optimizers.capture_updates(optimizer, table, named, {}, tf.float32)
    return groups, updates, len(traced)


def _equal_layers(**options: Any) -> keras.Model:
    layers = [keras.layers.Dense(4, name=f"layer_{index}", **options) for index in range(4)]
    return keras.Sequential([keras.Input((4,)), *layers])


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.AdamW(weight_decay=0.1, use_ema=True),
        lambda: keras.optimizers.Adam(clipnorm=1.0, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(global_clipnorm=1.0)),
    ],
)
def test_equal_layers_are_traced_once(
    make: Callable[[], keras.optimizers.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others' updates compute is compared with plain Keras' in test_random_plans.py."""
    groups, updates, traced = _groups(make(), monkeypatch, _equal_layers())
    assert traced == 1
    assert [list(update.apply.gradients) for update in updates] == groups


def test_what_does_not_decay_is_told_by_its_layers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras' variables are called ``kernel``: asked by these, all decayed, then and in the user's optimizer later."""
    model = _equal_layers()
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    layer = model.layers[2]
    optimizer.exclude_from_weight_decay(var_names=[f"{layer.name}/"])
    _, updates, traced = _groups(optimizer, monkeypatch, model)
    assert traced == 2
    assert len(updates[2].apply.graph.node) < len(updates[1].apply.graph.node)
    assert [optimizer._use_weight_decay(one.kernel.value) for one in model.layers[1:4]] == [True, False, True]


def test_constraints_and_own_optimizers_are_traced_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(keras.optimizers.SGD):
        """An optimizer that may do anything."""

    class OwnScale(keras.optimizers.LossScaleOptimizer):
        """A wrapper that may do anything."""

    replaced = keras.optimizers.SGD()
    replaced.apply = lambda *arguments: keras.optimizers.SGD.apply(replaced, *arguments)
    listed, model = keras.optimizers.Adam(), _equal_layers()
    listed.build(model.trainable_variables)
    listed.backwards = listed._momentums[::-1]
    assert _groups(listed, monkeypatch, model)[2] == 4
    monkeypatch.undo()
    for own in (Own(), OwnScale(keras.optimizers.Adam()), replaced):
        assert _groups(own, monkeypatch, _equal_layers())[2] == 4, own
        monkeypatch.undo()
    assert _groups(keras.optimizers.SGD(), monkeypatch, _equal_layers(kernel_constraint="non_neg"))[2] == 4


# ---- which gradients are in a variable's new value

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
        (in_a_function, "v", "vw"),
    ],
)
def test_gradients_are_followed(update: Update, first: str, second: str) -> None:
    assert gradients_behind(captured(update)) == {"v": frozenset(first), "w": frozenset(second)}
