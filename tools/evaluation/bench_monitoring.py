"""Measures what `dapple.PipelineMonitor` costs: steps with it beside steps without, in turns of a few steps.

    python -m tools.evaluation.bench_monitoring                       # 8 transformer blocks in 2 stages
    python -m tools.evaluation.bench_monitoring --rounds=100 --steps=5 --width=64

One pipelined model trains in short fits, every other of which has the monitor, so that both find the machine in the
same state. Printed are the ratios of these fits' times in each round without a traced step (what the monitor costs in
every step), and what traced steps took more than the others: that part of all time is held to the budget.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import keras
from absl import flags

import dapple_tf as dapple
from dapple_tf.progress import Progress
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_gpt import gpt_size, make_data, make_model
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.ratios import quartiles

FLAGS = flags.FlagValues()

_DEPTH = flags.DEFINE_integer("depth", 8, "Transformer blocks.", lower_bound=2, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer(
    "width", 96, "Size of the residual stream; a multiple of 4.", lower_bound=4, flag_values=FLAGS
)
_SEQUENCE = flags.DEFINE_integer("sequence", 64, "Tokens of a sample.", lower_bound=1, flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 4, "Micro-batches.", lower_bound=1, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 5, "Steps of each turn.", lower_bound=1, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 60, "Rounds, each of one turn with the monitor and one without.", lower_bound=2, flag_values=FLAGS
)
_JSON = flags.DEFINE_string("json", None, "Where to write the numbers, too.", flag_values=FLAGS)

_BATCH = 32
_BUDGET = 0.01
"""Default budget of the monitor."""


class _Times(keras.callbacks.Callback):
    """Seconds of each step, and whether it was traced."""

    def __init__(self, monitor: dapple.PipelineMonitor | None) -> None:
        super().__init__()
        self.plain: list[float] = []
        self.traced: list[float] = []
        self._monitor = monitor

    def _traces(self) -> int:
        return 0 if self._monitor is None else self._monitor.budget.traces

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._before, self._started = self._traces(), time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops it."""
        seconds = time.perf_counter() - self._started
        (self.traced if self._traces() > self._before else self.plain).append(seconds)


def measure() -> dict[str, Any]:
    """Returns the numbers."""
    size = gpt_size(_DEPTH.value, _WIDTH.value, _SEQUENCE.value)
    middle = f"block_{_DEPTH.value // 2 - 1}"
    plan = dapple.Plan.manual([middle], [[0], [1]], _MICRO_BATCHES.value, _BATCH)
    pipelined = dapple.transform(make_model(size), dapple.Cluster.local(2, kind="cpu"), plan)
    x, y = make_data(size, _STEPS.value * _BATCH)
    monitor = dapple.PipelineMonitor(tokens_per_sample=_SEQUENCE.value)
    ratios: list[float] = []
    without: list[float] = []
    with_it: list[float] = []
    traced: list[float] = []
    bar = Progress("training in turns", _ROUNDS.value + 1, shown=True)
    for number in range(_ROUNDS.value + 1):
        turns: list[_Times] = []
        for watched in (False, True) if number % 2 else (True, False):
            times = _Times(monitor if watched else None)
            pipelined.fit(x, y, epochs=1, verbose=0, callbacks=[times, *([monitor] if watched else [])])
            turns.insert(watched * len(turns), times)
        bar.step(f"{monitor.budget.traces} traced")
        if number == 0:
            continue  # It makes the graphs.
        plain, watched_times = turns
        without += plain.plain
        with_it += watched_times.plain
        traced += watched_times.traced
        if not watched_times.traced:
            ratios.append(sum(watched_times.plain) / sum(plain.plain))
    bar.close()
    pipelined.close()
    share = monitor.budget.spent / monitor.budget.trained
    ratio = quartiles(ratios)
    step = statistics.median(without)
    return {
        "step_ms": 1e3 * step,
        "bookkeeping_us": _bookkeeping(monitor),
        "ratio": ratio,
        "ratio_of_medians": statistics.median(with_it) / step,
        "steps_with_monitor": len(with_it) + len(traced),
        "traced_steps": len(traced),
        "traced_ms": [1e3 * seconds for seconds in traced],
        "accounted_share": share,
        "traced_share": sum(seconds - step for seconds in traced) / sum([*with_it, *traced]),
        "traces": monitor.budget.traces,
    }


def _bookkeeping(monitor: dapple.PipelineMonitor, count: int = 2000) -> float:
    """Returns the microseconds that the monitor takes in an untraced step."""
    started = time.perf_counter()
    for _ in range(count):  # as `PipelinedModel` does after each step
        monitor.stepped(_BATCH, 0.1, 1e-3)
        dict[str, Any]() | monitor.latest
    return 1e6 * (time.perf_counter() - started) / count


def main() -> None:
    """Prints them."""
    check_output(_JSON.value)
    row = measure()
    ratio = row["ratio"]
    lines = [
        f"step without the monitor: {row['step_ms']:.4g} ms (median)",
        f"steps with it that aren't traced: {ratio.median:.4f} times as long (quartiles {ratio.low:.4f} to "
        f"{ratio.high:.4f} over rounds; ratio of all medians {row['ratio_of_medians']:.4f})",
        f"bookkeeping in each step: {row['bookkeeping_us']:.3g} us",
        f"traced: {row['traces']} steps in all; of {row['steps_with_monitor']} that count {row['traced_steps']}, "
        f"taking {', '.join(f'{ms:.4g}' for ms in row['traced_ms']) or 'no'} ms with reading the trace",
        f"extra time of traced steps: {row['traced_share']:.2%} of all steps with the monitor, which accounts "
        f"for {row['accounted_share']:.2%}; its budget is {_BUDGET:.2%}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if _JSON.value:
        write_results(_JSON.value, "monitoring", [row])


if __name__ == "__main__":
    command.start(main, FLAGS)
