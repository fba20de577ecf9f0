"""What profiles are made of: costs through measured points, times by operator, recomputation, and a budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled import captured, mlp
from programs import staged, two_layers

from dapple_tf.describe.layer_profile import ZERO, Cost, LayerProfile, NeededLater
from dapple_tf.describe.profile import Profile
from dapple_tf.frontend.layer_cuts import with_functions, with_gradients
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.layers_by_operator import (
    MeasuredOperators,
    layers_by_operator,
    needed_later,
    stage_operators,
    with_recomputation,
)
from dapple_tf.measuring.measured_layers import nearest_cost, shares
from dapple_tf.measuring.turns import PHASES, TimeBudget
from dapple_tf.operators.op_costs import OperatorCosts


def test_the_nearest_cost() -> None:
    exact = nearest_cost([2, 4, 8], [3.0, 4.0, 6.0])
    assert (exact.fixed, exact.per_sample) == (pytest.approx(2.0), pytest.approx(0.5))
    assert nearest_cost([4], [2.0]) == Cost(0, 0.5)
    falling = nearest_cost([1, 2], [2.0, 1.0])
    assert falling.per_sample == 0 and 1 <= falling.fixed <= 2
    through_zero = nearest_cost([1, 2], [1.0, 3.0])
    assert through_zero.fixed == 0 and 1 <= through_zero.per_sample <= 1.5
    assert nearest_cost([1, 2], [0.0, 0.0]) == ZERO


def test_the_cost_through_two_points() -> None:
    assert Cost.through((2, 4), (10, 14)) == Cost(6, 2)
    assert Cost.through((2, 4), (10, 8)) == Cost(10, 0)
    assert Cost.through((2, 4), (1, 4)) == Cost(0, 1)


@given(st.lists(st.just(0.0) | st.floats(1e-9, 1e3), min_size=2, max_size=5))
def test_no_part_is_negative(times: list[float]) -> None:
    samples = [2**index for index in range(len(times))]
    nearest = nearest_cost(samples, times)  # A Cost refuses negative parts.
    assert nearest.at(samples[-1]) >= 0.99 * min(times)
    exact = Cost.through(samples[:2], times[:2])
    assert all(exact.at(x) >= t - 1e-9 for x, t in zip(samples[:2], times[:2], strict=True))


def test_shares_add_up() -> None:
    np.testing.assert_allclose(shares(np.array([1.0, 3.0, 0.5]), 0.5, 6.0), [1.0, 5.0, 0.0])
    np.testing.assert_allclose(shares(np.array([1.0, 0.5]), 0.5, 0.0), [0.5, 0.0])
    np.testing.assert_allclose(shares(np.array([0.1, 0.5]), 0.5, 1.0), [0.0, 0.0])


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


ANYTHING = Profile("mlp", "device:CPU:0", (2, 8), (LayerProfile("any", ZERO, ZERO),), ())


class Layers:
    """The three layers of a model, for slices of 2 and 8 samples."""

    def __init__(self) -> None:
        model = mlp()
        self.table = VariableTable(model)
        self.table.add_optimizer(model.optimizer)
        self.program = with_functions(with_gradients(captured(model), ("first", "second")), "x_")
        self.operators = {samples: stage_operators(self.program, [(4,), ()], samples) for samples in (2, 8)}
        signatures = [stage.signatures for stage in self.operators[2]]
        self.products = [next(name for name, made in each.items() if made.op == "MatMul") for each in signatures]

    def profile(self, measured: MeasuredOperators | None) -> Profile:
        names = ("first", "second", "logits")
        return layers_by_operator(self.program, names, self.table, [(4,), ()], self.operators, measured, ANYTHING)


def test_what_a_trace_does_not_tell_takes_nothing_and_all_add_up_to_the_whole() -> None:
    """TensorFlow runs a bias with its convolution: told once, and estimated once more, it counted twice."""
    layers = Layers()
    first, second, _ = layers.products
    traced = [{first: 1.0}, {second: 3.0}, {}]
    profile = layers.profile(MeasuredOperators({2: traced, 8: traced}, {2: 8.0, 8: 16.0}))
    assert profile.method == "operators"
    assert [layer.forward.at(2) for layer in profile.layers] == pytest.approx([2.0, 6.0, 0.0])
    assert [layer.forward.at(8) for layer in profile.layers] == pytest.approx([4.0, 12.0, 0.0])
    assert profile.total("backward").at(8) == 0


def test_a_size_for_which_there_was_no_time_grows_as_rooflines_do() -> None:
    layers = Layers()
    first = layers.products[0]
    profile = layers.profile(MeasuredOperators({2: [{first: 1.0}, {}, {}]}, {2: 4.0}))
    few, many = (layers.operators[samples][0].estimates(OperatorCosts(), "CPU")[first] for samples in (2, 8))
    assert profile.layers[0].forward.at(2) == pytest.approx(4.0)
    assert profile.layers[0].forward.at(8) == pytest.approx(4.0 * many / few)
    assert layers.profile(None).method == "rooflines"


def test_phases_that_are_over_tell_what_others_take() -> None:
    now = [100.0]
    budget = TimeBudget(20.0, clock=lambda: now[0])
    budget.begin("capture")
    now[0] += 2.0
    budget.begin("cut")
    assert budget.expected("operators") == pytest.approx(2.0 * PHASES["operators"])
    now[0] += 2.0
    budget.end()
    seconds = 4.0 / (1.0 + PHASES["cut"])
    assert budget.expected("operators", "layers") == pytest.approx(seconds * (PHASES["operators"] + PHASES["layers"]))
    assert (budget.spent, budget.left) == (4.0, 16.0)
    assert budget.allows("operators") and not budget.allows("operators", more=16.0)
    assert not budget.allows("layers")
    now[0] += 16.0
    assert not budget.allows("operators")


def test_without_end_there_is_time_for_all() -> None:
    budget = TimeBudget(None)
    budget.begin("capture")
    budget.end()
    assert budget.allows(*PHASES) and budget.left == float("inf")
