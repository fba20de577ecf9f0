"""Progress of long work, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, TextIO

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # A notebook without ipywidgets gets a bar of text.
    from tqdm.auto import tqdm

_TICK = 1.0
"""Seconds after which the bar is written again without news, so that its clock keeps running."""


class Progress(tqdm):
    """Bar on standard error, in a notebook on standard output, that goes at the end; nothing if nobody watches.

        with Progress("measuring", total=3) as bar:   becomes   measuring, second: 2/3 |██████    | 00:01
            bar.step("first")
            bar.step("second")

    Args:
        title: what is being done.
        total: number of steps; None if unknown.
        shown: whether to show it; None shows it on a terminal and in a notebook.
        before: called before the bar is shown, because another line may be on the terminal.
        delay: seconds before anything is shown.
        settings: other arguments of tqdm.
    """

    monitor_interval = 0

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        shown: bool | None = None,
        before: Callable[[], object] | None = None,
        delay: float = 1.0,
        **settings: Any,
    ) -> None:
        self._before, self._closed = before, threading.Event()
        watched = _is_watched()
        super().__init__(
            desc=title,
            total=total,
            file=_stream(),
            leave=False,
            nrows=20,  # A terminal that doesn't know its size has none.
            miniters=0,
            delay=delay,
            disable=not (watched if shown is None else shown),
            bar_format="{desc}{postfix}: " + ("{n_fmt}/{total_fmt} |{bar}| " if total else "") + "{elapsed}",
            **settings,
        )
        if watched and not self.disable:
            threading.Thread(target=self._run, name="progress", daemon=True).start()

    def step(self, text: str = "") -> None:
        """Counts one more step as done and shows what comes next."""
        self.set_postfix_str(text, refresh=False)
        self.update()

    def at(self, text: str, share: float) -> None:
        """Shows progress as a share from 0 to 1 of ``total``, and the current work."""
        self.n = round(share * (self.total or 0)) - 1
        self.step(text)

    def say(self, text: str) -> None:
        """Writes a line that stays."""
        if not self.disable:
            self.write(text, file=self.fp)

    def tick(self) -> None:
        """Updates the bar's clock."""
        if self._time() >= self.start_t + self.delay:
            self.last_print_t = self._time()
            self.refresh()

    def display(self, *arguments: Any, **named: Any) -> Any:
        """Shows the bar as tqdm does, after a call of ``before`` the first time."""
        if self._before is not None:
            self._before()
            self._before = None
        return super().display(*arguments, **named)

    def close(self) -> None:
        """Removes the bar."""
        self._closed.set()
        self.total = None  # A notebook keeps a red bar if steps are missing.
        super().close()

    def _run(self) -> None:
        while not self._closed.wait(_TICK):
            self.tick()


def _is_watched() -> bool:
    """Whether a person sees the bar at once: on a terminal, or below a notebook's cell."""
    return sys.stderr.isatty() or _in_notebook(sys.stderr)


def _stream() -> TextIO:
    """Standard error, or a notebook's standard output: a notebook has errors on red."""
    return sys.stdout if _in_notebook(sys.stdout) else sys.stderr


def _in_notebook(stream: TextIO) -> bool:
    return type(stream).__module__.startswith("ipykernel.")
