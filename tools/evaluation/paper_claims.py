"""Claims that an evaluation's figures hold, as FD-DPS's has them; those of DAPPLE's are in `paper_figures`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A claim that must hold.

    Attributes:
        name: text of the claim.
        paper: the paper's figure; empty if it has none.
        ours: our figure.
        holds: whether our figure is good enough, which decides this command's status.
        reproduced: whether it is the paper's figure, or better; None if the paper has none.
        reason: why it isn't reproduced.
        value: our figure as a number, the larger the better, if later results are held to it.
    """

    name: str
    paper: str
    ours: str
    holds: bool
    reproduced: bool | None = None
    reason: str = ""
    value: float | None = None

    @property
    def status(self) -> str:
        """Text of the status in the document."""
        if not self.holds:
            return "**FAILED**"
        return {True: "reproduced", False: "not reproduced", None: "holds"}[self.reproduced]
