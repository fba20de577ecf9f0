"""The time of gradients' all-reduce on a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.devices import Link


class AllReduceTime(NamedTuple):
    """The time of an all-reduce: its fixed seconds and those per byte, inside servers and between all members.

    Attributes:
        inner: inside servers before and after the rest; zeros for a ring through all devices.
        outer: the rest.
    """

    inner: tuple[float, float]
    outer: tuple[float, float]

    @property
    def start(self) -> float:
        """Seconds for no bytes."""
        return self.inner[0] + self.outer[0]

    @property
    def rate(self) -> float:
        """Seconds per byte of one bucket."""
        return self.inner[1] + self.outer[1]

    def seconds(self, size: float, bucket_bytes: float = math.inf) -> float:
        """Returns the seconds for ``size`` bytes in equal buckets, one after the other.

        A bucket's part inside servers runs while another one is between them.
        """
        if size <= 0:
            return 0.0
        buckets = math.ceil(size / bucket_bytes) if size > bucket_bytes else 1
        inner, outer = (start + rate * size / buckets for start, rate in self)
        return inner + outer + (buckets - 1) * max(inner, outer)


def all_reduce_time(cluster: Cluster, members: Mapping[int, int], algorithm: str) -> AllReduceTime:
    """Returns the time of an all-reduce.

    A ring of n members moves 2 (n - 1) / n of the bytes over each of its links, in 2 (n - 1) steps; where NCCL takes a
    tree, that is as many bytes in fewer steps, so that small all-reduces may be faster. ``flat`` is one ring through
    all devices. ``hierarchical`` is that of `graph_passes.ir.collectives`: where a server has k members, and no server
    has fewer than h, h of them get k - 1 parts each, an h-th of the bytes, and send as many back; between servers there
    are h rings, each for an h-th. A network card carries all rings together, in both directions at once.

    Args:
        cluster: the cluster. What `dapple_tf.measuring.links` measured of all-reduces counts before the links.
        members: server -> number of its devices that take part.
        algorithm: one of `dapple_tf.describe.plan.ALL_REDUCE`.
    """
    count = sum(members.values())
    if count < 2:
        return AllReduceTime((0.0, 0.0), (0.0, 0.0))
    links, measured = cluster.server_links, cluster.reductions
    if len(members) == 1:
        own = links[next(iter(members))][0]
        return AllReduceTime((0.0, 0.0), _ring(count, measured.inside or _reducing(cluster, own)))
    cards = [links[server][1] for server in members]
    slowest = _reducing(cluster, Link(min(card.bandwidth for card in cards), max(card.latency for card in cards)))
    alone = max(members.values()) == 1
    if alone or algorithm == "flat":
        return AllReduceTime((0.0, 0.0), _ring(count, (measured.between if alone else measured.ring) or slowest))
    parts = min(members.values())
    inner = [
        _exchange(number, parts, measured.exchange or _reducing(cluster, links[server][0]))
        for server, number in members.items()
    ]
    return AllReduceTime(
        (max(start for start, _ in inner), max(rate for _, rate in inner)),
        _ring(len(members), measured.between or slowest),
    )


def exchange_time(cluster: Cluster, members: Mapping[int, int]) -> AllReduceTime:
    """Returns the time of a reduce-scatter and of an all-gather afterwards, in which all members send at once.

    Each of n members gets an n-th of the bytes from every other one, adds them up, and sends as many back. A network
    card carries what the k devices of its server exchange with the others, 2 k (n - k) / n of the bytes: as much as a
    ring where servers have one device each, more where they have several.

    Args:
        cluster: the cluster, as for `all_reduce_time`.
        members: server -> number of its devices that take part.
    """
    count = sum(members.values())
    if count < 2:
        return AllReduceTime((0.0, 0.0), (0.0, 0.0))
    measured = cluster.reductions.exchange
    times = []
    for server, number in members.items():
        own, card = cluster.server_links[server]
        if number > 1:
            link = measured or _reducing(cluster, own)
            times.append((2 * link.latency, 2 * (count - 1) / count / link.bandwidth))
        if number < count:
            link = _reducing(cluster, card)
            share = number * (count - number) / count
            times.append((2 * link.latency, 2 * share / link.bandwidth))
    return AllReduceTime((0.0, 0.0), (max(start for start, _ in times), max(rate for _, rate in times)))


def _ring(members: int, link: Link) -> tuple[float, float]:
    return 2 * (members - 1) * link.latency, 2 * (members - 1) / members / link.bandwidth


def _exchange(members: int, parts: int, link: Link) -> tuple[float, float]:
    """Returns the time of a reduce-scatter and an all-gather inside a server, each of which sends all at once."""
    if members == 1:
        return 0.0, 0.0
    return 2 * link.latency, 2 * (members - 1) / parts / link.bandwidth


def _reducing(cluster: Cluster, link: Link) -> Link:
    """Returns a link as all-reduce uses it."""
    bandwidth, latency = link
    if cluster.reduce_bandwidth is not None:
        bandwidth = min(bandwidth, cluster.reduce_bandwidth)
    if cluster.reduce_latency is not None:
        latency = max(latency, cluster.reduce_latency)
    return Link(bandwidth, latency)
