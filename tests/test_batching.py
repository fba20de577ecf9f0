"""One rule cuts batches into micro-batches and these into slices."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.ir.batching import (
    Interval,
    intervals,
    micro_batch_intervals,
    overlaps,
    slice_intervals,
    split_by_shares,
    split_evenly,
)

deterministic = settings(derandomize=True, deadline=None, max_examples=50)

sizes = st.integers(0, 300)
counts = st.integers(1, 40)


def test_examples_from_the_documentation() -> None:
    assert split_evenly(7, 3) == (3, 2, 2)
    assert split_evenly(1, 2) == (1, 0)
    assert intervals((3, 2, 2), 10) == ((10, 13), (13, 15), (15, 17))
    assert slice_intervals(Interval(4, 9), 2) == ((4, 7), (7, 9))


@pytest.mark.parametrize(
    ("split", "text"),
    [
        (lambda: split_evenly(-1, 2), "can't split -1 samples into 2 parts"),
        (lambda: split_evenly(4, 0), "can't split 4 samples into 0 parts"),
        (lambda: split_by_shares(-1, (1,)), "can't split .* by shares"),
        (lambda: split_by_shares(1, ()), "can't split .* by shares"),
        (lambda: split_by_shares(1, (1, 0)), "can't split .* by shares"),
    ],
)
def test_impossible_splits_are_refused(split: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        split()


@deterministic
@given(samples=sizes, parts=counts)
def test_parts_differ_by_at_most_one_with_the_larger_first_and_none_lost(samples: int, parts: int) -> None:
    split = split_evenly(samples, parts)
    assert len(split) == parts
    assert sum(split) == samples
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


@deterministic
@given(a=st.tuples(sizes, sizes), b=st.tuples(sizes, sizes))
def test_overlap_holds_just_the_samples_in_both(a: tuple[int, int], b: tuple[int, int]) -> None:
    first, second = Interval(*sorted(a)), Interval(*sorted(b))
    overlap = first.overlap(second)
    assert set(range(*overlap)) == set(range(*first)) & set(range(*second))
    assert overlap.size == len(range(*overlap))
    assert overlap.size == second.overlap(first).size


@deterministic
@given(micro_batches=counts, extra=sizes, data=st.data())
def test_a_short_batch_has_no_empty_micro_batch_and_none_above_the_plans_size(
    micro_batches: int, extra: int, data: st.DataObject
) -> None:
    global_batch = micro_batches + extra
    batch = data.draw(st.integers(1, global_batch))
    parts = micro_batch_intervals(batch, global_batch, micro_batches)
    largest = split_evenly(global_batch, micro_batches)[0]
    assert (parts[0].start, parts[-1].stop) == (0, batch)
    assert len(parts) <= micro_batches
    assert all(1 <= part.size <= largest for part in parts)
    assert len(parts) <= -(-batch * micro_batches // global_batch)  # its share of the plan's micro-batches


def test_an_empty_batch_is_one_empty_micro_batch() -> None:
    assert micro_batch_intervals(0, 8, 4) == ((0, 0),)


# ---- by shares


shares = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


def test_splits_by_shares() -> None:
    assert split_by_shares(5, (2, 1)) == (4, 1)
    assert split_by_shares(1, (1, 2)) == (0, 1)
    assert split_by_shares(0, (1, 2)) == (0, 0)
    assert slice_intervals(Interval(4, 9), 2, (2, 3)) == ((4, 6), (6, 9))


@deterministic
@given(samples=sizes, parts=counts, times=st.integers(1, 5))
def test_equal_shares_split_evenly(samples: int, parts: int, times: int) -> None:
    assert split_by_shares(samples, (times,) * parts) == split_evenly(samples, parts)


@deterministic
@given(samples=sizes, own=shares)
def test_more_samples_make_no_slice_smaller_and_each_is_near_its_proportion(samples: int, own: tuple[int, ...]) -> None:
    split, more = split_by_shares(samples, own), split_by_shares(samples + 1, own)
    assert sum(split) == samples
    assert sorted(b - a for a, b in zip(split, more, strict=True)) == [0] * (len(own) - 1) + [1]
    for size, share in zip(split, own, strict=True):
        assert size >= samples * share // sum(own)


@deterministic
@given(samples=st.integers(0, 12), own=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
def test_no_split_has_a_smaller_largest_size_for_its_share(samples: int, own: tuple[int, ...]) -> None:
    def largest(split: tuple[int, ...]) -> float:
        return max(size / share for size, share in zip(split, own, strict=True))

    others = (split for split in itertools.product(range(samples + 1), repeat=len(own)) if sum(split) == samples)
    assert largest(split_by_shares(samples, own)) == min(map(largest, others))


@pytest.mark.parametrize(("samples", "parts"), [(7, (3, 4)), (7, (8, 8)), (24, (9, 2))])
def test_overlaps_are_those_of_all_pairs(samples: int, parts: tuple[int, int]) -> None:
    """With empty parts, too, where there are fewer samples than parts."""
    cuts = [intervals(split_evenly(samples, count)) for count in parts]
    pairs = [
        (one, other, common)
        for one, first in enumerate(cuts[0])
        for other, second in enumerate(cuts[1])
        if (common := first.overlap(second).size)
    ]
    assert list(overlaps(*cuts)) == pairs
    assert sum(common for _, _, common in pairs) == samples
