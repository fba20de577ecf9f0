"""Where last backwards are cut, so that all-reduces run during them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hardware import cluster_of
from test_plan_record import profile_of

from dapple_tf.describe.cluster import Cluster, Device, Server
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.planner import plan as planned
from dapple_tf.planning.reductions import reduced_early
from dapple_tf.simulation.simulator import simulate


def random_profile(draw: random.Random, layers: int) -> Profile:
    return profile_of([f"l{index}" for index in range(layers)], draw)


def random_cluster(draw: random.Random, *sizes: int) -> Cluster:
    links = {"intra_bandwidth": draw.choice([1e9, 1e10]), "inter_bandwidth": draw.choice([1e8, 1e9])}
    return cluster_of(*sizes, **links, intra_latency=1e-5, inter_latency=draw.choice([1e-5, 1e-3]))


@pytest.mark.parametrize("seed", range(8))
def test_data_parallelism_is_cut_as_well_as_can_be(seed: int) -> None:
    draw = random.Random(seed)
    profile, cluster = random_profile(draw, draw.randrange(2, 7)), random_cluster(draw, 2, 2)
    plan = Plan.data_parallel(4, 16, draw.choice([1, 4]))
    names = [layer.name for layer in profile.layers[:-1]]
    all_cuts = itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(len(names) + 1))
    best = min(simulate(dataclasses.replace(plan, backward_cuts=cuts), profile, cluster).latency for cuts in all_cuts)
    own = simulate(reduced_early(plan, profile, cluster), profile, cluster).latency
    assert own <= best * 1.005  # A gain of less isn't worth a cut.


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_becomes_slower(seed: int) -> None:
    draw = random.Random(seed)
    profile, cluster = random_profile(draw, 6), random_cluster(draw, 2, 2, 2)
    plan = Plan.manual(["l2"], [[0, 1, 2], [3, 4, 5]], 4, 24, draw.choice(["gpipe", "dapple_a", "zb_h1"]))
    early = reduced_early(plan, profile, cluster)
    assert simulate(early, profile, cluster).latency <= simulate(plan, profile, cluster).latency
    assert dataclasses.replace(early, backward_cuts=()) == plan


def test_what_gains_nothing_isn_t_cut() -> None:
    draw = random.Random(0)
    profile = random_profile(draw, 5)
    free = Cluster(tuple(Device(f"d{index}", 0) for index in range(2)), real=False)
    assert reduced_early(Plan.data_parallel(2, 8), profile, free).backward_cuts == ()
    shared = dataclasses.replace(random_cluster(draw, 2), servers=(Server(capacity=1.0),))
    assert reduced_early(Plan.data_parallel(2, 8), profile, shared).backward_cuts == ()
    last = dataclasses.replace(Plan.data_parallel(2, 8), wait_free=False)
    assert reduced_early(last, profile, random_cluster(draw, 1, 1)).backward_cuts == ()
    straight = Plan.straight(["l1"], 8, 2)
    assert reduced_early(straight, profile, random_cluster(draw, 1, 1)).backward_cuts == ()


# One of each kind of schedule, and a search for k.
@pytest.mark.parametrize("seed", range(5))
def test_what_a_plan_promises_is_what_is_simulated(seed: int) -> None:
    """There is one model of a step: the report's latency is the simulation's, whatever was asked for."""
    draw = random.Random(seed)
    profile = random_profile(draw, draw.randrange(3, 4 + seed % 2))
    cluster = random_cluster(draw, *draw.choice([(2,), (1, 1), (2, 1)]))
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
