"""Comparison of one pipelined step with plain Keras on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.execution.builds import StepResult
from dapple_tf.frontend.variables import VariableTable


@dataclasses.dataclass(frozen=True)
class Verification:
    """How a pipelined step compares with plain Keras.

    Attributes:
        loss: (pipelined, plain) loss.
        differences: variable -> largest absolute difference of its gradient, relative to the largest absolute value of
            the plain gradient (or 1e-3 of the largest of all gradients, if that is more).
        largest: variable -> largest absolute value of the plain gradient.
        layers: variable -> path of its layer.
        training: whether the model was called with ``training=True``.
        reason: why not, when not.
    """

    loss: tuple[float, float]
    differences: Mapping[str, float]
    largest: Mapping[str, float]
    layers: Mapping[str, str]
    training: bool
    reason: str = ""

    @property
    def worst(self) -> tuple[str, float]:
        """The variable whose gradient differs most, and by how much."""
        return max(self.differences.items(), key=lambda item: item[1], default=("(no variable)", 0.0))

    def by_layer(self) -> dict[str, float]:
        """The largest difference of each layer's gradients."""
        found: dict[str, float] = {}
        for name, difference in self.differences.items():
            layer = self.layers[name]
            found[layer] = max(found.get(layer, 0.0), difference)
        return found

    def __str__(self) -> str:
        """A table, largest difference first."""
        rows = sorted(self.by_layer().items(), key=lambda item: -item[1])
        width = max([5, *(len(layer) for layer, _ in rows)])
        behaviour = "training" if self.training else f"inference behaviour: {self.reason}"
        lines = [
            f"loss: pipelined {self.loss[0]:.9g}, plain {self.loss[1]:.9g} ({behaviour})",
            f"{'layer':<{width}}  largest relative difference of a gradient",
            *(f"{layer:<{width}}  {difference:.2e}" for layer, difference in rows),
        ]
        return "\n".join(lines)


def compare(
    run: Callable[[bool], StepResult],
    model: keras.Model,
    table: VariableTable,
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    whole: bool = False,
) -> Verification:
    """Runs a step both ways.

    Args:
        run: runs the pipelined step in training behaviour or not, with gradients, without an update.
        model: the model, with the values that the devices have.
        table: names of its variables.
        x: inputs of one batch.
        y: labels.
        sample_weight: sample weights or None.
        whole: whether the step has the batch in one slice, which layers see as plain Keras' do.
    """
    reason = "" if whole else not_comparable(model)
    training = not reason
    result = run(training)
    loss, gradients = plain_step(model, x, y, sample_weight, training=training)
    unit = _scale(model)
    paths = {table.name_of(variable): variable.path for variable in model.trainable_variables}
    plain = {table.name_of(v): gradient for v, gradient in zip(model.trainable_variables, gradients, strict=True)}
    size = {name: float(np.max(np.abs(value), initial=0.0)) for name, value in plain.items() if value is not None}
    floor = max(1e-3 * max(size.values(), default=0.0), float(np.finfo(np.float64).tiny))
    differences, largest = {}, {}
    for name, value in plain.items():
        own = result.gradients.get(name)
        if own is None and value is None:
            continue
        difference = (0.0 if own is None else np.asarray(own, np.float64) / unit) - (0.0 if value is None else value)
        largest[name] = size.get(name, 0.0)
        # Not a number counts as infinitely wrong; max() would pass over it.
        error = float(np.max(np.abs(difference), initial=0.0)) / max(largest[name], floor)
        differences[name] = error if math.isfinite(error) else math.inf
    assert result.loss is not None
    layers = {name: paths[name].rpartition("/")[0] or paths[name] for name in differences}
    return Verification((result.loss, loss), differences, largest, layers, training, reason)


def not_comparable(model: keras.Model) -> str:
    """Why slices don't give what the whole batch gives in training; empty when they do."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            return f"layer {layer.name!r} normalises by the batch"
        if _draws(layer):
            return f"layer {layer.name!r} draws random numbers"
    return ""


def _draws(layer: keras.layers.Layer) -> bool:
    """Whether a layer has a random generator and a rate, where it has one, that isn't 0."""
    if not getattr(layer, "_seed_generators", ()):
        return False
    rates = [getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout", "stddev")]
    known = [rate for rate in rates if isinstance(rate, (int, float))]
    return not known or any(known)


def _scale(model: keras.Model) -> float:
    """The loss scale, which the pipelined gradients carry."""
    scaled = model.optimizer.scale_loss(tf.ones([], tf.float32))
    return float(keras.ops.convert_to_numpy(scaled))


def plain_step(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, *, training: bool
) -> tuple[float, list[np.ndarray | None]]:
    """Loss and gradients (of the trainable variables, None where there is none) of plain Keras.

    The model's values, seeds and metrics don't change.
    """
    tensors = [
        keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), tree)
        for tree in (x, y, sample_weight)
    ]

    @tf.function(autograph=False)
    def step() -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        with tf.GradientTape() as tape:
            takes_training = getattr(model, "_call_has_training_arg", True)
            outputs = model(tensors[0], training=training) if takes_training else model(tensors[0])
            loss = model._compute_loss(
                x=tensors[0], y=tensors[1], y_pred=outputs, sample_weight=tensors[2], training=training
            )
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return loss, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]

    changeable = [*model.non_trainable_variables, *model.metrics_variables]
    changeable += [variable for metric in model.metrics for variable in metric.variables]
    changeable += [g.state for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    kept = [np.asarray(variable.value) for variable in changeable]
    try:
        loss, gradients = step()
    finally:
        for variable, value in zip(changeable, kept, strict=True):
            variable.assign(value)
    return float(loss), [None if gradient is None else np.asarray(gradient) for gradient in gradients]
