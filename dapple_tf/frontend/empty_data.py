"""Data without any batch, which Keras takes and then fails on: metrics that no batch has built, outputs that aren't."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import DataAdapter
from dapple_tf.errors import DataError


def no_batch(method: str, argument: str) -> DataError:
    """Returns the error for data of which not a single batch was read.

    Args:
        method: the method that was given the data.
        argument: name of the argument that they are.
    """
    return DataError(
        f"{method}: {argument} has no batch at all; give at least one. A dataset is left with none by take(0), by a "
        f"filter that nothing passes, by files without records, and by batch(..., drop_remainder=True) of fewer samples"
    )


def check_has_batches(method: str, arguments: Mapping[str, Any]) -> None:
    """Checks the data of one of Keras' methods, as far as their length is known without reading them.

    Raises:
        DataError: there is no batch in them.
    """
    for name in ("x", "validation_data"):
        if _is_empty(arguments.get(name)):
            raise no_batch(method, name)


def _is_empty(data: Any) -> bool:
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality()) == 0
    if isinstance(data, (DataAdapter, keras.utils.PyDataset)):
        return data.num_batches == 0
    shapes = (getattr(leaf, "shape", None) for leaf in keras.tree.flatten(data))
    return any(shape is not None and len(shape) > 0 and shape[0] == 0 for shape in shapes)


class Predicted(keras.callbacks.Callback):
    """Fails at the end of a prediction without outputs, which Keras would try to concatenate."""

    def __init__(self, any_outputs: Callable[[], bool]) -> None:
        """Takes a function that says whether a batch has been predicted."""
        super().__init__()
        self._any_outputs = any_outputs

    def on_predict_end(self, logs: Any = None) -> None:
        """See the class.

        Raises:
            DataError: there are no outputs.
        """
        if not self._any_outputs():
            raise no_batch("predict", "x")
