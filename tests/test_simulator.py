"""The simulator against closed forms, schedules worked out by hand, and what holds for any plan; relays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hardware import NAMES, chain
from hardware import cluster_of as cluster
from schedule_runs import there_and_back

from dapple_tf.describe.cluster import Cluster, Server
from dapple_tf.describe.layer_profile import ZERO, Cost, LayerBuffers, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
from dapple_tf.planning.planner import plan as planned
from dapple_tf.schedules.schedules import POLICIES, make_schedule
from dapple_tf.simulation.cost import CostModel, Leg
from dapple_tf.simulation.simulator import Simulation, simulate
from dapple_tf.view.timeline import Span
from graph_passes.ir.tasks import Phase, Schedule, Task, sources_of

WHOLE = ("gpipe", "dapple_a", "dapple_b")  # no Bx and Bw
STRAIGHT = [policy for policy in POLICIES if not there_and_back(policy)]  # one stage on each device will do


def straight(stages: int, micro_batches: int, schedule: str = "dapple_a", samples: int = 1, **options: Any) -> Plan:
    return Plan.straight(NAMES[: stages - 1], samples * micro_batches, micro_batches, schedule, **options)


def replicated(replicas: Sequence[int], micro_batches: int, samples: int, schedule: str = "dapple_a") -> Plan:
    numbers = itertools.count()
    devices = [list(itertools.islice(numbers, count)) for count in replicas]
    return Plan.manual(NAMES[: len(replicas) - 1], devices, micro_batches, samples * micro_batches, schedule)


# --- pipelines with a closed form ---


@pytest.mark.parametrize("schedule", WHOLE)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (3, 2), (4, 8)])
def test_equal_stages_take_m_plus_s_minus_1_rounds(stages: int, micro_batches: int, schedule: str) -> None:
    step = simulate(straight(stages, micro_batches, schedule), chain([(1.0, 2.0)] * stages), cluster(stages))
    rounds = micro_batches + stages - 1
    assert step.latency == pytest.approx(rounds * 3.0)
    assert step.bubbles == pytest.approx([(stages - 1) / rounds] * stages)
    assert step.throughput == pytest.approx(micro_batches / (rounds * 3.0))


@pytest.mark.parametrize("transfer", [0.25, 1.0])
def test_gpipe_hides_all_transfers_but_those_of_the_first_and_the_last_micro_batch(transfer: float) -> None:
    where = cluster(1, 1, 1, 1, inter_bandwidth=8.0, inter_latency=0.125)
    step = simulate(straight(4, 8, "gpipe"), chain([(1.0, 2.0)] * 4, 8.0 * transfer), where)
    assert step.latency == pytest.approx((8 + 4 - 1) * 3 + 2 * (4 - 1) * (transfer + 0.125))


def cut_everywhere(plan: Plan, model: Profile) -> Plan:
    """The plan with backwards cut after every layer."""
    names = [layer.name for layer in model.layers[:-1] if layer.name not in plan.cuts]
    return dataclasses.replace(plan, backward_cuts=tuple(names))


# --- steps worked out by hand ---

# 2 x 100 for weights and gradients, 50 for slots: 250 stored; 30 kept per sample, 5 while a B runs.
HEAVY = {
    "residual_bytes": Cost(0.0, 30.0),
    "temporary_bytes": Cost(5.0),
    "parameter_bytes": 100,
    "slot_bytes": 50,
}


def two_pieces(cut: bool, **options: Any) -> Simulation:
    """A B of 4 s through two layers, whose gradients take 1 s each to reduce over two devices."""
    plan = Plan.data_parallel(2, 4, 2, backward_cuts=NAMES[:1] if cut else ())
    model = chain([(1.0, 2.0), (1.0, 2.0)], parameter_bytes=8, apply_seconds=0.25)
    return simulate(plan, model, cluster(2, intra_bandwidth=8.0, **options))


def chunks(count: int, seconds: float = 1.0, **options: Any) -> Simulation:
    """Data parallelism on two devices in stages of F = Bx = Bw = 1 whose gradients take so long to reduce."""
    plan_options = {name: options.pop(name) for name in ("reverse_first_k", "wait_free") if name in options}
    plan = Plan.manual(NAMES[: count - 1], [[0, 1]] * count, 1, 2, "gpipe", **plan_options)
    model = chain([(1.0, 2.0)] * count, parameter_bytes=4, apply_seconds=options.pop("apply_seconds", 0.0))
    return simulate(plan, model, cluster(2, intra_bandwidth=4.0 / seconds), **options)


def skips(count: int, **layer: Any) -> Profile:
    """Layers in a row, which hand nothing to each other but all read a tensor of the first."""
    tensors = [Tensor(index, (index + 1,), ZERO) for index in range(1, count - 1)]
    first = Tensor(0, tuple(range(1, count)), Cost(0.0, 4.0))
    return chain([(1.0, 2.0)] * count, [first, *tensors], **layer)


def slow(count: int, bandwidth: float = 1.0) -> Cluster:
    """Devices of which each sends so many bytes a second."""
    return cluster(*[1] * count, inter_bandwidth=bandwidth)


def carrying(shared: Any = (), **options: Any) -> Simulation:
    """Three layers of F 1, Bx 1, Bw 1 s (the first without Bx) on two devices; each all-reduce takes 2 s."""
    model = chain([(1.0, 1.0), (1.0, 2.0), (1.0, 2.0)], 0.0, parameter_bytes=2, shared=shared)
    layers = [dataclasses.replace(layer, backward_weight=Cost(1.0)) for layer in model.layers]
    plan = Plan.manual(NAMES[:2], [[0, 1]] * 3, 1, 2, **options)
    return simulate(plan, dataclasses.replace(model, layers=layers), cluster(2, intra_bandwidth=1.0))


def shown(step: Simulation) -> str:
    """Tasks and updates of each device, transfers and reductions with their times, and levels of memory."""

    def text(span: Span) -> str:
        names = {"send": f"{span.device}>{span.target}", "all_reduce": f"reduction {span.reduction}"}
        micro_batch = "" if span.micro_batch is None else span.micro_batch
        return f"{names.get(span.kind, f'{span.stage}{span.kind}{micro_batch}')}@{span.start:.4g}-{span.end:.4g}"

    lines = [f"{step.latency:.6g} s"]
    lines += [f"{device}: " + " ".join(map(text, spans)) for device, spans in step.timeline.items()]
    lines.append(" ".join(text(span) for span in step.spans if span.kind in ("send", "all_reduce")))
    for device, curve in step.memory.items():
        lines.append(f"memory {device}: " + " ".join(f"{level:g}@{time:.4g}" for time, level in curve))
    return "\n".join(filter(None, lines))


def test_steps_worked_out(golden: Callable[[str, str], None]) -> None:
    texts: list[str] = []

    def step(title: str, made: Simulation | Plan, *given: Any, **options: Any) -> None:
        made = simulate(made, *given, **options) if isinstance(made, Plan) else made
        texts.append(f"{title}\n{shown(made)}\n")

    one, two, three = (([(1.0, 2.0)] * count) for count in (1, 2, 3))
    # A lookup takes 1 s for half of 120 bytes, and the links' latency for indices and for rows.
    (table,) = chain(one, parameter_bytes=120).layers
    layer = dataclasses.replace(table, table_bytes=120, row_bytes=Cost(0.0, 120.0))
    rows = dataclasses.replace(chain(one), layers=(layer,)), cluster(2, intra_bandwidth=60.0, intra_latency=0.5)
    by_row = Plan.data_parallel(2, 6, 3, row_shards=True)
    step("lookups go one task ahead, forwards wait for them", by_row, *rows)
    step("the next step's lookups wait for the update of rows", by_row, *rows, next_forward=True)

    step("a slow link is the bottleneck of gpipe", straight(2, 5, "gpipe"), chain(two, 12.0), slow(2, 3.0))
    step("with K = 1 a micro-batch comes back first", straight(2, 3, warm_up=(1, 1)), chain(two, 8.0), slow(2, 16.0))
    uneven = chain([(1.0, 1.0), (3.0, 4.0), (1.0, 1.0)])
    step("the slowest stage is never idle in the steady phase", straight(3, 8), uneven, cluster(3))

    shared = cluster(2, 2, inter_bandwidth=3.0)
    step("transfers share a network card", replicated([2, 2], 1, 2), chain(two, 6.0), shared)
    step("a card sends and receives at once", straight(2, 2, "gpipe"), chain([(1.0, 1.0)] * 2, 4.0), slow(2, 2.0))
    late = cluster(3, intra_bandwidth=3.0, intra_latency=0.5)
    step("latency delays a message but not the next one", replicated([1, 2], 1, 2), chain(two, 6.0), late)
    unlike = (Server(inter_bandwidth=8.0, inter_latency=0.25), Server(inter_bandwidth=2.0))
    step("between servers the slower card decides", straight(2, 1), chain(two, 4.0), cluster(1, 1, servers=unlike))
    skip = [Tensor(0, (1,), Cost(1.0)), Tensor(1, (2,), Cost(1.0)), Tensor(0, (2,), Cost(10.0))]
    step("a skip holds up its reader, the nearest stage comes first", straight(3, 1), chain(three, skip), slow(3))

    model, unequal = (
        chain(one, parameter_bytes=20, apply_seconds=0.5),
        cluster(2, speeds=[1.0, 2.0], intra_bandwidth=4.0),
    )
    step("an all-reduce waits for the last replica, the update follows", Plan.data_parallel(2, 4, 2), model, unequal)
    model = chain(three, shared=[SharedParameters((0, 2), 30)], apply_seconds=1.0)
    step("tied weights are reduced once both stages are done", straight(3, 2), model, slow(3, 10.0))
    step("one piece", two_pieces(cut=False))
    step("pieces are reduced while B goes on", two_pieces(cut=True))
    step("where cores are shared pieces end later, but in time", two_pieces(cut=True, servers=(Server(capacity=1.0),)))

    step("twice the speed, half the time", straight(2, 1), chain(two), cluster(2, speeds=[1.0, 2.0]))
    model = chain(one, apply_seconds=1.0)
    for capacity in (1.0, 1.5):
        where = cluster(2, servers=(Server(capacity=capacity),))
        step(f"two devices on {capacity} cores slow each other down", Plan.data_parallel(2, 2), model, where)
    forward = make_schedule("gpipe", [[0, 1]], 1, forward_only=True)
    model = dataclasses.replace(model, layers=(LayerProfile(NAMES[0], Cost(0.0, 1.0), ZERO),))
    where = cluster(2, servers=(Server(capacity=1.0),))
    step("only while the other runs", Plan.data_parallel(2, 3), model, where, schedule=forward)

    plan, model = replicated([2, 1, 1], 4, 2), chain(three, parameter_bytes=5, apply_seconds=1.0)
    forward = make_schedule("gpipe", plan.devices, 4, forward_only=True)
    step("forwards alone reduce and update nothing", plan, model, cluster(4), schedule=forward)
    # The first stage has no input gradients: its Bx takes no time and waits for nothing, its Bw is the whole B.
    split = Schedule.parse("0: 0F0 0F1 0Bx0 0Bx1 0Bw0 0Bw1\n1: 1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1")
    model = chain(two, parameter_bytes=4, apply_seconds=0.5)
    step("weight gradients fill the wait for input gradients", straight(2, 2), model, cluster(2), schedule=split)
    plan = Plan.manual(NAMES[:2], [[0], [0], [1]], 1, 1, "gpipe")
    step("what stays on a device is there at once", plan, chain(three, 4.0), slow(2, 4.0))

    step("gradients are reduced while other stages compute theirs", chunks(3))
    step("gradients are reduced at the end", chunks(3, wait_free=False))
    step("one reduction at a time, in the order of completion", chunks(3, seconds=4.0))
    step("reductions in a given order", chunks(3, seconds=4.0, reduction_order=[0, 1, 2]))
    step("reverse first-k brings the first stages' gradients forward", chunks(3, reverse_first_k=2))
    plan = Plan.manual(NAMES[:2], [[0, 1], [0, 1], [2]], 1, 2, "gpipe")
    model = chain(three, parameter_bytes=4, shared=[SharedParameters(own, 4) for own in ((0, 2), (1, 2))])
    step("by place in a device's order, then the later stages first", plan, model, cluster(3, intra_bandwidth=4.0))
    plan, order = Plan.manual(NAMES[:2], [[0], [1], [0]], 1, 1, "modulo"), "0: 0F0 2F0 2B0 0B0\n1: 1F0 1B0"
    model = chain([(1.0, 1.0), (1.0, 4.0), (1.0, 1.0)], parameter_bytes=4, apply_seconds=3.0)
    step("updates fill waits, and let tasks go first", plan, model, cluster(2), schedule=Schedule.parse(order))
    next_step = chunks(3, seconds=2.0, apply_seconds=0.5, next_forward=True)
    step("the next step's forwards wait for their stages' updates", next_step)
    step("nothing is carried over", carrying())
    step("what is carried over is reduced in its stage's forward", carrying(carried_updates=1, reverse_first_k=2))
    # Its own update was awaited together with the shared one, which comes at the end of the step: a deadlock.
    tied = carrying([SharedParameters((0, 2), 2, 0)], carried_updates=4, reverse_first_k=2)
    step("stages that share parameters carry nothing over", tied)

    plan, model = Plan.data_parallel(1, 2, 2, "gpipe"), chain(one, **HEAVY)
    step("memory of one device", plan, model, cluster(1))
    step("memory with the next step's forwards", plan, model, cluster(1), next_forward=True)
    model = chain(two, 0.0, residual_bytes=Cost(0.0, 30.0), parameter_bytes=4)
    split = Schedule.parse("0: 0F0 0F1 0B0 0B1\n1: 1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1")
    step("weight gradients keep the residuals until they are done", straight(2, 2), model, cluster(2), schedule=split)
    less = [dataclasses.replace(layer, delayed_bytes=Cost(0.0, 10.0)) for layer in model.layers]
    model = dataclasses.replace(model, layers=less)
    step("weight gradients keep less", straight(2, 2), model, cluster(2), schedule=split)
    # What rose and fell at one time cancelled out, so that a free layer seemed to need nothing.
    free = LayerProfile(NAMES[1], ZERO, ZERO, residual_bytes=Cost(0, 5.0), temporary_bytes=Cost(0, 10.0))
    model = dataclasses.replace(model, layers=(model.layers[0], free))
    step("a task of no time needs its memory all the same", straight(2, 1), model, cluster(1, 1))

    step("a tensor goes to each reader", straight(3, 1), skips(3), slow(3))
    step("a relay hands it on at once, and adds its gradient first", straight(3, 1, relays=[1]), skips(3), slow(3))
    model, where = skips(3, buffers=LayerBuffers()), cluster(2, 1, inter_bandwidth=0.5, intra_bandwidth=100.0)
    for relays in ([], [1]):  # Stage 1 needs the tensor for 1 s, but its card for 8 s: others wait there.
        step(f"what waits on its way counts: relays {relays}", straight(3, 6, "gpipe", relays=relays), model, where)
    model = chain([(1.0, 2.0), (1.0, 50.0), (1.0, 2.0)], skips(3).tensors, buffers=LayerBuffers())
    step("a gradient waits for that of its relay", straight(3, 1, relays=[1]), model, slow(3))
    golden("simulated_steps.txt", "\n".join(texts))


def test_what_cannot_be_simulated_is_refused() -> None:
    stuck = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")
    with pytest.raises(ValueError, match="the schedule deadlocks: 0B0, 1F1 wait for ever"):
        simulate(straight(2, 2), chain([(1.0, 2.0)] * 2), cluster(2), schedule=stuck)
    with pytest.raises(
        ValueError, match=r"reduction_order is \[0, 1\]; there are 3 reductions, give the order of 0 to 2"
    ):
        chunks(3, reduction_order=[0, 1])
    with pytest.raises(TypeError, match=r"profile is 'profile.json'; give a .* or Profile.load\(path\)"):
        simulate(straight(1, 1), "profile.json", cluster(1))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="relays has stage 4; with 4 stages they are numbered 0 to 3"):
        straight(4, 4, relays=[4])


def test_whether_a_schedule_fits_is_a_matter_of_its_peak() -> None:
    plan, model = straight(2, 4, "gpipe"), chain([(1.0, 2.0)] * 2, 0.0, **HEAVY)
    step = simulate(plan, model, cluster(2, memory=250 + 4 * 30 + 5))
    assert step.fits
    step.check_memory()
    greedy = make_schedule("gpipe", plan.devices, 4)
    limited = simulate(straight(2, 4), model, cluster(2, memory=250 + 2 * 30 + 5), schedule=greedy)
    assert not limited.fits
    with pytest.raises(PlanError, match="device 1 needs 375 bytes, 60 bytes more than it has"):
        limited.check_memory()


def test_memory_bounds_how_many_micro_batches_are_in_flight() -> None:
    model = chain([(1.0, 2.0)] * 4, 0.0, **HEAVY)
    free = simulate(straight(4, 8), model, cluster(4))
    bound = simulate(straight(4, 8), model, cluster(4, memory=250 + 2 * 30 + 5))
    assert free.costs.warm_up == (4, 3, 2, 1)
    assert bound.costs.warm_up == (2, 2, 2, 1)
    assert max(bound.peak_bytes.values()) == 315
    assert bound.latency > free.latency == (8 + 3) * 3


# --- what it tells ---


def test_text() -> None:
    model = chain([(1e-3, 2e-3)] * 2, 4.0, parameter_bytes=2**20, apply_seconds=5e-4)
    links = {"intra_bandwidth": 1e9, "inter_bandwidth": 1e4}
    step = simulate(replicated([2, 1], 4, 2), model, cluster(2, 1, **links))
    assert str(step) == (
        "step 19.35 ms, 413.5 samples/s\n"
        "stage  devices  bubble  busy ms  peak memory\n"
        "0      0 1      35.4%   12.5     3 MiB\n"
        "1      2        35.4%   12.5     2 MiB\n"
        "critical path: F 5 ms, send 2.8 ms, B 10 ms, all_reduce 1.049 ms, apply 0.5 ms"
    )
    # What no device does is part of the step, too: a tiny model's critical path ended at a tenth of it.
    step = simulate(replicated([2, 1], 4, 2), model.scaled(1.0, step_seconds=0.1), cluster(2, 1, **links))
    assert str(step).startswith("step 119.3 ms")
    assert str(step).endswith("apply 0.5 ms, what a step takes once 100 ms")
    in_pieces = str(two_pieces(cut=True)).splitlines()[-1]
    assert in_pieces == "critical path: F 4000 ms, B 8000 ms, all_reduce 1000 ms, apply 500 ms"


# --- any plan ---


def random_case(seed: int) -> tuple[Plan, Profile, Cluster]:
    """A plan that fits its cluster: skips, uneven slices and stages, shared cores and devices, tied weights."""
    draw = random.Random(seed)
    count = draw.randrange(2, 9)
    layers = [
        LayerProfile(
            NAMES[i],
            Cost(draw.choice([0.0, 0.1]), draw.uniform(0.1, 1.0)),
            Cost(0.0, draw.uniform(0.1, 3.0)),
            residual_bytes=Cost(0.0, draw.uniform(0, 50)),
            temporary_bytes=Cost(draw.uniform(0, 20)),
            parameter_bytes=draw.choice([0, 10, 1000]),
            apply_seconds=draw.choice([0.0, 0.3]),
        )
        for i in range(count)
    ]
    tensors = [Tensor(i, (i + 1,), Cost(draw.choice([0.0, 3.0]), draw.uniform(1, 20))) for i in range(count - 1)]
    if count > 2 and draw.random() < 0.5:
        tensors.append(Tensor(0, (count - 1,), Cost(0.0, 5.0), differentiable=draw.random() < 0.5))
    tied = (SharedParameters((0, count - 1), 50),) if draw.random() < 0.3 else ()
    model = Profile("model", "none", (1, 2), tuple(layers), tuple(tensors), tied, draw.choice([0, 0.5]))
    stages = draw.randrange(1, min(count, 5) + 1)
    replicas = [draw.randrange(1, 4) for _ in range(stages)]
    order = draw.sample(range(sum(replicas) + 2), sum(replicas))
    devices = [[order.pop() for _ in range(replica)] for replica in replicas]
    policy = draw.choice(STRAIGHT)
    if draw.random() < 0.4:  # stages that share devices
        devices, policy = [devices[stage % 2] for stage in range(stages)], "modulo"
    options: dict[str, Any] = {"bucket_bytes": 500, "wait_free": draw.random() < 0.8}
    if draw.random() < 0.3 and policy != "interleaved":
        options["reverse_first_k"] = draw.randrange(stages + 1)
    cuts = sorted(draw.sample(range(count - 1), stages - 1))
    micro_batches = draw.randrange(1, 8)
    samples = micro_batches * max(map(len, devices)) + draw.randrange(4 * micro_batches)
    plan = Plan.manual([NAMES[cut] for cut in cuts], devices, micro_batches, samples, policy, **options)
    if plan.wait_free and draw.random() < 0.5:
        plan = cut_everywhere(plan, model)
    with contextlib.suppress(PlanError):  # Some replica gets no sample.
        shares = tuple(tuple(draw.choice([1, 1, 2, 3]) for _ in group) for group in devices)
        plan = plan.with_options(shares=shares) if draw.random() < 0.4 else plan
    where = cluster(
        *[draw.randrange(1, 4) for _ in range(12)],
        *[1] * 40,
        speeds=[draw.choice([0.5, 1.0, 2.0]) for _ in range(40)],
        intra_bandwidth=draw.choice([None, 20.0, 200.0]),
        inter_bandwidth=draw.choice([None, 10.0, 100.0]),
        intra_latency=draw.choice([None, 0.01]),
        inter_latency=draw.choice([None, 0.05]),
        servers=tuple(Server(capacity=draw.choice([None, None, 1.0, 1.5])) for _ in range(52)),
    )
    return plan, model, where


@pytest.mark.parametrize("seed", range(40))
def test_any_step_obeys_its_dependencies_ports_and_memory(seed: int) -> None:
    step = simulate(*random_case(seed))
    costs, schedule = step.costs, step.costs.schedule
    spans = {
        Task(span.stage, Phase(span.kind), span.micro_batch, span.replica): span
        for span in step.spans
        if span.kind in ("F", "B", "Bx", "Bw") and span.micro_batch is not None
    }
    assert spans.keys() == {*schedule.tasks}
    for device, tasks in schedule.orders.items():
        assert [str(span).split()[0] for span in step.timeline[device] if span.kind != "apply"] == [*map(str, tasks)]
        assert all(b.start >= a.end - 1e-9 for a, b in itertools.pairwise(step.timeline[device]))
        assert sum(map(costs.seconds, tasks)) - 1e-9 <= step.busy[device] <= step.latency + 1e-9

    def reaches(sender: Task, receiver: Task, size: float) -> None:
        ends = schedule.device_of(sender), schedule.device_of(receiver)
        seconds = 0.0 if ends[0] == ends[1] else costs.cluster.link(*ends).seconds(size)
        assert spans[receiver].start >= spans[sender].end + seconds - 1e-9

    for (producer, consumer), micro_batch in itertools.product(costs.routes, range(costs.plan.micro_batches)):
        for one in costs.messages(producer, consumer, micro_batch):
            sender = Task(producer, Phase.FORWARD, micro_batch, one.sender)
            reaches(sender, Task(consumer, Phase.FORWARD, micro_batch, one.receiver), one.bytes)
        for one in costs.messages(producer, consumer, micro_batch, backward=True):
            sends_in = Phase.INPUT_GRAD if consumer in schedule.split else Phase.BACKWARD
            takes = costs.gradient_phase(producer, producer in schedule.split)
            sender = Task(consumer, sends_in, micro_batch, one.sender)
            reaches(sender, Task(producer, takes, micro_batch, one.receiver), one.bytes)
    for task in schedule.tasks:
        if task.phase is Phase.WEIGHT_GRAD:
            samples = costs.slices(task.stage, task.micro_batch)[task.replica].size
            reaches(dataclasses.replace(task, phase=Phase.INPUT_GRAD), task, costs.delayed_bytes(task.stage, samples))
    for port in ports(step).values():
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(sorted(port)))
    for device, stored in costs.stored_bytes.items():
        assert step.memory[device][0] == (0.0, stored)
        assert step.memory[device][-1][1] == pytest.approx(stored)
        reducing = sum(one.bytes for one in costs.reductions if device in one.devices)
        assert -1e-6 <= step.peak_bytes[device] - stored - peak_of(costs, device) <= reducing + 1e-6


def ports(step: Simulation) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """When each device, and between servers each network card, sends and receives."""
    where, taken = step.costs.cluster, collections.defaultdict(list)
    for span in step.spans:
        if span.kind == "send" and span.device is not None and span.target is not None:
            link = where.link(span.device, span.target)
            a, b = (where.devices[device].server for device in (span.device, span.target))
            if span.bytes / link.bandwidth:
                for port in (
                    (("out", span.device), ("in", span.target)) if a == b else (("card out", a), ("card in", b))
                ):
                    taken[port].append((span.start, span.end - link.latency))
    return taken


def peak_of(costs: CostModel, device: int) -> float:
    """Bytes that a device's tasks need beyond what is stored, from their order alone."""
    level = peak = 0.0
    split = costs.schedule.split
    for task in costs.schedule.orders[device]:
        samples = costs.slices(task.stage, task.micro_batch)[task.replica].size
        kept = costs.residual_bytes(task.stage, samples)
        delayed = costs.delayed_bytes(task.stage, samples) if task.stage in split else 0.0
        if task.phase is Phase.FORWARD:
            level += kept
        peak = max(peak, level)
        if task.phase is not Phase.FORWARD:
            peak = max(peak, level + costs.working_bytes(task.stage, samples, task.phase))
            level -= {Phase.BACKWARD: kept, Phase.INPUT_GRAD: kept - delayed, Phase.WEIGHT_GRAD: delayed}[task.phase]
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("seed", range(20))
def test_a_slower_world_is_slower_by_as_much_and_its_critical_path_has_no_gaps(seed: int) -> None:
    """The factor is a power of two: what is ready at the same time stays so to the last bit."""
    factor = 2.0**13
    plan, model, where = random_case(seed)
    slower = model.scaled(factor, step_seconds=model.step_seconds * factor, task_seconds=model.task_seconds * factor)
    bandwidths = [value and value / factor for value in (where.intra_bandwidth, where.inter_bandwidth)]
    instant = Cluster(where.devices, *bandwidths, real=False, servers=where.servers)
    step = simulate(plan, slower, instant)
    before = simulate(plan, model, dataclasses.replace(where, intra_latency=None, inter_latency=None))
    assert step.latency == pytest.approx(before.latency * factor)
    assert step.critical_path[0].start == 0
    for span, after in itertools.pairwise(step.critical_path):
        early = after.kind == "all_reduce" and after.start < span.end  # of a piece of the task before
        assert early or after.start == pytest.approx(span.end)


# ---- who gets a tensor from whom


@pytest.mark.parametrize(
    ("readers", "relays", "devices", "sources"),
    [
        ((1, 2, 3), (1, 2), "abcd", {1: 0, 2: 1, 3: 2}),
        ((1, 2, 3), (), "abcd", {1: 0, 2: 0, 3: 0}),
        ((1, 2, 3), (2,), "abcd", {1: 0, 2: 0, 3: 2}),
        ((2, 4), (1, 2, 3), "abcde", {2: 0, 4: 2}),  # what a stage doesn't read it doesn't hand on
        ((1, 2, 3), (1, 2), "abab", {1: 0, 2: 0, 3: 1}),  # interleaved: it is there already
        ((1, 2, 3, 4, 5), (1, 2, 3, 4), "abccba", {1: 0, 2: 1, 3: 2, 4: 1, 5: 0}),  # there and back
        ((1, 2, 3), (1, 2, 3), "aabb", {1: 0, 2: 1, 3: 2}),  # chunks
    ],
)
def test_a_stage_gets_a_tensor_from_the_nearest_that_has_it(
    readers: Sequence[int], relays: Sequence[int], devices: str, sources: dict[int, int]
) -> None:
    assert sources_of(0, readers, relays, devices) == sources


def test_tensors_with_the_same_readers_travel_together() -> None:
    tensors = (
        Tensor(0, (1, 2, 3), Cost(0.0, 1.0)),
        Tensor(0, (1, 2, 3), Cost(0.0, 2.0), differentiable=False),
        Tensor(0, (2, 3), Cost(0.0, 4.0)),
        Tensor(0, (3,), Cost(0.0, 8.0)),
        Tensor(2, (3,), Cost(0.0, 16.0)),
    )
    model = chain([(1.0, 2.0)] * 4, tensors)
    legs = CostModel(straight(4, 2, relays=[1, 2]), model, slow(4)).legs
    shown = [(leg.sender, leg.receiver, leg.forward.per_sample, leg.backward.per_sample, leg.source) for leg in legs]
    assert shown == [
        (0, 1, 3.0, 1.0, None),
        (0, 2, 4.0, 4.0, None),
        (0, 3, 8.0, 8.0, None),
        (1, 2, 3.0, 1.0, 0),
        (2, 3, 16.0, 16.0, None),
        (2, 3, 3.0, 1.0, 3),
        (2, 3, 4.0, 4.0, 1),
    ]
    assert [leg.onward for leg in legs] == [(3,), (6,), (), (5,), (), (), ()]


def relayed_case(seed: int) -> tuple[Plan, Profile, Cluster]:
    """A case of `random_case`, with tensors that several layers read and stages that hand them on."""
    plan, profile, cluster = random_case(seed)
    draw = random.Random(seed)
    count = len(profile.layers)
    tensors = [*profile.tensors]
    for _ in range(draw.randrange(1, 4) if count > 2 else 0):
        maker = draw.randrange(count - 2)
        readers = tuple(sorted(draw.sample(range(maker + 1, count), draw.randrange(2, count - maker))))
        size = Cost(draw.choice([0.0, 2.0]), draw.uniform(1, 20))
        tensors.append(Tensor(maker, readers, size, differentiable=draw.random() < 0.7))
    relays = draw.choice([range(plan.num_stages), draw.sample(range(plan.num_stages), (plan.num_stages + 1) // 2)])
    profile = dataclasses.replace(profile, tensors=tuple(tensors))
    return plan.with_options(relays=tuple(relays)), profile, cluster


def arrivals(step: Simulation, leg: Leg, micro_batch: int, device: int, *, backward: bool) -> list[float]:
    return [span.end for span in over(step, leg, micro_batch, backward=backward) if span.target == device]


def over(step: Simulation, leg: Leg, micro_batch: int, *, backward: bool) -> list[Span]:
    stage = leg.receiver if backward else leg.sender
    sends = [s for s in step.spans if s.kind == "send" and (s.micro_batch, s.stage) == (micro_batch, stage)]
    return [s for s in sends if step.graph.activities[s.activity].leg == leg.number]


@pytest.mark.parametrize("seed", range(30))
def test_a_slice_leaves_a_relay_once_and_when_all_of_it_is_there(seed: int) -> None:
    plan, profile, cluster = relayed_case(seed)
    step = simulate(plan, profile, cluster)
    costs = step.costs
    repeats = False
    tasks = {(s.stage, s.micro_batch, s.replica, s.kind[0]): s for s in step.spans if s.kind in ("F", "B", "Bx")}
    for leg, micro_batch in itertools.product(costs.legs, range(plan.micro_batches)):
        for backward in (False, True):
            messages = costs.leg_messages(leg, micro_batch, backward=backward)
            ends = (leg.receiver, leg.sender) if backward else (leg.sender, leg.receiver)
            apart = [m for m in messages if plan.devices[ends[0]][m.sender] != plan.devices[ends[1]][m.receiver]]
            spans = over(step, leg, micro_batch, backward=backward)
            assert len(spans) == len(apart)
            for span in spans:
                own = tasks[ends[0], micro_batch, span.replica, "B" if backward else "F"]
                if backward or leg.source is None:
                    assert span.start >= own.end - 1e-9
                waits = [costs.legs[number] for number in leg.onward] if backward else [costs.legs[leg.source or 0]]
                for other in waits if backward or leg.source is not None else ():
                    came = arrivals(step, other, micro_batch, span.device or 0, backward=backward)
                    assert span.start >= max(came, default=0.0) - 1e-9
    with contextlib.suppress(PlanError, ValueError):  # Not all schedules repeat step after step.
        simulate(plan.with_options(relays=()), profile, cluster, next_forward=True)
        repeats = True
    if repeats:
        simulate(plan, profile, cluster, next_forward=True)


def test_replicas_whose_devices_begin_the_next_step_at_other_times_send_what_a_relay_hands_on() -> None:
    """Devices 1 and 2 run stage 0's forwards first, device 0 only that of the first micro-batch: it has all stages."""
    plan = Plan.manual(NAMES[:2], [[0, 1, 2], [3, 0], [0]], 2, 26, "modulo", relays=[1])
    step = simulate(plan, skips(3, parameter_bytes=4), slow(4), next_forward=True)
    direct = simulate(plan.with_options(relays=()), skips(3, parameter_bytes=4), slow(4), next_forward=True)
    assert {kind_of(span) for span in step.spans} == {kind_of(span) for span in direct.spans}


def kind_of(span: Span) -> tuple[str, int, int | None]:
    return ("send", 0, 0) if span.kind == "send" else (span.kind, span.stage, span.micro_batch)


# ---- memory


# ---- plans


# ---- the planner


def test_the_planner_hands_on_what_would_hold_up_the_first_stage() -> None:
    costs = {"forward": Cost(0.0, 0.05), "backward": Cost(0.0, 0.1), "parameter_bytes": 10**9}
    tensors = (Tensor(0, tuple(range(1, 6)), Cost(0.0, 1e7)), *(Tensor(i, (i + 1,), Cost(0.0, 1e4)) for i in range(5)))
    model = Profile("skips", "none", (1,), tuple(LayerProfile(NAMES[i], **costs) for i in range(6)), tensors)
    where = cluster(*[1] * 6, inter_bandwidth=1e8)
    plan = planned(model, where, 32)
    assert plan.relays and plan.report is not None and "hand on what they read" in str(plan)
    assert plan.report.latency == simulate(plan, model, where).latency
    assert plan.report.latency < 0.7 * simulate(plan.with_options(relays=()), model, where).latency
