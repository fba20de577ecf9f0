"""Models and data by name: this package's, a user's own, and what is said of those that there aren't."""

from __future__ import annotations

import functools
import itertools
import pathlib
import textwrap
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.models import registry, text
from dapple_tf.models.datasets import DATASETS, GENERATED, READERS
from dapple_tf.models.registry import MODELS, find_data, find_model
from dapple_tf.models.sources import ModelError, ModelSource


@pytest.fixture(scope="module", autouse=True)
def _text_read_once() -> Iterator[None]:
    """The standard library's 10 MB, which take a second to read: test_text_data.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "standard_library", functools.cache(text.standard_library))
        yield


TINY = [name for name in MODELS if name.endswith(":tiny")]


def test_every_family_has_a_tiny_variant() -> None:
    assert {name.partition(":")[0] for name in MODELS} == {name.removesuffix(":tiny") for name in TINY}
    assert all(source.name == name for name, source in (MODELS | DATASETS).items())
    assert all(source.data is DATASETS[source.data.name] for source in MODELS.values())


def test_all_data_are_described() -> None:
    document = (pathlib.Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    for name in (*DATASETS, *READERS):
        assert f"`{name}`" in document or f"`{name}:" in document, name


@pytest.mark.slow
@pytest.mark.parametrize("name", {MODELS[name].data.name: name for name in TINY}.values())  # one of each data
def test_models_come_compiled_with_data_that_fit(name: str) -> None:
    source = find_model(name)
    model = source.build()
    assert model.optimizer is not None
    x, y, weights = source.data.example(model, 3)
    assert weights is None or weights.shape == y.shape
    outputs = model(x, training=False)
    assert {len(array) for array in keras.tree.flatten((x, y))} == {3}
    loss = model.compute_loss(y=tf.convert_to_tensor(y), y_pred=outputs)
    assert 0 < float(loss) < 20
    assert 0 <= y.min() <= y.max() < outputs.shape[-1]


@pytest.mark.parametrize("name", ["bert:tiny", "vgg:tiny"])  # Windows of text have tests of their own.
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


@pytest.mark.slow
def test_no_iterator_of_generated_data_waits_for_a_tuning_thread() -> None:
    model = find_model("gpt:tiny").build()
    for data in (GENERATED, DATASETS["source_text"]):
        assert data.batches(model, 4, 0).options().autotune.enabled is False


def test_generated_data_fit_any_model() -> None:
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2, 2), name="b")}
    joined = keras.layers.Concatenate()([inputs["a"], keras.layers.Flatten()(inputs["b"])])
    model = keras.Model(inputs, keras.layers.Dense(2)(joined))
    model.compile("sgd", "mse")
    x, y, _ = DATASETS["generated"].example(model, 4)
    assert {key: array.shape for key, array in x.items()} == {"a": (4, 3), "b": (4, 2, 2)}
    assert y.shape == (4, 2)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ("source_text", "vgg:tiny", r"'source_text' are for models that take one tensor of 2 axes.*\(None, 8, 8, 3\)"),
        ("patterns", "gpt:tiny", "'patterns' are for models that take one tensor of 4 axes"),
        ("sentences", "gpt:tiny", "'sentences' are for bert and xlnet, but 'gpt_tiny' takes tokens; use other data"),
    ],
)
def test_data_for_other_models_are_refused(data: str, model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_data(data).example(find_model(model).build(), 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gtp", r"unknown model 'gtp'; did you mean 'gpt'\?; there are gpt, gpt:tiny"),
        ("gpt:tinny", r"unknown model 'gpt:tinny'; did you mean 'gpt:tiny"),
        ("nothing", r"unknown model 'nothing'; there are gpt"),
        ("no_such_module:build", "there is no module 'no_such_module'; it must be importable"),
        ("tezt:book.txt", r"there is no module 'tezt'; .* PYTHONPATH; did you mean 'text'\?"),
        ("keras.no_such_part:build", "there is no module 'keras.no_such_part'"),
        ("keras:Modell", r"module 'keras' has no function 'Modell'; did you mean 'Model'\?"),
        (":build", "isn't a module's name"),
        ("there/is/none.keras", "there is no file there/is/none.keras"),
    ],
)
def test_unknown_models_and_data_are_told(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_model(name)
    with pytest.raises(ModelError, match=r"unknown data 'pattern'.* did you mean 'patterns'"):
        find_data("pattern")


OWN = """
    import keras, numpy as np, tensorflow as tf

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="only")])
        model.compile("sgd", "mse")
        return model

    def nothing():
        return 3

    def arrays(batch_size):
        return np.arange(12.0).reshape(4, 3), np.zeros((4, 2))

    def batches(batch_size):
        return tf.data.Dataset.from_tensors((np.ones((batch_size, 3)), np.ones((batch_size, 2))))

    def empty(batch_size):
        return tf.data.Dataset.from_tensor_slices((np.ones((0, 1, 3)), np.ones((0, 1, 2))))
"""


@pytest.fixture
def own_module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_models_for_tests.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    return "own_models_for_tests"


def test_a_users_own_model_and_data(own_module: str) -> None:
    source = find_model(f"{own_module}:build")
    model = source.build()
    assert [layer.name for layer in model.layers] == ["only"]
    assert source.data is GENERATED
    for name, ones in (("arrays", False), ("batches", True)):
        data = find_model(f"{own_module}:build:{name}").data
        x, y, _ = data.example(model, 2)
        assert x.shape == (2, 3) and y.shape == (2, 2)
        assert (x == 1).all() == ones
        assert len(list(itertools.islice(data.batches(model, 2, 0), 7))) == 7
        assert find_data(f"{own_module}:{name}").name == f"{own_module}:{name}"


def test_a_users_mistakes_are_told(own_module: str) -> None:
    with pytest.raises(ModelError, match=r"nothing\(\) returned int; it must return a compiled keras.Model"):
        find_model(f"{own_module}:nothing").build()
    model = find_model(f"{own_module}:build").build()
    plain = ModelSource("plain", "", lambda: registry._checked(keras.Sequential(), "plain()"), GENERATED)
    with pytest.raises(ModelError, match=r"plain\(\) returned a model that isn't compiled: call compile"):
        plain.build()
    open_model = keras.Sequential([keras.layers.Dense(2)])
    open_model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"open\(\) returned a model whose layers have no weights yet: begin it with"):
        registry._checked(open_model, "open()")
    unequal = registry._own_data("mine", lambda batch_size: ({"a": np.ones((4, 3)), "b": np.ones((5, 3))}, np.ones(4)))
    with pytest.raises(ModelError, match=r"mine gave arrays of unequal numbers of samples: x 4 and 5, y 4; give as"):
        unequal.example(model, 2)
    with pytest.raises(ModelError, match=r"gave Sequential; it must give a tf\.data\.Dataset"):
        registry._own_data("mine", lambda batch_size: model).example(model, 2)
    with pytest.raises(ModelError, match=r"empty' give no batch of 2 samples"):
        find_data(f"{own_module}:empty").example(model, 2)


@pytest.mark.slow
def test_a_saved_model_is_loaded(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.keras"
    saved = find_model("gpt:tiny").build()
    saved.optimizer.build(saved.trainable_variables)
    saved.save(path)
    source = find_model(str(path))
    assert not source.built_here
    loaded = source.build()
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in saved.layers]
    assert loaded.optimizer is not None
    path.write_bytes(b"this is none")
    with pytest.raises(ModelError, match=r"model.keras can't be loaded as a Keras model"):
        source.build()
