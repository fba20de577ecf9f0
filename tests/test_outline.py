"""Parts of a graph as library functions, and calls of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from programs import FLOAT, HOST, INT32, two_layers

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr, dtype_name, shape_attr
from graph_passes.ir.outline import FunctionDef, call_node, compiled, outline, placeholder
from graph_passes.ir.storage import assign, read
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import function_text, graph_text


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


def variables_changed() -> FunctionDef:
    """(x) -> the sum of two variables, of which one has been read twice and x added to it."""
    builder = Builder(empty_graph())
    given = builder.append(placeholder("x", FLOAT))
    first, again, other = (read(builder, name, FLOAT, [2]) for name in ("u", "u", "v"))
    total = builder.add_n("total", [first, again, other], FLOAT)
    step = assign(builder, "u", given, FLOAT, [2], "AssignAddVariableOp")
    builder.graph.node[-1].input.append(f"^{total.node}")
    return outline("f", Graph(builder.graph), [given], [total], effects=[step])


def shown(*functions: FunctionDef) -> str:
    """Functions and their calls, with dtypes and attributes."""
    texts = []
    for function in functions:
        signature = function.signature
        inputs = [Ref(f"a{number}") for number in range(len(signature.input_arg))]
        call = call_node("call", function, inputs, device=HOST, control=["before"], attrs={"_stage": 3})
        dtypes = [[dtype_name(arg.type) for arg in args] for args in (signature.input_arg, signature.output_arg)]
        marks = [name for name in sorted({*function.attr, *call.attr}) if name.startswith("_")]
        assert list(call.attr["Tin"].list.type) == [arg.type for arg in signature.input_arg]
        assert list(call.attr["Tout"].list.type) == [arg.type for arg in signature.output_arg]
        done = f", done after {', '.join(function.control_ret.values())}" if function.control_ret else ""
        texts.append(
            f"{function_text(function)}  {dtypes[0]} -> {dtypes[1]}{done}\n"
            f"{call.op} {graph_text(GraphDef(node=[call]))}  marked {', '.join(marks)}\n"
        )
    return "".join(texts)


def test_functions_and_their_calls(golden: Callable[[str, str], None]) -> None:
    flat, steps = two_layers().graph, counted()
    steps.node[-1].device = HOST
    steps.node[-1].attr["_class"].list.s.append(b"loc:@step")
    before = steps.SerializeToString(deterministic=True)
    inputs, outputs = [Ref("x"), Ref("w")], [Ref("a/tanh")]
    functions = {
        "the body is what the outputs need up to the inputs": [
            outline("f", Graph(flat), [Ref("a/tanh"), Ref("v")], [Ref("loss"), Ref("b/matmul")])
        ],
        "an input may be a result": [outline("f", Graph(flat), [Ref("x"), Ref("v")], [Ref("x"), Ref("x")])],
        "without effects it is pure, and control edges, devices and colocation stay outside": [
            outline("f", Graph(steps), [], [Ref("after")])
        ],
        "effects run in the order of their control edges": [
            outline("f", Graph(steps), [], [Ref("read")], effects=["step"])
        ],
        "marks for XLA": [
            outline("g", Graph(flat), inputs, outputs, jit_compile=True),
        ],
        # One handle for each variable: XLA refuses to be given the same one twice.
        "XLA compiles what changes variables but for their handles": compiled(variables_changed()),
    }
    golden("functions.txt", "\n".join(f"{title}\n\n{shown(*made)}" for title, made in functions.items()))
    bodies = [node for made in functions.values() for function in made for node in function.node_def]
    assert not any(node.device or "_class" in node.attr for node in bodies)
    assert steps.SerializeToString(deterministic=True) == before
    with pytest.raises(PassError, match="function 'f' needs placeholder 'w', which is not among its inputs"):
        outline("f", Graph(flat), [Ref("x")], [Ref("a/tanh")])
    with pytest.raises(PassError, match="call 'c' has 1 inputs but function 'f' takes 2"):
        call_node("c", outline("f", Graph(flat), inputs, outputs), [Ref("x")], device=HOST)
