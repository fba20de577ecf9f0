"""What a stage takes whose replicas place their operators on groups of devices, composed of what its layers take.

A range of layers that was searched as a whole takes what that search says. Any other is composed of pieces: each of its
layers takes as much less on a group as its piece does,

    F(range) = sum over layers l of F(l) x F(piece of l, on the group) / F(piece of l, on one device)

This is exact where what crosses the borders of pieces is made and read on one device in both cases. Otherwise it is too
little by the copies at borders, which no piece's search sees, and too much by what operators of neighbouring pieces
could do at the same time, where several tensors cross. So it ranks ranges; those that a plan has are searched as a
whole (`dapple_tf.planning.group_search`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dapple_tf.describe.group_costs import Relative
from dapple_tf.describe.profile import Profile

_Floats = npt.NDArray[np.float64]


class PlacedStages:
    """The stages of a profile with costs on groups of devices, each composed once."""

    def __init__(self, profile: Profile) -> None:
        """Starts with none composed."""
        self._profile = profile
        self._known: dict[tuple[int, int, int, int], Relative] = {}
        self._layers: dict[tuple[int, int], _Layers] = {}

    def of(self, first: int, stop: int, devices: int, samples: int) -> Relative | None:
        """Returns what layers ``first`` to ``stop`` (excluded) take on a group, relative to one device.

        Args:
            first: index of the first layer.
            stop: index of the layer after the last.
            devices: number of devices of the group.
            samples: samples of a slice.

        Returns:
            None if the profile doesn't have groups of that size.
        """
        groups = self._profile.groups
        if groups is None or devices not in groups.sizes:
            return None
        key = (first, stop, devices, samples)
        if key not in self._known:
            if groups.knows(first, stop, devices):
                self._known[key] = groups.relative(*key)
            else:
                if key[2:] not in self._layers:
                    self._layers[key[2:]] = _Layers(self._profile, *key[2:])
                self._known[key] = self._layers[key[2:]].composed(first, stop)
        return self._known[key]


class _Layers:
    """The layers of a profile on groups of one size, for slices of one size, as sums up to each layer."""

    def __init__(self, profile: Profile, devices: int, samples: int) -> None:
        assert profile.groups is not None
        layers = profile.layers
        pieces = itertools.pairwise((0, *profile.groups.ends))
        own: list[Relative] = []
        for first, stop in pieces:
            own += [profile.groups.relative(first, stop, devices, samples)] * (stop - first)
        stored = [2 * layer.parameter_bytes + layer.slot_bytes + layer.state_bytes for layer in layers]
        self._working = np.array([piece.working for piece in own])
        self._forward = _Means([[piece.forward] for piece in own], [x.forward.at(samples) for x in layers])
        self._backward = _Means([[piece.backward] for piece in own], [x.backward.at(samples) for x in layers])
        whole = [x.forward.at(samples) + x.backward.at(samples) + x.apply_seconds for x in layers]
        self._whole = _Means([[piece.whole] for piece in own], whole)
        self._apply = _Means([[piece.apply] for piece in own], [x.apply_seconds for x in layers])
        computed = [x.forward.at(samples) + x.backward.at(samples) for x in layers]
        self._sent = _Means([[piece.sent] for piece in own], computed)
        self._copies = _Means([piece.copies for piece in own], stored)
        self._stored = _Means([piece.stored for piece in own], stored)
        self._residual = _Means([piece.residual for piece in own], [x.residual_bytes.at(samples) for x in layers])

    def composed(self, first: int, stop: int) -> Relative:
        """Returns what some layers take, of the pieces that they are in."""
        return Relative(
            forward=self._forward.of(first, stop)[0],
            backward=self._backward.of(first, stop)[0],
            apply=self._apply.of(first, stop)[0],
            whole=self._whole.of(first, stop)[0],
            stored=self._stored.of(first, stop),
            residual=self._residual.of(first, stop),
            working=tuple(self._working[first:stop].max(axis=0).tolist()),
            sent=self._sent.of(first, stop)[0],
            copies=self._copies.of(first, stop),
        )


class _Means:
    """Means over layers, weighted by what each takes on one device; plain ones where none takes anything.

    Args:
        values: for each layer, some values.
        weights: for each layer, its weight.
    """

    def __init__(self, values: Sequence[Sequence[float]], weights: Sequence[float]) -> None:
        rows = np.array(values)
        self._values = _sums(rows * np.array(weights, float)[:, None])
        self._weights = _sums(np.array(weights, float))
        self._plain = _sums(rows)

    def of(self, first: int, stop: int) -> tuple[float, ...]:
        """Returns the means over some layers."""
        weight = self._weights[stop] - self._weights[first]
        if weight > 0:
            return tuple(((self._values[stop] - self._values[first]) / weight).tolist())
        return tuple(((self._plain[stop] - self._plain[first]) / (stop - first)).tolist())


def _sums(values: _Floats) -> _Floats:
    """Returns the sums of the first rows: of none, one, and so on."""
    return np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
