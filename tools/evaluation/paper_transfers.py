"""What transfers cost: Table 4's ACR, what P_B gains over P_A as it grows, and figure 8's two ways to replicate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tools.evaluation.paper_models import CONFIGS, MODELS, TABLE_4, Partition, hardware, paper_partitions
from dapple_tf.tools.evaluation.paper_outcomes import Record

RATIOS = (0.03, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""ACRs at which P_B is compared with P_A."""
_MICRO_BATCHES = 16
FIGURE_8_COUNTS = (1, 2, 3, 4, 6, 8, 16)
"""Numbers of micro-batches for figure 8, which draws a few."""


def communication_ratio(partition: Partition, profile: Profile, cluster: Cluster) -> float:
    """Returns the ACR of section 6.2: seconds of a micro-batch's transfers over a cut, both ways, to those of a stage.

    Both are averages, over cuts and over stages. A replica has at least the profile's batch. Between replicas each
    network card carries its own slices only, also in config A, as the paper's equal ratios for A and B say.

    Args:
        partition: the paper's plan.
        profile: the layers.
        cluster: devices and links.
    """
    each = profile.batch_sizes[-1]
    samples = each * max(partition.replicas)
    bounds = [0, *(cut + 1 for cut in partition.cuts), len(profile.layers)]
    stages = [
        sum(
            layer.forward.at(samples / count) + layer.backward.at(samples / count)
            for layer in profile.layers[start:stop]
        )
        for (start, stop), count in zip(itertools.pairwise(bounds), partition.replicas, strict=True)
    ]
    transfers = [
        sum(cost.at(samples / min(pair)) for cost in profile.crossing[cut]) / (cluster.inter_bandwidth or float("inf"))
        for cut, pair in zip(partition.cuts, itertools.pairwise(partition.replicas), strict=True)
    ]
    return (sum(transfers) / len(transfers)) / (sum(stages) / len(stages))


def run_ratios(model: str) -> Record:
    """Returns what P_B gains over P_A on the paper's two stages of eight devices, over ACR.

    All devices have a network card of their own, whose bandwidth gives the ACR; 16 micro-batches of the profile's batch
    for each replica. All-reduces aren't counted.
    """
    row = next(row for row in TABLE_4 if (row.model, row.config) == (model, "A"))
    profile = MODELS[model].profile()
    partition = paper_partitions(row, profile)[0]
    replicas = max(partition.replicas)
    usual = communication_ratio(partition, profile, CONFIGS["B"])
    cuts = [profile.layers[cut].name for cut in partition.cuts]
    free = [dataclasses.replace(layer, parameter_bytes=0, apply_seconds=0.0) for layer in profile.layers]
    bare = dataclasses.replace(profile, layers=tuple(free))
    steps = {}
    for ratio in RATIOS:
        cluster = hardware(16, 1, 25 * usual / ratio)
        batch = _MICRO_BATCHES * replicas * profile.batch_sizes[-1]
        times = []
        for policy in ("dapple_a", "dapple_b"):
            plan = Plan.manual(cuts, partition.devices, _MICRO_BATCHES, batch, policy)
            roomy = tuple(dataclasses.replace(device, memory_bytes=None) for device in cluster.devices)
            times.append(1e3 * simulate(plan, bare, dataclasses.replace(cluster, devices=roomy)).latency)
        steps[f"{ratio:g}"] = {"P_A ms": times[0], "P_B ms": times[1]}
    return {"plan": row.plan, "steps": steps}


# ---- figure 8


def _two_stages() -> Profile:
    """Returns two layers: two samples take two units of F on the first, one on the second, and B twice as long."""

    def layer(name: str, units: float) -> LayerProfile:
        return LayerProfile(name, Cost(0.0, units), Cost(0.0, 2 * units), Cost())

    return Profile("figure 8", "unit", (1, 2), (layer("first", 1.0), layer("second", 0.5)), (Tensor(0, (1,), Cost()),))


def run_figure_8() -> Record:
    """Returns the units of a step on three devices, stage 0 on two of them, when micro-batches are split or take turns.

    A micro-batch of two samples is split between the devices of stage 0, or goes to one of them whole, by turns. Each
    device runs 1F1B, as P_A does. Transfers take no time.
    """
    cluster = dataclasses.replace(hardware(3, 1, 25), inter_bandwidth=None, inter_latency=0.0)
    lines = {}
    for count in FIGURE_8_COUNTS:
        plan = Plan.manual(["first"], [[0, 1], [2]], count, 2 * count, "dapple_a")
        split = simulate(plan, _two_stages(), cluster).latency
        lines[str(count)] = {"split": split, "round-robin": round_robin(count)}
    return lines


def round_robin(count: int, first: float = 2.0, second: float = 1.0) -> float:
    """Returns the units of a step whose micro-batches take turns on two devices of stage 0.

    Args:
        count: M.
        first: units of F on stage 0; B takes twice as many.
        second: units of F on stage 1.
    """
    free = [0.0, 0.0]
    ready: dict[int, float] = {}  # forwards of stage 0 that have ended
    done: dict[int, float] = {}  # backwards of stage 1
    # Two devices share stage 0's micro-batches; each has at most two in flight, as P_A allows two on a stage of two.
    orders = [_orders(list(range(device, count, 2))) for device in (0, 1)]
    places = [0, 0]
    last, at = 0, 0.0
    while any(place < len(order) for place, order in zip(places, orders, strict=True)) or last < count:
        moved = False
        for device in (0, 1):
            while places[device] < len(orders[device]):
                phase, micro_batch = orders[device][places[device]]
                if phase == "B" and micro_batch not in done:
                    break
                start = max(free[device], done.get(micro_batch, 0.0) if phase == "B" else 0.0)
                free[device] = start + (2 * first if phase == "B" else first)
                if phase == "F":
                    ready[micro_batch] = free[device]
                places[device] += 1
                moved = True
        while last < count and last in ready:
            at = max(at, ready[last]) + 3 * second
            done[last] = at
            last += 1
            moved = True
        assert moved, "the order deadlocks"
    return max(*free, at)


def _orders(micro_batches: Sequence[int]) -> list[tuple[str, int]]:
    """Returns 1F1B with two in flight."""
    warm = min(2, len(micro_batches))
    order = [("F", micro_batch) for micro_batch in micro_batches[:warm]]
    for index, micro_batch in enumerate(micro_batches):
        order.append(("B", micro_batch))
        if index + warm < len(micro_batches):
            order.append(("F", micro_batches[index + warm]))
    return order
