"""The devices that a plan may use and the links between them: real ones, or a description to plan for."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

_FORMAT = "dapple_tf.cluster/1"
_LINKS = ("intra_bandwidth", "inter_bandwidth", "intra_latency", "inter_latency")
_REDUCTION = ("reduce_bandwidth", "reduce_latency")
_KINDS = ("auto", "cpu", "gpu")
_MOST_DEVICES = 1_000_000
"""Of one server; more is a mistake."""


class ClusterError(ValueError):
    """A cluster can't be had on this machine, or its description is wrong."""


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: fully qualified, such as ``/job:localhost/replica:0/task:0/device:CPU:3``.
        server: index of the server it is in.
        memory_bytes: its memory; None is unknown, which planning takes as no limit.
        speed: how fast it computes, as a multiple of the device that profiles are made on.
    """

    name: str
    server: int
    memory_bytes: int | None = None
    speed: float = 1.0


@dataclass(frozen=True)
class Server:
    """What one server has of its own; None is what the cluster says for all.

    Attributes:
        intra_bandwidth: bytes/s between two of its devices, in each direction.
        inter_bandwidth: bytes/s of its network card, in each direction.
        intra_latency: seconds until the first byte arrives, within it.
        inter_latency: the same, to and from other servers.
        capacity: how many devices' worth of compute it gives when all of its devices are busy; None is one for each.
            Logical CPU devices share their cores: four of them on two cores have a capacity of two.
    """

    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    intra_latency: float | None = None
    inter_latency: float | None = None
    capacity: float | None = None


class Link(NamedTuple):
    """A link between two devices: bytes/s and seconds until the first byte arrives."""

    bandwidth: float
    latency: float

    def seconds(self, size: float) -> float:
        """Time to send ``size`` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Devices, numbered by their position server by server, and the links between them.

    Attributes:
        devices: every device, those of server 0 first.
        intra_bandwidth: bytes/s between two devices in one server; None is unknown, as in the other links.
        inter_bandwidth: bytes/s between two servers.
        intra_latency: seconds until the first byte arrives, within a server.
        inter_latency: the same between servers.
        real: whether the devices exist; False for a description.
        servers: what single servers have of their own; empty where all are alike.
        reduce_bandwidth: bytes/s that all-reduce gets out of the slowest link of its ring, where it was measured; None
            is the link's own.
        reduce_latency: seconds of one step of the ring, likewise.
        target: where sessions on these devices are opened, "grpc://host:port" of the first server; empty for this
            process.
        sub_streams: n, where the last n devices are the sub-streams of the first n, see `with_sub_streams`; 0 for none.

    Raises:
        ClusterError: no devices, a name twice, servers not numbered 0, 1, ... in order, or a number out of range.
    """

    devices: tuple[Device, ...]
    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    intra_latency: float | None = None
    inter_latency: float | None = None
    real: bool = True
    servers: tuple[Server, ...] = ()
    reduce_bandwidth: float | None = None
    reduce_latency: float | None = None
    target: str = ""
    sub_streams: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "servers", tuple(self.servers))
        if not self.devices:
            raise ClusterError("the cluster has no devices; give it at least one")
        positions: dict[str, int] = {}
        server = -1
        for index, device in enumerate(self.devices):
            if device.name in positions:
                raise ClusterError(f"devices {positions[device.name]} and {index} are both {device.name!r}")
            positions[device.name] = index
            if device.server not in ({0} if index == 0 else {server, server + 1}):
                expected = "0" if index == 0 else f"{server} or {server + 1}"
                raise ClusterError(
                    f"device {index} is in server {device.server}, where {expected} is expected; number the servers "
                    f"from 0 without gaps and list the devices server by server"
                )
            server = device.server
            if device.memory_bytes is not None and device.memory_bytes < 1:
                raise ClusterError(
                    f"device {index} has memory_bytes {device.memory_bytes}; give at least 1, or None for unknown"
                )
            if not (math.isfinite(device.speed) and device.speed > 0):
                raise ClusterError(f"device {index} has speed {device.speed}; it must be above 0 and finite")
        for name in (*_LINKS, *_REDUCTION):
            _check_link(name, getattr(self, name))
        if self.servers and len(self.servers) != self.num_servers:
            raise ClusterError(f"{len(self.servers)} servers are described, but the devices are in {self.num_servers}")
        for number, own in enumerate(self.servers):
            for name in _LINKS:
                _check_link(f"{name} of server {number}", getattr(own, name))
            if own.capacity is not None and not (math.isfinite(own.capacity) and own.capacity > 0):
                raise ClusterError(f"capacity of server {number} is {own.capacity}; it must be above 0 and finite")
        if self.sub_streams not in (0, self.num_devices / 2):
            raise ClusterError(
                f"sub_streams is {self.sub_streams}, but there are {self.num_devices} devices; give 0, or half of them"
            )

    @classmethod
    def local(cls, count: int, memory_bytes: int | None = None, *, kind: str = "auto") -> Cluster:
        """Take ``count`` logical devices of this machine, as one server.

        Args:
            count: how many.
            memory_bytes: memory of each, for planning; None is unknown.
            kind: "gpu"; "cpu" (logical CPU devices, of which a session may have any number); or "auto": GPUs if this
                machine has at least ``count`` of them, else logical CPU devices.

        Raises:
            ClusterError: ``count`` below 1, an unknown kind, or fewer GPUs than asked for with kind "gpu".
        """
        if count < 1:
            raise ClusterError(f"a local cluster of {count} devices was asked for; ask for at least 1")
        if kind not in _KINDS:
            raise ClusterError(f"unknown kind of device {kind!r}; use one of {', '.join(_KINDS)}")
        gpus = 0 if kind == "cpu" else _count_gpus()
        if kind == "gpu" and gpus < count:
            raise ClusterError(
                f"{count} GPUs were asked for, but TensorFlow sees {gpus} here; ask for fewer or for CPUs"
            )
        device_type = "GPU" if gpus >= count else "CPU"
        names = (f"/job:localhost/replica:0/task:0/device:{device_type}:{index}" for index in range(count))
        return cls(tuple(Device(name, 0, memory_bytes) for name in names))

    @classmethod
    def of_servers(
        cls, addresses: Sequence[str], *, devices_per_server: int = 1, memory_bytes: int | None = None
    ) -> Cluster:
        """Take the logical CPU devices of TensorFlow servers that run already, see `dapple_tf.worker`.

            Cluster.of_servers(["10.0.0.1:2222", "10.0.0.2:2222"])

        Args:
            addresses: "host:port" of each server, the same and in the same order as the servers were given. Sessions
                are opened on the first.
            devices_per_server: devices of each server.
            memory_bytes: memory of each device, for planning; None is unknown.

        Raises:
            ClusterError: no addresses, one that isn't "host:port" or that stands there twice, or no devices.
        """
        check_addresses(addresses)
        if devices_per_server < 1:
            raise ClusterError(f"devices_per_server is {devices_per_server}; servers have at least 1 device each")
        devices = tuple(
            Device(f"/job:worker/replica:0/task:{server}/device:CPU:{index}", server, memory_bytes)
            for server in range(len(addresses))
            for index in range(devices_per_server)
        )
        return cls(devices, target=f"grpc://{addresses[0]}")

    def with_sub_streams(self, memory_share: float = 0.5) -> Cluster:
        """Give each device a sub-stream: a second logical device of the same hardware (EuroSys'22, section 4.1).

            Cluster.local(2).with_sub_streams()   devices 0 and 1, their sub-streams 2 and 3

        The devices keep their numbers; device i's sub-stream is device n + i. TensorFlow gives each logical device
        streams of its own. On CPUs, sub-streams are further logical CPU devices. On GPUs, a session makes them with the
        main ones' streams at the higher priority (`session.session_config`); it needs to know the GPU's memory, of
        which each logical device has a fixed part. Two streams share the hardware: the server's capacity stays what it
        is.

        Args:
            memory_share: the part of a device's memory that is the sub-stream's. It keeps variables, optimizer slots
                and gradients there, and copies of what Bw reads.

        Raises:
            ClusterError: several servers or remote ones, sub-streams already, a share that isn't between 0 and 1, or
                GPUs whose ``memory_bytes`` isn't known.
        """
        if self.sub_streams:
            raise ClusterError("the cluster has sub-streams already; a device has one")
        if self.num_servers > 1 or self.target:
            where = f"{self.num_servers} servers" if self.num_servers > 1 else f"a server at {self.target}"
            raise ClusterError(f"sub-streams are for the devices of this machine, but the cluster is of {where}")
        if not 0 < memory_share < 1:
            raise ClusterError(f"memory_share is {memory_share}; it must be between 0 and 1")
        mains, subs = [], []
        for index, device in enumerate(self.devices):
            kind, number = _kind_and_number(device.name)
            size = device.memory_bytes
            if size is None and self.real and kind == "GPU":
                raise ClusterError(
                    f"device {index} is a GPU of unknown memory, which two streams must share out: give it, "
                    f"Cluster.local({self.num_devices}, memory_bytes=...)"
                )
            if number != index:
                raise ClusterError(f"device {index} is {device.name}; sub-streams are for devices in order, from 0 on")
            part = None if size is None else max(1, round(size * memory_share))
            name = device.name.removesuffix(str(number)) + str(number + self.num_devices)
            mains.append(replace(device, memory_bytes=None if part is None or size is None else max(1, size - part)))
            subs.append(replace(device, name=name, memory_bytes=part))
        own = self.servers[0] if self.servers else Server()
        server = replace(own, capacity=self.capacity(0))
        return replace(self, devices=(*mains, *subs), servers=(server,), sub_streams=self.num_devices)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a description from a JSON file, as `from_json` has it.

        Raises:
            ClusterError: naming the file and what is wrong in it.
            OSError: the file can't be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ClusterError(f"{os.fspath(path)} isn't text: {error}") from error
        return cls.from_json(text, source=os.fspath(path))

    @classmethod
    def from_json(cls, text: str, *, source: str = "cluster description") -> Cluster:
        """Read a cluster to plan for: not real, its devices named ``/job:worker/.../task:<server>/device:GPU:<i>``.

            {"format": "dapple_tf.cluster/1",
             "servers": [{"devices": 8, "memory_bytes": 17179869184}, {"devices": 8, "memory_bytes": null}],
             "intra_bandwidth": 130e9, "inter_bandwidth": 3.125e9, "intra_latency": 5e-6, "inter_latency": 3e-5}

        ``memory_bytes`` is that of each device of the server: one number, or a list with one for each; so is
        ``speed``. These and the links may be left out. A server may have links and a ``capacity`` of its own, see
        :class:`Server`. ``source`` stands in error messages.

        Raises:
            ClusterError: not JSON, or an unknown, missing or wrong key.
        """
        data = _parse_object(text, source)
        _check_keys(data, {"format", "servers"}, {*_LINKS, *_REDUCTION}, source)
        if data["format"] != _FORMAT:
            raise ClusterError(f"{source}: 'format' is {data['format']!r}; this version reads {_FORMAT!r}")
        servers = data["servers"]
        if not isinstance(servers, list) or not servers:
            raise ClusterError(f"{source}: 'servers' is {servers!r}; it must be a list of at least one server")
        devices: list[Device] = []
        own: list[Server] = []
        for number, server in enumerate(servers):
            where = f"{source}: server {number}"
            memories, speeds = _server_devices(server, where)
            own.append(Server(**_numbers(server, [field.name for field in fields(Server)], where)))
            for index, (memory, speed) in enumerate(zip(memories, speeds, strict=True)):
                name = f"/job:worker/replica:0/task:{number}/device:GPU:{index}"
                devices.append(Device(name, number, memory, speed))
        numbers: dict[str, Any] = _numbers(data, [*_LINKS, *_REDUCTION], source)
        try:
            return cls(
                tuple(devices),
                **numbers,
                real=False,
                servers=tuple(own) if any(server != Server() for server in own) else (),
            )
        except ClusterError as error:
            raise ClusterError(f"{source}: {error}") from error

    def to_json(self) -> str:
        """Return the description as JSON text: servers, memory and links, but not device names; see `from_json`."""
        lines = []
        for number in range(self.num_servers):
            devices = self.devices_of(number)
            entry: dict[str, Any] = {"devices": len(devices)}
            for key in ("memory_bytes", "speed"):
                values = [getattr(self.devices[device], key) for device in devices]
                if key == "memory_bytes" or set(values) != {1.0}:
                    entry[key] = values[0] if len(set(values)) == 1 else values
            if self.servers:
                entry |= {key: value for key, value in asdict(self.servers[number]).items() if value is not None}
            lines.append("    " + json.dumps(entry))
        kept = [*_LINKS, *(name for name in _REDUCTION if getattr(self, name) is not None)]
        links = [f"  {json.dumps(name)}: {json.dumps(getattr(self, name))}" for name in kept]
        servers = '  "servers": [\n' + ",\n".join(lines) + "\n  ]"
        return "{\n" + ",\n".join([f'  "format": {json.dumps(_FORMAT)}', servers, *links]) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file; `load` gives the same cluster back as a description."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return self.devices[-1].server + 1

    @functools.cached_property
    def _server_devices(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.num_servers)]
        for index, device in enumerate(self.devices):
            found[device.server].append(index)
        return tuple(map(tuple, found))

    def devices_of(self, server: int) -> tuple[int, ...]:
        """Indices of the devices of a server."""
        return self._server_devices[server]

    @functools.cached_property
    def server_links(self) -> tuple[tuple[Link, Link], ...]:
        """For each server the link between its devices and its network card; what is unknown is taken as free."""

        def link(own: Server, kind: str) -> Link:
            found = {}
            for part, free in (("bandwidth", math.inf), ("latency", 0.0)):
                name = f"{kind}_{part}"
                value = getattr(own, name)
                value = getattr(self, name) if value is None else value
                found[part] = free if value is None else value
            return Link(**found)

        servers = self.servers or (Server(),) * self.num_servers
        return tuple((link(server, "intra"), link(server, "inter")) for server in servers)

    def link(self, first: int, second: int) -> Link:
        """The link between two devices: that of their server, or the slower of their servers' network cards."""
        a, b = self.devices[first].server, self.devices[second].server
        if a == b:
            return self.server_links[a][0]
        one, other = self.server_links[a][1], self.server_links[b][1]
        return Link(min(one.bandwidth, other.bandwidth), max(one.latency, other.latency))

    @functools.cached_property
    def device_groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices of one server that are alike, in speed and memory, server by server."""
        found: dict[tuple[int, int | None, float], list[int]] = {}
        for index, device in enumerate(self.devices):
            found.setdefault((device.server, device.memory_bytes, device.speed), []).append(index)
        return tuple(map(tuple, found.values()))

    def capacity(self, server: int) -> float:
        """How many devices' worth of compute a server gives when all of its devices are busy."""
        own = self.servers[server].capacity if self.servers else None
        return float(len(self.devices_of(server))) if own is None else own

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Fully qualified name of each device."""
        return tuple(device.name for device in self.devices)

    @property
    def host_device(self) -> str:
        """The device that batches are fed to and results are fetched from: a CPU of the process with the session."""
        return f"/job:{'worker' if self.target else 'localhost'}/replica:0/task:0/device:CPU:0"

    def __str__(self) -> str:
        counts = [len(self.devices_of(server)) for server in range(self.num_servers)]
        per_server = str(counts[0]) if len(set(counts)) == 1 else "+".join(map(str, counts))
        servers = f"{len(counts)} server{'s' if len(counts) > 1 else ''} of {per_server} devices"
        known = [device.memory_bytes for device in self.devices if device.memory_bytes is not None]
        memory = "memory unknown"
        if known:
            low, high = (f"{bound / 2**30:.4g}" for bound in (min(known), max(known)))
            memory = f"{low} GiB each" if low == high else f"{low} to {high} GiB each"
            if len(known) < self.num_devices:
                memory += f" (known for {len(known)} of {self.num_devices})"
        links = (
            f"  inside a server: {_link_text(self.intra_bandwidth, self.intra_latency)}\n"
            f"  between servers: {_link_text(self.inter_bandwidth, self.inter_latency)}"
        )
        names = f"  {self.devices[0].name}" + (f" to {self.devices[-1].name}" if self.num_devices > 1 else "")
        return f"Cluster ({'real' if self.real else 'description'}): {servers}, {memory}\n{names}\n{links}"


def check_addresses(addresses: Sequence[str]) -> None:
    """Checks the addresses of servers.

    Raises:
        ClusterError: no addresses, one that isn't "host:port", or one that stands there twice.
    """
    if isinstance(addresses, str) or not addresses:
        raise ClusterError(f"addresses is {addresses!r}; give a list with 'host:port' of at least one server")
    for position, address in enumerate(addresses):
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ClusterError(f"address {position} is {address!r}; write it as 'host:port', such as '10.0.0.1:2222'")
        if address in addresses[:position]:
            raise ClusterError(f"servers {addresses.index(address)} and {position} both have the address {address!r}")


def _kind_and_number(name: str) -> tuple[str, int]:
    """What kind of device it is, and which: ``.../device:GPU:3`` is ("GPU", 3)."""
    _, kind, number = name.rsplit(":", 2)
    return kind, int(number)


def _count_gpus() -> int:
    import tensorflow as tf  # heavy, and a description doesn't need it

    return len(tf.config.list_physical_devices("GPU"))


def _link_text(bandwidth: float | None, latency: float | None) -> str:
    rate = "bandwidth unknown" if bandwidth is None else f"{bandwidth / 1e9:.4g} GB/s"
    delay = "latency unknown" if latency is None else f"{latency * 1e6:.4g} us"
    return f"{rate}, {delay}"


def _check_link(name: str, value: float | None) -> None:
    if value is None:
        return
    if "bandwidth" in name:
        if not (math.isfinite(value) and value > 0):
            raise ClusterError(f"{name} is {value} bytes/s; it must be above 0 and finite, or None for unknown")
    elif not (math.isfinite(value) and value >= 0):
        raise ClusterError(f"{name} is {value} s; it must be at least 0 and finite, or None for unknown")


def _parse_object(text: str, source: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers and nesting beyond Python's limits
        raise ClusterError(f"{source} isn't JSON: {error}") from error
    if not isinstance(data, dict):
        raise ClusterError(f"{source} has a JSON {type(data).__name__} where an object {{...}} is expected")
    return data


def _check_keys(data: Mapping[str, Any], required: set[str], optional: set[str], source: str) -> None:
    for key in data:
        if key not in required | optional:
            raise ClusterError(f"{source}: unknown key {key!r}; the keys are {', '.join(sorted(required | optional))}")
    for key in sorted(required):
        if key not in data:
            raise ClusterError(f"{source}: key {key!r} is missing")


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1000)


def _numbers(data: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, float | None]:
    """The values of these keys, each a number or None."""
    for name in names:
        value = data.get(name)
        if value is not None and not _is_number(value):
            raise ClusterError(f"{source}: {name!r} is {value!r}; it must be a number or null")
    return {name: data.get(name) for name in names}


def _server_devices(server: object, source: str) -> tuple[Sequence[int | None], Sequence[float]]:
    """Return memory and speed of each device of one entry of ``servers``."""
    if not isinstance(server, dict):
        raise ClusterError(f'{source} is {server!r}; it must be an object such as {{"devices": 8}}')
    _check_keys(server, {"devices"}, {"memory_bytes", "speed", *(field.name for field in fields(Server))}, source)
    count = server["devices"]
    if type(count) is not int or not 1 <= count <= _MOST_DEVICES:
        raise ClusterError(f"{source}: 'devices' is {count!r}; it must be a whole number from 1 to {_MOST_DEVICES:,}")
    memories = _per_device(server, "memory_bytes", None, count, source)
    for entry in memories:
        if entry is not None and (type(entry) is not int or entry >= 2**63):
            raise ClusterError(f"{source}: 'memory_bytes' has {entry!r}; it must be a whole number of bytes or null")
    speeds = _per_device(server, "speed", 1.0, count, source)
    for entry in speeds:
        if not _is_number(entry):
            raise ClusterError(f"{source}: 'speed' has {entry!r}; it must be a number")
    return memories, speeds


def _per_device(server: Mapping[str, Any], key: str, default: Any, count: int, source: str) -> list[Any]:
    value = server.get(key, default)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise ClusterError(f"{source}: {key!r} has {len(values)} entries for {count} devices; give one for each")
    return values
