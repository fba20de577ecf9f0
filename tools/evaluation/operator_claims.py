"""Claims about FD-DPS's experiments: the paper's figures with bands on both sides, and what must hold of ours.

A figure is

* reproduced: within 10 % of the paper's; of a step in units of another, such as data parallelism's, also the gain over
  that, 1 - the step, is between half and twice the paper's, on the same side, since 0.97 isn't 1.02;
* near: within 25 %, the gain between a third and three times;
* reproduced otherwise: within the first bands, but by what isn't the strategy;
* not reproduced: all else, also margins that are too large, which only show that the opponent is weak.

Data parallelism, the unit of steps, is the faster of two forms: copies of variables on replicas that normalise their
own samples, or one copy and one update of each variable. TF-Slim has the latter's updates and the former's samples.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dapple_tf.tools.evaluation.operator_experiments import (
    MEMORY_BYTES,
    OPPONENTS,
    Operator,
    Row,
    Setting,
    with_rounds_of,
)
from dapple_tf.tools.evaluation.operator_models import MODELS
from dapple_tf.tools.evaluation.operator_paper import TABLE_5, TABLE_6, TABLE_7, PaperRow

REPRODUCED_WITHIN, NEAR_WITHIN = 0.10, 0.25
"""Bands around a paper's figure, on both sides, as shares of it."""
REPRODUCED_GAIN, NEAR_GAIN = 2.0, 3.0
"""Maximum ratio of our gain and the paper's, either way."""
SEARCH_SECONDS = 300.0
"""Maximum seconds of a search on one core, however slow and busy: a count of visited operators bounds it.

The longest takes 47 s on one machine, 159 s on another.
"""
SAME_STEP = 0.01
"""Relative difference from the step of data parallelism's graph below which a strategy counts as that."""
AS_FAST = 0.01
"""Relative difference below which FD-DPS counts as equally fast as data parallelism."""

Verdict = Literal["reproduced", "near", "reproduced otherwise", "not reproduced", "holds", "slower", "FAILED"]
OF_THE_PAPER: tuple[Verdict, ...] = ("reproduced", "near", "reproduced otherwise", "not reproduced")
"""Verdicts on the paper's figures."""

NAMES = {
    "single": "single",
    "data_parallel": "DP",
    "own_statistics": "DP, own statistics",
    "split_by_batch": "DP's graph",
    "dpos": "DPOS",
    "fast_t": "FastT",
    "mp_dps": "MP-DPS",
    with_rounds_of("fast_t"): "FastT, rounds",
    with_rounds_of("mp_dps"): "MP-DPS, rounds",
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


@dataclass(frozen=True)
class _Figure:
    """A figure of the paper, and the number of ours that stands against it.

    Attributes:
        setting: of the row.
        claim: what comes of it; its name has ``{}`` where ``whose`` belongs.
        whose: the strategy that tells it from others on the same number.
        seconds: the two steps that our number is computed from.
    """

    setting: Setting
    claim: Claim
    whose: str
    seconds: tuple[float, float]


def claims_of(rows: Sequence[Row], search_seconds: float = SEARCH_SECONDS) -> list[Claim]:
    """Returns all claims about these rows."""
    figures = [figure for table in (_table_5, _table_7) for row in rows for figure in table(row)]
    claims = [*_table_3(rows), *_single(rows)]
    for row in rows:
        claims += _out_of_memory(row)
    claims += _once(figures)
    for row in rows:
        claims += _table_6(row)
    for row in rows:
        claims += _must_hold(row, search_seconds)
    return claims


def bands() -> dict[str, float]:
    """Returns the limits of verdicts, as they are stored."""
    limits = {
        "reproduced within": REPRODUCED_WITHIN,
        "reproduced, gains": REPRODUCED_GAIN,
        "near within": NEAR_WITHIN,
        "near, gains": NEAR_GAIN,
        "same step as DP's graph": SAME_STEP,
        "as fast as DP": AS_FAST,
    }
    return {name: round(limit, 6) for name, limit in limits.items()}


def counts_of(claims: Sequence[Claim]) -> dict[str, Counter[str]]:
    """Returns part -> verdict -> number of claims about the paper's figures."""
    counts: dict[str, Counter[str]] = {}
    for claim in claims:
        if claim.paper:
            counts.setdefault(claim.part, Counter())[claim.verdict] += 1
    return counts


def within(ours: float, paper: float) -> Verdict:
    """Compares a figure with the paper's."""
    off = abs(ours / paper - 1)
    if off <= REPRODUCED_WITHIN:
        return "reproduced"
    return "near" if off <= NEAR_WITHIN else "not reproduced"


def within_in_steps(ours: float, paper: float) -> Verdict:
    """Compares a step in units of another with the paper's: the ratio, and the gain.

    Args:
        ours: our step over the other, such as data parallelism's.
        paper: the paper's.
    """
    bands: tuple[tuple[Verdict, float, float], ...] = (
        ("reproduced", REPRODUCED_WITHIN, REPRODUCED_GAIN),
        ("near", NEAR_WITHIN, NEAR_GAIN),
    )
    for verdict, band, times in bands:
        if abs(ours / paper - 1) <= band and _gains_within(1 - ours, 1 - paper, times):
            return verdict
    return "not reproduced"


def _gains_within(ours: float, paper: float, times: float) -> bool:
    return ours == paper or (ours * paper > 0 and abs(paper) / times <= abs(ours) <= abs(paper) * times)


def least_possible(row: Row) -> float:
    """Returns the seconds of one device's work shared out evenly: no placement's step is shorter."""
    return row.outcomes["single"].seconds / row.setting.devices


def _table_3(rows: Sequence[Row]) -> Iterator[Claim]:
    for name, row in {row.setting.model: row for row in rows}.items():
        theirs = MODELS[name].operators
        verdict = within(row.operators, theirs)
        reason = "" if verdict == "reproduced" else "TF-Slim's graphs have constants, summaries, queues, initializers"
        yield Claim("table 3", f"{name}: operators", f"{theirs:,}", f"{row.operators:,}", verdict, reason)


def _single(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields one device's steps over data parallelism's as one figure, of which the worst verdict counts."""
    ratios = {
        str(row.setting): (theirs, row.over("single"))
        for row in rows
        if row.setting.dockers == 1
        and (paper := TABLE_5.get((row.setting.model, row.setting.devices))) is not None
        and (theirs := paper.over("single")) is not None
    }
    if not ratios:
        return
    verdicts = [within_in_steps(ours, theirs) for theirs, ours in ratios.values()]
    worst = max(verdicts, key=OF_THE_PAPER.index)
    alike = verdicts.count("reproduced") + verdicts.count("near")
    their_ratios, our_ratios = ([pair[number] for pair in ratios.values()] for number in (0, 1))
    yield Claim(
        "table 5, steps over DP",
        f"one device's step over DP's, in {len(ratios)} rows",
        f"{min(their_ratios):.2f} to {max(their_ratios):.2f}",
        f"{min(our_ratios):.2f} to {max(our_ratios):.2f}",
        worst,
        f"in {alike} of {len(ratios)} rows within 25 %; in most rows of the paper several devices take longer than one",
    )


def _table_5(row: Row) -> Iterator[_Figure]:
    paper = _row_of_table_5(row)
    if paper is None:
        return
    papers = [(NAMES[what], what, paper.over(what)) for what in ("fast_t", "mp_dps", "fd_dps")]
    papers += [("FD-DPS (table 7)", "fd_dps", ratio) for ratio in _other_ratio(row, paper)]
    for whose, what, theirs in papers:
        if theirs is not None:
            ours = row.over(what)
            verdict = _of_the_strategy(within_in_steps(ours, theirs), row, what)
            if what == "fd_dps":  # Its improvement rounds aren't in the paper.
                verdict = _at_most_otherwise(verdict)
            reason = "" if verdict == "reproduced" else _why_ratio(row, what, theirs)
            name = f"{row.setting}: {{}}'s step over DP's"
            claim = Claim("table 5, steps over DP", name, f"{theirs:.2f}", f"{ours:.2f}", verdict, reason)
            steps = row.outcomes[row.unit].seconds, row.outcomes[what].seconds
            yield _Figure(row.setting, claim, whose, steps)
    for than in ("fast_t", "mp_dps"):
        yield _margin("table 5, margins", row, "fd_dps", than, paper.faster(than))


def _other_ratio(row: Row, paper: PaperRow) -> list[float]:
    """Returns FD-DPS's step of table 7 over data parallelism's, where that isn't table 5's."""
    seconds = TABLE_7[row.setting.model][1]
    if row.setting.devices != 4 or paper.data_parallel is None or seconds == paper.fd_dps:
        return []
    return [seconds / paper.data_parallel]


def better_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of table 5 in which FD-DPS's step, in units of data parallelism's, is below the paper's."""
    better = []
    for row in rows:
        paper = _row_of_table_5(row)
        theirs = None if paper is None else paper.over("fd_dps")
        if theirs is not None and sign(row.over("fd_dps"), theirs) > 0:
            better.append(row)
    return better


def _row_of_table_5(row: Row) -> PaperRow | None:
    return TABLE_5.get((row.setting.model, row.setting.devices)) if row.setting.dockers == 1 else None


def _once(figures: Sequence[_Figure]) -> Iterator[Claim]:
    """Joins the figures that stand against one number of ours, in whichever tables: the worst verdict counts, once.

    Numbers of a row are one if they are written alike, and computed from steps of which neither differs by `SAME_STEP`.
    """
    alike: list[list[_Figure]] = []
    for figure in figures:
        same = next((some for some in alike if all(_is_same(one, figure) for one in some)), None)
        if same is None:
            alike.append([figure])
        else:
            same.append(figure)
    for some in alike:
        worst = max((figure.claim for figure in some), key=lambda claim: OF_THE_PAPER.index(claim.verdict))
        names: dict[str, list[str]] = {}
        for figure in some:
            names.setdefault(figure.claim.name, []).append(figure.whose)
        name = "; ".join(text.format(_and(whose)) for text, whose in names.items())
        papers = "; ".join(figure.claim.paper for figure in some)
        yield dataclasses.replace(worst, part=some[0].claim.part, name=name, paper=papers)


def _is_same(one: _Figure, other: _Figure) -> bool:
    pairs = zip(one.seconds, other.seconds, strict=True)
    same_text = (one.setting, one.claim.ours) == (other.setting, other.claim.ours)
    return same_text and all(abs(a - b) < SAME_STEP * max(a, b) for a, b in pairs)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _out_of_memory(row: Row) -> Iterator[Claim]:
    """Yields that data parallelism is OOM in the paper. Of one device it was fitted, see `operator_text`."""
    paper = _row_of_table_5(row)
    if paper is None or paper.data_parallel is not None:
        return
    ours = row.outcomes["data_parallel"]
    needs = f"{ours.peak_bytes / 1e9:.1f} of {MEMORY_BYTES / 1e9:.1f} GB"
    yield Claim(
        "table 5, OOM",
        f"{row.setting}: {NAMES['data_parallel']} needs more memory than there is",
        "OOM",
        f"{'fits' if ours.fits else 'OOM'} ({needs})",
        "not reproduced" if ours.fits else "reproduced",
        "each device has its share of the batch; it would be as full as one device with all of it" if ours.fits else "",
    )


def is_graph(row: Row, what: str) -> bool:
    """Returns whether a strategy's step is that of data parallelism's graph, up to `SAME_STEP`."""
    ratio = row.outcomes[what].seconds / row.outcomes["split_by_batch"].seconds
    return what != "split_by_batch" and abs(ratio - 1) < SAME_STEP


def went_back(row: Row, what: str) -> bool:
    """Returns whether a strategy keeps data parallelism's graph, with which it begins."""
    return what != "split_by_batch" and row.outcomes[what].seconds == row.outcomes["split_by_batch"].seconds


def _of_the_strategy(verdict: Verdict, row: Row, *names: str) -> Verdict:
    """Returns the verdict on a figure of strategies.

    It is at most reproduced otherwise if the step of one is that of data parallelism's graph.
    """
    if not any(is_graph(row, name) for name in names):
        return verdict
    return _at_most_otherwise(verdict)


def _at_most_otherwise(verdict: Verdict) -> Verdict:
    less: dict[Verdict, Verdict] = {"reproduced": "reproduced otherwise", "near": "not reproduced"}
    return less.get(verdict, verdict)


def _why_ratio(row: Row, what: str, theirs: float) -> str:
    steps = {name: f"{outcome.seconds * 1e3:.0f} ms" for name, outcome in row.outcomes.items()}
    if what == "fd_dps":
        if is_graph(row, what):
            return f"{steps['fd_dps']} are within {SAME_STEP:.0%} of DP's graph"
        rounds = with_rounds_of("fast_t")
        return (
            f"with rounds that aren't in the paper, with which FastT takes {steps[rounds]}; {steps['fd_dps']} where "
            f"even shares of one device's work take {least_possible(row) * 1e3:.0f} ms"
        )
    kept = (
        f"it goes back to DP's graph ({steps['split_by_batch']})" if went_back(row, what) else f"it takes {steps[what]}"
    )
    return f"{kept}; DPOS alone takes {steps['dpos']}" if what == "fast_t" else kept


def margin(row: Row, what: str, than: str) -> float:
    """Returns by what share a strategy's step is shorter than another's, opponents with FD-DPS's rounds, too."""
    return row.faster(_of_equals(than), _of_equals(what))


def _of_equals(name: str) -> str:
    """Returns the strategy that margins are between: opponents have FD-DPS's rounds."""
    return with_rounds_of(name) if name in OPPONENTS else name


def _margin(part: str, row: Row, what: str, than: str, theirs: float) -> _Figure:
    """Returns the figure of a margin. Rounds are ours: what an opponent is without them says whose its step is."""
    ours = margin(row, what, than)
    verdict = _of_the_strategy(within_in_steps(1 - ours, 1 - theirs), row, what, than)
    reasons = []
    if verdict != "reproduced":
        opponent = _of_equals(than)
        if verdict == "not reproduced" and ours > theirs * NEAR_GAIN:
            reasons.append(_too_large(row, opponent))
        reasons += [
            f"the step of {NAMES[name]}{', before rounds,' if name in OPPONENTS else ''} is that of DP's graph"
            for name in (what, than)
            if is_graph(row, name)
        ]
        most = 1 - least_possible(row) / row.outcomes[opponent].seconds
        reasons.append(f"even shares of one device's work would be {most:.1%} faster")
    name = f"{row.setting}: {NAMES[what]} faster than {{}}"
    claim = Claim(part, name, f"{theirs:.2%}", f"{ours:.1%}", verdict, "; ".join(reasons))
    longer, shorter = (row.outcomes[_of_equals(one)].seconds for one in (than, what))
    return _Figure(row.setting, claim, NAMES[than], (longer, shorter))


def _too_large(row: Row, than: str) -> str:
    over = row.over(than)
    return f"too large: {'weak opponent, ' if over > 1 else ''}it takes {over:.2f} of DP's step"


def is_split(operator: Operator) -> bool:
    """Returns whether every node of an operator is split."""
    return all(split is not None for split in operator.splits)


def _table_6(row: Row) -> Iterator[Claim]:
    """Yields the decisions as one figure: to split everything would agree with each one that the paper splits."""
    if not row.lines or row.setting.devices != 4 or row.setting.dockers > 1:
        return
    theirs = [name for name, (_, _, split) in TABLE_6.items() if split]
    ours, alone = (
        [name for name in TABLE_6 if is_split(lines[name])] for lines in (row.lines, row.lines_alone or row.lines)
    )
    same = ours == theirs
    reason = f"light ones go with their neighbours; one operator at a time {_listed(alone)}"
    yield Claim(
        "table 6",
        f"{row.setting}: of {len(TABLE_6)} operators are split",
        _listed(theirs),
        _listed(ours),
        "reproduced" if same else "not reproduced",
        "" if same else reason,
    )


def _listed(names: Sequence[str]) -> str:
    return "all" if len(names) == len(TABLE_6) else ", ".join(names) or "none"


def _table_7(row: Row) -> Iterator[_Figure]:
    """Yields what splits gain over D-DPS(-F).

    What splits of one operator at a time gain over one copy would be a second try at the same figures of the paper,
    over another baseline, which is weak: the document has it in a table, and it isn't claimed.
    """
    if row.setting.devices == 4 and row.setting.dockers == 1:
        yield _margin("table 7", row, "fd_dps", "d_dps", TABLE_7[row.setting.model][2])


def sign(ours: float, theirs: float) -> int:
    """Returns 1 if a step of ours is shorter than another by more than `AS_FAST` of that, -1 if longer, else 0."""
    return (ours < theirs * (1 - AS_FAST)) - (ours > theirs * (1 + AS_FAST))


def _must_hold(row: Row, search_seconds: float) -> Iterator[Claim]:
    ours = row.outcomes["fd_dps"]
    for than in ("data_parallel", "own_statistics"):
        theirs = row.outcomes[than]
        text = f"{ours.seconds * 1e3:.1f} ms, {theirs.seconds * 1e3:.1f} ms"
        slower = theirs.fits and sign(ours.seconds, theirs.seconds) < 0
        name = f"{row.setting}: FD-DPS not slower than {NAMES[than]}"
        reason = f"{-row.faster(than):.1%}" if slower else ""
        yield Claim("against DP", name, "", text, "slower" if slower else "holds", reason)
    peak = f"{ours.peak_bytes / 1e9:.1f} GB"
    yield Claim("must hold", f"{row.setting}: FD-DPS fits the devices' memory", "", peak, _holds(ours.fits))
    taken = ours.search_seconds
    name = f"{row.setting}: searched in {search_seconds:g} s of one core"
    yield Claim(
        "must hold", name, "", "yes" if taken <= search_seconds else f"{taken:.1f} s", _holds(taken <= search_seconds)
    )


def _holds(good: bool) -> Verdict:
    return "holds" if good else "FAILED"
