"""Flags that several tools have: what they stand for, and what is said of mistakes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import keras
import planned_hardware as given
import pytest
from absl import app, flags
from hardware import two_on_each_machine

import dapple_tf as dapple
from dapple_tf.describe.profile_text import to_text
from dapple_tf.models.registry import find_model
from dapple_tf.tools import command
from dapple_tf.tools.hosts import environment
from dapple_tf.tools.model_flags import (
    ClusterFlag,
    ModelFlags,
    PlanFlags,
    ProfileFlags,
    load_profile,
    parse_cluster,
)
from dapple_tf.tools.shapes import cuts_by_parameters, cuts_by_profile, is_shape, parse_shape
from dapple_tf.tools.variants import Hardware, changed

TOOLS = ("profile", "plan", "simulate", "train", "what_if")

Defined = TypeVar("Defined")


def parsed(*arguments: str, define: Callable[[flags.FlagValues], Defined]) -> Defined:
    """What ``define`` defines, with these arguments."""
    values = flags.FlagValues()
    made = define(values)
    values(["test", *arguments])
    return made


# --- programs ---


@pytest.mark.parametrize("name", ["models.registry", "tools.command"])
def test_a_checkout_has_its_own_models_and_tools(name: str) -> None:
    """Where symbolic links don't last, those of another checkout were run, if one was installed, or none."""
    spec = importlib.util.find_spec(f"dapple_tf.{name}")
    path = pathlib.Path(__file__).resolve().parents[1].joinpath(*name.split(".")).with_suffix(".py")
    assert spec is not None and spec.origin is not None and pathlib.Path(spec.origin).resolve() == path


@pytest.mark.parametrize("name", TOOLS)
def test_documents_name_flags_that_there_are(name: str) -> None:
    """All tools are imported into one process here, whose flags don't meet."""
    tool = importlib.import_module(f"dapple_tf.tools.{name}")
    mentioned = set(re.findall(r"--(?:no)?(\w+)", tool.__doc__)) - {"logdir"}
    known = {*tool.FLAGS, "measure", "cache"}
    assert {flag for flag in mentioned if flag not in known and f"no{flag}" not in known} == set()
    assert tool.__doc__.count(f"\n    {command.CONSOLE[name]} ") >= 2
    assert all(tool.FLAGS[flag].help for flag in tool.FLAGS)
    assert "others" not in command.groups(tool.FLAGS)


def test_groups_of_help_name_flags_that_there_are() -> None:
    known = {flag for name in TOOLS for flag in importlib.import_module(f"dapple_tf.tools.{name}").FLAGS}
    assert set(" ".join(command.GROUPS.values()).split()) <= known


@pytest.mark.parametrize(
    ("module", "argument", "code", "pattern"),
    [
        ("tools.keys", "-h", 0, r"Makes certificates .*\n    dapple-keys .*\n    dapple-keys .*--authority: .*"),
        ("worker", "--help", 0, r"A worker: .*\n    dapple-worker .*\n    dapple-worker .*--address: .*"),
        ("tools.launch", "--help", 0, r"Starts workers .*\n    dapple-launch .* -- dapple-train .*--workers: .*"),
        ("tools.dump_graph", "-h", 0, r"Writes .*\nplan:\n  --plan: Required: .*\noutput:\n  --output_dir: .*"),
        ("worker", "--version", 0, rf"dapple_tf {re.escape(dapple.__version__)}\n"),
        ("worker", "--adress=a", 1, r"error: Unknown command line flag 'adress'. Did you mean: address \?\n"),
        ("worker", "--address=a", 1, r"error: [^\n]*'a'[^\n]*\n"),
        ("tools.keys", "--days=1", 1, r"error: no machine is named; [^\n]*\n"),
    ],
)
def test_console_commands_show_their_module_and_mistakes_in_one_line(
    module: str, argument: str, code: int, pattern: str
) -> None:
    """absl shows the docstring of ``__main__``, which a console command lacks."""
    line = [sys.executable, "-c", f"from dapple_tf.{module} import run; run()", argument]
    ended = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=300)
    assert ended.returncode == code, ended.stderr
    assert re.fullmatch(pattern, ended.stderr if code else ended.stdout, re.DOTALL)


def test_a_shape_with_a_typing_error_is_no_file() -> None:
    """It was said not to be there."""
    assert [is_shape(text) for text in ("1:x", ":", "2:", "3:1", "4")] == [True] * 5
    assert [is_shape(text) for text in ("plan.json", "2:1.json", "auto", "runs/1:2/plan.json")] == [False] * 4
    with pytest.raises(ValueError, match="--plan=1:x: need replicas per stage with colons between them, such as 3:1"):
        parse_shape("1:x")


def test_a_programs_flag_takes_the_place_of_absls() -> None:
    """absl has a --log_dir, too, and got what `tools.train --log_dir=logs` said."""
    process, values = flags.FlagValues(), flags.FlagValues()
    flags.DEFINE_string("log_dir", "", "Of absl.", flag_values=process)
    own = flags.DEFINE_string("log_dir", None, "Of the program.", flag_values=values)
    command.publish(values, process)
    process(["test", "--log_dir=logs"])
    values.mark_as_parsed()
    assert own.value == "logs"


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    values = flags.FlagValues()
    number = flags.DEFINE_integer("number", 1, "A number.", flag_values=values)
    seen = []

    def main() -> None:
        seen.append(number.value)
        if number.value == 2:
            raise KeyboardInterrupt
        if number.value == 3:
            raise dapple.StepError("a device failed")
        if number.value == 4:
            pathlib.Path("/no/such/file").read_text()
        if number.value == 5:
            with command.blamed("--number=5"):
                raise dapple.PlanError("is odd")
        if number.value == 6:
            raise ZeroDivisionError

    def run(*arguments: str) -> tuple[int, str]:
        return command.run(main, values, arguments), capsys.readouterr().err

    assert run() == (0, "")
    assert run("--number=2") == (130, "error: interrupted\n")
    assert run("--number=3") == (1, "error: a device failed\n")
    assert run("--number=4") == (1, "error: /no/such/file: No such file or directory\n")
    assert run("--number=5") == (1, "error: --number=5: is odd\n")
    with pytest.raises(ZeroDivisionError):  # A mistake of ours has its traceback.
        run("--number=6")
    assert run() == (0, "")
    assert seen == [1, 2, 3, 4, 5, 6, 1]


# --- clusters ---


def test_clusters(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_cluster("local:3").num_devices == 3
    assert parse_cluster("cpu:2").device_names[1].endswith("CPU:1")
    path = tmp_path / "described"
    given.cluster().save(path)
    assert parse_cluster(str(path)) == given.cluster()
    asked = []
    monkeypatch.setattr(dapple.Cluster, "of_servers", lambda addresses, **_: asked.append(list(addresses)))
    parse_cluster("10.0.0.1:2222,host:1")
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "chief"}}))
    parse_cluster("tf_config")
    assert asked == [["10.0.0.1:2222", "host:1"], ["a:1", "b:2"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local:0", "--cluster=local:0: a local cluster of 0 devices was asked for"),
        ("local", "--cluster=local: that is neither local:N"),
        ("gpu:99", "--cluster=gpu:99: asked for 99 GPUs"),
        ("none.json", "--cluster=none.json: No such file or directory"),
        ("a:1,a:1", "--cluster=a:1,a:1: servers 0 and 1 both have the address"),
        ("a:1,", "--cluster=a:1,: that is neither"),
        ("", "--cluster isn't given"),
    ],
)
def test_wrong_clusters_are_told(text: str, message: str) -> None:
    flag = parsed(f"--cluster={text}", define=ClusterFlag)
    with pytest.raises(app.UsageError, match=re.escape(message)):
        flag.cluster()


def test_workers_of_one_machine_are_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--cluster=a:1,a:2,b:1,b:2", "--workers_per_server=2")
    workers = two_on_each_machine(4)
    monkeypatch.setattr(dapple.Cluster, "of_servers", lambda addresses: workers)
    flag = parsed(*flags, define=ClusterFlag)
    assert [device.server for device in flag.cluster().devices] == [0, 0, 1, 1]
    flag = parsed("--cluster=cpu:2", flags[1], define=ClusterFlag)
    with pytest.raises(
        app.UsageError, match=re.escape("--workers_per_server=2, --cluster=cpu:2: the cluster has no workers")
    ):
        flag.cluster()


def test_descriptions_where_devices_are_needed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.json"
    given.cluster().save(path)
    flag = parsed(f"--cluster={path}", define=lambda values: ClusterFlag(values, described=False))
    with pytest.raises(app.UsageError, match="is a description without devices, but this needs real ones"):
        flag.cluster()


# --- models ---


def test_precision_is_the_models_alone(tmp_path: pathlib.Path) -> None:
    flag = parsed("--model=gpt:tiny", "--mixed_precision=bfloat16", define=ModelFlags)
    assert flag.build().dtype_policy.name == "mixed_bfloat16"
    assert keras.config.dtype_policy().name == "float32"
    path = tmp_path / "model.keras"
    find_model("vgg:tiny").build().save(path)
    flag = parsed(f"--model={path}", "--mixed_precision=float16", define=ModelFlags)
    with pytest.raises(app.UsageError, match=r"--mixed_precision=float16: .* was saved with a type for each layer"):
        flag.build()


def test_data_by_flag() -> None:
    flag = parsed("--dataset=generated", define=lambda values: ModelFlags(values, data=True))
    assert flag.data().name == "generated"
    flag = parsed(define=lambda values: ModelFlags(values, data=True))
    assert flag.data().name == "source_text"
    flag = parsed("--dataset=patern", define=lambda values: ModelFlags(values, data=True))
    with pytest.raises(app.UsageError, match=r"--dataset=patern: unknown data 'patern'; did you mean 'patterns"):
        flag.data()


def test_length_of_open_axes() -> None:
    """``dapple.profile(length=...)`` had no counterpart among the tools' flags."""

    def flag(*arguments: str) -> ModelFlags:
        return parsed("--length=11", *arguments, define=lambda values: ModelFlags(values, data=True))

    model = keras.Sequential([keras.Input((None, 3)), keras.layers.Conv1D(2, 3, strides=2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y, _ = flag("--dataset=generated").data().example(model, 2)
    assert (x.shape, y.shape) == ((2, 11, 3), (2, 5, 1))
    with pytest.raises(app.UsageError, match="--length=11: the data 'source_text' have lengths of their own"):
        flag().data()


# --- profiles ---


def test_profiles_of_both_formats(tmp_path: pathlib.Path) -> None:
    profile = given.profile()
    profile.save(tmp_path / "a")
    assert load_profile(tmp_path / "a") == profile
    named = tmp_path / "model-pbs-4.txt"
    named.write_text(to_text(profile, 4))
    assert load_profile(named).batch_sizes == (4,)
    assert load_profile(named, 2).batch_sizes == (2,)
    named.rename(tmp_path / "b.txt")
    with pytest.raises(dapple.ProfileError, match="for how many samples it is: give --profile_batch_size"):
        load_profile(tmp_path / "b.txt")
    assert load_profile("bert-48").batch_sizes == (2,)
    flag = parsed(f"--profile={tmp_path / 'c'}", define=ProfileFlags)
    with pytest.raises(app.UsageError, match=r"--profile=\S+/c: No such file"):
        flag.profile()


# --- plans ---


def plan_flags(*arguments: str, auto: bool = True, batch: int | None = None) -> PlanFlags:
    return parsed(*arguments, define=lambda values: PlanFlags(values, auto=auto, batch=batch))


def test_plans_of_shapes_and_files(tmp_path: pathlib.Path) -> None:
    path = given.write(tmp_path).plan
    profile = given.profile()

    def plan(*arguments: str, batch: int | None = None) -> dapple.Plan:
        return plan_flags(*arguments, batch=batch).plan(lambda replicas: cuts_by_profile(profile, replicas))

    assert plan(f"--plan={path}") == given.plan()
    assert plan(f"--plan={path}", "--schedule=gpipe", batch=64) == given.plan(schedule="gpipe")
    shaped = plan("--plan=3:1", "--global_batch_size=24", "--micro_batches=2", "--recompute=boundary", "--jit_compile")
    assert shaped.devices == ((0, 1, 2), (3,))
    assert (shaped.micro_batches, shaped.recompute, shaped.jit_compile) == (2, "boundary", True)
    assert plan("--plan=2", batch=64).global_batch_size == 64
    assert plan_flags(f"--plan={path}").path == str(path)
    assert plan_flags("--plan=3:1").path is plan_flags("--plan=auto").path is None


OWN_SCHEDULE = """
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedule_request import Job
from graph_passes.ir.tasks import Phase

def one_by_one(request):
    jobs = [Job(stage, Phase.FORWARD, i) for i in range(request.micro_batches) for stage in range(request.stages)]
    jobs += [Job(s, Phase.BACKWARD, i) for i in range(request.micro_batches) for s in reversed(range(request.stages))]
    return {device: jobs for device in request.devices[0]}

ONE_BY_ONE = Policy("one_by_one", one_by_one)
"""


def test_a_files_plan_may_name_schedules_of_modules(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own_schedule.py").write_text(OWN_SCHEDULE)
    path = tmp_path / "plan.json"
    plan = json.loads(dapple.Plan.manual(["a"], [[0], [0]], 1, 4).to_json())
    path.write_text(json.dumps(plan | {"schedule": "own_schedule:ONE_BY_ONE"}))
    code = f"""
from absl import flags
from dapple_tf.tools.model_flags import PlanFlags
values = flags.FlagValues()
plan = PlanFlags(values)
values(["", "--plan={path}", *MODULES])
print(plan.plan(list).schedule)
"""

    def printed(*modules: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code.replace("MODULES", str(modules))],
            cwd=pathlib.Path(__file__).parents[1],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            text=True,
            capture_output=True,
        )
        return done.stdout or done.stderr

    assert printed("--schedule_modules=own_schedule") == "one_by_one\n"
    assert "'own_schedule:ONE_BY_ONE' is of a module that isn't imported" in printed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--plan isn't given"),
        (["--plan=1:1", "--schedule_modules=os", "--global_batch_size=4"], "--schedule_modules is for a file's plan"),
        (["--plan=none.json", "--schedule_modules=none.such"], "--schedule_modules=none.such: No module named 'none'"),
        (["--plan=3:0"], "--plan=3:0"),
        (["--plan=auto"], "--plan=auto needs --global_batch_size"),
        (["--plan=1:1"], "--plan=1:1 needs --global_batch_size"),
        (["--plan=none.json"], "--plan=none.json: No such file"),
        (["--plan=1:1", "--schedule=auto", "--global_batch_size=4"], "--schedule=auto is for --plan=auto"),
        (
            ["--plan=3:1", "--global_batch_size=2", "--micro_batches=1"],
            "--plan=3:1: stage 0 has 3 replicas but the only",
        ),
        (["--plan=1:1:1:1:1:1:1", "--global_batch_size=8"], "--plan=1:1:1:1:1:1:1: model 'small' has 6 layers"),
    ],
)
def test_wrong_plans_are_told(arguments: list[str], message: str) -> None:
    with pytest.raises(app.UsageError, match=re.escape(message)):
        plan_flags(*arguments).plan(lambda replicas: cuts_by_profile(given.profile(), replicas))


def test_a_plan_of_another_model_is_told_before_anything_is_measured(tmp_path: pathlib.Path) -> None:
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="deep")], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="top")], name="mine")
    path = tmp_path / "plan.json"
    plan = plan_flags(f"--plan={path}")
    for cut in ("inner", "inner/deep", "deep#0"):
        dapple.Plan.manual([cut], [[0], [1]], micro_batches=1, global_batch_size=4).save(path)
        plan.check_layers(model)
    dapple.Plan.manual(["block_3"], [[0], [1]], micro_batches=1, global_batch_size=4).save(path)
    message = r"has a cut after layer 'block_3', but model 'mine' has inner, top: give a plan of this model"
    with pytest.raises(app.UsageError, match=message):
        plan.check_layers(model)


# --- shapes ---


@pytest.mark.slow
def test_cuts_by_parameters_share_them_out() -> None:
    model = find_model("vgg:tiny").build()
    # Parameters: conv_0_0 112, conv_1_0 296, dense_0 528, dense_1 272, logits 170.
    assert cuts_by_parameters(model, (1, 1)) == ["flatten"]
    assert cuts_by_parameters(model, (3, 1)) == ["dense_1"]
    assert cuts_by_parameters(model, parse_shape("4")) == []
    with pytest.raises(dapple.PlanError, match="'vgg' has 8 layers that can be cut apart, too few for 9 stages"):
        cuts_by_parameters(model, (1,) * 9)


# --- variants ---


def test_changed_plans_drop_what_no_longer_fits() -> None:
    plan = dapple.Plan.straight(["block_1", "block_3"], 12, 4, warm_up=(3, 2, 1))
    assert changed(plan, schedule="dapple_a", micro_batches=4) is plan
    assert changed(plan, recompute="boundary").warm_up == (3, 2, 1)
    assert changed(plan, micro_batches=2).warm_up is None
    assert changed(plan, schedule="gpipe").schedule == "gpipe"
    split = dapple.Plan.straight(["block_1", "block_3"], 12, 4, reverse_first_k=3)
    assert changed(split, cuts=("block_1",), devices=((0,), (1,))).reverse_first_k == 0
    with pytest.raises(dapple.PlanError, match="can't be cut into 13 micro-batches"):
        changed(plan, micro_batches=13)


def test_changed_hardware() -> None:
    cluster = given.cluster()
    assert Hardware().of(cluster) is cluster
    faster = Hardware(inter_bandwidth=5e9, speed=2.0).of(cluster)
    assert (faster.inter_bandwidth, faster.intra_bandwidth) == (5e9, cluster.intra_bandwidth)
    assert {device.speed for device in faster.devices} == {2.0}
    own = dapple.Cluster.from_json(
        '{"format": "dapple_tf.cluster/1", "servers": [{"devices": 1, "inter_bandwidth": 1e6, "capacity": 1},'
        '{"devices": 1}], "reduce_bandwidth": 5}'
    )
    altered = Hardware(inter_bandwidth=2e9).of(own)
    assert altered.link(0, 1).bandwidth == 2e9
    assert altered.reduce_bandwidth is None and altered.servers[0].capacity == 1
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(dapple.ClusterError, match="speed is"):
            Hardware(speed=wrong)
    with pytest.raises(dapple.ClusterError, match="intra_latency is -1"):
        Hardware(intra_latency=-1.0).of(cluster)
