"""How a global batch is cut into micro-batches and a micro-batch into slices.

One rule serves the runtime, the passes and the planner, so that they can't disagree: parts are contiguous, in order,
and their sizes differ by at most one, the larger ones first. Slices of a stage with shares are in proportion to these.
"""

from __future__ import annotations

import fractions
import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """Samples ``start`` (included) to ``stop`` (excluded) of a batch."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    def overlap(self, other: Interval) -> Interval:
        """Returns the samples in both; an empty interval when there are none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


def overlaps(parts: Sequence[Interval], others: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    """Yields (part, other, number of samples in both) of two ways to cut the same samples, in order."""
    first = 0
    for part, interval in enumerate(parts):
        while first < len(others) and others[first].stop <= interval.start:
            first += 1
        for other in range(first, len(others)):
            if others[other].start >= interval.stop:
                break
            if size := interval.overlap(others[other]).size:
                yield part, other, size


def split_evenly(samples: int, parts: int) -> tuple[int, ...]:
    """Returns the sizes of ``samples`` samples in ``parts`` parts: 7 in 3 is (3, 2, 2); 1 in 2 is (1, 0)."""
    if samples < 0 or parts < 1:
        raise ValueError(f"can't split {samples} samples into {parts} parts; need samples >= 0 and parts >= 1")
    quotient, rest = divmod(samples, parts)
    return tuple(quotient + (index < rest) for index in range(parts))


@functools.cache
def split_by_shares(samples: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of ``samples`` samples in parts in proportion to whole numbers: 5 by (2, 1) is (4, 1).

    Each sample goes to the part whose size divided by its share is then the least, the first of these on a tie
    (D'Hondt's method): no other split has a smaller maximum of size / share, more samples make no part smaller,
    sum(shares) samples are split into ``shares``, and equal shares split as `split_evenly`.
    """
    if samples < 0 or not shares or min(shares) < 1:
        raise ValueError(f"can't split {samples} samples by shares {shares}; need samples >= 0 and shares >= 1")
    total = sum(shares)
    # Nobody gets less than the whole part of the exact proportion.
    sizes = [samples * share // total for share in shares]
    queue = [
        (fractions.Fraction(size + 1, share), part)
        for part, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]
    heapq.heapify(queue)
    for _ in range(samples - sum(sizes)):
        _, part = queue[0]
        sizes[part] += 1
        heapq.heapreplace(queue, (fractions.Fraction(sizes[part] + 1, shares[part]), part))
    return tuple(sizes)


def intervals(sizes: Sequence[int], start: int = 0) -> tuple[Interval, ...]:
    """Returns consecutive intervals of the given sizes, the first of them at ``start``."""
    stops = list(itertools.accumulate(sizes, initial=start))
    return tuple(Interval(a, b) for a, b in itertools.pairwise(stops))


@functools.cache
def micro_batch_intervals(batch: int, global_batch_size: int, micro_batches: int) -> tuple[Interval, ...]:
    """Cuts a batch of ``batch`` samples into micro-batches.

    A batch smaller than the global batch size (the last one of an epoch) keeps the micro-batch size of the plan and has
    fewer micro-batches.
    """
    count = min(micro_batches, max(1, -(-batch * micro_batches // global_batch_size)))
    return intervals(split_evenly(batch, count))


@functools.cache
def slice_intervals(
    micro_batch: Interval, replicas: int, shares: tuple[int, ...] | None = None
) -> tuple[Interval, ...]:
    """Cuts one micro-batch into a slice for each replica of a stage; a slice may be empty.

    Args:
        micro_batch: the samples.
        replicas: number of slices.
        shares: of each replica, whole numbers; None for equal ones.
    """
    size = micro_batch.size
    sizes = split_evenly(size, replicas) if shares is None else split_by_shares(size, shares)
    return intervals(sizes, micro_batch.start)
