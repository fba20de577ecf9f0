"""Messages between a client and its workers: lines of JSON over TCP, each with a deadline."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

PROTOCOL = "dapple_tf.worker/2"


class ControlError(Exception):
    """The other side has gone, doesn't answer in time, or sends something that isn't a message."""


class SilentError(ControlError):
    """The other side doesn't answer in time."""


class Channel:
    """One connection, from either side.

    Not for use by several threads at once.

    Attributes:
        socket: the connection's socket, which doesn't block.
        longest: maximum bytes of a message that is received.
    """

    LONGEST = 1 << 20
    """Bytes of the longest message; a cluster of 10,000 workers needs half of it."""

    def __init__(self, connection: socket.socket, longest: int = LONGEST) -> None:
        self.socket, self.longest = connection, longest
        self._buffer = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: str, seconds: float) -> Channel:
        """Connects to "host:port".

        Raises:
            ControlError: nobody answers there.
        """
        host, port = split_address(address)
        try:
            return cls(socket.create_connection((host, port), timeout=max(0.001, seconds)))
        except OSError as error:
            raise ControlError(f"can't be reached: {error}") from error

    def close(self) -> None:
        """Closes the connection; does nothing if it is already closed."""
        self.socket.close()

    def send(self, message: Mapping[str, Any], seconds: float) -> None:
        """Sends a message within ``seconds``.

        Raises:
            ControlError: it couldn't be sent.
        """
        left = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + seconds
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                self._wait(deadline, "takes no message", write=True)
            except OSError as error:
                raise ControlError(f"connection lost: {error}") from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """Returns the next message, if it arrives within ``seconds``.

        Raises:
            SilentError: none arrived.
            ControlError: the connection is lost, or something else arrived.
        """
        deadline = time.monotonic() + seconds
        # Looks at the socket before the clock: a process that has slept finds what has arrived meanwhile.
        while (message := self.receive_now()) is None:
            self._wait(deadline, f"doesn't answer within {seconds:.3g} s")
        return message

    def receive_now(self) -> dict[str, Any] | None:
        """Returns the next message if all of it has arrived, otherwise None.

        Raises:
            ControlError: the connection has ended, or what arrived isn't a message.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > self.longest:
                raise ControlError(f"sends a message of more than {self.longest} bytes")
            try:
                received = self.socket.recv(65536)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ControlError(f"connection lost: {error}") from error
            if not received:
                raise ControlError("connection closed by the other side")
            self._buffer += received
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return _parse(line)

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a message and returns the answer; see `send` and `receive`."""
        self.send(message, seconds)
        return self.receive(seconds)

    def _wait(self, deadline: float, otherwise: str, *, write: bool = False) -> None:
        waiting = select.poll()
        waiting.register(self.socket, select.POLLOUT if write else select.POLLIN)
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise SilentError(otherwise)


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[host]:port", as `dapple_tf.describe.cluster.check_addresses` allows them."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns "host:port" or "[host]:port", the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"sends something that isn't JSON: {error}") from error
    if not isinstance(message, dict):
        raise ControlError(f"sends a JSON {type(message).__name__} where an object is expected")
    return message
