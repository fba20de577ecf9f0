"""Equal calls of Keras' own layers, traced once.

TensorFlow makes each node of a graph in Python, which is most of what tracing a deep model takes. Where a layer is
called that equals one that has been called, one node stands in for what the trace would make, and is replaced by a copy
of the nodes of the first call once the trace is complete. What a call depends on beside its arguments and variables is
known for Keras' own layers only (`layer_kinds.py`); layers of the user are traced each time.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.frontend.layer_kinds import LayerKind, layer_kind
from dapple_tf.frontend.trace_scope import TraceScope
from dapple_tf.keras_private import autocast_dtype, inherit_arguments, inherited_arguments, is_current
from graph_passes.ir.graph import COLOCATION, GraphDef, NodeDef, Ref, control_inputs
from graph_passes.ir.tensorflow_bridge import is_stateful
from graph_passes.ir.tensorflow_private import has_scopes, number_of_nodes, watch_operation

_STAND_IN, _PREFIX, _GRADIENT = "PartitionedCall", "dapple_repeated_call_", "DappleRepeatedCall"
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
class _FirstCall:
    """The first call of a kind, as traced.

    Attributes:
        kind: what was called.
        given: the tensors among its arguments, then the values of the kind's variables.
        scope: name of the scope in which the layer was called, with "/" at its end.
        start, stop: positions of its first node and after its last one.
        result: what the call returned.
        shapes: id of each tensor that the call returned or assigned -> its static shape then, which may be set later.
        updates: place of a variable -> what the call assigned to it.
        inherited: arguments that layers called after it inherit.
        nested: calls inside it, with the layers inside it.
    """

    kind: LayerKind
    given: Sequence[tf.Tensor]
    scope: str
    start: int
    stop: int
    result: Any
    shapes: Mapping[int, tf.TensorShape]
    updates: Mapping[int, tf.Tensor]
    inherited: Mapping[str, Any]
    nested: Sequence[TracedCall]


@dataclasses.dataclass(frozen=True)
class _Node:
    """A node of a template.

    Attributes:
        node: the node.
        scopes: its name within the layer's scope, by parts.
        layers: number of a part -> place in the kind of the layer whose name comes before it.
        inputs: tensors of the template.
    """

    node: NodeDef
    scopes: Sequence[str]
    layers: Mapping[int, int]
    inputs: Sequence[_Place]

    def name(self, layers: Sequence[Any]) -> str:
        """Returns its name for a call of a layer with these layers inside."""
        names = {number: layers[place].name for number, place in self.layers.items()}
        return "/".join(names.get(number, "") + part for number, part in enumerate(self.scopes))


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tensor of a template: output ``output`` of node ``node``; for -1, what is given at place ``output``."""

    node: int
    output: int


@dataclasses.dataclass(frozen=True)
class _Template:
    """What calls of a kind consist of.

    Attributes:
        name: of the function that stand-ins seem to call.
        nodes: in the order of creation.
        used: places of what the nodes take of what is given.
        outputs: tensors of the stand-ins, with dtype and static shape.
        result: structure of the result, with tensors of the template.
        updates: place of a variable -> what is assigned to it.
        inherited: see `_FirstCall`.
        nested: layers around a call inside, and its own, by their places in the kind, and the call's nodes.
    """

    name: str
    nodes: Sequence[_Node]
    used: Sequence[int]
    outputs: Mapping[_Place, tuple[tf.DType, tf.TensorShape]]
    result: Any
    updates: Mapping[int, _Place]
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


class RepeatedCalls:
    """Records calls of Keras' own layers, and replaces those that repeat one.

    Attributes:
        templates: name of a template -> the template.

    Args:
        graph: the graph into which the model is traced.
        scope: the trace's values of variables.
        replaced: ids of layers whose ``call`` the user has replaced.
    """

    def __init__(self, graph: tf.Graph, scope: TraceScope, replaced: Collection[int]) -> None:
        self.templates: dict[str, _Template] = {}
        self._graph, self._scope, self._replaced = graph, scope, replaced
        self._first: dict[Hashable, _FirstCall | None] = {}
        self._template_of: dict[Hashable, _Template | None] = {}
        self._layers: dict[str, Sequence[Any]] = {}  # stand-in -> the layers inside the one that was called
        self._given_up = _GIVEN_UP[graph] = threading.Event()

    def call(
        self,
        layer: Any,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        calls: Sequence[TracedCall],
        depth: int,
    ) -> tuple[Any, Sequence[tuple[Sequence[Any], Nodes]]]:
        """Calls a layer, or makes a stand-in for the call.

        Args:
            layer: the layer.
            original: what its ``call`` is.
            args: its arguments.
            kwargs: those with names.
            calls: the calls that were traced; ``original`` adds those inside this one.
            depth: the number of layers around this call, and its own.

        Returns:
            The result; and for a stand-in the layers of each call inside, and its nodes in the template.
        """
        known = self._known(layer, args, kwargs)
        if known is None:
            return original(*args, **kwargs), ()
        key, kind, given = known
        if key in self._first:
            template = self._template(key)
            if template is not None:
                return self._stand_in(template, kind, given)
            return original(*args, **kwargs), ()
        start, updates, losses = self.position, len(self._scope.updates), len(self._scope.losses)
        traced = len(calls)
        result = original(*args, **kwargs)
        assigned = self._scope.updates[updates:]
        places = {id(variable): place for place, variable in enumerate(kind.variables)}
        self._first[key] = None
        tensors = [*keras.tree.flatten(result), *(value for _, value in assigned)]
        complete = len(self._scope.losses) == losses and all(id(variable) in places for variable, _ in assigned)
        if complete and all(tensor is None or _is_plain(tensor) for tensor in tensors):
            self._first[key] = _FirstCall(
                kind,
                given,
                f"{self._graph.get_name_scope()}/",
                start,
                self.position,
                result,
                {id(tensor): tensor.shape for tensor in tensors if tensor is not None},
                {places[id(variable)]: value for variable, value in assigned},
                inherited_arguments(),
                [dataclasses.replace(call, layers=call.layers[depth:]) for call in calls[traced:]],
            )
        return result, ()

    @property
    def position(self) -> int:
        """The number of nodes that were traced."""
        return number_of_nodes(self._graph)

    def _known(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Hashable, LayerKind, list[tf.Tensor]] | None:
        """Returns all that a call depends on, and the tensors among it; None if that can't be told."""
        kind = layer_kind(layer, self._replaced)
        if kind is None or self._scope.observed or not is_current(self._scope) or has_scopes(self._graph):
            return None
        given: list[tf.Tensor] = []
        arguments: list[Hashable] = []
        inherited = inherited_arguments()
        for leaf in keras.tree.flatten((args, kwargs, inherited)):
            if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is self._graph and _is_plain(leaf):
                given.append(leaf)
                sizes = None if leaf.shape.rank is None else tuple(leaf.shape.as_list())
                arguments.append((leaf.dtype, sizes))
            elif leaf is None or type(leaf) in (bool, int, float, str):
                arguments.append((type(leaf), repr(leaf)))
            else:
                return None
        structure = repr(keras.tree.map_structure(lambda _: 0, (args, kwargs, inherited)))
        roles = []
        for variable in kind.variables:
            value = self._scope.state_mapping.get(id(variable))
            if value is None:
                return None
            given.append(value)
            roles.append(self._scope.role_of(variable))
        places = {id(tensor): place for place, tensor in reversed(list(enumerate(given)))}
        same = tuple(places[id(tensor)] for tensor in given)
        key = kind.key, structure, tuple(arguments), tuple(roles), same, autocast_dtype()
        return key, kind, given

    # ---- templates

    def _template(self, key: Hashable) -> _Template | None:
        """Returns what calls of a kind consist of; None if they can't be copied."""
        if key not in self._template_of:
            first = self._first[key]
            template = None if first is None else self._made(first)
            self._template_of[key] = template
            if template is not None:
                self.templates[template.name] = template
        return self._template_of[key]

    def _made(self, first: _FirstCall) -> _Template | None:
        operations = self._graph.get_operations()[first.start : first.stop]
        places = {id(tensor): _Place(-1, place) for place, tensor in reversed(list(enumerate(first.given)))}
        numbers = {id(layer): number for number, layer in enumerate(first.kind.layers)}
        if any(id(layer) not in numbers for call in first.nested for layer in call.layers):
            return None
        inside: list[Sequence[Any]] = [()] * len(operations)
        for call in sorted(first.nested, key=lambda call: len(call.layers)):
            if call.inside is None:
                chain = [call.layers] * (call.stop - call.start)
                inside[call.start - first.start : call.stop - first.start] = chain
        nodes: list[_Node] = []
        starts: list[int] = []
        tensors: list[tf.Tensor] = []  # Keeps them alive: places go by identity.
        for operation, layers in zip(operations, inside, strict=True):
            starts.append(len(nodes))
            inputs = [places.get(id(tensor)) for tensor in operation.inputs]
            known = [place for place in inputs if place is not None]
            if len(known) < len(inputs) or operation.control_inputs:
                return None
            scopes = operation.name.removeprefix(first.scope).split("/")
            of_layers: dict[int, int] = {}
            for number, layer in enumerate(layers):
                if not scopes[number].startswith(layer.name) or number + 1 == len(scopes):
                    break
                scopes[number] = scopes[number].removeprefix(layer.name)
                of_layers[number] = numbers[id(layer)]
            copied = self._copied(operation, scopes, of_layers, numbers, known, len(nodes))
            if copied is None:
                return None
            own, outputs = copied
            nodes += own
            tensors += operation.outputs
            places |= {id(tensor): place for tensor, place in zip(operation.outputs, outputs, strict=True)}
        starts.append(len(nodes))
        results = keras.tree.flatten(first.result)
        wanted = [*(leaf for leaf in results if leaf is not None), *first.updates.values()]
        if len(nodes) < _SHORTEST or any(id(tensor) not in places for tensor in wanted):
            return None
        moved = [
            dataclasses.replace(call, start=call.start - first.start, stop=call.stop - first.start)
            for call in first.nested
        ]
        told = {places[id(tensor)]: (tensor.dtype, first.shapes[id(tensor)]) for tensor in wanted}
        return _Template(
            name=f"{_PREFIX}{len(self.templates)}",
            nodes=nodes,
            used=sorted({place.output for node in nodes for place in node.inputs if place.node < 0}),
            outputs={place: spec for place, spec in told.items() if place.node >= 0},
            result=keras.tree.map_structure(lambda leaf: None if leaf is None else places[id(leaf)], first.result),
            updates={place: places[id(value)] for place, value in first.updates.items()},
            inherited=first.inherited,
            nested=[([numbers[id(layer)] for layer in call.layers], call.nodes(starts)) for call in moved],
        )

    def _copied(
        self,
        operation: Any,
        scopes: Sequence[str],
        layers: Mapping[int, int],
        numbers: Mapping[int, int],
        inputs: Sequence[_Place],
        start: int,
    ) -> tuple[list[_Node], list[_Place]] | None:
        """Returns an operation's nodes and outputs in a template; None if a copy might not do the same.

        Args:
            operation: the operation, or a stand-in.
            scopes: its name, see `_Node`.
            layers: see `_Node`.
            numbers: id of a layer -> its place in the kind.
            inputs: what it reads.
            start: nodes before it.
        """
        node = operation.node_def
        inner = self._stands_for(node)
        if inner is None:
            functions = any(attr.HasField("func") or attr.list.func for attr in node.attr.values())
            private = any(attr.startswith("_") for attr in node.attr)
            if functions or private or node.op.startswith("Placeholder") or is_stateful(node.op):
                return None
            outputs = [_Place(start, number) for number in range(len(operation.outputs))]
            return [_Node(node, scopes, layers, inputs)], outputs
        given = dict(zip(inner.used, inputs, strict=True))

        def moved(place: _Place) -> _Place:
            return given[place.output] if place.node < 0 else _Place(start + place.node, place.output)

        around, inside = scopes[:-1], self._layers[operation.name]
        nodes = [
            _Node(
                each.node,
                [*around, *each.scopes],
                {**layers, **{len(around) + part: numbers[id(inside[place])] for part, place in each.layers.items()}},
                [*map(moved, each.inputs)],
            )
            for each in inner.nodes
        ]
        return nodes, [moved(place) for place in inner.outputs]

    def _stands_for(self, node: NodeDef) -> _Template | None:
        return self.templates.get(node.attr["f"].func.name) if node.op == _STAND_IN else None

    # ---- stand-ins

    def _stand_in(
        self, template: _Template, kind: LayerKind, given: Sequence[tf.Tensor]
    ) -> tuple[Any, Sequence[tuple[Sequence[Any], Nodes]]]:
        with self._graph.gradient_override_map({_STAND_IN: _GRADIENT}):
            tensors = tf.raw_ops.PartitionedCall(
                args=[given[place] for place in template.used],
                Tout=[dtype for dtype, _ in template.outputs.values()],
                f=template.name,
                name="repeated",
            )
        self._layers[tensors[0].op.name] = kind.layers
        made = dict(zip(template.outputs, tensors, strict=True))
        for tensor, (_, shape) in zip(tensors, template.outputs.values(), strict=True):
            tensor.set_shape(shape)
            watch_operation(tensor, self._given_up.set)

        def here(place: _Place | None) -> Any:
            if place is None:
                return None
            return given[place.output] if place.node < 0 else made[place]

        for number, value in template.updates.items():
            self._scope.add_update((kind.variables[number], here(value)))
        inherit_arguments(template.inherited)
        nested = [([kind.layers[number] for number in numbers], nodes) for numbers, nodes in template.nested]
        return keras.tree.map_structure(here, template.result), nested

    def expand(self, graph_def: GraphDef) -> Expansion | None:
        """Replaces stand-ins in the traced graph; returns None if something else than their tensors was used."""
        if self._given_up.is_set() or self._is_used_otherwise(graph_def):
            return None
        names = {node.name for node in graph_def.node}
        expanded = GraphDef(versions=graph_def.versions, library=graph_def.library)
        tensors: dict[str, str] = {}
        starts = []
        for node in graph_def.node:
            starts.append(len(expanded.node))
            inputs = [tensors.get(text, text) for text in node.input]
            template = self._stands_for(node)
            if template is not None:
                tensors |= self._copied_nodes(expanded, node, template, inputs, names)
                continue
            copy = expanded.node.add()
            copy.CopyFrom(node)
            copy.input[:] = inputs
        starts.append(len(expanded.node))
        inside = [node for function in expanded.library.function for node in function.node_def]
        if any(_calls_template(node) for node in (*expanded.node, *inside)):
            return None
        refs = {Ref.parse(text): Ref.parse(now) for text, now in tensors.items() if not text.startswith("^")}
        return Expansion(expanded, refs, starts)

    def _is_used_otherwise(self, graph_def: GraphDef) -> bool:
        """Returns whether nodes stand beside stand-ins, or it isn't known which of their nodes they wait for."""
        beside, waiting = set[bytes](), set[str]()
        for node in graph_def.node:
            template = self._stands_for(node)
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

    def _copied_nodes(
        self, expanded: GraphDef, stand_in: NodeDef, template: _Template, inputs: Sequence[str], names: set[str]
    ) -> dict[str, str]:
        """Adds the nodes that a stand-in stands for; returns its tensors -> theirs, as inputs name them."""
        given = dict(zip(template.used, inputs, strict=True))
        scope = f"{stand_in.name.rpartition('/')[0]}/".removeprefix("/")
        layers = self._layers[stand_in.name]
        own: list[str] = []

        def text_of(place: _Place) -> str:
            if place.node < 0:
                return given[place.output]
            return str(Ref(own[place.node], place.output))

        for each in template.nodes:
            own.append(_unused(scope + each.name(layers), names))
            names.add(own[-1])
            copy = expanded.node.add()
            copy.CopyFrom(each.node)
            copy.name = own[-1]
            copy.input[:] = map(text_of, each.inputs)
        tensors = {str(Ref(stand_in.name, number)): text_of(place) for number, place in enumerate(template.outputs)}
        waiting = {f"^{stand_in.name}": f"^{own[place.node]}" for place in template.outputs}
        return tensors | waiting


_GIVEN_UP: weakref.WeakKeyDictionary[tf.Graph, threading.Event] = weakref.WeakKeyDictionary()


@tf.RegisterGradient(_GRADIENT)
def _refuse(operation: Any, *_: Any) -> None:
    """Gives up sharing in a trace that differentiates (by ``tf.gradients``, say) what a stand-in stands for."""
    _GIVEN_UP[operation.graph].set()
    raise LookupError(f"{operation.name!r} has no gradient: it stands in for a call that is to be traced")


def _calls_template(node: NodeDef) -> bool:
    return any(attr.func.name.startswith(_PREFIX) for attr in node.attr.values() if attr.HasField("func"))


def _is_plain(tensor: tf.Tensor) -> bool:
    """Returns whether a layer has noted nothing at a tensor: masks, or the logits for a loss."""
    return all(value is None for value in vars(tensor).values())


def _unused(name: str, names: Collection[str]) -> str:
    number, free = 0, name
    while free in names:
        number += 1
        free = f"{name}_{number}"
    return free
