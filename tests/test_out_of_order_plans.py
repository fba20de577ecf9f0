"""Out-of-order plans: what the planner derives, chooses and says."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import hardware
import keras
import numpy as np
import pytest
from equivalence import assert_same_training, pair
from hardware import cluster_of
from profiled import mlp

import dapple_tf as dapple
from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
from dapple_tf.planning.out_of_order_plans import (
    even_plans,
    largest_reverse_first_k,
    least_seconds,
    more_stages,
    name,
    stages_per_device,
    with_chunks,
)
from dapple_tf.planning.plan_reasons import shape
from dapple_tf.planning.plan_request import DAPPLE_POLICIES, PlanRequest
from dapple_tf.planning.planner import plan
from dapple_tf.schedules.out_of_order import MODULO
from dapple_tf.schedules.zero_bubble import ZB_V
from dapple_tf.simulation.simulator import simulate

profile_of = functools.partial(hardware.profile_of, parameters=10**8)


FOUR = cluster_of(1, 1, 1, 1, inter_bandwidth=1e10)


def request_of(profile: Profile, cluster: Cluster, batch: int = 8) -> PlanRequest:
    return PlanRequest.of(profile, cluster, batch, micro_batches=4, schedule="auto")


def delaying(keeps: float) -> Profile:
    """Six layers that keep as many bytes per sample from Bx to Bw."""
    profile = hardware.profile_of(6, parameters=10**6, residual=1e6)
    layers = (dataclasses.replace(layer, delayed_bytes=Cost(0.0, keeps)) for layer in profile.layers)
    return dataclasses.replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("schedule", ["gpipe", "dapple_a"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_memory_bounds_k_as_algorithm_2_has_it(schedule: str, micro_batches: int) -> None:
    """The largest k whose simulated step fits; all do where memory isn't known."""
    profile = delaying(4e6)
    chunks = Plan.manual([f"layer_{index}" for index in range(5)], [[0, 1]] * 6, micro_batches, 12, schedule)
    assert largest_reverse_first_k(chunks, profile, cluster_of(1, 1)) == 6

    def fits(k: int, cluster: Cluster) -> bool:
        try:
            return simulate(dataclasses.replace(chunks, reverse_first_k=k), profile, cluster).fits
        except PlanError:
            return False

    bounds = set()
    for limit in range(20, 160, 10):
        cluster = cluster_of(1, 1, memory=limit * 10**6)
        largest = max((k for k in range(7) if fits(k, cluster)), default=0)
        assert largest_reverse_first_k(chunks, profile, cluster) == largest
        bounds.add(largest)
    assert len(bounds) >= 3


# ---- candidates


def test_several_stages_on_a_device_share_out_the_work_by_devices() -> None:
    base = Plan.straight(["layer_2", "layer_5", "layer_8"], 8, 4)
    request = request_of(profile_of(12), FOUR)
    assert [(policy.name, count) for policy, count in stages_per_device(base, request)] == [
        *(("modulo", 2), ("zb_v", 2), ("interleaved", 2)),
        *(("modulo", 3), ("interleaved", 3)),
    ]
    (modulo,) = more_stages(base, request, MODULO, 2)
    assert modulo.devices == ((0,), (1,), (2,), (3,)) * 2
    layers = np.diff([0, *(int(cut.partition("_")[2]) + 1 for cut in modulo.cuts), 12])
    assert [int(layers[device] + layers[device + 4]) for device in range(4)] == [3] * 4
    (there_and_back,) = more_stages(base, request, ZB_V, 2)
    assert there_and_back.devices == ((0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,))


def test_times_by_which_tasks_are_ordered_are_short_numbers() -> None:
    profile = profile_of(6)
    layers = [
        dataclasses.replace(layer, forward=Cost(0.0, 1e-3 * (index + 1) / 7))
        for index, layer in enumerate(profile.layers)
    ]
    request = request_of(dataclasses.replace(profile, layers=tuple(layers)), FOUR)
    (candidate,) = more_stages(Plan.straight(["layer_2"], 8, 4), request, MODULO, 2)
    assert candidate.task_seconds is not None
    numbers = [number for times in candidate.task_seconds for number in times]
    assert max(numbers) == 1
    assert all(number == float(f"{number:.3g}") for number in numbers)
    # The first stage has no Bx: its Bw is the whole backward.
    assert candidate.task_seconds[0][1] == 0
    whole = request.costs(candidate).task_seconds
    assert numbers == pytest.approx([number / max(map(max, whole)) for times in whole for number in times], rel=5e-3)


def test_chunks_are_for_replicated_stages_on_devices_of_their_own() -> None:
    request = request_of(profile_of(), cluster_of(4))
    assert [*with_chunks(Plan.straight(["layer_3"], 8, 4), request, 4)] == []
    interleaved = Plan.manual(["layer_3", "layer_5"], [[0, 1], [2, 3], [0, 1]], 4, 8, "modulo")
    assert [*with_chunks(interleaved, request, 4)] == []
    assert [candidate.num_stages for candidate in with_chunks(Plan.data_parallel(4, 16), request, 4)] == [4]


def test_even_plans_are_on_all_devices_and_fit_in_memory() -> None:
    profile = profile_of(parameters=10**6)
    roomy = [candidate.replicas for candidate in even_plans(request_of(profile, FOUR, 16), "none")]
    assert roomy == [(4,), (2, 2), (1, 1, 1, 1)]
    tight = cluster_of(1, 1, 1, 1, memory=9_000_000)  # 16 MB for all layers, 2 layers to a device with gradients: 4 MB
    assert [candidate.replicas for candidate in even_plans(request_of(profile, tight, 16), "none")] == [(1, 1, 1, 1)]


def test_no_order_beats_the_bound() -> None:
    profile = profile_of(size=1e7)
    request = request_of(profile, FOUR)
    for base in even_plans(request, "none"):
        for policy in ("gpipe", "dapple_b", "zb_h2", "modulo"):
            costs = request.costs(dataclasses.replace(base, schedule=policy))
            assert least_seconds(costs) <= simulate(costs.plan, profile, FOUR).latency


def test_a_plan_is_named_by_what_is_out_of_order() -> None:
    assert name(Plan.straight(["a"], 8, 4)) == ""
    assert name(Plan.straight(["a"], 8, 4, "zb_h2")) == "zb_h2"
    assert name(Plan.manual(["a", "b"], [[0], [1], [0]], 4, 8, "modulo")) == "modulo, 2 stages on each device"
    chunks = Plan.manual(["a", "b"], [[0, 1]] * 3, 1, 8, reverse_first_k=2, carried_updates=1)
    assert name(chunks) == (
        "wait-free reduction of chunks (stages 0-2), reverse first-k with k = 2, "
        "1 updates during the next step's forward"
    )


# ---- choices


@pytest.mark.slow
def test_few_micro_batches_on_equal_stages_gain_much() -> None:
    profile = profile_of()
    before, auto = (plan(profile, FOUR, 8, micro_batches=4, schedule=name) for name in (DAPPLE_POLICIES, None))
    assert before.report is not None and auto.report is not None
    assert before.schedule in DAPPLE_POLICIES
    assert before.report.dapple is None
    assert auto.schedule not in DAPPLE_POLICIES
    assert auto.report.latency < before.report.latency / 1.3
    assert auto.report.dapple == before.report.latency
    assert simulate(auto, profile, FOUR).latency == pytest.approx(auto.report.latency)
    last = str(auto).splitlines()[-1]
    factor = before.report.latency / auto.report.latency
    assert last.startswith(f"out-of-order backprop: {auto.schedule}")
    assert f"{factor:.3g}x as fast as {before.schedule} on {shape(before)}" in last


@pytest.mark.parametrize("parameters", [5 * 10**5, 6 * 10**5])
def test_a_given_k_is_kept_where_a_plan_in_pieces_would_be_faster(parameters: int) -> None:
    """A plan of DAPPLE's without k was returned, since its backward in pieces counted as another plan."""
    profile = dataclasses.replace(profile_of(parameters=parameters, size=1e7), task_seconds=3e-3)
    cluster = cluster_of(1, 1, 1, 1, inter_bandwidth=5e8)
    assert plan(profile, cluster, 16, micro_batches=1).backward_cuts
    assert plan(profile, cluster, 16, micro_batches=1, reverse_first_k=2).reverse_first_k > 0


def test_data_parallelism_on_a_slow_network_hides_reductions() -> None:
    profile, cluster = profile_of(parameters=10**6, size=1e7), cluster_of(1, 1, 1, 1, inter_bandwidth=5e8)
    whole = simulate(Plan.data_parallel(4, 16), profile, cluster)
    pieces = plan(profile, cluster, 16, micro_batches=1, schedule=DAPPLE_POLICIES)
    chunks = plan(profile, cluster, 16, micro_batches=1)
    assert pieces.report is not None and chunks.report is not None
    assert pieces.devices == ((0, 1, 2, 3),)
    assert pieces.backward_cuts
    assert "last backwards in pieces, cut after layer_" in str(pieces)
    assert pieces.report.latency < whole.latency * 0.95
    # Chunks let updates wait for the next step's forward, too.
    assert set(chunks.devices) == {(0, 1, 2, 3)}
    assert "wait-free reduction of chunks" in str(chunks)
    assert chunks.report.latency < pieces.report.latency == chunks.report.dapple
    assert chunks.carried_updates > 0
    (restraint,) = chunks.report.restraints
    assert f"to know: {restraint}" in str(chunks).splitlines() and "callback" in restraint
    assert f"reverse first-k with k = {chunks.reverse_first_k}" in str(chunks)


@pytest.mark.slow
def test_light_parameters_gain_nothing_and_it_says_so() -> None:
    auto = plan(profile_of(parameters=100), cluster_of(4, intra_bandwidth=1e11), 32, schedule="auto")
    assert (auto.schedule, auto.num_stages) == ("dapple_a", 1)
    assert str(auto).splitlines()[-1] == "out-of-order backprop: gains nothing over DAPPLE's schedule"


CASES: dict[str, tuple[Profile, Cluster]] = {
    "straight": (profile_of(), FOUR),
    "slow": (profile_of(parameters=10**6, size=1e6), cluster_of(2, 2, intra_bandwidth=1e10, inter_bandwidth=1e8)),
    "tight": (profile_of(parameters=10**6, residual=1e6), cluster_of(2, 2, memory=17_000_000, inter_bandwidth=1e9)),
    "uneven": (profile_of(5, parameters=10**7), cluster_of(2, 1, intra_bandwidth=1e10, inter_bandwidth=1e9)),
    "unlike": (
        profile_of(6, parameters=10**8),
        Cluster((Device("a", 0), Device("b", 1, speed=0.5)), real=False, inter_bandwidth=1e9),
    ),
    "tied": (
        dataclasses.replace(profile_of(6, parameters=10**7), shared=(SharedParameters((0, 5), 10**6),)),
        cluster_of(2, 2, intra_bandwidth=1e10, inter_bandwidth=1e9),
    ),
}


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_auto_is_never_slower_and_fits_in_memory(case: str) -> None:
    profile, cluster = CASES[case]
    before = plan(profile, cluster, 8, schedule=DAPPLE_POLICIES)
    auto = plan(profile, cluster, 8)
    assert before.report is not None and auto.report is not None
    assert auto.report.latency <= before.report.latency
    result = simulate(auto, profile, cluster)
    assert result.latency == auto.report.latency
    for device, peak in result.peak_bytes.items():
        limit = cluster.devices[device].memory_bytes
        assert limit is None or peak <= limit
    assert sum(stage.share for stage in auto.report.stages) == pytest.approx(1)


@pytest.mark.few(2)
@pytest.mark.parametrize("policies", ["zb_h1", "interleaved", ["modulo", "zb_v"], ["dapple_a", "fast_forward"]])
def test_policies_can_be_given(policies: Any) -> None:
    chosen = plan(profile_of(), FOUR, 8, micro_batches=4, schedule=policies)
    assert chosen.schedule in ([policies] if isinstance(policies, str) else policies)
    assert len(set(chosen.devices)) == 4


def test_a_single_device_keeps_its_plan() -> None:
    one = cluster_of(1)
    assert plan(profile_of(), one, 8, schedule="auto", reverse_first_k="auto") == plan(profile_of(), one, 8)


@pytest.mark.parametrize("schedule", [None, "auto", "dapple_a"])
def test_a_given_k_is_kept(schedule: str | None) -> None:
    cluster = cluster_of(1, 1, 1, 1, inter_bandwidth=5e8)
    profile = profile_of(parameters=10**6, size=1e7)
    chosen = plan(profile, cluster, 16, micro_batches=1, schedule=schedule, reverse_first_k=2)
    assert chosen.reverse_first_k == 2
    assert chosen.report is not None
    assert "reverse first-k with k = 2" in chosen.report.out_of_order


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reverse_first_k": -1}, "reverse_first_k is -1; it must be at least 0, or 'auto'"),
        ({"reverse_first_k": "best"}, "reverse_first_k is 'best'; give a number of stages, or 'auto'"),
        ({"reverse_first_k": 1.5}, r"reverse_first_k: 1\.5 isn't a whole number"),
        ({"schedule": "interleaved", "reverse_first_k": 1}, "but interleaved doesn't split backwards"),
        ({"schedule": ["auto"]}, "unknown schedule 'auto'; use one of gpipe, .*, or 'auto' alone for all of them"),
    ],
)
def test_a_wrong_request_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan(profile_of(), FOUR, 8, **options)


def test_a_policy_that_these_devices_dont_allow_is_refused() -> None:
    with pytest.raises(PlanError, match="no plan under zb_v fits these devices and their memory"):
        plan(profile_of(1), FOUR, 8, schedule="zb_v")


# ---- reports


def test_a_report_of_an_earlier_version_is_read() -> None:
    chosen = plan(profile_of(), FOUR, 8, micro_batches=4, schedule=DAPPLE_POLICIES)
    data = json.loads(chosen.to_json())
    for later in ("out_of_order", "dapple", "dapple_text", "restraints"):
        del data["report"][later]
    again = Plan.from_json(json.dumps(data))
    assert again.report == chosen.report
    assert str(again) == str(chosen)


def test_an_out_of_order_plan_comes_back_from_json() -> None:
    chosen = plan(profile_of(), FOUR, 8, micro_batches=4, schedule="auto")
    again = Plan.from_json(chosen.to_json())
    assert again == chosen
    assert str(again) == str(chosen)


# ---- end to end


def profile_of_mlp(parameters: int) -> Profile:
    """Of the model with three dense layers, as if each sample took long."""
    costs = [
        LayerProfile(layer, Cost(0.0, 1e-3), Cost(0.0, 2e-3), parameter_bytes=parameters)
        for layer in ("first", "second", "logits")
    ]
    tensors = [Tensor(0, (1,), Cost(0.0, 24.0)), Tensor(1, (2,), Cost(0.0, 20.0))]
    return Profile("mlp", "none", (1, 4), tuple(costs), tuple(tensors))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("bandwidth", "parameters", "micro_batches"), [(1e5, 400, 1), (1e9, 10**9, 2)])
def test_transform_plans_out_of_order_and_trains_as_plain_keras(
    bandwidth: float, parameters: int, micro_batches: int
) -> None:
    model, plain = pair(mlp)
    cluster = dataclasses.replace(dapple.Cluster.local(2, kind="cpu"), intra_bandwidth=bandwidth)
    pipelined = dapple.transform(
        model,
        cluster,
        global_batch_size=8,
        profile=profile_of_mlp(parameters),
        schedule="auto",
        reverse_first_k="auto",
        micro_batches=micro_batches,
    )
    report = pipelined.plan.report
    assert report is not None and report.out_of_order
    if micro_batches == 1:
        assert set(pipelined.plan.devices) == {(0, 1)}
        assert "wait-free" in report.out_of_order
    assert pipelined.prediction is not None
    assert pipelined.prediction.predicted == pytest.approx(report.latency)
    draw = np.random.default_rng(0)
    batches = [(draw.normal(size=(8, 4)).astype("float32"), draw.integers(0, 3, 8), None) for _ in range(3)]
    assert_same_training(pipelined, plain, batches)


def test_updates_arent_left_to_the_next_step_where_all_gradients_are_needed_first() -> None:
    model = mlp(optimizer=keras.optimizers.Adam(global_clipnorm=1.0))
    cluster = dataclasses.replace(dapple.Cluster.local(2, kind="cpu"), intra_bandwidth=1e5)
    pipelined = dapple.transform(
        model, cluster, global_batch_size=8, profile=profile_of_mlp(400), reverse_first_k="auto", micro_batches=1
    )
    assert pipelined.plan.carried_updates == 0
