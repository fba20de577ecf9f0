"""Writes docs/results/scale.md, tables of how the library scales, from the numbers in docs/results/scale.json.

    python -m tools.evaluation.scale_report

The benchmarks put their numbers there: `bench_memory`, `bench_preparation`, `bench_planner` and `rewrite_models`, each
with ``--json=docs/results/scale.json``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import bench_memory, bench_planner, bench_preparation, rewrite_models
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
_PREPARATION = """## Preparing a step against devices and micro-batches

BERT of 48 layers at reduced width, a stage on each logical device, each line in a process of its own; all measured.
Parts are seconds on the clock; preparation is from `transform` to the end of the first step, less what a later step
takes. The first run is TensorFlow's own preparation.
"""
_PLANNER = """## Planning against layers and devices

All measured, of one core; what is planned for, V100s, is a description. In parentheses: over the first cell. A star:
nothing fits the devices' memory, which is what the planner says then.
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
    if "preparation" in results:
        entry = results["preparation"]
        sections += [_PREPARATION, bench_preparation.table(entry["records"]), "", _origin([entry])]
    if "planner" in results:
        entry = results["planner"]
        sections += [_PLANNER, bench_planner.table(entry["records"]), "", _origin([entry])]
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
