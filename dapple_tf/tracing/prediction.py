"""The predicted and the measured time of a step."""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass, field

from dapple_tf.common.text import counted, ms_text
from dapple_tf.simulation.simulation import Simulation

logger = logging.getLogger(__name__)

_WARM_UP = 3
"""Number of steps that don't count: the first ones make graphs and allocate memory."""
_REPORTED_AFTER = 20
"""Number of measured steps after which the comparison is logged."""
_TOLERANCE = 0.2
"""Relative error from which on the log entry is a warning."""


@dataclass
class Prediction:
    """The simulated and the measured time of a full step.

    Attributes:
        predicted: simulated seconds.
        steps: seconds of each measured step, without the first ones; short batches don't count.
        simulation: the simulated step; None if only its time is known.
    """

    predicted: float
    steps: list[float] = field(default_factory=list)
    simulation: Simulation | None = field(default=None, repr=False)
    _seen: int = 0

    @property
    def measured(self) -> float | None:
        """Median of the measured steps, in seconds; None before there are any."""
        return statistics.median(self.steps) if self.steps else None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None before there are measured steps."""
        return None if self.measured is None else (self.predicted - self.measured) / self.measured

    def add(self, seconds: float) -> None:
        """Records a full step; logs the comparison once, when there are enough."""
        self._seen += 1
        if self._seen <= _WARM_UP or len(self.steps) >= 10 * _REPORTED_AFTER:
            return
        self.steps.append(seconds)
        if len(self.steps) == _REPORTED_AFTER:
            off = abs(self.error or 0.0) > _TOLERANCE and not self._shares_cores()
            level, advice = (logging.WARNING, "; profile again and make a new plan") if off else (logging.INFO, "")
            logger.log(level, "%s%s", self, advice)

    def _shares_cores(self) -> bool:
        """Returns whether devices share cores: these slow each other down unlike predicted, which no profile mends."""
        if self.simulation is None:
            return False
        cluster = self.simulation.costs.cluster
        return any(map(cluster.shares_cores, range(cluster.num_servers)))

    def __str__(self) -> str:
        text = f"step predicted {ms_text(self.predicted)} ms"
        if self.measured is None or self.error is None:
            return f"{text}, not measured yet"
        return (
            f"{text}, measured {ms_text(self.measured)} ms ({self.error:+.1%}, median of "
            f"{counted(len(self.steps), 'step')})"
        )
