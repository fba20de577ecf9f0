"""Trains third-party models as pipelines and with plain Keras, and compares every variable, slot and log.

    python -m tools.evaluation.zoo                            # all of them and 200 random models, some hours
    python -m tools.evaluation.zoo --models=ResNet50,GPT2 --draws=0
    python -m tools.evaluation.zoo --models= --draws=1000 --first_draw=200
    python -m tools.evaluation.zoo --models= --draws=0 --plans=100    # random plans that mix all levels, 20 minutes

Every architecture of keras.applications and of keras_hub that `zoo_models` knows trains in two stages, two
replicas and one, with 2 and 3 micro-batches, by Adam, AdamW with ``global_clipnorm`` and SGD, three steps each, in
float64 where plain Keras can; those of `zoo_libraries` train with their own losses by Adam, and are skipped where their
library isn't installed. Random models come from `random_models`, plans that mix all levels from `random_plans`; these
are in the JSON, not on the page. docs/zoo.md, written by ``--document`` from the numbers of ``--json``, explains the
columns. The exit code is 1 if anything differs without a reason that `transform` has given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, read_results, rows_apart, write_results
from dapple_tf.tools.evaluation.random_models import compare_draw
from dapple_tf.tools.evaluation.random_plans import compare_plan
from dapple_tf.tools.evaluation.training_comparison import Batch, Comparison, compare_training
from dapple_tf.tools.evaluation.zoo_libraries import LIBRARIES
from dapple_tf.tools.evaluation.zoo_models import ARCHITECTURES, Architecture, narrowest, normalizes_batches

MODELS: Mapping[str, Architecture] = {**ARCHITECTURES, **LIBRARIES}

FLAGS = flags.FlagValues()
_MODELS = flags.DEFINE_list("models", list(MODELS), "Architectures to train.", flag_values=FLAGS)
_DRAWS = flags.DEFINE_integer("draws", 200, "Number of random models to train.", lower_bound=0, flag_values=FLAGS)
_FIRST = flags.DEFINE_integer("first_draw", 0, "Seed of the first random model.", lower_bound=0, flag_values=FLAGS)
_PLANS = flags.DEFINE_integer("plans", 0, "Number of random mixed plans.", lower_bound=0, flag_values=FLAGS)
_FIRST_PLAN = flags.DEFINE_integer("first_plan", 0, "Seed of the first mixed plan.", lower_bound=0, flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_list("micro_batches", ["2", "3"], "Numbers of micro-batches.", flag_values=FLAGS)
_OPTIMIZERS = flags.DEFINE_list("optimizers", ["adam", "adamw", "sgd"], "Optimizers to train with.", flag_values=FLAGS)
_JSON = flags.DEFINE_string(
    "json", None, "JSON file to write the numbers to; those of other models there stay.", flag_values=FLAGS
)
_DOCUMENT = flags.DEFINE_string("document", None, "Page to write the numbers of --json to.", flag_values=FLAGS)
_CHILD = flags.DEFINE_string(
    "child", None, "Internal: this process trains one architecture, draws or plans.", flag_values=FLAGS
)

_SEED = 3
_STEPS = 3
_DISTINCT = 2
"""Number of samples in each slice of a model that normalises batches."""
_DRAWS_AT_ONCE = 50
_COMPARISONS: Mapping[str, Callable[[int], tuple[str, Comparison]]] = {"draws": compare_draw, "plans": compare_plan}
"""What is drawn, by its name in the JSON file -> function that trains what a seed gives."""

OPTIMIZERS: Mapping[str, Callable[[], keras.optimizers.Optimizer]] = {
    "adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-4),
    "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01, epsilon=1e-4, global_clipnorm=0.5),
    "sgd": lambda: keras.optimizers.SGD(1e-2),
}


def compiled(architecture: Architecture, optimizer: str) -> keras.Model:
    """Returns the compiled model with its values; ``optimizer`` is for models that aren't compiled by themselves."""
    model = architecture.build(_SEED)
    if not model.compiled:
        losses = "mse" if len(model.outputs) == 1 else ["mse"] * len(model.outputs)
        model.compile(OPTIMIZERS[optimizer](), losses, jit_compile=False)
    return model


def batches(architecture: Architecture, model: keras.Model, micro_batches: int) -> list[Batch]:
    """Returns a batch for each step.

    With BatchNormalization each slice has the same samples, each time in another order: all slices then have the
    statistics of the whole batch (docs/equivalence.md), so that the result must equal plain Keras'. Other
    batches don't divide evenly.
    """
    rng = np.random.default_rng(_SEED)
    if not normalizes_batches(model):
        samples = 3 * micro_batches + 1
        return [(*architecture.batch(model, rng, samples), None) for _ in range(_STEPS)]
    trees = [architecture.batch(model, rng, _DISTINCT) for _ in range(_STEPS)]
    slices = 2 * micro_batches
    order = np.concatenate([rng.permutation(_DISTINCT) for _ in range(slices)])
    return [(*keras.tree.map_structure(lambda array: array[order], tree), None) for tree in trees]


def rows_of(name: str, micro_batches: Sequence[int], optimizers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Trains an architecture in all configurations; yields a row for each."""
    architecture = MODELS[name]
    keras.config.set_floatx(architecture.dtype)
    keras.config.set_dtype_policy(architecture.dtype)
    for count in micro_batches:
        model = architecture.build(_SEED)
        data = batches(architecture, model, count)
        samples = len(keras.tree.flatten(data[0][0])[0])
        rounding = narrowest(model, data[0][0], architecture.dtype)
        cut = architecture.middle(model)

        def transform(own: keras.Model, count: int = count, samples: int = samples) -> dapple.PipelinedModel:
            plan = dapple.Plan.manual([architecture.middle(own)], [[0, 1], [2]], count, samples)
            return dapple.transform(own, dapple.Cluster.local(3, kind="cpu"), plan)

        for optimizer in [type(model.optimizer).__name__.lower()] if model.compiled else optimizers:
            began = time.monotonic()
            result = compare_training(
                functools.partial(compiled, architecture, optimizer),
                transform,
                data,
                train=architecture.train,
                dtype=rounding,
            )
            yield {
                "model": name,
                "family": architecture.family,
                "cut": cut,
                "micro_batches": count,
                "optimizer": optimizer,
                "dtype": rounding,
                **dataclasses.asdict(result),
                "seconds": round(time.monotonic() - began, 1),
            }


def drawn_rows(what: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    """Trains random models, or by random plans; yields a row for each."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    for seed in range(first, first + count):
        began = time.monotonic()
        about, result = _COMPARISONS[what](seed)
        seconds = round(time.monotonic() - began, 1)
        yield {"seed": seed, "about": about, **dataclasses.asdict(result), "seconds": seconds}


# ---- showing


def summary(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row for each architecture: the number of equal trainings, and the largest difference."""
    cells: list[tuple[str, ...]] = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        verdicts = [row["verdict"] for row in own]
        told = {row["where"] for row in own if row["verdict"] != "equal"}
        known = [row["difference"] for row in own if row["difference"] is not None]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        worst = f"{max(known):.0e}" if known else ""
        cells.append((name, own[0]["cut"], own[0]["dtype"], counts, worst, "; ".join(sorted(told))))
    return cells


_HEADS = ("model", "cut after", "dtype", "trainings", "largest difference", "what was told")
_DRAW_HEADS = ("seed", "model and plan", "verdict", "difference", "what was told")


def document(results: Mapping[str, Any]) -> str:
    """Returns docs/zoo.md: the trained models, and the results."""
    rows = [row for name, entry in results.items() if name.startswith("zoo ") for row in entry["records"]]
    draws = sorted((row for row in results.get("draws", {"records": []})["records"]), key=lambda row: row["seed"])
    parts = [_INTRODUCTION]
    for family in _TITLES:
        own = [row for row in rows if (row["family"] if row["family"] in _TITLES else _OTHERS) == family]
        equal = sum(row["verdict"] == "equal" for row in own)
        parts.append(f"## {_TITLES[family]}\n\n{equal} of {len(own)} trainings are equal.\n")
        parts.append(markdown([_HEADS, *summary(own)]) + "\n")
    equal = sum(row["verdict"] == "equal" for row in draws)
    parts.append(f"## Random models\n\n{equal} of {len(draws)} are equal; the others:\n")
    others = [
        (row["seed"], row["about"], row["verdict"], _shown(row["difference"]), row["where"])
        for row in draws
        if row["verdict"] != "equal"
    ]
    parts.append(markdown([_DRAW_HEADS, *others]) + "\n" if others else "None.\n")
    return "\n".join(parts)


_OTHERS = "libraries"
_TITLES = {"applications": "keras.applications", "keras_hub": "keras_hub", _OTHERS: "Other libraries"}
_INTRODUCTION = """# Models that nobody here wrote

Written by `python -m tools.evaluation.zoo` (`make zoo`) from [results/zoo.json](results/zoo.json), which has facts
about the machine. Each architecture trains for three steps, pipelined and by plain Keras from the same values: cut in
two stages where half of its parameters are reached, with two replicas and one, 2 and 3 micro-batches, by Adam, AdamW
with `global_clipnorm`, and SGD. Models of other libraries train as their own documents do, with their losses and
metrics, by Adam. Compared are all variables, all slots of the optimizer, and the logs of each step.

* *equal*: no value differs by more than 1e-8 (float32: 1e-4) of the largest change that training made to its array, or
  of a hundredth of the array's largest value, which rounding is relative to, if that is more.
* *listed*: it differs, and `transform` has said why.
* *refused*: by an error that says why.
* *differs*, *failed*: defects.

float32 stands where plain Keras doesn't train the model in float64, or layers compute in float32 whatever the model's
type is. Random layers are turned off, as draws belong to slices; models with BatchNormalization get batches whose
slices have the same statistics (see [equivalence.md](equivalence.md)), and an epsilon of 0.1: rounding has no bounds
where variances vanish. Random models are those of `tools/evaluation/random_models.py`; a seed gives one again, 7 for
instance: `python -m tools.evaluation.zoo --models= --first_draw=7 --draws=1`.
"""


def _shown(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.0e}"


def _child(child: str, micro_batches: Sequence[int], optimizers: Sequence[str]) -> Iterator[dict[str, Any]]:
    what, separator, seeds = child.partition("=")
    if not separator:
        return rows_of(child, micro_batches, optimizers)
    first, _, count = seeds.partition("+")
    return drawn_rows(what, int(first), int(count))


def _drawn_children(what: str, first: int, count: int) -> list[str]:
    """Returns the arguments of the processes that train ``count`` draws from the seed ``first`` on."""
    stop = first + count
    return [f"{what}={seed}+{min(_DRAWS_AT_ONCE, stop - seed)}" for seed in range(first, stop, _DRAWS_AT_ONCE)]


def _earlier(path: str | None, what: str) -> list[dict[str, Any]]:
    if path is None or not pathlib.Path(path).exists():
        return []
    return list(read_results(path).get(what, {"records": []})["records"])


def main() -> None:
    """Trains the models of the flags, prints the table, and writes the document."""
    counts = _MICRO_BATCHES.value
    command.check(bool(counts) and all(c.isdigit() and int(c) > 0 for c in counts), "--micro_batches: need numbers")
    command.check_choices(_OPTIMIZERS, OPTIMIZERS)
    if _CHILD.value is not None:
        logging.getLogger("dapple_tf").setLevel(logging.ERROR)
        rows_out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):  # Some libraries print.
            for row in _child(_CHILD.value, [*map(int, counts)], _OPTIMIZERS.value):
                rows_out.write(json.dumps(row) + "\n")
                rows_out.flush()
        return
    command.check_choices(_MODELS, MODELS, empty=True)
    check_output(_JSON.value)
    command.check(_DOCUMENT.value is None or _JSON.value is not None, "--document shows what --json holds; give both")
    draws = _drawn_children("draws", _FIRST.value, _DRAWS.value)
    draws += _drawn_children("plans", _FIRST_PLAN.value, _PLANS.value)
    began, rows = time.monotonic(), list[dict[str, Any]]()
    failures: list[str] = []
    ways = [f"--micro_batches={','.join(counts)}", f"--optimizers={','.join(_OPTIMIZERS.value)}"]
    skipped = [name for name in _MODELS.value if importlib.util.find_spec(MODELS[name].library) is None]
    for name in skipped:
        command.say(f"{name}: skipped, as {MODELS[name].library} isn't installed: pip install 'dapple_tf[zoo]'", began)
    for child in (*(name for name in _MODELS.value if name not in skipped), *draws):
        own: list[dict[str, Any]] = []
        try:
            for row in rows_apart("tools.evaluation.zoo", f"--child={child}", *ways):
                own.append(row)
                what = row["about"] if "seed" in row else f"M = {row['micro_batches']}, {row['optimizer']}"
                command.say(f"{row.get('seed', child)}: {what}: {row['verdict']} {_shown(row['difference'])}", began)
        except RuntimeError as error:
            failures.append(str(error))
            command.say(str(error), began)
        rows += own
        if _JSON.value and own:
            if child in MODELS:
                write_results(_JSON.value, f"zoo {child}", own)
            else:
                what = child.partition("=")[0]
                drawn = {row["seed"]: row for row in (*_earlier(_JSON.value, what), *own)}
                write_results(_JSON.value, what, list(drawn.values()))
    failures += [
        f"{row.get('model', row.get('seed'))}: {row['verdict']}: {row['where']}"
        for row in rows
        if row["verdict"] in ("differs", "failed")
    ]
    sys.stdout.write(markdown([_HEADS, *summary([row for row in rows if "model" in row])]) + "\n")
    sys.stdout.write(f"{len(skipped)} skipped, as their libraries aren't installed.\n" if skipped else "")
    if _DOCUMENT.value:
        pathlib.Path(_DOCUMENT.value).write_text(document(read_results(_JSON.value)), encoding="utf-8")
    if failures:
        sys.stdout.write("FAILED:\n" + "".join(f"  {text}\n" for text in failures))
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
