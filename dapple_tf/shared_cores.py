"""Measures how much compute the devices of one server really have together when they train a model."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Sequence
from typing import Any

import keras

from dapple_tf.cluster import Cluster, Server
from dapple_tf.cost import CostModel
from dapple_tf.example_batch import ExampleBatch
from dapple_tf.plan import Plan
from dapple_tf.profile import Profile
from dapple_tf.progress import Progress

logger = logging.getLogger(__name__)

_WARM_UP = 2
_ROUNDS = 7
_MICRO_BATCHES = 2


def shares_cores(cluster: Cluster, server: int) -> bool:
    """Whether devices of a server use the same processor: logical CPU devices do."""
    devices = cluster.devices_of(server)
    return len(devices) > 1 and all("device:CPU" in cluster.devices[device].name for device in devices)


def measure_capacity(
    model: keras.Model, cluster: Cluster, profile: Profile, *, x: Any = None, y: Any = None, sample_weight: Any = None
) -> Cluster:
    """Returns the cluster with the `capacity` that servers with shared cores have for this model.

    Steps of the model on one device, and of data parallelism on all of the server's, take turns. What the second take
    longer, beyond their all-reduce, is by how much the devices slow each other down: by sharing cores, caches and
    memory, each model in its own way.

    Args:
        model: the model, built and compiled; it keeps its values.
        cluster: real devices, with measured links.
        profile: the model's, which tells the part of a step that isn't computation.
        x: example inputs, as for :func:`dapple_tf.profiler.profile`.
        y: example labels.
        sample_weight: example weights.
    """
    servers = list(cluster.servers or (Server(),) * cluster.num_servers)
    for server in range(cluster.num_servers):
        if shares_cores(cluster, server):
            capacity = _capacity(model, cluster, profile, server, ExampleBatch.of(model, x, y, sample_weight))
            servers[server] = dataclasses.replace(servers[server], capacity=capacity)
            logger.info(
                "%d devices of server %d train model %r as fast as %.2f by themselves",
                len(cluster.devices_of(server)), server, model.name, capacity,
            )  # fmt: skip
    return dataclasses.replace(cluster, servers=tuple(servers))


def _capacity(model: keras.Model, cluster: Cluster, profile: Profile, server: int, example: ExampleBatch) -> float:
    devices = cluster.devices_of(server)
    samples = profile.batch_sizes[len(profile.batch_sizes) // 2] * _MICRO_BATCHES
    plans = [Plan.data_parallel(group, samples * len(group), _MICRO_BATCHES) for group in (devices[:1], devices)]
    alone, together = _step_seconds(model, cluster, plans, example)
    costs = CostModel(plans[1], profile, cluster)
    reduced = sum(costs.reduction_seconds(reduction) for reduction in costs.reductions)
    computing = max(alone - profile.step_seconds, 0.1 * alone)
    slower = max(1.0, (together - profile.step_seconds - reduced) / computing)
    return max(1.0, len(devices) / slower)


def _step_seconds(
    model: keras.Model, cluster: Cluster, plans: Sequence[Plan], example: ExampleBatch
) -> tuple[float, ...]:
    """Median seconds of a step of each plan; they take turns, since a machine's speed drifts."""
    from dapple_tf.trainer import PipelinedModel  # The trainer imports this module, to plan automatically.

    trainers = [PipelinedModel(model, cluster, plan, on_non_finite_loss="continue") for plan in plans]
    batches = [example.trees(plan.global_batch_size) for plan in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    metrics = [(variable, variable.numpy()) for variable in model.metrics_variables]
    try:
        with Progress("measuring shared cores", _WARM_UP + _ROUNDS) as bar:
            for number in range(_WARM_UP + _ROUNDS):
                for trainer, (x, y, weights), found in zip(trainers, batches, seconds, strict=True):
                    trainer.train_on_batch(x, y, sample_weight=weights)  # gets its data back into the caches
                    trainer.train_on_batch(x, y, sample_weight=weights)
                    if number >= _WARM_UP:
                        found.append(trainer.last_step_seconds)
                bar.step("steps in turns")
    finally:
        for trainer in trainers:
            trainer._engine.close()  # Its own close would bring the trained values back.
        for variable, value in metrics:
            variable.assign(value)
    return tuple(statistics.median(found) for found in seconds)
