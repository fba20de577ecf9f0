"""Recovery after a lost worker: the last safe values, and the batches trained on since then."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras
import tensorflow as tf

from dapple_tf.describe.cluster import Cluster, ClusterError
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.errors import UnusableWorkersError, WorkerLostError
from dapple_tf.execution.engine import Engine
from dapple_tf.frontend.batch import Batch
from dapple_tf.frontend.variables import read_value
from dapple_tf.network.control import ControlError
from dapple_tf.network.inquiry import inventory, reachable

logger = logging.getLogger(__name__)

Base = Mapping[str, tf.Tensor] | Path
"""Values for a restart: the last on which devices and model agreed, or a checkpoint."""

_PAUSE_SECONDS = 0.5
_REPORT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Trained:
    """A batch that was trained on.

    Attributes:
        step: the training step's number.
        batch: the batch.
        rate: the learning rate, if it is a variable.
        assigned: values that were assigned to variables before the step.
    """

    step: int
    batch: Batch
    rate: float | None
    assigned: Mapping[str, tf.Tensor]


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


class Recovery:
    """The record from which the devices' values can be restored.

    Attributes:
        base: values to begin with; None before devices had any.
        log: the batches since then, in order. Training on them again gives the same values: besides steps, only values
            from the model change the devices' values, and these are a new base or noted with the next batch.
        last: values from the model that devices got after the last batch.
        former: the base before a checkpoint that became one, and the batches between the two, until the next base.
    """

    def __init__(self, policy: FaultPolicy) -> None:
        self.policy = policy
        self.base: Base | None = None
        self.log: list[Trained] = []
        self.last: dict[str, tf.Tensor] = {}
        self.former: tuple[Base, list[Trained]] | None = None
        self._failures = 0

    def agreed(self, values: Mapping[str, tf.Tensor]) -> None:
        """Notes that devices and model have the same values now."""
        self._begin(values)

    def assigned(self, values: Mapping[str, tf.Tensor]) -> None:
        """Notes that devices get values of some variables from the model."""
        if self.policy.action != "raise":
            self.last |= values

    def forget(self) -> None:
        """Notes that the model's values are the valid ones now, whatever devices had."""
        self._begin(None)

    def saved(self, path: Path, step: int) -> None:
        """Notes that a checkpoint of the values after a step is complete."""
        if not self.log or self.log[0].step > step:
            return  # The base is as new.
        between = [entry for entry in self.log if entry.step <= step]
        self.former = None if self.base is None else (self.base, between)
        self.base = path
        self.log = self.log[len(between) :]

    def fall_back(self) -> bool:
        """Returns to the former base, as the base's checkpoint can't be read; False if there is none."""
        if self.former is None:
            return False
        (self.base, between), self.former = self.former, None
        self.log = between + self.log
        return True

    def restored(self, path: Path) -> None:
        """Notes that devices have the values of a checkpoint now."""
        self._begin(path)

    def _begin(self, base: Base | None) -> None:
        self.base, self.former = base, None
        self.log.clear()
        self.last = {}

    def trained(self, step: int, batch: Batch, rate: keras.Variable | None) -> None:
        """Notes that devices have trained on a batch."""
        if self.policy.action != "raise":
            self.log.append(Trained(step, batch.copied(), None if rate is None else float(read_value(rate)), self.last))
            self.last = {}

    def succeeded(self) -> None:
        """Notes that a step of the user's has succeeded."""
        self._failures = 0

    @property
    def settled(self) -> bool:
        """Whether the model has the newest values, if the devices have agreed with it on any."""
        return not self.log and not isinstance(self.base, Path)

    @property
    def full(self) -> bool:
        """Whether it is time for a new base."""
        return len(self.log) >= self.policy.replay_steps

    def wait(self, error: WorkerLostError, engine: Engine) -> tuple[int, ...]:
        """Waits until the workers are back, and opens a fresh session on them.

        Returns:
            Under ``replan``, the numbers of the workers that didn't come back; if there are any, no session is open.

        Raises:
            WorkerLostError: they aren't back in time, or are lost again and again.
        """
        self._failures += 1
        attempts = 1 if error.out_of_memory else self.policy.attempts  # The same step needs as much memory again.
        if self.policy.action == "raise" or self._failures > attempts:
            raise error.anew()  # Raised once more, the error would hold this frame, which holds the error.
        started = reported = time.monotonic()
        addresses = engine.cluster.addresses
        longest = self.policy.wait_seconds + 3 * self.policy.notice_seconds
        engine.close()
        logger.warning("%s; waiting up to %g s for all workers to be there", str(error), self.policy.wait_seconds)
        while True:
            try:
                engine.reopen()
                logger.info("all workers are there again, after %.1f s", time.monotonic() - started)
                return ()
            except (ClusterError, WorkerLostError) as still:
                waited = time.monotonic() - started
                if waited >= self.policy.wait_seconds:
                    there = [False] * len(addresses)
                    with contextlib.suppress(ClusterError):  # This machine's keys can't be used any more.
                        there = reachable(engine.cluster.located(), self.policy.notice_seconds, engine.cluster.keys)
                    unusable = still.tasks if isinstance(still, UnusableWorkersError) else ()
                    away = tuple(task for task, answers in enumerate(there) if not answers or task in unusable)
                    if self.policy.action == "replan" and 0 < len(away) < len(addresses):
                        return away
                    # If all are there, they came back just now, or something else prevents a session.
                    if away or self.policy.action == "restart" or waited >= longest:
                        raise WorkerLostError(
                            f"{error}; after {waited:.0f} s it isn't back: {still}",
                            error.task,
                            error.address,
                            error.out_of_memory,
                        ) from still
                if time.monotonic() - reported >= _REPORT_SECONDS:
                    reported = time.monotonic()
                    logger.warning("still waiting, for %.0f s so far: %s", waited, str(still))
                time.sleep(_PAUSE_SECONDS)


def wait_for_workers(cluster: Cluster, policy: FaultPolicy) -> None:
    """Waits for missing workers, such as restarting ones, unless the policy is ``raise``.

    Raises:
        ClusterError: one isn't there in time, or can't be used.
    """
    deadline, told = time.monotonic() + policy.wait_seconds, False
    while cluster.addresses and policy.action != "raise":
        try:
            inventory(cluster.located(), policy.notice_seconds, cluster.keys)
            return
        except ClusterError as error:
            if not isinstance(error.__cause__, ControlError) or time.monotonic() >= deadline:
                raise
            if not told:
                logger.warning("%s; waiting up to %g s for it", str(error), policy.wait_seconds)
            told = True
        time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def learning_rate(variable: keras.Variable | None) -> Iterator[Callable[[float | None], None]]:
    """Yields a function that sets an earlier learning rate; restores the present one at the context's end."""
    if variable is None:
        yield lambda rate: None
        return
    now = float(variable.numpy())
    try:
        yield lambda rate: None if rate is None else variable.assign(rate)
    finally:
        variable.assign(now)
