"""What a paper claims, what we get in each setting, and the verdict: one frame for all papers.

Bands are on both sides: within 10 % of the paper's figure ours is the same, within 25 % near, else better or worse. A
ratio says how far from 1 something is: there the gain over 1 must be the paper's, too, within a factor of two or of
three, or 1.04 would be the same as 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SAME, NEAR, BETTER, WORSE, UNTOLD = "same", "near", "ours better", "ours worse", "can't be told"
VERDICTS = (SAME, NEAR, BETTER, WORSE, UNTOLD)

TEXT, DATA, GPU, FITTED = "not in the text", "contradicts its own data", "needs a GPU", "fitted to it"
"""Why something can't be told."""

MORE, MOST = 2.0, 3.0
"""Factors between our gain over 1 and the paper's, at most, for `SAME` and for `NEAR`."""


@dataclass(frozen=True)
class Band:
    """How far a figure may be from the paper's, as a fraction of that, above as well as below.

    Attributes:
        same: for `SAME`.
        near: for `NEAR`.
    """

    same: float = 0.10
    near: float = 0.25

    def verdict(self, paper: float, ours: float, *, ratio: bool = False) -> str | None:
        """Returns `SAME`, `NEAR` or None; of a ratio other than 1 the gain over 1 counts, too, and its sign.

        >>> Band().verdict(2.0, 2.2), Band().verdict(2.0, 1.6), Band().verdict(2.0, 4.0)
        ('same', 'near', None)
        >>> Band().verdict(1.15, 1.04), Band().verdict(1.15, 1.04, ratio=True), Band().verdict(1.02, 0.99, ratio=True)
        ('same', None, None)
        """
        off = abs(ours / paper - 1) - 1e-12
        for verdict, band, factor in ((SAME, self.same, MORE), (NEAR, self.near, MOST)):
            if off <= band and (not ratio or _same_gain(paper, ours, factor)):
                return verdict
        return None


def _same_gain(paper: float, ours: float, factor: float) -> bool:
    return paper == 1 or 1 / factor - 1e-12 <= (ours - 1) / (paper - 1) <= factor + 1e-12


USUAL = Band()


@dataclass(frozen=True)
class Judged:
    """A figure that has its own rule, such as a plan.

    Attributes:
        text: as it is shown.
        verdict: what comes of it.
    """

    text: str
    verdict: str


Value = float | bool | str | Judged | None
"""A figure, whether a sentence holds, a plan, or a judged one; None where a setting doesn't apply."""


@dataclass(frozen=True)
class Claim:
    """A figure of the paper, or a claim of its text, and ours.

    Attributes:
        name: table or figure, and what.
        paper: the paper's; the ends of a range, of which the nearest figure counts; a text for a sentence or a plan.
        ours: setting -> ours, the paper's own setting first.
        unit: unit of both; ``x`` for ratios, ``%`` for fractions.
        band: the bands.
        why: why it isn't the same.
        untold: why it can't be told where ours isn't within the bands; empty if it can.
        less: whether less is better.
        fitted: whether ours depends on a guess or was fitted to the figure, and can't be told whatever it is.
    """

    name: str
    paper: float | tuple[float, float] | str
    ours: Mapping[str, Value] = field(default_factory=dict)
    unit: str = "x"
    band: Band = USUAL
    why: str = ""
    untold: str = ""
    less: bool = False
    fitted: bool = False

    def verdict(self, setting: str) -> str | None:
        """Returns the verdict in a setting; None where it doesn't apply."""
        ours = self.ours.get(setting)
        if ours is None:
            return None
        if self.fitted:
            return UNTOLD
        if isinstance(ours, Judged):
            return ours.verdict
        if isinstance(self.paper, str) or isinstance(ours, bool | str):
            return SAME if ours is True or ours == self.paper else WORSE
        paper = self.nearest(ours)
        within = self.band.verdict(paper, ours, ratio=self.unit == "x")
        if within is not None:
            return within
        return UNTOLD if self.untold else BETTER if (ours > paper) != self.less else WORSE

    def nearest(self, ours: float) -> float:
        """Returns the paper's figure; of a range the nearest to ours."""
        least, most = self.paper if isinstance(self.paper, tuple) else (float(self.paper), float(self.paper))
        return min(max(ours, least), most)

    def text(self, value: Value | tuple[float, float]) -> str:
        """Returns a figure of this claim as it is shown."""
        if isinstance(value, tuple):
            return " to ".join(map(self.text, value))
        if isinstance(value, Judged):
            return value.text
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, bool):
            return {None: "-", True: "yes", False: "no"}[value]
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return f"{value:.1%}" if self.unit == "%" else f"{number}{'' if self.unit == 'x' else self.unit}"

    def stored(self) -> dict[str, object]:
        """Returns what results are held to, besides their numbers."""
        verdicts = {setting: verdict for setting in self.ours if (verdict := self.verdict(setting)) is not None}
        gain = f"; gain {MORE:g}x, {MOST:g}x" if self.unit == "x" else ""
        paper = f"{self.paper:.6g}" if isinstance(self.paper, float | int) else str(self.paper)
        return {"paper": paper, "band": f"{self.band.same:.4g}, {self.band.near:.4g}{gain}", "verdicts": verdicts}


def counts(claims: Sequence[Claim], setting: str) -> dict[str, int]:
    """Returns verdict -> number of claims in a setting, unchanged ones as in the paper's."""
    verdicts = [claim.verdict(setting) or claim.verdict(next(iter(claim.ours))) for claim in claims]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}
