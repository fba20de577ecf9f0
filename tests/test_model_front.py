"""The pipelined model as people know Keras': arguments by position, attributes, batch sizes, and what is refused."""

from __future__ import annotations

import copy
import inspect
import logging
import pathlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import Pair, assert_close, assert_same_values, classifier, plan, samples, transform

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.frontend.batch_sizes import BatchSizes

X, Y, W = samples(21)


@pytest.fixture(scope="module")
def shared() -> Pair:
    return Pair(lambda: classifier(metrics=["accuracy"]))


@pytest.fixture
def pair(shared: Pair) -> Pair:
    shared.reset()
    return shared


# --- arguments


def test_arguments_by_position(pair: Pair) -> None:
    for model in (pair.plain, pair.pipelined):
        model.fit(X, Y, 7, 2, 0, shuffle=False)
    assert_same_values(pair.model, pair.plain)
    ours, theirs = (
        [
            model.train_on_batch(X[:7], Y[:7], W[:7]),
            model.train_on_batch(X[:7], Y[:7], None, {0: 2.0, 1: 1.0, 2: 0.5}, True),
            model.test_on_batch(X[:7], Y[:7], W[:7], True),
            model.evaluate(X, Y, 7, 0, W),
            model.predict(X, 7, 0),
            model.predict_on_batch(X[:7]),
        ]
        for model in (pair.pipelined, pair.plain)
    )
    assert_close(ours, theirs)


def test_wrong_arguments(pair: Pair) -> None:
    pipelined = pair.pipelined
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'epoch'; did you mean 'epochs'\?"):
        pipelined.fit(X, Y, epoch=2)
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'checkpoints'; did you mean 'checkpoint'\?"):
        pipelined.fit(X, Y, checkpoints=None)
    with pytest.raises(TypeError, match=r"evaluate\(\) got 'batch_size' twice"):
        pipelined.evaluate(X, Y, 7, batch_size=7)
    with pytest.raises(TypeError, match=r"predict\(\) takes 5 arguments \(x, batch_size, verbose, steps, callbacks\)"):
        pipelined.predict(X, 7, 0, None, None, 1)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch", "compile", "save"])
def test_signatures_are_those_of_keras_with_ours_behind(pair: Pair, method: str) -> None:
    names, theirs = (
        [each.name for each in inspect.signature(own).parameters.values() if each.kind is not each.VAR_KEYWORD]
        for own in (getattr(pair.pipelined, method), getattr(pair.plain, method))
    )
    assert names == [*theirs, *(("checkpoint", "resume") if method == "fit" else ())]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("model", 4, "plan"), r"^cluster is 4; give a dapple_tf.Cluster, by Cluster.local\(2\), say"),
        (("model", "plan", "cluster"), "cluster is Plan; give a dapple_tf.Cluster"),
        (("model", "cluster", {"cuts": []}), r"plan is {'cuts': \[\]}; give a dapple_tf.Plan, by Plan.manual"),
        (("model", "cluster", "plan.json"), r"plan is 'plan.json'; give a dapple_tf.Plan"),
        (("model", None, "plan"), "cluster is None; give a dapple_tf.Cluster"),
    ],
)
def test_wrong_types(arguments: tuple[Any, ...], text: str) -> None:
    named = {"model": classifier(), "cluster": dapple.Cluster.local(3, kind="cpu"), "plan": plan()}
    given = [named.get(own, own) if isinstance(own, str) else own for own in arguments]
    with pytest.raises(TypeError, match=text):
        dapple.transform(*given)


def test_wrong_names_and_profiles() -> None:
    cluster = dapple.Cluster.local(3, kind="cpu")
    with pytest.raises(TypeError, match="no argument 'micro_batchs'; did you mean 'micro_batches'"):
        dapple.transform(classifier(), cluster, global_batch_size=7, micro_batchs=2)
    with pytest.raises(TypeError, match="no argument 'fault'; did you mean 'faults'"):
        dapple.transform(classifier(), cluster, plan(), fault=None)
    other = dapple.Profile("other", "cpu", (4,), (LayerProfile("block_7", Cost(), Cost()),), ())
    with pytest.raises(dapple.ProfileError, match="'other' has a layer 'block_7', model 'classifier' hasn't"):
        dapple.transform(classifier(), cluster, plan(), profile=other)
    for function in (dapple.simulate, dapple.emulate, dapple.reduced_early):
        with pytest.raises(TypeError, match="plan is Profile"):
            function(other, plan(), cluster)
    for measure in (dapple.measure_links, dapple.measure_speeds):
        with pytest.raises(TypeError, match="cluster is Plan"):
            measure(plan())


class Own(keras.Model):
    """Has methods with arguments of their own."""

    def fit(self, pairs: Any, *, rounds: int = 1) -> Any:
        return [super(Own, self).fit(*pairs, epochs=2, verbose=0, shuffle=False).history for _ in range(rounds)]

    def evaluate(self, pairs: Any = None, **arguments: Any) -> Any:
        return super().evaluate(**arguments) if pairs is None else super().evaluate(*pairs, verbose=0)

    def predict(self, x: Any, scale: float) -> Any:
        return scale * super().predict(x, verbose=0)

    def train_on_batch(self, pairs: Any) -> Any:
        return super().train_on_batch(*pairs)

    def predict_on_batch(self, *, features: Any) -> Any:
        return super().predict_on_batch(features)


def own() -> Own:
    functional = classifier()
    model = Own(functional.inputs[0], functional.outputs[0])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), functional.loss)
    return model


def test_methods_of_the_models_own(tmp_path: pathlib.Path) -> None:
    """They were given Keras' arguments, and theirs were refused. Within them batches are by default the plan's."""
    before, pair, pairs = keras.Model.fit, Pair(own), (X[:7], Y[:7])
    ours, theirs = (
        [
            model.fit(pairs, rounds=2),
            model.evaluate(pairs),
            model.predict(X, 3.0),
            model.train_on_batch(pairs),
            model.predict_on_batch(features=X),
        ]
        for model in (pair.pipelined, pair.plain)
    )
    assert_close(ours, theirs)
    assert_same_values(pair.model, pair.plain)
    pair.pipelined.fit((X, Y))
    assert int(pair.model.optimizer.iterations) == 5 + 6
    assert keras.Model.fit is before
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'"):
        pair.pipelined.fit(pairs, epochs=3)
    checkpoint = dapple.Checkpointing(tmp_path)
    pair.pipelined.fit(pairs, checkpoint=checkpoint)
    resumed = transform(own())
    assert resumed.fit(pairs, checkpoint=checkpoint, resume=True) == [{}]
    assert_same_values(resumed.sync(), pair.model)
    for rounds, how in ((2, "more than once"), (0, "never calls")):
        with pytest.raises(dapple.DappleError, match=rf"own fit\(\) of model 'own.*' .*{how}"):
            pair.pipelined.fit(pairs, rounds=rounds, checkpoint=checkpoint)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, keras.models.clone_model])
def test_copies(pair: Pair, copied: Any) -> None:
    with pytest.raises(dapple.DappleError, match=r"holds devices, and can't be copied.* call dapple_tf.transform\(\)"):
        copied(pair.pipelined)


def test_two_threads(pair: Pair) -> None:
    """Two calls of ``fit`` at once ended in a PassError about a cut."""
    pipelined, errors = pair.pipelined, list[BaseException | None]()
    calls = [
        lambda: pipelined.train_on_batch(X[:7], Y[:7]),
        lambda: pipelined.evaluate(X, Y, verbose=0),
        lambda: pipelined.get_weights(),
        lambda: pipelined.verify(X[:7], Y[:7]),
        lambda: pair.model.predict(X, verbose=0),
        lambda: pair.model.layers[1].kernel.numpy(),
    ]

    def call(logs: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            errors.extend(other.submit(each).exception() for each in calls)

    pipelined.fit(X[:7], Y[:7], verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=call)])
    assert errors.pop() is None  # Single variables may be read.
    assert {type(error) for error in errors} == {dapple.DappleError}
    assert "another thread is in fit() of pipelined model 'classifier'" in str(errors[0])
    assert int(pair.model.optimizer.iterations) == 1
    with ThreadPoolExecutor(1) as other:
        other.submit(calls[0]).result()


def test_frozen_without_compile(caplog: pytest.LogCaptureFixture) -> None:
    pipelined = transform(classifier())
    for frozen in (False, True):
        pipelined.get_layer("first").trainable = not frozen
        before = pipelined.get_layer("first").get_weights()
        pipelined.train_on_batch(X[:7], Y[:7])
        assert ("were frozen, unfrozen or added without compile()" in caplog.text) == frozen
    assert_close(pipelined.get_layer("first").get_weights(), before)


# --- batch sizes


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 4, 1])
def test_batches_of_other_sizes_than_the_plans(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """They were refused; plain Keras trains on any. What it costs is said once."""
    pair = Pair(lambda: classifier(metrics=["accuracy"]))
    with caplog.at_level(logging.WARNING, "dapple_tf"):
        for model in (pair.plain, pair.pipelined):
            model.fit(X, Y, size, 2, 0, shuffle=False, validation_data=(X, Y))
    assert_same_values(pair.model, pair.plain)
    told = [record.message for record in caplog.records if "global batch size is 7" in record.message]
    assert len(told) == 1
    cut = {16: "5 micro-batches of 3 and 4", 4: "2 micro-batches of 2", 1: "1 micro-batch of 1"}[size]
    assert f"batches have {size} samples" in told[0]
    assert f"train as {cut} samples, not as the plan's 2 micro-batches of 3 and 4 samples" in told[0]


def test_a_batch_that_is_larger_than_the_plans(pair: Pair) -> None:
    assert_close(pair.pipelined.train_on_batch(X, Y), pair.plain.train_on_batch(X, Y))
    assert_close(pair.pipelined.train_on_batch(X[:3], Y[:3]), pair.plain.train_on_batch(X[:3], Y[:3]))
    assert_same_values(pair.model, pair.plain)


def test_a_smaller_last_batch_is_nothing_to_speak_of(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dapple_tf"):
        pair.pipelined.fit(X[:18], Y[:18], epochs=2, verbose=0)
    assert not caplog.records


def test_smaller_last_batches_of_several_epochs_arent_taken_for_two_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    """They were: full batches between them didn't count."""
    sizes = BatchSizes()
    for size in (7, 7, 4, 7, 7, 4):
        sizes.trained(size, 7, lambda other: pytest.fail(f"a batch of {other} samples is told of"))
    assert not caplog.records


# --- attributes


def test_attributes_of_the_users_model(pair: Pair, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipelined, plain = pair.pipelined, pair.plain
    for model in (plain, pipelined):
        model.train_on_batch(X[:7], Y[:7])
    pipelined.summary()
    assert "classifier" in capsys.readouterr().out
    assert pipelined.layers is not None and [layer.name for layer in pipelined.layers][1:] == [
        "first",
        "second",
        "logits",
    ]
    assert pipelined.get_layer("first") is pair.model.get_layer("first")
    assert pipelined.optimizer is pair.model.optimizer
    assert_close([weight.numpy() for weight in pipelined.weights], [weight.numpy() for weight in plain.weights])
    assert_close(pipelined.get_weights(), plain.get_weights())
    assert_close(pipelined(X), plain(X))
    for model in (plain, pipelined):
        model.set_weights([0.5 * weight for weight in model.get_weights()])
        model.train_on_batch(X[:7], Y[:7])
    pipelined.save_weights(tmp_path / "own.weights.h5")
    for model in (plain, pipelined):
        model.train_on_batch(X[:7], Y[:7])
        model.load_weights(tmp_path / "own.weights.h5")
        model.train_on_batch(X[:7], Y[:7])
    assert_same_values(pipelined.sync(), plain)


@pytest.mark.thorough
@pytest.mark.slow
def test_export(tmp_path: pathlib.Path) -> None:
    pipelined = transform(classifier())
    pipelined.train_on_batch(X[:7], Y[:7])
    pipelined.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    assert_close(np.asarray(loaded.serve(X)), pipelined.predict(X, verbose=0))


@pytest.mark.slow
def test_what_is_assigned_and_compiled_counts() -> None:
    pair = Pair(classifier)

    class Stop(keras.callbacks.Callback):
        def __init__(self, whole: Any) -> None:
            super().__init__()
            self.whole = whole

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.whole.stop_training = batch == 1

    for model in (pair.plain, pair.pipelined):
        model.fit(X, Y, 7, 3, 0, [Stop(model)], shuffle=False)
        assert int(model.optimizer.iterations) == 2
        model.get_layer("first").trainable = False
        model.compile(keras.optimizers.Adam(0.1, epsilon=1e-3), "mse")
        model.fit(X, np.zeros((21, 3)), 7, verbose=0, shuffle=False)
        model.trainable = False
        assert not model.trainable_weights
    assert_same_values(pair.model, pair.plain)


def test_with_closes_and_repr_names_the_plan() -> None:
    model = classifier()
    with transform(model) as pipelined:
        assert repr(pipelined) == "PipelinedModel('classifier', stages 1:2 on 3 devices, dapple_a, 2 x 3.5 samples)"
        pipelined.train_on_batch(X[:7], Y[:7])
        with pytest.raises(ValueError, match="mine"), pipelined:
            raise ValueError("mine")
        pipelined.train_on_batch(X[:7], Y[:7])
    assert not pipelined._compiled and int(model.optimizer.iterations) == 2
    with transform(classifier(), dapple.Plan.data_parallel(1, 7)) as single:
        assert repr(single).endswith("stages 1 on 1 device, dapple_a, 1 x 7 samples)")


def test_attributes_that_mean_nothing(pair: Pair) -> None:
    pipelined = pair.pipelined
    with pytest.raises(AttributeError, match="has an attribute 'summery'; did you mean 'summary'"):
        _ = pipelined.summery
    with pytest.raises(AttributeError, match=r"call train_on_batch\(\) or fit\(\) of the pipelined model"):
        pipelined.train_step((X, Y))
    with pytest.raises(AttributeError, match=r"setting 'stop_trainig' .* does nothing; did you mean 'stop_training'"):
        pipelined.stop_trainig = True
    with pytest.raises(AttributeError, match=r"keeps its plan; call dapple_tf.transform\(\) again"):
        pipelined.plan = plan()
    with pytest.raises(AttributeError, match=r"keeps its model; call dapple_tf.transform\(\) again"):
        pipelined.model = pipelined.model
    assert not hasattr(pipelined, "_no_such")
