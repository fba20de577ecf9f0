"""The numbers that FD-DPS's paper prints (Mathematics 2022, 10, 4788, section 5), by the names of our models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PaperRow(NamedTuple):
    """A row of table 5, in seconds; None is OOM in the paper."""

    single: float | None
    data_parallel: float | None
    fast_t: float
    mp_dps: float
    fd_dps: float

    def over(self, what: str) -> float | None:
        """Returns the ratio of a step to data parallelism's; None if either is OOM."""
        seconds = getattr(self, what)
        return None if seconds is None or self.data_parallel is None else seconds / self.data_parallel

    def faster(self, than: str) -> float:
        """Fraction by which a step of FD-DPS is shorter than another."""
        return 1 - self.fd_dps / float(getattr(self, than))


TABLE_5: Mapping[tuple[str, int], PaperRow] = {
    ("VGG-16", 2): PaperRow(0.794, 1.272, 1.122, 1.066, 1.051),
    ("VGG-16", 4): PaperRow(0.794, 1.770, 1.975, 1.905, 1.812),
    ("Inception-V3", 2): PaperRow(0.574, 0.738, 0.712, 0.702, 0.685),
    ("Inception-V3", 4): PaperRow(0.574, 0.943, 0.912, 0.872, 0.823),
    ("ResNet-50", 4): PaperRow(0.394, 0.895, 0.834, 0.719, 0.683),
    ("ResNet-50", 8): PaperRow(0.394, 1.983, 1.874, 1.741, 1.587),
    ("ResNet-200", 4): PaperRow(2.331, 0.986, 0.853, 0.806, 0.743),
    ("ResNet-200", 8): PaperRow(2.331, 2.321, 2.046, 1.955, 1.723),
    ("PNASNet-mobile", 4): PaperRow(0.822, 1.669, 1.624, 1.547, 1.384),
    ("PNASNet-mobile", 8): PaperRow(0.822, 2.643, 2.459, 2.147, 1.873),
    ("NASNet-large", 4): PaperRow(None, None, 4.289, 3.876, 3.627),
    ("NASNet-large", 8): PaperRow(None, None, 7.425, 6.550, 5.931),
}
TABLE_6: Mapping[str, tuple[float, float, bool]] = {
    "Conv1_1": (2.146, 3.64, False),
    "Conv1_2": (15.673, 43.82, True),
    "Conv1_2bp": (36.466, 56.88, True),
    "Relu1_2": (2.908, 0.12, False),
    "Pool1": (0.96, 0.54, False),
    "Fc6": (1.654, 136_766.44, False),
}
"""Operator -> milliseconds, "Memory Ratio (KB)", whether the paper splits it."""
TABLE_7: Mapping[str, tuple[float, float, float]] = {
    "VGG-16": (1.926, 1.812, 0.0592),
    "Inception-V3": (0.843, 0.823, 0.0237),
    "ResNet-50": (0.735, 0.683, 0.0707),
    "ResNet-200": (0.825, 0.743, 0.0994),
    "PNASNet-mobile": (1.489, 1.314, 0.1175),
    "NASNet-large": (4.211, 3.627, 0.1387),
}
"""Model -> D-DPS(-F) and FD-DPS in s, and the gain that the paper prints."""
FIGURE_4: Mapping[str, Mapping[tuple[str, str], float]] = {
    "PNASNet-mobile": {("fd_dps", "fast_t"): 0.160, ("mp_dps", "fast_t"): 0.049, ("fd_dps", "mp_dps"): 0.111}
}
"""Model -> (faster one, than which) -> fraction, where the text has it; the figure itself isn't in the text."""
