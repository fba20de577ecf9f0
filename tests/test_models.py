"""The models of the registry: sizes as documented and published, cuts, data that fit, names, and pipelined training."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import use_float64
from keras.src.backend.common import global_state

import dapple_tf as dapple
from dapple_tf.describe.profile_text import load_text
from dapple_tf.models import amoebanet, catalogue, densenet, mobilenet, nasnet, registry, resnet
from dapple_tf.models.datasets import DATASETS, GENERATED, READERS
from dapple_tf.models.grouping import Group, group
from dapple_tf.models.registry import MODELS, find_data, find_model
from dapple_tf.models.sources import ModelError
from dapple_tf.tools.evaluation.training_comparison import compare_training
from dapple_tf.tools.evaluation.zoo_models import normalizes_batches

DOCS = pathlib.Path(__file__).parents[1] / "docs"
IMAGES = (DOCS / "models.md").read_text(encoding="utf-8").partition("\n## Images\n")[2].partition("\n## ")[0]
ROW = re.compile(
    r"^\| `?(?P<name>[^`|]+?)`? \| (?P<count>[\d,]+) \| ((?P<digits>[\d.]+)(?P<unit>M|Mi|B))? ?\|"
    r" ((?P<off>[+-][\d.]+)%)? ?\| [^|]*\|$",
    re.MULTILINE,
)
UNITS = {"M": 1e6, "Mi": 2**20, "B": 1e9}
DOCUMENTED = {row["name"]: int(row["count"].replace(",", "")) for row in ROW.finditer(IMAGES)}
TINY = [name for name in MODELS if name.endswith(":tiny")]


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within it, models of images are built without computing any parameter, and not compiled."""
    before = global_state.get_global_attribute("uninitialized_variables")
    global_state.set_global_attribute(
        "uninitialized_variables", []
    )  # Keras appends to it, and later makes their values.
    with pytest.MonkeyPatch.context() as patch, keras.StatelessScope(initialize_variables=False):
        patch.setattr(catalogue, "_compiled", lambda model: model)  # An optimizer has variables that need values.
        yield
    global_state.set_global_attribute("uninitialized_variables", before)


def parameters(model: keras.Model | keras.layers.Layer, kind: str = "") -> int:
    """Number of trainable parameters whose path ends so."""
    return sum(math.prod(each.shape) for each in model.trainable_variables if each.path.endswith(kind))


# ---- sizes of models of images


def test_documented_differences_follow_from_the_counts_and_are_below_two_percent_or_the_rounding() -> None:
    rows = [row for row in ROW.finditer(IMAGES) if row["digits"]]
    assert len(rows) == 20
    for row in rows:
        published = float(row["digits"]) * UNITS[row["unit"]]
        difference = int(row["count"].replace(",", "")) / published - 1
        assert float(row["off"]) == pytest.approx(100 * difference, abs=0.051), row["name"]
        places = len(row["digits"].partition(".")[2])
        assert abs(difference) * published < max(0.02 * published, 0.5 * 10**-places * UNITS[row["unit"]]), row["name"]


@pytest.mark.parametrize(
    ("name", "good_cuts", "across"),
    [
        ("vgg:19", r"block\d_pool|fc\d", 1),
        ("vgg:16", r"block\d_pool|fc\d", 1),
        ("inception", r"mixed\d+|avg_pool", 1),
        ("resnet:50", r"pool1_pool|conv\d_block\d+_out|avg_pool", 1),
        ("densenet:121", r"stem|block_\d_\d+|transition_\d|pool", 1),
        ("densenet:169", r"stem|block_\d_\d+|transition_\d|pool", 1),
        ("mobilenet:v3_large", r"expanded_conv_(\d+_)?add", 1),
        ("nasnet:mobile", r"cell_\d+|cell_stem_\d|reduction_cell_\d", 2),
        ("pnasnet", r"(stem|cell)_\d_concat", 2),
        ("amoebanet:18", r"cell_\d+|cell_stem_\d|reduction_cell_\d", 2),
    ],
)
def test_full_sizes_are_as_documented_and_few_tensors_cross_their_cuts(name: str, good_cuts: str, across: int) -> None:
    with without_values():
        model = find_model(name).build()
    assert parameters(model) == DOCUMENTED[name]
    assert model.output_shape == (None, 1000)
    assert getattr(model.layers[-1], "activation", keras.activations.linear) is keras.activations.linear
    cuts = [count for layer, count in _crossing(model).items() if re.fullmatch(good_cuts, layer)]
    assert len(cuts) > 5 and set(cuts[:-1]) == {across}


def _crossing(model: keras.Model) -> dict[str, int]:
    """By layer: how many tensors cross a cut after it."""
    read: dict[int, int] = {}
    made: dict[int, int] = {}
    for number, operation in enumerate(model.operations):
        for node in operation._inbound_nodes:
            read |= {id(tensor): max(read.get(id(tensor), 0), number) for tensor in node.input_tensors}
            made |= {id(tensor): number for tensor in node.output_tensors}
    return {
        operation.name: sum(made[tensor] <= number < read.get(tensor, -1) for tensor in made)
        for number, operation in enumerate(model.operations)
    }


DENSENET = functools.partial(densenet.densenet, image=32, classes=10, blocks=(16, 16, 16), growth=12)


@pytest.mark.parametrize(
    ("make", "layer", "shape"),
    [
        (DENSENET, "block_0_15", (32, 32, 24 + 16 * 12)),
        (lambda: densenet.densenet(image=64, blocks=(3, 1), growth=12), "transition_0", (8, 8, 30)),
        (lambda: mobilenet.mobilenet_v3("small", alpha=0.5, classes=100, image=32), "expanded_conv_10_add", (1, 1, 48)),
    ],
)
def test_layers_of_other_sizes_have_these_shapes(make: Any, layer: str, shape: tuple[int, ...]) -> None:
    with without_values():
        model = make()
    assert model.get_layer(layer).output.shape == (None, *shape)
    assert make is not DENSENET or parameters(model) == DOCUMENTED["DenseNet (100, 12)"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(resnet.deep_resnet, 34), "depth is 34; there are 50, 101, 152 and 200"),
        (functools.partial(mobilenet.mobilenet_v3, "tall"), "variant is 'tall'; use one of large, small"),
        (functools.partial(densenet.densenet, blocks=()), r"blocks is \[\]; each group needs"),
        (functools.partial(densenet.densenet, image=7, blocks=(1, 1, 1, 1)), "image 7.*image 8, which 4 groups"),
        (functools.partial(nasnet.nasnet, 1, 100, image=32, classes=2, stem=8, skip=True), "a multiple of 96"),
        (functools.partial(amoebanet.amoebanet_d, cells=17), "cells is 17; must be a multiple of 3"),
        (functools.partial(amoebanet.amoebanet_d, filters=200), "filters 200.* a multiple of 16"),
    ],
)
def test_impossible_sizes_are_refused(make: Callable[[], keras.Model], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- AmoebaNet-D


@pytest.fixture(scope="module")
def nine_cells() -> keras.Model:
    """Three of each size: two that differ in what they read, and one that is repeated."""
    with without_values():
        return amoebanet.amoebanet_d(9, classes=1001)


def test_cells_of_amoebanet_have_the_sizes_of_the_dapple_authors_profile(nine_cells: keras.Model) -> None:
    """Outputs, and the kernels of convolutions and classifier."""
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


NORMAL = ["1 1", "1 0", "0 0", "2 2", "1 5"], "0 3 4 6"
REDUCTION = ["0 0", "2 1", "2 2", "3 1", "2 3"], "4 5 6"


@pytest.mark.parametrize(("name", "wiring"), [("cell_0", NORMAL), ("cell_stem_0", REDUCTION)])
def test_states_of_a_cell_of_amoebanet(name: str, wiring: tuple[list[str], str]) -> None:
    with without_values():
        network = amoebanet.amoebanet_tiny().get_layer(name).network
    states = {f"{name}_{number}": str(number) for number in range(2, 7)}
    states |= {f"{name}_{number}_norm": str(number) for number in range(2)}

    def read(tensor: Any) -> str:
        """The state that an operation was done on; the first cell's only input is state 1 as it comes."""
        layer = tensor._keras_history.operation
        return "1" if isinstance(layer, keras.layers.InputLayer) else states.get(layer.name) or read(layer.input)

    pairs, given = wiring
    assert [" ".join(map(read, network.get_layer(f"{name}_{2 + number}").input)) for number in range(5)] == pairs
    assert " ".join(map(read, network.get_layer(f"{name}_states").input)) == given


@pytest.mark.parametrize("size", [4, 5])
def test_larger_inputs_of_a_cell_are_halved_from_even_and_odd_pixels(size: int) -> None:
    x, before = keras.Input((math.ceil(size / 2),) * 2 + (3,)), keras.Input((size, size, 1))
    model = keras.Model(before, amoebanet._fitted(before, x, 2, "fitted"))
    for layer in ("even", "odd"):
        model.get_layer(f"fitted_{layer}").set_weights([np.ones((1, 1, 1, 1))])
    images = np.random.default_rng(0).normal(size=(2, size, size, 1)).astype("float32")
    positive = np.pad(np.maximum(images, 0), ((0, 0), (0, 1), (0, 1), (0, 0)))
    expected = np.concatenate([positive[:, :size:2, :size:2], positive[:, 1::2, 1::2]], axis=-1)
    np.testing.assert_allclose(np.asarray(model(images)) * np.sqrt(1.001), expected, rtol=1e-5)


def test_a_group_is_a_layer_that_computes_its_inside_and_is_saved(tmp_path: pathlib.Path) -> None:
    def half(x: Any, scale: Any) -> Any:
        return keras.layers.Dense(2, name="inside")(keras.layers.Multiply(name="product")([x, scale]))

    inputs = keras.Input((3,), name="x"), keras.Input((3,), name="scale")
    model = keras.Model(inputs, group("part", half, keras.layers.Dropout(0.5, name="drop")(inputs[0]), inputs[1]))
    assert [layer.name for layer in model.layers] == ["x", "drop", "scale", "part"]
    x, scale = np.random.default_rng(0).normal(size=(2, 4, 3)).astype("float32")
    kernel, bias = model.get_layer("part").get_weights()
    result = np.asarray(model([x, scale]))
    np.testing.assert_allclose(result, x * scale @ kernel + bias, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    assert isinstance(again.get_layer("part"), Group)
    np.testing.assert_array_equal(again([x, scale]), result)


# ---- the registry


def test_every_family_but_inception_has_a_tiny_variant_and_all_data_are_described() -> None:
    assert {name.partition(":")[0] for name in MODELS} == {"inception", *(name.removesuffix(":tiny") for name in TINY)}
    assert all(source.name == name for name, source in (MODELS | DATASETS).items())
    assert all(source.data is DATASETS[source.data.name] for source in MODELS.values())
    document = (DOCS / "data.md").read_text(encoding="utf-8")
    assert [name for name in (*DATASETS, *READERS) if not re.search(f"`{name}[`:]", document)] == []


SAMPLES, SLICE = 16, 4
"""Two micro-batches of 8, of which each of two replicas gets 4."""


@pytest.mark.parametrize("name", {MODELS[name].data.name: name for name in TINY}.values())  # one of each data
def test_models_come_compiled_with_data_that_fit(name: str) -> None:
    model = find_model(name).build()
    x, y, weights = find_model(name).data.example(model, 3)
    assert model.optimizer is not None and (weights is None or weights.shape == y.shape)
    assert {len(array) for array in keras.tree.flatten((x, y))} == {3}
    outputs = model(x, training=False)
    assert 0 <= y.min() <= y.max() < outputs.shape[-1]
    assert 0 < float(model.compute_loss(y=tf.convert_to_tensor(y), y_pred=outputs)) < 20


@pytest.mark.parametrize("name", ["mobilenet:tiny", "gnmt:tiny"])
def test_models_train_in_two_stages_with_replicas_as_in_plain_keras(name: str) -> None:
    """Batch statistics, and loops; logs and all variables after two steps."""
    use_float64()
    source = find_model(name)
    models = [_built(source) for _ in range(2)]
    batches = _batches(source, models[0])
    comparison = compare_training(models.pop, _pipelined, batches)
    assert comparison.verdict == "equal", comparison


def _built(source: Any) -> keras.Model:
    """The model in the present float type, the same values each time, without dropout, whose draws are per slice."""
    keras.utils.set_random_seed(3)
    model = source.build()
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def _batches(source: Any, model: keras.Model) -> list[tuple[Any, Any, Any]]:
    """Two batches of the model's own data.

    With BatchNormalization each slice holds the same samples, each time in another order: all slices have the
    statistics of the whole batch then (docs/equivalence.md), and the result has to be that of plain Keras.
    """
    rng, order, drawn = np.random.default_rng(5), np.arange(SAMPLES), []
    whole = source.data.example(model, 2 * SAMPLES)
    for number in range(2):
        if normalizes_batches(model):
            order = np.concatenate([rng.permutation(SLICE) for _ in range(SAMPLES // SLICE)])
        chosen = number * SAMPLES + order
        drawn.append(keras.tree.map_structure(lambda array, at=chosen: None if array is None else array[at], whole))
    return drawn


def _pipelined(model: keras.Model) -> dapple.PipelinedModel:
    """Two stages with half of the parameters each, on two devices and one."""
    sizes = np.cumsum([layer.count_params() for layer in model.layers])
    middle = str(model.layers[int(np.searchsorted(sizes, sizes[-1] / 2))].name)
    plan = dapple.Plan.manual([middle], [[0, 1], [2]], 2, SAMPLES)
    return dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), plan)


@pytest.mark.parametrize("name", ["bert:tiny", "vgg:tiny"])
def test_data_are_endless_full_and_seeded(name: str) -> None:
    source = find_model(name)
    model = source.build()

    def first(seed: int) -> list[np.ndarray]:
        batches = itertools.islice(source.data.batches(model, 5, seed).as_numpy_iterator(), 9)
        return [np.concatenate([np.ravel(array) for array in keras.tree.flatten(batch)]) for batch in batches]

    one, same, other = first(0), first(0), first(1)
    assert len(one) == 9 and len({array.size for array in one}) == 1
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert not all((a == b).all() for a, b in zip(one, other, strict=True))
    assert source.data.batches(model, 4, 0).options().autotune.enabled is False  # no wait for a tuning thread


def test_generated_data_fit_any_model() -> None:
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2, 2), name="b")}
    joined = keras.layers.Concatenate()([inputs["a"], keras.layers.Flatten()(inputs["b"])])
    model = keras.Model(inputs, keras.layers.Dense(2)(joined))
    model.compile("sgd", "mse")
    x, y, _ = DATASETS["generated"].example(model, 4)
    assert {key: array.shape for key, array in x.items()} == {"a": (4, 3), "b": (4, 2, 2)}
    assert y.shape == (4, 2)


OWN = """
    import keras, numpy as np, tensorflow as tf

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="only")])
        model.compile("sgd", "mse")
        return model

    def nothing():
        return 3

    def plain():
        return keras.Sequential()

    def open_model():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    def arrays(batch_size):
        return np.arange(12.0).reshape(4, 3), np.zeros((4, 2))

    def batches(batch_size):
        return tf.data.Dataset.from_tensors((np.ones((batch_size, 3)), np.ones((batch_size, 2))))

    def empty(batch_size):
        return tf.data.Dataset.from_tensor_slices((np.ones((0, 1, 3)), np.ones((0, 1, 2))))

    def unequal(batch_size):
        return {"a": np.ones((4, 3)), "b": np.ones((5, 3))}, np.ones(4)
"""


@pytest.fixture
def _own_module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_own_module")
def test_a_users_own_model_and_data() -> None:
    source = find_model("own_models:build")
    model = source.build()
    assert [layer.name for layer in model.layers] == ["only"] and source.data is GENERATED
    for name, ones in (("arrays", False), ("batches", True)):
        data = find_model(f"own_models:build:{name}").data
        x, y, _ = data.example(model, 2)
        assert x.shape == (2, 3) and y.shape == (2, 2) and (x == 1).all() == ones
        assert len(list(itertools.islice(data.batches(model, 2, 0), 7))) == 7
        assert find_data(f"own_models:{name}").name == f"own_models:{name}"


def _fed(data: str, model: str) -> Callable[[], Any]:
    return lambda: find_data(data).example(find_model(model).build(), 2)


@pytest.mark.usefixtures("_own_module")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_model("gtp"), r"unknown model 'gtp'; did you mean 'gpt'\?; there are gpt, gpt:tiny"),
        (lambda: find_model("gpt:tinny"), r"unknown model 'gpt:tinny'; did you mean 'gpt:tiny"),
        (lambda: find_model("nothing"), r"unknown model 'nothing'; there are gpt"),
        (lambda: find_model("no_such_module:build"), "there is no module 'no_such_module'; it must be importable"),
        (lambda: find_model("tezt:book.txt"), r"there is no module 'tezt'; .* PYTHONPATH; did you mean 'text'\?"),
        (lambda: find_model("keras.no_such_part:build"), "there is no module 'keras.no_such_part'"),
        (lambda: find_model("keras:Modell"), r"module 'keras' has no function 'Modell'; did you mean 'Model'\?"),
        (lambda: find_model(":build"), "isn't a module's name"),
        (lambda: find_model("there/is/none.keras"), "there is no file there/is/none.keras"),
        (lambda: find_model(__file__).build(), "can't be loaded as a Keras model"),
        (lambda: find_data("pattern"), r"unknown data 'pattern'.* did you mean 'patterns'"),
        (_fed("source_text", "vgg:tiny"), r"for models that take one tensor of 2 axes.*\(None, 8, 8, 3\)"),
        (_fed("patterns", "gpt:tiny"), "'patterns' are for models that take one tensor of 4 axes"),
        (
            _fed("sentences", "gpt:tiny"),
            r"of tokens and segments and present .*, but 'gpt_tiny' takes tokens",
        ),
        (_fed("reversed_pairs", "gpt:tiny"), r"for models of source and target .*, but 'gpt_tiny' takes tokens"),
        (lambda: find_model("own_models:nothing").build(), "returned int; it must return a compiled keras.Model"),
        (lambda: find_model("own_models:plain").build(), "a model that isn't compiled: call compile"),
        (lambda: find_model("own_models:open_model").build(), "whose layers have no weights yet: begin it with"),
        (_fed("own_models:empty", "own_models:build"), r"empty' give no batch of 2 samples"),
        (_fed("own_models:unequal", "own_models:build"), "unequal numbers of samples: x 4 and 5, y 4; give as many"),
        (
            lambda: registry._own_data("mine", lambda batch_size: "text").example(keras.Model(), 2),
            r"gave str; it must give a tf\.data\.Dataset",
        ),
    ],
)
def test_mistakes_in_names_models_and_data_are_told(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        call()


def test_a_saved_model_is_loaded(tmp_path: pathlib.Path) -> None:
    saved = find_model("ffnn:tiny").build()
    saved.optimizer.build(saved.trainable_variables)
    saved.save(tmp_path / "model.keras")
    source = find_model(str(tmp_path / "model.keras"))
    loaded = source.build()
    assert not source.built_here and loaded.optimizer is not None
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in saved.layers]
