"""Sources of training data: arrays, datasets and generators, read so that reading can resume at a position."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint_manifest import LARGEST, CheckpointError
from dapple_tf.common.keras_private import (
    ArrayDataAdapter,
    PyDatasetAdapter,
    dataset_of,
    sliceable_arrays,
    standardized,
)
from dapple_tf.errors import reason
from dapple_tf.frontend.on_workers import Round, WorkerBatches
from graph_passes.ir.tensorflow_private import (
    global_seed,
    iterator_resource,
    seeded,
    shuffled_datasets,
    shuffles_within_rounds,
)

logger = logging.getLogger(__name__)

_MOST_OPENED = 10**6
"""Maximum number of rounds of a dataset; opening one takes some 100 us."""


State = Mapping[str, tf.Tensor]
"""State of a dataset's iterator: variant tensors, by name."""


class Source:
    """Source of batches, round by round.

    Attributes:
        kind: its name in checkpoints.
        num_batches: number of batches in a round; None if it isn't known.
        endless: whether there is only one round, which contains all epochs.
        element_spec: element spec of a dataset.
        read: number of rounds that have been read from.
    """

    kind: ClassVar[str]
    read: int = 0
    num_batches: int | None = None
    endless: bool = False
    element_spec: Any = None

    def example(self) -> Any:
        """Returns a batch, before any is trained on, to look at its structure, dtypes and ranks only."""
        return next(self.open(0, 0))

    def open(self, number: int, start: int) -> Iterator[Any]:
        """Returns the batches of round ``number`` from batch ``start`` on."""
        raise NotImplementedError

    def state(self, items: Iterator[Any] | None) -> State:
        """Returns the state of an iterator after its last batch, as far as it is known; None: of the next round's."""
        return {}

    def reopen(self, number: int, start: int, state: State) -> Iterator[Any]:
        """Returns the batches of a round from ``start`` on, where another process had that state."""
        return self.open(number, start)

    def describe(self, *, ahead: bool = False) -> dict[str, Any]:
        """Returns JSON values: conditions of resuming, and the position.

        Args:
            ahead: whether the position is the start of the next round, which hasn't been opened.
        """
        return {}

    def resume(self, saved: Mapping[str, Any], started: bool) -> None:
        """Takes over what ``describe`` returned in another process.

        Args:
            saved: JSON values of `describe`.
            started: whether the position is within a round.

        Raises:
            CheckpointError: they are of other data.
        """

    def on_epoch_begin(self) -> None:
        """Does what Keras' callbacks do."""

    def on_epoch_end(self) -> None:
        """Does what Keras' callbacks do."""


def _check_same(own: Mapping[str, Any], saved: Mapping[str, Any], drawn: set[str], *, started: bool) -> None:
    """Checks that a position is one in the same data.

    Args:
        own: description of the data.
        saved: description of the position's data.
        drawn: names of values that may differ.
        started: whether the position is within a round.

    Raises:
        CheckpointError: it is a position in other data.
    """
    if not own.keys() <= saved.keys():
        raise CheckpointError(f"the data's position lacks {min(own.keys() - saved.keys())!r}")
    for name in own.keys() - drawn:
        if started and saved[name] != own[name]:
            raise CheckpointError(
                f"the checkpoint was written in the middle of an epoch over data with {name} {saved[name]!r:.60}, "
                f"but now it is {own[name]!r}: resume with the same data and batch size"
            )


def _times(saved: Mapping[str, Any], what: str, default: int | None = None) -> int:
    """Returns how often a dataset was opened, or read from, before its position was saved.

    Raises:
        CheckpointError: the position doesn't say, or says a number that can't be.
    """
    count = saved.get(what, default)
    if type(count) is not int or not 0 <= count < _MOST_OPENED:
        raise CheckpointError(f"the data's position lacks how often the dataset was {what}")
    return count


def _rounds(saved: Mapping[str, Any]) -> list[int | None]:
    """Returns how much of each round of data on workers was read before a position was saved, see `OnWorkers.rounds`.

    Raises:
        CheckpointError: the position doesn't say.
    """
    rounds = saved.get("rounds")
    if not isinstance(rounds, list) or not 1 <= len(rounds) < _MOST_OPENED:
        raise CheckpointError("the data's position lacks how much was read of each round")
    for read in rounds:
        if read is not None and (type(read) is not int or not 0 <= read < LARGEST):
            raise CheckpointError(f"the data's position has a round of {read!r:.40} batches: that is no number")
    return list(rounds)


def _zeros(element_spec: Any) -> Any:
    """Returns a batch of zeros with one sample, and of length 1 where a length is open."""

    def zeros(spec: tf.TensorSpec) -> np.ndarray:
        return np.zeros([1 if size is None else size for size in spec.shape], spec.dtype.as_numpy_dtype)

    return keras.tree.map_structure(zeros, element_spec)


class ArraySource(Source):
    """Arrays in memory: x, y and sample weights."""

    kind = "arrays"

    def __init__(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int, shuffle: bool | str, class_weight: Any
    ) -> None:
        self.shuffle = shuffle
        copy = random.Random()
        copy.setstate(random.getstate())  # Seeded by set_random_seed, and the generator itself stays as it was.
        self.seed = copy.getrandbits(62)
        adapter = ArrayDataAdapter(
            x, y, sample_weight=sample_weight, batch_size=batch_size, shuffle=False, class_weight=class_weight
        )
        self._batch_size = batch_size
        self._samples, self._arrays = sliceable_arrays(adapter)
        self.num_batches = adapter.num_batches
        seed = global_seed() if shuffle else None
        self._global_seed = None if seed is None else int(seed)

    def open(self, number: int, start: int) -> Iterator[Any]:
        """See `Source.open`."""
        order = self._drawn(number) if self._global_seed is None else self._order_of_keras()
        for first in range(start * self._batch_size, self._samples, self._batch_size):
            yield self._batch(order[first : first + self._batch_size])

    def _drawn(self, number: int) -> np.ndarray:
        """Returns a round's order, from our own seed: without TensorFlow's global one, Keras' order is arbitrary."""
        draw = np.random.default_rng([self.seed, number])
        order = draw.permutation(self._samples) if self.shuffle is True else np.arange(self._samples)
        if self.shuffle == "batch":
            firsts = range(0, self._samples, self._batch_size)
            order = np.concatenate([draw.permutation(order[first : first + self._batch_size]) for first in firsts])
        return order

    def _order_of_keras(self) -> np.ndarray:
        """Returns Keras' order of arrays in each round, which follows from TensorFlow's global seed."""
        with seeded(self._global_seed):
            indices = ArrayDataAdapter(np.arange(self._samples), batch_size=self._batch_size, shuffle=self.shuffle)
            return np.concatenate([np.asarray(batch) for batch in indices.get_tf_dataset()])

    def _batch(self, indices: np.ndarray) -> Any:
        return keras.tree.map_structure(
            lambda array: None if array is None else array.convert_to_numpy(array[indices]), self._arrays
        )

    def describe(self, *, ahead: bool = False) -> dict[str, Any]:
        """See `Source.describe`."""
        order = {"batches": self.num_batches, "shuffle": self.shuffle, "seed": self.seed}
        return order | {
            "samples": self._samples,
            "batch_size": self._batch_size,
            "global_seed": self._global_seed,
        }

    def resume(self, saved: Mapping[str, Any], started: bool) -> None:
        """See `Source.resume`."""
        _check_same(self.describe(), saved, {"seed", "global_seed"}, started=started)
        if type(saved["seed"]) is not int or not 0 <= saved["seed"] < LARGEST:
            raise CheckpointError("the data's seed isn't a whole number from 0 to 2**62")
        seed = saved["global_seed"]
        if seed is not None and type(seed) is not int:
            raise CheckpointError("the data's global seed isn't a whole number")
        self.seed, self._global_seed = saved["seed"], seed


class PyDatasetSource(Source):
    """A ``keras.utils.PyDataset``, read by Keras' own adapter, with its workers.

    Keras draws the order of a round from Python's random generator when its first batch is read. This class does the
    same, and records the generator's state. A resumed run gives the generator its state of the saved position.
    """

    kind = "py_dataset"

    def __init__(self, dataset: keras.utils.PyDataset, shuffle: bool, class_weight: Any) -> None:
        self._dataset, self._class_weight = dataset, class_weight
        self.num_batches = dataset.num_batches
        self.endless = self.num_batches is None
        self.shuffle = shuffle and not self.endless
        self._signature: Any = None
        self._drawn: Any = None  # state of Python's generator before it drew the order of the last round
        self._resumed: tuple[Any, Any] | None = None  # that state, if this round was drawn, and the state now

    def example(self) -> Any:
        """See `Source.example`; opening the data would draw an order."""
        return standardized(PyDatasetAdapter(self._dataset, self._class_weight), self._dataset[0])

    def _order(self) -> np.ndarray:
        """Returns the batch numbers of a round, in order."""
        assert self.num_batches is not None
        order = list(range(self.num_batches))
        if self.shuffle:
            resumed, self._resumed = self._resumed, None
            if resumed is not None:
                random.setstate(resumed[0] or resumed[1])
            self._drawn = random.getstate()
            random.shuffle(order)
            if resumed is not None and resumed[0] is not None:
                random.setstate(resumed[1])
        return np.array(order)

    def open(self, number: int, start: int) -> Iterator[Any]:
        """See `Source.open`."""
        order: Any = itertools.count(start)
        if self.num_batches is not None:
            order = self._order()[start:]
            if not len(order):
                return
        adapter = PyDatasetAdapter(_Window(self._dataset, start, order), class_weight=self._class_weight)
        dataset, self._signature = dataset_of(adapter, self._signature)
        adapter.on_epoch_begin()
        try:
            yield from dataset
        finally:
            adapter.on_epoch_end()

    def describe(self, *, ahead: bool = False) -> dict[str, Any]:
        """See `Source.describe`."""
        own: dict[str, Any] = {"batches": self.num_batches, "shuffle": self.shuffle, "drawn": None, "random": None}
        if self.shuffle:
            own["drawn"], own["random"] = self._resumed or (self._drawn, random.getstate())
        return own

    def resume(self, saved: Mapping[str, Any], started: bool) -> None:
        """See `Source.resume`."""
        _check_same(self.describe(), saved, {"drawn", "random"}, started=started)
        if self.shuffle and saved["shuffle"]:
            self._resumed = _random_state(saved["drawn"]) if started else None, _random_state(saved["random"])

    def on_epoch_begin(self) -> None:
        """See `Source.on_epoch_begin`."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """See `Source.on_epoch_end`."""
        self._dataset.on_epoch_end()


def _random_state(saved: Any) -> Any:
    """Returns the state of Python's random generator from its JSON form.

    Raises:
        CheckpointError: it isn't a state.
    """
    try:
        version, words, following = saved
        state = version, tuple(words), following
        random.Random().setstate(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the data's position has no state of Python's generator ({reason(error)})") from error
    return state


class _Window(keras.utils.PyDataset):
    """Batches of another PyDataset, in some order."""

    def __init__(self, dataset: keras.utils.PyDataset, start: int, order: Any) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._start = dataset, start
        self._order = order if isinstance(order, np.ndarray) else None

    @property
    def num_batches(self) -> int | None:
        return None if self._order is None else len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._start + index if self._order is None else int(self._order[index])]


class GeneratorSource(Source):
    """A generator, which can be read only once."""

    kind = "generator"
    endless = True

    def __init__(self, generator: Iterator[Any]) -> None:
        self._generator = generator
        self._seen: list[Any] = []

    def example(self) -> Any:
        """See `Source.example`."""
        self._seen = self._seen or [next(self._generator)]
        return self._seen[0]

    def open(self, number: int, start: int) -> Iterator[Any]:
        """See `Source.open`."""
        return itertools.islice(itertools.chain(self._seen, self._generator), start, None)


class DatasetSource(Source):
    """A ``tf.data.Dataset``."""

    kind = "dataset"

    def __init__(self, dataset: tf.data.Dataset) -> None:
        # A prefetch added by TensorFlow would run ahead by an unknown amount, even into the next round.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        self._dataset = dataset = dataset.with_options(options)
        self.element_spec = dataset.element_spec
        cardinality = int(dataset.cardinality())
        self.num_batches = cardinality if cardinality >= 0 else None
        self._opened = self._opened_before = 0
        self._counter: Any = None  # an iterator that is never read, whose state has the number of drawn seeds
        self._can_save = True

    def example(self) -> Any:
        """See `Source.example`; opening the dataset would draw seeds from it."""
        if all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in keras.tree.flatten(self.element_spec)):
            return _zeros(self.element_spec)
        return next(self.open(0, 0))

    def open(self, number: int, start: int) -> Iterator[Any]:
        """See `Source.open`."""
        self._opened += 1
        items = iter(self._dataset)
        if self._counter is None and (state := self._state_of(items)) is not None:
            options = tf.data.Options()
            options.experimental_symbolic_checkpoint = False  # Such states change only with elements that are read.
            self._counter = iter(self._dataset.with_options(options))
            self._restore(iter(self._dataset), state)  # Takes back the seeds of the last two.
            if shuffles_within_rounds(self._dataset):
                logger.warning(
                    "a resumed run reads later epochs in another order than an undisturbed one: the dataset shuffles "
                    "twice and repeats, or concatenates what is shuffled; let it shuffle once, after concatenate"
                )
        for _ in range(start):
            if next(items, None) is None:
                break
        return items

    def _state_of(self, items: Any) -> tf.Tensor | None:
        if not self._can_save:
            return None
        fail = tf.data.experimental.ExternalStatePolicy.FAIL.value
        try:
            return tf.raw_ops.SerializeIterator(resource_handle=iterator_resource(items), external_state_policy=fail)
        except tf.errors.OpError as error:
            self._can_save = False
            logger.warning(
                "the position in the dataset can't be saved (%s): a resumed run reads it from the beginning of the "
                "epoch, which goes on as before only if the dataset gives the same elements again",
                reason(error),
            )
            return None

    def state(self, items: Iterator[Any] | None) -> State:
        """See `Source.state`; includes the number of drawn seeds, for `reopen`."""
        if items is not None:
            return self._states(items)
        if self._counter is None:
            return {}
        before = self._state_of(self._counter)
        state = self._states(iter(self._dataset))
        self._restore(self._counter, before)
        return state

    def _states(self, items: Any) -> State:
        own = self._state_of(items)
        return {} if own is None else {"iterator": own, "start": self._state_of(self._counter)}

    def reopen(self, number: int, start: int, state: State) -> Iterator[Any]:
        """See `Source.reopen`.

        The iterator has the elements of its own round. The order of later rounds depends on seeds, which iterators
        draw from the dataset when they are made or restored. An iterator's state has the number of drawn seeds, and
        restoring the state sets that number, unless the shuffling iterator has given its last element and is gone.
        An iterator that is never read always has it, but not that of a dataset beneath another shuffle, which draws
        a seed with the first element that is read of a round.
        """
        for shuffled in shuffled_datasets(self._dataset):
            for _ in range(self.read if state else self.read - (start > 0)):
                iter(shuffled)
        if not state:
            while self._opened < self._opened_before - 1:  # Each has drawn seeds.
                self._opened += 1
                iter(self._dataset)
            return self.open(number, start)
        items = self.open(number, 0)
        self._opened = self._opened_before
        self._restore(items, state["iterator"])
        self._restore(self._counter, state["start"])
        return items

    def _restore(self, items: Any, state: tf.Tensor) -> None:
        try:
            tf.raw_ops.DeserializeIterator(resource_handle=iterator_resource(items), serialized=state)
        except (tf.errors.OpError, ValueError) as error:
            raise CheckpointError(
                f"the position in the dataset can't be restored: {reason(error)}; resume with the same dataset"
            ) from error

    def describe(self, *, ahead: bool = False) -> dict[str, Any]:
        """See `Source.describe`."""
        return {"opened": self._opened + ahead, "read": self.read}

    def resume(self, saved: Mapping[str, Any], started: bool) -> None:
        """See `Source.resume`."""
        self._opened_before = _times(saved, "opened")
        self.read = _times(saved, "read", 0)  # which earlier versions didn't save


class WorkerSource(Source):
    """Data that workers read themselves. A position is the number of a batch: workers leave out those before it."""

    kind = "dataset on workers"

    def __init__(self, batches: WorkerBatches) -> None:
        self._batches = batches
        self.element_spec = batches.source.element_spec
        self.num_batches = batches.num_batches

    def example(self) -> Any:
        """See `Source.example`; nothing is read."""
        return _zeros(self.element_spec)

    def open(self, number: int, start: int) -> Iterator[Any]:
        """See `Source.open`."""
        return Round(self._batches.source, self._batches.read, start)

    def reopen(self, number: int, start: int, state: State) -> Iterator[Any]:
        """See `Source.reopen`."""
        self._batches.source.rounds.pop()  # The round was begun in the other process.
        return self.open(number, start)

    def describe(self, *, ahead: bool = False) -> dict[str, Any]:
        """See `Source.describe`."""
        return {"rounds": [*self._batches.source.rounds, *[0] * ahead]}

    def resume(self, saved: Mapping[str, Any], started: bool) -> None:
        """See `Source.resume`."""
        self._batches.source.rounds = _rounds(saved)
