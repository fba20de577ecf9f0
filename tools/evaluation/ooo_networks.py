"""The convolutional networks of Out-Of-Order BackProp's evaluation (EuroSys'22, section 8), by published shapes.

Each profile has a layer for each convolution, with its normalisation and activation, and one for each dense layer.
What branches, such as a shortcut or DenseNet's concatenation, stands in the order in which it runs: on one device, or
on replicas of a whole network, that is all that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dapple_tf.describe.layer_profile import LayerProfile
from dapple_tf.describe.profile import Profile
from dapple_tf.operators.rooflines import (
    CONV,
    CONV_FILTER,
    DEPTHWISE,
    DEPTHWISE_FILTER,
    MATMUL,
    WINOGRAD,
    WINOGRAD_FILTER,
    Roofline,
    Work,
)
from dapple_tf.tools.evaluation.ooo_models import FLOAT, MOMENTUM, V100, chain, layer, passes
from dapple_tf.tools.evaluation.results import Record

_FEWEST_CHANNELS = 16
"""With fewer channels, Winograd's transforms cost more than they save."""


class Convolution(NamedTuple):
    """A convolution with its normalisation and activation, or a dense layer.

    Attributes:
        name: its name.
        size: height and width of its kernel.
        stride: of the kernel.
        image: height and width of its output; 1 for a dense layer.
        inputs: channels that it reads.
        outputs: channels that it makes.
        depthwise: whether each channel has a kernel of its own.
        added: passes over the output besides normalisation and activation, such as a residual connection's.
    """

    name: str
    size: int
    stride: int
    image: int
    inputs: int
    outputs: int
    depthwise: bool = False
    added: int = 0

    def profile(self, device: Roofline) -> LayerProfile:
        """Returns its profile.

        Normalisation and activation, fused, read the output twice and write it once; backwards they read it and its
        gradient twice and write one.
        """
        area, inputs = self.size**2, 1 if self.depthwise else self.inputs
        depth, back = area * inputs, area * (1 if self.depthwise else self.outputs)  # lengths of inner products
        read = float((self.image * self.stride) ** 2 * self.inputs)
        written = float(self.image**2 * self.outputs)
        if self.depthwise:
            kinds = (DEPTHWISE, DEPTHWISE_FILTER)
        elif self.image == self.size == 1:
            kinds = (MATMUL, MATMUL)
        elif (self.size, self.stride) == (3, 1) and min(self.inputs, self.outputs) >= _FEWEST_CHANNELS:
            kinds = (WINOGRAD, WINOGRAD_FILTER)
        else:
            kinds = (CONV, CONV_FILTER)
        flops, moved = 2.0 * written * depth, FLOAT * (read + written)
        return layer(
            self.name,
            device,
            [Work(kinds[0], flops, moved, depth), passes(3 + self.added, written)],
            [passes(5 + self.added, written), Work(kinds[0], flops, moved, back)],
            [Work(kinds[1], flops, moved, depth)],
            parameters=depth * self.outputs + 2 * self.outputs,
            output=written,
            residual=2 * written,
            delayed=read + written,
            slots=MOMENTUM,
        )


def _resnet(depths: Sequence[int]) -> Iterator[Convolution]:
    """Yields a ResNet of bottlenecks for images of 224 x 224; the stride is in the 3 x 3 convolution."""
    yield Convolution("stem", 7, 2, 112, 3, 64, added=2)
    channels = 64
    for group, depth in enumerate(depths):
        width, image = 64 * 2**group, 56 // 2**group
        for number in range(depth):
            stride = 2 if group and not number else 1
            name = f"block_{group}_{number}"
            yield Convolution(f"{name}_a", 1, 1, image * stride, channels, width)
            yield Convolution(f"{name}_b", 3, stride, image, width, width)
            if not number:
                yield Convolution(f"{name}_skip", 1, stride, image, channels, 4 * width)
            yield Convolution(f"{name}_c", 1, 1, image, width, 4 * width, added=1)
            channels = 4 * width
    yield Convolution("logits", 1, 1, 1, channels, 1000)


def _densenet(blocks: Sequence[int], growth: int, image: int) -> Iterator[Convolution]:
    """Yields a DenseNet with bottlenecks of 4 growth and halving transitions, for images of 224 or 32 pixels."""
    channels = 2 * growth
    small = image < 64
    yield Convolution(
        "stem", 3 if small else 7, 1 if small else 2, image if small else image // 2, 3, channels, added=2
    )
    image = image if small else image // 4
    for group, count in enumerate(blocks):
        for number in range(count):
            name = f"block_{group}_{number}"
            yield Convolution(f"{name}_a", 1, 1, image, channels, 4 * growth, added=2 * channels // (4 * growth))
            yield Convolution(f"{name}_b", 3, 1, image, 4 * growth, growth)
            channels += growth
        if group + 1 < len(blocks):
            yield Convolution(f"transition_{group}", 1, 1, image, channels, channels // 2, added=1)
            channels, image = channels // 2, image // 2
    yield Convolution("logits", 1, 1, 1, channels, 1000)


_MOBILE = (
    (3, 1, 16, 16, 1), (3, 4, 24, 64, 2), (3, 3, 24, 72, 1), (5, 3, 40, 72, 2), (5, 3, 40, 120, 1), (5, 3, 40, 120, 1),
    (3, 6, 80, 240, 2), (3, 2.5, 80, 200, 1), (3, 2.3, 80, 184, 1), (3, 2.3, 80, 184, 1), (3, 6, 112, 480, 1),
    (3, 6, 112, 672, 1), (5, 6, 160, 672, 2), (5, 6, 160, 960, 1), (5, 6, 160, 960, 1),
)  # fmt: skip
"""MobileNetV3 large, table 1 of its paper: kernel, expansion, outputs, expanded channels, stride."""


def _mobilenet(alpha: float) -> Iterator[Convolution]:
    """Yields MobileNetV3 large for images of 224 x 224.

    Squeeze and excitation is two dense layers, and passes over what it scales.
    """

    def wide(channels: float) -> int:
        """Returns the channels, multiplied by alpha, as a multiple of eight."""
        scaled = channels * alpha
        rounded = max(8, int(scaled + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * scaled else rounded

    channels, image = wide(16), 112
    yield Convolution("stem", 3, 2, image, 3, channels)
    for number, (size, _, outputs, expanded, stride) in enumerate(_MOBILE):
        inner, name = wide(expanded), f"block_{number}"
        if number:
            yield Convolution(f"{name}_expand", 1, 1, image, channels, inner)
        image //= stride
        squeezed = 3 if size == 5 or number > 9 else 0
        yield Convolution(f"{name}_depthwise", size, stride, image, inner, inner, True, squeezed)
        if squeezed:
            few = wide(expanded / 4)
            yield Convolution(f"{name}_squeeze", 1, 1, 1, inner, few)
            yield Convolution(f"{name}_excite", 1, 1, 1, few, inner)
        yield Convolution(f"{name}_project", 1, 1, image, inner, wide(outputs), added=1)
        channels = wide(outputs)
    yield Convolution("last", 1, 1, image, channels, wide(960))
    yield Convolution("dense", 1, 1, 1, wide(960), 1280)
    yield Convolution("logits", 1, 1, 1, 1280, 1000)


RESNETS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
DENSENETS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32)}


def resnet(depth: int, device: Roofline = V100) -> Profile:
    """Returns ResNet-50 or 101 for ImageNet."""
    return chain(f"ResNet-{depth}", [each.profile(device) for each in _resnet(RESNETS[depth])])


def densenet(depth: int, device: Roofline = V100, *, growth: int = 32, image: int = 224) -> Profile:
    """Returns DenseNet-121 or 169 for ImageNet, or for CIFAR's images of 32 x 32."""
    return chain(f"DenseNet-{depth}", [each.profile(device) for each in _densenet(DENSENETS[depth], growth, image)])


def mobilenet(device: Roofline = V100, *, alpha: float = 1.0) -> Profile:
    """Returns MobileNetV3 large for ImageNet."""
    return chain("MobileNetV3", [each.profile(device) for each in _mobilenet(alpha)])


# ---- section 8.2: one GPU


ONE_GPU: Mapping[str, tuple[Callable[[], Profile], tuple[int, ...]]] = {
    "DenseNet-121, k = 12": (lambda: densenet(121, growth=12, image=32), (32,)),
    "DenseNet-121, k = 24": (lambda: densenet(121, growth=24, image=32), (32, 64)),
    "DenseNet-121, k = 32": (lambda: densenet(121, growth=32, image=32), (32, 64)),
    "MobileNetV3, alpha = 0.25": (lambda: mobilenet(alpha=0.25), (32, 128)),
    "MobileNetV3, alpha = 0.5": (lambda: mobilenet(alpha=0.5), (32, 64, 128)),
    "MobileNetV3, alpha = 0.75": (lambda: mobilenet(alpha=0.75), (128,)),
    "MobileNetV3, alpha = 1": (mobilenet, (32, 64, 128)),
    "ResNet-50": (lambda: resnet(50), (32, 64)),
    "ResNet-101": (lambda: resnet(101), (32, 64)),
}
"""Networks and batches of the published scripts and of figure 7; k = 12, alpha = 0.25 and 128 stand in the text."""


def issued_in_advance() -> Record:
    """Returns network and samples -> how much faster a V100's step is if kernels' starts aren't waited for (Opt1).

    XLA waits for each start, which takes 4 us by the roofline. Nothing is left to a second stream (Opt2): the SMs that
    a kernel leaves idle aren't in the profiles.
    """
    record = {}
    for network, (build, batches) in ONE_GPU.items():
        costs = [cost for layer in build().layers for cost in (layer.forward, layer.backward)]
        starts = sum(cost.fixed for cost in costs)
        for samples in batches:
            kernels = sum(cost.at(samples) for cost in costs)
            record[f"{network}, {samples}"] = kernels / (kernels - starts)
    return record
