"""Pass 9: control edges that fix the order of tasks on every device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from programs import (
    HOST,
    apply,
    connected,
    devices,
    layout,
    staged,
    stateful_layers,
    step_of,
    tied_layers,
    two_layers,
    two_stages,
    unchanged,
)

from dapple_tf.schedules.schedules import make_schedule
from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef, control_inputs
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.tasks import Schedule
from graph_passes.ir.verify import verify
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.schedule import OrderTasks

LAYERS = ("layer_0", "layer_1", "layer_2")


def names_of(layout: Layout) -> tuple[str, ...]:
    return tuple(itertools.chain.from_iterable(layout.devices))


def accumulated(cut: Layout) -> Program:
    return apply(connected(two_stages(), cut), Accumulate())


def added(before: Program, after: Program) -> set[tuple[str, str]]:
    """(earlier, later) of each control edge that is new."""
    known = {each.name: control_inputs(each) for each in before.graph.node}
    return {
        (waited, each.name) for each in after.graph.node for waited in control_inputs(each)[len(known[each.name]) :]
    }


def test_a_schedule_that_waits_for_itself_in_a_circle_is_found_by_the_verifier() -> None:
    cut = layout([1, 1], 2, 2)
    stuck = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")
    result = OrderTasks(stuck, names_of(cut)).run(accumulated(cut))
    with pytest.raises(PassError) as caught:
        verify(result)
    shown = str(caught.value).removeprefix("the graph has a cycle: ").split(" -> ")
    assert shown[0] == shown[-1]
    assert {f"stage0/replica0/{each}" for each in ("backward0", "forward1")} <= set(shown)
    assert {f"stage1/replica0/{each}" for each in ("backward0", "forward1")} <= set(shown)


# ---- what is refused


@pytest.mark.parametrize(
    ("counts", "batch", "schedule", "text"),
    [
        (
            *([1, 1], 2, "0: 0F0 0F1 0F2 0B0 0B1 0B2\n1: 1F0 1B0 1F1"),
            "has 9 tasks but the program has 8; not scheduled: ['1B1'], not in the program: ['0B2', '0F2']",
        ),
        (
            *([2, 1], 2, "0: 0F0.r1 0B0.r1\n1: 0F0 0B0\n2: 1F0 1B0"),
            f"runs 0F0.r1 on {HOST}, but its stage is on {HOST[:-1]}1",
        ),
        (
            *([2, 1], 1, "0: 0F0 0B0\n1: 0F0.r1 0B0.r1\n2: 1F0 1B0"),
            "has 6 tasks but the program has 4; not scheduled: [], not in the program: ['0B0.r1', '0F0.r1']",
        ),
    ],
)
def test_schedules_that_do_not_fit_are_refused(counts: list[int], batch: int, schedule: str, text: str) -> None:
    cut = layout(counts, batch, 2 if counts == [1, 1] else 1)
    program = accumulated(cut)
    with unchanged(program), pytest.raises(PassError) as caught:
        OrderTasks(Schedule.parse(schedule, "mine"), names_of(cut)).run(program)
    assert str(caught.value) == f"schedule 'mine' {text}"


# ---- control edges and nothing else: what a step computes doesn't depend on the policy


def computed(program: Program) -> tuple[dict[str, bytes], bytes]:
    """All that a graph says but for the control inputs of its nodes: by node, and its functions."""
    bare = GraphDef()
    bare.CopyFrom(program.graph)
    for each in bare.node:
        data = [name for name in each.input if not name.startswith("^")]
        del each.input[:]
        each.input.extend(data)
    nodes = {each.name: each.SerializeToString(deterministic=True) for each in bare.node}
    functions = sorted(each.SerializeToString(deterministic=True) for each in bare.library.function)
    return nodes, b"".join(functions)


CHUNKS = Layout(devices(1, 1) * 2, 4, 4, 4)
SHAPES: dict[str, tuple[Callable[[], Program], Layout, tuple[str, ...]]] = {
    "Bx and Bw": (
        lambda: staged(tied_layers(3), *LAYERS[:2], split=range(3)),
        layout([1, 1, 1], 4, 4),
        ("zb_h1", "zb_h2"),
    ),
    "uneven replicas": (lambda: staged(tied_layers(3), *LAYERS[:2]), layout([2, 3, 1], 7, 3), ("gpipe", "dapple_b")),
    "chunks": (lambda: staged(tied_layers(4), *LAYERS), CHUNKS, ("interleaved",)),
    "state and metrics": (lambda: staged(stateful_layers(), "a"), layout([2, 1], 6, 2), ("gpipe",)),
    "evaluation": (lambda: staged(two_layers(), "a", training=False), layout([2, 1], 6, 2), ("gpipe",)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_order_that_can_run_adds_control_edges_and_nothing_else(shape: str) -> None:
    make, cut, policies = SHAPES[shape]
    names = tuple(dict.fromkeys(names_of(cut)))
    training, count = shape != "evaluation", len(cut.micro_batch_intervals)
    before = apply(connected(make(), cut), *([Accumulate()] if training else []))
    known = {each.name: control_inputs(each) for each in before.graph.node}
    for policy in policies:
        places = [[names.index(device) for device in stage] for stage in cut.devices]
        schedule = make_schedule(policy, places, count, active=cut.active, forward_only=not training)
        after = apply(before, OrderTasks(schedule, names))
        assert computed(after) == computed(before)
        assert all(control_inputs(each)[: len(known[each.name])] == known[each.name] for each in after.graph.node)
        step = step_of(after)
        assert step.schedule == schedule
        assert after.replace(graph=before.graph, step=dataclasses.replace(step, schedule=None)) == before
        pairs = [pair for order in schedule.orders.values() for pair in itertools.pairwise(order)]
        assert added(before, after) == {
            (end, step.entry[second]) for first, second in pairs for end in step.exit[first]
        }
