"""GNMT (Wu et al., 2016) as an ordinary Keras functional model: translation by LSTMs with attention.

GNMT-16 of the DAPPLE paper (table 1: 291 million parameters) is the model of MLPerf's training benchmark with 8 layers
in the encoder and 8 in the decoder; layers, their order and sizes are those of its published profile
(``gnmt-16`` in docs/profiles.md). The encoder's first layer reads in both directions. The output of the decoder's
first layer queries the attention, whose result is concatenated to the inputs of all other layers of the decoder. From
the third layer of each half on, layers add their input to their output. Token 0 is padding.

The layers that a plan may cut after are named ``source_embedding``, ``encoder_0`` to ``encoder_{depth - 1}``,
``target_embedding``, ``decoder_0`` (with the attention), to ``decoder_{depth - 1}`` and ``logits``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import keras

from dapple_tf.models.rnn import RecurrentLayer, lstm_parameters
from dapple_tf.models.sizes import check_sizes

_logger = logging.getLogger(__name__)

_HIDDEN_SCORE = {"float16": -3e4}
"""Score that makes a softmax's weight zero, where -1e9 isn't finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GnmtConfig:
    """Size and options of a GNMT; by default GNMT-16 of the DAPPLE paper (table 1: 291 million parameters).

    Attributes:
        vocabulary: Number of distinct tokens of each language; token 0 is padding.
        source: Tokens per sample of the source; the profile of the DAPPLE authors has 35 on average.
        target: Tokens per sample of the translation; 36 on average.
        depth: Layers of the encoder and of the decoder, each.
        width: Size of the hidden vectors.
        residual_from: First layer of each half that adds its input to its output, if both are equally wide.
        dropout: Fraction dropped of each layer's input.
    """

    vocabulary: int = 36560
    source: int = 35
    target: int = 36
    depth: int = 8
    width: int = 1024
    residual_from: int = 2
    dropout: float = 0.2

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "depth", least=2)
        check_sizes(self, "source", "target", "width", "residual_from")

    @property
    def parameters(self) -> int:
        """Number of trainable parameters, without building the model."""
        width = self.width
        narrow, wide = lstm_parameters(width, width), lstm_parameters(2 * width, width)
        encoder = 2 * narrow + wide + (self.depth - 2) * narrow
        attention = 2 * width * width + 2 * width + 1
        decoder = narrow + attention + (self.depth - 1) * wide
        embeddings = 2 * self.vocabulary * width
        return embeddings + encoder + decoder + (width + 1) * self.vocabulary


TINY = GnmtConfig(vocabulary=32, source=6, target=7, depth=2, width=16, residual_from=1, dropout=0.0)
"""For tests: trains in seconds."""


@keras.saving.register_keras_serializable(package="dapple_models")
class NormalizedBahdanauAttention(keras.layers.Layer):
    """Additive attention: weights are ``softmax(scale * v / |v| . tanh(q W + c U + bias))``, over unmasked positions.

    The normalised form of Bahdanau et al. (2015) that GNMT's public implementations use.
    """

    def __init__(self, width: int, **kwargs: Any) -> None:
        """Args: width: Size of the vectors in which queries and context are compared; kwargs: of any layer."""
        super().__init__(**kwargs)
        self.supports_masking = True
        self.width = width

    def build(self, queries_shape: Any, context_shape: Any) -> None:
        """Makes the two projections and the weights of their sum."""
        dense = functools.partial(keras.layers.Dense, self.width, use_bias=False, dtype=self.dtype_policy)
        self.query = dense(name="query")
        self.key = dense(name="key")
        self.query.build(queries_shape)
        self.key.build(context_shape)
        weight = functools.partial(self.add_weight, dtype=self.variable_dtype)
        self.vector = weight(
            name="vector", shape=(self.width,), initializer=keras.initializers.RandomUniform(-0.1, 0.1)
        )
        self.scale = weight(name="scale", shape=(), initializer=keras.initializers.Constant(self.width**-0.5))
        self.bias = weight(name="bias", shape=(self.width,), initializer="zeros")

    def call(self, queries: Any, context: Any, context_mask: Any = None) -> Any:
        """Queries [batch, n, a], context [batch, m, b] with a mask [batch, m] or none -> attended [batch, n, b]."""
        ops = keras.ops
        compared = ops.expand_dims(self.query(queries), 2) + ops.expand_dims(self.key(context), 1)
        weighing = self.scale * self.vector / ops.sqrt(ops.sum(ops.square(self.vector)))
        scores = ops.matmul(ops.tanh(compared + self.bias), ops.expand_dims(weighing, -1))[..., 0]
        if context_mask is not None:
            hidden = ops.cast(_HIDDEN_SCORE.get(self.compute_dtype, -1e9), scores.dtype)
            scores = ops.where(ops.expand_dims(context_mask, 1), scores, hidden)
        return ops.matmul(ops.softmax(scores, axis=-1), context)

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        return {**super().get_config(), "width": self.width}


@keras.saving.register_keras_serializable(package="dapple_models")
class AttendingLayer(keras.layers.Layer):
    """The decoder's first layer: an LSTM reads the translation so far, and queries the attention over the source."""

    def __init__(self, width: int, *, dropout: float = 0.0, **kwargs: Any) -> None:
        """Args: width: Units of LSTM and attention; dropout: of the LSTM's input; kwargs: of any layer."""
        super().__init__(**kwargs)
        self.supports_masking = True
        self.width = width
        self.rate = dropout
        self.recurrent = RecurrentLayer(width, dropout=dropout, name="recurrent", dtype=self.dtype_policy)
        self.attention = NormalizedBahdanauAttention(width, name="attention", dtype=self.dtype_policy)

    def build(self, input_shape: Any) -> None:
        """Builds both for a context [batch, m, b] and inputs [batch, n, a]."""
        context, inputs = input_shape
        self.recurrent.build(inputs)
        self.attention.build((*inputs[:-1], self.width), context)

    def call(self, inputs: Any, mask: Any = None, training: bool | None = None) -> Any:
        """Context [batch, m, b] and inputs [batch, n, a] -> the LSTM's [batch, n, width] and attended [batch, n, b].

        The context comes first, so that Keras orders the encoder's layers before the target's embedding.
        """
        context, inputs = inputs
        context_mask, inputs_mask = mask or (None, None)
        hidden = self.recurrent(inputs, mask=inputs_mask, training=training)
        return hidden, self.attention(hidden, context, context_mask=context_mask)

    def compute_mask(self, inputs: Any, mask: Any) -> Any:
        """Returns the inputs' mask for both results."""
        return mask if mask is None else (mask[1], mask[1])

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        return {**super().get_config(), "width": self.width, "dropout": self.rate}


def build(config: GnmtConfig, name: str = "gnmt") -> keras.Model:
    """Builds a GNMT.

    Returns:
        A model of ``{"source", "target"}``, int32 [batch, source] and [batch, target], padded with 0 at the end: the
        sentence to translate, and its translation shifted by one -> logits [batch, target, vocabulary] of the
        translation's tokens. They carry the target's mask, by which Keras leaves padding out of losses and metrics.
    """
    source = keras.Input((config.source,), dtype="int32", name="source")
    target = keras.Input((config.target,), dtype="int32", name="target")

    def embedded(tokens: Any, role: str) -> Any:
        return keras.layers.Embedding(config.vocabulary, config.width, mask_zero=True, name=f"{role}_embedding")(tokens)

    def layer(half: str, index: int, bidirectional: bool = False) -> RecurrentLayer:
        return RecurrentLayer(
            config.width,
            bidirectional=bidirectional,
            residual=index >= config.residual_from and not (half == "encoder" and index == 1),
            dropout=config.dropout,
            name=f"{half}_{index}",
        )

    encoded = embedded(source, "source")
    for index in range(config.depth):
        encoded = layer("encoder", index, bidirectional=index == 0)(encoded)
    attending = AttendingLayer(config.width, dropout=config.dropout, name="decoder_0")
    hidden, attended = attending([encoded, embedded(target, "target")])
    for index in range(1, config.depth):
        hidden = layer("decoder", index)(hidden, attended)
    logits = keras.layers.Dense(config.vocabulary, name="logits")(hidden)
    model = keras.Model({"source": source, "target": target}, logits, name=name)
    _logger.info("built %s: %d parameters", name, model.count_params())
    return model


def gnmt_16(**changes: Any) -> keras.Model:
    """Builds GNMT-16 (1.2 GB of float32 parameters), with the fields of `GnmtConfig` in ``changes`` replaced."""
    return build(GnmtConfig(**changes), name="gnmt_16")


def gnmt_tiny(**changes: Any) -> keras.Model:
    """Builds `TINY`, with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(TINY, **changes), name="gnmt_tiny")
