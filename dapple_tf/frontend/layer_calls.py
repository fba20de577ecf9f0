"""Recording which nodes of a trace were made inside which call of a layer."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import items_of, name_of_call
from dapple_tf.frontend.call_templates import Expansion, Nodes, TracedCall
from dapple_tf.frontend.repeated_calls import RepeatedCalls
from dapple_tf.frontend.trace_scope import TraceScope
from graph_passes.ir.graph import GraphDef
from graph_passes.ir.program import LayerCall
from graph_passes.ir.tensorflow_private import number_of_nodes


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
        self._repeated: RepeatedCalls | None = None

    @property
    def repeats(self) -> bool:
        """Whether nodes stand in for calls that repeat others."""
        return self._repeated is not None and len(self._repeated.templates) > 0

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
        self._repeated = RepeatedCalls(graph, scope, own) if self._share else None
        for key, item in items.items():
            vars(item)[names[key]] = self._recorded(item, getattr(item, names[key]), graph)
        try:
            yield
        finally:
            for key, item in items.items():
                if key in own:
                    vars(item)[names[key]] = own[key]
                else:
                    del vars(item)[names[key]]

    def expanded(self, graph_def: GraphDef) -> Expansion | None:
        """Returns the traced graph with all nodes; None if equal calls can't be shared in it."""
        if self._repeated is None:
            return Expansion(graph_def, {}, range(len(graph_def.node) + 1))
        return self._repeated.expand(graph_def)

    def calls(self, starts: Sequence[int]) -> tuple[LayerCall, ...]:
        """Returns the recorded calls, outer ones before those inside them.

        Args:
            starts: position of a node in the trace -> its position now; one more for the end.
        """
        calls = [LayerCall(_path(call.layers), *call.nodes(starts), call.number) for call in self._calls]
        return tuple(sorted(calls, key=lambda call: (call.start, -call.stop)))

    def _recorded(self, item: Any, original: Callable[..., Any], graph: tf.Graph) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if tf.compat.v1.get_default_graph() is not graph:  # the inside of a loop or a branch
                return original(*args, **kwargs)
            self._inside.append(item)
            layers = tuple(self._inside)
            start = number_of_nodes(graph)
            nested: Sequence[tuple[Sequence[Any], Nodes]] = ()
            try:
                if self._repeated is None:
                    returned = original(*args, **kwargs)
                else:
                    returned, nested = self._repeated.call(item, original, args, kwargs, self._calls, len(layers))
            except Exception:
                self.failed_in = self.failed_in or _path(layers)
                raise
            finally:
                self._inside.pop()
            stop = number_of_nodes(graph)
            for inner, nodes in nested:
                self._calls.append(TracedCall((*layers, *inner), start, stop, self._next(inner[-1]), nodes))
            self._calls.append(TracedCall(layers, start, stop, self._next(item)))
            return returned

        return call

    def _next(self, item: Any) -> int:
        return next(self._counts[id(item)])


def _path(layers: Sequence[Any]) -> str:
    return "/".join(layer.name for layer in layers)
