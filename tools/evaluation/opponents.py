"""The default plan against the plans of others, all in one simulation.

    python -m tools.evaluation.opponents
    python -m tools.evaluation.opponents --cases=gpt --devices=16,32 --json=opponents.json

The others are: the plans of DAPPLE's paper, which its authors' planner HPGO found; PipeDream's, those of the paper's
Table 6 and those that its algorithm finds (SOSP'19, section 3.1); and the layouts that experts write for Megatron
(SC'21): a straight pipeline of equal blocks times data-parallel replicas, consecutive or strided, with one or several
stages on each device. Each is tried with all counts of micro-batches, with and without recomputation, and with its last
backwards cut where that gains. The models are those of Table 4 on its three clusters, and GPTs on servers of 8 V100s.
"""

from __future__ import annotations

import itertools
import json
import logging
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

import dapple_tf as dapple
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.planning.early_reductions import cut_trials
from dapple_tf.planning.stage_cuts import by_time
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import tried
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, numbers
from dapple_tf.tools.evaluation.bench_scale import cluster_of
from dapple_tf.tools.evaluation.paper_models import (
    CONFIGS,
    MODELS,
    TABLE_4,
    TABLE_6,
    Partition,
    paper_partitions,
    pipedream_partitions,
    straight,
)
from dapple_tf.tools.evaluation.paper_outcomes import micro_batch_counts, shape
from dapple_tf.tools.evaluation.pipedream import pipedream

FLAGS = flags.FlagValues()

_CASES = flags.DEFINE_list("cases", ["table4", "gpt"], "table4, gpt or both.", flag_values=FLAGS)
_DEVICES = flags.DEFINE_list("devices", ["16", "32", "64"], "Numbers of devices for GPTs.", flag_values=FLAGS)
_LAYERS = flags.DEFINE_list("layers", ["24", "48", "96"], "Blocks of GPTs.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the rows to.", flag_values=FLAGS)

_SHOWN = 1.25
"""Opponents that take longer than our plan by this factor aren't simulated to the end."""
_PER_DEVICE = (1, 2, 3, 4, 6, 8)
"""Stages on each device in Megatron's layouts."""
_FLOPS = 60e12
"""Operations per second of a V100 in a transformer's matrix products, in half precision."""


class Case(NamedTuple):
    """A model on a cluster.

    Attributes:
        name: its name.
        profile: its layers.
        cluster: the devices.
        batch: samples of a step.
        counts: numbers of micro-batches.
        partitions: (whose, stages) of plans in the literature.
    """

    name: str
    profile: Profile
    cluster: Cluster
    batch: int
    counts: tuple[int, ...]
    partitions: tuple[tuple[str, Partition], ...]


def gpt(blocks: int, hidden: int = 1536, length: int = 1024, words: int = 50257) -> Profile:
    """Returns a GPT with an embedding and a head that share no weights, in half precision, by its operations.

    Args:
        blocks: number of transformer blocks.
        hidden: width of the model.
        length: tokens of a sample.
        words: size of the vocabulary.
    """
    block = 24 * length * hidden**2 + 4 * length**2 * hidden
    sent = 2.0 * length * hidden

    def layer(name: str, operations: float, parameters: float, residuals: float) -> LayerProfile:
        seconds = operations / _FLOPS
        return LayerProfile(
            name,
            Cost(2e-5, seconds),
            Cost(4e-5, 2 * seconds),
            Cost(2e-5, seconds),
            residual_bytes=Cost(0.0, residuals),
            output_bytes=Cost(0.0, sent),
            parameter_bytes=int(2 * parameters),
            slot_bytes=int(12 * parameters),
            apply_seconds=parameters * 16 / 700e9,
        )

    layers = (
        layer("embedding", 2.0 * length * hidden, (words + length) * hidden, sent),
        *(layer(f"block_{index}", block, 12 * hidden**2, 17 * sent) for index in range(blocks)),
        layer("head", 2.0 * length * hidden * words, words * hidden, 2.0 * length * words + sent),
    )
    tensors = tuple(Tensor(index, (index + 1,), Cost(0.0, sent)) for index in range(blocks + 1))
    return Profile(f"gpt-{blocks}", "V100", (1, 2), layers, tensors)


def paper_cases() -> Iterator[Case]:
    """Yields the rows of Table 4, with the plans of Tables 4 and 6."""
    for row in TABLE_4:
        profile, cluster = MODELS[row.model].profile(), CONFIGS[row.config]
        partitions = [("DAPPLE", partition) for partition in paper_partitions(row, profile)]
        for other in TABLE_6:
            if (other.model, other.config) == (row.model, row.config):
                partitions += [("DAPPLE", partition) for partition in paper_partitions(other, profile)]
                partitions += [("PipeDream", partition) for partition in pipedream_partitions(other, profile)]
        partitions.append(("GPipe", straight(profile, cluster.num_devices)))
        counts = micro_batch_counts(profile, row.batch, [partition for _, partition in partitions])
        yield Case(f"{row.model}/{row.config}", profile, cluster, row.batch, counts, tuple(partitions))


def gpt_cases(devices: Sequence[int], layers: Sequence[int]) -> Iterator[Case]:
    """Yields GPTs on servers of 8 devices, with 4 and 16 samples for each device."""
    for count, blocks, each in itertools.product(devices, layers, (4, 16)):
        profile, batch = gpt(blocks), each * count
        counts = micro_batch_counts(profile, batch)
        yield Case(f"gpt-{blocks}, batch {batch}, {count} devices", profile, cluster_of(count), batch, counts, ())


def literature(case: Case) -> Iterator[tuple[str, Plan]]:
    """Yields (whose, plan) of the papers' stages under DAPPLE's policies."""
    partitions = [*case.partitions, ("data parallelism", Partition((), (case.cluster.num_devices,)))]
    if len(case.profile.layers) <= 200 and case.cluster.num_devices <= 16:
        partitions.append(("PipeDream", pipedream(case.profile, case.cluster)))
    for who, partition in partitions:
        cuts = [case.profile.layers[cut].name for cut in partition.cuts]
        for count, policy, mode in itertools.product(
            case.counts, ("dapple_a", "dapple_b", "gpipe") if cuts else ("dapple_a",), ("none", "boundary")
        ):
            try:
                yield who, Plan.manual(cuts, partition.devices, count, case.batch, policy, recompute=mode)
            except PlanError:
                continue  # fewer samples than replicas


def experts(case: Case) -> Iterator[tuple[str, Plan]]:
    """Yields Megatron's layouts."""
    devices, layers = case.cluster.num_devices, len(case.profile.layers)
    for stages in (count for count in range(2, devices + 1) if devices % count == 0):
        replicas = devices // stages
        consecutive = [tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages)]
        strided = [tuple(range(stage, devices, stages)) for stage in range(stages)]
        for each, places in itertools.product(_PER_DEVICE, (consecutive, strided)[: 2 if replicas > 1 else 1]):
            if stages * each > layers:
                continue
            cuts = by_time(case.profile, stages * each)
            policies = ("interleaved",) if each > 1 else ("dapple_a", "dapple_b", "gpipe")
            for count, policy, mode in itertools.product(case.counts, policies, ("none", "boundary")):
                try:
                    yield "Megatron", Plan.manual(cuts, places * each, count, case.batch, policy, recompute=mode)
                except PlanError:
                    continue  # fewer samples than replicas, or micro-batches that don't fill the rounds


def seconds(plan: Plan, case: Case, limit: float) -> float | None:
    """Returns the seconds of a plan's step with its backwards cut as it is best; None above the limit or the memory."""
    try:
        costs = CostModel(plan, case.profile, case.cluster)
        trial = tried(costs, limit)
        if trial.simulation is None or not trial.simulation.fits:
            return None
        times = [other.simulation.latency for other in cut_trials(costs, trial) if other.simulation is not None]
    except (PlanError, ScheduleError):
        return None
    return min([trial.simulation.latency, *times])


def compared(case: Case) -> dict[str, Any]:
    """Returns our plan's time, and each opponent's fastest plan that is not much slower."""
    began = time.process_time()
    best = dapple.plan(case.profile, case.cluster, case.batch, micro_batches=case.counts)
    planning = time.process_time() - began
    assert best.report is not None
    ours = best.report.latency
    theirs: dict[str, tuple[float, str]] = {}
    for who, plan in itertools.chain(literature(case), experts(case)):
        limit = theirs[who][0] if who in theirs else ours * _SHOWN
        time_of = seconds(plan, case, limit)
        if time_of is not None and time_of < limit:
            theirs[who] = (time_of, f"{shape(plan)}, M {plan.micro_batches}, {plan.schedule}")
    return {
        "case": case.name,
        "planner_s": planning,
        "ours_ms": ours * 1e3,
        "ours": f"{shape(best)}, M {best.micro_batches}, {best.schedule}",
        "others": {who: {"ms": least * 1e3, "plan": text} for who, (least, text) in theirs.items()},
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table: our plans, and the fastest of the others."""
    cells: list[tuple[object, ...]] = [("case", "our plan", "ms", "next", "its plan", "ms", "ratio")]
    for row in rows:
        others = row["others"]
        who = min(others, key=lambda name: others[name]["ms"], default=None)
        start = (row["case"], row["ours"], f"{row['ours_ms']:.1f}")
        if who is None:
            cells.append((*start, f"none within {_SHOWN:g}", "", "", ""))
        else:
            other = others[who]
            ratio = other["ms"] / row["ours_ms"]
            cells.append((*start, who, other["plan"], f"{other['ms']:.1f}", f"{ratio:.3f}"))
    return markdown(cells)


def main() -> None:
    """Compares what the flags say, and prints the table."""
    check_output(_JSON.value)
    for name in _CASES.value:
        command.check(name in ("table4", "gpt"), f"--cases={name}: unknown; use table4, gpt or both")
    logging.getLogger("dapple_tf").setLevel(logging.ERROR)
    cases: list[Case] = []
    cases += paper_cases() if "table4" in _CASES.value else ()
    if "gpt" in _CASES.value:
        cases += gpt_cases(numbers("devices", _DEVICES.value), numbers("layers", _LAYERS.value))
    rows = []
    for case in cases:
        rows.append(compared(case))
        command.say(f"{case.name}: {rows[-1]['ours_ms']:.1f} ms")
        sys.stderr.flush()
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
