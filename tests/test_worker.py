"""Servers: a model trains on two of them as on one device, and mistakes are told."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import pytest

import dapple_tf as dapple
from dapple_tf.cluster import ClusterError
from dapple_tf.session import server_config, session_config
from dapple_tf.worker import server


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine whose ports nobody has."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{item.getsockname()[1]}" for item in sockets]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dapple_tf.worker", *arguments]


@contextlib.contextmanager
def serving(addresses: Sequence[str], devices: int) -> Iterator[None]:
    """A server for each address, each a process of its own; none is left afterwards, whatever happens."""
    with contextlib.ExitStack() as stack:
        processes = []
        for task in range(len(addresses)):
            process = subprocess.Popen(
                command(f"--addresses={','.join(addresses)}", f"--task={task}", f"--devices={devices}"),
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for address, process in zip(addresses, processes, strict=True):
            assert process.stdout is not None
            told = f"serving {devices} devices on {address} (process {process.pid})\n"
            assert process.stdout.readline() == told
        yield


def small_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(16, activation="relu", name=name) for name in ("a", "b")]
    model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1, name="c")])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def test_training_on_two_servers_equals_plain_keras() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(16, 8)).astype("float32")
    y = x[:, :1]
    plain = small_model()
    wanted = [float(plain.train_on_batch(x, y)) for _ in range(4)]
    addresses = free_addresses(2)
    with serving(addresses, devices=2):
        cluster = dapple.Cluster.of_servers(addresses, devices_per_server=2)
        model = small_model()
        pipelined = dapple.transform(model, cluster, dapple.Plan.data_parallel([0, 2], 16))
        got = [float(pipelined.train_on_batch(x, y)) for _ in range(4)]
        np.testing.assert_allclose(pipelined.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
        pipelined.close()

        # A session of its own, with variables of the same names, on the same servers: a pipeline over both.
        other = small_model()
        straight = dapple.transform(other, cluster, dapple.Plan.manual(["a"], [[0, 1], [3]], 2, 16))
        across = [float(straight.train_on_batch(x, y)) for _ in range(4)]
        straight.close()
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    np.testing.assert_allclose(across, wanted, rtol=1e-5)
    for trained in (model, other):
        for value, reference in zip(trained.variables, plain.variables, strict=True):
            np.testing.assert_allclose(value.numpy(), reference.numpy(), rtol=1e-4, atol=1e-6, err_msg=reference.path)


def test_cluster_of_servers() -> None:
    cluster = dapple.Cluster.of_servers(["10.0.0.1:2222", "b:80"], devices_per_server=2, memory_bytes=100)
    assert cluster.target == "grpc://10.0.0.1:2222"
    assert cluster.real
    assert cluster.device_names == tuple(
        f"/job:worker/replica:0/task:{task}/device:CPU:{index}" for task in range(2) for index in range(2)
    )
    assert [device.server for device in cluster.devices] == [0, 0, 1, 1]
    assert {device.memory_bytes for device in cluster.devices} == {100}
    assert cluster.host_device == "/job:worker/replica:0/task:0/device:CPU:0"
    assert dapple.Cluster.local(1).host_device == "/job:localhost/replica:0/task:0/device:CPU:0"
    assert dapple.Cluster.local(1).target == ""


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ([], r"addresses is \[\]; give a list"),
        ("a:1", "addresses is 'a:1'; give a list"),
        (["a:1", "b"], "address 1 is 'b'; write it as 'host:port'"),
        ([":1"], "address 0 is ':1'; write it"),
        (["a:0"], "address 0 is 'a:0'; write it"),
        (["a:65536"], "address 0 is 'a:65536'; write it"),
        (["a:-1"], "address 0 is 'a:-1'; write it"),
        (["a:1", "b:1", "a:1"], "servers 0 and 2 both have the address 'a:1'"),
    ],
)
def test_wrong_addresses(addresses: list[str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        dapple.Cluster.of_servers(addresses)
    with pytest.raises(ClusterError, match=message):
        server(addresses, 0)


def test_wrong_numbers() -> None:
    with pytest.raises(ClusterError, match="devices_per_server is 0"):
        dapple.Cluster.of_servers(["a:1"], devices_per_server=0)
    with pytest.raises(ClusterError, match="task is 1; with 1 addresses it must be 0 to 0"):
        server(["a:1"], 1)
    with pytest.raises(ClusterError, match="devices is 0; a server has at least 1"):
        server(["a:1"], 0, 0)


def test_configurations() -> None:
    config = session_config(dapple.Cluster.of_servers(["a:1", "b:1"]))
    assert config.experimental.collective_group_leader == "/job:worker/replica:0/task:0"
    assert config.isolate_session_state
    assert not config.device_count
    assert server_config(3).device_count["CPU"] == 3
    assert server_config(3).experimental.collective_group_leader == "/job:worker/replica:0/task:0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--addresses=a:1"], "--task is missing"),
        (["--addresses=a", "--task=0"], "address 0 is 'a'"),
        (["--addresses=a:1", "--task=0", "stray"], "unexpected arguments"),
    ],
)
def test_program_tells_mistakes(arguments: list[str], message: str) -> None:
    done = subprocess.run(command(*arguments), capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            command(f"--addresses={address}", "--task=0"), capture_output=True, text=True, env={**os.environ}
        )
    assert done.returncode == 1
    assert f"no server can be started on {address}: is its port taken?" in done.stdout + done.stderr
