"""Plans for the workers that are left, and for those that have come back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hardware import cluster_of, profile_of

import dapple_tf as dapple
from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.errors import DappleError
from dapple_tf.planning import replanning
from dapple_tf.planning.replanning import Deployment, Replanner, shrink, without_servers

CUTS = ["a", "b", "c"]


def cluster(servers: int, per_server: int = 1) -> Cluster:
    pairs = [(server, index) for server in range(servers) for index in range(per_server)]
    devices = tuple(Device(f"/job:worker/replica:0/task:{s}/device:CPU:{i}", s) for s, i in pairs)
    return Cluster(devices, addresses=tuple(f"10.0.0.{server + 1}:1" for server in range(servers)))


def plan(devices: list[list[int]], **options: Any) -> dapple.Plan:
    return dapple.Plan.manual(CUTS[: len(devices) - 1], devices, 4, 16, **options)


def test_servers_that_are_left_are_numbered_anew() -> None:
    before = cluster(3, 2)
    after = without_servers(before, [1])
    assert after.addresses == ("10.0.0.1:1", "10.0.0.3:1")
    assert [device.server for device in after.devices] == [0, 0, 1, 1]
    assert after.device_names == tuple(
        f"/job:worker/replica:0/task:{s}/device:CPU:{i}" for s in range(2) for i in range(2)
    )
    assert after.num_servers == 2
    assert without_servers(before, [0, 1]).addresses == ("10.0.0.3:1",)
    with pytest.raises(DappleError, match="no worker is left"):
        without_servers(before, [0, 1, 2])


@pytest.mark.parametrize(
    ("devices", "lost", "cuts", "left"),
    [
        pytest.param([[0], [1, 2], [3]], [1], ["a", "b"], [[0], [1], [2]], id="a replica"),
        pytest.param([[0], [1, 2], [3]], [3], ["a"], [[0], [1, 2]], id="the last stage joins the one before"),
        pytest.param([[0], [1], [2], [3]], [0], ["b", "c"], [[0], [1], [2]], id="the first joins the one after"),
        pytest.param([[0], [1], [2], [3]], [1], ["b", "c"], [[0], [1], [2]], id="the second joins the first"),
        pytest.param([[0], [1], [2], [3]], [1, 2], ["c"], [[0], [1]], id="two stages in the middle"),
        pytest.param([[0], [1], [2], [3]], [0, 1], ["c"], [[0], [1]], id="the first two"),
        pytest.param([[0, 1], [2]], [1, 2], [], [[0]], id="down to one device"),
        pytest.param([[2, 3], [0, 1]], [0], ["a"], [[1, 2], [0]], id="stages in another order than devices"),
    ],
)
def test_what_is_left_of_a_plan(
    devices: list[list[int]], lost: list[int], cuts: list[str], left: list[list[int]]
) -> None:
    shrunk = shrink(plan(devices), cluster(4), lost)
    assert list(shrunk.cuts) == cuts
    assert [list(replicas) for replicas in shrunk.devices] == left
    assert (shrunk.micro_batches, shrunk.global_batch_size) == (4, 16)
    shrunk.validate_on(without_servers(cluster(4), lost))


def test_stages_that_join_keep_as_little_as_the_leanest_of_them() -> None:
    before = plan([[0], [1], [2], [3]], recompute=("boundary", "none", "min_cut", "none"))
    assert shrink(before, cluster(4), [0]).recompute == ("boundary", "min_cut", "none")
    assert shrink(before, cluster(4), [2]).recompute == ("boundary", "min_cut", "none")
    assert shrink(before, cluster(4), [0, 2]).recompute == ("boundary", "none")


def test_all_devices_of_a_server_go_at_once() -> None:
    shrunk = shrink(plan([[0, 2], [1, 3]]), cluster(2, 2), [0])
    assert [list(replicas) for replicas in shrunk.devices] == [[0], [1]]


@pytest.mark.parametrize(
    ("lost", "groups", "shares"),
    [
        pytest.param([2], (((0, 1),), ((3,), (4,))), None, id="a replica"),
        pytest.param([0, 3], (((0, 1),), ((2,), (3,))), None, id="both replicas lose one"),
        pytest.param([5], (((0, 1), (2, 3)), ((4,),)), ((1, 2), (1,)), id="the other stage's"),
    ],
)
def test_groups_of_devices_are_kept_whole_where_one_is(
    lost: list[int], groups: tuple[Any, ...], shares: tuple[Any, ...] | None
) -> None:
    before = plan([[0, 1, 2, 3], [4, 5]]).with_placed_operators([2, 2])
    shrunk = shrink(dataclasses.replace(before, shares=((1, 2), (1, 1))), cluster(6), lost)
    assert (shrunk.operator_devices, shrunk.shares) == (groups, shares)


def test_devices_that_the_plan_does_not_use() -> None:
    with pytest.raises(DappleError, match="none of the plan's devices is left"):
        shrink(plan([[0], [1]]), cluster(3), [0, 1])


@pytest.mark.parametrize("schedule", ["dapple_a", "dapple_b", "gpipe", "zb_h1", "zb_h2", "fast_forward"])
def test_schedules_that_fit_are_kept(schedule: str) -> None:
    assert shrink(plan([[0], [1], [2]], schedule=schedule), cluster(3), [1]).schedule == schedule


@pytest.mark.parametrize(
    ("devices", "schedule"), [([[0, 1], [2, 3], [0, 1], [2, 3]], "interleaved"), ([[0], [1], [1], [0]], "zb_v")]
)
@pytest.mark.parametrize("lost", [[0], [1], [0, 1]])
def test_schedules_that_need_certain_stages(devices: list[list[int]], schedule: str, lost: list[int]) -> None:
    """Another one is taken where they don't fit what is left."""
    own = cluster(max(map(max, devices)) + 1)
    if len(lost) == own.num_servers:
        lost = lost[1:]
    shrunk = shrink(plan(devices, schedule=schedule), own, lost)
    shrunk.validate_on(without_servers(own, lost))
    assert shrunk.schedule in (schedule, "dapple_a")


@pytest.mark.parametrize("lost", [[0], [1], [2]])
def test_out_of_order_plans(lost: list[int]) -> None:
    before = plan([[0, 1], [2]], reverse_first_k=2, carried_updates=1)
    shrunk = shrink(before, cluster(3), lost)
    assert shrunk.carried_updates == 0
    shrunk.validate_on(without_servers(cluster(3), lost))


# ---- workers that have come back

SHRINKING = Replanner(None)


def lose(deployment: Deployment, *lost: int, replanner: Replanner = SHRINKING) -> Deployment:
    return replanner.without(deployment, lost, {})


def by_addresses(*deployments: Deployment) -> dict[tuple[str, ...], Deployment]:
    return {own.cluster.addresses: own for own in deployments}


def test_the_former_plan_is_taken_again() -> None:
    """With the settings that were dropped as it shrank, and on the same numbers."""
    full = Deployment(cluster(3), plan([[0, 1], [2]], reverse_first_k=2, carried_updates=1))
    left = lose(full, 1)
    growth = SHRINKING.growth(left, by_addresses(full), ["10.0.0.2:1"])
    assert growth is not None
    assert growth.deployment == full
    assert growth.added == ("10.0.0.2:1",)
    assert growth.gain == "the gain isn't predicted"


def test_some_of_the_lost_workers_come_back() -> None:
    full = Deployment(cluster(4), plan([[0], [1], [2], [3]]))
    three = lose(full, 1)
    two = lose(three, 0)
    former = by_addresses(full, three)
    growth = SHRINKING.growth(two, former, ["10.0.0.1:1"])
    assert growth is not None
    assert growth.deployment == three
    other = SHRINKING.growth(two, former, ["10.0.0.2:1"])
    assert other is not None
    assert other.deployment.cluster.addresses == ("10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1")
    assert other.deployment.plan == shrink(full.plan, full.cluster, [0])
    both = SHRINKING.growth(two, former, ["10.0.0.1:1", "10.0.0.2:1"])
    assert both is not None
    assert both.deployment == full
    assert both.added == ("10.0.0.1:1", "10.0.0.2:1")


def test_workers_that_the_plan_does_not_use() -> None:
    """Taking them in would cost a pause, and gain nothing."""
    full = Deployment(cluster(3), plan([[0], [1]]))
    left = lose(full, 2)
    assert SHRINKING.growth(left, by_addresses(full), ["10.0.0.3:1"]) is None
    assert SHRINKING.growth(left, by_addresses(full), ["10.0.0.2:1"]) is None  # It is there already.
    assert SHRINKING.growth(left, by_addresses(full), ["10.0.0.9:1"]) is None  # Nobody knows it.


def workers_of(count: int, **links: Any) -> Cluster:
    description = cluster_of(*[1] * count, **links)
    return dataclasses.replace(description, addresses=tuple(f"10.0.0.{number + 1}:1" for number in range(count)))


def test_a_worker_in_reserve_takes_the_place_of_a_lost_one() -> None:
    """With a profile: the plan left its device out, and the next one is for all that are there."""
    full = Deployment(workers_of(3, inter_bandwidth=1e12), dapple.Plan.data_parallel(2, 32))
    left = lose(full, 1, replanner=Replanner(profile_of(parameters=10**6)))
    assert left.cluster.addresses == ("10.0.0.1:1", "10.0.0.3:1")
    assert {device for replicas in left.plan.working_devices for device in replicas} == {0, 1}


@pytest.mark.parametrize(("bandwidth", "gains"), [(1e12, True), (1e3, False)])
def test_a_profile_tells_whether_the_step_becomes_faster(bandwidth: float, gains: bool) -> None:
    """A plan of the user's, data parallel over links that may be too slow for it."""
    profile = profile_of(parameters=10**6)
    full = Deployment(workers_of(4, inter_bandwidth=bandwidth), dapple.Plan.data_parallel(4, 32))
    replanner = Replanner(profile)
    left = lose(full, 3, replanner=replanner)
    growth = replanner.growth(left, by_addresses(full), ["10.0.0.4:1"])
    assert (growth is not None) == gains
    if growth is not None:
        assert growth.deployment == full
        assert growth.present is not None and growth.latency is not None
        assert growth.latency < growth.present
        assert growth.gain == (
            f"a step is predicted to take {growth.latency * 1e3:.4g} ms instead of {growth.present * 1e3:.4g} ms"
        )


def test_a_present_plan_that_does_not_fit_in_memory_is_left_at_once() -> None:
    """Without a plan that fits, the shrunk one stays, whose step can't be simulated."""
    profile = profile_of(parameters=10**8)
    two, one = dapple.Plan.straight(["layer_3"], 32, 4), dapple.Plan.manual([], [[0]], 4, 32)

    def fit(memory: int) -> list[bool]:
        known = cluster_of(1, 1, memory=memory)
        return [math.isfinite(Replanner(profile)._latency(Deployment(known, own))) for own in (two, one)]

    memory = next(size for size in range(10**8, 10**10, 10**8) if fit(size) == [True, False])
    full = Deployment(workers_of(2, memory=memory), two)
    left = Deployment(without_servers(full.cluster, [1]), one)
    growth = Replanner(profile).growth(left, by_addresses(full), ["10.0.0.2:1"])
    assert growth is not None
    assert growth.gain == "by the profile, the present plan doesn't fit the devices' memory"


def test_new_plans_carry_no_updates_that_the_optimizer_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner was asked for any plan: the engine refused one with carried updates, in the middle of a recovery."""
    asked: list[Any] = []

    def find_plan(*arguments: Any, only: Any = None, **options: Any) -> dapple.Plan:
        asked.append(only)
        return plan([[0], [1]])

    monkeypatch.setattr(replanning, "find_plan", find_plan)
    full = Deployment(cluster(3), plan([[0], [1], [2]]))
    lose(full, 2, replanner=Replanner(profile_of(), needs_all_gradients=True))
    lose(full, 2, replanner=Replanner(profile_of()))
    assert "carried_updates" not in asked[0]
    assert "chunks" in asked[0]
    assert asked[1] is None
    carrying = Deployment(cluster(3), plan([[0, 1], [2]], reverse_first_k=2, carried_updates=1))
    left = lose(carrying, 1)
    growth = Replanner(None, needs_all_gradients=True).growth(left, by_addresses(carrying), ["10.0.0.2:1"])
    assert growth is not None
    assert growth.deployment.plan.carried_updates == 0  # The model has been compiled anew since.
