"""Metrics: making the slices of a batch leave the same state as the whole batch.

Their values live in the user's model, where Keras resets and reads them; each step takes them and returns new ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.keras_private import CompileMetrics, Makeup, loss_tracker, names_in_logs, tensorflow_variable
from dapple_tf.frontend.patching import replaced
from dapple_tf.frontend.variable_hooks import untold, unwatch, watch
from dapple_tf.frontend.variables import VariableTable, assign_value, read_value
from graph_passes.analysis.update_flow import parts_of_update
from graph_passes.ir.graph import Graph, Names, Ref


class RunningMetrics:
    """The metrics of a model, between steps.

    What steps leave is assigned to the metrics' variables when somebody is about to read or assign these.
    """

    def __init__(self, model: keras.Model, table: VariableTable) -> None:
        """Takes the model, and the names of its variables."""
        self._model, self._table = model, table
        self._resets: dict[str, np.ndarray] = {}
        self._makeup: Makeup | None = None
        self._watched: dict[int, tuple[keras.Variable, tf.Variable]] = {}
        self._known: dict[int, np.ndarray] = {}  # identity of a variable -> its value, until somebody else uses it
        self._late: set[int] = set()  # those of them that the variables don't have yet
        self._lock = threading.RLock()

    def follow(self, table: VariableTable) -> None:
        """Goes on with other names for the variables."""
        self._table, self._resets = table, {}

    def leave(self) -> None:
        """Leaves all values in the model's variables, and no longer watches these."""
        with self._lock:
            self._settle(list(self._late))
            self._known.clear()
            unwatch([own for _, own in self._watched.values()], self)
            self._watched.clear()

    def on_read(self, variables: Sequence[tf.Variable]) -> None:
        """Assigns the newest values to variables that somebody is about to read or assign."""
        used = {id(own) for own in variables}
        if not any(id(self._watched[key][1]) in used for key in list(self._known)):
            return  # Without the lock: of two models that share a variable, one at most knows its value.
        with self._lock:
            keys = [key for key in self._known if id(self._watched[key][1]) in used]
            self._settle(keys)
            for key in keys:
                del self._known[key]

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
        return self._read(variable), self._resets[name]

    def reset(self, metrics: Iterable[Any]) -> None:
        """Resets these metrics of the model."""
        for metric in single_metrics(metrics):
            if _has_own(metric, "reset_state", keras.metrics.Mean) and metric.dtype == "float32":
                for variable in (metric.total, metric.count):
                    self._assign(variable, np.zeros((), np.float32))
            else:
                metric.reset_state()

    def _read(self, variable: keras.Variable) -> np.ndarray:
        value = self._known.get(id(variable))
        if value is None:
            self._watch(variable)
            with untold(self):
                value = read_value(variable)
            with self._lock:
                self._known[id(variable)] = value
        return value

    def _assign(self, variable: keras.Variable, value: np.ndarray) -> None:
        if id(variable) not in self._known:
            self._watch(variable)
            with untold(self):
                _ = variable.value.handle  # Who else knows its value learns that it changes.
        with self._lock:
            self._known[id(variable)] = value
            self._late.add(id(variable))

    def _watch(self, variable: keras.Variable) -> None:
        held = tensorflow_variable(variable)
        if self._watched.get(id(variable), (None, None))[1] is not held:
            self._watched[id(variable)] = variable, held
            watch([held], self)

    def _settle(self, keys: Iterable[int]) -> None:
        with untold(self):
            for key in self._late.intersection(keys):
                self._late.discard(key)
                assign_value(self._watched[key][0], self._known[key])

    def update(self, mode: str, results: Mapping[str, np.ndarray], loss: float | None, samples: int) -> None:
        """Copies a step's results into the model's metrics, the mean loss included.

        The model's own step ("train" or "test") updates the mean loss itself, if at all.
        """
        for name, value in results.items():
            self._assign(self._table.keras_variables[name], value)
        tracker = loss_tracker(self._model)
        if tracker is None or mode in self._table.logs:
            return
        if type(tracker) is not keras.metrics.Mean or tracker.dtype != "float32":
            # Keras would make a float32 of a Python float.
            tracker.update_state(tf.constant(loss, tracker.dtype), sample_weight=samples)
            return
        # As `update_state`, without a dozen operations of Keras' that take longer than a small model's layers.
        weight = np.float32(samples)
        self._assign(tracker.total, np.asarray(self._read(tracker.total) + np.float32(loss) * weight))
        self._assign(tracker.count, np.asarray(self._read(tracker.count) + weight))

    def results(self, mode: str, metrics: Sequence[Any] | None = None) -> dict[str, Any]:
        """Returns the model's logs after a step: its metrics' values, or its own step's result.

        Args:
            mode: the step's.
            metrics: the model's metrics; None if they aren't known.
        """
        model, logs = self._model, self._table.logs.get(mode)
        if logs is not None:
            return logs({name: self._read(self._table.keras_variables[name]) for name in logs.variables})
        if type(model).get_metrics_result is not keras.Model.get_metrics_result:
            return dict(model.get_metrics_result())
        results: dict[str, Any] = {}
        for metric in self._present() if metrics is None else metrics:
            if _has_own(metric, "result", keras.metrics.Mean) and metric.dtype == "float32":
                total, count = self._read(metric.total), self._read(metric.count)
                result = total / count if count else np.float32(0)
            else:
                result = metric.result()
            results |= result if isinstance(result, dict) else {metric.name: result}
        return results

    def _present(self) -> Sequence[Any]:
        """Returns the model's metrics."""
        if self._makeup is None or self._makeup.changed:
            self._makeup = Makeup(self._model)
        return self._makeup.metrics

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


def _has_own(metric: Any, method: str, kind: type[keras.metrics.Metric]) -> bool:
    """Whether a metric has the method of a class of Keras'."""
    return getattr(type(metric), method, None) is getattr(kind, method) and method not in vars(metric)


def in_order(metrics: Iterable[Any], logs: Mapping[str, Any]) -> Any:
    """Returns logs in the order of a model's metrics, as Keras' ``train_on_batch`` does: one alone isn't in a list."""
    names = [metric.name for metric in single_metrics(metrics)]
    ordered = [logs[name] for name in names if name in logs]
    ordered += [logs[name] for name in sorted(logs) if name not in names]
    return ordered[0] if len(ordered) == 1 else ordered


def single_metrics(metrics: Iterable[Any]) -> list[keras.metrics.Metric]:
    """Returns the given metrics of a model, with the compiled ones one by one."""
    single: list[keras.metrics.Metric] = []
    for metric in metrics:
        single += metric.metrics if isinstance(metric, CompileMetrics) else [metric]
    return single


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
    """Returns id of a metric's variable -> the metric's name in logs, unique in the model."""
    unique, logged = Names(), names_in_logs(model)
    names: dict[int, str] = {}
    for metric in single_metrics(model.metrics):
        name = unique.fresh(logged.get(id(metric), metric.name))
        for variable in metric.variables:
            names.setdefault(id(variable), name)
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
