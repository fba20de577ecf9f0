"""What of Out-Of-Order BackProp was measured here, on workers between namespaces, as a part of its document."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.paper_report import Cell, Table
from dapple_tf.tools.evaluation.quiet import undisturbed

_HEAD = """## Measured

Workers in network namespaces of one machine with two cores ([slow_links.md](slow_links.md),
[two_hosts.md](two_hosts.md) have the commands, the machine and spreads). Nothing of it is a claim about the paper's
GPUs.
"""

_UNITS = """
**Figures 5, 6, 12 and section 8.4.1 in units.** F, Bx and Bw of each layer wait {milliseconds:g} ms; all else is
real. A step, in units, measured (simulated from a profile of the model and its measured links), and how many times
as fast as GPipe. Modulo allocation sends after each layer, 1 MiB that takes a tenth or a fifth of a unit at line
rate, which figures in units leave out. The runtime does what the simulator says here, within {near:.0%} in {within}
of {count} steps and within {furthest:.1%} in all:

"""

_PARALLEL = """

**Data parallelism** of two hosts, each gradient reduced with its chunk's others, on links such that all of them take
about as long as computation. Medians, and the least and most step; *prioritised* carries updates over into the next
forward. {spread},
so that most variants can't be told apart. No simulation stands beside these.

"""


def measurements(directory: pathlib.Path) -> dict[str, Any]:
    """Returns what `slow_links` and `two_hosts` have left in a folder."""
    return {**read_results(directory / "slow_links.json"), **read_results(directory / "two_hosts.json")}


NEAR = 0.07
"""Relative difference between a measured step in units and its simulation that most of them have at most."""


def section(measured: Mapping[str, Any]) -> str:
    """Returns the document's section.

    Args:
        measured: see `measurements`.
    """
    records = [record for entry in measured.values() for record in entry["records"] if record.get("work") == "units"]
    unit = records[0]["block_seconds"]
    errors = [abs(row["predicted"] / statistics.median(row["steps"]) - 1) for one in records for row in one["rows"]]
    facts = {"within": sum(error <= NEAR for error in errors), "count": len(errors), "furthest": max(errors)}
    parts = [_HEAD, _UNITS.format(milliseconds=unit * 1e3, near=NEAR, **facts), _units(records).markdown()]
    variants = measured["two_hosts"]["records"]
    parts += [_PARALLEL.format(spread=spread(variants)), _parallel(variants).markdown()]
    return "".join(parts) + "\n"


def spread(records: list[dict[str, Any]]) -> str:
    """Returns how far single steps of `two_hosts` are from their median, over all variants that reduce and compute."""
    below, above = [], []
    for record in records:
        for name, seconds in counted(record).items():
            if name not in ("compute", "all_reduce"):
                middle = statistics.median(seconds)
                below.append(1 - min(seconds) / middle)
                above.append(max(seconds) / middle - 1)
    return (
        f"Of the steps of a variant the least is up to {max(below):.0%} below their median, "
        f"the most up to {max(above):.0%} above it"
    )


def counted(record: dict[str, Any]) -> dict[str, list[float]]:
    """Returns variant -> seconds of the steps that count (`undisturbed`)."""
    return {
        name: [seconds for seconds, _ in undisturbed(steps, record["noise"])]
        for name, steps in record["samples"].items()
    }


def _units(records: list[dict[str, Any]]) -> Table:
    policies = [row["schedule"] for row in records[0]["rows"]]
    header = ["layers", "hosts", "M", *policies, *(f"{name} over gpipe" for name in policies[1:])]
    rows: list[list[Cell]] = []
    for record in records:
        unit = record["block_seconds"]
        times = {row["schedule"]: statistics.median(row["steps"]) for row in record["rows"]}
        row: list[Cell] = [record["blocks"], record["hosts"], record["micro_batches"]]
        row += [f"{times[one['schedule']] / unit:.1f} ({one['predicted'] / unit:.1f})" for one in record["rows"]]
        row += [f"{times['gpipe'] / times[name]:.2f}" for name in policies[1:]]
        rows.append(row)
    return Table("measured_units", "", header, rows)


def _parallel(records: list[dict[str, Any]]) -> Table:
    header = ["model", "variant", "ms", "least", "most", "over wait-free"]
    rows: list[list[Cell]] = []
    for record in records:
        steps = counted(record)
        wait_free = statistics.median(steps["wait_free"])
        for name, seconds in steps.items():
            if name in ("wait_free", "pieces") or name.startswith("first_"):
                middle = statistics.median(seconds)
                times = (f"{each * 1e3:.0f}" for each in (middle, min(seconds), max(seconds)))
                rows.append([record["model"], _variant(name), *times, f"{wait_free / middle:.2f}"])
    return Table("measured_parallel", "", header, rows)


def _variant(name: str) -> str:
    """Returns a variant of `two_hosts` in the paper's words."""
    if name == "pieces":
        return "wait-free, pieces of one stage's backward"
    first, _, carried = name.partition("_carried_")
    words = "wait-free" if first in ("wait_free", "first_0") else f"reverse {first.replace('_', '-')}"
    if carried:
        words = f"{'prioritised' if words == 'wait-free' else words}, {carried} updates carried"
    return words
