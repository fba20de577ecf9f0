"""Makes functions for XLA of the operators that a device runs between two transfers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import (
    CALL_ATTR,
    OWN_ATTRS,
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    control_inputs,
    data_inputs,
)
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.storage import merge_library
from graph_passes.ir.tensorflow_bridge import input_dtypes, is_stateful, makes_resource, output_dtypes, takes_functions

_LEAST = 4
"""The least operators that are worth a function, as TensorFlow's own clustering for XLA has it."""
_NOT_COMPILED = frozenset({types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT, types_pb2.DT_STRING})


class CompiledRuns(NamedTuple):
    """A graph in which runs of operators are calls.

    Attributes:
        graph: the graph.
        calls: operator -> the call that runs it, for those that aren't nodes any more.
        results: their tensors that are read elsewhere -> what they are now.
    """

    graph: GraphDef
    calls: Mapping[str, str]
    results: Mapping[Ref, Ref]


def compile_runs(
    graph: GraphDef, queues: Mapping[str, Sequence[Sequence[str]]], fetched: Collection[Ref]
) -> CompiledRuns:
    """Makes functions for XLA of neighbours in the devices' queues.

        a@0 -> b@0 -> c@0 -> d@1   becomes   f@0 -> d@1,  f = {a, b, c}

    Only the first operator of a run reads what comes from outside the queue (other devices, all-reduces, batches), and
    only the last one makes what is read outside it. So nothing waits for a run that didn't wait for its last operator,
    and no cycle can come of it. Operators of one run were in one call. Those that touch variables, draw random numbers
    or run functions (loops, branches) stay single.

    Equal runs of several micro-batches and replicas share a function.

    Args:
        graph: a flat top level; it isn't changed.
        queues: device -> parts of its queue; operators of a part run one after another.
        fetched: tensors that must stay tensors of the top level.
    """
    view = Graph(graph)
    readers: dict[str, list[str]] = {name: [] for name in view.nodes}
    for name, node in view.nodes.items():
        for producer in {*(ref.node for ref in view.inputs(name)), *control_inputs(node)}:
            readers[producer].append(name)
    functions = frozenset(function.signature.name for function in graph.library.function)
    wanted = {*fetched}
    names = Names(view.nodes)
    function_of: dict[str, FunctionDef] = {}
    calls: dict[str, str] = {}
    results: dict[Ref, Ref] = {}
    nodes: dict[str, NodeDef] = {}  # first operator of a run -> its call
    for device, parts in queues.items():
        local = frozenset(itertools.chain(*parts))
        for run in itertools.chain(*(_runs(view, part, local, readers, functions) for part in parts)):
            inside = frozenset(run)
            outside = (name for one in run for name in readers[one] if name not in inside)
            read = {ref for name in dict.fromkeys(outside) for ref in view.inputs(name) if ref.node in inside}
            outputs = [
                ref
                for one in run
                for ref in (Ref(one, index) for index in range(len(output_dtypes(view.nodes[one]))))
                if ref in read or ref in wanted
            ]
            if not outputs:
                continue
            function, inputs = _function(view, run, outputs)
            function_of[function.signature.name] = function
            waits = [name for one in run for name in control_inputs(view.nodes[one]) if name not in inside]
            first = view.nodes[run[0]]
            own = {key: first.attr[key] for key in first.attr if key.startswith(OWN_ATTRS)}
            name = names.fresh(f"{run[0]}/run")
            nodes[run[0]] = call_node(name, function, inputs, device=device, control=waits, attrs=own)
            calls |= dict.fromkeys(run, name)
            results |= {ref: Ref(name, index) for index, ref in enumerate(outputs)}
    written = GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.node:
        if node.name in calls and node.name not in nodes:
            continue
        new = written.node.add()
        new.CopyFrom(nodes.get(node.name, node))
        if any(text.removeprefix("^").partition(":")[0] in calls for text in new.input):
            data = [str(results.get(ref, ref)) for ref in data_inputs(new)]
            waits = [f"^{calls.get(name, name)}" for name in control_inputs(new)]
            del new.input[:]
            new.input.extend([*data, *dict.fromkeys(waits)])
    merge_library(written, function_of.values())
    return CompiledRuns(written, calls, results)


def _runs(
    view: Graph,
    queue: Sequence[str],
    local: Collection[str],
    readers: Mapping[str, Sequence[str]],
    functions: Collection[str],
) -> Iterator[list[str]]:
    """Yields the runs of a part of a device's queue."""
    run: list[str] = []
    for name in queue:
        node = view.nodes[name]
        producers = {*(ref.node for ref in view.inputs(name)), *control_inputs(node)}
        waits = any(producer not in local and view.nodes[producer].op != "Const" for producer in producers)
        suits = _suits(node, functions)
        if run and (waits or not suits or node.attr[CALL_ATTR].s != view.nodes[run[0]].attr[CALL_ATTR].s):
            yield from [run] if len(run) >= _LEAST else []
            run = []
        if suits:
            run.append(name)
        if run and any(reader not in local for reader in readers[name]):
            yield from [run] if len(run) >= _LEAST else []
            run = []
    if len(run) >= _LEAST:
        yield run


def _suits(node: NodeDef, functions: Collection[str]) -> bool:
    """Returns whether XLA can compile an operator by itself, as far as its kind tells."""
    if node.op in functions or node.op == "NoOp" or CALL_ATTR not in node.attr:
        return False
    if is_stateful(node.op) or takes_functions(node.op) or makes_resource(node.op):
        return False
    return _NOT_COMPILED.isdisjoint(input_dtypes(node)) and _NOT_COMPILED.isdisjoint(output_dtypes(node))


def _function(view: Graph, run: Sequence[str], outputs: Sequence[Ref]) -> tuple[FunctionDef, list[Ref]]:
    """Returns the function of a run, named by its content, and the tensors that are its arguments."""
    call = view.nodes[run[0]].attr[CALL_ATTR].s.decode()
    inner = Names()
    named = {name: inner.fresh(name.removeprefix(f"{call}/")) for name in run}
    body = GraphDef(versions=view.graph.versions)
    arguments: dict[Ref, str] = {}
    constants: dict[str, str] = {}
    for name in run:
        node = body.node.add()
        _copy(view.nodes[name], node, named[name])
        for ref in view.inputs(name):
            producer = view.nodes[ref.node]
            if ref.node in named:
                node.input.append(str(Ref(named[ref.node], ref.output)))
            elif producer.op == "Const":
                if ref.node not in constants:
                    constants[ref.node] = inner.fresh("constant")
                    _copy(producer, body.node.add(), constants[ref.node])
                node.input.append(constants[ref.node])
            else:
                if ref not in arguments:
                    argument = placeholder(inner.fresh("argument"), output_dtypes(producer)[ref.output])
                    body.node.append(argument)
                    arguments[ref] = argument.name
                node.input.append(arguments[ref])
    inputs = [Ref(name) for name in arguments.values()]
    function = outline(
        "run", Graph(body), inputs, [Ref(named[ref.node], ref.output) for ref in outputs], jit_compile=True
    )
    content = hashlib.sha256(function.SerializeToString(deterministic=True)).hexdigest()[:24]
    function.signature.name = f"run_{content}"
    return function, list(arguments)


def _copy(node: NodeDef, copy: NodeDef, name: str) -> None:
    """Copies a node without its inputs, device and roles."""
    copy.CopyFrom(node)
    copy.name, copy.device = name, ""
    del copy.input[:]
    for key in [key for key in copy.attr if key.startswith(OWN_ATTRS)]:
        del copy.attr[key]
