"""Times of real training steps under several plans, and the choice of a plan, and of k for reverse first-k, by them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.progress import Progress
from dapple_tf.describe.cluster import Cluster, Server
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.errors import CaptureError, StepError
from dapple_tf.execution.runtime import StepsApart
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.profiler import profile as measured_profile
from dapple_tf.measuring.turns import in_caches, in_turns
from dapple_tf.planning.moves import largest_reverse_first_k
from dapple_tf.planning.plan_reasons import shape
from dapple_tf.schedules.out_of_order import best_reverse_first_k
from dapple_tf.simulation.cost import CostModel

logger = logging.getLogger(__name__)

_ROUNDS = 7
_LEAST_GAIN = 0.03
"""The least fraction of a step's time that a plan must really gain over one that is expected to be faster."""


def measure_steps(
    model: keras.Model,
    cluster: Cluster,
    plans: Sequence[Plan],
    example: ExampleBatch,
    *,
    rounds: int = _ROUNDS,
    what: str = "measuring steps",
    ran: set[Plan] | None = None,
) -> tuple[float, ...]:
    """Returns the median seconds of a training step of each plan; plans take turns, since a machine's speed drifts.

    Args:
        model: the model, built and compiled; it keeps its values.
        cluster: real devices.
        plans: the plans.
        example: draws the batches.
        rounds: number of turns of each plan, after two of warm-up.
        what: text shown with the progress.
        ran: receives the plans that have run a step, also where another fails.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    with contextlib.ExitStack() as opened, Progress(what) as bar:

        def turn(plan: Plan) -> Callable[[], float]:
            data = example.trees(plan.global_batch_size)

            @functools.cache
            def steps() -> StepsApart:
                apart = StepsApart(model, cluster, plan)
                opened.callback(apart.close)
                return apart

            def seconds() -> float:
                taken = steps().seconds(*data)  # Each plan runs before the devices are taken for the next.
                if ran is not None:
                    ran.add(plan)
                return taken

            return in_caches(seconds)

        times = in_turns([turn(plan) for plan in plans], rounds, say=bar.step)
    return tuple(map(statistics.median, times))


def fastest_plan(
    model: keras.Model,
    cluster: Cluster,
    plans: Sequence[Plan],
    example: ExampleBatch,
) -> Plan:
    """Returns the plan whose steps really are the fastest.

    Each plan takes turns with the fastest before it, so that the devices hold the values of two at a time, and must be
    3 % faster. One that can't run is left out: the first, too, if it can't alone, and others that don't fit beside the
    fastest one's values.

    Args:
        model: the model, built and compiled; it keeps its values.
        cluster: real devices.
        plans: the plans, at least one; the first is the one that is expected to be the fastest.
        example: draws the batches.
    """
    best, ran = plans[0], set[Plan]()
    for number, rival in enumerate(plans[1:], 1):
        try:
            own, other = measure_steps(
                model, cluster, (best, rival), example,
                what=f"trying plan {number + 1} of {len(plans)}", ran=ran,
            )  # fmt: skip
        except (PlanError, CaptureError, StepError) as error:
            if isinstance(error, StepError) and not isinstance(error.__cause__, tf.errors.ResourceExhaustedError):
                raise
            alone = best not in ran
            logger.info("%s can't be tried: %s", shape(best if alone else rival), error)
            best = rival if alone else best
            continue
        wins = other < own * (1 - _LEAST_GAIN)
        logger.info(
            "tried %s: %.4g ms, and %s: %.4g ms; %s is taken",
            *(shape(best), own * 1e3, shape(rival), other * 1e3, "the second" if wins else "the first"),
        )
        best = rival if wins else best
    return best


def tune_reverse_first_k(
    model: keras.Model,
    cluster: Cluster,
    plan: Plan,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    rounds: int = _ROUNDS,
    profile: Profile | None = None,
) -> Plan:
    """Finds k for reverse first-k by training: the paper's concave search over measured throughput.

    Each k takes turns with k = 0, and is rated by its speedup. Where the devices' memory is known, only what fits is
    tried (algorithm 2, lines 1 and 2).

    Args:
        model: the model, built and compiled; it keeps its values.
        cluster: real devices.
        plan: a plan with stages to reverse, such as chunks on the same devices.
        x: example inputs, as for :func:`dapple_tf.profile`.
        y: example labels.
        sample_weight: example weights.
        rounds: number of measured steps for each k.
        profile: the layers' costs, for the bound by memory; None measures them if the devices' memory is known.

    Returns:
        The plan with the best ``reverse_first_k``.

    Raises:
        ProfileError: inputs or labels can't be guessed; give ``x`` and ``y``.

    Source: Out-Of-Order BackProp (EuroSys'22), section 5.1.
    """
    Cluster.check("cluster", cluster)
    Plan.check("plan", plan)
    example = ExampleBatch.of(model, x, y, sample_weight)
    layers = plan.num_stages
    if any(device.memory_bytes is not None for device in cluster.devices):
        if profile is None:
            size = max(1, plan.global_batch_size // plan.micro_batches // max(plan.replicas))
            profile = measured_profile(model, size, cluster=cluster, x=x, y=y, sample_weight=sample_weight)
        layers = min(layers, largest_reverse_first_k(plan, profile, cluster) + 1)
    unreversed = dataclasses.replace(plan, reverse_first_k=0)

    def throughput(k: int) -> float:
        if not k:
            return 1.0
        plans = (unreversed, dataclasses.replace(plan, reverse_first_k=k))
        before, after = measure_steps(
            model, cluster, plans, example, rounds=rounds, what=f"measuring reverse_first_k={k}"
        )
        logger.info("reverse_first_k=%d: %.4g ms, %.4g ms without", k, after * 1e3, before * 1e3)
        return before / after

    return dataclasses.replace(plan, reverse_first_k=best_reverse_first_k(layers, throughput))


# ---- the compute that devices of one server really have together


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
