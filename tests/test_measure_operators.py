"""Times of operators from step stats: of a real session, and of stats as GPUs give them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework.step_stats_pb2 import StepStats

from dapple_tf.measuring.measure_operators import add_step_stats
from dapple_tf.operators.build_op_graph import build_op_graph, operator_signatures
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import Topology
from dapple_tf.operators.signatures import OpSignature
from graph_passes.analysis.operator_shapes import operator_shapes
from graph_passes.ir.graph import GraphDef

_RELU = OpSignature.parse("Relu | float32[64,8] | float32[64,8]")
_TANH = OpSignature.parse("Tanh | float32[64,8] | float32[64,8]")
_SHAPE = OpSignature.parse("Shape | float32[64,8] | int32[2]")
_LOOP = OpSignature.parse("While functions=ab | float32[64,8] | float32[64,8]")
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_GPU = "/job:localhost/replica:0/task:0/device:GPU:0"


def stats(**devices: list[tuple[str, int, int]]) -> StepStats:
    """Step stats of nodes: (name, start, end) in nanoseconds, by device."""
    names = {"cpu": _CPU, "gpu": _GPU, "kernels": "/device:GPU:0/stream:all", "stream": "/device:GPU:0/stream:14"}
    names |= {"copies": "/device:GPU:0/memcpy", "sync": "/device:GPU:0/sync"}
    step_stats = StepStats()
    for key, nodes in devices.items():
        own = step_stats.dev_stats.add(device=names[key])
        for name, start, end in nodes:
            node = own.node_stats.add(node_name=name)
            if key in ("cpu", "gpu"):  # The executor works before and after, too.
                node.all_start_micros, node.all_start_nanos = (start - 500) // 1000, start - 500
                node.op_start_rel_nanos, node.op_end_rel_nanos, node.all_end_rel_nanos = 500, end - start + 500, 9_999
            else:
                node.all_start_micros = start // 1000
                node.op_end_rel_micros = node.all_end_rel_micros = (end - start) // 1000
    return step_stats


def test_a_time_is_that_of_the_computation_alone_and_goes_to_the_devices_kind() -> None:
    costs = OperatorCosts()
    given = stats(cpu=[("step/relu", 10_000, 12_500), ("step/other", 0, 99), ("elsewhere/relu", 0, 99)])
    assert add_step_stats(costs, given, {"relu": _RELU, "not_run": _TANH}, prefix="step") == 1
    assert costs.measured(_RELU, "CPU") == (1, pytest.approx(2.5e-6))
    assert costs.measured(_TANH, "CPU") is None
    add_step_stats(costs, given, {"relu": _RELU}, prefix="step", speeds={_CPU: 2.0})
    assert costs.measured(_RELU, "CPU") == (2, pytest.approx(3.75e-6))


def test_equal_operators_are_averaged() -> None:
    costs = OperatorCosts()
    add_step_stats(costs, stats(cpu=[("a", 1_000, 2_000), ("b", 3_000, 6_000)]), {"a": _RELU, "b": _RELU})
    assert costs.measured(_RELU, "CPU") == (2, pytest.approx(2e-6))


def test_of_several_steps_the_median_counts() -> None:
    costs = OperatorCosts()
    steps = [stats(cpu=[("a", 0, took), ("b", 0, 2_000)]) for took in (1_000, 900_000, 3_000)]
    assert add_step_stats(costs, steps, {"a": _RELU, "b": _TANH}) == 2
    assert costs.measured(_RELU, "CPU") == (3, pytest.approx(3e-6))
    assert costs.measured(_TANH, "CPU") == (3, pytest.approx(2e-6))


def test_on_gpus_kernels_count_or_starting_them_where_that_takes_longer() -> None:
    costs = OperatorCosts()
    given = stats(
        gpu=[("relu", 10_000, 14_000), ("tanh", 20_000, 29_000), ("shape", 30_000, 31_000)],
        kernels=[("relu:Relu", 50_000, 80_000), ("relu:Relu", 90_000, 100_000), ("tanh", 99_000, 101_000)],
        stream=[("relu:Relu", 50_000, 80_000), ("relu:Relu", 90_000, 100_000)],
        copies=[("relu", 80_000, 85_000), ("MemcpyH2D", 0, 9_000)],
        sync=[("cuStreamSynchronize", 0, 9_000)],
    )
    assert add_step_stats(costs, given, {"relu": _RELU, "tanh": _TANH, "shape": _SHAPE}) == 3
    means = [costs.measured(signature, "GPU") for signature in (_RELU, _TANH, _SHAPE)]
    assert means == [(1, pytest.approx(45e-6)), (1, pytest.approx(9e-6)), (1, pytest.approx(1e-6))]


def test_a_gpu_that_tells_nothing_of_kernels_counts_as_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    costs = OperatorCosts()
    given = stats(gpu=[("relu", 10_000, 14_000)], cpu=[("tanh", 0, 1_000)])
    assert add_step_stats(costs, given, {"relu": _RELU, "tanh": _TANH}) == 1
    assert costs.measured(_RELU, "GPU") is None and costs.measured(_TANH, "CPU") is not None
    assert "1 operators ran on GPUs, but the trace has no times of kernels" in caplog.text


def test_a_loop_that_was_taken_apart_takes_as_long_as_anything_inside() -> None:
    costs = OperatorCosts()
    inside = [("loop/enter", 1_000, 2_000), ("loop/body/MatMul", 3_000, 6_000), ("loop/body/Tanh", 5_000, 7_000)]
    given = stats(cpu=[*inside, ("loop/relu", 8_000, 9_000), ("loops/x", 0, 99_000)])
    assert add_step_stats(costs, given, {"loop": _LOOP, "loop/relu": _RELU}) == 2
    assert costs.measured(_LOOP, "CPU") == (1, pytest.approx(5e-6))
    assert costs.measured(_RELU, "CPU") == (1, pytest.approx(1e-6))


# ---- a real session


@pytest.fixture(scope="module")
def session_run() -> tuple[GraphDef, list[StepStats]]:
    """A small training step under the name ``step``, and its stats of three runs."""
    with tf.Graph().as_default() as own:
        x = tf.compat.v1.placeholder(tf.float32, [16, 12, 12, 8], name="x")
        filters = tf.ones([3, 3, 8, 8])
        y = tf.nn.relu(tf.nn.conv2d(x, filters, 1, "SAME", name="conv"))
        _, state = tf.while_loop(
            lambda i, h: i < 5,
            lambda i, h: (i + 1, tf.tanh(h @ h)),
            [0, y[0, :8, 0]],
            maximum_iterations=5,
            name="loop",
        )
        rows = tf.boolean_mask(state[:, 0], state[:, 0] > 0, name="rows")
        loss = tf.reduce_sum(y, name="loss") + tf.reduce_sum(state) + tf.reduce_sum(rows)
        tf.identity(tf.gradients(loss, filters)[0], name="gradient")
        graph = own.as_graph_def()
    runs = []
    with tf.Graph().as_default() as scope:
        tf.graph_util.import_graph_def(graph, name="step")
        config = tf.compat.v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = -1
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        with tf.compat.v1.Session(graph=scope, config=config) as session:
            for _ in range(3):
                metadata = tf.compat.v1.RunMetadata()
                feed = {"step/x:0": np.random.default_rng(0).normal(size=[16, 12, 12, 8]) / 100}
                session.run(["step/gradient:0", "step/loss:0"], feed, options=options, run_metadata=metadata)
                runs.append(metadata.step_stats)
    return graph, runs


def test_a_traced_step_measures_its_operators(session_run: tuple[GraphDef, list[StepStats]]) -> None:
    graph, runs = session_run
    shapes = operator_shapes(graph, {})
    made = operator_signatures(graph, shapes)
    costs = OperatorCosts()
    counts = {add_step_stats(costs, run, made, prefix="step") for run in runs[1:]}
    assert len(counts) == 1 and counts.pop() > 10
    names = [name for name, signature in made.items() if signature.op == "Conv2DBackpropFilter"]
    for name in ("conv", "loop", *names):
        mean = costs.measured(made[name], "CPU")
        assert mean is not None and 0 < mean.seconds < 5 and mean.times == 2, name
    topology = Topology(("CPU:0",), *3 * [None])  # type: ignore[arg-type]
    op_graph = build_op_graph(graph, topology, costs, shapes)
    seconds = dict(zip(op_graph.names, op_graph.seconds[:, 0], strict=True))
    assert all(seconds[name] == costs.seconds(made[name], "CPU") for name in ("conv", "loop", "Relu"))
