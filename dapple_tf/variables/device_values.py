"""Graphs that carry variables between the host and the devices that keep them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import Builder, GraphDef, Ref
from graph_passes.ir.kernels import host_of
from graph_passes.ir.outline import FunctionDef, call_node, placeholder
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.storage import (
    by_dtype,
    flatten,
    join_function,
    load_function,
    merge_library,
    read_function,
    save_function,
)
from graph_passes.ir.tensorflow_bridge import empty_graph


@dataclass(frozen=True)
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


def load_each(
    names: Collection[str], holdings: Sequence[Holding], prefix: str
) -> tuple[GraphDef, dict[str, tuple[str, list[str]]]]:
    """Builds nodes that assign single variables on all devices that keep them; functions' names begin with ``prefix``.

    Returns:
        The graph, and for each variable the placeholder of its value (a vector) and the nodes that assign it.
    """
    graph = empty_graph()
    builder = Builder(graph)
    functions: list[FunctionDef] = []
    feeds: dict[str, Ref] = {}
    nodes: dict[str, list[str]] = {}
    for holding, variable in _each(names, holdings):
        number = len(functions)
        function = load_function(f"{prefix}_{number}_load", [variable])
        functions.append(function)
        if variable.name not in feeds:
            feeds[variable.name] = builder.append(placeholder(f"{number}/value", variable.dtype))
        for replica, device in enumerate(holding.devices):
            inputs = [feeds[variable.name], *holding.number(builder, device)]
            node = call_node(f"{number}/replica{replica}/load", function, inputs, device=device)
            nodes.setdefault(variable.name, []).append(builder.append(node).node)
    merge_library(graph, functions)
    return graph, {name: (feeds[name].node, nodes[name]) for name in feeds}


def save_each(names: Collection[str], holdings: Sequence[Holding], prefix: str) -> tuple[GraphDef, dict[str, Ref]]:
    """Builds nodes that read single variables, each from the first device that keeps it; ``prefix`` as in `load_each`.

    Returns:
        The graph, and for each variable the tensor that is its value (a vector).
    """
    graph = empty_graph()
    builder = Builder(graph)
    functions: list[FunctionDef] = []
    values: dict[str, Ref] = {}
    for holding, variable in _each(names, holdings):
        if variable.name not in values:
            number = len(functions)
            (values[variable.name],), saving = _saved(
                builder, f"{number}/save", f"{prefix}_{number}_save", holding, [variable]
            )
            functions += saving
    merge_library(graph, functions)
    return graph, values


def _each(names: Collection[str], holdings: Sequence[Holding]) -> Iterator[tuple[Holding, Variable]]:
    for holding in holdings:
        for variable in holding.variables:
            if variable.name in names:
                yield holding, variable
