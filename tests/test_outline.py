"""Parts of a graph as library functions, and calls of them."""

from __future__ import annotations

import numpy as np
import pytest
from program_text import read_program
from programs import DOUBLE, FLOAT, HOST, INT32, Machine, run, two_layers
from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr, make_node, shape_attr
from graph_passes.ir.outline import FunctionDef, call_node, compiled, dtype_of, outline, placeholder
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.storage import assign, merge_library, read
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import function_text, graph_text


def graph() -> Graph:
    return Graph(two_layers().graph)


def called(function: FunctionDef, *values: object) -> list[np.ndarray]:
    """The results of a function."""
    built = empty_graph()
    builder = Builder(built)
    inputs = [builder.append(placeholder(builder.names.fresh("x"), arg.type)) for arg in function.signature.input_arg]
    call = builder.append(call_node("call", function, inputs, device=HOST)).node
    merge_library(built, [function])
    fetches = [Ref(call, index) for index in range(len(function.signature.output_arg))]
    results: list[np.ndarray] = run(built, fetches, dict(zip(inputs, values, strict=True)))
    return results


def test_the_body_is_what_the_outputs_need_up_to_the_inputs() -> None:
    function = outline("f", graph(), [Ref("a/tanh"), Ref("v")], [Ref("loss"), Ref("b/matmul")])
    assert function_text(function) == (
        "f(x0, x1) -> (y0, y1)\n"
        "  b/matmul = MatMul(x0, x1)\n"
        "  loss = L2Loss(b/matmul)\n"
        "  y0 is loss\n"
        "  y1 is b/matmul\n"
    )
    assert [arg.type for arg in function.signature.input_arg] == [DOUBLE, DOUBLE]
    assert [arg.type for arg in function.signature.output_arg] == [DOUBLE, DOUBLE]


def test_an_outlined_function_computes_what_the_graph_computes() -> None:
    rng = np.random.default_rng(0)
    x, w, v = (rng.normal(size=size) for size in ((4, 2), (2, 3), (3, 1)))
    function = outline("f", graph(), [Ref("x"), Ref("w"), Ref("v")], [Ref("b/matmul"), Ref("loss")])
    y, loss = called(function, x, w, v)
    np.testing.assert_allclose(y, np.tanh(x @ w) @ v, rtol=1e-14)
    np.testing.assert_allclose(loss, np.sum(y**2) / 2, rtol=1e-14)


def test_an_input_may_be_a_result() -> None:
    function = outline("f", graph(), [Ref("x"), Ref("v")], [Ref("x"), Ref("x")])
    assert function_text(function) == "f(x0, x1) -> (y0, y1)\n  y0 is x0\n  y1 is x0\n"


def test_results_of_an_op_with_several_outputs_keep_their_numbers() -> None:
    builder = Builder(empty_graph())
    x = builder.append(placeholder("x", FLOAT))
    parts = builder.split("parts", x, FLOAT, [1, 2], 0)
    function = outline("f", Graph(builder.graph), [x], [parts[1], parts[0]])
    second, first = called(function, np.array([1.0, 2.0, 3.0], "f"))
    assert (list(first), list(second)) == ([1.0], [2.0, 3.0])


def test_a_placeholder_that_is_no_input_is_refused() -> None:
    with pytest.raises(PassError) as caught:
        outline("f", graph(), [Ref("x")], [Ref("a/tanh")])
    assert str(caught.value) == "function 'f' needs placeholder 'w', which is not among its inputs"


def counted() -> GraphDef:
    """A variable that is read, then stepped, and a node that merely waits for that."""
    built = empty_graph()
    builder = Builder(built)
    kind = {"dtype": dtype_attr(INT32), "shape": shape_attr([])}
    handle = builder.add("handle", "VarHandleOp", **kind)
    read = builder.add("read", "ReadVariableOp", [handle], dtype=dtype_attr(INT32))
    one = builder.const(1, INT32)
    builder.add("step", "AssignAddVariableOp", [handle, one], control=[read.node], dtype=dtype_attr(INT32))
    builder.add("after", "Identity", [one], control=["step"], T=dtype_attr(INT32))
    return built


def test_without_effects_a_function_is_pure_and_control_edges_need_nothing() -> None:
    function = outline("f", Graph(counted()), [], [Ref("after")])
    assert [each.name for each in function.node_def] == ["constant", "after"]
    assert not function.signature.is_stateful
    assert not function.signature.control_output


def test_effects_run_in_the_order_of_their_control_edges() -> None:
    function = outline("f", Graph(counted()), [], [Ref("read")], effects=["step"])
    assert function_text(function) == (
        "f() -> (y0)\n"
        "  handle = VarHandleOp() ''\n"
        "  read = ReadVariableOp(handle)\n"
        "  constant = Const() 1\n"
        "  step = AssignAddVariableOp(handle, constant) ^read\n"
        "  y0 is read\n"
    )
    assert function.signature.is_stateful
    assert dict(function.control_ret) == {"done0": "step"}


def test_a_call_of_a_stateful_function_is_a_stateful_call() -> None:
    stateful = outline("f", Graph(counted()), [], [], effects=["step"])
    pure = outline("g", Graph(counted()), [], [Ref("constant")])
    assert call_node("c", stateful, [], device=HOST).op == "StatefulPartitionedCall"
    assert call_node("c", pure, [], device=HOST).op == "PartitionedCall"


def test_devices_and_colocation_stay_outside_and_the_graph_is_not_changed() -> None:
    built = counted()
    built.node[-1].device = HOST
    built.node[-1].attr["_class"].list.s.append(b"loc:@step")
    before = built.SerializeToString(deterministic=True)
    function = outline("f", Graph(built), [], [Ref("after")])
    assert built.SerializeToString(deterministic=True) == before
    assert {each.device for each in function.node_def} == {""}
    assert all("_class" not in each.attr for each in function.node_def)


def test_functions_are_marked_against_inlining_and_may_be_marked_for_xla() -> None:
    inputs, outputs = [Ref("x"), Ref("w")], [Ref("a/tanh")]
    plain = outline("f", graph(), inputs, outputs, attrs={"_note": "text"})
    for_xla = outline("f", graph(), inputs, outputs, jit_compile=True)
    assert plain.attr["_noinline"].b and for_xla.attr["_noinline"].b
    assert plain.attr["_note"].s == b"text"
    assert "_XlaMustCompile" not in plain.attr
    assert call_node("c", for_xla, inputs, device=HOST).attr["_XlaMustCompile"].b
    assert "_XlaMustCompile" not in call_node("c", plain, inputs, device=HOST).attr


def variables_changed() -> FunctionDef:
    """(x) -> the sum of two variables, of which one has been read twice and x added to it."""
    builder = Builder(empty_graph())
    given = builder.append(placeholder("x", FLOAT))
    first, again, other = (read(builder, name, FLOAT, [2]) for name in ("u", "u", "v"))
    total = builder.add_n("total", [first, again, other], FLOAT)
    step = assign(builder, "u", given, FLOAT, [2], "AssignAddVariableOp")
    builder.graph.node[-1].input.append(f"^{total.node}")
    return outline("f", Graph(builder.graph), [given], [total], effects=[step])


def test_xla_compiles_what_changes_variables_but_for_their_handles() -> None:
    """One handle for each variable: XLA refuses to be given the same one twice."""
    outer, inner = compiled(variables_changed())
    assert function_text(outer) == (
        "f(x0) -> (y0)\n"
        "  handle/u = VarHandleOp() 'u'\n"
        "  handle/v = VarHandleOp() 'v'\n"
        "  compiled = StatefulPartitionedCall(x0, handle/u, handle/v)\n"
        "  y0 is compiled\n"
    )
    assert dict(outer.control_ret) == {"done0": "compiled"}
    (call,) = (node for node in outer.node_def if node.op == "StatefulPartitionedCall")
    assert call.attr["f"].func.name == inner.signature.name and call.attr["_XlaMustCompile"].b
    assert inner.attr["_XlaMustCompile"].b and "_XlaMustCompile" not in outer.attr
    assert function_text(inner).splitlines()[0] == "f_compiled(x0, v_0, v_1) -> (y0)"
    assert [node.op for node in inner.node_def].count("VarHandleOp") == 0
    assert [arg.type for arg in inner.signature.input_arg[1:]] == [types_pb2.DT_RESOURCE] * 2


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_change_of_variables_makes_the_same_change(jit_compile: bool) -> None:
    functions = list(compiled(variables_changed())) if jit_compile else [variables_changed()]
    builder = Builder(empty_graph())
    x = builder.append(placeholder("x", FLOAT))
    builder.append(call_node("change", functions[0], [x], device=HOST))
    merge_library(builder.graph, functions)
    u, v = (Variable(name, FLOAT, (2,), VariableKind.STATE) for name in "uv")
    with Machine(builder.graph) as machine:
        machine.load(HOST, [u, v], [[1, 2], [10, 20]])
        (total,) = machine.run([Ref("change")], {x: [5, 7]})
        np.testing.assert_array_equal(total, [12, 24])
        np.testing.assert_array_equal(machine.read(HOST, u, v), [[6, 9], [10, 20]])


def test_calling_a_function_does_not_change_it() -> None:
    function = outline("f", graph(), [Ref("x"), Ref("w")], [Ref("a/tanh")])
    before = function.SerializeToString(deterministic=True)
    call_node("c", function, [Ref("x"), Ref("w")], device=HOST)
    assert function.SerializeToString(deterministic=True) == before


def test_a_call_has_the_functions_types_its_device_control_edges_and_attributes() -> None:
    function = outline("f", graph(), [Ref("x"), Ref("w")], [Ref("a/tanh"), Ref("a/matmul")])
    call = call_node("c", function, [Ref("p", 1), Ref("q")], device=HOST, control=["z"], attrs={"_stage": 3})
    assert graph_text(GraphDef(node=[call])) == "c = f(p:1, q) ^z @CPU:0\n"
    assert (list(call.attr["Tin"].list.type), list(call.attr["Tout"].list.type)) == ([DOUBLE] * 2, [DOUBLE] * 2)
    assert call.attr["_stage"].i == 3


def test_a_call_with_another_number_of_inputs_is_refused_with_both_numbers() -> None:
    function = outline("f", graph(), [Ref("x"), Ref("w")], [Ref("a/tanh")])
    with pytest.raises(PassError) as caught:
        call_node("c", function, [Ref("x")], device=HOST)
    assert str(caught.value) == "call 'c' has 1 inputs but function 'f' takes 2"


def test_dtype_of_tells_the_dtype_of_each_output() -> None:
    view = Graph(read_program("x int32[?]\nunique = Unique(x, out_idx=int64)").graph)
    assert [dtype_of(view, Ref("unique", index)) for index in range(2)] == [INT32, types_pb2.DT_INT64]
    assert dtype_of(view, Ref("weight")) == DOUBLE


def test_a_placeholder_for_outlining_has_a_dtype_only() -> None:
    assert placeholder("p", FLOAT) == make_node("p", "Placeholder", attrs={"dtype": dtype_attr(FLOAT)})
