"""VGG (Simonyan and Zisserman, ICLR 2015), as an ordinary Keras model.

The layers that a plan may cut after are named ``conv_<group>_<number>``, ``pool_<group>``, ``dense_0``, ``dense_1`` and
``logits``. Most of its parameters are in the dense layers at the end, but most of the time is spent in the
convolutions. VGG-16 and VGG-19 are in `models.applications`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def vgg(
    *,
    image: int = 32,
    channels: int = 3,
    classes: int = 10,
    width: int = 32,
    groups: Sequence[int] = (2, 2, 2),
    dense: int = 1024,
) -> keras.Model:
    """Builds groups of 3x3 convolutions, each followed by max pooling, then two dense layers and the logits.

    Inputs are ``[batch, image, image, channels]``, outputs logits ``[batch, classes]``.

    Args:
        image: height and width of the images.
        channels: channels of the images.
        classes: number of classes.
        width: channels of the first group; each following group has twice as many.
        groups: number of convolutions in each group.
        dense: width of the dense layers.

    Raises:
        ValueError: there are no convolutions, or the image can't be halved for all groups.
    """
    if not groups or min(groups) < 1:
        raise ValueError(f"groups is {list(groups)}; each needs at least 1 convolution")
    if min(image, channels, classes, width, dense) < 1 or image % 2 ** len(groups):
        raise ValueError(
            f"image {image}, channels {channels}, classes {classes}, width {width}, dense {dense}: all must be at "
            f"least 1, and the image be a multiple of {2 ** len(groups)}, which {len(groups)} groups halve it by"
        )
    layers: list[Any] = [keras.Input((image, image, channels), name="images")]
    for group, count in enumerate(groups):
        for number in range(count):
            layers.append(
                keras.layers.Conv2D(
                    width * 2**group,
                    3,
                    padding="same",
                    activation="relu",
                    kernel_initializer="he_normal",
                    name=f"conv_{group}_{number}",
                )
            )
        layers.append(keras.layers.MaxPooling2D(name=f"pool_{group}"))
    layers.append(keras.layers.Flatten(name="flatten"))
    for number in range(2):
        layers.append(
            keras.layers.Dense(dense, activation="relu", kernel_initializer="he_normal", name=f"dense_{number}")
        )
    return keras.Sequential([*layers, keras.layers.Dense(classes, name="logits")], name="vgg")
