"""Plans for the workers that are left."""

from __future__ import annotations

from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.errors import DappleError
from dapple_tf.planning.replanning import shrink, without_servers

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


def test_all_devices_of_a_server_go_at_once() -> None:
    shrunk = shrink(plan([[0, 2], [1, 3]]), cluster(2, 2), [0])
    assert [list(replicas) for replicas in shrunk.devices] == [[0], [1]]


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
