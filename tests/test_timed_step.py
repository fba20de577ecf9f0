"""Timed steps: each piece of work lies between two times, once; nothing that is timed is optimized away."""

from __future__ import annotations

import numpy as np
import pytest
from programs import HOST, apply, sgd_updates, staged, tied_layers, two_layers

import dapple_tf as dapple
from dapple_tf.measuring.timed_step import MICRO_BATCHES, StepRuns, TimedSession, TimedStep, empty_calls, timed_step
from graph_passes.ir.graph import Graph, control_inputs
from graph_passes.ir.program import Program

LAYERED = ["0F0", "1F0", "1Bx0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1", "1apply0", "0apply0"]


def made(program: Program, *cuts: str, halves: Program | None = None) -> TimedStep:
    """A timed step, with Bx where a program is to be divided into ``halves``."""
    split = None if halves is None else staged(halves, *cuts, prefix="split_", split=range(len(cuts) + 1))
    return timed_step(program, sgd_updates(program), HOST, HOST, "timed_", split=split)


def work(timed: TimedStep) -> list[str]:
    return [f"{item.key.stage}{item.key.work}{item.key.micro_batch}" for item in timed.items]


def test_the_work_of_a_step_in_order() -> None:
    program = apply(staged(two_layers(), "a"))
    assert work(made(program, "a", halves=two_layers())) == LAYERED
    assert work(made(program)) == [item for item in LAYERED if "Bx" not in item]


@pytest.mark.parametrize("cuts", [("layer_0",), ("layer_0", "layer_1")])
def test_each_node_runs_between_two_times_once(cuts: tuple[str, ...]) -> None:
    timed = made(staged(tied_layers(3), *cuts), *cuts, halves=tied_layers(3))
    graph = Graph(timed.graph)
    stamps = {name: index for index, name in enumerate(timed.stamps)}
    started = {node.name: [stamps[n] for n in control_inputs(node) if n in stamps] for node in graph}
    for index, item in enumerate(timed.items):
        assert all(started[name] == [index] for name in item.entry)
        assert set(item.exit) <= set(control_inputs(graph.nodes[timed.stamps[index + 1]]))
    # What an item needs and another makes possible starts after a time, too.
    in_items = {name for item in timed.items for name in (*item.entry, *item.exit)}
    behind: set[str] = set()
    for name in graph.topological():
        if name in in_items or any(ref.node in behind for ref in graph.inputs(name)):
            behind.add(name)
    needed = set().union(*(graph.ancestors([ref], control=False) for n in in_items for ref in graph.inputs(n)))
    for name in (needed & behind) - in_items:
        assert len(started[name]) == 1, name


def test_sizes_are_fed() -> None:
    timed = made(staged(two_layers(), "a"))
    kinds = {node.name: node.op for node in timed.graph.node}
    assert timed.sizes and all(kinds[name] == "Placeholder" for name in timed.sizes)
    assert any(factors.tolist() == [1] * MICRO_BATCHES for factors in timed.sizes.values())  # cutting a batch in two


def test_results_that_nothing_reads_are_read() -> None:
    timed = made(staged(two_layers(), "a"), "a", halves=two_layers())
    graph = Graph(timed.graph)
    read = {str(ref.node) for name in timed.unread for ref in graph.inputs(name)}
    assert "stage1/replica0/forward0" in read  # the loss
    assert "stage1/input_gradient" in read


def test_times_of_runs() -> None:
    cluster = dapple.Cluster.local(1, kind="cpu")
    with TimedSession(cluster, cluster.device_names[0], {}) as session:
        runs = StepRuns(session, empty_calls(session.device, 3), "nothing")
        runs.feed(1, {})
        runs.rounds[1] = [runs.run(1) for _ in range(4)]
        assert runs.times(1, "nothing", 2, 0).shape == (4,)
        assert runs.time(1, "nothing", 2, 0) == np.median(runs.times(1, "nothing", 2, 0)) > 0
        assert runs.typical() > 0
        assert runs.time(1, "F", 0) == 0  # There is no such item.
