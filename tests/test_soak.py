"""Growth of processes while training goes on through faults: `make faults` trains so for hours."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dapple_tf.tools.evaluation.soak import Usage, grown, quarters


def usages(sizes: Sequence[int], process: str = "client") -> list[Usage]:
    return [Usage(process, 10.0 * (time + 1), size, 5, 7) for time, size in enumerate(sizes)]


def test_quarters_are_of_the_time() -> None:
    assert quarters(usages([1, 3, 10, 12, 20, 22, 30, 40]), "client", "bytes") == [2, 10, 20, 30]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([50, 80, 100, 100, 101, 103, 104, 105], []),
        ([50, 80, 100, 100, 101, 103, 106, 108], ["bytes of client: 100 in the second quarter, 106 in the last"]),
    ],
)
def test_growth_is_told_beyond_a_twentieth(sizes: Sequence[int], text: list[str]) -> None:
    serving = usages([1, 2, 3, 4, 5, 6, 7, 8], "serving 0")
    assert grown([*usages(sizes), *serving]) == text
