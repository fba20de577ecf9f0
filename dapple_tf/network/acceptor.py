"""Takes connections and their first messages, without waiting for anybody who is slow to speak.

Whoever connects and says nothing costs a worker one socket for `_HELLO_SECONDS`, and no process. If there are too many
of them, those of the host that has the most go first, so that one host can't keep others out.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

from dapple_tf.network.control import Channel, ControlError

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
"""Seconds within which the first message must have arrived, and be taken."""
_MOST_GUESTS = 256
"""Maximum number of connections whose first message hasn't been taken."""
_LONGEST_HELLO = 1 << 14
"""Maximum bytes of a first message."""
_PAUSE_SECONDS = 0.05


@dataclasses.dataclass
class Guest:
    """A connection at its beginning.

    Attributes:
        channel: the connection.
        host: the other side's address.
        deadline: when it is given up unless its first message has been taken, by the monotonic clock.
        hello: the first message; None until it has arrived.
    """

    channel: Channel
    host: str
    deadline: float
    hello: dict[str, Any] | None = None


class Acceptor:
    """Connections to a listening socket whose first messages haven't been taken yet."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._guests: list[Guest] = []  # the oldest first
        # Without an object in the kernel that processes share after a fork, as epoll has.
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self) -> None:
        """Waits for connections and messages; returns after a while in any case, so that the caller sees signals."""
        now = time.monotonic()
        seconds = min((guest.deadline - now for guest in self._guests), default=_HELLO_SECONDS)
        if any(guest.hello is not None for guest in self._guests):  # The caller has no room for them yet.
            seconds = min(seconds, _PAUSE_SECONDS)
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                self._accept()
            elif key.data in self._guests:
                self._listen_to(key.data)
        for guest in [guest for guest in self._guests if guest.deadline <= time.monotonic()]:
            self._dismiss(guest, "says nothing" if guest.hello is None else "isn't served in time: too many others are")

    def take(self, served: Mapping[str, int]) -> Guest | None:
        """Returns a connection with its first message, which is the caller's from now on; None if there is none.

        Args:
            served: number of connections that are served, by host: the host with the fewest is next.
        """
        ready = [guest for guest in self._guests if guest.hello is not None]
        if not ready:
            return None
        guest = min(ready, key=lambda guest: served.get(guest.host, 0))
        self._guests.remove(guest)
        guest.channel.longest = Channel.LONGEST
        return guest

    def close(self) -> None:
        """Closes the listening socket and all connections that haven't been taken; in a fork, this process's copies."""
        for guest in self._guests:
            guest.channel.close()
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
            channel = Channel(connection, _LONGEST_HELLO)
        except OSError as error:
            connection.close()
            logger.info("a connection from %s is lost: %s", address[0], error)
            return
        guest = Guest(channel, str(address[0]), time.monotonic() + _HELLO_SECONDS)
        self._guests.append(guest)
        self._selector.register(channel.socket, selectors.EVENT_READ, guest)

    def _listen_to(self, guest: Guest) -> None:
        try:
            guest.hello = guest.channel.receive_now()
        except ControlError as error:
            self._dismiss(guest, str(error))
            return
        if guest.hello is not None:
            self._selector.unregister(guest.channel.socket)

    def _dismiss(self, guest: Guest, why: str) -> None:
        logger.info("a client at %s %s", guest.host, why)
        with contextlib.suppress(KeyError):
            self._selector.unregister(guest.channel.socket)
        guest.channel.close()
        self._guests.remove(guest)
