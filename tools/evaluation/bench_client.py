"""What the client adds to a step on workers, and how much of a core it takes.

    python -m tools.evaluation.bench_client --json=docs/results/speed.json

Two workers train a model in two stages and data parallel, by ``train_on_batch`` and by ``fit``, for some rounds of some
steps each. Of each step are told

* *outside*: milliseconds in which TensorFlow wasn't running it: the client's Python before and behind the call of
  ``Session.run``'s C function, which is what a step would be shorter without it;
* *processor*: processor time of all threads of the client's process, TensorFlow's among them, which is the cluster's
  master there: it sends workers their parts of the step, and takes fetched values;
* *of a core*: that over the step's time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from absl import flags

import dapple_tf as dapple
from dapple_tf.progress import Progress
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_models import MODELS
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, write_results
from dapple_tf.tools.evaluation.ratios import quartiles, take_turns
from dapple_tf.tools.hosts import LocalWorkers
from graph_passes.ir.tensorflow_private import SESSION_RUN

FLAGS = flags.FlagValues()
_MODELS = flags.DEFINE_list("models", ["gpt:tiny", "gpt"], "Models to train.", flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 8, "Micro-batches of a step.", lower_bound=2, flag_values=FLAGS)
_SAMPLES = flags.DEFINE_integer("samples", 2, "Samples of a micro-batch.", lower_bound=1, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 8, "Rounds, with a turn of each way.", lower_bound=2, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 40, "Steps of a turn; of fit, of an epoch.", lower_bound=1, flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "File to write the numbers to.", flag_values=FLAGS)


class _Clock:
    """Seconds inside of ``Session.run``'s C function."""

    def __init__(self) -> None:
        self.inside = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts inside the context."""
        run = getattr(*SESSION_RUN)

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*args)
            finally:
                self.inside += time.perf_counter() - started

        with mock.patch.object(*SESSION_RUN, timed):
            yield


def turn(train: Callable[[], object]) -> dict[str, float]:
    """Runs a turn; returns milliseconds of a step, of it outside, and of processors."""
    clock = _Clock()
    with clock.running():
        began, processor = time.perf_counter(), time.process_time()
        train()
        seconds, busy = time.perf_counter() - began, time.process_time() - processor
    of_step = 1e3 / _STEPS.value
    return {"step": of_step * seconds, "outside": of_step * (seconds - clock.inside), "processor": of_step * busy}


def ways(stack: contextlib.ExitStack, name: str, cluster: dapple.Cluster) -> dict[str, Callable[[], object]]:
    """Returns functions that run a turn, by plan and method, each warm."""
    model, micro_batches, batch = MODELS[name], _MICRO_BATCHES.value, _MICRO_BATCHES.value * _SAMPLES.value
    plans = {
        "two stages": dapple.Plan.manual(model.cuts(2), [[0], [1]], micro_batches, batch),
        "data parallel": dapple.Plan.data_parallel(2, batch),
    }
    turns: dict[str, Callable[[], object]] = {}
    for plan_name, plan in plans.items():
        pipelined = dapple.transform(model.make(), cluster, plan)
        stack.callback(pipelined.close, sync=False)
        x, y = model.batch(batch)
        epoch_x, epoch_y = model.batch(batch * _STEPS.value)

        def by_batch(pipelined: Any = pipelined, x: Any = x, y: Any = y) -> None:
            for _ in range(_STEPS.value):
                pipelined.train_on_batch(x, y)

        def by_fit(pipelined: Any = pipelined, x: Any = epoch_x, y: Any = epoch_y, batch: int = batch) -> None:
            pipelined.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)

        turns |= {f"{plan_name}, train_on_batch": by_batch, f"{plan_name}, fit": by_fit}
    for run in turns.values():
        run()
    return turns


def measured(name: str, cluster: dapple.Cluster) -> list[dict[str, Any]]:
    """Returns a record for each way of a model."""
    with contextlib.ExitStack() as stack:
        turns = ways(stack, name, cluster)
        bar = Progress(name, _ROUNDS.value * len(turns), shown=True)
        seen: dict[str, list[dict[str, float]]] = {way: [] for way in turns}
        calls = {way: functools.partial(lambda way: seen[way].append(turn(turns[way])), way) for way in turns}
        take_turns(calls, _ROUNDS.value, lambda number, way: bar.step(f"round {number + 1}: {way}"))
        bar.close()
    return [
        {
            "model": name,
            "way": way,
            "micro_batches": _MICRO_BATCHES.value,
            "samples_of_micro_batch": _SAMPLES.value,
            "rounds": _ROUNDS.value,
            "steps": _STEPS.value,
            **{f"{key}_ms": quartiles([one[key] for one in own]) for key in ("step", "outside", "processor")},
            "of_a_core": quartiles([one["processor"] / one["step"] for one in own]),
        }
        for way, own in seen.items()
    ]


def table(records: list[dict[str, Any]]) -> str:
    """Returns medians with quartiles as Markdown."""
    head = ("model", "way", "step (ms)", "outside (ms)", "processor (ms)", "of a core")
    keys = ("model", "way", "step_ms", "outside_ms", "processor_ms", "of_a_core")
    return markdown([head, *(tuple(record[key] for key in keys) for record in records)])


def main() -> None:
    """Measures, prints the table and writes the file."""
    check_output(_JSON.value)
    command.check_choices(_MODELS, MODELS)
    records: list[dict[str, Any]] = []
    with LocalWorkers(2, echo=lambda worker, line: None) as workers:
        cluster = dapple.Cluster.of_servers(workers.addresses)
        for name in _MODELS.value:
            records += measured(name, cluster)
    sys.stdout.write(table(records) + "\n")
    if _JSON.value:
        write_results(_JSON.value, "client", records)


if __name__ == "__main__":
    command.start(main, FLAGS)
