"""Residuals in the host's memory: when they are there, the pass that copies them, and what simulations say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hardware import cluster_of, profile_of
from programs import HOST, apply, layout, ordered, show_changes, staged, step_of, tied_layers, two_stages
from schedule_runs import vee

import dapple_tf as dapple
from dapple_tf.describe.devices import Server
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.execution.memory_limits import residuals_held
from dapple_tf.execution.residual_hosts import more_page_locked, note_on_hosts, residual_hosts
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.recompute_modes import modes_by_memory
from dapple_tf.schedules.schedules import make_schedule
from dapple_tf.simulation.simulated_offloads import absences
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tools.evaluation import check_memory
from graph_passes.ir.graph import Graph, control_inputs, data_inputs
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.offloading import AGAIN, AWAY, MOST_SLICES, trip
from graph_passes.ir.program import Layout, Program, Stage
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.text import graph_text
from graph_passes.passes.offload import Offload

# ---- when


def way(order: str, uses: str) -> str:
    """The trip of a residual: ``sent after F0, before F2; back after F2 for B0``."""
    tasks = [Task.parse(f"0{text}") for text in order.split()]
    journey = trip(tasks, [Task.parse(f"0{text}") for text in uses.split()])
    if journey is None:
        return "stays"
    names = {task: str(task)[1:] for task in tasks}
    backs = [f"back after {names[b.begins]} for {' '.join(map(names.__getitem__, b.readers))}" for b in journey.returns]
    return "; ".join([f"sent after {names[journey.after]}, before {names[journey.before]}", *backs])


@pytest.mark.parametrize(
    ("order", "uses", "expected"),
    [
        ("F0 F1 F2 B0 B1 B2", "F0 B0", "stays"),
        ("F0 F1 F2 F3 F4 B0", "F0 B0", "sent after F0, before F2; back after F3 for B0"),
        ("F0 F1 F2 F3 Bx0 Bw0", "F0 Bx0 Bw0", "sent after F0, before F2; back after F2 for Bx0 Bw0"),
        (
            "F0 F1 F2 F3 Bx0 F4 F5 Bw0", "F0 Bx0 Bw0",
            "sent after F0, before F2; back after F2 for Bx0; back after F4 for Bw0",
        ),
        ("F0 Bx0 F1 F2 F3 Bw0", "F0 Bx0 Bw0", "sent after Bx0, before F2; back after F2 for Bw0"),
    ],
)  # fmt: skip
def test_what_is_read_soon_stays_and_what_is_read_late_returns_during_the_task_before(
    order: str, uses: str, expected: str
) -> None:
    assert way(order, uses) == expected


def present(order: tuple[Task, ...], uses: list[Task]) -> set[int]:
    """Positions at which a residual takes room on its device."""
    places = sorted(map(order.index, uses))
    found = trip(order, uses)
    if found is None:
        return set(range(places[0], places[-1] + 1))
    left = order.index(found.before)
    room = set(range(places[0], left))
    for back in found.returns:
        room |= set(range(order.index(back.begins) + 1, order.index(back.readers[-1]) + 1))
    return room


@pytest.mark.parametrize(
    ("policy", "devices", "micro_batches"),
    [
        ("gpipe", [[0], [1]], 9),
        ("zb_h1", [[stage] for stage in range(6)], 9),
        ("interleaved", [[0], [1], [2], [0], [1], [2]], 6),
        ("dualpipe_v", vee(4), 9),
    ],
)
def test_a_device_has_three_slices_at_most(policy: str, devices: list[list[int]], micro_batches: int) -> None:
    schedule = make_schedule(policy, devices, micro_batches)
    away = 0
    for order in schedule.orders.values():
        slices: list[set[int]] = []
        for forward in (task for task in order if task.phase is Phase.FORWARD):
            backwards = [task for task in order if task.phase is not Phase.FORWARD]
            uses = [t for t in backwards if (t.stage, t.micro_batch) == (forward.stage, forward.micro_batch)]
            slices.append(present(order, [forward, *uses]))
            away += trip(order, [forward, *uses]) is not None
        assert max(sum(position in room for room in slices) for position in range(len(order))) <= MOST_SLICES
    assert away and AGAIN < AWAY


# ---- the pass


def offloaded(cut: Layout, policy: str, hosts: dict[str, str], recompute: Any = "offload") -> tuple[Program, Program]:
    """A step of two stages of two layers, before and after the pass."""
    split = (0, 1) if policy.startswith("zb") else ()
    program = staged(tied_layers(4), "layer_1", recompute=recompute, split=split)
    before = ordered(program, cut, policy)
    return before, apply(before, Offload(hosts))


def hosts_of(cut: Layout) -> dict[str, str]:
    return {name: f"{HOST[:-1]}7" for devices in cut.devices for name in devices}


def test_what_the_pass_changes(golden: Callable[[str, str], None]) -> None:
    cut = layout([1, 1], 4, 4)
    before, after = offloaded(cut, "gpipe", hosts_of(cut), ["offload", "none"])
    golden("offload.txt", show_changes(graph_text(before.graph), graph_text(after.graph)))


def test_full_page_locked_memory_is_told_with_the_way_out() -> None:
    own = Plan.manual(["a"], [[0], [1]], 4, 4, "gpipe", recompute=["offload", "none"])
    full = "OOM when allocating tensor with shape[9] on /device:CPU:0 by allocator gpu_host_bfc"
    assert "stages 0 wait in the page-locked memory" in more_page_locked(own, full)
    assert "TF_GPU_HOST_MEM_LIMIT_IN_MB" in more_page_locked(own, full)
    assert not more_page_locked(own, full.replace("gpu_host_bfc", "GPU_0_bfc"))
    assert not more_page_locked(dataclasses.replace(own, recompute="none"), full)


def test_where_nothing_is_far_enough_nothing_changes() -> None:
    cut = layout([1, 1], 4, 4)
    before, after = offloaded(cut, "dapple_a", hosts_of(cut))
    assert after == before


# ---- simulations


CUTS = ["layer_1", "layer_3", "layer_5"]


def layers() -> Any:
    """Equal layers that keep 100 kB of each sample, and hand on next to nothing."""
    return profile_of(parameters=1000, size=10, residual=1e5)


def test_the_simulator_sends_what_the_pass_sends() -> None:
    policy = "gpipe"
    cut = layout([2, 1], 10, 5)
    _, after = offloaded(cut, policy, hosts_of(cut))
    nodes = [node for node in after.graph.node if NodeKind.of(node) is NodeKind.OFFLOAD]
    model = profile_of(4, parameters=1000, size=10)
    plan = Plan.manual(["layer_1"], [[0, 1], [2]], 5, 10, policy, recompute="offload")
    simulation = simulate(plan, model, cluster_of(3))
    own = list(absences(simulation.costs, simulation.costs.schedule))
    step = step_of(after)
    calls = {step.entry[absence.forward]: absence for absence in own}
    assert own and calls.keys() == {ref.node for node in nodes for ref in data_inputs(node)}
    graph = Graph(after.graph)
    for node in nodes:
        absence = calls[data_inputs(node)[0].node]
        assert node.name in control_inputs(graph.nodes[step.entry[absence.before]])
        (held,) = graph.consumers(node.name)
        beside = [waited for waited in control_inputs(graph.nodes[step.entry[absence.beside]]) if "offload" in waited]
        assert set(control_inputs(graph.nodes[held])) == {*step.exit[absence.begins], *beside}
    sends = [span for span in simulation.spans if span.kind == "offload"]
    assert sum(span.bytes for span in sends) == sum(absence.bytes for absence in own)
    assert len([span for span in simulation.spans if span.kind == "fetch"]) == len(sends)


def run(policy: str, recompute: Any, **options: Any) -> Any:
    links = {name: options.pop(name) for name in ("host_bandwidth", "memory") if name in options}
    plan = Plan.straight(CUTS, 80, 8, policy, recompute=recompute)
    return simulate(plan, layers(), cluster_of(4, **links), **options)


def test_a_device_keeps_three_slices_however_many_are_in_flight() -> None:
    """A micro-batch's residuals are 2 MB in each of four stages; the last stage of eight has one."""
    for policy in ("gpipe", "dapple_b"):
        kept, sent = run(policy, "none"), run(policy, "offload")
        assert sent.peak_bytes[0] - sent.costs.stored_bytes[0] == pytest.approx(6e6, rel=1e-3)
        assert kept.peak_bytes[0] > sent.peak_bytes[0]
        assert sent.peak_bytes[0] == pytest.approx(sent.costs.needed_bytes(0, sent.costs.warm_up[0]))
        assert kept.latency == pytest.approx(sent.latency, rel=1e-2)
        assert sent.host_bytes[0] > 0 and not kept.host_bytes
        assert "residuals in the memory of server 0's host" in str(sent)


def test_a_slow_link_delays_tasks_and_steps_that_follow_each_other_find_what_an_earlier_one_sent() -> None:
    fast, slow = (run("gpipe", "offload", host_bandwidth=bandwidth) for bandwidth in (12e9, 2e7))
    # Each of eight micro-batches of a stage takes 0.1 s in each direction; F takes 20 ms, B 40 ms.
    assert slow.latency > 1.5 * fast.latency
    assert slow.peak_bytes[0] <= fast.costs.needed_bytes(0, 8)
    following = run("gpipe", "offload", next_forward=True)
    assert following.latency > 0 and len(following.stays) == len(fast.stays)
    assert max(following.peak_bytes.values()) <= fast.costs.needed_bytes(0, 8) * 1.001


def test_stages_offload_where_the_link_takes_less_than_computing_again() -> None:
    def modes(memory: int, **links: Any) -> Any:
        cluster = cluster_of(4, memory=memory, **links)
        request = PlanRequest.of(layers(), cluster, 80, 8, "dapple_a", ["none", "offload", "boundary"])
        return modes_by_memory(Plan.straight(CUTS, 80, 8), request)

    # Four slices of 2 MB are in flight in the first stage; three of them are on its device.
    assert modes(7 * 10**6) == ("offload", "none", "none", "none")
    assert modes(7 * 10**6, host_bandwidth=2e7) == ("boundary", "none", "none", "none")
    assert modes(4 * 10**6) == ("boundary", "boundary", "boundary", "none")
    assert modes(10**9) == "none"


def test_micro_batches_that_fit_are_counted_without_what_waits_on_the_host() -> None:
    own = Stage(0, (), residual_bytes=100, offloaded_bytes=90, fixed_residual_bytes=5)
    program = dataclasses.replace(two_stages(), stages=(own,))
    plan = Plan.data_parallel(1, 8, 8, "gpipe", recompute="offload")
    devices = Layout((("d0",),), 8, 8, 8)
    for memory, held in ((105, 1), (210, 2), (300, 2), (315, 3), (330, 4), (10**6, (10**6 - 270) // 15)):
        cluster = cluster_of(1, memory=memory)
        assert residuals_held(plan, cluster, program, devices, lambda device: 0) == (min(8, held),)


def test_the_link_to_the_host_is_part_of_a_cluster() -> None:
    plain = cluster_of(2)
    assert plain.host_link(0) == (12e9, 1e-5) and "host" not in plain.to_json()
    own = cluster_of(1, 1, host_bandwidth=5e9)
    other = dataclasses.replace(own, servers=(Server(), Server(host_latency=1e-3)))
    other = dapple.Cluster.from_json(other.to_json())
    assert (other.host_link(0), other.host_link(1)) == ((5e9, 1e-5), (5e9, 1e-3))
    assert "to the host" in str(other)
    with pytest.raises(dapple.ClusterError, match="host_bandwidth is 0"):
        cluster_of(1, host_bandwidth=0)


# ---- plans


def test_what_does_not_go_with_offloading_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"stage 1 has recompute='offload' and weight_devices \[2\], other than its own"
    ):
        Plan.straight(["a"], 8, 4, recompute=["none", "offload"], weight_devices=[[0], [2]])
    with pytest.raises(PlanError, match="stage 0 has recompute='offload', but its operators are placed one by one"):
        Plan.by_operators(2, 8, recompute="offload")
    with pytest.raises(dapple.EmulationError, match="stage 0 offloads its residuals"):
        dapple.emulate(Plan.straight(CUTS, 8, 4, recompute="offload"), layers(), cluster_of(4))


def test_residuals_wait_on_an_idle_cpu_or_on_the_first_one() -> None:
    plan = Plan.straight(["a"], 8, 4, recompute=["offload", "none"])
    idle = dapple.Cluster.local(3, kind="cpu")
    assert [name[-5:] for pair in residual_hosts(plan, idle).items() for name in pair] == ["CPU:0", "CPU:2"]
    assert note_on_hosts(plan, idle) == ""
    full = dapple.Cluster.local(2, kind="cpu")
    assert set(residual_hosts(plan, full).values()) == {full.device_names[0]}
    assert "residuals wait in the memory of" in note_on_hosts(plan, full)
    gpus = [dataclasses.replace(device, name=device.name.replace("CPU", "GPU")) for device in idle.devices]
    described = dataclasses.replace(idle, devices=tuple(gpus), real=False)
    assert [name[-5:] for name in residual_hosts(plan, described).values()] == ["CPU:0"]


# ---- real steps


def test_devices_need_less_memory_by_allocation_records() -> None:
    """Of six slices in flight three are on the device; the host has all of them, and gives them back."""
    cluster = dapple.Cluster.local(3, kind="cpu")
    model = dataclasses.replace(check_memory.MODELS["mlp"], samples=1536, micro_batches=6)
    peaks = {}
    for mode in ("none", "offload"):
        plan = Plan.straight(model.cuts[2], 1536, 6, "gpipe", recompute=mode)
        x, y = model.batch(1536)
        pipelined = dapple.transform(model.build(), cluster, plan)
        pipelined.train_on_batch(x, y)
        step = pipelined.profile_step(x, y, warm_up=0, train=True)
        pipelined.close()
        peaks[mode] = [step.peak_bytes[device] for device in (0, 1)]
    # Stage 0: eight layers, of which seven results of 256 x 512 are inside; relu's backward reads them.
    slice_bytes = 7 * 256 * 512 * 4
    saved = [kept - sent for kept, sent in zip(peaks["none"], peaks["offload"], strict=True)]
    assert min(saved) >= 2.5 * slice_bytes, (peaks, slice_bytes)
