"""The profiler: what it accounts for, structure apart from numbers; no wall-clock speed is asserted."""

from __future__ import annotations

import functools
import itertools
import logging
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from profiled import captured, mlp

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import ZERO, ProfileError
from dapple_tf.describe.profile import Profile
from dapple_tf.measuring import measured_layers
from dapple_tf.measuring.profiler import profile
from dapple_tf.measuring.timed_step import StepRuns
from dapple_tf.measuring.turns import TimeBudget
from graph_passes.ir.program import VariableKind
from graph_passes.passes.assign_stages import AssignStages

layers = keras.layers


def measured(model: keras.Model, batch_size: Any = 4, **options: Any) -> Profile:
    return profile(model, batch_size, **({"cache": False, "repeats": 1, "progress": False} | options))


@functools.cache
def mlp_by_layer() -> Profile:
    """A profile of `mlp` of slices of 2 and 8 samples, measured layer by layer."""
    return measured(mlp(), [2, 8], budget=hurried("layers"))


def nbytes(variable: keras.Variable) -> int:
    return int(np.asarray(variable.value).nbytes)


def check(model_profile: Profile, model: keras.Model) -> None:
    """What holds of every profile."""
    program = captured(model)
    cuts = tuple(layer.name for layer in model_profile.layers[:-1])
    AssignStages(cuts).run(program)
    assert model_profile.total("forward").at(4) > 0
    assert model_profile.total("backward").at(4) > 0
    assert model_profile.step_seconds >= 0
    assert model_profile.task_seconds > 0
    for layer in model_profile.layers:
        assert layer.backward_weight is not None
        assert layer.backward_weight.fixed <= layer.backward.fixed
        assert layer.backward_weight.per_sample <= layer.backward.per_sample
        if not model_profile.estimated:
            assert layer.recomputation is not None and layer.recomputation.at(4) <= layer.forward.at(4) * (1 + 1e-9)
    assert model_profile.parameter_bytes == sum(nbytes(variable) for variable in model.trainable_variables)
    used = [v for v in program.roles.variables if v.kind is VariableKind.STATE and v.value is not None]
    state = sum(tf.dtypes.as_dtype(v.dtype).size * int(np.prod(v.shape)) for v in used)
    assert sum(layer.state_bytes for layer in model_profile.layers) == state
    assert Profile.from_json(model_profile.to_json()) == model_profile


def test_a_chain() -> None:
    model_profile = mlp_by_layer()
    check(model_profile, mlp())
    assert [layer.name for layer in model_profile.layers] == ["first", "second", "logits"]
    assert [(t.producer, t.consumers, t.bytes.at(1)) for t in model_profile.tensors] == [
        (0, (1,), 24.0),
        (1, (2,), 20.0),
    ]
    assert [layer.output_bytes.at(3) for layer in model_profile.layers] == [72.0, 60.0, 0.0]
    assert [layer.parameter_bytes for layer in model_profile.layers] == [4 * 30, 4 * 35, 4 * 18]
    assert [layer.slot_bytes for layer in model_profile.layers] == [8 * 30, 8 * 35, 8 * 18]
    first, second, _ = model_profile.layers
    assert first.backward_weight == first.backward  # Nothing flows back into the input.
    assert second.backward_weight is not None
    # What tanh's gradient needs is its result, which the next layer's needs too.
    assert first.residual_bytes.at(10) == 240.0 and first.residual_bytes.fixed == 0
    assert model_profile.batch_sizes == (2, 8)
    # tanh's gradient needs all of a layer; the last one has the loss besides, which no gradient needs.
    assert [[later.layer for later in layer.needed_later] for layer in model_profile.layers] == [[], [], [3]]
    # No layer is without parameters, so that none tells what an update of nothing takes; yet no layer's is free.
    assert all(layer.apply_seconds > 0 for layer in model_profile.layers)


def test_layers_without_parameters_have_no_weight_gradient() -> None:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.MaxPooling2D(2, name="first_pool"),
            layers.Conv2D(2, 3, name="conv"),
            layers.MaxPooling2D(2, name="pool"),
            layers.Flatten(name="flat"),
            layers.Dense(1, name="out"),
        ]
    )
    model.compile("sgd", "mse")
    model_profile = measured(model)
    check(model_profile, model)
    by_name = {layer.name: layer for layer in model_profile.layers}
    assert by_name["pool"].backward_weight == ZERO
    assert by_name["first_pool"].backward.at(4) == pytest.approx(0, abs=1e-4)
    assert by_name["pool"].apply_seconds == 0
    assert all(layer.slot_bytes in (0, 8) for layer in model_profile.layers)
    assert not model_profile.tensors[0].differentiable  # No parameter comes before.
    assert model_profile.tensors[-1].differentiable


def test_tied_weights_are_shared() -> None:
    model = zoo.tied()
    model_profile = measured(model, budget=hurried("rooflines"))
    check(model_profile, model)
    names = [layer.name for layer in model_profile.layers]
    assert names == ["embedding", "shared#0", "middle", "shared#1", "last", "logits"]
    groups = {group.layers: group for group in model_profile.shared}
    assert groups[0, 5].parameter_bytes == groups[0, 5].slot_bytes == 4 * 24  # Adagrad: one slot.
    assert groups[1, 3].parameter_bytes == groups[1, 3].slot_bytes == 4 * 20
    assert model_profile.layers[0].parameter_bytes == 0
    assert model_profile.layers[0].apply_seconds >= 0


def test_the_model_keeps_its_values() -> None:
    model = mlp()
    x, y = np.zeros((4, 4), "float32"), np.zeros(4, "int32")
    model.train_on_batch(x, y)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [variable.numpy() for variable in variables]
    state = tf.random.get_global_generator().state.numpy()
    measured(model, budget=hurried("operators"))
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
    np.testing.assert_array_equal(tf.random.get_global_generator().state.numpy(), state)
    assert "call" not in vars(model.layers[1])


def test_wrong_arguments() -> None:
    model = mlp()
    with pytest.raises(ProfileError, match=r"batch_size is 0"):
        measured(model, 0)
    with pytest.raises(ProfileError, match=r"batch_size is \[\]"):
        measured(model, [])
    with pytest.raises(ProfileError, match="device is 1, but the cluster has devices 0 to 0"):
        measured(model, 4, device=1)
    with pytest.raises(dapple.CaptureError, match="isn't compiled"):
        measured(keras.Sequential([keras.Input((2,)), layers.Dense(1)]))


def test_what_weight_gradients_are_computed_from() -> None:
    """What the layer was given and the gradient of what its matrix product gave: 6 and 5, then 5 and 3 floats.

    The first layer has no Bx, so that its Bw is the whole B: it reads tanh's results and the gradient of these.
    Features aren't kept, they are there for the whole step.
    """
    kept = []
    for index, layer in enumerate(mlp_by_layer().layers):
        assert layer.buffers is not None
        costs = [layer.buffers.delayed, layer.buffers.partial]
        for tensor in mlp_by_layer().tensors:
            costs += [tensor.bytes] * (
                (index in tensor.delayed) + (tensor.producer == index and tensor.gradient_delayed)
            )
        kept.append(sum(cost.at(1) for cost in costs))
    assert kept == [4 * (6 + 6), 4 * (6 + 5), 4 * (5 + 3)]


def hurried(method: str) -> TimeBudget:
    """A budget of 20 s in which there is time for one way of measuring: each look at the clock takes some seconds."""
    clock = itertools.count(step={"layers": 0.001, "operators": 1.0, "rooflines": 10.0}[method])
    return TimeBudget(20.0, clock=lambda: float(next(clock)))


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("operators", "measured by operator in steps of the whole model at 2, 8 samples"),
        ("rooflines", "estimated by rooflines without a measurement at 2, 8 samples"),
    ],
)
def test_layers_are_known_by_operator_where_measuring_each_takes_longer_than_it_may(
    method: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """MobileNetV3Small took 78 s, for steps of 50 ms. What isn't a time or a working buffer is as when measured."""
    with caplog.at_level(logging.DEBUG, logger="dapple_tf.measuring.measured_operators"):
        full, quick = mlp_by_layer(), measured(mlp(), [2, 8], budget=hurried(method))
    counts = [record.args for record in caplog.records if "were traced" in record.message]
    # Names of nodes tell whose work they are; were one spelled in another way, rooflines would stand in silently.
    assert all(traced >= 0.8 * known for traced, known, _ in counts) and len(counts) == 2 * (method == "operators")
    assert (full.method, quick.method) == ("layers", method)
    assert quick.estimated and not full.estimated
    check(quick, mlp())
    assert said in str(quick)
    assert [layer.name for layer in quick.layers] == [layer.name for layer in full.layers]
    for estimate, layer in zip(quick.layers, full.layers, strict=True):
        for what in ("parameter_bytes", "slot_bytes", "state_bytes", "output_bytes"):
            assert getattr(estimate, what) == getattr(layer, what), (layer.name, what)
        assert estimate.residual_bytes.at(8) >= layer.residual_bytes.at(8)
        assert estimate.forward.at(8) > 0 and estimate.backward.at(8) > 0
        assert estimate.apply_seconds > 0
    assert [(t.producer, t.consumers, t.bytes) for t in quick.tensors] == [
        (t.producer, t.consumers, t.bytes) for t in full.tensors
    ]
    assert [layer.needed_later for layer in quick.layers[:2]] == [(), ()]
    first, second, _ = quick.layers
    assert first.backward_weight == first.backward
    assert second.backward_weight is not None and ZERO.at(8) < second.backward_weight.at(8) < second.backward.at(8)


def test_on_gpus_functions_know_the_size_of_slices_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes were computed in each pass, and copied to the host, which waits for all kernels before."""
    steps: dict[str, StepRuns] = {}
    monkeypatch.setattr(measured_layers, "device_kind", lambda _: "GPU")
    run = StepRuns.run

    def noted(self: StepRuns, samples: int) -> np.ndarray:
        steps[self.name] = self
        return run(self, samples)

    monkeypatch.setattr(StepRuns, "run", noted)
    profiled = measured(mlp(), [2, 8], budget=hurried("layers"))
    assert profiled.tensors == mlp_by_layer().tensors
    for layer, other in zip(profiled.layers, mlp_by_layer().layers, strict=True):
        for what in ("residual_bytes", "min_cut_residual_bytes", "output_bytes", "parameter_bytes"):
            assert getattr(layer, what) == getattr(other, what), (layer.name, what)
    of_size = {f"{name}{samples}" for name in ("layered", "whole", "again") for samples in (2, 8)}
    assert set(steps) == {*of_size, "layered", "nothing"}  # One of any size tells memory.
    for name in of_size:
        nodes = [node for function in steps[name].timed.graph.library.function for node in function.node_def]
        assert {"MatMul"} <= {node.op for node in nodes}
        assert not {"Shape", "BroadcastGradientArgs", "Prod"} & {node.op for node in nodes}, name


def test_a_shorter_way_is_kept_under_a_name_of_its_own(tmp_path: pathlib.Path) -> None:
    """Who has time for each layer isn't given a profile that was made in a hurry; nor is what was guessed kept."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, name="only")])
    model.compile("sgd", "mse")
    ways = {"cache": tmp_path, "repeats": 1}
    assert measured(model, 4, **ways, budget=hurried("rooflines")).method == "rooflines"
    assert not list(tmp_path.iterdir())
    by_operator = measured(model, 4, **ways, budget=hurried("operators"))
    assert measured(model, 4, **ways, budget=hurried("rooflines")) == by_operator
    assert measured(model, 4, **ways).method == "layers"
    assert measured(model, 4, **ways, budget=hurried("rooflines")).method == "layers"
