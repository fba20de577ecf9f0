"""One rank of a pipeline that PyTorch trains; `tools.evaluation.bench_torch` starts it.

It runs under an interpreter that has PyTorch, which needn't have TensorFlow: it imports nothing but
`tools.evaluation.torch_models`. The models have the layers and the weights of ours; all else is as PyTorch does it
best: a fused optimizer, the schedules of torch.distributed.pipelining, a gloo process for each rank, bfloat16 by
autocast with each weight cast once in a step.

The only argument is a task as JSON (see `main`). For each line on standard input, a number of steps, it trains and
answers with a line of JSON: the seconds, and the loss of the last step (null in all ranks but that of the last stage).
The first line that it writes tells the version and its number of parameters.
"""

from __future__ import annotations

import contextlib
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
from torch.distributed import pipelining
from torch.nn import functional

from .torch_models import make_stage  # noqa: TID251 (`dapple_tf` can't be imported here)

_PATIENCE = datetime.timedelta(seconds=300)

SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
}
"""Schedules by name; the first takes one stage of a rank, the others two."""


class Trainer:
    """Trains the stages of one rank.

    Attributes:
        stages: the modules.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        with np.load(task["file"], allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        inputs = {name: _tensor(arrays.pop(f"x/{name}")) for name in task["inputs"]}
        self._shared = {name: inputs.pop(name) for name in task["shared"]}
        self._inputs, self._labels = tuple(inputs.values()), _tensor(arrays.pop("y"))
        own = [index for index, rank in enumerate(task["ranks"]) if rank == task["rank"]]
        self.stages = [make_stage(task["family"], task["size"], range(*task["blocks"][index])) for index in own]
        for stage in self.stages:
            stage.take(arrays)
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=task["learning_rate"], eps=1e-7, fused=True)
        self._bfloat16 = task["dtype"] == "bfloat16"
        count = len(task["ranks"])
        modules = [torch.compile(stage) if task["compile"] else stage for stage in self.stages]
        device = torch.device("cpu")
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
        precision = torch.autocast("cpu", torch.bfloat16) if self._bfloat16 else contextlib.nullcontext()
        with precision:
            self._schedule.step(*self._inputs if self._first else (), **self._shared, **last, return_outputs=False)
        self._optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None


def _tensor(values: np.ndarray) -> torch.Tensor:
    """Returns images as they are, and indices as int64, which embeddings and losses take."""
    tensor = torch.from_numpy(values)
    return tensor if tensor.is_floating_point() else tensor.long()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def main() -> None:
    """Trains as it is told.

    The task has ``family`` and ``size`` of the model (see `torch_models.make_stage`), ``blocks`` (start and stop of
    each stage), ``ranks`` (of each stage), ``rank``, ``port`` (of 127.0.0.1, free), ``schedule`` (one of `SCHEDULES`),
    ``micro_batches``, ``learning_rate``, ``dtype`` ("float32" or "bfloat16"), ``compile`` (whether by torch.compile),
    ``threads``, ``inputs`` (names of the model's inputs, in order), ``shared`` (those of them that all stages get), and
    ``file`` (an .npz file with the inputs as ``x/<name>``, the labels ``y``, and the Keras model's weights by their
    paths).
    """
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
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
