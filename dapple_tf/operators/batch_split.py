"""Data parallelism as a split: operators that work on samples are split by the batch."""

from __future__ import annotations

import numpy as np

from dapple_tf.operators.placement_problem import PlacementError, PlacementProblem
from dapple_tf.operators.split_layouts import Layout, Layouts


def batch_layouts(layouts: Layouts) -> list[Layout]:
    """Returns the layouts by which operators on samples may be split by the batch; none if none of them can be.

    The last one splits all `samples_operators` that have a rule for it. Some of these compute with vectors of channels,
    of which each replica needs all: where that makes a difference, another layout, the first, splits regions that
    aren't linked with the heaviest operator only where that seems cheaper.
    """
    try:
        linked = _linked_with_heaviest(layouts)
    except PlacementError:
        return []
    between = _between(layouts.problem, linked)
    everything = [layouts.rule(op, "batch") if between[op] else -1 for op in range(layouts.problem.count)]
    staying = {op for op, rule in enumerate(linked) if rule >= 0 and rule == everything[op]}
    fewer = layouts.pruned(everything, staying=staying)
    return [everything] if fewer == everything else [fewer, everything]


def samples_operators(problem: PlacementProblem) -> np.ndarray:
    """Returns which operators work on samples: bool [n].

    These are the operators that can be split by batch together with the heaviest one that works on samples, and all
    between them.

    Raises:
        PlacementError: there are none.
    """
    return _between(problem, _linked_with_heaviest(Layouts(problem, 2)))


def _linked_with_heaviest(layouts: Layouts) -> Layout:
    """Splits the heaviest operator on samples by batch, and what is linked with it by tensors that are cut alike."""
    seeds = [op for op in range(layouts.problem.count) if layouts.rule(op, "batch") >= 0]
    if not seeds:
        raise PlacementError(
            "no operator can be split by batch, so the step can't be data-parallel; give the graph's operators "
            "their splits"
        )
    from_batch = _from_fed_batch(layouts)
    # The rows of a variable, of its gradient and of its update are called a batch, too.
    seeds = [op for op in seeds if from_batch[op]] or seeds
    seconds = layouts.problem.mean_seconds
    layout, most = layouts.none(), max(seconds[op] for op in seeds)
    for op in seeds:
        if layout[op] < 0 and seconds[op] == most:
            layouts.grow(layout, op, layouts.rule(op, "batch"))
    return layout


def _from_fed_batch(layouts: Layouts) -> list[bool]:
    """Returns which operators need what is fed, other than by sums over the batch."""
    problem, reads = layouts.problem, layouts.reads
    needing = [False] * problem.count
    for op in range(problem.count):
        rule = layouts.rule(op, "batch")
        if rule >= 0:
            computed = {argument for _, argument in reads.inputs[op]}
            cut = {argument for argument, axis in enumerate(reads.rules[op][rule].input_axes) if axis is not None}
            needing[op] = not cut <= computed  # No operator computes what is fed.
        for tensor, _ in reads.inputs[op]:
            producer = reads.producer[tensor]
            needing[op] |= needing[producer] and not _sums_over_batch(layouts, producer)
    return needing


def _sums_over_batch(layouts: Layouts, op: int) -> bool:
    rule = layouts.rule(op, "batch")
    return rule >= 0 and all(axis is None for axis in layouts.reads.rules[op][rule].output_axes)


def _between(problem: PlacementProblem, layout: Layout) -> np.ndarray:
    """Returns which operators are split, or both need and are needed by some that are: bool [n]."""
    inside = np.array(layout) >= 0
    before, behind = inside.copy(), inside.copy()
    for op in range(problem.count):
        needs = [*(problem.producer[tensor] for tensor in problem.inputs[op]), *problem.waits[op]]
        before[op] |= bool(before[needs].any())
    for op in range(problem.count - 1, -1, -1):
        uses = [*(reader for tensor in problem.outputs[op] for reader in problem.readers[tensor]), *problem.waiters[op]]
        behind[op] |= bool(behind[uses].any())
    return np.asarray(before & behind)
