"""Batches of other sizes than the plan's, which a warning names once, and data without any batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import DataAdapter
from dapple_tf.common.units import counted
from dapple_tf.errors import DataError
from graph_passes.ir.program import Layout

logger = logging.getLogger(__name__)


class BatchSizes:
    """Observes the size of each training batch.

    A single smaller batch is the last one of the data, and isn't reported. Two of them in a row, or a larger one,
    aren't what the plan was made for. All of them train as in plain Keras.
    """

    def __init__(self) -> None:
        self._last = 0
        self._told = False

    def trained(self, samples: int, full: int, layout: Callable[[int], Layout]) -> None:
        """Records a training batch, and warns once of other sizes.

        Args:
            samples: its size.
            full: the plan's global batch size.
            layout: number of samples -> how a batch of that size is cut.
        """
        last, self._last = self._last, samples
        other = samples > full or (samples < full and 0 < last < full)
        if not other or self._told:
            return
        self._told = True
        logger.warning(
            "batches have %d samples, where the plan's global batch size is %d: they train as %s, not as the plan's "
            "%s, so that its times and memory don't hold and each new size is prepared for anew; a plan with "
            "global_batch_size=%d is made for them",
            *(samples, full, _cut(layout(samples)), _cut(layout(full)), samples),
        )


def _cut(layout: Layout) -> str:
    sizes = sorted({interval.size for interval in layout.micro_batch_intervals})
    return f"{counted(len(layout.micro_batch_intervals), 'micro-batch')} of {' and '.join(map(str, sizes))} samples"


def whole_number(name: str, value: object) -> int:
    """Returns a number of samples as an int; ``name`` names it in errors.

    Raises:
        DataError: the value isn't a whole number of at least 1.
    """
    try:
        count = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        count = 0
    if isinstance(value, bool) or count < 1 or count != value:
        raise DataError(f"{name} is {value!r}; give a whole number of samples of at least 1")
    return int(count)


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
