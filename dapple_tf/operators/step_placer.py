"""Places the operators of steps: the passes from a complete step to one in which every node has a device."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.garbage import without_collection
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpPlacement, Topology
from dapple_tf.progress import Progress
from graph_passes.analysis.operator_shapes import operator_shapes
from graph_passes.analysis.split_rules import Split, split_rules
from graph_passes.ir.graph import (
    CALL_ATTR,
    MICRO_BATCH_ATTR,
    PHASE_ATTR,
    STAGE_ATTR,
    Graph,
    GraphDef,
    NodeDef,
    Ref,
    control_inputs,
    data_inputs,
)
from graph_passes.ir.outline import placeholder
from graph_passes.ir.program import Program
from graph_passes.ir.tensorflow_bridge import Shape, output_dtypes
from graph_passes.pass_manager import Instrument, Pass, Pipeline, run_passes
from graph_passes.passes.flatten import Flatten
from graph_passes.passes.fold_shapes import FoldShapes
from graph_passes.passes.place_operators import PlaceOperators
from graph_passes.passes.share_values import ShareValues
from graph_passes.passes.split_operators import SplitOperators

logger = logging.getLogger(__name__)

_VARIABLE = "VarHandleOp"
_LATER_EFFORT = 0.2
"""Share of the usual search for steps after the first: evaluation, a last smaller batch."""


_ALONE = Pipeline()
"""An empty pipeline: passes have no numbers, and no user's passes beside them."""


def _run(
    program: Program, item: Pass, pipeline: Pipeline, instruments: Sequence[Instrument], *, complete: bool = False
) -> Program:
    """Runs a pass, with the user's passes around it."""
    passes = pipeline.placed([item])
    first = pipeline.number(passes[0])
    return run_passes(program, passes, first=first, instruments=instruments, complete=complete)


class FlatStep(NamedTuple):
    """The operators of a step.

    Attributes:
        program: the step, all of it at the top level.
        shapes: of all tensors.
    """

    program: Program
    shapes: Mapping[Ref, Shape | None]


@without_collection
def flat_step(
    program: Program,
    shapes: Sequence[Sequence[int | None]],
    instruments: Sequence[Instrument] = (),
    *,
    pipeline: Pipeline = _ALONE,
    keep_tasks: bool = False,
) -> FlatStep:
    """Returns the operators of a complete step, and all shapes.

    Args:
        program: a complete step.
        shapes: of its batch inputs, with the number of samples.
        instruments: observers of the passes.
        pipeline: the order of passes, the user's included.
        keep_tasks: whether tasks stay in the order of a schedule.

    Raises:
        PassError: a call can't be inlined.
    """
    flat = _run(program, Flatten(keep_tasks=keep_tasks), pipeline, instruments)
    fed = {ref.node: tuple(shape) for ref, shape in zip(flat.own_step.feeds.values(), shapes, strict=True)}
    variables = program.variables
    for name, placeholders in flat.own_step.metric_feeds.items():
        fed |= {ref.node: variables[name].shape for ref in placeholders}
    folding = FoldShapes(operator_shapes(flat.graph, fed))
    folded = _run(flat, folding, pipeline, instruments)
    known = operator_shapes(folded.graph, fed)  # more than before: the shapes of sums over given axes, say
    sharing = ShareValues(known, within_calls=keep_tasks)
    shared = _run(folded, sharing, pipeline, instruments)
    return FlatStep(shared, known)


@dataclasses.dataclass(frozen=True)
class PlacedStep:
    """A step whose operators have been placed.

    Attributes:
        program: the step.
        placements: stage -> the placement of its operators, those of its first micro-batch.
        storage_devices: (stage, name of a variable's storage) -> the name of its device.
        flat: the step's operators before any was split or placed.
    """

    program: Program
    placements: Mapping[int, OpPlacement]
    storage_devices: Mapping[tuple[int, str], str]
    flat: FlatStep


@dataclasses.dataclass(frozen=True)
class StepPlacer:
    """Places the operators of a plan's steps by FD-DPS.

    Attributes:
        plan: a plan with ``operator_devices``.
        cluster: the cluster, real or a description.
        costs: operators' times on its devices.
        pipeline: the order of passes, the user's included.
    """

    plan: Plan
    cluster: Cluster
    costs: OperatorCosts
    pipeline: Pipeline = _ALONE

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices among which each stage's operators are placed.

        Raises:
            PlanError: the plan runs stages as a whole.
        """
        if self.plan.operator_devices is None:
            raise PlanError("the plan runs stages as a whole; give one by Plan.by_operators or with_placed_operators")
        return self.plan.operator_devices

    def place(
        self,
        program: Program,
        shapes: Sequence[Sequence[int | None]],
        storage_devices: Mapping[tuple[int, str], str],
        instruments: Sequence[Instrument] = (),
        known: Mapping[int, OpPlacement] | None = None,
    ) -> PlacedStep:
        """Flattens a complete step, and splits and places its operators.

        Args:
            program: a complete step.
            shapes: of its batch inputs, with the number of samples.
            storage_devices: (stage, name of a variable's storage) -> its device; they stay there.
            instruments: observers of the passes.
            known: placements found before for the same step, to be reused; None searches.

        Raises:
            PassError: an operator can't be inlined or placed.
            PlanError: no placement fits the devices' memory.
        """
        calls = _Calls(program)
        alone = len(self.devices) == 1 and len(program.own_step.layout.micro_batch_intervals) == 1
        flat = flat_step(program, shapes, instruments, pipeline=self.pipeline, keep_tasks=not alone)
        placements: dict[int, OpPlacement] = {}
        splits: dict[str, Split] = {}
        for stage, devices in enumerate(self.devices):
            placements[stage] = self._search(flat, stage, devices, storage_devices) if known is None else known[stage]
            splits |= calls.repeated(placements[stage].splits, flat.program.graph)
        told = {name for placement in placements.values() for name in placement.splits}
        splitting = SplitOperators(splits, flat.shapes, optional=frozenset(splits.keys() - told))
        split = _run(flat.program, splitting, self.pipeline, instruments)
        placing = PlaceOperators(*self._spread(split.graph, placements, calls, alone))
        placed = _run(split, placing, self.pipeline, instruments, complete=True)
        return PlacedStep(placed, placements, {**storage_devices, **self._storage_devices(placed.graph)}, flat)

    def _search(
        self,
        flat: FlatStep,
        stage: int,
        devices: Sequence[int],
        storage_devices: Mapping[tuple[int, str], str],
    ) -> OpPlacement:
        """Searches the placement of one stage's operators, those of its first micro-batch."""
        topology = Topology.of(self.cluster, devices)
        own, outside = _stage_graph(flat.program.graph, topology.names[0])
        shapes = {**flat.shapes, **{Ref(name): flat.shapes.get(ref) for name, ref in outside.items()}}
        pinned = {name: topology.names.index(device) for (of, name), device in storage_devices.items() if of == stage}
        speeds = [self.cluster.devices[device].speed for device in devices]
        operators = build_op_graph(own, topology, self.costs, shapes, speeds=speeds, pinned=pinned, rules=split_rules)
        with Progress(f"placing {operators.count:,} operators on {topology.count} devices", 100) as bar:
            placement = fd_dps(operators, topology, effort=_LATER_EFFORT if pinned else 1.0, progress=bar.at)
        logger.info(
            "stage %d: %d operators on %d devices, %d split, %.3g s simulated",
            stage,
            operators.count,
            topology.count,
            len(placement.splits),
            placement.seconds,
        )
        ops = {name: op for name, op in zip(operators.names, operators.ops, strict=True) if name in placement.splits}
        return dataclasses.replace(placement, device_names=topology.names, ops=ops)

    def _spread(
        self, graph: GraphDef, placements: Mapping[int, OpPlacement], calls: _Calls, alone: bool
    ) -> tuple[dict[str, str], list[str]]:
        """Returns every operator's device, and the order of all, by the first micro-batch's placements."""
        names = self.cluster.device_names
        device_of: dict[str, str] = {}
        ranks: dict[str, tuple[int, int]] = {}
        for stage, devices in enumerate(self.devices):
            placement = placements[stage]
            position = {name: rank for rank, name in enumerate(placement.order)}
            for node in graph.node:
                first = calls.in_first(node)
                if node.device == names[devices[0]] and first in position:
                    device_of[node.name] = names[devices[placement.devices[first]]]
                    ranks[node.name] = (0 if alone else calls.rank(node), position[first])
        return device_of, sorted(device_of, key=ranks.__getitem__)

    def _storage_devices(self, graph: GraphDef) -> dict[tuple[int, str], str]:
        """Returns the device of each variable that the placed operators touch."""
        names = self.cluster.device_names
        stages = {names[device]: stage for stage, devices in enumerate(self.devices) for device in devices}
        return {
            (stages[node.device], node.attr["shared_name"].s.decode()): node.device
            for node in graph.node
            if node.op == _VARIABLE and node.device in stages
        }


class _Calls:
    """A step's calls before it is flattened, which identify equal operators of several micro-batches.

    Args:
        program: the step.
    """

    def __init__(self, program: Program) -> None:
        view = Graph(program.graph)
        self._ranks = {name: rank for rank, name in enumerate(view.topological())}
        self._first: dict[str, str] = {}
        groups: dict[tuple[object, ...], dict[int, list[str]]] = {}
        for node in program.graph.node:
            if "f" in node.attr and MICRO_BATCH_ATTR in node.attr:
                key = (node.device, *(node.attr[name].SerializeToString() for name in (PHASE_ATTR, STAGE_ATTR)))
                groups.setdefault(key, {}).setdefault(int(node.attr[MICRO_BATCH_ATTR].i), []).append(node.name)
        for numbered in groups.values():
            least = min(numbered)
            for names in numbered.values():
                self._first |= zip(names, numbered[least], strict=False)

    def in_first(self, node: NodeDef) -> str:
        """Returns the name of the same operator of the stage's first micro-batch."""
        call = _call_of(node)
        return self._first.get(call, call) + node.name[len(call) :]

    def rank(self, node: NodeDef) -> int:
        """Returns the position of a node's call in an order that the step allows; cuts and joins use their tensor's."""
        name = _call_of(node)
        while name and name not in self._ranks:
            name = name.rpartition("/")[0]
        return self._ranks[name]

    def repeated(self, splits: Mapping[str, Split], graph: GraphDef) -> dict[str, Split]:
        """Repeats the splits of the first micro-batch for all of them."""
        return {node.name: splits[first] for node in graph.node if (first := self.in_first(node)) in splits}


def _call_of(node: NodeDef) -> str:
    """Returns the call that a node was in; the node itself if it was in none."""
    return node.attr[CALL_ATTR].s.decode() if CALL_ATTR in node.attr else node.name


def _stage_graph(graph: GraphDef, device: str) -> tuple[GraphDef, dict[str, Ref]]:
    """Returns a device's graph of the first micro-batch, and the outside tensor that each placeholder replaces."""
    view = Graph(graph)
    batches = [int(node.attr[MICRO_BATCH_ATTR].i) for node in graph.node if _is_task_of(node, device)]
    first = min(batches, default=0)
    inside = {
        node.name
        for node in graph.node
        if node.device == device and (MICRO_BATCH_ATTR not in node.attr or int(node.attr[MICRO_BATCH_ATTR].i) == first)
    }
    if len(inside) == len(graph.node):
        return graph, {}
    subgraph = GraphDef(versions=graph.versions, library=graph.library)
    outside: dict[str, Ref] = {}
    for node in graph.node:
        if node.name not in inside:
            continue
        own = subgraph.node.add()
        own.CopyFrom(node)
        del own.input[:]
        for ref in data_inputs(node):
            if ref.node in inside:
                own.input.append(str(ref))
                continue
            name = f"{ref.node}/outside{ref.output}"
            if name not in outside:
                outside[name] = ref
                subgraph.node.append(placeholder(name, output_dtypes(view.nodes[ref.node])[ref.output]))
            own.input.append(name)
        own.input.extend(f"^{waited}" for waited in control_inputs(node) if waited in inside)
    return subgraph, outside


def _is_task_of(node: NodeDef, device: str) -> bool:
    return node.device == device and MICRO_BATCH_ATTR in node.attr
