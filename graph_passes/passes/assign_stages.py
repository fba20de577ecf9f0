"""Finds the stage of each node of the flat graph, and the tensors that cross each cut.

A traced graph lists its nodes in the order in which the model made them, which is a topological order. A cut after a
layer is a position in that order, so that no tensor can flow backwards over it, whatever branches and skips the model
has.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import ClassVar

from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_traits import draws_anew, draws_numbers
from graph_passes.analysis.sample_dependence import sample_dependence, spreads_of
from graph_passes.analysis.slice_shapes import (
    Axis,
    Dependence,
    LengthsUnknownError,
    SliceShapes,
    input_shapes,
    part_before,
    with_known_shapes,
)
from graph_passes.errors import PassError
from graph_passes.ir.connections import check_rows
from graph_passes.ir.graph import COUNTABLE_DTYPES, POSITION_ATTR, STAGE_ATTR, Graph, NodeDef, Ref, copied, dtype_name
from graph_passes.ir.outline import dtype_of, layer_of
from graph_passes.ir.program import Boundary, Fact, LayerCall, Layout, Program, Roles, Stage, Variable, VariableKind
from graph_passes.ir.spreads import Spread
from graph_passes.ir.static_shapes import ShapesOf
from graph_passes.ir.tensorflow_bridge import output_dtypes

_NOT_DIFFERENTIABLE = frozenset({"StopGradient", "Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
_CARRIES_GRADIENTS = COUNTABLE_DTYPES | {types_pb2.DT_VARIANT}
_UNSENDABLE = frozenset({types_pb2.DT_VARIANT, types_pb2.DT_RESOURCE})


@dataclasses.dataclass(frozen=True)
class AssignStages:
    """Assigns nodes to stages.

        embed -> block_0 -> block_1 -> loss,  cuts ("block_0",)   becomes   0: embed, block_0   1: block_1, loss

    Within the model a node's stage follows from its position between the cuts. Losses are made after the model: such a
    node goes to the earliest stage that has its inputs, so that an auxiliary loss or a regularizer is computed where
    its tensors are. All of a metric goes to one stage, see `_metric_stages`. Integer and boolean tensors that depend on
    batch inputs and integer state alone (masks, positions, random seeds) and everything that depends on labels alone
    belong to no stage: each stage that reads them computes them from its own slice. Random integers for each sample
    are drawn once, since slices of other stages would draw others; so are all of operators that draw others each time.

    Attributes:
        cuts: names of the layers after which a stage ends, in order: a name, a path (``encoder/block_1``), or, for a
            layer that is called several times, a name and the number of the call (``shared#0``).
        within: names of layers, likewise, at which a later pass cuts within stages: they are looked up now, early.
        layout: how a full batch is cut. If stages have several slices, tensors at cuts need a batch axis, and are
            refused now, early, if they can't be cut so. None asks for the axis alone.

    Source: DAPPLE (PPoPP'21), section 5.2.1: "we first construct the forward graph of each stage in sequence and record
    the boundary tensors".
    """

    name: ClassVar[str] = "assign_stages"
    requires: ClassVar[tuple[Fact, ...]] = ()
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.STAGES,)
    cuts: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    layout: Layout | None = None

    def run(self, program: Program) -> Program:
        """Flat program -> flat program with ``node_stage``, ``boundaries`` and ``stages``.

        Raises:
            PassError: unknown or ambiguous cut, a stage without layers, or a tensor at a cut that can't be sent, or
                can't be cut into slices.
        """
        calls = [find_call(name, program.roles.calls) for name in self.cuts]
        for name in self.within:
            find_call(name, program.roles.calls)
        positions = self._positions(calls, program.roles)
        roles = program.roles
        graph_def = copied(program.graph)
        graph = Graph(graph_def)
        shapes = SliceShapes.of(program) if self.cuts else None
        stage_of = _node_stages(graph, roles, positions, shapes)
        foreign = _shapes_read_later(graph, stage_of) | _shapes_of_normalizers(graph, roles)
        even: frozenset[str] = frozenset()
        if foreign:
            shapes = shapes or SliceShapes.of(program)
            given = Graph(program.graph)
            sources = [given.inputs(name)[0] for name in foreign]
            known = shapes.through_functions(program, sources)
            graph_def, even = with_known_shapes(program, known, foreign, stage_of)
            graph = Graph(graph_def)
            stage_of = _node_stages(graph, roles, positions, shapes, even)
        _check_normalizers(graph, roles)
        if self.layout is not None and (shapes is None or shapes.contradiction) and not roles.uncut:
            _check_slices(program, stage_of, self.layout)
        staged = program.replace(graph=graph_def)
        boundaries = _boundaries(
            staged, stage_of, even, shapes, self.cuts, sliced=self.layout is None or self.layout.sliced
        )
        reads = _reads(graph, roles, stage_of, len(self.cuts))
        stages = tuple(Stage(index, reads=reads[index]) for index in range(len(self.cuts) + 1))
        for node in graph_def.node:
            if node.name in stage_of:
                node.attr[STAGE_ATTR].i = stage_of[node.name]
        assigned = program.replace(graph=graph_def, node_stage=stage_of, boundaries=boundaries, stages=stages)
        if self.layout is not None and shapes is not None and shapes.lengths_known:
            check_rows(assigned, self.layout)
        return assigned

    def _positions(self, calls: Sequence[LayerCall], roles: Roles) -> list[int]:
        positions = [call.stop for call in calls]
        ends = [*positions, roles.model_end]
        start = 0
        for stage, stop in enumerate(ends):
            if not any(call.start >= start and call.stop <= stop and call.stop > call.start for call in roles.calls):
                before = f"after {self.cuts[stage - 1]!r}" if stage else "at the model's input"
                behind = f"after {self.cuts[stage]!r}" if stage < len(self.cuts) else "at the model's output"
                raise PassError(
                    f"cuts leave stage {stage} of {len(ends)} without a layer: it starts {before} and ends {behind}; "
                    f"name cuts in the order in which the model calls its layers, none behind its last layer, and give "
                    f"each stage a layer that computes something in inference, too (dropout doesn't)"
                )
            start = stop
        return positions


def find_call(name: str, calls: Sequence[LayerCall]) -> LayerCall:
    """Returns the call that a cut's name means.

    Raises:
        PassError: no such layer, several layers of that name, or a layer called several times without a call's number.
    """
    wanted, sharp, number = name.partition("#")
    matches = [call for call in calls if call.path == wanted or call.path.endswith("/" + wanted)]
    paths = sorted({call.path for call in matches})
    if not matches:
        known = sorted({call.path.rpartition("/")[2] for call in calls} | {call.path for call in calls})
        close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
        outer = dict.fromkeys(call.path for call in calls if "/" not in call.path)
        listed = ", ".join(map(repr, close or itertools.islice(outer, 8)))
        way = f"did you mean one of {listed}?" if close else f"its layers are {listed}{', ...' * (len(outer) > 8)}"
        raise PassError(f"cut {name!r} names no layer of the model; {way}")
    if len(paths) > 1:
        raise PassError(f"cut {name!r} could be any of the layers {', '.join(map(repr, paths))}; give the path")
    if sharp:
        exact = [call for call in matches if number.isdigit() and call.number == int(number)]
        if not exact:
            raise PassError(
                f"cut {name!r} asks for call {number!r} of layer {wanted!r}, which is called {len(matches)} times: "
                f"use a number from 0 to {len(matches) - 1}"
            )
        return exact[0]
    if len(matches) > 1:
        raise PassError(
            f"cut {name!r} is ambiguous: the layer is called {len(matches)} times; write '{wanted}#0' to cut after its "
            f"first call, up to '{wanted}#{len(matches) - 1}' for the last"
        )
    return matches[0]


def _shapes_read_later(graph: Graph, stage_of: Mapping[str, int]) -> set[str]:
    """Returns the ``Shape`` nodes from which, by integers only, a value is computed that a later stage reads."""
    latest: dict[str, int] = {}
    for name in reversed(list(graph.nodes)):
        for consumer in graph.consumers(name):
            stage = stage_of.get(consumer, -1)
            if not COUNTABLE_DTYPES.intersection(output_dtypes(graph.nodes[consumer])):
                stage = max(stage, latest.get(consumer, -1))
            latest[name] = max(latest.get(name, -1), stage)
    shapes = [node.name for node in graph if node.op == "Shape"]
    # Reading the shape of an earlier stage's tensor would send the whole tensor.
    sources = {name: stage_of.get(graph.inputs(name)[0].node, stage_of.get(name, 0)) for name in shapes}
    return {name for name in shapes if max(latest.get(name, -1), stage_of.get(name, 0)) > sources[name]}


def _shapes_of_normalizers(graph: Graph, roles: Roles) -> set[str]:
    """Returns the ``Shape`` nodes from which a divisor of the whole batch is computed."""
    body = graph.ancestors([normalizer.of_whole_batch for normalizer in roles.normalizers], control=False)
    return {name for name in body if graph.nodes[name].op == "Shape"}


def _check_normalizers(graph: Graph, roles: Roles) -> None:
    given = {ref.node for ref in (*roles.inputs, roles.slice.samples)}
    for normalizer in roles.normalizers:
        body = graph.ancestors([normalizer.of_whole_batch], control=False)
        foreign = [name for name in body if graph.nodes[name].op == "Placeholder" and name not in given]
        if foreign:
            raise PassError(
                f"loss {normalizer.loss!r} divides by the number of entries that a mask leaves, and the mask depends "
                f"on "
                f"{foreign[0]!r}, which isn't batch data: the divisor of the whole batch can't be known before its "
                f"first "
                f"backward pass; derive the mask from the inputs, or give it as sample_weight with reduction='sum'"
            )


def _node_stages(
    graph: Graph, roles: Roles, positions: Sequence[int], shapes: SliceShapes | None, even: Container[str] = ()
) -> dict[str, int]:
    """Returns each node's stage; nodes without one are computed wherever they are read.

    Args:
        graph: the flat graph.
        roles: what its tensors mean.
        positions: of the cuts.
        shapes: of its tensors; None where there are no cuts.
        even: nodes that are the same in all slices: their readers needn't be in their stage.
    """
    last = len(positions)
    variables = {v.value.node for v in roles.variables if v.value is not None and not v.is_counter}
    given = _given(roles)
    owner_of: dict[str, int] = {}
    stage_of: dict[str, int] = {}
    earliest: dict[str, int] = {}  # stage before which a node can't be computed
    position = -1
    in_model: set[str] = set()
    drawn = {roles.slice.number.node}  # random numbers, and the source of those that differ between slices
    for node in graph:
        if POSITION_ATTR in node.attr:  # Inserted nodes have none.
            position = int(node.attr[POSITION_ATTR].i)
        if position < roles.model_end:
            in_model.add(node.name)
        if node.name in given or node.op == "Const":
            continue
        producers = {ref.node for ref in graph.inputs(node.name)}
        staged = [stage_of[name] for name in producers if name in stage_of and name not in even]
        earliest[node.name] = max((earliest.get(name, 0) for name in producers), default=0)
        read = producers & variables
        free = not staged and not read
        if producers & drawn or draws_numbers(node):
            drawn.add(node.name)
        if position < roles.model_end:
            if free and not COUNTABLE_DTYPES.intersection(output_dtypes(node)):
                samples = node.name in drawn and shapes is not None and _may_be_cut(shapes, Ref(node.name))
                if not (samples or draws_anew(node)):
                    continue
            stage = bisect.bisect_right(positions, position)
            for name in read:
                owner_of.setdefault(name, stage)
        else:
            if free:
                continue
            stage = max([earliest[node.name], *staged, *(owner_of.get(name, last) for name in read)])
        stage_of[node.name] = earliest[node.name] = stage
    if shapes is None:
        return stage_of
    known = shapes
    return stage_of | _metric_stages(graph, roles, stage_of, in_model, last, lambda ref: _may_be_cut(known, ref))


def _given(roles: Roles) -> set[str]:
    """Returns the placeholders, which are in no stage of their own."""
    values = {variable.value.node for variable in roles.variables if variable.value is not None}
    given = {ref.node for ref in (*roles.inputs, *roles.scalars)}
    return values | given | {normalizer.placeholder.node for normalizer in roles.normalizers}


def _may_be_cut(shapes: SliceShapes, ref: Ref) -> bool:
    """Returns whether a tensor has an axis that may depend on the number of samples."""
    same = (Dependence.FIXED, Dependence.LENGTH)
    axes = shapes.axes(ref)
    return axes is None or any(axis.dependence not in same for axis in axes)


def _boundaries(
    program: Program,
    stage_of: Mapping[str, int],
    even: Container[str],
    shapes: SliceShapes | None,
    cuts: Sequence[str],
    *,
    sliced: bool,
) -> tuple[Boundary, ...]:
    graph, roles = Graph(program.graph), program.roles
    readers = _readers(graph, roles, stage_of, len(cuts))
    consumers: dict[Ref, set[int]] = {}
    for node in graph:
        for ref in graph.inputs(node.name):
            producer = stage_of.get(ref.node)
            stages = set() if producer is None else readers[node.name] - {producer}
            if stages:
                consumers.setdefault(ref, set()).update(stages)
    if not consumers:
        return ()
    assert shapes is not None
    differentiable = _differentiable(graph, roles)
    differs = _differs_between_slices(graph, roles)
    boundaries = []
    sendable = [ref for ref in consumers if dtype_of(graph, ref) not in _UNSENDABLE]
    shapes = shapes.through_functions(program, sendable)
    vague = shapes.vague(sendable)
    dependence = sample_dependence(program, ()) if vague else None
    spreads = {} if dependence is None else dependence.spreads
    shapes = shapes.measured(program, sendable)
    decided = [ref for ref, spread in spreads.items() if spread.decides and ref.node not in stage_of]
    integers = [ref.node for ref in decided if dtype_of(graph, ref) not in COUNTABLE_DTYPES]
    deciding = {stage for name in integers for stage in readers[name]}  # each of its own slice
    unknown: LengthsUnknownError | None = None
    for ref in sorted(consumers, key=lambda ref: (graph.position[ref.node], ref.output)):
        producer, dtype = stage_of[ref.node], dtype_of(graph, ref)
        where = f"tensor {ref} of layer {layer_of(graph, ref)!r}, which crosses the cut after {cuts[producer]!r},"
        if dtype in _UNSENDABLE:
            raise PassError(
                f"{where} is a {dtype_name(dtype)} (the inside of a loop, say) and can't be sent between devices; cut "
                f"before or after that layer"
            )
        try:
            axes = shapes.axes(ref)
            axis = _batch_axis(axes, where, shapes, sliced=sliced)
        except LengthsUnknownError as error:
            unknown = unknown or error
            continue
        assert axes is not None
        rows = None if axis is None or axes[axis].dependence is not Dependence.BATCH else axes[axis].size
        shape = tuple(each.size if each.dependence is Dependence.FIXED else None for each in axes)
        example = tuple(each.size if place == axis or not each.of_batch else None for place, each in enumerate(axes))
        reading, reaches = tuple(sorted(consumers[ref])), ref.node in differentiable
        own = axis is None and ref.node in differs and ref.node not in even and dtype not in COUNTABLE_DTYPES
        own = own or (ref in vague and _has_own_lengths(spreads, ref, axis))
        ragged = axis is None or ref not in spreads or spreads[ref].partial
        whole = own and (ragged or not deciding.isdisjoint(reading))
        boundaries.append(
            Boundary(ref, producer, reading, dtype, axis, rows, shape, reaches, example, own_lengths=own, whole=whole)
        )
    if unknown is not None:
        raise unknown
    several = [each.ref for each in boundaries if each.batch_axis is not None and each.rows_per_sample != 1]
    orders = spreads_of(program, several) if several else {}
    return tuple(
        dataclasses.replace(each, outer=_outer(each, orders.get(each.ref))) if each.ref in several else each
        for each in boundaries
    )


def _check_slices(program: Program, stage_of: Mapping[str, int], layout: Layout) -> None:
    """Checks that the first stages' layers can compute the slices that they get: not so for an adjacency matrix.

    Raises:
        PassError: they can't; it names the layer.
    """
    graph, number = Graph(program.graph), program.roles.slice.samples
    names = [node.name for node in program.graph.node[: program.roles.model_end]]  # Losses have errors of their own.

    def contradiction(stages: range, size: int) -> str:
        part = part_before(program.graph, [Ref(name) for name in names if stage_of.get(name) in stages])
        try:
            ShapesOf(part).under(input_shapes(graph, program.roles, size), {number: size})
        except PassError as error:
            return str(error)
        return ""

    for stage in range(len(layout.devices)):
        slices = layout.slices_with_samples(stage).values()
        for size in sorted({each.size for each in slices} - {layout.batch}):
            if (text := contradiction(range(stage + 1), size)) and not contradiction(range(stage), size):
                raise PassError(
                    f"{text}, for a slice of {size} of the batch's {layout.batch} samples, in stage {stage}: where a "
                    f"layer needs all samples at once, plan one slice for its stage (one micro-batch, one replica)"
                )


def _outer(boundary: Boundary, spread: Spread | None) -> int | None:
    """Returns the parts of a boundary's batch axis; None if they aren't known."""
    if spread is None or spread.outer is None or spread.axis != boundary.batch_axis:
        return None
    rows = boundary.rows_per_sample
    return None if rows is not None and spread.outer and rows % spread.outer else spread.outer or 1


def _batch_axis(axes: Sequence[Axis] | None, where: str, shapes: SliceShapes, *, sliced: bool) -> int | None:
    """Returns the axis that is cut into slices; None where there is none, or nothing is cut."""
    if axes is None:
        raise _refusal(shapes, f"{where} has no known rank; cut elsewhere")
    grows = [index for index, axis in enumerate(axes) if axis.of_batch]
    unknown = [index for index, axis in enumerate(axes) if axis.dependence is Dependence.UNKNOWN]
    if not sliced and (unknown or len(grows) > 1):
        return None
    if len(grows) > 1:
        raise PassError(
            f"{where} has shape {_shown(axes)} with the batch in axes {grows}: it couples samples; cut elsewhere"
        )
    if unknown and not grows and (shapes.samples is None or not shapes.lengths_known):
        raise _refusal(
            shapes, f"{where} has shape {_shown(axes)}: which axis is the batch can't be told; cut elsewhere"
        )
    return grows[0] if grows else None


def _has_own_lengths(spreads: Mapping[Ref, Spread], ref: Ref, axis: int | None) -> bool:
    """Returns whether samples decide lengths of a tensor, or may, so that each slice has its own."""
    spread = spreads.get(ref)
    if spread is None:
        return True
    return spread.lengths or spread.partial or (axis is None and spread.axis is not None)


def _refusal(shapes: SliceShapes, text: str) -> PassError:
    """Returns the error for a tensor of which too little is known, with the reason if known."""
    if not shapes.lengths_known:
        return LengthsUnknownError(text)
    return PassError(f"{text} ({shapes.contradiction})" if shapes.contradiction else text)


def _shown(axes: Sequence[Axis]) -> str:
    return "(" + ", ".join(str(axis.size) if axis.dependence is Dependence.FIXED else "?" for axis in axes) + ")"


def _differentiable(graph: Graph, roles: Roles) -> set[str]:
    """Nodes through which a gradient flows to some parameter."""
    parameters = {v.value.node for v in roles.variables if v.value is not None and v.kind is VariableKind.PARAMETER}

    def carries(node: NodeDef) -> bool:
        # A loop's tensor lists are variants, and carry gradients as floats do.
        return node.op not in _NOT_DIFFERENTIABLE and not _CARRIES_GRADIENTS.isdisjoint(output_dtypes(node))

    return graph.dependents(parameters, carries)


def _differs_between_slices(graph: Graph, roles: Roles) -> set[str]:
    """Nodes whose values follow from a slice's samples, size or number, or are drawn anew for each slice."""
    drawn = {node.name for node in graph if draws_anew(node)}
    return graph.dependents(drawn | {ref.node for ref in (*roles.inputs, *roles.scalars)})


def _readers(graph: Graph, roles: Roles, stage_of: Mapping[str, int], last: int) -> dict[str, set[int]]:
    """Returns the stages in which each node is computed: its own, or its readers'."""
    readers: dict[str, set[int]] = {name: set() for name in graph.nodes}
    results = [*roles.outputs, *(variable.update for variable in roles.variables), roles.loss]
    for ref in results:
        if ref is not None and ref.node not in stage_of:
            readers[ref.node].add(last)
    for name in reversed(list(graph.nodes)):
        if name in stage_of:
            readers[name] = {stage_of[name]}
            continue
        for consumer in graph.consumers(name):
            readers[name] |= readers[consumer]
    return readers


def _reads(graph: Graph, roles: Roles, stage_of: Mapping[str, int], last: int) -> list[tuple[str, ...]]:
    """Returns each stage's variables, also those read through nodes without a stage; metrics have no stage."""
    readers = _readers(graph, roles, stage_of, last)
    stored = [v for v in roles.variables if v.value is not None and v.kind is not VariableKind.METRIC]
    return [
        tuple(variable.name for variable in stored if variable.value and stage in readers[variable.value.node])
        for stage in range(last + 1)
    ]


# ---- metrics


def _metric_stages(
    graph: Graph,
    roles: Roles,
    stage_of: Mapping[str, int],
    in_model: Container[str],
    last: int,
    has_batch_axis: Callable[[Ref], bool],
) -> dict[str, int]:
    """Puts all nodes that only a metric needs into one stage: the earliest that has their inputs.

        stage 0: d -> sum(d)    stage 1: total + sum(d)    becomes    stage 0: d -> sum(d) -> total + sum(d)

    A metric adds up numbers of slices (sums, counts, a loss times its slice's weight). Stages have different slices,
    so none of these numbers may cross a cut. A metric that reads tensors of several stages goes to the last of these;
    tensors with a batch axis are sent there and cut again.

    Args:
        graph: the flat graph.
        roles: what its tensors mean. Variables of one metric stay together.
        stage_of: stages of nodes by their places in the model.
        in_model: nodes that layers have made.
        last: number of the last stage.
        has_batch_axis: whether a tensor can be cut into slices.

    Returns:
        The stages of nodes that only metrics need, where this rule decides them.
    """
    metrics = [v for v in roles.variables if v.kind is VariableKind.METRIC and v.update is not None]
    if not metrics or not last:
        return {}
    own = _own_nodes(graph, roles, metrics)
    owner_of = _owner_of(graph, roles, stage_of, last, lambda name: name in own and name not in in_model)
    groups = _groups(graph, metrics, own, stage_of, in_model, has_batch_axis)
    stages: dict[str, int] = {}
    for nodes in groups:
        sources = {ref.node for name in nodes for ref in graph.inputs(name)} - nodes
        begun = [stage_of[name] for name in sources if name in stage_of]
        begun += [owner_of[name] for name in sources if name in owner_of]
        begun += [stage_of[name] for name in nodes if name in in_model and name in stage_of]
        stages |= dict.fromkeys(nodes, max(begun, default=last))
    return stages


def _own_nodes(graph: Graph, roles: Roles, metrics: list[Variable]) -> set[str]:
    """Returns the nodes that only metrics need."""
    others = [variable.update for variable in roles.variables if variable.kind is not VariableKind.METRIC]
    results = [*roles.outputs, roles.loss, *others, *(normalizer.of_whole_batch for normalizer in roles.normalizers)]
    wanted = [variable.update for variable in metrics if variable.update is not None]
    needed = graph.ancestors([ref for ref in results if ref is not None], control=False)
    return graph.ancestors(wanted, control=False) - needed - _given(roles)


def _owner_of(
    graph: Graph, roles: Roles, stage_of: Mapping[str, int], last: int, late: Callable[[str], bool]
) -> dict[str, int]:
    """Returns the stages of weights and state that metrics may read: that of the first reader that isn't ``late``."""
    owner_of: dict[str, int] = {}
    for variable in roles.variables:
        if variable.value is not None and variable.kind is not VariableKind.METRIC and not variable.is_counter:
            readers = [name for name in graph.consumers(variable.value.node) if name in stage_of and not late(name)]
            owner_of[variable.value.node] = stage_of[readers[0]] if readers else last
    return owner_of


def _groups(
    graph: Graph,
    metrics: list[Variable],
    own: set[str],
    stage_of: Mapping[str, int],
    in_model: Container[str],
    has_batch_axis: Callable[[Ref], bool],
) -> list[set[str]]:
    """Returns sets of nodes that must be in one stage: of metrics that share nodes.

    Nodes that a layer has made for a metric stay in the layer's stage, until the batch axis is gone.
    """
    running = {v.value.node: v.metric or v.name for v in metrics if v.value is not None}
    after = graph.dependents(running, lambda node: node.name in own)  # what depends on a metric's value
    groups: dict[str, set[str]] = {}
    for variable in metrics:
        assert variable.update is not None
        nodes = groups.setdefault(variable.metric or variable.name, set())
        pending = [variable.update]
        while pending:
            ref = pending.pop()
            name = ref.node
            if name in running:
                nodes.add(name)
            if name in nodes or name not in own or (name not in stage_of and ref != variable.update):
                continue
            if name not in in_model or name in after or not has_batch_axis(ref):
                nodes.add(name)
                pending += graph.inputs(name)
    united: list[set[str]] = []
    for nodes in groups.values():
        apart = [other for other in united if not other & nodes]
        joined = [other for other in united if other & nodes]
        united = [*apart, nodes.union(*joined)]
    return [nodes - running.keys() for nodes in united]
