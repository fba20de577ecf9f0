"""docs/results/operator_workers.md says what was measured."""

from __future__ import annotations

import pathlib
from typing import Any

from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.operator_workers_report import document, tally

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def test_the_document_is_written_from_the_measurements() -> None:
    results = read_results(RESULTS / "operator_workers.json")
    assert (RESULTS / "operator_workers.md").read_text(encoding="utf-8") == document(results)


def record(fd_dps: float, planned: float, rate: float = 0) -> dict[str, Any]:
    """A model on two hosts, whose single worker takes 1 s."""
    times = {"single": 1.0, "planned": planned, "fd_dps": fd_dps}
    rows = [{"way": way, "plan": "a plan", "predicted": 0.9, "steps": [time]} for way, time in times.items()]
    return {"model": "towers", "hosts": 2, "cores": 1.0, "rate_mbit": rate, "rows": rows}


def test_where_it_pays_is_counted() -> None:
    text = tally([record(0.5, 0.6), record(0.7, 0.6, 200), record(1.0, 0.6), record(0.599, 0.6)])
    assert "FD-DPS is the fastest by more than 2 %: 1 of 4." in text
    assert "It is faster than one worker, but not than all other ways: 2 of 4." in text
    assert "It doesn't pay: 1 of 4." in text
    assert "* towers, 2 hosts of a core each, links of 200 Mbit/s: 0.86 times as fast as planned" in text


def test_the_same_plan_twice_shows_what_is_noise() -> None:
    ways = record(0.5, 0.6)
    assert "noise" not in tally([ways | {"rows": [row | {"plan": row["way"]} for row in ways["rows"]]}])
    again = {"way": "data_parallel", "plan": "a plan", "predicted": 0.9, "steps": [0.63]}
    other = {"way": "fd_dps", "plan": "placed", "predicted": 0.9, "steps": [0.5]}
    text = tally([ways | {"rows": [row for row in ways["rows"] if row["way"] == "planned"] + [again, other]}])
    assert "differ by up to 5%: gains below that are noise." in text


def test_errors_and_gains_are_shown() -> None:
    machine = {"cores": 2, "cpu": "CPU", "versions": {"tensorflow": "2.21.0"}, "date": "2026-11-27 20:05"}
    text = document({"x": {"command": "python -m x", "machine": machine, "records": [record(0.5, 0.6)]}})
    assert "    python -m x  # 2026-11-27 20:05\n" in text
    assert "| fd_dps | a plan | 900 | 500 | 500 | 500 | +80.0% | 2.000 |" in text
