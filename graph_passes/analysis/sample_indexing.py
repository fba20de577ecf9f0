"""Spreads of the results of operations that move, cut, join and look up elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from graph_passes.analysis.sample_interpreter import Interpreter, Rule
from graph_passes.ir.graph import NodeDef, Ref
from graph_passes.ir.spreads import CONSTANT, Coupling, Spread, together


def _mixed(interpreter: Interpreter, node: NodeDef, spread: Spread, coupling: Coupling) -> Spread:
    """Notes a coupling if samples differ; the interpretation continues as if there were none."""
    if spread.varies:
        interpreter.couple(node, coupling)
    return spread


def _reshaped(interpreter: Interpreter, node: NodeDef) -> Spread:
    ref, out = interpreter.graph.inputs(node.name)[0], Ref(node.name)
    spread, shape, lead = interpreter.of(ref), interpreter.shape(out), interpreter.lead(ref)
    rows = interpreter.rows(out)
    if spread.axis is None or spread.one_by_one:
        return spread
    if shape is None:
        return spread._replace(outer=spread.outer if lead == 1 else spread.outer and None)
    growing = interpreter.growing(out)
    before: int | None = 1
    for axis, size in enumerate(shape):
        if axis in growing or (not growing and size is None):
            if lead is None or before is None:
                return spread._replace(axis=axis, outer=None if spread.outer else spread.outer)
            outer, rest = divmod(lead, before)
            if rest or (rows is not None and rows % outer):
                return _mixed(interpreter, node, spread, Coupling.TOGETHER)._replace(axis=axis, outer=None)
            return spread._replace(axis=axis, outer=outer)
        before = None if before is None or size is None else before * size
    return _mixed(interpreter, node, spread, Coupling.TOGETHER)._replace(axis=None, outer=1, linear=False)


def _moved(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles the same elements with other axes."""
    refs = interpreter.graph.inputs(node.name)
    spread = interpreter.of(refs[0])
    if spread.axis is None or spread.one_by_one:
        return spread
    if node.op == "Transpose" and (axes := interpreter.integers(refs[1])) is not None:
        return spread._replace(axis=axes.index(spread.axis))
    shape = interpreter.shape(refs[0])
    if shape is not None and node.op == "ExpandDims" and (axes := interpreter.axes_of(refs[1], len(shape) + 1)):
        return spread._replace(axis=spread.axis + (axes[0] <= spread.axis))
    if shape is not None and node.op == "Squeeze" and (dims := node.attr["squeeze_dims"].list.i):
        return spread._replace(axis=spread.axis - sum(dim % len(shape) < spread.axis for dim in dims))
    return spread._replace(axis=interpreter.batch_axis(node, 0, [(refs[0], spread)]))


def _cut(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles `StridedSlice` and `Slice`."""
    refs = interpreter.graph.inputs(node.name)
    spread = interpreter.of(refs[0])
    if spread.axis is None or spread.one_by_one:
        return spread
    part = _slice_of(interpreter, node, refs, spread.axis)
    axis = interpreter.batch_axis(node, 0, [(refs[0], spread)])
    if part is None:
        return spread._replace(axis=axis)
    sizes = interpreter.shape(refs[0]), interpreter.shape(Ref(node.name))
    before = None if sizes[0] is None else sizes[0][spread.axis]
    after = None if sizes[1] is None or axis is None else sizes[1][axis]
    first, step = part
    if before and after and step == 1 and first is not None and spread.outer:
        samples = before // spread.outer
        if after % samples == 0 and first % samples == 0:
            return spread._replace(axis=axis, outer=after // samples)
    spread = _mixed(interpreter, node, spread, Coupling.PLACE)
    remaining = interpreter.differing(Ref(node.name)) if axis is None else [axis]
    return spread._replace(axis=remaining[0] if remaining else None, outer=spread.outer and None)


def _slice_of(interpreter: Interpreter, node: NodeDef, refs: Sequence[Ref], axis: int) -> tuple[int | None, int] | None:
    """Returns where a slice begins on an axis and its step; None where it takes the axis whole."""
    begin = interpreter.numbers(refs[1])
    if node.op == "Slice":
        size, shape = interpreter.numbers(refs[2]), interpreter.shape(refs[0])
        if begin is None or size is None or axis >= size[0].size:
            return None
        whole = size[0][axis] < 0 or (shape is not None and size[0][axis] == shape[axis])
        return None if whole and begin[0][axis] == 0 else (int(begin[0][axis]), 1)
    masks = {name: node.attr[f"{name}_mask"].i for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    shape = interpreter.shape(refs[0])
    spec_shape = interpreter.shape(refs[1])
    if shape is None or spec_shape is None or spec_shape[0] is None:
        return None
    entries = range(spec_shape[0])
    new = sum(1 for entry in entries if masks["new_axis"] >> entry & 1)
    dim = 0
    for entry in entries:
        if masks["ellipsis"] >> entry & 1:
            dim += len(shape) - (spec_shape[0] - 1 - new)
        elif not masks["new_axis"] >> entry & 1:
            if dim == axis:
                return _entry(interpreter, refs, masks, entry, shape[axis])
            dim += 1
        if dim > axis:
            return None
    return None


def _entry(
    interpreter: Interpreter, refs: Sequence[Ref], masks: Mapping[str, int], entry: int, size: int | None
) -> tuple[int | None, int] | None:
    """Returns one entry of a strided slice; see `_slice_of`."""
    begin, end, steps = (interpreter.numbers(ref) for ref in refs[1:4])
    step = 1 if steps is None else int(steps[0][entry])
    if masks["shrink_axis"] >> entry & 1:
        return None, 1
    starts = masks["begin"] >> entry & 1 or (begin is not None and begin[0][entry] == 0)
    stops = masks["end"] >> entry & 1 or (end is not None and size is not None and end[0][entry] == size)
    if starts and stops and step == 1:
        return None
    if step != 1 or (begin is None and not starts):
        return None, step
    first = 0 if starts or begin is None else int(begin[0][entry])
    return first + (size or 0 if first < 0 else 0), step


def _split(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread]:
    """Handles `Split`, `SplitV` and `Unpack`: parts along an axis."""
    refs = interpreter.graph.inputs(node.name)
    ref = refs[1] if node.op == "Split" else refs[0]
    count, spread, shape = len(interpreter.dtypes(node.name)), interpreter.of(ref), interpreter.shape(ref)
    if spread.axis is None or shape is None:
        return [spread] * count
    if node.op == "Unpack":
        axis = node.attr["axis"].i % len(shape)
    else:
        named = interpreter.axes_of(refs[0] if node.op == "Split" else refs[2], len(shape))
        axis = named[0] if named else -1
    if axis != spread.axis:
        lower = node.op == "Unpack" and axis < spread.axis
        return [spread._replace(axis=spread.axis - lower)] * count
    if node.op == "Split" and spread.outer and spread.outer % count == 0:
        return [spread._replace(outer=spread.outer // count)] * count
    sizes, length = interpreter.numbers(refs[1]) if node.op == "SplitV" else None, shape[axis]
    if sizes is not None and length is not None and spread.outer:
        samples = length // spread.outer
        if not (sizes[0] % samples).any() and sizes[0].min() > 0:
            return [spread._replace(outer=int(size) // samples) for size in sizes[0]]
    spread = _mixed(interpreter, node, spread, Coupling.PLACE)
    return [spread._replace(axis=None if node.op == "Unpack" else axis, outer=spread.outer and None)] * count


def _joined(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    """Handles `ConcatV2` and `Pack`."""
    refs = interpreter.graph.inputs(node.name)
    values = refs[:-1] if node.op == "ConcatV2" else refs
    used = [(ref, interpreter.of(ref)) for ref in values]
    rows = [spread for _, spread in used if spread.axis is not None]
    if not rows:
        return together(spread for _, spread in used)
    shape = interpreter.shape(values[0])
    axes, outer = None, None
    if node.op == "ConcatV2" and shape is not None:
        axes = interpreter.axes_of(refs[-1], len(shape))
    if axes and axes[0] == rows[0].axis:
        outer = _in_a_row(interpreter, used)
    elif axes or node.op == "Pack":
        outer = interpreter.outer(node, 0, used)
    if axes and axes[0] == rows[0].axis and len(rows) < len(used):
        _mixed(interpreter, node, rows[0]._replace(varies=any(row.varies for row in rows)), Coupling.TOGETHER)
    degrees = {spread.degree for ref, spread in used if interpreter.is_float(ref) and not _empty(interpreter, ref)}
    if len(degrees) > 1:
        interpreter.couple_size(node)
    return Spread(
        axis=interpreter.batch_axis(node, 0, used),
        outer=outer,
        varies=any(spread.varies for _, spread in used),
        degree=degrees.pop() if len(degrees) == 1 else 0,
        known=all(spread.known for _, spread in used),
        place=any(spread.place for _, spread in used),
        partial=any(spread.partial for _, spread in used),
    )


def _in_a_row(interpreter: Interpreter, used: Sequence[tuple[Ref, Spread]]) -> int | None:
    """Returns the parts of an axis along which tensors are concatenated: of as many rows for each sample in all."""
    moved = [(ref, spread.outer) for ref, spread in used if spread.axis is not None]
    outers = [outer for _, outer in moved if outer is not None]
    lengths = [rows for ref, _ in moved if (rows := interpreter.rows(ref)) is not None]
    if len(outers) < len(moved) or 0 < len(lengths) < len(moved):
        return None
    if not lengths or not any(outers):
        return sum(outers)
    inner = {rows // outer for rows, outer in zip(lengths, outers, strict=True) if outer}
    each = inner.pop()
    return None if inner or any(rows % each for rows in lengths) else sum(lengths) // each


def _empty(interpreter: Interpreter, ref: Ref) -> bool:
    return 0 in (interpreter.shape(ref) or ())


def _tiled(interpreter: Interpreter, node: NodeDef) -> Spread:
    refs = interpreter.graph.inputs(node.name)
    spread = interpreter.of(refs[0])
    axis = interpreter.batch_axis(node, 0, [(refs[0], spread)])
    if spread.axis is None:
        return spread if axis is None else interpreter.fixed(node, 0, rows=True)._replace(axis=axis, outer=0)
    times = interpreter.numbers(refs[1])
    if spread.one_by_one or not spread.outer:
        return spread
    return spread._replace(outer=None if times is None else spread.outer * int(times[0][spread.axis]))


def _gathered(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    """Handles `GatherV2`: rows of a table, or of the samples themselves."""
    refs = interpreter.graph.inputs(node.name)
    table, indices = interpreter.of(refs[0]), interpreter.of(refs[1])
    shape = interpreter.shape(refs[0])
    axes = [0] if len(refs) < 3 else None if shape is None else interpreter.axes_of(refs[2], len(shape))
    if table.axis is None:
        if indices.place and not indices.partial:
            interpreter.couple(node, Coupling.PLACE)
            return _without_place(interpreter, node)
        return None if indices.axis is not None else table._replace(varies=table.varies or indices.varies)
    if axes is None or table.axis != axes[0] or table.axis < node.attr["batch_dims"].i:
        return _without_place(interpreter, node) if indices.axis is None else None
    return _picked(interpreter, node, table, indices)


def _gathered_nd(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    refs = interpreter.graph.inputs(node.name)
    table, indices = interpreter.of(refs[0]), interpreter.of(refs[1])
    depth = (interpreter.shape(refs[1]) or (None,))[-1]
    if table.axis is None:
        return _gathered(interpreter, node)
    if table.one_by_one or (depth is not None and depth <= table.axis):
        return None
    return _picked(interpreter, node, table, indices)


def _picked(interpreter: Interpreter, node: NodeDef, table: Spread, indices: Spread) -> Spread:
    """Handles lookups of samples among the samples: each its own, by its place, or others."""
    if indices.axis is None:
        _mixed(interpreter, node, table, Coupling.PLACE)
        return Spread(varies=table.varies, linear=False, known=table.known and indices.known)
    if not indices.place:
        _mixed(interpreter, node, table, Coupling.TOGETHER)
    spread = _without_place(interpreter, node)
    axis = indices.axis if spread.axis is None else spread.axis
    return spread._replace(axis=axis, partial=indices.partial, outer=_outer_by_place(interpreter, node, table))


def _outer_by_place(interpreter: Interpreter, node: NodeDef, table: Spread) -> int | None:
    """Returns the parts of the batch axis of looked up samples."""
    refs, out = interpreter.graph.inputs(node.name), Ref(node.name)
    numbers, own, rows = interpreter.numbers(refs[1]), interpreter.rows(refs[0]), interpreter.rows(out)
    if numbers is None:
        return interpreter.of(refs[1]).outer or None
    places = numbers[0].ravel()
    if not own or not rows or not table.outer or places.size != rows * interpreter.samples or np.isnan(places).any():
        return None
    samples = places % (own * interpreter.samples) // (own // table.outer) % interpreter.samples
    for outer in range(1, rows + 1):
        wanted = np.arange(places.size) // (rows // outer) % interpreter.samples
        if rows % outer == 0 and np.array_equal(samples, wanted):
            return outer
    _mixed(interpreter, node, table, Coupling.PLACE)
    return None


def _without_place(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles sample-by-sample operations, whatever the places are."""
    used = list(zip(interpreter.graph.inputs(node.name), interpreter.inputs(node), strict=True))
    return interpreter.by_sample(node, used)._replace(degree=used[0][1].degree, place=False)


def _where(interpreter: Interpreter, node: NodeDef) -> Spread | None:
    spread = interpreter.inputs(node)[0]
    if spread.one_by_one:
        return None
    if spread.axis is None:
        return Spread(varies=spread.varies, linear=not spread.varies, known=spread.known)
    outer = spread.outer if spread.axis == 0 else None
    return Spread(axis=0, outer=outer, varies=True, known=spread.known, place=True, partial=True)


def _unique(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread] | None:
    """Handles the different values among all, and each sample's position among these."""
    spread = interpreter.inputs(node)[0]
    if spread.axis is None or spread.one_by_one:
        return None
    values = Spread(axis=0, outer=None, varies=True, known=spread.known, partial=True)
    places = Spread(axis=0, outer=spread.outer, varies=True, known=spread.known, place=True)
    return [values, places, *[values] * (len(interpreter.dtypes(node.name)) - 2)]


def _range(interpreter: Interpreter, node: NodeDef) -> Spread:
    known = all(spread.known for spread in interpreter.inputs(node))
    if interpreter.growing(Ref(node.name)):
        return Spread(axis=0, outer=0, known=known, place=True)
    return Spread(known=known)


def _listed(interpreter: Interpreter, node: NodeDef) -> Spread:
    """Handles `TensorListFromTensor`: a list has the spread of its elements."""
    spread = interpreter.inputs(node)[0]
    return spread if spread.axis is None else spread._replace(axis=spread.axis - 1)


def _element(interpreter: Interpreter, node: NodeDef) -> Sequence[Spread]:
    refs = interpreter.graph.inputs(node.name)
    spread = interpreter.of(refs[0])
    if spread.axis == -1 and not _in_turn(interpreter, node):
        spread = _mixed(interpreter, node, spread, Coupling.PLACE)._replace(axis=None, linear=False)
    return [spread] * len(interpreter.dtypes(node.name))


def _in_turn(interpreter: Interpreter, node: NodeDef) -> bool:
    """Returns whether a list with an element for each sample is accessed at its loop's current position."""
    if node.op not in ("TensorListGetItem", "TensorListSetItem"):
        return False
    place = interpreter.graph.inputs(node.name)[1]
    interpreter.places.add(place)
    return len(interpreter.places) == 1 and interpreter.graph.nodes[place.node].op == "Placeholder"


def _stacked(interpreter: Interpreter, node: NodeDef) -> Spread:
    spread = interpreter.inputs(node)[0]
    return spread if spread.axis is None else spread._replace(axis=spread.axis + 1)


def _set(interpreter: Interpreter, node: NodeDef) -> Spread:
    spreads = interpreter.inputs(node)
    rows = next((spread for spread in (spreads[-1], spreads[0]) if spread.axis is not None), None)
    if rows is not None and rows.axis == -1 and not _in_turn(interpreter, node):
        return _mixed(interpreter, node, rows, Coupling.PLACE)
    return rows or together([spreads[0], spreads[-1]])


def _new_list(_: Interpreter, __: NodeDef) -> Spread:
    return CONSTANT


INDEXING: Mapping[str, Rule] = {
    "Reshape": _reshaped,
    **dict.fromkeys(("Transpose", "ExpandDims", "Squeeze"), _moved),
    **dict.fromkeys(("StridedSlice", "Slice"), _cut),
    **dict.fromkeys(("Split", "SplitV", "Unpack"), _split),
    **dict.fromkeys(("ConcatV2", "Pack"), _joined),
    "Tile": _tiled,
    **dict.fromkeys(("Gather", "GatherV2"), _gathered),
    "GatherNd": _gathered_nd,
    "Where": _where,
    **dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts"), _unique),
    "Range": _range,
    "TensorListFromTensor": _listed,
    **dict.fromkeys(("TensorListGetItem", "TensorListPopBack"), _element),
    "TensorListStack": _stacked,
    **dict.fromkeys(("TensorListSetItem", "TensorListPushBack"), _set),
    **dict.fromkeys(("TensorListReserve", "EmptyTensorList"), _new_list),
}
"""Rules for `RULES`."""
