"""The time that measuring may take, and the likely duration of its phases on this machine.

A phase's time is known only afterwards, but the proportions of phases hardly depend on the
model and the machine. So finished phases predict the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

PHASES = {"capture": 1.0, "cut": 3.5, "operators": 4.5, "layers": 40.0, "shared cores": 10.0}
"""Phase -> its time in proportion to capturing the model, without the steps themselves: medians on two cores."""


class TimeBudget:
    """Seconds that measuring may take.

        budget.begin("capture")     ...takes 1 s
        budget.begin("cut")         ...takes 4 s
        budget.expected("layers")   some 28 s

    Args:
        seconds: the limit; None for no limit.
        afterwards: phases that follow when layers have been measured one by one; their time is reserved, too.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        seconds: float | None,
        afterwards: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.afterwards = seconds, tuple(afterwards)
        self._clock = clock
        self._start = clock()
        self._phase = ""
        self._began = self._start
        self._taken: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """Ends the current phase, and begins another of `PHASES`."""
        self.end()
        self._phase, self._began = phase, self._clock()

    def end(self) -> None:
        """Ends the current phase."""
        if self._phase:
            self._taken[self._phase] = self._clock() - self._began
        self._phase = ""

    @property
    def spent(self) -> float:
        """Seconds since the budget was made."""
        return self._clock() - self._start

    @property
    def left(self) -> float:
        """Remaining seconds; infinite without a limit."""
        return float("inf") if self.seconds is None else self.seconds - self.spent

    def expected(self, *phases: str) -> float:
        """Returns the likely seconds of phases, predicted from the finished ones, of which there must be one."""
        done = sum(PHASES[phase] for phase in self._taken)
        return sum(self._taken.values()) * sum(PHASES[phase] for phase in phases) / done

    def allows(self, *phases: str, more: float = 0.0) -> bool:
        """Returns whether there is time for phases, and for ``more`` seconds."""
        return self.seconds is None or self.expected(*phases) + more <= self.left
