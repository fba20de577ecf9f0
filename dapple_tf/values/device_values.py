"""Graphs that carry variables between the host and the devices that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.graph import Builder, GraphDef, Ref
from graph_passes.outline import FunctionDef, call_node, placeholder
from graph_passes.program import Variable
from graph_passes.storage import by_dtype, load_function, merge_library, save_function
from graph_passes.tensorflow_bridge import empty_graph


@dataclass(frozen=True)
class Holding:
    """Variables that the same stages read, and the devices that keep them.

    Attributes:
        stages: the stages, ascending.
        devices: names of their devices, each once.
        variables: the variables.
        part: tells holdings of the same stages apart, where variables are placed one by one.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    variables: tuple[Variable, ...]
    part: int = 0

    @property
    def label(self) -> str:
        """Name in nodes and functions."""
        return "stage" + "_".join(map(str, self.stages)) + (f"_part{self.part}" if self.part else "")


class DeviceValues:
    """Graph nodes that load and save all variables of every device, one vector per dtype and holding.

    Attributes:
        prefix: the name under which the nodes are to be imported; functions' names begin with it, too.
        holdings: what devices keep.
    """

    PREFIX = "storage"

    def __init__(self, holdings: Sequence[Holding], prefix: str = PREFIX) -> None:
        self.holdings, self.prefix = holdings, prefix
        self.graph = empty_graph()
        self.feeds: list[list[str]] = []
        self.loads: list[list[str]] = []
        self.saves: list[list[Ref]] = []
        self.rate: tuple[str, list[str]] | None = None
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


def load_one(name: str, holdings: Sequence[Holding], prefix: str) -> tuple[GraphDef, str, list[str]]:
    """Nodes that assign one scalar variable wherever it is kept; names of their functions begin with ``prefix``.

    Returns:
        The graph, the placeholder of the value, and the nodes that assign it.
    """
    graph = empty_graph()
    builder = Builder(graph)
    functions: list[FunctionDef] = []
    feeds: list[Ref] = []
    nodes = []
    for holding in holdings:
        for variable in holding.variables:
            if variable.name != name:
                continue
            function = load_function(f"{prefix}_{holding.label}_load_one", [variable])
            functions.append(function)
            feeds = feeds or [builder.append(placeholder("value", variable.dtype))]
            nodes += [
                builder.append(call_node(f"{holding.label}/replica{replica}/load", function, feeds, device=device)).node
                for replica, device in enumerate(holding.devices)
            ]
    merge_library(graph, functions)
    return graph, feeds[0].node if feeds else "", nodes
