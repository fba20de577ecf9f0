"""Times and bytes of each layer, from a step with a stage for each and others beside it, run in turns."""

from __future__ import annotations

import dataclasses
import logging
import time

import numpy as np

from dapple_tf.describe.layer_profile import Cost, LayerProfile, NeededLater
from dapple_tf.describe.profile import Profile
from dapple_tf.frontend.layer_cuts import with_functions, with_gradients
from dapple_tf.measuring.cost_fit import nearest_cost, shares
from dapple_tf.measuring.layer_memory import LayerMemory, StepTrace, layer_memory, variable_bytes
from dapple_tf.measuring.layer_tables import layer_tables
from dapple_tf.measuring.layers_by_operator import stage_operators
from dapple_tf.measuring.profiled_model import ProfiledModel
from dapple_tf.measuring.recomputation import needed_later, with_recomputation
from dapple_tf.measuring.time_budget import TimeBudget
from dapple_tf.measuring.timed_session import StepRuns
from dapple_tf.measuring.timed_step import (
    APPLY,
    MICRO_BATCHES,
    NOTHING,
    empty_calls,
    has_weight_gradients,
    input_gradients_of,
    timed_step,
)
from dapple_tf.operators.op_costs import OperatorCosts, device_kind
from dapple_tf.progress import Progress
from dapple_tf.variables.parameter_groups import group_updates
from graph_passes.ir.tasks import Phase
from graph_passes.pass_manager import run_passes
from graph_passes.passes.partition import Partition

logger = logging.getLogger(__name__)

_WARM_UP = 2
"""Number of rounds that don't count: TensorFlow optimizes graphs in the first, allocators settle in the second."""
_FEWEST_ROUNDS, _LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 2, 5, 25, 20.0
"""Number of rounds that count: as many as fit into these seconds, between the two last numbers; at least the first,
if no time is left."""
_EMPTY_CALLS = 20
"""Number of calls in one run: each takes microseconds."""
_F, _B, _BX = Phase.FORWARD.value, Phase.BACKWARD.value, Phase.INPUT_GRAD.value


def measured_layers(profiled: ProfiledModel, budget: TimeBudget, bar: Progress) -> Profile:
    """Measures each layer by itself.

    Four steps run in turns, because a machine's speed drifts: one with a stage for each layer, timed from within
    (`timed_step.py`), the same with a single stage, that stage with its forward computed again by its backward, and a
    real step of the engine.

    Args:
        profiled: the model.
        budget: rounds are repeated while it lasts.
        bar: progress bar, updated with the current work.
    """
    return _Measuring(profiled, budget, bar).run()


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The steps that run in turns.

    Attributes:
        layered: a step with a stage for each layer.
        whole: a step with a single stage.
        again: the same with ``recompute="boundary"``.
        nothing: calls of an empty function, of "1 sample".
    """

    layered: StepRuns
    whole: StepRuns
    again: StepRuns
    nothing: StepRuns


class _Measuring:
    """One profile in the making."""

    def __init__(self, profiled: ProfiledModel, budget: TimeBudget, bar: Progress) -> None:
        self.profiled, self.budget, self.bar = profiled, budget, bar
        self.sizes, self.program = profiled.sizes, profiled.program

    def run(self) -> Profile:
        """Returns the profile, without a key."""
        profiled, device = self.profiled, self.profiled.device_name
        host_device = profiled.cluster.host_device
        self.bar.step("tracing the optimizer", now=True)
        updates = profiled.updates
        self.bar.step("building steps", now=True)
        single = with_gradients(profiled.flat, ())
        whole, again = with_functions(single, "whole_"), with_functions(single, "again_", "boundary")
        whole_updates = group_updates(profiled.model, profiled.table, whole)
        with profiled.session([*updates, *whole_updates]) as session:
            layered = timed_step(self.program, updates, device, host_device, "layers_", input_gradients=True)
            self.steps = _Steps(
                StepRuns(session, layered, "layered"),
                StepRuns(session, timed_step(whole, whole_updates, device, host_device, "whole_"), "whole"),
                StepRuns(session, timed_step(again, whole_updates, device, host_device, "again_"), "again"),
                StepRuns(session, empty_calls(device, _EMPTY_CALLS), NOTHING),
            )
            self.steps.nothing.feed(1, {})
            for samples in self.sizes:
                self._feed(samples)
            walls = self._measure()
            self.bar.step("measuring memory", now=True)
            memory = self._memory()
        return self._result(walls, memory)

    def _feed(self, samples: int) -> None:
        values = self.profiled.batch(samples * MICRO_BATCHES)
        for step in (self.steps.layered, self.steps.whole, self.steps.again):
            step.feed(samples, values)

    # ---- measuring

    def _measure(self) -> np.ndarray:
        """Runs all steps in turns; returns the seconds of each real step of the smallest size."""
        steps = self.steps
        runs = [(step, samples) for samples in self.sizes for step in (steps.layered, steps.whole, steps.again)]
        runs.append((steps.nothing, 1))
        with self.profiled.engine_step(self.sizes[0], MICRO_BATCHES) as engine_step:

            def round_of_all(*, kept: bool) -> float:
                # Training repeats one step, and finds its own data in the caches: the second run of each counts.
                for step, samples in runs:
                    step.run(samples, kept=False)
                    step.run(samples, kept=kept)
                engine_step()
                return engine_step()

            cost = 0.0
            for number in range(_WARM_UP):
                self.bar.step(f"warming up, round {number + 1} of {_WARM_UP}")
                start = time.perf_counter()
                round_of_all(kept=False)
                cost = time.perf_counter() - start
            seconds = min(_SECONDS, self.budget.left)
            rounds = self.profiled.repeats or int(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, seconds / cost)))
            walls: list[float] = []
            for number in range(rounds):
                if len(walls) >= _FEWEST_ROUNDS and self.profiled.repeats is None and self.budget.left < cost:
                    break
                self.bar.step(f"measuring, round {number + 1} of {rounds}")
                walls.append(round_of_all(kept=True))
                logger.debug("round %d of %d: a step takes %.3g s", number + 1, rounds, walls[-1])
        return np.asarray(walls)

    def _memory(self) -> LayerMemory:
        least, most = self.sizes[0], self.sizes[-1]
        traces = []
        for samples in (least, most if most > least else least + max(1, least // 2)):
            self._feed(samples)
            layered = self.steps.layered
            layered.run(samples, kept=False)
            stats = layered.trace(samples)
            step = layered.timed.step
            updates = {
                node: item.key.stage for item in layered.timed.items if item.key.work == APPLY for node in item.exit
            }
            traces.append(
                StepTrace(stats, self.program, step, self.profiled.device_name, layered.name, samples, updates)
            )
        fewest = with_functions(self.profiled.stages.program, "min_cut_", "min_cut")
        split = run_passes(
            self.profiled.stages.program, [Partition(prefix="split_", split=range(len(self.program.stages)))]
        )
        return layer_memory(self.program, fewest, split, self.profiled.sample_shapes, traces)

    # ---- attributing

    def _result(self, walls: np.ndarray, memory: LayerMemory) -> Profile:
        start_up = self.steps.nothing.typical()
        forward, backward = self._task_costs(_F, start_up), self._task_costs(_B, start_up)
        input_parts = self._input_parts(start_up)
        applied = self._apply_times(start_up)
        later = self._needed_later()
        variables = variable_bytes(self.program, self.profiled.updates, self.profiled.table)
        tables = layer_tables(self.program, self.profiled.sample_shapes)
        layers = [
            LayerProfile(
                name=name,
                forward=forward[index],
                backward=backward[index],
                backward_weight=backward[index] * float(1 - input_parts[index]),
                residual_bytes=memory.residual[index],
                min_cut_residual_bytes=memory.min_cut[index],
                delayed_bytes=memory.delayed[index],
                temporary_bytes=memory.temporary[index],
                output_bytes=memory.output[index],
                parameter_bytes=variables.parameters[index],
                slot_bytes=variables.slots[index],
                state_bytes=variables.state[index],
                apply_seconds=float(applied[index]),
                spread=self._spread(index),
                buffers=memory.buffers[index],
                needed_later=later[index],
                table_bytes=tables[index].bytes,
                row_bytes=tables[index].rows,
            )
            for index, name in enumerate(self.profiled.stages.names)
        ]
        # A real step's first micro-batch sets what the others add to, Apply has a part that is for all layers, and the
        # session and Keras take time, too: this is the part of a step that the layers' times don't contain.
        least = self.sizes[0]
        tasks = sum(self.steps.whole.times(least, phase) for phase in (_F, _B)) * MICRO_BATCHES
        left = float(np.median(walls - tasks)) - float(applied.sum())
        return Profile(
            model=self.profiled.model.name,
            device=self.profiled.device_name,
            batch_sizes=self.sizes,
            layers=tuple(with_recomputation(layers, self.sizes[-1], self._ratio())),
            tensors=memory.tensors,
            shared=variables.shared,
            step_seconds=max(0.0, left),
            task_seconds=start_up,
        )

    def _task_costs(self, phase: str, start_up: float) -> list[Cost]:
        """Returns F or B of each layer: at each size, its share of the single stage's time."""
        stages = range(len(self.program.stages))
        points = []
        for samples in self.sizes:
            each = np.asarray([self.steps.layered.time(samples, phase, stage) for stage in stages])
            whole = self.steps.whole.time(samples, phase)
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

        def both(step: StepRuns, samples: int, micro_batch: int) -> np.ndarray:
            return np.asarray(sum(step.times(samples, phase, 0, micro_batch) for phase in (_F, _B)))

        pairs = [(samples, number) for samples in self.sizes for number in range(MICRO_BATCHES)]
        again, once = (
            np.concatenate([both(step, *pair) for pair in pairs]) for step in (self.steps.again, self.steps.whole)
        )
        return float(np.median(again[once > 0] / once[once > 0])) if once.any() else 1.0

    def _input_parts(self, start_up: float) -> np.ndarray:
        """Returns Bx / B of each layer: the part of B that computes the gradients of what it receives."""
        layered = self.steps.layered
        parts = np.zeros(len(self.program.stages))
        for stage in self.program.stages:
            if not input_gradients_of(self.program, stage):
                continue
            if not has_weight_gradients(self.program, stage):
                parts[stage.index] = 1.0
                continue
            of_input = sum(layered.time(samples, _BX, stage.index, 0) - start_up for samples in self.sizes)
            both = sum(layered.time(samples, _B, stage.index) - start_up for samples in self.sizes)
            parts[stage.index] = min(1.0, max(0.0, of_input / both)) if both > 0 else 1.0
        return parts

    def _apply_times(self, start_up: float) -> np.ndarray:
        """Returns seconds of each layer's Apply beyond any Apply's; shared parameters count for the first layer."""

        def typical(step: StepRuns, stage: int) -> float:
            return float(np.median(np.concatenate([step.times(size, APPLY, stage, 0) for size in self.sizes])))

        trained = {update.stages[0] for update in self.profiled.updates}
        each = [
            typical(self.steps.layered, stage) if stage in trained else 0.0 for stage in range(len(self.program.stages))
        ]
        total = typical(self.steps.whole, 0) - start_up if trained else 0.0
        return shares(np.asarray(each), start_up, total)

    def _spread(self, stage: int) -> float:
        both = sum(self.steps.layered.times(self.sizes[-1], phase, stage) for phase in (_F, _B))
        low, middle, high = np.percentile(both, (25, 50, 75))
        return float((high - low) / middle) if middle else 0.0
