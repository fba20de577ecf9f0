"""What a worker does for a client: lends it the devices, serves, answers pings, and tells how its process ended."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import mmap
import os
import re
import signal
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from absl import logging

from dapple_tf.clusters.tensorflow_server import ServerSettings, free_port, load, start_server
from dapple_tf.common.units import bytes_text
from dapple_tf.describe.cluster import ClusterError, check_addresses
from dapple_tf.describe.machine_report import MachineReport, cpu_kind
from dapple_tf.errors import PortTakenError
from dapple_tf.network.control import PROTOCOL, Channel, ControlError
from dapple_tf.network.keys import Keys
from dapple_tf.network.knocking import unreachable
from dapple_tf.version import VERSION

_T = TypeVar("_T")
_ANSWER_SECONDS = 10.0
"""A client must send its request within this time."""
_GRACE_SECONDS = 1.0
"""The last client's process may still be ending."""
_BEAT_SECONDS = 0.1
LONGEST_SILENCE = 86_400.0
"""Maximum seconds of silence after which a client counts as gone."""
_LONGEST_CLIENT = 1000
"""Maximum characters of a client's name, which is shown to others and in the worker's log."""
_SHORTEST_SECRET = 32
"""Minimum characters of a client's secret; this package's clients have 256 bits."""
_RECORDS = 8
"""Number of clients that a worker remembers, to tell them how their processes ended."""
_STRANGER = "another client"
"""Text in place of a client's name, for others without its secret."""
_FLOCK = "@hhqqi0q"
"""The kernel's struct flock: type, whence, start, length and process."""
_COUNTS = Path("/proc/vmstat")


class ProcessExit(NamedTuple):
    """The end of a process.

    Attributes:
        text: how it ended.
        out_of_memory: whether the kernel killed it for lack of memory, as far as can be known.
    """

    text: str
    out_of_memory: bool = False

    @classmethod
    def of(cls, status: int, largest_bytes: int, kills: int) -> Self:
        """Describes a process that has ended.

        Args:
            status: as `os.wait4` gives it.
            largest_bytes: the most memory that it had.
            kills: number of processes that the kernel killed for lack of memory meanwhile.
        """
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return cls(f"its process ended with code {code}")
        name = _signal_name(-code)
        if -code != signal.SIGKILL or not kills:
            return cls(f"its process was ended by {name}")
        return cls(
            f"its process was ended by {name} when the kernel killed {kills} for lack of memory; it had up to "
            f"{bytes_text(largest_bytes)}",
            out_of_memory=True,
        )

    @classmethod
    def parsed(cls, answer: Mapping[str, Any]) -> Self | None:
        """Returns the end in a worker's answer; None if there is none."""
        text, out_of_memory = answer.get("ended"), answer.get("out_of_memory")
        return cls(text, out_of_memory) if isinstance(text, str) and isinstance(out_of_memory, bool) else None

    def message(self) -> dict[str, Any]:
        """Returns a worker's answer, the inverse of `parsed`."""
        return {"ended": self.text, "out_of_memory": self.out_of_memory}


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def memory_kills() -> int:
    """Returns the number of processes that this machine's kernel has killed for lack of memory; 0 if it doesn't say."""
    with contextlib.suppress(OSError):
        for line in _COUNTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


class Holder(NamedTuple):
    """Who has a lease, or had it.

    Attributes:
        process: the worker's process for the client.
        client: the client's name; empty until it is recorded.
        digest: hash of the client's secret; empty until it is recorded.
    """

    process: int
    client: str
    digest: str

    def owns(self, secret: str) -> bool:
        """Returns whether this is the client's secret."""
        return hmac.compare_digest(self.digest, _digest(secret))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class Lease:
    """The right to use the worker's devices, held by at most one process; it ends with the process.

    It is a lock on a file shared by all children of a worker. The kernel releases it however its owner ends, and also
    when its owner closes any handle of that file: so nothing else may use the file.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._pulse = mmap.mmap(-1, mmap.PAGESIZE)  # shared by all children, too

    def take(self, client: str, secret: str) -> bool:
        """Takes the lease and records the client; returns False if another process holds it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        own = f"{os.getpid()} {_digest(secret)} {client}"
        lines = [own, *self._lines()[: _RECORDS - 1]]
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, "\n".join(lines).encode(errors="replace"), 0)
        return True

    def beat(self) -> None:
        """Gives signs of life, without end."""
        while True:
            struct.pack_into("d", self._pulse, 0, time.monotonic())
            time.sleep(_BEAT_SECONDS)

    def age(self) -> float:
        """Returns the seconds since the last sign of life of the process that holds it."""
        return time.monotonic() - float(struct.unpack_from("d", self._pulse, 0)[0])

    def holder(self) -> Holder | None:
        """Returns the holding process, by the kernel, and its record; None without one."""
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, wanted))
        return None if kind == fcntl.F_UNLCK else self.record(process) or Holder(process, "", "")

    def record(self, process: int) -> Holder | None:
        """Returns what a process recorded that holds the lease, or was among the last that did."""
        for line in self._lines():
            told, _, rest = line.partition(" ")
            digest, _, client = rest.partition(" ")
            if told == str(process):
                return Holder(process, client, digest)
        return None

    def _lines(self) -> list[str]:
        """Returns the records of processes, the newest first."""
        return os.pread(self._file, 1 << 16, 0).decode(errors="replace").splitlines()


@dataclasses.dataclass(frozen=True)
class Machine:
    """A worker's machine.

    Attributes:
        host: the host at which others reach it.
        devices: number of logical CPU devices; 0 for the machine's GPUs, or one CPU device if it has none.
        memory_bytes: memory of each device; None is the real size.
        server_port: port of TensorFlow's server; 0 for any.
        all_interfaces: whether that server listens on all of the machine's addresses.
        keys: the machine's keys for TLS; None for TCP. With them ``server_port`` and ``all_interfaces`` are about the
            tunnels to TensorFlow's server, which listens on the loopback device alone.
        lease: the right to use it.
        report: what TensorFlow knows of it.
        ends: process -> how it ended, of those that clients had.
    """

    host: str
    devices: int = 0
    memory_bytes: int | None = None
    server_port: int = 0
    all_interfaces: bool = False
    keys: Keys | None = None
    report: MachineReport = dataclasses.field(default_factory=MachineReport)
    lease: Lease = dataclasses.field(default_factory=Lease)
    ends: dict[int, ProcessExit] = dataclasses.field(default_factory=dict)

    def inventory(self) -> list[dict[str, Any]]:
        """Returns kind, memory and hardware of each device, and the card of GPUs."""
        if self.devices == 0 and self.report.gpus:
            limit = {} if self.memory_bytes is None else {"memory_bytes": self.memory_bytes}
            return [{"kind": "GPU", **gpu, **limit} for gpu in self.report.gpus]
        count = max(1, self.devices)
        memory = self.memory_bytes or _memory() // count
        return [{"kind": "CPU", "memory_bytes": memory, "hardware": cpu_kind(count)}] * count


def _memory() -> int:
    """Returns the bytes of memory of this machine, or of this process's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        total = min(total, int(file.read()))
    return total


def attend(channel: Channel, hello: Mapping[str, Any], machine: Machine) -> None:
    """Serves one connection until it ends.

    client: {"protocol": ..., "ask": "status"}         worker: {"devices": [...], "holder": null, "versions": {...}}
    client: {"protocol": ..., "ask": "lease", "client": "name", "secret": ..., "port": 0}
                                                       worker: {"devices": [...], "port": 41234, "versions": {...}}
    client: {"cluster": {...}, "task": 0, "leader": 0, "silence": 30.0}     {"serving": 4711}
    client: {"knock": 8.0}                                                  {"unreachable": {"10.0.0.2:2300": why}}
    client: {"ping": 1}                                                     {"pong": 1}
    client: {"protocol": ..., "ask": "pulse", "secret": ..., "process": 4711}       on another connection:
                                                                            {"age": 0.1}, or {"ended": how, ...}
    client: {"time": 1}                                                     {"time": 1, "now": 1700000000123456789}

    With TLS the third message also has ``fingerprints``, those of the workers' certificates.

    Whoever has a lease chooses its secret. Only with it the lease can be taken from an older connection, and only to
    who tells it, also with "status", the holder's name is told.

    Args:
        channel: the connection.
        hello: the client's first message.
        machine: what is lent.
    """
    try:
        try:
            _serve(channel, hello, machine)
        except _RefusedError as error:
            channel.send({"error": str(error)}, _ANSWER_SECONDS)
        except PortTakenError as error:
            channel.send({"error": str(error), "taken": True}, _ANSWER_SECONDS)
    except ControlError as error:
        logging.info("a client %s", error)


class _RefusedError(Exception):
    """A client's request can't be granted; the text is for its user."""


def _serve(channel: Channel, hello: Mapping[str, Any], machine: Machine) -> None:
    if hello.get("protocol") != PROTOCOL:
        raise _RefusedError(
            f"speaks {hello.get('protocol')!r} and the worker {PROTOCOL!r}; use the same version of dapple_tf on both: "
            f"the worker's is {VERSION}"
        )
    asked = hello.get("ask")
    if asked == "status":
        secret = _field(hello, "secret", str) if "secret" in hello else ""
        holder = machine.lease.holder()
        told = None if holder is None else holder.client if holder.owns(secret) else _STRANGER
        answer = {"devices": machine.inventory(), "holder": told, "versions": dict(machine.report.versions)}
        channel.send(answer, _ANSWER_SECONDS)
    elif asked == "lease":
        client, secret, port = _field(hello, "client", str), _field(hello, "secret", str), _field(hello, "port", int)
        if len(secret) < _SHORTEST_SECRET:
            raise _RefusedError(f"'secret' has {len(secret)} characters; it must have at least {_SHORTEST_SECRET}")
        if not 1 <= len(client) <= _LONGEST_CLIENT:
            raise _RefusedError(f"'client' must have 1 to {_LONGEST_CLIENT} characters")
        _take(machine.lease, client, secret)
        inventory = machine.inventory()
        port = machine.server_port or port or free_port(machine.host)
        channel.send({"devices": inventory, "port": port, "versions": dict(machine.report.versions)}, _ANSWER_SECONDS)
        try:
            load()  # while the client borrows other workers
        except ClusterError as error:
            raise _RefusedError(str(error)) from error
        order = channel.receive(_ANSWER_SECONDS)
        silence, others = _start(order, inventory, machine, port, channel.fingerprint)
        threading.Thread(target=machine.lease.beat, name="pulse", daemon=True).start()
        channel.send({"serving": os.getpid()}, _ANSWER_SECONDS)
        logging.info("serving %s", client)
        _answer(channel, silence, others)
        logging.info("%s has gone", client)
    elif asked == "pulse":
        secret, process = _field(hello, "secret", str), _field(hello, "process", int)
        holder, former = machine.lease.holder(), machine.lease.record(process)
        if holder is not None and holder.owns(secret):
            channel.send({"age": machine.lease.age()}, _ANSWER_SECONDS)
        elif process in machine.ends and former is not None and former.owns(secret):
            channel.send(machine.ends[process].message(), _ANSWER_SECONDS)
        else:
            raise _RefusedError("isn't lent to this process any more")
    else:
        raise _RefusedError(f"asks for {asked!r}, which no worker knows")


def _field(message: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    value = message.get(name)
    if type(value) is not kind:
        raise _RefusedError(f"{name!r} is {value!r}; it must be of type {kind.__name__}")
    return value


def _take(lease: Lease, client: str, secret: str) -> None:
    """Takes the lease, if necessary from the same client's older connection, which may hang or be cut off."""
    started = time.monotonic()
    while not lease.take(client, secret):
        waited = time.monotonic() - started
        if (holder := lease.holder()) is not None:
            if holder.owns(secret):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(holder.process, signal.SIGKILL)
            elif waited > _GRACE_SECONDS:
                logging.info("%s is refused: in use by %s", client, holder.client)
                raise _RefusedError(
                    f"in use by {_STRANGER}, whose name is in the worker's log; it will be free when that process ends"
                )
            if waited > _ANSWER_SECONDS / 2:
                raise _RefusedError(f"in use by process {holder.process}, an older connection of the same client")
        time.sleep(0.01)


def _start(
    order: Mapping[str, Any], inventory: list[dict[str, Any]], machine: Machine, port: int, client: str
) -> tuple[float, dict[str, str]]:
    """Starts TensorFlow's server.

    Args:
        order: the client's.
        inventory: the devices.
        machine: what is lent.
        port: port at which the server is reached.
        client: fingerprint of the client's certificate; empty without TLS.

    Returns:
        The seconds of silence after which the client counts as gone, and the address of each other server -> where
        this one reaches it, which is another place if a tunnel leads there.
    """
    cluster, task, leader = (_field(order, *field) for field in (("cluster", dict), ("task", int), ("leader", int)))
    silence = _field(order, "silence", float)
    workers = cluster.get("worker")
    if not isinstance(workers, list) or not 0 <= task < len(workers) or not 0 <= leader < len(workers):
        raise _RefusedError(f"task {task} and leader {leader} aren't among the workers {workers!r}")
    for job, addresses in cluster.items():
        if not re.fullmatch("[a-z]+", job) or not isinstance(addresses, list) or not set(map(type, addresses)) <= {str}:
            raise _RefusedError(f"job {job!r} has the tasks {addresses!r}; they must be a list of addresses")
        try:
            check_addresses(addresses)
        except ClusterError as error:
            raise _RefusedError(f"job {job!r}: {error}") from error
    if not 1 <= silence <= LONGEST_SILENCE:
        raise _RefusedError(f"'silence' is {silence} s; it must be from 1 s to a day")
    kinds = [device["kind"] for device in inventory]
    settings = ServerSettings.of_worker(kinds.count("CPU"), kinds.count("GPU"), leader)
    fingerprints = None
    if machine.keys is not None:
        fingerprints = {"client": [client], "worker": _fingerprints(order, workers)}
        if set(cluster) - set(fingerprints) or len(cluster.get("client", ())) > 1:
            raise _RefusedError(f"the cluster has the jobs {list(cluster)}; it must have workers and one client")
    place = [machine.host], port, machine.keys, fingerprints
    everywhere = machine.all_interfaces
    try:
        server = start_server(cluster, ("worker", task), settings, *place, all_interfaces=everywhere, silence=silence)
    except PortTakenError:
        raise
    except ClusterError as error:
        raise _RefusedError(str(error)) from error
    pairs = [pair for job, addresses in cluster.items() for pair in zip(addresses, server.cluster[job], strict=True)]
    return silence, {address: reached for address, reached in pairs if address != workers[task]}


def _fingerprints(order: Mapping[str, Any], workers: Sequence[str]) -> list[str]:
    fingerprints = _field(order, "fingerprints", list)
    if len(fingerprints) != len(workers) or not set(map(type, fingerprints)) <= {str}:
        raise _RefusedError(
            f"'fingerprints' is {fingerprints!r}; it must have a text for each of the workers {workers}"
        )
    return fingerprints


def _answer(channel: Channel, silence: float, others: Mapping[str, str]) -> None:
    """Answers the client as long as it is there; knocks at the other servers where it asks for that."""
    try:
        while True:
            message = channel.receive(silence)
            if "time" in message:
                channel.send({"time": message["time"], "now": time.time_ns()}, silence)
            elif "ping" in message:
                channel.send({"pong": message["ping"]}, silence)
            elif type(seconds := message.get("knock")) is float and 0 < seconds <= silence:
                channel.send({"unreachable": unreachable(others, seconds)}, silence)
            else:
                return
    except ControlError as error:
        logging.info("the client %s", error)
        sys.stderr.flush()
