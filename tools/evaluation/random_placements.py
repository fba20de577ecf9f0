"""Placements that no search would find: any devices, any order that the step allows, any splits."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

import numpy as np

from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.analysis.split_rules import Split


def random_placement(seed: int, share: float = 0.5) -> Callable[..., OpPlacement]:
    """Returns what can stand in place of `fd_dps`: operators go anywhere, in any order.

    Args:
        seed: of what is drawn; equal seeds place equal graphs alike.
        share: share of the operators that are split, of those that can be.
    """

    def place(graph: OpGraph, topology: Topology, **_: object) -> OpPlacement:
        rng = np.random.default_rng(seed)
        splits = random_splits(graph, rng, share)
        split = apply_splits(graph, splits)
        drawn = rng.integers(0, topology.count, len(split.pinned))
        devices = np.where(split.pinned >= 0, split.pinned, drawn)[split.groups]
        return OpPlacement(
            dict(zip(split.names, devices.tolist(), strict=True)),
            tuple(split.names[index] for index in random_order(split, rng)),
            splits,
            1.0,
            (0.0,) * topology.count,
        )

    return place


def random_splits(graph: OpGraph, rng: np.random.Generator, share: float) -> dict[str, Split]:
    """Returns splits, of any dimension into any number of parts, of a share of the operators that can be split."""
    sizes = Counter(graph.groups.tolist())
    splits = {}
    for operator, rules in graph.splits.items():
        rule = rules[rng.integers(len(rules))]
        alone = sizes[int(graph.groups[operator])] == 1
        if alone and rule.length >= 2 and rng.random() < share:
            splits[graph.names[operator]] = Split(rule.dimension, int(rng.integers(2, min(4, rule.length) + 1)))
    return splits


def random_order(graph: OpGraph, rng: np.random.Generator) -> list[int]:
    """Returns any topological order."""
    followers: list[set[int]] = [set() for _ in range(graph.count)]
    waiting = [0] * graph.count
    for producer, consumer in graph.edges[:, :2].tolist():
        if consumer not in followers[producer]:
            followers[producer].add(consumer)
            waiting[consumer] += 1
    ready = [(rng.random(), index) for index in range(graph.count) if not waiting[index]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (rng.random(), follower))
    return order
