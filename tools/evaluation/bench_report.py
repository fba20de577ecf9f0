"""Results of benchmarks: a JSON file of numbers with the machine's facts, and tables in Markdown.

One file holds the newest results of several benchmarks, each under its own name::

    {
     "overhead": {
      "kind": "measured",
      "command": "python -m tools.evaluation.bench_overhead --rounds=20",
      "machine": {"cpu": "...", "cores": 2, "versions": {...}, "date": "2026-01-31 12:00", ...},
      "commit": "1a2b3c4d+",
      "records": [{"model": "small", "step_ms": 5.1, "ratio": {"low": 1.0, "median": 1.01, "high": 1.03}}, ...]
     }
    }

A record is a mapping of plain values: the varied settings and the results. Names of numbers end with their unit
(``_ms``, ``_s``, ``_mib``, ``_per_s``) unless they are counts or ratios. A number over several rounds is a
`ratios.Quartiles`, in JSON a mapping as above. ``commit`` is that of the measured code, with a plus if files had been
changed since, and null outside of a git repository. ``kind`` says what the numbers are: "measured" on that machine,
"simulated", or "predicted" (computed without running anything). A program that writes such a file has the flag
``--json``, which `check_output` checks before anything is measured.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.ratios import Quartiles
from dapple_tf.tools.machine_facts import machine_facts

KINDS = ("measured", "simulated", "predicted")

Record = Mapping[str, Any]
_ROOT = pathlib.Path(__file__).resolve().parents[2]
"""Folder of the measured code."""


def write_results(
    path: str | os.PathLike[str],
    name: str,
    records: Sequence[Record],
    *,
    kind: str = "measured",
    versions: dict[str, str] | None = None,
) -> None:
    """Writes a benchmark's results in place of its earlier ones; those of other benchmarks in the file stay.

    Args:
        path: the JSON file; created if it is missing.
        name: name of the benchmark.
        records: see the module.
        kind: one of `KINDS`, for all these records.
        versions: versions of packages that ran in another interpreter; see `machine_facts`.

    Raises:
        ValueError: the kind is unknown, or the file has other contents.
        OSError: the file can't be written.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; use one of {', '.join(KINDS)}")
    file = pathlib.Path(path)
    earlier = read_results(file) if file.exists() else {}
    entry = {
        "kind": kind,
        "command": own_command(),
        "machine": machine_facts(versions),
        "commit": own_commit(),
        "records": list(records),
    }
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
    if not isinstance(results, dict) or not all(
        isinstance(entry, dict) and "records" in entry and entry.get("kind") in KINDS for entry in results.values()
    ):
        raise ValueError(f"{path} holds something other than benchmarks' results; give another file for them")
    return results


def write_document(path: str, document: Callable[[dict[str, Any]], str]) -> None:
    """Writes the Markdown document of a file of results beside it.

    Args:
        path: the JSON file, of the flag ``--json``.
        document: the file's results -> the document's text.

    Raises:
        app.UsageError: the file can't be read, or has other contents.
    """
    file = pathlib.Path(path)
    try:
        results = read_results(file)
    except (OSError, ValueError) as problem:
        command.check(False, f"--json: {problem}")
        raise
    file.with_suffix(".md").write_text(document(results), encoding="utf-8")


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


def numbers(flag: str, values: Sequence[str]) -> list[int]:
    """Returns a flag's whole numbers of at least 1.

    Raises:
        app.UsageError: there are none, or others; the text names the flag.
    """
    wrong = [value for value in values if not (value.isascii() and value.isdigit() and int(value))]
    command.check(
        bool(values) and not wrong,
        f"--{flag}={','.join(values)}: need whole numbers of at least 1 with commas between them",
    )
    return [*map(int, values)]


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


def rows_apart(module: str, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Yields rows that a program prints as lines of JSON, in a separate process, whose memory is freed afterwards.

    Args:
        module: the program.
        options: its flags.
        environment: variables that it has besides this process's.

    Raises:
        RuntimeError: the process failed; its output has gone to standard error.
    """
    line = [sys.executable, "-m", module, *options]
    variables = {**os.environ, **(environment or {})}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(line[1:])} ended with code {process.returncode}")


def cells(rows: Iterable[Record], columns: Mapping[str, str]) -> list[list[str]]:
    """Returns a table of records: a header, and records in the columns' formats, such as ``{step_ms:.2f}``."""
    return [list(columns), *([form.format_map(row) for form in columns.values()] for row in rows)]


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown; the first row is the header.

    >>> print(markdown([("way", "ratio"), ("keras", Quartiles(0.9, 1.0, 1.1))]))
    | way | ratio |
    |---|---|
    | keras | 1.000 (0.900 to 1.100) |
    """
    header, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([header, "|" + "---|" * len(rows[0]), *body])


def _plain(value: object) -> object:
    if isinstance(value, Quartiles):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in a record: {value!r}")
