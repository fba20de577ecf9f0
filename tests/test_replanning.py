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
from dapple_tf.planning.replanning import Deployment, Growth, Replanner, shrink, without_servers

CUTS = ["a", "b", "c"]


def cluster(servers: int, per_server: int = 1) -> Cluster:
    pairs = [(server, index) for server in range(servers) for index in range(per_server)]
    devices = tuple(Device(f"/job:worker/replica:0/task:{s}/device:CPU:{i}", s) for s, i in pairs)
    return Cluster(devices, addresses=tuple(f"10.0.0.{server + 1}:1" for server in range(servers)))


def plan(devices: list[list[int]], **options: Any) -> dapple.Plan:
    return dapple.Plan.manual(CUTS[: len(devices) - 1], devices, 4, 16, **options)


def test_servers_that_are_left_are_numbered_anew() -> None:
    after = without_servers(cluster(3, 2), [1])
    assert after.addresses == ("10.0.0.1:1", "10.0.0.3:1") and after.num_servers == 2
    assert after.devices == cluster(2, 2).devices
    with pytest.raises(DappleError, match="no worker is left"):
        without_servers(cluster(3, 2), [0, 1, 2])


@pytest.mark.parametrize(
    ("devices", "lost", "cuts", "left"),
    [
        pytest.param([[0], [1, 2], [3]], [1], ["a", "b"], [[0], [1], [2]], id="a replica"),
        pytest.param([[0], [1, 2], [3]], [3], ["a"], [[0], [1, 2]], id="the last stage joins the one before"),
        pytest.param([[0], [1], [2], [3]], [0], ["b", "c"], [[0], [1], [2]], id="the first joins the one after"),
        pytest.param([[0], [1], [2], [3]], [1, 2], ["c"], [[0], [1]], id="two stages in the middle"),
        pytest.param([[0], [1], [2], [3]], [0, 1], ["c"], [[0], [1]], id="the first two"),
        pytest.param([[0, 1], [2]], [1, 2], [], [[0]], id="down to one device"),
        pytest.param([[2, 3], [0, 1]], [0], ["a"], [[1, 2], [0]], id="stages in another order than devices"),
    ],
)
def test_a_shrunk_plan(devices: list[list[int]], lost: list[int], cuts: list[str], left: list[list[int]]) -> None:
    shrunk = shrink(plan(devices), cluster(4), lost)
    assert list(shrunk.cuts) == cuts
    assert [list(replicas) for replicas in shrunk.devices] == left
    assert (shrunk.micro_batches, shrunk.global_batch_size) == (4, 16)
    shrunk.validate_on(without_servers(cluster(4), lost))
    assert shrink(plan([[0, 2], [1, 3]]), cluster(2, 2), [0]).devices, "all devices of a server go at once"


def test_replicas_that_place_operators_go_with_any_of_their_devices_but_the_last() -> None:
    placed = dapple.Plan.data_parallel(4, 16).with_placed_operators(2)
    left = [shrink(placed, cluster(4), lost).operator_devices for lost in ([1], [1, 2])]
    assert left == [(((1, 2),),), (((0, 1),),)]


def test_stages_that_join_keep_as_little_as_the_leanest_of_them() -> None:
    before = plan([[0], [1], [2], [3]], recompute=("boundary", "none", "min_cut", "none"))
    left = [shrink(before, cluster(4), lost).options["recompute"] for lost in ([0], [2], [0, 2])]
    assert left == [("boundary", "min_cut", "none"), ("boundary", "min_cut", "none"), ("boundary", "none")]


@pytest.mark.parametrize(
    ("devices", "options", "lost", "left"),
    [
        ([[0], [1], [2]], {"schedule": "zb_h2"}, [1], {"zb_h2"}),
        # Another schedule is taken where it doesn't fit the remaining stages.
        ([[0, 1], [2, 3], [0, 1], [2, 3]], {"schedule": "interleaved"}, [0], {"interleaved", "dapple_a"}),
        ([[0, 1], [2, 3], [0, 1], [2, 3]], {"schedule": "interleaved"}, [0, 1], {"interleaved", "dapple_a"}),
        ([[0], [1], [1], [0]], {"schedule": "zb_v"}, [0], {"zb_v", "dapple_a"}),
        ([[0, 1], [2]], {"reverse_first_k": 2, "carried_updates": 1}, [1], {"dapple_a"}),
    ],
)
def test_schedules_of_shrunk_plans(
    devices: list[list[int]], options: dict[str, Any], lost: list[int], left: set[str]
) -> None:
    own = cluster(max(map(max, devices)) + 1)
    shrunk = shrink(plan(devices, **options), own, lost)
    shrunk.validate_on(without_servers(own, lost))
    assert shrunk.schedule in left and shrunk.carried_updates == 0


# ---- workers that have come back


def lose(deployment: Deployment, *lost: int, replanner: Replanner | None = None) -> Deployment:
    return (replanner or Replanner(None)).without(deployment, lost, {})


def grown(
    left: Deployment, former: list[Deployment], *numbers: int, replanner: Replanner | None = None
) -> Growth | None:
    """What the return of these workers gives."""
    addresses = [f"10.0.0.{number + 1}:1" for number in numbers]
    return (replanner or Replanner(None)).growth(left, {own.cluster.addresses: own for own in former}, addresses)


def test_the_former_plan_is_taken_again() -> None:
    """With the settings that were dropped as it shrank, and on the same numbers."""
    full = Deployment(cluster(3), plan([[0, 1], [2]], reverse_first_k=2, carried_updates=1))
    growth = grown(lose(full, 1), [full], 1)
    assert growth is not None
    assert (growth.deployment, growth.added, growth.gain) == (full, ("10.0.0.2:1",), "the gain isn't predicted")
    assert shrink(full.plan, full.cluster, [2]).reverse_first_k == 1
    needing = Replanner(None, needs_all_gradients=True)
    growth = grown(lose(full, 1), [full], 1, replanner=needing)
    assert growth is not None
    assert growth.deployment.plan.carried_updates == 0, "the model has been compiled anew since"


def test_some_of_the_lost_workers_come_back() -> None:
    full = Deployment(cluster(4), plan([[0], [1], [2], [3]]))
    three = lose(full, 1)
    two = lose(three, 0)
    one, other, both = (grown(two, [full, three], *numbers) for numbers in ([0], [1], [0, 1]))
    assert one is not None and other is not None and both is not None
    assert one.deployment == three
    assert other.deployment.cluster.addresses == ("10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1")
    assert other.deployment.plan == shrink(full.plan, full.cluster, [0])
    assert (both.deployment, both.added) == (full, ("10.0.0.1:1", "10.0.0.2:1"))


def test_workers_that_the_plan_does_not_use_are_not_taken_in() -> None:
    """That would cost a pause, and gain nothing."""
    full = Deployment(cluster(3), plan([[0], [1]]))
    # A worker in reserve, one that is there already, and one that nobody knows.
    assert [grown(lose(full, 2), [full], number) for number in (2, 1, 8)] == [None] * 3


def workers_of(count: int, **links: Any) -> Cluster:
    return dataclasses.replace(cluster_of(*[1] * count, **links), addresses=cluster(count).addresses)


def test_a_worker_in_reserve_takes_the_place_of_a_lost_one() -> None:
    """With a profile: the plan left its device out, and the next one is for all that are there."""
    full = Deployment(workers_of(3, inter_bandwidth=1e12), dapple.Plan.data_parallel(2, 32))
    left = lose(full, 1, replanner=Replanner(profile_of()))
    assert left.cluster.addresses == ("10.0.0.1:1", "10.0.0.3:1")
    assert {device for replicas in left.plan.working_devices for device in replicas} == {0, 1}


@pytest.mark.parametrize(("bandwidth", "gains"), [(1e12, True), (1e3, False)])
def test_a_profile_tells_whether_the_step_becomes_faster(bandwidth: float, gains: bool) -> None:
    """A plan of the user's, data parallel over links that may be too slow for it."""
    full = Deployment(workers_of(4, inter_bandwidth=bandwidth), dapple.Plan.data_parallel(4, 32))
    replanner = Replanner(profile_of())
    growth = grown(lose(full, 3, replanner=replanner), [full], 3, replanner=replanner)
    assert (growth is not None) == gains
    if growth is not None:
        assert growth.deployment == full and growth.present is not None and growth.latency is not None
        assert growth.latency < growth.present
        milliseconds = f"{growth.latency * 1e3:.4g} ms instead of {growth.present * 1e3:.4g} ms"
        assert growth.gain == f"a step is predicted to take {milliseconds}"


def test_a_present_plan_that_does_not_fit_in_memory_is_left_at_once() -> None:
    """Without a plan that fits, the shrunk one stays, whose step can't be simulated."""
    replanner = Replanner(profile_of(parameters=10**8))
    two, one = dapple.Plan.straight(["layer_3"], 32, 4), dapple.Plan.manual([], [[0]], 4, 32)

    def fit(memory: int) -> list[bool]:
        known = cluster_of(1, 1, memory=memory)
        return [math.isfinite(replanner._latency(Deployment(known, own))) for own in (two, one)]

    memory = next(size for size in range(10**8, 10**10, 10**8) if fit(size) == [True, False])
    full = Deployment(workers_of(2, memory=memory), two)
    growth = grown(Deployment(without_servers(full.cluster, [1]), one), [full], 1, replanner=replanner)
    assert growth is not None
    assert growth.gain == "by the profile, the present plan doesn't fit the devices' memory"


def test_new_plans_carry_no_updates_that_the_optimizer_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner was asked for any plan: the engine refused one with carried updates, in the middle of a recovery."""
    asked: list[Any] = []

    def plan_anew(known: dapple.Plan, profile: dapple.Profile, cluster: dapple.Cluster, only: Any) -> dapple.Plan:
        asked.append(only)
        return plan([[0], [1]])

    monkeypatch.setattr(replanning, "plan_anew", plan_anew)
    full = Deployment(cluster(3), plan([[0], [1], [2]]))
    for needs_all in (True, False):
        lose(full, 2, replanner=Replanner(profile_of(), needs_all_gradients=needs_all))
    assert "carried_updates" not in asked[0] and "chunks" in asked[0] and asked[1] is None
