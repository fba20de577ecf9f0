"""AmoebaNet-D (Real et al., AAAI 2019) of the size that GPipe and DAPPLE train, as an ordinary Keras functional model.

The layers that a plan may cut after are named as in the DAPPLE authors' profile: ``stem``, ``cell_stem_<number>``,
``cell_<number>``, ``reduction_cell_<number>``, ``pool`` and ``logits``. Each cell reads the outputs of the two cells
before it, so that two tensors cross each cut between cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from dapple_tf.models.grouping import group

_BOTTLENECK = 4
"""Divisor of the channels between the 1x1 convolutions of an operation."""
_KERNELS = {"conv_3x3": ((3, 3),), "conv_1x7_7x1": ((1, 7), (7, 1))}
"""Sizes of the convolutions between them."""
_POOLS = {
    "max_pool_2x2": (keras.layers.MaxPooling2D, 2),
    "max_pool_3x3": (keras.layers.MaxPooling2D, 3),
    "avg_pool_3x3": (keras.layers.AveragePooling2D, 3),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """The computation of a cell.

    State 0 is the output of the previous cell and state 1 that of the one before it, both brought to the cell's size.
    Each pair adds a state: the sum of an operation on each of two states.

    Attributes:
        pairs: pairs of (state, operation).
        outputs: the states that are concatenated.
        stride: stride of operations on states 0 and 1.
    """

    pairs: tuple[tuple[tuple[int, str], tuple[int, str]], ...]
    outputs: tuple[int, ...]
    stride: int


NORMAL = Cell(
    pairs=(
        ((1, "conv_1x1"), (1, "max_pool_3x3")),
        ((1, "none"), (0, "conv_1x7_7x1")),
        ((0, "conv_1x1"), (0, "conv_1x7_7x1")),
        ((2, "max_pool_3x3"), (2, "none")),
        ((1, "avg_pool_3x3"), (5, "conv_1x1")),
    ),
    outputs=(0, 3, 4, 6),
    stride=1,
)
"""Outputs as in the authors' program; the paper's figure has states 4, 5 and 6."""
REDUCTION = Cell(
    pairs=(
        ((0, "max_pool_2x2"), (0, "max_pool_3x3")),
        ((2, "none"), (1, "conv_3x3")),
        ((2, "conv_1x7_7x1"), (2, "max_pool_3x3")),
        ((3, "none"), (1, "max_pool_2x2")),
        ((2, "avg_pool_3x3"), (3, "conv_1x1")),
    ),
    outputs=(4, 5, 6),
    stride=2,
)


def amoebanet_d(
    cells: int = 36, *, image: int = 224, channels: int = 3, classes: int = 1000, filters: int = 512
) -> keras.Model:
    """Builds AmoebaNet-D (cells, filters): with 36 and 512 that of DAPPLE's table 1, of 933 million parameters.

    Inputs are ``[batch, image, image, channels]``, outputs logits ``[batch, classes]``.

    Args:
        cells: number of normal cells; a third each before, between and after two reduction cells.
        image: height and width of the images.
        channels: channels of the images.
        classes: number of classes.
        filters: channels of an operation in the first third; each following third has twice as many. Cells return four
            times as many.

    Raises:
        ValueError: the cells aren't a multiple of 3, or another size is impossible.
    """
    if cells < 3 or cells % 3:
        raise ValueError(f"cells is {cells}; must be a multiple of 3, for there are three groups of them")
    return cell_network([cells // 3] * 3, 2, image=image, channels=channels, classes=classes, filters=filters, stem=32)


def amoebanet_tiny(*, image: int = 8, channels: int = 3, classes: int = 10, filters: int = 16) -> keras.Model:
    """Builds a reduction cell and a normal cell, ``cell_stem_0`` and ``cell_0``; sizes as in `amoebanet_d`."""
    return cell_network([1], 1, image=image, channels=channels, classes=classes, filters=filters, stem=8)


def cell_network(
    groups: Sequence[int], stem_cells: int, *, image: int, channels: int, classes: int, filters: int, stem: int
) -> keras.Model:
    """Builds a convolution that halves the image, reduction cells, and groups of normal cells with some in between.

    Args:
        groups: number of normal cells in each group.
        stem_cells: number of reduction cells before the first group, at least 1; each has half the filters of
            the next.
        image: height and width of the images; at least 3.
        channels: channels of the images.
        classes: number of classes.
        filters: channels of an operation in the first group; a multiple of 4, and of twice that for each stem cell.
        stem: channels of the first convolution.

    Raises:
        ValueError: a size is impossible.
    """
    multiple = _BOTTLENECK * 2 ** max(stem_cells, 0)
    if not groups or min(*groups, stem_cells, channels, classes, filters, stem) < 1 or image < 3 or filters % multiple:
        raise ValueError(
            f"groups {list(groups)}, stem_cells {stem_cells}, image {image}, channels {channels}, classes {classes}, "
            f"filters {filters}, stem {stem}: all must be at least 1, the image 3, and filters a multiple of {multiple}"
        )
    images = keras.Input((image, image, channels), name="images")
    x = keras.layers.Conv2D(stem, 3, 2, use_bias=False, kernel_initializer="he_normal", name="stem_conv")(images)
    x = before = keras.layers.BatchNormalization(name="stem")(x)
    for number in range(stem_cells):
        width = filters // 2 ** (stem_cells - number)
        x, before = _cell(REDUCTION, x, before, width, f"cell_stem_{number}"), x
    first = 0
    for part, count in enumerate(groups):
        width = filters * 2**part
        if part:
            x, before = _cell(REDUCTION, x, before, width, f"reduction_cell_{part - 1}"), x
        for number in range(first, first + count):
            x, before = _cell(NORMAL, x, before, width, f"cell_{number}"), x
        first += count
    x = keras.layers.GlobalAveragePooling2D(name="pool")(keras.layers.ReLU(name="final_relu")(x))
    return keras.Model(images, keras.layers.Dense(classes, name="logits")(x), name="amoebanet")


def _cell(cell: Cell, x: Any, before: Any, width: int, name: str) -> Any:
    """Adds a cell with ``width`` channels per state after ``x`` and ``before``; the first one has only one input."""

    def states(x: Any, before: Any | None = None) -> Any:
        first = _convolution(x, width, (1, 1), (1, 1), f"{name}_0")
        tensors = [first, x if before is None else _fitted(before, x, width, f"{name}_1")]
        for pair in cell.pairs:
            number = len(tensors)
            terms = [
                _operation(kind, tensors[state], width, cell.stride if state < 2 else 1, f"{name}_{number}_{side}")
                for side, (state, kind) in zip("ab", pair, strict=True)
            ]
            tensors.append(keras.layers.Add(name=f"{name}_{number}")(terms))
        return keras.layers.Concatenate(name=f"{name}_states")([tensors[state] for state in cell.outputs])

    return group(name, states, x) if before is x else group(name, states, x, before)


def _fitted(before: Any, x: Any, width: int, name: str) -> Any:
    """Returns ``before`` in the size of ``x``; if it is larger, half of it from odd pixels."""
    if before.shape[1] == x.shape[1]:
        return _convolution(before, width, (1, 1), (1, 1), name)
    before = keras.layers.ReLU(name=f"{name}_relu")(before)
    shifted = keras.layers.ZeroPadding2D(((0, 1), (0, 1)), name=f"{name}_pad")(before)
    shifted = keras.layers.Cropping2D(((1, 0), (1, 0)), name=f"{name}_crop")(shifted)
    halves = [
        keras.layers.Conv2D(width // 2, 1, 2, use_bias=False, kernel_initializer="he_normal", name=f"{name}_{which}")(
            pixels
        )
        for which, pixels in (("even", before), ("odd", shifted))
    ]
    return keras.layers.BatchNormalization(name=f"{name}_norm")(keras.layers.Concatenate(name=name)(halves))


def _operation(kind: str, x: Any, width: int, stride: int, name: str) -> Any:
    """Adds an operation by name; convolutions but 1x1 have fewer channels inside, and pooling also yields ``width``."""
    if kind == "none":
        return x
    if kind in _POOLS:
        pool, size = _POOLS[kind]
        x = pool(size, stride, padding="same", name=name)(x)
        return x if x.shape[-1] == width else _convolution(x, width, (1, 1), (1, 1), f"{name}_fit", activated=False)
    if kind == "conv_1x1":
        return _convolution(x, width, (1, 1), (stride, stride), name)
    x = _convolution(x, width // _BOTTLENECK, (1, 1), (1, 1), f"{name}_in")
    for number, kernel in enumerate(_KERNELS[kind]):
        strides = tuple(stride if size > 1 else 1 for size in kernel)
        x = _convolution(x, width // _BOTTLENECK, kernel, strides, f"{name}_{number}")
    return _convolution(x, width, (1, 1), (1, 1), f"{name}_out")


def _convolution(
    x: Any, width: int, kernel: tuple[int, ...], strides: tuple[int, ...], name: str, *, activated: bool = True
) -> Any:
    """Adds ReLU, a convolution without bias and its normalisation."""
    if activated:
        x = keras.layers.ReLU(name=f"{name}_relu")(x)
    convolution = keras.layers.Conv2D(
        width, kernel, strides, padding="same", use_bias=False, kernel_initializer="he_normal", name=name
    )
    return keras.layers.BatchNormalization(name=f"{name}_norm")(convolution(x))
