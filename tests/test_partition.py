"""Pass 4: forward and backward functions, and what a stage keeps between them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_trains_as_keras
from hypothesis import given, settings
from hypothesis import strategies as st
from program_text import read_program
from programs import (
    GRADIENT,
    INT32,
    RESIDUAL,
    apply,
    attention,
    captured,
    compiled,
    dense,
    mlp,
    sent,
    staged,
    stateful_layers,
    two_layers,
)

from graph_passes.errors import PassError
from graph_passes.ir.graph import FLOAT_DTYPES, Graph, Ref
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Program, Stage, StageFunction, Value, ValueKind
from graph_passes.ir.tasks import Phase
from graph_passes.ir.tensorflow_bridge import is_stateful
from graph_passes.ir.text import function_text, functions_text
from graph_passes.passes import build_backward, partition
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import POLICIES, Partition, StageForm

policies = pytest.mark.parametrize("policy", POLICIES)


def functions(stage: Stage) -> tuple[StageFunction, StageFunction]:
    assert stage.forward is not None and stage.backward is not None
    return stage.forward, stage.backward


def residuals(stage: Stage) -> list[Ref]:
    return [value.ref for value in functions(stage)[0].outputs if value.kind is RESIDUAL]


# ---- structure


def test_the_functions_of_each_stage(golden: Callable[[str, str], None]) -> None:
    golden("partition.txt", functions_text(staged(stateful_layers(), "a")))


def test_the_functions_of_stages_that_compute_everything_again(golden: Callable[[str, str], None]) -> None:
    golden("partition_boundary.txt", functions_text(staged(two_layers(), "a", recompute="boundary")))


def test_each_stage_may_recompute_something_else() -> None:
    mixed = staged(stateful_layers(), "a", recompute=("boundary", "none"))
    for stage, policy in enumerate(("boundary", "none")):
        alike = staged(stateful_layers(), "a", recompute=policy)
        assert functions(mixed.stages[stage]) == functions(alike.stages[stage])
    with pytest.raises(PassError, match="recompute='all' is unknown; use one of none, boundary, min_cut"):
        staged(stateful_layers(), "a", recompute=("none", "all"))


@functools.cache
def attention_stages(policy: str) -> Program:
    return staged(attention(), "norm", "residual", recompute=policy)


@policies
def test_forward_and_backward_together_are_the_whole(policy: str) -> None:
    """The type equation: arguments and results of both are the stage's and residuals, each where it belongs."""
    for stage in (*attention_stages(policy).stages, *staged(stateful_layers(), "a", recompute=policy).stages):
        forward, backward = functions(stage)
        arguments = {kind: {value for value in stage.arguments if value.kind is kind} for kind in ValueKind}
        results = {kind: {value for value in stage.results if value.kind is kind} for kind in ValueKind}
        kept = {value for value in forward.outputs if value.kind is RESIDUAL}
        measured = set(stage.metrics.inputs) if stage.metrics is not None else set()
        # F: (params, state, x) -> (y, state', residuals), and what metrics read
        assert set(forward.inputs) <= arguments[ValueKind.FORWARD]
        assert results[ValueKind.FORWARD] <= set(forward.outputs) <= results[ValueKind.FORWARD] | kept | measured
        # B: (residuals, params, x, dy) -> (dx, dparams)
        assert arguments[GRADIENT] | kept <= set(backward.inputs)
        assert set(backward.inputs) <= arguments[ValueKind.FORWARD] | arguments[GRADIENT] | kept
        assert set(backward.outputs) == results[GRADIENT]
        # Nothing of the whole is lost, and constants aren't kept.
        assert arguments[ValueKind.FORWARD] <= {*forward.inputs, *backward.inputs, *measured}
        assert all(Graph(stage.own_graph).nodes[ref.node].op != "Const" for ref in residuals(stage))


def test_functions_are_compiled_with_xla_and_metrics_never_and_the_last_f_and_b_are_one() -> None:
    """Residuals that XLA had to put into memory and to read again took a tenth of a GPT's step."""
    built = apply(stateful_layers(), AssignStages(("a",)), BuildForward(), BuildBackward())
    first, last = apply(built, Partition(StageForm(jit_compile=True, fuse=True), prefix="p_")).stages
    assert first.fused is None  # Its B needs the gradient that the last stage's B gives.
    assert last.fused is not None and last.metrics is not None
    for function in (*functions(first), *functions(last), last.fused):
        assert function.function.attr["_XlaMustCompile"].b
        assert function.name.startswith("p_stage")
    assert "_XlaMustCompile" not in last.metrics.function.attr
    forward, backward = functions(last)
    assert [*last.fused.outputs] == [
        *(each for each in forward.outputs if each.kind is not RESIDUAL),
        *backward.outputs,
    ]
    assert last.phases == ((Phase.FORWARD, last.fused), (Phase.BACKWARD, None))
    whole = StageForm(jit_compile=True)
    for forms in (
        (dataclasses.replace(whole, fuse=True), whole),
        (whole, dataclasses.replace(whole, fuse=True, split=True)),
        (StageForm(), StageForm(fuse=True)),
    ):
        stages = apply(built, Partition(forms)).stages
        assert [stage.fused for stage in stages] == [None, None]
    assert "_XlaMustCompile" not in functions(stages[0])[0].function.attr


def test_functions_for_slices_of_one_size_hand_over_no_shapes() -> None:
    """They were handed from F to B, which kept TensorFlow from leaving out sums over no axes: 106 of 176 in a GPT."""
    program = attention_stages("none")
    sized = apply(program, Partition([StageForm(samples=count) for count in (4, None, 4)]))
    for stage, before, samples in zip(sized.stages, program.stages, (4, None, 4), strict=True):
        pairs = list(zip(functions(stage), functions(before), strict=True))
        if samples is None:
            assert [(own.name, own.function) for own, _ in pairs] == [(any_.name, any_.function) for _, any_ in pairs]
            continue
        assert set(residuals(stage)) < set(residuals(before))
        for own, any_size in pairs:
            assert own.name == any_size.name.replace(f"stage{stage.index}", f"stage{stage.index}_of4")
            assert not {node.op for node in own.function.node_def} & {"Shape", "BroadcastGradientArgs"}
            assert not any(own.result_dtype(value) == INT32 for value in own.outputs)
            for index, value in enumerate(own.inputs):
                (shape,) = own.function.arg_attr[index].attr["_output_shapes"].list.shape
                assert all(dim.size > 0 for dim in shape.dim), value


def test_stages_on_gpus_take_seeds_and_rows_of_tables_from_their_hosts() -> None:
    ids = keras.Input((3,), dtype="int32")
    h = keras.layers.Embedding(5, 2, name="table")(ids)
    model = compiled(ids, keras.layers.Dropout(0.5, seed=1, name="drop")(h))
    program = captured(model, np.zeros((4, 3), "int32"), np.zeros((4, 3, 2), "float32"))
    built = apply(program, AssignStages(), BuildForward(), BuildBackward())
    (stage,) = apply(built, Partition(StageForm("boundary", samples=4, on_gpu=True, jit_compile=True))).stages
    assert stage.integers is not None and "_XlaMustCompile" not in stage.integers.function.attr
    sources = {program.roles.inputs[0], program.roles.slice.number}
    sources |= {v.value for v in program.roles.variables if v.is_counter}
    assert {value.ref for value in stage.integers.inputs} == sources
    assert [value.ref.node.split("/")[-1] for value in stage.integers.outputs] == ["SelectV2", "Cast", "Reshape_1"]
    read = {value for function in functions(stage) for value in function.inputs if value.kind is ValueKind.INTEGERS}
    assert read == set(stage.integers.outputs)


# ---- what is kept


def test_boundary_keeps_what_enters_a_stage_and_min_cut_less_than_none() -> None:
    def kept(policy: str) -> int:
        return sum(stage.residual_bytes.per_sample for stage in attention_stages(policy).stages)

    program = attention_stages("boundary")
    assert [residuals(stage) for stage in program.stages] == [[]] * 3
    received = [boundary for boundary in program.boundaries for _ in boundary.consumers]
    assert kept("boundary") == sum(8 * np.prod([n for n in each.shape if n], dtype=int) for each in received)
    assert kept("boundary") < kept("min_cut") < kept("none")


def test_bytes_are_counted_per_sample_and_apart_from_what_every_slice_keeps() -> None:
    first, second = staged(two_layers(), "a").stages
    assert first.residual_bytes == (3 * 8, 0)  # tanh
    assert second.residual_bytes == ((3 + 1) * 8, 0)  # what it received, and its result
    # Of a tensor of which only the shape is read a few integers are kept.
    stage = staged(sent("scalar"), "a").stages[0]
    graph = Graph(stage.own_graph)
    assert all(dtype_of(graph, ref) not in FLOAT_DTYPES for ref in residuals(stage))
    assert stage.residual_bytes.per_sample == 0 < stage.residual_bytes.fixed <= 64


@policies
def test_a_stateful_op_runs_in_forward_and_never_again_in_backward(policy: str) -> None:
    program = read_program("""
        x[?, 2], w[2], v[2]
        a/scaled = Mul(x, w)
        a/shape = Shape(a/scaled)
        a/drawn = RandomStandardNormal(a/shape, dtype=float64)
        a/noisy = Mul(a/scaled, a/drawn)
        a/head = Mul(a/noisy, v)
        loss = L2Loss(a/head)
    """)
    (stage,) = staged(program, recompute=policy).stages
    forward, backward = functions(stage)
    assert [each.op for each in forward.function.node_def if is_stateful(each.op)] == ["RandomStandardNormal"]
    assert not [each.op for each in backward.function.node_def if is_stateful(each.op)]
    assert forward.function.signature.is_stateful and not backward.function.signature.is_stateful
    assert Ref("a/drawn") in residuals(stage)
    assert policy != "boundary" or len(residuals(stage)) == 1


# ---- optimality

EXPENSIVE, NEGATION, HEAD, JOINED = "Softmax", "Neg", "Slice", "ConcatV2"


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[tuple[str, tuple[int, ...], int]], list[int]]:
    """Nodes (op, producers, size), node 0 being the only one that is given, and those that backward reads."""
    nodes: list[tuple[str, tuple[int, ...], int]] = [("given", (), draw(st.integers(1, 6)))]
    for index in range(1, draw(st.integers(2, 7))):
        op = draw(st.sampled_from([EXPENSIVE, EXPENSIVE, NEGATION, HEAD, JOINED]))
        producers = tuple(draw(st.integers(0, index - 1)) for _ in range(2 if op == JOINED else 1))
        size = sum(nodes[producer][2] for producer in producers)
        nodes.append((op, producers, draw(st.integers(1, size)) if op == HEAD else size))
    read = draw(st.lists(st.integers(1, len(nodes) - 1), min_size=1, unique=True))
    return nodes, sorted(read)


def stage_of(nodes: list[tuple[str, tuple[int, ...], int]], read: list[int]) -> Program:
    """A program of one stage whose backward part reads the given tensors of its forward part."""
    text = [f"w[{nodes[0][2]}]"]
    names = ["w", *(f"t{number}" for number in range(1, len(nodes)))]
    for name, (op, producers, size) in zip(names[1:], nodes[1:], strict=True):
        more = {HEAD: f", [0], [{size}]", JOINED: ", 0"}.get(op, "")
        text.append(f"{name} = {op}({', '.join(names[producer] for producer in producers)}{more})")
    for loss, kind, read_by in (("loss", "loss", range(1, len(nodes))), ("gradient", "back", read)):
        text += [f"{kind}{number} = L2Loss(t{number})" for number in read_by]
        text.append(f"{loss} = AddN({', '.join(f'{kind}{number}' for number in read_by)})")
    program = read_program("\n".join(text), model_end=0)
    w, loss, gradient = map(Ref, ("w", "loss", "gradient"))
    results = {Value(loss): loss, Value(w, GRADIENT): gradient}
    stage = Stage(0, ("w",), graph=program.graph, arguments={Value(w): w}, results=results)
    return program.replace(stages=(stage,), flat=program.graph)


def fewest_bytes(nodes: list[tuple[str, tuple[int, ...], int]], read: list[int]) -> int:
    """The smallest total size of tensors from which all that is read follows by cheap ops, by trying all sets."""

    def follows(index: int, kept: tuple[int, ...]) -> bool:
        op, producers, _ = nodes[index]
        if index == 0 or index in kept:
            return True
        return op != EXPENSIVE and all(follows(producer, kept) for producer in producers)

    sets = itertools.chain.from_iterable(itertools.combinations(range(1, len(nodes)), n) for n in range(len(nodes)))
    return min(8 * sum(nodes[i][2] for i in kept) for kept in sets if all(follows(i, kept) for i in read))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(graph=graphs())
def test_min_cut_keeps_the_fewest_bytes_of_all_sets(
    graph: tuple[list[tuple[str, tuple[int, ...], int]], list[int]],
) -> None:
    nodes, read = graph
    program = stage_of(nodes, read)
    (stage,) = Partition(StageForm("min_cut")).run(program).stages
    assert stage.residual_bytes == (0, fewest_bytes(nodes, read))
    (plain,) = Partition().run(program).stages
    assert plain.residual_bytes.fixed == 8 * sum(nodes[index][2] for index in read)
    assert stage.residual_bytes.fixed <= plain.residual_bytes.fixed


def test_a_stage_with_branches_is_not_compiled_and_trains() -> None:
    """What B needs of a branch are optional values, which XLA doesn't know: the step failed."""

    class Branching(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: Any) -> Any:
            return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(self.w * x), lambda: x * self.w)

    def build() -> keras.Model:
        x = keras.Input((3,))
        return compiled(x, keras.layers.Dense(1, name="last")(Branching(name="branching")(x)))

    batch = (np.ones((4, 3)), np.ones((4, 1)), None)
    assert_trains_as_keras(build, ["branching"], (1, 1), 2, [batch] * 2, jit_compile=True)


def test_equal_stages_are_differentiated_and_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of stage, the first, the last and those between, and each of these has its own names."""
    counts = collections.Counter[str]()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return call

    for module, name in ((build_backward, "gradients_by_pieces"), (partition, "_folded")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    stages = apply(
        mlp(5),
        AssignStages([f"dense_{number}" for number in range(4)]),
        BuildForward(),
        BuildBackward(),
        Partition(StageForm(samples=2)),
    ).stages
    assert counts == {"gradients_by_pieces": 3, "_folded": 3}
    texts = ["\n".join(map(function_text, stage.functions)) for stage in stages[1:4]]
    for number, text in enumerate(texts, 1):
        assert f"dense_{number}" in text
        assert re.sub(r"dense_\d|stage\d|dense_0", "", text) == re.sub(r"dense_\d|stage\d|dense_0", "", texts[0])


class Divides(keras.layers.Layer):
    """Can't be computed for four samples."""

    def call(self, inputs: Any) -> Any:
        return inputs * tf.cast(12 // (tf.shape(inputs)[0] - 4), inputs.dtype)


def test_a_layer_that_cannot_be_computed_for_a_slice_is_named() -> None:
    """Stages are folded with numbers in place of names, which errors had."""
    inputs = keras.Input((3,))
    divides = Divides(name="divides", dtype="float64")
    model = compiled(inputs, divides(dense("second")(dense("first")(inputs))))
    program = apply(captured(model, np.zeros((2, 3)), np.zeros((2, 3))), AssignStages(["first"]), BuildForward())
    Partition(StageForm(samples=2), training=False).run(program)
    with pytest.raises(PassError, match=r"^layer 'divides' can't compute FloorDiv .* Integer division by zero"):
        Partition(StageForm(samples=4), training=False).run(program)
