"""What is being prepared for a step that runs for the first time: told where somebody watches, and logged."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dapple_tf.execution.terminal import leave_progress_bar
from dapple_tf.frontend.capture import Mode
from dapple_tf.progress import Progress
from graph_passes.pass_manager import Instrument, Timing

if TYPE_CHECKING:
    from graph_passes.ir.program import Program
    from graph_passes.pass_manager import Pass

logger = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds before anything is shown."""
_TEXTS = {
    "build losses and metrics": "building losses and metrics",
    "capture": "capturing the model",
    "capture optimizer": "tracing the optimizer",
    "import": "adding the graph to the session",
    "load variables": "copying variables to the devices",
}
"""Part of the preparation -> what is said of it."""
_NAMES = {Mode.TRAIN: "training", Mode.TEST: "evaluation", Mode.PREDICT: "prediction"}


class Preparation(Timing):
    """Keeps the seconds of all that is prepared, and tells what begins.

    Attributes:
        tell: is told what begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[str], object] = _nobody

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """As `Timing.part`; tells that it begins."""
        self.tell(_TEXTS.get(name, name))
        with super().part(name):
            yield

    def of_passes(self, passes: Sequence[Pass], first: int = 1) -> list[Instrument]:
        """Instruments for a run of passes, of which the first is about to begin."""

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
        """Within it, what begins is shown on a terminal or in a notebook, once it has taken some seconds; then logged.

        Args:
            mode: of the step that is prepared, and run.
            samples: of its batch.
        """
        start = time.perf_counter()
        title = f"preparing {_NAMES[mode]} on batches of {samples}"
        with Progress(title, patience=_PATIENCE, before=leave_progress_bar) as bar:
            self.tell = bar.step
            try:
                yield
            finally:
                self.tell = _nobody
        logger.info("%s took %.1f s, its first step included", title, time.perf_counter() - start)


def _nobody(text: str) -> None:
    """Is told what nobody wants to know."""
