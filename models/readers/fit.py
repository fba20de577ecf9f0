"""Checks that data fit a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from dapple_tf.common.keras_private import layers_of
from dapple_tf.models.sources import ModelError


def declared(model: keras.Model, which: str) -> Sequence[Any]:
    """Returns ``inputs`` or ``outputs``; none for a model that doesn't declare them."""
    return getattr(model, which, None) or ()


def shapes(data: str, model: keras.Model, inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a model's one input and one output, with these numbers of axes, only the first open.

    Raises:
        ModelError: the model has other shapes.
    """
    known = [[tuple(tensor.shape) for tensor in declared(model, which)] for which in ("inputs", "outputs")]
    for name, given, rank in zip(("take", "give"), known, (inputs, outputs), strict=True):
        if len(given) != 1 or len(given[0]) != rank or None in given[0][1:]:
            raise ModelError(
                f"the data {data!r} are for models that {name} one tensor of {rank} axes, of which only the batch is "
                f"open, but {model.name!r} has {given or 'no declared shapes'}; use other data, or give sizes in "
                f"keras.Input"
            )
    return known[0][0], known[1][0]


def named_inputs(data: str, model: keras.Model, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's inputs, which must have these names and be [batch, sequence].

    Raises:
        ModelError: the inputs are others.
    """
    inputs = {str(tensor.name): tuple(tensor.shape) for tensor in declared(model, "inputs")}
    if set(inputs) != set(names) or any(len(shape) != 2 or shape[1] is None for shape in inputs.values()):
        had = ", ".join(f"{name} {list(shape)}" for name, shape in inputs.items())
        raise ModelError(
            f"the data {data!r} are for models of {' and '.join(names)} [batch, sequence], but {model.name!r} takes "
            f"{had or 'nothing declared'}; use other data"
        )
    return inputs


def vocabulary_of(model: keras.Model, *, logits: bool = True) -> int:
    """Returns the number of tokens known by all of a model's embeddings, and its outputs if they are ``logits``.

    Raises:
        ModelError: it has neither.
    """
    sizes = [tensor.shape[-1] for tensor in declared(model, "outputs") if logits and len(tensor.shape) == 3]
    for layer in layers_of(model):
        size = getattr(layer, "input_dim" if isinstance(layer, keras.layers.Embedding) else "vocabulary", None)
        if isinstance(size, int):
            sizes.append(size)
    if not sizes:
        raise ModelError(f"{model.name!r} has no embedding of tokens; use other data")
    return int(min(sizes))
