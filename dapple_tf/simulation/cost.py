"""Costs of a plan's tasks, transfers and reductions on a cluster, by a profile; and the memory that it needs.

The planner, the simulator and the emulator ask this one model, so that they can't disagree.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from dapple_tf.common.text import gib
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import ZERO, Cost
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedule_request import ScheduleRequest
from dapple_tf.schedules.schedules import ScheduleError, in_flight_limits, order_tasks
from dapple_tf.simulation.all_reduce import AllReduceTime, all_reduce_time, exchange_time
from dapple_tf.simulation.device_memory import DeviceNeed, device_needs, stored_bytes
from dapple_tf.simulation.stage_cost import StageCost, StageCosts, weight_gradient
from graph_passes.ir.batching import Interval, intervals, overlaps, split_evenly
from graph_passes.ir.tasks import Phase, Schedule, Task, sources_of

__all__ = [
    "CostModel",
    "Message",
    "Reduction",
    "StageCost",
]


_Result = TypeVar("_Result")
_GRADIENTS = (Phase.BACKWARD, Phase.WEIGHT_GRAD)


class Message(NamedTuple):
    """A message of one replica to one replica of another stage for one micro-batch."""

    sender: int
    receiver: int
    bytes: float


class Leg(NamedTuple):
    """The way of some tensors from one stage to the next that reads them; their gradients return over it.

    Attributes:
        number: its position in `CostModel.legs`.
        sender: the stage that makes the tensors, or hands them on.
        receiver: the stage that gets them.
        forward: bytes of a slice.
        backward: bytes of its gradients.
        differentiable: whether any of the tensors has a gradient.
        source: number of the leg over which the sender gets the tensors; None if it makes them.
        onward: numbers of the legs over which the receiver hands them on.
        tensors: positions of the tensors in the profile.
    """

    number: int
    sender: int
    receiver: int
    forward: Cost
    backward: Cost
    differentiable: bool
    source: int | None = None
    onward: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()

    @property
    def sums(self) -> bool:
        """Whether the receiver adds up gradients before it sends them back."""
        return bool(self.onward) and self.differentiable


@dataclass(frozen=True)
class Reduction:
    """The gradients of a parameter group, which are all-reduced together.

    Attributes:
        stages: the stages that read the parameters, ascending.
        devices: the devices that keep them, each once.
        bytes: size of the gradients.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    bytes: float


class CostModel:
    """Costs of one plan.

    Attributes:
        plan: the plan.
        profile: its layers' costs.
        cluster: the devices and links.
        stages: see :class:`StageCost`.
        devices: all devices that the plan uses, each once.
        legs: how tensors travel from stage to stage.
        routes: (sending stage, receiving stage) -> bytes of a slice forwards, and of its gradient backwards, over all
            legs between them.

    Raises:
        PlanError: the plan needs devices that the cluster lacks, or cuts after layers that the profile lacks.
        TypeError: an argument has another class.
    """

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster, stage_costs: StageCosts | None = None) -> None:
        """Adds up the costs of the plan's stages, or takes them from ``stage_costs`` of the profile."""
        Plan.check("plan", plan)
        Profile.check("profile", profile)
        Cluster.check("cluster", cluster)
        plan.validate_on(cluster)
        try:
            stage_of = profile.stage_of_layers(plan.cuts)
            for cut in plan.backward_cuts:
                profile.position_after(cut)
        except ValueError as error:
            raise PlanError(str(error)) from error
        self.plan, self.profile, self.cluster = plan, profile, cluster
        self.devices = tuple(dict.fromkeys(itertools.chain(*plan.devices)))
        self.micro_batches = intervals(split_evenly(plan.global_batch_size, plan.micro_batches))
        self.legs = legs_of(profile, plan, stage_of)
        self.routes = _routes(self.legs)
        self._stage_costs = stage_costs = stage_costs or StageCosts(profile)
        bounds = [0, *(profile.index[cut] + 1 for cut in plan.cuts), len(profile.layers)]
        self.stages = tuple(
            stage_costs.of(start, stop, plan.stages[stage].recompute)
            for stage, (start, stop) in enumerate(itertools.pairwise(bounds))
        )
        self._reductions: dict[tuple[tuple[int, ...], str], AllReduceTime] = {}
        self._receives = {leg.receiver for leg in self.legs if leg.differentiable}
        self._slices: dict[tuple[int, int], tuple[Interval, ...]] = {}
        self._seconds: dict[tuple[int, Phase, int], float] = {}
        self._cuts: dict[int, tuple[int, tuple[tuple[float, float], ...]]] = {}
        self._messages: dict[tuple[int, int, int, bool], tuple[Message, ...]] = {}
        self._leg_messages: dict[tuple[int, int, bool], tuple[Message, ...]] = {}

    # ---- time

    def slices(self, stage: int, micro_batch: int) -> tuple[Interval, ...]:
        """Returns the samples of each replica of a stage, counted from the start of the micro-batch."""
        size = self.micro_batches[micro_batch].size
        key = (stage, size)
        if key not in self._slices:
            self._slices[key] = self.plan.slices(stage, Interval(0, size))
        return self._slices[key]

    def computes(self, stage: int, phase: Phase) -> bool:
        """Returns whether a phase of a stage has anything to do.

        Bx has nothing to do if the stage, such as the first one, receives nothing with a gradient; Bw then is the whole
        backward. Bw has nothing to do if the stage has no parameters.
        """
        if phase is Phase.WEIGHT_GRAD:
            return self.stages[stage].parameter_bytes > 0
        return phase is not Phase.INPUT_GRAD or stage in self._receives or not self.stages[stage].parameter_bytes

    def gradient_phase(self, stage: int, split: bool) -> Phase:
        """Returns the phase of a stage that takes gradients of its sent tensors.

        A Bx without work keeps its place in the device's order, but waits for nothing: Bw takes them.

        Args:
            stage: the stage.
            split: whether its backward is Bx and Bw.
        """
        if not split:
            return Phase.BACKWARD
        return Phase.INPUT_GRAD if self.computes(stage, Phase.INPUT_GRAD) else Phase.WEIGHT_GRAD

    @functools.cached_property
    def incoming(self) -> tuple[tuple[Leg, ...], ...]:
        """For each stage the legs over which it receives tensors and returns gradients."""
        return tuple(tuple(leg for leg in self.legs if leg.receiver == stage) for stage in range(len(self.stages)))

    @functools.cached_property
    def outgoing(self) -> tuple[tuple[Leg, ...], ...]:
        """Legs over which each stage sends its tensors, and receives their gradients."""
        made = [leg for leg in self.legs if leg.source is None]
        return tuple(tuple(leg for leg in made if leg.sender == stage) for stage in range(len(self.stages)))

    def seconds(self, task: Task, device: int | None = None) -> float:
        """Returns the undisturbed seconds of a task on its device, or on ``device``."""
        seconds = self.whole_seconds(task, device)
        if self.plan.backward_cuts and task.micro_batch == len(self.micro_batches) - 1 and task.phase in _GRADIENTS:
            seconds += (self._cut(task.stage)[0] - 1) * self.profile.task_seconds
        return seconds

    def whole_seconds(self, task: Task, device: int | None = None) -> float:
        """Returns `seconds`, if the task isn't cut into pieces."""
        samples = self.slices(task.stage, task.micro_batch)[task.replica].size
        key = (task.stage, task.phase, samples)
        if key not in self._seconds:
            self._seconds[key] = self._task_seconds(*key)
        if device is None:
            device = self.plan.devices[task.stage][task.replica]
        return self._seconds[key] / self.cluster.devices[device].speed

    def _task_seconds(self, stage: int, phase: Phase, samples: int) -> float:
        cost, timed = self.stages[stage], self.profile.timed_samples(samples)
        start = self.profile.task_seconds
        if not self.computes(stage, phase):
            return 0.0
        whole = cost.backward.at(timed)
        forward = cost.forward.at(timed)
        weight = min(whole, cost.backward_weight.at(timed))
        if phase is Phase.FORWARD:
            return start + forward
        if phase is Phase.BACKWARD:
            return start + whole
        if phase is Phase.WEIGHT_GRAD:
            return start + (weight if self.computes(stage, Phase.INPUT_GRAD) else whole)
        return start + (whole - weight if self.computes(stage, Phase.WEIGHT_GRAD) else whole)

    @property
    def task_seconds(self) -> tuple[tuple[float, float, float], ...]:
        """Times of F, Bx and Bw of each stage for the first micro-batch, as `StagePlan.task_seconds` takes them.

        They are those of the slowest replica.
        """

        def longest(stage: int, phase: Phase) -> float:
            return max(self.seconds(Task(stage, phase, 0, replica)) for replica in self._unlike_replicas(stage))

        return tuple(
            (longest(stage, Phase.FORWARD), longest(stage, Phase.INPUT_GRAD), longest(stage, Phase.WEIGHT_GRAD))
            for stage in range(len(self.stages))
        )

    def _unlike_replicas(self, stage: int) -> list[int]:
        """Returns a replica of each kind of a stage: with the same speeds and share."""
        sizes = self.slices(stage, 0)
        kinds: dict[tuple[float, int], int] = {}
        for replica, device in enumerate(self.plan.devices[stage]):
            kinds.setdefault((self.cluster.devices[device].speed, sizes[replica].size), replica)
        return list(kinds.values())

    def messages(self, sender: int, receiver: int, micro_batch: int, *, backward: bool = False) -> tuple[Message, ...]:
        """Returns the messages between the replicas of two stages, with all that goes from one to the other.

        When ``backward`` these are gradients, from the receiver's replicas to the sender's.
        """
        key = (sender, receiver, self.micro_batches[micro_batch].size, backward)
        if key not in self._messages:
            legs = [leg for leg in self.legs if (leg.sender, leg.receiver) == (sender, receiver)]
            flows = not backward or any(leg.differentiable for leg in legs)
            ends = (receiver, sender) if backward else (sender, receiver)
            cost = self.routes[sender, receiver][backward]
            self._messages[key] = self._between(*ends, micro_batch, cost) if flows else ()
        return self._messages[key]

    def leg_messages(self, leg: Leg, micro_batch: int, *, backward: bool = False) -> tuple[Message, ...]:
        """Returns the messages over one leg, as `messages`."""
        key = (leg.number, self.micro_batches[micro_batch].size, backward)
        if key not in self._leg_messages:
            flows = not backward or leg.differentiable
            ends = (leg.receiver, leg.sender) if backward else (leg.sender, leg.receiver)
            cost = leg.backward if backward else leg.forward
            self._leg_messages[key] = self._between(*ends, micro_batch, cost) if flows else ()
        return self._leg_messages[key]

    def _between(self, sending: int, receiving: int, micro_batch: int, cost: Cost) -> tuple[Message, ...]:
        senders, receivers = self.slices(sending, micro_batch), self.slices(receiving, micro_batch)
        return tuple(
            Message(sender, receiver, cost.at(common)) for sender, receiver, common in overlaps(senders, receivers)
        )

    @functools.cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The all-reduces of a step: one for each replicated stage, one for each group of weights that stages share."""
        reductions = []
        stage_of = self.profile.stage_of_layers(self.plan.cuts)
        for stage, cost in enumerate(self.stages):
            own = sum(layer.parameter_bytes for layer in self.profile.layers[slice(*cost.layers)])
            own += round(self.row_gradient_bytes(stage)) - self.table_bytes(stage)
            own += sum(
                group.parameter_bytes
                for group in self.profile.shared
                if {stage_of[layer] for layer in group.layers} == {stage}
            )
            devices = self.plan.devices[stage]
            if len(devices) > 1 and own:
                reductions.append(Reduction((stage,), devices, own))
        for group in self.profile.shared:
            stages = tuple(sorted({stage_of[layer] for layer in group.layers}))
            if len(stages) > 1:
                devices = tuple(dict.fromkeys(device for stage in stages for device in self.plan.devices[stage]))
                if len(devices) > 1:
                    reductions.append(Reduction(stages, devices, group.parameter_bytes))
        return tuple(reductions)

    def reduction_seconds(self, reduction: Reduction, size: float | None = None, algorithm: str | None = None) -> float:
        """Returns the seconds of an all-reduce of all, or ``size``, of its bytes, in buckets.

        With the optimizer's slots in shards, of a reduce-scatter and the all-gather of the parameters: as if that
        followed at once, though the update is between them.

        Args:
            reduction: what is reduced.
            size: bytes; None for all.
            algorithm: one of `ALL_REDUCE`; None for the plan's.
        """
        size = reduction.bytes if size is None else size
        algorithm = self.plan.stages[min(reduction.stages)].all_reduce if algorithm is None else algorithm
        key = (reduction.devices, algorithm)
        if key not in self._reductions:
            members = Counter(self.cluster.devices[device].server for device in reduction.devices)
            if "optimizer" in self.plan.shards:
                time = exchange_time(self.cluster, members)
            else:
                time = all_reduce_time(self.cluster, members, algorithm)
            self._reductions[key] = time
        return self._reductions[key].seconds(size, self.plan.bucket_bytes)

    # ---- rows in shards

    def table_bytes(self, stage: int) -> int:
        """Returns the bytes of a stage's tables of which each of its devices keeps a shard."""
        if "rows" not in self.plan.shards or len(self.plan.devices[stage]) < 2:
            return 0
        return sum(layer.table_bytes for layer in self.profile.layers[slice(*self.stages[stage].layers)])

    def row_bytes(self, stage: int, samples: int) -> float:
        """Returns the bytes of the rows in shards that a slice looks up, and of their gradients."""
        layers = self.profile.layers[slice(*self.stages[stage].layers)] if self.table_bytes(stage) else ()
        return sum(layer.row_bytes.at(samples) for layer in layers)

    def step_row_bytes(self, stage: int) -> float:
        """Returns the bytes of the gradients' rows that the replica with the most samples has at the end of a step."""
        if not self.table_bytes(stage):
            return 0.0
        slices = [self.slices(stage, number) for number in range(len(self.micro_batches))]
        return max(sum(self.row_bytes(stage, part.size) for part in own) for own in zip(*slices, strict=True))

    def row_gradient_bytes(self, stage: int) -> float:
        """Returns the bytes of a reduction that takes as long as rows' way to their owners: they go one way only."""
        return self.step_row_bytes(stage) / 2

    def lookup(self, task: Task) -> tuple[float, float, bool, int, float]:
        """Returns the cost of looking up the rows of a forward.

        Returns:
            Seconds during which the replica's link is busy, and more until rows are there; whether some come from
            another server; the device from which the first come; and the bytes that are sent.
        """
        device, keepers = self.plan.devices[task.stage][task.replica], self.plan.devices[task.stage]
        rows = self.row_bytes(task.stage, self.slices(task.stage, task.micro_batch)[task.replica].size) / len(keepers)
        others = [keeper for keeper in dict.fromkeys(keepers) if keeper != device]
        servers = {keeper: self.cluster.devices[keeper].server for keeper in (device, *others)}
        far = [keeper for keeper in others if servers[keeper] != servers[device]]
        links = [self.cluster.link(keeper, device) for keeper in (far or others)]
        latency = 2 * max((link.latency for link in links), default=0.0)  # Indices go the other way before.
        busy = sum(rows / link.bandwidth for link in links)
        return busy, latency, bool(far), (far or others or [device])[0], rows * len(others)

    def reducing(self, all_reduce: Sequence[str]) -> CostModel:
        """Returns the costs of the same plan with another all-reduce of each stage."""
        other = copy.copy(self)
        other.plan = self.plan.with_options(all_reduce=all_reduce)
        return other

    def backward_pieces(self, stage: int) -> tuple[tuple[float, float], ...]:
        """Returns the pieces of the backward that completes a stage's gradients: (fraction of its time, bytes).

        After this fraction of the task's time a piece is over, and its gradients can be all-reduced. Backwards are cut
        by the plan's ``backward_cuts``; a piece without parameters joins the next, or gives no gradients if it is the
        last. The first piece recomputes what backwards must; a parameter that several layers of the stage share is
        ready after the first of them.
        """
        return self._cut(stage)[1]

    def _cut(self, stage: int) -> tuple[int, tuple[tuple[float, float], ...]]:
        """Returns a stage's number of pieces of its last backward, and pieces that complete gradients."""
        if stage not in self._cuts:
            self._cuts[stage] = self._cut_backward(stage)
        return self._cuts[stage]

    def _cut_backward(self, stage: int) -> tuple[int, tuple[tuple[float, float], ...]]:
        first, stop = self.stages[stage].layers
        sizes = self.layer_gradients(stage)
        cuts = {self.profile.index[cut] + 1 for cut in self.plan.backward_cuts} & set(range(first + 1, stop))
        if not cuts:
            return 1, ((1.0, sum(sizes)),)
        times = self.layer_backwards(stage)
        phase = Phase.WEIGHT_GRAD if self.delays(stage) else Phase.BACKWARD
        whole = self.whole_seconds(Task(stage, phase, len(self.micro_batches) - 1, self._slowest(stage)))
        # What is not of a layer comes first. A profile may say that layers' weight gradients take longer than all of B.
        at, size = max(0.0, whole - sum(times)), 0.0
        ends: list[tuple[float, float]] = []
        for layer in range(stop - 1, first - 1, -1):
            at += times[layer - first]
            size += sizes[layer - first]
            if layer in cuts and size:
                ends.append((at, size))
                at, size = at + self.profile.task_seconds, 0.0
        pieces = tuple((end / at if at else 1.0, part) for end, part in ends)
        return len(ends) + 1, (*pieces, (1.0, size)) if size or not ends else pieces

    def _slowest(self, stage: int) -> int:
        """Returns the replica of a stage that completes its gradients last, if all begin at once."""
        phase = Phase.WEIGHT_GRAD if self.delays(stage) else Phase.BACKWARD
        last = len(self.micro_batches) - 1
        return max(
            self._unlike_replicas(stage), key=lambda replica: self.whole_seconds(Task(stage, phase, last, replica))
        )

    def layer_gradients(self, stage: int) -> list[float]:
        """Returns the bytes of the gradients that are complete after the backward of each of a stage's layers."""
        first, stop = self.stages[stage].layers
        sizes = [float(layer.parameter_bytes) for layer in self.profile.layers[first:stop]]
        if self.table_bytes(stage):
            rows = self.row_gradient_bytes(stage) / self.table_bytes(stage)
            for index, layer in enumerate(self.profile.layers[first:stop]):
                sizes[index] += layer.table_bytes * (rows - 1)
        for group in self.profile.shared:
            if first <= group.layers[0] and group.layers[-1] < stop:
                sizes[group.layers[0] - first] += group.parameter_bytes
        return sizes

    def layer_backwards(self, stage: int) -> list[float]:
        """Returns the seconds of each of a stage's layers in the task that completes the gradients.

        Of the slowest replica, for whose gradients all-reduces wait.
        """
        slowest = self._slowest(stage)
        samples = self.profile.timed_samples(self.slices(stage, len(self.micro_batches) - 1)[slowest].size)
        speed = self.cluster.devices[self.plan.devices[stage][slowest]].speed
        delayed = self.delays(stage) and self.computes(stage, Phase.INPUT_GRAD)
        first, stop = self.stages[stage].layers
        tied = {layer for group in self.profile.shared for layer in group.layers}
        return [
            (weight_gradient(layer, index in tied) if delayed else layer.backward).at(samples) / speed
            for index, layer in enumerate(self.profile.layers)
            if first <= index < stop
        ]

    def apply_seconds(self, stage: int, device: int) -> float:
        """Returns the seconds of the optimizer's update of a stage, or of its shards of it, on one of its devices."""
        seconds, speed = self.stages[stage].apply_seconds, self.cluster.devices[device].speed
        if "optimizer" in self.plan.shards:
            return seconds / len(self.plan.devices[stage]) / speed
        return seconds * self._updated_share(stage) / speed

    def _updated_share(self, stage: int) -> float:
        """Returns the share of a stage's parameters that each device updates if its tables are in shards."""
        tables = self.table_bytes(stage) / max(1, self.stages[stage].parameter_bytes)
        return 1 - tables * (1 - 1 / len(self.plan.devices[stage]))

    # ---- memory

    def samples(self, stage: int) -> int:
        """Returns the samples of the largest slice of a stage."""
        return max(interval.size for interval in self.slices(stage, 0))

    def residual_bytes(self, stage: int, samples: int) -> float:
        """Returns the bytes that a slice keeps from F to B, or to Bx."""
        return self.stages[stage].residual_bytes.at(samples)

    def delayed_bytes(self, stage: int, samples: int) -> float:
        """Returns the bytes that a slice keeps from Bx to Bw: 0 if Bw has nothing to do, all if Bx has nothing."""
        if not self.computes(stage, Phase.WEIGHT_GRAD):
            return 0.0
        if not self.computes(stage, Phase.INPUT_GRAD):
            return self.residual_bytes(stage, samples)
        return self.stages[stage].delayed_bytes.at(samples)

    def working_bytes(self, stage: int, samples: int, phase: Phase = Phase.BACKWARD) -> float:
        """Returns the bytes that a running B, Bx or Bw needs beyond kept ones; Bw is B if Bx has nothing to do."""
        if not self.computes(stage, phase):
            return 0.0
        alone = phase is Phase.WEIGHT_GRAD and not self.computes(stage, Phase.INPUT_GRAD)
        return self.stages[stage].working_bytes(samples, Phase.BACKWARD if alone else phase)

    def apply_bytes(self, stage: int) -> float:
        """Returns the temporary bytes of the update of a device's part of a stage."""
        return self.stages[stage].apply_bytes * self._updated_share(stage)

    @functools.cached_property
    def stored_bytes(self) -> Mapping[int, float]:
        """Device -> bytes of variables, optimizer slots and accumulators, if any, of all stages kept there.

        Parameters that several of its stages read count once.
        """
        return stored_bytes(self)

    @functools.cached_property
    def _needs(self) -> tuple[tuple[tuple[DeviceNeed, int | None], ...], ...]:
        """For each stage its unlike devices: what each needs, and its memory."""
        return device_needs(self)

    def delays(self, stage: int) -> bool:
        """Returns whether the plan's schedule splits the backwards of a stage."""
        plan = self.plan
        if plan.policy.splits is None:
            return stage in plan.split_backward_stages
        return plan.policy.splits or stage < plan.reverse_first_k

    def needed_bytes(self, stage: int, in_flight: int) -> float:
        """Returns the peak bytes of each device of a stage with ``in_flight`` micro-batches (K) in flight.

        The device's other stages are assumed to have as many; `Simulation.peak_bytes` is what a schedule really needs.
        """
        return max(need.peak(in_flight) for need, _ in self._needs[stage])

    def memory_limit(self, stage: int) -> int | None:
        """Returns the bytes of the smallest device of a stage; None if no device's memory is known."""
        return min((limit for _, limit in self._needs[stage] if limit is not None), default=None)

    def shortest(self, stage: int, in_flight: int) -> tuple[DeviceNeed, int] | None:
        """Returns what the device of a stage that exceeds its memory most, or is nearest to it, needs and has.

        None if no device's memory is known. The arguments are those of `needed_bytes`.
        """
        known = [(need, limit) for need, limit in self._needs[stage] if limit is not None]
        return max(known, key=lambda pair: pair[0].peak(in_flight) - pair[1], default=None)

    @functools.cached_property
    def holds(self) -> tuple[int, ...] | None:
        """Returns D of each stage, the micro-batches that fit: None if no device's memory is known, 0 if not even one.

        On a device that has several stages, D of each of them fit at the same time; if the policy limits them
        together, D of any of them (`Policy.shares_room`).
        """
        if all(limit is None for needs in self._needs for _, limit in needs):
            return None
        count, shared = len(self.micro_batches), self.plan.policy.shares_room
        most = count * len(self.stages) if shared else count
        return tuple(
            min((need.fitting(limit, count, shared=shared) for need, limit in needs if limit is not None), default=most)
            for needs in self._needs
        )

    @functools.cached_property
    def warm_up(self) -> tuple[int, ...]:
        """Returns K of each stage, under the memory limit.

        Raises:
            PlanError: a stage doesn't fit its devices; the text says which, by how much, and what would help.
        """
        return self._within_memory(in_flight_limits)

    def check_memory(self) -> None:
        """Checks that each stage's devices hold at least one micro-batch.

        Raises:
            PlanError: names the stage, the bytes that it needs and those that there are.
        """
        for stage, count in enumerate(self.holds or ()):
            short = self.shortest(stage, 1)
            if count < 1 and short is not None:
                worst, limit = short
                need, own = worst.peak(1), worst.each + worst.working
                fix = "use more stages"
                fixed = worst.stored
                if fixed < limit:
                    fix += ", smaller micro-batches, or more replicas"
                    fix += ", or recompute='boundary'" if self.plan.stages[stage].recompute == "none" else ""
                raise PlanError(
                    f"stage {stage} needs {gib(need)} on a device ({gib(fixed)} for weights, gradients and optimizer, "
                    f"{gib(own)} for one slice of {worst.samples} samples), {gib(need - limit)} more than that device "
                    f"has ({gib(limit)}): {fix}"
                )

    # ---- schedule

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Returns the order of tasks on each device, with K bounded by memory as in the runtime.

        Raises:
            PlanError: as `warm_up`.
        """
        return self._within_memory(order_tasks)

    def _within_memory(self, function: Callable[[Policy, ScheduleRequest], _Result]) -> _Result:
        self.check_memory()
        try:
            return function(self.plan.policy, self.plan.request.within(self.holds, len(self.micro_batches)))
        except ScheduleError as error:
            raise PlanError(f"the plan doesn't fit the devices' memory: {error}") from error


# ---- how tensors travel


_Ends = tuple[int, int, tuple[int, ...]]
"""Sender, receiver, and all readers of tensors that are handed on; no readers for what comes from its maker alone."""


def legs_of(profile: Profile, plan: Plan, stage_of: Sequence[int]) -> tuple[Leg, ...]:
    """Returns the legs of a plan's tensors, ordered by their ends.

    Tensors of one maker and the same readers travel together where relays hand them on; all others of two stages do.

    Args:
        profile: the tensors between layers.
        plan: its relays and devices.
        stage_of: each layer's stage.
    """
    tensors: dict[_Ends, list[tuple[int, Tensor]]] = {}
    before: dict[_Ends, _Ends | None] = {}  # the leg over which the sender gets them
    for position, tensor in enumerate(profile.tensors):
        maker = stage_of[tensor.producer]
        readers = tuple(sorted({stage_of[layer] for layer in tensor.consumers} - {maker}))
        if plan.relays:
            sources = sources_of(maker, readers, plan.relays, plan.devices)
        else:
            sources = dict.fromkeys(readers, maker)
        bundle = (maker, *readers) if any(source != maker for source in sources.values()) else ()
        for reader, source in sources.items():
            ends = (source, reader, bundle)
            tensors.setdefault(ends, []).append((position, tensor))
            before[ends] = None if source == maker else (sources[source], source, bundle)
    order = sorted(tensors)
    numbers = {ends: number for number, ends in enumerate(order)}
    onward: dict[_Ends | None, list[int]] = {}
    for ends in order:
        onward.setdefault(before[ends], []).append(numbers[ends])
    legs = []
    for ends in order:
        came, (positions, own) = before[ends], zip(*tensors[ends], strict=True)
        forward = _sum([tensor.bytes for tensor in own])
        back = [tensor.bytes for tensor in own if tensor.differentiable]
        legs.append(
            Leg(
                numbers[ends],
                *ends[:2],
                forward,
                forward if len(back) == len(own) else _sum(back),
                bool(back),
                None if came is None else numbers[came],
                tuple(onward.get(ends, ())),
                tuple(positions),
            )
        )
    return tuple(legs)


def _sum(costs: Sequence[Cost]) -> Cost:
    return sum(costs[1:], costs[0]) if costs else ZERO


def _routes(legs: Sequence[Leg]) -> dict[tuple[int, int], tuple[Cost, Cost]]:
    """Maps (sending stage, receiving stage) to the bytes of all legs between them, forwards and backwards."""
    routes: dict[tuple[int, int], tuple[Cost, Cost]] = {}
    for leg in legs:
        ends = (leg.sender, leg.receiver)
        before = routes.get(ends)
        own = (leg.forward, leg.backward)
        routes[ends] = own if before is None else (before[0] + own[0], before[1] + own[1])
    return routes
