"""Plans that the planner finds, what it says about them, and what it says when nothing fits."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import numpy as np
import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.cluster import Cluster, Device, Server
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.describe.profile_text import load_text
from dapple_tf.planning.plan_reasons import shape, single_device_seconds
from dapple_tf.planning.plan_request import DAPPLE_POLICIES
from dapple_tf.planning.planner import plan
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tools.evaluation.paper_models import CONFIGS, MODELS


def test_light_parameters_on_fast_links_are_trained_data_parallel() -> None:
    chosen = plan(profile_of(parameters=100), cluster_of(4, intra_bandwidth=1e11), 32)
    assert chosen.devices == ((0, 1, 2, 3),)
    assert shape(chosen) == "data parallel on 4, 1 micro-batch"


def test_heavy_parameters_on_a_slow_network_are_pipelined() -> None:
    chosen = plan(profile_of(parameters=10**8), cluster_of(1, 1, 1, 1, inter_bandwidth=1e9), 32)
    assert shape(chosen).startswith("straight pipeline of 4 stages")
    assert chosen.cuts == ("layer_1", "layer_3", "layer_5")
    assert chosen.report is not None
    assert chosen.report.data_parallel is not None
    assert chosen.report.data_parallel > chosen.report.latency


def test_stages_are_replicated_within_servers_and_pipelined_between_them() -> None:
    links = {"intra_bandwidth": 1e11, "inter_bandwidth": 1e9}
    chosen = plan(profile_of(parameters=10**8), cluster_of(4, 4, **links), 32, schedule=DAPPLE_POLICIES)
    assert chosen.replicas == (4, 4)
    assert {frozenset(group) for group in chosen.devices} == {frozenset(range(4)), frozenset(range(4, 8))}


@pytest.mark.slow
def test_vgg_19_on_slow_ethernet_is_15_to_1_as_in_table_4() -> None:
    profile = load_text("vgg-19")
    cluster = cluster_of(*[1] * 16, memory=16 * 2**30, inter_bandwidth=10e9 / 8)
    chosen = plan(profile, cluster, 2048)
    assert chosen.replicas == (15, 1)
    assert chosen.cuts == ("MaxPool2d_5",)  # between the convolutions and the fully connected layers


def test_one_micro_batch_is_tried_with_stages_of_unlike_replicas() -> None:
    """Stages don't overlap then, and equal ones are slow: 16:12:1 with 2 micro-batches was chosen, 24 % slower."""
    profile = load_text("vgg-19")
    cluster = cluster_of(8, 8, 8, 8, memory=15 * 10**9, intra_bandwidth=130e9, inter_bandwidth=25e9 / 8)
    chosen = plan(profile, cluster, 1024, schedule=DAPPLE_POLICIES)
    several = plan(profile, cluster, 1024, schedule=DAPPLE_POLICIES, micro_batches=[2, 4])
    assert chosen.report is not None and several.report is not None
    assert chosen.micro_batches == 1 and len(chosen.replicas) == 2
    assert chosen.report.latency < 0.85 * several.report.latency


def test_many_numbers_of_micro_batches_leave_work_for_few_ones() -> None:
    """The search took the three that are best for equal stages, and their work: data parallelism, 21 % slower."""
    profile = MODELS["vgg-19"].profile()
    profile = dataclasses.replace(profile, batch_sizes=(1, *profile.batch_sizes))
    many, some = (
        plan(profile, CONFIGS["B"], 2048, schedule=DAPPLE_POLICIES, least_gain=0.0, micro_batches=counts)
        for counts in ([1, 2, 4, 8, 16, 32, 64, 128, 256], [1, 2, 4, 8, 16, 32, 64])
    )
    assert many.report is not None and some.report is not None
    assert many.report.latency < 1.01 * some.report.latency


def test_a_plan_that_is_slower_than_the_best_is_varied_too() -> None:
    """Only its neighbours two layers on were faster: 15:1 was given up for data parallelism, 332 ms for 324."""
    chosen = plan(MODELS["vgg-19"].profile(), CONFIGS["A"], 1024, micro_batches=[1, 2, 4, 8, 16, 32], least_gain=0.0)
    assert chosen.replicas == (15, 1) and chosen.report is not None
    assert chosen.report.latency < 0.325


def test_a_slow_device_gets_less_to_do() -> None:
    cluster = cluster_of(1, 1, inter_bandwidth=1e12)
    slow = dataclasses.replace(
        cluster, devices=(cluster.devices[0], dataclasses.replace(cluster.devices[1], speed=1 / 3))
    )
    chosen = plan(profile_of(parameters=10**9), slow, 32, micro_batches=16, schedule=DAPPLE_POLICIES)
    assert chosen.num_stages == 2
    layers = {chosen.devices[0][0]: 0, chosen.devices[1][0]: 0}
    cut = int(chosen.cuts[0].partition("_")[2]) + 1
    layers[chosen.devices[0][0]], layers[chosen.devices[1][0]] = cut, 8 - cut
    assert layers == {0: 6, 1: 2}


def test_a_badly_connected_server_is_left_out_of_reductions() -> None:
    cluster = cluster_of(2, 2, 2, intra_bandwidth=1e11, inter_bandwidth=1e10)
    cluster = dataclasses.replace(cluster, servers=(Server(), Server(inter_bandwidth=1e6), Server()))
    chosen = plan(profile_of(parameters=10**6, size=1e6), cluster, 24)
    # Whatever crosses the slow card takes longer than all computation.
    assert all(not (set(group) & {2, 3}) for group in chosen.devices)


def test_small_memory_gets_the_heavy_layers_elsewhere() -> None:
    profile = profile_of(parameters=10**6)
    devices = (Device("small", 0, 5_000_000), Device("large", 1, 10**9))
    chosen = plan(profile, Cluster(devices, real=False, inter_bandwidth=1e12), 8)
    result = simulate(chosen, profile, Cluster(devices, real=False, inter_bandwidth=1e12))
    assert all(result.peak_bytes[device] <= (5_000_000, 10**9)[device] for device in result.peak_bytes)


def test_recomputation_is_used_only_where_memory_demands_it() -> None:
    profile = profile_of(residual=1e8, size=1e3, parameters=1000)
    roomy = plan(profile, cluster_of(2, memory=10**12), 16)
    assert roomy.recompute == "none"
    tight = plan(profile, cluster_of(2, memory=500_000_000), 16)
    assert tight.recompute == ("boundary", "none")  # two micro-batches in flight, and one


def test_k_is_bounded_by_memory_in_what_is_expected() -> None:
    profile = profile_of(residual=1e6, size=1e3, parameters=10**6)
    # 16 MB for variables and gradients of a stage of 4 layers, and room for two micro-batches of 2 samples.
    chosen = plan(profile, cluster_of(1, 1, memory=8_000_000 + 17_000_000), 16, micro_batches=8, recompute="none")
    assert chosen.report is not None
    for stage in chosen.report.stages:
        assert stage.memory_limit is not None
        assert stage.memory_bytes <= stage.memory_limit


def test_choices_can_be_given() -> None:
    profile, cluster = profile_of(), cluster_of(4, intra_bandwidth=1e9)
    chosen = plan(profile, cluster, 32, micro_batches=4, schedule="gpipe", recompute="boundary", jit_compile=True)
    assert (chosen.micro_batches, chosen.schedule, chosen.recompute) == (4, "gpipe", "boundary")
    assert chosen.jit_compile
    assert plan(profile, cluster, 32, micro_batches=[2, 8]).micro_batches in (2, 8)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"global_batch_size": 4, "micro_batches": 8}, "4 samples can't be cut into 8 micro-batches; use 1 to 4"),
        ({"global_batch_size": 4, "schedule": "gipe"}, "unknown schedule 'gipe'; use one of gpipe, dapple_a"),
        ({"global_batch_size": 4, "recompute": "all"}, "unknown recompute 'all'; use one of none, boundary"),
        ({"global_batch_size": 4, "all_reduce": "tree"}, "unknown all_reduce 'tree'; use one of flat, hierarchical"),
    ],
)
def test_a_wrong_request_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(profile_of(), cluster_of(2), **arguments)


def test_it_says_what_is_short_and_more_devices_that_would_do_really_do() -> None:
    profile = profile_of(parameters=10**6)  # 2 MB a layer with its gradient
    with pytest.raises(PlanError) as caught:
        plan(profile, cluster_of(2, memory=5_000_000), 8)
    text = str(caught.value)
    assert "no plan fits the memory of 2 devices" in text
    # Four layers with gradients, 8 MB, and the residuals of one sample.
    assert "needs 8.106 MiB on each device (7.629 MiB for weights, gradients and optimizer)" in text
    assert "3.338 MiB more than the 4.768 MiB there are" in text
    assert "4 times as many devices" in text or "2 times as many devices (4)" in text
    factor = int(text.partition(" times as many")[0].rpartition(" ")[2])
    assert plan(profile, cluster_of(2 * factor, memory=5_000_000), 8).num_stages > 2


def test_it_says_that_recomputation_would_do() -> None:
    profile = profile_of(residual=1e8, size=1e3, parameters=1000)
    cluster = cluster_of(2, memory=500_000_000)
    given: dict[str, Any] = {"schedule": "gpipe", "micro_batches": 4}  # all four at once
    with pytest.raises(PlanError, match=r"What would fit: recompute='boundary'"):
        plan(profile, cluster, 4, recompute="none", **given)
    assert plan(profile, cluster, 4, recompute="boundary", **given).recompute == "boundary"


def test_shards_are_used_where_memory_demands_it_if_they_are_allowed() -> None:
    """Eight layers of 1 MB, with gradients and two slots each, and room for all slots of half of them."""
    profile = profile_of(parameters=10**6)
    layers = tuple(dataclasses.replace(layer, slot_bytes=2 * 10**6) for layer in profile.layers)
    profile = dataclasses.replace(profile, layers=layers)
    tight, roomy = cluster_of(2, memory=25_000_000), cluster_of(2, memory=10**9)
    given: dict[str, Any] = {"micro_batches": 1, "recompute": "none"}
    one_stage = dataclasses.replace(profile, layers=layers[:1], tensors=())
    heavy = dataclasses.replace(layers[0], parameter_bytes=8 * 10**6, slot_bytes=16 * 10**6)
    one_stage = dataclasses.replace(one_stage, layers=(heavy,))
    with pytest.raises(PlanError, match=r"What would fit: .*optimizer_shards=True"):
        plan(one_stage, cluster_of(2, memory=32_500_000), 8, **given)
    chosen = plan(one_stage, cluster_of(2, memory=32_500_000), 8, optimizer_shards=None, **given)
    assert chosen.optimizer_shards and chosen.replicas == (2,)
    assert chosen.report is not None and chosen.report.stages[0].memory_bytes <= 32_500_000
    assert not plan(profile, roomy, 8, optimizer_shards=None, **given).optimizer_shards
    assert not plan(profile, tight, 8, optimizer_shards=None, **given).optimizer_shards, "two stages fit without"
    assert plan(profile, roomy, 8, optimizer_shards=True, **given).optimizer_shards
    least = cluster_of(2, memory=28_500_000)
    with pytest.raises(PlanError, match="no plan fits"):
        plan(one_stage, least, 8, optimizer_shards=True, **given)
    tables = dataclasses.replace(heavy, table_bytes=8 * 10**6, row_bytes=Cost(0.0, 1000.0))
    chosen = plan(
        dataclasses.replace(one_stage, layers=(tables,)), cluster_of(2, memory=16_000_000), 8, row_shards=True, **given
    )
    assert chosen.row_shards and chosen.replicas == (2,)
    with pytest.raises(PlanError, match="row_shards is 1; it must be True or False"):
        plan(one_stage, least, 8, row_shards=1, **given)


def test_it_says_that_smaller_micro_batches_would_do() -> None:
    profile = profile_of(layers=1, residual=1e8, parameters=1000)
    cluster = cluster_of(1, memory=250_000_000)
    with pytest.raises(PlanError, match=r"smaller micro-batches \(micro_batches=16\)"):
        plan(profile, cluster, 16, micro_batches=2, recompute="none")
    assert plan(profile, cluster, 16, micro_batches=16, recompute="none")


def test_a_layer_that_fits_nowhere_is_named_by_its_size() -> None:
    with pytest.raises(PlanError, match=r"The largest layer alone needs 1\.863 GiB"):
        plan(profile_of(layers=2, parameters=10**9), cluster_of(2, memory=10**8), 4)


def test_small_models_are_told_in_small_units() -> None:
    """Memory was 4.5e-05 GiB, and the critical path 5% of the step."""
    text = str(plan(dataclasses.replace(profile_of(parameters=1000), step_seconds=100.0), cluster_of(2), 8))
    assert "MiB" in text and "GiB" not in text
    assert "critical path: what a step takes once 100%" in text


def test_the_table_tells_what_was_chosen_and_why() -> None:
    links = {"intra_bandwidth": 1e11, "inter_bandwidth": 1e9}
    chosen = plan(profile_of(parameters=10**8), cluster_of(4, 4, memory=2**33, **links), 32, schedule=DAPPLE_POLICIES)
    text = str(chosen)
    assert chosen.report is not None
    header, titles, *rows = text.splitlines()
    assert header.startswith("Plan: global batch 32")
    columns = "stage up to layer devices replicas slice sizes warm-up K layers share of time bubble memory"
    assert " ".join(titles.split()) == columns
    assert rows[0].startswith("0      layer_3")
    assert "0-3" in rows[0]
    assert "of 8 GiB" in rows[0]
    assert f"expected step {chosen.report.latency * 1e3:.4g} ms" in text
    assert "(the pivot stage)" in text
    assert "runner-up: " in text
    assert "takes once" not in text
    assert "best data parallelism on all devices: " in text
    assert sum(stage.share for stage in chosen.report.stages) == pytest.approx(1)


def test_idle_devices_and_a_runner_up_that_is_not_slower_are_told() -> None:
    """The runner-up took "0.999x the time", and nothing said that devices stay idle."""
    text = str(
        plan(profile_of(layers=2, parameters=3 * 10**6), cluster_of(1, 1, 1, inter_bandwidth=1e9), 6, least_gain=0.5)
    )
    assert "expected step 21 ms, 1.71x one device; 1 device idle\n" in text
    assert "runner-up: data parallel on 3, 1 micro-batch: 16 ms, 31.3% faster, on more devices\n" in text
    assert "best data parallelism on all devices: 16 ms, 31.3% faster\n" in text


def test_why_data_parallelism_is_impossible_is_told() -> None:
    chosen = plan(profile_of(parameters=10**6), cluster_of(4, memory=5_000_000), 16)
    assert chosen.report is not None
    assert chosen.report.data_parallel is None
    # Weights, gradients and the packed gradients of eight layers.
    assert "it needs 22.89 MiB on each device, 18.12 MiB more than there is" in chosen.report.data_parallel_note
    few = plan(profile_of(), cluster_of(8), 4)
    assert few.report is not None
    assert few.report.data_parallel_note == "a batch of 4 samples doesn't reach 8 replicas"


def test_the_speedup_is_over_one_device_that_does_all_by_itself() -> None:
    profile = profile_of(parameters=0)
    assert single_device_seconds(profile, 32) == pytest.approx(8 * 3e-3 * 32)
    chosen = plan(profile, cluster_of(4), 32)
    assert chosen.report is not None
    assert chosen.report.speedup == pytest.approx(4)


def test_a_plan_and_its_report_come_back_from_json() -> None:
    chosen = plan(profile_of(), cluster_of(4, intra_bandwidth=1e9), 32)
    again = Plan.from_json(chosen.to_json())
    assert again == chosen
    assert again.report == chosen.report
    assert str(again) == str(chosen)


def test_an_edited_plan_loses_what_was_expected_of_it(caplog: pytest.LogCaptureFixture) -> None:
    chosen = plan(profile_of(parameters=10**8), cluster_of(1, 1, inter_bandwidth=1e9), 32)
    data = json.loads(chosen.to_json())
    data["micro_batches"] = 2
    with caplog.at_level(logging.WARNING):
        edited = Plan.from_json(json.dumps(data), source="mine.json")
    assert edited.micro_batches == 2
    assert edited.report is None
    assert "mine.json has been changed since it was planned" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report.pop("latency"),
        lambda report: report.update(latency="fast"),
        lambda report: report.update(latency=None),
        lambda report: report.update(extra=1),
        lambda report: report.update(stages=3),
        lambda report: report.update(stages=[]),
        lambda report: report.update(stages=[7]),
        lambda report: report.update(pivot=3),
        lambda report: report["stages"][0].update(bubble="x"),
    ],
)
def test_a_broken_report_is_an_error(change: Any) -> None:
    data = json.loads(plan(profile_of(), cluster_of(2), 8).to_json())
    change(data["report"])
    with pytest.raises(PlanError, match=r"plan: .*report"):
        Plan.from_json(json.dumps(data))


def test_a_foreign_plan_is_refused_by_the_profile_and_the_cluster() -> None:
    profile = profile_of()
    with pytest.raises(PlanError, match="cuts after 'block_9', which isn't a layer of the profile of 'equal'"):
        simulate(Plan.manual(["block_9"], [[0], [1]], 2, 8), profile, cluster_of(2))
    with pytest.raises(PlanError, match="stage 1 on device 7, but the cluster has 2"):
        simulate(Plan.manual(["layer_3"], [[0], [7]], 2, 8), profile, cluster_of(2))


@pytest.mark.slow
def test_planning_is_deterministic() -> None:
    cluster = cluster_of(2, 2, intra_bandwidth=1e10, inter_bandwidth=1e9)
    plans = {plan(profile_of(parameters=10**7), cluster, 24).to_json() for _ in range(2)}
    assert len(plans) == 1


@pytest.mark.thorough
@pytest.mark.slow
def test_a_thousand_devices_are_planned() -> None:
    cluster = cluster_of(*[8] * 20, intra_bandwidth=1e11, inter_bandwidth=3e9)
    chosen = plan(profile_of(40, parameters=10**8), cluster, 640, micro_batches=4)
    assert chosen.report is not None
    assert chosen.report.speedup > 40
    assert len({device for group in chosen.devices for device in group}) > 100


# ---- stories of defects


def described(servers: str) -> Cluster:
    return Cluster.from_json(
        '{"format": "dapple_tf.cluster/1", "intra_bandwidth": 1e10, "inter_bandwidth": 1e9, "servers": ' + servers + "}"
    )


@pytest.mark.parametrize(
    ("speeds", "devices"),
    [([0.1, 10, 0.1, 10], ((1, 3),)), ([0.1, 0.1, 10], ((2,),)), ([1, 1, 1, 10], ((3,),))],
)
def test_fast_devices_are_told_from_slow_ones_in_one_server(speeds: list[float], devices: Any) -> None:
    """Devices were handed out by their numbers, whatever their speed: plans were up to 16 times too slow."""
    cluster = described(json.dumps([{"devices": len(speeds), "speed": speeds}]))
    assert plan(profile_of(4), cluster, 8, schedule=DAPPLE_POLICIES).devices == devices


@pytest.mark.parametrize(("memory", "devices"), [([10**6, 10**9], ((1,),)), ([10**9, 10**6], ((0,),))])
def test_large_devices_are_told_from_small_ones_in_one_server(memory: list[int], devices: Any) -> None:
    """A server's memory was taken for that of its smallest device: nothing fitted, "-572 MiB more than there are"."""
    cluster = described(json.dumps([{"devices": 2, "memory_bytes": memory}]))
    assert plan(profile_of(1, parameters=10**7), cluster, 8).devices == devices


def test_unknown_memory_isnt_a_batch_that_is_too_small() -> None:
    cluster = described('[{"devices": 3, "memory_bytes": [null, null, 1000]}]')
    assert 2 not in plan(profile_of(1, parameters=10**7), cluster, 1).devices[0]


def test_numpys_integers_are_numbers() -> None:
    chosen = plan(profile_of(), cluster_of(2), np.int64(8), micro_batches=np.int64(4))
    assert (chosen.global_batch_size, chosen.micro_batches) == (8, 4)
    with pytest.raises(PlanError, match=r"global_batch_size: 8\.0 isn't a whole number"):
        plan(profile_of(), cluster_of(2), 8.0)  # type: ignore[arg-type]


def test_a_huge_batch_is_planned_in_no_time() -> None:
    assert plan(profile_of(), cluster_of(2), 10**9).global_batch_size == 10**9


def test_smaller_slices_than_were_profiled_may_fit() -> None:
    costs = LayerProfile("a", Cost(0, 1e-3), Cost(0, 1e-3), residual_bytes=Cost(0, 1e7))
    profile = Profile("p", "none", (32,), (costs,), ())
    with pytest.raises(PlanError, match=r"What would fit: smaller micro-batches \(micro_batches=32\)"):
        plan(profile, cluster_of(1, memory=10**8), 32)
    assert plan(profile, cluster_of(1, memory=10**8), 32, micro_batches=32)


@pytest.mark.parametrize("name", ["micro_batches", "schedule", "recompute"])
def test_no_choice_at_all_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} is empty"):
        plan(profile_of(), cluster_of(2), 8, **{name: []})


@pytest.mark.few(2)
@pytest.mark.parametrize("bandwidth", [2e5, 1e6, 5e6, 1e9])
def test_every_figure_is_of_one_simulator_and_small_gains_arent_worth_more_devices(bandwidth: float) -> None:
    """A report said "454 ms, 1.22x one device" and, as the runner-up, "one device: 456 ms"."""
    profile = profile_of(parameters=10**4, size=1e4)
    cluster = cluster_of(1, 1, inter_bandwidth=bandwidth)
    chosen, fastest = plan(profile, cluster, 16), plan(profile, cluster, 16, least_gain=0)
    report = chosen.report
    assert report is not None and fastest.report is not None and report.one_device is not None
    assert report.speedup == pytest.approx(report.one_device / report.latency)
    alone = plan(profile, cluster_of(1), 16).report
    assert alone is not None and alone.latency == pytest.approx(report.one_device)
    if report.runner_up_text.startswith("one device"):
        assert report.runner_up == pytest.approx(report.one_device)
    if len(chosen.devices) > 1 or len(chosen.devices[0]) > 1:
        assert report.one_device > 1.03 * report.latency
    assert fastest.report.latency <= report.latency <= 1.03 * fastest.report.latency


def test_a_least_gain_that_is_no_part_is_refused() -> None:
    with pytest.raises(PlanError, match=r"least_gain is 3; give the part of a step's time"):
        plan(profile_of(), cluster_of(2), 16, least_gain=3)


def test_a_report_of_an_earlier_version_is_read_without_its_assumption() -> None:
    """Reports said whether overlap of all-reduces had been assumed; plans themselves say it now."""
    chosen = plan(profile_of(), cluster_of(2), 8)
    data = json.loads(chosen.to_json())
    data["report"]["overlap"] = True
    del data["backward_cuts"]
    again = Plan.from_json(json.dumps(data))
    assert again == chosen
    assert again.report == chosen.report
