"""Pass 6: the last backward of each replica runs in pieces, whose gradients are reduced during the rest of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import tensorflow as tf
from programs import (
    apply,
    connected,
    devices,
    embedding,
    layout,
    meanings,
    mlp,
    replicated,
    show_changes,
    staged,
    step_of,
    task,
    two_layers,
    updated,
)

from dapple_tf.tracing.step_nodes import step_nodes
from dapple_tf.view.step_graph import task_graph
from graph_passes.errors import PassError
from graph_passes.ir.collectives import sums_of
from graph_passes.ir.graph import Graph, control_inputs
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Program, ValueKind
from graph_passes.ir.text import graph_text, library_text
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.cut_backward import CutBackward


def shown(before: Program, after: Program) -> str:
    known = [function.signature.name for function in before.graph.library.function]
    return f"{show_changes(graph_text(before.graph), graph_text(after.graph))}\n{library_text(after, *known)}"


def pieces(program: Program) -> str:
    """Which tasks are cut, and the gradients that each piece of a stage gives."""
    step, lines = step_of(program), []
    for each, own in step.pieces.items():
        lines.append(f"{each}: {[*own]}, from {step.entry[each]} to {step.exit[each]}")
    for stage in program.stages:
        for number, piece in enumerate(stage.pieces):
            given = meanings(value for value in piece.outputs if value.kind is not ValueKind.PARTIAL)
            lines.append(f"piece {number} of stage {stage.index} gives {', '.join(given)}")
    return "\n".join(lines)


def test_what_becomes_of_the_last_backwards(golden: Callable[[str, str], None]) -> None:
    """Those with samples of each replica. Rows of embeddings come last; what is sent back, with its layer's piece."""
    before = replicated(staged(two_layers()), layout([2], 4, 2))
    forms = {
        "the last of three micro-batches": (staged(mlp()), layout([2], 6, 3), ("dense_0", "dense_1")),
        "the last with samples": (staged(mlp()), layout([2], 3, 2, 4), ("dense_0",)),
        "rows of an embedding": (staged(embedding(tied=False)), layout([2], 8, 2), ("a",)),
        "what is sent back": (staged(mlp(), "dense_0"), layout([1, 2], 4, 1), ("dense_1",)),
    }
    texts = [shown(before, apply(before, CutBackward(("a",))))]
    for title, (program, own, cuts) in forms.items():
        texts.append(f"{title}\n\n{pieces(apply(replicated(program, own), CutBackward(cuts)))}\n")
    golden("cut_backward.txt", "\n".join(texts))


def test_rows_of_an_embedding_are_gathered_by_themselves() -> None:
    program = updated(staged(embedding(tied=False)), layout([2], 8, 2), backward_cuts=["a"])
    packs = [node for node in program.graph.node if NodeKind.of(node) is NodeKind.PACK]
    assert [node.attr["f"].func.name for node in packs] == ["stage0_pack_piece0"] * 2


def test_each_piece_is_reduced_when_it_is_over() -> None:
    program = updated(staged(mlp()), layout([2], 8, 2), backward_cuts=["dense_0", "dense_1"])
    view, step = Graph(program.graph), step_of(program)
    kinds = {node.name: NodeKind.of(node) for node in view}
    packs = [node for node in view if kinds[node.name] is NodeKind.PACK and node.device.endswith("0")]
    assert len(packs) == 3
    readers = [name for call in step.pieces[task("0B1")] for name in view.consumers(call)]
    added = [name for name in readers if kinds[name] is NodeKind.ACCUMULATE]
    for pack, own, after in zip(packs, added, (*added[1:], ""), strict=True):
        assert own in control_inputs(pack) and after not in control_inputs(pack)
    reduced = [view.nodes[name] for name in view.topological() if NodeKind.of(view.nodes[name]) is NodeKind.ALL_REDUCE]
    first, second = ([each.name[-1] for each in reduced if each.device.endswith(device)] for device in "01")
    assert first == second == sorted(first)


def test_sums_over_replicas_run_in_one_order_in_each_piece() -> None:
    """Their order in the whole backward goes back and forth between what become two pieces."""
    program = staged(mlp())
    body = program.stages[0].own_backward.function
    results = sorted(body.ret)
    for number, result in enumerate([*results[::2], *results[1::2]]):
        one = body.node_def.add(name=f"sum{number}", op="CollectiveReduceV2")
        one.attr["T"].type = tf.float32.as_datatype_enum
        one.input.extend([body.ret[result], *([f"^sum{number - 1}"] if number else [])])
        body.ret[result] = f"sum{number}:data:0"
    pieces = CutBackward(("dense_0",)).run(replicated(program, layout([1], 2, 1))).stages[0].pieces
    assert len(pieces) == 2
    for piece in pieces:
        sums = sums_of(piece.function.node_def)
        assert len(sums) > 1
        assert all(before.name in control_inputs(after) for before, after in itertools.pairwise(sums))


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(PassError, match="'dense_9' names no layer of the model; did you mean"):
        apply(replicated(staged(mlp()), layout([2], 4, 2)), CutBackward(("dense_9",)))
    with pytest.raises(PassError, match="'dense_9' names no layer"):  # before there is a step
        apply(mlp(), AssignStages((), ("dense_9",)))


def test_a_step_without_gradients_is_left_as_it_is() -> None:
    before = connected(staged(two_layers(), training=False), layout([2], 4, 1))
    assert graph_text(apply(before, CutBackward(("a",))).graph) == graph_text(before.graph)


def test_pieces_are_drawn_by_themselves_and_traced_as_their_task() -> None:
    program = updated(staged(mlp()), layout([2], 8, 2), backward_cuts=["dense_0"])
    names = [name for stage in devices(2) for name in stage]
    drawn = [node for node in task_graph(program, names).nodes if node.micro_batch == 1 and node.kind == "B"]
    assert [node.label for node in drawn] == ["0B1 1/2", "0B1 2/2", "0B1.r1 1/2", "0B1.r1 2/2"]
    traced = [node for node in step_nodes(program).values() if node.task == task("0B1") and node.kind == "B"]
    assert len(traced) == 2
