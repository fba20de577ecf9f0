"""Parts of a graph as library functions, and calls of them."""

from __future__ import annotations

import pytest
from programs import DOUBLE, FLOAT, HOST, INT32, two_layers
from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr, shape_attr
from graph_passes.ir.outline import FunctionDef, call_node, compiled, outline, placeholder
from graph_passes.ir.storage import assign, read
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import function_text, graph_text


def graph() -> Graph:
    return Graph(two_layers().graph)


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


def test_an_input_may_be_a_result() -> None:
    function = outline("f", graph(), [Ref("x"), Ref("v")], [Ref("x"), Ref("x")])
    assert function_text(function) == "f(x0, x1) -> (y0, y1)\n  y0 is x0\n  y1 is x0\n"


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(PassError, match="function 'f' needs placeholder 'w', which is not among its inputs"):
        outline("f", graph(), [Ref("x")], [Ref("a/tanh")])
    function = outline("f", graph(), [Ref("x"), Ref("w")], [Ref("a/tanh")])
    with pytest.raises(PassError, match="call 'c' has 1 inputs but function 'f' takes 2"):
        call_node("c", function, [Ref("x")], device=HOST)


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
    plain = outline("f", graph(), inputs, outputs)
    for_xla = outline("f", graph(), inputs, outputs, jit_compile=True)
    assert plain.attr["_noinline"].b and for_xla.attr["_noinline"].b
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


def test_a_call_has_the_functions_types_its_device_control_edges_and_attributes() -> None:
    function = outline("f", graph(), [Ref("x"), Ref("w")], [Ref("a/tanh"), Ref("a/matmul")])
    call = call_node("c", function, [Ref("p", 1), Ref("q")], device=HOST, control=["z"], attrs={"_stage": 3})
    assert graph_text(GraphDef(node=[call])) == "c = f(p:1, q) ^z @CPU:0\n"
    assert (list(call.attr["Tin"].list.type), list(call.attr["Tout"].list.type)) == ([DOUBLE] * 2, [DOUBLE] * 2)
    assert call.attr["_stage"].i == 3
