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
    *("step", "step", "step", "evaluate", "read", "read all", "assign", "assign", "sync", "save", "restore"),
    *("failed step", "close", "compile"),
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
    return all(np.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(one, other, strict=True))


class Deferred(Pair):
    """A plain model, and one of the same initial values that only devices have."""

    def __init__(self) -> None:
        self.plain = build()
        with dapple.deferred_init():
            self.model = build()
        self.pipelined = transform(self.model)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_values_are_those_of_plain_keras(shared: Pair, seed: int, tmp_path: pathlib.Path) -> None:
    """Variables are drawn from weights, slots and the counter.

    A failed step undoes nothing from before the last sync, and leaves no mixture. Each fifth model is deferred.
    """
    deferred = seed % 5 == 4
    pair = Deferred() if deferred else shared
    if not deferred:
        pair.reset()
    random = np.random.default_rng(seed)
    moments = [values(pair.plain)]  # to one of which a failed step returns
    saved: list[tuple[pathlib.Path, list[np.ndarray]]] = []
    history = []
    try:
        for _ in range(8):
            event = str(random.choice(EVENTS))
            index, start = int(random.integers(len(variables(pair.plain)))), int(random.integers(3)) * 7
            history.append(f"{event} {index} {start}")
            plain, own = variables(pair.plain)[index], variables(pair.model)[index]
            batch = X[start : start + 7], Y[start : start + 7]
            if deferred and event in ("read", "read all", "failed step"):
                pair.pipelined.sync()  # Before, only devices have some values.
            if event == "step":
                for model in (pair.plain, pair.pipelined):
                    model.train_on_batch(*batch)
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
                    variable.assign(value)
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
            moments.append(values(pair.plain))
        assert_same_values(pair.pipelined.sync(), pair.plain)
    except BaseException as error:
        error.add_note(f"after {', '.join(history)}")
        raise
