"""Graphs that bring variables' values from host, initializers or other devices, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tensorflow.core.framework import types_pb2

from dapple_tf.frontend.initialization import Initial
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, control_inputs, data_inputs, shape_attr
from graph_passes.ir.kernels import host_of
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.storage import (
    assign_function,
    assign_variable,
    by_dtype,
    flatten,
    handle,
    join_function,
    load_function,
    merge_library,
    read_function,
    save_function,
    shard_number,
    shard_of,
)
from graph_passes.ir.tensorflow_bridge import empty_graph


@dataclasses.dataclass(frozen=True)
class Holding:
    """Variables that the same stages read, and the devices that keep them.

    Attributes:
        stages: the stages, ascending.
        devices: names of their devices, each once.
        variables: the variables: all of them whole on each device, or all in as many shards as there are devices,
            device i with shard i.
        part: distinguishes holdings of the same stages, if some variables are in shards or placed one by one.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    variables: tuple[Variable, ...]
    part: int = 0

    @property
    def label(self) -> str:
        """Its name in nodes and functions."""
        return "stage" + "_".join(map(str, self.stages)) + (f"_part{self.part}" if self.part else "")

    @property
    def sharded(self) -> bool:
        """Whether each device keeps a shard of each variable."""
        return any(variable.shards > 1 for variable in self.variables)

    def number(self, builder: Builder, device: str) -> list[Ref]:
        """Returns the last argument of functions that assign the variables on a device: the number of its shards.

        There is none if the variables aren't in shards.
        """
        return [builder.const(self.devices.index(device), types_pb2.DT_INT32, device=device)] if self.sharded else []


def parameters_in_shards(holdings: Iterable[Holding]) -> frozenset[str]:
    """Returns the parameters of which devices keep shards."""
    variables = (variable for holding in holdings for variable in holding.variables)
    return frozenset(v.name for v in variables if v.kind is not VariableKind.OPTIMIZER and v.shards > 1)


def read_shards(
    builder: Builder,
    name: str,
    devices: Sequence[str],
    variables: Sequence[Variable],
    host: str,
) -> tuple[list[Ref], list[FunctionDef]]:
    """Adds nodes that read variables in shards and join them.

    Args:
        builder: of the graph, which gets the nodes.
        name: start of the nodes' and the functions' names.
        devices: the devices, in the order of shards.
        variables: the variables.
        host: the device that joins them.

    Returns:
        Their whole values, and the functions that the nodes call.
    """
    function = "".join(char if char.isalnum() else "_" for char in name)
    read, join = read_function(f"{function}_shards", variables), join_function(f"{function}_joined", variables)
    nodes = [
        builder.append(call_node(builder.names.fresh(f"{name}/shard{number}"), read, [], device=device)).node
        for number, device in enumerate(devices)
    ]
    shards = [Ref(node, index) for index in range(len(variables)) for node in nodes]
    joined = builder.append(call_node(builder.names.fresh(f"{name}/joined"), join, shards, device=host)).node
    return [Ref(joined, index) for index in range(len(variables))], [read, join]


def _saved(
    builder: Builder, name: str, function: str, holding: Holding, variables: Sequence[Variable]
) -> tuple[list[Ref], list[FunctionDef]]:
    """Adds nodes that return variables' values, one vector per dtype, from the first device that keeps them whole."""
    device = holding.devices[0]
    if not holding.sharded:
        save = save_function(function, variables)
        node = builder.append(call_node(name, save, [], device=device)).node
        return [Ref(node, index) for index in range(len(save.signature.output_arg))], [save]
    host = host_of(device)
    values, functions = read_shards(builder, function, holding.devices, variables, host)
    value_of = dict(zip(variables, values, strict=True))
    vectors = []
    for dtype, group in by_dtype(variables).items():
        parts = [flatten(builder, value_of[variable], dtype, device=host) for variable in group]
        vectors.append(builder.concat(name, parts, dtype, 0, device=host))
    return vectors, functions


class StorageNodes:
    """Graph nodes that load and save all variables of every device, one vector per dtype and holding.

    Attributes:
        prefix: the name under which the nodes are imported; functions' names begin with it, too.
        holdings: what devices keep.
    """

    PREFIX = "storage"

    def __init__(self, holdings: Sequence[Holding], prefix: str = PREFIX) -> None:
        self.holdings, self.prefix = holdings, prefix
        self.graph = empty_graph()
        self.feeds: list[list[str]] = []
        self.loads: list[list[str]] = []
        self.saves: list[list[Ref]] = []
        builder = Builder(self.graph)
        functions: list[FunctionDef] = []
        for holding in holdings:
            label, variables = holding.label, holding.variables
            load = load_function(f"{prefix}_{label}_load", variables)
            functions.append(load)
            feeds = [builder.append(placeholder(f"{label}/values{dtype}", dtype)) for dtype in by_dtype(variables)]
            self.feeds.append([ref.node for ref in feeds])
            self.loads.append(
                [
                    builder.append(
                        call_node(
                            f"{label}/replica{replica}/load",
                            load,
                            [*feeds, *holding.number(builder, device)],
                            device=device,
                        )
                    ).node
                    for replica, device in enumerate(holding.devices)
                ]
            )
            vectors, saving = _saved(builder, f"{label}/save", f"{prefix}_{label}_save", holding, variables)
            functions += saving
            self.saves.append(vectors)
        merge_library(self.graph, functions)


class _Calls:
    """Call nodes, each of which waits for earlier ones on its device, or none.

    In turn, devices need memory for the largest variable alone, besides the variables.

    Attributes:
        builder: builder of the graph.
    """

    def __init__(self, prefix: str, *, in_turn: bool = True) -> None:
        self.builder = Builder(empty_graph())
        self._prefix, self._in_turn = prefix, in_turn
        self._functions: dict[str, FunctionDef] = {}
        self._numbers: dict[str, int] = {}
        self._last: dict[str, str] = {}

    def function_name(self, label: str) -> str:
        """Returns a name in the library, which allows fewer characters; equal for equal labels."""
        return f"{self._prefix}_{self._numbers.setdefault(label, len(self._numbers))}"

    def call(self, name: str, function: FunctionDef, inputs: Sequence[Ref], device: str) -> Ref:
        """Adds a call of a function on a device, after the device's earlier calls if they are in turn."""
        self._functions[function.signature.name] = function
        control = [self._last[device]] if self._in_turn and device in self._last else []
        fresh = self.builder.names.fresh(name)
        self._last[device] = fresh
        return self.builder.append(call_node(fresh, function, inputs, device=device, control=control))

    def assign(self, variable: Variable, value: Ref, holding: Holding, device: str) -> str:
        """Assigns a whole value, or its shard of it, to a variable on a device of its holding; returns the node."""
        name = f"{variable.storage_name}/assign"
        function = assign_function(self.function_name(f"{name} {variable.shards}"), [variable])
        return self.call(name, function, [value, *holding.number(self.builder, device)], device).node

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
    calls = _Calls(prefix)
    libraries = GraphDef()
    for initial in initials.values():
        merge_library(libraries, initial.graph.library.function)
    for holding in holdings:
        chosen = [v for v in holding.variables if v.name in initials and initials[v.name].repeatable]
        if chosen:
            function = _initializing(calls.function_name(holding.label), chosen, initials)
            for replica, device in enumerate(holding.devices):
                number = holding.number(calls.builder, device)
                calls.call(f"{holding.label}/replica{replica}", function, number, device)
    holdings_of: dict[str, list[tuple[Variable, Holding]]] = {}
    for holding in holdings:
        for variable in holding.variables:
            if variable.name in initials and not initials[variable.name].repeatable:
                holdings_of.setdefault(variable.name, []).append((variable, holding))
    for name, places in holdings_of.items():
        once = _computing(calls.function_name(f"{name}/value"), initials[name])
        value = calls.call(f"{name}/value", once, [], places[0][1].devices[0])
        for variable, holding in places:
            for device in holding.devices:
                calls.assign(variable, value, holding, device)
    graph, nodes = calls.finished()
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
    calls = _Calls(prefix)
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
                value = calls.value(*source)
                for target in targets:
                    calls.assign(variable, value, holding, target)
        if unknown:
            missing.append(dataclasses.replace(holding, variables=tuple(unknown)))
    graph, nodes = calls.finished()
    return graph, nodes, missing


def removal(before: Sequence[Holding], after: Sequence[Holding], prefix: str) -> tuple[GraphDef, list[str]]:
    """Returns a graph that frees variables which devices no longer keep, and the nodes to run."""
    calls = _Calls(prefix)
    wanted = {(variable.storage_name, device) for holding in after for variable, device in _placed(holding)}
    for holding in before:
        for variable, device in _placed(holding):
            if (variable.storage_name, device) not in wanted:
                builder = Builder(empty_graph())
                target = handle(builder, variable.storage_name, variable.storage_dtype, variable.shape)
                effect = builder.add("destroy", "DestroyResourceOp", [target], ignore_lookup_error=True).node
                name = calls.function_name(f"{variable.storage_name}/destroy")
                function = outline(name, Graph(builder.graph), [], [], effects=[effect])
                calls.call(f"{variable.storage_name}/destroy", function, [], device)
    return calls.finished()


def reading(holding: Holding, prefix: str) -> tuple[GraphDef, list[Ref]]:
    """Returns a graph that reads the variables of a holding one after the other, and their whole values."""
    calls = _Calls(prefix)
    values = [calls.value(variable, holding) for variable in holding.variables]
    return calls.finished()[0], values


def save_each(names: Collection[str], holdings: Sequence[Holding], prefix: str) -> tuple[GraphDef, dict[str, Ref]]:
    """Returns a graph that reads single variables, each from the first device that keeps it, and their whole values."""
    calls = _Calls(prefix, in_turn=False)
    values: dict[str, Ref] = {}
    for holding in holdings:
        for variable in holding.variables:
            if variable.name in names and variable.name not in values:
                values[variable.name] = calls.value(variable, holding)
    return calls.finished()[0], values


def load_each(
    names: Collection[str], holdings: Sequence[Holding], prefix: str
) -> tuple[GraphDef, dict[str, tuple[str, list[str]]]]:
    """Builds a graph that assigns single variables on all devices that keep them.

    Returns:
        The graph, and for each variable the placeholder of its value and the nodes that assign it.
    """
    calls = _Calls(prefix, in_turn=False)
    loaders: dict[str, tuple[str, list[str]]] = {}
    for holding in holdings:
        for variable in holding.variables:
            if (name := variable.name) in names:
                if name not in loaders:
                    fed = placeholder(calls.builder.names.fresh(f"{name}/fed"), variable.dtype)
                    loaders[name] = calls.builder.append(fed).node, []
                value, nodes = loaders[name]
                nodes += [calls.assign(variable, Ref(value), holding, device) for device in holding.devices]
    return calls.finished()[0], loaders


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
