"""Changes that `make results-ooo` must notice: of the paper's numbers, bands and formulas, and of what is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.planner import plan as best_plan
from dapple_tf.simulation.cost import CostModel
from dapple_tf.tools.evaluation import ooo_claims, ooo_inputs, ooo_parallel, ooo_pipelines
from dapple_tf.tools.evaluation.ooo_claims import Claim, Record, Records
from dapple_tf.tools.evaluation.ooo_differences import differences
from dapple_tf.tools.evaluation.ooo_inputs import inputs
from dapple_tf.tools.evaluation.ooo_models import ETHERNET, FOUR
from dapple_tf.tools.evaluation.ooo_report import bands, claim_records, rounded
from dapple_tf.tools.evaluation.sensitivity import FACTOR, Change, longer_transfers, outcome, scaled

_FEW = (ooo_pipelines.FINE_TUNING,)
_ROWS: Mapping[str, tuple[str, Callable[[], Record | Sequence[Record]]]] = {
    "BERT-24, NVLink": ("fine_tuning", partial(ooo_pipelines.fine_tuning, "BERT-24", "NVLink", _FEW)),
    "BERT-24, Ethernet": ("fine_tuning", partial(ooo_pipelines.fine_tuning, "BERT-24", "Ethernet", _FEW)),
    "MobileNetV3, Pub-A, 16 GPUs": ("figure_10", partial(ooo_parallel.figure_10, "MobileNetV3", "Pub-A", 16)),
    "our plan, FFNN, Ethernet": ("ours", partial(ooo_pipelines.ours, "FFNN", "Ethernet")),
}
"""Row -> its group, and how it is computed."""
_NAMES = ("model", "network", "cluster", "GPUs", "samples", "setting", "traffic", "step")
"""Columns that tell the rows of a group apart."""


def other_number(name: str) -> AbstractContextManager[object]:
    """Makes the paper's number of a claim 3 % larger."""

    def changed(other: str, place: str, low: float, high: float, *args: Any, **options: Any) -> Claim:
        claim = Claim(other, place, low, high, *args, **options)
        return dataclasses.replace(claim, low=low * FACTOR, high=high * FACTOR) if other == name else claim

    return mock.patch.object(ooo_claims, "Claim", changed)


def other_band(status: str) -> AbstractContextManager[object]:
    """Makes the band of a status 3 % wider."""
    band, gain = ooo_claims.BANDS[status]
    return mock.patch.dict(ooo_claims.BANDS, {status: (band * FACTOR, gain)})


def _other_input(name: str, field: str, factor: float) -> AbstractContextManager[object]:
    before = getattr(ooo_inputs, name)
    after = dataclasses.replace(before, **{field: getattr(before, field) * factor})
    return mock.patch.object(ooo_inputs, name, after)


def _slower_ethernet() -> AbstractContextManager[object]:
    slower = dataclasses.replace(FOUR["Ethernet"], outside=ETHERNET / FACTOR)
    return mock.patch.dict(FOUR, Ethernet=slower)


def _uneven_blocks() -> AbstractContextManager[object]:
    def changed(profile: Profile, count: int) -> list[ooo_pipelines.Layout]:
        return [ooo_pipelines.layout(profile, (8, 6, 6, 4), range(count))]

    return mock.patch.object(ooo_pipelines, "straight", changed)


def _one_policy() -> AbstractContextManager[object]:
    def changed(*args: Any, **options: Any) -> Plan:
        return best_plan(*args, **{**options, "schedule": "gpipe"})

    return mock.patch.object(ooo_pipelines, "best_plan", changed)


CHANGES = (
    Change(
        "the paper's 1.15x of OOO-Pipe1 over GPipe is 3 % more",
        (),
        lambda: other_number("BERT-24, OOO-Pipe1 over GPipe"),
    ),
    Change(
        "the paper's 1.89x over Horovod, which isn't reproduced, is 3 % more",
        (),
        lambda: other_number("Titan XP, ResNet-101 on 8 GPUs, OOO-BytePS over Horovod"),
    ),
    Change("the band of what is reproduced is 3 % wider", (), lambda: other_band(ooo_claims.REPRODUCED)),
    Change("the band of what is near is 3 % wider", (), lambda: other_band(ooo_claims.NEAR)),
    Change("Pub-B's Ethernet is 3 % slower", (), lambda: _other_input("PUB_B", "outside", 1 / FACTOR)),
    Change("GPT-3's vocabulary is 3 % larger", (), lambda: _other_input("GPT_3_MEDIUM", "words", FACTOR)),
    Change("tasks take 3 % longer", ("BERT-24, NVLink",), lambda: scaled(CostModel, "whole_seconds")),
    Change("transfers take 3 % longer", ("BERT-24, Ethernet",), longer_transfers),
    Change("residuals take 3 % more memory", ("BERT-24, NVLink",), lambda: scaled(CostModel, "residual_bytes")),
    Change(
        "all-reduces take 3 % longer",
        ("MobileNetV3, Pub-A, 16 GPUs",),
        lambda: scaled(CostModel, "reduction_seconds"),
    ),
    Change("figure 11's Ethernet is 3 % slower", ("BERT-24, Ethernet",), _slower_ethernet),
    Change("GPipe and OOO-Pipe1 have 8, 6, 6 and 4 blocks on their GPUs", ("BERT-24, NVLink",), _uneven_blocks),
    Change("our planner is asked for GPipe's schedule only", ("our plan, FFNN, Ethernet",), _one_policy),
)


def tried(records: Records, changes: Sequence[Change] = CHANGES) -> dict[str, dict[str, Any]]:
    """Returns change -> what it does to results.

    Args:
        records: all records, without any change.
        changes: the changes.
    """
    stored = {**records, "bands": bands(), "inputs": inputs(), "claims": claim_records(ooo_claims.claims(records))}
    return {change.text: outcome(change, _said(change, records, stored)) for change in changes}


def _said(change: Change, records: Records, stored: Mapping[str, Any]) -> list[str]:
    with change.make():
        fresh = dict(records)
        for part in change.parts:
            group, compute = _ROWS[part]
            some = compute()
            (rows,) = rounded({group: [some] if isinstance(some, Mapping) else some}).values()
            by_names = {_names(row): row for row in rows}
            fresh[group] = [by_names.get(_names(row), row) for row in fresh[group]]
        return differences(fresh, stored)


def _names(row: Record) -> tuple[object, ...]:
    return tuple(row.get(name) for name in _NAMES)
