"""How long a step takes to prepare, and which part of that takes how long.

    python -m tools.prepare_step --devices=32 --micro_batches=32 --replicas=1
    python -m tools.prepare_step --devices=32 --micro_batches=32 --replicas=2 --hidden=512 --heads=8

Builds a BERT, cuts it evenly into pipeline stages on logical CPU devices, and trains a few steps on short sequences.
Preparation counts from `transform` to the end of the first step, less what a later step takes: that is computation,
which is reported apart.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import statistics
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from absl import app, flags

import dapple_tf as dapple
from dapple_tf.describe.plan import RECOMPUTE_MODES
from dapple_tf.models import bert
from dapple_tf.tools import command

FLAGS = flags.FlagValues()

_LAYERS = flags.DEFINE_integer("layers", 48, "encoder layers", lower_bound=1, flag_values=FLAGS)
_HIDDEN = flags.DEFINE_integer("hidden", 1024, "width of the model", lower_bound=1, flag_values=FLAGS)
_HEADS = flags.DEFINE_integer("heads", 16, "attention heads", lower_bound=1, flag_values=FLAGS)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 30522, "tokens in the vocabulary", lower_bound=1, flag_values=FLAGS)
_SEQUENCE = flags.DEFINE_integer("sequence", 16, "tokens per sample", lower_bound=1, flag_values=FLAGS)
_TIED = flags.DEFINE_bool("tied", True, "whether the first and the last stage share the embedding", flag_values=FLAGS)
_DEVICES = flags.DEFINE_integer("devices", 32, "logical devices", lower_bound=1, flag_values=FLAGS)
_REPLICAS = flags.DEFINE_integer("replicas", 1, "devices of each stage", lower_bound=1, flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 32, "micro-batches of a step", lower_bound=1, flag_values=FLAGS)
_SAMPLES = flags.DEFINE_integer(
    "samples", 0, "samples per micro-batch; 0 is one for each replica", lower_bound=0, flag_values=FLAGS
)
_SCHEDULE = flags.DEFINE_string("schedule", "dapple_a", "name of the schedule", flag_values=FLAGS)
_RECOMPUTE = flags.DEFINE_enum("recompute", "none", RECOMPUTE_MODES, "what backward recomputes", flag_values=FLAGS)
_JIT_COMPILE = flags.DEFINE_bool("jit_compile", False, "whether stages are compiled with XLA", flag_values=FLAGS)
_OPTIMIZER = flags.DEFINE_enum("optimizer", "sgd", ["sgd", "momentum", "adam"], "the optimizer", flag_values=FLAGS)
_STEPS = flags.DEFINE_integer(
    "steps", 3, "steps after the first one, of which the median is reported", lower_bound=1, flag_values=FLAGS
)
_OUT = flags.DEFINE_string("out", None, "write the numbers to this JSON file, too", flag_values=FLAGS)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What preparing a step took.

    Attributes:
        parts: name -> seconds, in the order of time; together they are the preparation.
        model_seconds: for building and compiling the model, which isn't part of the preparation.
        first_step_seconds: the first call of ``train_on_batch``, as a whole.
        step_seconds: the median of the later ones.
        processor_seconds: of transform and first step together, less a later step: on a machine that others use too,
            this drifts less than time does.
        peak_bytes: most memory that the process has had.
    """

    parts: Mapping[str, float]
    model_seconds: float
    first_step_seconds: float
    step_seconds: float
    processor_seconds: float
    peak_bytes: int

    @property
    def total(self) -> float:
        """From ``transform`` to the end of the first step, computation included."""
        return sum(self.parts.values()) + self.step_seconds


def even_cuts(layers: int, stages: int) -> list[str]:
    """Encoder layers after which to cut, so that stages have as many as possible alike."""
    ends = [round(layers * (stage + 1) / stages) for stage in range(stages - 1)]
    return [f"layer_{max(0, end - 1)}" for end in ends]


def optimizer(name: str) -> keras.optimizers.Optimizer:
    """One of the optimizers to choose from."""
    if name == "adam":
        return keras.optimizers.Adam(1e-4)
    return keras.optimizers.SGD(1e-3, momentum=0.9 if name == "momentum" else 0.0)


def batch_of(config: bert.BertConfig, samples: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random tokens."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, config.vocabulary, (samples, config.sequence)).astype("int32")
    segments = (np.arange(config.sequence) >= config.sequence // 2).astype("int32")
    x = {"tokens": tokens, "segments": np.tile(segments, (samples, 1)), "present": np.ones_like(tokens)}
    return x, draw.integers(0, config.vocabulary, tokens.shape).astype("int32")


def measure(config: bert.BertConfig, plan: dapple.Plan, devices: int, optimizer_name: str, steps: int) -> Measured:
    """Builds a model, prepares a step and runs it."""
    start = time.perf_counter()
    model = bert.build(config)
    model.compile(optimizer(optimizer_name), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model_seconds = time.perf_counter() - start
    x, y = batch_of(config, plan.global_batch_size)

    start, processor = time.perf_counter(), time.process_time()
    pipelined = dapple.transform(model, dapple.Cluster.local(devices, kind="cpu"), plan)
    transform_seconds = time.perf_counter() - start
    start = time.perf_counter()
    pipelined.train_on_batch(x, y)
    first_step_seconds = time.perf_counter() - start
    processor_seconds = time.process_time() - processor
    passes = pipelined.preparation_seconds
    later, processor_later = [], []
    for _ in range(steps):
        start, processor = time.perf_counter(), time.process_time()
        pipelined.train_on_batch(x, y)
        later.append(time.perf_counter() - start)
        processor_later.append(time.process_time() - processor)
    step_seconds = statistics.median(later)
    rest = first_step_seconds - sum(passes.values()) - step_seconds
    parts = {"transform: checks of model and cuts": transform_seconds, **passes, "first run in TensorFlow": rest}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    processor_seconds -= statistics.median(processor_later)
    return Measured(parts, model_seconds, first_step_seconds, step_seconds, processor_seconds, peak)


def table(measured: Measured) -> str:
    """The numbers for people."""
    rows = [(name, f"{seconds:.2f}") for name, seconds in measured.parts.items()]
    rows += [("preparation", f"{sum(measured.parts.values()):.2f}")]
    rows += [("computation (median of later steps)", f"{measured.step_seconds:.2f}")]
    rows += [("from transform to the end of the first step", f"{measured.total:.2f}")]
    rows += [("(building the model before that)", f"{measured.model_seconds:.2f}")]
    rows += [("(processor seconds of the preparation)", f"{measured.processor_seconds:.2f}")]
    rows += [("(peak memory, GB)", f"{measured.peak_bytes / 1e9:.2f}")]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>8}" for name, value in [("part", "seconds"), *rows])


def main() -> None:
    """Measures what the flags say."""
    stages, left = divmod(_DEVICES.value, _REPLICAS.value)
    if left or stages > _LAYERS.value:
        raise app.UsageError(
            f"{_DEVICES.value} devices don't make stages of {_REPLICAS.value} replicas with {_LAYERS.value} layers"
        )
    config = bert.BertConfig(
        depth=_LAYERS.value,
        width=_HIDDEN.value,
        heads=_HEADS.value,
        inner=4 * _HIDDEN.value,
        vocabulary=_VOCABULARY.value,
        sequence=_SEQUENCE.value,
        tied=_TIED.value,
    )
    plan = dapple.Plan.manual(
        even_cuts(_LAYERS.value, stages),
        [range(stage * _REPLICAS.value, (stage + 1) * _REPLICAS.value) for stage in range(stages)],
        _MICRO_BATCHES.value,
        _MICRO_BATCHES.value * (_SAMPLES.value or _REPLICAS.value),
        _SCHEDULE.value,
        recompute=_RECOMPUTE.value,
        jit_compile=_JIT_COMPILE.value,
    )
    print(
        f"BERT of {config.parameters / 1e6:.0f}M parameters, {stages} stages x {_REPLICAS.value} devices, "
        f"{plan.schedule}"
    )
    measured = measure(config, plan, _DEVICES.value, _OPTIMIZER.value, _STEPS.value)
    print(table(measured))
    if _OUT.value:
        flag_values: dict[str, Any] = FLAGS.flag_values_dict()
        data = {"flags": flag_values, **dataclasses.asdict(measured), "total": measured.total}
        pathlib.Path(_OUT.value).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command.start(main, FLAGS)
