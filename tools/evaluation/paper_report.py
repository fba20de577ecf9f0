"""The tables of DAPPLE's evaluation, all made from the stored records; `paper_document` has the document."""

from __future__ import annotations

import csv
import io
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapple_tf.tools.evaluation import paper_figure_11
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.paper_experiments import FIGURE_14_BATCHES
from dapple_tf.tools.evaluation.paper_figures import judged, opponents_of, small_slices
from dapple_tf.tools.evaluation.paper_models import (
    FIGURE_11,
    FIGURE_11_MODELS,
    SAME_CUTS,
    SAME_CUTS_OTHERWISE,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    PaperRow,
)
from dapple_tf.tools.evaluation.paper_outcomes import times_of
from dapple_tf.tools.evaluation.paper_verdicts import Results

Cell = str | float | int | None

_SLOW_LINKS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results" / "slow_links.json"

_PARALLEL = {
    "data parallelism": "DP overlap",
    "overlap": "DP overlap, all devices",
    "no overlap": "DP no overlap, all devices",
}
"""Columns of data parallelism: on its fastest number of devices, as pipelines may leave some idle, and on all."""
_OVERLAPPED = {name: title for name, title in _PARALLEL.items() if name != "no overlap"}
"""Those whose all-reduces overlap with the last backward."""

NOTES = {
    "4/vgg-19/B": (
        "Only one backward can hide the all-reduce of 575 MB, which takes 345 ms; dense layers on a device of "
        "their own, cut where 3 MB cross, need none. The paper finds this plan for config C."
    ),
    "4/gnmt-16/A": (
        "9:7 counts LSTM layers. The classifier behind the last one takes as long as three of them, so that "
        "more of these belong to the first stage."
    ),
    "4/gnmt-16/B": "Eight replicas of a stage all-reduce 580 MB over 25 Gbit/s. Smaller groups have less to reduce.",
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
        "Every layer reads 7 MB from the input layers, which stages hand on. Sixteen stages do so over 10 Gbit/s for "
        "each of 128 micro-batches, or recompute with 64 larger ones, which takes longer; eight stages of two needn't."
    ),
    "4/amoeba-36/A": (
        "Stages of a quarter rather than a half of the model: more micro-batches are in flight, and the "
        "longest Apply is half as long."
    ),
    "4/amoeba-36/B": (
        "128 samples don't split into eleven equal parts: the paper's plan has micro-batches of eleven, the last one "
        "of seven, and recomputes, as two samples of a replica don't fit by Table 1's memory."
    ),
    "4/amoeba-36/C": "As in config B.",
    "6/vgg-19/A": (
        "One device is enough for the dense layers and the two convolutions before them; the paper's plan, at its best "
        "M, is nearly as fast."
    ),
    "6/amoeba-36/A": "Four stages rather than two: more micro-batches are in flight, and the bubble is shorter.",
    "6/bert-large/A": "Four stages of four devices rather than two of eight: as fast.",
}
"""Reasons why our plan differs, by table, model and config."""


@dataclass(frozen=True)
class Table:
    """A table of the document and of a CSV file, in the document with a note below its title."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)
    note: str = ""

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


def of_commit(target: str) -> str:
    """Returns to which commit a document's numbers belong.

    Args:
        target: what ``make`` compares them with.
    """
    return (
        f"The numbers belong to the commit that holds this document: at it `make {target}` computes them again, and\n"
        "fails if one differs by more than 2 %, or a verdict at all.\n"
    )


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
    made += [
        _gains(results),
        _figure_8(results),
        _table_5(results),
        _table_7(results),
        appendix(results.get("sensitivity", {})),
    ]
    return [table for table in made if table.rows]


def plan_text(record: Mapping[str, Any] | None) -> str | None:
    """Returns a plan in a line, such as ``8:8 at 26, M=4``, in parentheses if it doesn't fit."""
    if record is None:
        return None
    cuts = record["cuts"].split(",")
    places = ",".join(cuts) if len(cuts) <= 3 else f"{cuts[0]},{cuts[1]},..,{cuts[-1]}"
    shown = f"{record['plan']}{f' at {places}' if record['cuts'] else ''}, M={record['M']}"
    return shown if record["fits"] else f"({shown})"


def schedule_text(record: Mapping[str, Any]) -> str:
    """Returns a plan's policy, and whether it recomputes."""
    parts = [] if record["schedule"] == "-" else [record["schedule"]]
    recompute = record["recompute"]
    again = [] if recompute == "none" else ["RC by stage" if "stage" in recompute else "RC"]
    return ", ".join([*parts, *again]) or "-"


def _ms(record: Mapping[str, Any] | None) -> float | None:
    return None if record is None else float(record["ms"])


def _plans(number: int, rows: Sequence[PaperRow], results: Results) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        record = results[row.key]
        ours, paper, everything = record["ours"], record["paper"], record["everything"]
        lines.append(
            [
                row.model, row.config, row.batch, plan_text(ours), schedule_text(ours), ours["ms"], plan_text(paper),
                schedule_text(paper), paper["ms"], times_of(ours, paper), record["choice"], plan_text(everything),
                schedule_text(everything), everything["ms"], times_of(everything, paper),
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
    names = {"ours": "ours", "paper": "paper's plan", **_PARALLEL, "gpipe": "GPipe"}
    if number == 6:
        names["pipedream"] = "PipeDream"
    lines: list[list[Cell]] = []
    for row in rows:
        record = results[row.key]
        cells: list[Cell] = [row.model, row.config]
        for column in names:
            other = record[column]
            speedup = None if other is None else record["single ms"] / other["ms"]
            cells.append(f"({text(speedup)})" if other is not None and not other["fits"] else speedup)
        lines.append([*cells, _devices(record["data parallelism"])])
    header = ["model", "config", *names.values(), "devices of DP overlap"]
    title = f"Table {number}: speedups over one device, each plan at its best of GPipe's schedule, P_A and P_B"
    return Table(f"table{number}_speedups", title, header, lines)


def _devices(record: Mapping[str, Any] | None) -> int | None:
    """Returns the number of devices that data parallelism uses."""
    return None if record is None else int(record["replicas"])


def _path(record: Mapping[str, Any]) -> str:
    ranked = sorted(((ms, name) for name, ms in record["path"].items() if ms >= 0.5), reverse=True)
    return ", ".join(f"{name} {ms:.0f}" for ms, name in ranked) + " ms"


def _reasons(number: int, rows: Sequence[PaperRow], results: Results) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        record = results[row.key]
        ours, paper = record["ours"], record["paper"]
        if record["choice"] in (SAME_CUTS, SAME_CUTS_OTHERWISE):
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
            best = f"{who}: {plan_text(others[who])}, {schedule_text(others[who])}"
            lines.append([*cells, best, times_of(record["ours"], others[who])])
    header = [
        "model", "config", "ours", "ms", "DP ms", "HPGO ms", "PipeDream ms", "Megatron ms", "strongest opponent",
        "its / ours",
    ]  # fmt: skip
    note = (
        "Others may have every policy and feature that ours has but stages in V (several stages on a device otherwise: "
        "Megatron's only, or chunks), and were searched less. HPGO's are those of this row, not of a model's others: "
        "15:1 of VGG-19/C, which is also our plan for B in Table 4, isn't tried for B. Each owner's plans are ranked "
        "under P_B or interleaving; the two leading ones, if at most 5 % slower than the best, and the best of each "
        "kind of stages where there are at most two kinds, are tried under the other policies; two also with "
        "recomputation by each stage's memory, at their own cuts, while ours may move cuts, too; the best of all also "
        "in 8 chunks, with reverse first-k of none or all. That ours is ahead by some percent may be for that alone."
    )
    return Table("opponents", "Table 4's rows against strong opponents, which were searched less", header, lines, note)


def _figure_11(results: Results) -> list[Table]:
    lines: list[list[Cell]] = []
    averages: list[list[Cell]] = []
    for setting in paper_figure_11.SETTINGS:
        for config in "A" if setting.batch == "flat ring" else "ABC":
            for model in FIGURE_11_MODELS:
                pair = paper_figure_11.pair(results, setting, model, config)
                on_all = paper_figure_11.pair(results, setting, model, config, paper_figure_11.ALL)
                if pair is not None and on_all is not None:
                    plan, parallel = pair
                    cells = [str(setting), config, model, plan_text(plan), plan["ms"], parallel["ms"]]
                    cells += [_devices(parallel), times_of(plan, parallel)]
                    lines.append([*cells, on_all[1]["ms"], times_of(*on_all)])
            value, over_all = (
                paper_figure_11.average(results, setting, config, opponent)
                for opponent in (paper_figure_11.BEST, paper_figure_11.ALL)
            )
            if value is not None:
                averages.append([str(setting), config, value, FIGURE_11[config], over_all])
    header = ["setting", "config", "model", "plan", "ms", "DP overlap ms", "its devices", "speedup"]
    header += ["DP overlap on all devices ms", "speedup over that"]
    averages_header = ["setting", "config", "average speedup", "paper", "over DP on all devices"]
    note = (
        "Speedups over data parallelism on its fastest number of devices and on all, and the worse verdict. The text's "
        f"batch is *{paper_figure_11.TEXT.batch}*. Of the others *{paper_figure_11.OTHER.batch}* counts as otherwise, "
        "for all claims, for what it changes, the batch and with it the time of slices smaller than profiled (there as "
        "long as those, at GBS 128 in proportion), and not for what it gives. At either batch the worse of both "
        "columns counts, with our plans and with the paper's: what ours alone reach isn't the paper's. The rest is "
        "only shown. *Flat ring* is Table 4's GBS with one all-reduce ring through "
        "all devices, which makes a difference in config A alone. Of networks slower in B and C speedups over the "
        "fastest number of devices are shown."
    )
    by_setting = paper_figure_11.by_setting(results)
    columns = ["claim", "paper", *map(str, paper_figure_11.SETTINGS)]
    return [
        Table("figure11_settings", "Figure 11: each claim in each setting", columns, by_setting, note),
        Table("figure11", "Figure 11: plans against data parallelism with overlap", header, lines),
        Table("figure11_averages", "Figure 11: averages", averages_header, averages),
    ]


def _figure_12(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for row in TABLE_6:
        small, larger = results.get(row.key), results.get(f"figure 12, 4 x 8: {row.model}")
        if small is None or larger is None:
            continue
        for size, record, ours in (("2 x 8", small, small["paper"]), ("4 x 8", larger, larger["ours"])):
            dream, single = record["pipedream"], small["single ms"]
            lines.append(
                [
                    row.model, size, row.batch, plan_text(ours), single / ours["ms"], plan_text(dream),
                    single / dream["ms"], times_of(ours, dream),
                    *(None if record[name] is None else single / record[name]["ms"] for name in _OVERLAPPED),
                ]
            )  # fmt: skip
    header = ["model", "servers", "GBS", "plan", "speedup", "PipeDream's plan", "its speedup", "gain"]
    header += _OVERLAPPED.values()
    return Table(
        "figure12",
        "Figure 12: against PipeDream's plans; at 2 x 8 the paper's, at 4 x 8 of our planner and PipeDream's",
        header,
        lines,
        "Slices smaller than the profiled batch take as long as their share of it. Speedups are over one device with "
        "the profiled batch.",
    )


def _figure_14(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for model, batch in FIGURE_14_BATCHES.items():
        record = results.get(f"figure 14: {model}")
        if record is not None:
            for devices, line in [*record["devices"].items(), ("10 in one server", record["ten in one server"])]:
                cells: list[Cell] = [
                    None if line[name] is None else record["single ms"] / line[name]["ms"]
                    for name in ("ours", *_PARALLEL)
                ]
                ours = line["ours"]
                used = f" on {ours['replicas']} devices" if ours is not None and ours["plan"] == "DP" else ""
                lines.append([model, batch, devices, ours and f"{plan_text(ours)}{used}", *cells])
    header = ["model", "GBS", "devices", "ours", "speedup", *_PARALLEL.values()]
    note = (
        "Ten devices in one server are a control: what their efficiency loses isn't for the link between servers. How "
        'data parallelism scales is judged on all devices, as the paper has it, and in "DP overlap", which may leave '
        "some idle, as our plans may; the worse counts."
    )
    return Table("figure14", "Figure 14 (arXiv): strong scaling in config A", header, lines, note)


def _table_3(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for model, paper in TABLE_3.items():
        if (record := results.get(f"table 3: {model}")) is not None:
            proportional = record["in proportion"] if small_slices(record) else None
            for star, steps in (("", record["steps"]), ("*", proportional or {})):
                for count, step in steps.items():
                    first, second = step["P_A ms"], step["P_B ms"]
                    warm_ups = f"{step['P_A warm-up']}, {step['P_B warm-up']}"
                    mark = "judged" if count == judged(steps) else ""
                    plan = f"{record['plan']}{star}"
                    cells: list[Cell] = [model, plan, int(count), warm_ups, first, second, first / second]
                    lines.append([*cells, paper, mark])
    header = ["model", "plan", "M", "warm-ups", "P_A ms", "P_B ms", "speedup", "paper", ""]
    note = (
        "Judged is the fastest M at which P_A and P_B have other warm-ups: where both have the same, as with M = 2, "
        "they are one schedule and its 1.00 holds by construction. Slices smaller than any that was profiled take as "
        "long as those, or as their share of it in the lines with a star: unlike in Table 6, both are judged."
    )
    return Table("table3", "Table 3: P_B over P_A in config A, the paper's plans", header, lines, note)


def _gains(results: Results) -> Table:
    lines: list[list[Cell]] = []
    for name, record in results.items():
        if name.startswith("gain over ACR: "):
            gains = [step["P_A ms"] / step["P_B ms"] for step in record["steps"].values()]
            lines.append([name.removeprefix("gain over ACR: "), record["plan"], *gains])
    ratios = next((list(record["steps"]) for name, record in results.items() if name.startswith("gain over ACR: ")), [])
    title = "Table 3 where transfers are slow: P_B over P_A by ACR, M = 16, without all-reduces"
    header = ["model", "plan", *(f"ACR {ratio}" for ratio in ratios)]
    return Table("gain_over_acr", title, header, lines, _measured_gains())


def _measured_gains() -> str:
    """Returns the same ratio as it was measured on workers with slow links."""
    records = [record for entry in read_results(_SLOW_LINKS).values() for record in entry["records"]]
    texts = []
    for hosts in (2, 4):
        gains = []
        for record in records:
            if (record["hosts"], record["plan"], record["work"]) != (hosts, "straight", "waits") or record.get("skips"):
                continue
            rows = {row["schedule"]: row for row in record["rows"]}
            first, second = rows["dapple_a"], rows["dapple_b"]
            measured = statistics.median(first["steps"]) / statistics.median(second["steps"])
            simulated = first["predicted"] / second["predicted"]
            gains.append(f"{record['transfer']:g}: {measured:.2f}x ({simulated:.2f}x)")
        texts.append(f"on {hosts} workers, {', '.join(gains)}")
    return (
        "Measured, and simulated in parentheses, with equal stages whose transfers take this part of their forward, "
        f"M = 8 ([slow_links.md](slow_links.md)): {'; '.join(texts)}."
    )


def _figure_8(results: Results) -> Table:
    lines: list[list[Cell]] = [
        [int(count), line["split"], line["round-robin"], line["round-robin"] / line["split"]]
        for count, line in results.get("figure 8", {}).items()
    ]
    title = "Figure 8: micro-batches split between two replicas, or round-robin, in units"
    note = (
        "No claim: that round-robin takes 3 units longer, for every M, follows from the figure's own numbers; to "
        "split costs nothing here, as in the figure."
    )
    return Table("figure8", title, ["M", "split", "round-robin", "round-robin / split"], lines, note)


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
            more = [record["layers by samples"][samples] for samples in ("2", "3")]
            share = [f"{used:.1%}", f"{line.utilization:.0%}"]
            cells = [line.devices, layers, line.layers, *more, layers / line.devices, record["billion parameters"]]
            lines.append([*cells, *share])
    header = [
        "devices", "layers", "paper's layers", "with 2 samples", "with 3 samples", "per device", "billion parameters",
        "utilization", "paper's",
    ]  # fmt: skip
    note = (
        "One sample in a micro-batch, which the paper doesn't say, was chosen since its layers come closest; that the "
        "layers of each device are as many on 8 as on 2 holds with 2 and 3 samples, too. Nothing of it is counted."
    )
    return Table("table7", "Table 7: the largest BERT", header, lines, note)


def appendix(outcomes: Mapping[str, Mapping[str, Any]], target: str = "results") -> Table:
    """Returns the table of changes that must be noticed.

    Args:
        outcomes: change -> its `sensitivity.outcome`.
        target: what ``make`` compares results with.
    """
    lines: list[list[Cell]] = [
        [change, ", ".join(record["parts"]), "fails" if record["fails"] else "**passes**", record["first"]]
        for change, record in outcomes.items()
    ]
    header = ["change", "parts computed again", f"make {target}", "it says first"]
    return Table("sensitivity", f"Appendix: changes that `make {target}` must notice", header, lines)
