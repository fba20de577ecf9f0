"""Measures the times of single operators of a model's training step: FD-DPS, definition 3."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from dapple_tf.common.progress import Progress
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.execution.builds import StepKind
from dapple_tf.execution.engine import Engine
from dapple_tf.execution.values import Log
from dapple_tf.frontend.batch import Batch
from dapple_tf.frontend.capture import Mode, check_model
from dapple_tf.frontend.metrics import RunningMetrics
from dapple_tf.frontend.optimizer_checks import check_optimizer
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.layers_by_operator import MeasuredOperators, StageOperators
from dapple_tf.measuring.links import measure_links
from dapple_tf.measuring.profiled_model import ProfiledModel, kept_metrics
from dapple_tf.measuring.timed_step import MARK, StepRuns, TimedStep, with_fed_sizes
from dapple_tf.measuring.turns import TimeBudget, in_turns
from dapple_tf.operators.build_op_graph import operator_signatures
from dapple_tf.operators.op_costs import OperatorCosts, device_kind
from dapple_tf.operators.signatures import OpSignature
from dapple_tf.tracing.kernel_times import is_executors
from dapple_tf.tracing.step_trace import TracedStep
from dapple_tf.variables.parameter_groups import readers_of
from graph_passes.ir.batching import Interval
from graph_passes.ir.graph import Builder, Graph, Ref, substitute
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import takes_functions
from graph_passes.pass_manager import run_passes
from graph_passes.passes.flatten import Flatten
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.split_concat import SplitConcat

logger = logging.getLogger(__name__)

_STEPS = 5


def measured_operators(
    model: keras.Model, cluster: Cluster, plan: Plan, costs: OperatorCosts | None = None, **examples: Any
) -> tuple[OperatorCosts, Cluster]:
    """Returns the operators' costs on a real cluster, and the cluster with its links.

    Args:
        model: a built and compiled Keras model.
        cluster: real devices; known links aren't measured.
        plan: a plan that places operators.
        costs: operators' costs to use instead of measuring.
        examples: ``x``, ``y``, ``sample_weight`` and ``length`` as for `profile_operators`.

    Raises:
        CaptureError: the model can't be captured.
        ProfileError: inputs or labels can't be guessed; give ``x`` and ``y``.
        PlanError: the cluster lacks a device of the plan, or the model doesn't fit the devices' memory.
    """
    plan.validate_on(cluster)
    if cluster.real and cluster.num_devices > 1 and cluster.intra_bandwidth is None:
        cluster = measure_links(cluster, capacity=False)
    if costs is None:
        costs = profile_operators(model, cluster, plan, **examples)
    return costs, cluster


def profile_operators(
    model: keras.Model,
    cluster: Cluster,
    plan: Plan,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    length: int | None = None,
    steps: int = _STEPS,
    costs: OperatorCosts | None = None,
) -> OperatorCosts:
    """Measures the operators of a model's training step on each kind of device that a plan places them on.

    A step runs with everything on one device of each kind; if the model is too large for that, on all devices of
    the plan. The model and its optimizer keep their values: a copy on the device is trained.

    Args:
        model: a built and compiled Keras model.
        cluster: real devices.
        plan: a plan that places operators; its largest slices are measured.
        x: example inputs, any number of samples. Needed for a model that doesn't declare its inputs.
        y: example labels; drawn for the loss by default.
        sample_weight: example weights; none by default.
        length: length of axes that the model leaves open, if x isn't given; see :func:`dapple_tf.profile`.
        steps: number of steps to average.
        costs: costs to add to; None begins with estimates only.

    Raises:
        ProfileError: the cluster has no real devices, or inputs or labels can't be guessed; give ``x`` and ``y``.
        CaptureError: the model isn't built or compiled, or can't be captured.
        PlanError: the plan doesn't place operators or doesn't fit the cluster, or the model not the devices' memory.
    """
    Cluster.check("cluster", cluster)
    Plan.check("plan", plan)
    if not cluster.real:
        raise ProfileError("this cluster is a description without real devices: it can be planned for, not measured")
    if not plan.places_operators:
        raise PlanError(
            "this plan runs its stages as a whole: measure operators for Plan.by_operators(...) or "
            "plan.with_placed_operators()"
        )
    plan.validate_on(cluster)
    check_model(model, training=True)
    check_optimizer(model.optimizer, model.trainable_variables)
    measured = OperatorCosts() if costs is None else costs
    example = ExampleBatch.of(model, x, y, sample_weight, length=length)
    micro_batch = Interval(0, -(-plan.global_batch_size // plan.micro_batches))
    samples = max(part.size for stage in range(plan.num_stages) for part in plan.slices(stage, micro_batch))
    chosen = {
        (device_kind(cluster.device_names[device]), cluster.devices[device].speed): device
        for devices in reversed(plan.working_devices)
        for device in reversed(devices)
    }
    every = [device for groups in plan.groups for device in groups[0]]
    bar = Progress("measuring operators")
    with example.told(model), kept_metrics(model), bar:
        for device in chosen.values():
            try:
                _measure(model, cluster, [device], samples, example, measured, steps, bar)
            except PlanError as error:
                logger.info("not measured on device %d alone: %s", device, error)
                _measure(model, cluster, every, samples, example, measured, steps, bar)
                break
    logger.info("measured %d kinds of operators of model %r", measured.count, model.name)
    return measured


def _measure(
    model: keras.Model,
    cluster: Cluster,
    devices: list[int],
    samples: int,
    example: ExampleBatch,
    costs: OperatorCosts,
    steps: int,
    bar: Progress,
) -> None:
    plan = Plan.by_operators(devices, samples)
    batch = Batch(example.spec, example.batch(samples), samples)
    with contextlib.closing(Engine(model, cluster, plan, Log(FaultPolicy()), costs)) as engine:
        engine.builder.notes.quiet = True
        built = engine.prepare(Mode.TRAIN, example.spec)
        step = built.placed[StepKind(samples)]
        signatures = operator_signatures(step.flat.program.graph, step.flat.shapes)
        metrics = RunningMetrics(model, engine.table).feeds()

        def trace() -> TracedStep:
            traced = engine.run(Mode.TRAIN, batch, metrics=metrics, trace=True).traced
            assert traced is not None
            return traced

        (traces,) = in_turns([trace], steps, say=bar.step)
        stats = [traced.stats for traced in traces]
        speeds = {cluster.device_names[device]: cluster.devices[device].speed for device in devices}
        for name, (device, seconds, times) in node_times(stats, signatures, traces[0].prefix).items():
            costs.add(signatures[name], device_kind(device), seconds * speeds.get(device, 1.0), times=times)


# ---- the same in steps of F and B alone, from which profiles are made in a hurry


_ROUNDS = 3
"""Number of rounds, each with one run and one trace of each size."""


def measure_operators(
    profiled: ProfiledModel,
    operators: Mapping[int, Sequence[StageOperators]],
    budget: TimeBudget,
    say: Callable[[str], object] = lambda text: None,
) -> MeasuredOperators:
    """Runs a step with slices of several sizes, the smallest first, at least once and as long as there is time.

    Args:
        profiled: the model.
        operators: samples of a slice -> operators of each stage.
        budget: the remaining time. Larger slices are begun, and rounds repeated, while it lasts.
        say: called with the current work.
    """
    walls: dict[int, list[float]] = {}
    traces: dict[int, list[object]] = {}
    rounds = profiled.repeats or _ROUNDS
    device, host_device = profiled.device_name, profiled.cluster.host_device
    with profiled.session(()) as session:
        timed, stage_nodes = _flat_step(profiled.program, device, host_device, "operators_")
        runs = StepRuns(session, timed, "flat")
        for samples in operators:
            runs.feed(samples, profiled.batch(samples))
        for number, samples in itertools.product(range(rounds), sorted(operators)):
            known = walls.get(samples) or [samples / least * walls[least][0] for least in walls]
            # A warm-up run, a timed run and a trace.
            if walls and profiled.repeats is None and budget.left < 3 * known[0]:
                continue
            say(f"measuring operators, round {number + 1} of {rounds}, slices of {samples}")
            runs.run(samples)  # Prepares the graph, and gets this size's data back into the caches.
            start = time.perf_counter()
            runs.run(samples)
            walls.setdefault(samples, []).append(time.perf_counter() - start)
            traces.setdefault(samples, []).append(runs.trace(samples, alone=True))
    operator_times: dict[int, list[dict[str, float]]] = {}
    for samples, stats in traces.items():
        signatures: dict[str, OpSignature] = {}
        for node, (stage, name) in stage_nodes.items():
            made = operators[samples][stage].signatures
            if name in made:
                signatures[node] = made[name]
        operator_times[samples] = [{} for _ in operators[samples]]
        for node, time_of_node in node_times(stats, signatures, runs.name).items():
            stage, name = stage_nodes[node]
            operator_times[samples][stage][name] = time_of_node.seconds
        count = sum(map(len, operator_times[samples]))
        logger.debug("%d of %d operators were traced with slices of %d", count, len(signatures), samples)
    return MeasuredOperators(operator_times, {samples: statistics.median(times) for samples, times in walls.items()})


# ---- a step without functions, operator by operator


def _flat_step(
    program: Program, device: str, host_device: str, prefix: str
) -> tuple[TimedStep, dict[str, tuple[int, str]]]:
    """Returns all stages' F and B for one micro-batch of any size, without updates, timed as a whole.

    Args:
        program: stages with functions.
        device: name of the device that computes.
        host_device: name of the device that batches are fed to.
        prefix: start of the names of new functions; unique in the session.

    Returns:
        The step, and for each node its stage and its name in that stage's graph.
    """
    layout = Layout(((device,),) * len(program.stages), MARK, MARK, 1)
    called = run_passes(program, [Replicate(layout, host_device, readers_of(program), prefix), SplitConcat()])
    flat = Flatten().run(called)
    graph = flat.graph
    view, builder = Graph(graph), Builder(graph)
    # What is pending is the gradient of the loss with respect to itself.
    ones = {
        name: builder.const(1.0, dtype_of(view, Ref(name)), device=device) for name in called.own_step.pending.values()
    }
    substitute(graph, ones)
    results = {ref.node for (task, _), ref in flat.own_step.values.items() if task.phase is Phase.BACKWARD}
    end = builder.add("end", "NoOp", control=sorted(results), device=device).node
    timed = TimedStep(graph, dataclasses.replace(flat.own_step, train=end), (), (), with_fed_sizes(graph, host_device))
    stage_nodes: dict[str, tuple[int, str]] = {}
    for stage in program.stages:
        for phase, function in stage.phases:
            call = called.own_step.entry[Task(stage.index, phase, 0)]
            nodes = () if function is None else function.function.node_def
            stage_nodes |= {f"{call}/{node.name}": (stage.index, node.name) for node in nodes}
    return timed, stage_nodes


# ---- times of operators from TensorFlow's step stats: E of FD-DPS, formula 1, end minus start, averaged


_KERNELS = re.compile(r"/device:GPU:\d+/(stream:all|memcpy)$")
"""TensorFlow's names of the lists of all kernels, and of all copies, that a GPU ran."""


class _Run(NamedTuple):
    """The run of a node: its device, and its start and end in nanoseconds."""

    device: str
    start: int
    end: int


class NodeTime(NamedTuple):
    """The time of a node in several traced steps.

    Attributes:
        device: name of its device.
        seconds: the median: a mean would include delays of the machine in a single step.
        steps: number of steps in which it ran.
    """

    device: str
    seconds: float
    steps: int


def node_times(steps: Iterable[Any], signatures: Mapping[str, OpSignature], prefix: str = "") -> dict[str, NodeTime]:
    """Returns the times of operators in traced steps; nodes that didn't run by themselves are missing.

    Times mean something if each device ran one operator at a time, and nothing in the first steps, which allocate
    memory and choose algorithms: leave these out. On CPUs a node's time is that of its computation. On GPUs the
    executor's times are those of starting kernels; a node's time is that of its kernels and copies, or of starting
    them if that took longer. A loop or branch that the session has taken apart takes as long as anything inside it
    runs.

    Args:
        steps: TensorFlow's StepStats of each.
        signatures: node -> what its time depends on, see `operator_signatures`. Other nodes are ignored.
        prefix: prefix of the nodes in the session's graph.
    """
    times: dict[str, list[tuple[str, int]]] = {}
    for stats in steps:
        for name, own in _times(stats, signatures, prefix).items():
            times.setdefault(name, []).append(own)
    return {
        name: NodeTime(own[0][0], statistics.median(nanoseconds for _, nanoseconds in own) / 1e9, len(own))
        for name, own in times.items()
    }


def _times(stats: Any, signatures: Mapping[str, OpSignature], prefix: str) -> dict[str, tuple[str, int]]:
    """Returns node -> its device and nanoseconds in a step."""
    start = len(prefix) + 1 if prefix else 0
    inside = _Insides(signatures)
    by_operator: dict[str, list[_Run]] = {}
    kernels: collections.Counter[str] = collections.Counter()
    told = False
    for device, node in _nodes(stats):
        if _KERNELS.search(device):
            told = True
            name = inside.operator(_operation(node.node_name)[start:])
            if name is not None:
                kernels[name] += 1000 * (node.op_end_rel_micros - node.op_start_rel_micros)
        elif is_executors(device) and node.node_name.startswith(prefix):
            name = inside.operator(node.node_name[start:])
            if name is not None:
                by_operator.setdefault(name, []).append(_run(device, node))
    on_gpus = [name for name, runs in by_operator.items() if device_kind(runs[0].device) == "GPU"]
    if on_gpus and not told:
        logger.warning(
            "%d operators ran on GPUs, but the trace has no times of kernels, so that they count as not measured; may "
            "this process use CUPTI?",
            len(on_gpus),
        )
        for name in on_gpus:
            del by_operator[name]
    return {name: (runs[0].device, max(_busy(runs), kernels[name])) for name, runs in by_operator.items()}


def _nodes(stats: Any) -> Iterator[tuple[str, Any]]:
    for own in stats.dev_stats:
        for node in own.node_stats:
            yield own.device, node


def _run(device: str, node: Any) -> _Run:
    """Returns the computation alone, without what the executor does before and after."""
    begin = node.all_start_nanos or 1000 * node.all_start_micros
    if node.op_end_rel_nanos:
        return _Run(device, begin + node.op_start_rel_nanos, begin + node.op_end_rel_nanos)
    return _Run(device, begin + 1000 * node.op_start_rel_micros, begin + 1000 * node.op_end_rel_micros)


def _operation(name: str) -> str:
    """Returns the node of a kernel, which may be named ``node:OpType``."""
    return name.partition(":")[0]


def _busy(runs: Iterable[_Run]) -> int:
    """Returns the nanoseconds during which any of these ran."""
    total, reached = 0, 0
    for run in sorted(runs, key=lambda run: run.start):
        total += max(0, run.end - max(run.start, reached))
        reached = max(reached, run.end)
    return total


class _Insides:
    """The operator of a node: itself, or the loop, branch or call in whose place the session has put it."""

    def __init__(self, signatures: Mapping[str, OpSignature]) -> None:
        self._known = signatures
        self._callers = {name for name, made in signatures.items() if takes_functions(made.op)}

    def operator(self, name: str) -> str | None:
        """Returns the operator that a node of the session's graph belongs to; None if none is known."""
        if name in self._known:
            return name
        if not self._callers:
            return None
        scopes = itertools.accumulate(name.split("/"), lambda scope, part: f"{scope}/{part}")
        return next((scope for scope in reversed(list(scopes)) if scope in self._callers), None)
