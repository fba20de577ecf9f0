"""The default plan against those of others, on small cases."""

from __future__ import annotations

import math

import pytest
from hardware import cluster_of, profile_of
from op_graphs import Builder, topology

import dapple_tf as dapple
from dapple_tf.describe.profile import Profile
from dapple_tf.operators.list_scheduler import earliest, fd_dps_schedule
from dapple_tf.operators.op_graph import compile_problem
from dapple_tf.operators.simulated_placement import judged
from dapple_tf.tools.evaluation import opponents
from dapple_tf.tools.evaluation.bench_scale import cluster_of as v100s
from dapple_tf.tools.evaluation.ooo_models import Transformer
from dapple_tf.tools.evaluation.operator_baselines import parents_device
from dapple_tf.tools.evaluation.pipedream import pipedream


def gpt(blocks: int) -> Profile:
    return Transformer("gpt", blocks, 512, tokens=1024, words=50257, predicted=1024).profile()


@pytest.mark.parametrize(("blocks", "devices", "batch"), [(6, 4, 16), (12, 8, 32)])
def test_no_expert_and_no_paper_is_faster_on_a_small_gpt(blocks: int, devices: int, batch: int) -> None:
    case = opponents.Case(gpt(blocks), v100s(devices), batch, (1, 4, 8))
    best = dapple.plan(case.profile, case.cluster, case.batch, micro_batches=case.counts)
    assert best.report is not None
    others = opponents.strongest(case, [], [], math.inf)
    seconds = [outcome.seconds for outcome in others.values() if outcome is not None]
    # A plan is chosen for its simplicity if others gain less than 1 %.
    assert seconds and min(seconds) >= best.report.latency / 1.01


def test_pipedreams_partition_of_equal_layers_is_equal() -> None:
    profile, cluster = profile_of(8, parameters=10**8), cluster_of(1, 1, 1, 1, inter_bandwidth=1e9)
    assert pipedream(profile, cluster).replicas == (1, 1, 1, 1)
    light, fast = profile_of(8, parameters=10, size=1e9), cluster_of(4, inter_bandwidth=1e9)
    assert pipedream(light, fast).replicas == (4,)


def test_megatrons_layouts_have_equal_blocks_on_all_devices() -> None:
    case = opponents.Case(gpt(14), v100s(8), 32, (8,))
    plans = list(opponents.experts(case))
    assert {plan.replicas[0] * len(set(plan.devices)) for plan in plans} == {8}
    assert {plan.num_stages // len(set(plan.devices)) for plan in plans} >= {1, 2, 4}
    assert any(plan.devices[0] == (0, 1) for plan in plans) and any(plan.devices[0] == (0, 4) for plan in plans)


def test_pipedream_by_levels_reduces_inside_servers() -> None:
    """Weights that are cheap to reduce inside a server, and too much between two."""
    profile = profile_of(8, parameters=10**8)
    cluster = cluster_of(4, 4, intra_bandwidth=1e13, inter_bandwidth=1e9)
    levels = pipedream(profile, cluster, flat=False)
    assert levels.replicas == (4, 4) and levels.devices == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert pipedream(profile, cluster).replicas == (1,) * 8


def test_pipedream_by_levels_may_have_a_pipeline_in_each_server() -> None:
    """Three layers split into three equal stages, not into two; only between servers is there a fast network."""
    cluster = cluster_of(3, 3, intra_bandwidth=1e7, inter_bandwidth=1e12)
    partition = pipedream(profile_of(3, parameters=10**8, size=10.0), cluster, flat=False)
    assert partition.cuts == (0, 1)
    assert partition.devices == ((0, 3), (1, 4), (2, 5))


def test_algorithm_2_waits_for_a_parents_device_as_long_as_that_delays_nothing() -> None:
    """The long operator keeps device 1; of the parent's two other readers the short one has slack."""
    builder = Builder(3)
    builder.pins["long"] = 1
    parent = builder.add("Parent", 1.0, 1e3)
    builder.add("Long", 10.0, 1e3, (parent,), group="long")
    builder.add("Middle", 3.0, 1e3, (parent,))
    short = builder.add("Short", 1.0, 1e3, (parent,))
    graph, links = builder.graph(), topology(3)
    whole = compile_problem(graph, links)
    rules = (earliest, parents_device(whole))
    first, paper = (judged(whole, *fd_dps_schedule(whole, rule), "") for rule in rules)
    assert paper.devices[short] == paper.devices[parent]
    assert first.devices[short] not in (1, first.devices[parent])
    assert paper.seconds == first.seconds
