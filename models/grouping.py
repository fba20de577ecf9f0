"""Parts of a functional model as single layers: what a plan doesn't cut inside, and what is profiled as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def group(name: str, make: Callable[..., Any], *inputs: Any) -> Any:
    """Returns the output of a part of a model that is one layer of it.

    A cell of a hundred layers has a hundred cuts that no plan should choose, for many tensors cross them, but each of
    which would be profiled.

    Args:
        name: of the layer, by which plans cut after it. Layers inside need names of their own in the whole model: they
            name their variables.
        make: symbolic tensors like ``inputs`` -> the output, one tensor.
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
        network: the model, of a list of inputs and one output.
    """

    def __init__(self, network: keras.Model, **options: Any) -> None:
        super().__init__(**options)
        self.network = network

    def build(self, input_shape: Any) -> None:
        """Nothing: the model is built already."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """List of the inputs -> the output."""
        return self.network(inputs, training=training)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Returns the shape of the output."""
        return (input_shape[0][0], *self.network.output_shape[1:])

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal layer."""
        return {**super().get_config(), "network": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Group:
        """Returns the layer with such arguments."""
        return cls(keras.saving.deserialize_keras_object(config.pop("network")), **config)
