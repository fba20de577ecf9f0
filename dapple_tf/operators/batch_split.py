"""Data parallelism as a split: all operators that work on samples are split by the batch."""

from __future__ import annotations

import numpy as np

from dapple_tf.operators.placement_problem import PlacementError, PlacementProblem
from dapple_tf.operators.split_layouts import Layout, Layouts


def batch_layout(layouts: Layouts) -> Layout:
    """Returns the layout in which operators on samples are split by the batch; without splits if none can be.

    What can be split by batch together with the heaviest operator is, along the axis by which its neighbours' parts are
    cut. Of what lies between, regions of their own, such as those behind an operator that can't be split, are split
    where that is cheaper: some compute with vectors of channels rather than samples, of which each replica needs all.
    """
    try:
        linked = _linked_with_heaviest(layouts)
    except PlacementError:
        return layouts.none()
    between = _between(layouts.problem, linked)
    layout = [layouts.rule(op, "batch") if between[op] else -1 for op in range(layouts.problem.count)]
    split = {op for op, rule in enumerate(layout) if rule >= 0 and linked[op] >= 0}
    for op in split:
        layout[op] = linked[op]  # Samples needn't be along the first axis.
    return layouts.pruned(layout, kept=split)


def samples_operators(problem: PlacementProblem) -> np.ndarray:
    """Returns which operators work on samples: bool [n].

    These are the operators that can be split by batch together with the heaviest one that can, and all between them.

    Raises:
        PlacementError: there are none.
    """
    return _between(problem, _linked_with_heaviest(Layouts(problem, 2)))


def _linked_with_heaviest(layouts: Layouts) -> Layout:
    """Splits the heaviest operator that can be by batch, and what is linked with it by tensors that are cut alike."""
    seconds = layouts.problem.mean_seconds
    seeds = [op for op in range(layouts.problem.count) if layouts.rule(op, "batch") >= 0]
    if not seeds:
        raise PlacementError(
            "no operator can be split by batch, so the step can't be data-parallel; give the graph's operators "
            "their splits"
        )
    return layouts.grown(layouts.none(), "batch", max(seconds[op] for op in seeds))


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
