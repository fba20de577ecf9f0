"""One rank of a pipeline in which PyTorch trains the GPT of `bench_models`; `bench_torch` starts it.

It runs under an interpreter that has PyTorch, which needn't have TensorFlow: it imports nothing of this repository. The
model has the layers and the weights of ours; all else is as PyTorch does it best: attention in one call, a fused
optimizer, the schedules of torch.distributed.pipelining, a gloo process for each rank.

The only argument is a task as JSON (see `main`). For each line on standard input, a number of steps, it trains and
answers with a line of JSON: the seconds, and the loss of the last step (null in all ranks but that of the last stage).
The first line that it writes tells the version and its number of parameters.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

_PATIENCE = datetime.timedelta(seconds=300)

SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
}
"""Schedules by name; the first takes one stage of a rank, the others two."""


_EPSILON = 1e-5


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention_output = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] -> the same shape."""
        batch, sequence, width = inputs.shape

        def split(values: torch.Tensor) -> torch.Tensor:
            return values.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)

        parts = [split(layer(inputs)) for layer in (self.query, self.key, self.value)]
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.attention_output(attended.transpose(1, 2).reshape(batch, sequence, width))


class Embedding(nn.Module):
    """Tokens to vectors, with learned positions."""

    def __init__(self, vocabulary: int, sequence: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(vocabulary, width))
        self.positions = nn.Parameter(torch.zeros(sequence, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [batch, sequence] -> [batch, sequence, width]."""
        return functional.embedding(tokens, self.tokens) + self.positions


class Block(nn.Module):
    """Pre-LN transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] -> the same shape."""
        middle = inputs + self.attention(self.attention_norm(inputs))
        hidden = functional.gelu(self.expand(self.mlp_norm(middle)), approximate="tanh")
        return middle + self.contract(hidden)


def make_stage(size: Mapping[str, Any], blocks: range) -> nn.Sequential:
    """Returns a stage of the GPT, whose layers have their names in Keras.

    Args:
        size: arguments of `models.gpt.GptConfig`.
        blocks: the blocks; the stage with the first also has what precedes it, that with the last what follows it.
    """
    width = size["width"]
    layers: dict[str, nn.Module] = {}
    if blocks.start == 0:
        layers["embedding"] = Embedding(size["vocabulary"], size["sequence"], width)
    layers |= {f"block_{index}": Block(width, size["heads"]) for index in blocks}
    if blocks.stop == size["depth"]:
        layers["final_norm"] = nn.LayerNorm(width, eps=_EPSILON)
        layers["logits"] = nn.Linear(width, size["vocabulary"], bias=False)
    return nn.Sequential(collections.OrderedDict(layers))


@torch.no_grad()
def take_weights(stage: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Takes over the weights of the Keras model, by their paths there.

    Raises:
        ValueError: a weight of this stage isn't among them, or has another number of elements.
    """
    by_name = {path.replace("/", "_"): value for path, value in weights.items()}
    for name, parameter in stage.named_parameters():
        owner, _, kind = name.rpartition(".")
        layer = stage.get_submodule(owner)
        if isinstance(layer, nn.LayerNorm):
            kind = {"weight": "gamma", "bias": "beta"}[kind]
        elif kind == "weight":
            kind = "kernel"
        key = f"{owner}.{kind}".replace(".", "_")
        if key not in by_name or by_name[key].size != parameter.numel():
            actual = f"shape {by_name[key].shape}" if key in by_name else "nothing"
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, but there is {actual} for {key}")
        value = by_name[key]
        if kind == "kernel":  # Keras: [in..., out...], e.g. out: (heads, size)
            value = value.reshape(*parameter.shape[::-1]).T
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value.reshape(parameter.shape))))


class Trainer:
    """Trains the stages of one rank.

    Attributes:
        stages: the modules.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        with np.load(task["file"], allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        self._tokens, self._labels = (torch.from_numpy(arrays.pop(name)).long() for name in "xy")
        own = [index for index, rank in enumerate(task["ranks"]) if rank == task["rank"]]
        self.stages = [make_stage(task["size"], range(*task["blocks"][index])) for index in own]
        for stage in self.stages:
            take_weights(stage, arrays)
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=task["learning_rate"], eps=1e-7, fused=True)
        count, device = len(task["ranks"]), torch.device("cpu")
        modules = [torch.compile(stage) if task["compile"] else stage for stage in self.stages]
        stages = [
            pipelining.PipelineStage(module, index, count, device) for module, index in zip(modules, own, strict=True)
        ]
        self._first, self._last = 0 in own, count - 1 in own
        make = SCHEDULES[task["schedule"]]
        single = task["schedule"] == "1f1b"
        self._schedule = make(stages[0] if single else stages, task["micro_batches"], loss_fn=_loss)

    def step(self) -> float | None:
        """Trains on the batch; the mean loss, in the rank of the last stage."""
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        last: dict[str, Any] = {"target": self._labels, "losses": losses} if self._last else {}
        self._schedule.step(*[self._tokens] if self._first else (), **last, return_outputs=False)
        self._optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def main() -> None:
    """Trains as it is told.

    The task has ``size`` of the GPT, ``blocks`` (start and stop of each stage), ``ranks`` (of each stage), ``rank``,
    ``port`` (of 127.0.0.1, free), ``schedule`` (one of `SCHEDULES`), ``micro_batches``, ``learning_rate``, ``compile``
    (whether by torch.compile), and ``file`` (an .npz file with the tokens ``x``, the labels ``y``, and the Keras
    model's weights by their paths).
    """
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task["port"]))
    ranks = max(task["ranks"]) + 1
    torch.distributed.init_process_group("gloo", rank=task["rank"], world_size=ranks, timeout=_PATIENCE)
    trainer = Trainer(task)
    parameters = sum(parameter.numel() for stage in trainer.stages for parameter in stage.parameters())
    _answer({"version": str(torch.__version__), "parameters": parameters})
    for line in sys.stdin:
        started, loss = time.perf_counter(), None
        for _ in range(int(line)):
            loss = trainer.step()
        _answer({"seconds": time.perf_counter() - started, "loss": loss})
    torch.distributed.destroy_process_group()


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
