"""The model of benchmarks: a byte-level GPT, compiled, on random tokens."""

from __future__ import annotations

import keras
import numpy as np

from dapple_tf.models.gpt import GptConfig, build

LEARNING_RATE = 1e-4


def gpt_size(blocks: int, width: int, sequence: int) -> GptConfig:
    """Returns a GPT with heads of 64 or smaller.

    Raises:
        ValueError: the width isn't a multiple of 4.
    """
    return GptConfig(vocabulary=256, sequence=sequence, depth=blocks, width=width, heads=4)


def make_model(size: GptConfig, *, jit_compile: bool = False) -> keras.Model:
    """Returns the model, with the same weights each time."""
    keras.utils.set_random_seed(1)
    model = build(size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(LEARNING_RATE), loss, jit_compile=jit_compile)
    return model


def make_data(size: GptConfig, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random tokens and labels, int32 [samples, sequence] each."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, size.vocabulary, (samples, size.sequence + 1)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]
