"""The Keras front: ``transform`` and the pipelined model, whose training loop is Keras' own."""

from __future__ import annotations

import contextlib
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.attachment import Hooks, attached, with_sync
from dapple_tf.automatic import plan_model
from dapple_tf.batch import Batch, Batches, BatchSpec, declared_spec
from dapple_tf.capture import Mode, capture, check_model
from dapple_tf.cluster import Cluster
from dapple_tf.engine import Engine, StepResult
from dapple_tf.errors import DataError, NonFiniteLossError, StepError, reason
from dapple_tf.metrics import RunningMetrics
from dapple_tf.optimizer import check_optimizer
from dapple_tf.plan import Plan, PlanError
from dapple_tf.prediction import Prediction
from dapple_tf.profile import Profile
from dapple_tf.simulator import simulate
from dapple_tf.values import Values
from dapple_tf.verification import Verification, compare
from graph_passes.assign_stages import AssignStages, find_call
from graph_passes.pass_manager import run_passes
from graph_passes.program import LayerCall

logger = logging.getLogger(__name__)


def transform(
    model: keras.Model,
    cluster: Cluster,
    plan: Plan | None = None,
    *,
    global_batch_size: int | None = None,
    profile: Profile | None = None,
    on_non_finite_loss: str = "stop",
    **planning: Any,
) -> PipelinedModel:
    """Makes a pipelined, data-parallel trainer of a compiled Keras model.

    Without a plan, the model is profiled on the cluster's devices and planned first; ``print(pipelined.plan)`` shows
    what was found and why, ``pipelined.prediction`` how well the prediction holds once steps have run.

    Args:
        model: a built and compiled Keras model; it isn't modified, and gets the trained values by ``sync``.
        cluster: the devices.
        plan: stages, replicas, micro-batches and schedule; None finds one.
        global_batch_size: samples in one step, when there is no plan.
        profile: what the model's layers cost, to plan from or to compare a given plan with; None measures it where a
            plan has to be found.
        on_non_finite_loss: ``stop`` raises NonFiniteLossError at the step whose loss is NaN or infinite; ``continue``
            goes on, as Keras does.
        planning: what the search is to choose from, as for :func:`dapple_tf.plan`, such as ``schedule="auto",
            reverse_first_k="auto"`` for out-of-order backprop wherever it gains, and example data (``x``, ``y``,
            ``sample_weight``), as for :func:`dapple_tf.profile`. With ``overlap=True`` replicated stages are cut into
            chunks where that is faster, whose gradients are all-reduced while others are computed.

    Raises:
        CaptureError: the model isn't built or compiled, or can't be captured.
        PlanError: the plan doesn't fit the cluster, or none fits its memory.
        ProfileError: the model's inputs or labels can't be guessed, to measure it; give ``x`` and ``y``.
        PassError: a cut names no layer, or leaves a stage empty.
    """
    if plan is None:
        if global_batch_size is None:
            raise PlanError("transform() got neither a plan nor a global_batch_size; give one of them")
        if not cluster.real:
            raise PlanError(
                "this cluster is a description without real devices: plan for it with dapple_tf.plan(), and transform "
                "on a real one"
            )
        check_model(model, training=True)
        planned = plan_model(model, cluster, global_batch_size, profiled=profile, **planning)
        plan, profile, cluster = planned.plan, planned.profile, planned.cluster
    else:
        if planning:
            raise TypeError(f"transform() got a plan, so that {', '.join(planning)} mean nothing; leave them out")
        if global_batch_size not in (None, plan.global_batch_size):
            raise PlanError(
                f"transform() got global_batch_size={global_batch_size} and a plan for {plan.global_batch_size}; leave "
                f"global_batch_size out, or make a plan for it"
            )
    return PipelinedModel(model, cluster, plan, profile, on_non_finite_loss=on_non_finite_loss)


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
        cluster: the devices.
        plan: the plan.
        profile: the profile that the plan was made from; None if there was none.
        prediction: the simulated time of a step, and the measured one; None without a profile.
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
    ) -> None:
        """See :func:`transform`."""
        if on_non_finite_loss not in ("stop", "continue"):
            raise ValueError(f"on_non_finite_loss={on_non_finite_loss!r} is unknown; use 'stop' or 'continue'")
        self.model, self.cluster, self.plan, self.profile = model, cluster, plan, profile
        self.last_step_seconds = 0.0
        self.prediction: Prediction | None = None
        if profile is not None:
            all_reduce = "hierarchical" if plan.report is None else plan.report.all_reduce
            self.prediction = Prediction(simulate(plan, profile, cluster, all_reduce=all_reduce).latency)
        self._on_non_finite_loss = on_non_finite_loss
        self._steps = 0
        self._start()
        if model.run_eagerly:
            logger.warning("model %r is compiled with run_eagerly=True, which pipelined steps ignore", model.name)

    def _start(self) -> None:
        """Checks the model as it is compiled now, and makes an engine for it."""
        check_model(self.model, training=True)
        check_optimizer(self.model.optimizer, self.model.trainable_variables)
        self._engine = Engine(self.model, self.cluster, self.plan)
        self._compiled = self._settings()
        self._values = Values(self._engine)
        self._metrics = RunningMetrics(self.model, self._engine.table)
        self._passes: dict[Mode, Batches] = {}
        self._specs: dict[Mode, BatchSpec] = {}
        self._check_cuts()

    def _settings(self) -> list[Any]:
        """The objects that step graphs are made for: after another ``compile``, say, they have to be made again."""
        model = self.model
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        rate = getattr(inner, "_learning_rate", None)
        compiled = [model.optimizer, rate, model._compile_loss, model._compile_metrics]
        return [*compiled, *model.variables, None, *model.trainable_variables]

    def _check_cuts(self) -> None:
        """Finds errors in cuts before any data is there; of a model without declared inputs only unknown names."""
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

    def fit(self, x: Any = None, y: Any = None, *, batch_size: int | None = None, **arguments: Any) -> Any:
        """``keras.Model.fit``; ``batch_size`` and ``validation_batch_size`` are by default the plan's.

        Raises:
            DataError: batches don't fit the plan, or change their structure or shape.
            NonFiniteLossError: the loss isn't finite and the transform was told to stop.
        """
        planned = self.plan.global_batch_size
        if batch_size not in (None, planned):
            raise DataError(
                f"batch_size={batch_size}, but the plan's global batch size is {planned}: leave batch_size out, or "
                f"make a plan with global_batch_size={batch_size}"
            )
        arguments["validation_batch_size"] = arguments.get("validation_batch_size") or planned
        return self._call("fit", x, y, batch_size=planned, **arguments)

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
            sync=self._values.sync,
            load=self._values.load,
            doubt=self._values.doubt,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(attached(self.model, hooks))
            stack.callback(setattr, self, "_passes", self._passes)  # of the call that this one is made in, if any
            self._passes = {}
            if method == "fit" or kwargs.get("callbacks") is not None:
                kwargs["callbacks"] = stack.enter_context(with_sync(kwargs.get("callbacks"), hooks))
            return getattr(self.model, method)(*args, **kwargs)

    def _follow(self) -> None:
        """Makes a new engine if the model has been compiled, frozen or extended since."""
        self._values.doubt()
        now = self._settings()
        if len(now) == len(self._compiled) and all(a is b for a, b in zip(now, self._compiled, strict=True)):
            return
        logger.info("model %r has changed since its step graphs were made; they are made again", self.model.name)
        self.close()
        self._start()

    # ---- values

    def sync(self) -> keras.Model:
        """Copies the devices' values into the user's model and optimizer; returns the model."""
        self._values.sync()
        return self.model

    def load(self) -> None:
        """Makes the values of the user's model and optimizer count, over those that the devices have."""
        self._values.load()

    def save(self, path: str | pathlib.Path, **arguments: Any) -> None:
        """``sync``, then ``keras.Model.save``."""
        self.sync().save(path, **arguments)

    def close(self) -> None:
        """Copies values into the user's model and frees the devices; another call starts anew."""
        self.sync()
        self._engine.close()
        self._compiled = []

    # ---- looking inside

    def verify(self, x: Any, y: Any = None, sample_weight: Any = None) -> Verification:
        """Compares one step with plain Keras on one device: the loss and every gradient.

        Layers that draw random numbers or normalise by the batch don't give the same on slices as on the whole batch,
        so that a model with such layers is compared in inference behaviour (``training=False``); the result says so.
        Nothing changes, but that the user's model gets the devices' values (``sync``).
        """
        self._follow()
        self.sync()
        batch = self._one_batch(Mode.TRAIN, (x, y, sample_weight))

        def run(training: bool) -> StepResult:
            return self._run(Mode.TRAIN, batch, training=training, want_gradients=True)

        return compare(run, self.model, self._engine.table, x, y, sample_weight)

    def dump(self, directory: str | pathlib.Path) -> None:
        """Writes the plan, the schedule and the graph after every pass (``NN_pass.pbtxt``)."""
        path = pathlib.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self.plan.save(path / "plan.json")
        self._engine.dump(path)

    def trace_step(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Trains on one batch and returns TensorFlow's ``StepStats``: start and end of each task, and each allocation.

        Metrics and History know nothing of this step.
        """
        self._follow()
        return self._train(self._one_batch(Mode.TRAIN, (x, y, sample_weight)), trace=True).trace

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
                try:
                    batch = self._next(mode, batches)
                except StopIteration:
                    if step == 0:
                        raise
                    break
                self._step(mode, batch)
            return {name: tf.convert_to_tensor(value) for name, value in self.model.get_metrics_result().items()}

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
        result = self._train(batch) if mode is Mode.TRAIN else self._run(mode, batch)
        self._metrics.update(result.metrics, result.loss, batch.samples)

    def _train(self, batch: Batch, *, trace: bool = False) -> StepResult:
        started = time.perf_counter()
        result = self._run(Mode.TRAIN, batch, trace=trace)
        self.last_step_seconds = time.perf_counter() - started
        self._steps += 1
        if self.prediction is not None and not trace and batch.samples == self.plan.global_batch_size:
            self.prediction.add(self.last_step_seconds)
        assert result.loss is not None
        if self._on_non_finite_loss == "stop" and not math.isfinite(result.loss):
            self._values.load()
            raise NonFiniteLossError(
                f"the loss of step {self._steps} is {result.loss}; the model keeps the values of its last sync(). "
                f"Lower the learning rate, clip gradients, or go on regardless with transform(..., "
                f"on_non_finite_loss='continue')"
            )
        return result

    def _predict(self, items: Iterable[Any]) -> Any:
        """What takes the place of Keras' predict function: the outputs for consecutive batches, as one."""
        outputs = []
        for item in items:
            batch = self._one_batch(Mode.PREDICT, item)
            tensors = [tf.convert_to_tensor(array) for array in self._run(Mode.PREDICT, batch).outputs]
            outputs.append(keras.tree.pack_sequence_as(self._engine.output_structure(batch.spec), tensors))
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    def _run(self, mode: Mode, batch: Batch, *, training: bool | None = None, **options: Any) -> StepResult:
        """Runs a step on the devices.

        Raises:
            StepError: one of them failed. After a training step, the devices' values are lost.
        """
        self._values.prepare(mode, batch.spec, training)
        metrics = self._metrics.feeds() if mode is not Mode.PREDICT else None
        try:
            return self._engine.run(mode, batch.spec, batch.arrays, training=training, metrics=metrics, **options)
        except tf.errors.OpError as error:
            lost = self._engine.ahead
            if lost:
                self._values.load()  # Some stages may have been updated and others not.
            kept = "; the model keeps the values of its last sync()" if lost else ""
            raise StepError(f"a {mode.value} step failed: {self._cause(batch) or reason(error)}{kept}") from error

    def _cause(self, batch: Batch) -> str:
        """What plain Keras says of a batch; empty if it finds nothing wrong.

        TensorFlow often reports only that some device was waiting for the one that failed.
        """
        arrays = iter(batch.arrays)
        x = keras.tree.map_structure(lambda leaf: None if leaf is None else next(arrays), batch.spec.x)
        try:
            with keras.StatelessScope(collect_losses=True):
                self.model(x)
        except Exception as error:
            return reason(error)
        return ""
