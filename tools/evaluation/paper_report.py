"""The results of DAPPLE's evaluation as tables, a document and CSV files, all made from the stored records."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapple_tf.tools.evaluation.paper_experiments import FIGURE_14_BATCHES
from dapple_tf.tools.evaluation.paper_figures import (
    COUNTED,
    FAILS,
    FITTED,
    HOLDS,
    NEAR,
    NOT,
    OTHERWISE,
    REPRODUCED,
    Claim,
    Results,
    average,
    better,
    claims,
    counts,
    hybrid,
    opponents_of,
    speedups_14,
)
from dapple_tf.tools.evaluation.paper_models import (
    FIGURE_11,
    FIGURE_11_MODELS,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    PaperRow,
)
from dapple_tf.tools.evaluation.paper_outcomes import Record, times_of

Cell = str | float | int | None

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
    "figure14": "scaling",
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
        lines = [self.header, ["---"] * len(self.header), *([text(cell) for cell in row] for row in self.rows)]
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


def text(cell: Cell) -> str:
    """Returns a cell as it stands in Markdown."""
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
    made = []
    for number, paper_rows in ((4, TABLE_4), (6, TABLE_6)):
        rows = [row for row in paper_rows if row.key in results]
        if rows:
            made += [_plans(number, rows, results), _speedups(number, rows, results), _reasons(number, rows, results)]
    made += [_opponents(results), *_figure_11(results), _figure_12(results), _figure_14(results), _table_3(results)]
    made += [_gains(results), _figure_8(results), _table_5(results), _table_7(results), _sensitivity(results)]
    return [table for table in made if table.rows]


def plan_text(record: Mapping[str, Any] | None) -> str | None:
    """Returns a plan in a line, such as ``8:8 at 26, M=4``, in parentheses if it doesn't fit."""
    if record is None:
        return None
    cuts = record["cuts"].split(",")
    places = ",".join(cuts) if len(cuts) <= 3 else f"{cuts[0]},{cuts[1]},..,{cuts[-1]}"
    shown = f"{record['plan']}{f' at {places}' if record['cuts'] else ''}, M={record['M']}"
    return shown if record["fits"] else f"({shown})"


def _schedule(record: Mapping[str, Any]) -> str:
    parts = [] if record["schedule"] == "-" else [record["schedule"]]
    return ", ".join([*parts, *(["RC"] if record["recompute"] != "none" else [])]) or "-"


def _ms(record: Mapping[str, Any] | None) -> float | None:
    return None if record is None else float(record["ms"])


def _plans(number: int, rows: Sequence[PaperRow], results: Results) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        record = results[row.key]
        ours, paper, everything = record["ours"], record["paper"], record["everything"]
        lines.append(
            [
                row.model, row.config, row.batch, plan_text(ours), _schedule(ours), ours["ms"], plan_text(paper),
                _schedule(paper), paper["ms"], times_of(ours, paper), record["choice"], plan_text(everything),
                _schedule(everything), everything["ms"], times_of(everything, paper),
                *([] if number == 6 else [record["ACR"], row.acr]),
            ]
        )  # fmt: skip
    header = [
        "model", "config", "GBS", "ours", "schedule", "ms", "paper's", "its schedule", "its ms", "its / ours", "choice",
        "ours with everything", "its schedule and features", "everything ms", "paper's / everything",
        *([] if number == 6 else ["ACR", "paper's ACR"]),
    ]  # fmt: skip
    return Table(f"table{number}_plans", f"Table {number}: our plans and the paper's", header, lines)


def _speedups(number: int, rows: Sequence[PaperRow], results: Results) -> Table:
    header = ["model", "config", "ours", "paper's plan", "DP overlap", "DP no overlap", "GPipe"]
    columns = ["ours", "paper", "overlap", "no overlap", "gpipe"]
    if number == 6:
        header, columns = [*header, "PipeDream"], [*columns, "pipedream"]
    lines: list[list[Cell]] = []
    for row in rows:
        record = results[row.key]
        cells: list[Cell] = [row.model, row.config]
        for column in columns:
            other = record[column]
            speedup = None if other is None else record["single ms"] / other["ms"]
            cells.append(f"({text(speedup)})" if other is not None and not other["fits"] else speedup)
        lines.append(cells)
    title = f"Table {number}: speedups over one device, the same schedules for all"
    return Table(f"table{number}_speedups", title, header, lines)


def _path(record: Mapping[str, Any]) -> str:
    ranked = sorted(((ms, name) for name, ms in record["path"].items() if ms >= 0.5), reverse=True)
    return ", ".join(f"{name} {ms:.0f}" for ms, name in ranked) + " ms"


def _reasons(number: int, rows: Sequence[PaperRow], results: Results) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        record = results[row.key]
        ours, paper = record["ours"], record["paper"]
        if record["choice"] == "same cuts and replicas":
            continue
        note = NOTES.get(f"{number}/{row.model}/{row.config}", "")
        if not paper["fits"]:
            note = f"{note} The paper's plan doesn't fit: {paper['note']}.".strip()
        lines.append([row.model, row.config, note, _path(ours), _path(paper)])
    return Table(
        f"table{number}_reasons",
        f"Table {number}: why plans differ, under the same schedules",
        ["model", "config", "why", "critical path of ours", "critical path of the paper's"],
        lines,
    )


def _opponents(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for row in TABLE_4:
        record = results.get(f"opponents, {row.key}", {})
        if others := opponents_of(record):
            cells: list[Cell] = [row.model, row.config, plan_text(record["ours"]), record["ours"]["ms"]]
            for who in ("data parallelism", "HPGO", "PipeDream", "Megatron"):
                cells.append(_ms(record[who]))
            who = min(others, key=lambda name: others[name]["ms"])
            best = f"{who}: {plan_text(others[who])}, {_schedule(others[who])}"
            lines.append([*cells, best, times_of(record["ours"], others[who])])
    header = [
        "model",
        "config",
        "ours",
        "ms",
        "DP ms",
        "HPGO ms",
        "PipeDream ms",
        "Megatron ms",
        "strongest opponent",
        "its / ours",
    ]
    return Table(
        "opponents", "Table 4's rows against strong opponents, all with every policy and feature", header, lines
    )


def _figure_11(results: Results) -> list[Table]:
    lines: list[list[Cell]] = []
    averages: list[list[Cell]] = []
    for setting in ("GBS 128", "Table 4's GBS", "flat ring"):
        for config in "A" if setting == "flat ring" else "ABC":
            for model in FIGURE_11_MODELS:
                pair = hybrid(results, setting, model, config)
                if pair is not None:
                    ours, parallel = pair
                    lines.append(
                        [setting, config, model, plan_text(ours), ours["ms"], parallel["ms"], times_of(ours, parallel)]
                    )
            value = average(results, setting, config)
            if value is not None:
                averages.append([setting, config, value, FIGURE_11[config]])
    header = ["setting", "config", "model", "ours", "ours ms", "DP overlap ms", "speedup"]
    return [
        Table("figure11", "Figure 11: our plans against data parallelism with overlap", header, lines),
        Table("figure11_averages", "Figure 11: averages", ["setting", "config", "average speedup", "paper"], averages),
    ]


def _figure_12(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for row in TABLE_6:
        small, larger = results.get(row.key), results.get(f"figure 12, 4 x 8: {row.model}")
        if small is None or larger is None:
            continue
        for size, record, ours in (("2 x 8", small, small["paper"]), ("4 x 8", larger, larger["ours"])):
            dream = record["pipedream"]
            lines.append(
                [
                    row.model, size, row.batch, plan_text(ours), record["single ms"] / ours["ms"], plan_text(dream),
                    record["single ms"] / dream["ms"], times_of(ours, dream),
                    None if record["overlap"] is None else record["single ms"] / record["overlap"]["ms"],
                ]
            )  # fmt: skip
    return Table(
        "figure12",
        "Figure 12: against PipeDream's plans; at 2 x 8 all are Table 6's, at 4 x 8 of our planner and PipeDream's",
        ["model", "servers", "GBS", "plan", "speedup", "PipeDream's plan", "its speedup", "gain", "DP overlap"],
        lines,
    )


def _figure_14(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for model, batch in FIGURE_14_BATCHES.items():
        record = results.get(f"figure 14: {model}")
        if record is not None:
            columns = {name: speedups_14(record, name) for name in ("ours", "overlap", "no overlap")}
            for devices, line in record["devices"].items():
                lines.append(
                    [
                        model,
                        batch,
                        int(devices),
                        plan_text(line["ours"]),
                        *(c.get(int(devices)) for c in columns.values()),
                    ]
                )
    header = ["model", "GBS", "devices", "ours", "speedup", "DP overlap", "DP no overlap"]
    return Table("figure14", "Figure 14 (arXiv): strong scaling in config A", header, lines)


def _table_3(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for model, paper in TABLE_3.items():
        if (record := results.get(f"table 3: {model}")) is not None:
            for count, step in record["steps"].items():
                first, second = step["P_A ms"], step["P_B ms"]
                lines.append([model, record["plan"], int(count), first, second, first / second, paper])
    header = ["model", "plan", "M", "P_A ms", "P_B ms", "speedup", "paper"]
    return Table("table3", "Table 3: P_B over P_A in config A, the paper's plans", header, lines)


def _gains(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for name, record in results.items():
        if name.startswith("gain over ACR: "):
            gains = [step["P_A ms"] / step["P_B ms"] for step in record["steps"].values()]
            lines.append([name.removeprefix("gain over ACR: "), record["plan"], *gains])
    ratios = next((list(record["steps"]) for name, record in results.items() if name.startswith("gain over ACR: ")), [])
    title = "Table 3 where transfers are slow: P_B over P_A by ACR, M = 16, without all-reduces"
    return Table("gain_over_acr", title, ["model", "plan", *(f"ACR {ratio}" for ratio in ratios)], lines)


def _figure_8(results: Results) -> Table:
    lines: list[list[Cell]] = [
        [int(count), line["split"], line["round-robin"], line["round-robin"] / line["split"]]
        for count, line in results.get("figure 8", {}).items()
    ]
    title = "Figure 8: micro-batches split between two replicas, or round-robin, in units"
    return Table("figure8", title, ["M", "split", "round-robin", "round-robin / split"], lines)


def _table_5(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for line in TABLE_5:
        record = results.get("table 5", {}).get(line.key)
        if record is not None:
            lines.append(
                [
                    line.schedule, line.recompute, line.micro_batches, record["samples/s"], line.throughput or "OOM",
                    record["GB"], line.gigabytes or "OOM",
                ]
            )  # fmt: skip
    header = ["schedule", "recompute", "M", "samples/s", "paper's samples/s", "average peak GB", "paper's GB"]
    return Table("table5", "Table 5: against GPipe, BERT-48 on two devices of config B", header, lines)


def _table_7(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for line in TABLE_7:
        if (record := results.get(line.key)) is not None:
            layers, used = record["layers"], record["utilization"]
            share = [f"{used:.1%}", f"{line.utilization:.0%}"]
            lines.append(
                [line.devices, layers, line.layers, layers / line.devices, record["billion parameters"], *share]
            )
    header = ["devices", "layers", "paper's layers", "per device", "billion parameters", "utilization", "paper's"]
    return Table("table7", "Table 7: the largest BERT", header, lines)


def _sensitivity(results: Results) -> Table:
    lines: list[list[Cell]] = [
        [change, ", ".join(record["parts"]), "fails" if record["fails"] else "**passes**", record["first"]]
        for change, record in results.get("sensitivity", {}).items()
    ]
    header = ["change", "parts computed again", "make results", "it says first"]
    return Table("sensitivity", "Appendix: changes that `make results` must notice", header, lines)


# ---- the document


_TITLE = """# DAPPLE's evaluation, planned and simulated again

Made by `make results` (`python -m tools.evaluation.reproduce_dapple --write`) from [results.json](results.json); don't
edit. Simulated, on no particular machine: the numbers are the same everywhere. [README.md](README.md) says what was
assumed, what was mended in the data, and how to read the tables, which are also in the CSV files beside this one.

**What no experiment here can show:** seconds on V100s. Nothing here ran on a GPU. Layers' times, sizes and parameters
are those that the paper's authors measured and published; steps are simulated from them. Ratios can be compared with
the paper's, seconds and samples per second can't. The paper gives figures 11, 12 and 14 as drawings; of these only the
numbers that its text mentions are claims here.

Bands: a figure within 10 % of the paper's is reproduced, within 25 % near, otherwise not reproduced, also where ours
is the better one; for Table 3, gains of a few percent, it is 2 % and 5 %. What was fitted to a table isn't counted, and
what holds by construction isn't a claim.

"""


def document(results: Results) -> str:
    """Returns the document."""
    all_claims = claims(results)
    parts = [_TITLE + _front_page(all_claims, results)]
    for table in tables(results):
        parts.append(f"## {table.title}\n\n{table.markdown()}\n")
        if table.name in PLOTS:
            parts.append(f"![{table.title}]({PLOTS[table.name]}.svg)\n")
    return "\n".join(parts)


def _front_page(all_claims: Sequence[Claim], results: Results) -> str:
    numbers = counts(all_claims)
    faster = better(results)
    chosen = [results[row.key]["choice"] for row in TABLE_4 if row.key in results]
    tally = ", ".join(f"{chosen.count(name)} {name}" for name in ("same cuts and replicas", "same replicas", "other"))
    lines = [
        "## What comes of the paper's claims\n",
        "| | count |",
        "| --- | --- |",
        f"| reproduced | {numbers[REPRODUCED]} |",
        f"| near: within 25 % | {numbers[NEAR]} |",
        f"| reproduced otherwise: in one of the other settings that stand beside it | {numbers[OTHERWISE]} |",
        f"| not reproduced: the reason stands beside it | {numbers[NOT]} |",
        f"| together | {sum(numbers[verdict] for verdict in COUNTED)} |",
        f"| better than the paper: rows of Tables 4 and 6 where our plan with everything is faster | {len(faster)} |",
        f"| not counted: fitted to the table itself | {numbers[FITTED]} |",
        f"| not of the paper: our planner's checks that hold, and that don't | {numbers[HOLDS]}, {numbers[FAILS]} |",
        "",
        f"Table 4's plans, under the same schedules: {tally}.",
        "",
    ]
    for verdict, title in (
        (REPRODUCED, "Reproduced"),
        (NEAR, "Near"),
        (OTHERWISE, "Reproduced otherwise"),
        (NOT, "Not reproduced"),
        (FITTED, "Fitted, not counted"),
    ):
        lines += _listed(title, [claim for claim in all_claims if claim.verdict == verdict])
    lines += ["### Better than the paper\n"]
    lines += ["Our plan with every policy and feature, against the paper's as published under its own schedules.\n"]
    lines += ["| row | times as fast | our plan | policy |", "| --- | --- | --- | --- |"]
    for row, factor in faster:
        record: Record = results[row.key]["everything"]
        lines.append(f"| {row.key} | {factor:.2f} | {plan_text(record)} | {_schedule(record)} |")
    lines += ["", *_listed("Checks of our planner", [c for c in all_claims if c.verdict in (HOLDS, FAILS)])]
    return "\n".join(lines)


def _listed(title: str, some: Sequence[Claim]) -> Iterator[str]:
    if some:
        yield f"### {title}\n"
        yield "| claim | paper | ours | band | |"
        yield "| --- | --- | --- | --- | --- |"
        for claim in some:
            note = claim.why or ("" if claim.verdict != FAILS else "**doesn't hold**")
            yield f"| {claim.name} | {claim.paper} | {claim.ours} | {claim.band} | {note} |"
        yield ""


def claim_table(results: Results) -> Table:
    """Returns the table of claims, for a CSV file."""
    header = ["claim", "paper", "ours", "verdict", "band", "why"]
    rows = [[c.name, c.paper, c.ours, c.verdict, c.band, c.why] for c in claims(results)]
    return Table("claims", "Claims", header, rows)


def files(results: Results) -> dict[str, str]:
    """Returns the text of each file beside the plots, but for the stored records themselves."""
    made = {f"{table.name}.csv": table.csv() for table in (claim_table(results), *tables(results))}
    return {"dapple.md": document(results), **made}
