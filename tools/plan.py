"""Finds a plan: where to cut a model into stages, which devices run each, how many micro-batches, which schedule.

    dapple-plan --profile=profile.json --cluster=cluster.json --global_batch_size=512 --output=plan.json
    dapple-plan --profile=bert-48 --cluster=cluster.json --global_batch_size=64
    dapple-plan --model=gpt --cluster=local:4 --global_batch_size=32 --schedule=gpipe,dapple_a --only=recompute

From a profile, plans can be made for any cluster, real or described. With --model, the model is first measured on the
cluster's devices, and so are their links. Prints the plan and the reasons for it: its expected step time, what limits
it, the runner-up, and data parallelism for comparison. --micro_batches, --schedule, --recompute and --only restrict the
planner's choices.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import Any, NoReturn

from absl import flags

import dapple_tf as dapple
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.tools import command
from dapple_tf.tools.model_flags import ClusterFlag, ModelFlags, ProfileFlags, check_output

FLAGS = flags.FlagValues()

_PROFILE = ProfileFlags(FLAGS, alternative="Or give --model.")
_MODEL = ModelFlags(FLAGS, default=None, data=True)
_CLUSTER = ClusterFlag(FLAGS)
_GLOBAL_BATCH_SIZE = flags.DEFINE_integer(
    "global_batch_size", None, "Required: samples per step, over all devices.", lower_bound=1, flag_values=FLAGS
)


def _flag(option: dataclasses.Field[Any]) -> flags.FlagHolder[Any]:
    """Defines the flag of a field of `PlanRequest`."""
    text, words, switch = option.metadata["flag"]
    if switch:
        return flags.DEFINE_boolean(option.name, option.default, text, flag_values=FLAGS)
    if words is None:
        return flags.DEFINE_list(option.name, option.default, text, flag_values=FLAGS)
    default = next((word for word, value in words.items() if value == option.default), None)
    return flags.DEFINE_enum(option.name, default, list(words), text, flag_values=FLAGS)


_OPTIONS = {option: _flag(option) for option in dataclasses.fields(PlanRequest) if "flag" in option.metadata}
_CHECK = flags.DEFINE_boolean(
    "check",
    False,
    "With --model, also beside --profile: print what the plan's step does on the cluster's GPUs, which needn't exist: "
    "operators without kernels there, and copies that GPUs wait for.",
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write the plan to.", flag_values=FLAGS)
_SAVE_PROFILE = flags.DEFINE_string(
    "save_profile", None, "With --model: JSON file to write the measured profile to.", flag_values=FLAGS
)
_SAVE_CLUSTER = flags.DEFINE_string(
    "save_cluster",
    None,
    "With --model: JSON file to write the cluster with its measured links to.",
    flag_values=FLAGS,
)


def options() -> dict[str, Any]:
    """Returns the options that the planner may choose from, which it checks."""
    values = {}
    for option, flag in _OPTIONS.items():
        value, words = flag.value, option.metadata["flag"].words
        if isinstance(value, list):
            items = [int(text) if text.isdecimal() else text for text in value]
            value = items[0] if len(items) == 1 else items
        values[option.name] = words[value] if words is not None and value is not None else value
    return values


def find() -> tuple[dapple.Plan, dapple.Profile, dapple.Cluster]:
    """Returns the plan, and the profile and cluster that it was made from."""
    chosen, batch = options(), _GLOBAL_BATCH_SIZE.value
    if _PROFILE.given:
        profile, cluster = _PROFILE.profile(), _CLUSTER.cluster()
        return dapple.plan(profile, cluster, batch, **chosen), profile, cluster
    from dapple_tf.automatic import plan_model, slice_sizes

    data, cluster = _MODEL.data(), _CLUSTER.cluster()
    command.check(
        cluster.real, "--cluster is a description without devices: --model can't be measured on it; give --profile"
    )
    model = _MODEL.build()
    x, y, weights = data.example(model, max(slice_sizes(batch, cluster.num_devices)))
    planned = plan_model(model, cluster, batch, x=x, y=y, sample_weight=weights, **chosen)
    return planned.plan, planned.profile, planned.cluster


def checked(plan: dapple.Plan, cluster: dapple.Cluster) -> str:
    """Returns what the plan's training step does on the cluster's GPUs."""
    from dapple_tf.execution.gpu_check import gpu_text
    from dapple_tf.execution.step_builder import planned_step
    from dapple_tf.frontend.batch import spec_of

    model = _MODEL.build()
    spec = spec_of(model, *_MODEL.data().example(model, plan.global_batch_size))
    step = planned_step(model, plan, cluster, spec)
    return gpu_text(step.graph, cluster) or "The cluster has no GPUs, of which --check would tell.\n"


def main() -> None:
    """Plans, writes and prints."""
    command.check(_GLOBAL_BATCH_SIZE.value is not None, "--global_batch_size isn't given; see --help")
    command.check(_PROFILE.given or _MODEL.given, "neither --profile nor --model is given; give one of them")
    both = _PROFILE.given and _MODEL.given
    command.check(_CHECK.value or not both, "both --profile and --model are given; give one of them, or --check")
    command.check(_MODEL.given or not _CHECK.value, "--check needs the model: give --model, too")
    for flag, given in (("--save_profile", _SAVE_PROFILE), ("--save_cluster", _SAVE_CLUSTER)):
        command.check(
            _MODEL.given or given.value is None, f"{flag}={given.value} is for --model, which measures; leave it out"
        )
        check_output(flag, given.value)
    check_output("--output", _OUTPUT.value)
    plan, profile, cluster = find()
    sys.stdout.write(f"{cluster}\n\n{plan}\n")
    if _CHECK.value:
        sys.stdout.write(f"\n{checked(plan, cluster)}")
    if _SAVE_PROFILE.value:
        profile.save(_SAVE_PROFILE.value)
    if _SAVE_CLUSTER.value:
        cluster.save(_SAVE_CLUSTER.value)
    if _OUTPUT.value:
        plan.save(_OUTPUT.value)
        where = _PROFILE.path or _SAVE_PROFILE.value
        hint = "" if where is None else f"; to see its step:\n  {simulate_command(_OUTPUT.value, where)}"
        sys.stdout.write(f"\nThe plan is in {_OUTPUT.value}{hint}\n")


def simulate_command(plan: str, profile: str) -> str:
    """Returns the command that simulates a plan."""
    cluster = _SAVE_CLUSTER.value or _CLUSTER.text
    arguments = [f"--plan={plan}", f"--profile={profile}", f"--cluster={cluster}"]
    return shlex.join([*command.line("simulate"), *arguments])


def run() -> NoReturn:
    """Runs the console command."""
    command.start(main, FLAGS)


if __name__ == "__main__":
    run()
