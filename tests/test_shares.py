"""Shares of replicas on unlike devices: how they are written, what they cost, and which ones the planner chooses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from typing import Any

import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.planning.chunks import chunked
from dapple_tf.planning.local_search import neighbours
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import plan
from dapple_tf.planning.replanning import shrink
from dapple_tf.planning.shares import best_split, with_shares
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import simulate
from graph_passes.ir.tasks import Phase, Task

PLAN = Plan.manual(["layer_3"], [[0, 1], [2, 3, 4]], 2, 30, shares=[[6, 4], [1, 2, 2]])


# ---- in plans


def test_shares_are_reduced_to_lowest_terms() -> None:
    assert PLAN.shares == ((3, 2), (1, 2, 2))
    assert Plan.data_parallel(2, 8, shares=[[5, 5]]).shares is None
    assert Plan.data_parallel(2, 8, shares=[[5, 5]]) == Plan.data_parallel(2, 8)
    assert Plan.manual(["a"], [[0], [1, 2]], 1, 8, shares=[[7], [1, 3]]).shares == ((1,), (1, 3))


def test_a_plan_shows_its_slices() -> None:
    assert "9+6" in str(PLAN) and "3+6+6" in str(PLAN)


def test_shares_stand_in_the_file_and_count_in_the_fingerprint() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    equal = dataclasses.replace(PLAN, shares=None)
    assert equal.fingerprint != PLAN.fingerprint
    old = json.loads(equal.to_json())
    del old["shares"]
    assert Plan.from_json(json.dumps(old)).fingerprint == equal.fingerprint


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([[1, 2]], r"shares has \[2\] numbers for stages of \[2, 3\] replicas; give one for each replica"),
        ([], r"shares has \[\] numbers for stages of \[2, 3\] replicas; give one for each replica"),
        ([[1, 1], [1]], r"shares has \[2, 1\] numbers for stages of \[2, 3\] replicas; give one for each replica"),
        ([[1, 0], [1, 1, 1]], r"shares of stage 0 are \[1, 0\]; give each replica a whole number of at least 1"),
        ([[1, 0.5], [1, 1, 1]], "shares of stage 0: 0.5 isn't a whole number"),
        ("1:2", r"shares is '1:2'; give a list, such as \[\[2, 1\], \[1\]\]"),
        (
            [[1, 99], [1, 1, 1]],
            "replica 0 of stage 0 gets no sample of a micro-batch of 15: its share is 1 of 100. Raise its share, leave "
            "its device 0 out of the stage, or use fewer micro-batches",
        ),
    ],
)
def test_wrong_shares_are_refused(shares: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Plan.manual(["layer_3"], [[0, 1], [2, 3, 4]], 2, 30, shares=shares)


def test_chunks_inherit_shares() -> None:
    cut = chunked(PLAN, profile_of(8), 2)
    assert cut.shares is not None
    assert list(zip(cut.devices, cut.shares, strict=True)) == [
        ((0, 1), (3, 2)), ((0, 1), (3, 2)), ((2, 3, 4), (1, 2, 2)), ((2, 3, 4), (1, 2, 2)),
    ]  # fmt: skip


def test_remaining_replicas_keep_their_shares() -> None:
    assert shrink(PLAN, cluster_of(1, 1, 1, 1, 1), {2}).shares == ((3, 2), (1, 1))
    assert shrink(PLAN, cluster_of(1, 1, 1, 1, 1), {4}).shares == ((3, 2), (1, 2))


# ---- what they cost


def test_tasks_take_the_time_of_their_slices_at_the_speed_of_their_device() -> None:
    cluster = cluster_of(2, speeds=(1.0, 0.5), intra_bandwidth=1e12)
    costs = CostModel(Plan.data_parallel(2, 12, shares=[[2, 1]]), profile_of(1, parameters=0), cluster)
    seconds = [costs.seconds(Task(0, Phase.FORWARD, 0, replica)) for replica in (0, 1)]
    assert seconds == [pytest.approx(8e-3), pytest.approx(8e-3)]
    assert costs.task_seconds[0][0] == max(seconds)
    assert simulate(costs.plan, costs.profile, cluster).latency == pytest.approx(24e-3)


def test_two_kinds_of_devices_take_the_work_over_their_speed() -> None:
    cluster = cluster_of(2, 2, speeds=(1.0, 1.0, 0.5, 0.5), intra_bandwidth=1e12, inter_bandwidth=1e12)
    step = simulate(
        with_shares(Plan.data_parallel(4, 48), profile_of(8, parameters=0), cluster), profile_of(8), cluster
    )
    assert step.latency == pytest.approx(48 * 8 * 3e-3 / 3.0, rel=1e-3)
    assert simulate(Plan.data_parallel(4, 48), profile_of(8), cluster).latency > 1.49 * step.latency


def limited(*sizes: int | None, speeds: tuple[float, ...] = (1.0, 1.0)) -> Cluster:
    devices = zip(sizes, speeds, strict=True)
    return Cluster(tuple(Device(f"d{i}", 0, *own) for i, own in enumerate(devices)), real=False)


def test_each_replicas_memory_is_its_own_slices() -> None:
    profile = profile_of(1, parameters=0, residual=100.0)
    even, uneven = (Plan.data_parallel(2, 12, shares=shares) for shares in (None, [[3, 1]]))
    assert CostModel(even, profile, limited(1000, 400)).holds == (0,)
    assert CostModel(uneven, profile, limited(1000, 400)).holds == (1,)
    assert CostModel(uneven, profile, limited(800, 400)).holds == (0,)
    with pytest.raises(PlanError, match=r"for one slice of 9 samples\), .* more than that device has"):
        CostModel(uneven, profile, limited(800, 400)).check_memory()
    step = simulate(uneven, profile, limited(1000, 400))
    assert step.peak_bytes == {0: 900, 1: 300}


# ---- the best ones


@pytest.mark.parametrize("seed", range(40))
def test_no_other_split_ends_earlier(seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(1, 3)
    samples = draw.randint(workers, 12)
    lines = [(draw.choice([0.0, 1.0, 3.0]), draw.choice([0.5, 1.0, 1.7])) for _ in range(workers)]
    most = [draw.randint(1, samples) for _ in range(workers)]

    def line(start: float, each: float, count: int) -> float:
        return start + each * count

    def last(sizes: tuple[int, ...]) -> float:
        return max(start + each * size for size, (start, each) in zip(sizes, lines, strict=True))

    legal = [sizes for sizes in itertools.product(*(range(1, limit + 1) for limit in most)) if sum(sizes) == samples]
    split = best_split(samples, [functools.partial(line, *own) for own in lines], most)
    assert (split is None) == (not legal)
    if split is not None:
        assert split in legal
        assert last(split) == min(map(last, legal))


def test_like_devices_have_equal_shares() -> None:
    cluster = cluster_of(2, 2, speeds=(2.0, 2.0, 0.5, 0.5))
    wanted = Plan.manual(["layer_3"], [[0, 1], [2, 3]], 2, 30)
    assert with_shares(dataclasses.replace(wanted, shares=((1, 3), (1, 1))), profile_of(8), cluster) == wanted


def test_a_fixed_time_per_slice_counts() -> None:
    """8 samples in 4 + 8 s and 2 in (4 + 2) / 0.5; in proportion to speed, 7 and 3, the second would take 14 s."""
    layer = LayerProfile("a", Cost(4.0, 1.0), Cost(), parameter_bytes=1)
    cluster = cluster_of(2, speeds=(1.0, 0.5))
    shared = with_shares(Plan.data_parallel(2, 10), Profile("one", "none", (1,), (layer,), ()), cluster)
    assert shared.shares == ((4, 1),)


def test_memory_limits_shares() -> None:
    profile = profile_of(1, parameters=0, residual=100.0)
    plain = Plan.data_parallel(2, 12)
    assert with_shares(plain, profile, limited(None, None, speeds=(3.0, 1.0))).shares == ((3, 1),)
    fast = with_shares(plain, profile, limited(750, 600, speeds=(3.0, 1.0)))
    assert fast.shares == ((7, 5),)
    assert with_shares(plain, profile, limited(1000, 400)).shares == ((2, 1),)  # as fast, but smaller
    assert with_shares(plain, profile, limited(500, 400)).shares is None  # nothing fits


def test_shares_leave_room_for_the_larger_micro_batches() -> None:
    profile = profile_of(1, parameters=0, residual=100.0)
    plain = Plan.data_parallel(2, 25, 2)  # 13 + 12 samples
    cluster = limited(800, 550, speeds=(3.0, 1.0))
    assert (CostModel(with_shares(plain, profile, cluster), profile, cluster).holds or (0,))[0] >= 1


def test_equal_shares_are_a_move() -> None:
    cluster = cluster_of(2, speeds=(1.0, 0.5))
    request = PlanRequest.of(profile_of(8), cluster, 12)
    start = request.plan((), [[0, 1]], 1)
    assert start.shares == ((2, 1),)
    moved = list(neighbours(start, request))
    assert dataclasses.replace(start, shares=None) in moved
    assert all(other.shares is not None for other in moved if other.replicas == (2,) and other.micro_batches == 2)


# ---- planned


def test_the_planner_gives_fast_devices_more() -> None:
    cluster = cluster_of(2, 2, speeds=(1.0, 1.0, 0.5, 0.5), intra_bandwidth=1e11, inter_bandwidth=1e11)
    best = plan(profile_of(parameters=100), cluster, 48)
    assert best.replicas == (4,)
    assert best.shares == ((2, 2, 1, 1),)
    assert best.report is not None
    assert best.report.latency == pytest.approx(48 * 8 * 3e-3 / 3.0, rel=0.01)


def drawn(seed: int) -> tuple[Profile, Cluster, int]:
    """A model and a cluster of several kinds of devices."""
    draw = random.Random(seed)
    layers = [
        LayerProfile(
            f"layer_{index}",
            Cost(draw.choice([0.0, 1e-4]), draw.uniform(1e-4, 2e-3)),
            Cost(draw.choice([0.0, 2e-4]), draw.uniform(1e-4, 4e-3)),
            residual_bytes=Cost(0.0, draw.uniform(1e3, 1e6)),
            parameter_bytes=draw.choice([1_000, 4_000_000]),
        )
        for index in range(draw.randint(2, 7))
    ]
    tensors = [Tensor(index, (index + 1,), Cost(0.0, draw.uniform(1e3, 1e6))) for index in range(len(layers) - 1)]
    servers = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    speeds = [draw.choice([0.3, 0.5, 1.0, 1.7]) for _ in range(sum(servers))]
    cluster = cluster_of(*servers, speeds=speeds, intra_bandwidth=1e10, inter_bandwidth=draw.choice([1e8, 1e9, 1e10]))
    room = draw.choice([None, 3e7])
    devices = tuple(
        dataclasses.replace(device, memory_bytes=None if room is None else int(room * draw.uniform(1, 4)))
        for device in cluster.devices
    )
    cluster = dataclasses.replace(cluster, devices=devices)
    return Profile("drawn", "none", (1, 4), tuple(layers), tuple(tensors)), cluster, draw.choice([24, 37, 64])


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_the_report_is_the_simulation_of_the_file(seed: int) -> None:
    profile, cluster, batch = drawn(seed)
    best = plan(profile, cluster, batch, schedule="auto" if seed % 2 else None)
    assert best.report is not None
    assert simulate(best, profile, cluster).latency == best.report.latency
    read = Plan.from_json(best.to_json())
    assert read == best and read.report == best.report
    again = simulate(read, profile, cluster)
    assert again.latency == best.report.latency
    for device, peak in again.peak_bytes.items():
        limit = cluster.devices[device].memory_bytes
        assert limit is None or peak <= limit


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_planned_shares_are_never_slower_than_equal_ones(seed: int) -> None:
    profile, cluster, batch = drawn(seed)
    best = plan(profile, cluster, batch)
    equal = dataclasses.replace(best, shares=None, report=None)
    try:
        other = simulate(equal, profile, cluster).latency
    except PlanError:
        return  # Equal shares don't fit in memory.
    assert best.report is not None
    assert best.report.latency <= other * (1 + 1e-3)
