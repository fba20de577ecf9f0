"""The verifier: each invariant, broken on purpose once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import tensorflow as tf
from programs import (
    DOUBLE,
    FLOAT,
    FORWARD,
    GRADIENT,
    HOST,
    INT32,
    connected,
    copied,
    layout,
    node,
    ordered,
    replicated,
    staged,
    stateful_layers,
    step_of,
    task,
    tied_layers,
    two_layers,
    two_stages,
    updated,
)

from graph_passes.errors import PassError
from graph_passes.ir.batching import Interval
from graph_passes.ir.graph import Builder, Graph, NodeDef, Ref, dtype_attr
from graph_passes.ir.program import Layout, Program, Stage, Value
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.verify import _verify_collectives, verify


def refused(program: Program) -> str:
    with pytest.raises(PassError) as caught:
        verify(program, complete=True)
    return str(caught.value)


@functools.cache
def _stepped(*counts: int, batch: int) -> Program:
    return updated(two_stages(), layout(counts, batch, 2 if batch == 4 else 1))


def step_program(*counts: int, batch: int = 4) -> Program:
    """A step of two stages, of two replicas and one unless told otherwise, that may be broken."""
    return copied(_stepped(*(counts or (2, 1)), batch=batch))


def test_programs_are_right_after_every_pass_and_the_verifier_leaves_them_as_they_are() -> None:
    cut = layout([2, 1], 4, 2)
    for program in (two_layers(), two_stages(), replicated(two_stages(), cut), ordered(two_stages(), cut)):
        before = copied(program)
        verify(program)
        assert program == before
    evaluation = connected(staged(two_layers(), "a", training=False), layout([1, 1], 2))
    assert {each.phase for each in step_of(evaluation).entry} == {FORWARD}
    verify(evaluation, complete=True)
    tied = updated(staged(tied_layers(2), "layer_0"), layout([2, 1], 4))
    assert [each.op for each in tied.graph.node].count("CollectiveReduceV2") == 3


# ---- the graph


@pytest.mark.parametrize(
    ("name", "op", "inputs", "text"),
    [
        ("loss", "NoOp", [], "node names are not unique: ['loss']"),
        ("n", "Identity", ["nowhere:1"], "node 'n' (Identity) reads nowhere:1, but there is no node 'nowhere'"),
        ("n", "Identity", ["loss:1"], "node 'n' (Identity) reads loss:1, but 'loss' has 1 outputs"),
        ("n", "NoOp", ["^nowhere"], "node 'n' (NoOp) waits for 'nowhere', which doesn't exist"),
    ],
)
def test_every_input_is_there_and_names_are_unique(name: str, op: str, inputs: list[str], text: str) -> None:
    program = copied(two_layers())
    program.graph.node.add(name=name, op=op, input=inputs)
    assert refused(program) == text


def test_there_is_no_cycle_of_data_and_control_edges() -> None:
    program = copied(two_layers())
    node(program, "a/matmul").input.append("^loss")
    assert refused(program) == "the graph has a cycle: a/matmul -> loss -> b/matmul -> a/tanh -> a/matmul"


# ---- calls and nodes of a step

CALL = "stage0/replica0/forward0"


def call_of(program: Program) -> NodeDef:
    return node(program, CALL)


def retyped(program: Program) -> None:
    (function,) = (f for f in program.graph.library.function if f.signature.name == "stage0_forward")
    function.signature.input_arg[1].type = FLOAT


def added(op: str, *, device: str | None = None, **kinds: int) -> Callable[[Program], None]:
    """Adds a node, which reads a forward's first result."""

    def change(program: Program) -> None:
        where = call_of(program).device if device is None else device
        attrs = {name: dtype_attr(kind) for name, kind in kinds.items()}
        Builder(program.graph).add("added", op, [Ref(CALL)], device=where, **attrs)

    return change


def with_step(program: Program, **changes: object) -> Program:
    return program.replace(step=dataclasses.replace(step_of(program), **changes))  # type: ignore[arg-type]


def with_entry(program: Program, name: str, call: str | None) -> Program:
    entry = {each: own for each, own in step_of(program).entry.items() if str(each) != name}
    return with_step(program, entry={**entry, task(name): call} if call else entry)


class Overlapping(Layout):
    """A layout whose replicas all work on the whole micro-batch."""

    def slices(self, stage: int, micro_batch: int) -> tuple[Interval, ...]:
        return (self.micro_batch_intervals[micro_batch],) * len(self.devices[stage])


NO_DEVICE = "has no device; give it that of a node that it reads or that reads it"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda step: setattr(call_of(step).attr["f"].func, "name", "f"),
            "calls function 'f', which isn't in the library",
        ),
        (lambda step: call_of(step).input.pop(), "gives 1 inputs to function 'stage0_forward', which takes 2"),
        (retyped, "which takes 2 (input 1: float32 wanted, float64 given)"),
        (lambda step: call_of(step).attr["Tout"].list.type.__setitem__(0, FLOAT), "disagree about the results' types"),
        # Any CPU was taken for legal, so that on a cluster of CPU devices nothing was checked.
        (lambda step: setattr(call_of(step), "device", f"{HOST[:-1]}7"), "CPU:7', which is none of the plan's devices"),
        (lambda step: setattr(call_of(step), "device", "/device:GPU:0"), "is on '/device:GPU:0', which is none of"),
        (lambda step: setattr(call_of(step), "device", ""), f"call '{CALL}' {NO_DEVICE}"),
        (added("Identity", device="", T=DOUBLE), f"Identity node 'added' {NO_DEVICE}"),
        (added("Identity", T=FLOAT), f"'added' (Identity) is for float32 as input 0, but '{CALL}' is float64; cast it"),
        (added("Cast"), "node 'added' (Cast) has no attribute SrcT and DstT, which its op needs; give it"),
        (added("AddV2", T=DOUBLE), "node 'added' (AddV2) reads 1 tensors, but its op and attributes want 2"),
        (lambda step: with_entry(step, "1B0", None), "has 11 tasks instead of 12; they differ in ['1B0']"),
        (lambda step: with_entry(step, "1F2", "loss"), "has 13 tasks instead of 12; they differ in ['1F2']"),
        (lambda step: with_entry(step, "0F1", CALL), f"node '{CALL}' serves several tasks"),
        (
            lambda step: with_step(step, layout=Overlapping(step_of(step).layout.devices, 4, 4, 2)),
            "slices of micro-batch 0 hold [4, 2] samples instead of 2",
        ),
        (
            lambda _: connected(two_stages(), layout([1, 1], 2)),
            f"1 arguments are not connected, among them {Value(Ref('loss'), GRADIENT)} of task 1B0",
        ),
    ],
)
def test_a_broken_step_is_refused(change: Callable[[Program], Program | None], text: str) -> None:
    program = step_program()
    changed = change(program)
    assert text in refused(changed if isinstance(changed, Program) else program)


def test_operators_may_be_placed_on_more_devices_and_dissolved_stages_have_no_tasks() -> None:
    program = step_program()
    added("Identity", T=DOUBLE)(program)
    call_of(program).device = "/device:GPU:0"
    verify(with_step(program, placed_on=frozenset({"/device:GPU:0"})), complete=True)
    program = step_program()
    left = {own: name for own, name in step_of(program).entry.items() if own.stage != 1}
    dissolved = frozenset({1})
    verify(with_step(program, entry=left, dissolved=dissolved), complete=True)
    assert "they differ in" in refused(with_step(program, dissolved=dissolved))


# ---- stages


def undescribed(stage: Stage, **side: tuple[Value, ...]) -> Stage:
    return dataclasses.replace(stage, backward=dataclasses.replace(stage.own_backward, **side))


def retyped_result(stage: Stage) -> None:
    stage.own_backward.function.signature.output_arg[0].type = FLOAT


def retyped_gradient(stage: Stage) -> None:
    value, backward = Value(Ref("a/tanh"), GRADIENT), stage.own_backward
    backward.function.signature.input_arg[backward.inputs.index(value)].type = FLOAT
    node(stage.own_graph, stage.arguments[value].node).attr["dtype"].type = FLOAT


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda stage: undescribed(stage, inputs=stage.own_backward.inputs[1:]),
            " has 3 arguments but 2 are described",
        ),
        (lambda stage: undescribed(stage, outputs=()), " has 1 results but 0 are described"),
        (retyped_result, f": result {Value(Ref('w'), GRADIENT)} is float32 but the stage's graph says float64"),
        (retyped_gradient, f": {Value(Ref('a/tanh'), GRADIENT)} and a/tanh differ in dtype"),
    ],
)
def test_functions_agree_with_each_other_and_with_the_stage(change: Callable[[Stage], Stage | None], text: str) -> None:
    program = copied(two_stages())
    first, second = program.stages
    message = refused(program.replace(stages=(change(first) or first, second)))
    assert message == f"function 'stage0_backward'{text}"


# ---- collectives


def collective_program() -> tuple[Program, list[list[NodeDef]]]:
    """Two all-reduces of stage 0, on each of two devices."""
    program = copied(updated(staged(stateful_layers(), "a"), layout([2, 2], 4), bucket_bytes=16))
    sums = [each for each in program.graph.node if each.op == "CollectiveReduceV2"]
    return program, [[each for each in sums if each.device == own] for own in step_of(program).layout.devices[0]]


def test_collectives_of_a_device_wait_for_each_other() -> None:
    program, (_, (first, second, *_)) = collective_program()
    assert second.input[-1] == f"^{first.name}"
    del second.input[-1]
    text = refused(program)
    assert text in {
        f"all-reduce {one.name!r} isn't ordered after the one before it on {one.device}" for one in (first, second)
    }


def all_reduces(*ordered: tuple[str, int]) -> Graph:
    """All-reduces of two members on devices, in this order on each."""
    builder = Builder(empty_graph())
    value, size, key = (builder.const(number, INT32) for number in (7, 2, 1))
    made: dict[str, str] = {}
    for device, instance in ordered:
        inputs = [value, size, key, builder.const(instance, INT32)]
        waits = [made[device]] if device in made else []
        made[device] = builder.add("reduce", "CollectiveReduceV2", inputs, device=device, control=waits).node
    return Graph(builder.graph)


def test_collectives_of_three_groups_do_not_wait_for_each_other_in_a_circle() -> None:
    """Any two of them share one device only, so that none is ordered otherwise elsewhere: yet all would wait."""
    with pytest.raises(PassError, match="in a circle: ") as error:
        _verify_collectives(all_reduces(("a", 1), ("a", 3), ("b", 2), ("b", 1), ("c", 3), ("c", 2)))
    for step in ("1 before 3 on 'a'", "2 before 1 on 'b'", "3 before 2 on 'c'"):
        assert step in str(error.value)
    with pytest.raises(PassError, match="all-reduce 1 has a group of 2 but 1 members"):
        _verify_collectives(all_reduces(("a", 1)))


# ---- what goes from stage to stage


def test_a_split_has_as_many_rows_as_what_it_cuts() -> None:
    program = step_program(1, 2, batch=5)
    split = next(each for each in program.graph.node if each.op == "SplitV" and each.name.startswith("split/"))
    sizes = node(program, split.input[1])
    sizes.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([3, 3], tf.int32))
    assert refused(program) == (
        "split 'split/0F0/a/tanh' cuts 'stage0/replica0/forward0' with shape [5, 3] into parts of 3, 3 along axis 0, "
        "which are 6 instead of 5"
    )


@pytest.mark.parametrize(
    ("counts", "reader"), [([1, 2], "stage1/replica1/forward0"), ([2, 1], "stage0/replica1/backward0")]
)
def test_a_task_reads_a_tensor_of_the_size_of_its_slice(counts: list[int], reader: str) -> None:
    program = step_program(*counts, batch=5)
    call = node(program, reader)
    place = next(index for index, text in enumerate(call.input) if text.startswith("split/"))
    call.input[place] = str(Ref(Ref.parse(call.input[place]).node))  # the slice of the other replica
    text = refused(program)
    assert "with shape [3, 3], but its slice has shape [2, 3]" in text and text.startswith("task ")
