"""What the tests of graph_passes share: tiny programs, their canonical text, and ways to run passes and graphs.

Some programs are written by hand as text, so that every node has a short name; others are captured from Keras models.
Each is made once, whatever the number of tests that ask for it: passes leave their input as it is, and :func:`apply`
checks that every time.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from program_text import read_program
from tensorflow.core.framework import types_pb2

from dapple_tf.frontend.batch import BatchSpec, Leaf
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.schedules.schedules import make_schedule
from graph_passes.ir.collectives import AllReduceRules
from graph_passes.ir.graph import Builder, GraphDef, NodeDef, Ref, dtype_attr
from graph_passes.ir.group_update import Captured, GroupUpdate
from graph_passes.ir.outline import call_node, placeholder
from graph_passes.ir.program import Layout, Program, Step, Value, ValueKind, Variable, VariableKind
from graph_passes.ir.storage import load_function, merge_library
from graph_passes.ir.tasks import Phase, Schedule, Task
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.verify import verify
from graph_passes.pass_manager import Pass
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.cut_backward import CutBackward
from graph_passes.passes.partition import Partition, StageForm
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.update import Update

BOOL, FLOAT, DOUBLE = types_pb2.DT_BOOL, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE
INT32, INT64 = types_pb2.DT_INT32, types_pb2.DT_INT64
PARAMETER, STATE, METRIC = VariableKind.PARAMETER, VariableKind.STATE, VariableKind.METRIC

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
FLAT = AllReduceRules()

Shape = Sequence[int | None]


def devices(*counts: int) -> tuple[tuple[str, ...], ...]:
    """Names of as many CPU devices for each stage as ``counts`` says."""
    numbers = itertools.count()
    return tuple(tuple(HOST[:-1] + str(next(numbers)) for _ in range(count)) for count in counts)


# ---- programs that are written by hand


@functools.cache
def two_layers() -> Program:
    """``tanh(x w) v`` and half the sum of its squares: the smallest program with two stages."""
    return read_program("""
        x[?, 2], w[2, 3], v[3, 1]
        a/matmul = MatMul(x, w)
        a/tanh = Tanh(a/matmul)
        b/matmul = MatMul(a/tanh, v)
        loss = L2Loss(b/matmul)
    """)


def chain(*layers: str, sizes: Mapping[str, str] | None = None) -> Program:
    """``tanh(... tanh(tanh(x w) v) ...)``: of each layer, ``name: w v``, its weights one after the other."""
    lines, h, weights = [], "x", dict[str, str]()
    for layer in layers:
        name, _, own = layer.partition(": ")
        for number, weight in enumerate(own.split()):
            weights[weight] = (sizes or {}).get(weight, "2, 2")
            more = f"_{number}" if number else ""
            lines += [f"{name}/matmul{more} = MatMul({h}, {weight})", f"{name}/tanh{more} = Tanh({name}/matmul{more})"]
            h = f"{name}/tanh{more}"
    declared = ", ".join(["x[?, 2]", *(f"{weight}[{size}]" for weight, size in weights.items())])
    return read_program("\n".join([declared, *lines, f"loss = L2Loss({h})"]))


@functools.cache
def tied_layers(layers: int = 2) -> Program:
    """``tanh(...tanh(tanh(x w) w)... w)``: every layer has the same weight."""
    return chain(*(f"layer_{index}: w" for index in range(layers)))


@functools.cache
def stateful_layers() -> Program:
    """``x w`` and ``* v`` with a moving average and a counter in stage 0 and a metric that reads the result."""
    text = """
        x[?, 2], w[2, 2], v[2, 2], average[2], count int32[], total[]
        a/matmul = MatMul(x, w)
        a/mean = Mean(a/matmul, [0])
        a/mixed = AddV2(average, a/mean)
        a/counted = AddV2(count, 1)
        b/matmul = MatMul(a/matmul, v)
        loss = L2Loss(b/matmul)
        average_update = Mul(a/mixed, weight)
        count_update = Identity(a/counted)
        sum = Sum(b/matmul, [0, 1])
        total_update = AddV2(total, sum)
    """
    states = {"average": "average_update", "count": "count_update"}
    return read_program(text, states=states, metrics={"total": "total_update"})


_SENT = {
    "rows": "a/scaled = Mul(x, w)",
    "time_major": "a/scaled = Mul(x, w)\na/sent = Transpose(a/scaled, [1, 0])",
    "merged": "a/scaled = Mul(x, w)\na/sent = Reshape(a/scaled, [-1])",
    "heads": "a/scaled = Mul(x, w)\na/moved = Transpose(a/scaled, [1, 0])\na/sent = Reshape(a/moved, [-1])",
    "scalar": "a/scaled = Mul(x, w)\na/sent = Mean(a/scaled, [0, 1])",
}


@functools.cache
def sent(kind: str) -> Program:
    """A program of layers ``a`` and ``b`` whose boundary tensor is of the given kind.

    ``rows``: (B, 2). ``time_major``: (3, B). ``merged``: (B * 3). ``heads``: (3 * B). ``merged_unknown``: (B * T),
    where T is known at run time only. ``scalar``: (), computed from the whole slice.
    """
    width = {"rows": "2", "merged_unknown": "?"}.get(kind, "3")
    made = _SENT[kind.removesuffix("_unknown")]
    result = "a/sent" if "a/sent" in made else "a/scaled"
    return read_program(f"x[?, {width}], w[1], v[1]\n{made}\nb/scaled = Mul({result}, v)\nloss = L2Loss(b/scaled)")


def embedding(*, tied: bool, looked_up: str = "tokens") -> Program:
    """Rows of a table; with ``tied``, the table is also what the result is multiplied with, in stage 1.

    ``looked_up``: tokens of the batch, constants, or both one after the other.
    """
    indices = {"tokens": "tokens", "constants": "[1, 1, 3]", "both": "a/ids"}[looked_up]
    both = looked_up == "both"  # What follows has a row for each sample, or for none.
    return read_program(f"""
        tokens int32[?], table[4, 2], v[2, 4]
        a/ids = ConcatV2(tokens, [1, 1, 3], 0)
        a/rows = GatherV2(table, {indices}, 0)
        {"a/sum = Sum(a/rows, [0], keep_dims=True)" if both else ""}
        b/logits = MatMul({"a/sum" if both else "a/rows"}, {"table" if tied else "v"}, transpose_b={tied})
        loss = L2Loss(b/logits)
    """)


# ---- programs that are captured from Keras models


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Within it, layers and losses are computed in float64.

    Keras makes its default policy of the float type that is set when a layer is made for the first time, and keeps it.
    """
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.config.set_floatx(floatx)


def captured(model: keras.Model, x: Any, y: Any = None, mode: Mode = Mode.TRAIN) -> Program:
    """The program of a Keras model; ``x`` and ``y`` are examples of a batch."""
    x_leaf, y_leaf = (
        None if a is None else Leaf(n, a.dtype.name, (None, *a.shape[1:]), (None, *a.shape[1:]))
        for n, a in (("x", x), ("y", y))
    )
    if mode is not Mode.PREDICT:
        # Creates the variables of metrics.
        batch = [None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype) for leaf in (x_leaf, y_leaf, None)]
        model._symbolic_build(data_batch=tuple(batch))
    return capture(model, VariableTable(model), mode, BatchSpec(x_leaf, y_leaf if mode is not Mode.PREDICT else None))


def compiled(inputs: Any, outputs: Any, **options: Any) -> keras.Model:
    """A functional model called ``m`` with SGD and a mean squared error."""
    model = keras.Model(inputs, outputs, name="m")
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def dense(name: str, units: int = 3, **options: Any) -> keras.layers.Dense:
    """A float64 layer."""
    return keras.layers.Dense(units, name=name, dtype="float64", **options)


@functools.cache
@in_float64()
def mlp(layers: int = 3, mode: Mode = Mode.TRAIN) -> Program:
    """Dense layers ``dense_0``, ``dense_1``, ... of width 3, float64, with a metric."""
    x = h = keras.Input((2,), name="x")
    for index in range(layers):
        h = dense(f"dense_{index}", activation="tanh")(h)
    return captured(compiled(x, h, metrics=["mae"]), np.zeros((4, 2)), np.zeros((4, 3)), mode)


@functools.cache
@in_float64()
def attention() -> Program:
    """One attention block of width 3 with layer normalisation and a residual connection, float64."""
    x = keras.Input((3, 2), name="x")
    h = dense("embed", 3)(x)
    n = keras.layers.LayerNormalization(name="norm")(h)
    n = keras.layers.MultiHeadAttention(1, 2, name="attention")(n, n)
    h = keras.layers.Add(name="residual")([h, n])
    h = dense("wide", 4, activation="gelu")(h)
    return captured(compiled(x, dense("head", 1)(h)), np.zeros((4, 3, 2)), np.zeros((4, 3, 1)))


# ---- passes


def copied(program: Program) -> Program:
    """An independent copy, to be broken or compared."""
    return copy.deepcopy(program)


def _serialized(program: Program) -> list[bytes]:
    stages = program.stages
    graphs = [program.graph, program.flat, *(stage.graph for stage in stages)]
    functions = [f.function for s in stages for f in (s.forward, s.backward, s.metrics) if f is not None]
    return [proto.SerializeToString(deterministic=True) for proto in (*graphs, *functions) if proto is not None]


@contextlib.contextmanager
def unchanged(program: Program) -> Iterator[None]:
    """Checks at its end that a program, with all its protos, is what it was at its beginning."""
    before, bytes_before = copied(program), _serialized(program)
    try:
        yield
    finally:
        assert _serialized(program) == bytes_before, "a proto of the input has changed"
        assert program == before, "the input has changed"


def apply(program: Program, *passes: Pass) -> Program:
    """Runs passes; the invariants hold before and after each, and each leaves its input as it was."""
    for item in passes:
        with unchanged(program):
            verify(program)
            result = item.run(program)
        verify(result)
        program = result
    return program


def staged(
    program: Program,
    *cuts: str,
    recompute: str | Sequence[str] = "none",
    training: bool = True,
    prefix: str = "",
    split: Container[int] = (),
) -> Program:
    """A program with stage functions."""
    backward = [BuildBackward()] if training else []
    modes = [recompute] * (len(cuts) + 1) if isinstance(recompute, str) else recompute
    forms = [StageForm(mode, split=stage in split) for stage, mode in enumerate(modes)]
    partition = Partition(forms, training=training, prefix=prefix)
    return apply(program, AssignStages(cuts), BuildForward(want_outputs=not training), *backward, partition)


@functools.cache
def two_stages() -> Program:
    """:func:`two_layers` with stage functions."""
    return staged(two_layers(), "a")


def owners(program: Program) -> dict[str, tuple[int, ...]]:
    """Every stage that reads a variable keeps it."""
    return {
        name: tuple(stage.index for stage in program.stages if name in stage.reads)
        for name in program.variables
        if any(name in stage.reads for stage in program.stages)
    }


def layout(counts: Sequence[int], batch: int, micro_batches: int = 1, global_batch_size: int | None = None) -> Layout:
    """A layout on CPU devices."""
    return Layout(devices(*counts), batch, global_batch_size or batch, micro_batches)


def schedule_of(layout: Layout, policy: str = "dapple_a", *, forward_only: bool = False) -> Schedule:
    """A schedule for a layout; devices are numbered as they stand in it."""
    numbers = itertools.count()
    places = [[next(numbers) for _ in names] for names in layout.devices]
    count = len(layout.micro_batch_intervals)
    return make_schedule(policy, places, count, active=layout.active, forward_only=forward_only)


def replicated(program: Program, layout: Layout) -> Program:
    """A step whose tasks aren't connected over stages yet."""
    return apply(program, Replicate(layout, HOST, owners(program)))


def connected(
    program: Program, layout: Layout, backward_cuts: Sequence[str] = (), relays: Sequence[int] = ()
) -> Program:
    """A step whose tasks are connected, the last backwards in pieces."""
    passes = [CutBackward(tuple(backward_cuts))] if backward_cuts else []
    return apply(replicated(program, layout), *passes, SplitConcat(tuple(relays)))


def ordered(
    program: Program,
    layout: Layout,
    policy: str = "dapple_a",
    *,
    accumulated: bool = True,
    backward_cuts: Sequence[str] = (),
    relays: Sequence[int] = (),
) -> Program:
    """A step with accumulation and the order of a policy."""
    names = tuple(itertools.chain.from_iterable(layout.devices))
    passes = [Accumulate()] if accumulated else []
    step = connected(program, layout, backward_cuts, relays)
    return apply(step, *passes, OrderTasks(schedule_of(layout, policy), names))


def updated(
    program: Program,
    layout: Layout,
    *,
    bucket_bytes: int = 1 << 20,
    rate: float = 0.5,
    accumulated: bool = True,
    all_reduces: AllReduceRules = FLAT,
    **options: Sequence[Any],
) -> Program:
    """A complete step with plain SGD; ``options`` are those of `ordered`."""
    update = Update(sgd_updates(program, rate), bucket_bytes, all_reduces=all_reduces)
    program = apply(ordered(program, layout, accumulated=accumulated, **options), update)
    verify(program, complete=True)
    return program


def sgd_updates(program: Program, rate: float = 0.5) -> tuple[GroupUpdate, ...]:
    """Plain SGD for each group of parameters that the same stages read."""
    trained = {v.name for stage in program.stages for _, v, _ in stage.gradients}
    groups: dict[tuple[int, ...], list[Variable]] = {}
    for name, stages in owners(program).items():
        if name in trained:
            groups.setdefault(stages, []).append(program.variables[name])
    return tuple(GroupUpdate(stages, sgd(variables, rate)) for stages, variables in groups.items())


def sgd(parameters: Sequence[Variable], rate: float) -> Captured:
    """``variable -= rate * gradient``, as the trace of an optimizer would be."""
    builder = Builder(empty_graph())
    gradients, variables, effects = {}, {}, []
    for index, variable in enumerate(parameters):
        resource = builder.append(placeholder(f"resource{index}", types_pb2.DT_RESOURCE))
        gradients[variable.name] = builder.append(placeholder(f"gradient{index}", variable.dtype))
        variables[resource] = variable
        inputs = [resource, builder.const(rate, variable.dtype), gradients[variable.name]]
        kind = {"T": dtype_attr(variable.dtype)}
        effects.append(builder.add(f"descent{index}", "ResourceApplyGradientDescent", inputs, **kind).node)
    return Captured(builder.graph, gradients, variables, effects=tuple(effects))


# ---- looking at programs


def crossing(program: Program) -> list[tuple[str, int, tuple[int, ...]]]:
    """(name, producer, consumers) of each boundary tensor."""
    return [(str(boundary.ref), boundary.producer, boundary.consumers) for boundary in program.boundaries]


def meanings(values: Iterable[Value]) -> list[str]:
    """Values as texts: ``x``, ``d(x)``, ``r(x)``."""
    return [str(value) for value in values]


def node(program: Program | GraphDef, name: str) -> NodeDef:
    """A node of a program's or a graph's top level."""
    graph = program.graph if isinstance(program, Program) else program
    return next(node for node in graph.node if node.name == name)


def step_of(program: Program) -> Step:
    """The step, which must be there."""
    assert program.step is not None
    return program.step


def task(text: str) -> Task:
    """``1B0.r1`` as a task."""
    return Task.parse(text)


# ---- canonical text


def show_changes(before: str, after: str) -> str:
    """The lines that a pass takes away, with ``-``, and those that it adds, with ``+``."""
    lines = difflib.ndiff(before.splitlines(keepends=True), after.splitlines(keepends=True))
    return "".join(line for line in lines if line[0] in "+-")


# ---- running graphs


class Machine:
    """A session on a graph, with CPU devices and their variables."""

    def __init__(self, graph: GraphDef, devices: int = 1) -> None:
        config = tf.compat.v1.ConfigProto(device_count={"CPU": devices}, allow_soft_placement=False)
        config.intra_op_parallelism_threads = 1
        config.inter_op_parallelism_threads = devices + 2
        self._graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=self._graph, config=config)
        self._numbers = itertools.count()
        self.add(graph, "")

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def add(self, graph: GraphDef, name: str) -> None:
        """Adds a graph, whose nodes' names get a prefix."""
        with self._graph.as_default():
            tf.graph_util.import_graph_def(graph, name=name)

    def run(self, fetches: Sequence[Ref], feeds: Mapping[Ref, Any] | None = None, *, after: Sequence[str] = ()) -> Any:
        """Values of tensors when the nodes ``after`` have run too."""
        wanted = [f"{ref.node}:{ref.output}" for ref in fetches]
        given = {f"{ref.node}:{ref.output}": value for ref, value in (feeds or {}).items()}
        return self._session.run([wanted, list(after)], given)[0]

    def load(self, device: str, variables: Sequence[Variable], values: Sequence[Any]) -> None:
        """Assigns variables of a device, all of one dtype."""
        name = f"load{next(self._numbers)}"
        function = load_function(f"{name}_function", variables)
        graph = empty_graph()
        builder = Builder(graph)
        vector = builder.append(placeholder("values", variables[0].dtype))
        call = builder.append(call_node("call", function, [vector], device=device)).node
        merge_library(graph, [function])
        self.add(graph, name)
        flat = np.concatenate([np.ravel(value) for value in values])
        self._session.run(f"{name}/{call}", {f"{name}/values:0": flat})


def run(graph: GraphDef, fetches: Sequence[Ref], feeds: Mapping[Ref, Any] | None = None, devices: int = 1) -> Any:
    """Values of tensors of a graph without variables."""
    with Machine(graph, devices) as machine:
        return machine.run(fetches, feeds)


GRADIENT, RESIDUAL, FORWARD = ValueKind.GRADIENT, ValueKind.RESIDUAL, Phase.FORWARD
BACKWARD = Phase.BACKWARD
