"""The first step of each kind says what it prepares: it took a minute without a word for large models."""

from __future__ import annotations

import functools
import io
import logging
import sys
from typing import Any

import numpy as np
import pytest
from profiled import mlp

import dapple_tf as dapple
from dapple_tf import progress
from dapple_tf.execution import preparation


def watched(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written where somebody watches, without patience and without the thread that shows the time."""
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setattr(progress, "_is_watched", lambda: True)
    monkeypatch.setattr(progress, "_TICK", 1e6)
    monkeypatch.setattr(preparation, "_PATIENCE", 0.0)
    monkeypatch.setattr(preparation, "Progress", functools.partial(progress.Progress, mininterval=0.0))
    return output


def pipelined() -> dapple.PipelinedModel:
    return dapple.transform(mlp(), dapple.Cluster.local(2, kind="cpu"), dapple.Plan.straight(["second"], 8, 2))


def batches(samples: int) -> tuple[Any, Any]:
    return np.zeros((samples, 4), "float32"), np.zeros(samples, "int32")


def test_the_first_step_says_what_it_prepares_and_others_are_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = pipelined()
    terminal = watched(monkeypatch)
    with caplog.at_level(logging.INFO, logger="dapple_tf.execution"):
        model.train_on_batch(*batches(8))
    shown = [line.rpartition(":")[0].rpartition(":")[0] for line in terminal.getvalue().split("\r") if line.strip()]
    assert {line.partition(", ")[0] for line in shown[1:]} == {"preparing training on batches of 8"}
    told = [line.partition(", ")[2] for line in shown]
    for earlier, later in [
        ("capturing the model", "pass 1, assign_stages"),
        ("pass 1, assign_stages", "pass 4, partition"),
        ("pass 4, partition", "tracing the optimizer"),
        ("tracing the optimizer", "pass 5, replicate"),
        ("pass 5, replicate", "pass 9, update"),
        ("pass 9, update", "TensorFlow prepares the step"),
    ]:
        assert told.index(earlier) < told.index(later)
    assert any(line.startswith("prepared train for x float32 (?, 4), y int32 (?,) in ") for line in caplog.messages)
    assert any(line.startswith("preparing training on batches of 8 took ") for line in caplog.messages)
    terminal = watched(monkeypatch)
    model.train_on_batch(*batches(8))
    assert not terminal.getvalue()
    model.evaluate(*batches(8), batch_size=8, verbose=0)
    assert "preparing evaluation on batches of 8, capturing the model" in terminal.getvalue()


def test_it_never_writes_into_keras_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is smaller: its step is prepared while the bar of the first stands in the line."""
    model = pipelined()
    terminal = watched(monkeypatch)
    model.fit(*batches(12), batch_size=8, verbose=1)
    first, smaller = (
        terminal.getvalue().partition(f"\rpreparing training on batches of {samples}")[0] for samples in (8, 4)
    )
    assert "Epoch 1" not in first or (first.endswith("\n") and not first.endswith("\n\n"))
    assert "loss: " in smaller and smaller.endswith("\n")
