"""Measures how fast unlike devices are, each class of them once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.clusters.shared_connections import connected
from dapple_tf.common.progress import Progress
from dapple_tf.describe.cluster import Cluster, ClusterError
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.frontend.capture import Mode, build, capture, check_model
from dapple_tf.frontend.layer_cuts import with_functions, with_gradients
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.links import matrix_chains
from dapple_tf.measuring.profiled_model import ProfiledModel
from dapple_tf.measuring.profiler import kept_metrics
from dapple_tf.measuring.timed_step import MICRO_BATCHES, StepRuns, timed_step
from dapple_tf.measuring.turns import in_caches, in_turns
from dapple_tf.variables.parameter_groups import group_updates
from graph_passes.ir.tasks import Phase

logger = logging.getLogger(__name__)

_MATRIX, _CHAIN = 512, 16
"""Rows of a matrix, and number of products in a chain: some 50 ms of one core."""


def measure_speeds(
    cluster: Cluster,
    model: keras.Model | None = None,
    *,
    samples: int = 8,
    each_server: bool = False,
    reference: int = 0,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    length: int | None = None,
    rounds: int | None = None,
    progress: bool = True,
) -> Cluster:
    """Measures the speed of one device of each class (`Cluster.device_classes`).

        cluster = measure_speeds(Cluster.of_servers(["10.0.0.1:2222", "10.0.0.2:2222"]), model)
        print(cluster)

    Devices take turns, so that a machine's drift doesn't count, and are timed by their own clocks, without transfers.
    A speed is the median over turns of the reference's time divided by the device's; 1 if it differs from 1 by no more
    than its spread.

    Args:
        cluster: real devices.
        model: the model, built and compiled, whose F and B are timed as a whole; it keeps its values. None times
            products of matrices, which devices of other kinds may do at another relative speed.
        samples: samples of the timed slices of the model.
        each_server: whether like devices are measured for each server, and for each of a server's workers: their cores
            may be shared with other processes, say.
        reference: index of the device of speed 1: the one that profiles are made on.
        x: example inputs, as for :func:`dapple_tf.profile`.
        y: example labels.
        sample_weight: example weights.
        length: length of axes that the model leaves open, if x isn't given.
        rounds: number of turns; by default as many as fit into some 10 s, 5 to 25.
        progress: whether to show progress on a terminal.

    Returns:
        A copy of the cluster with `Device.speed` and `Device.speed_spread` of all devices.

    Raises:
        ClusterError: the cluster is a description, or a number is out of range.
        ProfileError: inputs or labels can't be guessed; give ``x`` and ``y``. Or a device hasn't the memory.
        CaptureError: the model can't be captured.
    """
    Cluster.check("cluster", cluster)
    if not cluster.real:
        raise ClusterError(
            "this cluster is a description without real devices: give its devices their speeds, or measure real ones"
        )
    for name, number, least, most in (
        ("samples", samples, 1, None),
        ("reference", reference, 0, cluster.num_devices - 1),
        ("rounds", 1 if rounds is None else rounds, 1, None),
    ):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        whole = isinstance(number, int) and not isinstance(number, bool)
        if not whole or number < least or (most is not None and number > most):
            raise ClusterError(f"{name} is {number!r}; it must be a whole number, {limits}")
    groups = _groups(cluster, each_server)
    first = next(number for number, group in enumerate(groups) if reference in group)
    # The reference measures its own group.
    members = [reference if number == first else group[0] for number, group in enumerate(groups)]
    if len(members) == 1:
        return _with_speeds(cluster, groups, [(1.0, 0.0)])
    start = time.perf_counter()
    with Progress("measuring speeds", shown=None if progress else False) as bar, connected(cluster):
        if model is None:
            timers = _matrix_timers(cluster, members)
        else:
            check_model(model, training=True)
            example = ExampleBatch.of(model, x, y, sample_weight, length=length)
            timers = _model_timers(model, cluster, members, example, samples)
        with timers as seconds:
            try:
                times = in_turns(seconds, rounds, say=bar.step)
            except tf.errors.ResourceExhaustedError as error:
                raise ProfileError(
                    f"a device hasn't the memory for {'the model' if model else 'matrices'} in slices of {samples} "
                    f"samples: use fewer, leave the model out, or give devices their speed by Device(speed=...)"
                ) from error
    speeds = [_speed(times[first], own) for own in times]
    measured = _with_speeds(cluster, groups, speeds)
    logger.info("measured the speed of %d classes of devices in %.2f s", len(groups), time.perf_counter() - start)
    for device, (speed, spread) in zip(members, speeds, strict=True):
        own = cluster.devices[device]
        logger.info(
            "device %d (%s) computes %.3g times (+- %.2g) as fast as device %d",
            *(device, own.kind or own.name, speed, spread, reference),
        )
    return measured


def _groups(cluster: Cluster, each_server: bool) -> list[tuple[int, ...]]:
    """Returns the groups of devices of which one is measured."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, members in enumerate(cluster.device_classes):
        for device in members:
            key = (number, cluster.worker_of(device) if each_server else 0)
            groups.setdefault(key, []).append(device)
    return [tuple(group) for group in groups.values()]


def _with_speeds(cluster: Cluster, groups: Sequence[Sequence[int]], speeds: Sequence[tuple[float, float]]) -> Cluster:
    devices = list(cluster.devices)
    for group, (speed, spread) in zip(groups, speeds, strict=True):
        for device in group:
            devices[device] = dataclasses.replace(devices[device], speed=speed, speed_spread=spread)
    return dataclasses.replace(cluster, devices=tuple(devices))


def _speed(reference: Sequence[float], own: Sequence[float]) -> tuple[float, float]:
    """Returns the median of the ratios of times, and half of the range of the middle half of them."""
    ratios = [one / max(other, 1e-9) for one, other in zip(reference, own, strict=True)]
    median = max(statistics.median(ratios), 1e-6)
    low, high = np.quantile(ratios, (0.25, 0.75))
    spread = float(high - low) / 2
    return (1.0 if abs(median - 1) <= spread else median), spread


@contextlib.contextmanager
def _model_timers(
    model: keras.Model, cluster: Cluster, devices: Sequence[int], example: ExampleBatch, samples: int
) -> Iterator[Sequence[Callable[[], float]]]:
    """Yields for each device a function that runs the model's F and B there once, and returns their seconds."""

    def seconds(runs: StepRuns) -> float:
        runs.rounds[samples] = [in_caches(functools.partial(runs.run, samples))()]
        return sum(runs.time(samples, phase.value) for phase in (Phase.FORWARD, Phase.BACKWARD))

    with kept_metrics(model), contextlib.ExitStack() as sessions:
        table = VariableTable(model)
        build(model, table, example.spec)
        gpus = cluster.all_gpus(devices)
        captured = capture(model, table, Mode.TRAIN, example.spec, gpus=gpus)
        whole = with_functions(with_gradients(captured, ()), "speed_", samples=samples, on_gpu=gpus)
        updates = group_updates(model, table, whole)
        timers = []
        for device in devices:
            profiled = ProfiledModel(model, table, captured, example, (samples,), cluster, device, None)
            session = sessions.enter_context(profiled.session(updates, whole))
            name = f"speed{device}"
            step = timed_step(whole, updates, profiled.device_name, cluster.host_device, f"{name}_")
            runs = StepRuns(session, step, name)
            runs.feed(samples, profiled.batch(samples * MICRO_BATCHES))
            timers.append(functools.partial(seconds, runs))
        yield timers


@contextlib.contextmanager
def _matrix_timers(cluster: Cluster, devices: Sequence[int]) -> Iterator[Sequence[Callable[[], float]]]:
    """Yields for each device a function that multiplies matrices there, and returns the seconds by the host's clock."""

    def work(value: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.matmul(value, matrix)) + matrix

    with matrix_chains(cluster, devices, _MATRIX, [work] * _CHAIN) as run:

        def seconds(member: int) -> float:
            ((before, after),) = run([member])
            return max(0.0, float(after - before))

        yield [functools.partial(seconds, member) for member in range(len(devices))]
