"""A model's devices, which may be lost and come back: training goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.checkpoints.saver import Saver
from dapple_tf.clusters.membership import PAUSE_SECONDS, Membership, wait_for_workers
from dapple_tf.clusters.shared_connections import give_back
from dapple_tf.common.text import bytes_text, counted
from dapple_tf.describe.cluster import ClusterError
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.profile import Profile
from dapple_tf.errors import DappleError, DataError, UnusableWorkersError, WorkerLostError, reason
from dapple_tf.execution.engine import Engine
from dapple_tf.execution.values import Log
from dapple_tf.frontend.batch import CANCELLED, Batch, BatchSpec
from dapple_tf.frontend.optimizer_checks import needs_all_gradients
from dapple_tf.network.inquiry import reachable
from dapple_tf.planning.replanning import Deployment, Replanner

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 10.0
_FEW_REPLAYED = 10
"""The most steps that are repeated to take in workers, of a model whose values stay on the devices."""
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class FaultRecord:
    """A fault after which training continued.

    Attributes:
        error: the lost worker's error, without a traceback.
        step: the last finished step.
        noticed: when the fault was noticed, in seconds since 1970.
        waited: seconds until the workers were back, or given up.
        replayed: number of repeated steps.
        seconds: seconds from noticing to the end of the repeated steps.
        without: addresses of the workers that training continued without.
    """

    error: WorkerLostError
    step: int
    noticed: float
    waited: float
    replayed: int
    seconds: float
    without: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GrowthRecord:
    """Workers that came back and were taken in.

    Attributes:
        added: addresses of the workers.
        step: the last step that was finished without them.
        began: when it began, in seconds since 1970.
        replayed: number of repeated steps.
        seconds: seconds that it took, without the preparation of steps by the new plan.
        present: predicted seconds of a step before; None if the gain isn't predicted.
        latency: predicted seconds of a step since.
    """

    added: tuple[str, ...]
    step: int
    began: float
    replayed: int
    seconds: float
    present: float | None
    latency: float | None


class Elastic:
    """A deployment of a model, which loses workers and takes them in again, and the log to restore its values from.

    Everything that uses the devices goes through `surviving`; what happens then is one of these:

        state               session   event                              what follows
        running             open      a worker is lost, a run cancelled  waiting; broken under ``raise``, or after all
                                                                         attempts
        waiting             closed    all workers are there              running on the same deployment, by `_replay`
        waiting             closed    some aren't back (``replan``)      running on a smaller one, by `restart`
        waiting             closed    too late, Ctrl-C, no checkpoint    broken
        running on fewer    open      between steps, lost ones are back  running on a larger one, by `restart`
        running on fewer    open      taking them in fails               waiting; they are asked less often
        broken              any       the next use, `mend`               running, with what `kept` says
        any                 any       `close`                            closed; the model's values are the valid ones

    A restart gives the devices the values after the last step, by the log:

        base                 batches    values
        none, or the model's none       the model's
        the model's          some       the base, then training again on the batches
        a checkpoint         any        its files, then training again on the batches
        one that is damaged  any        those of the base before, then training again on the batches since

    Attributes:
        engine: owns the session, for the present cluster and plan.
        log: the last safe values, and the batches since then.
        members: the workers that training goes on without.
        steps: number of training steps done.
        faults: the faults after which training continued.
        growths: the times that workers which had come back were taken in.
        broken: whether a lost worker was reported, and hasn't come back.
        looking: held while values are looked at, or move to other devices.
    """

    def __init__(
        self,
        make: Callable[[Deployment, Log], Engine],
        again: Callable[[Batch], object],
        deployment: Deployment,
        policy: FaultPolicy,
        profile: Profile | None,
        saver: Saver,
    ) -> None:
        """Opens a session.

        Args:
            make: makes the engine of a deployment, which notes in the log what devices get.
            again: trains on a batch again.
            deployment: the cluster and the plan to begin with.
            policy: what to do when workers are lost.
            profile: the profile for another plan when workers are lost or come back; None shrinks the plan.
            saver: writes checkpoints.
        """
        self.log = Log(policy)
        self.members = Membership(policy.notice_seconds)
        self.steps = 0
        self.faults: list[FaultRecord] = []
        self.growths: list[GrowthRecord] = []
        self.broken = False
        self.looking = threading.RLock()
        self._make, self._again, self._profile, self._saver = make, again, profile, saver
        self._synced = 0  # steps after which the model had the newest values
        self._failures = 0  # since a use of the devices last succeeded
        self._cancelled = False  # whether a run was cancelled since then
        self._start(deployment)

    @property
    def deployment(self) -> Deployment:
        """The present cluster and plan."""
        return Deployment(self.engine.cluster, self.engine.plan)

    def _start(self, deployment: Deployment) -> None:
        self.engine = self._make(deployment, self.log)
        self._spec: BatchSpec | None = None  # of the last training batch

    def start(self) -> None:
        """Makes a fresh engine, for the model as it is compiled now; its workers are waited for as by `transform`."""
        wait_for_workers(self.engine.cluster, self.log.policy)
        self._start(self.deployment)

    def mend(self) -> None:
        """Reopens the session after a permanent worker loss that was already reported to the caller.

        Raises:
            ClusterError: the worker isn't back.
        """
        if self.broken:
            self.engine.close()
            self.engine.reopen()
            self.broken = False

    def close(self) -> None:
        """Frees the devices; the model's values are the valid ones from now on."""
        self.engine.close()
        self.engine.values.load()
        self.broken = False

    @property
    def kept(self) -> str:
        """Values that remain if the devices' are lost, for messages."""
        ago = f"{counted(self.steps - self._synced, 'step')} ago"
        if self.engine.values.restoring:
            return "the devices begin with the checkpoint that was restored"
        if self.engine.values.deferred:
            return f"the devices begin again with the model's initial values, of {ago}"
        return f"the model keeps the values of its last sync(), {ago}"

    # ---- the log

    def trained(self, batch: Batch) -> None:
        """Notes a training step."""
        self.steps += 1
        self._spec = batch.spec
        self.log.trained(self.steps, batch, self.engine.values.learning_rate)
        self._note_checkpoint()

    def restored(self, step: int) -> None:
        """Counts steps from a restored checkpoint's on; the model has its values from the next ``sync`` on."""
        self.steps, self._synced = step, min(step, self._synced)

    def _note_checkpoint(self) -> None:
        if self._saver.newest is not None:
            self.log.saved(*self._saver.newest)

    @property
    def full(self) -> bool:
        """Whether it is time for new safe values."""
        return len(self.log.batches) >= self.log.policy.replay_steps

    # ---- faults

    def surviving(self, function: Callable[[], _T], cause: Callable[[], str] = str) -> _T:
        """Calls a function that uses the devices, again if a worker was lost and the policy is to continue.

        A connection that breaks and is whole again leaves no other trace than a run that was cancelled. The same is
        told of some runs in which an operator fails: it is tried once more, unless ``cause`` knows that operator.

        Raises:
            WorkerLostError: the policy forbids it, or the worker isn't back in time.
        """
        while True:
            try:
                result = function()
            except WorkerLostError as error:
                self._recover(error)
            except (*CANCELLED, DataError) as error:
                failed = error.__cause__ if isinstance(error, DataError) else error
                if not isinstance(failed, CANCELLED):
                    raise
                patient = self.log.policy.action != "raise" and bool(self.engine.cluster.addresses)
                if self._cancelled or not patient or cause():
                    raise
                self._cancelled = True
                self._recover(WorkerLostError(f"a run was cancelled, though all workers answer: {reason(failed)}"))
            else:
                self._failures, self._cancelled = 0, False
                if not self.engine.values.ahead:
                    self._synced = self.steps
                return result

    def _recover(self, error: WorkerLostError) -> None:
        """Brings the devices, or the remaining ones, to their state after the last step.

        Raises:
            WorkerLostError: the policy forbids it, or it can't be done.
        """
        started = time.time()
        first, addresses = error, self.engine.cluster.addresses
        try:
            while True:
                away = self._reopen(error)
                waited = time.time() - started
                try:
                    if away:
                        self._shrink(away)
                    else:
                        self._replay()
                    break
                except WorkerLostError as again:
                    error = again
                except (ClusterError, *CANCELLED) as again:  # Others went away meanwhile, or connections broke.
                    error = WorkerLostError(reason(again))
        except BaseException as final:  # too late, a damaged checkpoint, Ctrl-C
            self._give_up()
            if isinstance(final, WorkerLostError):
                raise self._explained(final) from error
            raise
        without = tuple(own for own in addresses if own not in self.engine.cluster.addresses)
        seconds, replayed = time.time() - started, len(self.log.batches)
        self.faults.append(FaultRecord(first.anew(), self.steps, started, waited, replayed, seconds, without))
        logger.warning("went on after step %d, %.1f s after a fault was noticed", self.steps, seconds)

    def _reopen(self, error: WorkerLostError) -> tuple[int, ...]:
        """Waits until the workers are back, and opens a fresh session on them.

        Returns:
            Under ``replan``, the numbers of the workers that didn't come back; if there are any, no session is open.

        Raises:
            WorkerLostError: they aren't back in time, or are lost again and again.
        """
        policy, engine = self.log.policy, self.engine
        self._failures += 1
        attempts = 1 if error.out_of_memory else policy.attempts  # The same step needs as much memory again.
        if policy.action == "raise" or self._failures > attempts:
            raise error.anew()  # Raised once more, the error would hold this frame, which holds the error.
        started = reported = time.monotonic()
        addresses = engine.cluster.addresses
        longest = policy.wait_seconds + 3 * policy.notice_seconds
        engine.close()
        logger.warning("%s; waiting up to %g s for all workers to be there", str(error), policy.wait_seconds)
        while True:
            try:
                engine.reopen()
                logger.info("all workers are there again, after %.1f s", time.monotonic() - started)
                return ()
            except (ClusterError, WorkerLostError) as still:
                waited = time.monotonic() - started
                if waited >= policy.wait_seconds:
                    there = [False] * len(addresses)
                    with contextlib.suppress(ClusterError):  # This machine's keys can't be used any more.
                        there = reachable(engine.cluster.located(), policy.notice_seconds, engine.cluster.keys)
                    unusable = still.tasks if isinstance(still, UnusableWorkersError) else ()
                    away = tuple(task for task, answers in enumerate(there) if not answers or task in unusable)
                    if policy.action == "replan" and 0 < len(away) < len(addresses):
                        return away
                    # If all are there, they came back just now, or something else prevents a session.
                    if away or policy.action == "restart" or waited >= longest:
                        raise error.anew(f"{error}; after {waited:.0f} s it isn't back: {still}") from still
                if time.monotonic() - reported >= _REPORT_SECONDS:
                    reported = time.monotonic()
                    logger.warning("still waiting, for %.0f s so far: %s", waited, str(still))
                time.sleep(PAUSE_SECONDS)

    def _give_up(self) -> None:
        self.engine.values.drop()
        self.broken = True

    def _explained(self, error: WorkerLostError) -> WorkerLostError:
        stages = [
            stage
            for stage, replicas in enumerate(self.engine.plan.working_devices)
            if any(self.engine.cluster.worker_of(device) == error.task for device in replicas)
        ]
        runs = f"it ran stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}; " if stages else ""
        needs = f"{self._memory_of(stages)}; " if error.out_of_memory else ""
        return error.anew(f"{error}; {runs}{needs}the last finished step is {self.steps}; {self.kept}")

    def _memory_of(self, stages: Sequence[int]) -> str:
        """Returns what stages were predicted to need, what there is, and what to do about it."""
        report = self.engine.plan.report
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

    # ---- other devices

    def restart(self, deployment: Deployment) -> None:
        """Continues on another deployment's devices, which get the values after the last step."""
        with self.looking:
            former, values, spec = self.deployment, self.engine.values, self._spec
            self.engine.close()
            self._start(deployment)
            self.engine.values.follow(values)
            self._spec = spec
            if set(former.cluster.addresses) > set(deployment.cluster.addresses):
                self.members.left(former)
            self._replay()

    @property
    def _replanner(self) -> Replanner:
        return Replanner(self._profile, needs_all_gradients(self.engine.model.optimizer))

    def _shrink(self, away: Sequence[int]) -> None:
        """Continues with the remaining workers."""
        smaller = self._replanner.without(self.deployment, away, self.members.former)
        logger.warning("going on without workers %s:\n%s", ", ".join(map(str, away)), smaller.plan)
        self.restart(smaller)

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
        if not self.members.former or self.engine.session.lost is not None:
            return
        deferred = self.engine.values.deferred
        if deferred and len(self.log.batches) > _FEW_REPLAYED:
            return
        address = batch.address
        if address is not None and address.source.in_parts and address.number > 0:
            return
        former = self.deployment
        growth = self.members.growth(former, self._replanner)
        if growth is None:
            return
        began = time.time()
        if not deferred:
            self.surviving(lambda: self.engine.values.sync())
            if self.engine.cluster is not former.cluster or not self.log.settled:
                return  # A fault came first; or the values of a checkpoint are where only the devices have them.
        replayed = len(self.log.batches)
        with self.looking:  # Until values are whole again.
            try:
                self.restart(growth.deployment)
            except BaseException as error:
                give_back(growth.deployment.cluster)
                if not isinstance(error, ClusterError | DappleError):  # Ctrl-C
                    self._give_up()
                    raise
                self.members.put_off()
                self._recover(WorkerLostError(f"taking in workers {', '.join(growth.added)} failed: {error}"))
                return
        record = GrowthRecord(
            growth.added, self.steps, began, replayed, time.time() - began, growth.present, growth.latency
        )
        self.growths.append(record)
        logger.warning(
            "took in workers %s after step %d: from %d to %d workers; %s",
            *(", ".join(growth.added), self.steps),
            *(len(former.cluster.addresses), len(self.engine.cluster.addresses), growth.gain),
        )

    def _replay(self) -> None:
        """Restores the newest safe values, and trains again on the batches since then."""
        self._saver.finish()
        self._note_checkpoint()
        log, base = self.log, self.log.base
        if not log.batches and not isinstance(base, Path):
            self.engine.values.load()  # The model has them.
            return
        if self._spec is None:  # Nothing was trained on since they were restored.
            assert isinstance(base, Path)
            self.engine.values.restore_again(base)
            return
        try:
            self.engine.recover(self._spec)
        except CheckpointError as error:
            if not log.fall_back():
                raise
            self._saver.newest = None
            former = "the values in memory" if isinstance(log.base, Mapping) else log.base
            logger.warning("%s; going back to %s, %d steps before", error, former, len(log.batches))
            self.engine.recover(self._spec)
        rate = self.engine.values.learning_rate
        present = None if rate is None else float(rate.numpy())
        try:
            for entry in log.batches:
                if rate is not None and entry.rate is not None:
                    rate.assign(entry.rate)
                self.engine.values.push(entry.assigned)
                self._again(entry.batch)
            self.engine.values.push(log.last)
        finally:
            if rate is not None:
                rate.assign(present)
        logger.info("trained again on %d batches, up to step %d", len(log.batches), self.steps)
