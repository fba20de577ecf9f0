"""Megatron's column-row pairs: a layout in the same simulation, and what the search finds of its own accord."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf
from selection import thorough

from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.placement_candidates import variant_of
from dapple_tf.operators.split_layouts import Layouts
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.column_rows import BLOCKS, DEVICES, Block, graph_of, megatron_layout, pairs, record
from dapple_tf.tools.evaluation.combined_report import blocks_table
from graph_passes.analysis.split_rules import Split

TWO_GPUS = Topology(("/GPU:0", "/GPU:1"), np.full((2, 2), 1e9), np.zeros((2, 2)), np.full(2, np.inf))
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


def products(dtype: str) -> OpGraph:
    """Four products of a fed batch with a variable each, in half precision where that isn't the variables' own."""
    with tf.Graph().as_default() as graph:
        features = tf.compat.v1.placeholder(dtype, (4, 8), name="features")
        for number in range(4):
            handle = tf.raw_ops.VarHandleOp(dtype="float", shape=(8, 8), shared_name=f"w{number}", name=f"w{number}")
            weights = tf.cast(tf.raw_ops.ReadVariableOp(resource=handle, dtype="float"), dtype)
            features = tf.nn.relu(tf.raw_ops.MatMul(a=features, b=weights, name=f"product{number}"))
    return build_op_graph(graph.as_graph_def(), TWO_GPUS, OperatorCosts.p100())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_first_pair_begins_with_the_product_of_the_fed_batch(dtype: str) -> None:
    """A fed batch isn't an operator: its product had no other factor than a variable and counted as one's value.

    So the first product stayed whole, and every pair began one product too late.
    """
    layouts = Layouts(variant_of(products(dtype), TWO_GPUS, {}).problem, 2)
    splits = layouts.splits(layouts.columns_then_rows(0.0))
    chosen = [splits[f"product{number}"].dimension for number in range(4)]
    assert chosen == ["channel", "inner", "channel", "inner"]


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
