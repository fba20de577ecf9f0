"""Simulations that end early, or go on from where plans differ: the same numbers as whole ones."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.layer_profile import Cost
from dapple_tf.describe.plan import ALL_REDUCE, Plan, PlanError
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
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


def combined(seed: int) -> CostModel | None:
    """Costs of a random plan with relays, unlike slices and all-reduces by server; some layers have no parameters."""
    draw = random.Random(seed)
    count = draw.randint(4, 9)
    layers = [
        dataclasses.replace(
            layer,
            forward=Cost(0.0, draw.uniform(1, 5) * 1e-3),
            backward=Cost(0.0, draw.uniform(2, 10) * 1e-3),
            parameter_bytes=draw.choice([0, 4 * 10**4, 4 * 10**6, 4 * 10**8]),
        )
        for layer in profile_of(count).layers
    ]
    tensors = [Tensor(index, (index + 1,), Cost(0.0, 10 ** draw.uniform(3, 6))) for index in range(count - 1)]
    tensors.append(Tensor(0, tuple(range(1, count)), Cost(0.0, 10 ** draw.uniform(4, 6)), draw.random() < 0.7))
    shared = (SharedParameters((0, count - 1), 4 * 10**6),) if draw.random() < 0.4 else ()
    profile = Profile("skips", "none", (1,), tuple(layers), tuple(tensors), shared)
    servers = draw.choice([(2, 2), (3, 3), (4,), (1, 2, 1)])
    speeds = [draw.choice([1.0, 1.0, 0.5]) for _ in range(sum(servers))]
    links = {"intra_bandwidth": 1e10, "inter_bandwidth": 10 ** draw.uniform(8, 10), "inter_latency": 1e-4}
    places, times = draw.choice([1, 2]), draw.choice([1, 2])
    each = sum(servers) // places
    groups = [range(place * each, (place + 1) * each) for place in range(places)] * times
    micro_batches = draw.choice([1, 2, 5])
    try:
        plan = Plan.manual(
            by_time(profile, len(groups)),
            groups,
            micro_batches,
            micro_batches * each * draw.randint(2, 5) + draw.randint(0, 3),
            draw.choice(POLICIES),
            relays=[stage for stage in range(len(groups)) if draw.random() < 0.5],
            shares=[[draw.randint(1, 3) for _ in group] for group in groups],
            all_reduce=[draw.choice(ALL_REDUCE) for _ in groups],
        )
        costs = CostModel(plan, profile, cluster_of(*servers, speeds=speeds, **links))
        run(costs)
    except PlanError:
        return None
    return costs


@pytest.mark.parametrize("seed", range(220))
def test_no_plan_that_is_fast_enough_once_cut_is_given_up(seed: int) -> None:
    """All-reduces hold up tasks, and may be over before the backwards during which they run."""
    costs = combined(seed)
    for plan in () if costs is None else early_reductions(costs):
        assert costs is not None
        cut = CostModel(plan, costs.profile, costs.cluster)
        latency = run(cut).latency
        for own in (costs, cut):
            assert tried(own, latency).simulation is not None
        least = LeastTimes(cut, {stage for stage in range(plan.num_stages) if cut.delays(stage)})
        assert least.busiest() <= latency * (1 + 1e-9)


def test_plans_whose_all_reduces_wait_for_all_tasks_are_not_cut() -> None:
    for costs in (combined(seed) for seed in range(20)):
        if costs is not None:
            waiting = dataclasses.replace(costs.plan, wait_free=False)
            assert not [*early_reductions(CostModel(waiting, costs.profile, costs.cluster))]


def test_some_plans_are_cut_and_resumed() -> None:
    """Else the tests above would show nothing."""
    known = [costs for seed in range(60) if (costs := costs_of(seed)) is not None]
    cut = [costs for costs in known if any(True for _ in early_reductions(costs))]
    assert len(known) > 30 and len(cut) > 10
