"""Data read by workers, beside the same data fed by the client: throughput, and what the client sends and computes.

    python -m tools.evaluation.bench_data --workers=2,4 --json=data.json

Trains a small convolutional network on JPEG files, data parallel on workers of this machine, in three ways that take
turns, so that all see the same changes of the machine's speed:

* client: the client decodes the files and feeds the batches.
* workers: each worker decodes whole batches, and keeps its samples (`dapple_tf.on_workers`).
* parts: each worker decodes its part of each batch (``in_parts=True``).

Bytes are those of the client's TCP sockets, as Linux counts them; the client's seconds are of all its threads. The
first step of a turn, which opens files, doesn't count. Client and workers share this machine's cores: what the client
decodes, workers can't compute meanwhile, and what two workers decode twice takes twice as long.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import stat
import struct
import sys
import tempfile
import time
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import dapple_tf as dapple
from dapple_tf.progress import Progress
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import cells, check_output, markdown, numbers, write_results
from dapple_tf.tools.evaluation.ratios import quartiles, ratios
from dapple_tf.tools.hosts import LocalWorkers

WAYS = ("client", "workers", "parts")

FLAGS = flags.FlagValues()
_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers.", flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 8, "Rounds, in each of which each way has its turn.", 2, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 12, "Steps of a turn.", lower_bound=2, flag_values=FLAGS)
_BATCH = flags.DEFINE_integer("batch", 32, "Images of a batch.", lower_bound=4, flag_values=FLAGS)
_FILES = flags.DEFINE_integer("files", 512, "Number of JPEG files, of 256 x 256.", lower_bound=4, flag_values=FLAGS)
_SIDE = flags.DEFINE_integer("side", 96, "Side of the model's images.", lower_bound=16, flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "Where to write the numbers, too.", flag_values=FLAGS)

_CLASSES = 10
_TCP_INFO_BYTES = 136
"""From here on Linux' ``tcp_info`` has other things; its last two numbers are the bytes acknowledged and received."""


def write_images(folder: pathlib.Path) -> list[str]:
    """Writes JPEG files of smooth noise; returns their paths."""
    draw = np.random.default_rng(0)
    paths = []
    for number in range(_FILES.value):
        coarse = draw.uniform(0, 255, (16, 16, 3)).astype("float32")
        pixels = tf.cast(tf.image.resize(coarse, (256, 256), "bicubic"), tf.uint8)
        path = folder / f"{number:05}.jpeg"
        path.write_bytes(tf.io.encode_jpeg(pixels, quality=90).numpy())
        paths.append(str(path))
    return paths


def make_dataset(paths: list[str], context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns the batches, or a part of each, without end."""
    side = _SIDE.value

    def read(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), channels=3), (side, side))
        return image / 255.0, label

    labels = np.arange(len(paths)) % _CLASSES
    files = (
        tf.data.Dataset.from_tensor_slices((paths, labels))
        .shuffle(len(paths), seed=1, reshuffle_each_iteration=False)
        .repeat()
    )
    files = files.shard(context.num_input_pipelines, context.input_pipeline_id)
    size = context.get_per_replica_batch_size(_BATCH.value)
    return files.map(read, num_parallel_calls=2).batch(size, drop_remainder=True).prefetch(2)


def make_model() -> keras.Model:
    """Returns a small convolutional network."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((_SIDE.value, _SIDE.value, 3))
    x = inputs
    for filters in (8, 16, 32):
        x = keras.layers.Conv2D(filters, 3, strides=2, activation="relu")(x)
    outputs = keras.layers.Dense(_CLASSES)(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs, name="small")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Counters(NamedTuple):
    """The counters of this process: bytes sent and received by TCP, seconds of its threads, and the time."""

    sent: int
    received: int
    cpu: float
    time: float

    @classmethod
    def now(cls) -> Counters:
        """Reads them."""
        sent = received = 0
        for name in os.listdir("/proc/self/fd"):
            number = int(name)
            with contextlib.suppress(OSError):  # closed meanwhile, or a socket of another kind
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
                with socket.socket(fileno=os.dup(number)) as own:
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                acknowledged, got = struct.unpack_from("QQ", info, _TCP_INFO_BYTES - 16)
                sent, received = sent + acknowledged, received + got
        return cls(sent, received, time.process_time(), time.perf_counter())


class _Counted(keras.callbacks.Callback):
    """Reads the counters after the first step and after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.read: list[Counters] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the mean loss so far."""
        self.losses.append(logs["loss"])
        if batch in (0, _STEPS.value - 1):
            self.read.append(Counters.now())


def measure(workers: int, paths: list[str]) -> list[dict[str, Any]]:
    """Returns a record for each way."""
    plan = dapple.Plan.manual([], [list(range(workers))], 1, _BATCH.value)
    data = {
        "client": make_dataset(paths, tf.distribute.InputContext()),
        "workers": dapple.on_workers(lambda: make_dataset(paths, tf.distribute.InputContext())),
        "parts": dapple.on_workers(lambda context: make_dataset(paths, context), in_parts=True),
    }
    turns: dict[str, list[_Counted]] = {way: [] for way in WAYS}
    with LocalWorkers(workers, echo=lambda *_: None) as running:
        cluster = dapple.Cluster.of_servers(running.addresses)
        pipelined = {way: dapple.transform(make_model(), cluster, plan) for way in WAYS}
        bar = Progress(f"{workers} workers", (_ROUNDS.value + 1) * len(WAYS), shown=True)
        for number in range(_ROUNDS.value + 1):
            for way in WAYS[:: 1 if number % 2 == 0 else -1]:
                counted = _Counted()
                pipelined[way].fit(
                    data[way], steps_per_epoch=_STEPS.value, shuffle=False, verbose=0, callbacks=[counted]
                )
                turns[way].append(counted)
                bar.step(way)
        bar.close()
        for own in pipelined.values():
            own.close()
    losses = {way: [loss for turn in turns[way] for loss in turn.losses] for way in WAYS}
    records = []
    steps = _STEPS.value - 1
    speeds: dict[str, list[float]] = {}
    for way in WAYS:
        # The first round makes the graphs.
        pairs = [turn.read for turn in turns[way][1:]]
        speeds[way] = [_BATCH.value * steps / (end.time - start.time) for start, end in pairs]
        records.append(
            {
                "workers": workers,
                "way": way,
                "samples_per_second": quartiles(speeds[way]),
                "ratio": ratios(speeds[way], speeds["client"]),
                "sent": float(np.median([(end.sent - start.sent) / steps for start, end in pairs])),
                "received": float(np.median([(end.received - start.received) / steps for start, end in pairs])),
                "cpu_ms": float(np.median([1e3 * (end.cpu - start.cpu) / steps for start, end in pairs])),
                "first_loss": losses[way][0],
                "last_loss": losses[way][-1],
                "equal": losses[way] == losses["client"],
            }
        )
    return records


def main() -> None:
    """Prints the table."""
    check_output(_JSON.value)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(pathlib.Path(folder))
        records = [record for workers in numbers("workers", _WORKERS.value) for record in measure(workers, paths)]
    columns = {
        "workers": "{workers}",
        "read by": "{way}",
        "samples/s": "{samples_per_second}",
        "to client's": "{ratio}",
        "bytes sent per step": "{sent:,.0f}",
        "received": "{received:,.0f}",
        "client's CPU, ms per step": "{cpu_ms:.1f}",
        "losses equal": "{equal}",
    }
    sys.stdout.write(markdown(cells(records, columns)) + "\n")
    if _JSON.value:
        write_results(_JSON.value, "data", records)


if __name__ == "__main__":
    command.start(main, FLAGS)
