"""FD-DPS: adaptive placement of operators by dynamic critical paths (Zeng et al., Mathematics 2022, 10, 4788)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from dapple_tf.operators.coarsening import coarsen
from dapple_tf.operators.dynamic_critical_path import schedule_by_critical_path
from dapple_tf.operators.fast_t import fast_t_schedule
from dapple_tf.operators.heft import heft_schedule
from dapple_tf.operators.list_placement import placement_of
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import PlacementError, PlacementProblem, compile_problem, tails
from dapple_tf.operators.queue_order import order_by_urgency
from dapple_tf.operators.simulated_placement import simulate

_LOGGER = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Told what is being done, and which share of the search is over."""


class Candidate(NamedTuple):
    """A placement on the way.

    Attributes:
        devices: of each operator.
        order: Q.
        seconds: the simulated makespan.
        origin: what it came from.
    """

    devices: list[int]
    order: list[int]
    seconds: float
    origin: str


def fd_dps(graph: OpGraph, topology: Topology, *, split: bool = True, progress: Progress | None = None) -> OpPlacement:
    """Place operators."""
    del split
    tell = progress or (lambda text, share: None)
    problem = compile_problem(graph, topology)
    tell("Coarsening", 0.05)
    coarse = coarsen(problem)
    small = compile_problem(coarse.graph, topology)
    found = []
    for weight in (1.0, 0.0):
        devices, _ = schedule_by_critical_path(small, tails(small, None, weight))
        fine = [devices[piece] for piece in coarse.piece.tolist()]
        found.append(scheduled(problem, fine, "dynamic critical path"))
    tell("Static priorities", 0.5)
    for name, schedule in (("FastT", fast_t_schedule), ("HEFT", heft_schedule)):
        fine, order = schedule(problem)
        found.append(Candidate(fine, order, simulate(problem, fine, order).seconds, name))
        found.append(scheduled(problem, fine, name))
    best = min(found, key=lambda one: one.seconds)
    tell("Done", 1.0)
    return placement_of(problem, best.devices, best.order)


def scheduled(problem: PlacementProblem, devices: list[int], origin: str) -> Candidate:
    """The queue for given devices by urgency: the path from an operator's start to the end of the step."""
    tail = tails(problem, devices)
    urgency = [tail[op] + problem.seconds[op][devices[op]] for op in range(problem.count)]
    order, _, finish = order_by_urgency(problem, devices, urgency)
    return Candidate(devices, order, max(finish, default=0.0), origin)
