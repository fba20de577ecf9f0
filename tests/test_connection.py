"""What a client notices of its workers, and that it waits for none that is lost."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import logging
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fake_session import FakeWorkers
from workers import PATIENCE, children, client, expect, has_ended, serving, status, wait_until

import dapple_tf as dapple
from dapple_tf.clusters import connection as connection_module
from dapple_tf.clusters import remote_session, shared_connections
from dapple_tf.clusters import serving as serving_module
from dapple_tf.clusters.connection import Connection
from dapple_tf.clusters.lease import Lease
from dapple_tf.clusters.membership import Membership, check_back
from dapple_tf.clusters.remote_session import Call, RemoteSession
from dapple_tf.clusters.serving import ProcessExit, memory_kills
from dapple_tf.clusters.session import collective_keys
from dapple_tf.clusters.shared_connections import acquire, connected, open_session, release
from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan_report import StageReport
from dapple_tf.errors import ClusterError, UnusableWorkersError, WorkerLostError
from dapple_tf.execution.elastic import Elastic
from dapple_tf.execution.values import Log
from dapple_tf.network import reachability
from dapple_tf.network.control import Channel, ControlError, SilentError
from dapple_tf.network.inquiry import client_name, own_versions, reachable
from dapple_tf.tools.hosts import LocalWorkers, free_ports

NOTICE = 2.0
QUICK = FaultPolicy(notice_seconds=NOTICE)


@pytest.fixture
def cluster(workers: LocalWorkers) -> Iterator[dapple.Cluster]:
    """Two workers that nobody uses, also after the test."""
    addresses = workers.addresses[:2]
    wait_until(lambda: all(reachable(addresses, PATIENCE)))
    yield dapple.Cluster.of_servers(addresses)
    assert not shared_connections._connections


@contextlib.contextmanager
def held(cluster: dapple.Cluster, faults: FaultPolicy = QUICK) -> Iterator[Connection]:
    connection = acquire(cluster, faults)
    try:
        yield connection
    finally:
        release(connection)


def graph_on(cluster: dapple.Cluster, make: Callable[[str], Any]) -> tuple[tf.Graph, list[Any]]:
    """A graph with something on each device."""
    made = []
    with tf.Graph().as_default() as graph:
        for name in cluster.device_names:
            with tf.device(name):
                made.append(make(name))
    return graph, made


def endless(_: str) -> Any:
    matrix = tf.random.uniform([100, 100])
    step = tf.while_loop(lambda i, x: i < 10**9, lambda i, x: (i + 1, tf.tanh(x @ x)), [0, matrix])
    return step[0]


def running(session: RemoteSession, fetches: Any) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that runs something until it fails; and the error."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            session.run(fetches)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive(), failures
    return thread, failures


def works(cluster: dapple.Cluster) -> bool:
    """Whether a fresh client can use the workers, all-reduce included."""
    count = cluster.num_devices
    key = collective_keys()

    def reduced(_: str) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=tf.ones([3]),
            group_size=count,
            group_key=key,
            instance_key=key,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )

    graph, made = graph_on(cluster, reduced)
    with connected(cluster, QUICK), open_session(cluster, graph) as session:
        return all(np.all(total == count) for total in session.run(made))


# ---- calls, on workers without processes


@pytest.fixture
def workers_and_connection() -> Iterator[tuple[FakeWorkers, Connection]]:
    with FakeWorkers(2).used() as fakes, held(fakes.cluster) as connection:
        yield fakes, connection


Fakes = tuple[FakeWorkers, Connection]


def lingering(function: Callable[[], Any], *workers: str) -> Call:
    """A call that has begun."""
    call = Call(function, threading.Condition(), workers)
    call.start()
    assert call.begun.wait(PATIENCE)
    return call


def test_a_call_gives_what_the_function_does(workers_and_connection: Fakes) -> None:
    """An error only after all workers have answered anew: it may be the first sign of a worker's end."""
    _, connection = workers_and_connection
    assert connection.call(lambda: 17) == 17
    with pytest.raises(KeyError, match="nothing"):
        connection.call(lambda: {}["nothing"])
    asked = time.monotonic()

    def fail() -> None:
        nonlocal asked
        asked = time.monotonic()
        raise tf.errors.InvalidArgumentError(None, None, "4 values")

    with pytest.raises(tf.errors.InvalidArgumentError, match="4 values"):
        connection.call(fail)
    assert all(lease.confirmed > asked for lease in connection._leases)
    assert connection.lost is None


def test_ctrl_c_waits_for_the_step_under_way(workers_and_connection: Fakes) -> None:
    """Struck while the thread of the call was being started, Ctrl-C left the step to itself."""
    _, connection = workers_and_connection
    here, ended = threading.get_ident(), 0

    def step() -> None:
        nonlocal ended
        time.sleep(0.01 * (count % 2))
        signal.pthread_kill(here, signal.SIGINT)
        time.sleep(0.02)
        ended += 1

    for count in range(1, 11):
        with pytest.raises(KeyboardInterrupt):
            connection.call(step)
        assert ended == count


def test_a_long_run_with_a_link_that_is_broken(workers_and_connection: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow waits for a port whose packets are dropped: nothing ended the step before `step_seconds`."""
    fakes, connection = workers_and_connection
    ended = threading.Event()
    monkeypatch.setattr(connection, "_pause", 0.05)
    monkeypatch.setattr(fakes, "parted", lambda addresses: [1])
    with pytest.raises(WorkerLostError, match="port of worker 1 can't be reached") as raised:
        connection.call(ended.wait)
    ended.set()
    assert (raised.value.task, raised.value.address) == (1, fakes.cluster.addresses[1])


def test_a_worker_that_this_process_has_in_another_cluster() -> None:
    with FakeWorkers(3).used() as fakes:
        first, second, third = fakes.cluster.addresses
        pairs = [dapple.Cluster.of_servers(own, devices_per_server=1) for own in ([first, second], [third, second])]
        with held(pairs[0]), pytest.raises(ClusterError, match=f"{second} is in use by this process already, in anoth"):
            acquire(pairs[1], QUICK)
        with held(pairs[1]):
            pass


def test_the_end_of_a_lost_connection_leaves_the_next_one_alone() -> None:
    """It was forgotten with the lost one, so that the third took the workers from the second, of the same process."""
    with FakeWorkers(2).used() as fakes:
        called: list[int] = []
        lost = acquire(fakes.cluster, QUICK)
        fakes.kill(1, away=0)
        wait_until(lambda: lost.lost is not None)
        with pytest.raises(WorkerLostError, match=fakes.cluster.addresses[1]):
            lost.call(lambda: called.append(1))
        assert not called
        with held(fakes.cluster) as second:
            assert second is not lost
            release(lost)
            with held(fakes.cluster) as third:
                assert third is second
            assert second.call(lambda: 17) == 17


def test_no_worker_serves_anew_before_a_former_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the call asked of the new server, at the same port, was never answered: the call stayed in TensorFlow.

    One that never ends is waited for once.
    """
    awaited: list[Call] = []
    ended = threading.Event()
    monkeypatch.setattr(Call, "wait", lambda call, seconds: awaited.append(call))
    earlier = set(remote_session._running)
    with FakeWorkers(2).used() as fakes:
        call, _ = (lingering(ended.wait, address) for address in (fakes.cluster.addresses[0], "elsewhere:1"))
        for _ in range(2):
            with held(fakes.cluster) as connection:
                assert awaited == [call]
        with pytest.raises(WorkerLostError, match="were given back by this process"):
            connection.call(lambda: 17)
    ended.set()
    wait_until(lambda: remote_session._running <= earlier)


def test_a_session_is_closed_behind_its_former_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing keeps a lock, which a call needs to return, until the workers serve anew: both waited."""

    class Session:
        closed = threading.Event()

        def close(self) -> None:
            assert call.done
            self.closed.set()

    monkeypatch.setattr(remote_session, "_FORMER_CALLS_SECONDS", PATIENCE)
    earlier = set(remote_session._running)
    ended = threading.Event()
    call, session = lingering(ended.wait, "worker:1"), Session()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
    remote_session._close_aside(session, ["worker:1"])
    wait_until(lambda: len(remote_session._running - earlier) == 2)
    assert not session.closed.is_set()
    ended.set()
    assert session.closed.wait(PATIENCE)
    wait_until(lambda: remote_session._running <= earlier)


# ---- all workers there


def test_two_sessions_share_a_connection_and_no_variables_and_are_told_of_a_signal(
    cluster: dapple.Cluster, workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in the environment is passed by: TensorFlow's servers looked for each other there, for a minute.

    Patience of whole seconds was sent as 30, which the worker refused for being no float; a week was too long for it.
    """

    def variable(name: str) -> Any:
        return tf.compat.v1.get_variable(f"v{name[-1]}{name[-14]}", initializer=1.0, use_resource=True)

    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    monkeypatch.setenv("no_proxy", "example.org")
    graph, made = graph_on(cluster, variable)
    patient = FaultPolicy(notice_seconds=7 * 86_400)
    with held(cluster, patient) as connection, held(cluster, patient) as same:
        assert connection is same
        with open_session(cluster, graph) as one, open_session(cluster, graph) as other:
            one.run([v.initializer for v in made])
            assert one.run(made[0]) == 1.0
            with pytest.raises(tf.errors.FailedPreconditionError):
                other.run(made[0])
    with held(cluster, FaultPolicy(notice_seconds=10.0)) as connection:
        wait_until(lambda: len(children(workers.processes[1].pid)) == 1)
        (child,) = children(workers.processes[1].pid)
        os.kill(child, signal.SIGSEGV)
        wait_until(lambda: connection.lost is not None)
        assert "its process was ended by SIGSEGV" in str(connection.lost)
    wait_until(lambda: f"process {child} for a client: its process was ended by SIGSEGV" in workers.lines(1))
    for address in cluster.addresses:
        wait_until(lambda address=address: status(address)["holder"] is None)


def test_a_free_port_that_somebody_takes_before_the_server_starts(
    cluster: dapple.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine hands a port out again within the second: training ended with "is it taken?" at its first step.

    Also to two of its workers, each of which asks for itself. Where nothing helps, the other worker is given back.
    """
    borrow, free_port = Connection._borrow, connection_module.free_port

    def lend_on(port_of: Callable[[int], int | None]) -> None:
        def borrow_on(connection: Connection, task: int) -> Any:
            if own := port_of(task):
                connection_module._ports[cluster.addresses[task]] = own
            return borrow(connection, task)

        monkeypatch.setattr(Connection, "_borrow", borrow_on)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        of_client, of_workers = [port], [free_ports(1)[0]] * 2
        monkeypatch.setattr(
            connection_module, "free_port", lambda host: of_client.pop() if of_client else free_port(host)
        )
        connection_module._ports.pop(cluster.addresses[1], None)  # The client has a server for these ports.
        assert works(cluster) and not of_client
        lend_on(lambda task: of_workers.pop() if of_workers else None)
        assert works(cluster) and not of_workers
        lend_on(lambda task: port if task else None)
        with pytest.raises(ClusterError, match=rf"worker 1 .*no server can be started on port {port}"):
            acquire(cluster, QUICK)
    for address in cluster.addresses:
        connection_module._ports.pop(address, None)
        wait_until(lambda address=address: status(address)["holder"] is None)


def test_nobody_there_or_fewer_devices_than_the_cluster_has(cluster: dapple.Cluster) -> None:
    """TensorFlow told of an unknown device, step by step, after the model had been prepared."""
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ClusterError, match=f"worker 0 .* refused; is `python -m dapple_tf.worker --address={nobody}`"):
        dapple.Cluster.of_servers([nobody])
    addresses = [cluster.addresses[0], nobody]
    half = dapple.Cluster.of_servers(addresses, devices_per_server=1)
    with pytest.raises(ClusterError, match=rf"worker 1 \({nobody}\) can't be reached"):
        acquire(half, QUICK)
    wait_until(lambda: reachable(addresses, PATIENCE) == [True, False])  # The one that is there is given back.
    larger = dapple.Cluster.of_servers(cluster.addresses, devices_per_server=2)
    text = rf"worker 0 \({cluster.addresses[0]}\) has 1 CPU device, but the cluster has 2 CPU devices of it"
    with pytest.raises(UnusableWorkersError, match=text) as raised:
        acquire(larger, QUICK)
    assert raised.value.tasks == (0,)


def line(answer: dict[str, Any]) -> bytes:
    """What a worker of this version would send."""
    return json.dumps({**answer, "versions": own_versions()}).encode() + b"\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "sends something that isn't JSON"),
        (b'{"devices": 5, "versions": {"dapple_tf": 1}}\n', "which lacks 'versions' or garbles it"),
        (line({"devices": [{"kind": "TPU"}]}), "which lacks 'devices' or garbles it"),
    ],
)
def test_something_else_that_listens_there(answer: bytes, message: str) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)

    with serving(serve) as address, pytest.raises(ClusterError, match=message):
        dapple.Cluster.of_servers([address])


def test_from_a_resolver(cluster: dapple.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"worker": list(cluster.addresses), "chief": ["127.0.0.1:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": tasks, "task": {"type": "chief", "index": 0}}))
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert dapple.Cluster.from_resolver(resolver) == cluster
    with pytest.raises(ClusterError, match="TFConfigClusterResolver names no job 'ps', but 'worker', 'chief': is TF_"):
        dapple.Cluster.from_resolver(resolver, job="ps")


# ---- lost workers


def assert_lost(failures: Sequence[BaseException], address: str) -> None:
    (error,) = failures
    assert isinstance(error, WorkerLostError), error
    assert (error.task, error.address) == (1, address)
    assert str(error).startswith(f"worker 1 ({address}): ")


def test_a_killed_worker_is_noticed_at_once(cluster: dapple.Cluster, workers: LocalWorkers) -> None:
    """The run fails with the error that names the worker, closing doesn't wait, and all is well once it is back."""
    graph, made = graph_on(cluster, endless)
    with held(cluster) as connection:
        session = open_session(cluster, graph)
        thread, failures = running(session, made)
        (child,) = children(workers.processes[1].pid)
        workers.kill(1)
        thread.join(PATIENCE)
        assert_lost(failures, cluster.addresses[1])
        with pytest.raises(WorkerLostError, match=cluster.addresses[1]):
            session.run(made)
        started = time.monotonic()
        session.close()
        assert time.monotonic() - started < PATIENCE / 2
        assert str(connection.lost) == str(failures[0])
    wait_until(lambda: has_ended(child) and not children(workers.processes[0].pid))


def test_a_stopped_worker_is_noticed_in_time(cluster: dapple.Cluster, workers: LocalWorkers) -> None:
    """Also when nothing runs; once it goes on, it finds out that its client has given it up.

    Nor does a session wait for it that is closed, or forgotten: Python frees that whenever it collects garbage, in
    whatever thread; TensorFlow waited there.
    """
    graph, made = graph_on(cluster, endless)
    with held(cluster):
        session, forgotten = (open_session(cluster, graph) for _ in range(2))
        thread, failures = running(session, made)
        other, _ = running(forgotten, made)
        workers.stop(1)
        thread.join(PATIENCE)
        other.join(PATIENCE)
        assert_lost(failures, cluster.addresses[1])
        started = time.monotonic()
        session.close()
        del forgotten, other
        gc.collect()
        assert time.monotonic() - started < PATIENCE / 2
    wait_until(lambda: all(reachable(cluster.addresses[:1], PATIENCE)))
    workers.cont(1)
    wait_until(lambda: not children(workers.processes[1].pid))
    assert works(cluster)


FORKS_AND_LEAVES = """
import os, sys, threading
import tensorflow as tf
import dapple_tf as dapple
from dapple_tf.clusters.shared_connections import acquire, open_session

cluster = dapple.Cluster.of_servers(sys.argv[1:])
policy = dapple.FaultPolicy(notice_seconds=5.0)
connection = acquire(cluster, policy)
with tf.Graph().as_default() as graph:
    with tf.device(cluster.device_names[1]):
        drawn = tf.random.uniform([50, 50])
        endless = tf.while_loop(lambda i, x: i < 10**9, lambda i, x: (i + 1, tf.tanh(x @ x)), [0, drawn])[0]
    session = open_session(cluster, graph)
session.run(drawn)
child = os.fork()
if child == 0:
    try:
        acquire(cluster, policy)
    except dapple.ClusterError as error:
        print(error, flush=True)
    try:
        session.run(drawn)
    except dapple.WorkerLostError as error:
        print(error, flush=True)
    connection.close()
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
session.run(drawn)
print(connection.lost, flush=True)
threading.Thread(target=session.run, args=(endless,), daemon=True).start()
input()
print("leaving", flush=True)
"""


def test_a_process_that_forks_and_leaves_its_session_open(cluster: dapple.Cluster, workers: LocalWorkers) -> None:
    """A forked process leaves the workers to its parent: its end shut the connections down that both had.

    The parent ends in the middle of a step on a worker that hangs: TensorFlow waited for that one as Python freed the
    session.
    """
    with client(FORKS_AND_LEAVES, *cluster.addresses, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        used, given_back, code, lost = (process.stdout.readline() for _ in range(4))
        assert "was forked from one that uses workers" in used, process.stderr.read()
        assert "were given back by this process" in given_back
        assert (code, lost) == ("0\n", "None\n")
        workers.stop(1)
        process.stdin.write("\n")
        process.stdin.close()
        expect(process, "leaving")
        assert process.wait(PATIENCE) == 0, process.stderr.read()
    workers.cont(1)
    for worker in workers.processes[:2]:
        wait_until(lambda worker=worker: not children(worker.pid))


SECONDS = 1.0
MIB = 2**20


# ---- a worker whose connection is held up isn't lost as long as it gives signs of life on others


@contextlib.contextmanager
def lent(pulse: Callable[[], Mapping[str, Any] | None]) -> Iterator[tuple[Lease, Channel]]:
    """A lease whose worker answers on new connections only; and the worker's end of its own connection."""
    held: list[Channel] = []

    def serve(connection: socket.socket) -> None:
        held.append(Channel(connection))
        if len(held) > 1:
            assert held[-1].receive(PATIENCE)["ask"] == "pulse"
            if (answer := pulse()) is not None:
                held[-1].send(answer, PATIENCE)

    with serving(serve) as address, contextlib.closing(Channel.connect(address, PATIENCE)) as ours:
        wait_until(lambda: held)
        yield Lease(0, address, ours, 1, "127.0.0.1"), held[0]


def test_a_worker_that_answers_on_a_new_connection() -> None:
    with lent(lambda: {"age": 0.0}) as (lease, theirs):
        asked = time.monotonic()
        assert asked < lease.ping(1, SECONDS) < time.monotonic()
        lease.ping(2, SECONDS)
        # What was held up arrives in the end, and isn't taken for the answer to a later question.
        for number in (1, 2, 3):
            theirs.send({"pong": number}, PATIENCE)
        asked = time.monotonic()
        assert lease.ping(3, PATIENCE) >= asked


def test_a_worker_that_says_something_else() -> None:
    """Old pongs were read on and on, while nobody noticed that the worker was lost."""
    with lent(lambda: None) as (lease, theirs):
        theirs.send({"pong": 1}, PATIENCE)
        lease.ping(1, SECONDS)
        for _ in range(1000):
            theirs.send({"pong": 1}, PATIENCE)
        with pytest.raises(ControlError, match=re.escape("was asked for 'pong' and said {'pong': 1}")):
            lease.ping(2, PATIENCE)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        *((answer, SilentError, "doesn't answer within 0.4 s") for answer in (None, {"age": 100.0}, {})),
        ({"error": "isn't lent to this process any more"}, ControlError, "isn't lent to this process any more"),
    ],
)
def test_a_worker_without_a_sign_of_life(answer: Mapping[str, Any] | None, error: type[Exception], text: str) -> None:
    with lent(lambda: answer) as (lease, _), pytest.raises(error, match=text):
        lease.ping(1, 0.4)


# ---- how a worker's process has ended


@pytest.mark.parametrize(
    ("status", "kills", "end"),
    [
        (signal.SIGSEGV, 5, ProcessExit("its process was ended by SIGSEGV")),
        (signal.SIGKILL, 0, ProcessExit("its process was ended by SIGKILL")),
        (
            signal.SIGKILL,
            1,
            ProcessExit(
                "its process was ended by SIGKILL when the kernel killed 1 for lack of memory; it had up to 3.00 MiB",
                out_of_memory=True,
            ),
        ),
    ],
)
def test_ends(status: int, kills: int, end: ProcessExit) -> None:
    assert ProcessExit.of(int(status), 3 * MIB, kills) == end
    assert ProcessExit.parsed(end.message()) == end
    assert ProcessExit.parsed(end.message() | {"out_of_memory": 1}) is ProcessExit.parsed({}) is None


def test_the_kernel_s_count(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_kills() >= 0
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 7\noom_kill 3\n")
    monkeypatch.setattr(serving_module, "_COUNTS", counts)
    assert memory_kills() == 3


def test_what_stages_were_predicted_to_need_is_told() -> None:
    report = types.SimpleNamespace(stages=[StageReport(1, 0.5, 0.1, 1, 3 * MIB, 2 * MIB)])
    own: Any = types.SimpleNamespace(engine=types.SimpleNamespace(plan=types.SimpleNamespace(report=report)))
    told = Elastic._memory_of(own, [0])
    assert told.startswith("stage 0 was predicted to need 3.00 MiB of 2.00 MiB; use smaller micro-batches")


@pytest.mark.parametrize(("out_of_memory", "attempts"), [(True, 1), (False, 5)])
def test_a_process_without_memory_is_started_again_once(out_of_memory: bool, attempts: int) -> None:
    reopened = itertools.count()
    engine: Any = types.SimpleNamespace(
        cluster=Cluster.of_servers(["a:1", "b:1"], devices_per_server=1),
        close=lambda: None,
        reopen=lambda: next(reopened),
    )
    own: Any = types.SimpleNamespace(engine=engine, log=Log(dapple.FaultPolicy("restart")), _failures=0)
    error = WorkerLostError("worker 1", 1, "", out_of_memory)
    with pytest.raises(WorkerLostError) as raised:
        while True:
            Elastic._reopen(own, error)
    assert (next(reopened), raised.value.out_of_memory) == (attempts, out_of_memory)


# ---- closed ports are told of before TensorFlow waits for ever: from where, to which port

ADDRESSES = ["a:1", "b:1", "c:1"]
SERVERS = ["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"]
CLIENT = "10.0.0.9:7"


def check_ports(*answers: Mapping[str, Any], client: list[str] | None = None) -> None:
    """Checks a cluster whose workers give these answers, and of whose servers this process reaches all but some."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        closed = dict.fromkeys(client or [], "Connection refused")
        monkeypatch.setattr(reachability, "unreachable", lambda servers, seconds: closed)
        servers = {server: server for server in SERVERS[: len(answers)]}
        told = dict(enumerate(answers))
        reachability.check_ports(ADDRESSES[: len(answers)], lambda ask: told, servers, [CLIENT] * len(answers), 0.5)


def closed_to(*servers: str) -> dict[str, Any]:
    return {"unreachable": dict.fromkeys(servers, "no answer within 8 s")}


def test_closed_ports() -> None:
    """Of this process to one worker, and between workers."""
    check_ports(closed_to(), closed_to(), closed_to())
    for own, answers, text, tasks in (
        (
            [],
            [closed_to(), closed_to(CLIENT)],
            "10.0.0.9:7 of this process can't be reached from worker 1 (b:1): no",
            (1,),
        ),
        (
            [SERVERS[0]],
            [closed_to(), closed_to(SERVERS[0]), closed_to(SERVERS[1])],
            "10.0.0.1:7 of worker 0 (a:1) can't be reached from this process: Connection refused, nor from worker 1 "
            "(b:1): no answer within 8 s; TensorFlow's port 10.0.0.2:7 of worker 1 (b:1) can't be reached from worker",
            (0, 1),
        ),
    ):
        with pytest.raises(UnusableWorkersError, match="firewall") as raised:
            check_ports(*answers, client=own)
        assert text in str(raised.value)
        assert tuple(raised.value.tasks) == tasks


@pytest.mark.parametrize("told", [[], {SERVERS[0]: 5}, {"elsewhere:5": "closed"}])
def test_a_worker_that_does_not_say_which_ports_are_closed(told: Any) -> None:
    with pytest.raises(ClusterError, match="lacks 'unreachable' or garbles it"):
        check_ports(closed_to(), {"unreachable": told})


# ---- lost workers that answer again are told from those that can't be used, without waiting for any

CPU = {"kind": "CPU", "memory_bytes": 2**30, "hardware": "a processor"}
GPU = {"kind": "GPU", "memory_bytes": 2**30, "hardware": "a GPU"}


def said(*devices: Mapping[str, Any], holder: str | None = None, **versions: str) -> dict[str, Any]:
    return {"devices": list(devices), "holder": holder, "versions": own_versions() | versions}


def answering(answers: dict[str, Any]) -> contextlib.AbstractContextManager[str]:
    """A worker's address, where ``answers["status"]`` is the answer to all questions."""

    def serve(connection: socket.socket) -> None:
        with contextlib.closing(Channel(connection)) as channel:
            assert channel.receive(PATIENCE)["ask"] == "status"
            channel.send(answers["status"], PATIENCE)

    return serving(serve)


def cluster_at(*addresses: str) -> Cluster:
    name = "/job:worker/replica:0/task:{}/device:CPU:0"
    return Cluster(
        tuple(Device(name.format(task), task, kind="a processor") for task in range(len(addresses))),
        addresses=addresses,
    )


def there(members: Membership, own: Cluster, *, asked: bool = False) -> frozenset[str]:
    """The answer to a question that is asked now, unless it was."""
    if not asked:
        members._next = 0.0
        assert not members.there(own, range(len(own.addresses)))
    wait_until(lambda: members._answer is not None and not members._answer.empty())
    return members.there(own, range(len(own.addresses)))


def test_workers_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Why a worker isn't taken is logged once; of one that isn't there nothing is said."""
    answers = [
        *({"status": said(CPU)}, {"status": said(CPU, holder="somebody")}, {"status": said(GPU)}),
        *({"status": said(CPU, tensorflow="1.0")}, {"status": {"error": "busy"}}),
    ]
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        addresses = [stack.enter_context(answering(own)) for own in answers]
        own = cluster_at(*addresses, f"127.0.0.1:{free_ports(1)[0]}")
        members = Membership(PATIENCE)
        assert there(members, own) == {addresses[0]}
        texts = sorted(record.getMessage() for record in caplog.records)
        assert len(texts) == 4
        for number, text in enumerate(texts, 1):
            assert text.startswith(f"training goes on without a lost worker: worker {number} ({addresses[number]})")
        assert "in use by another client" in texts[0]
        assert "is back with 1 GPU device (a GPU), but the cluster has 1 CPU device (a processor) of it" in texts[1]
        assert "1.0" in texts[2] and "busy" in texts[3]
        answers[1]["status"] = said(CPU, holder=client_name())  # an older connection of this process's, which hangs
        assert there(members, own) == {addresses[0], addresses[1]}
        assert len(caplog.records) == 4
        # Before it is time, nobody is asked.
        threads = threading.active_count()
        assert not any(Membership(1e6).there(own, [0]) for _ in range(3))
        assert threading.active_count() == threads


def test_a_question_without_an_answer_holds_nobody_up() -> None:
    """A worker that accepts and says nothing: one question at a time, and steps go on meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own = cluster_at(f"127.0.0.1:{silent.getsockname()[1]}")
        members = Membership(PATIENCE)
        members._next = 0.0
        threads = threading.active_count()
        assert not members.there(own, [0])
        wait_until(lambda: threading.active_count() >= threads + 2)  # who asks, and its helper for this worker
        for _ in range(100):
            assert not members.there(own, [0])
        assert threading.active_count() == threads + 2
        with contextlib.closing(Channel(silent.accept()[0])) as channel:
            assert channel.receive(PATIENCE)["ask"] == "status"
            channel.send(said(CPU), PATIENCE)
        assert there(members, own, asked=True) == {own.addresses[0]}


def devices(kind: str, count: int, hardware: str = "") -> list[Device]:
    name = f"/job:worker/replica:0/task:0/device:{kind}"
    return [Device(f"{name}:{number}", 0, kind=hardware) for number in range(count)]


@pytest.mark.parametrize(
    ("offered", "wanted", "told"),
    [
        pytest.param([CPU, CPU], devices("CPU", 1, "a processor"), None, id="more"),
        pytest.param([GPU], devices("CPU", 1), None, id="the CPU that each server has"),
        pytest.param([CPU], devices("CPU", 2, "a processor"), r"1 CPU device \(a processor\), .* 2 CPU", id="fewer"),
        pytest.param([GPU], devices("GPU", 1, "faster"), r"1 GPU device \(a GPU\), .* \(faster\)", id="GPU"),
    ],
)
def test_devices_of_a_worker_that_is_back(offered: list[dict[str, Any]], wanted: list[Device], told: str) -> None:
    refused = pytest.raises(ClusterError, match=rf"worker 0 \(10\.0\.0\.1:1\) is back with {told}")
    with refused if told else contextlib.nullcontext():
        check_back(0, "10.0.0.1:1", said(*offered), wanted)
