"""Pass 1: which stage each node of the flat graph belongs to, and which tensors cross each cut.

A traced graph lists its nodes in the order in which the model made them, which is a topological order. A cut after a
layer is a position in that order, so that no tensor can flow backwards over it, whatever branches and skips the model
has.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import enum
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import ClassVar

from tensorflow.core.framework import types_pb2

from graph_passes.graph import (
    FLOAT_DTYPES,
    LAYER_ATTR,
    STAGE_ATTR,
    Graph,
    GraphDef,
    Names,
    PassError,
    Ref,
    dtype_attr,
    dtype_name,
    make_const,
    make_node,
)
from graph_passes.operator_shapes import ShapeInference
from graph_passes.outline import dtype_of
from graph_passes.program import Boundary, LayerCall, Program, Roles, Stage, Variable, VariableKind
from graph_passes.tensorflow_bridge import Shape, infer_shapes, measure_shapes, output_dtypes

# Written by capture: a node's place in the order of creation.
POSITION_ATTR = "_dapple_position"
# Shapes are inferred under three assumptions (samples, lengths that the model leaves open): what differs between the
# first two grows with the batch, what differs between the first and the third with those lengths. The numbers of
# samples are primes, so that nothing else grows as they do.
_ASSUMED = ((7, 16), (11, 16), (7, 24))
_COUNTABLE = FLOAT_DTYPES | {types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128}
_NOT_DIFFERENTIABLE = frozenset({"StopGradient", "Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
_CARRIES_GRADIENTS = _COUNTABLE | {types_pb2.DT_VARIANT}
_UNSENDABLE = frozenset({types_pb2.DT_VARIANT, types_pb2.DT_RESOURCE})


@dataclasses.dataclass(frozen=True)
class AssignStages:
    """Assigns nodes to stages.

        embed -> block_0 -> block_1 -> loss,  cuts ("block_0",)   becomes   0: embed, block_0   1: block_1, loss

    Within the model a node's stage is told by its position between the cuts. Losses and metrics are made after the
    model:
    such a node goes to the earliest stage that has what it reads, so that an auxiliary loss or a regularizer is
    computed where its tensors are. Integer and boolean tensors that depend on batch inputs and integer state alone
    (masks,
    positions, random seeds) and everything that depends on labels alone belong to no stage: each stage that reads them
    computes them from its own slice.

    Attributes:
        cuts: names of the layers after which a stage ends, in order: a name, a path (``encoder/block_1``), or, for a
            layer that is called several times, a name and the number of the call (``shared#0``).

    Source: DAPPLE (PPoPP'21), section 5.2.1: "we first construct the forward graph of each stage in sequence and record
    the boundary tensors".
    """

    name: ClassVar[str] = "assign_stages"
    cuts: tuple[str, ...] = ()

    def run(self, program: Program) -> Program:
        """Flat program -> flat program with ``node_stage``, ``boundaries`` and ``stages``.

        Raises:
            PassError: unknown or ambiguous cut, a stage without layers, or a tensor at a cut that can't be sent.
        """
        calls = [find_call(name, program.roles.calls) for name in self.cuts]
        positions = self._positions(calls, program.roles)
        roles = program.roles
        graph_def = GraphDef()
        graph_def.CopyFrom(program.graph)
        graph = Graph(graph_def)
        stage_of = _node_stages(graph, roles, positions)
        shapes = _shapes(program) if self.cuts or roles.normalizers else []
        foreign = _shapes_read_later(graph, stage_of) | _shapes_of_normalizers(graph, roles)
        if foreign:
            given = Graph(program.graph)
            sources = [given.inputs(name)[0] for name in foreign]
            graph_def = _with_known_shapes(program, _inferred(program, shapes, sources), foreign)
            graph = Graph(graph_def)
            stage_of = _node_stages(graph, roles, positions)
        _check_normalizers(graph, roles)
        boundaries = _boundaries(program.replace(graph=graph_def), stage_of, shapes, self.cuts)
        reads = _reads(graph, roles, stage_of, len(self.cuts))
        stages = tuple(Stage(index, reads=reads[index]) for index in range(len(self.cuts) + 1))
        for node in graph_def.node:
            if node.name in stage_of:
                node.attr[STAGE_ATTR].i = stage_of[node.name]
        return program.replace(graph=graph_def, node_stage=stage_of, boundaries=boundaries, stages=stages)

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
    """The call that a cut's name means.

    Raises:
        PassError: no such layer, several layers of that name, or a layer called several times without a call's number.
    """
    wanted, sharp, number = name.partition("#")
    found = [call for call in calls if call.path == wanted or call.path.endswith("/" + wanted)]
    paths = sorted({call.path for call in found})
    if not found:
        known = sorted({call.path.rpartition("/")[2] for call in calls} | {call.path for call in calls})
        close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) or known[:8]
        raise PassError(f"cut {name!r} names no layer of the model; did you mean one of {', '.join(map(repr, close))}?")
    if len(paths) > 1:
        raise PassError(f"cut {name!r} could be any of the layers {', '.join(map(repr, paths))}; give the path")
    if sharp:
        exact = [call for call in found if number.isdigit() and call.number == int(number)]
        if not exact:
            raise PassError(
                f"cut {name!r} asks for call {number!r} of layer {wanted!r}, which is called {len(found)} times: "
                f"use a number from 0 to {len(found) - 1}"
            )
        return exact[0]
    if len(found) > 1:
        raise PassError(
            f"cut {name!r} is ambiguous: the layer is called {len(found)} times; write '{wanted}#0' to cut after its "
            f"first call, up to '{wanted}#{len(found) - 1}' for the last"
        )
    return found[0]


def _shapes(program: Program) -> list[dict[Ref, Shape | None]]:
    """Static shapes under each assumption."""
    samples = program.roles.slice.samples
    return [
        infer_shapes(
            program.graph, _input_shapes(Graph(program.graph), program.roles, *assumption), {samples: assumption[0]}
        )
        for assumption in _ASSUMED
    ]


def _input_shapes(graph: Graph, roles: Roles, batch: int, length: int) -> dict[str, list[int]]:
    shapes = {}
    for ref in roles.inputs:
        dims = graph.nodes[ref.node].attr["shape"].shape.dim
        shapes[ref.node] = [batch, *(length if dim.size < 0 else dim.size for dim in dims[1:])]
    return shapes


def _vague(shapes: Sequence[Mapping[Ref, Shape | None]], refs: Iterable[Ref]) -> list[Ref]:
    """Those of the tensors of which an axis isn't known to be fixed, a length or proportional to the batch."""
    return [
        ref
        for ref in refs
        if any(found.get(ref) is None for found in shapes)
        or any(_axis(sizes)[0] is _Axis.UNKNOWN for sizes in zip(*(found[ref] or () for found in shapes), strict=True))
    ]


def _inferred(
    program: Program, shapes: Sequence[Mapping[Ref, Shape | None]], refs: Iterable[Ref]
) -> list[dict[Ref, Shape | None]]:
    """Shapes, for ``refs`` also what can be told through loops, branches and lists: the batch behind an LSTM, say."""
    known = [dict(found) for found in shapes]
    vague = _vague(known, refs)
    if vague:
        graph, samples = Graph(program.graph), program.roles.slice.samples
        before = graph.ancestors(vague)
        part = GraphDef(versions=program.graph.versions, library=program.graph.library)
        part.node.extend(node for node in program.graph.node if node.name in before)
        inference = ShapeInference(part.library)
        for found, (batch, length) in zip(known, _ASSUMED, strict=True):
            inputs = _input_shapes(graph, program.roles, batch, length)
            more = inference.of(part, inputs, values={samples: batch}).shapes
            found |= {ref: more[ref] for ref in vague}
    return known


def _measured(
    program: Program, shapes: Sequence[Mapping[Ref, Shape | None]], refs: Iterable[Ref]
) -> list[dict[Ref, Shape | None]]:
    """Shapes, for ``refs`` also those that only running what makes them can tell: they depend on values.

    A run uses random inputs, so that a length which the data decide isn't proportional to the batch.
    """
    known = [dict(found) for found in shapes]
    vague = _vague(known, refs)
    graph, measured = Graph(program.graph), {}
    for found, (batch, length) in zip(known if vague else (), _ASSUMED, strict=False):
        inputs = _input_shapes(graph, program.roles, batch, length)
        same = str(inputs)  # Where the model leaves no length open, the third assumption is the first.
        if same not in measured:
            measured[same] = measure_shapes(program.graph, inputs, {program.roles.slice.samples: batch}, vague)
        found |= measured[same]
    return known


class _Axis(enum.Enum):
    """What the length of an axis depends on."""

    FIXED = enum.auto()
    LENGTH = enum.auto()  # the lengths that the model leaves open
    BATCH = enum.auto()  # proportional to the batch
    BOTH = enum.auto()  # proportional to the batch, by a factor that depends on those lengths
    UNKNOWN = enum.auto()  # the data themselves, or not proportional


def _axis(sizes: Sequence[int | None]) -> tuple[_Axis, int]:
    """What an axis depends on, told from its length under each assumption; with its length per sample for BATCH."""
    few, many, longer = sizes
    if few is None or many is None or longer is None:
        return _Axis.UNKNOWN, 0
    if 0 in sizes:
        return _Axis.UNKNOWN, 0
    if few == many:
        return (_Axis.FIXED if longer == few else _Axis.LENGTH), 0
    (batch, _), (larger, _), _ = _ASSUMED
    if few * larger != many * batch or few % batch or longer % batch:
        return _Axis.UNKNOWN, 0
    return (_Axis.BATCH if longer == few else _Axis.BOTH), few // batch


def _shapes_read_later(graph: Graph, stage_of: Mapping[str, int]) -> set[str]:
    """``Shape`` nodes of which something that a later stage reads is computed, with integers all the way."""
    latest: dict[str, int] = {}
    for name in reversed(list(graph.nodes)):
        for consumer in graph.consumers(name):
            stage = stage_of.get(consumer, -1)
            if not _COUNTABLE.intersection(output_dtypes(graph.nodes[consumer])):
                stage = max(stage, latest.get(consumer, -1))
            latest[name] = max(latest.get(name, -1), stage)
    shapes = [node.name for node in graph if node.op == "Shape"]
    # The shape of an earlier stage's tensor would take the whole tensor along.
    sources = {name: stage_of.get(graph.inputs(name)[0].node, stage_of.get(name, 0)) for name in shapes}
    return {name for name in shapes if max(latest.get(name, -1), stage_of.get(name, 0)) > sources[name]}


def _shapes_of_normalizers(graph: Graph, roles: Roles) -> set[str]:
    """``Shape`` nodes that a divisor of the whole batch is computed from."""
    body = graph.ancestors([normalizer.reciprocal for normalizer in roles.normalizers], control=False)
    return {name for name in body if graph.nodes[name].op == "Shape"}


def _check_normalizers(graph: Graph, roles: Roles) -> None:
    given = {ref.node for ref in (*roles.inputs, roles.slice.samples)}
    for normalizer in roles.normalizers:
        body = graph.ancestors([normalizer.reciprocal], control=False)
        foreign = [name for name in body if graph.nodes[name].op == "Placeholder" and name not in given]
        if foreign:
            raise PassError(
                f"loss {normalizer.loss!r} divides by the number of entries that a mask leaves, and the mask depends "
                f"on "
                f"{foreign[0]!r}, which isn't batch data: the divisor of the whole batch can't be known before its "
                f"first "
                f"backward pass; derive the mask from the inputs, or give it as sample_weight with reduction='sum'"
            )


def _with_known_shapes(
    program: Program, shapes: Sequence[Mapping[Ref, Shape | None]], wanted: Container[str]
) -> GraphDef:
    """A copy in which the ``wanted`` shapes are computed from the slice's number of samples wherever that is possible.

    A model may take the batch size from one tensor and use it far behind. Slices differ between stages, so that such a
    value must not cross a cut; as a function of the stage's own slice it needn't.
    """
    samples = program.roles.slice.samples
    rewritten = GraphDef()
    rewritten.versions.CopyFrom(program.graph.versions)
    rewritten.library.CopyFrom(program.graph.library)
    names = Names(node.name for node in program.graph.node)
    graph = Graph(program.graph)
    for node in program.graph.node:
        copy = rewritten.node.add()
        copy.CopyFrom(node)
        if node.name not in wanted or output_dtypes(node) != [types_pb2.DT_INT32]:
            continue
        source = graph.inputs(node.name)[0]
        known = [found[source] for found in shapes]
        if any(shape is None for shape in known):
            continue
        axes = [_axis(sizes) for sizes in zip(*(shape or () for shape in known), strict=True)]
        rates = [rate for _, rate in axes]
        if not any(rates) or any(kind not in (_Axis.FIXED, _Axis.BATCH) for kind, _ in axes):
            continue
        # dims = fixed + rate * samples, as a vector
        fixed = [0 if rate else (known[0] or ())[axis] or 0 for axis, rate in enumerate(rates)]
        rate_name, fixed_name, scaled = (names.fresh(f"{node.name}/{part}") for part in ("rate", "fixed", "scaled"))
        int32 = {"T": dtype_attr(types_pb2.DT_INT32)}
        copy.CopyFrom(make_const(rate_name, [rate or 0 for rate in rates], types_pb2.DT_INT32))
        rewritten.node.append(make_const(fixed_name, fixed, types_pb2.DT_INT32))
        rewritten.node.append(make_node(scaled, "Mul", [Ref(rate_name), samples], attrs=int32))
        rewritten.node.append(make_node(node.name, "AddV2", [Ref(scaled), Ref(fixed_name)], attrs=int32))
    return rewritten


def _node_stages(graph: Graph, roles: Roles, positions: Sequence[int]) -> dict[str, int]:
    """Stage of each node; those without are computed wherever they are read."""
    last = len(positions)
    roots = {ref.node for ref in (*roles.inputs, *roles.slice)} | {n.inverse.node for n in roles.normalizers}
    variables = {v.value.node for v in roles.variables if v.value is not None and not _is_counter(v)}
    given = roots | {v.value.node for v in roles.variables if v.value is not None}
    homes: dict[str, int] = {}
    stage_of: dict[str, int] = {}
    position = -1
    original = _original_positions(graph, roles)
    for node in graph:
        position = original.get(node.name, position)
        if node.name in given or node.op == "Const":
            continue
        producers = {ref.node for ref in graph.inputs(node.name)}
        staged = [stage_of[name] for name in producers if name in stage_of]
        read = producers & variables
        free = not staged and not read
        if position < roles.model_end:
            if free and not _COUNTABLE.intersection(output_dtypes(node)):
                continue
            stage = bisect.bisect_right(positions, position)
            for name in read:
                homes.setdefault(name, stage)
        else:
            if free:
                continue
            stage = max([*staged, *(homes.get(name, last) for name in read)])
        stage_of[node.name] = stage
    return stage_of


def _is_counter(variable: Variable) -> bool:
    """Whether a variable is integer state: a random seed or a counter, which every reader may step for itself."""
    return variable.kind is VariableKind.STATE and variable.dtype not in _COUNTABLE


def _original_positions(graph: Graph, roles: Roles) -> dict[str, int]:
    """Positions before nodes were inserted; capture writes them down as it knows the order of creation."""
    return {node.name: int(node.attr[POSITION_ATTR].i) for node in graph if POSITION_ATTR in node.attr}


def _boundaries(
    program: Program,
    stage_of: Mapping[str, int],
    shapes: Sequence[Mapping[Ref, Shape | None]],
    cuts: Sequence[str],
) -> tuple[Boundary, ...]:
    graph, roles = Graph(program.graph), program.roles
    consumers: dict[Ref, set[int]] = {}
    for node in graph:
        stage = stage_of.get(node.name)
        for ref in graph.inputs(node.name):
            producer = stage_of.get(ref.node)
            if stage is not None and producer is not None and producer != stage:
                consumers.setdefault(ref, set()).add(stage)
    if not consumers:
        return ()
    differentiable = _differentiable(graph, roles)
    sized = _depends_on_slice_size(graph, roles)
    found = []
    sendable = [ref for ref in consumers if dtype_of(graph, ref) not in _UNSENDABLE]
    shapes = _measured(program, _inferred(program, shapes, sendable), sendable)
    for ref in sorted(consumers, key=lambda ref: (graph.position[ref.node], ref.output)):
        producer, dtype = stage_of[ref.node], dtype_of(graph, ref)
        where = f"tensor {ref} of layer {layer_of(graph, ref)!r}, which crosses the cut after {cuts[producer]!r},"
        if dtype in _UNSENDABLE:
            raise PassError(
                f"{where} is a {dtype_name(dtype)} (the inside of a loop, say) and can't be sent between devices; cut "
                f"before or after that layer"
            )
        axis, rows = _batch_axis([known.get(ref) for known in shapes], where)
        if axis is None and ref.node in sized and dtype not in _COUNTABLE:
            raise PassError(
                f"{where} is computed from the batch but has no batch axis, and as {dtype_name(dtype)} it can't be "
                f"averaged over slices; cut before the layer that makes it or after the last one that reads it"
            )
        shape = _static_shape([known.get(ref) for known in shapes])
        reaches = ref.node in differentiable
        found.append(Boundary(ref, producer, tuple(sorted(consumers[ref])), dtype, axis, rows, shape, reaches))
    return tuple(found)


def _batch_axis(shapes: Sequence[Shape | None], where: str) -> tuple[int | None, int | None]:
    if any(shape is None for shape in shapes):
        raise PassError(f"{where} has no known rank; cut elsewhere")
    ranks = list(zip(*(shape or () for shape in shapes), strict=True))
    axes = [_axis(sizes) for sizes in ranks]
    grows = [index for index, (kind, _) in enumerate(axes) if kind in (_Axis.BATCH, _Axis.BOTH)]
    if len(grows) > 1:
        raise PassError(
            f"{where} has shape {_shown(ranks)} with the batch in axes {grows}: it couples samples; cut elsewhere"
        )
    unknown = [index for index, (kind, _) in enumerate(axes) if kind is _Axis.UNKNOWN]
    if unknown and not (grows and unknown > grows):
        raise PassError(f"{where} has shape {_shown(ranks)}: which axis is the batch can't be told; cut elsewhere")
    if not grows:
        return None, None
    kind, rate = axes[grows[0]]
    return grows[0], rate if kind is _Axis.BATCH else None


def _static_shape(shapes: Sequence[Shape | None]) -> Shape:
    """What is the same under every assumption."""
    known = zip(*(shape or () for shape in shapes), strict=True)
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in known)


def _shown(ranks: Sequence[Sequence[int | None]]) -> str:
    return "(" + ", ".join("?" if len(set(sizes)) > 1 or sizes[0] is None else str(sizes[0]) for sizes in ranks) + ")"


def _differentiable(graph: Graph, roles: Roles) -> set[str]:
    """Nodes through which a gradient flows to some parameter."""
    found = {v.value.node for v in roles.variables if v.value is not None and v.kind is VariableKind.PARAMETER}
    for node in graph:
        # A loop's tensor lists are variants, and carry gradients as floats do.
        carries = _CARRIES_GRADIENTS.intersection(output_dtypes(node)) and node.op not in _NOT_DIFFERENTIABLE
        if carries and any(ref.node in found for ref in graph.inputs(node.name)):
            found.add(node.name)
    return found


def _depends_on_slice_size(graph: Graph, roles: Roles) -> set[str]:
    found = {ref.node for ref in (*roles.inputs, *roles.slice)}
    for node in graph:
        if any(ref.node in found for ref in graph.inputs(node.name)):
            found.add(node.name)
    return found


def _reads(graph: Graph, roles: Roles, stage_of: Mapping[str, int], last: int) -> list[tuple[str, ...]]:
    """For each stage the variables that it reads, also through nodes that belong to no stage; metrics have no stage."""
    readers: dict[str, set[int]] = {name: set() for name in graph.nodes}
    results = [*roles.outputs, *(variable.update for variable in roles.variables), roles.loss]
    for ref in results:
        if ref is not None and ref.node not in stage_of:
            readers[ref.node].add(last)
    for name in reversed(list(graph.nodes)):
        for consumer in graph.consumers(name):
            readers[name] |= {stage_of[consumer]} if consumer in stage_of else readers[consumer]
    stored = [v for v in roles.variables if v.value is not None and v.kind is not VariableKind.METRIC]
    return [
        tuple(variable.name for variable in stored if variable.value and stage in readers[variable.value.node])
        for stage in range(last + 1)
    ]


def layer_of(graph: Graph, ref: Ref) -> str:
    """Path of the layer that made a tensor, for messages."""
    node = graph.nodes[ref.node]
    return node.attr[LAYER_ATTR].s.decode() if LAYER_ATTR in node.attr else "(no layer)"
