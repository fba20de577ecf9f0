"""Benchmarks of pipelines of two processes beside PyTorch's: the same GPT, weights, batches and optimizer.

PyTorch's are torch.distributed.pipelining's schedules in two gloo processes of one thread each (`torch_pipeline`),
eager or with stages compiled by torch.compile; ours are the same stages on two workers, with XLA or without. All have a
core each unless ``pinned`` is false. ``python`` is an interpreter with PyTorch: the extra ``dapple_tf[torch]``. Times
mean something only if all train alike, so that losses of the first step are compared.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench import Case, Numbers, Settings, Turn
from dapple_tf.tools.evaluation.bench_models import LEARNING_RATE, MODELS, trainer
from dapple_tf.tools.evaluation.peers import Peers, PeersError, pinned
from dapple_tf.tools.hosts import LocalWorkers, free_ports

STAGES = {"1f1b": (0, 1), "dapple_a": (0, 1), "interleaved": (0, 1, 0, 1), "zb_v": (0, 1, 1, 0)}
"""Device or process of each stage, by schedule; dapple_a is PyTorch's 1f1b."""
THEIRS = (("1f1b", False), ("interleaved", False), ("zb_v", False), ("1f1b", True))
OURS = (("dapple_a", False), ("interleaved", False), ("zb_v", False), ("dapple_a", True))
"""Schedules, and whether stages are compiled."""
TOLERANCE = 2e-3
"""Relative tolerance of losses: both round differently, and their Adams have epsilon in different places."""

Run = Callable[[int], float]
"""Trains for some steps; returns the loss of the last one."""


def check_alike(losses: dict[str, float]) -> None:
    """Compares the losses of ways that have trained equally long.

    Raises:
        PeersError: one isn't the first one's.
    """
    first = next(iter(losses.values()))
    if wrong := {name: loss for name, loss in losses.items() if not np.isclose(loss, first, TOLERANCE, 0)}:
        raise PeersError(f"not all train alike: the first has a loss of {first}, {wrong}")


def torch_way(stack: contextlib.ExitStack, settings: Settings, schedule: str, *, compiled: bool) -> tuple[Run, Any]:
    """Starts PyTorch's two processes with our first weights; returns how they train, and their ids."""
    model, count = MODELS[settings["model"]], settings["micro_batches"]
    command.check(
        model.family == "gpt", f"--set=model={settings['model']}: PyTorch has a GPT alone; use gpt:small, say"
    )
    file = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "start.npz"
    variables = model.make().trainable_variables
    x, y = model.batch(count * settings["samples"])
    weights = {variable.path: np.asarray(variable.value) for variable in variables}
    np.savez(file, x=x, y=y, **weights)  # type: ignore[arg-type]
    ranks = STAGES[schedule]
    task = {
        "size": dict(model.size),
        "blocks": model.ranges(len(ranks)),
        "ranks": ranks,
        "port": free_ports(1)[0],
        "schedule": schedule,
        "micro_batches": count,
        "learning_rate": LEARNING_RATE,
        "compile": compiled,
        "file": str(file),
    }
    program = [
        "env",
        "OMP_NUM_THREADS=1",
        settings["python"] or sys.executable,
        "-m",
        "tools.evaluation.torch_pipeline",
    ]
    lines = [
        [*(pinned(rank) if settings["pinned"] else []), *program, json.dumps({**task, "rank": rank})]
        for rank in range(2)
    ]
    peers = Peers(stack, lines)
    theirs = sum(json.loads(answer)["parameters"] for answer in peers.answers)
    ours = sum(weight.size for weight in weights.values())
    if theirs != ours:
        raise PeersError(f"PyTorch's {settings['model']} has {theirs} parameters and ours {ours}")

    def run(steps: int) -> float:
        peers(steps)
        return next(loss for answer in peers.answers if (loss := json.loads(answer)["loss"]) is not None)

    return run, peers.processes


def own_way(stack: contextlib.ExitStack, settings: Settings, schedule: str, *, compiled: bool) -> tuple[Run, Any]:
    """Starts two workers with our pipeline; returns how they train, and the ids of all processes."""
    # PyTorch uses these kernels everywhere, TensorFlow by itself only on processors with AVX512-VNNI or AMX.
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
    model, count, devices = MODELS[settings["model"]], settings["micro_batches"], STAGES[schedule]
    cores = sorted(os.sched_getaffinity(0))[:2] if settings["pinned"] else None
    workers = stack.enter_context(LocalWorkers(2, cores=cores, echo=lambda worker, line: None))
    batch, groups = count * settings["samples"], [[device] for device in devices]
    plan = dapple.Plan.manual(model.cuts(len(devices)), groups, count, batch, schedule, jit_compile=compiled)
    cluster = dapple.Cluster.of_servers(workers.addresses)
    run = trainer(stack, model.make(), model.batch(batch), cluster, plan)
    return run, [os.getpid(), *(worker.pid for worker in workers.processes)]


WAYS: dict[str, Callable[..., tuple[Run, Sequence[int]]]] = {
    f"{side}, {schedule}{', compiled' * compiled}": functools.partial(make, schedule=schedule, compiled=compiled)
    for side, make, ways in (("torch", torch_way, THEIRS), ("ours", own_way, OURS))
    for schedule, compiled in ways
}


def speed(stack: contextlib.ExitStack, settings: Settings) -> dict[str, Turn]:
    """Samples per second of all ways, which have made one equal step before."""
    wanted = settings["ways"].split(";") if settings["ways"] else list(WAYS)
    runs = {name: WAYS[name](stack, settings)[0] for name in wanted}
    check_alike({name: run(1) for name, run in runs.items()})
    samples = settings["steps"] * settings["micro_batches"] * settings["samples"]

    def turn(run: Run) -> Numbers:
        began = time.perf_counter()
        run(settings["steps"])
        return {"samples_per_s": samples / (time.perf_counter() - began)}

    return {name: functools.partial(turn, run) for name, run in runs.items()}


def memory(stack: contextlib.ExitStack, settings: Settings) -> dict[str, Turn]:
    """The sum of the peaks of resident memory of a way's processes; ours are the client and two workers."""

    def turn(make: Callable[..., tuple[Run, Sequence[int]]]) -> Numbers:
        with contextlib.ExitStack() as own:
            run, processes = make(own, settings)
            run(4)
            members = {member for process in processes for member in _family(process)}
            return {"peak_mib": sum(map(peak_kib, members)) / 1024}

    return {name: functools.partial(turn, make) for name, make in WAYS.items()}


def _family(process: int) -> Iterator[int]:
    """Yields a process and its descendants."""
    yield process
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for path in pathlib.Path(f"/proc/{process}").glob("task/*/children"):
            for child in path.read_text().split():
                yield from _family(int(child))


def peak_kib(process: int) -> int:
    """Returns the peak of a process' resident memory; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
            return int(match[1])
    return 0


_SETTINGS = {"model": "gpt", "samples": 8, "micro_batches": 16, "steps": 1}
_SETTINGS |= {"pinned": True, "python": "", "ways": ""}

CASES = {
    "torch": Case("throughput beside PyTorch's pipelines; ways are separated by ;", speed, _SETTINGS),
    "torch_memory": Case("peak memory beside PyTorch's pipelines", memory, _SETTINGS, rounds=1, apart=True),
}
