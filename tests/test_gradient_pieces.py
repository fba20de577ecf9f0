"""Gradients by pieces are those of the whole graph: the same operators, to the last bit the same numbers."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from programs import run

from graph_passes.analysis import gradient_pieces
from graph_passes.analysis.gradient_pieces import gradients_by_pieces
from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.tensorflow_bridge import Gradient, add_gradients, gradients_of_twin

WIDTH = 4
Parameter = Callable[..., tf.Tensor]
Block = Callable[[tf.Tensor, Parameter], tf.Tensor]


class Model:
    """A graph that is being written, and what is to be differentiated there."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        self.sources: list[tf.Tensor] = []
        self.outputs: list[tf.Tensor] = []
        self.fed: dict[str, tf.Tensor] = {}

    def input(self, *shape: int | None, dtype: tf.DType = tf.float32, source: bool = True) -> tf.Tensor:
        tensor = tf.compat.v1.placeholder(dtype, shape)
        self.fed[tensor.op.name] = tensor
        if source:
            self.sources.append(tensor)
        return tensor

    def gradients(self) -> tuple[GraphDef, list[tuple[Ref, Ref]], list[Ref]]:
        """The graph, its outputs with what holds their gradients, and its sources."""
        pairs = [(tensor, self.input(*tensor.shape, source=False)) for tensor in self.outputs]
        refs = [(Ref.parse(output.name), Ref.parse(gradient.name)) for output, gradient in pairs]
        return self.graph.as_graph_def(), refs, [Ref.parse(source.name) for source in self.sources]

    def values(self, seed: int) -> dict[Ref, np.ndarray]:
        generator = np.random.default_rng(seed)
        values = {}
        for name, tensor in self.fed.items():
            shape = [3 if size is None else size for size in tensor.shape]
            drawn = generator.normal(size=shape) if tensor.dtype.is_floating else generator.integers(0, 3, shape)
            values[Ref(name)] = drawn.astype(tensor.dtype.as_numpy_dtype)
        return values


def residual(x: tf.Tensor, parameter: Parameter) -> tf.Tensor:
    return x + tf.tanh(x @ parameter(WIDTH, WIDTH)) * parameter(WIDTH)


def normalized(x: tf.Tensor, parameter: Parameter) -> tf.Tensor:
    mean = tf.reduce_mean(x, -1, keepdims=True)
    spread = tf.reduce_mean(tf.math.squared_difference(x, tf.stop_gradient(mean)), -1, keepdims=True)
    scale = tf.math.rsqrt(spread + 1e-3) * parameter(WIDTH)
    return x * scale - mean * scale


def reshaped(x: tf.Tensor, parameter: Parameter) -> tf.Tensor:
    halves = tf.reshape(x, tf.stack([tf.shape(x)[0], 2, WIDTH // 2]))
    return tf.reshape(tf.nn.softmax(halves), tf.shape(x)) + parameter(1)


def branching(x: tf.Tensor, parameter: Parameter) -> tf.Tensor:
    one, two = tf.split(x @ parameter(WIDTH, WIDTH), 2, axis=1)
    return tf.concat([tf.sin(one), one * two], 1)


BLOCKS: list[Block] = [residual, normalized, reshaped, branching]


def drawn(seed: int) -> Model:
    """Blocks that repeat or don't, between rows of a table and a head; some weights, a mask, outputs within."""
    generator = np.random.default_rng(seed)
    model = Model()
    with model.graph.as_default():
        tied = model.input(WIDTH, WIDTH)
        begins = generator.integers(3)
        x = model.input(None, WIDTH)
        if begins == 1:
            x = tf.gather(model.input(5, WIDTH), model.input(None, dtype=tf.int32, source=False))
        elif begins == 2:
            x = x @ tied
        mask = tf.cast(model.input(None, 1, dtype=tf.int32, source=False), tf.float32)
        period = [BLOCKS[number] for number in generator.integers(len(BLOCKS), size=generator.integers(1, 4))]
        for number in range(int(generator.integers(2, 5))):
            for block in period:
                x = block(x, model.input)
            if generator.random() < 0.3:
                x = x * mask
            if generator.random() < 0.2:
                x = x + BLOCKS[generator.integers(len(BLOCKS))](x, model.input)
            if generator.random() < 0.2:
                model.outputs.append(tf.reduce_sum(x * x, name=f"loss_{number}"))
            if generator.random() < 0.1:
                x = tf.stop_gradient(x) if generator.random() < 0.5 else tf.floor(8 * x)
        model.outputs.append(x @ tied if generator.random() < 0.5 else tf.reduce_mean(x))
    return model


def operators(graph: GraphDef) -> dict[str, int]:
    return dict(collections.Counter(node.op for node in graph.node))


def assert_same(model: Model, seed: int = 0) -> None:
    with model.graph.as_default():
        graph, outputs, sources = model.gradients()
    before = graph.SerializeToString(deterministic=True)
    by_pieces, gradients = add_gradients(graph, outputs, sources, gradients_by_pieces)
    whole, expected = add_gradients(graph, outputs, sources)
    assert graph.SerializeToString(deterministic=True) == before
    assert list(by_pieces.node)[: len(graph.node)] == list(graph.node)
    assert operators(by_pieces) == operators(whole)
    assert len({node.name for node in by_pieces.node}) == len(by_pieces.node)
    known = model.values(seed)
    computed = []
    for extended, of_sources in ((by_pieces, gradients), (whole, expected)):
        refs = [ref for gradient in of_sources for ref in _refs(gradient)]
        computed.append(run(extended, refs, known))
    assert list(map(_kind, gradients)) == list(map(_kind, expected))
    for one, other in zip(*computed, strict=True):
        np.testing.assert_array_equal(one, other)


def _refs(gradient: Gradient | None) -> list[Ref]:
    return [] if gradient is None else [gradient.dense, *(gradient.slices or ())]


def _kind(gradient: Gradient | None) -> str:
    return "none" if gradient is None else "dense" if gradient.slices is None else "rows"


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs(seed: int) -> None:
    assert_same(drawn(seed), seed)


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of nodes of what is differentiated, one after another."""
    sizes: list[int] = []

    def noted(
        graph: GraphDef, outputs: Sequence[tuple[Ref, Ref]], sources: Sequence[Ref]
    ) -> tuple[GraphDef, list[Gradient | None]]:
        sizes.append(len(graph.node))
        return add_gradients(graph, outputs, sources)

    def noted_whole(serialized: bytes, *arguments: Any) -> Any:
        sizes.append(len(GraphDef.FromString(serialized).node))
        return gradients_of_twin(serialized, *arguments)

    monkeypatch.setattr(gradient_pieces, "add_gradients", noted)
    monkeypatch.setattr(gradient_pieces, "gradients_of_twin", noted_whole)
    return sizes


def chain(count: int, *blocks: Block, shared: bool = False) -> Model:
    model = Model()
    with model.graph.as_default():
        x = model.input(None, WIDTH)
        weights = [model.input(*[WIDTH] * rank) for rank in (1, 2)] if shared else []
        for _ in range(count):
            for block in blocks:
                x = block(x, (lambda *shape: weights[len(shape) - 1]) if shared else model.input)
        model.outputs.append(tf.reduce_sum(x))
    return model


def test_equal_blocks_are_pieces(differentiated: list[int]) -> None:
    assert_same(chain(6, residual, branching))
    assert len(differentiated) > 12 and max(differentiated) < 12


def test_a_weight_of_several_blocks_keeps_them_together(differentiated: list[int]) -> None:
    """Its gradients would be added up in another order."""
    model = chain(4, residual, shared=True)
    assert_same(model)
    assert len(differentiated) == 1


def test_an_output_before_what_has_no_gradient() -> None:
    """Its gradients had been missing."""
    model = Model()
    with model.graph.as_default():
        x = model.input(None, WIDTH)
        for _ in range(3):
            x = residual(x, model.input)
        model.outputs.append(tf.reduce_sum(tf.sin(x)))
        for _ in range(2):
            x = residual(x, model.input)
        x = tf.floor(x)
        for _ in range(3):
            x = residual(x, model.input)
        model.outputs.append(x)
        graph, outputs, sources = model.gradients()
    _, gradients = add_gradients(graph, outputs, sources, gradients_by_pieces)
    assert [gradient is None for gradient in gradients] == [False] * 7 + [True] * 4 + [False] * 6
    assert_same(model)


def test_loops_keep_the_graph_together(differentiated: list[int]) -> None:
    """Their gradients change them."""
    model = Model()
    with model.graph.as_default():
        x = model.input(None, WIDTH)
        for _ in range(3):
            x = residual(x, model.input)
            x = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, tf.sin(v) * v), (0, x))[1]
        model.outputs.append(tf.reduce_sum(x))
        graph, outputs, sources = model.gradients()
    _, gradients = add_gradients(graph, outputs, sources, gradients_by_pieces)
    assert len(differentiated) == 1 and None not in gradients
