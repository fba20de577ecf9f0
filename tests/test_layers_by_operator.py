"""What layers take by what their operators took, told by made-up times."""

from __future__ import annotations

import pytest
from profiled import captured, mlp

from dapple_tf.describe.layer_profile import ZERO, LayerProfile
from dapple_tf.describe.profile import Profile
from dapple_tf.frontend.layer_cuts import with_functions, with_gradients
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.layers_by_operator import MeasuredOperators, layers_by_operator, stage_operators
from dapple_tf.operators.op_costs import OperatorCosts

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
