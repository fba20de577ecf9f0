"""Which of Keras' own layers are equal but for the values of their variables."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Container, Hashable, Iterable
from typing import Any

import keras
import numpy as np

from dapple_tf.common.keras_private import attributes_of_calls, is_cast

_NAMES = """
Activation AdditiveAttention AlphaDropout Attention BatchNormalization Conv1D Conv1DTranspose Conv2D Conv2DTranspose
Conv3D Conv3DTranspose Dense DepthwiseConv1D DepthwiseConv2D Dropout EinsumDense ELU GaussianDropout GaussianNoise
GroupNormalization GroupQueryAttention LayerNormalization LeakyReLU MultiHeadAttention PReLU ReLU RMSNormalization
SeparableConv1D SeparableConv2D Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D UnitNormalization
"""
_CLASSES = frozenset(getattr(keras.layers, name) for name in _NAMES.split() if hasattr(keras.layers, name))
"""Layers whose calls follow from their attributes, variables and arguments, and run nobody else's code."""
_NOT_CALLED = {
    "_initializer": keras.Initializer,
    "_regularizer": keras.Regularizer,
    "_constraint": keras.constraints.Constraint,
}
"""End of an attribute's name -> objects that calls don't use; elsewhere, as activations say, they do."""
_SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes, np.dtype})


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What a call of a layer depends on besides its arguments and the values of variables.

    Attributes:
        key: equal for layers that compute the same.
        variables: the layer's variables; counterparts have the same place in all layers of a kind.
        layers: the layers inside it, in the same way.
    """

    key: Hashable
    variables: tuple[keras.Variable, ...]
    layers: tuple[keras.Layer, ...]


class _UnknownError(Exception):
    """An attribute that may be anything, such as a function of the user's."""


def layer_kind(layer: Any, replaced: Container[int]) -> LayerKind | None:
    """Returns a layer's kind; None unless it is one of Keras' own and has nothing of the user's in it.

    Args:
        layer: a layer, or an operation of a functional model.
        replaced: ids of layers whose ``call`` the user has replaced.
    """
    if type(layer) not in _CLASSES:
        return None
    description = _Description(replaced)
    try:
        key = description.of_layer(layer)
    except _UnknownError:
        return None
    return LayerKind(key, tuple(description.variables), tuple(description.layers[1:]))


class _Description:
    """What describes a layer: attributes by value; variables and layers by the order in which they are met."""

    def __init__(self, replaced: Container[int]) -> None:
        self.replaced = replaced
        self.variables: list[keras.Variable] = []
        self.layers: list[Any] = []

    def of_layer(self, layer: Any) -> Hashable:
        for number, other in enumerate(self.layers):
            if other is layer:
                return "layer", number
        cls = type(layer)
        if cls not in _CLASSES or id(layer) in self.replaced or not _is_of_keras(cls.call):
            raise _UnknownError
        # Keras adds the regularizer's loss where the layer is called: for a layer inside, inside the call.
        if self.layers and layer.activity_regularizer is not None:
            raise _UnknownError
        self.layers.append(layer)
        return cls, tuple((name, self._of_attribute(name, value)) for name, value in attributes_of_calls(layer))

    def _of_attribute(self, name: str, value: Any) -> Hashable:
        for end, base in _NOT_CALLED.items():
            if name.endswith(end) and isinstance(value, base):
                return end
        return self.of(value)

    def of(self, value: Any) -> Hashable:
        """Describes an attribute's value.

        Raises:
            _UnknownError: it is of a type that isn't known here.
        """
        if type(value) in _SIMPLE:
            return type(value), repr(value)  # which tells 0.0 and -0.0 apart
        if type(value) is keras.Variable:
            return self._of_variable(value)
        if isinstance(value, keras.Layer):
            return self.of_layer(value)
        if type(value) is keras.random.SeedGenerator:
            return self.of(value.state)
        if type(value) is keras.DTypePolicy:
            return value.compute_dtype, value.variable_dtype
        if isinstance(value, list | tuple):
            return self._of_all(value)
        if isinstance(value, dict):
            return tuple(value), self._of_all(value.values())
        if isinstance(value, types.FunctionType) and _is_of_keras(value) and value.__closure__ is None:
            return value
        raise _UnknownError

    def _of_all(self, values: Iterable[Any]) -> Hashable:
        return tuple(map(self.of, values))

    def _of_variable(self, variable: keras.Variable) -> Hashable:
        for number, other in enumerate(self.variables):
            if other is variable:
                return "variable", number
        self.variables.append(variable)
        return tuple(variable.shape), variable.dtype, variable.trainable, is_cast(variable)


def _is_of_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.src.")
