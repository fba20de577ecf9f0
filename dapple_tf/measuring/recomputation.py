"""Which part of each layer's F the backwards of stages need: what ``recompute="boundary"`` computes again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dapple_tf.describe.profile import Cost, NeededLater
from graph_passes.analysis.recomputed_nodes import needed_from
from graph_passes.ir.program import Program


def needed_later(
    program: Program, seconds: Sequence[Mapping[str, float]], forward: Sequence[Cost]
) -> list[tuple[NeededLater, ...]]:
    """Returns, for each layer, the parts of its F that its own backward doesn't need.

    A part has the share of the layer's F that its operators have.

    Args:
        program: a stage for each layer, with functions.
        seconds: for each layer, operator -> its time, measured or estimated; others take none.
        forward: the layers' F.
    """
    layers = []
    for index, (first, own) in enumerate(zip(needed_from(program), seconds, strict=True)):
        total = sum(own.get(name, 0.0) for name in first)
        parts: dict[int, float] = {}
        for name, layer in first.items():
            if layer > index and own.get(name, 0.0) > 0:
                parts[layer] = parts.get(layer, 0.0) + own[name]
        layers.append(tuple(NeededLater(layer, forward[index] * (parts[layer] / total)) for layer in sorted(parts)))
    return layers
