"""Which layers can be cut apart: the most that the passes accept, under names that plans understand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import zoo
from equivalence import assert_same_variables, pair, pipeline, use_float64
from profiled import captured, mlp

from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.layer_cuts import cut_name, innermost_calls, layer_stages, legal_cuts, with_gradients
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from graph_passes.errors import PassError

layers = keras.layers


def names(model: keras.Model) -> tuple[str, ...]:
    spec = BatchSpec(ExampleBatch.of(model).spec.x)
    stages = layer_stages(model, captured(model), capture(model, VariableTable(model), Mode.PREDICT, spec))
    assert len(stages.program.stages) == len(stages.names)
    assert all(stage.graph is not None for stage in stages.program.stages)
    return stages.names


def test_a_chain_is_cut_after_each_layer() -> None:
    assert names(mlp()) == ("first", "second", "logits")


def test_branches_are_laid_out_in_order_and_skips_have_all_their_consumers() -> None:
    model = zoo.branches()
    layer_names = names(model)
    assert sorted(layer_names) == sorted(
        ["stem", "left_0", "right_0", "left_1", "joined", "after", "long_skip", "outputs"]
    )  # each once
    boundaries = with_gradients(captured(model), layer_names[:-1]).boundaries
    stem = next(boundary for boundary in boundaries if boundary.producer == layer_names.index("stem"))
    assert [layer_names[consumer] for consumer in stem.consumers] == ["left_0", "right_0", "long_skip"]


@pytest.mark.slow
def test_calls_of_one_layer_are_told_apart() -> None:
    assert names(zoo.tied()) == ("embedding", "shared#0", "middle", "shared#1", "last", "logits")


def test_a_layer_without_nodes_in_inference_goes_with_the_next() -> None:
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="a"), layers.Dropout(0.5, name="drop"), layers.Dense(1, name="b")]
    )
    model.compile("sgd", "mse")
    assert names(model) == ("a", "b")


def test_a_stage_of_integers_alone_goes_with_the_next() -> None:
    tokens = keras.Input((4,), dtype="int32")
    shifted = layers.Lambda(lambda x: (x + 1) % 5, name="shifted")(tokens)
    x = layers.Embedding(5, 4, name="embedding")(shifted)
    model = keras.Model(tokens, layers.Dense(1, name="out")(x))
    model.compile("sgd", "mse")
    assert names(model) == ("embedding", "out")


def test_layers_that_cannot_be_cut_apart_are_merged() -> None:
    class Couples(layers.Layer):
        """Its result has no batch axis."""

        def call(self, x: Any) -> Any:
            return keras.ops.argmax(keras.ops.sum(x, axis=0))

    features = keras.Input((4,))
    x = layers.Dense(4, name="first")(features)
    number = Couples(name="couples")(x)
    x = layers.Dense(4, name="second")(x) * keras.ops.cast(number, "float32")
    model = keras.Model(features, layers.Dense(1, name="out")(x))
    model.compile("sgd", "mse")
    layer_names = names(model)
    assert "couples" not in layer_names and layer_names[0] == "first" and layer_names[-1] == "out"


def test_nested_models_are_cut_inside_under_their_path() -> None:
    inner = keras.Sequential([layers.Dense(4, name="a"), layers.Dense(4, name="b")], name="inner")
    features = keras.Input((3,))
    model = keras.Model(features, layers.Dense(1, name="a")(inner(features)))
    model.compile("sgd", "mse")
    calls = captured(model).roles.calls
    innermost = innermost_calls(model, calls)
    assert [call.path for call in innermost] == ["inner/a", "inner/b", "a"]
    assert [cut_name(call, calls) for call in innermost] == ["inner/a", "inner/b", None]  # "a" could be either.


def test_legal_cuts() -> None:
    def attempt(cuts: tuple[str, ...]) -> None:
        if "c" in cuts or {"b", "d"} <= set(cuts):
            raise PassError("no")

    assert legal_cuts("abcde", attempt) == ("a", "b", "e")  # b and d exclude each other
    assert legal_cuts("abe", attempt) == ("a", "b", "e")
    assert legal_cuts("c", attempt) == legal_cuts("", attempt) == ()


class OwnCall(keras.Model):
    """A functional model whose call does more than its graph."""

    def __init__(self) -> None:
        features = keras.Input((4,))
        hidden = layers.Dense(5, activation="tanh", name="a")(features)
        super().__init__(features, layers.Dense(3, name="b")(hidden))
        self.own = layers.Dense(2, name="own")
        self.own.build((None, 6))

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.own(keras.ops.concatenate([super().call(x, training=training), x[:, :3]], -1))


def adapted(mode: str) -> keras.Model:
    """A model of few bits, of which low-rank adapters are trained."""
    model = keras.Sequential([keras.Input((4,)), *(layers.Dense(2, name=name) for name in ("a", "b"))])
    for layer in model.layers:
        layer.quantize(mode)
        layer.enable_lora(2)
    for variable in model.trainable_variables:
        variable.assign(np.linspace(-1, 1, np.prod(variable.shape)).reshape(variable.shape))
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "make", [OwnCall, lambda: adapted("int8"), lambda: adapted("int4")], ids=["own call", "int8", "int4"]
)
def test_what_else_than_call_computes_a_layer_is_cut(make: Any) -> None:
    """``quantized_call``; and a functional model's own call, for which losses were built by declared outputs."""
    use_float64()

    def build() -> keras.Model:
        model = make()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    model, plain = pair(build)
    pipelined = pipeline(model, ["a"], (1, 1), 2, 6)
    x, y = np.random.default_rng(0).normal(size=(2, 6, 4))
    for own in (pipelined, plain, pipelined, plain):
        own.train_on_batch(x, y[:, :2])
    pipelined.sync()
    assert_same_variables(model, plain, 1e-6 if make is not OwnCall else 1e-10)  # Scales are float32.
