"""Pass 9: control edges that fix the order of tasks on every device."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
from programs import (
    FORWARD,
    apply,
    connected,
    copied,
    devices,
    layout,
    mlp,
    node,
    replicated,
    schedule_of,
    staged,
    stateful_layers,
    step_of,
    tied_layers,
    two_stages,
)
from step_programs import Case, complete, plan

from dapple_tf.frontend.capture import Mode
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


def refused(program: Program, schedule: Schedule, names: tuple[str, ...]) -> str:
    before = copied(program)
    with pytest.raises(PassError) as caught:
        OrderTasks(schedule, names).run(program)
    assert program == before
    return str(caught.value)


# ---- which edges there are


@pytest.mark.parametrize("policy", ["gpipe", "dapple_a", "dapple_b"])
@pytest.mark.parametrize(("counts", "batch", "micro_batches"), [([1, 1], 4, 4), ([2, 1], 7, 3), ([3, 2], 4, 3)])
def test_the_new_control_edges_are_exactly_the_consecutive_pairs_of_the_schedule(
    policy: str, counts: list[int], batch: int, micro_batches: int
) -> None:
    cut = layout(counts, batch, micro_batches)
    before = accumulated(cut)
    schedule = schedule_of(cut, policy)
    after = apply(before, OrderTasks(schedule, names_of(cut)))
    step = step_of(before)
    assert added(before, after) == {
        (end, step.entry[second])
        for order in schedule.orders.values()
        for first, second in itertools.pairwise(order)
        for end in step.exit[first]
    }
    assert step_of(after).schedule == schedule
    assert len(after.graph.node) == len(before.graph.node)


def test_a_small_step_written_out() -> None:
    cut = layout([1, 1], 3, 3)
    before = accumulated(cut)
    after = apply(before, OrderTasks(schedule_of(cut, "dapple_a"), names_of(cut)))
    # 0: F0 F1 B0 F2 B1 B2
    assert {edge for edge in added(before, after) if "stage0" in edge[0]} == {
        ("stage0/replica0/forward0", "stage0/replica0/forward1"),
        ("stage0/replica0/forward1", "stage0/replica0/backward0"),
        ("stage0/replica0/backward0", "stage0/replica0/forward2"),
        ("stage0/replica0/accumulate_B0", "stage0/replica0/forward2"),
        ("stage0/replica0/forward2", "stage0/replica0/backward1"),
        ("stage0/replica0/backward1", "stage0/replica0/backward2"),
        ("stage0/replica0/accumulate_B1", "stage0/replica0/backward2"),
    }


def test_the_next_task_waits_for_metrics_and_accumulation_of_the_one_before_it() -> None:
    cut = layout([1, 1], 4, 2)
    program = apply(connected(staged(stateful_layers(), "a"), cut), Accumulate())
    after = apply(program, OrderTasks(schedule_of(cut, "gpipe"), names_of(cut)))
    assert control_inputs(node(after, "stage0/replica0/forward1")) == [
        "stage0/replica0/forward0",
        "stage0/replica0/accumulate_F0",
    ]
    assert control_inputs(node(after, "stage1/replica0/forward1")) == [
        "stage1/replica0/forward0",
        "stage1/replica0/metrics0",
    ]


@pytest.mark.parametrize("policy", ["gpipe", "dapple_a", "dapple_b"])
def test_every_order_of_a_policy_leaves_one_way_to_run_the_tasks_of_a_device(policy: str) -> None:
    cut = layout([2, 2, 1], 8, 4)
    program = apply(connected(staged(mlp(3), "dense_0", "dense_1"), cut), Accumulate())
    schedule = schedule_of(cut, policy)
    after = apply(program, OrderTasks(schedule, names_of(cut)))
    place = {name: index for index, name in enumerate(Graph(after.graph).topological())}
    for order in schedule.orders.values():
        places = [place[step_of(after).entry[task]] for task in order]
        assert places == sorted(places)


def test_evaluation_has_an_order_of_forwards() -> None:
    cut = layout([2, 1], 6, 2)
    program = connected(staged(mlp(mode=Mode.TEST), "dense_0", training=False), cut)
    schedule = schedule_of(cut, forward_only=True)
    after = apply(program, OrderTasks(schedule, names_of(cut)))
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


def test_a_schedule_of_other_tasks_is_refused_with_what_differs() -> None:
    cut = layout([1, 1], 2, 2)
    schedule = Schedule.parse("0: 0F0 0F1 0F2 0B0 0B1 0B2\n1: 1F0 1B0 1F1", "mine")
    assert refused(accumulated(cut), schedule, names_of(cut)) == (
        "schedule 'mine' has 9 tasks but the program has 8; not scheduled: ['1B1'], not in the program: ['0B2', '0F2']"
    )


def test_a_task_on_another_device_is_refused_with_both_devices() -> None:
    cut = layout([2, 1], 2)
    schedule = Schedule.parse("0: 0F0.r1 0B0.r1\n1: 0F0 0B0\n2: 1F0 1B0", "mine")
    first, second, _ = names_of(cut)
    assert refused(accumulated(cut), schedule, names_of(cut)) == (
        f"schedule 'mine' runs 0F0.r1 on {first}, but its stage is on {second}"
    )


def test_a_schedule_for_replicas_without_samples_is_refused() -> None:
    cut = layout([2, 1], 1)
    schedule = Schedule.parse("0: 0F0 0B0\n1: 0F0.r1 0B0.r1\n2: 1F0 1B0", "mine")
    assert refused(replicated(two_stages(), cut), schedule, names_of(cut)) == (
        "schedule 'mine' has 6 tasks but the program has 4; not scheduled: [], not in the program: ['0B0.r1', '0F0.r1']"
    )


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
    after: dict[Task, Task] = {}
    done: list[Task] = []
    while len(done) < len(waits):
        ready = sorted(task for task in waits if task not in done and waits[task] <= set(done))
        task = draw.choice(ready)
        orders[names.index(nodes[step.entry[task]].device)].append(task)
        if done and draw.random() < 0.3:
            after[task] = draw.choice(done)
        done.append(task)
    return Schedule(f"random_{seed}", {device: tuple(tasks) for device, tasks in orders.items()}, after)


SHAPES: dict[str, tuple[Callable[[], Program], Layout]] = {
    "whole B": (lambda: staged(mlp(3), "dense_0", "dense_1"), layout([1, 1, 1], 4, 4)),
    "Bx and Bw": (lambda: staged(mlp(3), "dense_0", "dense_1", split={0, 1}), layout([1, 1, 1], 4, 4)),
    "recomputation": (lambda: staged(mlp(3), "dense_0", recompute="boundary"), layout([1, 1], 3, 3)),
    "uneven replicas": (lambda: staged(mlp(3), "dense_0", "dense_1"), layout([2, 3, 1], 7, 3)),
    "replicas of split stages": (lambda: staged(mlp(2), "dense_0", split={0, 1}), layout([3, 2], 4, 3)),
    "chunks": (lambda: staged(mlp(4), "dense_0", "dense_1", "dense_2"), Layout(devices(1, 1) * 2, 4, 4, 4)),
    "tied weights": (lambda: staged(tied_layers(3), "layer_0", "layer_1"), layout([1, 2, 1], 5, 3)),
    "state and metrics": (lambda: staged(stateful_layers(), "a"), layout([2, 1], 6, 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_order_that_can_run_adds_control_edges_and_nothing_else(shape: str) -> None:
    make, cut = SHAPES[shape]
    names = tuple(dict.fromkeys(names_of(cut)))
    before = apply(connected(make(), cut), Accumulate())
    orders = set()
    for seed in range(8):
        schedule = some_schedule(before, names, seed)
        orders.add(schedule)
        after = apply(before, OrderTasks(schedule, names))
        assert computed(after) == computed(before)
        known = {each.name: control_inputs(each) for each in before.graph.node}
        assert all(control_inputs(each)[: len(known[each.name])] == known[each.name] for each in after.graph.node)
        step = dataclasses.replace(step_of(after), schedule=None)
        assert after.replace(graph=before.graph, step=step) == before
        pairs = [pair for order in schedule.orders.values() for pair in itertools.pairwise(order)]
        pairs += [(waited, task) for task, waited in schedule.after.items()]
        assert added(before, after) == {
            (end, step.entry[second]) for first, second in pairs for end in step.exit[first]
        }
    assert len(orders) == 8


PLACES: dict[str, tuple[tuple[str, ...], list[list[int]]]] = {
    "whole B": (("gpipe", "dapple_a", "dapple_b"), [[0], [1], [2]]),
    "uneven replicas": (("gpipe", "dapple_a", "dapple_b"), [[0, 1], [2, 3, 4], [5]]),
    "two stages on a device": (("gpipe", "dapple_a", "dapple_b"), [[0], [0], [1]]),
    "Bx and Bw": (
        ("zb_h1", "zb_h2", "zero_bubble", "fast_forward", "fast_forward_a", "fast_forward_b"),
        [[0], [1], [2]],
    ),
    "replicas of split stages": (
        ("zb_h1", "fast_forward", "fast_forward_a", "fast_forward_b"),
        [[0, 1, 2], [3], [4, 5]],
    ),
}
"""Policies that have the same tasks, and where: whole B or both halves."""


@pytest.mark.few(6)
@pytest.mark.parametrize("model", ["mlp", "tied", "attention"])
@pytest.mark.parametrize("places", PLACES)
def test_complete_steps_of_all_policies_compute_the_same(places: str, model: str) -> None:
    policies, on = PLACES[places]
    steps = {policy: complete(Case(model, plan(model, len(on), on, 4, 13, policy))) for policy in policies}
    assert len({str(step_of(step).schedule) for step in steps.values()}) > 1
    first, *others = map(computed, steps.values())
    assert all(other == first for other in others)
