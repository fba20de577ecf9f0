"""Lists of tokens of different lengths, stored in one array, and looked up by TensorFlow functions."""

from __future__ import annotations

import array
import pathlib
from collections.abc import Iterable

import numpy as np
import tensorflow as tf


class Ragged:
    """Lists of tokens.

    Attributes:
        tokens: int32, tokens of all lists in order.
        ends: int64, where each list ends.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        self.tokens, self.ends = tokens, ends

    @classmethod
    def of(cls, lists: Iterable[Iterable[int]]) -> Ragged:
        """Makes it from lists of tokens."""
        tokens, ends = array.array("i"), array.array("q")
        for given in lists:
            tokens.extend(given)
            ends.append(len(tokens))
        return cls(np.array(tokens, "int32"), np.array(ends, "int64"))

    @classmethod
    def load(cls, folder: pathlib.Path, name: str) -> Ragged:
        """Loads what `save` wrote."""
        read = (np.load(folder / f"{name}.{part}.npy", allow_pickle=False) for part in ("tokens", "ends"))
        return cls(*read)

    def save(self, folder: pathlib.Path, name: str) -> None:
        """Writes two files into a folder."""
        np.save(folder / f"{name}.tokens.npy", self.tokens)
        np.save(folder / f"{name}.ends.npy", self.ends)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of the lists."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self.ends[index - 1] if index else 0
        return self.tokens[start : self.ends[index]]

    def lookup(self) -> RaggedTensor:
        """Returns the lists for TensorFlow functions."""
        starts = np.concatenate([np.zeros(1, "int64"), self.ends])
        return RaggedTensor(tf.constant(self.tokens), tf.constant(starts))


class RaggedTensor:
    """Lists of tokens, in memory once."""

    def __init__(self, tokens: tf.Tensor, starts: tf.Tensor) -> None:
        self._tokens, self._starts = tokens, starts

    def __getitem__(self, index: tf.Tensor) -> tf.Tensor:
        """Returns one of the lists, int32 [tokens]; ``index`` is an int64 scalar."""
        return self._tokens[self._starts[index] : self._starts[index + 1]]


def padded(tokens: tf.Tensor, length: int, value: int = 0) -> tf.Tensor:
    """Returns at most ``length`` tokens, followed by ``value``: [length]."""
    tokens = tokens[:length]
    filled = tf.pad(tokens, [[0, length - tf.shape(tokens)[0]]], constant_values=value)
    return tf.ensure_shape(filled, [length])
