"""How long it takes to compute layers again, from made-up times."""

from __future__ import annotations

import pytest
from programs import staged, two_layers

from dapple_tf.describe.layer_profile import Cost, LayerProfile, NeededLater
from dapple_tf.measuring.recomputation import needed_later, with_recomputation


def test_a_part_has_the_share_of_its_operators_times() -> None:
    """tanh(x w) v, and a loss, which no gradient needs. What took no time has no share."""
    program = staged(two_layers(), "a")
    assert needed_later(program, [{"a/tanh": 1.0}, {"b/matmul": 3.0, "loss": 1.0}]) == [(), (NeededLater(2, 0.25),)]
    assert needed_later(program, [{}, {"b/matmul": 3.0, "gradient": 5.0}]) == [(), ()]


LAYERS = [
    LayerProfile("a", Cost(1.0, 3.0), Cost(2.0, 4.0)),
    LayerProfile("b", Cost(0.0, 2.0), Cost(0.0, 3.0), needed_later=(NeededLater(2, 0.5),)),
]
"""F and B take 3 + 12 n seconds, F of all that any backward needs 1 + 4 n."""


@pytest.mark.parametrize(
    ("samples", "ratio", "factor"),
    [(1, 1 + 2.5 / 15, 0.5), (2, 1 + 2.25 / 27, 0.25), (1, 2.0, 1.0), (1, 0.9, 0.0)],
)
def test_layers_share_what_recomputation_adds(samples: int, ratio: float, factor: float) -> None:
    """It adds at most F's time, whatever was measured, and never takes time off."""
    again = with_recomputation(LAYERS, samples, ratio)
    for layer, before in zip(again, LAYERS, strict=True):
        assert layer.recomputation is not None
        assert layer.recomputation.at(samples) == pytest.approx(before.forward.at(samples) * factor)
        assert layer.needed_later == before.needed_later


def test_layers_without_a_forward_tell_nothing() -> None:
    layers = [LayerProfile("a", Cost(), Cost(0.0, 1.0))]
    assert with_recomputation(layers, 1, 1.5) == layers
