"""Measures a model layer by layer: the seconds and bytes that plans and simulations need.

    dapple-profile --model=gpt --batch_size=2,8 --output=profile.json
    dapple-profile --model=my_package.my_module:build --cluster=10.0.0.1:2222 --output=profile.json

Give slice sizes around those of future plans: the global batch divided by micro-batches and replicas. Several sizes
separate each cost into a fixed part and one that grows with the samples. Profiles are kept in a cache
(~/.cache/dapple_tf/profiles, or $DAPPLE_CACHE) and are reused; --nocache measures anew.

dapple-plan, dapple-simulate, dapple-what-if and dapple-train read the result.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from absl import flags

import dapple_tf as dapple
from dapple_tf.common.text import bytes_text, ms_text, table
from dapple_tf.describe.profile_text import to_text
from dapple_tf.tools import command
from dapple_tf.tools.model_flags import ClusterFlag, ModelFlags, check_output

FLAGS = flags.FlagValues()

_MODEL = ModelFlags(FLAGS, data=True)
_CLUSTER = ClusterFlag(FLAGS, default="local:1", described=False)
_BATCH_SIZE = flags.DEFINE_list(
    "batch_size", ["1", "8"], "Samples of a slice: one size, or several separated by commas.", flag_values=FLAGS
)
_DEVICE = flags.DEFINE_integer(
    "device", 0, "Number of the cluster's device to measure on.", lower_bound=0, flag_values=FLAGS
)
_REPEATS = flags.DEFINE_integer(
    "repeats",
    None,
    "Number of measurements of each time; by default as many as fit into 20 s.",
    lower_bound=1,
    flag_values=FLAGS,
)
_CACHE = flags.DEFINE_boolean(
    "cache", True, "Reuse the cached profile, if there is one, and cache a new one.", flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write the profile to.", flag_values=FLAGS)
_TEXT = flags.DEFINE_string(
    "text_output", None, "File for the profile in the text format of the DAPPLE authors' planner.", flag_values=FLAGS
)
_TEXT_BATCH = flags.DEFINE_integer(
    "text_batch_size",
    None,
    "Samples that --text_output is for; by default the smallest of --batch_size.",
    lower_bound=1,
    flag_values=FLAGS,
)


def batch_sizes() -> list[int]:
    """Returns the sizes of ``--batch_size``.

    Raises:
        app.UsageError: they aren't whole numbers from 1 on.
    """
    given = _BATCH_SIZE.value
    good = bool(given) and all(size.isascii() and size.isdigit() and len(size) < 10 and int(size) for size in given)
    command.check(good, f"--batch_size={','.join(given)}: give whole numbers from 1 on, such as 2,8")
    return sorted({int(size) for size in given})


def layer_table(profile: dapple.Profile) -> str:
    """Returns a row for each layer, times in ms and sizes for the largest profiled batch."""
    samples = profile.batch_sizes[-1]
    titles = ("layer", "forward ms", "backward ms", "share", "spread", "output", "kept", "parameters")
    times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers]
    total = sum(times) or 1.0
    rows = [titles]
    for layer, seconds in zip(profile.layers, times, strict=True):
        rows.append(
            (
                layer.name,
                ms_text(layer.forward.at(samples)),
                ms_text(layer.backward.at(samples)),
                f"{seconds / total:.1%}",
                f"{layer.spread:.0%}",
                bytes_text(layer.output_bytes.at(samples)),
                bytes_text(layer.residual_bytes.at(samples)),
                bytes_text(layer.parameter_bytes),
            )
        )
    whole = [profile.total(part).at(samples) for part in ("forward", "backward", "residual_bytes")]
    forward, backward, kept = ms_text(whole[0]), ms_text(whole[1]), bytes_text(whole[2])
    rows.append(("all", forward, backward, "100.0%", "", "", kept, bytes_text(profile.parameter_bytes)))
    sizes = ", ".join(map(str, profile.batch_sizes))
    apply = profile.step_seconds + sum(layer.apply_seconds for layer in profile.layers)
    return (
        f"{profile.model}: {len(profile.layers)} layers on {profile.device}, measured at {sizes} samples; for "
        f"{samples} samples:\n\n{table(rows, left=1)}\n\n"
        f"optimizer and what else a step takes once: {ms_text(apply)} ms; to start a task: "
        f"{ms_text(profile.task_seconds)} ms; shared parameters: "
        f"{bytes_text(sum(group.parameter_bytes for group in profile.shared))}"
    )


def main() -> None:
    """Measures, writes and prints."""
    sizes = batch_sizes()
    check_output("--output", _OUTPUT.value)
    check_output("--text_output", _TEXT.value)
    data = _MODEL.data()
    cluster = _CLUSTER.cluster()
    command.check(
        _DEVICE.value < cluster.num_devices,
        f"--device={_DEVICE.value}: the cluster has {cluster.num_devices} devices, from 0 on",
    )
    model = _MODEL.build()
    x, y, weights = data.example(model, max(sizes))
    profile = dapple.profile(
        model,
        sizes,
        cluster=cluster,
        device=_DEVICE.value,
        x=x,
        y=y,
        sample_weight=weights,
        cache=_CACHE.value,
        repeats=_REPEATS.value,
    )
    sys.stdout.write(layer_table(profile) + "\n")
    if _OUTPUT.value:
        profile.save(_OUTPUT.value)
        planner = " ".join(command.line("plan"))
        sys.stdout.write(f"\nThe profile is in {_OUTPUT.value}; {planner} makes a plan of it\n")
    if _TEXT.value:
        with open(_TEXT.value, "w", encoding="utf-8") as file:
            file.write(to_text(profile, _TEXT_BATCH.value))


def run() -> NoReturn:
    """Runs the console command."""
    command.start(main, FLAGS)


if __name__ == "__main__":
    run()
