"""One stage of a GPT that PyTorch trains as a pipeline of two processes; `tools.evaluation.bench_torch` starts it.

It runs under an interpreter that has PyTorch, which needn't have TensorFlow: it imports nothing of this repository. The
model is that of `models.gpt`, layer for layer and with the weights that it is given. All else is as PyTorch does it
best: attention in one call, a fused optimizer, `Schedule1F1B` of torch.distributed.pipelining, one gloo process and one
thread for each stage.

The only argument is a task as JSON (see `main`). For each line on standard input, a number of steps, it trains and
answers with a line of JSON: the seconds, and the loss of the last step (null in all stages but the last). The first
line that it writes tells the version and its number of parameters.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

_EPSILON = 1e-5
_PATIENCE = datetime.timedelta(seconds=300)


class Attention(nn.Module):
    """Causal self-attention of several heads on [batch, sequence, width]."""

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


class Block(nn.Module):
    """Pre-LN transformer block on [batch, sequence, width]."""

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


class Stage(nn.Module):
    """Consecutive blocks; the first stage has the embedding, the last the logits."""

    def __init__(self, size: dict[str, int], blocks: range) -> None:
        super().__init__()
        width = size["width"]
        self.first, self.last = blocks.start == 0, blocks.stop == size["depth"]
        if self.first:
            self.tokens = nn.Parameter(torch.zeros(size["vocabulary"], width))
            self.positions = nn.Parameter(torch.zeros(size["sequence"], width))
        self.blocks = nn.ModuleDict({f"block_{index}": Block(width, size["heads"]) for index in blocks})
        if self.last:
            self.final_norm = nn.LayerNorm(width, eps=_EPSILON)
            self.logits = nn.Linear(width, size["vocabulary"], bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Tokens [batch, sequence] or hidden values [batch, sequence, width] -> hidden values or logits."""
        hidden = functional.embedding(inputs, self.tokens) + self.positions if self.first else inputs
        for block in self.blocks.values():
            hidden = block(hidden)
        return self.logits(self.final_norm(hidden)) if self.last else hidden

    @torch.no_grad()
    def take(self, weights: dict[str, np.ndarray]) -> None:
        """Takes over the weights of the Keras model, by their paths there.

        Raises:
            ValueError: a weight of this stage isn't among them, or has another number of elements.
        """
        for name, parameter in self.named_parameters():
            path, _, kind = name.removeprefix("blocks.").replace(".", "/").rpartition("/")
            layer = self.get_submodule(name.rpartition(".")[0]) if path else self
            if isinstance(layer, nn.LayerNorm):
                kind = {"weight": "gamma", "bias": "beta"}[kind]
            elif isinstance(layer, nn.Linear):
                kind = {"weight": "kernel", "bias": "bias"}[kind]
            key = f"{path or 'embedding'}/{kind}"
            if key not in weights or weights[key].size != parameter.numel():
                actual = f"shape {weights[key].shape}" if key in weights else "nothing"
                raise ValueError(f"{name} has shape {tuple(parameter.shape)}, but there is {actual} for {key}")
            value = weights[key]
            if kind == "kernel":  # Keras: [in..., out...], where query has (heads, size) as out
                shape = tuple(parameter.shape)
                value = value.reshape(shape[1], shape[0]).T
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value.reshape(parameter.shape))))


class Trainer:
    """Trains one stage by 1F1B.

    Attributes:
        stage: the module.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        size, rank = task["size"], task["rank"]
        middle = task["blocks_of_first"]
        blocks = range(middle) if rank == 0 else range(middle, size["depth"])
        self.stage = Stage(size, blocks)
        with np.load(task["file"], allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        self._x, self._y = (torch.from_numpy(arrays.pop(name).astype(np.int64)) for name in ("x", "y"))
        self.stage.take(arrays)
        self._optimizer = torch.optim.Adam(self.stage.parameters(), lr=task["learning_rate"], eps=1e-7, fused=True)
        micro_batches = task["micro_batches"]
        slice_shape = (len(self._x) // micro_batches, size["sequence"])
        hidden = torch.zeros(*slice_shape, size["width"], requires_grad=True)  # Gradients come back across the cut.
        logits = torch.zeros(*slice_shape, size["vocabulary"], requires_grad=True)
        example, result = (self._x[: slice_shape[0]], hidden) if rank == 0 else (hidden, logits)
        stage = PipelineStage(self.stage, rank, 2, torch.device("cpu"), input_args=example, output_args=result)
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=_loss)

    def step(self) -> float | None:
        """Trains on the batch; the mean loss, in the last stage."""
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if self.stage.first:
            self._schedule.step(self._x, return_outputs=False)
        else:
            self._schedule.step(target=self._y, losses=losses, return_outputs=False)
        self._optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    """Trains as it is told.

    The task has ``size`` (a `models.gpt.GptConfig` as a mapping), ``rank`` (0 or 1), ``port`` (of 127.0.0.1, free),
    ``blocks_of_first`` (of the first stage), ``micro_batches``, ``learning_rate`` and ``file`` (an .npz file with the
    batch, x and y, and the Keras model's weights by their paths).
    """
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task["port"]))
    torch.distributed.init_process_group("gloo", rank=task["rank"], world_size=2, timeout=_PATIENCE)
    trainer = Trainer(task)
    parameters = sum(parameter.numel() for parameter in trainer.stage.parameters())
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
