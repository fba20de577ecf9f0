"""Examples of documents run, the tutorial's on a smaller model and measured once; its pictures and links are there."""

from __future__ import annotations

import pathlib
import re

import pytest

from dapple_tf import automatic
from dapple_tf.tools.evaluation.run_document import blocks, pictures, run
from dapple_tf.tools.hosts import free_ports

DOCS = pathlib.Path(__file__).parents[1] / "docs"
OPERATORS = (DOCS / "operators.md").read_text(encoding="utf-8")
GETTING_STARTED = (DOCS / "getting_started.md").read_text(encoding="utf-8")
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
SIZE = "sequence=64, depth=8, width=128, heads=4"
SMALLER = {
    SIZE: "sequence=16, depth=2, width=8, heads=2",
    "(128, 65)": "(128, 17)",
    '("block_3",)': '("block_0",)',
    "cluster=cluster, x=x, y=y)": "cluster=cluster, x=x, y=y, repeats=1)",
    "range(14)": "range(2)",
    "prediction.measured *": "prediction.predicted *",  # Four steps aren't measured yet.
    "global_batch_size=64, x=x, y=y)": "global_batch_size=64, profile=profile)",
}


@pytest.mark.thorough
@pytest.mark.slow
def test_the_examples_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAPPLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(automatic, "measure_capacity", lambda model, cluster, profile, **_: cluster)
    small = TUTORIAL
    for shown, port in zip(("2222", "2223"), free_ports(2), strict=True):
        small = small.replace(shown, str(port))
    for shown, instead in SMALLER.items():
        assert small.count(shown) == 1, shown
        small = small.replace(shown, instead)
    printed = run(small, "tutorial.md")
    shown = [block.text for block in blocks(printed) if block.language == "text"]
    assert all(len(text) > 50 for text in shown)
    assert "bubble_stage_1" in shown[0] and "peak memory" in shown[1]
    made = [name for name in pictures(TUTORIAL) if name.startswith("tutorial/")]
    assert made
    for name in [*made, "tutorial/better/timeline.html", "tutorial/dump/index.html"]:
        assert (tmp_path / name).is_file(), name


@pytest.mark.slow
def test_getting_started_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(GETTING_STARTED, "getting_started.md")
    plan, losses = [block.text for block in blocks(printed) if block.language == "text"]
    assert plan.splitlines()[:4] == GETTING_STARTED.partition("```text\n")[2].splitlines()[:4]
    assert losses.startswith("plain Keras [") and (tmp_path / "model.keras").is_file()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_examples_of_placed_operators_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(OPERATORS, "operators.md")
    assert (tmp_path / "plan.json").is_file() and (tmp_path / "operators.json").is_file()
    assert (tmp_path / "dump_of_gpus" / "train" / "operators.txt").is_file()
    written = {path.name for path in (tmp_path / "dump" / "train0").iterdir()}
    assert "operators.txt" in written
    passes = re.findall(r"^\| (\d\d) \| `(\w+)`", OPERATORS, flags=re.MULTILINE)
    assert len(passes) == 5 and {f"{number}_{name}.pbtxt" for number, name in passes} <= written


@pytest.mark.parametrize("document", [TUTORIAL, OPERATORS, GETTING_STARTED])
def test_pictures_and_links_are_there(document: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)", document):
        if "://" not in link:
            assert (DOCS / link).is_file(), link
