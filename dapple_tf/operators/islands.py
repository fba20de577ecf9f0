"""Devices with fast links among them: placing everything on one such island may beat using all devices."""

from __future__ import annotations

import dataclasses

import numpy as np

from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology

_MUCH_SLOWER = 0.5
"""Links with less than this share of the fastest one's bandwidth separate islands."""


def largest_island(topology: Topology) -> tuple[int, ...]:
    """Returns the largest set of devices with fast links, in order; the first of equal ones, all if links are alike.

    4 devices in each of 2 servers, with slower links between these   becomes   0, 1, 2, 3
    """
    bandwidth = topology.bandwidth
    apart = bandwidth[~np.eye(topology.count, dtype=bool)]
    everywhere = tuple(range(topology.count))
    if not apart.size or not np.isfinite(apart).all():
        return everywhere
    fast = np.minimum(bandwidth, bandwidth.T) >= _MUCH_SLOWER * apart.max()
    largest: tuple[int, ...] = ()
    left = set(everywhere)
    while left:
        island, pending = set[int](), [min(left)]
        while pending:
            device = pending.pop()
            if device in left:
                left.remove(device)
                island.add(device)
                pending += np.flatnonzero(fast[device]).tolist()
        largest = max(largest, tuple(sorted(island)), key=len)
    return largest


def on_island(graph: OpGraph, topology: Topology, island: tuple[int, ...]) -> tuple[OpGraph, Topology] | None:
    """Returns the same operators for these devices only; None if some are pinned elsewhere."""
    number = {device: index for index, device in enumerate(island)}
    if any(device >= 0 and device not in number for device in graph.pinned.tolist()):
        return None
    chosen = list(island)
    pinned = np.array([number.get(device, -1) for device in graph.pinned.tolist()], np.int64)
    own = dataclasses.replace(
        graph,
        seconds=graph.seconds[:, chosen],
        pinned=pinned,
        launch_seconds=graph.launch_seconds[chosen],
        copy_seconds=graph.copy_seconds[chosen],
    )
    links = np.ix_(chosen, chosen)
    names = tuple(topology.names[device] for device in chosen)
    return own, Topology(names, topology.bandwidth[links], topology.latency[links], topology.memory_bytes[chosen])


def off_island(placement: OpPlacement, topology: Topology, island: tuple[int, ...]) -> OpPlacement:
    """Renumbers a placement on an island by the numbers of all devices."""
    peaks = [0.0] * topology.count
    for device, peak in zip(island, placement.peak_bytes, strict=True):
        peaks[device] = peak
    devices = {name: island[device] for name, device in placement.devices.items()}
    return dataclasses.replace(placement, devices=devices, peak_bytes=tuple(peaks))
