"""Checks that data fit a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from dapple_tf.keras_private import layers_of
from dapple_tf.models.sources import ModelError


def declared(model: keras.Model, which: str) -> Sequence[Any]:
    """Returns ``inputs`` or ``outputs``; none for a model that doesn't declare them."""
    return getattr(model, which, None) or ()


def shapes(data: str, model: keras.Model, inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a model's one input and one output, with these numbers of axes, only the first open.

    Raises:
        ModelError: the model has other shapes.
    """
    fitting = []
    for name, tensors, rank in (
        ("take", declared(model, "inputs"), inputs),
        ("give", declared(model, "outputs"), outputs),
    ):
        known = [tuple(tensor.shape) for tensor in tensors]
        if len(known) != 1 or len(known[0]) != rank or None in known[0][1:]:
            fixed = "give them sizes in keras.Input" if len(known) == 1 and len(known[0]) == rank else "use other data"
            raise ModelError(
                f"the data {data!r} are for models that {name} one tensor of {rank} axes, of which only the batch is "
                f"open, but {model.name!r} has {known or 'no declared shapes'}; {fixed}"
            )
        fitting.append(known[0])
    return fitting[0], fitting[1]


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


def check_vocabulary(data: str, size: int, model: keras.Model, *, logits: bool = True) -> None:
    """Checks that data have at most as many tokens as a model knows.

    Raises:
        ModelError: there are more.
    """
    known = vocabulary_of(model, logits=logits)
    if size > known:
        raise ModelError(
            f"{data}: the data have {size} tokens, but {model.name!r} knows {known}; use a tokenizer of at most "
            f"{known} tokens, or build the model with vocabulary={size}"
        )


def check_classes(data: str, size: int, classes: int, model: keras.Model) -> None:
    """Checks that data have at most as many classes as a model distinguishes.

    Raises:
        ModelError: there are more.
    """
    if size > classes:
        raise ModelError(
            f"{data}: the data have {size} classes, but {model.name!r} tells {classes} apart; build the model with "
            f"classes={size}, or use other data"
        )
