"""Growing again: which larger deployment a runtime that went on without workers may take."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping

from dapple_tf.clusters.returning import Returning
from dapple_tf.clusters.shared_connections import others_use
from dapple_tf.planning.replanning import Deployment, Growth, Replanner

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 3600.0
"""Most seconds between two questions to lost workers."""
_SOON = 10
"""A worker that is lost again within this multiple of the pause is asked less often."""


@dataclasses.dataclass(frozen=True)
class GrowthRecord:
    """Workers that came back and were taken in.

    Attributes:
        added: addresses of the workers.
        step: the last step that was finished without them.
        began: when it began, in seconds since 1970.
        replayed: number of repeated steps.
        seconds: seconds that it took, without the preparation of steps by the new plan.
        present: predicted seconds of a step before; None if the gain isn't predicted.
        latency: predicted seconds of a step since.
    """

    added: tuple[str, ...]
    step: int
    began: float
    replayed: int
    seconds: float
    present: float | None
    latency: float | None


class Growing:
    """The deployments that a runtime has left behind, and the workers that it goes on without.

    The pause between two questions to these doubles when workers that came back are soon lost again, or can't be taken
    in: each time costs the preparation of steps.
    """

    def __init__(self, seconds: float) -> None:
        """Starts without any.

        Args:
            seconds: pause before lost workers are asked for the first time, and their time for an answer.
        """
        self._seconds = self._pause = seconds
        self._lost = 0.0  # when workers were lost last
        self._former: dict[tuple[str, ...], Deployment] = {}  # the one on all workers first
        self._returning: Returning | None = None
        self._judged: tuple[Deployment, frozenset[str], Growth | None] | None = None

    @property
    def former(self) -> Mapping[tuple[str, ...], Deployment]:
        """The deployments by their workers' addresses, the one on all workers first."""
        return self._former

    def left(self, deployment: Deployment) -> None:
        """Notes that training goes on without some workers of a deployment."""
        now = time.monotonic()
        again = deployment.cluster.addresses in self._former
        if again and now - self._lost < _SOON * self._pause:
            self._pause = self._doubled
        else:
            self._pause = self._seconds
        self._former[deployment.cluster.addresses] = deployment
        self._returning, self._judged, self._lost = Returning(self._seconds, self._pause), None, now

    def put_off(self) -> None:
        """Notes that workers which came back couldn't be taken in."""
        self._pause = self._doubled
        self._returning = Returning(self._seconds, self._pause)

    @property
    def _doubled(self) -> float:
        return min(2 * self._pause, max(self._seconds, _LONGEST_PAUSE))

    def growth(self, present: Deployment, replanner: Replanner) -> Growth | None:
        """Returns a larger deployment if workers have come back and it gains by them; never waits for a worker."""
        if self._returning is None:
            return None
        cluster = next(iter(self._former.values())).cluster
        away = [task for task, own in enumerate(cluster.addresses) if own not in present.cluster.addresses]
        there = self._returning.there(cluster, away) if away else None
        if not there:
            return None
        if self._judged is None or self._judged[:2] != (present, there):
            self._judged = present, there, replanner.growth(present, self._former, there)
            if self._judged[2] is None:
                logger.warning("workers %s are back, but the plan gains nothing by them", ", ".join(sorted(there)))
        growth = self._judged[2]
        if growth is None or others_use(growth.deployment.cluster, present.cluster):
            return None
        return growth
