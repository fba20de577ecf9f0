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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import Checkpoint, Progress, Restoration
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.checkpoints.saver import Saver
from dapple_tf.clusters.shared_connections import give_back
from dapple_tf.common.keras_private import compute_loss, tensorflow_variable
from dapple_tf.common.units import bytes_text, counted
from dapple_tf.describe.cluster import Cluster, ClusterError
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.errors import DappleError, DataError, StepError, WorkerLostError, reason
from dapple_tf.execution.builds import PREPARED_STEPS, StepResult
from dapple_tf.execution.engine import Engine
from dapple_tf.execution.growing import Growing, GrowthRecord
from dapple_tf.execution.notes import NoteKind
from dapple_tf.execution.recovery import FaultRecord, Recovery, learning_rate, wait_for_workers
from dapple_tf.execution.terminal import batch_done
from dapple_tf.frontend.batch import CANCELLED, Batch, BatchSpec
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.metrics import RunningMetrics
from dapple_tf.frontend.on_workers import Address, Read, Shape, read_by
from dapple_tf.frontend.optimizer_checks import needs_all_gradients
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.frontend.watching import Watcher, untold, unwatch, version, watch, watchers_of
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.planning.replanning import Deployment, Replanner
from graph_passes.ir.tensorflow_private import eager_mode
from graph_passes.pass_manager import Pipeline

logger = logging.getLogger(__name__)
_SHORT_SECONDS = 1.0
"""Seconds since the last sync up to which the end of an epoch on this machine's devices brings no other one."""
_LONG_SECONDS = 2.0
"""Seconds since the last sync after which a step on this machine's devices brings another one."""
_SYNC_SHARE = 0.01
"""The largest share of the time that such syncs after steps may take."""
_FEW_REPLAYED = 10
"""The most steps that are repeated to take in workers, of a model whose values stay on the devices."""
_T = TypeVar("_T")


class Runtime:
    """Runs steps on a cluster's devices by a plan, both of which may shrink and grow as workers are lost and come back.

    Attributes:
        model: the user's Keras model.
        cluster: the devices.
        plan: the plan.
        engine: owns the session.
        values: where the newest values are.
        metrics: the model's metrics between steps.
        saver: writes checkpoints.
        steps: number of training steps done.
        faults: the faults after which training continued.
        growths: the times that workers which had come back were taken in.
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
        pipeline: Pipeline | None = None,
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
            pipeline: the order of passes, the user's own included; None for the order without any.
            prepared_steps: number of steps that stay prepared.
        """
        self.model = model
        self.metrics: RunningMetrics
        self.saver = Saver()
        self.steps = 0
        self._synced = 0  # steps after which the model had the newest values
        self._synced_at = 0.0  # seconds on the monotonic clock, without what has been spent on preparing steps since
        self._sync_seconds = 0.0  # of the last sync after a step
        self.faults: list[FaultRecord] = []
        self.growths: list[GrowthRecord] = []
        self._profile, self._operator_costs, self._pipeline = profile, operator_costs, pipeline
        self._prepared_steps = prepared_steps
        self._recovery = Recovery(policy)
        self._growing = Growing(policy.notice_seconds)
        self._broken = False  # A worker was lost, and hasn't come back in time.
        self._cancelled = False  # whether a run was cancelled after the last one that succeeded
        self._spec: BatchSpec | None = None  # of the last training batch
        self._watched: dict[int, tuple[tf.Variable, str]] = {}  # TensorFlow's variable -> name
        self._others: list[tuple[Watcher, list[tf.Variable]]] = []  # models that may have newer values of some
        self._version = 0
        self._known: VariableTable | None = None  # the table whose variables are watched, and how many it had
        self._count = 0
        self._looking = threading.RLock()
        self._apart = False  # whether it trains its own values
        self._quiet = quiet
        self._start(Deployment(cluster, plan))

    def start(self) -> None:
        """Makes a fresh engine, for the model as it is compiled now; its workers are waited for as by `transform`."""
        wait_for_workers(self.cluster, self._recovery.policy)
        self._start(self._deployment)

    @property
    def _deployment(self) -> Deployment:
        return Deployment(self.cluster, self.plan)

    def _start(self, deployment: Deployment) -> None:
        settings = (self._recovery, self._operator_costs, self._pipeline, self._prepared_steps)
        cluster, plan = deployment
        engine = Engine(self.model, cluster, plan, *settings)
        engine.builder.notes.quiet = self._quiet
        if "metrics" in vars(self):
            self.metrics.follow(engine.table)
        else:
            self.metrics = RunningMetrics(self.model, engine.table)
        self.engine, self.values, self.cluster, self.plan = engine, engine.values, cluster, plan
        self._spec = None
        self._watch()

    def mend(self) -> None:
        """Reopens the session after a permanent worker loss that was already reported to the caller.

        Raises:
            ClusterError: the worker isn't back.
        """
        if self._broken:
            self.engine.close()
            self.engine.reopen()
            self._broken = False

    def close(self, *, sync: bool = True) -> None:
        """Copies trained values into the user's model if ``sync``, and frees the devices in any case.

        Raises:
            WorkerLostError: the values are lost.
        """
        try:
            if sync and not self._broken:
                self._surviving(lambda: self.values.rescue())
        finally:
            if not sync:
                self.drop()
            self.engine.close()
            self.saver.release()
            self._recovery.forget()  # The next engine starts from the model's values; a base belongs to this engine.
            self._broken = False
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
                logger.warning("model %r: %s; %s", self.model.name, reason(error), self.kept)

    # ---- values

    def set_apart(self) -> None:
        """Makes it train its own values, which don't become the model's when that is read. For measuring only."""
        self._apart = True
        unwatch([variable for variable, _ in self._watched.values()], self)
        self._watched, self._others = {}, []

    def _watch(self) -> None:
        """Watches all variables whose newest values may be on the devices."""
        if self._apart:
            return
        table = self.engine.table
        if self._known is not table or self._count != len(table.keras_variables):
            self._known, self._count = table, len(table.keras_variables)
            before, held = (
                self._watched,
                {name: tensorflow_variable(variable) for name, variable in self.values.watched.items()},
            )
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
        if self.values.ahead or self.values.restoring:
            with self._looking:
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
        if epoch and not self.cluster.addresses and time.monotonic() - self._synced_at < _SHORT_SECONDS:
            self.values.doubt()
            return
        self._surviving(lambda: self.values.agree())

    @property
    def kept(self) -> str:
        """Values that remain if the devices' are lost, for messages."""
        steps = self.steps - self._synced
        ago = f"{counted(steps, 'step')} ago"
        if self.values.deferred:
            return f"the devices begin again with the model's initial values, of {ago}"
        return f"the model keeps the values of its last sync(), {ago}"

    def save(self, directory: str | os.PathLike[str], keep: int, progress: Progress) -> pathlib.Path:
        """Begins to save a checkpoint; see `Saver.save`."""
        plan = dataclasses.replace(self.plan, report=None).to_json()

        def begin() -> pathlib.Path:
            kept = self.values if self.values.settle() else None
            return self.saver.save(
                directory, self.model, kept, step=self.steps, progress=progress, plan=plan, keep=keep
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
        self._surviving(lambda: self.values.restore(Restoration(source, self.model, self.values)))
        self.steps = self._synced = source.manifest.step
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
        self.steps += 1
        self._spec = batch.spec
        self._recovery.trained(self.steps, batch, self.values.learning_rate)
        self._note_checkpoint()
        return result

    def sync_if_due(self) -> None:
        """Syncs the values if there are many batches, or some seconds, since they were safe."""
        began = time.monotonic()
        longest = max(_LONG_SECONDS, self._sync_seconds / _SYNC_SHARE)
        late = not self.cluster.addresses and began - self._synced_at > longest
        if not late and not self._recovery.full:
            return
        if not self.values.deferred:
            self.sync()
            self._sync_seconds = time.monotonic() - began
        elif self._recovery.full and len(self._recovery.log) % self._recovery.policy.replay_steps == 0:
            logger.warning(
                "%d batches are kept in memory, to be trained on again if a worker is lost, as the model's values stay "
                "on the devices: save checkpoints, fit(checkpoint=dapple.Checkpointing(directory, every_steps=%d))",
                len(self._recovery.log),
                self._recovery.policy.replay_steps,
            )

    def run(self, mode: Mode, batch: Batch, *, training: bool | None = None, **options: Any) -> StepResult:
        """Runs a step on the devices.

        Raises:
            StepError: a device failed. If it was updating variables, the devices' values are lost.
            WorkerLostError: a worker was lost, and the policy doesn't wait for it or it isn't back in time.
        """

        def step() -> StepResult:
            samples, read = batch.spec.parts(batch.samples), read_by(batch.address)
            prepared = self.engine.prepared(mode, batch.spec, samples, training=training, **read, **options)
            with self._shown(mode, batch, prepared):
                if prepared is None and self.engine.full:
                    with self._looking:
                        self.engine.make_room()
                self.engine.prepare(mode, batch.spec, training)
                self._watch()
                metrics = self.metrics.feeds() if mode is not Mode.PREDICT else None
                return self.engine.run(mode, batch.spec, batch.arrays, training=training, metrics=metrics, **options)

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
            kept = f"; {self.kept}" if lost else ""
            text = cause() or reason(error)
            told = [note for note in self.engine.builder.notes.latest or () if note.kind is NoteKind.PAIRS]
            text += "".join(f"; layer {note.layer!r} {note.text}; {note.way_out}" for note in told)
            raise StepError(f"a {mode.value} step failed: {text}{kept}") from error

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
            self.mend()
            return self._surviving(lambda: self.engine.data.read(address))

        return read

    def prepare(self, batch: Batch) -> None:
        """Has workers read a batch again if they have lost it in a fault, before they read the batch after it."""
        if (address := batch.address) is not None:
            self._surviving(lambda: self.engine.data.prepare(address))

    def _surviving(self, function: Callable[[], _T], cause: Callable[[], str] = str) -> _T:
        """Calls a function that uses the devices, again if a worker was lost and the policy is to continue.

        A connection that breaks and is whole again leaves no other trace than a run that was cancelled. The same is
        told of some runs in which an operator fails: it is tried once more, unless ``cause`` knows that operator.
        """
        while True:
            try:
                with untold(self):
                    result = function()
            except WorkerLostError as error:
                with untold(self):
                    self._recover(error)
            except (*CANCELLED, DataError) as error:
                failed = error.__cause__ if isinstance(error, DataError) else error
                if not isinstance(failed, CANCELLED):
                    raise
                with untold(self):
                    patient = self._recovery.policy.action != "raise" and bool(self.cluster.addresses)
                    if self._cancelled or not patient or cause():
                        raise
                    self._cancelled = True
                    self._recover(WorkerLostError(f"a run was cancelled, though all workers answer: {reason(failed)}"))
            else:
                self._recovery.succeeded()
                self._cancelled = False
                if not self.values.ahead:
                    self._synced = self.steps
                return result

    # ---- faults

    def _note_checkpoint(self) -> None:
        if self.saver.newest is not None:
            self._recovery.saved(*self.saver.newest)

    def _recover(self, error: WorkerLostError) -> None:
        """Brings the devices, or the remaining ones, to their state after the last step.

        Raises:
            WorkerLostError: the policy forbids it, or it can't be done.
        """
        started = time.time()
        first, addresses = error, self.cluster.addresses
        while True:
            try:
                away = self._recovery.wait(error, self.engine)
                waited = time.time() - started
            except WorkerLostError as final:
                self._give_up()
                raise self._explained(final) from error
            except BaseException:  # Ctrl-C
                self._give_up()
                raise
            try:
                if away:
                    self._replan(away)
                self._replay()
            except WorkerLostError as again:
                error = again
            except (ClusterError, *CANCELLED) as again:  # Other workers went away meanwhile, or connections broke.
                error = WorkerLostError(reason(again))
            except BaseException:  # a damaged checkpoint, Ctrl-C
                self._give_up()
                raise
            else:
                self._watch()  # Another engine knows the optimizer's variables only once a step is prepared.
                without = tuple(own for own in addresses if own not in self.cluster.addresses)
                seconds = time.time() - started
                replayed = len(self._recovery.log)
                self.faults.append(FaultRecord(first.anew(), self.steps, started, waited, replayed, seconds, without))
                logger.warning("went on after step %d, %.1f s after a fault was noticed", self.steps, seconds)
                return

    def _give_up(self) -> None:
        self.values.drop()
        self._broken = True

    def _explained(self, error: WorkerLostError) -> WorkerLostError:
        stages = [
            stage
            for stage, replicas in enumerate(self.plan.working_devices)
            if any(self.cluster.worker_of(device) == error.task for device in replicas)
        ]
        runs = f"it ran stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}; " if stages else ""
        needs = f"{self._memory_of(stages)}; " if error.out_of_memory else ""
        return WorkerLostError(
            f"{error}; {runs}{needs}the last finished step is {self.steps}; {self.kept}",
            error.task,
            error.address,
            error.out_of_memory,
        )

    def _memory_of(self, stages: Sequence[int]) -> str:
        """Returns what stages were predicted to need, what there is, and what to do about it."""
        report = self.plan.report
        told = []
        for stage in stages if report is not None else ():
            assert report is not None
            expected = report.stages[stage]
            limit = "an unknown size" if expected.memory_limit is None else bytes_text(expected.memory_limit)
            told.append(f"stage {stage} was predicted to need {bytes_text(expected.memory_bytes)} of {limit}")
        advice = (
            "use smaller micro-batches, recompute='boundary' or more stages, or tell the planner of less memory by the "
            "worker's --memory_bytes"
        )
        return "; ".join([*told, advice])

    @property
    def _replanner(self) -> Replanner:
        return Replanner(self._profile, needs_all_gradients(self.model.optimizer))

    def _replan(self, away: Sequence[int]) -> None:
        """Continues with the remaining workers."""
        former = self._deployment
        smaller = self._replanner.without(former, away, self._growing.former)
        logger.warning("going on without workers %s:\n%s", ", ".join(map(str, away)), smaller.plan)
        self._move(smaller)
        self._growing.left(former)

    def _move(self, deployment: Deployment) -> None:
        """Continues on other devices, which have no values yet."""
        self.engine.close()
        spec, values = self._spec, self.values
        self._start(deployment)
        self.values.follow(values)
        self._spec = spec

    # ---- workers that come back

    def grow(self, batch: Batch) -> None:
        """Continues on more workers, if some have come back and the plan gains by them.

        Between two training steps, all values go through the model; those of a model without values of its own are
        restored as after a fault, if few steps have to be repeated for it. Parts of data that workers read themselves
        depend on the plan: with such data it grows at the beginning of a round only.

        Args:
            batch: the next batch, which has been read and not trained on. No other one is being read ahead.

        Raises:
            WorkerLostError: workers were lost meanwhile, and aren't back in time.
        """
        if not self._growing.former or self.engine.session.lost is not None:
            return
        deferred = self.values.deferred
        if deferred and len(self._recovery.log) > _FEW_REPLAYED:
            return
        address = batch.address
        if address is not None and address.source.in_parts and address.number > 0:
            return
        former = self._deployment
        growth = self._growing.growth(former, self._replanner)
        if growth is None:
            return
        began = time.time()
        if not deferred:
            self.sync()
            if self.cluster is not former.cluster or not self._recovery.settled:
                return  # A fault came first; or the values of a checkpoint are where only the devices have them.
        replayed = len(self._recovery.log)
        with self._looking, untold(self):
            try:
                self._move(growth.deployment)
                self._replay()
            except (ClusterError, DappleError) as error:
                give_back(growth.deployment.cluster)
                self._growing.put_off()
                self._recover(WorkerLostError(f"taking in workers {', '.join(growth.added)} failed: {error}"))
                return
            except BaseException:  # Ctrl-C
                give_back(growth.deployment.cluster)
                self._give_up()
                raise
        record = GrowthRecord(
            growth.added, self.steps, began, replayed, time.time() - began, growth.present, growth.latency
        )
        self.growths.append(record)
        logger.warning(
            "took in workers %s after step %d: from %d to %d workers; %s",
            *(", ".join(growth.added), self.steps, len(former.cluster.addresses), len(self.cluster.addresses)),
            growth.gain,
        )

    def _replay(self) -> None:
        """Restores the newest safe values, and trains again on the batches since then."""
        self.saver.finish()
        self._note_checkpoint()
        recovery, spec = self._recovery, self._spec
        base = recovery.base
        if not recovery.log and not isinstance(base, pathlib.Path):
            self.values.load()  # The model has them.
            return
        if spec is None:  # Nothing was trained on since they were restored.
            assert isinstance(base, pathlib.Path)
            self.values.restore_again(base)
            return
        with learning_rate(self.values.learning_rate) as set_rate:
            try:
                self.engine.recover(spec)
            except CheckpointError as error:
                if not recovery.fall_back():
                    raise
                self.saver.newest = None
                former = "the values in memory" if isinstance(recovery.base, Mapping) else recovery.base
                logger.warning("%s; going back to %s, %d steps before", error, former, len(recovery.log))
                self.engine.recover(spec)
            for entry in recovery.log:
                set_rate(entry.rate)
                batch = entry.batch
                self.values.push(entry.assigned)
                self.engine.run(Mode.TRAIN, batch.spec, batch.arrays, metrics=self.metrics.feeds())
            self.values.push(recovery.last)
        logger.info("trained again on %d batches, up to step %d", len(recovery.log), self.steps)

    def _cause(self, batch: Batch, *, loss: bool) -> str:
        """Returns plain Keras' error for a batch, with its loss if ``loss``; empty if there is none.

        TensorFlow often reports only that some device was waiting for the one that failed.
        """
        if self.values.deferred or batch.address is not None:
            return ""
        arrays = iter(batch.arrays)

        def given(tree: Any) -> Any:
            return keras.tree.map_structure(lambda leaf: None if leaf is None else next(arrays), tree)

        x, y, sample_weight = (given(tree) for tree in (batch.spec.x, batch.spec.y, batch.spec.sample_weight))
        try:
            with keras.StatelessScope(collect_losses=True):
                outputs = self.model(x)
                if loss:
                    compute_loss(self.model, x=x, y=y, y_pred=outputs, sample_weight=sample_weight)
        except Exception as error:
            return reason(error)
        return ""
