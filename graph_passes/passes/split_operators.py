"""Splits heavy operators into parts, each of which can have its own device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.split_rules import (
    Cut,
    Split,
    Splitting,
    Whole,
    chosen_rule,
    part_name,
    split_name,
    split_rules,
)
from graph_passes.errors import PassError
from graph_passes.ir.collectives import SUM_OP
from graph_passes.ir.graph import (
    BYTES_ATTR,
    PHASE_ATTR,
    SPLIT_DTYPES,
    Builder,
    Graph,
    GraphDef,
    NodeDef,
    Ref,
    control_inputs,
    copied,
    dtype_attr,
    make_node,
    own_attrs,
    set_inputs,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Fact, Program, Step
from graph_passes.ir.tensorflow_bridge import Shape, constant_value, make_constant, output_dtypes

_SMALL = 64
"""The most elements of a constant that could hold axes, a permutation or strides."""


@dataclasses.dataclass(frozen=True)
class SplitOperators:
    """Splits operators along dimensions of their tensors, with the same results.

        a -> Conv2D -> b        becomes   a -> SplitV -> Conv2D/part0, Conv2D/part1 -> ConcatV2 -> b
        Conv2D -> Relu -> b               Conv2D/part0 -> Relu/part0, Conv2D/part1 -> Relu/part1 -> ConcatV2 -> b

    Parts are named ``N/part<k>``. Their cut inputs come from a node ``<producer>/split_<output>_<cut>``, shared by all
    readers with the same cut; from the producer's parts, if they are cut alike; or, for a constant, from smaller
    constants. ``N/joined_<output>`` is the whole result, a concatenation or a sum; it exists if anything reads it
    whole. The parts of a mean are sums, whose total is divided. All of them have the device and the roles of their
    operator. Nodes that waited for the operator wait for its parts.

    Results are the same but for the last bits, see `split_rules`.

    Attributes:
        splits: name of an operator -> how it is split.
        shapes: of all tensors that these operators read and make.
        optional: operators that stay whole if they can't be split like this, such as the same operator of a smaller
            micro-batch.

    Source: FD-DPS (Mathematics 2022, 10, 4788), section 4.1 and algorithm 3, lines 2 to 6.
    """

    name: ClassVar[str] = "split_operators"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    splits: Mapping[str, Split]
    shapes: Mapping[Ref, Shape | None]
    optional: frozenset[str] = frozenset()

    def run(self, program: Program) -> Program:
        """Flat step program -> the same with parts in place of operators.

        Raises:
            PassError: there is no such operator, or it can't be split like this.
        """
        if not self.splits:
            return program
        step = program.own_step
        splitting = GraphSplitting(program.graph, self.splits, self.shapes, self.optional)
        split = splitting.result([*step.results, *step.gradients.values()])
        return program.replace(graph=split.graph, step=_redirected(step, split, splitting.wholes))


class SplitGraph(NamedTuple):
    """A graph whose operators were split.

    Attributes:
        graph: the graph.
        joined: output of a split operator -> the whole tensor, for outputs that are read whole.
    """

    graph: GraphDef
    joined: Mapping[Ref, Ref]


def _redirected(step: Step, split: SplitGraph, splits: Mapping[str, Whole]) -> Step:
    """Returns the step with its tensors and nodes replaced."""
    for what in (*step.entry.values(), *([step.train] if step.train is not None else [])):
        if what in splits:
            raise PassError(f"{what!r} can't be split: the step is ordered by it as one node")

    def now(ref: Ref) -> Ref:
        return split.joined.get(ref, ref)

    def parts(name: str) -> tuple[str, ...]:
        return tuple(part_name(name, part) for part in range(splits[name].parts)) if name in splits else (name,)

    return dataclasses.replace(
        step.moved(now),
        exit={task: tuple(part for name in names for part in parts(name)) for task, names in step.exit.items()},
        values={key: now(ref) for key, ref in step.values.items() if ref.node not in splits or ref in split.joined},
    )


class GraphSplitting(Splitting[Ref]):
    """A graph while its operators are being split; the given one isn't changed.

    Args:
        graph: a flat graph.
        splits: as in `SplitOperators`, and so the next two.
        shapes: see ``splits``.
        optional: see ``splits``.

    Raises:
        PassError: there is no such operator, or it can't be split like this.
    """

    def __init__(
        self,
        graph: GraphDef,
        splits: Mapping[str, Split],
        shapes: Mapping[Ref, Shape | None],
        optional: frozenset[str] = frozenset(),
    ) -> None:
        self.view = Graph(graph)
        self.shapes = shapes
        self.builder = Builder(GraphDef(versions=graph.versions, library=graph.library))
        for name in self.view.nodes:
            self.builder.names.fresh(name)
        wholes: dict[str, Whole] = {}
        for name, split in splits.items():
            try:
                wholes[name] = self._chosen(name, split)
            except PassError:
                if name not in optional:
                    raise
        super().__init__(wholes)
        self.behind: dict[str, list[NodeDef]] = {}  # operator -> nodes that join or cut its outputs
        self.parts: dict[str, list[NodeDef]] = {}

    def result(self, fetched: Iterable[Ref] = ()) -> SplitGraph:
        """Returns the graph whose operators have been split; ``fetched`` tensors are wanted whole."""
        changed: dict[str, NodeDef] = {}
        for name, node in self.view.nodes.items():
            if name in self.wholes:
                self.parts[name] = self._make_parts(node, self.wholes[name])
            elif any(ref.node in self.wholes for ref in self.view.inputs(name)) or any(
                waited in self.wholes for waited in control_inputs(node)
            ):
                changed[name] = copied(node)
                refs = self.view.inputs(name)
                self._rewire(changed[name], [self.whole(ref) for ref in refs], refs)
        for ref in fetched:
            self.whole(ref)
        graph = self.builder.graph
        for name, node in self.view.nodes.items():
            graph.node.extend(self.parts.get(name) or [changed.get(name, node)])
            graph.node.extend(self.behind.get(name, ()))
        self._forget_places(graph)
        return SplitGraph(graph, {ref: now for ref, now in self.joined.items() if ref != now})

    # ---- what is split

    def _chosen(self, name: str, split: Split) -> Whole:
        if name not in self.view:
            raise PassError(f"there is no operator {name!r} that could be split")
        node = self.view.nodes[name]
        inputs = [self.shapes.get(ref) for ref in self.view.inputs(name)]
        outputs = [self.shapes.get(Ref(name, index)) for index in range(len(output_dtypes(node)))]
        try:
            rule = chosen_rule(name, split_rules(node, inputs, outputs, self._constants(name)), split)
        except ValueError as error:
            raise PassError(f"{error} ({node.op}, which reads {inputs} and makes {outputs})") from error
        return Whole(rule, split.parts)

    def _constants(self, name: str) -> dict[int, np.ndarray]:
        """Returns the inputs of a node that may be axes and the like."""
        constants = {}
        for argument, ref in enumerate(self.view.inputs(name)):
            producer = self.view.nodes[ref.node]
            if producer.op == "Const" and producer.attr["dtype"].type in _INTEGERS:
                size = int(np.prod([dim.size for dim in producer.attr["value"].tensor.tensor_shape.dim]))
                if size <= _SMALL:
                    constants[argument] = constant_value(producer)
        return constants

    # ---- parts

    def _make_parts(self, node: NodeDef, whole: Whole) -> list[NodeDef]:
        refs = self.view.inputs(node.name)
        shapes = whole.rule.shape_inputs
        sources = [
            self._shapes_of_parts(node, ref, shapes[argument], whole)
            if argument in shapes
            else self.read_by_parts(ref, argument, whole)
            for argument, ref in enumerate(refs)
        ]
        read = [ref for argument, ref in enumerate(refs) if argument not in shapes]
        parts = []
        for number in range(whole.parts):
            part = copied(node)
            part.name = self._name(part_name(node.name, number))
            part.op = whole.rule.part_op(part.op)
            for key in ("_class", "_output_shapes"):
                if key in part.attr:
                    del part.attr[key]
            self._rewire(part, [source[number] for source in sources], read)
            parts.append(part)
        return parts

    def _rewire(self, node: NodeDef, inputs: Sequence[Ref], read: Iterable[Ref]) -> None:
        """Replaces a node's inputs. It keeps its control edges, except to nodes of ``read``, which it needs anyway."""
        needed = {ref.node for ref in read}
        waits: list[str] = []
        for waited in control_inputs(node):
            if waited not in needed:
                whole = self.wholes.get(waited)
                waits += [waited] if whole is None else [part_name(waited, number) for number in range(whole.parts)]
        set_inputs(node, inputs, waits)

    def _shapes_of_parts(self, node: NodeDef, ref: Ref, axis: int, whole: Whole) -> list[Ref]:
        """Returns constants that replace the first output's shape."""
        shape = [size or 0 for size in self.shapes.get(Ref(node.name)) or ()]
        constants = []
        for size in Cut.of(axis, whole.parts, whole.rule.length).sizes(shape[axis]):
            part = (*shape[:axis], size, *shape[axis + 1 :])
            constants.append(self.builder.const(part, self._dtype(ref), device=node.device))
        return constants

    # ---- tensors

    def unsplit(self, ref: Ref) -> Ref:
        """See `Splitting`."""
        return ref

    def made_by_parts(self, ref: Ref, whole: Whole) -> list[Ref]:
        """See `Splitting`."""
        return [Ref(part_name(ref.node, number), ref.output) for number in range(whole.parts)]

    def join(self, ref: Ref, name: str, op: str, inputs: Sequence[Ref], operand: float | None = None) -> Ref:
        """See `Splitting`."""
        dtype = self._dtype(ref)
        kind: dict[str, Any] = {"T": dtype_attr(dtype)}
        if op != "RealDiv":
            kind["N"] = len(inputs)
        if op == "ConcatV2":
            dtype = types_pb2.DT_INT32
            kind["Tidx"] = dtype_attr(dtype)
        if operand is not None:
            inputs = [*inputs, self.builder.const(operand, dtype, device=self.view.nodes[ref.node].device)]
        return self._put(ref.node, name, op, inputs, kind)

    def cut(self, ref: Ref, tensor: Ref, cut: Cut) -> list[Ref]:
        """See `Splitting`."""
        if self.view.nodes[ref.node].op == "Const":
            return self._cut_constant(ref, cut)
        device, dtype, name = self.view.nodes[ref.node].device, self._dtype(ref), split_name(ref, cut)
        if dtype not in SPLIT_DTYPES:  # Parts are nodes of their own, behind the one that other modules know.
            tensor = self._put(ref.node, name, "Identity", [tensor], {"T": dtype_attr(dtype)})
        nodes, sizes = self.builder.graph.node, cut.sizes(self._length(ref, cut.axis))
        before = len(nodes)
        parts = self.builder.split(name, tensor, dtype, sizes, cut.axis, device=device)
        if dtype in SPLIT_DTYPES:
            self._check_name(parts[0].node, name)
        added = [copied(node) for node in nodes[before:]]
        del nodes[before:]
        for node in added:
            if node.op == "Const":
                nodes.append(node)
            else:
                self._put_behind(ref.node, node)
        return parts

    def _cut_constant(self, ref: Ref, cut: Cut) -> list[Ref]:
        """Returns smaller constants, since every device has its own."""
        producer = self.view.nodes[ref.node]
        value = constant_value(producer)
        stops = np.cumsum(cut.sizes(value.shape[cut.axis]))[:-1]
        constants = []
        for number, part in enumerate(np.split(value, stops, axis=cut.axis)):
            node = make_node(self._name(part_name(split_name(ref, cut), number)), "Const", device=producer.device)
            make_constant(node, part)
            self._mark(node, producer)
            self.behind.setdefault(ref.node, []).append(node)
            constants.append(Ref(node.name))
        return constants

    def _put(self, operator: str, name: str, op: str, inputs: Sequence[Ref], kind: Mapping[str, Any]) -> Ref:
        """Adds a node behind an operator, with its device and roles."""
        device = self.view.nodes[operator].device
        self._put_behind(operator, make_node(self._name(name), op, inputs, device=device, attrs=kind))
        return Ref(name)

    def _put_behind(self, operator: str, node: NodeDef) -> None:
        original = self.view.nodes[operator]
        self._mark(node, original)
        if original.op == SUM_OP and PHASE_ATTR in original.attr:  # It isn't a part of the all-reduce that it cuts.
            node.attr[PHASE_ATTR].s = NodeKind.SPLIT.text.encode()
            node.attr.pop(BYTES_ATTR, None)
        self.behind.setdefault(operator, []).append(node)

    def _mark(self, node: NodeDef, original: NodeDef) -> None:
        for key, value in own_attrs(original).items():
            node.attr[key].CopyFrom(value)

    def _name(self, name: str) -> str:
        """Checks and returns a name that other modules compute as well."""
        self._check_name(self.builder.names.fresh(name), name)
        return name

    def _check_name(self, name: str, wanted: str) -> None:
        if name != wanted:
            raise PassError(f"there is a node {wanted!r} already; rename it, or don't split what it is named after")

    def _dtype(self, ref: Ref) -> int:
        return dtype_of(self.view, ref)

    def _length(self, ref: Ref, axis: int) -> int:
        shape = self.shapes.get(ref)
        assert shape is not None and shape[axis] is not None, ref  # or there would have been no rule
        return shape[axis] or 0

    def _forget_places(self, graph: GraphDef) -> None:
        """Removes colocation with operators that are gone."""
        gone = {f"loc:@{name}".encode() for name in self.wholes}
        for node in graph.node:
            if "_class" in node.attr:
                kept = [place for place in node.attr["_class"].list.s if place not in gone]
                del node.attr["_class"].list.s[:]
                node.attr["_class"].list.s.extend(kept)


_INTEGERS = frozenset({types_pb2.DT_INT32, types_pb2.DT_INT64})
