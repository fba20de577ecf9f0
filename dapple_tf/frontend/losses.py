"""Losses whose divisor depends on the whole global batch.

A plain mean over a slice, weighted by the slice's samples, adds up to the mean over the global batch. A masked mean
doesn't: Keras divides by the number of valid entries of the batch that it sees. While a model is captured, such losses
divide by a placeholder instead, which the step fills with the divisor of the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.patching import replaced
from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Normalizer

_MEANS = frozenset({"sum_over_batch_size", "mean"})


class GlobalNormalizers:
    """Collects the divisors of loss terms while a model is captured.

    Attributes:
        found: the divisors, in the order in which the losses were called.
    """

    def __init__(self, weight: tf.Tensor) -> None:
        """Args: weight: samples of the slice / samples of the global batch (a scalar placeholder)."""
        self._weight = weight
        self.found: list[Normalizer] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records calls of any Keras loss (compiled, or called in ``compute_loss`` or by a layer) inside the context.

        A loss that needs nothing from the whole batch is computed by Keras' own code.
        """
        recorder = self

        def recorded(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
            def call(loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
                return recorder._call(original, loss, y_true, y_pred, sample_weight)

            return call

        with replaced(keras.losses.Loss, "__call__", recorded):
            yield

    def _call(self, original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        values, mask = _values_and_mask(loss, y_true, y_pred)

        def reduced(values: tf.Tensor, **attributes: Any) -> tf.Tensor:
            """Keras' own reduction of values, which are computed once: the loss may draw random numbers."""
            changed = {"call": lambda *_: values, **attributes}
            return _changed(loss, changed, lambda: original(loss, y_true, y_pred, sample_weight))

        if values.shape.rank == 0:
            weighted = sample_weight is not None or mask is not None
            return _times(loss, values, reduced(tf.ones([], values.dtype)) if weighted else None)
        if loss.reduction in (None, "none"):
            raise CaptureError(
                f"loss {loss.name!r} has reduction {loss.reduction!r}, which leaves one value per sample; use "
                f"'sum_over_batch_size', 'mean_with_sample_weight' or 'sum'"
            )
        if loss.reduction == "sum":
            # The slice's result is weighted like a mean; a sum is the sum of the slices' sums.
            total = reduced(values)
            return total / tf.cast(self._weight, total.dtype)
        if loss.reduction in _MEANS and mask is None:
            return reduced(values)

        total = reduced(values, reduction="sum")
        if loss.reduction in _MEANS:
            # mean(values * weights * mask * size(mask) / valid), as in Keras' apply_mask
            assert mask is not None
            divisor = tf.reduce_sum(tf.cast(mask, total.dtype)) * _values_per_entry(loss, values.shape, mask.shape)
        else:
            if sample_weight is None and mask is None:
                return reduced(values)
            divisor = _weight_sum(sample_weight, mask, total.dtype)
        reciprocal = tf.math.divide_no_nan(tf.ones([], total.dtype), divisor)
        inverse = tf.compat.v1.placeholder(total.dtype, [], name="inverse_divisor")
        self.found.append(Normalizer(Ref.parse(inverse.name), Ref.parse(reciprocal.name), str(loss.name)))
        return total * inverse / tf.cast(self._weight, total.dtype)


def _times(loss: Any, value: tf.Tensor, factor: tf.Tensor | None) -> tf.Tensor:
    """Returns a scalar loss, times the factor of a mask or of sample weights.

    Raises:
        CaptureError: it is a ratio of sums over the batch, or there is a factor for each sample.
    """
    if isinstance(loss, (keras.losses.Dice, keras.losses.Tversky)):
        raise CaptureError(
            f"loss {loss.name!r} is a ratio of sums over the whole batch, which slices can't compute by "
            f"themselves; give it axis=..., so that it is computed for each sample, or use another loss"
        )
    if factor is None:
        return value
    if factor.shape.rank != 0:
        raise CaptureError(
            f"loss {loss.name!r} is one number for the batch, and has reduction {loss.reduction!r}: with sample "
            f"weights or a mask it becomes one value per sample; use 'sum_over_batch_size' or 'sum'"
        )
    return value * factor


def _changed(loss: Any, attributes: Mapping[str, Any], compute: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Computes something while a loss has these attributes."""
    before = dict(vars(loss))
    vars(loss).update(attributes)
    try:
        return compute()
    finally:
        for name in attributes:
            del vars(loss)[name]
        vars(loss).update({name: before[name] for name in attributes if name in before})


def _values_and_mask(loss: Any, y_true: Any, y_pred: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns the unreduced values and ``Loss.__call__``'s mask: the prediction's, the values', or both."""

    def convert(tensor: Any) -> Any:
        return keras.ops.convert_to_tensor(tensor, dtype=loss.dtype)

    values = loss.call(keras.tree.map_structure(convert, y_true), keras.tree.map_structure(convert, y_pred))
    masks = [mask for tensor in (y_pred, values) if (mask := getattr(tensor, "_keras_mask", None)) is not None]
    if not masks:
        return values, None
    return values, masks[0] if len(masks) == 1 else tf.logical_and(*masks)


def _values_per_entry(loss: Any, values: tf.TensorShape, mask: tf.TensorShape) -> float:
    """Returns the number of loss values per entry of the mask, from static shapes."""
    if values.rank is None or mask.rank is None:
        raise CaptureError(f"loss {loss.name!r}: values of shape {values} and mask of shape {mask} need known ranks")
    rank = max(values.rank, mask.rank)
    ratio = 1.0
    for axis in range(1, rank):
        sizes = [shape[axis] if axis < shape.rank else 1 for shape in (values, mask)]
        if sizes[0] == sizes[1]:
            continue
        if None in sizes:
            raise CaptureError(
                f"loss {loss.name!r}: values of shape {values} and mask of shape {mask} differ in axis {axis}, which "
                f"has no known length; give it one in keras.Input"
            )
        ratio *= sizes[0] / sizes[1]
    return ratio


def _weight_sum(sample_weight: Any, mask: tf.Tensor | None, dtype: tf.DType) -> tf.Tensor:
    """Returns the divisor of ``mean_with_sample_weight``: the sum of the sample weights without masked ones."""
    if sample_weight is None:
        return tf.reduce_sum(tf.cast(mask, dtype))
    weights = keras.ops.convert_to_tensor(sample_weight, dtype=keras.backend.standardize_dtype(dtype))
    if mask is None:
        return tf.reduce_sum(weights)
    valid = tf.cast(mask, dtype)
    if len(weights.shape) == len(valid.shape) + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    if len(valid.shape) == len(weights.shape) + 1 and valid.shape[-1] == 1:
        valid = tf.squeeze(valid, -1)
    return tf.reduce_sum(weights * valid)
