"""Operators that must share a device: a variable and all that touches it, makers and readers of a handle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dapple_tf.operators.signatures import output_dtype_names
from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef, NodeDef
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.resource_use import called_functions, resource_name
from graph_passes.ir.tensorflow_bridge import dtype_size, makes_resource, takes_functions

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


class DisjointSets:
    """Sets of integers that grow together (union by size, path halving)."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._size = [1] * count

    def find(self, item: int) -> int:
        """Returns the representative of an item's set."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def union(self, one: int, other: int) -> None:
        """Makes two sets one."""
        one, other = self.find(one), self.find(other)
        if one != other:
            if self._size[one] < self._size[other]:
                one, other = other, one
            self._parent[other] = one
            self._size[one] += self._size[other]


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


def colocate(
    graph: GraphDef,
    nodes: Sequence[NodeDef],
    reads: Iterable[tuple[int, NodeDef, int]],
    left_out: Iterable[NodeDef],
) -> Colocation:
    """Groups the operators of a graph.

    A group has the operators that refer to the same variable, table, queue or iterator by its handle's name (also
    inside functions), the maker and readers of a resource or a variant (a handle is useful only where its resource is;
    a list of tensors would be sent whole), and nodes with the same ``_class`` attribute.

    Args:
        graph: the graph.
        nodes: its operators.
        reads: (operator, node whose tensor it reads, which output) for each tensor that an operator reads.
        left_out: nodes that aren't operators (fed placeholders); readers of their handles share a group too.
    """
    position = {node.name: number for number, node in enumerate(nodes)}
    outside = {node.name: len(nodes) + number for number, node in enumerate(left_out)}
    sets = DisjointSets(len(nodes) + len(outside))
    finder = StorageFinder(graph.library.function)
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
    dtypes: dict[str, tuple[str, ...]] = {}
    for number, producer, output in reads:
        made = dtypes.get(producer.name)
        if made is None:
            made = dtypes[producer.name] = output_dtype_names(producer)
        if made[output] in _HANDLES:
            other = position.get(producer.name)
            sets.union(number, outside[producer.name] if other is None else other)
    numbers: dict[int, int] = {}
    groups = [numbers.setdefault(sets.find(number), len(numbers)) for number in range(len(nodes))]
    stored = [0] * len(numbers)
    variables: dict[str, int] = {}
    for (op, name), number in first.items():
        stored[groups[number]] += sizes[op, name]
        if op == "VarHandleOp":
            variables[name] = groups[number]
    return Colocation(groups, stored, variables)


def pin(colocation: Colocation, pinned: Mapping[str, int], devices: int) -> list[int]:
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
