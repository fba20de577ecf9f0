"""What tests of the profiler and its parts share."""

from __future__ import annotations

from typing import Any

import keras

from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from graph_passes.ir.program import Program

layers = keras.layers


def captured(model: keras.Model, mode: Mode = Mode.TRAIN) -> Program:
    """The graph of a model on drawn batches."""
    spec = ExampleBatch.of(model).spec
    table = VariableTable(model)
    build(model, table, spec)
    return capture(model, table, mode, spec)


def mlp(**compiled: Any) -> keras.Model:
    """Three dense layers: first, second, logits."""
    features = keras.Input((4,))
    x = layers.Dense(6, activation="tanh", name="first")(features)
    x = layers.Dense(5, activation="tanh", name="second")(x)
    model = keras.Model(features, layers.Dense(3, name="logits")(x), name="mlp")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**({"optimizer": "adam", "loss": loss, "metrics": ["accuracy"]} | compiled))
    return model
