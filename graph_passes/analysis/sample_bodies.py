"""Spreads of functions' results: calls, branches, and loops round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.analysis.operator_traits import BRANCHES, LOOPS
from graph_passes.analysis.sample_interpreter import Body, Interpreter, Rule
from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import NodeDef, function_names
from graph_passes.ir.spreads import Coupling, Spread, all_shared, common_outer

_MOST_ROUNDS = 8
"""The most interpretations of a loop's body: dependences pass from variable to variable, round by round."""


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


def _unknown(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread]:
    """Notes that nothing is known of a body that can't be interpreted."""
    if any(spread.axis is not None and spread.varies for spread in interpreter.inputs(node)):
        interpreter.couple(node, Coupling.UNKNOWN)
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


BODIES: Mapping[str, Rule] = {
    **dict.fromkeys(CALLS, _called),
    **dict.fromkeys(BRANCHES, _branched),
    **dict.fromkeys(LOOPS, _looped),
}
"""Rules for `RULES`."""
