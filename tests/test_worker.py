"""A worker lends its devices to one client at a time, whatever clients do, and tells mistakes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from absl import app, flags
from absl.testing import flagsaver
from workers import (
    PATIENCE,
    children,
    client,
    expect,
    has_ended,
    question,
    resident_bytes,
    secret_of,
    status,
    wait_until,
    wish,
)

import dapple_tf as dapple
from dapple_tf import worker as worker_module
from dapple_tf.clusters.serving import Lease, Machine
from dapple_tf.clusters.session import session_config
from dapple_tf.clusters.shared_connections import connected, open_session
from dapple_tf.describe.cluster import ClusterError
from dapple_tf.describe.hardware import cpu_kind
from dapple_tf.describe.machine_report import MachineReport, report
from dapple_tf.network.control import Channel, ControlError, split_address
from dapple_tf.network.versions import own_versions
from dapple_tf.tools.hosts import LocalWorkers, end, free_ports
from dapple_tf.worker import Worker, own_address

Worker_ = tuple[str, int]


@pytest.fixture
def worker(workers: LocalWorkers) -> Worker_:
    """Address and process of one worker, which nobody uses."""
    address, process = workers.addresses[0], workers.processes[0].pid
    wait_until(lambda: status(address)["holder"] is None)  # Threads of a process may end a moment after it has.
    wait_until(lambda: not children(process))
    return address, process


@contextlib.contextmanager
def talking(address: str) -> Iterator[Channel]:
    with contextlib.closing(Channel.connect(address, PATIENCE)) as channel:
        yield channel


@contextlib.contextmanager
def leased(address: str, client: str = "somebody", silence: float = 3600.0) -> Iterator[Channel]:
    """A lease whose server runs."""
    with talking(address) as channel:
        answer = channel.ask(wish(client), PATIENCE)
        assert set(answer) == {"devices", "port", "versions"}, answer
        order = {"cluster": {"worker": [f"127.0.0.1:{answer['port']}"]}, "task": 0, "leader": 0, "silence": silence}
        assert set(channel.ask(order, PATIENCE)) == {"serving"}
        yield channel


# ---- starting


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}, "b:2"),
        ({"cluster": {"worker": ["a:1"]}}, r"TF_CONFIG lacks or garbles 'task'; it looks like"),
        ({"cluster": {}, "task": {"type": "worker", "index": 1}}, "TF_CONFIG lacks or garbles 'worker'"),
        ({"cluster": 1, "task": {"type": "worker", "index": 1}}, "TF_CONFIG lacks or garbles"),
        ([], "TF_CONFIG lacks or garbles"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "this task's type is 'ps'; only tasks"),
        (
            {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}},
            r"task index is 1, but .* \['a:1'\]",
        ),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}, "task index is -1, but"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "0"}}, "task index is '0', but"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": True}}, "task index is True, but"),
        ({"cluster": {"worker": {"0": "a:1"}}, "task": {"type": "worker", "index": 0}}, "the cluster's workers are {"),
        ("{", "TF_CONFIG isn't JSON: Expecting property name"),
        ("[" * 100_000, "TF_CONFIG isn't JSON: maximum recursion depth"),
        ("1" * 10_000, "TF_CONFIG isn't JSON: Exceeds the limit"),
        (None, "the worker's address is missing: give --address=host:port, or set TF_CONFIG"),
    ],
)
def test_own_address(config: Any, expected: str) -> None:
    text = config if isinstance(config, str | None) else json.dumps(config)
    environment = {} if text is None else {"TF_CONFIG": text}
    if expected == "b:2":
        assert own_address(environment) == expected
        return
    with pytest.raises(ClusterError, match=expected):
        own_address(environment)


@pytest.fixture
def _flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flags that a test may change, and signals that `main` does."""
    monkeypatch.setattr(worker_module, "report", MachineReport)
    handler = signal.getsignal(signal.SIGTERM)
    with flagsaver.flagsaver():
        flags.FLAGS(["worker"])
        yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stray"], r"unexpected arguments \['stray'\]"),
        ([], "the worker's address is missing"),
        (["--address=a"], "address 0 is 'a'; write it as 'host:port'"),
        (["--address=127.0.0.1:0"], "address 0 is '127.0.0.1:0'; write it as"),
        (["--address=8.8.8.8:2222"], "'8.8.8.8' is public: the whole Internet may reach it"),
        (["--address=[2001:4860:4860::8888]:2222"], "is public"),
        (["--address=0.0.0.0:2222"], "'0.0.0.0' means all interfaces of this machine"),
        (["--address=no-such-host.invalid:2222"], "the host 'no-such-host.invalid' isn't known"),
        (["--address=192.0.2.77:2222"], "no worker can listen on 192.0.2.77:2222: Cannot assign"),
        (["--address=8.8.8.8:2222", "--allow_public"], "no worker can listen on 8.8.8.8:2222: Cannot assign"),
        (["--address=127.0.0.1:2222", "--gpus=0,1", "--devices=2"], "--gpus and --devices=2 .* exclude each other"),
        (["--address=127.0.0.1:2222", "--server_port=2222"], "--server_port=2222 is the port of --address, too"),
    ],
)
@pytest.mark.usefixtures("_flags")
def test_mistakes_of_the_command_line(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    rest = flags.FLAGS(["worker", *arguments])
    with pytest.raises(app.UsageError, match=message):
        worker_module.main(rest)


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [
        ("--server_port=70000", "[0, 65535]"),
        ("--server_port=-1", "[0, 65535]"),
        ("--devices=-1", "[0, 1000]"),
        ("--devices=1001", "[0, 1000]"),
        ("--memory_bytes=-5", "positive integer"),
        ("--memory_bytes=0", "positive integer"),
    ],
)
@pytest.mark.usefixtures("_flags")
def test_numbers_out_of_range(flag: str, allowed: str) -> None:
    """Workers started with them, and failed at their first client, or lent -5 bytes."""
    with pytest.raises(flags.IllegalFlagValueError) as raised:
        flags.FLAGS(["worker", flag])
    name, _, value = flag.partition("=")
    assert str(raised.value).startswith(f"flag {name}={value}: ") and allowed in str(raised.value)


@pytest.mark.usefixtures("_flags")
def test_the_address_of_tf_config_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"worker": ["8.8.8.8:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(app.UsageError, match=r"'8\.8\.8\.8' is public"):
        worker_module.main(["worker"])


def test_a_worker_listens_on_its_own_address_only(worker: Worker_) -> None:
    host, port = split_address(worker[0])
    assert host == "127.0.0.1"
    with pytest.raises(ControlError, match="can't be reached"):
        Channel.connect(f"127.0.0.2:{port}", 5)
    with leased(worker[0]) as channel:
        assert channel.socket.getpeername() == (host, port)


def test_the_server_of_a_client_is_reached_at_the_worker_s_address_only(worker: Worker_) -> None:
    with talking(worker[0]) as channel:
        port = channel.ask(wish("somebody"), PATIENCE)["port"]
        order = {"cluster": {"worker": [f"127.0.0.1:{port}"]}, "task": 0, "leader": 0, "silence": 60.0}
        channel.ask(order, PATIENCE)
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection(("127.0.0.2", port), 0.3)


def test_a_listener_that_all_may_reach() -> None:
    """--all_interfaces: for containers, which are told an address that isn't their own."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    machine = Machine("127.0.0.1", all_interfaces=True)
    made = Worker(f"127.0.0.1:{port}", machine, all_interfaces=True)
    socket.create_connection(("127.0.0.2", port), 5).close()
    with pytest.raises(ClusterError, match=r"no worker can listen on .*: Address already in use"):
        Worker(f"127.0.0.1:{port}", machine)
    made.close()


# ---- what there is


def test_status(worker: Worker_) -> None:
    answer = status(worker[0])
    (device,) = answer.pop("devices")
    assert answer == {"holder": None, "versions": own_versions()}
    assert device["kind"] == "CPU" and 2**28 < device["memory_bytes"] < 2**50
    with leased(worker[0], "somebody"):
        assert status(worker[0], secret=secret_of("somebody"))["holder"] == "somebody"
    wait_until(lambda: status(worker[0])["holder"] is None)


def test_inventory() -> None:
    memory = 2**30
    three = Machine("h", 3, memory).inventory()
    assert three == [{"kind": "CPU", "memory_bytes": memory, "hardware": cpu_kind(3)}] * 3
    whole = Machine("h", 1).inventory()[0]["memory_bytes"]
    assert [device["memory_bytes"] for device in Machine("h", 4).inventory()] == [whole // 4] * 4


def test_inventory_of_gpus() -> None:
    gpus = tuple({"memory_bytes": size, "hardware": "NVIDIA H200"} for size in (5, 6))
    told = MachineReport({}, gpus)
    assert Machine("h", report=told).inventory() == [{"kind": "GPU", **gpu} for gpu in gpus]
    assert [device["memory_bytes"] for device in Machine("h", memory_bytes=7, report=told).inventory()] == [7, 7]
    assert [device["kind"] for device in Machine("h", 1, report=told).inventory()] == ["CPU"]


def test_a_machine_s_report() -> None:
    """The process that imports TensorFlow for it has ended."""
    assert report() == (own_versions(), ())


def test_a_report_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise OSError('no library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"(?s)asked for this machine's .* ended with code 1: .*OSError: no library"):
        report(b" ")


def test_a_worker_lends_the_gpus_that_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets CUDA_VISIBLE_DEVICES before the library is loaded; two workers lent the same cards."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "before")

    def told() -> MachineReport:
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # as nvidia-smi numbers them
        numbers = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return MachineReport({}, tuple({"memory_bytes": 5, "card": number} for number in numbers if number in "123"))

    monkeypatch.setattr(worker_module, "report", told)
    assert [gpu["card"] for gpu in worker_module._report(["2", "3"]).gpus] == ["2", "3"]
    with pytest.raises(ClusterError, match="--gpus=3,4: TensorFlow sees 1 of these GPUs here; `nvidia-smi -L` lists"):
        worker_module._report(["3", "4"])


def test_a_worker_that_waits_has_no_tensorflow(worker: Worker_) -> None:
    """It took 572 MiB; its processes for clients have TensorFlow's library, but nothing of its Python part."""
    address, process = worker
    with leased(address):
        (child,) = children(process)
        own, served = (pathlib.Path(f"/proc/{number}/maps").read_text() for number in (process, child))
    assert "tensorflow" not in own and "numpy" not in own
    assert "libtensorflow_cc" in served and "_pywrap_tensorflow" not in served and "numpy" not in served


def test_configurations() -> None:
    config = session_config(dapple.Cluster.of_servers(["a:1", "b:1"], devices_per_server=1))
    assert config.experimental.collective_group_leader == "/job:worker/replica:0/task:0"
    assert config.isolate_session_state
    assert not config.device_count


# ---- leases


@pytest.mark.slow
def test_a_second_client_is_told_that_the_worker_is_in_use(worker: Worker_) -> None:
    """It got the worker, too: starting the server closed a copy of the lease's file, which gave up the lock."""
    with leased(worker[0], "host-a process 17"):
        with talking(worker[0]) as other:
            answer = other.ask(wish("host-b process 18"), PATIENCE)
        assert answer["error"].startswith("in use by another client, ")
        assert status(worker[0], secret=secret_of("host-a process 17"))["holder"] == "host-a process 17"
    with leased(worker[0], "host-b process 18"):
        assert status(worker[0], secret=secret_of("host-b process 18"))["holder"] == "host-b process 18"


@pytest.mark.slow
def test_nobody_gets_a_lease_by_its_holder_s_name(worker: Worker_) -> None:
    """Anybody was told the name, and who asked for a lease under it killed the client's server and got the worker."""
    address, process = worker
    with leased(address, "host-a process 17") as channel:
        (child,) = children(process)
        for secret in ("", secret_of("host-b process 18"), "\u00e9" * 64):
            assert status(address, secret=secret)["holder"] == "another client"
        assert status(address)["holder"] == "another client"
        with talking(address) as other:
            answer = other.ask(wish("host-a process 17") | {"secret": "x" * 64}, PATIENCE)
        assert answer["error"].startswith("in use by another client, ") and "host-a" not in answer["error"]
        assert channel.ask({"ping": 1}, PATIENCE) == {"pong": 1}
        wait_until(lambda: children(process) == [child])


def test_the_same_client_takes_over_from_a_connection_that_hangs(worker: Worker_) -> None:
    address, process = worker
    with leased(address, "somebody"):
        (hung,) = children(process)
        os.kill(hung, signal.SIGSTOP)
        started = time.monotonic()
        with leased(address, "somebody"):
            assert time.monotonic() - started < 30
            wait_until(lambda: hung not in children(process))
            assert status(address, secret=secret_of("somebody"))["holder"] == "somebody"


@pytest.mark.thorough
@pytest.mark.slow
def test_a_client_that_comes_back_gets_its_own_and_leaves_others_alone(worker: Worker_) -> None:
    """The lease's file told of the client before for a moment, whose process was killed to take over: another's."""
    address, process = worker
    with leased(address, "first"):
        pass
    with leased(address, "second") as second:
        with talking(address) as other:
            answer = other.ask(wish("first"), PATIENCE)
        assert answer["error"].startswith("in use by another client")
        assert second.ask({"ping": 1}, PATIENCE) == {"pong": 1}
        wait_until(lambda: len(children(process)) == 1)


def test_the_kernel_knows_who_has_a_lease() -> None:
    lease = Lease()
    assert lease.holder() is None
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            assert lease.take("a client", secret_of("a client"))
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        finally:
            os._exit(0)
    assert os.read(ready[0], 1) == b"x"
    holder = lease.holder()
    assert holder is not None and (holder.process, holder.client) == (child, "a client")
    assert holder.owns(secret_of("a client")) and not holder.owns(secret_of("another")) and not holder.owns("")
    assert not lease.take("another", secret_of("another"))
    os.pwrite(lease._file, b"1 digest a client before", 0)  # As a new holder finds it.
    assert lease.holder() == (child, "", "")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert lease.holder() is None
    assert lease.take("another", secret_of("another"))
    for descriptor in (*ready, *done):
        os.close(descriptor)


@pytest.mark.slow
def test_a_client_that_says_nothing_for_long_has_gone(worker: Worker_) -> None:
    """It may be on a machine that was switched off: then no packet tells of its end."""
    address, process = worker
    with leased(address, "somebody", silence=1.0) as channel:
        assert channel.ask({"ping": "any"}, PATIENCE) == {"pong": "any"}
        started = time.monotonic()
        wait_until(lambda: not children(process))
        assert time.monotonic() - started > 0.5
        with pytest.raises(ControlError, match="connection"):
            channel.ask({"ping": 2}, 5)
    assert status(address)["holder"] is None


IN_MID_STEP = """
import sys
import tensorflow as tf
import dapple_tf as dapple
from dapple_tf.clusters.shared_connections import connected, open_session

cluster = dapple.Cluster.of_servers(sys.argv[1:])
with tf.Graph().as_default() as graph:
    with tf.device(cluster.device_names[0]):
        variable = tf.compat.v1.get_variable("v", initializer=17.0, use_resource=True)
        matrix = tf.random.uniform([300, 300])
        endless = tf.while_loop(
            lambda i, x: i < 10**9, lambda i, x: (i + 1, tf.tanh(x @ x)), [0, matrix], parallel_iterations=1
        )[0]
    with connected(cluster), open_session(cluster, graph) as session:
        session.run(variable.initializer)
        print("running", flush=True)
        session.run(endless)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_client_that_dies_in_mid_step_leaves_a_clean_worker(worker: Worker_) -> None:
    """Within two seconds: its endless step has ended, and its variable is forgotten."""
    address, process = worker
    with client(IN_MID_STEP, address) as running:
        expect(running, "running")
        wait_until(lambda: len(children(process)) == 1)
        running.kill()
        wait_until(lambda: not children(process))
    cluster = dapple.Cluster.of_servers([address])
    with tf.Graph().as_default() as graph:
        with tf.device(cluster.device_names[0]):
            variable = tf.compat.v1.get_variable("v", initializer=1.0, use_resource=True)
            there = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
        started = time.monotonic()
        with connected(cluster):
            assert time.monotonic() - started < 30
            with open_session(cluster, graph) as session:
                assert not session.run(there)


def test_a_worker_knocks_at_the_other_servers(worker: Worker_) -> None:
    """Its TensorFlow server would wait for one that can't be reached."""
    address, process = worker
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with talking(address) as channel:
        port = channel.ask(wish("somebody"), PATIENCE)["port"]
        servers = [f"127.0.0.1:{port}", nobody]
        channel.ask({"cluster": {"worker": servers}, "task": 0, "leader": 0, "silence": 60.0}, PATIENCE)
        assert channel.ask({"knock": 5.0}, PATIENCE) == {"unreachable": {nobody: "Connection refused"}}
        channel.send({"knock": float("nan")}, PATIENCE)  # No client of ours.
        wait_until(lambda: not children(process))


@pytest.mark.slow
def test_a_worker_s_death_ends_its_clients_servers(workers: LocalWorkers) -> None:
    address, process = workers.addresses[3], workers.processes[3].pid
    with leased(address) as channel:
        (child,) = children(process)
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: has_ended(child), 5)
        with pytest.raises(ControlError, match="connection"):
            channel.ask({"ping": 1}, 5)


def test_how_a_process_ended_is_told_to_its_client_only(worker: Worker_) -> None:
    """Whoever counted through process numbers was told, too."""
    address, process = worker
    with leased(address, "somebody"):
        (child,) = children(process)
        os.kill(child, signal.SIGSEGV)
        wait_until(lambda: not os.path.exists(f"/proc/{child}"), 5)
    with leased(address, "another"):  # The worker still knows then.
        for secret, expected in (
            (wish("somebody")["secret"], {"ended": "its process was ended by SIGSEGV", "out_of_memory": False}),
            ("x" * 32, {"error": "isn't lent to this process any more"}),
        ):
            with talking(address) as channel:
                assert channel.ask(question("pulse", secret=secret, process=child), PATIENCE) == expected


# ---- clients that aren't any


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        ({}, "speaks None and the worker 'dapple_tf.worker/2'; use the same version of dapple_tf on both"),
        ({"protocol": "dapple_tf.worker/0", "ask": "status"}, "speaks 'dapple_tf.worker/0' and the worker"),
        (question("dance"), "asks for 'dance', which no worker knows"),
        (question([1]), r"asks for [1], which no worker knows"),
        (question("lease"), "'client' is None; it must be of type str"),
        (question("lease", client=1, port=0), "'client' is 1; it must be of type str"),
        (question("lease", client="c"), "'secret' is None; it must be of type str"),
        (wish("c") | {"secret": "x" * 31}, "'secret' has 31 characters; it must have at least 32"),
        (wish("c") | {"port": None}, "'port' is None; it must be of type int"),
        (wish("c") | {"port": True}, "'port' is True; it must be of type int"),
        (wish(""), "'client' must have 1 to 1000 characters"),
        (wish("x" * 1001), "'client' must have 1 to 1000 characters"),
    ],
)
def test_questions_that_are_refused(worker: Worker_, hello: dict[str, Any], error: str) -> None:
    with talking(worker[0]) as channel:
        answer = channel.ask(hello, PATIENCE)
    assert answer["error"].startswith(error)
    assert status(worker[0])["holder"] is None


GOOD: dict[str, Any] = {"cluster": {"worker": ["127.0.0.1:1"]}, "task": 0, "leader": 0, "silence": 60.0}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cluster": None}, "'cluster' is None; it must be of type dict"),
        ({"cluster": {}}, "task 0 and leader 0 aren't among the workers None"),
        ({"cluster": {"worker": []}}, "task 0 and leader 0 aren't among the workers []"),
        ({"task": 1}, "task 1 and leader 0 aren't among the workers"),
        ({"leader": -1}, "task 0 and leader -1 aren't among"),
        ({"task": "0"}, "'task' is '0'; it must be of type int"),
        ({"silence": 60}, "'silence' is 60; it must be of type float"),
        ({"silence": float("nan")}, "'silence' is nan s; it must be from 1 s to a day"),
        ({"silence": float("inf")}, "'silence' is inf s; it must be from 1 s to a day"),
        ({"silence": 0.0}, "'silence' is 0.0 s; it must be"),
        ({"cluster": {"worker": ["127.0.0.1:1", 5]}}, "job 'worker' has the tasks ['127.0.0.1:1', 5]; they must be"),
        ({"cluster": {"worker": ["nowhere"]}}, "job 'worker': address 0 is 'nowhere'; write it as 'host:port'"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "job 'worker': servers 0 and 1 both have the address 'a:1'"),
        ({"cluster": {"worker": ["a:1"], "Other Job": ["b:1"]}}, "job 'Other Job' has the tasks ['b:1']"),
        ({"cluster": {"worker": ["a:1"], "client": []}}, "job 'client': addresses is []; give a list"),
    ],
)
def test_orders_that_are_refused(worker: Worker_, change: dict[str, Any], error: str) -> None:
    address, process = worker
    with talking(address) as channel:
        channel.ask(wish("c"), PATIENCE)
        answer = channel.ask({**GOOD, **change}, PATIENCE)
        assert answer["error"].startswith(error), answer
        wait_until(lambda: not children(process))


@pytest.mark.parametrize("port", [-1, 65_536, 10**30])
def test_ports_that_are_none(worker: Worker_, port: int) -> None:
    address, process = worker
    with talking(address) as channel:
        channel.ask(wish("c", port), PATIENCE)
        assert "error" in channel.ask(GOOD, PATIENCE)
        wait_until(lambda: not children(process))


def hostile(draw: random.Random) -> bytes:
    """What some client might send: noise, or a message with something wrong in it."""
    odd = [None, True, -1, 2**70, 1e308, "", "x" * 3000, [], {}, [[]] * 50, {"a": {"b": []}}, "\ud800\n\x00"]
    hello = wish("fuzz")
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 200)) + b"\n"
    if kind == 1:
        return b"[" * draw.randrange(1, 60_000) + b"\n"
    if kind == 2:
        return b'{"a":' * draw.randrange(1, 5_000) + b"1" + b"}" * draw.randrange(5_000) + b"\n"
    if kind == 3:
        return json.dumps({**hello, draw.choice(list(hello)): draw.choice(odd)}).encode() + b"\n"
    if kind == 4:
        order = {**GOOD, draw.choice(list(GOOD)): draw.choice(odd)}
        return json.dumps(hello).encode() + b"\n" + json.dumps(order).encode() + b"\n"
    order = {**GOOD, "cluster": {draw.choice(["worker", "", "\n", "a"]): draw.choice(odd)}}
    return json.dumps(hello).encode() + b"\n" + json.dumps(order).encode() + b"\n" + draw.randbytes(20)


def give(address: str, data: bytes) -> None:
    """Sends something to a worker and waits for the end of the connection."""
    with socket.create_connection(split_address(address), PATIENCE) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):
            pass


@pytest.mark.slow
def test_nothing_that_is_sent_harms_a_worker(worker: Worker_) -> None:
    address, process = worker
    draw = random.Random(5)
    for _ in range(20):
        give(address, hostile(draw))
    before = resident_bytes(process)
    for _ in range(130):
        give(address, hostile(draw))
    for size in (1 << 20, 1 << 23):
        give(address, b"x" * size)
        give(address, b'"' + b"x" * size + b'"\n')
    wait_until(lambda: not children(process))
    assert status(address)["holder"] is None
    assert resident_bytes(process) - before < 4 * 2**20


@pytest.mark.slow
def test_a_hundred_connections_at_once_disturb_no_one(worker: Worker_) -> None:
    """Who says nothing gets no process: 64 of them kept everybody else out for 10 s, and then again."""
    address, process = worker
    with leased(address, "somebody") as channel, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(split_address(address), PATIENCE))
        assert channel.ask({"ping": 1}, PATIENCE) == {"pong": 1}
        assert status(address)["holder"] == "another client"
        wait_until(lambda: len(children(process)) == 1)
        stack.close()
        assert status(address)["holder"] == "another client"
        assert channel.ask({"ping": 2}, PATIENCE) == {"pong": 2}


def test_a_client_that_is_slow_to_speak_keeps_no_one_waiting(worker: Worker_) -> None:
    address, _ = worker
    with socket.create_connection(split_address(address), PATIENCE) as slow:
        for byte in b'{"protocol"':
            slow.sendall(bytes([byte]))
            if byte == ord("o"):
                assert status(address)["devices"]  # The client of the test before may not be quite gone.


def test_a_worker_that_cannot_fork_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with the OSError; the client of that moment is turned away instead."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    made = Worker(f"127.0.0.1:{port}", Machine("127.0.0.1", 1))

    class EnoughError(Exception):
        pass

    answers: list[BaseException] = [OSError(11, "Resource temporarily unavailable"), EnoughError()]

    def fork() -> int:
        raise answers.pop(0)

    monkeypatch.setattr(os, "fork", fork)
    first = socket.create_connection(("127.0.0.1", port), 5)
    second = socket.create_connection(("127.0.0.1", port), 5)
    with first, second:
        for connection in (first, second):
            connection.sendall(json.dumps(question()).encode() + b"\n")
        with contextlib.closing(made), pytest.raises(EnoughError):
            made.serve()
        assert first.recv(10) == b""


@pytest.mark.slow
def test_sigterm_ends_a_worker_and_its_clients_servers() -> None:
    script = "import sys; from dapple_tf import worker; from absl import app; app.run(worker.main, sys.argv)"
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{trial.getsockname()[1]}"
    with client(script, f"--address={address}", "--devices=1") as process:
        expect(process, f"worker on {address} (process {process.pid}), WITHOUT TLS: whoever reaches it can take it")
        with leased(address):
            (child,) = children(process.pid)
            process.terminate()
            assert process.wait(PATIENCE) == 0
            wait_until(lambda: has_ended(child), 5)
        end(process)
