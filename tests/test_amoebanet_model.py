"""AmoebaNet-D: cells as published, wired as published, of the sizes in the DAPPLE authors' profile."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
from symbolic_models import parameters, without_values

from dapple_tf.describe.profile_text import load_text
from dapple_tf.models import amoebanet
from dapple_tf.models.grouping import Group


@pytest.fixture(scope="module")
def nine_cells() -> keras.Model:
    """Three of each size: two that differ in what they read, and one of those that are repeated."""
    with without_values():
        return amoebanet.amoebanet_d(9, classes=1001)


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
