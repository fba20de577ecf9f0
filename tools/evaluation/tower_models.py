"""The models whose operators are placed on workers, all with parallel branches: Inception-V3 and towers of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import numpy as np


def inception() -> tuple[keras.Model, int]:
    """Returns Inception-V3 on small images, and a batch size."""
    return keras.applications.InceptionV3(weights=None, input_shape=(96, 96, 3), classes=10), 8


def towers() -> tuple[keras.Model, int]:
    """Returns four towers of convolutions on one image, and a batch size."""
    layers = keras.layers
    images = keras.Input((32, 32, 3))
    ends = []
    for tower in range(4):
        x = images
        for number in range(4):
            name = f"tower_{tower}_conv_{number}"
            x = layers.Conv2D(64, 3, padding="same", activation="relu", name=name)(x)
        ends.append(layers.GlobalAveragePooling2D(name=f"tower_{tower}_pooled")(x))
    x = layers.Concatenate(name="joined")(ends)
    return keras.Model(images, layers.Dense(10, name="logits")(x), name="towers"), 32


def wide_towers() -> tuple[keras.Model, int]:
    """Returns four towers of wide dense layers, whose gradients outweigh what the towers read, and a batch size."""
    layers = keras.layers
    vector = keras.Input((512,))
    ends = []
    for tower in range(4):
        x = vector
        for number in range(3):
            x = layers.Dense(1024, activation="relu", name=f"tower_{tower}_dense_{number}")(x)
        ends.append(layers.Dense(16, name=f"tower_{tower}_end")(x))
    x = layers.Concatenate(name="joined")(ends)
    return keras.Model(vector, layers.Dense(10, name="logits")(x), name="wide_towers"), 256


MODELS: Mapping[str, Callable[[], tuple[keras.Model, int]]] = {
    "inception": inception,
    "towers": towers,
    "wide_towers": wide_towers,
}
"""Name -> function that returns the model and its global batch size."""


def model_of(name: str) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Returns a compiled model, whose layers have the same names each time, and a batch."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model, batch = MODELS[name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=model.name != "inception_v3")
    model.compile(keras.optimizers.SGD(1e-3, 0.9), loss)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(batch, *model.input_shape[1:])).astype("float32")
    return model, x, draw.integers(0, 10, batch)
