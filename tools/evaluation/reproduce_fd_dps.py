"""Reproduces the experiments of FD-DPS (Mathematics 2022, 10, 4788, section 5): places its models, and simulates them.

    python -m tools.evaluation.reproduce_fd_dps                        # computes all, compares with what is stored
    python -m tools.evaluation.reproduce_fd_dps --models=VGG-16 --devices=4 --dockers=false   # a row
    python -m tools.evaluation.reproduce_fd_dps --write                # stores all, and writes the document
    python -m tools.evaluation.reproduce_fd_dps --write --missing      # computes and adds what isn't stored
    python -m tools.evaluation.reproduce_fd_dps --write --render       # writes the document, computes nothing

Tables 3, 5, 6 and 7 and figures 4 and 5: the training steps of VGG-16, Inception-V3, ResNet-50, ResNet-200,
PNASNet-mobile and NASNet-large on 2, 4 and 8 devices as fast as P100s. Their graphs are made by the passes of real
training, and cached in build/operator_steps until something that they depend on changes.

It exits with 1, and says which, if a step differs from the stored one by more than 2 %; a verdict, its limits or a
number of the paper from the stored ones; the document isn't what the stored rows give; or, with all rows, one of the
changes in its appendix, made on purpose, goes unnoticed. ``--write`` writes instead, to ``--directory``:

    fd_dps.md       the verdicts, the tables, with the paper's numbers, and what was assumed
    fd_dps.json     the rows that it is made of, the claims and the bands

and exits with 1 if demands on our own results fail: FD-DPS needs too much memory; its search takes more than 300 s of
one core.
"""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import operator_sensitivity, operator_sweep
from dapple_tf.tools.evaluation.operator_claims import SEARCH_SECONDS, claims_of
from dapple_tf.tools.evaluation.operator_experiments import DEVICES, Row, Setting, prepare, run, settings
from dapple_tf.tools.evaluation.operator_models import MODELS
from dapple_tf.tools.evaluation.operator_report import Outcomes
from dapple_tf.tools.evaluation.operator_results import (
    Stored,
    changed_document,
    changed_inputs,
    changed_sweep,
    differences,
    stored,
    write,
)
from dapple_tf.tools.evaluation.operator_sweep import Towers
from dapple_tf.tools.evaluation.sensitivity import unnoticed

FLAGS = flags.FlagValues()
_DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"

_MODELS = flags.DEFINE_list("models", list(MODELS), f"Models to place, from {', '.join(MODELS)}.", flag_values=FLAGS)
_DEVICES = flags.DEFINE_list("devices", [*map(str, DEVICES)], "Numbers of devices.", flag_values=FLAGS)
_DOCKERS = flags.DEFINE_boolean(
    "dockers", True, "Also place on eight devices in two dockers: figure 4.", flag_values=FLAGS
)
_DIRECTORY = flags.DEFINE_string("directory", str(_DEFAULT), "Folder of what is stored.", flag_values=FLAGS)
_WRITE = flags.DEFINE_boolean("write", False, "Store the results, and write the document.", flag_values=FLAGS)
_MISSING = flags.DEFINE_boolean(
    "missing", False, "With --write: compute only the chosen rows that aren't stored.", flag_values=FLAGS
)
_RENDER = flags.DEFINE_boolean(
    "render", False, "With --write: write the document again from the stored rows alone.", flag_values=FLAGS
)
_SEARCH_SECONDS = flags.DEFINE_float(
    "search_seconds", SEARCH_SECONDS, "Maximum seconds of one core for a search.", 0.0, flag_values=FLAGS
)
_JOBS = flags.DEFINE_integer(
    "jobs", min(4, os.cpu_count() or 1), "Number of parallel searches, of at most 6 GB each.", 1, flag_values=FLAGS
)


class _Work:
    """Writes a line on standard error for all finished work."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.monotonic()

    def tell(self, text: str) -> None:
        self.done += 1
        passed = time.monotonic() - self.began
        print(f"[{self.done}/{self.total}, {passed:.0f} s] {text}", file=sys.stderr, flush=True)


def reproduce(chosen: Sequence[Setting], jobs: int) -> list[Row]:
    """Returns the rows of these settings, in their order."""
    models = list(dict.fromkeys(setting.model for setting in chosen))
    work = _Work(len(models) + len(chosen))
    row_of: dict[Setting, Row] = {}
    if jobs == 1:
        for setting in chosen:
            if setting.model in models:
                models.remove(setting.model)
                work.tell(f"{setting.model}: {prepare(setting.model):,} nodes")
            row_of[setting] = run(setting)
            work.tell(_line(row_of[setting]))
        return [row_of[setting] for setting in chosen]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(chosen)), context, initializer=_quiet) as pool:
        graphs = {pool.submit(prepare, model): model for model in models}
        for graph in concurrent.futures.as_completed(graphs):
            work.tell(f"{graphs[graph]}: {graph.result():,} nodes")
        rows = {pool.submit(run, setting): setting for setting in chosen}
        for done in concurrent.futures.as_completed(rows):
            row_of[rows[done]] = done.result()
            work.tell(_line(done.result()))
    return [row_of[setting] for setting in chosen]


def _line(row: Row) -> str:
    ours, theirs = row.outcomes["fd_dps"], row.outcomes["fast_t"]
    times = f"FD-DPS {ours.seconds * 1e3:.1f} ms, FastT {theirs.seconds * 1e3:.1f} ms"
    return f"{row.setting}: {times}, searched for {ours.search_seconds:.1f} s"


def _quiet() -> None:
    logging.getLogger("dapple_tf").setLevel(logging.ERROR)


def main() -> None:
    """Places, simulates, writes or compares, and names what fails."""
    command.check_choices(_MODELS, MODELS)
    counts = [int(text) for text in _DEVICES.value if text.isdecimal() and int(text) > 1]
    command.check(
        bool(counts) and len(counts) == len(_DEVICES.value),
        f"--devices: {','.join(_DEVICES.value)!r}; give numbers from 2, such as 2,4,8",
    )
    adds = _RENDER.value or _MISSING.value
    command.check(not (_RENDER.value and _MISSING.value), "--missing and --render exclude each other; give one")
    command.check(_WRITE.value or not adds, "--missing and --render write; add --write")
    directory = pathlib.Path(_DIRECTORY.value)
    partial = set(_MODELS.value) != set(MODELS) or set(counts) != set(DEVICES) or not _DOCKERS.value
    command.check(
        adds or not (_WRITE.value and partial and directory.resolve() == _DEFAULT.resolve()),
        "a part of the results would replace all of them in docs/results; give another --directory",
    )
    _quiet()
    chosen = settings(_MODELS.value, counts, dockers=_DOCKERS.value)
    before = stored(directory / "fd_dps.json") if adds or not _WRITE.value else Stored([], [], {}, {}, [], {})
    known = before.rows if adds else []
    if _MISSING.value:
        chosen = [setting for setting in chosen if setting not in {row.setting for row in known}]
    rows = [*known, *(reproduce(chosen, _JOBS.value) if chosen and not _RENDER.value else ())]
    if known:
        order = [str(setting) for setting in settings(list(MODELS))]
        rows.sort(key=lambda row: order.index(str(row.setting)))
    keep = partial or _RENDER.value
    outcomes = before.outcomes if keep else operator_sensitivity.tried(rows)
    steps = before.sweep if keep else operator_sweep.sweep()
    if not _WRITE.value:
        missing = [] if partial else [row for row in before.rows if row.setting not in {one.setting for one in rows}]
        _compare(rows, outcomes, steps, before, directory, missing)
        return
    claims = claims_of(rows, _SEARCH_SECONDS.value)
    write(rows, claims, outcomes, steps, directory)
    failed = [claim for claim in claims if claim.verdict == "FAILED"]
    print(f"{len(claims)} claims, {len(failed)} of which fail; {directory / 'fd_dps.md'}")
    for claim in failed:
        print(f"FAILED: {claim.name}: {claim.ours}")
    if failed:
        sys.exit(1)


def _compare(
    rows: Sequence[Row],
    outcomes: Outcomes,
    steps: Sequence[Towers],
    before: Stored,
    directory: pathlib.Path,
    missing: Sequence[Row],
) -> None:
    lines = [*changed_inputs(before), *differences(before, rows, _SEARCH_SECONDS.value), *changed_sweep(before, steps)]
    lines += [f"{row.setting}: is stored, but wasn't computed" for row in missing]
    lines += [*changed_document(before, directory), *unnoticed(outcomes, before.outcomes)]
    print(f"{len(rows)} rows, {len(lines)} differences from {directory / 'fd_dps.json'}")
    for line in lines:
        print(line)
    if lines:
        print("--write accepts them")
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
