"""A plan across all levels, found for a model with very wide layers: faster than each level alone, and it trains."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_training, pair, use_float64
from hardware import profile_of

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.plan import COMBINED, Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.measuring import measured_steps
from dapple_tf.measuring.group_profiler import GroupProfiler, piece_ends
from dapple_tf.operators.flops import MATMUL
from dapple_tf.operators.rooflines import Roofline
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import find
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tools.evaluation.combined import estimated_profile

layers = keras.layers
BATCH = 2
SLOW = Roofline(flops=1e9, bandwidth=1e9, launch=0.0, compute={MATMUL: 1e-3})
"""Devices on which even small products take long, and all else next to nothing."""


def wide() -> keras.Model:
    """A chain with two very wide parts, each of which is much for one device and has no parallel branches."""
    x = inputs = keras.Input((16,))
    for part in range(2):
        x = layers.Dense(256, activation="tanh", name=f"wide_{part}")(x)
        x = layers.Dense(16, activation="tanh", name=f"narrow_{part}")(x)
    model = keras.Model(inputs, layers.Dense(2, name="last")(x), name="wide")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def machines() -> dapple.Cluster:
    """Two machines of two devices, which is what a plan for small batches has to divide."""
    return dapple.Cluster.from_json(
        '{"format": "dapple_tf.cluster/1", "servers": [{"devices": 2}, {"devices": 2}], "intra_bandwidth": 1e9, '
        '"intra_latency": 1e-6, "inter_bandwidth": 1e6, "inter_latency": 1e-3}'
    )


def profiled(model: keras.Model) -> tuple[Profile, GroupProfiler]:
    costs, described = dapple.OperatorCosts({"GPU": SLOW, "CPU": SLOW}), machines()
    profile = estimated_profile(model, (1, BATCH), described.device_names[0], costs)
    return profile, GroupProfiler(model, profile, described, costs, (1, BATCH))


def test_the_combined_plan_beats_each_level_alone_and_trains_as_keras_does() -> None:
    use_float64()
    model, plain = pair(wide)
    profile, profiler = profiled(model)
    described = machines()
    combined = find(PlanRequest.of(profiler.pieces(), described, BATCH), profiler.searched)
    alone = dapple.plan(profile, described, BATCH)
    parallel = simulate(Plan.data_parallel(2, BATCH), profile, described)  # on as many devices as there are samples
    assert combined.report is not None and alone.report is not None
    assert combined.spread_stages and combined.num_stages > 1
    operators = profiler.whole_seconds(described, BATCH)
    for other in (alone.report.latency, parallel.latency, operators):
        assert combined.report.latency < 0.95 * other
    # The plan's ranges were searched as a whole, and the simulator says of it what the planner said.
    known = profiler.searched(profiler.pieces(), combined)
    assert known is not None and profiler.searched(known, combined) is None
    assert simulate(combined, known, described).latency == pytest.approx(combined.report.latency)
    assert dapple.Profile.from_json(known.to_json()) == known

    devices = dataclasses.replace(dapple.Cluster.local(4, kind="cpu"), intra_bandwidth=1e9, intra_latency=1e-6)
    pipelined = dapple.transform(model, devices, combined, operator_costs=profiler.costs)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(BATCH, 16)), rng.normal(size=(BATCH, 2))
    assert_same_training(pipelined, plain, [(x, y, None)] * 3)
    used = {device for placement in pipelined.placement.values() for device in placement.devices.values()}
    assert used == {0, 1}, "an operator in each place of a group"
    pipelined.close()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a path": ({"profile": "profile.json"}, TypeError, "profile is 'profile.json'; give a dapple_tf.Profile, by"),
    "a cluster as costs": ({"costs": machines()}, TypeError, "costs is Cluster; give dapple_tf.OperatorCosts, by"),
    "a dict": ({"costs": {}}, TypeError, r"costs is \{\}; give dapple_tf.OperatorCosts"),
    "a number of devices": ({"cluster": 2}, TypeError, "cluster is 2; give a dapple_tf.Cluster"),
    "half a sample": ({"samples": 1.5}, ProfileError, "samples is 1.5; give a whole number of at least 1, or several"),
    "an array without axes": ({"samples": np.array(2.0)}, ProfileError, r"samples is array\(2\.\)"),
    "a text": ({"samples": "16"}, ProfileError, "samples is '16'"),
    "bytes": ({"samples": b"\x10"}, ProfileError, r"samples is b'\\x10'"),
    "a tensor without axes": ({"samples": tf.constant(2.0)}, ProfileError, "samples is <tf.Tensor"),
    "a yes": ({"samples": True}, ProfileError, "samples is True"),
    "one size": ({"sizes": 2}, ProfileError, "sizes is 2; give numbers of devices of groups, each at least 2"),
    "an array of halves": ({"sizes": np.array([2.0, 4.0])}, ProfileError, r"sizes is array\(\[2\., 4\.\]\)"),
    "no piece": ({"pieces": 0}, ProfileError, "pieces is 0; give a whole number of at least 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_of_profile_groups_are_one_clear_error_before_anything_is_captured(case: str) -> None:
    given, error, text = WRONG[case]
    arguments = {"profile": profile_of(2), "cluster": machines(), "costs": dapple.OperatorCosts.p100(), "samples": 2}
    with pytest.raises(error, match=text):
        dapple.profile_groups(None, **{**arguments, **given})


def test_transform_searches_groups_where_it_is_told_what_operators_take(caplog: pytest.LogCaptureFixture) -> None:
    model = wide()
    profile, profiler = profiled(model)
    devices = dataclasses.replace(dapple.Cluster.local(2, kind="cpu"), intra_bandwidth=1e9, intra_latency=1e-6)
    whole = dapple.transform(model, devices, global_batch_size=1, profile=profile)
    assert whole.plan.operator_devices is None
    with caplog.at_level(logging.INFO, logger="dapple_tf"):
        together = dapple.transform(model, devices, global_batch_size=1, profile=profile, operator_costs=profiler.costs)
    assert together.plan.operator_devices == (((0, 1),),)
    assert "placing operators has to gain 5%, and is taken" in caplog.text
    assert together.prediction is not None
    for pipelined in (whole, together):
        pipelined.close()


@pytest.mark.thorough
@pytest.mark.parametrize("fastest", ["stages on groups", "all operators"])
def test_plans_of_all_levels_are_tried_and_what_really_is_the_fastest_trains_as_keras_does(
    fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between hosts of CPU workers two stages on groups were faster than a group alone, which predictions preferred."""
    use_float64()
    model, plain = pair(wide)
    profile, profiler = profiled(model)
    devices = tuple(
        dataclasses.replace(d, server=n // 2) for n, d in enumerate(dapple.Cluster.local(4, kind="cpu").devices)
    )
    links = {"intra_bandwidth": 1e9, "intra_latency": 1e-6, "inter_bandwidth": 1e8, "inter_latency": 1e-5}
    cluster = dataclasses.replace(dapple.Cluster.local(4, kind="cpu"), devices=devices, **links)
    everywhere = Plan.by_operators(4, BATCH)
    tried: list[Plan] = []
    really = measured_steps.measure_steps

    def wins(plan: Plan) -> bool:
        if fastest == "all operators":
            return plan == everywhere
        return bool(plan.spread_stages) and plan.num_stages > 1

    def measured(model: Any, cluster: Any, plans: Any, example: Any, **options: Any) -> tuple[float, ...]:
        tried.extend(plans)
        assert min(really(model, cluster, plans, example, **options, rounds=1)) > 0
        return tuple(0.1 if wins(plan) else 1.0 for plan in plans)

    monkeypatch.setattr(measured_steps, "measure_steps", measured)
    pipelined = dapple.transform(
        model, cluster, global_batch_size=BATCH, profile=profile, operator_costs=profiler.costs, by_trial=True
    )
    assert everywhere in tried and any(plan.operator_devices is None for plan in tried)
    assert wins(pipelined.plan)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [(rng.normal(size=(BATCH, 16)), rng.normal(size=(BATCH, 2)), None)] * 3)
    assert len({device for own in pipelined.placement.values() for device in own.devices.values()}) > 1
    pipelined.close()


def test_operators_are_measured_before_a_profile_with_groups_has_plans_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans were tried with operators placed by estimates, and then measured, so that another placement trained."""
    model = wide()
    profiler = profiled(model)[1]
    devices = dataclasses.replace(dapple.Cluster.local(2, kind="cpu"), intra_bandwidth=1e9, intra_latency=1e-6)
    measured, known = [], []

    def measuring(*_: Any, **__: Any) -> dapple.OperatorCosts:
        measured.append(profiler.costs)
        return profiler.costs

    def timed(model: Any, cluster: Any, plans: Any, example: Any, *, operator_costs: Any, **_: Any) -> list[float]:
        known.append(operator_costs)
        return [1.0 if plan.operator_devices is None else 0.5 for plan in plans]

    monkeypatch.setattr("dapple_tf.automatic.profile_operators", measuring)
    monkeypatch.setattr("dapple_tf.measuring.operator_profiler.profile_operators", None)
    monkeypatch.setattr(measured_steps, "measure_steps", timed)
    pipelined = dapple.transform(
        model, devices, global_batch_size=BATCH, profile=profiler.pieces(), by_trial=True, schedule="gpipe"
    )
    assert pipelined.plan.operator_devices == (((0, 1),),) and pipelined.plan.schedule == "gpipe"
    assert len(measured) == 1 and known and all(costs is profiler.costs for costs in known)
    pipelined.close()


def small_devices(kilobytes: int) -> dapple.Cluster:
    local = dapple.Cluster.local(2, kind="cpu", memory_bytes=1000 * kilobytes)
    return dataclasses.replace(local, intra_bandwidth=1e9, intra_latency=1e-6)


def test_plans_are_tried_where_a_step_to_measure_operators_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """It ended `transform`, though two stages fit."""
    model = wide()
    with caplog.at_level(logging.INFO, logger="dapple_tf"):
        pipelined = dapple.transform(
            model, small_devices(120), global_batch_size=BATCH, profile=profiled(model)[0], placement=COMBINED,
            by_trial=True,
        )  # fmt: skip
    assert "times of operators are estimated, as a step to measure them doesn't fit: no placement of" in caplog.text
    assert pipelined.plan.devices == ((0,), (1,)) and pipelined.plan.operator_devices is None
    pipelined.close()


@pytest.mark.parametrize("known", [True, False])
def test_where_nothing_fits_trials_tell_it_as_the_planner_does(known: bool) -> None:
    model = wide()
    costs = dapple.OperatorCosts() if known else None
    with pytest.raises(dapple.PlanError, match="no plan fits the memory of 2 devices: the one that comes nearest"):
        dapple.transform(
            model, small_devices(20), global_batch_size=BATCH, profile=profiled(model)[0], placement=COMBINED,
            operator_costs=costs, by_trial=True,
        )  # fmt: skip


def test_statistics_of_gradients_have_a_place_in_the_queue() -> None:
    """What waits for a task's entry came before it in the queue where the entry waits for much else."""
    model = wide()
    ranges = []
    for metrics in ([], ["mae"]):
        model.compile(keras.optimizers.Adam(global_clipnorm=1.0), "mse", metrics=metrics)
        groups = profiled(model)[1].pieces().groups
        assert groups is not None
        ranges.append(groups.ranges)
    last = max(places.stop for places in ranges[0])
    for without, measured in zip(*ranges, strict=True):
        if measured.stop == last:  # The layer with the metrics, which may be placed otherwise because of them.
            assert measured.whole == pytest.approx(without.whole, rel=0.05)
        else:
            assert measured == without
        assert measured.forward > 0 and measured.backward > 0 and measured.apply > 0


def test_other_times_of_operators_are_searched_anew() -> None:
    """What had been searched by estimates was taken for what measured times give."""
    _, profiler = profiled(wide())
    estimated = profiler.pieces().groups
    fast = dataclasses.replace(SLOW, flops=2e9)
    measured = profiler.with_costs(dapple.OperatorCosts({"GPU": fast, "CPU": fast})).pieces().groups
    assert estimated is not None and measured is not None
    for before, after in zip(estimated.ranges, measured.ranges, strict=True):
        assert after.forward < 0.6 * before.forward
    assert profiler.pieces().groups == estimated


def test_parallel_branches_of_a_stage_are_spread() -> None:
    """Entries and exits of tasks had tied all variables of a stage together, in steps of several tasks."""
    x = inputs = keras.Input((16,))
    x = layers.Dense(16, activation="tanh", name="enter")(x)
    branches = [layers.Dense(256, activation="tanh", name=f"branch_{number}")(x) for number in range(2)]
    model = keras.Model(inputs, layers.Dense(2, name="last")(layers.Add(name="join")(branches)), name="branches")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    profile, profiler = profiled(model)
    # Branches stay together: pieces end where one tensor crosses.
    ends = piece_ends(profile, 8)
    names = [profile.layers[end - 1].name for end in ends]
    assert "enter" in names and not any(name.startswith("branch") for name in names)
    groups = profiler.pieces().groups
    assert groups is not None
    piece = groups.piece_of(profile.index["branch_0"])
    relative = groups.relative(*piece, 2, BATCH)
    assert relative.forward < 0.6 and relative.backward < 0.6 and min(relative.stored) > 0.4
