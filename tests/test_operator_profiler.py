"""Measuring the single operators of a model's step."""

from __future__ import annotations

import re

import numpy as np
import pytest
from models_for_tests import classifier, plan, values

import dapple_tf as dapple
from dapple_tf.operators.signatures import OpSignature


def test_operators_are_measured_and_the_model_stays_as_it_is() -> None:
    model = classifier()
    before = values(model)
    cluster = dapple.Cluster.local(2, kind="cpu")
    costs = dapple.profile_operators(model, cluster, dapple.Plan.by_operators(2, 8), steps=2)
    for own, was in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(own, was)
    measured = [OpSignature.parse(spelled) for spelled in re.findall(r'^    "(.*?)"', costs.to_json(), re.MULTILINE)]
    products = [signature for signature in measured if signature.op == "MatMul"]
    # Of a batch of 8 samples, the first and the last layer.
    assert {output.shape for signature in products for output in signature.outputs} >= {(8, 6), (8, 3)}
    for signature in products:
        mean = costs.measured(signature, "CPU")
        assert mean is not None and mean.seconds > 0 and mean.times > 0


def test_what_cannot_be_measured() -> None:
    cluster = dapple.Cluster.local(3, kind="cpu")
    with pytest.raises(dapple.PlanError, match="this plan runs its stages as a whole: measure operators for"):
        dapple.profile_operators(classifier(), cluster, plan())
    with pytest.raises(dapple.PlanError, match="plan puts stage 0 on device 3"):
        dapple.profile_operators(classifier(), cluster, dapple.Plan.by_operators(4, 8))
    described = dapple.Cluster.from_json('{"format": "dapple_tf.cluster/1", "servers": [{"devices": 2}]}')
    with pytest.raises(dapple.ProfileError, match="without real devices"):
        dapple.profile_operators(classifier(), described, dapple.Plan.by_operators(2, 8))
