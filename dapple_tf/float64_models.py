"""Rebuilding a Keras model in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from dapple_tf.checkpoints.checkpoint import variables_of
from dapple_tf.errors import reason
from dapple_tf.keras_private import compiled_loss, compiled_metrics, layers_of
from dapple_tf.verification import coarsest

FLOATS = ("float16", "bfloat16", "float32", "float64")


def doubled(array: np.ndarray) -> np.ndarray:
    """Returns an array in float64 if it has floating-point numbers, else unchanged."""
    return array.astype("float64") if array.dtype.name in FLOATS else array  # Keras knows no dtype of strings.


def in_float64(model: keras.Model) -> keras.Model | str:
    """Returns a model of the same layers, optimizer, losses and values in float64, or why there is none.

    It is made from the model's configuration (``get_config``), which the user's own layers and functions may lack.
    """
    own = [*layers_of(model), *layers_of(model, include_self=False), model.optimizer]
    losses = keras.tree.flatten(model.loss) if compiled_loss(model) is not None else []
    own += [item for item in losses if item is not None and not isinstance(item, str)]
    own += model.metrics if compiled_metrics(model) is None else [*model.metrics, *compiled_metrics(model).metrics]
    classes = {name: item for item in own for name, item in [_named(item)]}
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    try:
        config = _in_float64(keras.saving.serialize_keras_object(model))
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        twin = keras.saving.deserialize_keras_object(config, custom_objects=classes, safe_mode=False)
        _copy(model, twin)
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, ImportError) as error:
        return reason(error)
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
    return twin if coarsest(twin) == "float64" else f"a layer of it computes in {coarsest(twin)} whatever it is told"


def _named(item: Any) -> tuple[str, Any]:
    if isinstance(item, type) or not hasattr(item, "get_config"):
        return getattr(item, "__name__", type(item).__name__), item
    return type(item).__name__, type(item)


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
    """Copies the values of a model to its twin.

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
        other[key].assign(doubled(np.asarray(variable.value)))
