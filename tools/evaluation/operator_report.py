"""The results of FD-DPS's experiments as a document, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dapple_tf.tools.evaluation.operator_claims import (
    NAMES,
    OF_THE_PAPER,
    Claim,
    better_rows,
    counts_of,
    is_graph,
    least_possible,
    margin,
)
from dapple_tf.tools.evaluation.operator_experiments import (
    OPPONENTS,
    Operator,
    Outcome,
    Row,
    settings,
)
from dapple_tf.tools.evaluation.operator_models import MODELS
from dapple_tf.tools.evaluation.operator_paper import FIGURE_4, TABLE_5, TABLE_6, TABLE_7
from dapple_tf.tools.evaluation.operator_sweep import Towers
from dapple_tf.tools.evaluation.operator_text import ASSUMED, BANDS, TITLE, of_paper, reasons
from dapple_tf.tools.evaluation.paper_report import Cell, Table, appendix

Outcomes = Mapping[str, Mapping[str, Any]]
"""Change that must be noticed -> its `sensitivity.outcome`."""

_FIGURE_4_COLUMNS = tuple(name for name in NAMES if name != "d_dps")
_SEARCHED = ("fast_t", "mp_dps", "d_dps", "fd_dps")


# ---- tables


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns every table that has results."""
    plain = [row for row in rows if row.setting.dockers == 1]
    all_tables = [_table_3(rows), _table_5(plain), _table_5_gains(plain), _table_5_paper(plain)]
    lines = [row for row in plain if row.lines]
    if lines:
        all_tables.append(_table_6(lines))
    four = [row for row in plain if row.setting.devices == 4]
    if four:
        all_tables.append(_table_7(four))
    dockers = [row for row in rows if row.setting.dockers > 1]
    if dockers:
        all_tables.append(_figure_4(dockers))
    all_tables.append(_figure_5(plain))
    return all_tables


def _ms(outcome: Outcome) -> Cell:
    ms = outcome.seconds * 1e3
    return ms if outcome.fits else f"({ms:.0f})"


def _percent(share: float | None) -> Cell:
    return None if share is None else f"{share:.1%}"


def _as_printed(number: float) -> str:
    """Returns a number of the paper's with all its digits, so that the document changes with it."""
    return f"{number:.6g}"


def _table_3(rows: Iterable[Row]) -> Table:
    largest = {row.setting.model: row for row in rows}
    lines: list[list[Cell]] = []
    for name, row in largest.items():
        model = MODELS[name]
        lines.append([name, model.batch, row.operators, row.edges, model.paper, model.operators, model.edges])
    header = ["model", "batch", "operators", "edges", "paper's model", "operators", "edges"]
    return Table("table3", "Table 3: models, with their training graphs", header, lines)


def _table_5(rows: Iterable[Row]) -> Table:
    lines: list[list[Cell]] = [
        [
            row.setting.model,
            row.setting.devices,
            *(_ms(row.outcomes[name]) for name in NAMES),
            min(row.outcomes[form].shared_seconds for form in ("data_parallel", "own_statistics")) * 1e3,
            least_possible(row) * 1e3,
        ]
        for row in rows
    ]
    header = ["model", "devices", *NAMES.values(), "the faster DP, updates shared out", "even shares"]
    return Table("table5", "Table 5: a step in each way, in simulated ms", header, lines)


def _table_5_gains(rows: Iterable[Row]) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        paper = TABLE_5.get((row.setting.model, row.setting.devices))
        speedup = row.outcomes["single"].seconds / row.outcomes["fd_dps"].seconds
        gains = [
            *(_percent(row.faster(than)) for than in ("data_parallel", "own_statistics")),
            *(_percent(margin(row, "fd_dps", than)) for than in (*OPPONENTS, "d_dps")),
        ]
        theirs = [_percent(None if paper is None else paper.faster(than)) for than in OPPONENTS]
        lines.append([row.setting.model, row.setting.devices, speedup, *gains, *theirs])
    header = [
        *("model", "devices", "FD-DPS over single", "faster than DP", "than DP, own statistics"),
        *("than FastT, rounds", "than MP-DPS, rounds", "than D-DPS(-F)", "paper: than FastT", "paper: than MP-DPS"),
    ]
    return Table("table5_gains", "Table 5: what FD-DPS gains", header, lines)


def _table_5_paper(rows: Iterable[Row]) -> Table:
    """Returns times relative to data parallelism's, ours and the paper's, which can be compared."""
    lines: list[list[Cell]] = []
    names = ("single", "fast_t", "mp_dps", "fd_dps")
    for row in rows:
        paper = TABLE_5.get((row.setting.model, row.setting.devices))
        if paper is None:
            continue
        ours = [row.over(name) for name in names]
        theirs = ["OOM" if (value := paper.over(name)) is None else value for name in names]
        seconds = ["OOM" if (value := getattr(paper, name)) is None else value for name in ("data_parallel", *names)]
        lines.append([row.setting.model, row.setting.devices, *ours, *theirs, *seconds])
    header = [
        *("model", "devices", *(f"our {NAMES[name]}" for name in names), *(f"paper's {NAMES[name]}" for name in names)),
        *(f"paper's {NAMES[name]} s" for name in ("data_parallel", *names)),
    ]
    title = "Table 5: times in data parallelism's, ours and the paper's, and the paper's seconds"
    return Table("table5_paper", title, header, lines)


def _decision(operator: Operator) -> str:
    decisions = [f"{split.dimension} x {split.parts}" if split else "no" for split in operator.splits]
    return ", ".join(dict.fromkeys(decisions)) if len(set(decisions)) == 1 else ", ".join(decisions)


def _table_6(rows: Sequence[Row]) -> Table:
    lines: list[list[Cell]] = []
    alone = [row for row in rows if row.lines_alone]
    for name, (ms, kilobytes, split) in TABLE_6.items():
        operator = rows[0].lines[name]
        decisions = [_decision(row.lines[name]) for row in rows] + [_decision(row.lines_alone[name]) for row in alone]
        theirs = [_as_printed(ms), _as_printed(kilobytes), "yes" if split else "no"]
        lines.append([name, operator.seconds * 1e3, operator.parameter_bytes / 1e3, *decisions, *theirs])
    header = [
        *("operator", "ms", "KB of parameters", *(f"split on {row.setting.devices}" for row in rows)),
        *(f"one at a time on {row.setting.devices}" for row in alone),
        *("paper's ms", "its KB", "split"),
    ]
    return Table("table6", "Table 6: operators of VGG-16, and whether FD-DPS splits them", header, lines)


def _table_7(rows: Iterable[Row]) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        before, after, gain = TABLE_7[row.setting.model]
        lines.append(
            [
                *(row.setting.model, _ms(row.outcomes["one_copy"]), _ms(row.outcomes["alone"])),
                *(_percent(row.faster("one_copy", "alone")), row.alone),
                *(_ms(row.outcomes["d_dps"]), _ms(row.outcomes["fd_dps"])),
                *(_percent(row.faster("d_dps")), sum(row.splits.values()), _most(row.splits)),
                _most({f"{split.dimension} x {split.parts}": count for split, count in row.parts.items()}),
                *(_as_printed(before), _as_printed(after), f"{gain:.2%}"),
            ]
        )
    header = [
        *("model", "one copy, no splits ms", "splits one at a time ms", "faster", "operators split"),
        *("D-DPS(-F) ms", "FD-DPS ms", "faster", "operators split", "most of them", "mostly by"),
        *("paper's D-DPS(-F) s", "its FD-DPS s", "its gain"),
    ]
    return Table("table7", "Table 7: without and with splitting, on four devices", header, lines)


def _most(counts: Mapping[str, int], shown: int = 4) -> str:
    return ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:shown]) or "-"


def _figure_4(rows: Iterable[Row]) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        theirs = FIGURE_4.get(row.setting.model, {})
        gains = (("fd_dps", "fast_t"), ("mp_dps", "fast_t"), ("fd_dps", "mp_dps"))
        cells: list[Cell] = [row.setting.model, *(_ms(row.outcomes[name]) for name in _FIGURE_4_COLUMNS)]
        cells += [row.outcomes["fd_dps"].used, *(_percent(margin(row, what, than)) for what, than in gains)]
        lines.append([*cells, *(_percent(theirs.get(gain)) for gain in gains)])
    gains_header = ("FD-DPS faster than FastT", "MP-DPS than FastT", "FD-DPS than MP-DPS")
    ours_header = [f"with rounds: {name}" for name in gains_header]
    header = [
        *("model", *(NAMES[name] for name in _FIGURE_4_COLUMNS), "devices used by FD-DPS"),
        *(*ours_header, *(f"paper: {name}" for name in gains_header)),
    ]
    return Table("figure4", "Figure 4: eight devices in two dockers, in simulated ms", header, lines)


def _figure_5(rows: Sequence[Row]) -> Table:
    most = max((row.setting.devices for row in rows), default=0)
    lines: list[list[Cell]] = [
        [row.setting.model, row.operators, *(row.outcomes[name].search_seconds for name in _SEARCHED)]
        for row in rows
        if row.setting.devices == most
    ]
    header = ["model", "operators", *(f"{NAMES[name]} s" for name in _SEARCHED)]
    title = f"Figure 5: the search on {most} devices, in s of one core (these change from run to run)"
    return Table("figure5", title, header, lines)


# ---- the page at the top


def summary(rows: Sequence[Row], claims: Sequence[Claim]) -> str:
    """Returns the counts of verdicts, and the reasons for each kind."""
    counts = counts_of(claims)
    lines: list[list[Cell]] = [
        [part, *(numbers[verdict] for verdict in OF_THE_PAPER), sum(numbers.values())]
        for part, numbers in counts.items()
    ]
    totals = [sum(numbers[verdict] for numbers in counts.values()) for verdict in OF_THE_PAPER]
    lines.append(["all", *totals, sum(totals)])
    header = [
        "the paper's",
        *("near (within 25 %)" if verdict == "near" else verdict for verdict in OF_THE_PAPER),
        "all",
    ]
    counted = Table("summary", "", header, lines).markdown()
    missing = [str(one) for one in settings(list(MODELS)) if one not in {row.setting for row in rows}]
    lacking = f"Not computed: {'; '.join(missing)}.\n\n" if missing else ""
    better = better_rows(rows)
    names = ", ".join(str(row.setting) for row in better)
    back = sum(is_graph(row, "fast_t") for row in of_paper(rows))
    held = (
        f"**Better than the paper: {len(better)}**{f' ({names})' if names else ''}: FD-DPS's step in units of DP's, by "
        f"rounds of ours. The steps of FastT and MP-DPS that aren't reproduced are one finding in {back} rows: here "
        f"they go back to DP's graph.\n\nThat FD-DPS's placements fit and that its bound ends searches in time is "
        f"asserted, and no claim.\n"
    )
    return f"{BANDS}\n{counted}\n\n{lacking}{held}\n{reasons(rows)}"


# ---- the document


def _sweep(sweep: Sequence[Towers]) -> Table:
    lines: list[list[Cell]] = []
    for one in sweep:
        steps = (one.single, one.copies, one.graph, one.fd_dps)
        cells: list[Cell] = [one.samples, one.devices, *(seconds * 1e3 for seconds in steps)]
        cells += [f"{other / one.fd_dps:.2f}" for other in (one.single, one.best, one.shared)]
        lines.append(cells)
    header = ["samples", "devices", "single", "DP", "DP's graph", "FD-DPS"]
    header += ["times as fast as single", "as the faster DP", "as DP with updates shared out"]
    title = "FD-DPS and data parallelism by the batch: four towers of dense layers, in simulated ms"
    return Table("sweep", title, header, lines, _where_it_pays(sweep))


def _where_it_pays(sweep: Sequence[Towers]) -> str:
    """Returns with which batches FD-DPS is faster than data parallelism, than its ideal form, and than one device."""
    texts = []
    for devices in dict.fromkeys(one.devices for one in sweep):
        some = [one for one in sweep if one.devices == devices]
        pays, still, alone = (
            ", ".join(f"{one.samples:,}" for one in some if getattr(one, form) > one.fd_dps * _PAYS) or "none"
            for form in ("best", "shared", "single")
        )
        slow = ", ".join(f"{one.samples:,}" for one in some if one.best > one.single) or "none"
        same = ", ".join(f"{one.samples:,}" for one in some if one.fd_dps == one.graph) or "none"
        texts.append(
            f"on {devices} devices with {pays} samples, over updates shared out with {still}, over one device with "
            f"{alone} (both forms are slower than one device with {slow}; FD-DPS is data parallelism's graph with "
            f"{same})"
        )
    size = max((one.gradient_bytes for one in sweep), default=0.0)
    return (
        f"The model *wide_towers* of [operator_workers.md](operator_workers.md), which reads little and has "
        f"{size / 1e6:.0f} MB of gradients, whatever the batch. FD-DPS is faster than both forms of data "
        f"parallelism by more than {_PAYS - 1:.0%} {'; '.join(texts)}. No claim of the paper's."
    )


_PAYS = 1.02
"""How many times as fast FD-DPS must be to pay."""


def document(rows: Sequence[Row], claims: Sequence[Claim], outcomes: Outcomes, sweep: Sequence[Towers]) -> str:
    """Returns the text of fd_dps.md.

    Args:
        rows: the rows.
        claims: what is claimed of them.
        outcomes: what comes of changes that must be noticed.
        sweep: steps of towers.
    """
    cells: list[list[Cell]] = [[claim.name, claim.paper, claim.ours, claim.verdict, claim.reason] for claim in claims]
    claimed = Table("claims", "Claims", ["claim", "paper", "ours", "verdict", "reason"], cells)
    parts = [TITLE, summary(rows, claims), ASSUMED]
    for table in (*tables(rows), _sweep(sweep), claimed, appendix(outcomes, "results-operators")):
        if table.rows:
            note = f"{table.note}\n\n" if table.note else ""
            parts.append(f"## {table.title}\n\n{note}{table.markdown()}\n")
    return "\n".join(parts)
