"""Makes the task graph of a step from its program: its nodes, and the paths between them."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dapple_tf.view.step_tensors import StepTensors
from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode, longest_paths
from graph_passes.ir.graph import (
    GROUP_ATTR,
    MICRO_BATCH_ATTR,
    POSITION_ATTR,
    REPLICA_ATTR,
    STAGE_ATTR,
    Graph,
    NodeDef,
    Ref,
    control_inputs,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Layout, Program, Step


class _Anchor(NamedTuple):
    """A node of the drawing in the making; see TaskNode."""

    nodes: list[str]
    label: str
    kind: str
    device: int | None
    stage: int | None
    micro_batch: int | None
    replica: int | None
    layers: tuple[str, ...]


_ON_HOST = frozenset({NodeKind.BATCH, NodeKind.SLICES, NodeKind.NORMALIZERS, NodeKind.TRAIN})
_OF_LAYERS = frozenset({"accumulate", "all_reduce", "apply", "read"})
_LABELS = {"accumulate": "GA", "all_reduce": "AllReduce", "apply": "Apply", "read": "read"}
_ENDS = {NodeKind.REDUCE_SCATTER: "ReduceScatter", NodeKind.ALL_GATHER: "AllGather", NodeKind.LOOKUP: "Lookup"}
"""Labels of the ends of a hierarchical all-reduce, inside servers, and of exchanges of shards and rows."""


def task_graph(program: Program, device_names: Sequence[str]) -> TaskGraph:
    """Returns the task graph of a step.

    A node of the drawing is a task, or belongs to one or to the update: the nodes of one all-reduce on one device
    are one. Nodes that merely connect these (constants, sums, means) are left out and counted for a neighbour. One
    node leads to another if a path in the step's graph does without meeting a third one.

    Args:
        program: a step after all passes, for training, evaluation or prediction.
        device_names: device names in the schedule's order of numbers.

    Raises:
        ValueError: the program isn't a complete step, or uses a device that isn't named.
    """
    if program.step is None or program.step.pending:
        state = "has no step yet" if program.step is None else f"waits for {len(program.step.pending)} tensors"
        raise ValueError(f"the program {state}: draw it after its last pass")
    return _Drawing(program, program.step, device_names).result()


def _belongs_to_input(node: NodeDef) -> bool:
    """Whether a node of an all-reduce is drawn as one with its inputs."""
    kind = NodeKind.of(node)
    return kind is NodeKind.ALL_REDUCE or (kind is NodeKind.REDUCE_SCATTER and node.op == "SplitV")


class _Drawing:
    """The task graph of a complete step, in the making; see `task_graph`."""

    def __init__(self, program: Program, step: Step, device_names: Sequence[str]) -> None:
        self.program, self.step = program, step
        self.graph = Graph(program.graph)
        self.order = self.graph.topological()
        self.numbers = {name: number for number, name in enumerate(device_names)}
        self.devices = _device_labels(step.layout, self.numbers)
        self.layers = stage_layers(program)
        self.tensors = StepTensors(program, self.graph)
        self.anchors: list[_Anchor] = []
        self.anchor_of: dict[str, int] = {}  # node -> position of its anchor
        self.data: dict[tuple[int, int], dict[Ref, None]] = {}  # (source, target) -> tensors
        self.control: dict[tuple[int, int], None] = {}

    def result(self) -> TaskGraph:
        """Returns the task graph."""
        self._place_tasks()
        self._place_others()
        self._connect()
        counts = self._counts()
        columns = longest_paths(len(self.anchors), [*self.data, *self.control])
        lanes = {device: lane for lane, device in enumerate([None, *self.devices])}
        order = sorted(range(len(self.anchors)), key=lambda index: (lanes[self.anchors[index].device], columns[index]))
        nodes = tuple(self._node(self.anchors[index], columns[index], counts[index]) for index in order)
        positions = {index: position for position, index in enumerate(order)}
        edges = [
            TaskEdge(positions[source], positions[target], control=False, **self._carried(refs))
            for (source, target), refs in self.data.items()
        ]
        edges += [TaskEdge(positions[source], positions[target], control=True) for source, target in self.control]
        return TaskGraph(nodes, tuple(sorted(edges, key=lambda e: (e.source, e.target, e.control))), self.devices)

    def _add(self, anchor: _Anchor) -> int:
        self.anchors.append(anchor)
        self.anchor_of |= dict.fromkeys(anchor.nodes, len(self.anchors) - 1)
        return len(self.anchors) - 1

    def _device(self, name: str) -> int | None:
        """Returns the number of a node's device; None for the host and others outside the plan."""
        number = self.numbers.get(self.graph.nodes[name].device)
        return number if number in self.devices else None

    # ---- nodes

    def _place_tasks(self) -> None:
        for task, name in self.step.entry.items():
            kind, layers = task.phase.value, self.layers[task.stage]
            where = (self._device(name), task.stage, task.micro_batch, task.replica)
            pieces = self.step.pieces.get(task, (name,))
            for number, call in enumerate(pieces, start=1):
                label = f"{task} {number}/{len(pieces)}" if len(pieces) > 1 else str(task)
                self._add(_Anchor([call], label, kind, *where, layers))

    def _place_others(self) -> None:
        fed = {ref.node: batch.node for batch, ref in self.step.feeds.items()}
        fed |= {ref.node: variable for variable, refs in self.step.metric_feeds.items() for ref in refs}
        for name in self.order:
            node = self.graph.nodes[name]
            kind = NodeKind.of(node)
            if name in self.anchor_of:
                continue
            if name in fed:
                self._add(_Anchor([name], fed[name], "other", None, None, None, None, ()))
            elif _belongs_to_input(node) and (packed := self.graph.inputs(name)[0].node) in self.anchor_of:
                self.anchors[self.anchor_of[packed]].nodes.append(name)
                self.anchor_of[name] = self.anchor_of[packed]
            elif kind is not None and kind.drawn:
                self._add(self._other(node, kind))

    def _other(self, node: NodeDef, purpose: NodeKind) -> _Anchor:
        kind = purpose.drawn
        group = tuple(node.attr[GROUP_ATTR].list.i) if GROUP_ATTR in node.attr else ()
        stage = node.attr[STAGE_ATTR].i if STAGE_ATTR in node.attr else None
        stages = group or (() if stage is None else (stage,))
        label = _ENDS.get(purpose) or _LABELS.get(kind, kind if kind != "other" else purpose.text.replace("_", " "))
        if kind in ("all_reduce", "apply", "read"):
            label += f" {'+'.join(map(str, stages))}"
        layers = [layer for own in stages for layer in self.layers[own]] if kind in _OF_LAYERS else []
        return _Anchor(
            [node.name],
            label,
            kind,
            None if purpose in _ON_HOST else self._device(node.name),
            stage,
            node.attr[MICRO_BATCH_ATTR].i if MICRO_BATCH_ATTR in node.attr else None,
            node.attr[REPLICA_ATTR].i if REPLICA_ATTR in node.attr else None,
            tuple(dict.fromkeys(layers)),
        )

    def _node(self, anchor: _Anchor, column: int, count: int) -> TaskNode:
        makers = anchor.nodes[1:] or anchor.nodes  # of an all-reduce the reduced tensors, not what is packed for it
        outputs = tuple(text for name in makers for text in self.tensors.outputs(name))
        kind, label = anchor.kind, anchor.label
        where = (anchor.device, anchor.stage, anchor.micro_batch, anchor.replica)
        return TaskNode(anchor.nodes[0], label, kind, *where, column, anchor.layers, outputs, count)

    # ---- edges

    def _connect(self) -> None:
        """Adds edges between anchors, through the nodes that connect them."""
        # For each node outside anchors the anchors before it: those from which only tensors come, and others.
        by_data: dict[str, dict[int, None]] = {}
        by_control: dict[str, dict[int, None]] = {}
        for name in self.order:
            data: dict[int, dict[Ref, None]] = {}
            control: dict[int, None] = {}
            for ref in self.graph.inputs(name):
                if ref.node in self.anchor_of:
                    data.setdefault(self.anchor_of[ref.node], {})[ref] = None
                else:
                    for source in by_data[ref.node]:
                        data.setdefault(source, {})[ref] = None
                    control |= by_control[ref.node]
            for waited in control_inputs(self.graph.nodes[name]):
                if waited in self.anchor_of:
                    control[self.anchor_of[waited]] = None
                else:
                    control |= by_data[waited] | by_control[waited]
            own = self.anchor_of.get(name)
            if own is None:
                by_data[name], by_control[name] = dict.fromkeys(data), control
                continue
            for source, refs in data.items():
                if source != own:
                    self.data.setdefault((source, own), {}).update(refs)
            self.control |= {(source, own): None for source in control if source != own}

    def _carried(self, refs: Iterable[Ref]) -> dict[str, Any]:
        """Returns the tensors of an edge."""
        texts = [self.tensors.text(ref) for ref in refs]
        sizes = [text.bytes for text in texts]
        known = [size for size in sizes if size is not None]
        return {
            "tensors": tuple(text.name for text in texts),
            "bytes": sum(known) if len(known) == len(sizes) else None,
        }

    def _counts(self) -> list[int]:
        """Returns the number of the step's nodes for each anchor; connecting nodes count for a reader, if any."""
        counts = [len(anchor.nodes) for anchor in self.anchors]
        readers: dict[str, int] = {}  # node -> an anchor behind it
        makers: dict[str, int] = {}  # node -> an anchor before it
        for name in self.order:
            before = [ref.node for ref in self.graph.inputs(name)] + control_inputs(self.graph.nodes[name])
            maker = next((makers[node] for node in before if node in makers), None)
            if (own := self.anchor_of.get(name, maker)) is not None:
                makers[name] = own
        for name in reversed(self.order):
            place = self.anchor_of.get(name, readers.get(name))
            if name not in self.anchor_of:
                place = makers.get(name) if place is None else place
                if place is None:  # No anchor is connected with it.
                    label = self.graph.nodes[name].op
                    self._add(_Anchor([name], label, "other", self._device(name), None, None, None, ()))
                    counts.append(1)
                    continue
                counts[place] += 1
            assert place is not None
            for ref in self.graph.inputs(name):
                readers[ref.node] = place
            for waited in control_inputs(self.graph.nodes[name]):
                readers.setdefault(waited, place)
        return counts


def _device_labels(layout: Layout, numbers: Mapping[str, int]) -> dict[int, str]:
    """Returns device -> its work: ``device 3: stages 1.r0, 2.r0``, in the order of stages.

    Raises:
        ValueError: a device isn't among the names.
    """
    by_device: dict[int, list[str]] = {}
    for stage, names in enumerate(layout.devices):
        for replica, name in enumerate(names):
            if name not in numbers:
                raise ValueError(f"stage {stage} is on {name}, which isn't among the {len(numbers)} devices")
            own = f"{stage}.r{replica}" if len(names) > 1 else f"{stage}"
            by_device.setdefault(numbers[name], []).append(own)
    return {
        device: f"device {device}: stage{'s' * (len(works) > 1)} {', '.join(works)}"
        for device, works in by_device.items()
    }


def stage_layers(program: Program) -> list[tuple[str, ...]]:
    """Returns the layers of each stage, the outermost complete ones: ``block_1``, ``shared#1`` for a second call."""
    placed = sorted(
        (int(node.attr[POSITION_ATTR].i), program.node_stage[node.name])
        for node in program.flat_graph.node
        if node.name in program.node_stage and POSITION_ATTR in node.attr
    )
    positions = [position for position, _ in placed]
    calls = Counter(call.path for call in program.roles.calls)
    layers: list[list[str]] = [[] for _ in program.stages]
    end = 0  # end of the last call that was taken
    for call, following in itertools.zip_longest(program.roles.calls, program.roles.calls[1:]):
        if call.start < end:
            continue
        low, high = bisect.bisect_left(positions, call.start), bisect.bisect_left(positions, call.stop)
        stages = {stage for _, stage in placed[low:high]}
        innermost = following is None or following.start >= call.stop
        if len(stages) == 1 or innermost:
            end = call.stop
            for stage in stages:
                layers[stage].append(call.path + (f"#{call.number}" if calls[call.path] > 1 else ""))
    return [tuple(names) for names in layers]
