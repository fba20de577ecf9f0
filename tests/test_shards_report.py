"""docs/results/shards.md says what was measured and simulated."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from selection import thorough

from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.bench_shards import REPLICAS, simulated
from dapple_tf.tools.evaluation.shards_report import document, measured_table, simulated_table

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def test_the_document_is_written_from_the_numbers() -> None:
    results = read_results(RESULTS / "shards.json")
    assert (RESULTS / "shards.md").read_text(encoding="utf-8") == document(results)
    assert {record["hosts"] for name, entry in results.items() if name != "simulated" for record in entry["records"]}


@pytest.mark.parametrize("replicas", [count if count == max(REPLICAS) else thorough(count) for count in REPLICAS])
def test_what_is_simulated_is_as_stored(replicas: int) -> None:
    stored = read_results(RESULTS / "shards.json")["simulated"]["records"]
    rows = [row for row in stored if row["replicas"] == replicas]
    assert simulated_table(simulated([replicas])) == simulated_table(rows)


def test_ratios_are_within_a_turn() -> None:
    def row(way: str, steps: list[float], predicted: float, peak: float) -> dict[str, Any]:
        return {"way": way, "steps": steps, "predicted": predicted, "peak_bytes": peak}

    rows = [
        row("none", [1.0, 4.0, 3.0], 1.1, 90e6),
        row("slots", [1.0, 2.0, 1.5], 1.0, 80e6),
        row("slots, parameters", [2.0, 4.0, 6.0], 2.2, 75e6),
    ]
    table = measured_table([{"hosts": 2, "rate_mbit": 200.0, "parameter_bytes": 10e6, "rows": rows}])
    assert "| 2 | 200 | 10.0 | slots | 1500 | 2.000 (1.500 to 2.000) | 1000 | 1.100 | 80.0 | 10.0 | 10.0 |" in table
    assert "| slots, parameters | 4000 | 0.500 (0.500 to 0.750) | 2200 | 0.500 | 75.0 | 15.0 | 15.0 |" in table
