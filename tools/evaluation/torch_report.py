"""Tables of `tools.evaluation.bench_torch`: the best ways beside each other, and what a micro-batch costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dapple_tf.tools.evaluation.bench_report import Record, markdown
from dapple_tf.tools.evaluation.ratios import Quartiles

NAMES = {
    "torch": "PyTorch",
    "torch_compiled": "PyTorch, compiled",
    "ours": "ours",
    "ours_xla": "ours, XLA",
}
"""Kinds of `torch_ways.KINDS` in tables, in their order there."""


def records_of(results: Mapping[str, Mapping[str, Any]]) -> list[Record]:
    """Returns the records of all comparisons in a file of results."""
    return [record for name, entry in results.items() if name.startswith("torch ") for record in entry["records"]]


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


def _comparisons(records: Iterable[Record]) -> list[list[Record]]:
    """Returns the records of each model, type and size, in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record["model"], record["dtype"], record["samples"]), []).append(record)
    return list(groups.values())


def _quartiles(value: Any) -> Quartiles:
    """Returns quartiles, which are a mapping in a file."""
    return Quartiles(**value) if isinstance(value, Mapping) else value
