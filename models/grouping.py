"""Parts of a functional model as single layers, which plans don't cut and profiles measure as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def group(name: str, make: Callable[..., Any], *inputs: Any) -> Any:
    """Builds a part of a model as one layer, and returns its output.

    A cell of a hundred layers has a hundred cuts that no plan should choose, since many tensors cross them, but each of
    which would be profiled.

    Args:
        name: name of the layer, for cuts after it. Layers inside need names that are unique in the whole model, which
            name their variables.
        make: function from symbolic tensors like ``inputs`` to the output, one tensor.
        inputs: symbolic tensors.
    """
    own = [
        keras.Input(tensor.shape[1:], dtype=tensor.dtype, name=f"{name}_input_{number}")
        for number, tensor in enumerate(inputs)
    ]
    return Group(keras.Model(own, make(*own), name=f"{name}_network"), name=name)(list(inputs))


@keras.saving.register_keras_serializable(package="dapple_models")
class Group(keras.layers.Layer):
    """A functional model as a layer.

    Args:
        network: model with a list of inputs and one output.
    """

    def __init__(self, network: keras.Model, **options: Any) -> None:
        super().__init__(**options)
        self.network = network

    def build(self, input_shape: Any) -> None:
        """Does nothing: the model is already built."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """List of the inputs -> the output."""
        return self.network(inputs, training=training)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Returns the shape of the output."""
        return (input_shape[0][0], *self.network.output_shape[1:])

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        return {**super().get_config(), "network": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Group:
        """Builds the layer from its configuration."""
        return cls(keras.saving.deserialize_keras_object(config.pop("network")), **config)
