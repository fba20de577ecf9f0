"""Reproduces the evaluation of DAPPLE (PPoPP'21, section 6): plans its models for its hardware, and simulates them.

    python -m tools.evaluation.reproduce_dapple                              # compares everything with what is stored
    python -m tools.evaluation.reproduce_dapple --only=vgg-19/C,'table 5'    # only parts whose name has one of these
    python -m tools.evaluation.reproduce_dapple --write                      # accepts what differs

From docs/profiles.md: Tables 3 to 7, figures 8, 11, 12 and 14, our plans beside strong opponents.
Exits with 1, and says which, if a claim has another verdict than the stored one, a number differs by more than 2 % in
either direction, a text differs, or the documents aren't those of the stored results. ``--write`` leaves in
``--directory``:

    results.json    what is stored: the record of each part, and the verdicts
    dapple.md       the document, with the paper's numbers and reasons
    *.csv, *.svg    its tables and plots

docs/results/README.md lists the assumptions.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import paper_sensitivity
from dapple_tf.tools.evaluation.paper_document import files
from dapple_tf.tools.evaluation.paper_outcomes import Record
from dapple_tf.tools.evaluation.paper_parts import differences, limits, parts, rounded, verdicts

_DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"
_SHOWN = 60
_SENSITIVITY = "sensitivity"
"""The part that changes others on purpose, from what the others gave."""

FLAGS = flags.FlagValues()

_ONLY = flags.DEFINE_list("only", [], "Compute only parts whose name has one of these in it.", flag_values=FLAGS)
_WRITE = flags.DEFINE_boolean("write", False, "Store the results, and write the documents.", flag_values=FLAGS)
_DIRECTORY = flags.DEFINE_string("directory", str(_DEFAULT), "Folder of what is stored.", flag_values=FLAGS)
_JOBS = flags.DEFINE_integer("jobs", None, "Processes; by default one for each core.", 1, flag_values=FLAGS)


def selected(only: list[str]) -> list[str]:
    """Returns the names of the parts to compute.

    Raises:
        CommandError: a text is in no name.
    """
    names = [*parts(), _SENSITIVITY]
    for text in only:
        command.check(
            any(text in name for name in names),
            f"--only={text}: no part has it in its name; the parts are: {', '.join(names)}",
        )
    return [name for name in names if not only or any(text in name for text in only)]


def _compute(name: str) -> Record:
    logging.getLogger("dapple_tf").setLevel(logging.WARNING)
    record: Record = rounded(parts()[name]())
    return record


def _change(number: int, results: Mapping[str, Any]) -> Record:
    logging.getLogger("dapple_tf").setLevel(logging.WARNING)
    return paper_sensitivity.tried(paper_sensitivity.CHANGES[number], results)


def _all(tasks: Mapping[str, tuple[Callable[..., Record], tuple[Any, ...]]], jobs: int) -> dict[str, Record]:
    """Returns name -> record, with a line on standard error as each is done."""
    began = time.monotonic()
    records: dict[str, Record] = {}

    def done(name: str, record: Record) -> None:
        records[name] = record
        passed = time.monotonic() - began
        print(f"[{len(records)}/{len(tasks)}, {passed:.0f} s] {name}", file=sys.stderr, flush=True)

    if jobs == 1:
        for name, (task, arguments) in tasks.items():
            done(name, task(*arguments))
    else:
        with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(task, *arguments): name for name, (task, arguments) in tasks.items()}
            for future in concurrent.futures.as_completed(futures):
                done(futures[future], future.result())
    return {name: records[name] for name in tasks}


def compute(names: list[str], stored: Mapping[str, Any], jobs: int) -> dict[str, Any]:
    """Returns the records of these parts.

    Args:
        names: parts.
        stored: records of parts that may not be among them.
        jobs: processes.
    """
    fresh: dict[str, Any] = _all({name: (_compute, (name,)) for name in names if name != _SENSITIVITY}, jobs)
    if _SENSITIVITY in names:
        results = {**stored, **fresh}
        tried = {change.text: (_change, (index, results)) for index, change in enumerate(paper_sensitivity.CHANGES)}
        fresh[_SENSITIVITY] = _all(tried, jobs)
    return fresh


def changes(stored: Mapping[str, Any], fresh: Mapping[str, Any], directory: pathlib.Path) -> list[str]:
    """Returns what differs between what is stored and the records that were computed.

    Args:
        stored: what results.json has: ``parts``, ``claims`` and ``limits``.
        fresh: part -> its record.
        directory: folder of the documents.
    """
    before = stored["parts"]
    said = [f"{name}: is stored, but there is no such part" for name in before if name not in {*parts(), _SENSITIVITY}]
    for name, record in fresh.items():
        said += differences(before.get(name, {}), record, name)
    said += differences(stored["claims"], verdicts({**before, **fresh}), "claims")
    said += differences(stored.get("limits", {}), limits(), "limits")
    try:
        documents = files(before)
    except KeyError as error:  # records that an older version wrote
        return [*said, f"{directory / 'results.json'}: what is stored has no {error}; write it with --write"]
    for name, text in documents.items():
        path = directory / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            said.append(f"{path}: isn't what the stored results give; write it with --write")
    return said


def write(results: Mapping[str, Any], directory: pathlib.Path) -> None:
    """Writes what is stored, the document, the tables and the plots."""
    from dapple_tf.tools.evaluation.paper_plots import draw  # matplotlib is an extra

    directory.mkdir(parents=True, exist_ok=True)
    content = {"limits": limits(), "claims": verdicts(results), "parts": results}
    (directory / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, text in files(results).items():
        (directory / name).write_text(text, encoding="utf-8")
    draw(results, directory)


def main() -> None:
    """Computes, compares and says what differs, or writes it."""
    directory = pathlib.Path(_DIRECTORY.value)
    path = directory / "results.json"
    stored: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"claims": {}, "parts": {}}
    )
    names = selected(_ONLY.value)
    jobs = _JOBS.value or len(os.sched_getaffinity(0))
    fresh = compute(names, stored["parts"], jobs)
    said = changes(stored, fresh, directory)
    for text in said[:_SHOWN]:
        print(text)
    if len(said) > _SHOWN:
        print(f"and {len(said) - _SHOWN} more")
    if _WRITE.value:
        order = [*parts(), _SENSITIVITY]
        merged = {**stored["parts"], **fresh}
        write({name: merged[name] for name in order if name in merged}, directory)
        print(f"{len(said)} differences, which are stored now; {directory / 'dapple.md'}")
    elif said:
        print(f"FAILED: {len(said)} differences from {path}; --write accepts them")
        sys.exit(1)
    else:
        print(f"{len(names)} parts and {len(stored['claims'])} claims are as stored in {path}")


if __name__ == "__main__":
    command.start(main, FLAGS)
