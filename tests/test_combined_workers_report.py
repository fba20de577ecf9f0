"""docs/results/combined_workers.md says what was measured."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.tools.evaluation import combined_workers
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.combined_workers_report import best_alone, document, losses_apart, text, verdict

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"
TASK = {"batch": 2, "blocks": 2, "branches": 2, "tokens": 3, "width": 4, "hidden": 5}


def test_the_document_is_written_from_the_measurements() -> None:
    results = read_results(RESULTS / "combined_workers.json")
    assert (RESULTS / "combined_workers.md").read_text(encoding="utf-8") == document(results)


def record(**steps: list[float]) -> dict[str, Any]:
    """Ways that were predicted to take 1 s."""
    rows = [
        {"way": way, "plan": "a plan", "predicted_s": 1.0, "steps_s": times, "losses": [2.0, 1.0]}
        for way, times in steps.items()
    ]
    links = {"intra_bandwidth": 3e8, "intra_latency": 1e-3, "inter_bandwidth": 6e6, "inter_latency": 2e-3}
    setting = {"hosts": 2, "devices": 2, "share": 0.25, "rate_mbit": 50.0, "rounds": 2, "links": links}
    tried = {"by_trial": "a plan", "by_trial_ways": ["combined"]}
    return {**TASK, **setting, **tried, "rows": rows, "others_cores": [0.1, 0.3]}


def test_what_runs_together_is_compared_with_the_best_of_a_level_alone() -> None:
    measured = record(single=[2.0, 2.0], stages=[1.0, 1.2], operators=[1.5, 1.5], combined=[0.5, 0.6])
    assert best_alone(measured) == "stages"
    measured["rows"][0]["predicted_s"] = 0.8
    said = verdict(measured)
    assert "The fastest way of a single level was stages; combined (a plan) was 2.000 (2.000 to 2.000) times" in said
    assert "Predicted: combined 0.800 times as fast as single." in said
    assert "others" not in said and "at most 0.30 cores during a round, in the median 0.20" in said
    assert "The planner didn't" not in said
    assert "By trial (`by_trial=True`) it chose a plan, the plan of combined. " in said
    shown = text(measured)
    assert "550 (525 to 575)" in shown and "+81.8%" in shown and "0.500 (0.500 to 0.500)" in shown


def test_a_plan_that_the_planner_missed_is_told() -> None:
    measured = record(single=[2.0], combined=[1.5], groups=[1.0])
    measured["rows"][2]["predicted_s"] = 1.25
    said = verdict(measured)
    assert "groups (a plan) was 2.000 (2.000 to 2.000) times as fast" in said
    assert "it expected 1250 ms of them, and 1000 of a plan." in said


def test_losses_are_compared_after_each_step() -> None:
    measured = record(single=[1.0], combined=[1.0])
    measured["rows"][1]["losses"] = [2.0, 1.5]
    assert losses_apart(measured) == pytest.approx(0.5)


def test_models_of_all_ways_are_equal_and_stages_can_divide_no_branch() -> None:
    one, other = (combined_workers.branched(TASK) for _ in range(2))
    assert [layer.name for layer in one.layers[1:]] == ["block_0", "block_1", "pooled", "logits"]
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        assert (a == b).all()
    x, y = combined_workers.batch_of(TASK)
    assert x.shape == (2, 3, 4) and y.shape == (2,) and one(x).shape == (2, 10)


def test_plans_are_told_in_a_few_words() -> None:
    groups = dapple.Plan.manual(["a"], [[0], [2]], 2, 2, operator_devices=(((0, 1),), ((2, 3),)))
    assert combined_workers.described(groups).startswith("1 x 2:1 x 2")
    assert combined_workers.described(dapple.Plan.by_operators(4, 2)) == "operators on 4 devices"
