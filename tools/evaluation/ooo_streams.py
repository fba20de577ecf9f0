"""Out-Of-Order BackProp on one GPU (EuroSys'22, section 8.2): what starting kernels costs, by arithmetic.

A kernel's start is idle time of the GPU: 4 us, by the roofline of another paper (FD-DPS). XLA waits for every start.
With kernels issued in advance none is waited for (the paper's Opt1, pre-compiled kernel issue), which leaves nothing to
a second stream (Opt2): what that gains in the paper comes from SMs that a kernel leaves idle and from the pause between
kernels, which aren't in the profiles. The paper measures pairs of kernels for it, and no model without such
measurements would know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dapple_tf.describe.profile import Profile
from dapple_tf.tools.evaluation.ooo_networks import densenet, mobilenet, resnet

Record = Mapping[str, str | float | int | None]

_CIFAR = 32
NETWORKS: Mapping[str, tuple[Callable[[], Profile], tuple[int, ...]]] = {
    "DenseNet-121, k = 12": (lambda: densenet(121, growth=12, image=_CIFAR), (32,)),
    "DenseNet-121, k = 24": (lambda: densenet(121, growth=24, image=_CIFAR), (32, 64)),
    "DenseNet-121, k = 32": (lambda: densenet(121, growth=32, image=_CIFAR), (32, 64)),
    "MobileNetV3, alpha = 0.25": (lambda: mobilenet(alpha=0.25), (32, 128)),
    "MobileNetV3, alpha = 0.5": (lambda: mobilenet(alpha=0.5), (32, 64, 128)),
    "MobileNetV3, alpha = 0.75": (lambda: mobilenet(alpha=0.75), (128,)),
    "MobileNetV3, alpha = 1": (mobilenet, (32, 64, 128)),
    "ResNet-50": (lambda: resnet(50), (32, 64)),
    "ResNet-101": (lambda: resnet(101), (32, 64)),
}
"""Networks and batches of the published scripts and of figure 7; k = 12, alpha = 0.25 and 128 stand in the text."""


def settings() -> list[tuple[str, int]]:
    """Returns (network, samples) of all rows."""
    return [(name, samples) for name, (_, batches) in NETWORKS.items() for samples in batches]


def one_gpu(network: str, samples: int) -> Record:
    """Returns the seconds of a step's kernels on a V100, with starts that are waited for and without."""
    profile = NETWORKS[network][0]()
    costs = [cost for layer in profile.layers for cost in (layer.forward, layer.backward)]
    starts = sum(cost.fixed for cost in costs)
    issued = sum(cost.at(samples) for cost in costs) - starts
    return {
        "network": network, "samples": samples, "XLA": issued + starts, "issued in advance": issued,
        "issued in advance over XLA": (issued + starts) / issued,
    }  # fmt: skip
