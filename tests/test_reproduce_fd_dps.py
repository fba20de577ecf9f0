"""FD-DPS's experiments: the paper's tables, what is claimed of rows, the graphs of steps, and the command."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import keras
import pytest

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import operator_models, reproduce_fd_dps
from dapple_tf.tools.evaluation.operator_experiments import (
    DEVICES,
    MEMORY_BYTES,
    PAPER_DEVICES,
    Operator,
    Outcome,
    Row,
    Setting,
    cluster_of,
    settings,
)
from dapple_tf.tools.evaluation.operator_models import MODELS, flat_step, flatten_step
from dapple_tf.tools.evaluation.operator_report import TABLE_5, TABLE_6, TABLE_7, claims_of, tables, write
from graph_passes.analysis.split_rules import Split
from graph_passes.ir.graph import CALL_ATTR, Graph, data_inputs

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
    ("NASNet-mobile", 4): (14.59, 10.54),
    ("NASNet-mobile", 8): (23.83, 12.76),
    ("NASNet-large", 4): (15.43, 6.42),
    ("NASNet-large", 8): (20.12, 9.45),
}
"""Speedups 2 and 1 of table 5, in percent."""


def test_table_5_is_as_printed() -> None:
    assert {(model, count) for model, counts in PAPER_DEVICES.items() for count in counts} == TABLE_5.keys()
    for key, (over_fast_t, over_mp_dps) in PRINTED.items():
        row = TABLE_5[key]
        assert 100 * row.faster == pytest.approx(over_fast_t, abs=0.25)
        # What the paper calls the speedup of MP-DPS over FastT.
        assert 100 * (1 - row.fd_dps / row.mp_dps) == pytest.approx(over_mp_dps, abs=0.06)


def test_table_7_is_as_printed() -> None:
    for model, (before, after, gain) in TABLE_7.items():
        assert 1 - after / before == pytest.approx(gain, abs=0.0005)
        if model != "NASNet-mobile":  # 1.384 s in table 5, 1.314 s in table 7
            assert TABLE_5[model, 4].fd_dps == after


def test_models_are_those_of_table_3() -> None:
    assert [model.batch for model in MODELS.values()] == [64, 64, 64, 16, 64, 16]
    assert [name for name, model in MODELS.items() if model.substitute] == ["NASNet-mobile"]
    assert MODELS.keys() == PAPER_DEVICES.keys() == TABLE_7.keys()


@pytest.mark.thorough
@pytest.mark.slow
def test_resnet_200_has_its_200_layers() -> None:
    model = MODELS["ResNet-200"].build()
    weighted = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense)]
    projections = [layer for layer in weighted if layer.name.endswith("_0_conv")]
    assert len(weighted) - len(projections) == 200
    assert model.count_params() == pytest.approx(64.8e6, rel=0.01)


def test_stored_claims_hold_and_there_are_some_of_every_row() -> None:
    """`make results-operators` has left them."""
    stored = json.loads((pathlib.Path(__file__).parents[1] / "docs" / "results" / "fd_dps.json").read_text())
    claims = [dict(zip(stored["claims"]["columns"], row, strict=True)) for row in stored["claims"]["rows"]]
    assert all(claim["status"] in ("holds", "reproduced") or claim["reason"] for claim in claims)
    assert not [claim for claim in claims if "FAILED" in claim["status"]]
    assert {(model, devices) for model, devices, *_ in stored["table5"]["rows"]} >= TABLE_5.keys()


# ---- rows


def row(setting: Setting | None = None, **seconds: float) -> Row:
    """A row of made-up times, in the order of which all is well."""
    times = {"single": 4.0, "data_parallel": 1.0, "heft": 3.0, "fast_t": 2.5, "d_dps": 2.0, "fd_dps": 1.5} | seconds
    return Row(
        setting or Setting("NASNet-large", 8),
        1000,
        2000,
        12.5,
        {name: Outcome(value, True, 1e9, 20.0, 8) for name, value in times.items()},
        {"Conv2D": 7},
        {Split("batch", 8): 7},
        {},
    )


def failed(rows: Sequence[Row]) -> list[str]:
    return [claim.name.partition(": ")[2] for claim in claims_of(rows) if not claim.holds]


def outcome(of: Row, name: str, **changes: object) -> Row:
    changed = dataclasses.replace(of.outcomes[name], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(of, outcomes={**of.outcomes, name: changed})


def test_a_good_row_fails_nothing() -> None:
    assert failed([row()]) == []
    assert row().faster("fast_t") == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("worse", "claims"),
    [
        (
            row(fast_t=1.49, heft=1.6),
            ["FD-DPS not slower than FastT, and fits", "FD-DPS at least 12% faster than FastT"],
        ),
        (row(heft=1.4), ["FD-DPS not slower than HEFT, and fits"]),
        (row(single=1.4), ["FD-DPS not slower than single, and fits"]),
        (row(fast_t=1.7), ["FD-DPS at least 12% faster than FastT"]),
        (row(Setting("VGG-16", 8), fast_t=1.6), []),
        (outcome(row(), "fd_dps", search_seconds=30.5), ["searched in 30 s of one core"]),
        # What doesn't fit is no placement to compare with, and none to have.
        (outcome(row(heft=1.0), "heft", fits=False), []),
        (
            outcome(row(), "fd_dps", fits=False),
            [f"FD-DPS not slower than {name}, and fits" for name in ("FastT", "HEFT", "single")],
        ),
    ],
)
def test_what_fails(worse: Row, claims: list[str]) -> None:
    assert failed([worse]) == claims


def test_margins_of_the_paper_are_reached_or_not_and_fail_nothing() -> None:
    rows = [row(), row(Setting("NASNet-large", 4), fast_t=1.6, d_dps=1.55), row(Setting("NASNet-mobile", 8, 2))]
    claims = {claim.name: claim for claim in claims_of(rows) if claim.paper}
    assert {name: (claim.paper, claim.ours, claim.status) for name, claim in claims.items()} == {
        "NASNet-large, 8 devices: FD-DPS faster than FastT": ("20.1%", "40.0%", "reproduced"),
        "NASNet-large, 4 devices: FD-DPS faster than FastT": ("15.4%", "6.2%", "not reproduced"),
        "NASNet-large, 4 devices: FD-DPS faster than D-DPS(-F)": ("13.9%", "3.2%", "not reproduced"),
        "NASNet-mobile, 8 devices in 2 dockers: FD-DPS faster than FastT": ("16.0%", "40.0%", "reproduced"),
    }


def test_document(tmp_path: pathlib.Path) -> None:
    lines = {name: Operator(ms / 1e3, 10_000, (Split("batch", 4), None)) for name, (ms, _, _) in TABLE_6.items()}
    rows = [
        outcome(row(), "single", fits=False),
        dataclasses.replace(row(Setting("VGG-16", 4)), lines=lines),
        row(Setting("VGG-16", 8, 2)),
    ]
    assert [table.name for table in tables(rows)] == [
        *("table3", "table5", "table5_paper", "table6", "table7", "figure4", "figure5")
    ]
    write(rows, claims_of(rows), tmp_path)
    document = (tmp_path / "fd_dps.md").read_text()
    assert "| NASNet-large | 8 | (4000) | 1000 | 3000 | 2500 | 2000 | 1500 | 2.67 | 50.0% | 40.0% | 20.1% |" in document
    assert "| Conv1_2 | 15.67 | 10.00 | batch x 4, no | 15.67 | 43.8 | yes |" in document
    assert "Conv2D (7) | batch x 8 (7) |" in document
    assert "Simulated, all of it" in document
    records = json.loads((tmp_path / "fd_dps.json").read_text())
    assert records["table3"]["rows"][0][:4] == ["NASNet-large", 16, 1000, 2000]
    assert all(len(line) == len(table["columns"]) for table in records.values() for line in table["rows"])


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
        arguments = ["--models=VGG-16", "--devices=2", "--jobs=1", "--search_seconds=60", f"--output_dir={folder}"]
        assert command.run(reproduce_fd_dps.main, reproduce_fd_dps.FLAGS, arguments) == 0
    return folder


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_leaves_tables(vgg: pathlib.Path) -> None:
    document = (vgg / "fd_dps.md").read_text()
    assert "| VGG-16 | 2 |" in document
    assert "| Conv1_2bp | 36.5 |" in document
    records = json.loads((vgg / "fd_dps.json").read_text())
    (times,) = records["table5"]["rows"]
    cells = dict(zip(records["table5"]["columns"], times, strict=True))
    assert cells["FD-DPS"] <= min(cells["FastT"], cells["HEFT"], cells["single"])
    assert [line[2] for line in records["table6"]["rows"]] == [  # 3 x 3 x 3 x 64 weights and 64 biases, and so on
        *(7.168, 147.712, 147.712, 0.0, 0.0, 411_058.0)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models=lenet"], "--models: unknown lenet; choose from VGG-16"),
        (["--devices=2,x"], "--devices: '2,x'; give numbers from 2"),
        (["--models=VGG-16"], "give an --output_dir"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(reproduce_fd_dps.main, reproduce_fd_dps.FLAGS, arguments) == 1
    assert message in capsys.readouterr().err
