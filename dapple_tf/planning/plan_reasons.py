"""The planner's reasons for a plan, and its explanation when there is none."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from dapple_tf.common.units import counted, gib
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.plan_report import PlanReport, StageReport
from dapple_tf.describe.profile import Profile
from dapple_tf.planning import moves
from dapple_tf.planning.plan_request import PlanRequest, restraints
from dapple_tf.planning.pool import Choice
from dapple_tf.planning.search import pipeline_latency, stage_times
from dapple_tf.planning.stage_cuts import by_memory
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Simulation
from dapple_tf.view.timeline import ALL_REDUCE, SEND


def report(
    request: PlanRequest,
    best: Simulation,
    *,
    runner_up: tuple[Plan, float] | None = None,
    data_parallel: float | None = None,
    one_device: float | None = None,
    dapple: Choice | None = None,
) -> PlanReport:
    """Reports a plan's expected step, and why it was chosen.

    Args:
        request: the request.
        best: the plan's simulated step.
        runner_up: the best plan with other stages or replicas, and its latency; None if there was none.
        data_parallel: latency of data parallelism on all devices; None if that doesn't fit.
        one_device: latency on a single device, simulated like the others; None if that doesn't fit.
        dapple: the best plan under DAPPLE's policies, if others were searched.
    """
    costs, plan = best.costs, best.costs.plan
    total = sum(best.busy.values()) or 1.0
    busy = [0.0] * plan.num_stages
    for span in best.spans:
        if span.device is not None and span.kind != SEND:
            busy[span.stage] += span.end - span.start
    stages = []
    for stage, devices in enumerate(plan.devices):
        first, stop = costs.stages[stage].layers
        memory_bytes, limit = _nearest_to_limit(best, devices)
        stages.append(
            StageReport(
                layers=stop - first,
                share=busy[stage] / total,
                bubble=best.bubbles[stage],
                warm_up=costs.warm_up[stage],
                memory_bytes=memory_bytes,
                memory_limit=limit,
            )
        )
    pace = f"stage {min(range(plan.num_stages), key=lambda stage: best.bubbles[stage])}"
    if len(set(plan.devices)) == plan.num_stages:  # as the formula has it
        pace = _stage_name(pipeline_latency(stage_times(costs), len(costs.micro_batches)).pivot)
    single = one_device
    if single is None:
        single = single_device_seconds(request.profile, request.batch)
    return PlanReport(
        latency=best.latency,
        speedup=single / best.latency if best.latency else 1.0,
        one_device=one_device,
        data_parallel=data_parallel,
        data_parallel_note="" if data_parallel is not None else _why_not_data_parallel(request),
        runner_up=None if runner_up is None else runner_up[1],
        runner_up_text="" if runner_up is None else shape(runner_up[0]),
        runner_up_note="" if runner_up is None or runner_up[1] > best.latency else _excess(runner_up[0], plan),
        pivot=pace,
        limited_by=_limit(best),
        stages=tuple(stages),
        fingerprint=plan.fingerprint,
        restraints=restraints(plan),
        idle_devices=request.cluster.num_devices - len(_used(plan)),
        out_of_order="" if dapple is None else moves.name(plan),
        dapple=None if dapple is None else dapple.latency,
        dapple_text="" if dapple is None else _policy_and_shape(dapple.plan),
    )


def _excess(other: Plan, plan: Plan) -> str:
    """Returns what a plan needs more of than the chosen one, which is simpler."""
    if other.num_stages > plan.num_stages:
        return "with more stages"
    return "on more devices" if len(_used(other)) > len(_used(plan)) else ""


def _used(plan: Plan) -> set[int]:
    return {*itertools.chain(*plan.working_devices)}


def _nearest_to_limit(step: Simulation, devices: Sequence[int]) -> tuple[float, int | None]:
    """Returns peak and size of the memory of the device that has the least left; the largest peak if none is known."""
    sizes = {device: step.costs.cluster.devices[device].memory_bytes for device in devices}
    left = {device: size - step.peak_bytes[device] for device, size in sizes.items() if size is not None}
    if not left:
        return max(step.peak_bytes[device] for device in devices), None
    device = min(left, key=lambda device: left[device])
    return step.peak_bytes[device], sizes[device]


def _why_not_data_parallel(request: PlanRequest) -> str:
    devices = request.cluster.num_devices
    if request.batch < devices:
        return f"a batch of {counted(request.batch, 'sample')} doesn't reach {counted(devices, 'replica')}"
    reaching = [count for count in request.counts if request.batch // count >= devices]
    if not reaching:
        return f"a micro-batch has fewer samples than the {devices} devices"
    costs = request.costs(request.plan((), [range(devices)], max(reaching)))
    short = costs.shortest(0, _in_flight(request, max(reaching)))
    if short is None:
        return "doesn't fit"
    need, limit = short[0].peak(_in_flight(request, max(reaching))), short[1]
    return f"doesn't fit: it needs {gib(need)} on each device, {gib(need - limit)} more than there is"


def shortage(request: PlanRequest) -> str:
    """Says why no plan fits, by how much, and what would."""
    devices = request.cluster.num_devices
    best = min(attempts(request), key=lambda attempt: attempt[0], default=None)
    if best is None:
        smallest = min(request.counts)
        return (
            f"no plan is possible: a global batch of {counted(request.batch, 'sample')} in "
            f"{counted(smallest, 'micro-batch')} doesn't reach the devices; use a larger batch or fewer micro-batches"
        )
    over, costs, stage = best
    in_flight = _in_flight(request, costs.plan.micro_batches)
    short = costs.shortest(stage, in_flight)
    assert short is not None, "a plan without limits doesn't exceed them"
    need, limit = short[0].peak(in_flight), short[1]
    text = (
        f"no plan fits the memory of {counted(devices, 'device')}: the one that comes nearest, "
        f"{shape(costs.plan)}, recompute {costs.plan.options['recompute']!r}: stage {stage} needs {gib(need)} on each "
        f"device ({gib(short[0].stored)} for weights, gradients and optimizer), {gib(over)} more than "
        f"the {gib(limit)} there are"
    )
    fixes = []
    given = request.named_modes is not None and "boundary" not in request.named_modes
    if given and _fits(dataclasses.replace(request, recompute="boundary", only=request.features | {"recompute"})):
        fixes.append("recompute='boundary'")
    if request.optimizer_shards is False and _fits(dataclasses.replace(request, optimizer_shards=True)):
        fixes.append("optimizer_shards=True, if the optimizer updates each element by itself")
    for most in (max(1, request.batch // request.profile.least_samples), request.batch):
        if most > max(request.counts) and _fits(dataclasses.replace(request, micro_batches=(most,))):
            fixes.append(f"smaller micro-batches (micro_batches={most})")
            break
    for factor in (2, 4, 8, 16):
        if _fits(dataclasses.replace(request, cluster=_enlarged(request.cluster, factor))):
            fixes.append(f"{factor} times as many devices ({factor * devices})")
            break
    if fixes:
        return f"{text}. What would fit: {', or '.join(fixes)}"
    largest = max(layer.parameter_bytes * 2 + layer.slot_bytes for layer in request.profile.layers)
    return f"{text}. The largest layer alone needs {gib(largest)} for weights, gradients and optimizer"


def _in_flight(request: PlanRequest, micro_batches: int) -> int:
    """Returns the fewest micro-batches that a stage has to hold."""
    return micro_batches if all(policy.needs_all for policy in request.schedules) else 1


def _fits(request: PlanRequest) -> bool:
    return any(over <= 0 for over, _, _ in attempts(request))


def attempts(request: PlanRequest) -> Iterator[tuple[float, CostModel, int]]:
    """Yields pipelines of stages of equal memory: (bytes over the limit, costs, the stage that exceeds it most).

    Devices with most memory are used first; if no device's memory is known, nothing exceeds it.
    """
    devices = request.cluster.num_devices
    limits = [math.inf if device.memory_bytes is None else device.memory_bytes for device in request.cluster.devices]
    ranked = sorted(range(devices), key=lambda device: -limits[device])
    most = min(devices, len(request.profile.layers))
    for mode in request.named_modes or ("none", "boundary"):
        for count in request.counts:
            for stages in _stage_counts(most):
                for replicas in {1, min(devices // stages, request.batch // count)} - {0}:
                    groups = [sorted(ranked[i * replicas : (i + 1) * replicas]) for i in range(stages)]
                    costs = request.costs(request.plan(by_memory(request.profile, stages), groups, count, mode))
                    in_flight = _in_flight(request, count)
                    overs = [
                        (short[0].peak(in_flight) - short[1], stage)
                        for stage in range(stages)
                        if (short := costs.shortest(stage, in_flight)) is not None
                    ]
                    over, worst = max(overs, default=(-math.inf, 0))
                    yield over, costs, worst


def _stage_counts(most: int) -> list[int]:
    """Returns the numbers of stages to try: all small ones, larger ones in steps of an eighth."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, counts[-1] * 9 // 8)))
    return counts


def _enlarged(cluster: Cluster, factor: int) -> Cluster:
    """Returns the cluster repeated ``factor`` times."""
    servers = cluster.num_servers
    devices = tuple(
        dataclasses.replace(device, name=f"{device.name}/copy{copy}", server=device.server + copy * servers)
        for copy in range(factor)
        for device in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices, servers=cluster.servers * factor, real=False)


def single_device_seconds(profile: Profile, batch: int) -> float:
    """Returns the seconds to run all micro-batches in sequence on one device (section 6.3), in profiled slices."""
    size = profile.batch_sizes[-1]
    cost = profile.total("forward") + profile.total("backward")
    count = -(-batch // size)
    least, longer = divmod(batch, count)  # ``longer`` slices have one more sample
    seconds = longer * cost.at(profile.timed_samples(least + 1)) + (count - longer) * cost.at(
        profile.timed_samples(least)
    )
    return seconds + sum(layer.apply_seconds for layer in profile.layers) + profile.step_seconds


def shape(plan: Plan) -> str:
    """Returns a plan's short form, as in the paper: ``8:8`` with 4 micro-batches, ``data parallel``, ``straight``."""
    replicas = plan.replicas
    name = ":".join(map(str, replicas))
    if plan.spread_stages:
        sizes = [len(groups[0]) for groups in plan.groups]
        parts = (f"{own} x {size}" if size > 1 else f"{own}" for own, size in zip(replicas, sizes, strict=True))
        name = f"{':'.join(parts)} with placed operators"
    elif plan.num_stages == 1:
        name = "one device" if replicas == (1,) else f"data parallel on {replicas[0]}"
    elif set(replicas) == {1}:
        name = f"straight pipeline of {plan.num_stages} stages"
    return f"{name}, {counted(plan.micro_batches, 'micro-batch')}"


def _policy_and_shape(plan: Plan) -> str:
    return shape(plan) if plan.num_stages == 1 else f"{plan.schedule} on {shape(plan)}"


def _stage_name(index: int) -> str:
    return f"stage {index // 2}" if index % 2 == 0 else f"the network between stages {index // 2} and {index // 2 + 1}"


def _limit(simulation: Simulation) -> str:
    """Returns the parts of the step's time, longest first."""
    parts: dict[str, float] = {}
    names = {SEND: "transfers", ALL_REDUCE: "all-reduce", "apply": "the optimizer"}
    for span in simulation.critical_path:
        name = names.get(span.kind, f"computation of stage {span.stage}")
        parts[name] = parts.get(name, 0.0) + span.end - span.start
    if (once := simulation.costs.profile.step_seconds) > 0:
        parts["what a step takes once"] = once
    ranked: list[tuple[str, float]] = sorted(parts.items(), key=lambda item: -item[1])[:3]
    total = simulation.latency or 1.0
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ranked)
