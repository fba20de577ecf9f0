"""What differs between computed records of Out-Of-Order BackProp's evaluation and the stored ones."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dapple_tf.tools.evaluation.ooo_claims import OTHERWISE, Record, Records, claims
from dapple_tf.tools.evaluation.ooo_inputs import inputs
from dapple_tf.tools.evaluation.ooo_measured import measurements
from dapple_tf.tools.evaluation.ooo_report import MEASURED, bands, claim_records, document

DRIFT = 0.02
"""Fraction by which a number may differ from the stored one."""


def differences(records: Records, stored: Mapping[str, Any]) -> list[str]:
    """Returns what differs from the stored results: `changed_rows`, bands, the paper's numbers that are put in, claims.

    Of a claim its status, place and remark and the paper's number are compared as they are, our numbers within `DRIFT`.

    Args:
        records: computed records of all groups.
        stored: the contents of ooo.json.
    """
    texts = changed_rows(records, stored)
    groups = [name for name, rows in stored.items() if isinstance(rows, list) and name != "claims"]
    texts += [f"{group}: is stored, but wasn't computed" for group in groups if group not in records]
    for status, band in bands().items():
        if band != (other := stored.get("bands", {}).get(status)):
            texts.append(f"band of {status}: is {band}, stored {other}")
    before = stored.get("inputs", {})
    for name in dict.fromkeys((*(now := inputs()), *before)):
        texts += _changed_input(name, now.get(name, {}), before.get(name, {}))
    return [*texts, *_changed_claims(claim_records(claims(records)), stored.get("claims", []))]


def _changed_input(name: str, now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Returns which of a cluster's or a model's numbers aren't the stored ones: what the paper says doesn't drift."""
    return [
        f"{name}: {key} is {now.get(key)}, stored {then.get(key)}"
        for key in dict.fromkeys((*now, *then))
        if now.get(key) != then.get(key)
    ]


def changed_document(stored: Mapping[str, Any], directory: pathlib.Path) -> list[str]:
    """Returns whether ooo.md isn't what the stored results give.

    Args:
        stored: the contents of ooo.json.
        directory: folder of the document.
    """
    records = {name: rows for name, rows in stored.items() if isinstance(rows, list) and name != "claims"}
    text = document(records, claims(records), stored.get("sensitivity", {}), measurements(MEASURED))
    path = directory / "ooo.md"
    same = path.exists() and path.read_text(encoding="utf-8") == text
    return [] if same else [f"{path}: isn't what the stored results give"]


def changed_rows(records: Mapping[str, Sequence[Record]], stored: Mapping[str, Any]) -> list[str]:
    """Returns the numbers that differ from the stored ones by more than `DRIFT`.

    Args:
        records: computed records of some groups.
        stored: the contents of ooo.json.
    """
    texts = []
    for group, rows in records.items():
        before = stored.get(group, [])
        if len(before) != len(rows):
            texts.append(f"{group}: {len(rows)} records, {len(before)} stored")
            continue
        for number, (row, other) in enumerate(zip(rows, before, strict=True)):
            texts += _changed(f"{group}, record {number}", row, other)
    return texts


def _changed_claims(now: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]) -> list[str]:
    texts = []
    computed, stored = ({str(claim["claim"]): claim for claim in some} for some in (now, then))
    for name in dict.fromkeys((*computed, *stored)):
        if name not in computed or name not in stored:
            texts.append(f"{name}: is {'stored' if name in stored else 'computed'} only")
            continue
        one, other = _flat(computed[name]), _flat(stored[name])
        texts += _changed(name, one, other)
    return texts


def _flat(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a claim with its numbers under other settings; what its remark says of one of them is left out."""
    flat = {key: value for key, value in claim.items() if key != "others"}
    if claim["status"] == OTHERWISE:
        del flat["remark"]
    return flat | {f"ours, {setting}": number for setting, number in claim["others"].items()}


def _changed(name: str, row: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {key} is {row.get(key)}, stored {other.get(key)}"
        for key in dict.fromkeys((*row, *other))
        if _differ(row.get(key), other.get(key))
    ]


def _differ(new: str | float | int | None, old: str | float | int | None) -> bool:
    if isinstance(new, float) and isinstance(old, int | float):
        return abs(new - old) > DRIFT * max(abs(old), 1e-9)
    return new != old
