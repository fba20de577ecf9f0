"""Trains for hours while workers are lost in all ways, and records what every process keeps; the same bits in the end.

    sudo .venv/bin/python -m tools.evaluation.soak --minutes=120 --json=docs/results/soak.json
    sudo .venv/bin/python -m tools.evaluation.soak --minutes=10 --plan=zb_h1 --kinds=kill,"to ports"

Four workers run on separate hosts (network namespaces, `tools.hosts`), the client in the first. It trains in rounds of
``fit`` with validation and in every second round with checkpoints, ``evaluate`` and ``predict``, as slowly as people's
models, while faults of all kinds strike about twice a minute. Then as many rounds are trained undisturbed, at full
speed. It ends with code 1 if weights, slots, losses or predictions differ in any bit, if a process is left, or, of half
an hour and more, if memory, threads or open files grow with time.
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
from dapple_tf.tools.evaluation.bench_report import markdown, write_results
from dapple_tf.tools.hosts import Hosts, HostsError, new_keys, unavailable

_HOSTS = 4
_SERVER_PORT = 2300
"""Port of each worker's TensorFlow server."""
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

PLANS = {
    "2:2": dapple.Plan.manual(["hidden_2"], [[0, 1], [2, 3]], 4, _BATCH),
    "1:3": dapple.Plan.manual(["hidden_1"], [[0], [1, 2, 3]], 4, _BATCH),
    "3:1": dapple.Plan.manual(["hidden_2"], [[0, 1, 2], [3]], 4, _BATCH),
    "straight": dapple.Plan.straight(["hidden_1", "hidden_2", "hidden_4"], _BATCH, 4),
    "zb_h1": dapple.Plan.straight(["hidden_1", "hidden_2", "hidden_4"], _BATCH, 4, schedule="zb_h1"),
    "data_parallel": dapple.Plan.data_parallel(4, _BATCH),
    "chunks": dapple.Plan.manual(["hidden_1", "hidden_3"], [[0, 1, 2, 3]] * 3, 1, _BATCH, reverse_first_k=1),
}


class Kind(NamedTuple):
    """A kind of faults, of a host and sometimes another one.

    Attributes:
        strike: causes the fault.
        mend: ends it, once the client has noticed.
        away: whether it needs hosts other than the client's.
    """

    strike: Callable[[Hosts, int, int], object]
    mend: Callable[[Hosts, int, int], object] = lambda hosts, one, _: hosts.join(one)
    away: bool = True


def _kill_child(hosts: Hosts, one: int, _: int) -> None:
    for child in children(hosts.processes[one].pid):
        os.kill(child, 9)


def _close_ports(hosts: Hosts, one: int, _: int) -> None:
    for other in {*range(_HOSTS)} - {one}:
        hosts.lose(one, other, f"ipproto tcp dport {_SERVER_PORT}")


def _both(act: Callable[[Hosts, int], object]) -> Callable[[Hosts, int, int], object]:
    return lambda hosts, one, other: [act(hosts, host) for host in (one, other)]


def _blink(hosts: Hosts, one: int, _: int) -> None:
    hosts.cut(one)
    time.sleep(_BLINK_SECONDS)
    hosts.join(one)


KINDS = {
    "kill": Kind(lambda hosts, one, _: hosts.kill(one), lambda hosts, one, _: hosts.restart(one), away=False),
    "stop": Kind(lambda hosts, one, _: hosts.stop(one), lambda hosts, one, _: hosts.cont(one), away=False),
    "cut": Kind(lambda hosts, one, _: hosts.cut(one)),
    "child": Kind(_kill_child, lambda *_: None, away=False),
    "two": Kind(_both(Hosts.kill), _both(Hosts.restart), away=False),
    "again": Kind(lambda hosts, one, _: hosts.kill(one), _both(Hosts.restart), away=False),
    "blink": Kind(_blink, lambda *_: None),
    "to worker": Kind(lambda hosts, one, other: hosts.lose(one, other)),
    "to client": Kind(lambda hosts, one, _: hosts.lose(one, 0)),
    "to ports": Kind(_close_ports),
}
"""Kinds of faults: a worker killed, stopped, or cut off the network; the process of a worker for the client killed; two
workers killed at once; one killed while another one comes back; a link down for a while, which is no loss; packets lost
one way, from a worker to another one, to the client's host, or to others' TensorFlow ports alone."""

FLAGS = flags.FlagValues()

_MINUTES = flags.DEFINE_float("minutes", 120.0, "Minutes with faults.", lower_bound=0.1, flag_values=FLAGS)
_PLAN = flags.DEFINE_enum("plan", "2:2", list(PLANS), "Plan to train by.", flag_values=FLAGS)
_KINDS = flags.DEFINE_list("kinds", list(KINDS), "Kinds of faults.", flag_values=FLAGS)
_TLS = flags.DEFINE_bool("tls", False, "Connect by mutual TLS, with a certificate made for it.", flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the faults.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write faults and processes to.", flag_values=FLAGS)
_INSIDE = flags.DEFINE_string("inside", None, "Internal: this is the client, and its task.", flag_values=FLAGS)


class Fault(NamedTuple):
    """A fault, times in seconds.

    Attributes:
        kind: one of `KINDS`.
        start: time from the beginning.
        losses: number of times that the client lost a worker.
        replayed: number of steps that were repeated.
        noticed: time until the client noticed; 0 of what is no loss.
        seconds: time until it trained on.
    """

    kind: str
    start: float
    losses: int
    replayed: int
    noticed: float
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


def make_model() -> keras.Model:
    """Returns a model with random state (dropout), optimizer slots and metrics."""
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(64, activation="gelu", name=f"hidden_{index}") for index in range(6)]
    model = keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(1e-3), "mse", metrics=["mae"])
    return model


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
    cluster = dapple.Cluster.of_servers(task["addresses"])
    pipelined = dapple.transform(model, cluster, PLANS[task["plan"]], faults=policy)
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
            checkpoint=dapple.Checkpointing(place, every_steps=10, keep=2) if len(outcomes) % 2 else None,
        )
        losses = pipelined.evaluate(few, few[:, :1], batch_size=_BATCH, verbose=0)
        predictions = pipelined.predict(few, batch_size=_BATCH, verbose=0)
        outcomes.append([*history.history["loss"], *history.history["val_loss"], *losses, *predictions[:, 0].tolist()])
        shutil.rmtree(place, ignore_errors=True)
        _tell(rounds=len(outcomes))
    pipelined.close()
    values = [np.asarray(variable.value) for variable in (*model.variables, *model.optimizer.variables)]
    np.savez(task["result"], np.asarray(outcomes), *values)
    _tell(end=True)


def _watch(pipelined: dapple.PipelinedModel) -> None:
    state: dict[str, Any] = {}
    while True:
        faults = list(pipelined.faults)
        newest = {"losses": len(faults), "replayed": sum(fault.replayed for fault in faults)}
        newest["lost"] = pipelined.lost is not None
        if newest != state:
            state = newest
            _tell(**state)
        time.sleep(0.01)


# ---- what disturbs it


class _Client:
    """The client's process, and its newest report."""

    def __init__(self, hosts: Hosts, task: Mapping[str, Any]) -> None:
        line = [sys.executable, "-m", "tools.evaluation.soak", f"--inside={json.dumps(dict(task))}"]
        self.process = hosts.popen(0, line, stdin=-1, stdout=-1)
        self._changed = threading.Condition()
        self.state: dict[str, Any] = {"steps": 0, "rounds": 0, "losses": 0, "replayed": 0, "lost": False, "end": False}
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


def strike(hosts: Hosts, client: _Client, kind: str, draw: random.Random, began: float) -> Fault:
    """Causes a fault, and mends it once the client has noticed."""
    fault = KINDS[kind]
    one, other = draw.sample(range(1 if fault.away else 0, _HOSTS), 2)
    before, struck, noticed = dict(client.state), time.monotonic(), 0.0
    fault.strike(hosts, one, other)
    if kind != "blink":
        lost = f"the loss by {kind!r}"
        client.until(lambda state: state["lost"] or state["losses"] > before["losses"], lost)
        noticed = time.monotonic() - struck
    fault.mend(hosts, one, other)
    if kind != "blink":
        client.until(lambda state: state["losses"] > before["losses"], f"the recovery from {kind!r}")
    client.trained(3)
    losses, replayed = (client.state[name] - before[name] for name in ("losses", "replayed"))
    return Fault(kind, struck - began, losses, replayed, noticed, time.monotonic() - struck)


def disturbed(hosts: Hosts, client: _Client, seconds: float, draw: random.Random) -> Iterator[Fault]:
    """Causes faults of the flag's kinds in turns of random order, until the time is over."""
    client.trained(1)
    began = time.monotonic()
    kinds: list[str] = []
    while time.monotonic() < began + seconds:
        time.sleep(draw.uniform(*_PAUSE_SECONDS))
        kinds = kinds or draw.sample(_KINDS.value, len(_KINDS.value))
        yield strike(hosts, client, kinds.pop(), draw, began)


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


def record(hosts: Hosts, client: _Client, usages: list[Usage], ended: threading.Event) -> None:
    """Records what all processes keep, every few seconds."""
    began = time.monotonic()
    while not ended.wait(_RECORD_SECONDS):
        processes = [("client", client.process.pid)]
        for host, process in enumerate(hosts.processes):
            processes.append((f"worker {host}", process.pid))
            processes += [(f"serving {host}", child) for child in children(process.pid)]
        usages += filter(None, (usage(name, process, began) for name, process in processes))


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


def orphans(marker: str) -> list[str]:
    """Returns remaining processes: those whose environment has the marker, except this one."""
    processes = []
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (place / "environ").read_bytes() and int(place.name) != os.getpid():
                processes.append(f"{place.name}: {(place / 'cmdline').read_bytes().decode().replace(chr(0), ' ')}")
        except OSError:
            continue  # It has ended, or may not be read by us.
    return processes


# ---- reports


def fault_table(faults: Sequence[Fault]) -> str:
    """Returns how many faults of each kind there were, and what they took, as Markdown."""
    rows = [["fault", "times", "losses noticed", "noticed after (s)", "steps again", "training went on after (s)"]]
    for kind in KINDS:
        own = [fault for fault in faults if fault.kind == kind]
        if own:
            columns = ([getattr(fault, name) for fault in own] for name in ("noticed", "replayed", "seconds"))
            took = [f"{statistics.median(values):.1f} (at most {max(values):.1f})" for values in columns]
            rows.append([kind, str(len(own)), str(sum(fault.losses for fault in own)), *took])
    return markdown(rows)


def usage_table(usages: Sequence[Usage]) -> str:
    """Returns the medians of each quarter of the time, as Markdown."""
    rows = [["process", "memory (MiB), by quarters of the time", "threads", "open files"]]
    for process in sorted({usage.process for usage in usages}):
        units = {"bytes": 2**20, "threads": 1, "files": 1}
        columns = ([value / unit for value in quarters(usages, process, name)] for name, unit in units.items())
        rows.append([process, *(", ".join(f"{value:,.0f}" for value in values) for values in columns)])
    return markdown(rows)


def main() -> None:
    """Trains disturbed and undisturbed, and compares."""
    if _INSIDE.value is not None:
        train(json.loads(_INSIDE.value))
        return
    command.check_choices(_KINDS, KINDS)
    if why := unavailable():
        raise HostsError(why)
    marker = f"soak_{os.getpid()}"
    os.environ["DAPPLE_TF_CHECK"] = marker
    began = time.monotonic()
    faults, usages, ended = list[Fault](), list[Usage](), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        task: dict[str, Any] = {"plan": _PLAN.value, "checkpoints": folder}
        runs = [task | {"result": f"{folder}/{name}.npz"} for name in ("disturbed", "undisturbed")]
        hosts = Hosts(_HOSTS, arguments=[f"--server_port={_SERVER_PORT}"], echo=lambda worker, line: None)
        if _TLS.value:
            os.environ[TLS_VARIABLE] = new_keys(folder, hosts.ips)
        with hosts:
            where = {"addresses": hosts.addresses}
            client = _Client(hosts, runs[0] | where | {"rounds": 10**9, "step_seconds": _STEP_SECONDS})
            recorder = threading.Thread(target=record, args=(hosts, client, usages, ended), daemon=True)
            recorder.start()
            for fault in disturbed(hosts, client, 60 * _MINUTES.value, random.Random(_SEED.value)):
                faults.append(fault)
                command.say(f"{fault.kind}: {fault.losses} losses, went on after {fault.seconds:.1f} s", began)
            ended.set()
            recorder.join()
            client.finish()
            rounds = client.state["rounds"]
            command.say(f"{rounds} rounds; now the same undisturbed", began)
            client = _Client(hosts, runs[1] | where | {"rounds": rounds, "step_seconds": 0.0})
            client.until(lambda state: state["end"], "the end of all rounds", 60 * _MINUTES.value + _PATIENCE_SECONDS)
            client.process.wait()
        left = orphans(marker)
        with np.load(runs[0]["result"]) as one, np.load(runs[1]["result"]) as other:
            unlike = [name for name in one.files if not np.array_equal(one[name], other[name])]
    long = _MINUTES.value >= _WARM_UP_MINUTES
    growth = grown(usages) if long else []
    told = growth or ["nothing grows" if long else "too short to tell whether anything grows"]
    sys.stdout.write(
        f"{fault_table(faults)}\n\n{usage_table(usages)}\n\n{_PLAN.value}: {len(faults)} faults in "
        f"{_MINUTES.value:.0f} minutes and {rounds * _EPOCHS * _BATCHES} steps (seed {_SEED.value}); "
        f"{f'{len(unlike)} ARRAYS DIFFER' if unlike else 'weights, slots, losses and predictions are the same bits'} "
        f"as undisturbed; {'; '.join(told)}; {len(left)} processes are left\n"
    )
    if _JSON.value:
        records = [{"table": "faults", **fault._asdict()} for fault in faults]
        for process in sorted({usage.process for usage in usages}):
            medians = {name: quarters(usages, process, name) for name in _LARGEST_GROWTH}
            records.append({"table": "processes", "process": process, **medians})
        write_results(_JSON.value, f"soak {_PLAN.value}", records)
    if unlike or growth or left:
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
