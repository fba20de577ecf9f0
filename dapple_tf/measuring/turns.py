"""Measuring in turns, since a machine's speed drifts, and the time that it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

_Result = TypeVar("_Result")

_WARM_UP = 2
"""Number of rounds that don't count: TensorFlow optimizes graphs in the first, allocators settle in the second."""
_FEWEST_ROUNDS, _LEAST_ROUNDS, _MOST_ROUNDS = 2, 5, 25
"""Number of rounds that count: between the two last numbers; at least the first, if no time is left."""


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


def in_turns(
    runs: Sequence[Callable[[], _Result]],
    rounds: int | None = None,
    *,
    seconds: float = 10.0,
    budget: TimeBudget | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> list[list[_Result]]:
    """Runs each of some functions once in every round; returns the results of each, but for the warm-up.

    Args:
        runs: the functions.
        rounds: number of rounds; None for as many as fit into ``seconds``.
        seconds: see ``rounds``.
        budget: the remaining time, after which no more rounds than necessary begin; None for no limit.
        say: called with the current work.
    """
    budget = TimeBudget(None) if budget is None else budget
    cost = 0.0
    for number in range(_WARM_UP):
        say(f"warming up, round {number + 1} of {_WARM_UP}")
        start = time.perf_counter()
        for run in runs:
            run()
        cost = max(1e-6, time.perf_counter() - start)
    count = rounds or int(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, min(seconds, budget.left) / cost)))
    results: list[list[_Result]] = [[] for _ in runs]
    for number in range(count):
        if rounds is None and number >= _FEWEST_ROUNDS and budget.left < cost:
            break
        say(f"measuring, round {number + 1} of {count}")
        for run, own in zip(runs, results, strict=True):
            own.append(run())
    return results


def in_caches(run: Callable[[], _Result]) -> Callable[[], _Result]:
    """Returns a function that runs another twice and returns the second result.

    Training repeats one step, and finds its own data in the caches.
    """

    def twice() -> _Result:
        run()
        return run()

    return twice
