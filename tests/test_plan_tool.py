"""The tool that plans: its plans are the planner's, and mistakes are told."""

from __future__ import annotations

import pathlib
from typing import Any

import planned_hardware as given
import pytest

import dapple_tf as dapple
from dapple_tf.automatic import Planned
from dapple_tf.tools import command, plan


def run(*arguments: str) -> int:
    return command.run(plan.main, plan.FLAGS, arguments)


@pytest.fixture
def files(tmp_path: pathlib.Path) -> given.Files:
    return given.write(tmp_path)


@pytest.mark.slow
def test_the_planners_plan(files: given.Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    batch = ["--global_batch_size=24", f"--output={out}"]
    assert run(f"--profile={files.profile}", f"--cluster={files.cluster}", *batch) == 0
    expected = dapple.plan(given.profile(), given.cluster(), 24)
    assert dapple.Plan.load(out) == expected
    printed = capsys.readouterr().out
    assert str(expected) in printed  # with the reasons
    assert "expected step" in printed and str(given.cluster()) in printed
    simulate = f"python -m tools.simulate --plan={out} --profile={files.profile} --cluster={files.cluster}"
    assert simulate in printed


@pytest.mark.thorough
@pytest.mark.slow
def test_choices(files: given.Files, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "found.json"
    common = [f"--profile={files.profile}", f"--cluster={files.cluster}", "--global_batch_size=24", f"--output={out}"]
    assert run(*common, "--micro_batches=4", "--schedule=gpipe", "--recompute=boundary", "--jit_compile") == 0
    loaded = dapple.Plan.load(out)
    assert (loaded.micro_batches, loaded.recompute, loaded.jit_compile) == (4, "boundary", True)
    options: dict[str, Any] = {"schedule": "auto", "reverse_first_k": "auto"}
    assert run(*common, "--schedule=auto", "--reverse_first_k=auto") == 0
    assert dapple.Plan.load(out) == dapple.plan(given.profile(), given.cluster(), 24, **options)
    assert run(*common, "--schedule=dapple_a,zb_h1", "--micro_batches=2,4") == 0
    assert dapple.Plan.load(out).micro_batches in (2, 4)


def test_models_are_measured(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def planned(model: Any, cluster: dapple.Cluster, batch: int, **options: Any) -> Planned:
        calls.append({"model": model.name, "devices": cluster.num_devices, "batch": batch} | options)
        return Planned(given.plan(), given.profile(), given.cluster())

    monkeypatch.setattr("dapple_tf.automatic.plan_model", planned)
    names = {name: tmp_path / f"{name}.json" for name in ("output", "save_profile", "save_cluster")}
    arguments = [f"--{name}={path}" for name, path in names.items()]
    assert run("--model=vgg:tiny", "--cluster=cpu:3", "--global_batch_size=12", "--schedule=gpipe", *arguments) == 0
    (call,) = calls
    assert (call["model"], call["devices"], call["batch"], call["schedule"]) == ("vgg", 3, 12, ["gpipe"])
    assert len(call["x"]) == len(call["y"]) == 6  # the largest slice that is profiled
    assert dapple.Plan.load(names["output"]) == given.plan()
    assert dapple.Profile.load(names["save_profile"]) == given.profile()
    assert dapple.Cluster.load(names["save_cluster"]) == given.cluster()
    assert f"--profile={names['save_profile']} --cluster={names['save_cluster']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--global_batch_size isn't given"),
        (["--global_batch_size=8"], "neither --profile nor --model is given"),
        (["--global_batch_size=8", "--profile={p}", "--model=gpt"], "both --profile and --model are given"),
        (["--global_batch_size=8", "--profile={p}", "--schedule=best"], "--schedule=best: unknown; use some of gpipe"),
        (["--global_batch_size=8", "--profile={p}", "--schedule=auto,gpipe"], "--schedule=auto,gpipe: auto is all"),
        (["--global_batch_size=8", "--profile={p}", "--recompute=all"], "--recompute=all: unknown; use some of none"),
        (["--global_batch_size=8", "--profile={p}", "--micro_batches=a"], "--micro_batches=a: give whole numbers"),
        (
            ["--global_batch_size=8", "--profile={p}", "--micro_batches=9"],
            "8 samples can't be cut into 9 micro-batches",
        ),
        (["--global_batch_size=8", "--profile={p}", "--reverse_first_k=-1"], "--reverse_first_k=-1: give a number"),
        (["--global_batch_size=8", "--profile={p}", "--reverse_first_k=²"], "--reverse_first_k=²: give a number"),
        (["--global_batch_size=8", "--profile="], "--profile isn't given"),
        (["--global_batch_size=8", "--profile={p}", "--save_profile=x"], "--save_profile=x is for --model"),
        (["--global_batch_size=8", "--model=gpt", "--cluster={c}"], "--model can't be measured on it; give --profile"),
        (["--global_batch_size=8", "--profile={c}"], "'format' is 'dapple_tf.cluster/1'; this version reads"),
        (["--global_batch_size=8", "--profile={p}", "--cluster={p}"], "--cluster={p}: unknown key 'model'"),
        (["--global_batch_size=8", "--profile={p}", "--cluster=x.json"], "--cluster=x.json: No such file"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], message: str, files: given.Files, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"p": files.profile, "c": files.cluster}
    assert run(*(argument.format(**names) for argument in arguments)) == 1
    assert message.format(**names) in capsys.readouterr().err


def test_memory_that_is_short_is_told(files: given.Files, capsys: pytest.CaptureFixture[str]) -> None:
    given.cluster(memory=2**23).save(files.cluster)
    assert run(f"--profile={files.profile}", f"--cluster={files.cluster}", "--global_batch_size=24") == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and "no plan fits the memory of 4 devices" in printed.err
    assert not printed.out
