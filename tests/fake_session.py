"""Workers without processes: their sessions run on logical devices of this process, and calls fail as they are told.

All of the client's code runs, but for what opens sockets: `Connection` watches, calls and loses these workers,
`RemoteSession` runs a session whose values are gone with its workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.clusters import connection, membership, remote_session, shared_connections
from dapple_tf.clusters.connection import Connection
from dapple_tf.clusters.lease import Lease
from dapple_tf.clusters.membership import Membership
from dapple_tf.clusters.session import SessionGraph
from dapple_tf.describe.cluster import ClusterError
from dapple_tf.errors import UnusableWorkersError
from dapple_tf.execution import elastic
from dapple_tf.network.control import ControlError, SilentError
from graph_passes.ir.graph import GraphDef, copied
from graph_passes.ir.tensorflow_bridge import bare_config

SECONDS = 30.0
"""Until a call that hangs gives up: only a defect lets it wait for so long."""
_numbers = itertools.count()
_DEVICE = re.compile(r"/job:(?:worker/replica:0/task:(\d+)|client/replica:0/task:0)/device:CPU:0")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to one call.

    Attributes:
        kind: ``dies`` and ``hangs``: a worker; ``breaks``: connections, with workers ``parted`` or not; ``cancelled``:
            the call alone; ``stuck``: the call, though all workers answer; ``slow``: nothing but time.
        worker: number of the worker among all.
        runs: whether the call has its effect all the same, and only the answer is lost.
        away: number of questions by clients until the worker is back.
    """

    kind: str
    worker: int = 0
    runs: bool = False
    away: float = 0


class FakeWorkers:
    """Workers of one device each, and the faults of calls, by the calls' numbers.

    Attributes:
        cluster: the workers.
        faults: call's number -> what happens to it.
        calls: number of calls so far.
        opened: number of connections so far.
        met: the faults that have happened.
        before: called with each call's number before it.
    """

    def __init__(self, count: int) -> None:
        host = f"fake{next(_numbers)}"  # Others may still be in use.
        addresses = [f"{host}:{port}" for port in range(1, count + 1)]
        self.cluster = dapple.Cluster.of_servers(addresses, devices_per_server=1)
        self.opened = 0
        self.before: Callable[[int], object] = lambda number: None
        self._lives = [0] * count  # number of times that each has died, or gone on after it was given up
        self._lock = threading.Lock()
        self.begin({})

    def begin(self, faults: Mapping[int, Fault]) -> None:
        """Counts calls anew, to some of which something is to happen; all workers are there."""
        self.calls, self.faults = 0, dict(faults)
        self.met: list[Fault] = []
        self._away = [0.0] * len(self._lives)
        self._silent: set[int] = set()
        self._parted: dict[int, float] = {}

    def number(self, address: str) -> int:
        """A worker's number."""
        return self.cluster.addresses.index(address)

    def kill(self, worker: int, away: float = float("inf")) -> None:
        """Ends a worker, which is back after some questions."""
        self._lives[worker] += 1
        self._away[worker] = away

    def restart(self, worker: int) -> None:
        """Brings a worker back, and its connections."""
        self._away[worker] = self._parted[worker] = 0

    def join(self) -> None:
        """Brings all connections between workers back."""
        self._parted.clear()

    @contextlib.contextmanager
    def used(self) -> Iterator[FakeWorkers]:
        """A context in which the client's code takes them for real ones."""
        add = SessionGraph.add
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_connections, "Connection", lambda *given: FakeConnection(self, *given))
            patch.setattr(shared_connections, "session_config", lambda _: bare_config(CPU=len(self._lives) + 1, GPU=0))
            patch.setattr(SessionGraph, "add", lambda own, graph, name: add(own, _here(graph), name))
            patch.setattr(connection, "_PAUSE", 0.02)
            patch.setattr(remote_session, "_FORMER_CALLS_SECONDS", 1.0)
            patch.setattr(remote_session, "_CLOSE_SECONDS", 5.0)  # Iterators may hold up the end of a local session.
            for module in (elastic, membership):
                patch.setattr(module, "PAUSE_SECONDS", 0.0)
            patch.setattr(elastic, "reachable", lambda addresses, *_: [*map(self.answers, addresses)])
            patch.setattr(membership, "inventory", lambda addresses, *_: [*map(self.meet, addresses)])
            patch.setattr(Membership, "there", lambda _, cluster, tasks: self.there(cluster, tasks))
            yield self

    # ---- what the client's code asks

    def answers(self, address: str) -> bool:
        """Whether a worker answers a fresh question."""
        number = self.number(address)
        self._away[number] = max(0, self._away[number] - 1)
        return not self._away[number]

    def meet(self, address: str) -> None:
        """Asks a worker something, as it is to be used.

        Raises:
            ClusterError: it doesn't answer.
        """
        if not self.answers(address):
            error = ClusterError(f"worker {self.number(address)} ({address}) can't be reached: connection refused")
            raise error from ControlError("connection refused")

    def there(self, cluster: dapple.Cluster, tasks: Collection[int]) -> frozenset[str]:
        """Lost workers that are back; they are asked in this thread, each time."""
        located = cluster.located()
        return frozenset(cluster.addresses[task] for task in tasks if self.answers(located[task]))

    def life(self, address: str) -> int:
        """Which life of a worker this is."""
        return self._lives[self.number(address)]

    def ping(self, address: str, life: int) -> None:
        """A question on a connection that a worker has accepted.

        Raises:
            ControlError: it has died since, or is silent.
        """
        if self.life(address) != life:
            raise ControlError("connection closed by the other side")
        if self.number(address) in self._silent:
            raise SilentError("doesn't answer within 1.76 s")

    def parted(self, addresses: Sequence[str]) -> list[int]:
        """Numbers, in a cluster, of the workers that others can't reach now."""
        tasks = [task for task, address in enumerate(addresses) if self._parted.get(self.number(address))]
        for task in tasks:
            self._parted[self.number(addresses[task])] -= 1
        return tasks

    def run(self, own: FakeConnection, function: Callable[[], Any], fault: Fault | None) -> Any:
        """A call, in its own thread."""
        if not own.alive:
            raise tf.errors.UnavailableError(None, None, "Socket closed")
        if fault is None:
            return function()
        self.met.append(fault)
        result = function() if fault.runs else None
        kind, worker = fault.kind, fault.worker
        if kind == "slow":
            time.sleep(0.02)
            return result if fault.runs else function()
        if kind == "dies":
            self.kill(worker, fault.away)
            raise tf.errors.UnavailableError(None, None, "Socket closed")
        if kind == "hangs":
            self._silent.add(worker)
        if kind == "parted":
            self._parted[worker] = 1 + fault.away
        if kind in ("breaks", "parted"):
            raise tf.errors.UnavailableError(None, None, "recvmsg: Connection reset by peer")
        if kind == "cancelled":
            raise tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled.")
        assert kind in ("hangs", "stuck")
        assert own.ended.wait(SECONDS)  # Its client gives it up.
        if kind == "hangs":
            self._silent.discard(worker)
            self.kill(worker, fault.away)
        raise tf.errors.AbortedError(None, None, "Step cancelled.")

    def next_fault(self) -> Fault | None:
        """What happens to the next call."""
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
        self.before(number)
        return self.faults.get(number)


class FakeLease(Lease):
    """A lease of a worker in one of its lives."""

    def __init__(self, workers: FakeWorkers, task: int, address: str) -> None:
        super().__init__(task, address, _NoChannel(), port=1, host="here")  # type: ignore[arg-type]
        self._workers, self.life = workers, workers.life(address)

    def ping(self, number: int, seconds: float) -> float:
        asked = time.monotonic()
        self._workers.ping(self.address, self.life)
        return asked

    def end(self, seconds: float) -> None:
        return None


class _NoChannel:
    fingerprint = ""
    close = interrupt = staticmethod(lambda: None)


class FakeConnection(Connection):
    """A connection to workers without processes; watching and calling are the real ones."""

    def __init__(self, workers: FakeWorkers, cluster: dapple.Cluster, faults: dapple.FaultPolicy) -> None:
        self.workers, self.ended = workers, threading.Event()
        workers.opened += 1
        super().__init__(cluster, faults)

    def _borrow(self, task: int) -> Lease:
        address = self.addresses[task]
        self.workers.meet(address)
        return FakeLease(self.workers, task, address)

    def _serve(self, leases: Sequence[Lease]) -> str:
        return ""

    def _check_ports(self) -> None:
        if tasks := self.workers.parted(self.addresses):
            raise UnusableWorkersError(f"TensorFlow's port of worker {tasks[0]} can't be reached", tasks)

    def _greet(self) -> None:
        pass

    @property
    def alive(self) -> bool:
        """Whether all servers that this connection has started are there."""
        return all(lease.life == self.workers.life(lease.address) for lease in self._leases)  # type: ignore[attr-defined]

    def call(self, function: Callable[[], Any], **options: Any) -> Any:
        if self.lost is not None or self._closed:
            return super().call(function, **options)
        fault = self.workers.next_fault()
        if fault is not None and fault.kind == "stuck":
            options["seconds"] = 0.02
        return super().call(lambda: self.workers.run(self, function, fault), **options)

    def close(self) -> None:
        self.ended.set()
        super().close()


def _here(graph: GraphDef) -> GraphDef:
    """A graph whose devices are this process's: the client's is the first, then come those of the workers."""
    graph = copied(graph)
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            node.device = _DEVICE.sub(
                lambda name: f"/job:localhost/replica:0/task:0/device:CPU:{int(name[1]) + 1 if name[1] else 0}",
                node.device,
            )
    return graph
