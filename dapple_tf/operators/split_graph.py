"""Splits operators of an `OpGraph` into parts, as `graph_passes.passes.split_operators` does to graphs, node for node.

Source: FD-DPS (Mathematics 2022, 10, 4788), section 4.1 and algorithm 3, lines 2 to 6.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.op_graph import OpGraph
from graph_passes.analysis.split_rules import (
    FIRST,
    Cut,
    Split,
    Splitting,
    Whole,
    chosen_rule,
    part_name,
    split_name,
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


class _Source(NamedTuple):
    """The origin of a tensor: the operator, or one of its parts, joins and cuts."""

    operator: int
    place: int
    tensor: int


class _New(NamedTuple):
    """A node that joins or cuts an operator's output."""

    name: str
    op: str
    bytes: float


class _Splitting(Splitting[_Source]):
    """An `OpGraph` while its operators are being split."""

    def __init__(self, graph: OpGraph, splits: Mapping[str, Split]) -> None:
        self.graph, self.splits = graph, splits
        self.numbers = {name: number for number, name in enumerate(graph.names)}
        super().__init__(_chosen(graph, self.numbers, splits))
        self.bytes: list[float] = graph.tensor_bytes.tolist()
        outputs = np.zeros(len(self.bytes), np.int64) if graph.tensor_outputs is None else graph.tensor_outputs
        self.outputs: list[int] = outputs.tolist()
        self.tensors: dict[Ref, int] = {}  # of the given graph, for edges that change
        self.behind: dict[int, list[_New]] = {}
        self.parts: dict[Ref, list[_Source]] = {}
        # Rows: operator and place of the producer, the same of the consumer, tensor, argument.
        self.edges: list[tuple[int, int, int, int, int, int]] = []

    def result(self) -> OpGraph:
        """Returns the new graph."""
        names = self.graph.names
        split = np.zeros(self.graph.count, bool)
        split[[self.numbers[name] for name in self.wholes]] = True
        changed = split[self.graph.edges[:, 0]] | split[self.graph.edges[:, 1]]
        for producer, consumer, tensor, argument in self.graph.edges[changed].tolist():
            reader = self.wholes.get(names[consumer])
            if tensor < 0:  # It waits for all parts.
                places = itertools.product(range(self._count(producer)), range(self._count(consumer)))
                self.edges += [(producer, before, consumer, after, -1, -1) for before, after in places]
                continue
            ref = Ref(names[producer], self.outputs[tensor])
            self.tensors[ref] = tensor
            if reader is None:
                self._edge(self.whole(ref), consumer, 0, argument)
            elif argument not in reader.rule.shape_inputs:  # Each part has a shape of its own, a constant.
                for place, source in enumerate(self.read_by_parts(ref, argument, reader)):
                    self._edge(source, consumer, place, argument)
        return self._numbered(self.graph.edges[~changed])

    def _count(self, operator: int) -> int:
        whole = self.wholes.get(self.graph.names[operator])
        return 1 if whole is None else whole.parts

    def _edge(self, source: _Source, consumer: int, place: int, argument: int) -> None:
        self.edges.append((source.operator, source.place, consumer, place, source.tensor, argument))

    def unsplit(self, ref: Ref) -> _Source:
        """See `Splitting`."""
        return _Source(self.numbers[ref.node], 0, self.tensors[ref])

    def made_by_parts(self, ref: Ref, whole: Whole) -> list[_Source]:
        """See `Splitting`."""
        if ref not in self.parts:
            size, producer = self.bytes[self.tensors[ref]], self.numbers[ref.node]
            cut = whole.rule.output_axes[ref.output] not in (None, FIRST)
            sizes = _shares(size, whole.rule.sizes(whole.parts)) if cut else [size] * whole.parts
            self.parts[ref] = [
                _Source(producer, place, self._tensor(part, ref.output)) for place, part in enumerate(sizes)
            ]
        return self.parts[ref]

    def join(self, ref: Ref, name: str, op: str, inputs: Sequence[_Source], operand: float | None = None) -> _Source:
        """See `Splitting`."""
        producer, size = self.numbers[ref.node], self.bytes[self.tensors[ref]]
        place = self._add(producer, _New(name, op, size))
        for argument, source in enumerate(inputs):
            self._edge(source, producer, place, argument)
        return _Source(producer, place, self._tensor(size, 0))

    def cut(self, ref: Ref, tensor: _Source, cut: Cut) -> list[_Source]:
        """See `Splitting`."""
        producer, size = self.numbers[ref.node], self.bytes[self.tensors[ref]]
        place = self._add(producer, _New(split_name(ref, cut), "SplitV", size))
        self._edge(tensor, producer, place, 0)
        shares = _shares(size, cut.sizes(cut.length))
        return [_Source(producer, place, self._tensor(share, output)) for output, share in enumerate(shares)]

    def _add(self, operator: int, node: _New) -> int:
        """Adds a node after an operator; returns its place."""
        behind = self.behind.setdefault(operator, [])
        behind.append(node)
        return self._count(operator) + len(behind) - 1

    def _tensor(self, size: float, output: int) -> int:
        self.bytes.append(size)
        self.outputs.append(output)
        return len(self.bytes) - 1

    def _numbered(self, unchanged: np.ndarray) -> OpGraph:
        """Returns the new graph, given the edges between operators that stay."""
        graph = self.graph
        counts = np.ones(graph.count, np.int64)
        wholes = {self.numbers[name]: whole for name, whole in self.wholes.items()}
        for operator in wholes.keys() | self.behind.keys():
            counts[operator] = self._count(operator) + len(self.behind.get(operator, ()))
        first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        source = np.repeat(np.arange(graph.count), counts)  # the operator that a new one comes from
        seconds = graph.seconds[source]
        names = [graph.names[operator] for operator in source.tolist()]
        ops = [graph.ops[operator] for operator in source.tolist()]
        groups = graph.groups[source]
        fresh: list[int] = []  # operators that are groups of their own
        for operator, whole in wholes.items():
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
            splits={int(first[operator]): rules for operator, rules in graph.splits.items() if operator not in wholes},
            launch_seconds=graph.launch_seconds,
            copy_seconds=graph.copy_seconds,
            tensor_outputs=np.array(self.outputs, np.int64)[tensors],
            applied=self.splits,
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


def _shares(size: float, lengths: Sequence[int]) -> list[float]:
    return [size * length / sum(lengths) for length in lengths]


def _chosen(graph: OpGraph, numbers: Mapping[str, int], splits: Mapping[str, Split]) -> dict[str, Whole]:
    """Returns the operators to split."""
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
        wholes[name] = Whole(chosen_rule(name, graph.splits.get(number, ()), split), split.parts)
    return wholes
