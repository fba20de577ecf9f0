"""Progress of long work, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_PATIENCE = 1.0
"""Seconds before anything is shown."""
_INTERVAL = 0.1
"""Seconds between two updates."""
_TICK = 1.0
"""Seconds after which the line is written again without news, so that its clock keeps running."""


class Progress:
    """One line on standard error that is rewritten as work goes on; nothing if nobody watches standard error.

        with Progress("measuring", total=3) as bar:   becomes   measuring 2/3: second (1 s)
            bar.step("first")
            bar.step("second")

    Args:
        title: what is being done.
        total: number of steps; None if unknown.
        shown: whether to show it; None shows it on a terminal and in a notebook.
        patience: seconds before anything is shown.
        before: called before the line is shown, because another line may be on the terminal.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        shown: bool | None = None,
        patience: float | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        self.title, self.total = title, total
        self._watched = _is_watched()
        self._shown = self._watched if shown is None else shown
        self._patience, self._before = _PATIENCE if patience is None else patience, before
        self._started = time.monotonic()
        self._updated = 0.0
        self._text = ""
        self._width = 0
        self._lock = threading.RLock()
        self._closed: threading.Event | None = None  # ends the thread that keeps the clock going; None without one
        self.done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, text: str = "", *, now: bool = False) -> None:
        """Counts one more step as done and shows what comes next; at once if ``now``, because that takes long."""
        with self._lock:
            self.done += 1
            self._text = text
            if not self._shown:
                return
            time_is_up = time.monotonic() - self._started >= self._patience
            if now or (time_is_up and time.monotonic() - self._updated >= _INTERVAL):
                self._show()
            self._keep_ticking()

    def say(self, text: str) -> None:
        """Writes a line that stays on the terminal."""
        if self._shown:
            with self._lock:
                self.close()
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()

    def at(self, text: str, share: float) -> None:
        """Shows how far the work is, as a share from 0 to 1 of ``total``, and what is being done."""
        self.done = round(share * (self.total or 0)) - 1
        self.step(text)

    def close(self) -> None:
        """Removes the line."""
        with self._lock:
            if self._closed is not None:
                self._closed.set()
                self._closed = None
            if self._width:
                sys.stderr.write("\r" + " " * self._width + "\r")
                sys.stderr.flush()
                self._width = 0

    def tick(self) -> None:
        """Updates the line's clock."""
        with self._lock:
            if time.monotonic() - self._started >= self._patience:
                self._show()

    def _show(self) -> None:
        if not self._width and self._before is not None:
            self._before()
        self._updated = time.monotonic()
        count = f" {self.done}/{self.total}" if self.total else ""
        line = f"{self.title}{count}: {self._text} ({self._updated - self._started:.0f} s)"
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

    def _keep_ticking(self) -> None:
        """Starts the thread that updates the clock during long steps, unless it runs or nobody watches."""
        if self._watched and self._closed is None:
            self._closed = threading.Event()
            threading.Thread(target=self._run, args=(self._closed,), name="progress", daemon=True).start()

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(_TICK):
            with self._lock:
                if not closed.is_set():
                    self.tick()


def _is_watched() -> bool:
    """Whether a person sees standard error at once: on a terminal, or below a notebook's cell."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
