"""The results of FD-DPS's experiments as a document and a JSON file, with the paper's numbers beside ours."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dapple_tf.tools.evaluation.operator_experiments import MEMORY_BYTES, Operator, Outcome, Row
from dapple_tf.tools.evaluation.operator_models import MODELS
from dapple_tf.tools.evaluation.paper_claims import Claim
from dapple_tf.tools.evaluation.paper_report import Cell, Table

SEARCH_SECONDS = 30.0
"""Maximum seconds of a search on one core."""
MARGIN = 0.12
"""Fraction by which FD-DPS must be faster than FastT for models with branches, at eight devices."""
BRANCHED = ("NASNet-mobile", "NASNet-large")
TIE = 1e-9
"""Relative difference below which two steps are equally long."""


class PaperRow(NamedTuple):
    """A row of table 5, in seconds; None is OOM in the paper."""

    single: float | None
    data_parallel: float | None
    fast_t: float
    mp_dps: float
    fd_dps: float

    @property
    def faster(self) -> float:
        """Fraction by which a step of FD-DPS is shorter than FastT's."""
        return 1 - self.fd_dps / self.fast_t


TABLE_5: Mapping[tuple[str, int], PaperRow] = {
    ("VGG-16", 2): PaperRow(0.794, 1.272, 1.122, 1.066, 1.051),
    ("VGG-16", 4): PaperRow(0.794, 1.770, 1.975, 1.905, 1.812),
    ("Inception-V3", 2): PaperRow(0.574, 0.738, 0.712, 0.702, 0.685),
    ("Inception-V3", 4): PaperRow(0.574, 0.943, 0.912, 0.872, 0.823),
    ("ResNet-50", 4): PaperRow(0.394, 0.895, 0.834, 0.719, 0.683),
    ("ResNet-50", 8): PaperRow(0.394, 1.983, 1.874, 1.741, 1.587),
    ("ResNet-200", 4): PaperRow(2.331, 0.986, 0.853, 0.806, 0.743),
    ("ResNet-200", 8): PaperRow(2.331, 2.321, 2.046, 1.955, 1.723),
    ("NASNet-mobile", 4): PaperRow(0.822, 1.669, 1.624, 1.547, 1.384),
    ("NASNet-mobile", 8): PaperRow(0.822, 2.643, 2.459, 2.147, 1.873),
    ("NASNet-large", 4): PaperRow(None, None, 4.289, 3.876, 3.627),
    ("NASNet-large", 8): PaperRow(None, None, 7.425, 6.550, 5.931),
}
TABLE_6: Mapping[str, tuple[float, float, bool]] = {
    "Conv1_1": (2.146, 3.64, False),
    "Conv1_2": (15.673, 43.82, True),
    "Conv1_2bp": (36.466, 56.88, True),
    "Relu1_2": (2.908, 0.12, False),
    "Pool1": (0.96, 0.54, False),
    "Fc6": (1.654, 136_766.44, False),
}
"""Operator -> milliseconds, "Memory Ratio (KB)", whether the paper splits it."""
TABLE_7: Mapping[str, tuple[float, float, float]] = {
    "VGG-16": (1.926, 1.812, 0.0592),
    "Inception-V3": (0.843, 0.823, 0.0237),
    "ResNet-50": (0.735, 0.683, 0.0707),
    "ResNet-200": (0.825, 0.743, 0.0994),
    "NASNet-mobile": (1.489, 1.314, 0.1175),
    "NASNet-large": (4.211, 3.627, 0.1387),
}
"""Model -> D-DPS(-F) and FD-DPS in s, and the gain that the paper prints."""
FIGURE_4 = {"NASNet-mobile": 0.160}
"""Model -> FD-DPS over FastT in two dockers, if the text has it; the figure itself isn't in the text."""

_TITLE = """# FD-DPS's experiments, placed and simulated again

Made by `make results-operators` (`python -m tools.evaluation.reproduce_fd_dps`); don't edit. The same numbers are in
[fd_dps.json](fd_dps.json).

"""

_ASSUMED = f"""## What was done, and what it can be compared with

**Simulated, all of it.** No P100 was there, and no model was run. Each model is built by Keras, captured, and goes
through the passes of real training, with one stage, one replica and one micro-batch; the flat graph of its
operators is what is placed. An operator takes what `OperatorCosts.p100()` says, a roofline fitted to the six times
of the paper's table 6, a tensor 10 us and its bytes at 12 GB/s (PCIe 3.0 x16, a link for each ordered pair of
devices). Two dockers have four devices each and 3 GB/s and 50 us between them; the paper doesn't say what it
measured there. A device has {MEMORY_BYTES / 1e9:.0f} GB. All columns come from one simulator: a device runs one
operator at a time in the order of its queue; a tensor is sent once to each device that reads it; transfers over a
link go one after another.

* **single**: everything on one device. **DP**: data parallelism, a 1/N of the batch on each device, gradients
  reduced in a ring while the backward goes on. **HEFT**, **FastT**: static priorities, as `dapple_tf.operators`
  describes them; FastT without its own splitting. **D-DPS(-F)**: FD-DPS without splitting. **FD-DPS**: with it.
* Times are ms of a step. In parentheses: needs more memory than a device has, simulated as if it hadn't.
* "faster" is 1 - t/t' as in the paper's tables: 20 % are 1.25 times as many steps in a second.

**Which of the paper's numbers can be compared.** Its seconds can't be. With more devices all of its steps take
*longer*, ResNet-50's 0.394 s on one, 0.683 s on four, 1.587 s on eight, though a row's batch is the same; the model
is TF-Slim's, for TensorFlow 1.14, and costs of the framework, which are part of its times, aren't in ours. What can
be compared is how strategies relate to each other on one number of devices, such as FD-DPS to FastT. Even there
ours is a lower bound for all of them: the simulator knows no costs of dispatching from a single host.

**Baselines.** HEFT and FastT place an operator where it ends first, whatever that costs those behind it, and send
much: in the paper FastT's step is longer than one device's for all models but ResNet-200, here for all but VGG-16.
So the gain over one device and over data parallelism says more of FD-DPS than the one over FastT. Data parallelism
has it easier here than in the paper: nothing but the links of its ring delays it.

**Where the paper doesn't agree with itself.** "Speedup 1" of table 5 is called MP-DPS over FastT, but is FD-DPS
over MP-DPS: 1 - 1.051/1.066 is its 1.41 % for VGG-16 on two devices. PnasNet_mobile takes 1.384 s on four devices
in table 5 and 1.314 s in table 7. MP-DPS is another group's and isn't rebuilt here.

**Other models.** PnasNet_mobile isn't in keras.applications; NASNet-mobile, with the same kind of cells, is in its
place. The paper names CIFAR-10, but its times are those of the images that the models are made for: 224 x 224
(Inception-V3 299, NASNet-large 331). Our graphs have fewer operators: constants and fed placeholders aren't
counted, and Keras makes fewer of them than TF-Slim, whose graphs have summaries, queues and initializers, too.
"""


def claims_of(rows: Sequence[Row], search_seconds: float = SEARCH_SECONDS) -> list[Claim]:
    """Returns claims about the results, and whether the paper's margins are reached."""
    claims = []
    for row in rows:
        claims += [_not_slower(row, than) for than in ("fast_t", "heft", "single")]
        claims.append(_search_time(row, search_seconds))
        name, count = row.setting.model, row.setting.devices
        if count == 8 and name in BRANCHED:
            gain = row.faster("fast_t")
            where = f"{row.setting}: FD-DPS at least {MARGIN:.0%} faster than FastT"
            claims.append(Claim(where, "", f"{gain:.1%}", gain >= MARGIN, value=gain))
        paper = TABLE_5.get((name, count)) if row.setting.dockers == 1 else None
        margin = FIGURE_4.get(name) if row.setting.dockers == 2 else None if paper is None else paper.faster
        if margin is not None:
            claims.append(_margin(row, "fast_t", margin))
        if row.setting.dockers == 1 and count == 4:
            claims.append(_margin(row, "d_dps", TABLE_7[name][2]))
    return claims


def _not_slower(row: Row, than: str) -> Claim:
    ours, theirs = row.outcomes["fd_dps"], row.outcomes[than]
    text = f"{ours.seconds * 1e3:.1f} ms, {theirs.seconds * 1e3:.1f} ms"
    # Placements that may exceed the memory have an advantage.
    return Claim(
        f"{row.setting}: FD-DPS not slower than {NAMES[than]}, and fits",
        "",
        text if ours.fits else f"{text}; needs {ours.peak_bytes / 1e9:.1f} GB",
        ours.fits and (ours.seconds <= theirs.seconds * (1 + TIE) or not theirs.fits),
    )


def _search_time(row: Row, limit: float) -> Claim:
    taken = row.outcomes["fd_dps"].search_seconds
    name = f"{row.setting}: searched in {limit:g} s of one core"
    return Claim(name, "", "yes" if taken <= limit else f"{taken:.1f} s", taken <= limit)


def _margin(row: Row, than: str, margin: float) -> Claim:
    gain = row.faster(than)
    reached = gain >= margin
    reason = "" if reached else _why(row, than)
    name = f"{row.setting}: FD-DPS faster than {NAMES[than]}"
    return Claim(name, f"{margin:.1%}", f"{gain:.1%}", True, reached, reason, gain)


def _why(row: Row, than: str) -> str:
    fd, other = row.outcomes["fd_dps"], row.outcomes[than]
    if not other.fits:
        return f"{NAMES[than]}'s placement needs {other.peak_bytes / 1e9:.1f} GB: it is faster because it may"
    return f"{NAMES[than]} reaches {row.outcomes['single'].seconds / other.seconds:.2f} times one device, FD-DPS " + (
        f"{row.outcomes['single'].seconds / fd.seconds:.2f}"
    )


NAMES: Mapping[str, str] = {
    "single": "single",
    "data_parallel": "DP",
    "heft": "HEFT",
    "fast_t": "FastT",
    "d_dps": "D-DPS(-F)",
    "fd_dps": "FD-DPS",
}
"""Columns, in their order."""


# ---- tables


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns every table that has results."""
    plain = [row for row in rows if row.setting.dockers == 1]
    all_tables = [_table_3(rows), _table_5(plain), _table_5_paper(plain)]
    lines = [row for row in plain if row.lines]
    if lines:
        all_tables.append(_table_6(lines))
    four = [row for row in plain if row.setting.devices == 4]
    if four:
        all_tables.append(_table_7(four))
    dockers = [row for row in rows if row.setting.dockers > 1]
    if dockers:
        all_tables.append(_figure_4(dockers, {row.setting.model: row for row in four}))
    all_tables.append(_figure_5(plain))
    return all_tables


def _ms(outcome: Outcome) -> Cell:
    ms = outcome.seconds * 1e3
    return ms if outcome.fits else f"({ms:.0f})"


def _percent(share: float | None) -> Cell:
    return None if share is None else f"{share:.1%}"


def _table_3(rows: Iterable[Row]) -> Table:
    largest = {row.setting.model: row for row in rows}
    lines: list[list[Cell]] = []
    for name, row in largest.items():
        model = MODELS[name]
        lines.append(
            [name, model.batch, row.operators, row.edges, model.paper, model.operators, model.edges, row.graph_seconds]
        )
    header = ["model", "batch", "operators", "edges", "paper's model", "operators", "edges", "s to make the graph"]
    return Table("table3", "Table 3: models, with their training graphs", header, lines)


def _table_5(rows: Iterable[Row]) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        paper = TABLE_5.get((row.setting.model, row.setting.devices))
        ours = [_ms(row.outcomes[name]) for name in NAMES]
        gains = [_percent(row.faster(than)) for than in ("heft", "fast_t")]
        speedup = row.outcomes["single"].seconds / row.outcomes["fd_dps"].seconds
        margin = _percent(None if paper is None else paper.faster)
        lines.append([row.setting.model, row.setting.devices, *ours, speedup, *gains, margin])
    return Table(
        "table5",
        "Table 5: a step in each way, in simulated ms",
        [
            *("model", "devices", *NAMES.values(), "FD-DPS over single"),
            *("faster than HEFT", "faster than FastT", "paper: than FastT"),
        ],
        lines,
    )


def _table_5_paper(rows: Iterable[Row]) -> Table:
    """Returns times relative to FastT's, ours and the paper's, which can be compared."""
    lines: list[list[Cell]] = []
    for row in rows:
        paper = TABLE_5.get((row.setting.model, row.setting.devices))
        if paper is None:
            continue
        base = row.outcomes["fast_t"].seconds
        ours = [row.outcomes[name].seconds / base for name in ("single", "data_parallel", "fd_dps")]
        theirs = [
            "OOM" if value is None else value / paper.fast_t
            for value in (paper.single, paper.data_parallel, paper.mp_dps, paper.fd_dps)
        ]
        seconds = [
            "OOM" if paper.single is None else paper.single,
            "OOM" if paper.data_parallel is None else paper.data_parallel,
            *(paper.fast_t, paper.mp_dps, paper.fd_dps),
        ]
        lines.append([row.setting.model, row.setting.devices, *ours, *theirs, *seconds])
    columns = ("single", "DP", "MP-DPS", "FD-DPS")
    return Table(
        "table5_paper",
        "Table 5: times in FastT's, ours and the paper's, and the paper's seconds",
        [
            *("model", "devices", "our single", "our DP", "our FD-DPS", *(f"paper's {name}" for name in columns)),
            *("paper's single s", "its DP s", "its FastT s", "its MP-DPS s", "its FD-DPS s"),
        ],
        lines,
    )


def _decision(operator: Operator) -> str:
    decisions = [f"{split.dimension} x {split.parts}" if split else "no" for split in operator.splits]
    return ", ".join(dict.fromkeys(decisions)) if len(set(decisions)) == 1 else ", ".join(decisions)


def _table_6(rows: Sequence[Row]) -> Table:
    lines: list[list[Cell]] = []
    for name, (ms, kilobytes, split) in TABLE_6.items():
        operator = rows[0].lines[name]
        decisions = [_decision(row.lines[name]) for row in rows]
        theirs = [ms, kilobytes, "yes" if split else "no"]
        lines.append([name, operator.seconds * 1e3, operator.parameter_bytes / 1e3, *decisions, *theirs])
    header = [
        *("operator", "ms", "KB of parameters", *(f"split on {row.setting.devices}" for row in rows)),
        *("paper's ms", "its KB", "split"),
    ]
    return Table("table6", "Table 6: operators of VGG-16, and whether FD-DPS splits them", header, lines)


def _table_7(rows: Iterable[Row]) -> Table:
    lines: list[list[Cell]] = []
    for row in rows:
        before, after, gain = TABLE_7[row.setting.model]
        lines.append(
            [
                *(row.setting.model, _ms(row.outcomes["d_dps"]), _ms(row.outcomes["fd_dps"])),
                *(_percent(row.faster("d_dps")), sum(row.splits.values()), _most(row.splits)),
                _most({f"{split.dimension} x {split.parts}": count for split, count in row.parts.items()}),
                *(before, after, _percent(gain)),
            ]
        )
    header = [
        *("model", "D-DPS(-F) ms", "FD-DPS ms", "faster", "operators split", "most of them", "mostly by"),
        *("paper's D-DPS(-F) s", "its FD-DPS s", "its gain"),
    ]
    return Table("table7", "Table 7: without and with splitting, on four devices", header, lines)


def _most(counts: Mapping[str, int], shown: int = 4) -> str:
    return ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:shown]) or "-"


def _figure_4(rows: Iterable[Row], half: Mapping[str, Row]) -> Table:
    lines: list[list[Cell]] = [
        [
            row.setting.model,
            *(_ms(row.outcomes[name]) for name in NAMES),
            _ms(half[row.setting.model].outcomes["fd_dps"]) if row.setting.model in half else None,
            *(_percent(row.faster(than)) for than in ("heft", "fast_t")),
            _percent(FIGURE_4.get(row.setting.model)),
        ]
        for row in rows
    ]
    header = [
        "model",
        *NAMES.values(),
        "FD-DPS on 4 devices of one",
        "faster than HEFT",
        "faster than FastT",
        "paper: than FastT",
    ]
    return Table("figure4", "Figure 4: eight devices in two dockers, in simulated ms", header, lines)


def _figure_5(rows: Sequence[Row]) -> Table:
    most = max((row.setting.devices for row in rows), default=0)
    lines: list[list[Cell]] = [
        [row.setting.model, row.operators, *(row.outcomes[name].search_seconds for name in SEARCHED)]
        for row in rows
        if row.setting.devices == most
    ]
    header = ["model", "operators", *(f"{NAMES[name]} s" for name in SEARCHED)]
    title = f"Figure 5: the search on {most} devices, in s of one core (these change from run to run)"
    return Table("figure5", title, header, lines)


SEARCHED = ("heft", "fast_t", "d_dps", "fd_dps")


# ---- files


def write(rows: Sequence[Row], claims: Sequence[Claim], directory: pathlib.Path) -> None:
    """Writes ``fd_dps.md`` and ``fd_dps.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    cells: list[list[Cell]] = [[claim.name, claim.paper, claim.ours, claim.status, claim.reason] for claim in claims]
    claimed = Table("claims", "Claims", ["claim", "paper", "ours", "status", "reason"], cells)
    made = tables(rows)
    records = {table.name: [*map(list, _numbers(table))] for table in (claimed, *made)}
    headers = {table.name: list(table.header) for table in (claimed, *made)}
    content = {name: {"columns": headers[name], "rows": records[name]} for name in records}
    (directory / "fd_dps.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    failed = sum(not claim.holds for claim in claims)
    counts = {status: sum(claim.status == status for claim in claims) for status in ("reproduced", "not reproduced")}
    summary = (
        f"{len(claims)} claims: {counts['reproduced']} of the paper's margins are reached, {counts['not reproduced']} "
        f"aren't, {failed} of our own fail. They stand at the end.\n"
    )
    parts = [_TITLE + summary, *(f"## {table.title}\n\n{table.markdown()}\n" for table in made if table.rows)]
    parts += [_ASSUMED, f"## {claimed.title}\n\n{claimed.markdown()}\n"]
    (directory / "fd_dps.md").write_text("\n".join(parts), encoding="utf-8")


def _numbers(table: Table) -> Iterable[list[Cell]]:
    """Rows with six digits. Columns may have the same name, so that rows aren't records here."""
    for row in table.rows:
        yield [float(f"{cell:.6g}") if isinstance(cell, float) else cell for cell in row]
