"""Small models with parallel branches, for tests of operators that are placed one by one: few thousand parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

layers = keras.layers

CLASSES = 5
SIZE = 8
"""Images are SIZE x SIZE with three channels."""


@dataclasses.dataclass(frozen=True)
class Branching:
    """A kind of model.

    Attributes:
        build: makes a compiled model; the same values for the same seed of Keras.
        sliced: whether the result depends on how a batch is sliced, as with BatchNormalization.
    """

    build: Callable[[], keras.Model]
    sliced: bool


def batch(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images of the present float type, and labels."""
    images = rng.normal(size=(samples, SIZE, SIZE, 3)).astype(keras.backend.floatx())
    return images, rng.integers(0, CLASSES, samples).astype("int32")


def _compiled(images: Any, features: Any, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    pooled = layers.GlobalAveragePooling2D(name="pooled")(features)
    model = keras.Model(images, layers.Dense(CLASSES, name="logits")(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _inception_block(x: Any, name: str) -> Any:
    """Four branches of different depths, concatenated: InceptionV3's block A."""

    def conv(x: Any, channels: int, size: int | tuple[int, int], part: str) -> Any:
        return layers.Conv2D(channels, size, padding="same", activation="tanh", name=f"{name}_{part}")(x)

    narrow = conv(x, 4, 1, "1x1")
    middle = conv(conv(x, 3, 1, "5x5_reduce"), 4, 5, "5x5")
    deep = conv(conv(conv(x, 4, 1, "3x3_reduce"), 6, 3, "3x3_0"), 6, 3, "3x3_1")
    tall = conv(conv(x, 4, (1, 3), "1x3"), 4, (3, 1), "3x1")
    pooled = layers.AveragePooling2D(3, 1, padding="same", name=f"{name}_pool")(x)
    pooled = conv(pooled, 4, 1, "pool_project")
    return layers.Concatenate(name=name)([narrow, middle, deep, tall, pooled])


def inception() -> keras.Model:
    """A stem, and two blocks of five parallel branches with a reduction between them; no BatchNormalization."""
    images = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(6, 3, padding="same", activation="relu", name="stem")(images)
    x = _inception_block(x, "block_0")
    x = layers.Concatenate(name="reduction")(
        [
            layers.Conv2D(8, 3, 2, padding="same", activation="tanh", name="reduce")(x),
            layers.MaxPooling2D(3, 2, padding="same", name="reduce_pool")(x),
        ]
    )
    x = _inception_block(x, "block_1")
    return _compiled(images, x, keras.optimizers.Adam(1e-2, epsilon=1e-3))


def _separable(x: Any, channels: int, size: int, name: str, stride: int = 1) -> Any:
    """ReLU, depthwise and pointwise convolution, BatchNormalization: NASNet's separable convolution, once."""
    x = layers.Activation("relu", name=f"{name}_relu")(x)
    x = layers.SeparableConv2D(channels, size, stride, padding="same", use_bias=False, name=name)(x)
    return layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)


def _nasnet_cell(x: Any, before: Any, channels: int, name: str) -> Any:
    """Five pairs of branches that are added, of the results of the last two cells, and concatenated."""

    def fit(x: Any, part: str) -> Any:
        x = layers.Conv2D(channels, 1, use_bias=False, name=f"{name}_{part}")(x)
        return layers.BatchNormalization(momentum=0.9, name=f"{name}_{part}_norm")(x)

    x, skipped = fit(x, "fit"), fit(before, "fit_before")
    pool = layers.AveragePooling2D(3, 1, padding="same", name=f"{name}_pool")
    wide = [_separable(x, channels, 5, f"{name}_left_0"), _separable(skipped, channels, 3, f"{name}_right_0")]
    skips = [_separable(skipped, channels, 5, f"{name}_left_1"), _separable(skipped, channels, 3, f"{name}_right_1")]
    pairs = [
        wide,
        skips,
        [pool(x), skipped],
        [pool(skipped), pool(skipped)],
        [_separable(x, channels, 3, f"{name}_left_4"), x],
    ]
    sums = [layers.Add(name=f"{name}_add_{index}")(pair) for index, pair in enumerate(pairs)]
    return layers.Concatenate(name=name)([skipped, *sums])


def nasnet() -> keras.Model:
    """Cells that read the two before them: separable convolutions, sums, skips, BatchNormalization, weight decay."""
    images = keras.Input((SIZE, SIZE, 3))
    stem = layers.Conv2D(6, 3, padding="same", use_bias=False, name="stem")(images)
    stem = layers.BatchNormalization(momentum=0.9, name="stem_norm")(stem)
    first = _nasnet_cell(stem, stem, 4, "cell_0")
    second = _nasnet_cell(first, stem, 4, "cell_1")
    return _compiled(images, second, keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3))


def _residual_block(x: Any, channels: int, stride: int, name: str) -> Any:
    """A bottleneck with a projection where the shape changes: the block of ResNet-50."""

    def conv(x: Any, channels: int, size: int, stride: int, part: str) -> Any:
        x = layers.Conv2D(channels, size, stride, padding="same", use_bias=False, name=f"{name}_{part}")(x)
        return layers.BatchNormalization(momentum=0.9, name=f"{name}_{part}_norm")(x)

    y = layers.ReLU(name=f"{name}_relu_0")(conv(x, channels, 1, stride, "narrow"))
    y = layers.ReLU(name=f"{name}_relu_1")(conv(y, channels, 3, 1, "middle"))
    y = conv(y, 3 * channels, 1, 1, "wide")
    if stride > 1 or x.shape[-1] != 3 * channels:
        x = conv(x, 3 * channels, 1, stride, "project")
    return layers.ReLU(name=name)(layers.Add(name=f"{name}_add")([x, y]))


def resnet() -> keras.Model:
    """Three bottleneck blocks with BatchNormalization, the last one at half the resolution."""
    images = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(6, 3, padding="same", name="stem", kernel_regularizer=keras.regularizers.L2(1e-3))(images)
    x = layers.ReLU(name="stem_relu")(layers.BatchNormalization(momentum=0.9, name="stem_norm")(x))
    for name, channels, stride in (("block_0", 4, 1), ("block_1", 4, 1), ("block_2", 6, 2)):
        x = _residual_block(x, channels, stride, name)
    return _compiled(images, x, keras.optimizers.SGD(0.05, momentum=0.9))


BRANCHING: dict[str, Branching] = {
    "inception": Branching(inception, sliced=False),
    "nasnet": Branching(nasnet, sliced=True),
    "resnet": Branching(resnet, sliced=True),
}
