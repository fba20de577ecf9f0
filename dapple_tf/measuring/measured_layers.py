"""Times and bytes of each layer, from a step with a stage for each and others beside it, run in turns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapple_tf.common.progress import Progress
from dapple_tf.describe.layer_profile import ZERO, Cost, NeededLater
from dapple_tf.describe.profile import Profile
from dapple_tf.frontend.layer_cuts import with_functions, with_gradients
from dapple_tf.measuring.layer_memory import layers_with_variables
from dapple_tf.measuring.layers_by_operator import needed_later, stage_operators, with_recomputation
from dapple_tf.measuring.profiled_model import ProfiledModel
from dapple_tf.measuring.timed_step import (
    APPLY,
    MICRO_BATCHES,
    NOTHING,
    StepRuns,
    empty_calls,
    has_weight_gradients,
    input_gradients_of,
    timed_step,
)
from dapple_tf.measuring.traced_memory import StepTrace, with_memory
from dapple_tf.measuring.turns import TimeBudget, in_caches, in_turns
from dapple_tf.operators.op_costs import OperatorCosts, device_kind
from dapple_tf.variables.parameter_groups import group_updates
from graph_passes.ir.tasks import Phase

logger = logging.getLogger(__name__)

_SECONDS = 20.0
"""Time for rounds of all steps."""
_EMPTY_CALLS = 20
"""Number of calls in one run: each takes microseconds."""
_F, _B, _BX = Phase.FORWARD.value, Phase.BACKWARD.value, Phase.INPUT_GRAD.value


def measured_layers(profiled: ProfiledModel, budget: TimeBudget, bar: Progress) -> Profile:
    """Measures each layer by itself.

    Four steps run in turns, because a machine's speed drifts: one with a stage for each layer, timed from within
    (`timed_step.py`), the same with a single stage, that stage with its forward computed again by its backward, and a
    real step of the engine. On GPUs their functions are for slices of one size, as in training: functions of any size
    wait for shapes that are computed there. CPUs hardly notice, and one step serves all sizes.

    Args:
        profiled: the model.
        budget: rounds are repeated while it lasts.
        bar: progress bar, updated with the current work.
    """
    return _Measuring(profiled, budget, bar).run()


class _Steps(NamedTuple):
    """The steps that run in turns with slices of one size.

    Attributes:
        layered: a step with a stage for each layer.
        whole: a step with a single stage.
        again: the same with ``recompute="boundary"``.
    """

    layered: StepRuns
    whole: StepRuns
    again: StepRuns


class _Measuring:
    """One profile in the making."""

    def __init__(self, profiled: ProfiledModel, budget: TimeBudget, bar: Progress) -> None:
        self.profiled, self.budget, self.bar = profiled, budget, bar
        self.sizes, self.program = profiled.sizes, profiled.program
        self.steps: dict[int, _Steps] = {}  # samples -> steps

    def run(self) -> Profile:
        """Returns the profile, without a key."""
        profiled, device = self.profiled, self.profiled.device_name
        self.bar.step("tracing the optimizer")
        updates = profiled.updates
        self.bar.step("building steps")
        layers, single = profiled.stages.program, with_gradients(profiled.flat, ())
        whole_updates = group_updates(profiled.model, profiled.table, with_functions(single, "whole_"))
        with profiled.session([*updates, *whole_updates]) as session:

            def steps(samples: int | None) -> _Steps:
                """Returns steps whose functions are for slices of some samples; None for any."""
                functions = functools.partial(with_functions, samples=samples, on_gpu=profiled.on_gpu)
                halves = functions(layers, "split_", split=True)
                made = {
                    "layered": (functions(layers, "layers_"), updates, halves),
                    "whole": (functions(single, "whole_"), whole_updates, None),
                    "again": (functions(single, "again_", "boundary"), whole_updates, None),
                }
                runs = {}
                for kind, (program, own, split) in made.items():
                    name = kind if samples is None else f"{kind}{samples}"
                    step = timed_step(program, own, device, profiled.cluster.host_device, f"{name}_", split=split)
                    runs[kind] = StepRuns(session, step, name)
                return _Steps(**runs)

            any_size = steps(None)
            for samples in self.sizes:
                self.steps[samples] = steps(samples) if device_kind(device) == "GPU" else any_size
                for step in self.steps[samples]:
                    step.feed(samples, profiled.batch(samples * MICRO_BATCHES))
            self.nothing = StepRuns(session, empty_calls(device, _EMPTY_CALLS), NOTHING)
            self.nothing.feed(1, {})
            walls = self._measure()
            self.bar.step("measuring memory")
            traces = self._traces(any_size.layered)
        return self._result(walls, traces)

    # ---- measuring

    def _measure(self) -> np.ndarray:
        """Runs all steps in turns; returns the seconds of each real step of the smallest size."""
        runs = [(step, samples) for samples, steps in self.steps.items() for step in steps]
        runs.append((self.nothing, 1))
        with self.profiled.engine_step(self.sizes[0], MICRO_BATCHES) as engine_step:
            turns: list[Callable[[], Any]] = [functools.partial(step.run, samples) for step, samples in runs]
            *times, walls = in_turns(
                [in_caches(turn) for turn in (*turns, engine_step)],
                self.profiled.repeats,
                seconds=_SECONDS,
                budget=self.budget,
                say=self.bar.step,
            )
        for (step, samples), rounds in zip(runs, times, strict=True):
            step.rounds[samples] = rounds
        logger.debug("%d rounds: a step takes %.3g s", len(walls), np.median(walls))
        return np.asarray(walls)

    def _traces(self, layered: StepRuns) -> list[StepTrace]:
        """Returns traces of two sizes, from functions of any size: both then have the same tensors."""
        profiled, timed = self.profiled, layered.timed
        applies = {node: item.key.stage for item in timed.items if item.key.work == APPLY for node in item.exit}
        least, most = self.sizes[0], self.sizes[-1]
        traces = []
        for samples in (least, most if most > least else least + max(1, least // 2)):
            layered.feed(samples, profiled.batch(samples * MICRO_BATCHES))
            layered.run(samples)
            stats = layered.trace(samples)
            traces.append(
                StepTrace(stats, self.program, timed.step, profiled.device_name, layered.name, samples, applies)
            )
        return traces

    # ---- attributing

    def _result(self, walls: np.ndarray, traces: list[StepTrace]) -> Profile:
        profiled, shapes = self.profiled, self.profiled.sample_shapes
        known, shared = layers_with_variables(
            self.program, profiled.stages.names, profiled.updates, profiled.table, shapes
        )
        functions = functools.partial(with_functions, profiled.stages.program, on_gpu=profiled.on_gpu)
        fewest, split = functions("min_cut_", "min_cut"), functions("split_", split=True)
        known, tensors = with_memory(known, self.program, fewest, split, shapes, traces)
        start_up = self.nothing.typical()
        forward, backward = self._task_costs(_F, start_up), self._task_costs(_B, start_up)
        input_parts = self._input_parts(start_up)
        applied = self._apply_times(start_up)
        later = self._needed_later()
        layers = [
            dataclasses.replace(
                layer,
                forward=forward[index],
                backward=backward[index],
                backward_weight=backward[index] * float(1 - input_parts[index]),
                apply_seconds=float(applied[index]),
                spread=self._spread(index),
                needed_later=later[index],
            )
            for index, layer in enumerate(known)
        ]
        # A real step's first micro-batch sets what the others add to, Apply has a part that is for all layers, and the
        # session and Keras take time, too: this is the part of a step that the layers' times don't contain.
        least = self.sizes[0]
        tasks = sum(self.steps[least].whole.times(least, phase) for phase in (_F, _B)) * MICRO_BATCHES
        left = float(np.median(walls - tasks)) - float(applied.sum())
        return Profile(
            model=self.profiled.model.name,
            device=self.profiled.device_name,
            batch_sizes=self.sizes,
            layers=tuple(with_recomputation(layers, self.sizes[-1], self._ratio())),
            tensors=tensors,
            shared=shared,
            step_seconds=max(0.0, left),
            task_seconds=start_up,
        )

    def _task_costs(self, phase: str, start_up: float) -> list[Cost]:
        """Returns F or B of each layer: at each size, its share of the single stage's time."""
        stages = range(len(self.program.stages))
        points = []
        for samples, steps in self.steps.items():
            each = np.asarray([steps.layered.time(samples, phase, stage) for stage in stages])
            whole = steps.whole.time(samples, phase)
            points.append(shares(each, start_up, whole - start_up))
            logger.debug("%s of %d samples: %.3g s in layers, %.3g s in one", phase, samples, each.sum(), whole)
        return [nearest_cost(self.sizes, [float(point[stage]) for point in points]) for stage in stages]

    def _needed_later(self) -> list[tuple[NeededLater, ...]]:
        """Returns the parts of each layer's F that its B doesn't need, by the rooflines of its operators."""
        costs, kind = OperatorCosts(), device_kind(self.profiled.device_name)
        operators = stage_operators(self.program, self.profiled.sample_shapes, self.sizes[-1])
        return needed_later(self.program, [each.estimates(costs, kind) for each in operators])

    def _ratio(self) -> float:
        """Returns how many times as long the single stage's F and B take if B computes F again.

        It is the median over all pairs of micro-batches that ran one after the other: the machine's speed drifts.
        """

        def both(name: str) -> np.ndarray:
            pairs = itertools.product(self.steps.items(), range(MICRO_BATCHES))
            return np.concatenate(
                [
                    sum(getattr(steps, name).times(samples, phase, 0, number) for phase in (_F, _B))
                    for (samples, steps), number in pairs
                ]
            )

        again, once = both("again"), both("whole")
        return float(np.median(again[once > 0] / once[once > 0])) if once.any() else 1.0

    def _input_parts(self, start_up: float) -> np.ndarray:
        """Returns Bx / B of each layer: the part of B for input gradients."""
        layered = {samples: steps.layered for samples, steps in self.steps.items()}
        parts = np.zeros(len(self.program.stages))
        for stage in self.program.stages:
            if not input_gradients_of(self.program, stage):
                continue
            if not has_weight_gradients(self.program, stage):
                parts[stage.index] = 1.0
                continue
            of_input = sum(step.time(samples, _BX, stage.index, 0) - start_up for samples, step in layered.items())
            both = sum(step.time(samples, _B, stage.index) - start_up for samples, step in layered.items())
            parts[stage.index] = min(1.0, max(0.0, of_input / both)) if both > 0 else 1.0
        return parts

    def _apply_times(self, start_up: float) -> np.ndarray:
        """Returns seconds of each layer's Apply beyond any Apply's; shared parameters count for the first layer."""

        def typical(name: str, stage: int) -> float:
            times = [getattr(steps, name).times(samples, APPLY, stage, 0) for samples, steps in self.steps.items()]
            return float(np.median(np.concatenate(times)))

        trained = {update.stages[0] for update in self.profiled.updates}
        each = [typical("layered", stage) if stage in trained else 0.0 for stage in range(len(self.program.stages))]
        total = typical("whole", 0) - start_up if trained else 0.0
        return shares(np.asarray(each), start_up, total)

    def _spread(self, stage: int) -> float:
        most = self.sizes[-1]
        both = sum(self.steps[most].layered.times(most, phase, stage) for phase in (_F, _B))
        low, middle, high = np.percentile(both, (25, 50, 75))
        return float((high - low) / middle) if middle else 0.0


# ---- costs from measured points


_LEAST_WEIGHED = 1e-3
"""Times below this part of the longest get no more weight: their errors would count too much."""


def nearest_cost(samples: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Returns the cost nearest to measured times by relative error; a single point has no fixed part."""
    x, t = np.asarray(samples, float), np.asarray(seconds, float)
    if len(x) == 1:
        return Cost(0.0, float(t[0] / x[0]))
    if t.max() <= 0:
        return ZERO
    weight = 1 / np.maximum(t, t.max() * _LEAST_WEIGHED) ** 2

    def mean(values: np.ndarray) -> float:
        return float((weight * values).sum() / weight.sum())

    spread = mean((x - mean(x)) ** 2)
    slope = mean((x - mean(x)) * (t - mean(t))) / spread
    fixed = mean(t) - slope * mean(x)
    if slope < 0:
        return Cost(mean(t), 0.0)
    if fixed < 0:
        return Cost(0.0, mean(x * t) / mean(x * x))
    return Cost(fixed, slope)


def shares(times: np.ndarray, start: float, total: float) -> np.ndarray:
    """Returns shares of ``total`` in proportion to ``times``, each less ``start``.

    Where there is nothing to share they are what is left of the times.
    """
    net = np.maximum(times - start, 0)
    if net.sum() <= 0 or total <= 0:
        return net
    return np.asarray(net * (total / net.sum()))
