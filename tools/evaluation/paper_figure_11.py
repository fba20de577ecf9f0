"""Figure 11 and section 6.3: our plans against data parallelism with overlap, in each setting that may be meant.

Data parallelism has the fastest number of devices, since our planner and GPipe may leave some idle, too. The paper's
has all, which is shown beside it.

The text has one sentence, "for fixed GBS = 128", and one setting for all its numbers. So have we: all claims stand in
all settings, of which the text's counts, and besides one that was named for what it changes: the batch, and with it
the time of slices smaller than profiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dapple_tf.tools.evaluation.paper_models import FIGURE_11, FIGURE_11_LARGEST, FIGURE_11_MODELS
from dapple_tf.tools.evaluation.paper_outcomes import times_of
from dapple_tf.tools.evaluation.paper_verdicts import (
    NEAR,
    NOT,
    REPRODUCED,
    USUAL,
    Claim,
    Results,
    number,
    statement,
)

PAPERS = "the paper's plans"


@dataclass(frozen=True)
class Setting:
    """What is compared with data parallelism.

    Attributes:
        batch: ``GBS 128``, ``Table 4's GBS``, or ``flat ring`` for the latter with one ring through all devices.
        plans: ``ours`` or ``paper``, those of Table 4.
    """

    batch: str
    plans: str

    def __str__(self) -> str:
        return f"{self.batch}, {'our plans' if self.plans == 'ours' else PAPERS}"


SETTINGS = tuple(
    Setting(batch, plans) for batch in ("GBS 128", "Table 4's GBS", "flat ring") for plans in ("ours", "paper")
)
TEXT, OTHER = Setting("GBS 128", "ours"), Setting("Table 4's GBS", "ours")
"""The text's setting; and the only other one that counts, which has Table 4's batch and rule for small slices."""
_PUBLISHED = Setting("Table 4's GBS", "paper")
_NETWORKS = ("bert-48", "xlnet-36")
"""Models of which section 6.3 says that they gain more the slower the network is."""
_MORE = 1.05
_SMALL = (
    "the text has one GBS of 128, four of VGG-19's profiled batches and two of GNMT-16's: of these data parallelism is "
    "fastest on few devices, as with more it does little but all-reduce, and a pipeline can use more of them, with "
    "slices smaller than profiled, whose times are in proportion here"
)
BEST, ALL = "data parallelism", "overlap"
"""Columns of records: data parallelism with overlap on its fastest number of devices, which claims are against, and on
all, as the paper has it."""


def pair(results: Results, setting: Setting, model: str, config: str, opponent: str = BEST) -> tuple[Any, Any] | None:
    """Returns the records of the plan and of data parallelism, `BEST` or `ALL`; None without results."""
    usual = f"table 4: {model}/{config}"
    keys = {
        "Table 4's GBS": usual,
        "GBS 128": f"figure 11, GBS 128: {model}/{config}",
        "flat ring": f"figure 11, flat ring: {model}" if config == "A" else usual,  # one device in each server of B, C
    }
    record = results.get(keys[setting.batch])
    return None if record is None or record[opponent] is None else (record[setting.plans], record[opponent])


def average(results: Results, setting: Setting, config: str, opponent: str = BEST) -> float | None:
    """Returns the average speedup over data parallelism, `BEST` or `ALL`; None if a model has no results."""
    pairs = [pair(results, setting, model, config, opponent) for model in FIGURE_11_MODELS]
    values = [times_of(*both) for both in pairs if both is not None]
    return sum(values) / len(values) if len(values) == len(pairs) else None


def _largest(results: Results, setting: Setting, opponent: str) -> float | None:
    both = pair(results, setting, "gnmt-16", "C", opponent)
    return None if both is None else times_of(*both)


def numbers(results: Results, setting: Setting, opponent: str = BEST) -> dict[str, tuple[float, float]]:
    """Returns what -> (the paper's, ours) for the numbers of section 6.3 that have results."""
    values = {
        f"average over DP with overlap, config {config}": (paper, average(results, setting, config, opponent))
        for config, paper in FIGURE_11.items()
    }
    values["GNMT-16 over DP with overlap, config C"] = (FIGURE_11_LARGEST, _largest(results, setting, opponent))
    return {what: (paper, ours) for what, (paper, ours) in values.items() if ours is not None}


def slower_networks(results: Results, setting: Setting) -> dict[str, tuple[float, float]]:
    """Returns model -> speedups over data parallelism in B and in C."""
    speedups: dict[str, tuple[float, float]] = {}
    for model in _NETWORKS:
        both = [pair(results, setting, model, config) for config in "BC"]
        factors = [times_of(*records) for records in both if records is not None]
        if len(factors) == 2:
            speedups[model] = (factors[0], factors[1])
    return speedups


def claims(results: Results) -> Iterator[Claim]:
    """Yields the claims, in the text's setting and in the other that counts."""
    others, published = numbers(results, OTHER), numbers(results, _PUBLISHED)
    over_all = numbers(results, TEXT, ALL)
    for what, (paper, ours) in numbers(results, TEXT).items():
        claim = _claim(f"figure 11: {what}, GBS 128", paper, ours, others.get(what), published.get(what))
        yield dataclasses.replace(claim, ours=f"{claim.ours}; {over_all[what][1]:.4g}x over DP on all devices")
    theirs = slower_networks(results, dataclasses.replace(TEXT, plans="paper"))
    for model, (at_25, at_10) in slower_networks(results, TEXT).items():
        text = f"{at_25:.2f}x at 25, {at_10:.2f}x at 10 Gbit/s"
        name = f"section 6.3: {model} gains more over DP the slower the network, GBS 128"
        if model in theirs:
            text += "; with the paper's plans {:.2f}x, {:.2f}x".format(*theirs[model])
        alone = _gains_more((at_25, at_10))
        holds = alone and (model not in theirs or _gains_more(theirs[model]))
        why = "with our plans, not with the paper's" if alone else "it gains as much"
        yield statement(name, "more", text, holds, why)


def _claim(
    name: str,
    paper: float,
    ours: float,
    others: tuple[float, float] | None,
    published: tuple[float, float] | None,
) -> Claim:
    """Returns the claim of a number in the text's setting, and in the other one if that has results."""
    if others is None or published is None:
        return number(name, paper, ours, "x", _SMALL)
    # What only our plans reach there isn't the paper's.
    other, of_paper = others[1], published[1]
    if USUAL.verdict(paper, of_paper, ratio=True) == REPRODUCED:
        return number(name, paper, ours, "x", _SMALL, otherwise=(f"at {OTHER}", other))
    why = _SMALL
    if USUAL.verdict(paper, other, ratio=True) == REPRODUCED:
        why += "; at Table 4's GBS, by its rule for small slices, only our plan reaches it"
    return number(name, paper, ours, "x", why, shown={f"at {OTHER}": other, f"at {_PUBLISHED}": of_paper})


def by_opponent(results: Results) -> str:
    """Returns what comes of each number over data parallelism on its fastest number of devices, and on all."""
    texts = []
    over_all = numbers(results, TEXT, ALL)
    for what, (paper, ours) in numbers(results, TEXT).items():
        other = over_all[what][1]
        verdicts = [USUAL.verdict(paper, value, ratio=True) for value in (ours, other)]
        texts.append(f"{what}: {ours:.4g}x, {verdicts[0]}, rather than {other:.4g}x, {verdicts[1]}")
    return "; ".join(texts)


def _gains_more(speedups: tuple[float, float]) -> bool:
    """Returns whether a model gains more over data parallelism in C than in B."""
    at_25, at_10 = speedups
    return at_10 > at_25 * _MORE


def by_setting(results: Results) -> list[list[str]]:
    """Returns a row for each claim, with ours and the verdict in each setting, and one that counts the verdicts."""
    columns: list[list[str]] = []
    for setting in SETTINGS:
        cells = []
        for paper, ours in numbers(results, setting).values():
            cells.append((f"{ours:.3g}x", USUAL.verdict(paper, ours, ratio=True)))
        theirs = slower_networks(results, dataclasses.replace(setting, plans="paper"))
        for model, speedups in slower_networks(results, setting).items():
            holds = _gains_more(speedups) and (model not in theirs or _gains_more(theirs[model]))
            cells.append(("{:.2f}x, {:.2f}x".format(*speedups), REPRODUCED if holds else NOT))
        verdicts = [verdict for _, verdict in cells]
        tally = ", ".join(
            f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(sorted(verdicts, key=_rank))
        )
        columns.append([*(f"{ours} ({verdict})" for ours, verdict in cells), tally])
    names = [(what, f"{paper:g}x") for what, (paper, _) in numbers(results, TEXT).items()]
    names += [(f"{model} gains more, at 25 and 10 Gbit/s", "more") for model in slower_networks(results, TEXT)]
    lengths = {len(column) for column in columns}
    if lengths != {len(names) + 1} or not names:
        return []  # some setting has no results
    return [[*name, *cells] for name, *cells in zip([*names, ("together", "")], *columns, strict=True)]


def _rank(verdict: str) -> int:
    return (REPRODUCED, NEAR, NOT).index(verdict)
