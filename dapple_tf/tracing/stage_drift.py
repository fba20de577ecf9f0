"""Comparison of stages' times with their predictions."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping

from dapple_tf.simulation.simulation import Simulation
from dapple_tf.tracing.step_profile import grouped, simulated_tasks
from graph_passes.ir.tasks import Task

logger = logging.getLogger(__name__)

TOLERANCE = 0.2
"""Relative difference from which on a stage is off its prediction."""
_SMALLEST = 0.5e-3
"""Seconds of a stage per micro-batch below which there is no warning: starting tasks is a good part of these, and
varies with the load of the machine."""


class StageDrift:
    """Compares measured steps with a simulated one, stage by stage, and warns.

    A stage's time is that of one micro-batch: the sum of the medians of its F and B, or F, Bx and Bw. Simulated times
    include the slowdown by other tasks on shared cores. A warning takes two steps in a row,
    since anything may slow down a single step. A stage is warned of again only after it
    has been near its prediction.

    Attributes:
        predicted: stage -> predicted seconds.
        off: stages that have been warned of.
        suspected: stages that were off in the last step without a warning so far.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.predicted = stage_seconds(simulated_tasks(simulation))
        self.off: set[int] = set()
        self.suspected: set[int] = set()

    def check(self, tasks: Mapping[Task, float]) -> list[str]:
        """Checks one measured step, and logs its warnings.

        Args:
            tasks: seconds of each task, corrected for tracing.

        Returns:
            The warnings.
        """
        warnings = []
        measured = stage_seconds(tasks)
        off = {stage for stage, seconds in measured.items() if self._is_off(stage, seconds)}
        for stage in sorted(off & self.suspected):
            seconds, expected = measured[stage], self.predicted[stage]
            warnings.append(
                f"stage {stage} takes {seconds * 1e3:.3g} ms for a micro-batch, {abs(seconds / expected - 1):.0%} "
                f"{'more' if seconds > expected else 'less'} than the {expected * 1e3:.3g} ms that were predicted: "
                f"profile the model again (dapple.profile(..., cache=False)) and make a new plan"
            )
            logger.warning("%s", warnings[-1])
        for stage in sorted(self.off - off):
            logger.info("stage %d takes the time that was predicted again", stage)
        self.off = (self.off & off) | (off & self.suspected)
        self.suspected = off - self.off
        return warnings

    def _is_off(self, stage: int, seconds: float) -> bool:
        expected = self.predicted.get(stage, 0.0)
        return expected > 0 and max(seconds, expected) >= _SMALLEST and abs(seconds - expected) > TOLERANCE * expected


def stage_seconds(tasks: Mapping[Task, float]) -> dict[int, float]:
    """Returns stage -> seconds per micro-batch: medians over micro-batches and replicas, summed over phases."""
    seconds: dict[int, float] = {}
    for (stage, _), times in sorted(grouped(tasks).items()):
        seconds[stage] = seconds.get(stage, 0.0) + statistics.median(times)
    return seconds
