"""Workers that training goes on without: whether they are there again."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dapple_tf.common.units import counted
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.devices import Device
from dapple_tf.describe.machine_report import clean
from dapple_tf.errors import ClusterError
from dapple_tf.network.control import ControlError
from dapple_tf.network.inquiry import client_name, devices, for_each, hello, lease_secret

logger = logging.getLogger(__name__)


class Returning:
    """Asks lost workers now and then, in the background, whether they can be used again.

    A worker can be used if it answers, has the client's versions and the devices that the cluster has of it, and nobody
    else uses it. Why one that answers can't be used is logged once.
    """

    def __init__(self, seconds: float, pause: float) -> None:
        """Asks nobody yet.

        Args:
            seconds: a worker's time for its answer.
            pause: seconds before the first question, and between two.
        """
        self._seconds, self._pause = seconds, pause
        self._next = time.monotonic() + pause
        self._asking = False
        self._answers: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
        self._told: set[str] = set()

    def there(self, cluster: Cluster, tasks: Collection[int]) -> frozenset[str]:
        """Returns the addresses of the workers that could be used when they were asked last, each answer once.

        It never waits for a worker: if it is time for a question, a later call returns the answer.

        Args:
            cluster: the cluster to which the workers belonged.
            tasks: the workers' numbers there.
        """
        if not self._answers.empty():
            self._asking = False
            return self._answers.get()
        now = time.monotonic()
        if not self._asking and now >= self._next:
            self._asking, self._next = True, now + self._pause
            threading.Thread(target=self._ask, args=(cluster, tuple(tasks)), name="ask-lost", daemon=True).start()
        return frozenset()

    def _ask(self, cluster: Cluster, tasks: Sequence[int]) -> None:
        usable: set[str] = set()
        try:
            keys, located = cluster.keys, cluster.located()

            def ask(index: int) -> None:
                task, address = tasks[index], located[tasks[index]]
                try:
                    question = {"ask": "status", "secret": lease_secret(address)}
                    channel, answer = hello(task, address, question, self._seconds, keys)
                    channel.close()
                    wanted = [cluster.devices[device] for device in cluster.devices_of_worker(task)]
                    check_back(task, address, answer, wanted)
                    usable.add(cluster.addresses[task])
                except ClusterError as error:
                    if not isinstance(error.__cause__, ControlError):  # Otherwise it isn't there.
                        self._tell(str(error))

            for_each(ask, len(tasks))
        except ClusterError as error:  # This machine's keys can't be used now.
            self._tell(str(error))
        finally:
            self._answers.put(frozenset(usable))

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
