"""Every Keras optimizer and setting updates as in plain Keras, over stages and replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_variables_after, assert_trains_as_keras, pair, pipeline, use_float64
from step_programs import built_of_model

import dapple_tf as dapple
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.variables import VariableTable
from graph_passes.ir.graph import Graph

optimizers = keras.optimizers
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 4, size=(7, 3)).astype("int32")
TARGETS = rng.normal(size=(7, 2))
BATCH = (TOKENS, TARGETS, None)


def model_with(optimizer: Callable[[], Any]) -> keras.Model:
    """An embedding whose rows repeat within a batch, and a dense layer with a constraint, in two stages."""
    tokens = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(4, 2, name="embedding")(tokens)
    x = keras.layers.Flatten(name="flat")(x)
    x = keras.layers.Dense(3, activation="tanh", name="hidden", kernel_constraint=keras.constraints.MaxNorm(0.8))(x)
    model = keras.Model(tokens, keras.layers.Dense(2, name="last")(x))
    model.compile(optimizer(), "mse")
    return model


def scaled() -> Any:
    return optimizers.LossScaleOptimizer(optimizers.Adam(0.01, global_clipnorm=0.05))


def without_decay_of_biases() -> Any:
    made = optimizers.AdamW(0.01, weight_decay=0.5)
    made.exclude_from_weight_decay(var_names=["bias"])
    return made


class Centralized(optimizers.SGD):
    """Overrides what Keras' steps call: ours called `apply` instead, without a word."""

    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
        whole = [(tf.convert_to_tensor(gradient), variable) for gradient, variable in grads_and_vars]
        centred = [(gradient - tf.reduce_mean(gradient, axis=0), variable) for gradient, variable in whole]
        return super().apply_gradients(centred, **options)


SETTINGS: dict[str, Callable[[], Any]] = {
    "excluded": without_decay_of_biases,
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "centralized": lambda: Centralized(0.1, momentum=0.9),
}


def averaged() -> Any:
    return optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_update_as_in_plain_keras(name: str) -> None:
    assert_trains_as_keras(lambda: model_with(SETTINGS[name]), ["flat"], (2, 1), 2, [BATCH] * 2)


def test_compiled_updates_are_those_of_plain_keras() -> None:
    """XLA compiles updates, too: with branches, rows of embeddings and variables of their own."""
    use_float64()
    model, plain = pair(lambda: model_with(scaled))
    plan = dapple.Plan.manual(["flat"], [[0, 1], [2]], 2, 7, jit_compile=True)
    pipelined = dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), plan)
    assert_same_variables_after(2, pipelined, plain, TOKENS, TARGETS)
    library = pipelined._engine.session.graph.as_graph_def().library.function
    updates = [function.signature.name for function in library if function.signature.name.endswith("apply_compiled")]
    assert len(updates) == 2


def test_a_frozen_first_stage_has_an_empty_backward() -> None:
    def build() -> keras.Model:
        model = model_with(lambda: optimizers.SGD(0.1))
        model.get_layer("embedding").trainable = False
        model.compile(optimizers.SGD(0.1), "mse")
        return model

    assert_trains_as_keras(build, ["flat"], (2, 1), 2, [BATCH])


class ClippedTogether(optimizers.SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(tf.clip_by_global_norm(list(grads), 0.05)[0], trainable_variables)


def test_an_optimizer_that_couples_gradients_of_stages_is_refused() -> None:
    """Each stage clipped by the norm of its own gradients, without a word; in a stage for itself it is right."""
    use_float64()

    def build() -> keras.Model:
        return model_with(lambda: ClippedTogether(0.1))

    scaled = model_with(lambda: optimizers.LossScaleOptimizer(ClippedTogether(0.1)))
    coupled = r"ClippedTogether.*'embedding/embeddings' and 'hidden/kernel'.*one stage"
    for model in (build(), scaled):
        with pytest.raises(dapple.CaptureError, match=coupled):
            pipeline(model, ["flat"], (1, 1), 1, 7).train_on_batch(TOKENS, TARGETS)
    assert_trains_as_keras(build, [], (2,), 2, [BATCH])


def test_the_norm_of_accumulated_gradients_of_several_stages_is_refused() -> None:
    """Keras clips what it has accumulated; with several stages each step's gradients were clipped, silently."""

    def own() -> keras.optimizers.Optimizer:
        return optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.05, epsilon=1e-3)

    use_float64()
    scaled = lambda: optimizers.LossScaleOptimizer(own())  # noqa: E731
    for optimizer, cuts, replicas, shards in ((own, ["flat"], (1, 1), False), (scaled, [], (2,), True)):
        with pytest.raises(dapple.CaptureError, match=r"global_clipnorm=0.05.*gradient_accumulation_steps=2.*larger"):
            pipeline(model_with(optimizer), cuts, replicas, 1, 7, optimizer_shards=shards)
    assert_trains_as_keras(lambda: model_with(own), [], (2,), 2, [BATCH] * 2)


def test_an_average_of_a_variable_without_gradient_is_refused() -> None:
    """Keras averages what was frozen after the optimizer was built, too; here it kept its first value, silently."""
    model = model_with(averaged)
    model.optimizer.build(model.trainable_variables)
    model.get_layer("hidden").trainable = False
    model.compile(model.optimizer, "mse")
    with pytest.raises(dapple.CaptureError, match=r"moving average \(use_ema\) of '.*hidden/kernel'.*no gradient"):
        pipeline(model, ["flat"], (1, 1), 1, 7).train_on_batch(TOKENS, TARGETS)
    frozen = model_with(averaged)
    frozen.get_layer("hidden").trainable = False
    frozen.compile(averaged(), "mse")
    pipeline(frozen, ["flat"], (1, 1), 1, 7).train_on_batch(TOKENS, TARGETS)


def test_what_an_update_assigns_is_in_the_order_of_the_graph() -> None:
    """TensorFlow keeps it in a set: in each run steps had another order, and operators were placed elsewhere."""
    model = model_with(scaled)
    plan = dapple.Plan.manual(["flat"], [[0], [1]], 2, 4)
    passes = StepPasses(plan, dapple.Cluster.local(2, kind="cpu"))
    updates = built_of_model(model, passes, VariableTable(model)).updates
    assert len(updates) == 2
    for update in updates:
        effects = update.apply.effects
        assert len(effects) > 1 and list(effects) == Graph(update.apply.graph).ordered(effects)
