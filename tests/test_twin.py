"""Graphs that differ in names only have one twin, and what is done to it is taken over for all of them."""

from __future__ import annotations

from graph_passes.ir.graph import COLOCATION, LAYER_ATTR, GraphDef, NodeDef, Ref, attr, make_const, make_node
from graph_passes.ir.twin import Twin


def _graph(scope: str, layer: str) -> GraphDef:
    graph = GraphDef()
    graph.node.append(make_node(f"{scope}/x", "Placeholder", attrs={"dtype": attr(1)}))
    graph.node.append(make_node(f"{scope}/y", "Split", [f"{scope}/x"], attrs={LAYER_ATTR: attr(layer.encode())}))
    graph.node.append(make_node(f"{scope}/z", "Add", [f"{scope}/y", f"{scope}/y:1", f"^{scope}/x"]))
    graph.node[2].attr[COLOCATION].list.s.append(f"loc:@{scope}/x".encode())
    return graph


def test_names_and_notes_make_no_difference() -> None:
    one, other = Twin(_graph("a", "first")), Twin(_graph("b/c", "second"))
    assert one.serialized == other.serialized
    assert one.of(Ref("a/y", 1)) == other.of(Ref("b/c/y", 1)) == Ref("n1", 1)
    assert "a/x" in one
    assert "a/x" not in other


def test_what_a_node_computes_makes_a_difference() -> None:
    graph = _graph("a", "first")
    graph.node[1].attr["num_split"].i = 3
    assert Twin(graph).serialized != Twin(_graph("a", "first")).serialized


def test_the_twin_itself_has_the_graphs_names_again() -> None:
    graph = _graph("a", "first")
    twin = Twin(graph)
    same, named = twin.named(GraphDef.FromString(twin.serialized))
    assert same == graph
    assert named(Ref("n2")) == Ref("a/z")


def test_new_nodes_are_called_after_those_they_come_from() -> None:
    graph = _graph("a", "first")
    graph.node.append(make_node("gradients/a/z_grad", "NoOp"))
    changed = GraphDef.FromString(Twin(graph).serialized)
    changed.node.append(make_node("gradients/n2_grad", "Neg", ["n2"]))
    changed.node.append(make_node("n1/output1", "Neg", ["gradients/n2_grad"]))
    changed.node.append(make_node("n1x", "Neg", ["n1/output1", "^n0"]))
    changed.node[5].attr[COLOCATION].list.s.append(b"loc:@n0")
    named_graph, named = Twin(graph).named(changed)
    new = list(named_graph.node)[4:]
    assert [node.name for node in new] == ["gradients/a/z_grad_1", "a/y/output1", "n1x"]
    assert [list(node.input) for node in new] == [["a/z"], ["gradients/a/z_grad_1"], ["a/y/output1", "^a/x"]]
    assert not any(COLOCATION in node.attr for node in new)
    assert named(Ref("n1/output1", 2)) == Ref("a/y/output1", 2)


def test_a_node_that_became_a_constant_keeps_what_is_noted_but_no_place() -> None:
    graph = _graph("a", "first")
    graph.node[1].attr[COLOCATION].list.s.append(b"loc:@a/x")
    changed = GraphDef.FromString(Twin(graph).serialized)
    constant: NodeDef = make_const("n1", 3, 3)
    changed.node[1].CopyFrom(constant)
    node = Twin(graph).named(changed)[0].node[1]
    assert (node.name, node.op, node.attr[LAYER_ATTR].s) == ("a/y", "Const", b"first")
    assert COLOCATION not in node.attr


def test_a_constant_for_a_further_output_has_what_is_noted_at_its_node() -> None:
    """Messages said "(no layer)"."""
    graph = _graph("a", "first")
    changed = GraphDef.FromString(Twin(graph).serialized)
    changed.node.append(make_const("n1/output1", 3, 3))
    changed.node.append(make_node("n1/other", "Neg", ["n1/output1"]))
    constant, other = list(Twin(graph).named(changed)[0].node)[3:]
    assert (constant.name, constant.attr[LAYER_ATTR].s) == ("a/y/output1", b"first")
    assert LAYER_ATTR not in other.attr


def test_attributes_that_an_import_drops_are_there_again() -> None:
    graph = _graph("a", "first")
    graph.node[0].attr["_output_shapes"].list.shape.add(unknown_rank=True)
    twin = Twin(graph)
    changed = GraphDef.FromString(twin.serialized)
    del changed.node[0].attr["_output_shapes"]
    assert twin.named(changed)[0] == graph
