"""Programs and graphs as text, one line for each node; and graphs for less capable readers than TensorFlow."""

from __future__ import annotations

from graph_passes.ir.graph import (
    STAGE_ATTR,
    GraphDef,
    Names,
    NodeDef,
    control_inputs,
    copied,
    data_inputs,
    dtype_attr,
    dtype_name,
)
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.program import Boundary, Program, StageFunction
from graph_passes.ir.tensorflow_bridge import constant_value


def program_text(program: Program) -> str:
    """Prints a program: its stages while they are being built, then the step and its functions.

    ``print(program_text(program))`` in your own pass shows its input and its result.
    """
    if program.step is not None:
        return f"{graph_text(program.graph)}\n{library_text(program)}"
    functions = functions_text(program)
    if not program.stages or all(stage.graph is None for stage in program.stages):
        return f"{graph_text(program.graph)}{stages_text(program)}"
    return stages_text(program) + (f"\n{functions}" if functions else "")


def graph_text(graph: GraphDef) -> str:
    """Prints one line for each node: ``name = Op(inputs) ^control @device``."""
    return "".join(f"{_node_text(each)}\n" for each in graph.node)


def stages_text(program: Program) -> str:
    """Prints boundaries, and each stage's variables, arguments, results and graph."""
    text = "".join(f"{_boundary_text(boundary)}\n" for boundary in program.boundaries)
    for stage in program.stages:
        text += f"stage {stage.index}, reads {', '.join(stage.reads)}\n"
        if stage.graph is None:
            continue
        for kind, values in (
            ("argument", stage.arguments),
            ("result", stage.results),
            ("metric", stage.metric_results),
        ):
            text += "".join(f"  {kind} {value} is {ref}\n" for value, ref in values.items())
        text += "".join(f"  {_node_text(each)}\n" for each in stage.graph.node)
    return text


def functions_text(program: Program) -> str:
    """Prints the functions of all stages, with the meaning of their arguments and results."""
    return "\n".join(function_text(function) for stage in program.stages for function in stage.functions)


def library_text(program: Program, *skipped: str) -> str:
    """Prints the functions of the library, except stages' and ``skipped`` ones."""
    stages = {function.name for stage in program.stages for function in stage.functions}
    shown = [f for f in program.graph.library.function if f.signature.name not in {*skipped, *stages}]
    return "\n".join(function_text(function) for function in shown)


def _boundary_text(boundary: Boundary) -> str:
    consumers = ", ".join(map(str, boundary.consumers))
    shape = ", ".join("?" if size is None else str(size) for size in boundary.shape)
    rows = "?" if boundary.rows_per_sample is None else boundary.rows_per_sample
    batch = "no batch axis" if boundary.batch_axis is None else f"batch axis {boundary.batch_axis}, rows {rows}"
    if boundary.outer != 1:
        batch += " in an unknown order" if boundary.outer is None else f" in {boundary.outer} parts"
    flows = "differentiable" if boundary.differentiable else "no gradient"
    where = f"{boundary.ref} from {boundary.producer} to {consumers}"
    own = ", whole" if boundary.whole else ", own lengths" if boundary.own_lengths else ""
    return f"boundary {where}: {dtype_name(boundary.dtype)}[{shape}], {batch}, {flows}{own}"


def _node_text(node: NodeDef) -> str:
    call = node.attr["f"].func.name if "f" in node.attr else ""
    inputs = ", ".join(str(ref) for ref in data_inputs(node))
    text = f"{node.name} = {call or node.op}({inputs}){_details(node)}"
    text += "".join(f" ^{waited}" for waited in control_inputs(node))
    if node.device:
        text += f" @{node.device.rpartition('device:')[2]}"
    if STAGE_ATTR in node.attr and not node.device:
        text += f" in stage {node.attr[STAGE_ATTR].i}"
    return text


def _details(node: NodeDef) -> str:
    """Prints further details of a node, for the ops where they matter."""
    if node.op == "Const":
        value = constant_value(node)
        return f" {value.tolist()}"
    if node.op == "Placeholder":
        dims = node.attr["shape"].shape.dim
        shape = ", ".join("?" if dim.size < 0 else str(dim.size) for dim in dims)
        known = "shape" in node.attr and not node.attr["shape"].shape.unknown_rank
        return f" {dtype_name(node.attr['dtype'].type)}{f'[{shape}]' if known else ''}"
    if node.op == "VarHandleOp":
        return f" {node.attr['shared_name'].s.decode()!r}"
    return ""


def function_text(function: FunctionDef | StageFunction) -> str:
    """Prints a function's signature, one line for each node, and its results, with their meaning if known."""
    definition = function.function if isinstance(function, StageFunction) else function
    signature, body, results = definition.signature, definition.node_def, definition.ret
    arguments, names = [arg.name for arg in signature.input_arg], [arg.name for arg in signature.output_arg]
    if isinstance(function, StageFunction):
        arguments = [f"{name}: {value}" for name, value in zip(arguments, function.inputs, strict=True)]
        names = [f"{name}: {value}" for name, value in zip(names, function.outputs, strict=True)]
    lines = [f"{signature.name}({', '.join(arguments)}) -> ({', '.join(names)})"]
    for each in body:
        inputs = ", ".join(_body_name(text) for text in each.input if not text.startswith("^"))
        waits = "".join(f" {text}" for text in each.input if text.startswith("^"))
        lines.append(f"  {each.name} = {each.op}({inputs}){_details(each)}{waits}")
    lines += [f"  {arg.name} is {_body_name(results[arg.name])}" for arg in signature.output_arg]
    return "\n".join(lines) + "\n"


def _body_name(text: str) -> str:
    """Shortens ``a:product:0`` of a function's body to ``a``; other outputs than the first keep their number."""
    name, *rest = text.split(":")
    return name if not rest or rest[-1] == "0" else f"{name}:{rest[-1]}"


def readable(graph: GraphDef) -> GraphDef:
    """Returns the graph with every function's nodes split so that each yields one dtype; unchanged if none needs it.

        f() = while:output:0 (int32), while:output:1 (float32)   becomes   f() = while/result, while/result_1

    Netron takes all results of one node for one tensor, and refuses a tensor of two dtypes. The computation doesn't
    change.
    """
    names = [function.signature.name for function in graph.library.function if _mixed(function)]
    if not names:
        return graph
    changed = copied(graph)
    for function in changed.library.function:
        if mixed := _mixed(function):
            _separate(function, mixed)
    return changed


def _mixed(function: FunctionDef) -> set[str]:
    """Returns the nodes that yield function results of several dtypes."""
    dtypes: dict[str, set[int]] = {}
    for arg in function.signature.output_arg:
        node, _, _ = function.ret[arg.name].partition(":")  # as function bodies spell outputs
        dtypes.setdefault(node, set()).add(arg.type)
    return {node for node, types in dtypes.items() if len(types) > 1}


def _separate(function: FunctionDef, mixed: set[str]) -> None:
    """Adds a node for each result of these nodes that passes it on."""
    fresh = Names(node.name for node in function.node_def)
    for arg in function.signature.output_arg:
        source = function.ret[arg.name]
        node, _, _ = source.partition(":")
        if node in mixed:
            own = function.node_def.add(name=fresh.fresh(f"{node}/result"), op="Identity", input=[source])
            own.attr["T"].CopyFrom(dtype_attr(arg.type))
            function.ret[arg.name] = f"{own.name}:output:0"
