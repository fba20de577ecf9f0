"""The experiments of DAPPLE's evaluation (PPoPP'21, section 6) on its own profiles, each of which gives a record."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning import plan_reasons
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tools.evaluation.opponents import Case
from dapple_tf.tools.evaluation.paper_models import (
    CONFIGS,
    MODELS,
    SAME_CUTS,
    SAME_CUTS_OTHERWISE,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    LargeBert,
    PaperRow,
    Partition,
    deep_bert,
    hardware,
    layer_index,
    measured_bert,
    paper_partitions,
    pipedream_partitions,
    straight,
)
from dapple_tf.tools.evaluation.paper_opponents import strongest
from dapple_tf.tools.evaluation.paper_outcomes import (
    Outcome,
    Record,
    best,
    data_parallel,
    make_plan,
    micro_batch_counts,
    record,
)
from dapple_tf.tools.evaluation.paper_transfers import communication_ratio
from dapple_tf.tools.evaluation.pipedream import pipedream

_PER_STAGE = 6
"""Micro-batches per stage in Table 7, which the paper omits: the least with which its utilizations come out."""
_FEW_MICRO_BATCHES = 16
"""Most micro-batches of a second search: ours is bounded, and finds some plans only if it has fewer to choose from."""
_GPIPE_STAGES = (2, 4, 8, 16)
"""Stages that GPipe may have, each on a device of its own."""
FIGURE_14_DEVICES = (2, 4, 8, 10, 12, 16)
FIGURE_14_BATCHES = {"gnmt-16": 1024, "bert-48": 64, "xlnet-36": 128, "amoeba-36": 256}
"""Figure 14's models. The paper gives the batch of the last; the others' are Table 4's."""


_LITERAL = ", right behind the layer that the split counts"
"""How the first of a row's readings is told from the others."""


def row_of(model: str, config: str) -> PaperRow:
    """Returns the row of Table 4."""
    return next(row for row in TABLE_4 if (row.model, row.config) == (model, config))


# ---- tables 4 and 6


def run_row(row: PaperRow) -> Record:
    """Returns a row of Table 4 or 6: each plan at its best number of micro-batches and schedule, in one simulation.

    In Table 6, which figure 12 draws, times are in proportion below the profiled batch, too.
    """
    model, cluster = MODELS[row.model], CONFIGS[row.config]
    profile = model.profile()
    if row.table == 6:
        profile = in_proportion(profile)
    theirs = paper_partitions(row, profile)
    dreams = pipedream_partitions(row, profile)
    counts = micro_batch_counts(profile, row.batch, [*theirs, *dreams])
    ours = make_plan(profile, cluster, row.batch, counts)
    fewer = make_plan(profile, cluster, row.batch, [count for count in counts if count <= _FEW_MICRO_BATCHES])
    paper = best(theirs, profile, cluster, row.batch, counts)
    assert paper is not None, row
    balanced = [straight(profile, stages) for stages in _GPIPE_STAGES if stages <= cluster.num_devices]
    read_as = [
        partition
        for partition in theirs
        if tuple(profile.layers[cut].name for cut in partition.cuts) == paper.plan.cuts
    ]
    own_dream = None
    if row.table == 6:
        partition = pipedream(profile, cluster)
        own_dream = {
            "replicas": ":".join(map(str, partition.replicas)),
            "published": ":".join(map(str, dreams[0].replicas)),
        }
    return {
        "single ms": 1e3 * plan_reasons.single_device_seconds(profile, row.batch),
        "ours": record(ours),
        "ours from fewer ms": 1e3 * fewer.seconds,
        "paper": record(paper),
        "data parallelism": record(data_parallel(profile, cluster, row.batch, counts, idle=True)),
        "overlap": record(data_parallel(profile, cluster, row.batch, counts)),
        "no overlap": record(data_parallel(profile, cluster, row.batch, counts, overlap=False)),
        "gpipe": record(best(balanced, profile, cluster, row.batch, counts, schedules=("gpipe",))),
        "pipedream": record(best(dreams, profile, cluster, row.batch, counts)),
        "pipedream, first reading": record(best(dreams[:1], profile, cluster, row.batch, counts)),
        "pipedream's planner": own_dream,
        "everything": record(make_plan(profile, cluster, row.batch, counts, everything=True)),
        "choice": _choice(ours, paper, theirs),
        "ACR": None if row.acr is None else communication_ratio(read_as[0], profile, cluster),
        **_other_readings(row, [partition for partition in theirs if partition != read_as[0]], theirs[0], cluster),
    }


def in_proportion(profile: Profile) -> Profile:
    """Returns a profile whose times are in proportion to the samples below its smallest batch, too."""
    return dataclasses.replace(profile, batch_sizes=tuple(sorted({1, *profile.batch_sizes})))


def _other_readings(row: PaperRow, others: Sequence[Partition], literal: Partition, cluster: Cluster) -> Record:
    """Returns the ACR of the paper's plan if its text is read otherwise, of which one reading is the literal one."""
    if row.acr is None or not others:
        return {}
    profile = MODELS[row.model].profile()
    return {
        "ACR otherwise": {
            f"cut at {','.join(map(str, other.cuts))}{_LITERAL if other == literal else ''}": communication_ratio(
                other, profile, cluster
            )
            for other in others
        }
    }


def _choice(ours: Outcome, paper: Outcome, theirs: Iterable[Partition]) -> str:
    """Returns how our planner's choice compares with the paper's plan; its first reading is the literal one."""
    profile = ours.simulation.costs.profile
    literal, *others = (tuple(profile.layers[cut].name for cut in partition.cuts) for partition in theirs)
    if ours.plan.replicas != paper.plan.replicas:
        return "other"
    if ours.plan.cuts == literal:
        return SAME_CUTS
    return SAME_CUTS_OTHERWISE if ours.plan.cuts in others else "same replicas"


def run_opponents(row: PaperRow) -> Record:
    """Returns our plan with everything in a row of Table 4, and the best of others that may have everything, too."""
    profile, cluster = MODELS[row.model].profile(), CONFIGS[row.config]
    theirs = paper_partitions(row, profile)
    counts = micro_batch_counts(profile, row.batch, theirs)
    case = Case(row.key, profile, cluster, row.batch, counts, ())
    ours = make_plan(profile, cluster, row.batch, counts, everything=True)
    dreams = [
        partition
        for other in TABLE_6
        if (other.model, other.config) == (row.model, row.config)
        for partition in pipedream_partitions(other, profile)
    ]
    others = {who: record(outcome) for who, outcome in strongest(case, theirs, dreams, ours.seconds).items()}
    return {"ours": record(ours), **others}


# ---- figure 11


def run_flat(model: str) -> Record:
    """Returns plans in config A with one ring through all devices rather than one in each server first."""
    return _hybrid(row_of(model, "A"), MODELS[model].profile(), "flat")


def run_small_batch(model: str, config: str) -> Record:
    """Returns plans at GBS = 128, as section 6.3 has it, with times in proportion also below the profiled batch."""
    profile = MODELS[model].profile()
    row = dataclasses.replace(row_of(model, config), batch=128)
    return _hybrid(row, in_proportion(profile))


def _hybrid(row: PaperRow, profile: Profile, all_reduce: str | None = None) -> Record:
    cluster = CONFIGS[row.config]
    theirs = paper_partitions(row, profile)
    counts = micro_batch_counts(profile, row.batch, theirs)
    ours = make_plan(profile, cluster, row.batch, counts, all_reduce=all_reduce)
    return {
        "ours": record(ours),
        "paper": record(best(theirs, profile, cluster, row.batch, counts, all_reduce=all_reduce)),
        "data parallelism": record(
            data_parallel(profile, cluster, row.batch, counts, all_reduce=all_reduce, idle=True)
        ),
        "overlap": record(data_parallel(profile, cluster, row.batch, counts, all_reduce=all_reduce)),
    }


# ---- figures 12 and 14


def run_larger(row: PaperRow) -> Record:
    """Returns a model of Table 6 on 4 servers of 8 devices, with times in proportion below the profiled batch."""
    cluster = hardware(4, 8, 25)
    profile = in_proportion(MODELS[row.model].profile())
    dreams = [pipedream(profile, cluster, flat=flat) for flat in (True, False)]
    counts = micro_batch_counts(profile, row.batch, dreams)
    return {
        "ours": record(make_plan(profile, cluster, row.batch, counts)),
        "data parallelism": record(data_parallel(profile, cluster, row.batch, counts, idle=True)),
        "overlap": record(data_parallel(profile, cluster, row.batch, counts)),
        "pipedream": record(best(dreams, profile, cluster, row.batch, counts)),
    }


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """Returns the first devices of a cluster."""
    return dataclasses.replace(cluster, devices=cluster.devices[:count])


def run_scaling(model: str) -> Record:
    """Returns strong scaling on the first 2 to 16 devices of config A, and ten as if they were in one server."""
    profile, batch = MODELS[model].profile(), FIGURE_14_BATCHES[model]
    counts = micro_batch_counts(profile, batch)

    def columns(cluster: Cluster) -> Record:
        try:
            ours = record(make_plan(profile, cluster, batch, counts))
        except PlanError:
            ours = None  # too large for so few devices
        return {
            "ours": ours,
            "data parallelism": record(data_parallel(profile, cluster, batch, counts, idle=True)),
            "overlap": record(data_parallel(profile, cluster, batch, counts)),
            "no overlap": record(data_parallel(profile, cluster, batch, counts, overlap=False)),
        }

    ten = first_devices(CONFIGS["A"], 10)
    one_server = dataclasses.replace(ten, devices=tuple(dataclasses.replace(d, server=0) for d in ten.devices))
    return {
        "single ms": 1e3 * plan_reasons.single_device_seconds(profile, batch),
        "devices": {str(devices): columns(first_devices(CONFIGS["A"], devices)) for devices in FIGURE_14_DEVICES},
        "ten in one server": columns(one_server),
    }


# ---- table 3


def run_policies(model: str) -> Record:
    """Returns a column of Table 3: the paper's plan in config A under P_A and P_B, for each M where both fit.

    For VGG-19, which Table 4 has in data parallelism, it is Table 6's pipeline. Where slices may be smaller than any
    that was profiled, also with times in proportion to their samples.
    """
    rows = TABLE_6 if model == "vgg-19" else TABLE_4
    row = next(row for row in rows if row.model == model and row.config == "A")
    profile = MODELS[model].profile()
    smaller = in_proportion(profile)
    return {
        "plan": row.plan,
        "profiled": profile.least_samples,
        "steps": _policy_steps(row, profile),
        "in proportion": None if profile.least_samples == 1 else _policy_steps(row, smaller),
    }


def _policy_steps(row: PaperRow, profile: Profile) -> Record:
    cluster, theirs = CONFIGS[row.config], paper_partitions(row, profile)
    steps: Record = {}
    for count in micro_batch_counts(profile, row.batch, theirs):
        outcomes = [
            best(
                *(theirs, profile, cluster, row.batch, [count]),
                schedules=[policy],
                recompute=("none",),
                short_last=False,
            )
            for policy in ("dapple_a", "dapple_b")
        ]
        if all(outcome is not None and outcome.fits for outcome in outcomes):
            steps[str(count)] = {
                key: value
                for name, outcome in zip(("P_A", "P_B"), outcomes, strict=True)
                if outcome is not None
                for key, value in (
                    (f"{name} ms", 1e3 * outcome.seconds),
                    (f"{name} warm-up", ":".join(map(str, outcome.simulation.costs.warm_up))),
                )
            }
            steps[str(count)]["slice"] = row.batch / count / max(max(partition.replicas) for partition in theirs)
    return steps


# ---- tables 5 and 7


def run_table_5() -> Record:
    """BERT-48 as two equal stages on two devices of config B, 2 samples per micro-batch, with the memory of Table 5."""
    profile, cluster = measured_bert(), hardware(2, 1, 25)
    lines: Record = {}
    for line in TABLE_5:
        plan = Plan.straight(
            ["layer_23"], 2 * line.micro_batches, line.micro_batches, line.schedule, recompute=line.recompute
        )
        try:
            run = simulate(plan, profile, cluster)
        except PlanError:
            lines[line.key] = {"samples/s": "OOM", "GB": "OOM"}
            continue
        peaks = run.peak_bytes.values()
        lines[line.key] = {"samples/s": run.throughput, "GB": sum(peaks) / len(peaks) / 1e9}
    return lines


def run_table_7(line: LargeBert) -> Record:
    """Returns the largest BERT on these V100s of one server, with recomputation and one sample per micro-batch.

    Its layers with two and three samples, too, since the paper doesn't say how many it has.
    """
    costs = largest_bert(line.devices, 1)
    run = simulate(costs.plan, costs.profile, costs.cluster)
    busy = sum(span.end - span.start for span in run.spans if span.kind in ("F", "B"))
    layers = {samples: encoder_layers(largest_bert(line.devices, samples)) for samples in (1, 2, 3)}
    return {
        "layers": layers[1],
        "layers by samples": {str(samples): count for samples, count in layers.items()},
        "billion parameters": costs.profile.parameter_bytes / 4e9,
        "utilization": busy / line.devices / run.latency,
    }


def encoder_layers(costs: CostModel) -> int:
    """Returns the number of BERT's encoder layers."""
    return sum(layer.name.startswith("layer_") for layer in costs.profile.layers)


def largest_bert(devices: int, samples: int, replicas: int = 1, *, optimizer_shards: bool = False) -> CostModel:
    """Returns the costs of the largest BERT with so many samples in a replica's micro-batch, with recomputation.

    Args:
        devices: V100s of one server.
        samples: samples of a replica's micro-batch.
        replicas: replicas of each stage, a divisor of ``devices``.
        optimizer_shards: whether they keep a shard of the optimizer's slots each.
    """
    cluster = hardware(1, devices, 25)
    stages = devices // replicas
    groups = [list(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages)]

    def costs_of(layers: int) -> CostModel | None:
        """Costs of a pipeline whose stages have as many layers each, the first fewer for the embeddings' sake."""
        profile = deep_bert(layers)
        first = layer_index(profile, "layer_0")
        for fewer in range(4):
            each, rest = divmod(layers + fewer, stages)
            sizes = [each + (stage >= stages - rest) for stage in range(stages)]
            sizes[0] -= fewer
            ends = list(itertools.accumulate(sizes))
            cuts = [profile.layers[first + end - 1].name for end in ends[:-1]]
            count = _PER_STAGE * stages
            plan = Plan.manual(
                cuts, groups, count, samples * replicas * count, "dapple_a", recompute="boundary",
                optimizer_shards=optimizer_shards,
            )  # fmt: skip
            costs = CostModel(plan, profile, cluster)
            try:
                if costs.warm_up == plan.warm_up_counts():
                    return costs
            except PlanError:
                continue
        return None

    low, high = stages, 100 * devices
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs_of(middle) is not None else (low, middle)
    costs = costs_of(low)
    assert costs is not None
    return costs
