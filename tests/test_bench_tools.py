"""The benchmarks in their smallest form, and the arithmetic of their ratios; no time is asserted."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import sys

import pytest

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import bench_client, bench_cluster, bench_overhead, bench_torch, quiet, unlike_workers
from dapple_tf.tools.evaluation.bench_gpt import gpt_size, make_data, make_model
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.peers import Peers, PeersError
from dapple_tf.tools.evaluation.ratios import Quartiles


@pytest.mark.thorough
@pytest.mark.slow
def test_overhead_is_measured_against_plain_keras(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.json"
    arguments = [
        "--models=tiny",
        "--rounds=2",
        "--turn_ms=5",
        "--epoch_steps=2",
        "--jit_compile=false",
        f"--json={file}",
    ]
    assert command.run(bench_overhead.main, bench_overhead.FLAGS, arguments) == 0
    records = read_results(file)["overhead"]["records"]
    assert [(record["model"], record["method"]) for record in records] == [("tiny", "train_on_batch"), ("tiny", "fit")]
    for record in records:
        low, median, high = (record["ratio"][key] for key in ("low", "median", "high"))
        assert 0 < low <= median <= high
        assert record["within_bound"] == (median <= bench_overhead.BOUND)
        assert record["keras_ms"] > 0 and record["ours_ms"] > 0 and not record["jit_compile"]
    assert capsys.readouterr().out.count("| tiny |") == 2


@pytest.mark.thorough
@pytest.mark.slow
def test_two_workers_train_in_turns(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "speed.json"
    size = ["--blocks=2", "--width=8", "--sequence=4", "--micro_batches=2", "--samples=2"]
    what = ["--ways=copies,pipeline", "--schedules=dapple_a", "--rounds=2", f"--json={file}"]
    assert command.run(bench_cluster.main, bench_cluster.FLAGS, [*size, *what]) == 0
    copies, pipeline = read_results(file)["cluster"]["records"]
    assert copies["of_copies"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert pipeline["way"] == "pipeline_dapple_a" and pipeline["of_copies"]["median"] > 0
    assert "of_mirrored" not in pipeline


@pytest.mark.thorough
@pytest.mark.slow
def test_the_client_of_two_workers_is_measured(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.json"
    arguments = ["--models=gpt:tiny", "--rounds=2", "--steps=2", f"--json={file}"]
    assert command.run(bench_client.main, bench_client.FLAGS, arguments) == 0
    records = read_results(file)["client"]["records"]
    ways = [f"{plan}, {method}" for plan in ("two stages", "data parallel") for method in ("train_on_batch", "fit")]
    assert [record["way"] for record in records] == ways
    for record in records:
        step, outside, processor = (record[f"{key}_ms"]["median"] for key in ("step", "outside", "processor"))
        assert 0 < outside < step and processor > 0
    assert capsys.readouterr().out.count("| gpt:tiny |") == 4


def test_ratios_to_the_ceiling_and_to_the_strategy() -> None:
    bench_cluster.FLAGS([""])
    rates = {"copies": [10.0, 20.0], "pipeline_gpipe": [9.0, 18.0], "mirrored": [5.0, 10.0]}
    by_way = {record["way"]: record for record in bench_cluster.records_of(rates)}
    assert by_way["pipeline_gpipe"]["of_copies"] == Quartiles(0.9, 0.9, 0.9)
    assert by_way["pipeline_gpipe"]["of_mirrored"].median == pytest.approx(1.8)
    assert by_way["pipeline_gpipe"]["samples_per_s"].median == 13.5
    assert "| pipeline_gpipe | 13.5 | 0.900 (0.900 to 0.900) |" in bench_cluster.table(list(by_way.values()))


def test_flags_are_checked_before_anything_starts(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module, arguments, said in (
        (bench_overhead, ["--models=huge"], "choose from small, middle"),
        (bench_overhead, [f"--json={tmp_path}/missing/a.json"], "there is no folder"),
        (bench_cluster, ["--ways=slowly"], "unknown slowly; choose from copies"),
        (bench_cluster, ["--width=6"], "isn't a multiple of the 4 heads"),
        (bench_cluster, ["--parallel=none"], "1 or more"),
        (unlike_workers, ["--cores=0"], "a core for each worker"),
        (bench_torch, ["--torch_python=/nowhere/python"], "install the extra dapple_tf[torch]"),
        (bench_torch, ["--models=huge"], "unknown huge; choose from gpt"),
        (bench_torch, ["--samples=0"], "--samples=0: need whole numbers"),
        (bench_torch, ["--torch_schedules=dapple_a"], "choose from 1f1b, interleaved, zb_v"),
    ):
        assert command.run(module.main, module.FLAGS, arguments) == 1
        assert said in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.slow
def test_unlike_workers_train_in_turns(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.json"
    arguments = ["--batch=8", "--rounds=2", "--quiet=1", "--tries=1", f"--json={file}"]
    assert command.run(unlike_workers.main, unlike_workers.FLAGS, arguments) == 0
    *emulated, equal, by_speed = read_results(file)["unlike_workers"]["records"]
    assert [row["slices"] for row in emulated] == ["12+12+12+12", "16+16+8+8"]
    assert equal["slices"] == "4+4" and equal["speedup"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert by_speed["speed"] > 0 and by_speed["speedup"]["median"] > 0
    assert "vgg, by speed slices" in capsys.readouterr().out


def test_the_quietest_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.5, 0.3, 0.05, 0.0])
    monkeypatch.setattr(quiet, "with_noise", lambda function: (function(), next(used)))
    calls = itertools.count()
    assert quiet.quietest(lambda: next(calls), 0.1, 5) == (2, 0.05)
    assert quiet.quietest(lambda: next(calls), 0.1, 1) == (3, 0.0)


def test_other_processes_use_some_cores() -> None:
    result, noise = quiet.with_noise(lambda: sum(range(10**6)))
    assert result == 499999500000 and 0 <= noise < 1000


@pytest.mark.slow
def test_models_of_turns_are_equal() -> None:
    size = gpt_size(blocks=1, width=8, sequence=4)
    one, other = (make_model(size).get_weights() for _ in range(2))
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
    assert sum(weight.size for weight in one) == size.parameters
    x, y = make_data(size, 3)
    assert x.shape == y.shape == (3, 4) and (x[:, 1:] == y[:, :-1]).all()


def test_peers_answer_and_tell_why_they_dont() -> None:
    program = "import sys\nprint('here', flush=True)\nfor line in sys.stdin: print(2 * int(line), flush=True)"
    with contextlib.ExitStack() as stack:
        peers = Peers(stack, [[sys.executable, "-c", program]] * 2, greeted=True)
        assert peers.answers == ["here", "here"]
        assert peers(3) > 0 and peers.answers == ["6", "6"]
        with pytest.raises(PeersError, match=r"ended with code 1 instead of an answer; it said.*no memory"):
            Peers(stack, [[sys.executable, "-c", "raise SystemExit('no memory')"]], greeted=True)
