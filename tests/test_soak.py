"""Training with faults of all kinds one after the other, for some minutes; `make faults` does so for hours."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest
from conftest import require_namespaces

from dapple_tf.tools.evaluation.soak import Usage, grown, quarters

ROOT = pathlib.Path(__file__).parents[1]


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


@pytest.mark.thorough
@pytest.mark.slow
def test_some_minutes_of_faults_change_no_bit() -> None:
    require_namespaces()
    command = [sys.executable, "-m", "tools.evaluation.soak", "--minutes=3", "--seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights, slots, losses and predictions are the same bits as undisturbed" in done.stdout
    assert "0 processes are left" in done.stdout
