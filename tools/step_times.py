"""How long the steps of a training run take, data and callbacks included."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import keras
import numpy as np

WARM_UP = 3
"""Number of steps that don't count: the first one prepares the graph, and the next ones still allocate."""


class StepTimes(keras.callbacks.Callback):
    """Seconds from the end of each step to the end of the next one, so that waiting for data counts.

    Attributes:
        seconds: seconds of each step except the first one of an epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._ended: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forgets the previous epoch's last step: the time between epochs isn't training."""
        self._ended = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records the time since the previous step's end."""
        now = time.perf_counter()
        if self._ended is not None:
            self.seconds.append(now - self._ended)
        self._ended = now


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """Statistics of step times.

    Attributes:
        steps: number of measured steps.
        median: seconds of a step.
        low: lower quartile.
        high: upper quartile.
        fastest: seconds of the fastest step.
    """

    steps: int
    median: float
    low: float
    high: float
    fastest: float

    @classmethod
    def of(cls, seconds: list[float]) -> StepSummary:
        """Summarizes the seconds of at least one step."""
        low, median, high = (float(value) for value in np.percentile(seconds, (25, 50, 75)))
        return cls(len(seconds), median, low, high, min(seconds))

    def record(self, samples: int) -> dict[str, float]:
        """Returns JSON data, with the rate for ``samples`` per step."""
        return {
            "steps": self.steps,
            "step_ms": 1e3 * self.median,
            "lower_quartile_ms": 1e3 * self.low,
            "upper_quartile_ms": 1e3 * self.high,
            "fastest_ms": 1e3 * self.fastest,
            "samples_per_second": samples / self.median,
        }
