"""Data parallelism as a split: all operators that work on samples are split by the batch."""

from __future__ import annotations

import numpy as np

from dapple_tf.operators.placement_problem import PlacementError, PlacementProblem
from dapple_tf.operators.split_layouts import Layout, Layouts


def batch_layout(layouts: Layouts) -> Layout:
    """Returns the layout in which every operator on samples that can be split by the batch is; none without any."""
    problem = layouts.problem
    try:
        inside = samples_operators(problem, layouts)
    except PlacementError:
        return layouts.none()
    return [layouts.rule(op, "batch") if inside[op] else -1 for op in range(problem.count)]


def samples_operators(problem: PlacementProblem, layouts: Layouts | None = None) -> np.ndarray:
    """Returns which operators work on samples: bool [n].

    These are the operators that can be split by batch together with the heaviest one that can, and all between them.

    Args:
        problem: the operators.
        layouts: their ways to be split, if they are known already.

    Raises:
        PlacementError: there are none.
    """
    layouts = layouts or Layouts(problem, 2)
    seeds = [op for op, rules in enumerate(layouts.reads.rules) if any(rule.dimension == "batch" for rule in rules)]
    if not seeds:
        raise PlacementError(
            "no operator can be split by batch, so the step can't be data-parallel; give the graph's operators "
            "their splits"
        )
    heaviest = max(seeds, key=lambda op: (problem.mean_seconds[op], -op))
    layout = layouts.grown(layouts.none(), "batch", problem.mean_seconds[heaviest])
    inside = np.array(layout) >= 0
    before, behind = inside.copy(), inside.copy()
    for op in range(problem.count):
        needs = [*(problem.producer[tensor] for tensor in problem.inputs[op]), *problem.waits[op]]
        before[op] |= bool(before[needs].any())
    for op in range(problem.count - 1, -1, -1):
        uses = [*(reader for tensor in problem.outputs[op] for reader in problem.readers[tensor]), *problem.waiters[op]]
        behind[op] |= bool(behind[uses].any())
    return np.asarray(before & behind)
