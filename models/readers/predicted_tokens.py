"""Which tokens of a sample a model is to predict: those that are masked out, or come last in a random order."""

from __future__ import annotations

import tensorflow as tf

_MASKED = 0.15  # As BERT: of these 80% are masked, 10% replaced, 10% left.
_ORDERED = 1 / 6  # As XLNet: the last 1/K in the order of a permutation, K = 6 (section 2.3, "Partial Prediction").


def masked(
    tokens: tf.Tensor, special: tf.Tensor, mask: int, size: int, seeds: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Some tokens masked out, as for BERT, and at least one where there are any that aren't special.

    Args:
        tokens: int32 [sequence].
        special: bool [sequence], tokens that aren't to be predicted, such as padding.
        mask: the token [MASK].
        size: number of tokens in the vocabulary.
        seeds: int64 [2]; the same ones give the same.

    Returns:
        The tokens, some of them masked, and bool [sequence], which are to be predicted.
    """
    drawn = tf.where(special, 2.0, tf.random.stateless_uniform(tf.shape(tokens), seeds))
    chosen = ~special & ((drawn < _MASKED) | (drawn == tf.reduce_min(drawn)))
    way = tf.random.stateless_uniform(tf.shape(tokens), seeds + 1)
    others = tf.random.stateless_uniform(tf.shape(tokens), seeds + 2, 0, size, tf.int32)
    changed = tf.where(way < 0.8, mask, tf.where(way < 0.9, others, tokens))
    return tf.where(chosen, changed, tokens), chosen


def permutation(special: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Returns the order in which some tokens are predicted, as for XLNet of two streams.

    They are drawn one by one, where XLNet draws spans of one to five; at least one of a sample that has any that aren't
    special.

    Args:
        special: bool [..., sequence], tokens that aren't to be predicted, such as padding.
        seeds: int64 [2]; the same ones give the same.

    Returns:
        int32 [..., sequence]: 1, 2, ... for tokens to be predicted, each of which may see those before it; 0 for those
        that are given, which all may see.
    """
    drawn = tf.where(special, 2.0, tf.random.stateless_uniform(tf.shape(special), seeds))
    place = tf.argsort(tf.argsort(drawn, axis=-1), axis=-1)
    candidates = tf.reduce_sum(tf.cast(~special, tf.float32), axis=-1, keepdims=True)
    count = tf.maximum(1, tf.cast(tf.round(candidates * _ORDERED), tf.int32))
    return tf.where(~special & (place < count), place + 1, 0)
