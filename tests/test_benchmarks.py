"""The benchmarks in their smallest form, and the arithmetic of their ratios; no time is asserted."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import dapple_tf as dapple
from dapple_tf.models.registry import MODELS, find_model
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import (
    bench_checkouts,
    bench_client,
    bench_cluster,
    bench_many_devices,
    bench_memory,
    bench_models,
    bench_overhead,
    bench_planner,
    bench_preparation,
    bench_recompute,
    bench_torch,
    quiet,
    rewrite_models,
    torch_report,
    unlike_workers,
    zoo,
)
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.peers import Peers, PeersError
from dapple_tf.tools.evaluation.process_families import peak_mib, place
from dapple_tf.tools.evaluation.ratios import Quartiles
from dapple_tf.tools.evaluation.torch_ways import Way, all_ways, best

# ---- commands

SMALL_GPT = ["--blocks=2", "--width=8", "--sequence=4", "--micro_batches=2", "--samples=2"]
WAYS = [f"{plan}, {method}" for plan in ("two stages", "data parallel") for method in ("train_on_batch", "fit")]
RUNS: list[tuple[Any, list[str], str, list[str]]] = [
    (
        bench_overhead,
        ["--models=tiny", "--rounds=2", "--turn_ms=5", "--epoch_steps=2", "--jit_compile=false"],
        "overhead",
        ["train_on_batch", "fit"],
    ),
    (
        bench_cluster,
        [*SMALL_GPT, "--ways=copies,pipeline", "--schedules=dapple_a", "--rounds=2"],
        "cluster",
        ["copies", "pipeline_dapple_a"],
    ),
    (bench_client, ["--models=gpt:tiny", "--rounds=2", "--steps=2"], "client", WAYS),
    (
        unlike_workers,
        ["--batch=8", "--rounds=2", "--quiet=1", "--tries=1"],
        "unlike_workers",
        ["12+12+12+12", "16+16+8+8", "4+4"],
    ),
]


def numbers(value: Any) -> list[float]:
    """All numbers in a record."""
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers(one)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("tool", "arguments", "name", "rows"), RUNS, ids=[name for _, _, name, _ in RUNS])
def test_a_benchmark_leaves_records_and_a_table(
    tool: Any, arguments: list[str], name: str, rows: list[str], tmp_path: pathlib.Path, capsys: Any
) -> None:
    file = tmp_path / "speed.json"
    assert command.run(tool.main, tool.FLAGS, [*arguments, f"--json={file}"]) == 0
    records = read_results(file)[name]["records"]
    shown = [record.get("way") or record.get("method") or record["slices"] for record in records]
    assert shown[: len(rows)] == rows
    assert all(min(numbers(record)) >= 0 and max(numbers(record)) > 0 for record in records)
    assert len(capsys.readouterr().out.splitlines()) > len(rows)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch: pip install -e .[torch]")
@pytest.mark.parametrize("model", ["gpt:tiny", "bert:tiny", "resnet:tiny"])
def test_pytorch_trains_alike(model: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "speed.json"
    size = [f"--models={model}", "--micro_batches=2", "--samples=2", "--noxla", "--schedules=dapple_a", "--trials=1"]
    size += ["--torch_compiled="]
    assert command.run(bench_torch.main, bench_torch.FLAGS, [*size, "--rounds=2", f"--json={file}"]) == 0
    records = read_results(file)[f"torch {model} float32 2"]["records"]
    finalists = {record["kind"]: record for record in records if "rounds" in record}
    assert len(records) == 8 and list(finalists) == ["torch", "ours"]
    for record in records:
        assert np.allclose(record["losses"], records[0]["losses"], rtol=bench_torch.TOLERANCES["float32"])


@pytest.mark.thorough
@pytest.mark.slow
def test_links_and_steps_with_and_without_tls() -> None:
    pytest.importorskip("cryptography", reason="needs certificates: cryptography isn't installed (make venv)")
    options = ["--mib=2", "--repeats=1", "--steps=1", "--width=8", "--batch=8"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.evaluation.bench_tls", *options],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    for name, unit in (("link", "MiB/s"), ("step that sends 0.000244 MiB forward and as much backward", "ms")):
        assert re.search(rf"^{name}, TLS: median [0-9.e+]+ {unit} ", done.stdout, re.M)
        assert re.search(rf"^{name}: TLS / bare [0-9.e+]+$", done.stdout, re.M)


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
        (bench_overhead, ["--models=huge"], "choose from small, middle"),
        (bench_cluster, ["--ways=slowly"], "unknown slowly; choose from copies"),
        (bench_cluster, ["--width=6"], "isn't a multiple of the 4 heads"),
        (bench_cluster, ["--parallel=none"], "1 or more"),
        (unlike_workers, ["--cores=0"], "a core for each worker"),
        (bench_torch, ["--torch_python=/nowhere/python"], "install the extra dapple_tf[torch]"),
        (bench_torch, ["--models=huge"], "unknown huge; choose from gpt"),
        (bench_torch, ["--samples=0"], "--samples=0: need whole numbers"),
        (bench_torch, ["--torch_schedules=dapple_a"], "choose from 1f1b, interleaved, zb_v"),
        (zoo, ["--models=Nothing"], "unknown Nothing"),
        (zoo, ["--micro_batches=x"], "--micro_batches"),
        (zoo, ["--optimizers=best"], "unknown best"),
        (zoo, ["--document=zoo.md"], "give both"),
    ],
)
def test_wrong_flags_are_told_before_anything_runs(
    tool: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(tool.main, tool.FLAGS, arguments) == 1
    assert message in capsys.readouterr().err


# ---- scale


@pytest.mark.slow
def test_planning_says_what_it_found() -> None:
    (record,) = bench_planner.records([2], [2], 1, 16)
    assert record["layers"] == 2 and record["of_first"] == 1.0 and record["planner_s"] > 0
    assert sum(record["replicas"]) == 2
    assert bench_planner.planned(400, 2, 16)[1] is None  # doesn't fit
    with pytest.raises(dapple.PlanError, match="12 devices don't fill servers of 8"):
        bench_planner.cluster_of(12)


@pytest.mark.thorough
@pytest.mark.slow  # A process of its own imports TensorFlow.
def test_a_preparation_is_the_sum_of_its_parts() -> None:
    options = {"replicas": 1, "layers": 2, "hidden": 8, "heads": 2, "vocabulary": 16, "sequence": 4}
    options |= {"schedule": "gpipe", "optimizer": "adam"}
    record = bench_preparation.apart(2, 2, options)
    assert record["preparation_s"] == pytest.approx(sum(record["parts_s"].values()))
    assert (record["devices"], record["micro_batches"], record["of_first"]) == (2, 2, 1.0)
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


@pytest.mark.thorough
@pytest.mark.slow
def test_a_model_is_rewritten_without_values() -> None:
    assert set(rewrite_models.FULL_SIZE) <= set(MODELS)
    rows = list(rewrite_models.rows_of("bert:tiny", find_model("bert:tiny"), [2, 4], ["straight"], "dapple_a"))
    assert [(row["stages"], row["replicas"], row["micro_batches"]) for row in rows] == [(2, 1, 2), (4, 1, 4)]
    for row in rows:
        assert row["step"]["function_nodes"] > row["step"]["functions"] > 0
        assert row["step"]["bytes"] < 4 * row["parameters"] + 2**20  # No weights are in it.


@pytest.mark.thorough
def test_recomputation_is_measured_in_turns() -> None:
    record = bench_recompute.measure("tiny", jit_compile=False, micro_batches=2, rounds=2, steps=1)
    assert record["peak_mb"]["none"] > record["peak_mb"]["min_cut"] > record["peak_mb"]["boundary"]


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
    assert bench_checkouts.table([record]).splitlines()[2] == "| it | 24.00 | 6.00 | 0.250 (0.250 to 0.250) |"
    (tmp_path / "now" / "tools" / "evaluation" / "bench_made_up.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"bench_made_up of .*now ended with code 3"):
        bench_checkouts.seconds_of(case, tmp_path / "now")


# ---- turns of several processes


def test_ratios_to_the_ceiling_and_to_the_strategy() -> None:
    bench_cluster.FLAGS([""])
    rates = {"copies": [10.0, 20.0], "pipeline_gpipe": [9.0, 18.0], "mirrored": [5.0, 10.0]}
    by_way = {record["way"]: record for record in bench_cluster.records_of(rates)}
    assert by_way["pipeline_gpipe"]["of_copies"] == Quartiles(0.9, 0.9, 0.9)
    assert by_way["pipeline_gpipe"]["of_mirrored"].median == pytest.approx(1.8)
    assert by_way["pipeline_gpipe"]["samples_per_s"].median == 13.5


def test_the_quietest_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    result, noise = quiet.with_noise(lambda: sum(range(10**6)))
    assert result == 499999500000 and 0 <= noise < 1000
    used = iter([0.5, 0.3, 0.05, 0.0])
    monkeypatch.setattr(quiet, "with_noise", lambda function: (function(), next(used)))
    calls = itertools.count()
    assert quiet.quietest(lambda: next(calls), 0.1, 5) == (2, 0.05)
    assert quiet.quietest(lambda: next(calls), 0.1, 1) == (3, 0.0)


def test_peers_answer_and_tell_why_they_dont() -> None:
    program = "import sys\nprint('here', flush=True)\nfor line in sys.stdin: print(2 * int(line), flush=True)"
    with contextlib.ExitStack() as stack:
        peers = Peers(stack, [[sys.executable, "-c", program]] * 2, greeted=True)
        assert peers.answers == ["here", "here"]
        assert peers(3) > 0 and peers.answers == ["6", "6"]
        with pytest.raises(PeersError, match=r"ended with code 1 instead of an answer; it said.*no memory"):
            Peers(stack, [[sys.executable, "-c", "raise SystemExit('no memory')"]], greeted=True)


def test_the_rank_of_the_last_stage_tells_the_loss() -> None:
    program = "import sys\nfor line in sys.stdin: print(sys.argv[1], flush=True)"
    answers = ['{"loss": null}', '{"loss": 2.5}']
    with contextlib.ExitStack() as stack:
        peers = Peers(stack, [[sys.executable, "-c", program, answer] for answer in answers])
        cores = os.sched_getaffinity(0)
        for pinned in (True, False):
            run = bench_torch.Run(peers, peers.processes, pinned=pinned)
            run(1)
            assert run.loss == 2.5
            placed = [os.sched_getaffinity(process) for process in peers.processes]
            assert all(len(own) == 1 for own in placed) if pinned else placed == [cores, cores]


def test_a_process_is_placed_with_its_threads_and_its_peak_has_its_children() -> None:
    program = (
        "import subprocess, sys, threading\n"
        "if len(sys.argv) > 1: child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
        "if len(sys.argv) > 1: child.stdout.readline()\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print(len(bytearray(50 << 20)), flush=True)\n"
    )
    pipe, core = subprocess.PIPE, min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", program, program], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peak = peak_mib([process.pid])
        place(process.pid, [core])
        threads = [int(thread) for thread in os.listdir(f"/proc/{process.pid}/task")]
        assert len(threads) >= 2 and all(os.sched_getaffinity(thread) == {core} for thread in threads)
        process.communicate()
    assert 100 < peak < 250
    assert peak_mib([process.pid]) == 0  # It has ended.


# ---- beside PyTorch


@pytest.mark.parametrize("name", ["gpt:tiny", "bert:tiny", "resnet:tiny"])
def test_models_and_their_data_fit_each_other(name: str) -> None:
    described = bench_models.MODELS[name]
    model, (x, y) = described.make(dtype="bfloat16"), described.batch(3)
    assert {tensor.name for tensor in model.inputs} == described.data(1)[0].keys()
    assert model.predict(x, verbose=0).shape[:-1] == y.shape
    assert model.dtype_policy.name == "mixed_bfloat16"
    names = [layer.name for layer in model.layers]
    cuts = described.cuts(4)
    assert len(cuts) == 3 and [*sorted(cuts, key=names.index)] == cuts


def test_ways_have_names_kinds_and_the_stages_of_pytorchs() -> None:
    ways = all_ways(["1f1b"], ["zb_v"], ["dapple_a"], xla=True)
    assert [(way.name, way.kind) for way in ways[::2]] == [
        ("torch_1f1b", "torch"),
        ("torch_zb_v_compiled", "torch_compiled"),
        ("ours_dapple_a", "ours"),
        ("ours_dapple_a_xla", "ours_xla"),
    ]
    assert [way.name for way in ways[1::2]] == [f"{way.name}_unpinned" for way in ways[::2]]
    model = bench_models.MODELS["gpt"]
    for ours, theirs in (("zb_v", "zb_v"), ("interleaved", "interleaved"), ("dapple_a", "1f1b")):
        stages = tuple((device,) for device in Way(False, theirs).devices)
        assert Way(True, ours).plan(model, 4, 8).devices == stages
    with pytest.raises(ValueError, match="8 blocks of the gpt don't make 9 stages"):
        model.ranges(9)
    # One slow turn doesn't cost a way its place, and kinds that weren't tried have no best one.
    steady, slower, own = Way(False, "1f1b"), Way(False, "zb_v"), Way(True, "dapple_a")
    assert best({slower: [2.0, 2.0, 2.0], steady: [1.0, 1.0, 9.0], own: [3.0, 3.0, 3.0]}) == [steady, own]


def test_ways_that_train_otherwise_are_told() -> None:
    case = bench_torch.Case("gpt", "float32", 8, 16)
    losses = {Way(False, "1f1b"): [5.0, 4.0], Way(True, "zb_v"): [5.001, 4.001]}
    bench_torch.check_alike(losses, case)
    losses[Way(True, "dapple_a")] = [5.0, 4.1]
    with pytest.raises(PeersError, match=r"torch_1f1b and ours_dapple_a don't train the gpt alike: .*4\.1\]"):
        bench_torch.check_alike(losses, case)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_strategys_compiled_step_is_that_of_keras() -> None:
    """XLA doesn't convert the all-reduce of an update under the strategy, so that a step of Keras fails there."""
    made = bench_models.MODELS["gpt:tiny"]
    x, y = made.batch(4)
    plain, compiled = made.make(), made.make()
    step = bench_cluster.compiled_step(compiled)
    for _ in range(2):
        plain.train_on_batch(x, y)
        step((x, y))
    for one, other in zip(plain.get_weights(), compiled.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)
    assert float(compiled.metrics[0].result()) > 0


def test_a_micro_batch_costs_what_its_size_does_not_explain() -> None:
    """300 us for each micro-batch, and 100 for each of its samples."""
    settings = {"model": "gpt", "dtype": "float32", "way": "torch_x", "kind": "torch", "rounds": 2, "peak_mib": 500.0}
    records = [
        {**settings, "samples": size, "samples_per_s": Quartiles(rate, rate, rate)}
        for size in (1, 2, 4, 8)
        for rate in (1e6 * size / (300 + 100 * size),)
    ]
    assert torch_report.costs(records) == (pytest.approx(300), pytest.approx(100))
