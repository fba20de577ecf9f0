"""Clusters as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from dapple_tf.common.data_files import Decoder, parse_object, short
from dapple_tf.describe.devices import LINKS, REDUCTION, REDUCTION_LINKS, Device, Link, ReductionLinks, Server
from dapple_tf.errors import ClusterError

if TYPE_CHECKING:
    from dapple_tf.describe.cluster import Cluster

FORMAT = "dapple_tf.cluster/1"
MOST_DEVICES = 100_000
"""Most devices of a cluster; more is a mistake."""

_DECODER = Decoder(ClusterError)


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


def _is_number(value: object) -> bool:
    """Whether a value is a number that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1000)


def _numbers(data: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, float | None]:
    """Returns the values of these keys, each a number or None."""
    for name in names:
        value = data.get(name)
        if value is not None and not _is_number(value):
            raise ClusterError(f"{source}: {name!r} is {short(value)}; it must be a number or null")
    return {name: data.get(name) for name in names}


def _reductions(data: object, source: str) -> ReductionLinks:
    """Returns measured all-reduces."""
    if not isinstance(data, dict):
        raise ClusterError(f"{source} is {short(data)}; it must be an object with {', '.join(REDUCTION_LINKS)}")
    _DECODER.check_keys(data, (), (*REDUCTION_LINKS, "error"), source)
    links = {}
    for name, entry in data.items():
        if name == "error":
            continue
        if not isinstance(entry, dict):
            raise ClusterError(f"{source}: {name!r} is {short(entry)}; it must have a bandwidth and a latency")
        _DECODER.check_keys(entry, Link._fields, (), f"{source}: {name}")
        numbers = _numbers(entry, Link._fields, f"{source}: {name}")
        bandwidth, latency = (numbers[field] for field in Link._fields)
        if bandwidth is None or latency is None:
            raise ClusterError(f"{source}: {name!r} is {short(entry)}; bandwidth and latency must be numbers")
        links[name] = Link(bandwidth, latency)
    return ReductionLinks(**links, error=_numbers(data, ["error"], source)["error"])


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
    memories = _per_device(server, "memory_bytes", None, count, source)
    for entry in memories:
        if entry is not None and (type(entry) is not int or entry >= 2**63):
            raise ClusterError(
                f"{source}: 'memory_bytes' has {short(entry)}; it must be a whole number of bytes or null"
            )
    speeds = _per_device(server, "speed", 1.0, count, source)
    for entry in speeds:
        if not _is_number(entry):
            raise ClusterError(f"{source}: 'speed' has {short(entry)}; it must be a number")
    return memories, speeds


def _per_device(server: Mapping[str, Any], key: str, default: Any, count: int, source: str) -> list[Any]:
    value = server.get(key, default)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise ClusterError(f"{source}: {key!r} has {len(values)} entries for {count} devices; give one for each")
    return values
