"""Replicas that keep a part of the rows of embeddings: training, evaluation and prediction are as in plain Keras."""

from __future__ import annotations

import pathlib
import re
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
from shard_checks import (
    TABLE,
    check_deferred_models,
    check_evaluation_before_and_after_training,
    check_values_go_to,
    constrained,
    table,
)
from test_equivalence_shards import held_bytes

import dapple_tf as dapple
from dapple_tf.describe.plan import PlanError
from dapple_tf.errors import CaptureError
from dapple_tf.tools.hosts import LocalWorkers
from graph_passes.ir.program import VariableKind

WORDS = 83


def _in_shards(pipelined: dapple.PipelinedModel) -> set[str]:
    """Names of the parameters of which devices keep parts."""
    variables = [v for holding in pipelined._engine.builder.holdings() for v in holding.variables]
    return {v.name for v in variables if v.kind is VariableKind.PARAMETER and v.shards > 1}


def test_each_replica_holds_its_part_of_the_rows_and_their_slots() -> None:
    """Evaluation and prediction look rows up in shards, too."""
    use_float64()
    model, plain = pair(table)
    pipelined = pipeline(model, (), [3], 2, 24, row_shards=True)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [TABLE.batch(rng, size) for size in (24, 11, 24)])
    x, y, _ = TABLE.batch(rng, 11)
    losses = [own.evaluate(x, y, batch_size=11, verbose=0) for own in (pipelined, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5), "Keras' metrics are float32 whatever the model is"
    outputs = [own.predict(x, batch_size=11, verbose=0) for own in (pipelined, plain)]
    assert largest_difference(*outputs) <= TOLERANCE["float64"]
    first, *others = (np.asarray(variable.value).nbytes for variable in pipelined.model.trainable_variables)
    wanted = first / 3 + sum(others)
    for slots, own in held_bytes(pipelined):
        assert own - sum(others) == pytest.approx(first / 3, rel=0.05)
        assert slots == pytest.approx(2 * wanted, rel=0.05)


class Head(layers.Layer):
    """The product with an embedding's table."""

    def __init__(self, embedding: layers.Embedding, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))[:, :3]


def tied() -> keras.Model:
    words = keras.Input((6,), dtype="int32")
    embedding = layers.Embedding(WORDS, 3, name="embedding")
    x = layers.GlobalAveragePooling1D(name="mean")(embedding(words))
    model = keras.Model(words, Head(embedding, name="head")(x))
    model.compile("adam", "mse")
    return model


class Chosen(layers.Layer):
    """Rows of a table by what is computed from parameters."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(WORDS, 3), name="table")

    def call(self, x: Any) -> Any:
        return ops.take(self.table, ops.argmax(x, axis=-1), axis=0)


def chosen() -> keras.Model:
    words = keras.Input((6,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(30, 3, name="embedding")(words))
    x = layers.Dense(7, name="hidden")(x)
    model = keras.Model(words, Chosen(name="chosen")(x) + layers.Dense(3, name="logits")(x))
    model.compile("sgd", "mse")
    return model


class OwnAdam(keras.optimizers.Adam):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)


def by_own_optimizer() -> keras.Model:
    model = table()
    model.compile(OwnAdam(), "mse")
    return model


WHOLE = {
    "a head": (tied, r"'embedding/embeddings': layer 'head' reads all of it \(Transpose\)"),
    "indices of activations": (
        chosen,
        r"'chosen/table': layer 'chosen' looks up rows that depend on .*isn't of the batch",
    ),
    "few rows": (chosen, r"'embedding/embeddings': it has 30 rows, fewer than 20 for each of 2 devices"),
    "a constraint": (constrained, r"'embedding/embeddings': its constraint, MaxNorm, may compare rows"),
    "an own optimizer": (
        by_own_optimizer,
        r"'embedding/embeddings': the optimizer isn't known to update each of its row",
    ),
}


@pytest.mark.parametrize(
    "name", [name if name == "a head" else pytest.param(name, marks=pytest.mark.slow) for name in WHOLE]
)
def test_tables_that_stay_whole_are_told_and_train_as_before(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, message = WHOLE[name]
    use_float64()
    model, plain = pair(build)
    pipelined = pipeline(model, (), [2], 2, 12, row_shards=True)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 30, (12, 6)).astype("int32"), rng.normal(size=(12, 3))
    assert_same_variables_after(2, pipelined, plain, x, y)
    assert re.search(f"row_shards: each replica keeps all rows of {message}", caplog.text), caplog.text
    assert not _in_shards(pipelined)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            keras.optimizers.Lamb,
            "optimizer Lamb updates an element of a parameter by all others, but with row_shards=T",
        ),
        (
            lambda: keras.optimizers.SGD(clipnorm=1.0),
            r"clips the norm of each gradient \(clipnorm=1\), but with row_sh",
        ),
    ],
    ids=["lamb", "clipnorm"],
)
def test_optimizers_that_need_all_elements_are_refused(optimizer: Any, message: str) -> None:
    model = table()
    model.compile(optimizer(), "mse")
    with pytest.raises(CaptureError, match=message):
        pipeline(model, (), [2], 1, 12, row_shards=True)


def test_placed_operators_are_refused() -> None:
    with pytest.raises(PlanError, match="operators can't be placed one by one with row_shards=True; set row_shards="):
        dapple.Plan.manual((), [[0]], 1, 8, operator_devices=[[0, 1]], row_shards=True)


@pytest.mark.slow
def test_words_that_a_table_lacks_are_errors_as_in_keras() -> None:
    """Padding follows the last row, which nobody may look up."""
    x, y, _ = TABLE.batch(np.random.default_rng(0), 12)
    x[3, 2] = WORDS
    pipelined = pipeline(table(), (), [3], 1, 12, row_shards=True)
    with pytest.raises(Exception, match="is not in"):
        pipelined.train_on_batch(x, y)


@pytest.mark.slow
def test_what_was_evaluated_before_training_is_moved_into_shards() -> None:
    """Only training tells which tables are cut."""
    check_evaluation_before_and_after_training(row_shards=True)


@pytest.mark.slow
def test_values_go_from_rows_in_shards_to_other_shards_by_files_and_by_hand(tmp_path: pathlib.Path) -> None:
    rows = {"row_shards": True}
    others = [(2, rows), (2, {"optimizer_shards": True}), (4, {**rows, "optimizer_shards": True})]
    check_values_go_to(others, tmp_path, **rows)


@pytest.mark.slow
def test_tables_of_deferred_models_are_made_in_shards() -> None:
    check_deferred_models(row_shards=True)


@pytest.mark.thorough
def test_training_in_half_precision_is_the_same() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, plain = pair(table)
    pipelined = pipeline(model, (), [2], 2, 24, row_shards=True)
    rng = np.random.default_rng(0)
    assert_same_training(
        pipelined, plain, [TABLE.batch(rng, size) for size in (24, 11)], tolerance=TOLERANCE["bfloat16"]
    )
    assert "embedding/embeddings" in _in_shards(pipelined)


@pytest.mark.thorough
def test_workers_exchange_rows_and_write_whole_tables(tmp_path: pathlib.Path, workers: LocalWorkers) -> None:
    use_float64()
    model, plain = pair(table)
    plan = dapple.Plan.manual(["hidden"], [[0, 1], [2, 3]], 2, 24, row_shards=True)
    pipelined = dapple.transform(model, dapple.Cluster.of_servers(workers.addresses), plan)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [TABLE.batch(rng, size) for size in (24, 11, 24)])
    assert "embedding/embeddings" in _in_shards(pipelined)
    path = pipelined.save_checkpoint(tmp_path)
    pipelined.close()
    restored = table()
    dapple.load_checkpoint(path, restored)
    assert_same_variables(restored, plain, TOLERANCE["float64"])
