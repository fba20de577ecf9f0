"""Times of a model's operators and of all of them together, from a few steps without functions on one device."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from dapple_tf.measuring.flat_step import FlatStep
from dapple_tf.measuring.layers_by_operator import MeasuredOperators, StageOperators
from dapple_tf.measuring.measure_operators import operator_seconds
from dapple_tf.measuring.time_budget import TimeBudget
from dapple_tf.measuring.timed_session import StepRuns
from dapple_tf.operators.signatures import OpSignature

logger = logging.getLogger(__name__)

_ROUNDS = 3
"""Number of rounds, each with one run and one trace of each size."""


def measure_operators(
    runs: StepRuns,
    step: FlatStep,
    operators: Mapping[int, Sequence[StageOperators]],
    budget: TimeBudget,
    *,
    rounds: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> MeasuredOperators:
    """Runs a step with slices of several sizes, the smallest first, at least once and as long as there is time.

    Args:
        runs: the step in a session; its inputs are known for each size.
        step: the same step.
        operators: samples of a slice -> operators of each stage.
        budget: the remaining time. Larger slices are begun, and rounds repeated, while it lasts.
        rounds: number of rounds; by default at most `_ROUNDS`.
        tell: called with the current work.
    """
    walls: dict[int, list[float]] = {}
    traces: dict[int, list[object]] = {}

    def seconds_of_run(samples: int) -> float:
        start = time.perf_counter()
        runs.run(samples, kept=False)
        return time.perf_counter() - start

    sizes = sorted(operators)
    for number in range(rounds or _ROUNDS):
        for samples in sizes:
            known = walls.get(samples) or [samples / least * walls[least][0] for least in walls]
            # A warm-up run, a timed run and a trace.
            if walls and rounds is None and budget.left < 3 * known[0]:
                continue
            tell(f"round {number + 1} of {rounds or _ROUNDS}, slices of {samples}")
            seconds_of_run(samples)  # Prepares the graph, and gets this size's data back into the caches.
            walls.setdefault(samples, []).append(seconds_of_run(samples))
            traces.setdefault(samples, []).append(runs.trace(samples, alone=True))
    operator_times: dict[int, list[dict[str, float]]] = {}
    for samples, stats in traces.items():
        signatures: dict[str, OpSignature] = {}
        for node, (stage, name) in step.stage_nodes.items():
            made = operators[samples][stage].signatures
            if name in made:
                signatures[node] = made[name]
        operator_times[samples] = [{} for _ in operators[samples]]
        for node, seconds in operator_seconds(stats, signatures, prefix=runs.name).items():
            stage, name = step.stage_nodes[node]
            operator_times[samples][stage][name] = seconds
        count = sum(map(len, operator_times[samples]))
        logger.debug("%d of %d operators were traced with slices of %d", count, len(signatures), samples)
    return MeasuredOperators(operator_times, {samples: statistics.median(times) for samples, times in walls.items()})
