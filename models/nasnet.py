"""NASNet-A (Zoph et al., CVPR 2018), as an ordinary Keras model with random weights.

The layers that a plan may cut after are named ``stem_bn1``, ``reduction_concat_<cell>``, ``normal_concat_<cell>`` and
``predictions``. Each cell reads the outputs of the two cells before it, so that two tensors cross each cut.
"""

from __future__ import annotations

import keras

from models.naming import names_from_start

_VARIANTS = {"mobile": (keras.applications.NASNetMobile, 224), "large": (keras.applications.NASNetLarge, 331)}


def nasnet(variant: str = "mobile", *, image: int | None = None, classes: int = 1000) -> keras.Model:
    """NASNet-A (4 @ 1056) or (6 @ 4032), as keras.applications has them.

    Inputs are ``[batch, image, image, 3]``, outputs logits ``[batch, classes]``.

    Args:
        variant: ``"mobile"`` or ``"large"``.
        image: height and width of the images; at least 32. None for those of the paper: 224 and 331.
        classes: number of classes.

    Raises:
        ValueError: another variant.
    """
    if variant not in _VARIANTS:
        raise ValueError(f"variant is {variant!r}; use one of {', '.join(_VARIANTS)}")
    make, usual = _VARIANTS[variant]
    size = usual if image is None else image
    with names_from_start():
        return make(input_shape=(size, size, 3), weights=None, classes=classes, classifier_activation=None)


def nasnet_tiny(*, image: int = 8, filters: int = 4, classes: int = 10) -> keras.Model:
    """A normal cell and a reduction cell after a convolution that keeps the image's size.

    Inputs are ``[batch, image, image, 3]``, outputs logits ``[batch, classes]``.

    Args:
        image: height and width of the images.
        filters: of the normal cell; the reduction cell has twice as many.
        classes: number of classes.
    """
    from keras.src.applications import nasnet as parts

    with names_from_start():
        images = keras.Input((image, image, 3), name="images")
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False, name="stem_conv1")(images)
        x = keras.layers.BatchNormalization(momentum=0.9997, epsilon=1e-3, name="stem_bn1")(x)
        x, before = parts._normal_a_cell(x, None, filters, block_id="0")
        x, _ = parts._reduction_a_cell(x, before, 2 * filters, block_id="reduce_1")
        x = keras.layers.GlobalAveragePooling2D(name="avg_pool")(keras.layers.ReLU(name="relu")(x))
        return keras.Model(images, keras.layers.Dense(classes, name="predictions")(x), name="nasnet_tiny")
