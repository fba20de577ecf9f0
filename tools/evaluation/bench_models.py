"""Models of benchmarks: dense layers, and a GPT, a BERT and a ResNet that PyTorch can train beside us.

A model is the name of its family (a module of `models`) and the arguments of its function there, from which another
framework can build it too. Stages are given by blocks: the first has what precedes block 0, the last what follows the
last block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.models import bert, gpt, resnet
from dapple_tf.schedules.policy import Placement
from dapple_tf.schedules.schedules import policy_of

LEARNING_RATE = 1e-4

DTYPES = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
"""Policies of Keras by the type that a model computes in; variables always have float32."""


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

    @property
    def shared_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that every block reads."""
        return ("present",) if self.family == "bert" else ()

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
        prefix = "layer" if self.family == "bert" else "block"
        return [f"{prefix}_{end - 1}" for _, end in self.ranges(stages)[:-1]]

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

    def make(self, *, dtype: str = "float32", jit_compile: bool = False) -> keras.Model:
        """Returns the compiled model, with the same weights each time; ``dtype`` is one of `DTYPES`."""
        keras.utils.set_random_seed(1)
        with _policy(DTYPES[dtype]):
            model = FAMILIES[self.family](**self.size)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(LEARNING_RATE), loss, jit_compile=jit_compile)
        return model

    def data(self, samples: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns random inputs by their names, in the model's order, and labels: float32 and int32 [samples, ...]."""
        draw, size = np.random.default_rng(0), self.size
        if self.family == "resnet":
            images = draw.normal(size=(samples, size["image"], size["image"], size["channels"]))
            return {"images": images.astype("float32")}, draw.integers(0, size["classes"], samples, "int32")
        if self.family == "dense":
            vectors = draw.normal(size=(samples, size["features"])).astype("float32")
            return {"vectors": vectors}, draw.integers(0, size["classes"], samples, "int32")
        sequence = size["sequence"]
        tokens, labels = (draw.integers(0, size["vocabulary"], (samples, sequence), "int32") for _ in range(2))
        if self.family == "gpt":
            return {"tokens": tokens}, labels
        lengths = draw.integers(sequence // 2, sequence + 1, (samples, 1))
        present = (np.arange(sequence) < lengths).astype("int32")
        return {"tokens": tokens, "segments": draw.integers(0, 2, tokens.shape, "int32"), "present": present}, labels

    def batch(self, samples: int) -> tuple[Any, np.ndarray]:
        """Returns `data` as Keras takes it: a model with one input gets its array."""
        x, y = self.data(samples)
        return (x if len(x) > 1 else next(iter(x.values()))), y


def dense(features: int, width: int, depth: int, classes: int) -> keras.Model:
    """Returns dense layers: float32 [batch, features] -> logits [batch, classes]."""
    hidden = [keras.layers.Dense(width, activation="relu", name=f"block_{index}") for index in range(depth)]
    return keras.Sequential([keras.Input((features,)), *hidden, keras.layers.Dense(classes, name="logits")])


FAMILIES: Mapping[str, Callable[..., keras.Model]] = {
    "dense": dense,
    "gpt": lambda **size: gpt.build(gpt.GptConfig(**size)),
    "bert": lambda **size: bert.build(bert.BertConfig(**size)),
    "resnet": resnet.resnet,
}
"""Functions that build a model, by the name of its module."""

_TINY = {"vocabulary": 16, "sequence": 4, "depth": 4, "width": 8, "heads": 2}
# A BERT whose logits have a matrix of their own: PyTorch's pipelines can't share one between stages.
_BERT = {"tied": False, "dropout": 0.0}

MODELS: Mapping[str, BenchModel] = {
    "dense": BenchModel("dense", {"features": 256, "width": 512, "depth": 4, "classes": 10}),
    "gpt:small": BenchModel("gpt", {"vocabulary": 256, "sequence": 64, "depth": 4, "width": 128, "heads": 4}),
    "gpt": BenchModel("gpt", {"vocabulary": 256, "sequence": 64, "depth": 8, "width": 256, "heads": 4}),
    "bert": BenchModel(
        "bert",
        {"vocabulary": 1024, "sequence": 64, "positions": 64, "depth": 4, "width": 256, "heads": 4, "inner": 1024}
        | _BERT,
    ),
    "resnet": BenchModel("resnet", {"image": 32, "channels": 3, "classes": 10, "width": 32, "blocks": [2, 3, 3, 2]}),
    "gpt:tiny": BenchModel("gpt", _TINY),
    "bert:tiny": BenchModel("bert", _TINY | _BERT | {"positions": 4, "inner": 16}),
    "resnet:tiny": BenchModel("resnet", {"image": 8, "channels": 3, "classes": 4, "width": 8, "blocks": [2, 2]}),
}
"""Models by name; the tiny ones are for trying a benchmark out."""


class Trainer:
    """A pipelined model on workers, and a batch that it trains on again and again.

    Attributes:
        loss: loss of the last step.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        model: keras.Model,
        data: tuple[Any, np.ndarray],
        cluster: dapple.Cluster,
        plan: dapple.Plan,
        **options: Any,
    ) -> None:
        """Transforms the model, with further ``options`` of `dapple.transform`; the stack closes it."""
        self._pipelined = dapple.transform(model, cluster, plan, **options)
        stack.callback(self._pipelined.close, sync=False)
        self._data = data
        self.loss = 0.0

    def __call__(self, steps: int) -> None:
        """Trains for ``steps`` steps."""
        for _ in range(steps):
            self.loss = float(self._pipelined.train_on_batch(*self._data))


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
