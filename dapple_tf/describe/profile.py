"""The cost of a model, layer by layer: the profile that plans are made from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from dapple_tf.common.data_files import Decoder, JsonFile, clip, parse_object
from dapple_tf.common.text import counted, table
from dapple_tf.describe.layer_profile import ZERO, Cost, LayerProfile, ProfileError, check_amount

_FORMAT = "dapple_tf.profile/1"


@dataclass(frozen=True)
class Tensor:
    """A tensor that goes from one layer to later ones.

    Attributes:
        producer: index of the layer that makes it.
        consumers: indices of the later layers that read it, ascending.
        bytes: its size.
        differentiable: whether a gradient of the same size flows back.
        kept: the layers whose backward task reads its buffer.
        delayed: the layers whose Bw reads its buffer.
        gradient_delayed: whether Bw of the layer that makes it reads its gradient.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: Cost
    differentiable: bool = True
    kept: tuple[int, ...] = ()
    delayed: tuple[int, ...] = ()
    gradient_delayed: bool = False


@dataclass(frozen=True)
class SharedParameters:
    """Parameters that several layers use (tied weights): kept on every stage that has one of these layers.

    Attributes:
        layers: indices of the layers, ascending.
        parameter_bytes: their size.
        slot_bytes: the optimizer's variables for them.
    """

    layers: tuple[int, ...]
    parameter_bytes: int
    slot_bytes: int = 0


METHODS = {
    "layers": "measured",
    "operators": "measured by operator in steps of the whole model",
    "rooflines": "estimated by rooflines without a measurement",
}
"""Value of `Profile.method` -> its description."""


@dataclass(frozen=True)
class Profile(JsonFile):
    """A model's layers, in the order in which they run, and the tensors between them.

    Attributes:
        model: its name.
        device: the device on which it was measured.
        batch_sizes: samples per slice at which it was measured. A profile of one size knows nothing of smaller slices:
            they are taken to need that slice's time (a device isn't faster with less to do in parallel), larger ones
            to need time in proportion.
        layers: see :class:`LayerProfile`.
        tensors: see :class:`Tensor`.
        shared: see :class:`SharedParameters`.
        step_seconds: time of a step that no layer accounts for: feeding, metrics, the optimizer's common part.
        task_seconds: time to start one task, beyond its layers.
        method: how times were found, one of `METHODS`: ``layers`` one by one; ``operators`` in traced steps of the
            whole model, to whose time they add up; or by ``rooflines``, without any measurement, so that only the
            layers' proportions are meaningful.
        key: hash of the graph, shapes and device that it was measured for; empty if it was made otherwise.

    Raises:
        ProfileError: there are no layers, a name is used twice, or a tensor doesn't flow forwards.
    """

    file_error: ClassVar[type[Exception]] = ProfileError
    made_by: ClassVar[str] = "dapple_tf.profile(...) or Profile.load(path)"
    model: str
    device: str
    batch_sizes: tuple[int, ...]
    layers: tuple[LayerProfile, ...]
    tensors: tuple[Tensor, ...]
    shared: tuple[SharedParameters, ...] = ()
    step_seconds: float = 0.0
    task_seconds: float = 0.0
    key: str = ""
    method: str = "layers"

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "layers", "tensors", "shared"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.layers:
            raise ProfileError(f"the profile of {self.model!r} has no layers")
        if self.method not in METHODS:
            raise ProfileError(f"method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        whole = all(isinstance(size, int) and not isinstance(size, bool) for size in self.batch_sizes)
        if not self.batch_sizes or not whole or min(self.batch_sizes) < 1:
            raise ProfileError(
                f"batch_sizes is {list(self.batch_sizes)}; give at least one whole number of samples of at least 1"
            )
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))
        for name in ("step_seconds", "task_seconds"):
            check_amount(name, getattr(self, name))
        positions: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer.name in positions:
                raise ProfileError(f"layers {positions[layer.name]} and {index} are both named {layer.name!r}")
            positions[layer.name] = index
        for tensor in self.tensors:
            ends = (tensor.producer, *tensor.consumers)
            if not tensor.consumers or list(ends) != sorted(set(ends)) or ends[0] < 0 or ends[-1] >= len(self.layers):
                raise ProfileError(
                    f"a tensor goes from layer {tensor.producer} to layers {list(tensor.consumers)}; these must be "
                    f"later layers of the {len(self.layers)}, in ascending order"
                )
            for name in ("kept", "delayed"):
                for layer in getattr(tensor, name):
                    if not 0 <= layer < len(self.layers):
                        raise ProfileError(
                            f"a tensor of layer {tensor.producer} is {name} by layer {layer}, but there are "
                            f"{len(self.layers)}"
                        )
        for index, layer in enumerate(self.layers):
            for later in layer.needed_later:
                if not index < later.layer <= len(self.layers):
                    raise ProfileError(
                        f"a part of layer {index}, {layer.name!r}, is needed later by layer {later.layer}; this must "
                        f"be {index + 1} to {len(self.layers)}, the number of layers"
                    )
        for group in self.shared:
            if len(group.layers) < 2 or list(group.layers) != sorted(set(group.layers)):
                raise ProfileError(
                    f"shared parameters are used by layers {list(group.layers)}; give at least two, in ascending order"
                )
            if group.layers[0] < 0 or group.layers[-1] >= len(self.layers):
                raise ProfileError(
                    f"shared parameters are used by layers {list(group.layers)}, but there are {len(self.layers)}"
                )

    def __hash__(self) -> int:
        return hash((self.model, self.device, self.key, len(self.layers)))

    @property
    def estimated(self) -> bool:
        """Whether layers weren't measured one by one."""
        return self.method != "layers"

    # ---- looking things up

    @functools.cached_property
    def index(self) -> Mapping[str, int]:
        """Name of a layer -> its index."""
        return {layer.name: index for index, layer in enumerate(self.layers)}

    @functools.cached_property
    def has_buffers(self) -> bool:
        """Whether it describes memory buffer by buffer."""
        return all(layer.buffers is not None for layer in self.layers)

    @property
    def least_samples(self) -> int:
        """Samples below which slices don't get faster; 1 if several sizes were measured."""
        return self.batch_sizes[0] if len(self.batch_sizes) == 1 else 1

    def timed_samples(self, samples: int) -> int:
        """Returns the number of samples from which the time of a slice is computed."""
        return max(samples, self.least_samples) if samples else 0

    def total(self, what: str) -> Cost:
        """Returns the sum of one of the layers' costs, such as ``forward``."""
        costs = [getattr(layer, what) for layer in self.layers]
        return Cost(sum(cost.fixed for cost in costs), sum(cost.per_sample for cost in costs))

    def recomputed(self, start: int, stop: int) -> Cost:
        """Returns the time that ``recompute="boundary"`` adds to layers ``start`` to ``stop`` (excluded) as one stage.

        B computes again what the backwards of these layers need of F.
        """
        total = ZERO
        for layer in self.layers[start:stop]:
            needed = 1 - sum(later.share for later in layer.needed_later if later.layer >= stop)
            total += layer.all_again * max(0.0, needed)
        return total

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, shared ones counted once."""
        own = sum(layer.parameter_bytes for layer in self.layers)
        return own + sum(group.parameter_bytes for group in self.shared)

    @functools.cached_property
    def crossing(self) -> tuple[tuple[Cost, Cost], ...]:
        """For each cut (after layer i): bytes that cross it forwards, and gradients that cross it backwards."""
        changes = [[Fraction(0)] * 4 for _ in self.layers]  # exact: what a tensor adds, its last consumer takes away
        for tensor in self.tensors:
            size = (Fraction(tensor.bytes.fixed), Fraction(tensor.bytes.per_sample))
            for part, value in enumerate((*size, *size) if tensor.differentiable else size):
                changes[tensor.producer][part] += value
                changes[tensor.consumers[-1]][part] -= value
        sums = zip(*(itertools.accumulate(column) for column in zip(*changes, strict=True)), strict=True)
        return tuple((Cost(float(a), float(b)), Cost(float(c), float(d))) for a, b, c, d in sums)

    def position_after(self, cut: str) -> int:
        """Returns the number of layers up to a cut.

        Raises:
            ProfileError: it names no layer.
        """
        if cut not in self.index:
            raise ProfileError(
                f"the plan cuts after {cut!r}, which isn't a layer of the profile of {self.model!r}; its layers "
                f"are {_listed([layer.name for layer in self.layers])}; layers without computation of their own in "
                f"inference (dropout, say) are part of the next one: cut before them"
            )
        return self.index[cut] + 1

    def stage_of_layers(self, cuts: Sequence[str]) -> tuple[int, ...]:
        """Returns the stage of each layer under these cuts.

        Raises:
            ProfileError: a cut names no layer, or cuts aren't in order.
        """
        bounds = [0, *map(self.position_after, cuts), len(self.layers)]
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if stop <= start:
                raise ProfileError(
                    f"cuts leave stage {stage} without a layer; give cuts in the order of layers, none after the last"
                )
        return tuple(stage for stage, (a, b) in enumerate(itertools.pairwise(bounds)) for _ in range(a, b))

    # ---- files

    def scaled(self, seconds: float = 1.0, **changes: Any) -> Profile:
        """Returns a copy with all layers' times multiplied by ``seconds``, and other fields replaced."""
        layers = [
            dataclasses.replace(
                layer,
                forward=layer.forward * seconds,
                backward=layer.backward * seconds,
                backward_weight=None if layer.backward_weight is None else layer.backward_weight * seconds,
                apply_seconds=layer.apply_seconds * seconds,
                recomputation=None if layer.recomputation is None else layer.recomputation * seconds,
            )
            for layer in self.layers
        ]
        return dataclasses.replace(self, **{"layers": tuple(layers), **changes})

    def to_json(self) -> str:
        """Returns the profile as JSON text, a line for each layer, from which `from_json` makes an equal one.

        Costs are written as ``[fixed, per_sample]``, in seconds or bytes.
        """
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("layers", "tensors", "shared") and (field.name != "method" or self.estimated)
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in ({"format": _FORMAT} | values).items()]
        for name in ("layers", "tensors", "shared"):
            entries = ",\n".join("    " + json.dumps(_plain(entry)) for entry in getattr(self, name))
            lines.append(f'  "{name}": [' + (f"\n{entries}\n  ]" if entries else "]"))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "profile") -> Profile:
        """Returns the profile that `to_json` wrote as ``text``; ``source`` is the text's name in errors.

        Raises:
            ProfileError: the text isn't JSON or has another format, a key is unknown, missing or wrong, or as
                `Profile`.
        """
        data = parse_object(text, source, ProfileError)
        decoder = Decoder(ProfileError, lists=frozenset({Cost}))
        decoder.check_format(data, _FORMAT, source)
        del data["format"]
        data.pop("groups", None)  # costs on groups of devices, which earlier versions searched
        try:
            profile: Profile = decoder.read(cls, data)
            return profile
        except ProfileError as error:
            raise ProfileError(f"{source}: {clip(str(error))}") from error

    def __str__(self) -> str:
        samples = self.batch_sizes[-1]
        header = (
            f"Profile of {self.model!r} on {self.device}: {counted(len(self.layers), 'layer')}, {METHODS[self.method]} "
            f"at {', '.join(map(str, self.batch_sizes))} samples; below, a slice of {samples}"
        )
        rows = [("layer", "F ms", "B ms", "Bw ms", "output MB", "residual MB", "parameters MB", "apply ms", "spread")]
        for layer in self.layers:
            weight = layer.backward_weight
            rows.append(
                (
                    layer.name if len(layer.name) <= 40 else layer.name[:37] + "...",
                    f"{layer.forward.at(samples) * 1e3:.3f}",
                    f"{layer.backward.at(samples) * 1e3:.3f}",
                    "?" if weight is None else f"{weight.at(samples) * 1e3:.3f}",
                    f"{layer.output_bytes.at(samples) / 1e6:.3f}",
                    f"{layer.residual_bytes.at(samples) / 1e6:.3f}",
                    f"{layer.parameter_bytes / 1e6:.3f}",
                    f"{layer.apply_seconds * 1e3:.3f}",
                    f"{layer.spread:.0%}",
                )
            )
        return f"{header}\n{table(rows, left=1)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the text at the end of a notebook's cell."""
        printer.text(str(self))


def _listed(names: Sequence[str], limit: int = 12) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def _plain(entry: Any) -> Any:
    """Returns a dataclass as JSON data, without defaults."""
    if isinstance(entry, Cost):
        return [entry.fixed, entry.per_sample]
    data = {}
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            data[field.name] = _data(value)
    return data


def _data(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_data(entry) for entry in value]
    return _plain(value) if dataclasses.is_dataclass(value) else value
