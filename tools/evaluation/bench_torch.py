"""Pipelines of two processes beside PyTorch's: the same models, weights, batches, micro-batches and optimizer.

    python -m pip install torch          # or: pip install "dapple_tf[torch]"
    python -m tools.evaluation.bench_torch --samples=1,2,4,8 --json=speed.json
    python -m tools.evaluation.bench_torch --torch_python=other/bin/python   # PyTorch is in an environment of its own

Each model (`bench_models.MODELS`), type and size of micro-batches is a comparison of its own:

* torch_<schedule>: schedules of torch.distributed.pipelining, eager, with two gloo processes of one thread each
  (`tools/evaluation/torch_pipeline.py`), fused attention and a fused Adam; each pinned to a core, and `_unpinned`.
* torch_<schedule>_compiled: the same with stages compiled by torch.compile.
* ours_<schedule>: the same stages on two workers of one device and one thread each, pinned and not; dapple_a is 1F1B.
* ours_<schedule>_xla: with ``jit_compile``.

Our workers get ``TF_ENABLE_ONEDNN_OPTS=1``: PyTorch uses these kernels everywhere, TensorFlow by itself only on
processors with AVX512-VNNI or AMX.

First all make the same two steps from equal weights, whose losses are compared: times mean something only if all train
alike. Then each way has a few turns, by which the best of each kind are chosen; these take turns anew, and only those
turns count. Ratios are medians over rounds, with quartiles, of the throughput to that of the best of eager PyTorch's in
the same round. Peaks of resident memory are those of all processes of a way together, each process' own: of PyTorch
its two ranks, of ours two workers and the client, which train apart for this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.progress import Progress
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_gpt import LEARNING_RATE
from dapple_tf.tools.evaluation.bench_models import DTYPES, MODELS, BenchModel, Trainer
from dapple_tf.tools.evaluation.bench_report import check_output, numbers, write_results
from dapple_tf.tools.evaluation.peers import Peers, PeersError
from dapple_tf.tools.evaluation.process_families import peak_mib, place
from dapple_tf.tools.evaluation.ratios import quartiles, ratios, take_turns
from dapple_tf.tools.evaluation.torch_report import table
from dapple_tf.tools.evaluation.torch_ways import COMPILED, OUR_DEVICES, PYTORCH_RANKS, Way, all_ways, best, by_name
from dapple_tf.tools.hosts import LocalWorkers, free_ports

FLAGS = flags.FlagValues()
_PYTHON = flags.DEFINE_string("torch_python", sys.executable, "Interpreter with PyTorch.", flag_values=FLAGS)
_MODELS = flags.DEFINE_list("models", ["gpt", "bert", "resnet"], "Models to train.", flag_values=FLAGS)
_DTYPES = flags.DEFINE_list("dtypes", ["float32"], "Types to compute in: float32, bfloat16.", flag_values=FLAGS)
_SAMPLES = flags.DEFINE_list("samples", ["8"], "Samples of a micro-batch, to try each.", flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 16, "Micro-batches of a step.", lower_bound=2, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 8, "Rounds, with a turn of each best way.", lower_bound=2, flag_values=FLAGS)
_TRIALS = flags.DEFINE_integer("trials", 2, "Turns of each way to find the best.", lower_bound=1, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 1, "Steps of a turn.", lower_bound=1, flag_values=FLAGS)
_TORCH = flags.DEFINE_list("torch_schedules", list(PYTORCH_RANKS), "PyTorch's schedules, eager.", flag_values=FLAGS)
_COMPILED = flags.DEFINE_list(
    "torch_compiled", ["1f1b"], "PyTorch's with torch.compile, which needs a C++ compiler.", flag_values=FLAGS
)
_SCHEDULES = flags.DEFINE_list(
    "schedules", ["dapple_a", "interleaved", "zb_v"], "Schedules of our pipelines.", flag_values=FLAGS
)
_XLA = flags.DEFINE_bool("xla", True, "Also run our pipelines with XLA.", flag_values=FLAGS)
_ONEDNN = flags.DEFINE_bool(
    "onednn", True, "Let our workers use oneDNN whatever the processor, as PyTorch does.", flag_values=FLAGS
)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)
_PEER = flags.DEFINE_string("peer", None, "Internal: a case and a way of ours to train apart.", flag_values=FLAGS)

TOLERANCES = {"float32": 2e-3, "bfloat16": 2e-2}
"""Relative tolerance of losses: both round differently, and their Adams have epsilon in different places."""

_FIRST_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: one of `MODELS`.
        dtype: one of `DTYPES`.
        samples: of a micro-batch.
        micro_batches: of a step.
    """

    model: str
    dtype: str
    samples: int
    micro_batches: int

    @property
    def name(self) -> str:
        """Name of its results."""
        return f"torch {self.model} {self.dtype} {self.samples}"

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.samples * self.micro_batches

    @property
    def bench_model(self) -> BenchModel:
        """The model."""
        return MODELS[self.model]


# ---- PyTorch's side


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


def write_start(case: Case, file: pathlib.Path) -> int:
    """Writes the batch and the model's first weights for PyTorch; returns the number of trainable weights."""
    variables = case.bench_model.make().trainable_variables
    x, y = case.bench_model.data(case.batch)
    weights = {variable.path: np.asarray(variable.value) for variable in variables}
    arrays: dict[str, Any] = {**{f"x/{name}": values for name, values in x.items()}, "y": y, **weights}
    np.savez(file, **arrays)
    return sum(weight.size for weight in weights.values())


def torch_pipeline(stack: contextlib.ExitStack, case: Case, way: Way, file: pathlib.Path) -> Peers:
    """Starts PyTorch's two processes, each of which has reported its version and its number of parameters."""
    model = case.bench_model
    task = {
        "family": model.family,
        "size": dict(model.size),
        "blocks": model.ranges(len(way.devices)),
        "ranks": way.devices,
        "port": free_ports(1)[0],
        "schedule": way.schedule,
        "micro_batches": case.micro_batches,
        "learning_rate": LEARNING_RATE,
        "dtype": case.dtype,
        "compile": way.compiled,
        "threads": 1,
        "inputs": list(model.data(1)[0]),
        "shared": model.shared_inputs,
        "file": str(file),
    }
    program = [_PYTHON.value, "-m", "tools.evaluation.torch_pipeline"]
    tasks = [json.dumps({**task, "rank": rank}) for rank in range(2)]
    commands = [[*program, own] for own in tasks]
    return Peers(stack, commands, environments=[{"OMP_NUM_THREADS": "1"}] * 2, greeted=True)


# ---- our side


def own_pipeline(stack: contextlib.ExitStack, case: Case, way: Way, workers: LocalWorkers) -> Trainer:
    """Returns our pipeline."""
    cluster = dapple.Cluster.of_servers(workers.addresses)
    model = case.bench_model
    plan = way.plan(model, case.micro_batches, case.batch)
    return Trainer(stack, model.make(dtype=case.dtype), model.batch(case.batch), cluster, plan)


def be_peer(case: Case, way: Way) -> None:
    """Trains by a way of ours, with workers of this process' own: see `tools.evaluation.peers`."""
    with contextlib.ExitStack() as stack:
        train = own_pipeline(stack, case, way, own_workers(stack))
        for line in sys.stdin:
            train(int(line))
            sys.stdout.write(f"{train.loss}\n")
            sys.stdout.flush()


def own_workers(stack: contextlib.ExitStack) -> LocalWorkers:
    """Starts two workers of one thread for operators each, with a core of its own each until they are placed."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    return stack.enter_context(LocalWorkers(2, cores=cores, echo=lambda worker, line: None))


def own_peak(case: Case, way: Way) -> float:
    """Returns the peaks of resident memory of a client and two workers that train by a way of ours, in MiB.

    Raises:
        PeersError: they ended.
    """
    task = json.dumps({"case": dataclasses.asdict(case), "way": dataclasses.asdict(way)})
    with contextlib.ExitStack() as stack:
        peer = Peers(stack, [[sys.executable, "-m", "tools.evaluation.bench_torch", f"--peer={task}"]])
        peer(_FIRST_STEPS + _TRIALS.value)
        return peak_mib(peer.processes)


# ---- both


class Run:
    """A way's processes, which are pinned to a core each, or not, before they train."""

    def __init__(self, train: Peers | Trainer, processes: Sequence[int], *, pinned: bool) -> None:
        self._train, self._processes, self._pinned = train, processes, pinned

    def __call__(self, steps: int) -> None:
        """Trains for ``steps`` steps."""
        cores = sorted(os.sched_getaffinity(0))
        for index, process in enumerate(self._processes):
            place(process, [cores[index % len(cores)]] if self._pinned else cores)
        self._train(steps)

    @property
    def loss(self) -> float:
        """The loss of the last step; of PyTorch, the rank of the last stage has answered it."""
        if isinstance(self._train, Trainer):
            return self._train.loss
        answers = map(json.loads, self._train.answers)
        return next(answer["loss"] for answer in answers if answer["loss"] is not None)


def measure(case: Case, ways: list[Way]) -> tuple[list[dict[str, Any]], str]:
    """Returns a record of each way, and PyTorch's version.

    Raises:
        PeersError: processes ended, or don't train alike.
    """
    bar = Progress(case.name, len(ways) + _TRIALS.value + _ROUNDS.value, shown=True)
    with contextlib.ExitStack() as stack:
        file = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "start.npz"
        parameters = write_start(case, file)
        workers = own_workers(stack)
        runs: dict[Way, Run] = {}
        trains: dict[Way, Peers | Trainer] = {}
        losses: dict[Way, list[float]] = {}
        for way in ways:
            shared = way.shared
            if shared not in trains and way.ours:
                trains[shared] = own_pipeline(stack, case, way, workers)
            elif shared not in trains:
                trains[shared] = peers = torch_pipeline(stack, case, way, file)
                version = check_parameters(peers, case, parameters)
            runs[way] = Run(trains[shared], processes_of(trains[shared], workers), pinned=way.pinned)
            losses[way] = losses.get(shared) or first_losses(runs[way])
            check_alike(losses, case)
            bar.step(f"first steps of {way.name}")
        trials = turns(runs, _TRIALS.value, bar)
        finalists = best(trials)
        times = turns({way: runs[way] for way in finalists}, _ROUNDS.value, bar)
        peaks = {way: peak_mib(processes_of(trains[way.shared], workers)) for way in finalists if not way.ours}
    bar.close()
    peaks |= {way: own_peak(case, way) for way in finalists if way.ours}
    rates = {way: [case.batch / seconds for seconds in way_times] for way, way_times in times.items()}
    records = [
        {
            **dataclasses.asdict(case),
            "way": way.name,
            "kind": way.kind,
            "parameters": parameters,
            "losses": losses[way],
            "trial_samples_per_s": case.batch / float(np.median(trials[way])),
            **({"rounds": _ROUNDS.value, **compared(way, rates), "peak_mib": peaks[way]} if way in rates else {}),
        }
        for way in ways
    ]
    return records, version


def turns(runs: Mapping[Way, Callable[[int], object]], rounds: int, bar: Progress) -> dict[Way, list[float]]:
    """Returns the seconds of a step of each way in each of some rounds."""
    calls = {way.name: functools.partial(run, _STEPS.value) for way, run in runs.items()}
    seen: set[int] = set()

    def told(number: int, name: str) -> None:
        if number not in seen:
            seen.add(number)
            bar.step(name)

    times = take_turns(calls, rounds, told)
    return {way: [seconds / _STEPS.value for seconds in times[way.name]] for way in runs}


def compared(way: Way, rates: Mapping[Way, list[float]]) -> dict[str, Any]:
    """Returns a best way's throughput, and its ratios to those of PyTorch's best, eager and compiled."""
    bases = {"ratio_to_torch": "torch", "ratio_to_compiled": "torch_compiled"}
    own = {"samples_per_s": quartiles(rates[way])}
    return own | {
        key: ratios(rates[way], rates[base]) for key, kind in bases.items() for base in rates if base.kind == kind
    }


def processes_of(train: Peers | Trainer, workers: LocalWorkers) -> list[int]:
    """Returns the processes that have the stages."""
    return train.processes if isinstance(train, Peers) else [worker.pid for worker in workers.processes]


def first_losses(run: Run) -> list[float]:
    """Returns the losses of a way's first steps, which warm it up."""
    losses = []
    for _ in range(_FIRST_STEPS):
        run(1)
        losses.append(run.loss)
    return losses


def check_parameters(peers: Peers, case: Case, parameters: int) -> str:
    """Checks the number of weights that PyTorch's new processes have reported; returns their version.

    Raises:
        PeersError: it is another.
    """
    told = [json.loads(answer) for answer in peers.answers]
    theirs = sum(rank["parameters"] for rank in told)
    if theirs != parameters:
        raise PeersError(f"PyTorch's {case.model} has {theirs} parameters and ours {parameters}")
    return told[0]["version"]


def check_alike(losses: Mapping[Way, list[float]], case: Case) -> None:
    """Checks that the last way's losses are those of the first one.

    Raises:
        PeersError: they aren't.
    """
    first, last = next(iter(losses)), list(losses)[-1]
    if not np.allclose(losses[last], losses[first], rtol=TOLERANCES[case.dtype], atol=0):
        pair = by_name({first: losses[first], last: losses[last]})
        raise PeersError(f"{first.name} and {last.name} don't train the {case.model} alike: losses {pair}")


def main() -> None:
    """Measures, prints the table and writes the file."""
    if _PEER.value is not None:
        task = json.loads(_PEER.value)
        be_peer(Case(**task["case"]), Way(**task["way"]))
        return
    check_output(_JSON.value)
    for flag, known in ((_MODELS, MODELS), (_DTYPES, DTYPES), (_TORCH, PYTORCH_RANKS), (_SCHEDULES, OUR_DEVICES)):
        command.check_choices(flag, known)
    command.check_choices(_COMPILED, COMPILED, empty=True)
    samples = numbers("samples", _SAMPLES.value)
    check_torch(_PYTHON.value)
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = str(int(_ONEDNN.value))  # for processes that start from here on
    ways = all_ways(_TORCH.value, _COMPILED.value, _SCHEDULES.value, xla=_XLA.value)
    every: list[dict[str, Any]] = []
    for model, dtype, count in itertools.product(_MODELS.value, _DTYPES.value, samples):
        case = Case(model, dtype, count, _MICRO_BATCHES.value)
        try:
            records, version = measure(case, ways)
        except PeersError as error:
            command.check(False, str(error))
        every += records
        if _JSON.value:  # Each time: all take a while.
            write_results(_JSON.value, case.name, records, versions={"torch": version})
    sys.stdout.write(table(every) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
