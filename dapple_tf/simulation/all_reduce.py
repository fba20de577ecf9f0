"""The time of gradients' all-reduce on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dapple_tf.describe.cluster import Cluster, Link

ALL_REDUCE = ("hierarchical", "flat")
"""All-reduce algorithms over several servers: inside each server first, or one ring through all devices."""


def all_reduce_seconds(cluster: Cluster, devices: Sequence[int], size: float, algorithm: str = "hierarchical") -> float:
    """Returns the seconds to all-reduce ``size`` bytes over ``devices``; see :func:`all_reduce_line`."""
    if size <= 0:
        return 0.0
    start, rate = all_reduce_line(cluster, Counter(cluster.devices[device].server for device in devices), algorithm)
    return start + rate * size


def all_reduce_line(cluster: Cluster, members: Mapping[int, int], algorithm: str) -> tuple[float, float]:
    """Returns the seconds of an all-reduce: (fixed, per byte).

    A ring of n members moves 2 (n - 1) / n of the bytes over each of its links, in 2 (n - 1) steps. ``hierarchical``
    reduces inside each server first, then over the servers' network cards, then spreads the result; ``flat`` is one
    ring through all devices. A network card carries one ring at a time, in both directions at once.

    Args:
        cluster: the cluster.
        members: server -> number of its devices that take part.
        algorithm: one of `ALL_REDUCE`.
    """
    count = sum(members.values())
    if count < 2:
        return 0.0, 0.0
    links = cluster.server_links
    inner = [_ring(cluster, number, links[server][0]) for server, number in members.items() if number > 1]
    outer = (0.0, 0.0)
    if len(members) > 1:
        cards = [links[server][1] for server in members]
        slowest = Link(min(card.bandwidth for card in cards), max(card.latency for card in cards))
        outer = _ring(cluster, count if algorithm == "flat" else len(members), slowest)
    if inner and (len(members) == 1 or algorithm == "hierarchical"):
        start, rate = (max(parts) for parts in zip(*inner, strict=True))
        return outer[0] + start, outer[1] + rate
    return outer


def _ring(cluster: Cluster, members: int, link: Link) -> tuple[float, float]:
    bandwidth, latency = link
    if cluster.reduce_bandwidth is not None:
        bandwidth = min(bandwidth, cluster.reduce_bandwidth)
    if cluster.reduce_latency is not None:
        latency = max(latency, cluster.reduce_latency)
    return 2 * (members - 1) * latency, 2 * (members - 1) / members / bandwidth
