"""What a stage's operators take on one device, and placed by FD-DPS on a group of devices: rows of `GroupCosts`."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping

import numpy as np

from dapple_tf.describe.group_costs import PlacedRange
from dapple_tf.operators.average_slice import kind_of, place_average_slice, task_ranks
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import PlacementProblem, compile_problem
from dapple_tf.operators.simulated_placement import SimulatedPlacement, simulate
from dapple_tf.operators.split_graph import apply_splits
from dapple_tf.operators.step_placer import OwnOperators
from graph_passes.analysis.split_rules import split_rules
from graph_passes.ir.node_kinds import NodeKind


def range_costs(
    own: OwnOperators,
    layers: tuple[int, int],
    samples: int,
    topology: Topology,
    costs: OperatorCosts,
    *,
    effort: float = 1.0,
    progress: Callable[[str, float], None] | None = None,
) -> PlacedRange:
    """Places the operators of some layers: one slice, forward, backward and update; nothing else runs meanwhile.

    What comes from other layers is there from the start, on any device, and what others need stays where it is made.
    Variables are read, cut and sent to where they are used once in a step, for all of its micro-batches (SplitOperators
    shares cuts): that isn't in F and B, but has seconds of its own.

    Args:
        own: the operators, those of each task between its entry and its exit.
        layers: index of the first layer, and of the one after the last.
        samples: samples of the slice.
        topology: the devices of a group; one device needs no search.
        costs: times of operators by kind of device.
        effort: share of the usual search.
        progress: receives the current activity, and the share of the search that is over.

    Raises:
        PassError: the graph has a cycle or an unknown op.
        OperatorCostsError: nothing is known of a kind of device.
    """
    bare = build_op_graph(own.placed, topology, costs, own.shapes, rules=split_rules)
    kinds = {node.name: NodeKind.of(node) for node in own.graph.node}
    seconds = float(bare.seconds.sum())
    if topology.count == 1 or not bare.count:
        placement = OpPlacement(dict.fromkeys(bare.names, 0), bare.names, {}, 0.0, (0.0,) * topology.count)
    else:
        one_slice = build_op_graph(own.bare, topology, costs, own.shapes, rules=split_rules)
        seconds = fd_dps(one_slice, topology, effort=effort, progress=progress).seconds
        placement = place_average_slice(bare, topology, kinds, effort=effort, progress=progress)
    # With the entries and exits of tasks, which stay on the first device, and are in no queue.
    whole = build_op_graph(own.graph, topology, costs, own.shapes, rules=split_rules)
    split = apply_splits(whole, placement.splits)
    problem = compile_problem(split, topology)
    devices = [placement.devices.get(name, 0) for name in split.names]
    queue = _queue(problem, placement, kinds)
    once = [kind_of(name, kinds) is NodeKind.READ for name in split.names]
    step = simulate(problem, devices, queue)
    later = simulate(_prepared(problem, once), devices, queue)
    forward = _end(split, later, kinds, NodeKind.FORWARD, 0.0)
    backward = _end(split, later, kinds, NodeKind.BACKWARD, forward)
    stored = _stored(problem, devices)
    residual = _alive(problem, devices, step, _end(split, step, kinds, NodeKind.FORWARD, 0.0), once)
    return PlacedRange(
        *layers,
        samples,
        forward=forward,
        backward=backward - forward,
        apply=max(0.0, later.seconds - backward),
        whole=seconds,
        stored=tuple(stored.tolist()),
        residual=tuple(residual.tolist()),
        working=tuple(np.maximum(0.0, step.peak_bytes - stored - residual).tolist()),
        sent=max(0.0, step.seconds - later.seconds),
        copies=tuple(_copied(problem, step, once).tolist()),
    )


def _queue(problem: PlacementProblem, placement: OpPlacement, kinds: Mapping[str, NodeKind | None]) -> list[int]:
    """Returns the queue of a step: one task after the other, each in the order of the placement."""
    names = problem.graph.names
    positions = {name: position for position, name in enumerate(placement.order)}
    ranks = task_ranks(problem, kinds)
    keys: list[tuple[int, int]] = []
    missing = [0] * problem.count
    readers: list[list[int]] = [[] for _ in names]
    for op, name in enumerate(names):
        before = [problem.producer[tensor] for tensor in problem.inputs[op]] + problem.waits[op]
        # Entries and exits, which aren't in the placement's order, come right behind what they wait for.
        least = max((keys[other][1] for other in before if ranks[other] == ranks[op]), default=-1)
        keys.append((ranks[op], positions.get(name, least)))
        missing[op] = len(before)
        for other in before:
            readers[other].append(op)
    # What an entry waits for may come late in the placement's order, and what waits for the entry early.
    ready = [(keys[op], op) for op in range(problem.count) if not missing[op]]
    heapq.heapify(ready)
    queue: list[int] = []
    while ready:
        op = heapq.heappop(ready)[1]
        queue.append(op)
        for reader in readers[op]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (keys[reader], reader))
    return queue


def _end(
    graph: OpGraph, step: SimulatedPlacement, kinds: Mapping[str, NodeKind | None], kind: NodeKind, least: float
) -> float:
    """Returns when the last operator of a kind ends: a task's exit, or the join of a gradient that was made in parts.

    That is part of the task, too: adding gradients up, which the next task waits for, needs them whole.
    """
    finish = step.finish.tolist()
    return max([least, *(end for name, end in zip(graph.names, finish, strict=True) if kind_of(name, kinds) is kind)])


def _prepared(problem: PlacementProblem, once: list[bool]) -> PlacementProblem:
    """Returns the problem of a later micro-batch: what runs once in a step is done, and sent."""
    return dataclasses.replace(
        problem,
        seconds=[[0.0] * problem.devices if done else own for done, own in zip(once, problem.seconds, strict=True)],
        size=[
            0.0 if producer >= 0 and once[producer] else size
            for producer, size in zip(problem.producer, problem.size, strict=True)
        ],
    )


def _copied(problem: PlacementProblem, step: SimulatedPlacement, once: list[bool]) -> np.ndarray:
    """Returns the bytes on each device that it has been sent of what is made ``once`` for all micro-batches."""
    copied = np.zeros(problem.devices)
    for sent in step.transfers:
        if once[problem.producer[sent.tensor]]:
            copied[sent.target] += problem.size[sent.tensor]
    return copied


def _stored(problem: PlacementProblem, devices: list[int]) -> np.ndarray:
    """Returns the bytes of variables on each device."""
    stored = np.zeros(problem.devices)
    for group, members in enumerate(problem.members):
        if members:
            stored[devices[members[0]]] += problem.stored[group]
    return stored


def _alive(
    problem: PlacementProblem, devices: list[int], step: SimulatedPlacement, moment: float, once: list[bool]
) -> np.ndarray:
    """Returns the bytes of tensors on each device that were made by a moment and are read after it.

    What is made ``once`` for all micro-batches isn't counted.
    """
    alive = np.zeros(problem.devices)
    finish = step.finish.tolist()
    arrived = {(sent.tensor, sent.target): sent.arrival for sent in step.transfers}
    for tensor, producer in enumerate(problem.producer):
        if producer < 0 or once[producer] or finish[producer] > moment:
            continue
        home = devices[producer]
        late = {devices[reader] for reader in problem.readers[tensor] if finish[reader] > moment}
        # What hasn't been sent yet is still where it was made.
        places = {device if arrived.get((tensor, device), 0.0) <= moment else home for device in late}
        for device in places:
            alive[device] += problem.size[tensor]
    return alive
