"""The pipelined model: Keras' methods, and verifying, dumping, tracing and measuring steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras

from dapple_tf.checkpoints.checkpointing import Checkpointing
from dapple_tf.dumps.dump import dump
from dapple_tf.errors import DappleError, DataError, WorkerLostError, check_names
from dapple_tf.execution.builds import StepRequest, StepResult
from dapple_tf.execution.elastic import FaultRecord, GrowthRecord
from dapple_tf.execution.notes import Note
from dapple_tf.front.compared_steps import Outcome, Reasons, Run, compare_steps, pipelined_steps
from dapple_tf.front.training import Training
from dapple_tf.front.verification import PlainSide, Verification, compare, computed_in
from dapple_tf.frontend.attachment import has_own
from dapple_tf.frontend.batch import Batch
from dapple_tf.frontend.batch_sizes import whole_number
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.model_front import in_one_thread
from dapple_tf.frontend.on_workers import OnWorkers, arguments_on_workers
from dapple_tf.operators.op_graph import OpPlacement
from dapple_tf.simulation.planned import planned
from dapple_tf.tracing.step_profile import StepProfile
from graph_passes.ir.graph import GraphDef

_Method = TypeVar("_Method", bound=Callable[..., Any])


@functools.cache  # Called for each step.
def _parameters(method: str) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a method of ``keras.Model``, without ``self``, by their names."""
    own: Callable[..., Any] = getattr(keras.Model, method)
    _, *parameters = inspect.signature(own).parameters.values()
    return {each.name: each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}


def _as_keras(method: _Method) -> _Method:
    """Gives a method the signature of Keras' own, with keyword arguments of ours behind, for help and completion."""
    signature = inspect.signature(method)
    self, *given = signature.parameters.values()
    ours = [each for each in given if each.kind is each.KEYWORD_ONLY]
    theirs = _parameters(method.__name__).values()
    vars(method)["__signature__"] = signature.replace(parameters=[self, *theirs, *ours])
    return method


class PipelinedModel(Training):
    """A Keras model that trains as a pipeline.

    ``fit``, ``evaluate``, ``predict`` and the ``*_on_batch`` methods are those of the user's model, whose training,
    test and prediction functions run the pipeline's step graphs meanwhile: callbacks, History, progress bar and
    validation are Keras' own and see the user's model. ``summary``, ``layers``, ``get_weights``, ``optimizer``,
    ``compile`` and all other attributes of the user's model are attributes of this one, too; assigning one that steps
    don't follow is an error.

    Values live in two places: on the devices, which train, and in the user's model. The two look like one: a variable
    of the model or its optimizer is fetched when it is read (by callbacks, the user's own loops or traced functions),
    and an assigned value is used from the next step on. ``sync`` fetches all values at once; ``fit`` does so when it
    begins, before validation and at the end of each epoch. On devices of this process the end of an epoch brings one
    only if a second has passed since the last, and longer epochs have some within (docs/equivalence.md, "Errors").
    Models that share variables see each other's values.

    An error in a step that updates variables leaves the model with the values of its last ``sync``, and says how many
    steps ago that was; all other errors leave the newest. After the model was compiled again or layers were frozen, the
    next call makes new step graphs. A pipelined model works in one thread at a time.

    Attributes:
        model: the user's Keras model.
        profile: the profile that the plan was made from; None if there was none.
        last_step_seconds: time of the last training step, from feeding the devices to their results, without what
            Keras does before and after.
    """

    # ---- Keras' methods: arguments are given by position or by name, as Keras takes them or the model's own method

    def _batch_size(self, given: Any) -> int:
        """Returns the batch size for cutting arrays: the plan's global batch size, unless another is given."""
        return self.plan.global_batch_size if given is None else whole_number("batch_size", given)

    @_as_keras
    @in_one_thread
    def fit(self, *args: Any, checkpoint: Checkpointing | None = None, resume: bool = False, **kwargs: Any) -> Any:
        """Runs ``keras.Model.fit``; ``batch_size`` and ``validation_batch_size`` are by default the plan's.

        Batches of another size are cut into micro-batches of about the plan's size. A message says so once, because the
        plan's times and memory don't hold for them.

        A model's own ``fit`` (``evaluate``, ``predict``) gets the arguments as they are given, whatever it takes; the
        above, and checkpoints, are for the call of Keras' method in it.

        Args:
            args: as for Keras: x, y, batch_size, epochs, verbose, callbacks and the others, in its order.
            checkpoint: when and where to save checkpoints, in the background.
            resume: whether to resume from the newest checkpoint of that directory, if it has any: with the same plan,
                devices and data, as if training hadn't stopped. Checkpoints don't hold the callbacks' own state.
            kwargs: as for Keras.

        Raises:
            DataError: batches change their structure or shape, or there are none.
            NonFiniteLossError: the loss isn't finite and the transform was told to stop.
            CheckpointError: the checkpoint to resume from is damaged, or of another model or other data; or another
                training uses the directory; or, at the end of training, the last checkpoint couldn't be written.
            TypeError: Keras' method doesn't have an argument, or ``checkpoint`` isn't a Checkpointing.
            ValueError: ``resume`` without ``checkpoint``.
            DappleError: another thread uses the pipelined model; or ``checkpoint`` for a model whose own ``fit`` calls
                Keras' method more than once, or never.
        """
        if not isinstance(checkpoint, Checkpointing | None):
            raise TypeError(f"checkpoint is {checkpoint!r:.60}; give a dapple_tf.Checkpointing(directory)")
        if resume and checkpoint is None:
            raise ValueError("resume=True goes on from a checkpoint; give checkpoint=Checkpointing(directory), too")
        calls = 0

        def fit(_: str, **arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            size = arguments["batch_size"] = self._batch_size(arguments.get("batch_size"))
            arguments["validation_batch_size"] = arguments.get("validation_batch_size") or size
            if checkpoint is None:
                return self._call("fit", **arguments)
            if calls > 1:
                raise self._unsaved("calls Keras' fit() more than once")
            return self._fit_with_checkpoints(checkpoint, resume, arguments)

        result = self._called("fit", fit, args, kwargs, ("checkpoint", "resume"))
        if checkpoint is not None and not calls:
            raise self._unsaved("never calls Keras' fit()")
        return result

    def _unsaved(self, what: str) -> DappleError:
        return DappleError(
            f"fit(checkpoint=...) saves in one call of keras.Model.fit, but the own fit() of model {self.model.name!r} "
            f"{what}: leave checkpoint out, and call save_checkpoint() where values are to be saved"
        )

    @_as_keras
    @in_one_thread
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.evaluate``, forward only; ``batch_size`` is by default the plan's global batch size."""
        return self._called("evaluate", self._sized, args, kwargs)

    @_as_keras
    @in_one_thread
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.predict``, forward only; ``batch_size`` is by default the plan's global batch size."""
        return self._called("predict", self._sized, args, kwargs)

    @_as_keras
    @in_one_thread
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.train_on_batch``."""
        return self._called("train_on_batch", self._on_batch, args, kwargs)

    @_as_keras
    @in_one_thread
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.test_on_batch``."""
        return self._called("test_on_batch", self._on_batch, args, kwargs)

    @_as_keras
    @in_one_thread
    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.predict_on_batch``."""
        return self._called("predict_on_batch", self._call, args, kwargs)

    def _called(
        self,
        method: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        others: tuple[str, ...] = (),
    ) -> Any:
        """Calls a model's method; Keras' own as ``run(method, ...)``, with arguments by name."""
        if not has_own(self.model, method):
            return run(method, **_bound(method, args, kwargs, others))
        return self._call_own(method, lambda *own, **named: run(method, **_bound(method, own, named)), *args, **kwargs)

    def _sized(self, method: str, **arguments: Any) -> Any:
        arguments["batch_size"] = self._batch_size(arguments.get("batch_size"))
        return self._call(method, **arguments)

    # ---- verifying, dumping, tracing and measuring

    @in_one_thread
    def verify(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, steps: int = 3, float64: bool = True
    ) -> Verification:
        """Compares training steps on a batch with plain Keras: loss, gradients, then everything that some steps change.

        The steps compare every variable, optimizer slot and metric, in the model's dtype and again in float64, which
        separates rounding from real differences. Layers that draw random numbers or normalise by the batch compute
        something else on slices than on the whole batch; where a plan cuts the batch, a model with such layers is also
        compared in inference behaviour (``training=False``), and the result says so. Plain Keras runs a copy of the
        model, made from its configuration; where there is none, the model itself, and the result says so, too.
        Nothing changes, except that the user's model gets the devices' values (``sync``).

        Args:
            x: one batch of inputs, as for ``train_on_batch``.
            y: its labels.
            sample_weight: its weights.
            steps: number of steps; 0 compares the loss and the gradients of one step only.
            float64: whether to repeat the steps with a model of the same layers in float64, on the same devices, if the
                model can be rebuilt from its configuration.

        Returns:
            The differences, as a table; its ``assert_equal()`` raises an error if one has no known reason.

        Raises:
            ValueError: ``steps`` is negative.
        """
        if steps < 0:
            raise ValueError(f"steps is {steps}; give 0 or more")
        self._follow()
        self.sync()
        data = x, y, sample_weight
        batch = self._one_batch(Mode.TRAIN, data)

        def run(training: bool) -> StepResult:
            return self._runtime.run(Mode.TRAIN, batch, training=training, want_gradients=True)

        reasons = Reasons.of(self._runtime, batch)
        plain = PlainSide.of(self.model, data, training=not reasons.first)
        dtype = computed_in(self.model, self.cluster)
        verification = compare(run, self.model, self._engine.table, plain, data, dtype=dtype, reason=reasons.first)
        if not steps:
            return verification
        twin = self._twin if float64 else None
        compared = compare_steps(
            self.model, plain.model, self._steps_apart, data, steps, reasons, dtype=dtype, pipelined=twin
        )
        return dataclasses.replace(verification, steps=compared)

    def _steps_apart(self, data: tuple[Any, Any, Any], steps: int, training: bool) -> Outcome:
        """Returns the outcome of some steps on a batch, which don't count as training."""
        return pipelined_steps(self._runtime, self._one_batch(Mode.TRAIN, data), steps, training=training)

    @contextlib.contextmanager
    def _twin(self, model: keras.Model) -> Iterator[Run]:
        """Makes the same pipeline of another model, for the duration of the context."""
        other = PipelinedModel(model, self.cluster, self.plan, quiet=True, passes=self._own_passes)
        try:
            yield other._steps_apart
        finally:
            other.close(sync=False)

    def dump(self, directory: str | pathlib.Path) -> None:
        """Writes graphs, plan, schedule and drawings of the steps; ``index.html`` describes the files.

        There is a graph before and after every pass (``NN_pass.pbtxt``) for each kind of step that has been run, and
        for training even if it hasn't. Nothing is run, and nothing that training depends on changes.

        Args:
            directory: the directory to fill. Files of an earlier dump there are replaced, others stay.

        Raises:
            DataError: no step has been run, and the model doesn't declare what batches look like.
            FolderError: something else in the directory would be overwritten.
        """
        engine = self._engine
        sources = [] if self._changed() else engine.builder.sources
        passes = engine.builder.passes
        spec = self._specs.get(Mode.TRAIN)
        costs = None if engine.builder.placer is None else engine.builder.placer.costs
        dump(directory, self.model, passes, sources, engine.table, self.profile, spec=spec, operator_costs=costs)

    def session_graph(self) -> tuple[GraphDef, tuple[StepRequest, ...]]:
        """Returns the graph of this process's session, and feeds and fetches of the steps that have run in it.

        Steps on workers aren't among them. The graph is TensorFlow's: equal functions are there once, under the name of
        one of them, and what passes note at nodes isn't; `dump` has both.
        """
        session = self._engine.session
        return session.graph.as_graph_def(), session.requests

    @in_one_thread
    def trace_step(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Trains on one batch and returns TensorFlow's ``StepStats``: start and end of each task, and each allocation.

        Metrics and History don't include this step. If a step is one function (one device, one micro-batch), this one
        calls stage functions one by one instead. TensorFlow prepares traced steps separately, the first time.
        """
        self._follow()
        traced = self._train(self._one_batch(Mode.TRAIN, (x, y, sample_weight)), trace=True).traced
        assert traced is not None
        return traced.stats

    @in_one_thread
    def profile_step(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, warm_up: int = 2, train: bool = False
    ) -> StepProfile:
        """Measures one training step, task by task and device by device, beside the planned and the simulated step.

        The step is a real one, but doesn't count: afterwards weights, optimizer, random seeds, metrics and the number
        of steps are as before. For that the user's model gets the devices' values first (``sync``), and the devices get
        them back with the next step.

        Args:
            x: one batch of inputs, as for ``train_on_batch``; or data that workers read (`dapple_tf.on_workers`), whose
                first batches are taken, each read while the step before runs, as in ``fit``.
            y: its labels.
            sample_weight: its weights.
            warm_up: number of warm-up steps. Then come the measured step, and one before and after it, which give the
                time without tracing. The first time one more step is traced, since TensorFlow prepares traced steps
                separately.
            train: whether to leave the devices trained on this batch by all of these steps, instead of restoring
                values: for models larger than this process's memory (``deferred_init``).

        Raises:
            ValueError: ``warm_up`` is negative.
            DataError: workers can't read a batch.
            DappleError: the model's values are only on the devices, and ``train`` is False.
        """
        if warm_up < 0:
            raise ValueError(f"warm_up is {warm_up}; give 0 or more steps")
        self._follow()
        if not train and self._engine.values.deferred:
            raise DappleError(
                f"profile_step() would fetch all values of model {self.model.name!r} into this process, to bring them "
                f"back afterwards: call sync() first if they fit, or give train=True to train on this batch"
            )
        batches: Iterator[tuple[Batch, float | None]]
        if isinstance(x, OnWorkers):
            batches = self._batches_on_workers(x, y=y, sample_weight=sample_weight)
        else:
            batches = itertools.repeat((self._one_batch(Mode.TRAIN, (x, y, sample_weight)), None))
        if not train:
            self.sync()
        run = self._runtime.train if train else functools.partial(self._runtime.run, Mode.TRAIN)

        def untraced() -> float:
            batch, _ = next(batches)
            started = time.perf_counter()
            run(batch)
            return time.perf_counter() - started

        try:
            for _ in range(warm_up):
                untraced()
            before = untraced()
            batch, waited = next(batches)
            traced = run(batch, trace=True).traced
            if traced is not None and traced.first:
                batch, waited = next(batches)
                traced = run(batch, trace=True).traced
            seconds = (before + untraced()) / 2
        finally:
            if not train:
                self._runtime.drop()
        assert traced is not None
        full = batch.samples == self.plan.global_batch_size
        simulation = self.prediction.simulation if self.prediction is not None and full else None
        ideal = planned(self.plan, self.profile, self.cluster) if full else None
        return StepProfile(self._engine.measured(traced), self.plan, simulation, ideal, seconds, waited)

    def _batches_on_workers(self, data: OnWorkers, **others: Any) -> Iterator[tuple[Batch, float]]:
        """Yields batches that workers read, each of the first one's size, and the seconds that its step waited for it.

        Each is read while the step before runs, as in ``fit``. After the last one comes the first one of another round.

        Args:
            data: the data.
            others: other arguments of a step, which are errors.

        Raises:
            DataError: a batch can't be read, or there is none.
        """
        arguments = {"x": data.apart, **others}
        bound = arguments_on_workers("fit", arguments, self._runtime.reading(), self._engine.data.groups)["x"]
        samples: int | None = None
        started = time.perf_counter()
        while True:
            batches, number = self._batches(Mode.TRAIN, iter(bound)), 0
            while True:
                try:
                    batch = self._next(Mode.TRAIN, batches)
                except StopIteration:
                    break
                number += 1
                samples = batch.samples if samples is None else samples
                if batch.samples == samples:
                    self._runtime.prepare(batch)
                    batches.prefetch()
                    yield batch, time.perf_counter() - started
                    started = time.perf_counter()
            if not number:
                raise DataError("the data have no batch at all; give at least one")

    @property
    def placement(self) -> Mapping[int, OpPlacement]:
        """Stage -> the placement of single operators in the largest training step so far.

        Empty before the first step, and if stages run as a whole.
        """
        return self._engine.builder.placements

    @property
    def notes(self) -> tuple[Note, ...]:
        """Where training differs from plain Keras under this plan, why, and the way out.

        Training's first batch brings them; the log shows each once, too.
        """
        return self._engine.builder.notes.latest or ()

    @property
    def faults(self) -> Sequence[FaultRecord]:
        """The faults after which training continued."""
        return tuple(self._runtime.elastic.faults)

    @property
    def growths(self) -> Sequence[GrowthRecord]:
        """The times that workers which had come back were taken in, after training continued without them."""
        return tuple(self._runtime.elastic.growths)

    @property
    def lost(self) -> WorkerLostError | None:
        """The error of the worker that is missing now; None if all are there, or the devices are this process's."""
        return self._engine.session.lost

    @property
    def preparation_seconds(self) -> dict[str, float]:
        """Seconds that each pass has taken so far."""
        return dict(self._engine.timing.seconds)


def _bound(method: str, args: tuple[Any, ...], kwargs: dict[str, Any], others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the given arguments of a Keras method by name.

    Args:
        method: a method of ``keras.Model``.
        args: arguments by position.
        kwargs: arguments by name.
        others: names of our own arguments, to suggest in errors.

    Raises:
        TypeError: there are too many, one is given twice or has an unknown name.
    """
    names = _parameters(method)
    check_names(method, kwargs, (*names, *others))
    if len(args) > len(names):
        raise TypeError(f"{method}() takes {len(names)} arguments ({', '.join(names)}), but got {len(args)}")
    positional = dict(zip(names, args, strict=False))
    twice = [name for name in positional if name in kwargs]
    if twice:
        raise TypeError(f"{method}() got {twice[0]!r} twice, by position and by name")
    return positional | kwargs
