"""Shared by sequence models: checks of sizes, and their attention."""

from __future__ import annotations

import keras


def check_sizes(config: object, *fields: str, least: int = 1) -> None:
    """Checks that a model's sizes are large enough, and that its ``dropout``, if it has one, is a rate.

    Raises:
        ValueError: one isn't; the text names it and its limits.
    """
    for field in fields:
        if getattr(config, field) < least:
            raise ValueError(f"{field} is {getattr(config, field)}; need at least {least}")
    dropout = getattr(config, "dropout", 0.0)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}; need 0 <= dropout < 1")


def check_heads(width: int | None, heads: int, layer: str = "") -> int:
    """Returns the width of a layer's input, which must be a multiple of its heads.

    Raises:
        ValueError: the width isn't known, or isn't a multiple of the heads.
    """
    if width is None or width % heads:
        where = f"layer {layer}: " if layer else ""
        raise ValueError(f"{where}width {width} isn't a multiple of {heads} heads")
    return width


def self_attention(
    layer: keras.layers.Layer, width: int, heads: int, dropout: float, initializer: keras.initializers.Initializer
) -> keras.layers.MultiHeadAttention:
    """Builds the sublayer ``attention`` of a layer for vectors of a width, which must be a multiple of the heads."""
    return keras.layers.MultiHeadAttention(
        heads,
        width // heads,
        dropout=dropout,
        kernel_initializer=initializer,
        name="attention",
        dtype=layer.dtype_policy,
    )
