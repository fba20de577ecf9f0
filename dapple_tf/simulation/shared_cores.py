"""Work on servers whose devices share their cores: what runs at the same time slows each other down."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dapple_tf.describe.cluster import Cluster
from dapple_tf.view.timeline import Span

_TOLERANCE = 1e-9
"""Pieces that would end this much of their work's time after another end with it."""


@dataclass(eq=False)
class Running:
    """A running task or update.

    Attributes:
        span: as if it were undisturbed.
        number: of the activity.
        left: the remaining undisturbed seconds.
        marks: what is left when each of its pieces but the last ends, and the unit that this completes, in order.
        index: position of its span; None if that isn't recorded before its end.
    """

    span: Span
    number: int
    left: float
    marks: deque[tuple[float, int]]
    index: int | None

    @property
    def next(self) -> float:
        """The undisturbed seconds until its next piece ends, or itself."""
        return self.left - self.marks[0][0] if self.marks else self.left


def pace(capacity: float, running: int) -> float:
    """Returns how fast each of some devices computes that share cores, relative to a device alone."""
    return min(1.0, capacity / running)


class SharedCores:
    """What runs on each server, and how fast.

    Attributes:
        shared: for each server whether its devices slow each other down.
        capacity: how many devices' worth of cores each server has.
        running: what runs on each.
        updated: when the remaining work of each was computed.
        version: of the prediction of what ends next on each.
    """

    def __init__(self, cluster: Cluster) -> None:
        servers = range(cluster.num_servers)
        self.capacity = [cluster.capacity(server) for server in servers]
        self.shared = [cluster.shares_cores(server) for server in servers]
        self.running: list[list[Running]] = [[] for _ in servers]
        self.updated = [0.0 for _ in servers]
        self.version = [0 for _ in servers]

    def copied(self) -> SharedCores:
        """Returns a copy of the state."""
        other = copy.copy(self)
        other.updated, other.version = self.updated.copy(), self.version.copy()
        other.running = [[replace(item, marks=deque(item.marks)) for item in items] for items in self.running]
        return other

    def begin(self, server: int, item: Running, now: float) -> None:
        """Starts work; what `next` returned before no longer holds."""
        self._advance(server, now)
        self.running[server].append(item)
        self.version[server] += 1

    def next(self, server: int, now: float) -> tuple[float, int] | None:
        """Returns when a piece of a server's work ends next if nothing else starts or ends before; None if none runs.

        Returns:
            The time, and the version of this prediction.
        """
        running = self.running[server]
        if not running:
            return None
        left = min(item.next for item in running)
        return now + max(0.0, left) / self._rate(server), self.version[server]

    def over(self, server: int, version: int, now: float) -> Iterator[tuple[Running, int | None]]:
        """Yields the work whose piece ends now, with the unit that this completes; None if the work itself is over.

        Yields nothing if the prediction is outdated.
        """
        if version != self.version[server]:
            return
        self._advance(server, now)
        self.version[server] += 1
        running = self.running[server]
        least = min(item.next for item in running)
        for item in [item for item in running if item.next <= least + _TOLERANCE * (item.span.end - item.span.start)]:
            if item.marks:
                yield item, item.marks.popleft()[1]
            else:
                running.remove(item)
                yield item, None

    def _rate(self, server: int) -> float:
        return pace(self.capacity[server], len(self.running[server]))

    def _advance(self, server: int, now: float) -> None:
        """Updates the remaining work."""
        running = self.running[server]
        done = (now - self.updated[server]) * self._rate(server) if running else 0.0
        for item in running:
            item.left -= done
        self.updated[server] = now
