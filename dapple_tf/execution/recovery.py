"""Going on after a worker was lost: values that are safe, and the batches that were trained on since."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.describe.cluster import ClusterError
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.errors import WorkerLostError
from dapple_tf.execution.engine import Engine
from dapple_tf.frontend.batch import Batch
from dapple_tf.network.inquiry import reachable

logger = logging.getLogger(__name__)

Base = Mapping[str, tf.Tensor] | Path
"""Values that no fault can reach: those that devices and model agreed on last, or a checkpoint."""

_PAUSE_SECONDS = 0.5
_REPORT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Trained:
    """A batch that was trained on.

    Attributes:
        step: the training step's number.
        batch: the batch.
        rate: the learning rate, where it is a variable.
        assigned: what somebody had assigned to variables before.
    """

    step: int
    batch: Batch
    rate: float | None
    assigned: Mapping[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class FaultRecord:
    """A fault that training went on after.

    Attributes:
        error: what was lost.
        step: the last step that had been finished.
        noticed: when it was noticed, in seconds since 1970.
        waited: seconds until the workers were there again, or given up.
        replayed: steps that were trained on again.
        seconds: from noticing to the end of that.
        without: workers that were gone on without.
    """

    error: WorkerLostError
    step: int
    noticed: float
    waited: float
    replayed: int
    seconds: float
    without: tuple[str, ...] = ()


class Recovery:
    """What is needed to bring devices to where they were.

    Attributes:
        base: values to begin with; None before devices had any.
        log: the batches since, in order. Training on them again gives the same values: nothing else changes what
            devices have, but for values from the model, which are a new base or noted with the next batch.
        last: values from the model that devices have got after the last batch.
    """

    def __init__(self, policy: FaultPolicy) -> None:
        self.policy = policy
        self.base: Base | None = None
        self.log: list[Trained] = []
        self.last: dict[str, tf.Tensor] = {}
        self._failures = 0

    def agreed(self, values: Mapping[str, tf.Tensor]) -> None:
        """Devices and model have the same values now."""
        self.base = values
        self.log.clear()
        self.last = {}

    def assigned(self, values: Mapping[str, tf.Tensor]) -> None:
        """Devices get values of some variables from the model."""
        if self.policy.action != "raise":
            self.last |= values

    def forget(self) -> None:
        """The model's values count now, whatever devices had."""
        self.base = None
        self.log.clear()
        self.last = {}

    def saved(self, path: Path, step: int) -> None:
        """A checkpoint of the values after a step is complete."""
        if not self.log or self.log[0].step > step:
            return  # The base is as new.
        self.base = path
        self.log = [entry for entry in self.log if entry.step > step]

    def restored(self, path: Path) -> None:
        """Devices have the values of a checkpoint now."""
        self.base = path
        self.log.clear()
        self.last = {}

    def trained(self, step: int, batch: Batch, rate: keras.Variable | None) -> None:
        """Devices have trained on a batch."""
        if self.policy.action != "raise":
            # Whoever has made the arrays may fill them with the next batch.
            batch = dataclasses.replace(batch, arrays=[np.array(array) for array in batch.arrays])
            self.log.append(Trained(step, batch, None if rate is None else float(rate.numpy()), self.last))
            self.last = {}

    def succeeded(self) -> None:
        """A step of the user's has."""
        self._failures = 0

    @property
    def full(self) -> bool:
        """Whether it is time for a new base."""
        return len(self.log) >= self.policy.replay_steps

    def wait(self, error: WorkerLostError, engine: Engine) -> tuple[int, ...]:
        """Waits until the workers are there again, and opens a fresh session on them.

        Returns:
            Under ``replan``, the numbers of workers that didn't come back, if any; there is no session then.

        Raises:
            WorkerLostError: they aren't back in time, or are lost again and again.
        """
        self._failures += 1
        if self.policy.action == "raise" or self._failures > self.policy.attempts:
            raise error
        started = reported = time.monotonic()
        addresses = engine.cluster.addresses
        longest = self.policy.wait_seconds + 3 * self.policy.notice_seconds
        engine.close()
        logger.warning("%s; waiting up to %g s for all workers to be there", error, self.policy.wait_seconds)
        while True:
            try:
                engine.reopen()
                logger.info("all workers are there again, after %.1f s", time.monotonic() - started)
                return ()
            except (ClusterError, WorkerLostError) as still:
                waited = time.monotonic() - started
                if waited >= self.policy.wait_seconds:
                    there = reachable(addresses, self.policy.notice_seconds)
                    away = tuple(task for task, answers in enumerate(there) if not answers)
                    if self.policy.action == "replan" and 0 < len(away) < len(addresses):
                        return away
                    # Where all are there, they came back this moment; or something else is in the way.
                    if away or self.policy.action == "restart" or waited >= longest:
                        raise WorkerLostError(
                            f"{error}; after {waited:.0f} s it isn't back: {still}", error.task, error.address
                        ) from still
                if time.monotonic() - reported >= _REPORT_SECONDS:
                    reported = time.monotonic()
                    logger.warning("still waiting, for %.0f s so far: %s", waited, still)
                time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def learning_rate(variable: keras.Variable | None) -> Iterator[Callable[[float | None], None]]:
    """Within it, the learning rate may be set to what it was once; afterwards it is what it is now."""
    if variable is None:
        yield lambda rate: None
        return
    now = float(variable.numpy())
    try:
        yield lambda rate: None if rate is None else variable.assign(rate)
    finally:
        variable.assign(now)
