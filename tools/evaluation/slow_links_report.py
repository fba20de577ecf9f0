"""The document of `slow_links`' measurements.

python -m tools.evaluation.slow_links_report        # docs/results/slow_links.json -> slow_links.md beside it
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import markdown, write_document

FLAGS = flags.FlagValues()

_JSON = flags.DEFINE_string("json", "docs/results/slow_links.json", "Measurements.", flag_values=FLAGS)

BAND = 0.1
"""Errors up to this are small."""

_HEAD = """\
# Policies on slow links

Written by `python -m tools.evaluation.slow_links_report` from slow_links.json, which these runs measured (with root);
the load is the mean number of processes that wanted a core in a run's last minute, its own and all others:

{commands}

Network namespaces with real workers, each with a core or a share of one, train eight equal blocks in 8 micro-batches.
Blocks wait (F 15 ms, Bx 30 ms, without using a core; Bw takes next to nothing), so that two cores carry several
workers; gradients, transfers, all-reduces and updates are real. `tc tbf` limits the links so that what a stage sends
takes the given part of its forward. All plans of a size train in turns; medians of the measured steps, ms. "Predicted"
is the simulation by a profile of the model and links measured at that rate. A 2:2 plan has two stages of two replicas.
With skips every block reads the first one's results, too; "relays" are stages that hand them on. In units F, Bx and Bw
of a block wait equally long, as in Out-Of-Order BackProp's figures, and modulo allocates block by block.

{tally}
"""


def outside(records: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any], float]]:
    """Returns the rows whose prediction is off by more than `BAND`: the measured size, the row, its error."""
    rows = [(record, row, error(row)) for record in records for row in record["rows"]]
    return [entry for entry in rows if abs(entry[2]) > BAND]


def error(row: Mapping[str, Any]) -> float:
    """Returns predicted over measured, less 1."""
    return float(row["predicted"] / statistics.median(row["steps"]) - 1)


def document(results: Mapping[str, Any]) -> str:
    """Returns the text of the document.

    Args:
        results: those that `slow_links` has written, one benchmark for each number of hosts.
    """
    records = [record for entry in results.values() for record in entry["records"]]
    rows = sum(len(record["rows"]) for record in records)
    others = outside(records)
    tally = f"{rows - len(others)} of {rows} predictions are within {BAND:.0%} of what was measured."
    if others:
        listed = (f"{name(record)}, {row['schedule']} ({off:+.1%})" for record, row, off in others)
        tally += f" The others: {'; '.join(listed)}."
    commands = "\n".join(f"* `{entry['command']}`\n  on {_machine(entry['machine'])}" for entry in results.values())
    parts = [_HEAD.format(commands=commands, tally=tally)]
    for record in records:
        rate = f"{record['message_bytes'] / 2**20:.2f} MiB at {record['rate_mbit']:.0f} Mbit/s"
        parts += [f"## {name(record)}: {rate}\n", _table(record["rows"]), ""]
    return "\n".join(parts)


def name(record: Mapping[str, Any]) -> str:
    """Returns what was measured together, for people."""
    skips = ", skips" if record.get("skips") else ""
    if record.get("work") == "units":
        skips = f", units, {record['blocks']} blocks, M={record['micro_batches']}"
    return f"{record['hosts']} hosts{skips}, {record['plan']}, transfers of {record['transfer']:g} of a forward"


def _machine(machine: Mapping[str, Any]) -> str:
    """Returns the facts of `machine_facts` that matter to these times."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, TensorFlow {machine['versions']['tensorflow']}, "
        f"load {machine['load_1min']}, {machine['date']}"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    medians = {row["schedule"]: statistics.median(row["steps"]) for row in rows}
    base = "dapple_a" if "dapple_a" in medians else "gpipe"
    head = ("schedule", "plan", "predicted", "measured", "least", "most", "error", f"{base} / this")
    lines: list[Sequence[object]] = [head]
    for row in rows:
        times = row["predicted"], medians[row["schedule"]], min(row["steps"]), max(row["steps"])
        ratio = f"{medians[base] / medians[row['schedule']]:.3f}" if base in medians else "-"
        lines.append(
            (row["schedule"], row["plan"], *(f"{time * 1e3:.0f}" for time in times), f"{error(row):+.1%}", ratio)
        )
    return markdown(lines)


def main() -> None:
    """Writes the document beside the measurements."""
    write_document(_JSON.value, document)


if __name__ == "__main__":
    command.start(main, FLAGS)
