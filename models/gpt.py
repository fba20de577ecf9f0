"""GPT (Radford et al., 2019) as an ordinary Keras functional model.

The layers that a plan may cut after are named ``embedding``, ``block_0`` to ``block_{depth - 1}``, ``final_norm`` and
``logits``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dapple_tf.models.sizes import check_heads, check_sizes, self_attention

_logger = logging.getLogger(__name__)

_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Size and options of a GPT.

    Attributes:
        vocabulary: Number of distinct tokens.
        sequence: Tokens per sample; inputs are ``[batch, sequence]``.
        depth: Number of transformer blocks.
        width: Size of the residual stream; a multiple of ``heads``.
        heads: Attention heads per block.
        dropout: Fraction dropped: of the embedding, of the attention weights and of what both halves of a block add.
        tied: Whether the logits use the token embedding's matrix, as GPT-2 does, rather than one of their own.
    """

    vocabulary: int = 256
    sequence: int = 128
    depth: int = 4
    width: int = 128
    heads: int = 4
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "sequence", "depth", "width", "heads")
        check_heads(self.width, self.heads)

    @property
    def parameters(self) -> int:
        """Number of trainable parameters, without building the model."""
        block = 12 * self.width**2 + 13 * self.width
        embeddings = (self.vocabulary * (1 if self.tied else 2) + self.sequence) * self.width
        return embeddings + self.depth * block + 2 * self.width


TINY = GptConfig(sequence=32, depth=2, width=32, heads=2)
"""For tests: trains in seconds."""

MEDIUM = GptConfig(vocabulary=50257, sequence=1024, depth=24, width=1024, heads=16, dropout=0.1, tied=True)
"""GPT-2 medium: 355 million parameters."""


def _normal() -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=0.02)


@keras.saving.register_keras_serializable(package="dapple_models")
class TokenEmbedding(keras.layers.Layer):
    """Tokens to vectors with learned positions; with ``reverse=True`` vectors to logits, by the same matrix."""

    def __init__(self, vocabulary: int, sequence: int, width: int, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary = vocabulary
        self.sequence = sequence
        self.width = width
        self.rate = dropout
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes ``tokens`` [vocabulary, width] and ``positions`` [sequence, width]."""
        self.tokens = self.add_weight(name="tokens", shape=(self.vocabulary, self.width), initializer=_normal())
        self.positions = self.add_weight(name="positions", shape=(self.sequence, self.width), initializer=_normal())

    def call(self, inputs: Any, reverse: bool = False, training: bool | None = None) -> Any:
        """Tokens [batch, sequence] -> [batch, sequence, width]; reverse: [..., width] -> [..., vocabulary]."""
        if reverse:
            return keras.ops.matmul(inputs, keras.ops.transpose(self.tokens))
        embedded = keras.ops.take(self.tokens, inputs, axis=0) + self.positions
        return self.dropout(embedded, training=training)

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        own = {"vocabulary": self.vocabulary, "sequence": self.sequence, "width": self.width, "dropout": self.rate}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="dapple_models")
class Block(keras.layers.Layer):
    """Pre-LN transformer block: ``x += attention(norm(x)); x += mlp(norm(x))`` on [batch, sequence, width]."""

    def __init__(self, heads: int, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heads = heads
        self.rate = dropout

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes and builds the sublayers for inputs [batch, sequence, width]."""
        width = check_heads(input_shape[-1], self.heads, self.name)
        layers = keras.layers
        norm = functools.partial(layers.LayerNormalization, epsilon=_EPSILON, dtype=self.dtype_policy)
        dense = functools.partial(layers.Dense, kernel_initializer=_normal(), dtype=self.dtype_policy)
        self.attention_norm = norm(name="attention_norm")
        self.attention = self_attention(self, width, self.heads, self.rate, _normal())
        self.mlp_norm = norm(name="mlp_norm")
        self.expand = dense(4 * width, name="expand")
        self.contract = dense(width, name="contract")
        self.dropout = layers.Dropout(self.rate, name="dropout", dtype=self.dtype_policy)
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.mlp_norm.build(input_shape)
        self.expand.build(input_shape)
        self.contract.build((*input_shape[:-1], 4 * width))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """[batch, sequence, width] -> the same shape; position i sees positions 0 to i."""
        normed = self.attention_norm(inputs)
        attended = self.attention(normed, normed, use_causal_mask=True, training=training)
        middle = inputs + self.dropout(attended, training=training)
        hidden = keras.ops.gelu(self.expand(self.mlp_norm(middle)), approximate=True)
        return middle + self.dropout(self.contract(hidden), training=training)

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        return {**super().get_config(), "heads": self.heads, "dropout": self.rate}


def build(config: GptConfig, name: str = "gpt") -> keras.Model:
    """Builds a GPT: int32 tokens [batch, sequence] -> logits [batch, sequence, vocabulary]."""
    embedding = TokenEmbedding(
        config.vocabulary, config.sequence, config.width, dropout=config.dropout, name="embedding"
    )
    tokens = keras.Input((config.sequence,), dtype="int32", name="tokens")
    hidden = embedding(tokens)
    for index in range(config.depth):
        hidden = Block(config.heads, dropout=config.dropout, name=f"block_{index}")(hidden)
    hidden = keras.layers.LayerNormalization(epsilon=_EPSILON, name="final_norm")(hidden)
    if config.tied:
        logits = keras.layers.Activation("linear", name="logits")(embedding(hidden, reverse=True))
    else:
        dense = keras.layers.Dense(config.vocabulary, use_bias=False, kernel_initializer=_normal(), name="logits")
        logits = dense(hidden)
    model = keras.Model(tokens, logits, name=name)
    _logger.info("built %s: %d parameters", name, model.count_params())
    return model


def gpt(
    vocabulary: int = 256,
    sequence: int = 128,
    depth: int = 4,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.0,
    tied: bool = False,
) -> keras.Model:
    """Builds a GPT of the given size (see `GptConfig`): int32 [batch, sequence] -> [batch, sequence, vocabulary]."""
    return build(
        GptConfig(
            vocabulary=vocabulary,
            sequence=sequence,
            depth=depth,
            width=width,
            heads=heads,
            dropout=dropout,
            tied=tied,
        )
    )


def gpt_tiny(**changes: Any) -> keras.Model:
    """Builds `TINY`, with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(TINY, **changes), name="gpt_tiny")


def gpt_medium(**changes: Any) -> keras.Model:
    """Builds `MEDIUM` (1.4 GB of float32 parameters), with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(MEDIUM, **changes), name="gpt_medium")


def sample(
    model: keras.Model,
    prompt: bytes,
    count: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> bytes:
    """Continues ``prompt`` by ``count`` bytes, drawn one at a time from a byte-level model.

    Args:
        model: int32 [1, sequence] -> logits [1, sequence, 256].
        prompt: At least one byte; only its last ``sequence`` bytes are seen.
        count: Bytes to draw.
        temperature: Divides the logits; 0 always takes the likeliest byte.
        seed: Seed of the draws.

    Raises:
        ValueError: Empty prompt or negative temperature.
    """
    if not prompt or temperature < 0:
        raise ValueError(f"need a prompt and temperature >= 0; got {prompt!r} and {temperature}")
    generator = np.random.default_rng(seed)
    sequence = int(model.input_shape[1])
    predict = tf.function(lambda tokens: model(tokens, training=False))
    text = bytearray(prompt)
    for _ in range(count):
        seen = text[-sequence:]
        # Attention is causal: tokens after the last seen byte don't matter.
        tokens = np.zeros((1, sequence), np.int32)
        tokens[0, : len(seen)] = list(seen)
        text.append(_draw(predict(tokens).numpy()[0, len(seen) - 1], temperature, generator))
    return bytes(text[len(prompt) :])


def _draw(logits: NDArray[np.float32], temperature: float, generator: np.random.Generator) -> int:
    """Draws an index by ``softmax(logits / temperature)``; logits: [vocabulary]."""
    if temperature == 0:
        return int(np.argmax(logits))
    # The largest of logits plus Gumbel noise is distributed as the softmax, and nothing can overflow.
    return int(np.argmax(logits / temperature + generator.gumbel(size=logits.shape)))
