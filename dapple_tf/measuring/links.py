"""Measures the links between devices of a real cluster, and the compute that a server gives to all of its devices.

Everything is timed by nodes that read the clock, with control edges around the measured work: a tensor made on one
device and copied to another; an all-reduce; a chain of matrix products on one device and on all at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from dapple_tf.clusters.session import collective_hint, collective_keys
from dapple_tf.clusters.shared_connections import connected, open_session
from dapple_tf.describe.cluster import Cluster, ClusterError, Link, ReductionLinks, Server
from dapple_tf.measuring.turns import in_turns
from graph_passes.ir.collectives import AllReduceRules, AllReduces
from graph_passes.ir.graph import STAGE_ATTR, Builder, Ref

logger = logging.getLogger(__name__)

# Nothing is quite free: this replaces a fitted value at or below 0.
_LEAST_LATENCY = 1e-8
_MOST_BANDWIDTH = 1e15
# One core multiplies matrices of this size in some milliseconds.
_MATRIX = 384
_CHAIN = 8
_SMALL = 4 * 2**10
"""Bytes of the small message."""
_MESSAGES = 5
"""Number of times that the message which starts an all-reduce, and that which ends it, are measured."""
_SIZES = 4
"""Number of sizes at which all-reduces are measured."""
_RANGE = 64
"""The largest of these sizes over the smallest. Buckets of gradients are large; messages of a few KiB take less than
their line says."""


def measure_links(
    cluster: Cluster,
    *,
    large: int = 4 * 2**20,
    repeats: int = 9,
    capacity: bool = True,
    between: Mapping[tuple[int, int], Link] | None = None,
) -> Cluster:
    """Measures a cluster's links.

    On logical CPU devices of one process a transfer passes a pointer: the measured bandwidth is far beyond
    that of memory.

    Args:
        cluster: real devices.
        large: bytes of the large message, and of the largest all-reduce; a small message gives the latency.
        repeats: number of measurements of each time; the median counts.
        capacity: whether to measure each server's `capacity`, too, which keeps all of its cores busy for a moment.
        between: result of `measure_between_servers`, which gives each server its own network card; None tries
            neighbouring servers only, and describes all as alike.

    Returns:
        A copy with intra and inter bandwidth and latency (those of the slowest measured pair; None if there is
        no such pair), all-reduces with how well lines fit their times (`Cluster.reductions`), and each server's
        capacity.

    Raises:
        ClusterError: a description without devices, or a number is out of range.
    """
    sizes = _sizes(cluster, large, repeats)
    start = time.perf_counter()
    with connected(cluster):
        changes: dict[str, Any] = {}
        own = list(cluster.servers or (Server(),) * cluster.num_servers)
        for kind, pairs in _pairs(cluster).items():
            if kind == "inter" and between is not None:
                links = list(between.values())
                own = _network_cards(own, between)
            else:
                links = [_line_of(sizes, _transfers(cluster, pair, sizes, repeats)) for pair in pairs]
            if links:
                changes[f"{kind}_bandwidth"] = min(link.bandwidth for link in links)
                changes[f"{kind}_latency"] = max(link.latency for link in links)
        if cluster.num_devices > 1:
            least = max(1, sizes[1] // _RANGE)
            steps = np.geomspace(least, max(sizes[1], least + 1), num=_SIZES)
            changes["reductions"] = _reductions(cluster, [round(size) for size in steps], repeats)
            changes |= {"reduce_bandwidth": None, "reduce_latency": None}
        if capacity:
            own = [
                dataclasses.replace(one, capacity=_capacity(cluster, cluster.devices_of(server), repeats))
                for server, one in enumerate(own)
            ]
        if any(one != Server() for one in own):
            changes["servers"] = tuple(own)
    shown = ", ".join(f"{name} {value:.3g}" for name, value in changes.items() if isinstance(value, float))
    logger.info("measured links in %.2f s: %s", time.perf_counter() - start, shown)
    return dataclasses.replace(cluster, **changes)


def measure_between_servers(
    cluster: Cluster,
    *,
    large: int = 4 * 2**20,
    repeats: int = 5,
    progress: Callable[[int, int], object] | None = None,
) -> dict[tuple[int, int], Link]:
    """Measures the link between every two servers, one after the other, from the lower number to the higher.

    Args:
        cluster: workers.
        large: bytes of the large message.
        repeats: number of measurements of each time; the median counts.
        progress: called with each pair before it is measured.

    Returns:
        Bandwidth and latency by pair of servers.

    Raises:
        ClusterError: a description without devices, or a number is out of range.
    """
    sizes = _sizes(cluster, large, repeats)
    links = {}
    with connected(cluster):
        for pair in itertools.combinations(range(cluster.num_servers), 2):
            if progress is not None:
                progress(*pair)
            first, second = (cluster.devices_of(server)[0] for server in pair)
            links[pair] = _line_of(sizes, _transfers(cluster, (first, second), sizes, repeats))
    return links


def _sizes(cluster: Cluster, large: int, repeats: int) -> tuple[int, int]:
    """Returns the sizes of messages in floats."""
    Cluster.check("cluster", cluster)
    if not cluster.real:
        raise ClusterError(
            "this cluster is a description without real devices: give it its links, or measure real ones"
        )
    if large <= _SMALL or repeats < 1:
        raise ClusterError(
            f"messages of {_SMALL} and {large} bytes, {repeats} times: give a larger one, and at least 1 time"
        )
    return _SMALL // 4, large // 4


def _network_cards(servers: Sequence[Server], between: Mapping[tuple[int, int], Link]) -> list[Server]:
    """Gives each server its best link to any other: a link is as fast as the slower card of the two.

    Cards of 1, 1 and 5 give links of 1 (0-1), 1 (0-2) and 1 (1-2), so that the third card comes out as 1, too:
    links alone can't show more.
    """
    with_cards = []
    for number, server in enumerate(servers):
        links = [link for pair, link in between.items() if number in pair]
        if links:
            bandwidth, latency = max(link.bandwidth for link in links), min(link.latency for link in links)
            server = dataclasses.replace(server, inter_bandwidth=bandwidth, inter_latency=latency)
        with_cards.append(server)
    return with_cards


def _pairs(cluster: Cluster) -> dict[str, list[tuple[int, int]]]:
    """Returns a few pairs of devices for each kind of link: neighbours within servers, and first devices of servers."""
    pairs: dict[str, list[tuple[int, int]]] = {"intra": [], "inter": []}
    servers = [cluster.devices_of(server) for server in range(cluster.num_servers)]
    for devices in servers:
        if len(devices) > 1:
            pairs["intra"].append((devices[0], devices[-1]))
    pairs["inter"] += [(one[0], other[0]) for one, other in itertools.pairwise(servers)]
    return pairs


def _median(run: Callable[[], float], repeats: int) -> float:
    """Returns the median of a function's results."""
    (times,) = in_turns([run], repeats)
    return statistics.median(times)


def _timer(session: Any, stamps: Sequence[tf.Tensor], feed: Mapping[tf.Tensor, Any]) -> Callable[[], float]:
    """Returns a function that runs what lies between two times, and returns its seconds."""

    def seconds() -> float:
        before, after = session.run(stamps, feed)
        return float(after - before)

    return seconds


def host_of(name: str) -> str:
    """Returns the CPU beside a device, whose clock is read."""
    return name if "device:CPU" in name else name.rpartition("/")[0] + "/device:CPU:0"


def clock(after: Sequence[Any], host: str) -> tf.Tensor:
    """Returns the time when all of ``after`` have been computed."""
    arrived = []
    for tensor in after:
        if "device:CPU" not in tensor.device:
            # On a device with its own queue, only a copy shows that it is done: of one element, cut out over there.
            tensor = _on(host, tf.identity, _on(tensor.device, lambda whole: tf.reshape(whole, [-1])[:1], tensor))
        arrived.append(tensor.op)
    with tf.device(host), tf.control_dependencies(arrived):
        return tf.timestamp()


def _transfers(cluster: Cluster, pair: tuple[int, int], sizes: Sequence[int], repeats: int) -> list[float]:
    """Returns the seconds to send a tensor from one device to another, for each size in floats."""
    source, target = (cluster.device_names[device] for device in pair)
    with tf.Graph().as_default() as graph:
        count = tf.compat.v1.placeholder(tf.int32, [])
        with tf.device(source):
            made = tf.random.uniform(tf.reshape(count, [1]))
        before = clock([made], host_of(source))
        with tf.device(source), tf.control_dependencies([before]):
            sent = tf.identity(made)
        with tf.device(target):
            received = sent[:1] + sent[-1:]
        # Both times are read from one clock: the sender's, after a message has come back.
        with tf.device(source):
            back = tf.identity(received)
        after = clock([back], host_of(source))
        with tf.device(source), tf.control_dependencies([before]):
            nothing = made[:1] + made[-1:]
        alone = clock([nothing], host_of(source))
        with open_session(cluster, graph) as session:
            with_copy = [_median(_timer(session, [before, after], {count: size}), repeats) for size in sizes]
            without = _median(_timer(session, [before, alone], {count: sizes[0]}), repeats)
    # The message back is small, and takes as long as the small one there.
    there = [max(0.0, seconds - without) for seconds in with_copy]
    return [there[0] / 2, max(there[1] - there[0] / 2, there[0] / 2)]


def _line_of(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Returns the bandwidth in bytes/s and latency in seconds, from times of two sizes in floats."""
    few, many = (4 * size for size in sizes)
    difference = seconds[1] - seconds[0]
    bandwidth = (many - few) / difference if difference > 0 else _MOST_BANDWIDTH
    bandwidth = min(bandwidth, _MOST_BANDWIDTH)
    return Link(bandwidth, max(seconds[0] - few / bandwidth, _LEAST_LATENCY))


def _reductions(cluster: Cluster, sizes: Sequence[int], repeats: int) -> ReductionLinks:
    """Measures each all-reduce that the cluster's devices can make, over all of them, at sizes in floats."""
    by_server = [cluster.devices_of(server) for server in range(cluster.num_servers)]
    largest = max(by_server, key=len)
    firsts = [devices[0] for devices in by_server]
    lines: dict[str, _Line] = {}
    if len(largest) > 1:
        lines["inside"] = _line(sizes, _all_reduces(cluster, largest, sizes, repeats))
    if len(firsts) > 1:
        lines["between"] = _line(sizes, _all_reduces(cluster, firsts, sizes, repeats))
    several = cluster.num_devices > len(firsts) > 1
    if several:
        everyone = range(cluster.num_devices)
        lines["ring"] = _line(sizes, _all_reduces(cluster, everyone, sizes, repeats))
        whole = _line(sizes, _all_reduces(cluster, everyone, sizes, repeats, by_server=True))
    links = {
        name: _of_ring(lines[name], count)
        for name, count in (("inside", len(largest)), ("between", len(firsts)), ("ring", cluster.num_devices))
        if name in lines
    }
    errors = [line.error for line in lines.values()]
    if several:
        # What a hierarchical all-reduce takes beyond the one between servers.
        between, parts = lines["between"], min(map(len, by_server))
        start, rate = whole.start - between.start, whole.rate - between.rate
        bandwidth = 2 * (len(largest) - 1) / parts / rate if rate > 0 else _MOST_BANDWIDTH
        links["exchange"] = Link(min(bandwidth, _MOST_BANDWIDTH), max(start / 2, _LEAST_LATENCY))
        errors.append(whole.error)
    return ReductionLinks(**links, error=max(errors))


def _of_ring(line: _Line, members: int) -> Link:
    """Returns the link over which a ring takes this time: 2 (n - 1) steps, each with an n-th of the bytes."""
    steps = 2 * (members - 1)
    bandwidth = steps / members / line.rate if line.rate > 0 else _MOST_BANDWIDTH
    return Link(min(bandwidth, _MOST_BANDWIDTH), max(line.start / steps, _LEAST_LATENCY))


class _Line(NamedTuple):
    """A line through measured times: seconds for nothing and per byte, and the largest relative difference from it."""

    start: float
    rate: float
    error: float


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> _Line:
    """Fits a line to the times of several sizes in floats.

    Squares are weighted by 1 / time: long times count more, as they do in a step, but short ones still say where the
    line starts.
    """
    bytes_ = np.array([4.0 * size for size in sizes])
    times = np.maximum(seconds, _LEAST_LATENCY)
    weights = 1 / np.sqrt(times)
    columns = np.stack([weights, bytes_ * weights], axis=1)
    (start, rate), *_ = np.linalg.lstsq(columns, times * weights, rcond=None)
    if start < 0:
        start, rate = 0.0, bytes_.sum() / (bytes_**2 / times).sum()
    elif rate < 0:
        start, rate = len(sizes) / (1 / times).sum(), 0.0
    error = float(np.max(np.abs((start + rate * bytes_) / times - 1)))
    return _Line(float(start), float(rate), error)


def _all_reduces(
    cluster: Cluster, devices: Sequence[int], sizes: Sequence[int], repeats: int, *, by_server: bool = False
) -> list[float]:
    """Returns the seconds of an all-reduce over devices, for each size in floats."""
    seconds = []
    for size in sizes:
        with all_reduces(cluster, devices, [size], by_server=by_server) as run:
            seconds.append(_median(run, repeats))
    return seconds


@contextlib.contextmanager
def all_reduces(
    cluster: Cluster, devices: Sequence[int], sizes: Sequence[int], *, by_server: bool = False
) -> Iterator[Callable[[], float]]:
    """Makes all-reduces as steps have them, one after the other; yields what runs them and returns their seconds.

    Without the time that a message takes to the other devices, which begin, and back, when they have ended.

    Args:
        cluster: real devices, with a connection (`dapple_tf.clusters.shared_connections.connected`).
        devices: the members.
        sizes: floats of each all-reduce.
        by_server: whether they are hierarchical (`graph_passes.ir.collectives.AllReduces`).
    """
    names = [cluster.device_names[device] for device in devices]
    with tf.Graph().as_default() as parts:
        on = {name: [_on(name, tf.random.uniform, [size]) for size in sizes] for name in names}
        before = clock([vector for vectors in on.values() for vector in vectors], host_of(names[0]))
        with tf.control_dependencies([before]):
            started = {name: [_on(name, tf.identity, vector) for vector in vectors] for name, vectors in on.items()}
            nothing = [_on(name, lambda vector: vector[:1], vectors[-1]) for name, vectors in on.items()]
        alone = clock(nothing, host_of(names[0]))
    graph = parts.as_graph_def()
    server_of = {device.name: device.server for device in cluster.devices}
    rules = AllReduceRules(collective_hint(cluster), frozenset([0]) if by_server else frozenset(), server_of)
    reductions = AllReduces(Builder(graph), rules, collective_keys())
    starts = {name: f"reduction/{index}" for index, name in enumerate(names)}
    ends: dict[str, Ref] = {}
    for number, size in enumerate(sizes):
        vectors = {name: Ref(started[name][number].op.name) for name in names}
        ends = reductions.add(vectors, starts, types_pb2.DT_FLOAT, 4 * size, {STAGE_ATTR: 0})
    with tf.Graph().as_default() as whole:
        tf.graph_util.import_graph_def(graph, name="")
        after = clock([whole.get_tensor_by_name(f"{end.node}:0") for end in ends.values()], host_of(names[0]))
        beginning, unreduced = (whole.get_tensor_by_name(tensor.name) for tensor in (before, alone))
        with open_session(cluster, whole) as session:
            messages = _median(_timer(session, [beginning, unreduced], {}), _MESSAGES)
            seconds = _timer(session, [beginning, after], {})
            yield lambda: max(_LEAST_LATENCY, seconds() - messages)


def _on(device: str, operation: Callable[..., tf.Tensor], argument: Any) -> tf.Tensor:
    """Returns the result of an operation on a device."""
    with tf.device(device):
        return operation(argument)


def _capacity(cluster: Cluster, devices: Sequence[int], repeats: int) -> float:
    """Returns how many devices' worth of compute these devices provide together.

    The work is like a layer's: a product of matrices and elementwise maths, then two products side by side as in a
    backward function. One device alone may use several cores for it, so that a server's capacity depends on more than
    the number of its cores.
    """
    if len(devices) == 1:
        return 1.0

    def layer(value: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
        value = tf.tanh(tf.matmul(value, matrix))
        return tf.matmul(value, matrix) + tf.matmul(matrix, value)

    with matrix_chains(cluster, devices, _MATRIX, [layer] * _CHAIN) as run:

        def seconds(members: Sequence[int]) -> float:
            starts, ends = zip(*run(members), strict=True)
            return float(max(ends) - min(starts))

        members = ([0], range(len(devices)))
        alone, together = in_turns([functools.partial(seconds, own) for own in members], repeats)
    ratio = statistics.median(one / every for one, every in zip(alone, together, strict=True))
    return float(min(len(devices), max(1.0, len(devices) * ratio)))


@contextlib.contextmanager
def matrix_chains(
    cluster: Cluster, devices: Sequence[int], rows: int, chain: Sequence[Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]
) -> Iterator[Callable[[Sequence[int]], list[tuple[float, float]]]]:
    """Makes a chain of work on a matrix on each device.

    Yields a function that runs the chains of some positions in ``devices`` at once, and returns when each started and
    ended, by its host's clock.

    Args:
        cluster: real devices, with a connection (`dapple_tf.clusters.shared_connections.connected`).
        devices: the devices.
        rows: number of rows of the matrix.
        chain: functions of the last one's result and of the matrix.
    """
    start = np.random.default_rng(0).normal(size=(rows, rows)).astype(np.float32) / rows
    stamps = []
    with tf.Graph().as_default() as graph:
        fed = tf.compat.v1.placeholder(tf.float32, start.shape)
        for device in devices:
            name = cluster.device_names[device]
            matrix = value = _on(name, tf.identity, fed)
            before = clock([matrix], host_of(name))
            with tf.device(name), tf.control_dependencies([before]):
                for work in chain:
                    value = work(value, matrix)
            stamps.append((before, clock([value], host_of(name))))
        with open_session(cluster, graph) as session:
            yield lambda members: session.run([stamps[member] for member in members], {fed: start})
