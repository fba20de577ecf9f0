"""Pass 10: gradients are reduced over replicas and the optimizer is applied on each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from program_text import read_program
from programs import (
    apply,
    chain,
    connected,
    devices,
    layout,
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
from graph_passes.ir.outline import outline
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.text import function_text, graph_text, library_text
from graph_passes.ir.verify import verify
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.update import Update, flush


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


def chunks(k: int = 0) -> Program:
    """``w`` in stages 0 and 2; ``u`` in 0, ``v`` in 1, ``t`` in 2; on the same two devices, the first k reversed."""
    names = devices(2)[0]
    order = make_schedule("dapple_a", [[0, 1]] * 3, 1, reverse_first_k=k)
    program = staged(chain("a: w u", "b: v", "c: w t"), "a", "b", split=range(k))
    return apply(connected(program, Layout((names,) * 3, 4, 4, 1)), Accumulate(), OrderTasks(order, names))


def update(program: Program, bucket_bytes: int = 1 << 20, **options: Any) -> Update:
    return Update(sgd_updates(program), bucket_bytes, **options)


def flushed(program: Program) -> str:
    graph, end = flush(update(program, carried=((1,),)), program)
    return f"{graph_text(graph)}ends with {end}\n"


def keeping() -> str:
    """A stage keeps a variable to whose gradient another one contributes."""
    program = ordered(staged(stateful_layers(), "a"), layout([1, 1], 4))
    step = dataclasses.replace(step_of(program), owners={**owners(program), "average": (0, 1)})
    after = apply(program.replace(step=step), update(program))
    packs = [f for f in after.graph.library.function if "pack" in f.signature.name]
    return "\n".join(map(function_text, packs))


SHOWN = re.compile(r"\+ (train|\S+/replica0/(pack|all_reduce\d|apply|carried_apply|read_from\d)) = ")


def added(program: Program, **options: Any) -> str:
    """What the pass adds, as far as the first replicas go."""
    after = apply(program, update(program, **options))
    verify(after, complete=True)
    changes = show_changes(graph_text(program.graph), graph_text(after.graph))
    return "".join(line for line in changes.splitlines(keepends=True) if SHOWN.match(line))


def test_what_is_added_to_a_step(golden: Callable[[str, str], None]) -> None:
    cut = layout([2, 1], 2)
    before, after = ordered(two_stages(), cut), updated(two_stages(), cut)
    changes = show_changes(graph_text(before.graph), graph_text(after.graph))
    known = [function.signature.name for function in before.graph.library.function]
    buckets = ordered(three_parameters(), layout([2], 4))
    carried = ((1,), (0,))
    forms = {
        "buckets of one dtype of up to 48 bytes": added(buckets, bucket_bytes=48),
        "of up to 47 bytes": added(buckets, bucket_bytes=47),
        "chunks are reduced when their own tasks are over": added(chunks()),
        "in the order in which gradients are complete": added(chunks(2)),
        "updates that are carried over: the first step, at whose end their accumulators must be complete": added(
            chunks(), carried=carried
        ),
        "a later step, at whose head they are reduced": added(chunks(), carried=carried, head=True),
        "a flush makes carried updates and nothing else": flushed(chunks()),
        "a stage that keeps a variable without contributing adds zeros": keeping(),
    }
    texts = [f"{changes}\n{library_text(after, *known)}", *(f"{title}\n\n{text}" for title, text in forms.items())]
    golden("update.txt", "\n".join(texts))


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


def test_what_is_carried_over_needs_accumulators() -> None:
    program = ordered(two_stages(), layout([1, 1], 2), accumulated=False)
    with pytest.raises(PassError, match=r"updates are carried over, but gradients have no accumulators"):
        update(program, carried=((1,),)).run(program)
