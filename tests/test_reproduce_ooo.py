from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from dapple_tf.describe.plan import Plan
from dapple_tf.planning.chunks import chunked
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import (
    ooo_networks,
    ooo_parallel,
    ooo_pipelines,
    ooo_sensitivity,
    ooo_streams,
    reproduce_ooo,
)
from dapple_tf.tools.evaluation.ooo_claims import (
    GUESSED,
    IN_UNITS,
    NEAR,
    NOT,
    OTHERWISE,
    PARTLY,
    REPRODUCED,
    STATUSES,
    Claim,
    claims,
)
from dapple_tf.tools.evaluation.ooo_differences import changed_document, differences
from dapple_tf.tools.evaluation.ooo_measured import measurements
from dapple_tf.tools.evaluation.ooo_models import BERTS, FOUR, PRIV_A, PUB_A, PUB_B, Hardware
from dapple_tf.tools.evaluation.ooo_parallel import Systems
from dapple_tf.tools.evaluation.ooo_report import claim_records, document, rounded, to_json
from dapple_tf.tools.evaluation.reproduce_ooo import work
from dapple_tf.tools.evaluation.sensitivity import Change, unnoticed

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"
STORED: dict[str, Any] = json.loads((RESULTS / "ooo.json").read_text())
"""What `make results-ooo` has left."""
RECORDS: dict[str, list[dict[str, Any]]] = {
    name: rows for name, rows in STORED.items() if isinstance(rows, list) and name != "claims"
}

Record = Mapping[str, Any]


# ---- what is stored


def test_stored_verdicts_are_those_of_the_stored_numbers() -> None:
    judged = claims(RECORDS)
    assert STORED["claims"] == claim_records(judged)
    assert (RESULTS / "ooo.json").read_text() == to_json(RECORDS, judged, STORED["sensitivity"])


def test_the_document_is_that_of_the_stored_numbers() -> None:
    judged = claims(RECORDS)
    text = (RESULTS / "ooo.md").read_text()
    assert text == document(RECORDS, judged, STORED["sensitivity"], measurements(RESULTS))
    for status in STATUSES:
        assert f"| {status} | {sum(claim.status == status for claim in judged)} |" in text
    assert max(Counter(claim.name for claim in judged).values()) == 1
    assert all(claim.remark for claim in judged if claim.status not in (REPRODUCED, IN_UNITS))
    assert list(dict.fromkeys(group for group, _ in work())) == list(RECORDS)


def stored(group: str, record: Record) -> Record:
    """The stored record with the same names and counts."""
    same = {key: value for key, value in record.items() if not isinstance(value, float)}
    (row,) = (row for row in RECORDS[group] if all(row.get(key) == value for key, value in same.items()))
    return row


@pytest.mark.parametrize(
    ("group", "compute"),
    [
        ("units", ooo_pipelines.unit_steps),
        ("figure_4", partial(ooo_parallel.figure_4, *ooo_parallel.OTHERS_4[3])),
        ("fine_tuning", partial(ooo_pipelines.fine_tuning, "BERT-24", "Ethernet", (4,))),
        ("fine_tuning", partial(ooo_pipelines.fine_tuning, "FFNN", "NVLink", (4,))),
        ("one_gpu", partial(ooo_streams.one_gpu, "ResNet-50", 64)),
        ("transfers", partial(ooo_pipelines.transfer, "PCIe")),
        ("pre_training", partial(ooo_pipelines.weak_scaling, 8, "scripts")),
        ("strong", partial(ooo_pipelines.strong_scaling, 24, 8, "figure 12")),
        ("gpt_3", partial(ooo_pipelines.gpt_3, 8)),
        ("figure_10", partial(ooo_parallel.figure_10, "MobileNetV3", "Priv-B", 20)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stored_rows_are_those_that_are_computed_anew(
    group: str, compute: Callable[[], Record | Sequence[Record]]
) -> None:
    """All rows are: `test_all_rows_of_a_group_are_computed_anew`."""
    some = compute()
    for row in rounded({group: [some] if isinstance(some, Mapping) else some})[group]:
        before = dict(stored(group, row)) if group != "figure_4" else dict(RECORDS[group][4])
        assert list(row) == list(before)
        for name, value in row.items():
            assert value == (pytest.approx(before[name], rel=1e-5) if isinstance(value, float) else before[name]), name


# ---- verdicts


OTHERS = {"others": (("with less", 1.52), ("with more", 1.2))}


@pytest.mark.parametrize(
    ("paper", "ours", "options", "status"),
    [
        *((1.5, 1.5, {}, REPRODUCED), (1.5, 1.36, {}, REPRODUCED), (1.5, 1.64, {}, REPRODUCED)),
        *((1.5, 1.34, {}, NEAR), (1.5, 1.66, {}, NEAR), (1.5, 1.8, {}, NEAR)),
        *((1.5, 1.1, {}, NOT), (1.5, 1.95, {}, NOT), (1.5, None, {}, NOT)),
        # A small speedup needs a gain of its size, an amount doesn't.
        *((1.15, 1.05, {}, NEAR), (1.15, 1.01, {}, NOT), (1.15, 1.09, {}, REPRODUCED)),
        (1.15, 1.05, {"speedup": False}, REPRODUCED),
        # Another setting counts only where the first one is off, and of several one.
        *((1.5, 1.0, OTHERS, OTHERWISE), (1.5, 1.5, OTHERS, REPRODUCED), (1.2, 1.0, OTHERS, NOT)),
        # What leaves out a part is never reproduced.
        *((1.5, 1.4, {"partial": True}, PARTLY), (1.5, 1.5, {"partial": True}, PARTLY)),
        *((1.5, 1.9, {"partial": True}, NOT), (1.5, 1.0, {"partial": True, **OTHERS}, PARTLY)),
        # Guesses may fail but not hold.
        *((1.5, 1.5, {"guessed": True}, GUESSED), (1.5, 1.3, {"guessed": True}, GUESSED)),
        (1.5, 1.0, {"guessed": True}, NOT),
    ],
)
def test_verdicts(paper: float, ours: float | None, options: Any, status: str) -> None:
    assert Claim("a speedup", "figure 0", paper, paper, ours, **options).status == status


# ---- what differs


def test_what_differs_is_named() -> None:
    assert differences(RECORDS, STORED) == []
    assert differences({name: rows for name, rows in RECORDS.items() if name != "figure_4"}, STORED) == [
        "figure_4: is stored, but wasn't computed"
    ]
    changed = copy.deepcopy(STORED)
    changed["inputs"]["Pub-B"]["outside"] = 3.1e9
    changed["fine_tuning"][0]["GPipe"] *= 1.03
    changed["one_gpu"][0]["XLA"] *= 1.01  # within 2 %
    del changed["gpt_3"][0]
    missing = changed["claims"].pop()["claim"]
    expected = ["Pub-B: outside is 3125000000.0, stored 3100000000.0", "gpt_3: 5 records, 4 stored"]
    expected.append(f"{missing}: is computed only")
    misses = [claim for claim in changed["claims"] if claim["status"] == NOT and claim["ours"]]
    others = {"paper": "1.6", "place": "figure 1", "remark": "another", "status": PARTLY, "ours": 9.0}
    for claim, (key, value) in zip(misses, others.items(), strict=False):
        expected.append(f"{claim['claim']}: {key} is {claim[key]}, stored {value}")
        claim[key] = value
    said = differences(RECORDS, changed)
    assert said[0].startswith("fine_tuning, record 0: GPipe is") and sorted(said[1:]) == sorted(expected)


QUICK = ("the paper's", "the band")


@pytest.mark.parametrize(
    "change",
    [change for change in ooo_sensitivity.CHANGES if change.text.startswith(QUICK)],
    ids=lambda change: change.text,
)
def test_a_change_is_noticed(change: Change) -> None:
    (outcome,) = ooo_sensitivity.tried(RECORDS, [change]).values()
    assert outcome["fails"]


def test_all_changes_were_noticed_and_nothing_is_without_one() -> None:
    assert list(STORED["sensitivity"]) == [change.text for change in ooo_sensitivity.CHANGES]
    assert len(ooo_sensitivity.CHANGES) >= 10
    assert all(outcome["fails"] for outcome in STORED["sensitivity"].values())
    nothing = Change("nothing", ("BERT-24, NVLink",), contextlib.nullcontext)
    assert not ooo_sensitivity.tried(RECORDS, [nothing])["nothing"]["fails"]


# ---- the command


def check(monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path = RESULTS) -> int:
    """Runs the command, for which the stored records are those that were computed."""
    monkeypatch.setattr(reproduce_ooo, "reproduce", lambda jobs: copy.deepcopy(RECORDS))
    monkeypatch.setattr(ooo_sensitivity, "tried", lambda records: STORED["sensitivity"])
    return command.run(reproduce_ooo.main, reproduce_ooo.FLAGS, [f"--directory={directory}"])


def test_the_command_accepts_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch) == 0


@pytest.mark.parametrize("claim", [0, 20, -1])
def test_another_number_of_the_paper_fails(claim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = STORED["claims"][claim]["claim"]
    with ooo_sensitivity.other_number(name):
        assert check(monkeypatch) == 1


def test_another_document_or_band_or_a_change_that_nothing_notices_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "ooo.json").write_text((RESULTS / "ooo.json").read_text())
    (tmp_path / "ooo.md").write_text((RESULTS / "ooo.md").read_text() + "\n")
    assert changed_document(STORED, tmp_path) == [f"{tmp_path / 'ooo.md'}: isn't what the stored results give"]
    assert check(monkeypatch, tmp_path) == 1
    with ooo_sensitivity.other_band(NEAR):
        assert check(monkeypatch) == 1
    (change, *_), others = STORED["sensitivity"], dict([*STORED["sensitivity"].items()][1:])
    assert unnoticed(others, STORED["sensitivity"]) == [f"{change}: is stored, but wasn't tried"]
    passes = {change: {**outcome, "fails": False} for change, outcome in STORED["sensitivity"].items()}
    assert len(unnoticed(passes, STORED["sensitivity"])) == len(passes)
    monkeypatch.setitem(STORED, "sensitivity", passes)
    assert check(monkeypatch) == 1


def test_nothing_to_compare_with_is_an_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(reproduce_ooo.main, reproduce_ooo.FLAGS, [f"--directory={tmp_path}"]) != 0
    assert "ooo.json isn't there; make it with --write" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


# ---- models


@pytest.mark.parametrize(
    ("profile", "millions"),
    [
        (ooo_networks.resnet(50), 25.6),
        (ooo_networks.resnet(101), 44.5),
        (ooo_networks.resnet(152), 60.2),
        (ooo_networks.densenet(121), 7.98),
        (ooo_networks.densenet(169), 14.15),
        (ooo_networks.mobilenet(), 5.4),
        (BERTS[24].profile(), 366),
        (BERTS[12].profile(), 133),
    ],
    ids=lambda value: value.model if hasattr(value, "model") else "",
)
def test_networks_have_their_published_numbers_of_parameters(profile: Any, millions: float) -> None:
    assert ooo_networks.parameters(profile) / 1e6 == pytest.approx(millions, rel=0.02)


def test_clusters_are_those_of_table_2() -> None:
    assert PUB_A.cluster(48).num_servers == 12 and PUB_B.cluster(36).num_servers == 5
    assert PRIV_A.cluster(8).num_servers == 8
    assert PUB_B.cluster(16).link(7, 8).bandwidth == pytest.approx(25e9 / 8)
    assert FOUR["PCIe"].cluster(4).link(0, 3).bandwidth == 16e9


# ---- data parallelism


@pytest.mark.parametrize(("hardware", "devices"), [(PRIV_A, 3), (PUB_A, 4), (PUB_A, 8)])
@pytest.mark.parametrize("apart", [False, True])
def test_two_replicas_stand_for_all(hardware: Hardware, devices: int, apart: bool) -> None:
    profile = ooo_networks.mobilenet(hardware.device)
    cluster = hardware.cluster(devices, apart=apart)
    systems = Systems(profile, cluster, 16, 6)
    plan = Plan.data_parallel(
        devices, 16 * devices, bucket_bytes=profile.parameter_bytes, all_reduce=systems.all_reduce
    )
    plan = chunked(plan, profile, 6)
    assert systems.base.cuts == plan.cuts
    for options in ({}, {"reverse_first_k": 3, "carried_updates": 2, "reduction_order": "first_layers"}):
        whole = simulate(dataclasses.replace(plan, **options), profile, cluster)  # type: ignore[arg-type]
        two = simulate(dataclasses.replace(systems.base, **options), profile, systems.cluster)  # type: ignore[arg-type]
        assert two.latency == pytest.approx(whole.latency, rel=1e-9)
