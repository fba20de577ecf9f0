"""Progress of long work, on a terminal or in a notebook: libraries don't print, but nobody should wait in the dark."""

from __future__ import annotations

import sys
import time

_PATIENCE = 1.0
"""Seconds before anything is shown."""
_INTERVAL = 0.1
"""Seconds between two updates."""


class Progress:
    """One line on standard error that is rewritten as work goes on; nothing if nobody watches that.

        with Progress("measuring", total=3) as bar:   becomes   measuring 2/3: second (1 s)
            bar.step("first")
            bar.step("second")

    Args:
        title: what is being done.
        total: how many steps there are; None if that isn't known.
        shown: whether to show it; None shows it on a terminal and in a notebook.
    """

    def __init__(self, title: str, total: int | None = None, *, shown: bool | None = None) -> None:
        self.title, self.total = title, total
        self._shown = _is_watched() if shown is None else shown
        self._started = time.monotonic()
        self._updated = 0.0
        self._width = 0
        self.done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, text: str = "", *, now: bool = False) -> None:
        """Tells that one more step is done, and what comes; that it is long, with ``now``, which waits for nothing."""
        self._step(text, soon=now)

    def say(self, text: str) -> None:
        """Leaves a line in the terminal."""
        if self._shown:
            self.close()
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _step(self, text: str, soon: bool) -> None:
        self.done += 1
        now = time.monotonic()
        if not self._shown:
            return
        if not soon and (now - self._started < _PATIENCE or now - self._updated < _INTERVAL):
            return
        self._updated = now
        count = f" {self.done}/{self.total}" if self.total else ""
        line = f"{self.title}{count}: {text} ({now - self._started:.0f} s)"
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

    def at(self, text: str, share: float) -> None:
        """Tells how far it is: a share from 0 to 1 of ``total``, and what is being done."""
        self.done = round(share * (self.total or 0)) - 1
        self.step(text)

    def close(self) -> None:
        """Removes the line."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


def _is_watched() -> bool:
    """Whether somebody sees standard error at once: on a terminal, or below a notebook's cell."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
