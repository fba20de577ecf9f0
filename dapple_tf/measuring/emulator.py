"""Emulates a training step: the Schedule on TensorFlow's own executor, with timed waits in place of the work.

The graph is that of a real step: a node for each task, control edges that fix each device's order, split and concat
between replicas, collectives between the members of a reduction. Only the tensors are small, one number per sample,
and tasks and transfers are waits of the cost model's lengths. Only the executor decides when a wait begins,
so that a wrong or missing edge or a deadlock shows; the time of a step is wall-clock time.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from dapple_tf.common.text import ms_text, table
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.measuring.emulated_step import EmulatedStep
from dapple_tf.measuring.emulated_waits import GRACE, EmulationError, StepClock
from dapple_tf.simulation.activities import ActivityGraph
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulation import Simulation, device_rows, shown
from dapple_tf.simulation.simulator import run_activities
from dapple_tf.view.timeline import SEND, Span
from graph_passes.ir.tasks import Phase, Schedule, Task
from graph_passes.ir.tensorflow_bridge import bare_config

MAX_DEVICES = 32
"""Maximum number of emulated devices: with more, the executor's own work would show in the result."""

_LOG = logging.getLogger(__name__)

_SHORTEST_SECONDS = 5e-3
"""Wall-clock seconds of the shortest relevant task in the automatic scale."""

_SECONDS_PER_NODE = 6e-4
"""Wall-clock seconds of a step per node of the graph: the executor needs about a sixth of it."""

_LONGEST_STEP = 3.0
"""Maximum wall-clock seconds of a step."""


@dataclass(frozen=True)
class Emulation(Simulation):
    """Measurements of an emulated step, in the form of a `Simulation`.

    Times are seconds of the profile, not of the wall clock. ``spans`` are those of the step of median latency, from
    the executor's start of a wait to its end.

    Attributes:
        latencies: latency of each step; ``latency`` is their median.
        simulated: the same step, simulated.
        scale: wall-clock seconds per second of the profile.
        lateness: mean wall-clock seconds from the arrival of a wait's inputs until the executor started it.
    """

    latencies: tuple[float, ...]
    simulated: Simulation = field(repr=False)
    scale: float
    lateness: float

    @property
    def error(self) -> float:
        """Relative difference from the simulated time; negative if the step took less."""
        simulated = self.simulated.latency
        return self.latency / simulated - 1 if simulated else 0.0

    @property
    def order(self) -> Schedule:
        """The order in which each device ran its tasks."""
        return _measured_order(self.spans)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("stage", "devices", "busy ms simulated", "emulated", "bubble simulated", "emulated")
        ]
        for stages, devices in device_rows(self.costs):
            both = (self.simulated, self)
            busy = [sum(step.busy[device] for device in devices) / len(devices) * 1e3 for step in both]
            idle = [sum(step.idle[device] for device in devices) / len(devices) for step in both]
            rows.append((stages, shown(devices), *(f"{x:.4g}" for x in busy), *(f"{x:.1%}" for x in idle)))
        head = (
            f"step emulated {ms_text(self.latency)} ms, simulated {ms_text(self.simulated.latency)} ms, "
            f"error {self.error:+.2%}"
        )
        tail = (
            f"{len(self.latencies)} steps of {ms_text(min(self.latencies))} to {ms_text(max(self.latencies))} ms, at "
            f"{self.scale:.4g} times their length; waits started {self.lateness * 1e3:.2g} ms late on average"
        )
        return "\n".join([head, table(rows), tail])


def emulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: Schedule | None = None,
    reduction_order: Sequence[int] | None = None,
    next_forward: bool = False,
    scale: float | None = None,
    steps: int = 3,
    catch_up: bool = True,
) -> Emulation:
    """Runs a plan's step on logical CPU devices of this machine, with waits in place of computation and transfers.

    Args:
        plan: the plan; it may use at most `MAX_DEVICES` devices.
        profile: costs of the model's layers.
        cluster: devices and links; unknown links are free.
        schedule: likewise.
        reduction_order: likewise.
        next_forward: likewise.
        scale: wall-clock seconds per second of the profile; None chooses one for which the waits are long enough
            to be exact.
        steps: number of measured steps, after a warm-up step.
        catch_up: whether a wait that the executor starts up to 1 ms late is shorter by that. Otherwise the executor's
            delays add up along the step, and only a large ``scale`` makes them small.

    Raises:
        EmulationError: too many devices; or the executor ran a task out of order, or before its inputs.
        PlanError: the plan doesn't fit the profile, the cluster, or a device's memory.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps were asked for; ask for at least 1")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be above 0 and finite, or None to choose one")
    Plan.check("plan", plan)
    devices = {device for group in plan.devices for device in group}
    if len(devices) > MAX_DEVICES:
        raise EmulationError(
            f"the plan uses {len(devices)} devices, of which at most {MAX_DEVICES} can be emulated; simulate it "
            f"instead, or emulate a plan with fewer stages or replicas"
        )
    costs = CostModel(plan, profile, cluster)
    graph = ActivityGraph(costs, costs.schedule if schedule is None else schedule, reduction_order, next_forward)
    simulated = run_activities(graph)
    if scale is None:
        scale = _choose_scale(simulated)
    clock = StepClock(costs, scale, catch_up=catch_up)
    step = EmulatedStep(graph, clock, simulated)
    config = bare_config(CPU=len(devices), GPU=0)
    config.inter_op_parallelism_threads = len(devices) + _most_pending(simulated) + 16
    config.intra_op_parallelism_threads = 1
    config.use_per_session_threads = True  # otherwise the process' first session decides the number of threads
    measured = []
    with tf.compat.v1.Session(graph=step.graph, config=config) as session:
        run = session.make_callable(step.end)
        for number in range(steps + 1):
            clock.reset(still=not number)  # the first one prepares the graph
            run()
            clock.check()
            if number:
                measured.append(clock.result(step.spans))
                _check_order(measured[-1].spans, step.orders)
    latencies = tuple(one.latency for one in measured)
    median = statistics.median_low(latencies)
    shown = measured[latencies.index(median)]
    overdue = max(one.overdue for one in measured)
    if overdue > GRACE:
        _LOG.warning(
            "the executor started a wait %.3g ms after it should have been over: the step is too fast for this "
            "machine; raise scale (%.3g), or leave other work for later",
            overdue * 1e3,
            scale,
        )
    lateness = statistics.fmean(one.lateness for one in measured)
    return Emulation(statistics.median(latencies), tuple(shown.spans), graph, latencies, simulated, scale, lateness)


def _choose_scale(simulated: Simulation) -> float:
    """Returns a scale that makes waits long enough to be exact, and the step as short as possible."""
    tasks = [s.end - s.start for s in simulated.spans if s.device is not None and s.kind != SEND]
    longest = max(tasks, default=0.0)
    if not longest or not simulated.latency:
        return 1.0
    shortest = min(seconds for seconds in tasks if seconds >= longest / 10)
    wanted = max(_SHORTEST_SECONDS / shortest, _SECONDS_PER_NODE * len(simulated.spans) / simulated.latency)
    return min(wanted, _LONGEST_STEP / simulated.latency)


def _most_pending(simulated: Simulation) -> int:
    """Returns the maximum number of simultaneous transfers and reductions: each has its own thread.

    What a task sends counts from its start on, so that relays count from their own forward's.
    """
    changes = []
    over: dict[tuple[int | None, int, int | None], float] = {}
    for span in simulated.spans:
        if span.kind == SEND:
            looked_up = simulated.graph.activities[span.activity].leg is None
            ready = 0.0 if looked_up else over.get((span.device, span.stage, span.micro_batch), 0.0)
            changes += [(ready, 1), (span.end, -1)]
        elif span.reduction is not None:
            count = len(simulated.costs.reductions[span.reduction].devices)
            changes += [(0.0 if span.cause is None else simulated.spans[span.cause].start, count), (span.end, -count)]
        else:
            over.setdefault((span.device, span.stage, span.micro_batch), span.start)
    level = most = 0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


# ---- time


def _measured_order(spans: Iterable[Span]) -> Schedule:
    orders: dict[int, list[tuple[float, Task]]] = {}
    phases = {phase.value: phase for phase in Phase}
    for span in spans:
        if span.kind in phases and span.device is not None and span.micro_batch is not None:
            task = Task(span.stage, phases[span.kind], span.micro_batch, span.replica)
            orders.setdefault(span.device, []).append((span.start, task))
    return Schedule(
        "emulated", {device: tuple(task for _, task in sorted(starts)) for device, starts in orders.items()}
    )


def _check_order(spans: Iterable[Span], orders: Mapping[int, tuple[Task, ...]]) -> None:
    """Checks that each device ran its tasks in this order."""
    measured = _measured_order(spans)
    for device, tasks in orders.items():
        ran = measured.orders.get(device, ())
        if ran != tasks:
            position = next((i for i, (a, b) in enumerate(zip(ran, tasks, strict=False)) if a != b), len(ran))
            raise EmulationError(
                f"device {device} ran {' '.join(map(str, ran[position : position + 4])) or 'nothing'} as task "
                f"{position} where the schedule has {' '.join(map(str, tasks[position : position + 4]))}: a control "
                f"edge is missing"
            )
