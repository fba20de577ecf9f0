"""Models of text and other sequences by name, compiled as they are usually trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dapple_tf.models.datasets import DATASETS, GENERATED
from dapple_tf.models.sources import ModelSource, compiled_classifier, later

if TYPE_CHECKING:
    import keras

_TEXT, _SENTENCES, _PAIRS = DATASETS["source_text"], DATASETS["sentences"], DATASETS["reversed_pairs"]


def _of_tokens(make: str, **sizes: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        import keras

        return compiled_classifier(later(make)(**sizes), keras.optimizers.Adam(1e-3))

    return build


SEQUENCE_MODELS = (
    ModelSource("gpt", "byte-level GPT: 4 blocks, width 128, 128 bytes per sample", _of_tokens("gpt.gpt"), _TEXT),
    ModelSource("gpt:tiny", "2 blocks, width 32, 32 bytes per sample", _of_tokens("gpt.gpt_tiny"), _TEXT),
    ModelSource("gpt:medium", "GPT-2 medium: 355 million parameters", _of_tokens("gpt.gpt_medium"), _TEXT),
    ModelSource("bert", "BERT: 4 layers, width 256", _of_tokens("bert.bert_small"), _SENTENCES),
    ModelSource("bert:tiny", "2 layers, width 32", _of_tokens("bert.bert_tiny"), _SENTENCES),
    ModelSource("bert:12", "BERT-base: 110 million parameters", _of_tokens("bert.bert_12"), _SENTENCES),
    ModelSource("bert:24", "BERT-large: 335 million parameters", _of_tokens("bert.bert_24"), _SENTENCES),
    ModelSource(
        "bert:48", "BERT-48 of the DAPPLE paper: 637 million parameters", _of_tokens("bert.bert_48"), _SENTENCES
    ),
    ModelSource("xlnet:tiny", "2 layers, width 32", _of_tokens("xlnet.xlnet_tiny"), _SENTENCES),
    ModelSource(
        "xlnet:36", "XLNet-36 of the DAPPLE paper: 524 million parameters", _of_tokens("xlnet.xlnet_36"), _SENTENCES
    ),
    ModelSource(
        "xlnet_two_streams:tiny",
        "as it is pretrained: tokens are predicted in the order of a permutation",
        _of_tokens("xlnet.xlnet_tiny", two_streams=True),
        _SENTENCES,
    ),
    ModelSource(
        "xlnet_two_streams:36",
        "XLNet-36 as it is pretrained",
        _of_tokens("xlnet.xlnet_36", two_streams=True),
        _SENTENCES,
    ),
    ModelSource("gnmt:tiny", "2 + 2 layers of LSTMs of 16 units", _of_tokens("gnmt.gnmt_tiny"), _PAIRS),
    ModelSource("gnmt:16", "GNMT-16 of the DAPPLE paper: 291 million parameters", _of_tokens("gnmt.gnmt_16"), _PAIRS),
    ModelSource("rnn:tiny", "2 LSTMs of 16 units, 8 bytes per sample", _of_tokens("rnn.rnn_tiny"), _TEXT),
    ModelSource("rnn:16", "16 LSTMs of 1024 units, 64 bytes per sample", _of_tokens("rnn.rnn_16"), _TEXT),
    ModelSource("ffnn:tiny", "4 fully connected layers of 16 units", _of_tokens("ffnn.ffnn_tiny"), GENERATED),
    ModelSource("ffnn:16", "16 fully connected layers of 2048 units", _of_tokens("ffnn.ffnn_16"), GENERATED),
)
