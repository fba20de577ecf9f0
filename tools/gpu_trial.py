"""Tries on one GPU what only a GPU can show, within ten minutes: needs no arguments, no data and no network.

    python -m dapple_tf.tools.gpu_trial           # writes runs/gpu_trial/trial.json and page.md

The card becomes four logical devices; without a card, four logical processors take its place. Each part is tried by
itself: the error of one that fails is written, and the rest goes on. The exit status is 1 if any part failed.

This program has run on processors only, not yet on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

import dapple_tf as dapple
from dapple_tf.clusters import session
from dapple_tf.models.gpt import gpt
from dapple_tf.models.resnet import resnet
from dapple_tf.tools import command
from dapple_tf.tools.machine_facts import machine_facts

FLAGS = flags.FlagValues()

_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/gpu_trial", "Folder to create; a number is appended if it exists.", flag_values=FLAGS
)
_TINY = flags.DEFINE_boolean("tiny", False, "Try the smallest models, as the tests do.", flag_values=FLAGS)
_PARTS = flags.DEFINE_list("parts", None, "Parts to try, by name; by default all.", flag_values=FLAGS)
_SECONDS = flags.DEFINE_float("seconds", 600, "No part begins later than this.", lower_bound=0, flag_values=FLAGS)

_DEVICES = 4
_SHARE_OF_MEMORY = 0.9
"""Share of a card's memory that the logical devices divide; the rest is for libraries."""

Batch = tuple[keras.Model, np.ndarray, np.ndarray, str]
"""A compiled model, a batch, and the layer after which it is cut."""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the models.

    Attributes:
        batch: samples of a batch.
        width: units of hidden layers.
        depth: blocks of the GPT.
        sequence: tokens of a sample.
        steps: measured steps.
    """

    batch: int = 32
    width: int = 512
    depth: int = 8
    sequence: int = 256
    steps: int = 20


TINY = Sizes(batch=8, width=16, depth=2, sequence=8, steps=2)


def logical_devices() -> str:
    """Makes four logical devices of the first card, if there is one; returns the card's name."""
    cards = tf.config.list_physical_devices("GPU")
    if not cards:
        return ""
    asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    free = int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    part = tf.config.LogicalDeviceConfiguration(memory_limit=int(free * _SHARE_OF_MEMORY / _DEVICES))
    tf.config.set_visible_devices(cards[:1], "GPU")
    tf.config.set_logical_device_configuration(cards[0], [part] * _DEVICES)
    return str(tf.config.experimental.get_device_details(cards[0]).get("device_name", "GPU"))


# ---- models


def _tokens(
    model: keras.Model, sizes: Sizes, vocabulary: int, cut: str, labels: tuple[int, ...], **options: Any
) -> Batch:
    """Returns a model of tokens, compiled, with a batch."""
    draw = np.random.default_rng(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, **{"jit_compile": False, **options})
    x = draw.integers(0, vocabulary, (sizes.batch, sizes.sequence)).astype("int32")
    return model, x, draw.integers(0, vocabulary, labels), cut


def a_gpt(sizes: Sizes, **options: Any) -> Batch:
    """Returns a GPT, cut in its middle."""
    heads = max(2, sizes.width // 64)
    model = gpt(vocabulary=256, sequence=sizes.sequence, depth=sizes.depth, width=sizes.width, heads=heads)
    cut = f"block_{sizes.depth // 2 - 1}"
    return _tokens(model, sizes, 256, cut, (sizes.batch, sizes.sequence), **options)


def a_resnet(sizes: Sizes, **options: Any) -> Batch:
    """Returns a ResNet of small images, cut in its middle."""
    model = resnet(width=max(4, sizes.width // 8), blocks=(1, 1) if sizes is TINY else (2, 3, 3, 2))
    draw = np.random.default_rng(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, **{"jit_compile": False, **options})
    layers = [layer.name for layer in model.layers]
    cut = next(name for name in layers[len(layers) // 2 :] if "relu" in name)
    return model, draw.normal(size=(sizes.batch, 32, 32, 3)).astype("float32"), draw.integers(0, 10, sizes.batch), cut


def a_recurrent(sizes: Sizes, *, use_cudnn: Any = "auto", **options: Any) -> Batch:
    """Returns two LSTMs, cut between them."""
    tokens = keras.Input((sizes.sequence,), dtype="int32")
    lstm = functools.partial(keras.layers.LSTM, sizes.width, use_cudnn=use_cudnn)
    x = keras.layers.Embedding(100, sizes.width)(tokens)
    x = lstm()(lstm(return_sequences=True, name="first")(x))
    return _tokens(keras.Model(tokens, keras.layers.Dense(100)(x)), sizes, 100, "first", (sizes.batch,), **options)


def embeddings(sizes: Sizes, **options: Any) -> Batch:
    """Returns a large table and dense layers, cut behind the first."""
    tokens = keras.Input((sizes.sequence,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(10_000, sizes.width, name="table")(tokens))
    x = keras.layers.Dense(sizes.width, activation="relu", name="first")(x)
    return _tokens(keras.Model(tokens, keras.layers.Dense(100)(x)), sizes, 100, "first", (sizes.batch,), **options)


MODELS: dict[str, Callable[..., Batch]] = {
    "GPT": a_gpt, "ResNet": a_resnet, "LSTM": a_recurrent, "embeddings": embeddings
}  # fmt: skip

# ---- parts


def _pipeline(made: Batch, cluster: dapple.Cluster, micro_batches: int = 2, **options: Any) -> dapple.PipelinedModel:
    plan = dapple.Plan.manual([made[3]], [[0], [1]], micro_batches, len(made[1]), **options)
    return dapple.transform(made[0], cluster, plan)


def _step_ms(model: Any, made: Batch, steps: int) -> float:
    """Returns the median milliseconds of a training step, after two that don't count."""
    seconds = []
    for _ in range(steps + 2):
        begun = time.perf_counter()
        model.train_on_batch(made[1], made[2])
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds[2:])


def _profile(made: Batch, samples: int, cluster: dapple.Cluster) -> dapple.Profile:
    return dapple.profile(made[0], [samples], x=made[1], y=made[2], cluster=cluster, cache=False, progress=False)


def equivalence(name: str, sizes: Sizes, cluster: dapple.Cluster) -> Iterator[Row]:
    """Steps of two stages beside plain Keras' in float32, without TF32; in one slice for batch normalization."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        made = MODELS[name](sizes)
        checked = _pipeline(made, cluster, 1 if name == "ResNet" else 2).verify(*made[1:3], steps=2, float64=False)
        checked.assert_equal()
        loss, plain = checked.loss
        yield {"loss": loss, "plain Keras": plain, "largest difference of a gradient": checked.worst[1]}
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def profile_beside_step(sizes: Sizes, cluster: dapple.Cluster) -> Iterator[Row]:
    """The simulated step of one device beside the measured one."""
    for name, make in MODELS.items():
        made = make(sizes)
        plan = dapple.Plan.data_parallel(1, sizes.batch, 1, jit_compile=False)
        found = _profile(made, sizes.batch, cluster)
        simulated = 1e3 * dapple.simulate(plan, found, cluster).latency
        measured = _step_ms(dapple.transform(made[0], cluster, plan), made, sizes.steps)
        yield {"model": name, "simulated ms": simulated, "measured ms": measured, "ratio": simulated / measured}


def xla(sizes: Sizes, cluster: dapple.Cluster) -> Iterator[Row]:
    """Steps with and without XLA, on one device, beside plain Keras with and without it."""
    for name in ("GPT", "ResNet"):
        for compiled in (False, True):
            made, own = MODELS[name](sizes, jit_compile=compiled), MODELS[name](sizes)
            plan = dapple.Plan.data_parallel(1, sizes.batch, 1, jit_compile=compiled)
            plain, ours = (
                _step_ms(model, made, sizes.steps) for model in (made[0], dapple.transform(own[0], cluster, plan))
            )
            yield {"model": name, "XLA": compiled, "plain Keras ms": plain, "plan ms": ours, "ratio": ours / plain}


def recurrent(sizes: Sizes, cluster: dapple.Cluster) -> Iterator[Row]:
    """Steps of recurrent layers, as loops and by cuDNN where there is one."""
    for use_cudnn in (False, "auto"):
        made = a_recurrent(sizes, use_cudnn=use_cudnn)
        yield {"use_cudnn": use_cudnn, "two stages ms": _step_ms(_pipeline(made, cluster), made, sizes.steps)}


def layouts(sizes: Sizes, cluster: dapple.Cluster) -> Iterator[Row]:
    """Steps of a ResNet with and without Grappler's layout optimizer, which transposes at functions' edges."""
    before = session.calls_config

    def without(optimized: bool) -> bytes:
        config = config_pb2.ConfigProto.FromString(before(optimized))
        config.graph_options.rewrite_options.layout_optimizer = rewriter_config_pb2.RewriterConfig.OFF
        return config.SerializeToString(deterministic=True)

    for on, own in ((True, before), (False, without)):
        with mock.patch.object(session, "calls_config", own):
            made = a_resnet(sizes)
            milliseconds = _step_ms(_pipeline(made, cluster, jit_compile=False), made, sizes.steps)
        yield {"layout optimizer": on, "two stages ms": milliseconds}


def memory(sizes: Sizes, cluster: dapple.Cluster) -> Iterator[Row]:
    """Peak memory of each device, simulated and by allocation records."""
    made = a_gpt(sizes)
    found = _profile(made, sizes.batch // 2, cluster)
    for recompute in ("none", "boundary"):
        pipelined = _pipeline(made, cluster, recompute=recompute, jit_compile=False)
        simulated = dapple.simulate(pipelined.plan, found, cluster).peak_bytes
        measured = pipelined.profile_step(made[1], made[2]).peak_bytes
        for device in sorted(measured):
            peaks = {"simulated MiB": simulated[device] / 2**20, "measured MiB": measured[device] / 2**20}
            yield {"recompute": recompute, "device": device, **peaks}


def timeline(sizes: Sizes, cluster: dapple.Cluster, folder: pathlib.Path) -> Iterator[Row]:
    """A measured step: where the time went, and all lists that the trace has."""
    made = a_gpt(sizes)
    pipelined = _pipeline(made, cluster, 4, jit_compile=False)
    step = pipelined.profile_step(made[1], made[2])
    step.save(folder / "timeline")
    yield {"text": str(step), "page": "timeline"}
    for own in pipelined.trace_step(made[1], made[2]).dev_stats:
        names = " ".join(dict.fromkeys(node.node_name for node in own.node_stats[:40]))
        yield {"list": own.device, "records": len(own.node_stats), "names": names[:120]}


# ---- the report


def _tried(name: str, part: Callable[[], Iterator[Row]], since: float) -> dict[str, Any]:
    """Returns a part's rows, its seconds, and its error if it failed."""
    rows: list[Row] = []
    begun, error = time.monotonic(), ""
    command.say(name, since)
    try:
        rows.extend(part())
    except Exception:
        error = traceback.format_exc(limit=-6)
    keras.backend.clear_session(free_memory=True)
    return {"part": name, "seconds": round(time.monotonic() - begun, 1), "rows": rows, "error": error}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page(record: dict[str, Any]) -> str:
    """Returns a record as Markdown: a table or an error for each part."""
    lines = [f"# Trial on {record['devices']}", "", f"`{json.dumps(record['machine'])}`", ""]
    for part in record["parts"]:
        state = "failed" if part["error"] else "done"
        lines += [f"## {part['part']}: {state}, {part['seconds']} s", ""]
        columns: tuple[str, ...] = ()
        for row in part["rows"]:
            if "text" in row:
                lines += ["```", row["text"], "```", ""]
                continue
            if tuple(row) != columns:
                columns = tuple(row)
                lines += [*([""] if lines[-1] else []), f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            lines.append(f"| {' | '.join(map(_shown, row.values()))} |")
        lines += ["", "```", part["error"].rstrip(), "```"] if part["error"] else []
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Tries all parts and writes the record and its page."""
    folder, since = command.fresh_folder(pathlib.Path(_OUTPUT_DIR.value)), time.monotonic()
    card = logical_devices()
    large = Sizes() if card else Sizes(batch=16, width=64, depth=4, sequence=32, steps=5)
    sizes, cluster = TINY if _TINY.value else large, dapple.Cluster.local(_DEVICES, kind="gpu" if card else "cpu")
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        f"equivalence of {name}": functools.partial(equivalence, name, sizes, cluster) for name in MODELS
    }
    several = (profile_beside_step, xla, recurrent, layouts, memory)
    parts |= {part.__name__.replace("_", " "): functools.partial(part, sizes, cluster) for part in several}
    parts["timeline"] = functools.partial(timeline, sizes, cluster, folder)
    unknown = set(_PARTS.value or ()) - set(parts)
    command.check(not unknown, f"--parts has {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    devices = f"{_DEVICES} logical devices of {card or 'processors'}"
    record: dict[str, Any] = {"devices": devices, "machine": machine_facts(), "parts": []}
    for name in _PARTS.value or parts:
        if time.monotonic() - since > _SECONDS.value:
            tried: dict[str, Any] = {"part": name, "seconds": 0.0, "rows": [], "error": "not tried: the time was over"}
        else:
            tried = _tried(name, parts[name], since)
        record["parts"].append(tried)
        # Whatever happens later, what is known so far is on disk.
        (folder / "trial.json").write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
        (folder / "page.md").write_text(page(record), encoding="utf-8")
    failed = [part["part"] for part in record["parts"] if part["error"]]
    print(f"{len(record['parts']) - len(failed)} of {len(record['parts'])} parts are done; see {folder / 'page.md'}")
    command.check(not failed, f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    command.start(main, FLAGS)
