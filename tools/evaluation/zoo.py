"""Trains third-party models as pipelines and with plain Keras, and compares every variable, slot and log.

    python -m tools.evaluation.zoo                            # all of them and 200 random models, some hours
    python -m tools.evaluation.zoo --models=ResNet50,GPT2 --draws=0
    python -m tools.evaluation.zoo --models= --draws=1000 --first_draw=200

Every architecture of keras.applications and of keras_hub that `zoo_models` knows trains in two stages, two
replicas and one, with 2 and 3 micro-batches, by Adam, AdamW with ``global_clipnorm`` and SGD, three steps each, in
float64 where plain Keras can; those of `zoo_libraries` train with their own losses by Adam, and are skipped where their
library isn't installed. Random models, and plans that mix all levels, come from `random_models`. docs/results/zoo.md,
written by ``--document`` from the numbers of ``--json``, explains the columns. The exit code is 1 if anything differs
without a reason that `transform` has given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, read_results, write_results
from dapple_tf.tools.evaluation.document import TEMPLATES, fill
from dapple_tf.tools.evaluation.random_models import compare_draw
from dapple_tf.tools.evaluation.training_comparison import Batch, compare_training
from dapple_tf.tools.evaluation.zoo_libraries import LIBRARIES
from dapple_tf.tools.evaluation.zoo_models import ARCHITECTURES, Architecture, narrowest, normalizes_batches

MODELS: Mapping[str, Architecture] = {**ARCHITECTURES, **LIBRARIES}

FLAGS = flags.FlagValues()
_MODELS = flags.DEFINE_list("models", list(MODELS), "Architectures to train.", flag_values=FLAGS)
_DRAWS = flags.DEFINE_integer("draws", 200, "Number of random models to train.", lower_bound=0, flag_values=FLAGS)
_FIRST = flags.DEFINE_integer("first_draw", 0, "Seed of the first random model.", lower_bound=0, flag_values=FLAGS)
_JSON = flags.DEFINE_string(
    "json", None, "JSON file to write the numbers to; those of other models there stay.", flag_values=FLAGS
)
_DOCUMENT = flags.DEFINE_string("document", None, "Page to write the numbers of --json to.", flag_values=FLAGS)
_CHILD = flags.DEFINE_string(
    "child", None, "Internal: this process trains an architecture, or draws: FIRST+NUMBER.", flag_values=FLAGS
)

_SEED = 3
_STEPS = 3
_DISTINCT = 2
"""Number of samples in each slice of a model that normalises batches."""
_DRAWS_AT_ONCE = 50
_MICRO_BATCHES = (2, 3)

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


def drawn_rows(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Trains random models; yields a row for each."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    for seed in range(first, first + count):
        began = time.monotonic()
        about, result = compare_draw(seed)
        seconds = round(time.monotonic() - began, 1)
        yield {"seed": seed, "about": about, **dataclasses.asdict(result), "seconds": seconds}


def rows_apart(work: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a process with ``--child``, whose memory is freed afterwards.

    Raises:
        RuntimeError: it failed; its output has gone to standard error.
    """
    line = [sys.executable, "-m", "tools.evaluation.zoo", f"--child={work}"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"the process of {work} ended with code {process.returncode}")


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
    """Returns docs/results/zoo.md: the trained models, and the results."""
    rows = [row for name, entry in results.items() if name.startswith("zoo ") for row in entry["records"]]
    drawn = results.get("draws", {"records": [], "commit": "none"})
    draws = sorted(drawn["records"], key=lambda row: row["seed"])
    parts = {family: [row for row in rows if row["family"] == family] for family in ("applications", "keras_hub")}
    parts["libraries"] = [row for row in rows if row["family"] not in parts]
    texts = {f"table:{part}": markdown([_HEADS, *summary(own)]) for part, own in parts.items()}
    for part, own in (parts | {"draws": draws}).items():
        texts[f"count:{part}"] = f"{sum(row['verdict'] == 'equal' for row in own)} of {len(own)}"
    others = [
        (row["seed"], row["about"], row["verdict"], _shown(row["difference"]), row["where"])
        for row in draws
        if row["verdict"] != "equal"
    ]
    texts |= {"table:draws": markdown([_DRAW_HEADS, *others]), "commit:draws": str(drawn["commit"])}
    return fill((TEMPLATES / "zoo.md").read_text(encoding="utf-8"), texts)


def _shown(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.0e}"


def _write_rows(work: str) -> None:
    """Trains, and writes a line of JSON for each training."""
    logging.getLogger("dapple_tf").setLevel(logging.ERROR)
    first, drawn, count = work.partition("+")
    rows = drawn_rows(int(first), int(count)) if drawn else rows_of(work, _MICRO_BATCHES, list(OPTIMIZERS))
    rows_out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # Some libraries print.
        for row in rows:
            rows_out.write(json.dumps(row) + "\n")
            rows_out.flush()


def _keep(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the rows of a process to the file, draws beside other seeds'."""
    if "seed" not in rows[0]:
        write_results(path, f"zoo {rows[0]['model']}", rows)
        return
    earlier = read_results(path) if pathlib.Path(path).exists() else {}
    draws = {row["seed"]: row for row in (*earlier.get("draws", {"records": []})["records"], *rows)}
    write_results(path, "draws", list(draws.values()))


def main() -> None:
    """Trains the models of the flags, prints the table, and writes the document."""
    if _CHILD.value is not None:
        _write_rows(_CHILD.value)
        return
    command.check_choices(_MODELS, MODELS, empty=True)
    check_output(_JSON.value)
    command.check(_DOCUMENT.value is None or _JSON.value is not None, "--document shows what --json holds; give both")
    began, rows, failures = time.monotonic(), list[dict[str, Any]](), list[str]()
    skipped = [name for name in _MODELS.value if importlib.util.find_spec(MODELS[name].library) is None]
    for name in skipped:
        command.say(f"{name}: skipped, as {MODELS[name].library} isn't installed: pip install 'dapple_tf[zoo]'", began)
    stop = _FIRST.value + _DRAWS.value
    starts = range(_FIRST.value, stop, _DRAWS_AT_ONCE)
    draws = [f"{seed}+{min(_DRAWS_AT_ONCE, stop - seed)}" for seed in starts]
    for work in (*(name for name in _MODELS.value if name not in skipped), *draws):
        own: list[dict[str, Any]] = []
        try:
            for row in rows_apart(work):
                own.append(row)
                what = row["about"] if "seed" in row else f"M = {row['micro_batches']}, {row['optimizer']}"
                command.say(f"{row.get('seed', work)}: {what}: {row['verdict']} {_shown(row['difference'])}", began)
        except RuntimeError as error:
            failures.append(str(error))
            command.say(str(error), began)
        rows += own
        if _JSON.value and own:
            _keep(_JSON.value, own)
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
