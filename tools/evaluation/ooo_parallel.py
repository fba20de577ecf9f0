"""Out-Of-Order BackProp's experiments with data parallelism (EuroSys'22, sections 5.1 and 8.3), simulated.

Figure 4, figure 10 and the discussion of k = 45. A network is cut into chunks, whose gradients are reduced one by one.
Three systems, each with the same chunks and all-reduces:

* **wait-free**: a chunk's gradients are reduced as soon as they are complete, and all before the next step.
* **prioritised** (BytePS): updates may be left to the next step's forward, in the order in which it waits for them.
* **reverse first-k** (OOO-BytePS): the same, and the weight gradients of the first k chunks may be computed last.

and two kinds of step. What our runtime *runs* reduces a chunk either before the step's end or in the next step
(`Plan.carried_updates`). In the problem of the paper's *section 2* a reduction may lie across that border, and BytePS
always takes the most urgent chunk that is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.devices import Link, ReductionLinks
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import ALL_REDUCE, Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.chunks import chunked
from dapple_tf.schedules.out_of_order import best_reverse_first_k
from dapple_tf.simulation.all_reduce import all_reduce_time
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Simulation, run, simulate
from dapple_tf.tools.evaluation.ooo_models import PRIV_A, PRIV_B, PUB_A, Hardware, chain
from dapple_tf.tools.evaluation.ooo_networks import densenet, mobilenet, resnet

Record = Mapping[str, str | float | int | None]

CHUNKS = 32
"""Chunks of a network in figure 10."""
_TIE = 1e-3
"""Relative difference below which steps count as equally long: then the simpler one stands in the table."""
RUNS, SECTION_2 = "runs", "section 2"
"""Kinds of step."""
RING, APART = "one all-reduce", "each GPU's by itself"
"""What goes over a server's network card: a hierarchical all-reduce, or what the published BytePS scripts send."""


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
        self.cluster, self.all_reduce = stand_in(cluster, profile.parameter_bytes / chunks)
        plan = Plan.data_parallel(
            self.cluster.num_devices, samples * self.cluster.num_devices, bucket_bytes=profile.parameter_bytes
        )
        if chunks < len(profile.layers):
            plan = chunked(plan, profile, chunks)
        elif cluster.num_devices > 1:
            names = [layer.name for layer in profile.layers[:-1]]
            plan = dataclasses.replace(plan, cuts=tuple(names), devices=plan.devices * len(profile.layers))
        self.base = plan

    @functools.cached_property
    def compute(self) -> float:
        """Seconds of a step on one device."""
        batch = self.base.global_batch_size // self.cluster.num_devices
        alone = dataclasses.replace(self.cluster, devices=self.cluster.devices[:1])
        return simulate(Plan.data_parallel(1, batch), self.profile, alone).latency

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.base.num_stages

    def step(self, kind: str, k: int = 0, carried: int = 0, *, prioritised: bool = False) -> Simulation | None:
        """Simulates a step; None if it doesn't fit in memory.

        Args:
            kind: of step.
            k: of reverse first-k.
            carried: number of updates left to the next step, where it runs so.
            prioritised: whether the first chunks are reduced first.
        """
        order = "first_layers" if prioritised and carried else "completion"
        own = {"reverse_first_k": k, "carried_updates": carried if kind == RUNS else 0, "reduction_order": order}
        plan = dataclasses.replace(self.base, **own)  # type: ignore[arg-type]
        with contextlib.suppress(PlanError):
            costs = CostModel(plan, self.profile, self.cluster)
            if kind == RUNS:
                step = run(costs)
            else:
                step = run(costs, next_forward=True)
                if prioritised:
                    step = run(costs, reduction_order=priorities(step), next_forward=True)
            return step if step.fits else None
        return None

    def seconds(self, kind: str, k: int = 0, carried: int = 0, *, prioritised: bool = False) -> float:
        """Returns the seconds of `step`; infinite if it doesn't fit."""
        step = self.step(kind, k, carried, prioritised=prioritised)
        return float("inf") if step is None else step.latency

    def wait_free(self, kind: str) -> float:
        """Returns the seconds of a wait-free step in which all is reduced in the order in which it is complete."""
        return self.seconds(kind)

    def prioritised(self, kind: str) -> float:
        """Returns the seconds of a step with prioritised communication, at its best number of carried updates."""
        plain = self.wait_free(kind)
        if plain <= self.compute * (1 + _TIE):
            return plain
        if kind == SECTION_2:
            return min(plain, self.seconds(kind, prioritised=True))
        return min(self._carrying(0).values())

    def reverse_first_k(self, kind: str) -> tuple[float, int]:
        """Returns the seconds of a step with the best k, which may be 0, and this k (section 5.1's search)."""
        seconds: dict[int, float] = {0: self.prioritised(kind)}

        def measured(k: int) -> float:
            if k not in seconds:
                if kind == SECTION_2:
                    seconds[k] = self.seconds(kind, k, prioritised=True)
                else:
                    several = {0, (k + 1) // 2, k}
                    seconds[k] = min(self.seconds(kind, k, carried, prioritised=True) for carried in several)
            return 1 / seconds[k]

        if seconds[0] <= self.compute * (1 + _TIE):
            return seconds[0], 0  # nothing is left to hide
        k = best_reverse_first_k(self.chunks, measured)
        if k and kind == RUNS:
            seconds[k] = min(seconds[k], *self._carrying(k).values())
        return (seconds[k], k) if seconds[k] < seconds[0] * (1 - _TIE) else (seconds[0], 0)

    def _carrying(self, k: int) -> dict[int, float]:
        """Returns number of carried updates -> seconds, of those that a concave search asks for, in either order."""
        seconds: dict[int, float] = {}

        def measured(carried: int) -> float:
            ways = (True, False) if carried else (False,)
            seconds[carried] = min(self.seconds(RUNS, k, carried, prioritised=way) for way in ways)
            return 1 / seconds[carried]

        best_reverse_first_k(self.chunks + 1, measured)
        return seconds


def stand_in(cluster: Cluster, size: float) -> tuple[Cluster, str]:
    """Returns a cluster of two devices whose all-reduces take what those of all of a cluster's devices take.

    Args:
        cluster: the devices.
        size: bytes of a usual all-reduce, for which it is the fastest one; where each GPU's gradients go by themselves
            it is the one inside and between servers.

    Returns:
        The cluster, or the same one if it has one device; and the name of the all-reduce.
    """
    if cluster.num_devices == 1:
        return cluster, ALL_REDUCE[0]
    members = Counter(device.server for device in cluster.devices)
    apart = cluster.reductions.between is not None
    times = {name: all_reduce_time(cluster, members, name) for name in (("hierarchical",) if apart else ALL_REDUCE)}
    name = min(times, key=lambda name: times[name].seconds(size))
    link = Link(1 / times[name].rate, times[name].start / 2)  # a ring of two takes 2 latencies and its bytes once
    two = dataclasses.replace(
        cluster,
        devices=tuple(dataclasses.replace(device, server=0) for device in cluster.devices[:2]),
        reductions=ReductionLinks(inside=link),
    )
    return two, name


def priorities(step: Simulation) -> list[int]:
    """Returns the order of all-reduces if the link always takes the first chunk whose gradients are complete.

    Args:
        step: the same step with another order, which changes no time at which gradients are complete.
    """
    costs = step.costs
    complete: dict[int, float] = {}
    for span in step.spans:
        if span.kind in ("B", "Bw") and span.stage is not None:
            complete[span.stage] = max(complete.get(span.stage, 0.0), span.end)
    waiting = {number: reduction for number, reduction in enumerate(costs.reductions)}
    now, order = 0.0, []
    while waiting:
        ready = [n for n, reduction in waiting.items() if complete[reduction.stages[0]] <= now * (1 + 1e-12)]
        if not ready:
            now = min(complete[reduction.stages[0]] for reduction in waiting.values())
            continue
        first = min(ready, key=lambda n: waiting[n].stages[0])
        now += costs.reduction_seconds(waiting.pop(first))
        order.append(first)
    return order


# ---- figure 10


NETWORKS: Mapping[str, Callable[[Hardware], Profile]] = {
    "ResNet-50": lambda hardware: resnet(50, hardware.device),
    "ResNet-101": lambda hardware: resnet(101, hardware.device),
    "ResNet-152": lambda hardware: resnet(152, hardware.device),
    "DenseNet-121": lambda hardware: densenet(121, hardware.device),
    "DenseNet-169": lambda hardware: densenet(169, hardware.device),
    "MobileNetV3": lambda hardware: mobilenet(hardware.device),
}
CLUSTERS = {hardware.name: hardware for hardware in (PRIV_A, PRIV_B, PUB_A)}
DEVICES = {"Priv-A": (1, 2, 4, 8), "Priv-B": (1, 4, 8, 16, 20), "Pub-A": (1, 2, 4, 8, 16, 32, 48)}
LARGEST = {"Priv-A": (8,), "Priv-B": (20,), "Pub-A": (16, 48)}
"""Devices of the networks that figure 10 doesn't show."""
SHOWN = ("ResNet-50", "ResNet-101")


def samples_of(network: str, cluster: str) -> int:
    """Returns the samples of a device: section 8.3 for what figure 10 shows, else the largest common one, 64."""
    return {("ResNet-50", "Pub-A"): 128, ("ResNet-101", "Pub-A"): 96}.get((network, cluster), 64)


def figure_10_settings() -> list[tuple[str, str, int]]:
    """Returns (network, cluster, devices) of all rows."""
    return [
        (network, cluster, count)
        for cluster in CLUSTERS
        for network in NETWORKS
        for count in (DEVICES if network in SHOWN else LARGEST)[cluster]
    ]


def figure_10(network: str, cluster: str, devices: int) -> list[Record]:
    """Figure 10: a network on a cluster; a record for each kind of step and traffic."""
    hardware = CLUSTERS[cluster]
    profile, samples = NETWORKS[network](hardware), samples_of(network, cluster)
    traffics = (RING, APART) if cluster == "Pub-A" and devices > hardware.per_server else (RING,)
    records: list[Record] = []
    for traffic in traffics:
        systems = Systems(profile, hardware.cluster(devices, apart=traffic == APART), samples)
        for kind in (RUNS, SECTION_2) if devices > 1 else (RUNS,):
            best, k = (systems.compute, 0) if devices == 1 else systems.reverse_first_k(kind)
            records.append(
                {
                    "network": network, "cluster": cluster, "GPUs": devices, "samples": samples, "traffic": traffic,
                    "step": kind, "compute": systems.compute,
                    "wait-free": systems.compute if devices == 1 else systems.wait_free(kind),
                    "prioritised": systems.compute if devices == 1 else systems.prioritised(kind),
                    "reverse first-k": best, "k": k, "chunks": systems.chunks,
                }
            )  # fmt: skip
    return records


# ---- section 8.3: k = 45


def k_45(kind: str, traffic: str) -> Record:
    """The discussion of section 8.3: ResNet-50 on 16 V100s of Pub-A, a chunk for each layer, k = 45."""
    profile = resnet(50, PUB_A.device)
    samples = samples_of("ResNet-50", "Pub-A")
    systems = Systems(profile, PUB_A.cluster(16, apart=traffic == APART), samples, len(profile.layers))
    compute = systems.compute
    hidden = sum(layer.backward_weight.at(samples) for layer in profile.layers[1:45] if layer.backward_weight)
    waiting = systems.prioritised(kind)
    carried = (0, 15, 30, 45) if kind == RUNS else (0,)
    steps = [step for count in carried if (step := systems.step(kind, 45, count, prioritised=True)) is not None]
    step = min(steps, key=lambda step: step.latency)
    plain = systems.step(kind)
    assert plain is not None, "the network fits"
    ways = {"wait-free": plain.latency, "prioritised": waiting, "k = 45": step.latency}
    return {
        "traffic": traffic, "step": kind, "compute": compute, **ways,
        **{f"waiting, {way}": max(0.0, round(seconds - compute, 9)) for way, seconds in ways.items()},
        "Bw of layers 2 to 45": hidden,
        "GB, k = 0": max(plain.peak_bytes.values()) / 1e9, "GB, k = 45": max(step.peak_bytes.values()) / 1e9,
    }  # fmt: skip


# ---- figure 4


FIGURE_4 = ("a: conventional", "b: prioritised", "c: k = 3", "c: k = 4")


def figure_4(forward: float, sync: Sequence[float], loss: float = 0.0) -> Record:
    """Figure 4: five layers on two replicas, from the gradient of the loss to the end of the next step's forwards.

    Args:
        forward: units of each layer's F; its dO and dW take one each.
        sync: units of communication of each layer's gradients.
        loss: units of the gradient of the loss.
    """
    layers = [
        LayerProfile(
            f"{index}", Cost(forward), Cost((2.0 if index else 1.0) + (loss if index == 4 else 0.0)), Cost(1.0),
            parameter_bytes=round(units * 1000),
        )
        for index, units in enumerate(sync)
    ]  # fmt: skip
    profile = chain("figure 4", layers)
    cluster = Cluster(tuple(Device(f"/device:GPU:{i}", 0) for i in range(2)), intra_bandwidth=1000.0, real=False)
    record: dict[str, str | float | int | None] = {
        "F": forward, "communication": " ".join(f"{units:g}" for units in sync), "loss": loss,
    }  # fmt: skip
    orders = (None, [3, 2, 1, 0, 4], None, None)
    for name, k, order in zip(FIGURE_4, (0, 0, 3, 4), orders, strict=True):
        plan = Plan.manual([*"0123"], [[0, 1]] * 5, 1, 2, "gpipe", reverse_first_k=k)
        record[name] = simulate(plan, profile, cluster, next_forward=True, reduction_order=order).latency
    return record


FITTED_4 = (3.0, (2.0, 2.0, 2.0, 2.0, 3.0), 1.0)
"""Times that come to all numbers that the text gives: the picture isn't in it. So the figure is a fit."""
OTHERS_4 = (
    (1.0, (1.0,) * 5, 0.0),
    (1.0, (2.0,) * 5, 0.0),
    (1.0, (3.0,) * 5, 0.0),
    (2.0, (2.0,) * 5, 0.0),
    (3.0, (2.0,) * 5, 1.0),
    (3.0, (3.0,) * 5, 1.0),
)
"""Other times, fitted to nothing."""
