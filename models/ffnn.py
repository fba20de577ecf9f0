"""A feed-forward network of equal fully connected layers, as an ordinary Keras functional model.

FFNN-16 of the Out-Of-Order BackProp paper (section 8.4.1: "a simple feed forward neural network (FFNN) with 16
fully-connected layers"). The paper doesn't say how wide they are. Here each has 2048 units, so that a layer is large
enough to keep a device busy, and all are alike, as the paper's figure 12 assumes.

The layers that a plan may cut after are named ``layer_0`` to ``layer_{depth - 1}``; the last one gives the logits.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import keras

from dapple_tf.models.sizes import check_sizes

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FfnnConfig:
    """Size of a feed-forward network.

    Attributes:
        depth: Number of fully connected layers, including the one that returns the logits.
        features: Numbers per sample.
        width: Units of each layer but the last.
        classes: Units of the last layer.
    """

    depth: int = 16
    features: int = 2048
    width: int = 2048
    classes: int = 2048

    def __post_init__(self) -> None:
        check_sizes(self, "depth", "features", "width", "classes")

    @property
    def parameters(self) -> int:
        """Number of trainable parameters, without building the model."""
        sizes = [self.features, *[self.width] * (self.depth - 1), self.classes]
        return sum((taken + 1) * given for taken, given in itertools.pairwise(sizes))


TINY = FfnnConfig(depth=4, features=16, width=16, classes=4)
"""For tests: trains in seconds."""


def build(config: FfnnConfig, name: str = "ffnn") -> keras.Model:
    """Builds a feed-forward network: [batch, features] -> logits [batch, classes]; ReLU after each layer but the last.

    Weights are drawn as He et al. (2015) do for ReLU, so that 16 layers can be trained without normalisation.
    """
    features = keras.Input((config.features,), name="features")
    hidden = features
    for index in range(config.depth):
        last = index == config.depth - 1
        hidden = keras.layers.Dense(
            config.classes if last else config.width,
            activation=None if last else "relu",
            kernel_initializer="he_normal",
            name=f"layer_{index}",
        )(hidden)
    model = keras.Model(features, hidden, name=name)
    _logger.info("built %s: %d parameters", name, model.count_params())
    return model


def ffnn_16(**changes: Any) -> keras.Model:
    """Builds FFNN-16, with the fields of `FfnnConfig` in ``changes`` replaced."""
    return build(FfnnConfig(**changes), name="ffnn_16")


def ffnn_tiny(**changes: Any) -> keras.Model:
    """Builds `TINY`, with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(TINY, **changes), name="ffnn_tiny")
