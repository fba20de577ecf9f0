"""Shares of the thorough tests have each of them once."""

from __future__ import annotations

import types
from typing import Any

import pytest
from selection import left_out


def items() -> list[Any]:
    def item(number: int, thorough: bool) -> Any:
        return types.SimpleNamespace(number=number, get_closest_marker=lambda name: name if thorough else None)

    return [item(number, number % 3 != 0) for number in range(12)]


def test_shares_have_all_thorough_tests_between_them() -> None:
    every = items()
    own = [{item.number for item in every} - {item.number for item in left_out(every, f"{k}/3")} for k in (1, 2, 3)]
    assert own == [{0, 3, 6, 9, 1, 5, 10}, {0, 3, 6, 9, 2, 7, 11}, {0, 3, 6, 9, 4, 8}]
    assert left_out(every, "1/1") == []


@pytest.mark.parametrize("share", ["0/3", "4/3", "1", "x/3", "1/0", ""])
def test_shares_that_are_none(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="give the number of a share and how many there are"):
        left_out(items(), share)
