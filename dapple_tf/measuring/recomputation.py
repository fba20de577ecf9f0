"""What ``recompute="boundary"`` computes again, and how long that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dapple_tf.describe.layer_profile import LayerProfile, NeededLater
from graph_passes.analysis.recomputed_nodes import needed_from
from graph_passes.ir.program import Program


def needed_later(program: Program, seconds: Sequence[Mapping[str, float]]) -> list[tuple[NeededLater, ...]]:
    """Returns, for each layer, the parts of its F that its own backward doesn't need.

    Args:
        program: a stage for each layer, with functions.
        seconds: for each layer, operator -> its time, measured or estimated; others take none.
    """
    layers = []
    for index, (first, own) in enumerate(zip(needed_from(program), seconds, strict=True)):
        total = sum(own.get(name, 0.0) for name in first)
        parts: dict[int, float] = {}
        for name, layer in first.items():
            if layer > index and own.get(name, 0.0) > 0:
                parts[layer] = parts.get(layer, 0.0) + own[name]
        layers.append(tuple(NeededLater(layer, parts[layer] / total) for layer in sorted(parts)))
    return layers


def with_recomputation(layers: Sequence[LayerProfile], samples: int, ratio: float) -> list[LayerProfile]:
    """Returns layers with `LayerProfile.recomputation`, each in proportion to its F, and at most that.

    Args:
        layers: all of a model's layers.
        samples: of a slice.
        ratio: how many times as long F and B take together, as one stage of all layers that computes F again.
    """
    never = len(layers)
    once = sum(layer.forward.at(samples) + layer.backward.at(samples) for layer in layers)
    again = sum(
        layer.forward.at(samples) * (1 - sum(later.share for later in layer.needed_later if later.layer == never))
        for layer in layers
    )
    if again <= 0:
        return list(layers)
    factor = min(1.0, max(0.0, (ratio - 1) * once / again))
    return [dataclasses.replace(layer, recomputation=layer.forward * factor) for layer in layers]
