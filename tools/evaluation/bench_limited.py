"""DAPPLE's Table 5, measured: two workers with a memory limit run GPipe with the micro-batches that fit, and dapple_a.

The dapple page takes its numbers from the file that this writes:

    python -m tools.evaluation.bench --cases=table_5 --json=docs/results/dapple_measured.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time

import dapple_tf as dapple
from dapple_tf.describe.plan import PlanError
from dapple_tf.tools.evaluation.bench import Case, Numbers, Settings, Turn
from dapple_tf.tools.evaluation.bench_models import MODELS
from dapple_tf.tools.hosts import LocalWorkers

_LIMIT = 15.0 / 12.1
"""A device's memory over the peak of DAPPLE's fullest stage in Table 5, which GPipe reaches with two micro-batches."""


def table_5(stack: contextlib.ExitStack, settings: Settings) -> dict[str, Turn]:
    """Samples per second and the fuller worker's peak, by allocation records; each worker has a core."""
    described, samples, many = MODELS[settings["model"]], settings["samples"], settings["micro_batches"]
    workers = stack.enter_context(LocalWorkers(2, cores=(0, 1), echo=lambda worker, line: None))
    cluster = dapple.Cluster.of_servers(workers.addresses)
    profile = dapple.profile(described.make(), samples, cluster=cluster, cache=False)

    def planned(schedule: str, count: int) -> dapple.Plan:
        return described.pipeline(2, count, count * samples, schedule)

    limit = _LIMIT * max(dapple.simulate(planned("dapple_a", many), profile, cluster).peak_bytes.values())
    devices = tuple(dataclasses.replace(device, memory_bytes=round(limit)) for device in cluster.devices)
    limited = dataclasses.replace(cluster, devices=devices)

    def fits(count: int) -> bool:
        with contextlib.suppress(PlanError):
            return dapple.simulate(planned("gpipe", count), profile, limited).fits
        return False

    def way(schedule: str, count: int) -> Turn:
        pipelined = dapple.transform(described.make(), cluster, planned(schedule, count))
        stack.callback(pipelined.close, sync=False)
        x, y = described.batch(count * samples)
        steps = max(1, many // count)

        def turn() -> Numbers:
            pipelined.train_on_batch(x, y)
            began = time.perf_counter()
            for _ in range(steps):
                pipelined.train_on_batch(x, y)
            rate = steps * count * samples / (time.perf_counter() - began)
            peaks = pipelined.profile_step(x, y, warm_up=0, train=True).peak_bytes
            return {"samples_per_s": rate, "peak_mb": max(peaks.values()) / 1e6, "limit_mb": limit / 1e6}

        return turn

    most = next(count for count in itertools.count(1) if not fits(count + 1))
    ways = (("gpipe", most), ("gpipe", most + 1), ("dapple_a", many))
    return {f"{schedule}, M = {count}": way(schedule, count) for schedule, count in ways}


CASES = {
    "table_5": Case(
        "GPipe and dapple_a on two workers with a memory limit",
        table_5,
        {"model": "gpt", "samples": 8, "micro_batches": 16},
        rounds=6,
    )
}
