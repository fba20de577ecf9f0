"""A record of plans: the steps of random ones and the ones chosen, to the last bit, and every draw through the chain.

A change of the planner, the schedules or the simulator that means to keep numbers must reproduce the record; one that
doesn't says in its commit which lines of tests/golden moved, and why (`make bless`).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hardware import cluster_of

import dapple_tf as dapple
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.describe.profile_text import PUBLISHED, load_text
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Simulation, run
from dapple_tf.tools.evaluation.random_plans import allowed_plan, fields_text
from graph_passes.ir.tasks import Schedule

SEEDS = range(300)
CLUSTERS = {
    "2x2": cluster_of(2, 2, intra_bandwidth=1e10, inter_bandwidth=1e9, memory=16 * 2**30),
    "4 slow": cluster_of(1, 1, 1, 1, inter_bandwidth=3e8, inter_latency=1e-4),
    "unlike": cluster_of(4, 2, intra_bandwidth=2e10, inter_bandwidth=3e9, speeds=(1, 1, 1, 1, 0.5, 0.5)),
}


def profile_of(names: Sequence[str], rng: random.Random) -> Profile:
    """Unlike layers, with a skip connection now and then."""
    count = len(names)

    def cost(low: float, high: float) -> Cost:
        return Cost(rng.choice([0.0, low]), rng.uniform(low, high))

    layers = tuple(
        LayerProfile(
            name,
            cost(2e-4, 2e-3),
            cost(5e-4, 4e-3),
            cost(2e-4, 4e-4),
            cost(1e4, 1e6),
            parameter_bytes=rng.choice([0, 10**4, 10**6, 10**8]),
            apply_seconds=rng.choice([0.0, 1e-4]),
        )
        for name in names
    )
    tensors = [Tensor(index, (index + 1,), cost(1e4, 1e6)) for index in range(count - 1)]
    if count > 6 and rng.random() < 0.5:
        tensors[1] = Tensor(1, (2, count - 1), tensors[1].bytes)
    return Profile("random", "none", (1, 2), layers, tuple(tensors), step_seconds=rng.choice([0.0, 1e-3]))


def through_the_chain(plan: Plan, profile: Profile, cluster: Cluster) -> Simulation:
    """Writes and reads a plan, orders its tasks and simulates a step; memory ends as it begins."""
    assert Plan.from_json(plan.to_json()) == plan
    costs = CostModel(plan, profile, cluster)
    assert Schedule.parse(str(costs.schedule)).orders == costs.schedule.orders
    step = run(costs)
    for curve in step.memory.values():
        assert min(size for _, size in curve) >= -1e-3, "rounding of bytes"
        assert curve[-1][1] == pytest.approx(curve[0][1], abs=1.0), "the step ends with what it began with"
    return step


def _order(schedule: Schedule) -> str:
    """A fingerprint of the order of tasks on each device."""
    return hashlib.sha256(str(schedule).encode()).hexdigest()[:8]


def _random(seed: int) -> str:
    """Draws a plan and its costs, sends it through the chain, and returns its line of the record."""
    rng = random.Random(seed)
    profile = profile_of([f"layer_{index}" for index in range(rng.randint(4, 10))], rng)
    draws = np.random.default_rng(seed)
    names = tuple(layer.name for layer in profile.layers[:-1])
    plan, servers = allowed_plan(draws, names, ("stages", "shards", "rows")[seed % 3])
    links = {"intra_bandwidth": 1e10, "inter_bandwidth": 10 ** rng.uniform(7, 10), "inter_latency": 1e-5}
    step = through_the_chain(plan, profile, cluster_of(*servers, **links))
    return f"{seed}: {step.latency.hex()} K {step.costs.warm_up} order {_order(step.costs.schedule)}"


def test_random_plans_step_by_step(golden: Callable[[str, str], None]) -> None:
    golden("random_plans.txt", "\n".join(map(_random, SEEDS)) + "\n")


def test_chosen_plans(golden: Callable[[str, str], None]) -> None:
    lines = []
    for path, (name, cluster) in itertools.product(PUBLISHED.values(), CLUSTERS.items()):
        profile = load_text(path, device="V100")
        chosen = dapple.plan(profile, cluster, 64)
        assert chosen.report is not None
        assert dapple.simulate(chosen, profile, cluster).latency == chosen.report.latency, "promised as simulated"
        lines.append(f"{path.stem} on {name}: {chosen.report.latency.hex()} {fields_text(chosen)}\n")
    golden("chosen_plans.txt", "".join(lines))
