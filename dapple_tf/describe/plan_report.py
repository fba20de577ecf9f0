"""Plans as text, and the planner's report on a plan that it made."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapple_tf.common.data_files import TEXTS, Decoder, Scalar
from dapple_tf.common.text_table import ranges
from dapple_tf.common.units import counted, gib, ms_text
from graph_passes.ir.batching import Interval, split_evenly

if TYPE_CHECKING:
    from dapple_tf.describe.plan import Plan

LARGEST = 2**63
"""Bound of the numbers in a plan, which are all smaller."""


@dataclass(frozen=True)
class StageReport:
    """The planner's expectations of one stage.

    Attributes:
        layers: number of layers.
        share: its fraction of all devices' computing time.
        bubble: the fraction of the step in which its devices are idle.
        warm_up: K, the number of micro-batches in flight.
        memory_bytes: peak use of its fullest device.
        memory_limit: memory of its smallest device in bytes; None if unknown.
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
        latency: time of the plan.
        speedup: over one device with its best number of micro-batches.
        data_parallel: time of the best data parallelism on all devices; None if that isn't possible.
        data_parallel_note: why it isn't possible.
        runner_up: time of the best plan with other stages or replicas; None if there was none.
        runner_up_text: that plan, in short.
        runner_up_note: what it needs more of, where it isn't slower.
        pivot: the stage with the fewest bubbles, which sets the pace.
        limited_by: the parts of the step's critical path.
        stages: see :class:`StageReport`.
        fingerprint: the fingerprint of the plan that this report is about.
        out_of_order: what the plan adds to DAPPLE's: its policy, chunks and k; empty if nothing.
        dapple: time of the best plan under DAPPLE's policies, without chunks; None if others weren't searched, or it
            doesn't fit.
        dapple_text: that plan, in short.
        one_device: time on one device; None if its memory is too small, so that the speedup is over the sum of layers.
        restraints: what the plan's features cost the user besides time.
        idle_devices: number of devices without a task.
    """

    latency: float
    speedup: float
    data_parallel: float | None
    data_parallel_note: str
    runner_up: float | None
    runner_up_text: str
    pivot: str
    limited_by: str
    stages: tuple[StageReport, ...]
    fingerprint: str
    out_of_order: str = ""
    dapple: float | None = None
    dapple_text: str = ""
    one_device: float | None = None
    restraints: tuple[str, ...] = ()
    runner_up_note: str = ""
    idle_devices: int = 0

    def __str__(self) -> str:
        def factor(other: float) -> str:
            if 0 < other < self.latency:  # The planner prefers simpler plans to hardly faster ones.
                return f"{math.ceil(1000 * (self.latency / other - 1)) / 10:g}% faster"
            return f"{other / self.latency:.3g}x the time" if self.latency else "the same"

        parallel = f"impossible: {self.data_parallel_note}"
        if self.data_parallel is not None:
            parallel = f"{ms_text(self.data_parallel)} ms, {factor(self.data_parallel)}"
        runner_up = "none found"
        if self.runner_up is not None:
            runner_up = f"{self.runner_up_text}: {ms_text(self.runner_up)} ms, {factor(self.runner_up)}"
            runner_up += f", {self.runner_up_note}" if self.runner_up_note else ""
        memory = "" if self.one_device is not None else " with enough memory"
        idle = f"; {counted(self.idle_devices, 'device')} idle" if self.idle_devices else ""
        return (
            f"expected step {ms_text(self.latency)} ms, {self.speedup:.3g}x one device{memory}{idle}\n"
            f"pace set by {self.pivot} (the pivot stage); critical path: {self.limited_by}\n"
            f"runner-up: {runner_up}\n"
            f"best data parallelism on all devices: {parallel}{self._gain()}"
            + "".join(f"\nto know: {restraint}" for restraint in self.restraints)
        )

    def _gain(self) -> str:
        """Returns a line about the out-of-order schedule's gain over DAPPLE's; empty if none was searched."""
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
    """Returns a report from JSON data, of this version or an earlier one.

    Raises:
        ValueError: the data isn't a report.
    """
    decoder = Decoder(ValueError, {**TEXTS, int: _NUMBER, float: _NUMBER})
    if isinstance(data, dict):  # Earlier versions had these.
        gone = (("overlap", bool), ("all_reduce", str), ("formula_latency", int | float))
        assumed = [key for key, kind in gone if isinstance(data.get(key), kind)]
        data = {key: value for key, value in data.items() if key not in assumed}
    try:
        report: PlanReport = decoder.read(PlanReport, data, "report")
    except ValueError as error:
        raise ValueError(f"{error}; or remove 'report' from the file") from error
    return report


# ---- a plan as text: its settings, a row for each stage, and what else it decides


def header(plan: Plan) -> str:
    """Returns the plan's settings in a line."""
    sizes = Counter(split_evenly(plan.global_batch_size, plan.micro_batches))
    batches = " + ".join(f"{count} x {size}" for size, count in sizes.items())
    return (
        f"Plan: global batch {plan.global_batch_size}, {plan.micro_batches} "
        f"micro-batch{'es' if plan.micro_batches > 1 else ''} ({batches} samples), schedule {plan.schedule}, "
        f"recompute {recompute_text(plan)}, jit {'on' if plan.compiled else 'off'}"
        f"{', operators placed one by one' if plan.places_operators else ''}"
    )


def recompute_text(plan: Plan) -> str:
    """Returns what backwards recompute: ``boundary``, or ``boundary (stages 0-2), none (stage 3)``."""
    stages: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        stages.setdefault(stage.recompute, []).append(number)
    if len(stages) == 1:
        return plan.stages[0].recompute
    return ", ".join(f"{mode} (stage{'s' * (len(own) > 1)} {ranges(own)})" for mode, own in stages.items())


def rows(plan: Plan) -> list[list[str]]:
    """Returns a header and a row for each stage."""
    sizes = Counter(split_evenly(plan.global_batch_size, plan.micro_batches))
    titles = ["stage", "up to layer", "devices", "replicas", "slice sizes", "warm-up K"]
    report = plan.report
    lines = [titles if report is None else [*titles, "layers", "share of time", "bubble", "memory"]]
    for stage, (devices, warm_up) in enumerate(zip(plan.devices, plan.warm_up_counts(), strict=True)):
        layer = plan.cuts[stage] if stage < len(plan.cuts) else "(last)"
        slices = " | ".join(_runs(tuple(part.size for part in plan.slices(stage, Interval(0, size)))) for size in sizes)
        groups = plan.groups[stage] if plan.places_operators else [devices]
        row = [str(stage), layer, " | ".join(map(ranges, groups)), str(len(devices)), slices, str(warm_up)]
        if report is not None:
            reported = report.stages[stage]
            memory = gib(reported.memory_bytes)
            if reported.memory_limit is not None:
                memory += f" of {gib(reported.memory_limit)}"
            row[5] = str(reported.warm_up)
            row += [str(reported.layers), f"{reported.share:.1%}", f"{reported.bubble:.1%}", memory]
        lines.append(row)
    return lines


def remarks(plan: Plan) -> list[str]:
    """Returns lines about what the rows don't have, and the report."""
    cut = [f"last backwards in pieces, cut after {', '.join(plan.backward_cuts)}"] if plan.backward_cuts else []
    algorithms = [stage.all_reduce for stage in plan.stages]
    if set(algorithms) != {"flat"}:
        cut.append(f"all-reduce {', '.join(algorithms if len(set(algorithms)) > 1 else algorithms[:1])}")
    cut += ["replicas update shards of their parameters"] if "optimizer" in plan.shards else []
    cut += ["replicas keep and update shards of the rows of embeddings"] if "rows" in plan.shards else []
    cut += [f"stages {ranges(plan.relays)} hand on what they read"] if plan.relays else []
    return [*cut, *([] if plan.report is None else str(plan.report).splitlines())]


def _runs(sizes: tuple[int, ...]) -> str:
    """Abbreviates sizes: ``2+2+1``; for many replicas ``11x6 + 5x5``."""
    if len(sizes) <= 4:
        return "+".join(map(str, sizes))
    return " + ".join(f"{count}x{size}" for size, count in Counter(sizes).items())
