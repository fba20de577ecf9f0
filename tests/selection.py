"""Which of many like cases `make test` runs; `make test-all` runs the others, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], step: int) -> list[Any]:
    """Parameters of a test: every ``step``-th case as it is, the others ``thorough``.

    Args:
        cases: what the test is parametrized with. Their order is to mix what they differ in: no period of ``step``.
        step: how many cases stand for one that `make test` runs.
    """
    return [case if number % step == 0 else thorough(case) for number, case in enumerate(cases)]


def one_of_each(cases: Iterable[Any], key: Callable[[Any], Hashable]) -> list[Any]:
    """Parameters of a test: the first case of each ``key`` as it is, the others ``thorough``."""
    met: set[Hashable] = set()
    parameters = []
    for case in cases:
        parameters.append(thorough(case) if key(case) in met else case)
        met.add(key(case))
    return parameters


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
