"""FD-DPS's experiments (Mathematics 2022, 10, 4788, section 5): placements of its models' operators, simulated."""

from __future__ import annotations

import collections
import functools
import json
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import dapple_tf as dapple
from dapple_tf.operators.baselines import data_parallel, single_device
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fast_t import fast_t
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.heft import heft
from dapple_tf.operators.list_placement import fits
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.tools.evaluation import operator_models
from dapple_tf.tools.evaluation.operator_models import MODELS, FlatStep, flat_step
from graph_passes.analysis.split_rules import Split

MEMORY_BYTES = 16 * 10**9
"""Memory of a Tesla P100."""
LINK_BANDWIDTH, LINK_LATENCY = 12e9, 10e-6
"""Bandwidth and latency of the server's PCIe 3.0 x16 links, in bytes/s and s."""
DOCKER_BANDWIDTH, DOCKER_LATENCY = 3e9, 50e-6
"""Links between the two dockers of figure 4; the paper doesn't say what it measured there."""

_Item = TypeVar("_Item", bound=Hashable)

SEARCHES: Mapping[str, Callable[[OpGraph, Topology], OpPlacement]] = {
    "single": single_device,
    "heft": heft,
    "fast_t": fast_t,
    "d_dps": lambda graph, topology: fd_dps(graph, topology, split=False),
    "fd_dps": fd_dps,
}
"""The compared searches, in the order in which they run."""


@dataclass(frozen=True)
class Setting:
    """A row: a model on some devices.

    Attributes:
        model: its name in `MODELS`.
        devices: number of devices.
        dockers: number of dockers that contain them.
    """

    model: str
    devices: int
    dockers: int = 1

    def __str__(self) -> str:
        return f"{self.model}, {self.devices} devices" + (f" in {self.dockers} dockers" if self.dockers > 1 else "")


@dataclass(frozen=True)
class Outcome:
    """The result for a step.

    Attributes:
        seconds: the simulated time of the step.
        fits: whether every device's peak is within its memory.
        peak_bytes: peak of the device that needs most.
        search_seconds: processor time of the search; 0 if nothing is searched.
        used: number of devices that run anything.
    """

    seconds: float
    fits: bool
    peak_bytes: float
    search_seconds: float = 0.0
    used: int = 0


@dataclass(frozen=True)
class Operator:
    """A line of table 6.

    Attributes:
        seconds: time on one device, before splitting.
        parameter_bytes: bytes of its weights.
        splits: decisions, one for each of its nodes.
    """

    seconds: float
    parameter_bytes: int
    splits: tuple[Split | None, ...]


@dataclass(frozen=True)
class Row:
    """The outcomes of a setting.

    Attributes:
        operators: number of operators in the graph before splitting.
        edges: number of edges in the graph before splitting.
        graph_seconds: processor time of making the graph, without the search.
        outcomes: outcomes by the names of `SEARCHES`, and ``data_parallel``.
        splits: op type -> number of its operators that FD-DPS has split.
        parts: decision -> number of operators that were split so.
        lines: the lines of table 6, for VGG-16.
    """

    setting: Setting
    operators: int
    edges: int
    graph_seconds: float
    outcomes: Mapping[str, Outcome]
    splits: Mapping[str, int]
    parts: Mapping[Split, int]
    lines: Mapping[str, Operator]

    def faster(self, than: str, what: str = "fd_dps") -> float:
        """Returns the fraction by which a step is shorter than another: 1 - ours / theirs, as the paper computes it."""
        return 1 - self.outcomes[what].seconds / self.outcomes[than].seconds


LINES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Conv1_1": ("block1_conv1", ("Conv2D",)),
    "Conv1_2": ("block1_conv2", ("Conv2D",)),
    "Conv1_2bp": ("block1_conv2", ("Conv2DBackpropInput", "Conv2DBackpropFilter")),
    "Relu1_2": ("block1_conv2", ("Relu",)),
    "Pool1": ("block1_pool", ("MaxPool",)),
    "Fc6": ("fc1", ("MatMul",)),
}
"""Operators of table 6 -> the layer in keras.applications' VGG-16, and op types."""
_WITHOUT_PARAMETERS = frozenset({"Relu", "MaxPool"})

PAPER_DEVICES: Mapping[str, tuple[int, ...]] = {
    "VGG-16": (2, 4),
    "Inception-V3": (2, 4),
    "ResNet-50": (4, 8),
    "ResNet-200": (4, 8),
    "NASNet-mobile": (4, 8),
    "NASNet-large": (4, 8),
}
"""The numbers of devices in table 5."""
DEVICES = (2, 4, 8)
"""Our numbers of devices."""


def settings(models: Sequence[str], devices: Sequence[int] = DEVICES, *, dockers: bool = True) -> list[Setting]:
    """Returns all rows; with two dockers where there are eight devices."""
    rows = [Setting(model, count) for model in models for count in devices]
    if dockers and 8 in devices:
        rows += [Setting(model, 8, 2) for model in models]
    return rows


def cluster_of(devices: int, dockers: int = 1) -> dapple.Cluster:
    """Returns P100s on one server, in one or several dockers."""
    described = {
        "format": "dapple_tf.cluster/1",
        "servers": [{"devices": devices // dockers, "memory_bytes": MEMORY_BYTES}] * dockers,
        "intra_bandwidth": LINK_BANDWIDTH,
        "intra_latency": LINK_LATENCY,
        "inter_bandwidth": DOCKER_BANDWIDTH,
        "inter_latency": DOCKER_LATENCY,
    }
    return dapple.Cluster.from_json(json.dumps(described))


@functools.lru_cache(maxsize=1)
def _step(model: str) -> FlatStep:
    return flat_step(MODELS[model], operator_models.CACHE)


def prepare(model: str) -> int:
    """Makes a model's graph if there is none yet; returns its number of nodes."""
    return len(_step(model).graph.node)


def op_graph(setting: Setting) -> tuple[OpGraph, Topology, FlatStep]:
    """Returns the operators of a setting with P100-like costs."""
    step, topology = _step(setting.model), Topology.of(cluster_of(setting.devices, setting.dockers))
    return build_op_graph(step.graph, topology, OperatorCosts.p100(), step.shapes), topology, step


def run(setting: Setting) -> Row:
    """Places a model's operators with every compared search."""
    started = time.process_time()
    graph, topology, step = op_graph(setting)
    graph_seconds = step.seconds + time.process_time() - started
    outcomes = {}
    for name, search in SEARCHES.items():
        started = time.process_time()
        placement = search(graph, topology)
        outcomes[name] = _outcome(placement, topology, time.process_time() - started)
    parallel = data_parallel(graph, topology)
    peak = parallel.peak_bytes
    outcomes["data_parallel"] = Outcome(parallel.seconds, peak <= MEMORY_BYTES, peak, used=setting.devices)
    ops = dict(zip(graph.names, graph.ops, strict=True))
    return Row(
        setting=setting,
        operators=graph.count,
        edges=len(graph.edges),
        graph_seconds=graph_seconds,
        outcomes=outcomes,
        splits=_counted(ops[name] for name in placement.splits),
        parts=_counted(placement.splits.values()),
        lines=_table_6(graph, placement) if setting.model == "VGG-16" else {},
    )


def _outcome(placement: OpPlacement, topology: Topology, seconds: float) -> Outcome:
    used = len(set(placement.devices.values()))
    return Outcome(placement.seconds, fits(placement, topology), max(placement.peak_bytes), seconds, used)


def _counted(items: Iterable[_Item]) -> dict[_Item, int]:
    return dict(sorted(collections.Counter(items).items(), key=lambda item: (-item[1], str(item[0]))))


def _table_6(graph: OpGraph, placement: OpPlacement) -> dict[str, Operator]:
    """Returns the operators of table 6, found by their layer."""
    operators = {}
    for line, (layer, ops) in LINES.items():
        chosen = [
            index
            for index, (name, op) in enumerate(zip(graph.names, graph.ops, strict=True))
            if f"/{layer}_1/" in name and op in ops and ("/gradients/" in name) == line.endswith("bp")
        ]
        operators[line] = Operator(
            float(graph.seconds[chosen, 0].sum()),
            0 if set(ops) & _WITHOUT_PARAMETERS else _parameter_bytes(graph, layer),
            tuple(placement.splits.get(graph.names[index]) for index in chosen),
        )
    return operators


def _parameter_bytes(graph: OpGraph, layer: str) -> int:
    """Returns the bytes of the weights that a layer's forward reads."""
    read = {
        tensor
        for producer, _, tensor, _ in graph.edges.tolist()
        if tensor >= 0 and graph.ops[producer] == "ReadVariableOp" and f"/read/{layer}/" in graph.names[producer]
    }
    return int(graph.tensor_bytes[sorted(read)].sum())
