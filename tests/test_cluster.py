"""Clusters: this machine's devices, and descriptions to plan for."""

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
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


@pytest.mark.parametrize(("present", "expected"), [(1, "CPU"), (8, "GPU")])
def test_auto_takes_gpus_only_if_there_are_enough(monkeypatch: pytest.MonkeyPatch, present: int, expected: str) -> None:
    show_gpus(monkeypatch, present)
    names = Cluster.local(2, 2**30).device_names
    assert names == tuple(f"/job:localhost/replica:0/task:0/device:{expected}:{index}" for index in range(2))
    assert "CPU" in Cluster.local(1, kind="cpu").device_names[0]
    if present < 2:
        with pytest.raises(ClusterError, match=f"asked for 2 GPUs, but TensorFlow sees {present} here"):
            Cluster.local(2, kind="gpu")


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


@pytest.mark.parametrize(
    "servers",
    [
        [{"devices": 2, "memory_bytes": [5, None]}, {"devices": 1}],
        [{"devices": 1}],
        [{"devices": 2, "speed": 0.5}, {"devices": 2, "speed": [1.0, 2.0]}],
        [{"devices": 1}, {"devices": 1, "intra_bandwidth": 1e9, "inter_bandwidth": 2e9, "inter_latency": 0.0}],
        [{"devices": 1, "intra_latency": 1e-6, "capacity": 0.5, "memory_bytes": 7, "speed": 3.0}],
    ],
)
def test_a_saved_description_loads_back_equal(tmp_path: Path, servers: list[Any]) -> None:
    reduction = {"reduce_bandwidth": 1e8, "reduce_latency": 1e-4}
    cluster = Cluster.from_json(json.dumps(DESCRIPTION | reduction | {"servers": servers}))
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"servers": []}, "'servers' is []; it must be a list of at least one server"),
        ({"servers": [{"devices": 1, "gpus": 1}]}, "server 0: unknown key 'gpus'; the keys are devices, memory_bytes"),
        ({"servers": [{"devices": 0}]}, "server 0: 'devices' is 0; it must be a whole number from 1"),
        ({"servers": [{"devices": 2, "speed": [1]}]}, "server 0: 'speed' has 1 entries for 2 devices; give one for"),
        ({"servers": [{"devices": 1, "memory_bytes": 0}]}, "device 0 has memory_bytes 0; give at least 1, or None"),
        ({"servers": [{"devices": 2, "speed": [1, 0]}]}, "device 1 has speed 0; it must be above 0 and finite"),
        ({"servers": [{"devices": 1, "capacity": 0}]}, "capacity of server 0 is 0; it must be above 0 and finite"),
        ({"servers": [{"devices": 1, "inter_latency": -1}]}, "inter_latency of server 0 is -1 s; it must be at least"),
        ({"inter_bandwidth": 0}, "inter_bandwidth is 0 bytes/s; it must be above 0 and finite, or None for unknown"),
        ({"reduce_latency": -1}, "reduce_latency is -1 s; it must be at least 0 and finite, or None for unknown"),
    ],
)
def test_a_wrong_description_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.from_json(json.dumps(DESCRIPTION | change), source="mine")
    assert str(caught.value).startswith(f"mine: {message}")


ONE, TWO = Device("a", 0), Device("b", 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Cluster.local(-3), "a local cluster of -3 devices was asked for; ask for at least 1"),
        (lambda: Cluster.local(1, kind="tpu"), "unknown kind of device 'tpu'; use one of auto, cpu, gpu"),
        (lambda: Cluster.from_json("{}", source="mine"), "mine: key 'format' is missing"),
        (lambda: Cluster((ONE, TWO), servers=(Server(),)), "the description has 1 server, but the devices are in 2"),
        (lambda: Cluster((ONE, ONE)), "devices 0 and 1 are both 'a'"),
        (lambda: Cluster((TWO,)), "device 0 is in server 1, where 0 is expected; number the servers from 0 without"),
        (lambda: two_on_each_machine(4).with_workers_per_server(3), "4 workers can't be divided into servers of 3"),
        (lambda: Cluster.local(2, kind="cpu").with_workers_per_server(3), "no workers to put together on servers of"),
        (lambda: two_on_each_machine(4).with_workers_per_server(2).with_workers_per_server(2), "before links are"),
    ],
)
def test_wrong_calls_are_refused(call: Callable[[], Cluster], text: str) -> None:
    with pytest.raises(ClusterError) as caught:
        call()
    assert text in str(caught.value)


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


def test_workers_of_one_server_dont_share_memory() -> None:
    """Their CPU devices counted as devices of one process, and predicted memory lacked the copies on the second one."""
    own = Cluster.of_servers(two_on_each_machine(4).addresses, devices_per_server=2).with_workers_per_server(2)
    assert own.devices_of(0) == (0, 1, 2, 3) and own.devices_of_worker(1) == (2, 3)
    assert [own.shares_memory(0, other) for other in range(4)] == [True, True, False, False]
    local = Cluster.local(2, kind="cpu")
    assert local.shares_memory(0, 1) and not two_on_each_machine(2).shares_memory(0, 1)
    assert not Cluster.from_json(json.dumps(DESCRIPTION)).shares_memory(0, 1), "GPUs have memory of their own"


def test_a_cluster_prints_a_summary() -> None:
    assert str(Cluster.from_json(json.dumps(DESCRIPTION))) == (
        "Cluster (description): 2 servers of 2+1 devices, 16 to 32 GiB each\n"
        "  /job:worker/replica:0/task:0/device:GPU:0 to /job:worker/replica:0/task:1/device:GPU:0\n"
        "  inside a server: 130 GB/s, 5 us\n"
        "  between servers: 3.125 GB/s, 30 us"
    )


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
