"""Benchmarks: the driver, its results' file, and every case in its smallest form; no time is asserted."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest
from absl import app

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import bench, bench_training, zoo
from dapple_tf.tools.evaluation.bench_models import MODELS, BenchModel
from dapple_tf.tools.evaluation.bench_report import Quartiles, check_output, own_commit, read_results, write_results
from dapple_tf.tools.evaluation.bench_scale import cluster_of
from dapple_tf.tools.evaluation.bench_torch import check_alike
from dapple_tf.tools.evaluation.peers import Peers, PeersError
from dapple_tf.tools.machine_facts import machine_facts

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def run(*arguments: str) -> int:
    return command.run(bench.main, bench.FLAGS, arguments)


# ---- the driver


def counting(order: list[str], name: str, *values: float) -> bench.Turn:
    numbers = iter(values)

    def turn() -> dict[str, float]:
        order.append(name)
        return {"step_ms": next(numbers)}

    return turn


def test_variants_take_turns_in_both_orders_and_ratios_are_of_the_same_round() -> None:
    order: list[str] = []
    turns = {"a": counting(order, "a", 9.0, 1.0, 2.0, 4.0), "b": counting(order, "b", 9.0, 2.0, 4.0, 8.0)}
    rows = bench.measured(turns, 3, warm_up=True)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert rows[0] == {"variant": "a", "step_ms": Quartiles(1.5, 2.0, 3.0)}
    assert rows[1] == {
        "variant": "b",
        "step_ms": Quartiles(3.0, 4.0, 6.0),
        "step_ms_ratio": Quartiles(2.0, 2.0, 2.0),
    }
    assert bench.table(rows).splitlines()[-1] == "| b | 4 (3 to 6) | 2 |"


def test_medians_beyond_their_limits_are_told() -> None:
    rows = [{"variant": "a", "error": Quartiles(-0.3, -0.2, 0.0)}, {"variant": "b", "error": Quartiles(0.0, 0.1, 0.3)}]
    assert bench.beyond(rows, {"error": 0.1}) == ["a: error is -0.2, limit 0.1"]


def test_settings_have_the_types_of_their_defaults() -> None:
    case = bench.Case("", lambda stack, settings: {}, {"model": "gpt", "steps": 3, "jit_compile": False})
    given = bench.settings_of(case, ["steps=5", "jit_compile=true", "other=1"])
    assert given == {"model": "gpt", "steps": 5, "jit_compile": True}


def test_an_older_checkout_stands_beside_this_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs its own program: their numbers differ as their sources do."""
    for name, seconds in (("before", 8.0), ("now", 2.0)):
        folder = tmp_path / name / "tools" / "evaluation"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
        numbers = f"{{'step_s': {seconds} * ('--set=of=3' in sys.argv)}}"
        (folder / "bench.py").write_text(f"import json, sys\nprint(sys.argv)\nprint(json.dumps({numbers}))")
    monkeypatch.setattr(bench, "ROOT", tmp_path / "now")
    case = bench.Case("", lambda stack, settings: {"it": dict}, {"of": 3})
    before, now = bench.run_case("made up", case, case.settings, 2, before=tmp_path / "before")
    assert (before["variant"], before["step_s"]) == ("it, before", Quartiles(8.0, 8.0, 8.0))
    assert (now["variant"], now["step_s_ratio"]) == ("it, now", Quartiles(0.25, 0.25, 0.25))
    (tmp_path / "now" / "tools" / "evaluation" / "bench.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"made up, it in .*now ended with code 3"):
        bench.in_process("made up", "it", {})


TINY_TRAINING = ["--set=model=dense", "--set=steps=1"]
SMALL = ["--set=samples=1", "--set=micro_batches=2"]


@pytest.mark.parametrize(
    ("case", "settings", "rows"),
    [
        ("overhead", ["--set=method=fit", "--set=batch=4"], ["keras", "ours"]),
        ("monitoring", ["--set=batch=8"], ["without", "with the monitor"]),
        ("recompute", SMALL, ["none", "min_cut", "boundary"]),
        (
            "prediction",
            ["--set=batch=8", "--set=schedules=zb_v", "--only=one device", "--only=the planner's", "--only=zb_v"],
            ["one device", "the planner's", "zb_v"],
        ),
        (
            "simulator",
            ["--set=shapes=2x4,6x1", "--set=schedules=gpipe,zb_v", "--set=replicas=6", "--set=networks=0.3"],
            ["2x4, gpipe, 6 replicas, network 0.3", "6x1, zb_v, 6 replicas, network 0.3"],
        ),
        ("client", SMALL, ["two stages", "data parallel"]),
        ("cluster", [*SMALL, "--set=peers=false", "--set=schedules=gpipe"], ["copies", "pipeline, gpipe"]),
        ("planner", ["--set=layers=2", "--set=devices=2"], ["2 layers, 2 devices"]),
        (
            "memory",
            ["--set=micro_batches=2", "--set=schedules=zb_v", "--only=zb_v, M = 2", "--only=shares"],
            ["zb_v, M = 2", "shares"],
        ),
        ("rewriting", ["--set=models=ffnn:tiny", "--set=stages=2", "--set=replicas=2"], ["ffnn:tiny"]),
    ],
)
def test_a_case_leaves_rows_and_a_table(
    case: str, settings: list[str], rows: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = bench.known_cases()[case].settings
    common = [text for text in TINY_TRAINING if text.split("=")[1] in known]
    file = tmp_path / "speed.json"
    beyond = run(f"--cases={case}", *common, *settings, "--rounds=1", f"--json={file}")
    assert not beyond or bench.known_cases()[case].limits
    (entry,) = read_results(file).values()
    assert [row["variant"] for row in entry["records"]][: len(rows)] == rows
    numbers = [value["median"] for row in entry["records"] for value in row.values() if isinstance(value, dict)]
    assert numbers and max(numbers) > 0
    assert len(capsys.readouterr().out.splitlines()) > len(rows)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch: pip install -e .[torch]")
def test_pytorch_trains_alike(capsys: pytest.CaptureFixture[str]) -> None:
    ways = "--set=ways=torch, 1f1b;ours, dapple_a"
    assert run("--cases=torch", "--set=model=gpt:tiny", *SMALL, ways, "--rounds=1") == 0
    assert "| ours, dapple_a |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        (bench, ["--cases=slow"], "unknown slow; choose from overhead"),
        (bench, ["--cases=overhead", "--set=size=3"], "--set=size=3: there are batch, jit_compile"),
        (bench, ["--cases=overhead", "--set=steps=x"], "--set=steps=x: need a value such as 10"),
        (bench, ["--cases=rewriting", "--only=lenet"], "--only: lenet: rewriting has gpt:medium"),
        (bench, ["--cases=overhead", "--before=missing"], "make one with `git worktree add`"),
        (bench, ["--cases=overhead", "--json=missing/file.json"], "no folder missing"),
        (zoo, ["--models=Nothing"], "unknown Nothing"),
        (zoo, ["--document=zoo.md"], "give both"),
    ],
)
def test_wrong_flags_are_told_before_anything_runs(
    tool: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(tool.main, tool.FLAGS, arguments) == 1
    assert message in capsys.readouterr().err


# ---- parts of cases


@pytest.mark.parametrize("name", ["dense", "gpt:tiny", "resnet:tiny"])
def test_models_and_their_data_fit_each_other(name: str) -> None:
    described = MODELS[name]
    model, (x, y) = described.make(), described.batch(3)
    assert model(x).shape[:-1] == y.shape
    names = [layer.name for layer in model.layers]
    cuts = described.cuts(4)
    assert len(cuts) == 3 and [*sorted(cuts, key=names.index)] == cuts
    with pytest.raises(ValueError, match=r"4 blocks of the .* don't make 5 stages"):
        described.ranges(5)


def test_servers_of_v100s_are_filled() -> None:
    assert [device.server for device in cluster_of(16).devices] == [0] * 8 + [1] * 8
    with pytest.raises(dapple.PlanError, match="12 devices don't fill servers of 8"):
        cluster_of(12)


def test_peers_answer_and_tell_why_they_dont() -> None:
    program = "import sys\nprint('here', flush=True)\nfor line in sys.stdin: print(2 * int(line), flush=True)"
    with contextlib.ExitStack() as stack:
        peers = Peers(stack, [[sys.executable, "-c", program]] * 2)
        assert peers.answers == ["here", "here"]
        assert peers(3) > 0 and peers.answers == ["6", "6"]
        with pytest.raises(PeersError, match=r"ended with code 1 instead of an answer; it said.*no memory"):
            Peers(stack, [[sys.executable, "-c", "raise SystemExit('no memory')"]])


def test_ways_that_train_otherwise_are_told() -> None:
    check_alike({"torch, 1f1b": 5.0, "ours, zb_v": 5.001})
    with pytest.raises(PeersError, match=r"the first has a loss of 5.0, {'ours, zb_v': 5.1}"):
        check_alike({"torch, 1f1b": 5.0, "ours, zb_v": 5.1})


def test_the_strategys_compiled_step_is_that_of_keras() -> None:
    """XLA doesn't convert the all-reduce of an update under the strategy, so that a step of Keras fails there."""
    described = BenchModel("dense", {"features": 4, "width": 4, "depth": 1, "classes": 3})
    x, y = described.batch(4)
    plain, compiled = described.make(), described.make()
    plain.run_eagerly = True
    plain.train_on_batch(x, y)
    bench_training.compiled_step(compiled)((x, y))
    for one, other in zip(plain.get_weights(), compiled.get_weights(), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)
    assert float(compiled.metrics[0].result()) > 0


# ---- results


def test_a_file_holds_the_newest_results_of_each_benchmark_and_other_files_are_left_alone(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "results.json"
    write_results(file, "one", [{"ratio": Quartiles(0.5, 1.0, 2.0)}])
    write_results(file, "two", [{"steps": 3}])
    write_results(file, "one", [{"ratio": Quartiles(0.5, 1.5, 2.0)}])
    results = read_results(file)
    assert [*results] == ["one", "two"]
    assert results["one"]["records"] == [{"ratio": {"low": 0.5, "median": 1.5, "high": 2.0}}]
    assert results["one"]["commit"] == own_commit()
    (tmp_path / "plan.json").write_text('{"devices": [[0]]}')
    (tmp_path / "text.json").write_text("no JSON")
    for name, what in (("plan.json", "something other"), ("text.json", "isn't JSON")):
        with pytest.raises(ValueError, match=what):
            write_results(tmp_path / name, "one", [])
        with pytest.raises(app.UsageError, match=what):
            check_output(str(tmp_path / name))
    with pytest.raises(TypeError, match="no place in a record"):
        write_results(tmp_path / "fresh.json", "one", [{"path": tmp_path}])
    assert (tmp_path / "plan.json").read_text() == '{"devices": [[0]]}'


def test_the_commit_of_the_code_is_recorded(tmp_path: pathlib.Path) -> None:
    """No document of measured numbers said of which commit they are."""
    assert own_commit(tmp_path) is None, "not a repository"
    git = ("git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org")
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    (tmp_path / "code.py").write_text("1\n")
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


def test_facts_are_about_the_machine_and_nobody() -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1 and facts["memory_gib"] > 0 and facts["cpu"]
    assert {"python", "tensorflow", "keras", "numpy"} <= facts["versions"].keys()
    text = json.dumps(facts)
    assert socket.gethostname() not in text and str(pathlib.Path.home()) not in text


def test_pages_are_those_of_their_numbers() -> None:
    page = RESULTS / "zoo.md"
    assert page.read_text(encoding="utf-8") == zoo.document(read_results(RESULTS / "zoo.json"))
