"""What users wait for before the first step, now and in an older checkout of the repository, in turns.

    git worktree add ../before 6597c47
    python -m tools.evaluation.bench_checkouts --before=../before --json=docs/results/scale.json

Each case is a program of both checkouts with the same flags. It runs in a process of its own, once from each checkout
in every round. The environment is this process's, so that both have the same versions of packages.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, own_commit, read_results, write_results
from dapple_tf.tools.evaluation.ratios import Quartiles, quartiles, ratios

FLAGS = flags.FlagValues()
NAME = "checkouts"
"""Name of these results."""
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Case(NamedTuple):
    """A program whose seconds are compared.

    Attributes:
        module: its name in `tools.evaluation`.
        options: its flags.
        field: which number of its only record counts.
    """

    module: str
    options: tuple[str, ...]
    field: str


CASES = {
    "preparing BERT-48 at reduced width, 32 stages, M = 8": Case(
        "bench_preparation", ("--devices=32", "--micro_batches=8"), "preparation_s"
    ),
    "preparing BERT-48 of full size, 32 stages, M = 32": Case(
        "bench_preparation",
        ("--devices=32", "--micro_batches=32", "--fixed_micro_batches=32", "--hidden=1024"),
        "preparation_s",
    ),
    "planning 12 layers on 16 devices": Case("bench_planner", ("--layers=12", "--devices=16"), "planner_s"),
    "planning 48 layers on 16 devices": Case("bench_planner", ("--layers=48", "--devices=16"), "planner_s"),
}
"""What is done -> the program that does it."""

_BEFORE = flags.DEFINE_string("before", None, "Folder of the older checkout.", required=True, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds, with a turn of each checkout.", 1, flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)


def seconds_of(case: Case, checkout: pathlib.Path) -> float:
    """Runs a program of a checkout; returns the seconds that it tells.

    Raises:
        RuntimeError: it failed; what it told of that has gone to standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "numbers.json")
        line = [sys.executable, "-m", f"tools.evaluation.{case.module}", *case.options, f"--json={file}"]
        process = subprocess.run(
            line, cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, stdout=subprocess.DEVNULL
        )
        if process.returncode:
            raise RuntimeError(f"{case.module} of {checkout} ended with code {process.returncode}")
        (entry,) = read_results(file).values()
    (record,) = entry["records"]
    return float(record[case.field])


def record_of(what: str, before: Sequence[float], now: Sequence[float], commit: str | None) -> dict[str, Any]:
    """Returns the record of a case from the seconds of each round.

    Args:
        what: what is done.
        before: seconds in the older checkout.
        now: seconds in this one, of the same rounds.
        commit: of the older checkout.
    """
    return {
        "case": what,
        "before": commit,
        "before_s": quartiles(before),
        "now_s": quartiles(now),
        "ratio": ratios(now, before),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns records for people."""
    head = ("what", "before (s)", "now (s)", "now / before, by rounds")
    cells: list[tuple[object, ...]] = [head]
    for row in rows:
        before, now, ratio = (
            row[name] if isinstance(row[name], Quartiles) else Quartiles(**row[name])
            for name in ("before_s", "now_s", "ratio")
        )
        cells.append((row["case"], f"{before.median:.2f}", f"{now.median:.2f}", ratio))
    return markdown(cells)


def main() -> None:
    """Measures what the flags say, and prints the table."""
    check_output(_JSON.value)
    before = pathlib.Path(_BEFORE.value).resolve()
    command.check(
        (before / "tools" / "evaluation").is_dir(),
        f"--before={_BEFORE.value}: it isn't a checkout of this repository; make one with `git worktree add`",
    )
    command.check(before != _ROOT, f"--before={_BEFORE.value}: it is this checkout; give an older one")
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for what, case in CASES.items():
        seconds: dict[pathlib.Path, list[float]] = {before: [], _ROOT: []}
        for number in range(_ROUNDS.value):
            for checkout in (before, _ROOT)[:: 1 if number % 2 == 0 else -1]:
                seconds[checkout].append(seconds_of(case, checkout))
                when = "now" if checkout == _ROOT else "before"
                command.say(f"{what}, {when}: {seconds[checkout][-1]:.2f} s", began)
        rows.append(record_of(what, seconds[before], seconds[_ROOT], own_commit(before)))
        if _JSON.value:  # Measurements are kept even after an error.
            write_results(_JSON.value, NAME, rows)
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
