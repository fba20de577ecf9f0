"""Placing operators of steps with tasks: forwards and backwards run for each micro-batch, the rest once in a step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

import numpy as np

from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import compile_problem
from dapple_tf.operators.simulated_placement import simulate
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.ir.node_kinds import NodeKind

_LOGGER = logging.getLogger(__name__)

MICRO_BATCHES = 4
"""The number of micro-batches by which what runs once in a step is divided, whatever a plan has.

So a range of layers is placed alike in all plans: it takes in their steps what the profile of groups says.
"""

_ONCE = frozenset(
    {
        NodeKind.READ,
        NodeKind.PACK,
        NodeKind.ALL_REDUCE,
        NodeKind.REDUCE_SCATTER,
        NodeKind.ALL_GATHER,
        NodeKind.STATISTICS,
        NodeKind.TOTALS,
        NodeKind.APPLY,
        NodeKind.CARRIED_APPLY,
        NodeKind.COUNTERS,
    }
)

Kinds = Mapping[str, NodeKind | None]
"""Name of an operator -> its purpose."""


def kind_of(name: str, kinds: Kinds) -> NodeKind | None:
    """Returns an operator's purpose; parts, cuts and joins are named after the operator that was split."""
    while name and name not in kinds:
        name = name.rpartition("/")[0]
    return kinds.get(name)


def place_average_slice(
    graph: OpGraph,
    topology: Topology,
    kinds: Kinds,
    *,
    search: Callable[..., OpPlacement] = fd_dps,
    effort: float = 1.0,
    progress: Callable[[str, float], None] | None = None,
) -> OpPlacement:
    """Places a stage's operators by FD-DPS so that an average micro-batch is short.

    Seconds of what runs once in a step, and of sending its results, count by `MICRO_BATCHES`: variables are read, cut
    and sent to their users once for all micro-batches, and updated once. FD-DPS' own problem is a step of one slice.

    Args:
        graph: the operators of one micro-batch, and those that run once.
        topology: the devices.
        kinds: the purposes of its operators.
        search: `fd_dps`, or what takes and returns the same.
        effort: share of the usual search.
        progress: receives the current activity, and the share of the search that is over.

    Returns:
        The placement, with the seconds and peaks of a step of one slice.

    Raises:
        PlanError: no placement found fits the devices' memory.
    """
    once = np.array([kind_of(name, kinds) in _ONCE for name in graph.names], bool)
    share = np.where(once, 1 / MICRO_BATCHES, 1.0)
    of_tensors = np.ones(len(graph.tensor_bytes))
    data_edges = graph.edges[graph.edges[:, 2] >= 0]
    of_tensors[data_edges[:, 2]] = share[data_edges[:, 0]]
    average = dataclasses.replace(
        graph, seconds=graph.seconds * share[:, None], tensor_bytes=graph.tensor_bytes * of_tensors
    )
    placement = search(average, topology, effort=effort, progress=progress)
    problem = compile_problem(apply_splits(graph, placement.splits), topology)
    numbers = {name: number for number, name in enumerate(problem.graph.names)}
    devices = [placement.devices[name] for name in problem.graph.names]
    step = simulate(problem, devices, [numbers[name] for name in placement.order])
    if (step.peak_bytes > topology.memory_bytes).any():  # An average has less of what is made once in a step.
        _LOGGER.info("the placement for an average micro-batch doesn't fit; placing one of a whole step instead")
        return search(graph, topology, effort=effort, progress=progress)
    return dataclasses.replace(placement, seconds=step.seconds, peak_bytes=tuple(step.peak_bytes.tolist()))
