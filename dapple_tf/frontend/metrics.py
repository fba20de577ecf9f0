"""Metrics: making the slices of a batch leave the same state as the whole batch.

Their values live in the user's model, where Keras resets and reads them; each step takes them and returns new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.frontend.patching import replaced
from dapple_tf.frontend.variables import VariableTable, assign_value, read_value
from dapple_tf.keras_private import compiled_metrics, loss_tracker
from graph_passes.analysis.running_sums import parts_of_update
from graph_passes.ir.graph import Graph, Ref


class RunningMetrics:
    """The metrics of a model, between steps."""

    def __init__(self, model: keras.Model, table: VariableTable) -> None:
        self._model = model
        self._table = table
        self._resets: dict[str, np.ndarray] = {}

    def feeds(self) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """Returns metric variable -> (running value, value after a reset), read on access."""
        return _Feeds(self._feed)

    def _feed(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        variable = self._table.keras_variables[name]
        if any(variable is own for own in self._table.batch_logs.values()):
            zero = np.zeros((), variable.dtype)
            return zero, zero
        if name not in self._resets:
            metric = next(m for m in self._model.metrics if any(own is variable for own in m.variables))
            self._resets |= self._after_reset(metric)
        return read_value(variable), self._resets[name]

    def update(self, mode: str, results: Mapping[str, np.ndarray], loss: float | None, samples: int) -> None:
        """Copies a step's results into the model's metrics, the mean loss included.

        The model's own step ("train" or "test") updates the mean loss itself, if at all.
        """
        for name, value in results.items():
            assign_value(self._table.keras_variables[name], value)
        tracker = loss_tracker(self._model)
        if tracker is None or mode in self._table.logs:
            return
        if not _is_plain_mean(tracker):
            # Keras would make a float32 of a Python float.
            tracker.update_state(tf.constant(loss, tracker.dtype), sample_weight=samples)
            return
        # As `update_state`, without a dozen operations of Keras' that take longer than a small model's layers.
        weight = np.float32(samples)
        _add(tracker.total, np.float32(loss) * weight)
        _add(tracker.count, weight)

    def results(self, mode: str) -> dict[str, Any]:
        """Returns the model's logs after a step: its metrics' values, or what its own step returns."""
        model, logs = self._model, self._table.logs.get(mode)
        if logs is not None:
            return logs({name: read_value(self._table.keras_variables[name]) for name in logs.variables})
        if type(model).get_metrics_result is not keras.Model.get_metrics_result:
            return dict(model.get_metrics_result())
        results: dict[str, Any] = {}
        tracker = loss_tracker(model)
        for metric in model.metrics:
            if tracker is not None and metric is tracker and _is_plain_mean(metric):
                total, count = read_value(metric.total), read_value(metric.count)
                result: Any = total / count if count else np.float32(0)
            else:
                result = metric.result()
            results |= result if isinstance(result, dict) else {metric.name: result}
        return results

    def _after_reset(self, metric: keras.metrics.Metric) -> dict[str, np.ndarray]:
        kept = [np.asarray(variable.value) for variable in metric.variables]
        metric.reset_state()
        table = self._table
        reset_values = {table.name_of(v): np.asarray(v.value) for v in metric.variables if table.knows(v)}
        for variable, value in zip(metric.variables, kept, strict=True):
            variable.assign(value)
        return reset_values


class _Feeds(dict[str, tuple[np.ndarray, np.ndarray]]):
    """Metric variables' values, each read once on first access: most steps need few of them."""

    def __init__(self, read: Callable[[str], tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        self[name] = pair = self._read(name)
        return pair


def _is_plain_mean(metric: keras.metrics.Metric) -> bool:
    return type(metric) is keras.metrics.Mean and metric.dtype == "float32"


def _add(variable: keras.Variable, value: np.float32) -> None:
    """Adds to a float32 scalar."""
    tf.raw_ops.AssignAddVariableOp(resource=variable.value.handle, value=tf.constant(value, tf.float32))


@contextlib.contextmanager
def weighted_means(weight: tf.Tensor) -> Iterator[None]:
    """Makes a ``keras.metrics.Mean`` of scalars count each slice by its share of the batch, inside the context.

    Such a mean (Keras keeps one for each output's loss) is over batches, which all count 1, whatever their size: the
    slices of a batch must count 1 together.

    Args:
        weight: samples of the slice / samples of the batch (a scalar placeholder).
    """

    def weighted(original: Callable[..., None]) -> Callable[..., None]:
        def update_state(metric: keras.metrics.Mean, values: Any, sample_weight: Any = None) -> None:
            if sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
                sample_weight = tf.cast(weight, metric.dtype)
            original(metric, values, sample_weight)

        return update_state

    with replaced(keras.metrics.Mean, "update_state", weighted):
        yield


def metric_names(model: keras.Model) -> dict[int, str]:
    """Returns id of a metric's variable -> a name for the metric, unique in the model.

    Each compiled metric has its own name, as Keras updates each by itself.
    """
    compiled = compiled_metrics(model)
    single: list[keras.metrics.Metric] = []
    for metric in model.metrics:
        single += compiled.metrics if metric is compiled else [metric]
    names: dict[int, str] = {}
    for number, metric in enumerate(single):
        for variable in metric.variables:
            names.setdefault(id(variable), f"{metric.name}_{number}")
    return names


def is_sum(graph: Graph, update: Ref, value: Ref, running: Container[str]) -> bool:
    """Whether an update only adds to a metric variable's value something that depends on no metric's running value.

    Several replicas can keep such sums, which are added up at the end. Others (a maximum, say) must see the values one
    after the other.

    Args:
        graph: the flat graph.
        update: the new value.
        value: the old value.
        running: nodes of the old values of all metric variables.
    """
    parts = parts_of_update(graph, update, value)
    if parts is None or not all(part.added for part in parts):
        return False
    return not any(name in running for name in graph.ancestors([part.ref for part in parts], control=False))


def merged(parts: Sequence[np.ndarray], initial: np.ndarray) -> np.ndarray:
    """Returns a metric's value over all replicas: the first's running value plus what others added to ``initial``."""
    total = parts[0]
    for part in parts[1:]:
        total = total + (part - initial)
    return np.asarray(total)
