"""Graphs that give variables their values without the client: by their initializers, or from other devices.

Each device handles one variable after the other, so that besides the variables it needs memory only for the largest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from dapple_tf.frontend.initialization import Initial
from dapple_tf.variables.device_values import Holding
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, control_inputs, data_inputs, shape_attr
from graph_passes.ir.kernels import host_of
from graph_passes.ir.outline import FunctionDef, call_node, outline
from graph_passes.ir.program import Variable
from graph_passes.ir.storage import (
    assign_function,
    assign_variable,
    handle,
    join_function,
    merge_library,
    read_function,
    shard_number,
    shard_of,
)
from graph_passes.ir.tensorflow_bridge import empty_graph


class _Chains:
    """Call nodes, each of which waits for earlier ones on its device.

    Attributes:
        builder: builder of the graph.
    """

    def __init__(self, prefix: str) -> None:
        self.builder = Builder(empty_graph())
        self._prefix = prefix
        self._functions: dict[str, FunctionDef] = {}
        self._numbers: dict[str, int] = {}
        self._last: dict[str, str] = {}

    def function_name(self, label: str) -> str:
        """Returns a name in the library, which allows fewer characters; equal for equal labels."""
        return f"{self._prefix}_{self._numbers.setdefault(label, len(self._numbers))}"

    def call(self, name: str, function: FunctionDef, inputs: Sequence[Ref], device: str) -> Ref:
        """Adds a call of a function on a device, after the device's earlier calls."""
        self._functions[function.signature.name] = function
        control = [self._last[device]] if device in self._last else []
        fresh = self.builder.names.fresh(name)
        self._last[device] = fresh
        return self.builder.append(call_node(fresh, function, inputs, device=device, control=control))

    def assign(self, variable: Variable, value: Ref, holding: Holding, device: str) -> None:
        """Assigns a whole value, or its shard of it, to a variable on a device of its holding."""
        name = f"{variable.storage_name}/assign"
        function = assign_function(self.function_name(f"{name} {variable.shards}"), [variable])
        self.call(name, function, [value, *holding.number(self.builder, device)], device)

    def value(self, variable: Variable, holding: Holding) -> Ref:
        """Returns the whole value of a variable of a holding: of its first device, or of all devices' shards."""
        name = variable.storage_name
        read = read_function(self.function_name(f"{name}/read {variable.shards}"), [variable])
        if not holding.sharded:
            return self.call(f"{name}/read", read, [], holding.devices[0])
        shards = [self.call(f"{name}/read", read, [], device) for device in holding.devices]
        join = join_function(self.function_name(f"{name}/join"), [variable])
        return self.call(f"{name}/join", join, shards, host_of(holding.devices[0]))

    def finished(self) -> tuple[GraphDef, list[str]]:
        """Returns the graph, and the last node of each device."""
        merge_library(self.builder.graph, self._functions.values())
        return self.builder.graph, list(self._last.values())


def initialization(
    holdings: Sequence[Holding], initials: Mapping[str, Initial], prefix: str
) -> tuple[GraphDef, list[str]]:
    """Builds a graph in which devices initialise variables.

    Every device computes a value for itself, unless a second run could give another one: the variable's first device
    then computes the value and sends it to the others.

    Args:
        holdings: what devices keep.
        initials: variable -> the computation of its initial value; other variables don't change.
        prefix: start of the functions' names.

    Returns:
        The graph and the nodes to run.
    """
    chains = _Chains(prefix)
    libraries = GraphDef()
    for initial in initials.values():
        merge_library(libraries, initial.graph.library.function)
    for holding in holdings:
        chosen = [v for v in holding.variables if v.name in initials and initials[v.name].repeatable]
        if chosen:
            function = _initializing(chains.function_name(holding.label), chosen, initials)
            for replica, device in enumerate(holding.devices):
                number = holding.number(chains.builder, device)
                chains.call(f"{holding.label}/replica{replica}", function, number, device)
    holdings_of: dict[str, list[tuple[Variable, Holding]]] = {}
    for holding in holdings:
        for variable in holding.variables:
            if variable.name in initials and not initials[variable.name].repeatable:
                holdings_of.setdefault(variable.name, []).append((variable, holding))
    for name, places in holdings_of.items():
        once = _computing(chains.function_name(f"{name}/value"), initials[name])
        value = chains.call(f"{name}/value", once, [], places[0][1].devices[0])
        for variable, holding in places:
            for device in holding.devices:
                chains.assign(variable, value, holding, device)
    graph, nodes = chains.finished()
    merge_library(graph, libraries.library.function)
    return graph, nodes


def rearrangement(
    before: Sequence[Holding], after: Sequence[Holding], prefix: str
) -> tuple[GraphDef, list[str], list[Holding]]:
    """Builds a graph that copies variables to the devices that are to keep them, from a device that has them.

    Args:
        before: what devices keep.
        after: what they are to keep. A variable that parameter groups keep separately, each under its own name, may
            have another name there; a new group gets the value of the first.
        prefix: start of the functions' names.

    Returns:
        The graph, the nodes to run, and the part of ``after`` for which no device has a value.
    """
    chains = _Chains(prefix)
    had = {_copy(variable, holding, device) for holding in before for variable, device in _placed(holding)}
    first: dict[str, tuple[Variable, Holding]] = {}
    for holding in before:
        for variable in holding.variables:
            for key in (f"storage {variable.storage_name}", f"name {variable.name}"):
                first.setdefault(key, (variable, holding))
    missing = []
    for holding in after:
        unknown = []
        for variable in holding.variables:
            source = first.get(f"storage {variable.storage_name}") or first.get(f"name {variable.name}")
            if source is None:
                unknown.append(variable)
                continue
            targets = [device for device in holding.devices if _copy(variable, holding, device) not in had]
            if targets:
                value = chains.value(*source)
                for target in targets:
                    chains.assign(variable, value, holding, target)
        if unknown:
            missing.append(dataclasses.replace(holding, variables=tuple(unknown)))
    graph, nodes = chains.finished()
    return graph, nodes, missing


def removal(before: Sequence[Holding], after: Sequence[Holding], prefix: str) -> tuple[GraphDef, list[str]]:
    """Returns a graph that frees variables which devices no longer keep, and the nodes to run."""
    chains = _Chains(prefix)
    wanted = {(variable.storage_name, device) for holding in after for variable, device in _placed(holding)}
    for holding in before:
        for variable, device in _placed(holding):
            if (variable.storage_name, device) not in wanted:
                builder = Builder(empty_graph())
                target = handle(builder, variable.storage_name, variable.storage_dtype, variable.shape)
                effect = builder.add("destroy", "DestroyResourceOp", [target], ignore_lookup_error=True).node
                name = chains.function_name(f"{variable.storage_name}/destroy")
                function = outline(name, Graph(builder.graph), [], [], effects=[effect])
                chains.call(f"{variable.storage_name}/destroy", function, [], device)
    return chains.finished()


def reading(holding: Holding, prefix: str) -> tuple[GraphDef, list[Ref]]:
    """Returns a graph that reads the variables of a holding, and their whole values."""
    chains = _Chains(prefix)
    values = [chains.value(variable, holding) for variable in holding.variables]
    return chains.finished()[0], values


def _placed(holding: Holding) -> Iterator[tuple[Variable, str]]:
    return ((variable, device) for variable in holding.variables for device in holding.devices)


def _copy(variable: Variable, holding: Holding, device: str) -> tuple[str, str, int, int]:
    """Returns what tells a copy of a variable on a device from others: its storage, and which shard it is."""
    number = holding.devices.index(device) if variable.shards > 1 else 0
    return variable.storage_name, device, variable.shards, number


def _computing(name: str, initial: Initial) -> FunctionDef:
    """Returns the function () -> initial value."""
    builder = Builder(empty_graph())
    value = _copied(builder, initial)
    return outline(name, Graph(builder.graph), [], [value])


def _initializing(name: str, variables: Sequence[Variable], initials: Mapping[str, Initial]) -> FunctionDef:
    """Returns the function `shard_number` -> () that computes and assigns initial values, one after the other."""
    builder = Builder(empty_graph())
    number = shard_number(builder, variables)
    last: str | None = None
    for variable in variables:
        value = shard_of(builder, _copied(builder, initials[variable.name], last), variable, *number)
        last = assign_variable(builder, variable, value)
    assert last is not None
    return outline(name, Graph(builder.graph), number, [], effects=[last])


def _copied(builder: Builder, initial: Initial, after: str | None = None) -> Ref:
    """Adds a copy of an initializer's graph, which begins when the node ``after`` has run.

    Constants become placeholders with defaults: otherwise TensorFlow would compute what follows from constants alone
    while it optimises the graph, in the client's process or twice.
    """
    control = [f"^{after}"] if after is not None else []
    names = {node.name: builder.names.fresh(f"initial/{node.name}") for node in initial.graph.node}
    for node in initial.graph.node:
        copy = builder.graph.node.add()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(str(Ref(names[ref.node], ref.output)) for ref in data_inputs(node))
        copy.input.extend(f"^{names[waited]}" for waited in control_inputs(node))
        copy.name = names[node.name]
        if not node.input:
            copy.input.extend(control)
        if node.op == "Const":
            copy.name = builder.names.fresh(f"{names[node.name]}/value")
            shape = [dim.size for dim in node.attr["value"].tensor.tensor_shape.dim]
            feedable = builder.graph.node.add(name=names[node.name], op="PlaceholderWithDefault", input=[copy.name])
            feedable.attr["dtype"].CopyFrom(node.attr["dtype"])
            feedable.attr["shape"].CopyFrom(shape_attr(shape))
    return Ref(names[initial.output.node], initial.output.output)
