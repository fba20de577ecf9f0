"""Pass 10: gradients are reduced over replicas and the optimizer is applied on each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import pytest
from program_text import read_program
from programs import (
    DOUBLE,
    FLOAT,
    HOST,
    INT32,
    Machine,
    apply,
    chain,
    connected,
    devices,
    embedding,
    interpret,
    layout,
    node,
    ordered,
    owners,
    sgd,
    sgd_updates,
    show_changes,
    staged,
    stateful_layers,
    step_of,
    tied_layers,
    two_layers,
    two_stages,
    updated,
)
from tensorflow.core.framework import types_pb2

from dapple_tf.schedules.schedules import make_schedule
from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, NodeDef, Ref, control_inputs, data_inputs, dtype_attr
from graph_passes.ir.group_update import Captured, GroupUpdate
from graph_passes.ir.outline import outline, placeholder
from graph_passes.ir.program import Layout, Program, Value
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import graph_text, library_text
from graph_passes.ir.verify import verify
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.update import Update, flush

RATE = 0.5


def calls(program: Program, phase: str) -> dict[str, NodeDef]:
    """Name -> call of a phase."""
    return {each.name: each for each in program.graph.node if each.attr["_dapple_phase"].s.decode() == phase}


def collectives(program: Program) -> dict[str, list[tuple[int, int, int]]]:
    """Device -> (group size, group key, instance key) of its all-reduces in the order in which it starts them."""
    graph = Graph(program.graph)
    by_device: dict[str, list[tuple[int, int, int]]] = {}
    for name in graph.topological():
        each = graph.nodes[name]
        if each.op == "CollectiveReduceV2":
            size, group, instance = (int(value) for value in interpret(program.graph, data_inputs(each)[1:4], {}))
            by_device.setdefault(each.device, []).append((size, group, instance))
    return by_device


class Training:
    """A complete step with its devices."""

    def __init__(self, program: Program, values: Mapping[str, Any]) -> None:
        self.program, self.step = program, step_of(program)
        self.owner_devices = {
            name: [device for stage in stages for device in self.step.layout.devices[stage]]
            for name, stages in owners(program).items()
        }
        count = sum(map(len, self.step.layout.devices))
        self.machine = Machine(program.graph, count)
        for name, value in values.items():
            for device in self.owner_devices.get(name, ()):
                self.machine.load(device, [program.variables[name]], [value])

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.__exit__()

    def train(self, **batch: Any) -> float:
        """One step; returns the loss."""
        feeds = {self.step.feeds[Ref(name)]: value for name, value in batch.items()}
        feeds |= {ref: 0.0 for pair in self.step.metric_feeds.values() for ref in pair}
        assert self.step.loss is not None and self.step.train is not None
        return float(self.machine.run([self.step.loss], feeds, after=[self.step.train])[0])

    def gradients(self, **batch: Any) -> dict[str, np.ndarray]:
        """Reduced gradients of a batch, without an update."""
        feeds = {self.step.feeds[Ref(name)]: value for name, value in batch.items()}
        return dict(zip(self.step.gradients, self.machine.run(list(self.step.gradients.values()), feeds), strict=True))

    def value(self, name: str) -> np.ndarray:
        """The value of a variable, which all devices that keep it must agree on to the last bit."""
        values = [self.machine.read(device, self.program.variables[name])[0] for device in self.owner_devices[name]]
        for other in values[1:]:
            np.testing.assert_array_equal(other, values[0])
        return np.asarray(values[0])


# ---- structure


def test_what_is_added_to_a_step(golden: Callable[[str, str], None]) -> None:
    cut = layout([2, 1], 2)
    before, after = ordered(two_stages(), cut), updated(two_stages(), cut)
    changes = show_changes(graph_text(before.graph), graph_text(after.graph))
    known = [function.signature.name for function in before.graph.library.function]
    golden("update.txt", f"{changes}\n{library_text(after, *known)}")


def test_every_replica_applies_once_and_the_end_waits_for_all() -> None:
    program = updated(two_stages(), layout([3, 2], 6, 2))
    applied = calls(program, "apply")
    assert {name: call.device for name, call in applied.items()} == {
        f"stage{stage}/replica{replica}/apply": device
        for stage, names in enumerate(devices(3, 2))
        for replica, device in enumerate(names)
    }
    train = node(program, step_of(program).train or "")
    assert (train.op, train.device, sorted(control_inputs(train))) == ("NoOp", HOST, sorted(applied))


@pytest.mark.parametrize("policy", ["gpipe", "dapple_a"])
def test_packing_and_applying_wait_for_all_tasks_of_their_replica(policy: str) -> None:
    cut = layout([2, 1], 6, 3)
    program = updated(two_stages(), cut)
    step = step_of(program)
    for what in ("pack", "apply"):
        for call in calls(program, what).values():
            stage, replica = (int(part[-1]) for part in call.name.split("/")[:2])
            own = [t for t in step.exit if (t.stage, t.replica) == (stage, replica)]
            assert {name for each in own for name in step.exit[each]} <= set(control_inputs(call))
    assert len(calls(program, "pack")) == 2


def test_nothing_is_reduced_where_a_stage_has_one_replica() -> None:
    program = updated(two_stages(), layout([1, 1], 4, 2))
    assert not collectives(program)
    assert not calls(program, "pack")


def test_functions_of_a_stage_serve_all_its_replicas() -> None:
    program = updated(two_stages(), layout([3, 2], 6))
    assert {call.attr["f"].func.name for call in calls(program, "apply").values()} == {"stage0_apply", "stage1_apply"}
    names = [function.signature.name for function in program.graph.library.function]
    assert len(names) == len(set(names))


def test_functions_are_built_once_however_many_replicas_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica had them built anew, only for all but one to be dropped: 8 of 20 s of ResNet-50 on 32 devices."""
    built: list[str] = []

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        built.append(name)
        return outline(name, *arguments, **options)

    for module in ("reduce_gradients", "apply_updates"):
        monkeypatch.setattr(f"graph_passes.passes.{module}.outline", counted)
    updated(two_stages(), layout([2, 2], 8))
    few, built = built, []
    updated(two_stages(), layout([4, 4], 8))
    assert few == built and len(built) == len(set(built))


def test_the_loss_has_gradient_one_unless_the_optimizer_scales_it() -> None:
    cut = layout([1, 2], 4)
    program = updated(two_stages(), cut)
    backward = program.stages[1].backward
    assert backward is not None
    position = [str(value.ref) for value in backward.inputs].index("loss")
    for replica, device in enumerate(cut.devices[1]):
        given = data_inputs(node(program, f"stage1/replica{replica}/backward0"))[position]
        assert interpret(program.graph, [given], {})[0] == 1.0
        assert node(program, given.node).device == device


def test_each_replica_reads_the_loss_scale_of_its_own_optimizer() -> None:
    program = ordered(two_stages(), cut := layout([1, 2], 4))
    scale = Builder(empty_graph())
    captured = Captured(scale.graph, {}, {}, outputs=(scale.const(8.0, DOUBLE),))
    first, second = sgd_updates(program, RATE)
    updates = (first, dataclasses.replace(second, loss_scale=captured))
    after = apply(program, Update(updates, owners(program), HOST, 1 << 20))
    scales = calls(after, "loss_scale")
    assert [call.device for call in scales.values()] == list(cut.devices[1])
    for replica in range(2):
        assert Ref(f"stage1/replica{replica}/loss_scale") in data_inputs(
            node(after, f"stage1/replica{replica}/backward0")
        )
    assert step_of(after).pending == {}


# ---- all-reduce


def three_parameters() -> Program:
    """Stage 0 with parameters of 32, 16 and (float32) 8 bytes."""
    program = read_program("""
        x[?, 2], w[2, 2], b[2], c float32[2]
        a/wide = Cast(c, DstT=float64)
        a/matmul = MatMul(x, w)
        a/shifted = AddV2(a/matmul, b)
        a/sum = AddV2(a/shifted, a/wide)
        loss = L2Loss(a/sum)
    """)
    return staged(program)


@pytest.mark.parametrize(("limit", "sizes"), [(1 << 20, [6, 2]), (48, [6, 2]), (47, [4, 2, 2]), (1, [4, 2, 2])])
def test_gradients_are_reduced_in_buckets_of_one_dtype_up_to_a_size(limit: int, sizes: list[int]) -> None:
    program = updated(three_parameters(), layout([2], 4), bucket_bytes=limit)
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=v.shape) for name, v in program.variables.items()}
    packs = calls(program, "pack")
    assert [len(call.attr["Tout"].list.type) for call in packs.values()] == [len(sizes)] * 2
    with Training(program, values) as training:
        feeds = {Ref("batch/x"): rng.normal(size=(4, 2))}
        fetches = [Ref("stage0/replica0/pack", index) for index in range(len(sizes))]
        assert [len(vector) for vector in training.machine.run(fetches, feeds)] == sizes
    kinds = [node(program, f"stage0/replica0/all_reduce{i + 1}").attr["T"].type for i in range(len(sizes))]
    assert kinds == [DOUBLE] * (len(sizes) - 1) + [FLOAT]


def test_each_group_has_its_own_key_and_each_bucket_its_own_instance() -> None:
    program = updated(three_parameters(), layout([3], 4), bucket_bytes=1)
    names = devices(3)[0]
    assert collectives(program) == {device: [(3, 1, 1), (3, 1, 2), (3, 1, 3)] for device in names}


def test_keys_begin_where_they_are_told_to() -> None:
    program = ordered(three_parameters(), layout([2], 4))
    updates = sgd_updates(program, RATE)
    after = apply(program, Update(updates, owners(program), HOST, 1 << 20, first_key=100, prefix="p_"))
    assert collectives(after) == {device: [(2, 100, 100), (2, 100, 101)] for device in devices(2)[0]}
    made = {call.attr["f"].func.name for what in ("pack", "apply", "gradients") for call in calls(after, what).values()}
    assert made == {"p_stage0_pack", "p_stage0_apply", "p_stage0_gradients"}


def tied_and_own(split: Container[int] = ()) -> Program:
    """``w`` in stages 0 and 2; ``u`` in 0, ``v`` in 1 and ``t`` in 2."""
    return staged(chain("a: w u", "b: v", "c: w t"), "a", "b", split=split)


def test_a_tied_weight_is_reduced_over_all_devices_of_its_stages() -> None:
    program = updated(tied_and_own(), layout([2, 1, 2], 4))
    first, second, third = devices(2, 1, 2)
    by_device = collectives(program)
    assert set(by_device) == {*first, *third}
    last, tied, own = (2, 1, 1), (4, 2, 2), (2, 3, 3)
    assert {device: by_device[device] for device in third} == {device: [last, tied] for device in third}
    assert {device: by_device[device] for device in first} == {device: [tied, own] for device in first}
    assert second[0] not in by_device


def test_two_stages_of_one_replica_each_still_reduce_what_they_share() -> None:
    program = updated(staged(tied_layers(2), "layer_0"), layout([1, 1], 4))
    assert collectives(program) == {device: [(2, 1, 1)] for (device,) in devices(1, 1)}


@pytest.mark.parametrize("counts", [(2, 1, 2), (3, 2, 1), (1, 3, 3)])
@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_all_members_start_their_collectives_in_one_order(counts: tuple[int, ...], limit: int) -> None:
    program = updated(tied_and_own(), layout(counts, 6), bucket_bytes=limit)
    orders = [[instance for _, _, instance in keys] for keys in collectives(program).values()]
    assert orders
    assert all(order == sorted(order) for order in orders)
    for device, keys in collectives(program).items():
        names = [each.name for each in program.graph.node if each.op == "CollectiveReduceV2" and each.device == device]
        for before, after in itertools.pairwise(names):
            assert before in control_inputs(node(program, after))
        assert len(names) == len(keys)


def test_a_stage_that_keeps_a_variable_without_contributing_adds_zeros() -> None:
    program = ordered(staged(stateful_layers(), "a"), layout([1, 1], 4))
    kept = {**owners(program), "average": (0, 1)}
    after = apply(program, Update(sgd_updates(program, RATE), kept, HOST, 1 << 20))
    library = {function.signature.name: function for function in after.graph.library.function}
    ops = {stage: [each.op for each in library[f"stage0_1_pack_on{stage}"].node_def] for stage in range(2)}
    assert "ReadVariableOp" in ops[0] and "Fill" not in ops[0]
    assert "Fill" in ops[1] and "ReadVariableOp" not in ops[1]


def test_a_replica_without_samples_contributes_zeros() -> None:
    program = updated(two_stages(), layout([3, 1], 2))
    assert list(calls(program, "accumulate_nothing")) == ["stage0/replica2/accumulate_nothing"]
    waits = control_inputs(node(program, "stage0/replica2/pack"))
    assert waits == ["stage0/replica2/accumulate_nothing"]


# ---- one micro-batch


def test_gradients_of_one_micro_batch_are_taken_from_the_tasks_that_made_them() -> None:
    program = updated(two_stages(), layout([2, 1], 2), accumulated=False)
    library = {function.signature.name: function for function in program.graph.library.function}
    touched = {each.attr["shared_name"].s.decode() for function in library.values() for each in function.node_def} - {
        ""
    }
    assert touched == {"w", "v"}
    packs, applies = calls(program, "pack"), calls(program, "apply")
    assert {name: list(map(str, data_inputs(call))) for name, call in packs.items()} == {
        "stage0/replica0/pack": ["stage0/replica0/backward0"],
        "stage0/replica1/pack": ["stage0/replica1/backward0"],
    }
    assert list(map(str, data_inputs(applies["stage1/replica0/apply"]))) == ["stage1/replica0/backward0:1"]
    # Steps with several micro-batches, of other batches, have functions of their own.
    names = {call.attr["f"].func.name for call in (*packs.values(), *applies.values())}
    assert all(name.endswith("_at_once") for name in names)


def test_a_replica_without_samples_gives_zeros_where_nothing_is_accumulated() -> None:
    program = updated(two_stages(), layout([3, 1], 2), accumulated=False)
    (given,) = data_inputs(calls(program, "pack")["stage0/replica2/pack"])
    zeros = node(program, given.node)
    assert zeros.op == "Fill" and zeros.device == devices(3)[0][2]


def test_what_is_carried_over_needs_accumulators() -> None:
    program = ordered(two_stages(), layout([1, 1], 2), accumulated=False)
    update = Update(sgd_updates(program, RATE), owners(program), HOST, 1 << 20, accumulated=False, carried=((1,),))
    with pytest.raises(PassError, match=r"updates are carried over, but gradients have no accumulators"):
        update.run(program)


def test_stages_on_one_device_add_up_what_they_have_made_themselves() -> None:
    program = staged(tied_layers(), "layer_0")
    alone = Layout(((HOST,), (HOST,)), 4, 4, 1)
    program = apply(program, Replicate(alone, HOST, owners(program)), SplitConcat())
    update = Update(sgd_updates(program, RATE), owners(program), HOST, 1 << 20, accumulated=False)
    after = apply(program, update)
    verify(after, complete=True)
    (call,) = calls(after, "apply").values()
    assert {ref.node for ref in data_inputs(call)} == {"stage0/replica0/backward0", "stage1/replica0/backward0"}


# ---- numbers


def plain_step(x: np.ndarray, w: np.ndarray, v: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and gradients of ``programs.two_layers``."""
    h = np.tanh(x @ w)
    return np.sum((h @ v) ** 2) / 2, x.T @ ((h @ v @ v.T) * (1 - h**2)), h.T @ h @ v


@pytest.mark.parametrize(
    ("cut", "limit", "accumulated"),
    [
        (layout([2, 1], 5, 2), 1 << 20, True),
        (layout([2, 1], 5, 2), 1, True),
        (layout([1, 2], 7, 3), 1 << 20, True),
        (layout([3], 7, 2), 1 << 20, True),
        (layout([3, 1], 2), 1 << 20, True),
        (layout([2, 1], 3, 4, global_batch_size=8), 1 << 20, True),
        (layout([2, 1], 5), 1, False),
        (layout([3], 7), 1 << 20, False),
        (layout([3, 1], 2), 1 << 20, False),
    ],
    ids=[
        "2:1",
        "2:1 in two buckets",
        "1:2",
        "3 of one stage",
        "a replica without samples",
        "a short batch",
        "2:1 at once",
        "3 of one stage at once",
        "a replica without samples at once",
    ],
)
def test_three_replicas_train_like_one_device(cut: Layout, limit: int, accumulated: bool) -> None:
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(2, 3)), rng.normal(size=(3, 1))
    program = two_stages() if len(cut.devices) == 2 else staged(two_layers())
    complete = updated(program, cut, bucket_bytes=limit, rate=0.1, accumulated=accumulated)
    with Training(complete, {"w": w, "v": v}) as training:
        for _ in range(3):
            x = rng.normal(size=(cut.batch, 2))
            expected, dw, dv = plain_step(x, w, v)
            assert np.abs(dw).min() > 0 and np.abs(dv).min() > 0
            assert training.train(x=x) == pytest.approx(expected, rel=1e-12)
            w, v = w - 0.1 * dw, v - 0.1 * dv
            np.testing.assert_allclose(training.value("w"), w, rtol=1e-11)
            np.testing.assert_allclose(training.value("v"), v, rtol=1e-11)


def test_gradients_are_told_without_an_update() -> None:
    rng = np.random.default_rng(0)
    x, w, v = rng.normal(size=(5, 2)), rng.normal(size=(2, 3)), rng.normal(size=(3, 1))
    _, dw, dv = plain_step(x, w, v)
    with Training(updated(two_stages(), layout([2, 1], 5, 2)), {"w": w, "v": v}) as training:
        for _ in range(2):
            gradients = training.gradients(x=x)
            np.testing.assert_allclose(gradients["w"], dw, rtol=1e-12)
            np.testing.assert_allclose(gradients["v"], dv, rtol=1e-12)
        np.testing.assert_array_equal(training.value("w"), w)
        np.testing.assert_array_equal(training.value("v"), v)


def test_tied_weights_stay_equal_and_get_the_gradient_of_all_their_uses() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 2)), rng.normal(size=(2, 2))
    h = np.tanh(x @ w)
    y = np.tanh(h @ w)
    dy = y * (1 - y**2)
    expected = w - 0.1 * (x.T @ (dy @ w.T * (1 - h**2)) + h.T @ dy)
    program = updated(staged(tied_layers(2), "layer_0"), layout([2, 1], 5, 2), rate=0.1)
    with Training(program, {"w": w}) as training:
        assert training.train(x=x) == pytest.approx(np.sum(y**2) / 2, rel=1e-12)
        np.testing.assert_allclose(training.value("w"), expected, rtol=1e-12)


@pytest.mark.slow
def test_moving_averages_are_those_of_the_batch_and_counters_count_steps() -> None:
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {"w": rng.normal(size=(2, 2)), "v": rng.normal(size=(2, 2))}
    values |= {"average": rng.normal(size=2), "count": np.int32(5)}
    program = updated(staged(stateful_layers(), "a"), layout([2, 2], 5, 2), rate=0.0)
    average = values["average"]
    with Training(program, values) as training:
        for step in range(1, 4):
            x = rng.normal(size=(5, 2))
            training.train(x=x)
            average = average + (x @ values["w"]).mean(axis=0)
            np.testing.assert_allclose(training.value("average"), average, rtol=1e-12)
            assert training.value("count") == 5 + step


def scattering(program: Program) -> tuple[GroupUpdate, ...]:
    """``table[indices] -= rows`` in stage 0 and plain SGD in stage 1."""
    builder = Builder(empty_graph())
    table = program.variables["table"]
    resource = builder.append(placeholder("resource", types_pb2.DT_RESOURCE))
    rows, indices = builder.append(placeholder("rows", DOUBLE)), builder.append(placeholder("indices", INT32))
    kind = {"dtype": dtype_attr(DOUBLE), "Tindices": dtype_attr(INT32)}
    effect = builder.add("scatter", "ResourceScatterSub", [resource, indices, rows], **kind).node
    first = Captured(builder.graph, {}, {resource: table}, {"table": (rows, indices)}, effects=(effect,))
    return GroupUpdate((0,), first), GroupUpdate((1,), sgd([program.variables["v"]], 1.0))


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (3, 2)])
def test_rows_of_an_embeddings_gradient_reach_every_replica_from_all(counts: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    table, v, tokens = rng.normal(size=(4, 2)), rng.normal(size=(2, 4)), np.array([1, 3, 1, 0, 1])
    program = ordered(staged(embedding(tied=False), "a"), layout(counts, 5, 2))
    program = apply(program, Update(scattering(program), owners(program), HOST, 1 << 20))
    verify(program, complete=True)
    dh = table[tokens] @ v @ v.T
    whole = np.zeros_like(table)
    np.add.at(whole, tokens, dh)
    with Training(program, {"table": table, "v": v}) as training:
        np.testing.assert_allclose(training.gradients(tokens=tokens)["table"], whole, rtol=1e-12)
        training.train(tokens=tokens)
        np.testing.assert_allclose(training.value("table"), table - whole, rtol=1e-12)
        np.testing.assert_allclose(training.value("v"), v - table[tokens].T @ table[tokens] @ v, rtol=1e-12)


# ---- what optimizers must know of all gradients


def scaled_by_totals(program: Program) -> tuple[GroupUpdate, ...]:
    """Each stage tells the sum of its gradients, and descends by its gradient times the sum over all stages."""
    updates = []
    for stage in program.stages:
        variable = program.variables["wv"[stage.index]]
        builder = Builder(empty_graph())
        gradient = builder.append(placeholder("gradient", DOUBLE))
        axes = builder.const([0, 1], INT32)
        total = builder.add("total", "Sum", [gradient, axes], T=dtype_attr(DOUBLE), Tidx=dtype_attr(INT32))
        statistics = Captured(builder.graph, {variable.name: gradient}, {}, outputs=(total,))
        builder = Builder(empty_graph())
        gradient, totals = (builder.append(placeholder(name, DOUBLE)) for name in ("gradient", "totals"))
        resource = builder.append(placeholder("resource", types_pb2.DT_RESOURCE))
        inputs = [resource, totals, gradient]
        effect = builder.add("descent", "ResourceApplyGradientDescent", inputs, T=dtype_attr(DOUBLE)).node
        captured = Captured(
            builder.graph, {variable.name: gradient}, {resource: variable}, totals=totals, effects=(effect,)
        )
        updates.append(GroupUpdate((stage.index,), captured, statistics))
    return tuple(updates)


def test_statistics_of_all_stages_add_up_and_reach_every_replica() -> None:
    rng = np.random.default_rng(0)
    x, w, v = rng.normal(size=(5, 2)), rng.normal(size=(2, 3)), rng.normal(size=(3, 1))
    program = ordered(two_stages(), layout([2, 2], 5, 2))
    program = apply(program, Update(scaled_by_totals(program), owners(program), HOST, 1 << 20))
    verify(program, complete=True)
    assert {each.device for each in calls(program, "statistics").values()} == {names[0] for names in devices(2, 2)}
    assert {data_inputs(call)[-1] for call in calls(program, "apply").values()} == {Ref("totals")}
    _, dw, dv = plain_step(x, w, v)
    total = dw.sum() + dv.sum()
    with Training(program, {"w": w, "v": v}) as training:
        training.train(x=x)
        np.testing.assert_allclose(training.value("w"), w - total * dw, rtol=1e-11)
        np.testing.assert_allclose(training.value("v"), v - total * dv, rtol=1e-11)


def test_results_of_the_first_slice_are_the_new_values_of_counters() -> None:
    program = updated(staged(stateful_layers(), "a"), layout([2, 2], 4, 2))
    update = program.variables["count"].update
    assert update is not None
    first = step_of(program).values[next(t for t in step_of(program).entry if str(t) == "1F0"), Value(update)]
    assert all(first in data_inputs(call) for name, call in calls(program, "apply").items() if "stage1" in name)


def test_stages_on_one_device_add_up_what_they_share_and_apply_it_once() -> None:
    program = staged(tied_layers(), "layer_0")
    alone = Layout(((HOST,), (HOST,)), 4, 4, 2)
    program = apply(program, Replicate(alone, HOST, owners(program)), SplitConcat(), Accumulate())
    after = apply(program, Update(sgd_updates(program, RATE), owners(program), HOST, 1 << 20))
    verify(after, complete=True)
    assert not collectives(after) and not calls(after, "pack")
    assert [call.attr["f"].func.name for call in calls(after, "apply").values()] == ["stage0_1_apply"]
    library = {function.signature.name: function for function in after.graph.library.function}
    names = {each.attr["shared_name"].s.decode() for each in library["stage0_1_apply"].node_def}
    assert names - {""} == {"w", "w/gradient/stage0", "w/gradient/stage1"}


# ---- stages that share devices, and the order of reductions


def ordered_chunks(k: int = 0) -> Program:
    """``tied_and_own`` in three stages, all on the same two devices, the first k reversed."""
    names = devices(2)[0]
    order = make_schedule("dapple_a", [[0, 1]] * 3, 1, reverse_first_k=k)
    program = connected(tied_and_own(split=range(k)), Layout((names,) * 3, 4, 4, 1))
    return apply(program, Accumulate(), OrderTasks(order, names))


def chunked(k: int = 0, **options: Any) -> Program:
    """:func:`ordered_chunks`, complete."""
    program = ordered_chunks(k)
    after = apply(program, Update(sgd_updates(program, RATE), owners(program), HOST, 1 << 20, **options))
    verify(after, complete=True)
    return after


def ends_before(program: Program, name: str) -> set[str]:
    """Tasks that a node waits for directly."""
    exits = {end: str(task) for task, ends in step_of(program).exit.items() for end in ends}
    return {exits[waited] for waited in control_inputs(node(program, name)) if waited in exits}


def test_a_chunk_is_reduced_when_its_own_tasks_are_over() -> None:
    program = chunked()
    assert ends_before(program, "stage2/replica0/pack") == {"2F0", "2B0"}
    assert ends_before(program, "stage1/replica0/pack") == {"1F0", "1B0"}
    assert ends_before(program, "stage0_2/replica1/pack") == {"0F0.r1", "0B0.r1", "2F0.r1", "2B0.r1"}


def test_without_wait_free_reduction_a_chunk_waits_for_the_whole_device() -> None:
    program = chunked(wait_free=False)
    for stage in ("stage0", "stage1", "stage2", "stage0_2"):
        assert ends_before(program, f"{stage}/replica0/pack") == {"0F0", "1F0", "2F0", "2B0", "1B0", "0B0"}


def test_a_weight_of_two_chunks_is_packed_as_their_sum_and_applied_once() -> None:
    program = chunked()
    packed = next(f for f in program.graph.library.function if f.signature.name == "stage0_2_pack")
    assert [each.op for each in packed.node_def].count("ReadVariableOp") == 2
    assert "AddN" in [each.op for each in packed.node_def]
    assert sorted(calls(program, "apply")) == sorted(
        f"{group}/replica{replica}/apply" for group in ("stage0", "stage1", "stage2", "stage0_2") for replica in (0, 1)
    )


@pytest.mark.parametrize(("k", "order"), [(0, ["2", "1", "0_2", "0"]), (2, ["2", "0_2", "0", "1"])])
def test_reductions_run_in_the_order_in_which_gradients_are_complete(k: int, order: list[str]) -> None:
    program = chunked(k)
    place = devices(2)[0][0]
    names = [each.name for each in program.graph.node if each.op == "CollectiveReduceV2" and each.device == place]
    assert [name.split("/")[0].removeprefix("stage") for name in names] == order


# ---- updates that are carried over


def test_what_is_carried_over_is_reduced_at_the_head_of_the_next_step() -> None:
    first = chunked(carried=((1,), (0,)))
    assert sorted({name.split("/")[0] for name in calls(first, "apply")}) == ["stage0_2", "stage2"]
    # Nothing reads these accumulators in this step, but they must be complete at its end.
    train = control_inputs(node(first, "train"))
    assert {"stage0/replica1/accumulate_B0", "stage1/replica0/accumulate_B0"} <= set(train)
    following = chunked(carried=((1,), (0,)), head=True)
    carried = calls(following, "carried_apply")
    assert sorted(carried) == [f"stage{s}/replica{r}/carried_apply" for s in (0, 1) for r in (0, 1)]
    assert not any(ends_before(following, name) for name in carried)
    for stage in (0, 1):
        reader = node(following, f"stage{stage}/replica1/read_from{stage}")
        assert f"stage{stage}/replica1/carried_apply" in control_inputs(reader)
    assert not control_inputs(node(following, "stage2/replica0/read_from2"))


def test_a_flush_makes_carried_updates_and_nothing_else() -> None:
    program = ordered_chunks()
    graph, end = flush(Update(sgd_updates(program, RATE), owners(program), HOST, 1 << 20, carried=((1,),)), program)
    ops = [each.op for each in graph.node if each.op != "Const"]
    assert sorted(set(ops)) == ["CollectiveReduceV2", "NoOp", "StatefulPartitionedCall"]
    assert {each.name.split("/")[0] for each in graph.node if "/" in each.name} == {"stage1"}
    assert set(control_inputs(Graph(graph).nodes[end])) == {f"stage1/replica{r}/carried_apply" for r in (0, 1)}
