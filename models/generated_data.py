"""Generated data for models of several inputs, which can be learnt from."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from dapple_tf.models.sources import ModelError

PADDING, BEGIN, END = 0, 1, 2
"""Tokens that aren't words: what fills up a sentence, and what a translation begins and ends with."""

_WORDS_FROM = 3

Tokens = NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sentences of two languages, padded at the end.

    Attributes:
        source: int32 [pairs, source length], what is to be translated.
        target: int32 [pairs, target length], the translation after a token `BEGIN`: what the decoder reads.
        labels: int32 [pairs, target length], the translation and `END`: what the decoder should write.
        weights: float32 [pairs, target length], 1 where there is a label, 0 at padding.
    """

    source: Tokens
    target: Tokens
    labels: Tokens
    weights: NDArray[np.float32]


def reversed_pairs(count: int, vocabulary: int, source: int, target: int, seed: int) -> Pairs:
    """Random sentences of several lengths, each with the same words backwards as its translation.

    Args:
        count: number of pairs.
        vocabulary: number of tokens, those that aren't words among them.
        source: length that sentences are padded to.
        target: length that translations are padded to.
        seed: of the words and lengths.

    Raises:
        ValueError: there are no words, or no room for one and `END`.
    """
    if vocabulary <= _WORDS_FROM or source < 1 or target < 2:
        raise ValueError(
            f"pairs of {vocabulary} tokens, {source} read and {target} written; need at least {_WORDS_FROM + 1} tokens "
            f"(padding, begin and end are no words), 1 read and 2 written"
        )
    draw = np.random.default_rng(seed)
    longest = min(source, target - 1)
    lengths = draw.integers(math.ceil(longest / 2), longest + 1, count)
    words = draw.integers(_WORDS_FROM, vocabulary, (count, longest), dtype=np.int32)
    shape = (count, target)
    read, begun, labels = np.zeros((count, source), np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, length in enumerate(lengths):
        sentence = words[row, :length]
        read[row, :length] = sentence
        begun[row, : length + 1] = BEGIN, *sentence[::-1]
        labels[row, : length + 1] = *sentence[::-1], END
    return Pairs(read, begun, labels, (labels != PADDING).astype(np.float32))


def reversed_pairs_for(model: keras.Model, count: int, seed: int) -> tuple[dict[str, Tokens], Tokens, Any]:
    """`reversed_pairs` as inputs, labels and sample weights of a model of ``{"source", "target"}``, such as GNMT.

    Raises:
        ModelError: the model takes something else, or too little.
    """
    lengths = {tensor.name: tensor.shape[1] for tensor in getattr(model, "inputs", None) or ()}
    if set(lengths) != {"source", "target"}:
        raise ModelError(
            f"the data 'reversed_pairs' are for gnmt, but {model.name!r} takes "
            f"{', '.join(lengths) or 'nothing declared'}; use other data"
        )
    try:
        pairs = reversed_pairs(count, model.output_shape[-1], lengths["source"], lengths["target"], seed)
    except ValueError as error:
        raise ModelError(f"the data 'reversed_pairs' don't fit {model.name!r}: {error}") from error
    return {"source": pairs.source, "target": pairs.target}, pairs.labels, pairs.weights
