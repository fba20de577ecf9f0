"""Tensors between the parts of split operators, as nodes of a graph or as costs alone."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from graph_passes.analysis.split_rules import FIRST, Cut, SplitRule, joined_name, total_name
from graph_passes.ir.graph import Ref

Tensor = TypeVar("Tensor")


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
