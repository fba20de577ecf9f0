from __future__ import annotations

import csv
import json
import pathlib
import time
from typing import Any

import keras
import numpy as np
import pytest

import dapple_tf as dapple
from dapple_tf.tools import command, train_gpt


def _run(*arguments: str) -> int:
    return command.run(train_gpt.main, train_gpt.FLAGS, list(arguments))


def test_throughput_leaves_out_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    callback = train_gpt.Throughput(tokens_per_step=100)
    rates = []
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        for step, seconds in enumerate([10.0, 1.0, 3.0]):
            now += 5.0  # What is between steps doesn't count.
            callback.on_train_batch_begin(step)
            now += seconds
            logs: dict[str, Any] = {}
            callback.on_train_batch_end(step, logs)
            rates.append(logs["tokens_per_s"])
        logs = {}
        callback.on_epoch_end(epoch, logs)
        rates.append(logs["tokens_per_s"])
    assert rates == [10, 100, 50, 50] * 2


@pytest.mark.thorough
@pytest.mark.slow
def test_training_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small run from beginning to end, then one with the plan that it left."""
    small = ["--depth=2", "--width=32", "--heads=2", "--sequence=32", "--validation_steps=2", "--evaluation_steps=8"]
    status = _run(
        *small,
        *("--global_batch_size=16", "--epochs=4", "--steps=40", "--sample_bytes=20", "--verify"),
        f"--output_dir={tmp_path / 'run'}",
    )
    printed = capsys.readouterr().out
    assert status == 0
    assert "What it writes at temperature 0.8:\n\ndef " in printed

    folder = tmp_path / "run"
    with (folder / "history.csv").open() as file:
        epochs = list(csv.DictReader(file))
    losses = [float(epoch["loss"]) for epoch in epochs]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert all(float(epoch["tokens_per_s"]) > 0 for epoch in epochs)

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["bytes_trained_on"] == 4 * 40 * 16 * 32
    assert 2 < summary["held_out_bits_per_byte"] < summary["unigram_bits_per_byte"]
    assert f"Bits per byte on held-out files: {summary['held_out_bits_per_byte']:.3f}" in printed

    model = keras.saving.load_model(folder / "model.keras")
    assert model.count_params() == summary["parameters"]
    text = b"def __init__(self, name):\n       "
    tokens = np.array([list(text[:32])])
    logits = model.predict_on_batch(tokens)
    assert logits.shape == (1, 32, 256)
    # The saved model is the trained one: it knows that code is ASCII, and that indentation goes on.
    assert logits[0, -1].argmax() == ord(" ")
    assert any((folder / "dump").iterdir())

    plan = dapple.Plan.load(folder / "plan.json")
    assert plan.cuts == ("block_1",)  # in the proportion of parameters
    assert plan.replicas == (3, 1)
    status = _run(
        *small,
        *("--epochs=1", "--steps=2", "--sample_bytes=0", f"--plan={folder / 'plan.json'}"),
        f"--output_dir={folder}",
    )
    assert status == 0
    assert str(plan) in capsys.readouterr().out
    assert dapple.Plan.load(tmp_path / "run-2" / "plan.json") == plan
    assert json.loads((tmp_path / "run-2" / "summary.json").read_text())["bytes_trained_on"] == 2 * 16 * 32
