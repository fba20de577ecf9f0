"""The results of the reproduction as a document, CSV and JSON files."""

from __future__ import annotations

import csv
import io
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dapple_tf.tools.evaluation.paper_claims import Claim, Results, average_speedups
from dapple_tf.tools.evaluation.paper_experiments import Line5, Line7, Outcome, Policies, RowResult, path_text
from dapple_tf.tools.evaluation.paper_models import FIGURE_11, TABLE_3

Cell = str | float | int | None

_TITLE = """# DAPPLE's evaluation, planned and simulated again

Made by `make results` (`python -m tools.evaluation.reproduce_dapple`); don't edit. [README.md](README.md) says what was
assumed, what was mended in the data, and how to read the tables. The same numbers are in the CSV files beside this one
and in [results.json](results.json).

"""

NOTES = {
    "4/vgg-19/B": (
        "Only one backward can hide the all-reduce of 575 MB, which takes 345 ms; dense layers on a device of "
        "their own, cut where 3 MB cross, need none. The paper finds this plan for config C."
    ),
    "4/gnmt-16/A": (
        "9:7 counts LSTM layers. The classifier behind the last one takes as long as three of them, so that "
        "more of these belong to the first stage."
    ),
    "4/gnmt-16/B": (
        "Eight replicas of a stage all-reduce 580 MB over 25 Gbit/s. Smaller groups have less to reduce, and "
        "the embedding needs no replica."
    ),
    "4/gnmt-16/C": (
        "With an LSTM layer on each device the last one also has the classifier and takes 4 times as long as "
        "the others; we replicate the heavy end."
    ),
    "4/bert-48/A": (
        "With M = 4 a longer first stage fills the bubble that it has between its last forward and the "
        "backward that comes back."
    ),
    "4/bert-48/B": "Straight as well, with a layer more or less on some devices: as fast.",
    "4/bert-48/C": "Straight as well, with a layer more or less on some devices.",
    "4/xlnet-36/B": (
        "Eight replicas of a stage all-reduce 1 GB over 25 Gbit/s; in pairs, an eighth of the model each, "
        "they reduce less and do so at the same time."
    ),
    "4/xlnet-36/C": (
        "Every layer reads 7 MB from the input layers. Our runtime sends a tensor from the stage that makes "
        "it to each stage that reads it, so that the first stage's network card sets a straight pipeline's "
        "pace; the paper's ratio of 0.67 counts these bytes once at each cut."
    ),
    "4/amoeba-36/A": (
        "Stages of a quarter rather than a half of the model: more micro-batches are in flight, and the "
        "longest Apply is half as long."
    ),
    "4/amoeba-36/B": (
        "128 samples don't split into eleven equal parts: one of eleven replicas has two samples of a "
        "micro-batch, whose residuals don't fit by Table 1's memory."
    ),
    "4/amoeba-36/C": "As in config B.",
    "6/vgg-19/A": (
        "Behind the convolutions 3 MB cross the cut, where the paper's has 12 MB, and one device is enough "
        "for the dense layers."
    ),
    "6/amoeba-36/A": "As in table 4.",
    "6/bert-large/A": (
        "GBS 128 is hardly more than one profiled batch of 6 for each device: two stages have M = 2 and a "
        "bubble of a third, data parallelism has none."
    ),
}
"""Reasons why our plan differs, by table, model and config."""

PLOTS = {
    "table4_speedups": "speedups",
    "table6_speedups": "pipedream",
    "figure11_averages": "figure11",
    "table5": "gpipe",
    "table7": "largest_bert",
}
"""Table -> the plot that stands below it."""


@dataclass(frozen=True)
class Table:
    """A table of the document and of a CSV file."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        lines = [self.header, ["---"] * len(self.header), *([_text(cell) for cell in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def csv(self) -> str:
        """Returns the table as CSV, with numbers to six digits."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([_number(cell) for cell in row] for row in self.rows)
        return buffer.getvalue()

    def records(self) -> list[Mapping[str, Cell]]:
        """Returns the table's rows for JSON."""
        return [dict(zip(self.header, map(_number, row), strict=True)) for row in self.rows]


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 20 else f"{cell:.2f}"
    return str(cell).replace("|", "\\|")


def _number(cell: Cell) -> Cell:
    return float(f"{cell:.6g}") if isinstance(cell, float) else cell


# ---- tables


def tables(results: Results) -> list[Table]:
    """Returns every table that has results."""
    all_tables = []
    for number in (4, 6):
        rows = [row for row in results.rows if row.row.table == number]
        if rows:
            all_tables += [_plans(number, rows), _speedups(number, rows), _reasons(number, rows)]
    if results.hybrids:
        all_tables += _figure_11(results)
    if results.larger:
        header = ["model", "GBS", "ours", "ours ms", "DP overlap ms", "speedup over 1 device"]
        larger: list[list[Cell]] = [
            [x.model, x.batch, str(x.ours), x.ours.seconds * 1e3, _ms(x.parallel), x.single / x.ours.seconds]
            for x in results.larger
        ]
        all_tables.append(
            Table("figure12_4x8", "Figure 12's larger cluster: 4 servers of 8, 25 Gbit/s", header, larger)
        )
    if results.policies:
        all_tables.append(_table_3(results.policies))
    if results.table_5:
        all_tables.append(_table_5(results.table_5))
    if results.table_7:
        all_tables.append(_table_7(results.table_7))
    return all_tables


def _ms(outcome: Outcome | None) -> float | None:
    return None if outcome is None else outcome.seconds * 1e3


def _schedule(outcome: Outcome) -> str:
    plan = outcome.plan
    parts = [] if plan.num_stages == 1 else [str(plan.schedule)]
    return ", ".join([*parts, *(["RC"] if plan.recompute != "none" else [])]) or "-"


def _plans(number: int, rows: Iterable[RowResult]) -> Table:
    return Table(
        f"table{number}_plans",
        f"Table {number}: our plans and the paper's",
        ["model", "config", "GBS", "ours", "schedule", "ms", "paper's", "its schedule", "its ms", "its / ours"],
        [
            [
                r.row.model, r.row.config, r.row.batch, str(r.ours), _schedule(r.ours), r.ours.seconds * 1e3,
                str(r.paper) if r.paper.fits else f"({r.paper})", _schedule(r.paper), r.paper.seconds * 1e3,
                r.advantage,
            ]
            for r in rows
        ],
    )  # fmt: skip


def _speedups(number: int, rows: Iterable[RowResult]) -> Table:
    header = ["model", "config", "ours", "paper's plan", "DP overlap", "DP no overlap", "GPipe"]
    lines: list[list[Cell]] = []
    for r in rows:
        others: list[Outcome | None] = [r.ours, r.paper, r.overlap, r.no_overlap, r.gpipe]
        others += [r.pipedream] if number == 6 else []
        cells: list[Cell] = [r.row.model, r.row.config]
        for outcome in others:
            speedup = r.speedup(outcome)
            cells.append(f"({_text(speedup)})" if outcome is not None and not outcome.fits else speedup)
        lines.append(cells)
    title = f"Table {number}: speedups over one device"
    return Table(f"table{number}_speedups", title, header + (["PipeDream"] if number == 6 else []), lines)


def _reasons(number: int, rows: Iterable[RowResult]) -> Table:
    lines: list[list[Cell]] = []
    for r in rows:
        if r.same:
            continue
        note = NOTES.get(f"{number}/{r.row.model}/{r.row.config}", "")
        if not r.paper.fits:
            note = f"{note} The paper's plan doesn't fit: {r.paper.note}.".strip()
        lines.append([r.row.model, r.row.config, note, path_text(r.ours.simulation), path_text(r.paper.simulation)])
    return Table(
        f"table{number}_reasons",
        f"Table {number}: why plans differ",
        ["model", "config", "why", "critical path of ours", "critical path of the paper's"],
        lines,
    )


def _figure_11(results: Results) -> list[Table]:
    lines: list[list[Cell]] = [
        [h.variant, h.config, h.model, str(h.ours), h.ours.seconds * 1e3, h.parallel.seconds * 1e3, h.speedup]
        for h in results.hybrids
    ]
    averages: list[list[Cell]] = [
        [variant, config, value, FIGURE_11[config]]
        for (variant, config), value in average_speedups(results.hybrids).items()
    ]
    header = ["setting", "config", "model", "ours", "ours ms", "DP overlap ms", "speedup"]
    figure_tables = [Table("figure11", "Figure 11: our plans against data parallelism with overlap", header, lines)]
    if averages:
        header = ["setting", "config", "average speedup", "paper"]
        figure_tables.append(Table("figure11_averages", "Figure 11: averages", header, averages))
    return figure_tables


def _table_3(policies: Iterable[Policies]) -> Table:
    lines: list[list[Cell]] = [
        [
            p.model, p.plan, p.quickest, p.steps[p.quickest][0] * 1e3, p.steps[p.quickest][1] * 1e3,
            p.speedup(p.quickest), p.speedup(p.widest), p.widest, TABLE_3[p.model],
        ]
        for p in policies
    ]  # fmt: skip
    return Table(
        "table3",
        "Table 3: P_B over P_A in config A, the paper's plans",
        ["model", "plan", "M", "P_A ms", "P_B ms", "speedup", "largest speedup", "at M", "paper"],
        lines,
    )


def _table_5(lines: Iterable[Line5]) -> Table:
    rows: list[list[Cell]] = [
        [
            line.measured.schedule, line.measured.recompute, line.measured.micro_batches,
            "OOM" if line.throughput is None else line.throughput, line.measured.throughput or "OOM",
            "OOM" if line.memory is None else line.memory / 1e9, line.measured.gigabytes or "OOM",
        ]
        for line in lines
    ]  # fmt: skip
    return Table(
        "table5",
        "Table 5: against GPipe, BERT-48 on two devices of config B",
        ["schedule", "recompute", "M", "samples/s", "paper's samples/s", "average peak GB", "paper's GB"],
        rows,
    )


def _table_7(lines: Iterable[Line7]) -> Table:
    rows: list[list[Cell]] = [
        [
            line.paper.devices, line.layers, line.paper.layers, line.layers / line.paper.devices,
            line.parameters / 1e9, f"{line.utilization:.1%}", f"{line.paper.utilization:.0%}",
        ]
        for line in lines
    ]  # fmt: skip
    header = ["devices", "layers", "paper's layers", "per device", "billion parameters", "utilization", "paper's"]
    return Table("table7", "Table 7: the largest BERT", header, rows)


# ---- files


def write(results: Results, claims: Sequence[Claim], directory: pathlib.Path) -> None:
    """Writes the document and the tables."""
    directory.mkdir(parents=True, exist_ok=True)
    rows: list[list[Cell]] = [[claim.name, claim.paper, claim.ours, claim.status, claim.reason] for claim in claims]
    claimed = Table("claims", "Claims", ["claim", "paper", "ours", "status", "reason"], rows)
    made = [claimed, *tables(results)]
    for table in made:
        (directory / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    records = {table.name: table.records() for table in made}
    (directory / "results.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    (directory / "dapple.md").write_text(_document(made, claims), encoding="utf-8")


def _document(made: Iterable[Table], claims: Sequence[Claim]) -> str:
    failed = [claim for claim in claims if not claim.holds]
    counts = {status: sum(claim.status == status for claim in claims) for status in ("reproduced", "not reproduced")}
    summary = (
        f"{len(claims)} claims: {counts['reproduced']} of the paper's are reproduced, {counts['not reproduced']} "
        f"aren't (the reasons stand beside them), {len(failed)} fail.\n"
    )
    parts = [_TITLE + summary]
    for table in made:
        if not table.rows:
            continue
        parts.append(f"## {table.title}\n\n{table.markdown()}\n")
        if table.name in PLOTS:
            parts.append(f"![{table.title}]({PLOTS[table.name]}.svg)\n")
    return "\n".join(parts)
