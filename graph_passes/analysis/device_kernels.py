"""Operators of a step without kernels on GPUs, and copies between memories.

A node of the top level runs on the device that it names, or the session refuses the whole graph. A node of a function
runs on the device of the call; without a kernel there TensorFlow puts it on its process's first CPU, and copies what it
reads and gives. Where it makes a variable, all GPUs of the process that call it share a single one.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator

from tensorflow.core.framework import types_pb2

from graph_passes.ir.call_order import CallOrder
from graph_passes.ir.collectives import HINT_ATTR, NCCL, SUM_OP
from graph_passes.ir.graph import (
    COMPILED_ATTR,
    PHASE_ATTR,
    Graph,
    GraphDef,
    NodeDef,
    data_inputs,
    dtype_attr,
    dtype_name,
    function_names,
    make_node,
    text_attr,
)
from graph_passes.ir.kernels import CPU, GPU, ON_HOST, PASSED, inputs_on_host, kernel_of, outputs_on_host
from graph_passes.ir.tensorflow_bridge import (
    FunctionDefLibrary,
    function_graph,
    makes_resource,
    output_dtypes,
)

REFUSED = "refused"
"""A node of the top level without a kernel on its GPU: no step runs."""
SHARED = "shared"
"""A variable without a kernel: one for several GPUs of a process in place of one on each."""
ON_CPU = "on the CPU"
"""A node of a function without a kernel: it runs on the CPU, between copies."""
UNPLACED = "unplaced"
"""A node of the top level that names no device, and goes to the first GPU that TensorFlow knows."""
TO_HOST = "GPU to host"
"""A copy that waits until all kernels that were queued before have run."""
TO_DEVICE = "host to GPU"
UNORDERED = "unordered"
"""Two collective operations by NCCL of a device of which neither waits for the other."""

VARIABLE = "VarHandleOp"
_KINDS = (REFUSED, SHARED, UNORDERED, UNPLACED, ON_CPU, TO_HOST, TO_DEVICE)
_RESULT = "_Retval"
_REST = "rest"
"""The part of a step that no mark names."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that differs on GPUs from what the graph says.

    Attributes:
        kind: one of the above.
        part: the part of the step, as nodes name it.
        what: the operator and its dtype; for copies and collectives both ends.
    """

    kind: str
    part: str
    what: str

    @property
    def order(self) -> tuple[int, str]:
        """Sorts findings by how much harm they do, and by part."""
        return _KINDS.index(self.kind), self.part


@dataclasses.dataclass(frozen=True)
class GpuReport:
    """What a step does on GPUs that its graph doesn't show. Functions count once, however often they are called.

    Attributes:
        counts: finding -> number of nodes, or of tensors that are copied.
        first: finding -> the first such node.
    """

    counts: collections.Counter[Finding] = dataclasses.field(default_factory=collections.Counter)
    first: dict[Finding, NodeDef] = dataclasses.field(default_factory=dict)

    def add(self, kind: str, part: str, what: str, node: NodeDef) -> None:
        """Counts a finding."""
        finding = Finding(kind, part, what)
        self.counts[finding] += 1
        self.first.setdefault(finding, node)

    def of(self, *kinds: str) -> dict[str, int]:
        """Returns what was found of some kinds -> number."""
        sums: dict[str, int] = {}
        for finding, count in self.counts.items():
            if finding.kind in kinds:
                sums[finding.what] = sums.get(finding.what, 0) + count
        return sums


def on_gpu(device: str) -> bool:
    """Returns whether a device's name is a GPU's."""
    return "device:GPU:" in device


def gpu_report(graph: GraphDef) -> GpuReport:
    """Returns what a step's graph does on GPUs.

    Args:
        graph: its top level, with all functions.
    """
    return _Walk(graph).report


class _Walk:
    def __init__(self, graph: GraphDef) -> None:
        self.report = GpuReport()
        self._functions = {function.signature.name: function for function in graph.library.function}
        self._visited: set[tuple[str, str]] = set()
        self._handles: dict[str, list[NodeDef]] = {}
        self._visit(graph, None, _REST)
        for part, handle in self._shared(graph):
            self.report.add(SHARED, part, label(handle), handle)
        for device, before, after in _unordered(graph):
            self.report.add(UNORDERED, device, " | ".join(sorted((before.name, after.name))), after)

    def _visit(self, graph: GraphDef, caller: str | None, part: str) -> None:
        """Walks through the top level, or a function that is called on a kind of device."""
        view = Graph(graph)
        devices = {node.name: node.device or self._beside(view, node) for node in graph.node}
        kinds, parts = {}, {}
        for node in graph.node:
            own = parts[node.name] = _part(node, part)
            kind = caller or GPU
            if devices[node.name]:
                kind = GPU if on_gpu(devices[node.name]) else CPU
            elif caller is None and node.op != "NoOp" and (node.input or view.consumers(node.name)):
                self.report.add(UNPLACED, own, label(node), node)
            if kind == GPU and node.op not in PASSED and kernel_of(node, GPU) is None:
                self.report.add(REFUSED if caller is None else ON_CPU, own, label(node), node)
                kind = CPU
            kinds[node.name] = kind
            if not (COMPILED_ATTR in node.attr and node.attr[COMPILED_ATTR].b):
                for name in function_names(node):
                    self._call(name, kind, own)
        for node in graph.node:
            self._count_copies(view, node, kinds, devices, parts[node.name])

    def _beside(self, view: Graph, node: NodeDef) -> str:
        """Returns where TensorFlow puts a node that names no device: beside its readers if it reads nothing itself."""
        near = {view.nodes[reader].device for reader in view.consumers(node.name)}
        return near.pop() if len(near) == 1 and not node.input else ""

    def _call(self, name: str, kind: str, part: str) -> None:
        if name in self._functions and (name, kind) not in self._visited:
            self._visited.add((name, kind))
            function = self._functions[name]
            body, results = function_graph(FunctionDefLibrary(function=[function]), name)
            for result, ref in zip(function.signature.output_arg, results, strict=True):
                kinds = {"T": dtype_attr(result.type)}
                body.node.append(make_node(f"{result.name}/result", _RESULT, [ref], attrs=kinds))
            self._visit(body, kind, part)

    def _shared(self, graph: GraphDef) -> Iterator[tuple[str, NodeDef]]:
        """Returns the variables without a kernel that functions on several GPUs of a process make, with their parts."""
        users: dict[tuple[str, str], dict[str, tuple[str, NodeDef]]] = collections.defaultdict(dict)
        for node in graph.node:
            for name in function_names(node) if on_gpu(node.device) else ():
                for handle in self._on_cpu(name):
                    key = node.device.rpartition("/")[0], handle.attr["shared_name"].s.decode()
                    users[key][node.device] = (_part(node), handle)
        return (next(iter(devices.values())) for devices in users.values() if len(devices) > 1)

    def _on_cpu(self, name: str) -> list[NodeDef]:
        """Returns handles of variables without a kernel made by a function or its callees."""
        if name not in self._handles:
            self._handles[name] = handles = []
            for node in self._functions[name].node_def if name in self._functions else ():
                handles += [node] * (node.op == VARIABLE and kernel_of(node, GPU) is None)
                handles += itertools.chain.from_iterable(map(self._on_cpu, function_names(node)))
        return self._handles[name]

    def _count_copies(
        self, view: Graph, node: NodeDef, kinds: dict[str, str], devices: dict[str, str], part: str
    ) -> None:
        read_there = inputs_on_host(node, kinds[node.name])
        for on_host, ref in zip(read_there, data_inputs(node), strict=True):
            maker = view.nodes[ref.node]
            if devices[maker.name] != devices[node.name] or GPU not in (kinds[maker.name], kinds[node.name]):
                continue  # It is sent, or stays.
            dtype = output_dtypes(maker)[ref.output]
            made_there = outputs_on_host(maker, kinds[maker.name])[ref.output]
            if made_there != on_host and dtype not in (*ON_HOST, types_pb2.DT_VARIANT):
                what = f"{maker.op} -> {node.op} ({dtype_name(dtype)})"
                of = maker if node.op == _RESULT else node
                self.report.add(TO_HOST if on_host else TO_DEVICE, part, what, of)


def _part(node: NodeDef, others: str = _REST) -> str:
    return text_attr(node, PHASE_ATTR, others)


def label(node: NodeDef) -> str:
    """Returns an operator with the dtypes of its results; a variable's handle with the dtype of its values."""
    dtypes = [node.attr["dtype"].type] if makes_resource(node.op) and "dtype" in node.attr else output_dtypes(node)
    return f"{node.op}({', '.join(dict.fromkeys(map(dtype_name, dtypes)))})"


def _by_nccl(node: NodeDef) -> bool:
    return node.op == SUM_OP and text_attr(node, HINT_ATTR) == NCCL


def _unordered(graph: GraphDef) -> Iterator[tuple[str, NodeDef, NodeDef]]:
    """Returns neighbours among the collective operations by NCCL of each GPU, and calls with some, without an order."""
    view = Graph(graph)
    summing = {f.signature.name for f in graph.library.function if any(map(_by_nccl, f.node_def))}
    nodes = [node for node in view if on_gpu(node.device)]
    order = CallOrder(view, {n.name for n in nodes if _by_nccl(n) or not summing.isdisjoint(function_names(n))})
    queues: dict[str, list[str]] = collections.defaultdict(list)
    for name in order.calls:
        queues[view.nodes[name].device].append(name)
    for device, queue in queues.items():
        for first, second in itertools.pairwise(queue):
            if not order.is_before(first, second):
                yield device, view.nodes[first], view.nodes[second]
