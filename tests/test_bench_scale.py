"""Benchmarks of scale, each in its smallest form: memory, preparation, planning, rewriting of full-size models."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.models.registry import MODELS, find_model
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import (
    bench_checkouts,
    bench_first_step,
    bench_many_devices,
    bench_memory,
    bench_planner,
    bench_preparation,
    bench_recompute,
    rewrite_models,
    scale_report,
)
from dapple_tf.tools.evaluation.bench_gpt import gpt_size
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.ratios import Quartiles

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def test_peaks_are_set_beside_those_of_gpipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fullest device counts; what is measured and what is simulated each stands beside its own GPipe."""
    size = gpt_size(blocks=2, width=8, sequence=4)

    def measured(plan: dapple.Plan, *_: Any) -> list[list[int]]:
        return [[4_000_000, 1_000_000 * plan.micro_batches]] if plan.schedule == "gpipe" else [[4_000_000, 2_000_000]]

    def simulated(plan: dapple.Plan, *_: Any) -> list[float]:
        return [5e6, 1e6 * plan.micro_batches] if plan.schedule == "gpipe" else [5e6, 2e6]

    monkeypatch.setattr(bench_memory, "measure", measured)
    monkeypatch.setattr(bench_memory, "_simulated", simulated)
    monkeypatch.setattr(dapple, "profile", lambda *_, **__: None)
    monkeypatch.setattr(bench_memory, "make_model", lambda size: None)
    rows = list(bench_memory.rows([2], [2, 8], ["dapple_a"], size, 4, 1))
    assert [(one["schedule"], one["micro_batches"]) for one, _ in rows] == [
        ("gpipe", 2), ("dapple_a", 2), ("gpipe", 8), ("dapple_a", 8),
    ]  # fmt: skip
    assert [one["peak_of_gpipe"] for one, _ in rows] == [1.0, 1.0, 1.0, 0.5]
    assert [other["peak_of_gpipe"] for _, other in rows] == [1.0, 1.0, 1.0, 5 / 8]
    assert bench_memory.table([one for one, _ in rows], [other for _, other in rows], 2).splitlines()[2:] == [
        "| gpipe | 4.0 (5.0) | 8.0 (8.0) | 1.00 (1.00) | 1.00 (1.00) |",
        "| dapple_a | 4.0 (5.0) | 4.0 (5.0) | 1.00 (1.00) | 0.50 (0.62) |",
    ]


def test_plans_of_the_memory_benchmark_have_equal_stages() -> None:
    assert bench_memory.plan_of("zb_v", 2, 4, 8, 4).devices == ((0,), (1,), (1,), (0,))
    plan = bench_memory.plan_of("dapple_a + boundary", 4, 8, 8, 4)
    assert (plan.cuts, plan.recompute, plan.global_batch_size) == (("block_1", "block_3", "block_5"), "boundary", 32)
    with pytest.raises(dapple.PlanError, match="8 blocks don't make 3 equal stages"):
        bench_memory.plan_of("gpipe", 3, 4, 8, 4)


@pytest.mark.slow
def test_planning_takes_less_than_a_second_and_says_what_it_found() -> None:
    (record,) = bench_planner.records([2], [2], 1, 16)
    assert record["layers"] == 2 and record["of_first"] == 1.0 and record["planner_s"] > 0
    assert sum(record["replicas"]) == 2
    assert "| 2 | " in bench_planner.table([record])
    assert bench_planner.planned(400, 2, 16)[1] is None  # doesn't fit
    with pytest.raises(dapple.PlanError, match="12 devices don't fill servers of 8"):
        bench_planner.cluster_of(12)


@pytest.mark.thorough
@pytest.mark.slow  # A process of its own imports TensorFlow.
def test_a_preparation_is_the_sum_of_its_parts() -> None:
    options = {"replicas": 1, "layers": 2, "hidden": 8, "heads": 2, "vocabulary": 16, "sequence": 4}
    options |= {"schedule": "gpipe", "optimizer": "adam"}
    (own,) = bench_preparation.records([(2, 2)], options)
    record = bench_preparation.apart(2, 2, options)
    assert record.keys() == own.keys() and record["parts_s"].keys() == own["parts_s"].keys()
    assert {key: record[key] for key in options} == options
    assert "capture  " in bench_preparation.parts_table(record)
    assert record["preparation_s"] == pytest.approx(sum(record["parts_s"].values()))
    assert (record["devices"], record["micro_batches"], record["of_first"]) == (2, 2, 1.0)
    assert bench_preparation.table([record]).splitlines()[2].startswith("| 2 | 2 | ")


def test_each_configuration_is_prepared_once() -> None:
    assert bench_preparation.configurations([2, 4], [2, 8], 8) == [(2, 8), (4, 8), (4, 2)]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_step_of_many_devices_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of two replicas, and two micro-batches: eight F and B, and what passes between them."""
    monkeypatch.setattr(bench_many_devices, "STAGES", 2)
    monkeypatch.setattr(bench_many_devices, "MICRO_BATCHES", 2)
    record = bench_many_devices.measured("replicas", 4)
    assert (record["stages"], record["micro_batches"], record["tasks"], record["between_servers"]) == (2, 2, 16, 0)
    assert record["feeds"] == 4 and record["fetches"] == 2
    assert record["transfers"] >= 8 and record["nodes"] > record["tasks"]
    assert min(record[name] for name in ("preparation_s", "step_ms", "client_ms", "step_core_ms")) > 0
    straight = bench_many_devices.plan_of("straight", 8)
    assert (straight.num_stages, straight.micro_batches, straight.global_batch_size) == (8, 8, 8)


def test_more_devices_are_extrapolated_by_devices_and_tasks() -> None:
    rows = []
    for devices in (4, 8, 16):
        tasks = 2 * devices * devices
        values = dict.fromkeys(bench_many_devices._GROWS, 10.0 + 3 * devices + 0.5 * tasks)
        rows.append({"way": "straight", "devices": devices, "tasks": tasks, **values})
    guess = bench_many_devices.extrapolated(rows, 1024)
    assert guess["tasks"] == 2 * 1024 * 1024
    assert guess["nodes"] == pytest.approx(10 + 3 * 1024 + 1024 * 1024)
    rows[0]["between_servers"] = 0.0
    assert bench_many_devices.extrapolated(rows, 1024)["between_servers"] > 1024 * 1024 / 2
    for row in rows:  # Where more devices need less, nothing is extrapolated below 0.
        row["client_ms"] = 5.0 - row["devices"] / 16
    assert bench_many_devices.extrapolated(rows, 1024)["client_ms"] > 0


def test_full_size_models_are_those_of_the_papers() -> None:
    names = set(rewrite_models.FULL_SIZE)
    assert {"vgg:19", "resnet:50", "gpt:medium", "bert:48"} <= names <= set(MODELS)
    assert not {name for name in names if name.endswith("tiny") or ":" not in name}


@pytest.mark.parametrize(
    ("kind", "devices", "layers", "replicas"),
    [
        ("straight", 16, 54, (1,) * 16),
        ("straight", 32, 25, (2,) * 16),
        ("replicated", 32, 54, (4,) * 8),
        ("replicated", 16, 4, None),
        ("data_parallel", 16, 1, (16,)),
    ],
)
def test_replicas_of_even_plans(kind: str, devices: int, layers: int, replicas: tuple[int, ...] | None) -> None:
    assert rewrite_models.replicas_of(kind, devices, layers) == replicas


@pytest.mark.thorough
@pytest.mark.slow
def test_a_model_is_rewritten_without_values() -> None:
    rows = list(rewrite_models.rows_of("bert:tiny", find_model("bert:tiny"), [2, 4], ["straight"], "dapple_a"))
    assert [(row["stages"], row["replicas"], row["micro_batches"]) for row in rows] == [(2, 1, 2), (4, 1, 4)]
    for row in rows:
        assert row["step"]["nodes"] > 0 and row["step"]["function_nodes"] > row["step"]["functions"] > 0
        assert row["step"]["bytes"] < 4 * row["parameters"] + 2**20  # No weights are in it.
        assert {"capture", "legal cuts"} <= row["model_parts"]["seconds"].keys()
        assert {"partition", "update"} <= row["plan_parts"]["processor_seconds"].keys()
    assert len(rewrite_models.table(rows).splitlines()) == 2 + len(rows)


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        (rewrite_models, ["--models=gpt:giant"], "unknown model"),
        (rewrite_models, ["--devices=1"], "at least 2"),
        (rewrite_models, ["--plans=round"], "unknown round"),
        (bench_memory, ["--schedules=none"], "unknown none"),
        (bench_memory, ["--devices=3"], "equal stages"),
        (bench_memory, ["--json=missing/file.json"], "no folder missing"),
        (bench_preparation, ["--devices=2,x"], "--devices=2,x: need whole numbers"),
        (bench_preparation, ["--layers=4"], "8 devices don't make stages"),
        (bench_planner, ["--layers="], "--layers=: need whole numbers"),
    ],
)
def test_wrong_flags_are_told_before_anything_runs(
    tool: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(tool.main, tool.FLAGS, arguments) == 1
    assert message in capsys.readouterr().err


def test_the_document_is_that_of_its_numbers() -> None:
    """`python -m tools.evaluation.scale_report` writes it."""
    results = read_results(RESULTS / "scale.json")
    assert (RESULTS / "scale.md").read_text(encoding="utf-8") == scale_report.report(results)
    assert results["peak_memory"]["kind"] == "measured" and results["peak_memory_simulated"]["kind"] == "simulated"


@pytest.mark.thorough
def test_recomputation_is_measured_in_turns() -> None:
    record = bench_recompute.measure("tiny", jit_compile=False, micro_batches=2, rounds=2, steps=1)
    assert record["peak_mb"]["none"] > record["peak_mb"]["min_cut"] > record["peak_mb"]["boundary"]
    record["min_cut_time"], record["boundary_time"] = (
        {"low": 1.0, "median": 1.04, "high": 1.1},
        Quartiles(1.2, 1.3, 1.4),
    )
    record |= {"step_ms": 12.0, "peak_mb": {"none": 10.0, "min_cut": 6.0, "boundary": 4.0}}
    cells = "| tiny | no | 12 | 1.040 (1.000 to 1.100) | 1.300 (1.200 to 1.400) | 10.0 | 6.0 | 4.0 | 40% | 60% |"
    assert bench_recompute.table([record]).splitlines()[2] == cells


def test_first_steps_stand_beside_plain_keras() -> None:
    seconds = {"keras": (10.0, 12.0, 30.0), "ours": (20.0, 24.0, 18.0)}
    rows = [
        {"model": "ResNet50", "way": way, "first_step_s": taken, "first_step_processor_s": taken / 2}
        for way, all_taken in seconds.items()
        for taken in all_taken
    ]
    assert bench_first_step.table(rows).splitlines()[2] == "| ResNet50 | 12.0 | 20.0 | 1.67 | 1.67 |"
    again = [row | {"again": True, "first_step_s": row["first_step_s"] / 4} for row in rows]
    assert (
        bench_first_step.table(rows + again).splitlines()[2] == "| ResNet50 | 12.0 | 20.0 | 1.67 | 1.67 | 3.0 | 5.0 |"
    )


def test_an_older_checkout_stands_beside_this_one(tmp_path: pathlib.Path) -> None:
    """Each runs its own program: their numbers differ as their sources do."""
    case = bench_checkouts.Case("bench_made_up", ("--of=3",), "taken_s")
    rounds: dict[str, list[float]] = {}
    for name, seconds in (("before", 8.0), ("now", 2.0)):
        folder = tmp_path / name / "tools" / "evaluation"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
        (folder / "bench_made_up.py").write_text(
            "import json, sys\n"
            "of, file = (argument.partition('=')[2] for argument in sys.argv[1:])\n"
            f"records = [{{'taken_s': {seconds} * int(of)}}]\n"
            "json.dump({'made up': {'kind': 'measured', 'records': records}}, open(file, 'w'))\n"
        )
        rounds[name] = [bench_checkouts.seconds_of(case, tmp_path / name) for _ in range(2)]
    record = bench_checkouts.record_of("it", rounds["before"], rounds["now"], "1a2b3c4")
    row = "| it | 24.00 | 6.00 | 0.250 (0.250 to 0.250) |"
    assert bench_checkouts.table([record]).splitlines()[2] == row
    stored = json.loads(json.dumps(record, default=dataclasses.asdict))
    assert bench_checkouts.table([stored]).splitlines()[2] == row
    (tmp_path / "now" / "tools" / "evaluation" / "bench_made_up.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"bench_made_up of .*now ended with code 3"):
        bench_checkouts.seconds_of(case, tmp_path / "now")
