"""Runs complete steps on CPU devices from given values of all variables, whether they are flat or not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from programs import step_of

from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref
from graph_passes.ir.program import Program
from graph_passes.ir.resource_use import ResourceUse, resource_name


def handles(graph: GraphDef) -> dict[str, dict[str, NodeDef]]:
    """Variable -> device -> one of its handles in a step; accumulators are left out."""
    bodies = {function.signature.name: function.node_def for function in graph.library.function}
    by_variable: dict[str, dict[str, NodeDef]] = {}
    for node in graph.node:
        called = node.attr["f"].func.name if "f" in node.attr else ""
        for inner in (node, *bodies.get(called, ())):
            if inner.op == "VarHandleOp" and "/stage" not in resource_name(inner):
                by_variable.setdefault(resource_name(inner), {})[node.device] = inner
    return by_variable


def random_placement(program: Program, names: Sequence[str], seed: int = 0) -> tuple[dict[str, str], list[str]]:
    """Some device for each operator of a flat step, and an order of all; variables stay together."""
    draw, view = random.Random(seed), Graph(program.graph)
    together = {node.name: resource_name(node) for node in program.graph.node if node.op == "VarHandleOp"}
    functions = {function.signature.name: function for function in program.graph.library.function}
    for use in ResourceUse(functions).of_nodes(program.graph.node):
        # What touches several variables makes them one group.
        before = together.get(use.node, use.resource)
        together = {name: use.resource if group == before else group for name, group in together.items()}
        together[use.node] = use.resource
    order = [name for name in view.topological() if view.nodes[name].op not in ("Const", "Placeholder")]
    chosen: dict[str, str] = {}
    return {name: chosen.setdefault(together.get(name, name), draw.choice(names)) for name in order}, order


def config(devices: int) -> tf.compat.v1.ConfigProto:
    """Of sessions that run graphs as they are."""
    proto = tf.compat.v1.ConfigProto(device_count={"CPU": devices}, allow_soft_placement=False)
    proto.graph_options.rewrite_options.disable_meta_optimizer = True
    proto.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0  # no constant is folded
    proto.intra_op_parallelism_threads = 1
    proto.inter_op_parallelism_threads = devices + 2
    return proto


class Steps:
    """A session on one step's graph.

    Args:
        program: the complete step.
        devices: how many CPU devices there are.
    """

    def __init__(self, program: Program, devices: int = 1) -> None:
        self.program, self.step = program, step_of(program)
        graph = GraphDef()
        graph.CopyFrom(program.graph)
        plain = config(devices).SerializeToString()
        for node in graph.node:
            if node.op in ("PartitionedCall", "StatefulPartitionedCall") and "config_proto" not in node.attr:
                node.attr["config_proto"].s = plain  # or Grappler would rewrite the functions
        self._graph = tf.Graph()
        with self._graph.as_default():
            tf.graph_util.import_graph_def(graph, name="")
            self._places = {
                name: [self._variable(node, device) for device, node in sorted(places.items())]
                for name, places in sorted(handles(graph).items())
            }
        self._session = tf.compat.v1.Session(graph=self._graph, config=config(devices))
        self._metrics: dict[str, Any] = {}

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _variable(self, node: NodeDef, device: str) -> tuple[Any, Any, Any]:
        """What a variable's value is assigned from, what assigns it and its value."""
        with tf.device(device):
            dtype = tf.dtypes.as_dtype(node.attr["dtype"].type)
            shape = [dim.size for dim in node.attr["shape"].shape.dim]
            handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=resource_name(node))
            value = tf.compat.v1.placeholder(dtype, shape)
            assign = tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            return value, assign, tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)

    def load(self, seed: int = 0) -> None:
        """Random values for all variables, the same for all steps of the same variables."""
        generator = np.random.default_rng(seed)
        for places in self._places.values():
            kind = places[0][0]
            drawn = generator.uniform(0.1, 1.0, kind.shape) if kind.dtype.is_floating else np.full(kind.shape, 3)
            for value, assign, _ in places:
                self._session.run(assign, {value: drawn.astype(kind.dtype.as_numpy_dtype)})

    def values(self) -> dict[str, list[np.ndarray]]:
        """The variables' values on all devices that keep them."""
        reads = {name: [read for *_, read in places] for name, places in self._places.items()}
        values: dict[str, list[np.ndarray]] = self._session.run(reads)
        return values

    def run(self, batch: Sequence[Any], *, stats: Any = None, gradients: bool = False) -> dict[str, Any]:
        """One step.

        Args:
            batch: the arrays of the batch, in feed order.
            stats: RunMetadata to fill.
            gradients: fetch the gradients instead of training.
        """
        step = self.step
        feeds: dict[Ref, Any] = {step.feeds[ref]: array for ref, array in zip(step.feeds, batch, strict=True)}
        for variable, (running, initial) in step.metric_feeds.items():
            shape = self.program.variables[variable].shape
            feeds |= {running: self._metrics.get(variable, np.full(shape, 0.25)), initial: np.zeros(shape)}

        def names(refs: Sequence[Ref]) -> list[str]:
            return [f"{ref.node}:{ref.output}" for ref in refs]

        fetches: dict[str, Any] = {
            "metrics": {name: names(refs) for name, refs in step.metric_results.items()},
            "outputs": [names(refs) for refs in step.outputs],
            "loss": names([step.loss] if step.loss is not None else []),
        }
        if gradients:
            fetches["gradients"] = {name: names([ref]) for name, ref in step.gradients.items()}
        elif step.train is not None:
            fetches["train"] = step.train
        options = None if stats is None else tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        given = {f"{ref.node}:{ref.output}": value for ref, value in feeds.items()}
        results: dict[str, Any] = self._session.run(fetches, given, options=options, run_metadata=stats)
        self._metrics |= {name: parts[0] for name, parts in results["metrics"].items()}
        return results


def assert_equal(one: Any, other: Any) -> None:
    """Fails unless all arrays of two trees are the same to the last bit."""
    leaves, others = tf.nest.flatten(one), tf.nest.flatten(other)
    assert len(leaves) == len(others)
    for value, counterpart in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(value, counterpart)


def assert_same_training(plain: Program, other: Program, batches: Sequence[Sequence[Any]], devices: int = 1) -> None:
    """Fails unless two steps give the same on these batches, gradients too, and leave the same variables."""
    # As many devices for both: the number of threads, and with it the order of some sums, depends on it.
    with Steps(plain, devices) as expected, Steps(other, devices) as got:
        expected.load()
        got.load()
        before = expected.values()
        assert_equal(before, got.values())
        for batch in batches:
            assert_equal(expected.run(batch), got.run(batch))
        if expected.step.gradients and got.step.gradients:
            kept = got.values()
            assert_equal(expected.run(batches[0], gradients=True), got.run(batches[0], gradients=True))
            assert_equal(kept, got.values())
        after = expected.values()
        assert_equal(after, got.values())
        if expected.step.train is not None:
            assert any(not np.array_equal(before[name], after[name]) for name in before)


def recurrent_model() -> keras.Model:
    """An embedding whose gradient is rows, a loop, moving averages; loss scaling and global clipping."""
    tokens = keras.Input((3,), dtype="int32")
    x = keras.layers.LSTM(3, return_sequences=True, name="lstm")(keras.layers.Embedding(5, 2, name="embedding")(tokens))
    x = keras.layers.BatchNormalization(name="norm")(x)
    model = keras.Model(tokens, keras.layers.Dense(5, name="logits")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    inner = keras.optimizers.AdamW(1e-2, global_clipnorm=0.5, epsilon=1e-3)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss, metrics=["accuracy"])
    return model
