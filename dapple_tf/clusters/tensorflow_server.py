"""TensorFlow's servers: what they are told, and TensorFlow's shared library by its C interface, which makes them.

A worker's process for a client runs graphs that the client has made. `import tensorflow` would take it 4 s and 210 MiB
of its own; the library alone takes 0.4 s and 40 MiB. So messages for it are written without TensorFlow's Python part.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import os
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from dapple_tf.errors import ClusterError, PortTakenError
from dapple_tf.network.control import join_address, split_address
from dapple_tf.network.keys import Keys
from dapple_tf.network.listening import Address, confine, keep_closed, resolve
from dapple_tf.network.tunnels import LOOPBACK, Tunnels

_DIRECTLY = "no_grpc_proxy"
"""Environment variable with the hosts that gRPC reaches without a proxy, in place of ``no_proxy``."""
_LIBRARY = "libtensorflow_cc.so.2"
_BEFORE = ("hashlib", "ssl")
"""Imported before the library, as `import tensorflow` does: its own OpenSSL would take the place of theirs."""
_TRUE = ("1", "true")
_FUNCTIONS = (
    ("TF_NewStatus", ctypes.c_void_p),
    ("TF_DeleteStatus", None, ctypes.c_void_p),
    ("TF_GetCode", ctypes.c_int, ctypes.c_void_p),
    ("TF_Message", ctypes.c_char_p, ctypes.c_void_p),
    ("TF_NewServer", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p),
    ("TF_ServerStart", None, ctypes.c_void_p, ctypes.c_void_p),
    ("TF_ServerTarget", ctypes.c_char_p, ctypes.c_void_p),
)
"""Functions of its C interface (tensorflow/c/c_api.h), with the types of their results and arguments."""

# Numbers of fields, from TensorFlow's protobuf/tensorflow_server.proto, cluster.proto and config.proto.
_CLUSTER, _JOB_NAME, _TASK, _SESSION_CONFIG, _PROTOCOL = 1, 2, 3, 4, 5  # ServerDef
_JOB = 1  # ClusterDef
_NAME, _TASKS = 1, 2  # JobDef
_KEY, _VALUE = 1, 2  # an entry of a map
_DEVICE_COUNT, _INTRA_OP, _INTER_OP, _GPU_OPTIONS, _EXPERIMENTAL = 1, 2, 5, 6, 16  # ConfigProto
_ALLOW_GROWTH = 4  # GPUOptions
_LEADER = 1  # ConfigProto.Experimental

_VARINT, _BYTES = 0, 2
"""Protobuf's types of fields on the wire."""


# ---- starting them


def free_port(host: str) -> int:
    """Returns a TCP port that is free now, at an address or name of this machine."""
    own = resolve(host)[0]
    with socket.socket(socket.AF_INET6 if own.version == 6 else socket.AF_INET) as trial:
        trial.bind((str(own), 0))
        return int(trial.getsockname()[1])


class Started(NamedTuple):
    """A TensorFlow server of this process.

    Attributes:
        port: port at which the others reach it.
        target: its target for sessions.
        cluster: the cluster as it sees it: job -> where it reaches each task, its ends of tunnels with TLS.
        tunnels: the tunnels by which it is reached and reaches others; None without TLS.
    """

    port: int
    target: str
    cluster: Mapping[str, Sequence[str]]
    tunnels: Tunnels | None = None


def start_server(
    cluster: Mapping[str, Sequence[str]],
    own: tuple[str, int],
    settings: ServerSettings,
    hosts: Sequence[str],
    port: int,
    keys: Keys | None = None,
    fingerprints: Mapping[str, Sequence[str]] | None = None,
    *,
    all_interfaces: bool = False,
    silence: float = 0.0,
) -> Started:
    """Starts a TensorFlow server that others reach at these hosts alone, and only by tunnels if there are keys.

    Args:
        cluster: job -> "host:port" of each task.
        own: the server's job, and its number there.
        settings: its devices and threads.
        hosts: this machine's addresses at which the others reach it.
        port: the port there.
        keys: this machine's, for TLS.
        fingerprints: those of the tasks' certificates.
        all_interfaces: whether it is reached at all of the machine's addresses.
        silence: as for `Tunnels`.

    Raises:
        PortTakenError: the port is taken.
        ClusterError: the server can't be confined to these addresses.
    """
    if keys is None:
        addresses = None if all_interfaces else [address for host in hosts for address in resolve(host)]
        return Started(port, _started(cluster, own, settings, port, addresses), cluster)
    prints = fingerprints or {}
    tunnels = Tunnels(keys, hosts, port, cluster, prints, own, all_interfaces=all_interfaces, silence=silence)
    try:
        _started(tunnels.cluster, own, settings, tunnels.server_port, resolve(LOOPBACK))
    except BaseException:
        tunnels.close()
        raise
    return Started(port, f"grpc://{join_address(LOOPBACK, tunnels.server_port)}", tunnels.cluster, tunnels)


def _started(
    cluster: Mapping[str, Sequence[str]],
    own: tuple[str, int],
    settings: ServerSettings,
    port: int,
    addresses: Sequence[Address] | None,
) -> str:
    """Starts a server at these addresses, None is all of the machine's; returns its target."""
    _go_past_proxies(cluster)
    try:
        with contextlib.nullcontext() if addresses is None else keep_closed(port):
            server = Server(serialized(cluster, *own, settings))
            if addresses is not None:
                confine(port, addresses)
        server.start()
    except LibraryError as error:
        raise PortTakenError(f"no server can be started on port {port}: is it taken? ({error})") from error
    return server.target


def _go_past_proxies(cluster: Mapping[str, Sequence[str]]) -> None:
    """Has TensorFlow's gRPC in this process reach a cluster's servers without the proxy that the environment names."""
    former = os.environ.get(_DIRECTLY, os.environ.get("no_proxy", "")).split(",")
    hosts = [split_address(address)[0] for addresses in cluster.values() for address in addresses]
    os.environ[_DIRECTLY] = ",".join(dict.fromkeys(filter(None, [*former, "localhost", *hosts])))


# ---- what they are told


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Devices and threads of a server.

    Attributes:
        cpus: number of its logical CPU devices.
        gpus: number of its GPUs, whose memory is taken as it is needed, instead of all at the start.
        inter_op: threads that run operators; 0 for TensorFlow's own choice.
        intra_op: threads inside an operator; 0 for TensorFlow's own choice.
        leader: number of the worker that assigns the keys of collective operations; None for no such operations.
    """

    cpus: int = 1
    gpus: int = 0
    inter_op: int = 0
    intra_op: int = 0
    leader: int | None = None

    @classmethod
    def of_worker(cls, cpus: int, gpus: int, leader: int = 0) -> Self:
        """Returns a worker's options for as many devices; threads as in `session.session_config`."""
        inter_op, intra_op = threads(cpus + gpus, cpus)
        return cls(max(1, cpus), gpus, inter_op, intra_op, leader)


def threads(devices: int, cpus: int) -> tuple[int, int]:
    """Returns the threads that run operators, one for each device at least, and those inside an operator.

    Logical CPU devices share the cores. Without any, TensorFlow chooses the threads inside an operator (0).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(devices + 1, cores), max(1, cores // cpus) if cpus else 0


def worker_name(task: int) -> str:
    """Returns TensorFlow's name of a worker."""
    return f"/job:worker/replica:0/task:{task}"


def serialized(cluster: Mapping[str, Sequence[str]], job: str, task: int, settings: ServerSettings) -> bytes:
    """Returns a serialized ``ServerDef``.

    Args:
        cluster: job -> the address of each of its tasks.
        job: the server's job.
        task: its number there.
        settings: its devices and threads.
    """
    jobs = [
        _message((_NAME, name), *((_TASKS, _message((_KEY, number), (_VALUE, at))) for number, at in enumerate(own)))
        for name, own in sorted(cluster.items())
    ]
    config: list[tuple[int, int | str | bytes]] = [
        (_DEVICE_COUNT, _message((_KEY, "CPU"), (_VALUE, settings.cpus))),
        (_DEVICE_COUNT, _message((_KEY, "GPU"), (_VALUE, settings.gpus))),
        (_INTRA_OP, settings.intra_op),
        (_INTER_OP, settings.inter_op),
        *([(_GPU_OPTIONS, _message((_ALLOW_GROWTH, 1)))] if settings.gpus else []),
        *([] if settings.leader is None else [(_EXPERIMENTAL, _message((_LEADER, worker_name(settings.leader))))]),
    ]
    return _message(
        (_CLUSTER, _message(*((_JOB, entry) for entry in jobs))),
        (_JOB_NAME, job),
        (_TASK, task),
        (_SESSION_CONFIG, _message(*config)),
        (_PROTOCOL, "grpc"),
    )


def _message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Returns a protobuf message of fields, each a number and a value that isn't negative."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_varint(number << 3 | _VARINT), _varint(value)]
        else:
            text = value.encode() if isinstance(value, str) else value
            parts += [_varint(number << 3 | _BYTES), _varint(len(text)), text]
    return b"".join(parts)


def _varint(number: int) -> bytes:
    """Returns a number in groups of seven bits, the lowest first; all but the last are marked."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


# ---- the library


class LibraryError(Exception):
    """TensorFlow's library reports an error; the text is its own."""


class Server:
    """A TensorFlow server, which can't be stopped: it ends with the process."""

    def __init__(self, definition: bytes) -> None:
        """Makes it and has it listen; nothing is answered before `start`.

        Args:
            definition: a serialized ``ServerDef``, see `serialized`.

        Raises:
            LibraryError: TensorFlow can't make it; its port may be taken.
            ClusterError: there is no library.
        """
        self._library = load()
        self._handle = self._call("TF_NewServer", definition, len(definition))

    def start(self) -> None:
        """Starts to answer.

        Raises:
            LibraryError: TensorFlow can't start it.
        """
        self._call("TF_ServerStart", self._handle)

    @property
    def target(self) -> str:
        """The target for sessions of this process."""
        target: bytes = self._library.TF_ServerTarget(self._handle)
        return target.decode()

    def _call(self, function: str, *arguments: object) -> int | None:
        """Calls a function whose last argument is a status; returns its result."""
        status = self._library.TF_NewStatus()
        try:
            handle: int | None = getattr(self._library, function)(*arguments, status)
            if self._library.TF_GetCode(status):
                raise LibraryError(self._library.TF_Message(status).decode(errors="replace"))
            return handle
        finally:
            self._library.TF_DeleteStatus(status)


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the library of the installed TensorFlow, which it loads unless this process has it.

    Raises:
        ClusterError: there is none.
    """
    package = importlib.util.find_spec("tensorflow")
    if package is None or package.origin is None:
        raise ClusterError("TensorFlow isn't installed: pip install tensorflow")
    path = Path(package.origin).with_name(_LIBRARY)
    if not path.exists() or _has_extensions(path.parent):
        importlib.import_module("tensorflow")  # It loads them, and the library from wherever it is.
    for module in _BEFORE:
        importlib.import_module(module)
    os.environ["TF2_BEHAVIOR"] = "1"  # `import tensorflow` sets it; the library reads it.
    try:
        library = ctypes.CDLL(str(path) if path.exists() else _LIBRARY)
        for name, result, *arguments in _FUNCTIONS:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ClusterError(
            f"TensorFlow's library {_LIBRARY} can't be loaded from {path.parent} ({error}); use a TensorFlow that has "
            f"it, such as that of pip install tensorflow"
        ) from error
    return library


def _has_extensions(package: Path) -> bool:
    """Returns whether `import tensorflow` would load more than the library: kernels, devices or filesystems."""
    return (
        bool(os.environ.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH"))
        or os.environ.get("TF_USE_MODULAR_FILESYSTEM", "") in _TRUE
        or Path(package, "core", "kernels").exists()
        or any(Path(folder, "tensorflow-plugins").exists() for folder in _site_packages())
    )


def _site_packages() -> Iterator[str]:
    yield from sys.path
    for scheme in sysconfig.get_scheme_names():
        for kind in ("purelib", "platlib"):
            yield sysconfig.get_path(kind, scheme)
