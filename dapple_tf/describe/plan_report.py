"""What the planner says about a plan that it made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dapple_tf.data_files import TEXTS, Decoder, Scalar
from dapple_tf.units import ms_text

LARGEST = 2**63
"""No number in a plan is as large."""


@dataclass(frozen=True)
class StageReport:
    """What the planner expects of one stage.

    Attributes:
        layers: number of layers.
        share: its part of all devices' computing time.
        bubble: the part of the step in which its devices are idle.
        warm_up: K, the micro-batches in flight.
        memory_bytes: peak use of its fullest device.
        memory_limit: memory of its smallest device; None where unknown.
    """

    layers: int
    share: float
    bubble: float
    warm_up: int
    memory_bytes: float
    memory_limit: int | None


@dataclass(frozen=True)
class PlanReport:
    """Why the planner chose a plan. Times are simulated seconds of one step.

    Attributes:
        latency: of the plan.
        formula_latency: L of formula 2 (DAPPLE, section 4.1), which the search went by.
        speedup: over one device, as fast as it is with any number of micro-batches.
        data_parallel: of data parallelism on all devices; None if that isn't possible.
        data_parallel_note: why not.
        runner_up: of the best plan with other stages or replicas; None if there was none.
        runner_up_text: that plan, in short.
        pivot: the stage with the fewest bubbles, which sets the pace.
        limited_by: what the step's critical path consists of.
        overlap: whether it was assumed that gradients are all-reduced during the stage's last backward.
        all_reduce: the assumed algorithm.
        stages: see :class:`StageReport`.
        fingerprint: that of the plan that this was said about.
        out_of_order: what the plan has besides DAPPLE's: its policy, chunks and k; empty if nothing.
        dapple: of the best plan under DAPPLE's policies, without chunks; None where others weren't sought, or it
            doesn't fit.
        dapple_text: that plan, in short.
        one_device: of one device; None where that hasn't the memory, and the speedup is over the sum of its layers.
    """

    latency: float
    formula_latency: float
    speedup: float
    data_parallel: float | None
    data_parallel_note: str
    runner_up: float | None
    runner_up_text: str
    pivot: str
    limited_by: str
    overlap: bool
    all_reduce: str
    stages: tuple[StageReport, ...]
    fingerprint: str
    out_of_order: str = ""
    dapple: float | None = None
    dapple_text: str = ""
    one_device: float | None = None

    def __str__(self) -> str:
        def factor(other: float) -> str:
            return f"{other / self.latency:.3g}x the time" if self.latency else "the same"

        parallel = f"impossible: {self.data_parallel_note}"
        if self.data_parallel is not None:
            parallel = f"{ms_text(self.data_parallel)} ms, {factor(self.data_parallel)}"
        runner_up = "none found"
        if self.runner_up is not None:
            runner_up = f"{self.runner_up_text}: {ms_text(self.runner_up)} ms, {factor(self.runner_up)}"
        assumed = f" (if {self.all_reduce} all-reduce overlaps with the last backward)" if self.overlap else ""
        memory = "" if self.one_device is not None else " with enough memory"
        return (
            f"expected step {ms_text(self.latency)} ms, {self.speedup:.3g}x one device{memory}{assumed}\n"
            f"pace set by {self.pivot} (the pivot stage); critical path: {self.limited_by}\n"
            f"runner-up: {runner_up}\n"
            f"data parallelism on all devices: {parallel}{self._gain()}"
        )

    def _gain(self) -> str:
        """What the out-of-order schedule gained over DAPPLE's, on lines of its own; empty if none was sought."""
        if self.dapple is None and not self.out_of_order:
            return ""
        if not self.out_of_order:
            return "\nout-of-order backprop: gains nothing over DAPPLE's schedule"
        text = f"\nout-of-order backprop: {self.out_of_order}"
        if self.dapple is not None and self.latency:
            text += f"; {self.dapple / self.latency:.3g}x as fast as {self.dapple_text}: {ms_text(self.dapple)} ms"
        return text


_NUMBER = Scalar(
    lambda value: type(value) in (int, float) and abs(value) < LARGEST and not math.isnan(value), "a number"
)


def parse_report(data: object) -> PlanReport:
    """A report from JSON data, of this version or an earlier one.

    Raises:
        ValueError: it isn't one.
    """
    decoder = Decoder(ValueError, {**TEXTS, int: _NUMBER, float: _NUMBER})
    try:
        report: PlanReport = decoder.read(PlanReport, data, "report")
    except ValueError as error:
        raise ValueError(f"{error}; or remove 'report' from the file") from error
    return report
