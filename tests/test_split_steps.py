"""Steps of Keras models whose operators are split and placed train as before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from flat_programs import Steps
from programs import in_float64, step_of
from step_programs import device_names, of_model

import dapple_tf as dapple
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.analysis.split_rules import Split
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.program import Program
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import Shape
from graph_passes.ir.verify import verify
from graph_passes.passes.flatten import Flatten
from graph_passes.passes.fold_shapes import FoldShapes
from graph_passes.passes.place_operators import PlaceOperators
from graph_passes.passes.split_operators import SplitOperators

BATCH = 4
TOPOLOGY = Topology(("/device:CPU:0",), np.full((1, 1), np.inf), np.zeros((1, 1)), np.full(1, np.inf))


def loss() -> keras.losses.Loss:
    """A loss of the float type that is set now: one made with this module would round float64 to float32."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def branches() -> keras.Model:
    """Convolutions of all kinds, normalised, in branches that are added and concatenated."""
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, padding="same", use_bias=False)(image)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    y = layers.SeparableConv2D(6, 3, padding="same", activation="tanh")(x)
    pooled = [layers.MaxPooling2D(3, 1, padding="same")(x), layers.AveragePooling2D(3, 1, padding="same")(x)]
    x = layers.Concatenate()([layers.Add()([y, x]), *pooled])
    x = layers.Cropping2D(1)(layers.Conv2D(8, 3, strides=2)(layers.ZeroPadding2D(1)(x)))
    model = keras.Model(image, layers.Dense(5)(layers.Flatten()(x)))
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2), loss(), metrics=["accuracy"])
    return model


def transformer() -> keras.Model:
    """An embedding, attention and layer normalisation."""
    layers = keras.layers
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(7, 8)(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(layers.LayerNormalization()(x), x, use_causal_mask=True)])
    x = layers.Add()([x, layers.Dense(8)(layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x)))])
    model = keras.Model(tokens, layers.Dense(7)(x))
    model.compile(keras.optimizers.AdamW(1e-2, epsilon=1e-2), loss(), metrics=["accuracy"])
    return model


def flat_step(model: keras.Model) -> tuple[Program, Program, list[np.ndarray], Mapping[Ref, Shape | None]]:
    """The flat training step of a model, the same with folded shapes, a batch, and the shapes of its tensors."""
    plan, cluster = dapple.Plan.manual([], [[0]], 1, BATCH, "gpipe"), dapple.Cluster.local(1, kind="cpu")
    flat = Flatten().run(of_model(model, plan, cluster))
    batch = ExampleBatch.of(model).batch(BATCH)
    step = step_of(flat)
    fed = {ref.node: tuple(array.shape) for ref, array in zip(step.feeds.values(), batch, strict=True)}
    for name, refs in step.metric_feeds.items():
        fed |= {ref.node: flat.variables[name].shape for ref in refs}
    folded = FoldShapes(fed).run(flat)
    verify(folded, complete=True)
    return flat, folded, batch, infer_shapes(folded.graph, fed, {})


def spread(program: Program, seed: int) -> PlaceOperators:
    """Some device for each operator; variables stay together."""
    operators = build_op_graph(program.graph, TOPOLOGY, OperatorCosts.p100(), {}, rules=None)
    chosen = np.random.default_rng(seed).choice(device_names(3), len(operators.pinned))
    return PlaceOperators(dict(zip(operators.names, chosen[operators.groups].tolist(), strict=True)), operators.names)


def assert_close(one: object, other: object) -> None:
    leaves, others = tf.nest.flatten(one), tf.nest.flatten(other)
    for value, counterpart in zip(leaves, others, strict=True):
        if value is not None:
            np.testing.assert_allclose(value, counterpart, rtol=1e-8, atol=1e-10)


def assert_same_operators(operators: OpGraph, program: Program) -> None:
    """The cost graph has the step's nodes but for joins that are only fetched, splits of what is fed, and slices."""
    view = Graph(program.graph)
    there = {node.name for node in view if node.op not in ("Const", "Placeholder")}
    assert set(operators.names) <= there
    fetched = {ref.node for ref in step_of(program).gradients.values()}
    fetched |= {ref.node for refs in step_of(program).outputs for ref in refs}
    for name in there - set(operators.names):
        fed = view.nodes[name].op == "SplitV" and view.nodes[view.inputs(name)[0].node].op == "Placeholder"
        sliced = view.nodes[name].op == "StridedSlice" and name.rpartition("/")[0] in operators.names
        assert fed or sliced or name in fetched, name


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "build, dimensions", [(branches, ["channel", None]), (branches, ["batch"]), (transformer, ["batch", None])]
)
def test_steps_train_alike_whatever_is_split_and_wherever_it_runs(build: Any, dimensions: list[str | None]) -> None:
    with in_float64():
        plain, folded, batch, shapes = flat_step(build())
    assert len(folded.graph.node) < len(plain.graph.node)
    operators = build_op_graph(folded.graph, TOPOLOGY, OperatorCosts.p100(), shapes)
    alone = np.bincount(operators.groups)[operators.groups] == 1
    generator = np.random.default_rng(0)
    with Steps(plain) as steps:
        steps.load()
        expected = [steps.run(batch) for _ in range(2)], steps.values()
    for seed, wanted in enumerate(dimensions):
        splits = {}
        for number, rules in operators.splits.items():
            options = [rule for rule in rules if wanted in (None, rule.dimension)]
            if alone[number] and options:
                rule = options[generator.integers(len(options))]
                parts = 2 if wanted else int(generator.integers(2, min(4, rule.length) + 1))
                splits[operators.names[number]] = Split(rule.dimension, parts)
        assert len(splits) > 100
        split = SplitOperators(splits, shapes).run(folded)
        verify(split, complete=True)
        assert_same_operators(apply_splits(operators, splits), split)
        placed = spread(split, seed).run(split)
        verify(placed, complete=True)
        with Steps(placed, 3) as steps:
            steps.load()
            assert_close(expected, ([steps.run(batch) for _ in range(2)], steps.values()))


@pytest.mark.thorough
@pytest.mark.slow
def test_split_by_batch_only_gradients_and_sums_are_joined() -> None:
    with in_float64():
        plain, folded, _, shapes = flat_step(branches())
    operators = build_op_graph(folded.graph, TOPOLOGY, OperatorCosts.p100(), shapes)
    sizes: dict[str, float] = {}
    splits = {
        operators.names[number]: Split("batch", BATCH)
        for number, rules in operators.splits.items()
        if any(rule.dimension == "batch" and rule.length == BATCH for rule in rules)
    }
    applied = apply_splits(operators, splits)
    for producer, _, tensor, _ in applied.edges.tolist():
        if tensor >= 0 and "/joined_" in applied.names[producer]:
            sizes[applied.names[producer]] = applied.tensor_bytes[tensor]
    largest = max(np.prod(variable.shape) * 8 for variable in plain.variables.values())
    assert sizes and max(sizes.values()) <= largest
