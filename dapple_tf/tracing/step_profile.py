"""One measured step beside what was planned and simulated: the result of ``PipelinedModel.profile_step``."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dapple_tf.describe.plan import Plan
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.text_table import table
from dapple_tf.tracing.step_parts import NAMES, StepParts
from dapple_tf.tracing.step_trace import MeasuredStep
from dapple_tf.units import gib, ms_text
from dapple_tf.view.files import save_timelines
from dapple_tf.view.timeline import Timeline
from graph_passes.ir.tasks import Phase, Task

_MOST_SLOWDOWN = 4.0
"""Tracing makes devices hardly slower than that."""


class PhaseTime(NamedTuple):
    """How long the tasks of one phase of a stage took.

    Attributes:
        stage: the stage.
        phase: the phase.
        measured: mean seconds of its tasks, accumulation of gradients included, as they are without tracing.
        predicted: the same as simulated; None without a profile.
    """

    stage: int
    phase: Phase
    measured: float
    predicted: float | None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured, as in `Prediction`; None where nothing was predicted or measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class StepProfile:
    """One step, measured, and what was expected of it.

    Attributes:
        step: the measured step.
        plan: the plan that it ran by.
        simulation: what was simulated; None without a profile, and for a batch that isn't full.
        planned: the schedule by itself, see `dapple_tf.simulation.planned.planned`; None for a batch that isn't full.
        untraced_seconds: the same step without tracing; None if that isn't known.
    """

    step: MeasuredStep
    plan: Plan
    simulation: Simulation | None = field(default=None, repr=False)
    planned: Timeline | None = field(default=None, repr=False)
    untraced_seconds: float | None = None

    @functools.cached_property
    def measured(self) -> Timeline:
        """The step as it was measured; it says what it takes without being traced."""
        return dataclasses.replace(self.step.timeline, untraced=self.untraced_seconds)

    @functools.cached_property
    def simulated(self) -> Timeline | None:
        """The step as it was simulated."""
        return None if self.simulation is None else self.simulation.drawn()

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Planned, simulated and measured, as far as they are there."""
        return tuple(found for found in (self.planned, self.simulated, self.measured) if found is not None)

    @property
    def parts(self) -> Mapping[int, StepParts]:
        """Device -> where its time went."""
        return self.step.parts

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each stage the part of the step in which its devices compute nothing, 0 to 1."""
        found = self.measured.bubbles
        return tuple(statistics.fmean(found[device] for device in devices) for devices in self.plan.working_devices)

    @property
    def peak_bytes(self) -> Mapping[int, float]:
        """Device -> the most memory in use."""
        return self.measured.peak_bytes

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is doubtful about the measurement; empty if nothing is."""
        return self.step.remarks

    @property
    def tracing(self) -> float:
        """How many times as long devices took because they were traced: every operation takes a little longer."""
        return 1.0 if self.untraced_seconds is None else max(1.0, slowdown(self.step, self.untraced_seconds))

    @functools.cached_property
    def phases(self) -> tuple[PhaseTime, ...]:
        """Mean times of the tasks of each stage and phase, beside the simulated ones."""
        measured = grouped(self.step.tasks)
        predicted = {} if self.simulation is None else grouped(simulated_tasks(self.simulation))
        return tuple(
            PhaseTime(
                stage,
                phase,
                statistics.fmean(times) / self.tracing,
                statistics.fmean(predicted[stage, phase]) if (stage, phase) in predicted else None,
            )
            for (stage, phase), times in sorted(measured.items())
        )

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the report (``profile.txt``) and the timelines.

        They are text (``timeline.txt``), images (``timeline.svg``, ``timeline.png``), a page (``timeline.html``) and a
        trace for Chrome and Perfetto (``trace.json``). Images are left out where matplotlib isn't installed.

        Args:
            directory: where to; made if need be.
        """
        path = pathlib.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        title = f"A step of {self.plan.num_stages} stages by {self.plan.schedule}"
        (path / "profile.txt").write_text(f"{self}\n", encoding="utf-8")
        save_timelines(self.timelines, path, title)

    def _repr_html_(self) -> str:
        """Returns the step in a notebook: its tables, and the timelines as a picture."""
        from dapple_tf.view.notebook import Table, notebook_html  # needed in notebooks alone

        tables = [
            Table("milliseconds of each device", self._part_rows()),
            Table("tasks, means in milliseconds", self._phase_rows()),
            Table("stages", self._stage_rows()),
        ]
        remarks = [f"note: {remark}" for remark in self.remarks]
        return notebook_html(str(self).partition("\n")[0], tables, self.timelines, remarks)

    def __str__(self) -> str:
        step = self.measured
        lines = [f"step {_ms(step.latency)} ms" + _rate(step)]
        if self.untraced_seconds is not None:
            lines[0] += f", {_ms(self.untraced_seconds)} ms without tracing"
        if self.simulated is not None:
            error = self.simulated.latency / (self.untraced_seconds or step.latency) - 1
            lines[0] += f"; simulated {_ms(self.simulated.latency)} ms ({error:+.1%})"
        lines += ["", "milliseconds of each device:", table(self._part_rows())]
        shorter = f", {self.tracing:.2f} times shorter than traced" if self.tracing > 1 else ""
        lines += ["", f"tasks, means in milliseconds{shorter}:", table(self._phase_rows())]
        lines += ["", "stages:", table(self._stage_rows())]
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])

    def _part_rows(self) -> Sequence[Sequence[str]]:
        peaks = self.peak_bytes
        titles = {"all_reduce": "all-reduce", "before": "host before", "after": "host after"}
        rows = [("", *(titles.get(name, name) for name in NAMES), "peak memory")]
        for device, parts in self.parts.items():
            peak = gib(peaks[device]) if device in peaks else "unknown"
            rows.append((self.measured.devices[device], *(_ms(getattr(parts, name)) for name in NAMES), peak))
        return rows

    def _phase_rows(self) -> Sequence[Sequence[str]]:
        rows = [("stage", "task", "measured", "simulated", "error")]
        for found in self.phases:
            predicted = "" if found.predicted is None else _ms(found.predicted)
            error = "" if found.error is None else f"{found.error:+.1%}"
            rows.append((str(found.stage), found.phase.value, _ms(found.measured), predicted, error))
        return rows if self.simulation is not None else [row[:3] for row in rows]

    def _stage_rows(self) -> Sequence[Sequence[str]]:
        rows = [("stage", "devices", "bubble", "simulated")]
        for stage, bubble in enumerate(self.bubbles):
            simulated = "" if self.simulation is None else f"{self.simulation.bubbles[stage]:.1%}"
            rows.append((str(stage), " ".join(map(str, self.plan.working_devices[stage])), f"{bubble:.1%}", simulated))
        return rows if self.simulation is not None else [row[:3] for row in rows]


def slowdown(step: MeasuredStep, untraced_seconds: float) -> float:
    """Returns how many times as long as without tracing devices took for a step.

    The host takes as long for its part, traced or not, unless it was held up in just the traced step, as it happens on
    a busy machine: where hardly anything were left for the devices, all of the step counts as slower.

    Args:
        step: the traced step.
        untraced_seconds: the time of the same step without tracing.
    """
    parts = next(iter(step.parts.values()))
    working = parts.total - parts.before - parts.after
    if not working:
        return 1.0
    left = untraced_seconds - parts.before
    if left < working / _MOST_SLOWDOWN:
        left = untraced_seconds * working / (parts.before + working)
    return working / left


def grouped(tasks: Mapping[Task, float]) -> dict[tuple[int, Phase], list[float]]:
    """(stage, phase) -> the times of its tasks."""
    found: dict[tuple[int, Phase], list[float]] = {}
    for task, seconds in tasks.items():
        found.setdefault((task.stage, task.phase), []).append(seconds)
    return found


def simulated_tasks(simulation: Simulation) -> dict[Task, float]:
    """Task -> its simulated seconds."""
    phases = {phase.value: phase for phase in Phase}
    return {
        Task(span.stage, phases[span.kind], span.micro_batch, span.replica): span.end - span.start
        for span in simulation.spans
        if span.kind in phases and span.micro_batch is not None
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 1 else ms_text(seconds)


def _rate(step: Timeline) -> str:
    return "" if step.throughput is None else f", {step.throughput:.4g} samples/s"
