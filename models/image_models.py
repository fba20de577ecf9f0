"""Models of images by name, compiled as they are usually trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dapple_tf.models.datasets import DATASETS
from dapple_tf.models.sources import ModelSource, compiled_classifier, later

if TYPE_CHECKING:
    import keras

_PATTERNS = DATASETS["patterns"]

_VGG_TINY = {"image": 8, "width": 4, "groups": (1, 1), "dense": 16}
_RESNET_TINY = {"image": 8, "width": 4, "blocks": (1, 1)}
_DENSENET_TINY = {"image": 8, "classes": 10, "growth": 4, "blocks": (2, 2)}


def _compiled(model: keras.Model) -> keras.Model:
    import keras

    return compiled_classifier(model, keras.optimizers.SGD(0.01, momentum=0.9), "accuracy")


def _row(name: str, about: str, make: str, *sizes: Any, **options: Any) -> ModelSource:
    return ModelSource(name, about, lambda: _compiled(later(make)(*sizes, **options)), _PATTERNS)


IMAGE_MODELS = (
    _row("vgg", "VGG for images of 32 x 32", "vgg.vgg"),
    _row("vgg:tiny", "for images of 8 x 8", "vgg.vgg", **_VGG_TINY),
    _row("vgg:19", "VGG-19: 144 million parameters", "vgg.vgg_19"),
    _row("resnet", "ResNet of 10 blocks for images of 32 x 32", "resnet.resnet"),
    _row("resnet:tiny", "2 blocks, images of 8 x 8", "resnet.resnet", **_RESNET_TINY),
    _row("resnet:50", "ResNet-50: 26 million parameters", "resnet.deep_resnet", 50),
    _row("resnet:101", "ResNet-101: 45 million parameters", "resnet.deep_resnet", 101),
    _row("resnet:152", "ResNet-152: 60 million parameters", "resnet.deep_resnet", 152),
    _row("resnet:200", "ResNet-200: 65 million parameters", "resnet.deep_resnet", 200),
    _row("densenet:121", "DenseNet-121, growth 32: 8 million parameters", "densenet.densenet"),
    _row("densenet:tiny", "two groups of 2 blocks, images of 8 x 8", "densenet.densenet", **_DENSENET_TINY),
    _row("mobilenet:v3_large", "MobileNetV3: 5.5 million parameters", "mobilenet.mobilenet_v3"),
    _row("mobilenet:v3_small", "MobileNetV3: 2.5 million parameters", "mobilenet.mobilenet_v3", "small"),
    _row("mobilenet:tiny", "2 blocks, images of 32 x 32", "mobilenet.mobilenet_v3_tiny"),
    _row("nasnet:mobile", "NASNet-A (4 @ 1056): 5.3 million parameters", "nasnet.nasnet_mobile"),
    _row("nasnet:large", "NASNet-A (6 @ 4032): 89 million parameters", "nasnet.nasnet_large"),
    _row("nasnet:tiny", "2 cells, images of 8 x 8", "nasnet.nasnet_tiny"),
    _row("amoebanet:18", "AmoebaNet-D (18, 512): 480 million parameters", "amoebanet.amoebanet_d", 18),
    _row("amoebanet:36", "AmoebaNet-D (36, 512): 934 million parameters", "amoebanet.amoebanet_d", 36),
    _row("amoebanet:tiny", "2 cells, images of 8 x 8", "amoebanet.amoebanet_tiny"),
)
