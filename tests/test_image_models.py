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

from dapple_tf.models import amoebanet, densenet, mobilenet, nasnet, resnet, vgg
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


SIZES: dict[str, Callable[[], keras.Model]] = {
    "DenseNet (100, 12)": lambda: densenet.densenet(image=32, classes=10, blocks=(16, 16, 16), growth=12),
    **{
        f"AmoebaNet-D ({cells}, {filters})": functools.partial(amoebanet.amoebanet_d, cells, filters=filters)
        for cells, filters in ((18, 208), (18, 416), (18, 544), (36, 544))
    },
}


@pytest.mark.parametrize("name", [next(iter(SIZES)), *(thorough(name) for name in [*SIZES][1:])])
def test_other_published_sizes(name: str) -> None:
    with without_values():
        assert parameters(SIZES[name]()) == DOCUMENTED[name]
    assert DOCUMENTED.keys() == {*SIZES, *(source.name for source in FULL)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "layer", "shape"),
    [
        (SIZES["DenseNet (100, 12)"], "block_0_15", (32, 32, 24 + 16 * 12)),
        (
            lambda: densenet.densenet(image=64, classes=100, blocks=(3, 1), growth=24),
            "block_0_2",
            (16, 16, 120),
        ),
        (
            lambda: densenet.densenet(image=64, classes=100, blocks=(3, 1), growth=12),
            "transition_0",
            (8, 8, 30),
        ),
        (lambda: mobilenet.mobilenet_v3("small", alpha=0.5, classes=100, image=32), "expanded_conv_10_add", (1, 1, 48)),
        (lambda: vgg.vgg_19(image=32, classes=10), "predictions", (10,)),
    ],
)
def test_shapes_of_other_sizes(make: Callable[[], keras.Model], layer: str, shape: tuple[int, ...]) -> None:
    with without_values():
        model = make()
    assert model.get_layer(layer).output.shape == (None, *shape)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(resnet.deep_resnet, 34), "depth is 34; there are 50, 101, 152 and 200"),
        (functools.partial(mobilenet.mobilenet_v3, "tall"), "variant is 'tall'; use one of large, small"),
        (functools.partial(mobilenet.mobilenet_v3, alpha=0), "alpha is 0 and dropout 0.2"),
        (functools.partial(densenet.densenet, blocks=()), r"blocks is \[\]; each group needs"),
        (functools.partial(densenet.densenet, image=7, blocks=(1, 1, 1, 1)), "image 7.*image 8, which 4 groups"),
        (functools.partial(nasnet.nasnet_mobile, image=31), "image 31"),
        (functools.partial(amoebanet.amoebanet_d, cells=17), "cells is 17; must be a multiple of 3"),
        (functools.partial(amoebanet.amoebanet_d, filters=200), "filters 200.* a multiple of 16"),
        (functools.partial(amoebanet.amoebanet_d, image=2), "image 2"),
        (functools.partial(amoebanet.amoebanet_d, classes=0), "classes 0"),
        (functools.partial(nasnet.nasnet, 1, 100, image=32, classes=2, stem=8, skip=True), "a multiple of 96"),
    ],
)
def test_sizes_that_cannot_be(make: Callable[[], keras.Model], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- groups and names


def grouped() -> keras.Model:
    def half(x: Any, scale: Any) -> Any:
        return keras.layers.Dense(2, name="inside")(keras.layers.Multiply(name="product")([x, scale]))

    x, scale = keras.Input((3,), name="x"), keras.Input((3,), name="scale")
    return keras.Model([x, scale], group("part", half, keras.layers.Dropout(0.5, name="drop")(x), scale))


def test_a_group_is_a_layer_that_computes_what_is_inside_and_is_saved(tmp_path: pathlib.Path) -> None:
    model = grouped()
    assert [layer.name for layer in model.layers] == ["x", "drop", "scale", "part"]
    x, scale = np.random.default_rng(0).normal(size=(2, 4, 3)).astype("float32")
    kernel, bias = model.get_layer("part").get_weights()
    np.testing.assert_allclose(model.predict_on_batch([x, scale]), x * scale @ kernel + bias, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    assert isinstance(again.get_layer("part"), Group)
    np.testing.assert_array_equal(again.predict_on_batch([x, scale]), model.predict_on_batch([x, scale]))
