"""The devices behind a pipelined model: steps on them, their values, and recovery when workers are lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import Checkpoint, Progress
from dapple_tf.checkpoints.saver import Saver
from dapple_tf.common.keras_private import compute_loss, tensorflow_variable
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.errors import DappleError, StepError, reason
from dapple_tf.execution.builds import PREPARED_STEPS, StepResult
from dapple_tf.execution.elastic import Elastic
from dapple_tf.execution.engine import Engine
from dapple_tf.execution.notes import NoteKind
from dapple_tf.execution.terminal import batch_done
from dapple_tf.execution.values import LiveValues, Log
from dapple_tf.frontend.batch import Batch, Batches
from dapple_tf.frontend.capture import Mode, check_model
from dapple_tf.frontend.metrics import RunningMetrics
from dapple_tf.frontend.on_workers import Address, Read, Shape
from dapple_tf.frontend.optimizer_checks import check_optimizer
from dapple_tf.frontend.variable_hooks import Watcher, untold, unwatch, version, watch, watchers_of
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.planning.replanning import Deployment
from graph_passes.ir.tensorflow_private import eager_mode
from graph_passes.pass_manager import After, Before

logger = logging.getLogger(__name__)
_SHORT_SECONDS = 1.0
"""Seconds since the last sync up to which the end of an epoch on this machine's devices brings no other one."""
_LONG_SECONDS = 2.0
"""Seconds since the last sync after which a step on this machine's devices brings another one."""
_SYNC_SHARE = 0.01
"""The largest share of the time that such syncs after steps may take."""
_T = TypeVar("_T")


class Runtime:
    """Runs a model's steps on devices, some of which may be lost and come back, and copies values to and from them.

    Attributes:
        model: the user's Keras model.
        elastic: the devices, with the present cluster, plan and engine.
        metrics: the model's metrics between steps.
        saver: writes checkpoints.
    """

    def __init__(
        self,
        model: keras.Model,
        cluster: Cluster,
        plan: Plan,
        profile: Profile | None,
        policy: FaultPolicy,
        operator_costs: OperatorCosts | None = None,
        *,
        quiet: bool = False,
        apart: bool = False,
        passes: Sequence[After | Before] = (),
        prepared_steps: int = PREPARED_STEPS,
    ) -> None:
        """Opens a session.

        Args:
            model: a compiled model.
            cluster: the devices.
            plan: a plan for them.
            profile: the profile for another plan when workers are lost or come back; None shrinks the plan.
            policy: what to do when workers are lost.
            operator_costs: costs of single operators, for a plan that places them; None estimates them.
            quiet: whether notes aren't logged, for steps that only measure or compare.
            apart: whether it trains its own values, which don't become the model's when that is read, for measuring.
            passes: the user's own passes.
            prepared_steps: number of steps that stay prepared.
        """
        self.model = model
        self.metrics: RunningMetrics
        self.saver = Saver()
        self._synced_at = 0.0  # seconds on the monotonic clock, without what has been spent on preparing steps since
        self._sync_seconds = 0.0  # of the last sync after a step
        self._watched: dict[int, tuple[tf.Variable, str]] = {}  # TensorFlow's variable -> name
        self._others: list[tuple[Watcher, list[tf.Variable]]] = []  # models that may have newer values of some
        self._version = 0
        self._known: tuple[VariableTable, int] | None = None  # whose variables are watched, and how many it had
        self._apart = apart

        def make(deployment: Deployment, log: Log) -> Engine:
            engine = Engine(model, *deployment, log, operator_costs, passes, prepared_steps)
            engine.builder.notes.quiet = quiet
            if "metrics" in vars(self):
                self.metrics.follow(engine.table)
            else:
                self.metrics = RunningMetrics(model, engine.table)
            return engine

        again = functools.partial(self._step, Mode.TRAIN)
        self.elastic = Elastic(make, again, Deployment(cluster, plan), policy, profile, self.saver)
        self._watch()

    @property
    def engine(self) -> Engine:
        """The owner of the session, of the present cluster and plan."""
        return self.elastic.engine

    @property
    def values(self) -> LiveValues:
        """The place of the newest values."""
        return self.engine.values

    def start(self) -> None:
        """Makes a fresh engine, for the model as it is compiled now; its workers are waited for as by `transform`."""
        self.elastic.start()
        self._watch()

    def close(self, *, sync: bool = True) -> None:
        """Copies trained values into the user's model if ``sync``, and frees the devices in any case.

        Raises:
            WorkerLostError: the values are lost.
        """
        try:
            if sync and not self.elastic.broken:
                self._surviving(lambda: self.values.rescue())
        finally:
            if not sync:
                self.drop()
            self.elastic.close()
            self.saver.release()
            unwatch([variable for variable, _ in self._watched.values()], self)
            self._watched, self._known = {}, None
            self.metrics.leave()

    def leave(self) -> None:
        """Closes, wherever the last reference to the pipelined model disappears."""
        with eager_mode():  # Python may collect this object while a graph is being made.
            try:
                # A session is freed before this only if the user's model goes, too, and needs no values.
                self.close(sync=not self.values.deferred and not self.engine.session.freed)
            except (DappleError, tf.errors.OpError) as error:
                logger.warning("model %r: %s; %s", self.model.name, reason(error), self.elastic.kept)

    # ---- values

    def _watch(self) -> None:
        """Watches all variables whose newest values may be on the devices."""
        if self._apart:
            return
        known = self.engine.table, len(self.engine.table.keras_variables)
        if self._known != known:
            self._known, before = known, self._watched
            held = {name: tensorflow_variable(variable) for name, variable in self.values.watched.items()}
            self._watched = {id(variable): (variable, name) for name, variable in held.items()}
            unwatch([variable for key, (variable, _) in before.items() if key not in self._watched], self)
            watch(held.values(), self)
        if self._version != version():
            self._version = version()
            others: dict[int, tuple[Watcher, list[tf.Variable]]] = {}
            for variable, _ in self._watched.values():
                for watcher in watchers_of(variable):
                    if watcher is not self:
                        others.setdefault(id(watcher), (watcher, []))[1].append(variable)
            self._others = list(others.values())

    def on_read(self, variables: Sequence[tf.Variable]) -> None:
        """Brings the newest values of variables into the model before they are read or assigned.

        Raises:
            WorkerLostError: a worker that has them was lost, and the policy doesn't wait or it isn't back in time.
        """
        names = [self._watched[id(variable)][1] for variable in variables]
        with self.elastic.looking:
            if self.values.ahead or self.values.restoring:
                self._surviving(lambda: self.values.look(names))
            else:
                self.values.doubt()

    def _others_first(self) -> None:
        """Takes over what other pipelined models have trained of the same variables, for the next step of this one.

        Raises:
            WorkerLostError: one of their workers was lost, which this model can't recover.
        """
        if self._version != version():
            self._watch()
        with untold(self):
            for watcher, variables in self._others:
                watcher.on_read(variables)
                self.values.doubt()

    def load(self) -> None:
        """Lets the next step copy all values model -> devices; the devices' newer values are synced first.

        A model without its own values isn't synced: its devices begin again.
        """
        if not self.values.deferred:
            self.sync()
        self.values.load()

    def drop(self) -> None:
        """Discards the devices' values: the next step copies the model's values of the last ``sync`` to them."""
        with untold(self):
            self.values.drop()

    def sync(self) -> None:
        """Copies values devices -> model, if the devices are ahead.

        Raises:
            WorkerLostError: a worker was lost, and the policy doesn't wait for it or it isn't back in time.
        """
        self._surviving(lambda: self.values.sync())

    def agree(self, *, epoch: bool = False) -> None:
        """Syncs before callbacks read the model, unless it has no values of its own.

        Args:
            epoch: whether an epoch begins or ends. Variables are fetched when they are read, so that devices of this
                process, which aren't lost, needn't be asked for all values after a short time.
        """
        if epoch and not self.engine.cluster.addresses and time.monotonic() - self._synced_at < _SHORT_SECONDS:
            self.values.doubt()
            return
        self._surviving(lambda: self.values.agree())

    def save(self, directory: str | os.PathLike[str], keep: int, progress: Progress) -> pathlib.Path:
        """Begins to save a checkpoint; see `Saver.save`."""
        plan = dataclasses.replace(self.engine.plan, report=None).to_json()

        def begin() -> pathlib.Path:
            take = self.values.snapshot if self.values.settle() else None
            return self.saver.save(
                directory, self.model, take, step=self.elastic.steps, progress=progress, plan=plan, keep=keep
            )

        return self._surviving(begin)

    def restore(self, source: Checkpoint) -> None:
        """Restores the values of a checkpoint, and its number of steps.

        Raises:
            CheckpointError: it doesn't fit the model, or is damaged.
        """
        self.saver.finish()
        self.saver.newest = None  # It may be of a later step, which no longer belongs to this training.
        self._others_first()
        self._surviving(lambda: self.values.restore(source))
        self.elastic.restored(source.manifest.step)
        if not self.values.deferred:
            self.sync()  # A step that fails doesn't undo it.

    # ---- steps

    def train(self, batch: Batch, *, trace: bool = False) -> StepResult:
        """Trains on a batch; see `run`."""
        prepared, began = self.engine.builder.num_steps, time.monotonic()
        if not self.values.ahead:
            self._synced_at = began
        result = self.run(Mode.TRAIN, batch, trace=trace)
        if self.engine.builder.num_steps != prepared:
            self._synced_at += time.monotonic() - began
        self.elastic.trained(batch)
        return result

    def sync_if_due(self) -> None:
        """Syncs the values if there are many batches, or some seconds, since they were safe."""
        began = time.monotonic()
        longest = max(_LONG_SECONDS, self._sync_seconds / _SYNC_SHARE)
        late = not self.engine.cluster.addresses and began - self._synced_at > longest
        if not late and not self.elastic.full:
            return
        if not self.values.deferred:
            self.sync()
            self._sync_seconds = time.monotonic() - began
        elif self.elastic.full and (kept := len(self.elastic.log.batches)) % self.elastic.log.policy.replay_steps == 0:
            logger.warning(
                "%d batches are kept in memory, to be trained on again if a worker is lost, as the model's values stay "
                "on the devices: save checkpoints, fit(checkpoint=dapple.Checkpointing(directory, every_steps=%d))",
                kept,
                self.elastic.log.policy.replay_steps,
            )

    def run(self, mode: Mode, batch: Batch, *, training: bool | None = None, **options: Any) -> StepResult:
        """Runs a step on the devices.

        Raises:
            StepError: a device failed. If it was updating variables, the devices' values are lost.
            WorkerLostError: a worker was lost, and the policy doesn't wait for it or it isn't back in time.
        """

        def step() -> StepResult:
            prepared = self.engine.prepared(mode, batch, training=training, **options)
            with self._shown(mode, batch, prepared):
                if prepared is None and self.engine.full:
                    with self.elastic.looking:
                        self.engine.make_room()
                self.engine.prepare(mode, batch.spec, training)
                self._watch()
                return self._step(mode, batch, training=training, **options)

        cause = functools.cache(lambda: self._cause(batch, loss=mode is not Mode.PREDICT))
        self._others_first()
        try:
            result = self._surviving(step, cause)
            batch_done()
            return result
        except tf.errors.OpError as error:
            lost = self.values.updating
            if lost:
                self.drop()  # Some stages may have been updated and others not.
            kept = f"; {self.elastic.kept}" if lost else ""
            text = cause() or reason(error)
            told = [note for note in self.engine.builder.notes.latest or () if note.kind is NoteKind.PAIRS]
            text += "".join(f"; layer {note.layer!r} {note.text}; {note.way_out}" for note in told)
            raise StepError(f"a {mode.value} step failed: {text}{kept}") from error

    def _step(self, mode: Mode, batch: Batch, **options: Any) -> StepResult:
        metrics = self.metrics.feeds() if mode is not Mode.PREDICT else None
        return self.engine.run(mode, batch, metrics=metrics, **options)

    def _shown(self, mode: Mode, batch: Batch, prepared: str | None) -> contextlib.AbstractContextManager[None]:
        """Returns a context that shows the preparation, unless the step has run before or only measures.

        Args:
            mode: the step's mode.
            batch: its batch.
            prepared: the step's name; None if it isn't prepared yet.
        """
        if self._apart or (prepared is not None and self.engine.session.has_run(prepared)):
            return contextlib.nullcontext()
        return self.engine.timing.shown(mode, batch.samples)

    def reading(self) -> Read:
        """Returns the function by which workers read batches of data that are theirs.

        A thread that reads ahead doesn't recover from a fault: it reports it, and the thread that runs steps goes on.
        """
        here = threading.get_ident()

        def read(address: Address) -> Sequence[Shape] | None:
            if threading.get_ident() != here:
                return self.engine.data.read(address)
            self.elastic.mend()
            return self._surviving(lambda: self.engine.data.read(address))

        return read

    def prepare(self, batch: Batch) -> None:
        """Has workers read a batch again if they have lost it in a fault, before they read the batch after it."""
        if (address := batch.address) is not None:
            self._surviving(lambda: self.engine.data.prepare(address))

    def grow(self, batch: Batch) -> None:
        """Continues on more workers before a batch, if some have come back; see `Elastic.grow`."""
        with self._moving():
            self.elastic.grow(batch)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Watches what another engine knows after the context, if there is one by then."""
        engine = self.engine
        try:
            with untold(self):
                yield
        finally:
            if self.engine is not engine:
                self._watch()

    def _surviving(self, function: Callable[[], _T], cause: Callable[[], str] = str) -> _T:
        """Calls a function that uses the devices; see `Elastic.surviving`."""
        with self._moving():
            return self.elastic.surviving(function, cause)

    def _cause(self, batch: Batch, *, loss: bool) -> str:
        """Returns plain Keras' error for a batch, with its loss if ``loss``; empty if there is none.

        TensorFlow often reports only that some device was waiting for the one that failed.
        """
        if self.values.deferred or batch.address is not None:
            return ""
        x, y, sample_weight = batch.spec.filled(batch.arrays)
        try:
            with keras.StatelessScope(collect_losses=True):
                outputs = self.model(x)
                if loss:
                    compute_loss(self.model, x=x, y=y, y_pred=outputs, sample_weight=sample_weight)
        except Exception as error:
            return reason(error)
        return ""


class StepsApart:
    """A model's training steps by a plan, which train separate values; the model keeps its own."""

    def __init__(self, model: keras.Model, cluster: Cluster, plan: Plan) -> None:
        """Takes the devices.

        Args:
            model: the model, built and compiled.
            cluster: real devices.
            plan: a plan for them.

        Raises:
            CaptureError: the model isn't built or compiled, or it or its optimizer can't be pipelined.
        """
        check_model(model, training=True)
        check_optimizer(model.optimizer, model.trainable_variables)
        self._model = model
        self._runtime = Runtime(model, cluster, plan, None, FaultPolicy(), quiet=True, apart=True)

    def seconds(self, x: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Runs a step on a batch; returns the seconds from feeding the devices to their results.

        Args:
            x: one batch of inputs, as for ``train_on_batch``.
            y: its labels.
            sample_weight: its weights.
        """
        batch = next(Batches(self._model, [(x, y, sample_weight)], cut=self._runtime.engine.plan.cuts_batches))
        started = time.perf_counter()
        self._runtime.train(batch)
        return time.perf_counter() - started

    def close(self) -> None:
        """Frees the devices."""
        self._runtime.close(sync=False)
