"""DenseNet-BC (Huang et al., CVPR 2017), as an ordinary Keras functional model.

The layers that a plan may cut after are named ``stem``, ``block_<group>_<number>``, ``transition_<group>`` and
``logits``, all counted from 0. A block's output contains everything that its group has made so far, so that one tensor
crosses each cut; after a transition it is smallest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras

from dapple_tf.models.grouping import group

_BOTTLENECK = 4
"""Channels of the 1x1 convolution of a block, as a multiple of the growth rate."""


def densenet(
    *,
    image: int = 224,
    channels: int = 3,
    classes: int = 1000,
    blocks: Sequence[int] = (6, 12, 24, 16),
    growth: int = 32,
) -> keras.Model:
    """Builds a DenseNet with bottlenecks that halves its channels between groups; by default DenseNet-121.

    Inputs are ``[batch, image, image, channels]``, outputs logits ``[batch, classes]``. keras.applications' DenseNet
    has the same layers, but only one growth rate. Images below 64 pixels, such as CIFAR's, pass a 3x3 convolution
    first; larger ones a 7x7 convolution and pooling, to a quarter.

    Args:
        image: height and width of the images.
        channels: channels of the images.
        classes: number of classes.
        blocks: number of blocks in each group: DenseNet-169 has 6, 12, 32 and 32.
        growth: channels that each block adds; the Out-Of-Order BackProp paper has 12, 24 and 32.

    Raises:
        ValueError: there are no blocks, or the image can't be halved as often.
    """
    if not blocks or min(blocks) < 1:
        raise ValueError(f"blocks is {list(blocks)}; each group needs at least 1 block")
    small = image < 64
    least = 2 ** (len(blocks) - 1) * (1 if small else 4)
    if min(channels, classes, growth) < 1 or image < least:
        raise ValueError(
            f"image {image}, channels {channels}, classes {classes}, growth {growth}: all must be at least 1, and the "
            f"image {least}, which {len(blocks)} groups of blocks halve to 1"
        )
    inputs = keras.Input((image, image, channels), name="images")
    if small:
        x = _convolution(inputs, 2 * growth, 3, "stem")
    else:
        x = _convolution(inputs, 2 * growth, 7, "stem_conv", strides=2)
        x = keras.layers.MaxPooling2D(3, 2, padding="same", name="stem")(_activated(x, "stem"))
    for part, count in enumerate(blocks):
        if part:
            name = f"transition_{part - 1}"
            x = group(name, functools.partial(_transition, name=name), x)
        for number in range(count):
            name = f"block_{part}_{number}"
            x = group(name, functools.partial(_block, growth=growth, name=name), x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(_activated(x, "final"))
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="densenet")


def _block(x: Any, growth: int, name: str) -> Any:
    """Returns ``x`` with ``growth`` more channels."""
    new = _convolution(_activated(x, f"{name}_0"), _BOTTLENECK * growth, 1, f"{name}_conv_0")
    new = _convolution(_activated(new, f"{name}_1"), growth, 3, f"{name}_conv_1")
    return keras.layers.Concatenate(name=f"{name}_concat")([x, new])


def _transition(x: Any, name: str) -> Any:
    """Returns half as many channels, of half the height and width."""
    x = _convolution(_activated(x, name), x.shape[-1] // 2, 1, f"{name}_conv")
    return keras.layers.AveragePooling2D(2, name=f"{name}_pool")(x)


def _activated(x: Any, name: str) -> Any:
    x = keras.layers.BatchNormalization(epsilon=1.001e-5, name=f"{name}_norm")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x)


def _convolution(x: Any, width: int, size: int, name: str, *, strides: int = 1) -> Any:
    return keras.layers.Conv2D(
        width, size, strides, padding="same", use_bias=False, kernel_initializer="he_normal", name=name
    )(x)
