"""Copies of the nodes of a layer's call for equal calls; see `layer_calls.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.frontend.layer_kinds import LayerKind
from graph_passes.ir.graph import COLOCATION, GraphDef, Names, NodeDef, Ref, control_inputs
from graph_passes.ir.tensorflow_bridge import is_stateful, output_dtypes

STAND_IN = "PartitionedCall"
"""The operator that stands in for calls: it may have any tensors, and does nothing to the graph."""
_PREFIX = "dapple_repeated_call_"
_SHORTEST = 3
"""Nodes of a call from which on one node in their place is less work."""

Nodes = tuple[int, int]
"""Positions of the first of some nodes, and after the last one."""


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A call of a layer in a trace.

    Attributes:
        layers: the layers around it, and the one that was called.
        start, stop: positions of its first node and after its last one. If it is inside a call that a stand-in stands
            for, the stand-in is all that is between them.
        number: 0 for the first call of this layer, 1 for the second.
        inside: where its nodes are in the template of that stand-in.
    """

    layers: Sequence[Any]
    start: int
    stop: int
    number: int
    inside: Nodes | None = None

    def nodes(self, starts: Sequence[int]) -> Nodes:
        """Returns where its nodes are, for the positions that the trace's nodes now have."""
        if self.inside is None:
            return starts[self.start], starts[self.stop]
        start, stop = self.inside
        return starts[self.start] + start, starts[self.start] + stop


@dataclasses.dataclass(frozen=True)
class FirstCall:
    """The first call of a kind, as traced.

    Attributes:
        kind: what was called.
        inputs: the tensors among its arguments, then the values of the kind's variables.
        scope: name of the scope in which the layer was called, with "/" at its end.
        start, stop: positions of its first node and after its last one.
        returned: what it returned: a structure of tensors and None.
        updates: place of a variable -> what it assigned to that.
        shapes: id of each tensor that it returned or assigned -> its static shape then, which may be set later.
        inherited: arguments that layers called after it inherit.
        nested: calls inside it, with the layers inside it.
    """

    kind: LayerKind
    inputs: Sequence[tf.Tensor]
    scope: str
    start: int
    stop: int
    returned: Any
    updates: Mapping[int, tf.Tensor]
    shapes: Mapping[int, tf.TensorShape]
    inherited: Mapping[str, Any]
    nested: Sequence[TracedCall]


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor of a template: output ``output`` of node ``node``; for -1, input number ``output`` of the call."""

    node: int
    output: int


@dataclasses.dataclass(frozen=True)
class _Node:
    """A node of a template.

    Attributes:
        node: the node.
        scopes: its name within the layer's scope, by parts.
        layers: number of a part -> place in the kind of the layer whose name comes before it.
        inputs: what it reads.
    """

    node: NodeDef
    scopes: Sequence[str]
    layers: Mapping[int, int]
    inputs: Sequence[Place]

    def name(self, layers: Sequence[Any]) -> str:
        """Returns its name for a call of a layer with these layers inside."""
        names = {number: layers[place].name for number, place in self.layers.items()}
        return "/".join(names.get(number, "") + part for number, part in enumerate(self.scopes))


@dataclasses.dataclass(frozen=True)
class Template:
    """What calls of a kind consist of.

    Attributes:
        name: of the function that stand-ins seem to call.
        nodes: in the order of creation.
        used: numbers of the inputs that the nodes read.
        outputs: tensors of the stand-ins, with dtype and static shape.
        returned: see `FirstCall`; with places for tensors.
        updates: place of a variable -> what is assigned to it.
        inherited: see `FirstCall`.
        nested: for each call inside, the layers around it and its own, by their places in the kind, and its nodes.
    """

    name: str
    nodes: Sequence[_Node]
    used: Sequence[int]
    outputs: Mapping[Place, tuple[tf.DType, tf.TensorShape]]
    returned: Any
    updates: Mapping[int, Place]
    inherited: Mapping[str, Any]
    nested: Sequence[tuple[Sequence[int], Nodes]]


@dataclasses.dataclass(frozen=True)
class Expansion:
    """A traced graph with copies of the first calls' nodes in place of stand-ins.

    Attributes:
        graph: the graph.
        tensors: tensor of a stand-in -> the copy's.
        starts: position of a node in the traced graph -> its position here; one more for the end.
    """

    graph: GraphDef
    tensors: Mapping[Ref, Ref]
    starts: Sequence[int]


class Templates:
    """The templates of a trace, and what stands in for calls there.

    Args:
        graph: the graph into which a model is traced.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._by_name: dict[str, Template] = {}
        self._layers: dict[str, Sequence[Any]] = {}

    def stands_for(self, node: NodeDef) -> Template | None:
        """Returns the template for which a node stands; None for other nodes."""
        return self._by_name.get(node.attr["f"].func.name) if node.op == STAND_IN else None

    def add_stand_in(self, name: str, layers: Sequence[Any]) -> None:
        """Notes a node that stands in for a call of a layer with these layers inside."""
        self._layers[name] = layers

    def add(self, first: FirstCall) -> Template | None:
        """Returns the template for calls like a first one; None if these can't be copied."""
        numbers = {id(layer): number for number, layer in enumerate(first.kind.layers)}
        if any(id(layer) not in numbers for call in first.nested for layer in call.layers):
            return None
        operations = self._graph.get_operations()[first.start : first.stop]
        places = {id(tensor): Place(-1, number) for number, tensor in reversed(list(enumerate(first.inputs)))}
        nodes: list[_Node] = []
        starts: list[int] = []
        tensors: list[tf.Tensor] = []  # Keeps them alive: places go by identity.
        for operation, layers in zip(operations, _innermost(first), strict=True):
            starts.append(len(nodes))
            inputs = [places[id(tensor)] for tensor in operation.inputs if id(tensor) in places]
            if len(inputs) < len(operation.inputs) or operation.control_inputs:
                return None
            scopes, of_layers = _scopes(operation.name.removeprefix(first.scope), layers, numbers)
            copied = self._copied(_Node(operation.node_def, scopes, of_layers, inputs), numbers, len(nodes))
            if copied is None:
                return None
            own, outputs = copied
            nodes += own
            tensors += operation.outputs
            places |= {id(tensor): place for tensor, place in zip(operation.outputs, outputs, strict=True)}
        starts.append(len(nodes))
        leaves = [leaf for leaf in keras.tree.flatten(first.returned) if leaf is not None]
        wanted = [*leaves, *first.updates.values()]
        if len(nodes) < _SHORTEST or any(id(tensor) not in places for tensor in wanted):
            return None
        specs = {places[id(tensor)]: (tensor.dtype, first.shapes[id(tensor)]) for tensor in wanted}
        computed = {place: spec for place, spec in specs.items() if place.node >= 0}
        if not computed:
            return None
        moved = [
            dataclasses.replace(call, start=call.start - first.start, stop=call.stop - first.start)
            for call in first.nested
        ]
        template = Template(
            name=f"{_PREFIX}{len(self._by_name)}",
            nodes=nodes,
            used=sorted({place.output for node in nodes for place in node.inputs if place.node < 0}),
            outputs=computed,
            returned=keras.tree.map_structure(lambda leaf: None if leaf is None else places[id(leaf)], first.returned),
            updates={place: places[id(value)] for place, value in first.updates.items()},
            inherited=first.inherited,
            nested=[([numbers[id(layer)] for layer in call.layers], call.nodes(starts)) for call in moved],
        )
        self._by_name[template.name] = template
        return template

    def _copied(self, node: _Node, numbers: Mapping[int, int], start: int) -> tuple[list[_Node], list[Place]] | None:
        """Returns a traced node's nodes and outputs in a template; None if a copy might not do the same.

        Args:
            node: the node, which may stand in for others.
            numbers: id of a layer -> its place in the template's kind.
            start: nodes before it.
        """
        template = self.stands_for(node.node)
        if template is None:
            attrs = node.node.attr
            functions = any(attr.HasField("func") or attr.list.func for attr in attrs.values())
            private = any(attr.startswith("_") for attr in attrs)
            if functions or private or node.node.op.startswith("Placeholder") or is_stateful(node.node.op):
                return None
            return [node], [Place(start, number) for number in range(len(output_dtypes(node.node)))]
        inputs = dict(zip(template.used, node.inputs, strict=True))

        def moved(place: Place) -> Place:
            return inputs[place.output] if place.node < 0 else Place(start + place.node, place.output)

        around, inside = node.scopes[:-1], self._layers[node.node.name]
        nodes = [
            _Node(
                each.node,
                [*around, *each.scopes],
                {**node.layers, **{len(around) + part: numbers[id(inside[at])] for part, at in each.layers.items()}},
                [*map(moved, each.inputs)],
            )
            for each in template.nodes
        ]
        return nodes, [moved(place) for place in template.outputs]

    def expand(self, graph_def: GraphDef) -> Expansion | None:
        """Replaces stand-ins in the traced graph; returns None if something else than their tensors was used."""
        if self._are_used_otherwise(graph_def):
            return None
        names = Names(node.name for node in graph_def.node)
        expanded = GraphDef(versions=graph_def.versions, library=graph_def.library)
        tensors: dict[str, str] = {}
        starts = []
        for node in graph_def.node:
            starts.append(len(expanded.node))
            inputs = [tensors.get(text, text) for text in node.input]
            template = self.stands_for(node)
            if template is not None:
                tensors |= self._add_copies(expanded, node.name, template, inputs, names)
                continue
            copy = expanded.node.add()
            copy.CopyFrom(node)
            copy.input[:] = inputs
        starts.append(len(expanded.node))
        inside = [node for function in expanded.library.function for node in function.node_def]
        if any(_names_template(node) for node in (*expanded.node, *inside)):
            return None
        refs = {Ref.parse(text): Ref.parse(now) for text, now in tensors.items() if not text.startswith("^")}
        return Expansion(expanded, refs, starts)

    def _are_used_otherwise(self, graph_def: GraphDef) -> bool:
        """Returns whether nodes stand beside stand-ins, or it isn't known which of their nodes they wait for."""
        beside, waiting = set[bytes](), set[str]()
        for node in graph_def.node:
            template = self.stands_for(node)
            if template is not None:
                beside.add(f"loc:@{node.name}".encode())
                if len({place.node for place in template.outputs}) > 1:
                    waiting.add(f"^{node.name}")
                if control_inputs(node):
                    return True
        return any(
            not waiting.isdisjoint(node.input)
            or (COLOCATION in node.attr and not beside.isdisjoint(node.attr[COLOCATION].list.s))
            for node in graph_def.node
        )

    def _add_copies(
        self, expanded: GraphDef, stand_in: str, template: Template, inputs: Sequence[str], names: Names
    ) -> dict[str, str]:
        """Adds the nodes that a stand-in stands for; returns its tensors -> theirs, as inputs name them."""
        read = dict(zip(template.used, inputs, strict=True))
        scope = f"{stand_in.rpartition('/')[0]}/".removeprefix("/")
        own: list[str] = []

        def text_of(place: Place) -> str:
            return read[place.output] if place.node < 0 else str(Ref(own[place.node], place.output))

        for node in template.nodes:
            own.append(names.fresh(scope + node.name(self._layers[stand_in])))
            copy = expanded.node.add()
            copy.CopyFrom(node.node)
            copy.name = own[-1]
            copy.input[:] = map(text_of, node.inputs)
        tensors = {str(Ref(stand_in, number)): text_of(place) for number, place in enumerate(template.outputs)}
        waiting = {f"^{stand_in}": f"^{own[place.node]}" for place in template.outputs}
        return tensors | waiting


def _innermost(first: FirstCall) -> list[Sequence[Any]]:
    """Returns for each node of a call the layers inside which it was made."""
    innermost: list[Sequence[Any]] = [()] * (first.stop - first.start)
    for call in sorted(first.nested, key=lambda call: len(call.layers)):
        if call.inside is None:
            innermost[call.start - first.start : call.stop - first.start] = [call.layers] * (call.stop - call.start)
    return innermost


def _scopes(name: str, layers: Sequence[Any], numbers: Mapping[int, int]) -> tuple[list[str], dict[int, int]]:
    """Returns ``scopes`` and ``layers`` of a `_Node`, from its name and the layers inside which it was made."""
    scopes, of_layers = name.split("/"), dict[int, int]()
    for number, layer in enumerate(layers):
        if number + 1 == len(scopes) or not scopes[number].startswith(layer.name):
            break
        scopes[number] = scopes[number].removeprefix(layer.name)
        of_layers[number] = numbers[id(layer)]
    return scopes, of_layers


def _names_template(node: NodeDef) -> bool:
    return any(attr.func.name.startswith(_PREFIX) for attr in node.attr.values() if attr.HasField("func"))
