"""Megatron's column-row pairs: a layout in the same simulation, and what the search finds of its own accord."""

from __future__ import annotations

import pathlib

import pytest
from selection import thorough

from dapple_tf.operators.placement_candidates import variant_of
from dapple_tf.operators.split_layouts import Layouts
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.column_rows import BLOCKS, DEVICES, Block, graph_of, megatron_layout, pairs, record
from dapple_tf.tools.evaluation.combined_report import blocks_table
from graph_passes.analysis.split_rules import Split

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def test_megatrons_layout_splits_a_block_by_columns_then_rows() -> None:
    """Products of batches of matrices, those of attention, couldn't be split along their inner axis."""
    graph, topology = graph_of(Block(16, 512, 1))
    layouts = Layouts(variant_of(graph, topology, {}).problem, DEVICES)
    layout = megatron_layout(layouts)
    splits = layouts.splits(layout)
    assert pairs(splits) == 2 and {split.parts for split in splits.values()} == {DEVICES}
    forward = {name: split.dimension for name, split in splits.items() if "/gradients/" not in name}
    assert {by for name, by in forward.items() if "Gelu" in name} == {"channel"}
    # The pairs and all between them are a region each, forward and backward; scores are split by heads.
    for operator, products in (("Gelu/Tanh", 4), ("attention_1/Softmax", 8)):
        (own,) = [region for region in layouts.regions(layout) if any(operator in graph.names[op] for op in region)]
        assert sum("MatMul" in graph.ops[op] for op in own) >= products


def test_columns_then_rows_are_megatrons_layout_found_without_names() -> None:
    """Growing from the heaviest products first, or from any operator, gave other layouts, and one pair of two."""
    graph, topology = graph_of(Block(16, 512, 1))
    layouts = Layouts(variant_of(graph, topology, {}).problem, DEVICES)
    assert layouts.columns_then_rows(0.0) == megatron_layout(layouts)
    assert layouts.columns_then_rows(float("inf")) == layouts.none()


def test_pairs_are_those_of_forward_products() -> None:
    columns, rows = Split("channel", 4), Split("inner", 4)
    splits = {"m/block_0/expand_1/Tensordot/MatMul": columns, "m/block_0/contract_1/Tensordot/MatMul": rows}
    assert pairs(splits) == 1
    assert pairs({**splits, "m/block_0/contract_1/Tensordot/MatMul": columns}) == 0
    attention = {f"m/block_0/attention_1/{layer}_1/MatMul": columns for layer in ("query", "key", "value")}
    assert pairs({**splits, **attention, "m/block_0/attention_1/attention_output_1/MatMul": rows}) == 2


@pytest.mark.parametrize("number", [thorough(number) for number in range(len(BLOCKS))])
def test_what_is_found_is_as_stored(number: int) -> None:
    block = BLOCKS[number]
    (stored,) = [
        one
        for one in read_results(RESULTS / "combined.json")["blocks"]["records"]
        if (one["sequence"], one["width"], one["samples"]) == block
    ]
    assert blocks_table([record(block)]) == blocks_table([stored])
