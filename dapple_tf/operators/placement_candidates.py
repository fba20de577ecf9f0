"""Placements during the search, each with its simulated makespan and peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import PlacementProblem, compile_problem, tails
from dapple_tf.operators.simulated_placement import order_by_urgency, peak_bytes, run_in_order, simulate
from graph_passes.analysis.split_rules import Split


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A graph with some operators split.

    Attributes:
        problem: its operators.
        splits: what was split.
    """

    problem: PlacementProblem
    splits: Mapping[str, Split]


class Candidate(NamedTuple):
    """A placement.

    Attributes:
        variant: its graph.
        devices: of each operator.
        order: Q.
        seconds: the simulated makespan.
        over: total bytes by which the devices' peaks exceed their limits.
        origin: how it was found.
    """

    variant: Variant
    devices: list[int]
    order: list[int]
    seconds: float
    over: float
    origin: str

    @property
    def rank(self) -> tuple[float, float]:
        """The lower, the better: a placement that doesn't fit is worse than any that does."""
        return (self.over, self.seconds)


def judged(variant: Variant, devices: list[int], order: list[int], origin: str) -> Candidate:
    """Simulates given devices and queue."""
    problem = variant.problem
    start, finish, sent = run_in_order(problem, devices, order)
    over = 0.0
    limits = problem.topology.memory_bytes
    if np.isfinite(limits).any():
        place = np.array(devices, np.int64)
        peaks = peak_bytes(problem, place, np.array(start), np.array(finish), sent)
        over = float(np.maximum(peaks - limits, 0.0).sum())
    return Candidate(variant, devices, order, max(finish, default=0.0), over, origin)


def scheduled(variant: Variant, devices: list[int], origin: str) -> Candidate:
    """Finds the queue for given devices by urgency: the path from an operator's start to the end of the step."""
    return _queued(variant, devices, _urgency(variant.problem, devices), None, origin)


def _urgency(problem: PlacementProblem, devices: list[int]) -> list[float]:
    tail = tails(problem, devices)
    return [tail[op] + problem.seconds[op][devices[op]] for op in range(problem.count)]


def _queued(
    variant: Variant, devices: list[int], urgency: list[float], release: Mapping[int, float] | None, origin: str
) -> Candidate:
    order, _, finish = order_by_urgency(variant.problem, devices, urgency, release)
    if release or np.isfinite(variant.problem.topology.memory_bytes).any():
        return judged(variant, devices, order, origin)
    return Candidate(variant, devices, order, max(finish, default=0.0), 0.0, origin)


def ordered_sources(candidate: Candidate, rounds: int = 2) -> Candidate:
    """Returns a candidate whose variables are read and sent when needed, or the given one if that is better.

    Operators without inputs would run at the start of the step, the longest path first: a large variable is sent before
    a small one that is needed sooner, since transfers on a link go in the order in which they became ready. It tries
    reads in the order in which their tensors are needed, at the start and shortly before they are needed.

    Args:
        candidate: where to start.
        rounds: number of updates of the times at which tensors are needed.
    """
    for _ in range(rounds):
        better = _with_ordered_sources(candidate)
        if better is candidate:
            break
        candidate = better
    return candidate


def _with_ordered_sources(candidate: Candidate) -> Candidate:
    problem, devices = candidate.variant.problem, candidate.devices
    start, _, _ = run_in_order(problem, devices, candidate.order)
    early = _early(problem)
    needed: dict[int, float] = {}  # when tensors that follow from variables alone have to be sent
    for op in range(problem.count - 1, -1, -1):
        if not early[op]:
            continue
        here = devices[op]
        latency, per_byte = problem.latency[here], problem.per_byte[here]
        times = [
            needed[reader] for tensor in problem.outputs[op] for reader in problem.readers[tensor] if reader in needed
        ]
        times += [
            start[reader] - latency[devices[reader]] - problem.size[tensor] * per_byte[devices[reader]]
            for tensor in problem.outputs[op]
            for reader in problem.readers[tensor]
            if devices[reader] != here
        ]
        if times:
            needed[op] = min(times)
    if not needed:
        return candidate
    urgency = _urgency(problem, devices)
    candidates = [candidate]
    for op, time in needed.items():
        urgency[op] = max(urgency[op], 2 * candidate.seconds - time)
    for lead in (None, 0.1):
        release = None if lead is None else {op: time - lead * candidate.seconds for op, time in needed.items()}
        candidates.append(_queued(candidate.variant, devices, urgency, release, candidate.origin))
    return min(candidates, key=lambda one: one.rank)


def _early(problem: PlacementProblem) -> list[bool]:
    """Returns which operators need only variables, and take less time than sending their outputs."""
    early = [False] * problem.count
    for op in range(problem.count):
        light = problem.mean_seconds[op] <= sum(problem.mean_transfer[tensor] for tensor in problem.outputs[op])
        early[op] = (light or not problem.inputs[op]) and not problem.waits[op]
        early[op] = early[op] and all(early[problem.producer[tensor]] for tensor in problem.inputs[op])
    return early


def variant_of(graph: OpGraph, topology: Topology, splits: Mapping[str, Split]) -> Variant:
    """Returns a graph as a variant."""
    return Variant(compile_problem(graph, topology), splits)


def placed_by(candidate: Candidate) -> OpPlacement:
    """Returns a candidate, simulated, as a placement of the graph without splits.

    Its peak may be above a device's limit.
    """
    problem, devices = candidate.variant.problem, candidate.devices
    seen, names = simulate(problem, devices, candidate.order), problem.graph.names
    return OpPlacement(
        devices=dict(zip(names, devices, strict=True)),
        order=tuple(names[op] for op in candidate.order),
        splits=dict(candidate.variant.splits),
        seconds=seen.seconds,
        peak_bytes=tuple(seen.peak_bytes.tolist()),
    )
