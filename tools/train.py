"""Trains a model as a pipeline, and writes the model, the plan and reports on the run.

    dapple-train --model=gpt --global_batch_size=32                 # measures the model, finds the best plan
    dapple-train --model=vgg --plan=3:1 --schedule=zb_h1            # three replicas and one; cuts are found
    dapple-train --model=my_package.my_module:build --plan=plan.json --cluster=10.0.0.1:2222,10.0.0.2:2222
    dapple-train --model=gpt --checkpoint_dir=checkpoints --resume  # continues where it stopped
    dapple-train --model=my_module:build --placement=fd_dps         # single operators on all devices

The model is profiled first (--nomeasure skips that; measurements are cached), so that the predicted step can be
compared with the one that is measured at the end. --output_dir receives

    model.keras                   the trained model, an ordinary Keras model
    plan.json                     the plan
    profile.json, cluster.json    what the plan was made from, for dapple-plan, dapple-simulate and dapple-what-if
    operator_costs.json, operators.txt    with --placement=fd_dps: costs and devices of operators
    history.csv                   loss, metrics, rates, bubbles and memory of each epoch
    logs/                         the same for TensorBoard, step by step (elsewhere with --log_dir)
    step/                         one step, planned, simulated and measured: as text, image, page and Perfetto trace
    summary.json                  the final numbers
    benchmark.json                with --benchmark_steps, in place of the model, the history and their numbers
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from absl import app, flags

import dapple_tf as dapple
from dapple_tf.describe.plan import FD_DPS
from dapple_tf.models.sources import DataSource, ModelError
from dapple_tf.tools import command
from dapple_tf.tools.command import fresh_folder
from dapple_tf.tools.machine_facts import machine_facts
from dapple_tf.tools.model_flags import ClusterFlag, ModelFlags, PlanFlags, ProfileFlags
from dapple_tf.tools.shapes import cuts_by_parameters, cuts_by_profile
from dapple_tf.tools.training_report import closing, described, predicted, summary

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

FLAGS = flags.FlagValues()

_MODEL = ModelFlags(FLAGS, data=True)
_CLUSTER = ClusterFlag(FLAGS, described=False)
_PLAN = PlanFlags(FLAGS, default="auto", auto=True, batch=32)
_PROFILE = ProfileFlags(FLAGS, alternative="By default the model is measured.")
_PLACEMENT = flags.DEFINE_enum(
    "placement",
    "stages",
    ["stages", FD_DPS],
    "What is placed on devices: stages, by the plan, or single operators (FD-DPS), with --plan=auto over all devices "
    "and otherwise each stage's operators over the devices of its replicas.",
    flag_values=FLAGS,
)
_BY_TRIAL = flags.DEFINE_boolean(
    "by_trial",
    False,
    "With --plan=auto: train some steps by the best plan, by data parallelism and on one device, and take the fastest.",
    flag_values=FLAGS,
)
_MEASURE = flags.DEFINE_boolean(
    "measure", True, "Measure the model and the cluster first. Without it no step time is predicted.", flag_values=FLAGS
)
_EPOCHS = flags.DEFINE_integer("epochs", 1, "Number of epochs.", lower_bound=1, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 100, "Steps per epoch.", lower_bound=1, flag_values=FLAGS)
_BENCHMARK_STEPS = flags.DEFINE_integer(
    "benchmark_steps",
    None,
    "Number of steps to measure, after a warm-up, instead of training: writes benchmark.json and no model.",
    lower_bound=1,
    flag_values=FLAGS,
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", None, "Learning rate, instead of the model's own.", lower_bound=0.0, flag_values=FLAGS
)
_VALIDATION_STEPS = flags.DEFINE_integer(
    "validation_steps",
    8,
    "Held-out batches to evaluate after each epoch, if there are any.",
    lower_bound=0,
    flag_values=FLAGS,
)
_CHECKPOINT_DIR = flags.DEFINE_string(
    "checkpoint_dir", None, "Folder of checkpoints; on a cluster, one that all servers share.", flag_values=FLAGS
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", None, "Steps between two checkpoints; by default one epoch.", lower_bound=1, flag_values=FLAGS
)
_RESUME = flags.DEFINE_boolean(
    "resume", False, "Continue from the newest checkpoint in --checkpoint_dir, if there is one.", flag_values=FLAGS
)
_DATA_ON_WORKERS = flags.DEFINE_boolean(
    "data_on_workers",
    None,
    "Have the workers of a cluster read the data themselves, from files that each of them has under the same name; by "
    "default they do where the data are image folders, TFRecord files or token files.",
    flag_values=FLAGS,
)
_FAULTS = flags.DEFINE_enum(
    "faults",
    "fail",
    ["fail", "restart", "replan"],
    "When a worker is lost: fail, wait until it is back, or go on without it.",
    flag_values=FLAGS,
)
_VERIFY = flags.DEFINE_boolean(
    "verify", False, "Compare steps with those of plain Keras before training.", flag_values=FLAGS
)
_LOG_DIR = flags.DEFINE_string(
    "log_dir", None, "Folder for TensorBoard; by default logs in --output_dir.", flag_values=FLAGS
)
_PROFILE_STEP = flags.DEFINE_boolean(
    "profile_step", True, "Measure one step at the end, task by task.", flag_values=FLAGS
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/train", "Folder to create; a number is appended if it exists.", flag_values=FLAGS
)


class Job(NamedTuple):
    """A training job.

    Attributes:
        model: the compiled model.
        data: the data to train on.
        cluster: the cluster, with measured links if they were measured.
        plan: the plan.
        profile: the model's profile; None if nothing was measured.
        operator_costs: costs of single operators, if those are placed.
    """

    model: keras.Model
    data: DataSource
    cluster: dapple.Cluster
    plan: dapple.Plan
    profile: dapple.Profile | None
    operator_costs: dapple.OperatorCosts | None = None


def check_flags() -> None:
    """Checks the flags before anything is built.

    Raises:
        app.UsageError: the flags contradict each other.
    """
    _PLAN.early_check()
    command.check(
        not _RESUME.value or _CHECKPOINT_DIR.value is not None,
        "--resume goes on from a checkpoint: give --checkpoint_dir",
    )
    command.check(
        _CHECKPOINT_EVERY.value is None or _CHECKPOINT_DIR.value is not None,
        f"--checkpoint_every={_CHECKPOINT_EVERY.value} needs --checkpoint_dir",
    )
    logs = _LOG_DIR.value
    command.check(not (logs and pathlib.Path(logs).is_file()), f"--log_dir={logs} is a file; give a folder")
    for flag in (_EPOCHS, _STEPS, _CHECKPOINT_DIR, _VALIDATION_STEPS) if _BENCHMARK_STEPS.present else ():
        command.check(not flag.present, f"--{flag.name}: --benchmark_steps only measures steps; leave one of them out")
    rate = _LEARNING_RATE.value
    command.check(rate is None or math.isfinite(rate), f"--learning_rate={rate}: it must be finite")
    command.check(
        _MEASURE.value or _PROFILE.given or not _PLAN.automatic or places_operators(),
        "--nomeasure: --plan=auto needs a profile; give --profile, or a plan",
    )
    command.check(
        not _BY_TRIAL.value or (_PLAN.automatic and not places_operators()),
        "--by_trial is for --plan=auto without --placement=fd_dps: there are no plans to try",
    )


def places_operators() -> bool:
    """Returns whether single operators are placed, by --placement or by the plan's file."""
    return bool(_PLACEMENT.value == FD_DPS) or _PLAN.places_operators


def prepare() -> Job:
    """Builds the model, measures as needed, and plans."""
    from dapple_tf.automatic import measured, plan_model

    cluster, data = _CLUSTER.cluster(), _MODEL.data()  # in this order: a client of workers has no GPUs itself
    _PLAN.check_devices(cluster)
    profile = _PROFILE.profile() if _PROFILE.given else None
    model = _MODEL.build()
    if _LEARNING_RATE.value is not None:
        set_learning_rate(model, _LEARNING_RATE.value)
    say(f"{model.name}: {model.count_params():,} parameters, on {data.name} ({data.about})")
    _PLAN.check_layers(model)
    batch = _PLAN.batch_size()
    x, y, weights = checked_example(data, model, batch)
    examples = {"x": x, "y": y, "sample_weight": weights}
    if places_operators():
        return with_placed_operators(model, data, cluster, profile, examples)
    if _PLAN.automatic:
        say("measuring and planning")
        changes = {name: value for name, value in _PLAN.changes.items() if name != "global_batch_size"}
        planned = plan_model(model, cluster, batch, profiled=profile, by_trial=_BY_TRIAL.value, **examples, **changes)
        return Job(model, data, planned.cluster, planned.plan, planned.profile)
    if _MEASURE.value:
        say("measuring")
        profile, cluster = measured(model, cluster, batch, profile, **examples)
    known = profile  # Typed for the function below: a variable that it closes over isn't assigned again.
    plan = _PLAN.plan(
        lambda replicas: cuts_by_parameters(model, replicas) if known is None else cuts_by_profile(known, replicas)
    )
    return Job(model, data, cluster, plan, profile)


def checked_example(data: DataSource, model: keras.Model, samples: int) -> tuple[Any, Any, Any]:
    """Returns a batch that fits the model, before anything is measured or written.

    Raises:
        DataError: the batch doesn't fit the model.
        ModelError: there are no data, or their batches have another size.
    """
    from dapple_tf.frontend.batch import Batches

    example = data.example(model, samples)
    size = next(Batches(model, [example])).samples
    if size != samples:
        raise ModelError(
            f"the data {data.name!r} give batches of {size} samples, but the plan's global batch size is {samples}: "
            f"batch them by {samples}, or give --global_batch_size={size}"
        )
    return example


def with_placed_operators(
    model: keras.Model,
    data: DataSource,
    cluster: dapple.Cluster,
    profile: dapple.Profile | None,
    examples: dict[str, Any],
) -> Job:
    """Measures operators, whose devices are found with the first step; a profile of layers only decides the cuts.

    Raises:
        app.UsageError: the plan has an option that isn't possible with placed operators.
    """
    from dapple_tf.measuring.operator_profiler import measured_operators

    if _PLAN.automatic:
        with command.blamed(f"--placement={FD_DPS}"):
            whole = dapple.Plan.by_operators(cluster.num_devices, _PLAN.batch_size())
            plan = whole.with_options(**_PLAN.changes)
    else:
        plan = _PLAN.plan(
            lambda replicas: (
                cuts_by_parameters(model, replicas) if profile is None else cuts_by_profile(profile, replicas)
            )
        )
        if plan.operator_devices is None:
            with command.blamed(f"--placement={FD_DPS} --plan={_PLAN.text}"):
                plan = plan.with_placed_operators()
    costs = dapple.OperatorCosts()
    if _MEASURE.value:
        say("measuring operators")
        costs, cluster = measured_operators(model, cluster, plan, **examples)
    return Job(model, data, cluster, plan, None, costs)


def set_learning_rate(model: keras.Model, rate: float) -> None:
    """Sets the learning rate of the model's optimizer.

    Raises:
        app.UsageError: the optimizer has a learning-rate schedule.
    """
    try:
        model.optimizer.learning_rate = rate
    except (TypeError, AttributeError) as error:
        raise app.UsageError(f"--learning_rate={rate}: the model's optimizer doesn't take one: {error}") from error


def where_read(job: Job, dataset: tf.data.Dataset) -> tf.data.Dataset | dapple.OnWorkers:
    """Returns the data as workers read them, or the dataset itself if this process does.

    Raises:
        DataError: --data_on_workers was given, but workers can't read these data.
    """
    asked = _DATA_ON_WORKERS.value
    by_default = job.data.in_files and bool(job.cluster.addresses) and job.plan.operator_devices is None
    if not (by_default if asked is None else asked):
        return dataset
    try:
        return dapple.on_workers(dataset)
    except dapple.DataError as error:
        if asked:
            raise
        say(f"This process reads the data: {error}")
        return dataset


def train(job: Job, pipelined: dapple.PipelinedModel, folder: pathlib.Path) -> dict[str, Any]:
    """Trains; writes the model, the history and the final numbers, and returns the latter as JSON data."""
    import keras

    from dapple_tf.tracing.scalar_log import EpochLog

    batch = job.plan.global_batch_size
    options: dict[str, Any] = {}
    if job.data.held_out is not None and _VALIDATION_STEPS.value:
        # The same batches after each epoch; Keras would warn of data that have fewer than validation_steps.
        held_out = job.data.held_out(job.model, batch).take(_VALIDATION_STEPS.value)
        options["validation_data"] = where_read(job, held_out)
    if _CHECKPOINT_DIR.value is not None:
        options["checkpoint"] = dapple.Checkpointing(_CHECKPOINT_DIR.value, _CHECKPOINT_EVERY.value)
        options["resume"] = _RESUME.value
        if _RESUME.value:
            newest = dapple.latest_checkpoint(_CHECKPOINT_DIR.value)
            say(f"No checkpoint in {_CHECKPOINT_DIR.value} yet" if newest is None else f"Going on from {newest}")
    logs = pathlib.Path(_LOG_DIR.value) if _LOG_DIR.value else folder / "logs"
    began = time.perf_counter()
    history = pipelined.fit(
        where_read(job, job.data.batches(job.model, batch, _MODEL.seed)),
        epochs=_EPOCHS.value,
        steps_per_epoch=_STEPS.value,
        callbacks=[
            dapple.PipelineMonitor(logs / "pipeline"),
            EpochLog(logs),
            keras.callbacks.CSVLogger(folder / "history.csv"),
        ],
        shuffle=False,  # The data are already shuffled.
        verbose=1 if sys.stdout.isatty() else 2,
        **options,
    )
    seconds = time.perf_counter() - began
    pipelined.save(folder / "model.keras")
    numbers = {**described(job.model, job.data, pipelined), **summary(pipelined, history, seconds)}
    (folder / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return numbers


def measure_steps(job: Job, pipelined: dapple.PipelinedModel, folder: pathlib.Path) -> dict[str, Any]:
    """Measures steps of ordinary training, data included; writes the numbers, and returns them as JSON data."""
    from dapple_tf.tools.step_times import WARM_UP, StepSummary, StepTimes

    times, batch = StepTimes(), job.plan.global_batch_size
    say(f"measuring {_BENCHMARK_STEPS.value} steps after {WARM_UP} that don't count")
    pipelined.fit(
        where_read(job, job.data.batches(job.model, batch, _MODEL.seed)),
        steps_per_epoch=WARM_UP + _BENCHMARK_STEPS.value,
        callbacks=[times],
        shuffle=False,
        verbose=1 if sys.stdout.isatty() else 0,
    )
    step_summary = StepSummary.of(times.seconds[WARM_UP - 1 :])
    numbers = {
        "command": command.used(FLAGS, "train"),
        "machine": machine_facts(),
        **described(job.model, job.data, pipelined),
        **step_summary.record(batch),
        **predicted(pipelined, step_summary.median),
    }
    (folder / "benchmark.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return numbers


def say(text: str) -> None:
    """Prints progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Trains, and writes everything."""
    from dapple_tf.operators.op_graph import placements_report

    check_flags()
    job = prepare()
    say(f"\n{job.plan}\n")
    faults = None if _FAULTS.value == "fail" else dapple.FaultPolicy(_FAULTS.value)
    pipelined = dapple.transform(
        job.model, job.cluster, job.plan, profile=job.profile, faults=faults, operator_costs=job.operator_costs
    )
    folder = fresh_folder(pathlib.Path(_OUTPUT_DIR.value))
    say(f"Everything goes to {folder}")
    job.plan.save(folder / "plan.json")
    job.cluster.save(folder / "cluster.json")
    if job.profile is not None:
        job.profile.save(folder / "profile.json")
    if job.operator_costs is not None:
        job.operator_costs.save(folder / "operator_costs.json")
    example = job.data.example(job.model, job.plan.global_batch_size)
    if _VERIFY.value:
        say(str(pipelined.verify(*example)))
    numbers = measure_steps(job, pipelined, folder) if _BENCHMARK_STEPS.value else train(job, pipelined, folder)
    if pipelined.plan.operator_devices is not None:
        placements = placements_report(pipelined.placement, pipelined.plan.operator_devices)
        (folder / "operators.txt").write_text(placements, encoding="utf-8")
        for stage, placement in pipelined.placement.items():
            say(f"\nstage {stage}: {placement}")
    if _PROFILE_STEP.value:
        step = pipelined.profile_step(*example)
        step.save(folder / "step")
        say(f"\nOne step, measured:\n{step}")
    say(f"\n{closing(numbers, folder)}")
    pipelined.close(sync=False)


def run() -> NoReturn:
    """Runs the console command."""
    command.start(main, FLAGS)


if __name__ == "__main__":
    run()
