"""Whether TensorFlow's servers can connect to each other, before TensorFlow waits for one that can't be reached.

TensorFlow's servers connect to each other, and wait without end for one behind a firewall. Whoever knocks speaks as
much HTTP/2 as gRPC does in the beginning; a server answers that at once, before any graph or variable is known.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dapple_tf.errors import ClusterError, UnusableWorkersError
from dapple_tf.network.control import split_address
from dapple_tf.network.inquiry import for_each, garbled

_AT_ONCE = 500
"""Number of connections at once; a process has files for twice as many, usually."""
_FRAME_BYTES = 9
_SETTINGS = 4
"""Type of the frame that begins a connection, from either side (RFC 9113, section 3.4)."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_FALLBACK_SECONDS = 0.25
"""Seconds until the next one of a host's addresses is tried, too, as gRPC does."""
_SHARE = 0.8
"""Share of the time for an answer that workers may knock for."""
_LONGEST_SECONDS = 3600.0
"""Maximum seconds to knock for."""
_SERVERS = 3
"""Maximum number of servers that an error names."""
_CLIENT = -1
"""This process's number among the workers'."""


def unreachable(servers: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Knocks at TensorFlow servers; returns silent ones after ``seconds``, with the reason.

        unreachable({"10.0.0.2:2300": "10.0.0.2:2300", "10.0.0.3:2300": "10.0.0.3:2300"}, 10.0)
        is {"10.0.0.3:2300": "no answer within 10 s"}

    Not for a thread that runs an event loop.

    Args:
        servers: address -> where to knock, which is another place if a tunnel leads there.
        seconds: time for an answer.
    """
    answers = asyncio.run(_knock_at_all([*servers.values()], seconds))
    return {address: answer for address, answer in zip(servers, answers, strict=True) if answer is not None}


async def _knock_at_all(addresses: Sequence[str], seconds: float) -> list[str | None]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def knock(address: str) -> str | None:
        async with places:
            try:
                async with asyncio.timeout(seconds):
                    return await _knock(address)
            except TimeoutError:
                return f"no answer within {seconds:.3g} s"

    return await asyncio.gather(*map(knock, addresses))


async def _knock(address: str) -> str | None:
    """Returns what happens instead of a server's answer; None if it answers."""
    host, port = split_address(address)
    try:
        reader, writer = await asyncio.open_connection(host, port, happy_eyeballs_delay=_FALLBACK_SECONDS)
    except OSError as error:
        return _told(error)
    try:
        writer.write(_GREETING)
        frame = await reader.readexactly(_FRAME_BYTES)
    except asyncio.IncompleteReadError:
        return "the connection is closed from there"
    except OSError as error:
        return _told(error)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return None if frame[3] == _SETTINGS else f"something else answers there: {frame!r}"


def _told(error: OSError) -> str:
    """Returns an error's own words, without the address, which asyncio adds."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)


# ---- between all servers of a cluster


class _Way(NamedTuple):
    """A way from a machine to a server, by the numbers of their workers."""

    source: int
    target: int


def check_ports(
    addresses: Sequence[str],
    ask_all: Callable[[float], Mapping[int, Mapping[str, Any]]],
    servers: Mapping[str, str],
    clients: Sequence[str],
    seconds: float,
) -> None:
    """Has this process and all workers knock at each other's TensorFlow servers.

    Args:
        addresses: ``host:port`` of each worker.
        ask_all: has all workers knock for some seconds; returns worker number -> its answer.
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
            answers.update(ask_all(knocking))

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
