"""The tool that profiles: what it measures, prints and writes, and what it says of mistakes."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import planned_hardware as given
import pytest

import dapple_tf as dapple
from dapple_tf.describe.profile_text import load_text
from dapple_tf.tools import command, profile
from dapple_tf.tools.hosts import ROOT, environment


def run(*arguments: str) -> int:
    return command.run(profile.main, profile.FLAGS, arguments)


def test_table_of_layers(golden: Callable[[str, str], None]) -> None:
    golden("layer_table.txt", profile.layer_table(given.profile()) + "\n")


def test_what_is_asked_for_is_measured(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def measured(model: keras.Model, sizes: Sequence[int], **options: Any) -> dapple.Profile:
        calls.append({"model": model.name, "sizes": sizes} | options)
        return given.profile()

    monkeypatch.setattr(dapple, "profile", measured)
    out, text = tmp_path / "out.json", tmp_path / "out.txt"
    arguments = ["--model=vgg:tiny", "--batch_size=8,2,8", "--cluster=cpu:2", "--device=1", "--repeats=3", "--nocache"]
    assert run(*arguments, f"--output={out}", f"--text_output={text}", "--text_batch_size=2") == 0
    (call,) = calls
    assert (call["model"], call["sizes"], call["device"]) == ("vgg", [2, 8], 1)
    assert (call["repeats"], call["cache"], call["cluster"].num_devices) == (3, False, 2)
    assert (call["x"].shape, call["y"].shape, call["sample_weight"]) == ((8, 8, 8, 3), (8,), None)
    assert dapple.Profile.load(out) == given.profile()
    assert len(load_text(text, batch_size=2).layers) == 6
    printed = capsys.readouterr().out
    assert profile.layer_table(given.profile()) in printed
    assert f"The profile is in {out}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch_size=0"], "--batch_size=0: give whole numbers from 1 on"),
        (["--batch_size=2,x"], "--batch_size=2,x: give whole numbers"),
        (["--batch_size="], "--batch_size=: give whole numbers"),
        (["--device=2", "--cluster=cpu:2"], "--device=2: the cluster has 2 devices"),
        (["--output=/no/such/folder/p.json"], "--output=/no/such/folder/p.json: there is no such folder"),
        (["--repeats=0"], "flag --repeats=0"),
        (["--model=gtp"], "--model=gtp: unknown model 'gtp'; did you mean 'gpt'?"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_model(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DAPPLE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "profile.json"
    assert run("--model=vgg:tiny", "--batch_size=1,2", "--repeats=1", "--cluster=cpu:1", f"--output={out}") == 0
    measured = dapple.Profile.load(out)
    assert [layer.name for layer in measured.layers][:2] == ["conv_0_0", "pool_0"]
    assert measured.batch_sizes == (1, 2)
    assert "conv_0_0" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
def test_as_a_program() -> None:
    """What absl shows of the flags, and the exit code of the process."""

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "tools.profile", *arguments]
        return subprocess.run(line, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=300)

    shown = start("--help")
    assert shown.returncode == 0
    assert "Measures a model layer by layer" in shown.stdout
    assert "--batch_size: Samples of a slice" in shown.stdout
    assert "--model: The model: one of gpt, gpt:tiny" in shown.stdout
    failed = start("--batch_size=none")
    assert failed.returncode == 1
    assert failed.stderr.endswith("error: --batch_size=none: give whole numbers from 1 on, such as 2,8\n")
    assert "Traceback" not in failed.stderr
