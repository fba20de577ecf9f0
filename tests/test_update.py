"""Pass 10: gradients are reduced over replicas and the optimizer is applied on each."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest
from program_text import read_program
from programs import (
    DOUBLE,
    FLOAT,
    HOST,
    apply,
    chain,
    connected,
    devices,
    layout,
    node,
    ordered,
    owners,
    sgd_updates,
    show_changes,
    staged,
    stateful_layers,
    step_of,
    two_stages,
    updated,
)

from dapple_tf.schedules.schedules import make_schedule
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, NodeDef, control_inputs
from graph_passes.ir.outline import outline
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.text import graph_text, library_text
from graph_passes.ir.verify import verify
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.update import Update, flush


def calls(program: Program, phase: str) -> dict[str, NodeDef]:
    """Name -> call of a phase."""
    return {each.name: each for each in program.graph.node if each.attr["_dapple_phase"].s.decode() == phase}


# ---- structure


def test_what_is_added_to_a_step(golden: Callable[[str, str], None]) -> None:
    cut = layout([2, 1], 2)
    before, after = ordered(two_stages(), cut), updated(two_stages(), cut)
    changes = show_changes(graph_text(before.graph), graph_text(after.graph))
    known = [function.signature.name for function in before.graph.library.function]
    golden("update.txt", f"{changes}\n{library_text(after, *known)}")


def test_functions_are_built_once_however_many_replicas_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica had them built anew, only for all but one to be dropped: 8 of 20 s of ResNet-50 on 32 devices."""
    built: list[str] = []

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        built.append(name)
        return outline(name, *arguments, **options)

    for module in ("reduce_gradients", "apply_updates"):
        monkeypatch.setattr(f"graph_passes.passes.{module}.outline", counted)
    updated(two_stages(), layout([2, 2], 8))
    few, built = built, []
    updated(two_stages(), layout([4, 4], 8))
    assert few == built and len(built) == len(set(built))


# ---- all-reduce


def three_parameters() -> Program:
    """Stage 0 with parameters of 32, 16 and (float32) 8 bytes."""
    program = read_program("""
        x[?, 2], w[2, 2], b[2], c float32[2]
        a/wide = Cast(c, DstT=float64)
        a/matmul = MatMul(x, w)
        a/shifted = AddV2(a/matmul, b)
        a/sum = AddV2(a/shifted, a/wide)
        loss = L2Loss(a/sum)
    """)
    return staged(program)


@pytest.mark.parametrize(("limit", "kinds"), [(48, [DOUBLE, FLOAT]), (47, [DOUBLE, DOUBLE, FLOAT])])
def test_gradients_are_reduced_in_buckets_of_one_dtype_up_to_a_size(limit: int, kinds: list[int]) -> None:
    program = updated(three_parameters(), layout([2], 4), bucket_bytes=limit)
    assert list(node(program, "stage0/replica0/pack").attr["Tout"].list.type) == kinds
    assert [node(program, f"stage0/replica0/all_reduce{i + 1}").attr["T"].type for i in range(len(kinds))] == kinds


def tied_and_own(split: Container[int] = ()) -> Program:
    """``w`` in stages 0 and 2; ``u`` in 0, ``v`` in 1 and ``t`` in 2."""
    return staged(chain("a: w u", "b: v", "c: w t"), "a", "b", split=split)


def test_a_stage_that_keeps_a_variable_without_contributing_adds_zeros() -> None:
    program = ordered(staged(stateful_layers(), "a"), layout([1, 1], 4))
    kept = {**owners(program), "average": (0, 1)}
    after = apply(program, Update(sgd_updates(program), kept, HOST, 1 << 20))
    library = {function.signature.name: function for function in after.graph.library.function}
    ops = {stage: [each.op for each in library[f"stage0_1_pack_on{stage}"].node_def] for stage in range(2)}
    assert "ReadVariableOp" in ops[0] and "Fill" not in ops[0]
    assert "Fill" in ops[1] and "ReadVariableOp" not in ops[1]


# ---- one micro-batch


def test_what_is_carried_over_needs_accumulators() -> None:
    program = ordered(two_stages(), layout([1, 1], 2), accumulated=False)
    update = Update(sgd_updates(program), owners(program), HOST, 1 << 20, accumulated=False, carried=((1,),))
    with pytest.raises(PassError, match=r"updates are carried over, but gradients have no accumulators"):
        update.run(program)


# ---- stages that share devices, and the order of reductions


def ordered_chunks(k: int = 0) -> Program:
    """``tied_and_own`` in three stages, all on the same two devices, the first k reversed."""
    names = devices(2)[0]
    order = make_schedule("dapple_a", [[0, 1]] * 3, 1, reverse_first_k=k)
    program = connected(tied_and_own(split=range(k)), Layout((names,) * 3, 4, 4, 1))
    return apply(program, Accumulate(), OrderTasks(order, names))


def chunked(k: int = 0, **options: Any) -> Program:
    """:func:`ordered_chunks`, complete."""
    program = ordered_chunks(k)
    after = apply(program, Update(sgd_updates(program), owners(program), HOST, 1 << 20, **options))
    verify(after, complete=True)
    return after


def ends_before(program: Program, name: str) -> set[str]:
    """Tasks that a node waits for directly."""
    exits = {end: str(task) for task, ends in step_of(program).exit.items() for end in ends}
    return {exits[waited] for waited in control_inputs(node(program, name)) if waited in exits}


def test_a_chunk_is_reduced_when_its_own_tasks_are_over() -> None:
    program = chunked()
    assert ends_before(program, "stage2/replica0/pack") == {"2F0", "2B0"}
    assert ends_before(program, "stage1/replica0/pack") == {"1F0", "1B0"}
    assert ends_before(program, "stage0_2/replica1/pack") == {"0F0.r1", "0B0.r1", "2F0.r1", "2B0.r1"}


@pytest.mark.parametrize(("k", "order"), [(0, ["2", "1", "0_2", "0"]), (2, ["2", "0_2", "0", "1"])])
def test_reductions_run_in_the_order_in_which_gradients_are_complete(k: int, order: list[str]) -> None:
    program = chunked(k)
    place = devices(2)[0][0]
    names = [each.name for each in program.graph.node if each.op == "CollectiveReduceV2" and each.device == place]
    assert [name.split("/")[0].removeprefix("stage") for name in names] == order


# ---- updates that are carried over


def test_what_is_carried_over_is_reduced_at_the_head_of_the_next_step() -> None:
    first = chunked(carried=((1,), (0,)))
    assert sorted({name.split("/")[0] for name in calls(first, "apply")}) == ["stage0_2", "stage2"]
    # Nothing reads these accumulators in this step, but they must be complete at its end.
    train = control_inputs(node(first, "train"))
    assert {"stage0/replica1/accumulate_B0", "stage1/replica0/accumulate_B0"} <= set(train)
    following = chunked(carried=((1,), (0,)), head=True)
    carried = calls(following, "carried_apply")
    assert sorted(carried) == [f"stage{s}/replica{r}/carried_apply" for s in (0, 1) for r in (0, 1)]
    assert not any(ends_before(following, name) for name in carried)
    for stage in (0, 1):
        reader = node(following, f"stage{stage}/replica1/read_from{stage}")
        assert f"stage{stage}/replica1/carried_apply" in control_inputs(reader)
    assert not control_inputs(node(following, "stage2/replica0/read_from2"))


def test_a_flush_makes_carried_updates_and_nothing_else() -> None:
    program = ordered_chunks()
    graph, end = flush(Update(sgd_updates(program), owners(program), HOST, 1 << 20, carried=((1,),)), program)
    ops = [each.op for each in graph.node if each.op != "Const"]
    assert sorted(set(ops)) == ["CollectiveReduceV2", "NoOp", "StatefulPartitionedCall"]
    assert {each.name.split("/")[0] for each in graph.node if "/" in each.name} == {"stage1"}
    assert set(control_inputs(Graph(graph).nodes[end])) == {f"stage1/replica{r}/carried_apply" for r in (0, 1)}
