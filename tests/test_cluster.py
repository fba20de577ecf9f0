"""Clusters: this machine's devices, and descriptions to plan for."""

import contextlib
import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hardware import show_gpus, two_on_each_machine
from tensorflow.python.eager import context

from dapple_tf.clusters.session import session_config
from dapple_tf.describe import machine_report
from dapple_tf.describe.cluster import Cluster, ClusterError, Device, Link, Server
from dapple_tf.network import inquiry
from dapple_tf.planning.replanning import without_servers

DESCRIPTION: dict[str, Any] = {
    "format": "dapple_tf.cluster/1",
    "servers": [{"devices": 2, "memory_bytes": 16 * 2**30}, {"devices": 1, "memory_bytes": [32 * 2**30]}],
    "intra_bandwidth": 130e9,
    "inter_bandwidth": 3.125e9,
    "intra_latency": 5e-6,
    "inter_latency": 3e-5,
}


def test_local_cpu_devices_have_fully_qualified_names_on_one_server() -> None:
    cluster = Cluster.local(2, memory_bytes=1000, kind="cpu")
    assert cluster.device_names == (
        "/job:localhost/replica:0/task:0/device:CPU:0",
        "/job:localhost/replica:0/task:0/device:CPU:1",
    )
    assert cluster.num_devices == 2
    assert cluster.real
    assert {(device.server, device.memory_bytes) for device in cluster.devices} == {(0, 1000)}


@pytest.mark.parametrize(("present", "expected"), [(0, "CPU"), (1, "CPU"), (2, "GPU"), (8, "GPU")])
def test_auto_takes_gpus_only_if_there_are_enough(monkeypatch: pytest.MonkeyPatch, present: int, expected: str) -> None:
    show_gpus(monkeypatch, present)
    names = Cluster.local(2, 2**30).device_names
    assert names == tuple(f"/job:localhost/replica:0/task:0/device:{expected}:{index}" for index in range(2))


def test_auto_asks_tensorflow_for_this_machines_gpus() -> None:
    expected = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    assert Cluster.local(1).device_names == (f"/job:localhost/replica:0/task:0/device:{expected}:0",)


def test_more_gpus_than_this_machine_has_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, 1)
    assert Cluster.local(1, 2**30, kind="gpu").device_names == ("/job:localhost/replica:0/task:0/device:GPU:0",)
    with pytest.raises(ClusterError, match="asked for 2 GPUs, but TensorFlow sees 1 here"):
        Cluster.local(2, kind="gpu")


def test_cpu_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, 8)
    assert Cluster.local(1, kind="cpu").device_names == ("/job:localhost/replica:0/task:0/device:CPU:0",)


@pytest.mark.parametrize("count", [0, -3])
def test_a_local_cluster_without_devices_is_refused(count: int) -> None:
    with pytest.raises(ClusterError, match=f"a local cluster of {count} devices was asked for; ask for at least 1"):
        Cluster.local(count)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ClusterError, match="unknown kind of device 'tpu'; use one of auto, cpu, gpu"):
        Cluster.local(1, kind="tpu")


def test_a_description_numbers_devices_server_by_server_and_is_not_real(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DESCRIPTION))
    cluster = Cluster.load(path)
    assert cluster.devices == (
        Device("/job:worker/replica:0/task:0/device:GPU:0", 0, 16 * 2**30),
        Device("/job:worker/replica:0/task:0/device:GPU:1", 0, 16 * 2**30),
        Device("/job:worker/replica:0/task:1/device:GPU:0", 1, 32 * 2**30),
    )
    assert not cluster.real
    assert (cluster.intra_bandwidth, cluster.inter_bandwidth) == (130e9, 3.125e9)
    assert (cluster.intra_latency, cluster.inter_latency) == (5e-6, 3e-5)


def test_memory_and_links_may_be_left_out_of_a_description() -> None:
    cluster = Cluster.from_json('{"format": "dapple_tf.cluster/1", "servers": [{"devices": 2}]}')
    assert [device.memory_bytes for device in cluster.devices] == [None, None]
    assert cluster.inter_bandwidth is None


@pytest.mark.parametrize(
    "servers",
    [
        [{"devices": 8, "memory_bytes": 5}],
        [{"devices": 2, "memory_bytes": [5, None]}, {"devices": 1}],
        [{"devices": 1}],
        [{"devices": 2, "speed": 0.5}, {"devices": 2, "speed": [1.0, 2.0]}],
        [{"devices": 4, "capacity": 2.0}, {"devices": 1}],
        [{"devices": 1}, {"devices": 1, "intra_bandwidth": 1e9, "inter_bandwidth": 2e9, "inter_latency": 0.0}],
        [{"devices": 1, "intra_latency": 1e-6, "capacity": 0.5, "memory_bytes": 7, "speed": 3.0}],
    ],
)
@pytest.mark.parametrize(
    "reduction", [{}, {"reduce_bandwidth": 1e8}, {"reduce_bandwidth": 1e8, "reduce_latency": 1e-4}]
)
def test_a_saved_description_loads_back_equal(tmp_path: Path, servers: list[Any], reduction: dict[str, float]) -> None:
    cluster = Cluster.from_json(json.dumps(DESCRIPTION | reduction | {"servers": servers}))
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_saved_local_cluster_loads_back_as_a_description(tmp_path: Path) -> None:
    Cluster.local(2, memory_bytes=7, kind="cpu").save(tmp_path / "cluster.json")
    loaded = Cluster.load(tmp_path / "cluster.json")
    assert not loaded.real
    assert [(device.server, device.memory_bytes) for device in loaded.devices] == [(0, 7), (0, 7)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other/1"}, "'format' is 'other/1'; this version reads 'dapple_tf.cluster/1'"),
        ({"speed": 1}, "unknown key 'speed'; the keys are format, servers, "),
        ({"servers": []}, "'servers' is []; it must be a list of at least one server"),
        ({"servers": {"devices": 1}}, "'servers' is {'devices': 1}; it must be a list of at least one server"),
        ({"servers": [8]}, 'server 0 is 8; it must be an object such as {"devices": 8}'),
        ({"servers": [{"devices": 1}, {}]}, "server 1: key 'devices' is missing"),
        (
            {"servers": [{"devices": 1, "gpus": 1}]},
            "server 0: unknown key 'gpus'; the keys are devices, memory_bytes, speed",
        ),
        ({"servers": [{"devices": 0}]}, "server 0: 'devices' is 0; it must be a whole number from 1"),
        ({"servers": [{"devices": True}]}, "server 0: 'devices' is True; it must be a whole number from 1"),
        (
            {"servers": [{"devices": 1, "memory_bytes": "16G"}]},
            "server 0: 'memory_bytes' has '16G'; it must be a whole number of bytes or null",
        ),
        (
            {"servers": [{"devices": 2, "memory_bytes": [1]}]},
            "server 0: 'memory_bytes' has 1 entries for 2 devices; give one for each",
        ),
        (
            {"servers": [{"devices": 1, "memory_bytes": 0}]},
            "device 0 has memory_bytes 0; give at least 1, or None for unknown",
        ),
        ({"inter_bandwidth": "25 Gbps"}, "'inter_bandwidth' is '25 Gbps'; it must be a number or null"),
        (
            {"inter_bandwidth": 0},
            "inter_bandwidth is 0 bytes/s; it must be above 0 and finite, or None for unknown",
        ),
        ({"intra_bandwidth": float("nan")}, "intra_bandwidth is nan bytes/s; it must be above 0 and finite"),
        (
            {"servers": [{"devices": 2, "speed": [1.0]}]},
            "server 0: 'speed' has 1 entries for 2 devices; give one for each",
        ),
        ({"servers": [{"devices": 1, "speed": "fast"}]}, "server 0: 'speed' has 'fast'; it must be a number"),
        ({"servers": [{"devices": 1, "speed": None}]}, "server 0: 'speed' has None; it must be a number"),
        ({"servers": [{"devices": 1, "speed": True}]}, "server 0: 'speed' has True; it must be a number"),
        (
            {"servers": [{"devices": 2, "speed": [1, 0]}]},
            "device 1 has speed 0; it must be above 0 and finite",
        ),
        (
            {"servers": [{"devices": 1, "speed": float("inf")}]},
            "device 0 has speed inf; it must be above 0 and finite",
        ),
        ({"servers": [{"devices": 1, "capacity": "2"}]}, "server 0: 'capacity' is '2'; it must be a number or null"),
        ({"servers": [{"devices": 1, "capacity": 0}]}, "capacity of server 0 is 0; it must be above 0 and finite"),
        (
            {"servers": [{"devices": 1, "inter_latency": -1}]},
            "inter_latency of server 0 is -1 s; it must be at least 0 and finite, or None for unknown",
        ),
        (
            {"servers": [{"devices": 1, "inter_bandwidth": [1e9]}]},
            "server 0: 'inter_bandwidth' is [1000000000.0]; it must be a number or null",
        ),
        ({"reduce_bandwidth": "1G"}, "'reduce_bandwidth' is '1G'; it must be a number or null"),
        ({"reduce_bandwidth": 0}, "reduce_bandwidth is 0 bytes/s; it must be above 0 and finite, or None for unknown"),
        ({"reduce_latency": -1}, "reduce_latency is -1 s; it must be at least 0 and finite, or None for unknown"),
        ({"intra_latency": -1e-6}, "intra_latency is -1e-06 s; it must be at least 0 and finite, or None for unknown"),
    ],
)
def test_a_wrong_description_is_refused_with_its_file_and_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DESCRIPTION | change))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("key", ["format", "servers"])
def test_a_description_without_a_required_key_is_refused(key: str) -> None:
    text = json.dumps({name: value for name, value in DESCRIPTION.items() if name != key})
    with pytest.raises(ClusterError, match=f"mine: key '{key}' is missing"):
        Cluster.from_json(text, source="mine")


@pytest.mark.parametrize(("text", "message"), [("{", "mine isn't JSON: "), ("[]", "mine has a JSON list where")])
def test_a_text_that_is_no_json_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(text, source="mine")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "the cluster has no devices; give it at least one"),
        ([Device("a", 0), Device("a", 0)], "devices 0 and 1 are both 'a'"),
        ([Device("a", 1)], "device 0 is in server 1, where 0 is expected; number the servers from 0 without gaps"),
        ([Device("a", 0), Device("b", 2)], "device 1 is in server 2, where 0 or 1 is expected"),
        ([Device("a", 0), Device("b", 1), Device("c", 0)], "device 2 is in server 0, where 1 or 2 is expected"),
    ],
)
def test_inconsistent_devices_are_refused(devices: list[Device], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster(tuple(devices))
    assert message in str(caught.value)


@pytest.mark.parametrize("bandwidth", [0, -1])
def test_a_servers_own_bandwidth_is_above_0(bandwidth: float) -> None:
    servers = [{"devices": 1}, {"devices": 1, "intra_bandwidth": bandwidth}]
    with pytest.raises(ClusterError, match=f"intra_bandwidth of server 1 is {bandwidth} bytes/s; it must be above 0"):
        Cluster.from_json(json.dumps(DESCRIPTION | {"servers": servers}))


def test_as_many_servers_are_described_as_there_are() -> None:
    with pytest.raises(ClusterError, match="the description has 1 server, but the devices are in 2"):
        Cluster((Device("a", 0), Device("b", 1)), servers=(Server(),))


def test_servers_without_anything_of_their_own_are_left_out() -> None:
    assert Cluster.from_json(json.dumps(DESCRIPTION)).servers == ()
    servers = [{"devices": 1, "capacity": None}, {"devices": 1, "inter_latency": None}]
    assert Cluster.from_json(json.dumps(DESCRIPTION | {"servers": servers})).servers == ()


def test_a_description_may_give_each_device_its_speed() -> None:
    servers = [{"devices": 2, "speed": [1, 0.5]}, {"devices": 2, "speed": 2}, {"devices": 1}]
    cluster = Cluster.from_json(json.dumps(DESCRIPTION | {"servers": servers}))
    assert [device.speed for device in cluster.devices] == [1, 0.5, 2, 2, 1.0]


def test_a_link_is_the_servers_or_the_slower_network_card() -> None:
    servers = [
        {"devices": 2},
        {"devices": 2, "intra_bandwidth": 5e9, "intra_latency": 1e-6, "inter_bandwidth": 1e9},
        {"devices": 1, "inter_bandwidth": 9e9, "inter_latency": 4e-5},
    ]
    cluster = Cluster.from_json(json.dumps(DESCRIPTION | {"servers": servers}))
    assert cluster.link(0, 1) == cluster.link(1, 0) == Link(130e9, 5e-6)
    assert cluster.link(2, 3) == Link(5e9, 1e-6)
    assert cluster.link(0, 2) == cluster.link(3, 1) == Link(1e9, 3e-5)
    assert cluster.link(0, 4) == Link(3.125e9, 4e-5)
    assert cluster.link(4, 3) == Link(1e9, 4e-5)


def test_an_unknown_link_is_free() -> None:
    cluster = Cluster((Device("a", 0), Device("b", 0), Device("c", 1)), inter_latency=1e-3)
    assert cluster.link(0, 1).seconds(10**9) == 0
    assert cluster.link(0, 2).seconds(10**9) == 1e-3


def test_sending_takes_latency_and_bytes_over_bandwidth() -> None:
    assert Link(bandwidth=1e9, latency=1e-3).seconds(5e8) == pytest.approx(0.501)


def test_several_workers_are_one_server() -> None:
    own = dataclasses.replace(
        two_on_each_machine(4), intra_bandwidth=None, inter_bandwidth=1e6
    ).with_workers_per_server(2)
    assert [device.server for device in own.devices] == [0, 0, 1, 1] and own.num_servers == 2
    assert own.inter_bandwidth is None, "other links are inside servers now"
    assert own.device_names == two_on_each_machine(4).device_names and own.addresses == two_on_each_machine(4).addresses
    assert [own.worker_of(device) for device in range(4)] == [0, 1, 2, 3]
    assert own.devices_of(1) == (2, 3) and own.devices_of_worker(2) == (2,)
    left = without_servers(own, [1])
    assert [device.server for device in left.devices] == [0, 1, 1] and len(left.addresses) == 3
    assert [left.worker_of(device) for device in range(3)] == [0, 1, 2]
    assert without_servers(own, [0, 1]).num_servers == 1


def test_one_worker_on_each_server_is_how_it_was() -> None:
    measured = dataclasses.replace(two_on_each_machine(4), inter_bandwidth=1e6)
    assert measured.with_workers_per_server(1) == measured, "what was measured of links had been forgotten"


def test_workers_of_one_server_dont_share_memory() -> None:
    """Their CPU devices counted as devices of one process, and predicted memory lacked the copies on the second one."""
    own = Cluster.of_servers(two_on_each_machine(4).addresses, devices_per_server=2).with_workers_per_server(2)
    assert own.devices_of(0) == (0, 1, 2, 3) and own.devices_of_worker(1) == (2, 3)
    assert [own.shares_memory(0, other) for other in range(4)] == [True, True, False, False]
    local = Cluster.local(2, kind="cpu")
    assert local.shares_memory(0, 1) and not two_on_each_machine(2).shares_memory(0, 1)
    assert not Cluster.from_json(json.dumps(DESCRIPTION)).shares_memory(0, 1), "GPUs have memory of their own"


def test_a_description_of_several_workers_has_their_servers(tmp_path: Path) -> None:
    own = Cluster.of_servers(two_on_each_machine(4).addresses, devices_per_server=2).with_workers_per_server(2)
    measured = dataclasses.replace(own, intra_bandwidth=2e9, inter_bandwidth=6e6)
    measured.save(tmp_path / "cluster.json")
    described = Cluster.load(tmp_path / "cluster.json")
    assert [device.server for device in described.devices] == [device.server for device in own.devices]
    assert described.link(1, 2) == measured.link(1, 2) and described.link(0, 4) == measured.link(0, 4)
    assert described.devices_of_worker(1) == described.devices_of(1) == (4, 5, 6, 7), "it knows of no workers"


@pytest.mark.parametrize("count", [0, 3])
def test_workers_that_cant_be_divided_into_servers_are_refused(count: int) -> None:
    with pytest.raises(ClusterError, match=f"4 workers can't be divided into servers of {count}; give a divisor of 4"):
        two_on_each_machine(4).with_workers_per_server(count)
    with pytest.raises(ClusterError, match=f"no workers to put together on servers of {count}"):
        Cluster.local(2, kind="cpu").with_workers_per_server(count)
    with pytest.raises(ClusterError, match="put workers together before links are measured"):
        two_on_each_machine(4).with_workers_per_server(2).with_workers_per_server(2)


def test_capacity_is_the_servers_own_or_one_for_each_device() -> None:
    servers = [{"devices": 4, "capacity": 2}, {"devices": 3}]
    described = Cluster.from_json(json.dumps(DESCRIPTION | {"servers": servers}))
    assert (described.capacity(0), described.capacity(1)) == (2, 3)
    assert Cluster.from_json(json.dumps(DESCRIPTION)).capacity(0) == 2


def test_a_cluster_prints_a_summary() -> None:
    assert str(Cluster.from_json(json.dumps(DESCRIPTION))) == (
        "Cluster (description): 2 servers of 2+1 devices, 16 to 32 GiB each\n"
        "  /job:worker/replica:0/task:0/device:GPU:0 to /job:worker/replica:0/task:1/device:GPU:0\n"
        "  inside a server: 130 GB/s, 5 us\n"
        "  between servers: 3.125 GB/s, 30 us"
    )
    assert str(Cluster.local(1, kind="cpu")) == (
        "Cluster (real): 1 server of 1 device, memory unknown\n"
        "  /job:localhost/replica:0/task:0/device:CPU:0\n"
        "  inside a server: bandwidth unknown, latency unknown\n"
        "  between servers: bandwidth unknown, latency unknown"
    )


def test_a_summary_says_for_how_many_devices_memory_is_known() -> None:
    cluster = Cluster((Device("a", 0, 2**30), Device("b", 0)))
    assert "1 server of 2 devices, 1 GiB each (known for 1 of 2)" in str(cluster)


# ---- GPUs of this machine


def told(*reports: dict[str, Any]) -> Any:
    """Processes that report, one after another."""
    texts = iter([json.dumps({"versions": {}, **report}) for report in reports])
    return lambda *_, **__: subprocess.CompletedProcess([], 0, f"{next(texts)}\n", "")


@pytest.mark.parametrize("made", [False, True])
def test_local_gpus_have_the_memory_that_tensorflow_gets(monkeypatch: pytest.MonkeyPatch, made: bool) -> None:
    """Asked in other processes, in which they are made, unless this one has made them.

    A worker that started beside one that was ending had too little.
    """
    show_gpus(monkeypatch, 3)
    asked = {"gpus": [{"memory_bytes": 7}, {"memory_bytes": 8}, {"memory_bytes": 9}]}
    beside_another = {"gpus": [{"memory_bytes": 1}] * 3}
    monkeypatch.setattr(machine_report.subprocess, "run", told(beside_another, asked))
    machine_report.report.cache_clear()
    if made:
        context.context().ensure_initialized()
    cluster = Cluster.local(2)
    assert [device.memory_bytes for device in cluster.devices] == ([2**34, 2**34 + 1] if made else [7, 8])
    assert {device.kind for device in cluster.devices} == {"NVIDIA H200, compute capability 9.0"}
    options = session_config(cluster).gpu_options
    assert (options.visible_device_list, options.allow_growth) == ("0,1", True)
    assert session_config(Cluster.local(2, kind="cpu")).device_count == {"CPU": 2, "GPU": 0}


def test_logical_gpus_are_devices_as_the_process_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One card makes several devices; a session that didn't know would map GPU:1 to another card, which TensorFlow
    refuses."""
    show_gpus(monkeypatch, 2)
    card, _ = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(card, "GPU")
    tf.config.set_logical_device_configuration(card, [tf.config.LogicalDeviceConfiguration(2**10)] * 3)
    context.context().ensure_initialized()
    cluster = Cluster.local(3, kind="gpu")
    assert [device.memory_bytes for device in cluster.devices] == [2**30] * 3
    (logical,) = (options := session_config(cluster).gpu_options).experimental.virtual_devices
    assert options.visible_device_list == "0" and list(logical.memory_limit_mb) == [2**10] * 3


@pytest.mark.parametrize("made", [False, True])
def test_a_client_leaves_gpus_to_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, made: bool
) -> None:
    """It took all memory of all GPUs, also those that a worker on its machine lends; now it says so if it has."""
    show_gpus(monkeypatch, 2)
    if made:
        context.context().ensure_initialized()
    lent = [{"kind": "GPU", **gpu} for gpu in machine_report.own_gpus(b"")]
    machine = lent[0]["card"].partition(" of ")[2]
    assert [gpu["card"] for gpu in lent] == [f"0000:{card:02x}:00.0 of {machine}" for card in range(2)]
    answers = {"a:1": lent[:1], "b:1": [lent[0] | {"card": "0000:00:00.0 of machine other"}], "c:1": lent[:1]}

    def hello(task: int, address: str, *_: Any) -> Any:
        return contextlib.ExitStack(), {"devices": answers[address]}

    monkeypatch.setattr(inquiry, "hello", hello)
    with pytest.raises(
        ClusterError, match=r"workers 0 \(a:1\) and 2 \(c:1\) both lend the GPU 0000:00:00.0 of machine .*: start"
    ):
        Cluster.of_servers(["a:1", "b:1", "c:1"])
    assert Cluster.of_servers(["a:1", "b:1"]).num_devices == 2
    assert len(tf.config.get_visible_devices("GPU")) == 2 * made
    assert [text.partition(":")[0] for text in caplog.messages] == [
        f"this process ({os.getpid()}) keeps up to 16 GiB of memory, which workers will lack, on each GPU of theirs "
        f"that it has made devices of already (0000"
    ] * made
    if not made:
        with pytest.raises(ClusterError, match="sees 0 here"):
            Cluster.local(1, kind="gpu")


def test_parts_of_a_card_are_lent_by_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, 1, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert [gpu["card"] for gpu in machine_report.own_gpus(b"")] == [""]
