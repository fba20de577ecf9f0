"""A transformer block on four GPUs: FD-DPS beside Megatron's layout and data parallelism, in one simulation.

    python -m tools.evaluation.column_rows --json=docs/results/combined.json    # some two minutes of a core
    python -m tools.evaluation.combined_report                                  # combined.json -> combined.md

Megatron's layout (Shoeybi et al., 2019) is prescribed: the products with weights that begin attention and MLP are split
by columns of the weights, those that end them by rows, and what lies between is split alike, by heads or columns. All
that is left is placed as FD-DPS places it. All is simulated from the rooflines of a P100, with a block's forward,
backward and update in one slice, and momentum SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
from absl import flags

from dapple_tf.measuring.group_profiler import GroupProfiler, group_topologies
from dapple_tf.models.gpt import gpt
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fd_dps import fd_dps, with_rounds
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.placement_candidates import variant_of
from dapple_tf.operators.split_layouts import Layout, Layouts
from dapple_tf.operators.split_search import by_batch, by_layout
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.combined import CLUSTERS, estimated_profile
from dapple_tf.tools.evaluation.combined_report import blocks_table
from graph_passes.analysis.split_rules import Split, split_rules

FLAGS = flags.FlagValues()

_JSON = flags.DEFINE_string("json", None, "File for the numbers, see bench_report.", flag_values=FLAGS)

DEVICES = 4
_HEAD = 128
"""Width of an attention head."""
_ENDS = ("attention_output", "contract")
"""Layers whose weights Megatron splits by rows; those of `_BEGINS` it splits by columns."""
_BEGINS = ("query", "key", "value", "expand")


class Block(NamedTuple):
    """A block's size.

    Attributes:
        sequence: tokens of a sample.
        width: of the residual stream.
        samples: of the slice.
    """

    sequence: int
    width: int
    samples: int


BLOCKS = (Block(512, 1024, 1), Block(1024, 1024, 1), Block(512, 2048, 1), Block(512, 2048, 2), Block(256, 1024, 16))


def graph_of(block: Block) -> tuple[OpGraph, Topology]:
    """Returns the operators of a block's step, and four GPUs of one server."""
    model = gpt(vocabulary=256, sequence=block.sequence, depth=1, width=block.width, heads=block.width // _HEAD)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    costs, cluster = OperatorCosts.p100(), CLUSTERS[f"{DEVICES} GPUs"]
    sizes = (block.samples, 2 * block.samples)
    profile = estimated_profile(model, sizes, cluster.device_names[0], costs)
    profiler = GroupProfiler(model, profile, cluster, costs, block.samples)
    first = [layer.name for layer in profile.layers].index("block_0")
    own = profiler.operators([0, first, first + 1, len(profile.layers)], block.samples)[first, first + 1]
    topology = group_topologies(cluster, (DEVICES,))[DEVICES]
    return build_op_graph(own.placed, topology, costs, own.shapes, rules=split_rules), topology


def megatron_layout(layouts: Layouts) -> Layout:
    """Returns Megatron's layout of a block: products with weights by columns, then rows, and all between them alike."""
    layout = layouts.none()
    graph = layouts.problem.graph
    seeds = []
    for op, name in enumerate(graph.names):
        dimension = _dimension(name) if "MatMul" in graph.ops[op] else None
        rule = -1 if dimension is None else layouts.rule(op, dimension)
        if rule >= 0:
            layout[op] = rule
            seeds.append(op)
    for op in seeds:
        layouts.grow(layout, op, layout[op])
    return layout


def _dimension(name: str) -> str | None:
    """Returns the dimension by which Megatron splits a product of a block's layer; None of others."""
    ends, begins = (any(_is_of(name, layer) for layer in layers) for layers in (_ENDS, _BEGINS))
    if not (ends or begins):
        return None
    if "/gradients/" not in name:
        return "inner" if ends else "channel"
    if name.endswith("_1"):  # of the weights
        return "row" if ends else "channel"
    return "channel" if ends else "inner"


def _is_of(name: str, layer: str) -> bool:
    """Returns whether an operator is of a layer, whose name may have a number behind it."""
    return any(part.rstrip("0123456789").removesuffix("_") == layer for part in name.split("/"))


def pairs(splits: Mapping[str, Split]) -> int:
    """Returns in how many of a block's two halves the first forward products are split by columns, the last by rows."""
    halves = ((_BEGINS[:3], _ENDS[0]), (_BEGINS[3:], _ENDS[1]))
    forward = {name: split.dimension for name, split in splits.items() if "/gradients/" not in name}

    def split_by(layer: str, dimension: str) -> bool:
        return any(_is_of(name, layer) and "MatMul" in name and by == dimension for name, by in forward.items())

    return sum(all(split_by(layer, "channel") for layer in begin) and split_by(end, "inner") for begin, end in halves)


def record(block: Block) -> dict[str, Any]:
    """Returns a block's steps in ms: on one GPU, and on four by each layout."""
    graph, topology = graph_of(block)
    base = variant_of(graph, topology, {})
    layouts = Layouts(base.problem, topology.count)
    megatron = by_layout(base, layouts, megatron_layout(layouts))
    if megatron is None:
        raise ValueError(f"no operator of {block} can be split into {topology.count} parts: it has too few heads")
    parallel = by_batch(base) if block.samples >= topology.count else None
    placement = fd_dps(graph, topology)
    return {
        **block._asdict(),
        "one_device_ms": 1e3 * float(graph.seconds[:, 0].sum()),
        "data_parallel_ms": None if parallel is None else 1e3 * parallel.seconds,
        "megatron_ms": 1e3 * megatron.seconds,
        "megatron_rounds_ms": 1e3 * with_rounds(megatron).seconds,
        "fd_dps_ms": 1e3 * placement.seconds,
        "pairs": pairs(placement.splits),
    }


def main() -> None:
    """Computes, prints and writes."""
    check_output(_JSON.value)
    records = [record(block) for block in BLOCKS]
    if _JSON.value is not None:
        write_results(_JSON.value, "blocks", records, kind="simulated")
    print(blocks_table(records))


if __name__ == "__main__":
    command.start(main, FLAGS)
