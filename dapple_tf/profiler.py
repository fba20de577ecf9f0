"""The profiler: measures what each layer of a compiled Keras model costs on a device.

The model goes through the passes that training goes through, with a stage for each layer and all stages on one device,
one task after the other. Between tasks stands a node that tells the time: no trace is taken, whose overhead (a
microsecond or two for every op) would be most of a small layer's time. The same is done with the model as a single
stage, and a real step of the engine is timed, in turns with the others because a machine's speed drifts. Layers get
their shares of the single stage's time; what the real step takes beyond its tasks is the time of a step.

Memory is told from one traced step at each of two batch sizes: the trace lists every tensor with its buffer and every
allocation.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from dapple_tf.batch import BatchSpec, Leaf, declared_spec, spec_of
from dapple_tf.capture import Mode, build, capture, check_model
from dapple_tf.cluster import Cluster
from dapple_tf.device_values import DeviceValues
from dapple_tf.engine import hosts_of, stage_updates
from dapple_tf.metrics import RunningMetrics
from dapple_tf.optimizer import check_optimizer
from dapple_tf.plan import Plan
from dapple_tf.profile import ZERO, Cost, LayerProfile, Profile, ProfileError, SharedParameters, Tensor
from dapple_tf.session import session_config
from dapple_tf.variables import VariableTable
from graph_passes.accumulate import Accumulate
from graph_passes.assign_stages import POSITION_ATTR, AssignStages, find_call
from graph_passes.build_backward import BuildBackward
from graph_passes.build_forward import BuildForward
from graph_passes.graph import PHASE_ATTR, Builder, Graph, GraphDef, NodeDef, PassError, Ref, dtype_attr, shape_attr
from graph_passes.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.partition import Partition
from graph_passes.pass_manager import Pass, run_passes
from graph_passes.program import Boundary, Layout, Program, Stage, Step, Value, ValueKind, Variable, VariableKind
from graph_passes.replicate import Replicate, top_level
from graph_passes.split_concat import SplitConcat
from graph_passes.stage_update import StageUpdate
from graph_passes.storage import by_dtype, merge_library
from graph_passes.tasks import Phase, Task
from graph_passes.tensorflow_bridge import dtype_size, empty_graph, infer_shapes
from graph_passes.update import Update, _UpdateGraph

logger = logging.getLogger(__name__)

_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
# Changes when the same model would be measured in another way, so that older files in the cache don't count.
_VERSION = 1
# The first micro-batch warms caches and the allocator, and sets accumulators where the others add to them.
_MICRO_BATCHES = 2
# Stands for the number of samples while a step is built; no other constant is a multiple of it.
_MARK = 1_000_003
# The node that reads what nobody else reads.
_READ = "read"
_WARM_UP = 2
_LEAST_ROUNDS, _MOST_ROUNDS, _BUDGET_SECONDS = 5, 25, 20.0
# The length that an axis which the model leaves open is given, where no example tells.
_OPEN_LENGTH = 128


def profile(
    model: keras.Model,
    batch_size: int | Sequence[int],
    *,
    cluster: Cluster | None = None,
    device: int = 0,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    cache: bool | str | os.PathLike[str] = True,
    repeats: int | None = None,
    progress: bool = True,
) -> Profile:
    """Measures a model layer by layer.

    The model keeps its values, and so does its optimizer: what is trained meanwhile is a copy on the device.

    Args:
        model: a built and compiled Keras model.
        batch_size: samples of a slice (what one device works on at a time): one size, or several, from which follows
            which part of each cost is fixed and which grows with the samples. Sizes around those of the plans to come
            are best.
        cluster: real devices that the model is to be trained on; sessions are configured for all of them. By default
            one local device.
        device: index of the one that is measured.
        x: example inputs, any number of samples. Needed for a model that doesn't declare its inputs (a subclassed one),
            and useful where random numbers (of integers: 0 and 1) aren't typical.
        y: example labels; by default such as the loss takes.
        sample_weight: example weights; by default none.
        cache: whether to keep profiles on disk and look there first; or the directory in place of ``$DAPPLE_CACHE``
            (``~/.cache/dapple_tf/profiles``).
        repeats: how often each time is measured; by default as often as fits into some 20 s, 5 to 25 times.
        progress: whether to tell on stderr how far measuring has got, if it takes more than a second.

    Returns:
        The profile. Layers are named as plans cut: ``block_1``, ``encoder/block_1`` within a nested model,
        ``shared#0`` for the first of several calls. Layers that can't be cut apart are one entry, under the last one's
        name.

    Raises:
        ProfileError: a batch size below 1, no such device, or inputs or labels that can't be guessed.
        CaptureError: the model isn't built or compiled, or can't be captured.
    """
    sizes = _sizes(batch_size)
    cluster = cluster or Cluster.local(1)
    if not cluster.real:
        raise ProfileError("this cluster is a description without real devices: it can be planned for, not measured")
    if not 0 <= device < cluster.num_devices:
        raise ProfileError(f"device is {device}, but the cluster has devices 0 to {cluster.num_devices - 1}")
    if repeats is not None and repeats < 1:
        raise ProfileError(f"repeats is {repeats}; it must be at least 1")
    check_model(model, training=True)
    check_optimizer(model.optimizer, model.trainable_variables)
    with _kept_metrics(model), _Progress(progress) as told:
        told("capturing the model")
        example = _Example.of(model, x, y, sample_weight)
        table = VariableTable(model)
        build(model, table, example.spec)
        program = capture(model, table, Mode.TRAIN, example.spec)
        key = _key(model, program, example, sizes, cluster, device, repeats)
        place = _cache_directory(cache)
        known = None if place is None else _read(place / f"{key}.json")
        if known is not None:
            return known
        found = _Profiler(model, table, program, example, sizes, cluster, device, repeats, told).run(key)
    if place is not None:
        _write(place / f"{key}.json", found)
    return found


def _sizes(batch_size: int | Sequence[int]) -> tuple[int, ...]:
    given = [batch_size] if isinstance(batch_size, int | np.integer) else list(batch_size)
    if not given or any(not isinstance(size, int | np.integer) or size < 1 for size in given):
        raise ProfileError(f"batch_size is {batch_size!r}; give a whole number of at least 1, or several")
    return tuple(sorted({int(size) for size in given}))


@contextlib.contextmanager
def _kept_metrics(model: keras.Model) -> Iterator[None]:
    """Metrics have their values afterwards; those that are built meanwhile are reset."""
    before = [(variable, np.asarray(variable.value)) for variable in model.metrics_variables]
    known = {id(variable) for variable, _ in before}
    try:
        yield
    finally:
        for metric in model.metrics:
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()
        for variable, value in before:
            variable.assign(value)


class _Progress:
    """A line on stderr, from the second second on."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._start = self._last = time.monotonic()
        self._width = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width and sys.stderr.isatty():
            sys.stderr.write("\r" + " " * self._width + "\r")

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        now = time.monotonic()
        logger.info("profile: %s %s", what, f"{done}/{total}" if total else "")
        terminal = sys.stderr.isatty()
        # A log file gets a line every now and then, a terminal one line that changes.
        if not self._wanted or now - self._start < 1 or (not terminal and now - self._last < 5):
            return
        self._last = now
        text = f"profile: {what}" + (f" {done}/{total}" if total else "") + f" ({now - self._start:.0f} s)"
        sys.stderr.write("\r" + text.ljust(self._width) if terminal else text + "\n")
        sys.stderr.flush()
        self._width = len(text)


# ---- example batches


@dataclasses.dataclass(frozen=True)
class _Example:
    """What batches look like, and arrays to make them of.

    Attributes:
        spec: their structure.
        shapes: the shape of one sample of each array, in feed order.
        arrays: example arrays; None where numbers are drawn.
        classes: for drawn integers: how many values they have.
    """

    spec: BatchSpec
    shapes: tuple[tuple[int, ...], ...]
    arrays: tuple[np.ndarray | None, ...]
    classes: tuple[int, ...]

    @classmethod
    def of(cls, model: keras.Model, x: Any, y: Any, sample_weight: Any) -> _Example:
        if x is None:
            declared = declared_spec(model)
            if declared is None:
                raise ProfileError(
                    f"model {model.name!r} doesn't declare its inputs: give example inputs, profile(model, ..., x=...)"
                )
            x_tree = declared.x
        else:
            x_tree = spec_of(model, x).x
        given_y = None if y is None else spec_of(model, x, y) if x is not None else BatchSpec(None, _leaves("y", y))
        if given_y is not None:
            y_tree, counts = given_y.y, None
        else:
            y_tree, counts = _labels(model, x_tree)
        weights = None if sample_weight is None else _leaves("sample_weight", sample_weight)
        spec = BatchSpec(x_tree, y_tree, weights)
        arrays: list[np.ndarray | None] = []
        classes: list[int] = []
        for tree, example in ((spec.x, x), (spec.y, y), (spec.sample_weight, sample_weight)):
            count = len(_present(tree))
            arrays += [np.asarray(array) for array in _present(example)] if example is not None else [None] * count
            classes += [2] * count if tree is not spec.y or counts is None else counts
        lengths = [
            size
            for leaf, array in zip(spec.leaves, arrays, strict=True)
            if array is not None
            for wanted, size in zip(leaf.shape[1:], array.shape[1:], strict=True)
            if wanted is None
        ]
        length = lengths[0] if lengths else _OPEN_LENGTH
        if not lengths and any(None in leaf.shape[1:] for leaf in spec.leaves):
            logger.warning(
                "model %r leaves lengths open; its profile takes them for %d: give example inputs of a typical length "
                "(x=...) for another",
                model.name,
                length,
            )
        shapes = tuple(
            tuple(array.shape[1:]) if array is not None else tuple(length if d is None else d for d in leaf.shape[1:])
            for leaf, array in zip(spec.leaves, arrays, strict=True)
        )
        for leaf, array in zip(spec.leaves, arrays, strict=True):
            if array is not None and array.shape[0] < 1:
                raise ProfileError(f"{leaf.name} has no samples; give at least one")
        return cls(spec, shapes, tuple(arrays), tuple(classes))

    def batch(self, samples: int) -> list[np.ndarray]:
        """Arrays of a batch, in feed order; the same every time."""
        generator = np.random.default_rng(0)
        found = []
        for leaf, shape, array, classes in zip(self.spec.leaves, self.shapes, self.arrays, self.classes, strict=True):
            dtype = tf.dtypes.as_dtype(leaf.dtype)
            if array is not None:
                values = array[np.arange(samples) % len(array)]
            elif dtype.is_floating or dtype.is_complex:
                values = generator.normal(size=(samples, *shape))
                # Labels may have to be probabilities.
                values = 1 / (1 + np.exp(-values)) if leaf.name.startswith("y") else values
            else:
                values = generator.integers(0, classes, size=(samples, *shape))
            found.append(np.asarray(values).astype(dtype.as_numpy_dtype))
        return found


def _present(tree: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(tree) if leaf is not None]


def _leaves(kind: str, tree: Any) -> Any:
    """A leaf for each array of labels or weights."""

    def leaf(array: Any) -> Leaf:
        value = np.asarray(array)
        return Leaf(kind, value.dtype.name, (None, *value.shape[1:]))

    return keras.tree.map_structure(lambda array: None if array is None else leaf(array), tree)


def _labels(model: keras.Model, x: Any) -> tuple[Any, list[int] | None]:
    """Labels that the compiled losses take, and for each of them the number of classes.

    Raises:
        ProfileError: that can't be told.
    """
    own = type(model).compute_loss is not keras.Model.compute_loss
    if model.loss is None or (own and model._compile_loss is None):
        return None, None
    inputs = keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype), x)
    outputs = model.compute_output_spec(inputs)
    flat = keras.tree.flatten(outputs)
    losses = _losses(model.loss, outputs)
    if losses is None or own:
        raise ProfileError(
            f"the labels that the loss of model {model.name!r} takes can't be guessed: give example labels, "
            f"profile(model, ..., x=..., y=...)"
        )
    leaves, classes = [], []
    for index, (output, loss) in enumerate(zip(flat, losses, strict=True)):
        sparse = "sparse" in _loss_name(loss)
        name = "y" if len(flat) == 1 else f"y[{index}]"
        shape = tuple(output.shape)
        if sparse:
            leaves.append(Leaf(name, "int32", (None, *shape[1:-1])))
        else:
            leaves.append(Leaf(name, keras.config.floatx(), (None, *shape[1:])))
        classes.append(int(shape[-1] or 2) if sparse else 2)
    return keras.tree.pack_sequence_as(outputs, leaves), classes


def _losses(loss: Any, outputs: Any) -> list[Any] | None:
    """The loss of each output; None where they can't be told apart."""
    flat = keras.tree.flatten(outputs)
    if isinstance(loss, Mapping):
        if isinstance(outputs, Mapping):
            return [loss.get(name) for name in sorted(outputs)] if len(flat) == len(outputs) else None
        return list(loss.values()) if len(loss) == len(flat) == 1 else None
    if isinstance(loss, (list, tuple)):
        return list(loss) if len(loss) == len(flat) else None
    return [loss] * len(flat)


def _loss_name(loss: Any) -> str:
    if isinstance(loss, str):
        return loss.lower()
    function = getattr(loss, "fn", loss)
    return f"{type(loss).__name__} {getattr(function, '__name__', '')}".lower()


# ---- layers


def _candidates(model: keras.Model, calls: Sequence[Any]) -> list[Any]:
    """Consecutive calls of layers that a plan may cut after: those of the model, and of models nested in it."""
    found: list[Any] = []

    def visit(container: Any, prefix: str, start: int, stop: int) -> None:
        items = [*getattr(container, "operations", ()), *container._flatten_layers(include_self=False, recursive=False)]
        children = {item.name: item for item in items}
        position = start
        for call in calls:
            inside = call.path.startswith(prefix) and "/" not in call.path[len(prefix) :]
            if not inside or call.start < position or call.stop > stop or call.start == call.stop:
                continue
            position = call.stop
            layer = children.get(call.path[len(prefix) :])
            before = len(found)
            if isinstance(layer, keras.Model):
                visit(layer, call.path + "/", call.start, call.stop)
            if len(found) == before:
                found.append(call)

    visit(model, "", 0, sys.maxsize)
    return found


def _name(call: Any, calls: Sequence[Any]) -> str | None:
    """The name by which a plan cuts after a call; None when any name is ambiguous."""
    for name in (call.path, f"{call.path}#{call.number}"):
        with contextlib.suppress(PassError):
            if find_call(name, calls) is call:
                return name
    return None


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers that can be cut apart: names, and the graphs with a stage for each."""

    names: tuple[str, ...]
    joint: Program


def _find_layers(model: keras.Model, training: Program, inference: Program) -> _Layers:
    """The most layers that can be cut apart, in training as in inference (where dropout, say, has no nodes)."""
    calls = training.roles.calls
    always = {(call.path, call.number) for call in inference.roles.calls if call.stop > call.start}
    candidates = [call for call in _candidates(model, calls) if (call.path, call.number) in always]
    if not candidates:
        return _Layers((model.name,), _joint(training, ()))

    def both(cuts: tuple[str, ...]) -> None:
        AssignStages(cuts).run(training)
        AssignStages(cuts).run(inference)

    names = [name for call in candidates[:-1] if (name := _name(call, calls)) is not None]
    cuts = tuple(_legal(names, both))
    while cuts:  # A stage of integers alone (masks, positions) has no node of its own; it goes with the next one.
        occupied = set(AssignStages(cuts).run(training).node_stage.values())
        empty = [stage for stage in range(len(cuts) + 1) if stage not in occupied]
        if not empty:
            break
        cuts = tuple(cut for stage, cut in enumerate(cuts) if stage != min(empty[0], len(cuts) - 1))
    try:
        joint = _joint(training, cuts)
    except PassError as error:
        logger.info("some layers can't be differentiated apart: %s", error)
        cuts = tuple(_legal(cuts, lambda cuts: _joint(training, cuts)))
        joint = _joint(training, cuts)
    last = _name(candidates[-1], calls) or candidates[-1].path
    while last in cuts:
        last += "'"
    return _Layers((*cuts, last), joint)


def _legal(cuts: Sequence[str], attempt: Callable[[tuple[str, ...]], object]) -> list[str]:
    """The cuts with which ``attempt`` raises no PassError: all in one go, or each half by itself."""
    try:
        attempt(tuple(cuts))
    except PassError as error:
        if len(cuts) <= 1:
            logger.info("no cut after %s: %s", list(cuts), error)
            return []
    else:
        return list(cuts)
    middle = len(cuts) // 2
    first, second = _legal(cuts[:middle], attempt), _legal(cuts[middle:], attempt)
    together = [*first, *second]
    if first and second:
        try:
            attempt(tuple(together))
        except PassError:  # Each half is legal, but not both at once.
            together = first
            for cut in second:
                with contextlib.suppress(PassError):
                    attempt((*together, cut))
                    together = [*together, cut]
    return together


def _joint(program: Program, cuts: tuple[str, ...]) -> Program:
    """Passes 1 to 3: a graph for each stage, with its gradients."""
    return run_passes(program, [AssignStages(cuts), BuildForward(), BuildBackward()])


def _divided(joint: Program, prefix: str, recompute: str = "none") -> Program:
    """Pass 4."""
    return run_passes(joint, [Partition(recompute, prefix=prefix)], first=4)


# ---- step graphs


class _LocalUpdate(_UpdateGraph):
    """The update of stages that are all on one device: what several of them share needs no all-reduce."""

    def _contributors(self) -> dict[str, dict[int, Variable]]:
        found = super()._contributors()
        for name, own in found.items():
            first = next(iter(own.values()))
            found[name] = dict.fromkeys(self.options.hosts.get(name, ()), first) | own
        return found

    def _groups(self) -> dict[tuple[int, ...], list[Variable]]:
        groups: dict[tuple[int, ...], list[Variable]] = {}
        for variable in self.program.roles.variables:
            for stage in self.contributors.get(variable.name, ()):
                groups.setdefault((stage,), []).append(variable)
        return groups

    def _reduced_values(
        self, builder: Builder, inputs: dict[Ref, Ref], wanted: Sequence[str], stage: int, replica: int
    ) -> dict[str, Ref]:
        everywhere = self.groups
        self.groups = {stages: variables for stages, variables in everywhere.items() if stages == (stage,)}
        try:
            return super()._reduced_values(builder, inputs, wanted, stage, replica)
        finally:
            self.groups = everywhere

    def _gradients(self) -> dict[str, Ref]:
        return {}


@dataclasses.dataclass(frozen=True)
class _Item:
    """Something that runs by itself between two times.

    Attributes:
        key: what, stage and micro-batch: ("F", 2, 0).
        entry: its first nodes.
        exit: its last nodes.
    """

    key: tuple[str, int, int]
    entry: tuple[str, ...]
    exit: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Timed:
    """A step whose items run one after the other.

    Attributes:
        graph: its top level.
        step: what its tensors mean.
        stamps: nodes that tell the time (float64 seconds): before the first item and after each.
        items: what runs between them.
        sizes: placeholders for multiples of the number of samples.
    """

    graph: GraphDef
    step: Step
    stamps: tuple[str, ...]
    items: tuple[_Item, ...]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


class _StepMaker:
    """Makes timed steps of stage functions, all on one device."""

    def __init__(self, program: Program, updates: Sequence[StageUpdate], device: str, prefix: str) -> None:
        self.program, self.updates, self.device, self.prefix = program, tuple(updates), device, prefix
        self.hosts, _ = hosts_of(program, updates)

    def make(self, *, input_gradients: bool = False) -> _Timed:
        """A step on two micro-batches, of a size that is fed.

        With ``input_gradients`` the first micro-batch has tasks Bx too: the part of B that the gradients of what a
        stage receives need, for stages that also have a Bw. The second is as in training.
        """
        stages = len(self.program.stages)
        batch = _MARK * _MICRO_BATCHES
        layout = Layout(((self.device,),) * stages, batch, batch, _MICRO_BATCHES)
        passes: list[Pass] = [Replicate(layout, _HOST, self.hosts, self.prefix), SplitConcat(), Accumulate(self.prefix)]
        program = run_passes(self.program, passes, first=5)
        options = Update(self.updates, self.hosts, _HOST, 2**62, 1, self.prefix)
        program = _LocalUpdate(options, program).result()
        assert program.step is not None
        graph = top_level(program)
        sizes = _with_fed_sizes(graph)
        extra = self._input_gradients(graph, program.step) if input_gradients else {}
        items = self._items(graph, program.step, extra)
        return dataclasses.replace(_chained(graph, program.step, items, self.device), sizes=sizes)

    def _input_gradients(self, graph: GraphDef, step: Step) -> dict[Task, str]:
        """Adds tasks Bx to the first micro-batch; the tasks whose B they are a part of, and their nodes."""
        view = Graph(graph)
        builder = Builder(graph)
        functions: list[FunctionDef] = []
        calls: dict[Task, str] = {}
        counts: list[Ref] = []
        for stage in self.program.stages:
            results = _input_gradient_values(self.program, stage)
            if not results or not _has_weight_gradients(self.program, stage):
                continue
            assert stage.graph is not None and stage.backward is not None
            source = Graph(stage.graph)
            places = {value: stage.arguments.get(value, value.ref) for value in stage.backward.inputs}
            wanted = [stage.results[value] for value in results]
            body = source.ancestors(wanted, places.values(), control=False)
            needed = {ref for name in body for ref in source.inputs(name)} | set(wanted)
            used = [value for value in stage.backward.inputs if places[value] in needed]
            name = f"{self.prefix}stage{stage.index}_input_gradient"
            function = outline(name, source, [places[value] for value in used], wanted)
            functions.append(function)
            task = Task(stage.index, Phase.BACKWARD, 0)
            given = dict(zip(stage.backward.inputs, view.inputs(step.entry[task]), strict=True))
            node = builder.names.fresh(f"stage{stage.index}/input_gradient")
            builder.append(call_node(node, function, [given[value] for value in used], device=self.device))
            calls[task] = node
            # What nobody reads wouldn't be computed.
            for index, dtype in enumerate(arg.type for arg in function.signature.output_arg):
                kinds = {"T": dtype_attr(dtype), "out_type": dtype_attr(types_pb2.DT_INT32)}
                counts.append(builder.add("count", "Size", [Ref(node, index)], device=self.device, **kinds))
        if counts:
            builder.add(_READ, "AddN", counts, device=self.device, T=dtype_attr(types_pb2.DT_INT32), N=len(counts))
        merge_library(graph, functions)
        return calls

    def _items(self, graph: GraphDef, step: Step, extra: Mapping[Task, str]) -> list[_Item]:
        items = []
        for micro_batch in range(_MICRO_BATCHES):
            order = [Task(stage.index, Phase.FORWARD, micro_batch) for stage in self.program.stages]
            order += [Task(stage.index, Phase.BACKWARD, micro_batch) for stage in reversed(self.program.stages)]
            for task in order:
                if task in extra:
                    items.append(_Item(("Bx", task.stage, micro_batch), (extra[task],), (extra[task],)))
                if task in step.entry:
                    key = (task.phase.value, task.stage, micro_batch)
                    items.append(_Item(key, (step.entry[task],), step.exit[task]))
        by_phase: dict[str, list[str]] = {}
        for node in graph.node:
            by_phase.setdefault(node.attr[PHASE_ATTR].s.decode() if PHASE_ATTR in node.attr else "", []).append(
                node.name
            )
        if statistics := tuple(by_phase.get("statistics", ())):
            items.append(_Item(("statistics", 0, 0), statistics, statistics))
        # Calls of Apply were added stage by stage; in a pipeline the last stage is the first to be done.
        applied = list(enumerate(by_phase["apply"]))
        items += [_Item(("apply", stage, 0), (node,), (node,)) for stage, node in reversed(applied)]
        return items


def _with_fed_sizes(graph: GraphDef) -> dict[str, int]:
    """Makes placeholders of the constants that the numbers of samples were put into, so that one graph serves all.

    Getting a graph ready takes seconds, most of them for its functions.

    Returns:
        Placeholder -> what it is a multiple of the number of samples by; a vector has that for each element.
    """
    found = {}
    for node in graph.node:
        if node.op != "Const":
            continue
        tensor = node.attr["value"].tensor
        values = [*tensor.int_val, *tensor.int64_val]
        if values and all(value and value % _MARK == 0 for value in values):
            dims = [dim.size for dim in tensor.tensor_shape.dim]
            dtype = tensor.dtype
            found[node.name] = values[0] // _MARK
            node.op = "Placeholder"
            node.device = _HOST
            node.attr.clear()
            node.attr["dtype"].CopyFrom(dtype_attr(dtype))
            node.attr["shape"].CopyFrom(shape_attr(dims))
    return found


def _input_gradient_values(program: Program, stage: Stage) -> list[Value]:
    received = {boundary.ref for boundary in program.boundaries}
    assert stage.backward is not None
    return [v for v in stage.backward.outputs if v.kind is ValueKind.GRADIENT and v.ref in received]


def _has_weight_gradients(program: Program, stage: Stage) -> bool:
    assert stage.backward is not None
    return len(_input_gradient_values(program, stage)) < len(stage.backward.outputs)


def _chained(graph: GraphDef, step: Step, items: Sequence[_Item], device: str) -> _Timed:
    """Adds the nodes that tell the time, and control edges through them.

    What merely connects items (the sum of the gradients of several readers, say) counts for the first that needs it;
    what no item comes before (reading variables, cutting batches) is over when time starts.
    """
    view = Graph(graph)
    nodes = view.nodes
    item_of = {name: index for index, item in enumerate(items) for name in (*item.entry, *item.exit)}
    order = view.topological()
    after: set[str] = set()  # nodes that some item comes before
    for name in order:
        producers = {ref.node for ref in view.inputs(name)}
        if name in item_of or producers & after:
            after.add(name)
    owner: dict[str, int] = {}

    def claim(name: str, index: int) -> None:
        for ref in view.inputs(name):
            if ref.node in after and ref.node not in item_of and ref.node not in owner:
                owner[ref.node] = index
                claim(ref.node, index)

    for index, item in enumerate(items):
        for name in item.entry:
            claim(name, index)
    builder = Builder(graph)
    gpu = "device:GPU" in device
    clock = _HOST if gpu else device

    def stamp(control: Sequence[str]) -> str:
        if gpu:
            # A control edge tells that work has been enqueued; a copy to the host waits until it is done.
            shape = builder.const([1], types_pb2.DT_INT32)
            kinds = {"dtype": dtype_attr(types_pb2.DT_FLOAT), "T": dtype_attr(types_pb2.DT_INT32)}
            mark = builder.add("mark", "RandomUniform", [shape], control=control, device=device, **kinds)
            copied = builder.add("copied", "Identity", [mark], device=clock, T=dtype_attr(types_pb2.DT_FLOAT))
            control = [copied.node]
        return builder.add("stamp", "Timestamp", control=control, device=clock).node

    # Constants and placeholders are there at once.
    first = [name for name in order if name not in after and nodes[name].op not in ("Const", "Placeholder", "NoOp")]
    stamps = [stamp(first)]
    nodes = {node.name: node for node in graph.node}
    waiting: dict[int, list[str]] = {}
    for name, index in owner.items():
        waiting.setdefault(index, []).append(name)
    for index, item in enumerate(items):
        for name in (*item.entry, *waiting.get(index, ())):
            nodes[name].input.append(f"^{stamps[-1]}")
        stamps.append(stamp(item.exit))
    return _Timed(graph, step, tuple(stamps), tuple(items))


def _empty_calls(device: str, count: int) -> _Timed:
    """Calls of a function that does nothing: what it takes to start a task."""
    kind = dtype_attr(types_pb2.DT_FLOAT)
    body = empty_graph()
    inner = Builder(body)
    argument = inner.append(placeholder("x", types_pb2.DT_FLOAT))
    result = inner.add("y", "Neg", [argument], T=kind)
    function = outline("nothing", Graph(body), [argument], [result])
    graph = empty_graph()
    builder = Builder(graph)
    # Neither constant nor unread, or it would be optimized away.
    shape = builder.const([1], types_pb2.DT_INT32)
    value = builder.add("value", "RandomUniform", [shape], device=device, dtype=kind, T=dtype_attr(types_pb2.DT_INT32))
    items = []
    for index in range(count):
        value = builder.append(call_node(builder.names.fresh("nothing"), function, [value], device=device))
        items.append(_Item(("nothing", index, 0), (value.node,), (value.node,)))
    merge_library(graph, [function])
    return _chained(graph, Step(Layout(((device,),), 1, 1, 1), train=value.node), items, device)


# ---- measuring


class _Bench:
    """A session with the model's variables on the device."""

    def __init__(self, cluster: Cluster, device: str, metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        self.device, self.metrics = device, metrics
        self.graph = tf.Graph()
        self.session = tf.compat.v1.Session(graph=self.graph, config=session_config(cluster))
        self._library: set[str] = set()

    def close(self) -> None:
        self.session.close()

    def add(self, graph: GraphDef, name: str) -> None:
        """Adds nodes under ``name/``, and functions that aren't there yet."""
        fresh = GraphDef(node=graph.node, versions=graph.versions)
        for function in graph.library.function:
            if function.signature.name not in self._library:
                self._library.add(function.signature.name)
                fresh.library.function.add().CopyFrom(function)
        fresh.library.gradient.extend(graph.library.gradient)
        with self.graph.as_default():
            tf.graph_util.import_graph_def(fresh, name=name)

    def load(self, table: VariableTable, variables: Sequence[Variable]) -> None:
        """Keras' values -> the device."""
        storage = DeviceValues([variables], [[self.device]])
        self.add(storage.graph, DeviceValues.PREFIX)
        feed = {}
        for place, (_, group) in zip(storage.feeds[0], by_dtype(variables).items(), strict=True):
            values = table.values(variable.name for variable in group)
            feed[f"{DeviceValues.PREFIX}/{place}:0"] = np.concatenate([value.ravel() for value in values])
        if feed:
            self.session.run([f"{DeviceValues.PREFIX}/{node}" for node in storage.loads[0]], feed)


class _Variant:
    """A timed step in a session.

    Attributes:
        rounds: for each number of samples and each round, the seconds of each item.
    """

    def __init__(self, bench: _Bench, timed: _Timed, name: str) -> None:
        self.bench, self.timed, self.name = bench, timed, name
        bench.add(timed.graph, name)
        self._fetch: dict[str, Any] = {"stamps": [f"{name}/{stamp}:0" for stamp in timed.stamps]}
        if timed.step.train is not None:
            self._fetch["train"] = f"{name}/{timed.step.train}"
        if any(node.name == _READ for node in timed.graph.node):
            self._fetch["read"] = f"{name}/{_READ}:0"
        self._feeds: dict[int, dict[str, Any]] = {}
        self.rounds: dict[int, list[np.ndarray]] = {}

    def feed(self, samples: int, values: Mapping[Ref, np.ndarray]) -> None:
        """Says what runs with micro-batches of so many samples are fed."""
        step = self.timed.step
        feeds = {step.feeds[ref]: array for ref, array in values.items()}
        for variable, places in step.metric_feeds.items():
            feeds |= dict(zip(places, self.bench.metrics[variable], strict=True))
        self._feeds[samples] = {f"{self.name}/{ref.node}:{ref.output}": array for ref, array in feeds.items()}
        shapes = {node.name: len(node.attr["shape"].shape.dim) for node in self.timed.graph.node}
        for place, factor in self.timed.sizes.items():
            value = [factor * samples] * _MICRO_BATCHES if shapes[place] else factor * samples
            self._feeds[samples][f"{self.name}/{place}:0"] = value
        self.rounds.setdefault(samples, [])

    def run(self, samples: int, *, kept: bool = True) -> None:
        """Runs the step once and keeps the times of its items."""
        stamps = self.bench.session.run(self._fetch, self._feeds[samples])["stamps"]
        if kept:
            self.rounds[samples].append(np.maximum(np.diff(np.asarray(stamps)), 0))

    def trace(self, samples: int) -> Any:
        """Runs the step once and returns its step stats."""
        metadata = tf.compat.v1.RunMetadata()
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        self.bench.session.run(self._fetch, self._feeds[samples], options=options, run_metadata=metadata)
        return metadata.step_stats

    def position(self, phase: str, stage: int = 0, micro_batch: int = 0) -> int | None:
        """Index of an item; None when there is none."""
        return next(
            (i for i, item in enumerate(self.timed.items) if item.key == (phase, stage, micro_batch)),
            None,
        )

    def times(self, samples: int, phase: str, stage: int = 0, micro_batch: int = _MICRO_BATCHES - 1) -> np.ndarray:
        """Seconds of an item in each round; zeros when there is none."""
        index = self.position(phase, stage, micro_batch)
        rounds = self.rounds[samples]
        return np.zeros(len(rounds)) if index is None else np.asarray([found[index] for found in rounds])

    def time(self, samples: int, phase: str, stage: int = 0, micro_batch: int = _MICRO_BATCHES - 1) -> float:
        """The median of `times`."""
        return float(np.median(self.times(samples, phase, stage, micro_batch)))


class _Profiler:
    """One profile in the making."""

    def __init__(
        self,
        model: keras.Model,
        table: VariableTable,
        program: Program,
        example: _Example,
        sizes: tuple[int, ...],
        cluster: Cluster,
        device: int,
        repeats: int | None,
        told: _Progress,
    ) -> None:
        self.model, self.table, self.flat, self.example = model, table, program, example
        self.sizes, self.cluster, self.device, self.repeats, self.told = sizes, cluster, device, repeats, told
        self.place = cluster.device_names[device]

    def run(self, key: str) -> Profile:
        self.told("cutting the model")
        inference = capture(self.model, self.table, Mode.PREDICT, BatchSpec(self.example.spec.x))
        self.layers = _find_layers(self.model, self.flat, inference)
        self.program = _divided(self.layers.joint, "layers_")
        self.count = len(self.layers.names)
        self.told("tracing the optimizer")
        self.updates = stage_updates(self.model, self.table, self.program)
        whole = _divided(_joint(self.flat, ()), "whole_")
        whole_updates = stage_updates(self.model, self.table, whole)
        self.told("building steps")
        bench = _Bench(self.cluster, self.place, RunningMetrics(self.model, self.table).feeds())
        try:
            bench.load(self.table, self._variables())
            steps = _StepMaker(self.program, self.updates, self.place, "layers_")
            self.layered = _Variant(bench, steps.make(input_gradients=True), "layered")
            self.whole = _Variant(bench, _StepMaker(whole, whole_updates, self.place, "whole_").make(), "whole")
            self.nothing = _Variant(bench, _empty_calls(self.place, 20), "nothing")
            self.nothing.feed(1, {})
            for samples in self.sizes:
                self._feed(samples)
            walls = self._measure()
            self.told("measuring memory")
            memory = self._memory()
        finally:
            bench.close()
        return self._result(walls, memory, key)

    def _variables(self) -> list[Variable]:
        names = {name for stage in self.program.stages for name in stage.reads}
        names |= {v.name for update in self.updates for v in update.apply.variables.values()}
        return [self.table.describe(name) for name in sorted(names)]

    def _feed(self, samples: int) -> None:
        arrays = self.example.batch(samples * _MICRO_BATCHES)
        for variant in (self.layered, self.whole):
            variant.feed(samples, dict(zip(self.flat.roles.inputs, arrays, strict=True)))

    # ---- times

    def _measure(self) -> np.ndarray:
        """Runs all steps in turns; returns the seconds of each real step of the smallest size."""
        with self._engine_step(self.sizes[0]) as step:
            runs = [(variant, samples) for samples in self.sizes for variant in (self.layered, self.whole)]
            runs.append((self.nothing, 1))
            walls: list[float] = []

            def once(*, kept: bool) -> None:
                # Training repeats one step, and finds its own data in the caches: the second run of each counts.
                for variant, samples in runs:
                    variant.run(samples, kept=False)
                    variant.run(samples, kept=kept)
                step()
                seconds = step()
                if kept:
                    walls.append(seconds)

            for done in range(_WARM_UP):
                self.told("warming up", done, _WARM_UP)
                start = time.perf_counter()
                once(kept=False)
                cost = time.perf_counter() - start
            rounds = self.repeats or int(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, _BUDGET_SECONDS / cost)))
            for done in range(rounds):
                self.told("measuring", done, rounds)
                once(kept=True)
        return np.asarray(walls)

    @contextlib.contextmanager
    def _engine_step(self, samples: int) -> Iterator[Callable[[], float]]:
        """A real training step on the device: a function that runs it and returns its seconds."""
        from dapple_tf.trainer import PipelinedModel  # it imports the engine's world, which this module is part of

        batch = samples * _MICRO_BATCHES
        plan = Plan.data_parallel([self.device], batch, micro_batches=_MICRO_BATCHES)
        pipelined = PipelinedModel(self.model, self.cluster, plan, on_non_finite_loss="continue")
        arrays = iter(self.example.batch(batch))
        spec = self.example.spec

        def packed(tree: Any) -> Any:
            if tree is None:
                return None
            return keras.tree.map_structure(lambda leaf: None if leaf is None else next(arrays), tree)

        x, y, weights = (packed(tree) for tree in (spec.x, spec.y, spec.sample_weight))

        def step() -> float:
            start = time.perf_counter()
            pipelined.train_on_batch(x, y, sample_weight=weights)
            return time.perf_counter() - start

        try:
            yield step
        finally:
            pipelined._engine.close()  # not its own close, which would bring the trained values back

    def _input_parts(self, start_up: float) -> np.ndarray:
        """The part of each stage's B that computes the gradients of what it receives."""
        parts = np.zeros(self.count)
        for stage in self.program.stages:
            if not _input_gradient_values(self.program, stage):
                continue
            if not _has_weight_gradients(self.program, stage):
                parts[stage.index] = 1.0
                continue
            of_input = sum(self.layered.time(samples, "Bx", stage.index, 0) - start_up for samples in self.sizes)
            both = sum(self.layered.time(samples, "B", stage.index) - start_up for samples in self.sizes)
            parts[stage.index] = min(1.0, max(0.0, of_input / both)) if both > 0 else 1.0
        return parts

    def _result(self, walls: np.ndarray, memory: _Memory, key: str) -> Profile:
        start_up = float(np.median(np.concatenate(self.nothing.rounds[1])))
        part = self._input_parts(start_up)
        points: dict[str, list[np.ndarray]] = {"F": [], "B": []}
        stages = range(self.count)
        for samples in self.sizes:
            for phase, found in points.items():
                each = np.asarray([self.layered.time(samples, phase, stage) for stage in stages])
                whole = self.whole.time(samples, phase)
                found.append(_shares(each, start_up, whole - start_up))
                logger.info("%s of %d samples: %.3g s in layers, %.3g s in one", phase, samples, each.sum(), whole)
        costs = {
            phase: [_fitted(self.sizes, [float(found[stage]) for found in of_sizes]) for stage in stages]
            for phase, of_sizes in points.items()
        }
        applied = self._apply_times()
        # A real step's first micro-batch sets what the others add to, Apply has a part that is for all layers, the
        # session and Keras have their own: what the layers' times don't say of a step is here.
        least = self.sizes[0]
        tasks = sum(self.whole.times(least, phase) for phase in ("F", "B")) * _MICRO_BATCHES
        left = float(np.median(walls - tasks)) - float(applied.sum())
        parameters = self._parameters()
        layers = []
        for index in stages:
            both = sum(self.layered.times(self.sizes[-1], phase, index) for phase in ("F", "B"))
            low, middle, high = np.percentile(both, (25, 50, 75))
            backward = costs["B"][index]
            layers.append(
                LayerProfile(
                    name=self.layers.names[index],
                    forward=costs["F"][index],
                    backward=backward,
                    backward_weight=backward * float(1 - part[index]),
                    residual_bytes=memory.residual[index],
                    min_cut_residual_bytes=memory.min_cut[index],
                    temporary_bytes=memory.temporary[index],
                    output_bytes=memory.output[index],
                    parameter_bytes=parameters.own[index],
                    slot_bytes=parameters.slots[index],
                    state_bytes=parameters.state[index],
                    apply_seconds=float(applied[index]),
                    spread=float((high - low) / middle) if middle else 0.0,
                )
            )
        return Profile(
            model=self.model.name,
            device=self.place,
            batch_sizes=self.sizes,
            layers=tuple(layers),
            tensors=memory.tensors,
            shared=parameters.shared,
            step_seconds=max(0.0, left),
            task_seconds=start_up,
            key=key,
        )

    def _apply_times(self) -> np.ndarray:
        """Seconds of each stage's Apply, beyond what any Apply takes (counting steps, learning rates)."""

        def of(variant: _Variant, stage: int) -> float:
            return float(np.median(np.concatenate([variant.times(size, "apply", stage, 0) for size in self.sizes])))

        found = np.asarray([of(self.layered, stage) for stage in range(self.count)])
        common = float(found.min())
        shares = _shares(found, common, of(self.whole, 0) - common)
        trained = [bool(update.apply.gradients or update.apply.slices) for update in self.updates]
        return np.where(trained, shares, 0.0)

    # ---- bytes

    def _parameters(self) -> _Parameters:
        reads: dict[str, list[int]] = {}
        for stage in self.program.stages:
            for name in stage.reads:
                reads.setdefault(name, []).append(stage.index)
        captured: dict[str, list[int]] = {}
        for index, update in enumerate(self.updates):
            for variable in update.apply.variables.values():
                if variable.kind is VariableKind.OPTIMIZER:
                    captured.setdefault(variable.name, []).append(index)

        def size(name: str) -> int:
            variable = self.table.describe(name)
            return math.prod(variable.shape) * dtype_size(variable.dtype)

        own, slots, state = [0] * self.count, [0] * self.count, [0] * self.count
        groups: dict[tuple[int, ...], list[int]] = {}
        for name, stages in reads.items():
            if self.table.describe(name).kind is not VariableKind.PARAMETER:
                state[stages[0]] += size(name)
            elif len(stages) == 1:
                own[stages[0]] += size(name)
            else:
                groups.setdefault(tuple(stages), [0, 0])[0] += size(name)
        for name, stages in captured.items():
            if len(stages) == 1:
                slots[stages[0]] += size(name)
            elif tuple(stages) in groups and math.prod(self.table.describe(name).shape) > 1:
                groups[tuple(stages)][1] += size(name)
        shared = tuple(SharedParameters(stages, *found) for stages, found in sorted(groups.items()))
        return _Parameters(own, slots, state, shared)

    def _memory(self) -> _Memory:
        """Bytes, from one traced step of each of two sizes: what grows with the samples is the difference."""
        least, most = self.sizes[0], self.sizes[-1]
        samples = (least, most if most > least else least + max(1, least // 2))
        found = []
        for size in samples:
            self._feed(size)
            self.layered.run(size, kept=False)
            found.append(_Trace(self.layered, self.program, size))
        first = found[0]

        def grown(sizes: Sequence[float]) -> Cost:
            return _line(samples, sizes)

        def of(ref: Ref, stage: int) -> Cost:
            return grown([trace.sizes.get((stage, ref), 0) for trace in found])

        tensors, output = [], [ZERO] * self.count
        for boundary in self.program.boundaries:
            cost = of(boundary.ref, boundary.producer)
            tensors.append(Tensor(boundary.producer, boundary.consumers, cost, self._has_gradient(boundary)))
            output[boundary.producer] = output[boundary.producer] + cost
        fewest = _divided(self.layers.joint, "min_cut_", "min_cut")
        static = [_static_sizes(fewest, self.example, size) for size in samples]
        residual, min_cut = [], []
        for stage in range(self.count):
            kept = _kept(self.program, stage)
            residual.append(grown([trace.kept(stage, kept) for trace in found]))
            # What min_cut keeps is mostly what is kept otherwise too, and so has been measured.
            known = [ref for ref in _kept(fewest, stage) if (stage, ref) in first.sizes]
            fresh = [ref for ref in _kept(fewest, stage) if (stage, ref) not in first.sizes]
            sizes = [
                trace.buffers(stage, known) + sum(shapes.get((stage, ref), 0) for ref in fresh)
                for trace, shapes in zip(found, static, strict=True)
            ]
            min_cut.append(grown(sizes))
        temporary = [grown([trace.temporary(stage) for trace in found]) for stage in range(self.count)]
        return _Memory(tuple(tensors), tuple(output), tuple(residual), tuple(min_cut), tuple(temporary))

    def _has_gradient(self, boundary: Boundary) -> bool:
        value = Value(boundary.ref, ValueKind.GRADIENT)
        return any(value in self.program.stages[stage].results for stage in boundary.consumers)


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """Bytes of variables: of each layer, and of several."""

    own: list[int]
    slots: list[int]
    state: list[int]
    shared: tuple[SharedParameters, ...]


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Bytes of each layer, and the tensors between layers."""

    tensors: tuple[Tensor, ...]
    output: tuple[Cost, ...]
    residual: tuple[Cost, ...]
    min_cut: tuple[Cost, ...]
    temporary: tuple[Cost, ...]


def _kept(program: Program, stage: int) -> list[Ref]:
    """The tensors that a stage makes and that backward functions read, its own or those of later stages."""
    made = {boundary.ref for boundary in program.boundaries if boundary.producer == stage}
    found: dict[Ref, None] = {}
    for reader in program.stages[stage:]:
        assert reader.backward is not None
        for value in reader.backward.inputs:
            own = reader.index == stage and value.kind is ValueKind.RESIDUAL
            if own or (value.kind is ValueKind.FORWARD and value.ref in made):
                found[value.ref] = None
    return list(found)


def _static_sizes(program: Program, example: _Example, samples: int) -> dict[tuple[int, Ref], int]:
    """Bytes of the tensors of each stage's graph, as far as their shapes are known without running it."""
    found: dict[tuple[int, Ref], int] = {}
    boundaries = {boundary.ref: boundary for boundary in program.boundaries}
    inputs = dict(zip(program.roles.inputs, example.shapes, strict=True))
    for stage in program.stages:
        assert stage.graph is not None
        assumed: dict[str, list[int | None]] = {}
        for value, ref in stage.arguments.items():
            boundary = boundaries.get(value.ref)
            if value.ref in inputs:
                assumed[ref.node] = [samples, *inputs[value.ref]]
            elif boundary is not None:
                shape = list(boundary.shape)
                if boundary.batch_axis is not None and boundary.rows_per_sample is not None:
                    shape[boundary.batch_axis] = boundary.rows_per_sample * samples
                assumed[ref.node] = shape
        shapes = infer_shapes(stage.graph, assumed, {program.roles.slice.samples: samples})
        for value in stage.backward.inputs if stage.backward is not None else ():
            dims = shapes.get(value.ref)
            if value.kind is ValueKind.RESIDUAL and dims is not None and None not in dims:
                node = Graph(stage.graph).nodes[value.ref.node]
                found[stage.index, value.ref] = math.prod(d or 0 for d in dims) * _size_of(node, value.ref)
    return found


def _size_of(node: NodeDef, ref: Ref) -> int:
    from graph_passes.tensorflow_bridge import output_dtypes

    return dtype_size(output_dtypes(node)[ref.output])


class _Trace:
    """What a traced step tells of memory.

    Attributes:
        sizes: (stage, tensor that its F returns) -> bytes.
    """

    def __init__(self, variant: _Variant, program: Program, samples: int) -> None:
        self.program = program
        last = _MICRO_BATCHES - 1
        stats = variant.trace(samples)
        step = variant.timed.step
        calls = {}
        for task, entry in step.entry.items():
            if task.micro_batch == last:
                calls[f"{variant.name}/{entry}"] = task
        after = {}
        for task in calls.values():
            for name in step.exit[task]:
                after[f"{variant.name}/{name}"] = task
        self.sizes: dict[tuple[int, Ref], int] = {}
        self._pointers: dict[tuple[int, Ref], int] = {}
        self._spans: dict[Task, tuple[int, int]] = {}
        self._given_back: dict[int, int] = {}
        events: list[tuple[int, int]] = []
        for device in stats.dev_stats:
            if device.device != variant.bench.device:
                continue
            for node in device.node_stats:
                for memory in node.memory:
                    if "host" not in memory.allocator_name:
                        events += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
                if node.node_name in calls:
                    self._outputs(calls[node.node_name], node)
                if node.node_name in after:
                    task = after[node.node_name]
                    end = node.all_start_micros + node.all_end_rel_micros
                    begin, stop = self._spans.get(task, (node.all_start_micros, end))
                    self._spans[task] = (min(begin, node.all_start_micros), max(stop, end))
        events.sort()
        self._times = [moment for moment, _ in events]
        self._held = list(itertools.accumulate((size for _, size in events), initial=0))

    def _outputs(self, task: Task, node: Any) -> None:
        stage = self.program.stages[task.stage]
        function = stage.forward if task.phase is Phase.FORWARD else stage.backward
        assert function is not None
        total = 0
        for output in node.output:
            value = function.outputs[output.slot]
            description = output.tensor_description
            size = math.prod(d.size for d in description.shape.dim) * dtype_size(description.dtype)
            if task.phase is Phase.FORWARD:
                self.sizes[task.stage, value.ref] = size
                self._pointers[task.stage, value.ref] = description.allocation_description.ptr
            elif value in _input_gradient_values(self.program, stage):
                total += size
        if task.phase is Phase.BACKWARD:
            self._given_back[task.stage] = total

    def buffers(self, stage: int, refs: Iterable[Ref]) -> int:
        """Bytes of tensors that a stage makes; those that share a buffer count once."""
        found: dict[int, int] = {}
        for number, ref in enumerate(refs):
            pointer = self._pointers.get((stage, ref), 0) or -1 - number
            found[pointer] = max(found.get(pointer, 0), self.sizes.get((stage, ref), 0))
        return sum(found.values())

    def kept(self, stage: int, refs: Sequence[Ref]) -> int:
        """Bytes of what a stage keeps, with what the tensor lists of loops hold.

        A list doesn't tell its size: what F leaves behind does, less what it merely hands on.
        """
        own = self.buffers(stage, refs)
        task = Task(stage, Phase.FORWARD, _MICRO_BATCHES - 1)
        function = self.program.stages[stage].forward
        assert function is not None
        dtypes = dict(zip(function.outputs, (arg.type for arg in function.function.signature.output_arg), strict=True))
        opaque = any(dtypes.get(Value(ref, ValueKind.RESIDUAL)) == types_pb2.DT_VARIANT for ref in refs)
        if not opaque or task not in self._spans:
            return own
        low, high = (bisect.bisect_right(self._times, moment) for moment in self._spans[task])
        others = [value.ref for value in function.outputs if value.ref not in refs]
        return max(own, self._held[high] - self._held[low] - self.buffers(stage, others))

    def temporary(self, stage: int) -> int:
        """Peak bytes while F or B runs, beyond what is there afterwards (F), or before it and what it hands on (B)."""
        last = _MICRO_BATCHES - 1
        found = [0]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            task = Task(stage, phase, last)
            if task not in self._spans or not self._times:
                continue
            begin, end = self._spans[task]
            low, high = bisect.bisect_left(self._times, begin), bisect.bisect_right(self._times, end)
            peak = max(self._held[low : high + 1])
            if phase is Phase.FORWARD:
                found.append(peak - self._held[high])
            else:
                found.append(peak - self._held[low] - self._given_back.get(stage, 0))
        return max(found)


# ---- fitting


def _shares(times: np.ndarray, each: float, total: float) -> np.ndarray:
    """Shares of ``total`` in proportion to ``times``, of which ``each`` is for starting."""
    net = np.maximum(times - each, 0)
    if net.sum() <= 0 or total <= 0:
        return np.maximum(net, 0)
    return net * (total / net.sum())


def _fitted(samples: Sequence[int], seconds: Sequence[float]) -> Cost:
    """The line ``fixed + per_sample * samples`` nearest to measured times (relative errors), without negative parts."""
    x, t = np.asarray(samples, float), np.asarray(seconds, float)
    if len(x) == 1:
        return Cost(0.0, float(t[0] / x[0]))
    if t.max() <= 0:
        return ZERO
    weight = 1 / np.maximum(t, t.max() * 1e-3) ** 2

    def mean(values: np.ndarray) -> float:
        return float((weight * values).sum() / weight.sum())

    spread = mean((x - mean(x)) ** 2)
    slope = mean((x - mean(x)) * (t - mean(t))) / spread
    fixed = mean(t) - slope * mean(x)
    if slope < 0:
        return Cost(max(0.0, mean(t)), 0.0)
    if fixed < 0:
        return Cost(0.0, max(0.0, mean(x * t) / mean(x * x)))
    return Cost(float(fixed), float(slope))


def _line(samples: Sequence[int], sizes: Sequence[float]) -> Cost:
    """Bytes at two numbers of samples as a fixed part and one for each sample."""
    (few, many), (less, more) = samples[:2], sizes[:2]
    rate = (more - less) / (many - few)
    fixed = less - rate * few
    if rate < 0:
        return Cost(float(max(less, more)), 0.0)
    if fixed < 0:
        return Cost(0.0, max(less / few, more / many))
    return Cost(float(fixed), float(rate))


# ---- the cache


def _cache_directory(cache: bool | str | os.PathLike[str]) -> pathlib.Path | None:
    if cache is False:
        return None
    if cache is not True:
        return pathlib.Path(cache)
    given = os.environ.get("DAPPLE_CACHE")
    return pathlib.Path(given) if given else pathlib.Path.home() / ".cache" / "dapple_tf" / "profiles"


def _read(path: pathlib.Path) -> Profile | None:
    try:
        return Profile.load(path)
    except FileNotFoundError:
        return None
    except (ProfileError, OSError, ValueError) as error:
        logger.warning("the cached profile %s can't be used and is measured again: %s", path, error)
        return None


def _write(path: pathlib.Path, found: Profile) -> None:
    """Writes a profile at once, so that no reader finds half of one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(found.to_json())
            os.replace(name, path)
        except BaseException:
            pathlib.Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning("the profile can't be kept in %s: %s", path.parent, error)


def _key(
    model: keras.Model,
    program: Program,
    example: _Example,
    sizes: Sequence[int],
    cluster: Cluster,
    device: int,
    repeats: int | None,
) -> str:
    """A hash of all that the measured costs depend on; the same in every process."""
    kind = cluster.device_names[device].rpartition("/")[2].split(":")[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    variables = [(v.name, v.dtype, v.shape, v.kind.value) for v in program.roles.variables]
    parts = [
        *(_VERSION, tf.version.VERSION, keras.version(), kind, _hardware(kind), cluster.num_devices, cores),
        *(model.name, list(sizes), repeats, example.shapes, [leaf.dtype for leaf in example.spec.leaves]),
        [(call.path, call.number, call.stop > call.start) for call in program.roles.calls],
        variables,
        _optimizer_text(model.optimizer),
        _graph_text(program),
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _hardware(kind: str) -> str:
    if kind == "GPU":
        found = tf.config.list_physical_devices("GPU")
        return str([tf.config.experimental.get_device_details(gpu).get("device_name") for gpu in found[:1]])
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _optimizer_text(optimizer: Any) -> str:
    """The optimizer's configuration, without its name (Keras counts) and a plain learning rate (it may change)."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            left = {key: plain(entry) for key, entry in value.items() if key != "name"}
            return {k: v for k, v in left.items() if k != "learning_rate" or not isinstance(v, float)}
        return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(plain(keras.saving.serialize_keras_object(optimizer)), sort_keys=True, default=str)


def _graph_text(program: Program) -> str:
    """A hash of the captured graph under names of its own: those that Keras and TensorFlow mint contain counters."""
    library = {function.signature.name: function for function in program.graph.library.function}
    texts: dict[str, str] = {}

    def of_function(name: str) -> str:
        if name not in texts:
            texts[name] = "recursive"
            function = library.get(name)
            if function is None:
                texts[name] = name
                return name
            names = {arg.name: f"a{index}" for index, arg in enumerate(function.signature.input_arg)}
            names |= {node.name: f"n{index}" for index, node in enumerate(function.node_def)}
            lines = [of_node(node, names) for node in function.node_def]
            lines += [of_input(function.ret[arg.name], names) for arg in function.signature.output_arg]
            lines += [str(arg.type) for arg in function.signature.input_arg]
            texts[name] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return texts[name]

    def of_input(text: str, names: Mapping[str, str]) -> str:
        control = text.startswith("^")
        name, colon, rest = text.removeprefix("^").partition(":")
        return ("^" if control else "") + names.get(name, name) + colon + rest

    def of_attr(value: Any) -> str:
        if value.HasField("func"):
            return of_function(value.func.name)
        if value.HasField("list") and value.list.func:
            return ",".join(of_function(function.name) for function in value.list.func)
        return value.SerializeToString(deterministic=True).hex()

    def of_node(node: NodeDef, names: Mapping[str, str]) -> str:
        attrs = [
            f"{key}={of_attr(node.attr[key])}"
            for key in sorted(node.attr)
            # Hints and roles; the calls' positions are part of the key as far as they matter.
            if not key.startswith("_") and key != POSITION_ATTR
        ]
        return " ".join([names[node.name], node.op, *(of_input(text, names) for text in node.input), *attrs])

    names = {node.name: f"n{index}" for index, node in enumerate(program.graph.node)}
    roles = program.roles
    results = [roles.loss, *(variable.update for variable in roles.variables)]
    lines = [of_node(node, names) for node in program.graph.node]
    lines += ["" if ref is None else f"{names[ref.node]}:{ref.output}" for ref in results]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
