"""Which layers can be cut apart: the most that the passes accept, under names that plans understand."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import zoo
from equivalence import assert_same_variables_after, assert_trains_as_keras, pair, use_float64
from profiled import captured, mlp
from programs import HOST, layout, staged, step_of, two_layers, updated
from tensorflow.core.framework import step_stats_pb2, types_pb2

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.front.argument_checks import cuts_are_safe
from dapple_tf.frontend.batch import BatchSpec, declared_spec
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.layer_cuts import (
    cut_name,
    innermost_calls,
    layer_stages,
    legal_cuts,
    with_functions,
    with_gradients,
)
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.layer_memory import kept_tensors, layers_with_variables
from dapple_tf.measuring.timed_step import LAST
from dapple_tf.measuring.traced_memory import StepTrace
from dapple_tf.variables.parameter_groups import group_updates
from graph_passes.errors import PassError
from graph_passes.ir.tasks import Phase, Task
from graph_passes.pass_manager import run_passes
from graph_passes.passes.assign_stages import AssignStages

layers = keras.layers


def names(model: keras.Model) -> tuple[str, ...]:
    spec = BatchSpec(ExampleBatch.of(model).spec.x)
    stages = layer_stages(model, captured(model), capture(model, VariableTable(model), Mode.PREDICT, spec))
    assert len(stages.program.stages) == len(stages.names)
    assert all(stage.graph is not None for stage in stages.program.stages)
    return stages.names


def test_a_chain_is_cut_after_each_layer() -> None:
    assert names(mlp()) == ("first", "second", "logits")


def test_branches_are_laid_out_in_order_and_skips_have_all_their_consumers() -> None:
    model = zoo.branches()
    layer_names = names(model)
    assert sorted(layer_names) == sorted(
        ["stem", "left_0", "right_0", "left_1", "joined", "after", "long_skip", "outputs"]
    )  # each once
    boundaries = with_gradients(captured(model), layer_names[:-1]).boundaries
    stem = next(boundary for boundary in boundaries if boundary.producer == layer_names.index("stem"))
    assert [layer_names[consumer] for consumer in stem.consumers] == ["left_0", "right_0", "long_skip"]


def test_calls_of_one_layer_are_told_apart() -> None:
    assert names(zoo.tied()) == ("embedding", "shared#0", "middle", "shared#1", "last", "logits")


def test_layers_that_cannot_be_cut_apart_are_merged() -> None:
    class Couples(layers.Layer):
        """Its result has no batch axis."""

        def call(self, x: Any) -> Any:
            return keras.ops.argmax(keras.ops.sum(x, axis=0))

    features = keras.Input((4,))
    x = layers.Dense(4, name="first")(features)
    number = Couples(name="couples")(x)
    x = layers.Dense(4, name="second")(x) * keras.ops.cast(number, "float32")
    model = keras.Model(features, layers.Dense(1, name="out")(x))
    model.compile("sgd", "mse")
    layer_names = names(model)
    assert "couples" not in layer_names and layer_names[0] == "first" and layer_names[-1] == "out"


def test_nested_models_are_cut_inside_under_their_path() -> None:
    inner = keras.Sequential([layers.Dense(4, name="a"), layers.Dense(4, name="b")], name="inner")
    features = keras.Input((3,))
    model = keras.Model(features, layers.Dense(1, name="a")(inner(features)))
    model.compile("sgd", "mse")
    calls = captured(model).roles.calls
    innermost = innermost_calls(model, calls)
    assert [call.path for call in innermost] == ["inner/a", "inner/b", "a"]
    assert [cut_name(call, calls) for call in innermost] == ["inner/a", "inner/b", None]  # "a" could be either.


def test_legal_cuts() -> None:
    def attempt(cuts: tuple[str, ...]) -> None:
        if "c" in cuts or {"b", "d"} <= set(cuts):
            raise PassError("no")

    assert legal_cuts("abcde", attempt) == ("a", "b", "e")  # b and d exclude each other
    assert legal_cuts("abe", attempt) == ("a", "b", "e")
    assert legal_cuts("c", attempt) == legal_cuts("", attempt) == ()


class OwnCall(keras.Model):
    """A functional model whose call does more than its graph."""

    def __init__(self) -> None:
        features = keras.Input((4,))
        hidden = layers.Dense(5, activation="tanh", name="a")(features)
        super().__init__(features, layers.Dense(3, name="b")(hidden))
        self.own = layers.Dense(2, name="own")
        self.own.build((None, 6))

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.own(keras.ops.concatenate([super().call(x, training=training), x[:, :3]], -1))


def test_a_functional_model_s_own_call_is_cut() -> None:
    """Losses were built by declared outputs."""

    def build() -> keras.Model:
        model = OwnCall()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    x, y = np.random.default_rng(0).normal(size=(2, 6, 4))
    assert_trains_as_keras(build, ["a"], (1, 1), 2, [(x, y[:, :2], None)] * 2)


# ---- What is known of a functional model without tracing it agrees with what tracing it shows


def dense(name: str) -> keras.layers.Layer:
    return keras.layers.Dense(4, name=name)


def chain() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), dense("a"), keras.layers.ReLU(name="relu"), dense("b"), dense("c")])


def branches() -> keras.Model:
    x = keras.Input((4,))
    a = dense("a")(x)
    b = dense("b")(a)
    c = dense("c")(keras.layers.add([a, b], name="sum"))
    return keras.Model(x, [c, keras.layers.concatenate([b, c], name="both")])


def shared() -> keras.Model:
    x = keras.Input((4,))
    layer = dense("a")
    return keras.Model(x, dense("c")(layer(dense("b")(layer(x)))))


def nested() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.Sequential([dense("a"), dense("b")], name="inner"), dense("c")])


def mixing() -> keras.Model:
    """A tensor whose first axis isn't the batch."""
    x = keras.Input((4,))
    turned = keras.ops.transpose(dense("a")(x))
    return keras.Model(x, dense("c")(keras.ops.transpose(turned)) + dense("b")(x))


@pytest.mark.parametrize("make", [chain, branches, shared, nested, mixing])
def test_what_counts_as_safe_passes_the_whole_check(make) -> None:
    model = make()
    spec = declared_spec(model)
    assert spec is not None
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    names = ["a", "b", "c", "relu", "sum", "inner", "unknown"]
    safe = 0
    for cuts in [cuts for count in (0, 1, 2) for cuts in itertools.permutations(names, count)]:
        if cuts_are_safe(model, cuts):
            run_passes(program, [AssignStages(cuts)])  # raises nothing
            safe += 1
        elif make is chain and "relu" not in cuts:  # A chain of dense layers has nothing that would need a trace.
            with pytest.raises(PassError):
                run_passes(program, [AssignStages(cuts)])
    assert safe >= (6 if make is chain else 1)


def listed() -> keras.Model:
    """One output, in a list."""
    x = keras.Input((4,))
    return keras.Model([x], [dense("b")(dense("a")(x))])


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
@pytest.mark.parametrize("plan", [dapple.Plan.straight(["a"], 6, 2), dapple.Plan.data_parallel(2, 6)])
def test_one_output_in_a_list_is_trained_as_that_output(plan: dapple.Plan) -> None:
    """Losses were built for a list, and read the first sample of each slice; the user's model did so ever after."""
    use_float64()

    def build() -> keras.Model:
        model = listed() if plan.num_stages == 1 else keras.Model.from_config(listed().get_config())
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    model, plain = pair(build)
    x, y = np.random.default_rng(0).normal(size=(2, 6, 4))
    y = [y] if plan.num_stages == 1 else y
    pipelined = dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), plan)
    assert_same_variables_after(1, pipelined, plain, x, y)
    expected = plain.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(pipelined.evaluate(x, y, verbose=0), expected, rtol=1e-6)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), expected, rtol=1e-6)
    for own, other in zip(*(keras.tree.flatten(one.predict(x, verbose=0)) for one in (pipelined, plain)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-10)


# ---- Memory from a trace: each buffer once, peaks beyond what stays, and no tensor taken for another

SAMPLES, ADDRESS = 3, 100


class Written:
    """A trace of ``two_layers`` cut in two, written by hand: a task every 100 microseconds, from 1000 on."""

    def __init__(self) -> None:
        self.program = updated(staged(two_layers(), "a"), layout([1, 1], 4, 2))
        self.step = step_of(self.program)
        self.stats = step_stats_pb2.StepStats()
        self.device = self.stats.dev_stats.add(device=HOST)
        tasks = ((0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD))
        self.start = {Task(*task, LAST): 1000 + 100 * index for index, task in enumerate(tasks)}
        self.nodes = {}
        for task, start in self.start.items():
            node = self.device.node_stats.add(node_name=f"x/{self.step.entry[task]}", all_start_micros=start)
            node.all_end_rel_micros = 90
            self.nodes[task] = node
            stage = self.program.stages[task.stage]
            forward = task.phase is Phase.FORWARD
            function = stage.forward if forward else stage.backward
            assert function is not None
            for slot in range(len(function.outputs)):
                tensor = node.output.add(slot=slot).tensor_description
                tensor.dtype = types_pb2.DT_FLOAT
                tensor.shape.dim.add(size=10)
                tensor.allocation_description.ptr = ADDRESS + forward * task.stage  # all of a task share one buffer

    def allocate(self, task: Task, after: int, size: int) -> None:
        used = self.nodes[task].memory.add(allocator_name="cpu")
        used.allocation_records.add(alloc_micros=self.start[task] + after, alloc_bytes=size)

    def read(self) -> StepTrace:
        return StepTrace(self.stats, self.program, self.step, HOST, "x", SAMPLES)


def test_a_buffer_counts_for_the_first_stage_that_keeps_it() -> None:
    written = Written()
    kept = kept_tensors(written.program)
    assert all(kept)
    assert written.read().kept_bytes(kept) == [40, 40]
    for output in written.nodes[Task(1, Phase.FORWARD, LAST)].output:  # The second only hands on what it was given.
        output.tensor_description.allocation_description.ptr = ADDRESS
    assert written.read().kept_bytes(kept) == [40, 0]


def test_peaks_are_beyond_what_stays_and_what_is_handed_on() -> None:
    written = Written()
    forward, backward = Task(1, Phase.FORWARD, LAST), Task(1, Phase.BACKWARD, LAST)
    for after, size in ((0, 1000), (10, 300), (20, -1000)):  # 300 stay
        written.allocate(forward, after, size)
    assert written.read().temporary_bytes(1) == 1000
    for after, size in ((0, 2000), (10, 40), (20, -2000)):  # a gradient of 40 bytes goes to the first stage
        written.allocate(backward, after, size)
    assert written.read().temporary_bytes(1) == 2000
    assert written.read().temporary_bytes(0) == 0


def test_results_that_were_removed_are_not_mistaken_for_others() -> None:
    written = Written()
    del written.nodes[Task(1, Phase.FORWARD, LAST)].output[0]
    with pytest.raises(ProfileError, match=r"'stage1_forward' has \d+ results, but a trace shows \d+"):
        written.read()


def test_each_variable_counts_once() -> None:
    model = zoo.tied()
    spec = ExampleBatch.of(model).spec
    table = VariableTable(model)
    build(model, table, spec)
    cuts = ("embedding", "shared#0", "middle", "shared#1", "last")
    program = with_functions(with_gradients(captured(model), cuts), "stages_")
    names, updates = [f"layer{stage.index}" for stage in program.stages], group_updates(model, table, program)
    shapes = [array.shape[1:] for array in ExampleBatch.of(model).batch(1)]
    layers, shared = layers_with_variables(program, names, updates, table, shapes)
    sizes = [4 * int(variable.value.numpy().size) for variable in model.trainable_variables]
    assert sum(layer.parameter_bytes for layer in layers) + sum(group.parameter_bytes for group in shared) == sum(sizes)
    # Adagrad has one slot for each, and scalars of its own that belong to no layer.
    assert sum(layer.slot_bytes for layer in layers) + sum(group.slot_bytes for group in shared) == sum(sizes)
    assert [group.layers for group in shared] == [(0, 5), (1, 3)]
    assert sum(layer.state_bytes for layer in layers) == 0
