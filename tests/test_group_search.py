"""Plans whose stages place their operators on groups of devices: their costs, and the search for them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hardware import profile_of

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.group_costs import GroupCosts, GroupCostsError, PlacedRange
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.group_search import LEAST_GROUP_GAIN
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import find, plan
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import simulate
from graph_passes.ir.tasks import Phase, Task


def cluster_of(*servers: int, memory: int | None = None, inside: float = 1e10) -> Cluster:
    """A description of GPUs: how many each server has, their bytes, and bytes/s inside a server."""
    limit = "" if memory is None else f', "memory_bytes": {memory}'
    described = ", ".join(f'{{"devices": {count}{limit}}}' for count in servers)
    return Cluster.from_json(
        f'{{"format": "dapple_tf.cluster/1", "servers": [{described}], "intra_bandwidth": {inside}, '
        f'"intra_latency": 0.0, "inter_bandwidth": 1e9, "inter_latency": 0.0}}'
    )


def placed(first: int, stop: int, devices: int, gain: float, samples: int = 4) -> PlacedRange:
    """Layers whose tasks take 1 / gain on a group, whose devices keep equal parts, the first of them all residuals."""
    part = tuple([8.0 / devices] * devices)
    residual = (6.0, *[1.0] * (devices - 1))
    return PlacedRange(first, stop, samples, 1 / gain, 2 / gain, 3 / devices, 6 / gain, part, residual, part)


def groups_of(gains: list[float], devices: int = 2) -> GroupCosts:
    """Pieces of a layer each, with their gains on a group."""
    ranges = [placed(i, i + 1, *each) for i, gain in enumerate(gains) for each in ((1, 1.0), (devices, gain))]
    return GroupCosts(tuple(range(1, len(gains) + 1)), tuple(ranges))


def profile_with(gains: list[float], devices: int = 2, **options: float) -> Profile:
    profile = profile_of(len(gains), **options)
    return dataclasses.replace(profile, groups=groups_of(gains, devices))


def test_a_placed_stage_takes_what_its_layers_do_on_a_group() -> None:
    profile = profile_with([2.0, 1.0, 4.0], parameters=1000, residual=100.0, size=10.0)
    cluster = cluster_of(4, memory=10**9, inside=1e9)
    whole = CostModel(Plan.manual(["layer_1"], [[0], [2]], 2, 8), profile, cluster)
    chosen = Plan.manual(["layer_1"], [[0], [2]], 2, 8, operator_devices=(((0, 1),), ((2, 3),)))
    costs = CostModel(chosen, profile, cluster)
    start = profile.task_seconds
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for stage, ratio in enumerate((0.75, 0.25)):  # the mean of 1 / 2 and 1, and 1 / 4
            task = Task(stage, phase, 0, 0)
            assert costs.seconds(task) - start == pytest.approx(ratio * (whole.seconds(task) - start))
    assert costs.devices == (0, 1, 2, 3)
    stored, before = costs.stored_bytes, whole.stored_bytes
    assert stored[0] == stored[1] == before[0] / 2 and stored[2] + stored[3] == before[2]
    step, alone = simulate(chosen, profile, cluster), simulate(whole.plan, profile, cluster)
    assert step.latency < alone.latency
    assert step.busy[0] == step.busy[1] and {span.device for span in step.drawn().spans} >= {0, 1, 2, 3}
    rise = {device: step.peak_bytes[device] - stored[device] for device in range(4)}
    assert rise[0] == pytest.approx(alone.peak_bytes[0] - before[0]) and rise[1] < rise[0]
    # A range that was searched as a whole takes what that says.
    assert profile.groups is not None
    exact = (placed(0, 2, 1, 1.0), placed(0, 2, 2, 8.0))
    known = dataclasses.replace(profile, groups=GroupCosts(profile.groups.ends, (*profile.groups.ranges, *exact)))
    task = Task(0, Phase.FORWARD, 0, 0)
    searched = CostModel(chosen, known, cluster).seconds(task) - start
    assert searched == pytest.approx((whole.seconds(task) - start) / 8)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_what_is_sent_once_in_a_step_has_seconds_and_bytes_of_its_own(micro_batches: int) -> None:
    """The seconds counted as a ratio of the update's, which other estimates have, and the bytes weren't counted."""
    profile = profile_with([2.0, 2.0], parameters=1000)
    assert profile.groups is not None
    ranges = [
        entry if entry.devices == 1 else dataclasses.replace(entry, sent=0.5, copies=(0.0, 3.0))
        for entry in profile.groups.ranges
    ]
    sending = dataclasses.replace(profile, groups=GroupCosts(profile.groups.ends, tuple(ranges)))
    cluster, batch = cluster_of(2), 4 * micro_batches
    chosen = Plan.manual([], [[0]], micro_batches, batch, operator_devices=(((0, 1),),))
    before, now = simulate(chosen, profile, cluster), simulate(chosen, sending, cluster)
    whole = Plan.manual([], [[0]], micro_batches, batch)
    computed = sum(layer.forward.at(4) + layer.backward.at(4) for layer in profile.layers)
    assert now.latency - before.latency == pytest.approx(0.5 / 3.0 * computed)
    stored = CostModel(whole, profile, cluster).stored_bytes[0]
    kept, held = CostModel(chosen, profile, cluster).stored_bytes, CostModel(chosen, sending, cluster).stored_bytes
    assert held[0] == kept[0] and held[1] == pytest.approx(kept[1] + 3.0 / 8.0 * stored)
    assert now.peak_bytes[1] - before.peak_bytes[1] == pytest.approx(held[1] - kept[1])


def test_replicas_reduce_what_each_place_keeps() -> None:
    profile = profile_with([2.0, 2.0], parameters=1000)
    chosen = Plan.data_parallel(4, 8).with_placed_operators(2)
    costs = CostModel(chosen, profile, cluster_of(4, inside=1e9))
    assert [(item.devices, item.bytes) for item in costs.reductions] == [((0, 2), 1000.0), ((1, 3), 1000.0)]
    simulation = simulate(chosen, profile, cluster_of(4, inside=1e9))
    starts = {span.start for span in simulation.spans if span.kind == "all_reduce"}
    assert len(starts) == 1, "places reduce over links of their own"


def test_without_costs_on_groups_nothing_changes() -> None:
    profile, cluster = profile_of(3, parameters=1000), cluster_of(4, inside=1e9)
    chosen = Plan.manual(["layer_1"], [[0, 1], [2, 3]], 2, 8).with_placed_operators()
    first = dataclasses.replace(chosen, operator_devices=None)
    one, other = (CostModel(each, profile, cluster) for each in (chosen, first))
    assert one.task_seconds == other.task_seconds and one.devices == other.devices
    assert simulate(chosen, profile, cluster).latency == simulate(first, profile, cluster).latency


def test_ratios_change_in_proportion_between_searched_slices() -> None:
    ranges = [placed(0, 1, *each) for each in ((1, 1.0, 4), (2, 1.0, 4), (1, 1.0, 8), (2, 2.0, 8))]
    groups = GroupCosts((1,), tuple(ranges))
    assert [groups.relative(0, 1, 2, samples).forward for samples in (2, 4, 6, 8, 20)] == [1.0, 1.0, 0.75, 0.5, 0.5]
    residual = groups.relative(0, 1, 2, 6).residual
    assert residual == (1.0, 1.0 / 6.0)


def test_costs_on_groups_are_kept_in_profiles_files() -> None:
    profile = profile_with([2.0, 1.0])
    assert Profile.from_json(profile.to_json()) == profile
    assert '"groups"' not in dataclasses.replace(profile, groups=None).to_json()
    with pytest.raises(ProfileError, match="are of 2 layers, the profile has 3"):
        dataclasses.replace(profile_of(3), groups=profile.groups)
    assert profile.groups is not None
    with pytest.raises(GroupCostsError, match="layers 1 to 2 is missing for 1 devices"):
        GroupCosts((1, 2), profile.groups.ranges[:2])
    with pytest.raises(GroupCostsError, match="on 2 devices and not on one"):
        GroupCosts((1,), (placed(0, 1, 2, 1.0),))
    wrong = profile.to_json().replace('"ends": [1, 2]', '"ends": [2, 1]')
    with pytest.raises(ProfileError, match="the pieces end at layers"):
        Profile.from_json(wrong)


def test_the_planner_gives_groups_to_the_stages_that_gain_from_them() -> None:
    """A batch of 4 in the middle of which a layer takes as long as all others, and gains all from a group of four."""
    profile = profile_with([1.0, 1.0, 3.9, 1.0, 1.0], devices=4, parameters=10**8)
    layers = list(profile.layers)
    layers[2] = dataclasses.replace(layers[2], forward=layers[2].forward * 8, backward=layers[2].backward * 8)
    profile = dataclasses.replace(profile, layers=tuple(layers))
    cluster = cluster_of(6)
    alone = plan(dataclasses.replace(profile, groups=None), cluster, 4)
    chosen = plan(profile, cluster, 4)
    assert chosen.operator_devices is not None and chosen.report is not None and alone.report is not None
    (stage,) = chosen.spread_stages
    bounds = [0, *map(profile.position_after, chosen.cuts), len(profile.layers)]
    assert bounds[stage] <= 2 < bounds[stage + 1]
    assert (
        chosen.report.latency
        < (1 - LEAST_GROUP_GAIN) * alone.report.latency
        == ((1 - LEAST_GROUP_GAIN) * (chosen.report.runner_up or 0.0))
    )
    assert simulate(chosen, profile, cluster).latency == chosen.report.latency
    assert Plan.from_json(chosen.to_json()) == chosen
    assert plan(profile, cluster, 4, only=["pieces"]).operator_devices is None


def test_a_plan_that_gains_too_little_stays_what_it_was() -> None:
    cluster = cluster_of(4)
    profile = profile_with([1.0] * 4)
    plain = plan(dataclasses.replace(profile, groups=None), cluster, 16)
    chosen = plan(profile, cluster, 16)
    assert chosen == plain and chosen.report == plain.report


def test_ranges_of_the_best_plan_are_searched_as_a_whole() -> None:
    """What pieces promise isn't kept by the whole: the plan is found again, until nothing is taken for granted."""
    profile = profile_with([4.0] * 4, devices=4, parameters=10**8)
    cluster = cluster_of(4)
    asked: list[tuple[int, int]] = []

    def exact(known: Profile, best: Plan) -> Profile | None:
        assert known.groups is not None
        bounds = [0, *map(known.position_after, best.cuts), len(known.layers)]
        stages = enumerate(itertools.pairwise(bounds))
        ranges = [own for stage, own in stages if stage in best.spread_stages and not known.groups.knows(*own, 4)]
        asked.extend(ranges)
        if not ranges:
            return None
        found = [placed(*own, *each) for own in ranges for each in ((1, 1.0), (4, 1.0))]
        return dataclasses.replace(known, groups=GroupCosts(known.groups.ends, (*known.groups.ranges, *found)))

    request = PlanRequest.of(profile, cluster, 4)
    promised = find(request)
    assert promised.spread_stages
    kept = find(request, exact)
    assert asked and len(asked) == len({*asked})
    assert kept.report is not None and promised.report is not None
    assert kept.report.latency > promised.report.latency


def test_the_fastest_plan_that_was_searched_as_a_whole_is_taken() -> None:
    """After the last round its own plan was taken, even where an earlier one had turned out to be faster."""
    profile = profile_with([4.0] * 8, parameters=10**8)
    cluster = cluster_of(4)
    gains = iter([3.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5])
    seen: list[float] = []

    def exact(known: Profile, best: Plan) -> Profile | None:
        assert known.groups is not None
        bounds = [0, *map(known.position_after, best.cuts), len(known.layers)]
        stages = enumerate(itertools.pairwise(bounds))
        ranges = [own for stage, own in stages if stage in best.spread_stages and not known.groups.knows(*own, 2)]
        if not ranges:
            return None
        gain = next(gains)
        as_wholes = [placed(*own, *each) for own in ranges for each in ((1, 1.0), (2, gain))]
        searched = dataclasses.replace(known, groups=GroupCosts(known.groups.ends, (*known.groups.ranges, *as_wholes)))
        seen.append(simulate(best, searched, cluster).latency)
        return searched

    chosen = find(PlanRequest.of(profile, cluster, 4), exact)
    assert len(seen) > 1 and max(seen[1:]) > seen[0]
    assert chosen.report is not None and chosen.report.latency <= min(seen) * (1 + 1e-9)


def test_memory_of_groups_makes_room() -> None:
    """Layers too large for a device fit a group, whose devices share the variables; the schedule holds what they do."""
    profile = profile_with([1.5, 1.5], devices=2, parameters=10**9)
    cluster = cluster_of(4, memory=3 * 10**9)
    chosen = plan(profile, cluster, 4)
    assert chosen.spread_stages == frozenset(range(chosen.num_stages))
    simulation = simulate(chosen, profile, cluster)
    assert simulation.fits and np.isfinite(simulation.latency)


@pytest.mark.parametrize("options", [{"optimizer_shards": True}, {"row_shards": True}, {"recompute": "offload"}])
def test_options_that_placed_operators_lack_leave_groups_out(options: dict[str, Any]) -> None:
    """The planner made plans with groups and such options, which ended in an error that named what nobody had given."""
    profile = profile_with([3.9, 3.9, 3.9], devices=4, parameters=10**9)
    cluster = cluster_of(4, memory=10**12)
    assert plan(profile, cluster, 4).spread_stages
    assert not plan(profile, cluster, 4, **options).spread_stages
