"""Steps of a pipelined model under Keras' own loop: training, evaluation, prediction, values and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import Checkpoint, Progress
from dapple_tf.checkpoints.checkpoint_manifest import Manifest
from dapple_tf.checkpoints.checkpointing import CheckpointedFit, Checkpointing
from dapple_tf.common.keras_private import (
    Makeup,
    check_compiled,
    compiled_loss,
    compiled_metrics,
    inner_optimizer,
    learning_rate_of,
    plain_on_batch,
    python_logs,
)
from dapple_tf.common.text import counted
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.errors import DataError, NonFiniteLossError
from dapple_tf.execution.builds import PREPARED_STEPS, StepResult
from dapple_tf.execution.engine import Engine
from dapple_tf.execution.runtime import Runtime
from dapple_tf.execution.terminal import beside_progress_bar
from dapple_tf.front.argument_checks import check_cuts
from dapple_tf.frontend.attachment import Hooks, Sync, attached, behind, entered, listed
from dapple_tf.frontend.batch import Batch, Batches, BatchSpec
from dapple_tf.frontend.batch_sizes import BatchSizes, Predicted, check_has_batches, no_batch
from dapple_tf.frontend.capture import Mode, check_model
from dapple_tf.frontend.initialization import materialize
from dapple_tf.frontend.metrics import in_order
from dapple_tf.frontend.model_front import ModelFront, in_one_thread
from dapple_tf.frontend.on_workers import OnWorkers, arguments_on_workers
from dapple_tf.frontend.optimizer_checks import check_optimizer
from dapple_tf.frontend.own_steps import own_losses
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tracing.monitoring import PipelineMonitor, StepMonitor
from dapple_tf.tracing.prediction import Prediction
from graph_passes.pass_manager import After, Before

logger = logging.getLogger(__name__)


class Training(ModelFront):
    """A Keras model's steps as a pipeline, and where its values are, for the methods of `PipelinedModel`."""

    _own = frozenset({"model", "profile", "last_step_seconds"})

    def __init__(
        self,
        model: keras.Model,
        cluster: Cluster,
        plan: Plan,
        profile: Profile | None = None,
        *,
        on_non_finite_loss: str = "continue",
        faults: FaultPolicy | None = None,
        operator_costs: OperatorCosts | None = None,
        quiet: bool = False,
        passes: Sequence[After | Before] = (),
        prepared_steps: int = PREPARED_STEPS,
    ) -> None:
        """Takes the arguments of :func:`dapple_tf.transform`; ``quiet`` omits notes, for measuring or comparing."""
        if on_non_finite_loss not in ("stop", "continue"):
            raise ValueError(f"on_non_finite_loss={on_non_finite_loss!r} is unknown; use 'stop' or 'continue'")
        if isinstance(prepared_steps, bool) or not isinstance(prepared_steps, int) or prepared_steps < 1:
            raise ValueError(f"prepared_steps is {prepared_steps!r}; it must be a whole number from 1 on")
        super().__init__(model)
        self.profile = profile
        self._own_passes = tuple(passes)
        self.last_step_seconds = 0.0
        self._sizes = BatchSizes()
        self._monitor = StepMonitor()
        self._expect(plan, None if profile is None else simulate(plan, profile, cluster))
        self._on_non_finite_loss = on_non_finite_loss
        self._check()
        self._runtime = Runtime(
            *(model, cluster, plan, profile, faults or FaultPolicy(), operator_costs),
            quiet=quiet,
            passes=self._own_passes,
            prepared_steps=prepared_steps,
        )
        self._start()
        if model.run_eagerly:
            logger.warning("model %r is compiled with run_eagerly=True, which pipelined steps ignore", model.name)

    def _start(self) -> None:
        """Prepares steps of the model as compiled now."""
        materialize(self.model.metrics_variables)  # Keras asks them after every step.
        self._compiled, self._makeup = self._settings(), Makeup(self.model)
        self._passes: dict[Mode, Batches] = {}
        self._begun: set[Mode] = set()  # modes in which the present call has had a batch
        self._specs: dict[Mode, BatchSpec] = {}
        self._run_specs: dict[Mode, BatchSpec] = {}  # of the last steps that have run
        self._steps_left: int | None = 0  # of the epoch, from the one that was begun last; None if unknown
        check_cuts(self.model, self._engine.builder.passes)

    @property
    def _engine(self) -> Engine:
        return self._runtime.engine

    def _check(self) -> None:
        check_model(self.model, training=True)
        check_optimizer(self.model.optimizer, self.model.trainable_variables)

    def _settings(self) -> list[Any]:
        """The objects that step graphs depend on: if one is replaced (by ``compile``, say), they must be made again."""
        return [*self._compilation(), *self.model.variables, None, *self.model.trainable_variables]

    def _compilation(self) -> list[Any]:
        """Settings that ``compile`` replaces."""
        model = self.model
        rate = learning_rate_of(inner_optimizer(model.optimizer))
        return [model.optimizer, rate, compiled_loss(model), compiled_metrics(model)]

    @property
    def cluster(self) -> Cluster:
        """The devices; fewer while training continues without a worker."""
        return self._engine.cluster

    @property
    def plan(self) -> Plan:
        """The plan; another one after training continued without a worker."""
        return self._engine.plan

    # ---- Keras' methods

    def _fit_with_checkpoints(self, checkpoint: Checkpointing, resume: bool, arguments: dict[str, Any]) -> Any:
        batch_size = arguments.pop("batch_size")
        save = functools.partial(self._runtime.save, checkpoint.directory, checkpoint.keep)
        fit = CheckpointedFit(checkpoint, self.model, batch_size, save, lambda: self._runtime.elastic.steps)
        self._follow()
        with self._runtime.saver.training(checkpoint.directory, self.model.name):
            source = fit.resumable() if resume else None
            if source is not None:
                self._runtime.restore(source)
            arguments = arguments_on_workers("fit", arguments, self._runtime.reading(), self._engine.data.groups)
            x, y = arguments.pop("x", None), arguments.pop("y", None)
            return self._call("fit", batch_size=batch_size, **fit.arguments(source, x, y, **arguments))

    @contextlib.contextmanager
    def _running(self, method: str) -> Iterator[Hooks]:
        """Makes a method of the user's model run its steps here inside the context."""
        self._follow()
        hooks = Hooks(
            train=self._function(Mode.TRAIN, method, "x"),
            test=self._function(Mode.TEST, method, "validation_data" if method == "fit" else "x"),
            predict=self._predict,
            sync=self.sync,
            agree=self._runtime.agree,
            between_epochs=functools.partial(self._runtime.agree, epoch=True),
            steps_left=lambda count: setattr(self, "_steps_left", count),
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(attached(self.model, hooks))
            stack.callback(setattr, self, "_passes", self._passes)  # of the enclosing call, if any
            stack.callback(setattr, self, "_steps_left", self._steps_left)
            stack.callback(setattr, self, "_begun", self._begun)
            self._passes = {}
            self._begun = set()
            self._steps_left = 0
            yield hooks

    def _call_own(self, method: str, enter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._running(method), entered(self.model, method, enter):
            return getattr(self.model, method)(*args, **kwargs)

    def _call(self, method: str, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            hooks = stack.enter_context(self._running(method))
            kwargs = arguments_on_workers(method, kwargs, self._runtime.reading(), self._engine.data.groups)
            reads = method in ("fit", "evaluate", "predict")
            if reads:
                check_has_batches(method, kwargs)
            if method == "fit":
                self._watch_by(kwargs.get("callbacks"), stack)
            if reads:
                stack.enter_context(beside_progress_bar(kwargs.get("verbose", "auto")))
            if method == "fit" or kwargs.get("callbacks") is not None:
                kwargs["callbacks"] = stack.enter_context(behind(Sync(hooks), kwargs.get("callbacks")))
            if method == "predict":
                predicted = Predicted(lambda: Mode.PREDICT in self._begun)
                kwargs["callbacks"] = stack.enter_context(behind(predicted, kwargs.get("callbacks")))
            return getattr(keras.Model, method)(self.model, **kwargs)

    def _on_batch(self, method: str, **arguments: Any) -> Any:
        """Does as Keras' own ``train_on_batch`` or ``test_on_batch``, which go through all layers several times."""
        mode = Mode.TRAIN if method == "train_on_batch" else Mode.TEST
        simple = arguments.get("class_weight") is None and plain_on_batch(self.model, method)
        if not simple or any(isinstance(value, OnWorkers) for value in arguments.values()):
            return self._call(method, **arguments)
        self._follow()
        check_compiled(self.model, method)
        metrics = self._makeup.metrics
        self._runtime.metrics.reset(metrics)
        started, begun, self._begun = time.perf_counter(), self._begun, set()
        try:
            batch = self._one_batch(mode, tuple(arguments.get(name) for name in ("x", "y", "sample_weight")))
        finally:
            self._begun = begun  # of the enclosing call, if any
        first = batch.spec != self._run_specs.get(mode)
        self._run(mode, batch, started)
        if first:
            metrics = self.model.metrics  # It makes metrics: one for each of several losses, say.
        logs = self._logs(mode, metrics)
        simple = all(isinstance(value, np.floating) for value in logs.values())
        logs = {name: float(logs[name]) for name in sorted(logs)} if simple else python_logs(logs)
        return logs if arguments.get("return_dict") else in_order(metrics, logs)

    def _watch_by(self, callbacks: Any, stack: contextlib.ExitStack) -> None:
        """Connects the user's `PipelineMonitor` to the steps, if the callbacks have one."""
        monitors = [callback for callback in listed(callbacks) if isinstance(callback, PipelineMonitor)]
        if len(monitors) > 1:
            raise ValueError(f"fit() got {len(monitors)} PipelineMonitors among its callbacks; give it one")
        stack.callback(setattr, self._monitor, "callback", self._monitor.callback)
        self._monitor.callback = monitors[0] if monitors else None
        for monitor in monitors:
            monitor.attach()
            stack.callback(monitor.detach)

    def _follow(self) -> None:
        """Makes a new engine if the model has been compiled, frozen or extended since."""
        self._runtime.elastic.mend()
        self._runtime.values.doubt()
        if not self._changed():
            return
        name = self.model.name
        if self._compiled and not self._compiled_again:
            logger.warning(
                "layers of model %r were frozen, unfrozen or added without compile(): steps follow them from now on, "
                "plain Keras' only from the next compile() on",
                name,
            )
        logger.info("model %r has changed since its step graphs were made; they are made again", name)
        self.close()
        self._check()
        self._runtime.start()
        self._start()

    def _changed(self) -> bool:
        """Whether the model has been compiled, frozen or extended since its step graphs were made."""
        before = self._compiled
        if not before or self._compiled_again:
            return True
        if not self._makeup.changed:
            return False
        now = self._settings()
        self._makeup = Makeup(self.model)
        return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))

    @property
    def _compiled_again(self) -> bool:
        """Whether the model has been compiled since its step graphs were made."""
        return any(a is not b for a, b in zip(self._compilation(), self._compiled, strict=False))

    # ---- what a step is expected to take

    @property
    def prediction(self) -> Prediction | None:
        """The simulated and the measured time of a step of the present plan.

        None without a profile, and if the plan doesn't fit the memory of the devices that are left, by the profile.
        """
        self._follow_plan()
        return self._prediction

    def _expect(self, plan: Plan, simulation: Simulation | None) -> None:
        self._expected_plan = plan
        self._prediction = None if simulation is None else Prediction(simulation.latency, simulation=simulation)
        self._monitor.expect(simulation)

    def _follow_plan(self) -> None:
        """Simulates a step anew if workers have been lost or taken in since, so that there is another plan."""
        if self.plan is self._expected_plan:
            return
        simulation: Simulation | None = None
        if self.profile is not None:
            with contextlib.suppress(PlanError):
                simulation = simulate(self.plan, self.profile, self.cluster)
        self._expect(self.plan, simulation)

    # ---- values

    @in_one_thread
    def sync(self) -> keras.Model:
        """Copies the devices' values into the user's model and optimizer; returns the model.

        A model made under :func:`dapple_tf.deferred_init` gets all of its values here, a few variables at a time, and
        is an ordinary one from then on.

        Raises:
            WorkerLostError: a worker was lost, and the policy doesn't wait for it or it isn't back in time.
        """
        self._runtime.sync()
        return self.model

    @in_one_thread
    def load(self) -> None:
        """Lets the next step copy all values of the user's model and optimizer to the devices.

        Assigned values are copied anyway; this is for values that were changed without TensorFlow's variables.
        """
        self._runtime.load()

    @in_one_thread
    def save_checkpoint(self, directory: str | os.PathLike[str], *, wait: bool = True, keep: int = 3) -> pathlib.Path:
        """Saves a checkpoint: weights, optimizer slots, seeds, metrics and the number of steps, but no data position.

        Args:
            directory: where to save; for a cluster, on a file system that all servers share.
            wait: whether to return only once it is on disk; otherwise training can continue, and
                `wait_for_checkpoint` waits.
            keep: the number of checkpoints that the directory keeps; older ones are removed.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointError: it can't be written; earlier checkpoints are still there.
        """
        self._follow()
        path = self._runtime.save(directory, keep, Progress())
        if wait:
            self.wait_for_checkpoint()
        return path

    def wait_for_checkpoint(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            CheckpointError: it couldn't be written.
        """
        self._runtime.saver.wait()

    @in_one_thread
    def restore_checkpoint(self, path: str | os.PathLike[str]) -> Manifest:
        """Restores the values of a checkpoint, or of the newest in a directory, from any plan and cluster.

        Metrics keep the values that they have: ``fit(resume=True)`` goes on with those of the checkpoint.

        Returns:
            Its manifest; ``step``, ``epoch`` and ``batch`` say how far training was.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model.
        """
        self._follow()
        source = Checkpoint.open(path)
        self._runtime.restore(source)
        return source.manifest

    @in_one_thread
    def close(self, *, sync: bool = True) -> None:
        """Copies trained values into the user's model and frees the devices; the next call starts anew.

        ``with dapple_tf.transform(...) as pipelined:`` closes at its end.

        Args:
            sync: False leaves the model unchanged: training since the last ``sync`` or checkpoint is lost.
        """
        self._compiled = []
        self._runtime.close(sync=sync)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Returns the model's name, replicas of stages, schedule, and micro-batches x samples."""
        plan = self.plan
        devices = counted(len(set(itertools.chain(*plan.working_devices))), "device")
        return (
            f"PipelinedModel({self.model.name!r}, stages {':'.join(map(str, plan.replicas))} on {devices}, "
            f"{plan.schedule}, {plan.micro_batches} x {plan.global_batch_size / plan.micro_batches:g} samples)"
        )

    def __del__(self) -> None:
        """Copies trained values into the user's model, unless they may not fit there (`deferred_init`)."""
        runtime = getattr(self, "_runtime", None)
        if runtime is not None and not sys.is_finalizing():
            runtime.leave()

    # ---- steps

    def _function(self, mode: Mode, method: str, argument: str) -> Callable[[Any], dict[str, Any]]:
        """Returns the replacement of Keras' train or test function, which runs steps on an iterator's next batches.

        Args:
            mode: whether it trains.
            method: the method that has been called, for errors.
            argument: name of its argument with the data.
        """

        def function(iterator: Any) -> dict[str, Any]:
            batches = self._passes.get(mode)
            if batches is None or batches.iterator is not iterator:
                batches = self._passes[mode] = self._batches(mode, iterator)
            for step in range(self.model.steps_per_execution):
                if batches.skip():
                    self._begun.add(mode)
                    continue
                started = time.perf_counter()
                try:
                    batch = self._next(mode, batches)
                except StopIteration:
                    if mode not in self._begun:
                        raise no_batch(method, argument) from None
                    if step == 0:
                        raise
                    break
                more = mode is Mode.TRAIN and (self._steps_left is None or step + 1 < self._steps_left)
                self._run(mode, batch, started, batches.prefetch if more else None)
            return self._logs(mode)

        return function

    @in_one_thread
    def _run(self, mode: Mode, batch: Batch, started: float, prefetch: Callable[[], None] | None = None) -> None:
        """Runs a step of a call.

        Args:
            mode: whether it trains.
            batch: its batch.
            started: when reading it began.
            prefetch: begins to read the next one.
        """
        if mode is Mode.TRAIN:
            self._runtime.grow(batch)
        self._runtime.prepare(batch)
        if prefetch is not None:
            prefetch()
        waited = time.perf_counter() - started
        result = self._train(batch) if mode is Mode.TRAIN else self._runtime.run(mode, batch)
        self._runtime.metrics.update(mode.value, result.metrics, result.loss, batch.samples)
        self._run_specs[mode] = batch.spec
        if mode is Mode.TRAIN and self._monitor.callback is not None:
            self._monitor.callback.stepped(batch.samples, time.perf_counter() - started, waited)

    def _logs(self, mode: Mode, metrics: Sequence[Any] | None = None) -> dict[str, Any]:
        """Returns what Keras' train or test function returns after a step; ``metrics`` are the model's, if known."""
        logs = self._runtime.metrics.results(mode.value, metrics)
        if mode is Mode.TRAIN and self._monitor.callback is not None:
            logs |= self._monitor.callback.latest
        return logs

    def _batches(self, mode: Mode, iterator: Iterable[Any]) -> Batches:
        return Batches(self.model, iterator, known=self._specs.get(mode), cut=self.plan.cuts_batches)

    def _next(self, mode: Mode, batches: Batches) -> Batch:
        batch = next(batches)
        self._begun.add(mode)
        if batch.samples:
            self._specs[mode] = batch.spec
        model = self.model
        own_loss = own_losses(model) or type(model).compute_loss is not keras.Model.compute_loss
        if mode is not Mode.PREDICT and batch.spec.y is None and compiled_loss(model) is not None and not own_loss:
            raise DataError(
                f"the batches have no labels, but model {model.name!r} is compiled with a loss: feed (x, y), or "
                f"compile it with loss=None if its layers add their losses"
            )
        return batch

    def _one_batch(self, mode: Mode, data: Any) -> Batch:
        return self._next(mode, self._batches(mode, [data]))

    def _train(self, batch: Batch, *, trace: bool = False) -> StepResult:
        self._follow_plan()
        full, faults = batch.samples == self.plan.global_batch_size, len(self.faults)
        if not batch.spec.uncut:
            self._sizes.trained(batch.samples, self.plan.global_batch_size, self._engine.builder.passes.layout)
        sample = full and not trace and self._monitor.due
        started = time.perf_counter()
        result = self._runtime.train(batch, trace=trace or sample)
        self.last_step_seconds = time.perf_counter() - started
        if full and not trace and len(self.faults) == faults:  # Otherwise the time includes waiting.
            self._followed(result, sampled=sample)
        assert result.loss is not None
        if self._on_non_finite_loss == "stop" and not math.isfinite(result.loss):
            self._runtime.drop()
            elastic = self._runtime.elastic
            raise NonFiniteLossError(
                f"the loss of step {elastic.steps} is {result.loss}; {elastic.kept}. Lower the learning rate, clip "
                f"gradients, or go on as Keras does, with transform(..., on_non_finite_loss='continue')"
            )
        self._runtime.sync_if_due()
        return result

    def _followed(self, result: StepResult, *, sampled: bool) -> None:
        """Records the time of a full training step."""
        if not sampled:
            self._monitor.stepped(self.last_step_seconds)
            if self._prediction is not None:
                self._prediction.add(self.last_step_seconds)
            return
        traced = result.traced
        assert traced is not None
        if traced.first:
            self._monitor.prepared(self.last_step_seconds)
            return
        self._monitor.sampled(self._engine.measured(traced), self.plan, self._runtime.elastic.steps)

    @in_one_thread
    def _predict(self, items: Iterable[Any]) -> Any:
        """Replaces Keras' predict function: returns the outputs for consecutive batches, concatenated."""
        outputs = []
        for item in items:
            batch = self._one_batch(Mode.PREDICT, item)
            tensors = [tf.convert_to_tensor(array) for array in self._runtime.run(Mode.PREDICT, batch).outputs]
            outputs.append(keras.tree.pack_sequence_as(self._engine.table.outputs[batch.spec.key], tensors))
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
