"""Plans, simulates and compares: the experiments of DAPPLE's evaluation (PPoPP'21, section 6) on its own profiles."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning import plan_reasons, planner
from dapple_tf.planning.early_reductions import reduced_early
from dapple_tf.planning.fastest_reductions import fastest_reductions
from dapple_tf.schedules.schedules import POLICIES
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Simulation, simulate
from dapple_tf.tools.evaluation.paper_models import (
    CONFIGS,
    FIGURE_11_MODELS,
    MODELS,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    LargeBert,
    Measured,
    PaperRow,
    Partition,
    deep_bert,
    hardware,
    layer_index,
    measured_bert,
    paper_partitions,
    pipedream_partition,
    straight,
)

_MOST_MICRO_BATCHES = 64
_PER_STAGE = 6
"""Micro-batches per stage in Table 7, which the paper omits: the least with which its utilizations come out."""


@dataclass(frozen=True)
class Outcome:
    """A plan and the time of its step.

    Attributes:
        simulation: simulation of one step.
        fits: whether the devices have the memory; if not, the simulation ignores the limit.
        note: the missing memory.
    """

    simulation: Simulation
    fits: bool = True
    note: str = ""

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.simulation.costs.plan

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.simulation.latency

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"{shape(plan)} at {cut_text(self)}, M={plan.micro_batches}" if plan.cuts else f"DP, M={plan.micro_batches}"
        )


@dataclass(frozen=True)
class RowResult:
    """A row of Table 4 or 6: each plan at its best number of micro-batches and schedule, in one simulation.

    Attributes:
        row: the paper's row.
        ours: our planner's plan.
        paper: the paper's plan.
        overlap: data parallelism, gradients reduced during the last backward.
        no_overlap: data parallelism, reduced after it.
        gpipe: a straight pipeline over all devices, balanced by time, under GPipe's schedule.
        pipedream: PipeDream's plan.
        single: seconds on one device.
        planner_seconds: seconds of one core that the planner took.
    """

    row: PaperRow
    ours: Outcome
    paper: Outcome
    overlap: Outcome | None
    no_overlap: Outcome | None
    gpipe: Outcome | None
    pipedream: Outcome | None
    single: float
    planner_seconds: float

    @property
    def advantage(self) -> float:
        """Ratio of the time of a step of the paper's plan to ours."""
        return self.paper.seconds / self.ours.seconds

    @property
    def same(self) -> bool:
        """Whether our plan has the paper's stages and replicas."""
        ours, paper = self.ours.plan, self.paper.plan
        return (ours.cuts, ours.replicas) == (paper.cuts, paper.replicas)

    def speedup(self, outcome: Outcome | None) -> float | None:
        """Returns the speedup over one device."""
        return None if outcome is None else self.single / outcome.seconds


# ---- texts


def shape(plan: Plan) -> str:
    """Returns a plan in the paper's notation, equal stages joined: ``8:8``, ``1x9:2x2``, ``straight (16)``, ``DP``."""
    if plan.num_stages == 1:
        return "DP"
    if set(plan.replicas) == {1} and plan.num_stages > 2:
        return f"straight ({plan.num_stages})"
    if plan.num_stages <= 4:
        return ":".join(map(str, plan.replicas))
    runs = [(count, len(list(group))) for count, group in itertools.groupby(plan.replicas)]
    return ":".join(f"{count}x{length}" if length > 1 else f"{count}" for count, length in runs)


def cut_text(outcome: Outcome) -> str:
    """Returns the indices of the last layers of stages."""
    profile = outcome.simulation.costs.profile
    cuts = [str(profile.index[cut]) for cut in outcome.plan.cuts]
    return ",".join(cuts) if len(cuts) <= 3 else f"{cuts[0]},{cuts[1]},..,{cuts[-1]}"


def path_text(simulation: Simulation) -> str:
    """Returns the composition of the critical path, longest part first."""
    names = {"send": "transfers", "all_reduce": "all-reduce", "apply": "Apply"}
    parts: dict[str, float] = {}
    path = simulation.critical_path
    for span, after in itertools.zip_longest(path, path[1:]):
        end = span.end if after is None else min(span.end, after.start)
        name = names.get(span.kind, "computing")
        parts[name] = parts.get(name, 0.0) + end - span.start
    ranked = sorted(((seconds, name) for name, seconds in parts.items() if seconds), reverse=True)
    return ", ".join(f"{name} {seconds * 1e3:.0f}" for seconds, name in ranked) + " ms"


# ---- plans at their best


def micro_batch_counts(profile: Profile, batch: int, partitions: Iterable[Partition] = ()) -> tuple[int, ...]:
    """Returns powers of two whose slices have at least the profiled size, and the maximum of each partition."""
    most = max(1, min(batch // profile.least_samples, _MOST_MICRO_BATCHES))
    counts = {2**power for power in range(most.bit_length())}
    for partition in partitions:
        fitting = batch // (max(partition.replicas) * profile.least_samples)
        if fitting >= 1:
            counts.add(min(fitting, most))
    return tuple(sorted(count for count in counts if count <= most))


def best(
    partitions: Iterable[Partition],
    profile: Profile,
    cluster: Cluster,
    batch: int,
    counts: Sequence[int],
    *,
    overlap: bool = True,
    all_reduce: str | None = None,
    schedules: Sequence[str] = POLICIES,
    recompute: Sequence[str] = ("none", "boundary"),
) -> Outcome | None:
    """Returns the fastest way to run any of these partitions; None if none is legal.

    If none fits the devices, the one with the least missing memory, simulated without the limit.
    """
    fastest: Outcome | None = None
    unfit: list[tuple[float, Plan]] = []
    for partition, count, mode in itertools.product(tuple(partitions), counts, recompute):
        cuts = [profile.layers[cut].name for cut in partition.cuts]
        for schedule in schedules if cuts else ("dapple_a",):
            try:
                plan = Plan.manual(cuts, partition.devices, count, batch, schedule, recompute=mode)
            except PlanError:
                continue  # fewer samples than replicas
            try:
                run = _run(plan, profile, cluster, overlap, all_reduce)
            except PlanError:
                unfit.append((_shortage(plan, profile, cluster)[0], plan))
                continue
            if fastest is None or run.latency < fastest.seconds * (1 - 1e-9):
                fastest = Outcome(run)
    if fastest is not None or not unfit:
        return fastest
    devices = tuple(dataclasses.replace(device, memory_bytes=None) for device in cluster.devices)
    unlimited = dataclasses.replace(cluster, devices=devices)
    least = min(unfit, key=lambda entry: entry[0])[0]
    nearest = [plan for over, plan in unfit if over <= least + 1]
    runs = [_run(plan, profile, unlimited, overlap, all_reduce) for plan in nearest]
    run = min(runs, key=lambda run: run.latency)
    return Outcome(run, False, _shortage(run.costs.plan, profile, cluster)[1])


def _run(plan: Plan, profile: Profile, cluster: Cluster, overlap: bool, all_reduce: str | None) -> Simulation:
    """Simulates a plan with this all-reduce, or the fastest for each stage; with all relays where they make it faster.

    If they may ``overlap``, all-reduces run during the last backwards as far as that gains.
    """
    if any(len(tensor.consumers) > 1 for tensor in profile.tensors) and plan.num_stages > 2 and not plan.relays:
        ways = (plan, dataclasses.replace(plan, relays=tuple(range(plan.num_stages))))
        runs = []
        for way in ways:
            with contextlib.suppress(PlanError):  # what waits at relays may not fit
                runs.append(_simulated(way, profile, cluster, overlap, all_reduce))
        if runs:
            return min(runs, key=lambda run: run.latency)
    return _simulated(plan, profile, cluster, overlap, all_reduce)


def _simulated(plan: Plan, profile: Profile, cluster: Cluster, overlap: bool, all_reduce: str | None) -> Simulation:
    if all_reduce is None:
        plan = fastest_reductions(plan, profile, cluster)
    else:
        plan = dataclasses.replace(plan, all_reduce=all_reduce)
    if overlap:
        plan = reduced_early(plan, profile, cluster)
    return simulate(plan, profile, cluster)


def _shortage(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[float, str]:
    """Returns how many bytes a plan lacks at its worst stage, also as a text."""
    costs = CostModel(plan, profile, cluster)
    flight = [count if plan.policy.needs_all else 1 for count in plan.warm_up_counts()]
    needs = [costs.needed_bytes(stage, count) for stage, count in enumerate(flight)]
    stage = max(range(plan.num_stages), key=lambda i: needs[i] - (costs.memory_limit(i) or 0))
    limit = costs.memory_limit(stage) or 0
    samples = costs.samples(stage)
    held = f"{flight[stage]} slice{'s' if flight[stage] > 1 else ''} of {samples} sample{'s' if samples > 1 else ''}"
    return needs[stage] - limit, f"stage {stage} needs {needs[stage] / 1e9:.1f} of {limit / 1e9:.1f} GB for {held}"


def data_parallel(
    profile: Profile,
    cluster: Cluster,
    batch: int,
    counts: Sequence[int],
    *,
    overlap: bool = True,
    all_reduce: str | None = None,
) -> Outcome | None:
    """Returns data parallelism on all devices; None if it doesn't fit."""
    everywhere = [Partition((), (cluster.num_devices,))]
    outcome = best(
        everywhere, profile, cluster, batch, counts, overlap=overlap, all_reduce=all_reduce, recompute=("none",)
    )
    return outcome if outcome is not None and outcome.fits else None


def make_plan(
    profile: Profile,
    cluster: Cluster,
    batch: int,
    counts: Sequence[int],
    *,
    all_reduce: str | None = None,
    patience: float = 1.0,
) -> tuple[Outcome, float]:
    """Returns our plan, and the processor seconds of finding it; the least of three if above ``patience``."""
    seconds = []
    for _ in range(3):
        began = time.process_time()
        plan = planner.plan(
            profile, cluster, batch, micro_batches=counts, schedule="auto", all_reduce=all_reduce, least_gain=0.0
        )
        seconds.append(time.process_time() - began)
        if seconds[-1] <= patience:
            break
    return Outcome(simulate(plan, profile, cluster)), min(seconds)


# ---- tables 4 and 6


def run_row(row: PaperRow, patience: float = 1.0) -> RowResult:
    """Returns a row of Table 4 or 6."""
    model, cluster = MODELS[row.model], CONFIGS[row.config]
    profile = model.profile()
    theirs = paper_partitions(row, profile)
    counts = micro_batch_counts(profile, row.batch, theirs)
    ours, seconds = make_plan(profile, cluster, row.batch, counts, patience=patience)
    paper = best(theirs, profile, cluster, row.batch, counts)
    assert paper is not None, row
    balanced = [straight(profile, cluster.num_devices)]
    pipedream = pipedream_partition(row, profile)
    return RowResult(
        row,
        ours,
        paper,
        data_parallel(profile, cluster, row.batch, counts),
        data_parallel(profile, cluster, row.batch, counts, overlap=False),
        best(balanced, profile, cluster, row.batch, counts, schedules=("gpipe",)),
        None if pipedream is None else best([pipedream], profile, cluster, row.batch, counts),
        plan_reasons.single_device_seconds(profile, row.batch),
        seconds,
    )


# ---- figure 11


@dataclass(frozen=True)
class Hybrid:
    """Our plan against data parallelism with overlap.

    Attributes:
        variant: which setting.
        model: name.
        config: A, B or C.
        ours: our plan.
        parallel: data parallelism.
    """

    variant: str
    model: str
    config: str
    ours: Outcome
    parallel: Outcome

    @property
    def speedup(self) -> float:
        """Over data parallelism."""
        return self.parallel.seconds / self.ours.seconds


def run_flat(model: str) -> Hybrid:
    """Config A with one ring through all devices rather than one in each server first."""
    row = next(row for row in TABLE_4 if row.model == model and row.config == "A")
    return _hybrid("flat ring", row, MODELS[model].profile(), "flat")


def run_small_batch(model: str, config: str) -> Hybrid:
    """GBS = 128, as section 6.3 has it, with times in proportion to samples also below the profiled batch."""
    row = next(row for row in TABLE_4 if row.model == model and row.config == config)
    profile = MODELS[model].profile()
    sizes = tuple(sorted({1, *profile.batch_sizes}))
    return _hybrid("GBS 128", dataclasses.replace(row, batch=128), dataclasses.replace(profile, batch_sizes=sizes))


def _hybrid(variant: str, row: PaperRow, profile: Profile, all_reduce: str | None = None) -> Hybrid:
    cluster = CONFIGS[row.config]
    counts = micro_batch_counts(profile, row.batch)
    ours, _ = make_plan(profile, cluster, row.batch, counts, all_reduce=all_reduce, patience=1e9)
    parallel = data_parallel(profile, cluster, row.batch, counts, all_reduce=all_reduce)
    assert parallel is not None, row
    return Hybrid(variant, row.model, row.config, ours, parallel)


def table_4_hybrids(results: Iterable[RowResult]) -> list[Hybrid]:
    """Figure 11 at Table 4's batches."""
    return [
        Hybrid("Table 4's GBS", result.row.model, result.row.config, result.ours, result.overlap)
        for result in results
        if result.row.table == 4 and result.row.model in FIGURE_11_MODELS and result.overlap is not None
    ]


# ---- figure 12


@dataclass(frozen=True)
class LargerCluster:
    """Our plan against data parallelism on 4 servers of 8."""

    model: str
    batch: int
    ours: Outcome
    parallel: Outcome | None
    single: float


def run_larger(row: PaperRow) -> LargerCluster:
    """Returns a row of Table 6 on 4 x 8 devices."""
    cluster = hardware(4, 8, 25)
    profile = MODELS[row.model].profile()
    counts = micro_batch_counts(profile, row.batch)
    ours, _ = make_plan(profile, cluster, row.batch, counts, patience=1e9)
    parallel = data_parallel(profile, cluster, row.batch, counts)
    return LargerCluster(row.model, row.batch, ours, parallel, plan_reasons.single_device_seconds(profile, row.batch))


# ---- table 3


@dataclass(frozen=True)
class Policies:
    """Steps of the paper's plan in config A under P_A and P_B.

    Attributes:
        model: its name.
        plan: replicas of the stages.
        steps: M -> seconds under P_A and P_B, where both fit.
    """

    model: str
    plan: str
    steps: Mapping[int, tuple[float, float]]

    @property
    def quickest(self) -> int:
        """M with the shortest step."""
        return min(self.steps, key=lambda count: self.steps[count][1])

    @property
    def widest(self) -> int:
        """M at which P_B is faster by most."""
        return max(self.steps, key=self.speedup)

    def speedup(self, micro_batches: int) -> float:
        """Of P_B over P_A."""
        first, second = self.steps[micro_batches]
        return first / second


def run_policies(model: str) -> Policies:
    """Returns a column of Table 3; for VGG-19, which Table 4 has in data parallelism, Table 6's pipeline."""
    rows = TABLE_6 if model == "vgg-19" else TABLE_4
    row = next(row for row in rows if row.model == model and row.config == "A")
    profile, cluster = MODELS[model].profile(), CONFIGS["A"]
    theirs = paper_partitions(row, profile)
    counts = micro_batch_counts(profile, row.batch, theirs)
    steps = {}
    for count in counts:
        outcomes = [
            best(theirs, profile, cluster, row.batch, [count], schedules=[policy], recompute=("none",))
            for policy in ("dapple_a", "dapple_b")
        ]
        if all(outcome is not None and outcome.fits for outcome in outcomes):
            first, second = (outcome.seconds for outcome in outcomes if outcome is not None)
            steps[count] = (first, second)
    return Policies(model, row.plan, steps)


# ---- table 5


@dataclass(frozen=True)
class Line5:
    """A line of Table 5: simulated samples/s and average peak bytes; None is out of memory."""

    measured: Measured
    throughput: float | None
    memory: float | None


def run_table_5() -> list[Line5]:
    """BERT-48 as two equal stages on two devices of config B, 2 samples per micro-batch, with the memory of Table 5."""
    profile, cluster = measured_bert(), hardware(2, 1, 25)
    lines = []
    for line in TABLE_5:
        plan = Plan.straight(
            ["layer_23"], 2 * line.micro_batches, line.micro_batches, line.schedule, recompute=line.recompute
        )
        try:
            run = simulate(plan, profile, cluster)
        except PlanError:
            lines.append(Line5(line, None, None))
            continue
        peaks = run.peak_bytes.values()
        lines.append(Line5(line, run.throughput, sum(peaks) / len(peaks)))
    return lines


# ---- table 7


@dataclass(frozen=True)
class Line7:
    """A line of Table 7: the largest BERT that fits.

    Attributes:
        paper: its line.
        layers: encoder layers.
        parameters: how many.
        utilization: average part of a step in which devices run forwards and backwards.
    """

    paper: LargeBert
    layers: int
    parameters: float
    utilization: float


def run_table_7(line: LargeBert = TABLE_7[-1]) -> Line7:
    """Returns the largest BERT on so many V100s of one server, with recomputation and one sample per micro-batch."""
    cluster = hardware(1, line.devices, 25)

    def costs_of(layers: int) -> CostModel | None:
        """Costs of a pipeline whose stages have as many layers each, the first fewer for the embeddings' sake."""
        profile = deep_bert(layers)
        first = layer_index(profile, "layer_0")
        for fewer in range(4):
            each, rest = divmod(layers + fewer, line.devices)
            sizes = [each + (stage >= line.devices - rest) for stage in range(line.devices)]
            sizes[0] -= fewer
            ends = list(itertools.accumulate(sizes))
            cuts = [profile.layers[first + end - 1].name for end in ends[:-1]]
            count = _PER_STAGE * line.devices
            plan = Plan.straight(cuts, count, count, "dapple_a", recompute="boundary")
            costs = CostModel(plan, profile, cluster)
            try:
                if costs.warm_up == plan.warm_up_counts():
                    return costs
            except PlanError:
                continue
        return None

    low, high = line.devices, 100 * line.devices
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs_of(middle) is not None else (low, middle)
    costs = costs_of(low)
    assert costs is not None
    run = simulate(costs.plan, costs.profile, cluster)
    busy = sum(span.end - span.start for span in run.spans if span.kind in ("F", "B"))
    return Line7(line, low, costs.profile.parameter_bytes / 4, busy / line.devices / run.latency)
