"""Pass 2: the forward graph of each stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from program_text import read_program
from programs import apply, copied, node, stateful_layers, two_layers

from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.program import Program
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import stages_text
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_forward import BuildForward, extract


def forward(program: Program, *cuts: str, want_outputs: bool = False) -> Program:
    return apply(program, AssignStages(cuts), BuildForward(want_outputs))


# ---- structure


TWO_OUTPUTS = """
    x[?, 2], w[2, 2], v[2, 2]
    a/matmul = MatMul(x, w)
    a/early = Tanh(a/matmul)
    b/late = MatMul(a/matmul, v)
"""
WAITING = """
    x[?, 2], w[2, 2]
    a/check = NoOp()
    a/h = MatMul(x, w) ^a/check
    loss = L2Loss(a/h)
"""


def test_the_graph_of_each_stage(golden: Callable[[str, str], None]) -> None:
    """Outputs are results of the stage that makes them, or the last one's if they are inputs."""
    outputs = read_program(TWO_OUTPUTS, outputs=("b/late", "a/early", "x"))
    forms = {
        "outputs that are wanted": forward(outputs, "a", want_outputs=True),
        "outputs that are not": forward(outputs, "a"),
        "control edges stay behind": forward(read_program(WAITING)),
    }
    texts = [stages_text(forward(stateful_layers(), "a"))]
    golden("build_forward.txt", "\n".join([*texts, *(f"{key}\n\n{stages_text(own)}" for key, own in forms.items())]))


def test_the_flat_graph_is_kept_for_those_who_speak_of_its_tensors() -> None:
    before = apply(two_layers(), AssignStages(("a",)))
    after = apply(before, BuildForward())
    assert after.flat == before.graph == after.graph
    assert before.flat_graph == after.replace(graph=empty_graph()).flat_graph == before.graph
    assert (after.roles, after.boundaries) == (before.roles, before.boundaries)


def test_colocation_with_nodes_that_the_stage_may_not_have_stays_behind() -> None:
    program = apply(two_layers(), AssignStages(("a",)))
    program = copied(program)
    node(program, "b/matmul").attr["_class"].list.s.append(b"loc:@a/matmul")
    for stage in apply(program, BuildForward()).stages:
        assert stage.graph is not None
        assert all("_class" not in each.attr for each in stage.graph.node)


# ---- extraction


def test_an_argument_that_is_no_placeholder_is_replaced_by_one_under_a_fresh_name() -> None:
    graph = Graph(two_layers().graph)
    extracted, placed = extract(graph, [Ref("loss")], [Ref("a/tanh"), Ref("v"), Ref("x")], {Ref("a/tanh"): (None, 3)})
    assert placed == {Ref("a/tanh"): Ref("a/tanh/argument"), Ref("v"): Ref("v")}
    assert [each.name for each in extracted.node] == ["a/tanh/argument", "v", "b/matmul", "loss"]


def test_a_placeholder_without_a_role_is_refused() -> None:
    with pytest.raises(PassError) as caught:
        extract(Graph(two_layers().graph), [Ref("loss")], [Ref("x"), Ref("v")], {})
    assert str(caught.value) == "placeholder 'w' of the captured graph has no role"
