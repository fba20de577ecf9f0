"""Takes connections when they have opened, without waiting for anybody who is slow to speak.

Whoever connects and says nothing costs one socket for `_OPENING_SECONDS`, and no process or thread. If there are too
many of them, those of the host that has the most go first, so that one host can't keep others out.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from dapple_tf.network.control import ControlError

logger = logging.getLogger(__name__)

_OPENING_SECONDS = 10.0
"""Seconds within which a connection must have opened, and be taken."""
_MOST_GUESTS = 256
"""Maximum number of connections that haven't been taken."""
_PAUSE_SECONDS = 0.05


class Opening(Protocol):
    """A connection that begins: a handshake, a first message, or both."""

    @property
    def connection(self) -> socket.socket:
        """The connection's socket, which doesn't block."""
        ...

    @property
    def writing(self) -> bool:
        """Whether it waits until it can send, not until something arrives."""
        ...

    def advance(self) -> bool:
        """Goes on with what has arrived; returns whether the connection has opened.

        Raises:
            ControlError: it never will.
        """
        ...


_O = TypeVar("_O", bound=Opening)


@dataclasses.dataclass(eq=False)
class Guest(Generic[_O]):
    """A connection at its beginning.

    Attributes:
        opening: the connection.
        host: the other side's address.
        deadline: when it is given up unless it has been taken, by the monotonic clock.
        ready: whether it has opened.
    """

    opening: _O
    host: str
    deadline: float
    ready: bool = False


class Acceptor(Generic[_O]):
    """Connections to a listening socket that haven't been taken yet."""

    def __init__(self, listener: socket.socket, begin: Callable[[socket.socket], _O]) -> None:
        """Begins to accept connections.

        Args:
            listener: the listening socket.
            begin: makes an accepted connection's opening.
        """
        listener.setblocking(False)
        self._listener, self._begin = listener, begin
        self._guests: list[Guest[_O]] = []  # the oldest first
        # Without an object in the kernel that processes share after a fork, as epoll has.
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self) -> None:
        """Waits until something arrives; returns after a while in any case, so that the caller sees signals."""
        now = time.monotonic()
        seconds = min((guest.deadline - now for guest in self._guests), default=_OPENING_SECONDS)
        if any(guest.ready for guest in self._guests):  # The caller has no room for them yet.
            seconds = min(seconds, _PAUSE_SECONDS)
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                self._accept()
            elif key.data in self._guests:
                self._advance(key.data)
        for guest in [guest for guest in self._guests if guest.deadline <= time.monotonic()]:
            self._dismiss(guest, "isn't served in time: too many others are" if guest.ready else "says nothing")

    def take(self, served: Mapping[str, int]) -> Guest[_O] | None:
        """Returns a connection that has opened, which is the caller's from now on; None if there is none.

        Args:
            served: number of connections that are served, by host: the host with the fewest is next.
        """
        ready = [guest for guest in self._guests if guest.ready]
        if not ready:
            return None
        guest = min(ready, key=lambda guest: served.get(guest.host, 0))
        self._guests.remove(guest)
        return guest

    def close(self) -> None:
        """Closes the listening socket and all connections that haven't been taken; in a fork, this process's copies."""
        for guest in self._guests:
            guest.opening.connection.close()
        self._guests.clear()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return  # It has gone already.
        except OSError as error:  # The other side has gone, or memory or file handles are short.
            logger.warning("a connection is lost before it began: %s", error)
            time.sleep(0.01)
            return
        if len(self._guests) >= _MOST_GUESTS:
            counts = collections.Counter(guest.host for guest in self._guests)
            crowd = max(counts, key=counts.__getitem__)
            oldest = next(guest for guest in self._guests if guest.host == crowd)
            self._dismiss(oldest, f"is one of {_MOST_GUESTS} that connect at once, most of them from there")
        try:
            opening = self._begin(connection)
        except OSError as error:
            connection.close()
            logger.info("a connection from %s is lost: %s", address[0], error)
            return
        guest = Guest(opening, str(address[0]), time.monotonic() + _OPENING_SECONDS)
        self._guests.append(guest)
        self._selector.register(opening.connection, selectors.EVENT_READ, guest)

    def _advance(self, guest: Guest[_O]) -> None:
        try:
            guest.ready = guest.opening.advance()
        except ControlError as error:
            self._dismiss(guest, str(error))
            return
        if guest.ready:
            self._selector.unregister(guest.opening.connection)
        else:
            event = selectors.EVENT_WRITE if guest.opening.writing else selectors.EVENT_READ
            self._selector.modify(guest.opening.connection, event, guest)

    def _dismiss(self, guest: Guest[_O], why: str) -> None:
        logger.info("a client at %s %s", guest.host, why)
        with contextlib.suppress(KeyError):
            self._selector.unregister(guest.opening.connection)
        guest.opening.connection.close()
        self._guests.remove(guest)
