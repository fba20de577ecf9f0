"""Costs from measured points: exact where they lie on a line, never negative."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.describe.layer_profile import ZERO, Cost
from dapple_tf.measuring.cost_fit import cost_through, nearest_cost, shares


def test_the_nearest_cost() -> None:
    exact = nearest_cost([2, 4, 8], [3.0, 4.0, 6.0])
    assert (exact.fixed, exact.per_sample) == (pytest.approx(2.0), pytest.approx(0.5))
    assert nearest_cost([4], [2.0]) == Cost(0, 0.5)
    falling = nearest_cost([1, 2], [2.0, 1.0])
    assert falling.per_sample == 0 and 1 <= falling.fixed <= 2
    through_zero = nearest_cost([1, 2], [1.0, 3.0])
    assert through_zero.fixed == 0 and 1 <= through_zero.per_sample <= 1.5
    assert nearest_cost([1, 2], [0.0, 0.0]) == ZERO


def test_the_cost_through_two_points() -> None:
    assert cost_through((2, 4), (10, 14)) == Cost(6, 2)
    assert cost_through((2, 4), (10, 8)) == Cost(10, 0)
    assert cost_through((2, 4), (1, 4)) == Cost(0, 1)


@given(st.lists(st.just(0.0) | st.floats(1e-9, 1e3), min_size=2, max_size=5))
def test_no_part_is_negative(times: list[float]) -> None:
    samples = [2**index for index in range(len(times))]
    nearest = nearest_cost(samples, times)  # A Cost refuses negative parts.
    assert nearest.at(samples[-1]) >= 0.99 * min(times)
    exact = cost_through(samples[:2], times[:2])
    assert all(exact.at(x) >= t - 1e-9 for x, t in zip(samples[:2], times[:2], strict=True))


def test_shares_add_up() -> None:
    np.testing.assert_allclose(shares(np.array([1.0, 3.0, 0.5]), 0.5, 6.0), [1.0, 5.0, 0.0])
    np.testing.assert_allclose(shares(np.array([1.0, 0.5]), 0.5, 0.0), [0.5, 0.0])
    np.testing.assert_allclose(shares(np.array([0.1, 0.5]), 0.5, 1.0), [0.0, 0.0])
