"""Metrics of the pipeline during training, from steps that are traced now and then."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from typing import Any

import keras

from dapple_tf.describe.plan import Plan
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.tracing.scalar_log import ScalarLog
from dapple_tf.tracing.stage_drift import StageDrift
from dapple_tf.tracing.step_parts import NAMES, StepParts, mean
from dapple_tf.tracing.step_profile import slowdown
from dapple_tf.tracing.step_trace import MeasuredStep

_WARM_UP = 2
"""Number of steps that don't count: the first ones make graphs and allocate memory."""
_RECENT = 51
"""Number of steps over which medians are taken."""
_CHECKED_AT = 10
"""Number of the step that warms up the tracer if no monitor is attached; the next is compared with its prediction."""


class TraceBudget:
    """Decides which steps are traced, so that tracing stays a small part of the time.

    The first trace comes early, since its cost isn't known before. The next one comes once all of them together
    cost no more than their share of the elapsed time.

    Attributes:
        share: fraction of the time, above 0 and at most 1.
        trained: seconds of training so far, without the steps before the first trace, which make graphs.
        spent: seconds of these that tracing cost.
        steps: number of steps.
        traces: number of traced steps.
        prepared: seconds that TensorFlow took to prepare traced steps.
    """

    def __init__(self, share: float) -> None:
        """Starts without any steps."""
        if not 0 < share <= 1:
            raise ValueError(
                f"budget is {share}; give the part of the time that tracing may take, above 0 and at most 1"
            )
        self.share = share
        self.trained = self.spent = self.prepared = 0.0
        self.steps = self.traces = 0

    def step(self, seconds: float) -> None:
        """Adds a finished step, with everything that belongs to it."""
        self.steps += 1
        if self.steps > _WARM_UP + 1:
            self.trained += seconds

    def traced(self, cost: float) -> None:
        """Adds a traced step, which took ``cost`` seconds more than without tracing."""
        self.traces += 1
        self.spent += max(0.0, cost)

    @property
    def due(self) -> bool:
        """Whether the next step is to be traced."""
        if not self.traces:
            return self.steps > _WARM_UP
        expected = self.spent / self.traces
        return self.prepared + self.spent + expected <= self.share * self.trained


class PipelineMonitor(keras.callbacks.Callback):
    """Adds metrics of the pipeline to the logs of ``PipelinedModel.fit``, and writes them for TensorBoard.

    Logs, as seen by every callback, History and the progress bar:

    * ``samples_per_second``, ``tokens_per_second``: medians over recent steps, waiting for data included;
    * ``step_ms``: time of a step; ``input_ms``: waiting for its batch;
    * ``forward_ms``, ``backward_ms``, ``accumulate_ms``, ``apply_ms``, ``all_reduce_ms``, ``transfers_ms``,
      ``bubble_ms`` and ``host_ms``: the parts of ``step_ms``, averaged over devices (see `StepParts`);
    * ``bubble_stage_0``: fraction of the step in which the stage's devices compute nothing, 0 to 1;
    * ``peak_mib_stage_0``: largest peak memory of the stage's devices.

    All but the first line and ``input_ms`` are of the last traced step, corrected for tracing. A metric is left out
    until it has a value: the fifth step is the first traced one. Where GPUs don't report their kernels, only
    ``step_ms`` and peaks of memory are known. If the model was profiled, each traced step is compared with its
    prediction, and the log warns of stages that are more than 20% off it.

    Attributes:
        budget: number of traced steps, and their cost.
        latest: the latest metrics.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        budget: float = 0.01,
        tokens_per_sample: float | None = None,
    ) -> None:
        """Sets the metrics and their folder.

        Args:
            log_dir: folder of event files for TensorBoard; None writes none.
            budget: fraction of the time that tracing may take, after the first trace.
            tokens_per_sample: number of tokens, for ``tokens_per_second``.

        Raises:
            ValueError: the budget or the number of tokens is out of range.
        """
        super().__init__()
        if tokens_per_sample is not None and not 0 < tokens_per_sample < math.inf:
            raise ValueError(f"tokens_per_sample is {tokens_per_sample}; it must be above 0 and finite")
        self.budget = TraceBudget(budget)
        self.latest: dict[str, float] = {}
        self._log_dir = None if log_dir is None else os.fspath(log_dir)
        self._tokens = tokens_per_sample
        self._rates: deque[float] = deque(maxlen=_RECENT)
        self._waits: deque[float] = deque(maxlen=_RECENT)
        self._untraced: deque[float] = deque(maxlen=_RECENT)
        self._traced = False
        self._log: ScalarLog | None = None
        self._attached = False

    # ---- what the pipelined model tells

    def attach(self) -> None:
        """Begins a fit of a pipelined model."""
        self._attached = True
        self._rates.clear()
        self._waits.clear()
        self.latest = {}

    def detach(self) -> None:
        """Ends the fit."""
        self._attached = False

    def stepped(self, samples: int, seconds: float, waited: float) -> None:
        """Records a finished training step.

        Args:
            samples: samples of its batch.
            seconds: its time, including waiting for the batch and the work for its trace.
            waited: seconds of waiting for the batch.
        """
        self.budget.step(seconds)
        if self._traced:
            self._traced = False
            self.budget.traced(seconds - statistics.median(self._untraced or [0.0]))
            return
        if self.budget.steps <= _WARM_UP:
            return
        self._untraced.append(seconds)
        self._rates.append(samples / seconds)
        self._waits.append(waited)
        self.latest["samples_per_second"] = statistics.median(self._rates)
        if self._tokens is not None:
            self.latest["tokens_per_second"] = self.latest["samples_per_second"] * self._tokens
        self.latest["input_ms"] = 1e3 * statistics.median(self._waits)

    def sampled(self, step: MeasuredStep, untraced_seconds: float, plan: Plan, number: int) -> None:
        """Records a traced step.

        Args:
            step: the measured step.
            untraced_seconds: median seconds of recent untraced steps.
            plan: plan of the pipeline.
            number: number of training steps so far.
        """
        self._traced = True
        untraced = {name: value for name, value in self.latest.items() if name in _UNTRACED}
        self.latest = untraced | step_metrics(step, untraced_seconds, plan)  # without stages that no longer exist
        self._write(number, self.latest)

    # ---- Keras' callbacks

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the event file.

        Raises:
            ValueError: this isn't the fit of a pipelined model.
            OSError: the directory can't be written to.
        """
        if not self._attached:
            raise ValueError(
                "PipelineMonitor measures pipelined training: give it to PipelinedModel.fit, not to the model's own"
            )
        if self._log_dir is not None:
            self._log = ScalarLog(self._log_dir)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the epoch's metrics to the file."""
        if self._log is not None:
            self._log.flush()

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the event file."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self, number: int, metrics: dict[str, float]) -> None:
        if self._log is not None:
            self._log.write(number, {tag(name): value for name, value in metrics.items()})


_UNTRACED = ("samples_per_second", "tokens_per_second", "input_ms")
"""Metrics that no trace is needed for."""
_SHOWN = (*(name for name in NAMES if name not in ("before", "after")), "host")


def step_metrics(step: MeasuredStep, untraced_seconds: float, plan: Plan) -> dict[str, float]:
    """Returns the metrics of a traced step, as it would be without tracing; of launches, its time and memory alone.

    Args:
        step: the step.
        untraced_seconds: time of such a step without tracing.
        plan: plan of the pipeline.
    """
    factor = math.nan if step.launches else slowdown(step, untraced_seconds)
    parts = {device: _untraced(own, factor) for device, own in step.parts.items()}
    typical = mean(list(parts.values()))
    metrics = {"step_ms": 1e3 * untraced_seconds}
    metrics |= {f"{name}_ms": 1e3 * getattr(typical, name) for name in _SHOWN if name != "host"}
    # NaN stays NaN if it comes first.
    metrics["host_ms"] = max(metrics["step_ms"] - sum(metrics[f"{name}_ms"] for name in _SHOWN if name != "host"), 0.0)
    peaks = step.timeline.peak_bytes
    for stage, devices in enumerate(plan.working_devices):
        busy = statistics.fmean(
            own.forward + own.backward + own.accumulate + own.apply for own in map(parts.__getitem__, devices)
        )
        metrics[f"bubble_stage_{stage}"] = max(1 - busy / untraced_seconds, 0.0)
        metrics[f"peak_mib_stage_{stage}"] = max(peaks.get(device, math.nan) for device in devices) / 2**20
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _untraced(parts: StepParts, factor: float) -> StepParts:
    return StepParts(**{name: getattr(parts, name) / factor for name in NAMES})


def tag(name: str) -> str:
    """Returns a metric's name for TensorBoard, which groups metrics by the text before the first slash.

    >>> tag("bubble_stage_0"), tag("forward_ms"), tag("samples_per_second")
    ('bubble/stage_0', 'step_ms/forward', 'throughput/samples_per_second')
    """
    if name.endswith("_per_second"):
        return f"throughput/{name}"
    if name.endswith("_ms"):
        return f"step_ms/{name.removesuffix('_ms').replace('step', 'whole')}"
    what, _, stage = name.partition("_stage_")
    return f"{what}/stage_{stage}"


class StepMonitor:
    """Follows the training steps of a pipelined model: decides which are traced, and evaluates the traces.

    Attributes:
        callback: the user's `PipelineMonitor` during a fit with one.
        drift: comparison with the prediction; None if there is no prediction.
    """

    def __init__(self) -> None:
        self.callback: PipelineMonitor | None = None
        self.expect(None)

    def expect(self, simulation: Simulation | None) -> None:
        """Begins to follow steps of another plan; None if they weren't simulated."""
        self.drift = None if simulation is None else StageDrift(simulation)
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._steps = 0

    @property
    def due(self) -> bool:
        """Whether the next full step is to be traced."""
        if not self._times:
            return False
        if self.drift is not None and self.drift.suspects:
            return True
        if self.callback is not None:
            return self.callback.budget.due
        return self.drift is not None and self._steps == _CHECKED_AT - 1

    def stepped(self, seconds: float) -> None:
        """Records the time of a full, untraced step."""
        self._steps += 1
        if self._steps > _WARM_UP:
            self._times.append(seconds)

    def prepared(self, seconds: float) -> None:
        """Records the first traced full step, of which only the cost is of use."""
        if self.callback is not None:
            self.callback.budget.prepared += max(0.0, seconds - statistics.median(self._times))

    def sampled(self, step: MeasuredStep, plan: Plan, number: int) -> None:
        """Records a traced full step.

        Args:
            step: the measured step.
            plan: plan of the pipeline.
            number: number of training steps so far.
        """
        self._steps += 1
        untraced = statistics.median(self._times)
        if step.launches:
            self.drift = None  # Nothing can be compared with the prediction.
        if self.drift is not None:
            factor = slowdown(step, untraced)
            self.drift.check({task: taken / factor for task, taken in step.tasks.items()})
        if self.callback is not None:
            self.callback.sampled(step, untraced, plan, number)
