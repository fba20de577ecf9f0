"""Timed waits, in place of computation, transfers and reductions in an emulated step.

A wait begins when the executor calls it, and ends its own length after its inputs. As in the simulator, links serve
whoever is ready first, and tasks on shared cores slow each other down.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.shared_cores import pace
from dapple_tf.view.timeline import Span

GRACE = 1e-3
"""Seconds by which the executor may start a wait late without delaying later ones."""

Array = npt.NDArray[np.float64]


class EmulationError(RuntimeError):
    """A step can't be emulated, or the executor didn't run what the schedule says."""


@dataclass(eq=False)
class Wait:
    """A node that waits.

    Attributes:
        name: name of the node.
        span: index of its span; the members of a reduction share one.
        busy: seconds for which it occupies its device or ports.
        latency: seconds after that until it ends.
        after: waits that it follows.
        ports: ports that a transfer or a reduction has to itself.
        turn: order of two that are ready at the same time.
        server: server whose cores it shares; None for cores of its own.
        expected: value that each of its input tensors must have.
    """

    name: str
    span: int
    busy: float
    latency: float = 0.0
    after: tuple[Wait, ...] = ()
    ports: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()
    server: int | None = None
    expected: tuple[Array, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass
class MeasuredStep:
    """One step: latency and spans in seconds of the profile, the rest in wall-clock seconds."""

    latency: float
    spans: list[Span]
    lateness: float
    overdue: float


class StepClock:
    """Waits, and records one step: what has ended, and until when ports are taken.

    A wait ends its own length after its inputs arrived, however late the executor starts it, so that the executor's
    overhead doesn't add up along a chain of tasks; unless it is late by more than `GRACE`, or ``catch_up`` is False.
    Times are wall-clock seconds from the start of the step.
    """

    def __init__(self, costs: CostModel, scale: float, *, catch_up: bool = True) -> None:
        self.scale, self.catch_up = scale, catch_up
        cluster = costs.cluster
        self.cores = {
            server: SharedCores(cluster.capacity(server), self.now)
            for server in range(cluster.num_servers)
            if cluster.shares_cores(server)
        }
        self.lock = threading.Lock()
        self.reset(still=True)

    def reset(self, *, still: bool = False) -> None:
        """Prepares a step. In a ``still`` one nothing takes time."""
        self.still = still
        self.started = time.perf_counter()
        self.latency = 0.0
        self.ended: dict[Wait, float] = {}
        self.ports: dict[int, tuple[float, Wait]] = {}
        self.asked: dict[int, tuple[Wait, float, Wait | None]] = {}
        self.reserved: dict[int, tuple[float, Wait | None]] = {}
        self.records: list[tuple[Wait, float, float, Wait | None]] = []
        self.late: list[float] = []
        self.overdue = 0.0
        self.failure: Exception | None = None
        for cores in self.cores.values():
            cores.reset()

    def now(self) -> float:
        """Returns the seconds since the step began."""
        return time.perf_counter() - self.started

    # ---- what nodes call

    def begin(self) -> Array:
        """Starts the time; called by the step's first node."""
        self.started = time.perf_counter()
        return np.zeros(1)

    def wait(self, wait: Wait, *tensors: Array) -> Array:
        """Waits as long as the work takes, and passes the first tensor on."""
        entered = self.now()
        # An error raised here would leave the other members of a collective waiting: `check` raises it.
        if self.failure is None:
            try:
                self._check_tensors(wait, tensors)
                self._wait(wait, entered)
            except Exception as error:
                self.failure = error
        return tensors[0]

    def finish(self, wait: Wait) -> Array:
        """Waits for the step's time beyond its tasks, and ends the step."""
        if self.failure is None and not self.still:
            _sleep(max((self.ended[one] for one in wait.after), default=0.0) + wait.busy - self.now())
        self.latency = self.now()
        return np.zeros(1)

    def _wait(self, wait: Wait, entered: float) -> None:
        ready, cause = self._ready(wait)
        if self.still:
            self.ended[wait] = 0.0
            return
        self.late.append(entered - ready)
        if not self.catch_up:
            ready = max(ready, entered)
        start = ready
        if wait.server is not None:
            end = self.cores[wait.server].run(wait, max(ready, entered - GRACE), wait.busy)
        else:
            if wait.ports:
                start, cause = self._reserve(wait, ready, cause)
            end = start + wait.busy + wait.latency
            self.overdue = max(self.overdue, entered - end if end > ready else 0.0)
            _sleep(end - self.now())
        self.ended[wait] = max(end, entered - GRACE)
        self.records.append((wait, max(start, entered), self.now(), cause))

    def _ready(self, wait: Wait) -> tuple[float, Wait | None]:
        """Returns when all that it follows had ended, and the last of these."""
        ready, cause = 0.0, None
        for before in wait.after:
            if before not in self.ended:
                raise EmulationError(f"{wait} was started before {before} was over: an edge is missing")
            if cause is None or self.ended[before] > ready:
                ready, cause = self.ended[before], before
        return ready, cause

    def _reserve(self, wait: Wait, ready: float, cause: Wait | None) -> tuple[float, Wait | None]:
        """Returns when its ports are free, and the wait that held them until then: first come, first served.

        The order depends on when inputs were ready, not on which thread the machine woke first. So the ports are
        assigned a little later, when all earlier waits have registered.
        """
        with self.lock:
            if not wait.busy:
                return self._take(wait, ready, cause)
            if wait.span not in self.reserved:
                self.asked.setdefault(wait.span, (wait, ready, cause))
        _sleep(ready + GRACE - self.now())
        with self.lock:
            if wait.span not in self.reserved:
                order = sorted((round(came, 5), one.turn, span) for span, (one, came, _) in self.asked.items())
                # Members of a collective may have been ready at other times: the first of them asked.
                place = [span for _, _, span in order].index(wait.span)
                for _, _, span in order[: place + 1]:
                    self.reserved[span] = self._take(*self.asked.pop(span))
            return self.reserved[wait.span]

    def _take(self, wait: Wait, ready: float, cause: Wait | None) -> tuple[float, Wait | None]:
        start = ready
        for port in wait.ports:
            if port in self.ports and self.ports[port][0] > start:
                start, cause = self.ports[port]
        if wait.busy:
            self.ports |= dict.fromkeys(wait.ports, (start + wait.busy, wait))
        return start, cause

    def _check_tensors(self, wait: Wait, tensors: Sequence[Array]) -> None:
        for expected, tensor in zip(wait.expected, tensors, strict=True):
            if not np.array_equal(expected, tensor):
                raise EmulationError(f"{wait} should get {expected}, but it got {tensor}: an edge is wrong")

    # ---- after a step

    def check(self) -> None:
        """Raises the step's error, if there was one."""
        if self.failure is not None:
            raise self.failure

    def result(self, templates: Sequence[Span]) -> MeasuredStep:
        """Returns the measured step."""
        measured: dict[int, tuple[float, float, Wait | None]] = {}
        for wait, start, end, cause in self.records:
            if wait.span in measured:
                first, last, of_first = measured[wait.span]
                measured[wait.span] = (min(first, start), max(last, end), cause if start < first else of_first)
            else:
                measured[wait.span] = (start, end, cause)
        order = sorted(measured, key=lambda span: measured[span][0])
        position = {span: index for index, span in enumerate(order)}
        spans = []
        for number in order:
            start, end, cause = measured[number]
            spans.append(
                templates[number]._replace(
                    start=start / self.scale,
                    end=end / self.scale,
                    cause=None if cause is None else position[cause.span],
                )
            )
        lateness = statistics.fmean(self.late) if self.late else 0.0
        return MeasuredStep(self.latency / self.scale, spans, lateness, self.overdue)


class SharedCores:
    """Cores shared by the devices of a server: simultaneous tasks slow each other down."""

    def __init__(self, capacity: float, now: Callable[[], float]) -> None:
        self.capacity = capacity
        self.now = now
        self.changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Forgets the last step."""
        self.left: dict[Wait, float] = {}
        self.ended: dict[Wait, float] = {}
        self.updated = 0.0

    def run(self, wait: Wait, start: float, seconds: float) -> float:
        """Waits until the work that began at ``start`` is done, and returns its end."""
        with self.changed:
            self._advance(start)
            self.left[wait] = seconds
            self.changed.notify_all()
            while wait in self.left:
                end = self._next_end()
                if (timeout := end - self.now()) > 0:
                    self.changed.wait(timeout)
                else:
                    self._advance(end)
                    self.changed.notify_all()
            return self.ended[wait]

    def _rate(self) -> float:
        return pace(self.capacity, len(self.left))

    def _next_end(self) -> float:
        return self.updated + min(self.left.values()) / self._rate()

    def _advance(self, now: float) -> None:
        """Updates the remaining work; a time in the past changes nothing."""
        while self.left and (end := self._next_end()) <= now:
            least = min(self.left.values())
            for wait in list(self.left):
                self.left[wait] -= least
                if self.left[wait] <= 1e-9:
                    del self.left[wait]
                    self.ended[wait] = end
            self.updated = end
        if now > self.updated:
            for wait in self.left:
                self.left[wait] -= (now - self.updated) * self._rate()
            self.updated = now


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


# ---- the graph
