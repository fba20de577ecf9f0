"""Tunnels by TLS between TensorFlow's servers, which listen on the loopback device alone.

    this machine                                                another one
    server ──▶ a port of 127.77.0.1 ─ relay ═══ TLS ═══▶ relay ──▶ 127.77.0.1, its server's port

Each process with a server has a process of relays beside it, which is this module as a program. It has its own view of
the cluster: its own server at its true port, and the others where the tunnels to them begin.

    client's    {"client": ["127.77.0.1:5000"], "worker": ["127.77.0.1:5101", "127.77.0.1:5102"]}
    worker 0's  {"client": ["127.77.0.1:6100"], "worker": ["127.77.0.1:6000", "127.77.0.1:6101"]}

For each other server the relay has a port there, its end of the tunnel; what comes in goes on by TLS to the relay of
that server, which hands it to the server. A connection is carried only if both sides have shown the very certificates
that the client of the cluster knows the other by.

The first line of the program's input is its order, in JSON; it answers with the ports, or an error. From then on each
line drops all connections, and the end of its input ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapple_tf.errors import ClusterError, PortTakenError
from dapple_tf.network.acceptor import Acceptor
from dapple_tf.network.control import ControlError, join_address, split_address
from dapple_tf.network.keys import Keys, fingerprint
from dapple_tf.network.listening import listen, port_error, resolve

logger = logging.getLogger(__name__)

_PROGRAM = "dapple_tf.network.tunnels"
LOOPBACK = "127.77.0.1"
"""An address of the loopback device that nothing else uses: one rule of a firewall keeps other users away."""
_CONNECT_SECONDS = 10.0
_TAKEN_SECONDS = 0.5
"""The relay of the client before may still be ending."""
_BUFFER_BYTES = 1 << 18
_RECORD_BYTES = 1 << 14
"""Bytes of the longest record of TLS, the most that is received at once."""
LEAST_SILENCE = 50.0
"""Seconds after which a link without any answer may be broken off, at the earliest: processes stall for a while."""
_MOST_SILENCE = 32_767.0
"""The most seconds that the kernel takes for them."""
_ESTABLISHED = "01"
"""State of an open connection in the kernel's table; closed ones are listed as root's."""
_READABLE, _WRITABLE = select.POLLIN, select.POLLOUT


class Tunnels:
    """The tunnels of one server; they end with this process, or when they are closed.

    Attributes:
        cluster: the cluster as this server sees it: job -> address of each task.
        server_port: port of `LOOPBACK` that this server must use.
    """

    def __init__(
        self,
        keys: Keys,
        hosts: Sequence[str],
        port: int,
        cluster: Mapping[str, Sequence[str]],
        fingerprints: Mapping[str, Sequence[str]],
        own: tuple[str, int],
        *,
        all_interfaces: bool = False,
        silence: float = 0.0,
    ) -> None:
        """Starts the relays.

        Args:
            keys: this machine's.
            hosts: its addresses at which the others reach it.
            port: the port there.
            cluster: the relays: job -> "host:port" of each task.
            fingerprints: those of their certificates.
            own: job and task of the server here.
            all_interfaces: whether the others reach it at all of the machine's addresses.
            silence: seconds for which a link may be down without being broken off, if they are more than 50.

        Raises:
            PortTakenError: the port is taken.
            ClusterError: the address isn't this machine's.
        """
        with socket.socket() as trial:
            trial.bind((LOOPBACK, 0))
            self.server_port = int(trial.getsockname()[1])
        others = [
            (job, task, address, fingerprints[job][task])
            for job, addresses in cluster.items()
            for task, address in enumerate(addresses)
            if (job, task) != own
        ]
        order = {
            "directory": str(keys.directory),
            "files": dict(keys.files),
            "hosts": list(hosts),
            "port": port,
            "all_interfaces": all_interfaces,
            "server_port": self.server_port,
            "known": [known for *_, known in others],
            "silence": silence,
            "ends": [(address, known) for *_, address, known in others],
        }
        self._process = _start()
        try:
            ports = self._ask(order)
        except BaseException:
            self.close()
            raise
        views = {job: [join_address(LOOPBACK, self.server_port)] * len(tasks) for job, tasks in cluster.items()}
        for (job, task, *_), end in zip(others, ports, strict=True):
            views[job][task] = join_address(LOOPBACK, end)
        self.cluster: Mapping[str, Sequence[str]] = views

    @property
    def alive(self) -> bool:
        """Whether the relays are still there."""
        return self._process.poll() is None

    def drop(self) -> None:
        """Drops all connections, such as those to servers that are no longer there."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # They are no longer `alive`, and their connections neither.
            self._process.stdin.write(b"drop\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the relays."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, order: Mapping[str, object]) -> list[int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"the relays of the tunnels ended at once, with code {self._process.wait()}; their process has said why"
            ) from error
        if "error" in answer:
            raise (PortTakenError if answer["taken"] else ClusterError)(answer["error"])
        return list(answer["ports"])


def _start() -> subprocess.Popen[bytes]:
    """Starts the process, which finds this package where this one has it, whatever the working directory is."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


# ---- the program of the relays


class _Flow:
    """One direction of a link, with what has been received and not yet handed on.

    Attributes:
        ended: whether nothing more comes, and all has been handed on.
        waits_for: what it needs to go on: a socket, and the event of `select.poll`.
    """

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.ended = False
        self.waits_for = source, _READABLE
        self._source, self._sink = source, sink
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0

    def advance(self) -> bool:
        """Receives and forwards available bytes; returns whether there were any."""
        if self._start == self._end:
            self._start = self._end = 0
            self._receive()
        handed_on = self._start
        try:
            while self._start < self._end:
                self._start += self._sink.send(self._view[self._start : self._end])
        except ssl.SSLWantReadError:
            self.waits_for = self._sink, _READABLE
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.waits_for = self._sink, _WRITABLE
        return self._start > handed_on

    def _receive(self) -> None:
        try:
            while self._end + _RECORD_BYTES <= _BUFFER_BYTES:
                count = self._source.recv_into(self._view[self._end :])
                if not count:
                    self.ended = self._end == 0
                    return
                self._end += count
        except ssl.SSLWantWriteError:
            self.waits_for = self._source, _WRITABLE
        except (BlockingIOError, ssl.SSLWantReadError):
            self.waits_for = self._source, _READABLE


def carry(one: socket.socket, other: socket.socket) -> None:
    """Hands on what either side of a link sends to the other, until one of them ends; then both are to be closed.

    A connection of TLS mustn't be used by two threads at once: one thread serves both directions, and neither waits
    for the other.

    Raises:
        OSError: a side is lost.
    """
    for side in (one, other):
        side.setblocking(False)
        side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    flows = _Flow(one, other), _Flow(other, one)
    while True:
        moved = [flow.advance() for flow in flows]
        if any(flow.ended for flow in flows):
            return
        if any(moved):
            continue
        events: dict[socket.socket, int] = {}
        for flow in flows:
            waiting, event = flow.waits_for
            events[waiting] = events.get(waiting, 0) | event
        poll = select.poll()
        for waiting, event in events.items():
            poll.register(waiting, event)
        poll.poll()


class _Handshake:
    """A connection until TLS knows the other side, on the side that accepts it."""

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        connection.setblocking(False)
        self.connection = keys.server(connection)
        self.writing = False

    def advance(self) -> bool:
        try:
            self.connection.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
            self.writing = isinstance(blocked, ssl.SSLWantWriteError)
            return False
        except OSError as error:
            raise ControlError(f"doesn't get in: {error}") from error
        return True


@dataclasses.dataclass(frozen=True)
class _End:
    """Where a tunnel leads: another server's relay, and the fingerprint of its certificate."""

    address: str
    fingerprint: str


class Relay:
    """The relays of one server: threads that carry its connections.

    Attributes:
        ports: port of `LOOPBACK` for each other server.
    """

    def __init__(
        self,
        keys: Keys,
        listeners: Sequence[socket.socket],
        server_port: int,
        known: Collection[str],
        ends: Sequence[_End],
        silence: float = 0.0,
    ) -> None:
        """Begins to accept connections.

        Args:
            keys: this machine's.
            listeners: where other machines' relays connect.
            server_port: port of `LOOPBACK` of the server here.
            known: fingerprints of the certificates of those that may connect to it.
            ends: the other servers.
            silence: seconds after which a link is broken off whose other machine acknowledges nothing; at least
                `LEAST_SILENCE`.
        """
        self._silence = min(max(LEAST_SILENCE, silence), _MOST_SILENCE)
        self._keys, self._server_port, self._known = keys, server_port, frozenset(known)
        self._lock = threading.Lock()
        self._carried: set[socket.socket] = set()
        local = [socket.create_server((LOOPBACK, 0)) for _ in ends]
        self.ports = [listener.getsockname()[1] for listener in local]
        for listener in listeners:
            self._start(self._accept_others, listener)
        for listener, end in zip(local, ends, strict=True):
            self._start(self._accept_own, listener, end)

    def drop(self) -> None:
        """Drops all connections: those behind them may be of an earlier server, and nothing tells of its end."""
        with self._lock:
            for carried in self._carried:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(carried, socket.SHUT_RDWR)

    def _start(self, function: Any, *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def _accept_others(self, listener: socket.socket) -> None:
        acceptor = Acceptor(listener, lambda connection: _Handshake(connection, self._keys))
        while True:
            acceptor.wait()
            while (guest := acceptor.take({})) is not None:
                self._start(self._bring_in, guest.opening.connection, guest.host)

    def _accept_own(self, listener: socket.socket, end: _End) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                logger.warning("no connection to %s: %s", end.address, error)
                time.sleep(0.01)
                continue
            if (user := _user_at_the_other_end(connection)) == os.getuid():
                self._start(self._take_out, connection, end)
            else:
                who = "a process that has hung up" if user is None else f"user {user} of this machine"
                logger.warning("%s isn't let through to %s", who, end.address)
                connection.close()

    def _bring_in(self, connection: ssl.SSLSocket, host: str) -> None:
        with connection:
            if fingerprint(connection) not in self._known:
                logger.warning("%s has a certificate of the authority, but isn't one of this client's machines", host)
                return
            try:
                with socket.create_connection((LOOPBACK, self._server_port), _CONNECT_SECONDS) as server:
                    self._carry(server, connection)
            except OSError as error:
                logger.info("a connection from %s has ended: %s", host, error)

    def _take_out(self, connection: socket.socket, end: _End) -> None:
        with connection:
            try:
                plain = socket.create_connection(split_address(end.address), _CONNECT_SECONDS)
                with self._keys.peer(plain) as secured:
                    secured.do_handshake()
                    if fingerprint(secured) != end.fingerprint:
                        logger.warning("%s has another certificate than the client knows it by", end.address)
                        return
                    self._carry(connection, secured)
            except OSError as error:
                logger.info("a connection to %s has ended: %s", end.address, error)

    def _carry(self, plain: socket.socket, secured: ssl.SSLSocket) -> None:
        _break_off_after(secured, self._silence)
        with self._lock:
            self._carried |= {plain, secured}
        try:
            carry(plain, secured)
        finally:
            with self._lock:
                self._carried -= {plain, secured}


def _user_at_the_other_end(connection: socket.socket) -> int | None:
    """Returns the user whose process has connected within this machine; None if it has closed its end."""
    with contextlib.suppress(OSError):  # The connection is gone.
        ends = [
            f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
            for host, port in (connection.getpeername(), connection.getsockname())
        ]
        for table in ("tcp", "tcp6"):  # The latter has sockets that are for both kinds of addresses.
            with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
                for _, local, remote, state, _, _, _, user, *_ in map(str.split, lines):
                    if [local[-13:], remote[-13:], state] == [*ends, _ESTABLISHED]:
                        return int(user)
    return None


def _break_off_after(connection: socket.socket, seconds: float) -> None:
    """Ends a connection whose other side acknowledges nothing, such as behind a firewall that drops packets by now.

    What has been sent is acknowledged within that time; when there is nothing to send, the other side is asked.
    """
    options = {
        socket.TCP_USER_TIMEOUT: 1000 * seconds,
        socket.TCP_KEEPIDLE: seconds / 2,
        socket.TCP_KEEPINTVL: max(1.0, seconds / 10),
        socket.TCP_KEEPCNT: 5,
    }
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, int(value))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _listeners(hosts: Sequence[str], port: int, *, all_interfaces: bool) -> list[socket.socket]:
    """Listens where other machines' relays connect; waits a little while for a port that is taken."""
    deadline = time.monotonic() + _TAKEN_SECONDS
    while True:
        with contextlib.ExitStack() as stack:
            try:
                own = resolve(hosts[0])[0]
                family = socket.AF_INET6 if own.version == 6 else socket.AF_INET
                sockets = [
                    stack.enter_context(listener)
                    for listener in (
                        [socket.create_server(("", port), family=family)]
                        if all_interfaces
                        else (listen(resolve(host)[0], port) for host in hosts)
                    )
                ]
                stack.pop_all()
                return sockets
            except OSError as error:
                if time.monotonic() > deadline:
                    raise port_error(f"no tunnel can end at port {port} of {', '.join(hosts)}", error) from error
        time.sleep(0.02)


def main() -> None:
    """Serves until the input ends, or the process that has started this one does."""
    logging.basicConfig(format="relay: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started this one.
    parent = os.getppid()
    order = json.loads(sys.stdin.buffer.readline())
    try:
        keys = Keys(order["directory"], order["files"])
        listeners = _listeners(order["hosts"], order["port"], all_interfaces=order["all_interfaces"])
        ends = [_End(*end) for end in order["ends"]]
        relay = Relay(keys, listeners, order["server_port"], order["known"], ends, order["silence"])
    except ClusterError as error:
        answer: dict[str, Any] = {"error": str(error), "taken": isinstance(error, PortTakenError)}
    else:
        answer = {"ports": relay.ports}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    # Forks of the parent have its end of the pipe, too, which doesn't end with the parent then.
    while "error" not in answer and os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0]:
            if not os.read(0, 1 << 10):
                break
            relay.drop()


if __name__ == "__main__":
    main()
