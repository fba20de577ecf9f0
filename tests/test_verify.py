"""The verifier: each invariant, broken on purpose once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import tensorflow as tf
from programs import (
    BOOL,
    DOUBLE,
    FLOAT,
    FORWARD,
    GRADIENT,
    RESIDUAL,
    apply,
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
from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.batching import Interval
from graph_passes.ir.connections import connected_shape
from graph_passes.ir.graph import AttrValue, Builder, Graph, GraphDef, NodeDef, Ref, dtype_attr
from graph_passes.ir.program import Layout, Program, Stage, StageFunction, Value
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.verify import _verify_collectives, verify


def refused(program: Program, *, complete: bool = False) -> str:
    with pytest.raises(PassError) as caught:
        verify(program, complete=complete)
    return str(caught.value)


def step_program() -> Program:
    """A step of two stages, of two replicas and one, that may be broken."""
    return copied(updated(two_stages(), layout([2, 1], 4, 2)))


def test_programs_are_right_after_every_pass_and_the_verifier_leaves_them_as_they_are() -> None:
    cut = layout([2, 1], 4, 2)
    for program in (two_layers(), two_stages(), replicated(two_stages(), cut), ordered(two_stages(), cut)):
        before = copied(program)
        verify(program)
        assert program == before
    verify(updated(two_stages(), cut), complete=True)


# ---- the graph


def flat_with(change: Callable[[GraphDef], object]) -> str:
    program = copied(two_layers())
    change(program.graph)
    return refused(program)


def test_node_names_are_unique() -> None:
    assert flat_with(lambda graph: graph.node.add(name="loss", op="NoOp")) == "node names are not unique: ['loss']"


def test_every_input_exists() -> None:
    text = flat_with(lambda graph: graph.node.add(name="n", op="Identity", input=["nowhere:1"]))
    assert text == "node 'n' (Identity) reads nowhere:1, but there is no node 'nowhere'"


def test_every_output_that_is_read_exists() -> None:
    text = flat_with(lambda graph: graph.node.add(name="n", op="Identity", input=["loss:1"]))
    assert text == "node 'n' (Identity) reads loss:1, but 'loss' has 1 outputs"


def test_every_node_that_is_waited_for_exists() -> None:
    text = flat_with(lambda graph: graph.node.add(name="n", op="NoOp", input=["^nowhere"]))
    assert text == "node 'n' (NoOp) waits for 'nowhere', which doesn't exist"


def test_there_is_no_cycle_of_data_and_control_edges() -> None:
    text = flat_with(lambda graph: node(graph, "a/matmul").input.append("^loss"))
    assert text == "the graph has a cycle: a/matmul -> loss -> b/matmul -> a/tanh -> a/matmul"


# ---- calls


def call_of(program: Program, name: str = "stage0/replica0/forward0") -> NodeDef:
    return node(program, name)


def test_a_call_names_a_function_of_the_library() -> None:
    program = step_program()
    call_of(program).attr["f"].func.name = "missing"
    assert refused(program) == "node 'stage0/replica0/forward0' calls function 'missing', which isn't in the library"


def test_a_call_gives_as_many_inputs_as_its_function_takes() -> None:
    program = step_program()
    del call_of(program).input[1:]
    assert refused(program) == (
        "call 'stage0/replica0/forward0' gives 1 inputs to function 'stage0_forward', which takes 2"
    )


def test_a_call_gives_inputs_of_its_functions_dtypes() -> None:
    program = step_program()
    (function,) = [f for f in program.graph.library.function if f.signature.name == "stage0_forward"]
    function.signature.input_arg[1].type = FLOAT
    assert refused(program) == (
        "call 'stage0/replica0/forward0' gives 2 inputs to function 'stage0_forward', which takes 2 "
        "(input 1: float32 wanted, float64 given)"
    )


def test_a_call_has_results_of_its_functions_dtypes() -> None:
    program = step_program()
    call_of(program).attr["Tout"].list.type[0] = FLOAT
    name = "stage0/replica0/forward0"
    assert refused(program) == f"call '{name}' and function 'stage0_forward' disagree about the results' types"


# ---- stages


def with_stage(index: int, change: Callable[[Stage], Stage]) -> Program:
    """A copy of the program with stage functions, with one stage changed."""
    program = copied(two_stages())
    stages = list(program.stages)
    stages[index] = change(stages[index])
    return program.replace(stages=tuple(stages))


def backward_of(stage: Stage) -> StageFunction:
    assert stage.backward is not None
    return stage.backward


def test_every_argument_of_a_function_is_described() -> None:
    def change(stage: Stage) -> Stage:
        backward = backward_of(stage)
        return dataclasses.replace(stage, backward=dataclasses.replace(backward, inputs=backward.inputs[1:]))

    assert refused(with_stage(0, change)) == "function 'stage0_backward' has 3 arguments but 2 are described"


def test_every_result_of_a_function_is_described() -> None:
    def change(stage: Stage) -> Stage:
        return dataclasses.replace(stage, backward=dataclasses.replace(backward_of(stage), outputs=()))

    assert refused(with_stage(0, change)) == "function 'stage0_backward' has 1 results but 0 are described"


@pytest.mark.parametrize("side", ["argument", "result"])
def test_functions_agree_with_the_stages_graph_about_dtypes(side: str) -> None:
    def change(stage: Stage) -> Stage:
        signature = backward_of(stage).function.signature
        (signature.input_arg if side == "argument" else signature.output_arg)[0].type = FLOAT
        return stage

    value = "x" if side == "argument" else Value(Ref("w"), GRADIENT)
    assert refused(with_stage(0, change)) == (
        f"function 'stage0_backward': {side} {value} is float32 but the stage's graph says float64"
    )


def test_backward_reads_residuals_that_forward_keeps() -> None:
    def change(stage: Stage) -> Stage:
        forward = stage.forward
        assert forward is not None
        kept = [value for value in forward.outputs if value.kind is not RESIDUAL]
        function = copied(two_stages()).stages[0].forward
        assert function is not None
        del function.function.signature.output_arg[len(kept) :]
        return dataclasses.replace(stage, forward=StageFunction(function.function, forward.inputs, tuple(kept)))

    residual = Value(Ref("a/tanh"), RESIDUAL)
    assert refused(with_stage(0, change)) == (
        f"function 'stage0_backward' reads {residual}, which no function before it gives"
    )


def test_a_tensor_and_its_gradient_have_one_dtype() -> None:
    def change(stage: Stage) -> Stage:
        assert stage.graph is not None
        value = Value(Ref("a/tanh"), GRADIENT)
        backward = backward_of(stage)
        backward.function.signature.input_arg[backward.inputs.index(value)].type = FLOAT
        node(stage.graph, stage.arguments[value].node).attr["dtype"].type = FLOAT
        return stage

    value = Value(Ref("a/tanh"), GRADIENT)
    assert refused(with_stage(0, change)) == f"function 'stage0_backward': {value} and a/tanh differ in dtype"


# ---- the step


def with_step(program: Program, **changes: object) -> Program:
    return program.replace(step=dataclasses.replace(step_of(program), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["/job:localhost/replica:0/task:0/device:CPU:7", "/device:GPU:0", ""])
def test_every_call_is_on_a_device_of_the_plan(device: str) -> None:
    """Any CPU was taken for legal, so that on a cluster of CPU devices nothing was checked."""
    program = step_program()
    call_of(program).device = device
    assert refused(program) == "call 'stage0/replica0/forward0' " + (
        f"is on {device!r}, which is none of the plan's devices"
        if device
        else "has no device; give it that of a node that it reads or that reads it"
    )


def with_node(op: str, *, device: str | None = None, **attrs: AttrValue) -> Program:
    """A step with one more node, which reads a forward's first result."""
    program = step_program()
    own = call_of(program)
    where = own.device if device is None else device
    Builder(program.graph).add("added", op, [Ref(own.name)], device=where, **attrs)
    return program


def test_every_node_of_a_step_has_a_device_of_the_plan() -> None:
    double = dtype_attr(DOUBLE)
    verify(with_node("Identity", T=double), complete=True)
    assert refused(with_node("Identity", device="", T=double)) == (
        "Identity node 'added' has no device; give it that of a node that it reads or that reads it"
    )
    assert refused(with_node("Identity", device="/device:GPU:0", T=double)) == (
        "Identity node 'added' is on '/device:GPU:0', which is none of the plan's devices"
    )


def test_nodes_of_a_step_read_what_their_attributes_say() -> None:
    assert refused(with_node("Identity", T=dtype_attr(FLOAT))) == (
        "node 'added' (Identity) is for float32 as input 0, but 'stage0/replica0/forward0' is float64; cast it, or "
        "change the node's attributes"
    )
    assert refused(with_node("Identity")) == ("node 'added' (Identity) has no attribute T, which its op needs; give it")
    assert refused(with_node("Cast")) == (
        "node 'added' (Cast) has no attribute SrcT and DstT, which its op needs; give it"
    )
    assert refused(with_node("AddV2", T=dtype_attr(DOUBLE))) == (
        "node 'added' (AddV2) reads 1 tensors, but its op and attributes want 2"
    )


def test_operators_may_be_placed_on_more_devices() -> None:
    program = step_program()
    call_of(program).device = "/device:GPU:0"
    verify(with_step(program, placed_on=frozenset({"/device:GPU:0"})), complete=True)


def test_stages_that_were_dissolved_have_no_tasks() -> None:
    program = step_program()
    left = {own: name for own, name in step_of(program).entry.items() if own.stage != 1}
    dissolved = frozenset({1})
    verify(with_step(program, entry=left, dissolved=dissolved), complete=True)
    assert "they differ in" in refused(with_step(program, dissolved=dissolved))


def test_each_task_is_there() -> None:
    program = step_program()
    entry = dict(step_of(program).entry)
    del entry[task("1B0")]
    assert refused(with_step(program, entry=entry)) == ("the step has 11 tasks instead of 12; they differ in ['1B0']")


def test_there_are_no_tasks_without_samples() -> None:
    program = step_program()
    entry = {**step_of(program).entry, task("1F2"): "loss"}
    assert refused(with_step(program, entry=entry)) == ("the step has 13 tasks instead of 12; they differ in ['1F2']")


def test_evaluation_has_no_backward_tasks() -> None:
    program = staged(two_layers(), "a", training=False)
    program = connected(program, layout([1, 1], 2))
    assert {each.phase for each in step_of(program).entry} == {FORWARD}
    verify(program, complete=True)


def test_each_task_has_a_call_of_its_own() -> None:
    program = step_program()
    entry = {**step_of(program).entry, task("0F1"): "stage0/replica0/forward0"}
    assert refused(with_step(program, entry=entry)) == "node 'stage0/replica0/forward0' serves several tasks"


class Overlapping(Layout):
    """A layout whose replicas all work on the whole micro-batch."""

    def slices(self, stage: int, micro_batch: int) -> tuple[Interval, ...]:
        return (self.micro_batch_intervals[micro_batch],) * len(self.devices[stage])


def test_slices_hold_each_sample_once() -> None:
    program = step_program()
    given = step_of(program).layout
    wrong = Overlapping(given.devices, given.batch, given.global_batch_size, given.micro_batches)
    assert refused(with_step(program, layout=wrong)) == "slices of micro-batch 0 hold [4, 2] samples instead of 2"


def test_nothing_is_pending_at_the_end() -> None:
    program = connected(two_stages(), layout([1, 1], 2))
    verify(program)
    assert refused(program, complete=True) == (
        f"1 arguments are not connected, among them {Value(Ref('loss'), GRADIENT)} of task 1B0"
    )


# ---- collectives


def collective_program() -> Program:
    """Two groups: the tied weight's over both stages, and stage 0's own."""
    return copied(updated(staged(stateful_layers(), "a"), layout([2, 2], 4), bucket_bytes=16))


def reductions(program: Program, device: str) -> list[NodeDef]:
    return [each for each in program.graph.node if each.op == "CollectiveReduceV2" and each.device == device]


def test_collectives_of_a_device_wait_for_each_other() -> None:
    program = collective_program()
    device = step_of(program).layout.devices[0][1]
    first, second, *_ = reductions(program, device)
    assert second.input[-1] == f"^{first.name}"
    del second.input[-1]
    assert refused(program) in {
        f"all-reduce {name!r} isn't ordered after the one before it on {device}" for name in (first.name, second.name)
    }


def test_collectives_have_as_many_members_as_their_group() -> None:
    program = collective_program()
    device = step_of(program).layout.devices[0][1]
    last = reductions(program, device)[-1]
    instance = node(program, last.input[3]).attr["value"].tensor.int_val[0]
    readers = [each for each in program.graph.node if last.name in each.input or f"^{last.name}" in each.input]
    for each in readers:
        inputs = [text for text in each.input if text not in (last.name, f"^{last.name}")]
        del each.input[:]
        if each.op in ("PartitionedCall", "StatefulPartitionedCall"):
            each.op, inputs = "NoOp", [text for text in inputs if text.startswith("^")]
        each.input.extend(inputs)
    program.graph.node.remove(last)
    assert refused(program) == f"all-reduce {instance} has a group of 2 but 1 members"


def test_collectives_run_in_one_order_on_all_members() -> None:
    program = collective_program()
    devices = step_of(program).layout.devices[0]
    first, second, *_ = reductions(program, devices[1])
    for place in (0, 3):
        first.input[place], second.input[place] = second.input[place], first.input[place]
    numbers = [node(program, each.input[3]).attr["value"].tensor.int_val[0] for each in (second, first)]
    text = refused(program)
    assert text.startswith("all-reduces wait for each other in a circle: ")
    for one, other in (numbers, numbers[::-1]):
        assert any(f"{one} before {other} on {device!r}" in text for device in devices)


def test_collectives_of_three_groups_do_not_wait_for_each_other_in_a_circle() -> None:
    """Any two of them share one device only, so that none is ordered otherwise elsewhere: yet all would wait."""
    program = collective_program()
    graph = empty_graph()
    builder = Builder(graph)
    value, size, key = (builder.const(number, types_pb2.DT_INT32) for number in (7, 2, 1))
    made: dict[str, str] = {}
    for device, instance in (("a", 1), ("a", 3), ("b", 2), ("b", 1), ("c", 3), ("c", 2)):
        inputs = [value, size, key, builder.const(instance, types_pb2.DT_INT32)]
        waits = [made[device]] if device in made else []
        made[device] = builder.add("reduce", "CollectiveReduceV2", inputs, device=device, control=waits).node
    with pytest.raises(PassError, match="in a circle: ") as error:
        _verify_collectives(Graph(graph))
    for step in ("1 before 3 on 'a'", "2 before 1 on 'b'", "3 before 2 on 'c'"):
        assert step in str(error.value)
    _verify_collectives(Graph(program.graph))


def test_stages_that_share_a_weight_reduce_it_together() -> None:
    program = updated(staged(tied_layers(2), "layer_0"), layout([2, 1], 4))
    reduced = [each for each in program.graph.node if each.op == "CollectiveReduceV2"]
    assert len(reduced) == 3
    assert {each.attr["T"].type for each in reduced} == {DOUBLE}
    apply(program)


# ---- what goes from stage to stage


def connected_step(counts: list[int], batch: int) -> Program:
    """A step in which each task reads its slice, that may be broken."""
    return copied(connected(two_stages(), layout(counts, batch, 1)))


def test_a_split_has_as_many_rows_as_what_it_cuts() -> None:
    program = connected_step([1, 2], 5)
    split = next(each for each in program.graph.node if each.op == "SplitV" and each.name.startswith("split/"))
    sizes = node(program, split.input[1])
    sizes.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([3, 3], tf.int32))
    assert refused(program) == (
        "split 'split/0F0/a/tanh' cuts 'stage0/replica0/forward0' with shape [5, 3] into parts of 3, 3 along axis 0, "
        "which are 6 instead of 5"
    )


def test_a_slice_is_of_rows_that_are_there() -> None:
    builder = Builder(empty_graph())
    tensor = builder.add("x", "Placeholder", dtype=dtype_attr(BOOL))
    part = builder.split("split", tensor, BOOL, [1, 2], 1)[1]
    graph = Graph(builder.graph)
    assert connected_shape(graph, part, lambda _: (4, 3)) == connected_shape(graph, part, lambda _: (4, None)) == (4, 2)
    with pytest.raises(PassError, match=r"slice 'split/part1' cuts 'x' with shape \[4, 2\] from 1 to 3 along axis 1, "):
        connected_shape(graph, part, lambda _: (4, 2))


@pytest.mark.parametrize(
    ("counts", "reader"), [([1, 2], "stage1/replica1/forward0"), ([2, 1], "stage0/replica1/backward0")]
)
def test_a_task_reads_a_tensor_of_the_size_of_its_slice(counts: list[int], reader: str) -> None:
    program = connected_step(counts, 5)
    call = node(program, reader)
    place = next(index for index, text in enumerate(call.input) if text.startswith("split/"))
    call.input[place] = str(Ref(Ref.parse(call.input[place]).node))  # the slice of the other replica
    text = refused(program)
    assert "with shape [3, 3], but its slice has shape [2, 3]" in text and text.startswith("task ")


def test_a_concat_joins_tensors_that_differ_along_its_axis_only() -> None:
    program = connected_step([2, 1], 5)
    concat = next(each for each in program.graph.node if each.op == "ConcatV2")
    concat.input[-1] = str(Builder(program.graph).const(1, types_pb2.DT_INT32))
    assert "joins shapes [3, 3] and [2, 3] along axis 1" in refused(program)


def test_shapes_of_what_connects_tasks_are_known_as_far_as_its_inputs() -> None:
    builder = Builder(empty_graph())
    numbers = {"T": dtype_attr(FLOAT)}
    x, y = (builder.add(name, "Placeholder", dtype=dtype_attr(FLOAT)) for name in "xy")
    place = builder.add("axis", "Placeholder", dtype=dtype_attr(types_pb2.DT_INT32))
    total = builder.add("total", "AddN", [x, y], N=2, **numbers)
    first, _ = builder.split("first", x, FLOAT, [1, 2], 0)
    last = builder.split("last", x, FLOAT, [1, 2], 0)[1]
    Graph(builder.graph).nodes[last.node].input[2] = str(place)
    graph = Graph(builder.graph)

    def shape(ref: Ref, known: dict[Ref, tuple[int | None, ...]]) -> tuple[int | None, ...] | None:
        return connected_shape(graph, ref, known.get)

    assert shape(total, {x: (3, 2)}) == shape(total, {y: (3, 2)}) == (3, 2)
    assert shape(total, {}) is None
    with pytest.raises(PassError, match=r"AddN 'total' adds shapes \[3, 2\] and \[2, 3\]"):
        shape(total, {x: (3, 2), y: (2, 3)})
    assert shape(first, {x: (3, 2)}) == (1, 2)
    assert shape(first, {}) is None
    assert shape(last, {x: (3, 2)}) is None


def test_what_connects_tasks_is_for_the_dtype_that_it_is_given() -> None:
    program = connected_step([2, 1], 5)
    concat = next(each for each in program.graph.node if each.op == "ConcatV2")
    concat.attr["T"].type = FLOAT
    assert refused(program).startswith("call 'stage1/replica0/forward0' gives ")
    for each in program.graph.node:
        for place, text in enumerate(each.input):
            if text == concat.name:
                each.input[place] = concat.input[0]
    assert refused(program) == (
        f"node {concat.name!r} (ConcatV2) is for float32 as input 0, but {concat.input[0]!r} is float64; cast it, or "
        f"change the node's attributes"
    )
