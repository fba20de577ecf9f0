"""The verifier: invariants between passes, and agreement of functions and calls."""

from __future__ import annotations

import collections
import graphlib
import itertools
from collections.abc import Mapping, Sequence

from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.collectives import SUM_OP, sums_of
from graph_passes.ir.connections import verify_connections
from graph_passes.ir.graph import REPLICA_ATTR, STAGE_ATTR, Graph, NodeDef, Ref, control_inputs, dtype_name
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.program import Program, Stage, Value, ValueKind
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import input_dtypes, missing_attrs, output_dtypes

_ANYWHERE = frozenset({"Const", "Placeholder"})
"""Ops whose nodes may be without a device in a step: their readers' devices have their values."""
# What one function of a stage gives to another.
_HANDED_ON = frozenset({ValueKind.RESIDUAL, ValueKind.PARTIAL})


def verify(program: Program, *, complete: bool = False, known: Sequence[Stage] = ()) -> None:
    """Checks a program.

    Every input is bound to an existing output; there is no cycle, control edges included; calls agree with their
    functions; nodes of a step have the attributes of their op, and read the dtypes that these say; stages agree on the
    dtypes of the tensors that they exchange, and on their shapes as far as known before the step; every device is one
    of the layout, and only constants and placeholders have none; what a stage hands on is on its own device; each
    micro-batch has exactly one forward and one backward per replica that has samples of it; all members of a group run
    their collectives in one order; and replicas that add up inside their tasks meet.

    Args:
        program: after any pass.
        complete: whether the last pass has run, so that nothing may be pending.
        known: stages that have been checked before, and aren't checked again.

    Raises:
        PassError: names the node and both sides of what disagrees.
    """
    graph = Graph(program.graph)
    if len(graph.nodes) != len(program.graph.node):
        counts = collections.Counter(node.name for node in program.graph.node)
        raise PassError(f"node names are not unique: {[name for name, count in counts.items() if count > 1][:5]}")
    library = {function.signature.name: function for function in program.graph.library.function}
    # Once for each node: a call's results have many readers.
    dtypes = {node.name: output_dtypes(node) for node in graph}
    for node in graph:
        _verify_inputs(graph, node, dtypes)
        if node.op in CALLS:
            _verify_call(graph, node, library, dtypes)
        elif program.step is not None:
            _verify_dtypes(graph, node, dtypes)
    graph.topological()
    for stage in program.stages:
        if not any(stage is other for other in known):
            _verify_stage(stage)
    if program.step is not None:
        _verify_step(program, graph, complete=complete)
        verify_connections(program, graph)


def _verify_inputs(graph: Graph, node: NodeDef, dtypes: Mapping[str, Sequence[int]]) -> None:
    for ref in graph.inputs(node.name):
        if ref.node not in dtypes:
            raise PassError(f"node {node.name!r} ({node.op}) reads {ref}, but there is no node {ref.node!r}")
        count = len(dtypes[ref.node])
        if ref.output >= count:
            raise PassError(f"node {node.name!r} ({node.op}) reads {ref}, but {ref.node!r} has {count} outputs")
    for waited in control_inputs(node):
        if waited not in graph:
            raise PassError(f"node {node.name!r} ({node.op}) waits for {waited!r}, which doesn't exist")


def _verify_call(
    graph: Graph, node: NodeDef, library: Mapping[str, FunctionDef], dtypes: Mapping[str, Sequence[int]]
) -> None:
    name = node.attr["f"].func.name
    if name not in library:
        raise PassError(f"node {node.name!r} calls function {name!r}, which isn't in the library")
    signature = library[name].signature
    expected = [arg.type for arg in signature.input_arg]
    actual = [dtypes[ref.node][ref.output] for ref in graph.inputs(node.name)]
    if expected != actual:
        position = next((i for i, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1]), None)
        at = "" if position is None else f" (input {position}: {dtype_name(expected[position])} wanted, "
        at += "" if position is None else f"{dtype_name(actual[position])} given)"
        raise PassError(
            f"call {node.name!r} gives {len(actual)} inputs to function {name!r}, which takes {len(expected)}{at}"
        )
    if [arg.type for arg in signature.output_arg] != list(node.attr["Tout"].list.type):
        raise PassError(f"call {node.name!r} and function {name!r} disagree about the results' types")


def _verify_dtypes(graph: Graph, node: NodeDef, dtypes: Mapping[str, Sequence[int]]) -> None:
    """Checks that a node has its op's attributes, and reads tensors of the dtypes that it is for."""
    if missing := missing_attrs(node):
        names = " and ".join(missing)
        raise PassError(f"node {node.name!r} ({node.op}) has no attribute {names}, which its op needs; give it")
    refs, wanted = graph.inputs(node.name), input_dtypes(node)
    if len(refs) != len(wanted):
        raise PassError(
            f"node {node.name!r} ({node.op}) reads {len(refs)} tensors, but its op and attributes want {len(wanted)}"
        )
    for index, (ref, dtype) in enumerate(zip(refs, wanted, strict=True)):
        given = dtypes[ref.node][ref.output]
        if given != dtype:
            raise PassError(
                f"node {node.name!r} ({node.op}) is for {dtype_name(dtype)} as input {index}, but {str(ref)!r} is "
                f"{dtype_name(given)}; cast it, or change the node's attributes"
            )


def _verify_stage(stage: Stage) -> None:
    """Checks that F and B of a stage agree in dtypes with each other and with the whole."""
    if stage.forward is None or stage.graph is None:
        return
    nodes = {node.name: node for node in stage.graph.node}
    whole = {**stage.arguments, **stage.results, **stage.metric_results}

    def dtype(value: Value) -> int:
        ref = whole.get(value, value.ref)
        return output_dtypes(nodes[ref.node])[ref.output]

    produced: dict[Value, int] = {}
    for function in stage.functions:
        signature = function.function.signature
        sides = [(function.inputs, signature.input_arg, "argument"), (function.outputs, signature.output_arg, "result")]
        for values, args, side in sides:
            if len(values) != len(args):
                raise PassError(f"function {function.name!r} has {len(args)} {side}s but {len(values)} are described")
            for value, arg in zip(values, args, strict=True):
                if arg.type != dtype(value):
                    raise PassError(
                        f"function {function.name!r}: {side} {value} is {dtype_name(arg.type)} but the stage's graph "
                        f"says {dtype_name(dtype(value))}"
                    )
        for value in function.inputs:
            if value.kind in _HANDED_ON and value not in produced:
                raise PassError(f"function {function.name!r} reads {value}, which no function before it gives")
            if value.kind is ValueKind.GRADIENT and dtype(value) != dtype(Value(value.ref)):
                raise PassError(f"function {function.name!r}: {value} and {value.ref} differ in dtype")
        produced |= dict.fromkeys(function.outputs, 0)
    sums = collections.Counter(
        node.name for function in stage.functions for node in sums_of(function.function.node_def)
    )
    for name, count in sums.items():
        if count > 1:
            raise PassError(f"sum over replicas {name!r} is in {count} functions of stage {stage.index}, with one key")


def _verify_step(program: Program, graph: Graph, *, complete: bool) -> None:
    step = program.own_step
    layout = step.layout
    legal = {device for devices in layout.devices for device in devices}
    legal |= step.placed_on | step.hosts
    legal |= {graph.nodes[ref.node].device for ref in step.feeds.values()}  # the host
    if step.taken is not None:
        legal |= {graph.nodes[step.taken.number.node].device, *step.taken.arrays}
    for node in graph:
        if node.device in legal or (not node.device and node.op in _ANYWHERE):
            continue
        what = "call" if node.op in CALLS else f"{node.op} node"
        fix = f"is on {node.device!r}, which is none of the plan's devices"
        if not node.device:
            fix = "has no device; give it that of a node that it reads or that reads it"
        raise PassError(f"{what} {node.name!r} {fix}")
    _verify_relays(program, graph)
    wanted = {
        Task(stage, phase, micro_batch, replica)
        for stage in range(len(layout.devices))
        if stage not in step.dissolved
        for phase, _ in program.stages[stage].phases
        for micro_batch, replica in layout.slices_with_samples(stage)
    }
    if wanted != set(step.entry):
        difference = sorted(map(str, wanted ^ set(step.entry)))
        raise PassError(
            f"the step has {len(step.entry)} tasks instead of {len(wanted)}; they differ in {difference[:5]}"
        )
    nodes = collections.Counter(step.entry.values())
    if nodes and max(nodes.values()) > 1:
        raise PassError(f"node {nodes.most_common(1)[0][0]!r} serves several tasks")
    for micro_batch, interval in enumerate(layout.micro_batch_intervals):
        covered = [sum(part.size for part in layout.slices(s, micro_batch)) for s in range(len(layout.devices))]
        if any(count != interval.size for count in covered):
            raise PassError(f"slices of micro-batch {micro_batch} hold {covered} samples instead of {interval.size}")
    if complete and step.pending:
        task, value = next(iter(step.pending))
        raise PassError(f"{len(step.pending)} arguments are not connected, among them {value} of task {task}")
    _verify_collectives(graph)
    if step.schedule is not None:
        _verify_meetings(program, graph)


def _verify_relays(program: Program, graph: Graph) -> None:
    """Checks that what a stage hands on is on its own device: elsewhere it would travel twice."""
    devices = program.own_step.layout.devices
    for node in graph:
        if NodeKind.of(node) is NodeKind.RELAY:
            stage, replica = (int(node.attr[name].i) for name in (STAGE_ATTR, REPLICA_ATTR))
            if node.device != devices[stage][replica]:
                raise PassError(
                    f"relay {node.name!r} of stage {stage} is on {node.device!r}, but replica {replica} is on "
                    f"{devices[stage][replica]!r}"
                )


def _verify_collectives(graph: Graph) -> None:
    """Checks that members of a group start their collectives in one order; otherwise they would deadlock."""
    orders: dict[str, list[int]] = {}
    members: dict[int, set[str]] = {}
    sizes: dict[int, int] = {}
    for name in graph.topological():
        node = graph.nodes[name]
        if node.op != SUM_OP:
            continue
        instance = _number(graph, graph.inputs(name)[3])
        orders.setdefault(node.device, []).append(instance)
        members.setdefault(instance, set()).add(node.device)
        sizes[instance] = _number(graph, graph.inputs(name)[1])
        waits = [graph.nodes[waited].op for waited in control_inputs(node)]
        if len(orders[node.device]) > 1 and SUM_OP not in waits:
            raise PassError(f"all-reduce {name!r} isn't ordered after the one before it on {node.device}")
    for instance, devices in members.items():
        if len(devices) != sizes[instance]:
            raise PassError(f"all-reduce {instance} has a group of {sizes[instance]} but {len(devices)} members")
    before: dict[int, dict[int, str]] = {}  # instance -> each that comes right before it, and on which device
    for device, order in orders.items():
        for first, second in itertools.pairwise(order):
            before.setdefault(second, {}).setdefault(first, device)
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        steps = (f"{one} before {two} on {before[two][one]!r}" for one, two in itertools.pairwise(error.args[1]))
        raise PassError(f"all-reduces wait for each other in a circle: {', '.join(steps)}") from error


def _verify_meetings(program: Program, graph: Graph) -> None:
    """Checks for deadlocks: calls that add up over replicas, and all-reduces, end together as if they were one."""
    peers = program.roles.peers
    if peers is None:
        return
    adding = {
        function.name: [function.inputs.index(Value(ref)) for ref in peers.refs]
        for stage in program.stages
        for function in stage.functions
        if sums_of(function.function.node_def)
    }
    meetings: dict[tuple[str, ...], list[NodeDef]] = {}
    for node in graph:
        function, inputs = node.attr["f"].func.name if node.op in CALLS else "", graph.inputs(node.name)
        if function in adding:
            count, *keys = (_number(graph, inputs[place]) for place in adding[function])
            meetings.setdefault((function, str(count), *map(str, keys)), []).append(node)
        elif node.op == SUM_OP:
            meetings.setdefault((str(_number(graph, inputs[3])),), []).append(node)
    for key, nodes in meetings.items():
        if len(key) > 1 and not int(key[1]) == len(nodes) == len({node.device for node in nodes}):
            names = ", ".join(repr(node.name) for node in nodes)
            raise PassError(f"{names} add up over {key[1]} replicas, but are {len(nodes)} calls")
    first = {node.name: nodes[0].name for nodes in meetings.values() for node in nodes}
    waits: dict[str, set[str]] = {}
    for node in graph:
        before = (first.get(name, name) for name in graph.sources(node.name))
        waits.setdefault(first.get(node.name, node.name), set()).update(before)
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError as error:
        raise PassError(
            f"replicas that add up inside their tasks (layers with synchronized=True) never meet, as their devices run "
            f"tasks in different orders: {' before '.join(error.args[1])}; give all replicas of a stage one order, "
            f"or set synchronized=False"
        ) from error


def _number(graph: Graph, ref: Ref) -> int:
    return int(graph.nodes[ref.node].attr["value"].tensor.int_val[0])
