"""The examples that people begin from: each runs as it says, and tells what it promises."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
from selection import thorough

import dapple_tf as dapple

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

EXAMPLES = {
    "bfloat16_gradients": ([], r"weights differ by at most [1-9]\.\de-0[345]"),
    "lora_on_workers": (["--epochs=1"], r"of 163,200 parameters are trained\n(.*\n)*.*accuracy: "),
    "multi_output_class_weights": ([], r"kind_accuracy: .* shade_loss: (.*\n)*of the rare kind \d\d%"),
    "own_schedule": (["--image={folder}/schedules.svg"], r"run_ahead  step .* GiB on the fullest device"),
    "plan_for_other_hardware": (
        ["--folder={folder}"],
        r"data parallelism with one all-reduce at the end takes \d\.\d\d times as long",
    ),
    "resume_after_kill": ([], r"killed in step 13 \(exit code -9\)(.*\n)*\d+ arrays .* the same to the last bit"),
    "two_workers": (["16"], r"expected step (.*\n)*the plan .* at best\n(.*\n){2}plain Keras "),
    "vit_on_images": ([], r"val_accuracy: (0\.[89]|1\.0)"),
}
"""Example -> flags, and what it prints."""

QUICK = {"own_schedule"}
"""Those that train nothing."""
ON_WORKERS = {"lora_on_workers"}
TESTED_ELSEWHERE = {"train_on_cluster"}
"""By test_launch.py."""


def test_every_example_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == EXAMPLES.keys() | TESTED_ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in QUICK else thorough(name) for name in sorted(EXAMPLES)])
def test_examples_do_what_they_say(name: str, tmp_path: pathlib.Path) -> None:
    flags, pattern = EXAMPLES[name]
    command = [sys.executable, f"docs/examples/{name}.py", *(flag.format(folder=tmp_path) for flag in flags)]
    if name in ON_WORKERS:
        command = [sys.executable, "-m", "tools.launch", "--workers=2", "--", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(pattern, done.stdout), done.stdout
    if any("{folder}" in flag for flag in flags):
        assert list(tmp_path.iterdir())


# ---- notebooks


def _cells(path: pathlib.Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def _run(cells: list[str]) -> list[Any]:
    """Runs cells one after the other; the values that they end with, None for those that end otherwise."""
    names: dict[str, Any] = {}
    values = []
    for cell in cells:
        tree = ast.parse(cell)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        values.append(None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    return values


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_tables_and_pictures(path: pathlib.Path) -> None:
    shown = {type(value): value._repr_html_() for value in _run(_cells(path)) if hasattr(value, "_repr_html_")}
    assert {dapple.Plan, dapple.Simulation, dapple.StepProfile, dapple.Verification} <= shown.keys()
    for kind, text in shown.items():
        assert "<table>" in text or "<table " in text, kind
        if kind is not dapple.Verification:
            assert "<svg" in text, kind


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_results(path: pathlib.Path) -> None:
    """Results would be of one machine, and change with every run."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
