"""Splits operators of an `OpGraph` into parts, as `graph_passes.passes.split_operators` does to graphs, node for node.

Source: FD-DPS (Mathematics 2022, 10, 4788), section 4.1 and algorithm 3, lines 2 to 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.op_graph import OpGraph
from graph_passes.analysis.split_rules import (
    FIRST,
    Cut,
    Split,
    SplitRule,
    chosen_rule,
    joined_name,
    part_name,
    split_name,
    total_name,
)
from graph_passes.ir.graph import Ref


def apply_splits(graph: OpGraph, splits: Mapping[str, Split]) -> OpGraph:
    """Returns the graph with some operators split; the given one isn't changed.

    Parts replace their operator in the numbering, followed by joins and splits of its outputs. A part with a share s of
    an operator takes launch + s (seconds - launch). A part is a group of its own and can be anywhere; it isn't split
    again. Linear in operators and edges.

    Args:
        graph: the operators.
        splits: name of an operator -> how it is split.

    Raises:
        ValueError: there is no such operator, it is bound to others, or it can't be split like this.
    """
    return _Splitting(graph, splits).result() if splits else graph


class _Whole(NamedTuple):
    """An operator that is split."""

    rule: SplitRule
    parts: int

    def cut(self, output: int) -> Cut | None:
        """Returns how its parts make an output."""
        return self.rule.output_cut(output, self.parts)


class _Source(NamedTuple):
    """The origin of a tensor: the operator, or one of its parts, joins and splits."""

    operator: int
    place: int
    tensor: int


class _New(NamedTuple):
    """A node that joins or cuts an operator's output."""

    name: str
    op: str
    bytes: float


class _Splitting:
    """An `OpGraph` while its operators are being split."""

    def __init__(self, graph: OpGraph, splits: Mapping[str, Split]) -> None:
        self.graph = graph
        self.wholes = _chosen(graph, splits)
        self.bytes: list[float] = graph.tensor_bytes.tolist()
        outputs = np.zeros(len(self.bytes), np.int64) if graph.tensor_outputs is None else graph.tensor_outputs
        self.outputs: list[int] = outputs.tolist()
        self.behind: dict[int, list[_New]] = {}
        self.parts: dict[int, list[_Source]] = {}
        self.joined: dict[int, _Source] = {}
        self.cut: dict[tuple[int, Cut], list[_Source]] = {}
        # Rows: operator and place of the producer, the same of the consumer, tensor, argument.
        self.edges: list[tuple[int, int, int, int, int, int]] = []

    def result(self) -> OpGraph:
        """Returns the new graph."""
        split = np.zeros(self.graph.count, bool)
        split[list(self.wholes)] = True
        changed = split[self.graph.edges[:, 0]] | split[self.graph.edges[:, 1]]
        for producer, consumer, tensor, argument in self.graph.edges[changed].tolist():
            if tensor < 0:
                self._wait(producer, consumer)
            else:
                self._connect(producer, consumer, tensor, argument)
        return self._numbered(self.graph.edges[~changed])

    def _count(self, operator: int) -> int:
        whole = self.wholes.get(operator)
        return 1 if whole is None else whole.parts

    def _wait(self, producer: int, consumer: int) -> None:
        """Makes a consumer wait for all parts of an operator."""
        for before in range(self._count(producer)):
            self.edges += [(producer, before, consumer, after, -1, -1) for after in range(self._count(consumer))]

    def _connect(self, producer: int, consumer: int, tensor: int, argument: int) -> None:
        """Connects the consumer, or each of its parts, to the tensor or the part that it reads."""
        reader = self.wholes.get(consumer)
        if reader is None:
            sources = [self._whole(producer, tensor)]
        elif argument in reader.rule.shape_inputs:
            return  # Each part has a shape of its own, a constant.
        else:
            cut = reader.rule.input_cut(argument, reader.parts)
            sources = self._read_by_parts(producer, tensor, cut, reader.parts)
        for place, source in enumerate(sources):
            self._edge(source, consumer, place, argument)

    def _edge(self, source: _Source, consumer: int, place: int, argument: int) -> None:
        self.edges.append((source.operator, source.place, consumer, place, source.tensor, argument))

    def _read_by_parts(self, producer: int, tensor: int, cut: Cut | None, parts: int) -> list[_Source]:
        """Returns the tensor as each part of a consumer reads it."""
        whole = self.wholes.get(producer)
        if cut is not None and whole is not None and whole.cut(self.outputs[tensor]) == cut:
            return self._made_by_parts(producer, tensor)
        source = self._whole(producer, tensor)
        if cut is None or cut.axis == FIRST:
            return [source] * parts
        if (tensor, cut) not in self.cut:
            name = split_name(Ref(self.graph.names[producer], self.outputs[tensor]), cut)
            place = self._add(producer, _New(name, "SplitV", self.bytes[tensor]))
            self._edge(source, producer, place, 0)
            sizes = self._shares(tensor, cut.sizes(cut.length))
            self.cut[tensor, cut] = [
                _Source(producer, place, self._tensor(size, output)) for output, size in enumerate(sizes)
            ]
        return self.cut[tensor, cut]

    def _whole(self, producer: int, tensor: int) -> _Source:
        """Returns the whole tensor."""
        whole = self.wholes.get(producer)
        if whole is None:
            return _Source(producer, 0, tensor)
        parts = self._made_by_parts(producer, tensor)
        axis = whole.rule.output_axes[self.outputs[tensor]]
        if axis == FIRST:
            return parts[0]
        if tensor not in self.joined:
            self.joined[tensor] = self._join(producer, tensor, parts, whole)
        return self.joined[tensor]

    def _join(self, producer: int, tensor: int, parts: Sequence[_Source], whole: _Whole) -> _Source:
        """Adds the node that concatenates or adds the parts' results; two nodes for a mean."""
        ref, size = Ref(self.graph.names[producer], self.outputs[tensor]), self.bytes[tensor]
        adds = whole.rule.output_axes[ref.output] is None
        name = total_name(ref) if whole.rule.divisor else joined_name(ref)
        place = self._add(producer, _New(name, "AddN" if adds else "ConcatV2", size))
        for argument, part in enumerate(parts):
            self._edge(part, producer, place, argument)
        joined = _Source(producer, place, self._tensor(size, 0))
        if whole.rule.divisor:
            place = self._add(producer, _New(joined_name(ref), "RealDiv", size))
            self._edge(joined, producer, place, 0)
            joined = _Source(producer, place, self._tensor(size, 0))
        return joined

    def _made_by_parts(self, producer: int, tensor: int) -> list[_Source]:
        """Returns the tensors that the producer's parts make instead of this one."""
        if tensor not in self.parts:
            whole, output = self.wholes[producer], self.outputs[tensor]
            cut = whole.rule.output_axes[output] not in (None, FIRST)
            sizes = self._shares(tensor, whole.rule.sizes(whole.parts)) if cut else [self.bytes[tensor]] * whole.parts
            self.parts[tensor] = [
                _Source(producer, place, self._tensor(size, output)) for place, size in enumerate(sizes)
            ]
        return self.parts[tensor]

    def _add(self, operator: int, node: _New) -> int:
        """Adds a node after an operator; returns its place."""
        behind = self.behind.setdefault(operator, [])
        behind.append(node)
        return self._count(operator) + len(behind) - 1

    def _tensor(self, size: float, output: int) -> int:
        self.bytes.append(size)
        self.outputs.append(output)
        return len(self.bytes) - 1

    def _shares(self, tensor: int, sizes: Sequence[int]) -> list[float]:
        return [self.bytes[tensor] * size / sum(sizes) for size in sizes]

    def _numbered(self, unchanged: np.ndarray) -> OpGraph:
        """Returns the new graph, given the edges between operators that stay."""
        graph = self.graph
        counts = np.ones(graph.count, np.int64)
        for operator in self.wholes.keys() | self.behind.keys():
            counts[operator] = self._count(operator) + len(self.behind.get(operator, ()))
        first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        source = np.repeat(np.arange(graph.count), counts)  # the operator that a new one comes from
        seconds = graph.seconds[source]
        names = [graph.names[operator] for operator in source.tolist()]
        ops = [graph.ops[operator] for operator in source.tolist()]
        groups = graph.groups[source]
        fresh: list[int] = []  # operators that are groups of their own
        for operator, whole in self.wholes.items():
            start = int(first[operator])
            share = np.array(whole.rule.sizes(whole.parts))[:, None] / whole.rule.length
            launch = np.minimum(graph.launch_seconds, graph.seconds[operator])
            seconds[start : start + whole.parts] = launch + share * (graph.seconds[operator] - launch)
            for part in range(whole.parts):
                names[start + part] = part_name(graph.names[operator], part)
                ops[start + part] = whole.rule.part_op(graph.ops[operator])
            fresh += range(start + 1, start + whole.parts)  # The first part takes over the operator's group.
        for operator, behind in self.behind.items():
            for number, node in enumerate(behind, start=int(first[operator]) + self._count(operator)):
                names[number], ops[number] = node.name, node.op
                seconds[number] = graph.launch_seconds + node.bytes * graph.copy_seconds
                fresh.append(number)
        groups[fresh] = len(graph.pinned) + np.arange(len(fresh))
        edges, tensors = self._edges(unchanged, first)
        return OpGraph(
            names=tuple(names),
            ops=tuple(ops),
            seconds=seconds,
            edges=edges,
            tensor_bytes=np.array(self.bytes, np.float64)[tensors],
            groups=groups,
            pinned=np.concatenate((graph.pinned, np.full(len(fresh), -1))),
            stored_bytes=np.concatenate((graph.stored_bytes, np.zeros(len(fresh)))),
            splits={
                int(first[operator]): rules for operator, rules in graph.splits.items() if operator not in self.wholes
            },
            launch_seconds=graph.launch_seconds,
            copy_seconds=graph.copy_seconds,
            tensor_outputs=np.array(self.outputs, np.int64)[tensors],
        )

    def _edges(self, unchanged: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns all edges by consumer, and the old numbers of the tensors that anything reads."""
        rows = np.array(self.edges, np.int64).reshape(-1, 6)
        new = np.stack((first[rows[:, 0]] + rows[:, 1], first[rows[:, 2]] + rows[:, 3], rows[:, 4], rows[:, 5]), axis=1)
        kept = unchanged.copy()
        kept[:, :2] = first[kept[:, :2]]
        edges = np.concatenate((kept, new))
        edges = edges[np.argsort(edges[:, 1], kind="stable")]
        tensors = np.unique(edges[:, 2])
        tensors = tensors[tensors >= 0]
        number = np.full(len(self.bytes) + 1, -1)  # The last one is for edges without a tensor.
        number[tensors] = np.arange(len(tensors))
        edges[:, 2] = number[edges[:, 2]]
        return edges, tensors


def _chosen(graph: OpGraph, splits: Mapping[str, Split]) -> dict[int, _Whole]:
    """Returns the operators to split, by number."""
    numbers = {name: number for number, name in enumerate(graph.names) if name in splits}
    sizes = np.bincount(graph.groups, minlength=len(graph.pinned))
    wholes = {}
    for name, split in splits.items():
        number = numbers.get(name)
        if number is None:
            raise ValueError(f"there is no operator {name!r} that could be split")
        group = graph.groups[number]
        if sizes[group] > 1 or graph.pinned[group] >= 0:
            raise ValueError(
                f"operator {name!r} can't be split: it has to be where {sizes[group] - 1} others are"
                + (f", on device {graph.pinned[group]}" if graph.pinned[group] >= 0 else "")
            )
        wholes[number] = _Whole(chosen_rule(name, graph.splits.get(number, ()), split), split.parts)
    return wholes
