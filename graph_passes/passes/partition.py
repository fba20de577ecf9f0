"""Decides which tensors a stage keeps from forward to backward, and which it computes again."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from graph_passes.analysis.slice_shapes import SAMPLES, input_shape
from graph_passes.analysis.stage_arguments import row_tables, with_host_integers, with_lookups
from graph_passes.errors import PassError
from graph_passes.ir.collectives import key_nodes, order_sums, sums_of, without_sums
from graph_passes.ir.graph import Graph, GraphDef, Ref, shape_attr
from graph_passes.ir.node_kinds import METADATA
from graph_passes.ir.outline import outline
from graph_passes.ir.program import Fact, Growth, Program, Stage, StageFunction, Value, ValueKind
from graph_passes.ir.static_shapes import ShapesOf
from graph_passes.ir.tensorflow_bridge import Shape, dtype_size, is_stateful, output_dtypes
from graph_passes.ir.twin import KINDS_OF_STAGES, Twin
from graph_passes.passes.fold_shapes import drop_no_ops, fold

logger = logging.getLogger(__name__)

POLICIES = ("none", "boundary", "min_cut")

# Computing these again costs about as much as reading their result from memory: elementwise maths and data movement.
_CHEAP_NAMES = """
    Abs Add AddN AddV2 BiasAdd BroadcastTo Cast ConcatV2 Cos Div DivNoNan Elu Equal Erf Exp ExpandDims Expm1
    Fill Floor GatherV2 Greater GreaterEqual Identity IdentityN Inv InvertPermutation IsFinite LeakyRelu Less
    LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pack
    Pad PadV2 Pow Prod Range RealDiv Reciprocal Relu Relu6 Reshape Rsqrt Select SelectV2 Selu Sigmoid Sign Sin
    Slice Softplus Softsign Split SplitV Sqrt Square SquaredDifference Squeeze StatelessRandomGetAlg
    StatelessRandomGetKeyCounter StatelessRandomUniform StatelessRandomUniformV2 StopGradient StridedSlice Sub
    Tanh Tile Transpose Unpack Xdivy Xlogy ZerosLike
"""
_CHEAP = frozenset(_CHEAP_NAMES.split()) | METADATA
_CONTROL_FLOW = frozenset({"Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While"})
_CUDNN = frozenset({"CudnnRNNV3", "CudnnRNNBackpropV3"})


@dataclasses.dataclass(frozen=True)
class StageForm:
    """Options of a stage's functions.

    Attributes:
        recompute: ``none`` keeps every residual; ``boundary`` keeps only the stage's inputs and computes the rest again
            (GPipe, section 2.3); ``min_cut`` keeps the smallest set (in bytes) from which the rest follows by cheap
            elementwise work. Results of stateful ops (random draws without a seed) are always kept.
        jit_compile: compile F and B with XLA, except in stages with loops (recurrent layers) and branches: their tensor
            lists and optional values, which B needs, can't pass from one compiled function to another. Stages that add
            up over their replicas, or have cuDNN's recurrent layers, aren't compiled either: XLA can't do that.
        split: whether there are Bx and Bw in place of B.
        fuse: whether B follows F at once. With XLA, F and B are one function then if B needs nothing from other stages:
            residuals stay inside, where XLA recomputes those that are cheaper to recompute than to keep.
        samples: samples of all slices if these are equal, else None. Values that follow from shapes are then constant,
            and F needn't pass them to B; such functions serve no other slices.
        replicated: whether there are several replicas. One that is alone adds nothing up.
        on_gpu: whether they run on GPUs: F gets the integers that follow from the batch and from integer state, random
            seeds among them, from the host.

    Raises:
        PassError: ``recompute`` is unknown.
    """

    recompute: str = "none"
    jit_compile: bool = False
    split: bool = False
    fuse: bool = False
    samples: int | None = None
    replicated: bool = False
    on_gpu: bool = False

    def __post_init__(self) -> None:
        if self.recompute not in POLICIES:
            raise PassError(f"recompute={self.recompute!r} is unknown; use one of {', '.join(POLICIES)}")


@dataclasses.dataclass(frozen=True)
class Partition:
    """Splits each stage's graph into its functions F and B by data flow, never by an op's type or name.

        whole: (params, state, x, dy) -> (y, state', dx, dparams)
        x -> indices:  of rows that F takes in place of a whole table, see ``keepers``
        state, x -> integers:  that F takes in place of what computes them, see `StageForm.on_gpu`
        F:     (params, state, x)     -> (y, state', residuals)
        B:     (residuals, params, x, dy) -> (dx, dparams)
        Bx:    (residuals, params, x, dy) -> (dx, partial results)
        Bw:    (residuals, partial results, params, x, dy) -> dparams

    Nodes that the outputs need are forward; residuals are forward tensors that backward reads. Arguments of F that B
    reads are passed to both and are no residuals, although they stay in memory as long. Nodes that the gradients of the
    received tensors need are Bx (dO in Out-Of-Order BackProp, section 3), the rest Bw (dW), which takes results of Bx
    as partial results. Whether a weight is used once or several times makes no difference.

    Attributes:
        forms: options of the functions: one for all stages, or one for each.
        training: whether stages have a B; without gradients of its own a stage's B is empty.
        prefix: start of the functions' names: unique in the library.
        counted: whether to count the bytes that stages keep, which only ``min_cut`` needs itself.
        keepers: for each stage the devices that keep its variables, if tables may be kept by rows: of parameters of
            which stages need nothing but rows, on several devices, F gets the rows that are looked up before it. None
            for functions that look them up themselves.
    """

    name: ClassVar[str] = "partition"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.GRAPHS,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.FUNCTIONS,)
    forms: StageForm | Sequence[StageForm] = StageForm()
    training: bool = True
    prefix: str = ""
    counted: bool = True
    keepers: Sequence[Sequence[str]] | None = None

    def run(self, program: Program) -> Program:
        """Program whose stages have graphs -> program whose stages have functions: F, B or Bx and Bw, metrics."""
        forms = [self.forms] * len(program.stages) if isinstance(self.forms, StageForm) else self.forms
        reasons = {} if self.keepers is None else row_tables(program, self.keepers)
        fold_twin = functools.lru_cache(maxsize=KINDS_OF_STAGES)(_folded)
        stages = tuple(
            self._stage(program, stage, form, reasons, fold_twin)
            for stage, form in zip(program.stages, forms, strict=True)
        )
        return program.replace(stages=stages)

    def _stage(
        self, program: Program, stage: Stage, form: StageForm, reasons: Mapping[str, str], fold_twin: _Fold
    ) -> Stage:
        whole, library = stage, {function.signature.name for function in stage.own_graph.library.function}
        samples, recompute = form.samples, form.recompute
        if not form.replicated:
            stage = dataclasses.replace(stage, graph=without_sums(stage.own_graph))
        stage = with_lookups(stage, [v for v in program.roles.variables if reasons.get(v.name) == ""])
        shapes_of = ShapesOf(stage.own_graph)
        counts = self.training and (self.counted or recompute == "min_cut")
        counted = _counted(program, stage, shapes_of) if counts else {}
        shapes: Mapping[Ref, Shape | None] = {}
        before: Mapping[Ref, Ref] = {}
        if samples is not None:
            stage, shapes, before = _of_samples(program, stage, shapes_of, samples, fold_twin)
            counted = {number: size.renumbered(before) for number, size in counted.items()}
        sizes = list(counted.values())
        graph, sources = Graph(stage.own_graph), stage.arguments
        if form.on_gpu:
            stage = with_host_integers(program, stage)
        given = set(stage.arguments.values())
        forward, indices, integers, gradients = (dict[Value, Ref]() for _ in range(4))
        of_kind = {ValueKind.FORWARD: forward, ValueKind.INDICES: indices, ValueKind.INTEGERS: integers}
        for value, ref in stage.results.items():
            of_kind.get(value.kind, gradients)[value] = ref

        first = _with_metadata(graph, graph.ancestors(forward.values(), given, control=False), given)
        # Stages that add up over replicas get their keys as arguments.
        peers = program.roles.peers
        if peers is not None:
            first -= key_nodes(graph, peers.refs)
        second = graph.ancestors(gradients.values(), given, control=False) - first
        measured = graph.ancestors(stage.metric_results.values(), given, control=False) - first
        taps = _crossing(graph, measured, stage.metric_results.values(), first, given)
        crossing = _crossing(graph, second, gradients.values(), first, given)
        residuals = _residuals(recompute, graph, crossing, given, sizes)

        tapped = {Value(before.get(ref, ref)): ref for ref in taps}
        results = forward | tapped
        results |= {Value(ref, ValueKind.RESIDUAL): ref for ref in residuals}
        name = f"{self.prefix}stage{stage.index}" + ("" if samples is None else f"_of{samples}")
        control_flow = [node.name for node in graph if node.op in _CONTROL_FLOW]
        reasons_not = {
            "has a loop or branch": control_flow,
            "adds up over its replicas": [node.name for node in sums_of(graph)],
            "has a recurrent layer of cuDNN": [node.name for node in graph if node.op in _CUDNN],
        }
        jit_compile = form.jit_compile and not any(reasons_not.values())
        if form.jit_compile and not jit_compile:
            why, names = next((why, names) for why, names in reasons_not.items() if names)
            logger.warning("stage %d isn't compiled with XLA: it %s, %s", stage.index, why, names[0])
        changes: dict[str, Any] = {
            "forward": _function(f"{name}_forward", graph, stage.arguments, results, jit_compile),
            "lookups": stage.lookups,
            "loops": tuple(each for each in graph.graph.library.function if each.signature.name not in library),
            "indices": None,
            "integers": None,
            "whole_tables": {table: why for table, why in reasons.items() if why and table in stage.reads},
        }
        if integers:
            changes["integers"] = _function(f"{name}_integers", graph, sources, integers, jit_compile=False)
        if indices:
            changes["indices"] = _function(f"{name}_indices", graph, stage.arguments, indices, jit_compile=False)
        if self.training:
            arguments = {**stage.arguments, **{Value(ref, ValueKind.RESIDUAL): ref for ref in residuals}}
            received = {boundary.ref for boundary in program.boundaries}
            parts: tuple[StageFunction | None, StageFunction | None]
            if form.split:
                recomputed = first if recompute == "min_cut" else set()
                parts = _split_backward(name, graph, arguments, gradients, received, recomputed, jit_compile)
                changes |= {"input_grad": parts[0], "weight_grad": parts[1], "split": True}
                delayed = [
                    arguments.get(value, value.ref)
                    for value in (() if parts[1] is None else parts[1].inputs)
                    if value.kind is not ValueKind.FORWARD or _is_kept(value, received)
                ]
                if counted:
                    changes["delayed_bytes"] = _growth(delayed, counted)
            else:
                backward = _function(f"{name}_backward", graph, arguments, gradients, jit_compile)
                parts = (backward, None)
                changes["backward"] = backward
                changes["fused"] = None
                if jit_compile and form.fuse:
                    given_back = [v for v in backward.inputs if v.kind is ValueKind.GRADIENT]
                    if all(value.ref == program.roles.loss for value in given_back):
                        both = {v: ref for v, ref in results.items() if v.kind is not ValueKind.RESIDUAL} | gradients
                        changes["fused"] = _function(f"{name}_fused", graph, stage.arguments, both, jit_compile)
            read = {value for part in parts if part is not None for value in part.inputs}
            kept = [arguments[value] for value in arguments if value in read and _is_kept(value, received)]
            if counted:
                changes["residual_bytes"] = _growth(kept, counted)
        if stage.metric_results:
            arguments = {**stage.arguments, **tapped}
            changes["metrics"] = _function(f"{name}_metrics", graph, arguments, stage.metric_results, jit_compile=False)
        for name, function in changes.items():
            if isinstance(function, StageFunction):
                _tell_shapes(function, stage.arguments, shapes)
                lists = (tuple(_with_old_refs(own, before)) for own in (function.inputs, function.outputs))
                changes[name] = StageFunction(function.function, *lists)
        return dataclasses.replace(whole, **changes)


class _FoldedTwin(NamedTuple):
    """The twin of a stage's graph for slices of some size.

    Attributes:
        graph: the twin, with values from shapes as constants, and without what does nothing.
        wanted: what the wanted tensors are now.
        shapes: of the tensors that the twin had, and of the new ones.
        before: outputs of loops that have lost variables -> the twin's.
    """

    graph: GraphDef
    wanted: tuple[Ref, ...]
    shapes: Mapping[Ref, Shape | None]
    before: Mapping[Ref, Ref]


_Assumed = tuple[tuple[str, tuple[int | None, ...]], ...]
_Fold = Callable[[bytes, _Assumed, tuple[tuple[Ref, int], ...], tuple[Ref, ...]], _FoldedTwin]


def _of_samples(
    program: Program, stage: Stage, shapes_of: ShapesOf, samples: int, fold_twin: _Fold
) -> tuple[Stage, Mapping[Ref, Shape | None], Mapping[Ref, Ref]]:
    """Returns the stage for slices of ``samples`` samples, with values from shapes as constants.

    Besides it: the shapes, and its renumbered outputs of loops -> those of the given stage.
    """
    wanted = list(dict.fromkeys([*stage.results.values(), *stage.metric_results.values()]))
    twin, assumed = Twin(stage.own_graph), _assumed(program, stage, shapes_of, samples)
    count = program.roles.slice.samples
    try:
        folded = fold_twin(
            twin.serialized,
            tuple((twin.name(name), tuple(shape)) for name, shape in assumed.items()),
            ((twin.of(count), samples),) if count.node in twin else (),
            tuple(map(twin.of, wanted)),
        )
    except PassError:
        fold(stage.own_graph, assumed, {count: samples}, results=wanted)  # Its error has the stage's names.
        raise
    graph, named = twin.named(folded.graph)
    now = dict(zip(wanted, map(named, folded.wanted), strict=True))
    results, metrics = (
        {value: now[ref] for value, ref in results.items()} for results in (stage.results, stage.metric_results)
    )
    shapes = {named(ref): shape for ref, shape in folded.shapes.items()}
    before = {named(ref): named(old) for ref, old in folded.before.items()}
    return dataclasses.replace(stage, graph=graph, results=results, metric_results=metrics), shapes, before


def _with_old_refs(values: Iterable[Value], before: Mapping[Ref, Ref]) -> Iterator[Value]:
    """Yields values with the tensors of the stage's graph that functions hand on."""
    for value in values:
        handed_on = value.kind in (ValueKind.RESIDUAL, ValueKind.PARTIAL)
        yield Value(before.get(value.ref, value.ref), value.kind) if handed_on else value


def _folded(
    serialized: bytes, assumed: _Assumed, values: tuple[tuple[Ref, int], ...], wanted: tuple[Ref, ...]
) -> _FoldedTwin:
    """Does for the twin of a stage's graph what `_of_samples` does."""
    twin = GraphDef.FromString(serialized)
    folded = fold(twin, dict(assumed), dict(values), results=wanted)
    graph, moved = drop_no_ops(folded.graph, folded.shapes)
    replaced = [folded.moved.get(ref, ref) for ref in wanted]
    before = {now: ref for ref, now in folded.moved.items() if now.node == ref.node and now != ref}
    return _FoldedTwin(graph, tuple(moved.get(ref, ref) for ref in replaced), folded.shapes, before)


def _tell_shapes(function: StageFunction, arguments: Mapping[Value, Ref], shapes: Mapping[Ref, Shape | None]) -> None:
    """Writes the shapes of a function's arguments into it, for TensorFlow's optimizer, which sees it by itself."""
    for index, value in enumerate(function.inputs):
        shape = shapes.get(arguments.get(value, value.ref))
        if shape is not None:
            function.function.arg_attr[index].attr["_output_shapes"].list.shape.add().CopyFrom(shape_attr(shape).shape)


def _assumed(
    program: Program, stage: Stage, shapes_of: ShapesOf, samples: int, *, example: bool = False
) -> dict[str, Sequence[int | None]]:
    """Returns the shapes of a stage's arguments for slices of ``samples`` samples, by node.

    Args:
        program: the stage's program.
        stage: a stage with a graph.
        shapes_of: of that graph.
        samples: of a slice.
        example: take lengths that the model leaves open from the batch at hand, if there is one; else they stay open.
    """
    boundaries = {boundary.ref: boundary for boundary in program.boundaries}
    inputs, shapes = program.roles.inputs, program.roles.example_shapes
    examples = dict(zip(inputs, shapes, strict=True)) if example and shapes else {}
    assumed: dict[str, Sequence[int | None]] = {}
    for value, ref in stage.arguments.items():
        if value.kind is ValueKind.LOOKED_UP:  # It has the node that made it, and so its shape.
            continue
        node = shapes_of.node(ref.node)
        known = node.attr["shape"].shape
        boundary = boundaries.get(value.ref)
        if boundary is not None:
            assumed[ref.node] = boundary.example_slice_shape(samples) if example else boundary.slice_shape(samples)
        elif value.ref in inputs:
            rows = None if program.roles.uncut else samples
            assumed[ref.node] = input_shape(node, rows, examples.get(value.ref))
        elif not known.unknown_rank:
            assumed[ref.node] = [None if dim.size < 0 else dim.size for dim in known.dim]
    return assumed


def _is_kept(value: Value, received: Container[Ref]) -> bool:
    """Returns whether an argument of a backward function is kept from the forward one, unlike a variable, say."""
    if value.kind is ValueKind.FORWARD:
        return value.ref in received
    return value.kind in (ValueKind.RESIDUAL, ValueKind.LOOKED_UP)


def _split_backward(
    name: str,
    graph: Graph,
    arguments: Mapping[Value, Ref],
    gradients: Mapping[Value, Ref],
    received: Container[Ref],
    recomputed: Container[str],
    jit_compile: bool,
) -> tuple[StageFunction | None, StageFunction | None]:
    """Returns Bx and Bw.

    Args:
        name: start of the functions' names.
        graph: the stage's graph.
        arguments: possible arguments of backward functions.
        gradients: their results.
        received: tensors that come from other stages.
        recomputed: cheap nodes of the forward part: Bw computes them again rather than keep their results from Bx.
        jit_compile: compile both with XLA.
    """
    sent = {
        value: ref for value, ref in gradients.items() if value.kind is ValueKind.GRADIENT and value.ref in received
    }
    own = {value: ref for value, ref in gradients.items() if value not in sent}
    given = set(arguments.values())
    body = graph.ancestors(sent.values(), given, control=False)
    done = {node for node in body if node not in recomputed and graph.nodes[node].op != "Const"}
    rest = graph.ancestors(own.values(), given, control=False) - done
    read = [ref for node in graph.ordered(rest) for ref in graph.inputs(node)] + list(own.values())
    partial = {
        Value(ref, ValueKind.PARTIAL): ref for ref in dict.fromkeys(read) if ref.node in done and ref not in given
    }
    input_grad = weight_grad = None
    if sent:
        input_grad = _function(f"{name}_input_grad", graph, arguments, sent | partial, jit_compile)
    if own:
        weight_grad = _function(f"{name}_weight_grad", graph, {**arguments, **partial}, own, jit_compile)
    return input_grad, weight_grad


def _with_metadata(graph: Graph, forward: set[str], given: set[Ref]) -> set[str]:
    """Returns the forward part with the nodes that read only shapes of its tensors."""
    extended = set(forward)
    for node in graph:
        reads = graph.inputs(node.name)
        # Computed with the forward part, they keep a few integers instead of the tensor.
        if node.op in METADATA and all(ref.node in extended or ref in given or _is_const(graph, ref) for ref in reads):
            extended.add(node.name)
    return extended


def _is_const(graph: Graph, ref: Ref) -> bool:
    return graph.nodes[ref.node].op == "Const"


def _crossing(
    graph: Graph, readers: Iterable[str], results: Iterable[Ref], forward: set[str], given: set[Ref]
) -> list[Ref]:
    """Returns the tensors of the forward part that the readers, or the results themselves, need."""
    read = [ref for name in graph.ordered(readers) for ref in graph.inputs(name)] + list(results)
    return [
        ref for ref in dict.fromkeys(read) if ref.node in forward and ref not in given and not _is_const(graph, ref)
    ]


def _function(
    name: str, graph: Graph, arguments: Mapping[Value, Ref], results: Mapping[Value, Ref], jit_compile: bool
) -> StageFunction:
    """Returns the function of ``results``, with only the arguments that it needs."""
    body = graph.ancestors(results.values(), arguments.values(), control=False)
    needed = {ref for node in body for ref in graph.inputs(node)} | set(results.values())
    used = {value: ref for value, ref in arguments.items() if ref in needed}
    function = outline(name, graph, list(used.values()), list(results.values()), jit_compile=jit_compile)
    order_sums(function)
    return StageFunction(function, tuple(used), tuple(results))


class _Bytes:
    """The bytes of each tensor of a stage; 0 where statically unknown."""

    def __init__(self, graph: ShapesOf, shapes: Mapping[Ref, Shape | None], before: Mapping[Ref, Ref] = {}) -> None:
        self._graph, self._shapes, self._before = graph, shapes, before

    def renumbered(self, before: Mapping[Ref, Ref]) -> _Bytes:
        """Returns the same for a graph with other names; ``before`` has the names here."""
        return _Bytes(self._graph, self._shapes, before)

    def known(self, ref: Ref) -> bool:
        """Returns whether the tensor's shape is statically known."""
        shape = self._shapes.get(self._before.get(ref, ref))
        return shape is not None and None not in shape

    def __getitem__(self, ref: Ref) -> int:
        ref = self._before.get(ref, ref)
        if not self.known(ref):
            return 0
        dtype = output_dtypes(self._graph.node(ref.node))[ref.output]
        return math.prod(size or 0 for size in self._shapes[ref] or ()) * dtype_size(dtype)


def _counted(program: Program, stage: Stage, shapes_of: ShapesOf) -> dict[int, _Bytes]:
    """Returns bytes of each tensor of a stage for slices of few and of many samples.

    Nothing is known of a stage that works on slices of certain sizes only.
    """
    count = program.roles.slice.samples
    for pair in SAMPLES:
        try:
            assumed = {samples: _assumed(program, stage, shapes_of, samples, example=True) for samples in pair}
            return {
                samples: _Bytes(shapes_of, shapes_of.under(shapes, {count: samples}))
                for samples, shapes in assumed.items()
            }
        except PassError as error:
            logger.debug("bytes of stage %d can't be counted for %s samples: %s", stage.index, pair, error)
    return dict.fromkeys(SAMPLES[0], _Bytes(shapes_of, {}))


def _growth(kept: Sequence[Ref], counted: Mapping[int, _Bytes]) -> Growth:
    """Returns the bytes of ``kept``."""
    (few, least), (many, most) = ((samples, sum(size[ref] for ref in kept)) for samples, size in counted.items())
    per_sample = (most - least) // (many - few)
    return Growth(per_sample, max(0, least - per_sample * few))


def _residuals(
    policy: str, graph: Graph, crossing: Sequence[Ref], given: set[Ref], sizes: Sequence[_Bytes]
) -> list[Ref]:
    """Returns the tensors to keep, in the order of the graph."""
    if policy == "none" or not crossing:
        kept = set(crossing)
    elif policy == "boundary":
        kept = _unrepeatable(graph, crossing, given)
    else:
        kept = _min_cut(graph, crossing, given, sizes[0])
    return sorted(kept, key=lambda ref: (graph.position[ref.node], ref.output))


def _unrepeatable(graph: Graph, crossing: Sequence[Ref], given: set[Ref]) -> set[Ref]:
    """Returns results of stateful ops that must be kept so that ``crossing`` can be recomputed exactly."""
    kept: set[Ref] = set()
    seen: set[Ref] = set()
    pending = list(crossing)
    while pending:
        ref = pending.pop()
        if ref in seen or ref in given:
            continue
        seen.add(ref)
        if is_stateful(graph.nodes[ref.node].op):
            kept.add(ref)
        else:
            pending += graph.inputs(ref.node)
    return kept


def _min_cut(graph: Graph, crossing: Sequence[Ref], given: set[Ref], sizes: _Bytes) -> set[Ref]:
    """Returns the set of fewest bytes from which all of ``crossing`` follows by cheap ops.

    Each tensor is an edge whose capacity is its size; a cheap op lets what it reads flow on to its result, the result
    of any other op flows in from the source, and ``crossing`` flows out to the sink. The cheapest cut is kept.
    """
    import networkx  # a third of a second, and only this needs it

    network = networkx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    seen: set[Ref] = set()
    pending = list(crossing)
    for ref in crossing:
        network.add_edge((ref, "out"), "sink")
    while pending:
        ref = pending.pop()
        if ref in seen:
            continue
        seen.add(ref)
        network.add_edge((ref, "in"), (ref, "out"), capacity=max(1, sizes[ref]))
        node = graph.nodes[ref.node]
        if node.op not in _CHEAP or is_stateful(node.op):
            network.add_edge("source", (ref, "in"))
            continue
        for read in graph.inputs(ref.node):
            if read in given or _is_const(graph, read):
                continue
            network.add_edge((read, "out"), (ref, "in"))
            pending.append(read)
    if not any(network.successors("source")):
        return set()
    _, (reachable, _) = networkx.minimum_cut(network, "source", "sink")
    return {ref for ref in seen if (ref, "in") in reachable and (ref, "out") not in reachable}
