"""What tests of the profiler and its parts share."""

from __future__ import annotations

from typing import Any

import keras
from models_for_tests import classifier

from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from graph_passes.ir.program import Program


def captured(model: keras.Model, mode: Mode = Mode.TRAIN) -> Program:
    """The graph of a model on drawn batches."""
    spec = ExampleBatch.of(model).spec
    table = VariableTable(model)
    build(model, table, spec)
    return capture(model, table, mode, spec)


def mlp(**compiled: Any) -> keras.Model:
    """Three dense layers: first, second, logits."""
    return classifier(**({"name": "mlp", "optimizer": "adam", "metrics": ["accuracy"]} | compiled))
