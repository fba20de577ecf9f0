"""What each stage recomputes: chosen by its own memory, and kept when stages change."""

from __future__ import annotations

import dataclasses

import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.features import NAMES
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import plan
from dapple_tf.planning.recompute_modes import evened, leanest, modes_by_memory, modes_on, recomputing_by_stage
from dapple_tf.simulation.simulator import simulate

CUTS = ["layer_1", "layer_3", "layer_5"]
SHORT = 4 * 10**6
"""Bytes of a device; a stage of two layers keeps 2 MB of a micro-batch of ten samples."""


def layers(min_cut: float | None = None) -> Profile:
    """Equal layers that keep 100 kB of each sample, and hand on next to nothing."""
    model = profile_of(parameters=1000, size=10, residual=1e5)
    if min_cut is None:
        return model
    leaner = [
        dataclasses.replace(layer, min_cut_residual_bytes=layer.residual_bytes * min_cut) for layer in model.layers
    ]
    return dataclasses.replace(model, layers=tuple(leaner))


def request_for(
    model: Profile, memory: int | None, recompute: str | None = None, only: list[str] | None = None
) -> PlanRequest:
    return PlanRequest.of(model, cluster_of(4, memory=memory), 80, 8, "dapple_a", recompute, only=only)


def straight(recompute: str | tuple[str, ...] = "none") -> Plan:
    return Plan.straight(CUTS, 80, 8, recompute=recompute)


def test_the_leanest_mode_keeps_least() -> None:
    assert leanest(["none", "min_cut"]) == "min_cut"
    assert leanest(["boundary", "none", "min_cut"]) == "boundary"


def test_first_stages_compute_again_what_last_ones_keep() -> None:
    """K falls from 4 to 1, and a micro-batch's residuals are 2 MB."""
    modes = modes_by_memory(straight(), request_for(layers(), SHORT))
    assert modes == ("boundary", "boundary", "boundary", "none")
    modes = modes_by_memory(straight("boundary"), request_for(layers(), 6 * 10**6))
    assert modes == ("boundary", "boundary", "none", "none")


def test_a_min_cut_is_between_the_two() -> None:
    modes = modes_by_memory(straight(), request_for(layers(min_cut=0.6), SHORT))
    assert modes == ("boundary", "min_cut", "min_cut", "none")


def test_where_memory_suffices_or_isnt_known_all_stages_keep_all() -> None:
    assert modes_by_memory(straight("boundary"), request_for(layers(), 10**9)) == "none"
    assert modes_by_memory(straight("boundary"), request_for(layers(), None)) == "none"


def test_stages_that_keep_all_get_more_layers() -> None:
    """B takes twice as long as F, so that recomputing takes a third more."""
    cluster = cluster_of(2)
    request = PlanRequest.of(profile_of(14), cluster, 16, 4, "dapple_a")
    uneven = Plan.straight(["layer_6"], 16, 4, recompute=("boundary", "none"))
    assert evened(uneven, request) == ("layer_5",)
    assert evened(dataclasses.replace(uneven, recompute="none"), request) == ("layer_6",)


def test_layers_without_times_are_cut_somewhere() -> None:
    request = PlanRequest.of(profile_of(4, milliseconds=0.0), cluster_of(2), 16, 4, "dapple_a")
    assert len(evened(Plan.straight(["layer_1"], 16, 4, recompute=("boundary", "none")), request)) == 1


def test_new_stages_take_the_modes_of_those_whose_devices_they_have() -> None:
    before = Plan.manual(["a", "b"], [[0, 1], [2], [3]], 2, 8, recompute=("boundary", "min_cut", "none"))
    assert modes_on(before, [[0, 1], [2, 3]]) == ("boundary", "min_cut")
    assert modes_on(before, [[0], [1], [2], [3]]) == ("boundary", "boundary", "min_cut", "none")
    assert modes_on(before, [[3], [7]]) == ("none", "boundary")  # a device that the plan doesn't have
    assert modes_on(before, [[3], [2], [0, 1]]) == ("boundary", "min_cut", "none")  # as many stages as before
    assert modes_on(dataclasses.replace(before, recompute="min_cut"), [[0], [2]]) == "min_cut"


def test_nothing_is_tried_where_one_mode_is_asked_for() -> None:
    for request in (
        request_for(layers(), SHORT, recompute="boundary"),
        request_for(layers(), SHORT, only=["recompute"]),
    ):
        assert not list(recomputing_by_stage(straight("boundary"), request))


def test_the_planner_lets_stages_differ_where_that_is_faster() -> None:
    """All-reduces would be slow, so that it is a pipeline, whose first stages are short of memory."""
    model = profile_of(parameters=100_000, size=10, residual=1e5)
    cluster = cluster_of(1, 1, 1, 1, memory=6 * 10**6, inter_bandwidth=1e6)
    uniform = [name for name in NAMES if name != "stage_recompute"]
    same, differ = (
        plan(model, cluster, 80, micro_batches=8, schedule="dapple_a", only=only, least_gain=0.0)
        for only in (uniform, None)
    )
    assert isinstance(same.recompute, str)
    assert isinstance(differ.recompute, tuple)
    before, after = simulate(same, model, cluster), simulate(differ, model, cluster)
    assert after.fits
    assert after.latency < 0.97 * before.latency


@pytest.mark.parametrize("seed", range(6))
def test_plans_whose_stages_differ_fit_their_memory(seed: int) -> None:
    memory = (3 + seed) * 10**6
    model, cluster = layers(min_cut=0.5 if seed % 2 else None), cluster_of(4, memory=memory)
    best = plan(model, cluster, 80, schedule="auto" if seed % 3 else "dapple_a")
    assert simulate(best, model, cluster).fits
