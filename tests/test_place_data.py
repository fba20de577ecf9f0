"""Pass 11: each worker takes the batch that it has read itself."""

from __future__ import annotations

import pytest
from programs import HOST, apply, layout, replicated, step_of, two_stages

from graph_passes.errors import PassError
from graph_passes.ir.batching import Interval
from graph_passes.ir.graph import Graph, NodeDef, data_inputs
from graph_passes.ir.program import Program
from graph_passes.ir.tensorflow_bridge import constant_value
from graph_passes.passes.place_data import PlaceData, joined


def placed(before: Program, together: int = 1, *, in_parts: bool = False) -> Program:
    """As many devices as ``together`` are on one worker."""
    own = step_of(before).layout
    names = [device for names in own.devices for device in names]
    hosts = {device: f"/worker{number // together}" for number, device in enumerate(names)}
    return apply(before, PlaceData(hosts, "area", in_parts=in_parts))


def source(program: Program, call: str) -> list[NodeDef]:
    """The nodes from the batch to a call, the call's first."""
    graph = Graph(program.graph)
    for ref in data_inputs(graph.nodes[call]):
        node = graph.nodes[ref.node]
        path = [node]
        while path[-1].op == "SplitV":
            path.append(graph.nodes[data_inputs(path[-1])[0].node])
        if path[-1].op == "MapUnstage":
            return path
    raise AssertionError(f"{call} doesn't read the batch")


def test_each_worker_cuts_its_own_batch_and_the_only_feed_is_a_number() -> None:
    program = placed(replicated(two_stages(), layout((2, 1), 4)))
    step = step_of(program)
    for replica in range(2):
        cut, taken = source(program, f"stage0/replica{replica}/forward0")
        assert cut.device == taken.device == f"/worker{replica}"
    assert step.feeds == {} and step.taken is not None and set(step.taken.arrays) == {"/worker0", "/worker1"}
    (fed,) = (node for node in program.graph.node if node.op == "Placeholder" and not node.name.startswith("pending/"))
    assert (fed.name, fed.device) == (step.taken.number.node, HOST)


def test_devices_of_one_worker_share_its_batch() -> None:
    program = placed(replicated(two_stages(), layout((2, 1), 4)), together=3)
    assert [node.name for node in program.graph.node if node.op == "MapUnstage"] == ["worker0/batch"]
    assert sum(node.op == "SplitV" for node in program.graph.node) == 1


def sizes(program: Program, node: NodeDef) -> list[int]:
    return list(constant_value(Graph(program.graph).nodes[data_inputs(node)[1].node]))


def test_a_part_is_cut_into_the_slices_of_its_devices() -> None:
    program = placed(replicated(two_stages(), layout((2, 1), 8, 2)), in_parts=True)
    parts = step_of(program).taken.parts
    assert parts == {"/worker0": (Interval(0, 2), Interval(4, 6)), "/worker1": (Interval(2, 4), Interval(6, 8))}
    cut, _ = source(program, "stage0/replica1/forward1")
    assert sizes(program, cut) == [2, 2]
    assert [str(ref) for ref in data_inputs(Graph(program.graph).nodes["stage0/replica1/forward1"])].count(
        f"{cut.name}:1"
    )


def test_a_part_of_one_slice_is_not_cut() -> None:
    program = placed(replicated(two_stages(), layout((2, 1), 4)), in_parts=True)
    assert [node.op for node in source(program, "stage0/replica1/forward0")] == ["MapUnstage"]


def test_slices_of_neighbours_are_one_part() -> None:
    assert joined([Interval(5, 6), Interval(2, 3), Interval(0, 2)]) == (Interval(0, 3), Interval(5, 6))
    assert joined([Interval(0, 6), Interval(0, 3)]) == (Interval(0, 6),)


def test_what_reads_the_batch_elsewhere_is_refused() -> None:
    before = replicated(two_stages(), layout((1, 1), 4))
    with pytest.raises(
        PassError, match="reads the batch, which only workers have: place it on one of the plan's devices"
    ):
        PlaceData({}, "area").run(before)
