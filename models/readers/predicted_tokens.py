"""Chooses the tokens of a sample that a model predicts: masked ones, or the last ones in a random order."""

from __future__ import annotations

import tensorflow as tf

_MASKED = 0.15  # As BERT: of these 80% are masked, 10% replaced, 10% left.
_ORDERED = 1 / 6  # As XLNet: the last 1/K in the order of a permutation, K = 6 (section 2.3, "Partial Prediction").


def masked(
    tokens: tf.Tensor, special: tf.Tensor, mask: int, size: int, seeds: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Masks some tokens, as for BERT, and at least one if any isn't special.

    Args:
        tokens: int32 [sequence].
        special: bool [sequence], tokens that aren't predicted, such as padding.
        mask: the token [MASK].
        size: number of tokens in the vocabulary.
        seeds: int64 [2]; equal seeds give equal results.

    Returns:
        The tokens, some of them masked, and bool [sequence], whether each is to be predicted.
    """
    drawn = tf.where(special, 2.0, tf.random.stateless_uniform(tf.shape(tokens), seeds))
    chosen = ~special & ((drawn < _MASKED) | (drawn == tf.reduce_min(drawn)))
    way = tf.random.stateless_uniform(tf.shape(tokens), seeds + 1)
    others = tf.random.stateless_uniform(tf.shape(tokens), seeds + 2, 0, size, tf.int32)
    changed = tf.where(way < 0.8, mask, tf.where(way < 0.9, others, tokens))
    return tf.where(chosen, changed, tokens), chosen


def permutation(special: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Returns the order in which some tokens are predicted, as for XLNet of two streams.

    They are drawn one by one, whereas XLNet draws spans of one to five; at least one in a sample if any isn't
    special.

    Args:
        special: bool [..., sequence], tokens that aren't predicted, such as padding.
        seeds: int64 [2]; equal seeds give equal results.

    Returns:
        int32 [..., sequence]: 1, 2, ... for tokens to be predicted, each of which may see those before it; 0 for the
        others, which all may see.
    """
    drawn = tf.where(special, 2.0, tf.random.stateless_uniform(tf.shape(special), seeds))
    place = tf.argsort(tf.argsort(drawn, axis=-1), axis=-1)
    candidates = tf.reduce_sum(tf.cast(~special, tf.float32), axis=-1, keepdims=True)
    count = tf.maximum(1, tf.cast(tf.round(candidates * _ORDERED), tf.int32))
    return tf.where(~special & (place < count), place + 1, 0)
