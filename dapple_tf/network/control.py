"""Messages between a client and its workers: lines of JSON over TCP or TLS, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from dapple_tf.errors import printable
from dapple_tf.network.keys import Keys, fingerprint

PROTOCOL = "dapple_tf.worker/2"
_TLS_HANDSHAKE = 0x16
"""First byte of who speaks TLS."""
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
        writing: whether `receive_now` waits until TLS can send something, not until something arrives.
    """

    LONGEST = 1 << 20
    """Bytes of the longest message; a cluster of 10,000 workers needs half of it."""

    def __init__(self, connection: socket.socket, longest: int = LONGEST) -> None:
        self.socket, self.longest = connection, longest
        self.writing = False
        self._buffer = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: str, seconds: float, keys: Keys | None = None) -> Channel:
        """Connects to "host:port".

        Args:
            address: the address.
            seconds: time in which somebody has to answer there.
            keys: this machine's, for TLS; None for TCP.

        Raises:
            ControlError: nobody answers there, or not one whose certificate is for that host.
        """
        host, port = split_address(address)
        try:
            connection = socket.create_connection((host, port), timeout=max(0.001, seconds))
        except OSError as error:
            raise ControlError(f"can't be reached: {error}") from error
        try:
            if keys is not None:
                connection = keys.client(connection, host)
                connection.do_handshake()
            return cls(connection)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise ControlError(f"has a certificate that isn't accepted: {error.verify_message}") from error
        except OSError as error:
            connection.close()
            raise ControlError(f"doesn't speak TLS as expected (was it started with --tls?): {error}") from error

    def close(self) -> None:
        """Closes the connection; does nothing if it is already closed."""
        self.socket.close()

    def interrupt(self) -> None:
        """Ends the connection while another thread uses it, which notices that as if the other side had closed it."""
        with contextlib.suppress(OSError):
            # Not that of SSLSocket, which makes it a plain one at once.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the other side's certificate; empty without TLS."""
        return fingerprint(self.socket) if isinstance(self.socket, ssl.SSLSocket) else ""

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
            except _BLOCKED as blocked:
                self._wait(deadline, "takes no message", write=not isinstance(blocked, ssl.SSLWantReadError))
            except OSError as error:
                raise ControlError(f"connection lost: {error}") from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """Returns the next message, if it arrives within ``seconds``.

        Raises:
            SilentError: none arrived.
            ControlError: the connection is lost, or something else arrived.
        """
        deadline = time.monotonic() + seconds
        silent = f"doesn't answer within {seconds:.3g} s"
        while True:
            late = time.monotonic() > deadline
            # Looks at the socket in any case: a process that has slept finds what has arrived meanwhile.
            if (message := self.receive_now()) is not None:
                return message
            if late:
                raise SilentError(silent)
            self._wait(deadline, silent, write=self.writing)

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
            except _BLOCKED as blocked:
                self.writing = isinstance(blocked, ssl.SSLWantWriteError)
                return None
            except ssl.SSLError as error:
                raise ControlError(f"breaks TLS off: {error.reason or error}") from error
            except OSError as error:
                raise ControlError(f"connection lost: {error}") from error
            if not received:
                raise ControlError("connection closed by the other side")
            self._buffer += received
            if self._buffer[0] == _TLS_HANDSHAKE:
                raise ControlError("speaks TLS, which this side wasn't told to (--tls)")
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


class Hello:
    """A connection until its first message has arrived, on the side that accepts it.

    Attributes:
        channel: the connection.
        keys: this machine's, for TLS; None for TCP.
        message: the message; empty until it has arrived.
    """

    _LONGEST = 1 << 14
    """Maximum bytes of a first message."""

    def __init__(self, connection: socket.socket, keys: Keys | None = None) -> None:
        """Begins to listen to a client.

        Args:
            connection: the connection.
            keys: this machine's, for TLS, whose handshake comes with the first message; None for TCP.
        """
        self.keys = keys
        self.channel = Channel(connection if keys is None else keys.server(connection), self._LONGEST)
        self.message: dict[str, Any] = {}

    @property
    def connection(self) -> socket.socket:
        """The connection's socket, which doesn't block."""
        return self.channel.socket

    @property
    def writing(self) -> bool:
        """Whether it waits until TLS can send something, not until something arrives."""
        return self.channel.writing

    def advance(self) -> bool:
        """Goes on with what has arrived; returns whether that is all of the message.

        Raises:
            ControlError: the connection has ended, or what arrived isn't a message.
        """
        message = self.channel.receive_now()
        if message is None:
            return False
        self.message, self.channel.longest = message, Channel.LONGEST
        return True


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[host]:port", as `dapple_tf.describe.cluster.check_addresses` allows them."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns "host:port" or "[host]:port", the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse(line: bytes) -> dict[str, Any]:
    """Returns a message; its texts are printable, as they get into errors and logs."""
    try:
        message = _escaped(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise ControlError(f"sends something that isn't JSON: {error}") from error
    if not isinstance(message, dict):
        raise ControlError(f"sends a JSON {type(message).__name__} where an object is expected")
    return message


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return printable(value) if isinstance(value, str) else value
