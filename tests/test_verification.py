"""``verify``: a right model differs by rounding, a wrong gradient shows, and nothing changes."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import use_float64
from models_for_tests import classifier, layers, samples, transform, values, variables

import dapple_tf as dapple
from dapple_tf.execution.engine import Engine
from dapple_tf.execution.notes import Note, NoteKind
from dapple_tf.front import compared_steps
from dapple_tf.front.model_copies import copy_of
from dapple_tf.front.verification import TOLERANCES, ComparedSteps, Difference, computed_in

X, Y, W = samples(7)


@pytest.fixture(scope="module")
def pipelined() -> dapple.PipelinedModel:
    return transform(classifier(metrics=["accuracy"]))


def test_a_right_model_differs_by_rounding_which_float64_tells(pipelined: dapple.PipelinedModel) -> None:
    """Every variable and slot is compared."""
    pipelined.train_on_batch(X, Y)  # The devices have newer values.
    result = pipelined.verify(X, Y, W)
    assert result.training
    assert result.loss[0] == pytest.approx(result.loss[1], rel=1e-6)
    assert set(result.differences) == {f"{layer}/{name}" for layer in LAYERS for name in ("kernel", "bias")}
    assert max(result.differences.values()) < 1e-5
    assert min(result.largest.values()) > 1e-3
    assert result.worst[1] == max(result.differences.values())
    steps = result.steps
    assert steps is not None
    assert (steps.count, steps.float64, steps.reasons) == (3, "", ())
    assert len(steps.variables) == len(variables(pipelined.model))  # 6 parameters, a slot each, iterations, rate
    assert {one.layer for one in steps.variables.values()} == {*LAYERS, "optimizer"}
    assert max(one.exact or 0.0 for one in steps.variables.values()) < 1e-10
    assert 1e-9 < max(one.trained for one in steps.variables.values()) < 1e-3
    assert steps.logs.keys() == {"loss", "accuracy"}
    result.assert_equal()


LAYERS = ("first", "second", "logits")


@pytest.mark.parametrize(
    ("wrong", "difference"),
    [
        (lambda gradient: gradient + 1e-3 * np.max(np.abs(gradient)), 1e-3),
        (lambda gradient: gradient * np.nan, math.inf),
        (None, 1.0),
    ],
    ids=["a little off", "not a number", "missing"],
)
def test_a_wrong_gradient_shows(
    pipelined: dapple.PipelinedModel, monkeypatch: pytest.MonkeyPatch, wrong: Any, difference: float
) -> None:
    original = Engine.run

    def run(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        gradients = dict(result.gradients)
        gradient = gradients.pop("second/kernel")
        if wrong is not None:
            gradients["second/kernel"] = wrong(gradient)
        return dataclasses.replace(result, gradients=gradients)

    monkeypatch.setattr(Engine, "run", run)
    result = pipelined.verify(X, Y, steps=0)
    assert "second" in result.unexplained or difference <= result.tolerance
    assert result.worst[0] == "second/kernel"
    assert result.by_layer()["second"] == pytest.approx(difference, rel=0.05)
    assert result.by_layer()["first"] < 1e-5
    assert str(result).splitlines()[2].startswith("second")


def test_layers_that_a_slice_cannot_repeat_are_compared_in_inference() -> None:
    """Verification changes nothing: values, seeds, moving averages, optimizer and metrics."""
    own = layers.Dropout(0.5, seed=3, name="drop"), layers.BatchNormalization(name="norm")
    pipelined = transform(classifier(*own, optimizer=keras.optimizers.Adam(0.1), metrics=["accuracy"]))
    pipelined.train_on_batch(X, Y)
    everything = [*variables(pipelined.sync()), *pipelined.model.metrics_variables]
    before = [variable.numpy() for variable in everything]
    result = pipelined.verify(X, Y, steps=1)
    assert not result.training
    assert result.reason == "layer 'drop' draws other random numbers for each slice"
    assert max(result.differences.values()) < 1e-5
    assert result.steps is not None and result.steps.inference
    assert {note.layer for note in result.steps.reasons} == {"drop", "norm"}
    assert max(one.trained for one in result.steps.variables.values()) > 1e-2
    assert max(one.exact or 0.0 for one in result.steps.variables.values()) < 1e-9
    result.assert_equal()
    for variable, value in zip(everything, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)


# ---- several steps


def test_float64_models_are_compared_closely() -> None:
    """Their mean loss was rounded to float32."""
    use_float64()
    result = transform(classifier()).verify(X.astype("float64"), Y, steps=1)
    assert result.tolerance == 1e-8
    assert result.steps is not None
    assert result.steps.logs["loss"][0] == pytest.approx(result.steps.logs["loss"][1], rel=1e-12)


class SquaresApart(keras.optimizers.Adam):
    """Adam to which a gradient's two halves come apart in pipelines, so that it squares them one by one."""

    apart = True

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        if self.apart:
            square = (1 - self.beta_2) * keras.ops.square(keras.ops.cast(gradient, variable.dtype))
            self.assign_sub(self._velocities[self._get_variable_index(variable)], square / 2)


def test_an_optimizer_that_gets_rows_apart_shows_though_gradients_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of embeddings that belong to no sample were squared one by one, and `verify` said 1e-6: of gradients."""
    original = compared_steps.plain_steps

    def plain_steps(*args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SquaresApart, "apart", False)
            return original(*args, **options)

    monkeypatch.setattr(compared_steps, "plain_steps", plain_steps)
    result = transform(classifier(optimizer=SquaresApart(0.01))).verify(X, Y, steps=1)
    assert result.worst[1] < 1e-5
    assert {"first", "logits"} <= set(result.unexplained)
    with pytest.raises(dapple.VerificationError, match="differs from plain Keras without a known reason: "):
        result.assert_equal()


def wrapped(owner: Any, name: str) -> None:
    """Doubles the result of one object's method, or runs it twice, like a wrapper that was left behind."""
    original = getattr(owner, name)

    def twice(*args: Any, **options: Any) -> Any:
        first, second = (original(*args, **options) for _ in range(2))
        return None if first is None else first + second

    vars(owner)[name] = twice


@pytest.mark.parametrize("layer", [False, True])
def test_what_we_break_in_the_users_model_shows(layer: bool) -> None:
    """Plain steps ran on the model itself, with the loss that was built wrong, and `verify` said "equal"."""
    model = classifier(metrics=["accuracy"])
    if layer:
        wrapped(model.get_layer("logits"), "call")
    else:
        model.train_on_batch(X, Y)  # Keras builds losses and metrics.
        wrapped(model._compile_loss, "call")
        wrapped(model._compile_metrics.metrics[0], "result")
    result = transform(model).verify(X, Y, steps=1, float64=False)
    assert {"loss", "first", "logits", *([] if layer else ["logs['accuracy']"])} <= set(result.unexplained), str(result)
    assert ("its copy by get_config() has" in str(result)) == layer


def test_a_copy_costs_no_random_numbers_and_lambdas_have_none(pipelined: dapple.PipelinedModel) -> None:
    """Layers without a seed drew one in the copy, and a metric's lambda didn't find what it names."""
    random.seed(5)
    pipelined.verify(X, Y, steps=0)
    assert random.random() == random.Random(5).random()
    result = transform(classifier(metrics=[lambda y, p: keras.ops.mean(p)])).verify(X, Y, steps=1, float64=False)
    assert "Plain Keras ran on the model itself, which can't be made again: it is compiled with a lambda" in str(result)
    result.assert_equal()


def test_vocabularies_and_loss_scales_are_copied() -> None:
    """Steps in float64 failed: a line of Python was told for "Table not initialized", "other variables" for a scale."""
    words = layers.TextVectorization(output_sequence_length=3)
    words.adapt(["a b", "b c"])
    inputs = keras.Input((1,), dtype="string")
    outputs = layers.Dense(1)(layers.Flatten()(layers.Embedding(8, 4)(words(inputs))))
    texts = keras.Model(inputs, outputs)
    texts.compile("adam", "mse")
    twin = copy_of(texts, float64=True)
    x = tf.constant([["a c"], ["b"]])
    np.testing.assert_allclose(twin(x), texts(x), atol=1e-6)

    keras.config.set_dtype_policy("mixed_float16")
    half = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    half.compile("adam", "mse")
    half.optimizer.build(half.trainable_variables)
    twin = copy_of(half, float64=True)
    assert isinstance(twin, keras.Model)
    assert len(twin.optimizer.variables) == len(half.optimizer.variables)


def test_without_float64_another_order_of_samples_tells_how_much_is_rounding() -> None:
    class NoConfig(keras.Model):
        def get_config(self) -> Any:
            raise NotImplementedError("no configuration")

    result = transform(classifier(kind=NoConfig)).verify(X, Y, steps=1)
    assert result.steps is not None
    assert result.steps.float64 == "the model can't be made again in float64: no configuration"
    assert "Plain Keras ran on the model itself, which can't be made again: no configuration." in str(result)
    assert all(one.exact is None and one.bound < 1e-2 for one in result.steps.variables.values())
    result.assert_equal()


def test_everything_is_as_it_was_after_a_step_has_failed(
    pipelined: dapple.PipelinedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelined.sync()
    before = values(pipelined.model)
    first = pipelined.test_on_batch(X, Y)
    original, calls = Engine.run, []

    def run(engine: Engine, *args: Any, **options: Any) -> Any:
        calls.append(options.get("want_gradients"))
        if calls.count(None) + calls.count(False) == 2:
            raise RuntimeError("a device has failed")
        return original(engine, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", run)
        with pytest.raises(RuntimeError, match="a device has failed"):
            pipelined.verify(X, Y)
    for own, value in zip(values(pipelined.model), before, strict=True):
        np.testing.assert_array_equal(own, value)
    assert pipelined.test_on_batch(X, Y) == first


def test_steps_as_a_table(golden: Callable[[str, str], None]) -> None:
    """What has no known reason is shown as such: variables, and metrics of single outputs."""
    compared = ComparedSteps(
        count=2,
        dtype="float32",
        variables={
            "a/kernel": Difference("a", 2e-5, 2e-5, 3e-12, 1e-6),
            "a/kernel_velocity": Difference("a", 1e-5, 1e-5, 1e-12, 1e-6),
            "b/kernel": Difference("b", 3e-5, 3e-5, 2e-3, 1e-6),
        },
        logs={"loss": (1.0, 1.0), "d_loss": (0.5, 1.0)},
    )
    gradients: Any = {"a/kernel": 1e-7}, {"a/kernel": 1.0}, {"a/kernel": "a"}
    result = dapple.Verification((1.0, 1.0), *gradients, training=True, steps=compared)
    assert result.unexplained == {"b": 2e-3, "logs['d_loss']": 0.5}
    reasons = (Note(NoteKind.COUPLED, "bn", "normalises each slice", "plan one"),)
    known = dataclasses.replace(result, steps=dataclasses.replace(compared, reasons=reasons, remaining=reasons))
    assert known.equal
    golden("verification.txt", f"{result}\n\n{known}\n\n{result._repr_html_()}\n")


def test_a_reason_explains_what_it_can_reach_and_nothing_else() -> None:
    """One reason excused all differences: a metric's those of weights, a counter's those of other layers."""
    variables = {
        "net/count/seen": Difference("net/count", 1.0, 1.0, 1.0, 1e-6, state=True),
        "net/a/kernel": Difference("net/a", 1.0, 1.0, 1.0, 1e-6),
        "net/other/seen": Difference("net/other", 1.0, 1.0, 1.0, 1e-6, state=True),
    }
    state = Note(NoteKind.STATE, "count", "updates state", "add up", alone=True)
    metric = Note(NoteKind.METRIC, "last", "isn't a sum", "make it one", alone=True)
    logs = {"out_last": (1.0, 2.0), "mae": (1.0, 2.0)}
    steps = ComparedSteps(1, "float64", variables, logs, reasons=(state, metric), remaining=(state, metric))
    result = dapple.Verification((1.0, 1.0), {}, {}, {}, True, steps=steps)
    assert set(result.unexplained) == {"net/a", "net/other", "logs['mae']"}
    everything = dataclasses.replace(state, alone=False)  # The loss is computed from the state.
    assert dataclasses.replace(result, steps=dataclasses.replace(steps, remaining=(everything,))).equal


def test_float32_on_gpus_has_the_tolerance_of_tf32() -> None:
    cpus, gpus = (
        dapple.Cluster([dapple.Device(f"/job:w/replica:0/task:0/device:{kind}:0", 0)]) for kind in ("CPU", "GPU")
    )
    assert computed_in(classifier(), cpus) == "float32" and computed_in(classifier(), gpus) == "tf32"
    assert TOLERANCES["float32"] < TOLERANCES["tf32"] < TOLERANCES["float16"]
    use_float64()
    assert computed_in(classifier(), gpus) == "float64"
