"""ResNet (He et al., CVPR 2016), as an ordinary Keras functional model.

The layers that a plan may cut after are named ``stem``, ``block_0`` and so on, ``pool`` and ``logits``; those of the
deep ones ``pool1_pool``, ``conv<group>_block<number>_out`` with groups from 2 and blocks from 1, ``avg_pool`` and
``predictions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from dapple_tf.common.keras_private import names_from_start
from dapple_tf.common.keras_private import resnet as parts

_APPLICATIONS = {
    50: keras.applications.ResNet50,
    101: keras.applications.ResNet101,
    152: keras.applications.ResNet152,
}
_BLOCKS_200 = (3, 24, 36, 3)


def deep_resnet(
    depth: int, *, image: int = 224, classes: int = 1000, classifier_activation: str | None = None
) -> keras.Model:
    """Builds ResNet-50, 101, 152 or 200, of bottleneck blocks, with random weights.

    Inputs are ``[batch, image, image, 3]``, outputs logits ``[batch, classes]``. The first three are those of
    keras.applications, which has only the parts of ResNet-200 (He et al., Identity Mappings in Deep Residual Networks:
    3, 24, 36 and 3 blocks). Like them, and like TF-Slim's resnet_v1_200, it normalises after each convolution.

    Args:
        depth: number of layers with weights.
        image: height and width of the images; at least 32.
        classes: number of classes.
        classifier_activation: activation of the outputs; ``"softmax"`` for probabilities.

    Raises:
        ValueError: the depth is another.
    """
    make = _resnet_200 if depth == 200 else _APPLICATIONS.get(depth)
    if make is None:
        raise ValueError(f"depth is {depth}; there are {', '.join(map(str, _APPLICATIONS))} and 200")
    with names_from_start():
        return make(
            weights=None,
            input_shape=(image, image, 3),
            classes=classes,
            classifier_activation=classifier_activation,
        )


def _resnet_200(**options: Any) -> keras.Model:
    def stacks(x: Any) -> Any:
        for group, blocks in enumerate(_BLOCKS_200):
            stride = 2 if group else 1
            x = parts.stack_residual_blocks_v1(x, 64 * 2**group, blocks, stride1=stride, name=f"conv{group + 2}")
        return x

    return parts.ResNet(stacks, preact=False, use_bias=True, name="resnet200", weights_name="resnet200", **options)


def resnet(
    *, image: int = 32, channels: int = 3, classes: int = 10, width: int = 32, blocks: Sequence[int] = (2, 3, 3, 2)
) -> keras.Model:
    """Builds a ResNet of basic blocks: two 3x3 convolutions with batch normalisation, plus a shortcut.

    Inputs are ``[batch, image, image, channels]``, outputs logits ``[batch, classes]``.

    Args:
        image: height and width of the images.
        channels: channels of the images.
        classes: number of classes.
        width: channels of the first group of blocks; each following group has twice as many, and half the image.
        blocks: number of blocks in each group.

    Raises:
        ValueError: there are no blocks, or the image can't be halved for all groups.
    """
    if not blocks or min(blocks) < 1:
        raise ValueError(f"blocks is {list(blocks)}; each group needs at least 1 block")
    if min(image, channels, classes, width) < 1 or image % 2 ** (len(blocks) - 1):
        raise ValueError(
            f"image {image}, channels {channels}, classes {classes}, width {width}: all must be at least 1, and the "
            f"image be a multiple of {2 ** (len(blocks) - 1)}, which {len(blocks)} groups of blocks halve it by"
        )
    inputs = keras.Input((image, image, channels), name="images")
    x = _convolution(inputs, width, 3, 1, "stem_conv")
    x = keras.layers.ReLU(name="stem")(x)
    number = 0
    for group, count in enumerate(blocks):
        for position in range(count):
            x = _block(x, width * 2**group, 2 if group and not position else 1, f"block_{number}")
            number += 1
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="resnet")


def _block(x: Any, width: int, stride: int, name: str) -> Any:
    skipped = x
    if stride != 1 or x.shape[-1] != width:
        skipped = _convolution(x, width, 1, stride, f"{name}_skip")
    x = _convolution(x, width, 3, stride, f"{name}_conv_0")
    x = keras.layers.ReLU(name=f"{name}_relu")(x)
    x = _convolution(x, width, 3, 1, f"{name}_conv_1")
    return keras.layers.ReLU(name=name)(keras.layers.Add(name=f"{name}_add")([x, skipped]))


def _convolution(x: Any, width: int, size: int, stride: int, name: str) -> Any:
    """Returns a convolution without bias and its normalisation."""
    convolution = keras.layers.Conv2D(
        width, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal", name=name
    )
    return keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(convolution(x))
