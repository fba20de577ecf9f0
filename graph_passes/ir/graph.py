"""Typed access to a GraphDef: tensors are references, not strings.

A GraphDef names a tensor ``node``, ``node:1`` or, for a control edge, ``^node``. These strings are parsed once, here,
and printed once, when a node is made. Everything in between works with :class:`Ref`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import Message
from tensorflow.core.framework import (
    attr_value_pb2,
    function_pb2,
    graph_pb2,
    node_def_pb2,
    tensor_pb2,
    tensor_shape_pb2,
    types_pb2,
)

from graph_passes.errors import PassError

GraphDef: TypeAlias = graph_pb2.GraphDef
NodeDef: TypeAlias = node_def_pb2.NodeDef
AttrValue: TypeAlias = attr_value_pb2.AttrValue
_Message = TypeVar("_Message", bound=Message)

# Attributes that carry roles, so that a dumped GraphDef explains itself in any viewer.
OWN_ATTRS = "_dapple_"
"""Prefix of the attributes that say what a node is for."""
COMPILED_ATTR = "_XlaMustCompile"
"""TensorFlow's: that XLA compiles a function, or what a call calls."""
COLOCATION = "_class"
"""TensorFlow's: the nodes beside which a node stands, by name."""
OWN_GRADIENT_ATTR = "_custom_gradient"
"""Of an IdentityN: a graph that computes ``result<k>``, the gradient of its input k, from ``gradient<k>``, the gradient
of its output k, and ``captured<k>``, the k-th of its last inputs, which exist for that only."""
CAPTURED_ATTR = "_custom_gradient_captured"
"""Of an IdentityN: the number of its captured inputs."""
LAYER_ATTR = "_dapple_layer"
STAGE_ATTR = "_dapple_stage"
PHASE_ATTR = "_dapple_phase"
MICRO_BATCH_ATTR = "_dapple_micro_batch"
REPLICA_ATTR = "_dapple_replica"
GROUP_ATTR = "_dapple_group"
"""The stages of the parameter group that a node reduces or updates."""
POSITION_ATTR = "_dapple_position"
"""A node's place in the order in which the model made it, written by capture."""
CALL_ATTR = "_dapple_call"
"""The inlined call that a node at the top level comes from."""
BRACKET_ATTR = "_dapple_bracket"
"""Of the entry and the exit of an inlined call, which order its operators and do nothing else."""
BYTES_ATTR = "_dapple_bytes"
"""Of the vector that a node reduces."""
REDUCTION_ATTR = "_dapple_reduction"
"""The number of the all-reduce that a node is a part of."""


def copied(message: _Message) -> _Message:
    """Returns a copy of a graph, a node or a function, to be changed."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


class Ref(NamedTuple):
    """Output number ``output`` of node ``node``."""

    node: str
    output: int = 0

    def __str__(self) -> str:
        return self.node if self.output == 0 else f"{self.node}:{self.output}"

    @classmethod
    @functools.lru_cache(maxsize=2**17)  # a tensor has many readers, and each pass meets it again
    def parse(cls, text: str) -> Ref:
        """Parses ``node`` or ``node:1``; a control edge isn't a tensor."""
        if text.startswith("^"):
            raise ValueError(f"{text!r} is a control edge, not a tensor")
        node, colon, output = text.rpartition(":")
        return cls(node, int(output)) if colon else cls(text, 0)


def data_inputs(node: NodeDef) -> list[Ref]:
    """Returns the tensors that a node reads, in order."""
    return [Ref.parse(text) for text in node.input if not text.startswith("^")]


def renamed_input(text: str, names: Mapping[str, str]) -> str:
    """Returns an input of a node, or a control edge, whose node has a new name."""
    if text in names:  # the first output of a node, as most inputs are
        return names[text]
    if text.startswith("^"):
        return f"^{names[text[1:]]}"
    ref = Ref.parse(text)
    return str(Ref(names[ref.node], ref.output))


def renamed_in_body(text: str, names: Mapping[str, str]) -> str:
    """Returns an input of a function's node (``node:result:0``, an argument, or ``^node``) by the new name, if any."""
    name, colon, rest = text.removeprefix("^").partition(":")
    return ("^" if text.startswith("^") else "") + names.get(name, name) + colon + rest


def function_names(node: NodeDef) -> list[str]:
    """Returns the functions that attributes of a node name: loops, branches, calls.

    They are sorted by attribute: protobuf's order of a map's keys differs from node to node.
    """
    attrs = [node.attr[key] for key in sorted(node.attr)]
    return [called.name for attr in attrs for called in (attr.func, *attr.list.func) if called.name]


def all_nodes(graph: GraphDef) -> Iterator[NodeDef]:
    """Yields the nodes of a graph and of all functions in its library."""
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def rename_functions(graph: GraphDef, suffix: str) -> None:
    """Renames all functions of a graph's library, and what refers to them, in place."""
    names = {function.signature.name for function in graph.library.function}

    def renamed(name: str) -> str:
        return name + suffix if name in names else name

    for node in all_nodes(graph):
        node.op = renamed(node.op)
        for attr in node.attr.values():
            for called in (*([attr.func] if attr.HasField("func") else []), *attr.list.func):
                called.name = renamed(called.name)
    for function in graph.library.function:
        function.signature.name = renamed(function.signature.name)
    for gradient in graph.library.gradient:
        gradient.function_name = renamed(gradient.function_name)
        gradient.gradient_func = renamed(gradient.gradient_func)


def control_inputs(node: NodeDef) -> list[str]:
    """Returns the names of the nodes that a node waits for without reading them."""
    return [text[1:] for text in node.input if text.startswith("^")]


def own_attrs(node: NodeDef) -> dict[str, AttrValue]:
    """Returns the attributes of a node that carry its roles."""
    return {key: value for key, value in node.attr.items() if key.startswith(OWN_ATTRS)}


def text_attr(node: NodeDef, name: str, default: str = "") -> str:
    """Returns an attribute that is a text."""
    return node.attr[name].s.decode() if name in node.attr else default


def computation(node: NodeDef, inputs: Hashable, kept: Container[str] = ()) -> Hashable:
    """Returns what all nodes have in common that compute the same: operator, inputs and attributes.

    Args:
        node: the node.
        inputs: what it reads and waits for.
        kept: the attributes that count although they only say what a node is for.
    """
    keys = [key for key in sorted(node.attr) if key in kept or not key.startswith(OWN_ATTRS)]
    return node.op, inputs, tuple((key, node.attr[key].SerializeToString(deterministic=True)) for key in keys)


def set_inputs(node: NodeDef, refs: Iterable[Ref], waits: Iterable[str] = ()) -> None:
    """Replaces the tensors that a node reads, and the nodes that it waits for."""
    node.input[:] = [*map(str, refs), *(f"^{waited}" for waited in dict.fromkeys(waits))]


def layer_or_node(node: NodeDef) -> str:
    """Returns the layer that made a node, for messages; the node itself if it is none's."""
    layer = text_attr(node, LAYER_ATTR)
    return f"layer {layer!r}" if layer else f"node {node.name!r}"


class Graph:
    """An index over the top level of a GraphDef, which it doesn't change.

    Attributes:
        graph: the GraphDef.
        nodes: name -> NodeDef, in the GraphDef's order.
        position: name -> index in that order.
    """

    def __init__(self, graph: GraphDef) -> None:
        self.graph = graph
        self.nodes: dict[str, NodeDef] = {node.name: node for node in graph.node}
        self.position: dict[str, int] = {name: index for index, name in enumerate(self.nodes)}
        self._inputs = {name: data_inputs(node) for name, node in self.nodes.items()}
        self._consumers: dict[str, list[str]] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self.nodes

    def __iter__(self) -> Iterator[NodeDef]:
        return iter(self.nodes.values())

    def inputs(self, name: str) -> list[Ref]:
        """Returns the tensors that node ``name`` reads."""
        return self._inputs[name]

    def sources(self, name: str) -> list[str]:
        """Returns the names of the nodes that node ``name`` reads or waits for."""
        return [*(ref.node for ref in self._inputs[name]), *control_inputs(self.nodes[name])]

    def consumers(self, name: str) -> list[str]:
        """Returns the names of the nodes that read any output of node ``name``, each once, in graph order."""
        if self._consumers is None:
            self._consumers = {node: [] for node in self.nodes}
            for node, refs in self._inputs.items():
                for producer in dict.fromkeys(ref.node for ref in refs):
                    self._consumers[producer].append(node)
        return self._consumers[name]

    def ancestors(self, outputs: Iterable[Ref], stop: Iterable[Ref] = (), *, control: bool = True) -> set[str]:
        """Returns the nodes needed to compute ``outputs`` from the tensors in ``stop``.

        With ``control``, nodes that only must have run count too.
        """
        given = set(stop)
        needed: set[str] = set()
        pending = [ref.node for ref in outputs if ref not in given]
        while pending:
            name = pending.pop()
            if name in needed:
                continue
            needed.add(name)
            pending += [ref.node for ref in self._inputs[name] if ref not in given]
            if control:
                pending += control_inputs(self.nodes[name])
        return needed

    def dependents(self, names: Iterable[str], through: Callable[[NodeDef], bool] = lambda node: True) -> set[str]:
        """Returns nodes and all that read them, at first or second hand, in a graph with producers first.

        Args:
            names: the nodes.
            through: whether a node counts, and with it those that read it.
        """
        dependents = set(names)
        for name, node in self.nodes.items():
            if any(ref.node in dependents for ref in self._inputs[name]) and through(node):
                dependents.add(name)
        return dependents

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Sorts ``names`` in the order of the graph, which is topological for a traced one."""
        return sorted(names, key=self.position.__getitem__)

    def topological(self) -> list[str]:
        """Returns all nodes, producers first, control edges included.

        Raises:
            PassError: there is a cycle; the text shows it.
        """
        pending = {name: 0 for name in self.nodes}
        followers: dict[str, list[str]] = {name: [] for name in self.nodes}
        for name in self.nodes:
            for producer in set(self.sources(name)):
                pending[name] += 1
                followers[producer].append(name)
        ready = [name for name, count in pending.items() if count == 0]
        order: list[str] = []
        while ready:
            name = ready.pop()
            order.append(name)
            for follower in followers[name]:
                pending[follower] -= 1
                if pending[follower] == 0:
                    ready.append(follower)
        if len(order) < len(self.nodes):
            raise PassError("the graph has a cycle: " + " -> ".join(self._cycle(set(self.nodes) - set(order))))
        return order

    def _cycle(self, stuck: set[str]) -> list[str]:
        """Returns one cycle among nodes that all wait for each other."""
        path: list[str] = []
        name = min(stuck)
        while name not in path:
            path.append(name)
            name = next(producer for producer in self.sources(name) if producer in stuck)
        return [*path[path.index(name) :], name]


def in_order(graph: GraphDef) -> Graph:
    """Returns a view of a copy of a graph, producers first."""
    view = Graph(graph)
    nodes = [view.nodes[name] for name in view.topological()]
    return Graph(GraphDef(node=nodes, versions=graph.versions, library=graph.library))


class Names:
    """Makes node names: fresh, readable, deterministic."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def fresh(self, wanted: str) -> str:
        """Returns ``wanted`` if it is free, else with the first free number appended."""
        name = wanted
        while name in self._taken:
            number = self._next.get(wanted, 1)
            self._next[wanted] = number + 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name


def attr(value: Any) -> AttrValue:
    """Returns an AttrValue for a Python value: bool, int, float, str, bytes, or an AttrValue itself."""
    if isinstance(value, bool):
        return AttrValue(b=value)
    if isinstance(value, int):
        return AttrValue(i=value)
    if isinstance(value, float):
        return AttrValue(f=value)
    if isinstance(value, str):
        return AttrValue(s=value.encode())
    if isinstance(value, bytes):
        return AttrValue(s=value)
    if type(value) is AttrValue:
        return value
    raise TypeError(f"no AttrValue for {value!r} of type {type(value).__name__}")


def dtype_attr(dtype: int) -> AttrValue:
    """Returns an AttrValue for one dtype (a ``DT_*`` number)."""
    return AttrValue(type=dtype)


def dtypes_attr(dtypes: Iterable[int]) -> AttrValue:
    """Returns an AttrValue for a list of dtypes."""
    return AttrValue(list=AttrValue.ListValue(type=dtypes))


def shape_attr(shape: Sequence[int | None] | None) -> AttrValue:
    """Returns an AttrValue for a shape; None is an unknown rank or an unknown dimension."""
    if shape is None:
        return AttrValue(shape=tensor_shape_pb2.TensorShapeProto(unknown_rank=True))
    dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=-1 if size is None else size) for size in shape]
    return AttrValue(shape=tensor_shape_pb2.TensorShapeProto(dim=dims))


def integers_attr(numbers: Iterable[int]) -> AttrValue:
    """Returns an AttrValue for a list of integers."""
    return AttrValue(list=AttrValue.ListValue(i=numbers))


def function_attr(name: str) -> AttrValue:
    """Returns an AttrValue that names a library function."""
    return AttrValue(func=attr_value_pb2.NameAttrList(name=name))


def make_node(
    name: str,
    op: str,
    inputs: Sequence[Ref] = (),
    *,
    control: Iterable[str] = (),
    device: str = "",
    attrs: Mapping[str, Any] | None = None,
) -> NodeDef:
    """Returns a NodeDef. ``attrs`` holds Python values or AttrValues."""
    node = NodeDef(name=name, op=op, device=device)
    set_inputs(node, inputs, control)
    for key, value in (attrs or {}).items():
        node.attr[key].CopyFrom(attr(value))
    return node


_FIELDS = {
    types_pb2.DT_INT32: "int_val",
    types_pb2.DT_INT64: "int64_val",
    types_pb2.DT_FLOAT: "float_val",
    types_pb2.DT_DOUBLE: "double_val",
}


def make_const(name: str, value: float | Sequence[int], dtype: int, *, device: str = "") -> NodeDef:
    """Returns a Const node: a scalar, or a vector of integers; int32, int64, float32 or float64."""
    tensor = tensor_pb2.TensorProto(dtype=dtype)
    if isinstance(value, Sequence):
        tensor.tensor_shape.dim.add(size=len(value))
        getattr(tensor, _FIELDS[dtype]).extend(value)
    else:
        getattr(tensor, _FIELDS[dtype]).append(value)
    attrs = {"dtype": dtype_attr(dtype), "value": AttrValue(tensor=tensor)}
    return make_node(name, "Const", device=device, attrs=attrs)


class Builder:
    """Adds nodes to a GraphDef under fresh names.

    Attributes:
        graph: the GraphDef that grows.
        names: its names.
    """

    def __init__(self, graph: GraphDef) -> None:
        self.graph = graph
        self.names = Names(node.name for node in graph.node)
        self._constants: dict[tuple[object, int, str], Ref] = {}
        self._functions = {function.signature.name for function in graph.library.function}
        self._marks: Mapping[str, Any] = {}

    @contextlib.contextmanager
    def marked(self, marks: Mapping[str, Any]) -> Iterator[None]:
        """Gives nodes added within it these attributes too, except constants, which others share."""
        before, self._marks = self._marks, marks
        try:
            yield
        finally:
            self._marks = before

    def add(
        self,
        name: str,
        op: str,
        inputs: Sequence[Ref] = (),
        *,
        control: Iterable[str] = (),
        device: str = "",
        **attrs: Any,
    ) -> Ref:
        """Adds a node and returns its first output."""
        return self.append(make_node(self.names.fresh(name), op, inputs, control=control, device=device, attrs=attrs))

    def append(self, node: NodeDef) -> Ref:
        """Adds an existing node under a fresh name."""
        for key, value in self._marks.items():
            node.attr[key].CopyFrom(attr(value))
        self.graph.node.append(node)
        return Ref(node.name)

    def define(self, function: function_pb2.FunctionDef) -> None:
        """Adds a function to the graph's library, each name once."""
        if function.signature.name not in self._functions:
            self._functions.add(function.signature.name)
            self.graph.library.function.add().CopyFrom(function)

    def argument(self, name: str, dtype: int) -> Ref:
        """Adds a placeholder of unknown shape: an input of a graph that is about to be outlined."""
        return self.add(name, "Placeholder", dtype=dtype_attr(dtype))

    def cast(self, tensor: Ref, source: int, target: int, *, name: str = "cast", device: str = "") -> Ref:
        """Returns a tensor of dtype ``source`` with dtype ``target``."""
        if source == target:
            return tensor
        return self.add(name, "Cast", [tensor], device=device, SrcT=dtype_attr(source), DstT=dtype_attr(target))

    def const(self, value: float | Sequence[int], dtype: int, *, device: str = "") -> Ref:
        """Returns a constant, shared by all its readers on that device. Half precision is cast from float32."""
        key = (tuple(value) if isinstance(value, Sequence) else value, dtype, device)
        if key not in self._constants:
            with self.marked({}):
                self._constants[key] = self._constant(value, dtype, device)
        return self._constants[key]

    def _constant(self, value: float | Sequence[int], dtype: int, device: str) -> Ref:
        if dtype in _FIELDS:
            return self.append(make_const(self.names.fresh("constant"), value, dtype, device=device))
        wide = self.const(value, types_pb2.DT_FLOAT, device=device)
        return self.cast(wide, types_pb2.DT_FLOAT, dtype, name="constant", device=device)

    def split(
        self,
        name: str,
        tensor: Ref,
        dtype: int,
        sizes: Sequence[int],
        axis: int,
        *,
        device: str = "",
        on_host: bool = False,
        scaled: Callable[[Ref], Ref] = lambda sizes: sizes,
    ) -> list[Ref]:
        """Splits a tensor into consecutive parts along one axis; ``scaled`` makes lengths of sizes (int32).

        Dtypes for which GPUs have no such kernel are sliced, but ``on_host``.
        """
        if len(sizes) == 1:
            return [tensor]
        int32, kind = types_pb2.DT_INT32, {"T": dtype_attr(dtype)}

        def lengths(numbers: Sequence[int]) -> Ref:
            return scaled(self.const(numbers, int32, device=device))

        if dtype in SPLIT_DTYPES or on_host:
            return self.parts(name, tensor, dtype, lengths(sizes), len(sizes), axis, device=device)
        before = (1 << axis) - 1  # the axes before this one, which are left whole
        kind |= {"Index": dtype_attr(int32), "begin_mask": before, "end_mask": before}
        stops = [lengths([*[0] * axis, stop]) for stop in itertools.accumulate(sizes, initial=0)]
        ones = self.const([1] * (axis + 1), int32, device=device)
        return [
            self.add(f"{name}/part{part}", "StridedSlice", [tensor, *ends, ones], device=device, **kind)
            for part, ends in enumerate(itertools.pairwise(stops))
        ]

    def parts(
        self, name: str, tensor: Ref, dtype: int, lengths: Ref, count: int, axis: int = 0, *, device: str = ""
    ) -> list[Ref]:
        """Splits a tensor into consecutive parts of the lengths (int32) in another one."""
        inputs = [tensor, lengths, self.const(axis, types_pb2.DT_INT32, device=device)]
        kind = {"T": dtype_attr(dtype), "Tlen": dtype_attr(types_pb2.DT_INT32), "num_split": count}
        node = self.add(name, "SplitV", inputs, device=device, **kind).node
        return [Ref(node, index) for index in range(count)]

    def concat(self, name: str, parts: Sequence[Ref], dtype: int, axis: int, *, device: str = "") -> Ref:
        """Concatenates the parts along one axis."""
        if len(parts) == 1:
            return parts[0]
        inputs = [*parts, self.const(axis, types_pb2.DT_INT32, device=device)]
        kind = {"T": dtype_attr(dtype), "Tidx": dtype_attr(types_pb2.DT_INT32), "N": len(parts)}
        return self.add(name, "ConcatV2", inputs, device=device, **kind)

    def add_n(self, name: str, parts: Sequence[Ref], dtype: int, *, device: str = "") -> Ref:
        """Returns the sum of tensors of one shape, added up in their order.

        TensorFlow adds three or more in an order that depends on which buffer is free first: steps wouldn't repeat.
        """
        total, *others = parts
        for number, part in enumerate(others, start=1):
            own = name if number == len(others) else f"{name}/first{number + 1}"
            total = self.add(own, "AddN", [total, part], device=device, T=dtype_attr(dtype), N=2)
        return total


def substitute(graph: GraphDef, replacements: Mapping[str, Ref]) -> None:
    """Replaces placeholders by the given tensors, in place, and removes them."""
    kept = [node for node in graph.node if node.name not in replacements]
    for node in kept:
        for index, text in enumerate(node.input):
            if not text.startswith("^") and (name := Ref.parse(text).node) in replacements:
                node.input[index] = str(replacements[name])
    remaining = GraphDef(node=kept, versions=graph.versions, library=graph.library)
    graph.CopyFrom(remaining)


def drop_unread(graph: GraphDef, constants: Container[str]) -> None:
    """Removes the named nodes without readers or waiting nodes, in place."""
    read = {text.removeprefix("^").partition(":")[0] for node in graph.node for text in node.input}
    rest = [node for node in graph.node if node.name in read or node.name not in constants]
    del graph.node[:]
    graph.node.extend(rest)


def reroute(graph: GraphDef, tensors: Mapping[Ref, Ref]) -> None:
    """Inserts nodes after tensors, in place: readers of a tensor read the given one instead.

    The nodes that a new tensor is computed by, one or a chain, keep reading the old one; control edges don't change.

    Args:
        graph: the graph that changes.
        tensors: old tensor -> new one.
    """
    view = Graph(graph)
    made_by = {old: view.ancestors([new], [old], control=False) for old, new in tensors.items()}
    ends = {ref.node for ref in tensors.values()}
    for node in graph.node:
        if node.name not in ends and not tensors.keys().isdisjoint(view.inputs(node.name)):
            for index, text in enumerate(node.input):
                if not text.startswith("^"):
                    ref = Ref.parse(text)
                    if ref in tensors and node.name not in made_by[ref]:
                        node.input[index] = str(tensors[ref])


def dtype_name(dtype: int) -> str:
    """Returns a dtype's name for messages: ``float32`` for DT_FLOAT."""
    name: str = types_pb2.DataType.Name(dtype)
    special = {"DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_HALF": "float16"}
    return special.get(name, name.removeprefix("DT_").lower())


FLOAT_DTYPES = frozenset({types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_HALF, types_pb2.DT_BFLOAT16})
COUNTABLE_DTYPES = FLOAT_DTYPES | {types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128}
"""The dtypes that can be averaged over slices; integers and booleans count or choose."""
SPLIT_DTYPES = COUNTABLE_DTYPES | {types_pb2.DT_INT32, types_pb2.DT_STRING}
"""The dtypes that `SplitV` splits; for others GPUs have only `StridedSlice`. Strings are always on a host."""
