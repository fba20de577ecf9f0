"""A training step on one device whose parts run one after the other, with clock-reading nodes between them.

No trace is taken: its overhead, a microsecond or two for every op, would be most of a small layer's time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from dapple_tf.clusters.session import SessionGraph
from dapple_tf.clusters.shared_connections import connected, open_session
from dapple_tf.describe.cluster import Cluster
from dapple_tf.execution.terminal import without_noise
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.variables.device_values import Holding, StorageNodes
from dapple_tf.variables.parameter_groups import readers_of
from graph_passes.ir.graph import STAGE_ATTR, Builder, Graph, GraphDef, Ref, dtype_attr, shape_attr
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.program import Layout, Program, Stage, Step, Value, ValueKind, Variable
from graph_passes.ir.storage import by_dtype, merge_library
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.pass_manager import Pass, run_passes
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.update import Update

MICRO_BATCHES = 2
"""Number of micro-batches: the first warms caches and the allocator, and sets accumulators to which the others add."""
LAST = MICRO_BATCHES - 1
"""The micro-batch that is measured."""

STATISTICS, APPLY, NOTHING = "statistics", "apply", "nothing"
"""Kinds of items without a task's phase: updates, and calls of an empty function."""

MARK = 1_000_003
"""Stands for the samples of a micro-batch while a step is built: a prime, so that no other constant is a multiple."""


class ItemKey(NamedTuple):
    """Identity of an item: its work (a phase's value, or one of the names above), stage and micro-batch."""

    work: str
    stage: int = 0
    micro_batch: int = 0


@dataclasses.dataclass(frozen=True)
class Item:
    """Work that runs alone between two times.

    Attributes:
        key: its identity.
        entry: its first nodes.
        exit: its last nodes.
    """

    key: ItemKey
    entry: tuple[str, ...]
    exit: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A step whose items run one after the other.

    Attributes:
        graph: its top level's graph.
        step: meaning of its tensors.
        stamps: nodes that read the clock (float64 seconds): before the first item and after each.
        items: the items between them.
        sizes: placeholder -> the multiple of a micro-batch's samples to feed, element by element.
        unread: more nodes to run: readers of otherwise unread results, which TensorFlow would remove.
    """

    graph: GraphDef
    step: Step
    stamps: tuple[str, ...]
    items: tuple[Item, ...]
    sizes: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()


def timed_step(
    program: Program,
    updates: Sequence[GroupUpdate],
    device: str,
    host_device: str,
    prefix: str,
    *,
    split: Program | None = None,
) -> TimedStep:
    """Returns a step of `MICRO_BATCHES` micro-batches of the functions' size, with all stages on one device.

    Args:
        program: stages with functions.
        updates: the optimizer's part for each parameter group.
        device: name of the device.
        host_device: name of the device that batches are fed to.
        prefix: start of the names of new functions; unique in the session.
        split: the same with Bx and Bw in place of B: the first micro-batch gets tasks Bx, too, of stages that also
            have a Bw. The last micro-batch is as in training.
    """
    owners = readers_of(program)
    batch = MARK * MICRO_BATCHES
    layout = Layout(((device,),) * len(program.stages), batch, batch, MICRO_BATCHES)
    # Buckets are for reduction, which one device doesn't need.
    update = Update(tuple(updates), bucket_bytes=0, want_gradients=False)
    passes: list[Pass] = [Replicate(layout, host_device, owners, prefix), SplitConcat(), Accumulate(), update]
    complete = run_passes(program, passes)
    graph, step = complete.graph, complete.own_step
    sizes = with_fed_sizes(graph, host_device)
    parts = {} if split is None else _add_input_gradients(program, split, graph, step, device)
    made = chained(graph, step, _items(program, graph, step, parts), device)
    return dataclasses.replace(made, sizes=sizes, unread=_read_results(made, device))


def empty_calls(device: str, count: int) -> TimedStep:
    """Returns calls of an empty function, which measure the time to start a task."""
    kind = dtype_attr(types_pb2.DT_FLOAT)
    body = empty_graph()
    inner = Builder(body)
    argument = inner.append(placeholder("x", types_pb2.DT_FLOAT))
    result = inner.add("y", "Neg", [argument], T=kind)
    function = outline("nothing", Graph(body), [argument], [result])
    graph = empty_graph()
    builder = Builder(graph)
    # Neither constant nor unread, or it would be optimized away.
    value = _random_number(builder, device)
    items = []
    for index in range(count):
        value = builder.append(call_node(builder.names.fresh("nothing"), function, [value], device=device))
        items.append(Item(ItemKey(NOTHING, index), (value.node,), (value.node,)))
    merge_library(graph, [function])
    return chained(graph, Step(Layout(((device,),), 1, 1, 1), train=value.node), items, device)


def input_gradients_of(program: Program, stage: Stage) -> list[Value]:
    """Returns the results of a stage's B that are gradients of inputs from other stages."""
    received = {boundary.ref for boundary in program.boundaries}
    return [v for v in stage.own_backward.outputs if v.kind is ValueKind.GRADIENT and v.ref in received]


def has_weight_gradients(program: Program, stage: Stage) -> bool:
    """Returns whether a stage's B computes anything else."""
    return len(input_gradients_of(program, stage)) < len(stage.own_backward.outputs)


def _add_input_gradients(program: Program, split: Program, graph: GraphDef, step: Step, device: str) -> dict[Task, str]:
    """Adds tasks Bx to the first micro-batch; returns task B -> its call of Bx, a part of it."""
    view = Graph(graph)
    builder = Builder(graph)
    functions: list[FunctionDef] = []
    calls: dict[Task, str] = {}
    for stage, halves in zip(program.stages, split.stages, strict=True):
        part = halves.input_grad
        if part is None or halves.weight_grad is None:
            continue
        functions.append(part.function)
        task = Task(stage.index, Phase.BACKWARD, 0)
        inputs = dict(zip(stage.own_backward.inputs, view.inputs(step.entry[task]), strict=True))
        node = builder.names.fresh(f"stage{stage.index}/input_gradient")
        builder.append(call_node(node, part.function, [inputs[value] for value in part.inputs], device=device))
        calls[task] = node
    merge_library(graph, functions)
    return calls


def _read_results(timed: TimedStep, device: str) -> tuple[str, ...]:
    """Adds a reader of each result of the items' functions that the step doesn't need, such as losses and metrics.

    Otherwise TensorFlow removes such results and their work, and renumbers the others.
    """
    view = Graph(timed.graph)
    assert timed.step.train is not None
    needed = view.ancestors([Ref(timed.step.train), *(Ref(stamp) for stamp in timed.stamps)])
    read = {ref for name in needed for ref in view.inputs(name)}
    builder = Builder(timed.graph)
    readers = []
    for name in dict.fromkeys(name for item in timed.items for name in (*item.entry, *item.exit)):
        if "Tout" not in view.nodes[name].attr:  # It isn't a call.
            continue
        for index, dtype in enumerate(view.nodes[name].attr["Tout"].list.type):
            result = Ref(name, index)
            if result not in read:
                readers.append(builder.add("unread", "Identity", [result], device=device, T=dtype_attr(dtype)).node)
    return tuple(readers)


def _items(program: Program, graph: GraphDef, step: Step, input_gradients: Mapping[Task, str]) -> list[Item]:
    """Returns all work of a step in an executable order."""
    items = []
    for micro_batch in range(MICRO_BATCHES):
        order = [Task(stage.index, Phase.FORWARD, micro_batch) for stage in program.stages]
        order += [Task(stage.index, Phase.BACKWARD, micro_batch) for stage in reversed(program.stages)]
        for task in order:
            if task in input_gradients:
                node = input_gradients[task]
                items.append(Item(ItemKey(Phase.INPUT_GRAD.value, task.stage, micro_batch), (node,), (node,)))
            if task in step.entry:
                key = ItemKey(task.phase.value, task.stage, micro_batch)
                items.append(Item(key, (step.entry[task],), step.exit[task]))
    if statistics := tuple(node.name for node in graph.node if NodeKind.of(node) is NodeKind.STATISTICS):
        items.append(Item(ItemKey(STATISTICS), statistics, statistics))
    applied: dict[int, tuple[str, ...]] = {}  # shared work counts for the first of several stages
    for node in graph.node:
        if NodeKind.of(node) is NodeKind.APPLY:
            applied[node.attr[STAGE_ATTR].i] = (*applied.get(node.attr[STAGE_ATTR].i, ()), node.name)
    # In a pipeline the last stage ends first.
    for stage, nodes in sorted(applied.items(), reverse=True):
        items.append(Item(ItemKey(APPLY, stage), nodes, nodes))
    return items


def with_fed_sizes(graph: GraphDef, host_device: str) -> dict[str, np.ndarray]:
    """Turns the constants that contain numbers of samples into placeholders.

    One graph then serves all sizes: preparing it takes seconds, most of them for its functions.

    Returns:
        Placeholder -> the multiple of a micro-batch's samples, element by element.
    """
    multiples = {}
    for node in graph.node:
        if node.op != "Const" or node.attr["dtype"].type not in (types_pb2.DT_INT32, types_pb2.DT_INT64):
            continue
        values = np.asarray(tf.make_ndarray(node.attr["value"].tensor))
        if not values.size or np.any(values == 0) or np.any(values % MARK):
            continue
        multiples[node.name] = values // MARK
        kind = {"dtype": dtype_attr(node.attr["dtype"].type), "shape": shape_attr(values.shape)}
        node.op, node.device = "Placeholder", host_device
        node.attr.clear()
        for name, value in kind.items():
            node.attr[name].CopyFrom(value)
    return multiples


def chained(graph: GraphDef, step: Step, items: Sequence[Item], device: str) -> TimedStep:
    """Adds clock-reading nodes, and control edges through them: each node runs between two times, once.

        F0 -> sum -> B0   becomes   t0 -> F0 -> t1 -> sum -> B0 -> t2,  F0 in t1 - t0, sum and B0 in t2 - t1

    Work that merely connects items (such as the sum of the gradients of several readers) counts for the first item that
    needs it; work before all items (reading variables, cutting batches) ends before time starts.
    """
    view = Graph(graph)
    order = view.topological()
    item_nodes = {name for item in items for name in (*item.entry, *item.exit)}
    behind: set[str] = set()  # items, and nodes after any item
    for name in order:
        if name in item_nodes or any(ref.node in behind for ref in view.inputs(name)):
            behind.add(name)
    # Constants and placeholders are ready at once.
    before = [
        name for name in order if name not in behind and view.nodes[name].op not in ("Const", "Placeholder", "NoOp")
    ]
    connecting = _connecting(view, items, behind - item_nodes)
    nodes = {node.name: node for node in graph.node}
    builder = Builder(graph)
    stamps = [time_stamp(builder, device, before)]
    for item, own in zip(items, connecting, strict=True):
        for name in (*item.entry, *own):
            nodes[name].input.append(f"^{stamps[-1]}")
        stamps.append(time_stamp(builder, device, item.exit))
    return TimedStep(graph, step, tuple(stamps), tuple(items))


def _connecting(view: Graph, items: Sequence[Item], free: set[str]) -> list[list[str]]:
    """Returns, for each item, the ``free`` nodes that it is the first to need."""
    taken: set[str] = set()
    connecting: list[list[str]] = []
    for item in items:
        own: list[str] = []
        pending = list(item.entry)
        while pending:
            for ref in view.inputs(pending.pop()):
                if ref.node in free and ref.node not in taken:
                    taken.add(ref.node)
                    own.append(ref.node)
                    pending.append(ref.node)
        connecting.append(own)
    return connecting


def time_stamp(builder: Builder, device: str, after: Sequence[str]) -> str:
    """Returns a node that reads the clock when ``after`` have ended."""
    clock, spec = device, tf.DeviceSpec.from_string(device)
    if spec.device_type == "GPU":
        # A control edge only shows that work was enqueued; a copy to its machine's CPU waits until it is done.
        clock = spec.replace(device_type="CPU", device_index=0).to_string()
        mark = _random_number(builder, device, after)
        after = [builder.add("copied", "Identity", [mark], device=clock, T=dtype_attr(types_pb2.DT_FLOAT)).node]
    return builder.add("stamp", "Timestamp", control=after, device=clock).node


def _random_number(builder: Builder, device: str, after: Sequence[str] = ()) -> Ref:
    """Returns a number that isn't known before it is computed."""
    shape = builder.const([1], types_pb2.DT_INT32)
    kinds = {"dtype": dtype_attr(types_pb2.DT_FLOAT), "T": dtype_attr(types_pb2.DT_INT32)}
    return builder.add("number", "RandomUniform", [shape], control=after, device=device, **kinds)


# ---- running steps in a session, on a copy of the model's variables


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
            values = [table.value(variable.name) for variable in group]
            feed[f"{StorageNodes.PREFIX}/{place}:0"] = np.concatenate([value.ravel() for value in values])
        if feed:
            self.session.run([f"{StorageNodes.PREFIX}/{node}" for node in storage.loads[0]], feed)


class StepRuns:
    """A timed step in a session, and the times of its runs.

    Attributes:
        timed: the step.
        name: prefix of its nodes in the session's graph.
        device: name of its device.
        rounds: samples of a micro-batch -> seconds of each item in each run that counts.
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
        self.rounds: dict[int, list[np.ndarray]] = {}
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

    def run(self, samples: int) -> np.ndarray:
        """Runs the step once; returns the seconds of each item."""
        stamps = self._session.session.run(self._fetch, self._feeds[samples])["stamps"]
        return np.maximum(np.diff(np.asarray(stamps)), 0)  # The clock may be set back meanwhile.

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
        """Returns the seconds of an item in each round; zeros if the step has no such item."""
        index = self._position.get(ItemKey(work, stage, micro_batch))
        rounds = self.rounds[samples]
        return np.zeros(len(rounds)) if index is None else np.asarray([seconds[index] for seconds in rounds])

    def time(self, samples: int, work: str, stage: int = 0, micro_batch: int = LAST) -> float:
        """Returns the median of `times`."""
        return float(np.median(self.times(samples, work, stage, micro_batch)))

    def typical(self) -> float:
        """Returns the median of all times of all items."""
        return float(np.median(np.concatenate([seconds for rounds in self.rounds.values() for seconds in rounds])))
