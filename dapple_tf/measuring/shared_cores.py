"""Measures the compute that the devices of one server really have together when they train a model."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import keras

from dapple_tf.describe.cluster import Cluster, Server
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.measured_steps import measure_steps
from dapple_tf.simulation.cost import CostModel

logger = logging.getLogger(__name__)

_MICRO_BATCHES = 2


def shares_cores(cluster: Cluster, server: int) -> bool:
    """Returns whether devices of a server share a processor, as logical CPU devices do."""
    devices = cluster.devices_of(server)
    return len(devices) > 1 and all(cluster.devices[device].type == "CPU" for device in devices)


def measure_capacity(
    model: keras.Model,
    cluster: Cluster,
    profile: Profile,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    length: int | None = None,
) -> Cluster:
    """Returns the cluster with the `capacity` of servers with shared cores for this model.

    Steps of the model on one device, and of data parallelism on all of the server's, take turns. The extra time of the
    second, beyond their all-reduce, shows how much the devices slow each other down by sharing cores, caches and
    memory, which depends on the model.

    Args:
        model: the model, built and compiled; it keeps its values.
        cluster: real devices, with measured links.
        profile: the model's profile, which gives the part of a step that isn't computation.
        x: example inputs, as for :func:`dapple_tf.profile`.
        y: example labels.
        sample_weight: example weights.
        length: length of axes that the model leaves open, if x isn't given.
    """
    servers = list(cluster.servers or (Server(),) * cluster.num_servers)
    for server in range(cluster.num_servers):
        if shares_cores(cluster, server):
            example = ExampleBatch.of(model, x, y, sample_weight, length=length)
            capacity = _capacity(model, cluster, profile, server, example)
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
    alone, together = measure_steps(model, cluster, plans, example, what="measuring shared cores")
    costs = CostModel(plans[1], profile, cluster)
    reduced = sum(costs.reduction_seconds(reduction) for reduction in costs.reductions)
    computing = max(alone - profile.step_seconds, 0.1 * alone)
    slower = max(1.0, (together - profile.step_seconds - reduced) / computing)
    return max(1.0, len(devices) / slower)
