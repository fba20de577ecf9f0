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


def unlike(*records: dict[str, Any]) -> list[dict[str, Any]]:
    """Records whose ways have plans of their own."""
    return [one | {"rows": [row | {"plan": row["way"]} for row in one["rows"]]} for one in records]


def test_where_it_pays_is_counted() -> None:
    text = tally(unlike(record(0.5, 0.6), record(0.7, 0.6, 200), record(1.0, 0.6), record(0.599, 0.6)))
    assert "FD-DPS is the fastest by more than 2%: 1 of 4." in text
    assert "It is within 2% of the fastest of the others: 1 of 4." in text
    assert "It is slower: 2 of 4." in text
    assert "* towers, 2 hosts of a core each, links of 200 Mbit/s: 0.86 times as fast as planned" in text
    assert "may be noise" not in text


def test_a_plan_that_is_faster_over_slower_links_is_an_opponent_over_quicker_ones() -> None:
    """Without a limit the planner chose worse than with one, and FD-DPS shone beside it."""
    text = tally(unlike(record(0.4, 0.6), record(0.55, 0.44, 200)))
    assert "links without a limit: 1.10 times as fast as planned over links of 200 Mbit/s" in text
    assert "links of 200 Mbit/s: 0.80 times as fast as planned" in text


def test_the_same_plan_twice_shows_what_may_be_noise() -> None:
    ways = record(0.5, 0.6)
    again = {"way": "data_parallel", "plan": "a plan", "predicted": 0.9, "steps": [0.63]}
    placed = {"way": "fd_dps", "plan": "placed", "predicted": 0.9, "steps": [0.58]}
    planned = next(row for row in ways["rows"] if row["way"] == "planned")
    other = {"way": "stages", "plan": "a plan", "predicted": 0.8, "steps": [0.9]}  # of other links, say
    text = tally([ways | {"rows": [planned, again, placed, other]}])
    assert "FD-DPS is the fastest by more than 5%: 0 of 1." in text
    assert "It is within 5% of the fastest of the others: 1 of 1." in text
    assert "differ by up to 5%: less may be noise." in text


def test_errors_and_gains_are_shown() -> None:
    machine = {"cores": 2, "cpu": "CPU", "versions": {"tensorflow": "2.21.0"}, "date": "2026-11-27 20:05"}
    text = document({"x": {"command": "python -m x", "machine": machine, "records": [record(0.5, 0.6)]}})
    assert "    python -m x  # 2026-11-27 20:05\n" in text
    assert "| fd_dps | a plan | 900 | 500 | 500 | 500 | +80.0% | 2.000 |" in text
