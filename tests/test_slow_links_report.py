"""docs/results/slow_links.md says what was measured."""

from __future__ import annotations

import pathlib

from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.slow_links_report import document

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def test_the_document_is_written_from_the_measurements() -> None:
    results = read_results(RESULTS / "slow_links.json")
    assert (RESULTS / "slow_links.md").read_text(encoding="utf-8") == document(results)


def test_predictions_that_are_far_off_are_listed() -> None:
    rows = [
        {"schedule": "gpipe", "plan": "gpipe 1:1", "predicted": 1.0, "steps": [1.05, 1.0, 1.2]},
        {"schedule": "dapple_a", "plan": "dapple_a 1:1", "predicted": 1.0, "steps": [2.0, 1.25, 1.0]},
    ]
    record = {"hosts": 2, "plan": "straight", "transfer": 0.5, "message_bytes": 2**20, "rate_mbit": 100.0, "rows": rows}
    machine = {
        "cpu": "Some CPU",
        "cores": 2,
        "load_1min": 1.5,
        "date": "2026-01-31",
        "versions": {"tensorflow": "2.21"},
    }
    text = document({"slow_links_2_hosts": {"command": "python -m x", "machine": machine, "records": [record]}})
    assert "* `python -m x`\n  on Some CPU, 2 cores, TensorFlow 2.21, load 1.5, 2026-01-31\n" in text
    assert "1 of 2 predictions are within 10%" in text
    assert "The others: 2 hosts, straight, transfers of 0.5 of a forward, dapple_a (-20.0%)." in text
    assert "| gpipe | gpipe 1:1 | 1000 | 1050 | 1000 | 1200 | -4.8% | 1.190 |" in text
