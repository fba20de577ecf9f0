"""Along which dimensions an operator can be split without changing its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple


class Split(NamedTuple):
    """A decision: an operator becomes ``parts`` operators, each with about the same share of ``dimension``."""

    dimension: str
    parts: int


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """One dimension along which an operator can be split.

    Attributes:
        dimension: ``batch`` or ``channel`` (of the output); for others a telling name.
        length: of that dimension, at most so many parts.
        input_axes: for each data input the axis along which it is cut; None for those that each part reads whole.
        output_axes: for each output the axis along which the parts' results are concatenated; None where they are added.
        shape_inputs: data inputs that hold a shape -> the axis of that shape that becomes the part's length.
    """

    dimension: str
    length: int
    input_axes: tuple[int | None, ...]
    output_axes: tuple[int | None, ...]
    shape_inputs: Mapping[int, int] = dataclasses.field(default_factory=dict)
