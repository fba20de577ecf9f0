"""Benchmarks' results: the file, the machine's facts, ratios, and the documents that are written from them."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from absl import app

from dapple_tf.tools.evaluation import (
    operator_workers_report,
    scale_report,
    slow_links_report,
    torch_report,
    zoo,
)
from dapple_tf.tools.evaluation.bench_report import (
    check_output,
    own_command,
    own_commit,
    read_results,
    write_results,
)
from dapple_tf.tools.evaluation.ratios import Quartiles, quartiles, ratios, take_turns
from dapple_tf.tools.machine_facts import machine_facts

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def test_a_file_holds_the_newest_results_of_each_benchmark(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    write_results(file, "one", [{"ratio": Quartiles(0.5, 1.0, 2.0)}])
    write_results(file, "two", [{"steps": 3}], kind="simulated", versions={"torch": "0.0"})
    write_results(file, "one", [{"ratio": Quartiles(0.5, 1.5, 2.0)}])
    results = read_results(file)
    assert list(results) == ["one", "two"]
    assert results["one"]["records"] == [{"ratio": {"low": 0.5, "median": 1.5, "high": 2.0}}]
    assert results["one"]["kind"] == "measured" and results["two"]["kind"] == "simulated"
    assert results["two"]["machine"]["versions"]["torch"] == "0.0"
    assert results["one"]["command"] == own_command()
    assert results["one"]["commit"] == own_commit()
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_commit_of_the_code_is_recorded(tmp_path: pathlib.Path) -> None:
    """No document of measured numbers said of which commit they are."""
    assert own_commit(tmp_path) is None, "not a repository"
    git = ("git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org")
    (tmp_path / "code.py").write_text("1\n")
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    (results / "speed.json").write_text("{}\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "First"]):
        subprocess.run([*git, *arguments], check=True)
    commit = own_commit(tmp_path)
    assert commit is not None and int(commit, 16)
    (tmp_path / "results.json").write_text("{}\n")
    (results / "speed.json").write_text("{ }\n")
    assert own_commit(tmp_path) == commit, "neither untracked files nor results count"
    (tmp_path / "code.py").write_text("2\n")
    assert own_commit(tmp_path) == f"{commit}+"


def test_facts_are_about_the_machine_and_nobody(tmp_path: pathlib.Path) -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1 and facts["memory_gib"] > 0 and facts["cpu"]
    assert {"python", "tensorflow", "keras", "numpy"} <= facts["versions"].keys()
    text = json.dumps(facts)
    assert socket.gethostname() not in text and str(pathlib.Path.home()) not in text


def test_other_files_are_left_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plan.json").write_text('{"devices": [[0]]}')
    (tmp_path / "text.json").write_text("no JSON")
    for name, what in (("plan.json", "something other"), ("text.json", "isn't JSON")):
        with pytest.raises(ValueError, match=what):
            write_results(tmp_path / name, "one", [])
        with pytest.raises(app.UsageError, match=what):
            check_output(str(tmp_path / name))
    with pytest.raises(app.UsageError, match="no folder"):
        check_output(str(tmp_path / "missing" / "results.json"))
    check_output(None)
    check_output(str(tmp_path / "fresh.json"))
    with pytest.raises(ValueError, match="use one of measured, simulated"):
        write_results(tmp_path / "fresh.json", "one", [], kind="guessed")
    with pytest.raises(TypeError, match="no place in a record"):
        write_results(tmp_path / "fresh.json", "one", [{"path": tmp_path}])
    assert (tmp_path / "plan.json").read_text() == '{"devices": [[0]]}'


def test_ratios_are_of_the_same_round() -> None:
    """A machine that is half as fast in one round is so for both: the ratio stays."""
    assert ratios([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == Quartiles(2.0, 2.0, 2.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == Quartiles(2.0, 3.0, 4.0)
    with pytest.raises(ValueError, match="1 rounds can't be compared with 2"):
        ratios([1.0], [1.0, 2.0])


def test_turns_are_taken_in_both_orders() -> None:
    order: list[str] = []
    times = take_turns({name: lambda name=name: order.append(name) for name in "abc"}, 3, lambda number, name: None)
    assert "".join(order) == "abccbaabc"
    assert list(times) == ["a", "b", "c"] and all(len(seconds) == 3 for seconds in times.values())


DOCUMENTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "operator_workers.md": ("operator_workers.json", operator_workers_report.document),
    "scale.md": ("scale.json", scale_report.report),
    "slow_links.md": ("slow_links.json", slow_links_report.document),
    "torch.md": ("speed.json", torch_report.report),
    "zoo.md": ("zoo.json", zoo.document),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_that_of_its_numbers(name: str) -> None:
    file, document = DOCUMENTS[name]
    path = RESULTS.parent / name if name == "zoo.md" else RESULTS / name
    assert path.read_text(encoding="utf-8") == document(read_results(RESULTS / file))
