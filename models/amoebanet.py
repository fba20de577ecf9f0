"""AmoebaNet-D (Real et al., AAAI 2019) of the size that GPipe and DAPPLE train, as an ordinary Keras functional model.

The layers that a plan may cut after are named as in the DAPPLE authors' profile: ``stem``, ``cell_stem_<number>``,
``cell_<number>``, ``reduction_cell_<number>``, ``pool`` and ``logits``. Each cell reads the outputs of the two cells
before it, so that two tensors cross each cut between cells.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

_BOTTLENECK = 4
"""What the channels between the 1x1 convolutions of an operation are divided by."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a cell computes.

    State 0 is what the cell before it gave and state 1 what the one before that gave, both brought to the cell's size.
    Each pair adds a state: the sum of an operation on each of two states.

    Attributes:
        pairs: of (state, operation) each.
        outputs: the states that are concatenated.
        stride: of operations on states 0 and 1.
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
"""The outputs are those of the authors' program; the paper's figure has states 4, 5 and 6."""
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
    """AmoebaNet-D (cells, filters): with 36 and 512 that of DAPPLE's table 1, of 933 million parameters.

    Inputs are ``[batch, image, image, channels]``, outputs logits ``[batch, classes]``.

    Args:
        cells: number of normal cells; a third each before, between and after two reduction cells.
        image: height and width of the images.
        channels: of the images.
        classes: number of classes.
        filters: channels of an operation in the first third; each following one has twice as many. Cells give four
            times as many.

    Raises:
        ValueError: cells that aren't a multiple of 3, or other sizes that can't be.
    """
    if cells < 3 or cells % 3:
        raise ValueError(f"cells is {cells}; must be a multiple of 3, for there are three groups of them")
    return cell_network([cells // 3] * 3, 2, image=image, channels=channels, classes=classes, filters=filters, stem=32)


def amoebanet_tiny(*, image: int = 8, channels: int = 3, classes: int = 10, filters: int = 16) -> keras.Model:
    """A reduction cell and a normal cell, ``cell_stem_0`` and ``cell_0``; sizes as in `amoebanet_d`."""
    return cell_network([1], 1, image=image, channels=channels, classes=classes, filters=filters, stem=8)


def cell_network(
    groups: Sequence[int], stem_cells: int, *, image: int, channels: int, classes: int, filters: int, stem: int
) -> keras.Model:
    """A convolution that halves the image, reduction cells, groups of normal cells with reduction cells between them.

    Args:
        groups: how many normal cells each group has.
        stem_cells: how many reduction cells there are before the first group; each has half the filters of the next.
        image: height and width of the images; at least 3.
        channels: of the images.
        classes: number of classes.
        filters: channels of an operation in the first group; a multiple of 4, and of twice that for each stem cell.
        stem: channels of the first convolution.

    Raises:
        ValueError: sizes that can't be.
    """
    multiple = _BOTTLENECK * 2**stem_cells
    if not groups or min(*groups, channels, classes, filters, stem) < 1 or image < 3 or filters % multiple:
        raise ValueError(
            f"groups {list(groups)}, image {image}, channels {channels}, classes {classes}, filters {filters}, stem "
            f"{stem}: all must be at least 1, the image 3, and filters a multiple of {multiple}"
        )
    images = keras.Input((image, image, channels), name="images")
    x = keras.layers.Conv2D(stem, 3, 2, use_bias=False, kernel_initializer="he_normal", name="stem_conv")(images)
    x = before = keras.layers.BatchNormalization(name="stem")(x)
    for number in range(stem_cells):
        width = filters // 2 ** (stem_cells - number)
        x, before = _cell(REDUCTION, x, before, width, f"cell_stem_{number}"), x
    first = 0
    for group, count in enumerate(groups):
        width = filters * 2**group
        if group:
            x, before = _cell(REDUCTION, x, before, width, f"reduction_cell_{group - 1}"), x
        for number in range(first, first + count):
            x, before = _cell(NORMAL, x, before, width, f"cell_{number}"), x
        first += count
    x = keras.layers.GlobalAveragePooling2D(name="pool")(keras.layers.ReLU(name="final_relu")(x))
    return keras.Model(images, keras.layers.Dense(classes, name="logits")(x), name="amoebanet")


def _cell(cell: Cell, x: Any, before: Any, width: int, name: str) -> Any:
    """A cell of so many channels per state, after ``x``, and ``before`` that."""
    states = [_convolution(x, width, (1, 1), (1, 1), f"{name}_input"), _fitted(before, x, width, f"{name}_previous")]
    for pair in cell.pairs:
        number = len(states)
        terms = [
            _operation(kind, states[state], width, cell.stride if state < 2 else 1, f"{name}_{number}_{side}")
            for side, (state, kind) in zip("ab", pair, strict=True)
        ]
        states.append(keras.layers.Add(name=f"{name}_{number}")(terms))
    return keras.layers.Concatenate(name=name)([states[state] for state in cell.outputs])


def _fitted(before: Any, x: Any, width: int, name: str) -> Any:
    """What the cell before the last gave, of the last one's size; the first cell has but one input, which stays."""
    if before is x:
        return before
    if before.shape[1] == x.shape[1]:
        return _convolution(before, width, (1, 1), (1, 1), name)
    halved = FactorizedReduction(width, name=name)(keras.layers.ReLU(name=f"{name}_relu")(before))
    return keras.layers.BatchNormalization(name=f"{name}_norm")(halved)


def _operation(kind: str, x: Any, width: int, stride: int, name: str) -> Any:
    """An operation by name; convolutions but 1x1 have fewer channels inside, and what is only pooled gets as many."""
    if kind == "none":
        return x
    what, *sizes = kind.removeprefix("max_").removeprefix("avg_").split("_")
    kernels = [tuple(map(int, size.split("x"))) for size in sizes]
    if what == "pool":
        pool = keras.layers.MaxPooling2D if kind.startswith("max") else keras.layers.AveragePooling2D
        x = pool(kernels[0], stride, padding="same", name=name)(x)
        return x if x.shape[-1] == width else _convolution(x, width, (1, 1), (1, 1), f"{name}_fit", activated=False)
    if kernels == [(1, 1)]:
        return _convolution(x, width, (1, 1), (stride, stride), name)
    x = _convolution(x, width // _BOTTLENECK, (1, 1), (1, 1), f"{name}_in")
    for number, kernel in enumerate(kernels):
        strides = tuple(stride if size > 1 else 1 for size in kernel)
        x = _convolution(x, width // _BOTTLENECK, kernel, strides, f"{name}_{number}")
    return _convolution(x, width, (1, 1), (1, 1), f"{name}_out")


def _convolution(
    x: Any, width: int, kernel: tuple[int, ...], strides: tuple[int, ...], name: str, *, activated: bool = True
) -> Any:
    """ReLU, a convolution without bias and its normalisation."""
    if activated:
        x = keras.layers.ReLU(name=f"{name}_relu")(x)
    convolution = keras.layers.Conv2D(
        width, kernel, strides, padding="same", use_bias=False, kernel_initializer="he_normal", name=name
    )
    return keras.layers.BatchNormalization(name=f"{name}_norm")(convolution(x))


@keras.saving.register_keras_serializable(package="dapple_models")
class FactorizedReduction(keras.layers.Layer):
    """Halves height and width: a 1x1 convolution of the pixels at even places, and one of those at odd places.

    Args:
        filters: channels of both together; even.
    """

    def __init__(self, filters: int, **options: Any) -> None:
        super().__init__(**options)
        if filters < 2 or filters % 2:
            raise ValueError(f"layer {self.name}: filters is {filters}; must be even")
        self.filters = filters

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the two convolutions."""
        self.even, self.odd = (
            keras.layers.Conv2D(
                self.filters // 2,
                1,
                2,
                use_bias=False,
                kernel_initializer="he_normal",
                name=name,
                dtype=self.dtype_policy,
            )
            for name in ("even", "odd")
        )
        self.even.build(input_shape)
        self.odd.build(input_shape)

    def call(self, inputs: Any) -> Any:
        """[batch, height, width, channels] -> [batch, height / 2, width / 2, filters], halves rounded up."""
        shifted = keras.ops.pad(inputs[:, 1:, 1:], ((0, 0), (0, 1), (0, 1), (0, 0)))
        return keras.ops.concatenate([self.even(inputs), self.odd(shifted)], axis=-1)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The shape of what ``call`` gives."""
        sizes = [None if size is None else math.ceil(size / 2) for size in input_shape[1:3]]
        return (input_shape[0], *sizes, self.filters)

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal layer."""
        return {**super().get_config(), "filters": self.filters}
