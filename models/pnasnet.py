"""PNASNet-5 mobile (Liu et al., arXiv:1712.00559), with the cells of TF-Slim, without its auxiliary classifier."""

from __future__ import annotations

from typing import NamedTuple

import keras

_STEM_FILTERS, _DROPPED = 32, 0.5
_REDUCTIONS = (3, 6)
"""Cells with a stride of 2."""
_EPSILON, _MOMENTUM = 1e-3, 0.9997


class _Branch(NamedTuple):
    """One side of a sum within a cell.

    Attributes:
        op: ``separable``, ``pool`` or ``none``.
        size: of its kernel.
        state: the input: 0 the cell's, 1 the one before it, from 2 on the sums so far.
    """

    op: str
    size: int
    state: int


_SUMS = (
    (_Branch("separable", 5, 1), _Branch("pool", 3, 1)),
    (_Branch("separable", 7, 0), _Branch("pool", 3, 0)),
    (_Branch("separable", 5, 0), _Branch("separable", 3, 0)),
    (_Branch("separable", 3, 4), _Branch("pool", 3, 0)),
    (_Branch("separable", 3, 1), _Branch("none", 1, 0)),
)
"""The five sums whose results a cell concatenates."""


def pnasnet_mobile(
    classes: int = 1000, size: int = 224, *, cells: int = 9, filters: int = 54, activation: str | None = "softmax"
) -> keras.Model:
    """Returns PNASNet-5 mobile for images of ``size`` x ``size`` x 3; 5.1 million parameters.

    Args:
        classes: number of classes.
        size: height and width of the images.
        cells: number of cells after the stem.
        filters: filters of the first cells.
        activation: activation of the classifier; None for logits.
    """
    images = keras.Input((size, size, 3))
    x = keras.layers.Conv2D(_STEM_FILTERS, 3, 2, use_bias=False, name="stem_conv")(images)
    x = _normalized(x, "stem_bn")
    before, scaling = None, 0.25
    for number in range(2):
        before, x = x, _cell(x, before, int(filters * scaling), 2, f"stem_{number}")
        scaling *= 2
    for number in range(cells):
        stride = 2 if number in _REDUCTIONS else 1
        scaling *= stride
        before, x = x, _cell(x, before, int(filters * scaling), stride, f"cell_{number}")
    x = keras.layers.ReLU(name="last_relu")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pooled")(x)
    x = keras.layers.Dropout(_DROPPED, name="dropout")(x)
    return keras.Model(images, keras.layers.Dense(classes, activation=activation, name="predictions")(x))


def _cell(
    x: keras.KerasTensor, before: keras.KerasTensor | None, filters: int, stride: int, name: str
) -> keras.KerasTensor:
    states = [_pointwise(x, filters, 1, f"{name}_begin"), x if before is None else _fitted(before, x, filters, name)]
    for number, branches in enumerate(_SUMS):
        sides = [
            _branch(states[branch.state], branch, filters, stride if branch.state < 2 else 1, f"{name}_{number}{side}")
            for branch, side in zip(branches, "lr", strict=True)
        ]
        states.append(keras.layers.Add(name=f"{name}_sum_{number}")(sides))
    return keras.layers.Concatenate(name=f"{name}_concat")(states[2:])


def _fitted(before: keras.KerasTensor, x: keras.KerasTensor, filters: int, name: str) -> keras.KerasTensor:
    """Returns the input before the cell's with the cell's image size and number of channels."""
    if before.shape[1] == x.shape[1]:
        return before if before.shape[-1] == filters else _pointwise(before, filters, 1, f"{name}_before")
    before = keras.layers.ReLU(name=f"{name}_before_relu")(before)
    shifted = keras.layers.ZeroPadding2D(((0, 1), (0, 1)), name=f"{name}_pad")(before)
    shifted = keras.layers.Cropping2D(((1, 0), (1, 0)), name=f"{name}_crop")(shifted)
    halves = []
    for number, (image, channels) in enumerate(((before, filters // 2), (shifted, filters - filters // 2))):
        image = keras.layers.AveragePooling2D(1, 2, name=f"{name}_half_{number}_pool")(image)
        halves.append(keras.layers.Conv2D(channels, 1, use_bias=False, name=f"{name}_half_{number}")(image))
    return _normalized(keras.layers.Concatenate(name=f"{name}_halves")(halves), f"{name}_before_bn")


def _branch(x: keras.KerasTensor, branch: _Branch, filters: int, stride: int, name: str) -> keras.KerasTensor:
    if branch.op == "separable":
        for number in range(2):
            x = keras.layers.ReLU(name=f"{name}_relu_{number}")(x)
            x = keras.layers.SeparableConv2D(
                filters, branch.size, stride, "same", use_bias=False, name=f"{name}_separable_{number}"
            )(x)
            x, stride = _normalized(x, f"{name}_bn_{number}"), 1
        return x
    if branch.op == "pool":
        x = keras.layers.MaxPooling2D(branch.size, stride, "same", name=f"{name}_pool")(x)
        return x if x.shape[-1] == filters else _pointwise(x, filters, 1, name, relu=False)
    return x if stride == 1 and x.shape[-1] == filters else _pointwise(x, filters, stride, name)


def _pointwise(x: keras.KerasTensor, filters: int, stride: int, name: str, *, relu: bool = True) -> keras.KerasTensor:
    if relu:
        x = keras.layers.ReLU(name=f"{name}_relu")(x)
    x = keras.layers.Conv2D(filters, 1, stride, use_bias=False, name=f"{name}_conv")(x)
    return _normalized(x, f"{name}_bn")


def _normalized(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    return keras.layers.BatchNormalization(epsilon=_EPSILON, momentum=_MOMENTUM, name=name)(x)
