"""A plan as text: its settings, a row for each stage, and what else it decides."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dapple_tf.common.text_table import ranges
from dapple_tf.common.units import gib
from graph_passes.ir.batching import Interval, split_evenly

if TYPE_CHECKING:
    from dapple_tf.describe.plan import Plan


def header(plan: Plan) -> str:
    """Returns the plan's settings in a line."""
    sizes = Counter(split_evenly(plan.global_batch_size, plan.micro_batches))
    batches = " + ".join(f"{count} x {size}" for size, count in sizes.items())
    return (
        f"Plan: global batch {plan.global_batch_size}, {plan.micro_batches} "
        f"micro-batch{'es' if plan.micro_batches > 1 else ''} ({batches} samples), schedule {plan.schedule}, "
        f"recompute {recompute_text(plan)}, jit {'on' if plan.compiled else 'off'}"
        f"{', operators placed one by one' if plan.places_operators else ''}"
    )


def recompute_text(plan: Plan) -> str:
    """Returns what backwards recompute: ``boundary``, or ``boundary (stages 0-2), none (stage 3)``."""
    stages: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        stages.setdefault(stage.recompute, []).append(number)
    if len(stages) == 1:
        return plan.stages[0].recompute
    return ", ".join(f"{mode} (stage{'s' * (len(own) > 1)} {ranges(own)})" for mode, own in stages.items())


def rows(plan: Plan) -> list[list[str]]:
    """Returns a header and a row for each stage."""
    sizes = Counter(split_evenly(plan.global_batch_size, plan.micro_batches))
    titles = ["stage", "up to layer", "devices", "replicas", "slice sizes", "warm-up K"]
    report = plan.report
    lines = [titles if report is None else [*titles, "layers", "share of time", "bubble", "memory"]]
    for stage, (devices, warm_up) in enumerate(zip(plan.devices, plan.warm_up_counts(), strict=True)):
        layer = plan.cuts[stage] if stage < len(plan.cuts) else "(last)"
        slices = " | ".join(_runs(tuple(part.size for part in plan.slices(stage, Interval(0, size)))) for size in sizes)
        groups = plan.groups[stage] if plan.places_operators else [devices]
        row = [str(stage), layer, " | ".join(map(ranges, groups)), str(len(devices)), slices, str(warm_up)]
        if report is not None:
            reported = report.stages[stage]
            memory = gib(reported.memory_bytes)
            if reported.memory_limit is not None:
                memory += f" of {gib(reported.memory_limit)}"
            row[5] = str(reported.warm_up)
            row += [str(reported.layers), f"{reported.share:.1%}", f"{reported.bubble:.1%}", memory]
        lines.append(row)
    return lines


def remarks(plan: Plan) -> list[str]:
    """Returns lines about what the rows don't have, and the report."""
    cut = [f"last backwards in pieces, cut after {', '.join(plan.backward_cuts)}"] if plan.backward_cuts else []
    algorithms = [stage.all_reduce for stage in plan.stages]
    if set(algorithms) != {"flat"}:
        cut.append(f"all-reduce {', '.join(algorithms if len(set(algorithms)) > 1 else algorithms[:1])}")
    cut += ["replicas update shards of their parameters"] if "optimizer" in plan.shards else []
    cut += ["replicas keep and update shards of the rows of embeddings"] if "rows" in plan.shards else []
    cut += [f"stages {ranges(plan.relays)} hand on what they read"] if plan.relays else []
    return [*cut, *([] if plan.report is None else str(plan.report).splitlines())]


def _runs(sizes: tuple[int, ...]) -> str:
    """Abbreviates sizes: ``2+2+1``; for many replicas ``11x6 + 5x5``."""
    if len(sizes) <= 4:
        return "+".join(map(str, sizes))
    return " + ".join(f"{count}x{size}" for size, count in Counter(sizes).items())
