"""Models by name, compiled and with data to train on, for programs that take ``--model``: this package's, or one's own.

    gpt, gpt:tiny, vgg:tiny, ...          the models in `MODELS`
    my_package.my_module:build            a user's function that returns a compiled Keras model
    my_package.my_module:build:batches    and one that gives its data: batch size -> tf.data.Dataset or arrays (x, y)
    trained/model.keras                   a file that Keras has saved

To add a model, add a `ModelSource` to `MODELS`; to add data, a `DataSource` to `DATASETS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.example_batch import ExampleBatch
from models import bert, gpt, resnet, text, vgg

_POOL_BATCHES = 4
"""Generated data are so many batches, which come again and again: losses fall, as they can be learnt by heart."""


class ModelError(ValueError):
    """There is no such model or data, or it isn't what it should be."""


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Data to train on.

    Attributes:
        name: by which it is asked for.
        about: what it is, in a line.
        batches: (model, batch size, seed) -> batches (x, y) or (x, y, sample weights). Full ones only, without end.
        held_out: (model, batch size) -> batches that training doesn't see; None if there are none.
    """

    name: str
    about: str
    batches: Callable[[keras.Model, int, int], tf.data.Dataset]
    held_out: Callable[[keras.Model, int], tf.data.Dataset] | None = None

    def example(self, model: keras.Model, samples: int) -> tuple[Any, Any, Any]:
        """A batch of so many samples as NumPy arrays: x, y and sample weights, each None if there are none.

        Raises:
            ModelError: there are no data.
        """
        for batch in self.batches(model, samples, 0).as_numpy_iterator():
            return keras.utils.unpack_x_y_sample_weight(batch)
        raise ModelError(f"the data {self.name!r} give no batch of {samples} samples")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model and its data.

    Attributes:
        name: by which it is asked for.
        about: what it is, in a line.
        build: makes the compiled model.
        data: what it is trained on unless other data are asked for.
        built_here: whether layers are made by ``build``, so that the global dtype policy holds for them.
    """

    name: str
    about: str
    build: Callable[[], keras.Model]
    data: DataSource
    built_here: bool = True


# ---- data


def _pooled(x: Any, y: Any, weights: Any, batch_size: int, seed: int) -> tf.data.Dataset:
    """Endless shuffled batches of arrays."""
    arrays = tuple(part for part in (x, y, weights) if part is not None)
    count = len(keras.tree.flatten(x)[0])
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    return dataset.shuffle(count, seed=seed).repeat().batch(batch_size, drop_remainder=True).prefetch(2)


def _generated(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    return _pooled(*ExampleBatch.of(model).trees(_POOL_BATCHES * batch_size), batch_size, seed)


def _source_text(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    return text.windows(text.standard_library().train, _sequence(model), batch_size, seed=seed, repeat=True)


def _held_out_text(model: keras.Model, batch_size: int) -> tf.data.Dataset:
    return text.windows(text.standard_library().held_out, _sequence(model), batch_size)


def _sequence(model: keras.Model) -> int:
    """Tokens per sample of a language model."""
    return _shapes("source_text", model, 2, 3)[0][1]


def _shapes(data: str, model: keras.Model, inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a model with one input and one output of so many axes, of which only the first is open.

    Raises:
        ModelError: it is another.
    """
    found = []
    for name, tensors, rank in (
        ("take", _tensors(model, "inputs"), inputs),
        ("give", _tensors(model, "outputs"), outputs),
    ):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(shapes) != 1 or len(shapes[0]) != rank or None in shapes[0][1:]:
            raise ModelError(
                f"the data {data!r} are for models that {name} one tensor of {rank} axes, of which only the batch is "
                f"open, but {model.name!r} has {shapes or 'no declared shapes'}; use other data"
            )
        found.append(shapes[0])
    return found[0], found[1]


def _tensors(model: keras.Model, which: str) -> Sequence[Any]:
    """``inputs`` or ``outputs``; none of a model that doesn't declare them."""
    return getattr(model, which, None) or ()


def _patterns(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Images of a pattern for each class, in noise."""
    images_shape, (_, classes) = _shapes("patterns", model, 4, 2)
    draw = np.random.default_rng(seed)
    patterns = draw.normal(size=(classes, *images_shape[1:])).astype("float32")
    labels = draw.integers(0, classes, _POOL_BATCHES * batch_size)
    images = patterns[labels] + draw.normal(size=(len(labels), *images_shape[1:])).astype("float32")
    return _pooled(images, labels.astype("int32"), None, batch_size, seed)


def _sentences(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Tokens of which some are padding; the labels are the tokens themselves, or the class of the first one."""
    inputs = {tensor.name: tensor for tensor in _tensors(model, "inputs")}
    if set(inputs) != {"tokens", "segments", "present"}:
        raise ModelError(
            f"the data 'sentences' are for bert, but {model.name!r} takes {', '.join(inputs) or 'nothing declared'}; "
            f"use other data"
        )
    draw = np.random.default_rng(seed)
    count, sequence = _POOL_BATCHES * batch_size, inputs["tokens"].shape[1]
    kinds = model.get_layer("embedding").vocabulary
    tokens = draw.integers(0, kinds, (count, sequence), dtype="int32")
    lengths = draw.integers(math.ceil(sequence / 2), sequence + 1, (count, 1))
    present = (np.arange(sequence) < lengths).astype("int32")
    x = {"tokens": tokens, "segments": np.zeros_like(tokens), "present": present}
    y = tokens if len(model.output_shape) == 3 else tokens[:, 0] % model.output_shape[-1]
    return _pooled(x, y, None, batch_size, seed)


GENERATED = DataSource(
    "generated", "random numbers that fit the model's inputs and loss, few enough to be learnt", _generated
)

_DATASETS = (
    GENERATED,
    DataSource("source_text", "bytes of Python's standard library, for language models", _source_text, _held_out_text),
    DataSource("patterns", "a pattern for each class, in noise, for models of images", _patterns),
    DataSource("sentences", "random tokens of several lengths, for bert", _sentences),
)

DATASETS: Mapping[str, DataSource] = {source.name: source for source in _DATASETS}
"""Data by name."""


# ---- models


def _compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer, *metrics: str) -> keras.Model:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=list(metrics))
    return model


def _language(make: Callable[..., keras.Model], **sizes: Any) -> Callable[[], keras.Model]:
    return lambda: _compiled(make(**sizes), keras.optimizers.Adam(1e-3))


def _vision(make: Callable[..., keras.Model], **sizes: Any) -> Callable[[], keras.Model]:
    return lambda: _compiled(make(**sizes), keras.optimizers.SGD(0.01, momentum=0.9), "accuracy")


_TEXT, _IMAGES, _SENTENCES = DATASETS["source_text"], DATASETS["patterns"], DATASETS["sentences"]

_SMALL_BERT = bert.BertConfig(depth=4, width=256, heads=4, inner=1024, vocabulary=4096, sequence=128, positions=128)
_VGG_TINY = {"image": 8, "width": 4, "groups": (1, 1), "dense": 16}
_RESNET_TINY = {"image": 8, "width": 4, "blocks": (1, 1)}
_VGG_19 = {"image": 224, "classes": 1000, "width": 64, "groups": (2, 2, 4, 4, 4), "dense": 4096}

_MODELS = (
    ModelSource("gpt", "byte-level GPT: 4 blocks, width 128, 128 bytes per sample", _language(gpt.gpt), _TEXT),
    ModelSource("gpt:tiny", "2 blocks, width 32, 32 bytes per sample", _language(gpt.gpt_tiny), _TEXT),
    ModelSource("gpt:medium", "GPT-2 medium: 355 million parameters", _language(gpt.gpt_medium), _TEXT),
    ModelSource("bert", "BERT: 4 layers, width 256", _language(bert.build, config=_SMALL_BERT), _SENTENCES),
    ModelSource("bert:tiny", "2 layers, width 32", _language(bert.bert_tiny), _SENTENCES),
    ModelSource("bert:48", "BERT-48 of the DAPPLE paper: 640 million parameters", _language(bert.bert_48), _SENTENCES),
    ModelSource("vgg", "VGG for images of 32 x 32", _vision(vgg.vgg), _IMAGES),
    ModelSource("vgg:tiny", "for images of 8 x 8", _vision(vgg.vgg, **_VGG_TINY), _IMAGES),
    ModelSource("vgg:19", "VGG-19: 144 million parameters", _vision(vgg.vgg, **_VGG_19), _IMAGES),
    ModelSource("resnet", "ResNet of 10 blocks for images of 32 x 32", _vision(resnet.resnet), _IMAGES),
    ModelSource("resnet:tiny", "2 blocks, images of 8 x 8", _vision(resnet.resnet, **_RESNET_TINY), _IMAGES),
)

MODELS: Mapping[str, ModelSource] = {source.name: source for source in _MODELS}
"""Models by name; ``family:variant``, the family alone for its usual size."""


# ---- by name


def find_model(name: str) -> ModelSource:
    """The model that a name, ``module:function``, ``module:function:function`` or a file stands for; nothing is built.

    Raises:
        ModelError: saying which models there are, or what is wrong with the module or file.
    """
    if name in MODELS:
        return MODELS[name]
    if name.endswith((".keras", ".h5")) or pathlib.Path(name).is_file():
        return _saved(pathlib.Path(name))
    module, _, functions = name.partition(":")
    if functions and module not in {known.partition(":")[0] for known in MODELS}:
        build, _, batches = functions.partition(":")
        maker = _function(module, build, name)
        data = GENERATED if not batches else _own_data(f"{module}:{batches}", _function(module, batches, name))
        return ModelSource(name, f"{module}.{build}()", lambda: _checked(maker(), f"{module}.{build}()"), data)
    raise ModelError(
        f"unknown model {name!r}{_like(name, MODELS)}; there are {', '.join(MODELS)}, package.module:function for a "
        f"function that returns a compiled model, and files *.keras"
    )


def find_data(name: str) -> DataSource:
    """The data that a name or ``module:function`` stands for.

    Raises:
        ModelError: saying which data there are, or what is wrong with the module.
    """
    if name in DATASETS:
        return DATASETS[name]
    module, _, function = name.partition(":")
    if not function:
        raise ModelError(
            f"unknown data {name!r}{_like(name, DATASETS)}; there are {', '.join(DATASETS)}, and "
            f"package.module:function for a function of the batch size that gives a tf.data.Dataset of batches, or "
            f"arrays (x, y)"
        )
    return _own_data(name, _function(module, function, name))


def _like(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=2)
    return f" (is it {' or '.join(close)}?)" if close else ""


def _function(module: str, function: str, name: str) -> Callable[..., Any]:
    """A user's function."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # The module is there, but lacks another.
        raise ModelError(
            f"{name!r}{_like(name, {**MODELS, **DATASETS})}: there is no module {error.name!r}; it must be importable, "
            f"from the current folder or PYTHONPATH"
        ) from error
    except (TypeError, ValueError) as error:  # A relative or empty name.
        raise ModelError(f"{name!r}: {module!r} isn't a module's name; write package.module:function") from error
    made = getattr(found, function, None)
    if not callable(made):
        functions = {key: value for key, value in vars(found).items() if callable(value) and not key.startswith("_")}
        raise ModelError(f"{name!r}: module {module!r} has no function {function!r}{_like(function, functions)}")
    return made


def _checked(model: object, origin: str) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ModelError(f"{origin} returned {type(model).__name__}; it must return a compiled keras.Model")
    if not model.compiled:
        raise ModelError(f"{origin} returned a model that isn't compiled: call compile(optimizer=..., loss=...) on it")
    return model


def _saved(path: pathlib.Path) -> ModelSource:
    """A model from a file."""
    if not path.is_file():
        raise ModelError(f"there is no file {path}")

    def build() -> keras.Model:
        try:
            model = keras.saving.load_model(path, safe_mode=True)
        except (ValueError, TypeError, OSError, KeyError) as error:
            raise ModelError(f"{path} can't be loaded as a Keras model: {error}") from error
        return _checked(model, str(path))

    return ModelSource(str(path), "a saved Keras model", build, GENERATED, built_here=False)


def _own_data(name: str, function: Callable[..., Any]) -> DataSource:
    """A user's data: what the function gives is repeated without end."""

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        given = function(batch_size)
        if isinstance(given, tuple):
            x, y, weights = keras.utils.unpack_x_y_sample_weight(given)
            return _pooled(x, y, weights, batch_size, seed)
        if not isinstance(given, tf.data.Dataset):
            raise ModelError(
                f"{name} gave {type(given).__name__}; it must give a tf.data.Dataset of batches, or a tuple of arrays "
                f"(x, y)"
            )
        return given.repeat()

    return DataSource(name, "a user's own", batches)
