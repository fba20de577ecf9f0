"""The values of ``--model`` and ``--dataset``: a compiled model, and data to train it on."""

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
    """There is no such model or data, or it isn't valid."""


def later(function: str) -> Callable[..., Any]:
    """Returns a function of this package, such as ``gpt.gpt_tiny``, whose module is imported at the first call.

    Names and descriptions can thus be read without TensorFlow, which takes seconds to import.
    """
    module, _, name = function.rpartition(".")

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(f"dapple_tf.models.{module}"), name)(*arguments, **options)

    return call


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Data to train on.

    Attributes:
        name: its name in flags.
        about: description in a line.
        batches: (model, batch size, seed) -> batches (x, y) or (x, y, sample weights): full ones only, without end.
        held_out: (model, batch size) -> batches that training doesn't see; None if there are none.
        in_files: whether the batches are read from files, which workers of a cluster can read themselves.
    """

    name: str
    about: str
    batches: Callable[[keras.Model, int, int], tf.data.Dataset]
    held_out: Callable[[keras.Model, int], tf.data.Dataset] | None = None
    in_files: bool = False

    def example(self, model: keras.Model, samples: int) -> tuple[Any, Any, Any]:
        """Returns a batch of ``samples`` samples as NumPy arrays: x, y and sample weights, each None if there are none.

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
        name: its name in flags.
        about: description in a line.
        build: function that returns the compiled model.
        data: data to train on by default.
        built_here: whether ``build`` makes the layers, so that the global dtype policy applies to them.
    """

    name: str
    about: str
    build: Callable[[], keras.Model]
    data: DataSource
    built_here: bool = True


def compiled_classifier(model: keras.Model, optimizer: keras.optimizers.Optimizer, *metrics: str) -> keras.Model:
    """Compiles a model for integer labels and logits, and returns it."""
    import keras

    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=list(metrics))
    return model


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without the thread that tunes parallelism, where nothing is left to tune.

    On busy cores that thread doesn't notice that its iterator is released, which then waits until the thread looks
    again: for as long as the iterator existed, up to a minute.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
