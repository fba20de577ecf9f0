"""Training data whose position can be saved with a checkpoint, and resumed.

Keras' ``fit`` reads data through an adapter. `TrainingData` is one that knows how many batches have been trained on,
and their order:

* arrays: the order of each round is drawn from a seed and the round's number;
* a ``tf.data.Dataset``: the state of its iterator is saved, as TensorFlow itself saves iterators (with the contents of
  shuffle buffers). A dataset whose state can't be saved (``from_generator``, random or Python functions, tables) is
  read again from the beginning of the round, up to the position;
* a ``keras.utils.PyDataset``: batches are requested by number, in an order drawn by Python's random generator, as in
  Keras; its state is saved;
* data on workers: the number of the batch is saved, and workers leave out those before it;
* a generator: the new one is read, and its batches dropped, up to the position.

So a generator, a dataset without seeds, or a PyDataset that shuffles by itself must give the same batches in the
resumed process for training to go on as if never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from dapple_tf.checkpoints.checkpoint_manifest import LARGEST, CheckpointError
from dapple_tf.checkpoints.data_sources import (
    ArraySource,
    DatasetSource,
    GeneratorSource,
    PyDatasetSource,
    Source,
    State,
    WorkerSource,
)
from dapple_tf.common.keras_private import OwnAdapter, can_convert_arrays, get_data_adapter
from dapple_tf.errors import DataError
from dapple_tf.frontend.on_workers import WorkerBatches


class Reading(Iterator[Any]):
    """The batches of one round, for Keras.

    Attributes:
        element_spec: element spec of a dataset.
        number: number of the round.
        handed_out: whether Keras has it.
        over: whether the round has ended.
        unseen: number of steps that Keras still has to count: their batches were trained on before the resumption.
    """

    def __init__(
        self,
        source: Source,
        items: Iterator[Any],
        may_read_ahead: Callable[[], bool],
        number: int,
        taken: int = 0,
        unseen: int = 0,
    ) -> None:
        """Starts at a round of which another process has trained on ``taken`` batches."""
        self._may_read_ahead = may_read_ahead
        self.element_spec = source.element_spec
        self.number, self.unseen = number, unseen
        self.handed_out = self.over = False
        self._source, self._items, self._taken = source, items, taken
        self._marked: tuple[int, State] | None = None

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            self.over = True
            raise
        self._source.read += self._taken == 0
        self._taken += 1
        return item

    def skip(self) -> bool:
        """Takes one step off `unseen`, if any is left; returns whether the step is only counted."""
        if self.unseen == 0:
            return False
        self.unseen -= 1
        return True

    def may_read_ahead(self) -> bool:
        """Returns whether another thread may read the batch after the next step's before that step is over.

        If the position is asked for nevertheless (training is stopped, say), it has no iterator state.
        """
        if not self._may_read_ahead():
            return False
        self._marked = (self._taken, {})
        return True

    def unmark(self) -> None:
        """Records that the batch that was read ahead is handed out."""
        self._marked = None

    def position(self) -> tuple[int, State]:
        """Returns the number of the round's batches that have been trained on, and the iterator's state then."""
        return self._marked or (self._taken, self._source.state(self._items))


class TrainingData(OwnAdapter):
    """Training data for ``fit``; see the module.

    Attributes:
        position_due: whether the position will be asked for after the next step.
    """

    def __init__(self, source: Source, *, goes_on: bool = False) -> None:
        """Starts without having read anything.

        Args:
            source: source of the batches.
            goes_on: whether an epoch continues where the one before ended, as with a given number of steps per epoch;
                otherwise each epoch is a round.
        """
        self._source = source
        self._goes_on = goes_on or source.endless
        self._current: Reading | None = None
        self.position_due: Callable[[], bool] = lambda: False

    def _may_read_ahead(self) -> bool:
        return not self.position_due()

    @classmethod
    def of(
        cls,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int,
        shuffle: bool | str = True,
        class_weight: Any = None,
        steps_per_epoch: int | None = None,
    ) -> TrainingData:
        """Wraps the training data that ``fit`` was given.

        Raises:
            DataError: labels or weights are given in addition to data that include them.
        """
        source: Source
        if isinstance(x, WorkerBatches):
            source = WorkerSource(x)
        elif can_convert_arrays((x, y, sample_weight)):
            source = ArraySource(x, y, sample_weight, batch_size, shuffle, class_weight)
        elif y is not None or sample_weight is not None:
            raise DataError(f"a {type(x).__name__} gives labels and weights itself: leave out y and sample_weight")
        elif isinstance(x, keras.utils.PyDataset):
            source = PyDatasetSource(x, bool(shuffle), class_weight)
        elif isinstance(x, Iterator):
            if class_weight is not None:
                raise DataError("class_weight doesn't go with a generator: have it give sample weights")
            source = GeneratorSource(x)
        else:
            adapter = get_data_adapter(x, class_weight=class_weight)
            source = DatasetSource(adapter.get_tf_dataset())
        return cls(source, goes_on=steps_per_epoch is not None)

    # ---- positions

    def example(self) -> Any:
        """Returns a batch, before any is trained on, to look at its structure, dtypes and ranks only."""
        return self._source.example()

    @property
    def counting(self) -> bool:
        """Whether the next step was done before the resumption, and is only counted."""
        return self._current is not None and self._current.unseen > 0

    def position(self, *, epoch_over: bool) -> tuple[dict[str, Any], State]:
        """Returns the position of training: JSON values, and the state of the dataset's iterator.

        Args:
            epoch_over: whether the next batch begins another epoch.
        """
        source, current = self._source, self._current
        values: dict[str, Any] = {"kind": source.kind}
        if current is None or (epoch_over and not source.endless and (current.over or not self._goes_on)):
            values |= {"round": self._following, "done": 0}
            return values | source.describe(ahead=True), source.state(None)
        done, state = current.position()
        return values | {"round": current.number, "done": done} | source.describe(), state

    def resume(self, saved: Mapping[str, Any], state: State, batch: int) -> None:
        """Starts at a position.

        Args:
            saved: JSON values of `position`.
            state: the state of the dataset's iterator.
            batch: number of the epoch's batches that have been trained on.

        Raises:
            CheckpointError: it is a position in other data, or not a position.
        """
        kind, number, done = (saved.get(name) for name in ("kind", "round", "done"))
        if kind != self._source.kind:
            raise CheckpointError(
                f"the checkpoint was written while training on a {kind!r:.40}, but now the data are a "
                f"{self._source.kind!r}: resume with the same data, or restore_checkpoint() and fit() without resume"
            )
        for name, value in (("round", number), ("done", done)):
            if type(value) is not int or not 0 <= value < LARGEST:
                raise CheckpointError(f"the data's position has {name} {value!r:.40}, which is no number of batches")
        assert isinstance(number, int) and isinstance(done, int)
        self._source.resume(saved, started=done > 0)
        if done > (self._source.num_batches or done):
            raise CheckpointError(f"the data have {self._source.num_batches} batches, the position is behind {done}")
        items = self._source.reopen(number, done, state)
        self._current = Reading(self._source, items, self._may_read_ahead, number, done, batch)

    # ---- for Keras

    def get_tf_dataset(self) -> Iterable[Any]:
        """Returns the object from which Keras takes iterators."""
        return self

    def __iter__(self) -> Reading:
        """Returns the batches of a round.

        Keras takes some rounds without reading them, which draws the seeds of a dataset.
        """
        source, current = self._source, self._current
        if current is None or (current.handed_out and not source.endless):
            number = self._following
            self._current = current = Reading(source, source.open(number, 0), self._may_read_ahead, number)
        current.handed_out = True
        return current

    @property
    def _following(self) -> int:
        """Number of the next round."""
        return 0 if self._current is None else self._current.number + 1

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch; None if it isn't known."""
        return self._source.num_batches

    def on_epoch_begin(self) -> None:
        """Does what Keras' adapters do."""
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Does what Keras' adapters do."""
        self._source.on_epoch_end()
