"""Assigns every operator a device, and makes devices run theirs in the order of a queue."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from graph_passes.analysis.device_kernels import on_gpu
from graph_passes.errors import PassError
from graph_passes.ir.collectives import SUM_OP
from graph_passes.ir.graph import (
    CALL_ATTR,
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    control_inputs,
    data_inputs,
    drop_unread,
    make_node,
    set_inputs,
)
from graph_passes.ir.kernels import CPU, GPU, host_of, kernel_of, knows_gpus
from graph_passes.ir.program import Fact, Program, Step
from graph_passes.ir.resource_use import ResourceUse, resource_name
from graph_passes.ir.tensorflow_bridge import makes_resource
from graph_passes.passes.placed_reductions import common_order, regroup


@dataclasses.dataclass(frozen=True)
class PlaceOperators:
    """Writes devices, and an edge from each operator to the next one of its device.

        a@0 b@0 c@0   becomes   a@0 -> c@0, b@1

    A constant has a copy ``<constant>/on<k>`` on each further device that reads it, and is left out if nothing does.
    Placeholders stay where they are fed. An unnamed operator goes to the device of the variable that it touches, or
    else of its first input. What a GPU has no kernel for goes to its host, with all that touches the same variable.

    Devices don't wait for an all-reduce, only for the one before it and for what reads it. Its group are the devices of
    its members.

    Operators that only serve fetching gradients are placed but not ordered. If gradients can be fetched instead of
    training (``step.gradients``), nodes that such a fetch needs don't wait for earlier updates in the order: waiting
    would run these.

    Attributes:
        devices: S: name of an operator -> name of its device.
        order: Q: the same operators in a topological order.
        chained: whether each device runs its operators one after another as they come in ``order``; otherwise as soon
            as their inputs are there.

    Source: FD-DPS (Mathematics 2022), section 5, algorithm 3: "the placement strategy S and the execution queue Q".
    """

    name: ClassVar[str] = "place_operators"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    devices: Mapping[str, str]
    order: Sequence[str]
    chained: bool = True

    def run(self, program: Program) -> Program:
        """Flat step program -> the same with devices and control edges.

        Raises:
            PassError: an operator doesn't exist or is named only once or twice, the order isn't topological, or
                operators that touch the same variable are on different devices, or members of an all-reduce wait
                for each other.
        """
        return _Placement(self, program).result()


class _Placement:
    """The devices while they are being written."""

    def __init__(self, options: PlaceOperators, program: Program) -> None:
        self.options = options
        self.program = program
        self.step: Step = program.own_step
        self.view = Graph(program.graph)
        self.position = {name: number for number, name in enumerate(options.order)}
        self.device: dict[str, str] = {}
        self.names = Names(self.view.nodes)
        self.copies: dict[tuple[str, str], str] = {}  # constant, device -> the copy that is read there

    def result(self) -> Program:
        self._check_names()
        topological = self.view.topological()
        self._check_order(topological)
        self._place(topological)
        waits = self._chain() if self.options.chained else {}
        graph = self._written(waits)
        if any(node.op == SUM_OP for node in self.view):
            regroup(graph, self.view, common_order(self.view, self.position))
        placed_on = self.step.placed_on | {self.device[name] for name in self.options.devices}
        step = dataclasses.replace(self.step, placed_on=placed_on)
        graph = unfused(graph) if self.options.chained else graph
        fetched = {ref.node for ref in self._fetched}
        drop_unread(graph, {node.name for node in graph.node if node.op == "Const"} - fetched)
        left = {node.name for node in graph.node}
        step = dataclasses.replace(step, values={key: ref for key, ref in step.values.items() if ref.node in left})
        return self.program.replace(graph=graph, step=step)

    # ---- checks

    def _check_names(self) -> None:
        devices, position = self.options.devices, self.position
        for name in (*devices, *position):
            if name not in self.view:
                raise PassError(f"operator {name!r} is to be placed, but the step has no such node")
        for name in devices.keys() - position.keys():
            raise PassError(f"operator {name!r} has a device but no place in the order")
        for name in position.keys() - devices.keys():
            raise PassError(f"operator {name!r} has a place in the order but no device")
        if len(position) < len(self.options.order):
            twice = next(name for number, name in enumerate(self.options.order) if position[name] != number)
            raise PassError(f"operator {twice!r} is twice in the order")

    def _check_order(self, topological: Iterable[str]) -> None:
        """Checks that no operator comes before one that it needs, directly or through nodes without a place."""
        last: dict[str, str | None] = {}  # node -> the operator among those before it that comes last in the order
        for name in topological:
            latest: str | None = None
            for producer in self.view.sources(name):
                before = producer if producer in self.position else last[producer]
                if before is not None and (latest is None or self.position[before] > self.position[latest]):
                    latest = before
            last[name] = latest
            if name in self.position and latest is not None and self.position[latest] > self.position[name]:
                raise PassError(
                    f"the order isn't topological: {name!r} (number {self.position[name]}) needs {latest!r} "
                    f"(number {self.position[latest]})"
                )

    # ---- devices

    def _place(self, topological: Iterable[str]) -> None:
        together = self._variables()
        for name in topological:
            node = self.view.nodes[name]
            place = together.get(name, self.options.devices.get(name))
            if place is None and CALL_ATTR in node.attr and node.op not in ("Const", "NoOp"):
                producers = (ref.node for ref in self.view.inputs(name))
                beside = (each for each in producers if self.view.nodes[each].op not in ("Const", "Placeholder"))
                # Nodes of another device stay there.
                beside = (each for each in beside if self.view.nodes[each].device == node.device)
                place = next((self.device[each] for each in beside), None)
            self.device[name] = _able(node.device if place is None else place, [node])
        self._copy_constants()

    def _variables(self) -> dict[str, str]:
        """Maps the nodes that touch a variable of an operator with a device to that device."""
        functions = {function.signature.name: function for function in self.program.graph.library.function}
        members: dict[tuple[str, str], dict[str, None]] = {}
        for node in self.view:
            if node.op not in functions and makes_resource(node.op):
                members.setdefault((node.device, resource_name(node)), {})[node.name] = None
        for use in ResourceUse(functions).of_nodes(self.program.graph.node):
            members.setdefault((self.view.nodes[use.node].device, use.resource), {})[use.node] = None
        devices: dict[str, str] = {}
        named: dict[str, str] = {}  # node -> the operator whose device it has
        for (_, resource), names in members.items():
            placed = next((name for name in names if name in self.options.devices), None)
            if placed is None:
                continue
            device = self.options.devices[placed]
            for name in names:
                other = self.options.devices.get(name, self.options.devices.get(named.get(name, name), device))
                if other != device:
                    raise PassError(
                        f"operators of variable {resource!r} are on different devices: {placed!r} on {device}, "
                        f"{named.get(name, name)!r} on {other}; place them together"
                    )
                named.setdefault(name, placed)
            devices |= dict.fromkeys(names, _able(device, [self.view.nodes[name] for name in names]))
        return devices

    def _copy_constants(self) -> None:
        """Puts each constant on the first device that reads it, and notes the copies that others need."""
        number = {device: index for index, device in enumerate(sorted({self.device[name] for name in self.position}))}
        for name, node in self.view.nodes.items():
            if node.op != "Const":
                continue
            readers = list(dict.fromkeys(self.device[reader] for reader in self.view.consumers(name)))
            placed = [device for device in readers if device in number]
            if placed and node.device not in readers:
                self.device[name] = placed[0]
            for device in placed:
                if device != self.device[name]:
                    self.copies[name, device] = self.names.fresh(f"{name}/on{number[device]}")

    # ---- order

    @functools.cached_property
    def _fetched(self) -> set[Ref]:
        """The tensors that any run of the step may fetch."""
        return {*self.step.results, *self.step.gradients.values()}

    @functools.cached_property
    def _apart(self) -> set[str]:
        """The nodes that don't wait for earlier updates, as gradients may be fetched without them."""
        return self.view.ancestors(self._fetched) if self.step.gradients else set()

    def _chain(self) -> dict[str, list[str]]:
        """Returns each operator's predecessors in its device's queue."""
        step, apart = self.step, self._apart
        needed = self.view.ancestors([*step.results, *([Ref(step.train)] if step.train else [])])
        last: dict[tuple[str, bool], str] = {}
        waits: dict[str, list[str]] = {}
        for name in self.options.order:
            if name not in needed:
                continue
            if self.view.nodes[name].op == SUM_OP:
                continue
            device, own = self.device[name], name in apart
            before = [last.get((device, True)), None if own else last.get((device, False))]
            waits[name] = [each for each in before if each is not None]
            last[device, own] = name
        return waits

    def _written(self, waits: Mapping[str, Sequence[str]]) -> GraphDef:
        graph = GraphDef(versions=self.program.graph.versions, library=self.program.graph.library)
        devices: dict[str, list[str]] = {}  # constant -> where it has copies
        for name, device in self.copies:
            devices.setdefault(name, []).append(device)
        for name, original in self.view.nodes.items():
            graph.node.append(original)
            node = graph.node[-1]
            node.device = self.device[name]
            for index, text in enumerate(node.input):
                if text in devices and (copied := self.copies.get((text, node.device))) is not None:
                    node.input[index] = copied
            if name in waits:
                known = self.view.sources(name)
                node.input.extend(f"^{waited}" for waited in waits[name] if waited not in known)
            for device in devices.get(name, ()):
                graph.node.append(original)
                copy = graph.node[-1]
                copy.name, copy.device = self.copies[name, device], device
                del copy.input[:]  # its control edges, which a constant doesn't need
        return graph


def _able(device: str, nodes: Iterable[NodeDef]) -> str:
    """Returns a device, or its host if it is a GPU for which TensorFlow has no kernel of one of these nodes."""
    if on_gpu(device) and knows_gpus() and any(kernel_of(node, GPU) is None and kernel_of(node, CPU) for node in nodes):
        return host_of(device)
    return device


_READERS = frozenset({"BiasAdd", "BiasAddGrad"})
_PADDED = frozenset({"Conv2D", "DepthwiseConv2dNative"})


def unfused(graph: GraphDef) -> GraphDef:
    """Returns a graph in which fusible nodes read through an Identity, which also takes their control edges.

        Conv2D -> BiasAdd (^x)   becomes   Conv2D -> Identity (^x) -> BiasAdd

    TensorFlow's layout pass for oneDNN (mkl_layout_pass.cc) merges a convolution with its BiasAdd, a Pad with its
    convolution, and the gradients of a filter and of a bias. It takes two of them with the same control edges for
    mergeable, and then aborts the process because there are control edges. Merged, they wouldn't run in the order of
    the queue either.
    """
    view = Graph(graph)
    names = Names(view.nodes)
    rewritten = GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.node:
        rewritten.node.append(node)
        own = rewritten.node[-1]
        if node.op in _READERS or (node.op in _PADDED and view.nodes[view.inputs(node.name)[0].node].op == "Pad"):
            rewritten.node.append(_apart(own, names))
    return rewritten


def _apart(node: NodeDef, names: Names) -> NodeDef:
    """Inserts an Identity before a node, which is changed."""
    waits = control_inputs(node)
    first, *others = data_inputs(node)
    kind = {"T": node.attr["T"]}
    identity = make_node(
        names.fresh(f"{node.name}/unfused"), "Identity", [first], device=node.device, control=waits, attrs=kind
    )
    set_inputs(node, [Ref(identity.name), *others])
    return identity
