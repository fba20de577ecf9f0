"""Replicas that keep a part of the rows of embeddings each: training, evaluation and prediction are as in plain Keras."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import (
    TOLERANCE,
    assert_same_training,
    assert_same_variables,
    assert_same_variables_after,
    largest_difference,
    pair,
    pipeline,
    use_float64,
)
from keras import layers, ops
from test_equivalence_shards import OPTIMIZERS, TABLE, constrained, held_bytes, table
from zoo import Specimen

import dapple_tf as dapple
from dapple_tf.describe.plan import PlanError
from dapple_tf.errors import CaptureError
from dapple_tf.tools.hosts import LocalWorkers
from graph_passes.ir.program import VariableKind

WORDS, USERS = 83, 61


class Places(layers.Layer):
    """Adds rows that all samples have in common."""

    def build(self, shape: Any) -> None:
        self.places = layers.Embedding(62, 3, name="rows")

    def call(self, x: Any) -> Any:
        return x + self.places(ops.arange(ops.shape(x)[1]) * 7)


class Again(layers.Layer):
    """Appends rows of an embedding that another layer looks up, too."""

    def __init__(self, embedding: layers.Embedding, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, x: Any, words: Any) -> Any:
        return ops.concatenate([x, ops.reshape(self.embedding(words), (-1, 9))], axis=1)


def tables() -> keras.Model:
    """Three tables whose rows don't divide by 2 or 3 replicas, one of them read in two stages, and a vector's head."""
    words, users = keras.Input((6,), dtype="int32", name="words"), keras.Input((1,), name="users")
    embedding = layers.Embedding(WORDS, 3, name="embedding")
    x = layers.Flatten()(Places(name="places")(embedding(words)))
    x = layers.Concatenate()([x, layers.Flatten()(layers.Embedding(USERS, 2, name="user")(users))])
    x = layers.Dense(7, activation="tanh", name="hidden")(x)
    x = Again(embedding, name="again")(x, words[:, ::2])
    x = layers.Dense(5, activation="tanh", name="merged")(x)
    model = keras.Model([words, users], layers.Dense(3, name="logits")(x))
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    return model


def _ids(rng: np.random.Generator, samples: int) -> tuple[Any, Any, Any]:
    """Words that samples have in common, some counted from the end, and users of which one replica keeps all rows."""
    words = rng.integers(-20, 20, (samples, 6)).astype("int32")
    return [words, rng.integers(0, 7, (samples, 1)).astype("float64")], rng.normal(size=(samples, 3)), None


TABLES = Specimen(tables, ("places", "hidden", "merged"), _ids)
CASES: dict[str, tuple[list[list[int]], int, dict[str, Any]]] = {
    "data parallel": ([[0, 1, 2]], 2, {}),
    "one micro-batch": ([[0, 1]], 1, {}),
    "a table of two stages": ([[0], [1, 2]], 2, {}),
    "chunks": ([[0, 1]] * 4, 3, {"recompute": "min_cut"}),
    "chunks in another order": ([[0, 1], [2, 3], [0, 1], [2, 3]], 4, {"schedule": "interleaved"}),
    "all forwards first": ([[0, 1, 2], [3]], 3, {"schedule": "gpipe", "recompute": "boundary"}),
    "carried": ([[0, 1], [2, 3]], 2, {"carried_updates": 2}),
    "in pieces": ([[0, 1]], 2, {"backward_cuts": ["places"]}),
    "split backwards": ([[0, 1], [2]], 3, {"schedule": "zb_h1"}),
    "weights elsewhere": ([[0, 1], [2]], 2, {"weight_devices": [[3, 4], [2]]}),
    "unlike shares": ([[0, 1, 2]], 2, {"shares": [[1, 2, 1]]}),
    "xla": ([[0, 1]], 1, {"jit_compile": True}),
    "slots in shards": ([[0, 1], [2, 3]], 2, {"optimizer_shards": True}),
    "parameters in shards": ([[0, 1, 2]], 2, {"optimizer_shards": True, "parameter_shards": True}),
}
KEPT = ("data parallel", "a table of two stages")


def _train(specimen: Specimen, devices: list[list[int]], micro_batches: int, **options: Any) -> dapple.PipelinedModel:
    """Trains for three steps, one of them with fewer samples, evaluates and predicts, and compares everything."""
    use_float64()
    model, plain = pair(specimen.build)
    cuts = specimen.cuts_for(len(devices))
    plan = dapple.Plan.manual(cuts, devices, micro_batches, 24, row_shards=True, **options)
    count = 1 + max(device for own in (*plan.devices, *(plan.weight_devices or ())) for device in own)
    pipelined = dapple.transform(model, dapple.Cluster.local(count, kind="cpu"), plan)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [specimen.batch(rng, size) for size in (24, 11, 24)])
    x, y, _ = specimen.batch(rng, 11)
    losses = [own.evaluate(x, y, batch_size=11, verbose=0) for own in (pipelined, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5), "Keras' metrics are float32 whatever the model is"
    outputs = [own.predict(x, batch_size=11, verbose=0) for own in (pipelined, plain)]
    assert largest_difference(*outputs) <= TOLERANCE["float64"]
    return pipelined


def _in_shards(pipelined: dapple.PipelinedModel) -> set[str]:
    """Names of the parameters of which devices keep parts."""
    variables = [v for holding in pipelined._engine.builder.holdings() for v in holding.variables]
    return {v.name for v in variables if v.kind is VariableKind.PARAMETER and v.shards > 1}


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_training_evaluation_and_prediction_are_the_same(name: str) -> None:
    devices, micro_batches, options = CASES[name]
    pipelined = _train(TABLES, devices, micro_batches, **options)
    wanted = {"embedding/embeddings"} if len(devices[0]) == 1 else {"embedding/embeddings", "places/rows/embeddings"}
    assert wanted <= _in_shards(pipelined)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_that_updates_each_element_by_itself(name: str) -> None:
    def build() -> keras.Model:
        model = table()
        model.compile(OPTIMIZERS[name](), "mse")
        return model

    _train(Specimen(build, TABLE.cuts, TABLE.batch), [[0, 1]], 2)
