"""Figure 11 and section 6.3: our plans against data parallelism with overlap, in each setting that may be meant.

Data parallelism has the fastest number of devices, since our planner and GPipe may leave some idle, too, and all of
them, as the paper's has: claims are judged by both, with our plans and with the paper's, and the worst verdict counts.

The text has one sentence, "for fixed GBS = 128", and one batch for all its numbers. So have we: all claims stand at
all batches, of which the text's counts, and besides one that was named for what it changes: the batch, and with it
the time of slices smaller than profiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dapple_tf.tools.evaluation.paper_models import FIGURE_11, FIGURE_11_LARGEST, FIGURE_11_MODELS, TABLE_4
from dapple_tf.tools.evaluation.paper_outcomes import times_of
from dapple_tf.tools.evaluation.paper_verdicts import (
    NEAR,
    NOT,
    OTHERWISE,
    REPRODUCED,
    USUAL,
    Claim,
    Results,
    number,
    statement,
)

PAPERS = "the paper's plans"
_PARALLEL = {(row.model, row.config) for row in TABLE_4 if row.plan == "DP"}
"""Models and configurations for which the paper's plan is data parallelism."""


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
_NETWORKS = ("bert-48", "xlnet-36")
"""Models of which section 6.3 says that they gain more the slower the network is."""
MORE = 1.05
"""How many times as much a model must gain in C as in B to gain more."""
_SMALL = (
    "the text has one GBS of 128, four of VGG-19's profiled batches and two of GNMT-16's: of these data parallelism is "
    "fastest on few devices, as with more it does little but all-reduce, and a pipeline can use more of them, with "
    "slices smaller than profiled, whose times are in proportion here"
)
BEST, ALL = "data parallelism", "overlap"
"""Columns of records: data parallelism with overlap on its fastest number of devices, and on all, as in the paper."""
WAYS = {
    "": ("ours", BEST),
    "over DP on all devices": ("ours", ALL),
    f"with {PAPERS}": ("paper", BEST),
    f"with {PAPERS} over DP on all devices": ("paper", ALL),
}
"""Ways in which a claim is judged at a batch -> the plans and the opponent. What only some reach isn't the paper's."""


def pair(results: Results, setting: Setting, model: str, config: str, opponent: str = BEST) -> tuple[Any, Any] | None:
    """Returns the records of the plan and of data parallelism, `BEST` or `ALL`; None without results.

    Where the paper's plan is data parallelism, too, it has as many devices as its opponent.
    """
    usual = f"table 4: {model}/{config}"
    keys = {
        "Table 4's GBS": usual,
        "GBS 128": f"figure 11, GBS 128: {model}/{config}",
        "flat ring": f"figure 11, flat ring: {model}" if config == "A" else usual,  # one device in each server of B, C
    }
    record = results.get(keys[setting.batch])
    if record is None or record[opponent] is None:
        return None
    plan = opponent if setting.plans == "paper" and (model, config) in _PARALLEL else setting.plans
    return record[plan], record[opponent]


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


def slower_networks(results: Results, setting: Setting, opponent: str = BEST) -> dict[str, tuple[float, float]]:
    """Returns model -> speedups over data parallelism in B and in C."""
    speedups: dict[str, tuple[float, float]] = {}
    for model in _NETWORKS:
        both = [pair(results, setting, model, config, opponent) for config in "BC"]
        factors = [times_of(*records) for records in both if records is not None]
        if len(factors) == 2:
            speedups[model] = (factors[0], factors[1])
    return speedups


def claims(results: Results) -> Iterator[Claim]:
    """Yields the claims, at the text's batch and at the other that counts."""
    ways, others = (
        {way: numbers(results, Setting(batch, plans), opponent) for way, (plans, opponent) in WAYS.items()}
        for batch in (TEXT.batch, OTHER.batch)
    )
    for what, (paper, _) in numbers(results, TEXT).items():
        at_text, at_other = (
            {way: values[what][1] for way, values in some.items() if what in values} for some in (ways, others)
        )
        yield _claim(f"figure 11: {what}, GBS 128", paper, at_text, at_other)
    for model in slower_networks(results, TEXT):
        texts, reached = [], []
        for way, (plans, opponent) in WAYS.items():
            speedups = slower_networks(results, Setting(TEXT.batch, plans), opponent).get(model)
            if speedups is not None:
                texts.append(f"{speedups[0]:.2f}x at 25, {speedups[1]:.2f}x at 10 Gbit/s {way}".strip())
                reached.append(_gains_more(speedups))
        name = f"section 6.3: {model} gains more over DP the slower the network, GBS 128"
        why = "only in some of these ways" if any(reached) else "it gains as much"
        yield statement(name, "more", "; ".join(texts), all(reached), why)


def _claim(name: str, paper: float, ways: Mapping[str, float], others: Mapping[str, float]) -> Claim:
    """Returns the claim of a number: the worst verdict of all ways at the text's batch or, otherwise, at the other one.

    Args:
        name: of what.
        paper: the paper's number.
        ways: way -> our number at the text's batch.
        others: the same at the other batch, if it has results.
    """
    text = "; ".join(f"{ours:.4g}x {way}".strip() for way, ours in ways.items())
    verdict, why = _worst(paper, ways.values()), _SMALL
    reached = [way or "with ours over DP that may leave devices idle" for way in ways if _reaches(paper, ways[way])]
    if verdict != REPRODUCED:
        if others:
            text += f"; at {OTHER.batch} {min(others.values()):.4g}x to {max(others.values()):.4g}x in these ways"
        if others and _worst(paper, others.values()) == REPRODUCED:
            verdict, why = OTHERWISE, f"at {OTHER.batch}; {why}"
        elif reached:
            why = f"reached only {' and '.join(reached)}; {why}"
    claim = number(name, paper, ways[""], "x", why)
    return dataclasses.replace(claim, ours=text, verdict=verdict, why="" if verdict == REPRODUCED else why)


def _reaches(paper: float, ours: float) -> bool:
    return USUAL.verdict(paper, ours, ratio=True) == REPRODUCED


def _worst(paper: float, values: Iterable[float]) -> str:
    """Returns the worst verdict on numbers of ours."""
    return max((USUAL.verdict(paper, ours, ratio=True) for ours in values), key=_rank)


def by_opponent(results: Results) -> str:
    """Returns what comes of each number of our plans over data parallelism on its fastest devices, and on all."""
    texts = []
    over_all = numbers(results, TEXT, ALL)
    for what, (paper, ours) in numbers(results, TEXT).items():
        other = over_all[what][1]
        verdicts = [USUAL.verdict(paper, value, ratio=True) for value in (ours, other)]
        texts.append(f"{what}: {ours:.4g}x, {verdicts[0]}, and {other:.4g}x, {verdicts[1]}")
    return "; ".join(texts)


def _gains_more(speedups: tuple[float, float]) -> bool:
    """Returns whether a model gains more over data parallelism in C than in B."""
    at_25, at_10 = speedups
    return at_10 > at_25 * MORE


def by_setting(results: Results) -> list[list[str]]:
    """Returns a row for each claim, with ours and the worse verdict in each setting, and one that counts verdicts."""
    columns: list[list[str]] = []
    for setting in SETTINGS:
        cells = []
        on_all = numbers(results, setting, ALL)
        for what, (paper, ours) in numbers(results, setting).items():
            both = (ours, on_all[what][1])
            cells.append(("{:.3g}x, {:.3g}x".format(*both), _worst(paper, both)))
        over_all = slower_networks(results, setting, ALL)
        for model, speedups in slower_networks(results, setting).items():
            holds = _gains_more(speedups) and _gains_more(over_all[model])
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
