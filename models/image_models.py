"""Models of images by name, compiled as they are usually trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from models import resnet, vgg
from models.datasets import DATASETS
from models.sources import ModelSource, compiled_classifier

_PATTERNS = DATASETS["patterns"]

_VGG_TINY = {"image": 8, "width": 4, "groups": (1, 1), "dense": 16}
_RESNET_TINY = {"image": 8, "width": 4, "blocks": (1, 1)}
_VGG_19 = {"image": 224, "classes": 1000, "width": 64, "groups": (2, 2, 4, 4, 4), "dense": 4096}


def _of_images(make: Callable[..., keras.Model], **sizes: Any) -> Callable[[], keras.Model]:
    return lambda: compiled_classifier(make(**sizes), keras.optimizers.SGD(0.01, momentum=0.9), "accuracy")


IMAGE_MODELS = (
    ModelSource("vgg", "VGG for images of 32 x 32", _of_images(vgg.vgg), _PATTERNS),
    ModelSource("vgg:tiny", "for images of 8 x 8", _of_images(vgg.vgg, **_VGG_TINY), _PATTERNS),
    ModelSource("vgg:19", "VGG-19: 144 million parameters", _of_images(vgg.vgg, **_VGG_19), _PATTERNS),
    ModelSource("resnet", "ResNet of 10 blocks for images of 32 x 32", _of_images(resnet.resnet), _PATTERNS),
    ModelSource("resnet:tiny", "2 blocks, images of 8 x 8", _of_images(resnet.resnet, **_RESNET_TINY), _PATTERNS),
)
