from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import shutil
from typing import Any

import pytest
from selection import thorough

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import (
    paper_experiments,
    paper_figure_11,
    paper_figures,
    paper_models,
    paper_sensitivity,
    paper_verdicts,
    reproduce_dapple,
)
from dapple_tf.tools.evaluation import paper_outcomes as outcomes
from dapple_tf.tools.evaluation.paper_document import files
from dapple_tf.tools.evaluation.paper_models import CONFIGS, MODELS, ROWS, TABLE_4, TABLE_6, TABLE_7
from dapple_tf.tools.evaluation.paper_parts import differences, parts, rounded, verdicts
from dapple_tf.tools.evaluation.paper_transfers import communication_ratio, round_robin
from dapple_tf.tools.evaluation.sensitivity import Change

pytestmark = pytest.mark.slow  # plans and simulates rows of the paper

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
STORED: dict[str, Any] = json.loads((RESULTS / "results.json").read_text())
"""What `make results` compares with."""


def _run(*arguments: str) -> int:
    return command.run(reproduce_dapple.main, reproduce_dapple.FLAGS, arguments)


# ---- data


def test_bert_48_outputs_are_without_the_mask() -> None:
    profile = MODELS["bert-48"].corrected()
    assert profile.layers[profile.index["layer_7"]].output_bytes.at(2) == pytest.approx(2 * 384 * 1024 * 4)
    mask = 2 * 384 * 384 * 4
    assert profile.layers[profile.index["attention_mask"]].output_bytes.at(2) == pytest.approx(mask)
    forward, backward = profile.crossing[profile.index["layer_7"]]
    assert forward.at(2) == pytest.approx(2 * 384 * 1024 * 4 + mask)
    assert backward.at(2) == pytest.approx(2 * 384 * 1024 * 4)


def test_vgg_19_has_the_parameters_of_vgg_19() -> None:
    assert MODELS["vgg-19"].corrected().parameter_bytes / 4e6 == pytest.approx(143.67, abs=0.05)
    pooled = MODELS["vgg-19"].corrected()
    size = pooled.layers[pooled.index["MaxPool2d_5"]].output_bytes.at(32)
    assert size == pytest.approx(32 * 7 * 7 * 512 * 4, rel=0.03)


def test_gnmt_16_backward_times_move_and_their_sum_stays() -> None:
    published, corrected = MODELS["gnmt-16"].published(), MODELS["gnmt-16"].corrected()
    assert corrected.total("backward").at(64) == pytest.approx(published.total("backward").at(64))
    ratios = [
        layer.backward.at(64) / layer.forward.at(64)
        for layer in corrected.layers
        if layer.name.startswith(("LSTM", "EmuBidir", "Recurrent", "Classifier"))
    ]
    assert len(ratios) == 17
    assert all(1.4 < ratio < 2.1 for ratio in ratios)


def test_amoeba_36_labels_go_to_the_loss() -> None:
    published, corrected = MODELS["amoeba-36"].published(), MODELS["amoeba-36"].corrected()
    labels = [tensor for tensor in corrected.tensors if tensor.bytes.at(1) == 4004 and tensor.producer == 0]
    assert [tensor.consumers for tensor in labels] == [(published.index["softmax_loss"],)]
    assert published.crossing[0] == corrected.crossing[0]


def test_resnet_50_keeps_nothing_twice() -> None:
    profile = MODELS["resnet-50"].profile()
    assert {layer.residual_bytes.at(128) for layer in profile.layers if "inplace" in layer.name} == {0.0}
    assert profile.total("residual_bytes").at(128) == pytest.approx(11.6e9, rel=0.01)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.memory is not None])
def test_memory_adds_up_to_table_1(name: str) -> None:
    model = MODELS[name]
    profile = model.profile()
    slots = sum(layer.slot_bytes for layer in profile.layers)
    stored = 2 * profile.parameter_bytes + slots
    assert stored == pytest.approx(profile.parameter_bytes / 4 * model.bytes_per_parameter)
    residuals = profile.total("residual_bytes").at(model.samples)
    assert residuals > 0
    assert stored + residuals == pytest.approx(model.memory)


def test_published_profiles_are_left_alone() -> None:
    for model in MODELS.values():
        assert model.corrected().batch_sizes == model.published().batch_sizes == (model.samples,)
        assert model.corrected().total("forward") == model.published().total("forward")


def test_apply_follows_from_table_5() -> None:
    assert paper_models.apply_share() == pytest.approx(0.476, abs=0.001)
    total = sum(layer.apply_seconds for layer in MODELS["bert-48"].profile().layers)
    assert total == pytest.approx(0.476 * (0.1292 + 0.2146), rel=0.01)


def test_deep_bert_of_48_layers_is_bert_48() -> None:
    assert paper_models.deep_bert(48).layers == paper_models.measured_bert().layers
    ours, theirs = paper_models.deep_bert(48).crossing, paper_models.measured_bert().crossing
    assert [cost.at(2) for cut in ours for cost in cut] == pytest.approx([cost.at(2) for cut in theirs for cost in cut])
    assert len(paper_models.deep_bert(428).layers) == 428 + 5


# ---- the paper's plans


def test_there_are_the_rows_of_the_paper() -> None:
    assert len(TABLE_4) == 18
    assert len(TABLE_6) == 4
    assert len({row.key for row in ROWS}) == 22


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_plans_of_the_paper_are_legal(row: paper_models.PaperRow) -> None:
    profile = MODELS[row.model].corrected()
    partitions = [*paper_models.paper_partitions(row, profile)]
    for partition in (*partitions, *paper_models.pipedream_partitions(row, profile)):
        assert sum(partition.replicas) == CONFIGS[row.config].num_devices
        assert len(partition.cuts) == len(partition.replicas) - 1
        assert list(partition.cuts) == sorted(set(partition.cuts))
        assert min(partition.cuts, default=0) >= 0 and max(partition.cuts, default=0) < len(profile.layers) - 1


def _layers(partition: paper_models.Partition, model: str, prefix: str) -> list[int]:
    """How many layers of this kind each stage has."""
    names = [layer.name for layer in MODELS[model].corrected().layers]
    bounds = [0, *(cut + 1 for cut in partition.cuts), len(names)]
    return [sum(n.startswith(prefix) for n in names[a:b]) for a, b in itertools.pairwise(bounds)]


def test_splits_count_what_the_paper_counts() -> None:
    rows = {(row.table, row.model, row.config): row for row in ROWS}

    def first(table: int, model: str, config: str, prefix: str) -> list[int]:
        partition = paper_models.paper_partitions(rows[table, model, config], MODELS[model].corrected())[0]
        return _layers(partition, model, prefix)

    assert first(4, "bert-48", "A", "layer_") == [23, 25]
    assert first(4, "bert-48", "B", "layer_") == [3] * 16
    assert first(4, "xlnet-36", "A", "Layer_") == [18, 18]
    assert first(4, "amoeba-36", "A", "cell_")[1] == 12
    assert first(4, "amoeba-36", "B", "cell_")[1] == 9
    assert first(4, "vgg-19", "C", "Conv2d") == [13, 3]
    assert first(4, "gnmt-16", "C", "LSTM") == [0, *[1] * 7, 0, *[1] * 7]
    assert first(6, "bert-large", "A", "layer_") == [12, 12]
    dream = paper_models.pipedream_partitions(rows[6, "bert-large", "A"], MODELS["bert-large"].corrected())[0]
    assert _layers(dream, "bert-large", "layer_") == [2, 9, 3, 3, 3, 4]


def test_straight_pipelines_are_balanced() -> None:
    profile = MODELS["xlnet-36"].corrected()
    stages = paper_models.straight(profile, 4)
    bounds = [0, *(cut + 1 for cut in stages.cuts), len(profile.layers)]
    times = [
        sum(layer.forward.at(1) + layer.backward.at(1) for layer in profile.layers[start:stop])
        for start, stop in itertools.pairwise(bounds)
    ]
    assert max(times) <= 1.05 * sum(times) / 4


# ---- results


CHEAP = (
    "figure 8",
    "table 5",
    "table 7: 1 device",
    "table 3: vgg-19",
    "gain over ACR: gnmt-16",
    "table 4: vgg-19/A",
    "figure 11, flat ring: bert-48",
)


@pytest.mark.parametrize("name", [name if name in CHEAP else thorough(name) for name in parts()])
def test_a_part_gives_what_is_stored(name: str) -> None:
    assert list(differences(STORED["parts"][name], rounded(parts()[name]()), name)) == []


def test_verdicts_are_those_of_the_stored_numbers() -> None:
    assert list(differences(STORED["claims"], verdicts(STORED["parts"]), "claims")) == []


def test_documents_are_those_of_the_stored_numbers() -> None:
    made = files(STORED["parts"])
    assert [name for name, text in made.items() if (RESULTS / name).read_text() != text] == []
    assert "FAILED" not in made["dapple.md"] and made["dapple.md"].count("## ") > 10


@pytest.mark.thorough
def test_plots_are_those_of_the_stored_numbers(tmp_path: pathlib.Path) -> None:
    from dapple_tf.tools.evaluation.paper_plots import draw

    draw(STORED["parts"], tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn and drawn == {name: (RESULTS / name).read_bytes() for name in drawn}


def test_every_part_is_stored_and_every_row_has_claims() -> None:
    assert set(STORED["parts"]) == {*parts(), "sensitivity"}
    for row in ROWS:
        assert any(name.startswith(row.key) for name in STORED["claims"])
    for line in TABLE_7:
        assert f"{line.key}: layers of the largest BERT" in STORED["claims"]
    allowed = {*paper_verdicts.COUNTED, paper_verdicts.FITTED, paper_verdicts.HOLDS, paper_verdicts.FAILS}
    assert {claim["verdict"] for claim in STORED["claims"].values()} <= allowed


def test_what_is_not_reproduced_has_a_reason() -> None:
    for claim in paper_figures.claims(STORED["parts"]):
        assert claim.why or claim.verdict in (paper_verdicts.REPRODUCED, paper_verdicts.HOLDS), claim


# ---- bands


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (1.00, "reproduced"),
        (1.09, "reproduced"),
        (0.91, "reproduced"),
        (1.12, "near"),
        (0.88, "near"),
        (1.30, "not reproduced"),
        (0.70, "not reproduced"),
        (9.00, "not reproduced"),
    ],
)
def test_bands_are_on_both_sides(ours: float, verdict: str) -> None:
    for paper in (0.03, 1.0, 428.0):
        assert paper_verdicts.USUAL.verdict(paper, ours * paper) == verdict


def test_a_band_that_is_a_little_wider_has_another_text() -> None:
    """Its text is all of a band that is stored with a claim."""
    assert paper_verdicts.USUAL.text() == "10%, 25%"
    assert paper_verdicts.Band(0.103, 0.254).text() == "10.3%, 25.4%"


def test_bands_include_their_ends() -> None:
    band = paper_verdicts.Band(0.1, 0.25)
    assert [band.verdict(1.0, ours) for ours in (1.1, 0.9, 1.25, 0.75)] == ["reproduced"] * 2 + ["near"] * 2


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        (1.15, 1.10, "reproduced"),
        (1.15, 1.07, "near"),  # a gain of 7 % isn't half of 15 %
        (1.15, 1.04, "not reproduced"),
        (1.15, 1.31, "near"),
        (1.02, 0.99, "not reproduced"),  # slower, where the paper is faster
        (0.80, 0.76, "reproduced"),
        (0.95, 1.01, "not reproduced"),
        (0.95, 0.88, "near"),
        (1.00, 1.08, "reproduced"),  # no gain to compare with
        (2.00, 1.60, "near"),
        (1.05, 1.11, "near"),
    ],
)
def test_ratios_have_the_gain_of_the_papers(paper: float, ours: float, verdict: str) -> None:
    assert paper_verdicts.USUAL.verdict(paper, ours, ratio=True) == verdict
    assert paper_verdicts.number("x", paper, ours).verdict == verdict
    assert paper_verdicts.number("x", paper, ours, " GB").verdict == paper_verdicts.USUAL.verdict(paper, ours)


def test_one_other_setting_counts_and_the_rest_is_shown() -> None:
    shown = {"in B": 2.0, "in D": 3.0}
    claim = paper_verdicts.number("x", 2.0, 4.0, why="too large", otherwise=("in C", 2.1), shown=shown)
    assert claim.verdict == "reproduced otherwise"
    assert claim.ours == "4x; 2.1x in C; 2x in B; 3x in D"
    assert claim.why == "in C; too large"
    assert paper_verdicts.number("x", 2.0, 4.0, otherwise=("in C", 3.0), shown=shown).verdict == "not reproduced"
    assert paper_verdicts.number("x", 2.0, 2.0, otherwise=("in C", 3.0), shown=shown).ours == "2x"


def test_the_worst_of_several_verdicts_counts_once() -> None:
    good, bad = paper_verdicts.number("x", 2.0, 2.0), paper_verdicts.number("x", 2.0, 4.0, why="too large")
    claim = paper_verdicts.joined("both", [("GPipe", good), ("DAPPLE", bad)])
    assert (claim.verdict, claim.why) == ("not reproduced", "too large")
    assert (claim.paper, claim.ours) == ("GPipe 2x; DAPPLE 2x", "GPipe 2x; DAPPLE 4x")


def test_what_was_fitted_is_not_counted() -> None:
    claim = paper_verdicts.number("x", 2.0, 2.0, fitted="from this line")
    assert claim.verdict == "fitted" and claim.verdict not in paper_verdicts.COUNTED


# ---- claims


def test_figure_11_has_one_setting_for_all_its_claims() -> None:
    """Every claim stands in every setting; "otherwise" is one and the same."""
    table = paper_figure_11.by_setting(STORED["parts"])
    claims = list(paper_figure_11.claims(STORED["parts"]))
    assert len(table) == len(claims) + 1 and {len(row) for row in table} == {2 + len(paper_figure_11.SETTINGS)}
    assert table[-1][0] == "together"
    for column in range(2, len(table[0])):
        tally = sum(int(part.split()[0]) for part in table[-1][column].split(", "))
        assert tally == len(claims)
    used = {claim.why.split("; ")[0] for claim in claims if claim.verdict == paper_verdicts.OTHERWISE}
    assert used <= {f"at {paper_figure_11.OTHER.batch}"}
    assert (paper_figure_11.OTHER.plans, paper_figure_11.TEXT.plans) == ("ours", "ours")


def test_data_parallelism_may_leave_devices_idle_as_pipelines_may() -> None:
    """Over 10 Gbit/s two batches of GNMT-16's profile are fastest on one device, though pipelines were over all 16."""
    row = dataclasses.replace(paper_experiments.row_of("gnmt-16", "C"), batch=128)
    profile = paper_experiments.in_proportion(MODELS[row.model].profile())
    on_all, fastest = (
        outcomes.data_parallel(profile, CONFIGS[row.config], row.batch, (1, 2), idle=idle) for idle in (False, True)
    )
    assert on_all is not None and fastest is not None
    assert (on_all.plan.replicas, fastest.plan.replicas) == ((16,), (1,))
    assert fastest.seconds < on_all.seconds / 3
    # Where all are the fastest it has all.
    row = paper_experiments.row_of("bert-48", "A")
    same = outcomes.data_parallel(MODELS[row.model].profile(), CONFIGS[row.config], row.batch, (1, 2, 4), idle=True)
    assert same is not None and same.plan.replicas == (16,)


def test_strong_data_parallelism_may_leave_devices_idle_too() -> None:
    """GNMT-16 over 10 Gbit/s in chunks: 1878 ms on three devices, 1910 on sixteen."""
    record = STORED["parts"]["opponents, table 4: gnmt-16/C"]["data parallelism"]
    assert set(record["replicas"].split(":")) == {"3"}


def test_no_column_of_data_parallelism_is_faster_than_its_best() -> None:
    records = [record for record in STORED["parts"].values() if "data parallelism" in record and "overlap" in record]
    for key in ("figure 14: gnmt-16", "figure 14: bert-48", "figure 14: xlnet-36"):
        records += [*STORED["parts"][key]["devices"].values(), STORED["parts"][key]["ten in one server"]]
    compared = 0
    for record in records:
        for column in ("overlap", "no overlap"):
            if record.get(column) is not None:
                assert record["data parallelism"]["ms"] <= record[column]["ms"]
                compared += 1
    assert compared > 50


def test_figure_11_is_against_data_parallelism_at_its_best_and_on_all_devices() -> None:
    """With devices left idle config A was reproduced, on all, as in the paper, nothing: the first had counted."""
    best, on_all = (
        paper_figure_11.numbers(STORED["parts"], paper_figure_11.TEXT, opponent)
        for opponent in (paper_figure_11.BEST, paper_figure_11.ALL)
    )
    claims = {claim.name: claim for claim in paper_figure_11.claims(STORED["parts"])}
    document = " ".join(files(STORED["parts"])["dapple.md"].split())
    for what, (paper, ours) in best.items():
        assert ours < on_all[what][1]
        claim = claims[f"figure 11: {what}, GBS 128"]
        verdict = paper_verdicts.USUAL.verdict(paper, ours, ratio=True)
        assert claim.verdict == paper_verdicts.NOT
        assert claim.ours.startswith(f"{ours:.4g}x; {on_all[what][1]:.4g}x over DP on all devices; ")
        assert f"{what}: {ours:.4g}x, {verdict}, and {on_all[what][1]:.4g}x, not reproduced" in document


@pytest.mark.parametrize("way", paper_figure_11.WAYS)
def test_a_number_of_figure_11_is_reproduced_only_in_all_ways(way: str) -> None:
    """Only our plans had reached config A's, 1.746x; with the paper's it is 1.137x."""
    same = dict.fromkeys(paper_figure_11.WAYS, 1.7)
    assert paper_figure_11._claim("x", 1.71, same, {}).verdict == paper_verdicts.REPRODUCED
    off = {**same, way: 1.137}
    claim = paper_figure_11._claim("x", 1.71, off, {})
    assert claim.verdict == paper_verdicts.NOT and claim.why.startswith("reached only ")
    assert paper_figure_11._claim("x", 1.71, off, same).verdict == paper_verdicts.OTHERWISE
    assert paper_figure_11._claim("x", 1.71, off, off).verdict == paper_verdicts.NOT


def test_verdicts_that_hang_on_a_limit_are_told() -> None:
    record = _scaling(0.897, 1.0)
    text = paper_figures.other_steps({"figure 14: bert-48": record})
    assert text.startswith('"scales worse" of bert-48 passes by 10.30% against 10%; ')
    assert text.endswith('at 5% none would fail; at 12% "scales worse" of bert-48 would fail')
    text = paper_figures.other_steps({"figure 14: bert-48": _scaling(0.92, 1.0)})
    assert text == 'at 5% "smoothly" of bert-48 would fail; at 12% none would fail'
    free = _scaling(0.7, 0.85)
    for line in (*free["devices"].values(), free["ten in one server"]):
        line["data parallelism"] = {"ms": 8.0 / 0.85 if line is free["ten in one server"] else 10.0}
    assert paper_figures.other_steps({"figure 14: bert-48": free}).startswith(
        '"scales worse" of bert-48 fails by 5.88%, and would hold by 17.65% on all devices; '
    )
    claim, _ = paper_figures.claims({"figure 14: bert-48": free})
    assert claim.verdict == paper_verdicts.NOT, "the worse of both counts"


def test_opponents_that_are_ahead_within_the_tie_are_named() -> None:
    plan = {"ms": 100.0, "plan": "8:8", "M": 4}
    records = {"ours": plan, "HPGO": {**plan, "ms": 99.6}, "Megatron": {**plan, "ms": 99.5}, "PipeDream": None}
    assert paper_figures.ahead({"opponents, table 4: bert-48/A": records}) == {"bert-48/A": ("Megatron", 0.995)}
    equal = {"ours": plan, "HPGO": {**plan, "ms": 99.96}}
    assert paper_figures.ahead({"opponents, table 4: bert-48/A": equal}) == {}


def test_table_3_is_judged_where_both_policies_are_two_schedules() -> None:
    same = {"P_A warm-up": "2:1", "P_B warm-up": "2:1", "P_A ms": 5.0, "P_B ms": 5.0}
    apart = {**same, "P_B warm-up": "3:1"}
    steps = {"2": same, "4": {**apart, "P_B ms": 7.0}, "8": {**apart, "P_B ms": 6.0}}
    assert paper_figures.judged(steps) == "8"
    assert paper_figures.judged({"2": same}) is None
    for model in paper_models.TABLE_3:
        assert paper_figures.judged(STORED["parts"][f"table 3: {model}"]["steps"]) not in (None, "1", "2")


def test_one_computation_is_one_claim() -> None:
    claims = paper_figures.claims(STORED["parts"])
    ratios = [claim for claim in claims if claim.name.endswith("ACR")]
    assert len({claim.name for claim in claims}) == len(claims)
    assert len({claim.ours.split("; ")[0] for claim in ratios}) == len(ratios) == 9
    (vgg,) = [claim for claim in ratios if "vgg-19" in claim.name]  # 0.16 is 0.40 at 2.5 times the speed.
    assert vgg.paper == "15:1 in C 0.4; 14:2 in A (section 6.4) 0.16"
    assert {row.key for row in ROWS} - {row.key for row in paper_figures.rows_once()} == {
        "table 6: xlnet-36/A",
        "table 6: amoeba-36/A",
    }


def test_better_rows_have_plans_of_the_paper_that_fit() -> None:
    better = {row.key for row, _ in paper_figures.better(STORED["parts"])}
    unfit = {row.key for row in paper_figures.unfit(STORED["parts"])}
    assert better and not unfit


def _scaling(ten: float, ten_alone: float, recompute: str = "none") -> dict[str, Any]:
    """Returns a record of figure 14 by the efficiencies of ten devices; that of eight is 1."""
    idle = {"data parallelism": None}
    eight = {"ours": {"ms": 10.0, "recompute": recompute}, "overlap": {"ms": 10.0}, **idle}
    last = {"ours": {"ms": 8.0 / ten, "recompute": "none"}, "overlap": {"ms": 8.0 / ten}, **idle}
    alone = {"ours": {"ms": 8.0 / ten_alone}, "overlap": {"ms": 8.0 / ten_alone}, **idle}
    return {"single ms": 80.0, "devices": {"8": eight, "10": last}, "ten in one server": alone}


@pytest.mark.parametrize(
    ("record", "parallel", "hybrid", "why"),
    [
        (_scaling(0.7, 1.0), "reproduced", "not reproduced", "with ten devices in one server it falls by 0.0%"),
        (_scaling(0.85, 0.87), "not reproduced", "not reproduced", "with ten devices in one server it falls by 13.0%"),
        (_scaling(0.95, 1.0), "not reproduced", "reproduced", ""),
        (_scaling(1.26, 1.3, "boundary"), "not reproduced", "not reproduced", "eight devices have too little memory"),
    ],
)
def test_figure_14_can_fail_on_both_sides(record: Any, parallel: str, hybrid: str, why: str) -> None:
    claims = [claim for claim in paper_figures.claims({"figure 14: bert-48": record})]
    assert [claim.verdict for claim in claims] == [parallel, hybrid]
    assert claims[1].why.startswith(why)


# ---- differences


@pytest.mark.parametrize(
    ("stored", "fresh", "said"),
    [
        (100.0, 101.5, []),
        (100.0, 103.0, ["x: 100 is stored, 103 now"]),
        (100.0, 97.0, ["x: 100 is stored, 97 now"]),
        (0.0, 0.0, []),
        (0.0, 1e-3, ["x: 0 is stored, 0.001 now"]),
        ("8:8", "7:9", ["x: 8:8 is stored, 7:9 now"]),
        (True, False, ["x: True is stored, False now"]),
        (None, 1.0, ["x: None is stored, 1.0 now"]),
        ({"a": 1}, {}, ["x: a: is stored, but not computed"]),
        ({}, {"a": 1}, ["x: a: isn't stored"]),
        ([1.0, 2.0], [1.0, 2.1], ["x: 1: 2 is stored, 2.1 now"]),
        ({"first": "some text"}, {"first": "another"}, []),
    ],
)
def test_differences(stored: object, fresh: object, said: list[str]) -> None:
    assert list(differences(stored, fresh, "x")) == said


# ---- sensitivity


QUICK = (
    *("the paper's 3.23x", "the paper's ACR", "the paper's throughput", "the gain that", "plans that"),
    *("3 % less memory", "the simulator's tasks"),
)


@pytest.mark.parametrize(
    "change",
    [change if change.text.startswith(QUICK) else thorough(change) for change in paper_sensitivity.CHANGES],
    ids=lambda change: change.text,
)
def test_a_change_is_noticed(change: Change) -> None:
    assert paper_sensitivity.tried(change, STORED["parts"])["fails"]


def test_all_changes_were_noticed_and_nothing_is_without_one() -> None:
    assert len(paper_sensitivity.CHANGES) >= 10
    assert set(STORED["parts"]["sensitivity"]) == {change.text for change in paper_sensitivity.CHANGES}
    assert all(record["fails"] for record in STORED["parts"]["sensitivity"].values())
    nothing = dataclasses.replace(paper_sensitivity.CHANGES[0], parts=("table 5",), make=_unchanged)
    assert not paper_sensitivity.tried(nothing, STORED["parts"])["fails"]


def _unchanged() -> Any:
    return contextlib.nullcontext()


# ---- experiments


def test_round_robin_has_a_tail() -> None:
    """M = 2 on stage 0's two devices: F from 0 to 2 on both, stage 1 from 2 to 8, the last backward from 8 to 12."""
    assert [round_robin(count) for count in (1, 2, 4)] == [9.0, 12.0, 18.0]


def test_the_acr_is_that_of_the_definition() -> None:
    """XLNet-36 in B: what crosses the cut, both ways, at 3.125 GB/s, to half of the model's F and B."""
    row = paper_experiments.row_of("xlnet-36", "B")
    profile = MODELS["xlnet-36"].profile()
    (partition,) = paper_models.paper_partitions(row, profile)
    crossing = sum(cost.at(1) for cost in profile.crossing[partition.cuts[0]])
    whole = profile.total("forward").at(1) + profile.total("backward").at(1)
    assert communication_ratio(partition, profile, CONFIGS["B"]) == pytest.approx(crossing / 3.125e9 / (whole / 2))


def test_a_plan_of_the_paper_that_does_not_fit_is_told() -> None:
    row = paper_experiments.row_of("amoeba-36", "B")
    profile = MODELS[row.model].profile()
    theirs = paper_models.paper_partitions(row, profile)
    # A limit of 64, which binds straight plans only, had made PipeDream's recompute.
    assert outcomes.micro_batch_counts(profile, row.batch, theirs) == (1, 2, 4, 8, 11, 16, 32, 64, 128)
    same = functools.partial(outcomes.best, theirs, profile, CONFIGS["B"], row.batch, (8,), schedules=("dapple_a",))
    outcome = same(short_last=False)
    assert outcome is not None and not outcome.fits
    assert outcome.note == "stage 0 needs 17.3 of 15.0 GB for 1 slice of 2 samples"
    # "Doesn't fit" had been a limit of the simulator's: a step may end with a micro-batch of less than eleven samples.
    outcome = same()
    assert outcome is not None and outcome.fits
    assert (outcome.plan.micro_batches, outcome.plan.global_batch_size) == (12, 132)


def test_columns_have_the_same_schedules() -> None:
    for row in ROWS:
        record = STORED["parts"][row.key]
        for column in ("ours", "paper", "overlap", "no overlap", "gpipe", "pipedream"):
            assert record[column] is None or record[column]["schedule"] in (*outcomes.SAME, "-"), (row.key, column)


# ---- the command


@pytest.fixture
def copied(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with what is stored, but for the plots."""
    for path in RESULTS.iterdir():
        if path.suffix in (".json", ".csv") or path.name == "dapple.md":
            shutil.copy(path, tmp_path)
    return tmp_path


def test_command_holds_what_is_stored_and_writes_nothing(
    copied: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    assert _run("--only=figure 8,table 5", f"--directory={copied}", "--jobs=1") == 0
    assert f"2 parts and {len(STORED['claims'])} claims are as stored" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


@pytest.mark.parametrize("factor", [1.03, 0.97])
def test_command_says_what_differs(factor: float, copied: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = json.loads(json.dumps(STORED))
    changed["parts"]["table 5"]["gpipe, M=2"]["samples/s"] *= factor
    name = "figure 12: the paper's plans faster than PipeDream's of Table 6 for all models, 2 x 8"
    changed["claims"][name]["verdict"] = "other"
    (copied / "results.json").write_text(json.dumps(changed))
    (copied / "table3.csv").write_text("by hand")
    assert _run("--only=table 5", f"--directory={copied}", "--jobs=1") == 1
    said = capsys.readouterr().out
    assert "table 5: gpipe, M=2: samples/s: " in said
    assert f"claims: {name}: verdict: other is" in said
    assert "table3.csv: isn't what the stored results give" in said
    assert "FAILED" in said


@pytest.mark.parametrize("name", ["table 1, bert-48", "table 2, C"])
def test_what_the_paper_says_of_models_and_clusters_is_compared_as_it_is(
    name: str, copied: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No result need differ by 2 % if a number of Table 1 or 2 does."""
    changed = json.loads(json.dumps(STORED))
    now = changed["limits"][name]
    changed["limits"][name] = "another"
    (copied / "results.json").write_text(json.dumps(changed))
    assert _run("--only=table 5", f"--directory={copied}", "--jobs=1") == 1
    assert f"limits: {name}: another is stored, {now} now" in capsys.readouterr().out


def test_stored_records_of_an_older_version_can_be_accepted(
    copied: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The document's part that couldn't be made from them failed with a KeyError, after all had been computed."""
    older = json.loads(json.dumps(STORED))
    del older["parts"]["table 5"]["gpipe, M=2"]["samples/s"]
    (copied / "results.json").write_text(json.dumps(older))
    assert _run("--only=table 5", f"--directory={copied}", "--jobs=1") == 1
    assert "what is stored has no 'samples/s'; write it with --write" in capsys.readouterr().out
    assert _run("--only=table 5", f"--directory={copied}", "--jobs=1", "--write") == 0
    assert (copied / "dapple.md").read_text() == (RESULTS / "dapple.md").read_text()


@pytest.mark.thorough
def test_command_writes_and_then_holds(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only=table 5,table 7,figure 8", f"--directory={tmp_path}"]
    assert _run(*arguments, "--write") == 0
    assert (tmp_path / "largest_bert.svg").stat().st_size > 100
    capsys.readouterr()
    assert _run(*arguments) == 0
    assert "6 parts" in capsys.readouterr().out


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--only=table 9") == 1
    assert "--only=table 9: no part has it in its name; the parts are: opponents, table 4:" in capsys.readouterr().err
