"""Which of many like cases `make test` runs; `make test-all` runs the others, too, `make test-share` some of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], step: int) -> list[Any]:
    """Parameters of a test: every ``step``-th case as it is, the others ``thorough``.

    Args:
        cases: what the test is parametrized with. Their order is to mix what they differ in: no period of ``step``.
        step: how many cases stand for one that `make test` runs.
    """
    return [case if number % step == 0 else thorough(case) for number, case in enumerate(cases)]


def thorough(case: Any) -> Any:
    """A parameter, or a tuple of several, that only `make test-all` takes."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)


def mark_many(items: Sequence[pytest.Item]) -> None:
    """Of the cases of a test marked ``few(n)`` all but n, evenly spread, become ``thorough``."""
    for _, group in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = [case for case in group if case.get_closest_marker("thorough") is None]
        if not cases or (mark := cases[0].get_closest_marker("few")) is None:
            continue
        (count,) = mark.args
        kept = {number * len(cases) // count for number in range(count)}
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.thorough)


def left_out(items: Sequence[pytest.Item], share: str) -> list[pytest.Item]:
    """Returns the thorough tests that a share of them doesn't have.

    Args:
        items: tests, in an order in which like ones are neighbours: each share has some of them.
        share: "2/3" is the second of three shares, which together have all.

    Raises:
        pytest.UsageError: there is no such share.
    """
    number, _, count = share.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share={share}: give the number of a share and how many there are, such as 2/3")
    thorough_ones = [item for item in items if item.get_closest_marker("thorough") is not None]
    return [item for place, item in enumerate(thorough_ones) if place % int(count) != int(number) - 1]
