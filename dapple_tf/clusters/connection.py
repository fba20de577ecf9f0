"""The connection of this process to the workers of a cluster: borrows their devices, and watches the workers.

    this process: client server ◀── feeds, results ──▶ worker 0: server ◀── tensors, all-reduce ──▶ worker 1: server
         └────────────── leases: pings and answers ──────┴───────────────────────────────────────────────┘

This process has its own TensorFlow server, whose master runs the steps: batches go from here straight to
the devices that need them, and no worker is more important than another. TensorFlow can't stop a server, so each is
made once, and used again as long as the workers' servers have the same addresses.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from dapple_tf.clusters.clocks import ClockSample
from dapple_tf.clusters.lease import Lease
from dapple_tf.clusters.remote_session import Call, RemoteSession, wait_for_former_calls
from dapple_tf.clusters.serving import LONGEST_SILENCE
from dapple_tf.clusters.tensorflow_server import ServerSettings, Started, free_port, start_server
from dapple_tf.describe.cluster import Cluster, ClusterError
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.errors import PortTakenError, UnusableWorkersError, WorkerLostError, reason
from dapple_tf.network.control import ControlError, SilentError, join_address, split_address
from dapple_tf.network.inquiry import accepted, client_name, devices, for_each, garbled, hello, lease_secret
from dapple_tf.network.keys import Keys
from dapple_tf.network.listening import check_private
from dapple_tf.network.reachability import check_ports
from dapple_tf.network.tunnels import LEAST_SILENCE

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_START_SECONDS = 1.0
_LOADING_SECONDS = 30.0
"""The least seconds for a worker's process to load TensorFlow's library and start a server, on a busy machine, too."""
_GREETING_SECONDS = 60.0
"""Seconds for a first run on all workers, with which a slow machine isn't taken for one that hangs."""
_ANSWER = 0.88
"""Share of `notice_seconds` for an answer: before the question there may be a pause."""
_PAUSE = 0.1
"""Share of `notice_seconds` between two questions."""
_END_SECONDS = 1.0
"""Maximum seconds for asking how a worker's process has ended."""
_TIME = 0.3
"""Share of `notice_seconds` for telling the time."""
_CUT_OFF = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError
"""What TensorFlow raises where a connection between servers breaks; the latter two also where a device fails, of those
that wait for it."""
_ATTEMPTS = 3
"""Attempts to start all servers: between choosing a port and listening at it, another process may take it."""

_ports: dict[str, int] = {}
"""Ports of the workers' servers when last used: with the same ports, the client's server can be reused."""


class Connection:
    """Leases on all workers of a cluster.

    Attributes:
        addresses: ``host:port`` of each worker, where it is now.
        target: the target at which sessions are opened.
        notice_seconds: a worker that is silent for this long is lost.
        step_seconds: a run that takes longer counts as hung.
        lost: the worker that was lost first; None while all are there.
        users: how many share it, which `shared_connections` counts.
    """

    def __init__(self, cluster: Cluster, faults: FaultPolicy) -> None:
        """Borrows the devices of all workers.

        Args:
            cluster: the workers and their devices.
            faults: decides how long to wait for workers.

        Raises:
            ClusterError: a worker isn't there, is used by another process, has fewer devices than the cluster or
                others, its server doesn't start, or can't be reached from another one's machine.
        """
        self.addresses = cluster.located()
        self._kinds = [
            collections.Counter(cluster.devices[device].type for device in own)
            for own in map(cluster.devices_of_worker, range(len(self.addresses)))
        ]
        self.notice_seconds = faults.notice_seconds
        self.step_seconds = faults.step_seconds
        self._pause = max(LEAST_SILENCE, 3.0 * faults.notice_seconds)  # before links are looked at, in a long run
        self.lost: WorkerLostError | None = None
        self.users = 0
        self._keys = cluster.keys
        self._changed = threading.Condition()
        self._asked = 0.0  # workers must answer a ping that is sent after this time
        self._servers: dict[str, str] = {}  # address of each worker's server -> where this process reaches it
        self._clients: list[str] = []  # addresses of this process's server, as each worker reaches it
        self._closed = False
        wait_for_former_calls(self.addresses)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._leases, self.target = self._open()
                break
            except PortTakenError as error:
                if attempt == _ATTEMPTS:
                    raise
                logger.info("%s; trying again", error)
        for lease in self._leases:
            lease.confirmed = time.monotonic()
            threading.Thread(target=self._watch, args=(lease,), name=f"watch-{lease.address}", daemon=True).start()
        try:
            self._check_ports()
            self._greet()
        except BaseException:
            self.close()
            raise

    # ---- opening

    def _open(self) -> tuple[list[Lease], str]:
        """Borrows all workers and has them serve; also returns the target of sessions."""
        leases: list[Lease] = []
        try:
            for_each(lambda task: leases.append(self._borrow(task)), len(self.addresses))
            leases.sort(key=lambda lease: lease.task)
            return leases, self._serve(leases)
        except BaseException:
            for lease in leases:
                lease.channel.close()
            raise

    def _borrow(self, task: int) -> Lease:
        address = self.addresses[task]
        former_port = _ports.get(address, 0)
        question = {"ask": "lease", "client": client_name(), "secret": lease_secret(address), "port": former_port}
        channel, answer = hello(task, address, question, self.notice_seconds, self._keys)
        port = answer.get("port")
        if type(port) is not int or not 1 <= port <= 65_535:
            channel.close()
            raise ClusterError(f"worker {task} ({address}) {garbled(answer, 'port')}")
        offered = collections.Counter(device["kind"] for device in devices(task, address, answer))
        offered["CPU"] = max(1, offered["CPU"])  # A server has one in any case.
        if self._kinds[task] - offered:
            channel.close()
            raise UnusableWorkersError(
                f"worker {task} ({address}) has {_counted(offered)}, but the cluster has {_counted(self._kinds[task])} "
                f"of it: start the worker as it was, or describe the cluster anew (Cluster.of_servers) and transform "
                f"the model again",
                [task],
            )
        return Lease(task, address, channel, port, channel.socket.getsockname()[0], self._keys)

    def _serve(self, leases: Sequence[Lease]) -> str:
        servers = [join_address(split_address(lease.address)[0], lease.port) for lease in leases]
        for task, lease in enumerate(leases):
            if servers.index(servers[task]) < task:  # Workers of one machine were handed the same free port.
                _ports.pop(lease.address, None)
                raise PortTakenError(
                    f"worker {task} ({lease.address}): its server would have another's address, {servers[task]}; give "
                    f"the workers of a machine different ports, --server_port"
                )
        hosts = tuple(dict.fromkeys(lease.host for lease in leases))
        fingerprints = [lease.channel.fingerprint for lease in leases]
        silence = min(max(1.0, 3.0 * self.notice_seconds), LONGEST_SILENCE)
        client = client_server(tuple(servers), hosts, self._keys, tuple(fingerprints), silence)

        def start(index: int) -> None:
            lease = leases[index]
            cluster = {"client": [join_address(lease.host, client.port)], "worker": servers}
            order = {"cluster": cluster, "task": index, "leader": 0, "silence": silence}
            if self._keys is not None:
                order["fingerprints"] = fingerprints
            try:
                answer = accepted(
                    index, lease.address, lease.channel.ask(order, max(self.notice_seconds, _LOADING_SECONDS))
                )
            except ControlError as error:
                raise ClusterError(f"worker {index} ({lease.address}) {error}") from error
            except PortTakenError:
                _ports.pop(lease.address, None)
                raise
            _ports[lease.address] = lease.port
            if type(process := answer.get("serving")) is not int:
                raise ClusterError(f"worker {index} ({lease.address}) {garbled(answer, 'serving')}")
            lease.process = process

        try:
            for_each(start, len(leases))
        except PortTakenError:
            if client.tunnels is not None:  # They lead to these ports; the next attempt has others.
                client.tunnels.close()
            raise
        self._clients = [join_address(lease.host, client.port) for lease in leases]
        self._servers = dict(zip(servers, client.cluster["worker"], strict=True))
        return client.target

    def _check_ports(self) -> None:
        def knock(seconds: float) -> Mapping[int, Mapping[str, Any]]:
            return self._ask_all(lambda lease: lease.knock(seconds, self.notice_seconds))

        check_ports(self.addresses, knock, self._servers, self._clients, self.notice_seconds)

    def _greet(self) -> None:
        """Runs something on every worker.

        This process's server may have connections to earlier servers at the same addresses; it notices that
        they are broken only when it uses them.
        """
        with tf.Graph().as_default() as graph:
            greetings = []
            for task in range(len(self.addresses)):
                with tf.device(f"/job:worker/task:{task}/device:CPU:0"):
                    greetings.append(tf.raw_ops.NoOp())
        deadline = time.monotonic() + self.notice_seconds
        while True:
            config = tf.compat.v1.ConfigProto(isolate_session_state=True)
            session = RemoteSession(self, graph, config, trial=True)
            try:
                session.run(greetings, seconds=_GREETING_SECONDS)
                return
            except tf.errors.OpError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"all workers answer, but nothing can be run on them: {reason(error)}"
                    ) from error
                time.sleep(0.05)
            except BaseException:  # Ctrl-C, or a lost worker
                session.abandon()
                raise
            finally:
                session.close()

    # ---- watching

    def _watch(self, lease: Lease) -> None:
        """Pings a worker until the connection is closed or the worker is lost."""
        number = 0
        try:
            while not self._closed and self.lost is None:
                number += 1
                alive = lease.ping(number, _ANSWER * self.notice_seconds)
                if lease.questions:
                    with contextlib.suppress(SilentError):  # The next ping tells whether it is lost.
                        lease.questions[0](lease)
                        lease.questions.popleft()
                with self._changed:
                    lease.confirmed = alive
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: (
                            self._closed or self.lost is not None or lease.confirmed < self._asked or lease.questions
                        ),
                        timeout=_PAUSE * self.notice_seconds,
                    )
        except ControlError as error:
            if not self._closed:
                silent = isinstance(error, SilentError)
                end = None if silent else lease.end(min(_END_SECONDS, _TIME * self.notice_seconds))
                text = f"worker {lease.task} ({lease.address}): {error}{'' if end is None else f'; {end.text}'}"
                self._lose(WorkerLostError(text, lease.task, lease.address, end is not None and end.out_of_memory))
        finally:
            lease.channel.close()

    def clocks(self) -> dict[int, tuple[ClockSample, ...]]:
        """Asks all workers for their time; returns worker number -> its answers, with this process's times.

        Raises:
            WorkerLostError: one was lost.
        """
        return self._ask_all(lambda lease: lease.ask_time(_TIME * self.notice_seconds))

    def _ask_all(self, ask: Callable[[Lease], _T]) -> dict[int, _T]:
        """Has all watchers ask their workers something; returns worker number -> its answer.

        Raises:
            WorkerLostError: one was lost.
        """
        answers: dict[int, _T] = {}
        with self._changed:
            for lease in self._leases:
                lease.questions.append(lambda lease: answers.__setitem__(lease.task, ask(lease)))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self.lost is not None or len(answers) == len(self._leases))
        if self.lost is not None:
            raise self.lost.anew()
        if self._closed:
            raise self._given_back()
        return answers

    def _lose(self, error: WorkerLostError) -> None:
        with self._changed:
            if self.lost is None:
                self.lost = error
                logger.warning("lost %s", str(error))  # Handlers may keep what they are given.
            self._changed.notify_all()

    def _examine(self, failure: tf.errors.OpError, *, links: bool) -> None:
        """Finds out whether a worker caused a failed run: waits until all have answered again, or one is lost.

        Args:
            failure: the run's error.
            links: whether connections between servers count.

        Raises:
            WorkerLostError: one is lost.
        """
        with self._changed:
            asked = self._asked = time.monotonic()
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self.lost is not None or all(lease.confirmed >= asked for lease in self._leases),
                timeout=2 * self.notice_seconds,
            )
        if self.lost is None and links and isinstance(failure, _CUT_OFF):
            self._check_links()
        if self.lost is not None:
            raise self.lost.anew() from failure

    def _check_links(self) -> None:
        """Has all servers knocked at from all others; a worker that isn't reached, or doesn't reach others, is lost."""
        try:
            self._check_ports()
        except ClusterError as error:
            task = error.tasks[0] if isinstance(error, UnusableWorkersError) else None
            self._lose(WorkerLostError(str(error), task, "" if task is None else self.addresses[task]))
        except WorkerLostError:  # Its watcher has told it.
            pass

    def _given_back(self) -> WorkerLostError:
        return WorkerLostError(f"workers {', '.join(self.addresses)} were given back by this process")

    # ---- running

    def call(self, function: Callable[[], _T], *, trial: bool = False, seconds: float | None = None) -> _T:
        """Calls something that waits for workers, as long as all of them are there.

        Args:
            function: what to call.
            trial: whether a broken connection between servers doesn't count as a lost worker, and Ctrl-C doesn't wait
                for the call to end, as in a session of this process.
            seconds: time after which the call counts as hung; None is ``step_seconds``.

        Raises:
            WorkerLostError: one was lost, the workers were given back, or the call took too long. The call is then
                abandoned, not ended.
            tf.errors.OpError: it failed, with all workers there.
        """
        if self.lost is not None:
            raise self.lost.anew()
        if self._closed:  # Nobody watches the workers any more: TensorFlow would wait for them forever.
            raise self._given_back()
        limit = self.step_seconds if seconds is None else min(seconds, self.step_seconds)
        call = Call(function, self._changed, self.addresses)
        try:
            try:
                call.start()
                ended = self._wait_for(call, limit)
            except BaseException:  # Ctrl-C
                if not trial and call.begun.wait(_START_SECONDS):  # It may have struck before there was a thread.
                    self._wait_for(call, limit)
                raise
            if not ended:
                self._lose(WorkerLostError(f"a run has not ended within {limit:.3g} s, though all workers answer"))
            if not call.done:
                assert self.lost is not None
                raise self.lost.anew()
            if isinstance(call.error, tf.errors.OpError):
                self._examine(call.error, links=not trial)
            if not trial and isinstance(call.error, tf.errors.UnavailableError):
                self._lose(WorkerLostError(f"a connection broke, though all workers answer: {reason(call.error)}"))
                assert self.lost is not None
                raise self.lost.anew()
            if call.error is not None:
                raise call.error
            return call.result
        finally:
            call.forget()

    def _wait_for(self, call: Call, seconds: float) -> bool:
        """Waits for a call's end; returns whether it has ended, or a worker is lost.

        A long one may wait for a connection whose packets are dropped, which TensorFlow doesn't always notice.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            with self._changed:
                if self._changed.wait_for(lambda: call.done or self.lost is not None, timeout=min(left, self._pause)):
                    return True
            if left <= self._pause:
                return False
            self._check_links()

    def disown(self) -> None:
        """Leaves the workers to the process that this one was forked from."""
        self._closed = True
        self._changed = threading.Condition()  # A thread that doesn't exist here may have the other one.
        for lease in self._leases:
            lease.channel.close()
        self._leases.clear()

    def close(self) -> None:
        """Gives the devices back, which ends the workers' servers."""
        self._closed = True
        for lease in self._leases:
            lease.channel.interrupt()  # wakes its watcher, which closes it
        with self._changed:
            self._changed.notify_all()


def _counted(kinds: Mapping[str, int]) -> str:
    """Returns "1 CPU and 2 GPU devices", say."""
    text = " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{text} device{'s' * (sum(kinds.values()) > 1)}"


# ---- this process's servers


_servers: dict[tuple[tuple[str, ...], ...], Started] = {}


def client_server(
    workers: tuple[str, ...],
    hosts: tuple[str, ...],
    keys: Keys | None,
    fingerprints: tuple[str, ...],
    silence: float,
) -> Started:
    """Returns this process's server for a cluster; made once, as TensorFlow can't stop a server.

    Args:
        workers: address of each worker's server.
        hosts: this process's addresses, as workers see them.
        keys: this machine's, for TLS.
        fingerprints: those of the workers' certificates.
        silence: seconds for which a tunnel's link may be down.
    """
    key = workers, hosts, fingerprints, () if keys is None else (keys.fingerprint, str(silence))
    server = _servers.get(key)
    if server is not None and (server.tunnels is None or server.tunnels.alive):
        if server.tunnels is not None:
            server.tunnels.drop()
        return server
    for host in hosts if keys is None else ():
        try:
            check_private(host, allow_public=bool(os.environ.get("DAPPLE_TF_ALLOW_PUBLIC")), all_interfaces=False)
        except ClusterError as error:
            raise ClusterError(
                f"this process reaches the workers from {host}, where it would have to listen; use a private "
                f"network or TLS, or set DAPPLE_TF_ALLOW_PUBLIC=1 if a firewall keeps others out ({error})"
            ) from error
    taken = {split_address(worker)[1] for worker in workers}  # Workers on this machine listen there in a moment.
    while (port := free_port(hosts[0])) in taken:
        pass
    cluster = {"client": [join_address(hosts[0], port)], "worker": list(workers)}
    prints = {"client": [""], "worker": fingerprints}
    server = start_server(cluster, ("client", 0), ServerSettings(), hosts, port, keys, prints, silence=silence)
    _servers[key] = server
    return server


def any_started() -> bool:
    """Whether this process has a TensorFlow server."""
    return bool(_servers)


def forget() -> None:
    """Leaves all servers and tunnels to the process that this one was forked from."""
    _servers.clear()


def close_tunnels() -> None:
    """Ends what carries the servers' connections, at the end of the process."""
    for server in _servers.values():
        if server.tunnels is not None:
            server.tunnels.close()
