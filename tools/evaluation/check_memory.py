"""Compares the memory that the simulator expects with what devices hold in real training, for every schedule policy.

    python -m tools.evaluation.check_memory --models=mlp,gpt,resnet --steps=9 --output=memory.json

Each model is profiled once and trained by each policy on logical CPU devices. The measured peak of a device is that of
the allocation records of a traced step, on top of what lies there between steps: variables, the optimizer's slots and
gradient accumulators. It is the median of several steps.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from absl import app, flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.memory_of_steps import MODELS, POLICIES, check, summary, table

FLAGS = flags.FlagValues()

_MODELS = flags.DEFINE_list(
    "models", ["mlp", "gpt", "resnet"], "which of mlp, gpt and resnet to train", flag_values=FLAGS
)
_POLICIES = flags.DEFINE_list("policies", [], "which policies to train with; none for all", flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 9, "traced steps of each policy", lower_bound=1, flag_values=FLAGS)
_REPEATS = flags.DEFINE_integer("repeats", 5, "how often the profiler measures times", lower_bound=1, flag_values=FLAGS)
_CACHE = flags.DEFINE_bool("cache", False, "take profiles from the cache if they are there", flag_values=FLAGS)
_TOLERANCE = flags.DEFINE_float("tolerance", 0.1, "largest error that passes", lower_bound=0.0, flag_values=FLAGS)
_OUTPUT = flags.DEFINE_string("output", None, "write the numbers to this JSON file, too", flag_values=FLAGS)


def main() -> None:
    """Runs the comparison; ends with 1 if an error is above the tolerance."""
    for name, given, known in (("models", _MODELS.value, MODELS), ("policies", _POLICIES.value, POLICIES)):
        if unknown := sorted(set(given) - set(known)):
            raise app.UsageError(f"--{name}: {', '.join(unknown)} unknown; choose from {', '.join(known)}")
    if not _MODELS.value:
        raise app.UsageError(f"--models is empty; choose from {', '.join(MODELS)}")
    if _OUTPUT.value and not pathlib.Path(_OUTPUT.value).parent.is_dir():
        raise app.UsageError(f"--output={_OUTPUT.value}: no such folder")
    rows: list[dict[str, Any]] = []
    for name in _MODELS.value:
        policies = _POLICIES.value or list(POLICIES)
        for row in check(name, policies, _STEPS.value, repeats=_REPEATS.value, cache=_CACHE.value):
            rows.append(row)
            if _OUTPUT.value:  # What has been measured is kept, whatever comes.
                pathlib.Path(_OUTPUT.value).write_text(json.dumps(rows, indent=1) + "\n")
        sys.stdout.write(table(row for row in rows if row["model"] == name) + "\n")
    sys.stdout.write(summary(rows) + "\n")
    largest = max(abs(row["error"]) for row in rows)
    sys.stdout.write(f"largest error {largest:.1%}, tolerance {_TOLERANCE.value:.0%}\n")
    if largest > _TOLERANCE.value:
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
