"""FD-DPS's evaluation (Mathematics 2022, 10, 4788, section 5): its claims, the parts behind them, and the command.

    python -m tools.evaluation.reproduce_fd_dps

Tables 3 and 5 and figure 4: training steps of six networks on 2 to 8 devices as fast as P100s. `results` has the flags.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import operator_experiments as experiments
from dapple_tf.tools.evaluation.claims import DATA, TEXT, Claim, Value
from dapple_tf.tools.evaluation.document import claimed, counted, table
from dapple_tf.tools.evaluation.operator_models import MODELS
from dapple_tf.tools.evaluation.results import FLAGS, Evaluation, Record, Results, reproduce

OWN, HARDER = "paper", "harder"
SETTINGS = {OWN: "the paper's setting", HARDER: "harder"}


class PaperRow(NamedTuple):
    """A row of table 5, in seconds; None is OOM in the paper."""

    single: float | None
    data_parallel: float | None
    fast_t: float
    mp_dps: float
    fd_dps: float


TABLE_5: Mapping[tuple[str, int], PaperRow] = {
    ("VGG-16", 2): PaperRow(0.794, 1.272, 1.122, 1.066, 1.051),
    ("VGG-16", 4): PaperRow(0.794, 1.770, 1.975, 1.905, 1.812),
    ("Inception-V3", 2): PaperRow(0.574, 0.738, 0.712, 0.702, 0.685),
    ("Inception-V3", 4): PaperRow(0.574, 0.943, 0.912, 0.872, 0.823),
    ("ResNet-50", 4): PaperRow(0.394, 0.895, 0.834, 0.719, 0.683),
    ("ResNet-50", 8): PaperRow(0.394, 1.983, 1.874, 1.741, 1.587),
    ("ResNet-200", 4): PaperRow(2.331, 0.986, 0.853, 0.806, 0.743),
    ("ResNet-200", 8): PaperRow(2.331, 2.321, 2.046, 1.955, 1.723),
    ("PNASNet-mobile", 4): PaperRow(0.822, 1.669, 1.624, 1.547, 1.384),
    ("PNASNet-mobile", 8): PaperRow(0.822, 2.643, 2.459, 2.147, 1.873),
    ("NASNet-large", 4): PaperRow(None, None, 4.289, 3.876, 3.627),
    ("NASNet-large", 8): PaperRow(None, None, 7.425, 6.550, 5.931),
}
FIGURE_4 = {("FD-DPS", "FastT"): 0.160, ("MP-DPS", "FastT"): 0.049, ("FD-DPS", "MP-DPS"): 0.111}
"""(Faster one, than which) -> fraction, of PNASNet-mobile in two dockers."""
PARAMETERS = {
    "VGG-16": 138.36e6,
    "Inception-V3": 23.83e6,
    "ResNet-50": 25.56e6,
    "ResNet-200": 64.67e6,
    "PNASNet-mobile": 5.07e6,
}
"""Parameters of the published networks, which cross TF-Slim's host link both ways for each device."""
_OWN_PAIRS = {"FastT": ("FD-DPS", "FastT"), "MP-DPS": ("FD-DPS, pieces", "MP-DPS, pieces")}
"""Opponent -> our column and its own, as published."""
_DOCKERS = "PNASNet-mobile, 8 devices in 2 dockers"
_BACK = "both go back to data parallelism's graph here"


def _margin(record: Record, ours: str, theirs: str) -> float:
    return 1 - float(record[ours]) / float(record[theirs])


def _published(model: str, devices: int) -> str:
    return f"published: {model}, {devices} devices"


def _harder(model: str, devices: int) -> str:
    return f"harder: {model}, {devices} devices"


def margins(results: Results, opponent: str) -> dict[str, list[tuple[float, float]]]:
    """Returns setting -> (the paper's margin, ours) of each row of table 5.

    Args:
        results: the records.
        opponent: ``FastT`` or ``MP-DPS``.
    """
    ours, theirs = _OWN_PAIRS[opponent]
    column = opponent.lower().replace("-", "_").replace("fastt", "fast_t")
    found: dict[str, list[tuple[float, float]]] = {OWN: [], HARDER: []}
    for key, row in TABLE_5.items():
        paper = 1 - row.fd_dps / float(getattr(row, column))
        found[OWN].append((paper, _margin(results[_published(*key)], ours, theirs)))
        found[HARDER].append((paper, _margin(results[_harder(*key)], "FD-DPS", opponent)))
    return found


def _over(results: Results, opponent: str) -> Iterator[Claim]:
    """Yields FD-DPS's step over an opponent's for each row: 1 less the margin that the paper prints."""
    both = margins(results, opponent)
    for number, (model, devices) in enumerate(TABLE_5):
        paper = 1 - both[OWN][number][0]
        ours: dict[str, Value] = {setting: 1 - rows[number][1] for setting, rows in both.items()}
        name = f"table 5: {model}, {devices} devices: FD-DPS over {opponent}"
        yield Claim(name, paper, ours, less=True, why="a single row is chance: see the mean")
    for what, of in (("mean margin", statistics.fmean), ("rows ahead", _ahead)):
        paper = of([theirs for theirs, _ in both[OWN]])
        values: dict[str, Value] = {setting: of([ours for _, ours in rows]) for setting, rows in both.items()}
        unit = "%" if what == "mean margin" else ""
        yield Claim(f"table 5: FD-DPS over {opponent}: {what}", paper, values, unit, why=_BACK)


def _ahead(values: Sequence[float]) -> float:
    return float(sum(value > 0 for value in values))


def host_link() -> float:
    """Returns the bytes/s of TF-Slim's host link by VGG-16's first row: weights out and gradients in."""
    row = TABLE_5["VGG-16", 2]
    assert row.single is not None and row.data_parallel is not None
    return 2 * 2 * 4 * PARAMETERS["VGG-16"] / (row.data_parallel - row.single)


def _data_parallelism() -> Iterator[Claim]:
    for (model, devices), row in TABLE_5.items():
        if row.single is None or row.data_parallel is None:
            continue
        predicted = row.single + devices * 2 * 4 * PARAMETERS[model] / host_link()
        fitted = (model, devices) == ("VGG-16", 2)
        why = "the link is fitted to this row" if fitted else "small operators lose more than their bytes"
        untold = ""
        if row.data_parallel < row.single:
            untold, why = DATA, "whole batches on clones can't take less than on one device"
        name = f"table 5: {model}, {devices} devices: data parallelism"
        yield Claim(name, row.data_parallel, {OWN: predicted}, " s", why=why, untold=untold, fitted=fitted)


def _figure_4(results: Results) -> Iterator[Claim]:
    for (faster, than), paper in FIGURE_4.items():
        own, harder = docker_margins(results, faster, than)["3"], results[f"harder: {_DOCKERS}"]
        margin: dict[str, Value] = {OWN: own, HARDER: _margin(harder, faster, than)}
        name = f"figure 4: PNASNet in two dockers: {faster} over {than}"
        yield Claim(name, paper, margin, "%", why=f"{TEXT}: the link between dockers, which decides", fitted=True)


def docker_margins(results: Results, faster: str, than: str) -> dict[str, float]:
    """Returns GB/s of the link between dockers -> the margin of figure 4 as published."""
    ours, theirs = _OWN_PAIRS[than] if faster == "FD-DPS" else ("MP-DPS, pieces", "FastT")
    return {rate: _margin(record, ours, theirs) for rate, record in results[f"published: {_DOCKERS}"].items()}


def _rest(results: Results) -> Iterator[Claim]:
    for name, model in MODELS.items():
        devices = next(number for other, number in TABLE_5 if other == name)
        count: dict[str, Value] = {OWN: float(results[_harder(name, devices)]["operators"])}
        why = "TF-Slim's graphs for TensorFlow 1.14"
        yield Claim(f"table 3: {name}: operators", float(model.operators), count, "", why=why, untold=TEXT)
    single = "fits" if results[_harder("NASNet-large", 4)]["single fits"] else "OOM"
    yield Claim("table 5: NASNet-large on one device", "OOM", {OWN: single}, why="16 images need less than 16 GB here")


def claims(results: Results) -> list[Claim]:
    """Returns all claims."""
    overs = [claim for opponent in _OWN_PAIRS for claim in _over(results, opponent)]
    return [*overs, *_data_parallelism(), *_figure_4(results), *_rest(results)]


# ---- the page


def _rows(results: Results) -> str:
    columns = ("FD-DPS", "FD-DPS, algorithm 2", "FastT", "HEFT", "FD-DPS, pieces", "MP-DPS, pieces", "graph")
    rows = [
        [f"{model}, {devices}", *(1e3 * results[_published(model, devices)][column] for column in columns)]
        for model, devices in TABLE_5
    ]
    return table(["ms", *columns[:-1], "data parallelism's graph"], rows)


def _towers(results: Results) -> str:
    rows = []
    for samples in experiments.SAMPLES:
        for devices, record in results[f"towers, {samples} samples"].items():
            single, parallel, ours = (record[name] for name in ("single", "data parallelism", "FD-DPS"))
            steps = [1e3 * seconds for seconds in (single, parallel, ours)]
            rows.append([samples, devices, *steps, parallel / ours, min(single, parallel) / ours])
    columns = ("one device, ms", "data parallelism, ms", "FD-DPS, ms", "over data parallelism", "over the faster")
    return table(["samples", "devices", *columns], rows)


def texts(results: Results, all_claims: Sequence[Claim]) -> dict[str, str]:
    """Returns what the page's marks stand for."""
    found = {}
    for opponent, key in (("FastT", "fastt"), ("MP-DPS", "mpdps")):
        both = margins(results, opponent)
        found[f"{key} mean"] = f"{100 * statistics.fmean([ours for _, ours in both[OWN]]):.1f}"
        found[f"{key} paper"] = f"{100 * statistics.fmean([paper for paper, _ in both[OWN]]):.1f}"
        found[f"{key} ahead"] = f"{_ahead([ours for _, ours in both[OWN]]):.0f}"
        dockers = [f"{100 * margin:.1f}" for margin in docker_margins(results, "FD-DPS", opponent).values()]
        found[f"{key} dockers"] = ", ".join(dockers)
    rows = [results[_published(*key)] for key in TABLE_5]
    over = [row["FD-DPS"] / row["graph"] for row in rows]
    rule = [row["FD-DPS, algorithm 2"] / row["FD-DPS"] for row in rows]
    return {
        **found,
        "of": str(len(TABLE_5)),
        "counts": counted(all_claims, SETTINGS),
        "claims": claimed(all_claims, SETTINGS),
        "rows": _rows(results),
        "towers": _towers(results),
        "least over": f"{min(over):.1f}",
        "most over": f"{max(over):.1f}",
        "behind": str(sum(row["MP-DPS, pieces"] < row["FD-DPS"] for row in rows)),
        "rule ahead": str(sum(row["FD-DPS, algorithm 2"] < row["FastT"] for row in rows)),
        "rule": f"{min(rule):.2f} to {max(rule):.2f}",
        "link": f"{host_link() / 1e9:.1f}",
    }


def parts() -> dict[str, Callable[[], Record]]:
    """Returns all parts: name -> what computes its record. The ones that take long come first."""
    of = functools.partial
    long_first = list(TABLE_5)[::-1]
    return {
        **{_harder(*key): of(experiments.run_harder, *key) for key in long_first},
        f"harder: {_DOCKERS}": of(experiments.run_harder, "PNASNet-mobile", 8, 2),
        f"published: {_DOCKERS}": of(experiments.run_dockers, "PNASNet-mobile", 8),
        **{_published(*key): of(experiments.run_published, *key) for key in long_first},
        **{f"towers, {samples} samples": of(experiments.run_towers, samples) for samples in experiments.SAMPLES},
    }


EVALUATION = Evaluation(
    "fd_dps", "FD-DPS: ours beside the paper's", SETTINGS, parts(), claims, texts, lambda: {"host link": host_link()}
)
main = functools.partial(reproduce, EVALUATION)

if __name__ == "__main__":
    command.start(main, FLAGS)
