"""The devices that a plan may use and the links between them: real ones, or a description to plan for."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dapple_tf.common.data_files import JsonFile, clip
from dapple_tf.common.text_table import ranges
from dapple_tf.common.units import counted, link_text
from dapple_tf.describe.devices import (
    LINKS,
    REDUCTION,
    Device,
    Link,
    ReductionLinks,
    Server,
    check_addresses,
    check_link,
    parse,
    to_text,
    worker_number,
)
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.machine_report import clean, cpu_kind, gpu_kinds, hide_gpus, local_gpus
from dapple_tf.errors import ClusterError
from dapple_tf.network.inquiry import inventory
from dapple_tf.network.keys import Keys, tls_directory
from dapple_tf.network.ray_workers import RayWorkers

__all__ = ["Cluster", "ClusterError", "Device", "Link", "ReductionLinks", "Server", "check_addresses"]

_KINDS = ("auto", "cpu", "gpu")
_LIKE_MEMORY = 1.1
"""Factor up to which sizes of memory count as the same."""


@dataclass(frozen=True)
class Cluster(JsonFile):
    """Devices, numbered by their position server by server, and the links between them.

    Attributes:
        devices: all devices, those of server 0 first.
        intra_bandwidth: bytes/s between two devices in one server; None for unknown, as in the other links.
        inter_bandwidth: bytes/s between two servers.
        intra_latency: seconds until the first byte arrives, within a server.
        inter_latency: the same between servers.
        real: whether the devices exist; False for a description.
        servers: the servers' own properties; empty if all are alike.
        reduce_bandwidth: the most bytes/s of an all-reduce over any link of its ring; None for the link's own.
        reduce_latency: the least seconds of one step of the ring; None for the link's own.
        addresses: "host:port" of each worker (`dapple_tf.worker`), one on each server unless `with_workers_per_server`
            says otherwise; empty for the devices of this process.
        reductions: all-reduces as they were measured, which count before links and the two values above.
        tls: directory with this machine's certificate, if the workers are reached by TLS (`network.keys`).
        ray_workers: the workers that `from_ray` has started, which end when no cluster refers to them; None for others.

    Raises:
        ClusterError: there are no devices, a name is used twice, servers aren't numbered 0, 1, ... in order, or a
            number is out of range.
    """

    file_error: ClassVar[type[Exception]] = ClusterError
    made_by: ClassVar[str] = "Cluster.local(2), say"
    devices: tuple[Device, ...]
    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    intra_latency: float | None = None
    inter_latency: float | None = None
    real: bool = True
    servers: tuple[Server, ...] = ()
    reduce_bandwidth: float | None = None
    reduce_latency: float | None = None
    addresses: tuple[str, ...] = ()
    reductions: ReductionLinks = field(default_factory=ReductionLinks)
    tls: str | None = None
    ray_workers: RayWorkers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "servers", tuple(self.servers))
        object.__setattr__(self, "addresses", tuple(self.addresses))
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
        for name in (*LINKS, *REDUCTION):
            check_link(name, getattr(self, name))
        for name, link in self.reductions.links.items():
            check_link(f"bandwidth of reductions' {name}", link.bandwidth)
            check_link(f"latency of reductions' {name}", link.latency)
        if self.servers and len(self.servers) != self.num_servers:
            raise ClusterError(
                f"the description has {counted(len(self.servers), 'server')}, but the devices are in {self.num_servers}"
            )
        for number, own in enumerate(self.servers):
            for name in LINKS:
                check_link(f"{name} of server {number}", getattr(own, name))
            if own.capacity is not None and not (math.isfinite(own.capacity) and own.capacity > 0):
                raise ClusterError(f"capacity of server {number} is {own.capacity}; it must be above 0 and finite")

    @classmethod
    def local(cls, count: int, memory_bytes: int | None = None, *, kind: str = "auto") -> Cluster:
        """Makes a cluster of ``count`` logical devices of this machine, as one server.

        Args:
            count: number of devices.
            memory_bytes: memory of each, for planning; None for what TensorFlow gets of GPUs, and unknown for CPUs.
            kind: "gpu"; "cpu" (logical CPU devices, of which a session may have any number); or "auto": GPUs if this
                process has at least ``count`` of them, else logical CPU devices. Logical GPUs count
                (``tf.config.set_logical_device_configuration``).

        Raises:
            ClusterError: ``count`` is below 1, the kind is unknown, or there are too few GPUs for kind "gpu".
        """
        if count < 1:
            raise ClusterError(f"a local cluster of {count} devices was asked for; ask for at least 1")
        if kind not in _KINDS:
            raise ClusterError(f"unknown kind of device {kind!r}; use one of {', '.join(_KINDS)}")
        gpus = [] if kind == "cpu" else gpu_kinds()
        if kind == "gpu" and len(gpus) < count:
            raise ClusterError(
                f"asked for {counted(count, 'GPU')}, but TensorFlow sees {len(gpus)} here (and none in a client of "
                f"workers); ask for fewer or for CPUs"
            )
        device_type, kinds = ("GPU", gpus) if len(gpus) >= count else ("CPU", [cpu_kind(count)] * count)
        sizes: list[int | None] = [memory_bytes] * count
        if device_type == "GPU" and memory_bytes is None:
            sizes = [gpu["memory_bytes"] for gpu in local_gpus()]
        names = (f"/job:localhost/replica:0/task:0/device:{device_type}:{index}" for index in range(count))
        return cls(
            tuple(Device(name, 0, size, kind=kind) for name, size, kind in zip(names, sizes, kinds, strict=False))
        )

    @classmethod
    def of_servers(
        cls,
        addresses: Sequence[str],
        *,
        devices_per_server: int | None = None,
        memory_bytes: int | None = None,
        tls: str | os.PathLike[str] | None = None,
    ) -> Cluster:
        """Makes a cluster of the devices of running workers, see `dapple_tf.worker`.

            Cluster.of_servers(["10.0.0.1:2222", "10.0.0.2:2222"])

        This process's own GPUs are left to workers from then on (docs/cluster.md).

        Args:
            addresses: "host:port" of each worker, at which this process and the other workers reach it.
            devices_per_server: logical CPU devices of each worker; None asks the workers for their devices.
            memory_bytes: memory of each device, for planning; None for what the workers say, or unknown.
            tls: directory with this machine's certificate, for workers that were started with ``--tls``; None is the
                environment variable DAPPLE_TF_TLS, without which nothing is encrypted.

        Raises:
            ClusterError: there are no addresses, one isn't "host:port" or is listed twice, there are no devices, no
                worker answers, two lend the same GPU, or TLS doesn't accept a certificate.
        """
        check_addresses(addresses)
        tls = tls_directory(tls)
        keys = None if tls is None else Keys(tls)
        if devices_per_server is None:
            answers = inventory(addresses, FaultPolicy().notice_seconds, keys)
            hide_gpus(device.get("card") for devices in answers for device in devices)
            server_devices = [
                [(str(d["kind"]), d["memory_bytes"], clean(d.get("hardware", ""))) for d in devices]
                for devices in answers
            ]
        elif devices_per_server < 1:
            raise ClusterError(f"devices_per_server is {devices_per_server}; servers have at least 1 device each")
        else:
            hide_gpus(())
            server_devices = [[("CPU", None, "")] * devices_per_server] * len(addresses)
        devices = tuple(
            Device(
                f"/job:worker/replica:0/task:{task}/device:{kind}:{index}", task, memory_bytes or memory, kind=hardware
            )
            for task, kinds in enumerate(server_devices)
            for index, (kind, memory, hardware) in enumerate(kinds)
        )
        return cls(devices, addresses=tuple(addresses), tls=None if keys is None else str(keys.directory))

    @property
    def keys(self) -> Keys | None:
        """This machine's keys as they are now; None without TLS.

        Raises:
            ClusterError: they can't be used.
        """
        return None if self.tls is None else Keys(self.tls)

    @classmethod
    def from_resolver(
        cls,
        resolver: Any,
        *,
        job: str = "worker",
        memory_bytes: int | None = None,
        tls: str | os.PathLike[str] | None = None,
    ) -> Cluster:
        """Makes a cluster of the workers that a ``tf.distribute.cluster_resolver`` names (TF_CONFIG, Slurm, ...).

            Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())

        This process is their client, whatever task the resolver says it is.

        Args:
            resolver: the resolver, which names the addresses.
            job: the job whose tasks are the workers.
            memory_bytes: as for `of_servers`.
            tls: as for `of_servers`.

        Raises:
            ClusterError: the resolver has no such job, or as for `of_servers`.
        """
        jobs = resolver.cluster_spec().as_dict()
        if job not in jobs:
            raise ClusterError(
                f"{type(resolver).__name__} names no job {job!r}, but {', '.join(map(repr, jobs)) or 'nothing'}: is "
                f"TF_CONFIG set, or job= another one?"
            )
        tasks = jobs[job]
        addresses = [tasks[task] for task in sorted(tasks)] if isinstance(tasks, dict) else list(tasks)
        return cls.of_servers(addresses, memory_bytes=memory_bytes, tls=tls)

    @classmethod
    def from_ray(
        cls,
        workers: int | None = None,
        *,
        devices_per_worker: int = 1,
        kind: str = "auto",
        resources: Mapping[str, float] | None = None,
        strategy: str = "SPREAD",
        wait_seconds: float = 60.0,
        memory_bytes: int | None = None,
        tls: str | os.PathLike[str] | None = None,
    ) -> Cluster:
        """Starts workers on the nodes of the Ray cluster that this process is connected to.

            ray.init(address="auto")
            cluster = dapple.Cluster.from_ray(workers=4, devices_per_worker=2)

        Each is an actor in a bundle of a placement group. Ray starts a worker again that has ended, and on another node
        if its own has gone; `FaultPolicy` says whether training waits for that. The workers end with `close`, when
        nothing refers to a cluster of theirs any more, and with this process.

        Args:
            workers: number of workers; None for one on each node that has what a worker needs.
            devices_per_worker: devices of each worker.
            kind: as for `local`; "auto" looks for GPUs among Ray's resources.
            resources: what each worker reserves, in Ray's words, such as ``{"CPU": 8}``. By default one CPU for each
                CPU device, or one GPU for each GPU and one CPU; what is named here comes beside or in place of it.
            strategy: how Ray places workers: "SPREAD", "PACK", "STRICT_SPREAD" or "STRICT_PACK".
            wait_seconds: seconds in which Ray must have room for all workers.
            memory_bytes: as for `of_servers`.
            tls: as for `of_servers`; the directory must be there on the nodes, too, each with its node's certificate.

        Raises:
            ClusterError: Ray isn't installed, not connected, or has no room; a worker doesn't start, or has other
                devices than it was to have; an argument is out of range; or as for `of_servers`.
        """
        tls = tls_directory(tls)
        arguments = [] if tls is None else [f"--tls={os.path.abspath(tls)}"]
        started = RayWorkers(
            workers,
            devices_per_worker,
            kind=kind,
            resources=resources,
            strategy=strategy,
            wait_seconds=wait_seconds,
            arguments=arguments,
        )
        try:
            cluster = cls.of_servers(started.addresses, memory_bytes=memory_bytes, tls=tls)
            wanted = "GPU" if started.gpus else "CPU"
            for server, address in enumerate(cluster.addresses):
                own = [cluster.devices[index].type for index in cluster.devices_of(server)]
                if own != [wanted] * devices_per_worker:
                    raise ClusterError(
                        f"worker {server} ({address}) was to have {counted(devices_per_worker, 'device')} of kind "
                        f"{wanted}, but has {', '.join(own)}: does TensorFlow find the GPUs that Ray has on that node?"
                    )
        except BaseException:
            started.close()
            raise
        return replace(cluster, ray_workers=started)

    def close(self) -> None:
        """Ends the workers that `from_ray` has started; others go on. Models can't train on them any more."""
        if self.ray_workers is not None:
            self.ray_workers.close()

    def located(self) -> tuple[str, ...]:
        """Returns where the workers are now: Ray may have started one again on another node, at another address."""
        return self.addresses if self.ray_workers is None else self.ray_workers.located(self.addresses)

    def with_workers_per_server(self, count: int) -> Cluster:
        """Returns a cluster in which each ``count`` workers, one after the other, are on one server.

            Cluster.of_servers(["10.0.0.1:2222", "10.0.0.1:2223", "10.0.0.2:2222", "10.0.0.2:2223"])
                .with_workers_per_server(2)          two servers of two workers each

        Several workers run on one machine where each device has a process of its own, with cores of its own, say.
        Devices keep their numbers. Links are unknown afterwards, as those inside servers are others now.

        Args:
            count: number of workers on each server.

        Raises:
            ClusterError: there are no workers, they can't be divided so or are on common servers already, or their
                servers are described.
        """
        workers = len(self.addresses)
        if not workers:
            raise ClusterError(
                f"the cluster has no workers to put together on servers of {count}; give their addresses"
            )
        if count == 1:
            return self
        if count < 1 or workers % count:
            raise ClusterError(
                f"{counted(workers, 'worker')} can't be divided into servers of {count}; give a divisor of {workers}"
            )
        if self.servers or self.num_servers != workers:
            raise ClusterError("the servers are described already; put workers together before links are measured")
        devices = tuple(replace(device, server=device.server // count) for device in self.devices)
        unknown: dict[str, Any] = dict.fromkeys((*LINKS, *REDUCTION))
        return replace(self, devices=devices, reductions=ReductionLinks(), **unknown)

    @classmethod
    def from_json(cls, text: str, *, source: str = "cluster description") -> Cluster:
        """Reads a cluster to plan for: not real, its devices named ``/job:worker/.../task:<server>/device:GPU:<i>``.

            {"format": "dapple_tf.cluster/1",
             "servers": [{"devices": 8, "memory_bytes": 17179869184}, {"devices": 8, "memory_bytes": null}],
             "intra_bandwidth": 130e9, "inter_bandwidth": 3.125e9, "intra_latency": 5e-6, "inter_latency": 3e-5}

        ``memory_bytes`` and ``speed`` are those of each device of the server: one number, or a list with one per
        device. These and the links may be left out. A server may have its own links and ``capacity``, see
        :class:`Server`. ``source`` is the text's name in errors.

        Raises:
            ClusterError: the text isn't JSON, or has an unknown, missing or wrong key.
        """
        fields = parse(text, source)
        try:
            return cls(**fields, real=False)
        except ClusterError as error:
            raise ClusterError(f"{source}: {clip(str(error))}") from error

    def to_json(self) -> str:
        """Returns the description as JSON text: servers, memory and links, but not device names; see `from_json`."""
        return to_text(self)

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return self.devices[-1].server + 1

    @functools.cached_property
    def _server_devices(self) -> tuple[tuple[int, ...], ...]:
        by_server: list[list[int]] = [[] for _ in range(self.num_servers)]
        for index, device in enumerate(self.devices):
            by_server[device.server].append(index)
        return tuple(map(tuple, by_server))

    def devices_of(self, server: int) -> tuple[int, ...]:
        """Returns the indices of a server's devices."""
        return self._server_devices[server]

    def worker_of(self, device: int) -> int:
        """Returns the number of a device's worker, which is its server's unless a server has several."""
        own = self.devices[device]
        return worker_number(own.name) if len(self.addresses) > self.num_servers else own.server

    def devices_of_worker(self, worker: int) -> tuple[int, ...]:
        """Returns the indices of a worker's devices."""
        return tuple(device for device in range(self.num_devices) if self.worker_of(device) == worker)

    def shares_memory(self, first: int, second: int) -> bool:
        """Returns whether a device reads another one's memory in place: logical CPU devices of one process do."""
        if first == second:
            return True
        cpus = all(self.devices[device].type == "CPU" for device in (first, second))
        return cpus and self.worker_of(first) == self.worker_of(second)

    @functools.cached_property
    def server_links(self) -> tuple[tuple[Link, Link], ...]:
        """For each server the link between its devices and its network card; unknown ones take no time."""

        def link(own: Server, kind: str) -> Link:
            parts = {}
            for part, free in (("bandwidth", math.inf), ("latency", 0.0)):
                name = f"{kind}_{part}"
                value = getattr(own, name)
                value = getattr(self, name) if value is None else value
                parts[part] = free if value is None else value
            return Link(**parts)

        servers = self.servers or (Server(),) * self.num_servers
        return tuple((link(server, "intra"), link(server, "inter")) for server in servers)

    def link(self, first: int, second: int) -> Link:
        """Returns the link between two devices: their server's, or the slower of their servers' network cards."""
        a, b = self.devices[first].server, self.devices[second].server
        if a == b:
            return self.server_links[a][0]
        one, other = self.server_links[a][1], self.server_links[b][1]
        return Link(min(one.bandwidth, other.bandwidth), max(one.latency, other.latency))

    @functools.cached_property
    def device_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of devices of one server with equal speed and memory, server by server."""
        groups: dict[tuple[int, int | None, float], list[int]] = {}
        for index, device in enumerate(self.devices):
            groups.setdefault((device.server, device.memory_bytes, device.speed), []).append(index)
        return tuple(map(tuple, groups.values()))

    @functools.cached_property
    def device_classes(self) -> tuple[tuple[int, ...], ...]:
        """Groups of like devices: of one kind, and of the same memory within `_LIKE_MEMORY`; that of device 0 first.

        The memory that TensorFlow gets of a GPU varies a little.
        """
        classes: list[list[int]] = []
        for index, device in enumerate(self.devices):
            like = (own for own in classes if _is_like(device, self.devices[own[0]]))
            own = next(like, None)
            if own is None:
                classes.append([index])
            else:
                own.append(index)
        return tuple(map(tuple, classes))

    @functools.cached_property
    def alike(self) -> bool:
        """Whether all devices have the same speed, and the same memory within `_LIKE_MEMORY`."""
        sizes = [device.memory_bytes or 0 for device in self.devices]  # 0 for unknown
        speeds = {device.speed for device in self.devices}
        return len(speeds) == 1 and max(sizes) <= min(sizes) * _LIKE_MEMORY

    def capacity(self, server: int) -> float:
        """Returns a server's compute when all of its devices are busy, in devices."""
        own = self.servers[server].capacity if self.servers else None
        return float(len(self.devices_of(server))) if own is None else own

    def shares_cores(self, server: int) -> bool:
        """Returns whether a server's devices slow each other down: its capacity is below their number."""
        return self.capacity(server) < len(self.devices_of(server))

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def has_gpus(self) -> bool:
        """Whether any of its devices is a GPU."""
        return any(device.type == "GPU" for device in self.devices)

    def all_gpus(self, devices: Iterable[int]) -> bool:
        """Whether these devices are GPUs."""
        return all(self.devices[device].type == "GPU" for device in devices)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Fully qualified name of each device."""
        return tuple(device.name for device in self.devices)

    @property
    def host_device(self) -> str:
        """The device that batches are fed to and results are fetched from: a CPU of this process."""
        return f"/job:{'client' if self.addresses else 'localhost'}/replica:0/task:0/device:CPU:0"

    def __str__(self) -> str:
        counts = [len(self.devices_of(server)) for server in range(self.num_servers)]
        per_server = counted(counts[0], "device") if len(set(counts)) == 1 else f"{'+'.join(map(str, counts))} devices"
        servers = f"{counted(len(counts), 'server')} of {per_server}"
        known = [device.memory_bytes for device in self.devices if device.memory_bytes is not None]
        memory = "memory unknown"
        if known:
            low, high = (f"{bound / 2**30:.4g}" for bound in (min(known), max(known)))
            memory = f"{low} GiB each" if low == high else f"{low} to {high} GiB each"
            if len(known) < self.num_devices:
                memory += f" (known for {len(known)} of {self.num_devices})"
        links = (
            f"  inside a server: {link_text(self.intra_bandwidth, self.intra_latency)}\n"
            f"  between servers: {link_text(self.inter_bandwidth, self.inter_latency)}"
        )
        names = f"  {self.devices[0].name}" + (f" to {self.devices[-1].name}" if self.num_devices > 1 else "")
        what = f"Cluster ({'real' if self.real else 'description'}): {servers}, {memory}"
        return "\n".join([what, names, links, *self._speeds()])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the text at the end of a notebook's cell."""
        printer.text(str(self))

    def _speeds(self) -> list[str]:
        """Returns a line for each kind of devices with its speed; none if all have speed 1 and are of one kind."""
        kinds: dict[tuple[str, float, float], list[int]] = {}
        for index, device in enumerate(self.devices):
            kinds.setdefault((device.kind, device.speed, device.speed_spread), []).append(index)
        if len(kinds) == 1 and {device.speed for device in self.devices} == {1.0}:
            return []
        lines = []
        for (kind, speed, spread), members in kinds.items():
            within = f" (+-{spread:.2g})" if spread else ""
            what = f"{kind}: " if kind else ""
            lines.append(f"  device{'s' * (len(members) > 1)} {ranges(members)}: {what}speed {speed:.3g}{within}")
        return lines


def _is_like(first: Device, second: Device) -> bool:
    sizes = [device.memory_bytes for device in (first, second) if device.memory_bytes is not None]
    same = len(sizes) < 2 or max(sizes) <= min(sizes) * _LIKE_MEMORY
    kinds = {(device.type, device.kind) for device in (first, second)}
    return same and len(kinds) == 1
