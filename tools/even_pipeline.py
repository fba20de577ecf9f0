"""A pipeline of equal stages, to compare simulator and emulator on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Cost, LayerProfile, Profile, Tensor
from dapple_tf.schedules.policy import Placement, Policy
from dapple_tf.schedules.schedules import policy_of

_FORWARD, _BACKWARD, _APPLY = 0.010, 0.020, 0.005
SAMPLES = 6
"""Samples of a micro-batch."""


def pipeline(
    stages: int,
    micro_batches: int,
    schedule: str | Policy,
    replicas: Sequence[int],
    network: float,
    uneven: float = 0.0,
) -> tuple[Plan, Profile, Cluster]:
    """A pipeline of equal stages, each on a server of its own, or two where the policy goes there and back.

    Args:
        stages: S; even where the policy goes there and back.
        micro_batches: M.
        schedule: the policy.
        replicas: of each server's stages, repeated.
        network: time to send a whole micro-batch to the next stage, as a part of F's; 0 for free links.
        uneven: how much longer the last stage takes than the first, as a part.
    """
    factors = [1 + uneven * stage / max(1, stages - 1) for stage in range(stages)]
    layers = [
        LayerProfile(
            f"layer{stage}",
            Cost(_FORWARD * factor),
            Cost(_BACKWARD * factor),
            output_bytes=Cost(0.0, 1.0),
            parameter_bytes=100,
            apply_seconds=_APPLY,
        )
        for stage, factor in enumerate(factors)
    ]
    tensors = tuple(Tensor(stage, (stage + 1,), Cost(0.0, 1.0)) for stage in range(stages - 1))
    profile = Profile("pipeline", "none", (1, SAMPLES), tuple(layers), tensors)
    vee = policy_of(schedule).planning.placements == (Placement.VEE,)
    servers = stages // 2 if vee else stages
    counts = list(itertools.islice(itertools.cycle(replicas), servers))
    server_of = [server for server, count in enumerate(counts) for _ in range(count)]
    devices = tuple(Device(f"device{index}", server) for index, server in enumerate(server_of))
    cluster = Cluster(devices, real=False)
    if network:
        bandwidth = SAMPLES / (network * _FORWARD)
        cluster = Cluster(devices, intra_bandwidth=1e4, inter_bandwidth=bandwidth, inter_latency=1e-4, real=False)
    groups = [[index for index, owner in enumerate(server_of) if owner == server] for server in range(servers)]
    groups += groups[::-1] if vee else []
    cuts = [layer.name for layer in layers[:-1]]
    return Plan.manual(cuts, groups, micro_batches, SAMPLES * micro_batches, schedule), profile, cluster
