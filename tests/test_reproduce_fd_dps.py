"""FD-DPS's experiments: the paper's tables, what is claimed of rows, the graphs of steps, and the command."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib

import keras
import pytest

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
from dapple_tf.tools.evaluation.operator_claims import SEARCH_SECONDS, bands, claims_of, within, within_in_steps
from dapple_tf.tools.evaluation.operator_experiments import PAPER_DEVICES, Outcome, cluster_of, settings
from dapple_tf.tools.evaluation.operator_models import MODELS, flat_step, flatten_step
from dapple_tf.tools.evaluation.operator_paper import TABLE_5, TABLE_7
from dapple_tf.tools.evaluation.operator_results import (
    changed_document,
    changed_inputs,
    changed_sweep,
    differences,
    stored,
    write,
)
from dapple_tf.tools.evaluation.sensitivity import Change
from graph_passes.analysis.split_rules import Split
from graph_passes.ir.graph import Ref, data_inputs

STORED = pathlib.Path(__file__).parents[1] / "docs" / "results" / "fd_dps.json"


def test_tables_of_the_paper_are_as_printed() -> None:
    """But for two of its misprints: 14.78 % by its own seconds, and 1.384 s in table 5, 1.314 s in table 7."""
    printed = {("VGG-16", 2): (6.33, 1.41), ("ResNet-50", 8): (15.31, 8.85), ("NASNet-large", 8): (20.12, 9.45)}
    for key, margins in printed.items():
        assert [100 * TABLE_5[key].faster(name) for name in ("fast_t", "mp_dps")] == pytest.approx(margins, abs=0.006)
    for model, (before, after, gain) in TABLE_7.items():
        assert 1 - after / before == pytest.approx(gain, abs=0.0005)
        assert model == "PNASNet-mobile" or TABLE_5[model, 4].fd_dps == after
    assert [model.batch for model in MODELS.values()] == [64, 64, 64, 16, 64, 16]
    assert MODELS.keys() == PAPER_DEVICES.keys() == TABLE_7.keys()


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


# ---- rows


def test_what_differs_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stored(STORED)
    first, *others = before.rows
    line = next(iter(first.lines))

    def said(**changes: object) -> list[str]:
        return differences(before, [dataclasses.replace(first, **changes), *others], SEARCH_SECONDS)  # type: ignore[arg-type]

    def outcome(**changes: object) -> dict[str, Outcome]:
        changed = dataclasses.replace(first.outcomes["fd_dps"], **changes)  # type: ignore[arg-type]
        return {**first.outcomes, "fd_dps": changed}

    ours = first.outcomes["fd_dps"]
    assert said() == said(outcomes=outcome(peak_bytes=1.01 * ours.peak_bytes)) == []
    for changes in (
        *({"splits": {**first.splits, "Conv2D": 99}}, {"parts": {Split("batch", 2): 99}}, {"alone": first.alone + 1}),
        {"lines": {**first.lines, line: dataclasses.replace(first.lines[line], splits=(Split("batch", 16),))}},
        {"lines": {**first.lines, line: dataclasses.replace(first.lines[line], seconds=1.0)}},
        *({"outcomes": outcome(seconds=1.03 * ours.seconds)}, {"outcomes": outcome(peak_bytes=1.1 * ours.peak_bytes)}),
        *({"outcomes": outcome(fits=False)}, {"outcomes": outcome(used=1)}),
    ):
        assert any(text.startswith(f"{first.setting}: ") for text in said(**changes)), changes
    for changes, claim in (
        ({"fits": False}, "FD-DPS fits the devices' memory"),
        ({"search_seconds": 301.0}, "searched in 300 s of one core"),
    ):
        claims = claims_of([dataclasses.replace(first, outcomes=outcome(**changes))])
        assert [one.name for one in claims if one.verdict == "FAILED"] == [f"{first.setting}: {claim}"]
    fewer = before._replace(rows=others)
    assert f"{first.setting}: isn't stored" in differences(fewer, before.rows, SEARCH_SECONDS)
    monkeypatch.setattr(operator_claims, "NEAR_WITHIN", 0.26)
    assert "near within: 0.25 is stored, 0.26 now" in said()
    monkeypatch.setattr(operator_experiments, "DOCKER_BANDWIDTH", 3.03e9)
    assert changed_inputs(before) == ["links, bytes/s: between dockers is 3030000000.0, stored 3000000000.0"]
    (tmp_path / "fd_dps.md").write_text("nothing")
    assert changed_document(before, tmp_path) == [f"{tmp_path / 'fd_dps.md'}: isn't what the stored rows give"]


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


@pytest.mark.parametrize(
    "change",
    [change for change in operator_sensitivity.CHANGES if not change.parts],
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


def test_steps_of_towers_are_as_stored() -> None:
    """Updates that are traced once for each kind of parameter changed all graphs, and few tests saw it."""
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


# ---- graphs


def small() -> keras.Model:
    images = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="conv")(images)
    x = keras.layers.BatchNormalization(name="norm")(x)
    model = keras.Model(images, keras.layers.Dense(5, name="logits")(keras.layers.Flatten(name="flat")(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


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
    root = pathlib.Path(__file__).parents[1]
    names = {path.resolve().relative_to(root).as_posix() for path in operator_models.sources()}
    assert {"graph_passes/passes/join.py", "dapple_tf/frontend/capture.py", "models/resnet.py"} <= names
    assert "dapple_tf/operators/fd_dps.py" not in names, "searches change no graph"
