"""Results of benchmarks: a JSON file of numbers with the machine's facts, and tables in Markdown.

One file holds the newest results of several benchmarks, each under its own name::

    {
     "overhead": {
      "command": "python -m tools.evaluation.bench --cases=overhead --rounds=20",
      "machine": {"cpu": "...", "cores": 2, "versions": {...}, "date": "2026-01-31 12:00", ...},
      "commit": "1a2b3c4d+",
      "records": [{"model": "small", "step_ms": {"low": 5.0, "median": 5.1, "high": 5.3}}, ...]
     }
    }

A record is a mapping of plain values: the varied settings and the results. Names of numbers end with their unit
(``_ms``, ``_s``, ``_mib``, ``_per_s``) unless they are counts or ratios. A number over several rounds has `Quartiles`.
``commit`` is that of the measured code, with a plus if files had been changed since, and null outside of a git
repository. A program that writes such a file has the flag ``--json``, which `check_output` checks before anything is
measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapple_tf.tools import command
from dapple_tf.tools.machine_facts import machine_facts

Record = Mapping[str, Any]
_ROOT = pathlib.Path(__file__).resolve().parents[2]
"""Folder of the measured code."""


@dataclasses.dataclass(frozen=True)
class Quartiles:
    """Quartiles of a number over the rounds of a benchmark.

    Attributes:
        low: lower quartile.
        median: median.
        high: upper quartile.
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Returns the quartiles of at least one number."""
        return cls(*np.percentile(np.asarray(values, np.float64), (25, 50, 75)).tolist())

    def __str__(self) -> str:
        low, median, high = (f"{number:.4g}" for number in (self.low, self.median, self.high))
        return median if low == high else f"{median} ({low} to {high})"


def write_results(path: str | os.PathLike[str], name: str, records: Sequence[Record]) -> None:
    """Writes a benchmark's results in place of its earlier ones; other benchmarks' stay.

    Args:
        path: the JSON file; created if it is missing.
        name: name of the benchmark.
        records: see the module.

    Raises:
        ValueError: the file has other contents.
        OSError: the file can't be written.
    """
    file = pathlib.Path(path)
    earlier = read_results(file) if file.exists() else {}
    entry = {"command": own_command(), "machine": machine_facts(), "commit": own_commit(), "records": list(records)}
    text = json.dumps({**earlier, name: entry}, indent=1, default=_plain) + "\n"
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns benchmark -> its results as written by `write_results`.

    Raises:
        ValueError: the file has another form.
        OSError: it can't be read.
    """
    try:
        results = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} isn't JSON ({error}); give another file for the results") from error
    entries = results.values() if isinstance(results, dict) else [results]
    if not all(isinstance(entry, dict) and "records" in entry for entry in entries):
        raise ValueError(f"{path} holds something other than benchmarks' results; give another file for them")
    return dict(results)


def check_output(path: str | None) -> None:
    """Checks a file for results before anything is measured.

    Raises:
        app.UsageError: its folder doesn't exist, or the file has other contents.
    """
    if path is None:
        return
    folder = pathlib.Path(path).parent
    command.check(folder.is_dir(), f"--json={path}: there is no folder {folder}; make it first")
    if pathlib.Path(path).exists():
        try:
            read_results(path)
        except ValueError as error:
            command.check(False, f"--json: {error}")


def own_command() -> str:
    """Returns the command that started this process, as one would type it: ``python -m tools.x --flag=1``.

    File names have no folders.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name}" if spec is not None else f"python {pathlib.Path(sys.argv[0]).name}"
    shown = []
    for argument in sys.argv[1:]:
        flag, equals, value = argument.partition("=")
        if pathlib.PurePath(value).is_absolute():
            value = pathlib.PurePath(value).name
        shown.append(shlex.quote(f"{flag}{equals}{value}"))
    return " ".join([program, *shown])


def own_commit(root: pathlib.Path = _ROOT) -> str | None:
    """Returns the short commit of a folder's code, with a plus if tracked files differ from it; None without git.

    Results in docs/results, which benchmarks write one after another, may differ.

    Args:
        root: a folder of the repository.
    """
    if shutil.which("git") is None:
        return None
    git = ("git", "-C", str(root))
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if commit.returncode:
        return None  # an installed copy, or an archive
    code = ("--untracked-files=no", "--", ".", ":(exclude)docs/results")
    changed = subprocess.run([*git, "status", "--porcelain", *code], capture_output=True, text=True)
    return commit.stdout.strip() + ("+" if changed.stdout or changed.returncode else "")


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown; the first row is the header.

    >>> print(markdown([("way", "ratio"), ("keras", Quartiles(0.9, 1.0, 1.1))]))
    | way | ratio |
    |---|---|
    | keras | 1 (0.9 to 1.1) |
    """
    header, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([header, "|" + "---|" * len(rows[0]), *body])


def _plain(value: object) -> object:
    if isinstance(value, Quartiles):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in a record: {value!r}")
