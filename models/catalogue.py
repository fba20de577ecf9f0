"""Models by name, compiled as they are usually trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dapple_tf.models.datasets import DATASETS, GENERATED
from dapple_tf.models.sources import ModelSource, compiled_classifier, later

if TYPE_CHECKING:
    import keras

# ---- of images

_PATTERNS = DATASETS["patterns"]

_VGG_TINY = {"image": 8, "width": 4, "groups": (1, 1), "dense": 16}
_RESNET_TINY = {"image": 8, "width": 4, "blocks": (1, 1)}
_DENSENET_TINY = {"image": 8, "classes": 10, "growth": 4, "blocks": (2, 2)}
_PNASNET_TINY = {"classes": 10, "size": 32, "cells": 1, "filters": 8, "activation": None}


def _compiled(model: keras.Model) -> keras.Model:
    import keras

    return compiled_classifier(model, keras.optimizers.SGD(0.01, momentum=0.9), "accuracy")


def _row(name: str, about: str, make: str, *sizes: Any, **options: Any) -> ModelSource:
    return ModelSource(name, about, lambda: _compiled(later(make)(*sizes, **options)), _PATTERNS)


IMAGE_MODELS = (
    _row("vgg", "VGG for images of 32 x 32", "vgg.vgg"),
    _row("vgg:tiny", "for images of 8 x 8", "vgg.vgg", **_VGG_TINY),
    _row("vgg:16", "VGG-16: 138 million parameters", "applications.application", "VGG16"),
    _row("vgg:19", "VGG-19: 144 million parameters", "applications.application", "VGG19"),
    _row("resnet", "ResNet of 10 blocks for images of 32 x 32", "resnet.resnet"),
    _row("resnet:tiny", "2 blocks, images of 8 x 8", "resnet.resnet", **_RESNET_TINY),
    _row("resnet:50", "ResNet-50: 26 million parameters", "resnet.deep_resnet", 50),
    _row("resnet:101", "ResNet-101: 45 million parameters", "resnet.deep_resnet", 101),
    _row("resnet:152", "ResNet-152: 60 million parameters", "resnet.deep_resnet", 152),
    _row("resnet:200", "ResNet-200: 65 million parameters", "resnet.deep_resnet", 200),
    _row("densenet:121", "DenseNet-121, growth 32: 8 million parameters", "densenet.densenet"),
    _row("densenet:169", "DenseNet-169: 14 million parameters", "densenet.densenet", blocks=(6, 12, 32, 32)),
    _row("densenet:tiny", "two groups of 2 blocks, images of 8 x 8", "densenet.densenet", **_DENSENET_TINY),
    _row("inception", "Inception-V3: 24 million parameters", "applications.application", "InceptionV3", image=299),
    _row("mobilenet:v3_large", "MobileNetV3: 5.5 million parameters", "mobilenet.mobilenet_v3"),
    _row("mobilenet:v3_small", "MobileNetV3: 2.5 million parameters", "mobilenet.mobilenet_v3", "small"),
    _row("mobilenet:tiny", "2 blocks, images of 32 x 32", "mobilenet.mobilenet_v3_tiny"),
    _row("nasnet:mobile", "NASNet-A (4 @ 1056): 5.3 million parameters", "nasnet.nasnet_mobile"),
    _row("nasnet:large", "NASNet-A (6 @ 4032): 89 million parameters", "nasnet.nasnet_large"),
    _row("nasnet:tiny", "2 cells, images of 8 x 8", "nasnet.nasnet_tiny"),
    _row("pnasnet", "PNASNet-5 (mobile): 5.1 million parameters", "pnasnet.pnasnet_mobile", activation=None),
    _row("pnasnet:tiny", "a cell, images of 32 x 32", "pnasnet.pnasnet_mobile", **_PNASNET_TINY),
    _row("amoebanet:18", "AmoebaNet-D (18, 512): 480 million parameters", "amoebanet.amoebanet_d", 18),
    _row("amoebanet:36", "AmoebaNet-D (36, 512): 934 million parameters", "amoebanet.amoebanet_d", 36),
    _row("amoebanet:tiny", "2 cells, images of 8 x 8", "amoebanet.amoebanet_tiny"),
)

# ---- of text and other sequences

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
