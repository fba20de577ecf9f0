"""A worker: lends the devices of its machine to one client at a time, which trains a model on them.

    dapple-worker --address=10.0.0.1:2222
    dapple-worker --address=10.0.0.1:2222 --gpus=0,1 --tls=keys/node1

The address is the worker's own, at which clients and other workers reach it. Without the flag it is read from
TF_CONFIG, by "cluster", "worker" and "task". Training runs in a separate process, on
`dapple_tf.Cluster.of_servers(["10.0.0.1:2222", "10.0.0.2:2222"])` or `dapple_tf.Cluster.from_resolver(...)`.

For each client the worker starts a TensorFlow server in a child process, which ends with the client: no client inherits
variables, aborted collectives or a stuck step from an earlier one. While a client is connected, others are told that
the worker is in use. The worker's own process never imports TensorFlow, so that waiting takes some 30 MiB.

TensorFlow's gRPC has neither authentication nor encryption: whoever reaches the server can run any graph, read and
write files included. Both ports are open on the given address only, and public addresses are refused unless a flag says
otherwise; docs/cluster.md says how to use a private network or a tunnel.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from absl import app, flags, logging

from dapple_tf.clusters.serving import Machine, ProcessExit, attend, memory_kills
from dapple_tf.common.program import run_program
from dapple_tf.describe.cluster import ClusterError, check_addresses
from dapple_tf.describe.machine_report import MachineReport, report
from dapple_tf.network.acceptor import Acceptor, Guest
from dapple_tf.network.control import Hello, split_address
from dapple_tf.network.keys import Keys, tls_directory
from dapple_tf.network.listening import check_private, listen, resolve

_ADDRESS = flags.DEFINE_string("address", None, "This worker's host:port; by default its address in TF_CONFIG.")
_DEVICES = flags.DEFINE_integer(
    "devices", 0, "Logical CPU devices; 0 for the machine's GPUs, or 1 if it has none.", 0, 1000
)
_GPUS = flags.DEFINE_list(
    "gpus",
    None,
    "Numbers of the GPUs to lend, as in nvidia-smi, such as 0,1; by default those in CUDA_VISIBLE_DEVICES, or all.",
)
_MEMORY = flags.DEFINE_integer("memory_bytes", None, "Bytes of each device, for planning; by default what it has.", 1)
_SERVER_PORT = flags.DEFINE_integer("server_port", 0, "Port of the TensorFlow server; 0 for any free port.", 0, 65_535)
_TLS = flags.DEFINE_string(
    "tls",
    None,
    "Directory with this machine's certificate (see dapple-keys): all connections are encrypted, and only who has a "
    "certificate of the same authority gets in. By default the environment variable DAPPLE_TF_TLS.",
)
_ALLOW_PUBLIC = flags.DEFINE_bool("allow_public", False, "Start even on an address that the whole Internet can reach.")
_ALL_INTERFACES = flags.DEFINE_bool("all_interfaces", False, "Listen on all addresses of this machine.")

_PR_SET_PDEATHSIG = 1
_MOST_CHILDREN = 64
_MOST_ENDS = 1000
"""Maximum number of processes whose ends are remembered for their clients."""


def own_address(environment: Mapping[str, str]) -> str:
    """Returns the address of this worker in TF_CONFIG.

        {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}   is   "b:2222"

    Raises:
        ClusterError: there is no TF_CONFIG, or it lacks the address.
    """
    text = environment.get("TF_CONFIG")
    if text is None:
        raise ClusterError("the worker's address is missing: give --address=host:port, or set TF_CONFIG")
    try:
        config = json.loads(text)
        task = config["task"]
        if task["type"] != "worker":
            raise ClusterError(f"TF_CONFIG: this task's type is {task['type']!r}; only tasks of type 'worker' serve")
        addresses, index = config["cluster"]["worker"], task["index"]
        if type(index) is not int or not isinstance(addresses, list) or not 0 <= index < len(addresses):
            raise ClusterError(f"TF_CONFIG: task index is {index!r}, but the cluster's workers are {addresses!r}")
        return str(addresses[index])
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"TF_CONFIG isn't JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise ClusterError(
            f"TF_CONFIG lacks or garbles {error}; it looks like "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from error


class _Child(NamedTuple):
    """A process for a connection.

    Attributes:
        host: host of its client.
        memory_kills: the kernel's count of memory kills when it began.
    """

    host: str
    memory_kills: int


class Worker:
    """Listens on its address and forks a child for each connection that has asked something.

    The children agree on who has the devices.
    """

    def __init__(self, address: str, machine: Machine, *, all_interfaces: bool = False) -> None:
        """Starts to listen.

        Raises:
            ClusterError: the address doesn't exist, or is in use.
        """
        check_addresses([address])
        host, port = split_address(address)
        own = resolve(host)[0]
        self.address, self.machine = address, machine
        family = socket.AF_INET6 if own.version == 6 else socket.AF_INET
        try:
            listener = socket.create_server(("", port), family=family) if all_interfaces else listen(own, port)
        except OSError as error:
            raise ClusterError(f"no worker can listen on {address}: {error.strerror or error}") from error
        self._keys = machine.keys
        self._acceptor = Acceptor(listener, self._begin)
        self._children: dict[int, _Child] = {}  # by process

    def serve(self) -> None:
        """Serves until the process is ended."""
        while True:
            self._acceptor.wait()
            self.reap()
            while len(self._children) < _MOST_CHILDREN:
                children = list(self._children.values())  # at once: a signal's handler may remove some meanwhile
                guest = self._acceptor.take(collections.Counter(child.host for child in children))
                if guest is None:
                    break
                with contextlib.closing(guest.opening.channel):
                    self._fork(guest)

    def close(self) -> None:
        """Listens no more."""
        self._acceptor.close()

    def _begin(self, connection: socket.socket) -> Hello:
        if self._keys is not None:
            self._keys = self._keys.renewed()
        return Hello(connection, self._keys)

    def _fork(self, guest: Guest[Hello]) -> None:
        own = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            child = os.fork()
        except OSError as error:
            logging.warning("no process for a connection: %s", error)
            return
        if child == 0:
            self._acceptor.close()
            hello, machine = guest.opening, dataclasses.replace(self.machine, keys=guest.opening.keys)
            _run_child(lambda: attend(hello.channel, hello.message, machine), own)
        self.machine.ends.pop(child, None)
        self._children[child] = _Child(guest.host, memory_kills())

    def reap(self) -> None:
        """Notes how children have ended. A signal's handler may call this while it runs."""
        for child, known in list(self._children.items()):
            try:
                ended, status, usage = os.wait4(child, os.WNOHANG)
            except ChildProcessError:  # Whoever this call has interrupted, or has interrupted it, knows its end.
                continue
            if ended:
                self._children.pop(child, None)
                end = ProcessExit.of(status, 1024 * usage.ru_maxrss, memory_kills() - known.memory_kills)
                ends = self.machine.ends
                ends[child] = end
                if len(ends) > _MOST_ENDS:
                    del ends[next(iter(ends))]
                if status:
                    # Logging isn't for handlers of signals.
                    os.write(sys.stderr.fileno(), f"process {child} for a client: {end.text}\n".encode())


def _run_child(work: Callable[[], object], parent: int) -> NoReturn:
    """Runs a forked process's work and ends it: with code 1 after an error, and at once if its parent ends."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and this process with it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work()
            code = 0
    except Exception:
        logging.exception("a connection to the worker failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # TensorFlow's server can't be stopped.


def _report(gpus: list[str] | None) -> MachineReport:
    """Returns what TensorFlow knows of this machine, of whose GPUs it and later processes see only these.

    Raises:
        ClusterError: it sees other ones.
    """
    if gpus is None:
        return report()
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    told = report()
    if len(told.gpus) != len(gpus):
        raise ClusterError(
            f"--gpus={','.join(gpus)}: TensorFlow sees {len(told.gpus)} of these GPUs here; `nvidia-smi -L` lists "
            f"this machine's"
        )
    return told


def _warn_of_name(keys: Keys, host: str) -> None:
    """Warns if the certificate isn't for the worker's own host: others may reach it by another name (Kubernetes)."""
    try:
        keys.check_host(host)
    except ClusterError as error:
        logging.warning("%s; or let them reach this worker by a name that it has", error)


def main(argv: list[str]) -> None:
    """Serves until the process is ended."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        address = own_address(os.environ) if _ADDRESS.value is None else _ADDRESS.value
        check_addresses([address])
        host, port = split_address(address)
        if port == _SERVER_PORT.value:
            raise ClusterError(f"--server_port={port} is the port of --address, too; give another one")
        if _GPUS.value and _DEVICES.value:
            raise ClusterError(f"--gpus and --devices={_DEVICES.value} (processors) exclude each other; give one")
        directory = tls_directory(_TLS.value)
        keys = None if directory is None else Keys(directory)
        if keys is not None:
            _warn_of_name(keys, host)
        allow_public = _ALLOW_PUBLIC.value or keys is not None
        check_private(host, allow_public=allow_public, all_interfaces=_ALL_INTERFACES.value)
        told = _report(_GPUS.value)
        machine = Machine(host, _DEVICES.value, _MEMORY.value, _SERVER_PORT.value, _ALL_INTERFACES.value, keys, told)
        worker = Worker(address, machine, all_interfaces=_ALL_INTERFACES.value)
    except ClusterError as error:
        raise app.UsageError(str(error)) from error
    signal.signal(signal.SIGCHLD, lambda *_: worker.reap())
    way = "WITHOUT TLS: whoever reaches it can take it" if keys is None else "by TLS"
    sys.stdout.write(f"worker on {address} (process {os.getpid()}), {way}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        worker.serve()


def run() -> NoReturn:
    """Runs the console command."""
    run_program(main)


if __name__ == "__main__":
    run()
