"""A session in which timed steps run on a copy of the model's variables, and the times of these steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.clusters.session_graph import SessionGraph
from dapple_tf.clusters.shared_connections import connected, open_session
from dapple_tf.describe.cluster import Cluster
from dapple_tf.execution.terminal import without_noise
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.timed_step import LAST, ItemKey, TimedStep
from dapple_tf.variables.device_values import Holding, StorageNodes
from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.program import Variable
from graph_passes.ir.storage import by_dtype

_CALLERS_THREAD = -1
"""The number of no thread pool: whoever runs the graph runs its operators, too."""


class TimedSession:
    """A session with the model's variables on one device.

    Attributes:
        device: name of the device.
        metrics: metric variable -> its running value and its value after a reset.
        session: the session.
    """

    def __init__(self, cluster: Cluster, device: str, metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        self.device, self.metrics = device, metrics
        self._session_graph = SessionGraph()
        with contextlib.ExitStack() as opened:
            connection = opened.enter_context(connected(cluster))
            self.session = open_session(cluster, self._session_graph.graph, connection)
            opened.callback(self.session.close)
            self._opened = opened.pop_all()

    def __enter__(self) -> TimedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, graph: GraphDef, name: str) -> None:
        """Adds nodes under ``name/``, and functions that are missing."""
        self._session_graph.add(graph, name)

    def load(self, table: VariableTable, variables: Sequence[Variable]) -> None:
        """Copies Keras' values to the device."""
        storage = StorageNodes([Holding((0,), (self.device,), tuple(variables))])
        self.add(storage.graph, StorageNodes.PREFIX)
        feed = {}
        for place, (_, group) in zip(storage.feeds[0], by_dtype(variables).items(), strict=True):
            values = table.values(variable.name for variable in group)
            feed[f"{StorageNodes.PREFIX}/{place}:0"] = np.concatenate([value.ravel() for value in values])
        if feed:
            self.session.run([f"{StorageNodes.PREFIX}/{node}" for node in storage.loads[0]], feed)


class StepRuns:
    """A timed step in a session, and the times of its runs.

    Attributes:
        timed: the step.
        name: prefix of its nodes in the session's graph.
        device: name of its device.
    """

    def __init__(self, session: TimedSession, timed: TimedStep, name: str) -> None:
        self.timed, self.name, self.device = timed, name, session.device
        self._session = session
        session.add(timed.graph, name)
        self._fetch: dict[str, Any] = {"stamps": [f"{name}/{stamp}:0" for stamp in timed.stamps]}
        if timed.step.train is not None:
            self._fetch["train"] = f"{name}/{timed.step.train}"
        # Fetched as nodes, not tensors: they run, and nothing is copied to the host.
        self._fetch["unread"] = [f"{name}/{node}" for node in timed.unread]
        self._feeds: dict[int, dict[str, Any]] = {}
        self._rounds: dict[int, list[np.ndarray]] = {}
        self._position = {item.key: index for index, item in enumerate(timed.items)}

    def _placed(self, ref: Ref) -> str:
        return f"{self.name}/{ref.node}:{ref.output}"

    def feed(self, samples: int, values: Mapping[Ref, np.ndarray]) -> None:
        """Sets the inputs of runs with micro-batches of ``samples``: flat batch input -> the whole batch."""
        step = self.timed.step
        feeds: dict[Ref, Any] = {step.feeds[ref]: array for ref, array in values.items()}
        for variable, places in step.metric_feeds.items():
            feeds |= dict(zip(places, self._session.metrics[variable], strict=True))
        feeds |= {Ref(place): factors * samples for place, factors in self.timed.sizes.items()}
        self._feeds[samples] = {self._placed(ref): value for ref, value in feeds.items()}
        self._rounds.setdefault(samples, [])

    def run(self, samples: int, *, kept: bool = True) -> None:
        """Runs the step once; ``kept`` says whether its times are kept."""
        stamps = self._session.session.run(self._fetch, self._feeds[samples])["stamps"]
        if kept:
            # The clock may be set back meanwhile.
            self._rounds[samples].append(np.maximum(np.diff(np.asarray(stamps)), 0))

    def trace(self, samples: int, *, alone: bool = False) -> Any:
        """Runs the step once and returns its step stats; ``alone`` runs one operator at a time on CPUs of this process.

        Times on CPUs are known without TensorFlow's profiler, which only a GPU's kernels need.
        """
        metadata = tf.compat.v1.RunMetadata()
        levels = tf.compat.v1.RunOptions
        options = levels(trace_level=levels.FULL_TRACE)
        if alone and "device:CPU" in self.device:
            options = levels(trace_level=levels.SOFTWARE_TRACE, inter_op_thread_pool=_CALLERS_THREAD)
        with without_noise():
            self._session.session.run(self._fetch, self._feeds[samples], options=options, run_metadata=metadata)
        return metadata.step_stats

    def times(self, samples: int, work: str, stage: int = 0, micro_batch: int = LAST) -> np.ndarray:
        """Returns the seconds of an item in each kept round; zeros if the step has no such item."""
        index = self._position.get(ItemKey(work, stage, micro_batch))
        rounds = self._rounds[samples]
        return np.zeros(len(rounds)) if index is None else np.asarray([seconds[index] for seconds in rounds])

    def time(self, samples: int, work: str, stage: int = 0, micro_batch: int = LAST) -> float:
        """Returns the median of `times`."""
        return float(np.median(self.times(samples, work, stage, micro_batch)))

    def typical(self) -> float:
        """Returns the median of all times of all items."""
        return float(np.median(np.concatenate([seconds for rounds in self._rounds.values() for seconds in rounds])))
