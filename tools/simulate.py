"""Simulates one training step of a plan, task by task, on any cluster: each device's work over time, and its memory.

    dapple-simulate --plan=plan.json --profile=profile.json --cluster=cluster.json
    dapple-simulate --plan=3:1 --global_batch_size=64 --profile=profile.json --cluster=local:4 --schedule=zb_h1
    dapple-simulate --plan=plan.json --profile=profile.json --compare=gpipe,dapple_a,zb_h1 --output_dir=runs/a

Prints the step's time, the bubble and memory of each stage, the composition of the critical path, and the timeline.
--micro_batches, --schedule, --recompute and --global_batch_size change the plan; --intra_bandwidth and others the
cluster. --compare simulates the same stages under several schedules and prints a row for each. --output_dir receives

    timeline.txt           the timeline as text
    timeline.svg, .png     as an image, if matplotlib is installed
    timeline.html          as a page with zoom, which needs no network
    trace.json             for Perfetto (ui.perfetto.dev) and chrome://tracing
    plan.json              the plan that was simulated

With --compare, each file has all timelines. Fails with code 1 if the plan doesn't fit the cluster or its memory.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from absl import flags

import dapple_tf as dapple
from dapple_tf.common.progress import Progress
from dapple_tf.common.text import bytes_text, ms_text, table
from dapple_tf.describe.plan import ALL_REDUCE
from dapple_tf.schedules.schedules import POLICIES
from dapple_tf.tools import command
from dapple_tf.tools.model_flags import ClusterFlag, PlanFlags, ProfileFlags
from dapple_tf.tools.shapes import cuts_by_profile
from dapple_tf.tools.variants import Hardware, changed
from dapple_tf.view.files import save_timelines
from dapple_tf.view.text import timeline_text
from dapple_tf.view.timeline import Timeline

FLAGS = flags.FlagValues()

_NARROWEST = 60
"""Minimum columns of a timeline."""

_PLAN = PlanFlags(FLAGS)
_PROFILE = ProfileFlags(FLAGS)
_CLUSTER = ClusterFlag(FLAGS)
_INTRA_BANDWIDTH = flags.DEFINE_float(
    "intra_bandwidth", None, "Bytes/s between devices of a server, instead of the cluster's.", flag_values=FLAGS
)
_INTER_BANDWIDTH = flags.DEFINE_float(
    "inter_bandwidth", None, "Bytes/s between servers, instead of the cluster's.", flag_values=FLAGS
)
_INTRA_LATENCY = flags.DEFINE_float(
    "intra_latency", None, "Seconds until the first byte arrives, within a server.", flag_values=FLAGS
)
_INTER_LATENCY = flags.DEFINE_float("inter_latency", None, "The same between servers, in seconds.", flag_values=FLAGS)
_SPEED = flags.DEFINE_float("speed", 1.0, "Factor by which every device computes faster.", flag_values=FLAGS)
_REDUCE_EARLY = flags.DEFINE_boolean(
    "reduce_early",
    False,
    "Cut last backwards into pieces, so that all-reduces run during them, as far as that gains.",
    flag_values=FLAGS,
)
_ALL_REDUCE = flags.DEFINE_enum(
    "all_reduce", None, ALL_REDUCE, "All-reduces over several servers; by default the plan's.", flag_values=FLAGS
)
_NEXT_FORWARD = flags.DEFINE_boolean(
    "next_forward",
    False,
    "Simulate from the first backwards to the next step's first forwards: the time between the ends of two steps.",
    flag_values=FLAGS,
)
_COMPARE = flags.DEFINE_list("compare", None, f"Schedules to compare, from {', '.join(POLICIES)}.", flag_values=FLAGS)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder to write timelines to.", flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer(
    "width",
    None,
    "Columns of the timeline as text; by default the terminal's.",
    lower_bound=_NARROWEST,
    flag_values=FLAGS,
)
_TIMELINE = flags.DEFINE_boolean("timeline", True, "Print the timeline.", flag_values=FLAGS)


def hardware() -> Hardware:
    """Returns the changes of the cluster."""
    return Hardware(
        _INTRA_BANDWIDTH.value, _INTER_BANDWIDTH.value, _INTRA_LATENCY.value, _INTER_LATENCY.value, _SPEED.value
    )


def simulate(plan: dapple.Plan, profile: dapple.Profile, cluster: dapple.Cluster) -> dapple.Simulation:
    """Simulates one step as the flags say.

    Raises:
        PlanError: the plan doesn't fit the profile, the cluster or a device's memory.
    """
    if _ALL_REDUCE.value:
        plan = changed(plan, all_reduce=_ALL_REDUCE.value)
    if _REDUCE_EARLY.value:
        plan = dapple.reduced_early(plan, profile, cluster)
    return dapple.simulate(plan, profile, cluster, next_forward=_NEXT_FORWARD.value)


def comparison(simulations: dict[str, dapple.Simulation | str]) -> str:
    """Returns a table with a row for each schedule: its step, or why it is impossible.

    Args:
        simulations: each schedule's step, or its error.
    """
    steps = {name: step for name, step in simulations.items() if not isinstance(step, str)}
    best = min((step.latency for step in steps.values()), default=0.0)
    rows = [("schedule", "step ms", "of the best", "samples/s", "bubble", "peak memory", "fits")]
    for name, step in steps.items():
        idle = sum(step.idle.values()) / len(step.idle)
        rows.append(
            (
                name,
                ms_text(step.latency),
                f"{step.latency / best:.3f}x" if best else "",
                f"{step.throughput:.4g}",
                f"{idle:.1%}",
                bytes_text(max(step.peak_bytes.values())),
                _fits(step),
            )
        )
    text = table(rows, left=1) if steps else ""
    refused = [f"{name}: {step}" for name, step in simulations.items() if isinstance(step, str)]
    return "\n".join([text, *refused] if text else refused)


def _fits(step: dapple.Simulation) -> str:
    limits = [step.costs.cluster.devices[device].memory_bytes for device in step.costs.devices]
    return "no" if not step.fits else "no limit known" if None in limits else "yes"


def several(
    names: Sequence[str], plan: dapple.Plan, profile: dapple.Profile, cluster: dapple.Cluster
) -> dict[str, dapple.Simulation | str]:
    """Simulates the same stages under several schedules; returns each one's step, or its error."""
    outcomes: dict[str, dapple.Simulation | str] = {}
    with Progress("simulating", len(names)) as bar:
        for name in dict.fromkeys(names):
            bar.step(name)
            try:
                outcomes[name] = simulate(changed(plan, schedule=name), profile, cluster)
            except dapple.PlanError as error:
                outcomes[name] = str(error)
    return outcomes


def output_folder() -> pathlib.Path | None:
    """Returns ``--output_dir``; None if it isn't given.

    Raises:
        app.UsageError: it is a file.
    """
    if _OUTPUT_DIR.value is None:
        return None
    path = pathlib.Path(_OUTPUT_DIR.value)
    command.check(not path.exists() or path.is_dir(), f"--output_dir={path} is a file; give a folder")
    return path


def show(timelines: Sequence[Timeline]) -> None:
    """Prints timelines as text."""
    width = _WIDTH.value or max(_NARROWEST, shutil.get_terminal_size((100, 40)).columns)
    sys.stdout.write(f"\n{timeline_text(timelines, width=width, colour=sys.stdout.isatty())}\n")


def main() -> None:
    """Simulates, prints and writes."""
    _PLAN.early_check()
    for name in _COMPARE.value or ():
        command.check(name in POLICIES, f"--compare={name}: unknown schedule; use some of {', '.join(POLICIES)}")
    folder = output_folder()
    profile, cluster = _PROFILE.profile(), hardware().of(_CLUSTER.cluster())
    plan = _PLAN.plan(lambda replicas: cuts_by_profile(profile, replicas))
    if _COMPARE.value:
        outcomes = several(_COMPARE.value, plan, profile, cluster)
        steps = {name: step for name, step in outcomes.items() if not isinstance(step, str)}
        sys.stdout.write(
            f"{profile.model} on {cluster.num_devices} devices, {plan.num_stages} stages, {plan.micro_batches} "
            f"micro-batches of {plan.global_batch_size / plan.micro_batches:.4g} samples\n\n{comparison(outcomes)}\n"
        )
        command.check(bool(steps), f"--compare={','.join(_COMPARE.value)}: this plan can have none of these schedules")
    else:
        steps = {"simulated": simulate(plan, profile, cluster)}
        sys.stdout.write(f"{plan}\n\n{steps['simulated']}\n")
    timelines = [step.drawn(name) for name, step in steps.items()]
    if _TIMELINE.value:
        show(timelines)
    if folder is not None:
        title = profile.model if _COMPARE.value else f"{profile.model}, {plan.schedule}"
        names = save_timelines(timelines, folder, title)
        plan.save(folder / "plan.json")
        sys.stdout.write(f"\nIn {folder}: {', '.join([*names, 'plan.json'])}\n")
    if not _COMPARE.value:
        steps["simulated"].check_memory()


def run() -> NoReturn:
    """Runs the console command."""
    command.start(main, FLAGS)


if __name__ == "__main__":
    run()
