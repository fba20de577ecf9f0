"""Sessions on workers, and calls into TensorFlow that may never return."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from dapple_tf.clusters.session import PreparedRun
from dapple_tf.errors import WorkerLostError, reason

if TYPE_CHECKING:
    from dapple_tf.clusters.connection import Connection

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 60.0
_FORMER_CALLS_SECONDS = 2.0
"""Maximum seconds for abandoned calls to end, before workers serve anew or their session is closed."""

_IDLE_SECONDS = 10.0
"""Seconds after which a thread without a call ends."""

_running: set[Call] = set()
"""Calls that are inside TensorFlow."""


class _Threads:
    """Threads that run calls, one call after the other. A thread whose call never returns runs no other one.

    Starting a thread for each call took half a millisecond of each step.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # counts threads that wait for a call, and that no call is for yet

    def run(self, call: Call) -> None:
        """Runs a call in a thread that has none, or else in a fresh one."""
        if self._idle.acquire(blocking=False):
            self._calls.put(call)
        else:
            threading.Thread(target=self._serve, args=(call,), name="run", daemon=True).start()

    def _serve(self, first: Call) -> None:
        first.run(self._idle.release)
        del first  # While it waits, it holds no call.
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    return
                continue  # A call is about to come.
            call.run(self._idle.release)
            del call


_threads = _Threads()


def _start_over() -> None:
    """Forgets threads and calls that a forked process doesn't have."""
    global _threads
    _threads = _Threads()
    _running.clear()


os.register_at_fork(after_in_child=_start_over)


class Call:
    """A call in another thread, which may never return: Python mustn't wait for it when it exits.

    Attributes:
        workers: addresses of the workers that it uses; empty once nobody has to wait for it any more.
        begun: set as soon as the thread runs it.
        done: set when the call has ended.
        result: what the call returned.
        error: what the call raised.
    """

    def __init__(
        self, function: Callable[[], Any], changed: threading.Condition, workers: Collection[str] = ()
    ) -> None:
        self.workers = frozenset(workers)
        self.begun = threading.Event()
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._function: Callable[[], Any] | None = function
        self._changed = changed
        self._forgotten = False

    def start(self) -> None:
        """Begins the call. Ctrl-C may strike here before or after the call has begun: see `begun`."""
        _threads.run(self)

    def run(self, returned: Callable[[], object]) -> None:
        """Makes the call in this thread; ``returned`` is called before anybody learns that it has ended."""
        _running.add(self)
        self.begun.set()
        function, self._function = self._function, None
        assert function is not None
        try:
            self.result = function()
        except BaseException as error:
            self.error = error
        del function
        returned()
        with self._changed:
            self.done = True
            if self._forgotten:
                self.result = self.error = None
            self._changed.notify_all()
        _running.discard(self)

    def wait(self, seconds: float) -> None:
        """Waits at most ``seconds`` for its end."""
        with self._changed:
            self._changed.wait_for(lambda: self.done, max(0.0, seconds))

    def forget(self) -> None:
        """Notes that nobody asks for the result any more.

        An error holds the frames that raised it and what they use, batches above all; one of them holds this call.
        """
        with self._changed:
            self._forgotten = True
            self.result = self.error = None


class RemoteSession:
    """A ``tf.compat.v1.Session`` on the devices of workers; no method waits for a lost worker.

    Attributes:
        connection: connection to the workers.
        graph: the graph to run.
        sequence: name of the numbers of its runs with collective operations.
    """

    def __init__(
        self, connection: Connection, graph: tf.Graph, config: tf.compat.v1.ConfigProto, *, trial: bool = False
    ) -> None:
        """Opens the session; ``trial`` is its runs', see `Connection.call`."""
        self.connection, self.graph = connection, graph
        self.sequence = random.SystemRandom().getrandbits(62) | 1
        self._trial = trial
        self._session = tf.compat.v1.Session(connection.target, graph=graph, config=config)
        # When Python frees a session, also as it exits, TensorFlow waits for the workers, lost ones too. Python doesn't
        # free this one unless it has been closed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))
        self._left_open = weakref.finalize(self, _close_aside, self._session, connection.addresses)
        self._left_open.atexit = False

    def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
        seconds: float | None = None,
    ) -> Any:
        """Runs ``Session.run``, which counts as hung after ``seconds``.

        Raises:
            WorkerLostError: a worker was lost; see `Connection.call`.
        """
        return self._call(lambda: self._session.run(fetches, feed_dict, options, run_metadata), seconds)

    def run_prepared(self, run: PreparedRun, values: Sequence[Any], seconds: float | None = None) -> Any:
        """Makes a run of this session that `prepare` has returned; as `run` otherwise."""
        return self._call(lambda: run(values), seconds)

    def prepare(self, fetches: Any, feeds: Sequence[str], options: Any = None) -> PreparedRun:
        """Looks up the names of a run; for `run_prepared` alone."""
        return PreparedRun(self._session, fetches, feeds, options, remote=True)

    def _call(self, function: Callable[[], Any], seconds: float | None) -> Any:
        return self.connection.call(function, trial=self._trial, seconds=seconds)

    @property
    def closed(self) -> bool:
        """Whether the session can't run anything any more."""
        return not self._left_open.alive

    def close(self) -> None:
        """Frees its resources on the workers, unless their end does."""
        if self._left_open.detach() is None:
            return  # closed already
        try:
            self.connection.call(self._session.close, seconds=_CLOSE_SECONDS)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._session))
        except (WorkerLostError, tf.errors.OpError) as error:
            logger.info("a session couldn't be closed: %s", reason(error))
            _close_aside(self._session, self.connection.addresses)  # Closing cancels what it runs elsewhere.

    def abandon(self) -> None:
        """Closes it in a thread that nobody waits for."""
        self._left_open()

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_aside(session: Any, workers: Collection[str]) -> None:
    """Closes a session in a thread that nobody waits for, and lets Python free it then.

    First its calls end: they need a lock to return, which closing keeps until the workers serve anew, as TensorFlow
    then has them clean up after the last step. TensorFlow waits for that without end, also if a worker is lost for
    good: the thread then stays until a server listens at the worker's former port, or this process ends.
    """

    def close() -> None:
        _wait_for(_calls_on(workers), _FORMER_CALLS_SECONDS)
        with contextlib.suppress(tf.errors.OpError):  # A worker is lost: there is nothing left to close.
            session.close()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(session))

    Call(close, threading.Condition()).start()


def wait_for_all_calls(seconds: float) -> None:
    """Waits at most ``seconds`` for running calls, when Python exits.

    A thread that returns from TensorFlow while Python shuts down aborts the process. Steps that wait for a worker that
    is gone for good are likely to return now; steps that wait for a hanging worker, and sessions that are being closed
    without their workers, aren't.
    """
    _wait_for(list(_running), seconds)


def wait_for_former_calls(workers: Collection[str]) -> None:
    """Waits a little for the end of calls that were abandoned on some of ``workers``, before these serve anew.

    As soon as no server of theirs listens, everything that such a call asks of one is refused, and the call ends. A new
    server at the same port takes the question instead, for the output of a step that it knows nothing of, and answers
    never: TensorFlow cancels the parts of a failed step once, and one that begins later misses that.
    """
    calls = _calls_on(workers)
    _wait_for(calls, _FORMER_CALLS_SECONDS)
    for call in calls:
        call.workers = frozenset()  # It waits for a worker that hangs: the next attempts don't wait for it again.


def _calls_on(workers: Collection[str]) -> list[Call]:
    return [call for call in list(_running) if not call.workers.isdisjoint(workers)]


def _wait_for(calls: Iterable[Call], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for call in calls:
        call.wait(deadline - time.monotonic())
