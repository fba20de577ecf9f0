"""Training with placed operators: what a user gives, and what comes of it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from equivalence import assert_same_training, pair, use_float64

import dapple_tf as dapple
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.operators.op_costs import OperatorCosts

layers = keras.layers
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(8, 4)), rng.normal(size=(8, 2))


def branches() -> keras.Model:
    """Two parallel branches, normalised by the batch, with dropout."""
    features = keras.Input((4,))
    x = layers.Add()([layers.Dense(4, activation="swish")(features), layers.Dense(4)(features)])
    x = layers.Dropout(0.3)(layers.BatchNormalization()(x))
    model = keras.Model(features, layers.Dense(2)(x))
    model.compile("sgd", "mse")
    return model


def cluster() -> dapple.Cluster:
    return dapple.Cluster.local(2, kind="cpu")


PLACED = Plan.by_operators(2, 8)
WRONG: dict[str, dict[str, Any]] = {
    "unknown placement 'x'; use 'fd_dps', or leave it out": {"placement": "x"},
    r"plan puts stage 0 on device 2, but the cluster has 2 devices \(0 to 1\)": {"plan": Plan.by_operators(3, 8)},
    "places operators, for which nothing is searched that schedule would be about; leave them out": {
        "placement": "fd_dps",
        "global_batch_size": 8,
        "schedule": "auto",
        "x": X,
    },
    "got operator_costs, which mean nothing unless operators are placed; add placement='fd_dps'": {
        "plan": Plan.data_parallel(2, 8),
        "operator_costs": OperatorCosts(),
    },
    r"operator_costs is \{\}; give a dapple_tf\.OperatorCosts, by": {"plan": PLACED, "operator_costs": {}},
    "operators can't be placed one by one with optimizer_shards=True; set optimizer_shards=False": {
        "plan": Plan.data_parallel(2, 8, optimizer_shards=True),
        "placement": "fd_dps",
    },
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_meant_is_one_clear_error_before_anything_is_measured(text: str) -> None:
    with pytest.raises((PlanError, TypeError), match=text):
        dapple.transform(branches(), cluster(), **{"plan": None, **WRONG[text]})


def test_layers_see_the_whole_batch_as_plain_keras_does() -> None:
    use_float64()
    model, plain = pair(branches)
    pipelined = dapple.transform(model, cluster(), PLACED, operator_costs=OperatorCosts())
    # Random numbers and the batch's moments included: what verifies the first step demands training behaviour.
    assert_same_training(pipelined, plain, [(X, Y, None), (X, Y, None), (X[:5], Y[:5], None)])
