"""Rules for operations on a slice's samples: linear and mixing ones, calls, branches, and loops round by round.

All others treat each sample by itself (`Interpreter.generic`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from graph_passes.analysis.operator_shapes import ShapeInference
from graph_passes.analysis.operator_traits import BRANCHES, LOOPS
from graph_passes.analysis.sample_indexing import INDEXING
from graph_passes.analysis.sample_interpreter import Body, Interpreter, Rule
from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import (
    CAPTURED_ATTR,
    FLOAT_DTYPES,
    OWN_GRADIENT_ATTR,
    GraphDef,
    NodeDef,
    Ref,
    function_names,
    in_order,
)
from graph_passes.ir.spreads import CONSTANT, Coupling, Spread, all_shared, common_outer, together

_MOST_ROUNDS = 8
"""The most interpretations of a loop's body: dependences pass from variable to variable, round by round."""


def _placed(interpreter: Interpreter, node: NodeDef, spread: Spread) -> Spread:
    """Handles a place that becomes a floating-point number, which counts samples."""
    if spread.place and interpreter.is_float(Ref(node.name)):
        interpreter.couple(node, Coupling.PLACE)
        return spread._replace(place=False)
    return spread


def _same(interpreter: Interpreter, node: NodeDef) -> Spread | Sequence[Spread]:
    """Handles Identity and the like, output by output."""
    spreads = [spread.negated if node.op == "Neg" else spread for spread in interpreter.inputs(node)]
    return spreads if len(interpreter.dtypes(node.name)) == len(spreads) else spreads[0]


def _identities(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread]:
    """Handles IdentityN, by which a model defines gradients of its own: one that mixes samples couples them, too."""
    if OWN_GRADIENT_ATTR in node.attr:
        _differentiated(interpreter, node, GraphDef.FromString(node.attr[OWN_GRADIENT_ATTR].s))
    return interpreter.inputs(node)


def _differentiated(interpreter: Interpreter, node: NodeDef, graph: GraphDef) -> None:
    """Interprets the gradient that a model defines; only couplings that mix samples are told."""
    results = [Ref(own.name) for own in graph.node if own.name.startswith("result")]
    refs = interpreter.graph.inputs(node.name)
    first = len(refs) - node.attr[CAPTURED_ATTR].i
    names = [f"gradient{number}" if number < first else f"captured{number - first}" for number in range(len(refs))]
    for name, dtype in zip(names, interpreter.dtypes(node.name), strict=True):
        graph.node.add(op="Placeholder", name=name).attr["dtype"].type = dtype
    inference, shapes = ShapeInference(graph.library), zip(*map(interpreter.shapes, refs), strict=True)
    try:
        known = [
            inference.of(graph, {name: shape for name, shape in zip(names, own, strict=True) if shape is not None})
            for own in shapes
        ]
    except PassError:
        interpreter.couple(node, Coupling.UNKNOWN)
        return
    inside = Interpreter(in_order(graph), RULES, interpreter.sizes, known, ({}, {}), inference=inference)
    given = [interpreter.of(ref) for ref in refs]
    arriving = [_arriving(spread) for spread in given[:first]]
    inside.run({Ref(name): spread for name, spread in zip(names, [*arriving, *given[first:]], strict=True)})
    mixing = {coupling for _, coupling in inside.couplings} & {Coupling.TOGETHER, Coupling.PLACE, Coupling.UNKNOWN}
    if any(inside.of(ref).axis is None and not inside.of(ref).linear for ref in results):
        mixing.add(Coupling.TOGETHER)
    for coupling in sorted(mixing, key=lambda own: own.value):
        interpreter.couple(node, coupling)


def _arriving(spread: Spread) -> Spread:
    """Returns the spread of a tensor's gradient: 1 / N for a mean of N samples, a sum over them for what they share."""
    if spread.axis is not None:
        return Spread(spread.axis, spread.outer, varies=True, known=False)
    if not spread.varies:
        return Spread(varies=True, known=False)
    return Spread(degree=None if spread.degree is None else 1 - spread.degree, known=False)


def _quantized(interpreter: Interpreter, node: NodeDef) -> None:
    """Handles rounding to a grid between the least and the largest of all numbers, unless these are given."""
    if interpreter.inputs(node)[0].axis is not None and not node.attr["range_given"].b:
        interpreter.couple(node, Coupling.TOGETHER)


def _cast(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    if node.attr["SrcT"].type in FLOAT_DTYPES and node.attr["DstT"].type not in FLOAT_DTYPES:
        return None
    return _placed(interpreter, node, interpreter.inputs(node)[0])


def _of_samples(
    interpreter: Interpreter, node: NodeDef, used: Sequence[tuple[Ref, Spread]], degree: int | None
) -> Spread:
    """Returns the spread of a tensor with a batch axis that is computed from others sample by sample."""
    return _placed(interpreter, node, interpreter.by_sample(node, used, degree))


def _sum(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles a sum of all inputs."""
    refs = [ref for ref in interpreter.graph.inputs(node.name) if not interpreter.is_zero(ref)]
    spreads = [interpreter.of(ref) for ref in refs]
    if all(spread.axis is None for spread in spreads):
        rising = [spread.negated if node.op == "Sub" and index else spread for index, spread in enumerate(spreads)]
        return together(spreads)._replace(extreme=_extreme_of(rising)) if spreads else CONSTANT
    used = []
    for index, ref in enumerate(interpreter.graph.inputs(node.name)):
        if ref in refs:
            used.append((ref, interpreter.fixed(node, index, rows=True)))
    degrees = {spread.degree for ref, spread in used if interpreter.is_float(ref)}
    return _of_samples(interpreter, node, used, degrees.pop() if len(degrees) == 1 else None if degrees else 0)


def _chosen(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    """Handles one of two tensors, by a condition."""
    _, *values = interpreter.graph.inputs(node.name)
    chosen = interpreter.choice(node)
    if chosen.varies and chosen.axis is None and interpreter.is_float(Ref(node.name)):
        interpreter.couple(node, Coupling.NOT_LINEAR if interpreter.in_loss(node) else Coupling.TOGETHER)
    spreads = [interpreter.of(ref) for ref in values if not interpreter.is_zero(ref)]
    if any(spread.axis is not None for spread in (*spreads, chosen)) or not spreads:
        return None
    combined, extreme = together(spreads), _extreme_of(spreads, several=True) if chosen.constant else ""
    return combined._replace(known=combined.known and chosen.known, extreme=extreme)


def _times(interpreter: Interpreter, node: NodeDef, signs: Sequence[int] = (1, 1)) -> Spread:
    """Handles a product, or a quotient where a sign is -1."""
    refs = interpreter.graph.inputs(node.name)
    spreads = list(interpreter.inputs(node))
    rows = any(spread.axis is not None for spread in spreads)
    if (scaled := _scaled_extreme(interpreter, node, refs, spreads, signs)) is not None:
        return scaled

    def fix(index: int) -> None:
        spreads[index] = interpreter.fixed(node, index, rows=rows)

    for index, (spread, sign) in enumerate(zip(spreads, signs, strict=True)):
        unfit = not spread.linear or spread.degree is None or (spread.varies and (rows or sign < 0))
        others = [other for number, other in enumerate(spreads) if number != index]
        if (
            spread.axis is None
            and unfit
            and not (sign > 0 and not rows and spread.linear and all(other.is_factor for other in others))
        ):
            fix(index)
    varying = [index for index, spread in enumerate(spreads) if spread.axis is None and spread.varies]
    if not rows and len(varying) > 1:
        fix(next((index for index in reversed(varying) if spreads[index].known), varying[-1]))
    degrees = [spread.degree for spread in spreads]
    known = [degree * sign for degree, sign in zip(degrees, signs, strict=True) if degree is not None]
    degree = sum(known) if len(known) == len(degrees) else None
    if rows:
        return _of_samples(interpreter, node, list(zip(refs, spreads, strict=True)), degree)
    combined = together(spreads)
    return combined._replace(degree=degree)


def _extreme_of(spreads: Sequence[Spread], *, several: bool = False) -> str:
    """Returns the extreme of what rises with tensors; empty if there is none, or (unless ``several``) if there are two.

    All others must be constant.
    """
    extremes = [spread.extreme for spread in spreads if not spread.constant]
    return extremes[0] if len(set(extremes)) == 1 and (several or len(extremes) == 1) else ""


def _scaled_extreme(
    interpreter: Interpreter, node: NodeDef, refs: Sequence[Ref], spreads: Sequence[Spread], signs: Sequence[int]
) -> Spread | None:
    """Returns the spread of an extreme times a number of known sign; None for all else."""
    if node.op not in (*_PRODUCTS, *_QUOTIENTS) or len(spreads) != 2 or not (spreads[0].extreme or spreads[1].extreme):
        return None
    index = 0 if spreads[0].extreme else 1
    own, factor, numbers = spreads[index], spreads[1 - index], interpreter.numbers(refs[1 - index])
    if signs[index] < 0 or not factor.is_factor or numbers is None or not (factor.degree or numbers[0].size):
        return None
    if not all((value > 0).all() for value in numbers) and not all((value < 0).all() for value in numbers):
        return None
    degree = (factor.degree or 0) * signs[1 - index]
    product = (own if (numbers[0] > 0).all() else own.negated)._replace(degree=degree, known=own.known and factor.known)
    return product if degree == 0 else product._replace(extreme="")


def _rising(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    """Handles what rises with its first input, or with all: the extreme of slices stays one."""
    spreads = interpreter.inputs(node)
    joins = {"Maximum": "Max", "Minimum": "Min"}.get(node.op)
    extreme = _extreme_of(spreads, several=joins in {spread.extreme for spread in spreads})
    if not extreme or any(spread.axis is not None for spread in spreads):
        return None
    return together(spreads)._replace(extreme=extreme)


def _square(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    spread = interpreter.inputs(node)[0]
    if spread.degree is None or (spread.axis is None and (spread.varies or not spread.linear)):
        return None
    return _placed(interpreter, node, spread._replace(degree=2 * spread.degree))


def _reduced(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles a sum or mean over axes."""
    ref, axes = interpreter.graph.inputs(node.name)[:2]
    spread = interpreter.of(ref)
    if spread.axis is None or not _over_samples(interpreter, node, ref, axes):
        axis = None if spread.axis is None else interpreter.batch_axis(node, 0, [(ref, spread)])
        return spread._replace(axis=axis, extreme="")
    mean = node.op == "Mean"
    if mean and spread.partial:
        interpreter.couple(node, Coupling.NOT_LINEAR if interpreter.in_loss(node) else Coupling.TOGETHER)
    degree = None if spread.degree is None else spread.degree + (not mean)
    return Spread(varies=spread.varies or spread.partial, degree=degree, known=spread.known)


def _over_samples(interpreter: Interpreter, node: NodeDef, ref: Ref, axes: Ref) -> bool:
    """Returns whether a reduction leaves no batch axis."""
    spread, shape = interpreter.of(ref), interpreter.shape(ref)
    if shape is not None and (over := interpreter.axes_of(axes, len(shape))) is not None:
        return spread.axis in over
    return interpreter.batch_axis(node, 0, [(ref, spread)]) is None


def _extreme(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    """Handles a maximum, product or the like over axes."""
    ref, axes = interpreter.graph.inputs(node.name)[:2]
    spread = interpreter.of(ref)
    if spread.extreme and spread.extreme == node.op:
        return spread
    if spread.axis is None or not _over_samples(interpreter, node, ref, axes):
        return None
    if not spread.varies:
        return Spread(known=spread.known)
    extreme = node.op if node.op in ("Max", "Min") and interpreter.is_float(ref) and spread.degree == 0 else ""
    if interpreter.is_float(ref) and not extreme and not (spread.known and interpreter.in_loss(node)):
        interpreter.couple(node, Coupling.TOGETHER)
    return Spread(varies=True, linear=False, known=spread.known, extreme=extreme)


def _half_of_squares(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    spread = interpreter.inputs(node)[0]
    if spread.axis is None or spread.one_by_one or spread.degree is None:
        return None
    return Spread(varies=spread.varies, degree=2 * spread.degree + 1, known=spread.known)


def _matmul(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    refs = interpreter.graph.inputs(node.name)[:2]
    spreads = [interpreter.of(ref) for ref in refs]
    if all(spread.axis is None for spread in spreads):
        return _times(interpreter, node)
    names = ("transpose_a", "transpose_b") if node.op == "MatMul" else ("adj_x", "adj_y")
    contracted = []
    for ref, name, last in zip(refs, names, (True, False), strict=True):
        shape = interpreter.shape(ref)
        if shape is None:
            return None
        contracted.append(len(shape) - (1 if last != node.attr[name].b else 2))
    over = [spread.axis == axis for spread, axis in zip(spreads, contracted, strict=True) if spread.axis is not None]
    return _contraction(interpreter, node, refs, over)


def _einsum(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    refs = interpreter.graph.inputs(node.name)
    terms, _, result = node.attr["equation"].s.decode().replace(" ", "").partition("->")
    if all(interpreter.of(ref).axis is None for ref in refs):
        return _times(interpreter, node, [1] * len(refs))
    letters = []
    for ref, term in zip(refs, terms.split(","), strict=True):
        spread, shape = interpreter.of(ref), interpreter.shape(ref)
        if spread.axis is None:
            continue
        if spread.one_by_one:
            letters.append("")
            continue
        if shape is None:
            return None
        before, dots, _ = term.partition("...")
        more = len(shape) - len(term.replace("...", ""))
        expanded = term
        if dots:
            expanded = term.replace("...", "".join(chr(0x4E00 + number) for number in range(8 - more, 8)))
        letters.append(expanded[spread.axis] if spread.axis < len(expanded) else before)
    if "..." in result and any(ord(letter[:1] or "a") >= 0x4E00 for letter in letters):
        return _contraction(interpreter, node, refs, [False] * len(letters))
    over = [letter not in result for letter in letters]  # that of one sample at a time is in every text
    if len(set(letters)) > 1 and any(over):
        interpreter.couple(node, Coupling.TOGETHER)
    return _contraction(interpreter, node, refs, over)


def _contraction(interpreter: Interpreter, node: NodeDef, refs: Sequence[Ref], over: Sequence[bool]) -> Spread:
    """Handles a product of tensors; ``over`` says for each with samples whether it is summed over them."""
    used = [(ref, interpreter.fixed(node, index, rows=True)) for index, ref in enumerate(refs)]
    spreads = [spread for _, spread in used]
    known = [spread.degree for spread in spreads if spread.degree is not None]
    degree = sum(known) if len(known) == len(spreads) else None
    if not all(over):
        return _of_samples(interpreter, node, used, degree)
    varies, before = any(spread.varies for spread in spreads), all(spread.known for spread in spreads)
    return Spread(varies=varies, degree=None if degree is None else degree + 1, known=before)


def _batch_norm(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread] | None:
    spread = interpreter.inputs(node)[0]
    channels = 1 if node.attr["data_format"].s.startswith(b"NC") else -1
    shape = interpreter.shape(interpreter.graph.inputs(node.name)[0])
    if (
        not node.attr["is_training"].b
        or spread.axis is None
        or spread.one_by_one
        or shape is None
        or spread.axis == channels % len(shape)
    ):
        return None
    interpreter.couple(node, Coupling.TOGETHER)
    mean = Spread(varies=True, known=spread.known)
    others = [mean._replace(linear=False)] * (len(interpreter.dtypes(node.name)) - 2)
    return [spread._replace(known=False), mean, *others]


def _between_axes(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    """Handles blocks of an image that move to or from the batch axis."""
    refs = interpreter.graph.inputs(node.name)
    spread = interpreter.of(refs[0])
    block = interpreter.integers(refs[1]) if node.op.endswith("ND") else [node.attr["block_size"].i] * 2
    if spread.axis != 0 or not spread.outer or block is None:
        return None
    if node.op.startswith("Space"):
        return spread._replace(outer=math.prod(block) * spread.outer)
    if spread.outer % math.prod(block):
        interpreter.couple(node, Coupling.TOGETHER)
    return spread._replace(outer=spread.outer // math.prod(block) or None)


def _reduced_over_replicas(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles a sum over the slices of a micro-batch."""
    spread = interpreter.inputs(node)[0]
    return spread._replace(axis=None, known=False, shared=True)


def _added_up(interpreter: Interpreter, node: NodeDef) -> Spread | Sequence[Spread] | None:
    """Handles samples that are added up in the rows of a table."""
    used = list(zip(interpreter.graph.inputs(node.name), interpreter.inputs(node), strict=True))
    rows = [spread for _, spread in used if spread.axis is not None]
    if not rows:
        return None
    if interpreter.batch_axis(node, 0, used) is not None:
        return interpreter.unordered(node)
    degrees = [spread.degree for spread in rows if spread.degree is not None]
    return Spread(varies=True, degree=1 + max(degrees, default=0), known=all(spread.known for _, spread in used))


def _along(index: int) -> Rule:
    """Returns the rule of an op along axes that another input names: across samples if these are among them."""

    def rule(interpreter: Interpreter, node: NodeDef) -> Spread | None:
        refs = interpreter.graph.inputs(node.name)
        spread, shape = interpreter.of(refs[0]), interpreter.shape(refs[0])
        if spread.axis is None or shape is None:
            return spread if spread.axis is None and node.op != "CumulativeLogsumexp" else None
        axes = interpreter.axes_of(refs[index], len(shape))
        if axes is None or spread.axis not in axes:
            return spread
        counts = "Cum" in node.op
        if counts and not spread.varies:
            return spread._replace(place=True)
        interpreter.couple(node, Coupling.PLACE if counts else Coupling.TOGETHER)
        return spread._replace(place=False)

    return rule


def _along_last(interpreter: Interpreter, node: NodeDef) -> None:
    """Handles an operation along the last axis."""
    ref = interpreter.graph.inputs(node.name)[0]
    spread, shape = interpreter.of(ref), interpreter.shape(ref)
    if shape and spread.axis == len(shape) - 1 and spread.varies:
        interpreter.couple(node, Coupling.TOGETHER)


def _reversed_sequences(interpreter: Interpreter, node: NodeDef) -> None:
    spread = interpreter.inputs(node)[0]
    if spread.axis is not None and spread.axis == node.attr["seq_dim"].i:
        interpreter.couple(node, Coupling.TOGETHER)


def _alike(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles zeros or ones in the shape of a tensor."""
    spread = interpreter.inputs(node)[0]
    return Spread(axis=spread.axis, outer=0, known=spread.known, partial=spread.partial)


def _filled(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles a value in every element, or along new axes."""
    index = 1 if node.op == "Fill" else 0
    ref = interpreter.graph.inputs(node.name)[index]
    spread = interpreter.of(ref)
    axis = interpreter.batch_axis(node, 0, [(ref, spread)])
    if spread.axis is None and axis is not None:
        spread = interpreter.fixed(node, index, rows=True)._replace(outer=0)
    return spread._replace(axis=axis)


def _chosen_elements(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    """Handles elements of the first input at other places, or zeros between them."""
    first, *others = interpreter.inputs(node)
    return first if first.axis is None and all(other.constant for other in others) else None


# ---- functions


def _called(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread]:
    """Returns the spreads of a call's results."""
    refs = interpreter.graph.inputs(node.name)
    body = interpreter.body(node.attr["f"].func.name, *interpreter.call_shapes(refs))
    if body is None:
        return _unknown(interpreter, node)
    scalars = interpreter.scalars_of(body, refs)
    inside = interpreter.inside(body, [interpreter.of(ref) for ref in refs], scalars)
    return _taken_over(interpreter, node, body, inside)


def _branched(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread]:
    """Returns what the branches have in common; the choice mustn't depend on a slice."""
    _, *refs = interpreter.graph.inputs(node.name)
    used = _used(interpreter, node)[1:]
    chosen = interpreter.choice(node)
    if chosen.varies:
        interpreter.couple(node, Coupling.NOT_LINEAR if interpreter.in_loss(node) else Coupling.TOGETHER)
    elif not chosen.constant:
        interpreter.couple(node, Coupling.BATCH_SIZE)
    results: list[list[Spread]] = []
    for name in function_names(node):
        body = interpreter.body(name, *interpreter.call_shapes(refs))
        if body is None:
            return _unknown(interpreter, node)
        inside = interpreter.inside(body, used, interpreter.scalars_of(body, refs))
        results.append(list(_taken_over(interpreter, node, body, inside)))
    merged = [_merged(several) for several in zip(*results, strict=True)]
    return [spread._replace(known=spread.known and chosen.known) for spread in merged]


def _looped(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread]:
    """Returns the spreads of a loop's variables that hold in every round."""
    refs = interpreter.graph.inputs(node.name)
    spreads = _used(interpreter, node)
    try:
        few, many = (interpreter.inference.call(node, shapes) for shapes in interpreter.call_shapes(refs))
    except PassError:  # The body takes other numbers of samples only.
        few = many = None
    if few is None or many is None:
        return _unknown(interpreter, node)
    body = interpreter.body(node.attr["body"].func.name, few, many)
    condition = interpreter.body(node.attr["cond"].func.name, few, many)
    if body is None or condition is None:
        return _unknown(interpreter, node)
    same = [result == argument for argument, result in zip(body.arguments, body.results, strict=True)]
    scalars = interpreter.scalars_of(body, refs, same)
    for _ in range(_MOST_ROUNDS):
        inside = interpreter.inside(body, spreads, scalars)
        after = [_merged(both) for both in zip(spreads, map(inside.of, body.results), strict=True)]
        if after == spreads:
            break
        spreads = after
    else:
        return _unknown(interpreter, node)
    _taken_over(interpreter, node, body, inside)
    asked = interpreter.inside(condition, spreads, interpreter.scalars_of(condition, refs, same))
    goes_on = asked.of(condition.results[0])
    carried = [ref for ref, kept in zip(refs, same, strict=True) if not kept and interpreter.is_float(ref)]
    for number, (ref, spread) in enumerate(zip(refs, spreads, strict=True)):
        if spread.one_by_one and ref in carried:  # from sample to sample
            interpreter.couple(node, Coupling.TOGETHER)
            spreads[number] = Spread(varies=True, linear=False, known=spread.known)
    if carried and goes_on.varies:
        interpreter.couple(node, Coupling.NOT_LINEAR if interpreter.in_loss(node) else Coupling.TOGETHER)
    elif carried and not goes_on.constant:
        interpreter.couple(node, Coupling.BATCH_SIZE)
    if any(spread.axis is not None and spread.degree != 0 for spread in spreads):
        interpreter.couple(node, Coupling.BATCH_SIZE)
    outputs = []
    for ref, spread, kept in zip(refs, spreads, same, strict=True):
        degree = spread.degree if spread.axis is None else 0
        if not (kept or goes_on.constant or interpreter.is_float(ref) or interpreter.is_handle(ref)):
            degree = None  # It may count rounds.
        outputs.append(spread._replace(known=spread.known and (kept or goes_on.known), degree=degree))
    return outputs


def _used(interpreter: Interpreter, node: NodeDef) -> list[Spread]:
    """Returns the inputs' spreads; bodies don't use sums of samples linearly, except to pass them on."""
    refs = interpreter.graph.inputs(node.name)
    has_rows = any(spread.axis is not None for spread in interpreter.inputs(node))
    return [interpreter.fixed(node, index, rows=has_rows) for index in range(len(refs))]


def _taken_over(interpreter: Interpreter, node: NodeDef, body: Body, inside: Interpreter) -> list[Spread]:
    """Assigns a body's couplings to the node that runs it; returns the spreads of the results."""
    for _, coupling in inside.couplings:
        interpreter.couple(node, coupling)
    return [inside.of(ref) for ref in body.results]


def _unknown(interpreter: Interpreter, node: NodeDef, why: Coupling = Coupling.UNKNOWN) -> Sequence[Spread]:
    """Notes that nothing is known of a body that can't be interpreted."""
    if any(spread.axis is not None and spread.varies for spread in interpreter.inputs(node)):
        interpreter.couple(node, why)
    return interpreter.unordered(node)


def _merged(several: Sequence[Spread]) -> Spread:
    """Returns a spread that holds for each of several tensors, one of which is chosen."""
    if len(set(several)) == 1:
        return several[0]
    axes = [spread.axis for spread in several if spread.axis is not None]
    degrees = {spread.degree for spread in several}
    return Spread(
        axis=axes[0] if axes else None,
        outer=common_outer(several),
        varies=any(spread.varies for spread in several),
        degree=degrees.pop() if len(degrees) == 1 else None,
        linear=all(spread.linear for spread in several),
        known=all(spread.known for spread in several),
        place=any(spread.place for spread in several),
        partial=any(spread.partial for spread in several),
        shared=not axes and all_shared(several),
        lengths=any(spread.lengths for spread in several),
    )


_SAME = ("Identity", "StopGradient", "Neg", "PreventGradient", "CheckNumerics", "EnsureShape", "Snapshot")
_SUMS = ("AddV2", "Add", "Sub", "AddN", "BiasAdd")
_PRODUCTS, _QUOTIENTS = ("Mul", "MulNoNan"), ("RealDiv", "Div", "DivNoNan")
_RISING = ("Maximum", "Minimum", "ClipByValue", "Relu", "Relu6", "Sqrt", "Exp", "Log", "Log1p", "Ceil", "Floor", "Rint")
_DIAGONALS = ("MatrixDiag", "MatrixDiagPart", "MatrixSetDiag")
_MOVES = (
    *(f"{name}{version}" for name in _DIAGONALS for version in ("", "V2", "V3")),
    *("Diag", "DiagPart", "MatrixBandPart", "Pad", "MirrorPad"),
)
_TABLES = (
    *("UnsortedSegmentSum", "SegmentSum", "SegmentSumV2", "SparseSegmentSum", "Bincount", "DenseBincount"),
    *("ScatterNd", "TensorScatterAdd", "HistogramFixedWidth"),
)
_PLACING = (
    *(f"{name}{of}" for name in ("Segment", "UnsortedSegment") for of in ("Max", "Min", "Prod")),
    *(f"Segment{of}" for of in ("Mean", "MaxV2", "MinV2", "ProdV2")),
    *(f"SparseSegment{of}" for of in ("Mean", "SqrtN", "SumWithNumSegments", "MeanWithNumSegments")),
    *("TensorScatterUpdate", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin"),
    *("DynamicStitch", "ParallelDynamicStitch", "SparseTensorDenseMatMul", "RandomShuffle"),
)
"""Ops whose rows aren't in the order of their inputs', or in one that isn't known."""
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_RISING, _rising),
    **dict.fromkeys(("Select", "SelectV2"), _chosen),
    **dict.fromkeys(_PRODUCTS, _times),
    **dict.fromkeys(_QUOTIENTS, functools.partial(_times, signs=(1, -1))),
    **dict.fromkeys(("Sum", "Mean"), _reduced),
    **dict.fromkeys(("Max", "Min", "Prod", "Any", "All", "EuclideanNorm", "ArgMax", "ArgMin"), _extreme),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    **dict.fromkeys(("Einsum", "XlaEinsum"), _einsum),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), _batch_norm),
    **dict.fromkeys(_MOVES, _chosen_elements),
    **dict.fromkeys(_TABLES, _added_up),
    **dict.fromkeys(_PLACING, lambda interpreter, node: interpreter.unordered(node)),
    **dict.fromkeys(("PyFunc", "PyFuncStateless", "EagerPyFunc"), functools.partial(_unknown, why=Coupling.PYTHON)),
    **dict.fromkeys(("SpaceToBatch", "SpaceToBatchND", "BatchToSpace", "BatchToSpaceND"), _between_axes),
    **dict.fromkeys(("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"), _along(1)),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopK", "TopKV2"), _along_last),
    **dict.fromkeys(("ZerosLike", "OnesLike"), _alike),
    **dict.fromkeys(("Fill", "BroadcastTo"), _filled),
    **dict.fromkeys((f"QuantizeAndDequantize{version}" for version in ("V2", "V3", "V4")), _quantized),
    "Cast": _cast,
    "IdentityN": _identities,
    "CollectiveReduceV2": _reduced_over_replicas,
    "Square": _square,
    "L2Loss": _half_of_squares,
    "Roll": _along(2),
    "ReverseSequence": _reversed_sequences,
    **INDEXING,
    **dict.fromkeys(CALLS, _called),
    **dict.fromkeys(BRANCHES, _branched),
    **dict.fromkeys(LOOPS, _looped),
}
"""Each operation's rule; if it is missing, or returns None, see `Interpreter.generic`."""
