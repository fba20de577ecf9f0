"""The profiler: measures what each layer of a compiled Keras model costs on a device.

The model goes through the passes that training goes through, with a stage for each layer and all stages on one device,
one task after the other, and is timed from within (`timed_step.py`). The same is done with the model as a single stage,
and a real step of the engine is timed, in turns with the others because a machine's speed drifts. Layers get their
shares of the single stage's time; what the real step takes beyond its tasks is the time of a step.

Memory is told from one traced step at each of two batch sizes (`layer_memory.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from dapple_tf.clusters.cluster import Cluster
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, build, capture, check_model
from dapple_tf.frontend.host_part import on_host
from dapple_tf.frontend.layer_cuts import layer_stages, with_functions, with_gradients
from dapple_tf.frontend.metrics import RunningMetrics
from dapple_tf.frontend.optimizer import check_optimizer
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.planning.plan import Plan
from dapple_tf.profiling.cost_fit import nearest_cost, shares
from dapple_tf.profiling.estimated_layers import estimated, measuring_seconds, scaled_to
from dapple_tf.profiling.example_batch import ExampleBatch
from dapple_tf.profiling.layer_memory import LayerMemory, StepTrace, layer_memory, variable_bytes
from dapple_tf.profiling.profile import Cost, LayerProfile, Profile, ProfileError
from dapple_tf.profiling.profile_cache import cache_directory, profile_key, read_profile, write_profile
from dapple_tf.profiling.timed_session import StepRuns, TimedSession
from dapple_tf.profiling.timed_step import (
    APPLY,
    MICRO_BATCHES,
    NOTHING,
    empty_calls,
    has_weight_gradients,
    input_gradients_of,
    timed_step,
)
from dapple_tf.progress import Progress
from dapple_tf.values.parameter_groups import group_updates
from graph_passes.group_update import GroupUpdate
from graph_passes.partition import Partition
from graph_passes.pass_manager import run_passes
from graph_passes.program import Program
from graph_passes.tasks import Phase

logger = logging.getLogger(__name__)

_WARM_UP = 2
"""Rounds that don't count: TensorFlow optimizes graphs in the first, allocators settle in the second."""
_LEAST_ROUNDS, _MOST_ROUNDS, _BUDGET_SECONDS = 5, 25, 20.0
"""How many rounds count: as many as fit into the budget, between these numbers."""
_FEW_SECONDS = 2.0
"""How long steps of the whole model are measured, where layers are estimated."""
_EMPTY_CALLS = 20
"""So many in one run: each takes microseconds."""
_F, _B, _BX = Phase.FORWARD.value, Phase.BACKWARD.value, Phase.INPUT_GRAD.value


def profile(
    model: keras.Model,
    batch_size: int | Sequence[int],
    *,
    cluster: Cluster | None = None,
    device: int = 0,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    length: int | None = None,
    cache: bool | str | os.PathLike[str] = True,
    repeats: int | None = None,
    progress: bool = True,
    budget: float | None = None,
) -> Profile:
    """Measures a model layer by layer.

    The model keeps its values, and so does its optimizer: what is trained meanwhile is a copy on the device.

    Args:
        model: a built and compiled Keras model.
        batch_size: samples of a slice (what one device works on at a time): one size, or several, from which follows
            which part of each cost is fixed and which grows with the samples. Sizes around those of the plans to come
            are best.
        cluster: real devices that the model is to be trained on; sessions are configured for all of them. By default
            one local device.
        device: index of the one that is measured.
        x: example inputs, any number of samples. Needed for a model that doesn't declare its inputs (a subclassed one),
            and useful where random numbers (of integers: 0 and 1) aren't typical.
        y: example labels; by default such as the loss takes.
        sample_weight: example weights; by default none.
        length: what axes that the model leaves open are taken to be as long as, where x isn't given; by default 128, or
            another length if the model can't be computed for that: a warning tells which.
        cache: whether to keep profiles on disk and look there first; or the directory in place of ``$DAPPLE_CACHE``
            (``~/.cache/dapple_tf/profiles``).
        repeats: how often each time is measured; by default as often as fits into some 20 s, 5 to 25 times.
        progress: whether to tell on a terminal how far measuring has got.
        budget: seconds that it may take, about. Where measuring layer by layer would take longer, steps of the whole
            model are measured, and the layers' shares of them estimated by operator (`Profile.estimated`). None
            measures layers in any case.

    Returns:
        The profile. Layers are named as plans cut: ``block_1``, ``encoder/block_1`` within a nested model,
        ``shared#0`` for the first of several calls. Layers that can't be cut apart are one entry, under the last one's
        name.

    Raises:
        ProfileError: a batch size below 1, no such device, or inputs or labels that can't be guessed.
        CaptureError: the model isn't built or compiled, or can't be captured.
    """
    sizes = _sizes(batch_size)
    cluster = cluster or Cluster.local(1)
    if not cluster.real:
        raise ProfileError("this cluster is a description without real devices: it can be planned for, not measured")
    if not 0 <= device < cluster.num_devices:
        raise ProfileError(f"device is {device}, but the cluster has devices 0 to {cluster.num_devices - 1}")
    if repeats is not None and repeats < 1:
        raise ProfileError(f"repeats is {repeats}; it must be at least 1")
    check_model(model, training=True)
    check_optimizer(model.optimizer, model.trainable_variables)
    with kept_metrics(model), Progress("profiling", shown=None if progress else False) as bar:
        bar.step("capturing the model", now=True)
        example = ExampleBatch.of(model, x, y, sample_weight, length=length)
        table = VariableTable(model)
        build(model, table, example.spec)
        program = capture(model, table, Mode.TRAIN, example.spec)
        key = profile_key(model, program, example, sizes, cluster, device, repeats)
        whole = measuring_seconds(program)
        estimates = budget is not None and whole > budget
        if estimates:
            key += "-estimated"
        directory = cache_directory(cache)
        path = None if directory is None else directory / f"{key}.json"
        known = None if path is None else read_profile(path)
        if known is not None:
            bar.say(f"the profile of model {model.name!r} is in the cache: {path}")
            logger.info("the profile of model %r is in the cache: %s", model.name, path)
            return known
        logger.info("profiling model %r on %s in slices of %s samples", model.name, cluster.device_names[device], sizes)
        start = time.perf_counter()
        expected = min(whole, budget or whole)
        bar.say(
            f"profiling model {model.name!r}, some {expected:.0f} s or more: "
            f"{'steps of the whole model, layers by estimates' if estimates else 'layer by layer'}"
        )
        found = _Profiler(model, table, program, example, sizes, cluster, device, repeats, bar).run(key, estimates)
        logger.info(
            "profiled model %r, %d layers, in %.1f s", model.name, len(found.layers), time.perf_counter() - start
        )
    if path is not None:
        write_profile(path, found)
    return found


def _sizes(batch_size: int | Sequence[int]) -> tuple[int, ...]:
    given = [batch_size] if isinstance(batch_size, int | np.integer) else list(batch_size)
    if not given or any(not isinstance(size, int | np.integer) or size < 1 for size in given):
        raise ProfileError(f"batch_size is {batch_size!r}; give a whole number of at least 1, or several")
    return tuple(sorted({int(size) for size in given}))


@contextlib.contextmanager
def kept_metrics(model: keras.Model) -> Iterator[None]:
    """Metrics have their values afterwards; those that are built meanwhile are reset."""
    before = [(variable, np.asarray(variable.value)) for variable in model.metrics_variables]
    known = {id(variable) for variable, _ in before}
    try:
        yield
    finally:
        for metric in model.metrics:
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()
        for variable, value in before:
            variable.assign(value)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """What is run in turns.

    Attributes:
        layered: a step with a stage for each layer.
        whole: a step with a single stage.
        nothing: calls that do nothing, of "1 sample".
    """

    layered: StepRuns
    whole: StepRuns
    nothing: StepRuns


class _Profiler:
    """One profile in the making."""

    def __init__(
        self,
        model: keras.Model,
        table: VariableTable,
        program: Program,
        example: ExampleBatch,
        sizes: tuple[int, ...],
        cluster: Cluster,
        device: int,
        repeats: int | None,
        bar: Progress,
    ) -> None:
        self.model, self.table, self.flat, self.example = model, table, program, example
        self.sizes, self.cluster, self.device, self.repeats, self.bar = sizes, cluster, device, repeats, bar
        self.device_name = cluster.device_names[device]

    def run(self, key: str, estimates: bool = False) -> Profile:
        """The profile, under its key; layers are measured, or estimated."""
        self.bar.step("cutting the model", now=True)
        inference = capture(self.model, self.table, Mode.PREDICT, BatchSpec(self.example.spec.x))
        stages = layer_stages(self.model, self.flat, inference)
        self.names, self.differentiated = stages.names, stages.program
        self.program = with_functions(stages.program, "layers_")
        self.bar.step("tracing the optimizer", now=True)
        self.updates = group_updates(self.model, self.table, self.program)
        if estimates:
            return self._estimated(key)
        whole = with_functions(with_gradients(self.flat, ()), "whole_")
        whole_updates = group_updates(self.model, self.table, whole)
        self.bar.step("building steps", now=True)
        metrics = RunningMetrics(self.model, self.table).feeds()
        with TimedSession(self.cluster, self.device_name, metrics) as session:
            self._load(session, [*self.updates, *whole_updates])
            layered = timed_step(self.program, self.updates, self.device_name, "layers_", input_gradients=True)
            self.steps = _Steps(
                StepRuns(session, layered, "layered"),
                StepRuns(session, timed_step(whole, whole_updates, self.device_name, "whole_"), "whole"),
                StepRuns(session, empty_calls(self.device_name, _EMPTY_CALLS), NOTHING),
            )
            self.steps.nothing.feed(1, {})
            for samples in self.sizes:
                self._feed(samples)
            walls = self._measure()
            self.bar.step("measuring memory")
            memory = self._memory()
        return self._result(walls, memory, key)

    def _estimated(self, key: str) -> Profile:
        """Estimates of layers, scaled to a step of the whole model."""
        self.bar.step("estimating operators", now=True)
        empty = LayerProfile("any", Cost(), Cost())
        start = Profile(self.model.name, self.device_name, self.sizes, (empty,), (), key=key)
        shapes = self._sample_shapes()
        found = estimated(self.program, self.names, self.updates, self.table, shapes, self.sizes, start)
        samples = self.sizes[len(self.sizes) // 2]
        self.bar.step("preparing a step of the whole model", now=True)
        with self._engine_step(samples) as engine_step:
            for _ in range(_WARM_UP):
                cost = engine_step()
            rounds = self.repeats or int(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, _FEW_SECONDS / cost)))
            walls = []
            for number in range(rounds):
                self.bar.step(f"measuring, step {number + 1} of {rounds}")
                walls.append(engine_step())
        return scaled_to(found, samples, MICRO_BATCHES, float(np.median(walls)))

    def _load(self, session: TimedSession, updates: Sequence[GroupUpdate]) -> None:
        read = {name for stage in self.program.stages for name in stage.reads}
        variables = {name: self.table.describe(name) for name in sorted(read)}
        variables |= {v.place: v for update in updates for v in update.apply.variables.values()}
        session.load(self.table, list(variables.values()))

    def _feed(self, samples: int) -> None:
        arrays = self.example.batch(samples * MICRO_BATCHES)
        for step in (self.steps.layered, self.steps.whole):
            step.feed(samples, dict(zip(self.flat.roles.inputs, on_host(self.flat, arrays), strict=True)))

    # ---- measuring

    def _measure(self) -> np.ndarray:
        """Runs all steps in turns; returns the seconds of each real step of the smallest size."""
        steps = self.steps
        runs = [(step, samples) for samples in self.sizes for step in (steps.layered, steps.whole)]
        runs.append((steps.nothing, 1))
        with self._engine_step(self.sizes[0]) as engine_step:

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
            rounds = self.repeats or int(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, _BUDGET_SECONDS / cost)))
            walls = []
            for number in range(rounds):
                self.bar.step(f"measuring, round {number + 1} of {rounds}")
                walls.append(round_of_all(kept=True))
                logger.debug("round %d of %d: a step takes %.3g s", number + 1, rounds, walls[-1])
        return np.asarray(walls)

    @contextlib.contextmanager
    def _engine_step(self, samples: int) -> Iterator[Callable[[], float]]:
        """A real training step on the device: a function that runs it and returns its seconds."""
        from dapple_tf.trainer import PipelinedModel  # transformation.py imports this module, to plan automatically.

        batch = samples * MICRO_BATCHES
        plan = Plan.data_parallel([self.device], batch, micro_batches=MICRO_BATCHES)
        pipelined = PipelinedModel(self.model, self.cluster, plan, on_non_finite_loss="continue", quiet=True)
        pipelined._runtime.set_apart()
        x, y, weights = self.example.trees(batch)

        def step() -> float:
            pipelined.train_on_batch(x, y, sample_weight=weights)
            return pipelined.last_step_seconds

        try:
            yield step
        finally:
            pipelined.close(sync=False)  # The model keeps its values.

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
            traces.append(StepTrace(stats, self.program, step, self.device_name, layered.name, samples, updates))
        fewest = with_functions(self.differentiated, "min_cut_", "min_cut")
        split = run_passes(self.differentiated, [Partition(prefix="split_", split=range(len(self.names)))], first=4)
        return layer_memory(self.program, fewest, split, self._sample_shapes(), traces)

    def _sample_shapes(self) -> list[tuple[int, ...]]:
        """The shape of one sample of each of the program's inputs: what devices get of strings are numbers."""
        return [array.shape[1:] for array in on_host(self.flat, self.example.batch(1))]

    # ---- attributing

    def _result(self, walls: np.ndarray, memory: LayerMemory, key: str) -> Profile:
        start_up = self.steps.nothing.typical()
        forward, backward = self._task_costs(_F, start_up), self._task_costs(_B, start_up)
        input_parts = self._input_parts(start_up)
        applied = self._apply_times(start_up)
        variables = variable_bytes(self.program, self.updates, self.table)
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
            )
            for index, name in enumerate(self.names)
        ]
        # A real step's first micro-batch sets what the others add to, Apply has a part that is for all layers, the
        # session and Keras have their own: what the layers' times don't say of a step is here.
        least = self.sizes[0]
        tasks = sum(self.steps.whole.times(least, phase) for phase in (_F, _B)) * MICRO_BATCHES
        left = float(np.median(walls - tasks)) - float(applied.sum())
        return Profile(
            model=self.model.name,
            device=self.device_name,
            batch_sizes=self.sizes,
            layers=tuple(layers),
            tensors=memory.tensors,
            shared=variables.shared,
            step_seconds=max(0.0, left),
            task_seconds=start_up,
            key=key,
        )

    def _task_costs(self, phase: str, start_up: float) -> list[Cost]:
        """F or B of each layer: at each size its share of the single stage's time."""
        stages = range(len(self.names))
        points = []
        for samples in self.sizes:
            each = np.asarray([self.steps.layered.time(samples, phase, stage) for stage in stages])
            whole = self.steps.whole.time(samples, phase)
            points.append(shares(each, start_up, whole - start_up))
            logger.debug("%s of %d samples: %.3g s in layers, %.3g s in one", phase, samples, each.sum(), whole)
        return [nearest_cost(self.sizes, [float(point[stage]) for point in points]) for stage in stages]

    def _input_parts(self, start_up: float) -> np.ndarray:
        """The part of each layer's B that computes the gradients of what it receives: Bx / B."""
        layered = self.steps.layered
        parts = np.zeros(len(self.names))
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
        """Seconds of each layer's Apply, beyond what any Apply takes; of shared parameters for the first layer."""

        def typical(step: StepRuns, stage: int) -> float:
            return float(np.median(np.concatenate([step.times(size, APPLY, stage, 0) for size in self.sizes])))

        trained = {update.stages[0] for update in self.updates}
        each = [typical(self.steps.layered, stage) if stage in trained else 0.0 for stage in range(len(self.names))]
        total = typical(self.steps.whole, 0) - start_up if trained else 0.0
        return shares(np.asarray(each), start_up, total)

    def _spread(self, stage: int) -> float:
        both = sum(self.steps.layered.times(self.sizes[-1], phase, stage) for phase in (_F, _B))
        low, middle, high = np.percentile(both, (25, 50, 75))
        return float((high - low) / middle) if middle else 0.0
