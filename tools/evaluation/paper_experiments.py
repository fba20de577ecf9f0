"""The experiments of DAPPLE's evaluation (PPoPP'21, section 6) on its own profiles, each of which gives a record."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.search import coarsened, pipeline_latency, stage_times
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tools.evaluation import paper_models as models
from dapple_tf.tools.evaluation.opponents import Case, strongest
from dapple_tf.tools.evaluation.paper_models import CONFIGS, MODELS, TABLE_4, TABLE_5, TABLE_6, PaperRow, Partition
from dapple_tf.tools.evaluation.paper_plans import Outcome, best, data_parallel, make_plan, micro_batch_counts, record
from dapple_tf.tools.evaluation.pipedream import Cost, pipedream, states
from dapple_tf.tools.evaluation.results import Record

_PER_STAGE = 6
"""Micro-batches per stage in Table 7, which the paper omits: the least with which its utilizations come out."""
_FEW_MICRO_BATCHES = 16
"""Most micro-batches of a second search: ours is bounded, and finds some plans only if it has fewer to choose from."""
_SMALL_BATCH = 128
"""GBS of figure 11."""
_CUTS, _TRIED = 30, 14
"""Places where two-stage plans are cut, and how many plans are simulated, the best by formula 2."""


# ---- tables 4 and 6


def run_row(row: PaperRow) -> Record:
    """Returns a row of Table 4 or 6: each plan at its best number of micro-batches and schedule, in one simulation.

    In Table 6, which figure 12 draws, times are in proportion below the profiled batch, too.
    """
    cluster, profile = CONFIGS[row.config], _profile(row)
    counts = _counts(row, profile)
    ours = make_plan(profile, cluster, row.batch, counts)
    fewer = make_plan(profile, cluster, row.batch, [count for count in counts if count <= _FEW_MICRO_BATCHES])
    paper, others = _others(row, cluster)
    first = models.pipedream_partitions(row, profile)[:1]
    return {
        "ours": record(ours),
        "ours from fewer ms": 1e3 * fewer.seconds,
        "choice": _choice(ours, paper, row),
        **others,
        "pipedream, first reading": record(best(first, profile, cluster, row.batch, counts)),
    }


def run_links(row: PaperRow) -> Record:
    """Returns the plans of others in a row of Table 4 or 6 with the links of the paper's released planner."""
    return _others(row, models.released_links(CONFIGS[row.config]))[1]


def _others(row: PaperRow, cluster: Cluster) -> tuple[Outcome, Record]:
    """Returns the paper's plan; and the record of it, of data parallelism and of PipeDream's."""
    profile = _profile(row)
    counts, dreams = _counts(row, profile), models.pipedream_partitions(row, profile)
    theirs = models.paper_partitions(row, profile)
    paper = best(theirs, profile, cluster, row.batch, counts)
    assert paper is not None, row
    return paper, {
        "paper": record(paper),
        "overlap": record(data_parallel(profile, cluster, row.batch, counts)),
        "pipedream": record(best(dreams, profile, cluster, row.batch, counts)),
        "ACR": _ratio(row, paper, theirs, cluster),
    }


def _profile(row: PaperRow) -> Profile:
    profile = MODELS[row.model].profile()
    return in_proportion(profile) if row.table == 6 else profile


def _counts(row: PaperRow, profile: Profile) -> tuple[int, ...]:
    partitions = [*models.paper_partitions(row, profile), *models.pipedream_partitions(row, profile)]
    return micro_batch_counts(profile, row.batch, partitions)


def _ratio(row: PaperRow, paper: Outcome, theirs: Iterable[Partition], cluster: Cluster) -> float | None:
    """Returns the ACR of the paper's plan in its fastest reading; None where the paper has none."""
    profile = MODELS[row.model].profile()
    of_cuts = {tuple(profile.layers[cut].name for cut in partition.cuts): partition for partition in theirs}
    return None if row.acr is None else communication_ratio(of_cuts[paper.plan.cuts], profile, cluster)


def run_released(row: PaperRow) -> Record:
    """Returns the best plan of the space that the paper's released planner (HPGO) searches, beside the paper's plan.

    It proposes data parallelism, two stages or a straight pipeline only. Of two stages all cuts in 30 places and all
    numbers of replicas are ranked by formula 2; the best are simulated as the paper's own plan is.
    """
    profile, cluster = _profile(row), CONFIGS[row.config]
    devices, theirs = cluster.num_devices, models.paper_partitions(row, profile)
    counts = micro_batch_counts(profile, row.batch, theirs)
    ranked = sorted(_two_stages(profile, cluster, row.batch, counts), key=lambda entry: entry[0])
    kept = list(dict.fromkeys(partition for _, partition in ranked))[:_TRIED]
    pipelines = [models.lstm_per_device(profile)] if row.model == "gnmt-16" else []
    partitions = [*theirs, Partition((), (devices,)), models.straight(profile, devices), *pipelines, *kept]
    ours = best(dict.fromkeys(partitions), profile, cluster, row.batch, counts)
    paper = best(theirs, profile, cluster, row.batch, counts)
    assert ours is not None and paper is not None, row
    return {"ours": record(ours), "paper ms": 1e3 * paper.seconds, "choice": _choice(ours, paper, row)}


def _two_stages(
    profile: Profile, cluster: Cluster, batch: int, counts: tuple[int, ...]
) -> Iterator[tuple[float, Partition]]:
    """Yields the seconds of two-stage plans by formula 2, at each number of micro-batches that fits."""
    devices = cluster.num_devices
    for end, first in itertools.product(coarsened(profile, _CUTS)[:-1], range(1, devices)):
        partition = Partition((end - 1,), (first, devices - first))
        for count in counts:
            plan = partition.plan(profile, count, batch, "dapple_a")
            if plan is not None:
                yield pipeline_latency(stage_times(CostModel(plan, profile, cluster)), count).latency, partition


def in_proportion(profile: Profile) -> Profile:
    """Returns a profile whose times are in proportion to the samples below its smallest batch, too."""
    return dataclasses.replace(profile, batch_sizes=tuple(sorted({1, *profile.batch_sizes})))


def _choice(ours: Outcome, paper: Outcome, row: PaperRow) -> str:
    """Returns how our planner's choice compares with the paper's plan, whose first reading is the literal one."""
    profile = ours.simulation.costs.profile
    readings = [
        tuple(profile.layers[cut].name for cut in partition.cuts) for partition in models.paper_partitions(row, profile)
    ]
    if ours.plan.replicas != paper.plan.replicas:
        return "other"
    if ours.plan.cuts == readings[0]:
        return models.SAME_CUTS
    return models.SAME_CUTS_OTHERWISE if ours.plan.cuts in readings else "same replicas"


def communication_ratio(partition: Partition, profile: Profile, cluster: Cluster) -> float:
    """Returns the ACR of section 6.2: seconds of a micro-batch's transfers / a stage's.

    Both are averages, over cuts and over stages. A replica has at least the profile's batch. Between replicas each
    network card carries its own slices only, also in config A, as the paper's equal ratios for A and B say.

    Args:
        partition: the paper's plan.
        profile: the layers.
        cluster: devices and links.
    """
    each = profile.batch_sizes[-1]
    samples = each * max(partition.replicas)
    bounds = [0, *(cut + 1 for cut in partition.cuts), len(profile.layers)]
    stages = [
        sum(
            layer.forward.at(samples / count) + layer.backward.at(samples / count)
            for layer in profile.layers[start:stop]
        )
        for (start, stop), count in zip(itertools.pairwise(bounds), partition.replicas, strict=True)
    ]
    transfers = [
        sum(cost.at(samples / min(pair)) for cost in profile.crossing[cut]) / (cluster.inter_bandwidth or float("inf"))
        for cut, pair in zip(partition.cuts, itertools.pairwise(partition.replicas), strict=True)
    ]
    return (sum(transfers) / len(transfers)) / (sum(stages) / len(stages))


def run_opponents(row: PaperRow) -> Record:
    """Returns our plan with everything in a row of Table 4, and the best of others that may have everything, too."""
    profile, cluster = MODELS[row.model].profile(), CONFIGS[row.config]
    theirs = models.paper_partitions(row, profile)
    counts = micro_batch_counts(profile, row.batch, theirs)
    ours = make_plan(profile, cluster, row.batch, counts, everything=True)
    dreams = [
        partition
        for other in TABLE_6
        if (other.model, other.config) == (row.model, row.config)
        for partition in models.pipedream_partitions(other, profile)
    ]
    case = Case(profile, cluster, row.batch, counts)
    others = {who: record(outcome) for who, outcome in strongest(case, theirs, dreams, ours.seconds).items()}
    return {"ours": record(ours), **others}


def run_pipedream() -> Record:
    """Returns the plans of PipeDream's planner for Table 6: stages' ends as it prints them, and replicas.

    By its released cost with a level for each server, at line rates and with NVLink's 25 GB/s of one link; and by the
    formula of its paper with one level of 25 Gbit/s.
    """
    plans: Record = {}
    for row in TABLE_6:
        profile, cluster = MODELS[row.model].profile(), CONFIGS[row.config]
        ends = states(profile)
        one_link = dataclasses.replace(cluster, intra_bandwidth=25e9)
        for name, links in (("130 GB/s", cluster), ("25 GB/s", one_link)):
            for transfers in (False, True):
                found = pipedream(profile, links, flat=False, cost=Cost(released=True, transfers=transfers))
                numbers = ",".join(str(ends.index(cut + 1) + 1) for cut in found.cuts)
                key = f"{row.model}, {name}{', transfers' if transfers else ''}"
                plans[key] = {"ends": numbers, "replicas": ":".join(map(str, found.replicas))}
        flat = pipedream(profile, cluster)
        plans[f"{row.model}, formula"] = {"replicas": ":".join(map(str, flat.replicas))}
    return plans


# ---- figures 11 and 14


def run_small_batch(row: PaperRow) -> Record:
    """Returns plans at GBS = 128, as section 6.3 has it, with times in proportion also below the profiled batch."""
    profile, cluster = in_proportion(MODELS[row.model].profile()), CONFIGS[row.config]
    theirs = models.paper_partitions(row, profile)
    counts = micro_batch_counts(profile, _SMALL_BATCH, theirs)
    paper = record(best(theirs, profile, cluster, _SMALL_BATCH, counts))
    return {**_columns(profile, cluster, _SMALL_BATCH, counts), "paper": paper}


def run_scaling(model: str) -> Record:
    """Returns strong scaling on the first 8 and 10 devices of config A, and on ten as if they were in one server."""
    profile, batch = MODELS[model].profile(), models.FIGURE_14[model]
    counts = micro_batch_counts(profile, batch)
    eight, ten = (dataclasses.replace(CONFIGS["A"], devices=CONFIGS["A"].devices[:count]) for count in (8, 10))
    one_server = dataclasses.replace(ten, devices=tuple(dataclasses.replace(d, server=0) for d in ten.devices))
    clusters = {"8": eight, "10": ten, "ten in one server": one_server}
    return {name: _columns(profile, cluster, batch, counts) for name, cluster in clusters.items()}


def _columns(profile: Profile, cluster: Cluster, batch: int, counts: tuple[int, ...]) -> Record:
    return {
        "ours": record(make_plan(profile, cluster, batch, counts)),
        "data parallelism": record(data_parallel(profile, cluster, batch, counts, idle=True)),
        "overlap": record(data_parallel(profile, cluster, batch, counts)),
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
        "steps": _policy_steps(row, profile),
        "in proportion": None if profile.least_samples == 1 else _policy_steps(row, smaller),
    }


def _policy_steps(row: PaperRow, profile: Profile) -> Record:
    cluster, theirs = CONFIGS[row.config], models.paper_partitions(row, profile)
    steps: Record = {}
    for count in micro_batch_counts(profile, row.batch, theirs):
        step: Record = {}
        for name, policy in (("P_A", "dapple_a"), ("P_B", "dapple_b")):
            run = best(
                *(theirs, profile, cluster, row.batch, [count]),
                schedules=[policy],
                recompute=("none",),
                short_last=False,
            )
            if run is not None and run.fits:
                step[f"{name} ms"] = 1e3 * run.seconds
                step[f"{name} warm-up"] = ":".join(map(str, run.simulation.costs.warm_up))
        if len(step) == 4:
            steps[str(count)] = step
    return steps


# ---- tables 5 and 7


def run_table_5() -> Record:
    """BERT-48 as two equal stages on two devices of config B, 2 samples per micro-batch, with the memory of Table 5."""
    profile, cluster = models.measured_bert(), models.hardware(2, 1, 25)
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


def run_table_7(devices: int) -> Record:
    """Returns the layers of the largest BERT on these V100s of one server, recomputed, one sample per micro-batch."""
    count, cluster = _PER_STAGE * devices, models.hardware(1, devices, 25)

    def fits(layers: int) -> bool:
        """Tells if a pipeline fits whose stages have as many layers each, the first fewer for the embeddings' sake."""
        profile = models.deep_bert(layers)
        first = models.layer_index(profile, "layer_0")
        for fewer in range(4):
            each, rest = divmod(layers + fewer, devices)
            sizes = [each + (stage >= devices - rest) for stage in range(devices)]
            sizes[0] -= fewer
            cuts = [profile.layers[first + end - 1].name for end in list(itertools.accumulate(sizes))[:-1]]
            plan = Plan.straight(cuts, count, count, "dapple_a", recompute="boundary")
            with contextlib.suppress(PlanError):
                if CostModel(plan, profile, cluster).warm_up == plan.warm_up_counts():
                    return True
        return False

    known = range(devices, 100 * devices)
    return {"layers": devices - 1 + bisect.bisect_left(known, True, key=lambda layers: not fits(layers))}
