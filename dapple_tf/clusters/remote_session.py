"""Sessions on workers, and calls into TensorFlow that may never end."""

from __future__ import annotations

import ctypes
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from dapple_tf.errors import WorkerLostError

if TYPE_CHECKING:
    from dapple_tf.clusters.connection import Connection

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 60.0

_running: set[threading.Thread] = set()
"""Threads that are in TensorFlow on behalf of a call."""


class Call:
    """A call in a thread of its own, which may never end: Python mustn't wait for it when it exits.

    Attributes:
        begun: set as soon as the thread runs.
        done: whether the call has ended.
        result: what it returned.
        error: what it raised.
    """

    def __init__(self, function: Callable[[], Any], changed: threading.Condition) -> None:
        self.begun = threading.Event()
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._function, self._changed = function, changed
        self._thread = threading.Thread(target=self._run, name="run", daemon=True)

    def start(self) -> None:
        """Begins the call. Ctrl-C may strike in here, when the call is under way and when it isn't: see `begun`."""
        self._thread.start()

    def _run(self) -> None:
        _running.add(self._thread)
        self.begun.set()
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        with self._changed:
            self.done = True
            self._changed.notify_all()
        _running.discard(self._thread)


class RemoteSession:
    """A ``tf.compat.v1.Session`` on the devices of workers, none of whose methods waits for a worker that is lost.

    Attributes:
        connection: to the workers.
        graph: what it runs.
        sequence: names the numbers of its runs with collective operations.
    """

    def __init__(
        self, connection: Connection, graph: tf.Graph, config: tf.compat.v1.ConfigProto, *, breaks: bool = True
    ) -> None:
        self.connection, self.graph = connection, graph
        self.sequence = random.SystemRandom().getrandbits(62) | 1
        self._breaks = breaks
        self._session = tf.compat.v1.Session(connection.target, graph=graph, config=config)
        # When Python frees a session, also as it exits, TensorFlow waits for the workers, lost ones too. Python doesn't
        # free this one unless it has been closed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))
        self._left_open = weakref.finalize(self, _close_aside, self._session)
        self._left_open.atexit = False

    def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
        seconds: float | None = None,
    ) -> Any:
        """``Session.run``, which counts as hung after so many seconds.

        Raises:
            WorkerLostError: a worker was lost; see `Connection.call`.
        """
        return self.connection.call(
            lambda: self._session.run(fetches, feed_dict, options, run_metadata), breaks=self._breaks, seconds=seconds
        )

    @property
    def closed(self) -> bool:
        """Whether it can't run anything any more."""
        return not self._left_open.alive

    def close(self) -> None:
        """Frees what it has on the workers; their end frees it otherwise."""
        if self._left_open.detach() is None:
            return  # closed already
        try:
            self.connection.call(self._session.close, seconds=_CLOSE_SECONDS)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._session))
        except (WorkerLostError, tf.errors.OpError) as error:
            logger.info("a session couldn't be closed: %s", error)
            _close_aside(self._session)  # Closing cancels what it runs elsewhere.

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_aside(session: Any) -> None:
    """Closes a session in a thread that nobody waits for."""
    Call(session.close, threading.Condition()).start()


def wait_for_calls(seconds: float) -> None:
    """Waits so long for calls that are under way, as Python exits.

    A thread that comes back from TensorFlow while Python is being taken down aborts the process. Those that wait for a
    worker which is gone for good are likely to come back now; those that wait for one that hangs, aren't.
    """
    deadline = time.monotonic() + seconds
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
