"""Steps whose operators are placed one by one train as plain Keras does, whatever the placement."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import keras
import numpy as np
import pytest
from branching_models import BRANCHING, batch
from equivalence import TOLERANCE, largest_difference, use_float64, variables_of
from selection import sampled

import dapple_tf as dapple
from dapple_tf.describe.plan import Plan
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.rooflines import Roofline

SLOW_CORES = OperatorCosts({"CPU": Roofline(flops=1e8, bandwidth=1e9, launch=1e-6)})
"""Devices on which splitting even small operators pays."""


def cluster_of(devices: int) -> dapple.Cluster:
    """Local devices whose links needn't be measured."""
    return dataclasses.replace(dapple.Cluster.local(devices, kind="cpu"), intra_bandwidth=1e10, intra_latency=1e-6)


# ---- FD-DPS itself


def build(name: str) -> keras.Model:
    """A model with branches, with the same values each time."""
    use_float64()
    keras.utils.set_random_seed(3)
    return BRANCHING[name].build()


@functools.cache
def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [batch(rng, size) for size in (16, 16, 11)]


def evaluated(model: Any) -> dict[str, float]:
    x, y = batches()[0]
    metrics: dict[str, float] = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    return metrics


@functools.cache
def plain(name: str) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """Logs of two steps and values of plain Keras."""
    model = build(name)
    logs = [model.train_on_batch(x, y, return_dict=True) for x, y in batches()[:2]]
    return logs, [np.asarray(variable.value) for variable in variables_of(model)]


def assert_same_logs(own: dict[str, float], other: dict[str, float]) -> None:
    assert own.keys() == other.keys()
    for name, value in other.items():  # Keras' metrics are float32 whatever the model is.
        assert largest_difference(own[name], value) <= 2e-5, name


def assert_same_values(model: keras.Model, values: list[np.ndarray]) -> None:
    for variable, value in zip(variables_of(model), values, strict=True):
        assert largest_difference(variable.value, value) <= TOLERANCE["float64"], variable.path


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), sampled(itertools.product(sorted(BRANCHING), [2, 4, 8]), 4))
def test_models_with_branches_train_as_keras(name: str, devices: int) -> None:
    model = build(name)
    pipelined = dapple.transform(
        model, cluster_of(devices), global_batch_size=16, placement="fd_dps", operator_costs=SLOW_CORES
    )
    logs, values = plain(name)
    for (x, y), expected in zip(batches()[:2], logs, strict=True):
        assert_same_logs(pipelined.train_on_batch(x, y, return_dict=True), expected)
    placement = pipelined._engine.builder.placements[0]
    pipelined.close()
    assert_same_values(model, values)
    assert placement.splits, "nothing was split"
    assert len(set(placement.devices.values())) == devices


@pytest.mark.thorough
@pytest.mark.slow
def test_evaluation_and_smaller_batches_have_placements_of_their_own() -> None:
    model, other = build("resnet"), build("resnet")
    cluster = cluster_of(3)
    pipelined = dapple.transform(model, cluster, Plan.by_operators(3, 16), operator_costs=OperatorCosts())
    assert_same_logs(evaluated(pipelined), evaluated(other))  # Training moves variables after that.
    for x, y in batches()[1:]:
        own = pipelined.train_on_batch(x, y, return_dict=True)
        assert_same_logs(own, other.train_on_batch(x, y, return_dict=True))
    assert_same_logs(evaluated(pipelined), evaluated(other))
    predicted = pipelined.predict(batches()[2][0], verbose=0)
    assert largest_difference(predicted, other.predict(batches()[2][0], verbose=0)) <= TOLERANCE["float64"]
    pipelined.close()
    assert_same_values(model, [variable.value for variable in variables_of(other)])


@pytest.mark.thorough
@pytest.mark.slow
def test_operators_run_where_and_when_they_were_placed() -> None:
    model = build("inception")
    pipelined = dapple.transform(
        model, cluster_of(4), global_batch_size=16, placement="fd_dps", operator_costs=SLOW_CORES
    )
    x, y = batches()[0]
    pipelined.train_on_batch(x, y)
    stats = pipelined.trace_step(x, y)
    placement = pipelined._engine.builder.placements[0]
    names = pipelined.cluster.device_names
    position = {name: number for number, name in enumerate(placement.order)}
    ran: dict[str, list[tuple[int, int, str]]] = {name: [] for name in names}
    for device in stats.dev_stats:
        for node in device.node_stats:
            name = node.node_name.partition("/")[2]
            if name in position:
                assert names[placement.devices[name]] == device.device
                start = node.all_start_nanos
                ran[device.device].append((start, start + node.all_end_rel_nanos, name))
    assert sum(map(len, ran.values())) > 0.8 * len(position)  # TensorFlow computes constants beforehand.
    for runs in ran.values():
        runs.sort()
        order = [position[name] for _, _, name in runs]
        assert order == sorted(order)
        assert all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(runs))
