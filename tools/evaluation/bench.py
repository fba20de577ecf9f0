"""Runs benchmarks: variants of a case take turns, so that a machine's changes of speed hit all alike.

    python -m tools.evaluation.bench --helpfull                                    # lists cases and their settings
    python -m tools.evaluation.bench --cases=overhead,client --json=docs/results/speed.json
    python -m tools.evaluation.bench --cases=overhead --set=model=small --set=method=fit --rounds=30
    python -m tools.evaluation.bench --cases=planner --before=../before            # beside an older checkout

Each round has a turn of each variant, in an order that is reversed from round to round. A turn gives numbers, whose
names end with their unit. Rows have their quartiles over the rounds, and the quartiles of the ratios to the first
variant in the same round. With ``--before``, each variant has a turn in both checkouts, each in a process of its own,
and ratios are those of now to before. ``--json`` keeps rows, machine and commit (`bench_report`). The exit code is 1 if
a median is beyond its limit.

A case is a `Case` in the table ``CASES`` of one of `MODULES`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import Quartiles, check_output, markdown, write_results

MODULES = ("bench_training", "bench_accuracy", "bench_scale", "bench_torch", "bench_limited")
"""Modules of `tools.evaluation` with cases."""
ROOT = pathlib.Path(__file__).resolve().parents[2]

Numbers = Mapping[str, float]
Turn = Callable[[], Numbers]
Settings = Mapping[str, Any]


class Case(NamedTuple):
    """A benchmark.

    Attributes:
        about: one line.
        variants: function that sets up (the stack ends with the case) and returns variant -> its turn.
        settings: name -> default; a command gives others by ``--set``.
        rounds: number of rounds by default.
        apart: whether each turn has a process of its own, as for times of preparation and peaks of memory; else, if
            there are several rounds by default, a first turn of each variant, which prepares it, doesn't count.
        limits: number -> the most that its median may be, above or below zero.
    """

    about: str
    variants: Callable[[contextlib.ExitStack, Settings], Mapping[str, Turn]]
    settings: Settings
    rounds: int = 8
    apart: bool = False
    limits: Numbers = types.MappingProxyType({})

    @property
    def warms_up(self) -> bool:
        """Whether a first turn of each variant doesn't count."""
        return not self.apart and self.rounds > 1


FLAGS = flags.FlagValues()
_CASES = flags.DEFINE_list("cases", None, "Cases to run; none lists them.", flag_values=FLAGS)
_SET = flags.DEFINE_multi_string("set", [], "setting=value, of all cases that have it.", flag_values=FLAGS)
_ONLY = flags.DEFINE_multi_string("only", [], "Variant to run; by default all.", flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", None, "Rounds; by default the case's.", lower_bound=1, flag_values=FLAGS)
_BEFORE = flags.DEFINE_string("before", None, "Folder of an older checkout to compare with.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the rows to.", flag_values=FLAGS)
_CHILD = flags.DEFINE_bool("child", False, "Internal: print the numbers of one turn.", flag_values=FLAGS)


def known_cases() -> dict[str, Case]:
    """Returns all cases by name."""
    modules = [importlib.import_module(f"dapple_tf.tools.evaluation.{name}") for name in MODULES]
    return {name: case for module in modules for name, case in module.CASES.items()}


def settings_of(case: Case, given: Sequence[str]) -> dict[str, Any]:
    """Returns a case's settings with given ones, ``name=value``, in place of defaults.

    Raises:
        app.UsageError: a value isn't of the default's type.
    """
    settings = dict(case.settings)
    for text in given:
        name, _, value = text.partition("=")
        if name in settings:
            default = settings[name]
            try:
                settings[name] = json.loads(value) if isinstance(default, bool) else type(default)(value)
            except ValueError:
                command.check(False, f"--set={text}: need a value such as {default!r}")
    return settings


def each(settings: Settings, name: str) -> list[str]:
    """Returns the parts of a setting with commas between them; none of an empty one."""
    return [part for part in str(settings[name]).split(",") if part]


# ---- turns


def in_process(name: str, variant: str, settings: Settings, checkout: pathlib.Path | None = None) -> Numbers:
    """Returns the numbers of a turn in a process of its own.

    Raises:
        RuntimeError: it failed; its output has gone to standard error.
    """
    line = [sys.executable, "-m", "tools.evaluation.bench", f"--cases={name}", f"--only={variant}", "--child"]
    texts = {key: json.dumps(value) if isinstance(value, bool) else str(value) for key, value in settings.items()}
    line += [f"--set={key}={text}" for key, text in texts.items()]
    checkout = checkout or ROOT
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(line, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}, {variant} in {checkout} ended with code {done.returncode}")
    numbers: Numbers = json.loads(done.stdout.splitlines()[-1])
    return numbers


def measured(turns: Mapping[str, Turn], rounds: int, *, warm_up: bool) -> list[dict[str, Any]]:
    """Returns a row of each turn: the quartiles of its numbers, and of their ratios to the first turn's.

    Args:
        turns: variant -> its turn.
        rounds: number of rounds.
        warm_up: whether a first turn of each doesn't count.
    """
    began = time.monotonic()
    for run in turns.values() if warm_up else ():
        run()
    seen: dict[str, list[Numbers]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: 1 if number % 2 == 0 else -1]:
            seen[name].append(turns[name]())
            command.say(f"round {number + 1}: {name}", began)
    base = next(iter(seen.values()))
    rows = []
    for name, own in seen.items():
        row: dict[str, Any] = {"variant": name}
        for key in own[0]:
            values, first = ([numbers[key] for numbers in several if key in numbers] for several in (own, base))
            row[key] = Quartiles.of(values)
            if own is not base and len(first) == len(values) and all(first):
                row[f"{key}_ratio"] = Quartiles.of([one / other for one, other in zip(values, first, strict=True)])
        rows.append(row)
    return rows


def run_case(
    name: str, case: Case, settings: Settings, rounds: int, only: Sequence[str] = (), before: pathlib.Path | None = None
) -> list[dict[str, Any]]:
    """Returns the rows of a case.

    Args:
        name: its name.
        case: the case.
        settings: its settings.
        rounds: number of rounds.
        only: variants to run; none for all.
        before: an older checkout, whose numbers the ratios are to.

    Raises:
        app.UsageError: there is no such variant.
    """
    with contextlib.ExitStack() as stack:
        turns = case.variants(stack, settings)
        unknown = [variant for variant in only if variant not in turns]
        command.check(not unknown, f"--only: {', '.join(unknown)}: {name} has {', '.join(turns)}")
        turns = {variant: run for variant, run in turns.items() if not only or variant in only}
        if before is None and not case.apart:
            return measured(turns, rounds, warm_up=case.warms_up)
    apart = functools.partial(in_process, name)
    if before is None:
        own = {variant: functools.partial(apart, variant, settings) for variant in turns}
        return measured(own, rounds, warm_up=False)
    rows = []
    for variant in turns:
        places = {f"{variant}, before": before, f"{variant}, now": ROOT}
        both = {way: functools.partial(apart, variant, settings, place) for way, place in places.items()}
        rows += measured(both, rounds, warm_up=False)
    return rows


# ---- showing


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as Markdown: medians, with quartiles, and ratios where there are any."""
    keys = list(dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, Quartiles)))
    body = [[row["variant"], *(row.get(key, "") for key in keys)] for row in rows]
    return markdown([["variant", *(key.replace("_", " ") for key in keys)], *body])


def beyond(rows: Sequence[Mapping[str, Any]], limits: Numbers) -> list[str]:
    """Returns which medians are beyond their limits."""
    values = [(row["variant"], key, row[key].median, most) for row in rows for key, most in limits.items()]
    return [f"{name}: {key} is {value:.4g}, limit {most:g}" for name, key, value, most in values if abs(value) > most]


def main() -> None:
    """Runs the cases of the flags, and prints their tables."""
    known = known_cases()
    if not _CASES.value:
        for name, case in known.items():
            texts = [f"{key}={value}" for key, value in case.settings.items()]
            sys.stdout.write(f"{name}: {case.about}; {', '.join(texts)}\n")
        return
    command.check_choices(_CASES, known)
    check_output(_JSON.value)
    allowed = {key for name in _CASES.value for key in known[name].settings}
    for text in _SET.value:
        command.check(text.partition("=")[0] in allowed, f"--set={text}: there are {', '.join(sorted(allowed))}")
    before = None if _BEFORE.value is None else pathlib.Path(_BEFORE.value).resolve()
    command.check(
        before is None or (before / "tools" / "evaluation" / "bench.py").is_file(),
        f"--before={_BEFORE.value}: no checkout with this program; make one with `git worktree add`",
    )
    failures: list[str] = []
    for name in _CASES.value:
        case = known[name]
        settings = settings_of(case, _SET.value)
        if _CHILD.value:
            with contextlib.ExitStack() as stack:
                run = case.variants(stack, settings)[_ONLY.value[0]]
                if case.warms_up:
                    run()
                sys.stdout.write(f"\n{json.dumps(run())}\n")
            continue
        rows = run_case(name, case, settings, _ROUNDS.value or case.rounds, _ONLY.value, before)
        sys.stdout.write(f"{name}: {case.about}\n\n{table(rows)}\n\n")
        if _JSON.value:
            changed = [f"{key}={value}" for key, value in settings.items() if value != case.settings[key]]
            title = " ".join([name, *changed, *(["before and now"] if before else [])])
            write_results(_JSON.value, title, [{**settings, **row} for row in rows])
        failures += [f"{name}, {text}\n" for text in beyond(rows, case.limits)]
    if failures:
        sys.stdout.write("".join(failures))
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
