"""What logs of a model's own step are made of while it is traced: metrics, the batch, the optimizer's variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.step_logs import depends_on, depends_on_batch
from dapple_tf.frontend.trace_scope import TraceScope
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.keras_private import learning_rate_of
from graph_passes.ir.program import VariableKind


class OptimizerReads:
    """What a step reads of the optimizer's variables: placeholders, of which nothing but logs can be made.

    Logs have what the variables are after the step.

    Attributes:
        updated: whether the optimizer has made its update, so that what is read is what it has left.
    """

    def __init__(self, model: keras.Model, table: VariableTable, *, updated: bool) -> None:
        optimizer = getattr(model, "optimizer", None)  # It may not be compiled.
        self._model, self._table, self.updated = model, table, updated
        self._variables = {} if optimizer is None else {id(own): own for own in optimizer.variables}
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        self._same = {id(learning_rate_of(inner))}  # It's assigned by others than the optimizer.
        self._values: dict[tuple[int, bool], tf.Tensor] = {}

    def __call__(self, variable: keras.Variable) -> tf.Tensor | None:
        """What a variable's readers get, if it is one of the optimizer's."""
        if id(variable) not in self._variables:
            return None
        key = id(variable), self.updated or id(variable) in self._same
        if key not in self._values:
            self._values[key] = tf.compat.v1.placeholder(variable.dtype, variable.shape, name="of_optimizer")
        return self._values[key]

    @property
    def sources(self) -> dict[str, tf.Tensor]:
        """Variable -> its value after the step, for those that were read."""
        if self._values:
            self._table.add_optimizer(self._model.optimizer)
        own = ((self._variables[key], value) for (key, updated), value in self._values.items() if updated)
        return {self._table.name_of(variable): value for variable, value in own}

    def check(self, step: str, what: str, tensors: Iterable[tf.Tensor], *, also_updated: bool) -> None:
        """Refuses what a step computes of the optimizer's variables.

        Args:
            step: its name.
            what: what these tensors are.
            tensors: results of the step.
            also_updated: whether they mustn't even depend on what variables are after the step.

        Raises:
            CaptureError: one of them depends on such a variable.
        """
        for (key, updated), value in self._values.items():
            if updated and not also_updated:
                continue
            if any(depends_on(tensor, value) for tensor in tensors):
                raise CaptureError(
                    f"{step}() of model {self._model.name!r} computes {what} from {self._variables[key].path!r} of its "
                    f"optimizer, which a pipeline updates where weights are, at the end of a step: return it as a log "
                    f"of its own, read after self.optimizer.apply(), or take a variable of the model"
                )


class TracedLogs:
    """What a step returns while it is traced. Logs that aren't made of metrics alone become means over slices.

    Attributes:
        logs: structure of the logs, with tensors of the graph or Python values.
        sources: variable of a metric or the optimizer -> the tensor of its value after the step.
        values: variable of such a mean -> its value before the step.
        updates: variable of such a mean -> its value after the step.
        missing: (step, number of a log) -> dtype of the variable that it needs first.
    """

    def __init__(
        self,
        model: keras.Model,
        table: VariableTable,
        mode: str,
        weight: tf.Tensor,
        scope: TraceScope,
        reads: OptimizerReads,
        logs: Any,
    ) -> None:
        """Finds out what logs are made of.

        Args:
            model: the model.
            table: names of its variables.
            mode: ``"train"`` or ``"test"``.
            weight: samples of the slice / samples of the batch.
            scope: knows what the step has assigned.
            reads: knows what it has read of the optimizer.
            logs: what it has returned.

        Raises:
            CaptureError: a log is computed from the batch and isn't one number, or from the optimizer's variables as
                they were before the update.
        """
        self.values: dict[str, tf.Tensor] = {}
        self.updates: dict[str, tf.Tensor] = {}
        self.missing: dict[tuple[str, int], tf.DType] = {}
        self.sources = {table.name_of(v): scope.get_current_value(v) for v in model.metrics_variables}
        leaves = keras.tree.flatten(logs)
        leaves = [tf.convert_to_tensor(leaf.value) if isinstance(leaf, keras.Variable) else leaf for leaf in leaves]
        reads.check(f"{mode}_step", "a log", filter(tf.is_tensor, leaves), also_updated=False)
        self.sources |= reads.sources
        known = list(self.sources.values())
        for number, leaf in enumerate(leaves):
            if not tf.is_tensor(leaf) or not depends_on_batch(leaf, known):
                continue
            if leaf.shape.rank != 0 or not leaf.dtype.is_floating:
                raise CaptureError(
                    f"{mode}_step() of model {model.name!r} returns a log of shape {leaf.shape} and dtype "
                    f"{leaf.dtype.name} that is computed from the batch: return one floating-point number, or the "
                    f"result() of a metric"
                )
            variable = table.batch_logs.get((mode, number))
            if variable is None:
                self.missing[mode, number] = leaf.dtype
                continue
            name = table.add(variable, VariableKind.METRIC, "metric/")
            self.values[name] = tf.compat.v1.placeholder(leaf.dtype, [], name=f"variable/{name}")
            leaves[number] = self.values[name] + leaf * tf.cast(weight, leaf.dtype)
            self.updates[name] = self.sources[name] = leaves[number]
        self.logs = keras.tree.pack_sequence_as(logs, leaves)
