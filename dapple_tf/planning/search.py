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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.placement import Links, Placements
from dapple_tf.simulation.cost import MIN_CUT_SHARE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_KEPT = 3
"""Number of prefixes kept for each subproblem."""
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
    """
    samples = profile.batch_sizes[-1]
    times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers]
    total = sum(times) or 1.0
    bytes_ = [sum(cost.at(samples) for cost in pair) for pair in profile.crossing]
    most = max(bytes_) or 1.0
    ends = list(range(1, len(profile.layers) + 1))
    work = list(times)
    while len(ends) > max(1, limit):
        loss = [(work[i] + work[i + 1]) / total * (2 - bytes_[ends[i] - 1] / most) for i in range(len(ends) - 1)]
        drop = loss.index(min(loss))
        del ends[drop]
        work[drop : drop + 2] = [work[drop] + work[drop + 1]]
    return tuple(ends)


@dataclasses.dataclass(frozen=True)
class _Ranges:
    """Sums over the layers of each possible stage, as arrays over (first group, group after the last)."""

    forward: tuple[Floats, Floats]
    backward: tuple[Floats, Floats]
    residual: tuple[Floats, Floats]
    working: tuple[Floats, Floats]
    parameters: Floats
    stored: Floats
    apply: Floats
    entering: tuple[Floats, Floats]  # per first group: bytes of the boundary before it
    returning: tuple[Floats, Floats]


class Search:
    """The search for one profile and cluster; `run` it for each number of micro-batches.

    Args:
        profile: the layers.
        placements: the ways to hand out devices.
        links: their speeds and links.
        ends: positions at which cuts are considered, the model's end last; see :func:`coarsened`.
        overlap: whether all-reduce overlaps with the stage's last backward.
        recompute: the mode: what B computes again.
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
    ) -> None:
        self.profile, self.placements, self.links, self.ends = profile, placements, links, tuple(ends)
        self.overlap = overlap
        self.ranges = _ranges(profile, self.ends, recompute)
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


def _ranges(profile: Profile, ends: Sequence[int], recompute: str) -> _Ranges:
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
    extra = sums([layer.slot_bytes + layer.state_bytes for layer in profile.layers])
    for group in profile.shared:
        users = np.zeros(len(profile.layers))
        users[list(group.layers)] = 1
        used = sums(users) > 0
        parameters = parameters + used * group.parameter_bytes
        extra = extra + used * group.slot_bytes
    apply = sums([layer.apply_seconds for layer in profile.layers])
    return _Ranges(
        forward, backward, residual, (working[0], working[1]), parameters, 2 * parameters + extra, apply,
        entering, returning,
    )  # fmt: skip


def _needed_later(profile: Profile, starts: Sequence[int]) -> tuple[Floats, Floats]:
    """Returns the time of the part of F that each possible stage's B needn't compute again, as arrays of `_Ranges`.

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


class _Prefix(NamedTuple):
    """The stages planned so far, as formula 2 needs them, in arrays."""

    forward: Floats  # sum of F
    backward: Floats  # sum of B
    tail: Floats  # max over stages s of AR_s + sum of B from s to the end
    pivot: Floats  # F_Q + B_Q
    warm_up: Floats  # T_w
    ending: Floats  # T_e
    between: Floats  # sum of F + B of the stages after Q
    after: Floats  # sum of B of the stages from Q on
    bottleneck: Floats  # max of F + B

    def latency(self, rounds: int) -> Floats:
        """Returns L, with ``rounds`` = M - 1."""
        return self.warm_up + rounds * self.pivot + self.ending

    def extended(
        self, net: tuple[Floats, Floats], stage: tuple[Floats, Floats], reduced: Floats, rounds: int
    ) -> _Prefix:
        """Appends a network stage and a computation stage, and finds the pivot by algorithm 1.

        The new stage is the first guess of Q; then the network stage; then the prefix's own Q stands for all of its
        stages ("use Q_j instead in the iterative process").
        """
        net_time, time = net[0] + net[1], stage[0] + stage[1]
        forward = self.forward + net[0] + stage[0]
        backward = self.backward + net[1] + stage[1]
        behind = net[1] + stage[1]
        tail = np.maximum(self.tail + behind, reduced + stage[1])
        on_net = rounds * net_time > rounds * time
        pivot = np.where(on_net, net_time, time)
        gap = self.between + np.where(on_net, 0.0, net_time)
        on_old = rounds * self.pivot > rounds * pivot + gap
        return _Prefix(
            forward=forward,
            backward=backward,
            tail=tail,
            pivot=np.where(on_old, self.pivot, pivot),
            warm_up=np.where(on_old, self.warm_up, np.where(on_net, self.forward + net[0], forward)),
            ending=np.where(
                on_old,
                np.maximum(self.ending, reduced - (self.after + behind)),
                np.where(on_net, np.maximum(self.tail + net[1], reduced - behind), tail),
            ),
            between=np.where(on_old, self.between + net_time + time, np.where(on_net, time, 0.0)),
            after=np.where(on_old, self.after + behind, np.where(on_net, behind, stage[1])),
            bottleneck=np.maximum(self.bottleneck, np.maximum(net_time, time)),
        )


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
        self.allowed = self.links.replicas <= global_batch_size // micro_batches
        profile, replicas = search.profile, self.links.replicas
        samples = -(-self.batch // replicas)
        self.samples = samples.astype(float)
        self.timed = np.maximum(samples, profile.least_samples).astype(float)
        entering, returning = self.ranges.entering, self.ranges.returning
        self.sent = entering[0] + entering[1] * self.batch
        self.returned = returning[0] + returning[1] * self.batch
        total = sum(search.placements.sizes)
        self.left = np.array([total - sum(state) for state in search.placements.states], float)

    # ---- costs of a stage and of the transfer before it

    def stage(self, first: Ints | int, stop: Ints, step: Ints) -> tuple[Floats, Floats, Floats, npt.NDArray[np.bool_]]:
        """Returns F, B, AR and whether it fits in memory, for groups ``first`` to ``stop`` on a ``step``'s devices."""
        ranges, links = self.ranges, self.links
        speed, timed, samples = links.speed[step], self.timed[step], self.samples[step]
        start = self.search.profile.task_seconds
        forward = (start + ranges.forward[0][first, stop] + ranges.forward[1][first, stop] * timed) / speed
        backward = (start + ranges.backward[0][first, stop] + ranges.backward[1][first, stop] * timed) / speed
        size = ranges.parameters[first, stop]
        reduced = links.all_reduce(step, size, Plan.bucket_bytes)
        if self.search.overlap:
            reduced = np.maximum(0.1 * reduced, reduced - backward)
        reduced = reduced + ranges.apply[first, stop] / speed
        kept = ranges.residual[0][first, stop] + ranges.residual[1][first, stop] * samples
        working = ranges.working[0][first, stop] + ranges.working[1][first, stop] * samples
        running = np.where(stop == self.groups, 1, self.in_flight) * kept + working
        reducing = size * (links.replicas[step] > 1)
        needed = ranges.stored[first, stop] + np.maximum(running, reducing)
        fits = (needed <= links.memory[step]) & self.allowed[step]
        return forward, backward, reduced, fits

    def net(self, before: Ints, step: Ints, cut: Ints | int) -> tuple[Floats, Floats]:
        """Returns F and B of the network stage between two consecutive stages; 0 before the first stage."""
        known = before >= 0
        pair = np.where(known, self.links.pair(np.where(known, before, 0), step), 0)
        pair = np.minimum(pair, max(0, self.links.per_byte.size - 1))
        if not self.links.per_byte.size:
            zero = np.zeros(np.broadcast_shapes(before.shape, step.shape))
            return zero, zero
        rate = np.where(known, self.links.per_byte[pair], 0.0)
        latency = np.where(known, self.links.latency[pair], 0.0)
        sent, returned = self.sent[cut], self.returned[cut]
        return rate * sent + latency * (sent > 0), rate * returned + latency * (returned > 0)

    # ---- the dynamic programme

    def candidates(self, keep: int) -> list[Candidate]:
        groups, states = self.groups, self.states
        shape = (groups + 1, states, _KEPT)
        value = np.full(shape, np.inf)  # the criterion of each kept prefix
        came = np.full((*shape, 3), -1)  # from which group, kept prefix and step it came
        fields = {name: np.zeros(shape) for name in _Prefix._fields}
        last = np.full(shape, -1)  # the step that gave the last stage its devices
        valid = np.zeros(shape, bool)
        valid[0, 0, 0] = True
        ended: list[tuple[Floats, int, int, Ints]] = []
        for first in range(groups):
            if first:
                self.settle(first, came, fields, last, valid, value)
            for kept in range(_KEPT):
                steps = np.nonzero(valid[first, self.links.source, kept])[0]
                if not steps.size:
                    continue
                source = self.links.source[steps]
                stops = np.arange(first + 1, groups + 1)
                prefix = _Prefix(*(fields[name][first, source, kept][:, None] for name in _Prefix._fields))
                net = self.net(last[first, source, kept], steps, first)
                forward, backward, reduced, fits = self.stage(first, stops[None, :], steps[:, None])
                grown = prefix.extended((net[0][:, None], net[1][:, None]), (forward, backward), reduced, self.rounds)
                self.memory_bound |= not fits[self.allowed[steps]].all()
                whole = np.where(fits[:, -1], grown.latency(self.rounds)[:, -1], np.inf)
                ended.append((whole, first, kept, steps))
                self.bound = min(self.bound, float(whole.min()))
                if stops.size > 1:
                    part = _Prefix(*(array[:, :-1] for array in grown))
                    self.offer(first, kept, steps, stops[:-1], part, fits[:, :-1], value, came)
        return self.best(ended, came, keep)

    def settle(
        self, group: int, came: Ints, fields: dict[str, Floats], last: Ints, valid: npt.NDArray[np.bool_], value: Floats
    ) -> None:
        """Computes the fields of the prefixes that were kept for ``group``."""
        for kept in range(_KEPT):
            states = np.nonzero(np.isfinite(value[group, :, kept]))[0]
            if kept:  # the same prefix isn't kept twice
                same = [(came[group, states] == came[group, states, other][:, None]).all(axis=2)[:, kept]
                        for other in range(kept)]  # fmt: skip
                states = states[~np.any(same, axis=0)]
            if not states.size:
                continue
            first, slot, step = (came[group, states, kept, part] for part in range(3))
            source = self.links.source[step]
            prefix = _Prefix(*(fields[name][first, source, slot] for name in _Prefix._fields))
            net = self.net(last[first, source, slot], step, first)
            forward, backward, reduced, _ = self.stage(first, np.full(states.size, group), step)
            grown = prefix.extended(net, (forward, backward), reduced, self.rounds)
            for name, array in zip(_Prefix._fields, grown, strict=True):
                fields[name][group, states, kept] = array
            last[group, states, kept] = step
            valid[group, states, kept] = True

    def offer(
        self,
        first: int,
        kept: int,
        steps: Ints,
        stops: Ints,
        grown: _Prefix,
        fits: npt.NDArray[np.bool_],
        value: Floats,
        came: Ints,
    ) -> None:
        """Replaces worse prefixes of their subproblems by new ones."""
        target = self.links.target[steps]
        rest = self.links.rest[target]
        open_ = fits & (rest >= 0)[:, None]
        rest = np.maximum(rest, 0)
        net = self.net(steps[:, None], rest[:, None], stops[None, :])
        ends = np.full(stops.shape, self.groups)
        forward, backward, reduced, _ = self.stage(stops[None, :], ends[None, :], rest[:, None])
        planned = grown.extended(net, (forward, backward), reduced, self.rounds).latency(self.rounds)
        left = np.maximum(1, self.left[target])[:, None]
        ideal = (self.ranges.forward[1] + self.ranges.backward[1])[stops, ends] * self.batch / left
        ideal = ideal + (self.ranges.forward[0] + self.ranges.backward[0])[stops, ends] / left
        balanced = grown.forward + grown.backward + self.rounds * np.maximum(grown.bottleneck, ideal)
        balanced = balanced + np.maximum(0.0, grown.tail - grown.backward)
        open_ &= balanced < self.bound * (_SMALL_SLACK if self.states <= _FEW_STATES else _SLACK)
        for slot, criterion in enumerate((planned, balanced, grown.bottleneck + 1e-6 * planned)):
            self.keep(first, kept, steps, stops, np.where(open_, criterion, np.inf), slot, value, came)

    def keep(
        self,
        first: int,
        kept: int,
        steps: Ints,
        stops: Ints,
        criterion: Floats,
        slot: int,
        value: Floats,
        came: Ints,
    ) -> None:
        order = np.argsort(self.links.target[steps], kind="stable")
        steps, criterion = steps[order], criterion[order]
        target = self.links.target[steps]
        heads = np.nonzero(np.r_[True, target[1:] != target[:-1]])[0]
        least = np.minimum.reduceat(criterion, heads, axis=0)
        segment = np.cumsum(np.r_[True, target[1:] != target[:-1]]) - 1
        number = np.where(criterion == least[segment], np.arange(len(steps))[:, None], len(steps))
        chosen = np.minimum.reduceat(number, heads, axis=0)
        states = target[heads]
        current = value[stops[None, :], states[:, None], slot]
        better = least < current
        where = np.nonzero(better)
        if not where[0].size:
            return
        at = (stops[where[1]], states[where[0]], np.full(where[0].size, slot))
        value[at] = least[where]
        came[at] = np.stack([np.full(where[0].size, first), np.full(where[0].size, kept), steps[chosen[where]]], axis=1)

    def best(self, ended: list[tuple[Floats, int, int, Ints]], came: Ints, keep: int) -> list[Candidate]:
        if not ended:
            return []
        latencies = np.concatenate([latency for latency, _, _, _ in ended])
        owner = np.repeat(np.arange(len(ended)), [latency.size for latency, _, _, _ in ended])
        last = np.concatenate([steps for _, _, _, steps in ended])
        # The same plan may occur several times.
        order = np.argsort(latencies, kind="stable")[: 4 * keep]
        entries = [
            (float(latencies[index]), *ended[owner[index]][1:3], int(last[index]))
            for index in order
            if np.isfinite(latencies[index])
        ]
        candidates: dict[tuple[tuple[int, ...], tuple[int, ...]], Candidate] = {}
        for latency, first, kept, step in entries:
            bounds, path = [self.search.ends[-1]], [step]
            group, slot, state = first, kept, int(self.links.source[step])
            while group:
                bounds.append(self.search.ends[group - 1])
                group, slot, before = (int(number) for number in came[group, state, slot])
                path.append(before)
                state = int(self.links.source[before])
            candidate = Candidate(latency, self.in_flight, tuple(reversed(bounds)), tuple(reversed(path)))
            candidates.setdefault((candidate.bounds, candidate.steps), candidate)
            if len(candidates) == keep:
                break
        return list(candidates.values())
