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
GPUs: it shows that the runtime does what the simulator says, in figures that don't depend on a GPU's speed.
"""

_UNITS = """
**Figures 5, 6, 12 and section 8.4.1 in units.** F, Bx and Bw of each layer wait {milliseconds:g} ms; all else is real. A step, in
units, measured (simulated from a profile of the model and its measured links), and how many times as fast as GPipe.
Modulo allocation sends after each layer, 1 MiB that takes a tenth or a fifth of a unit at line rate, which figures in units
leave out:

"""

_PARALLEL = """

**Data parallelism** of two hosts, each gradient reduced with its chunk's others, on links such that all of them take
about as long as computation. Medians; *prioritised* carries updates over into the next forward. Spreads are about 8 % to either side.

"""


def measurements(directory: pathlib.Path) -> dict[str, Any]:
    """Returns what `slow_links` and `two_hosts` have left in a folder."""
    return {**read_results(directory / "slow_links.json"), **read_results(directory / "two_hosts.json")}


def section(measured: Mapping[str, Any]) -> str:
    """Returns the document's section.

    Args:
        measured: see `measurements`.
    """
    records = [record for entry in measured.values() for record in entry["records"] if record.get("work") == "units"]
    unit = records[0]["block_seconds"]
    parts = [_HEAD, _UNITS.format(milliseconds=unit * 1e3), _units(records).markdown()]
    parts += [_PARALLEL, _parallel(measured["two_hosts"]["records"]).markdown()]
    return "".join(parts) + "\n"


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
    header = ["model", "variant", "ms", "over wait-free"]
    rows: list[list[Cell]] = []
    for record in records:
        typical = {
            name: statistics.median(seconds for seconds, _ in undisturbed(steps, record["noise"]))
            for name, steps in record["samples"].items()
        }
        wait_free = typical["wait_free"]
        for name, seconds in typical.items():
            if name in ("wait_free", "pieces") or name.startswith("first_"):
                rows.append([record["model"], _variant(name), f"{seconds * 1e3:.0f}", f"{wait_free / seconds:.2f}"])
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
