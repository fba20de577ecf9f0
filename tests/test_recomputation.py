"""How long it takes to compute layers again, from made-up times."""

from __future__ import annotations

import pytest
from programs import staged, two_layers

from dapple_tf.describe.profile import Cost, LayerProfile, NeededLater
from dapple_tf.measuring.recomputation import needed_later, with_recomputation


def test_a_part_has_the_share_of_its_operators_times() -> None:
    """tanh(x w) v, and a loss, which no gradient needs. What took no time has no share."""
    program = staged(two_layers(), "a")
    assert needed_later(program, [{"a/tanh": 1.0}, {"b/matmul": 3.0, "loss": 1.0}]) == [(), (NeededLater(2, 0.25),)]
    assert needed_later(program, [{}, {"b/matmul": 3.0, "gradient": 5.0}]) == [(), ()]


LAYERS = [
    LayerProfile("a", Cost(1.0, 3.0), Cost()),
    LayerProfile("b", Cost(0.0, 2.0), Cost(), needed_later=(NeededLater(2, 0.5),)),
]
"""F of all that any backward needs takes 1 + 4 n seconds."""


@pytest.mark.parametrize(
    ("added", "factor"),
    [({1: 2.5}, 0.5), ({1: 1.0, 2: 6.0}, 0.5), ({1: 9.0}, 1.0), ({1: -1.0}, 0.0)],
)
def test_layers_share_what_recomputation_adds(added: dict[int, float], factor: float) -> None:
    """It adds at most F's time, whatever was measured, and never takes time off."""
    again = with_recomputation(LAYERS, added)
    assert [layer.recomputation for layer in again] == [layer.forward * factor for layer in LAYERS]
    assert [layer.needed_later for layer in again] == [layer.needed_later for layer in LAYERS]


def test_layers_without_a_forward_tell_nothing() -> None:
    layers = [LayerProfile("a", Cost(), Cost())]
    assert with_recomputation(layers, {1: 0.5}) == layers
