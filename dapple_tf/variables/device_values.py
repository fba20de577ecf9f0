"""Graphs that carry variables between the host and the devices that keep them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from graph_passes.ir.graph import Builder, GraphDef, Ref
from graph_passes.ir.outline import FunctionDef, call_node, placeholder
from graph_passes.ir.program import Variable
from graph_passes.ir.storage import by_dtype, load_function, merge_library, save_function
from graph_passes.ir.tensorflow_bridge import empty_graph


@dataclass(frozen=True)
class Holding:
    """Variables that the same stages read, and the devices that keep them.

    Attributes:
        stages: the stages, ascending.
        devices: names of their devices, each once.
        variables: the variables.
        part: distinguishes holdings of the same stages, if variables are placed one by one.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    variables: tuple[Variable, ...]
    part: int = 0

    @property
    def label(self) -> str:
        """Its name in nodes and functions."""
        return "stage" + "_".join(map(str, self.stages)) + (f"_part{self.part}" if self.part else "")


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
            load, save = (
                load_function(f"{prefix}_{label}_load", variables),
                save_function(f"{prefix}_{label}_save", variables),
            )
            functions += [load, save]
            feeds = [builder.append(placeholder(f"{label}/values{dtype}", dtype)) for dtype in by_dtype(variables)]
            self.feeds.append([ref.node for ref in feeds])
            self.loads.append(
                [
                    builder.append(call_node(f"{label}/replica{replica}/load", load, feeds, device=device)).node
                    for replica, device in enumerate(holding.devices)
                ]
            )
            node = builder.append(call_node(f"{label}/save", save, [], device=holding.devices[0])).node
            self.saves.append([Ref(node, index) for index in range(len(feeds))])
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
            node = call_node(f"{number}/replica{replica}/load", function, [feeds[variable.name]], device=device)
            nodes.setdefault(variable.name, []).append(builder.append(node).node)
    merge_library(graph, functions)
    return graph, {name: (feeds[name].node, nodes[name]) for name in feeds}


def save_each(names: Collection[str], holdings: Sequence[Holding], prefix: str) -> tuple[GraphDef, dict[str, str]]:
    """Builds nodes that read single variables, each from the first device that keeps it; ``prefix`` as in `load_each`.

    Returns:
        The graph, and for each variable the node whose first output is its value (a vector).
    """
    graph = empty_graph()
    builder = Builder(graph)
    functions: list[FunctionDef] = []
    nodes: dict[str, str] = {}
    for holding, variable in _each(names, holdings):
        if variable.name not in nodes:
            number = len(functions)
            function = save_function(f"{prefix}_{number}_save", [variable])
            functions.append(function)
            node = call_node(f"{number}/save", function, [], device=holding.devices[0])
            nodes[variable.name] = builder.append(node).node
    merge_library(graph, functions)
    return graph, nodes


def _each(names: Collection[str], holdings: Sequence[Holding]) -> Iterator[tuple[Holding, Variable]]:
    for holding in holdings:
        for variable in holding.variables:
            if variable.name in names:
                yield holding, variable
