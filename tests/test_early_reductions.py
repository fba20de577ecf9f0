"""Where last backwards are cut, so that all-reduces run during them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from dapple_tf.describe.cluster import Cluster, Device, Server
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.planning.early_reductions import reduced_early
from dapple_tf.planning.planner import plan as planned
from dapple_tf.simulation.simulator import simulate


def profile_of(draw: random.Random, layers: int, **options: Any) -> Profile:
    costs = [
        LayerProfile(
            f"l{index}",
            Cost(0.0, draw.uniform(1, 5) * 1e-3),
            Cost(0.0, draw.uniform(2, 10) * 1e-3),
            residual_bytes=Cost(0.0, draw.uniform(1, 5) * 1e5),
            parameter_bytes=draw.choice([0, 1, 4, 20]) * 10**6,
            apply_seconds=1e-4,
        )
        for index in range(layers)
    ]
    tensors = [Tensor(index, (index + 1,), Cost(0.0, draw.uniform(1, 20) * 1e4)) for index in range(layers - 1)]
    profile = Profile("random", "none", (1,), tuple(costs), tuple(tensors))
    return dataclasses.replace(profile, task_seconds=draw.choice([0.0, 1e-3]), **options)


def cluster_of(draw: random.Random, *sizes: int, memory: int | None = None) -> Cluster:
    devices = [Device(f"s{s}d{d}", s, memory, 1.0) for s, size in enumerate(sizes) for d in range(size)]
    return Cluster(
        tuple(devices),
        intra_bandwidth=draw.choice([1e9, 1e10]),
        inter_bandwidth=draw.choice([1e8, 1e9]),
        intra_latency=1e-5,
        inter_latency=draw.choice([1e-5, 1e-3]),
        real=False,
    )


@pytest.mark.parametrize("seed", range(8))
def test_data_parallelism_is_cut_as_well_as_can_be(seed: int) -> None:
    draw = random.Random(seed)
    profile, cluster = profile_of(draw, draw.randrange(2, 7)), cluster_of(draw, 2, 2)
    plan = Plan.data_parallel(4, 16, draw.choice([1, 4]))
    names = [layer.name for layer in profile.layers[:-1]]
    all_cuts = itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(len(names) + 1))
    best = min(simulate(dataclasses.replace(plan, backward_cuts=cuts), profile, cluster).latency for cuts in all_cuts)
    own = simulate(reduced_early(plan, profile, cluster), profile, cluster).latency
    assert own <= best * 1.005  # A gain of less isn't worth a cut.


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_becomes_slower(seed: int) -> None:
    draw = random.Random(seed)
    profile, cluster = profile_of(draw, 6), cluster_of(draw, 2, 2, 2)
    plan = Plan.manual(["l2"], [[0, 1, 2], [3, 4, 5]], 4, 24, draw.choice(["gpipe", "dapple_a", "zb_h1"]))
    early = reduced_early(plan, profile, cluster)
    assert simulate(early, profile, cluster).latency <= simulate(plan, profile, cluster).latency
    assert dataclasses.replace(early, backward_cuts=()) == plan


def test_what_gains_nothing_isn_t_cut() -> None:
    draw = random.Random(0)
    profile = profile_of(draw, 5)
    free = Cluster(tuple(Device(f"d{index}", 0) for index in range(2)), real=False)
    assert reduced_early(Plan.data_parallel(2, 8), profile, free).backward_cuts == ()
    shared = dataclasses.replace(cluster_of(draw, 2), servers=(Server(capacity=1.0),))
    assert reduced_early(Plan.data_parallel(2, 8), profile, shared).backward_cuts == ()
    last = dataclasses.replace(Plan.data_parallel(2, 8), wait_free=False)
    assert reduced_early(last, profile, cluster_of(draw, 1, 1)).backward_cuts == ()
    straight = Plan.straight(["l1"], 8, 2)
    assert reduced_early(straight, profile, cluster_of(draw, 1, 1)).backward_cuts == ()


# One of each kind of schedule, and a search for k.
@pytest.mark.parametrize("seed", range(5))
def test_what_a_plan_promises_is_what_is_simulated(seed: int) -> None:
    """There is one model of a step: the report's latency is the simulation's, whatever was asked for."""
    draw = random.Random(seed)
    profile = profile_of(draw, draw.randrange(3, 4 + seed % 2))
    cluster = cluster_of(draw, *draw.choice([(2,), (1, 1), (2, 1)]))
    schedules = [None, "auto", "dapple_b", ["gpipe", "zb_h2"], "auto"]
    options: dict[str, Any] = {
        "schedule": schedules[seed % len(schedules)],
        "micro_batches": draw.choice([None, 4, [1, 8]]),
        "recompute": draw.choice([None, "boundary"]),
        "reverse_first_k": "auto" if seed % len(schedules) == 4 else 0,
    }
    all_reduce = draw.choice(["hierarchical", "flat"])
    plan = planned(profile, cluster, 32, all_reduce=all_reduce, **options)
    assert plan.report is not None
    for own in (plan, Plan.from_json(plan.to_json())):
        assert simulate(own, profile, cluster).latency == plan.report.latency
