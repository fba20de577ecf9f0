"""The bands in which our figures count as a paper's, and what a claim is: one figure, or a sentence, and its verdict.

Bands are on both sides: within 10 % a figure is reproduced, within 25 % near, else not reproduced, also where ours is
the better one. A ratio says how far from 1 something is: there the gain over 1 must be the paper's, too, within a
factor of two or of three, or 1.04 would reproduce 1.15. What follows from a calibration by the same table is shown as
fitted, and counted nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]
"""Part -> its record."""

REPRODUCED, NEAR, OTHERWISE, NOT = "reproduced", "near", "reproduced otherwise", "not reproduced"
FITTED, HOLDS, FAILS = "fitted", "holds", "doesn't hold"
COUNTED = (REPRODUCED, NEAR, OTHERWISE, NOT)
"""Verdicts about the paper's figures."""

MORE, MOST = 2.0, 3.0
"""Factors between our gain over 1 and the paper's, at most, for `REPRODUCED` and for `NEAR`."""


@dataclass(frozen=True)
class Band:
    """How far a figure may be from the paper's, as a fraction of that, above as well as below.

    Attributes:
        reproduced: for `REPRODUCED`.
        near: for `NEAR`.
    """

    reproduced: float = 0.10
    near: float = 0.25

    def verdict(self, paper: float, ours: float, *, ratio: bool = False) -> str:
        """Returns the verdict about a figure; of a ratio other than 1 the gain over 1 counts, too, and its sign.

        >>> Band().verdict(2.0, 2.2), Band().verdict(2.0, 1.6), Band().verdict(2.0, 4.0)
        ('reproduced', 'near', 'not reproduced')
        >>> Band().verdict(1.15, 1.04), Band().verdict(1.15, 1.04, ratio=True), Band().verdict(1.02, 0.99, ratio=True)
        ('reproduced', 'not reproduced', 'not reproduced')
        """
        off = abs(ours / paper - 1) - 1e-12
        for verdict, band, factor in ((REPRODUCED, self.reproduced, MORE), (NEAR, self.near, MOST)):
            if off <= band and (not ratio or _same_gain(paper, ours, factor)):
                return verdict
        return NOT

    def text(self, *, ratio: bool = False) -> str:
        """Returns the bands as they stand in the document."""
        return f"{100 * self.reproduced:.4g}%, {100 * self.near:.4g}%" + (
            f"; gain {MORE:g}x, {MOST:g}x" if ratio else ""
        )


def _same_gain(paper: float, ours: float, factor: float) -> bool:
    return paper == 1 or 1 / factor - 1e-12 <= (ours - 1) / (paper - 1) <= factor + 1e-12


USUAL = Band()
GAIN = Band(0.02, 0.05)
"""For Table 3, where 10 % is all that P_B gains in one of four models: there, no gain isn't the same gain."""


@dataclass(frozen=True)
class Claim:
    """A figure of the paper, or a claim of its text, and what comes of it.

    Attributes:
        name: table or figure, and what.
        paper: the paper's, as text.
        ours: ours, as text.
        verdict: see above.
        why: why it isn't reproduced, or how otherwise.
        band: the bands; empty for claims without a number.
    """

    name: str
    paper: str
    ours: str
    verdict: str
    why: str = ""
    band: str = ""


def number(
    name: str,
    paper: float,
    ours: float,
    unit: str = "x",
    why: str = "",
    *,
    band: Band = USUAL,
    fitted: str = "",
    otherwise: tuple[str, float] | None = None,
    shown: Mapping[str, float] | None = None,
) -> Claim:
    """Returns the claim of a number.

    Args:
        name: of what.
        paper: the paper's.
        ours: ours.
        unit: unit of both; ``x`` for ratios, ``%`` for fractions.
        why: the reason if it isn't reproduced.
        band: the bands.
        fitted: what was fitted to it; then it isn't counted.
        otherwise: the one other setting that counts if it is within the first band there, and ours in this setting.
        shown: other settings, which never count.
    """
    ratio = unit == "x"

    def text(value: float) -> str:
        return f"{value:.1%}" if unit == "%" else f"{value:.0f}" if unit == "layers" else f"{value:.4g}{unit}"

    verdict = FITTED if fitted else band.verdict(paper, ours, ratio=ratio)
    texts = [text(ours)]
    if verdict in (NEAR, NOT):
        if otherwise is not None:
            setting, value = otherwise
            texts.append(f"{text(value)} {setting}")
            if band.verdict(paper, value, ratio=ratio) == REPRODUCED:
                verdict, why = OTHERWISE, f"{setting}; {why}".removesuffix("; ")
        texts += [f"{text(value)} {setting}" for setting, value in (shown or {}).items()]
    why = fitted or ("" if verdict == REPRODUCED else why)
    shown_paper = text(paper) if unit == "%" else f"{paper:.4g}" + ("" if unit == "layers" else unit)
    return Claim(name, shown_paper, "; ".join(texts), verdict, why, band.text(ratio=ratio))


def joined(name: str, parts: Sequence[tuple[str, Claim]]) -> Claim:
    """Returns one claim of several that rest on one number, of ours or the paper's: the worst verdict counts, once.

    Args:
        name: of all.
        parts: (of what, its claim), at least one; the bands are those of the first of the worst.
    """
    worst = max((claim for _, claim in parts), key=lambda claim: COUNTED.index(claim.verdict))
    paper = "; ".join(f"{what} {claim.paper}" for what, claim in parts)
    ours = "; ".join(f"{what} {claim.ours}" for what, claim in parts)
    return Claim(name, paper, ours, worst.verdict, worst.why, worst.band)


def statement(name: str, paper: str, ours: str, holds: bool, why: str = "") -> Claim:
    """Returns a claim of the paper's text that has no number."""
    return Claim(name, paper, ours, REPRODUCED if holds else NOT, "" if holds else why)


def check(name: str, ours: str, holds: bool, why: str = "") -> Claim:
    """Returns a claim about our planner, of which the paper says nothing."""
    return Claim(name, "", ours, HOLDS if holds else FAILS, "" if holds else why)


def counts(all_claims: Sequence[Claim]) -> dict[str, int]:
    """Returns verdict -> number of claims."""
    return {
        verdict: sum(claim.verdict == verdict for claim in all_claims) for verdict in (*COUNTED, FITTED, HOLDS, FAILS)
    }
