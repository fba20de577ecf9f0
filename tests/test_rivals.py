"""Plans to be tried for real: the best of each kind that the request allows."""

from __future__ import annotations

from typing import Any

import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import find, rivals


def pipelined() -> Cluster:
    """Four devices, which a plan for heavy parameters divides into stages."""
    return cluster_of(2, 2, intra_bandwidth=1e10, inter_bandwidth=1e9)


def rivals_of(cluster: Cluster, parameters: int = 2 * 10**6, batch: int = 8, **options: Any) -> list[Plan]:
    return rivals(PlanRequest(profile_of(4, parameters=parameters), cluster, batch, **options))


def test_the_best_of_stages_and_of_data_parallelism_are_rivals_with_their_reports() -> None:
    plans = rivals_of(pipelined())
    assert plans[0] == find(PlanRequest(profile_of(4, parameters=2 * 10**6), pipelined(), 8))
    assert plans[0].num_stages > 1
    assert [plan.devices for plan in plans[1:]] == [((0, 1, 2, 3),)]
    reports = [plan.report for plan in plans]
    assert all(report is not None for report in reports)
    latencies = [report.latency for report in reports if report is not None]
    assert latencies[0] < latencies[1] <= 2 * latencies[0]


@pytest.mark.parametrize(
    "asked",
    [
        {"micro_batches": 2},
        {"recompute": "boundary"},
        {"all_reduce": "hierarchical"},
        {"schedule": "gpipe"},
        {"schedule": "zb_h1"},
        {"schedule": "zb_v"},
        {"only": ["chunks"]},
        {"jit_compile": True},
        {"optimizer_shards": True},
    ],
    ids=str,
)
def test_rivals_have_what_was_asked_for(asked: dict[str, Any]) -> None:
    """Data parallelism was one micro-batch under DAPPLE's policy, without recomputation and with flat rings."""
    plans = rivals_of(pipelined(), parameters=1000, **asked) + rivals_of(pipelined(), **asked)
    for plan in plans:
        for name, value in asked.items():
            if name == "only":
                assert not plan.relays and not plan.backward_cuts and not plan.reverse_first_k
            else:
                assert plan.options[name] == value, f"{plan}"


def test_without_k_of_reverse_first_k_there_are_no_rivals_of_plans_with_it() -> None:
    plans = rivals_of(pipelined(), parameters=1000, reverse_first_k=1)
    assert plans and all(plan.reverse_first_k == 1 for plan in plans)


def test_simple_plans_that_would_take_twice_as_long_are_no_rivals() -> None:
    alike = rivals_of(cluster_of(4, intra_bandwidth=1e12), parameters=100)
    assert any(plan.replicas == (4,) for plan in alike)
    assert not any(plan.replicas == (1,) for plan in alike), "one device takes four times as long"
    slow = rivals_of(cluster_of(1, 1, 1, 1, intra_bandwidth=1e9, inter_bandwidth=1e9), parameters=10**9)
    assert not any(plan.replicas == (4,) for plan in slow)


def test_one_device_is_the_fastest() -> None:
    """It was the first, however slow: three times as slow as both, so that it wasn't tried."""
    plans = rivals_of(cluster_of(2, speeds=[0.25, 1.0], intra_bandwidth=1e10), parameters=1000)
    assert [plan.devices for plan in plans] == [((0, 1),), ((1,),)]


def test_what_fits_in_several_micro_batches_only_is_a_rival() -> None:
    """Data parallelism was left out where the whole batch doesn't fit at once."""
    cluster = cluster_of(2, memory=10**6, intra_bandwidth=1e10)
    profile = profile_of(4, parameters=1000, residual=5e4)
    one, several = (
        rivals(PlanRequest(profile, cluster, 32, micro_batches=counts, recompute="none"))
        for counts in (1, (1, 2, 4, 8, 16))
    )
    assert ((0, 1),) not in [plan.devices for plan in one]
    assert ((0, 1),) in [plan.devices for plan in several]


def test_where_nothing_fits_there_are_no_rivals() -> None:
    assert not rivals_of(cluster_of(2, memory=1000, intra_bandwidth=1e10))
