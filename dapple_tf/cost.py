"""What the tasks, transfers and reductions of a plan cost on a cluster, by a profile; and the memory that it needs.

The planner, the simulator and the emulator ask this one model, so that they can't disagree.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dapple_tf.cluster import Cluster, Link
from dapple_tf.plan import Plan, PlanError
from dapple_tf.profile import ZERO, Cost, Profile
from dapple_tf.schedules import ScheduleError, make_schedule, resolve_warm_up
from graph_passes.batching import Interval, intervals, slice_intervals, split_evenly
from graph_passes.tasks import Phase, Schedule, Task

ALL_REDUCE = ("hierarchical", "flat")
"""How gradients are reduced over several servers: inside each first, or along one ring through all devices."""

MIN_CUT_SHARE = 0.1
"""Part of F's time that B takes longer with ``recompute="min_cut"``: elementwise work, by memory bandwidth."""


class Piece(NamedTuple):
    """What one replica sends to one replica of another stage for one micro-batch."""

    sender: int
    receiver: int
    bytes: float


@dataclass(frozen=True)
class StageCost:
    """The layers of one stage, added up.

    Attributes:
        layers: indices of the first layer and of the one after the last.
        forward: seconds of F.
        backward: seconds of B, with what it recomputes.
        backward_weight: the part of B for weight gradients; None where it isn't known.
        residual_bytes: kept from F to B.
        recomputed_bytes: residuals that B computes again, alive while it runs.
        temporary_bytes: peak use of a running task beyond that.
        parameter_bytes: trainable variables, shared ones included.
        slot_bytes: the optimizer's variables.
        state_bytes: other variables.
        apply_seconds: the optimizer's update.
    """

    layers: tuple[int, int]
    forward: Cost
    backward: Cost
    backward_weight: Cost | None
    residual_bytes: Cost
    recomputed_bytes: Cost
    temporary_bytes: Cost
    parameter_bytes: int
    slot_bytes: int
    state_bytes: int
    apply_seconds: float

    @property
    def stored_bytes(self) -> int:
        """Bytes on each of the stage's devices throughout: variables, slots and gradient accumulators."""
        return 2 * self.parameter_bytes + self.slot_bytes + self.state_bytes


@dataclass(frozen=True)
class Reduction:
    """Gradients that are all-reduced together.

    Attributes:
        stages: the stages that hold the parameters.
        devices: the devices of all their replicas.
        bytes: size of the gradients.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    bytes: float


def all_reduce_seconds(cluster: Cluster, devices: Sequence[int], size: float, algorithm: str = "hierarchical") -> float:
    """Time to all-reduce ``size`` bytes over ``devices``; see :func:`all_reduce_line`."""
    if size <= 0:
        return 0.0
    start, rate = all_reduce_line(cluster, Counter(cluster.devices[device].server for device in devices), algorithm)
    return start + rate * size


def all_reduce_line(cluster: Cluster, members: Mapping[int, int], algorithm: str) -> tuple[float, float]:
    """Seconds of an all-reduce: (those of nothing, those per byte).

    A ring of n members moves 2 (n - 1) / n of the bytes over each of its links, in 2 (n - 1) steps. ``hierarchical``
    reduces inside each server first, then over the servers' network cards, then spreads the result; ``flat`` is one
    ring through all devices. A network card carries one ring at a time, in both directions at once.

    Args:
        cluster: the cluster.
        members: server -> how many of its devices take part.
        algorithm: one of `ALL_REDUCE`.
    """
    count = sum(members.values())
    if count < 2:
        return 0.0, 0.0
    links = cluster.server_links
    inner = [_ring(cluster, number, links[server][0]) for server, number in members.items() if number > 1]
    outer = (0.0, 0.0)
    if len(members) > 1:
        cards = [links[server][1] for server in members]
        slowest = Link(min(card.bandwidth for card in cards), max(card.latency for card in cards))
        outer = _ring(cluster, count if algorithm == "flat" else len(members), slowest)
    if inner and (len(members) == 1 or algorithm == "hierarchical"):
        start, rate = (max(parts) for parts in zip(*inner, strict=True))
        return outer[0] + start, outer[1] + rate
    return outer


def _ring(cluster: Cluster, members: int, link: Link) -> tuple[float, float]:
    bandwidth, latency = link
    if cluster.reduce_bandwidth is not None:
        bandwidth = min(bandwidth, cluster.reduce_bandwidth)
    if cluster.reduce_latency is not None:
        latency = max(latency, cluster.reduce_latency)
    return 2 * (members - 1) * latency, 2 * (members - 1) / members / bandwidth


class CostModel:
    """Costs of one plan.

    Attributes:
        plan: the plan.
        profile: what its layers cost.
        cluster: what it runs on.
        overlap: whether gradients are all-reduced as soon as each layer's last backward is over, rather than after the
            stage's last one.
        all_reduce: one of `ALL_REDUCE`.
        stages: see :class:`StageCost`.
        routes: (producer stage, consumer stage) -> bytes of a slice forwards, and of its gradient backwards.

    Raises:
        PlanError: the plan needs devices that the cluster lacks, or cuts after layers that the profile lacks.
    """

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        cluster: Cluster,
        *,
        overlap: bool = False,
        all_reduce: str = "hierarchical",
    ) -> None:
        if all_reduce not in ALL_REDUCE:
            raise ValueError(f"all_reduce={all_reduce!r} is unknown; use one of {', '.join(ALL_REDUCE)}")
        plan.validate_on(cluster)
        try:
            stage_of = profile.stage_of_layers(plan.cuts)
        except ValueError as error:
            raise PlanError(str(error)) from error
        self.plan, self.profile, self.cluster = plan, profile, cluster
        self.overlap, self.all_reduce = overlap, all_reduce
        self.micro_batches = intervals(split_evenly(plan.global_batch_size, plan.micro_batches))
        self.routes = _routes(profile, stage_of)
        self._differentiable = {
            (stage_of[tensor.producer], stage_of[layer])
            for tensor in profile.tensors
            for layer in tensor.consumers
            if tensor.differentiable
        }
        bounds = [0, *(profile.index[cut] + 1 for cut in plan.cuts), len(profile.layers)]
        self.stages = tuple(
            stage_cost(profile, start, stop, plan.recompute) for start, stop in itertools.pairwise(bounds)
        )
        self._slices: dict[tuple[int, int], tuple[Interval, ...]] = {}
        self._seconds: dict[tuple[int, Phase, int], float] = {}
        self._pieces: dict[tuple[int, int, int, bool], tuple[Piece, ...]] = {}

    # ---- time

    def slices(self, stage: int, micro_batch: int) -> tuple[Interval, ...]:
        """The samples of each replica of a stage, counted from the start of the micro-batch."""
        size = self.micro_batches[micro_batch].size
        key = (stage, size)
        if key not in self._slices:
            self._slices[key] = slice_intervals(Interval(0, size), len(self.plan.devices[stage]))
        return self._slices[key]

    def seconds(self, task: Task) -> float:
        """Time of a task on its device, undisturbed."""
        samples = self.slices(task.stage, task.micro_batch)[task.replica].size
        key = (task.stage, task.phase, samples)
        if key not in self._seconds:
            self._seconds[key] = self._task_seconds(*key)
        return self._seconds[key] / self.cluster.devices[self.plan.devices[task.stage][task.replica]].speed

    def _task_seconds(self, stage: int, phase: Phase, samples: int) -> float:
        cost, timed = self.stages[stage], self.profile.timed_samples(samples)
        start = self.profile.task_seconds
        if phase is Phase.FORWARD:
            return start + cost.forward.at(timed)
        if phase is Phase.BACKWARD:
            return start + cost.backward.at(timed)
        # Where the profile doesn't tell them apart, both gradients cost the same: one matrix product each.
        weight = cost.backward.at(timed) / 2 if cost.backward_weight is None else cost.backward_weight.at(timed)
        if phase is Phase.WEIGHT_GRAD:
            return start + weight
        return start + max(0.0, cost.backward.at(timed) - weight)

    def pieces(self, producer: int, consumer: int, micro_batch: int, *, backward: bool = False) -> tuple[Piece, ...]:
        """What goes between the replicas of two stages, owner to owner.

        When ``backward`` these are gradients, from the consumer's replicas to the producer's.
        """
        size = self.micro_batches[micro_batch].size
        key = (producer, consumer, size, backward)
        if key not in self._pieces:
            cost = self.routes[producer, consumer][backward]
            ends = (consumer, producer) if backward else (producer, consumer)
            senders, receivers = (self.slices(stage, micro_batch) for stage in ends)
            found = []
            for sender, interval in enumerate(senders):
                for receiver, wanted in enumerate(receivers):
                    common = interval.overlap(wanted).size
                    if common and (not backward or (producer, consumer) in self._differentiable):
                        found.append(Piece(sender, receiver, cost.at(common)))
            self._pieces[key] = tuple(found)
        return self._pieces[key]

    @functools.cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The all-reduces at the end of a step: one for each replicated stage, one for each group of tied weights."""
        found = []
        stage_of = self.profile.stage_of_layers(self.plan.cuts)
        for stage, cost in enumerate(self.stages):
            own = sum(layer.parameter_bytes for layer in self.profile.layers[slice(*cost.layers)])
            own += sum(
                group.parameter_bytes
                for group in self.profile.shared
                if {stage_of[layer] for layer in group.layers} == {stage}
            )
            devices = self.plan.devices[stage]
            if len(devices) > 1 and own:
                found.append(Reduction((stage,), devices, own))
        for group in self.profile.shared:
            stages = tuple(sorted({stage_of[layer] for layer in group.layers}))
            if len(stages) > 1:
                devices = tuple(dict.fromkeys(device for stage in stages for device in self.plan.devices[stage]))
                found.append(Reduction(stages, devices, group.parameter_bytes))
        return tuple(found)

    def reduction_seconds(self, reduction: Reduction, size: float | None = None) -> float:
        """Time of an all-reduce, of all or of ``size`` of its bytes."""
        size = reduction.bytes if size is None else size
        return all_reduce_seconds(self.cluster, reduction.devices, size, self.all_reduce)

    def buckets(self, stage: int) -> tuple[tuple[float, float], ...]:
        """For overlapped reduction: (part of the last B's time after which it is ready, bytes) of each bucket.

        B recomputes what it must, then runs through the layers from last to first; a bucket is full at
        ``plan.bucket_bytes``. A parameter that several layers of the stage share is ready after the first of them.
        """
        first, stop = self.stages[stage].layers
        samples = self.profile.timed_samples(self.slices(stage, len(self.micro_batches) - 1)[0].size)
        layers = self.profile.layers[first:stop]
        sizes = [layer.parameter_bytes for layer in layers]
        for group in self.profile.shared:
            if first <= group.layers[0] and group.layers[-1] < stop:
                sizes[group.layers[0] - first] += group.parameter_bytes
        total = self.profile.task_seconds + self.stages[stage].backward.at(samples)
        passed = total - sum(layer.backward.at(samples) for layer in layers)
        total = total or 1.0
        found, pending = [], 0.0
        for layer, size in zip(reversed(layers), reversed(sizes), strict=True):
            passed += layer.backward.at(samples)
            pending += size
            if pending >= self.plan.bucket_bytes:
                found.append((1.0 if layer is layers[0] else passed / total, pending))
                pending = 0.0
        if pending:
            found.append((1.0, pending))
        return tuple(found)

    def apply_seconds(self, stage: int, device: int) -> float:
        """Time of the optimizer's update of a stage on one of its devices."""
        return self.stages[stage].apply_seconds / self.cluster.devices[device].speed

    # ---- memory

    def samples(self, stage: int) -> int:
        """Samples of the largest slice of a stage."""
        return max(interval.size for interval in self.slices(stage, 0))

    def residual_bytes(self, stage: int, samples: int) -> float:
        """What a slice keeps from F to B."""
        return self.stages[stage].residual_bytes.at(samples)

    def working_bytes(self, stage: int, samples: int) -> float:
        """What a running B needs beyond residuals."""
        cost = self.stages[stage]
        return cost.temporary_bytes.at(samples) + cost.recomputed_bytes.at(samples)

    def reduction_bytes(self, stage: int) -> float:
        """Buffers of collectives at the end of a step: gradients packed into buckets."""
        return sum(reduction.bytes for reduction in self.reductions if stage in reduction.stages)

    def needed_bytes(self, stage: int, in_flight: int) -> float:
        """Peak memory of each device of a stage with ``in_flight`` micro-batches (K) in flight."""
        samples = self.samples(stage)
        residual, working = self.residual_bytes(stage, samples), self.working_bytes(stage, samples)
        reducing = self.reduction_bytes(stage) + (residual + working if self.overlap else 0.0)
        return self.stages[stage].stored_bytes + max(in_flight * residual + working, reducing)

    def memory_limit(self, stage: int) -> int | None:
        """Memory of the smallest device of a stage; None where no device's is known."""
        known = [self.cluster.devices[device].memory_bytes for device in self.plan.devices[stage]]
        return min((limit for limit in known if limit is not None), default=None)

    @functools.cached_property
    def holds(self) -> tuple[int, ...] | None:
        """D of each stage: how many micro-batches fit; None when no device's memory is known. 0: not even one."""
        limits = [self.memory_limit(stage) for stage in range(len(self.stages))]
        if all(limit is None for limit in limits):
            return None
        found = []
        for stage, limit in enumerate(limits):
            count = len(self.micro_batches)
            if limit is not None:
                samples = self.samples(stage)
                stored = self.stages[stage].stored_bytes
                room = limit - stored - self.working_bytes(stage, samples)
                each = self.residual_bytes(stage, samples)
                fits = room >= each and limit >= self.needed_bytes(stage, 1)
                count = (min(count, int(room // each)) if each else count) if fits else 0
            found.append(count)
        return tuple(found)

    @functools.cached_property
    def warm_up(self) -> tuple[int, ...]:
        """K of each stage, under the memory limit.

        Raises:
            PlanError: a stage doesn't fit its devices; the text says which, by how much, and what would help.
        """
        self.check_memory()
        try:
            return resolve_warm_up(
                self.plan.schedule,
                len(self.stages),
                len(self.micro_batches),
                holds=self.holds,
                warm_up=self.plan.warm_up,
            )
        except ScheduleError as error:
            raise PlanError(f"the plan doesn't fit the devices' memory: {error}") from error

    def check_memory(self) -> None:
        """Check that each stage's devices hold at least one micro-batch.

        Raises:
            PlanError: naming the stage, what it needs and what there is.
        """
        for stage, count in enumerate(self.holds or ()):
            limit = self.memory_limit(stage)
            if count < 1 and limit is not None:
                need = self.needed_bytes(stage, 1)
                samples = self.samples(stage)
                residual = self.residual_bytes(stage, samples) + self.working_bytes(stage, samples)
                fix = "use more stages"
                if self.stages[stage].stored_bytes < limit:
                    fix += ", smaller micro-batches, or more replicas"
                    fix += ", or recompute='boundary'" if self.plan.recompute == "none" else ""
                raise PlanError(
                    f"stage {stage} needs {gib(need)} on each device ({gib(self.stages[stage].stored_bytes)} for "
                    f"weights, gradients and optimizer, {gib(residual)} for one slice of {samples} samples), "
                    f"{gib(need - limit)} more than its smallest device has ({gib(limit)}): {fix}"
                )

    # ---- schedule

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The order of tasks on each device, K bounded by memory as the runtime does it.

        Raises:
            PlanError: as `warm_up`.
        """
        counts = self.warm_up
        given = None if self.plan.schedule == "gpipe" else counts  # gpipe's is always M
        return make_schedule(self.plan.schedule, self.plan.devices, len(self.micro_batches), warm_up=given)


def gib(size: float) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} bytes"


def stage_cost(profile: Profile, start: int, stop: int, recompute: str = "none") -> StageCost:
    """The layers ``start`` to ``stop`` (excluded) as one stage."""
    layers = profile.layers[start:stop]

    def total(costs: Sequence[Cost]) -> Cost:
        return Cost(sum(cost.fixed for cost in costs), sum(cost.per_sample for cost in costs))

    forward, backward = total([x.forward for x in layers]), total([x.backward for x in layers])
    known = [x.backward_weight for x in layers if x.backward_weight is not None]
    kept = total([x.residual_bytes for x in layers])
    entering = profile.crossing[start - 1][0] if start else ZERO
    recomputed = ZERO
    if recompute == "boundary":
        backward, recomputed, kept = backward + forward, kept, ZERO
    elif recompute == "min_cut":
        backward += forward * MIN_CUT_SHARE
        kept = total(
            [x.residual_bytes if x.min_cut_residual_bytes is None else x.min_cut_residual_bytes for x in layers]
        )
    shared = [group for group in profile.shared if any(start <= layer < stop for layer in group.layers)]
    temporary = [x.temporary_bytes for x in layers]
    return StageCost(
        layers=(start, stop),
        forward=forward,
        backward=backward,
        backward_weight=total(known) if len(known) == len(layers) else None,
        residual_bytes=kept + entering,
        recomputed_bytes=recomputed,
        temporary_bytes=Cost(max(x.fixed for x in temporary), max(x.per_sample for x in temporary)),
        parameter_bytes=sum(x.parameter_bytes for x in layers) + sum(group.parameter_bytes for group in shared),
        slot_bytes=sum(x.slot_bytes for x in layers) + sum(group.slot_bytes for group in shared),
        state_bytes=sum(x.state_bytes for x in layers),
        apply_seconds=sum(x.apply_seconds for x in layers),
    )


def _routes(profile: Profile, stage_of: Sequence[int]) -> dict[tuple[int, int], tuple[Cost, Cost]]:
    """(producer stage, consumer stage) -> bytes forwards and backwards.

    A stage gets a tensor from the one that made it, however many stages lie between.
    """
    found: dict[tuple[int, int], tuple[Cost, Cost]] = {}
    for tensor in profile.tensors:
        producer = stage_of[tensor.producer]
        for consumer in sorted({stage_of[layer] for layer in tensor.consumers} - {producer}):
            forward, backward = found.get((producer, consumer), (ZERO, ZERO))
            found[producer, consumer] = (
                forward + tensor.bytes,
                backward + tensor.bytes if tensor.differentiable else backward,
            )
    return dict(sorted(found.items()))
