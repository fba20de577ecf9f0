"""Placements that no search would find, and what the simulator says of one."""

from __future__ import annotations

import numpy as np

from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import compile_problem
from dapple_tf.operators.simulated_placement import SimulatedPlacement, simulate


def simulate_placement(
    graph: OpGraph, topology: Topology, devices: np.ndarray, order: np.ndarray
) -> SimulatedPlacement:
    """Simulates a step whose graph isn't compiled yet."""
    return simulate(compile_problem(graph, topology), devices.tolist(), order.tolist())


def placed_in_halves(graph: OpGraph, topology: Topology, **_: object) -> OpPlacement:
    """What can stand in place of `fd_dps`: the first operators are on the first device, the others on the last."""
    last, half = topology.count - 1, graph.count // 2
    first_of: dict[int, int] = {}
    for number, group in enumerate(graph.groups.tolist()):
        first_of.setdefault(group, number)
    places = [last * (first_of[group] >= half) for group in range(len(graph.pinned))]
    devices = np.where(graph.pinned >= 0, graph.pinned, places)[graph.groups]
    by_name = dict(zip(graph.names, devices.tolist(), strict=True))
    return OpPlacement(by_name, graph.names, {}, 1.0, (0.0,) * topology.count)
