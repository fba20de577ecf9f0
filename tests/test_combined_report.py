"""docs/results/combined.md says what was simulated."""

from __future__ import annotations

import pathlib

from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.combined import CLUSTERS, MODELS
from dapple_tf.tools.evaluation.combined_report import best_alone, document, gain

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def test_the_document_is_written_from_the_numbers() -> None:
    results = read_results(RESULTS / "combined.json")
    assert (RESULTS / "combined.md").read_text(encoding="utf-8") == document(results)
    records = results["combined"]["records"]
    assert [(record["model"], record["cluster"]) for record in records] == [(m, c) for m in MODELS for c in CLUSTERS]


def test_the_best_alone_is_over_all_levels() -> None:
    record = {"data_parallel_ms": None, "operators_ms": 3.0, "operators_on_a_server_ms": 2.0, "stages_ms": 4.0}
    assert best_alone(record) == ("operators on one server", 2.0)
    assert gain(record | {"combined_ms": 1.0}) == 2.0
