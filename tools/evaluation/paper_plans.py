"""Plans and how fast they are at their best, in one simulation: what every experiment of DAPPLE's evaluation asks.

Two freedoms, the same for every plan of a table:

* `SAME`: what DAPPLE's runtime has: its schedules (GPipe's, P_A and P_B), recomputation, all-reduces during the last
  backward, tensors that several stages read sent once.
* everything: all policies and features of ours that train the same steps (`strongest` for others' plans).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_report import recompute_text
from dapple_tf.describe.profile import Profile
from dapple_tf.planning import planner
from dapple_tf.planning.plan_request import NAMES
from dapple_tf.planning.reductions import fastest_reductions, reduced_early
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Simulation, simulate
from dapple_tf.tools.evaluation.paper_models import Partition
from dapple_tf.tools.evaluation.results import Record

SAME = ("gpipe", "dapple_a", "dapple_b")
"""Schedules that DAPPLE's runtime has."""
_FEATURES = ("recompute", "pieces", "relays")
"""Features of plans (`dapple_tf.planning.plan_request`) that DAPPLE's runtime has or leaves open."""
_EVERYTHING = tuple(name for name in NAMES if name != "carried_updates")
"""All features but the one that moves updates into the next step, which no other column has."""
_MOST_MICRO_BATCHES = 256
"""The largest batch of the tables whose profile is of one sample; only times in proportion would allow more."""


@dataclass(frozen=True)
class Outcome:
    """A plan and the time of its step.

    Attributes:
        simulation: simulation of one step.
        fits: whether the devices have the memory; if not, the simulation ignores the limit.
    """

    simulation: Simulation
    fits: bool = True

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.simulation.costs.plan

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.simulation.latency


# ---- texts


def shape(plan: Plan) -> str:
    """Returns a plan in the paper's notation, equal stages joined: ``8:8``, ``1x9:2x2``, ``straight (16)``, ``DP``."""
    if plan.num_stages == 1:
        return "DP"
    if set(plan.replicas) == {1} and plan.num_stages > 2:
        return f"straight ({plan.num_stages})"
    if plan.num_stages <= 4:
        return ":".join(map(str, plan.replicas))
    runs = [(count, len(list(group))) for count, group in itertools.groupby(plan.replicas)]
    return ":".join(f"{count}x{length}" if length > 1 else f"{count}" for count, length in runs)


def record(outcome: Outcome | None) -> Record | None:
    """Returns the record of a plan and its step."""
    if outcome is None:
        return None
    plan, profile = outcome.plan, outcome.simulation.costs.profile
    return {
        "plan": shape(plan),
        "cuts": ",".join(str(profile.index[cut]) for cut in plan.cuts),
        "replicas": ":".join(map(str, plan.replicas)),
        "M": plan.micro_batches,
        "schedule": str(plan.schedule) if plan.num_stages > 1 else "-",
        "recompute": recompute_text(plan),
        "ms": 1e3 * outcome.seconds,
        "fits": outcome.fits,
    }


# ---- plans at their best


def micro_batch_counts(profile: Profile, batch: int, partitions: Iterable[Partition] = ()) -> tuple[int, ...]:
    """Returns powers of two whose slices have at least the profiled size, and the maximum of each partition."""
    most = max(1, min(batch // profile.least_samples, _MOST_MICRO_BATCHES))
    counts = {2**power for power in range(most.bit_length())}
    for partition in partitions:
        fitting = batch // (max(partition.replicas) * profile.least_samples)
        if fitting >= 1:
            counts.add(min(fitting, most))
    return tuple(sorted(count for count in counts if count <= most))


def _smallest_slices(partition: Partition, profile: Profile, batch: int) -> Iterator[tuple[int, int]]:
    """Yields number and samples of the smallest micro-batches, if the last one is smaller still.

    One profiled slice for each replica of the largest stage. Plans have equal micro-batches: the last one counts as
    long as the others, as which it takes if some replica has a whole slice in it.
    """
    samples = max(partition.replicas) * profile.least_samples
    count = -(-batch // samples)
    if batch % samples and count <= _MOST_MICRO_BATCHES:
        yield count, count * samples


def best(
    partitions: Iterable[Partition],
    profile: Profile,
    cluster: Cluster,
    batch: int,
    counts: Sequence[int],
    *,
    schedules: Sequence[str] = SAME,
    recompute: Sequence[str] = ("none", "boundary"),
    short_last: bool = True,
) -> Outcome | None:
    """Returns the fastest way to run any of these partitions; None if none is legal.

    If none fits the devices, the one with the least missing memory, simulated without the limit.

    Args:
        partitions: cuts and replicas.
        profile: costs of the layers.
        cluster: the devices.
        batch: samples in a step.
        counts: numbers of micro-batches.
        schedules: names of schedules.
        recompute: ways to recompute.
        short_last: whether a batch may also be divided as `_smallest_slices` divides it.
    """
    fastest: Outcome | None = None
    unfit: list[tuple[float, Plan]] = []
    divisions = [
        (partition, count, samples)
        for partition in partitions
        for count, samples in (
            *((count, batch) for count in counts),
            *(_smallest_slices(partition, profile, batch) if short_last else ()),
        )
    ]
    for partition, count, samples in divisions:
        for schedule in schedules if partition.cuts else schedules[:1]:
            for mode in recompute:
                plan = partition.plan(profile, count, samples, schedule, mode)
                if plan is None:
                    break
                try:
                    run = _run(plan, profile, cluster)
                except PlanError:
                    unfit.append((_shortage(plan, profile, cluster), plan))
                    continue
                if run.fits and (fastest is None or run.latency < fastest.seconds * (1 - 1e-9)):
                    fastest = Outcome(run)
                if min(run.costs.holds or (count,)) >= count:
                    break  # memory limits nothing, and recomputation only takes longer
    if fastest is not None or not unfit:
        return fastest
    devices = tuple(dataclasses.replace(device, memory_bytes=None) for device in cluster.devices)
    unlimited = dataclasses.replace(cluster, devices=devices)
    least = min(unfit, key=lambda entry: entry[0])[0]
    runs = [_run(plan, profile, unlimited) for over, plan in unfit if over <= least + 1]
    return Outcome(min(runs, key=lambda run: run.latency), False)


def _run(plan: Plan, profile: Profile, cluster: Cluster) -> Simulation:
    """Simulates a plan with the fastest all-reduce of each stage, and with all relays where they make it faster."""
    if any(len(tensor.consumers) > 1 for tensor in profile.tensors) and plan.num_stages > 2 and not plan.relays:
        ways = (plan, plan.with_options(relays=tuple(range(plan.num_stages))))
        runs = []
        for way in ways:
            with contextlib.suppress(PlanError):  # what waits at relays may not fit
                runs.append(_simulated(way, profile, cluster))
        if runs:
            return min(runs, key=lambda run: run.latency)
    return _simulated(plan, profile, cluster)


def _simulated(plan: Plan, profile: Profile, cluster: Cluster) -> Simulation:
    if plan.policy.planning.by_seconds:
        plan = plan.with_options(task_seconds=CostModel(plan, profile, cluster).task_seconds)
    plan = reduced_early(fastest_reductions(plan, profile, cluster), profile, cluster)
    return simulate(plan, profile, cluster)


def _shortage(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Returns how many bytes a plan lacks at its worst stage."""
    costs = CostModel(plan, profile, cluster)
    flight = [count if plan.policy.needs_all else 1 for count in plan.warm_up_counts()]
    return max(
        costs.needed_bytes(stage, count) - (costs.memory_limit(stage) or 0) for stage, count in enumerate(flight)
    )


def data_parallel(
    profile: Profile, cluster: Cluster, batch: int, counts: Sequence[int], *, idle: bool = False
) -> Outcome | None:
    """Returns data parallelism; None if it doesn't fit.

    Args:
        profile: costs of the layers.
        cluster: the devices.
        batch: samples in a step.
        counts: numbers of micro-batches.
        idle: whether it may leave devices idle, as pipelines may, and has the fastest number of the first devices; of
            two that are as fast the larger one. Otherwise it has all.
    """
    least = 1 if idle else cluster.num_devices
    partitions = [Partition((), (used,)) for used in range(cluster.num_devices, least - 1, -1)]
    outcome = best(partitions, profile, cluster, batch, counts, recompute=("none",))
    return outcome if outcome is not None and outcome.fits else None


def make_plan(
    profile: Profile, cluster: Cluster, batch: int, counts: Sequence[int], *, everything: bool = False
) -> Outcome:
    """Returns our planner's plan, with `SAME` freedom or with everything."""
    plan = planner.plan(
        profile,
        cluster,
        batch,
        micro_batches=counts,
        schedule="auto" if everything else SAME,
        only=_EVERYTHING if everything else _FEATURES,
        least_gain=0.0,
    )
    outcome = Outcome(simulate(plan, profile, cluster))
    if everything:
        return outcome
    # It was chosen among equal micro-batches; now it, and data parallelism, may divide the batch as others' plans may.
    own = Partition(tuple(profile.index[cut] for cut in plan.cuts), plan.replicas, plan.devices)
    partitions = (own, Partition((), (cluster.num_devices,)))
    schedules = (str(plan.schedule),)
    again = best(partitions, profile, cluster, batch, counts, schedules=schedules)
    return again if again is not None and again.fits and again.seconds < outcome.seconds * (1 - 1e-9) else outcome


def times_of(record: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Returns how many times as long the ``other`` step takes."""
    return float(other["ms"] / record["ms"])
