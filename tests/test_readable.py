"""Graphs for readers that know less of functions."""

from __future__ import annotations

from programs import FLOAT, HOST, INT32, run, two_layers, unchanged

from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr
from graph_passes.ir.outline import call_node, outline, placeholder
from graph_passes.ir.storage import merge_library
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import readable


def two_results() -> GraphDef:
    """A graph that calls a function whose results, float and integer, come from one node."""
    body = empty_graph()
    inner = Builder(body)
    x = inner.append(placeholder("x", FLOAT))
    top = inner.add("top", "TopKV2", [x, inner.const(2, INT32)], T=dtype_attr(FLOAT), sorted=True)
    doubled = inner.add("doubled", "Add", [top, top], T=dtype_attr(FLOAT))
    function = outline("top_two", Graph(body), [x], [top, Ref(top.node, 1), doubled])
    graph = empty_graph()
    outer = Builder(graph)
    argument = outer.append(placeholder("x", FLOAT))
    outer.append(call_node("call", function, [argument], device=HOST))
    merge_library(graph, [function])
    return graph


def test_results_of_several_dtypes_get_nodes_of_their_own() -> None:
    graph = two_results()
    before = graph.SerializeToString(deterministic=True)
    made = readable(graph)
    assert graph.SerializeToString(deterministic=True) == before
    (function,) = made.library.function
    assert [function.ret[f"y{index}"] for index in range(3)] == [
        "top/result:output:0",
        "top/result_1:output:0",
        "doubled:z:0",
    ]
    assert list(made.node) == list(graph.node)
    feeds, fetches = {Ref("x"): [3.0, 1.0, 7.0]}, [Ref("call", index) for index in range(3)]
    ours, theirs = (run(each, fetches, feeds) for each in (made, graph))
    assert [result.tolist() for result in ours] == [result.tolist() for result in theirs] == [[7, 3], [2, 0], [14, 6]]


def test_other_graphs_are_written_as_they_are() -> None:
    program = two_layers()
    with unchanged(program):
        assert readable(program.graph) is program.graph
