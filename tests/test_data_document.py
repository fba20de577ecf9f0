"""The commands of docs/data.md work as they stand there, and training on files can be interrupted."""

from __future__ import annotations

import importlib
import json
import pathlib
import shlex

import keras
import numpy as np
import pytest

from models.datasets import DATASETS, READERS
from tools import command, train
from tools.run_document import blocks

DOCUMENT = (pathlib.Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """The tool and the arguments of each line."""
    lines = [line for block in blocks(DOCUMENT) if block.language == "sh" for line in block.text.splitlines()]
    assert all(line.startswith("python -m tools.") for line in lines)
    return [shlex.split(line)[2:] for line in lines]


@pytest.mark.slow
def test_the_commands_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAPPLE_CACHE", str(tmp_path / ".cache"))
    for tool, *arguments in commands():
        module = importlib.import_module(tool)
        more = ["--cluster=cpu:2", "--global_batch_size=8"] if tool == "tools.train" else []
        assert command.run(module.main, module.FLAGS, [*arguments, *more]) == 0, capsys.readouterr().err
    trained = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("*/summary.json"))]
    assert len(trained) == sum(tool == "tools.train" for tool, *_ in commands())
    assert all(np.isfinite(numbers["metrics"]["val_loss"]) for numbers in trained)


def test_all_data_are_described() -> None:
    for name in (*DATASETS, *READERS):
        assert f"`{name}`" in DOCUMENT or f"`{name}:" in DOCUMENT, name


@pytest.mark.slow
def test_an_interrupted_run_ends_as_another(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random crops of images from files: the same ones, so the same weights."""
    monkeypatch.setenv("DAPPLE_CACHE", str(tmp_path / ".cache"))
    flags = ["--model=vgg:tiny", "--dataset=images", "--plan=1:1", "--cluster=cpu:2", "--global_batch_size=8"]
    flags += ["--nomeasure", "--noprofile_step", "--steps=3", "--validation_steps=0"]

    def run(name: str, *more: str) -> keras.Model:
        assert command.run(train.main, train.FLAGS, [*flags, f"--output_dir={tmp_path / name}", *more]) == 0
        return keras.saving.load_model(tmp_path / name / "model.keras")

    whole = run("whole", "--epochs=2")
    parts = f"--checkpoint_dir={tmp_path / 'checkpoints'}"
    half = run("half", parts, "--epochs=1")
    resumed = run("resumed", parts, "--epochs=2", "--resume")
    for one, other, before in zip(whole.get_weights(), resumed.get_weights(), half.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        assert not np.allclose(one, before, rtol=1e-6, atol=1e-7)
