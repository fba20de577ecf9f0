"""The Keras front: the pipelined model, whose training loop is Keras' own."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import Checkpoint, Progress
from dapple_tf.checkpoints.checkpoint_manifest import Manifest
from dapple_tf.checkpoints.checkpointing import CheckpointedFit, Checkpointing
from dapple_tf.clusters.cluster import Cluster
from dapple_tf.clusters.faults import FaultPolicy
from dapple_tf.dumps.dump import dump
from dapple_tf.errors import DappleError, DataError, NonFiniteLossError, WorkerLostError
from dapple_tf.execution.builds import StepResult
from dapple_tf.execution.engine import Engine
from dapple_tf.execution.recovery import FaultRecord
from dapple_tf.execution.runtime import Runtime
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.attachment import Hooks, attached, with_sync
from dapple_tf.frontend.batch import Batch, Batches, BatchSpec, declared_spec
from dapple_tf.frontend.capture import Mode, capture, check_model
from dapple_tf.frontend.functional import cuts_are_safe
from dapple_tf.frontend.initialization import materialize
from dapple_tf.frontend.optimizer import check_optimizer
from dapple_tf.measurement.monitoring import PipelineMonitor, StepMonitor
from dapple_tf.measurement.prediction import Prediction
from dapple_tf.measurement.step_profile import StepProfile
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpPlacement
from dapple_tf.planning.plan import Plan
from dapple_tf.profiling.profile import Profile
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.simulation.simulator import simulate
from dapple_tf.verification import Verification, compare
from dapple_tf.view.planned import planned
from graph_passes.assign_stages import AssignStages, find_call
from graph_passes.pass_manager import run_passes
from graph_passes.program import LayerCall

logger = logging.getLogger(__name__)


class PipelinedModel:
    """A Keras model that trains as a pipeline.

    ``fit``, ``evaluate``, ``predict`` and the ``*_on_batch`` methods are those of the user's model, whose training,
    test and prediction functions run the pipeline's step graphs meanwhile: callbacks, History, progress bar and
    validation are Keras' own and see the user's model.

    Values live in two places: on the devices, which train, and in the user's model. ``sync`` copies them to the model;
    ``fit`` does so when it begins, before validation and at the end of each epoch, before callbacks see the model. What
    is assigned to the model while both agree (by callbacks then, or by the user after a ``sync`` or ``fit``) is noticed
    and taken over before the next step; ``load`` makes the model's values count at any time. Within an epoch, callbacks
    get fresh values by ``get_weights``, ``save`` and ``save_weights``, and may assign them by ``set_weights`` and
    ``load_weights``; the learning rate counts from the next step.

    An error leaves the model with its values of the last ``sync``. When the model has been compiled again, or layers
    frozen, the next call makes new step graphs.

    Attributes:
        model: the user's Keras model.
        profile: the profile that the plan was made from; None if there was none.
        prediction: the simulated time of a step, and the measured one; None without a profile, and after a fault.
        last_step_seconds: time of the last training step, from feeding the devices to their results; what Keras does
            before and after isn't in it.
    """

    def __init__(
        self,
        model: keras.Model,
        cluster: Cluster,
        plan: Plan,
        profile: Profile | None = None,
        *,
        on_non_finite_loss: str = "stop",
        faults: FaultPolicy | None = None,
        operator_costs: OperatorCosts | None = None,
    ) -> None:
        """See :func:`dapple_tf.transform`."""
        if on_non_finite_loss not in ("stop", "continue"):
            raise ValueError(f"on_non_finite_loss={on_non_finite_loss!r} is unknown; use 'stop' or 'continue'")
        self.model, self.profile = model, profile
        self.last_step_seconds = 0.0
        self.prediction: Prediction | None = None
        simulation: Simulation | None = None
        if profile is not None:
            all_reduce = "hierarchical" if plan.report is None else plan.report.all_reduce
            simulation = simulate(plan, profile, cluster, all_reduce=all_reduce)
            self.prediction = Prediction(simulation.latency, simulation=simulation)
        self._monitor = StepMonitor(simulation)
        self._on_non_finite_loss = on_non_finite_loss
        self._check()
        self._runtime = Runtime(model, cluster, plan, profile, faults or FaultPolicy(), operator_costs)
        self._start()
        if model.run_eagerly:
            logger.warning("model %r is compiled with run_eagerly=True, which pipelined steps ignore", model.name)

    def _start(self) -> None:
        """What steps of the model as it is compiled now need."""
        materialize(self.model.metrics_variables)  # Keras asks them after every step.
        self._compiled = self._settings()
        self._passes: dict[Mode, Batches] = {}
        self._specs: dict[Mode, BatchSpec] = {}
        self._steps_left: int | None = 0  # of the epoch, from the one that was begun last; None if nobody knows
        self._check_cuts()

    def _check(self) -> None:
        check_model(self.model, training=True)
        check_optimizer(self.model.optimizer, self.model.trainable_variables)

    @property
    def _engine(self) -> Engine:
        return self._runtime.engine

    def _settings(self) -> list[Any]:
        """The objects that step graphs are made for: after another ``compile``, say, they have to be made again."""
        model = self.model
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        rate = getattr(inner, "_learning_rate", None)
        compiled = [model.optimizer, rate, model._compile_loss, model._compile_metrics]
        return [*compiled, *model.variables, None, *model.trainable_variables]

    def _check_cuts(self) -> None:
        """Finds errors in cuts before any data is there; of a model without declared inputs only unknown names."""
        if cuts_are_safe(self.model, self.plan.cuts):
            return
        spec = declared_spec(self.model)
        if spec is not None:
            program = capture(self.model, self._engine.table, Mode.PREDICT, spec)
            run_passes(program, [AssignStages(self.plan.cuts)])
            return
        layers = [item for layer in self.model._flatten_layers() for item in (layer, *getattr(layer, "operations", ()))]
        names = {layer.name for layer in layers if layer is not self.model}
        for cut in self.plan.cuts:
            path, _, _ = cut.partition("#")
            if path.rpartition("/")[2] not in names:
                find_call(path, [LayerCall(name, 0, 1) for name in sorted(names)])

    # ---- Keras' methods

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        batch_size: int | None = None,
        checkpoint: Checkpointing | None = None,
        resume: bool = False,
        **arguments: Any,
    ) -> Any:
        """``keras.Model.fit``; ``batch_size`` and ``validation_batch_size`` are by default the plan's.

        Args:
            x: as for Keras.
            y: as for Keras.
            batch_size: of arrays; the plan's global batch size.
            checkpoint: when and where to save checkpoints, in the background.
            resume: go on from the newest checkpoint of that directory, if it has any: with the same plan, devices and
                data, as if training hadn't stopped. Callbacks' own state isn't in it.
            arguments: as for Keras.

        Raises:
            DataError: batches don't fit the plan, or change their structure or shape.
            NonFiniteLossError: the loss isn't finite and the transform was told to stop.
            CheckpointError: the checkpoint to go on from is damaged, or of another model or other data.
        """
        if resume and checkpoint is None:
            raise ValueError("resume=True goes on from a checkpoint; give checkpoint=Checkpointing(directory), too")
        planned = self.plan.global_batch_size
        if batch_size not in (None, planned):
            raise DataError(
                f"batch_size={batch_size}, but the plan's global batch size is {planned}: leave batch_size out, or "
                f"make a plan with global_batch_size={batch_size}"
            )
        arguments["validation_batch_size"] = arguments.get("validation_batch_size") or planned
        if checkpoint is None:
            return self._call("fit", x, y, batch_size=planned, **arguments)
        save = functools.partial(self._runtime.save, checkpoint.directory, checkpoint.keep)
        fit = CheckpointedFit(checkpoint, self.model, planned, save, lambda: self._runtime.steps)
        source = fit.resumable() if resume else None
        if source is not None:
            self._follow()
            self._runtime.restore(source)
        try:
            return self._call("fit", batch_size=planned, **fit.arguments(source, x, y, **arguments))
        finally:
            self._runtime.saver.finish()

    def evaluate(self, x: Any = None, y: Any = None, *, batch_size: int | None = None, **arguments: Any) -> Any:
        """``keras.Model.evaluate``, forward only; ``batch_size`` is by default the plan's global batch size."""
        return self._call("evaluate", x, y, batch_size=batch_size or self.plan.global_batch_size, **arguments)

    def predict(self, x: Any, *, batch_size: int | None = None, **arguments: Any) -> Any:
        """``keras.Model.predict``, forward only; ``batch_size`` is by default the plan's global batch size."""
        return self._call("predict", x, batch_size=batch_size or self.plan.global_batch_size, **arguments)

    def train_on_batch(self, x: Any, y: Any = None, **arguments: Any) -> Any:
        """``keras.Model.train_on_batch``, of up to the plan's global batch size."""
        return self._call("train_on_batch", x, y, **arguments)

    def test_on_batch(self, x: Any, y: Any = None, **arguments: Any) -> Any:
        """``keras.Model.test_on_batch``."""
        return self._call("test_on_batch", x, y, **arguments)

    def predict_on_batch(self, x: Any) -> Any:
        """``keras.Model.predict_on_batch``."""
        return self._call("predict_on_batch", x)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the user's model, whose steps run here meanwhile."""
        self._follow()
        hooks = Hooks(
            train=self._function(Mode.TRAIN),
            test=self._function(Mode.TEST),
            predict=self._predict,
            sync=self.sync,
            load=self.load,
            agree=self._runtime.agree,
            steps_left=lambda count: setattr(self, "_steps_left", count),
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(attached(self.model, hooks))
            stack.callback(setattr, self, "_passes", self._passes)  # of the call that this one is made in, if any
            stack.callback(setattr, self, "_steps_left", self._steps_left)
            self._passes = {}
            self._steps_left = 0
            if method == "fit":
                self._watch_by(kwargs.get("callbacks"), stack)
            if method == "fit" or kwargs.get("callbacks") is not None:
                kwargs["callbacks"] = stack.enter_context(with_sync(kwargs.get("callbacks"), hooks))
            return getattr(self.model, method)(*args, **kwargs)

    def _watch_by(self, callbacks: Any, stack: contextlib.ExitStack) -> None:
        """Has the user's `PipelineMonitor` told of the steps, if there is one among the callbacks."""
        given = getattr(callbacks, "callbacks", callbacks)
        given = given if isinstance(given, (list, tuple)) else [given]
        monitors = [callback for callback in given if isinstance(callback, PipelineMonitor)]
        if len(monitors) > 1:
            raise ValueError(f"fit() got {len(monitors)} PipelineMonitors among its callbacks; give it one")
        stack.callback(setattr, self._monitor, "callback", self._monitor.callback)
        self._monitor.callback = monitors[0] if monitors else None
        for monitor in monitors:
            monitor.attach(self.plan)
            stack.callback(monitor.detach)

    def _follow(self) -> None:
        """Makes a new engine if the model has been compiled, frozen or extended since."""
        self._runtime.mend()
        self._runtime.values.doubt()
        if not self._changed():
            return
        logger.info("model %r has changed since its step graphs were made; they are made again", self.model.name)
        self.close()
        self._check()
        self._runtime.start()
        self._start()

    def _changed(self) -> bool:
        """Whether the model has been compiled, frozen or extended since its step graphs were made."""
        now = self._settings()
        return len(now) != len(self._compiled) or any(a is not b for a, b in zip(now, self._compiled, strict=True))

    # ---- values

    def sync(self) -> keras.Model:
        """Copies the devices' values into the user's model and optimizer; returns the model.

        A model made under :func:`dapple_tf.deferred_init` gets all of its values here, a few variables at a time, and
        is an ordinary one from then on.

        Raises:
            WorkerLostError: a worker was lost, and isn't to be waited for or not back in time.
        """
        self._runtime.sync()
        return self.model

    def load(self) -> None:
        """Makes the values of the user's model and optimizer count, over those that the devices have."""
        self._runtime.values.load()

    def save(self, path: str | pathlib.Path, **arguments: Any) -> None:
        """``sync``, then ``keras.Model.save``."""
        self.sync().save(path, **arguments)

    def save_checkpoint(self, directory: str | os.PathLike[str], *, wait: bool = True, keep: int = 3) -> pathlib.Path:
        """Saves a checkpoint: weights, optimizer slots, seeds, metrics and the number of steps, but no data's position.

        Args:
            directory: where to; for a cluster, on a file system that all servers share.
            wait: until it is on disk; else training can go on meanwhile, and `wait_for_checkpoint` waits.
            keep: how many checkpoints the directory keeps; older ones are removed.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointError: it can't be written; the checkpoints before are still there.
        """
        self._follow()
        path = self._runtime.save(directory, keep, Progress())
        if wait:
            self.wait_for_checkpoint()
        return path

    def wait_for_checkpoint(self) -> None:
        """Until the last checkpoint is on disk.

        Raises:
            CheckpointError: it couldn't be written.
        """
        self._runtime.saver.wait()

    def restore_checkpoint(self, path: str | os.PathLike[str]) -> Manifest:
        """Takes over the values of a checkpoint, or of the newest in a directory, whatever plan and cluster it is from.

        Returns:
            What it holds; its ``step``, ``epoch`` and ``batch`` say how far training was.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model.
        """
        self._follow()
        source = Checkpoint.open(path)
        self._runtime.restore(source)
        return source.manifest

    def close(self, *, sync: bool = True) -> None:
        """Copies trained values into the user's model and frees the devices; another call starts anew.

        Args:
            sync: False leaves the model as it is: what was trained since the last ``sync`` or checkpoint is lost.
        """
        self._compiled = []
        self._runtime.close(sync=sync)

    # ---- looking inside

    def verify(self, x: Any, y: Any = None, sample_weight: Any = None) -> Verification:
        """Compares one step with plain Keras on one device: the loss and every gradient.

        Layers that draw random numbers or normalise by the batch don't give the same on slices as on the whole batch,
        so that where a plan cuts it, a model with such layers is compared in inference behaviour (``training=False``);
        the result says so.
        Nothing changes, but that the user's model gets the devices' values (``sync``).
        """
        self._follow()
        self.sync()
        batch = self._one_batch(Mode.TRAIN, (x, y, sample_weight))

        def run(training: bool) -> StepResult:
            return self._runtime.run(Mode.TRAIN, batch, training=training, want_gradients=True)

        whole = self.plan.micro_batches == 1 and set(self.plan.replicas) == {1}
        return compare(run, self.model, self._engine.table, x, y, sample_weight, whole=whole)

    def dump(self, directory: str | pathlib.Path) -> None:
        """Writes what steps are made of: graphs, plan, schedule, drawings; ``index.html`` there tells what is what.

        The graph before and after every pass (``NN_pass.pbtxt``) of each kind of step that has been run, and of
        training if it hasn't: nothing is run, and nothing that training depends on changes.

        Args:
            directory: what to fill. Files of an earlier dump there are replaced, others left.

        Raises:
            DataError: no step has been run, and the model doesn't tell what batches look like.
            FolderError: something else in the directory would be overwritten.
        """
        engine = self._engine
        sources = [] if self._changed() else engine.sources
        passes = StepPasses(self.plan, self.cluster)
        spec = self._specs.get(Mode.TRAIN)
        costs = None if engine.placer is None else engine.placer.costs
        dump(directory, self.model, passes, sources, engine.table, self.profile, spec=spec, operator_costs=costs)

    def trace_step(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Trains on one batch and returns TensorFlow's ``StepStats``: start and end of each task, and each allocation.

        Metrics and History know nothing of this step. Where a step is one function (one device, one micro-batch), stage
        functions are called one by one in this one. TensorFlow prepares a traced step by itself, the first time.
        """
        self._follow()
        traced = self._train(self._one_batch(Mode.TRAIN, (x, y, sample_weight)), trace=True).traced
        assert traced is not None
        return traced.stats

    def profile_step(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, warm_up: int = 2, train: bool = False
    ) -> StepProfile:
        """Measures one training step, task by task and device by device, beside what was planned and simulated.

        The step is a real one, but doesn't count: afterwards weights, optimizer, random seeds, metrics and the number
        of steps are what they were. For that the user's model gets the devices' values first (``sync``), and the
        devices get them back with the next step.

        Args:
            x: one batch of inputs, as for ``train_on_batch``.
            y: its labels.
            sample_weight: its weights.
            warm_up: steps that don't count at all. Then come the one that is measured, and one before and after it, by
                which the time is known that it takes without being traced. The first time one more is traced, since
                TensorFlow prepares traced steps by themselves.
            train: leave the devices trained on this batch by all of these steps, in place of bringing values back: for
                models that are larger than this process's memory (``deferred_init``).

        Raises:
            DappleError: the model's values are only on the devices, and ``train`` is False.
        """
        if warm_up < 0:
            raise ValueError(f"warm_up is {warm_up}; give 0 or more steps")
        self._follow()
        if not train and self._engine.deferred:
            raise DappleError(
                f"profile_step() would fetch all values of model {self.model.name!r} into this process, to bring them "
                f"back afterwards: call sync() first if they fit, or give train=True to train on this batch"
            )
        batch = self._one_batch(Mode.TRAIN, (x, y, sample_weight))
        if not train:
            self.sync()
        run = self._runtime.train if train else functools.partial(self._runtime.run, Mode.TRAIN)

        def untraced() -> float:
            started = time.perf_counter()
            run(batch)
            return time.perf_counter() - started

        try:
            for _ in range(warm_up):
                run(batch)
            before = untraced()
            traced = run(batch, trace=True).traced
            if traced is not None and traced.first:
                traced = run(batch, trace=True).traced
            seconds = (before + untraced()) / 2
        finally:
            if not train:
                self._runtime.values.load()
        assert traced is not None
        full = batch.samples == self.plan.global_batch_size
        simulation = self.prediction.simulation if self.prediction is not None and full else None
        ideal = planned(self.plan, self.profile, self.cluster) if full else None
        return StepProfile(self._engine.measured(traced), self.plan, simulation, ideal, seconds)

    @property
    def cluster(self) -> Cluster:
        """The devices; fewer when it was gone on without a worker."""
        return self._runtime.cluster

    @property
    def plan(self) -> Plan:
        """The plan; another one when it was gone on without a worker."""
        return self._runtime.plan

    @property
    def placement(self) -> Mapping[int, OpPlacement]:
        """Stage -> where the single operators of the largest training step so far are.

        Empty before the first step, and where stages run as a whole.
        """
        return self._engine.placements

    @property
    def faults(self) -> Sequence[FaultRecord]:
        """Those that training went on after."""
        return tuple(self._runtime.faults)

    @property
    def lost(self) -> WorkerLostError | None:
        """The worker that is missing now; None if all are there, or devices are this process's."""
        return self._engine.lost

    @property
    def preparation_seconds(self) -> dict[str, float]:
        """Seconds that each pass has taken so far."""
        return dict(self._engine.timing.seconds)

    # ---- steps

    def _function(self, mode: Mode) -> Callable[[Any], dict[str, Any]]:
        """What takes the place of Keras' train or test function: runs steps on an iterator's next batches."""

        def function(iterator: Any) -> dict[str, Any]:
            batches = self._pass(mode, iterator)
            for step in range(self.model.steps_per_execution):
                if batches.skip():
                    continue
                started = time.perf_counter()
                try:
                    batch = self._next(mode, batches)
                except StopIteration:
                    if step == 0:
                        raise
                    break
                if mode is Mode.TRAIN and (self._steps_left is None or step + 1 < self._steps_left):
                    batches.prefetch()
                waited = time.perf_counter() - started
                self._step(mode, batch)
                if mode is Mode.TRAIN and self._monitor.callback is not None:
                    self._monitor.callback.stepped(batch.samples, time.perf_counter() - started, waited)
            logs = self._runtime.metrics.results()
            if mode is Mode.TRAIN and self._monitor.callback is not None:
                logs |= self._monitor.callback.latest
            return logs

        return function

    def _pass(self, mode: Mode, iterator: Iterable[Any]) -> Batches:
        """The batches of an iterator; with the same iterator, those that follow."""
        before = self._passes.get(mode)
        if before is None or before.iterator is not iterator:
            full = self.plan.global_batch_size if mode is Mode.TRAIN else None
            self._passes[mode] = Batches(self.model, iterator, known=self._specs.get(mode), full=full)
        return self._passes[mode]

    def _next(self, mode: Mode, batches: Batches) -> Batch:
        batch = next(batches)
        self._specs[mode] = batch.spec
        model = self.model
        own_loss = type(model).compute_loss is not keras.Model.compute_loss
        if mode is not Mode.PREDICT and batch.spec.y is None and model._compile_loss is not None and not own_loss:
            raise DataError(
                f"the batches have no labels, but model {model.name!r} is compiled with a loss: feed (x, y), or "
                f"compile it with loss=None if its layers add their losses"
            )
        return batch

    def _one_batch(self, mode: Mode, data: Any) -> Batch:
        full = self.plan.global_batch_size if mode is Mode.TRAIN else None
        return self._next(mode, Batches(self.model, [data], known=self._specs.get(mode), full=full))

    def _step(self, mode: Mode, batch: Batch) -> None:
        """One training or test step; metrics have its results then."""
        result = self._train(batch) if mode is Mode.TRAIN else self._runtime.run(mode, batch)
        self._runtime.metrics.update(result.metrics, result.loss, batch.samples)

    def _train(self, batch: Batch, *, trace: bool = False) -> StepResult:
        full, faults = batch.samples == self.plan.global_batch_size, len(self.faults)
        sample = full and not trace and self._monitor.due
        started = time.perf_counter()
        result = self._runtime.train(batch, trace=trace or sample)
        self.last_step_seconds = time.perf_counter() - started
        if self.faults:
            self.prediction = self._monitor.drift = None  # They aren't of the devices that are left.
        if full and not trace and len(self.faults) == faults:  # Else time went by with waiting.
            self._followed(result, sampled=sample)
        assert result.loss is not None
        if self._on_non_finite_loss == "stop" and not math.isfinite(result.loss):
            self._runtime.values.load()
            raise NonFiniteLossError(
                f"the loss of step {self._runtime.steps} is {result.loss}; {self._runtime.values.kept}. "
                f"Lower the learning rate, clip gradients, or go on regardless with transform(..., "
                f"on_non_finite_loss='continue')"
            )
        self._runtime.make_safe()
        return result

    def _followed(self, result: StepResult, *, sampled: bool) -> None:
        """Takes down what a full training step took."""
        if not sampled:
            self._monitor.stepped(self.last_step_seconds)
            if self.prediction is not None:
                self.prediction.add(self.last_step_seconds)
            return
        traced = result.traced
        assert traced is not None
        if traced.first:
            self._monitor.prepared(self.last_step_seconds)
            return
        self._monitor.sampled(self._engine.measured(traced), self.plan, self._runtime.steps)

    def _predict(self, items: Iterable[Any]) -> Any:
        """What takes the place of Keras' predict function: the outputs for consecutive batches, as one."""
        outputs = []
        for item in items:
            batch = self._one_batch(Mode.PREDICT, item)
            tensors = [tf.convert_to_tensor(array) for array in self._runtime.run(Mode.PREDICT, batch).outputs]
            outputs.append(keras.tree.pack_sequence_as(self._engine.output_structure(batch.spec), tensors))
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
