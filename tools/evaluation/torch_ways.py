"""Ways to train a pipeline that are compared with PyTorch's: their names, their kinds, and the best of each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

import dapple_tf as dapple
from dapple_tf.tools.evaluation.bench_models import BenchModel

KINDS = {
    (False, False): "torch",
    (False, True): "torch_compiled",
    (True, False): "ours",
    (True, True): "ours_xla",
}
"""What is compared with each other, the best of each: by whether it is ours, and whether it is compiled."""

PYTORCH_RANKS: Mapping[str, Sequence[int]] = {"1f1b": (0, 1), "interleaved": (0, 1, 0, 1), "zb_v": (0, 1, 1, 0)}
"""Process of each stage, by PyTorch's schedule; the schedules are in `tools.evaluation.torch_pipeline`."""

COMPILED = ("1f1b", "interleaved")
"""PyTorch's schedules that take stages compiled by torch.compile; ScheduleZBVZeroBubble refuses them."""

OUR_DEVICES: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("gpipe", "dapple_a", "dapple_b", "zb_h1", "zb_h2"), (0, 1)),
    **{name: PYTORCH_RANKS[name] for name in ("interleaved", "zb_v")},
}
"""Device of each stage, by our schedule."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        ours: whether it is ours; else PyTorch's.
        schedule: one of `OUR_DEVICES` or of `PYTORCH_RANKS`.
        compiled: by XLA or by torch.compile.
        pinned: whether each process has a core of its own; else all processes have all cores.
    """

    ours: bool
    schedule: str
    compiled: bool = False
    pinned: bool = True

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return KINDS[self.ours, self.compiled]

    @property
    def name(self) -> str:
        """The name in tables, such as ``torch_1f1b_unpinned``."""
        side, compiler = ("ours", "xla") if self.ours else ("torch", "compiled")
        return f"{side}_{self.schedule}{f'_{compiler}' * self.compiled}{'_unpinned' * (not self.pinned)}"

    @property
    def shared(self) -> Way:
        """The way whose processes this one uses: the same ones are pinned in some turns only."""
        return dataclasses.replace(self, pinned=True)

    @property
    def devices(self) -> Sequence[int]:
        """Device, or process, of each stage."""
        return (OUR_DEVICES if self.ours else PYTORCH_RANKS)[self.schedule]

    def plan(self, model: BenchModel, micro_batches: int, batch: int) -> dapple.Plan:
        """Returns our plan for a batch."""
        cuts, devices = model.cuts(len(self.devices)), [[device] for device in self.devices]
        return dapple.Plan.manual(cuts, devices, micro_batches, batch, self.schedule, jit_compile=self.compiled)


def all_ways(
    torch_schedules: Sequence[str], compiled_schedules: Sequence[str], schedules: Sequence[str], *, xla: bool
) -> list[Way]:
    """Returns PyTorch's ways and ours, each pinned and not.

    Args:
        torch_schedules: PyTorch's, eager.
        compiled_schedules: PyTorch's, by torch.compile.
        schedules: ours.
        xla: whether ours also run with XLA.
    """
    theirs = [
        *(Way(False, schedule) for schedule in torch_schedules),
        *(Way(False, schedule, compiled=True) for schedule in compiled_schedules),
    ]
    ours = [Way(True, schedule, compiled=jit) for schedule in schedules for jit in (False, True)[: 1 + xla]]
    return [dataclasses.replace(way, pinned=pinned) for way in (*theirs, *ours) for pinned in (True, False)]


def best(times: Mapping[Way, Sequence[float]]) -> list[Way]:
    """Returns the way of each kind with the least median of times, in the order of `KINDS`."""
    kinds = {kind: [way for way in times if way.kind == kind] for kind in KINDS.values()}
    return [min(ways, key=lambda way: float(np.median(times[way]))) for ways in kinds.values() if ways]


def by_name(ways: Mapping[Way, T]) -> dict[str, T]:
    """Returns values by the ways' names."""
    return {way.name: value for way, value in ways.items()}
