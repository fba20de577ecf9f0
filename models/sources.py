"""What ``--model`` and ``--dataset`` stand for: a compiled model, and data to train it on."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dapple_tf.errors import reason

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class ModelError(ValueError):
    """There is no such model or data, or it isn't what it should be."""


def later(function: str) -> Callable[..., Any]:
    """Returns a function of this package, such as ``gpt.gpt_tiny``, whose module is imported when it is called first.

    Names and descriptions are read without TensorFlow then, which takes seconds to import.
    """
    module, _, name = function.rpartition(".")

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(f"dapple_tf.models.{module}"), name)(*arguments, **options)

    return call


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Data to train on.

    Attributes:
        name: by which it is asked for.
        about: what it is, in a line.
        batches: (model, batch size, seed) -> batches (x, y) or (x, y, sample weights). Full ones only, without end.
        held_out: (model, batch size) -> batches that training doesn't see; None if there are none.
    """

    name: str
    about: str
    batches: Callable[[keras.Model, int, int], tf.data.Dataset]
    held_out: Callable[[keras.Model, int], tf.data.Dataset] | None = None

    def example(self, model: keras.Model, samples: int) -> tuple[Any, Any, Any]:
        """Returns a batch of so many samples as NumPy arrays: x, y and sample weights, each None if there are none.

        Raises:
            ModelError: there are no data, or they can't be read.
        """
        import keras
        import tensorflow as tf

        try:
            for batch in self.batches(model, samples, 0).as_numpy_iterator():
                return keras.utils.unpack_x_y_sample_weight(batch)
        except tf.errors.OpError as error:
            raise ModelError(f"the data {self.name!r} can't be read: {reason(error)}") from error
        raise ModelError(f"the data {self.name!r} give no batch of {samples} samples")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model and its data.

    Attributes:
        name: by which it is asked for.
        about: what it is, in a line.
        build: makes the compiled model.
        data: what it is trained on unless other data are asked for.
        built_here: whether layers are made by ``build``, so that the global dtype policy holds for them.
    """

    name: str
    about: str
    build: Callable[[], keras.Model]
    data: DataSource
    built_here: bool = True


def compiled_classifier(model: keras.Model, optimizer: keras.optimizers.Optimizer, *metrics: str) -> keras.Model:
    """Returns the model, compiled for integer labels and outputs that are logits."""
    import keras

    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=list(metrics))
    return model


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without the thread that tunes how much is done in parallel, where nothing is left to tune.

    On busy cores that thread doesn't see that its iterator is let go of, which waits then until it looks again: for as
    long as the iterator was there, up to a minute.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
