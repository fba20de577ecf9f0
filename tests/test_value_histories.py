"""Random histories of reads, assignments, steps, saves, failures and fresh sessions, beside plain Keras."""

from __future__ import annotations

import os
import pathlib

import keras
import numpy as np
import pytest
from models_for_tests import Pair, assert_close, assert_same_values, classifier, samples, transform, values, variables

import dapple_tf as dapple

X, Y, _ = samples(21)
DRAWS = int(os.environ.get("DAPPLE_HISTORIES", "20"))
EVENTS = (
    *("train_on_batch", "train_on_batch", "train_on_batch", "test_on_batch", "evaluate", "failed step", "read"),
    *("read all", "assign", "assign", "assign all", "sync", "save", "restore", "close", "compile"),
)
STORIES = (
    ("train_on_batch", "sync", "train_on_batch", "read", "failed step"),  # It left a mixture.
    ("train_on_batch", "save", "train_on_batch", "close", "restore", "read all", "failed step"),  # That undid it.
    ("train_on_batch", "save", "close", "restore", "test_on_batch", "train_on_batch"),  # Slots were nowhere.
)


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.02, epsilon=1e-3)


def build() -> keras.Model:
    keras.utils.set_random_seed(5)
    return classifier(optimizer=adam(), metrics=["accuracy"])


@pytest.fixture(scope="module")
def shared() -> Pair:
    return Pair(build)


def assign(model: keras.Model, new: list[np.ndarray]) -> None:
    for variable, value in zip(variables(model), new, strict=True):
        variable.assign(value)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    pairs = zip(one, other, strict=True)  # The learning rate is the model's; it's the only number with a fraction.
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs if a.ndim or a.dtype.kind == "i")


class Deferred(Pair):
    """A plain model, and one of the same initial values that only devices have."""

    def __init__(self) -> None:
        self.plain = build()
        with dapple.deferred_init():
            self.model = build()
        self.pipelined = transform(self.model)


@pytest.mark.parametrize("drawn", [*STORIES, *range(DRAWS)])
def test_values_are_those_of_plain_keras(shared: Pair, drawn: tuple[str, ...] | int, tmp_path: pathlib.Path) -> None:
    """A failed step undoes nothing from before the last sync, and leaves no mixture. Each fifth model is deferred."""
    deferred = isinstance(drawn, int) and drawn % 5 == 4
    pair = Deferred() if deferred else shared
    if not deferred:
        pair.reset()
    random = np.random.default_rng(drawn if isinstance(drawn, int) else 0)
    events = map(str, random.choice(EVENTS, 8)) if isinstance(drawn, int) else drawn
    moments = [values(pair.plain)]  # to one of which a failed step returns
    saved: list[tuple[pathlib.Path, list[np.ndarray]]] = []
    history = []
    try:
        for event in events:
            index, start = int(random.integers(len(variables(pair.plain)))), int(random.integers(3)) * 7
            history.append(f"{event} {index} {start}")
            plain, own = variables(pair.plain)[index], variables(pair.model)[index]
            batch = X[start : start + 7], Y[start : start + 7]
            if deferred and event in ("read", "read all", "failed step"):
                pair.pipelined.sync()  # Before, only devices have some values.
            if event.endswith("_on_batch"):
                for model in (pair.plain, pair.pipelined):
                    getattr(model, event)(*batch)
            elif event == "evaluate":
                results = [model.evaluate(*batch, batch_size=7, verbose=0) for model in (pair.plain, pair.pipelined)]
                assert_close(results[1], results[0])
            elif event == "read":
                np.testing.assert_allclose(own.numpy(), plain.numpy(), rtol=1e-5, atol=2e-6)
            elif event == "read all":
                assert_same_values(pair.model, pair.plain)
            elif event == "assign":
                counts = np.issubdtype(plain.numpy().dtype, np.integer)
                value = plain.numpy() + 1 if counts else plain.numpy() * 0.5
                for variable in (plain, own):
                    variable.assign(value) if value.ndim < 2 or deferred else variable.value[1:3].assign(value[1:3])
            elif event == "assign all":
                weights = [0.5 * weight for weight in pair.plain.get_weights()]
                for model in (pair.plain, pair.model):
                    model.set_weights(weights)
            elif event in ("sync", "close"):
                getattr(pair.pipelined, event)()
                moments = []
            elif event == "compile":
                for model in (pair.plain, pair.model):
                    model.compile(adam(), model.loss, metrics=["accuracy"], run_eagerly=model is pair.plain)
                moments = []
            elif event == "save":
                path = tmp_path / str(len(saved))
                pair.pipelined.save_checkpoint(path)
                saved.append((path, [np.array(value) for value in values(pair.plain)]))
            elif event == "restore" and saved:
                path, kept = saved[int(random.integers(len(saved)))]
                pair.pipelined.restore_checkpoint(path)
                assign(pair.plain, kept)
                moments = []
            elif event == "failed step":
                with pytest.raises(dapple.StepError):
                    pair.pipelined.train_on_batch(batch[0], batch[1] + 9)
                left = values(pair.pipelined.sync())
                assign(pair.plain, next(moment for moment in reversed(moments) if same(left, moment)))
                pair.plain.optimizer.learning_rate = float(pair.model.optimizer.learning_rate.numpy())
            moments.append(values(pair.plain))
        assert_same_values(pair.pipelined.sync(), pair.plain)
    except BaseException as error:
        error.add_note(f"after {', '.join(history)}")
        raise
