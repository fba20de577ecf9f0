"""Writes docs/results/scale.md, tables of how the library scales, from the numbers in docs/results/scale.json.

    python -m tools.evaluation.scale_report

The benchmarks put their numbers there: `bench_memory`, `bench_preparation`, `bench_planner`, `bench_many_devices`,
`bench_recompute`, `bench_first_step`, `bench_checkouts` and `rewrite_models`, each with
``--json=docs/results/scale.json``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import (
    bench_checkouts,
    bench_first_step,
    bench_many_devices,
    bench_memory,
    bench_planner,
    bench_preparation,
    bench_recompute,
    rewrite_models,
)
from dapple_tf.tools.evaluation.bench_report import read_results

FLAGS = flags.FlagValues()
_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"
_MODELS = "rewrite_models "

_START = """# How it scales

Written by `python -m tools.evaluation.scale_report` from [scale.json](scale.json), where the benchmarks leave their
numbers. *Measured* is what ran here; *simulated* is what `dapple.simulate` expects of the same plan. Seconds "of one
core" are processor time, which changes little when other programs use the machine: the load tells how many did.
"""
_MEMORY = """## Peak memory against the number of micro-batches

A GPT of equal blocks, micro-batches of a fixed size. In each cell: measured (simulated). MB are the peak of the fullest
device: allocation records of a traced step on top of variables, slots and accumulators. "Of GPipe's" is that over
GPipe's of the same devices and M.
"""
_RECOMPUTE = """## Recomputation: time and memory

Two stages on two logical devices under dapple_a: a GPT and a BERT of 4 layers of width 256 with 128 tokens, and a
ResNet of ten blocks. `none` keeps all residuals, `boundary` a stage's inputs only, `min_cut` what can't be had again by
elementwise work. Ways take turns; time is a ratio to `none`, with quartiles. Peaks are of the fuller device, with all
that stays between steps; what functions compiled with XLA allocate isn't in allocation records. All measured.
"""
_OFFLOAD = """### Beside what waits in the host's memory

The GPT under gpipe with eight micro-batches, all of which are in flight: with `offload` a device has three of them at
the most, the others wait in the memory of a third logical device. Copies take the machine's own two cores here; GPUs
copy beside their computation.
"""
_PREPARATION = """## Preparing a step against devices and micro-batches

BERT of 48 layers at reduced width, a stage on each logical device, each line in a process of its own; all measured.
Parts are seconds on the clock; preparation is from `transform` to the end of the first step, less what a later step
takes. The first run is TensorFlow's own preparation.
"""
_CHECKOUTS = """### Before and now

What these programs take now beside an older commit, {before}: each in a process of its own, checkouts in turns; seconds
are medians, ratios those of each round, with quartiles. Preparation on the clock, planning of one core.

Ratios depend on the machine: where Python took 2.5 times as long, the commit before the last change to preparation had
0.419 (0.408 to 0.429) and, in one round, 0.359. Ten seconds of the full-size model's first run are the kernel's, which
clears 12 GB, page by page, as values, gradients and residuals first need them.
"""
_FIRST_STEP = """## The first step of image models

Models of keras.applications for 96 x 96 pixels in two stages on two logical devices, 8 samples in 4 micro-batches,
beside plain Keras: from the compiled model to the end of the first step, less what a later step takes. Medians of
processes that take turns; all measured. Most of it is TensorFlow's Python, which makes each operator: once for Keras'
forward, twice for ours, whose `transform` examines the model before there is data; and once for the gradients of both.
"""
_FIRST_STEP_XLA = """### With XLA, and again

The same with `jit_compile`, and a second process with the programs that the first one left in a folder
([how to](../tools.md#compiled-programs-that-are-kept)).
"""
_PLANNER = """## Planning against layers and devices

All measured, of one core; what is planned for, V100s, is a description. In parentheses: over the first cell. A star:
nothing fits the devices' memory, which is what the planner says then. Cores differ: the day before, another machine of
this kind took 2.9 to 4.4 s for 16 devices. The lines of "Before and now" are medians, of other hours.
"""
_MANY = """## A step of 4 to 64 devices, and what 256 and 1,024 would need

A BERT of width 8, an encoder layer and an output layer or less in each stage, on logical devices of one process:
*straight* is a stage on each device and as many micro-batches; *replicas* is four stages of equally many devices, and
16 micro-batches. *Measured*: nodes that a step runs (its operators are inside functions), feeds and fetches of the
client's call, tensors from one device to another, and those that would go between servers of eight devices. A task is
an F or B of a slice; its time of a core has the stage's own operators in it. In italics *extrapolated*,
not run: a + b devices + c tasks, fitted to the lines above.

On a cluster the client's TensorFlow server is the master: it sends each worker one RunGraph and one CleanupGraph for a
step, so that the client makes two calls a worker, however many tasks there are; all else goes between workers, one
RecvTensor for each tensor between servers. Each worker runs the tasks of its own devices.
"""
_REWRITING = """## Full-size models, rewritten without being run

Each model is built without values, captured, cut evenly by parameters and rewritten into the complete graph of a
training step; devices are a description. All measured; seconds are of one core. *Layers* are those that can be cut
apart, *cuts* is the time of finding them, *capture* includes losses, metrics and the optimizer's slots. The peak is
that of the process so far, TensorFlow included; plans of a model follow one another in it. For 16 and 32 devices each
there are a straight pipeline (of fewer stages with replicas where a model hasn't as many layers), eight replicated
stages, and data parallelism, which is one stage.
"""


def _origin(entries: list[Mapping[str, Any]]) -> str:
    """Returns what was run where."""
    lines = []
    for entry in entries:
        machine = entry["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        text = (
            f"`{entry['command']}` on {machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']}, "
            f"{machine['date']}; {versions}."
        )
        lines.append(text)
    return "\n\n".join(dict.fromkeys(lines))


def _bottlenecks(rows: list[Mapping[str, Any]]) -> str:
    """Returns what becomes too much first on the most devices of the table, from its extrapolation."""
    ways = {way: [row for row in rows if row["way"] == way] for way in bench_many_devices.WAYS}
    if min(map(len, ways.values())) < 3:
        return "Too few numbers of devices were measured to extrapolate."
    straight, replicas = (bench_many_devices.extrapolated(own, 1024) for own in ways.values())
    each = straight["step_core_ms"] / 1024
    own = replicas["step_core_ms"] / 1024
    return (
        f"**The first bottleneck is the graph in the client.** A straight pipeline of 1,024 devices would have "
        f"{straight['nodes'] / 1e6:.1f} million nodes, all made, checked and partitioned by one process before the "
        f"first step: {straight['preparation_s'] / 60:.0f} minutes at the rate above. Its tasks would be "
        f"{straight['tasks'] / 1024:,.0f} on each device, {each:,.0f} ms of a core, which real computation hides. With "
        f"replicas the same devices need {replicas['nodes']:,.0f} nodes and {replicas['preparation_s']:.0f} s, and "
        f"{own:,.0f} ms of a core on each. So pipelines of this size want replicas. Nodes grow with tasks since "
        f"a step is one static graph: only a loop over micro-batches on each device would end that, and it would give "
        f"up orders of tasks across stages."
    )


def report(results: Mapping[str, Any]) -> str:
    """Returns the document.

    Args:
        results: benchmark -> its results, as `read_results` gives them; sections of others are left out.
    """
    sections = [_START]
    if "peak_memory" in results:
        measured, simulated = (results[name]["records"] for name in ("peak_memory", "peak_memory_simulated"))
        counts = dict.fromkeys(record["devices"] for record in measured)
        tables = [f"{count} devices:\n\n{bench_memory.table(measured, simulated, count)}\n" for count in counts]
        sections += [_MEMORY, *tables, _origin([results["peak_memory"]])]
    if "recompute" in results:
        entry = results["recompute"]
        sections += [_RECOMPUTE, bench_recompute.table(entry["records"]), "", _origin([entry])]
    if (name := f"{bench_recompute.NAME} gpipe") in results:
        entry = results[name]
        sections += [_OFFLOAD, bench_recompute.table(entry["records"]), "", _origin([entry])]
    if "preparation" in results:
        entry = results["preparation"]
        sections += [_PREPARATION, bench_preparation.table(entry["records"]), "", _origin([entry])]
    if bench_checkouts.NAME in results:
        entry = results[bench_checkouts.NAME]
        before = entry["records"][0]["before"]
        sections += [_CHECKOUTS.format(before=before), bench_checkouts.table(entry["records"]), "", _origin([entry])]
    for name, text in ((bench_first_step.NAME, _FIRST_STEP), (f"{bench_first_step.NAME} XLA", _FIRST_STEP_XLA)):
        if name in results:
            entry = results[name]
            sections += [text, bench_first_step.table(entry["records"]), "", _origin([entry])]
    if "planner" in results:
        entry = results["planner"]
        sections += [_PLANNER, bench_planner.table(entry["records"]), "", _origin([entry])]
    if "many_devices" in results:
        entry = results["many_devices"]
        rows = entry["records"]
        sections += [_MANY, bench_many_devices.table(rows), "", _bottlenecks(rows), "", _origin([entry])]
    models = [entry for name, entry in results.items() if name.startswith(_MODELS)]
    if models:
        rows = [record for entry in models for record in entry["records"]]
        first = min(models, key=lambda entry: entry["machine"]["date"])
        sections += [_REWRITING, rewrite_models.table(rows), "", _origin([first])]
    return "\n".join(section if not section.startswith("## ") else f"\n{section}" for section in sections) + "\n"


def main() -> None:
    """Writes the document."""
    try:
        results = read_results(_FOLDER / "scale.json")
    except ValueError as error:
        command.check(False, str(error))
    (_FOLDER / "scale.md").write_text(report(results), encoding="utf-8")


if __name__ == "__main__":
    command.start(main, FLAGS)
