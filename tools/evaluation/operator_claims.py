"""Claims about FD-DPS's experiments: the paper's figures with bands on both sides, and what must hold of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dapple_tf.tools.evaluation.operator_experiments import Operator, Row
from dapple_tf.tools.evaluation.operator_models import MODELS
from dapple_tf.tools.evaluation.operator_paper import FIGURE_4, TABLE_5, TABLE_6, TABLE_7

REPRODUCED_WITHIN, NEAR_WITHIN = 0.10, 0.25
"""Bands around a paper's figure, on both sides, as shares of it. They were fixed before anything was computed."""
SEARCH_SECONDS = 120.0
"""Maximum seconds of a search on one core, however busy the machine; it is bounded by a count of visited operators."""
TIE = 1e-9
"""Relative difference below which two steps are equally long."""

Verdict = Literal["reproduced", "near", "reproduced otherwise", "better", "not reproduced", "holds", "slower", "FAILED"]
OF_THE_PAPER: tuple[Verdict, ...] = ("reproduced", "near", "reproduced otherwise", "not reproduced", "better")
"""Verdicts on the paper's figures."""

NAMES = {
    "single": "single",
    "data_parallel": "DP",
    "own_statistics": "DP, own statistics",
    "split_by_batch": "DP's graph",
    "dpos": "DPOS",
    "fast_t": "FastT",
    "mp_dps": "MP-DPS",
    "d_dps": "D-DPS(-F)",
    "fd_dps": "FD-DPS",
}
"""Columns of table 5, in their order."""


@dataclass(frozen=True)
class Claim:
    """A figure of the paper, or something that must hold.

    Attributes:
        part: the table or figure.
        name: text of the claim.
        paper: the paper's figure; empty for what must hold of ours.
        ours: our figure.
        verdict: how they compare.
        reason: why it isn't reproduced, or how it is.
    """

    part: str
    name: str
    paper: str
    ours: str
    verdict: Verdict
    reason: str = ""


def claims_of(rows: Sequence[Row], search_seconds: float = SEARCH_SECONDS) -> list[Claim]:
    """Returns all claims about these rows."""
    claims = [*_table_3(rows)]
    for row in rows:
        claims += _table_5(row)
    for row in rows:
        claims += _table_6(row)
    for row in rows:
        claims += _table_7(row)
    for row in rows:
        claims += _figure_4(row)
    for row in rows:
        claims += _figure_5(row)
    for row in rows:
        claims += _must_hold(row, search_seconds)
    return claims


def counts_of(claims: Sequence[Claim]) -> dict[str, Counter[str]]:
    """Returns part -> verdict -> number of claims about the paper's figures."""
    counts: dict[str, Counter[str]] = {}
    for claim in claims:
        if claim.paper:
            counts.setdefault(claim.part, Counter())[claim.verdict] += 1
    return counts


def within(ours: float, paper: float, *, better: bool = False) -> Verdict:
    """Compares a figure with the paper's.

    Args:
        ours: our figure.
        paper: the paper's.
        better: whether ours, if it is outside the bands, is better than the paper's.
    """
    off = abs(ours / paper - 1)
    if off <= REPRODUCED_WITHIN:
        return "reproduced"
    if off <= NEAR_WITHIN:
        return "near"
    return "better" if better else "not reproduced"


def least_possible(row: Row) -> float:
    """Returns the seconds of one device's work shared out evenly: no placement's step is shorter."""
    return row.outcomes["single"].seconds / row.setting.devices


def _table_3(rows: Sequence[Row]) -> Iterator[Claim]:
    for name, row in {row.setting.model: row for row in rows}.items():
        theirs = MODELS[name].operators
        verdict = within(row.operators, theirs)
        reason = "" if verdict == "reproduced" else "TF-Slim's graphs have constants, summaries, queues, initializers"
        yield Claim("table 3", f"{name}: operators", f"{theirs:,}", f"{row.operators:,}", verdict, reason)


def _table_5(row: Row) -> Iterator[Claim]:
    paper = TABLE_5.get((row.setting.model, row.setting.devices))
    if paper is None or row.setting.dockers > 1:
        return
    for what in ("single", "fast_t", "mp_dps", "fd_dps"):
        theirs = paper.over(what)
        if theirs is not None:
            ours = row.over(what)
            verdict = within(ours, theirs, better=what == "fd_dps" and ours < theirs)
            if verdict == "reproduced" and _went_back(row, what):
                verdict = "reproduced otherwise"
            reason = "" if verdict == "reproduced" else _why_ratio(row, what, theirs)
            name = f"{row.setting}: {NAMES[what]}'s step over DP's"
            yield Claim("table 5, steps over DP", name, f"{theirs:.2f}", f"{ours:.2f}", verdict, reason)
    for than in ("fast_t", "mp_dps"):
        yield _margin("table 5, margins", row, "fd_dps", than, paper.faster(than))


def _went_back(row: Row, what: str) -> bool:
    """Returns whether a strategy keeps data parallelism's graph, with which it begins."""
    return what != "split_by_batch" and row.outcomes[what].seconds == row.outcomes["split_by_batch"].seconds


def _why_ratio(row: Row, what: str, theirs: float) -> str:
    steps = {name: f"{outcome.seconds * 1e3:.0f} ms" for name, outcome in row.outcomes.items()}
    if what == "single":
        if theirs < 1:
            return f"in the paper {row.setting.devices} devices take longer than one; here they share its work"
        return (
            f"{row.setting.devices} devices that share its work can't be more than {row.setting.devices} times as fast"
        )
    if what == "fd_dps":
        return f"{steps['fd_dps']} where even shares of one device's work take {least_possible(row) * 1e3:.0f} ms"
    kept = (
        f"it goes back to DP's graph ({steps['split_by_batch']})"
        if _went_back(row, what)
        else f"it takes {steps[what]}"
    )
    return f"{kept}; DPOS alone takes {steps['dpos']}" if what == "fast_t" else kept


def _margin(part: str, row: Row, what: str, than: str, theirs: float) -> Claim:
    ours = row.faster(than, what)
    verdict = within(ours, theirs, better=what == "fd_dps" and ours > theirs)
    most = 1 - least_possible(row) / row.outcomes[than].seconds
    reason = ""
    if verdict != "reproduced":
        reason = f"even shares of one device's work would be {most:.1%} faster"
        if verdict == "better":
            reason = f"{NAMES[than]} is {row.over(than) - 1:+.0%} of DP; {reason}"
    name = f"{row.setting}: {NAMES[what]} faster than {NAMES[than]}"
    return Claim(part, name, f"{theirs:.1%}", f"{ours:.1%}", verdict, reason)


def is_split(operator: Operator) -> bool:
    """Returns whether every node of an operator is split."""
    return all(split is not None for split in operator.splits)


def _table_6(row: Row) -> Iterator[Claim]:
    if not row.lines or row.setting.devices != 4 or row.setting.dockers > 1:
        return
    for name, (_, _, theirs) in TABLE_6.items():
        ours, alone = is_split(row.lines[name]), is_split(row.lines_alone[name])
        words = {True: "split", False: "whole"}
        verdict: Verdict = "reproduced" if ours == theirs else "not reproduced"
        reason = "" if ours == theirs else f"it goes with its neighbours; one operator at a time it is {words[alone]}"
        yield Claim("table 6", f"{row.setting}: {name}", words[theirs], words[ours], verdict, reason)


def _table_7(row: Row) -> Iterator[Claim]:
    if row.setting.devices != 4 or row.setting.dockers > 1:
        return
    theirs = TABLE_7[row.setting.model][2]
    yield _margin("table 7, regions", row, "fd_dps", "d_dps", theirs)
    ours = row.faster("one_copy", "alone")
    verdict = within(ours, theirs, better=ours > theirs)
    reason = "" if verdict == "reproduced" else f"{row.alone:,} operators of one copy pay by themselves"
    name = f"{row.setting}: one copy is faster with splits of one operator at a time"
    yield Claim("table 7, one at a time", name, f"{theirs:.1%}", f"{ours:.1%}", verdict, reason)


def _figure_4(row: Row) -> Iterator[Claim]:
    if row.setting.dockers > 1:
        for (what, than), theirs in FIGURE_4.get(row.setting.model, {}).items():
            yield _margin("figure 4", row, what, than, theirs)


def _figure_5(row: Row) -> Iterator[Claim]:
    """Yields which search is shorter; both differ by more than runs do."""
    if row.setting.devices != 8 or row.setting.dockers > 1:
        return
    pairs = {"PNASNet-mobile": [("fd_dps", "fast_t")], "NASNet-large": [("mp_dps", "d_dps"), ("mp_dps", "fd_dps")]}
    for what, than in pairs.get(row.setting.model, []):
        shorter = row.outcomes[what].search_seconds < row.outcomes[than].search_seconds
        yield Claim(
            "figure 5",
            f"{row.setting}: {NAMES[what]}'s search takes less time than {NAMES[than]}'s",
            "yes",
            "yes" if shorter else "no",
            "reproduced" if shorter else "not reproduced",
            "" if shorter else f"it has {NAMES[than]}'s placement as one of its candidates, and simulates all of them",
        )


def _must_hold(row: Row, search_seconds: float) -> Iterator[Claim]:
    ours = row.outcomes["fd_dps"]
    for than in ("data_parallel", "own_statistics"):
        theirs = row.outcomes[than]
        text = f"{ours.seconds * 1e3:.1f} ms, {theirs.seconds * 1e3:.1f} ms"
        faster = ours.seconds <= theirs.seconds * (1 + TIE) or not theirs.fits
        name = f"{row.setting}: FD-DPS not slower than {NAMES[than]}"
        reason = "" if faster else f"{-row.faster(than):.1%}"
        yield Claim("against DP", name, "", text, "holds" if faster else "slower", reason)
    peak = f"{ours.peak_bytes / 1e9:.1f} GB"
    yield Claim("must hold", f"{row.setting}: FD-DPS fits the devices' memory", "", peak, _holds(ours.fits))
    taken = ours.search_seconds
    name = f"{row.setting}: searched in {search_seconds:g} s of one core"
    yield Claim(
        "must hold", name, "", "yes" if taken <= search_seconds else f"{taken:.1f} s", _holds(taken <= search_seconds)
    )


def _holds(good: bool) -> Verdict:
    return "holds" if good else "FAILED"
