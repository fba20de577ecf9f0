"""Which workers training goes on without, whether they are there again, and which larger deployment to take then."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dapple_tf.clusters.shared_connections import others_use
from dapple_tf.common.units import counted
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.devices import Device
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.machine_report import clean
from dapple_tf.errors import ClusterError
from dapple_tf.network.control import ControlError
from dapple_tf.network.inquiry import client_name, devices, for_each, inventory, status
from dapple_tf.planning.replanning import Deployment, Growth, Replanner

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""Seconds between two attempts to reach workers that somebody waits for."""
_LONGEST_PAUSE = 3600.0
"""Most seconds between two questions to lost workers."""
_SOON = 10
"""A worker that is lost again within this multiple of the pause is asked less often."""


class Membership:
    """The deployments that training has left behind, and the workers that it goes on without.

    These are asked now and then, in the background, whether they can be used again: whether they answer, have the
    client's versions and the devices that the cluster has of them, and nobody else uses them. Why one that answers
    can't be used is logged once. The pause between two questions doubles when workers that came back are soon lost
    again, or can't be taken in: each time costs the preparation of steps.

    Attributes:
        former: the deployments by their workers' addresses, the one on all workers first.
        pause: seconds before the next question.
    """

    def __init__(self, seconds: float) -> None:
        """Starts without any.

        Args:
            seconds: pause before lost workers are asked for the first time, and their time for an answer.
        """
        self.former: dict[tuple[str, ...], Deployment] = {}
        self._seconds = seconds
        self._lost = 0.0  # when workers were lost last
        self._ask_after(seconds)

    def _ask_after(self, pause: float) -> None:
        """Begins to ask anew, whoever has been asked so far."""
        self.pause = min(pause, max(self._seconds, _LONGEST_PAUSE))
        self._next = time.monotonic() + self.pause
        self._answer: queue.SimpleQueue[frozenset[str]] | None = None  # to come, if somebody is asked
        self._told: set[str] = set()
        self._judged: tuple[Deployment, frozenset[str], Growth | None] | None = None

    def left(self, deployment: Deployment) -> None:
        """Notes that training goes on without some workers of a deployment."""
        before, self._lost = self._lost, time.monotonic()
        again = deployment.cluster.addresses in self.former and self._lost - before < _SOON * self.pause
        self.former[deployment.cluster.addresses] = deployment
        self._ask_after(2 * self.pause if again else self._seconds)

    def put_off(self) -> None:
        """Notes that workers which came back couldn't be taken in."""
        self._ask_after(2 * self.pause)

    def growth(self, present: Deployment, replanner: Replanner) -> Growth | None:
        """Returns a larger deployment if workers have come back and it gains by them; never waits for a worker."""
        if not self.former:
            return None
        cluster = next(iter(self.former.values())).cluster
        away = [task for task, own in enumerate(cluster.addresses) if own not in present.cluster.addresses]
        there = self.there(cluster, away) if away else None
        if not there:
            return None
        if self._judged is None or self._judged[:2] != (present, there):
            self._judged = present, there, replanner.growth(present, self.former, there)
            if self._judged[2] is None:
                logger.warning("workers %s are back, but the plan gains nothing by them", ", ".join(sorted(there)))
        growth = self._judged[2]
        return None if growth is None or others_use(growth.deployment.cluster, present.cluster) else growth

    def there(self, cluster: Cluster, tasks: Collection[int]) -> frozenset[str]:
        """Returns the addresses of the workers that could be used when they were asked last, each answer once.

        It never waits for a worker: if it is time for a question, a later call returns the answer.

        Args:
            cluster: the cluster to which the workers belonged.
            tasks: the workers' numbers there.
        """
        answer, now = self._answer, time.monotonic()
        if answer is not None and not answer.empty():
            self._answer = None
            return answer.get()
        if answer is None and now >= self._next:
            self._answer, self._next = queue.SimpleQueue(), now + self.pause
            asked = cluster, tuple(tasks), self._answer
            threading.Thread(target=self._ask, args=asked, name="ask-lost", daemon=True).start()
        return frozenset()

    def _ask(self, cluster: Cluster, tasks: Sequence[int], answer: queue.SimpleQueue[frozenset[str]]) -> None:
        usable: set[str] = set()
        try:
            keys, located = cluster.keys, cluster.located()

            def ask(index: int) -> None:
                task, address = tasks[index], located[tasks[index]]
                try:
                    wanted = [cluster.devices[device] for device in cluster.devices_of_worker(task)]
                    check_back(task, address, status(task, address, self._seconds, keys), wanted)
                    usable.add(cluster.addresses[task])
                except ClusterError as error:
                    if not isinstance(error.__cause__, ControlError):  # Otherwise it isn't there.
                        self._tell(str(error))

            for_each(ask, len(tasks))
        except ClusterError as error:  # This machine's keys can't be used now.
            self._tell(str(error))
        finally:
            answer.put(frozenset(usable))

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("training goes on without a lost worker: %s", text)


def check_back(task: int, address: str, answer: Mapping[str, Any], wanted: Sequence[Device]) -> None:
    """Checks that a worker which has come back has the devices of before, and isn't in use by others.

    Args:
        task: the worker's number.
        address: its address.
        answer: its status.
        wanted: the devices that the cluster has of it. Hardware that isn't known may be any.

    Raises:
        ClusterError: it can't be used, or garbles its answer.
    """
    offered = devices(task, address, answer)
    if not all(_has(offered, device) for device in wanted):
        before = _counted((device.type, device.kind) for device in wanted)
        now = _counted((entry["kind"], clean(entry.get("hardware", ""))) for entry in offered)
        raise ClusterError(
            f"worker {task} ({address}) is back with {now}, but the cluster has {before} of it: start it as it was, or "
            f"describe the cluster anew (Cluster.of_servers) and transform the model again"
        )
    if answer.get("holder") not in (None, client_name()):
        raise ClusterError(f"worker {task} ({address}) is back, but in use by another client")


def _has(offered: Sequence[Mapping[str, Any]], device: Device) -> bool:
    if device.number >= len(offered) or offered[device.number]["kind"] != device.type:
        return device.type == "CPU" and device.number == 0 and not device.kind  # A server has one in any case.
    return device.kind in ("", clean(offered[device.number].get("hardware", "")))


def _counted(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns "2 GPU devices (NVIDIA A100)", say."""
    counts = Counter(pairs)
    return " and ".join(
        f"{counted(count, f'{kind} device')}{f' ({hardware})' if hardware else ''}"
        for (kind, hardware), count in counts.items()
    )


def wait_for_workers(cluster: Cluster, policy: FaultPolicy) -> None:
    """Waits for missing workers, such as restarting ones, unless the policy is ``raise``.

    Raises:
        ClusterError: one isn't there in time, or can't be used.
    """
    deadline, told = time.monotonic() + policy.wait_seconds, False
    while cluster.addresses and policy.action != "raise":
        try:
            inventory(cluster.located(), policy.notice_seconds, cluster.keys)
            return
        except ClusterError as error:
            if not isinstance(error.__cause__, ControlError) or time.monotonic() >= deadline:
                raise
            if not told:
                logger.warning("%s; waiting up to %g s for it", str(error), policy.wait_seconds)
            told = True
        time.sleep(PAUSE_SECONDS)
