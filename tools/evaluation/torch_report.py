"""Writes docs/results/torch.md, our pipelines beside PyTorch's, from the numbers in docs/results/speed.json.

    python -m tools.evaluation.torch_report

`bench_torch` puts its numbers there, with ``--json=docs/results/speed.json``.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import Record, markdown, read_results
from dapple_tf.tools.evaluation.ratios import Quartiles

FLAGS = flags.FlagValues()
_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"

_START = """# Beside PyTorch's pipelines

Written by `python -m tools.evaluation.torch_report` from [speed.json](speed.json), where `bench_torch` leaves its
numbers; [speed.md](speed.md) says what follows from them. Ratios are medians over rounds, with quartiles, of a way's
throughput to that of the best of eager PyTorch's in the same round. Memory is the sum of the peaks of resident memory
of a way's processes: PyTorch's two ranks; our two workers and the client.
"""
_COSTS = """## What a micro-batch costs

A line through the times of micro-batches of the sizes above: what one takes whatever its size (F and B of each
stage, a transfer each way at the cut, its share of the update), and what each of its samples takes.
"""
_TRIALS = """## All ways

Throughput in the few turns by which the best of each kind were chosen.
"""
_ORIGIN = """## When, and on what

Load is the number of processes that wanted one of the cores in the last minute; the comparison's own are two or three.
"""

NAMES = {
    "torch": "PyTorch",
    "torch_compiled": "PyTorch, compiled",
    "ours": "ours",
    "ours_xla": "ours, XLA",
}
"""Kinds of `torch_ways.KINDS` in tables, in their order there."""

_PREFIX = "torch "
_HEADER = 2
"""Lines of a table without rows."""


def report(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the document of a file of results."""
    records = records_of(results)
    sections = [_START, table(records)]
    if len(cost_table(records).splitlines()) > _HEADER:
        sections += ["", _COSTS, cost_table(records)]
    return "\n".join([*sections, "", _TRIALS, trials(records), "", _ORIGIN, origins(results)]) + "\n"


def origins(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the commit, the machine, the load, the versions and the command of each comparison, as Markdown."""
    rows: list[tuple[object, ...]] = [("comparison", "date", "commit", "cores", "load", "versions", "command")]
    for name, entry in _comparisons_of(results).items():
        machine = entry["machine"]
        versions = ", ".join(f"{package} {machine['versions'][package]}" for package in ("tensorflow", "torch"))
        commit = entry.get("commit") or "not recorded"
        own = machine["date"], commit, f"{machine['cores']} ({machine['cpu']})", machine["load_1min"], versions
        rows.append((name.removeprefix(_PREFIX), *own, f"`{entry['command']}`"))
    return markdown(rows)


def records_of(results: Mapping[str, Mapping[str, Any]]) -> list[Record]:
    """Returns the records of all comparisons in a file of results."""
    return [record for entry in _comparisons_of(results).values() for record in entry["records"]]


def table(records: Iterable[Record]) -> str:
    """Returns the best way of each kind in each comparison, as Markdown."""
    rows: list[tuple[object, ...]] = [
        ("model", "type", "samples", "best way", "samples/s", "of PyTorch's", "peak memory (MiB)", "of PyTorch's")
    ]
    for comparison in _comparisons(records):
        finalists = [record for record in comparison if "rounds" in record]
        memory = next((record["peak_mib"] for record in finalists if record["kind"] == "torch"), None)
        for record in finalists:
            peak = record["peak_mib"]
            rows.append(
                (
                    *(record[key] for key in ("model", "dtype", "samples", "way")),
                    f"{_quartiles(record['samples_per_s']).median:.1f}",
                    _quartiles(record["ratio_to_torch"]) if "ratio_to_torch" in record else "",
                    f"{peak:.0f}",
                    "" if memory is None else f"{peak / memory:.2f}",
                )
            )
    return markdown(rows)


def trials(records: Iterable[Record]) -> str:
    """Returns the throughput of all ways in the turns by which the best were chosen, as Markdown."""
    rows: list[tuple[object, ...]] = [("model", "type", "samples", "samples/s of each way")]
    for comparison in _comparisons(records):
        rates = ", ".join(f"{record['way']} {record['trial_samples_per_s']:.1f}" for record in comparison)
        rows.append((*(comparison[0][key] for key in ("model", "dtype", "samples")), rates))
    return markdown(rows)


def cost_table(records: Iterable[Record]) -> str:
    """Returns the microseconds of a micro-batch and of a sample, where there are several sizes, as Markdown."""
    rows: list[tuple[object, ...]] = [("model", "type", "", "us of a micro-batch", "us of each of its samples")]
    finalists = [record for record in records if "rounds" in record]
    order = list(NAMES)

    def key(record: Record) -> tuple[Any, ...]:
        return record["model"], record["dtype"], order.index(record["kind"])

    for (model, dtype, kind), group in itertools.groupby(sorted(finalists, key=key), key):
        sizes = list(group)
        if len(sizes) > 1:
            fixed, each = costs(sizes)
            rows.append((model, dtype, NAMES[order[kind]], f"{fixed:.0f}", f"{each:.0f}"))
    return markdown(rows)


def costs(records: Sequence[Record]) -> tuple[float, float]:
    """Returns the microseconds that a micro-batch takes whatever its size, and those of each of its samples.

    A line through the times of micro-batches of several sizes, which deviates least in proportion to them. A
    micro-batch takes F and B in each stage, and a transfer each way at each cut; the update of a step is among it.
    """
    sizes = np.array([record["samples"] for record in records], np.float64)
    times = np.array([1e6 * record["samples"] / _quartiles(record["samples_per_s"]).median for record in records])
    each, fixed = np.polyfit(sizes, times, 1, w=1 / times)
    return float(fixed), float(each)


def _comparisons_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: entry for name, entry in results.items() if name.startswith(_PREFIX)}


def _comparisons(records: Iterable[Record]) -> list[list[Record]]:
    """Returns the records of each model, type and size, in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record["model"], record["dtype"], record["samples"]), []).append(record)
    return list(groups.values())


def _quartiles(value: Any) -> Quartiles:
    """Returns quartiles, which are a mapping in a file."""
    return Quartiles(**value) if isinstance(value, Mapping) else value


def main() -> None:
    """Writes the document."""
    try:
        results = read_results(_FOLDER / "speed.json")
    except ValueError as error:
        command.check(False, str(error))
    (_FOLDER / "torch.md").write_text(report(results), encoding="utf-8")


if __name__ == "__main__":
    command.start(main, FLAGS)
