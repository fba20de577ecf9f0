"""The logs of a model's own ``train_step`` or ``test_step``: traced as part of the step, computed on the host.

Logs are made of metrics, the batch and the optimizer's variables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.keras_private import inner_optimizer, learning_rate_of
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.trace_scope import TraceScope
from graph_passes.ir.graph import Graph, GraphDef, Ref
from graph_passes.ir.program import VariableKind
from graph_passes.passes.build_forward import extract

if TYPE_CHECKING:
    from dapple_tf.frontend.variables import VariableTable


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


class OptimizerReads:
    """A step's reads of the optimizer's variables: placeholders, which only logs may use.

    Logs have the variables' values after the step.

    Attributes:
        model: the model.
        table: names of its variables.
        updated: whether the optimizer has made its update, so that reads give the values after it.
    """

    def __init__(self, model: keras.Model, table: VariableTable, *, updated: bool) -> None:
        optimizer = getattr(model, "optimizer", None)  # It may not be compiled.
        self.model, self.table, self.updated = model, table, updated
        self._variables = {} if optimizer is None else {id(own): own for own in optimizer.variables}
        inner = inner_optimizer(optimizer)
        self._same = {id(learning_rate_of(inner))}  # It's assigned by others than the optimizer.
        self._values: dict[tuple[int, bool], tf.Tensor] = {}

    def __call__(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value for a variable's readers if it is one of the optimizer's, else None."""
        if id(variable) not in self._variables:
            return None
        key = id(variable), self.updated or id(variable) in self._same
        if key not in self._values:
            self._values[key] = tf.compat.v1.placeholder(variable.dtype, variable.shape, name="of_optimizer")
        return self._values[key]

    @property
    def sources(self) -> dict[str, tf.Tensor]:
        """Variable -> its value after the step, for variables that were read."""
        if self._values:
            self.table.add_optimizer(self.model.optimizer)
        own = ((self._variables[key], value) for (key, updated), value in self._values.items() if updated)
        return {self.table.name_of(variable): value for variable, value in own}

    def check(self, step: str, what: str, tensors: Iterable[tf.Tensor], *, also_updated: bool) -> None:
        """Refuses results that a step computes from the optimizer's variables.

        Args:
            step: the model's own step, as the subject of a sentence goes on with the model; empty for Keras' own.
            what: description of these tensors.
            tensors: results of the step.
            also_updated: whether they mustn't depend on the variables' values after the step, either.

        Raises:
            CaptureError: one of them depends on such a variable.
        """
        for (key, updated), value in self._values.items():
            if updated and not also_updated:
                continue
            if any(depends_on(tensor, value) for tensor in tensors):
                way_out = "return it as a log of its own, read after self.optimizer.apply()"
                if also_updated:
                    way_out = "take a weight of a layer that counts steps, or that a callback assigns"
                raise CaptureError(
                    f"{step}model {self.model.name!r} computes {what} from {self._variables[key].path!r} of its "
                    f"optimizer, which a pipeline updates where weights are, at the end of a step: {way_out}"
                )


class TracedLogs:
    """A step's logs while it is traced. Logs that aren't made of metrics alone become means over slices.

    Attributes:
        logs: structure of the logs, with tensors of the graph or Python values.
        sources: variable of a metric or the optimizer -> the tensor of its value after the step.
        values: variable of such a mean -> its value before the step.
        updates: variable of such a mean -> its value after the step.
        missing: (step, number of a log) -> name and dtype of the variable that must be made for it first.
    """

    def __init__(self, mode: str, weight: tf.Tensor, scope: TraceScope, reads: OptimizerReads, logs: Any) -> None:
        """Finds the sources of the logs.

        Args:
            mode: ``"train"`` or ``"test"``.
            weight: samples of the slice / samples of the batch.
            scope: has the step's assignments.
            reads: has the model, and the step's reads of its optimizer's variables.
            logs: the logs that it returned.

        Raises:
            CaptureError: a log is computed from the batch and isn't one number, or from the optimizer's variables as
                they were before the update.
        """
        model, table = reads.model, reads.table
        self.values: dict[str, tf.Tensor] = {}
        self.updates: dict[str, tf.Tensor] = {}
        self.missing: dict[tuple[str, int], tuple[str, tf.DType]] = {}
        self.sources = {table.name_of(v): scope.get_current_value(v) for v in model.metrics_variables}
        names = ["_".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(logs)]
        leaves = keras.tree.flatten(logs)
        leaves = [tf.convert_to_tensor(leaf.value) if isinstance(leaf, keras.Variable) else leaf for leaf in leaves]
        reads.check(f"{mode}_step() of ", "a log", filter(tf.is_tensor, leaves), also_updated=False)
        self.sources |= reads.sources
        known = list(self.sources.values())
        for number, leaf in enumerate(leaves):
            if not tf.is_tensor(leaf) or not depends_on_batch(leaf, known):
                continue
            if leaf.shape.rank != 0 or not leaf.dtype.is_floating:
                raise CaptureError(
                    f"{mode}_step() of model {model.name!r} returns a log {names[number]!r} of shape {leaf.shape} and "
                    f"dtype {leaf.dtype.name} that is computed from the batch: return one floating-point number, or "
                    f"the result() of a metric"
                )
            variable = table.batch_logs.get((mode, number))
            if variable is None:
                self.missing[mode, number] = names[number], leaf.dtype
                continue
            name = table.add(variable, VariableKind.METRIC, "metric/")
            self.values[name] = tf.compat.v1.placeholder(leaf.dtype, [], name=f"variable/{name}")
            leaves[number] = self.values[name] + leaf * tf.cast(weight, leaf.dtype)
            self.updates[name] = self.sources[name] = leaves[number]
        self.logs = keras.tree.pack_sequence_as(logs, leaves)
