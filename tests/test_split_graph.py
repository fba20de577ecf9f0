"""Operators of a cost graph become parts."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Within

from dapple_tf.operators.op_graph import OpGraph
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.analysis.split_rules import FIRST, Split, SplitRule

ROWS = SplitRule("batch", 6, (0,), (0,))
COLUMNS = SplitRule("channel", 4, (1,), (1,))
SUMS = SplitRule("sum", 6, (0,), (None,))
LAUNCH, COPY = 0.5, 0.125


def chain(
    *rules: SplitRule | None,
    edges: list[tuple[int, int, int, int]] | None = None,
    groups: list[int] | None = None,
    tensor_outputs: list[int] | None = None,
) -> OpGraph:
    """a -> b -> c -> ..., each taking 10.5 s on device 0 and 20.5 s on device 1; tensors of 24 bytes."""
    count = len(rules)
    names = tuple("abcdefgh"[:count])
    edges = [(number, number + 1, number, 0) for number in range(count - 1)] if edges is None else edges
    tensors = 1 + max((tensor for _, _, tensor, _ in edges), default=-1)
    group_of = np.arange(count) if groups is None else np.array(groups)
    return OpGraph(
        names=names,
        ops=("Op",) * count,
        seconds=np.tile([10.5, 20.5], (count, 1)),
        edges=np.array(edges, np.int64).reshape(-1, 4),
        tensor_bytes=np.full(tensors, 24.0),
        groups=group_of,
        pinned=np.full(group_of.max() + 1, -1),
        stored_bytes=np.zeros(group_of.max() + 1),
        splits={number: (rule,) for number, rule in enumerate(rules) if rule is not None},
        launch_seconds=np.full(2, LAUNCH),
        copy_seconds=np.full(2, COPY),
        tensor_outputs=None if tensor_outputs is None else np.array(tensor_outputs),
    )


def check(graph: OpGraph) -> OpGraph:
    """Checks what holds of every graph."""
    assert len(set(graph.names)) == graph.count == len(graph.ops) == len(graph.seconds) == len(graph.groups)
    assert (graph.edges[:, 0] < graph.edges[:, 1]).all(), "the numbering isn't topological"
    tensors = graph.edges[:, 2]
    assert set(tensors[tensors >= 0].tolist()) == set(range(len(graph.tensor_bytes)))
    assert graph.tensor_outputs is not None and len(graph.tensor_outputs) == len(graph.tensor_bytes)
    assert len(graph.pinned) == len(graph.stored_bytes) == graph.groups.max() + 1
    for tensor in range(len(graph.tensor_bytes)):
        assert len(set(graph.edges[tensors == tensor, 0].tolist())) == 1, "a tensor has two producers"
    return graph


def show(graph: OpGraph) -> list[str]:
    """``producer[output] -> consumer[argument] (bytes)`` for each edge; ``producer -> consumer`` if it only waits."""
    check(graph)
    assert graph.tensor_outputs is not None
    lines = []
    for producer, consumer, tensor, argument in graph.edges.tolist():
        before, after = graph.names[producer], graph.names[consumer]
        if tensor < 0:
            lines.append(f"{before} -> {after}")
        else:
            output, size = graph.tensor_outputs[tensor], graph.tensor_bytes[tensor]
            lines.append(f"{before}[{output}] -> {after}[{argument}] ({size:g})")
    return lines


def test_an_operator_is_cut_and_joined_for_its_neighbours() -> None:
    graph = chain(None, ROWS, None)
    split = apply_splits(graph, {"b": Split("batch", 4)})
    assert split.names == ("a", "a/split_0_0_4_of_6", "b/part0", "b/part1", "b/part2", "b/part3", "b/joined_0", "c")
    assert split.ops == ("Op", "SplitV", "Op", "Op", "Op", "Op", "ConcatV2", "Op")
    assert show(split) == [
        "a[0] -> a/split_0_0_4_of_6[0] (24)",
        "a/split_0_0_4_of_6[0] -> b/part0[0] (8)",
        "a/split_0_0_4_of_6[1] -> b/part1[0] (8)",
        "a/split_0_0_4_of_6[2] -> b/part2[0] (4)",
        "a/split_0_0_4_of_6[3] -> b/part3[0] (4)",
        "b/part0[0] -> b/joined_0[0] (8)",
        "b/part1[0] -> b/joined_0[1] (8)",
        "b/part2[0] -> b/joined_0[2] (4)",
        "b/part3[0] -> b/joined_0[3] (4)",
        "b/joined_0[0] -> c[0] (24)",
    ]
    third, sixth, copied = 10 / 3 + LAUNCH, 10 / 6 + LAUNCH, LAUNCH + 24 * COPY
    np.testing.assert_allclose(split.seconds[:, 0], [10.5, copied, third, third, sixth, sixth, copied, 10.5])
    assert len(set(split.groups.tolist())) == 8
    assert apply_splits(graph, {}) is graph


def test_operators_that_are_split_alike_stay_split() -> None:
    split = apply_splits(chain(None, ROWS, ROWS, None), {"b": Split("batch", 2), "c": Split("batch", 2)})
    assert split.names == ("a", "a/split_0_0_2", "b/part0", "b/part1", "c/part0", "c/part1", "c/joined_0", "d")
    assert "b/part1[0] -> c/part1[0] (12)" in show(split)


@pytest.mark.parametrize(
    "rule, parts", [(COLUMNS, 2), (ROWS, 3), (SplitRule("batch", 3, (0,), (0,)), 2)], ids=["axis", "parts", "sizes"]
)
def test_operators_that_are_split_otherwise_are_joined_and_cut_anew(rule: SplitRule, parts: int) -> None:
    splits = {"b": Split("batch", 2), "c": Split(rule.dimension, parts)}
    split = apply_splits(chain(None, ROWS, rule, None), splits)
    cut = {2: "0_2_of_3", 3: "0_3"}[parts] if rule is not COLUMNS else "1_2"
    assert f"b/joined_0[0] -> b/split_0_{cut}[0] (24)" in show(split)
    assert split.names.index("b/joined_0") < split.names.index(f"b/split_0_{cut}") < split.names.index("c/part0")


def test_units_of_several_elements_are_the_same_cut_where_all_parts_are_equal() -> None:
    halves = SplitRule("batch", 2, (0,), (0,))
    split = apply_splits(chain(None, ROWS, halves), {"b": Split("batch", 2), "c": Split("batch", 2)})
    assert not any("joined" in name for name in split.names)


def test_sums_are_added() -> None:
    split = apply_splits(chain(None, SUMS, ROWS), {"b": Split("sum", 2), "c": Split("batch", 2)})
    assert split.ops[split.names.index("b/joined_0")] == "AddN"
    assert [line for line in show(split) if "joined" in line] == [
        "b/part0[0] -> b/joined_0[0] (24)",
        "b/part1[0] -> b/joined_0[1] (24)",
        "b/joined_0[0] -> b/split_0_0_2[0] (24)",
    ]


def test_readers_share_cuts_and_joins() -> None:
    edges = [(0, 1, 0, 0), (0, 2, 0, 0), (1, 3, 1, 0), (1, 4, 1, 0), (2, 4, 2, 1)]
    graph = chain(None, ROWS, ROWS, None, None, edges=edges)
    split = apply_splits(graph, {"b": Split("batch", 2), "c": Split("batch", 2)})
    assert [name for name in split.names if "split" in name or "joined" in name] == [
        "a/split_0_0_2",
        "b/joined_0",
        "c/joined_0",
    ]
    assert len([line for line in show(split) if line.startswith("b/joined_0")]) == 2


def test_inputs_that_are_read_whole_and_shapes() -> None:
    rule = SplitRule("batch", 6, (None, 0, None), (0,), {0: 0})
    edges = [(0, 3, 0, 0), (1, 3, 1, 1), (2, 3, 2, 2)]
    split = apply_splits(chain(None, None, None, rule, edges=edges), {"d": Split("batch", 2)})
    assert show(split) == [
        "b[0] -> b/split_0_0_2[0] (24)",
        "b/split_0_0_2[0] -> d/part0[1] (12)",
        "c[0] -> d/part0[2] (24)",
        "b/split_0_0_2[1] -> d/part1[1] (12)",
        "c[0] -> d/part1[2] (24)",
    ]


def test_what_every_part_has_of_its_own_isnt_joined() -> None:
    forward = SplitRule("channel", 4, (1,), (1, FIRST))
    backward = SplitRule("channel", 4, (1, FIRST), (1,))
    edges = [(0, 1, 0, 0), (1, 2, 1, 0), (1, 2, 2, 1)]
    graph = chain(None, forward, backward, edges=edges, tensor_outputs=[0, 0, 1])
    both = show(apply_splits(graph, {"b": Split("channel", 2), "c": Split("channel", 2)}))
    assert [line for line in both if line.startswith("b/part1")] == [
        "b/part1[0] -> c/part1[0] (12)",
        "b/part1[1] -> c/part1[1] (24)",
    ]
    one = show(apply_splits(graph, {"b": Split("channel", 2)}))
    assert "b/part0[1] -> c[1] (24)" in one and not any("joined_1" in line for line in one)
    other = show(apply_splits(graph, {"c": Split("channel", 2)}))
    assert [line for line in other if line.startswith("b[1]")] == ["b[1] -> c/part0[1] (24)", "b[1] -> c/part1[1] (24)"]


def test_whatever_waits_waits_for_all_parts() -> None:
    edges = [(0, 1, -1, -1), (1, 2, -1, -1)]
    split = apply_splits(chain(None, ROWS, ROWS, edges=edges), {"b": Split("batch", 2), "c": Split("batch", 2)})
    assert sorted(show(split)) == sorted(
        ["a -> b/part0", "a -> b/part1"] + [f"b/part{one} -> c/part{other}" for one in range(2) for other in range(2)]
    )


def test_splits_of_the_others_stay_theirs() -> None:
    split = apply_splits(chain(None, ROWS, ROWS, COLUMNS), {"b": Split("batch", 2)})
    assert {split.names[number]: rules for number, rules in split.splits.items()} == {"c": (ROWS,), "d": (COLUMNS,)}


@pytest.mark.parametrize(
    "splits, text",
    [
        ({"x": Split("batch", 2)}, "no operator 'x'"),
        ({"a": Split("batch", 2)}, "only along nothing"),
        ({"b": Split("channel", 2)}, r"'b' can't be split along 'channel', only along batch \(6\)"),
        ({"b": Split("batch", 7)}, "into 7 parts: it has length 6"),
        ({"b": Split("batch", 1)}, "into 1 parts"),
    ],
)
def test_impossible_splits_are_told(splits: dict[str, Split], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        apply_splits(chain(None, ROWS), splits)


def test_what_has_to_be_with_others_isnt_split() -> None:
    with pytest.raises(ValueError, match="where 1 others are"):
        apply_splits(chain(None, ROWS, groups=[0, 0]), {"b": Split("batch", 2)})
    graph = chain(None, ROWS)
    graph.pinned[1] = 1
    with pytest.raises(ValueError, match="on device 1"):
        apply_splits(graph, {"b": Split("batch", 2)})


def test_splitting_a_large_graph_takes_no_time(within: Within) -> None:
    count, splits = 60_000, 3_000
    generator = np.random.default_rng(0)
    later = np.repeat(np.arange(1, count), 2)
    earlier = (later * generator.random(len(later))).astype(np.int64)
    edges = np.stack((earlier, later, earlier, np.tile([0, 1], count - 1)), axis=1)
    graph = OpGraph(
        names=tuple(f"operator/{number}" for number in range(count)),
        ops=("Op",) * count,
        seconds=generator.random((count, 8)),
        edges=edges,
        tensor_bytes=generator.random(count),
        groups=np.arange(count),
        pinned=np.full(count, -1),
        stored_bytes=np.zeros(count),
        splits=dict.fromkeys(range(count), (SplitRule("batch", 64, (0, None), (0,)),)),
        launch_seconds=np.full(8, LAUNCH),
        copy_seconds=np.full(8, COPY),
    )
    chosen = generator.choice(count, splits, replace=False)
    with within(1.5):
        split = apply_splits(graph, {graph.names[number]: Split("batch", 4) for number in chosen.tolist()})
    assert split.count > count + 3 * splits
    assert (split.edges[:, 0] < split.edges[:, 1]).all()
