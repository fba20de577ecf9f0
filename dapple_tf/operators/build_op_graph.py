"""Builds an `OpGraph`, the graph search space of FD-DPS (definition 7), from a flat training graph and its costs."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.common.garbage import without_collection
from dapple_tf.operators.op_costs import OperatorCosts, device_kind
from dapple_tf.operators.op_graph import DisjointSets, OpGraph, Topology
from dapple_tf.operators.signatures import Fingerprints, OpSignature, TensorType, output_dtype_names, signature
from graph_passes.analysis.operator_shapes import CallShapes, Handles, ShapeInference, operator_shapes
from graph_passes.analysis.operator_traits import LOOPS
from graph_passes.analysis.split_rules import SplitRule, split_rules
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref, data_inputs, function_names
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.resource_use import called_functions, resource_name
from graph_passes.ir.tensorflow_bridge import (
    Shape,
    constant_value,
    dtype_size,
    function_graph,
    makes_resource,
    takes_functions,
)

logger = logging.getLogger(__name__)

_LEFT_OUT = frozenset({"Const", "Placeholder"})
"""Every device has its own copy of a constant, and batches come from the host."""


class _Inputs(NamedTuple):
    """Data and control inputs of a node, as (index of the node, output)."""

    data: list[tuple[int, int]]
    control: list[int]


@without_collection
def build_op_graph(
    graph: GraphDef,
    topology: Topology,
    costs: OperatorCosts,
    shapes: Mapping[Ref, Shape | None] | None = None,
    *,
    speeds: Sequence[float] | None = None,
    pinned: Mapping[str, int] | None = None,
) -> OpGraph:
    """Returns the operators of a flat graph with their costs.

    Args:
        graph: a flat training graph; it isn't changed.
        topology: the devices. An operator's time depends on a device's kind, which its name contains.
        costs: times of operators by kind of device.
        shapes: of all tensors, see `operator_shapes`; None infers them from the graph alone. An unknown dimension
            counts as 1 here: that is logged.
        speeds: of each device, `Device.speed`; None is 1 for each.
        pinned: name of a variable -> index of the device that already keeps it; others can be anywhere.

    Raises:
        PassError: the graph has a cycle or an unknown op, or ``pinned`` contradicts the graph.
        OperatorCostsError: nothing is known of a kind of device.
    """
    kinds = [device_kind(name) for name in topology.names]
    factors = np.ones(topology.count) if speeds is None else np.asarray(speeds, np.float64)
    if factors.shape != (topology.count,) or not (factors > 0).all():
        raise PassError(f"speeds are {speeds}; give one above 0 for each of the {topology.count} devices")
    reading = _Reading(graph, operator_shapes(graph, {}) if shapes is None else shapes)
    order = reading.order()
    nodes = [reading.nodes[index] for index in order]
    number = {index: position for position, index in enumerate(order)}
    edges, tensor_bytes, tensor_outputs = _edges(reading, order, number)
    together = _colocated(reading, order)
    return OpGraph(
        names=tuple(node.name for node in nodes),
        ops=tuple(node.op for node in nodes),
        seconds=_seconds(reading, order, kinds, costs) / factors,
        edges=edges,
        tensor_bytes=tensor_bytes,
        groups=np.array(together.groups, np.int64),
        pinned=np.array(_pins(together, pinned or {}, topology.count), np.int64),
        stored_bytes=np.array(together.stored, np.float64),
        splits=_splits(reading, order, together.groups),
        launch_seconds=np.array([costs.launch_seconds(kind) for kind in kinds]) / factors,
        copy_seconds=np.array([costs.copy_seconds(kind) for kind in kinds]) / factors,
        tensor_outputs=tensor_outputs,
    )


def operator_signatures(graph: GraphDef, shapes: Mapping[Ref, Shape | None]) -> dict[str, OpSignature]:
    """Maps the operators of a flat graph to their signatures, by which `build_op_graph` looks up times.

    Args:
        graph: a flat graph.
        shapes: of all tensors, the same as for `build_op_graph`.

    Raises:
        PassError: an op is unknown.
    """
    reading = _Reading(graph, shapes)
    return {node.name: reading.signature(index) for index, node in enumerate(reading.nodes) if node.op not in _LEFT_OUT}


class _Reading:
    """A graph, indexed: nodes by position, tensors by node and output."""

    def __init__(
        self, graph: GraphDef, shapes: Mapping[Ref, Shape | None], fingerprints: Fingerprints | None = None
    ) -> None:
        self.graph = graph
        self.nodes: list[NodeDef] = list(graph.node)
        position = {node.name: index for index, node in enumerate(self.nodes)}
        self.inputs: list[_Inputs] = []
        for node in self.nodes:
            data: list[tuple[int, int]] = []
            control: list[int] = []
            for text in node.input:
                if text.startswith("^"):
                    control.append(position[text[1:]])
                else:
                    name, output = Ref.parse(text)
                    data.append((position[name], output))
            self.inputs.append(_Inputs(data, control))
        self.shapes = shapes
        self.fingerprints = fingerprints or Fingerprints(graph.library)
        self.outputs = [self._outputs(node) for node in self.nodes]
        unknown = [node for node, made in zip(self.nodes, self.outputs, strict=True) if not all(map(_known, made))]
        if unknown:
            logger.debug(
                "the shapes of what %d of %d operators make aren't known, their unknown dimensions are taken for 1 "
                "(%s, ...)",
                *(len(unknown), len(self.nodes), ", ".join(f"{node.name} ({node.op})" for node in unknown[:3])),
            )

    def _outputs(self, node: NodeDef) -> tuple[TensorType, ...]:
        name, shapes = node.name, self.shapes
        return tuple(
            [TensorType(dtype, shapes.get(Ref(name, output))) for output, dtype in enumerate(output_dtype_names(node))]
        )

    def read(self, index: int) -> tuple[TensorType, ...]:
        """Returns the tensors that a node reads."""
        return tuple([self.outputs[producer][output] for producer, output in self.inputs[index].data])

    def signature(self, index: int) -> OpSignature:
        """Returns what a node's time depends on."""
        node = self.nodes[index]
        return signature(node, self.read(index), self.outputs[index], self.fingerprints.of(node))

    def order(self) -> list[int]:
        """Returns the operators' positions, producers first; ties in the graph's order.

        Raises:
            PassError: there is a cycle.
        """
        kept = [node.op not in _LEFT_OUT for node in self.nodes]
        pending = [0] * len(self.nodes)
        followers: list[list[int]] = [[] for _ in self.nodes]
        for index, (data, control) in enumerate(self.inputs):
            if kept[index]:
                before = {producer for producer, _ in data}
                before.update(control)
                for producer in before:
                    if kept[producer]:
                        pending[index] += 1
                        followers[producer].append(index)
        ready = collections.deque(index for index, keep in enumerate(kept) if keep and not pending[index])
        order: list[int] = []
        while ready:
            index = ready.popleft()
            order.append(index)
            for follower in followers[index]:
                pending[follower] -= 1
                if not pending[follower]:
                    ready.append(follower)
        if len(order) < sum(kept):
            Graph(self.graph).topological()  # raises an error that shows the cycle
        return order


def _known(tensor: TensorType) -> bool:
    """Returns whether a tensor's size is known; handles have none."""
    return tensor.dtype in ("variant", "resource", "string") or (tensor.shape is not None and None not in tensor.shape)


def _edges(
    reading: _Reading, order: Sequence[int], number: Mapping[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns edges by consumer, then by argument; and their tensors' sizes and output numbers.

    Control edges come last, and only from producers that the consumer doesn't read.
    """
    tensors: dict[tuple[int, int], int] = {}
    sizes: list[int] = []
    rows: list[tuple[int, int, int, int]] = []
    for consumer, index in enumerate(order):
        data, control = reading.inputs[index]
        read = set()
        for argument, place in enumerate(data):
            producer = number.get(place[0])
            if producer is None:
                continue
            tensor = tensors.get(place)
            if tensor is None:
                tensor = tensors[place] = len(sizes)
                sizes.append(reading.outputs[place[0]][place[1]].bytes)
            rows.append((producer, consumer, tensor, argument))
            read.add(producer)
        for waited in dict.fromkeys(control):
            producer = number.get(waited)
            if producer is not None and producer not in read:
                rows.append((producer, consumer, -1, -1))
    outputs = np.array([output for _, output in tensors], np.int64)
    return np.array(rows, np.int64).reshape(-1, 4), np.array(sizes, np.float64), outputs


def _seconds(reading: _Reading, order: Sequence[int], kinds: Sequence[str], costs: OperatorCosts) -> np.ndarray:
    """Returns E of formula 1 in seconds, on devices of speed 1: [operators, devices]."""
    columns = list(dict.fromkeys(kinds))
    seconds = OperatorSeconds(reading.graph, costs, reading.shapes)
    by_kind = np.zeros((len(order), len(columns)))
    for number, index in enumerate(order):
        made = reading.signature(index)
        by_kind[number] = [seconds.of(reading.nodes[index], made, kind) for kind in columns]
    return by_kind[:, [columns.index(kind) for kind in kinds]]


def _splits(reading: _Reading, order: Sequence[int], groups: Sequence[int]) -> dict[int, tuple[SplitRule, ...]]:
    """Returns how operators can be split; colocated ones can't."""
    members = collections.Counter(groups)
    splits = {}
    constants: dict[int, np.ndarray] = {}
    for number, index in enumerate(order):
        if members[groups[number]] > 1:
            continue
        known = {}
        for argument, (producer, _) in enumerate(reading.inputs[index].data):
            if reading.nodes[producer].op == "Const" and reading.outputs[producer][0].dtype in ("int32", "int64"):
                if producer not in constants:
                    constants[producer] = constant_value(reading.nodes[producer])
                known[argument] = constants[producer]
        inputs, outputs = ([tensor.shape for tensor in side] for side in (reading.read(index), reading.outputs[index]))
        if options := split_rules(reading.nodes[index], inputs, outputs, known):
            splits[number] = options
    return splits


# ---- seconds of operators: a loop, branch or call takes those inside, as often as they are known to run

_PASSED_ON = frozenset({"Identity", "Cast", "StopGradient", "EnsureShape"})
_COMPARED = frozenset({"Less", "LessEqual"})
_DEEPEST = 32
"""The deepest nesting of calls: more is a function that calls itself."""


class OperatorSeconds:
    """Seconds of the operators of a graph.

    Args:
        graph: a flat graph with its library.
        costs: of single operators.
        shapes: of the graph's tensors.
    """

    def __init__(self, graph: GraphDef, costs: OperatorCosts, shapes: Mapping[Ref, Shape | None]) -> None:
        self._library = graph.library
        self._fingerprints = Fingerprints(graph.library)
        self._nodes = {node.name: node for node in graph.node}
        self._costs = costs
        self._inference = ShapeInference(graph.library)
        self._handles = Handles(self._inference, graph, shapes, {})
        self._inside: dict[tuple[str, CallShapes, str], float] = {}
        self._depth = 0

    def of(self, node: NodeDef, made: OpSignature, kind: str) -> float:
        """Returns the seconds of one run of a node of the graph's top level.

        A loop takes its body's and condition's time for each round if the number of rounds is known (a static number of
        time steps), else for one; a branch takes the time of the slower side. A measurement of the whole node takes
        precedence.

        Args:
            node: the node.
            made: its signature.
            kind: of device.
        """
        elements = map(self._handles.element, data_inputs(node)) if takes_functions(node.op) else ()
        return self._seconds(node, made, tuple(elements), kind, self._nodes)

    def rounds(self, node: NodeDef) -> int | None:
        """Returns how often a loop of the top level runs its body; None if that depends on values."""
        return self._rounds(node, self._nodes)

    def _seconds(
        self,
        node: NodeDef,
        made: OpSignature,
        elements: tuple[Shape | None, ...],
        kind: str,
        around: Mapping[str, NodeDef],
    ) -> float:
        inner = None
        if takes_functions(node.op) and self._costs.measured(made, kind) is None:
            given = CallShapes(tuple(tensor.shape for tensor in made.inputs), elements)
            inner = self._run(node, given, kind, around)
        return self._costs.seconds(made, kind, inner)

    def _run(self, node: NodeDef, given: CallShapes, kind: str, around: Mapping[str, NodeDef]) -> float:
        if node.op in LOOPS:
            rounds = self._rounds(node, around)
            if rounds is None:
                logger.info("loop %s: its number of rounds isn't known, one is counted", node.name)
            return (1 if rounds is None else rounds) * sum(
                self._function(node.attr[part].func.name, given, kind) for part in ("cond", "body")
            )
        inside = given.arguments(node)
        return max((self._function(name, inside, kind) for name in function_names(node)), default=0.0)

    def _function(self, name: str, given: CallShapes, kind: str) -> float:
        """Returns the seconds of a function's operators, one after another."""
        key = (name, given, kind)
        if key not in self._inside:
            if self._depth == _DEEPEST:
                raise PassError(f"function {name!r} is called more than {_DEEPEST} calls deep; does it call itself?")
            graph, _ = function_graph(self._library, name)
            known = self._inference.of_function(graph, given)
            reading = _Reading(graph, known.shapes, self._fingerprints)
            nodes = {node.name: node for node in reading.nodes}
            total = 0.0
            self._depth += 1
            for index, node in enumerate(reading.nodes):
                if node.op not in _LEFT_OUT:
                    elements = tuple(known.elements.get(ref) for ref in data_inputs(node))
                    total += self._seconds(node, reading.signature(index), elements, kind, nodes)
            self._depth -= 1
            self._inside[key] = total
        return self._inside[key]

    def _rounds(self, node: NodeDef, around: Mapping[str, NodeDef]) -> int | None:
        """Returns the fewest rounds by the condition's comparisons ``counter < limit``, for counters that step by 1."""
        condition, results = function_graph(self._library, node.attr["cond"].func.name)
        body, after = function_graph(self._library, node.attr["body"].func.name)
        inside = {part.name: part for part in condition.node}
        arguments = [part.name for part in condition.node if part.op == "Placeholder"]
        steps = {part.name: part for part in body.node}
        body_arguments = [part.name for part in body.node if part.op == "Placeholder"]
        given = data_inputs(node)

        def argument(ref: Ref) -> int | None:
            """Returns the index of the condition's argument that a tensor is."""
            name = _source(ref, inside).node
            return arguments.index(name) if name in arguments else None

        def value(ref: Ref) -> int | None:
            index = argument(ref)
            return _scalar(ref, inside) if index is None else self._outer(given[index], around)

        rounds = []
        for part in condition.node:
            if part.op not in _COMPARED or not _needed(part.name, results, inside):
                continue
            counter, limit = data_inputs(part)
            index = argument(counter)
            if index is None or not _steps_by_one(after[index], body_arguments[index], steps):
                continue
            start, stop = self._outer(given[index], around), value(limit)
            if start is not None and stop is not None and stop >= 0:
                rounds.append(max(0, stop - start + (part.op == "LessEqual")))
        return min(rounds, default=None)

    def _outer(self, ref: Ref, around: Mapping[str, NodeDef]) -> int | None:
        """Returns the value of an integer scalar of a graph: a constant, or another loop's number of rounds."""
        place = _source(ref, around)
        node = around.get(place.node)
        if node is not None and node.op in LOOPS and place.output == 0:
            start, rounds = self._outer(data_inputs(node)[0], around), self._rounds(node, around)
            return None if start is None or rounds is None else start + rounds
        return _scalar(place, around)


def _source(ref: Ref, nodes: Mapping[str, NodeDef]) -> Ref:
    """Returns the origin of a tensor's value, through nodes that only pass it on."""
    while (node := nodes.get(ref.node)) is not None and node.op in _PASSED_ON:
        ref = data_inputs(node)[0]
    return ref


def _scalar(ref: Ref, nodes: Mapping[str, NodeDef]) -> int | None:
    """Returns the value of a constant integer scalar; None for anything else."""
    node = nodes.get(_source(ref, nodes).node)
    if node is None or node.op != "Const":
        return None
    value = constant_value(node)
    return int(value) if value.shape == () and np.issubdtype(value.dtype, np.integer) else None


def _steps_by_one(result: Ref, argument: str, nodes: Mapping[str, NodeDef]) -> bool:
    """Returns whether a loop's result is its argument + 1."""
    node = nodes.get(_source(result, nodes).node)
    if node is None or node.op not in ("Add", "AddV2"):
        return False
    one, other = data_inputs(node)
    return (_source(one, nodes).node == argument and _scalar(other, nodes) == 1) or (
        _source(other, nodes).node == argument and _scalar(one, nodes) == 1
    )


def _needed(name: str, results: Sequence[Ref], nodes: Mapping[str, NodeDef]) -> bool:
    """Returns whether a loop's condition requires a comparison: is the comparison, or an "and" of it and others."""
    pending = list(results)
    while pending:
        place = _source(pending.pop(), nodes)
        if place.node == name:
            return True
        node = nodes.get(place.node)
        if node is not None and node.op == "LogicalAnd":
            pending += data_inputs(node)
    return False


# ---- operators that must share a device: a variable and all that touches it, makers and readers of a handle

_HANDLES = frozenset({"resource", "variant"})
_CLASS = "_class"
_LOCATION = b"loc:@"


class Storage(NamedTuple):
    """A resource that a node refers to by name rather than by an edge.

    Attributes:
        op: op type of the handle's node.
        name: the name that the device keeps it under.
        bytes: of a variable's value, 0 for others.
    """

    op: str
    name: str
    bytes: int


class Colocation(NamedTuple):
    """Groups of operators.

    Attributes:
        groups: number of each operator's group; groups are numbered by their first operators.
        stored: group -> bytes of its variables, 0 for those without.
        variables: name of a variable -> its group.
    """

    groups: list[int]
    stored: list[int]
    variables: dict[str, int]


class StorageFinder:
    """Finds the resources that nodes refer to by name, also inside the functions that they call."""

    def __init__(self, library: Iterable[FunctionDef]) -> None:
        self._functions = {function.signature.name: function for function in library}
        self._found: dict[str, tuple[Storage, ...]] = {}

    def of(self, node: NodeDef) -> tuple[Storage, ...]:
        """Returns the resources that a node refers to."""
        if node.op == "VarHandleOp":
            attrs = node.attr
            size = dtype_size(attrs["dtype"].type)
            for dim in attrs["shape"].shape.dim:
                size *= max(0, dim.size)
            return (Storage(node.op, resource_name(node), size),)
        if node.op in self._functions or takes_functions(node.op):
            called = called_functions(node, self._functions)
            return tuple(dict.fromkeys(storage for name in called for storage in self._within(name)))
        return (Storage(node.op, resource_name(node), 0),) if makes_resource(node.op) else ()

    def _within(self, name: str) -> tuple[Storage, ...]:
        if name not in self._found:
            self._found[name] = ()  # for functions that call themselves
            nodes = self._functions[name].node_def
            self._found[name] = tuple(dict.fromkeys(storage for node in nodes for storage in self.of(node)))
        return self._found[name]


def _colocated(reading: _Reading, order: Sequence[int]) -> Colocation:
    """Groups the operators of a graph.

    A group has the operators that refer to the same variable, table, queue or iterator by its handle's name (also
    inside functions), the maker and readers of a resource or a variant (a handle is useful only where its resource is;
    a list of tensors would be sent whole), and nodes with the same ``_class`` attribute. Readers of a handle that is
    fed share a group, too.
    """
    nodes = [reading.nodes[index] for index in order]
    left_out = [index for index, node in enumerate(reading.nodes) if node.op in _LEFT_OUT]
    number_of = {index: number for number, index in enumerate([*order, *left_out])}
    position = {node.name: number for number, node in enumerate(nodes)}
    sets = DisjointSets(len(number_of))
    finder = StorageFinder(reading.graph.library.function)
    first: dict[tuple[str, str], int] = {}
    sizes: dict[tuple[str, str], int] = {}
    for number, node in enumerate(nodes):
        for op, name, size in finder.of(node):
            key = op, name
            sets.union(first.setdefault(key, number), number)
            sizes[key] = max(size, sizes.get(key, 0))
        if _CLASS in node.attr:
            for text in node.attr[_CLASS].list.s:
                other = position.get(text.removeprefix(_LOCATION).decode())
                if other is not None:
                    sets.union(number, other)
    for number, index in enumerate(order):
        for producer, output in reading.inputs[index].data:
            if reading.outputs[producer][output].dtype in _HANDLES:
                sets.union(number, number_of[producer])
    numbers: dict[int, int] = {}
    groups = [numbers.setdefault(sets.find(number), len(numbers)) for number in range(len(nodes))]
    stored = [0] * len(numbers)
    variables: dict[str, int] = {}
    for (op, name), number in first.items():
        stored[groups[number]] += sizes[op, name]
        if op == "VarHandleOp":
            variables[name] = groups[number]
    return Colocation(groups, stored, variables)


def _pins(colocation: Colocation, pinned: Mapping[str, int], devices: int) -> list[int]:
    """Returns the device of each group whose variables are already placed, -1 for the others.

    Args:
        colocation: the groups.
        pinned: name of a variable -> index of its device; variables that no operator touches are ignored.
        devices: number of devices.

    Raises:
        PassError: variables of one group are on different devices, or a device doesn't exist.
    """
    device_of = [-1] * len(colocation.stored)
    by: dict[int, str] = {}
    for name, device in pinned.items():
        if not 0 <= device < devices:
            raise PassError(f"variable {name!r} is on device {device}, but the devices are 0 to {devices - 1}")
        group = colocation.variables.get(name)
        if group is None:
            continue
        if device_of[group] not in (-1, device):
            raise PassError(
                f"variable {name!r} is on device {device} and {by[group]!r} on device {device_of[group]}, but an "
                f"operator needs both; put them on one device"
            )
        device_of[group] = device
        by[group] = name
    return device_of
