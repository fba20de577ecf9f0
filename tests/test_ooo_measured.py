"""What was measured of Out-Of-Order BackProp, as a section of its document."""

from __future__ import annotations

import pathlib
from typing import Any

from dapple_tf.tools.evaluation.ooo_measured import measurements, section, spread

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def measured() -> dict[str, Any]:
    """Two policies in units of 10 ms, and two variants of data parallelism with a disturbed step."""
    rows = [
        {"schedule": "gpipe", "predicted": 0.30, "steps": [0.29, 0.31, 0.40]},
        {"schedule": "modulo", "predicted": 0.20, "steps": [0.155]},
    ]
    units = {"work": "units", "blocks": 8, "hosts": 2, "micro_batches": 1, "block_seconds": 0.01, "rows": rows}
    samples = {
        "compute": [(0.1, 0.0)],
        "wait_free": [(0.4, 0.0)] * 4 + [(9.0, 1.0)],
        "pieces": [(0.5, 0.0)],
        "first_0_carried_6": [(0.2, 0.0)],
        "first_7_carried_6": [(0.1, 0.0)],
        "first_4": [(0.72, 0.0), (0.8, 0.0), (1.0, 0.0)],
    }
    return {
        "slow_links_2_hosts": {"records": [{"work": "waits", "rows": []}]},
        "slow_links_2_hosts_units_8_1": {"records": [units]},
        "two_hosts": {"records": [{"model": "vgg", "noise": 0.1, "samples": samples}]},
    }


def test_steps_are_given_in_units_beside_their_prediction() -> None:
    text = section(measured())
    assert "| 8 | 2 | 1 | 31.0 (30.0) | 15.5 (20.0) | 2.00 |" in text
    assert "within 7% in 1\nof 2 steps and within 29.0% in all" in text


def test_spreads_are_those_of_the_undisturbed_steps() -> None:
    expected = "Of the steps of a variant the least is up to 10% below their median, the most up to 25% above it"
    assert spread(measured()["two_hosts"]["records"]) == expected
    assert expected in " ".join(section(measured()).split())


def test_two_hosts_says_the_spreads_that_were_measured() -> None:
    text = " ".join((RESULTS / "two_hosts.md").read_text(encoding="utf-8").split())
    assert spread(measurements(RESULTS)["two_hosts"]["records"]) in text


def test_variants_are_compared_with_wait_free_by_undisturbed_steps() -> None:
    text = section(measured())
    for line in (
        "| vgg | wait-free | 400 | 400 | 400 | 1.00 |",
        "| vgg | wait-free, pieces of one stage's backward | 500 | 500 | 500 | 0.80 |",
        "| vgg | prioritised, 6 updates carried | 200 | 200 | 200 | 2.00 |",
        "| vgg | reverse first-7, 6 updates carried | 100 | 100 | 100 | 4.00 |",
        "| vgg | reverse first-4 | 800 | 720 | 1000 | 0.50 |",
    ):
        assert line in text
    assert "compute" not in text.split("| model |")[1]
