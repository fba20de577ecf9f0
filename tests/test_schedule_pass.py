"""Pass 9: control edges that fix the order of tasks on every device."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
from programs import (
    FORWARD,
    HOST,
    apply,
    connected,
    devices,
    layout,
    node,
    schedule_of,
    staged,
    stateful_layers,
    step_of,
    tied_layers,
    two_layers,
    two_stages,
    unchanged,
)

from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, control_inputs, data_inputs
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.tasks import Schedule, Task
from graph_passes.ir.verify import verify
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.schedule import OrderTasks


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


# ---- which edges there are


def test_the_next_task_waits_for_metrics_and_accumulation_of_the_one_before_it() -> None:
    cut = layout([1, 1], 4, 2)
    program = apply(connected(staged(stateful_layers(), "a"), cut), Accumulate())
    after = apply(program, OrderTasks(schedule_of(cut, "gpipe"), names_of(cut)))
    for stage, last in enumerate(("accumulate_F0", "metrics0")):
        waited = control_inputs(node(after, f"stage{stage}/replica0/forward1"))
        assert waited == [f"stage{stage}/replica0/forward0", f"stage{stage}/replica0/{last}"]


def test_evaluation_has_an_order_of_forwards() -> None:
    cut = layout([2, 1], 6, 2)
    program = connected(staged(two_layers(), "a", training=False), cut)
    after = apply(program, OrderTasks(schedule_of(cut, forward_only=True), names_of(cut)))
    assert {task.phase for task in step_of(after).entry} == {FORWARD}
    assert ("stage0/replica1/forward0", "stage0/replica1/forward1") in added(program, after)


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


def test_micro_batches_are_accumulated_in_one_order_so_that_no_schedule_may_run_backwards_in_another() -> None:
    cut = layout([1, 1], 2, 2)
    result = OrderTasks(Schedule.parse("0: 0F0 0F1 0B1 0B0\n1: 1F0 1F1 1B1 1B0"), names_of(cut)).run(accumulated(cut))
    with pytest.raises(PassError, match=r"^the graph has a cycle: "):
        verify(result)


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


def some_schedule(program: Program, names: tuple[str, ...], seed: int) -> Schedule:
    """A random order that can run: of the tasks whose inputs are there any one is next, on its device.

    Some tasks wait for one of any device that came before them, besides.
    """
    draw = random.Random(seed)
    graph, step = program.graph, step_of(program)
    nodes = {each.name: each for each in graph.node}
    owner = {entry: task for task, entry in step.entry.items()}
    # Node -> the tasks that it needs, its own included.
    needed: dict[str, set[Task]] = {}
    for name in Graph(graph).topological():
        read = [*(ref.node for ref in data_inputs(nodes[name])), *control_inputs(nodes[name])]
        needed[name] = {owner[name]} if name in owner else set()
        needed[name] = needed[name].union(*(needed[each] for each in read))
    # A task's last nodes add up gradients, in the order of micro-batches.
    waits = {task: set().union(*(needed[last] for last in step.exit[task])) - {task} for task in step.entry}
    orders: dict[int, list[Task]] = {number: [] for number in range(len(names))}
    done: list[Task] = []
    while len(done) < len(waits):
        ready = sorted(task for task in waits if task not in done and waits[task] <= set(done))
        task = draw.choice(ready)
        orders[names.index(nodes[step.entry[task]].device)].append(task)
        done.append(task)
    return Schedule(f"random_{seed}", {device: tuple(tasks) for device, tasks in orders.items()})


SHAPES: dict[str, tuple[Callable[[], Program], Layout]] = {
    "Bx and Bw": (lambda: staged(tied_layers(3), "layer_0", "layer_1", split={0, 1}), layout([1, 1, 1], 4, 4)),
    "uneven replicas": (lambda: staged(tied_layers(3), "layer_0", "layer_1"), layout([2, 3, 1], 7, 3)),
    "chunks": (lambda: staged(tied_layers(4), "layer_0", "layer_1", "layer_2"), Layout(devices(1, 1) * 2, 4, 4, 4)),
    "state and metrics": (lambda: staged(stateful_layers(), "a"), layout([2, 1], 6, 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_order_that_can_run_adds_control_edges_and_nothing_else(shape: str) -> None:
    make, cut = SHAPES[shape]
    names = tuple(dict.fromkeys(names_of(cut)))
    before = apply(connected(make(), cut), Accumulate())
    known = {each.name: control_inputs(each) for each in before.graph.node}
    for seed in range(2):
        schedule = some_schedule(before, names, seed)
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
