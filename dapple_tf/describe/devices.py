"""Devices, servers and links: the parts of a `dapple_tf.Cluster`, and their JSON text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from dapple_tf.common.data_files import Decoder, Scalar, parse_object, short
from dapple_tf.errors import ClusterError

if TYPE_CHECKING:
    from dapple_tf.describe.cluster import Cluster

LINKS = ("intra_bandwidth", "inter_bandwidth", "intra_latency", "inter_latency")
REDUCTION = ("reduce_bandwidth", "reduce_latency")
REDUCTION_LINKS = ("ring", "inside", "between", "exchange")
"""The links of `ReductionLinks`."""


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: fully qualified name, such as ``/job:localhost/replica:0/task:0/device:CPU:3``.
        server: index of its server.
        memory_bytes: its memory; None for unknown, which planning takes as no limit.
        speed: how fast it computes, as a multiple of the device that profiles are made on.
        speed_spread: half of the range that the middle half of the measurements of its speed spans; 0 if it wasn't
            measured. Doesn't count in comparisons.
        kind: what hardware it is, the same text for like devices; empty for unknown. Doesn't count in comparisons.
    """

    name: str
    server: int
    memory_bytes: int | None = None
    speed: float = 1.0
    speed_spread: float = field(default=0.0, compare=False)
    kind: str = field(default="", compare=False)

    @property
    def type(self) -> str:
        """``CPU`` or ``GPU``, as its name says; empty for other names."""
        return self.name.partition("device:")[2].partition(":")[0]

    @property
    def number(self) -> int:
        """Its number in its process: 3 for ``.../device:GPU:3``."""
        return int(self.name.rpartition(":")[2])


@dataclass(frozen=True)
class Server:
    """One server's own properties; None stands for the cluster's common value.

    Attributes:
        intra_bandwidth: bytes/s between two of its devices, in each direction.
        inter_bandwidth: bytes/s of its network card, in each direction.
        intra_latency: seconds until the first byte arrives, within the server.
        inter_latency: the same, to and from other servers.
        capacity: compute of the server when all of its devices are busy, in devices; None is the number of devices.
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
        """Returns the seconds for sending ``size`` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class ReductionLinks:
    """What all-reduces were measured to do: links over which a ring would take the measured time; None for unknown.

    Whatever makes them is measured: TensorFlow's ring, or NCCL between GPUs, by a ring or a tree. For other numbers of
    members the time is a ring's: trees send as many bytes, in fewer steps.

    Attributes:
        ring: of one all-reduce over the devices of several servers.
        inside: of one inside a server.
        between: of one over a device of each server.
        exchange: of the reduce-scatter and all-gather inside servers around it, in a hierarchical all-reduce.
        error: the largest relative difference of a measured time from these; None if nothing was measured.
    """

    ring: Link | None = None
    inside: Link | None = None
    between: Link | None = None
    exchange: Link | None = None
    error: float | None = None

    @property
    def links(self) -> dict[str, Link]:
        """Name -> link, for known links."""
        return {name: link for name in REDUCTION_LINKS if (link := getattr(self, name)) is not None}


def worker_number(name: str) -> int:
    """Returns the number of a device's worker: ``/job:worker/replica:0/task:2/device:CPU:0`` is 2."""
    return int(name.partition("/task:")[2].partition("/")[0])


def check_addresses(addresses: Sequence[str]) -> None:
    """Checks the addresses of servers.

    Raises:
        ClusterError: there are no addresses, one isn't "host:port", or one is listed twice.
    """
    if isinstance(addresses, str) or not addresses:
        raise ClusterError(f"addresses is {addresses!r}; give a list with 'host:port' of at least one server")
    for position, address in enumerate(addresses):
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ClusterError(f"address {position} is {address!r}; write it as 'host:port', such as '10.0.0.1:2222'")
        if address in addresses[:position]:
            raise ClusterError(f"servers {addresses.index(address)} and {position} both have the address {address!r}")


def check_link(name: str, value: float | None) -> None:
    """Checks a bandwidth or a latency.

    Raises:
        ClusterError: it is out of range.
    """
    if value is None:
        return
    if "bandwidth" in name:
        if not (math.isfinite(value) and value > 0):
            raise ClusterError(f"{name} is {value} bytes/s; it must be above 0 and finite, or None for unknown")
    elif not (math.isfinite(value) and value >= 0):
        raise ClusterError(f"{name} is {value} s; it must be at least 0 and finite, or None for unknown")


# ---- clusters as JSON text


FORMAT = "dapple_tf.cluster/1"
MOST_DEVICES = 100_000
"""Most devices of a cluster; more is a mistake."""

_DECODER = Decoder(
    ClusterError,
    {
        float: Scalar(lambda value: type(value) in (int, float) and abs(value) < 2.0**1000, "a number"),
        int: Scalar(lambda value: type(value) is int and abs(value) < 2**63, "a whole number"),
    },
)


def parse(text: str, source: str) -> dict[str, Any]:
    """Returns the fields of the `dapple_tf.Cluster` that a text describes.

    Raises:
        ClusterError: not JSON, or an unknown, missing or wrong key.
    """
    data = parse_object(text, source, ClusterError)
    servers = data["servers"] if isinstance(data.get("servers"), list) else []
    for described in (data, *(server for server in servers if isinstance(server, dict))):
        for name in ("host_bandwidth", "host_latency"):
            if name in described:
                raise ClusterError(f"{source}: {name} is given, which nothing reads any more; leave it out")
    _DECODER.check_keys(data, ("format", "servers"), (*LINKS, *REDUCTION, "reductions"), source)
    _DECODER.check_format(data, FORMAT, source)
    entries = data["servers"]
    if not isinstance(entries, list) or not entries:
        raise ClusterError(f"{source}: 'servers' is {short(entries)}; it must be a list of at least one server")
    devices: list[Device] = []
    own: list[Server] = []
    for number, server in enumerate(entries):
        where = f"{source}: server {number}"
        memories, speeds = _server_devices(server, where)
        if len(devices) + len(memories) > MOST_DEVICES:
            raise ClusterError(f"{where}: with its 'devices' there are more than {MOST_DEVICES:,} in all")
        own.append(Server(**_numbers(server, [field.name for field in fields(Server)], where)))
        for index, (memory, speed) in enumerate(zip(memories, speeds, strict=True)):
            name = f"/job:worker/replica:0/task:{number}/device:GPU:{index}"
            devices.append(Device(name, number, memory, speed))
    numbers = _numbers(data, [*LINKS, *REDUCTION], source)
    servers = tuple(own) if any(server != Server() for server in own) else ()
    measured = _reductions(data.get("reductions", {}), f"{source}: reductions")
    return {"devices": tuple(devices), "servers": servers, "reductions": measured, **numbers}


def to_text(cluster: Cluster) -> str:
    """Returns the text that describes a cluster."""
    lines = []
    for number in range(cluster.num_servers):
        devices = cluster.devices_of(number)
        entry: dict[str, Any] = {"devices": len(devices)}
        for key in ("memory_bytes", "speed"):
            values = [getattr(cluster.devices[device], key) for device in devices]
            if key == "memory_bytes" or set(values) != {1.0}:
                entry[key] = values[0] if len(set(values)) == 1 else values
        if cluster.servers:
            entry |= {key: value for key, value in asdict(cluster.servers[number]).items() if value is not None}
        lines.append("    " + json.dumps(entry))
    described = [*LINKS, *(name for name in REDUCTION if getattr(cluster, name) is not None)]
    links = [f"  {json.dumps(name)}: {json.dumps(getattr(cluster, name))}" for name in described]
    if cluster.reductions != ReductionLinks():
        measured = {name: link._asdict() for name, link in cluster.reductions.links.items()}
        links.append(f'  "reductions": {json.dumps(measured | {"error": cluster.reductions.error})}')
    servers = '  "servers": [\n' + ",\n".join(lines) + "\n  ]"
    return "{\n" + ",\n".join([f'  "format": {json.dumps(FORMAT)}', servers, *links]) + "\n}\n"


def _numbers(data: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, float | None]:
    """Returns the values of these keys, each a number or None."""
    return {name: _DECODER.read(float | None, data.get(name), f"{source}: {name!r}") for name in names}


def _reductions(data: object, source: str) -> ReductionLinks:
    """Returns measured all-reduces."""
    entries = _DECODER.object(data, source)
    _DECODER.check_keys(entries, (), (*REDUCTION_LINKS, "error"), source)
    links = {}
    for name in filter(entries.__contains__, REDUCTION_LINKS):
        where = f"{source}: {name}"
        _DECODER.check_keys(_DECODER.object(entries[name], where), Link._fields, (), where)
        links[name] = Link(**_DECODER.read(Mapping[str, float], entries[name], where))
    return ReductionLinks(**links, error=_numbers(entries, ["error"], source)["error"])


def _server_devices(server: object, source: str) -> tuple[Sequence[int | None], Sequence[float]]:
    """Returns memory and speed of each device of one entry of ``servers``."""
    if not isinstance(server, dict):
        raise ClusterError(f'{source} is {short(server)}; it must be an object such as {{"devices": 8}}')
    optional = ("memory_bytes", "speed", *(field.name for field in fields(Server)))
    _DECODER.check_keys(server, ("devices",), optional, source)
    count = server["devices"]
    if type(count) is not int or not 1 <= count <= MOST_DEVICES:
        raise ClusterError(
            f"{source}: 'devices' is {short(count)}; it must be a whole number from 1 to {MOST_DEVICES:,}"
        )

    def each(key: str, kind: Any, default: Any) -> list[Any]:
        value = server.get(key, default)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count:
            raise ClusterError(f"{source}: {key!r} has {len(values)} entries for {count} devices; give one for each")
        return [_DECODER.read(kind, entry, f"{source}: {key!r}") for entry in values]

    return each("memory_bytes", int | None, None), each("speed", float, 1.0)
