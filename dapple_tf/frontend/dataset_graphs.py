"""Graphs of datasets: nodes that stand for one dataset, and when a round has drawn its seeds.

A dataset that shuffles anew in each round keeps a generator of seeds, and each of its iterators draws one. So the order
of a round depends on how many iterators there were in the rounds before; a repeated dataset has several in each.
"""

from __future__ import annotations

import enum
import hashlib

from graph_passes.ir.graph import GraphDef, NodeDef, Ref, copied, data_inputs

_AGAIN = ("reshuffle_each_iteration", "rerandomize_each_iteration")
"""The attributes of datasets with a generator of seeds."""
_OPENS_FIRST = frozenset(
    {"AssertCardinalityDataset", "BatchDatasetV2", "FilterDataset", "FlatMapDataset", "GroupByWindowDataset"}
    | {"InterleaveDataset", "MapAndBatchDataset", "MapDataset", "OptionsDataset", "PaddedBatchDatasetV2"}
    | {"ParallelBatchDataset", "ParallelFilterDataset", "ParallelInterleaveDatasetV4", "ParallelMapDatasetV2"}
    | {"ParseExampleDatasetV2", "PrefetchDataset", "ScanDataset", "ShardDataset", "SkipDataset", "TakeDataset"}
    | {"TakeWhileDataset", "UnbatchDataset", "WindowDataset"}
)
"""Datasets whose iterators make the one of their first input when they are made, and make no other one of it."""
_SHUFFLES = frozenset({"ShuffleDatasetV3"})
"""Those whose iterators make it for their first element."""
_ZIPS = frozenset({"ZipDataset"})
"""Those whose iterators make the ones of all inputs when they are made, and take an element of each for their first."""


class Drawn(enum.IntEnum):
    """When a round of a dataset has drawn all its seeds."""

    NONE = 0
    """There are none to draw: all rounds are alike, or what differs in them follows no generator."""
    BEGUN = 1
    """When it has begun."""
    FIRST = 2
    """When its first element has been read."""
    LATER = 3
    """Later: perhaps at its end."""


def drawn(graph: GraphDef, output: str) -> Drawn:
    """Returns when a round of a dataset has drawn its seeds.

    Args:
        graph: graph of the dataset, its nodes in the order in which they run.
        output: name of the dataset's node.
    """
    times: dict[str, Drawn] = {}
    for node in graph.node:
        times[node.name] = _drawn(node, [times[ref.node] for ref in data_inputs(node)])
    return times[output]


def _drawn(node: NodeDef, inputs: list[Drawn]) -> Drawn:
    own = Drawn.BEGUN if any(name in node.attr and node.attr[name].b for name in _AGAIN) else Drawn.NONE
    latest = max(inputs, default=Drawn.NONE)
    if latest is Drawn.NONE:
        return own
    first, *others = inputs
    if node.op in _ZIPS:
        return latest
    if any(others) or node.op not in _OPENS_FIRST | _SHUFFLES:
        return Drawn.LATER
    return max(first, Drawn.FIRST) if node.op in _SHUFFLES else first


def merged(graph: GraphDef) -> GraphDef:
    """Returns the graph with one node for a dataset that several others read, which TensorFlow repeats for each.

        range/1 → shuffle/2 ─┐                                        ┌─┐
        range/3 → shuffle/4 ─┴─ zip      becomes    range/1 → shuffle/2 ─ zip

    Only so do they draw from one generator of seeds, as in the process that has made the dataset. Datasets that were
    made apart have generators of their own, whose names differ.
    """
    smaller = GraphDef(versions=graph.versions, library=graph.library)
    names: dict[str, str] = {}  # node -> the one that stands for it
    known: dict[bytes, str] = {}
    for original in graph.node:
        node = copied(original)
        node.name = ""
        node.input[:] = [str(Ref(names[ref.node], ref.output)) for ref in data_inputs(node)]
        name = known.setdefault(hashlib.sha256(node.SerializeToString(deterministic=True)).digest(), original.name)
        names[original.name] = name
        if name == original.name:
            node.name = name
            smaller.node.append(node)
    return smaller
