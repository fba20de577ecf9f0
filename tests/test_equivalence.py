"""Pipelined training gives what plain Keras gives, in logs, variables and slots.

All options, on smaller models: test_random_plans.py. Here are models that draws don't have, what is refused, and how
values go between plans.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    TOLERANCE,
    assert_equal_training,
    assert_same_training,
    assert_same_variables,
    assert_same_variables_after,
    largest_difference,
    pair,
    pipeline,
    use_float64,
    variables_of,
)
from keras import layers, ops
from references import SAMPLES, reference
from test_policy import RUN_AHEAD
from zoo import ZOO, Specimen

import dapple_tf as dapple
from dapple_tf.errors import CaptureError
from dapple_tf.tools.hosts import LocalWorkers
from graph_passes.errors import PassError
from graph_passes.ir.program import VariableKind

Devices = list[list[int]]
CHUNKS = [[0, 1]] * 4
VEE = [[0], [1], [1], [0]]

EXAMPLES: dict[str, tuple[str, Devices, int, dict[str, Any]]] = {
    "stages with unlike replicas": ("cnn", [[0, 1, 2], [3]], 7, {"recompute": ["boundary", "min_cut"]}),
    "unlike slices of replicas": ("lstm", [[0, 1], [2]], 2, {"shares": [[2, 1], [1]]}),
    "split backwards": ("tied", [[0, 1], [2], [3]], 4, {"schedule": "zb_h1"}),
    "a schedule of one's own": ("branches", [[0, 1], [2]], 4, {"schedule": RUN_AHEAD}),
}


def plan_of(name: str) -> tuple[Specimen, dapple.Plan]:
    model, devices, micro_batches, options = EXAMPLES[name]
    cuts = ZOO[model].cuts_for(len(devices))
    return ZOO[model], dapple.Plan.manual(cuts, devices, micro_batches, SAMPLES, **options)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_option_trains_as_plain_keras(name: str) -> None:
    use_float64()
    specimen, plan = plan_of(name)
    cluster = dapple.Cluster.local(4, kind="cpu")
    assert_equal_training(specimen, cluster, plan, reference(EXAMPLES[name][0]), steps=2)


def assert_same_inference(pipelined: dapple.PipelinedModel, plain: keras.Model, x: Any, y: Any, weights: Any) -> None:
    losses = [own.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0) for own in (pipelined, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5), "Keras' metrics are float32 whatever the model is"
    outputs = [own.predict(x, batch_size=8, verbose=0) for own in (pipelined, plain)]
    assert largest_difference(*outputs) <= TOLERANCE["float64"]


# ---- updates that are carried over


def test_what_is_carried_over_is_made_up_for_before_anyone_looks() -> None:
    """The learning rate changes, a batch is evaluated, values are read: each time all updates have been made."""
    use_float64()
    own, plain = pair(ZOO["multi_output"].build)
    cuts = ZOO["multi_output"].cuts_for(4)
    plan = dapple.Plan.manual(cuts, CHUNKS, 3, 13, "dapple_a", reverse_first_k=3, carried_updates=2)
    pipelined = dapple.transform(own, dapple.Cluster.local(2, kind="cpu"), plan)
    rng = np.random.default_rng(0)
    for number, size in enumerate((13, 13, 13, 5, 13)):
        x, y, weights = ZOO["multi_output"].batch(rng, size)
        for model in (pipelined, plain):
            model.train_on_batch(x, y, sample_weight=weights)
        if number == 1:
            losses = [model.test_on_batch(x, y, return_dict=True)["loss"] for model in (pipelined, plain)]
            np.testing.assert_allclose(*losses, rtol=2e-6)
        if number == 2:
            for model in (own, plain):
                model.optimizer.learning_rate = 0.1
        if number == 3:
            pipelined.sync()
            assert_same_variables(own, plain, TOLERANCE["float64"])
    pipelined.sync()
    assert_same_variables(own, plain, TOLERANCE["float64"])


def test_a_carried_update_of_an_infinite_gradient_is_skipped() -> None:
    """The next step was scaled by the value from before the carried update, and unscaled by the one after it."""
    use_float64()

    def build() -> keras.Model:
        model = ZOO["branches"].build()
        adam = keras.optimizers.Adam(1e-2, epsilon=1e-3)
        model.compile(keras.optimizers.LossScaleOptimizer(adam, initial_scale=8.0, dynamic_growth_steps=2), "mse")
        return model

    own, plain = pair(build)
    pipelined = pipeline(own, (), [2], 2, 13, carried_updates=1)
    rng = np.random.default_rng(0)
    for number in range(6):
        x, y, _ = ZOO["branches"].batch(rng, 13)
        y[0] = np.inf if number == 3 else y[0]
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(own, plain, TOLERANCE["float64"])


# ---- BatchNormalization and dropout depend on how a batch is sliced (docs/equivalence.md)


def sensitive() -> keras.Model:
    """What slices matter to, a layer used twice in a stage, and weights tied over the first and the last stage."""
    tied, twice = (layers.Dense(6, activation="tanh", name=name) for name in ("tied", "twice"))
    x = features = keras.Input((6,))
    x = layers.Dropout(0.3, seed=1, name="drop_0")(tied(x))
    x = layers.BatchNormalization(name="norm_0")(x)
    x = layers.Dropout(0.3, seed=2, name="drop_1")(twice(twice(x)))
    x = layers.Dense(6, activation="tanh", name="dense")(layers.BatchNormalization(name="norm_1")(x))
    x = layers.Dropout(0.3, seed=3, name="drop_2")(tied(x))
    model = keras.Model(features, layers.Dense(2, name="outputs")(x))
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse")
    return model


def trained(plan: dapple.Plan) -> tuple[list[float], list[keras.Variable]]:
    """Losses of three steps, and the variables after them."""
    keras.utils.set_random_seed(3)
    model = sensitive()
    pipelined = dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), plan)
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(size, 6)), rng.normal(size=(size, 2))) for size in (13, 6, 13)]
    losses = [pipelined.train_on_batch(x, y) for x, y in batches]
    pipelined.close()
    return losses, variables_of(model)


def test_stages_agree_with_a_single_one_where_slices_matter() -> None:
    use_float64()
    cuts, options = ["norm_0", "drop_1", "dense"], {"schedule": "zb_v", "recompute": "boundary"}
    expected, variables = trained(dapple.Plan.manual([], [[0]], 4, 13))
    losses, own = trained(dapple.Plan.manual(cuts, VEE, 4, 13, **options))
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for variable, other in zip(own, variables, strict=True):
        assert largest_difference(variable.value, other.value) <= TOLERANCE["float64"], variable.path


# ---- tables whose rows don't all belong to samples
# Keras has one set of rows for the whole batch, and its optimizers square them one by one. Slices had a set each: with
# Adam a table of positions was off by 0.4 after eight steps of two micro-batches.

ROWS, WIDTH, LENGTH = 7, 3, 4
PLACES = np.array([1, 1, 2, 0], "int32")
Look = Callable[[Any, Any], Any]


class Table(layers.Layer):
    """A table, something looked up in it, and perhaps a penalty."""

    def __init__(self, look: Look, penalty: Look | None = None) -> None:
        super().__init__(name="a")
        self.look, self.penalty = look, penalty

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(ROWS, WIDTH), initializer=keras.initializers.RandomNormal(seed=5))

    def call(self, x: Any) -> Any:
        if self.penalty is not None:
            self.add_loss(self.penalty(self.table, x))
        return self.look(self.table, x)


def unique(table: Any, x: Any) -> Any:
    """Each row once, also if ids count from the end: -1 is row 6."""
    ids, places = tf.unique(tf.concat([tf.reshape(x, [-1]), [ROWS - 1, -1]], 0))
    return tf.reshape(ops.take(ops.take(table, ids, axis=0), places[:-2], axis=0), [-1, LENGTH, WIDTH])


def squares(table: Any, x: Any) -> Any:
    """A penalty of some rows."""
    return ops.sum(ops.square(ops.take(table, ops.convert_to_tensor(PLACES), axis=0)))


def looking(look: Look, penalty: Look | None = None, optimizer: Any = None) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Dense(4, "tanh", name="b")(layers.Flatten()(Table(look, penalty)(tokens)))
    model = keras.Model(tokens, layers.Dense(2)(hidden))
    model.compile(optimizer or keras.optimizers.Adam(0.1), "mse")
    return model


def ids_and_numbers(samples: int = 7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, ROWS, (samples, LENGTH)).astype("int32"), rng.normal(size=(samples, 2))


def two_stages() -> keras.Model:
    """A table looked up by int32 ids of the batch in one stage, and by int64 constants in another."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(ROWS, WIDTH, embeddings_initializer=keras.initializers.RandomNormal(seed=5))

    class Late(layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = table

        def call(self, x: Any) -> Any:
            return x * self.table(ops.convert_to_tensor(PLACES.astype("int64")))

    hidden = Late(name="c")(layers.Dense(WIDTH, "tanh", name="b")(table(tokens)))
    model = keras.Model(tokens, layers.Dense(2)(layers.Flatten()(hidden)))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


@pytest.mark.parametrize(
    ("build", "replicas"),
    [
        (lambda: looking(unique, optimizer=keras.optimizers.SGD(0.5, global_clipnorm=0.1)), (2, 1)),
        (lambda: looking(lambda _, x: ops.one_hot(x, WIDTH), squares), (1, 1)),
        (two_stages, (1, 2)),
    ],
    ids=["unique", "penalty", "indices of different types: this was an internal error"],
)
def test_rows_that_slices_have_in_common_are_added_up(
    build: Callable[[], keras.Model], replicas: tuple[int, int]
) -> None:
    use_float64()
    model, plain = pair(build)
    assert_same_variables_after(3, pipeline(model, ("b",), replicas, 2, 7), plain, *ids_and_numbers())


def test_indices_of_several_samples_are_refused_unless_there_is_one_slice() -> None:
    use_float64()
    wanted = r"gradient of 'a/.*' in stage 0 can't be told apart .* layer 'a' looks up, .*With 2 slices"
    model, plain = pair(lambda: looking(lambda table, x: ops.one_hot(x, WIDTH) * tf.gather(table, tf.reduce_max(x, 0))))
    with pytest.raises(PassError, match=wanted):
        pipeline(model, ("b",), (1, 1), 2, 7).train_on_batch(*ids_and_numbers())
    assert_same_variables_after(2, pipeline(model, ("b",), (1, 2), 1, 7), plain, *ids_and_numbers())


# ---- replicas that keep shards of slots, and of the rows of embeddings

BOTH = {"row_shards": True, "optimizer_shards": True}
WORDS = 83


def table(optimizer: Any = None, **options: Any) -> keras.Model:
    """An embedding of many rows, of which batches look up several twice, and a layer of elements in odd numbers."""
    words = keras.Input((6,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(WORDS, 3, name="embedding", **options)(words))
    x = layers.Dense(7, activation="tanh", name="hidden", kernel_constraint="non_neg")(x)
    model = keras.Model(words, layers.Dense(3, name="logits")(x))
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def of_words(rng: np.random.Generator, samples: int) -> tuple[Any, Any, Any]:
    return rng.integers(0, WORDS, (samples, 6)).astype("int32"), rng.normal(size=(samples, 3)), None


def held(pipelined: dapple.PipelinedModel) -> dict[VariableKind, int]:
    """Elements of variables of each kind that a device has between steps."""
    kept: dict[VariableKind, int] = {}
    for holding in pipelined._engine.builder.holdings:
        for variable in holding.variables if pipelined.cluster.device_names[0] in holding.devices else ():
            kept[variable.kind] = kept.get(variable.kind, 0) + int(np.prod(variable.storage_shape))
    return kept


def test_each_replica_holds_its_part_and_trains_as_plain_keras() -> None:
    """Evaluation before any training knows no shards; values are moved into these."""
    use_float64()
    model, plain = pair(table)
    pipelined = pipeline(model, (), [3], 2, 24, **BOTH)
    rng = np.random.default_rng(0)
    assert_same_inference(pipelined, plain, *of_words(rng, 11))
    assert_same_training(pipelined, plain, [of_words(rng, size) for size in (24, 11, 24)])
    assert_same_inference(pipelined, plain, *of_words(rng, 11))
    others = sum(int(np.prod(v.shape)) for v in model.trainable_variables[1:])
    kept = held(pipelined)
    of_table = 3 * 28
    assert kept[VariableKind.PARAMETER] == of_table + others
    assert kept[VariableKind.OPTIMIZER] == pytest.approx(2 * (of_table + others / 3), rel=0.05)


class OwnAdam(keras.optimizers.Adam):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: table(embeddings_constraint=keras.constraints.MaxNorm(0.1, axis=0)),
            "'embedding/embeddings': its constraint, MaxNorm, may compare rows",
        ),
        (
            lambda: table(OwnAdam()),
            "'embedding/embeddings': the optimizer isn't known to update each of its row",
        ),
    ],
    ids=["constraint", "optimizer"],
)
def test_tables_that_stay_whole_are_told_and_train_as_before(
    build: Callable[[], keras.Model], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    use_float64()
    model, plain = pair(build)
    x, y, _ = of_words(np.random.default_rng(0), 12)
    assert_same_variables_after(2, pipeline(model, (), [2], 2, 12, row_shards=True), plain, x % 30, y)
    assert f"row_shards: each replica keeps all rows of {message}" in caplog.text


@pytest.mark.parametrize(
    ("optimizer", "shards", "text"),
    [
        (keras.optimizers.Lamb, "row", "optimizer Lamb updates an element of a parameter by all others, but with row_"),
        (
            *(lambda: keras.optimizers.SGD(clipnorm=1.0), "optimizer"),
            r"optimizer SGD clips the norm of each gradient \(clipnorm=1\)",
        ),
    ],
)
def test_optimizers_that_need_all_elements_are_refused_before_there_is_data(
    optimizer: Callable[[], keras.optimizers.Optimizer], shards: str, text: str
) -> None:
    with pytest.raises(CaptureError, match=text):
        pipeline(table(optimizer()), (), [2], 1, 8, **{f"{shards}_shards": True})


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(dapple.PlanError, match="no plan has operator_devices and row_shards: the placement says which"):
        dapple.Plan.manual((), [[0]], 1, 8, operator_devices=[[0, 1]], row_shards=True)
    plan = dapple.Plan.manual(ZOO["cnn"].cuts_for(4), CHUNKS, 1, 13, reverse_first_k=3, carried_updates=2)
    with pytest.raises(dapple.DappleError, match="carried_updates is 2, but the optimizer needs all gradients"):
        dapple.transform(ZOO["cnn"].build(), dapple.Cluster.local(2, kind="cpu"), plan)


def own_optimizer(change: Callable[[Any, Any], Any], name: str = "Own") -> keras.optimizers.Optimizer:
    """SGD of one's own, which changes each gradient before."""

    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        keras.optimizers.SGD.update_step(self, change(self, gradient), variable, learning_rate)

    made: keras.optimizers.Optimizer = type(name, (keras.optimizers.SGD,), {"update_step": update_step})(0.1, 0.9)
    return made


def if_finite(_: Any, gradient: Any) -> Any:
    """It was taken for the check of loss scaling: each device looked at its own shard and skipped another part."""
    return ops.where(ops.all(ops.isfinite(gradient)), gradient, ops.zeros_like(gradient))


def or_random(optimizer: Any, gradient: Any) -> Any:
    """Steps failed while they ran: a branch's tensor had a shard's shape in one place and not in another."""
    drawn = lambda: keras.random.normal(gradient.shape, dtype=gradient.dtype, seed=1)  # noqa: E731
    return ops.cond(optimizer.iterations % 2 == 0, lambda: gradient, drawn)


def or_zeros(optimizer: Any, gradient: Any) -> Any:
    """The zeros kept their whole shape, and the step failed."""
    zeros = ops.zeros(gradient.shape, gradient.dtype)
    return ops.cond(optimizer.iterations % 2 == 0, lambda: gradient, lambda: ops.zeros_like(zeros))


@pytest.mark.parametrize(
    ("optimizer", "constraint", "text"),
    [
        (
            *(lambda: keras.optimizers.LossScaleOptimizer(own_optimizer(if_finite)), None),
            "optimizer Own computes All of elements of .*only",
        ),
        (lambda: own_optimizer(or_random), None, "optimizer Own computes (Stateless)?If of elements of"),
        (
            *(lambda: "sgd", keras.constraints.UnitNorm()),
            "SGD or a constraint, such as UnitNorm of .*only/kernel', computes Sum of",
        ),
    ],
)
def test_updates_that_need_all_elements_are_refused_by_what_they_compute(
    optimizer: Callable[[], Any], constraint: Any, text: str
) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, kernel_constraint=constraint, name="only")])
    model.compile(optimizer(), "mse")
    pipelined = pipeline(model, (), [2], 1, 8, optimizer_shards=True)
    with pytest.raises(CaptureError, match=text):
        pipelined.train_on_batch(np.ones((8, 4)), np.ones((8, 3)))


class OnlyKernels(keras.optimizers.SGD):
    """Never changes biases. Shards of these were to be sent, though the update had none: KeyError."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if len(variable.shape) > 1:
            super().update_step(gradient, variable, learning_rate)


def accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, epsilon=1e-3)


def large(optimizer: Any) -> keras.Model:
    """TensorFlow traces zeros for 1,000 elements and more in another way: Adam was refused, or the step failed."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(300), layers.Dense(4), layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def tied(optimizer: Any) -> keras.Model:
    """Both groups of a device had one function for a branch, with zeros of a shard's shape: the step was cancelled."""
    features, twice = keras.Input((4,)), layers.Dense(4, name="tied")
    x = layers.Dense(4, name="alike")(twice(features))
    model = keras.Model(features, layers.Dense(2)(twice(x)))
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(
    ("build", "optimizer", "replicas"),
    [
        (tied, lambda: own_optimizer(or_zeros), [2]),
        (tied, lambda: OnlyKernels(0.1, 0.9), [2]),
        (large, accumulating, [2]),
        (tied, accumulating, [1, 1]),
    ],
    ids=["branch", "only kernels", "large", "alike"],
)
def test_updates_in_shards_equal_plain_keras(
    build: Callable[[Any], keras.Model], optimizer: Callable[[], Any], replicas: list[int]
) -> None:
    use_float64()
    model, plain = pair(lambda: build(optimizer()))
    pipelined = pipeline(model, ("alike",)[: len(replicas) - 1], replicas, 1, 8, optimizer_shards=True)
    rng = np.random.default_rng(0)
    assert_same_variables_after(3, pipelined, plain, rng.normal(size=(8, 4)), rng.normal(size=(8, 2)))


def test_devices_without_rows_of_an_infinite_gradient_skip_the_step_too() -> None:
    """A device whose shard had no rows saw none that wasn't finite: its slots decayed, and its counters went on."""
    use_float64()
    inner = {"learning_rate": 0.01, "epsilon": 1e-3}
    model, plain = pair(
        lambda: table(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(**inner), initial_scale=8.0))
    )
    pipelined = pipeline(model, ["embedding"], [2, 1], 1, 12, optimizer_shards=True)
    rng = np.random.default_rng(0)
    for step in range(3):
        x, y, _ = of_words(rng, 12)
        if step == 1:  # all rows are the first device's
            x, y[0] = x % 30, np.inf
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(model, plain, TOLERANCE["float64"])


def test_values_go_from_shards_to_other_shards_by_files_and_by_hand(tmp_path: pathlib.Path) -> None:
    """Checkpoints don't tell that there were shards, and values can be read and assigned one by one."""
    x, y, _ = of_words(np.random.default_rng(0), 12)
    first = pipeline(table(), (), [3], 1, 12, **BOTH)
    for _ in range(2):
        first.train_on_batch(x, y)
    first.save_checkpoint(tmp_path)
    first.sync()
    expected = [np.asarray(variable.value) for variable in variables_of(first.model)]
    for replicas, options in ((2, {}), (4, BOTH)):
        other = pipeline(table(), (), [replicas], 1, 12, **options)
        other.train_on_batch(x, y)
        other.restore_checkpoint(tmp_path)
        table_and_slot = 0, len(other.model.variables) + 2
        variables = variables_of(other.model)
        for place in table_and_slot:
            np.testing.assert_array_equal(np.asarray(variables[place].value), expected[place])
        other.sync()
        for variable, value in zip(variables, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(variable.value), value)
        for place in table_and_slot:
            variables[place].assign(ops.zeros(variables[place].shape))
            other.sync()
            assert not np.any(np.asarray(variables[place].value))


def test_workers_exchange_shards_and_write_whole_values(tmp_path: pathlib.Path, workers: LocalWorkers) -> None:
    use_float64()
    model, plain = pair(table)
    plan = dapple.Plan.manual(["hidden"], [[0, 1], [2, 3]], 2, 24, **BOTH)
    pipelined = dapple.transform(model, dapple.Cluster.of_servers(workers.addresses), plan)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [of_words(rng, size) for size in (24, 11)])
    path = pipelined.save_checkpoint(tmp_path)
    pipelined.close()
    restored = table()
    dapple.load_checkpoint(path, restored)
    assert_same_variables(restored, plain, TOLERANCE["float64"])


def test_deferred_models_are_made_in_shards() -> None:
    keras.utils.set_random_seed(1)
    with dapple.deferred_init():
        model = table()
    keras.utils.set_random_seed(1)
    plain = table()
    plain.run_eagerly = True
    x, y, _ = of_words(np.random.default_rng(0), 12)
    pipelined = pipeline(model, (), [3], 1, 12, **BOTH)
    for _ in range(2):
        assert pipelined.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=1e-4)
