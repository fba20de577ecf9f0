"""Copies of a Keras model, made from its configuration, also in float64."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from dapple_tf.checkpoints.checkpoint import variables_of
from dapple_tf.common.keras_private import compile_arguments, layers_of
from dapple_tf.errors import reason

FLOATS = ("float16", "bfloat16", "float32", "float64")


def doubled(array: np.ndarray) -> np.ndarray:
    """Returns an array in float64 if it has floating-point numbers, else unchanged."""
    return array.astype("float64") if array.dtype.name in FLOATS else array  # Keras knows no dtype of strings.


def coarsest(model: keras.Model) -> str:
    """Returns the shortest floating-point type that a model's layers compute in or keep."""
    types = {layer.compute_dtype for layer in layers_of(model)}
    types |= {keras.backend.standardize_dtype(variable.dtype) for variable in model.trainable_variables}
    return next((name for name in ("bfloat16", "float16", "float32") if name in types), "float64")


def copy_of(model: keras.Model, *, float64: bool = False) -> keras.Model | str:
    """Returns a model of the same layers, optimizer, losses, metrics and values, or why there is none.

    It shares nothing with the model: it is made from the configuration (``get_config``), which the user's own layers
    and functions may lack.

    Args:
        model: a compiled model.
        float64: whether the copy keeps and computes everything in float64.
    """
    policy, floatx, drawn = keras.config.dtype_policy(), keras.config.floatx(), random.getstate()
    try:
        classes = _classes(model)
        config = keras.saving.serialize_keras_object(model)
        if config.get("compile_config"):  # Keras writes the optimizer within a loss scaling one, which float64 lacks.
            config["compile_config"]["optimizer"] = keras.saving.serialize_keras_object(model.optimizer)
        if float64:
            config = _in_float64(config)
            keras.config.set_floatx("float64")
            keras.config.set_dtype_policy("float64")
        twin = keras.saving.deserialize_keras_object(config, custom_objects=classes, safe_mode=False)
        _copy(model, twin)
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, ImportError) as error:
        return reason(error)
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
        random.setstate(drawn)  # Layers without a seed draw one.
    if float64 and coarsest(twin) != "float64":
        return f"a layer of it computes in {coarsest(twin)} whatever it is told"
    return twin


def _classes(model: keras.Model) -> dict[str, Any]:
    """Returns the classes and functions that a model's configuration names.

    Raises:
        ValueError: two of them have one name.
    """
    classes: dict[str, Any] = {}
    for item in [*layers_of(model), model.optimizer, *model.metrics, *compile_arguments(model)]:
        own = type(item) if hasattr(item, "get_config") and not isinstance(item, type) else item
        name = getattr(own, "__name__", type(own).__name__)
        if name == "<lambda>":
            raise ValueError("it is compiled with a lambda, of which a configuration keeps the code alone")
        if classes.setdefault(name, own) is not own:
            raise ValueError(f"two of its classes or functions are called {name!r}")
    return classes


def _in_float64(config: Any) -> Any:
    """Returns a configuration in which all floating-point types are float64."""
    if isinstance(config, Mapping):
        if config.get("class_name") in ("DTypePolicy", "QuantizedDTypePolicy", "FloatDTypePolicy"):
            return {**config, "class_name": "DTypePolicy", "config": {"name": "float64"}}
        return {
            key: "float64" if key == "dtype" and _is_float(value) else _in_float64(value)
            for key, value in config.items()
        }
    if isinstance(config, (list, tuple)):
        return type(config)(_in_float64(value) for value in config)
    return config


def _is_float(dtype: Any) -> bool:
    return isinstance(dtype, str) and (dtype in FLOATS or dtype.startswith("mixed_"))


def _copy(model: keras.Model, twin: keras.Model) -> None:
    """Copies a model's values to its twin, and computes what layers derive from them.

    Raises:
        ValueError: the twin has other variables, or isn't compiled.
    """
    if not twin.compiled or twin.optimizer is None:
        raise ValueError("it can't be compiled again from its configuration")
    if not twin.optimizer.built:
        twin.optimizer.build(twin.trainable_variables)
    own, other = variables_of(model), variables_of(twin)
    shapes = [{key: tuple(variable.shape) for key, variable in variables.items()} for variables in (own, other)]
    if shapes[0] != shapes[1]:
        raise ValueError("it has other variables when it is made again from its configuration")
    for key, variable in own.items():
        other[key].assign(np.asarray(variable.value))
    for own_layer, layer in zip(layers_of(model), layers_of(twin), strict=True):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()
        elif hasattr(layer, "load_assets"):  # vocabularies, which a configuration lacks
            with tempfile.TemporaryDirectory() as folder:
                own_layer.save_assets(folder)
                layer.load_assets(folder)
