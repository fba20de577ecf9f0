"""One trace of an optimizer for equal layers, in a group or in several: what it gives is what a trace of all would."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.frontend import optimizer as optimizers
from dapple_tf.frontend.alike_groups import AlikeGroups
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis.repeated_update import repeated_update
from graph_passes.ir.graph import COLOCATION, Graph, Ref, control_inputs
from graph_passes.ir.group_update import Captured, GroupUpdate

_OPTIMIZERS: Mapping[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(momentum=0.5, centered=True),
    "adam": lambda: keras.optimizers.Adam(amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(weight_decay=0.1),
    "adadelta": keras.optimizers.Adadelta,
    "adagrad": keras.optimizers.Adagrad,
    "adamax": keras.optimizers.Adamax,
    "nadam": keras.optimizers.Nadam,
    "ftrl": keras.optimizers.Ftrl,
    "lion": keras.optimizers.Lion,
    "adafactor": keras.optimizers.Adafactor,
    "lamb": keras.optimizers.Lamb,
    "average": lambda: keras.optimizers.Adam(use_ema=True),
    "accumulates": lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
    "clips each": lambda: keras.optimizers.Adam(clipnorm=1.0),
    "clips all": lambda: keras.optimizers.Adam(global_clipnorm=1.0),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
}


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
    original = optimizers._capture_apply

    def counted(*arguments: Any, **options: Any) -> Captured:
        traced.append(arguments[2])
        return original(*arguments, **options)

    monkeypatch.setattr(optimizers, "_capture_apply", counted)
    named = {(stage,): names for stage, names in enumerate(groups)}
    updates = optimizers.capture_updates(optimizer, table, named, {}, tf.float32)
    return groups, updates, len(traced)


def _equal_layers(**options: Any) -> keras.Model:
    layers = [keras.layers.Dense(4, name=f"layer_{index}", **options) for index in range(4)]
    return keras.Sequential([keras.Input((4,)), *layers])


def _content(update: GroupUpdate) -> list[str]:
    """Returns the nodes and functions of an update without the counters that TensorFlow puts into names."""
    nodes, functions = update.apply.graph.node, update.apply.graph.library.function
    return [*map(_plain, nodes), *sorted(map(_plain, functions))]


def _plain(part: object) -> str:
    return re.sub(r"[-_]\d+", "", str(part))


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_a_renamed_part_is_what_a_trace_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _equal_layers(), _OPTIMIZERS[name]()
    _, updates, traced = _groups(optimizer, monkeypatch, model)
    assert traced == 1
    monkeypatch.undo()
    monkeypatch.setattr(AlikeGroups, "captured", lambda self, names, trace, in_shards: trace(names))
    _, expected, traced = _groups(optimizer, monkeypatch, model)
    assert traced == 4
    for one, other in zip(updates, expected, strict=True):
        assert _content(one) == _content(other)
        assert dict(one.apply.variables) == dict(other.apply.variables)
        assert (one.apply.gradients, one.apply.effects) == (other.apply.gradients, other.apply.effects)


def test_what_decays_otherwise_has_its_own_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third layer's kernel doesn't decay; with the second one's trace it would."""
    model = _equal_layers()
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[2].kernel])
    groups, updates, traced = _groups(optimizer, monkeypatch, model)
    assert traced == 2
    assert list(updates[2].apply.gradients) == groups[2]
    assert len(updates[2].apply.graph.node) < len(updates[1].apply.graph.node)


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


def test_groups_of_unlike_parameters_have_their_own_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [keras.layers.Dense(units, name=f"layer_{units}") for units in (4, 5, 6)]
    assert _groups(keras.optimizers.Adam(), monkeypatch, keras.Sequential([keras.Input((4,)), *layers]))[2] == 3


def _writes(captured: Captured) -> Mapping[str, int]:
    """Returns what is written, and how often: the variable, and all that is computed and waited for, in words."""
    graph = Graph(captured.graph)
    names = {ref.node: variable.name for ref, variable in captured.variables.items()}
    names |= {ref.node: f"gradient of {name}" for name, ref in captured.gradients.items()}
    texts: dict[str, str] = {}

    def read(ref: Ref) -> str:
        node = graph.nodes[ref.node]
        return read(graph.inputs(ref.node)[ref.output]) if node.op == "IdentityN" else f"{texts[ref.node]}:{ref.output}"

    for name in graph.topological():
        node = graph.nodes[name]
        reads = list(map(read, graph.inputs(name)))
        waits = sorted({texts[waited] for waited in control_inputs(node)})
        attrs = [f"{key}={node.attr[key]}" for key in sorted(node.attr) if key != COLOCATION]
        text = names.get(name) or _plain(f"{node.op}({reads}, after {waits}, {attrs})")
        texts[name] = text if len(text) < 500 else hashlib.sha256(text.encode()).hexdigest()
    return Counter(texts[effect] for effect in captured.effects if graph.nodes[effect].op != "ReadVariableOp")


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_a_trace_of_one_parameter_of_each_kind_gives_what_a_trace_of_all_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _equal_layers(), _OPTIMIZERS[name]()
    optimizer.build(model.trainable_variables)
    table = VariableTable(model)
    table.add_optimizer(optimizer)
    names = [table.name_of(variable) for variable in model.trainable_variables]

    def traced() -> Captured:
        (update,) = optimizers.capture_updates(optimizer, table, {(0,): names}, {}, tf.float32)
        return update.apply

    whole_needed = name in ("accumulates", "clips all", "loss scale")
    repeated = traced()
    monkeypatch.setattr(AlikeGroups, "captured", lambda self, names, trace, in_shards: trace(names))
    whole = traced()
    assert (len(repeated.graph.node) == len(whole.graph.node)) == whole_needed
    assert _writes(repeated) == _writes(whole)
    assert list(repeated.gradients) == names
    assert set(repeated.variables.values()) == set(whole.variables.values())


def test_what_is_written_once_for_each_parameter_is_not_repeated() -> None:
    class Counts(keras.optimizers.SGD):
        """Counts parameters, too."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient, variable, learning_rate)
            self.iterations.assign_add(1)

    for optimizer, apart in ((keras.optimizers.SGD(), True), (Counts(), False)):
        model = _equal_layers()
        optimizer.build(model.trainable_variables)
        table = VariableTable(model)
        table.add_optimizer(optimizer)
        names = [table.name_of(variable) for variable in model.trainable_variables[:2]]
        captured = optimizers._capture_apply(optimizer, table, names, {}, None, guarded=False)
        owners = {ref: variable.name for ref, variable in captured.variables.items() if variable.name in names}
        assert (repeated_update(captured, owners, {}) is not None) == apart
