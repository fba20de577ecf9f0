"""Rooflines: estimates of unmeasured work on a kind of device.

seconds = launch + max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dapple_tf.operators.flops import (
    CONV,
    CONV_FILTER,
    DEPTHWISE,
    DEPTHWISE_FILTER,
    FREE,
    KINDS,
    MATMUL,
    MEMORY,
    POOL,
    WINOGRAD,
    WINOGRAD_FILTER,
    Work,
)

_WINOGRAD_SAVING = 36 / 16
"""F(2x2, 3x3): 36 multiplications become 16."""


@dataclass(frozen=True)
class Roofline:
    """The peak rates of a kind of device.

    Attributes:
        flops: peak float32 operations/s.
        bandwidth: peak bytes/s of its memory.
        launch: seconds of starting any kernel.
        compute: kind of work -> the share of ``flops`` that its kernels get; above 1 if an algorithm saves operations.
        memory: the share of ``bandwidth`` that kernels get.
        pool: the same for pooling.
        half_depth: length of inner products at which matrix products and convolutions get half of their share.
        dtypes: dtype -> peak as a multiple of ``flops``.

    Raises:
        ValueError: a number isn't finite and positive (``launch`` and ``half_depth`` may be 0), or a kind is unknown.
    """

    flops: float
    bandwidth: float
    launch: float
    compute: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.75
    pool: float = 0.75
    half_depth: float = 0.0
    dtypes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers: dict[str, Any] = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in ("compute", "dtypes")
        }
        for group in ("compute", "dtypes"):
            shares = getattr(self, group)
            if not isinstance(shares, Mapping):
                raise ValueError(f"{group} is {shares!r}; it must map names to numbers")
            numbers |= {f"{group} of {key!r}": value for key, value in shares.items()}
        for name, value in numbers.items():
            least_ok = value == 0 and name in ("launch", "half_depth")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not (least_ok or (value > 0 and math.isfinite(value))):
                raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")
        unknown = [kind for kind in self.compute if kind not in KINDS]
        if unknown:
            raise ValueError(f"unknown kind of work {unknown[0]!r}; the kinds are {', '.join(KINDS)}")

    def seconds(self, work: Work) -> float:
        """Returns the seconds of one run; 0 for work without a kernel."""
        if work.kind == FREE:
            return 0.0
        share = self.compute.get(work.kind, 1.0) * self.dtypes.get(work.dtype, 1.0)
        if work.depth:
            share *= work.depth / (work.depth + self.half_depth)
        return self.launch + max(work.flops / (self.flops * share), work.bytes / self._bytes_per_second(work.kind))

    def _bytes_per_second(self, kind: str) -> float:
        return self.bandwidth * (self.pool if kind == POOL else self.memory)

    @property
    def copy_seconds(self) -> float:
        """Seconds for each byte that is copied within the device: read and written."""
        return 2 / self._bytes_per_second(MEMORY)


P100 = Roofline(
    flops=10.6e12,
    bandwidth=732e9,
    launch=4e-6,
    compute={
        MATMUL: 0.75,
        CONV: 0.75,
        CONV_FILTER: 0.6,
        WINOGRAD: 0.65 * _WINOGRAD_SAVING,
        WINOGRAD_FILTER: 0.489 * _WINOGRAD_SAVING,
        DEPTHWISE: 0.1,
        DEPTHWISE_FILTER: 0.05,
        MEMORY: 0.5,
        POOL: 0.5,
    },
    memory=0.773,
    pool=1.0,
    half_depth=14.5,
    dtypes={"float16": 2.0, "float64": 0.5},
)
"""NVIDIA's Tesla P100 (SXM2): 10.6 TFLOPS in float32, 732 GB/s, by its data sheet. The shares are fitted to FD-DPS,
table 6 (VGG-16, 64 images of 224 x 224), see `OperatorCosts.p100`."""

GPU = Roofline(
    flops=14e12,
    bandwidth=900e9,
    launch=4e-6,
    compute=P100.compute,
    memory=0.8,
    pool=0.8,
    half_depth=14.0,
    dtypes={"float16": 4.0, "bfloat16": 4.0, "float64": 0.5},
)
"""An unknown GPU. Ratios between operators matter more than the level."""

CPU = Roofline(
    flops=60e9,
    bandwidth=12e9,
    launch=1.5e-6,
    compute={
        **{MATMUL: 0.7, CONV: 0.6, CONV_FILTER: 0.4, WINOGRAD: 0.7, WINOGRAD_FILTER: 0.5},
        **{DEPTHWISE: 0.1, DEPTHWISE_FILTER: 0.05, MEMORY: 0.2, POOL: 0.1},
    },
    memory=0.7,
    pool=0.5,
    half_depth=8.0,
    dtypes={"float64": 0.5},
)
"""An unknown logical CPU device: about one core with wide vectors."""
