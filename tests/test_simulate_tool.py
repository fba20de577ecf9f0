"""The tool that simulates: its numbers are the simulator's, and everything that it writes is there."""

from __future__ import annotations

import json
import pathlib

import planned_hardware as given
import pytest

import dapple_tf as dapple
from dapple_tf.tools import command, simulate
from dapple_tf.tools.shapes import cuts_by_profile
from dapple_tf.tools.variants import Hardware


def run(*arguments: str) -> int:
    return command.run(simulate.main, simulate.FLAGS, arguments)


@pytest.fixture
def files(tmp_path: pathlib.Path) -> given.Files:
    return given.write(tmp_path)


def simulated(plan: dapple.Plan, **hardware: float) -> dapple.Simulation:
    return dapple.simulate(plan, given.profile(), Hardware(**hardware).of(given.cluster()))


def test_the_simulators_numbers(files: given.Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*files.flags, "--width=80") == 0
    printed = capsys.readouterr().out
    assert f"{given.plan()}\n\n{simulated(given.plan())}\n" in printed
    lines = printed.splitlines()
    assert any(line.startswith("device 3: stage 1") for line in lines)
    assert max(len(line) for line in lines if "│" in line) == 80
    assert run(*files.flags, "--notimeline") == 0
    assert "│" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "plan", "hardware"),
    [
        (["--micro_batches=2"], {"micro_batches": 2}, {}),
        (["--schedule=zb_h1", "--recompute=boundary"], {"schedule": "zb_h1", "recompute": "boundary"}, {}),
        (["--inter_bandwidth=1e7", "--speed=2"], {}, {"inter_bandwidth": 1e7, "speed": 2.0}),
        (["--intra_latency=0.01", "--global_batch_size=48"], {"global_batch_size": 48}, {"intra_latency": 0.01}),
    ],
)
def test_what_if(
    arguments: list[str],
    plan: dict[str, object],
    hardware: dict[str, float],
    files: given.Files,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = simulated(given.plan(**plan), **hardware)
    assert expected.latency != simulated(given.plan()).latency
    assert run(*files.flags, *arguments, "--notimeline") == 0
    assert str(expected) in capsys.readouterr().out


def test_shapes_are_cut_by_the_profile(files: given.Files, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*files.flags[:2], "--plan=1:1:1:1", "--global_batch_size=16", "--micro_batches=8", "--notimeline"]
    assert run(*flags) == 0
    cuts = cuts_by_profile(given.profile(), (1, 1, 1, 1))
    assert str(simulated(dapple.Plan.straight(cuts, 16, 8))) in capsys.readouterr().out


def test_schedules_compared(files: given.Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = [*files.flags, "--compare=gpipe,zb_h1,zb_v,gpipe", "--notimeline", f"--output_dir={out}"]
    assert run(*flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small on 4 devices, 2 stages, 4 micro-batches of 6 samples"
    rows = {line.split()[0]: line.split() for line in lines[3:5]}
    for name in ("gpipe", "zb_h1"):
        step = simulated(given.plan(schedule=name))
        assert rows[name][1] == f"{step.latency * 1e3:.4g}"
        assert rows[name][-1] == "yes"
    assert min(row[2] for row in rows.values()) == "1.000x"
    assert lines[5].startswith("zb_v: zb_v wants stages i and")
    assert lines[-1].startswith(f"In {out}: timeline.txt")
    text = (out / "timeline.txt").read_text()
    assert text.index("gpipe: ") < text.index("zb_h1: ")


def test_everything_is_written(files: given.Files, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "new" / "out"
    assert run(*files.flags, f"--output_dir={out}", "--notimeline", "--micro_batches=3") == 0
    names = {path.name for path in out.iterdir()}
    assert names == {"timeline.txt", "timeline.html", "timeline.svg", "timeline.png", "trace.json", "plan.json"}
    assert dapple.Plan.load(out / "plan.json") == given.plan(micro_batches=3)
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "small, dapple_a" in (out / "timeline.html").read_text()


def test_memory_that_is_short(files: given.Files, capsys: pytest.CaptureFixture[str]) -> None:
    peak = max(simulated(given.plan(schedule="gpipe")).peak_bytes.values())
    given.cluster(memory=int(peak * 0.9)).save(files.cluster)
    assert run(*files.flags, "--schedule=gpipe") == 1
    assert "memory" in capsys.readouterr().err
    assert run(*files.flags, "--compare=gpipe", "--notimeline") in (0, 1)
    shown = capsys.readouterr()
    assert "memory" in shown.out + shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
)
def test_mistakes_are_told(
    arguments: list[str], message: str, files: given.Files, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*files.flags, *(argument.format(p=files.profile) for argument in arguments)) == 1
    assert message in capsys.readouterr().err
