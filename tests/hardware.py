"""Profiles, clusters and plans that only describe, for the tests of what plans, simulates and draws."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor

NAMES = [f"layer{index}" for index in range(32)]


def linked(layers: Sequence[LayerProfile], sizes: float | Sequence[float | Tensor] = 1.0, **fields: Any) -> Profile:
    """Layers one after another, each of which sends so many bytes per sample to the next; or with other tensors."""
    given = [sizes] * (len(layers) - 1) if isinstance(sizes, float | int) else sizes
    tensors = [
        size if isinstance(size, Tensor) else Tensor(i, (i + 1,), Cost(0.0, size)) for i, size in enumerate(given)
    ]
    known = {"model": "model", "device": "none", "batch_sizes": (1, 2), **fields}
    return Profile(layers=tuple(layers), tensors=tuple(tensors), **known)


def chain(
    times: Sequence[tuple[float, float]], sizes: float | Sequence[Tensor] = 1.0, *, shared: Any = (), **layer: Any
) -> Profile:
    """Layers that take (forward, backward) seconds for whatever slice, and send so many bytes per sample."""
    layers = [LayerProfile(NAMES[i], Cost(f), Cost(b), **layer) for i, (f, b) in enumerate(times)]
    return linked(layers, sizes, shared=tuple(shared))


def profile_of(
    layers: int = 8, *, parameters: int = 1_000_000, size: float = 1e5, residual: float = 1e5, milliseconds: float = 1.0
) -> Profile:
    """Equal layers: F of 1 ms and B of 2 ms per sample."""
    costs = [
        LayerProfile(
            f"layer_{index}",
            Cost(0.0, milliseconds * 1e-3),
            Cost(0.0, 2e-3 * milliseconds),
            residual_bytes=Cost(0.0, residual),
            parameter_bytes=parameters,
        )
        for index in range(layers)
    ]
    return linked(costs, size, model="equal")


def cluster_of(*servers: int, memory: int | None = None, speeds: Sequence[float] = (), **links: Any) -> Cluster:
    """Servers of so many devices, whose speeds are 1 where ``speeds`` ends."""
    numbers = [server for server, count in enumerate(servers) for _ in range(count)]
    given = itertools.chain(speeds, itertools.repeat(1.0))
    devices = [Device(f"d{i}", server, memory, next(given)) for i, server in enumerate(numbers)]
    return Cluster(tuple(devices), real=False, **links)


def show_gpus(monkeypatch: pytest.MonkeyPatch, count: int, memory: int = 2**34, name: str = "NVIDIA H200") -> None:
    """TensorFlow has GPUs that aren't there: what it lists, describes and makes, as recorded, before any is made."""
    from tensorflow.core.framework.device_attributes_pb2 import DeviceAttributes
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import context

    from graph_passes.ir import tensorflow_private

    def local_devices(config: Any) -> list[DeviceAttributes]:
        options = config.gpu_options
        assert options.allow_growth
        cards = [int(card) for card in options.visible_device_list.split(",") if card] or range(count)
        logical = [list(own.memory_limit_mb) for own in options.experimental.virtual_devices]
        devices = [DeviceAttributes(name="/device:CPU:0", device_type="CPU")]
        for card, sizes in zip(cards, logical or [[]] * len(cards), strict=True):
            text = f"device: {card}, name: {name}, pci bus id: 0000:{card:02x}:00.0, compute capability: 9.0"
            limits = [int(size) * 2**20 for size in sizes] or [memory + card]
            devices += [
                DeviceAttributes(device_type="GPU", memory_limit=limit, physical_device_desc=text) for limit in limits
            ]
        return devices

    names = [b"/physical_device:CPU:0", *(f"/physical_device:GPU:{number}".encode() for number in range(count))]
    details = {"device_name": name, "compute_capability": "9.0"}
    monkeypatch.setattr(pywrap_tfe, "TF_ListPhysicalDevices", lambda: names)
    monkeypatch.setattr(pywrap_tfe, "TF_GetDeviceDetails", lambda index: dict(details))
    monkeypatch.setattr(tensorflow_private, "local_devices", local_devices)
    monkeypatch.setattr(context, "_context", context.Context())


def two_on_each_machine(workers: int) -> Cluster:
    """Returns the cluster of workers, each two of one machine, as they are before `Cluster.with_workers_per_server`."""
    addresses = [f"10.0.0.{worker // 2 + 1}:{2222 + worker % 2}" for worker in range(workers)]
    return Cluster.of_servers(addresses, devices_per_server=1)


def slow_network(
    devices: Sequence[Sequence[int]] = ((0, 1, 2), (3,)), schedule: str = "dapple_a", memory: int = 2**28, **links: Any
) -> tuple[Plan, Profile, Cluster]:
    """A plan on servers of two devices with slow links between them, where no time is a multiple of another."""
    count = len(devices)
    layers = [
        LayerProfile(f"layer{i}", Cost(0.01, 0.007), Cost(0.02, 0.013), None, Cost(0, 2**24), parameter_bytes=2**22)
        for i in range(count)
    ]
    model = linked(layers, 2**20)
    last = max(device for stage in devices for device in stage)
    cluster = cluster_of(*[2] * (last // 2), 1 + last % 2, memory=memory, inter_bandwidth=2e8, **links)
    return plan_of(devices, 4, schedule, samples=6), model, cluster


def plan_of(
    devices: Sequence[Sequence[int]],
    micro_batches: int,
    schedule: str = "dapple_a",
    *,
    samples: int | None = None,
    **options: Any,
) -> Plan:
    """A stage for each layer, by default with a sample for each replica of the largest."""
    batch = micro_batches * (samples or max(map(len, devices)))
    cuts = [f"layer{index}" for index in range(len(devices) - 1)]
    return Plan.manual(cuts, devices, micro_batches, batch, schedule, **options)
