"""Finds the dimensions along which an operator can be split without changing its result.

Every rule is derived from the operator's signature, written in letters: one letter for each axis of its inputs and
outputs (see `split_signatures`). An operator can be split along a letter when its part computes, from the cut inputs, a
slice of each output that has the letter, and a partial sum of each that hasn't.

Source: FD-DPS (Mathematics 2022, 10, 4788), section 4.1: "the specified axis of the input of computationally intensive
operators is partitioned [...] to compute disjoint subsets of the original operator's output tensors".
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from graph_passes.analysis.split_signatures import ANY, WHOLE, Signature, signatures_of
from graph_passes.ir.batching import split_evenly
from graph_passes.ir.graph import NodeDef, Ref
from graph_passes.ir.tensorflow_bridge import Shape

Tensor = TypeVar("Tensor")
FIRST = -1
"""In place of an axis: a tensor that is equal in all parts, or that only its own parts read, so any of them will do."""


class Split(NamedTuple):
    """A decision: an operator becomes ``parts`` operators, each with about the same share of ``dimension``."""

    dimension: str
    parts: int


class Cut(NamedTuple):
    """How a tensor is cut into parts: two cuts of a tensor are equal if and only if all their parts are.

    Attributes:
        axis: along which it is cut; `FIRST` for a tensor of which every part has its own.
        parts: number of parts.
        length: number of units, distributed as evenly as possible, the larger parts first; ``parts`` if all are of one
            size. A unit is one or several elements.
    """

    axis: int
    parts: int
    length: int

    @classmethod
    def of(cls, axis: int, parts: int, length: int) -> Cut:
        """Cuts ``length`` units along an axis into parts."""
        return cls(axis, parts, length if length % parts else parts)

    def sizes(self, elements: int) -> tuple[int, ...]:
        """Returns the length of each part of an axis of ``elements``."""
        return tuple(size * (elements // self.length) for size in split_evenly(self.length, self.parts))

    def __str__(self) -> str:
        return (
            f"{self.axis}_{self.parts}" if self.length == self.parts else f"{self.axis}_{self.parts}_of_{self.length}"
        )


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """One dimension along which an operator can be split.

    Attributes:
        dimension: ``batch`` or ``channel`` (of the output); for others a telling name.
        length: of that dimension: the most parts. The axes below have this length or a multiple of it.
        input_axes: for each data input the axis along which it is cut; None for those that each part reads whole;
            `FIRST` for those of which each part reads its own where there is one.
        output_axes: for each output the axis along which the parts' results are concatenated; None where they are
            added; `FIRST` where the first part's result is the whole one.
        shape_inputs: data inputs that hold the first output's shape -> the axis of that shape that becomes the part's
            length.
        divisor: of a mean over this dimension, whose parts are sums: the number of elements by which their total is
            divided; 0 for all other operators.
    """

    dimension: str
    length: int
    input_axes: tuple[int | None, ...]
    output_axes: tuple[int | None, ...]
    shape_inputs: Mapping[int, int] = dataclasses.field(default_factory=dict)
    divisor: int = 0

    def sizes(self, parts: int) -> tuple[int, ...]:
        """Returns the length of each part, as even as possible, the larger ones first."""
        return split_evenly(self.length, parts)

    def input_cut(self, argument: int, parts: int) -> Cut | None:
        """Returns how the parts read a data input; None where each reads it whole."""
        axis = self.input_axes[argument]
        return None if axis is None else Cut.of(axis, parts, self.length)

    def part_op(self, op: str) -> str:
        """Returns the op type of the parts of an operator."""
        return "Sum" if self.divisor else op

    def output_cut(self, output: int, parts: int) -> Cut | None:
        """Returns how the parts make an output; None where it is the sum of theirs."""
        axis = self.output_axes[output]
        return None if axis is None else Cut.of(axis, parts, self.length)


def part_name(operator: str, part: int) -> str:
    """Returns the name of a part of an operator."""
    return f"{operator}/part{part}"


def joined_name(tensor: Ref) -> str:
    """Returns the name of the node that joins what the parts of a split operator make."""
    return f"{tensor.node}/joined_{tensor.output}"


def total_name(tensor: Ref) -> str:
    """Returns the name of the node that adds what the parts of a mean make; the joined result is a quotient of it."""
    return f"{tensor.node}/total_{tensor.output}"


def split_name(tensor: Ref, cut: Cut) -> str:
    """Returns the name of the node that cuts a tensor, for all readers with this cut."""
    return f"{tensor.node}/split_{tensor.output}_{cut}"


def chosen_rule(operator: str, rules: Sequence[SplitRule], split: Split) -> SplitRule:
    """Returns the rule of a split of an operator.

    Raises:
        ValueError: it can't be split like this; the text says what can be done.
    """
    rule = next((rule for rule in rules if rule.dimension == split.dimension), None)
    if rule is None:
        known = ", ".join(f"{rule.dimension} ({rule.length})" for rule in rules) or "nothing"
        raise ValueError(f"operator {operator!r} can't be split along {split.dimension!r}, only along {known}")
    if not 2 <= split.parts <= rule.length:
        raise ValueError(
            f"operator {operator!r} can't be split along {split.dimension!r} into {split.parts} parts: it has length "
            f"{rule.length}; take 2 to {rule.length} parts"
        )
    return rule


def split_rules(
    node: NodeDef,
    input_shapes: Sequence[Shape | None],
    output_shapes: Sequence[Shape | None],
    constants: Mapping[int, np.ndarray] | None = None,
) -> tuple[SplitRule, ...]:
    """Returns the dimensions along which an operator can be split; none for stateful, random and unknown ones.

    Results are those of the whole operator, but for the last bits: sums over parts are added in another order, and
    kernels may divide smaller tensors into other blocks.

    Args:
        node: the operator.
        input_shapes: of its data inputs; None, or with None in it, where it isn't known.
        output_shapes: of its outputs.
        constants: data input -> its value, if known. Without them axes that follow from shapes alone are still found:
            a permutation of axes of unlike lengths, say.

    Returns:
        A rule for each dimension of 2 and more, the best known first.
    """
    signatures = signatures_of(node, input_shapes, output_shapes, constants or {})
    return _rules(signatures, tuple(input_shapes), tuple(output_shapes)) if signatures else ()


@functools.lru_cache(maxsize=2**14)  # a network repeats its layers, and an optimizer its operators
def _rules(
    signatures: tuple[Signature, ...], input_shapes: tuple[Shape | None, ...], output_shapes: tuple[Shape | None, ...]
) -> tuple[SplitRule, ...]:
    all_rules = []
    for signature in signatures:
        inputs = list(zip(signature.inputs, input_shapes, strict=False))
        outputs = list(zip(signature.outputs, output_shapes, strict=False))
        whole = len(inputs) == len(input_shapes) and len(outputs) == len(output_shapes)
        read = [pair for index, pair in enumerate(inputs) if index not in signature.shape_inputs]
        if whole and all(_has_axes(letters, shape) for letters, shape in (*read, *outputs)):
            rules = (_rule(signature, dimension, letter, inputs, outputs) for dimension, letter in signature.dimensions)
            all_rules += [rule for rule in rules if rule is not None]
    return tuple(all_rules)


def _has_axes(letters: str, shape: Shape | None) -> bool:
    """Returns whether a shape is known and has an axis for each letter."""
    return letters in (ANY, WHOLE) or (shape is not None and None not in shape and len(shape) == len(letters))


def _rule(
    signature: Signature,
    dimension: str,
    letter: str,
    inputs: Sequence[tuple[str, Shape | None]],
    outputs: Sequence[tuple[str, Shape | None]],
) -> SplitRule | None:
    """Returns the rule for one letter; None where it is too short."""
    lengths: list[int] = []

    def axis_of(letters: str, shape: Shape | None) -> int | None:
        if letters == ANY:
            return FIRST
        axis = letters.find(letter)
        if axis < 0:
            return None
        assert shape is not None
        lengths.append(shape[axis] or 0)
        return axis

    shape_inputs = {index: inputs[index][0].find(letter) for index in sorted(signature.shape_inputs)}
    rule = SplitRule(
        dimension,
        0,
        tuple(None if index in shape_inputs else axis_of(*pair) for index, pair in enumerate(inputs)),
        tuple(axis_of(*pair) for pair in outputs),
        {index: axis for index, axis in shape_inputs.items() if axis >= 0},
        signature.divisor,
    )
    # An axis without elements can't be split.
    length = math.gcd(*lengths) if lengths and min(lengths) > 0 else 0
    return dataclasses.replace(rule, length=length) if length >= 2 else None


class Whole(NamedTuple):
    """An operator that is split."""

    rule: SplitRule
    parts: int

    def cut(self, output: int) -> Cut | None:
        """Returns how its parts make an output."""
        return self.rule.output_cut(output, self.parts)


class Splitting(abc.ABC, Generic[Tensor]):
    """Tensors of a graph whose operators are being split.

    Attributes:
        wholes: name of an operator -> how it is split.
        joined: output of a split operator -> the whole tensor, for outputs that are read whole.
    """

    def __init__(self, wholes: Mapping[str, Whole]) -> None:
        self.wholes = wholes
        self.joined: dict[Ref, Tensor] = {}
        self._cuts: dict[tuple[Ref, Cut], list[Tensor]] = {}

    @abc.abstractmethod
    def unsplit(self, ref: Ref) -> Tensor:
        """Returns a tensor of an operator that isn't split."""

    @abc.abstractmethod
    def made_by_parts(self, ref: Ref, whole: Whole) -> list[Tensor]:
        """Returns what each part of an operator makes in place of a tensor."""

    @abc.abstractmethod
    def join(self, ref: Ref, name: str, op: str, inputs: Sequence[Tensor], operand: float | None = None) -> Tensor:
        """Adds a node that makes a whole tensor, or the total of a mean.

        Args:
            ref: the tensor.
            name: of the node.
            op: ``ConcatV2``, ``AddN`` or ``RealDiv``.
            inputs: the tensors that it reads.
            operand: the axis or the divisor.
        """

    @abc.abstractmethod
    def cut(self, ref: Ref, tensor: Tensor, cut: Cut) -> list[Tensor]:
        """Adds the node that cuts a tensor for all readers with this cut; ``tensor`` is the whole one."""

    def whole(self, ref: Ref) -> Tensor:
        """Returns a whole tensor."""
        whole = self.wholes.get(ref.node)
        if whole is None:
            return self.unsplit(ref)
        if ref not in self.joined:
            self.joined[ref] = self._joined(ref, whole)
        return self.joined[ref]

    def _joined(self, ref: Ref, whole: Whole) -> Tensor:
        parts = self.made_by_parts(ref, whole)
        axis, divisor = whole.rule.output_axes[ref.output], whole.rule.divisor
        if axis == FIRST:
            return parts[0]
        if axis is not None:
            return self.join(ref, joined_name(ref), "ConcatV2", parts, axis)
        if not divisor:
            return self.join(ref, joined_name(ref), "AddN", parts)
        total = self.join(ref, total_name(ref), "AddN", parts)
        return self.join(ref, joined_name(ref), "RealDiv", [total], float(divisor))

    def read_by_parts(self, ref: Ref, argument: int, reader: Whole) -> list[Tensor]:
        """Returns a tensor as each part of an operator reads it."""
        cut = reader.rule.input_cut(argument, reader.parts)
        producer = self.wholes.get(ref.node)
        if cut is not None and producer is not None and producer.cut(ref.output) == cut:
            return self.made_by_parts(ref, producer)
        tensor = self.whole(ref)
        if cut is None or cut.axis == FIRST:
            return [tensor] * reader.parts
        if (ref, cut) not in self._cuts:
            self._cuts[ref, cut] = self.cut(ref, tensor, cut)
        return self._cuts[ref, cut]
