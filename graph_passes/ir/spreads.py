"""Spreads: how a slice's tensor relates to the same tensor of the whole batch.

Most of a slice's tensors are the slice's part of the whole batch's tensors, cut along the batch axis. For a tensor
without a batch axis the whole batch's value may be the sum of the slices' values, their mean, or the same in all of
them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Coupling(enum.Enum):
    """A reason why a slice's tensor differs from the slice of the whole batch's."""

    TOGETHER = "together"
    """Something is computed across the samples of a slice."""
    MICRO_BATCH = "micro-batch"
    """Something is computed across all samples of a micro-batch, over its slices."""
    BATCH_SIZE = "batch size"
    """Something depends on the number of a slice's samples."""
    PLACE = "place"
    """Something depends on a sample's place in the slice."""
    PAIRS = "pairs"
    """An output of the model has the samples along two axes: each beside the others of its slice."""
    NOT_LINEAR = "not linear"
    """Something of a loss isn't linear in a sum or a mean over samples."""
    STATE = "state"
    """State becomes something else than a sum or a mean over slices."""
    METRIC = "metric"
    """A metric isn't a sum over samples."""
    DRAWS = "draws"
    """Random numbers for samples are drawn whose seeds don't tell slices apart."""
    PYTHON = "python"
    """Python code computes something: whether across samples is unknown."""
    UNKNOWN = "unknown"
    """It is unknown what something does."""


class Spread(NamedTuple):
    """How a tensor relates to that of the whole batch.

    With n samples in the slice and N in the batch, a tensor without a batch axis is n ** degree times something that is
    the same for all slices, or, where it ``varies``, something whose mean over slices (weighted by n / N) is that of
    the batch. A sum over samples varies and has degree 1, their mean degree 0, their number doesn't vary and has
    degree 1.

    Attributes:
        axis: the axis with the samples; None where there is none. Negative in loops that take samples one by one: of a
            list with an element for each sample -1, and so of such an element, as the axis is before its others.
        outer: number of parts of that axis each of which has all samples, in order: 2 where two batches are
            concatenated. 0 where any number fits, as rows don't belong to samples: constants, random numbers. None
            where rows are in another order, or in one that isn't known.
        varies: whether it depends on the samples' values.
        degree: see above; None where it isn't a power of n: a sum of such terms with different degrees, for one.
        linear: whether the slices' values determine the batch's as above. A maximum over samples doesn't.
        known: whether it is computed from batch inputs alone, so that it can be known before the step.
        place: whether it has the samples' places in the batch: numbers 0 to n - 1.
        shared: whether all slices of a micro-batch have the same value, being that of the micro-batch.
        partial: whether the number of rows that a sample has depends on values: those that a mask leaves, say.
        extreme: ``"Max"`` if the batch's value is the largest of the slices' values, ``"Min"`` if it is the smallest;
            empty otherwise.
        lengths: whether lengths of axes without samples depend on samples' values: cropped to the longest, say.
    """

    axis: int | None = None
    outer: int | None = 1
    varies: bool = False
    degree: int | None = 0
    linear: bool = True
    known: bool = True
    place: bool = False
    partial: bool = False
    shared: bool = False
    extreme: str = ""
    lengths: bool = False

    @property
    def constant(self) -> bool:
        """Whether it is the same for all slices, whatever their sizes."""
        return self.axis is None and not self.varies and self.degree == 0

    @property
    def is_factor(self) -> bool:
        """Whether it is a known power of the number of samples, times the same for all slices."""
        return self.axis is None and not self.varies and self.linear and self.degree is not None

    @property
    def negated(self) -> Spread:
        """The spread of what falls where it rises."""
        return self._replace(extreme={"Max": "Min", "Min": "Max", "": ""}[self.extreme])

    @property
    def decides(self) -> bool:
        """Whether it has no samples itself, but depends on the slice's."""
        return self.axis is None and self.varies

    @property
    def one_by_one(self) -> bool:
        """Whether it belongs to one sample at a time, in a loop over all."""
        return self.axis is not None and self.axis < 0


CONSTANT = Spread()
TRAINED = Spread(known=False)
"""Of variables."""


def degree_of(few: np.ndarray, many: np.ndarray, ratio: float) -> int | None:
    """Returns the power of the number of samples that a value grows with; None if it isn't one.

    Args:
        few: the value for a number of samples; not a number where it isn't known.
        many: the value for a larger one.
        ratio: of the larger to the smaller number.
    """
    few, many = few[~np.isnan(few)], many[~np.isnan(many)]
    if few.shape != many.shape:
        return None
    for degree in (0, 1, -1, 2, -2):
        grown = few * ratio**degree
        with np.errstate(invalid="ignore"):  # infinity less itself
            near = np.isfinite(many) & (np.abs(grown - many) <= 1e-9 * np.abs(many))
            if np.all((grown == many) | near):
                return degree
    return None


def together(spreads: Iterable[Spread]) -> Spread:
    """Returns the spread of a linear combination of tensors without batch axes."""
    several = list(spreads)
    degrees = {spread.degree for spread in several}
    return Spread(
        varies=any(spread.varies for spread in several),
        degree=degrees.pop() if len(degrees) == 1 else None,
        linear=all(spread.linear for spread in several),
        known=all(spread.known for spread in several),
        place=any(spread.place for spread in several),
        shared=all_shared(several),
    )


def common_outer(spreads: Iterable[Spread]) -> int | None:
    """Returns the number of parts of an axis that several tensors share; None where they differ."""
    outers = {spread.outer for spread in spreads if spread.axis is not None} - {0} or {0}
    return outers.pop() if len(outers) == 1 else None


def all_shared(spreads: Iterable[Spread]) -> bool:
    """Returns whether slices of one micro-batch have equal values that depend on samples, without a batch axis."""
    varying = [spread.shared for spread in spreads if spread.varies and spread.axis is None]
    return bool(varying) and all(varying)
