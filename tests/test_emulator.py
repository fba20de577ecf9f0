"""The emulator: TensorFlow's executor runs what the simulator says, and what goes wrong in a graph shows.

Every option of plans is emulated in tests/test_random_plans.py.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hardware import NAMES, linked
from hardware import cluster_of as cluster

from dapple_tf.describe.cluster import Cluster, Server
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, SharedParameters
from dapple_tf.measuring import emulated_step, emulator
from dapple_tf.measuring.emulated_waits import EmulationError
from dapple_tf.measuring.emulator import Emulation, emulate
from dapple_tf.schedules.schedules import make_schedule
from dapple_tf.simulation.simulator import Simulation
from dapple_tf.tools.evaluation.bench_accuracy import pipeline
from dapple_tf.view.timeline import Span
from graph_passes.ir.tasks import Schedule

REPLICATED = Plan.manual(NAMES[:1], [[0, 1], [2]], 3, 6)


def profile(layers: int = 2, shared: Any = (), **layer: Any) -> Profile:
    """Layers of 0.4 ms + 0.6 ms per sample and B of twice that."""
    costs = tuple(LayerProfile(NAMES[i], Cost(4e-4, 6e-4), Cost(8e-4, 12e-4), **layer) for i in range(layers))
    return linked(costs, 100.0, shared=tuple(shared))


def three_stages(**options: Any) -> Plan:
    return Plan.manual(NAMES[:2], [[0, 1]] * 3, 1, 2, "gpipe", **options)


UPDATED = {"parameter_bytes": 500, "apply_seconds": 5e-4}
NEXT = {"next_forward": True, "reduction_order": [1, 2, 0]}
SPLIT = Schedule.parse("0: 0F0 0F1 0Bx0 0Bx1 0Bw0 0Bw1\n1: 1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1")
FORWARD = make_schedule("gpipe", REPLICATED.devices, 3, forward_only=True)
SHARED_CORES = cluster(2, 1, servers=(Server(capacity=1.5), Server()), inter_bandwidth=5e5)
TABLE = profile(1, parameter_bytes=120, table_bytes=120, row_bytes=Cost(0.0, 60.0), apply_seconds=5e-4)
CASES: Mapping[str, tuple[Plan, Profile, Cluster, dict[str, Any]]] = {
    "tied weights": (
        Plan.manual(NAMES[:2], [[0, 1], [2], [3]], 3, 6),
        profile(3, [SharedParameters((0, 2), 500)], parameter_bytes=100),
        cluster(2, 2, inter_bandwidth=5e5),
        {},
    ),
    "shared cores": (REPLICATED, profile(apply_seconds=5e-4), SHARED_CORES, {}),
    "a given schedule": (Plan.straight(NAMES[:1], 2, 2), profile(), cluster(2), {"schedule": SPLIT}),
    "forwards alone": (REPLICATED, profile(parameter_bytes=9), cluster(3), {"schedule": FORWARD}),
    "the next step's forwards": (three_stages(), profile(3, **UPDATED), cluster(2, intra_bandwidth=1e6), NEXT),
    "reductions at the end": (three_stages(wait_free=False), profile(3, **UPDATED), cluster(2), NEXT),
    "rows in shards": (Plan.data_parallel(2, 6, 3, row_shards=True), TABLE, cluster(2, intra_bandwidth=1e5), {}),
    "carried updates": (three_stages(carried_updates=1, reverse_first_k=2), profile(3, **UPDATED), cluster(2), {}),
    "any devices of a large cluster": (Plan.manual(NAMES[:1], [[50], [7]], 2, 4), profile(), cluster(*[8] * 8), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_executor_runs_what_is_simulated_in_the_same_order(name: str) -> None:
    plan, model, where, options = CASES[name]
    step = emulate(plan, model, where, steps=1, **options)
    assert orders(step) == orders(step.simulated)
    spans = [collections.Counter((span.kind, span.stage) for span in one.spans) for one in (step, step.simulated)]
    assert spans[0] == spans[1]


def orders(step: Emulation | Simulation) -> list[list[str]]:
    """Names of each device's tasks and of the all-reduces, in order."""
    tasks = [[span for span in spans if span.kind != "apply"] for _, spans in sorted(step.timeline.items())]
    reductions = [span for span in step.spans if span.kind == "all_reduce"]
    return [[str(span).split()[0] for span in spans] for spans in (*tasks, reductions)]


def test_without_catching_up_no_chain_of_waits_is_shorter_than_simulated() -> None:
    step = emulate(*pipeline(2, 2, "dapple_a", [1], 0.0), steps=2, catch_up=False)
    assert min(step.latencies) >= step.simulated.latency
    simulated = {str(span).split()[0]: span.end - span.start for span in step.simulated.spans}
    assert all(span.end - span.start >= 0.999 * simulated[str(span).split()[0]] for span in step.spans)


def test_scale_stretches_the_waits_and_not_the_result() -> None:
    plan, model, where = pipeline(2, 4, "dapple_a", [1], 0.3)
    step = emulate(plan, model.scaled(1e-4), Cluster(where.devices, real=False), steps=1)
    assert step.simulated.latency < 1e-3
    assert step.scale > 1000
    assert emulate(plan, model, where, scale=2.0, steps=1).scale == 2.0


def test_text_and_measures() -> None:
    plan, model, where = pipeline(2, 4, "dapple_a", [2, 1], 0.3)
    step = emulate(plan, model.scaled(1.0, step_seconds=0.05), where, steps=2)
    lines = str(step).splitlines()
    assert lines[0].startswith("step emulated ")
    assert f"simulated {step.simulated.latency * 1e3:.4g} ms, error {step.error:+.2%}" in lines[0]
    assert " ".join(lines[1].split()) == "stage devices busy ms simulated emulated bubble simulated emulated"
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[4].startswith("2 steps of ")
    assert 0.05 < min(step.latencies) <= step.latency <= max(step.latencies)
    assert all(b.start >= a.end for spans in step.timeline.values() for a, b in itertools.pairwise(spans))
    assert (step.critical_path[0].kind, step.critical_path[-1].kind) == ("F", "apply")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: emulate(Plan.data_parallel(33, 33), profile(1), cluster(33)),
            "the plan uses 33 devices, of which at most 32 can be emulated",
        ),
        (lambda: emulate(REPLICATED, profile(), cluster(3), steps=0), "0 steps were asked for; ask for at least 1"),
        (lambda: emulate(REPLICATED, profile(), cluster(3), scale=-1), "scale is -1; it must be above 0 and finite"),
    ],
)
def test_what_cannot_be_emulated_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises((EmulationError, ValueError), match=text):
        call()


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
    spans = [Span(kind, at, at + 1, 0, 0, number) for at, (kind, number) in enumerate([("F", 0), ("B", 0), ("F", 1)])]
    with pytest.raises(EmulationError, match="device 0 ran 0B0 0F1 as task 1 where the schedule has 0F1 0B0 0B1"):
        emulator._check_order(spans, schedule.orders)
