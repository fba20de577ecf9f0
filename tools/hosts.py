"""Workers to try a cluster out on one machine: as plain processes, or each on a host of its own.

    with LocalWorkers(2, devices=2) as workers:
        cluster = dapple.Cluster.of_servers(workers.addresses)
        ...
        workers.kill(1)
        workers.restart(1)

    with Hosts(2, devices=2) as hosts:
        hosts.limit(200)  # Mbit/s
        hosts.run(0, [sys.executable, "train.py", *hosts.addresses])
        hosts.cut(1)

Hosts are network namespaces, each joined by a pair of virtual Ethernet devices to a bridge in one more namespace, so
that the machine's own network isn't touched, and several programs may have hosts with the same addresses. A client
must run within a host, too: the hosts can't be reached from the machine itself. They need root, `ip` and `tc`
(iproute2), and `unshare` and `nsenter` (util-linux).

Everything ends with the ``with`` block, and with this process, however that ends: a namespace exists as long as a
process in it, and the processes get a signal when this one dies (if `setpriv` is installed).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from dapple_tf.network.certificates import Authority
from dapple_tf.network.worker_process import (
    ROOT,
    START_SECONDS,
    WorkerProcess,
    end,
    end_and_close,
    environment,
    free_ports,
    launch,
    send_signal,
    worker_command,
)

__all__ = [
    "ROOT",
    "Hosts",
    "HostsError",
    "LocalWorkers",
    "Namespace",
    "QuotaError",
    "cpu_quota",
    "end",
    "end_and_close",
    "environment",
    "free_ports",
    "join",
    "launch",
    "new_keys",
    "unavailable",
]

_PERIOD = 10_000
"""Microseconds after which the quota begins anew; short beside a step."""
_MOST_SHARES, _MOST_WEIGHT = 2**18, 10_000
"""The most that Linux accepts in versions 1 and 2: other load on the machine leaves a group its quota."""
_GROUPS = pathlib.Path("/sys/fs/cgroup")
"""Control groups of Linux, version 1 or 2."""
_PREFIX = "10.77.0."
_KEY_DAYS = 365
"""Days after which keys for TLS expire; nothing here runs as long."""
_PORT = 2222
_NOBODY = f"{_PREFIX}254"
"""An address on the network whose packets reach nobody."""
_LOSING_TABLE, _LOSING_PRIORITY = "77", "100"
"""Routing table by which all goes to `_NOBODY`, and the priority of the rules that lead to it."""


class HostsError(RuntimeError):
    """Workers or hosts can't be started here; the text says why."""


def unavailable() -> str | None:
    """Returns why there can be no `Hosts` on this machine; None if there can."""
    for program in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"`{program}` isn't installed; it comes with iproute2 or util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Namespace() as one, Namespace() as other:
            join(one, "eth0", other, "eth0")
            one.call("ip", "link", "add", "name", "bridge", "type", "bridge")
            one.call("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *_bucket(100))
    except HostsError as error:
        return f"network namespaces aren't permitted here: {error}"
    return None


def new_keys(folder: str | os.PathLike[str], names: Sequence[str]) -> str:
    """Makes keys for TLS between workers and clients with these names or addresses; returns their directory."""
    directory = pathlib.Path(folder, "keys")
    Authority.make(_KEY_DAYS).write_machine(directory, names, _KEY_DAYS)
    return str(directory)


class LocalWorkers:
    """Workers on 127.0.0.1, each in its own process; they run within the ``with`` block.

    Attributes:
        addresses: ``host:port`` of each worker.
    """

    def __init__(
        self,
        count: int,
        devices: int = 1,
        *,
        ports: Sequence[int] | None = None,
        arguments: Sequence[str] = (),
        cores: Sequence[int] | None = None,
        echo: Callable[[int, str], None] | None = None,
    ) -> None:
        """Describes the workers, which start on entry.

        Args:
            count: number of workers.
            devices: logical CPU devices of each; 0 for GPUs: all of this machine's, or one each of several workers.
            ports: port of each worker; None for any free ones.
            arguments: further arguments of each worker.
            cores: worker i runs on core i of these only (modulo their number); None for all.
            echo: called with each line that a worker writes, in a thread; by default lines go to stderr.
        """
        if count < 1:
            raise HostsError(f"{count} workers were asked for; ask for at least 1")
        self.addresses = [f"127.0.0.1:{port}" for port in ports or free_ports(count)]
        self.devices, self._arguments, self._cores = devices, tuple(arguments), cores
        self._echo = echo or _to_stderr
        self._workers: list[WorkerProcess] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._set_up(self._stack)
            for worker in range(len(self.addresses)):
                self._workers.append(self._start(worker))
            self._wait(range(len(self.addresses)))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            send_signal(worker.process, signal.SIGKILL)
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._stack.close()

    @property
    def processes(self) -> list[subprocess.Popen[str]]:
        """The process of each worker; it has child processes."""
        return [worker.process for worker in self._workers]

    def lines(self, worker: int) -> list[str]:
        """Returns the last lines that a worker wrote."""
        return list(self._workers[worker].tail)

    def kill(self, worker: int) -> None:
        """Kills a worker, as if its machine were switched off, except that connections are closed."""
        self._workers[worker].end()

    def stop(self, worker: int) -> None:
        """Stops a worker and all of its children, until `cont`."""
        send_signal(self._workers[worker].process, signal.SIGSTOP)

    def cont(self, worker: int) -> None:
        """Lets a stopped worker go on."""
        send_signal(self._workers[worker].process, signal.SIGCONT)

    def restart(self, worker: int, *, wait: bool = True) -> None:
        """Starts a worker again at the same address, after killing it if it still runs.

        Args:
            worker: which one.
            wait: whether to wait until it serves.
        """
        self._workers[worker].end()
        self._workers[worker] = self._start(worker)
        if wait:
            self._wait([worker])

    def has_served(self, worker: int) -> bool:
        """Returns whether a worker has served since its last start."""
        return self._workers[worker].wait_until_serving(0.0)

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        """Prepares what the workers need."""

    def _prefix(self, worker: int) -> list[str]:
        """Returns the start of a command that runs where a worker does."""
        del worker
        return []

    def _start(self, worker: int) -> WorkerProcess:
        pinned = [] if self._cores is None else ["taskset", "-c", str(self._cores[worker % len(self._cores)])]
        own = [f"--gpus={worker}"] if self.devices == 0 and len(self.addresses) > 1 else []
        command = worker_command(self.addresses[worker], self.devices, [*own, *self._arguments])
        return WorkerProcess([*self._prefix(worker), *pinned, *command], lambda line: self._echo(worker, line))

    def _wait(self, workers: Sequence[int]) -> None:
        deadline = time.monotonic() + START_SECONDS
        for number in workers:
            worker = self._workers[number]
            if not worker.wait_until_serving(deadline):
                worker.end()
                told = "\n".join(worker.tail) or "nothing"
                raise HostsError(
                    f"worker {number} ({self.addresses[number]}) didn't start within {START_SECONDS:.0f} s, or ended "
                    f"with code {worker.process.returncode}; it said: {told}"
                )


def _to_stderr(worker: int, line: str) -> None:
    sys.stderr.write(f"[worker {worker}] {line}\n")


class Namespace:
    """A network namespace without a name; it exists within the ``with`` block, with its loopback device up."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # An idle process keeps it, which ends with its input, so that it doesn't outlive this process.
        script = "ip link set lo up && echo ready && exec cat"
        command = ["unshare", "--net", "sh", "-c", script]
        pipe = subprocess.PIPE
        self._holder = holder = launch(command, stdin=pipe, stdout=pipe, stderr=pipe)
        assert holder.stdout is not None and holder.stderr is not None
        if not holder.stdout.readline():
            said = holder.stderr.read().strip()
            self.close()
            raise HostsError(f"`{' '.join(command)}` failed: {said}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the namespace and its devices, once no other process is in it."""
        if self._holder is not None:
            end_and_close(self._holder)

    @property
    def pid(self) -> int:
        """A process in the namespace."""
        assert self._holder is not None, "use it in a `with` statement"
        return self._holder.pid

    @property
    def prefix(self) -> list[str]:
        """Start of a command that runs in the namespace."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def call(self, *command: str) -> str:
        """Runs a short command in the namespace and returns its output.

        Raises:
            HostsError: it failed.
        """
        return _call(*self.prefix, *command)


def join(one: Namespace, name: str, other: Namespace, other_name: str) -> None:
    """Joins two namespaces by a pair of virtual Ethernet devices, and takes both up."""
    ends = ["name", name, "netns", str(one.pid)], ["name", other_name, "netns", str(other.pid)]
    _call("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for namespace, device in ((one, name), (other, other_name)):
        namespace.call("ip", "link", "set", device, "up")


class Hosts(LocalWorkers):
    """Network namespaces on one network, 10.77.0.1 and following, with a worker in each, or several.

    `kill`, `stop`, `cont` and `restart` act on the worker of a host, as for `LocalWorkers`.

    Attributes:
        addresses: ``host:port`` of each worker: 10.77.0.1:2222, then 10.77.0.1:2223 or 10.77.0.2:2222, and so on.
        namespaces: namespace of each host.
    """

    def __init__(
        self,
        count: int,
        devices: int = 1,
        *,
        workers: int = 1,
        arguments: Sequence[str] = (),
        cores: Sequence[int] | None = None,
        share: float | None = None,
        echo: Callable[[int, str], None] | None = None,
    ) -> None:
        """Describes the hosts, which are made on entry.

        For the arguments see `LocalWorkers`; each host has ``workers`` of them, whose messages to each other no limit
        slows down, and ``share`` limits each worker to that many cores' time.
        """
        if workers < 1:
            raise HostsError(f"{workers} workers were asked for on each host; ask for at least 1")
        super().__init__(count, devices, ports=range(count), arguments=arguments, cores=cores, echo=echo)
        self._workers_each = workers
        self._share = share
        self._quotas: list[list[str]] = []
        self.ips = [f"{_PREFIX}{host + 1}" for host in range(count)]
        self.addresses = [f"{ip}:{_PORT + number}" for ip in self.ips for number in range(workers)]
        self.namespaces = [Namespace() for _ in range(count)]
        self._switch = Namespace()

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        if len(self.ips) > 250:
            raise HostsError(f"{len(self.ips)} hosts were asked for; there can be at most 250")
        stack.enter_context(self._switch)
        self._switch.call("ip", "link", "add", "name", "bridge", "type", "bridge")
        self._switch.call("ip", "link", "set", "bridge", "up")
        for host, (namespace, ip) in enumerate(zip(self.namespaces, self.ips, strict=True)):
            stack.enter_context(namespace)
            join(namespace, "eth0", self._switch, f"port{host}")
            self._switch.call("ip", "link", "set", f"port{host}", "master", "bridge")
            namespace.call("ip", "addr", "add", f"{ip}/24", "dev", "eth0")
            namespace.call(*f"ip neigh add {_NOBODY} lladdr 02:00:00:00:00:01 dev eth0 nud permanent".split())
            namespace.call(*f"ip route add default via {_NOBODY} dev eth0 table {_LOSING_TABLE}".split())
        if self._share is not None:
            self._quotas += [stack.enter_context(cpu_quota(self._share)) for _ in self.addresses]

    def _prefix(self, worker: int) -> list[str]:
        host = self.namespaces[worker // self._workers_each]
        return [*host.prefix, *(self._quotas[worker] if self._quotas else ())]

    def limit(self, rate: float | None) -> None:
        """Limits what each host sends and receives to ``rate`` Mbit/s; None lifts the limit."""
        for host, namespace in enumerate(self.namespaces):
            for where, device in ((namespace, "eth0"), (self._switch, f"port{host}")):
                if rate is None:
                    with contextlib.suppress(HostsError):  # There was none.
                        where.call("tc", "qdisc", "del", "dev", device, "root")
                else:
                    where.call("tc", "qdisc", "replace", "dev", device, "root", "tbf", *_bucket(rate))

    def cut(self, host: int) -> None:
        """Takes a host off the network: whatever it sends or is sent is lost silently."""
        self._switch.call("ip", "link", "set", f"port{host}", "down")

    def lose(self, host: int, to: int, packets: str = "") -> None:
        """Loses silently what a host sends to another one, but not what comes back.

        Args:
            host: number of the host that sends.
            to: number of the other one.
            packets: which packets, as a selector of ``ip rule``, such as "ipproto tcp dport 2222"; all by default.
        """
        rule = f"ip rule add priority {_LOSING_PRIORITY} to {self.ips[to]} {packets} lookup {_LOSING_TABLE}"
        self.namespaces[host].call(*rule.split())

    def join(self, host: int) -> None:
        """Reconnects a host to the network after `cut`, and ends its loss of packets."""
        self._switch.call("ip", "link", "set", f"port{host}", "up")
        with contextlib.suppress(HostsError):  # There is none any more.
            while True:
                self.namespaces[host].call("ip", "rule", "del", "priority", _LOSING_PRIORITY)

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command in a host; it ends with the ``with`` block. For the options see `subprocess.Popen`."""
        process = launch([*self.namespaces[host].prefix, *command], **options)
        self._stack.callback(end_and_close, process)
        return process

    def run(
        self, host: int, command: Sequence[str], *, timeout: float | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in a host to its end, and kills it if that takes more than ``timeout`` seconds.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        with self._running(host, command, **options) as process:
            out, err = process.communicate(timeout=timeout)
            return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    @contextlib.contextmanager
    def _running(self, host: int, command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
        with launch([*self.namespaces[host].prefix, *command], **options) as process:
            try:
                yield process
            finally:
                end(process)


def _bucket(rate: float) -> list[str]:
    """Returns arguments of a token bucket filter of ``rate`` Mbit/s, which lets 4 ms' worth pass at once."""
    burst = max(32_000, int(rate * 1e6 / 8 * 0.004))
    return ["rate", f"{rate:.3f}mbit", "burst", f"{burst}b", "latency", "100ms"]


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise HostsError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


class QuotaError(RuntimeError):
    """Processor time can't be limited here; the text says why."""


@contextlib.contextmanager
def cpu_quota(cores: float) -> Iterator[list[str]]:
    """Yields the start of a command that may use ``cores`` cores together with all its children.

    Several commands with this start share them, and get them before processes of other groups, as far as the machine
    has any. The group goes with the ``with`` block, when they have ended.

    Raises:
        QuotaError: control groups can't be made here.
    """
    old = (_GROUPS / "cpu" / "cpu.cfs_quota_us").exists()
    group = (_GROUPS / "cpu" if old else _GROUPS) / f"dapple_{uuid.uuid4().hex[:12]}"
    quota = max(1000, int(cores * _PERIOD))
    try:
        if not old:
            (_GROUPS / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        if old:
            (group / "cpu.shares").write_text(str(_MOST_SHARES))
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.weight").write_text(str(_MOST_WEIGHT))
            (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise QuotaError(
            f"processor time can't be limited here: {error}; that needs root and a writable {_GROUPS}"
        ) from error
    try:
        yield ["sh", "-c", f'echo $$ > {group / "cgroup.procs"} && exec "$@"', "sh"]
    finally:
        _empty_group(group)


def _empty_group(group: pathlib.Path) -> None:
    """Removes a group, whose processes that still run go back to the one above."""
    for process in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            (group.parent / "cgroup.procs").write_text(process)
    os.rmdir(group)
