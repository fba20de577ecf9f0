"""Operators become parts: structure, results of whole training graphs, and the same in the cost graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from program_text import read_program
from programs import copied, show_changes

from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.analysis.split_rules import Split
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, Ref
from graph_passes.ir.program import Layout, Program, Roles, Slice, Step
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.text import graph_text
from graph_passes.passes.split_operators import GraphSplitting, SplitGraph, SplitOperators

TOPOLOGY = Topology(("/device:CPU:0",), np.full((1, 1), np.inf), np.zeros((1, 1)), np.full(1, np.inf))
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


# ---- structure


def split(graph: GraphDef, splits: Mapping[str, tuple[str, int]], fetched: Sequence[Ref] = ()) -> SplitGraph:
    before = graph.SerializeToString(deterministic=True)
    chosen = {name: Split(*how) for name, how in splits.items()}
    split_graph = GraphSplitting(graph, chosen, infer_shapes(graph, {}, {})).result(fetched)
    assert graph.SerializeToString(deterministic=True) == before, "the pass changed its input"
    Graph(split_graph.graph).topological()
    infer_shapes(split_graph.graph, {}, {})
    return split_graph


CHAIN = """
    x[6, 4], dy[6, 2], w[4, 5]
    a = Relu(x)
    b = Relu(a)
    c = MatMul(b, dy, transpose_a=True)
    d = MatMul(b, w)
"""
FORMS: dict[str, tuple[str, dict[str, tuple[str, int]]]] = {
    "uneven parts": (CHAIN, {"d": ("batch", 4)}),
    "a chain stays split, and sums are added": (CHAIN, dict.fromkeys("abc", ("batch", 2))),
    "constants are cut beforehand, and shapes are constants": (
        """
        x[6, 4], y[2, 12]
        a = Mul(x, [0., 1., 2., 3.])
        s = Shape(y)
        b = Reshape(a, s)
        """,
        {"a": ("channel", 2), "b": ("batch", 2)},
    ),
    "nodes wait for parts": (
        """
        x[6, 4], y[6, 4]
        a = Relu(x)
        b = Relu(y) ^a
        c = Relu(a) ^a
        d = Identity(c) ^b
        """,
        {"a": ("batch", 2), "b": ("channel", 2)},
    ),
}


def test_what_becomes_of_operators_and_their_neighbours(golden: Callable[[str, str], None]) -> None:
    texts = []
    for title, (text, splits) in FORMS.items():
        before = read_program(text).graph
        made = split(before, splits, [Ref("c")] if text == CHAIN else [])
        texts.append(f"{title}\n{show_changes(graph_text(before), graph_text(made.graph))}")
        assert made.joined.get(Ref("c")) == (Ref("c/joined_0") if "c" in splits else None)
    golden("split_operators_forms.txt", "\n".join(texts))


def test_parts_keep_device_layer_and_colocation() -> None:
    graph = copied(read_program("x[6, 4]\na = Relu(x)\nb = Identity(a)")).graph
    for each in graph.node:
        each.device = CPU
        each.attr["_dapple_layer"].s = each.name.encode()
    graph.node[-1].attr["_class"].list.s.extend([b"loc:@a", b"loc:@x"])
    nodes = Graph(split(graph, {"a": ("batch", 2)}).graph).nodes
    assert {each.device for each in nodes.values()} == {CPU}
    layers = {name: nodes[name].attr["_dapple_layer"].s for name in ("a/part0", "a/joined_0", "x/split_0_0_2")}
    assert [*layers.values()] == [b"a", b"a", b"x"]
    assert list(nodes["b"].attr["_class"].list.s) == [b"loc:@x"]


@pytest.mark.parametrize(
    "splits, text",
    [
        ({"q": ("batch", 2)}, "no operator 'q'"),
        ({"a": ("row", 2)}, r"'a' can't be split along 'row', only along batch \(6\), channel \(4\) \(Relu, which"),
        ({"a": ("batch", 7)}, "into 7 parts: it has length 6"),
        ({"x": ("batch", 2)}, "only along nothing"),
        ({"b": ("batch", 2)}, "there is a node 'b/part0' already"),
    ],
)
def test_impossible_splits_are_told(splits: dict[str, tuple[str, int]], text: str) -> None:
    with pytest.raises(PassError, match=text):
        split(read_program("x[6, 4]\na = Relu(x)\nb = Relu(a)\nb/part0 = Relu(a)").graph, splits)


def test_the_steps_tensors_are_redirected() -> None:
    graph = read_program("x[6, 4]\na = Relu(x)\nb = Relu(a)\ntrain = NoOp()").graph
    task, other = Task(0, Phase.FORWARD, 0, 0), Task(0, Phase.BACKWARD, 0, 0)
    layout = Layout(((CPU,),), 6, 6, 1)
    step = Step(
        layout,
        entry={task: "x"},
        exit={task: ("a", "x")},
        values={(task, "kept"): Ref("x"), (task, "gone"): Ref("b"), (other, "joined"): Ref("a")},  # type: ignore[dict-item]
        feeds={Ref("x"): Ref("x")},
        loss=Ref("a"),
        outputs=((Ref("a"), Ref("x")),),
        gradients={"w": Ref("a")},
        metric_results={"m": (Ref("a"),)},
        train="train",
    )
    program = Program(graph, Roles((), (), Slice(Ref("x"), Ref("x"), Ref("x"))), step=step)
    splits = {"a": Split("batch", 2), "b": Split("batch", 2)}
    redirected = SplitOperators(splits, infer_shapes(graph, {}, {})).run(program).step
    assert redirected is not None
    joined = Ref("a/joined_0")
    assert redirected.loss == redirected.gradients["w"] == joined and redirected.outputs == ((joined, Ref("x")),)
    assert redirected.metric_results == {"m": (joined,)} and redirected.exit == {task: ("a/part0", "a/part1", "x")}
    assert list(redirected.values.values()) == [Ref("x"), joined]
    assert program.step is step and step.loss == Ref("a")
    ordered = program.replace(step=Step(layout, train="a"))
    with pytest.raises(PassError, match="'a' can't be split: the step is ordered by it"):
        SplitOperators(splits, infer_shapes(graph, {}, {})).run(ordered)
    assert SplitOperators({}, {}).run(program) is program


# ---- whole training graphs


def weights(*shape: int, seed: int = 0) -> Any:
    """A fed variable: integers, so that most sums are exact."""
    value = np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float64)
    return tf.compat.v1.placeholder_with_default(tf.constant(value), shape, name=f"w{seed}")


def conv_net() -> list[Any]:
    """conv - bias - relu - pool - conv - relu - dense - loss, with all gradients."""
    images = tf.identity(tf.constant(np.random.default_rng(9).integers(-2, 3, (7, 9, 8, 3)).astype(np.float64)))
    labels = tf.constant(np.arange(7) % 4)
    parameters = [weights(3, 3, 3, 6, seed=1), weights(6, seed=2), weights(2, 2, 6, 4, seed=3), weights(36, 4, seed=4)]
    kernel, bias, other, dense = parameters
    h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(images, kernel, 1, "SAME", name="conv1"), bias, name="bias"))
    h = tf.nn.max_pool2d(h, 3, 2, "VALID", name="pool")
    h = tf.nn.relu(tf.nn.conv2d(h, other, 1, "VALID", name="conv2"))
    h = tf.reshape(tf.pad(h, [[0, 0], [0, 0], [0, 1], [0, 0]]), [-1, 36])
    logits = tf.matmul(h, dense, name="dense") * 0.01
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return [loss, logits, *tf.gradients(loss, parameters)]


class Net:
    """A training graph, its cost graph and its results."""

    def __init__(self, build: Callable[[], list[Any]]) -> None:
        with tf.Graph().as_default() as graph:
            self.fetched = [Ref.parse(tensor.name.removesuffix(":0")) for tensor in build()]
        self.graph = graph.as_graph_def()
        for node in self.graph.node:
            node.attr.pop("_class", None)  # so that every operator can be anywhere, as after `build_backward`
        self.shapes = infer_shapes(self.graph, {}, {})
        self.operators = build_op_graph(self.graph, TOPOLOGY, OperatorCosts.p100(), self.shapes)
        self.results = self.run(self.graph, self.fetched)

    def run(self, graph: GraphDef, refs: Sequence[Ref]) -> list[np.ndarray]:
        config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Graph().as_default() as scope:
            tf.graph_util.import_graph_def(graph, name="")
            with tf.compat.v1.Session(graph=scope, config=config) as session:
                values: list[np.ndarray] = session.run([f"{ref.node}:{ref.output}" for ref in refs])
        return values

    def options(self) -> dict[str, list[Split]]:
        """All splits of each operator into 2 to 4 parts."""
        return {
            self.operators.names[number]: [
                Split(rule.dimension, parts) for rule in rules for parts in range(2, min(4, rule.length) + 1)
            ]
            for number, rules in self.operators.splits.items()
        }

    def check(self, splits: Mapping[str, Split]) -> None:
        """Splits give the same results, and the same graph as in the cost graph."""
        split_graph = GraphSplitting(self.graph, splits, self.shapes).result(self.fetched)
        refs = [split_graph.joined.get(ref, ref) for ref in self.fetched]
        for expected, value in zip(self.results, self.run(split_graph.graph, refs), strict=True):
            tolerance = 1e-10 if expected.dtype == np.float64 else 1e-4
            assert value.shape == expected.shape
            np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)
        own = GraphSplitting(self.graph, splits, self.shapes).result()
        rebuilt = build_op_graph(own.graph, TOPOLOGY, OperatorCosts.p100(), infer_shapes(own.graph, {}, {}))
        applied = apply_splits(self.operators, splits)
        assert (applied.edges[:, 0] < applied.edges[:, 1]).all()
        assert dict(zip(applied.names, applied.ops, strict=True)) == dict(zip(rebuilt.names, rebuilt.ops, strict=True))
        assert set(edges_of(applied)) == set(edges_of(rebuilt))
        assert sizes_of(applied) == pytest.approx(sizes_of(rebuilt))


def edges_of(graph: OpGraph) -> Iterator[tuple[Any, ...]]:
    assert graph.tensor_outputs is not None
    for producer, consumer, tensor, argument in graph.edges.tolist():
        output = graph.tensor_outputs[tensor] if tensor >= 0 else -1
        yield graph.names[producer], graph.names[consumer], int(output), argument


def sizes_of(graph: OpGraph) -> dict[str, float]:
    """The size of each tensor."""
    assert graph.tensor_outputs is not None
    return {
        f"{graph.names[producer]}:{graph.tensor_outputs[tensor]}": graph.tensor_bytes[tensor]
        for producer, _, tensor, _ in graph.edges.tolist()
        if tensor >= 0
    }


@pytest.fixture(scope="module")
def net() -> Net:
    return Net(conv_net)


@pytest.mark.parametrize("seed", range(3))
def test_any_splits_give_the_same_results(net: Net, seed: int) -> None:
    generator = np.random.default_rng(seed)
    splits = {
        name: options[generator.integers(len(options))]
        for name, options in net.options().items()
        if options and generator.random() < (0.2, 0.6, 1.0)[seed]
    }
    net.check(splits)
