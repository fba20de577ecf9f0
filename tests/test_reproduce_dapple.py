from __future__ import annotations

import contextlib
import dataclasses
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
    paper_figures,
    paper_models,
    paper_sensitivity,
    reproduce_dapple,
)
from dapple_tf.tools.evaluation import paper_outcomes as outcomes
from dapple_tf.tools.evaluation.paper_models import CONFIGS, MODELS, ROWS, TABLE_4, TABLE_6, TABLE_7
from dapple_tf.tools.evaluation.paper_parts import differences, parts, rounded, verdicts
from dapple_tf.tools.evaluation.paper_report import files
from dapple_tf.tools.evaluation.paper_transfers import communication_ratio, round_robin

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
    pipedream = paper_models.pipedream_partition(row, profile)
    for partition in partitions + ([] if pipedream is None else [pipedream]):
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
    dream = paper_models.pipedream_partition(rows[6, "bert-large", "A"], MODELS["bert-large"].corrected())
    assert dream is not None
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
    allowed = {*paper_figures.COUNTED, paper_figures.FITTED, paper_figures.HOLDS, paper_figures.FAILS}
    assert {claim["verdict"] for claim in STORED["claims"].values()} <= allowed


def test_what_is_not_reproduced_has_a_reason() -> None:
    for claim in paper_figures.claims(STORED["parts"]):
        assert claim.why or claim.verdict in (paper_figures.REPRODUCED, paper_figures.HOLDS), claim


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
        assert paper_figures.USUAL.verdict(paper, ours * paper) == verdict


def test_bands_include_their_ends() -> None:
    band = paper_figures.Band(0.1, 0.25)
    assert [band.verdict(1.0, ours) for ours in (1.1, 0.9, 1.25, 0.75)] == ["reproduced"] * 2 + ["near"] * 2


def test_a_figure_of_another_setting_is_reproduced_otherwise() -> None:
    claim = paper_figures.number("x", 2.0, 4.0, why="too large", otherwise={"in B": 3.0, "in C": 2.1})
    assert claim.verdict == "reproduced otherwise"
    assert claim.ours == "4x; 3x in B; 2.1x in C"
    assert claim.why == "in C; too large"
    assert paper_figures.number("x", 2.0, 4.0, otherwise={"in B": 3.0}).verdict == "not reproduced"


def test_what_was_fitted_is_not_counted() -> None:
    claim = paper_figures.number("x", 2.0, 2.0, fitted="from this line")
    assert claim.verdict == "fitted" and claim.verdict not in paper_figures.COUNTED


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


QUICK = ("the paper's 3.23x", "the paper's ACR", "the paper's throughput", "3 % less memory", "the simulator's tasks")


@pytest.mark.parametrize(
    "change",
    [change if change.text.startswith(QUICK) else thorough(change) for change in paper_sensitivity.CHANGES],
    ids=lambda change: change.text,
)
def test_a_change_is_noticed(change: paper_sensitivity.Change) -> None:
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
    assert outcomes.micro_batch_counts(profile, row.batch, theirs) == (1, 2, 4, 8, 11, 16, 32, 64)
    outcome = outcomes.best(theirs, profile, CONFIGS["B"], row.batch, (8,), schedules=("dapple_a",))
    assert outcome is not None and not outcome.fits
    assert outcome.note == "stage 0 needs 17.3 of 15.0 GB for 1 slice of 2 samples"


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
    changed["claims"]["figure 12: faster than PipeDream's plans for all models, 2 x 8 and 4 x 8"]["verdict"] = "other"
    (copied / "results.json").write_text(json.dumps(changed))
    (copied / "table3.csv").write_text("by hand")
    assert _run("--only=table 5", f"--directory={copied}", "--jobs=1") == 1
    said = capsys.readouterr().out
    assert "table 5: gpipe, M=2: samples/s: " in said
    assert "claims: figure 12: faster than PipeDream's plans for all models, 2 x 8 and 4 x 8: verdict: other is" in said
    assert "table3.csv: isn't what the stored results give" in said
    assert "FAILED" in said


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
