"""Operators become parts: structure, results of whole training graphs, and the same in the cost graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

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
from graph_passes.ir.tensorflow_bridge import constant_value
from graph_passes.passes.split_operators import SplitGraph, SplitOperators, split_operators

TOPOLOGY = Topology(("/device:CPU:0",), np.full((1, 1), np.inf), np.zeros((1, 1)), np.full(1, np.inf))
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


# ---- structure


def traced(build: Callable[[], Any]) -> GraphDef:
    with tf.Graph().as_default() as graph:
        build()
    return graph.as_graph_def()


def x(shape: Sequence[int] = (6, 4), name: str = "x") -> Any:
    return tf.compat.v1.placeholder(tf.float32, shape, name=name)


def split(graph: GraphDef, splits: Mapping[str, tuple[str, int]], fetched: Sequence[Ref] = ()) -> SplitGraph:
    before = graph.SerializeToString(deterministic=True)
    chosen = {name: Split(*how) for name, how in splits.items()}
    split_graph = split_operators(graph, chosen, infer_shapes(graph, {}, {}), fetched)
    assert graph.SerializeToString(deterministic=True) == before, "the pass changed its input"
    Graph(split_graph.graph).topological()
    infer_shapes(split_graph.graph, {}, {})
    return split_graph


def show(graph: GraphDef) -> list[str]:
    """``name = op(inputs)`` of each node; constants are shown as values where they are read."""
    view = Graph(graph)

    def value(text: str) -> str:
        node = view.nodes.get(text)
        return text if node is None or node.op != "Const" else str(constant_value(node).tolist()).replace(" ", "")

    return [f"{n.name} = {n.op}({', '.join(map(value, n.input))})" for n in graph.node if n.op != "Const"]


def test_an_operator_is_cut_and_joined_for_its_neighbours() -> None:
    def build() -> None:
        a = tf.nn.relu(x(), name="a")
        b = tf.raw_ops.MatMul(a=a, b=x((4, 5), "w"), name="b")
        tf.nn.relu(b, name="c")

    assert show(split(traced(build), {"b": ("batch", 4)}).graph) == [
        "x = Placeholder()",
        "a = Relu(x)",
        "a/split_0_0_4_of_6 = SplitV(a, [2,2,1,1], 0)",
        "w = Placeholder()",
        "b/part0 = MatMul(a/split_0_0_4_of_6, w)",
        "b/part1 = MatMul(a/split_0_0_4_of_6:1, w)",
        "b/part2 = MatMul(a/split_0_0_4_of_6:2, w)",
        "b/part3 = MatMul(a/split_0_0_4_of_6:3, w)",
        "b/joined_0 = ConcatV2(b/part0, b/part1, b/part2, b/part3, 0)",
        "c = Relu(b/joined_0)",
    ]


def test_chains_stay_split_and_sums_are_added() -> None:
    def build() -> None:
        a = tf.nn.relu(x(), name="a")
        b = tf.nn.relu(a, name="b")
        tf.raw_ops.MatMul(a=b, b=x((6, 2), "dy"), transpose_a=True, name="c")

    graph = traced(build)
    fetched = [Ref("c")]
    split_graph = split(graph, dict.fromkeys("abc", ("batch", 2)), fetched)
    assert split_graph.joined == {Ref("c"): Ref("c/joined_0")}
    assert show(split_graph.graph) == [
        "x = Placeholder()",
        "x/split_0_0_2 = SplitV(x, [3,3], 0)",
        "a/part0 = Relu(x/split_0_0_2)",
        "a/part1 = Relu(x/split_0_0_2:1)",
        "b/part0 = Relu(a/part0)",
        "b/part1 = Relu(a/part1)",
        "dy = Placeholder()",
        "dy/split_0_0_2 = SplitV(dy, [3,3], 0)",
        "c/part0 = MatMul(b/part0, dy/split_0_0_2)",
        "c/part1 = MatMul(b/part1, dy/split_0_0_2:1)",
        "c/joined_0 = AddN(c/part0, c/part1)",
    ]


def test_constants_are_cut_beforehand_and_shapes_are_constants() -> None:
    def build() -> None:
        a = tf.raw_ops.Mul(x=x(), y=tf.constant(np.arange(4.0, dtype=np.float32), name="c"), name="a")
        tf.raw_ops.Reshape(tensor=a, shape=tf.shape(x((2, 12), "y"), name="s"), name="b")

    graph = traced(build)
    for node in graph.node:
        node.attr["_dapple_layer"].s = node.name.encode()
    split_graph = split(graph, {"a": ("channel", 2), "b": ("batch", 2)})
    lines = show(split_graph.graph)
    assert "a/part1 = Mul(x/split_0_1_2:1, [2.0,3.0])" in lines
    assert "b/part1 = Reshape(a/split_0_0_2:1, [1,12])" in lines
    assert Graph(split_graph.graph).nodes["c/split_0_0_2/part1"].attr["_dapple_layer"].s == b"c"


def test_nodes_wait_for_parts_and_keep_device_and_roles() -> None:
    def build() -> None:
        with tf.device(CPU):
            a, y = tf.nn.relu(x(), name="a"), x(name="y")
            with tf.control_dependencies([a]):
                b = tf.nn.relu(y, name="b")
                c = tf.nn.relu(a, name="c")
            with tf.control_dependencies([b]):
                tf.identity(c, name="d")

    graph = traced(build)
    for node in graph.node:
        node.attr["_dapple_layer"].s = node.name.encode()
        if node.name == "d":
            node.attr["_class"].list.s.extend([b"loc:@a", b"loc:@x"])
    split_graph = split(graph, {"a": ("batch", 2), "b": ("channel", 2)})
    assert show(split_graph.graph) == [
        "x = Placeholder()",
        "x/split_0_0_2 = SplitV(x, [3,3], 0)",
        "a/part0 = Relu(x/split_0_0_2)",
        "a/part1 = Relu(x/split_0_0_2:1)",
        "a/joined_0 = ConcatV2(a/part0, a/part1, 0)",
        "y = Placeholder()",
        "y/split_0_1_2 = SplitV(y, [2,2], 1)",
        "b/part0 = Relu(y/split_0_1_2, ^a/part0, ^a/part1)",
        "b/part1 = Relu(y/split_0_1_2:1, ^a/part0, ^a/part1)",
        "c = Relu(a/joined_0)",
        "d = Identity(c, ^b/part0, ^b/part1)",
    ]
    nodes = Graph(split_graph.graph).nodes
    assert {node.device for node in nodes.values()} == {CPU}
    for name in ("a/part0", "a/part1", "a/joined_0"):
        assert nodes[name].attr["_dapple_layer"].s == b"a"
    assert nodes["x/split_0_0_2"].attr["_dapple_layer"].s == b"x"
    assert list(nodes["d"].attr["_class"].list.s) == [b"loc:@x"]


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
    def build() -> None:
        a = tf.nn.relu(x(), name="a")
        tf.nn.relu(a, name="b")
        tf.nn.relu(a, name="b/part0")

    with pytest.raises(PassError, match=text):
        split(traced(build), splits)


def test_the_steps_tensors_are_redirected() -> None:
    def build() -> None:
        a = tf.nn.relu(x(), name="a")
        tf.nn.relu(a, name="b")
        tf.no_op(name="train")

    graph, task, other = traced(build), Task(0, Phase.FORWARD, 0, 0), Task(0, Phase.BACKWARD, 0, 0)
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


def norm_net() -> list[Any]:
    """Depthwise and plain convolutions with both kinds of batch normalisation, branches that are concatenated."""
    images = tf.identity(tf.constant(np.random.default_rng(9).normal(size=(6, 8, 8, 4)).astype(np.float32)))
    ws = [
        tf.cast(weights(*shape, seed=n), tf.float32) for n, shape in enumerate([(3, 3, 4, 2), (1, 1, 8, 6), (6,), (6,)])
    ]
    depthwise, pointwise, gamma, beta = ws
    h = tf.nn.conv2d(tf.nn.depthwise_conv2d(images, depthwise, [1, 1, 1, 1], "SAME"), pointwise, 1, "SAME")
    fused, *_ = tf.compat.v1.nn.fused_batch_norm(h, gamma, beta)
    mean, variance = tf.nn.moments(h, [0, 1, 2])
    plain = tf.nn.batch_normalization(h, mean, variance, beta, gamma, 1e-3)
    h = tf.concat([tf.nn.avg_pool2d(fused, 2, 2, "SAME"), tf.nn.relu(plain)[:, ::2, 1::2, :]], axis=3)
    h = tf.reduce_mean(tf.nn.swish(h), [1, 2])
    loss = tf.reduce_sum(tf.square(h)) / 72
    return [loss, h, *tf.gradients(loss, ws)]


def attention() -> list[Any]:
    """Attention with einsum, transposed batched products, softmax and an embedding."""
    tokens = tf.identity(tf.constant(np.random.default_rng(9).integers(0, 9, (4, 5)).astype(np.int32)))
    table, q, k, v, out = ws = [
        tf.cast(weights(*s, seed=n), tf.float32) * 0.1
        for n, s in enumerate([(9, 6), (6, 2, 3), (6, 2, 3), (6, 6), (6, 9)])
    ]
    h = tf.gather(table, tokens)
    query, key = (tf.einsum("bth,hnd->btnd", h, w) for w in (q, k))
    value = tf.reshape(tf.matmul(tf.reshape(h, [-1, 6]), v), [4, 5, 2, 3])
    scores = tf.nn.softmax(tf.einsum("btnd,bsnd->bnts", query, key))
    mixed = tf.transpose(tf.matmul(scores, tf.transpose(value, [0, 2, 1, 3])), [0, 2, 1, 3])
    logits = tf.matmul(tf.reshape(mixed, [20, 6]), out)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(tokens, [20]), logits))
    return [loss, logits, *(tf.convert_to_tensor(g) for g in tf.gradients(loss, ws))]


NETS = {"conv_net": conv_net, "norm_net": norm_net, "attention": attention}


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
        split_graph = split_operators(self.graph, splits, self.shapes, self.fetched)
        refs = [split_graph.joined.get(ref, ref) for ref in self.fetched]
        for expected, value in zip(self.results, self.run(split_graph.graph, refs), strict=True):
            tolerance = 1e-10 if expected.dtype == np.float64 else 1e-4
            assert value.shape == expected.shape
            np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)
        own = split_operators(self.graph, splits, self.shapes)
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
def nets() -> dict[str, Net]:
    return {name: Net(build) for name, build in NETS.items()}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dimension", ["batch", "channel"])
def test_networks_of_which_every_operator_is_split_train_alike(nets: dict[str, Net], name: str, dimension: str) -> None:
    net = nets[name]
    for parts in (2, 3):
        wanted = {
            op: Split(dimension, parts) for op, options in net.options().items() if Split(dimension, parts) in options
        }
        assert len(wanted) > 20
        net.check(wanted)


@pytest.mark.parametrize("seed", range(9))
def test_any_splits_give_the_same_results(nets: dict[str, Net], seed: int) -> None:
    net, share = nets[list(NETS)[seed % 3]], (0.2, 0.6, 1.0)[seed // 3]
    generator = np.random.default_rng(seed)
    splits = {
        name: options[generator.integers(len(options))]
        for name, options in net.options().items()
        if options and generator.random() < share
    }
    net.check(splits)


def test_split_alike_a_chain_has_no_joins_within(nets: dict[str, Net]) -> None:
    net = nets["conv_net"]
    view = Graph(net.graph)
    chain = [name for name in ("conv1", "bias", "Relu", "pool", "conv2", "Relu_1") if name in view]
    split_graph = split_operators(net.graph, dict.fromkeys(chain, Split("batch", 3)), net.shapes)
    names = [node.name for node in split_graph.graph.node]
    for before, after in itertools.pairwise(chain):
        for part in range(3):
            assert f"{before}/part{part}" in Graph(split_graph.graph).nodes[f"{after}/part{part}"].input
    assert "conv1/joined_0" not in names
