"""How much time measuring may take, and how long its phases are likely to take on this machine.

A phase's time isn't known before it is over, but what phases take in proportion to one another hardly depends on the
model and the machine. So the phases that are over tell how long the others will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

PHASES = {"capture": 1.0, "cut": 3.5, "operators": 4.5, "layers": 40.0, "shared cores": 10.0}
"""Phase -> what it takes in proportion to capturing the model, steps themselves left out: medians on two cores."""


class TimeBudget:
    """Seconds that measuring may take.

        budget.begin("capture")     ...takes 1 s
        budget.begin("cut")         ...takes 4 s
        budget.expected("layers")   some 28 s

    Args:
        seconds: None is without end.
        afterwards: phases that come when layers have been measured one by one; there must be time for them, too.
        clock: what tells the time, in seconds.
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
        """Ends the phase that is under way, and begins another of `PHASES`."""
        self.end()
        self._phase, self._began = phase, self._clock()

    def end(self) -> None:
        """Ends the phase that is under way."""
        if self._phase:
            self._taken[self._phase] = self._clock() - self._began
        self._phase = ""

    @property
    def spent(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._start

    @property
    def left(self) -> float:
        """Seconds that are left; infinite without end."""
        return float("inf") if self.seconds is None else self.seconds - self.spent

    def expected(self, *phases: str) -> float:
        """Seconds that phases are likely to take, by those that are over: at least one must be."""
        done = sum(PHASES[phase] for phase in self._taken)
        return sum(self._taken.values()) * sum(PHASES[phase] for phase in phases) / done

    def allows(self, *phases: str, more: float = 0.0) -> bool:
        """Returns whether there is time for phases, and for so many seconds more."""
        return self.seconds is None or self.expected(*phases) + more <= self.left
