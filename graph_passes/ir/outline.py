"""Moves a part of a flat graph into a library function: the body is what the outputs need, up to the given inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tensorflow.core.framework import function_pb2, types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import (
    COLOCATION,
    COMPILED_ATTR,
    LAYER_ATTR,
    AttrValue,
    Builder,
    Graph,
    NodeDef,
    Ref,
    control_inputs,
    copied,
    data_inputs,
    dtype_attr,
    dtypes_attr,
    function_attr,
    make_node,
    text_attr,
)
from graph_passes.ir.tensorflow_bridge import function_body_name, is_stateful, output_dtypes

FunctionDef: TypeAlias = function_pb2.FunctionDef

# One call is one node of the executor: without this attribute Grappler inlines the body into the step's graph.
_NOINLINE = "_noinline"


def dtype_of(graph: Graph, ref: Ref) -> int:
    """Returns the dtype (a ``DT_*`` number) of a tensor."""
    return output_dtypes(graph.nodes[ref.node])[ref.output]


def outline(
    name: str,
    graph: Graph,
    inputs: Sequence[Ref],
    outputs: Sequence[Ref],
    *,
    effects: Sequence[str] = (),
    jit_compile: bool = False,
) -> FunctionDef:
    """Returns a function that computes ``outputs`` of ``graph`` from ``inputs``.

        x -> a -> b -> y,  inputs (a,), outputs (y,)   becomes   f(a) = y { b, y }

    Args:
        name: the function's name in the library.
        graph: the flat graph; it isn't changed.
        inputs: tensors that become arguments, in order; their producers stay outside.
        outputs: tensors that become results, in order; an input may be one of them.
        effects: nodes that must run although no output needs them; with them, control edges count as needs. Without
            them the function is pure, and control edges only order its nodes.
        jit_compile: compile the function with XLA.

    Raises:
        PassError: the body would need a placeholder that isn't an input.
    """
    body = graph.ancestors([*outputs, *(Ref(node) for node in effects)], inputs, control=bool(effects))
    given = {ref: f"x{index}" for index, ref in enumerate(inputs)}
    function = FunctionDef()
    function.signature.name = name
    for ref, argument in given.items():
        function.signature.input_arg.add(name=argument, type=dtype_of(graph, ref))
    stateful = False
    for node_name in graph.ordered(body):
        original = graph.nodes[node_name]
        if original.op == "Placeholder":
            raise PassError(f"function {name!r} needs placeholder {node_name!r}, which is not among its inputs")
        stateful |= is_stateful(original.op)
        function.node_def.append(original)
        node = function.node_def[-1]
        node.attr.pop(COLOCATION, None)
        node.device = ""
        del node.input[:]
        for ref in data_inputs(original):
            node.input.append(given.get(ref) or function_body_name(graph.nodes[ref.node], ref.output))
        node.input.extend(f"^{waited}" for waited in control_inputs(original) if waited in body)
    for index, ref in enumerate(outputs):
        function.signature.output_arg.add(name=f"y{index}", type=dtype_of(graph, ref))
        function.ret[f"y{index}"] = given.get(ref) or function_body_name(graph.nodes[ref.node], ref.output)
    for index, effect in enumerate(effects):
        function.signature.control_output.append(f"done{index}")
        function.control_ret[f"done{index}"] = effect
    function.signature.is_stateful = stateful
    function.attr[_NOINLINE].b = True
    if jit_compile:
        function.attr[COMPILED_ATTR].b = True
    return function


def call_node(
    name: str,
    function: FunctionDef,
    inputs: Sequence[Ref],
    *,
    device: str,
    control: Sequence[str] = (),
    attrs: Mapping[str, str | int | AttrValue] | None = None,
) -> NodeDef:
    """Returns a call of a library function, as one node on ``device``.

    Raises:
        PassError: the number of inputs isn't the function's.
    """
    signature = function.signature
    if len(inputs) != len(signature.input_arg):
        raise PassError(
            f"call {name!r} has {len(inputs)} inputs but function {signature.name!r} takes {len(signature.input_arg)}"
        )
    call = {
        "Tin": dtypes_attr([arg.type for arg in signature.input_arg]),
        "Tout": dtypes_attr([arg.type for arg in signature.output_arg]),
        "f": function_attr(signature.name),
    }
    if COMPILED_ATTR in function.attr:
        call[COMPILED_ATTR] = function.attr[COMPILED_ATTR]
    op = "StatefulPartitionedCall" if signature.is_stateful else "PartitionedCall"
    return make_node(name, op, inputs, device=device, control=control, attrs={**call, **(attrs or {})})


def add_call(
    builder: Builder,
    name: str,
    function: FunctionDef,
    inputs: Sequence[Ref],
    *,
    device: str,
    control: Sequence[str] = (),
    attrs: Mapping[str, str | int | AttrValue] | None = None,
) -> Ref:
    """Adds a call under a fresh name, and its function to the graph's library; returns the first result."""
    builder.define(function)
    name = builder.names.fresh(name)
    return builder.append(call_node(name, function, inputs, device=device, control=control, attrs=attrs))


def is_compiled(function: FunctionDef) -> bool:
    """Returns whether XLA compiles a function."""
    return COMPILED_ATTR in function.attr and function.attr[COMPILED_ATTR].b


def compiled(function: FunctionDef) -> tuple[FunctionDef, FunctionDef]:
    """Returns a function that changes variables, and the part of it that XLA compiles.

        f(x) { h = VarHandleOp; h -= x }   becomes   f(x) { h = VarHandleOp; g(x, h) },  g(x, h) { h -= x }

    XLA doesn't know names of variables: their handles are made outside and passed to it.

    Returns:
        The function, and the compiled one that it calls.
    """
    inner = copied(function)
    inner.signature.name = f"{function.signature.name}_compiled"
    inner.attr[COMPILED_ATTR].b = True
    del inner.node_def[:]
    made = [node for node in function.node_def if node.op == "VarHandleOp"]
    handles: dict[bytes, NodeDef] = {}  # one for each variable
    for node in made:
        handles.setdefault(node.attr["shared_name"].s, node)
    arguments = {variable: f"v_{index}" for index, variable in enumerate(handles)}
    given = {node.name: arguments[node.attr["shared_name"].s] for node in made}
    for node in function.node_def:
        if node.name not in given:
            inner.node_def.append(node)
            inner.node_def[-1].input[:] = [
                given.get(name.partition(":")[0], name) for name in node.input if name.removeprefix("^") not in given
            ]
    for argument in arguments.values():
        inner.signature.input_arg.add(name=argument, type=types_pb2.DT_RESOURCE)
    outer = FunctionDef(signature=function.signature, attr=function.attr, arg_attr=function.arg_attr)
    outer.node_def.extend(handles.values())
    inputs = [arg.name for arg in function.signature.input_arg]
    inputs += [f"{node.name}:resource:0" for node in handles.values()]
    call = call_node("compiled", inner, list(map(Ref, inputs)), device="")
    outer.node_def.append(call)
    for index, result in enumerate(function.signature.output_arg):
        outer.ret[result.name] = f"compiled:output:{index}"
    for name in function.signature.control_output:
        outer.control_ret[name] = "compiled"
    return outer, inner


def placeholder(name: str, dtype: int) -> NodeDef:
    """Returns a placeholder of unknown shape: an input of a graph that is about to be outlined."""
    return make_node(name, "Placeholder", attrs={"dtype": dtype_attr(dtype)})


def layer_of(graph: Graph, ref: Ref) -> str:
    """Returns the path of the layer that made a tensor, for messages."""
    return text_attr(graph.nodes[ref.node], LAYER_ATTR, "(no layer)")
