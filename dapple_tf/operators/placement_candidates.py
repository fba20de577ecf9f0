"""Placements on the way, each with its simulated makespan and peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.coarsening import Coarse, coarsen
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.placement_problem import PlacementProblem, compile_problem, tails
from dapple_tf.operators.queue_order import order_by_urgency
from dapple_tf.operators.simulated_placement import peak_bytes, run_in_order
from graph_passes.split_rules import Split


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
        variant: of which graph.
        devices: of each operator.
        order: Q.
        seconds: the simulated makespan.
        over: bytes by which the devices' peaks are over their limits, in sum.
        origin: what it came from.
    """

    variant: Variant
    devices: list[int]
    order: list[int]
    seconds: float
    over: float
    origin: str

    @property
    def rank(self) -> tuple[float, float]:
        """The lower, the better: what doesn't fit is worse than all that does."""
        return (self.over, self.seconds)


def judged(variant: Variant, devices: list[int], order: list[int], origin: str) -> Candidate:
    """A candidate of given devices and queue."""
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
    """The queue for given devices by urgency: the path from an operator's start to the end of the step."""
    problem = variant.problem
    tail = tails(problem, devices)
    urgency = [tail[op] + problem.seconds[op][devices[op]] for op in range(problem.count)]
    order, _, finish = order_by_urgency(problem, devices, urgency)
    if np.isfinite(problem.topology.memory_bytes).any():
        return judged(variant, devices, order, origin)
    return Candidate(variant, devices, order, max(finish, default=0.0), 0.0, origin)


def later_sources(candidate: Candidate, lead: float = 0.1) -> Candidate:
    """A candidate whose variables are read and sent shortly before they are needed; the given one if it's better.

    What needs nothing would run, and be sent, at the start of the step, before what is needed sooner: transfers on a
    link go in the order in which they became ready.

    Args:
        candidate: where to start.
        lead: share of the step's time by which it's sent before it's needed.
    """
    problem, devices = candidate.variant.problem, candidate.devices
    start, _, _ = run_in_order(problem, devices, candidate.order)
    release = {}
    for op in range(problem.count):
        if problem.inputs[op] or problem.waits[op]:
            continue
        readers = [reader for tensor in problem.outputs[op] for reader in problem.readers[tensor]]
        if any(devices[reader] != devices[op] for reader in readers):
            release[op] = min(start[reader] for reader in readers) - lead * candidate.seconds
    if not release:
        return candidate
    tail = tails(problem, devices)
    urgency = [tail[op] + problem.seconds[op][devices[op]] for op in range(problem.count)]
    order, _, _ = order_by_urgency(problem, devices, urgency, release)
    return min(candidate, judged(candidate.variant, devices, order, candidate.origin), key=lambda one: one.rank)


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """A graph with its operators joined to pieces, some of which have to be on given devices.

    Attributes:
        problem: the pieces.
        piece: of each operator of the graph.
    """

    problem: PlacementProblem
    piece: list[int]

    @classmethod
    def of(cls, problem: PlacementProblem, pinned: np.ndarray | None = None) -> Pieces:
        """The pieces of a problem; ``pinned`` in place of its groups' devices."""
        if pinned is not None:
            problem = dataclasses.replace(problem, pinned=pinned.tolist())
        coarse: Coarse = coarsen(problem)
        return cls(compile_problem(coarse.graph, problem.topology), coarse.piece.tolist())

    def spread(self, devices: list[int]) -> list[int]:
        """Devices of the operators, given those of the pieces."""
        return [devices[piece] for piece in self.piece]


def variant_of(graph: OpGraph, topology: Topology, splits: Mapping[str, Split]) -> Variant:
    """A graph as a variant."""
    return Variant(compile_problem(graph, topology), splits)
