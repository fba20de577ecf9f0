"""Bad input: one error that names the layer or setting, the numbers and the fix, and nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_variables, largest_difference, pair, pipeline, use_float64
from models_for_tests import ATTACHED, assert_close, classifier, layers, plan, samples, transform, values, with_layer

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.errors import reason
from dapple_tf.frontend.batch_sizes import check_has_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Your input ran out of data:UserWarning"),
    pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning"),
]

X, Y, W = samples(24)


def refused(error: type[Exception] | tuple[type[Exception], ...], text: str) -> Any:
    return pytest.raises(error, match=re.escape(text))


# --- models and plans that transform refuses


def compiled(*stack: Any, name: str = "own") -> keras.Model:
    model = keras.Sequential([*stack], name=name)
    model.compile("sgd", "mse")
    return model


def distributed() -> keras.Model:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        return classifier()


def of_another_model() -> keras.Model:
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(classifier().trainable_variables)
    return classifier(optimizer=optimizer)


class Subclassed(keras.Model):
    def __init__(self, *own: layers.Layer) -> None:
        super().__init__(name="subclassed")
        self.stack = [layers.Dense(4, name="first"), *own, layers.Dense(3, name="last")]

    def call(self, x: Any) -> Any:
        for layer in self.stack:
            x = layer(x)
        return x


def subclassed(*own: layers.Layer, loss: Any = None) -> keras.Model:
    model = Subclassed(*own)
    model(X[:2])
    model.compile("sgd", loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def cluster() -> dapple.Cluster:
    return dapple.Cluster.local(3, kind="cpu")


def placed(own_plan: Any = None, **options: Any) -> Any:
    return dapple.transform(classifier(), cluster(), own_plan, **options)


OTHER = dapple.Profile("other", "cpu", (4,), (LayerProfile("block_7", Cost(), Cost()),), ())
THREE = [[0], [1], [2]]
AT_ONCE: dict[str, Callable[[], Any]] = {
    "expected a keras.Model, got Dense": lambda: transform(layers.Dense(3)),
    "give the Keras model that its sync() returns": lambda: transform(transform(classifier())),
    "model 'own' isn't built: it has no variables yet. Call it": lambda: transform(compiled(layers.Dense(3))),
    "isn't compiled: call compile(optimizer=..., loss=...) first": lambda: transform(
        keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    ),
    "is a stateful RNN, whose state belongs to one fixed batch; use": lambda: transform(
        compiled(keras.Input((5, 2), batch_size=7), layers.LSTM(3, stateful=True))
    ),
    "has the fixed batch size 7, but slices have other sizes; leave batch_size out": lambda: transform(
        compiled(keras.Input((4,), batch_size=7), layers.Dense(3))
    ),
    "was made under the scope of a OneDeviceStrategy; make it outside": lambda: transform(distributed()),
    "the optimizer was built for other variables: it doesn't know": lambda: transform(of_another_model()),
    "cut 'frist' names no layer": lambda: transform(subclassed(), plan(cuts=["frist"])),
    "starts after 'logits' and ends at the model's output": lambda: transform(classifier(), plan(cuts=["logits"])),
    "stage 1 of 3 without a layer: it starts after 'odd' and ends after 'first'": lambda: transform(
        classifier(layers.ReLU(name="odd")), plan(cuts=["odd", "first"], devices=THREE)
    ),
    "stage 1 on device 7, but the cluster has 3 devices": lambda: transform(classifier(), plan(devices=[[0], [1, 7]])),
    "device 2 stands twice, in stage 1": lambda: plan(devices=[[0, 1], [2, 2]]),
    "stage 1 has 2 replicas but the smallest of the 4 micro-batches has 1": lambda: plan(micro_batches=4),
    "unknown placement 'x'; use 'fd_dps', or leave it out": lambda: placed(placement="x"),
    "stage 0 on device 3, but the cluster has 3 devices": lambda: placed(dapple.Plan.by_operators(4, 8)),
    "places operators, for which nothing is searched that schedule would be about; leave": lambda: placed(
        placement="fd_dps", global_batch_size=8, schedule="auto", x=X
    ),
    "got operator_costs, which mean nothing unless operators are placed; add placement='fd_dps'": lambda: placed(
        dapple.Plan.data_parallel(2, 8), operator_costs=dapple.OperatorCosts()
    ),
    "operator_costs is {}; give a dapple_tf.OperatorCosts, by": lambda: placed(
        dapple.Plan.by_operators(2, 8), operator_costs={}
    ),
    "no plan has operator_devices and optimizer_shards: the placement says": lambda: placed(
        dapple.Plan.data_parallel(2, 8, optimizer_shards=True), placement="fd_dps"
    ),
    "cluster is 4; give a dapple_tf.Cluster, by Cluster.local(2), say": lambda: dapple.transform(
        classifier(), 4, plan()
    ),
    "cluster is Plan; give a dapple_tf.Cluster": lambda: dapple.transform(classifier(), plan(), cluster()),
    "plan is {'cuts': []}; give a dapple_tf.Plan, by Plan.manual": lambda: placed({"cuts": []}),
    "no argument 'micro_batchs'; did you mean 'micro_batches'": lambda: placed(micro_batchs=2),
    "no argument 'fault'; did you mean 'faults'": lambda: placed(plan(), fault=None),
    "plan is Profile": lambda: dapple.simulate(OTHER, plan(), cluster()),
    "cluster is Plan; give": lambda: dapple.measure_links(plan()),
    "'other' has a layer 'block_7', model 'classifier": lambda: transform(classifier(), profile=OTHER),
}


@pytest.mark.parametrize("text", AT_ONCE)
def test_what_cannot_be_transformed_is_refused_at_once(text: str) -> None:
    with refused((dapple.DappleError, dapple.PassError, dapple.PlanError, dapple.ProfileError, TypeError), text):
        AT_ONCE[text]()


def test_a_message_that_begins_with_a_quoted_word_keeps_its_quotes() -> None:
    assert reason(ValueError("'x' isn't one of 'a', 'b'")) == "'x' isn't one of 'a', 'b'"


def test_example_inputs_build_a_model() -> None:
    class Own(Subclassed):
        def call(self, features: Any) -> Any:
            return super().call(features["a"])

    x, y = {"a": np.zeros((7, 4), "float32")}, np.zeros(7, int)
    model = Own()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with refused(dapple.CaptureError, "can't be built from x: KeyError: 'a'"):
        transform(model, x={"b": x["a"]}, y=y)
    with transform(model, x=x, y=y) as pipelined:
        assert pipelined.train_on_batch(x, y) == pytest.approx(np.log(3))
    transform(model, x=x)  # again, as a notebook's cell does


def test_setting_that_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    transform(classifier(run_eagerly=True))
    assert "is compiled with run_eagerly=True, which pipelined steps ignore" in caplog.text


# --- models that a trace refuses


class Odd(layers.Layer):
    """A layer of a function."""

    def __init__(self, function: Callable[[Any], Any], loss: Callable[[Any], Any] | None = None) -> None:
        super().__init__(name="odd")
        self.function, self.loss = function, loss

    def call(self, x: Any) -> Any:
        if self.loss is not None:
            self.add_loss(self.loss(x))
        return self.function(x)


def eager_only(x: Any) -> Any:
    if not tf.executing_eagerly():
        raise ValueError("what is a graph?")
    return x


@tf.custom_gradient
def ungraded(x: Any) -> Any:
    def gradient(arriving: Any) -> Any:
        raise ValueError("no gradient today")

    return tf.sin(x), gradient


COUNT = keras.Variable(0.0, name="count", trainable=False)


@tf.custom_gradient
def counting(x: Any) -> Any:
    def gradient(arriving: Any) -> Any:
        COUNT.assign_add(1.0)
        return arriving

    return tf.sin(x), gradient


STRAY = keras.Variable(np.ones(4), name="stray")


def coupled() -> keras.Model:
    class Coupled(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            norm = sum(keras.ops.sum(other * other) for other in model.trainable_variables)
            variable.assign_sub(learning_rate * gradient / norm)

    model = classifier(optimizer=Coupled(0.1))
    return model


TRACED: dict[str, Callable[[], keras.Model]] = {
    "layer 'odd' uses the value of a tensor in Python (if, while, for, int(), numpy())": lambda: subclassed(
        Odd(lambda x: x if keras.ops.sum(x) > 0 else -x)
    ),
    "layer 'odd' uses the value of a tensor in Python (if,": lambda: subclassed(Odd(lambda x: x * x.numpy().mean())),
    "layer 'odd' can't be traced: what is a graph?": lambda: subclassed(Odd(eager_only)),
    "layer 'odd' takes the number of samples from a static shape (x.shape[0]), where it isn't known": lambda: (
        subclassed(Odd(lambda x: keras.ops.reshape(x, (x.shape[0], 2, 2, 1))[:, :, 0, 0]))
    ),
    "the loss or a metric of model 'subclassed' takes the number of samples from a static shape": lambda: subclassed(
        loss=lambda y, outputs: keras.ops.sum(outputs) / y.shape[0]
    ),
    "an update that couples variables of several stages isn't supported": coupled,
    "loss 'mean_squared_error' has reduction None, which leaves one value per sample; use": lambda: classifier(
        loss=keras.losses.MeanSquaredError(reduction=None)
    ),
    "No loss to compute. Provide a `loss` argument in `compile()`.": lambda: classifier(loss=None),
    "'dice' is a ratio of sums over the whole batch": lambda: classifier(loss=keras.losses.Dice()),
    "reads the variable 'stray' that the model doesn't track": lambda: subclassed(Odd(lambda x: x * STRAY)),
    "can't be traced: no gradient today": lambda: subclassed(Odd(ungraded)),
    "it assigns variable 'count': assign it in the layer's call": lambda: subclassed(Odd(counting)),
    "divides by the number of entries that a mask leaves": lambda: classifier(
        layers.Reshape((6, 1)), layers.Masking(0.5), loss=lambda y, outputs: keras.ops.mean(outputs, -1)
    ),
    "the loss or a metric of model": lambda: classifier(loss="mse", metrics=[keras.metrics.R2Score()]),
}


@pytest.mark.parametrize("text", TRACED)
def test_what_cannot_be_traced_is_refused_with_the_first_batch(text: str) -> None:
    pipelined = transform(TRACED[text]())
    with refused((dapple.CaptureError, dapple.PassError), text), nothing_lost(pipelined):
        pipelined.fit(X, Y, verbose=0)


def test_losses_that_layers_add_are_scalars() -> None:
    pipelined = transform(classifier(Odd(lambda x: x, lambda x: keras.ops.sum(x * x, axis=-1))))
    with refused(dapple.CaptureError, "layer 'odd' adds a loss of shape (None,), which Keras would sum over the batch"):
        pipelined.train_on_batch(X[:7], Y[:7])


# --- data


@pytest.fixture(scope="module")
def shared() -> dapple.PipelinedModel:
    return transform(classifier(metrics=["accuracy"]))


@pytest.fixture
def pipelined(shared: dapple.PipelinedModel) -> Iterator[dapple.PipelinedModel]:
    """One that loses nothing by what the test does."""
    shared.train_on_batch(X[:7], Y[:7])
    shared.sync()
    with nothing_lost(shared):
        yield shared
    # Both ways of training work afterwards.
    assert np.isfinite(shared.sync().fit(X[:7], Y[:7], verbose=0).history["loss"]).all()
    assert np.isfinite(shared.train_on_batch(X[:7], Y[:7])).all()


class nothing_lost:  # noqa: N801
    """The user's model keeps the values that it has, and has nothing attached to it afterwards."""

    def __init__(self, pipelined: dapple.PipelinedModel) -> None:
        self._model = pipelined.model

    def __enter__(self) -> None:
        self._values, self._attributes = values(self._model), self._attached()

    def __exit__(self, *error: Any) -> None:
        assert self._attached() == self._attributes
        for now, before in zip(values(self._model), self._values, strict=True):
            np.testing.assert_array_equal(now, before)

    def _attached(self) -> dict[str, Any]:
        items = [item for layer in self._model._flatten_layers() for item in (layer, *getattr(layer, "operations", ()))]
        return {f"{item.name}.{name}": vars(item)[name] for item in items for name in ATTACHED if name in vars(item)}


RAGGED = tf.ragged.constant([[1.0, 2.0], [3.0]])
WIDE = np.zeros((7, 5), "float32")
DATA: dict[str, Callable[[dapple.PipelinedModel], Any]] = {
    "batch_size is 2.5; give a whole number of samples of at least 1": lambda it: it.fit(X, Y, batch_size=2.5),
    "the batches have no labels, but model 'classifier' is compiled with a loss": lambda it: it.fit(X, verbose=0),
    "differ in their number of samples: x has 5, y has 4": lambda it: it.train_on_batch(X[:5], Y[:4]),
    "x is a RaggedTensor, which can't be cut into slices": lambda it: it.train_on_batch(RAGGED, Y[:2]),
    "x is a SparseTensor": lambda it: it.train_on_batch(tf.sparse.from_dense(X[:2]), Y[:2]),
    "x is a scalar; each array of a batch needs": lambda it: it.train_on_batch(np.float32(1), Y[:2]),
    "x has dtype string, which can't be fed": lambda it: it.predict_on_batch(np.array([["a"] * 4])),
    "x has shape (?, 5), but the model's input has (?, 4)": lambda it: it.fit(WIDE, Y[:7], verbose=0),
}


def test_data_that_do_not_fit_are_refused(pipelined: dapple.PipelinedModel) -> None:
    for text, call in DATA.items():
        with refused(dapple.DataError, text):
            call(pipelined)


def test_batches_change_in_mid_epoch(shared: dapple.PipelinedModel) -> None:
    """A generator's; the batches before have been trained on, and that isn't lost."""
    iterations = int(shared.sync().optimizer.iterations.numpy())
    data = (batch for batch in [(X[:7], Y[:7]), (X[7:14], Y[7:14]), (WIDE, Y[:7])])
    with refused(dapple.DataError, "batch 3 can't be read: TypeError: Generator yielded an element of "):
        shared.fit(data, shuffle=False, verbose=0)
    assert int(shared.sync().optimizer.iterations.numpy()) == iterations + 2


# --- in mid-training


def test_loss_is_not_finite() -> None:
    """The values go back to the last sync, so that a later one doesn't copy what isn't a number."""
    pipelined = transform(classifier(), on_non_finite_loss="stop")
    pipelined.fit(X, Y, verbose=0)
    bad = X.copy()
    bad[10] = np.inf
    text = (
        "the loss of step 6 is nan; the model keeps the values of its last sync(), 2 steps ago. Lower the learning "
        "rate, clip gradients, or go on as Keras does, with transform(..., on_non_finite_loss='continue')"
    )
    with refused(dapple.NonFiniteLossError, text), nothing_lost(pipelined):
        pipelined.fit(bad, Y, shuffle=False, verbose=0)
    assert all(np.isfinite(value).all() for value in values(pipelined.sync()))
    assert np.isfinite(pipelined.fit(X, Y, verbose=0).history["loss"]).all()


def test_a_device_fails() -> None:
    """The cause is told, and the devices go on with the values that all of the model had last."""
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(5, 4, name="table"), layers.Flatten()])
    model.add(layers.Dense(3, name="last"))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pipelined = transform(model, plan(cuts=["table"], devices=[[0, 1], [2]]))
    good = np.random.default_rng(0).integers(0, 5, size=(7, 3))
    bad = good.copy()
    bad[4, 1] = 77
    pipelined.train_on_batch(good, Y[:7])
    before = pipelined.test_on_batch(good, Y[:7])
    for method in (pipelined.train_on_batch, pipelined.test_on_batch):
        with refused(dapple.StepError, "step failed: indices[4,1] = 77 is not in [0, 5)"), nothing_lost(pipelined):
            method(bad, Y[:7])
        with refused(dapple.StepError, "a label value of 9 which is outside the valid range of [0, 3)"):
            method(good, np.full(7, 9))
    assert pipelined.test_on_batch(good, Y[:7]) == pytest.approx(before)


# ---- Data without any batch: one error, as early as their length is known, in place of what Keras makes of them


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[:12], Y[:12])).batch(6)


def none() -> tf.data.Dataset:
    return data().take(0)


def filtered() -> tf.data.Dataset:
    """A dataset of which only reading tells that it is empty."""
    return data().filter(lambda x, y: tf.reduce_sum(x) > 1e9)


class Files(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


EMPTY: dict[str, Callable[[], Any]] = {
    "filtered": filtered,
    "on workers": lambda: dapple.on_workers(none),
    "files": Files,
}


@pytest.mark.parametrize("data_of", EMPTY)
def test_no_batch_at_all_is_told_before_training_where_the_length_is_known(
    shared: dapple.PipelinedModel, data_of: str
) -> None:
    """Keras: "Cannot get result() since the metric has not yet been built", or an UnboundLocalError."""
    before = values(shared.model)
    for method in ("fit", "evaluate", "predict"):
        with pytest.raises(dapple.DataError, match=f"^{method}: x has no batch at all; give at least one"):
            getattr(shared, method)(EMPTY[data_of](), verbose=0)
    assert_close(values(shared.model), before, 0)
    steps: list[int] = []
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    with pytest.raises(dapple.DataError, match=r"^fit: validation_data has no batch at all; give at least one"):
        shared.fit(data(), validation_data=EMPTY[data_of](), callbacks=[seen], verbose=0)
    assert steps == ([0, 1] if "filtered" in data_of else [])
    assert shared.fit(data(), verbose=0).history["accuracy"]


def test_an_epoch_after_the_end_of_the_data_is_as_in_keras(shared: dapple.PipelinedModel) -> None:
    batches = iter([(X[:6], Y[:6]), (X[6:12], Y[6:12])])
    history = shared.fit((batch for batch in batches), steps_per_epoch=2, epochs=2, shuffle=False, verbose=0)
    assert len(history.history["loss"]) == 2


def test_a_resumed_training_of_nothing(shared: dapple.PipelinedModel, tmp_path: Any) -> None:
    checkpoint = dapple.Checkpointing(tmp_path)
    with pytest.raises(dapple.DataError, match=r"^fit: x has no batch at all"):
        shared.fit(dapple.on_workers(none), checkpoint=checkpoint, resume=True, verbose=0)


def test_other_data_are_left_to_whoever_reads_them() -> None:
    for x in (None, X, (X, Y), {"a": X, "b": np.float32(1)}, tf.data.Dataset.range(3).repeat(), iter(())):
        check_has_batches("fit", {"x": x, "validation_data": None})


def test_a_batch_without_samples_among_others_is_that_of_keras() -> None:
    """It moves Adam and counts as a step, whatever the plan, and leaves later batches alone."""

    use_float64()
    model, plain = pair(lambda: with_layer(lambda: keras.layers.Dense(4, name="own")))
    shared = pipeline(model, ["first"], (2, 1), 2, 6)
    x, y = np.ones((6, 4)), np.ones((6, 2))
    batches = [(x, y), (x[:0], y[:0]), (x[:5], y[:5])]
    for x, y in batches:
        assert largest_difference(shared.train_on_batch(x, y), plain.train_on_batch(x, y)) < 1e-10
    shared.sync()
    assert_same_variables(model, plain, 1e-10)
    assert shared.predict_on_batch(x[:0]).shape == plain.predict_on_batch(x[:0]).shape == (0, 2)
