"""XLNet (Yang et al., 2019) as an ordinary Keras functional model, with one stream or two.

XLNet-36 of the DAPPLE paper (table 1: 500M parameters, which are 500 x 2^20) is XLNet-large with 36 layers instead of
24. Attention is that of Transformer-XL (Dai et al., 2019): scores depend on the distance of two positions, and on
whether they are in the same segment, rather than on the positions themselves.

The layers that a plan may cut after are named ``embedding``, ``layer_0`` to ``layer_{depth - 1}`` and ``logits``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import keras

from dapple_tf.models.bert import Bias, SpanLogits
from dapple_tf.models.sizes import check_heads, check_sizes

_logger = logging.getLogger(__name__)

_EPSILON = 1e-12
_HIDDEN_SCORE = {"float16": -3e4}
"""Score that makes a softmax's weight zero, where -1e9 isn't finite."""


HEADS_OF_MODELS = ("tokens", "spans")
"""Tasks of a model: predict tokens, or find where an answer starts and ends, as for SQuAD."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlnetConfig:
    """Size and options of an XLNet; by default XLNet-36 of the DAPPLE paper (table 1: 500M parameters).

    Attributes:
        depth: Number of layers.
        width: Size of the hidden vectors; a multiple of ``heads``, and even.
        heads: Attention heads per layer.
        inner: Size of the vectors inside the feed-forward part.
        vocabulary: Number of distinct tokens.
        sequence: Tokens per sample.
        dropout: Fraction dropped: of the embedding, of the attention weights and of what both halves of a layer add.
        two_streams: Whether there is a query stream besides the content stream, which predicts tokens without seeing
            them, in the order of a permutation, as in XLNet's pretraining.
        head: One of `HEADS_OF_MODELS`; with two streams ``tokens``.
    """

    depth: int = 36
    width: int = 1024
    heads: int = 16
    inner: int = 4096
    vocabulary: int = 32000
    sequence: int = 512
    dropout: float = 0.0
    two_streams: bool = False
    head: str = "tokens"

    def __post_init__(self) -> None:
        check_sizes(self, "depth", "width", "heads", "inner", "vocabulary", "sequence")
        check_heads(self.width, self.heads)
        if self.width % 2:
            raise ValueError(
                f"width {self.width} is odd; half of a relative position's numbers are sines, half cosines"
            )
        if self.head not in HEADS_OF_MODELS:
            raise ValueError(f"head is {self.head!r}; use one of {', '.join(HEADS_OF_MODELS)}")
        if self.two_streams and self.head != "tokens":
            raise ValueError(f"head is {self.head!r}, but the second stream is there to predict tokens; use one stream")

    @property
    def parameters(self) -> int:
        """Number of trainable parameters, without building the model."""
        width, inner = self.width, self.inner
        attention = 5 * width * width + 3 * width + 2 * width
        layer = attention + 2 * width * inner + inner + width + 4 * width
        head = self.vocabulary if self.head == "tokens" else 2 * width + 2
        return self.vocabulary * width + (width if self.two_streams else 0) + self.depth * layer + head


TINY = XlnetConfig(depth=2, width=32, heads=2, inner=64, vocabulary=67, sequence=16)
"""For tests: trains in seconds."""


def _normal() -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=0.02)


def relative_positions(sequence: int, width: int, dtype: str = "float32") -> Any:
    """Returns sines and cosines of the distances sequence, sequence - 1, ..., 1 - sequence: [2 sequence, width].

    Distances are from the attending position to the attended one, positive to the left. As in Transformer-XL's
    section 3.3, the first half of each row are sines, the second cosines. They are computed when the model runs: in
    each layer's graph they would be as large as a weight matrix.
    """
    exact = "float64" if dtype == "float64" else "float32"
    distances = keras.ops.arange(sequence, -sequence, -1, dtype=exact)
    rates = keras.ops.power(10000.0, -keras.ops.arange(0, width, 2, dtype=exact) / width)
    angles = distances[:, None] * rates
    return keras.ops.cast(keras.ops.concatenate([keras.ops.sin(angles), keras.ops.cos(angles)], axis=-1), dtype)


def relative_shift(scores: Any) -> Any:
    """Converts scores by distance to scores by position: [..., n, 2 n] -> [..., n, n].

    ``given[i, k]`` is the score of position i for distance n - k; ``result[i, j] = given[i, n - i + j]``, that for
    distance i - j. Rows are shifted against each other by reshaping them into rows that are one number shorter
    (Transformer-XL, appendix B).
    """
    *outer, rows, columns = scores.shape
    lead = [-1 if size is None else size for size in outer]
    shifted = keras.ops.reshape(scores, (*lead, columns, rows))[..., 1:, :]
    return keras.ops.reshape(shifted, (*lead, rows, columns - 1))[..., :rows]


@keras.saving.register_keras_serializable(package="dapple_models")
class XlnetEmbedding(keras.layers.Layer):
    """Tokens to vectors; with ``reverse=True`` vectors to products with tokens.

    With two streams it returns a pair: the tokens' vectors, and for each position the same learned vector, with which
    the query stream begins.
    """

    def __init__(
        self, vocabulary: int, width: int, *, dropout: float = 0.0, two_streams: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.vocabulary = vocabulary
        self.width = width
        self.rate = dropout
        self.two_streams = two_streams
        self.dropout = keras.layers.Dropout(dropout, name="dropout", dtype=self.dtype_policy)

    def build(self, inputs_shape: Any) -> None:
        """Makes the table of tokens, and the query stream's first vector."""
        self.tokens = self.add_weight(name="tokens", shape=(self.vocabulary, self.width), initializer=_normal())
        if self.two_streams:
            self.first_query = self.add_weight(name="first_query", shape=(self.width,), initializer=_normal())

    def call(self, inputs: Any, reverse: bool = False, training: bool | None = None) -> Any:
        """Tokens [batch, sequence] -> [batch, sequence, width], or a pair; reverse: [..., width] -> [..., tokens]."""
        if reverse:
            return keras.ops.matmul(inputs, keras.ops.transpose(self.tokens))
        content = keras.ops.take(self.tokens, inputs, axis=0)
        if not self.two_streams:
            return self.dropout(content, training=training)
        # Has the content's shape, but none of its values.
        query = keras.ops.zeros_like(content) + self.first_query
        return self.dropout(content, training=training), self.dropout(query, training=training)

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        own = {"vocabulary": self.vocabulary, "width": self.width, "dropout": self.rate}
        return {**super().get_config(), **own, "two_streams": self.two_streams}


@keras.saving.register_keras_serializable(package="dapple_models")
class RelativeAttention(keras.layers.Layer):
    """Multi-head attention with relative positions and segments (XLNet's section 2.3 to 2.5).

    The score of position i for position j is the sum of ``(q_i + r_w) k_j`` (content), ``(q_i + r_r) r_{i - j}``
    (distance) and ``(q_i + r_s) s`` with one of two vectors s, for the same segment and for others; divided by the
    root of a head's size. Positions that see nothing get zeros.
    """

    def __init__(self, heads: int, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heads = heads
        self.rate = dropout

    def build(self, inputs_shape: Any) -> None:
        """Makes the projections for inputs [batch, sequence, width]."""
        width = inputs_shape[-1]
        self.size = width // self.heads
        dense = functools.partial(
            keras.layers.Dense, width, use_bias=False, kernel_initializer=_normal(), dtype=self.dtype_policy
        )
        self.projections = {part: dense(name=part) for part in ("query", "key", "value", "distance", "output")}
        for projection in self.projections.values():
            projection.build((None, None, width))
        weight = functools.partial(self.add_weight, initializer=_normal())
        self.content_bias = weight(name="r_w_bias", shape=(self.heads, self.size))
        self.distance_bias = weight(name="r_r_bias", shape=(self.heads, self.size))
        self.segment_bias = weight(name="r_s_bias", shape=(self.heads, self.size))
        self.segments = weight(name="segments", shape=(2, self.heads, self.size))
        self.dropout = keras.layers.Dropout(self.rate, name="dropout", dtype=self.dtype_policy)

    def call(self, inputs: Any, content: Any, other_segment: Any, visible: Any, training: bool | None = None) -> Any:
        """Attends.

        Args:
            inputs: [batch, sequence, width], source of the queries.
            content: [batch, sequence, width], source of the keys and values.
            other_segment: [batch, sequence, sequence], whether two positions are in different segments.
            visible: [batch, 1 or sequence, sequence], whether the first may see the second.
            training: whether dropout is active.

        Returns:
            [batch, sequence, width].
        """
        ops = keras.ops
        sequence, width = inputs.shape[1:]
        query = self._in_heads("query", inputs)
        positions = relative_positions(sequence, width, self.compute_dtype)
        distances = self._in_heads("distance", positions[None])[0]
        by_content = ops.einsum("bind,bjnd->bnij", query + self.content_bias, self._in_heads("key", content))
        by_distance = relative_shift(ops.einsum("bind,knd->bnik", query + self.distance_bias, distances))
        by_segment = ops.einsum("bind,snd->bnis", query + self.segment_bias, self.segments)
        by_segment = ops.where(other_segment[:, None], by_segment[..., 1:], by_segment[..., :1])
        scores = (by_content + by_distance + by_segment) * self.size**-0.5
        visible = visible[:, None]
        hidden = ops.cast(_HIDDEN_SCORE.get(self.compute_dtype, -1e9), scores.dtype)
        weights = ops.softmax(ops.where(visible, scores, hidden), axis=-1)
        # If nothing is visible, softmax would show everything.
        weights = self.dropout(weights * ops.cast(visible, weights.dtype), training=training)
        attended = ops.einsum("bnij,bjnd->bind", weights, self._in_heads("value", content))
        return self.projections["output"](ops.reshape(attended, (-1, sequence, width)))

    def _in_heads(self, part: str, vectors: Any) -> Any:
        """Returns a projection of vectors [batch, n, width] as [batch, n, heads, size]."""
        projected = self.projections[part](vectors)
        return keras.ops.reshape(projected, (-1, vectors.shape[1], self.heads, self.size))

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        return {**super().get_config(), "heads": self.heads, "dropout": self.rate}


@keras.saving.register_keras_serializable(package="dapple_models")
class XlnetLayer(keras.layers.Layer):
    """Post-LN transformer layer with relative attention, for the content stream alone or for both streams.

    Both streams use the same parameters and the content's keys and values. A content vector knows its own token, a
    query vector only those before it in the permutation (XLNet's section 2.3).
    """

    def __init__(self, heads: int, inner: int, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heads = heads
        self.inner = inner
        self.rate = dropout

    def build(
        self,
        content_shape: Any,
        segments_shape: Any = None,
        present_shape: Any = None,
        query_shape: Any = None,
        permutation_shape: Any = None,
    ) -> None:
        """Makes and builds the sublayers for content [batch, sequence, width]."""
        width = check_heads(content_shape[-1], self.heads, self.name)
        layers = keras.layers
        own = {"dtype": self.dtype_policy}
        dense = functools.partial(layers.Dense, kernel_initializer=_normal(), **own)
        self.attention = RelativeAttention(self.heads, self.rate, name="attention", **own)
        self.attention_norm = layers.LayerNormalization(epsilon=_EPSILON, name="attention_norm", **own)
        self.expand = dense(self.inner, name="expand")
        self.contract = dense(width, name="contract")
        self.output_norm = layers.LayerNormalization(epsilon=_EPSILON, name="output_norm", **own)
        self.dropout = layers.Dropout(self.rate, name="dropout", **own)
        for layer in (self.attention, self.attention_norm, self.expand, self.output_norm):
            layer.build(content_shape)
        self.contract.build((*content_shape[:-1], self.inner))

    def call(
        self,
        content: Any,
        segments: Any,
        present: Any,
        query: Any = None,
        permutation: Any = None,
        training: bool | None = None,
    ) -> Any:
        """Runs one layer of one stream or two.

        Args:
            content: [batch, sequence, width].
            segments: [batch, sequence], the segment of each token.
            present: [batch, sequence], 0 at padding.
            query: [batch, sequence, width] of the query stream; None for one stream, where all positions see all.
            permutation: [batch, sequence], the place of each position in the order in which tokens are predicted; a
                position sees those of lower places, and its content those of its own place too.
            training: whether dropout is active.

        Returns:
            The new content, or a pair of the new content and the new query.
        """
        other_segment = segments[:, :, None] != segments[:, None, :]
        shown = keras.ops.cast(present, "bool")[:, None, :]
        if query is None:
            return self._stream(content, content, other_segment, shown, training)
        mine, others = permutation[:, :, None], permutation[:, None, :]
        return (
            self._stream(content, content, other_segment, keras.ops.logical_and(shown, others <= mine), training),
            self._stream(query, content, other_segment, keras.ops.logical_and(shown, others < mine), training),
        )

    def _stream(self, inputs: Any, content: Any, other_segment: Any, visible: Any, training: bool | None) -> Any:
        attended = self.attention(inputs, content, other_segment, visible, training=training)
        middle = self.attention_norm(inputs + self.dropout(attended, training=training))
        hidden = self.dropout(keras.ops.gelu(self.expand(middle), approximate=True), training=training)
        return self.output_norm(middle + self.dropout(self.contract(hidden), training=training))

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        return {**super().get_config(), "heads": self.heads, "inner": self.inner, "dropout": self.rate}


def build(config: XlnetConfig, name: str = "xlnet") -> keras.Model:
    """Builds an XLNet.

    Returns:
        A model of ``{"tokens", "segments", "present"}``, all int32 [batch, sequence] (``present`` is 0 at padding) ->
        logits [batch, sequence, vocabulary] or, of spans, [batch, 2, sequence]. With two streams it also takes
        ``"permutation"``, int32 [batch, sequence] (see `XlnetLayer.call`), and the logits are those of the query
        stream: that of a position doesn't know its own token. Tokens that aren't predicted share place
        0; sample weights leave them out of the loss.
    """
    keys = ("tokens", "segments", "present", *(("permutation",) if config.two_streams else ()))
    inputs = {key: keras.Input((config.sequence,), dtype="int32", name=key) for key in keys}
    segments, present = inputs["segments"], inputs["present"]
    embedding = XlnetEmbedding(
        config.vocabulary, config.width, dropout=config.dropout, two_streams=config.two_streams, name="embedding"
    )
    hidden = embedding(inputs["tokens"])
    for index in range(config.depth):
        layer = XlnetLayer(config.heads, config.inner, config.dropout, name=f"layer_{index}")
        if config.two_streams:
            content, query = hidden
            hidden = layer(content, segments, present, query, inputs["permutation"])
        else:
            hidden = layer(hidden, segments, present)
    predicting = hidden[1] if config.two_streams else hidden
    if config.head == "spans":
        logits = SpanLogits(name="logits")(predicting, present)
    else:
        logits = Bias(name="logits")(embedding(predicting, reverse=True))
    model = keras.Model(inputs, logits, name=name)
    _logger.info("built %s: %d parameters", name, model.count_params())
    return model


def xlnet_36(**changes: Any) -> keras.Model:
    """Builds XLNet-36 (2.1 GB of float32 parameters), with the fields of `XlnetConfig` in ``changes`` replaced."""
    return build(XlnetConfig(**changes), name="xlnet_36")


def xlnet_tiny(**changes: Any) -> keras.Model:
    """Builds `TINY`, with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(TINY, **changes), name="xlnet_tiny")
