"""FD-DPS's experiments: the paper's tables, what is claimed of rows, the graphs of steps, and the command."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Sequence

import keras
import pytest
from selection import thorough

import dapple_tf as dapple
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import Topology
from dapple_tf.operators.placement_candidates import variant_of
from dapple_tf.operators.split_search import by_batch
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import (
    operator_claims,
    operator_experiments,
    operator_models,
    operator_sensitivity,
    operator_sweep,
    reproduce_fd_dps,
)
from dapple_tf.tools.evaluation.operator_claims import (
    SEARCH_SECONDS,
    bands,
    better_rows,
    claims_of,
    counts_of,
    within,
    within_in_steps,
)
from dapple_tf.tools.evaluation.operator_experiments import (
    DEVICES,
    MEMORY_BYTES,
    OPPONENTS,
    PAPER_DEVICES,
    Operator,
    Outcome,
    Row,
    Setting,
    cluster_of,
    from_record,
    settings,
    to_record,
    with_rounds_of,
)
from dapple_tf.tools.evaluation.operator_models import MODELS, flat_step, flatten_step
from dapple_tf.tools.evaluation.operator_paper import TABLE_5, TABLE_6, TABLE_7
from dapple_tf.tools.evaluation.operator_report import tables
from dapple_tf.tools.evaluation.operator_results import (
    Stored,
    changed_document,
    changed_inputs,
    changed_sweep,
    differences,
    stored,
    write,
)
from dapple_tf.tools.evaluation.operator_text import reasons
from dapple_tf.tools.evaluation.sensitivity import Change
from graph_passes.analysis.split_rules import Split
from graph_passes.ir.graph import CALL_ATTR, Graph, Ref, data_inputs

# ---- the paper's numbers

PRINTED = {
    ("VGG-16", 2): (6.33, 1.41),
    ("VGG-16", 4): (8.25, 4.88),
    ("Inception-V3", 2): (3.79, 2.42),
    ("Inception-V3", 4): (9.76, 5.62),
    ("ResNet-50", 4): (18.11, 5.01),
    ("ResNet-50", 8): (15.31, 8.85),
    ("ResNet-200", 4): (12.90, 7.82),
    ("ResNet-200", 8): (15.79, 11.87),
    ("PNASNet-mobile", 4): (14.59, 10.54),
    ("PNASNet-mobile", 8): (23.83, 12.76),
    ("NASNet-large", 4): (15.43, 6.42),
    ("NASNet-large", 8): (20.12, 9.45),
}
"""Speedups 2 and 1 of table 5, in percent."""


def test_table_5_is_as_printed() -> None:
    assert {(model, count) for model, counts in PAPER_DEVICES.items() for count in counts} == TABLE_5.keys()
    for key, (over_fast_t, over_mp_dps) in PRINTED.items():
        row = TABLE_5[key]
        if key != ("PNASNet-mobile", 4):  # 14.78 % by its own seconds
            assert 100 * row.faster("fast_t") == pytest.approx(over_fast_t, abs=0.006)
        # What the paper calls the speedup of MP-DPS over FastT.
        assert 100 * row.faster("mp_dps") == pytest.approx(over_mp_dps, abs=0.006)


def test_table_7_is_as_printed() -> None:
    for model, (before, after, gain) in TABLE_7.items():
        assert 1 - after / before == pytest.approx(gain, abs=0.0005)
        if model != "PNASNet-mobile":  # 1.384 s in table 5, 1.314 s in table 7
            assert TABLE_5[model, 4].fd_dps == after


def test_models_are_those_of_table_3() -> None:
    assert [model.batch for model in MODELS.values()] == [64, 64, 64, 16, 64, 16]
    assert [name.replace("-", "").lower() for name in MODELS] == [
        model.paper.replace("_", "").lower() for model in MODELS.values()
    ]
    assert MODELS.keys() == PAPER_DEVICES.keys() == TABLE_7.keys()


@pytest.mark.thorough
@pytest.mark.slow
def test_resnet_200_has_its_200_layers() -> None:
    model = MODELS["ResNet-200"].build()
    weighted = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense)]
    projections = [layer for layer in weighted if layer.name.endswith("_0_conv")]
    assert len(weighted) - len(projections) == 200
    assert model.count_params() == pytest.approx(64.8e6, rel=0.01)


STORED = pathlib.Path(__file__).parents[1] / "docs" / "results" / "fd_dps.json"


def test_stored_claims_are_those_of_the_stored_rows(tmp_path: pathlib.Path) -> None:
    """`make results-operators` has left them, and the document beside them."""
    rows, claims, limits, outcomes, sweep, _ = stored(STORED)
    assert rows and limits == bands()
    assert [row.setting for row in rows] == [one for one in settings(list(MODELS)) if one in {r.setting for r in rows}]
    assert claims_of(rows) == claims
    assert not [claim for claim in claims if claim.verdict == "FAILED"]
    assert all(claim.reason or claim.verdict in ("reproduced", "holds") for claim in claims)
    write(rows, claims, outcomes, sweep, tmp_path)
    for name in ("fd_dps.md", "fd_dps.json"):
        assert (tmp_path / name).read_text() == STORED.with_name(name).read_text()


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder that keeps models' graphs from one row to the next."""
    return tmp_path_factory.mktemp("graphs")


def check_stored(folder: pathlib.Path, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator_models, "CACHE", folder)
        chosen = ["--jobs=1", "--search_seconds=600", *arguments]
        assert command.run(reproduce_fd_dps.main, reproduce_fd_dps.FLAGS, chosen) == 0


@pytest.mark.thorough
def test_a_cheap_row_is_as_stored(graphs: pathlib.Path) -> None:
    check_stored(graphs, "--models=VGG-16", "--devices=2")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1800)  # A row takes minutes, and three times as many on a slow machine.
@pytest.mark.parametrize(
    ("model", "devices"),
    # Each of three shares of the tests gets rows of all sizes.
    [(model, devices) for devices in DEVICES for model in MODELS if (model, devices) != ("VGG-16", 2)],
)
def test_rows_are_as_stored(graphs: pathlib.Path, model: str, devices: int) -> None:
    """With all searches, on eight devices also in two dockers."""
    check_stored(graphs, f"--models={model}", f"--devices={devices}")


# ---- rows


def row(setting: Setting | None = None, **seconds: float) -> Row:
    """A row of made-up times, of which all is well."""
    times = {
        **{"single": 8.0, "data_parallel": 2.1, "own_statistics": 2.0, "split_by_batch": 2.1, "dpos": 3.0},
        **{"fast_t": 2.0, "mp_dps": 1.8, "d_dps": 1.7, "one_copy": 6.0, "alone": 5.5, "fd_dps": 1.5},
    } | seconds
    times = {with_rounds_of(name): times[name] for name in OPPONENTS} | times
    return Row(
        setting or Setting("NASNet-large", 8),
        1000,
        2000,
        12.5,
        {name: Outcome(value, True, 1e9, 20.0, 8) for name, value in times.items()},
        {"Conv2D": 7},
        {Split("batch", 8): 7},
        3,
        {},
        {},
    )


def failed(rows: Sequence[Row]) -> list[str]:
    return [claim.name.partition(": ")[2] for claim in claims_of(rows) if claim.verdict == "FAILED"]


def outcome(of: Row, name: str, **changes: object) -> Row:
    changed = dataclasses.replace(of.outcomes[name], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(of, outcomes={**of.outcomes, name: changed})


def with_lines(of: Row, ours: Split | None, alone: Split | None) -> Row:
    lines = {name: Operator(ms / 1e3, 10_000, (ours,)) for name, (ms, _, _) in TABLE_6.items()}
    others = {name: dataclasses.replace(line, splits=(alone,)) for name, line in lines.items()}
    return dataclasses.replace(of, lines=lines, lines_alone=others)


def test_a_good_row_fails_nothing() -> None:
    assert failed([row()]) == []
    assert row().faster("fast_t") == pytest.approx(0.25)
    assert row().over("fast_t") == 1.0


@pytest.mark.parametrize(
    ("worse", "claims"),
    [
        (outcome(row(), "fd_dps", fits=False), ["FD-DPS fits the devices' memory"]),
        (outcome(row(), "fd_dps", search_seconds=301.0), ["searched in 300 s of one core"]),
    ],
)
def test_what_must_hold(worse: Row, claims: list[str]) -> None:
    assert failed([worse]) == claims


def test_rows_in_which_data_parallelism_is_faster_are_named() -> None:
    claims = {claim.name: claim for claim in claims_of([row(own_statistics=1.4)]) if claim.part == "against DP"}
    assert {name.partition("than ")[2]: (claim.verdict, claim.reason) for name, claim in claims.items()} == {
        "DP": ("holds", ""),
        "DP, own statistics": ("slower", "7.1%"),
    }


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        *((0.100, "reproduced"), (0.109, "reproduced"), (0.091, "reproduced"), (0.12, "near"), (0.08, "near")),
        *((0.13, "not reproduced"), (0.07, "not reproduced"), (0.8, "not reproduced"), (-0.1, "not reproduced")),
    ],
)
def test_bands_are_on_both_sides(ours: float, verdict: str) -> None:
    assert within(ours, 0.1) == verdict


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        *((0.80, 0.85, "reproduced"), (0.80, 0.73, "reproduced"), (0.80, 0.93, "near"), (0.80, 0.62, "near")),
        *((0.95, 0.98, "near"), (0.95, 0.984, "not reproduced")),  # gain 0.4 and 0.32 of 5 %
        *((0.95, 0.90, "reproduced"), (0.95, 0.86, "near"), (0.95, 0.84, "not reproduced")),
        *((1.02, 0.97, "not reproduced"), (0.97, 1.02, "not reproduced")),  # other sides
        *((1.10, 1.06, "reproduced"), (2.36, 2.41, "reproduced")),
        *((0.80, 0.50, "not reproduced"), (0.80, 1.10, "not reproduced")),
        *((1.0, 1.0, "reproduced"), (1.0, 1.001, "not reproduced")),
    ],
)
def test_gains_over_data_parallelism_count_too(paper: float, ours: float, verdict: str) -> None:
    assert within_in_steps(ours, paper) == verdict


def test_verdicts_on_the_papers_figures() -> None:
    """0.85 and 1.12 are FastT's and FD-DPS's steps over DP's, 15.8 and 11.9 % the margins."""
    setting = Setting("ResNet-200", 8)
    claims = {claim.name.partition(": ")[2]: claim for claim in claims_of([row(setting)]) if claim.paper}
    assert {name: (claim.paper, claim.ours, claim.verdict) for name, claim in claims.items()} == {
        "operators": ("45,472", "1,000", "not reproduced"),
        "": ("1.00 to 1.00", "4.00 to 4.00", "not reproduced"),
        "FastT's step over DP's": ("0.88", "1.00", "not reproduced"),
        "MP-DPS's step over DP's": ("0.84", "0.90", "reproduced"),
        "FD-DPS's step over DP's": ("0.74", "0.75", "reproduced otherwise"),  # Its rounds aren't the paper's.
        "FD-DPS faster than FastT": ("15.79%", "25.0%", "near"),
        "FD-DPS faster than MP-DPS": ("11.87%", "16.7%", "reproduced"),
    }
    reason = claims["FD-DPS faster than FastT"].reason
    assert reason == "even shares of one device's work would be 50.0% faster"


def test_margins_over_opponents_that_are_slower_than_data_parallelism_are_too_large() -> None:
    claims = {claim.name: claim for claim in claims_of([row(Setting("VGG-16", 4), fast_t=2.5)])}
    slow = claims["VGG-16, 4 devices: FD-DPS faster than FastT"]
    assert (slow.ours, slow.verdict) == ("40.0%", "not reproduced")
    assert slow.reason.startswith("too large: weak opponent, it takes 1.25 of DP's step")


def test_a_figure_that_is_data_parallelisms_is_reproduced_otherwise() -> None:
    one = row(Setting("VGG-16", 4), fast_t=2.2, mp_dps=2.2, split_by_batch=2.2, fd_dps=2.05)
    claims = {claim.name.partition(": ")[2]: claim for claim in claims_of([one])}
    both = claims["FastT and MP-DPS's step over DP's"]
    assert (both.paper, both.ours, both.verdict) == ("1.12; 1.08", "1.10", "reproduced otherwise")
    # One margin, compared with 8.25 and 4.88 %, counts once.
    over = claims["FD-DPS faster than FastT and MP-DPS"]
    assert (over.paper, over.ours, over.verdict) == ("8.25%; 4.88%", "6.8%", "reproduced otherwise")
    assert over.reason.startswith("the step of FastT, before rounds, is that of DP's graph; even")
    assert "are one number in 1 of 1 rows" in " ".join(reasons([one]).split())


def test_a_margin_over_data_parallelisms_graph_with_our_rounds_is_reproduced_otherwise() -> None:
    """Rounds that are ours had made "near" of what would be too much to say of FastT: it had DP's graph, unchanged."""
    back = dict.fromkeys(("fast_t", "mp_dps", "split_by_batch"), 2.0)
    improved = {with_rounds_of(name): 1.8 for name in OPPONENTS}
    one = row(Setting("ResNet-200", 8), **back, **improved, d_dps=1.75, fd_dps=1.53)
    over = {claim.name.partition(": ")[2]: claim for claim in claims_of([one])}["FD-DPS faster than FastT and MP-DPS"]
    assert (over.ours, over.verdict) == ("15.0%", "reproduced otherwise")
    one = row(Setting("ResNet-200", 8), **back, **improved, d_dps=1.75, fd_dps=1.69)  # would be near
    over = {claim.name.partition(": ")[2]: claim for claim in claims_of([one])}["FD-DPS faster than FastT and MP-DPS"]
    assert (over.ours, over.verdict) == ("6.1%", "not reproduced")


def test_one_number_counts_once_in_whichever_tables_it_stands() -> None:
    """FD-DPS's margins over FastT, MP-DPS and D-DPS(-F) had counted twice, in tables 5 and 7, where all are one."""
    alike = dict.fromkeys(("d_dps", *map(with_rounds_of, OPPONENTS)), 1.8)
    claims = claims_of([row(Setting("NASNet-large", 4), **alike, fast_t=1.9, mp_dps=1.9, fd_dps=1.69)])
    margins = [claim for claim in claims if "faster than" in claim.name]
    assert [(claim.part, claim.name, claim.paper, claim.ours, claim.verdict) for claim in margins] == [
        (
            "table 5, margins",
            "NASNet-large, 4 devices: FD-DPS faster than FastT, MP-DPS and D-DPS(-F)",
            "15.43%; 6.42%; 13.87%",
            "6.1%",
            "near",
        )
    ]
    for step, parts in ((1.8002, ["table 5, margins"]), (1.82, ["table 5, margins", "table 7"])):
        apart = {**alike, "d_dps": step}  # Two steps that print alike had been two figures.
        claims = claims_of([row(Setting("NASNet-large", 4), **apart, fast_t=1.9, mp_dps=1.9, fd_dps=1.69)])
        assert [claim.part for claim in claims if "faster than" in claim.name] == parts


def test_figures_of_two_models_are_two() -> None:
    rows = [row(Setting(model, 8), fd_dps=1.5) for model in ("ResNet-50", "ResNet-200")]
    names = [claim.name for claim in claims_of(rows) if "FD-DPS's step over DP's" in claim.name]
    assert names == ["ResNet-50, 8 devices: FD-DPS's step over DP's", "ResNet-200, 8 devices: FD-DPS's step over DP's"]


def test_the_stored_rows_have_no_number_twice() -> None:
    _, claims, *_ = stored(STORED)
    for words in ("faster than", "step over DP's"):
        figures = [(claim.name.partition(":")[0], claim.ours) for claim in claims if words in claim.name]
        assert figures and len(figures) == len(set(figures))


def test_what_the_paper_has_two_numbers_for_is_one_figure_with_the_worse_verdict() -> None:
    """PNASNet's step was reproduced otherwise by table 5's 1.384 s, and wasn't by the 1.314 s of table 7."""
    claims = claims_of([row(Setting("PNASNet-mobile", 4), own_statistics=2.0, split_by_batch=2.0, fd_dps=1.81)])
    (step,) = [claim for claim in claims if "FD-DPS" in claim.name and claim.name.endswith("step over DP's")]
    assert step.name == "PNASNet-mobile, 4 devices: FD-DPS and FD-DPS (table 7)'s step over DP's"
    assert (step.paper, step.ours, step.verdict) == ("0.83; 0.79", "0.91", "not reproduced")


def test_rows_better_than_the_papers() -> None:
    setting = Setting("ResNet-200", 8)  # 0.742 of data parallelism's step in the paper
    assert better_rows([row(setting, fd_dps=1.4)]) == [row(setting, fd_dps=1.4)]
    assert better_rows([row(setting, fd_dps=1.6), row(Setting("VGG-16", 8), fd_dps=1.4)]) == []


def test_a_figure_of_the_paper_has_no_second_try() -> None:
    """Splits of one operator at a time had been set, over one copy, against the figures that D-DPS(-F)'s steps have."""
    one = row(Setting("VGG-16", 4), alone=5.65)  # 5.8 %, the paper's 5.9
    assert [claim.name for claim in claims_of([one]) if claim.part.startswith("table 7")] == [
        "VGG-16, 4 devices: FD-DPS faster than D-DPS(-F)"
    ]
    text = " ".join(reasons([one]).split())
    assert "gain 5.8% to 5.8% over one copy" in text and "not counted: it would be a second try" in text


def test_a_number_that_has_become_two_is_a_difference() -> None:
    """Claims had been compared in their order, which raised an error where there was one more."""
    alike = dict.fromkeys(("d_dps", *map(with_rounds_of, OPPONENTS)), 1.8)
    before = row(Setting("NASNet-large", 4), **alike)
    after = row(Setting("NASNet-large", 4), **{**alike, "d_dps": 1.82})
    assert differences(holding(before), [after], SEARCH_SECONDS) == [
        "NASNet-large, 4 devices: FD-DPS faster than FastT, MP-DPS and D-DPS(-F): is stored only",
        "NASNet-large, 4 devices: FD-DPS faster than FastT and MP-DPS: is computed only",
        "NASNet-large, 4 devices: FD-DPS faster than D-DPS(-F): is computed only",
    ]


def test_what_is_out_of_memory_is_counted() -> None:
    rows = [
        outcome(row(Setting("NASNet-large", count)), "single", fits=False, peak_bytes=15.1e9) for count in (2, 4, 8)
    ]
    claims = [claim for claim in claims_of(rows) if claim.part == "table 5, OOM"]
    assert [(claim.name, claim.ours, claim.verdict) for claim in claims] == [
        (
            f"NASNet-large, {count} devices: DP needs more memory than there is",
            "fits (1.0 of 15.0 GB)",
            "not reproduced",
        )
        for count in (4, 8)
    ]  # That one device is short of memory isn't counted: the usable memory was chosen when that was known.
    assert "One device would need 15.1 GB for NASNet-large, and has 15.0" in reasons(rows)


def test_times_of_searches_are_not_counted() -> None:
    """Which search takes less time follows from the bound on visited operators that we chose."""
    assert not [claim for claim in claims_of([row(Setting("VGG-16", 8))]) if "search takes" in claim.name]


def test_rows_in_which_splits_lose_are_named() -> None:
    text = " ".join(reasons([row(fd_dps=1.75), row(Setting("VGG-16", 4))]).split())
    assert (
        "FD-DPS loses to D-DPS(-F)**, itself without other splits, by more than 1% in 1 of 2 rows (NASNet-large, 8 "
        "devices by 2.94%)" in text
    )
    assert "loses to" not in reasons([row()])


def test_tables_6_and_7() -> None:
    one = with_lines(row(Setting("VGG-16", 4), d_dps=1.6), Split("batch", 4), None)
    claims = [claim for claim in claims_of([one]) if claim.part.startswith(("table 6", "table 7"))]
    verdicts = {claim.name.partition(": ")[2]: (claim.paper, claim.ours, claim.verdict) for claim in claims}
    assert verdicts == {
        "of 6 operators are split": ("Conv1_2, Conv1_2bp", "all", "not reproduced"),
        "FD-DPS faster than D-DPS(-F)": ("5.92%", "6.2%", "reproduced"),
    }
    assert counts_of(claims)["table 6"] == {"not reproduced": 1}
    alike = {
        name: dataclasses.replace(line, splits=(Split("batch", 4) if TABLE_6[name][2] else None,))
        for name, line in one.lines.items()
    }
    (same,) = (claim for claim in claims_of([dataclasses.replace(one, lines=alike)]) if claim.part == "table 6")
    assert (same.ours, same.verdict) == ("Conv1_2, Conv1_2bp", "reproduced")


def test_document(tmp_path: pathlib.Path) -> None:
    rows = [
        outcome(row(), "single", fits=False),
        with_lines(row(Setting("VGG-16", 4)), Split("batch", 4), None),
        row(Setting("VGG-16", 8, 2)),
    ]
    assert [table.name for table in tables(rows)] == [
        *("table3", "table5", "table5_gains", "table5_paper", "table6", "table7", "figure4", "figure5")
    ]
    write(rows, claims_of(rows), {}, [], tmp_path)
    document = (tmp_path / "fd_dps.md").read_text()
    times = "(8000) | 2100 | 2000 | 2100 | 3000 | 2000 | 1800 | 2000 | 1800 | 1700 | 1500 | 2000 | 1000"
    assert f"| NASNet-large | 8 | {times} |" in document
    assert "| Conv1_2 | 15.67 | 10.00 | batch x 4 | no | 15.673 | 43.82 | yes |" in document
    assert "Conv2D (7) | batch x 8 (7) |" in document
    assert "nothing has run on a GPU" in document
    assert stored(tmp_path / "fd_dps.json") == holding(*rows)


def test_rows_are_read_as_written() -> None:
    one = with_lines(row(), None, Split("channel", 2))
    assert from_record(json.loads(json.dumps(to_record(one)))) == one


def test_differences_beyond_two_percent_and_other_verdicts_are_named() -> None:
    before = holding(row(Setting("ResNet-200", 8)))
    assert differences(before, [row(Setting("ResNet-200", 8), fast_t=2.03)], SEARCH_SECONDS) == []
    changed = differences(before, [row(Setting("ResNet-200", 8), own_statistics=2.2)], SEARCH_SECONDS)
    assert changed == [
        "ResNet-200, 8 devices: own_statistics ms: 2000 is stored, 2200 computed",
        "ResNet-200, 8 devices: FastT's step over DP's: was not reproduced (1.00), is near (0.95)",
    ]
    larger = outcome(before.rows[0], "fd_dps", peak_bytes=1.1e9)
    assert differences(before, [larger], SEARCH_SECONDS) == [
        "ResNet-200, 8 devices: fd_dps GB: 1 is stored, 1.1 computed"
    ]
    assert differences(holding(), [before.rows[0]], SEARCH_SECONDS)[0] == "ResNet-200, 8 devices: isn't stored"


def test_other_decisions_are_differences() -> None:
    one = with_lines(row(Setting("VGG-16", 4)), None, Split("channel", 2))
    name = next(iter(one.lines))
    line = one.lines[name]
    changed = {
        "splits": {**one.splits, "Conv2D": 99},
        "parts": {Split("batch", 2): 99},
        "alone": one.alone + 1,
        "lines": {**one.lines, name: dataclasses.replace(line, splits=(Split("batch", 4),))},
    }
    for field, value in changed.items():
        said = differences(holding(one), [dataclasses.replace(one, **{field: value})], SEARCH_SECONDS)
        assert any(f"VGG-16, 4 devices: {field}" in text for text in said), field
    slower = dataclasses.replace(one, lines={**one.lines, name: dataclasses.replace(line, seconds=line.seconds * 1.3)})
    assert any(f"lines, {name} ms" in text for text in differences(holding(one), [slower], SEARCH_SECONDS))
    for other in (outcome(one, "fd_dps", fits=False), outcome(one, "fd_dps", used=1)):
        assert differences(holding(one), [other], SEARCH_SECONDS)


def holding(*rows: Row) -> Stored:
    """What is stored of rows."""
    return Stored([*rows], claims_of(rows), bands(), {}, [], operator_experiments.inputs())


def test_limits_of_verdicts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = holding(row(Setting("VGG-16", 4)))
    monkeypatch.setattr(operator_claims, "NEAR_WITHIN", 0.26)
    assert differences(before, before.rows, SEARCH_SECONDS) == ["near within: 0.25 is stored, 0.26 now"]


@pytest.mark.parametrize(
    "change",
    [thorough(change) if change.parts else change for change in operator_sensitivity.CHANGES],
    ids=lambda change: change.text,
)
@pytest.mark.timeout(600)
def test_a_change_is_noticed(change: Change) -> None:
    """Stored and computed rows were both judged by the changed code, so that no other number of the paper was seen."""
    (outcome,) = operator_sensitivity.tried(stored(STORED).rows, [change]).values()
    assert outcome["fails"]


def test_all_changes_were_noticed() -> None:
    outcomes = stored(STORED).outcomes
    assert list(outcomes) == [change.text for change in operator_sensitivity.CHANGES]
    assert len(outcomes) >= 10
    assert all(one["fails"] for one in outcomes.values())


@pytest.mark.parametrize("change", [None, *(change for change in operator_sensitivity.CHANGES if not change.parts)])
def test_another_number_of_the_paper_or_band_fails(change: Change | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command compared rows of one computation with themselves; here they are taken for computed ones."""
    rows = {one.setting: one for one in stored(STORED).rows}
    monkeypatch.setattr(reproduce_fd_dps, "reproduce", lambda chosen, jobs: [rows[setting] for setting in chosen])
    arguments = ["--models=VGG-16", "--devices=2", "--dockers=false"]
    with contextlib.nullcontext() if change is None else change.make():
        code = command.run(reproduce_fd_dps.main, reproduce_fd_dps.FLAGS, arguments)
    assert code == (0 if change is None else 1)


def test_what_is_put_in_is_compared_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another link was seen only if a row changed by 2 %."""
    assert changed_inputs(stored(STORED)) == []
    monkeypatch.setattr(operator_experiments, "DOCKER_BANDWIDTH", 3.03e9)
    assert changed_inputs(stored(STORED)) == ["links, bytes/s: between dockers is 3030000000.0, stored 3000000000.0"]


def test_another_document_is_a_difference(tmp_path: pathlib.Path) -> None:
    before = holding(row(Setting("VGG-16", 4)))
    write(before.rows, before.claims, {}, [], tmp_path)
    assert changed_document(before, tmp_path) == []
    (tmp_path / "fd_dps.md").write_text("nothing")
    assert changed_document(before, tmp_path) == [f"{tmp_path / 'fd_dps.md'}: isn't what the stored rows give"]


def test_steps_of_towers_are_as_stored() -> None:
    """Updates that are traced once for each kind of parameter changed all graphs, and only thorough tests saw it."""
    before = stored(STORED)
    small = before._replace(sweep=[one for one in before.sweep if one.samples == 256])
    assert changed_sweep(small, operator_sweep.towers(256)) == []


def test_other_steps_of_towers_are_differences() -> None:
    whole = stored(STORED)
    assert changed_sweep(whole, whole.sweep) == []
    first, second = whole.sweep[:2]
    before, longer = whole._replace(sweep=[first, second]), first.copies * 1.03
    assert changed_sweep(before, [first._replace(copies=longer), second._replace(devices=3)]) == [
        f"towers, {first.samples} samples, 2 devices: copies: {first.copies:.6g} is stored, {longer:.6g} computed",
        f"towers, {second.samples} samples, 3 devices: isn't stored",
        f"towers, {second.samples} samples, {second.devices} devices: is stored only",
    ]


def test_the_unit_of_steps_is_the_faster_form_of_data_parallelism() -> None:
    """In units of copies that all make all updates three steps were reproduced, by what DP's graph has, too."""
    one = row(Setting("PNASNet-mobile", 4), own_statistics=2.0, split_by_batch=1.8, fast_t=1.8)
    assert (one.unit, one.over("fast_t")) == ("split_by_batch", 1.0)
    assert row().unit == "own_statistics"


def test_updates_can_be_shared_out() -> None:
    assert Outcome(2.0, True, 1e9, used=4, update_seconds=0.4).shared_seconds == pytest.approx(1.7)
    one = outcome(row(fd_dps=1.9), "own_statistics", update_seconds=0.4)
    text = " ".join(reasons([one]).split())
    ahead = "ahead in 1 of 1 rows, as fast in 0, behind in 0"
    assert f"with replicas' own statistics: 5.0% to 5.0% faster; {ahead} (none)" in text
    behind = "ahead in 0 of 1 rows, as fast in 0, behind in 1"
    assert f"FD-DPS would be, with the same step: {ahead}; with replicas' own statistics: {behind}; it stays" in text


@pytest.mark.parametrize(("ours", "expected"), [(0.98, 1), (0.995, 0), (1.005, 0), (1.02, -1)])
def test_steps_within_one_per_cent_are_equally_fast(ours: float, expected: int) -> None:
    """A tenth of a per cent had counted as behind data parallelism, and as ahead of it."""
    assert operator_claims.sign(ours, 1.0) == expected


# ---- graphs


def test_all_settings() -> None:
    assert len(settings(list(MODELS))) == len(MODELS) * (len(DEVICES) + 1)
    assert settings(["VGG-16"], (2, 4)) == [Setting("VGG-16", 2), Setting("VGG-16", 4)]
    assert str(settings(["VGG-16"], (8,))[1]) == "VGG-16, 8 devices in 2 dockers"


def test_dockers_have_slower_links_between_them() -> None:
    cluster = cluster_of(8, 2)
    assert cluster.link(0, 3).bandwidth > cluster.link(3, 4).bandwidth
    assert {device.memory_bytes for device in cluster.devices} == {MEMORY_BYTES}


def small() -> keras.Model:
    images = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="conv")(images)
    x = keras.layers.BatchNormalization(name="norm")(x)
    model = keras.Model(images, keras.layers.Dense(5, name="logits")(keras.layers.Flatten(name="flat")(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_a_flat_step_is_whole_and_has_its_shapes() -> None:
    step = flatten_step(small(), 16, dapple.Plan.manual([], [[0]], 1, 16), cluster_of(1))
    graph = Graph(step.graph)
    ops = {node.op for node in step.graph.node}
    assert {"Conv2D", "Conv2DBackpropFilter", "MatMul", "AssignSubVariableOp", "AssignAddVariableOp"} & ops
    assert not [node for node in step.graph.node if "f" in node.attr and node.op.endswith("PartitionedCall")]
    assert any(CALL_ATTR in node.attr for node in step.graph.node)
    conv = next(node for node in step.graph.node if node.op == "Conv2D")
    assert step.shapes[data_inputs(conv)[0]] == (16, 8, 8, 3)
    assert graph.topological()


def test_the_graph_of_data_parallelism_cuts_samples_only() -> None:
    """Vectors of channels were taken for samples, by [4] or [1, 1, 1, 4]: opponents' steps were up to 7 % slower."""
    step = flatten_step(small(), 16, dapple.Plan.manual([], [[0]], 1, 16), cluster_of(1))
    topology = Topology.of(cluster_of(2))
    start = by_batch(variant_of(build_op_graph(step.graph, topology, OperatorCosts.p100(), step.shapes), topology, {}))
    assert start is not None
    vectors = 0
    for node in step.graph.node:
        shapes = [step.shapes.get(ref) for ref in (Ref(node.name), *data_inputs(node))]
        vectors += shapes[0] == (4,)
        if node.name in start.variant.splits:
            assert any(shape and shape[0] == 16 for shape in shapes), node.name
    assert vectors > 10 and len(start.variant.splits) > 20


def test_graphs_are_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(MODELS["VGG-16"], batch=4, build=small)
    made = flat_step(model, tmp_path)
    kept = dataclasses.replace(model, build=lambda: pytest.fail("it is there already"))
    again = flat_step(kept, tmp_path)
    assert again.graph == made.graph and again.shapes == made.shapes and again.seconds == made.seconds
    # Another version of what it is made by is made anew, and replaces it.
    monkeypatch.setattr(operator_models, "_digest", lambda: "other")
    flat_step(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["VGG-16-4-other.json", "VGG-16-4-other.pb"]


def test_graphs_are_made_anew_after_changes_of_what_makes_steps_but_not_of_searches() -> None:
    """Only files directly in the two packages counted, of which most lie deeper."""
    root = pathlib.Path(__file__).parents[1]
    names = {path.resolve().relative_to(root).as_posix() for path in operator_models.sources()}
    assert {
        "graph_passes/passes/join.py",
        "dapple_tf/frontend/capture.py",
        "dapple_tf/execution/step_passes.py",
    } <= names
    assert {"dapple_tf/operators/step_placer.py", "models/resnet.py", "tools/evaluation/operator_models.py"} <= names
    assert "dapple_tf/operators/fd_dps.py" not in names


# ---- the command


@pytest.fixture(scope="module")
def vgg(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What the command leaves for VGG-16 on two devices."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator_models, "CACHE", folder / "cache")
        arguments = ["--models=VGG-16", "--devices=2", "--jobs=1", "--search_seconds=60"]
        arguments += ["--write", f"--directory={folder}"]
        assert command.run(reproduce_fd_dps.main, reproduce_fd_dps.FLAGS, arguments) == 0
    return folder


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_leaves_tables(vgg: pathlib.Path) -> None:
    document = (vgg / "fd_dps.md").read_text()
    assert "| VGG-16 | 2 |" in document
    assert "| Conv1_2bp | 36.5 |" in document
    (row,), *_ = stored(vgg / "fd_dps.json")
    seconds = {name: outcome.seconds for name, outcome in row.outcomes.items()}
    assert seconds["fd_dps"] == min(seconds.values())
    assert [line.parameter_bytes for line in row.lines.values()] == [  # 3 x 3 x 3 x 64 weights and 64 biases, and so on
        *(7_168, 147_712, 147_712, 0, 0, 411_058_176)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models=lenet"], "--models: unknown lenet; choose from VGG-16"),
        (["--devices=2,x"], "--devices: '2,x'; give numbers from 2"),
        (["--write", "--models=VGG-16"], "give another --directory"),
        (["--write", "--missing", "--render"], "--missing and --render exclude each other"),
        (["--render"], "--missing and --render write; add --write"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(reproduce_fd_dps.main, reproduce_fd_dps.FLAGS, arguments) == 1
    assert message in capsys.readouterr().err


def test_margins_are_over_opponents_with_the_improvement_rounds_of_fd_dps() -> None:
    """They were over FastT as published, so that the rounds alone, which its paper doesn't have, made some of them."""
    one = row(Setting("ResNet-200", 8), fast_t=2.0, fast_t_rounds=1.7, mp_dps=1.8, mp_dps_rounds=1.6, fd_dps=1.53)
    claims = {claim.name.partition(": ")[2]: claim.ours for claim in claims_of([one])}
    assert claims["FastT's step over DP's"] == "1.00"
    assert claims["FD-DPS faster than FastT"] == "10.0%"
    assert claims["FD-DPS faster than MP-DPS"] == "4.4%"


def test_a_step_that_is_nearly_that_of_data_parallelisms_graph_counts_as_it() -> None:
    """Inception-V3's on four devices was near the paper's, 0.13 % from the graph that FastT's was held to be."""
    one = row(Setting("VGG-16", 4), split_by_batch=2.17, fd_dps=2.165, fast_t=2.17, mp_dps=2.16)
    claims = {claim.name.partition(": ")[2]: claim for claim in claims_of([one])}
    merged = claims["FastT, MP-DPS and FD-DPS's step over DP's"]
    assert (merged.ours, merged.paper, merged.verdict) == ("1.08", "1.12; 1.08; 1.02", "not reproduced")
    one = row(Setting("VGG-16", 4), split_by_batch=2.17, fd_dps=1.9, fast_t=2.1, mp_dps=2.16)
    claims = {claim.name.partition(": ")[2]: claim for claim in claims_of([one])}
    assert claims["MP-DPS's step over DP's"].verdict == "reproduced otherwise"


def test_one_devices_steps_are_one_figure_of_which_the_worst_counts() -> None:
    rows = [row(Setting("ResNet-200", 4), single=4.7), row(Setting("ResNet-50", 4))]
    (claim,) = (claim for claim in claims_of(rows) if claim.name.startswith("one device's step"))
    assert (claim.verdict, claim.name) == ("not reproduced", "one device's step over DP's, in 2 rows")
    assert claim.reason.startswith("in 1 of 2 rows within 25 %")
