"""tools/dump_graph.py: dumps of models that are never run."""

from __future__ import annotations

import pathlib

import pytest
from models_for_tests import plan

import dapple_tf as dapple
from dapple_tf.output_folder import LIST
from dapple_tf.tools import command, dump_graph

MODEL = "--model=models_for_tests:classifier"
DESCRIPTION = """{"format": "dapple_tf.cluster/1", "servers": [{"devices": 2, "memory_bytes": 1000000}, {"devices": 2}],
 "intra_bandwidth": 1e9, "inter_bandwidth": 1e8}"""


def run(*arguments: str) -> int:
    return command.run(dump_graph.main, dump_graph.FLAGS, arguments)


def files(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_model_is_dumped_by_a_shape(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert run(MODEL, "--plan=2:1", "--global_batch_size=8", "--cluster=cpu:3", f"--output_dir={folder}") == 0
    said = capsys.readouterr().out
    assert f"The dump is in {folder}; open {folder / 'index.html'}" in said
    made = dapple.Plan.load(folder / "plan.json")
    assert (made.replicas, made.global_batch_size, made.micro_batches) == ((2, 1), 8, 4)
    assert {LIST, "index.html", "09_update.pbtxt", "graph.html", "schedule.txt"} <= files(folder)


def test_a_plan_from_a_file_for_devices_that_do_not_exist(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cluster.json").write_text(DESCRIPTION)
    plan().save(tmp_path / "plan.json")
    folder = tmp_path / "out"
    flags = [f"--plan={tmp_path / 'plan.json'}", f"--cluster={tmp_path / 'cluster.json'}", f"--output_dir={folder}"]
    assert run(MODEL, "--schedule=gpipe", *flags) == 0
    assert dapple.Plan.load(folder / "plan.json").schedule == "gpipe"
    assert "/job:worker/replica:0/task:1/device:GPU:0" in (folder / "train/09_update.pbtxt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plan=1"], "--output_dir isn't given"),
        (["--output_dir=out"], "--plan isn't given"),
        (["--plan=plan.json", "--output_dir=out"], "plan.json"),
        (["--plan=1:1", "--output_dir=out", "--cluster=cpu:1"], "plan puts stage 1 on device 1, but the cluster has 1"),
        (["--plan=1:1:1:1:1:1:1:1", "--output_dir=out", "--cluster=cpu:8"], "too few for 8 stages"),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: list[str],
    said: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(MODEL, *arguments) == 1
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_left(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "index.html").write_text("mine")
    assert run(MODEL, "--plan=1", "--cluster=cpu:1", f"--output_dir={tmp_path}") == 1
    assert "index.html would be overwritten" in capsys.readouterr().err
    assert (tmp_path / "index.html").read_text() == "mine"
