"""A worker lends its devices to one client at a time, whatever clients do, and tells mistakes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from absl import app, flags
from absl.testing import flagsaver
from workers import PATIENCE, STARTS, children, client, expect, has_ended, question, secret_of, status, wait_until, wish

from dapple_tf import worker as worker_module
from dapple_tf.clusters.serving import Lease, Machine, attend
from dapple_tf.describe.cluster import ClusterError
from dapple_tf.describe.machine_report import MachineReport, cpu_kind, report
from dapple_tf.network.control import Channel, ControlError, Hello, split_address
from dapple_tf.network.inquiry import own_versions
from dapple_tf.tools.hosts import LocalWorkers, free_ports
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
def leased(
    address: str, client: str = "somebody", silence: float = 3600.0, others: Sequence[str] = ()
) -> Iterator[tuple[Channel, int]]:
    """A lease whose server runs, and the server's port."""
    with talking(address) as channel:
        answer = channel.ask(wish(client), PATIENCE)
        assert set(answer) == {"devices", "port", "versions"}, answer
        servers = [f"127.0.0.1:{answer['port']}", *others]
        order = {"cluster": {"worker": servers}, "task": 0, "leader": 0, "silence": silence}
        assert set(channel.ask(order, PATIENCE)) == {"serving"}
        yield channel, answer["port"]


# ---- starting


TASK = {"type": "worker", "index": 1}


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"cluster": 1, "task": TASK}, "TF_CONFIG lacks or garbles"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "this task's type is 'ps'; only tasks"),
        ({"cluster": {"worker": ["a:1"]}, "task": TASK}, r"task index is 1, but .* \['a:1'\]"),
        ({"cluster": {"worker": ["a:1", "b:1"]}, "task": TASK | {"index": True}}, "task index is True, but"),
        ({"cluster": {"worker": {"0": "a:1"}}, "task": TASK | {"index": 0}}, "the cluster's workers are {"),
        ("[" * 100_000, "TF_CONFIG isn't JSON: maximum recursion depth"),
    ],
)
def test_the_worker_s_address_in_tf_config(config: Any, error: str) -> None:
    assert own_address({"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": TASK})}) == "b:2"
    with pytest.raises(ClusterError, match=error):
        own_address({"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)})


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
        ([], r"'8\.8\.8\.8' is public"),  # by TF_CONFIG
        (["--address=127.0.0.1:0"], "address 0 is '127.0.0.1:0'; write it as"),
        (["--address=[2001:4860:4860::8888]:2222"], "is public: the whole Internet may reach it"),
        (["--address=0.0.0.0:2222"], "'0.0.0.0' means all interfaces of this machine"),
        (["--address=no-such-host.invalid:2222"], "the host 'no-such-host.invalid' isn't known"),
        (["--address=8.8.8.8:2222", "--allow_public"], "no worker can listen on 8.8.8.8:2222: Cannot assign"),
        (["--address=127.0.0.1:2222", "--gpus=0,1", "--devices=2"], "--gpus and --devices=2 .* exclude each other"),
        (["--address=127.0.0.1:2222", "--server_port=2222"], "--server_port=2222 is the port of --address, too"),
        (["--devices=-1"], r"flag --devices=-1: .*\[0, 1000\]"),
    ],
)
@pytest.mark.usefixtures("_flags")
def test_mistakes_of_the_command_line(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers started with -1 devices, and failed at their first client."""
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "8.8.8.8:1"]}, "task": TASK}))
    with pytest.raises((app.UsageError, flags.IllegalFlagValueError), match=message):
        worker_module.main(flags.FLAGS(["worker", *arguments]))


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


def test_inventory() -> None:
    memory = 2**30
    three = Machine("h", 3, memory).inventory()
    assert three == [{"kind": "CPU", "memory_bytes": memory, "hardware": cpu_kind(3)}] * 3
    whole = Machine("h", 1).inventory()[0]["memory_bytes"]
    assert [device["memory_bytes"] for device in Machine("h", 4).inventory()] == [whole // 4] * 4
    gpus = tuple({"memory_bytes": size, "hardware": "NVIDIA H200"} for size in (5, 6))
    told = MachineReport({}, gpus)
    assert Machine("h", report=told).inventory() == [{"kind": "GPU", **gpu} for gpu in gpus]
    assert [device["memory_bytes"] for device in Machine("h", memory_bytes=7, report=told).inventory()] == [7, 7]
    assert [device["kind"] for device in Machine("h", 1, report=told).inventory()] == ["CPU"]


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


# ---- leases


def test_a_lease_and_what_is_to_be_seen_of_it(worker: Worker_) -> None:
    """A worker that waits took 572 MiB; its processes for clients have TensorFlow's library, and no Python part."""
    address, process = worker
    answer = status(address)
    (device,) = answer.pop("devices")
    assert answer == {"holder": None, "versions": own_versions()}
    assert device["kind"] == "CPU" and 2**28 < device["memory_bytes"] < 2**50
    host, port = split_address(address)
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with leased(address, others=[nobody]) as (channel, server_port):
        (child,) = children(process)
        own, served = (pathlib.Path(f"/proc/{number}/maps").read_text() for number in (process, child))
        assert "tensorflow" not in own and "numpy" not in own
        assert "libtensorflow_cc" in served and "_pywrap_tensorflow" not in served and "numpy" not in served
        # Both are reached at the worker's own address only.
        with pytest.raises(ControlError, match="can't be reached"):
            Channel.connect(f"127.0.0.2:{port}", 5)
        assert channel.socket.getpeername() == (host, port)
        socket.create_connection((host, server_port), 5).close()
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection(("127.0.0.2", server_port), 0.3)
        # Who says nothing gets no process: 64 of them kept everybody else out for 10 s, and then again.
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, port), PATIENCE)).sendall(b"{")
            assert channel.ask({"ping": 1}, PATIENCE) == {"pong": 1}
            assert status(address)["holder"] == "another client"
            wait_until(lambda: len(children(process)) == 1)
        assert channel.ask({"ping": 2}, PATIENCE) == {"pong": 2}
        # It knocks at the other servers: TensorFlow's would wait for one that can't be reached.
        assert channel.ask({"knock": 5.0}, PATIENCE) == {"unreachable": {nobody: "Connection refused"}}
        channel.send({"knock": float("nan")}, PATIENCE)  # No client of ours.
        wait_until(lambda: not children(process))


def test_a_lease_is_its_clients_alone(worker: Worker_) -> None:
    """Its holder's name isn't told, and is no key: who knew it killed the client's server and got the worker.

    The client itself takes it over from its connection that hangs. How its process ended is told to it alone: whoever
    counted through process numbers was told, too.
    """
    address, process = worker
    own, other = "host-a process 17", "host-b process 18"
    with leased(address, own):
        (child,) = children(process)
        for refused in (wish(other), wish(own) | {"secret": "x" * 64}):
            with talking(address) as stranger:
                answer = stranger.ask(refused, PATIENCE)
            assert answer["error"].startswith("in use by another client, ") and "host-a" not in answer["error"]
        for secret in ("", secret_of(other), "\u00e9" * 64):
            assert status(address, secret=secret)["holder"] == status(address)["holder"] == "another client"
        assert status(address, secret=secret_of(own))["holder"] == own
        os.kill(child, signal.SIGSTOP)
        with leased(address, own):
            wait_until(lambda: child not in children(process))
            (child,) = children(process)
            os.kill(child, signal.SIGSEGV)
            wait_until(lambda: not os.path.exists(f"/proc/{child}"))
    with leased(address, other, silence=1.0) as (channel, _):  # The worker still knows then.
        ended = {"ended": "its process was ended by SIGSEGV", "out_of_memory": False}
        for secret, expected in ((secret_of(own), ended), ("x" * 32, {"error": "isn't lent to this process any more"})):
            with talking(address) as asking:
                assert asking.ask(question("pulse", secret=secret, process=child), PATIENCE) == expected
        # Who says nothing for long has gone: no packet tells of the end of a machine that was switched off.
        wait_until(lambda: not children(process))
        with pytest.raises(ControlError, match="connection"):
            channel.ask({"ping": 2}, 5)
    assert status(address)["holder"] is None


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


# ---- clients that aren't any


def send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def answers(said: bytes, keys: Any = None) -> list[dict[str, Any]]:
    """What a worker's process for a client answers to all that it sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        hello = Hello(listener.accept()[0])
    with ours:
        sender = threading.Thread(target=send, args=(ours, said))
        sender.start()
        with contextlib.closing(hello.channel), contextlib.suppress(ControlError):
            while not hello.advance():
                pass
            attend(hello.channel, hello.message, Machine("127.0.0.1", 1, keys=keys))
        sender.join()
        with ours.makefile() as lines, contextlib.suppress(ConnectionResetError):
            return [json.loads(line) for line in lines]
    return []


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        ({}, "speaks None and the worker 'dapple_tf.worker/2'; use the same version of dapple_tf on both"),
        (question([1]), r"asks for [1], which no worker knows"),
        (question("lease"), "'client' is None; it must be of type str"),
        (wish("c") | {"secret": "x" * 31}, "'secret' has 31 characters; it must have at least 32"),
        (wish("x" * 1001), "'client' must have 1 to 1000 characters"),
    ],
)
def test_questions_that_are_refused(hello: dict[str, Any], error: str) -> None:
    assert answers(json.dumps(hello).encode() + b"\n")[-1]["error"].startswith(error)


GOOD: dict[str, Any] = {"cluster": {"worker": ["127.0.0.1:1"]}, "task": 0, "leader": 0, "silence": 60.0}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cluster": {"worker": []}}, "task 0 and leader 0 aren't among the workers []"),
        ({"task": 1}, "task 1 and leader 0 aren't among the workers"),
        ({"silence": float("nan")}, "'silence' is nan s; it must be from 1 s to a day"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "job 'worker': servers 0 and 1 both have the address 'a:1'"),
        ({"cluster": {"worker": ["a:1"], "Other Job": ["b:1"]}}, "job 'Other Job' has the tasks ['b:1']"),
        ({"cluster": {"worker": ["a:1"], "client": []}}, "job 'client': addresses is []; give a list"),
        ({"fingerprints": [1]}, "'fingerprints' is [1]; it must have a text for each of the workers"),
        ({"fingerprints": ["x"], "cluster": {"worker": ["a:1"], "client": ["b:1", "b:2"]}}, "the cluster has the jobs"),
    ],
)
def test_orders_that_are_refused(change: dict[str, Any], error: str) -> None:
    messages = (wish("c"), {**GOOD, **change})
    keys = object() if "fingerprints" in change else None  # with TLS
    said = b"".join(json.dumps(said).encode() + b"\n" for said in messages)
    assert answers(said, keys)[-1]["error"].startswith(error)


def hostile(draw: random.Random) -> bytes:
    """What some client might send: noise, or a message with something wrong in it."""
    odd = [None, True, -1, 2**70, 1e308, "", "x" * 3000, [], {}, [[]] * 50, {"a": {"b": []}}, "\ud800\n\x00"]
    hello, order = wish("fuzz", draw.choice([0, -1, 10**30])), dict(GOOD)
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 200)) + b"\n"
    if kind == 1:
        return b"[" * draw.randrange(1, 60_000) + b"\n"
    if kind == 2:
        return b'{"a":' * draw.randrange(1, 5_000) + b"1" + b"}" * draw.randrange(5_000) + b"\n"
    if kind == 3:
        hello[draw.choice(list(hello))] = draw.choice(odd)
    elif kind == 4:
        order[draw.choice(list(order))] = draw.choice(odd)
    else:
        order["cluster"] = {draw.choice(["worker", "", "\n", "a"]): draw.choice(odd)}
    return json.dumps(hello).encode() + b"\n" + json.dumps(order).encode() + b"\n" + draw.randbytes(20)


def test_a_worker_s_process_survives_whatever_is_sent() -> None:
    """It ends with an answer or none, and no error of Python's."""
    draw = random.Random(5)
    said = [answer for _ in range(300) for answer in answers(hostile(draw))]
    assert sum("error" in answer for answer in said) > 50
    assert not any("serving" in answer for answer in said)


def resident_bytes(process: int) -> int:
    """Memory that a process has of its own."""
    fields = pathlib.Path(f"/proc/{process}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def give(address: str, data: bytes) -> None:
    """Sends something to a worker and waits for the end of the connection."""
    with socket.create_connection(split_address(address), PATIENCE) as connection:
        send(connection, data)
        with contextlib.suppress(OSError):
            while connection.recv(65_536):
                pass


def test_nothing_that_is_sent_harms_a_worker(worker: Worker_) -> None:
    address, process = worker
    draw = random.Random(5)
    for _ in range(3):
        give(address, hostile(draw))
    before = resident_bytes(process)
    for _ in range(9):
        give(address, hostile(draw))
    give(address, b'"' + b"x" * (1 << 23) + b'"\n')
    wait_until(lambda: not children(process))
    assert status(address)["holder"] is None
    assert resident_bytes(process) - before < 4 * 2**20


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


def test_sigterm_ends_a_worker_and_its_clients_servers() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with client(STARTS, json.dumps({}), f"--address={address}", "--devices=1") as process:
        expect(process, f"worker on {address} (process {process.pid}), WITHOUT TLS: whoever reaches it can take it")
        with leased(address):
            (child,) = children(process.pid)
            process.terminate()
            assert process.wait(PATIENCE) == 0
            wait_until(lambda: has_ended(child), 5)
