"""Which tokens are to be predicted: the right share of them, never special ones, and the same for the same seeds."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.models.readers.predicted_tokens import masked, permutation

SEEDS = tf.constant([3, 5], tf.int64)


def test_a_sixth_of_the_tokens_that_are_not_special_is_predicted_in_an_order() -> None:
    special = np.zeros((200, 40), bool)
    special[:, 30:] = special[:, 0] = True
    places = permutation(tf.constant(special), SEEDS).numpy()
    assert places.dtype == np.int32 and not places[special].any()
    for row in places:
        assert sorted(row[row > 0]) == [1, 2, 3, 4, 5]  # 29 / 6
    # All orders come up: any candidate is first about as often.
    firsts = np.bincount((places == 1).argmax(axis=1), minlength=40)[1:30]
    assert firsts.min() >= 1 and firsts.max() < 25


@pytest.mark.parametrize("candidates", [1, 2, 3, 8, 9])
def test_at_least_one_token_is_predicted(candidates: int) -> None:
    special = np.arange(12) >= candidates
    places = permutation(tf.constant(special), SEEDS).numpy()
    assert sorted(places[places > 0]) == list(range(1, max(1, round(candidates / 6)) + 1))
    _, chosen = masked(tf.range(12), tf.constant(special), 99, 12, SEEDS)
    assert chosen.numpy().any() and not chosen.numpy()[special].any()


def test_nothing_is_predicted_of_samples_of_special_tokens_only() -> None:
    """All of them had the least draw, padding too, and were masked."""
    special = tf.ones((12,), tf.bool)
    changed, chosen = masked(tf.range(12), special, 99, 12, SEEDS)
    assert not chosen.numpy().any() and changed.numpy().tolist() == list(range(12))
    assert not permutation(special, SEEDS).numpy().any()


def test_masked_tokens_are_masked_replaced_or_left() -> None:
    tokens = tf.fill((4000,), 7)
    changed, chosen = (part.numpy() for part in masked(tokens, tf.zeros((4000,), tf.bool), 99, 50, SEEDS))
    assert 0.13 < chosen.mean() < 0.17
    assert 0.75 < (changed[chosen] == 99).mean() < 0.85
    assert 0.05 < (changed[chosen] == 7).mean() < 0.16  # Some of those replaced are, too.
    np.testing.assert_array_equal(changed[~chosen], 7)
