"""Models by name, compiled and with data to train on, for programs with ``--model``: this package's, or your own.

    gpt, gpt:tiny, vgg:tiny, ...          the models in `MODELS`
    my_package.my_module:build            a user's function that returns a compiled Keras model
    my_package.my_module:build:batches    and one that returns its data: batch size -> tf.data.Dataset or arrays (x, y)
    trained/model.keras                   a file saved by Keras

To add a model, add a `ModelSource` to `models.catalogue`; to add data, a `DataSource` to
`models.datasets`.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dapple_tf.errors import meant
from dapple_tf.models.catalogue import IMAGE_MODELS, SEQUENCE_MODELS
from dapple_tf.models.datasets import DATASETS, GENERATED, READERS
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import DataSource, ModelError, ModelSource, later

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

MODELS: Mapping[str, ModelSource] = {source.name: source for source in (*SEQUENCE_MODELS, *IMAGE_MODELS)}
"""Models by name; ``family:variant``, or the family alone for its usual size."""


def find_model(name: str) -> ModelSource:
    """Returns the model of a name, ``module:function``, ``module:function:function`` or file, without building it.

    Raises:
        ModelError: it can't be found; the text lists the models, or says what is wrong with the module or file.
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
        f"unknown model {name!r}{meant(name, MODELS)}; there are {', '.join(MODELS)}, package.module:function for a "
        f"function that returns a compiled model, and files *.keras"
    )


def find_data(name: str) -> DataSource:
    """Returns the data of a name, ``reader:path?option=value`` (see `READERS`) or ``module:function``.

    Raises:
        ModelError: it can't be found; the text lists the data, or says what is wrong with files, options or module.
    """
    if name in DATASETS:
        return DATASETS[name]
    module, _, function = name.partition(":")
    if (kind := module.partition("?")[0]) in READERS:
        return READERS[kind].open(Request.parse(name))
    if not function:
        raise ModelError(
            f"unknown data {name!r}{meant(name, {**DATASETS, **READERS})}; there are {', '.join(DATASETS)}, files "
            f"that are read by {', '.join(READERS)}, such as {next(iter(READERS))}:PATH, and "
            f"package.module:function for a function of the batch size that gives a tf.data.Dataset of batches, or "
            f"arrays (x, y)"
        )
    return _own_data(name, _function(module, function, name))


def user_module(name: str) -> types.ModuleType:
    """Imports a user's module, which may be in the current folder.

    Raises:
        ImportError: there is no such module, or it lacks another.
        TypeError: the name is a relative one.
        ValueError: the name is empty.
    """
    if "" not in sys.path and (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # ``python -m`` adds the folder, a console command doesn't.
    return importlib.import_module(name)


def _function(module: str, function: str, name: str) -> Callable[..., Any]:
    """Returns a user's function."""
    try:
        imported = user_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # The module is there, but lacks another.
        raise ModelError(
            f"{name!r}: there is no module {error.name!r}; it must be importable, from the current folder or "
            f"PYTHONPATH{meant(name, {**MODELS, **DATASETS}) or meant(module, READERS)}"
        ) from error
    except (TypeError, ValueError) as error:  # A relative or empty name.
        raise ModelError(f"{name!r}: {module!r} isn't a module's name; write package.module:function") from error
    made = getattr(imported, function, None)
    if not callable(made):
        functions = [key for key, value in vars(imported).items() if callable(value) and not key.startswith("_")]
        raise ModelError(f"{name!r}: module {module!r} has no function {function!r}{meant(function, functions)}")
    return made


def _checked(model: object, origin: str) -> keras.Model:
    import keras

    if not isinstance(model, keras.Model):
        raise ModelError(f"{origin} returned {type(model).__name__}; it must return a compiled keras.Model")
    if not model.compiled:
        raise ModelError(f"{origin} returned a model that isn't compiled: call compile(optimizer=..., loss=...) on it")
    if not model.built:
        raise ModelError(
            f"{origin} returned a model whose layers have no weights yet: begin it with keras.Input(shape), or call "
            f"build(input_shape) on it"
        )
    return model


def _saved(path: pathlib.Path) -> ModelSource:
    """Returns a model from a file."""
    if not path.is_file():
        raise ModelError(f"there is no file {path}")

    def build() -> keras.Model:
        import keras

        try:
            model = keras.saving.load_model(path, safe_mode=True)
        except (ValueError, TypeError, OSError, KeyError) as error:
            raise ModelError(f"{path} can't be loaded as a Keras model: {error}") from error
        return _checked(model, str(path))

    return ModelSource(str(path), "a saved Keras model", build, GENERATED, built_here=False)


def _own_data(name: str, function: Callable[..., Any]) -> DataSource:
    """Returns a user's data, repeated without end."""

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        import keras
        import tensorflow as tf

        given = function(batch_size)
        if isinstance(given, tuple):
            x, y, weights = keras.utils.unpack_x_y_sample_weight(given)
            _check_lengths(name, {"x": x, "y": y, "sample weights": weights})
            return later("generated_data.pooled")(x, y, weights, batch_size, seed)
        if not isinstance(given, tf.data.Dataset):
            raise ModelError(
                f"{name} gave {type(given).__name__}; it must give a tf.data.Dataset of batches, or a tuple of arrays "
                f"(x, y)"
            )
        return given.repeat()

    return DataSource(name, "a user's own", batches)


def _check_lengths(name: str, parts: Mapping[str, Any]) -> None:
    """Checks that arrays have the same number of samples."""
    import keras

    counts = {
        part: {int(np.shape(array)[0]) if np.ndim(array) else 0 for array in keras.tree.flatten(tree)}
        for part, tree in parts.items()
        if tree is not None
    }
    if len(set().union(*counts.values())) > 1:
        had = ", ".join(f"{part} {' and '.join(map(str, sorted(sizes)))}" for part, sizes in counts.items())
        raise ModelError(f"{name} gave arrays of unequal numbers of samples: {had}; give as many of each")
