"""Recording which nodes of a trace were made inside which call of a layer; equal calls of Keras' own are traced once.

TensorFlow makes each node of a graph in Python, which is most of what tracing a deep model takes. Where a layer is
called that equals one that has been called, one node stands in for what the trace would make, and is replaced by a copy
of the nodes of the first call once the trace is complete. What a call depends on beside its arguments and variables is
known for Keras' own layers only (`layer_kinds.py`); layers of the user are traced each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import (
    autocast_dtype,
    inherit_arguments,
    inherited_arguments,
    is_current,
    items_of,
    name_of_call,
)
from dapple_tf.frontend.call_templates import (
    STAND_IN,
    Expansion,
    FirstCall,
    Nodes,
    Place,
    Template,
    Templates,
    TracedCall,
)
from dapple_tf.frontend.layer_kinds import LayerKind, layer_kind
from dapple_tf.frontend.trace_scope import TraceScope
from graph_passes.ir.graph import GraphDef
from graph_passes.ir.program import LayerCall
from graph_passes.ir.tensorflow_private import has_scopes, number_of_nodes, watch_operation

_GRADIENT = "DappleRepeatedCall"


class LayerCalls:
    """Records calls of layers, and of the operations of functional models.

    Attributes:
        failed_in: the path of the innermost layer in which the trace failed; None as long as it hasn't.

    Args:
        model: the model that is traced.
        share: whether equal calls of Keras' own layers are traced once.
    """

    def __init__(self, model: keras.Model, *, share: bool) -> None:
        self._model, self._share = model, share
        self.failed_in: str | None = None
        self._calls: list[TracedCall] = []
        self._inside: list[Any] = []
        self._counts: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
        self._first: dict[Hashable, FirstCall | None] = {}
        self._template_of: dict[Hashable, Template | None] = {}

    @property
    def repeats(self) -> bool:
        """Whether nodes stand in for calls that repeat others."""
        return any(self._template_of.values())

    @property
    def end(self) -> int:
        """The position after the last node of a call, in the trace; 0 if nothing was called."""
        return max((call.stop for call in self._calls), default=0)

    @contextlib.contextmanager
    def recording(self, graph: tf.Graph, scope: TraceScope) -> Iterator[None]:
        """Records calls inside the context, in place of earlier ones.

        Args:
            graph: the graph into which the model is traced.
            scope: the trace's values of variables.
        """
        model = self._model
        items = {id(item): item for item in items_of(model) if item is not model}
        names = {key: name_of_call(item) for key, item in items.items()}
        own = {key: vars(item)[names[key]] for key, item in items.items() if names[key] in vars(item)}
        self._calls, self._counts = [], defaultdict(itertools.count)
        self._graph, self._scope, self._replaced = graph, scope, own
        self._templates, self._first, self._template_of = Templates(graph), {}, {}
        self._given_up = _GIVEN_UP[graph] = threading.Event()
        for key, item in items.items():
            vars(item)[names[key]] = self._recorded(item, getattr(item, names[key]))
        try:
            yield
        finally:
            for key, item in items.items():
                if key in own:
                    vars(item)[names[key]] = own[key]
                else:
                    del vars(item)[names[key]]

    def expanded(self, graph_def: GraphDef) -> Expansion | None:
        """Returns the traced graph with all nodes; None if something else than the tensors of stand-ins was used."""
        if not self._share:
            return Expansion(graph_def, {}, range(len(graph_def.node) + 1))
        return None if self._given_up.is_set() else self._templates.expand(graph_def)

    def calls(self, starts: Sequence[int]) -> tuple[LayerCall, ...]:
        """Returns the recorded calls, outer ones before those inside them.

        Args:
            starts: position of a node in the trace -> its position now; one more for the end.
        """
        calls = [LayerCall(_path(call.layers), *call.nodes(starts), call.number) for call in self._calls]
        return tuple(sorted(calls, key=lambda call: (call.start, -call.stop)))

    def _recorded(self, item: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if tf.compat.v1.get_default_graph() is not self._graph:  # the inside of a loop or a branch
                return original(*args, **kwargs)
            self._inside.append(item)
            layers = tuple(self._inside)
            start = number_of_nodes(self._graph)
            try:
                returned, nested = self._called(item, original, args, kwargs, len(layers))
            except Exception:
                self.failed_in = self.failed_in or _path(layers)
                raise
            finally:
                self._inside.pop()
            stop = number_of_nodes(self._graph)
            for inner, nodes in nested:
                self._calls.append(TracedCall((*layers, *inner), start, stop, self._next(inner[-1]), nodes))
            self._calls.append(TracedCall(layers, start, stop, self._next(item)))
            return returned

        return call

    def _next(self, item: Any) -> int:
        return next(self._counts[id(item)])

    # ---- equal calls

    def _called(
        self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], depth: int
    ) -> tuple[Any, Sequence[tuple[Sequence[Any], Nodes]]]:
        """Calls a layer, or makes a stand-in for the call.

        Args:
            layer: the layer.
            original: what its ``call`` is.
            args: its arguments.
            kwargs: those with names.
            depth: the number of layers around this call, and its own.

        Returns:
            What the call returns; and for a stand-in the layers of each call inside, and its nodes in the template.
        """
        known = self._known(layer, args, kwargs) if self._share else None
        if known is None:
            return original(*args, **kwargs), ()
        key, kind, inputs = known
        if key in self._first:
            template = self._template(key)
            if template is not None:
                return self._stand_in(template, kind, inputs)
            return original(*args, **kwargs), ()
        start, updates, losses = number_of_nodes(self._graph), len(self._scope.updates), len(self._scope.losses)
        traced = len(self._calls)
        returned = original(*args, **kwargs)
        assigned = self._scope.updates[updates:]
        places = {id(variable): place for place, variable in enumerate(kind.variables)}
        self._first[key] = None
        tensors = [*keras.tree.flatten(returned), *(value for _, value in assigned)]
        complete = len(self._scope.losses) == losses and all(id(variable) in places for variable, _ in assigned)
        if complete and all(tensor is None or _is_plain(tensor) for tensor in tensors):
            self._first[key] = FirstCall(
                kind,
                inputs,
                f"{self._graph.get_name_scope()}/",
                start,
                number_of_nodes(self._graph),
                returned,
                {places[id(variable)]: value for variable, value in assigned},
                {id(tensor): tensor.shape for tensor in tensors if tensor is not None},
                inherited_arguments(),
                [dataclasses.replace(call, layers=call.layers[depth:]) for call in self._calls[traced:]],
            )
        return returned, ()

    def _known(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Hashable, LayerKind, list[tf.Tensor]] | None:
        """Returns all that a call depends on, and the tensors among it; None if that can't be told."""
        kind = layer_kind(layer, self._replaced)
        if kind is None or self._scope.observed or not is_current(self._scope) or has_scopes(self._graph):
            return None
        inherited = inherited_arguments()
        if not all(map(_is_simple, inherited.values())):
            return None
        inputs: list[tf.Tensor] = []
        arguments: list[Hashable] = [repr(sorted(inherited.items()))]
        for leaf in keras.tree.flatten((args, kwargs)):
            if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is self._graph and _is_plain(leaf):
                inputs.append(leaf)
                sizes = None if leaf.shape.rank is None else tuple(leaf.shape.as_list())
                arguments.append((leaf.dtype, sizes))
            elif _is_simple(leaf):
                arguments.append((type(leaf), repr(leaf)))
            else:
                return None
        structure = repr(keras.tree.map_structure(lambda _: 0, (args, kwargs)))
        roles = []
        for variable in kind.variables:
            value = self._scope.state_mapping.get(id(variable))
            if value is None:
                return None
            inputs.append(value)
            roles.append(self._scope.role_of(variable))
        places = {id(tensor): place for place, tensor in reversed(list(enumerate(inputs)))}
        same = tuple(places[id(tensor)] for tensor in inputs)
        key = kind.key, structure, tuple(arguments), tuple(roles), same, autocast_dtype()
        return key, kind, inputs

    def _template(self, key: Hashable) -> Template | None:
        """Returns what calls of a kind consist of; None if they can't be copied."""
        if key not in self._template_of:
            first = self._first[key]
            self._template_of[key] = None if first is None else self._templates.add(first)
        return self._template_of[key]

    def _stand_in(
        self, template: Template, kind: LayerKind, inputs: Sequence[tf.Tensor]
    ) -> tuple[Any, Sequence[tuple[Sequence[Any], Nodes]]]:
        """Makes a node that stands in for a call, with all else that the call does; returns the same as `call`."""
        with self._graph.gradient_override_map({STAND_IN: _GRADIENT}):
            tensors = tf.raw_ops.PartitionedCall(
                args=[inputs[place] for place in template.used],
                Tout=[dtype for dtype, _ in template.outputs.values()],
                f=template.name,
                name="repeated",
            )
        self._templates.add_stand_in(tensors[0].op.name, kind.layers)
        outputs = dict(zip(template.outputs, tensors, strict=True))
        for tensor, (_, shape) in zip(tensors, template.outputs.values(), strict=True):
            tensor.set_shape(shape)
            watch_operation(tensor, self._given_up.set)

        def here(place: Place | None) -> Any:
            if place is None:
                return None
            return inputs[place.output] if place.node < 0 else outputs[place]

        for number, value in template.updates.items():
            self._scope.add_update((kind.variables[number], here(value)))
        if template.inherited:
            inherit_arguments(template.inherited)
        nested = [([kind.layers[number] for number in numbers], nodes) for numbers, nodes in template.nested]
        return keras.tree.map_structure(here, template.returned), nested


_GIVEN_UP: weakref.WeakKeyDictionary[tf.Graph, threading.Event] = weakref.WeakKeyDictionary()


@tf.RegisterGradient(_GRADIENT)
def _refuse(operation: Any, *_: Any) -> None:
    """Gives up sharing in a trace that differentiates (by ``tf.gradients``, say) what a stand-in stands for."""
    _GIVEN_UP[operation.graph].set()
    raise LookupError(f"{operation.name!r} has no gradient: it stands in for a call that is to be traced")


def _is_simple(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_plain(tensor: tf.Tensor) -> bool:
    """Returns whether a layer has noted nothing at a tensor: masks, or the logits for a loss."""
    return all(value is None for value in vars(tensor).values())


def _path(layers: Sequence[Any]) -> str:
    return "/".join(layer.name for layer in layers)
