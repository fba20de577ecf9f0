"""Dynamic programming over layers and devices: the partitions, replications and placements with the least latency.

DAPPLE, PPoPP'21, section 4.3. T_PL(j, m, g) is the pipeline latency when the first j layers are planned on the devices
g and the other layers form one last stage on all other devices (formula 4); T_PL(j', m + m', g + g') splits that last
stage after layer j' and gives m' devices to the new stage (formula 5), chosen by the three placement policies.
Subproblems are memorised. Each is a pair of j and an occupancy of the cluster; all continuations of those with the
same j are computed at once, as arrays over (placement, j').

A subproblem's best prefix by T_PL needn't be part of the best plan, since the last stage hides how well the prefix is
balanced. Therefore three are kept for each: the one with the least T_PL, the one that would be best if the rest were
balanced ideally, and the one with the smallest bottleneck.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.placement import Links, Placements
from dapple_tf.planning.stage_cuts import layer_seconds
from dapple_tf.simulation.activities import reduction_pieces
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.stage_cost import MIN_CUT_SHARE
from graph_passes.ir.tasks import Phase, Task


class StageTime(NamedTuple):
    """Seconds of one stage for one micro-batch. A network stage has a transfer's times and no all-reduce.

    Attributes:
        forward: F_s.
        backward: B_s.
        all_reduce: AR(P_s, g_s), with the optimizer's update that follows it.
    """

    forward: float
    backward: float
    all_reduce: float = 0.0


class PipelineLatency(NamedTuple):
    """Seconds of the three phases of a step, and the pivot stage that they were computed with.

    Attributes:
        warm_up: T_w, until the pivot stage has run its first forward.
        steady: T_s.
        ending: T_e, with the all-reduces.
        pivot: Q, the stage with the fewest bubbles.
    """

    warm_up: float
    steady: float
    ending: float
    pivot: int

    @property
    def latency(self) -> float:
        """L = T_w + T_s + T_e."""
        return self.warm_up + self.steady + self.ending


def pivot_stage(stages: Sequence[StageTime], micro_batches: int) -> int:
    """Returns Q, the stage that dominates the steady phase (formula 3 and algorithm 1).

    From the last stage backwards, a stage s takes the place of Q when its own steady phase is longer than that of Q
    with the work between the two: (M - 1) (F_s + B_s) > (M - 1) (F_Q + B_Q) + sum of F + B from s + 1 to Q - 1.
    """
    rounds = micro_batches - 1
    pivot = len(stages) - 1
    between = 0.0
    for index in range(len(stages) - 2, -1, -1):
        own = rounds * (stages[index].forward + stages[index].backward)
        if own > rounds * (stages[pivot].forward + stages[pivot].backward) + between:
            pivot, between = index, 0.0
        else:
            between += stages[index].forward + stages[index].backward
    return pivot


def pipeline_latency(stages: Sequence[StageTime], micro_batches: int) -> PipelineLatency:
    """Returns the phases of L of a pipeline (formulas 1 and 2).

        T_w = sum of F_s for s = 0..Q
        T_s = (M - 1) (F_Q + B_Q)
        T_e = max over s of AR_s + (sum of B_a for a = s..Q  if s <= Q  else  - sum of B_a for a = Q..s)

    Args:
        stages: computation stages and, between them, network stages.
        micro_batches: M.
    """
    pivot = pivot_stage(stages, micro_batches)
    warm_up = sum(stage.forward for stage in stages[: pivot + 1])
    steady = (micro_batches - 1) * (stages[pivot].forward + stages[pivot].backward)
    endings = []
    for index, stage in enumerate(stages):
        low, high = min(index, pivot), max(index, pivot)
        work = sum(other.backward for other in stages[low : high + 1])
        endings.append(stage.all_reduce + (work if index <= pivot else -work))
    return PipelineLatency(warm_up, steady, max(endings), pivot)


def stage_times(costs: CostModel) -> list[StageTime]:
    """Returns the computation stages and the network stages between them, as formula 2 takes them."""
    cluster, plan = costs.cluster, costs.plan
    timed_stages: list[StageTime] = []
    for stage, devices in enumerate(plan.devices):
        if stage:
            timed_stages.append(
                StageTime(*(_transfer_seconds(costs, stage - 1, backward=back) for back in (False, True)))
            )
        cost = costs.stages[stage]
        start = costs.profile.task_seconds
        times = []
        for part in (cost.forward, cost.backward):
            slices = costs.slices(stage, 0)
            times.append(
                max(
                    (start + part.at(costs.profile.timed_samples(interval.size))) / cluster.devices[device].speed
                    for interval, device in zip(slices, devices, strict=True)
                )
            )
        reduced = 0.0  # after the last backward
        for number, item in enumerate(costs.reductions):
            if stage in item.stages:
                end = 0.0
                for share, size in reduction_pieces(costs, number):
                    end = max(end, share * times[1]) + costs.reduction_seconds(item, size)
                reduced += end - times[1]
        timed_stages.append(
            StageTime(times[0], times[1], reduced + max(costs.apply_seconds(stage, d) for d in devices))
        )
    return timed_stages


def _transfer_seconds(costs: CostModel, stage: int, *, backward: bool) -> float:
    """Returns the seconds to send all that crosses the cut after a stage, for one micro-batch: the busiest link's."""
    cluster, plan = costs.cluster, costs.plan
    loads: dict[tuple[str, int], float] = {}
    latency = 0.0
    for producer, consumer in costs.routes:
        if producer > stage or consumer <= stage:
            continue
        ends = (consumer, producer) if backward else (producer, consumer)
        for message in costs.messages(producer, consumer, 0, backward=backward):
            source, target = plan.devices[ends[0]][message.sender], plan.devices[ends[1]][message.receiver]
            link = cluster.link(source, target)
            a, b = cluster.devices[source].server, cluster.devices[target].server
            ports = (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b))
            for port in ports:
                loads[port] = loads.get(port, 0.0) + message.bytes / link.bandwidth
            latency = max(latency, link.latency)
    return max(loads.values(), default=0.0) + latency


def least_seconds(costs: CostModel) -> float:
    """Returns a lower bound of a plan's step, whatever the order of its tasks.

    It is the time of the busiest device, or of the busiest port of a device or network card.
    """
    busy: dict[object, float] = {}
    plan, cluster = costs.plan, costs.cluster
    count = len(costs.micro_batches)
    for stage, devices in enumerate(plan.devices):
        for replica, device in enumerate(devices):
            tasks = (Task(stage, phase, count - 1, replica) for phase in (Phase.FORWARD, Phase.BACKWARD))
            seconds = count * sum(map(costs.whole_seconds, tasks)) + costs.apply_seconds(stage, device)
            busy[device] = busy.get(device, 0.0) + seconds
    for (producer, consumer), backward in itertools.product(costs.routes, (False, True)):
        ends = (consumer, producer) if backward else (producer, consumer)
        for message in costs.messages(producer, consumer, count - 1, backward=backward):
            source, target = plan.devices[ends[0]][message.sender], plan.devices[ends[1]][message.receiver]
            if source != target:
                link = cluster.link(source, target)
                a, b = cluster.devices[source].server, cluster.devices[target].server
                for port in (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b)):
                    busy[port] = busy.get(port, 0.0) + count * message.bytes / link.bandwidth
    return max(busy.values())


Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class StageRanges:
    """Sums over the layers of each possible stage, as arrays over (first group, group after the last).

    Pairs are a fixed part and one per sample, as of a `Cost`.

    Attributes:
        forward: seconds of F.
        backward: seconds of B, recomputation included.
        residual: bytes kept from F to B, those that enter the stage included.
        working: bytes that a running task needs beyond these.
        parameters: bytes of trainable variables, shared ones included.
        stored: bytes of variables, slots and gradients.
        slots: those of them that are the optimizer's.
        apply: seconds of the update.
        entering: bytes of the boundary before each first group.
        returning: bytes of its gradients.
        tables: the part of the parameters of which only rows are looked up.
        table_slots: the slots of these.
        rows: bytes of the rows that are looked up.
    """

    forward: tuple[Floats, Floats]
    backward: tuple[Floats, Floats]
    residual: tuple[Floats, Floats]
    working: tuple[Floats, Floats]
    parameters: Floats
    stored: Floats
    slots: Floats
    apply: Floats
    entering: tuple[Floats, Floats]
    returning: tuple[Floats, Floats]
    tables: Floats
    table_slots: Floats
    rows: tuple[Floats, Floats]


def stage_ranges(profile: Profile, ends: Sequence[int], recompute: str) -> StageRanges:
    """Returns the sums for stages between these positions (`coarsened`), with one recomputation for all."""
    starts = [0, *ends]
    count = len(ends) + 1

    def sums(values: Sequence[float] | Floats) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])[starts]
        return np.asarray(total[None, :] - total[:, None])

    def costs(name: str) -> tuple[Floats, Floats]:
        layer_costs = [getattr(layer, name) for layer in profile.layers]
        return sums([cost.fixed for cost in layer_costs]), sums([cost.per_sample for cost in layer_costs])

    def crossing(backward: bool) -> tuple[Floats, Floats]:
        cut = [(0.0, 0.0)] + [(pair[backward].fixed, pair[backward].per_sample) for pair in profile.crossing]
        array = np.array(cut)[starts]
        return array[:, 0], array[:, 1]

    forward, backward, residual = costs("forward"), costs("backward"), costs("residual_bytes")
    entering, returning = crossing(False), crossing(True)
    temporary = [layer.temporary_bytes for layer in profile.layers]
    working = [np.zeros((count, count)), np.zeros((count, count))]
    for part, values in enumerate(([c.fixed for c in temporary], [c.per_sample for c in temporary])):
        peaks = [max(values[a:b], default=0.0) for a, b in itertools.pairwise(starts)]
        for first in range(count - 1):
            working[part][first, first + 1 :] = np.maximum.accumulate(peaks[first:])
    if recompute == "boundary":
        later = _needed_later(profile, starts)
        again = [np.maximum(0.0, whole - part) for whole, part in zip(costs("all_again"), later, strict=True)]
        backward = (backward[0] + again[0], backward[1] + again[1])
        working = [working[0] + residual[0], working[1] + residual[1]]
        residual = (np.zeros((count, count)), np.zeros((count, count)))
    elif recompute == "min_cut":
        backward = (backward[0] + MIN_CUT_SHARE * forward[0], backward[1] + MIN_CUT_SHARE * forward[1])
        least = [layer.min_cut_residual_bytes or layer.residual_bytes for layer in profile.layers]
        residual = sums([cost.fixed for cost in least]), sums([cost.per_sample for cost in least])
    residual = (residual[0] + entering[0][:, None], residual[1] + entering[1][:, None])
    parameters = sums([layer.parameter_bytes for layer in profile.layers])
    slots = sums([layer.slot_bytes for layer in profile.layers])
    state = sums([layer.state_bytes for layer in profile.layers])
    for group in profile.shared:
        users = np.zeros(len(profile.layers))
        users[list(group.layers)] = 1
        used = sums(users) > 0
        parameters = parameters + used * group.parameter_bytes
        slots = slots + used * group.slot_bytes
    apply = sums([layer.apply_seconds for layer in profile.layers])
    tables = sums([layer.table_bytes for layer in profile.layers])
    table_slots = sums([layer.table_slot_bytes for layer in profile.layers])
    return StageRanges(
        forward, backward, residual, (working[0], working[1]), parameters, 2 * parameters + slots + state, slots, apply,
        entering, returning, tables, table_slots, costs("row_bytes"),
    )  # fmt: skip


def _needed_later(profile: Profile, starts: Sequence[int]) -> tuple[Floats, Floats]:
    """Returns the time of the part of F that each possible stage's B needn't compute again, as arrays of `StageRanges`.

    Args:
        profile: the layers.
        starts: the first layer of each group, and the number of layers.
    """
    count = len(starts)
    fixed, per_sample = np.zeros((count, count)), np.zeros((count, count))
    for index, layer in enumerate(profile.layers):
        for later in layer.needed_later:
            # Stages that begin up to the layer, and end after it but before the one that needs the part.
            first, last = bisect.bisect_right(starts, index), bisect.bisect_right(starts, later.layer)
            fixed[:first, first:last] += layer.all_again.fixed * later.share
            per_sample[:first, first:last] += layer.all_again.per_sample * later.share
    return fixed, per_sample


Ints = npt.NDArray[np.int64]

_KEPT = 3
"""Number of prefixes kept for each subproblem."""
_PLACES = 3
"""The most candidates with the same stages and numbers of replicas, on different devices."""
_SLACK = 1.15
"""Prefixes whose ideal completion is slower than the best plan by this factor are dropped."""
_SMALL_SLACK = 2.0
"""The same for few states, which leave time for candidates that the formula rates low."""
_FEW_STATES = 25


class Candidate(NamedTuple):
    """A partition and placement that the search found.

    Attributes:
        latency: L, by formula 2.
        in_flight: micro-batches for which stages with successors have memory: 2, or 1 where that isn't enough.
        bounds: for each stage the index of the layer after its last one.
        steps: for each stage its index in `Placements.steps`.
    """

    latency: float
    in_flight: int
    bounds: tuple[int, ...]
    steps: tuple[int, ...]


def coarsened(profile: Profile, limit: int) -> tuple[int, ...]:
    """Returns at most ``limit`` positions (after layer i: i + 1) at which to consider cuts, with the model's end.

    Cuts are dropped one by one: first those that separate the least work, among these the ones that most bytes cross.

    Args:
        profile: the layers.
        limit: the most positions.
    """
    samples, times = profile.batch_sizes[-1], layer_seconds(profile)
    total = sum(times) or 1.0
    bytes_ = [sum(cost.at(samples) for cost in pair) for pair in profile.crossing]
    most = max(bytes_) or 1.0
    ends = list(range(1, len(profile.layers) + 1))
    work = [sum(times[start:stop]) for start, stop in itertools.pairwise((0, *ends))]
    while len(ends) > max(1, limit):
        loss = [(work[i] + work[i + 1]) / total * (2 - bytes_[ends[i] - 1] / most) for i in range(len(ends) - 1)]
        drop = loss.index(min(loss))
        del ends[drop]
        work[drop : drop + 2] = [work[drop] + work[drop + 1]]
    return tuple(ends)


class Search:
    """The search for one profile and cluster; `run` it for each number of micro-batches.

    Args:
        profile: the layers.
        placements: the ways to hand out devices.
        links: their speeds and links.
        ends: positions at which cuts are considered, the model's end last; see :func:`coarsened`.
        overlap: whether all-reduce overlaps with the stage's last backward.
        recompute: the mode: what B computes again.
        shards: what replicas keep a shard of each, as `Plan.shards`.
    """

    def __init__(
        self,
        profile: Profile,
        placements: Placements,
        links: Links,
        ends: Sequence[int],
        *,
        overlap: bool = False,
        recompute: str = "none",
        shards: Collection[str] = (),
    ) -> None:
        self.shards = frozenset(shards)
        self.profile, self.placements, self.links, self.ends = profile, placements, links, tuple(ends)
        self.overlap = overlap
        self.ranges = stage_ranges(profile, self.ends, recompute)
        self.memory_bound = False

    def least_seconds(self, batch: int) -> float:
        """Returns the seconds of a step without bubbles, transfers or reductions, on all devices at their speed."""
        speeds = sum(device.speed for device in self.placements.cluster.devices)
        return float((self.ranges.forward[1] + self.ranges.backward[1])[0, -1]) * batch / speeds

    def run(
        self, micro_batches: int, global_batch_size: int, keep: int = 64, bound: float = math.inf
    ) -> list[Candidate]:
        """Returns the ``keep`` best plans with M micro-batches, by formula 2, best first; none if none fits in memory.

        A stage with successors should hold two micro-batches, or it can't work while they do, which L ignores; if no
        plan allows that, one is enough. Plans that can't come near ``bound`` seconds are left out.
        """
        candidates: list[Candidate] = []
        for in_flight in (2, 1) if micro_batches > 1 else (1,):
            run = _Run(self, micro_batches, global_batch_size, bound, in_flight)
            candidates = run.candidates(keep)
            self.memory_bound |= run.memory_bound
            if candidates or not run.memory_bound:
                break
        return candidates


class _Prefix(NamedTuple):
    """The stages planned so far, as formula 2 needs them, in arrays."""

    forward: Floats  # sum of F
    backward: Floats  # sum of B
    tail: Floats  # max over stages s of AR_s + sum of B from s to the end
    bottleneck: Floats  # max of F + B
    pivot: Floats  # F_Q + B_Q
    warm_up: Floats  # T_w
    ending: Floats  # T_e
    between: Floats  # sum of F + B of the stages after Q
    after: Floats  # sum of B of the stages from Q on

    def latency(self, rounds: int) -> Floats:
        """Returns L, with ``rounds`` = M - 1."""
        return self.warm_up + rounds * self.pivot + self.ending

    def take(self, rows: Ints) -> _Prefix:
        """Returns these rows of the arrays."""
        return _Prefix(*(field[rows] for field in self))

    def extended(self, net: tuple[Floats, Floats], stage: _Stage, rounds: int) -> _Prefix:
        """Appends a network stage and a computation stage, and finds the pivot by algorithm 1.

        The new stage is the first guess of Q; then the network stage; then the prefix's own Q stands for all of its
        stages ("use Q_j instead in the iterative process").
        """
        net_time, time = net[0] + net[1], stage.forward + stage.backward
        behind = net[1] + stage.backward
        forward = self.forward + net[0] + stage.forward
        tail = np.maximum(self.tail + behind, stage.reduced + stage.backward)
        on_net = rounds * net_time > rounds * time
        pivot = np.where(on_net, net_time, time)
        gap = self.between + np.where(on_net, 0.0, net_time)
        on_old = rounds * self.pivot > rounds * pivot + gap
        return _Prefix(
            forward=forward,
            backward=self.backward + net[1] + stage.backward,
            tail=tail,
            bottleneck=np.maximum(self.bottleneck, np.maximum(net_time, time)),
            pivot=np.where(on_old, self.pivot, pivot),
            warm_up=np.where(on_old, self.warm_up, np.where(on_net, self.forward + net[0], forward)),
            ending=np.where(
                on_old,
                np.maximum(self.ending, stage.reduced - (self.after + behind)),
                np.where(on_net, np.maximum(self.tail + net[1], stage.reduced - behind), tail),
            ),
            between=np.where(on_old, self.between + net_time + time, np.where(on_net, time, 0.0)),
            after=np.where(on_old, self.after + behind, np.where(on_net, behind, stage.backward)),
        )


class _Stage(NamedTuple):
    """Stages, in arrays."""

    forward: Floats  # F
    backward: Floats  # B
    reduced: Floats  # AR, with the update
    fits: npt.NDArray[np.bool_]  # in memory, and there is a sample for each replica

    def take(self, *index: Ints | int | slice) -> _Stage:
        """Returns the stages at an index of the arrays."""
        return _Stage(self.forward[index], self.backward[index], self.reduced[index], self.fits[index])


class _Ended(NamedTuple):
    """Whole plans, in arrays: L, the group and the kept prefix before the last stage, and the last stage's step."""

    latency: Floats
    first: Ints
    kept: Ints
    step: Ints


class _Run:
    """The search with one number of micro-batches."""

    def __init__(
        self, search: Search, micro_batches: int, global_batch_size: int, bound: float, in_flight: int
    ) -> None:
        self.bound, self.in_flight = bound, in_flight
        self.memory_bound = False
        self.search, self.links, self.ranges = search, search.links, search.ranges
        self.rounds = micro_batches - 1
        self.batch = -(-global_batch_size // micro_batches)
        self.groups = len(search.ends)
        self.states = len(search.placements.states)
        links = self.links
        self.allowed = links.replicas <= global_batch_size // micro_batches
        entering, returning = self.ranges.entering, self.ranges.returning
        self.sent = entering[0] + entering[1] * self.batch
        self.returned = returning[0] + returning[1] * self.batch
        total = sum(search.placements.sizes)
        self.left = np.array([total - sum(state) for state in search.placements.states], float)
        # Steps whose devices are alike give a stage the same times.
        kinds = [column for kind in links.kinds for column in (kind.used, kind.share)]
        alike = np.stack([links.replicas, links.speed, *links.inner, *links.outer, *kinds])
        _, firsts, self.like = np.unique(alike, axis=1, return_index=True, return_inverse=True)
        self.like = self.like.reshape(-1)
        self.stages = self.all_stages(firsts)
        # Of each step: the one that gives all remaining devices to one more stage, and the links between the two.
        self.rest = np.maximum(links.rest[links.target], 0)
        self.complete = links.rest[links.target] >= 0
        self.rate, self.latency = self.between(np.arange(len(links.source)), self.rest)

    # ---- costs of a stage and of the transfer before it

    def all_stages(self, steps: Ints) -> _Stage:
        """Returns all stages, as arrays over (first group, step, group after the last)."""
        ranges, links, search = self.ranges, self.links, self.search
        replicas = links.replicas[steps][None, :, None]
        samples = (-(-self.batch // replicas)).astype(float)
        timed = np.maximum(samples, search.profile.least_samples)
        speed = links.speed[steps][None, :, None]
        start = search.profile.task_seconds

        def line(pair: tuple[Floats, Floats], at: Floats) -> Floats:
            return np.asarray(pair[0][:, None, :] + pair[1][:, None, :] * at)

        forward = (start + line(ranges.forward, timed)) / speed
        backward = (start + line(ranges.backward, timed)) / speed
        size = ranges.parameters[:, None, :]
        rows = (self.rounds + 1) * line(ranges.rows, samples)  # of tables, in all micro-batches
        if "rows" in search.shards:  # Rows of gradients go one way, in place of whole tables there and back.
            size = size + (rows / 2 - ranges.tables[:, None, :]) * (replicas > 1)
        reduced = links.all_reduce(steps[None, :, None], size, Plan.bucket_bytes)
        if search.overlap:
            reduced = np.maximum(0.1 * reduced, reduced - backward)
        keepers = replicas if "optimizer" in search.shards else 1
        reduced = reduced + ranges.apply[:, None, :] / speed / keepers
        stored = ranges.stored[:, None, :] - ranges.slots[:, None, :] * (1 - 1 / keepers)
        if "rows" in search.shards:
            own = ranges.table_slots * ("optimizer" not in search.shards) + ranges.tables
            stored = stored - own[:, None, :] * (1 - 1 / replicas)
            stored = stored + (rows - ranges.tables[:, None, :]) * (replicas > 1)
        in_flight = np.full(self.groups + 1, float(self.in_flight))
        in_flight[self.groups] = 1.0
        fits = np.broadcast_to(self.allowed[steps][None, :, None], forward.shape)
        for kind in links.kinds:
            # If a slice in proportion to a device's speed doesn't fit, an equal one may: others then get more.
            own = np.minimum(samples, np.ceil(samples * kind.share[steps][None, :, None]))
            running = in_flight * line(ranges.residual, own) + line(ranges.working, own)
            needed = stored + np.maximum(running, size * (replicas > 1))
            fits = fits & (~kind.used[steps][None, :, None] | (needed <= kind.memory))
        return _Stage(forward, backward, reduced, fits)

    def between(self, before: Ints, step: Ints) -> tuple[Floats, Floats]:
        """Returns seconds per byte and the latency between two consecutive steps; 0 before the first stage."""
        known = before >= 0
        if not self.links.per_byte.size:
            return np.zeros(len(step)), np.zeros(len(step))
        pair = np.where(known, self.links.pair(np.where(known, before, 0), step), 0)
        pair = np.minimum(pair, self.links.per_byte.size - 1)
        return np.where(known, self.links.per_byte[pair], 0.0), np.where(known, self.links.latency[pair], 0.0)

    def net(self, rate: Floats, latency: Floats, cut: Ints | int) -> tuple[Floats, Floats]:
        """Returns F and B of the network stage at a cut."""
        sent, returned = self.sent[cut], self.returned[cut]
        return rate * sent + latency * (sent > 0), rate * returned + latency * (returned > 0)

    # ---- the dynamic programme

    def candidates(self, keep: int) -> list[Candidate]:
        groups, states = self.groups, self.states
        shape = (groups + 1, states, _KEPT)
        value = np.full(shape, np.inf)  # the criterion of each kept prefix
        came = np.full((*shape, 3), -1)  # from which group, kept prefix and step it came
        fields = np.zeros((len(_Prefix._fields), *shape))
        last = np.full(shape, -1)  # the step that gave the last stage its devices
        valid = np.zeros(shape, bool)
        valid[0, 0, 0] = True
        ended: list[_Ended] = []
        for first in range(groups):
            if first:
                self.settle(first, came, fields, last, valid, value)
            kept, steps = np.nonzero(valid[first, self.links.source].T)
            if not steps.size:
                continue
            source = self.links.source[steps]
            prefix = _Prefix(*fields[:, first, source, kept])
            rate, latency = self.between(last[first, source, kept], steps)
            net = self.net(rate, latency, first)
            like = self.like[steps]
            self.memory_bound |= not self.stages.fits[first, np.unique(like[self.allowed[steps]]), first + 1 :].all()
            whole = self.stages.take(first, like, groups)
            grown = prefix.extended(net, whole, self.rounds).latency(self.rounds)
            grown = np.where(whole.fits, grown, np.inf)
            ended.append(_Ended(grown, np.full(steps.size, first), kept, steps))
            self.bound = min(self.bound, float(grown.min()))
            if first + 1 < groups:
                self.offer(first, kept, steps, prefix, net, value, came)
        return self.best(ended, came, keep)

    def settle(
        self, group: int, came: Ints, fields: Floats, last: Ints, valid: npt.NDArray[np.bool_], value: Floats
    ) -> None:
        """Computes the fields of the prefixes that were kept for ``group``."""
        fresh = np.isfinite(value[group])
        for kept in range(1, _KEPT):  # the same prefix isn't kept twice
            for other in range(kept):
                fresh[:, kept] &= (came[group, :, kept] != came[group, :, other]).any(axis=1)
        states, kept_ = np.nonzero(fresh)
        if not states.size:
            return
        first, slot, step = came[group, states, kept_].T
        source = self.links.source[step]
        prefix = _Prefix(*fields[:, first, source, slot])
        net = self.net(*self.between(last[first, source, slot], step), first)
        grown = prefix.extended(net, self.stages.take(first, self.like[step], group), self.rounds)
        fields[:, group, states, kept_] = grown
        last[group, states, kept_] = step
        valid[group, states, kept_] = True

    def offer(
        self,
        first: int,
        kept: Ints,
        steps: Ints,
        prefix: _Prefix,
        net: tuple[Floats, Floats],
        value: Floats,
        came: Ints,
    ) -> None:
        """Appends each possible stage to each prefix; replaces worse prefixes of their subproblems by the new ones."""
        stops = np.arange(first + 1, self.groups)
        stage = self.stages.take(first, self.like[steps], slice(first + 1, self.groups))
        forward, backward, tail = (field[:, None] for field in (prefix.forward, prefix.backward, prefix.tail))
        behind = net[1][:, None] + stage.backward
        time = stage.forward + stage.backward
        slowest = np.maximum(np.maximum(prefix.bottleneck, net[0] + net[1])[:, None], time)
        target = self.links.target[steps]
        left = np.maximum(1, self.left[target])[:, None]
        rest = self.ranges.forward[1] + self.ranges.backward[1]
        fixed = self.ranges.forward[0] + self.ranges.backward[0]
        ideal = (rest[stops, self.groups] * self.batch + fixed[stops, self.groups]) / left
        passed = forward + backward + (net[0] + net[1])[:, None] + time
        balanced = passed + self.rounds * np.maximum(slowest, ideal)
        ending = np.maximum(tail + behind, stage.reduced + stage.backward)
        balanced = balanced + np.maximum(0.0, ending - (backward + behind))
        slack = _SMALL_SLACK if self.states <= _FEW_STATES else _SLACK
        open_ = stage.fits & self.complete[steps][:, None] & (balanced < self.bound * slack)
        rows, columns = np.nonzero(open_)
        if not rows.size:
            return
        step, stop, target = steps[rows], stops[columns], target[rows]
        grown = prefix.take(rows).extended((net[0][rows], net[1][rows]), stage.take(rows, columns), self.rounds)
        last = self.stages.take(stop, self.like[self.rest[step]], self.groups)
        over = self.net(self.rate[step], self.latency[step], stop)
        planned = grown.extended(over, last, self.rounds).latency(self.rounds)
        # Subproblem by subproblem.
        number = target * (self.groups + 1) + stop
        order = np.argsort(number, kind="stable")
        number = number[order]
        heads = np.nonzero(np.r_[True, number[1:] != number[:-1]])[0]
        segment = np.repeat(np.arange(heads.size), np.diff(np.r_[heads, number.size]))
        origin = np.stack([np.full(rows.size, first), kept[rows], step], axis=1)[order]
        at = stop[order[heads]], target[order[heads]]
        for slot, criterion in enumerate((planned, balanced[rows, columns], grown.bottleneck + 1e-6 * planned)):
            ordered = criterion[order]
            least = np.minimum.reduceat(ordered, heads)
            place = np.where(ordered == least[segment], np.arange(number.size), number.size)
            chosen = np.minimum.reduceat(place, heads)
            better = np.nonzero(least < value[at[0], at[1], slot])[0]
            value[at[0][better], at[1][better], slot] = least[better]
            came[at[0][better], at[1][better], slot] = origin[chosen[better]]

    def best(self, ended: list[_Ended], came: Ints, keep: int) -> list[Candidate]:
        if not ended:
            return []
        plans = _Ended(*map(np.concatenate, zip(*ended, strict=True)))
        # The same plan may occur several times.
        order = np.argsort(plans.latency, kind="stable")[: 16 * keep]
        candidates: dict[tuple[tuple[int, ...], tuple[int, ...]], Candidate] = {}
        places: Counter[object] = Counter()
        for index in order[np.isfinite(plans.latency[order])]:
            group, slot, step = (int(array[index]) for array in plans[1:])
            bounds, path = [self.search.ends[-1]], [step]
            state = int(self.links.source[step])
            while group:
                bounds.append(self.search.ends[group - 1])
                group, slot, before = (int(number) for number in came[group, state, slot])
                path.append(before)
                state = int(self.links.source[before])
            latency = float(plans.latency[index])
            stops, steps = tuple(reversed(bounds)), tuple(reversed(path))
            candidate = Candidate(latency, self.in_flight, stops, steps)
            if (candidate.bounds, candidate.steps) not in candidates:
                kind = (candidate.bounds, tuple(self.links.replicas[list(candidate.steps)].tolist()))
                places[kind] += 1
                if places[kind] <= _PLACES:
                    candidates[candidate.bounds, candidate.steps] = candidate
            if len(candidates) == keep:
                break
        return list(candidates.values())
