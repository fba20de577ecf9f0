"""Trains a byte-level GPT on the source text of Python's standard library, pipelined over the devices of this machine.

    python -m dapple_tf.tools.train_gpt                     # two stages, of three replicas and of one
    python -m dapple_tf.tools.train_gpt --plan=1:1:1:1      # four stages on a device each
    python -m dapple_tf.tools.train_gpt --plan=plan.json    # a plan of your own

Shows the plan, the progress with loss and tokens per second, a sample of the model's text, and its bits per byte
on unseen files, beside those of a model that only knows how frequent each byte is. Writes to
``--output_dir``:

    model.keras    the trained model, an ordinary Keras model
    plan.json      the plan, to be edited and given to --plan
    history.csv    loss, held-out loss and tokens per second of each epoch
    summary.json   the final numbers
    dump/          the graphs after each pass, the plan, the schedule
"""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import keras
from absl import app, flags

import dapple_tf as dapple
from dapple_tf.models import gpt, text
from dapple_tf.tools import command
from dapple_tf.tools.command import fresh_folder
from dapple_tf.tools.model_flags import PlanFlags
from dapple_tf.tools.shapes import cuts_by_parameters

FLAGS = flags.FlagValues()

_PLAN = PlanFlags(FLAGS, default="3:1", batch=32)
_DEPTH = flags.DEFINE_integer("depth", 4, "Transformer blocks.", lower_bound=1, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer("width", 128, "Size of the residual stream.", lower_bound=1, flag_values=FLAGS)
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads per block.", lower_bound=1, flag_values=FLAGS)
_SEQUENCE = flags.DEFINE_integer("sequence", 128, "Bytes per window.", lower_bound=1, flag_values=FLAGS)
_DROPOUT = flags.DEFINE_float("dropout", 0.0, "Dropout rate.", lower_bound=0.0, flag_values=FLAGS)
_TIED = flags.DEFINE_boolean("tied", False, "Use the embedding's matrix for the logits too.", flag_values=FLAGS)

_EPOCHS = flags.DEFINE_integer(
    "epochs", 10, "Number of epochs; the held-out loss is estimated after each.", lower_bound=1, flag_values=FLAGS
)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps per epoch.", lower_bound=1, flag_values=FLAGS)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 5e-3, "Maximum learning rate, reached after a tenth of the steps.", flag_values=FLAGS
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the weights, the data's order, dropout and the sample.", flag_values=FLAGS
)
_VALIDATION_STEPS = flags.DEFINE_integer(
    "validation_steps", 8, "Held-out batches per epoch.", lower_bound=1, flag_values=FLAGS
)
_EVALUATION_STEPS = flags.DEFINE_integer(
    "evaluation_steps", 0, "Held-out batches of the final evaluation; 0 for all.", lower_bound=0, flag_values=FLAGS
)
_VERIFY = flags.DEFINE_boolean(
    "verify", False, "Compare steps with those of plain Keras before training.", flag_values=FLAGS
)

_PROMPT = flags.DEFINE_string("prompt", "def ", "Text with which the sample begins.", flag_values=FLAGS)
_SAMPLE_BYTES = flags.DEFINE_integer("sample_bytes", 400, "Bytes to sample.", lower_bound=0, flag_values=FLAGS)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "Temperature of the sample; 0 takes the likeliest byte.", lower_bound=0.0, flag_values=FLAGS
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/gpt", "Folder to create; a number is appended if it exists.", flag_values=FLAGS
)


class Throughput(keras.callbacks.Callback):
    """Adds ``tokens_per_s``, over the epoch so far, to the logs of steps and epochs.

    Leaves out the first step of each epoch, which prepares the graph or waits for data, and the time between steps.
    """

    def __init__(self, tokens_per_step: int) -> None:
        super().__init__()
        self._tokens_per_step = tokens_per_step
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._begin = 0.0
        self._first_rate = 0.0

    def _rate(self) -> float:
        """Returns tokens per second; of the first step until there is another one."""
        return self._tokens_per_step * self._steps / self._seconds if self._steps else self._first_rate

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the epoch's counts."""
        self._reset()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the step's start."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate so far to a step's logs."""
        seconds = time.perf_counter() - self._begin
        if self._first_rate:
            self._steps += 1
            self._seconds += seconds
        else:
            self._first_rate = self._tokens_per_step / seconds
        if logs is not None:
            logs["tokens_per_s"] = round(self._rate())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's rate to its logs."""
        if logs is not None:
            logs["tokens_per_s"] = round(self._rate())


def make_model() -> keras.Model:
    """Builds and compiles the model that the flags describe."""
    model = gpt.gpt(
        sequence=_SEQUENCE.value,
        depth=_DEPTH.value,
        width=_WIDTH.value,
        heads=_HEADS.value,
        dropout=_DROPOUT.value,
        tied=_TIED.value,
    )
    steps = _EPOCHS.value * _STEPS.value
    warm_up = max(1, steps // 10)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - warm_up), warmup_target=_LEARNING_RATE.value, warmup_steps=warm_up
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(rate, weight_decay=0.01, beta_2=0.98),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def show_sample(model: keras.Model) -> None:
    """Prints the prompt and the model's continuation."""
    prompt = _PROMPT.value.encode()
    drawn = gpt.sample(model, prompt, _SAMPLE_BYTES.value, temperature=_TEMPERATURE.value, seed=_SEED.value)
    print(f"\nWhat it writes at temperature {_TEMPERATURE.value:g}:\n")
    print((prompt + drawn).decode(errors="replace"))


def main() -> None:
    """Runs the job that the flags describe."""
    keras.utils.set_random_seed(_SEED.value)
    _PLAN.early_check()
    try:
        model = make_model()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    _PLAN.check_layers(model)
    plan = _PLAN.plan(lambda replicas: cuts_by_parameters(model, replicas))
    batch_size, sequence = plan.global_batch_size, _SEQUENCE.value
    corpus = text.standard_library()
    train = text.windows(corpus.train, sequence, batch_size, seed=_SEED.value, repeat=True)
    held_out = text.windows(corpus.held_out, sequence, batch_size)

    print(f"GPT of {model.count_params():,} parameters")
    print(f"{len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out\n")
    print(plan, flush=True)
    cluster = dapple.Cluster.local(1 + max(itertools.chain.from_iterable(plan.devices)))
    pipelined = dapple.transform(model, cluster, plan)
    folder = fresh_folder(pathlib.Path(_OUTPUT_DIR.value))
    print(f"\nEverything goes to {folder}", flush=True)
    plan.save(folder / "plan.json")
    if _VERIFY.value:
        # From a separate dataset: a pass over `train` would change the order in which training sees it.
        print(pipelined.verify(*next(iter(text.windows(corpus.train, sequence, batch_size)))))

    verbose = 1 if sys.stdout.isatty() else 2
    begin = time.perf_counter()
    history = pipelined.fit(
        train,
        epochs=_EPOCHS.value,
        steps_per_epoch=_STEPS.value,
        validation_data=held_out,
        validation_steps=_VALIDATION_STEPS.value,
        shuffle=False,  # The data are already shuffled.
        callbacks=[Throughput(batch_size * sequence), keras.callbacks.CSVLogger(folder / "history.csv")],
        verbose=verbose,
    )
    seconds = time.perf_counter() - begin
    pipelined.save(folder / "model.keras")
    pipelined.dump(folder / "dump")  # Only now: graphs exist once steps have run.

    print("\nEvaluating on held-out files")
    some = held_out.take(_EVALUATION_STEPS.value or -1)
    bits = text.bits_per_byte(float(pipelined.evaluate(some, verbose=verbose, return_dict=True)["loss"]))
    unigram = text.unigram_bits_per_byte(corpus.train, corpus.held_out)
    summary = {
        "parameters": model.count_params(),
        "bytes_trained_on": _EPOCHS.value * _STEPS.value * batch_size * sequence,
        "training_seconds": round(seconds, 1),
        "tokens_per_s": statistics.median(history.history["tokens_per_s"]),
        "held_out_bits_per_byte": bits,
        "unigram_bits_per_byte": unigram,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if _SAMPLE_BYTES.value:
        show_sample(model)
    print(f"\nBits per byte on held-out files: {bits:.3f}; of a unigram model: {unigram:.3f}")
    print(f"Trained for {seconds:.0f} s at {summary['tokens_per_s']:,.0f} tokens/s; everything is in {folder}")


if __name__ == "__main__":
    command.start(main, FLAGS)
