"""Which TensorFlow servers can be reached from this machine, before TensorFlow waits for one that can't.

TensorFlow's servers connect to each other, and wait without end for one behind a firewall. Whoever knocks speaks as
much HTTP/2 as gRPC does in the beginning; a server answers that at once, before any graph or variable is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence

from dapple_tf.network.control import split_address

_AT_ONCE = 500
"""Number of connections at once; a process has files for twice as many, usually."""
_FRAME_BYTES = 9
_SETTINGS = 4
"""Type of the frame that begins a connection, from either side (RFC 9113, section 3.4)."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_FALLBACK_SECONDS = 0.25
"""Seconds until the next one of a host's addresses is tried, too, as gRPC does."""


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
