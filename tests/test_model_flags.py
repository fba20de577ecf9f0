"""Flags that several tools have: their values, and the text of mistakes; help and exit codes of programs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import hardware
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
from dapple_tf.tools.model_flags import ClusterFlag, ModelFlags, PlanFlags, ProfileFlags, load_profile, parse_cluster
from dapple_tf.tools.shapes import cuts_by_parameters, cuts_by_profile, is_shape
from dapple_tf.tools.variants import Hardware, changed

TOOLS = ("profile", "plan", "simulate", "train", "what_if")

Defined = TypeVar("Defined")


def parsed(*arguments: str, define: Callable[[flags.FlagValues], Defined]) -> Defined:
    """The result of ``define``, with these arguments."""
    values = flags.FlagValues()
    made = define(values)
    values(["test", *arguments])
    return made


def cluster_of(*arguments: str, described: bool = True) -> dapple.Cluster:
    return parsed(*arguments, define=lambda values: ClusterFlag(values, described=described)).cluster()


def model_flags(*arguments: str) -> ModelFlags:
    return parsed(*arguments, define=lambda values: ModelFlags(values, data=True))


def plan_flags(*arguments: str, batch: int | None = None) -> PlanFlags:
    return parsed(*arguments, define=lambda values: PlanFlags(values, auto=True, batch=batch))


def plan_of(*arguments: str, batch: int | None = None) -> dapple.Plan:
    return plan_flags(*arguments, batch=batch).plan(lambda replicas: cuts_by_profile(given.profile(), replicas))


# ---- programs


@pytest.mark.parametrize("name", ["models.registry", "tools.command"])
def test_a_checkout_has_its_own_models_and_tools(name: str) -> None:
    """Where symbolic links don't last, those of another checkout were run, if one was installed, or none."""
    spec = importlib.util.find_spec(f"dapple_tf.{name}")
    path = pathlib.Path(__file__).resolve().parents[1].joinpath(*name.split(".")).with_suffix(".py")
    assert spec is not None and spec.origin is not None and pathlib.Path(spec.origin).resolve() == path


def test_help_names_existing_flags_in_groups() -> None:
    """All tools are imported into one process here, whose flags don't meet."""
    known: set[str] = set()
    for name in TOOLS:
        tool = importlib.import_module(f"dapple_tf.tools.{name}")
        known |= {*tool.FLAGS}
        mentioned = set(re.findall(r"--(?:no)?(\w+)", tool.__doc__)) - {"logdir", "measure", "cache"}
        assert {flag for flag in mentioned if flag not in tool.FLAGS and f"no{flag}" not in tool.FLAGS} == set(), name
        assert tool.__doc__.count(f"\n    {command.CONSOLE[name]} ") >= 2
        assert all(tool.FLAGS[flag].help for flag in tool.FLAGS)
        assert "others" not in command.groups(tool.FLAGS)
    assert set(" ".join(command.GROUPS.values()).split()) <= known


@pytest.mark.parametrize(
    ("module", "argument", "code", "pattern"),
    [
        ("tools.launch", "--help", 0, r"Starts workers .*\n    dapple-launch .* -- dapple-train .*--workers: .*"),
        ("tools.dump_graph", "-h", 0, r"Writes .*\nplan:\n  --plan: Required: .*\noutput:\n  --output_dir: .*"),
        ("worker", "--version", 0, rf"dapple_tf {re.escape(dapple.__version__)}\n"),
        ("worker", "--adress=a", 1, r"error: Unknown command line flag 'adress'. Did you mean: address \?\n"),
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


def test_a_programs_flag_takes_the_place_of_absls() -> None:
    """absl has a --log_dir, too, and got the value of `tools.train --log_dir=logs`."""
    process, values = flags.FlagValues(), flags.FlagValues()
    flags.DEFINE_string("log_dir", "", "Of absl.", flag_values=process)
    own = flags.DEFINE_string("log_dir", None, "Of the program.", flag_values=values)
    command.publish(values, process)
    process(["test", "--log_dir=logs"])
    values.mark_as_parsed()
    assert own.value == "logs"


def _blamed() -> None:
    with command.blamed("--number=5"):
        raise dapple.PlanError("is odd")


def _raise(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code", "said"),
    [
        (lambda: None, 0, ""),
        (_raise(KeyboardInterrupt()), 130, "error: interrupted\n"),
        (_raise(dapple.StepError("a device failed")), 1, "error: a device failed\n"),
        (lambda: pathlib.Path("/no/such").read_text(), 1, "error: /no/such: No such file or directory\n"),
        (_blamed, 1, "error: --number=5: is odd\n"),
    ],
)
def test_exit_codes_and_errors_in_a_line(
    main: Callable[[], None], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(main, flags.FlagValues(), []) == code
    assert capsys.readouterr().err == said
    with pytest.raises(ZeroDivisionError):  # A mistake of ours has its traceback.
        command.run(_raise(ZeroDivisionError()), flags.FlagValues(), [])


# ---- values


def test_clusters(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_cluster("local:3").num_devices == 3
    assert parse_cluster("cpu:2").device_names[1].endswith("CPU:1")
    path = tmp_path / "described"
    given.cluster().save(path)
    assert parse_cluster(str(path)) == given.cluster()
    asked, workers = [], two_on_each_machine(4)
    monkeypatch.setattr(dapple.Cluster, "of_servers", lambda addresses, **_: asked.append([*addresses]) or workers)
    grouped = cluster_of("--cluster=a:1,a:2,b:1,b:2", "--workers_per_server=2")
    assert [device.server for device in grouped.devices] == [0, 0, 1, 1]
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "chief"}}))
    parse_cluster("tf_config")
    assert asked == [["a:1", "a:2", "b:1", "b:2"], ["a:1", "b:2"]]


def test_precision_is_the_models_alone() -> None:
    assert model_flags("--model=gpt:tiny", "--mixed_precision=bfloat16").build().dtype_policy.name == "mixed_bfloat16"
    assert keras.config.dtype_policy().name == "float32"


def test_data_by_flag_and_length_of_open_axes() -> None:
    assert model_flags().data().name == "source_text"
    model = keras.Sequential([keras.Input((None, 3)), keras.layers.Conv1D(2, 3, strides=2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y, _ = model_flags("--length=11", "--dataset=generated").data().example(model, 2)
    assert (x.shape, y.shape) == ((2, 11, 3), (2, 5, 1))


def test_profiles_of_both_formats(tmp_path: pathlib.Path) -> None:
    profile = given.profile()
    profile.save(tmp_path / "a")
    assert load_profile(tmp_path / "a") == profile
    named = tmp_path / "model-pbs-4.txt"
    named.write_text(to_text(profile, 4))
    assert load_profile(named).batch_sizes == (4,) and load_profile(named, 2).batch_sizes == (2,)
    named.rename(tmp_path / "b.txt")
    with pytest.raises(dapple.ProfileError, match="for how many samples it is: give --profile_batch_size"):
        load_profile(tmp_path / "b.txt")
    assert load_profile("bert-48").batch_sizes == (2,)


def test_plans_of_shapes_and_files(tmp_path: pathlib.Path) -> None:
    path = given.write(tmp_path).plan
    assert plan_of(f"--plan={path}") == given.plan()
    assert plan_of(f"--plan={path}", "--schedule=gpipe", batch=64) == given.plan(schedule="gpipe")
    shaped = plan_of("--plan=3:1", "--global_batch_size=24", "--micro_batches=2", "--recompute=boundary")
    assert (shaped.devices, shaped.micro_batches, shaped.options["recompute"]) == (((0, 1, 2), (3,)), 2, "boundary")
    assert plan_of("--plan=2", batch=64).global_batch_size == 64
    assert plan_flags(f"--plan={path}").path == str(path)
    assert plan_flags("--plan=3:1").path is plan_flags("--plan=auto").path is None
    # A shape with a typing error was taken for a file.
    assert [is_shape(text) for text in ("1:x", ":", "2:", "3:1", "4")] == [True] * 5
    assert [is_shape(text) for text in ("plan.json", "2:1.json", "auto", "runs/1:2/plan.json")] == [False] * 4


def test_a_files_plan_may_name_schedules_of_modules(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that nothing else imports."""
    (tmp_path / "own_schedules.py").write_text(
        "import dataclasses\nfrom dapple_tf.schedules.policies import BUILT_IN\n"
        "OWN = dataclasses.replace(next(iter(BUILT_IN)), name='own')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "plan.json"
    given.plan().save(path)
    path.write_text(path.read_text().replace('"dapple_a"', '"own_schedules:OWN"'))
    with pytest.raises(app.UsageError, match=r"'own_schedules:OWN' is of a module that isn't imported"):
        plan_of(f"--plan={path}")
    assert str(plan_of(f"--plan={path}", "--schedule_modules=own_schedules").schedule) == "own"


def test_cuts_by_parameters_share_them_out() -> None:
    model = find_model("vgg:tiny").build()
    # Parameters: conv_0_0 112, conv_1_0 296, dense_0 528, dense_1 272, logits 170.
    assert [cuts_by_parameters(model, shape) for shape in ((1, 1), (3, 1), (4,))] == [["flatten"], ["dense_1"], []]
    with pytest.raises(dapple.PlanError, match="'vgg' has 8 layers that can be cut apart, too few for 9 stages"):
        cuts_by_parameters(model, (1,) * 9)


# ---- mistakes


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: cluster_of("--cluster=local:0"), "--cluster=local:0: a local cluster of 0 devices was asked for"),
        (lambda: cluster_of("--cluster=local"), "--cluster=local: that is neither local:N"),
        (lambda: cluster_of("--cluster=gpu:99"), "--cluster=gpu:99: asked for 99 GPUs"),
        (lambda: cluster_of("--cluster=none.json"), "--cluster=none.json: No such file or directory"),
        (lambda: cluster_of("--cluster=a:1,a:1"), "--cluster=a:1,a:1: servers 0 and 1 both have the address"),
        (lambda: cluster_of("--cluster="), "--cluster isn't given"),
        (
            lambda: cluster_of("--cluster=cpu:2", "--workers_per_server=2"),
            "--workers_per_server=2, --cluster=cpu:2: the cluster has no workers",
        ),
        (lambda: model_flags("--dataset=patern").data(), "unknown data 'patern'; did you mean 'patterns"),
        (lambda: model_flags("--length=11").data(), "--length=11: the data 'source_text' have lengths of their own"),
        (lambda: parsed("--profile=c", define=ProfileFlags).profile(), "--profile=c: No such file"),
        (lambda: plan_of(), "--plan isn't given"),
        (
            lambda: plan_of("--plan=1:1", "--schedule_modules=os", "--global_batch_size=4"),
            "--schedule_modules is for a file's plan",
        ),
        (
            lambda: plan_of("--plan=none.json", "--schedule_modules=none.such"),
            "--schedule_modules=none.such: No module named 'none'",
        ),
        (lambda: plan_of("--plan=3:0"), "--plan=3:0"),
        (
            lambda: plan_of("--plan=1:x", batch=4),
            "--plan=1:x: need replicas per stage with colons between them, such as 3:1",
        ),
        (lambda: plan_of("--plan=auto"), "--plan=auto needs --global_batch_size"),
        (lambda: plan_of("--plan=none.json"), "--plan=none.json: No such file"),
        (
            lambda: plan_of("--plan=1:1", "--schedule=auto", "--global_batch_size=4"),
            "--schedule=auto is for --plan=auto",
        ),
        (
            lambda: plan_of("--plan=3:1", "--global_batch_size=2", "--micro_batches=1"),
            "--plan=3:1: stage 0 has 3 replicas but the only",
        ),
        (
            lambda: plan_of("--plan=1:1:1:1:1:1:1", "--global_batch_size=8"),
            "--plan=1:1:1:1:1:1:1: model 'small' has 6 layers",
        ),
    ],
)
def test_mistakes_name_their_flag(read: Callable[[], Any], message: str) -> None:
    with pytest.raises(app.UsageError, match=re.escape(message)):
        read()


def test_mistakes_in_files_name_their_flag(tmp_path: pathlib.Path) -> None:
    given.cluster().save(tmp_path / "cluster.json")
    with pytest.raises(app.UsageError, match="is a description without devices, but this needs real ones"):
        cluster_of(f"--cluster={tmp_path / 'cluster.json'}", described=False)
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="deep")], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="top")], name="mine")
    model.save(tmp_path / "model.keras")
    with pytest.raises(app.UsageError, match=r"--mixed_precision=float16: .* was saved with a type for each layer"):
        model_flags(f"--model={tmp_path / 'model.keras'}", "--mixed_precision=float16").build()
    plan = plan_flags(f"--plan={tmp_path / 'plan.json'}")
    for cut in ("inner", "inner/deep", "deep#0"):
        dapple.Plan.manual([cut], [[0], [1]], micro_batches=1, global_batch_size=4).save(tmp_path / "plan.json")
        plan.check_layers(model)
    dapple.Plan.manual(["block_3"], [[0], [1]], micro_batches=1, global_batch_size=4).save(tmp_path / "plan.json")
    message = r"has a cut after layer 'block_3', but model 'mine' has inner, top: give a plan of this model"
    with pytest.raises(app.UsageError, match=message):
        plan.check_layers(model)


# ---- variants


def test_changed_plans_drop_options_that_no_longer_fit() -> None:
    plan = dapple.Plan.straight(["block_1", "block_3"], 12, 4, warm_up=(3, 2, 1))
    assert changed(plan, schedule="dapple_a", micro_batches=4) is plan
    assert changed(plan, recompute="boundary").warm_up == (3, 2, 1)
    profile, cluster = hardware.profile_of(residual=1e6, parameters=1000), hardware.cluster_of(4, memory=20_000_000)
    planned = dapple.plan(profile, cluster, 64, micro_batches=16, schedule="modulo")
    assert planned.warm_up == (2,)
    assert dapple.simulate(changed(planned, global_batch_size=128), profile, cluster).costs.warm_up == (1,)
    assert changed(plan, micro_batches=2).warm_up is None
    assert changed(plan, schedule="gpipe").schedule == "gpipe"
    split = dapple.Plan.straight(["block_1", "block_3"], 12, 4, reverse_first_k=3)
    assert changed(split, cuts=("block_1",), devices=((0,), (1,))).reverse_first_k == 0


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
    for wrong in (0.0, float("nan")):
        with pytest.raises(dapple.ClusterError, match="speed is"):
            Hardware(speed=wrong)
    with pytest.raises(dapple.ClusterError, match="intra_latency is -1"):
        Hardware(intra_latency=-1.0).of(cluster)
