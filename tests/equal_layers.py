"""Profiles of equal layers, and clusters for them, for the tests of what finds plans."""

from __future__ import annotations

from typing import Any

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.profile import Cost, LayerProfile, Profile, Tensor


def profile_of(
    layers: int = 8, *, parameters: int = 1_000_000, size: float = 1e5, residual: float = 1e5, milliseconds: float = 1.0
) -> Profile:
    """Equal layers: F of 1 ms and B of 2 ms per sample."""
    costs = [
        LayerProfile(
            f"layer_{index}",
            Cost(0.0, milliseconds * 1e-3),
            Cost(0.0, 2e-3 * milliseconds),
            residual_bytes=Cost(0.0, residual),
            parameter_bytes=parameters,
        )
        for index in range(layers)
    ]
    tensors = [Tensor(index, (index + 1,), Cost(0.0, size)) for index in range(layers - 1)]
    return Profile("equal", "none", (1, 2), tuple(costs), tuple(tensors))


def cluster_of(*servers: int, memory: int | None = None, **links: Any) -> Cluster:
    devices = [Device(f"s{s}d{d}", s, memory) for s, size in enumerate(servers) for d in range(size)]
    return Cluster(tuple(devices), real=False, **links)
