"""Progress of the preparation of a step that runs for the first time: shown to a person who watches, and logged."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dapple_tf.common.progress import Progress
from dapple_tf.execution.terminal import leave_progress_bar
from dapple_tf.frontend.capture import Mode
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
