"""The document of `operator_workers`' measurements.

python -m tools.evaluation.operator_workers_report    # docs/results/operator_workers.json -> operator_workers.md
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import markdown, write_document

FLAGS = flags.FlagValues()

_JSON = flags.DEFINE_string("json", "docs/results/operator_workers.json", "Measurements.", flag_values=FLAGS)

BAND = 0.02
"""Part of a step by which ways must differ at least to count as unlike; more if the same plan differs by more."""

_HEAD = """\
# Operators placed on workers

Written by `python -m tools.evaluation.operator_workers_report` from operator_workers.json, which these runs measured
(with root):

{commands}

Real steps on {cpu}, TensorFlow {tensorflow}: network namespaces with a worker each, a whole core for each of two or
half a core for each of four (a control group's quota). All ways of a table train in turns; medians, ms. *single* is one
worker; *data_parallel* reduces gradients while its backward runs, where that gains; *stages* has one on each, equally
long; *planned* is what `dapple.plan` finds with everything; *fd_dps* places operators. "Predicted" is the simulation
from layers, operators and links measured before. *inception* is Inception-V3 on 96 x 96 images, *towers* four towers of
convolutions, *wide_towers* four towers of dense layers, whose gradients outweigh what the towers read. A worker's core
also sends and receives, which predictions take to be free, as on a GPU: what sends much is slower than predicted.
Seconds of one way differ by the machine's speed on the day; ways of one table took turns. A machine that computes at
half its speed has links that are twice as fast beside it, which helps what sends much. Inception's tables are older
than the others, from before batches' layouts were searched: to be measured again by `--models=inception`.
On workers, with which other operators, links and devices FD-DPS would begin to pay wasn't searched for; of GPUs
[fd_dps.md](fd_dps.md) has a small simulated sweep.

{tally}
"""


def document(results: Mapping[str, Any]) -> str:
    """Returns the text of the document.

    Args:
        results: those that `operator_workers` has written, one benchmark for each number of hosts.
    """
    records = [record for entry in results.values() for record in entry["records"]]
    machine = next(iter(results.values()))["machine"]
    head = _HEAD.format(
        commands="\n".join(f"    {entry['command']}  # {entry['machine']['date']}" for entry in results.values()),
        cpu=f"{machine['cores']} cores of an {machine['cpu']}",
        tensorflow=machine["versions"]["tensorflow"],
        tally=tally(records),
    )
    parts = [head]
    for record in records:
        parts += [f"## {name(record)}\n", _table(record["rows"]), ""]
    return "\n".join(parts)


def medians(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the measured step of each way, in seconds."""
    return {row["way"]: statistics.median(row["steps"]) for row in record["rows"]}


def noise(records: Sequence[Mapping[str, Any]]) -> float:
    """Returns the largest relative difference of two ways that trained by the same plan; 0 if none did."""
    largest = 0.0
    for record in records:
        times = medians(record)
        for one, other in itertools.combinations(record["rows"], 2):
            if (one["plan"], one["predicted"]) == (other["plan"], other["predicted"]):
                low, high = sorted((times[one["way"]], times[other["way"]]))
                largest = max(largest, high / low - 1)
    return largest


def tally(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns where FD-DPS pays, as text.

    A way that was faster over slower links counts there, too: without them it is no slower.
    """
    limit = max(BAND, noise(records))
    fastest: list[str] = []
    level: list[str] = []
    slower: list[str] = []
    for record in records:
        own = medians(record)["fd_dps"]
        seconds, best = min(
            (seconds, way + (f" over {_links(other)}" if other["rate_mbit"] != record["rate_mbit"] else ""))
            for other in records
            if _no_faster_links(other, record)
            for way, seconds in medians(other).items()
            if way != "fd_dps"
        )
        among = fastest if own * (1 + limit) < seconds else level if own <= seconds * (1 + limit) else slower
        among.append(f"{name(record)}: {seconds / own:.2f} times as fast as {best}")
    lines = []
    for title, texts in (
        (f"FD-DPS is the fastest by more than {limit:.0%}", fastest),
        (f"It is within {limit:.0%} of the fastest of the others", level),
        ("It is slower", slower),
    ):
        lines += [f"{title}: {len(texts)} of {len(records)}.", "", *(f"* {text}" for text in texts)]
        lines += [""] if texts else []
    if limit > BAND:
        lines.append(f"Two ways that trained by the same plan differ by up to {limit:.0%}: less may be noise.")
    return "\n".join(lines).rstrip()


def _no_faster_links(other: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether the same model was measured on the same hosts over the same links, or slower ones."""
    same = all(other[key] == record[key] for key in ("model", "hosts", "cores"))
    return same and (other["rate_mbit"] or math.inf) <= (record["rate_mbit"] or math.inf)


def name(record: Mapping[str, Any]) -> str:
    """Returns what was measured together, for people."""
    cores = "a core" if record["cores"] == 1 else f"{record['cores']:g} cores"
    return f"{record['model']}, {record['hosts']} hosts of {cores} each, {_links(record)}"


def _links(record: Mapping[str, Any]) -> str:
    return f"links of {record['rate_mbit']:g} Mbit/s" if record["rate_mbit"] else "links without a limit"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    times = medians({"rows": rows})
    lines: list[Sequence[object]] = [
        ("way", "plan", "predicted", "measured", "least", "most", "error", "single / this")
    ]
    for row in rows:
        measured = times[row["way"]]
        shown = row["predicted"], measured, min(row["steps"]), max(row["steps"])
        error, gain = f"{row['predicted'] / measured - 1:+.1%}", f"{times['single'] / measured:.3f}"
        lines.append((row["way"], row["plan"], *(f"{time * 1e3:.0f}" for time in shown), error, gain))
    return markdown(lines)


def main() -> None:
    """Writes the document beside the measurements."""
    write_document(_JSON.value, document)


if __name__ == "__main__":
    command.start(main, FLAGS)
