"""Peak memory against the number of micro-batches M, for every schedule, beside GPipe: measured and simulated.

    python -m tools.evaluation.bench_memory --json=memory.json                                    # some 20 minutes
    python -m tools.evaluation.bench_memory --devices=2 --micro_batches=2,8 --schedules=dapple_a  # and gpipe

A GPT of eight blocks is trained by each schedule with micro-batches of a fixed size, so that M makes the batch larger.
The measured peak of a device is that of the allocation records of a traced step, on top of what stays between
steps (variables, the optimizer's slots, gradient accumulators); the simulated one is what `dapple.simulate` predicts
for the same plan, from a profile made in the same run. Both are compared with GPipe's, for the same devices and M.
Pipelines have a stage on each device; `modulo`, `interleaved` and `zb_v` have two. `+ boundary` recomputes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from absl import flags

import dapple_tf as dapple
from dapple_tf.describe.profile import Profile
from dapple_tf.models.gpt import GptConfig
from dapple_tf.schedules.policy import Placement
from dapple_tf.schedules.schedules import policy_of
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import check_memory
from dapple_tf.tools.evaluation.bench_gpt import gpt_size, make_data, make_model
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, numbers, write_results
from dapple_tf.tools.evaluation.ratios import quartiles

FLAGS = flags.FlagValues()

GPIPE = "gpipe"
STRAIGHT = (
    GPIPE, "dapple_a", "dapple_b", "fast_forward", "fast_forward_a", "fast_forward_b", "zb_h1", "zb_h2", "zero_bubble",
)  # fmt: skip
TWO_STAGES = ("modulo", "interleaved", "zb_v", "v_half", "v_min", "dualpipe_v")
"""Schedules that need several stages per device."""
RECOMPUTING = ("gpipe + boundary", "dapple_a + boundary")
SCHEDULES = (*STRAIGHT, *TWO_STAGES, *RECOMPUTING)

_DEVICES = flags.DEFINE_list("devices", ["2", "4"], "Numbers of devices.", flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_list("micro_batches", ["2", "4", "8", "16"], "Values of M.", flag_values=FLAGS)
_SCHEDULES = flags.DEFINE_list("schedules", list(SCHEDULES), "Schedules to measure besides gpipe.", flag_values=FLAGS)
_SAMPLES = flags.DEFINE_integer("samples", 4, "Samples of a micro-batch.", 1, flag_values=FLAGS)
_BLOCKS = flags.DEFINE_integer("blocks", 8, "Blocks of the model; stages have equal numbers.", 1, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer("width", 128, "Width of the model, a multiple of 4.", 4, flag_values=FLAGS)
_SEQUENCE = flags.DEFINE_integer("sequence", 64, "Tokens per sample.", 1, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 3, "Traced steps of each plan.", 1, flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)

_MB = 1e6


def plan_of(name: str, devices: int, micro_batches: int, blocks: int, samples: int) -> dapple.Plan:
    """Returns a plan with even stages of a GPT under a schedule, with micro-batches of ``samples``.

    Raises:
        PlanError: the blocks don't make equal stages, or the schedule doesn't take this number of micro-batches.
    """
    schedule, _, recompute = name.partition(" + ")
    order = list(range(devices))
    if schedule in TWO_STAGES:
        vee = Placement.VEE in policy_of(schedule).planning.placements
        order += order[::-1] if vee else order
    each, left = divmod(blocks, len(order))
    if left or not each:
        raise dapple.PlanError(f"{blocks} blocks don't make {len(order)} equal stages, which {schedule} takes here")
    cuts = [f"block_{(stage + 1) * each - 1}" for stage in range(len(order) - 1)]
    return dapple.Plan.manual(
        cuts,
        [[device] for device in order],
        micro_batches,
        micro_batches * samples,
        schedule,
        recompute=recompute or "none",
    )


def measure(plan: dapple.Plan, cluster: dapple.Cluster, size: GptConfig, steps: int) -> list[list[float]]:
    """Returns the peaks of the plan's devices in each of ``steps`` steps, in bytes."""
    x, y = make_data(size, plan.global_batch_size)
    peaks = check_memory.measure(make_model(size), x, y, plan, cluster, steps)
    keras.backend.clear_session(free_memory=True)
    return [list(run) for run in zip(*peaks.values(), strict=True)]


def rows(
    devices: Sequence[int],
    micro_batches: Sequence[int],
    schedules: Sequence[str],
    size: GptConfig,
    samples: int,
    steps: int,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Measures and simulates each plan; yields a measured and a simulated record of it, gpipe's first.

    Skips schedules that don't take an M.
    """
    largest = dapple.Cluster.local(max(devices), kind="cpu")
    profile = dapple.profile(make_model(size), samples, cluster=largest, cache=False, repeats=2)
    for count in devices:
        cluster = dapple.Cluster.local(count, kind="cpu")
        for m in micro_batches:
            base: tuple[dict[str, Any], dict[str, Any]] | None = None
            for name in dict.fromkeys((GPIPE, *schedules)):
                try:
                    plan = plan_of(name, count, m, size.depth, samples)
                except dapple.PlanError as error:
                    command.say(f"{name} with M = {m} on {count} devices is left out: {error}")
                    continue
                runs = measure(plan, cluster, size, steps)
                peaks = _simulated(plan, profile, cluster)
                varied = {"devices": count, "stages": plan.num_stages, "schedule": name, "micro_batches": m}
                measured: dict[str, Any] = {
                    **varied,
                    "peak_mb": quartiles([max(run) / _MB for run in runs]),
                    "mean_peak_mb": quartiles([statistics.mean(run) / _MB for run in runs]),
                }
                simulated: dict[str, Any] = {
                    **varied, "peak_mb": max(peaks) / _MB, "mean_peak_mb": statistics.mean(peaks) / _MB,
                }  # fmt: skip
                base = base or (measured, simulated)
                measured["peak_of_gpipe"] = measured["peak_mb"].median / base[0]["peak_mb"].median
                measured["mean_peak_of_gpipe"] = measured["mean_peak_mb"].median / base[0]["mean_peak_mb"].median
                for key in ("peak", "mean_peak"):
                    simulated[f"{key}_of_gpipe"] = simulated[f"{key}_mb"] / base[1][f"{key}_mb"]
                yield measured, simulated


def _simulated(plan: dapple.Plan, profile: Profile, cluster: dapple.Cluster) -> list[float]:
    peaks = dapple.simulate(plan, profile, cluster).peak_bytes
    return [peaks[device] for device in sorted({device for devices in plan.devices for device in devices})]


# ---- showing


def table(measured: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]], devices: int) -> str:
    """Returns the measured peak of the fullest device for each schedule and M, in MB, and relative to GPipe's.

    Simulated numbers are in parentheses.

    Args:
        measured: records, as in JSON.
        simulated: records of the simulator.
        devices: number of devices, whose records are shown.
    """
    pairs: dict[tuple[str, int], tuple[Mapping[str, Any], Mapping[str, Any]]] = {
        (one["schedule"], one["micro_batches"]): (one, other)
        for one, other in zip(measured, simulated, strict=True)
        if one["devices"] == devices
    }
    counts = sorted({m for _, m in pairs})
    lines = [("schedule", *(f"M = {m}: MB" for m in counts), *(f"M = {m}: of GPipe's" for m in counts))]
    for name in dict.fromkeys(name for name, _ in pairs):
        row_pairs = [pairs.get((name, m)) for m in counts]
        megabytes = [f"{_median(p[0]['peak_mb']):.1f} ({p[1]['peak_mb']:.1f})" if p else "" for p in row_pairs]
        parts = [f"{p[0]['peak_of_gpipe']:.2f} ({p[1]['peak_of_gpipe']:.2f})" if p else "" for p in row_pairs]
        lines.append((name, *megabytes, *parts))
    return markdown(lines)


def _median(value: Any) -> float:
    """Returns the median of quartiles, as an object or as JSON data."""
    return float(value["median"] if isinstance(value, Mapping) else value.median)


def main() -> None:
    """Runs the measurements of the flags, and prints tables."""
    devices, counts = numbers("devices", _DEVICES.value), numbers("micro_batches", _MICRO_BATCHES.value)
    wrong = [count for count in devices if _BLOCKS.value % count]
    command.check(not wrong, f"--blocks={_BLOCKS.value} don't make equal stages on {wrong} devices; use a multiple")
    command.check_choices(_SCHEDULES, SCHEDULES, empty=True)
    command.check(_WIDTH.value % 4 == 0, f"--width={_WIDTH.value}: need a multiple of the 4 attention heads")
    check_output(_JSON.value)
    size = gpt_size(_BLOCKS.value, _WIDTH.value, _SEQUENCE.value)
    measured: list[dict[str, Any]] = []
    simulated: list[dict[str, Any]] = []
    began = time.monotonic()
    for one, other in rows(devices, counts, _SCHEDULES.value, size, _SAMPLES.value, _STEPS.value):
        measured.append(one)
        simulated.append(other)
        where = f"{one['schedule']}, M = {one['micro_batches']}, {one['devices']} devices"
        command.say(f"{where}: {one['peak_of_gpipe']:.2f} of GPipe's peak", began)
        if _JSON.value:  # Measurements are kept even after an error.
            write_results(_JSON.value, "peak_memory", measured)
            write_results(_JSON.value, "peak_memory_simulated", simulated, kind="simulated")
    for count in devices:
        sys.stdout.write(f"{count} devices; measured (simulated)\n\n{table(measured, simulated, count)}\n\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
