"""A pipeline of two processes beside PyTorch's: the same GPT, weights, batch, micro-batches and optimizer.

    python -m pip install torch          # or: pip install "dapple_tf[torch]"
    python -m tools.evaluation.bench_torch --rounds=12 --json=speed.json
    python -m tools.evaluation.bench_torch --torch_python=other/bin/python   # PyTorch is in an environment of its own

* torch_1f1b: `Schedule1F1B` of torch.distributed.pipelining, two gloo processes with one thread each
  (`tools/evaluation/torch_pipeline.py`), eager, with fused attention and a fused Adam.
* ours_<schedule>: the same two stages on two workers of one device each; dapple_a is 1F1B.
* ours_<schedule>_xla: with ``jit_compile``.

The processes of a stage are pinned to one core, the same for all ways, so that each has one thread. The ways take
turns; ratios are medians over rounds, with quartiles, of the throughput to PyTorch's in the same round. Before that all
make the same three steps from equal weights, whose losses are compared: times mean something only if all train alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.models.gpt import GptConfig
from dapple_tf.progress import Progress
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_gpt import LEARNING_RATE, Trainer, gpt_size, make_data, make_model
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, write_results
from dapple_tf.tools.evaluation.peers import Peers, PeersError, pinned
from dapple_tf.tools.evaluation.ratios import quartiles, ratios, take_turns
from dapple_tf.tools.hosts import LocalWorkers, free_ports

FLAGS = flags.FlagValues()
_PYTHON = flags.DEFINE_string("torch_python", sys.executable, "Interpreter with PyTorch.", flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Rounds, with a turn of each way.", lower_bound=2, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 1, "Steps of a turn.", lower_bound=1, flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 16, "Micro-batches of a step.", lower_bound=2, flag_values=FLAGS)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Samples of a micro-batch.", lower_bound=1, flag_values=FLAGS)
_BLOCKS = flags.DEFINE_integer("blocks", 8, "Blocks of the model.", lower_bound=2, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model; a multiple of 4.", lower_bound=4, flag_values=FLAGS)
_SEQUENCE = flags.DEFINE_integer("sequence", 64, "Tokens of a sample.", lower_bound=1, flag_values=FLAGS)
_SCHEDULES = flags.DEFINE_list("schedules", ["dapple_a"], "Schedules of our pipelines.", flag_values=FLAGS)
_XLA = flags.DEFINE_bool("xla", True, "Also run our pipelines with XLA.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)

TOLERANCE = 2e-3
"""Relative tolerance of losses: both round differently, and their Adams have epsilon in different places."""


def check_torch(python: str) -> None:
    """Checks that an interpreter has PyTorch.

    Raises:
        app.UsageError: PyTorch can't be imported, or the interpreter doesn't exist.
    """
    try:
        process = subprocess.run([python, "-c", "import torch.distributed.pipelining"], capture_output=True, text=True)
        said = process.stderr.strip().splitlines()[-1:] if process.returncode else None
    except OSError as error:
        said = [str(error)]
    command.check(
        said is None,
        f"--torch_python={python} has no PyTorch with pipelines ({''.join(said or [])}): install the extra "
        f"dapple_tf[torch], or give the interpreter of an environment that has it, --torch_python=path/bin/python",
    )


def torch_pipeline(stack: contextlib.ExitStack, size: GptConfig, micro_batches: int, batch: int) -> Peers:
    """Starts PyTorch's two processes, each of which has reported its versions."""
    x, y = make_data(size, batch)
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    arrays: dict[str, Any] = {"x": x, "y": y}
    arrays |= {variable.path: np.asarray(variable.value) for variable in make_model(size).trainable_variables}
    np.savez(folder / "start.npz", **arrays)
    task = {
        "size": dataclasses.asdict(size),
        "blocks_of_first": size.depth // 2,
        "micro_batches": micro_batches,
        "learning_rate": LEARNING_RATE,
        "file": str(folder / "start.npz"),
        "port": free_ports(1)[0],
    }
    program = [_PYTHON.value, "-m", "tools.evaluation.torch_pipeline"]
    commands = [[*pinned(rank), *program, json.dumps({**task, "rank": rank})] for rank in range(2)]
    return Peers(stack, commands, environments=[{"OMP_NUM_THREADS": "1"}] * 2, greeted=True)


def measure() -> tuple[list[dict[str, Any]], str]:
    """Returns the records, and PyTorch's version.

    Raises:
        PeersError: PyTorch's processes ended, or don't train alike.
    """
    size = gpt_size(_BLOCKS.value, _WIDTH.value, _SEQUENCE.value)
    batch = _MICRO_BATCHES.value * _SAMPLES.value
    cores = sorted(os.sched_getaffinity(0))[:2]
    bar = Progress("PyTorch and ours", _ROUNDS.value, shown=True)
    with contextlib.ExitStack() as stack:
        torch = torch_pipeline(stack, size, _MICRO_BATCHES.value, batch)
        told = [json.loads(answer) for answer in torch.answers]
        parameters = sum(rank["parameters"] for rank in told)
        if parameters != size.parameters:
            raise PeersError(f"PyTorch's model has {parameters} parameters and ours {size.parameters}")
        workers = stack.enter_context(LocalWorkers(2, cores=cores, echo=lambda worker, line: None))
        cluster = dapple.Cluster.of_servers(workers.addresses)
        ours: dict[str, Trainer] = {}
        for schedule in _SCHEDULES.value:
            for jit in (False, True)[: 1 + _XLA.value]:
                cut = f"block_{size.depth // 2 - 1}"
                stages = [[0], [1]]
                plan = dapple.Plan.manual(
                    [cut], stages, _MICRO_BATCHES.value, batch, schedule=schedule, jit_compile=jit
                )
                ours[f"ours_{schedule}{'_xla' * jit}"] = Trainer(stack, size, cluster, plan)
        losses = compare(torch, ours)
        ways: dict[str, Callable[[], object]] = {"torch_1f1b": functools.partial(torch, _STEPS.value)}
        ways |= {name: functools.partial(own, _STEPS.value) for name, own in ours.items()}
        times = take_turns(ways, _ROUNDS.value, lambda number, name: bar.at(name, number / _ROUNDS.value))
    bar.close()
    rates = {name: [_STEPS.value * batch / seconds for seconds in way_times] for name, way_times in times.items()}
    records = [
        {
            "way": name,
            "parameters": parameters,
            "micro_batches": _MICRO_BATCHES.value,
            "batch": batch,
            "rounds": _ROUNDS.value,
            "samples_per_s": quartiles(rates[name]),
            "ratio_to_torch": ratios(rates[name], rates["torch_1f1b"]),
            "losses": losses[name],
        }
        for name in rates
    ]
    return records, told[0]["version"]


def compare(torch: Peers, ours: dict[str, Trainer]) -> dict[str, list[float]]:
    """Returns the losses of the first three steps of each, which warm them up.

    Raises:
        PeersError: they don't agree.
    """
    losses: dict[str, list[float]] = {"torch_1f1b": []}
    for _ in range(3):
        torch(1)
        losses["torch_1f1b"].append(json.loads(torch.answers[1])["loss"])
    for name, own in ours.items():
        losses[name] = []
        for expected in losses["torch_1f1b"]:
            own(1)
            losses[name].append(own.loss)
            if abs(own.loss - expected) > TOLERANCE * expected:
                raise PeersError(f"{name} and PyTorch don't train alike: losses {losses[name]}, {losses['torch_1f1b']}")
    return losses


def table(records: list[dict[str, Any]]) -> str:
    """Returns the records as Markdown."""
    rows: list[tuple[object, ...]] = [("way", "samples/s", "of PyTorch's", "loss of step 3")]
    for record in records:
        rate = f"{record['samples_per_s'].median:.1f}"
        rows.append((record["way"], rate, record["ratio_to_torch"], f"{record['losses'][-1]:.5f}"))
    return markdown(rows)


def main() -> None:
    """Measures, prints the table and writes the file."""
    check_output(_JSON.value)
    command.check(_WIDTH.value % 4 == 0, f"--width={_WIDTH.value} isn't a multiple of the 4 heads")
    check_torch(_PYTHON.value)
    try:
        records, version = measure()
    except PeersError as error:
        command.check(False, str(error))
    sys.stdout.write(table(records) + "\n")
    if _JSON.value:
        write_results(_JSON.value, "torch", records, versions={"torch": version})


if __name__ == "__main__":
    command.start(main, FLAGS)
