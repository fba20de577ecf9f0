"""Operators that TensorFlow would fuse stay apart, with the order that they have been given."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from graph_passes.ir.graph import Graph, GraphDef
from graph_passes.passes.place_operators import unfused

v1 = tf.compat.v1


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
    for node in definition.node:
        if control and node.name in ("conv_b", "bias_b"):
            node.input.append(f"^{node.name[:-1]}a")
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
