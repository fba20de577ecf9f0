"""Output beside Keras' progress bar: warnings get their own lines, and messages of TensorFlow's profiler are hidden."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator

_PROFILER = re.compile(rb"^[IW]\d{4} .*\b(?:profiler_session|xplane_to_step_stats)\.cc:\d+\]")
_STDERR = 2
_redirected = threading.Lock()


@contextlib.contextmanager
def without_profiler_lines() -> Iterator[None]:
    """Hides the messages of TensorFlow's profiler inside the context; other output to stderr appears at its end.

    The messages are written in C++, and can't be turned off after TensorFlow has been imported.
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
                yield
            finally:
                os.dup2(terminal, _STDERR)
                file.seek(0)
                with os.fdopen(terminal, "wb") as shown:
                    shown.writelines(line for line in file if not _PROFILER.match(line))


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
