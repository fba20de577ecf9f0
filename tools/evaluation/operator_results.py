"""What is stored of FD-DPS's experiments, and what differs from it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dapple_tf.tools.evaluation.operator_claims import Claim, bands, claims_of
from dapple_tf.tools.evaluation.operator_experiments import Operator, Row, from_record, inputs, to_record
from dapple_tf.tools.evaluation.operator_report import Outcomes, document
from dapple_tf.tools.evaluation.operator_sweep import Towers
from graph_passes.analysis.split_rules import Split

MOST_CHANGED = 0.02
"""Share by which a recomputed step may differ from the stored one."""


class Stored(NamedTuple):
    """The contents of fd_dps.json.

    Attributes:
        rows: the rows.
        claims: what is claimed of them.
        bands: limits of verdicts, `operator_claims.bands`.
        outcomes: what comes of changes that must be noticed.
        sweep: the steps of `operator_sweep`.
        inputs: what is put in, `operator_experiments.inputs`.
    """

    rows: list[Row]
    claims: list[Claim]
    bands: Mapping[str, float]
    outcomes: Outcomes
    sweep: list[Towers]
    inputs: Mapping[str, Mapping[str, Any]]


def write(
    rows: Sequence[Row],
    claims: Sequence[Claim],
    outcomes: Outcomes,
    sweep: Sequence[Towers],
    directory: pathlib.Path,
) -> None:
    """Writes ``fd_dps.md`` and ``fd_dps.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "bands": bands(),
        "inputs": inputs(),
        "rows": [to_record(row) for row in rows],
        "claims": [vars(claim) for claim in claims],
        "sensitivity": outcomes,
        "sweep": [one._asdict() for one in sweep],
    }
    (directory / "fd_dps.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (directory / "fd_dps.md").write_text(document(rows, claims, outcomes, sweep), encoding="utf-8")


def stored(path: pathlib.Path) -> Stored:
    """Reads what `write` has left."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [from_record(record) for record in content["rows"]]
    claims = [Claim(**claim) for claim in content["claims"]]
    sweep = [Towers(**one) for one in content.get("sweep", [])]
    bands_of, outcomes, inputs_of = (content.get(name, {}) for name in ("bands", "sensitivity", "inputs"))
    return Stored(rows, claims, bands_of, outcomes, sweep, inputs_of)


def differences(before: Stored, after: Sequence[Row], search_seconds: float) -> list[str]:
    """Compares recomputed rows with what is stored.

    Args:
        before: all that is stored.
        after: recomputed rows, all or some.
        search_seconds: the limit of searches.

    Returns:
        A line for each limit of a verdict and each claim about the stored rows that isn't the stored one, such as for
        another number of the paper; for each step, peak and line of table 6 that differs by more than `MOST_CHANGED`;
        for each decision to split, count, and use of devices that differs at all; and for each verdict that the
        recomputed rows change. Only times of searches aren't compared.
    """
    lines = [
        f"{name}: {before.bands.get(name)} is stored, {limit} now"
        for name, limit in bands().items()
        if limit != before.bands.get(name)
    ]
    now = _by_name(claims_of(before.rows, search_seconds))
    lines += _other_claims(_by_name(before.claims), now)
    known = {row.setting: row for row in before.rows}
    for row in after:
        old = known.get(row.setting)
        lines += [f"{row.setting}: isn't stored"] if old is None else _other_numbers(old, row)
    fresh = {row.setting: row for row in after}
    together = [fresh.pop(row.setting, row) for row in before.rows]
    lines += _other_verdicts(now, _by_name(claims_of([*together, *fresh.values()], search_seconds)))
    return lines


def changed_sweep(before: Stored, after: Sequence[Towers]) -> list[str]:
    """Returns the steps of `operator_sweep` that differ by more than `MOST_CHANGED`, and those computed or stored only.

    Args:
        before: all that is stored.
        after: recomputed steps.
    """
    known = {(one.samples, one.devices): one for one in before.sweep}
    lines = []
    for one in after:
        where = f"towers, {one.samples} samples, {one.devices} devices"
        old = known.pop((one.samples, one.devices), None)
        if old is None:
            lines.append(f"{where}: isn't stored")
            continue
        for name, was, now in zip(one._fields, old, one, strict=True):
            if abs(now - was) > MOST_CHANGED * abs(was):
                lines.append(f"{where}: {name}: {was:.6g} is stored, {now:.6g} computed")
    lines += [f"towers, {samples} samples, {devices} devices: is stored only" for samples, devices in known]
    return lines


def changed_inputs(before: Stored) -> list[str]:
    """Returns which numbers that are put in aren't the stored ones: they don't drift.

    Args:
        before: all that is stored.
    """
    now = inputs()
    return [
        f"{name}: {key} is {now.get(name, {}).get(key)}, stored {before.inputs.get(name, {}).get(key)}"
        for name in dict.fromkeys((*now, *before.inputs))
        for key in dict.fromkeys((*now.get(name, {}), *before.inputs.get(name, {})))
        if now.get(name, {}).get(key) != before.inputs.get(name, {}).get(key)
    ]


def changed_document(before: Stored, directory: pathlib.Path) -> list[str]:
    """Returns whether fd_dps.md isn't what the stored rows and claims give.

    Args:
        before: all that is stored.
        directory: folder of the document.
    """
    path = directory / "fd_dps.md"
    text = document(before.rows, before.claims, before.outcomes, before.sweep)
    same = path.exists() and path.read_text(encoding="utf-8") == text
    return [] if same else [f"{path}: isn't what the stored rows give"]


def _by_name(claims: Sequence[Claim]) -> dict[str, Claim]:
    return {claim.name: claim for claim in claims if "searched in" not in claim.name}


def _other_claims(was: Mapping[str, Claim], now: Mapping[str, Claim]) -> Iterator[str]:
    """Yields how claims about the same rows differ."""
    for name in dict.fromkeys((*was, *now)):
        if name not in was or name not in now:
            yield f"{name}: is {'stored' if name in was else 'claimed now'} only"
            continue
        before, after = vars(was[name]), vars(now[name])
        for key in before:
            if before[key] != after[key]:
                yield f"{name}: {key}: {before[key]} is stored, {after[key]} now"


def _other_verdicts(was: Mapping[str, Claim], now: Mapping[str, Claim]) -> Iterator[str]:
    """Yields how verdicts on recomputed rows differ from those on the stored ones."""
    for name in dict.fromkeys((*was, *now)):
        if name not in was or name not in now:  # one number of ours has become two, or the other way round
            yield f"{name}: is {'stored' if name in was else 'computed'} only"
        elif was[name].verdict != now[name].verdict:
            before_and_after = (f"{one[name].verdict} ({one[name].ours})" for one in (was, now))
            yield "{}: was {}, is {}".format(name, *before_and_after)


def _splits(lines: Mapping[str, Operator]) -> dict[str, tuple[Split | None, ...]]:
    return {name: line.splits for name, line in lines.items()}


def _other_numbers(old: Row, row: Row) -> Iterator[str]:
    for name in old.outcomes.keys() ^ row.outcomes.keys():
        yield f"{row.setting}: {name} is in one of both only"
    pairs: dict[str, tuple[float, float]] = {
        "operators": (old.operators, row.operators),
        "edges": (old.edges, row.edges),
    }
    exact: dict[str, tuple[object, object]] = {
        name: (getattr(old, name), getattr(row, name)) for name in ("splits", "parts", "alone")
    }
    for table in ("lines", "lines_alone"):
        were, are = getattr(old, table), getattr(row, table)
        exact[f"{table}, splits"] = _splits(were), _splits(are)
        for name in were.keys() & are.keys():
            pairs[f"{table}, {name} ms"] = were[name].seconds * 1e3, are[name].seconds * 1e3
            pairs[f"{table}, {name} bytes"] = were[name].parameter_bytes, are[name].parameter_bytes
    for name, outcome in row.outcomes.items():
        if name in old.outcomes:
            before = old.outcomes[name]
            exact[f"{name} fits"] = before.fits, outcome.fits
            exact[f"{name}, devices used"] = before.used, outcome.used
            pairs[f"{name} ms"] = before.seconds * 1e3, outcome.seconds * 1e3
            pairs[f"{name} GB"] = before.peak_bytes / 1e9, outcome.peak_bytes / 1e9
            pairs[f"{name}, updates ms"] = before.update_seconds * 1e3, outcome.update_seconds * 1e3
    for name, (was, now) in exact.items():
        if was != now:
            yield f"{row.setting}: {name}: {was} is stored, {now} computed"
    for name, (one, other) in pairs.items():
        if abs(other - one) > MOST_CHANGED * abs(one):
            yield f"{row.setting}: {name}: {one:.6g} is stored, {other:.6g} computed"
