"""AmoebaNet-D: cells as published, wired as published, of the sizes in the DAPPLE authors' profile."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from symbolic_models import parameters, without_values
from test_image_models import DOCUMENTED, SOURCES

from dapple_tf.describe.profile_text import load_text
from dapple_tf.models import amoebanet
from dapple_tf.models.grouping import Group


def convolution(channels: int, filters: int, kernel: int = 1) -> int:
    """Of a convolution without bias and its normalisation."""
    return channels * filters * kernel + 2 * filters


def bottleneck(channels: int, filters: int, *kernels: int) -> int:
    inner = filters // 4
    inside = sum(convolution(inner, inner, kernel) for kernel in kernels)
    return convolution(channels, inner) + inside + convolution(inner, filters)


def normal(filters: int, channels: int, before: int) -> int:
    sides = convolution(channels, filters) + convolution(before, filters)
    return sides + 3 * convolution(filters, filters) + 2 * bottleneck(filters, filters, 7, 7)


def reduction(filters: int, channels: int, before: int | None) -> int:
    """The first one has one input, which is brought to the right size only where it is pooled."""
    sides = convolution(channels, filters) + convolution(channels if before is None else before, filters)
    square = bottleneck(channels if before is None else filters, filters, 9)
    return sides + square + bottleneck(filters, filters, 7, 7) + convolution(filters, filters)


def amoebanet_d(cells: int, filters: int, classes: int = 1000) -> int:
    """Number of parameters of AmoebaNet-D (cells, filters), by hand."""
    total = convolution(3, 32, 9) + reduction(filters // 4, 32, None) + reduction(filters // 2, 3 * filters // 4, 32)
    channels, before = 3 * filters // 2, 3 * filters // 4
    for part in range(3):
        width = filters * 2**part
        if part:
            total += reduction(width, channels, before)
            channels, before = 3 * width, channels
        for _ in range(cells // 3):
            total += normal(width, channels, before)
            channels, before = 4 * width, channels
    return total + channels * classes + classes


@pytest.mark.parametrize(
    ("name", "cells", "filters"),
    [
        ("amoebanet:36", 36, 512),
        ("amoebanet:18", 18, 512),
        ("AmoebaNet-D (18, 208)", 18, 208),
        ("AmoebaNet-D (18, 416)", 18, 416),
        ("AmoebaNet-D (18, 544)", 18, 544),
        ("AmoebaNet-D (36, 544)", 36, 544),
    ],
)
def test_documented_sizes(name: str, cells: int, filters: int) -> None:
    assert DOCUMENTED[name] == amoebanet_d(cells, filters)


@pytest.fixture(scope="module")
def nine_cells() -> keras.Model:
    """Three of each size: two that differ in what they read, and one of those that are repeated."""
    with without_values():
        return amoebanet.amoebanet_d(9, classes=1001)


def test_parameters_by_hand(nine_cells: keras.Model) -> None:
    assert parameters(nine_cells) == amoebanet_d(9, 512, 1001)


def test_layers_are_those_of_the_profile(nine_cells: keras.Model) -> None:
    """Outputs, and the kernels of convolutions and classifier, are those that the DAPPLE authors' profile has."""
    profiled = {layer.name: layer for layer in load_text("amoeba-36", device="V100").layers}
    own = {f"cell_{number}": f"cell_{number // 3 * 12 + number % 3}" for number in range(9)}
    cells = [layer for layer in nine_cells.layers if isinstance(layer, Group)]
    order = [profiled[own.get(cell.name, cell.name)] for cell in cells]
    assert order == [layer for layer in profiled.values() if layer in order] and len(order) == 13
    for cell, expected in zip(cells, order, strict=True):
        assert 4 * parameters(cell, "/kernel") == expected.parameter_bytes, cell.name
        if cell.name != "cell_stem_0":  # The profile: four bytes for each of three times as many.
            assert 4 * math.prod(cell.output.shape[1:]) == expected.output_bytes.per_sample, cell.name
    assert 4 * parameters(nine_cells.get_layer("stem_conv")) == profiled["stem"].parameter_bytes
    assert 4 * parameters(nine_cells.get_layer("logits")) == profiled["final_layer"].parameter_bytes


def test_cells_read_the_two_before_them(nine_cells: keras.Model) -> None:
    chain = [nine_cells.get_layer("stem"), *(layer for layer in nine_cells.layers if isinstance(layer, Group))]
    assert [cell.name for cell in chain[1:4]] == ["cell_stem_0", "cell_stem_1", "cell_0"]
    for older, old, cell in zip(chain, chain[1:], chain[2:], strict=False):
        assert [tensor is layer.output for tensor, layer in zip(cell.input, (old, older), strict=True)] == [True, True]
    assert chain[1].input is chain[0].output


# Real et al., figure 2, as the authors' program has it: what each new state adds up, and which states a cell gives.
NORMAL = ["1 1", "1 0", "0 0", "2 2", "1 5"], "0 3 4 6"
REDUCTION = ["0 0", "2 1", "2 2", "3 1", "2 3"], "4 5 6"


@pytest.mark.parametrize(("name", "wiring"), [("cell_0", NORMAL), ("cell_stem_0", REDUCTION)])
def test_states_of_a_cell(name: str, wiring: tuple[list[str], str]) -> None:
    with without_values():
        network = amoebanet.amoebanet_tiny().get_layer(name).network
    states = {f"{name}_{number}": str(number) for number in range(2, 7)} | {
        f"{name}_0_norm": "0",
        f"{name}_1_norm": "1",
    }

    def read(tensor: Any) -> str:
        """The state that an operation was done on."""
        layer = tensor._keras_history.operation
        if isinstance(layer, keras.layers.InputLayer):
            return "1"  # The first cell has one input, which is state 1 as it comes.
        return states.get(layer.name) or read(layer.input)

    pairs, given = wiring
    assert [" ".join(map(read, network.get_layer(f"{name}_{2 + number}").input)) for number in range(5)] == pairs
    assert " ".join(map(read, network.get_layer(f"{name}_states").input)) == given


@pytest.mark.parametrize("size", [4, 5])
def test_larger_inputs_are_halved_from_even_and_odd_pixels(size: int) -> None:
    x, before = keras.Input((math.ceil(size / 2),) * 2 + (3,)), keras.Input((size, size, 1))
    model = keras.Model(before, amoebanet._fitted(before, x, 2, "fitted"))
    for layer in ("even", "odd"):
        model.get_layer(f"fitted_{layer}").set_weights([np.ones((1, 1, 1, 1))])
    images = np.random.default_rng(0).normal(size=(2, size, size, 1)).astype("float32")
    positive = np.pad(np.maximum(images, 0), ((0, 0), (0, 1), (0, 1), (0, 0)))
    expected = np.concatenate([positive[:, :size:2, :size:2], positive[:, 1::2, 1::2]], axis=-1)
    np.testing.assert_allclose(model.predict_on_batch(images) * np.sqrt(1.001), expected, rtol=1e-5)


def test_every_parameter_has_a_gradient() -> None:
    keras.utils.set_random_seed(0)
    source = SOURCES["amoebanet:tiny"]
    model = source.build()
    x, y, _ = source.data.example(model, 4)
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=tf.convert_to_tensor(y), y_pred=model(x, training=True))
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    assert all(gradient is not None and np.abs(gradient).max() > 0 for gradient in gradients)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"cells": 17}, "cells is 17; must be a multiple of 3"),
        ({"filters": 200}, "filters 200.* a multiple of 16"),
        ({"image": 2}, "image 2"),
        ({"classes": 0}, "classes 0"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        amoebanet.amoebanet_d(**sizes)
