"""A graph that grows step by step, and the session that runs it on the devices."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.clusters.clocks import Offset, estimate
from dapple_tf.clusters.remote_session import RemoteSession
from dapple_tf.clusters.session import PreparedRun, SessionGraph
from dapple_tf.clusters.shared_connections import connected, open_session
from dapple_tf.common.memory import return_freed_memory
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.errors import WorkerLostError
from dapple_tf.execution.builds import StepRequest
from dapple_tf.execution.gpu_check import check_kernels
from dapple_tf.execution.terminal import without_noise
from graph_passes.ir.graph import GraphDef

_LEAST_PATIENCE = 60.0
"""Seconds."""
_LOCAL_SEQUENCE = 1
"""Numbers the steps with collective operations of a session of this process; any number but 0."""


class DeviceSession:
    """A session on devices of this process or of workers, and its graph.

    Attributes:
        cluster: the devices.
        faults: how long to wait for workers.
        generation: number of sessions opened before: what workers keep besides the graph goes with each.
        added: names of the graphs that were added to its own.
        reading: held while batches are read on workers, beside a step: no session is closed or opened meanwhile.
    """

    def __init__(self, cluster: Cluster, faults: FaultPolicy) -> None:
        """Opens a session on workers, which belong to this process until `close`.

        Raises:
            ClusterError: a worker is missing.
        """
        self.cluster, self.faults = cluster, faults
        self.generation = 0
        self.reading = threading.RLock()
        self._connected = contextlib.ExitStack()
        self._connection = self._connected.enter_context(connected(cluster, faults))
        self._open()

    def _open(self) -> None:
        self._session_graph, self.added = SessionGraph(), set[str]()
        self._session = open_session(self.cluster, self.graph, self._connection)
        self._prepared: dict[StepRequest, PreparedRun] = {}
        self._traced: set[str] = set()
        self._longest: dict[str, float] = {}  # step graph -> seconds
        self._runs: dict[str, int] = {}  # step graph -> number of runs; the one that ran last comes last

    def close(self) -> None:
        """Frees the devices' memory, and workers for others."""
        with self.reading:
            self._end()
            self._connected.close()

    def _end(self) -> None:
        """Frees the devices' memory; workers stay this process's."""
        self._prepared.clear()
        self._session.close()

    def renew(self) -> None:
        """Opens a fresh session with an empty graph, on the same workers."""
        with self.reading:
            self._end()
            self._open()
            self.generation += 1

    def reopen(self) -> None:
        """Opens a fresh session on the same graph, after `close`: variables are empty until they are loaded.

        Raises:
            ClusterError: a worker is missing; the call may be repeated.
        """
        with self.reading:
            self._connection = self._connected.enter_context(connected(self.cluster, self.faults))
            self._session = open_session(self.cluster, self.graph, self._connection)
            self._prepared.clear()
            self._traced.clear()
            self.generation += 1

    def another(self) -> DeviceSession:
        """Opens another session on the same devices, with an empty graph and variables of its own.

        Raises:
            WorkerLostError: a worker is lost.
        """
        if self.lost is not None:
            raise self.lost
        session = DeviceSession(self.cluster, self.faults)
        session.reading = self.reading
        return session

    @property
    def graph(self) -> tf.Graph:
        """Everything that can be run."""
        return self._session_graph.graph

    @property
    def lost(self) -> WorkerLostError | None:
        """The error of the lost worker, without a traceback; None if all are there."""
        lost = self._session.connection.lost if isinstance(self._session, RemoteSession) else None
        return None if lost is None else lost.anew()

    @property
    def freed(self) -> bool:
        """Whether the session is gone without `close`, because Python is collecting it."""
        return isinstance(self._session, RemoteSession) and self._session.closed

    @property
    def requests(self) -> tuple[StepRequest, ...]:
        """The steps that have run on this process's devices."""
        return () if isinstance(self._session, RemoteSession) else tuple(self._prepared)

    def add(self, graph: GraphDef, name: str) -> None:
        """Adds a graph to the session's, under a name.

        Raises:
            DappleError: a GPU lacks a kernel that it needs.
        """
        if self.cluster.has_gpus:
            check_kernels(graph)
        self._session_graph.add(graph, name)
        self.added.add(name)

    def run(
        self,
        fetches: Any,
        feed: Mapping[str, Any] | None = None,
        options: Any = None,
        metadata: Any = None,
        seconds: float | None = None,
    ) -> Any:
        """Runs nodes of the session's graph; everything but a prepared step runs this way.

        On workers the run counts as hung after ``seconds``.
        """
        if isinstance(self._session, RemoteSession):
            return self._session.run(fetches, feed, options, metadata, seconds)
        return self._session.run(fetches, feed, options=options, run_metadata=metadata)

    def run_update(self, node: str) -> None:
        """Runs a node that updates variables, with collective operations or without."""
        self.run(node, options=self._options())

    # ---- steps

    def has_run(self, name: str) -> bool:
        """Whether a step has run already, so that TensorFlow has prepared it."""
        return name in self._longest

    def most_run(self, count: int) -> list[str]:
        """Returns the ``count`` most frequent steps, the latest first among equals."""
        return sorted(self._runs, key=self._runs.__getitem__)[-count:] if count else []

    def run_step(self, name: str, request: StepRequest, values: Sequence[Any], metadata: Any = None) -> Any:
        """Runs a step with these values of its placeholders.

        On workers it counts as hung after ten times as long as it has ever taken, the first time included.

        Args:
            name: name of the step.
            request: its feeds and fetches.
            values: the values of its placeholders.
            metadata: a ``RunMetadata`` that gets the step's times and allocations; None for a step without a trace.
        """
        longest = self._longest.get(name)
        if longest is None:
            return_freed_memory()  # TensorFlow prepares the step in other threads than the one that built it.
        started = time.monotonic()
        result = self._run_step(
            request, values, metadata, None if longest is None else max(_LEAST_PATIENCE, 10 * longest)
        )
        self._longest[name] = max(longest or 0.0, time.monotonic() - started)
        if longest is None and isinstance(self._session, RemoteSession):
            return_freed_memory()  # Here nothing computes that would need as much in the next step.
        self._runs[name] = self._runs.pop(name, 0) + 1
        return result

    def _run_step(self, request: StepRequest, values: Sequence[Any], metadata: Any, seconds: float | None) -> Any:
        if metadata is None:
            run = self._prepared.get(request)
            remote = isinstance(self._session, RemoteSession)
            if run is None:
                prepare = self._session.prepare if remote else functools.partial(PreparedRun, self._session)
                run = self._prepared[request] = prepare(request.fetches, request.feeds, self._options(request.sums))
            return self._session.run_prepared(run, values, seconds) if remote else run(values)
        options = self._options(request.sums)
        feed = dict(zip(request.feeds, values, strict=True))
        # TensorFlow's profiler, which costs time, is for GPUs and for servers, which know no other trace.
        profiled = self.cluster.has_gpus or isinstance(self._session, RemoteSession)
        options.trace_level = options.FULL_TRACE if profiled else options.SOFTWARE_TRACE
        with without_noise() if profiled else contextlib.nullcontext():
            return self.run(request.fetches, feed, options, metadata, seconds)

    def _options(self, sums: bool = False) -> tf.compat.v1.RunOptions:
        """Returns options for graphs that may have collective operations, inside tasks if ``sums``.

        TensorFlow numbers the runs of such graphs consecutively, each session's from where another's has stopped. An
        abandoned run of a session with a lost worker may still exist: with the same number in a new session, its end
        would cancel the new run, or take its tensors. Each session therefore has its own sequence. On devices of this
        process TensorFlow looks for collective operations itself, but not inside functions.
        """
        options = tf.compat.v1.RunOptions()
        if isinstance(self._session, RemoteSession):
            options.experimental.collective_graph_key = self._session.sequence
        elif sums:
            options.experimental.collective_graph_key = _LOCAL_SEQUENCE
        return options

    # ---- traces

    def first_trace(self, name: str) -> bool:
        """Notes that a step has been traced; returns whether that was the first time."""
        first = name not in self._traced
        self._traced.add(name)
        return first

    def clocks(self) -> dict[int, Offset]:
        """Returns worker -> how far its clock is ahead; empty if the devices are this process's."""
        if not isinstance(self._session, RemoteSession):
            return {}
        asked = self._session.connection.clocks()
        return {worker: estimate(samples) for worker, samples in asked.items()}
