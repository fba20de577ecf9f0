"""Kills, stops and cuts off workers while a model trains on them, and checks that it ends as if nothing had happened.

    sudo .venv/bin/python -m tools.evaluation.check_faults --shapes=straight --faults=20 --json=faults.json

Workers run on separate hosts (network namespaces, `tools.hosts`); the training client runs in the first one. Each
shape of plan is trained twice, first undisturbed; then workers are killed, stopped (SIGSTOP) or cut off the
network at random moments, and given back once the client has noticed. So are packets one way: from a worker to another
one, to the client's host, or to others' TensorFlow ports alone. It prints a table of how long each took and
whether all variables and metrics are the same, bit by bit, and ends with code 1 if not, or if a process is left.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from absl import app, flags

import dapple_tf as dapple
from dapple_tf.network.keys import TLS_VARIABLE
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import write_results
from dapple_tf.tools.hosts import Hosts, HostsError, new_keys, unavailable

FLAGS = flags.FlagValues()

_SHAPES = flags.DEFINE_list(
    "shapes", ["data_parallel", "straight", "2:1", "1:2", "chunks", "zb_h1"], "Plans to try.", flag_values=FLAGS
)
_KINDS = flags.DEFINE_multi_enum(
    "kind", None, ["kill", "stop", "cut", "to worker", "to client", "to ports"], "Faults; all by default.", FLAGS
)
_FAULTS = flags.DEFINE_integer("faults", 20, "Faults in each training run.", lower_bound=1, flag_values=FLAGS)
_CHECKPOINTS = flags.DEFINE_bool(
    "checkpoints", False, "Resume from checkpoints, every 7 steps, not from synced values.", flag_values=FLAGS
)
_TLS = flags.DEFINE_bool("tls", False, "Connect by mutual TLS, with a certificate made for it.", flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random moments.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the rows to.", flag_values=FLAGS)
_INSIDE = flags.DEFINE_string("inside", None, "Internal: this is the client, and its task.", flag_values=FLAGS)

_HOSTS = 3
_SERVER_PORT = 2300
"""Port of each worker's TensorFlow server."""
_NOTICE_SECONDS = 10.0
"""Seconds of silence after which a worker is lost."""
_BATCH = 48
_BATCHES = 24
_EPOCHS = 5
_STEP_SECONDS = 0.1
"""Approximate seconds of one or a few steps: faults should hit all parts of a step, and the time between steps."""
_EVENT_SECONDS = 300.0
"""Maximum seconds between two reports of the client."""


class Row(NamedTuple):
    """One fault, times in seconds.

    Attributes:
        shape: name of the plan.
        kind: kind of the fault.
        host: host of the worker.
        step: last step that was finished before.
        noticed: time from the fault until the client noticed.
        back: time from then until all workers were back.
        replayed: number of steps that were repeated.
        recovered: time from noticing the fault until training was back where it was.
    """

    shape: str
    kind: str
    host: int
    step: int
    noticed: float
    back: float
    replayed: int
    recovered: float


def make_plan(shape: str) -> dapple.Plan:
    """Returns the plans by their names, for three devices."""
    if shape == "data_parallel":
        return dapple.Plan.data_parallel(3, _BATCH)
    if shape == "straight":
        return dapple.Plan.straight(["hidden_1", "hidden_3"], _BATCH, 4)
    if shape == "2:1":
        return dapple.Plan.manual(["hidden_2"], [[0, 1], [2]], 4, _BATCH)
    if shape == "1:2":
        return dapple.Plan.manual(["hidden_1"], [[0], [1, 2]], 4, _BATCH)
    if shape == "chunks":
        return dapple.Plan.manual(["hidden_1", "hidden_3"], [[0, 1, 2]] * 3, 1, _BATCH, reverse_first_k=1)
    if shape == "zb_h1":
        return dapple.Plan.straight(["hidden_1", "hidden_3"], _BATCH, 4, schedule="zb_h1")
    raise app.UsageError(f"unknown shape {shape!r}; see --shapes")


def make_model() -> keras.Model:
    """Returns a model with random state (dropout), optimizer slots and metrics."""
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(64, activation="gelu", name=f"hidden_{index}") for index in range(6)]
    model = keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(1e-3), "mse", metrics=["mae"])
    return model


# ---- the client, within the first host


class _Told(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        _tell(event="step", number=int(self.params["steps"]) * self.epoch + batch + 1)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch


def _tell(**event: Any) -> None:
    sys.stdout.write(json.dumps({"time": time.time(), **event}) + "\n")
    sys.stdout.flush()


def train(task: Mapping[str, Any]) -> None:
    """Trains once, reports events, and saves all values."""
    policy = dapple.FaultPolicy("restart", notice_seconds=task["notice_seconds"], wait_seconds=240)
    model = make_model()
    cluster = dapple.Cluster.of_servers(task["addresses"])
    pipelined = dapple.transform(model, cluster, make_plan(task["shape"]), faults=policy)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(_BATCH * _BATCHES, 16)).astype("float32")
    options: dict[str, Any] = {}
    if task["checkpoints"]:
        options["checkpoint"] = dapple.Checkpointing(task["checkpoints"], every_steps=7)
    threading.Thread(target=_watch, args=(pipelined,), daemon=True).start()
    history = pipelined.fit(
        x,
        x[:, :1],
        epochs=_EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=(x[:_BATCH], x[:_BATCH, :1]),
        callbacks=[_Told()],
        **options,
    )
    pipelined.close()
    values = [np.asarray(variable.value) for variable in (*model.variables, *model.optimizer.variables)]
    np.savez(task["result"], *values, *(np.asarray(history.history[key]) for key in sorted(history.history)))
    _tell(event="end")


def _watch(pipelined: dapple.PipelinedModel) -> None:
    """Reports faults as they are noticed and recovered from."""
    known = 0
    lost = None
    while True:
        error = pipelined.lost
        if error is not None and lost is None:
            _tell(event="lost", text=str(error))
        lost = error
        for record in pipelined.faults[known:]:
            known += 1
            _tell(
                event="recovered",
                noticed=record.noticed,
                waited=record.waited,
                replayed=record.replayed,
                seconds=record.seconds,
                step=record.step,
            )
        time.sleep(0.01)


# ---- what disturbs it


class _Client:
    """The client's process and its reports."""

    def __init__(self, hosts: Hosts, task: Mapping[str, Any]) -> None:
        line = [sys.executable, "-m", "tools.evaluation.check_faults", f"--inside={json.dumps(dict(task))}"]
        self.process = hosts.popen(0, line, stdout=-1)
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.step = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._events.put(json.loads(line))
        self._events.put({"event": "gone", "code": self.process.wait()})

    def until(self, wanted: str) -> dict[str, Any]:
        """Returns the next event of a kind."""
        while True:
            event = self._events.get(timeout=_EVENT_SECONDS)
            if event["event"] == "step":
                self.step = event["number"]
            if event["event"] == wanted:
                return event
            if event["event"] in ("end", "gone"):
                raise RuntimeError(f"the client told {event} where {wanted!r} was expected")

    def until_step(self, number: int) -> int:
        """Waits for a step, unless it is over; returns the last reported one."""
        while self.step < number:
            self.until("step")
        return self.step


def disturbed(hosts: Hosts, client: _Client, shape: str, draw: random.Random) -> Iterator[Row]:
    """Causes faults at random moments of a training run, one after the other."""
    steps = _EPOCHS * _BATCHES

    def close_ports(host: int) -> None:
        for other in {*range(_HOSTS)} - {host}:
            hosts.lose(host, other, f"ipproto tcp dport {_SERVER_PORT}")

    faults: dict[str, tuple[Callable[[int], None], Callable[[int], None]]] = {
        "kill": (hosts.kill, hosts.restart),
        "stop": (hosts.stop, hosts.cont),
        "cut": (hosts.cut, hosts.join),
        "to worker": (lambda host: hosts.lose(host, _HOSTS - host), hosts.join),
        "to client": (lambda host: hosts.lose(host, 0), hosts.join),
        "to ports": (close_ports, hosts.join),
    }
    # The run should last until the last fault.
    moments = sorted(draw.sample(range(2, round(0.8 * steps)), _FAULTS.value))
    for moment in moments:
        now = client.until_step(moment)
        time.sleep(draw.uniform(0, _STEP_SECONDS))
        kind = draw.choice(_KINDS.value or [*faults])
        host = draw.randrange(0 if kind in ("kill", "stop") else 1, _HOSTS)
        fault, mend = faults[kind]
        struck = time.time()
        fault(host)
        lost = client.until("lost")
        mend(host)
        recovered = client.until("recovered")
        yield Row(
            shape,
            kind,
            host,
            now,
            lost["time"] - struck,
            recovered["waited"],
            recovered["replayed"],
            recovered["seconds"],
        )


def check(hosts: Hosts, shape: str, folder: pathlib.Path) -> tuple[list[Row], bool]:
    """Trains undisturbed and disturbed; returns the faults, and whether both runs gave the same."""
    results = []
    rows: list[Row] = []
    for name in ("undisturbed", "disturbed"):
        place = folder / f"{shape.replace(':', '_')}_{name}"
        place.mkdir()
        result = place / "values.npz"
        task = {
            "shape": shape,
            "addresses": hosts.addresses,
            "notice_seconds": _NOTICE_SECONDS,
            "result": str(result),
            "checkpoints": str(place / "checkpoints") if _CHECKPOINTS.value else "",
        }
        client = _Client(hosts, task)
        if name == "disturbed":
            for row in disturbed(hosts, client, shape, random.Random(_SEED.value)):
                rows.append(row)
                command.say(
                    f"{shape} {len(rows)}/{_FAULTS.value}: {row.kind} worker {row.host} after step {row.step}: noticed "
                    f"{row.noticed:.1f} s, back {row.back:.1f} s, {row.replayed} steps again, {row.recovered:.1f} s"
                )
        client.until("end")
        client.process.wait()
        with np.load(result) as arrays:
            results.append([arrays[key] for key in arrays.files])
    same = all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    return rows, same


def table(rows: list[Row]) -> str:
    """Returns medians and maxima of each shape and kind, as Markdown."""
    lines = ["| plan | fault | times | noticed (s) | worker back (s) | steps again | went on (s) |", "|" + "---|" * 7]
    for shape in dict.fromkeys(row.shape for row in rows):
        for kind in sorted({row.kind for row in rows if row.shape == shape}):
            own = [row for row in rows if (row.shape, row.kind) == (shape, kind)]

            def shown(name: str, own: list[Row] = own) -> str:
                values = [getattr(row, name) for row in own]
                return f"{statistics.median(values):.1f} (at most {max(values):.1f})"

            names = ("noticed", "back", "replayed", "recovered")
            lines.append(f"| {shape} | {kind} | {len(own)} | " + " | ".join(map(shown, names)) + " |")
    return "\n".join(lines)


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


def main() -> None:
    """Checks all shapes."""
    if _INSIDE.value is not None:
        train(json.loads(_INSIDE.value))
        return
    for shape in _SHAPES.value:
        make_plan(shape)
    if why := unavailable():
        raise HostsError(why)
    marker = f"check_faults_{os.getpid()}"
    os.environ["DAPPLE_TF_CHECK"] = marker
    rows: list[Row] = []
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(_HOSTS, arguments=[f"--server_port={_SERVER_PORT}"], echo=lambda worker, line: None)
        if _TLS.value:
            os.environ[TLS_VARIABLE] = new_keys(folder, hosts.ips)
        with hosts:
            for shape in _SHAPES.value:
                faults, same = check(hosts, shape, pathlib.Path(folder))
                rows += faults
                command.say(f"{shape}: {len(faults)} faults, {'the same values' if same else 'OTHER VALUES'}")
                wrong += [] if same else [shape]
        left = orphans(marker)
    sys.stdout.write(table(rows) + "\n\n")
    count = len(_SHAPES.value)
    sys.stdout.write(
        f"{len(rows)} faults in {count} training runs: {count - len(wrong)} of {count} ended with the same weights, "
        f"slots and metrics as undisturbed, bit by bit; {len(left)} processes are left\n"
    )
    if _JSON.value:
        told = [{**row._asdict(), "same_values": row.shape not in wrong, "processes_left": len(left)} for row in rows]
        write_results(_JSON.value, "faults", told)
    if wrong or left:
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
