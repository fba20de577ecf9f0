"""Command lines: what programs print and write, beside what the library says, and mistakes, each in a line."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import planned_hardware as given
import pytest
import tokenizers
from models_for_tests import plan as plan_of_three
from reading import CLASSES, write_images

import dapple_tf as dapple
from dapple_tf.describe.profile_text import load_text
from dapple_tf.dumps.output_folder import LIST
from dapple_tf.tools import (
    command,
    dump_graph,
    gpu_trial,
    make_data,
    measure_links,
    plan,
    profile,
    simulate,
    train,
    train_gpt,
    what_if,
)
from dapple_tf.tools.hosts import LocalWorkers
from dapple_tf.tools.variants import Hardware

CLASSIFIER = "--model=models_for_tests:classifier"
BATCH = "--global_batch_size=8"
SMALL_GPT = ("--depth=1", "--width=8", "--heads=1", "--output_dir=out")

MISTAKES: dict[Any, list[tuple[list[str], str]]] = {
    plan: [
        ([], "--global_batch_size isn't given"),
        ([BATCH], "neither --profile nor --model is given"),
        ([BATCH, "--profile={p}", "--model=gpt"], "both --profile and --model are given"),
        ([BATCH, "--profile={p}", "--schedule=best"], "unknown schedule 'best'; use one of gpipe"),
        ([BATCH, "--profile={p}", "--micro_batches=a"], "micro_batches: 'a' isn't a whole number"),
        ([BATCH, "--profile={p}", "--micro_batches=9"], "8 samples can't be cut into 9 micro-batches"),
        ([BATCH, "--profile={p}", "--reverse_first_k=²"], "reverse_first_k is '²'; give a number of stages, or 'auto'"),
        ([BATCH, "--profile={p}", "--save_profile=x"], "--save_profile=x is for --model"),
        ([BATCH, "--model=gpt", "--cluster={c}"], "--model can't be measured on it; give --profile"),
        ([BATCH, "--profile={c}"], "'format' is 'dapple_tf.cluster/1'; this version reads"),
        ([BATCH, "--profile={p}", "--cluster={p}"], "--cluster={p}: unknown key 'model'"),
    ],
    simulate: [
        (["--compare=gpipe,best"], "--compare=best: unknown schedule; use some of gpipe"),
        (["--compare=zb_v"], "--compare=zb_v: this plan can have none of these schedules"),
        (["--output_dir={p}"], "is a file; give a folder"),
        (["--speed=0"], "speed is 0.0; it must be above 0"),
        (["--cluster=cpu:2"], "plan puts stage 0 on device 2, but the cluster has 2 devices"),
        (["--schedule=zb_v"], "zb_v wants stages i and"),
    ],
    what_if: [
        (["--plan=auto"], "--plan=auto needs --global_batch_size"),
        (["--micro_batches=5000", "--global_batch_size=50000"], "this page simulates up to 8,192"),
        (["--port=70000"], "flag --port=70000"),
    ],
    profile: [
        (["--batch_size=0"], "--batch_size=0: give whole numbers from 1 on"),
        (["--device=2", "--cluster=cpu:2"], "--device=2: the cluster has 2 devices"),
        (["--output=/no/such/folder/p.json"], "--output=/no/such/folder/p.json: there is no such folder"),
        (["--model=gtp"], "--model=gtp: unknown model 'gtp'; did you mean 'gpt'?"),
    ],
    dump_graph: [
        ([CLASSIFIER, "--plan=1"], "--output_dir isn't given"),
        ([CLASSIFIER, "--output_dir=out"], "--plan isn't given"),
        ([CLASSIFIER, "--plan=1:1", "--output_dir=out", "--cluster=cpu:1"], "plan puts stage 1 on device 1, but the"),
        ([CLASSIFIER, "--plan=1:1:1:1:1", "--output_dir=out", "--cluster=cpu:5"], "too few for 5 stages"),
        ([CLASSIFIER, "--plan=1", "--cluster=cpu:1", "--output_dir={folder}"], "index.html would be overwritten"),
    ],
    measure_links: [
        ([], "which workers? Give --addresses=host:port"),
        (["--local=1", "--addresses=a:1"], "exclude each other"),
        # Not port 1, where a server of test_worker.py's orders stays.
        (["--addresses=127.0.0.1:2"], "worker 0 (127.0.0.1:2) can't be reached"),
    ],
    make_data: [
        ([], "give one of --images, --text, --check, --sample"),
        (["--images=a", "--text=b"], "give one of --images, --text, --check, --sample, not --images=a and --text=b"),
        (["--text=none.txt"], "--output isn't given"),
        (["--text=none.txt", "--output={folder}/new"], "there is no file none.txt"),
        (["--text=none.txt", "--output={folder}"], "isn't empty; name another"),
    ],
    train_gpt: [
        ([*SMALL_GPT, "--plan=1:1:1:1:1:1"], "too few for 6 stages"),
        ([*SMALL_GPT, "--plan=0:1"], "such as 3:1"),
    ],
    train: [
        (["--no_such_flag=1"], "Unknown command line flag 'no_such_flag'"),
        (["something"], "unexpected arguments: something; everything is given by flags, see --help"),
        (["--resume"], "--resume goes on from a checkpoint: give --checkpoint_dir"),
        (["--checkpoint_every=5"], "--checkpoint_every=5 needs --checkpoint_dir"),
        (["--nomeasure"], "--nomeasure: --plan=auto needs a profile"),
        (["--by_trial", "--plan=1:1"], "--by_trial is for --plan=auto without --placement=fd_dps"),
        (["--model=resnett:tiny"], "PYTHONPATH; did you mean 'resnet:tiny'?"),
        (["--cluster=cpu:1", "--plan=1:1", "--model=vgg:tiny"], "--plan=1:1: plan puts stage 1 on device 1"),
        (["--dataset=patterns", "--plan=1:1", "--nomeasure", "--model=gpt:tiny"], "'patterns' are for models that"),
        (["--steps=0"], "flag --steps=0"),
        ([f"--log_dir={__file__}"], f"--log_dir={__file__} is a file; give a folder"),
        (
            ["--placement=fd_dps", "--model=vgg:tiny", "--cluster=cpu:1", BATCH, "--micro_batches=9"],
            "--placement=fd_dps: a global batch of 8 samples can't be cut into 9 micro-batches",
        ),
        ([BATCH, "--benchmark_steps=5", "--steps=5"], "--steps: --benchmark_steps only measures steps"),
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


# ---- each tool beside the library


def test_plan_writes_and_prints_the_planners_plan(
    files: given.Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    common = [*files.flags[:2], "--global_batch_size=24", f"--output={out}", "--micro_batches=4", "--schedule=gpipe"]
    assert run(plan, *common, "--recompute=boundary") == 0
    options: dict[str, Any] = {"micro_batches": 4, "schedule": "gpipe", "recompute": "boundary"}
    expected = dapple.plan(given.profile(), given.cluster(), 24, **options)
    assert dapple.Plan.load(out) == expected
    printed = capsys.readouterr().out
    assert str(expected) in printed  # with the reasons
    assert "expected step" in printed and str(given.cluster()) in printed
    assert f"--plan={out} --profile={files.profile} --cluster={files.cluster}" in printed


def test_simulate_prints_and_writes_a_step(
    files: given.Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    assert run(simulate, *files.flags, "--width=80", f"--output_dir={out}", "--micro_batches=3", "--speed=2") == 0
    printed, changed = capsys.readouterr().out, given.plan(micro_batches=3)
    cluster = Hardware(speed=2).of(given.cluster())
    assert f"{changed}\n\n{dapple.simulate(changed, given.profile(), cluster)}\n" in printed
    assert max(len(line) for line in printed.splitlines() if "│" in line) == 80
    names = {path.name for path in out.iterdir()}
    assert names == {"timeline.txt", "timeline.html", "timeline.svg", "timeline.png", "trace.json", "plan.json"}
    assert dapple.Plan.load(out / "plan.json") == changed


def test_simulate_compares_schedules(
    files: given.Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(simulate, *files.flags, "--compare=gpipe,zb_h1,zb_v,gpipe", "--notimeline", f"--output_dir={out}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small on 4 devices, 2 stages, 4 micro-batches of 6 samples"
    rows = {line.split()[0]: line.split() for line in lines[3:5]}
    for name in ("gpipe", "zb_h1"):
        step = dapple.simulate(given.plan(schedule=name), given.profile(), given.cluster())
        assert rows[name][1] == f"{step.latency * 1e3:.4g}" and rows[name][-1] == "yes"
    assert min(row[2] for row in rows.values()) == "1.000x"
    assert lines[5].startswith("zb_v: zb_v wants stages i and")
    text = (out / "timeline.txt").read_text()
    assert text.index("gpipe: ") < text.index("zb_h1: ")


def test_profile_measures_the_sizes_and_devices_of_its_flags(
    golden: Callable[[str, str], None],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    table = profile.layer_table(given.profile())
    assert table in capsys.readouterr().out
    golden("layer_table.txt", table + "\n")


def test_dump_takes_a_shape_or_a_plan_for_devices_that_do_not_exist(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_measure_links_tells_servers_from_workers(
    workers: LocalWorkers, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers and workers were taken for the same: a table had two of four addresses, and speeds of two."""
    out = tmp_path / "cluster.json"
    quick = ["--mib=0.25", "--repeats=1", "--nocapacity", "--speeds", f"--out={out}", "--workers_per_server=2"]
    assert run(measure_links, f"--addresses={','.join(workers.addresses)}", *quick) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["0", "0", "1", "1"]
    assert [line.split()[2:4] for line in lines[1:5]] == [["1", "CPU"]] * 4
    assert "0 - 1" in printed and "0 - 2" not in printed and "within a server" in printed
    (speeds,) = [line for line in lines if line.startswith("speed of each worker's first device: ")]
    assert speeds.count("+-") == 4
    cluster = dapple.Cluster.load(out)
    assert cluster.num_servers == 2 and cluster.intra_bandwidth is not None and cluster.inter_bandwidth is not None


# ---- make_data


@pytest.mark.usefixtures("_cache_of_readers")
def test_make_data_writes_records_of_images_and_finds_damaged_ones(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, out = write_images(tmp_path / "images"), tmp_path / "records"
    assert run(make_data, f"--images={images}", f"--output={out}", "--shards=3") == 0
    assert "Wrote 21 images for train and 9 images for validation, of 3 classes" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {f"train-0000{n}-of-00003" for n in range(3)} | {"validation-00000-of-00001", "classes.json"}
    assert json.loads((out / "classes.json").read_text()) == [*CLASSES]
    for kind, place in (("tfrecords", out), ("images", images)):
        assert run(make_data, f"--check={kind}:{place}") == 0
        assert capsys.readouterr().out == "30 images can be read\n"
    broken, again = images / "train" / "bee" / "bee_2.png", tmp_path / "again"
    broken.write_bytes(broken.read_bytes()[:60])
    assert run(make_data, f"--images={images}", f"--output={again}", "--shards=1") == 0
    for kind, place, said in (
        ("images", images, f"{broken} can't be read"),
        ("tfrecords", again, f"of {again}/train-00000-of-00001 can't be read"),
        ("text", images, "only images:PATH and tfrecords:PATH"),
    ):
        assert run(make_data, f"--check={kind}:{place}") == 1
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("_cache_of_readers")
def test_make_data_writes_tokens_of_text_that_are_the_text_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "the cat sat on the mat, the dog sat on the log\n" * 30
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "book"
    assert run(make_data, f"--text={tmp_path}/a.txt", f"--output={out}", "--vocabulary=290", "--held_out=0.25") == 0
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    train_tokens, valid = (np.fromfile(out / name, "uint16") for name in ("train.bin", "valid.bin"))
    assert tokenizer.decode([*train_tokens, *valid]) == text
    assert len(valid) == round(0.25 * (len(train_tokens) + len(valid)))
    assert f"--dataset='tokens:{out}/train.bin?valid={out}/valid.bin'" in capsys.readouterr().out
    tokenizer_flag = f"--tokenizer={out}/tokenizer.json"
    assert run(make_data, f"--text={tmp_path}/a.txt", f"--output={tmp_path}/again", tokenizer_flag) == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()


# ---- gpu_trial


def test_the_trial_for_a_gpu_runs_on_processors_and_goes_on_after_a_part_that_fails(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layouts(*_: Any) -> Iterator[gpu_trial.Row]:
        yield {"before": 1.0}
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_trial, "layouts", layouts)
    out = tmp_path / "trial"
    parts = "--parts=layouts,equivalence of embeddings,recurrent,timeline"
    assert run(gpu_trial, "--tiny", f"--output_dir={out}", parts) == 1
    record, page = json.loads((out / "trial.json").read_text()), (out / "page.md").read_text()
    errors = {part["part"]: part["error"] for part in record["parts"]}
    assert len(errors) == 4 and "out of memory" in errors.pop("layouts") and not any(errors.values())
    assert all(part["rows"] for part in record["parts"])
    assert page.startswith("# Trial on 4 logical devices of processors") and "layouts: failed" in page
    assert (out / "timeline" / "timeline.html").exists()
