"""Residuals wait for their backward tasks in the host's memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from graph_passes.ir.graph import (
    Builder,
    Graph,
    GraphDef,
    Ref,
    copied,
    data_inputs,
    dtype_attr,
    dtype_name,
    dtypes_attr,
    make_node,
)
from graph_passes.ir.node_kinds import NodeKind, task_attrs
from graph_passes.ir.offloading import Trip, trip
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.program import Fact, Program, Stage, Value
from graph_passes.ir.storage import merge_library
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import empty_graph


@dataclasses.dataclass(frozen=True)
class Offload:
    """Copies what a forward leaves for its backward to the host's memory, and back before it is read.

        F0 -> B0   becomes   F0 -> offload (host) -> hold (host) -> fetch -> B0

    A copy to the host begins when its task is over, and the second task after it waits until the copy is there. The
    copy back begins when the second task before its reader is over and nothing but that keeps the next one from
    beginning (`graph_passes.ir.offloading`): the order of tasks is the order of prefetching, and a device never has
    more than three slices, however slow its link is. Residuals that are read soon stay where they are.

    A tensor is sent to another device as soon as it is there, whatever its reader waits for: what waits is a node on
    the host. Two CPUs of one process share tensors instead of sending them, so that calls copy them there.

    Attributes:
        hosts: device -> the device in whose memory its residuals wait.
    """

    name: ClassVar[str] = "offload"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ORDERED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.ORDERED,)
    hosts: Mapping[str, str]

    def run(self, program: Program) -> Program:
        """Step whose tasks are ordered -> the same, with copies of the residuals that stages offload."""
        step = program.own_step
        offloading = {stage.index: stage for stage in program.stages if stage.offloaded}
        if step.schedule is None or not offloading:
            return program
        graph = copied(program.graph)
        copies = _Copies(self.hosts, program, graph)
        for order in step.schedule.orders.values():
            for task in order:
                if task.phase is Phase.FORWARD and task.stage in offloading:
                    copies.send(offloading[task.stage], task, order)
        copies.bring_back()
        merge_library(graph, copies.functions.values())
        return program.replace(graph=graph, step=dataclasses.replace(step, hosts=step.hosts | copies.used))


class _Gone(NamedTuple):
    """Residuals that are sent together.

    Attributes:
        forward: the task that makes them.
        way: when they are sent and come back.
        tensors: the residuals.
        there: their copies on the host.
        dtypes: their dtypes.
    """

    forward: Task
    way: Trip
    tensors: Sequence[Ref]
    there: Sequence[Ref]
    dtypes: tuple[int, ...]


class _Copies:
    """The copies, while they are being added to a step's top level.

    Attributes:
        functions: dtypes -> the function that copies tensors of these.
        used: devices in whose memory something waits.
    """

    def __init__(self, hosts: Mapping[str, str], program: Program, graph: GraphDef) -> None:
        self.functions: dict[tuple[int, ...], FunctionDef] = {}
        self.used: frozenset[str] = frozenset()
        self._hosts, self._step = hosts, program.own_step
        self._builder = Builder(graph)
        self._nodes = {node.name: node for node in graph.node}
        self._gone: list[_Gone] = []
        self._leaving: dict[Task, list[str]] = {}  # task -> the copies to the host that it waits for

    def send(self, stage: Stage, forward: Task, order: Sequence[Task]) -> None:
        """Adds the copies to the host of a slice's residuals: those that the same tasks read go together.

        Args:
            stage: the stage.
            forward: its task that makes them.
            order: the tasks of its device, in order.
        """
        together: dict[tuple[Task, ...], list[Value]] = {}
        for value in stage.offloaded:
            if (forward, value) in self._step.values:  # else F and B are one function
                tensor = self._step.values[forward, value]
                readers = [task for task in self._backwards(stage, forward) if self._reading(task, {tensor})]
                together.setdefault((forward, *readers), []).append(value)
        for uses, values in together.items():
            way = trip(order, uses)
            if way is not None:
                tensors = [self._step.values[forward, value] for value in values]
                dtypes = tuple(stage.own_forward.result_dtype(value) for value in values)
                self._send(forward, way, tensors, dtypes)

    def _backwards(self, stage: Stage, forward: Task) -> list[Task]:
        phases = [phase for phase, function in stage.phases if phase is not Phase.FORWARD and function is not None]
        return [dataclasses.replace(forward, phase=phase) for phase in phases]

    def _calls(self, task: Task) -> list[str]:
        """Returns the nodes that run a task."""
        pieces = self._step.pieces.get(task)
        return [self._step.entry[task]] if pieces is None else [nodes[0] for nodes in pieces]

    def _reading(self, task: Task, tensors: set[Ref]) -> bool:
        """Returns whether a task reads any of these tensors."""
        return any(not tensors.isdisjoint(data_inputs(self._nodes[name])) for name in self._calls(task))

    def _send(self, forward: Task, way: Trip, tensors: Sequence[Ref], dtypes: tuple[int, ...]) -> None:
        device = self._step.layout.device_of(forward)
        host = self._hosts[device]
        self.used |= {host}
        after = () if way.after == forward else self._step.exit[way.after]
        call = _share_memory(device, host)
        there = self._copy(NodeKind.OFFLOAD, forward, tensors, dtypes, host, after, call=call)
        self._nodes[self._step.entry[way.before]].input.append(f"^{there[0].node}")
        self._leaving.setdefault(way.before, []).append(there[0].node)
        self._gone.append(_Gone(forward, way, tensors, there, dtypes))

    def bring_back(self) -> None:
        """Adds the copies back to the devices, and lets tasks read these."""
        for gone in self._gone:
            device = self._step.layout.device_of(gone.forward)
            host = self._hosts[device]
            for back in gone.way.returns:
                waits = (*self._step.exit[back.begins], *self._leaving.get(back.beside, ()))
                held = self._copy(NodeKind.HOLD, gone.forward, gone.there, gone.dtypes, host, waits, call=False)
                reader, call = back.readers[0], _share_memory(device, host)
                come = self._copy(NodeKind.FETCH, reader, held, gone.dtypes, device, (), call=call)
                moved = dict(zip(gone.tensors, come, strict=True))
                for name in itertools.chain(*map(self._calls, back.readers)):
                    node = self._nodes[name]
                    for index, text in enumerate(node.input):
                        if not text.startswith("^") and (ref := Ref.parse(text)) in moved:
                            node.input[index] = str(moved[ref])

    def _copy(
        self,
        kind: NodeKind,
        task: Task,
        tensors: Sequence[Ref],
        dtypes: tuple[int, ...],
        device: str,
        control: Sequence[str],
        *,
        call: bool,
    ) -> list[Ref]:
        """Adds a node that hands tensors on to another device, or copies them by a call; returns its results."""
        name = self._builder.names.fresh(f"stage{task.stage}/replica{task.replica}/{kind.text}_{task}")
        attrs = task_attrs(task, kind)
        if call:
            node = call_node(name, self._copying(dtypes), tensors, device=device, control=control, attrs=attrs)
        else:
            attrs["T"] = dtypes_attr(dtypes)
            node = make_node(name, "IdentityN", tensors, device=device, control=control, attrs=attrs)
        self._builder.append(node)
        return [Ref(name, index) for index in range(len(tensors))]

    def _copying(self, dtypes: tuple[int, ...]) -> FunctionDef:
        """Returns the function that copies tensors of these dtypes."""
        if dtypes not in self.functions:
            builder = Builder(empty_graph())
            arguments = [builder.append(placeholder(builder.names.fresh("x"), dtype)) for dtype in dtypes]
            copies = [
                builder.add("copy", "DeepCopy", [argument], T=dtype_attr(dtype))
                for argument, dtype in zip(arguments, dtypes, strict=True)
            ]
            runs = [(dtype_name(dtype), len(list(run))) for dtype, run in itertools.groupby(dtypes)]
            name = "_".join(["copy", *(f"{count}_{dtype}" for dtype, count in runs)])
            self.functions[dtypes] = outline(name, Graph(builder.graph), arguments, copies)
        return self.functions[dtypes]


def _share_memory(device: str, host: str) -> bool:
    """Returns whether both are CPUs, which read each other's tensors in place."""
    return "device:CPU" in device and "device:CPU" in host
