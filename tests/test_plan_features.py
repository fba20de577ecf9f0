"""``only``: what the planner may use, what the report says about it, and that the report is what is simulated."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import Cost
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.features import FEATURES, NAMES, restraints
from dapple_tf.planning.plan_request import DAPPLE_POLICIES
from dapple_tf.planning.planner import plan
from dapple_tf.simulation.simulator import simulate

CASES: dict[str, tuple[Profile, Cluster, int]] = {
    "slow network": (profile_of(parameters=10**6, size=1e7), cluster_of(1, 1, 1, 1, inter_bandwidth=5e8), 1),
    "heavy stages": (profile_of(12, parameters=10**8), cluster_of(1, 1, 1, 1, inter_bandwidth=1e10), 4),
    "replicas": (profile_of(parameters=10**7), cluster_of(2, 2, intra_bandwidth=1e10, inter_bandwidth=1e9), 2),
}


def used(chosen: Plan) -> set[str]:
    return {feature.name for feature in FEATURES if feature.used(chosen)}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_only_what_is_named_is_used(case: str) -> None:
    profile, cluster, count = CASES[case]
    every = plan(profile, cluster, 16, micro_batches=count)
    none = plan(profile, cluster, 16, micro_batches=count, only=[])
    assert every.report is not None and none.report is not None
    assert not used(none)
    assert used(every), "the case shows nothing"
    assert every.report.latency < none.report.latency
    for name in used(every):
        left = {
            other for other in NAMES if other != name and name not in {f.needs for f in FEATURES if f.name == other}
        }
        if name == "chunks":
            left -= {"carried_updates"}
        assert name not in used(plan(profile, cluster, 16, micro_batches=count, only=left))


def test_recomputation_is_left_out_where_it_isnt_named() -> None:
    profile, cluster = profile_of(residual=1e8, size=1e3, parameters=1000), cluster_of(2, memory=500_000_000)
    assert "recompute" in used(plan(profile, cluster, 16))
    without = plan(profile, cluster, 16, only=["pieces", "several_stages"])
    assert "recompute" not in used(without)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"only": ["modulo"]}, r"only has 'modulo'; use some of recompute, .*schedule chooses policies"),
        ({"only": 3}, "only is 3; give names of features"),
        ({"only": ["first_k"]}, "only has first_k, which is for plans with chunks: add chunks"),
        ({"only": ["chunks"], "reverse_first_k": 2}, "reverse_first_k is 2, but only doesn't have first_k"),
        ({"only": ["chunks"], "recompute": "boundary"}, "recompute is 'boundary', but only doesn't have recompute"),
    ],
)
def test_a_wrong_choice_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan(profile_of(), cluster_of(2), 8, **options)


def test_the_report_says_what_restrains_the_user() -> None:
    profile, cluster, count = CASES["slow network"]
    chosen = plan(profile, cluster, 16, micro_batches=count)
    assert chosen.carried_updates and chosen.report is not None
    assert chosen.report.restraints == restraints(chosen) != ()
    assert f"to know: {chosen.report.restraints[0]}" in str(chosen).splitlines()
    assert Plan.from_json(chosen.to_json()).report == chosen.report
    plain = plan(profile, cluster, 16, micro_batches=count, only=["pieces"])
    assert plain.report is not None and not plain.report.restraints and "to know" not in str(plain)


def _random_profile(rng: random.Random) -> Profile:
    profile = profile_of(rng.randint(3, 9), parameters=10 ** rng.randint(4, 8), size=10 ** rng.uniform(4, 7))
    layers = [
        dataclasses.replace(
            layer,
            forward=Cost(rng.choice([0.0, 1e-4]), rng.uniform(2e-4, 2e-3)),
            backward=Cost(0.0, rng.uniform(5e-4, 4e-3)),
            backward_weight=Cost(0.0, rng.uniform(2e-4, 4e-4)),
            parameter_bytes=rng.choice([0, layer.parameter_bytes]),
            apply_seconds=rng.choice([0.0, 1e-4]),
        )
        for layer in profile.layers
    ]
    return dataclasses.replace(profile, layers=tuple(layers), step_seconds=rng.choice([0.0, 1e-3]))


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_reported_is_what_is_simulated_whatever_was_asked(seed: int) -> None:
    rng = random.Random(seed)
    profile = _random_profile(rng)
    servers = rng.choice([(2,), (4,), (2, 2), (1, 1, 1), (3, 2)])
    speeds = [rng.choice([1.0, 0.5]) for _ in range(sum(servers))] if rng.random() < 0.3 else ()
    links = {"intra_bandwidth": 1e10, "inter_bandwidth": 10 ** rng.uniform(7, 10)}
    cluster = cluster_of(*servers, speeds=speeds, memory=rng.choice([None, 2**30]), **links)
    only = (
        None if rng.random() < 0.4 else [name for name in ("pieces", "chunks", "several_stages") if rng.random() < 0.5]
    )
    try:
        chosen = plan(
            profile,
            cluster,
            rng.choice([8, 12, 16]),
            schedule=rng.choice([None, DAPPLE_POLICIES, "zb_h1"]),
            all_reduce=rng.choice([None, "hierarchical", "flat"]),
            only=only,
        )
    except PlanError as error:
        assert "more than" in str(error)
        return
    assert chosen.report is not None
    again = Plan.from_json(chosen.to_json())
    for some in (chosen, again):
        result = simulate(some, profile, cluster)
        assert result.latency == chosen.report.latency
        result.check_memory()
    assert used(chosen) <= (set(NAMES) if only is None else set(only))
