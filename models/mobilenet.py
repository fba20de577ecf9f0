"""MobileNetV3 (Howard et al., ICCV 2019), as an ordinary Keras model with random weights.

The layers that a plan may cut after are named ``conv_bn``, ``expanded_conv_<number>_add`` where a block is skipped,
else ``expanded_conv_<number>_project_bn``, then ``conv_1_bn`` and ``predictions``.
"""

from __future__ import annotations

from typing import Any

import keras

from dapple_tf.common.keras_private import inverted_residual_block, names_from_start
from dapple_tf.common.keras_private import mobilenet_v3 as parts

_VARIANTS = {"large": keras.applications.MobileNetV3Large, "small": keras.applications.MobileNetV3Small}


def mobilenet_v3(
    variant: str = "large", *, image: int = 224, classes: int = 1000, alpha: float = 1.0, dropout: float = 0.2
) -> keras.Model:
    """Builds MobileNetV3 as in keras.applications, without rescaling pixels inside the model.

    Inputs are ``[batch, image, image, 3]``, outputs logits ``[batch, classes]``.

    Args:
        variant: ``"large"`` or ``"small"``.
        image: height and width of the images; at least 32.
        classes: number of classes.
        alpha: multiplier of all blocks' channels; the Out-Of-Order BackProp paper has 0.25, 0.5, 0.75 and 1.
        dropout: fraction dropped before the logits.

    Raises:
        ValueError: the variant is another, or a size is impossible.
    """
    if variant not in _VARIANTS:
        raise ValueError(f"variant is {variant!r}; use one of {', '.join(_VARIANTS)}")
    if not alpha > 0 or not 0 <= dropout < 1:
        raise ValueError(f"alpha is {alpha} and dropout {dropout}; need alpha > 0 and 0 <= dropout < 1")
    with names_from_start():
        return _VARIANTS[variant](
            input_shape=(image, image, 3),
            alpha=alpha,
            weights=None,
            classes=classes,
            dropout_rate=dropout,
            classifier_activation=None,
            include_preprocessing=False,
        )


def mobilenet_v3_tiny(*, image: int = 32, classes: int = 10) -> keras.Model:
    """Builds a block that is skipped, with squeeze and excitation, and one that halves the image, with hard swish.

    Inputs are ``[batch, image, image, 3]``, outputs logits ``[batch, classes]``.

    Args:
        image: height and width of the images; at least 32.
        classes: number of classes.
    """

    def blocks(x: Any, kernel: int, activation: Any, squeezed: float) -> Any:
        x = inverted_residual_block(x, 1, 16, 3, 1, squeezed, parts.relu, 0)
        return inverted_residual_block(x, 2, 24, kernel, 2, None, activation, 1)

    with names_from_start():
        return parts.MobileNetV3(
            blocks,
            32,
            input_shape=(image, image, 3),
            weights=None,
            classes=classes,
            dropout_rate=0.0,
            classifier_activation=None,
            include_preprocessing=False,
            name="mobilenet_v3_tiny",
        )
