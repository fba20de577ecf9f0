"""What a client notices of its workers, and that it waits for none that is lost."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fake_session import FakeWorkers
from workers import PATIENCE, children, client, expect, has_ended, serving, status, wait_until

import dapple_tf as dapple
from dapple_tf.clusters import client_server as client_server_module
from dapple_tf.clusters import connection as connection_module
from dapple_tf.clusters import remote_session, shared_connections
from dapple_tf.clusters.connection import Connection
from dapple_tf.clusters.remote_session import Call, RemoteSession
from dapple_tf.clusters.session import collective_keys
from dapple_tf.clusters.shared_connections import acquire, connected, open_session, release
from dapple_tf.describe.cluster import ClusterError
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.errors import UnusableWorkersError, WorkerLostError
from dapple_tf.network.inquiry import reachable
from dapple_tf.network.versions import own_versions
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


def test_calls_share_a_thread_unless_one_hangs() -> None:
    """Each call started a thread of its own, which took half a millisecond of each step."""
    changed, hangs = threading.Condition(), threading.Event()

    def thread_of(function: Callable[[], object]) -> Any:
        call = Call(lambda: (function(), threading.get_ident())[1], changed)
        call.start()
        with changed:
            assert changed.wait_for(lambda: call.done, PATIENCE)
        return call.result

    assert len({thread_of(lambda: None) for _ in range(100)}) < 50  # Calls of other tests have left some threads.
    hung = Call(lambda: (hangs.wait(PATIENCE), threading.get_ident())[1], changed)
    hung.start()
    assert hung.begun.wait(PATIENCE)
    others = {thread_of(lambda: None) for _ in range(3)}
    hangs.set()
    with changed:
        assert changed.wait_for(lambda: hung.done, PATIENCE)
    assert hung.result not in others


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


@pytest.mark.parametrize("strikes", ["as it begins", "later"])
def test_ctrl_c_waits_for_the_step_under_way(strikes: str, workers_and_connection: Fakes) -> None:
    """Struck while the thread of the call was being started, Ctrl-C left the step to itself."""
    _, connection = workers_and_connection
    here, ended = threading.get_ident(), 0

    def step() -> None:
        nonlocal ended
        time.sleep(0.0 if strikes == "as it begins" else 0.05)
        signal.pthread_kill(here, signal.SIGINT)
        time.sleep(0.02)
        ended += 1

    for count in range(1, 11):
        with pytest.raises(KeyboardInterrupt):
            connection.call(step)
        assert ended == count


def test_a_worker_that_is_lost_while_nothing_runs(workers_and_connection: Fakes) -> None:
    fakes, connection = workers_and_connection
    fakes.kill(1, away=0)
    wait_until(lambda: connection.lost is not None)
    called: list[int] = []
    with pytest.raises(WorkerLostError, match=fakes.cluster.addresses[1]):
        connection.call(lambda: called.append(1))
    assert not called


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
        with held(pairs[0]):
            with pytest.raises(ClusterError, match=f"{second} is in use by this process already, in another cluster"):
                acquire(pairs[1], QUICK)
            with held(dapple.Cluster.of_servers([third], devices_per_server=1)):  # None in common.
                pass
        with held(pairs[1]):
            pass


def test_the_end_of_a_lost_connection_leaves_the_next_one_alone() -> None:
    """It was forgotten with the lost one, so that the third took the workers from the second, of the same process."""
    with FakeWorkers(2).used() as fakes:
        lost = acquire(fakes.cluster, QUICK)
        fakes.kill(1, away=0)
        wait_until(lambda: lost.lost is not None)
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


def test_two_sessions_share_a_connection_and_no_variables(
    cluster: dapple.Cluster, monkeypatch: pytest.MonkeyPatch
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
    for address in cluster.addresses:
        wait_until(lambda address=address: status(address)["holder"] is None)


def test_a_server_that_starts_on_no_port_is_told(cluster: dapple.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts are tried; then the client is told, and the other worker is given back."""
    first, second = cluster.addresses
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, borrow = taken.getsockname()[1], Connection._borrow

        def on_that_port(connection: Connection, task: int) -> Any:
            connection_module._ports[second] = port
            return borrow(connection, task)

        with monkeypatch.context() as patch:
            patch.setattr(Connection, "_borrow", on_that_port)
            with pytest.raises(ClusterError, match=rf"worker 1 \({second}\).*no server can be started on port {port}"):
                acquire(cluster, QUICK)
        wait_until(lambda: all(reachable(cluster.addresses, PATIENCE)))
        wait_until(lambda: status(first)["holder"] is None)  # Its lease is given back in the background.
        connection_module._ports.pop(second, None)
    assert works(cluster)


@pytest.mark.parametrize("server", ["the client's", "both workers'"])
def test_a_free_port_that_somebody_takes_before_the_server_starts(
    server: str, cluster: dapple.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine hands a port out again within the second: training ended with "is it taken?" at its first step.

    Also to two of its workers, each of which asks for itself.
    """
    connection_module._ports.pop(cluster.addresses[1], None)  # The client has a server for these ports.
    borrow, free_port = Connection._borrow, client_server_module.free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]]

        def borrow_on_one_port(connection: Connection, task: int) -> Any:
            if ports:
                connection_module._ports[cluster.addresses[task]] = ports.pop()
            return borrow(connection, task)

        if server == "the client's":
            monkeypatch.setattr(
                client_server_module, "free_port", lambda host: ports.pop() if ports else free_port(host)
            )
        else:
            ports[:] = [free_ports(1)[0]] * 2
            monkeypatch.setattr(Connection, "_borrow", borrow_on_one_port)
        assert works(cluster)
    assert not ports


def test_nobody_there(cluster: dapple.Cluster) -> None:
    """The worker that is there is given back."""
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ClusterError, match=f"worker 0 .* refused; is `python -m dapple_tf.worker --address={nobody}`"):
        dapple.Cluster.of_servers([nobody])
    addresses = [cluster.addresses[0], nobody]
    half = dapple.Cluster.of_servers(addresses, devices_per_server=1)
    with pytest.raises(ClusterError, match=rf"worker 1 \({nobody}\) can't be reached"):
        acquire(half, QUICK)
    wait_until(lambda: reachable(addresses, PATIENCE) == [True, False])


def line(answer: dict[str, Any]) -> bytes:
    """What a worker of this version would send."""
    return json.dumps({**answer, "versions": own_versions()}).encode() + b"\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "sends something that isn't JSON"),
        (b"{}\n", "answers {}, which lacks 'versions' or garbles it"),
        (b'{"devices": 5, "versions": {"dapple_tf": 1}}\n', "which lacks 'versions' or garbles it"),
        (line({"devices": 5}), "which lacks 'devices' or garbles it"),
        (line({"devices": [{"kind": "TPU"}]}), "which lacks 'devices' or garbles it"),
        (b"", "connection closed by the other side"),
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
    workers.restart(1)
    assert works(cluster)


def test_a_worker_with_fewer_devices_than_the_cluster_has_of_it(cluster: dapple.Cluster) -> None:
    """TensorFlow told of an unknown device, step by step, after the model had been prepared."""
    larger = dapple.Cluster.of_servers(cluster.addresses, devices_per_server=2)
    with pytest.raises(UnusableWorkersError) as raised:
        acquire(larger, QUICK)
    assert f"worker 0 ({cluster.addresses[0]}) has 1 CPU device, but the cluster has 2 CPU devices of it" in str(
        raised.value
    )
    assert raised.value.tasks == (0,)
    assert works(cluster)


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
