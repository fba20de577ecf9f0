"""One rule cuts batches into micro-batches and these into slices."""

import itertools

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

deterministic = settings(derandomize=True, deadline=None)

sizes = st.integers(0, 300)
counts = st.integers(1, 40)


def test_examples_from_the_documentation() -> None:
    assert split_evenly(7, 3) == (3, 2, 2)
    assert split_evenly(1, 2) == (1, 0)
    assert intervals((3, 2, 2), 10) == ((10, 13), (13, 15), (15, 17))
    assert slice_intervals(Interval(4, 9), 2) == ((4, 7), (7, 9))


@pytest.mark.parametrize(("samples", "parts"), [(-1, 2), (4, 0), (4, -1)])
def test_an_impossible_split_is_refused_with_both_numbers(samples: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"can't split {samples} samples into {parts} parts"):
        split_evenly(samples, parts)


@deterministic
@given(samples=sizes, parts=counts)
def test_parts_differ_by_at_most_one_with_the_larger_first_and_none_lost(samples: int, parts: int) -> None:
    split = split_evenly(samples, parts)
    assert len(split) == parts
    assert sum(split) == samples
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


@deterministic
@given(lengths=st.lists(sizes, max_size=10), start=sizes)
def test_intervals_are_contiguous_and_have_the_given_sizes(lengths: list[int], start: int) -> None:
    parts = intervals(lengths, start)
    assert [part.size for part in parts] == lengths
    edges = [start, *itertools.chain.from_iterable(parts), start + sum(lengths)]
    assert edges[::2] == edges[1::2]


@deterministic
@given(a=st.tuples(sizes, sizes), b=st.tuples(sizes, sizes))
def test_overlap_holds_just_the_samples_in_both(a: tuple[int, int], b: tuple[int, int]) -> None:
    first, second = Interval(*sorted(a)), Interval(*sorted(b))
    overlap = first.overlap(second)
    assert set(range(*overlap)) == set(range(*first)) & set(range(*second))
    assert overlap.size == len(range(*overlap))
    assert overlap.size == second.overlap(first).size


@deterministic
@given(micro_batches=counts, extra=sizes)
def test_a_full_batch_has_the_plans_number_of_micro_batches(micro_batches: int, extra: int) -> None:
    batch = micro_batches + extra
    parts = micro_batch_intervals(batch, batch, micro_batches)
    assert tuple(part.size for part in parts) == split_evenly(batch, micro_batches)


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


@deterministic
@given(start=sizes, size=sizes, senders=counts, receivers=counts)
def test_the_overlaps_of_two_ways_to_slice_a_micro_batch_cover_each_sample_once(
    start: int, size: int, senders: int, receivers: int
) -> None:
    micro_batch = Interval(start, start + size)
    sent, received = slice_intervals(micro_batch, senders), slice_intervals(micro_batch, receivers)
    pieces = [piece for a, b in itertools.product(sent, received) if (piece := a.overlap(b)).size]
    samples = sorted(itertools.chain.from_iterable(range(*piece) for piece in pieces))
    assert samples == list(range(*micro_batch))


# ---- by shares


shares = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


def test_splits_by_shares() -> None:
    assert split_by_shares(5, (2, 1)) == (4, 1)
    assert split_by_shares(1, (1, 2)) == (0, 1)
    assert split_by_shares(0, (1, 2)) == (0, 0)
    assert slice_intervals(Interval(4, 9), 2, (2, 3)) == ((4, 6), (6, 9))


@pytest.mark.parametrize(("samples", "own"), [(-1, (1,)), (1, ()), (1, (1, 0))])
def test_wrong_shares_are_refused(samples: int, own: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"can't split .* by shares"):
        split_by_shares(samples, own)


@deterministic
@given(samples=sizes, parts=counts, times=st.integers(1, 5))
def test_equal_shares_split_evenly(samples: int, parts: int, times: int) -> None:
    assert split_by_shares(samples, (times,) * parts) == split_evenly(samples, parts)


@deterministic
@given(own=shares, times=st.integers(0, 5))
def test_multiples_of_the_shares_are_split_exactly(own: tuple[int, ...], times: int) -> None:
    assert split_by_shares(times * sum(own), own) == tuple(times * share for share in own)


@deterministic
@given(samples=sizes, own=shares, times=st.integers(2, 4))
def test_only_the_proportion_of_shares_counts(samples: int, own: tuple[int, ...], times: int) -> None:
    assert split_by_shares(samples, tuple(times * share for share in own)) == split_by_shares(samples, own)


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


@pytest.mark.parametrize("samples", [1, 7, 24])
@pytest.mark.parametrize("parts", [(1, 5), (3, 4), (8, 8), (9, 2)])
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
