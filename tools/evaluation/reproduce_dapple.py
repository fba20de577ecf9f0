"""Reproduces the evaluation of DAPPLE (PPoPP'21, section 6): plans its models for its hardware, and simulates them.

    python -m tools.evaluation.reproduce_dapple                                         # all of it, two minutes
    python -m tools.evaluation.reproduce_dapple --models=vgg-19 --output_dir=./results  # one model

From the layer profiles in docs/profiles: Table 4 (plans on hardware A, B, C) and Table 6 (against PipeDream), Figure 11
(against data parallelism), Table 3 (P_B against P_A), Table 5 (against GPipe) and Table 7 (the largest BERT). Leaves in
``--output_dir``:

    dapple.md              the tables, with the paper's numbers, reasons and plots
    *.csv, results.json    the same numbers
    *.svg                  plots

docs/results/README.md lists the assumptions. Exits with 1, and names them, if claims don't hold: our plan is
slower than the paper's in the same simulation, planning takes too long, or a figure is worse than before.
"""

from __future__ import annotations

import json
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from absl import app, flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import paper_experiments as experiments
from dapple_tf.tools.evaluation.paper_claims import Results, check, check_times, reached
from dapple_tf.tools.evaluation.paper_models import FIGURE_11_MODELS, ROWS, TABLE_3, TABLE_6, TABLE_7
from dapple_tf.tools.evaluation.paper_report import write

_NAMES = tuple(dict.fromkeys(row.model for row in ROWS))
_DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"
_BOUNDS = _DEFAULT / "bounds.json"

FLAGS = flags.FlagValues()

_MODELS = flags.DEFINE_list(
    "models", list(_NAMES), f"Models to plan, from {', '.join(_NAMES)}; averages need all.", flag_values=FLAGS
)
_CONFIGS = flags.DEFINE_list("configs", ["A", "B", "C"], "Hardware to plan for in Table 4.", flag_values=FLAGS)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", str(_DEFAULT), "Folder to write the results to.", flag_values=FLAGS)
_PLANNER_SECONDS = flags.DEFINE_float(
    "planner_seconds",
    1.0,
    "Maximum seconds of one core for planning a row; measured at most three times.",
    0.0,
    flag_values=FLAGS,
)
_BLESS = flags.DEFINE_boolean(
    "bless",
    False,
    "Store these figures, better or worse, in docs/results/bounds.json as the bounds of later results.",
    flag_values=FLAGS,
)
_PLOTS = flags.DEFINE_boolean("plots", True, "Draw the plots, too; needs matplotlib.", flag_values=FLAGS)

_Found = TypeVar("_Found")


class _Work:
    """Runs the work one by one, with a line on standard error for each."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.done = 0
        self.total = 0

    def all(self, tasks: Sequence[tuple[str, Callable[[], _Found]]]) -> list[_Found]:
        results = []
        for name, task in tasks:
            self.done += 1
            passed = time.monotonic() - self.began
            print(f"[{self.done}/{self.total}, {passed:.0f} s] {name}", file=sys.stderr, flush=True)
            results.append(task())
        return results


def reproduce(models: Sequence[str], configs: Sequence[str], planner_seconds: float) -> Results:
    """Plans and simulates everything about these models and configs."""
    rows = [row for row in ROWS if row.model in models and (row.config in configs or row.table == 6)]
    everything = set(FIGURE_11_MODELS) <= set(models) and set(configs) == set("ABC")
    small = [(model, config) for config in "ABC" for model in FIGURE_11_MODELS] if everything else []
    larger = [row for row in TABLE_6 if row.model in models] if everything else []
    policies = [model for model in TABLE_3 if model in models]
    bert = "bert-48" in models

    row_tasks = [(row.key, lambda row=row: experiments.run_row(row, planner_seconds)) for row in rows]
    flat_tasks = [
        (f"figure 11, flat ring: {model}", lambda model=model: experiments.run_flat(model))
        for model in (FIGURE_11_MODELS if everything else ())
    ]
    small_tasks = [
        (f"figure 11, GBS 128: {model}/{config}", lambda m=model, c=config: experiments.run_small_batch(m, c))
        for model, config in small
    ]
    larger_tasks = [(f"figure 12, 4 x 8: {row.model}", lambda row=row: experiments.run_larger(row)) for row in larger]
    policy_tasks = [(f"table 3: {model}", lambda model=model: experiments.run_policies(model)) for model in policies]
    gpipe_tasks = [("table 5", experiments.run_table_5)] if bert else []
    largest_tasks = [
        (f"table 7: {line.devices} devices", lambda line=line: experiments.run_table_7(line))
        for line in (TABLE_7 if bert else ())
    ]
    work = _Work()
    groups: tuple[Sequence[object], ...] = (
        row_tasks, flat_tasks, small_tasks, larger_tasks, policy_tasks, gpipe_tasks, largest_tasks,
    )  # fmt: skip
    work.total = sum(len(tasks) for tasks in groups)
    row_results = work.all(row_tasks)
    return Results(
        rows=row_results,
        hybrids=[*experiments.table_4_hybrids(row_results), *work.all(flat_tasks), *work.all(small_tasks)],
        larger=work.all(larger_tasks),
        policies=work.all(policy_tasks),
        table_5=[line for lines in work.all(gpipe_tasks) for line in lines],
        table_7=work.all(largest_tasks),
    )


def _bounds() -> dict[str, float]:
    bounds: dict[str, float] = json.loads(_BOUNDS.read_text(encoding="utf-8")) if _BOUNDS.exists() else {}
    return bounds


def main() -> None:
    """Computes, writes, and names failing claims."""
    command.check_choices(_MODELS, _NAMES)
    command.check_choices(_CONFIGS, "ABC")
    directory = pathlib.Path(_OUTPUT_DIR.value)
    partial = set(_MODELS.value) != set(_NAMES) or set(_CONFIGS.value) != set("ABC")
    if partial and directory.resolve() == _DEFAULT.resolve():
        raise app.UsageError("a part of the results would replace all of them in docs/results; give an --output_dir")
    if partial and _BLESS.value:
        raise app.UsageError("--bless needs all models and configs")
    logging.getLogger("dapple_tf").setLevel(logging.WARNING)
    results = reproduce(_MODELS.value, _CONFIGS.value, _PLANNER_SECONDS.value)
    claims = check(results, _bounds())
    if _BLESS.value:
        _BOUNDS.write_text(json.dumps(reached(claims), indent=1) + "\n", encoding="utf-8")
        claims = check(results, _bounds())
    write(results, claims, directory)
    if _PLOTS.value:
        from dapple_tf.tools.evaluation.paper_plots import draw  # matplotlib is an extra

        draw(results, directory)
    slowest = max(results.rows, key=lambda row: row.planner_seconds)
    claims += check_times(results.rows, _PLANNER_SECONDS.value)
    failed = [claim for claim in claims if not claim.holds]
    print(f"{len(claims)} claims, {len(failed)} of which fail; {directory / 'dapple.md'}")
    print(f"planner: at most {slowest.planner_seconds:.2f} s of one core, for {slowest.row.key}")
    for claim in failed:
        print(f"FAILED: {claim.name}: {claim.ours}" + (f", paper {claim.paper}" if claim.paper else ""))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
