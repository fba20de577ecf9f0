"""The emulator: TensorFlow's executor does what the simulator says, and what goes wrong in a graph shows.

With ``--timed``, as `make accuracy` runs these tests, it takes as long, too: the bound is twice what
`tools.evaluation.check_simulator` holds, and measurements that are off are repeated. Else only what is done counts, and
in which order: the machine may do other things meanwhile.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hardware import cluster_of as cluster
from relayed_plans import relayed_case
from selection import sampled, thorough
from test_simulator import STRAIGHT, random_case

from dapple_tf.describe.cluster import Cluster, Server
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
from dapple_tf.measuring import emulated_step, emulator
from dapple_tf.measuring.emulated_waits import EmulationError
from dapple_tf.measuring.emulator import Emulation, emulate
from dapple_tf.schedules.schedules import make_schedule
from dapple_tf.simulation.simulator import Simulation
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import check_simulator
from dapple_tf.tools.evaluation.check_simulator import pipeline
from dapple_tf.view.timeline import Span
from graph_passes.ir.tasks import Schedule

TOLERANCE = 0.1
TIMED = False
"""Whether seconds are compared: ``--timed``."""
NAMES = [f"layer{index}" for index in range(8)]


@pytest.fixture(autouse=True)
def _timed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TIMED", request.config.getoption("--timed"))


def measured(plan: Plan, profile: Profile, cluster: Cluster, **options: Any) -> Emulation:
    """A step that does all that the simulated one does; with ``--timed`` the best of up to four measurements."""
    if not TIMED:
        step = emulate(plan, profile, cluster, steps=1, **options)
        assert kinds(step) == kinds_of(step.simulated.spans)
        return step
    emulations = []
    for _ in range(4):
        emulations.append(emulate(plan, profile, cluster, steps=1, **options))
        if abs(emulations[-1].error) < TOLERANCE / 2:
            break
    best = min(emulations, key=lambda one: abs(one.error))
    assert abs(best.error) < TOLERANCE, str(best)
    return best


def profile(layers: int, tensors: Sequence[Tensor] | None = None, shared: Any = (), **layer: Any) -> Profile:
    """Layers of 4 ms + 6 ms per sample and B of twice that."""
    costs = tuple(LayerProfile(NAMES[i], Cost(4e-3, 6e-3), Cost(8e-3, 12e-3), **layer) for i in range(layers))
    if tensors is None:
        tensors = [Tensor(i, (i + 1,), Cost(0.0, 100.0)) for i in range(layers - 1)]
    return Profile("model", "none", (1, 2), costs, tuple(tensors), tuple(shared))


def replicated(replicas: Sequence[int], micro_batches: int, samples: int, **options: Any) -> Plan:
    numbers = itertools.count()
    devices = [list(itertools.islice(numbers, count)) for count in replicas]
    return Plan.manual(NAMES[: len(replicas) - 1], devices, micro_batches, samples * micro_batches, **options)


def kinds(step: Emulation) -> dict[str, int]:
    return {kind: sum(span.kind == kind for span in step.spans) for kind in {span.kind for span in step.spans}}


# --- as long as simulated ---


@pytest.mark.few(5)
@pytest.mark.parametrize("schedule", STRAIGHT)
@pytest.mark.parametrize("replicas", [[2, 1], thorough([1])])
def test_two_stages_with_a_network(schedule: str, replicas: Sequence[int]) -> None:
    plan, model, where = pipeline(2, 8, schedule, replicas, 0.3)
    step = measured(plan, model, where)
    assert step.order.orders == step.costs.schedule.orders
    assert kinds(step) == kinds_of(step.simulated.spans)


def test_without_catching_up_no_chain_of_waits_is_shorter_than_simulated() -> None:
    plan, model, where = pipeline(2, 2, "dapple_a", [1], 0.0)
    step = emulate(plan, model, where, steps=2, catch_up=False)
    assert min(step.latencies) >= step.simulated.latency
    lengths = [(span.end - span.start, other.end - other.start) for span, other in paired(step)]
    assert all(emulated >= 0.999 * simulated for emulated, simulated in lengths)


def paired(step: Emulation) -> list[tuple[Span, Span]]:
    """The emulated and the simulated span of each task."""

    def tasks(spans: Sequence[Span]) -> dict[Any, Span]:
        return {(s.kind, s.stage, s.micro_batch, s.replica): s for s in spans}

    simulated = tasks(step.simulated.spans)
    return [(span, simulated[key]) for key, span in tasks(step.spans).items()]


def kinds_of(spans: Sequence[Span]) -> dict[str, int]:
    return {kind: sum(span.kind == kind for span in spans) for kind in {span.kind for span in spans}}


# Every schedule; all sizes, and a network that is no, little and much of the time.
LARGE = [
    ("gpipe", 16, 32, [2], 0.1),
    ("dapple_a", 8, 16, [3, 2], 0.3),
    ("dapple_b", 4, 16, [1], 0.0),
    ("fast_forward", 16, 32, [2], 0.5),
    ("fast_forward_a", 8, 16, [3, 2], 0.3),
    ("fast_forward_b", 4, 16, [2, 1], 0.5),
    ("modulo", 8, 16, [3, 2], 0.3),
    ("interleaved", 4, 16, [2, 1], 0.5),
    ("zb_h1", 16, 32, [2], 0.1),
    ("zb_h2", 8, 16, [3, 2], 0.3),
    ("zero_bubble", 8, 16, [3, 2], 0.3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "replicas", "network"), list(map(thorough, LARGE)))
def test_large_pipelines(
    schedule: str, stages: int, micro_batches: int, replicas: Sequence[int], network: float
) -> None:
    if not TIMED:
        stages = min(stages, 6)
    measured(*pipeline(stages, micro_batches, schedule, replicas, network))


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(40), 5))
def test_any_plan(seed: int) -> None:
    measured(*random_case(seed))


def test_slices_by_speed() -> None:
    """Replicas of speeds 1 and 0.5, in both stages; slices that don't match send to several replicas."""
    plan = Plan.manual(["layer0"], [[0, 1], [2, 3]], 3, 18, shares=[[2, 1], [1, 2]])
    where = cluster(2, 2, speeds=(1.0, 0.5, 0.5, 1.0), inter_bandwidth=5e4)
    measured(plan, profile(2, apply_seconds=5e-3), where)


def test_uneven_slices_go_from_replica_to_replica() -> None:
    step = measured(replicated([3, 2], 3, 5), profile(2), cluster(3, 2, inter_bandwidth=4e4, inter_latency=1e-3))
    assert kinds(step)["send"] == 3 * 2 * 4


def test_skip_connections_and_tied_weights() -> None:
    tensors = [Tensor(0, (1,), Cost(100.0)), Tensor(1, (2,), Cost(100.0)), Tensor(0, (2,), Cost(400.0))]
    model = profile(3, tensors, [SharedParameters((0, 2), 500)], parameter_bytes=100, apply_seconds=5e-3)
    step = measured(replicated([2, 1, 1], 3, 2), model, cluster(2, 1, 1, inter_bandwidth=5e4, intra_bandwidth=1e5))
    assert kinds(step)["all_reduce"] == 2
    assert kinds(step)["apply"] == 4


@pytest.mark.parametrize("next_forward", [False, thorough(True)])
@pytest.mark.parametrize("seed", [21, *map(thorough, (5, 13, 19, 33, 36))])
def test_relays_hand_tensors_on_and_add_gradients_up(seed: int, next_forward: bool) -> None:
    plan, model, where = relayed_case(seed)
    step = measured(plan, model, where, next_forward=next_forward)
    legs = [sorted(span.leg for span in spans if span.leg is not None) for spans in (step.spans, step.simulated.spans)]
    assert legs[0] == legs[1]
    assert any(step.costs.legs[number].source is not None for number in legs[0])


@pytest.mark.parametrize("cuts", [(), (NAMES[0], NAMES[2])])
def test_pieces_are_reduced_as_the_last_backward_goes_on(cuts: Sequence[str]) -> None:
    plan = Plan.manual(NAMES[1:2], [[0, 1], [2, 3]], 3, 6, backward_cuts=cuts)
    model = profile(4, parameter_bytes=1000, apply_seconds=5e-3)
    step = measured(plan, model, cluster(2, 2, intra_bandwidth=5e4))
    assert kinds(step)["all_reduce"] == (4 if cuts else 2)
    if cuts:
        first = min(span.start for span in step.spans if span.kind == "all_reduce" and span.stage == 0)
        last = max(span.end for span in step.spans if span.kind == "B" and span.stage == 0)
        assert first < last


@pytest.mark.parametrize("capacity", [1.0, 1.5])
def test_devices_that_share_cores(capacity: float) -> None:
    where = cluster(2, 1, servers=(Server(capacity=capacity), Server()), inter_bandwidth=5e4)
    step = measured(replicated([2, 1], 4, 3), profile(2, apply_seconds=5e-3), where)
    alone = step.costs.seconds(step.costs.schedule.orders[0][0])
    assert step.timeline[0][0].end > alone * 1.2


def test_weight_gradients_of_their_own() -> None:
    split = Schedule.parse("0: 0F0 0F1 0Bx0 0Bx1 0Bw0 0Bw1\n1: 1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1")
    plan = replicated([1, 1], 2, 1)
    step = measured(plan, profile(2, apply_seconds=5e-3), cluster(1, 1, inter_bandwidth=2e4), schedule=split)
    assert step.order.orders == split.orders


def test_weight_gradients_and_updates_on_a_device_of_their_own() -> None:
    plan = replicated([1, 2], 3, 2, schedule="fast_forward_a", weight_devices=[[0], [3, 4]])
    layer = {"parameter_bytes": 200, "residual_bytes": Cost(0.0, 100.0), "apply_seconds": 5e-3}
    step = measured(plan, profile(2, **layer), cluster(5, intra_bandwidth=2e4))
    assert step.order.orders == {**step.costs.schedule.orders}
    assert {span.device for span in step.spans if span.kind == "apply"} == {0, 3, 4}
    assert step.costs.schedule.after


def test_stages_that_share_devices_are_reduced_and_updated_one_by_one() -> None:
    plan = Plan.manual(NAMES[:3], [[0, 1], [0, 1], [0, 1], [2]], 2, 4, "dapple_a")
    step = measured(plan, profile(4, parameter_bytes=500, apply_seconds=5e-3), cluster(3, intra_bandwidth=2e4))
    assert [span.stage for span in step.spans if span.kind == "all_reduce"] == [2, 1, 0]
    assert [span.stage for span in step.timeline[0] if span.kind == "apply"] == [2, 1, 0]
    assert times(step.simulated, "all_reduce", 2)[0] < times(step.simulated, "B", 0)[-1]


def times(step: Simulation, kind: str, stage: int) -> list[float]:
    return sorted(span.start for span in step.spans if (span.kind, span.stage) == (kind, stage))


@pytest.mark.parametrize("wait_free", [True, False])
def test_the_next_steps_forwards_wait_for_updates(wait_free: bool) -> None:
    plan = Plan.manual(NAMES[:2], [[0, 1]] * 3, 1, 2, "gpipe", reverse_first_k=2, wait_free=wait_free)
    model = profile(3, parameter_bytes=500, apply_seconds=5e-3)
    step = measured(plan, model, cluster(2, intra_bandwidth=2e4), next_forward=True, reduction_order=[1, 2, 0])
    assert [span.stage for span in step.spans if span.kind == "all_reduce"] == [1, 2, 0]
    assert [span.stage for span in step.timeline[0] if span.kind == "F"] == [0, 1, 2]
    assert step.timeline[0][0].kind == "B"


def test_forwards_alone() -> None:
    plan = replicated([2, 1], 3, 2)
    forward = make_schedule("gpipe", plan.devices, 3, forward_only=True)
    step = measured(plan, profile(2, parameter_bytes=9), cluster(2, 1), schedule=forward)
    assert set(kinds(step)) == {"F", "send"}


def test_any_devices_of_a_large_cluster() -> None:
    plan = Plan.manual(NAMES[:1], [[50], [7]], 2, 4)
    step = measured(plan, profile(2), cluster(*[8] * 8, inter_bandwidth=5e4))
    assert set(step.timeline) == {7, 50}


def test_scale_stretches_the_waits_and_not_the_result() -> None:
    plan, model, where = pipeline(2, 4, "dapple_a", [1], 0.3)
    fast = model.scaled(1e-4)
    step = measured(plan, fast, Cluster(where.devices, real=False))
    assert step.simulated.latency < 1e-3
    assert step.scale > 1000
    assert measured(plan, model, where, scale=2.0).scale == 2.0


def test_a_step_beyond_its_tasks() -> None:
    model = Profile("model", "none", (1, 2), (LayerProfile("a", Cost(0.01), Cost(0.02)),), (), step_seconds=0.05)
    assert measured(Plan.data_parallel(1, 1), model, cluster(1)).latency > 0.07


# --- what it tells ---


def test_text_and_measures() -> None:
    step = emulate(*pipeline(2, 4, "dapple_a", [2, 1], 0.3), steps=2)
    lines = str(step).splitlines()
    assert lines[0].startswith("step emulated ")
    assert f"simulated {step.simulated.latency * 1e3:.4g} ms, error {step.error:+.2%}" in lines[0]
    assert lines[1].split() == [
        "stage",
        "devices",
        "busy",
        "ms",
        "simulated",
        "emulated",
        "bubble",
        "simulated",
        "emulated",
    ]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[4].startswith("2 steps of ")
    assert len(step.latencies) == 2
    assert min(step.latencies) <= step.latency <= max(step.latencies)
    for device, spans in step.timeline.items():
        assert len(spans) == len(step.simulated.timeline[device])
        for before, after in itertools.pairwise(spans):
            assert after.start >= before.end
    path = step.critical_path
    assert path[0].kind == "F"
    assert path[-1].kind == "apply"


# --- what goes wrong ---


def test_more_devices_than_can_be_emulated() -> None:
    with pytest.raises(EmulationError, match="the plan uses 33 devices, of which at most 32 can be emulated"):
        emulate(Plan.data_parallel(33, 33), profile(1), cluster(33))


def test_rows_in_shards() -> None:
    with pytest.raises(EmulationError, match="rows of embeddings in shards, whose lookups before forwards can't be"):
        emulate(Plan.data_parallel(2, 2, row_shards=True), profile(1), cluster(2))


def test_wrong_arguments() -> None:
    case = pipeline(2, 2, "dapple_a", [1], 0.0)
    with pytest.raises(ValueError, match="0 steps were asked for; ask for at least 1"):
        emulate(*case, steps=0)
    with pytest.raises(ValueError, match="scale is -1; it must be above 0 and finite"):
        emulate(*case, scale=-1)


def test_a_missing_control_edge_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    node = emulated_step.EmulatedStep._node
    monkeypatch.setattr(
        emulated_step.EmulatedStep, "_node", lambda self, wait, tensors, control: node(self, wait, tensors, ())
    )
    with pytest.raises(EmulationError, match=r"\w+ was started before \w+ was over: an edge is missing"):
        emulate(*pipeline(2, 8, "gpipe", [1], 0.0))


def test_slices_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = emulated_step._joined
    monkeypatch.setattr(emulated_step, "_joined", lambda tensors: joined(tensors[::-1]))
    with pytest.raises(EmulationError, match=r"1F0 should get \[0. 1. 2. 3. 4. 5.\], but it got \[3. 4. 5. 0. 1. 2.\]"):
        emulate(*pipeline(2, 2, "dapple_a", [2, 1], 0.0))


def test_tasks_out_of_order_are_found() -> None:
    schedule = Schedule.parse("0: 0F0 0F1 0B0 0B1")
    spans = [
        Span(kind, start, start + 1, 0, 0, micro_batch)
        for start, (kind, micro_batch) in enumerate([("F", 0), ("B", 0), ("F", 1), ("B", 1)])
    ]
    with pytest.raises(EmulationError, match="device 0 ran 0B0 0F1 0B1 as task 1 where the schedule has 0F1 0B0 0B1"):
        emulator._check_order(spans, schedule.orders)


# --- the tool ---


@pytest.mark.slow
def test_the_tool_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep stopped where a shape has too few stages for a policy."""
    arguments = ["--shapes=2x4,6x4", "--schedules=gpipe,zb_v", "--replicas=6", "--networks=0.3", "--tolerance=1e9"]
    arguments.append("--nocatch_up")
    assert command.run(check_simulator.main, check_simulator.FLAGS, arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "S M schedule replicas network simulated ms emulated ms error late ms"
    assert lines[1].split()[:5] == ["2", "4", "gpipe", "6", "30%"]
    assert "zb_v wants stages i and 2 - 1 - i on the same devices" in lines[2]
    assert lines[3].endswith("36 devices, more than 32")
    assert lines[-1].startswith("2 rows in ")  # zb_v goes there and back over half of the devices


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--shapes=4", "--shapes: '4' isn't a pipeline; write stages x micro-batches, such as 4x16"),
        ("--replicas=2:7", "--replicas: [2, 7]; a micro-batch has 6 samples, give 1 to 6"),
    ],
)
def test_the_tool_explains_wrong_flags(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(check_simulator.main, check_simulator.FLAGS, [flag]) == 1
    assert text in capsys.readouterr().err
