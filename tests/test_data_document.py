"""docs/data.md tells of all data, and training on files can be interrupted. Its commands: test_documented_commands."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import pytest

from dapple_tf.models.datasets import DATASETS, READERS
from dapple_tf.tools import command, train

DOCUMENT = (pathlib.Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")


def test_all_data_are_described() -> None:
    for name in (*DATASETS, *READERS):
        assert f"`{name}`" in DOCUMENT or f"`{name}:" in DOCUMENT, name


@pytest.mark.thorough
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
