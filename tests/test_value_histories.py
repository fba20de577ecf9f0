"""Random histories of reads, assignments, steps, evaluations, saves and failures, beside plain Keras."""

from __future__ import annotations

import os
import pathlib

import keras
import numpy as np
import pytest
from models_for_tests import Pair, assert_close, assert_same_values, classifier, samples, values, variables

import dapple_tf as dapple

X, Y, _ = samples(21)
DRAWS = int(os.environ.get("DAPPLE_HISTORIES", "20"))
EVENTS = ("step", "step", "evaluate", "read", "read all", "assign", "assign", "sync", "save", "restore", "failed step")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(lambda: classifier(optimizer=keras.optimizers.Adam(0.02, epsilon=1e-3), metrics=["accuracy"]))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_values_are_those_of_plain_keras(pair: Pair, seed: int, tmp_path: pathlib.Path) -> None:
    """Variables are drawn from weights, slots and the counter; a failed step undoes nothing since the last sync."""
    pair.reset()
    random = np.random.default_rng(seed)
    saved: list[tuple[pathlib.Path, list[np.ndarray]]] = []
    history = []
    for _ in range(8):
        event = str(random.choice(EVENTS))
        index, start = int(random.integers(len(variables(pair.plain)))), int(random.integers(3)) * 7
        history.append(f"{event} {index} {start}")
        plain, own = variables(pair.plain)[index], variables(pair.model)[index]
        batch = X[start : start + 7], Y[start : start + 7]
        try:
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
                for variable in (plain, own):
                    variable.assign(variable + 1 if counts else variable * 0.5)
            elif event == "sync":
                pair.pipelined.sync()
            elif event == "save":
                path = tmp_path / str(len(saved))
                pair.pipelined.save_checkpoint(path)
                saved.append((path, [np.array(value) for value in values(pair.plain)]))
            elif event == "restore" and saved:
                path, kept = saved[int(random.integers(len(saved)))]
                pair.pipelined.restore_checkpoint(path)
                for variable, value in zip(variables(pair.plain), kept, strict=True):
                    variable.assign(value)
            elif event == "failed step":
                pair.pipelined.sync()
                with pytest.raises(dapple.StepError):
                    pair.pipelined.train_on_batch(batch[0], batch[1] + 9)
        except BaseException as error:
            error.add_note(f"after {', '.join(history)}")
            raise
    try:
        assert_same_values(pair.model, pair.plain)
    except AssertionError as error:
        error.add_note(f"after {', '.join(history)}")
        raise
