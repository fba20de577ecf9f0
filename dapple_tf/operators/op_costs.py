"""Costs of single operators on each kind of device: FD-DPS, definition 3, with a roofline if none was measured."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dapple_tf.common.data_files import MOST_BYTES, Decoder, JsonFile, clip, parse_object, short
from dapple_tf.operators.rooflines import CPU, FREE, GPU, P100, Roofline, work
from dapple_tf.operators.signatures import OpSignature
from graph_passes.ir.tensorflow_bridge import takes_functions

_FORMAT = "dapple_tf.operator_costs/1"
_KIND = re.compile(r"([A-Za-z_]+):\d+$")
_SMALL = 0.5
"""An operator is small if the roofline gives its work less than this share of a launch."""


class OperatorCostsError(ValueError):
    """A file isn't one of operators' costs, or a cost is out of range."""


_DECODER = Decoder(OperatorCostsError)


class MeanSeconds(NamedTuple):
    """The running mean of measured times.

    Attributes:
        times: number of averaged times.
        seconds: their mean.
    """

    times: int
    seconds: float

    def merge(self, other: MeanSeconds) -> MeanSeconds:
        """Returns the mean of both: C of formula 1."""
        times = self.times + other.times
        return MeanSeconds(times, (self.times * self.seconds + other.times * other.seconds) / times)


def device_kind(name: str) -> str:
    """``GPU`` for ``/job:worker/replica:0/task:0/device:GPU:3``, and for ``GPU:3``.

    Raises:
        ValueError: the name doesn't end in a kind and a number.
    """
    match = _KIND.search(name)
    if match is None:
        raise ValueError(f"device {name!r} doesn't end in a kind and a number, as in device:GPU:0")
    return match[1].upper()


class _Correction(NamedTuple):
    """Measured times relative to a roofline: seconds of a start, and a factor of the rest."""

    launch: float
    ratio: float


class OperatorCosts(JsonFile):
    """Times of operators on kinds of devices: E of FD-DPS, formula 1, and estimates for unmeasured operators.

        costs = OperatorCosts()
        costs.add(signature, "GPU", 0.0021)
        costs.seconds(signature, "GPU")

    The time of an unmeasured operator is estimated by the roofline of the kind of device, corrected by measurements
    there: its start takes the median time of the small operators of its op type, and the rest the roofline's time
    multiplied by the median ratio of the large ones. If none of its op type was measured, all operators count.

    Attributes:
        rooflines: kind of device (``CPU``, ``GPU``) -> its roofline.
    """

    file_error: ClassVar[type[Exception]] = OperatorCostsError
    made_by: ClassVar[str] = "dapple_tf.profile_operators(...)"

    def __init__(self, rooflines: Mapping[str, Roofline] | None = None) -> None:
        self.rooflines: dict[str, Roofline] = dict({"CPU": CPU, "GPU": GPU} if rooflines is None else rooflines)
        self._means: dict[str, dict[OpSignature, MeanSeconds]] = {}
        self._corrections: dict[str, dict[str, _Correction]] = {}
        self._estimates: dict[tuple[str, OpSignature], float] = {}

    @classmethod
    def p100(cls) -> OperatorCosts:
        """Returns costs as on the GPUs of FD-DPS's experiments (section 5.1), to compare its tables with ours.

        Milliseconds of table 6 (VGG-16, a batch of 64 images of 224 x 224, operators before splitting):

            operator    paper    here   how
            Conv1_1     2.146   2.15    3 input channels: inner products of 27, a matrix product at 49% of the peak
            Conv1_2    15.673  15.66    Winograd at 63% of the peak
            Conv1_2bp  36.466  36.48    both gradients: Winograd at 63% and 48%
            Relu1_2     2.908   2.91    1.64 GB at 77% of the bandwidth
            Pool1       0.96    1.41    1.03 GB at the whole bandwidth; the paper's time would need 146% of it
            Fc6         1.654   1.66    75% of the peak

        Seconds of whole steps on one GPU (table 5), the sum over their operators: VGG-16 0.51 (0.79 in the paper),
        InceptionV3 0.45 (0.57), ResNet-50 0.40 (0.39). The paper's include what the host does.
        """
        return cls({"GPU": P100, "CPU": CPU})

    # ---- measured

    def add(self, signature: OpSignature, kind: str, seconds: float, *, times: int = 1) -> None:
        """Adds a measured time, or the mean of ``times`` measured times, in seconds.

        Raises:
            OperatorCostsError: the time isn't finite and at least 0, or ``times`` isn't at least 1.
        """
        if not (math.isfinite(seconds) and seconds >= 0 and times >= 1):
            raise OperatorCostsError(
                f"{signature.op} was measured {times} times at {seconds} s on {kind}; that must be at least once, and "
                f"finite and at least 0 s"
            )
        means, mean = self._means.setdefault(kind, {}), MeanSeconds(times, seconds)
        means[signature] = means[signature].merge(mean) if signature in means else mean
        self._corrections.pop(kind, None)
        self._estimates.clear()

    def update(self, other: OperatorCosts) -> None:
        """Adds all measurements of another one."""
        for kind, means in other._means.items():
            for signature, mean in means.items():
                self.add(signature, kind, mean.seconds, times=mean.times)

    def measured(self, signature: OpSignature, kind: str) -> MeanSeconds | None:
        """Returns the mean of an operator's measured times; None if it wasn't measured."""
        return self._means.get(kind, {}).get(signature)

    @property
    def count(self) -> int:
        """Number of measured means, of all kinds of devices."""
        return sum(map(len, self._means.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices that have rooflines."""
        return tuple(self.rooflines)

    # ---- asked

    def seconds(self, signature: OpSignature, kind: str, inner: float | None = None) -> float:
        """Returns the seconds of one run on an undisturbed device of speed 1.

        Args:
            signature: the operator.
            kind: the kind of device.
            inner: for a loop, branch or call: seconds of its inside, used if it wasn't measured as a whole.

        Raises:
            OperatorCostsError: nothing is known of such devices.
        """
        mean = self._means.get(kind, {}).get(signature)
        if mean is not None:
            return mean.seconds
        if inner is not None:
            return self.launch_seconds(kind) + inner
        key = kind, signature
        estimate = self._estimates.get(key)
        if estimate is None:
            estimate = self._estimates[key] = self._estimate(signature, kind)
        return estimate

    def roofline(self, kind: str) -> Roofline:
        """Returns the roofline of a kind of device.

        Raises:
            OperatorCostsError: there is none.
        """
        roofline = self.rooflines.get(kind)
        if roofline is None:
            known = ", ".join(self.rooflines) or "none"
            raise OperatorCostsError(f"nothing is known of devices of kind {kind!r} (of {known}); give a roofline")
        return roofline

    def _estimate(self, signature: OpSignature, kind: str) -> float:
        amount = work(signature)
        if amount.kind == FREE:
            return 0.0
        roofline, corrections = self.roofline(kind), self._corrections_of(kind)
        correction = corrections.get(signature.op, corrections[""])
        return correction.launch + correction.ratio * (roofline.seconds(amount) - roofline.launch)

    def launch_seconds(self, kind: str) -> float:
        """Returns the seconds of starting any operator on a kind of device.

        Raises:
            OperatorCostsError: nothing is known of such devices.
        """
        return self._corrections_of(kind)[""].launch

    def copy_seconds(self, kind: str) -> float:
        """Returns the seconds for each byte that is copied (read and written) within a device.

        Raises:
            OperatorCostsError: nothing is known of such devices.
        """
        corrections = self._corrections_of(kind)
        return self.roofline(kind).copy_seconds * corrections.get("ConcatV2", corrections[""]).ratio

    def _corrections_of(self, kind: str) -> dict[str, _Correction]:
        """Maps op types to the corrections of their rooflines; "" to that of all."""
        if kind not in self._corrections:
            roofline = self.roofline(kind)
            small: dict[str, list[float]] = {}
            large: dict[str, list[tuple[float, float]]] = {}
            for signature, mean in self._means.get(kind, {}).items():
                amount = work(signature)
                if amount.kind != FREE and not takes_functions(signature.op):
                    expected = roofline.seconds(amount) - roofline.launch
                    for op in (signature.op, ""):
                        if expected < _SMALL * roofline.launch:
                            small.setdefault(op, []).append(mean.seconds)
                        else:
                            large.setdefault(op, []).append((mean.seconds, expected))
            self._corrections[kind] = corrections = {
                "": _correction(small.get(""), large.get(""), _Correction(roofline.launch, 1.0))
            }
            for op in small.keys() | large.keys():
                corrections[op] = _correction(small.get(op), large.get(op), corrections[""])
        return self._corrections[kind]

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file.

        Raises:
            OperatorCostsError: `load` would refuse the file for its number of measured operators.
        """
        text = self.to_json()
        if len(text) > MOST_BYTES:
            raise OperatorCostsError(
                f"the costs of {self.count:,} operators take {len(text):,} bytes, but files of more than "
                f"{MOST_BYTES:,} aren't read; keep those of different models in different files"
            )
        Path(path).write_text(text, encoding="utf-8")

    def to_json(self) -> str:
        """Returns the costs as JSON text: rooflines and measured means of each kind of device.

            {"format": "dapple_tf.operator_costs/1",
             "devices": {"GPU": {"roofline": {"flops": 1.06e13, ...},
                                 "measured": {"Relu | float32[64,8] | float32[64,8]": [3, 2.9e-06]}}}}

        ``measured`` maps signatures to [number of measurements, mean seconds].
        """
        devices = []
        for kind in dict.fromkeys((*self.rooflines, *self._means)):
            parts = []
            if kind in self.rooflines:
                parts.append(f'   "roofline": {json.dumps(dataclasses.asdict(self.rooflines[kind]))}')
            means = self._means.get(kind, {}).items()
            lines = ",\n".join(f"    {json.dumps(str(signature))}: {json.dumps(mean)}" for signature, mean in means)
            parts.append('   "measured": {\n' + lines + "\n   }" if lines else '   "measured": {}')
            devices.append(f"  {json.dumps(kind)}: {{\n" + ",\n".join(parts) + "\n  }")
        return f'{{\n "format": {json.dumps(_FORMAT)},\n "devices": {{\n' + ",\n".join(devices) + "\n }\n}\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "operator costs") -> OperatorCosts:
        """Reads the text of `to_json`; ``source`` names it in errors.

        Raises:
            OperatorCostsError: not JSON, or an unknown, missing or wrong key.
        """
        data = parse_object(text, source, OperatorCostsError)
        _DECODER.check_keys(data, ("format", "devices"), (), source)
        _DECODER.check_format(data, _FORMAT, source)
        costs = cls({})
        for kind, entry in _DECODER.object(data["devices"], f"{source}: 'devices'").items():
            where = f"{source}: device kind {short(kind)}"
            entry = _DECODER.object(entry, where)
            _DECODER.check_keys(entry, ("measured",), ("roofline",), where)
            if "roofline" in entry:
                costs.rooflines[kind] = _roofline(_DECODER.object(entry["roofline"], f"{where}: 'roofline'"), where)
            for spelled, mean in _DECODER.object(entry["measured"], f"{where}: 'measured'").items():
                _add_measured(costs, kind, spelled, mean, where)
        return costs


def _correction(
    small: Sequence[float] | None, large: Sequence[tuple[float, float]] | None, default: _Correction
) -> _Correction:
    """Returns the correction from seconds of small operators and (seconds, roofline without launch) of large ones."""
    launch = statistics.median(small) if small else default.launch
    if not large:
        return default._replace(launch=launch)
    launch = min(launch, *(seconds for seconds, _ in large))
    return _Correction(launch, statistics.median((seconds - launch) / expected for seconds, expected in large))


def _roofline(entry: dict[str, Any], where: str) -> Roofline:
    optional = [field.name for field in dataclasses.fields(Roofline)][3:]
    _DECODER.check_keys(entry, ("flops", "bandwidth", "launch"), optional, where)
    try:
        return Roofline(**entry)
    except ValueError as error:
        raise OperatorCostsError(f"{where}: 'roofline': {clip(str(error))}") from error


def _add_measured(costs: OperatorCosts, kind: str, spelled: str, mean: Any, where: str) -> None:
    match mean:
        case [int(times), int(seconds) | float(seconds)] if not isinstance(times, bool):
            pass
        case _:
            raise OperatorCostsError(
                f"{where}: {short(spelled)} has {short(mean)}; it must be [number of measurements, mean seconds]"
            )
    try:
        costs.add(OpSignature.parse(spelled), kind, float(seconds), times=times)
    except (ValueError, OverflowError) as error:
        raise OperatorCostsError(f"{where}: {clip(str(error))}") from error
