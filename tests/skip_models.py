"""A small model whose layers all read the same tensors: an embedding, its mask, and positions without a batch axis."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

LENGTH, WIDTH, BLOCKS = 5, 4, 5


class Positions(keras.layers.Layer):
    """A table for all samples: a tensor without a batch axis, made from a parameter."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True

    def build(self, _shape: Any) -> None:
        self.table = self.add_weight(shape=(LENGTH, WIDTH), name="table")

    def call(self, _inputs: Any) -> Any:
        return keras.ops.tanh(self.table) * 2.0

    def compute_mask(self, _inputs: Any, _mask: Any = None) -> Any:
        return None


class Block(keras.layers.Layer):
    """Reads the block before it, the embedding and the positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True
        self.dense = keras.layers.Dense(WIDTH, "tanh", kernel_initializer="orthogonal")

    def build(self, _shapes: Any) -> None:
        self.dense.build((None, LENGTH, WIDTH))

    def call(self, inputs: Any, mask: Any = None) -> Any:
        hidden, embedded, positions = inputs
        present = keras.ops.expand_dims(keras.ops.cast(mask[0], hidden.dtype), -1)
        return self.dense(hidden + positions) * present + 0.5 * embedded * positions

    def compute_mask(self, _inputs: Any, previous_mask: Any = None) -> Any:
        return None if previous_mask is None else previous_mask[1]  # the embedding's


def skips(**options: Any) -> keras.Model:
    """The model, of the present float type."""
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    embedded = keras.layers.Embedding(7, WIDTH, mask_zero=True, name="embedded")(tokens)
    positions = Positions(name="positions")(embedded)
    hidden = embedded
    for block in range(BLOCKS):
        hidden = Block(name=f"block_{block}")([hidden, embedded, positions])
    pooled = keras.layers.GlobalAveragePooling1D(name="pooled")(hidden)
    model = keras.Model(tokens, keras.layers.Dense(1, name="last")(pooled))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def skip_batch(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, some of which are masked, and targets."""
    tokens = rng.integers(0, 7, (samples, LENGTH)).astype("int32")
    tokens[:, 0] = 1
    return tokens, rng.normal(size=(samples, 1)).astype(keras.backend.floatx())
