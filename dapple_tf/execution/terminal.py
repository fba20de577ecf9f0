"""Output on the terminal: preparations' progress, warnings beside Keras' progress bar, without TensorFlow's noise."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from dapple_tf.common.progress import Progress
from dapple_tf.frontend.capture import Mode
from graph_passes.ir.program import Program
from graph_passes.pass_manager import Instrument, Pass, Timing

logger = logging.getLogger(__name__)

_NOISE = re.compile(
    rb"^[IW]\d{4} .*\b(?:(?:profiler_session|xplane_to_step_stats)\.cc:\d+\]|util\.cc:\d+\] Not handling type)"
)
"""Messages of TensorFlow's profiler, and of an optimizer that leaves float64 alone."""
_STDERR = 2
_redirected = threading.RLock()


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Hides messages of TensorFlow that mean nothing inside the context.

    They are written in C++, and can't be turned off after TensorFlow has been imported. Other output of C++ and of
    loggers appears at the end, output to Python's ``sys.stderr``, such as progress, at once.
    """
    with _redirected:
        try:
            terminal = os.dup(_STDERR)
        except OSError:  # There is no stderr.
            yield
            return
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), _STDERR)
            try:
                with _python_stderr(terminal):
                    yield
            finally:
                os.dup2(terminal, _STDERR)
                file.seek(0)
                with os.fdopen(terminal, "wb") as shown:
                    shown.writelines(line for line in file if not _NOISE.match(line))


@contextlib.contextmanager
def _python_stderr(terminal: int) -> Iterator[None]:
    """Lets ``sys.stderr`` go to a file descriptor inside the context, unless it has been replaced before."""
    if sys.stderr is not sys.__stderr__:
        yield
        return
    with os.fdopen(os.dup(terminal), "w", buffering=1) as stream, contextlib.redirect_stderr(stream):
        yield


_bars: list[bool] = []
"""For each call of Keras that shows its progress bar, the innermost last: whether the bar has been drawn."""


def batch_done() -> None:
    """Notes that Keras is about to draw its progress bar, if it does."""
    if _bars:
        _bars[-1] = True


def leave_progress_bar() -> None:
    """Begins a new line if Keras' progress bar is in the current one."""
    if _bars and _bars[-1]:
        sys.stdout.write("\n")
        sys.stdout.flush()


@contextlib.contextmanager
def beside_progress_bar(verbose: object) -> Iterator[None]:
    """Begins log messages on the terminal on a new line inside the context, as Keras' bar may be in the current one.

    Args:
        verbose: as for ``fit``; ``auto`` and 1 show the bar.
    """
    if verbose not in ("auto", 1):
        yield
        return
    _bars.append(False)

    def on_a_new_line(_: logging.LogRecord) -> bool:
        sys.stdout.write("\n")
        sys.stdout.flush()
        return True

    known = [*logging.getLogger().handlers, *logging.getLogger("dapple_tf").handlers, logging.lastResort]
    shown = [
        handler
        for handler in known
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)
    ]
    for handler in shown:
        handler.addFilter(on_a_new_line)
    try:
        yield
    finally:
        _bars.pop()
        for handler in shown:
            handler.removeFilter(on_a_new_line)


# ---- preparation of a step that runs for the first time

_PATIENCE = 2.0
"""Seconds before anything is shown."""
_TEXTS = {
    "build losses and metrics": "building losses and metrics",
    "capture": "capturing the model",
    "capture optimizer": "tracing the optimizer",
    "import": "adding the graph to the session",
    "load variables": "copying variables to the devices",
}
"""Part of the preparation -> its description."""
_NAMES = {Mode.TRAIN: "training", Mode.TEST: "evaluation", Mode.PREDICT: "prediction"}


class Preparation(Timing):
    """Keeps the seconds of all parts of a preparation, and reports what begins.

    Attributes:
        tell: called with a description of what begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[str], object] = _nobody

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Does what `Timing.part` does, and reports the part's beginning."""
        self.tell(_TEXTS.get(name, name))
        with super().part(name):
            yield

    def of_passes(self, passes: Sequence[Pass], first: int = 1) -> list[Instrument]:
        """Returns instruments for a run of passes whose first is about to begin."""

        def over(number: int, item: Pass, program: Program, seconds: float) -> None:
            following = passes[number - first + 1 :]
            if following:
                self._tell_pass(number + 1, following[0])

        self._tell_pass(first, passes[0])
        return [self, over]

    def _tell_pass(self, number: int, item: Pass) -> None:
        self.tell(f"pass {number}, {item.name}")

    @contextlib.contextmanager
    def shown(self, mode: Mode, samples: int) -> Iterator[None]:
        """Shows what begins on a terminal or in a notebook, after some seconds of preparation, and logs the total time.

        Args:
            mode: mode of the step that is prepared and run.
            samples: number of samples in its batch.
        """
        start = time.perf_counter()
        title = f"preparing {_NAMES[mode]} on batches of {samples}"
        with Progress(title, delay=_PATIENCE, before=leave_progress_bar) as bar:
            self.tell = bar.step
            try:
                yield
            finally:
                self.tell = _nobody
        logger.info("%s took %.1f s, its first step included", title, time.perf_counter() - start)


def _nobody(text: str) -> None:
    """Ignores a report."""
