"""The nodes of a step's graph, as far as a trace of the step needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from graph_passes.ir.collectives import SUM_OP
from graph_passes.ir.graph import (
    CALL_ATTR,
    MICRO_BATCH_ATTR,
    REDUCTION_ATTR,
    REPLICA_ATTR,
    STAGE_ATTR,
    NodeDef,
    Ref,
    control_inputs,
    data_inputs,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Program, Step
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import dtype_size

METRICS, ACCUMULATE, PACK = NodeKind.METRICS.traced, NodeKind.ACCUMULATE.traced, NodeKind.PACK.traced
ALL_REDUCE, APPLY = NodeKind.ALL_REDUCE.traced, NodeKind.APPLY.traced
HOST = NodeKind.SLICES.traced
"""Work of the host: cuts the batch, and computes what slices need of the whole."""
RELAY = NodeKind.RELAY.traced
"""What a stage hands on to others."""
TASKS = frozenset(phase.value for phase in Phase)
"""Kinds of the calls of tasks."""


class StepNode(NamedTuple):
    """A node of a step's top level.

    Attributes:
        kind: a phase's value for the call of a task; one of the names above; empty for nodes that connect these.
        device: name of its device; empty if TensorFlow chooses.
        stage: its stage; None if it belongs to no stage.
        replica: replica of the stage.
        task: its task; None if it comes once in a step.
        inputs: tensors that it reads.
        after: names of the nodes that it waits for without reading them.
        reduction: for a part of an all-reduce, a number shared by all of them on all devices.
        meeting: for a collective operation, a number shared by its members, none of which ends before all have begun.
        operator: whether it is a single operator of a task or update that was taken apart.
        relays: for a relay, the micro-batch of what it hands on.
    """

    kind: str
    device: str
    stage: int | None
    replica: int
    task: Task | None
    inputs: tuple[Ref, ...]
    after: tuple[str, ...]
    reduction: int | None = None
    meeting: int | None = None
    operator: bool = False
    relays: int | None = None

    @property
    def waits_for(self) -> Iterable[str]:
        """Names of the nodes that must have ended before it begins."""
        return *(ref.node for ref in self.inputs), *self.after


def step_nodes(program: Program) -> dict[str, StepNode]:
    """Returns name -> node for a complete step."""
    step = program.own_step
    tasks = {name: task for task, names in step.exit.items() for name in names}
    tasks |= {name: task for task, name in step.entry.items()}
    entries = {name: task.phase.value for task, name in step.entry.items()}
    entries |= {name: task.phase.value for task, pieces in step.pieces.items() for name in pieces}
    tasks |= {name: task for task, pieces in step.pieces.items() for name in pieces}
    constants = {node.name: node.attr["value"].tensor for node in program.graph.node if node.op == "Const"}
    nodes: dict[str, StepNode] = {}
    for node in program.graph.node:
        if node.op == "Const":
            continue
        purpose = NodeKind.of(node)
        operator = CALL_ATTR in node.attr and node.op != "NoOp"
        task = tasks.get(node.name)
        kind = "" if purpose is None or purpose.phase is not None else purpose.traced
        kind = entries.get(node.name, kind)
        if operator and purpose is not None and purpose.phase is not None:
            task = _task_of(node, purpose.phase)
            kind = task.phase.value
        stage, replica = None, 0
        if task is not None:
            stage, replica = task.stage, task.replica
        elif STAGE_ATTR in node.attr:
            stage = int(node.attr[STAGE_ATTR].i)
            told = node.attr.get(REPLICA_ATTR)
            replica = _replica(step, stage, node.device) if told is None else int(told.i)
        inputs = tuple(ref for ref in data_inputs(node) if ref.node not in constants)
        reduction = meeting = None
        if kind == ALL_REDUCE and node.op == SUM_OP:
            meeting = reduction = int(constants[data_inputs(node)[3].node].int_val[0])
        if REDUCTION_ATTR in node.attr:
            reduction = int(node.attr[REDUCTION_ATTR].i)
        after = tuple(control_inputs(node))
        relays = int(node.attr[MICRO_BATCH_ATTR].i) if purpose is NodeKind.RELAY else None
        nodes[node.name] = StepNode(
            kind, node.device, stage, replica, task, inputs, after, reduction, meeting, operator, relays
        )
    return nodes


def _task_of(node: NodeDef, phase: Phase) -> Task:
    """Returns the task of a single operator."""
    stage, micro_batch, replica = (int(node.attr[name].i) for name in (STAGE_ATTR, MICRO_BATCH_ATTR, REPLICA_ATTR))
    return Task(stage, phase, micro_batch, replica)


def _replica(step: Step, stage: int, device: str) -> int:
    devices = step.layout.devices[stage]
    return devices.index(device) if device in devices else 0


def replaced_bytes(program: Program, step: Step) -> dict[str, int]:
    """Returns node -> bytes from the step before that it frees, for nodes that set accumulators anew.

    These bytes were allocated before, so that the step's allocation records lack them.
    """
    freed = {}
    for stage in program.stages:
        phase, _ = stage.parameter_gradients
        sizes = [_bytes(variable.shape, variable.dtype) for _, variable, _ in stage.gradients]
        first: dict[int, Task] = {}
        for task in sorted(step.entry, key=lambda task: task.micro_batch) if sizes else ():
            if (task.stage, task.phase) == (stage.index, phase):
                first.setdefault(task.replica, task)
        for task in first.values():
            for node in set(step.exit[task]) - {step.entry[task]}:
                freed[node] = sum(sizes)
    return freed


def _bytes(shape: Iterable[int], dtype: int) -> int:
    size = dtype_size(dtype)
    for length in shape:
        size *= length
    return size


def sources(nodes: Mapping[str, StepNode]) -> dict[str, tuple[str, ...]]:
    """Returns node -> the nearest nodes of any kind from which its results are made: itself, or earlier ones."""
    nearest: dict[str, tuple[str, ...]] = {}
    stack = list(nodes)
    while stack:
        name = stack[-1]
        node = nodes.get(name)
        if name in nearest or node is None or node.kind:
            nearest.setdefault(name, (name,) if node is not None else ())
            stack.pop()
            continue
        missing = [ref.node for ref in node.inputs if ref.node not in nearest]
        if missing:
            stack += missing
            continue
        nearest[name] = tuple(dict.fromkeys(source for ref in node.inputs for source in nearest[ref.node]))
        stack.pop()
    return nearest
