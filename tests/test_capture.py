"""What a model may contain: each feature trains as plain Keras does, cut through its middle, with replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    TOLERANCE,
    assert_same_training,
    assert_same_variables,
    assert_same_variables_after,
    largest_difference,
    pair,
    pipeline,
    use_float64,
)
from step_programs import built_of_model

import dapple_tf as dapple
from dapple_tf.execution.notes import notes_of
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.keras_private import hardware_questions
from graph_passes.ir.outline import is_compiled

layers = keras.layers
rng = np.random.default_rng(0)
X = rng.normal(size=(11, 4))
Y = rng.normal(size=(11, 2))
LABELS = rng.integers(0, 3, size=11)


def mlp(*, middle: Callable[[Any], Any] = lambda x: x, **compile_options: Any) -> keras.Model:
    """Two hidden layers, ``first`` and ``second``, with something between them."""
    features = keras.Input((4,))
    x = layers.Dense(4, activation="tanh", name="first")(features)
    x = middle(x)
    x = layers.Dense(4, activation="gelu", name="second")(x)
    model = keras.Model(features, layers.Dense(2, name="last")(x))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse", **compile_options})
    return model


def check(build: Callable[[], keras.Model], cuts: list[str], batch: tuple[Any, Any, Any], **options: Any) -> None:
    """Three steps with 3:1 replicas and 3 micro-batches of an odd batch, in float64."""
    use_float64()
    model, plain = pair(build)
    pipelined = pipeline(model, cuts, (3, 1), 3, len(keras.tree.flatten(batch[0])[0]), **options)
    assert_same_training(pipelined, plain, [batch] * 3)


# ---- structure


class Encoder(layers.Layer):
    """A layer of layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = [layers.Dense(4, activation="tanh", name=f"block_{index}") for index in range(3)]

    def build(self, shape: Any) -> None:
        for block in self.blocks:
            block.build(shape)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


class Subclassed(keras.Model):
    """A model without declared inputs, that takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(name="encoder")
        self.head = layers.Dense(2, name="head")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return {"y": self.head(self.encoder(inputs["x"]))}


def subclassed() -> keras.Model:
    model = Subclassed()
    model({"x": np.zeros((1, 4))})
    model.compile(keras.optimizers.SGD(0.1), {"y": "mse"})
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "cut", ["encoder/block_0", *(pytest.param(cut, marks=pytest.mark.slow) for cut in ("block_1", "encoder"))]
)
def test_a_subclassed_model_is_cut_at_the_layers_that_it_calls(cut: str) -> None:
    check(subclassed, [cut], ({"x": X}, {"y": Y}, None))


@pytest.mark.slow
def test_a_sequential_model_is_cut() -> None:
    def build() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(3, name="a"), layers.ReLU(), layers.Dense(2, name="b")]
        )
        model.compile("sgd", "mse")
        return model

    check(build, ["a"], (X, Y, None))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_nested_model_is_cut_inside() -> None:
    def build() -> keras.Model:
        inner_input = keras.Input((4,))
        inner = keras.Model(inner_input, layers.Dense(4, name="deep_1")(layers.Dense(5, name="deep_0")(inner_input)))
        return mlp(middle=inner)

    check(build, ["deep_0"], (X, Y, None))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_skip_connection_jumps_over_two_stages() -> None:
    def build() -> keras.Model:
        features = keras.Input((4,))
        first = layers.Dense(4, name="first")(features)
        x = layers.Dense(4, activation="tanh", name="second")(first)
        x = layers.Dense(4, activation="tanh", name="third")(x)
        model = keras.Model(features, layers.Dense(2, name="last")(layers.Add(name="skip")([first, x])))
        model.compile("sgd", "mse")
        return model

    use_float64()
    model, plain = pair(build)
    pipelined = pipeline(model, ["first", "second", "third"], (2, 1, 3, 1), 2, 11)
    assert_same_training(pipelined, plain, [(X, Y, None)] * 3)


@pytest.mark.slow
def test_the_batch_size_of_an_early_tensor_is_used_behind_the_cut() -> None:
    class Flattened(layers.Layer):
        def call(self, inputs: Any) -> Any:
            early, late = inputs
            return keras.ops.reshape(late, (keras.ops.shape(early)[0], 2, -1))

    def build() -> keras.Model:
        features = keras.Input((4,))
        first = layers.Dense(4, name="first")(features)
        second = layers.Dense(6, activation="tanh", name="second")(first)
        x = layers.Reshape((6,))(Flattened(name="flattened")([first, second]))
        model = keras.Model(features, layers.Dense(2, name="last")(x))
        model.compile("sgd", "mse")
        return model

    check(build, ["second"], (X, Y, None))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("cut", ["embedding", "merged", "split"])
def test_sequences_of_any_length_are_cut_also_where_batch_and_time_are_one_axis(cut: str) -> None:
    class Merge(layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.ops.reshape(x, (-1, 3))

    class Split(layers.Layer):
        def call(self, inputs: Any) -> Any:
            x, like = inputs
            return keras.ops.reshape(x, (-1, keras.ops.shape(like)[1], 3))

    def build() -> keras.Model:
        tokens = keras.Input((None,), dtype="int32")
        x = layers.Embedding(5, 3, name="embedding")(tokens)
        merged = layers.Dense(3, activation="tanh", name="mixed")(Merge(name="merged")(x))
        x = Split(name="split")([merged, x])
        model = keras.Model(tokens, layers.Dense(2, name="last")(x))
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model

    use_float64()
    model, plain = pair(build)
    pipelined = pipeline(model, [cut], (3, 2), 2, 11)
    batches = [(rng.integers(0, 5, size=(11, length)), rng.normal(size=(11, length, 2)), None) for length in (4, 7, 4)]
    assert_same_training(pipelined, plain, batches)


@pytest.mark.slow
def test_a_cut_where_the_data_decide_the_number_of_rows_is_refused_between_unlike_slices() -> None:
    class Positive(layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.boolean_mask(x, x[:, 0] > 0)

    features = keras.Input((4,))
    x = Positive(name="positive")(layers.Dense(3, name="first")(features))
    model = keras.Model(features, layers.Dense(1, name="last")(x))
    model.compile("sgd", "mse")
    pipeline(model, ["positive"], (2, 2), 2, 4)
    with pytest.raises(dapple.PassError, match="has lengths, or a value, that samples of a slice decide together"):
        pipeline(model, ["positive"], (2, 1), 2, 4)


# ---- losses


@pytest.mark.thorough
@pytest.mark.slow
def test_regularizers_and_added_losses_count_once() -> None:
    class Penalty(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
            return x

    def build() -> keras.Model:
        features = keras.Input((4,))
        x = layers.Dense(4, name="first", kernel_regularizer="l1", activity_regularizer=keras.regularizers.L2(0.1))(
            features
        )
        x = Penalty(name="penalty")(x)
        model = keras.Model(features, layers.Dense(2, name="last", bias_regularizer="l2")(x))
        model.compile("sgd", "mse")
        return model

    check(build, ["penalty"], (X, Y, None))


@pytest.mark.few(2)
@pytest.mark.parametrize("reduction", ["sum", "mean", "mean_with_sample_weight", "sum_over_batch_size"])
@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_reduction_is_that_of_the_whole_batch(reduction: str, weighted: bool) -> None:
    weights = rng.uniform(0.1, 3.0, size=11) if weighted else None
    check(lambda: mlp(loss=keras.losses.Huber(reduction=reduction)), ["first"], (X, Y, weights))


@pytest.mark.slow
def test_ignored_classes_divide_by_what_is_left_of_the_whole_batch() -> None:
    def build() -> keras.Model:
        features = keras.Input((4,))
        x = layers.Dense(4, name="first")(features)
        model = keras.Model(features, layers.Dense(3, name="last")(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
        model.compile("sgd", loss)
        return model

    check(build, ["first"], (X, LABELS, None))


@pytest.mark.slow
def test_masked_time_steps_divide_by_the_valid_ones_of_the_whole_batch() -> None:
    def build() -> keras.Model:
        tokens = keras.Input((5,), dtype="int32")
        x = layers.Embedding(6, 3, mask_zero=True, name="embedding")(tokens)
        x = layers.Dense(4, activation="tanh", name="hidden")(x)
        model = keras.Model(tokens, layers.Dense(2, name="last")(x))
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model

    tokens = rng.integers(0, 6, size=(11, 5)).astype("int32")
    tokens[np.arange(5) >= rng.integers(1, 6, size=(11, 1))] = 0
    check(build, ["embedding"], (tokens, rng.normal(size=(11, 5, 2)), None))


def test_a_mask_that_depends_on_trained_values_is_refused() -> None:
    features = keras.Input((4, 2))
    x = layers.Dense(2, name="first")(features)
    x = layers.Masking(0.5, name="masking")(x)
    model = keras.Model(features, layers.Dense(1, name="last")(x))
    model.compile("sgd", "mse")
    pipelined = pipeline(model, ["first"], (1, 1), 1, 4)
    with pytest.raises(dapple.PassError, match=r"divides by the number of entries that a mask leaves.*variable/first"):
        pipelined.train_on_batch(np.zeros((4, 4, 2)), np.zeros((4, 4, 1)))


@pytest.mark.slow
def test_compute_loss_may_be_overridden() -> None:
    class Custom(keras.Model):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
            return keras.ops.mean(keras.ops.abs(y - y_pred)) + 0.1 * keras.ops.mean(keras.ops.square(x))

    def build() -> keras.Model:
        features = keras.Input((4,))
        model = Custom(features, layers.Dense(2, name="last")(layers.Dense(3, name="first")(features)))
        model.compile("sgd")
        return model

    check(build, ["first"], (X, Y, None))


# ---- state and random draws


@pytest.mark.slow
def test_batch_norm_moves_to_the_mean_of_its_slices() -> None:
    """The honest non-equivalence: each slice normalises by itself; moving averages take the weighted mean of all
    slices.
    """
    use_float64()
    model = pair(lambda: mlp(middle=layers.BatchNormalization(name="norm", momentum=0.5)))[0]
    pipelined = pipeline(model, ["norm"], (2, 1), 2, 11)
    hidden = np.tanh(X @ np.asarray(model.get_layer("first").kernel) + np.asarray(model.get_layer("first").bias))
    pipelined.train_on_batch(X, Y)
    pipelined.sync()
    slices = np.split(hidden, [3, 6, 9])  # 11 samples are micro-batches of 6 and 5, slices of 3, 3, 3 and 2
    mean = sum(len(part) * part.mean(0) for part in slices) / 11
    variance = sum(len(part) * part.var(0) for part in slices) / 11
    norm = model.get_layer("norm")
    assert largest_difference(norm.moving_mean, 0.5 * mean) < TOLERANCE["float64"]
    assert largest_difference(norm.moving_variance, 0.5 + 0.5 * variance) < TOLERANCE["float64"]
    assert largest_difference(mean, hidden.mean(0)) < TOLERANCE["float64"]


@pytest.mark.slow
def test_batch_norm_is_plain_keras_when_nothing_is_sliced() -> None:
    use_float64()
    model, plain = pair(lambda: mlp(middle=layers.BatchNormalization(name="norm")))
    pipelined = pipeline(model, ["norm"], (1, 1), 1, 11)
    assert_same_variables_after(3, pipelined, plain, X, Y)


@pytest.mark.slow
def test_no_gradient_flows_into_state_that_is_read_after_it_was_assigned() -> None:
    """What TensorFlow reads from a variable has no gradient; here it was taken for the tensor that was assigned."""
    use_float64()

    class Centred(layers.Layer):
        def build(self, shape: tuple[int | None, ...]) -> None:
            self.mean = self.add_weight(name="mean", shape=shape[1:], initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
            return x - self.mean

    model, plain = pair(lambda: mlp(middle=Centred(name="centred")))
    pipelined = pipeline(model, ["centred"], (1, 1), 1, 11)
    assert_same_variables_after(2, pipelined, plain, X, Y)


def dropout() -> keras.Model:
    model = mlp(middle=lambda x: layers.Dropout(0.5, name="drop", seed=7)(layers.Dense(4, name="between")(x)))
    return model


@pytest.mark.thorough
@pytest.mark.slow
def test_dropout_is_plain_keras_when_nothing_is_sliced() -> None:
    """Seeds, and the state that they are in afterwards, are Keras' own."""
    use_float64()
    model, plain = pair(dropout)
    pipelined = pipeline(model, ["first"], (1, 1), 1, 11)
    assert_same_variables_after(3, pipelined, plain, X, Y)


def trained(cuts: list[str], replicas: tuple[int, ...], **options: Any) -> keras.Model:
    model = pair(dropout)[0]
    pipelined = pipeline(model, cuts, replicas, 3, 11, **options)
    for _ in range(3):
        pipelined.train_on_batch(X, Y)
    return pipelined.sync()


@pytest.mark.slow
def test_draws_depend_neither_on_cuts_nor_schedule_nor_recomputation() -> None:
    use_float64()
    expected = trained(["first"], (2, 2))
    assert_same_variables(trained(["first"], (2, 2)), expected, 0.0)
    for model in (
        trained(["drop"], (2, 2), recompute="boundary"),
        trained(["between"], (2, 2), schedule="gpipe", recompute="min_cut"),
    ):
        assert_same_variables(model, expected, TOLERANCE["float64"])


@pytest.mark.slow
def test_slices_draw_different_numbers() -> None:
    use_float64()
    model = pair(lambda: mlp(middle=layers.Dropout(0.5, name="drop", seed=7)))[0]
    same = np.repeat(X[:1], 12, axis=0)
    pipelined = pipeline(model, ["drop"], (1, 1), 12, 12)
    spread = pipelined.verify(same, np.repeat(Y[:1], 12, axis=0), steps=0)
    assert not spread.training and "drop" in spread.reason
    pipelined.train_on_batch(same, np.repeat(Y[:1], 12, axis=0))
    pipelined.sync()
    # With one draw for all slices some units would have had no gradient at all, those that were dropped.
    assert np.all(np.asarray(model.optimizer.variables[4]) != 0)


# ---- types


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_trains_as_plain_keras(policy: str) -> None:
    def build() -> keras.Model:
        keras.config.set_dtype_policy(policy)
        features = keras.Input((4,))
        x = layers.Dense(8, activation="relu", name="first")(features)
        x = layers.Dense(8, activation="relu", name="second")(x)
        model = keras.Model(features, layers.Dense(2, name="last", dtype="float32")(x))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    model, plain = pair(build)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    pipelined = pipeline(model, ["first"], (3, 1), 2, 11)
    assert_same_training(pipelined, plain, [(X, Y, None)] * 3, tolerance=TOLERANCE[policy.removeprefix("mixed_")])


@pytest.mark.slow
def test_gradients_that_overflow_in_one_stage_skip_the_step_in_all() -> None:
    def build() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        features = keras.Input((4,))
        x = layers.Dense(8, name="first")(features)
        model = keras.Model(features, layers.Dense(2, name="last")(x))
        model.compile(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=2.0**40), "mse"
        )
        return model

    model, plain = pair(build)
    pipelined = pipeline(model, ["first"], (2, 1), 2, 11)
    for _ in range(3):
        pipelined.train_on_batch(X, Y)
        plain.train_on_batch(X, Y)
    pipelined.sync()
    assert float(model.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale) == 2.0**37
    assert_same_variables(model, plain, 0.0)


@pytest.mark.slow
def test_integer_inputs_keep_their_dtype() -> None:
    def build() -> keras.Model:
        tokens = keras.Input((3,), dtype="int64")
        x = layers.Embedding(1000, 4, name="embedding")(tokens)
        model = keras.Model(tokens, layers.Dense(2, name="last")(layers.Flatten(name="flat")(x)))
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model

    check(build, ["flat"], (rng.integers(0, 1000, size=(11, 3)), Y, None))


@pytest.mark.thorough
@pytest.mark.slow
def test_xla_compiles_stage_functions() -> None:
    model, plain = pair(mlp)
    pipelined = pipeline(model, ["first"], (2, 1), 2, 8, jit_compile=True)
    batches = [slice(0, 8), slice(0, 3), slice(3, 4), slice(2, 10)]  # With slices of other sizes, and with none.
    assert_same_training(pipelined, plain, [(X[part], Y[part], None) for part in batches])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_stage_with_a_loop_runs_uncompiled_beside_compiled_ones(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> keras.Model:
        tokens = keras.Input((5,), dtype="int32")
        x = layers.GRU(3, name="gru")(layers.Embedding(7, 3, name="embedding", mask_zero=True)(tokens))
        model = keras.Model(tokens, layers.Dense(2, name="last")(x))
        model.compile("adam", "mse")
        return model

    model, plain = pair(build)
    pipelined = pipeline(model, ["gru"], (1, 1), 2, 11, jit_compile=True)
    assert_same_training(pipelined, plain, [(rng.integers(0, 7, size=(11, 5)), Y, None)] * 2)
    assert "stage 0 isn't compiled with XLA: it has a loop or branch" in caplog.text


def test_a_ratio_over_the_whole_batch_is_refused() -> None:
    model = mlp(loss=keras.losses.Dice())
    with pytest.raises(dapple.CaptureError, match="'dice' is a ratio of sums over the whole batch"):
        pipeline(model, ["first"], (1, 1), 2, 4).train_on_batch(X[:4], Y[:4])


@pytest.mark.slow
def test_results_that_no_metric_keeps_are_warned_of() -> None:
    class Extra(keras.Model):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "extra": 1.0}

    features = keras.Input((4,))
    model = Extra(features, layers.Dense(2, name="last")(layers.Dense(3, name="first")(features)))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"returns extra beside its metrics"):
        pipeline(model, ["first"], (1, 1), 2, 4).train_on_batch(X[:4], Y[:4])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("length", [5, None])
def test_recurrent_outputs_cross_cuts_whatever_their_length(length: int | None) -> None:
    """A loop hides the batch from static shapes: they are measured."""

    def build() -> keras.Model:
        sequence = keras.Input((length, 4))
        x = layers.GRU(3, return_sequences=True, name="first")(sequence)
        x = layers.LSTM(2, name="second")(x)
        model = keras.Model(sequence, layers.Dense(2, name="last")(x))
        model.compile("sgd", "mse")
        return model

    use_float64()
    model, plain = pair(build)
    pipelined = pipeline(model, ["first", "second"], (2, 3, 1), 2, 11)
    assert_same_training(pipelined, plain, [(rng.normal(size=(11, 5, 4)), Y, None)] * 2)


# ---- attribution


def test_nodes_know_their_layer_whatever_they_are_called() -> None:
    """Layers with the names of others' ops: the attribution comes from calls, not from names."""
    from dapple_tf.frontend.batch import declared_spec
    from dapple_tf.frontend.capture import Mode, capture
    from dapple_tf.frontend.variables import VariableTable
    from graph_passes.ir.graph import LAYER_ATTR

    features = keras.Input((4,))
    x = layers.Dense(4, name="MatMul")(features)
    model = keras.Model(features, layers.Dense(2, name="Add")(x))
    model(np.zeros((1, 4)))
    program = capture(model, VariableTable(model), Mode.PREDICT, declared_spec(model))
    products = [node.attr[LAYER_ATTR].s.decode() for node in program.graph.node if node.op == "MatMul"]
    assert products == ["MatMul", "Add"]
    assert [call.path for call in program.roles.calls] == ["MatMul", "Add"]


def test_a_variable_that_no_layer_tracks_is_refused() -> None:
    stray = keras.Variable(np.ones(4), name="stray")

    class Reader(layers.Layer):
        def call(self, x: Any) -> Any:
            return x * stray

    pipelined = pipeline(mlp(middle=Reader(name="reader")), ["first"], (1, 1), 1, 4)
    with pytest.raises(dapple.CaptureError, match="reads the variable 'stray' that the model doesn't track"):
        pipelined.train_on_batch(X[:4], Y[:4])


@pytest.mark.slow
def test_constants_that_layers_hold_are_kept() -> None:
    class Scaled(layers.Layer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.table = tf.constant([1.0, 2.0, 3.0, 4.0])

        def call(self, x: Any) -> Any:
            return x * tf.cast(self.table, x.dtype)

    check(lambda: mlp(middle=Scaled(name="scaled")), ["scaled"], (X, Y, None))


@pytest.mark.parametrize("gpus, cudnn", [("11", True), ("10", False), ("00", False)])
@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
def test_devices_of_the_plan_decide_on_cudnn(
    kind: type[layers.RNN], gpus: str, cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own hardware doesn't: Keras believes in GPUs here where the plan has none, and else sees none."""
    for module, name, answer in hardware_questions(gpus="1" not in gpus):
        monkeypatch.setattr(module, name, lambda answer=answer: answer)
    names = [f"/job:worker/replica:0/task:{task}/device:{'CG'[int(gpu)]}PU:0" for task, gpu in enumerate(gpus)]
    cluster = dapple.Cluster(tuple(dapple.Device(name, task, 2**34) for task, name in enumerate(names)))
    sequence = keras.Input((5, 4))
    model = keras.Model(sequence, layers.Dense(2)(kind(3, name="recurrent")(layers.Dense(4)(sequence))))
    model.compile("sgd", "mse", jit_compile=False)
    passes = StepPasses(dapple.Plan.manual(["recurrent"], [[0], [1]], 2, 8, jit_compile=cudnn), cluster)
    built = built_of_model(model, passes, VariableTable(model))
    stage = built.program.stages[0]
    assert cudnn == any(node.op == "CudnnRNNV3" for node in stage.own_forward.function.node_def)
    assert cudnn == any(node.op == "CudnnRNNBackpropV3" for node in stage.own_backward.function.node_def)
    assert not is_compiled(stage.own_forward.function)  # XLA hasn't cuDNN's.
    assert notes_of(built.program, (2, 2)) == ()  # It draws nothing.


def test_clients_with_gpus_train_on_processors_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, answer in hardware_questions(gpus=True):
        monkeypatch.setattr(module, name, lambda answer=answer: answer)
    sequence = keras.Input((5, 4))
    model = keras.Model(sequence, layers.Dense(2)(layers.LSTM(3, name="recurrent")(sequence)))
    model.compile("sgd", "mse", jit_compile=False)
    pipelined = pipeline(model, ["recurrent"], [1, 1], 2, 8)
    x, y = rng.normal(size=(8, 5, 4)), rng.normal(size=(8, 2))
    assert pipelined.train_on_batch(x, y) > pipelined.train_on_batch(x, y)
