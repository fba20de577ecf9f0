"""Replicas that keep a shard of the optimizer's slots each: training gives what plain Keras gives."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import (
    TOLERANCE,
    assert_same_training,
    assert_same_variables,
    assert_same_variables_after,
    pair,
    pipeline,
    use_float64,
)
from shard_checks import TABLE, check_deferred_models, constrained, table
from zoo import Specimen

import dapple_tf as dapple
from dapple_tf.errors import CaptureError
from dapple_tf.tools.hosts import LocalWorkers
from graph_passes.ir.graph import Builder
from graph_passes.ir.outline import call_node
from graph_passes.ir.program import VariableKind
from graph_passes.ir.storage import merge_library, read_function
from graph_passes.ir.tensorflow_bridge import empty_graph

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda: keras.optimizers.SGD(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.9, epsilon=1e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1, epsilon=1e-3),
    "adamax": lambda: keras.optimizers.Adamax(0.01, epsilon=1e-3),
    "nadam": lambda: keras.optimizers.Nadam(0.01, epsilon=1e-3),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "clips all": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.01, epsilon=1e-3),
    "clips values": lambda: keras.optimizers.Adam(0.01, clipvalue=1e-3, epsilon=1e-3),
    "accumulates": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, epsilon=1e-3),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, epsilon=1e-3), initial_scale=8.0
    ),
}


def _train(specimen: Specimen, replicas: list[int], micro_batches: int, **options: Any) -> dapple.PipelinedModel:
    use_float64()
    model, plain = pair(specimen.build)
    cuts = specimen.cuts_for(len(replicas))
    pipelined = pipeline(model, cuts, replicas, micro_batches, 24, optimizer_shards=True, **options)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [specimen.batch(rng, size) for size in (24, 11, 24)])
    return pipelined


def held_bytes(pipelined: dapple.PipelinedModel) -> list[tuple[int, int]]:
    """Bytes of slots and of parameters that each device has between steps, as they are read from it."""
    engine = pipelined._engine
    sizes = []
    for device in engine.cluster.device_names:
        held = [v for holding in engine.builder.holdings() if device in holding.devices for v in holding.variables]
        builder = Builder(empty_graph())
        function = read_function("read_all", held)
        node = builder.append(call_node("read", function, [], device=device)).node
        merge_library(builder.graph, [function])
        prefix = f"held_{len(sizes)}"
        engine.session.add(builder.graph, prefix)
        values = engine.session.run([f"{prefix}/{node}:{index}" for index in range(len(held))])
        pairs = list(zip(held, values, strict=True))
        slots = sum(value.nbytes for variable, value in pairs if variable.kind is VariableKind.OPTIMIZER)
        parameters = sum(value.nbytes for variable, value in pairs if variable.kind is VariableKind.PARAMETER)
        sizes.append((slots, parameters))
    return sizes


def test_each_replica_holds_its_part_of_the_slots_and_all_parameters() -> None:
    pipelined = _train(TABLE, [3], 2)
    parameters = sum(np.asarray(variable.value).nbytes for variable in pipelined.model.trainable_variables)
    for slots, whole in held_bytes(pipelined):
        assert whole == parameters
        assert slots == pytest.approx(2 * parameters / 3, rel=0.05)


def test_rows_with_a_constraint() -> None:
    _train(Specimen(constrained, TABLE.cuts, TABLE.batch), [2], 1)


@pytest.mark.slow
def test_traces_and_drawings_show_the_exchanges(tmp_path: pathlib.Path) -> None:
    """All-gathers had no number by which a trace finds the other devices' part, and tracing a step failed."""
    x, y, _ = TABLE.batch(np.random.default_rng(0), 12)
    pipelined = pipeline(table(), (), [3], 2, 12, optimizer_shards=True, bucket_bytes=512)
    profile = pipelined.profile_step(x, y, warm_up=0)
    spans = [span for span in profile.step.timeline.spans if span.kind == "all_reduce"]
    assert {span.device for span in spans} == {0, 1, 2}
    assert len(spans) >= 2 * 3 * 2, "several buckets, and for each of them a reduce-scatter and an all-gather"
    pipelined.dump(tmp_path / "dump")
    drawings = "".join(path.read_text() for path in (tmp_path / "dump").rglob("*.dot"))
    assert "ReduceScatter 0" in drawings and "AllGather 0" in drawings


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (lambda: keras.optimizers.Lamb(), "optimizer Lamb updates an element of a parameter by all others"),
        (lambda: keras.optimizers.Adafactor(), "optimizer Adafactor updates an element of a parameter by all others"),
        (lambda: keras.optimizers.SGD(clipnorm=1.0), r"optimizer SGD clips the norm of each gradient \(clipnorm=1\)"),
    ],
)
def test_optimizers_that_need_all_elements_are_refused_by_name_before_there_is_data(
    optimizer: Callable[[], keras.optimizers.Optimizer], text: str
) -> None:
    model = table()
    model.compile(optimizer(), "mse")
    with pytest.raises(CaptureError, match=text):
        pipeline(model, (), [2], 1, 8, optimizer_shards=True)


class Normalized(keras.optimizers.SGD):
    """One's own optimizer, whose step depends on a mean of all elements."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Divides by the mean size."""
        super().update_step(gradient / keras.ops.mean(keras.ops.abs(gradient)), variable, learning_rate)


def test_an_optimizer_of_ones_own_is_refused_by_what_it_computes() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="only")])
    model.compile(Normalized(0.1), "mse")
    pipelined = pipeline(model, (), [2], 1, 8, optimizer_shards=True)
    with pytest.raises(CaptureError, match=r"optimizer Normalized computes Mean of elements of .*only"):
        pipelined.train_on_batch(np.ones((8, 4)), np.ones((8, 3)))


class Skipping(keras.optimizers.SGD):
    """One's own optimizer, which leaves out a parameter whose gradient isn't finite."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Looks at all elements before it changes any."""
        finite = keras.ops.all(keras.ops.isfinite(gradient))
        gradient = keras.ops.where(finite, gradient, keras.ops.zeros_like(gradient))
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_of_ones_own_that_looks_for_infinite_gradients_is_refused(scaled: bool) -> None:
    """It was taken for the check of loss scaling: each device looked at its own shard and skipped another part."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="only")])
    own = Skipping(0.1)
    model.compile(keras.optimizers.LossScaleOptimizer(own) if scaled else own, "mse")
    pipelined = pipeline(model, (), [2], 1, 8, optimizer_shards=True)
    with pytest.raises(CaptureError, match=r"optimizer Skipping computes All of elements of .*only"):
        pipelined.train_on_batch(np.ones((8, 4)), np.ones((8, 3)))


def test_a_constraint_that_looks_at_several_elements_is_named() -> None:
    """Only the optimizer was blamed: SGD, for which the text itself says to use SGD."""
    layer = keras.layers.Dense(3, kernel_constraint=keras.constraints.UnitNorm(), name="only")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse")
    pipelined = pipeline(model, (), [2], 1, 8, optimizer_shards=True)
    with pytest.raises(CaptureError, match=r"SGD or a constraint, such as UnitNorm of .*only/kernel', computes Sum of"):
        pipelined.train_on_batch(np.ones((8, 4)), np.ones((8, 3)))


class Counting(keras.optimizers.SGD):
    """One's own optimizer, which divides by the number of elements."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Adds up as many ones."""
        ones = keras.ops.ones_like(gradient)
        super().update_step(gradient * ones / keras.ops.sum(ones), variable, learning_rate)


class Either(keras.optimizers.SGD):
    """One's own optimizer, which takes random gradients in every other step."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Chooses in the graph."""
        other = keras.ops.cond(
            self.iterations % 2 == 0,
            lambda: gradient,
            lambda: keras.random.normal(gradient.shape, dtype=gradient.dtype, seed=1),
        )
        super().update_step(other, variable, learning_rate)


@pytest.mark.parametrize(
    ("own", "computation"), [(Counting, "Sum of a number"), (Either, "(Stateless)?If of elements of")]
)
def test_numbers_and_branches_that_depend_on_a_shape_are_refused(own: Any, computation: str) -> None:
    """Steps failed while they ran: ones, and a branch's tensor, had a shard's shape in one place and not in another."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="only")])
    model.compile(own(0.1), "mse")
    pipelined = pipeline(model, (), [2], 1, 8, optimizer_shards=True)
    with pytest.raises(CaptureError, match=f"optimizer {own.__name__} computes {computation}"):
        pipelined.train_on_batch(np.ones((8, 4)), np.ones((8, 3)))


class EveryOther(keras.optimizers.SGD):
    """One's own optimizer, which takes zeros for gradients in every other step."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Chooses in the graph."""
        zeros = keras.ops.zeros(gradient.shape, gradient.dtype)
        other = keras.ops.cond(self.iterations % 2 == 0, lambda: gradient, lambda: keras.ops.zeros_like(zeros))
        super().update_step(other, variable, learning_rate)


def test_a_branch_may_give_one_number_in_place_of_elements() -> None:
    """The zeros kept their whole shape, and the step failed."""
    use_float64()

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(7), keras.layers.Dense(3)])
        model.compile(EveryOther(0.1, momentum=0.9), "mse")
        return model

    model, plain = pair(build)
    rng = np.random.default_rng(0)
    pipelined = pipeline(model, (), [2], 1, 8, optimizer_shards=True)
    assert_same_variables_after(3, pipelined, plain, rng.normal(size=(8, 4)), rng.normal(size=(8, 3)))


class OnlyKernels(keras.optimizers.SGD):
    """One's own optimizer, which never changes biases."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates matrices."""
        if len(variable.shape) > 1:
            super().update_step(gradient, variable, learning_rate)


def test_an_optimizer_may_leave_parameters_as_they_are() -> None:
    """Shards of biases were to be sent, though the update had none: KeyError."""

    def build() -> keras.Model:
        layers = [keras.layers.Dense(6, name="first"), keras.layers.Dense(5, name="second")]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(OnlyKernels(0.1, momentum=0.9), "mse")
        return model

    def batch(rng: np.random.Generator, samples: int) -> tuple[Any, Any, Any]:
        return rng.normal(size=(samples, 4)), rng.normal(size=(samples, 5)), None

    _train(Specimen(build, ("first",) * 3, batch), [2], 2)


def test_accumulators_of_many_elements_are_reset() -> None:
    """TensorFlow traces zeros for 1,000 elements and more in another way: Adam was refused, or the step failed."""
    use_float64()

    def build() -> keras.Model:
        words = keras.Input((6,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(400, 3, name="embedding")(words))
        model = keras.Model(words, keras.layers.Dense(3)(keras.layers.Dense(70, name="hidden")(x)))
        model.compile(OPTIMIZERS["accumulates"](), "mse")
        return model

    model, plain = pair(build)
    pipelined = pipeline(model, (), [2], 1, 12, optimizer_shards=True)
    x, y, _ = TABLE.batch(np.random.default_rng(0), 12)
    assert_same_variables_after(3, pipelined, plain, x * 4, y)


def test_branches_of_shards_are_not_those_of_a_whole_group_alike() -> None:
    """Both groups of a device had one function for a branch, with zeros of a shard's shape: the step was cancelled."""
    use_float64()

    def build() -> keras.Model:
        features = keras.Input((4,))
        tied = keras.layers.Dense(4, name="tied")
        x = keras.layers.Dense(4, name="alike")(tied(features))
        model = keras.Model(features, keras.layers.Dense(2)(tied(x)))
        model.compile(OPTIMIZERS["accumulates"](), "mse")
        return model

    model, plain = pair(build)
    pipelined = pipeline(model, ("alike",), [1, 1], 1, 8, optimizer_shards=True)
    rng = np.random.default_rng(0)
    assert_same_variables_after(3, pipelined, plain, rng.normal(size=(8, 4)), rng.normal(size=(8, 2)))


def test_devices_without_rows_of_an_infinite_gradient_skip_the_step_too() -> None:
    """A device whose shard had no rows saw none that wasn't finite: its slots decayed, and its counters went on."""
    use_float64()

    def build() -> keras.Model:
        model = table()
        model.compile(OPTIMIZERS["loss scale"](), "mse")
        return model

    model, plain = pair(build)
    plan = dapple.Plan.manual(["embedding"], [[0, 1], [2]], 1, 12, optimizer_shards=True)
    cluster = dapple.Cluster.local(3, kind="cpu")
    pipelined = dapple.transform(model, cluster, plan)
    rng = np.random.default_rng(0)
    for step in range(3):
        x, y, _ = TABLE.batch(rng, 12)
        if step == 1:  # all rows are the first device's
            x, y[0] = x % 30, np.inf
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(model, plain, TOLERANCE["float64"])


@pytest.mark.slow
def test_values_go_from_shards_to_other_shards_by_files_and_by_hand(tmp_path: pathlib.Path) -> None:
    """Checkpoints don't tell that there were shards, and slots can be read and assigned one by one."""
    rng = np.random.default_rng(0)
    x, y, _ = TABLE.batch(rng, 12)
    first = pipeline(table(), (), [3], 1, 12, optimizer_shards=True)
    for _ in range(2):
        first.train_on_batch(x, y)
    first.save_checkpoint(tmp_path)
    first.sync()
    expected = [np.asarray(variable.value) for variable in first.model.optimizer.variables]
    for replicas, shards in ((2, True), (2, False), (4, True)):
        other = pipeline(table(), (), [replicas], 1, 12, optimizer_shards=shards)
        other.train_on_batch(x, y)
        other.restore_checkpoint(tmp_path)
        slot = other.model.optimizer.variables[3]
        np.testing.assert_array_equal(np.asarray(slot.value), expected[3])
        other.sync()
        for variable, value in zip(other.model.optimizer.variables, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(variable.value), value)
        slot.assign(keras.ops.zeros(slot.shape))
        other.sync()
        assert not np.any(np.asarray(slot.value))


@pytest.mark.slow
def test_workers_exchange_shards_and_write_whole_values(tmp_path: pathlib.Path, workers: LocalWorkers) -> None:
    use_float64()
    model, plain = pair(table)
    plan = dapple.Plan.data_parallel(4, 24, 2, optimizer_shards=True)
    pipelined = dapple.transform(model, dapple.Cluster.of_servers(workers.addresses), plan)
    rng = np.random.default_rng(0)
    assert_same_training(pipelined, plain, [TABLE.batch(rng, size) for size in (24, 11, 24)])
    path = pipelined.save_checkpoint(tmp_path)
    pipelined.close()
    restored = table()
    dapple.load_checkpoint(path, restored)
    assert_same_variables(restored, plain, TOLERANCE["float64"])


@pytest.mark.slow
def test_slots_of_deferred_models_are_made_in_shards() -> None:
    check_deferred_models(optimizer_shards=True)
