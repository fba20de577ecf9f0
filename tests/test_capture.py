"""What a model may contain: each feature trains as plain Keras does, cut through its middle, with replicas."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    assert_trains_as_keras,
    largest_difference,
    pair,
    pipeline,
    use_float64,
)
from models_for_tests import with_layer
from step_programs import built_of_model

import dapple_tf as dapple
from dapple_tf.common.keras_private import hardware_questions
from dapple_tf.execution.notes import notes_of
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend import patching
from dapple_tf.frontend.batch import declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.patching import replaced
from dapple_tf.frontend.variables import VariableTable
from graph_passes.ir.graph import LAYER_ATTR
from graph_passes.ir.outline import is_compiled

layers, ops = keras.layers, keras.ops
rng = np.random.default_rng(0)
X = rng.normal(size=(11, 4))
Y = rng.normal(size=(11, 2))
LABELS = rng.integers(0, 2, size=11)


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
    """Two steps with 3:1 replicas and 3 micro-batches of an odd batch."""
    assert_trains_as_keras(build, cuts, (3, 1), 3, [batch] * 2, **options)


# ---- structure


class Subclassed(keras.Model):
    """A model without declared inputs, that takes a dict and calls a functional model."""

    def __init__(self) -> None:
        super().__init__()
        x = inner_input = keras.Input((4,))
        for name in ("inner_first", "inner_last"):
            x = layers.Dense(4, activation="tanh", name=name)(x)
        self.inner = keras.Model(inner_input, x, name="inner")
        self.head = layers.Dense(2, name="head")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return {"y": self.head(self.inner(inputs["x"]))}


def test_a_subclassed_model_is_cut_at_the_layers_that_it_calls() -> None:
    def build() -> keras.Model:
        model = Subclassed()
        model({"x": np.zeros((1, 4))})
        model.compile(keras.optimizers.SGD(0.1), {"y": "mse"})
        return model

    check(build, ["inner/inner_first"], ({"x": X}, {"y": Y}, None))


class Flattened(layers.Layer):
    """Uses the batch size of one tensor for another."""

    def call(self, inputs: Any) -> Any:
        early, late = inputs
        return ops.reshape(late, (ops.shape(early)[0], 2, -1))


class Penalty(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.3 * ops.mean(ops.square(x)))
        return x


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_losses_of_layers_and_every_reduction_are_those_of_the_whole_batch(reduction: str) -> None:
    """Regularizers and added losses count once; behind the cut, a tensor has the batch size of an early one."""

    def middle(x: Any) -> Any:
        regularized = layers.Dense(6, kernel_regularizer="l1", activity_regularizer=keras.regularizers.L2(0.1))
        late = Penalty(name="penalty")(regularized(x))
        return layers.Reshape((6,))(Flattened()([x, late]))

    weights = rng.uniform(0.1, 3.0, size=11)
    check(lambda: mlp(middle=middle, loss=keras.losses.Huber(reduction=reduction)), ["penalty"], (X, Y, weights))


def test_ignored_classes_divide_by_what_is_left_of_the_whole_batch() -> None:
    loss = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True, ignore_class=1)
    check(lambda: mlp(loss=loss()), ["first"], (X, LABELS, None))


@pytest.mark.parametrize(
    ("steps", "reduction", "weights"),
    [(5, "sum_over_batch_size", None), (1, "mean_with_sample_weight", rng.uniform(0.1, 3.0, size=(11, 1)))],
)
def test_masked_time_steps_divide_by_the_valid_ones_of_the_whole_batch(
    steps: int, reduction: str, weights: np.ndarray | None
) -> None:
    def build() -> keras.Model:
        tokens = keras.Input((steps,), dtype="int32")
        x = layers.Embedding(6, 3, mask_zero=True, name="embedding")(tokens)
        x = layers.Dense(4, activation="tanh", name="hidden")(x)
        model = keras.Model(tokens, layers.Dense(2, name="last")(x))
        model.compile(keras.optimizers.Adam(1e-2), keras.losses.MeanSquaredError(reduction=reduction))
        return model

    tokens = rng.integers(0, 6, size=(11, steps)).astype("int32")
    tokens[np.arange(steps) >= rng.integers(1, 6, size=(11, 1))] = 0
    check(build, ["embedding"], (tokens, rng.normal(size=(11, steps, 2)), weights))


# ---- state and random draws


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


def test_no_gradient_flows_into_state_that_is_read_after_it_was_assigned() -> None:
    """What TensorFlow reads from a variable has no gradient; here it was taken for the tensor that was assigned."""

    class Centred(layers.Layer):
        def build(self, shape: tuple[int | None, ...]) -> None:
            self.mean = self.add_weight(name="mean", shape=shape[1:], initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
            return x - self.mean

    assert_trains_as_keras(lambda: mlp(middle=Centred(name="centred")), ["centred"], (1, 1), 1, [(X, Y, None)] * 2)


def dropout() -> keras.Model:
    return mlp(middle=lambda x: layers.Dropout(0.5, name="drop", seed=7)(layers.Dense(4, name="between")(x)))


def trained(cuts: list[str], replicas: tuple[int, ...], **options: Any) -> keras.Model:
    model = pair(dropout)[0]
    pipelined = pipeline(model, cuts, replicas, 3, 11, **options)
    for _ in range(2):
        pipelined.train_on_batch(X, Y)
    return pipelined.sync()


def test_draws_depend_neither_on_cuts_nor_schedule_nor_recomputation() -> None:
    use_float64()
    expected = trained(["first"], (2, 2))
    other = trained(["between"], (2, 2), schedule="gpipe", recompute="min_cut")
    assert_same_variables(other, expected, TOLERANCE["float64"])


def test_slices_draw_different_numbers() -> None:
    use_float64()
    model = pair(lambda: mlp(middle=layers.Dropout(0.5, name="drop", seed=7)))[0]
    pipelined = pipeline(model, ["drop"], (1, 1), 12, 12)
    pipelined.train_on_batch(np.repeat(X[:1], 12, axis=0), np.repeat(Y[:1], 12, axis=0))
    pipelined.sync()
    # With one draw for all slices some units would have had no gradient at all, those that were dropped.
    assert np.all(np.asarray(model.optimizer.variables[4]) != 0)


# ---- types


def test_mixed_precision_trains_as_plain_keras() -> None:
    def build() -> keras.Model:
        keras.config.set_dtype_policy("mixed_bfloat16")
        return mlp(middle=layers.Dense(8, activation="relu"))

    model, plain = pair(build)
    pipelined = pipeline(model, ["first"], (3, 1), 2, 11)
    assert_same_training(pipelined, plain, [(X, Y, None)] * 2, tolerance=TOLERANCE["bfloat16"])


def test_gradients_that_overflow_in_one_stage_skip_the_step_in_all() -> None:
    def build() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        return mlp(optimizer=keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**40))

    model, plain = pair(build)
    pipelined = pipeline(model, ["first"], (2, 1), 2, 11)
    for _ in range(3):
        pipelined.train_on_batch(X, Y)
        plain.train_on_batch(X, Y)
    pipelined.sync()
    assert float(model.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale) == 2.0**37
    assert_same_variables(model, plain, 0.0)


# ---- attribution


def test_nodes_know_their_layer_whatever_they_are_called() -> None:
    """Layers with the names of others' ops: the attribution comes from calls, not from names."""
    features = keras.Input((4,))
    x = layers.Dense(4, name="MatMul")(features)
    model = keras.Model(features, layers.Dense(2, name="Add")(x))
    model(np.zeros((1, 4)))
    program = capture(model, VariableTable(model), Mode.PREDICT, declared_spec(model))
    products = [node.attr[LAYER_ATTR].s.decode() for node in program.graph.node if node.op == "MatMul"]
    assert products == ["MatMul", "Add"]
    assert [call.path for call in program.roles.calls] == ["MatMul", "Add"]


@pytest.mark.parametrize(("kind", "gpus", "cudnn"), [(layers.LSTM, "11", True), (layers.GRU, "10", False)])
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


# ---- Methods that are other ones for a while, in one thread


class Owner:
    def name(self) -> str:
        """Says who it is."""
        return "original"


def called(text: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    return lambda original: lambda self: f"{text}({original(self)})"


def test_a_thread_that_waits_for_its_turn_finds_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models were traced at once: one's losses were weighted with the other's tensors, out of their scope."""
    within, waiting = threading.Event(), threading.Event()
    lock = threading.RLock()

    class Told:
        def __enter__(self) -> None:
            if within.is_set():
                waiting.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(patching, "_lock", Told())

    def first() -> None:
        with replaced(Owner, "name", called("first")):
            within.set()
            assert waiting.wait(10)

    def second() -> str:
        assert within.wait(10)
        with replaced(Owner, "name", called("second")):
            return Owner().name()

    with ThreadPoolExecutor(2) as threads:
        threads.submit(first)
        assert threads.submit(second).result() == "second(original)"


# ---- State that layers assign in branches and loops: seeds, counters and moving means, as in plain Keras


class Own(layers.Layer):
    """Calls a function with itself, a tensor and ``training``."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function
        self.drop, self.norm = layers.Dropout(0.3, seed=5), layers.BatchNormalization(center=False, scale=False)

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")
        self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False, name="mean")
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")
        self.norm.build((None, 4))

    def compute_output_spec(self, x: Any, training: bool | None = None) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.function(self, x, training)

    def counted(self, x: Any, training: bool | None) -> Any:
        """Passes it through layers with state, and counts."""
        self.count.assign_add(1)
        return self.drop(ops.tanh(self.norm(x, training=training) @ self.kernel), training=training)

    def averaged(self, x: Any) -> Any:
        """Moves the mean; returns the samples."""
        self.mean.assign(self.mean * 0.9 + ops.mean(x, 0) * 0.1)
        return x * 1.1


def branches(own: Own, x: Any, training: bool | None) -> Any:
    """Different variables in each branch, which others read afterwards."""
    own.count.assign_add(1)
    x = ops.cond(own.count % 2 == 0, lambda: own.drop(x, training=training), lambda: own.norm(x, training=training))
    x = ops.switch(own.count % 3, [lambda x: own.averaged(x), lambda x: own.counted(x, training), lambda x: x], x)
    return own.drop(x, training=training) + own.mean


def loops(own: Own, x: Any, training: bool | None) -> Any:
    """Loops, one behind a branch; the condition of another reads what its body assigns."""
    own.count.assign(own.count * 0)
    x = ops.while_loop(lambda x: ops.less(own.count, 3), lambda x: (own.counted(x, training),), (x,))[0]
    x = ops.cond(own.count < 4, lambda: own.counted(x, training), lambda: own.drop(x, training=training))
    return ops.fori_loop(0, 2, lambda _, x: own.averaged(x), x)


@pytest.mark.parametrize("function", [branches, loops])
def test_one_slice_is_plain_keras(function: Callable[..., Any]) -> None:
    """They were "out of scope", in training, evaluation and prediction."""
    use_float64()
    model, plain = pair(lambda: with_layer(lambda: Own(function, name="own")))
    plain.run_eagerly = False  # Gradients of branches that aren't taken are zero, as here.
    pipelined = pipeline(model, ["own"], (1, 1), 1, 11)
    if function is branches:
        plain.test_on_batch(X, Y)
        pipelined.test_on_batch(X, Y)
        assert largest_difference(pipelined.predict(X, verbose=0), plain.predict(X, verbose=0)) < 1e-10
    assert_same_variables_after(2, pipelined, plain, X, Y)


def test_means_over_samples_are_those_of_the_whole_batch() -> None:
    def branching(own: Own, x: Any, training: bool | None) -> Any:
        return ops.cond(own.count < 5, lambda: own.averaged(x), lambda: x) @ own.kernel

    def looping(own: Own, x: Any, training: bool | None) -> Any:
        return ops.fori_loop(0, 2, lambda _, x: own.averaged(x), x) @ own.kernel

    use_float64()
    model, plain = pair(lambda: with_layer(lambda: Own(branching, name="own"), lambda: Own(looping, name="other")))
    pipelined = pipeline(model, ["own"], (2, 1), 3, 11)
    assert_same_variables_after(2, pipelined, plain, X, Y)
    assert not pipelined.notes


def test_a_count_of_samples_by_a_loop_is_noted() -> None:
    def counting(own: Own, x: Any, training: bool | None) -> Any:
        return ops.map(lambda row: (own.count.assign_add(1), row * 2)[1], x)

    pipelined = pipeline(with_layer(lambda: Own(counting, name="own")), ["own"], (1, 1), 3, 11)
    pipelined.train_on_batch(X, Y)
    assert ["state" in str(note) for note in pipelined.notes] == [True]


def test_what_the_condition_of_a_loop_assigns_is_refused() -> None:
    def asking(own: Own, x: Any, training: bool | None) -> Any:
        return ops.while_loop(lambda x: own.count.assign_add(1) < 3, lambda x: (x * 2,), (x,))[0]

    pipelined = pipeline(with_layer(lambda: Own(asking, name="own")), ["own"], (1, 1), 1, 11)
    with pytest.raises(dapple.CaptureError, match=r"layer 'own' .* condition of a loop assigns variable 'own/count'"):
        pipelined.train_on_batch(X, Y)


# ---- Gradients that a model defines itself are those that it is trained with, in whichever stage or loop they are

SEQUENCES = rng.normal(size=(11, 3, 4))
SCALES = np.linspace(0.5, 1.5, 4)


@tf.custom_gradient
def bent(x: Any, scale: Any) -> tuple[Any, Callable[..., Any]]:
    """Its gradients are not those of what it computes, and need what it has computed on the way."""
    root = tf.sqrt(tf.abs(x) + 1)
    return root * scale, lambda gradient: (gradient * tf.sin(root) * SCALES, tf.reduce_sum(gradient))


class Bent(keras.Layer):
    """Uses it, in a loop if told so."""

    def __init__(self, times: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.times = times

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        if not self.times:
            return bent(x, tf.convert_to_tensor(self.scale))
        scale = tf.convert_to_tensor(self.scale)
        return tf.while_loop(lambda i, _: i < self.times, lambda i, x: (i + 1, bent(x, scale) * 0.7), (0, x))[1]


LIMITS = tf.constant([0.01, 0.02, 0.01, 0.005], "float64")


def clipped(x: Any) -> Any:
    """A gradient that is clipped on its way back, by Keras' operations, to what a tensor outside says."""

    @keras.ops.custom_gradient
    def same(x: Any) -> Any:
        return x + 0.0, lambda gradient: keras.ops.clip(gradient, -LIMITS, LIMITS)

    return same(x)


def test_models_train_with_the_gradients_that_they_define() -> None:
    def build() -> keras.Model:
        features = keras.Input((3, 4))
        x = Bent()(layers.Dense(4, activation="swish", name="first")(features))
        x = layers.Lambda(clipped, output_shape=(3, 4))(layers.Dense(4, name="second")(Bent(2)(x)))
        model = keras.Model(features, layers.Dense(2, name="last")(layers.Flatten()(Bent()(x))))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    assert_trains_as_keras(build, ["second"], (2, 1), 2, [(SEQUENCES, Y, None)] * 2)


class Recomputed(layers.Layer):
    """A part of it is computed again for its gradient."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = [layers.Dense(4, activation="tanh"), layers.Dense(4)]

    def build(self, shape: Any) -> None:
        for layer in self.inner:
            layer.build(shape)

    def call(self, x: Any) -> Any:
        return tf.recompute_grad(lambda x: self.inner[1](self.inner[0](x)))(x)


class Doubled(Recomputed):
    """A gradient of its own, that of its weights included."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def doubled(x: Any) -> Any:
            def gradient(arriving: Any, variables: Any = None) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = self.inner[0](x)
                of_x, *of_variables = tape.gradient(y, [x, *variables], output_gradients=2 * arriving)
                return of_x, of_variables

            return self.inner[0](x), gradient

        return doubled(self.inner[1](x))


def test_gradients_of_the_weights_that_such_a_function_reads_are_its_own_too() -> None:
    """They ended in "Cannot convert a Tensor of dtype resource to a NumPy array", or would have been 0."""
    assert_trains_as_keras(lambda: with_layer(Recomputed, Doubled), ["second"], (2, 1), 2, [(X, Y, None)] * 2)


def test_layers_of_placed_operators_see_the_whole_batch_as_in_plain_keras() -> None:
    """Random numbers, the batch's moments and custom gradients included."""

    def between(x: Any) -> Any:
        x = layers.Add()([Bent()(x), layers.Dense(4, activation="swish")(x)])
        return layers.Dropout(0.3)(layers.BatchNormalization()(x))

    use_float64()
    model, plain = pair(lambda: mlp(middle=between))
    plan = dapple.Plan.by_operators(2, 11)
    cluster = dapple.Cluster.local(2, kind="cpu")
    pipelined = dapple.transform(model, cluster, plan, operator_costs=dapple.OperatorCosts())
    assert_same_training(pipelined, plain, [(X, Y, None), (X[:5], Y[:5], None)])
