"""Changes that `make results` must notice: of the paper's constants, of the simulator's formulas, of the planner.

Each is made in this process alone, and only the parts that it may show in are computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest import mock

from dapple_tf.planning.search import coarsened
from dapple_tf.simulation.cost import CostModel
from dapple_tf.tools.evaluation import paper_figures, paper_models, paper_outcomes, paper_verdicts
from dapple_tf.tools.evaluation.paper_outcomes import Record
from dapple_tf.tools.evaluation.paper_parts import differences, limits, parts, rounded, verdicts
from dapple_tf.tools.evaluation.sensitivity import FACTOR, Change, longer_transfers, outcome, scaled


def _larger(module: ModuleType, name: str) -> AbstractContextManager[object]:
    return mock.patch.object(module, name, getattr(module, name) * FACTOR)


def _slower_nvlink() -> AbstractContextManager[object]:
    cluster = paper_models.CONFIGS["A"]
    slower = dataclasses.replace(cluster, intra_bandwidth=paper_models.NVLINK / FACTOR)
    return mock.patch.dict(paper_models.CONFIGS, A=slower)


def _other_table_5() -> AbstractContextManager[object]:
    lines = [
        dataclasses.replace(line, throughput=line.throughput * FACTOR)
        if line.key == "dapple_a + RC, M=16" and line.throughput
        else line
        for line in paper_models.TABLE_5
    ]
    return mock.patch.object(paper_figures, "TABLE_5", tuple(lines))


def _other_ratio() -> AbstractContextManager[object]:
    rows = [
        dataclasses.replace(row, acr=row.acr * FACTOR) if row.key == "table 4: bert-48/C" and row.acr else row
        for row in paper_models.TABLE_4
    ]
    return mock.patch.object(paper_figures, "TABLE_4", tuple(rows))


def _other_split() -> AbstractContextManager[object]:
    """Reads GNMT-16's 9:7 as 8:8."""
    row = next(row for row in paper_models.TABLE_4 if row.key == "table 4: gnmt-16/B")
    original = paper_models.paper_partitions

    def changed(other: paper_models.PaperRow, profile: Any) -> Any:
        if other.key != row.key:
            return original(other, profile)
        lstm = [index for index, layer in enumerate(profile.layers) if layer.name.startswith("LSTM")]
        return (paper_models.Partition((lstm[7],), (8, 8)),)

    return mock.patch("dapple_tf.tools.evaluation.paper_experiments.paper_partitions", changed)


def _coarser_planner() -> AbstractContextManager[object]:
    return mock.patch("dapple_tf.planning.planner.coarsened", lambda profile, limit: coarsened(profile, min(limit, 4)))


CHANGES = (
    Change("the paper's 3.23x over PipeDream is 3 % more", (), lambda: _larger(paper_figures, "PIPEDREAM_LARGEST")),
    Change("the paper's ACR of BERT-48 in C is 3 % more", (), _other_ratio),
    Change("the paper's throughput of DAPPLE + RC, M = 16, is 3 % more", (), _other_table_5),
    Change("the paper's plan of GNMT-16 in B is cut an LSTM layer earlier", ("table 4: gnmt-16/B",), _other_split),
    Change("the gain that is reproduced may be 3 % larger", (), lambda: _larger(paper_verdicts, "MORE")),
    Change("plans that are 3 % farther apart are as fast", (), lambda: _larger(paper_figures, "TIE")),
    Change("NVLink is 3 % slower", ("figure 14: bert-48",), _slower_nvlink),
    Change(
        "3 % less memory can be used",
        ("table 7: 2 devices",),
        lambda: mock.patch.object(paper_models, "USABLE_MEMORY", int(paper_models.USABLE_MEMORY / FACTOR)),
    ),
    Change("the simulator's tasks take 3 % longer", ("table 5",), lambda: scaled(CostModel, "whole_seconds")),
    Change("its transfers take 3 % longer", ("table 4: gnmt-16/C",), longer_transfers),
    Change("its all-reduces take 3 % longer", ("table 4: vgg-19/C",), lambda: scaled(CostModel, "reduction_seconds")),
    Change("its updates take 3 % longer", ("table 4: bert-48/B",), lambda: scaled(CostModel, "apply_seconds")),
    Change(
        "its residuals take 3 % more memory", ("table 4: resnet-50/A",), lambda: scaled(CostModel, "residual_bytes")
    ),
    Change("the planner considers 4 places to cut", ("table 4: gnmt-16/C",), _coarser_planner),
    Change(
        "the planner is asked for P_A only",
        ("table 4: xlnet-36/B",),
        lambda: mock.patch.object(paper_outcomes, "SAME", ("dapple_a",)),
    ),
)


def tried(change: Change, results: Mapping[str, Any]) -> Record:
    """Returns what a change does to results: whether the command fails, and what it says first.

    Args:
        change: the change.
        results: part -> its record, without the change.
    """
    usual, usual_limits = verdicts(results), limits()
    with change.make():
        fresh = {name: rounded(parts()[name]()) for name in change.parts}
        said = [text for name in change.parts for text in differences(results[name], fresh[name], name)]
        said += differences(usual, verdicts({**results, **fresh}), "claims")
        said += differences(usual_limits, limits(), "limits")
    return outcome(change, said)
