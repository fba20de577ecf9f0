"""Pass 17: operators get devices, constants copies, and devices an order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf
from flat_programs import assert_same_training, random_placement, recurrent_model
from program_text import read_program
from programs import FLOAT, HOST, INT32, apply, copied, in_float64, layout, node, staged, step_of, two_layers, updated
from step_programs import device_names, of_model
from tensorflow.core.framework import types_pb2

import dapple_tf as dapple
from dapple_tf.measuring.example_batch import ExampleBatch
from graph_passes.errors import PassError
from graph_passes.ir.collectives import SUM_OP, all_reduce
from graph_passes.ir.graph import BYTES_ATTR, Builder, Graph, GraphDef, Ref, dtype_attr
from graph_passes.ir.kernels import knows_gpus
from graph_passes.ir.program import Layout, Program, Roles, Slice, Step
from graph_passes.ir.storage import assign, read
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import graph_text
from graph_passes.ir.verify import verify
from graph_passes.passes.flatten import Flatten
from graph_passes.passes.place_operators import PlaceOperators, unfused
from graph_passes.passes.placed_reductions import common_order, join_reductions

v1 = tf.compat.v1
ZERO, ONE, TWO = device_names(3)
THREE = device_names(4)[3]


@functools.cache
def flat() -> Program:
    """``tanh(x w) v`` with plain SGD, flat."""
    return Flatten().run(updated(staged(two_layers()), layout([1], 2), accumulated=False))


def of_graph(graph: GraphDef, loss: Ref) -> Program:
    """A flat step that computes one tensor."""
    step = Step(Layout(((HOST,),), 1, 1, 1), loss=loss, dissolved=frozenset({0}))
    return Program(graph, Roles((), (), Slice(Ref("w"), Ref("n"), Ref("s"))), step=step)


def of_text(text: str, loss: str) -> Program:
    """A flat step on one device."""
    graph = copied(read_program(text)).graph
    for each in graph.node:
        each.device = ZERO
    return of_graph(graph, Ref(loss))


def chain() -> Program:
    """a -> b -> c -> d, each of which also reads the constant."""
    return of_text("a = AddV2(1.0, 1.0)\nb = AddV2(a, 1.0)\nc = AddV2(b, 1.0)\nd = AddV2(c, 1.0)", "d")


NEGATED = "x[2]\na = Neg(x)\nb = Neg(x)\nc = Neg(x)\nd = AddN(a, b, c)"


def placed(program: Program, devices: dict[str, str], order: str | Sequence[str], *, chained: bool = True) -> Program:
    """The program after the pass."""
    return apply(program, PlaceOperators(devices, tuple(order), chained))


def all_on(device: str, program: Program) -> tuple[dict[str, str], list[str]]:
    """All operators of a step on one device, in some order."""
    _, order = random_placement(program, [device])
    return dict.fromkeys(order, device), order


# ---- structure


def with_results() -> Program:
    """Operators of outputs and metrics take their turns; nobody needs e."""
    program = of_text(f"{NEGATED}\ne = Neg(x)", "a")
    step = dataclasses.replace(step_of(program), outputs=((Ref("b"),),), metric_results={"accuracy": (Ref("c"),)})
    return program.replace(step=step)


def waited() -> Program:
    """An operator waits for the constant."""
    return of_text("constant = Const() 2.0\na = AddV2(1.0, 1.0) ^constant\nb = AddV2(a, 1.0)", "b")


def by_replica(apart: bool) -> tuple[Program, dict[str, str], list[str]]:
    """Operators of two all-reduces of two replicas, whose second one is on a device of its own or on the first's."""
    names = [f"{name}{number}" for number in (5, 6) for name in ("part", "sum", "read")]
    order = [f"{name}_{replica}" for name in names for replica in (0, 1)]
    places = {0: (ZERO, ONE), 1: (TWO, THREE)}
    return two_replicas(), {name: places[int(name[-1])][apart and "6" in name] for name in order}, order


def test_devices_and_orders(golden: Callable[[str, str], None]) -> None:
    """An operator waits for the one before it on its device, unless it reads it; constants are where they are read."""
    forms = {
        "two devices": (of_text(NEGATED, "d"), {"a": ZERO, "b": ONE, "c": ZERO, "d": ONE}, "abcd"),
        "outputs and metrics take their turns": (with_results(), dict.fromkeys("eabc", ZERO), "eabc"),
        "each device that reads a constant has one": (chain(), {"a": ONE, "b": ZERO, "c": TWO, "d": ONE}, "abcd"),
        "a constant moves to its only device": (chain(), dict.fromkeys("abcd", TWO), "abcd"),
        "unless others wait for it": (waited(), dict.fromkeys("ab", ONE), "ab"),
        "all-reduces have the devices of their members and hold no device up": by_replica(apart=True),
        "all-reduces on one device": by_replica(apart=False),
    }
    made = {title: placed(*form) for title, form in forms.items()}
    text = "\n".join(f"{title}\n\n{graph_text(program.graph)}" for title, program in made.items())
    golden("place_operators_forms.txt", text)
    assert step_of(made["two devices"]).placed_on == {ZERO, ONE}


def test_without_a_chain_operators_start_when_they_can() -> None:
    program = flat()
    where, order = all_on(ONE, program)
    unchained = placed(program, where, order, chained=False)
    assert [list(each.input) for each in unchained.graph.node] == [list(each.input) for each in program.graph.node]


def test_what_has_no_place_goes_with_its_variable_or_what_it_reads() -> None:
    program = flat()
    where, order = random_placement(program, [ZERO, ONE, TWO], seed=4)
    left_out = [name for name in order if "gradients/result" in name or "handle/" in name or "/read/w" in name]
    assert len(left_out) == 7
    rest = [name for name in order if name not in left_out]
    placed_program = placed(program, {name: where[name] for name in rest}, rest)
    view = Graph(placed_program.graph)
    for name in left_out:
        group = next(
            (each.device for each in placed_program.graph.node if each.op != "VarHandleOp" and name in each.input), None
        )
        beside = group if "handle" in name else view.nodes[view.inputs(name)[0].node].device
        assert view.nodes[name].device == beside


@pytest.mark.skipif(not knows_gpus(), reason="this TensorFlow has no kernels for GPUs")
def test_what_gpus_have_no_kernel_for_is_on_their_host_with_its_variable() -> None:
    host, gpu = (f"/job:worker/replica:0/task:1/device:{kind}" for kind in ("CPU:0", "GPU:1"))
    builder = Builder(empty_graph())
    count = assign(builder, "count", read(builder, "count", INT32, []), INT32, [], "AssignAddVariableOp")
    weight = read(builder, "weight", FLOAT, [])
    builder.const(2.0, FLOAT)
    half = types_pb2.DT_HALF
    inverse = builder.add("inverse", "MatrixInverse", [builder.const(1.0, half)], T=dtype_attr(half))
    order = [each.name for each in builder.graph.node if each.op != "Const"]
    for each in builder.graph.node:
        each.device = gpu
    program = PlaceOperators(dict.fromkeys(order, gpu), order).run(of_graph(builder.graph, weight))
    moved = {each.name for each in program.graph.node if each.device == host}
    unread = {each.name for each in builder.graph.node} - {each.name for each in program.graph.node}
    ours = {each.name for each in builder.graph.node if "count" in each.name} | {inverse.node}
    assert count in moved and {name for name in moved if node(program, name).op not in ("Const", "Cast")} == ours
    assert len(unread) == 1  # the constant that nothing reads
    assert step_of(program).placed_on == {host, gpu}


# ---- errors


@pytest.mark.parametrize(
    ("devices", "order", "message"),
    [
        ({"a": ZERO}, "ax", "operator 'x' is to be placed, but the step has no such node"),
        ({"a": ZERO, "b": ONE}, "a", "operator 'b' has a device but no place in the order"),
        ({"a": ZERO}, "ab", "operator 'b' has a place in the order but no device"),
        ({"a": ZERO, "b": ONE}, "aab", "operator 'a' is twice in the order"),
        (dict.fromkeys("abcd", ZERO), "acbd", r"isn't topological: 'c' \(number 1\) needs 'b' \(number 2\)"),
    ],
)
def test_what_cant_be_placed(devices: dict[str, str], order: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        PlaceOperators(devices, tuple(order)).run(chain())


def test_what_touches_a_variable_is_on_one_device() -> None:
    program = flat()
    where, order = all_on(ZERO, program)
    one, other = "stage0/replica0/read_from0/read/w", "stage0/replica0/apply/descent0"
    for moved in (one, other):
        message = rf"operators of variable 'w' are on different devices: '.*' on {ZERO}, '{moved}' on {ONE}"
        with pytest.raises(PassError, match=message):
            PlaceOperators({**where, moved: ONE}, order).run(program)


# ---- numbers


def test_flat_and_placed_steps_are_the_step_to_the_last_bit() -> None:
    with in_float64():
        model = recurrent_model()
        program = of_model(model, dapple.Plan.manual([], [[0]], 1, 4, "gpipe"), dapple.Cluster.local(1, kind="cpu"))
        batch = ExampleBatch.of(model).batch(4)
    tasks, start = Flatten(keep_tasks=True).run(program), Flatten().run(program)
    where, order = random_placement(start, [ZERO, ONE, TWO])
    for made in (tasks, PlaceOperators(where, order).run(start)):
        verify(made, complete=True)
        assert_same_training(program, made, [batch] * 2, 3)


# ---- all-reduces


def two_replicas() -> Program:
    """Two all-reduces of two replicas, the second of which is ready first on the second replica's device."""
    builder = Builder(empty_graph())
    sums = []
    for replica, device in enumerate((ZERO, TWO)):
        after: list[str] = []
        for number in (5, 6):
            one, kind = builder.const(1.0, FLOAT), dtype_attr(FLOAT)
            part = builder.add(f"part{number}_{replica}", "Identity", [one], device=device, T=kind)
            total = all_reduce(
                builder,
                f"sum{number}_{replica}",
                part,
                FLOAT,
                (2, 5, number),
                device=device,
                control=after,
                **{BYTES_ATTR: 4},
            )
            after = [total.node]
            sums.append(builder.add(f"read{number}_{replica}", "Identity", [total], device=device, T=kind))
    total = builder.add_n("all", sums, FLOAT, device=ZERO)
    program = of_graph(builder.graph, total)
    step = dataclasses.replace(program.own_step, placed_on=frozenset({ZERO, ONE, TWO, THREE}))
    return program.replace(step=step)


@pytest.mark.parametrize(
    ("apart", "bucket_bytes", "units", "left"),
    [
        pytest.param("", 8, "p", ["sum5_0", "sum5_1"], id="joined"),
        pytest.param("6", 8, "p", ["sum5_0", "sum6_0", "sum5_1", "sum6_1"], id="other devices"),
        pytest.param("", 7, "p", ["sum5_0", "sum6_0", "sum5_1", "sum6_1"], id="too large"),
        pytest.param("", 8, "pq", ["sum5_0", "sum6_0", "sum5_1", "sum6_1"], id="complete at other times"),
    ],
)
def test_all_reduces_of_the_same_devices_are_joined_in_buckets(
    apart: str, bucket_bytes: int, units: str, left: list[str]
) -> None:
    graph = two_replicas().graph
    sums = [node.name for node in graph.node if node.op == SUM_OP]
    devices = {name: (ONE, THREE)[int(name[-1])] for name in sums if apart and name[3] == apart}
    packs = {name: units[-1] if "6" in name else units[0] for name in sums}
    view = Graph(join_reductions(graph, devices, packs, bucket_bytes))
    assert [node.name for node in view if node.op == SUM_OP] == left
    if len(left) == 2:
        assert [view.nodes[name].device for name in left] == [ZERO, TWO]
        assert view.nodes["sum5_1"].attr[BYTES_ATTR].i == 8
        (bucket,) = {ref.node for ref in view.inputs("sum5_1")[:1]}
        assert view.inputs(bucket)[:2] == [Ref("part5_1"), Ref("part6_1")]
        assert view.inputs("read6_1") == [Ref("sum5_1/parts", 1)]
        assert common_order(view, {})


def test_members_of_an_all_reduce_come_together_in_the_common_order() -> None:
    view = Graph(two_replicas().graph)
    # By these ranks alone the second replica would run its second part, and read its sum, before the first.
    order = common_order(view, {name: -int(name[-1]) if "5" in name else -2 for name in view.nodes})
    assert [names for names in order if len(names) > 1] == [["sum5_0", "sum5_1"], ["sum6_0", "sum6_1"]]
    graph = two_replicas().graph
    next(node for node in graph.node if node.name == "part5_1").input.append("^sum6_0")
    with pytest.raises(PassError, match="all-reduce 'sum5_0' and its members wait for each other"):
        common_order(Graph(graph), {})


def convolutions(*, control: bool) -> GraphDef:
    """Two branches of Conv2D and BiasAdd on one device, one after the other, and the gradient of a bias."""
    with tf.Graph().as_default() as graph, graph.device("/device:CPU:0"):
        x = v1.placeholder(tf.float32, (2, 6, 6, 3), name="x")
        padded = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], name="padded")
        outputs = []
        for name in ("a", "b"):
            convolved = tf.nn.conv2d(padded, tf.ones((3, 3, 3, 4)), 1, "VALID", name=f"conv_{name}")
            outputs.append(tf.nn.bias_add(convolved, [0.0, 1.0, 2.0, 3.0], name=f"bias_{name}"))
        total = tf.add_n(outputs)
        tf.nn.conv2d(total, tf.ones((1, 1, 4, 1)), 1, "SAME")
        tf.raw_ops.BiasAddGrad(out_backprop=total, name="bias_grad")
    definition = graph.as_graph_def()
    for own in definition.node:
        if control and own.name in ("conv_b", "bias_b"):
            own.input.append(f"^{own.name[:-1]}a")
    return definition


def test_what_is_merged_reads_through_an_identity() -> None:
    graph = unfused(convolutions(control=True))
    view = Graph(graph)
    for name in ("bias_a", "bias_b", "conv_a", "conv_b", "bias_grad"):
        first = view.inputs(name)[0].node
        assert view.nodes[first].op == "Identity", name
        assert view.nodes[first].device == view.nodes[name].device
        assert not [text for text in view.nodes[name].input if text.startswith("^")]
    assert "^bias_a" in view.nodes[view.inputs("bias_b")[0].node].input
    view.topological()


def test_ordered_convolutions_run_and_appear_in_the_trace() -> None:
    # Two pairs of a convolution and its BiasAdd with control edges between them aborted the process: TensorFlow's pass
    # for oneDNN merges the first pair, so that both nodes of the second wait for the same node.
    results = []
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # as in sessions that run steps
    for graph in (convolutions(control=False), unfused(convolutions(control=True))):
        with tf.Graph().as_default() as target, v1.Session(graph=target, config=config) as session:
            tf.graph_util.import_graph_def(graph, name="")
            metadata = v1.RunMetadata()
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            feed = {"x:0": np.arange(216, dtype="float32").reshape(2, 6, 6, 3)}
            results.append(session.run(["bias_a:0", "bias_b:0", "bias_grad:0"], feed, options, metadata))
            ran = {node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats}
    for own, other in zip(*results, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)
    assert {"conv_a", "bias_a", "conv_b", "bias_b"} <= ran
