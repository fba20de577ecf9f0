"""How a worker's process has ended is told to the client: by a signal, for lack of memory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import types
import uuid
from collections.abc import Iterator

import pytest
import tensorflow as tf
from workers import PATIENCE, children, wait_until

import dapple_tf as dapple
from dapple_tf.clusters import ends
from dapple_tf.clusters.ends import End, memory_kills
from dapple_tf.clusters.shared_connections import connected, open_session
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan_report import StageReport
from dapple_tf.errors import WorkerLostError
from dapple_tf.execution.recovery import Recovery
from dapple_tf.execution.runtime import Runtime
from dapple_tf.network.inquiry import reachable
from dapple_tf.tools.hosts import LocalWorkers

MIB = 2**20


@pytest.mark.parametrize(
    ("status", "kills", "end"),
    [
        (0, 0, End("its process ended with code 0")),
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
        (64, 0, End("its process was ended by SIGRTMAX")),
        (40, 0, End("its process was ended by signal 40")),
    ],
)
def test_ends(status: int, kills: int, end: End) -> None:
    assert End.of(int(status), 3 * MIB, kills) == end
    assert End.parsed(end.message()) == end


@pytest.mark.parametrize("answer", [{}, {"ended": 5, "out_of_memory": True}, {"ended": "so", "out_of_memory": 1}])
def test_answers_that_are_no_ends(answer: dict[str, object]) -> None:
    assert End.parsed(answer) is None


def test_the_kernel_s_count(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_kills() >= 0
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(ends, "_COUNTS", counts)
    assert memory_kills() == 0
    counts.write_text("pgfault 7\noom_kill 3\n")
    assert memory_kills() == 3


@pytest.fixture
def cluster(workers: LocalWorkers) -> dapple.Cluster:
    wait_until(lambda: all(reachable(workers.addresses[:2], PATIENCE)))
    return dapple.Cluster.of_servers(workers.addresses[:2])


def test_a_signal_is_told(cluster: dapple.Cluster, workers: LocalWorkers) -> None:
    with connected(cluster, FaultPolicy(notice_seconds=10.0)) as connection:
        assert connection is not None
        (child,) = children(workers.processes[1].pid)
        os.kill(child, signal.SIGSEGV)
        wait_until(lambda: connection.lost is not None)
        assert "its process was ended by SIGSEGV" in str(connection.lost)
    wait_until(lambda: f"process {child} for a client: its process was ended by SIGSEGV" in workers.lines(1))


@contextlib.contextmanager
def memory_limit(process: int, size: int) -> Iterator[None]:
    """Limits the memory of a process, and of those that it starts from now on, besides what it has already."""
    root = pathlib.Path("/sys/fs/cgroup")
    old = (root / "memory" / "memory.limit_in_bytes").exists()
    above = root / "memory" if old else root
    group = above / f"dapple_{uuid.uuid4().hex[:12]}"
    try:
        if not old:
            (root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(size))
        (group / "cgroup.procs").write_text(str(process))
    except OSError as error:
        pytest.skip(f"needs control groups for memory, and root: {error}")
    try:
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # It has ended meanwhile.
                (above / "cgroup.procs").write_text(member)
        group.rmdir()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_process_without_memory_is_told(cluster: dapple.Cluster, workers: LocalWorkers) -> None:
    """All that a user saw was a closed connection, five times."""
    with tf.Graph().as_default() as graph, tf.device(cluster.device_names[1]):
        large = tf.reduce_sum(tf.random.uniform([2**30]))
    process = workers.processes[1].pid
    with memory_limit(process, 500 * MIB), connected(cluster, FaultPolicy(notice_seconds=10.0)):
        with open_session(cluster, graph) as session, pytest.raises(WorkerLostError) as raised:
            session.run(large)
        assert raised.value.out_of_memory
        assert "was ended by SIGKILL when the kernel killed 1 for lack of memory; it had up to " in str(raised.value)
        wait_until(lambda: not children(process))
    assert any("for lack of memory" in line for line in workers.lines(1))


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
    class Engine:
        """Nothing to close."""

        def __init__(self) -> None:
            self.cluster = dapple.Cluster.of_servers(["a:1", "b:1"], devices_per_server=1)
            self.reopened = 0

        def close(self) -> None:
            pass

        def reopen(self) -> None:
            self.reopened += 1

    engine, recovery = Engine(), Recovery(FaultPolicy("restart"))
    error = WorkerLostError("worker 1", 1, "", out_of_memory)
    with pytest.raises(WorkerLostError) as raised:
        while True:
            recovery.wait(error, engine)  # type: ignore[arg-type]
    assert engine.reopened == attempts
    assert raised.value.out_of_memory == out_of_memory
