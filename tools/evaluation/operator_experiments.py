"""FD-DPS's experiments (Mathematics 2022, 10, 4788, section 5): placements of its models' operators, simulated."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import dapple_tf as dapple
from dapple_tf.operators.baselines import data_parallel, single_device
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fast_t import dpos, fast_t_candidate
from dapple_tf.operators.fd_dps import fd_dps, with_rounds
from dapple_tf.operators.islands import largest_island, on_island
from dapple_tf.operators.list_placement import fits
from dapple_tf.operators.mp_dps import mp_dps_candidate
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_candidates import Candidate, Variant, placed_by, variant_of
from dapple_tf.operators.rooflines import P100
from dapple_tf.operators.split_search import by_batch
from dapple_tf.tools.evaluation import operator_models
from dapple_tf.tools.evaluation.operator_models import MODELS, FlatStep, flat_step
from graph_passes.analysis.split_rules import Split

MEMORY_BYTES = 15_000_000_000
"""Bytes of a 16 GB Tesla P100 that a model can use, as of the V100s in the evaluation of DAPPLE."""
LINK_BANDWIDTH, LINK_LATENCY = 12e9, 10e-6
"""Bandwidth and latency of the server's PCIe 3.0 x16 links, in bytes/s and s."""
DOCKER_BANDWIDTH, DOCKER_LATENCY = 3e9, 50e-6
"""Links between the two dockers of figure 4; the paper doesn't say what it measured there."""

_Item = TypeVar("_Item", bound=Hashable)


def _graph_of_data_parallelism(graph: OpGraph, topology: Topology) -> OpPlacement:
    start = by_batch(variant_of(graph, topology, {}))
    return single_device(graph, topology) if start is None else placed_by(start)


def _dpos_alone(graph: OpGraph, topology: Topology) -> OpPlacement:
    base = variant_of(graph, topology, {})
    start = by_batch(base)
    return placed_by(dpos(base if start is None else start.variant))


OPPONENTS: Mapping[str, Callable[[Variant, Candidate | None], Candidate]] = {
    "fast_t": fast_t_candidate,
    "mp_dps": mp_dps_candidate,
}
"""The compared strategies of others, which begin with data parallelism's graph."""


def with_rounds_of(name: str) -> str:
    """Returns the name of an opponent's outcome with FD-DPS's improvement rounds at its end."""
    return f"{name}_rounds"


SEARCHES: Mapping[str, Callable[[OpGraph, Topology], OpPlacement]] = {
    "single": single_device,
    "split_by_batch": _graph_of_data_parallelism,
    "dpos": _dpos_alone,
    "d_dps": lambda graph, topology: fd_dps(graph, topology, splits="batch"),
    "one_copy": lambda graph, topology: fd_dps(graph, topology, splits="none"),
    "alone": lambda graph, topology: fd_dps(graph, topology, splits="alone"),
    "fd_dps": fd_dps,
}
"""The other searches, in the order in which they run."""
FORMS = ("own_statistics", "split_by_batch")
"""Forms of data parallelism: copies of variables, all updated, or one of each, which is sent to all devices.

TF-Slim's has one copy and one update, as the second, and replicas' own statistics, as the first.
"""
_OF_TABLE_7 = frozenset({"one_copy", "alone"})
"""Searches on four devices alone."""
_ALSO_ON_ONE_DOCKER = frozenset({"split_by_batch", "dpos"})
"""Searches that may leave a docker idle as FD-DPS may, which tries that itself."""


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
        update_seconds: time of the updates at the end of data parallelism's step, all of which each device makes.
    """

    seconds: float
    fits: bool
    peak_bytes: float
    search_seconds: float = 0.0
    used: int = 0
    update_seconds: float = 0.0

    @property
    def shared_seconds(self) -> float:
        """The time of data parallelism's step if its devices shared the updates out, as ZeRO-1 does."""
        return self.seconds - self.update_seconds * (1 - 1 / self.used)


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
        outcomes: outcomes by the names of `SEARCHES` and `OPPONENTS`, `with_rounds_of` these, ``data_parallel``, and
            ``own_statistics`` for replicas that normalise their own samples. ``one_copy`` and ``alone`` are those of
            four devices.
        splits: op type -> number of its operators that FD-DPS has split.
        parts: decision -> number of operators that were split so.
        alone: number of operators that were split one at a time.
        lines: the lines of table 6, for VGG-16.
        lines_alone: the same with splits of one operator at a time.
    """

    setting: Setting
    operators: int
    edges: int
    graph_seconds: float
    outcomes: Mapping[str, Outcome]
    splits: Mapping[str, int]
    parts: Mapping[Split, int]
    alone: int
    lines: Mapping[str, Operator]
    lines_alone: Mapping[str, Operator]

    @property
    def unit(self) -> str:
        """The faster form of data parallelism, in whose step others are measured."""
        return min(FORMS, key=lambda name: self.outcomes[name].seconds)

    def over(self, what: str) -> float:
        """Returns the ratio of a step and data parallelism's in its faster form."""
        return self.outcomes[what].seconds / self.outcomes[self.unit].seconds

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
    "PNASNet-mobile": (4, 8),
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


def inputs() -> dict[str, dict[str, Any]]:
    """Returns what is put into the experiments, as it is stored beside the results: name -> its numbers."""
    return {
        "device": {"memory_bytes": MEMORY_BYTES, **dataclasses.asdict(P100)},
        "links, bytes/s": {"inside a docker": LINK_BANDWIDTH, "between dockers": DOCKER_BANDWIDTH},
        "links, s": {"inside a docker": LINK_LATENCY, "between dockers": DOCKER_LATENCY},
        "images of a step": {name: model.batch for name, model in MODELS.items()},
    }


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
    island = on_island(graph, topology, largest_island(topology)) if setting.dockers > 1 else None
    placements, outcomes = {}, {}
    for name, search in SEARCHES.items():
        if name in _OF_TABLE_7 and (setting.devices != 4 or setting.dockers > 1):
            continue
        if name == "d_dps" and setting.dockers > 1:
            continue
        started = time.process_time()
        placements[name] = placement = search(graph, topology)
        outcomes[name] = _outcome(placement, topology, time.process_time() - started)
        if island is not None and name in _ALSO_ON_ONE_DOCKER:
            outcomes[name] = _faster(outcomes[name], _outcome(search(*island), island[1], 0.0))
    within = {} if island is None else _opponents(*island)
    for name, outcome in _opponents(graph, topology).items():
        outcomes[name] = _faster(outcome, within[name]) if within else outcome
    for name, own in (("data_parallel", False), ("own_statistics", True)):
        outcomes[name] = _data_parallel(graph, topology, own)
        if island is not None:
            outcomes[name] = _faster(outcomes[name], _data_parallel(*island, own))
    ops, placement = dict(zip(graph.names, graph.ops, strict=True)), placements["fd_dps"]
    alone = placements.get("alone")
    lines = setting.model == "VGG-16"
    return Row(
        setting=setting,
        operators=graph.count,
        edges=len(graph.edges),
        graph_seconds=graph_seconds,
        outcomes=outcomes,
        splits=_counted(ops[name] for name in placement.splits),
        parts=_counted(placement.splits.values()),
        alone=0 if alone is None else len(alone.splits),
        lines=_table_6(graph, placement) if lines else {},
        lines_alone=_table_6(graph, alone) if lines and alone is not None else {},
    )


def _opponents(graph: OpGraph, topology: Topology) -> dict[str, Outcome]:
    """Returns what each opponent reaches, as published and with FD-DPS's improvement rounds."""
    outcomes = {}
    improved: dict[Hashable, tuple[Candidate, float]] = {}
    for name, begun in OPPONENTS.items():
        started = time.process_time()
        base = variant_of(graph, topology, {})
        candidate = begun(base, by_batch(base))
        seconds = time.process_time() - started
        outcomes[name] = _outcome(placed_by(candidate), topology, seconds)
        # Both often keep data parallelism's graph.
        same = (*candidate.variant.splits.items(), *candidate.devices, *candidate.order)
        if same not in improved:
            began = time.process_time()
            improved[same] = with_rounds(candidate), time.process_time() - began
        better, more = improved[same]
        outcomes[with_rounds_of(name)] = _outcome(placed_by(better), topology, seconds + more)
    return outcomes


def _data_parallel(graph: OpGraph, topology: Topology, own_statistics: bool) -> Outcome:
    step = data_parallel(graph, topology, own_statistics=own_statistics)
    fitting = step.peak_bytes <= MEMORY_BYTES
    return Outcome(step.seconds, fitting, step.peak_bytes, used=topology.count, update_seconds=step.update_seconds)


def _faster(one: Outcome, other: Outcome) -> Outcome:
    """Returns the faster of two outcomes, with the first's time of search."""
    best = min(one, other, key=lambda outcome: (not outcome.fits, outcome.seconds))
    return dataclasses.replace(best, search_seconds=one.search_seconds)


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


# ---- stored rows


def to_record(row: Row) -> dict[str, object]:
    """Returns a row as a JSON object."""
    record = dataclasses.asdict(row)
    record["parts"] = [[split.dimension, split.parts, count] for split, count in row.parts.items()]
    for name in ("lines", "lines_alone"):
        record[name] = {
            key: [
                line.seconds,
                line.parameter_bytes,
                [split and [split.dimension, split.parts] for split in line.splits],
            ]
            for key, line in getattr(row, name).items()
        }
    return record


def from_record(record: Mapping[str, Any]) -> Row:
    """Returns the row of `to_record`."""
    lines = {
        name: {
            key: Operator(seconds, size, tuple(split and Split(*split) for split in splits))
            for key, (seconds, size, splits) in record[name].items()
        }
        for name in ("lines", "lines_alone")
    }
    return Row(
        **{
            **record,
            **lines,
            "setting": Setting(**record["setting"]),
            "outcomes": {name: Outcome(**outcome) for name, outcome in record["outcomes"].items()},
            "parts": {Split(dimension, parts): count for dimension, parts, count in record["parts"]},
        }
    )
