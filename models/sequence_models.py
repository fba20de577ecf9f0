"""Models of text and other sequences by name, compiled as they are usually trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from models import bert, gpt
from models.datasets import DATASETS
from models.sources import ModelSource, compiled_classifier

_TEXT, _SENTENCES = DATASETS["source_text"], DATASETS["sentences"]

_SMALL_BERT = bert.BertConfig(depth=4, width=256, heads=4, inner=1024, vocabulary=4096, sequence=128, positions=128)


def _of_tokens(make: Callable[..., keras.Model], **sizes: Any) -> Callable[[], keras.Model]:
    return lambda: compiled_classifier(make(**sizes), keras.optimizers.Adam(1e-3))


SEQUENCE_MODELS = (
    ModelSource("gpt", "byte-level GPT: 4 blocks, width 128, 128 bytes per sample", _of_tokens(gpt.gpt), _TEXT),
    ModelSource("gpt:tiny", "2 blocks, width 32, 32 bytes per sample", _of_tokens(gpt.gpt_tiny), _TEXT),
    ModelSource("gpt:medium", "GPT-2 medium: 355 million parameters", _of_tokens(gpt.gpt_medium), _TEXT),
    ModelSource("bert", "BERT: 4 layers, width 256", _of_tokens(bert.build, config=_SMALL_BERT), _SENTENCES),
    ModelSource("bert:tiny", "2 layers, width 32", _of_tokens(bert.bert_tiny), _SENTENCES),
    ModelSource("bert:48", "BERT-48 of the DAPPLE paper: 640 million parameters", _of_tokens(bert.bert_48), _SENTENCES),
)
