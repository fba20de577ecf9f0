"""BERT (Devlin et al., 2019) as an ordinary Keras functional model.

The layers that a plan may cut after are named ``embedding``, ``layer_0`` to ``layer_{depth - 1}`` and those of the
head: ``transform`` and ``logits``, or ``pooler`` and ``logits``, or ``logits`` alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import keras

from dapple_tf.common.keras_private import names_from_start
from dapple_tf.models.sizes import check_heads, check_sizes, self_attention

_logger = logging.getLogger(__name__)

_EPSILON = 1e-12
_HIDDEN_LOGIT = -1e4
"""Finite in float16, and small enough for a probability of 0."""

HEADS_OF_MODELS = ("masked_tokens", "classes", "spans")
"""Tasks of a model: predict masked tokens, the class of a sequence, or where an answer starts and ends, as for
SQuAD.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Size and options of a BERT; by default BERT-48 of the DAPPLE paper (table 1: 640 million parameters).

    Attributes:
        depth: Number of encoder layers.
        width: Size of the hidden vectors; a multiple of ``heads``.
        heads: Attention heads per layer.
        inner: Size of the vectors inside the feed-forward part.
        vocabulary: Number of distinct tokens.
        sequence: Tokens per sample.
        positions: Rows of the table of positions; at least ``sequence``.
        dropout: Fraction dropped: of the embedding, of the attention weights and of what both halves of a layer add.
        head: One of `HEADS_OF_MODELS`.
        classes: Number of classes, for that head.
        tied: Whether logits of tokens use the embedding's matrix, as BERT does, rather than one of their own.
    """

    depth: int = 48
    width: int = 1024
    heads: int = 16
    inner: int = 4096
    vocabulary: int = 30522
    sequence: int = 512
    positions: int = 512
    dropout: float = 0.0
    head: str = "masked_tokens"
    classes: int = 2
    tied: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "depth", "width", "heads", "inner", "vocabulary", "sequence", "classes")
        check_heads(self.width, self.heads)
        if self.sequence > self.positions:
            raise ValueError(f"sequence is {self.sequence}, but there are only {self.positions} positions")
        if self.head not in HEADS_OF_MODELS:
            raise ValueError(f"head is {self.head!r}; use one of {', '.join(HEADS_OF_MODELS)}")

    @property
    def parameters(self) -> int:
        """Number of trainable parameters, without building the model."""
        dense = self.width * self.width + self.width
        layer = 4 * dense + 2 * self.width * self.inner + self.inner + self.width + 4 * self.width
        embedding = (self.vocabulary + self.positions + 2) * self.width + 2 * self.width
        if self.head == "classes":
            head = dense + self.width * self.classes + self.classes
        elif self.head == "spans":
            head = 2 * self.width + 2
        else:
            head = dense + 2 * self.width + self.vocabulary
            head += 0 if self.tied else self.vocabulary * self.width
        return embedding + self.depth * layer + head


BASE = BertConfig(depth=12, width=768, heads=12, inner=3072)
"""BERT-12, BERT-base of its authors: 110 million parameters."""

LARGE = BertConfig(depth=24)
"""BERT-24, BERT-large of its authors: 335 million parameters."""

TINY = BertConfig(depth=2, width=32, heads=2, inner=64, vocabulary=67, sequence=16, positions=16)
"""For tests: trains in seconds."""


def _normal() -> keras.initializers.Initializer:
    return keras.initializers.TruncatedNormal(stddev=0.02)


def _norm(name: str, dtype: Any = None) -> keras.layers.Layer:
    return keras.layers.LayerNormalization(epsilon=_EPSILON, name=name, dtype=dtype)


@keras.saving.register_keras_serializable(package="dapple_models")
class BertEmbedding(keras.layers.Layer):
    """Tokens, positions and segments to normalised vectors; with ``reverse=True`` vectors to products with tokens."""

    def __init__(self, vocabulary: int, positions: int, width: int, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary = vocabulary
        self.positions = positions
        self.width = width
        self.rate = dropout
        self.norm = _norm("norm", self.dtype_policy)
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, inputs_shape: Any, segments_shape: Any = None) -> None:
        """Makes the tables of tokens, positions and the two segments."""
        table = functools.partial(self.add_weight, initializer=_normal())
        self.token_table = table(name="tokens", shape=(self.vocabulary, self.width))
        self.position_table = table(name="positions", shape=(self.positions, self.width))
        self.segment_table = table(name="segments", shape=(2, self.width))
        self.norm.build((None, None, self.width))

    def call(self, inputs: Any, segments: Any = None, reverse: bool = False, training: bool | None = None) -> Any:
        """Tokens and segments [batch, sequence] -> [batch, sequence, width]; reverse: [..., width] -> [..., tokens]."""
        if reverse:
            return keras.ops.matmul(inputs, keras.ops.transpose(self.token_table))
        embedded = keras.ops.take(self.token_table, inputs, axis=0) + self.position_table[: inputs.shape[1]]
        embedded += keras.ops.take(self.segment_table, segments, axis=0)
        return self.dropout(self.norm(embedded), training=training)

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        own = {"vocabulary": self.vocabulary, "positions": self.positions, "width": self.width, "dropout": self.rate}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="dapple_models")
class EncoderLayer(keras.layers.Layer):
    """Post-LN transformer layer: ``x = norm(x + attention(x)); x = norm(x + feed_forward(x))``."""

    def __init__(self, heads: int, inner: int, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heads = heads
        self.inner = inner
        self.rate = dropout

    def build(self, inputs_shape: Any, present_shape: Any = None) -> None:
        """Makes and builds the sublayers for inputs [batch, sequence, width]."""
        width = check_heads(inputs_shape[-1], self.heads, self.name)
        layers = keras.layers
        dense = functools.partial(layers.Dense, kernel_initializer=_normal(), dtype=self.dtype_policy)
        self.attention = self_attention(self, width, self.heads, self.rate, _normal())
        self.attention_norm = _norm("attention_norm", self.dtype_policy)
        self.expand = dense(self.inner, name="expand")
        self.contract = dense(width, name="contract")
        self.output_norm = _norm("output_norm", self.dtype_policy)
        self.dropout = layers.Dropout(self.rate, name="dropout", dtype=self.dtype_policy)
        self.attention.build(inputs_shape, inputs_shape)
        self.attention_norm.build(inputs_shape)
        self.expand.build(inputs_shape)
        self.contract.build((*inputs_shape[:-1], self.inner))
        self.output_norm.build(inputs_shape)

    def call(self, inputs: Any, present: Any, training: bool | None = None) -> Any:
        """Vectors [batch, sequence, width] -> the same shape; ``present`` [batch, sequence] is 0 at padding."""
        mask = keras.ops.cast(present, "bool")[:, None, :]
        attended = self.attention(inputs, inputs, attention_mask=mask, training=training)
        middle = self.attention_norm(inputs + self.dropout(attended, training=training))
        hidden = keras.ops.gelu(self.expand(middle), approximate=True)
        return self.output_norm(middle + self.dropout(self.contract(hidden), training=training))

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        return {**super().get_config(), "heads": self.heads, "inner": self.inner, "dropout": self.rate}


@keras.saving.register_keras_serializable(package="dapple_models")
class Bias(keras.layers.Layer):
    """Adds a bias along the last axis."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes ``bias``, as long as the last axis."""
        self.bias = self.add_weight(name="bias", shape=input_shape[-1:], initializer="zeros")

    def call(self, inputs: Any) -> Any:
        """[..., n] -> [..., n]."""
        return inputs + self.bias


@keras.saving.register_keras_serializable(package="dapple_models")
class SpanLogits(keras.layers.Layer):
    """Where a span starts and where it ends: two logits for each position, and none for padding."""

    def build(self, inputs_shape: Any, present_shape: Any = None) -> None:
        """Makes and builds the projection for inputs [batch, sequence, width]."""
        self.ends = keras.layers.Dense(2, kernel_initializer=_normal(), name="ends", dtype=self.dtype_policy)
        self.ends.build(inputs_shape)

    def call(self, inputs: Any, present: Any) -> Any:
        """[batch, sequence, width], ``present`` [batch, sequence], 0 at padding -> [batch, 2, sequence]."""
        logits = keras.ops.transpose(self.ends(inputs), (0, 2, 1))
        hidden = keras.ops.cast(_HIDDEN_LOGIT, logits.dtype)
        return keras.ops.where(keras.ops.cast(present, "bool")[:, None, :], logits, hidden)


@names_from_start()
def build(config: BertConfig, name: str = "bert") -> keras.Model:
    """Builds a BERT.

    Returns:
        A model of ``{"tokens", "segments", "present"}``, all int32 [batch, sequence] (``present`` is 0 at padding):
        -> logits [batch, sequence, vocabulary], [batch, classes] or, of spans, [batch, 2, sequence].
    """
    tokens, segments, present = (
        keras.Input((config.sequence,), dtype="int32", name=key) for key in ("tokens", "segments", "present")
    )
    embedding = BertEmbedding(
        config.vocabulary, config.positions, config.width, dropout=config.dropout, name="embedding"
    )
    hidden = embedding(tokens, segments)
    for index in range(config.depth):
        hidden = EncoderLayer(config.heads, config.inner, config.dropout, name=f"layer_{index}")(hidden, present)
    dense = functools.partial(keras.layers.Dense, kernel_initializer=_normal())
    if config.head == "classes":
        pooled = dense(config.width, activation="tanh", name="pooler")(hidden[:, 0])
        logits = dense(config.classes, name="logits")(pooled)
    elif config.head == "spans":
        logits = SpanLogits(name="logits")(hidden, present)
    else:
        gelu = functools.partial(keras.activations.gelu, approximate=True)
        transformed = dense(config.width, activation="linear", name="transform")(hidden)
        transformed = _norm("transform_norm")(gelu(transformed))
        if config.tied:
            logits = Bias(name="logits")(embedding(transformed, reverse=True))
        else:
            logits = dense(config.vocabulary, name="logits")(transformed)
    model = keras.Model({"tokens": tokens, "segments": segments, "present": present}, logits, name=name)
    _logger.info("built %s: %d parameters", name, model.count_params())
    return model


def bert_12(**changes: Any) -> keras.Model:
    """Builds `BASE` (0.4 GB of float32 parameters), with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(BASE, **changes), name="bert_12")


def bert_24(**changes: Any) -> keras.Model:
    """Builds `LARGE` (1.3 GB of float32 parameters), with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(LARGE, **changes), name="bert_24")


def bert_48(**changes: Any) -> keras.Model:
    """Builds BERT-48 (2.6 GB of float32 parameters), with the fields of `BertConfig` in ``changes`` replaced."""
    return build(BertConfig(**changes), name="bert_48")


def bert_tiny(**changes: Any) -> keras.Model:
    """Builds `TINY`, with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(TINY, **changes), name="bert_tiny")


def bert_small(**changes: Any) -> keras.Model:
    """Builds 4 layers of width 256 for 128 tokens (16 MB of float32 parameters); fields in ``changes`` replaced."""
    small = BertConfig(depth=4, width=256, heads=4, inner=1024, vocabulary=4096, sequence=128, positions=128)
    return build(dataclasses.replace(small, **changes))
