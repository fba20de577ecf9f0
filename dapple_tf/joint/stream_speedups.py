"""Measures what a model's Bx and Bw gain from running at the same time on two streams, and plans with it.

Out-Of-Order BackProp, EuroSys'22, section 4.1: "For all the region pairs we profile their concurrent kernel runs and
record the speedups over their sequential runs." Here a pair is a stage's Bw and an earlier stage's Bx: the real stage
functions of a plan on its real devices. One graph runs the model forward and backward once and then, for each pair,
both tasks one after the other and both at once, with nodes between them that read the clock (as in
`measuring/timed_step.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError, PlanOptions
from dapple_tf.describe.plan_values import integer
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, build, capture, check_model
from dapple_tf.frontend.host_part import on_host
from dapple_tf.frontend.layer_cuts import layer_stages
from dapple_tf.frontend.metrics import RunningMetrics
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.joint import joint_scheduling
from dapple_tf.joint.joint_scheduling import StreamTimes
from dapple_tf.joint.stream_schedule import JOINT
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.profiler import kept_metrics
from dapple_tf.measuring.timed_session import TimedSession
from dapple_tf.measuring.timed_step import Item, ItemKey, chained, time_stamp
from dapple_tf.progress import Progress
from dapple_tf.variables.parameter_groups import readers_of
from graph_passes.ir.batching import Interval, split_evenly
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr, substitute
from graph_passes.ir.outline import call_node
from graph_passes.ir.program import Layout, Program, StageFunction, Step
from graph_passes.ir.tasks import Phase, Task
from graph_passes.pass_manager import run_passes
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import Partition
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.split_concat import SplitConcat

logger = logging.getLogger(__name__)

_WARM_UP = 2
"""Number of runs that don't count: TensorFlow optimizes the graph in the first, allocators settle in the second."""
_REPEATS = 7
"""Number of runs that count; medians are taken."""
_OPTIONS = {"recompute", "jit_compile", "bucket_bytes", "wait_free", "carried_updates"}
"""Options that `plan_streams` passes on."""
_STEP = "streams"
_FIRST, _SECOND, _BOTH, _REHEARSAL = "first", "second", "both", "rehearsal"
"""Items of a pair: Bx, then Bw; both at once; and a rehearsal of both at once before, to warm caches."""


@dataclasses.dataclass(frozen=True)
class StreamProfile:
    """Times of a plan's tasks on two streams, and the memory that they keep.

    Attributes:
        times: seconds and speedups.
        residual_bytes: bytes that each stage keeps of a slice from F to Bx.
        delayed_bytes: bytes that each stage keeps of a slice from Bx to Bw.
    """

    times: StreamTimes
    residual_bytes: tuple[int, ...]
    delayed_bytes: tuple[int, ...]


def measure_speedups(
    model: keras.Model,
    cluster: Cluster,
    plan: Plan,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    repeats: int = _REPEATS,
    progress: bool = True,
) -> StreamProfile:
    """Measures each stage's Bx and Bw alone, and all pairs of a Bw and a Bx of an earlier stage at the same time.

    The speedup of a pair is the time of both one after the other over that of both at once, on the first replica's main
    and weight device and a slice of the first micro-batch; medians over ``repeats`` runs, in each of which all pairs
    are measured. The model keeps its values.

    Args:
        model: a built and compiled Keras model.
        cluster: real devices of this machine.
        plan: its cuts, devices, weight devices, micro-batches, recomputation and compilation; a plan for two streams,
            such as `plan_streams` makes.
        x: example inputs, as in `dapple_tf.profile`.
        y: example labels.
        sample_weight: example weights.
        repeats: number of measurements of everything.
        progress: whether to show progress on a terminal.

    Raises:
        PlanError: the cluster has no such devices, or the plan has no weight devices or they are the main ones.
        ProfileError: inputs or labels that can't be guessed.
        CaptureError: the model can't be captured.
    """
    plan.validate_on(cluster)
    if not cluster.real or cluster.addresses:
        raise PlanError("streams are measured on devices of this machine; use Cluster.local")
    if plan.weight_devices is None or plan.devices[0][0] == plan.weight_devices[0][0]:
        raise PlanError("the plan has no sub-stream to measure; give weight_devices that aren't the stages' own")
    if repeats < 1:
        raise PlanError(f"repeats is {repeats}; it must be at least 1")
    check_model(model, training=True)
    micro_batch = Interval(0, split_evenly(plan.global_batch_size, plan.micro_batches)[0])
    samples = max(part.size for part in plan.slices(0, micro_batch))
    names = cluster.device_names
    main, sub = names[plan.devices[0][0]], names[plan.weight_devices[0][0]]
    with kept_metrics(model), Progress("measuring streams", shown=None if progress else False) as bar:
        bar.step("capturing the model")
        example = ExampleBatch.of(model, x, y, sample_weight)
        table = VariableTable(model)
        build(model, table, example.spec)
        program = _stage_functions(capture(model, table, Mode.TRAIN, example.spec), plan)
        bar.step("building steps")
        step = _StreamStep(program, main, sub, cluster.host_device, samples)
        read = {name for stage in program.stages for name in stage.reads}
        with TimedSession(cluster, sub, RunningMetrics(model, table).feeds()) as session:
            session.load(table, [table.describe(name) for name in sorted(read)])
            session.add(step.graph, _STEP)
            feeds = step.feeds(
                session, dict(zip(program.roles.inputs, on_host(program, example.batch(samples)), strict=True))
            )
            rounds = []
            for number in range(-_WARM_UP, repeats):
                bar.step(f"run {number + 1} of {repeats}" if number >= 0 else "warming up")
                stamps = session.session.run(step.fetches, feeds)["stamps"]
                if number >= 0:
                    rounds.append(stamps)
    times = step.times(np.asarray(rounds))
    for (kernel, region), speedup in times.speedup.items():
        logger.debug("Bw of stage %d beside Bx of stage %d: %.2f times as fast", kernel, region, speedup)
    return StreamProfile(
        times,
        tuple(stage.residual_bytes * samples + stage.fixed_residual_bytes for stage in program.stages),
        tuple(stage.delayed_bytes * samples + stage.fixed_delayed_bytes for stage in program.stages),
    )


def plan_streams(
    model: keras.Model,
    cluster: Cluster,
    cuts: Iterable[str] | None = None,
    *,
    global_batch_size: int,
    stages: int | None = None,
    micro_batches: int = 1,
    memory_limit: int | None = None,
    tolerance: float | None = None,
    profile: StreamProfile | None = None,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    progress: bool = True,
    **options: Any,
) -> Plan:
    """Plans the two streams of each device: multi-region joint scheduling (EuroSys'22, section 4.1).

        cluster = Cluster.local(1, kind="cpu").with_sub_streams()
        plan = plan_streams(model, cluster, stages=8, global_batch_size=64)
        transform(model, cluster, plan).fit(...)

    The whole model is on each of the cluster's main devices, in stages whose Bx are the regions; their Bw are
    co-scheduled by algorithm 1 and the speedups that `measure_speedups` finds.

    Args:
        model: a built and compiled Keras model.
        cluster: a cluster with sub-streams, see `Cluster.with_sub_streams`.
        cuts: the layers that stages end after.
        global_batch_size: samples in one step, over all devices.
        stages: in place of ``cuts``, number of stages of about as many layers each.
        micro_batches: M.
        memory_limit: bytes that a device and its sub-stream may keep of a slice from its forward on: residuals, and
            the inputs of Bw. Regions at the backward's beginning are pre-scheduled until it fits (the paper's memory
            rule), and only one micro-batch is in flight. None for no limit.
        tolerance: consecutive stages with similar times of Bx are one region, see
            `joint_scheduling.similar_regions`; None makes each stage's Bx a region.
        profile: an earlier result of `measure_speedups`; measured when None.
        x: example inputs, as in `dapple_tf.profile`.
        y: example labels.
        sample_weight: example weights.
        progress: whether to show progress on a terminal.
        **options: ``recompute``, ``jit_compile``, ``bucket_bytes``, ``wait_free`` and ``carried_updates`` of the plan.

    Raises:
        PlanError: a cluster without sub-streams, neither or both of ``cuts`` and ``stages``, no schedule that fits the
            limit, or as `Plan` and `measure_speedups`.
    """
    if (cuts is None) == (stages is None):
        raise PlanError("give either cuts, the layers that stages end after, or stages, their number")
    names = even_cuts(model, stages, x, y, sample_weight) if stages is not None else list(cuts or ())
    plan = two_stream_plan(cluster, names, global_batch_size, micro_batches, **options)
    if profile is None:
        profile = measure_speedups(model, cluster, plan, x=x, y=y, sample_weight=sample_weight, progress=progress)
    return with_joint_schedule(plan, profile, memory_limit=memory_limit, tolerance=tolerance)


def two_stream_plan(
    cluster: Cluster, cuts: Sequence[str], global_batch_size: int, micro_batches: int = 1, **options: Any
) -> Plan:
    """Returns a plan for the two streams of each device in which each Bw runs as soon as it is ready.

    Raises:
        PlanError: a cluster without sub-streams, an option that `plan_streams` doesn't take, or as `Plan`.
    """
    count, size = cluster.sub_streams, len(cuts) + 1
    if not count:
        raise PlanError("the cluster has no sub-streams; make them with Cluster.with_sub_streams()")
    if unknown := sorted(options.keys() - _OPTIONS):
        raise PlanError(f"plan_streams doesn't take {unknown[0]!r}")
    given = PlanOptions(**options)  # type: ignore[typeddict-item]
    subs = ((*range(count, 2 * count),),) * size
    return Plan.manual(
        cuts, [range(count)] * size, micro_batches, global_batch_size, JOINT, **given, weight_devices=subs
    )


def with_joint_schedule(
    plan: Plan, profile: StreamProfile, *, memory_limit: int | None = None, tolerance: float | None = None
) -> Plan:
    """Returns a plan for two streams with the regions that algorithm 1 and the memory rule find for a profile.

    Raises:
        PlanError: the profile is of another number of stages, or nothing fits the limit.
    """
    times = profile.times
    if times.stages != plan.num_stages:
        raise PlanError(f"the profile is of {times.stages} stages, the plan has {plan.num_stages}; measure this plan")
    regions: joint_scheduling.Regions = joint_scheduling.stage_regions(times.stages)
    if tolerance is not None:
        regions = joint_scheduling.similar_regions(times.input_grad, tolerance)
    fitted = joint_scheduling.fit_memory(times, regions, profile.residual_bytes, profile.delayed_bytes, memory_limit)
    if memory_limit is not None and fitted.peak > memory_limit:
        raise PlanError(
            f"a slice keeps {fitted.peak:,.0f} bytes even if all weight gradients are computed as soon as they are "
            f"ready, but memory_limit is {memory_limit:,}; use more micro-batches, or recompute='boundary'"
        )
    logger.info(
        "joint schedule: %s in %d regions, of which %d prescheduled; a slice keeps %.3g MiB at most",
        [list(kernels) for kernels in fitted.schedule],
        len(regions),
        fitted.prescheduled,
        fitted.peak / 2**20,
    )
    weight_regions = joint_scheduling.weight_regions(regions, fitted.schedule, times.stages)
    # The memory rule counts one micro-batch.
    warm_up = plan.warm_up if memory_limit is None else (1,) * times.stages
    return dataclasses.replace(plan, weight_regions=weight_regions, warm_up=warm_up)


def even_cuts(model: keras.Model, stages: int, x: Any = None, y: Any = None, sample_weight: Any = None) -> list[str]:
    """Returns the layers to cut after for ``stages`` stages of about as many layers each.

    Raises:
        PlanError: fewer stages than 1, or more than the model can be cut into.
    """
    stages = integer("stages", stages)
    if stages < 1:
        raise PlanError(f"stages is {stages}; it must be at least 1")
    check_model(model, training=True)
    with kept_metrics(model):
        example = ExampleBatch.of(model, x, y, sample_weight)
        table = VariableTable(model)
        build(model, table, example.spec)
        training = capture(model, table, Mode.TRAIN, example.spec)
        inference = capture(model, table, Mode.PREDICT, BatchSpec(example.spec.x))
        names = layer_stages(model, training, inference).names
    if stages > len(names):
        raise PlanError(f"stages is {stages}, but the model can be cut into at most {len(names)}; lower it")
    ends = itertools.accumulate(split_evenly(len(names), stages))
    return [names[end - 1] for end in ends][:-1]


def _stage_functions(flat: Program, plan: Plan) -> Program:
    split = frozenset(range(plan.num_stages))
    partition = Partition(plan.recompute, plan.compiled, True, f"{_STEP}_", split)
    return run_passes(flat, [AssignStages(plan.cuts), BuildForward(), BuildBackward(), partition])


class _StreamStep:
    """A graph that runs a slice's tasks, then all pairs of a Bw and an earlier stage's Bx, and times both."""

    def __init__(self, program: Program, main: str, sub: str, host_device: str, samples: int) -> None:
        self.program, self.main, self.sub = program, main, sub
        count = len(program.stages)
        layout = Layout(((main,),) * count, samples, samples, 1, ((sub,),) * count)
        replicate = Replicate(layout, host_device, readers_of(program), f"{_STEP}_")
        complete = run_passes(program, [replicate, SplitConcat()])
        self.graph: GraphDef = complete.graph
        self.step: Step = complete.own_step
        self._bind_loss_gradient()
        self._view = Graph(self.graph)
        self._builder = Builder(self.graph)
        self._calls: list[str] = []
        items = self._alone()
        self.pairs = [
            (stage.index, region.index)
            for stage in program.stages
            for region in program.stages[: stage.index]
            if stage.weight_grad is not None and region.input_grad is not None
        ]
        self._ends: dict[tuple[int, int], tuple[str, str]] = {}
        for pair in self.pairs:
            items += self._pair(*pair)
        timed = chained(self.graph, self.step, items, main)
        self._builder = Builder(self.graph)  # That has added nodes.
        self._position = {item.key: index for index, item in enumerate(items)}
        self._stamps = list(timed.stamps)
        self._begin_of_both = {pair: timed.stamps[self._position[_key(_BOTH, pair)]] for pair in self.pairs}
        self._end_of_weights = {
            pair: time_stamp(self._builder, sub, [weight_grad]) for pair, (_, weight_grad) in self._ends.items()
        }
        self._stamps += self._end_of_weights.values()
        self._unread = self._readers()

    @property
    def fetches(self) -> dict[str, Any]:
        """The fetches of a run."""
        return {
            "stamps": [f"{_STEP}/{stamp}:0" for stamp in self._stamps],
            "unread": [f"{_STEP}/{node}" for node in self._unread],
        }

    def feeds(self, session: TimedSession, values: Mapping[Ref, np.ndarray]) -> dict[str, Any]:
        """Returns the feeds of a run: flat batch input -> the slice."""
        feeds: dict[Ref, Any] = {self.step.feeds[ref]: array for ref, array in values.items()}
        for variable, places in self.step.metric_feeds.items():
            feeds |= dict(zip(places, session.metrics[variable], strict=True))
        return {f"{_STEP}/{ref.node}:{ref.output}": value for ref, value in feeds.items()}

    def times(self, rounds: np.ndarray) -> StreamTimes:
        """Returns the times from the stamps of several runs. ``rounds``: [run, stamp], in seconds."""
        column = {stamp: index for index, stamp in enumerate(self._stamps)}
        # The clock may be set back meanwhile.
        spans = np.maximum(np.diff(rounds[:, : len(self._position) + 1]), 0.0)

        def span(key: ItemKey) -> np.ndarray:
            return np.asarray(spans[:, self._position[key]])

        def alone(phase: Phase, function: StageFunction | None, stage: int) -> float:
            if function is None:
                return 0.0
            where = 1 if phase is Phase.INPUT_GRAD else 0
            name = _FIRST if phase is Phase.INPUT_GRAD else _SECOND
            in_pairs = [span(_key(name, pair)) for pair in self.pairs if pair[where] == stage]
            return float(np.median(in_pairs or span(ItemKey(phase.value, stage))))

        stages = self.program.stages
        beside, speedup = {}, {}
        for pair in self.pairs:
            begin = rounds[:, column[self._begin_of_both[pair]]]
            end = rounds[:, column[self._end_of_weights[pair]]]
            beside[pair] = float(np.median(np.maximum(end - begin, 0.0)))
            sequential = span(_key(_FIRST, pair)) + span(_key(_SECOND, pair))
            together = np.maximum(span(_key(_BOTH, pair)), 1e-9)
            speedup[pair] = float(np.median(sequential / together))
        return StreamTimes(
            tuple(alone(Phase.INPUT_GRAD, stage.input_grad, stage.index) for stage in stages),
            tuple(alone(Phase.WEIGHT_GRAD, stage.weight_grad, stage.index) for stage in stages),
            beside,
            speedup,
        )

    def _bind_loss_gradient(self) -> None:
        """Sets the gradient of the loss to 1: how an optimizer scales it changes no times."""
        nodes = Graph(self.graph).nodes
        builder = Builder(self.graph)
        bound = {
            name: builder.const(1.0, nodes[name].attr["dtype"].type, device=self.main)
            for name in self.step.pending.values()
        }
        substitute(self.graph, bound)

    def _alone(self) -> list[Item]:
        """Returns the slice's own tasks, one after another: they make the inputs of the pairs."""
        order = [Task(stage.index, Phase.FORWARD, 0) for stage in self.program.stages]
        for stage in reversed(self.program.stages):
            order += [Task(stage.index, phase, 0) for phase, function in stage.phases[1:] if function is not None]
        for task in order:
            self._calls += {self.step.entry[task], *self.step.exit[task]}
        return [
            Item(ItemKey(task.phase.value, task.stage), (self.step.entry[task],), self.step.exit[task])
            for task in order
        ]

    def _pair(self, kernel: int, region: int) -> list[Item]:
        """Returns both at once (twice, of which the second counts), and one after the other between these."""
        weights, inputs = self.program.stages[kernel].weight_grad, self.program.stages[region].input_grad
        assert weights is not None and inputs is not None

        def calls() -> tuple[str, str]:
            return (
                self._again(Task(region, Phase.INPUT_GRAD, 0), inputs, self.main),
                self._again(Task(kernel, Phase.WEIGHT_GRAD, 0), weights, self.sub),
            )

        rehearsal, (first, second), both = calls(), calls(), calls()
        self._ends[kernel, region] = both
        pair = (kernel, region)
        return [
            Item(_key(_REHEARSAL, pair), rehearsal, rehearsal),
            Item(_key(_FIRST, pair), (first,), (first,)),
            Item(_key(_SECOND, pair), (second,), (second,)),
            Item(_key(_BOTH, pair), both, both),
        ]

    def _again(self, task: Task, function: StageFunction, device: str) -> str:
        """Adds another call of a task's function, with the task's own inputs."""
        given = self._view.inputs(self.step.entry[task])
        name = self._builder.names.fresh(f"again/{task}")
        self._builder.append(call_node(name, function.function, given, device=device))
        self._calls.append(name)
        return name

    def _readers(self) -> list[str]:
        """Returns a reader of each otherwise unread result: without it, TensorFlow removes the result and its work."""
        view = Graph(self.graph)
        read = {ref for name in view.nodes for ref in view.inputs(name)}
        readers = []
        for name in dict.fromkeys(self._calls):
            node = view.nodes[name]
            for index, dtype in enumerate(node.attr["Tout"].list.type):
                if Ref(name, index) not in read:
                    reader = self._builder.add(
                        "unread", "Identity", [Ref(name, index)], device=node.device, T=dtype_attr(dtype)
                    )
                    readers.append(reader.node)
        return readers


def _key(what: str, pair: Sequence[int]) -> ItemKey:
    return ItemKey(what, *pair)
