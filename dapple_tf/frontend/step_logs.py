"""The logs of a model's own ``train_step`` or ``test_step``, computed on the host from values of variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.errors import CaptureError
from graph_passes.ir.graph import Graph, GraphDef, Ref
from graph_passes.passes.build_forward import extract


class StepLogs:
    """Logs as functions of the variables of metrics and of the optimizer.

    Args:
        graph: the traced step.
        logs: structure of the logs, with tensors of the graph or Python values.
        sources: variable -> the tensor of its value after the step.
    """

    def __init__(self, graph: GraphDef, logs: Any, sources: Mapping[str, tf.Tensor]) -> None:
        leaves = keras.tree.flatten(logs)
        self._structure = keras.tree.map_structure(lambda _: 0, logs)
        self._leaves = [None if tf.is_tensor(leaf) else leaf for leaf in leaves]
        self._places = [index for index, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        wanted = [Ref.parse(leaves[index].name) for index in self._places]
        arguments = {Ref.parse(tensor.name): name for name, tensor in sources.items()}
        shapes = {Ref.parse(tensor.name): tuple(tensor.shape) for tensor in sources.values()}
        part, placed = extract(Graph(graph), wanted, arguments, shapes)
        self._graph = part
        self._inputs = {arguments[ref]: str(place) for ref, place in placed.items()}
        self._wanted = [str(placed.get(ref, ref)) for ref in wanted]

    @property
    def variables(self) -> Sequence[str]:
        """The variables from which logs are computed."""
        return tuple(self._inputs)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        @tf.function(autograph=False)
        def computed(*values: tf.Tensor) -> Any:
            inputs = dict(zip(self._inputs.values(), values, strict=True))
            wanted = [name if ":" in name else f"{name}:0" for name in self._wanted]
            return tf.graph_util.import_graph_def(self._graph, inputs, wanted, name="logs")

        return computed

    def __call__(self, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns the logs for these values of variables."""
        leaves = list(self._leaves)
        results = self._function(*(tf.constant(values[name]) for name in self._inputs)) if self._wanted else []
        for index, result in zip(self._places, results, strict=True):
            leaves[index] = result
        return dict(keras.tree.pack_sequence_as(self._structure, leaves))


def depends_on_batch(tensor: tf.Tensor, sources: Sequence[tf.Tensor]) -> bool:
    """Whether a tensor depends on a batch or on weights other than through these tensors."""
    return any(each.op.type == "Placeholder" for each in _behind(tensor, sources))


def depends_on(tensor: tf.Tensor, source: tf.Tensor) -> bool:
    """Whether a tensor depends on another one."""
    return any(each is source for each in _behind(tensor, ()))


def _behind(tensor: tf.Tensor, ends: Sequence[tf.Tensor]) -> Iterator[tf.Tensor]:
    """Yields a tensor and those from which it is computed, up to ``ends``, which are left out."""
    known = {id(end) for end in ends}
    pending, seen = [tensor], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in known or id(each.op) in seen:
            continue
        seen.add(id(each.op))
        yield each
        pending += each.op.inputs


def check_logs(model: keras.Model, step: str, logs: Any) -> None:
    """Refuses logs that Keras can't use.

    Raises:
        CaptureError: they aren't a dict.
    """
    if not isinstance(logs, dict):
        raise CaptureError(
            f"{step}() of model {model.name!r} returns a {type(logs).__name__}; return a dict of logs, as Keras' own "
            f"does"
        )
