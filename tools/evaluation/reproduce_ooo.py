"""Reproduces the evaluation of Out-Of-Order BackProp (EuroSys'22, section 8) in the simulator.

    python -m tools.evaluation.reproduce_ooo            # computes all, compares with what is stored: some minutes
    python -m tools.evaluation.reproduce_ooo --write    # stores all, and writes the document

Figures 4, 5, 6, 10 to 13, a part of 7 and the discussion of k = 45, stored in docs/results/ooo.json; ooo.md is the
document. It exits with 1, and says which, if of a claim anything but our numbers isn't the stored one, such as the
paper's number or the status; a number differs from the stored one by more than 2 %; the document isn't what the stored
numbers give; or one of the changes in its appendix, made on purpose, goes unnoticed.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import ooo_parallel as parallel
from dapple_tf.tools.evaluation import ooo_pipelines as pipelines
from dapple_tf.tools.evaluation import ooo_sensitivity
from dapple_tf.tools.evaluation import ooo_streams as streams
from dapple_tf.tools.evaluation.ooo_claims import NOT, STATUSES, Record, claims
from dapple_tf.tools.evaluation.ooo_differences import changed_document, differences
from dapple_tf.tools.evaluation.ooo_models import FOUR
from dapple_tf.tools.evaluation.ooo_report import rounded, write
from dapple_tf.tools.evaluation.sensitivity import unnoticed

FLAGS = flags.FlagValues()
_DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"

_DIRECTORY = flags.DEFINE_string("directory", str(_DEFAULT), "Folder of what is stored.", flag_values=FLAGS)
_WRITE = flags.DEFINE_boolean("write", False, "Store the results, and write the document.", flag_values=FLAGS)
_JOBS = flags.DEFINE_integer("jobs", min(4, os.cpu_count() or 1), "Number of processes.", 1, flag_values=FLAGS)

_LONG = ("pre_training", "strong")
"""Groups that take most of the time."""

Work = Callable[[], Record | Sequence[Record]]


def work() -> Iterator[tuple[str, Work]]:
    """Yields (group of records, how to compute some of them), in the order of the document."""
    yield "units", pipelines.unit_steps
    for times in (parallel.FITTED_4, *parallel.OTHERS_4):
        yield "figure_4", partial(parallel.figure_4, *times)
    for one in streams.settings():
        yield "one_gpu", partial(streams.one_gpu, *one)
    models = list(itertools.product(pipelines.FINE_TUNED_MODELS, FOUR))
    for counts in ((pipelines.FINE_TUNING,), pipelines.FINE_COUNTS):
        for model, network in models:
            yield "fine_tuning", partial(pipelines.fine_tuning, model, network, counts)
    for network in FOUR:
        yield "transfers", partial(pipelines.transfer, network)
    for model, network in models:
        yield "ours", partial(pipelines.ours, model, network)
    for devices, setting in itertools.product(pipelines.SCRIPTS, pipelines.SETTINGS):
        yield "pre_training", partial(pipelines.weak_scaling, devices, setting)
    for strong in pipelines.strong_settings():
        yield "strong", partial(pipelines.strong_scaling, *strong)
    for devices in pipelines.GPT_3_DEVICES:
        yield "gpt_3", partial(pipelines.gpt_3, devices)
    for row in parallel.figure_10_settings():
        yield "figure_10", partial(parallel.figure_10, *row)
    for traffic, kind in itertools.product((parallel.RING, parallel.APART), (parallel.RUNS, parallel.SECTION_2)):
        yield "k_45", partial(parallel.k_45, kind, traffic)


def reproduce(jobs: int) -> dict[str, list[dict[str, Any]]]:
    """Computes all records, with a line on standard error for each group.

    Args:
        jobs: number of processes.
    """
    began = time.monotonic()
    records: dict[str, list[Record]] = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=_quiet) as pool:
        tasks = list(work())
        longest = sorted(range(len(tasks)), key=lambda number: tasks[number][0] not in _LONG)
        futures = {number: pool.submit(tasks[number][1]) for number in longest}
        for number, (group, _) in enumerate(tasks):
            some = futures[number].result()
            if group not in records:
                print(f"[{time.monotonic() - began:.0f} s] {group}", file=sys.stderr, flush=True)
            records.setdefault(group, []).extend([some] if isinstance(some, Mapping) else some)
    return rounded(records)


def _quiet() -> None:
    logging.getLogger("dapple_tf").setLevel(logging.WARNING)


def main() -> None:
    """Computes, and writes or compares; names what isn't reproduced, and what differs."""
    directory = pathlib.Path(_DIRECTORY.value)
    file = directory / "ooo.json"
    command.check(_WRITE.value or file.exists(), f"--directory: {file} isn't there; make it with --write")
    _quiet()
    records = reproduce(_JOBS.value)
    outcomes = ooo_sensitivity.tried(records)
    judged = write(records, outcomes, directory) if _WRITE.value else claims(records)
    counts = ", ".join(f"{sum(claim.status == status for claim in judged)} {status}" for status in STATUSES)
    print(f"{len(judged)} claims: {counts}; {directory / 'ooo.md'}")
    for claim in judged:
        if claim.status == NOT:
            print(f"not reproduced: {claim.name}: {claim.ours:.3g}, paper {claim.paper}")
    if _WRITE.value:
        return
    stored = json.loads(file.read_text(encoding="utf-8"))
    changed = [*differences(records, stored), *changed_document(stored, directory)]
    changed += unnoticed(outcomes, stored.get("sensitivity", {}))
    for text in changed:
        print(f"CHANGED: {text}")
    if changed:
        print(f"{len(changed)} differences from {file}; --write accepts them")
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
