"""Command lines: what programs print and write, beside what the library says, and mistakes, each in a line."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import planned_hardware as given
import pytest
from models_for_tests import plan as plan_of_three

import dapple_tf as dapple
from dapple_tf.automatic import Planned
from dapple_tf.describe.profile_text import load_text
from dapple_tf.output_folder import LIST
from dapple_tf.tools import (
    command,
    dump_graph,
    make_data,
    measure_links,
    plan,
    profile,
    simulate,
    train,
    train_gpt,
    what_if,
)
from dapple_tf.tools.shapes import cuts_by_profile
from dapple_tf.tools.variants import Hardware

CLASSIFIER = "--model=models_for_tests:classifier"
BATCH = "--global_batch_size=8"
SMALL_GPT = ("--depth=1", "--width=8", "--heads=1", "--output_dir=out")

MISTAKES: dict[Any, list[tuple[list[str], str]]] = {
    plan: [
        ([], "--global_batch_size isn't given"),
        ([BATCH], "neither --profile nor --model is given"),
        ([BATCH, "--profile={p}", "--model=gpt"], "both --profile and --model are given"),
        ([BATCH, "--profile={p}", "--schedule=best"], "--schedule=best: unknown; use some of gpipe"),
        ([BATCH, "--profile={p}", "--schedule=auto,gpipe"], "--schedule=auto,gpipe: auto is all"),
        ([BATCH, "--profile={p}", "--recompute=all"], "--recompute=all: unknown; use some of none"),
        ([BATCH, "--profile={p}", "--micro_batches=a"], "--micro_batches=a: give whole numbers"),
        ([BATCH, "--profile={p}", "--micro_batches=9"], "8 samples can't be cut into 9 micro-batches"),
        ([BATCH, "--profile={p}", "--reverse_first_k=-1"], "--reverse_first_k=-1: give a number"),
        ([BATCH, "--profile={p}", "--reverse_first_k=²"], "--reverse_first_k=²: give a number"),
        ([BATCH, "--profile="], "--profile isn't given"),
        ([BATCH, "--profile={p}", "--save_profile=x"], "--save_profile=x is for --model"),
        ([BATCH, "--model=gpt", "--cluster={c}"], "--model can't be measured on it; give --profile"),
        ([BATCH, "--profile={c}"], "'format' is 'dapple_tf.cluster/1'; this version reads"),
        ([BATCH, "--profile={p}", "--cluster={p}"], "--cluster={p}: unknown key 'model'"),
        ([BATCH, "--profile={p}", "--cluster=x.json"], "--cluster=x.json: No such file"),
    ],
    simulate: [
        (["--compare=gpipe,best"], "--compare=best: unknown schedule; use some of gpipe"),
        (["--compare=zb_v"], "--compare=zb_v: this plan can have none of these schedules"),
        (["--output_dir={p}"], "is a file; give a folder"),
        (["--speed=0"], "speed is 0.0; it must be above 0"),
        (["--inter_bandwidth=-1"], "inter_bandwidth is -1.0 bytes/s; it must be above 0"),
        (["--cluster=cpu:2"], "plan puts stage 0 on device 2, but the cluster has 2 devices"),
        (["--micro_batches=25"], "can't be cut into 25 micro-batches"),
        (["--schedule=zb_v"], "zb_v wants stages i and"),
        (["--width=10"], "flag --width=10"),
    ],
    what_if: [
        (["--plan=auto"], "--plan=auto needs --global_batch_size"),
        (["--micro_batches=25"], "can't be cut into 25 micro-batches"),
        (["--cluster=cpu:2"], "plan puts stage 0 on device 2"),
        (["--micro_batches=5000", "--global_batch_size=50000"], "this page simulates up to 8,192"),
        (["--port=70000"], "flag --port=70000"),
        (["--profile=none"], "--profile=none: No such file"),
    ],
    profile: [
        (["--batch_size=0"], "--batch_size=0: give whole numbers from 1 on"),
        (["--batch_size=2,x"], "--batch_size=2,x: give whole numbers"),
        (["--batch_size="], "--batch_size=: give whole numbers"),
        (["--device=2", "--cluster=cpu:2"], "--device=2: the cluster has 2 devices"),
        (["--output=/no/such/folder/p.json"], "--output=/no/such/folder/p.json: there is no such folder"),
        (["--repeats=0"], "flag --repeats=0"),
        (["--model=gtp"], "--model=gtp: unknown model 'gtp'; did you mean 'gpt'?"),
    ],
    dump_graph: [
        ([CLASSIFIER, "--plan=1"], "--output_dir isn't given"),
        ([CLASSIFIER, "--output_dir=out"], "--plan isn't given"),
        ([CLASSIFIER, "--plan=plan.json", "--output_dir=out"], "plan.json"),
        ([CLASSIFIER, "--plan=1:1", "--output_dir=out", "--cluster=cpu:1"], "plan puts stage 1 on device 1, but the"),
        ([CLASSIFIER, "--plan=1:1:1:1:1", "--output_dir=out", "--cluster=cpu:5"], "too few for 5 stages"),
        ([CLASSIFIER, "--plan=1", "--cluster=cpu:1", "--output_dir={folder}"], "index.html would be overwritten"),
    ],
    measure_links: [
        ([], "which workers? Give --addresses=host:port"),
        (["--local=1", "--addresses=a:1"], "exclude each other"),
        (["--addresses=127.0.0.1:1"], "worker 0 (127.0.0.1:1) can't be reached"),
        (["--addresses=nonsense"], "address 0 is 'nonsense'"),
        (["--local=1", "--workers_per_server=2"], "=2: 1 worker can't be divided into servers of 2"),
        (["--local=1", "--out=/no/such/folder/x.json"], "no such folder"),
    ],
    make_data: [
        ([], "give one of --images, --text, --check, --sample"),
        (["--images=a", "--text=b"], "give one of --images, --text, --check, --sample, not --images=a and --text=b"),
        (["--text=none.txt"], "--output isn't given"),
        (["--text=none.txt", "--output={folder}/new"], "there is no file or folder none.txt"),
        (["--images=none", "--output={folder}/new"], "--images=none isn't a folder"),
        (["--text=none.txt", "--output={folder}"], "isn't empty; name another"),
    ],
    train_gpt: [
        ([*SMALL_GPT, "--plan=1:1:1:1:1:1"], "too few for 6 stages"),
        ([*SMALL_GPT, "--plan=3:"], "such as 3:1"),
        ([*SMALL_GPT, "--plan=0:1"], "such as 3:1"),
    ],
    train: [
        (["--no_such_flag=1"], "Unknown command line flag 'no_such_flag'"),
        (["something"], "unexpected arguments: something; everything is given by flags, see --help"),
        (["--resume"], "--resume goes on from a checkpoint: give --checkpoint_dir"),
        (["--checkpoint_every=5"], "--checkpoint_every=5 needs --checkpoint_dir"),
        (["--nomeasure"], "--nomeasure: --plan=auto needs a profile"),
        (["--by_trial", "--plan=1:1"], "--by_trial is for --plan=auto without --placement=fd_dps"),
        (["--plan=1:x"], "--plan=1:x: need replicas per stage with colons between them"),
        (["--plan=1:"], "--plan=1:: need replicas per stage"),
        (["--model=resnett:tiny"], "PYTHONPATH; did you mean 'resnet:tiny'?"),
        (["--cluster=cpu:1", "--plan=1:1", "--model=vgg:tiny"], "--plan=1:1: plan puts stage 1 on device 1"),
        (["--profile=none.json"], "--profile=none.json: No such file"),
        (["--dataset=patterns", "--plan=1:1", "--nomeasure", "--model=gpt:tiny"], "'patterns' are for models that"),
        (["--steps=0"], "flag --steps=0"),
        (["--learning_rate=nan"], "--learning_rate=nan: it must be finite"),
        ([f"--log_dir={__file__}"], f"--log_dir={__file__} is a file; give a folder"),
        (["--plan="], "--plan isn't given"),
        (["--faults=hope"], "flag --faults=hope"),
        (["--placement=hope"], "flag --placement=hope"),
        (
            ["--placement=fd_dps", "--model=vgg:tiny", "--cluster=cpu:1", BATCH, "--micro_batches=9"],
            "--placement=fd_dps: a global batch of 8 samples can't be cut into 9 micro-batches",
        ),
        *(
            ([BATCH, "--benchmark_steps=5", flag], f"{flag.partition('=')[0]}: --benchmark_steps only measures steps")
            for flag in ("--epochs=2", "--steps=5", "--checkpoint_dir=there", "--validation_steps=2")
        ),
    ],
}


@pytest.fixture
def files(tmp_path: pathlib.Path) -> given.Files:
    return given.write(tmp_path)


def run(tool: Any, *arguments: str) -> int:
    return command.run(tool.main, tool.FLAGS, arguments)


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [(tool, arguments, message) for tool, rows in MISTAKES.items() for arguments, message in rows],
)
def test_mistakes_are_told_in_a_line_and_nothing_is_written(
    tool: Any,
    arguments: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    written, work, taken = (tmp_path / name for name in ("given", "work", "taken"))
    for folder in (written, work, taken):
        folder.mkdir()
    (taken / "index.html").write_text("mine")
    monkeypatch.chdir(work)
    files = given.write(written)
    names = {"p": files.profile, "c": files.cluster, "folder": taken}
    common = files.flags if tool in (simulate, what_if) else ["--output_dir=out"] if tool is train else []
    assert run(tool, *common, *(argument.format(**names) for argument in arguments)) == 1
    said = capsys.readouterr().err
    assert message.format(**names) in said and "Traceback" not in said
    assert list(work.iterdir()) == [] and (taken / "index.html").read_text() == "mine"


# ---- plan


@pytest.mark.slow
def test_the_planners_plan(files: given.Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    common = [f"--profile={files.profile}", f"--cluster={files.cluster}", "--global_batch_size=24", f"--output={out}"]
    assert run(plan, *common) == 0
    expected = dapple.plan(given.profile(), given.cluster(), 24)
    assert dapple.Plan.load(out) == expected
    printed = capsys.readouterr().out
    assert str(expected) in printed  # with the reasons
    assert "expected step" in printed and str(given.cluster()) in printed
    assert f"--plan={out} --profile={files.profile} --cluster={files.cluster}" in printed
    assert run(plan, *common, "--micro_batches=4", "--schedule=gpipe", "--recompute=boundary", "--jit_compile") == 0
    loaded = dapple.Plan.load(out)
    assert (loaded.micro_batches, loaded.recompute, loaded.jit_compile) == (4, "boundary", True)


def test_models_are_measured_and_planned(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def planned(model: Any, cluster: dapple.Cluster, batch: int, **options: Any) -> Planned:
        calls.append({"model": model.name, "devices": cluster.num_devices, "batch": batch} | options)
        return Planned(given.plan(), given.profile(), given.cluster())

    monkeypatch.setattr("dapple_tf.automatic.plan_model", planned)
    names = {name: tmp_path / f"{name}.json" for name in ("output", "save_profile", "save_cluster")}
    outputs = [f"--{name}={path}" for name, path in names.items()]
    arguments = ["--model=vgg:tiny", "--cluster=cpu:3", "--global_batch_size=12", "--schedule=gpipe", *outputs]
    assert run(plan, *arguments) == 0
    (call,) = calls
    assert (call["model"], call["devices"], call["batch"], call["schedule"]) == ("vgg", 3, 12, ["gpipe"])
    assert len(call["x"]) == len(call["y"]) == 6  # the largest slice that is profiled
    assert dapple.Plan.load(names["output"]) == given.plan()
    assert dapple.Profile.load(names["save_profile"]) == given.profile()
    assert dapple.Cluster.load(names["save_cluster"]) == given.cluster()
    assert f"--profile={names['save_profile']} --cluster={names['save_cluster']}" in capsys.readouterr().out


# ---- simulate


def simulated(plan: dapple.Plan, **hardware: float) -> dapple.Simulation:
    return dapple.simulate(plan, given.profile(), Hardware(**hardware).of(given.cluster()))


def test_a_simulation_is_printed_and_written(
    files: given.Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    assert run(simulate, *files.flags, "--width=80", f"--output_dir={out}", "--micro_batches=3") == 0
    printed, changed = capsys.readouterr().out, given.plan(micro_batches=3)
    assert f"{changed}\n\n{simulated(changed)}\n" in printed
    assert max(len(line) for line in printed.splitlines() if "│" in line) == 80
    names = {path.name for path in out.iterdir()}
    assert names == {"timeline.txt", "timeline.html", "timeline.svg", "timeline.png", "trace.json", "plan.json"}
    assert dapple.Plan.load(out / "plan.json") == changed
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "small, dapple_a" in (out / "timeline.html").read_text()
    shape = ["--plan=1:1:1:1", "--global_batch_size=16", "--micro_batches=8", "--notimeline"]
    assert run(simulate, *files.flags[:2], *shape) == 0
    cuts = cuts_by_profile(given.profile(), (1, 1, 1, 1))
    printed = capsys.readouterr().out
    assert str(simulated(dapple.Plan.straight(cuts, 16, 8))) in printed and "│" not in printed


def test_schedules_compared(files: given.Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(simulate, *files.flags, "--compare=gpipe,zb_h1,zb_v,gpipe", "--notimeline", f"--output_dir={out}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small on 4 devices, 2 stages, 4 micro-batches of 6 samples"
    rows = {line.split()[0]: line.split() for line in lines[3:5]}
    for name in ("gpipe", "zb_h1"):
        assert rows[name][1] == f"{simulated(given.plan(schedule=name)).latency * 1e3:.4g}"
        assert rows[name][-1] == "yes"
    assert min(row[2] for row in rows.values()) == "1.000x"
    assert lines[5].startswith("zb_v: zb_v wants stages i and")
    assert lines[-1].startswith(f"In {out}: timeline.txt")
    text = (out / "timeline.txt").read_text()
    assert text.index("gpipe: ") < text.index("zb_h1: ")


# ---- profile


def test_table_of_layers(golden: Callable[[str, str], None]) -> None:
    golden("layer_table.txt", profile.layer_table(given.profile()) + "\n")


def test_what_is_asked_for_is_measured(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def measured(model: keras.Model, sizes: Sequence[int], **options: Any) -> dapple.Profile:
        calls.append({"model": model.name, "sizes": sizes} | options)
        return given.profile()

    monkeypatch.setattr(dapple, "profile", measured)
    out, text = tmp_path / "out.json", tmp_path / "out.txt"
    arguments = ["--model=vgg:tiny", "--batch_size=8,2,8", "--cluster=cpu:2", "--device=1", "--repeats=3", "--nocache"]
    assert run(profile, *arguments, f"--output={out}", f"--text_output={text}", "--text_batch_size=2") == 0
    (call,) = calls
    assert (call["model"], call["sizes"], call["device"]) == ("vgg", [2, 8], 1)
    assert (call["repeats"], call["cache"], call["cluster"].num_devices) == (3, False, 2)
    assert (call["x"].shape, call["y"].shape, call["sample_weight"]) == ((8, 8, 8, 3), (8,), None)
    assert dapple.Profile.load(out) == given.profile()
    assert len(load_text(text, batch_size=2).layers) == 6
    printed = capsys.readouterr().out
    assert profile.layer_table(given.profile()) in printed
    assert f"The profile is in {out}" in printed


# ---- dump_graph and measure_links


@pytest.mark.slow
def test_a_model_is_dumped(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a shape, and by a plan from a file for devices that don't exist."""
    folder, other = tmp_path / "out", tmp_path / "other"
    shape = ["--plan=2:1", BATCH, "--cluster=cpu:3"]
    assert run(dump_graph, CLASSIFIER, *shape, f"--output_dir={folder}") == 0
    assert f"The dump is in {folder}; open {folder / 'index.html'}" in capsys.readouterr().out
    made = dapple.Plan.load(folder / "plan.json")
    assert (made.replicas, made.global_batch_size, made.micro_batches) == ((2, 1), 8, 4)
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {LIST, "index.html", "09_update.pbtxt", "graph.html", "schedule.txt"} <= names
    given.cluster().save(tmp_path / "cluster.json")
    plan_of_three().save(tmp_path / "plan.json")
    described = [f"--plan={tmp_path / 'plan.json'}", f"--cluster={tmp_path / 'cluster.json'}"]
    assert run(dump_graph, CLASSIFIER, "--schedule=gpipe", *described, f"--output_dir={other}") == 0
    assert dapple.Plan.load(other / "plan.json").schedule == "gpipe"
    assert "/job:worker/replica:0/task:1/device:GPU:0" in (other / "train/09_update.pbtxt").read_text()


@pytest.mark.thorough
@pytest.mark.slow
def test_links_between_workers_that_share_machines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers and workers were taken for the same: a table had two of four addresses, and speeds of two."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    out = tmp_path / "cluster.json"
    quick = ["--mib=0.25", "--repeats=1", "--nocapacity", "--speeds", f"--out={out}"]
    assert run(measure_links, "--local=4", "--workers_per_server=2", *quick) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split() == ["server", "address", "devices", "memory", "of", "each"]
    assert [line.split()[0] for line in lines[1:5]] == ["0", "0", "1", "1"]
    assert [line.split()[2:4] for line in lines[1:5]] == [["1", "CPU"]] * 4
    assert "0 - 1" in printed and "0 - 2" not in printed and "within a server" in printed
    (speeds,) = [line for line in lines if line.startswith("speed of each worker's first device: ")]
    assert speeds.count("+-") == 4
    cluster = dapple.Cluster.load(out)
    assert cluster.num_servers == 2 and cluster.intra_bandwidth is not None and cluster.inter_bandwidth is not None
    assert all(device.speed > 0 for device in cluster.devices)
