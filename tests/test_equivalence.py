"""One example of each option: pipelined training gives what plain Keras gives, in loss, gradients and variables.

All options together, on smaller models: test_random_plans.py.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import (
    TOLERANCE,
    assert_equal_training,
    assert_same_variables,
    largest_difference,
    pair,
    use_float64,
    variables_of,
)
from references import SAMPLES, reference
from test_policy import RUN_AHEAD
from zoo import ZOO

import dapple_tf as dapple
from dapple_tf.tools.evaluation.random_plans import local_servers

Devices = list[list[int]]
CHUNKS = [[0, 1]] * 4
PERIODIC = [[0, 1], [2, 3], [0, 1], [2, 3]]
VEE = [[0], [1], [1], [0]]

EXAMPLES: dict[str, tuple[str, Devices, int, dict[str, Any]]] = {
    "data parallelism": ("multi_output", [[0, 1, 2]], 1, {}),
    "stages": ("multi_output", [[0], [1], [2]], 4, {"schedule": "dapple_b"}),
    "stages with unlike replicas": ("cnn", [[0, 1, 2], [3]], 7, {"schedule": "gpipe"}),
    "unlike slices of replicas": ("lstm", [[0, 1], [2]], 2, {"shares": [[2, 1], [1]]}),
    "recomputation": ("cnn", [[0], [1]], 4, {"recompute": ["boundary", "min_cut"]}),
    "split backwards": ("tied", [[0, 1], [2], [3]], 4, {"schedule": "zb_h1"}),
    "several stages on a device": ("tied", PERIODIC, 4, {"schedule": "interleaved"}),
    "stages there and back": ("branches", VEE, 4, {"schedule": "zb_v"}),
    "weight gradients after other stages'": ("tied", CHUNKS, 4, {"reverse_first_k": 3}),
    "updates in the next step": ("multi_output", CHUNKS, 2, {"carried_updates": 2, "reduction_order": "first_layers"}),
    "last backwards in pieces": ("branches", [[0, 1]], 2, {"backward_cuts": ["stem"], "bucket_bytes": 100}),
    "a schedule of one's own": ("branches", [[0, 1], [2]], 4, {"schedule": RUN_AHEAD}),
    "all-reduce by server": ("branches", [[0, 1, 2, 3]], 2, {"all_reduce": "hierarchical"}),
    "skip tensors by way of stages": ("branches", [[0], [1, 2], [3]], 4, {"relays": [1]}),
    "slots in shards": ("tied", [[0, 1], [2]], 2, {"optimizer_shards": True}),
    "XLA": ("cnn", [[0], [1]], 2, {"jit_compile": True}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_option_trains_as_plain_keras(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64()
    model, devices, micro_batches, options = EXAMPLES[name]
    plan = dapple.Plan.manual(ZOO[model].cuts_for(len(devices)), devices, micro_batches, SAMPLES, **options)
    cluster = local_servers(2, 2) if plan.all_reduce != "flat" else dapple.Cluster.local(6, kind="cpu")
    # Updates that are carried over meet a batch of another size.
    steps = 3 if plan.carried_updates else 2
    assert_equal_training(ZOO[model], cluster, plan, reference(model), monkeypatch, steps=steps)


@pytest.mark.parametrize("name", ["unlike slices of replicas", "skip tensors by way of stages", "slots in shards"])
def test_evaluation_and_prediction_are_as_in_plain_keras(name: str) -> None:
    use_float64()
    model, devices, micro_batches, options = EXAMPLES[name]
    own, plain = pair(ZOO[model].build)
    plan = dapple.Plan.manual(ZOO[model].cuts_for(len(devices)), devices, micro_batches, SAMPLES, **options)
    pipelined = dapple.transform(own, dapple.Cluster.local(6, kind="cpu"), plan)
    x, y, weights = ZOO[model].batch(np.random.default_rng(0), 11)
    losses, outputs = [], []
    for trained in (pipelined, plain):
        trained.train_on_batch(x, y, sample_weight=weights)
        losses.append(trained.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0))
        outputs.append(trained.predict(x, batch_size=8, verbose=0))
    assert losses[0] == pytest.approx(losses[1], rel=2e-5), "Keras' metrics are float32 whatever the model is"
    assert largest_difference(*outputs) <= TOLERANCE["float64"]


# ---- updates that are carried over


def test_an_optimizer_that_must_know_all_gradients_carries_nothing_over() -> None:
    plan = dapple.Plan.manual(ZOO["cnn"].cuts_for(4), CHUNKS, 1, 13, reverse_first_k=3, carried_updates=2)
    with pytest.raises(dapple.DappleError, match="carried_updates is 2, but the optimizer needs all gradients"):
        dapple.transform(ZOO["cnn"].build(), dapple.Cluster.local(2, kind="cpu"), plan)


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
            assert_same_variables(own, plain, 1e-10)
    pipelined.sync()
    assert_same_variables(own, plain, 1e-10)


@pytest.mark.parametrize("devices", [[[0]], [[0, 1]]], ids=str)
def test_a_carried_update_of_an_infinite_gradient_is_skipped(devices: Devices) -> None:
    """The next step was scaled by the value from before the carried update, and unscaled by the one after it."""
    use_float64()

    def build() -> keras.Model:
        model = ZOO["branches"].build()
        adam = keras.optimizers.Adam(1e-2, epsilon=1e-3)
        model.compile(keras.optimizers.LossScaleOptimizer(adam, initial_scale=8.0, dynamic_growth_steps=2), "mse")
        return model

    own, plain = pair(build)
    plan = dapple.Plan.manual((), devices, 2, 13, carried_updates=1)
    pipelined = dapple.transform(own, dapple.Cluster.local(2, kind="cpu"), plan)
    rng = np.random.default_rng(0)
    for number in range(6):
        x, y, _ = ZOO["branches"].batch(rng, 13)
        if number == 3:
            y[0] = np.inf
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(own, plain, 1e-10)


# ---- BatchNormalization and dropout depend on how a batch is sliced (docs/equivalence.md)


def sensitive() -> keras.Model:
    """What slices matter to, a layer used twice in a stage, and weights tied over the first and the last stage."""
    layers = keras.layers
    tied = layers.Dense(6, activation="tanh", name="tied")
    twice = layers.Dense(6, activation="tanh", name="twice")
    x = features = keras.Input((6,))
    x = layers.Dropout(0.3, seed=1, name="drop_0")(tied(x))
    x = layers.BatchNormalization(name="norm_0")(x)
    x = layers.Dropout(0.3, seed=2, name="drop_1")(twice(twice(x)))
    x = layers.Dense(6, activation="tanh", name="dense")(layers.BatchNormalization(name="norm_1")(x))
    x = layers.Dropout(0.3, seed=3, name="drop_2")(tied(x))
    model = keras.Model(features, layers.Dense(2, name="outputs")(x))
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse")
    return model


def trained(plan: dapple.Plan | None) -> tuple[list[float], list[keras.Variable]]:
    """Losses of three steps, and the variables after them; None is plain Keras."""
    keras.utils.set_random_seed(3)
    model = sensitive()
    model.run_eagerly = plan is None
    trainer = model if plan is None else dapple.transform(model, dapple.Cluster.local(4, kind="cpu"), plan)
    rng = np.random.default_rng(0)
    losses = []
    for size in (13, 6, 13):
        x, y = rng.normal(size=(size, 6)), rng.normal(size=(size, 2))
        losses.append(trainer.train_on_batch(x, y, return_dict=True)["loss"])
    if isinstance(trainer, dapple.PipelinedModel):
        trainer.close()
    return losses, variables_of(model)


@functools.cache
def unsplit(micro_batches: int) -> tuple[list[float], list[keras.Variable]]:
    """The reference of every policy: plain Keras for one slice, a single stage for several."""
    return trained(None if micro_batches == 1 else dapple.Plan.manual([], [[0]], micro_batches, 13))


@pytest.mark.parametrize(
    ("devices", "micro_batches", "options"),
    [
        ([[0], [1], [2], [3]], 4, {"schedule": "fast_forward_b"}),
        (VEE, 4, {"schedule": "zb_v", "recompute": "boundary"}),
        ([[0]] * 4, 1, {"reverse_first_k": 3, "carried_updates": 2}),
        ([[0], [1], [0], [1]], 1, {"schedule": "modulo"}),
    ],
    ids=str,
)
def test_policies_agree_where_slices_matter(devices: Devices, micro_batches: int, options: dict[str, Any]) -> None:
    use_float64()
    expected, variables = unsplit(micro_batches)
    plan = dapple.Plan.manual(["norm_0", "drop_1", "dense"], devices, micro_batches, 13, **options)
    losses, own = trained(plan)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for variable, other in zip(own, variables, strict=True):
        assert largest_difference(variable.value, other.value) <= 1e-10, variable.path
