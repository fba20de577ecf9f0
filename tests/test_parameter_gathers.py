"""Parameters in shards: gathered for stages, in the schedule's order, and before their shards change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from program_text import read_program
from programs import HOST, Machine, apply, owners, sgd, staged, step_of
from tensorflow.core.framework import types_pb2

from dapple_tf.schedules.schedules import make_schedule
from graph_passes.ir.graph import Builder, Graph, Ref, control_inputs, data_inputs
from graph_passes.ir.group_update import GroupUpdate, Shards
from graph_passes.ir.outline import call_node
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.storage import load_function, merge_library
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.verify import verify
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.update import Update

DEVICES = tuple(HOST[:-1] + str(index) for index in range(2))
WIDTHS = (2, 3, 5, 1)


def layers(count: int = 3) -> Program:
    """``tanh`` of a product in each of at most three stages, with 6, 15 and 5 elements."""
    text = [", ".join(["x[?, 2]", *(f"w{index}[{WIDTHS[index]}, {WIDTHS[index + 1]}]" for index in range(count))])]
    h = "x"
    for index in range(count):
        layer = f"layer_{index}"
        text += [f"{layer}/matmul = MatMul({h}, w{index})", f"{layer}/tanh = Tanh({layer}/matmul)"]
        h = f"{layer}/tanh"
    program = read_program("\n".join([*text, f"loss = L2Loss({h})"]))
    return staged(program, *(f"layer_{index}" for index in range(count - 1)))


def complete(program: Program, devices: Sequence[Sequence[str]], *, in_shards: bool, carried: int = 0) -> Program:
    """A step of one micro-batch of 4 samples with SGD, by bucket of 64 bytes."""
    layout = Layout(tuple(map(tuple, devices)), 4, 4, 1)
    numbers = [[DEVICES.index(name) for name in own] for own in devices]
    schedule = make_schedule("dapple_a", numbers, 1, active=layout.active)
    updates = []
    for stage, names in enumerate(devices):
        captured, shards = sgd([program.variables[f"w{stage}"]], 0.5), None
        if in_shards and len(names) > 1:
            cut = {ref: dataclasses.replace(v, shards=len(names)) for ref, v in captured.variables.items()}
            captured = dataclasses.replace(captured, variables=cut)
            shards = Shards(frozenset({f"w{stage}"}), stored=frozenset({f"w{stage}"}))
        updates.append(GroupUpdate((stage,), captured, shards=shards))
    names = frozenset(name for update in updates if update.shards for name in update.shards.parameters)
    groups = tuple((stage,) for stage in range(carried))
    update = Update(tuple(updates), owners(program), HOST, 64, carried=groups, head=bool(carried))
    replicate = Replicate(layout, HOST, owners(program), in_shards=names, bucket_bytes=64)
    passes = [SplitConcat(), Accumulate(), OrderTasks(schedule, DEVICES), update]
    program = apply(program, replicate, *passes)
    verify(program, complete=True)
    return program


def waits(graph: Graph, name: str) -> set[str]:
    """All nodes that have run before a node does."""
    seen: set[str] = set()
    stack = [name]
    while stack:
        node = graph.nodes[stack.pop()]
        before = {ref.node for ref in data_inputs(node)} | set(control_inputs(node))
        stack += before - seen
        seen |= before
    return seen


def test_gathers_go_one_stage_ahead_of_a_devices_tasks() -> None:
    program = complete(layers(), [DEVICES] * 3, in_shards=True)
    step, graph = step_of(program), Graph(program.graph)
    assert set(step.gathers) == {(stage, replica) for stage in range(3) for replica in range(2)}
    for (stage, replica), nodes in step.gathers.items():
        assert len(nodes) == 2, "the shards of both devices, for this replica alone"
        before = [name for name in nodes for name in control_inputs(graph.nodes[name])]
        assert before == ([] if stage < 2 else [step.entry[Task.parse(f"0F0.r{replica}")]] * 2)
        assert set(nodes) <= waits(graph, step.entry[Task.parse(f"{stage}F0.r{replica}")])
    for stage in range(3):
        for replica, device in enumerate(DEVICES):
            reads = step.shard_reads[(stage,), device]
            assert len(reads) == 2 and {graph.nodes[name].device for name in reads} == {device}
            assert set(reads) <= waits(graph, f"stage{stage}/replica{replica}/apply"), "a shard changes after that"


def test_a_device_with_one_stage_gathers_as_the_step_begins_and_one_read_serves_all_replicas() -> None:
    step = step_of(complete(layers(1), [DEVICES], in_shards=True))
    assert not step.gathers
    assert {key: len(nodes) for key, nodes in step.shard_reads.items()} == {((0,), device): 1 for device in DEVICES}


def test_reads_of_shards_wait_for_carried_updates() -> None:
    program = complete(layers(), [DEVICES] * 3, in_shards=True, carried=1)
    step, graph = step_of(program), Graph(program.graph)
    for replica, device in enumerate(DEVICES):
        for name in step.shard_reads[(0,), device]:
            assert f"stage0/replica{replica}/carried_apply" in control_inputs(graph.nodes[name])
        for name in step.shard_reads[(1,), device]:
            assert not waits(graph, name), "updated in its own step"


def test_steps_give_what_whole_parameters_give() -> None:
    rng = np.random.default_rng(0)
    program, x = layers(), rng.normal(size=(4, 2))
    values = {name: rng.normal(size=variable.shape) for name, variable in program.variables.items()}
    losses = {}
    for in_shards in (False, True):
        step = complete(program, [DEVICES] * 3, in_shards=in_shards)
        load = empty_graph()
        builder, shards = Builder(load), 2 if in_shards else 1
        cut = [dataclasses.replace(variable, shards=shards) for variable in program.variables.values()]
        function = load_function("load_all", cut)
        vector = builder.const([number for v in cut for number in values[v.name].ravel().tolist()], cut[0].dtype)
        for number, device in enumerate(DEVICES):
            own = [builder.const(number, types_pb2.DT_INT32)] if in_shards else []
            builder.append(call_node(f"load{number}", function, [vector, *own], device=device))
        merge_library(load, [function])
        with Machine(step.graph, 2) as machine:
            machine.add(load, "all")
            machine.run([], after=["all/load0", "all/load1"])
            made, feeds = step_of(step), {step_of(step).feeds[Ref("x")]: x}
            assert made.loss is not None and made.train is not None
            losses[in_shards] = [machine.run([made.loss], feeds, after=[made.train])[0] for _ in range(3)]
    assert len(set(losses[True])) == 3
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-12)
