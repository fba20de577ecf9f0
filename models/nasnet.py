"""NASNet-A (Zoph et al., CVPR 2018), as an ordinary Keras model with random weights.

The layers that a plan may cut after are named ``stem``, ``cell_stem_<number>``, ``cell_<number>``,
``reduction_cell_<number>``, ``pool`` and ``logits``. Each cell reads the outputs of the two cells before it, so that
two tensors cross each cut between cells.
"""

from __future__ import annotations

from typing import Any

import keras

from dapple_tf.common.keras_private import names_from_start, nasnet_cell
from dapple_tf.models.grouping import group

_REDUCTIONS = 2
"""Number of times that the network doubles its filters and halves its images between cells."""


def nasnet_mobile(*, image: int = 224, classes: int = 1000) -> keras.Model:
    """Builds NASNet-A (4 @ 1056). Sizes as in `nasnet`."""
    return nasnet(4, 1056, image=image, classes=classes, stem=32, skip=False)


def nasnet_large(*, image: int = 331, classes: int = 1000) -> keras.Model:
    """Builds NASNet-A (6 @ 4032). Sizes as in `nasnet`."""
    return nasnet(6, 4032, image=image, classes=classes, stem=96, skip=True)


def nasnet(cells: int, width: int, *, image: int, classes: int, stem: int, skip: bool) -> keras.Model:
    """Builds NASNet-A (cells @ width) from the cells of keras.applications; each cell is one layer.

    Inputs are ``[batch, image, image, 3]``, outputs logits ``[batch, classes]``.

    Args:
        cells: number of normal cells before, between and after the two reduction cells, each time.
        width: channels before the classifier; a multiple of 96.
        image: height and width of the images; at least 32.
        classes: number of classes.
        stem: channels of the first convolution.
        skip: whether the cell after a reduction cell reads the cell two before that one, instead of one.

    Raises:
        ValueError: a size is impossible.
    """
    filters, rest = divmod(width, 24)
    if cells < 1 or classes < 1 or stem < 1 or width < 1 or rest or filters % 2**_REDUCTIONS or image < 32:
        raise ValueError(
            f"cells {cells}, width {width}, image {image}, classes {classes}, stem {stem}: all must be at least 1, the "
            f"image 32, and the width a multiple of {24 * 2**_REDUCTIONS}"
        )
    with names_from_start():
        images = keras.Input((image, image, 3), name="images")
        x, before = _stem(images, stem, 2), None
        for number in range(2):
            x, before = _cell("reduction", x, before, filters // 2 ** (2 - number), f"cell_stem_{number}"), x
        for part in range(_REDUCTIONS + 1):
            if part:
                reduced = _cell("reduction", x, before, filters * 2**part, f"reduction_cell_{part - 1}")
                x, before = reduced, before if skip else x
            for number in range(part * cells, (part + 1) * cells):
                x, before = _cell("normal", x, before, filters * 2**part, f"cell_{number}"), x
        return _classified(images, x, classes, "nasnet")


def nasnet_tiny(*, image: int = 8, classes: int = 10, filters: int = 4) -> keras.Model:
    """Builds a normal cell and a reduction cell after a convolution that keeps the image's size.

    Inputs are ``[batch, image, image, 3]``, outputs logits ``[batch, classes]``.

    Args:
        image: height and width of the images.
        classes: number of classes.
        filters: filters of the normal cell; the reduction cell has twice as many.
    """
    with names_from_start():
        images = keras.Input((image, image, 3), name="images")
        before = _stem(images, filters, 1)
        x = _cell("normal", before, None, filters, "cell_0")
        x = _cell("reduction", x, before, 2 * filters, "reduction_cell_0")
        return _classified(images, x, classes, "nasnet_tiny")


def _stem(images: Any, width: int, stride: int) -> Any:
    convolution = keras.layers.Conv2D(
        width,
        3,
        stride,
        padding="same" if stride == 1 else "valid",
        use_bias=False,
        kernel_initializer="he_normal",
        name="stem_conv",
    )
    return keras.layers.BatchNormalization(momentum=0.9997, epsilon=1e-3, name="stem")(convolution(images))


def _cell(kind: str, x: Any, before: Any | None, filters: int, name: str) -> Any:
    """Adds a cell after ``x`` and ``before``; the first one has only one input."""
    make = nasnet_cell(kind)

    def output(x: Any, before: Any | None = None) -> Any:
        return make(x, before, filters, block_id=name)[0]

    return group(name, output, *((x,) if before is None else (x, before)))


def _classified(images: Any, x: Any, classes: int, name: str) -> keras.Model:
    x = keras.layers.GlobalAveragePooling2D(name="pool")(keras.layers.ReLU(name="final_relu")(x))
    return keras.Model(images, keras.layers.Dense(classes, name="logits")(x), name=name)
