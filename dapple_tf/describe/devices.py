"""Devices, servers and links: the parts of a `dapple_tf.Cluster`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dapple_tf.errors import ClusterError

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
