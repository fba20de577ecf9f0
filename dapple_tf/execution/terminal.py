"""Output on the terminal: warnings beside Keras' progress bar get their own lines, TensorFlow's noise is hidden."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator

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
