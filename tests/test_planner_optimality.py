"""The planner against brute force over all cuts, replications and placements of small random instances."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from selection import thorough

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.planning.planner import plan
from dapple_tf.simulation.simulator import simulate

SCHEDULES = ("gpipe", "dapple_a", "dapple_b")


def random_profile(draw: random.Random, layers: int) -> Profile:
    """Layers whose times differ by up to ten times, with skip connections and light and heavy parameters."""
    costs = []
    for index in range(layers):
        forward = draw.uniform(0.2, 2.0) * 1e-3
        costs.append(
            LayerProfile(
                f"layer_{index}",
                Cost(draw.choice([0.0, 1e-4]), forward),
                Cost(0.0, forward * draw.uniform(1.0, 3.0)),
                residual_bytes=Cost(0.0, draw.uniform(1e5, 1e6)),
                parameter_bytes=int(draw.choice([1e4, 1e6, 2e7]) * draw.uniform(0.5, 2)),
                apply_seconds=draw.choice([0.0, 5e-4]),
            )
        )
    tensors = [
        Tensor(index, (index + 1,), Cost(0.0, draw.choice([1e4, 1e6, 4e6]) * draw.uniform(0.5, 2)))
        for index in range(layers - 1)
    ]
    if layers > 2 and draw.random() < 0.3:
        tensors.append(Tensor(0, (layers - 1,), Cost(0.0, 1e5), differentiable=False))
    return Profile("random", "none", (1, 2), tuple(costs), tuple(tensors))


def random_cluster(draw: random.Random, devices: int) -> Cluster:
    servers = draw.choice([1, 2, devices]) if devices > 2 else draw.choice([1, 2])
    memory = draw.choice([None, None, int(2e8)])
    slow = draw.choice([1.0, 1.0, 0.5])
    return Cluster(
        tuple(
            Device(f"d{index}", index * servers // devices, memory, slow if index * servers // devices else 1.0)
            for index in range(devices)
        ),
        intra_bandwidth=draw.choice([1e9, 1e11]),
        inter_bandwidth=draw.choice([2e8, 1e9, 1e10]),
        inter_latency=1e-5,
        intra_latency=1e-6,
        real=False,
    )


def every_plan(profile: Profile, devices: int, batch: int, micro_batches: int) -> Iterator[Plan]:
    """All cuts, with every assignment of devices to stages, some devices perhaps unused; under every schedule."""
    names = [layer.name for layer in profile.layers]
    for stages in range(1, min(devices, len(names)) + 1):
        assignments = []
        for owners in itertools.product(range(stages + 1), repeat=devices):
            groups = [[device for device in range(devices) if owners[device] == stage] for stage in range(stages)]
            if all(groups):
                assignments.append(groups)
        for cuts in itertools.combinations(names[:-1], stages - 1):
            for groups in assignments:
                for schedule in SCHEDULES if stages > 1 else SCHEDULES[:1]:
                    try:
                        yield Plan.manual(cuts, groups, micro_batches, batch, schedule)
                    except PlanError:
                        break  # more replicas than samples, under every schedule


def brute_force(profile: Profile, cluster: Cluster, batch: int, micro_batches: int) -> float | None:
    best = None
    for candidate in every_plan(profile, cluster.num_devices, batch, micro_batches):
        try:
            latency = simulate(candidate, profile, cluster).latency
        except PlanError:
            continue  # doesn't fit
        best = latency if best is None else min(best, latency)
    return best


SEEDS = [*range(60), *map(thorough, range(60, 180))]


@pytest.mark.few(7)
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_is_faster_than_the_planners(seed: int) -> None:
    draw = random.Random(seed)
    devices = draw.choice([2, 3, 3, 3, 4] if seed % 10 else [4])
    profile = random_profile(draw, draw.choice([2, 3, 4] if devices < 4 else [3, 4]))
    cluster = random_cluster(draw, devices)
    batch = draw.choice([4, 6, 8, 12])
    micro_batches = draw.choice([1, 2, 4])
    best = brute_force(profile, cluster, batch, micro_batches)
    if best is None:
        with pytest.raises(PlanError, match="no plan fits"):
            plan(profile, cluster, batch, micro_batches=micro_batches, recompute="none", least_gain=0.0)
        return
    chosen = plan(profile, cluster, batch, micro_batches=micro_batches, recompute="none", least_gain=0.0)
    assert chosen.report is not None
    assert simulate(chosen, profile, cluster).latency == pytest.approx(chosen.report.latency)
    assert chosen.report.latency <= best * 1.02
