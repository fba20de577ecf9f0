from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import subprocess
import sys

import pytest
from selection import thorough

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import paper_claims, paper_experiments, paper_models, reproduce_dapple
from dapple_tf.tools.evaluation.paper_claims import Claim, Results
from dapple_tf.tools.evaluation.paper_experiments import RowResult
from dapple_tf.tools.evaluation.paper_models import CONFIGS, MODELS, ROWS, TABLE_4, TABLE_6, TABLE_7

pytestmark = pytest.mark.slow  # plans and simulates rows of the paper

ROOT = pathlib.Path(__file__).parents[1]
STORED = json.loads((ROOT / "docs" / "results" / "results.json").read_text())
"""What `make results` has left."""


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


@functools.cache
def computed(model: str, config: str) -> RowResult:
    row = next(row for row in TABLE_4 if (row.model, row.config) == (model, config))
    return paper_experiments.run_row(row, patience=60)


@pytest.fixture
def gnmt() -> RowResult:
    """A row that is computed in a fourth of the time of VGG-19's on the same network."""
    return computed("gnmt-16", "C")


@pytest.mark.thorough
def test_vgg_19_on_the_slow_network() -> None:
    vgg = computed("vgg-19", "C")
    assert vgg.ours.plan.replicas[0] == 15 and vgg.ours.plan.replicas[-1] == 1
    assert len(set(vgg.ours.plan.devices)) == 2
    assert vgg.advantage >= 1 - paper_claims.TIE
    assert vgg.overlap is not None and vgg.no_overlap is not None
    assert vgg.ours.seconds < vgg.overlap.seconds < vgg.no_overlap.seconds
    assert vgg.gpipe is not None and not vgg.gpipe.fits
    assert "slices of 32 samples" in vgg.gpipe.note


@pytest.mark.parametrize("row", [("gnmt-16", "C"), ("vgg-19", "A"), thorough((("vgg-19", "C"),))], ids="-".join)
def test_the_stored_row_is_the_one_that_is_computed_anew(row: tuple[str, str]) -> None:
    """Every row is: `make results`."""
    result = computed(*row)
    (stored,) = (each for each in STORED["table4_plans"] if (each["model"], each["config"]) == row)
    assert stored["ms"] == pytest.approx(1e3 * result.ours.seconds, rel=1e-5)
    (speedups,) = (each for each in STORED["table4_speedups"] if (each["model"], each["config"]) == row)
    assert speedups["ours"] == pytest.approx(result.single / result.ours.seconds, rel=1e-5)


def test_stored_claims_hold_and_there_are_some_of_every_row() -> None:
    claims = {claim["claim"]: claim for claim in STORED["claims"]}
    assert {claim["status"] for claim in claims.values()} == {"holds", "reproduced", "not reproduced"}
    assert all(claim["reason"] for claim in claims.values() if claim["status"] == "not reproduced")
    assert {name.rpartition(": ")[0] for name in claims} >= {row.key for row in ROWS}
    assert len(STORED["table4_plans"]) == len(TABLE_4) and len(STORED["table6_plans"]) == len(TABLE_6)
    assert len(STORED["table7"]) == len(TABLE_7)


def _claims(result: RowResult, **bounds: float) -> dict[str, Claim]:
    claims = paper_claims.check(Results(rows=[result]), {f"table 4: gnmt-16/C: {k}": v for k, v in bounds.items()})
    return {claim.name.removeprefix("table 4: gnmt-16/C: "): claim for claim in claims}


def test_claims_of_a_good_row_hold(gnmt: RowResult) -> None:
    assert all(claim.holds for claim in _claims(gnmt).values())


def test_a_slower_plan_is_a_failure(gnmt: RowResult) -> None:
    assert gnmt.overlap is not None
    claims = _claims(dataclasses.replace(gnmt, ours=gnmt.overlap))
    failed = claims["our plan isn't slower than the paper's"]
    assert not failed.holds
    assert failed.status == "**FAILED**"


def test_a_figure_that_was_better_before_is_a_failure(gnmt: RowResult) -> None:
    speedup = gnmt.single / gnmt.ours.seconds
    name = "speedup over one device"
    assert _claims(gnmt, **{name: speedup / 0.99})[name].holds
    failed = _claims(gnmt, **{name: speedup / 0.97})[name]
    assert not failed.holds
    assert "was reached before" in failed.ours
    assert paper_claims.reached([failed]) == {f"table 4: gnmt-16/C: {name}": pytest.approx(speedup, rel=1e-3)}


def test_slow_planning_is_a_failure(gnmt: RowResult) -> None:
    slow = dataclasses.replace(gnmt, planner_seconds=61.0)
    assert [(claim.holds, claim.ours) for claim in paper_claims.check_times([slow], 60.0)] == [(False, "61.00 s")]
    assert paper_claims.check_times([slow], 61.0)[0].holds


def test_a_plan_of_the_paper_that_does_not_fit_is_told() -> None:
    row = next(row for row in TABLE_4 if (row.model, row.config) == ("amoeba-36", "B"))
    profile = MODELS[row.model].profile()
    theirs = paper_models.paper_partitions(row, profile)
    counts = paper_experiments.micro_batch_counts(profile, row.batch, theirs)
    assert counts == (1, 2, 4, 8, 11, 16, 32, 64)
    outcome = paper_experiments.best(theirs, profile, CONFIGS["B"], row.batch, counts)
    assert outcome is not None and not outcome.fits
    assert outcome.note == "stage 0 needs 17.3 of 15.0 GB for 1 slice of 2 samples"


def test_table_5() -> None:
    lines = {
        (line.measured.schedule, line.measured.recompute, line.measured.micro_batches): line
        for line in paper_experiments.run_table_5()
    }
    gpipe, dapple = lines["gpipe", "none", 2], lines["dapple_a", "none", 16]
    assert gpipe.throughput and dapple.throughput and gpipe.memory and dapple.memory
    assert dapple.throughput / gpipe.throughput == pytest.approx(1.6, rel=0.02)
    assert dapple.memory / gpipe.memory == pytest.approx(0.88, rel=0.02)
    assert gpipe.memory == pytest.approx(12.1e9, rel=0.001)
    assert lines["gpipe", "none", 3].throughput is None
    assert all(claim.holds for claim in paper_claims.check(Results(table_5=list(lines.values())), {}))


@pytest.mark.parametrize("line", TABLE_7, ids=lambda line: f"{line.devices} devices")
def test_table_7(line: paper_models.LargeBert) -> None:
    row = paper_experiments.run_table_7(line)
    assert row.layers == pytest.approx(line.layers, rel=0.07)
    assert row.utilization == pytest.approx(line.utilization, abs=0.03)


def test_table_3_under_one_policy_and_the_other() -> None:
    policies = paper_experiments.run_policies("vgg-19")
    assert policies.plan == "14:2"
    assert policies.speedup(policies.widest) == pytest.approx(1.08, abs=0.02)
    assert min(map(policies.speedup, policies.steps)) >= 1 - 1e-9


# ---- the command


@pytest.mark.thorough
def test_command_leaves_tables_and_plots_and_the_same_files_again(tmp_path: pathlib.Path) -> None:
    arguments = ["--models=vgg-19", "--configs=C", "--planner_seconds=60"]
    line = [sys.executable, "-m", "tools.evaluation.reproduce_dapple", *arguments, f"--output_dir={tmp_path / 'first'}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "0 of which fail" in done.stdout
    assert "[1/3" in done.stderr
    document = (tmp_path / "first" / "dapple.md").read_text()
    assert "| vgg-19 | C | 2048 | 15:15:1 at 11,21, M=4 |" in document
    assert "![" in document
    records = json.loads((tmp_path / "first" / "results.json").read_text())
    assert [row["model"] for row in records["table4_plans"]] == ["vgg-19"]
    for name in ("claims.csv", "table4_plans.csv", "table6_speedups.csv", "speedups.svg", "pipedream.svg"):
        assert (tmp_path / "first" / name).stat().st_size > 100

    assert _run(*arguments, f"--output_dir={tmp_path / 'second'}") == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert len(first) > 8


def test_command_fails_and_names_what_failed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models=resnet-50", "--configs=A", "--planner_seconds=1e-6", "--noplots"]
    assert _run(*arguments, f"--output_dir={tmp_path}") == 1
    assert "FAILED: table 4: resnet-50/A: planned in 1e-06 s of one core" in capsys.readouterr().out
    assert "2 claims" in (tmp_path / "dapple.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models=lenet"], "--models: unknown lenet; choose from resnet-50"),
        (["--configs=A,D"], "--configs: unknown D"),
        (["--models=vgg-19"], "give an --output_dir"),
        (["--models=vgg-19", "--bless", "--output_dir=/tmp/nowhere"], "--bless needs all models"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*arguments) == 1
    assert message in capsys.readouterr().err


def test_bounds_are_those_of_every_row() -> None:
    bounds = json.loads((ROOT / "docs" / "results" / "bounds.json").read_text())
    assert {f"{row.key}: speedup over one device" for row in ROWS} <= set(bounds)
