"""Batches of other sizes than the plan's: they train as in plain Keras, and a warning says once what they cost."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dapple_tf.common.units import counted
from dapple_tf.errors import DataError
from graph_passes.ir.program import Layout

logger = logging.getLogger(__name__)


class BatchSizes:
    """Observes the size of each training batch.

    A single smaller batch is the last one of the data, and isn't reported. Two of them in a row, or a larger one,
    aren't what the plan was made for.
    """

    def __init__(self) -> None:
        self._last = 0
        self._told = False

    def trained(self, samples: int, full: int, layout: Callable[[int], Layout]) -> None:
        """Records a training batch, and warns once of other sizes.

        Args:
            samples: its size.
            full: the plan's global batch size.
            layout: number of samples -> how a batch of that size is cut.
        """
        last, self._last = self._last, samples
        other = samples > full or (samples < full and 0 < last < full)
        if not other or self._told:
            return
        self._told = True
        logger.warning(
            "batches have %d samples, where the plan's global batch size is %d: they train as %s, not as the plan's "
            "%s, so that its times and memory don't hold and each new size is prepared for anew; a plan with "
            "global_batch_size=%d is made for them",
            *(samples, full, _cut(layout(samples)), _cut(layout(full)), samples),
        )


def _cut(layout: Layout) -> str:
    sizes = sorted({interval.size for interval in layout.micro_batch_intervals})
    return f"{counted(len(layout.micro_batch_intervals), 'micro-batch')} of {' and '.join(map(str, sizes))} samples"


def whole_number(name: str, value: object) -> int:
    """Returns a number of samples as an int; ``name`` names it in errors.

    Raises:
        DataError: the value isn't a whole number of at least 1.
    """
    try:
        count = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        count = 0
    if isinstance(value, bool) or count < 1 or count != value:
        raise DataError(f"{name} is {value!r}; give a whole number of samples of at least 1")
    return int(count)
