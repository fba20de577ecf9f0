"""Hierarchical all-reduces of pass 10."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from program_text import read_program
from programs import (
    HOST,
    Machine,
    layout,
    mlp,
    ordered,
    sgd_updates,
    show_changes,
    staged,
    step_of,
    tied_layers,
    two_layers,
    updated,
)

from dapple_tf.tracing.step_nodes import step_nodes
from dapple_tf.view.step_graph import task_graph
from graph_passes.errors import PassError
from graph_passes.ir.collectives import AllReduceRules, part_count
from graph_passes.ir.graph import Graph, Ref, data_inputs
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Program
from graph_passes.ir.tensorflow_bridge import constant_value
from graph_passes.ir.text import graph_text
from graph_passes.passes.update import Update, flush

EVERY_STAGE = frozenset(range(10))


def on_servers(*counts: int) -> dict[str, int]:
    """Devices, in the order of stages and replicas, on servers of this many."""
    servers = [server for server, count in enumerate(counts) for _ in range(count)]
    return {HOST[:-1] + str(device): server for device, server in enumerate(servers)}


def rules(counts: Sequence[int], stages: frozenset[int] = EVERY_STAGE) -> AllReduceRules:
    """Hierarchical all-reduces on servers with this many devices."""
    return AllReduceRules(hierarchical=stages, server_of=on_servers(*counts))


def collectives(program: Program) -> dict[str, list[tuple[int, int, int]]]:
    """Device -> (group size, group key, instance key) of its collectives in the order in which it starts them."""
    graph = Graph(program.graph)
    by_device: dict[str, list[tuple[int, int, int]]] = {}
    for name in graph.topological():
        each = graph.nodes[name]
        if each.op == "CollectiveReduceV2":
            size, group, instance = (int(constant_value(graph.nodes[ref.node])) for ref in data_inputs(each)[1:4])
            by_device.setdefault(each.device[-1], []).append((size, group, instance))
    return by_device


def kinds(program: Program) -> dict[NodeKind | None, int]:
    """Number of nodes of each kind."""
    found: dict[NodeKind | None, int] = {}
    for each in program.graph.node:
        found[NodeKind.of(each)] = found.get(NodeKind.of(each), 0) + 1
    return found


# ---- structure


def test_what_becomes_of_an_all_reduce(golden: Callable[[str, str], None]) -> None:
    flat, after = (
        updated(staged(two_layers()), layout([4], 4), all_reduces=way) for way in (AllReduceRules(), rules([2, 2]))
    )
    golden("hierarchical_reductions.txt", show_changes(graph_text(flat.graph), graph_text(after.graph)))


@pytest.mark.parametrize(
    ("servers", "parts"),
    [([3, 2], 2), ([1, 1, 2], 1), ([4], 0), ([1, 1, 1, 1], 0), ([3, 3, 4], 3)],
)
def test_there_are_as_many_parts_as_the_smallest_server_has_members(servers: list[int], parts: int) -> None:
    members = [[None] * count for count in servers]
    assert part_count(members) == parts
    after = updated(staged(two_layers()), layout([sum(servers)], sum(servers)), all_reduces=rules(servers))
    if not parts:  # one ring does as well
        assert kinds(after).keys().isdisjoint((NodeKind.REDUCE_SCATTER, NodeKind.ALL_GATHER))
        return
    sizes = {size for of_device in collectives(after).values() for size, _, _ in of_device}
    assert sizes == {len(servers)}
    assert sum(map(len, collectives(after).values())) == parts * len(servers)


def test_only_the_groups_that_are_asked_for_change() -> None:
    on_each = updated(staged(mlp(), "dense_0"), layout([2, 2], 4), all_reduces=rules([1, 2, 1], frozenset([1])))
    assert NodeKind.REDUCE_SCATTER not in kinds(on_each)  # each stage has one device on each server
    meetings = []
    for stage in (1, 0):
        own = rules([2, 2], frozenset([stage]))
        tied = updated(staged(tied_layers(2), "layer_0"), layout([2, 2], 4), all_reduces=own)
        meetings.append({size for of_device in collectives(tied).values() for size, _, _ in of_device})
    assert meetings == [{4}, {2}]


def test_a_vector_shorter_than_its_parts_is_reduced_whole() -> None:
    program = read_program("x[?, 1], w[1]\na/product = Mul(x, w)\nloss = L2Loss(a/product)")
    after = updated(staged(program), layout([4], 4), all_reduces=rules([2, 2]))
    assert sum(map(len, collectives(after).values())) == 2
    assert kinds(after)[NodeKind.ALL_GATHER] == 4


def test_a_device_without_a_server_is_an_error() -> None:
    with pytest.raises(PassError, match=r"all-reduce 1 is on '.*CPU:3', which is on no server"):
        updated(staged(two_layers()), layout([4], 4), all_reduces=rules([3]))


def test_traces_and_drawings_know_its_parts() -> None:
    after = updated(staged(two_layers()), layout([4], 4), all_reduces=rules([2, 2]))
    parts = [each for each in step_nodes(after).values() if each.kind == "all_reduce"]
    assert {each.reduction for each in parts} == {1}
    assert sorted(each.meeting for each in parts if each.meeting is not None) == [2, 2, 3, 3]
    drawing = task_graph(after, list(on_servers(4)))
    labels = [each.label for each in drawing.nodes]
    assert labels.count("AllGather 0") == 4 and labels.count("ReduceScatter 0") == 4


def test_what_is_carried_over_is_reduced_alike() -> None:
    program = staged(two_layers(), "a")
    options = {"want_gradients": False, "carried": ((0,),), "all_reduces": rules([2, 3])}
    update = Update(sgd_updates(program), 1 << 20, **options)
    step = ordered(program, layout([4, 1], 8, 2))
    graph, _ = flush(update, step)
    reduced = [each for each in graph.node if each.op == "CollectiveReduceV2"]
    assert len(reduced) == 4 and all("between_servers" in each.name for each in reduced)


# ---- numbers


@pytest.mark.parametrize(("servers", "bucket_bytes"), [([4, 1, 2], 1), ([2, 2], 1 << 20)])
def test_each_device_gets_the_sum_of_all(servers: list[int], bucket_bytes: int) -> None:
    count = sum(servers)
    program, after = (
        updated(staged(two_layers()), layout([count], count), bucket_bytes=bucket_bytes, all_reduces=way)
        for way in (AllReduceRules(), rules(servers))
    )
    rng = np.random.default_rng(count)
    feeds = {ref: rng.normal(size=(count, 2)) for ref in step_of(after).feeds.values()}
    values = {name: rng.normal(size=variable.shape) for name, variable in program.variables.items()}
    gradients = []
    for complete in (program, after):
        with Machine(complete.graph, count) as machine:
            for device in on_servers(*servers):
                for name, value in values.items():
                    machine.load(device, [complete.variables[name]], [value])
            names = [each.name for each in complete.graph.node if each.name.endswith(tuple("0123456789"))]
            vectors = [name for name in names if "/all_reduce" in name and name.count("/") == 2]
            by_replica: dict[str, list[np.ndarray]] = {}
            for name, vector in zip(vectors, machine.run([Ref(name) for name in vectors], feeds), strict=True):
                by_replica.setdefault(name.split("/")[1], []).append(vector)
            gradients.append(by_replica)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == count
    for replica, flat in gradients[0].items():
        for vector, expected, first in zip(gradients[1][replica], flat, gradients[1]["replica0"], strict=True):
            np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-13)
            assert np.abs(vector).max() > 0
            np.testing.assert_array_equal(vector, first)  # Replicas that differ in a bit would drift apart.
