"""Out-Of-Order BackProp's experiments with data parallelism (EuroSys'22, sections 5.1 and 8.3), simulated.

Figure 10 and the discussion of k = 45. A network is cut into chunks, whose gradients are reduced one by one. Three
systems, each with the same chunks and all-reduces:

* **wait-free**: a chunk's gradients are reduced as soon as they are complete, and all before the next step.
* **prioritised** (BytePS): updates may be left to the next step's forward, in the order in which it waits for them.
* **reverse first-k** (OOO-BytePS): the same, and the weight gradients of the first k chunks may be computed last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.devices import Link, ReductionLinks
from dapple_tf.describe.plan import ALL_REDUCE, Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.operators.rooflines import Roofline
from dapple_tf.planning.stage_cuts import chunked
from dapple_tf.schedules.out_of_order import best_reverse_first_k
from dapple_tf.simulation.all_reduce import all_reduce_time
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import run, simulate
from dapple_tf.tools.evaluation.ooo_models import CLUSTERS
from dapple_tf.tools.evaluation.ooo_networks import densenet, mobilenet, resnet
from dapple_tf.tools.evaluation.results import Record

CHUNKS = 32
"""Chunks of a network in figure 10."""
_TIE = 1e-3
"""Relative difference below which steps count as equally long: then the simpler one stands in the table."""


class Systems:
    """The three systems for one network on one cluster.

    All replicas do the same at the same time. So two of them are simulated, on links over which their all-reduces take
    what those of all replicas take.

    Attributes:
        profile: the network.
        cluster: two replicas, or one.
        base: data parallelism in chunks, in which all gradients are reduced before the next step.
    """

    def __init__(self, profile: Profile, cluster: Cluster, samples: int, chunks: int = CHUNKS) -> None:
        """Cuts the network.

        Args:
            profile: the network.
            cluster: the devices.
            samples: of a device.
            chunks: their number; that of all layers, or more, makes a chunk of each.
        """
        self.profile = profile
        self.cluster = stand_in(cluster, profile.parameter_bytes / chunks)
        plan = Plan.data_parallel(
            self.cluster.num_devices, samples * self.cluster.num_devices, bucket_bytes=profile.parameter_bytes
        )
        if chunks < len(profile.layers):
            plan = chunked(plan, profile, chunks)
        elif cluster.num_devices > 1:
            names = [layer.name for layer in profile.layers[:-1]]
            plan = plan.with_options(cuts=tuple(names), devices=plan.devices * len(profile.layers))
        self.base = plan

    @functools.cached_property
    def compute(self) -> float:
        """Seconds of a step on one device."""
        batch = self.base.global_batch_size // self.cluster.num_devices
        alone = dataclasses.replace(self.cluster, devices=self.cluster.devices[:1])
        return simulate(Plan.data_parallel(1, batch), self.profile, alone).latency

    def seconds(self, k: int = 0, carried: int = 0, *, prioritised: bool = False) -> float:
        """Returns the seconds of a step; infinite if it doesn't fit in memory.

        Args:
            k: of reverse first-k.
            carried: number of updates left to the next step.
            prioritised: whether the first chunks are reduced first.
        """
        order = "first_layers" if prioritised and carried else "completion"
        plan = dataclasses.replace(self.base, reverse_first_k=k, carried_updates=carried, reduction_order=order)
        with contextlib.suppress(PlanError):
            step = run(CostModel(plan, self.profile, self.cluster))
            return step.latency if step.fits else float("inf")
        return float("inf")

    def prioritised(self) -> float:
        """Returns the seconds of a step with prioritised communication, at its best number of carried updates."""
        plain = self.seconds()
        return plain if plain <= self.compute * (1 + _TIE) else min(self._carrying(0).values())

    def reverse_first_k(self) -> tuple[float, int]:
        """Returns the seconds of a step with the best k, which may be 0, and this k (section 5.1's search)."""
        seconds: dict[int, float] = {0: self.prioritised()}

        def measured(k: int) -> float:
            if k not in seconds:
                seconds[k] = min(self.seconds(k, carried, prioritised=True) for carried in {0, (k + 1) // 2, k})
            return 1 / seconds[k]

        if seconds[0] <= self.compute * (1 + _TIE):
            return seconds[0], 0  # nothing is left to hide
        k = best_reverse_first_k(self.base.num_stages, measured)
        if k:
            seconds[k] = min(seconds[k], *self._carrying(k).values())
        return (seconds[k], k) if seconds[k] < seconds[0] * (1 - _TIE) else (seconds[0], 0)

    def _carrying(self, k: int) -> dict[int, float]:
        """Returns number of carried updates -> seconds, as a concave search tries them, in either order."""
        seconds: dict[int, float] = {}

        def measured(carried: int) -> float:
            ways = (True, False) if carried else (False,)
            seconds[carried] = min(self.seconds(k, carried, prioritised=way) for way in ways)
            return 1 / seconds[carried]

        best_reverse_first_k(self.base.num_stages + 1, measured)
        return seconds


def stand_in(cluster: Cluster, size: float) -> Cluster:
    """Returns a cluster of two devices with the all-reduce times of a whole cluster.

    Args:
        cluster: the devices.
        size: bytes of a usual all-reduce, for which it is the fastest one; where each GPU's gradients go by themselves
            it is the one inside and between servers.
    """
    if cluster.num_devices == 1:
        return cluster
    members = Counter(device.server for device in cluster.devices)
    apart = cluster.reductions.between is not None
    times = [all_reduce_time(cluster, members, name) for name in (("hierarchical",) if apart else ALL_REDUCE)]
    fastest = min(times, key=lambda time: time.seconds(size))
    link = Link(1 / fastest.rate, fastest.start / 2)  # a ring of two takes 2 latencies and its bytes once
    devices = tuple(dataclasses.replace(device, server=0) for device in cluster.devices[:2])
    return dataclasses.replace(cluster, devices=devices, reductions=ReductionLinks(inside=link))


# ---- figure 10


NETWORKS: Mapping[str, Callable[[Roofline], Profile]] = {
    "ResNet-50": functools.partial(resnet, 50),
    "ResNet-101": functools.partial(resnet, 101),
    "DenseNet-121": functools.partial(densenet, 121),
    "DenseNet-169": functools.partial(densenet, 169),
    "MobileNetV3": mobilenet,
}
SHOWN = ("ResNet-50", "ResNet-101")
SLOWER = 0.8
"""The text's "10Gb Ethernet (1GB)" of a line rate of 1.25 GB/s."""


def samples_of(network: str, cluster: str) -> int:
    """Returns the samples of a device: section 8.3 for what figure 10 shows, else the largest common one, 64."""
    return {("ResNet-50", "Pub-A"): 128, ("ResNet-101", "Pub-A"): 96}.get((network, cluster), 64)


Row = tuple[str, str, int]
"""Network, cluster and devices."""


def figure_10_rows() -> list[Row]:
    """Returns the rows that section 8.3 has numbers of."""
    rows = [("ResNet-101", "Priv-A", 8), ("ResNet-101", "Pub-A", 8)]
    rows += [(network, "Priv-B", count) for network in SHOWN for count in (16, 20)]
    rows += [(network, "Pub-A", count) for network in SHOWN for count in (2, 4, 16, 32, 48)]
    largest = {"Priv-A": (8,), "Priv-B": (20,), "Pub-A": (16, 48)}
    others = [network for network in NETWORKS if not network.startswith("ResNet")]
    return rows + [
        (network, cluster, count) for cluster, counts in largest.items() for network in others for count in counts
    ]


def figure_10(network: str, cluster: str, devices: int) -> Record:
    """Figure 10: a network on a cluster, with the scripts' traffic at line rate and slower, and one all-reduce."""
    profile = NETWORKS[network](CLUSTERS[cluster].device)
    records: Record = {}
    for setting in ("scripts", "slower", "one all-reduce"):
        systems = Systems(profile, _cluster(cluster, devices, setting), samples_of(network, cluster))
        seconds, k = systems.reverse_first_k()
        records[setting] = {
            "compute": systems.compute, "wait-free": systems.seconds(), "prioritised": systems.prioritised(),
            "reverse first-k": seconds, "k": k,
        }  # fmt: skip
    return records


def _cluster(cluster: str, devices: int, setting: str) -> Cluster:
    """Returns a cluster; in the scripts' traffic each GPU's gradients go by themselves."""
    hardware = CLUSTERS[cluster]
    if setting == "slower":
        hardware = hardware._replace(outside=SLOWER * hardware.outside)
    return hardware.cluster(devices, apart=setting != "one all-reduce")


def k_45() -> Record:
    """The discussion of section 8.3: ResNet-50 on 16 V100s of Pub-A, a chunk for each layer, k = 45."""
    profile = resnet(50, CLUSTERS["Pub-A"].device)
    samples = samples_of("ResNet-50", "Pub-A")
    hidden = sum(layer.backward_weight.at(samples) for layer in profile.layers[1:45] if layer.backward_weight)
    records: Record = {}
    for setting in ("scripts", "slower", "one all-reduce"):
        systems = Systems(profile, _cluster("Pub-A", 16, setting), samples, len(profile.layers))
        step = min(systems.seconds(45, carried, prioritised=True) for carried in (0, 15, 30, 45))
        ways = {"wait-free": systems.seconds(), "prioritised": systems.prioritised(), "k = 45": step}
        records[setting] = {way: max(0.0, seconds / systems.compute - 1) for way, seconds in ways.items()}
        records[setting]["Bw of layers 2 to 45"] = hidden / systems.compute
    return records
