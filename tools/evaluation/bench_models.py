"""Models of benchmarks: dense layers, a ResNet, and a GPT that PyTorch can train beside us.

A model is the name of its family (a module of `models`) and the arguments of its function there. Stages are given by
blocks: the first has what precedes block 0, the last what follows the last block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.models import gpt, resnet
from dapple_tf.schedules.policy import Placement
from dapple_tf.schedules.schedules import policy_of

LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class BenchModel:
    """A model, and random data for it.

    Attributes:
        family: one of `FAMILIES`.
        size: arguments of its function, plain values.
    """

    family: str
    size: Mapping[str, Any]

    @property
    def blocks(self) -> int:
        """Number of its blocks."""
        return sum(self.size["blocks"]) if self.family == "resnet" else self.size["depth"]

    def ranges(self, stages: int) -> list[tuple[int, int]]:
        """Returns the first block of each of ``stages`` stages, and the one after its last, as even as they can be.

        Raises:
            ValueError: there are fewer blocks than stages.
        """
        if self.blocks < stages:
            raise ValueError(f"{self.blocks} blocks of the {self.family} don't make {stages} stages")
        ends = [round(self.blocks * stage / stages) for stage in range(stages + 1)]
        return list(itertools.pairwise(ends))

    def cuts(self, stages: int) -> list[str]:
        """Returns the last layer of each of ``stages`` stages but the last, as even as they can be."""
        return [f"block_{end - 1}" for _, end in self.ranges(stages)[:-1]]

    def pipeline(self, devices: int, micro_batches: int, batch: int, schedule: str, **options: Any) -> dapple.Plan:
        """Returns a pipeline of even stages, with as many on each device as the schedule needs.

        Raises:
            ValueError: there are fewer blocks than stages.
        """
        placement = policy_of(schedule).planning.placements[-1]  # modulo also takes one stage on each device
        several = 1 if placement is Placement.STRAIGHT else 2
        groups = placement.stages([(device,) for device in range(devices)], several)
        assert groups is not None
        return dapple.Plan.manual(self.cuts(len(groups)), groups, micro_batches, batch, schedule, **options)

    def make(self, *, jit_compile: bool = False) -> keras.Model:
        """Returns the compiled model, with the same weights each time."""
        keras.utils.set_random_seed(1)
        model = FAMILIES[self.family](**self.size)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(LEARNING_RATE), loss, jit_compile=jit_compile)
        return model

    def batch(self, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns random inputs and labels: float32 or int32 [samples, ...]."""
        draw, size = np.random.default_rng(0), self.size
        if self.family == "gpt":
            tokens, labels = draw.integers(0, size["vocabulary"], (2, samples, size["sequence"]), "int32")
            return tokens, labels
        shape = (size["features"],) if self.family == "dense" else (size["image"], size["image"], size["channels"])
        labels = draw.integers(0, size["classes"], samples, "int32")
        return draw.normal(size=(samples, *shape)).astype("float32"), labels


def dense(features: int, width: int, depth: int, classes: int) -> keras.Model:
    """Returns dense layers: float32 [batch, features] -> logits [batch, classes]."""
    hidden = [keras.layers.Dense(width, activation="relu", name=f"block_{index}") for index in range(depth)]
    return keras.Sequential([keras.Input((features,)), *hidden, keras.layers.Dense(classes, name="logits")])


FAMILIES: Mapping[str, Callable[..., keras.Model]] = {
    "dense": dense,
    "gpt": lambda **size: gpt.build(gpt.GptConfig(**size)),
    "resnet": resnet.resnet,
}
"""Functions that build a model, by the name of its module."""

MODELS: Mapping[str, BenchModel] = {
    "dense": BenchModel("dense", {"features": 256, "width": 512, "depth": 4, "classes": 10}),
    "gpt:small": BenchModel("gpt", {"vocabulary": 256, "sequence": 64, "depth": 4, "width": 128, "heads": 4}),
    "gpt": BenchModel("gpt", {"vocabulary": 256, "sequence": 64, "depth": 8, "width": 256, "heads": 4}),
    "resnet": BenchModel("resnet", {"image": 32, "channels": 3, "classes": 10, "width": 32, "blocks": [2, 3, 3, 2]}),
    "gpt:tiny": BenchModel("gpt", {"vocabulary": 16, "sequence": 4, "depth": 4, "width": 8, "heads": 2}),
    "resnet:tiny": BenchModel("resnet", {"image": 8, "channels": 3, "classes": 4, "width": 8, "blocks": [2, 2]}),
}
"""Models by name; the tiny ones are for trying a benchmark out."""


def trainer(
    stack: contextlib.ExitStack,
    model: keras.Model,
    data: tuple[Any, np.ndarray],
    cluster: dapple.Cluster,
    plan: dapple.Plan,
    **options: Any,
) -> Callable[[int], float]:
    """Returns a function that trains a model on workers for some steps on a batch, and returns the last step's loss.

    The stack closes the pipelined model; ``options`` are further ones of `dapple.transform`.
    """
    pipelined = dapple.transform(model, cluster, plan, **options)
    stack.callback(pipelined.close, sync=False)
    return lambda steps: [float(pipelined.train_on_batch(*data)) for _ in range(steps)][-1]
