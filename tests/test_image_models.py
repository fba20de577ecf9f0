"""Models of images: sizes as documented and published, cuts that are good, and variants that are tiny."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from selection import thorough
from symbolic_models import parameters, without_values

from dapple_tf.keras_private import names_from_start
from dapple_tf.models import densenet, mobilenet, nasnet, resnet, vgg
from dapple_tf.models.catalogue import IMAGE_MODELS
from dapple_tf.models.grouping import Group, group
from dapple_tf.models.sources import ModelSource

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "models.md"
IMAGES = PAGE.read_text(encoding="utf-8").partition("\n## Images\n")[2].partition("\n## ")[0]
ROW = re.compile(
    r"^\| `?(?P<name>[^`|]+?)`? \| (?P<count>[\d,]+) \| ((?P<digits>[\d.]+)(?P<unit>M|Mi|B))? ?\|"
    r" ((?P<off>[+-][\d.]+)%)? ?\| [^|]*\|$",
    re.MULTILINE,
)
UNITS = {"M": 1e6, "Mi": 2**20, "B": 1e9}
DOCUMENTED = {row["name"]: int(row["count"].replace(",", "")) for row in ROW.finditer(IMAGES)}
SOURCES = {source.name: source for source in IMAGE_MODELS}
TINY = [source for source in IMAGE_MODELS if source.name.endswith(":tiny")]
FULL = [source for source in IMAGE_MODELS if source.name.partition(":")[2] not in ("", "tiny")]
QUICK = ("vgg:19", "mobilenet:v3_large", "mobilenet:v3_small")

GOOD_CUTS = {
    "vgg:19": r"block\d_pool|fc\d",
    "resnet": r"pool1_pool|conv\d_block\d+_out|avg_pool",
    "densenet": r"stem|block_\d_\d+|transition_\d|pool",
    "mobilenet": r"expanded_conv_(\d+_)?add",
    "nasnet": r"stem|cell_\d+|cell_stem_\d|reduction_cell_\d",
    "amoebanet": r"stem|cell_\d+|cell_stem_\d|reduction_cell_\d",
}


def crossing(model: keras.Model) -> dict[str, int]:
    """By layer: how many tensors cross a cut after it."""
    order = {operation: number for number, operation in enumerate(model.operations)}
    read: dict[int, int] = {}
    made: dict[int, int] = {}
    for operation, number in order.items():
        for node in operation._inbound_nodes:
            read |= {id(tensor): max(read.get(id(tensor), 0), number) for tensor in node.input_tensors}
            made |= {id(tensor): number for tensor in node.output_tensors}
    return {
        operation.name: sum(made[tensor] <= number < read.get(tensor, -1) for tensor in made)
        for operation, number in order.items()
    }


def test_differences_are_what_the_counts_give() -> None:
    """They are 2% at most, or less than what the published number is rounded by."""
    rows = [row for row in ROW.finditer(IMAGES) if row["digits"]]
    assert len(rows) == 16
    for row in rows:
        published = float(row["digits"]) * UNITS[row["unit"]]
        difference = int(row["count"].replace(",", "")) / published - 1
        assert float(row["off"]) == pytest.approx(100 * difference, abs=0.051), row["name"]
        places = len(row["digits"].partition(".")[2])
        assert abs(difference) * published < max(0.02 * published, 0.5 * 10**-places * UNITS[row["unit"]]), row["name"]


def test_every_size_is_documented() -> None:
    assert {source.name for source in FULL} == DOCUMENTED.keys() & SOURCES.keys()


@pytest.mark.parametrize(
    "source",
    [row if row.name in QUICK else thorough(row) for row in FULL],
    ids=lambda row: row.name,
)
def test_full_sizes(source: ModelSource) -> None:
    """As documented; plans can cut where one tensor crosses, or two between cells that read two."""
    with without_values():
        model = source.build()
    assert parameters(model) == DOCUMENTED[source.name]
    assert model.output_shape == (None, 1000)
    assert getattr(model.layers[-1], "activation", keras.activations.linear) is keras.activations.linear
    cells = source.name.startswith(("nasnet", "amoebanet"))
    family = source.name if source.name in GOOD_CUTS else source.name.partition(":")[0]
    cuts = {name: count for name, count in crossing(model).items() if re.fullmatch(GOOD_CUTS[family], name)}
    assert len(cuts) > 5
    assert all(count == (2 if cells and name != "stem" else 1) for name, count in list(cuts.items())[:-1])


@pytest.mark.parametrize("source", TINY, ids=lambda source: source.name)
def test_tiny_variants(source: ModelSource) -> None:
    with without_values():
        model, again = source.build(), source.build()
    assert parameters(model) < 20_000
    names = [layer.name for layer in model.layers]
    assert len(set(names)) == len(names) < 40
    assert names == [layer.name for layer in again.layers]
    paths = [variable.path for variable in model.variables]
    assert len(set(paths)) == len(paths)


@pytest.mark.slow
def test_growth_rates_and_small_images() -> None:
    """DenseNet-BC (100, 12) for CIFAR-10 has 769,162 parameters: Huang et al., table 2, say 0.8M."""
    with without_values():
        small = densenet.densenet(image=32, classes=10, blocks=(16, 16, 16), growth=12)
    assert parameters(small) == DOCUMENTED["DenseNet (100, 12)"]
    assert small.get_layer("block_0_15").output.shape == (None, 32, 32, 24 + 16 * 12)
    assert small.get_layer("block_2_15").output.shape[1:3] == (8, 8)


@pytest.mark.parametrize(("growth", "channels"), [(12, 12 * 2 + 3 * 12), (24, 24 * 2 + 3 * 24)])
def test_large_images_become_a_quarter(growth: int, channels: int) -> None:
    with without_values():
        model = densenet.densenet(image=64, classes=100, blocks=(3, 1), growth=growth)
    assert model.get_layer("block_0_2").output.shape == (None, 16, 16, channels)
    assert model.get_layer("transition_0").output.shape == (None, 8, 8, channels // 2)


def test_width_multiplier() -> None:
    with without_values():
        narrow = mobilenet.mobilenet_v3("small", alpha=0.5, classes=100, image=32)
    assert narrow.get_layer("expanded_conv_10_add").output.shape == (None, 1, 1, 48)
    assert narrow.output_shape == (None, 100)


def test_outputs_can_be_probabilities() -> None:
    with without_values():
        model = resnet.deep_resnet(50, image=32, classes=3, classifier_activation="softmax")
    assert model.layers[-1].activation is keras.activations.softmax


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(resnet.deep_resnet, 34), "depth is 34; there are 50, 101, 152 and 200"),
        (functools.partial(mobilenet.mobilenet_v3, "tall"), "variant is 'tall'; use one of large, small"),
        (functools.partial(mobilenet.mobilenet_v3, alpha=0), "alpha is 0 and dropout 0.2"),
        (functools.partial(densenet.densenet, blocks=()), r"blocks is \[\]; each group needs"),
        (functools.partial(densenet.densenet, image=7, blocks=(1, 1, 1, 1)), "image 7.*image 8, which 4 groups"),
        (functools.partial(nasnet.nasnet_mobile, image=31), "image 31"),
        (functools.partial(nasnet.nasnet, 1, 100, image=32, classes=2, stem=8, skip=True), "a multiple of 96"),
    ],
)
def test_sizes_that_cannot_be(make: Callable[[], keras.Model], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_vgg_19_for_small_images() -> None:
    with without_values():
        model = vgg.vgg_19(image=32, classes=10)
    assert (model.input_shape, model.output_shape) == ((None, 32, 32, 3), (None, 10))


# ---- groups and names


def grouped() -> keras.Model:
    def half(x: Any, scale: Any) -> Any:
        return keras.layers.Dense(2, name="inside")(keras.layers.Multiply(name="product")([x, scale]))

    x, scale = keras.Input((3,), name="x"), keras.Input((3,), name="scale")
    return keras.Model([x, scale], group("part", half, keras.layers.Dropout(0.5, name="drop")(x), scale))


def test_a_group_is_a_layer_that_computes_what_is_inside() -> None:
    model = grouped()
    assert [layer.name for layer in model.layers] == ["x", "drop", "scale", "part"]
    x, scale = np.random.default_rng(0).normal(size=(2, 4, 3)).astype("float32")
    kernel, bias = model.get_layer("part").get_weights()
    np.testing.assert_allclose(model.predict_on_batch([x, scale]), x * scale @ kernel + bias, rtol=1e-5)


def test_groups_are_saved(tmp_path: pathlib.Path) -> None:
    model = grouped()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    assert isinstance(again.get_layer("part"), Group)
    batch = [np.ones((2, 3), "float32")] * 2
    np.testing.assert_array_equal(again.predict_on_batch(batch), model.predict_on_batch(batch))


def test_names_are_counted_anew_and_then_on() -> None:
    before = keras.layers.ReLU().name
    with names_from_start():
        assert [keras.layers.ReLU().name for _ in range(2)] == ["re_lu", "re_lu_1"]
    number = int(before.rpartition("_")[2]) if before != "re_lu" else 0
    assert keras.layers.ReLU().name == f"re_lu_{number + 1}"
