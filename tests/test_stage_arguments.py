"""Tables of which stages look up rows, and parameters in shards that are gathered: which they are, when, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import pytest
from profiled import captured
from program_text import read_program
from programs import DOUBLE, HOST, INT32, Machine, apply, chain, embedding, owners, sgd, staged, step_of
from tensorflow.core.framework import types_pb2

from dapple_tf.frontend.layer_cuts import with_gradients
from dapple_tf.measuring.layer_memory import layer_tables
from dapple_tf.schedules.schedules import make_schedule
from graph_passes.analysis.stage_arguments import row_tables
from graph_passes.ir.graph import Builder, Graph, Ref, control_inputs, data_inputs, dtype_attr
from graph_passes.ir.group_update import Captured, GroupUpdate, Shards
from graph_passes.ir.outline import call_node, placeholder
from graph_passes.ir.program import Layout, Program, Value, ValueKind, Variable, VariableKind
from graph_passes.ir.storage import merge_library
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.verify import verify
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import Partition
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.row_exchange import rows_by_shard
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.update import Update

DEVICES = tuple(HOST[:-1] + str(index) for index in range(2))


def gathering() -> Program:
    """A step of three stages on both devices, each of which keeps half of every parameter, with SGD."""
    program = staged(chain("a: w0", "b: w1", "c: w2"), "a", "b")
    layout = Layout((DEVICES,) * 3, 4, 4, 1)
    schedule = make_schedule("dapple_a", [[0, 1]] * 3, 1, active=layout.active)
    updates = []
    for stage in range(3):
        captured, names = sgd([program.variables[f"w{stage}"]], 0.5), frozenset({f"w{stage}"})
        cut = {ref: dataclasses.replace(v, shards=2) for ref, v in captured.variables.items()}
        captured = dataclasses.replace(captured, variables=cut)
        updates.append(GroupUpdate((stage,), captured, shards=Shards(names, stored=names)))
    replicate = Replicate(layout, HOST, owners(program), in_shards=frozenset(program.variables))
    order, update = OrderTasks(schedule, DEVICES), Update(tuple(updates), 64)
    program = apply(program, replicate, SplitConcat(), Accumulate(), order, update)
    verify(program, complete=True)
    return program


def waits(graph: Graph, name: str) -> set[str]:
    """All nodes that have run before a node does."""
    seen: set[str] = set()
    stack = [name]
    while stack:
        node = graph.nodes[stack.pop()]
        before = {ref.node for ref in data_inputs(node)} | set(control_inputs(node))
        stack += before - seen
        seen |= before
    return seen


def test_gathers_go_one_task_ahead_of_a_devices_tasks() -> None:
    program = gathering()
    step, graph = step_of(program), Graph(program.graph)
    forwards = {task for task in step.entry if task.phase is Phase.FORWARD}
    assert set(step.ahead) == forwards and len(forwards) == 6, "three stages of two replicas"
    for task, nodes in step.ahead.items():
        stage, replica = task.stage, task.replica
        assert len(nodes) == 2, "the shards of both devices, for this replica alone"
        before = [name for name in nodes for name in control_inputs(graph.nodes[name])]
        assert before == ([] if stage < 2 else [step.entry[Task.parse(f"0F0.r{replica}")]] * 2)
        assert set(nodes) <= waits(graph, step.entry[Task.parse(f"{stage}F0.r{replica}")])
    for stage in range(3):
        for replica, device in enumerate(DEVICES):
            reads = step.shard_reads[(stage,), device]
            assert len(reads) == 2 and {graph.nodes[name].device for name in reads} == {device}
            assert set(reads) <= waits(graph, f"stage{stage}/replica{replica}/apply"), "a shard changes after that"


# ---- rows of tables


def looked_up(program: Program, keepers: Sequence[Sequence[str]], *cuts: str) -> Program:
    """The stages of a program whose tables may be in shards by rows."""
    return apply(program, AssignStages(cuts), BuildForward(), BuildBackward(), Partition(keepers=keepers))


def test_a_head_needs_the_whole_table_and_small_tables_are_not_cut() -> None:
    computed = read_program("""
        x[?, 2], w[2, 40], table[40, 2]
        a/scores = MatMul(x, w)
        a/best = ArgMax(a/scores, 1)
        a/rows = GatherV2(table, a/best, 0)
        loss = L2Loss(a/rows)
    """)
    for program, wanted in (
        (embedding(tied=True), "layer 'b' reads all of it (MatMul)"),
        (embedding(tied=False), "it has 4 rows, fewer than 20 for each"),
        (computed, "layer 'a' looks up rows that depend on"),
    ):
        program = looked_up(program, [DEVICES])
        reasons = program.stages[0].whole_tables
        assert reasons["table"].startswith(wanted), reasons
        assert not program.stages[0].lookups and Value(Ref("table")) in program.stages[0].own_forward.inputs
    alone = apply(embedding(tied=False), AssignStages(()), BuildForward(), BuildBackward())
    assert not row_tables(alone, [DEVICES[:1]]), "one device keeps all rows anyway"


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> Program:
    """A table of four rows, two of which are enough for a shard."""
    monkeypatch.setattr("graph_passes.ir.program.ROWS_PER_SHARD", 2)
    return looked_up(embedding(tied=False), [DEVICES])


def test_functions_take_rows_in_place_of_the_table(many_rows: Program) -> None:
    stage = many_rows.stages[0]
    (lookup,) = stage.lookups
    assert lookup.rows == Value(Ref("a/rows"), ValueKind.LOOKED_UP) and stage.indices is not None
    assert stage.indices.outputs == (lookup.indices,)
    assert lookup.rows in stage.own_forward.inputs
    assert Value(Ref("table")) not in {value for function in stage.functions for value in function.inputs}


def test_lookups_go_one_task_ahead_and_rows_change_after_them(many_rows: Program) -> None:
    layout = Layout((DEVICES,), 12, 12, 3)
    schedule = make_schedule("gpipe", [[0, 1]], 3, active=layout.active)
    table = dataclasses.replace(many_rows.variables["table"], shards=2)
    builder = Builder(empty_graph())
    values, indices = (builder.append(placeholder(label, dtype)) for label, dtype in (("g", DOUBLE), ("i", INT32)))
    resource = builder.append(placeholder("table", types_pb2.DT_RESOURCE))
    kinds = {"dtype": dtype_attr(table.dtype), "Tindices": dtype_attr(INT32)}
    effect = builder.add("add", "ResourceScatterAdd", [resource, indices, values], **kinds)
    rows = {"table": (values, indices)}
    adding = Captured(builder.graph, {}, {resource: table}, rows, effects=(effect.node,))
    shards = Shards(frozenset({"table"}), stored=frozenset({"table"}))
    passes = [
        Replicate(layout, HOST, owners(many_rows), in_shards=frozenset({"table"})),
        SplitConcat(),
        Accumulate(),
        OrderTasks(schedule, DEVICES),
        Update((GroupUpdate((0,), adding, shards=shards),), 64),
    ]
    program = apply(many_rows, *passes)
    step, graph = step_of(program), Graph(program.graph)
    for replica, device in enumerate(DEVICES):
        for micro_batch in range(3):
            (name,) = step.ahead[Task.parse(f"0F{micro_batch}.r{replica}")]
            node = graph.nodes[name]
            before = [step.entry[Task.parse(f"0F{micro_batch - 2}.r{replica}")]] if micro_batch == 2 else []
            assert list(control_inputs(node)) == before
        reads = step.shard_reads[(0,), device]
        assert len(reads) == 2 * 3 and {graph.nodes[name].device for name in reads} == {device}
        assert set(reads) <= waits(graph, f"stage0/replica{replica}/apply")


def test_rows_of_gradients_are_separated_in_order_and_none_is_made_up() -> None:
    """Three shards of 20 rows; -1 and 60 are no rows of the table."""
    variable = Variable("table", DOUBLE, (60, 1), VariableKind.PARAMETER, shards=3)
    function = rows_by_shard("by_shard", variable, INT32)
    builder = Builder(empty_graph())
    indices = [45, 3, 59, 21, 3, -1, 60, 20]
    inputs = [builder.const([float(number) for number in range(8)], DOUBLE), builder.const(indices, INT32)]
    node = builder.append(call_node("separated", function, inputs, device=HOST)).node
    merge_library(builder.graph, [function])
    with Machine(builder.graph, 1) as machine:
        values = machine.run([Ref(node, index) for index in range(6)])
    assert [own.tolist() for own in values[:3]] == [[1.0, 4.0], [3.0, 7.0], [0.0, 2.0]]
    assert [own.tolist() for own in values[3:]] == [[3, 3], [1, 0], [5, 19]]


def test_profiles_know_tables_and_what_samples_look_up() -> None:
    words = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(83, 3, name="embedding")(words)
    model = keras.Model(words, keras.layers.Dense(2, name="logits")(keras.layers.Flatten(name="flat")(x)))
    model.compile("adam", "mse")
    program = with_gradients(captured(model), ("embedding", "flat"))
    tables = layer_tables(program, [(6,), (2,)])
    assert [size for size, _ in tables] == [83 * 3 * 4, 0, 0]
    assert tables[0][1].at(5) == pytest.approx(5 * 6 * (3 * 4 + 4))
    assert np.all([rows.at(5) == 0 for _, rows in tables[1:]])
