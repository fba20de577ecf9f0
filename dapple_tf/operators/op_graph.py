"""The operators of a training step with their costs, and the devices: the input of a search for placements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dapple_tf.describe.cluster import Cluster
from graph_passes.analysis.split_rules import Split, SplitRule


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """The devices and the links between them: D(V, E) of FD-DPS, definition 2.

    Attributes:
        names: of the devices, V in number.
        bandwidth: bytes/s from a device to another, float64 [V, V]; inf where it is unknown, and on the diagonal.
        latency: seconds until a transfer's first byte arrives, float64 [V, V]; 0 on the diagonal.
        memory_bytes: each device's limit, float64 [V]; inf for no limit.
    """

    names: tuple[str, ...]
    bandwidth: np.ndarray
    latency: np.ndarray
    memory_bytes: np.ndarray

    @classmethod
    def of(cls, cluster: Cluster, devices: Sequence[int] | None = None) -> Topology:
        """Returns the topology of some devices of a cluster, in this order; all of them for None."""
        chosen = range(cluster.num_devices) if devices is None else devices
        links = [[cluster.link(one, other) for other in chosen] for one in chosen]
        bandwidth = np.array([[link.bandwidth for link in row] for row in links], float)
        latency = np.array([[link.latency for link in row] for row in links], float)
        np.fill_diagonal(bandwidth, np.inf)
        np.fill_diagonal(latency, 0.0)
        limits = [cluster.devices[device].memory_bytes for device in chosen]
        memory = np.array([np.inf if limit is None else limit for limit in limits], float)
        return cls(tuple(cluster.device_names[device] for device in chosen), bandwidth, latency, memory)

    @classmethod
    def of_groups(cls, cluster: Cluster, groups: Sequence[Sequence[int]]) -> Topology:
        """Returns the topology of equally large groups of devices that run the same operators, device i of each alike.

        It has the first group's names, and of each device and link the slowest and smallest of its likes.
        """
        alike = [cls.of(cluster, group) for group in groups]
        return cls(
            alike[0].names,
            np.min([own.bandwidth for own in alike], axis=0),
            np.max([own.latency for own in alike], axis=0),
            np.min([own.memory_bytes for own in alike], axis=0),
        )

    @property
    def count(self) -> int:
        """V, the number of devices."""
        return len(self.names)

    def seconds(self, size: float, source: int, target: int) -> float:
        """Returns the seconds of a transfer of ``size`` bytes: formula 2; 0 on the same device."""
        return float(self.latency[source, target] + size / self.bandwidth[source, target])


@dataclasses.dataclass(frozen=True, eq=False)
class OpGraph:
    """The operators of a step, and their costs: T(O', E', V', W) of FD-DPS, definition 7.

    Operators are numbered in a topological order. Constants and fed placeholders aren't operators: every device has its
    own copy of a constant, and batches come from the host.

    Attributes:
        names: of the operators' nodes, n in number.
        ops: their TensorFlow op types.
        seconds: of each operator on each device, E of formula 1; float64 [n, V].
        edges: see `Edge`; int64 [edges, 4]. Several edges may read one tensor; on one device they share one transfer.
        tensor_bytes: float64 [tensors].
        groups: operators with the same number are on one device (a variable and all that touch it); int64 [n].
        pinned: device on which a group has to be, -1 for any; int64 [groups].
        stored_bytes: of each group's variables, held all the time; float64 [groups].
        splits: operator -> the dimensions along which it can be split; empty for most.
        launch_seconds: seconds of starting an operator on each device, float64 [V]. A part with a share s of an
            operator takes launch + s (seconds - launch).
        copy_seconds: for each byte that a split, a concatenation or a sum writes, float64 [V].
        tensor_outputs: which output of its producer each tensor is; int64 [tensors]; None where all are the first.
    """

    names: tuple[str, ...]
    ops: tuple[str, ...]
    seconds: np.ndarray
    edges: np.ndarray
    tensor_bytes: np.ndarray
    groups: np.ndarray
    pinned: np.ndarray
    stored_bytes: np.ndarray
    splits: Mapping[int, tuple[SplitRule, ...]]
    launch_seconds: np.ndarray
    copy_seconds: np.ndarray
    tensor_outputs: np.ndarray | None = None

    @property
    def count(self) -> int:
        """n, the number of operators."""
        return len(self.names)


@dataclasses.dataclass(frozen=True)
class OpPlacement:
    """Where each operator runs, and when: the strategy S and the queue Q of FD-DPS, algorithm 3.

    Attributes:
        devices: S: name of an operator -> index of its device. Split operators are listed by their parts.
        order: Q: the operators' names in the order in which they were scheduled, a topological order. Each device runs
            its operators in this order.
        splits: name of an operator of the unsplit graph -> how it was split.
        seconds: the simulated makespan.
        peak_bytes: the simulated peak of each device.
        device_names: of the devices, for reports; empty where they don't matter.
        ops: op types of the operators that were split, for reports.
    """

    devices: Mapping[str, int]
    order: tuple[str, ...]
    splits: Mapping[str, Split]
    seconds: float
    peak_bytes: tuple[float, ...]
    device_names: tuple[str, ...] = ()
    ops: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        from dapple_tf.operators.placement_report import placement_report  # which knows more than this module

        return placement_report(self)
