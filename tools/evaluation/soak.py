"""Trains for hours while workers are lost in all ways, and records what every process keeps; the same bits in the end.

    sudo .venv/bin/python -m tools.evaluation.soak --minutes=120 --json=docs/results/soak.json

Four workers run on separate hosts (network namespaces, `tools.hosts`), the client in the first. It trains in rounds of
``fit`` with validation and checkpoints, ``evaluate`` and ``predict``, as slowly as people's models, while faults of
all kinds strike about twice a minute. Then as many rounds are trained undisturbed, at full speed. It ends with code 1
if weights, slots, losses or predictions differ in any bit, if a process is left, or, of half an hour and more, if
memory, threads or open files grow with time.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.network.keys import TLS_VARIABLE
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import write_results
from dapple_tf.tools.evaluation.check_faults import make_model, orphans
from dapple_tf.tools.hosts import Hosts, HostsError, new_keys, unavailable

FLAGS = flags.FlagValues()

_MINUTES = flags.DEFINE_float("minutes", 120.0, "Minutes with faults.", lower_bound=1.0, flag_values=FLAGS)
_TLS = flags.DEFINE_bool("tls", False, "Connect by mutual TLS, with a certificate made for it.", flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the faults.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write faults and processes to.", flag_values=FLAGS)
_INSIDE = flags.DEFINE_string("inside", None, "Internal: this is the client, and its task.", flag_values=FLAGS)

_HOSTS = 4
_NOTICE_SECONDS = 10.0
_BLINK_SECONDS = 7.0
"""A link that is down for so long is no loss yet."""
_PAUSE_SECONDS = (5.0, 30.0)
"""Least and most seconds from one recovery to the next fault; with what recoveries take, half a minute."""
_STEP_SECONDS = 0.3
"""Seconds that a disturbed step takes at least, so that the undisturbed ones are done in less time."""
_PATIENCE_SECONDS = 300.0
_RECORD_SECONDS = 5.0
_BATCH, _BATCHES, _EPOCHS = 48, 24, 2
_WARM_UP_MINUTES = 30.0
"""Shorter runs don't tell whether anything grows: memory is reserved and connections are made in the beginning."""
_LARGEST_GROWTH = {"bytes": 1.05, "threads": 1.05, "files": 1.1}
"""Largest ratio of what the client and workers keep in the last quarter of the time to what they kept in the second."""

KINDS = ("kill", "stop", "cut", "child", "two", "again", "blink")
"""Kinds of faults: a worker killed, stopped, or cut off the network; the process of a worker for the client killed; two
workers killed at once; one killed while another one comes back; a link down for a while, which is no loss."""


class Fault(NamedTuple):
    """A fault, times in seconds.

    Attributes:
        kind: one of `KINDS`.
        start: time from the beginning.
        losses: number of times that the client lost a worker.
        seconds: time until it trained on.
    """

    kind: str
    start: float
    losses: int
    seconds: float


class Usage(NamedTuple):
    """What a process keeps at a time.

    Attributes:
        process: "client", or "worker 0", say; "serving 0" is the worker's process for the client.
        start: time from the beginning, in seconds.
        bytes: resident memory.
        threads: number of threads.
        files: number of open files.
    """

    process: str
    start: float
    bytes: int
    threads: int
    files: int


# ---- the client, within the first host


class _Pace(keras.callbacks.Callback):
    """Tells of steps, and doesn't let them follow too fast."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        _tell(steps=self._steps)
        time.sleep(self._seconds)


def _tell(**state: Any) -> None:
    sys.stdout.write(json.dumps(state) + "\n")
    sys.stdout.flush()


def train(task: Mapping[str, Any]) -> None:
    """Trains in rounds until its input ends or all rounds are done, tells its state, and saves all values."""
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    policy = dapple.FaultPolicy("restart", notice_seconds=_NOTICE_SECONDS, wait_seconds=240)
    model = make_model()
    plan = dapple.Plan.manual(["hidden_2"], [[0, 1], [2, 3]], 4, _BATCH)
    pipelined = dapple.transform(model, dapple.Cluster.of_servers(task["addresses"]), plan, faults=policy)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(_BATCH * _BATCHES, 16)).astype("float32")
    y, few = x[:, :1], x[:_BATCH]
    threading.Thread(target=_watch, args=(pipelined,), daemon=True).start()
    pace = _Pace(task["step_seconds"])
    outcomes: list[Sequence[float]] = []
    while len(outcomes) < task["rounds"] and not ended.is_set():
        place = pathlib.Path(task["checkpoints"]) / f"round{len(outcomes)}"
        history = pipelined.fit(
            x,
            y,
            epochs=_EPOCHS,
            shuffle=False,
            verbose=0,
            validation_data=(few, few[:, :1]),
            callbacks=[pace],
            checkpoint=dapple.Checkpointing(place, every_steps=10, keep=2),
        )
        losses = pipelined.evaluate(few, few[:, :1], batch_size=_BATCH, verbose=0)
        predictions = pipelined.predict(few, batch_size=_BATCH, verbose=0)
        outcomes.append([*history.history["loss"], *history.history["val_loss"], *losses, *predictions[:, 0].tolist()])
        shutil.rmtree(place)
        _tell(rounds=len(outcomes))
    pipelined.close()
    values = [np.asarray(variable.value) for variable in (*model.variables, *model.optimizer.variables)]
    np.savez(task["result"], np.asarray(outcomes), *values)
    _tell(end=True)


def _watch(pipelined: dapple.PipelinedModel) -> None:
    state: dict[str, Any] = {}
    while True:
        newest = {"losses": len(pipelined.faults), "lost": pipelined.lost is not None}
        if newest != state:
            state = newest
            _tell(**state)
        time.sleep(0.01)


# ---- what disturbs it


class _Client:
    """The client's process, and the newest of what it told of itself."""

    def __init__(self, hosts: Hosts, task: Mapping[str, Any]) -> None:
        line = [sys.executable, "-m", "tools.evaluation.soak", f"--inside={json.dumps(dict(task))}"]
        self.process = hosts.popen(0, line, stdin=-1, stdout=-1)
        self._changed = threading.Condition()
        self.state: dict[str, Any] = {"steps": 0, "rounds": 0, "losses": 0, "lost": False, "end": False}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                with self._changed:
                    self.state |= json.loads(line)
                    self._changed.notify_all()
        with self._changed:
            self.state["code"] = self.process.wait()
            self._changed.notify_all()

    def until(self, wanted: Callable[[Mapping[str, Any]], bool], what: str, seconds: float = _PATIENCE_SECONDS) -> None:
        """Waits for a state.

        Raises:
            RuntimeError: the client has ended, or took too long.
        """
        with self._changed:
            self._changed.wait_for(lambda: wanted(self.state) or "code" in self.state, timeout=seconds)
            if not wanted(self.state):
                ended = "the client ended" if "code" in self.state else f"{seconds:.0f} s weren't enough"
                raise RuntimeError(f"waited for {what}, but {ended}, at {self.state}")

    def finish(self) -> None:
        """Lets it end with the round that it is in, and waits for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.until(lambda state: state["end"], "the end of the round")

    def trained(self, steps: int) -> None:
        """Waits until it has trained as many steps more, with all workers there."""
        goal = self.state["steps"] + steps
        self.until(lambda state: state["end"] or (state["steps"] >= goal and not state["lost"]), f"step {goal}")


def strike(hosts: Hosts, client: _Client, kind: str, draw: random.Random) -> int:
    """Causes a fault, and mends it once the client has noticed; returns how often it lost a worker."""
    one, other = draw.sample(range(_HOSTS), 2)
    away = draw.randrange(1, _HOSTS)  # The client itself is on host 0.
    before = client.state["losses"]

    def noticed() -> None:
        client.until(lambda state: state["lost"] or state["losses"] > before, f"the loss by {kind!r}")

    if kind == "blink":
        hosts.cut(away)
        time.sleep(_BLINK_SECONDS)
        hosts.join(away)
    elif kind == "cut":
        hosts.cut(away)
        noticed()
        hosts.join(away)
    elif kind == "stop":
        hosts.stop(one)
        noticed()
        hosts.cont(one)
    elif kind == "child":
        for child in children(hosts.processes[one].pid):
            os.kill(child, 9)
        noticed()
    else:
        lost = [one, other] if kind == "two" else [one]
        for host in lost:
            hosts.kill(host)
        noticed()
        for host in lost:
            hosts.restart(host)
        if kind == "again":
            hosts.restart(other)
    if kind != "blink":
        client.until(lambda state: state["losses"] > before, f"the recovery from {kind!r}")
    client.trained(3)
    return int(client.state["losses"]) - before


def disturbed(hosts: Hosts, client: _Client, seconds: float, draw: random.Random) -> Iterator[Fault]:
    """Causes faults of all kinds in turns of random order, until the time is over."""
    client.trained(1)
    began = time.monotonic()
    kinds: list[str] = []
    while time.monotonic() < began + seconds:
        time.sleep(draw.uniform(*_PAUSE_SECONDS))
        if not kinds:
            kinds = draw.sample(KINDS, len(KINDS))
        kind = kinds.pop()
        struck = time.monotonic()
        losses = strike(hosts, client, kind, draw)
        yield Fault(kind, struck - began, losses, time.monotonic() - struck)


# ---- what processes keep


def children(process: int) -> list[int]:
    """Returns the child processes of a process that haven't ended."""
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def usage(name: str, process: int, since: float) -> Usage | None:
    """Returns what a process keeps; None if it has ended."""
    place = pathlib.Path(f"/proc/{process}")
    try:
        pages = int((place / "statm").read_text().split()[1])
        threads = len(list((place / "task").iterdir()))
        files = len(list((place / "fd").iterdir()))
    except OSError:
        return None
    return Usage(name, time.monotonic() - since, pages * os.sysconf("SC_PAGE_SIZE"), threads, files)


class _Recorder:
    """Records what all processes keep, every few seconds, within a ``with`` block."""

    def __init__(self, hosts: Hosts, client: _Client) -> None:
        self.usages: list[Usage] = []
        self._hosts, self._client = hosts, client
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def __enter__(self) -> _Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _record(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(_RECORD_SECONDS):
            processes = [("client", self._client.process.pid)]
            for host, process in enumerate(self._hosts.processes):
                processes.append((f"worker {host}", process.pid))
                processes += [(f"serving {host}", child) for child in children(process.pid)]
            self.usages += filter(None, (usage(name, process, began) for name, process in processes))


def quarters(usages: Iterable[Usage], process: str, name: str) -> list[float]:
    """Returns the median of what a process kept, for each quarter of the time; the processes of one name together."""
    own = [usage for usage in usages if usage.process == process]
    end = max(usage.start for usage in own)
    parts = [[u for u in own if part * end <= 4 * u.start <= (part + 1) * end] for part in range(4)]
    return [statistics.median(getattr(usage, name) for usage in part) if part else float("nan") for part in parts]


def grown(usages: Sequence[Usage]) -> list[str]:
    """Returns what has grown with time, beyond `_LARGEST_GROWTH`; processes that serve a client live for too short."""
    texts = []
    for process in sorted({usage.process for usage in usages if not usage.process.startswith("serving")}):
        for name, most in _LARGEST_GROWTH.items():
            _, second, _, last = quarters(usages, process, name)
            if not last <= most * second:
                texts.append(f"{name} of {process}: {second:,.0f} in the second quarter, {last:,.0f} in the last")
    return texts


# ---- reports


def fault_table(faults: Sequence[Fault]) -> str:
    """Returns how many faults of each kind there were, and what they took, as Markdown."""
    lines = ["| fault | times | losses noticed | until training went on (s) |", "|---|---|---|---|"]
    for kind in KINDS:
        own = [fault for fault in faults if fault.kind == kind]
        if own:
            seconds = [fault.seconds for fault in own]
            took = f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})"
            lines.append(f"| {kind} | {len(own)} | {sum(fault.losses for fault in own)} | {took} |")
    return "\n".join(lines)


def usage_table(usages: Sequence[Usage]) -> str:
    """Returns the medians of each quarter of the time, as Markdown."""
    lines = ["| process | memory (MiB), by quarters of the time | threads | open files |", "|---|---|---|---|"]
    for process in sorted({usage.process for usage in usages}):
        cells = []
        for name in _LARGEST_GROWTH:
            unit = 2**20 if name == "bytes" else 1
            cells.append(", ".join(f"{value / unit:,.0f}" for value in quarters(usages, process, name)))
        lines.append(f"| {process} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Trains disturbed and undisturbed, and compares."""
    if _INSIDE.value is not None:
        train(json.loads(_INSIDE.value))
        return
    if why := unavailable():
        raise HostsError(why)
    marker = f"soak_{os.getpid()}"
    os.environ["DAPPLE_TF_CHECK"] = marker
    began = time.monotonic()
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory() as folder:
        task: dict[str, Any] = {"result": f"{folder}/disturbed.npz", "checkpoints": folder, "rounds": 10**9}
        hosts = Hosts(_HOSTS, echo=lambda worker, line: None)
        if _TLS.value:
            os.environ[TLS_VARIABLE] = new_keys(folder, hosts.ips)
        with hosts:
            task["addresses"] = hosts.addresses
            client = _Client(hosts, task | {"step_seconds": _STEP_SECONDS})
            with _Recorder(hosts, client) as recorder:
                for fault in disturbed(hosts, client, 60 * _MINUTES.value, random.Random(_SEED.value)):
                    faults.append(fault)
                    command.say(f"{fault.kind}: {fault.losses} losses, went on after {fault.seconds:.1f} s", began)
            client.finish()
            rounds = client.state["rounds"]
            command.say(f"{rounds} rounds; now the same undisturbed", began)
            plain = task | {"result": f"{folder}/undisturbed.npz", "rounds": rounds, "step_seconds": 0.0}
            client = _Client(hosts, plain)
            client.until(lambda state: state["end"], "the end of all rounds", 60 * _MINUTES.value + _PATIENCE_SECONDS)
            client.process.wait()
        left = orphans(marker)
        with np.load(task["result"]) as one, np.load(plain["result"]) as other:
            unlike = [name for name in one.files if not np.array_equal(one[name], other[name])]
    growth = grown(recorder.usages) if _MINUTES.value >= _WARM_UP_MINUTES else []
    sys.stdout.write(f"{fault_table(faults)}\n\n{usage_table(recorder.usages)}\n\n")
    steps = rounds * _EPOCHS * _BATCHES
    told = "nothing grows" if _MINUTES.value >= _WARM_UP_MINUTES else "too short to tell whether anything grows"
    sys.stdout.write(
        f"{len(faults)} faults in {_MINUTES.value:.0f} minutes and {steps} steps (seed {_SEED.value}); "
        f"{f'{len(unlike)} ARRAYS DIFFER' if unlike else 'weights, slots, losses and predictions are the same bits'} "
        f"as undisturbed; {'; '.join(growth) or told}; {len(left)} processes are left\n"
    )
    if _JSON.value:
        records = [{"table": "faults", **fault._asdict()} for fault in faults]
        for process in sorted({usage.process for usage in recorder.usages}):
            medians = {name: quarters(recorder.usages, process, name) for name in _LARGEST_GROWTH}
            records.append({"table": "processes", "process": process, **medians})
        write_results(_JSON.value, "soak", records)
    if unlike or growth or left:
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
