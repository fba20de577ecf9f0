"""Places the operators of steps: the passes from a complete step to one in which every node has a device."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.common.garbage import without_collection
from dapple_tf.common.progress import Progress
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fd_dps import Progress as Report
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import DisjointSets, OpGraph, OpPlacement, PlacementProblem, Topology, compile_problem
from dapple_tf.operators.simulated_placement import simulate
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.analysis.operator_shapes import operator_shapes
from graph_passes.analysis.split_rules import Split
from graph_passes.errors import PassError
from graph_passes.ir.collectives import SUM_OP
from graph_passes.ir.graph import (
    BRACKET_ATTR,
    CALL_ATTR,
    GROUP_ATTR,
    MICRO_BATCH_ATTR,
    PHASE_ATTR,
    REPLICA_ATTR,
    STAGE_ATTR,
    Graph,
    GraphDef,
    NodeDef,
    Ref,
    control_inputs,
    copied,
    data_inputs,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import placeholder
from graph_passes.ir.program import Layout, Program, Step
from graph_passes.ir.tensorflow_bridge import Shape, output_dtypes
from graph_passes.pass_manager import Instrument, Pass, Pipeline, run_passes
from graph_passes.passes.flatten import Flatten
from graph_passes.passes.fold_shapes import FoldShapes
from graph_passes.passes.place_operators import PlaceOperators
from graph_passes.passes.placed_reductions import common_order, join_reductions
from graph_passes.passes.share_values import ShareValues
from graph_passes.passes.split_operators import SplitOperators

logger = logging.getLogger(__name__)

_VARIABLE = "VarHandleOp"
_MARKS = (PHASE_ATTR, STAGE_ATTR, MICRO_BATCH_ATTR, GROUP_ATTR)
"""Attributes that nodes of different replicas have alike if they have the same purpose."""
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
    stages: frozenset[int] | None = None,
) -> FlatStep:
    """Returns the operators of a complete step, and all shapes.

    Args:
        program: a complete step.
        shapes: of its batch inputs, with the number of samples.
        instruments: observers of the passes.
        pipeline: the order of passes, the user's included.
        keep_tasks: whether tasks stay in the order of a schedule.
        stages: the stages whose calls are inlined; None for all calls.

    Raises:
        PassError: a call can't be inlined.
    """
    flat = _run(program, Flatten(stages, keep_tasks), pipeline, instruments)
    fed = {ref.node: tuple(shape) for ref, shape in zip(flat.own_step.feeds.values(), shapes, strict=True)}
    variables = program.variables
    for name, placeholders in flat.own_step.metric_feeds.items():
        fed |= {ref.node: variables[name].shape for ref in placeholders}
    folding = FoldShapes(fed)
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
        placements: stage -> the placement of its operators, those of a replica's first micro-batch.
        storage_devices: (stage, name of a variable's storage) -> the names of its devices, one in each replica's group.
        flat: the step's operators before any was split or placed.
    """

    program: Program
    placements: Mapping[int, OpPlacement]
    storage_devices: Mapping[tuple[int, str], tuple[str, ...]]
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
    def devices(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The groups of devices among which the operators of each stage's replicas are placed."""
        assert self.plan.places_operators
        return self.plan.groups

    def place(
        self,
        program: Program,
        shapes: Sequence[Sequence[int | None]],
        storage_devices: Mapping[tuple[int, str], tuple[str, ...]],
        instruments: Sequence[Instrument] = (),
        known: Mapping[int, OpPlacement] | None = None,
    ) -> PlacedStep:
        """Flattens a complete step, and splits and places its operators.

        Args:
            program: a complete step.
            shapes: of its batch inputs, with the number of samples.
            storage_devices: (stage, name of a variable's storage) -> its devices; they stay there.
            instruments: observers of the passes.
            known: placements found before for the same step, to be reused; None searches.

        Raises:
            PassError: an operator can't be inlined or placed.
            PlanError: no placement fits the devices' memory.
        """
        step = program.own_step
        program = program.replace(graph=_with_replicas(program.graph, step.layout))
        placed_of = self._placed_replicas(step.layout)
        calls = _Calls(program, placed_of)
        alone = not step.entry or (len(self.devices) == 1 and len(step.layout.micro_batch_intervals) == 1)
        of_one_slice = alone and (not step.entry or len(self.devices[0]) == 1)
        stages = self.plan.flat_stages if len(self.plan.flat_stages) < self.plan.num_stages else None
        flat = flat_step(program, shapes, instruments, pipeline=self.pipeline, keep_tasks=not alone, stages=stages)
        placements: dict[int, OpPlacement] = {}
        splits: dict[str, Split] = {}
        for stage in sorted(self.plan.flat_stages):
            name = placed_of[self.cluster.device_names[self.devices[stage][0][0]]]
            placements[stage] = (
                self._search(flat, stage, name, storage_devices, of_one_slice) if known is None else known[stage]
            )
            splits |= calls.repeated(placements[stage].splits, flat.program.graph)
        told = {name for placement in placements.values() for name in placement.splits}
        splitting = SplitOperators(splits, flat.shapes, optional=frozenset(splits.keys() - told))
        split = _run(flat.program, splitting, self.pipeline, instruments)
        places, _ = self._spread(split.graph, placements, calls, alone)
        graph = join_reductions(split.graph, places, calls.packs, self.plan.bucket_bytes)
        placed_on = split.own_step.placed_on.union(places.values())
        joined = split.replace(graph=graph, step=dataclasses.replace(split.own_step, placed_on=placed_on))
        spread = self._spread(graph, placements, calls, alone)
        placing = PlaceOperators(*spread)
        placed = _run(joined, placing, self.pipeline, instruments, complete=True)
        return PlacedStep(placed, placements, {**storage_devices, **self._storage_devices(placed.graph)}, flat)

    def place_flush(
        self,
        graph: GraphDef,
        node: str,
        program: Program,
        storage_devices: Mapping[tuple[int, str], tuple[str, ...]],
        instruments: Sequence[Instrument] = (),
    ) -> GraphDef:
        """Places the operators of updates that are made without a step.

        Args:
            graph: the updates, see `graph_passes.passes.update.flush`.
            node: its node that has run when they are made.
            program: the step that has left them.
            storage_devices: as in `place`.
            instruments: observers of the passes.

        Raises:
            PassError: an operator can't be inlined or placed.
            PlanError: no placement fits the devices' memory.
        """
        # There are no tasks, and no batch is fed on the host.
        stages, host = frozenset(range(len(self.devices))), frozenset({self.cluster.host_device})
        step = Step(program.own_step.layout, train=node, dissolved=stages, placed_on=host)
        return self.place(program.replace(graph=graph, step=step), (), storage_devices, instruments).program.graph

    def _placed_replicas(self, layout: Layout) -> dict[str, str]:
        """Maps each replica's own device to that of the replica of its stage whose operators are placed for all.

        It is one with the most samples.
        """
        placed_of: dict[str, str] = {}
        for stage, devices in enumerate(layout.devices):
            sizes = [interval.size for interval in layout.slices(stage, 0)]
            placed_of |= dict.fromkeys(devices, devices[sizes.index(max(sizes))])
        return placed_of

    def _search(
        self,
        flat: FlatStep,
        stage: int,
        own_device: str,
        storage_devices: Mapping[tuple[int, str], tuple[str, ...]],
        of_one_slice: bool,
    ) -> OpPlacement:
        """Searches the placement of a stage's operators: those on ``own_device``, of its first micro-batch.

        ``of_one_slice`` says that nothing divides the step into tasks.
        """
        groups = self.devices[stage]
        topology = Topology.of_groups(self.cluster, groups)
        own, shapes = own_operators(flat, own_device)
        if not own.node:
            return OpPlacement({}, (), {}, 0.0, (0.0,) * topology.count, topology.names)
        pinned = {name: topology.names.index(kept[0]) for (of, name), kept in storage_devices.items() if of == stage}
        speeds = [min(self.cluster.devices[device].speed for device in alike) for alike in zip(*groups, strict=True)]
        operators = build_op_graph(own, topology, self.costs, shapes, speeds=speeds, pinned=pinned)
        with Progress(f"placing {operators.count:,} operators on {topology.count} devices", 100) as bar:
            effort = _LATER_EFFORT if pinned else 1.0
            if of_one_slice:
                placement = fd_dps(operators, topology, effort=effort, progress=bar.at)
            else:
                kinds = {node.name: NodeKind.of(node) for node in own.node}
                placement = place_average_slice(operators, topology, kinds, effort=effort, progress=bar.at)
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
        """Returns every operator's device, and the order of all, by the placements of stages' first micro-batches."""
        names = self.cluster.device_names
        groups = {names[group[0]]: (stage, group) for stage in placements for group in self.devices[stage]}
        positions = {
            stage: {name: rank for rank, name in enumerate(placement.order)} for stage, placement in placements.items()
        }
        device_of: dict[str, str] = {}
        ranks: dict[str, tuple[int, int]] = {}
        for node in graph.node:
            if node.device not in groups:
                continue
            (stage, group), first = groups[node.device], calls.in_first(node)
            if first in positions[stage]:
                device_of[node.name] = names[group[placements[stage].devices[first]]]
                ranks[node.name] = (0 if alone else calls.rank(node), positions[stage][first])
        order = itertools.chain(*common_order(Graph(graph), ranks))
        return device_of, [name for name in order if name in device_of]

    def _storage_devices(self, graph: GraphDef) -> dict[tuple[int, str], tuple[str, ...]]:
        """Returns the devices of each variable that the placed operators touch, one in each replica's group.

        Raises:
            PassError: replicas have it in different places.
        """
        names = self.cluster.device_names
        place_of = {
            names[device]: (stage, place)
            for stage in self.plan.flat_stages
            for group in self.devices[stage]
            for place, device in enumerate(group)
        }
        places: dict[tuple[int, str], int] = {}
        for node in graph.node:
            if node.op == _VARIABLE and node.device in place_of:
                stage, place = place_of[node.device]
                name = node.attr["shared_name"].s.decode()
                if places.setdefault((stage, name), place) != place:
                    raise PassError(
                        f"variable {name!r} of stage {stage} is in place {place} of one replica's devices and in place "
                        f"{places[stage, name]} of another's; replicas must have the same operators"
                    )
        return {
            (stage, name): tuple(names[group[place]] for group in self.devices[stage])
            for (stage, name), place in places.items()
        }


class _Calls:
    """A step's calls before it is flattened, which identify equal operators of several micro-batches and replicas.

    Attributes:
        packs: member of an all-reduce -> the call that packs its vector.

    Args:
        program: the step.
        placed_of: a replica's device -> that of the replica whose operators are placed for all of the stage.
    """

    def __init__(self, program: Program, placed_of: Mapping[str, str]) -> None:
        view = Graph(program.graph)
        positions = {name: rank for rank, name in enumerate(view.topological())}
        self._ranks = {name: rank for rank, names in enumerate(common_order(view, positions)) for name in names}
        self._counterpart = _counterparts(program.graph, placed_of)
        self.packs = {node.name: view.inputs(node.name)[0].node for node in view if node.op == SUM_OP}
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
        """Returns the name of the same operator in the first micro-batch of the replica that is placed."""
        call = _call_of(node)
        counterpart = self._counterpart.get(call, call)
        return self._first.get(counterpart, counterpart) + node.name[len(call) :]

    def rank(self, node: NodeDef) -> int:
        """Returns the position of a node's call in an order that the step allows; cuts and joins use their tensor's."""
        name = _call_of(node)
        while name and name not in self._ranks:
            name = name.rpartition("/")[0]
        return self._ranks[name]

    def repeated(self, splits: Mapping[str, Split], graph: GraphDef) -> dict[str, Split]:
        """Repeats the splits of the first micro-batch for all of them."""
        return {node.name: splits[first] for node in graph.node if (first := self.in_first(node)) in splits}


def _with_replicas(graph: GraphDef, layout: Layout) -> GraphDef:
    """Returns a step's graph whose nodes tell their replica, as their devices won't once they are placed."""
    if max(map(len, layout.devices)) == 1:
        return graph
    graph = copied(graph)
    replica_of = {
        (stage, device): replica
        for stage, devices in enumerate(layout.devices)
        for replica, device in enumerate(devices)
    }
    for node in graph.node:
        if STAGE_ATTR in node.attr and REPLICA_ATTR not in node.attr:
            replica = replica_of.get((int(node.attr[STAGE_ATTR].i), node.device))
            if replica is not None:
                node.attr[REPLICA_ATTR].i = replica
    return graph


def _counterparts(graph: GraphDef, placed_of: Mapping[str, str]) -> dict[str, str]:
    """Maps calls and other marked nodes of a step to nodes of placed replicas.

    Nodes with the same marks are alike in the order of the graph, if there are as many on both devices.
    """
    marked: dict[str, dict[tuple[object, ...], list[str]]] = {}
    for node in graph.node:
        if node.device in placed_of and PHASE_ATTR in node.attr:
            marks = (node.attr[name].SerializeToString() for name in _MARKS if name in node.attr)
            marked.setdefault(node.device, {}).setdefault((node.op, *marks), []).append(node.name)
    alike: dict[str, str] = {}
    for device, nodes in marked.items():
        others = marked.get(placed_of[device], {}) if placed_of[device] != device else {}
        for key, names in nodes.items():
            if len(others.get(key, ())) == len(names):
                alike |= zip(names, others[key], strict=True)
    return alike


def _call_of(node: NodeDef) -> str:
    """Returns the call that a node was in; the node itself if it was in none."""
    return node.attr[CALL_ATTR].s.decode() if CALL_ATTR in node.attr else node.name


def _put_in_turn(graph: GraphDef) -> None:
    """Lets a backward's first operators wait for a forward's last ones; changes the graph.

    Constants, of which every device has its own, begin and end nothing: the first operators of a loss's backward read
    nothing else of it.
    """
    kinds = {node.name: NodeKind.of(node) for node in graph.node if node.op != "Const"}
    inputs = {node.name: {Ref.parse(text.removeprefix("^")).node for text in node.input} for node in graph.node}
    forward = [name for name, kind in kinds.items() if kind is NodeKind.FORWARD]
    read = {source for name in forward for source in inputs[name]}
    last = [name for name in forward if name not in read]
    for node in graph.node:
        sources, kind = inputs[node.name], kinds.get(node.name)
        if kind is NodeKind.BACKWARD and all(kinds.get(one) is not NodeKind.BACKWARD for one in sources):
            node.input.extend(f"^{name}" for name in last if name not in sources)


def own_operators(flat: FlatStep, device: str) -> tuple[GraphDef, dict[Ref, Shape | None]]:
    """Returns a device's operators of its first micro-batch or none, and all shapes."""
    own, outside = _stage_graph(flat.program.graph, device)
    return searched(own), {**flat.shapes, **{Ref(name): flat.shapes.get(ref) for name, ref in outside.items()}}


def searched(graph: GraphDef) -> GraphDef:
    """Returns the operators that are searched for: without entries and exits of tasks, the backward after the forward.

    Entries and exits would tie all variables and all ends of a task together, so that a search would keep them in one
    place; a step of one slice has none. In a step the backward begins when the forward has ended: otherwise its first
    operators, which need nothing of the forward, would seem to fill what a bad placement of the forward leaves idle.
    """
    brackets = {node.name for node in graph.node if BRACKET_ATTR in node.attr}
    if not brackets:
        return graph
    bare = GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.node:
        if node.name not in brackets:
            own = bare.node.add()
            own.CopyFrom(node)
            del own.input[:]
            own.input.extend(text for text in node.input if text.removeprefix("^") not in brackets)
    _put_in_turn(bare)
    return bare


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


# ---- an average micro-batch: forwards and backwards run for each, the rest once in a step

MICRO_BATCHES = 4
"""The number of micro-batches by which what runs once in a step is divided, whatever a plan has."""

_ONCE = frozenset(
    {
        NodeKind.READ,
        NodeKind.PACK,
        NodeKind.ALL_REDUCE,
        NodeKind.REDUCE_SCATTER,
        NodeKind.ALL_GATHER,
        NodeKind.STATISTICS,
        NodeKind.TOTALS,
        NodeKind.APPLY,
        NodeKind.CARRIED_APPLY,
        NodeKind.COUNTERS,
    }
)

_RANKS: Mapping[NodeKind | None, int] = {
    NodeKind.FORWARD: 1,
    NodeKind.METRICS: 2,
    NodeKind.BACKWARD: 3,
    NodeKind.STATISTICS: 4,
    NodeKind.APPLY: 4,
}
"""Tasks in the order in which they run, metrics between the forward and the backward, which waits for them; what
connects tasks, such as the reading of variables, comes before."""

Kinds = Mapping[str, NodeKind | None]
"""Name of an operator -> its purpose."""


def kind_of(name: str, kinds: Kinds) -> NodeKind | None:
    """Returns an operator's purpose; parts, cuts and joins are named after the operator that was split."""
    while name and name not in kinds:
        name = name.rpartition("/")[0]
    return kinds.get(name)


def task_ranks(problem: PlacementProblem, kinds: Kinds) -> list[int]:
    """Returns the position of each operator's task in a step: no less than that of what the operator waits for."""
    ranks: list[int] = []
    for op, name in enumerate(problem.graph.names):
        before = [problem.producer[tensor] for tensor in problem.inputs[op]] + problem.waits[op]
        ranks.append(max([_RANKS.get(kind_of(name, kinds), 0), *(ranks[other] for other in before)]))
    return ranks


def place_average_slice(
    graph: OpGraph,
    topology: Topology,
    kinds: Kinds,
    *,
    effort: float = 1.0,
    progress: Report | None = None,
) -> OpPlacement:
    """Places a stage's operators by FD-DPS so that an average micro-batch is short.

    Seconds of what runs once in a step, and of sending its results, count by `MICRO_BATCHES`: variables are read, cut
    and sent to their users once for all micro-batches, and updated once. FD-DPS' own problem is a step of one slice.

    In that problem, other than in a step, tasks overlap: what a bad placement of the forward leaves idle is filled with
    updates, and sending variables hides behind both. So FD-DPS searches again with variables that stay where they are,
    as parallel branches have it, and the placement is taken whose tasks take less one after the other.

    Args:
        graph: the operators of one micro-batch, and those that run once.
        topology: the devices.
        kinds: the purposes of its operators.
        effort: share of the usual search.
        progress: receives the current activity, and the share of the search that is over.

    Returns:
        The placement, with the seconds and peaks of a step of one slice.

    Raises:
        PlanError: no placement found fits the devices' memory.
    """
    once = np.array([kind_of(name, kinds) in _ONCE for name in graph.names], bool)
    share = np.where(once, 1 / MICRO_BATCHES, 1.0)
    of_tensors = np.ones(len(graph.tensor_bytes))
    data_edges = graph.edges[graph.edges[:, 2] >= 0]
    of_tensors[data_edges[:, 2]] = share[data_edges[:, 0]]
    average = dataclasses.replace(
        graph, seconds=graph.seconds * share[:, None], tensor_bytes=graph.tensor_bytes * of_tensors
    )
    staying = _with_readers(average, kinds)
    searches = 1 if staying is None else 2
    placements = [fd_dps(average, topology, effort=effort, progress=_part_of(progress, 0, searches))]
    if staying is not None:
        try:
            placements.append(fd_dps(staying, topology, effort=effort, progress=_part_of(progress, 1, searches)))
        except PlanError as error:  # Variables that are read together may need more room together than there is.
            logger.info("with readers of variables on the variables' devices: %s", error)
    for placement in sorted(placements, key=lambda one: _seconds_in_turn(average, one, topology, kinds)):
        step = simulate(*_numbered(graph, placement, topology))
        if (step.peak_bytes <= topology.memory_bytes).all():
            return dataclasses.replace(placement, seconds=step.seconds, peak_bytes=tuple(step.peak_bytes.tolist()))
    # An average has less of what is made once in a step.
    logger.info("no placement for an average micro-batch fits; placing one of a whole step instead")
    return fd_dps(graph, topology, effort=effort, progress=progress)


def _part_of(progress: Report | None, number: int, count: int) -> Report | None:
    """Returns what tells the progress of one of several searches as that of all of them."""
    return None if progress is None else lambda text, share: progress(text, (number + share) / count)


def _with_readers(graph: OpGraph, kinds: Kinds) -> OpGraph | None:
    """Returns a graph to be placed whole, with readers of variables on their devices; None if that is one group."""
    sets = DisjointSets(len(graph.pinned))
    pinned = graph.pinned.tolist()
    for first, second, tensor, *_ in graph.edges.tolist():
        if tensor >= 0 and kind_of(graph.names[first], kinds) is NodeKind.READ:
            one, other = (sets.find(int(graph.groups[op])) for op in (first, second))
            device = max(pinned[one], pinned[other])
            if min(pinned[one], pinned[other]) not in (-1, device):
                continue  # They are on different devices already.
            sets.union(one, other)
            pinned[one] = device
    roots = [sets.find(group) for group in range(len(pinned))]
    numbers = {root: number for number, root in enumerate(dict.fromkeys(roots))}
    if len(numbers) < 2:
        return None
    stored = np.zeros(len(numbers))
    np.add.at(stored, [numbers[root] for root in roots], graph.stored_bytes)
    return dataclasses.replace(
        graph,
        groups=np.array([numbers[roots[group]] for group in graph.groups.tolist()], np.int64),
        pinned=np.array([pinned[root] for root in numbers], np.int64),
        stored_bytes=stored,
        splits={},
    )


def _numbered(
    graph: OpGraph, placement: OpPlacement, topology: Topology
) -> tuple[PlacementProblem, list[int], list[int]]:
    """Returns a placement's problem, the device of each operator, and the queue."""
    problem = compile_problem(apply_splits(graph, placement.splits), topology)
    numbers = {name: number for number, name in enumerate(problem.graph.names)}
    devices = [placement.devices[name] for name in problem.graph.names]
    return problem, devices, [numbers[name] for name in placement.order]


def _seconds_in_turn(graph: OpGraph, placement: OpPlacement, topology: Topology, kinds: Kinds) -> float:
    """Returns the seconds of a slice in which each task waits on all devices for the one before it."""
    problem, devices, order = _numbered(graph, placement, topology)
    ranks = task_ranks(problem, kinds)
    queue = sorted(order, key=lambda op: ranks[op])
    waits = list(problem.waits)
    last: dict[int, int] = {}  # device -> its last operator of the tasks so far
    # Reading variables, which has no task, goes with the forward.
    for _, task in itertools.groupby(queue, lambda op: max(1, ranks[op])):
        own: dict[int, list[int]] = {}
        for op in task:
            own.setdefault(devices[op], []).append(op)
        for device, ops in own.items():
            waits[ops[0]] = [*waits[ops[0]], *(before for other, before in last.items() if other != device)]
        last |= {device: ops[-1] for device, ops in own.items()}
    return simulate(dataclasses.replace(problem, waits=waits), devices, queue).seconds
