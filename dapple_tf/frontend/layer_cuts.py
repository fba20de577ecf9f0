"""Finding the layers that can be cut apart: the finest pipeline that the passes accept, a stage for each layer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras

from dapple_tf.common.keras_private import layers_of
from graph_passes.errors import PassError
from graph_passes.ir.program import LayerCall, Program
from graph_passes.pass_manager import run_passes
from graph_passes.passes.assign_stages import AssignStages, find_call
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import Partition, StageForm

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LayerStages:
    """The layers that can be cut apart.

    Attributes:
        names: the layers' names, by which plans cut after them. Layers that can't be cut apart count as one, under the
            last one's name.
        program: the graphs of a stage for each, with gradients.
    """

    names: tuple[str, ...]
    program: Program


def layer_stages(model: keras.Model, training: Program, inference: Program) -> LayerStages:
    """Finds the most layers that can be cut apart both in training and inference (where dropout, say, has no nodes).

    Args:
        model: the model.
        training: its captured training graph.
        inference: its captured prediction graph.
    """
    calls = training.roles.calls
    inferred = {(call.path, call.number) for call in inference.roles.calls if call.stop > call.start}
    candidates = [call for call in innermost_calls(model, calls) if (call.path, call.number) in inferred]
    if not candidates:
        return LayerStages((model.name,), with_gradients(training, ()))

    assigned: dict[tuple[str, ...], Program] = {}  # the cuts that were tried last, which are likely to come next

    def assign(cuts: tuple[str, ...]) -> Program:
        if cuts not in assigned:
            program = AssignStages(cuts).run(training)
            assigned.clear()
            assigned[cuts] = program
        return assigned[cuts]

    def both(cuts: tuple[str, ...]) -> None:
        crossing = [*assign(cuts).boundaries, *AssignStages(cuts).run(inference).boundaries]
        if own := [boundary.ref for boundary in crossing if boundary.whole or boundary.own_lengths]:
            raise PassError(f"tensor {own[0]} can't be split and joined by any plan")

    def differentiated(cuts: tuple[str, ...]) -> Program:
        return run_passes(assign(cuts), [BuildForward(), BuildBackward()])

    names = [name for call in candidates[:-1] if (name := cut_name(call, calls)) is not None]
    cuts = _without_empty_stages(assign, legal_cuts(names, both))
    try:
        program = differentiated(cuts)
    except PassError as error:
        logger.debug("some layers can't be differentiated apart: %s", error)
        cuts = legal_cuts(cuts, differentiated)
        program = differentiated(cuts)
    return LayerStages((*cuts, cut_name(candidates[-1], calls) or candidates[-1].path), program)


def with_gradients(program: Program, cuts: Sequence[str]) -> Program:
    """Runs passes 1 to 3: from a flat program to a graph for each stage, with its gradients."""
    return run_passes(program, [AssignStages(tuple(cuts)), BuildForward(), BuildBackward()])


def with_functions(
    program: Program,
    prefix: str,
    recompute: str = "none",
    *,
    samples: int | None = None,
    split: bool = False,
    on_gpu: bool = False,
) -> Program:
    """Runs pass 4: from graphs with gradients to functions F and B, named with a prefix unique in a session.

    Args:
        program: stages with graphs.
        prefix: start of the functions' names.
        recompute: as in `StageForm`.
        samples: samples of all slices, as training knows them; None for functions of any size.
        split: whether there are Bx and Bw in place of B.
        on_gpu: whether they run on a GPU.
    """
    form = StageForm(recompute, split=split, samples=samples, on_gpu=on_gpu)
    return run_passes(program, [Partition(form, prefix=prefix, counted=False)])


def innermost_calls(model: keras.Model, calls: Sequence[LayerCall]) -> list[LayerCall]:
    """Returns consecutive calls of layers that a plan may cut after, nested models' included."""
    innermost: list[LayerCall] = []

    def visit(container: Any, prefix: str, start: int, stop: int) -> None:
        items = [*getattr(container, "operations", ()), *layers_of(container, include_self=False, recursive=False)]
        children = {item.name: item for item in items}
        position = start
        for call in calls:
            inside = call.path.startswith(prefix) and "/" not in call.path[len(prefix) :]
            if not inside or call.start < position or call.stop > stop or call.start == call.stop:
                continue
            position = call.stop
            layer = children.get(call.path[len(prefix) :])
            before = len(innermost)
            if isinstance(layer, keras.Model):
                visit(layer, call.path + "/", call.start, call.stop)
            if len(innermost) == before:
                innermost.append(call)

    visit(model, "", 0, sys.maxsize)
    return innermost


def cut_name(call: LayerCall, calls: Sequence[LayerCall]) -> str | None:
    """Returns the name by which a plan cuts after a call; None if every name is ambiguous."""
    for name in (call.path, f"{call.path}#{call.number}"):
        with contextlib.suppress(PassError):  # The name is ambiguous.
            if find_call(name, calls) is call:
                return name
    return None


def legal_cuts(cuts: Sequence[str], attempt: Callable[[tuple[str, ...]], object]) -> tuple[str, ...]:
    """Returns the cuts with which ``attempt`` raises no PassError, trying all at once, then each half by itself."""
    try:
        attempt(tuple(cuts))
    except PassError as error:
        if len(cuts) <= 1:
            logger.debug("no cut after %s: %s", list(cuts), error)
            return ()
    else:
        return tuple(cuts)
    middle = len(cuts) // 2
    first, second = legal_cuts(cuts[:middle], attempt), legal_cuts(cuts[middle:], attempt)
    if not first or not second:
        return first or second
    together = (*first, *second)
    try:
        attempt(together)
    except PassError:  # Each half is legal, but not both at once: the second's cuts join the first's one by one.
        together = first
        for cut in second:
            with contextlib.suppress(PassError):
                attempt((*together, cut))
                together = (*together, cut)
    return together


def _without_empty_stages(assign: Callable[[tuple[str, ...]], Program], cuts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the cuts after which each stage has nodes of its own.

    A stage of integers alone (masks, positions) has none: each stage that reads these computes them. It joins the next
    stage; the last one joins the previous stage.
    """
    while cuts:
        occupied = set(assign(cuts).node_stage.values())
        empty = next((stage for stage in range(len(cuts) + 1) if stage not in occupied), None)
        if empty is None:
            break
        dropped = min(empty, len(cuts) - 1)
        cuts = cuts[:dropped] + cuts[dropped + 1 :]
    return cuts
