"""What a layer costs: the parts of a profile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.common.data_files import short

_ROUNDING = 1e-9
"""Fraction by which the sum of shares may exceed 1: they are rounded."""


class ProfileError(ValueError):
    """A profile contradicts itself, or a file isn't a profile."""


@dataclass(frozen=True)
class Cost:
    """Seconds or bytes that grow with the samples of a slice: ``fixed + per_sample * samples``.

    Raises:
        ProfileError: a part is negative or not finite.
    """

    fixed: float = 0.0
    per_sample: float = 0.0

    def __post_init__(self) -> None:
        for part in ("fixed", "per_sample"):
            value = getattr(self, part)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ProfileError(f"a cost's {part} part is {value!r}; it must be a number")
            if not 0 <= value <= sys.float_info.max:
                raise ProfileError(f"a cost's {part} part is {short(value)}; it must be finite and at least 0")

    def at(self, samples: float) -> float:
        """Returns the cost of a slice of ``samples`` samples."""
        return self.fixed + self.per_sample * samples

    @classmethod
    def through(cls, samples: Sequence[int], values: Sequence[float]) -> Cost:
        """Returns the cost through two exact points; if a part would be negative, the least cost that covers both."""
        (few, many), (less, more) = samples, values
        rate = (more - less) / (many - few)
        fixed = less - rate * few
        if rate < 0:
            return cls(float(less), 0.0)
        return cls(0.0, more / many) if fixed < 0 else cls(float(fixed), float(rate))

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.fixed * factor, self.per_sample * factor)


def check_amount(what: str, value: float) -> None:
    """Refuses values other than finite numbers of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ProfileError(f"{what} is {value!r}; it must be a finite number of at least 0")


ZERO = Cost()


@dataclass(frozen=True)
class LayerBuffers:
    """Bytes that a layer's tasks leave in memory, besides the tensors between layers (`Tensor`), each buffer once.

    Attributes:
        residual: residuals from F to the layer's own B.
        delayed: the part of the residuals that Bw reads.
        partial: buffers from Bx to Bw.
        gradients: dense gradients of parameters, which B or Bw returns for an accumulator or the update.
        rows: gradients that are rows of an embedding, kept until the update, for every slice.
        apply: peak use of the optimizer's update.
    """

    residual: Cost = ZERO
    delayed: Cost = ZERO
    partial: Cost = ZERO
    gradients: int = 0
    rows: Cost = ZERO
    apply: int = 0

    def __post_init__(self) -> None:
        for name in ("gradients", "apply"):
            check_amount(name, getattr(self, name))


@dataclass(frozen=True)
class NeededLater:
    """A part of a layer's F whose results the layer's own backward doesn't need.

    Attributes:
        layer: index of the first layer whose backward needs them, a later one; the number of layers if none does.
        share: the part's share of F's time.
    """

    layer: int
    share: float

    def __post_init__(self) -> None:
        check_amount("the share of F that is needed later", self.share)


@dataclass(frozen=True)
class LayerProfile:
    """One layer, or several that can't be cut apart. Times are seconds on the profiled device.

    Attributes:
        name: its name, by which a plan can cut after it.
        forward: time of F.
        backward: time of B: both gradients.
        backward_weight: the part of B that computes weight gradients (Bw); None if unknown.
        residual_bytes: bytes kept from F to B if nothing is recomputed. A tensor that several layers keep counts once,
            at the layer that makes it; tensors from another stage count at the stage's boundary.
        min_cut_residual_bytes: the same with ``recompute="min_cut"``; None if unknown.
        delayed_bytes: bytes kept from Bx to Bw if B is split, to compute weight gradients. None if unknown, taken as
            the residuals.
        temporary_bytes: peak use while F or B runs, beyond residuals and results.
        output_bytes: bytes of the layer's tensors for later layers.
        parameter_bytes: trainable variables, without those of `Profile.shared`.
        slot_bytes: the optimizer's variables for them.
        state_bytes: non-trainable variables.
        apply_seconds: time of the optimizer's update of its parameters.
        spread: interquartile range of the measured F + B, as a fraction of its median.
        buffers: bytes that its tasks leave in memory, buffer by buffer; None if only the sums above are known.
        recomputation: time that F and B take longer together if B computes all of F again. That is less than F's time:
            an F of which nothing is kept is faster, and so is a B that reads what was computed just before. None if
            unknown, taken as F's time.
        needed_later: the parts of F that the layer's own backward doesn't need. With ``recompute="boundary"`` they are
            computed again only in stages with the layers that need them; see `Profile.recomputed`. By default the
            layer's backward needs all of F.
        table_bytes: the part of ``parameter_bytes`` of which the layer only looks up rows: `Plan.shards` keeps it
            in shards. Of `Profile.shared` none is known.
        row_bytes: the rows that it looks up there, with their indices.
    """

    name: str
    forward: Cost
    backward: Cost
    backward_weight: Cost | None = None
    residual_bytes: Cost = ZERO
    min_cut_residual_bytes: Cost | None = None
    delayed_bytes: Cost | None = None
    temporary_bytes: Cost = ZERO
    output_bytes: Cost = ZERO
    parameter_bytes: int = 0
    slot_bytes: int = 0
    state_bytes: int = 0
    apply_seconds: float = 0.0
    spread: float = 0.0
    buffers: LayerBuffers | None = None
    recomputation: Cost | None = None
    needed_later: tuple[NeededLater, ...] = ()
    table_bytes: int = 0
    row_bytes: Cost = ZERO

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "slot_bytes", "state_bytes", "apply_seconds", "spread", "table_bytes"):
            check_amount(f"{name} of layer {self.name!r}", getattr(self, name))
        if self.table_bytes > self.parameter_bytes:
            raise ProfileError(
                f"table_bytes of layer {self.name!r} is {self.table_bytes}, more than its parameter_bytes, "
                f"{self.parameter_bytes}"
            )
        object.__setattr__(self, "needed_later", tuple(self.needed_later))
        shares = sum(later.share for later in self.needed_later)
        if shares > 1 + _ROUNDING:
            raise ProfileError(
                f"the shares of layer {self.name!r} that are needed later add up to {shares:.3g}; it must be at most 1"
            )

    @property
    def table_slot_bytes(self) -> float:
        """The part of ``slot_bytes`` that belongs to ``table_bytes``."""
        return self.slot_bytes * self.table_bytes / self.parameter_bytes if self.table_bytes else 0.0

    @property
    def all_again(self) -> Cost:
        """Time that computing all of F again adds to B."""
        return self.forward if self.recomputation is None else self.recomputation
