"""Placing operators of steps with tasks: forwards and backwards run for each micro-batch, the rest once in a step."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping

import numpy as np

from dapple_tf.describe.plan import PlanError
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_graph import DisjointSets, OpGraph, OpPlacement, PlacementProblem, Topology, compile_problem
from dapple_tf.operators.simulated_placement import simulate
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.ir.node_kinds import NodeKind

_LOGGER = logging.getLogger(__name__)

MICRO_BATCHES = 4
"""The number of micro-batches by which what runs once in a step is divided, whatever a plan has."""

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

_RANKS: Mapping[NodeKind | None, int] = {
    NodeKind.FORWARD: 1,
    NodeKind.METRICS: 2,
    NodeKind.BACKWARD: 3,
    NodeKind.STATISTICS: 4,
    NodeKind.APPLY: 4,
}
"""Tasks in the order in which they run, metrics between the forward and the backward, which waits for them; what
connects tasks, such as the reading of variables, comes before."""

Kinds = Mapping[str, NodeKind | None]
"""Name of an operator -> its purpose."""

Progress = Callable[[str, float], None]
"""Receives the current activity, and the share of the work that is over."""


def kind_of(name: str, kinds: Kinds) -> NodeKind | None:
    """Returns an operator's purpose; parts, cuts and joins are named after the operator that was split."""
    while name and name not in kinds:
        name = name.rpartition("/")[0]
    return kinds.get(name)


def task_ranks(problem: PlacementProblem, kinds: Kinds) -> list[int]:
    """Returns the position of each operator's task in a step: no less than that of what the operator waits for."""
    ranks: list[int] = []
    for op, name in enumerate(problem.graph.names):
        before = [problem.producer[tensor] for tensor in problem.inputs[op]] + problem.waits[op]
        ranks.append(max([_RANKS.get(kind_of(name, kinds), 0), *(ranks[other] for other in before)]))
    return ranks


def place_average_slice(
    graph: OpGraph,
    topology: Topology,
    kinds: Kinds,
    *,
    search: Callable[..., OpPlacement] = fd_dps,
    effort: float = 1.0,
    progress: Progress | None = None,
) -> OpPlacement:
    """Places a stage's operators by FD-DPS so that an average micro-batch is short.

    Seconds of what runs once in a step, and of sending its results, count by `MICRO_BATCHES`: variables are read, cut
    and sent to their users once for all micro-batches, and updated once. FD-DPS' own problem is a step of one slice.

    In that problem, other than in a step, tasks overlap: what a bad placement of the forward leaves idle is filled with
    updates, and sending variables hides behind both. So FD-DPS searches again with variables that stay where they are,
    as parallel branches have it, and the placement is taken whose tasks take less one after the other.

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
    staying = _with_readers(average, kinds)
    searches = 1 if staying is None else 2
    placements = [search(average, topology, effort=effort, progress=_part_of(progress, 0, searches))]
    if staying is not None:
        try:
            placements.append(
                search(staying, topology, split=False, effort=effort, progress=_part_of(progress, 1, searches))
            )
        except PlanError as error:  # Variables that are read together may need more room together than there is.
            _LOGGER.info("with readers of variables on the variables' devices: %s", error)
    for placement in sorted(placements, key=lambda one: _seconds_in_turn(average, one, topology, kinds)):
        step = simulate(*_numbered(graph, placement, topology))
        if (step.peak_bytes <= topology.memory_bytes).all():
            return dataclasses.replace(placement, seconds=step.seconds, peak_bytes=tuple(step.peak_bytes.tolist()))
    # An average has less of what is made once in a step.
    _LOGGER.info("no placement for an average micro-batch fits; placing one of a whole step instead")
    return search(graph, topology, effort=effort, progress=progress)


def _part_of(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Returns what tells the progress of one of several searches as that of all of them."""
    return None if progress is None else lambda text, share: progress(text, (number + share) / count)


def _with_readers(graph: OpGraph, kinds: Kinds) -> OpGraph | None:
    """Returns the graph with whatever reads a variable on the variable's device; None if that leaves one group."""
    sets = DisjointSets(len(graph.pinned))
    pinned = graph.pinned.tolist()
    for first, second, tensor, *_ in graph.edges.tolist():
        if tensor >= 0 and kind_of(graph.names[first], kinds) is NodeKind.READ:
            one, other = (sets.find(int(graph.groups[op])) for op in (first, second))
            device = max(pinned[one], pinned[other])
            if min(pinned[one], pinned[other]) not in (-1, device):
                continue  # They are on different devices already.
            sets.union(one, other)
            pinned[one] = device
    roots = [sets.find(group) for group in range(len(pinned))]
    numbers = {root: number for number, root in enumerate(dict.fromkeys(roots))}
    if len(numbers) < 2:
        return None
    stored = np.zeros(len(numbers))
    np.add.at(stored, [numbers[root] for root in roots], graph.stored_bytes)
    return dataclasses.replace(
        graph,
        groups=np.array([numbers[roots[group]] for group in graph.groups.tolist()], np.int64),
        pinned=np.array([pinned[root] for root in numbers], np.int64),
        stored_bytes=stored,
    )


def _numbered(
    graph: OpGraph, placement: OpPlacement, topology: Topology
) -> tuple[PlacementProblem, list[int], list[int]]:
    """Returns a placement's problem, the device of each operator, and the queue."""
    problem = compile_problem(apply_splits(graph, placement.splits), topology)
    numbers = {name: number for number, name in enumerate(problem.graph.names)}
    devices = [placement.devices[name] for name in problem.graph.names]
    return problem, devices, [numbers[name] for name in placement.order]


def _seconds_in_turn(graph: OpGraph, placement: OpPlacement, topology: Topology, kinds: Kinds) -> float:
    """Returns the seconds of a slice in which each task waits on all devices for the one before it."""
    problem, devices, order = _numbered(graph, placement, topology)
    ranks = task_ranks(problem, kinds)
    queue = sorted(order, key=lambda op: ranks[op])
    waits = list(problem.waits)
    last: dict[int, int] = {}  # device -> its last operator of the tasks so far
    # Reading variables, which has no task, goes with the forward.
    for _, task in itertools.groupby(queue, lambda op: max(1, ranks[op])):
        own: dict[int, list[int]] = {}
        for op in task:
            own.setdefault(devices[op], []).append(op)
        for device, ops in own.items():
            waits[ops[0]] = [*waits[ops[0]], *(before for other, before in last.items() if other != device)]
        last |= {device: ops[-1] for device, ops in own.items()}
    return simulate(dataclasses.replace(problem, waits=waits), devices, queue).seconds
