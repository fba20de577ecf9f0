"""Whether TensorFlow's servers, the workers' and this process's, can connect to each other."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dapple_tf.clusters.lease import Lease
from dapple_tf.describe.cluster import ClusterError
from dapple_tf.errors import UnusableWorkersError
from dapple_tf.network.inquiry import for_each, garbled
from dapple_tf.network.knocking import unreachable

_SHARE = 0.8
"""Share of the time for an answer that workers may knock for."""
_LONGEST_SECONDS = 3600.0
"""Maximum seconds to knock for."""
_SERVERS = 3
"""Maximum number of servers that an error names."""
_CLIENT = -1
"""This process's number among the workers'."""


class _Way(NamedTuple):
    """A way from a machine to a server, by the numbers of their workers."""

    source: int
    target: int


def check_ports(
    addresses: Sequence[str],
    ask_all: Callable[[Callable[[Lease], dict[str, Any]]], Mapping[int, Mapping[str, Any]]],
    servers: Mapping[str, str],
    clients: Sequence[str],
    seconds: float,
) -> None:
    """Has this process and all workers knock at each other's TensorFlow servers.

    Args:
        addresses: ``host:port`` of each worker.
        ask_all: asks all workers something, which serve; returns worker number -> its answer.
        servers: ``host:port`` of each worker's TensorFlow server -> where this process reaches it.
        clients: ``host:port`` of this process's server, as each worker reaches it.
        seconds: time in which each has to answer.

    Raises:
        UnusableWorkersError: a server can't be reached.
        ClusterError: a worker garbles its answer.
        WorkerLostError: a worker was lost.
    """
    targets = {server: task for task, server in enumerate(servers)} | dict.fromkeys(clients, _CLIENT)
    knocking = min(_SHARE * seconds, _LONGEST_SECONDS)
    answers: dict[int, Mapping[str, Any]] = {}

    def knock(here: int) -> None:
        if here:
            answers[_CLIENT] = {"unreachable": unreachable(servers, knocking)}
        else:
            answers.update(ask_all(lambda lease: lease.knock(knocking, seconds)))

    # All at once: who knocks at a server that doesn't answer waits for the whole time.
    for_each(knock, 2)
    closed: dict[_Way, str] = {}
    for source, answer in answers.items():
        told = answer["unreachable"]
        if not isinstance(told, dict) or not told.keys() <= set(targets) or {*map(type, told.values())} - {str}:
            raise ClusterError(f"worker {source} ({addresses[source]}) {garbled(answer, 'unreachable')}")
        closed |= {_Way(source, targets[server]): why for server, why in told.items()}
    if closed:
        raise UnusableWorkersError(_text(closed, addresses, [*servers], clients), _to_leave_out(closed))


def _to_leave_out(ways: Collection[_Way]) -> list[int]:
    """Returns few workers without which no way is left: those with a way from or to this process, then the busiest.

    client → 0, 1 → 0, 1 → 2   is   0 2
    """
    tasks = {task for way in ways if _CLIENT in way for task in way} - {_CLIENT}
    while left := [way for way in ways if tasks.isdisjoint(way)]:
        counts = collections.Counter(task for way in left for task in way)
        at_target = collections.Counter(way.target for way in left)
        tasks.add(max(counts, key=lambda task: (counts[task], at_target[task], task)))
    return sorted(tasks)


def _text(ways: Mapping[_Way, str], addresses: Sequence[str], servers: Sequence[str], clients: Sequence[str]) -> str:
    """Returns an error's text: which servers, from where, and what happens there."""
    sources: dict[int, list[str]] = {}
    for (source, target), answer in sorted(ways.items()):
        where = "this process" if source == _CLIENT else f"worker {source} ({addresses[source]})"
        sources.setdefault(target, []).append(f"{where}: {answer}")
    closed = []
    for target, told in list(sources.items())[:_SERVERS]:
        if target == _CLIENT:
            ports = f"{' and '.join(dict.fromkeys(clients))} of this process"
        else:
            ports = f"{servers[target]} of worker {target} ({addresses[target]})"
        closed.append(f"TensorFlow's port {ports} can't be reached from {', nor from '.join(told)}")
    if len(sources) > _SERVERS:
        closed.append(f"so it is with {len(sources) - _SERVERS} more")
    return (
        f"{'; '.join(closed)}. Does a firewall stop these connections? TensorFlow's servers, this process's included, "
        f"connect to each other directly; a worker's has a fixed port to open with --server_port"
    )
