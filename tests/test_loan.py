"""What a client knows of its workers: signs of life, ends, closed ports, and whether a lost one can be used again."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import re
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from workers import PATIENCE, children, serving, wait_until

import dapple_tf as dapple
from dapple_tf.clusters import ends, open_ports
from dapple_tf.clusters.ends import End, memory_kills
from dapple_tf.clusters.loan import Loan
from dapple_tf.clusters.returning import Returning, check_back
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.plan_report import StageReport
from dapple_tf.errors import ClusterError, UnusableWorkersError, WorkerLostError
from dapple_tf.execution.recovery import Recovery
from dapple_tf.execution.runtime import Runtime
from dapple_tf.network.control import Channel, ControlError, SilentError
from dapple_tf.network.inquiry import client_name, reachable
from dapple_tf.network.versions import own_versions
from dapple_tf.tools.hosts import LocalWorkers, free_ports

SECONDS = 1.0
MIB = 2**20


# ---- a worker whose connection is held up isn't lost as long as it gives signs of life on others


@contextlib.contextmanager
def lent(pulse: Callable[[], Mapping[str, Any] | None]) -> Iterator[tuple[Loan, Channel]]:
    """A loan whose worker answers on new connections only; and the worker's end of its own connection."""
    held: list[Channel] = []

    def serve(connection: socket.socket) -> None:
        held.append(Channel(connection))
        if len(held) > 1:
            assert held[-1].receive(PATIENCE)["ask"] == "pulse"
            if (answer := pulse()) is not None:
                held[-1].send(answer, PATIENCE)

    with serving(serve) as address, contextlib.closing(Channel.connect(address, PATIENCE)) as ours:
        wait_until(lambda: held)
        yield Loan(0, address, ours, 1, "127.0.0.1"), held[0]


def test_a_worker_that_answers_on_a_new_connection() -> None:
    with lent(lambda: {"age": 0.0}) as (loan, theirs):
        asked = time.monotonic()
        assert asked < loan.ping(1, SECONDS) < time.monotonic()
        loan.ping(2, SECONDS)
        # What was held up arrives in the end, and isn't taken for the answer to a later question.
        for number in (1, 2, 3):
            theirs.send({"pong": number}, PATIENCE)
        asked = time.monotonic()
        assert loan.ping(3, PATIENCE) >= asked


@pytest.mark.parametrize("answer", [{"pong": 1}, {"error": "no"}], ids=["pongs once more", "an error"])
def test_a_worker_that_says_something_else(answer: Mapping[str, Any]) -> None:
    """Without end, too: old pongs were read on and on, while nobody noticed that the worker was lost."""
    with lent(lambda: None) as (loan, theirs):
        theirs.send({"pong": 1}, PATIENCE)
        loan.ping(1, SECONDS)
        for _ in range(1000):
            theirs.send(answer, PATIENCE)
        with pytest.raises(ControlError, match=f"was asked for 'pong' and said {re.escape(repr(answer))}"):
            loan.ping(2, PATIENCE)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        *((answer, SilentError, "doesn't answer within 0.4 s") for answer in (None, {"age": 100.0}, {"age": "0"}, {})),
        ({"error": "isn't lent to this process any more"}, ControlError, "isn't lent to this process any more"),
    ],
)
def test_a_worker_without_a_sign_of_life(answer: Mapping[str, Any] | None, error: type[Exception], text: str) -> None:
    with lent(lambda: answer) as (loan, _), pytest.raises(error, match=text):
        loan.ping(1, 0.4)


# ---- how a worker's process has ended


@pytest.mark.parametrize(
    ("status", "kills", "end"),
    [
        (1 << 8, 5, End("its process ended with code 1")),
        (signal.SIGSEGV, 5, End("its process was ended by SIGSEGV")),
        (signal.SIGKILL, 0, End("its process was ended by SIGKILL")),
        (
            signal.SIGKILL,
            1,
            End(
                "its process was ended by SIGKILL when the kernel killed 1 for lack of memory; it had up to 3.00 MiB",
                out_of_memory=True,
            ),
        ),
        (40, 0, End("its process was ended by signal 40")),
    ],
)
def test_ends(status: int, kills: int, end: End) -> None:
    assert End.of(int(status), 3 * MIB, kills) == end
    assert End.parsed(end.message()) == end
    assert End.parsed(end.message() | {"out_of_memory": 1}) is End.parsed({}) is None


def test_the_kernel_s_count(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_kills() >= 0
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(ends, "_COUNTS", counts)
    assert memory_kills() == 0
    counts.write_text("pgfault 7\noom_kill 3\n")
    assert memory_kills() == 3


def test_a_signal_is_told(workers: LocalWorkers) -> None:
    addresses = workers.addresses[:2]
    wait_until(lambda: all(reachable(addresses, PATIENCE)))
    with connected(Cluster.of_servers(addresses), dapple.FaultPolicy(notice_seconds=10.0)) as connection:
        assert connection is not None
        (child,) = children(workers.processes[1].pid)
        os.kill(child, signal.SIGSEGV)
        wait_until(lambda: connection.lost is not None)
        assert "its process was ended by SIGSEGV" in str(connection.lost)
    wait_until(lambda: f"process {child} for a client: its process was ended by SIGSEGV" in workers.lines(1))


def test_what_stages_were_predicted_to_need_is_told() -> None:
    stages = [StageReport(1, 0.5, 0.1, 1, 3 * MIB, 2 * MIB), StageReport(1, 0.5, 0.1, 1, MIB, None)]
    for report, text in (
        (types.SimpleNamespace(stages=stages), "stage 0 was predicted to need 3.00 MiB of 2.00 MiB; stage 1 was predi"),
        (None, "use smaller micro-batches"),
    ):
        runtime = types.SimpleNamespace(plan=types.SimpleNamespace(report=report))
        assert Runtime._memory_of(runtime, [0, 1]).startswith(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(("out_of_memory", "attempts"), [(True, 1), (False, 5)])
def test_a_process_without_memory_is_started_again_once(out_of_memory: bool, attempts: int) -> None:
    reopened = itertools.count()
    engine: Any = types.SimpleNamespace(
        cluster=Cluster.of_servers(["a:1", "b:1"], devices_per_server=1),
        close=lambda: None,
        reopen=lambda: next(reopened),
    )
    recovery = Recovery(dapple.FaultPolicy("restart"))
    error = WorkerLostError("worker 1", 1, "", out_of_memory)
    with pytest.raises(WorkerLostError) as raised:
        while True:
            recovery.wait(error, engine)
    assert (next(reopened), raised.value.out_of_memory) == (attempts, out_of_memory)


# ---- closed ports are told of before TensorFlow waits for ever: from where, to which port

ADDRESSES = ["a:1", "b:1", "c:1"]
SERVERS = ["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"]
CLIENT = "10.0.0.9:7"


def check_ports(*answers: Mapping[str, Any], client: list[str] | None = None) -> None:
    """Checks a cluster whose workers give these answers, and of whose servers this process reaches all but some."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        closed = dict.fromkeys(client or [], "Connection refused")
        monkeypatch.setattr(open_ports, "unreachable", lambda servers, seconds: closed)
        servers = {server: server for server in SERVERS[: len(answers)]}
        told = dict(enumerate(answers))
        open_ports.check_ports(ADDRESSES[: len(answers)], lambda ask: told, servers, [CLIENT] * len(answers), 0.5)


def closed(*servers: str) -> dict[str, Any]:
    return {"unreachable": dict.fromkeys(servers, "no answer within 8 s")}


@pytest.mark.parametrize(
    ("client", "answers", "text", "tasks"),
    [
        ([], [closed(), closed(CLIENT)], "10.0.0.9:7 of this process can't be reached from worker 1 (b:1): no", [1]),
        ([], [closed(SERVERS[1]), closed()], "10.0.0.2:7 of worker 1 (b:1) can't be reached from worker 0 (a:1)", [1]),
        (
            [SERVERS[0]],
            [closed(), closed(SERVERS[0]), closed(SERVERS[1])],
            "10.0.0.1:7 of worker 0 (a:1) can't be reached from this process: Connection refused, nor from worker 1 "
            "(b:1): no answer within 8 s; TensorFlow's port 10.0.0.2:7 of worker 1 (b:1) can't be reached from worker",
            [0, 1],
        ),
    ],
    ids=["worker to client", "worker to worker", "several"],
)
def test_a_port_that_is_closed(client: list[str], answers: list[Any], text: str, tasks: list[int]) -> None:
    check_ports(closed(), closed(), closed())
    with pytest.raises(UnusableWorkersError, match="firewall") as raised:
        check_ports(*answers, client=client)
    assert text in str(raised.value)
    assert list(raised.value.tasks) == tasks


@pytest.mark.parametrize("told", [[], {SERVERS[0]: 5}, {"elsewhere:5": "closed"}])
def test_a_worker_that_does_not_say_which_ports_are_closed(told: Any) -> None:
    with pytest.raises(ClusterError, match="lacks 'unreachable' or garbles it"):
        check_ports(closed(), {"unreachable": told})


# ---- lost workers that answer again are told from those that can't be used, without waiting for any

CPU = {"kind": "CPU", "memory_bytes": 2**30, "hardware": "a processor"}
GPU = {"kind": "GPU", "memory_bytes": 2**30, "hardware": "a GPU"}


def status(*devices: Mapping[str, Any], holder: str | None = None, **versions: str) -> dict[str, Any]:
    return {"devices": list(devices), "holder": holder, "versions": own_versions() | versions}


def answering(answers: dict[str, Any]) -> contextlib.AbstractContextManager[str]:
    """A worker's address, where ``answers["status"]`` is the answer to all questions."""

    def serve(connection: socket.socket) -> None:
        with contextlib.closing(Channel(connection)) as channel:
            assert channel.receive(PATIENCE)["ask"] == "status"
            channel.send(answers["status"], PATIENCE)

    return serving(serve)


def cluster(*addresses: str) -> Cluster:
    name = "/job:worker/replica:0/task:{}/device:CPU:0"
    return Cluster(
        tuple(Device(name.format(task), task, kind="a processor") for task in range(len(addresses))),
        addresses=addresses,
    )


def there(returning: Returning, own: Cluster) -> frozenset[str]:
    """The answer to a question that is asked now."""
    assert not returning.there(own, range(len(own.addresses)))
    wait_until(lambda: not returning._answers.empty())
    return returning.there(own, range(len(own.addresses)))


def test_workers_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Why a worker isn't taken is logged once; of one that isn't there nothing is said."""
    answers = [
        *({"status": status(CPU)}, {"status": status(CPU, holder="somebody")}, {"status": status(GPU)}),
        *({"status": status(CPU, tensorflow="1.0")}, {"status": {"error": "busy"}}),
    ]
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        addresses = [stack.enter_context(answering(own)) for own in answers]
        own = cluster(*addresses, f"127.0.0.1:{free_ports(1)[0]}")
        returning = Returning(PATIENCE, 0.0)
        assert there(returning, own) == {addresses[0]}
        texts = sorted(record.getMessage() for record in caplog.records)
        assert len(texts) == 4
        for number, text in enumerate(texts, 1):
            assert text.startswith(f"training goes on without a lost worker: worker {number} ({addresses[number]})")
        assert "in use by another client" in texts[0]
        assert "is back with 1 GPU device (a GPU), but the cluster has 1 CPU device (a processor) of it" in texts[1]
        assert "1.0" in texts[2] and "busy" in texts[3]
        answers[1]["status"] = status(CPU, holder=client_name())  # an older connection of this process's, which hangs
        assert there(returning, own) == {addresses[0], addresses[1]}
        assert len(caplog.records) == 4
        # Before it is time, nobody is asked.
        threads, late = threading.active_count(), Returning(PATIENCE, 1e6)
        assert not any(late.there(own, [0]) for _ in range(3))
        assert threading.active_count() == threads


def test_a_question_without_an_answer_holds_nobody_up() -> None:
    """A worker that accepts and says nothing: one question at a time, and steps go on meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own = cluster(f"127.0.0.1:{silent.getsockname()[1]}")
        returning = Returning(PATIENCE, 0.0)
        threads = threading.active_count()
        assert not returning.there(own, [0])
        wait_until(lambda: threading.active_count() >= threads + 2)  # who asks, and its helper for this worker
        for _ in range(100):
            assert not returning.there(own, [0])
        assert threading.active_count() == threads + 2
        with contextlib.closing(Channel(silent.accept()[0])) as channel:
            assert channel.receive(PATIENCE)["ask"] == "status"
            channel.send(status(CPU), PATIENCE)
            wait_until(lambda: not returning._answers.empty())
        assert returning.there(own, [0]) == {own.addresses[0]}


def devices(kind: str, count: int, hardware: str = "") -> list[Device]:
    name = f"/job:worker/replica:0/task:0/device:{kind}"
    return [Device(f"{name}:{number}", 0, kind=hardware) for number in range(count)]


@pytest.mark.parametrize(
    ("offered", "wanted", "told"),
    [
        pytest.param([CPU, CPU], devices("CPU", 1, "a processor"), None, id="more"),
        pytest.param([GPU], devices("GPU", 1), None, id="of hardware that wasn't told"),
        pytest.param([GPU], devices("CPU", 1), None, id="the CPU that each server has"),
        pytest.param([CPU], devices("CPU", 2, "a processor"), r"1 CPU device \(a processor\), .* 2 CPU", id="fewer"),
        pytest.param([CPU], devices("GPU", 1), r"1 CPU device \(a processor\), .* 1 GPU device of it", id="no GPU"),
        pytest.param([GPU], devices("GPU", 1, "faster"), r"1 GPU device \(a GPU\), .* \(faster\)", id="GPU"),
    ],
)
def test_devices_of_a_worker_that_is_back(offered: list[dict[str, Any]], wanted: list[Device], told: str) -> None:
    refused = pytest.raises(ClusterError, match=rf"worker 0 \(10\.0\.0\.1:1\) is back with {told}")
    with refused if told else contextlib.nullcontext():
        check_back(0, "10.0.0.1:1", status(*offered), wanted)
