"""One measured step beside the planned and simulated ones: the result of ``PipelinedModel.profile_step``."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dapple_tf.common.text import counted, gib, ms_text, table
from dapple_tf.describe.plan import Plan
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.tracing.step_parts import NAMES, StepParts
from dapple_tf.tracing.step_trace import MeasuredStep
from dapple_tf.view.files import save_timelines
from dapple_tf.view.timeline import Timeline
from graph_passes.ir.tasks import Phase, Task

_MOST_SLOWDOWN = 4.0
"""Maximum slowdown of devices by tracing that is believed."""


class PhaseTime(NamedTuple):
    """Time of the tasks of one phase of a stage.

    Attributes:
        stage: the stage.
        phase: the phase.
        measured: mean seconds of its tasks with accumulation of gradients, corrected for tracing.
        predicted: the same as simulated; None without a profile.
    """

    stage: int
    phase: Phase
    measured: float
    predicted: float | None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured, as in `Prediction`; None if nothing was predicted or measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class StepProfile:
    """A measured step, and its expectation.

    Attributes:
        step: the measured step.
        plan: its plan.
        simulation: the simulated step; None without a profile, and for a batch that isn't full.
        planned: the schedule alone, see `dapple_tf.simulation.planned.planned`; None for a batch that isn't full.
        untraced_seconds: time of the same step without tracing; None if it isn't known.
        waited_seconds: time before the measured step in which it waited for workers to read its batch; None if the
            batch was fed.
    """

    step: MeasuredStep
    plan: Plan
    simulation: Simulation | None = field(default=None, repr=False)
    planned: Timeline | None = field(default=None, repr=False)
    untraced_seconds: float | None = None
    waited_seconds: float | None = None

    @functools.cached_property
    def measured(self) -> Timeline:
        """The step as measured; it includes the time without tracing."""
        return dataclasses.replace(self.step.timeline, untraced=self.untraced_seconds, waited=self.waited_seconds)

    @functools.cached_property
    def simulated(self) -> Timeline | None:
        """The step as simulated; None without a simulation."""
        return None if self.simulation is None else self.simulation.drawn()

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Planned, simulated and measured timelines, as far as they exist."""
        return tuple(timeline for timeline in (self.planned, self.simulated, self.measured) if timeline is not None)

    @property
    def parts(self) -> Mapping[int, StepParts]:
        """Device -> the parts of its time."""
        return self.step.parts

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each stage, the fraction of the step in which its devices compute nothing, 0 to 1; empty for launches."""
        bubbles = self.measured.bubbles
        stages = self.plan.working_devices if bubbles else ()
        return tuple(statistics.fmean(bubbles[device] for device in devices) for devices in stages)

    @property
    def peak_bytes(self) -> Mapping[int, float]:
        """Device -> its peak memory in bytes."""
        return self.measured.peak_bytes

    @property
    def remarks(self) -> tuple[str, ...]:
        """Doubts about the measurement; empty if there are none."""
        return self.step.remarks

    @property
    def tracing(self) -> float:
        """Factor by which tracing slowed devices down: every operation takes a little longer."""
        if self.untraced_seconds is None or self.step.launches:
            return 1.0
        return max(1.0, slowdown(self.step, self.untraced_seconds))

    @functools.cached_property
    def phases(self) -> tuple[PhaseTime, ...]:
        """Mean times of the tasks of each stage and phase, measured and simulated; empty for launches."""
        measured = {} if self.step.launches else grouped(self.step.tasks)
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

        Timelines are written as text (``timeline.txt``), images (``timeline.svg``, ``timeline.png``), a page
        (``timeline.html``) and a trace for Chrome and Perfetto (``trace.json``). Images are left out if matplotlib
        isn't installed.

        Args:
            directory: folder to write to; created if necessary.
        """
        path = pathlib.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        title = f"A step of {counted(self.plan.num_stages, 'stage')} by {self.plan.schedule}"
        (path / "profile.txt").write_text(f"{self}\n", encoding="utf-8")
        save_timelines(self.timelines, path, title)

    def _repr_html_(self) -> str:
        """Returns the notebook view: tables, and the timelines as a picture."""
        from dapple_tf.view.notebook import Table, notebook_html  # needed only in notebooks

        tables = [Table(self._parts_title, self._part_rows())]
        if not self.step.launches:
            tables.append(Table("tasks, means in milliseconds", self._phase_rows()))
            tables.append(Table("stages", self._stage_rows()))
        remarks = [f"note: {remark}" for remark in self.remarks]
        return notebook_html(str(self).partition("\n")[0], tables, self.timelines, remarks)

    def __str__(self) -> str:
        step = self.measured
        lines = [f"step {_ms(step.latency)} ms" + _rate(step)]
        if self.untraced_seconds is not None:
            lines[0] += f", {_ms(self.untraced_seconds)} ms without tracing"
        if self.waited_seconds is not None:
            lines[0] += f", after {_ms(self.waited_seconds)} ms of waiting for its batch"
        if self.simulated is not None:
            error = self.simulated.latency / (self.untraced_seconds or step.latency) - 1
            lines[0] += f"; simulated {_ms(self.simulated.latency)} ms ({error:+.1%})"
        lines += ["", f"{self._parts_title}:", table(self._part_rows())]
        if not self.step.launches:
            shorter = f", {self.tracing:.2f} times shorter than traced" if self.tracing > 1 else ""
            lines += ["", f"tasks, means in milliseconds{shorter}:", table(self._phase_rows())]
            lines += ["", "stages:", table(self._stage_rows())]
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])

    @property
    def _parts_title(self) -> str:
        return f"milliseconds of {'launching on ' if self.step.launches else ''}each device"

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
        for time in self.phases:
            predicted = "" if time.predicted is None else _ms(time.predicted)
            error = "" if time.error is None else f"{time.error:+.1%}"
            rows.append((str(time.stage), time.phase.value, _ms(time.measured), predicted, error))
        return rows if self.simulation is not None else [row[:3] for row in rows]

    def _stage_rows(self) -> Sequence[Sequence[str]]:
        rows = [("stage", "devices", "bubble", "simulated")]
        for stage, bubble in enumerate(self.bubbles):
            simulated = "" if self.simulation is None else f"{self.simulation.bubbles[stage]:.1%}"
            rows.append((str(stage), " ".join(map(str, self.plan.working_devices[stage])), f"{bubble:.1%}", simulated))
        return rows if self.simulation is not None else [row[:3] for row in rows]


def slowdown(step: MeasuredStep, untraced_seconds: float) -> float:
    """Returns the factor by which tracing slowed the devices down in a step.

    Tracing doesn't slow the host's part, unless the host was held up in just the traced step, as happens on
    a busy machine: if that would leave hardly any time for the devices, all of the step counts as slower.

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
    """Returns (stage, phase) -> times of its tasks."""
    groups: dict[tuple[int, Phase], list[float]] = {}
    for task, seconds in tasks.items():
        groups.setdefault((task.stage, task.phase), []).append(seconds)
    return groups


def simulated_tasks(simulation: Simulation) -> dict[Task, float]:
    """Returns task -> simulated seconds."""
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
