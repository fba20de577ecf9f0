"""A functional model's order of layers, tensors and outputs, as Keras knows them without a trace."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import functional_graph, layers_of, nodes_in_order, output_structure


def cuts_are_safe(model: keras.Model, cuts: Sequence[str]) -> bool:
    """Whether a functional model can certainly be cut after these layers, without data or a trace.

    True if every cut is the plain name of a layer of the model itself, called once and unique in all nested layers, the
    cuts are in calling order, every stage has a layer with weights, and every tensor that crosses a cut has the batch
    as its first and only unknown axis. All other cuts need a trace. Layers whose number of rows depends on the data
    show when the first batch is prepared.
    """
    graph = functional_graph(model)
    if graph is None:
        return False
    names = [operation.name for operation in _operations(model)]
    calls = _calls(graph)
    order = {node.operation.name: position for position, node in enumerate(calls)}
    if any(names.count(cut) != 1 or cut not in order for cut in cuts):
        return False
    if any(sum(node.operation.name == cut for node in calls) != 1 for cut in cuts):
        return False
    starts = [0, *(order[cut] + 1 for cut in cuts), len(calls)]
    stages = [range(start, stop) for start, stop in itertools.pairwise(starts)]
    if not all(any(getattr(calls[position].operation, "weights", ()) for position in stage) for stage in stages):
        return False
    stage_of = {position: number for number, stage in enumerate(stages) for position in stage}
    maker = {id(tensor): stage_of[position] for position, node in enumerate(calls) for tensor in node.outputs}
    return all(
        tensor.shape[:1] == (None,) and None not in tensor.shape[1:]
        for position, node in enumerate(calls)
        for tensor in node.input_tensors
        if maker.get(id(tensor), stage_of[position]) != stage_of[position]
    )


@contextlib.contextmanager
def outputs_as_declared(model: keras.Model) -> Iterator[None]:
    """Makes a functional model's call return placeholders of its declared shapes and dtypes, inside the context.

    Building losses and metrics needs only these, and otherwise traces the whole model.
    """
    graph = functional_graph(model)
    if graph is None or "call" in vars(model):
        yield
        return

    def call(*_: Any, **__: Any) -> Any:
        return keras.tree.map_structure(
            lambda tensor: tf.compat.v1.placeholder(tensor.dtype, tensor.shape), output_structure(graph)
        )

    vars(model)["call"] = call  # An assignment would be tracked by Keras.
    try:
        yield
    finally:
        del vars(model)["call"]


def _calls(graph: Any) -> list[Any]:
    """Returns the calls of operations, in calling order."""
    return [node for node in nodes_in_order(graph) if node.operation and not node.is_input]


def _operations(model: keras.Model) -> list[Any]:
    """Returns the layers and operations of a model, nested ones included."""
    operations = {}
    for layer in layers_of(model, include_self=False):
        for operation in (layer, *getattr(layer, "operations", ())):
            operations[id(operation)] = operation
    return list(operations.values())
