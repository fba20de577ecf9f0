"""Simulations that end early, or go on from where plans differ: the same numbers as whole ones."""

from __future__ import annotations

import random

import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.early_reductions import early_reductions
from dapple_tf.planning.stage_cuts import by_time
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.least_times import LeastTimes
from dapple_tf.simulation.simulator import run, tried

POLICIES = ("gpipe", "dapple_a", "dapple_b", "fast_forward_a", "modulo", "interleaved", "zb_h1", "zb_h2", "zb_v")


def costs_of(seed: int) -> CostModel | None:
    """A random plan's costs; None if there is no such plan."""
    rng = random.Random(seed)
    profile = profile_of(rng.randint(4, 12), parameters=10 ** rng.randint(4, 8), size=10 ** rng.uniform(4, 7))
    servers = rng.choice([(4,), (2, 2), (1, 1, 1, 1), (4, 4)])
    cluster = cluster_of(*servers, intra_bandwidth=1e10, inter_bandwidth=10 ** rng.uniform(7, 10), intra_latency=1e-5)
    devices, places = sum(servers), rng.choice([1, 2, 4])
    each = devices // places
    groups = [range(place * each, (place + 1) * each) for place in range(places)] * rng.choice([1, 1, 2])
    try:
        plan = Plan.manual(
            by_time(profile, len(groups)), groups, rng.choice([1, 3, 4, 8]), 64, rng.choice(POLICIES),
            carried_updates=rng.choice([0, 0, 0, 1]),
        )  # fmt: skip
        costs = CostModel(plan, profile, cluster)
        run(costs)
    except PlanError:
        return None
    return costs


@pytest.mark.parametrize("seed", range(60))
def test_a_step_within_its_limit_is_simulated_as_without_and_none_is_given_up_wrongly(seed: int) -> None:
    costs = costs_of(seed)
    if costs is None:
        return
    whole = run(costs)
    within = tried(costs, whole.latency)
    assert within.simulation is not None and within.simulation.spans == whole.spans
    computed = max(span.end for span in whole.spans if span.kind in ("F", "B", "Bx", "Bw"))
    assert within.tail == pytest.approx(whole.latency - computed)
    assert tried(costs, 0.1 * computed).simulation is None  # all-reduces may end during backwards
    stages = range(costs.plan.num_stages)
    carried = stages if costs.plan.carried_updates else ()
    least = LeastTimes(costs, {stage for stage in stages if costs.delays(stage)}, carried=carried)
    assert 0 < least.busiest() <= whole.latency * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_steps_with_other_cuts_go_on_from_where_they_differ(seed: int) -> None:
    costs = costs_of(seed)
    if costs is None or costs.plan.carried_updates:
        return
    whole = tried(costs)
    for plan in early_reductions(costs):
        cut = CostModel(plan, costs.profile, costs.cluster)
        simulation = run(cut)
        resumed = whole.with_cuts(cut)
        assert resumed.simulation is not None
        assert (resumed.simulation.latency, resumed.simulation.spans) == (simulation.latency, simulation.spans)
        # A limit is for the best way to cut.
        assert tried(costs, simulation.latency).simulation is not None
    assert whole.simulation is not None and whole.simulation.spans == run(costs).spans


def test_some_plans_are_cut_and_resumed() -> None:
    """Else the tests above would show nothing."""
    known = [costs for seed in range(60) if (costs := costs_of(seed)) is not None]
    cut = [costs for costs in known if any(True for _ in early_reductions(costs))]
    assert len(known) > 30 and len(cut) > 10
