"""Sums over the replicas of a micro-batch: collective operations inside stage functions."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from programs import (
    apply,
    captured,
    compiled,
    copied,
    dense,
    in_float64,
    layout,
    node,
    replicated,
    step_of,
    task,
    updated,
)

from graph_passes.errors import PassError
from graph_passes.ir.collectives import key_nodes, sums_of, without_sums
from graph_passes.ir.graph import Graph
from graph_passes.ir.program import Program, StageFunction, Value, ValueKind
from graph_passes.ir.verify import _verify_meetings, verify
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import Partition, StageForm
from graph_passes.passes.replicate import sum_keys


@functools.cache
@in_float64()
def differentiated() -> Program:
    """Two stages, each of which normalises over its replicas, after `build_backward`."""
    x = h = keras.Input((2,), name="x")
    for name in ("a", "b"):
        h = dense(name)(h)
        h = keras.layers.BatchNormalization(name=f"{name}_norm", synchronized=True)(h)
    program = captured(compiled(x, h), np.zeros((4, 2)), np.zeros((4, 3)))
    return apply(program, AssignStages(("a_norm",)), BuildForward(), BuildBackward())


@functools.cache
def staged(replicas: tuple[int, ...], recompute: str = "none", split: tuple[int, ...] = ()) -> Program:
    forms = [StageForm(recompute, split=stage in split, replicated=own > 1) for stage, own in enumerate(replicas)]
    return apply(differentiated(), Partition(forms))


def sums(function: StageFunction | None) -> int:
    return 0 if function is None else len(sums_of(function.function.node_def))


def test_a_replica_that_is_alone_adds_nothing_up() -> None:
    first, last = staged((2, 1)).stages
    assert [sums(function) for function in (first.forward, first.backward)] == [3, 2]
    assert [sums(function) for function in (last.forward, last.backward)] == [0, 0]
    peers = differentiated().roles.peers
    assert peers is not None
    assert not {Value(ref) for ref in peers.refs} & {value for function in last.functions for value in function.inputs}


@pytest.mark.parametrize("recompute", ["none", "boundary", "min_cut"])
@pytest.mark.parametrize("split", [(), (0, 1)])
def test_nothing_is_added_up_twice(recompute: str, split: tuple[int, ...]) -> None:
    """What is computed again reads the sums that were kept: all replicas would have to compute them again together."""
    program = staged((2, 2), recompute, split)
    peers = program.roles.peers
    assert peers is not None
    for stage in program.stages:
        names = [each.name for part in stage.functions for each in sums_of(part.function.node_def)]
        assert len(names) == len(set(names)) == 5
        for part in stage.functions:
            if sums(part):
                assert {Value(ref) for ref in peers.refs} <= set(part.inputs)
    kinds = ValueKind.RESIDUAL, ValueKind.PARTIAL
    handed_on = {v.ref for s in program.stages for f in s.functions for v in f.inputs if v.kind in kinds}
    for stage in program.stages:
        assert stage.graph is not None
        keys = key_nodes(Graph(stage.graph), peers.refs)
        assert len(keys) == 6 and not keys & {ref.node for ref in handed_on}, "keys are arguments"


def test_a_graph_without_sums_gives_what_it_was_given() -> None:
    graph = differentiated().stages[0].graph
    assert graph is not None
    alone = without_sums(graph)
    assert len(sums_of(graph.node)) == 6 and not sums_of(alone.node)
    for before in sums_of(graph.node):
        after = next(each for each in alone.node if each.name == before.name)
        assert after.op == "Identity" and list(after.input) == list(before.input[:1])


def numbers(program: Program, text: str) -> list[int]:
    """Count, group and first key that a task is called with."""
    peers = program.roles.peers
    assert peers is not None
    called = task(text)
    function = dict(program.stages[called.stage].phases)[called.phase]
    assert function is not None
    call = node(program, step_of(program).entry[called])
    return [
        node(program, call.input[function.inputs.index(Value(ref))]).attr["value"].tensor.int_val[0]
        for ref in peers.refs
    ]


def test_replicas_without_samples_are_no_members() -> None:
    program = replicated(staged((3, 2)), layout([3, 2], 2, 2, 12))
    assert [numbers(program, text)[0] for text in ("0F0", "0F0.r1", "1F0", "1F0.r1", "0B0")] == [2] * 5
    program = replicated(staged((3, 2)), layout([3, 2], 6, 2, 6))
    assert [numbers(program, text)[0] for text in ("0F0", "0F0.r2", "1F1.r1")] == [3, 3, 2]


def test_each_task_has_keys_of_its_own() -> None:
    where = layout([3, 2], 12, 2)
    program = replicated(staged((3, 2)), where)
    peers = program.roles.peers
    assert peers is not None and peers.keys == 12
    assert [numbers(program, f"0F0{replica}") for replica in ("", ".r1", ".r2")] == [numbers(program, "0B0")] * 3
    assert numbers(program, "1F0")[1] == numbers(program, "1F1")[1] != numbers(program, "0F0")[1]
    firsts = [numbers(program, text)[2] for text in ("0F0", "0F1", "1F0", "1F1")]
    assert firsts == [1, 13, 25, 37] and sum_keys(program, where) == 48


def test_replicas_that_never_meet_are_refused() -> None:
    """Device 0 runs 0F0 before 0F1, device 1 the other way round: each waits for the other in the midst of a task."""
    program = copied(updated(staged((2, 2)), layout([2, 2], 8, 2)))
    entry = step_of(program).entry
    first, second = (node(program, entry[task(text)]) for text in ("0F0.r1", "0F1.r1"))
    second.input[:] = [text for text in second.input if not text.startswith("^")]
    first.input.append(f"^{second.name}")
    with pytest.raises(PassError, match=r"never meet.*'?stage0/replica.*forward.*synchronized=False"):
        verify(program)


def test_a_sum_lacks_a_member() -> None:
    program = copied(replicated(staged((2, 1)), layout([2, 1], 4)))
    call = node(program, step_of(program).entry[task("0F0.r1")])
    call.op = "NoOp"
    with pytest.raises(PassError, match="add up over 2 replicas, but are 1 calls"):
        _verify_meetings(program, Graph(program.graph))
