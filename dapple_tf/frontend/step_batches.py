"""Batches of measured steps: always the same one, or read by workers as in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from dapple_tf.errors import DataError
from dapple_tf.frontend.batch import Batch, Batches


class StepBatches(Iterator[Batch]):
    """Batches of one size, without end: each is read while the step before runs, as in ``fit``.

    Attributes:
        waited: seconds that the last step waited for its batch.
    """

    def __init__(
        self,
        begin: Callable[[], Batches],
        following: Callable[[Batches], Batch],
        prepare: Callable[[Batch], None],
    ) -> None:
        """Begins the first round.

        Args:
            begin: begins a round of the data.
            following: returns the next batch of a round.
            prepare: has a batch where the step takes it, before the batch after it is read.
        """
        self.waited = 0.0
        self._begin, self._following, self._prepare = begin, following, prepare
        self._round = begin()
        self._samples: int | None = None

    def __next__(self) -> Batch:
        """Returns the next batch; after the last one of the first one's size, the first one of another round.

        Raises:
            DataError: it can't be read, or there is none.
        """
        started = time.perf_counter()
        batch = self._read()
        while self._samples not in (None, batch.samples):
            batch = self._read()
        self._samples = batch.samples
        self._prepare(batch)
        self._round.prefetch()
        self.waited = time.perf_counter() - started
        return batch

    def _read(self) -> Batch:
        try:
            return self._following(self._round)
        except StopIteration:
            self._round = self._begin()
        try:
            return self._following(self._round)
        except StopIteration:
            raise DataError("the data have no batch at all; give at least one") from None
