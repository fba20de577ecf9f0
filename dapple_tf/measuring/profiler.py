"""The profiler: measures the cost of each layer of a compiled Keras model on a device.

The model goes through the same passes as for training, with a stage for each layer (`profiled_model.py`). Depending
on the available time (`TimeBudget`), layers are measured one by one (`measured_layers.py`), or their operators in
a few steps of the whole model (`measured_operators.py`), or everything is estimated (`layers_by_operator.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.progress import Progress
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import ZERO, LayerProfile, ProfileError
from dapple_tf.describe.machine_report import cpu_kind
from dapple_tf.describe.profile import METHODS, Profile
from dapple_tf.errors import names_checked
from dapple_tf.frontend.capture import Mode, build, capture, check_model
from dapple_tf.frontend.optimizer_checks import check_optimizer
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.layers_by_operator import MeasuredOperators, layers_by_operator, stage_operators
from dapple_tf.measuring.measured_layers import measured_layers
from dapple_tf.measuring.measured_operators import flat_step, measure_operators
from dapple_tf.measuring.profiled_model import ProfiledModel
from dapple_tf.measuring.timed_step import StepRuns
from dapple_tf.measuring.turns import TimeBudget
from graph_passes.ir.graph import POSITION_ATTR, NodeDef, renamed_in_body
from graph_passes.ir.program import Program

logger = logging.getLogger(__name__)

_ANY_LAYER = LayerProfile("any", ZERO, ZERO)


@names_checked()
def profile(
    model: keras.Model,
    batch_size: int | Sequence[int],
    *,
    cluster: Cluster | None = None,
    device: int = 0,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    length: int | None = None,
    cache: bool | str | os.PathLike[str] = True,
    repeats: int | None = None,
    progress: bool = True,
    budget: float | TimeBudget | None = None,
) -> Profile:
    """Measures a model layer by layer.

    The model and its optimizer keep their values: a copy on the device is trained.

    Args:
        model: a built and compiled Keras model.
        batch_size: samples of a slice (the work of one device at a time): one size, or several, which separate the
            fixed part of each cost from the part that grows with the samples. Sizes around those of future plans
            are best.
        cluster: real devices to train on; sessions are configured for all of them. By default one local
            device.
        device: index of the device to measure on.
        x: example inputs, any number of samples. Needed for a model that doesn't declare its inputs (a subclassed one),
            and useful where random numbers (of integers: 0 and 1) aren't typical.
        y: example labels; drawn for the loss by default.
        sample_weight: example weights; none by default.
        length: length of axes that the model leaves open, if x isn't given; by default 128, or another one if the model
            can't be computed for 128: a warning names it.
        cache: whether to keep profiles on disk and reuse them; or a directory in place of ``$DAPPLE_CACHE``
            (``~/.cache/dapple_tf/profiles``).
        repeats: number of measurements of each time; by default as many as fit into some 20 s, 5 to 25.
        progress: whether to show progress on a terminal.
        budget: approximate seconds that profiling may take; or a budget with the remaining ones. If measuring layer by
            layer would take longer, operators are measured in a few steps of the whole model; if there is no time for
            that either, they are only estimated by rooflines (`Profile.method`). The model is captured and cut in any
            case. None measures layer by layer.

    Returns:
        The profile. Layers are named as plans cut: ``block_1``, ``encoder/block_1`` within a nested model,
        ``shared#0`` for the first of several calls. Layers that can't be cut apart are one entry, under the last one's
        name.

    Raises:
        ProfileError: a batch size below 1, no such device, or inputs or labels that can't be guessed.
        CaptureError: the model isn't built or compiled, or can't be captured.
    """
    sizes = _sizes(batch_size)
    cluster = cluster or Cluster.local(1)
    Cluster.check("cluster", cluster)
    if not cluster.real:
        raise ProfileError("this cluster is a description without real devices: it can be planned for, not measured")
    if not 0 <= device < cluster.num_devices:
        raise ProfileError(f"device is {device}, but the cluster has devices 0 to {cluster.num_devices - 1}")
    if repeats is not None and repeats < 1:
        raise ProfileError(f"repeats is {repeats}; it must be at least 1")
    time_budget = budget if isinstance(budget, TimeBudget) else TimeBudget(budget)
    check_model(model, training=True)
    check_optimizer(model.optimizer, model.trainable_variables)
    example = ExampleBatch.of(model, x, y, sample_weight, length=length)
    bar = Progress("profiling", shown=None if progress else False, delay=0)
    with kept_metrics(model), bar, example.told(model):
        time_budget.begin("capture")
        bar.step("capturing the model")
        table = VariableTable(model)
        build(model, table, example.spec)
        program = capture(model, table, Mode.TRAIN, example.spec, gpus=cluster.all_gpus([device]))
        time_budget.end()
        key = profile_key(model, program, example, sizes, cluster, device, repeats)
        directory = cache_directory(cache)
        for path in () if directory is None else _paths(directory, key, time_budget):
            known = read_profile(path)
            if known is not None:
                bar.say(f"the profile of model {model.name!r} is in the cache: {path}")
                logger.info("the profile of model %r is in the cache: %s", model.name, path)
                return known
        logger.info("profiling model %r on %s in slices of %s samples", model.name, cluster.device_names[device], sizes)
        bar.say(f"profiling model {model.name!r}, some {_expected(time_budget):.0f} s")
        profiled = ProfiledModel(model, table, program, example, sizes, cluster, device, repeats)
        new_profile = dataclasses.replace(_profiled(profiled, time_budget, bar), key=key)
        logger.info(
            "profiled model %r, %d layers, %s, in %.1f s",
            *(model.name, len(new_profile.layers), METHODS[new_profile.method], time_budget.spent),
        )
    if directory is not None and new_profile.method != "rooflines":
        write_profile(_path(directory, key, new_profile.method), new_profile)
    return new_profile


def _expected(budget: TimeBudget) -> float:
    """Returns about how many seconds the rest of a profile takes, once the model has been captured."""
    if budget.allows("cut", "layers", *budget.afterwards):
        return budget.expected("cut", "layers")
    return min(budget.expected("cut", "operators"), max(budget.left, budget.expected("cut")))


def _path(directory: pathlib.Path, key: str, method: str) -> pathlib.Path:
    return directory / (f"{key}.json" if method == "layers" else f"{key}-{method}.json")


def _paths(directory: pathlib.Path, key: str, budget: TimeBudget) -> list[pathlib.Path]:
    """Returns the possible paths of a profile as exact as there is time for, the most exact first."""
    methods = ["layers"] if budget.seconds is None else ["layers", "operators"]
    return [_path(directory, key, method) for method in methods]


def _sizes(batch_size: int | Sequence[int]) -> tuple[int, ...]:
    given = [batch_size] if isinstance(batch_size, int | np.integer) else list(batch_size)
    if not given or any(not isinstance(size, int | np.integer) or size < 1 for size in given):
        raise ProfileError(f"batch_size is {batch_size!r}; give a whole number of at least 1, or several")
    return tuple(sorted({int(size) for size in given}))


@contextlib.contextmanager
def kept_metrics(model: keras.Model) -> Iterator[None]:
    """Restores the metrics' values afterwards; metrics that are built meanwhile are reset."""
    before = [(variable, np.asarray(variable.value)) for variable in model.metrics_variables]
    known = {id(variable) for variable, _ in before}
    try:
        yield
    finally:
        for metric in model.metrics:
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()
        for variable, value in before:
            variable.assign(value)


def _profiled(profiled: ProfiledModel, budget: TimeBudget, bar: Progress) -> Profile:
    """Returns the profile without a key, by the most exact method for which there is time."""
    bar.step("cutting the model")
    budget.begin("cut")
    program = profiled.program
    budget.end()
    if budget.allows("layers", *budget.afterwards):
        return measured_layers(profiled, budget, bar)

    bar.step("estimating operators")
    profiled.table.add_optimizer(profiled.model.optimizer)
    measures = budget.allows("operators")
    least, most = profiled.sizes[0], profiled.sizes[-1]
    sizes = (least, most if most > least else 2 * least)
    operators = {samples: stage_operators(program, profiled.sample_shapes, samples) for samples in sizes}
    anything = Profile(profiled.model.name, profiled.device_name, profiled.sizes, (_ANY_LAYER,), ())
    measurements: MeasuredOperators | None = None

    def by_operator() -> Profile:
        names, table = profiled.stages.names, profiled.table
        return layers_by_operator(program, names, table, profiled.sample_shapes, operators, measurements, anything)

    estimates = by_operator()
    once = (estimates.total("forward") + estimates.total("backward")).at(least)
    if not measures or budget.left < once:
        return estimates
    bar.step("preparing a step of the whole model")
    with profiled.session(()) as session:
        step = flat_step(program, profiled.device_name, profiled.cluster.host_device, "operators_")
        runs = StepRuns(session, step.timed, "flat")
        for samples in sizes:
            runs.feed(samples, profiled.batch(samples))
        measurements = measure_operators(
            runs,
            step,
            operators,
            budget,
            rounds=profiled.repeats,
            tell=lambda text: bar.step(f"measuring operators, {text}"),
        )
    return by_operator()


# ---- profiles on disk, under a hash of all that they depend on


_VERSION = 5
"""Version of the measuring method: older files don't count when a model is measured in another way."""


def cache_directory(cache: bool | str | os.PathLike[str]) -> pathlib.Path | None:
    """Returns the directory of profiles: the given one, the default one for True, or None for False."""
    if cache is False:
        return None
    if cache is not True:
        return pathlib.Path(cache)
    given = os.environ.get("DAPPLE_CACHE")
    return pathlib.Path(given) if given else pathlib.Path.home() / ".cache" / "dapple_tf" / "profiles"


def read_profile(path: pathlib.Path) -> Profile | None:
    """Returns the profile in a file; None if there is none, or, with a warning, if it can't be used."""
    try:
        return Profile.load(path)
    except FileNotFoundError:
        return None
    except (ProfileError, OSError, ValueError) as error:
        logger.warning("the cached profile %s can't be used and is measured again: %s", path, error)
        return None


def write_profile(path: pathlib.Path, profile: Profile) -> None:
    """Writes a profile atomically, so that no reader finds half of one; only warns if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(profile.to_json())
            os.replace(name, path)
        except BaseException:
            pathlib.Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning("the profile can't be kept in %s: %s", path.parent, error)


def profile_key(
    model: keras.Model,
    program: Program,
    example: ExampleBatch,
    sizes: Sequence[int],
    cluster: Cluster,
    device: int,
    repeats: int | None,
) -> str:
    """Returns a hash of all that the measured costs depend on; the same in every process.

    Args:
        model: the model.
        program: its captured training graph.
        example: its batches.
        sizes: samples of the measured slices.
        cluster: devices that sessions are configured for.
        device: index of the measured device.
        repeats: number of measurements, if it was given.
    """
    own = cluster.devices[device]
    hardware = own.kind or cpu_kind(cluster.num_devices)
    parts = [
        *(_VERSION, tf.version.VERSION, keras.version(), own.type, hardware, cluster.num_devices),
        *(model.name, list(sizes), repeats, [(array.dtype.name, array.shape) for array in example.arrays]),
        [(call.path, call.number, call.stop > call.start) for call in program.roles.calls],
        [(v.name, v.dtype, v.shape, v.kind.value) for v in program.roles.variables],
        _optimizer_text(model.optimizer),
        graph_hash(program),
    ]
    return _hash(json.dumps(parts))[:32]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _optimizer_text(optimizer: Any) -> str:
    """Returns the optimizer's configuration without its name (Keras counts) and a plain, changeable learning rate."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            left = {key: plain(entry) for key, entry in value.items() if key != "name"}
            return {k: v for k, v in left.items() if k != "learning_rate" or not isinstance(v, float)}
        return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(plain(keras.saving.serialize_keras_object(optimizer)), sort_keys=True, default=str)


def graph_hash(program: Program) -> str:
    """Returns a hash of the captured graph under neutral names, without Keras' counters."""
    library = {function.signature.name: function for function in program.graph.library.function}
    hashes: dict[str, str] = {}

    def of_function(name: str) -> str:
        if name not in hashes:
            function = library.get(name)
            hashes[name] = name if function is None else "recursive"
            if function is not None:
                names = {arg.name: f"a{index}" for index, arg in enumerate(function.signature.input_arg)}
                names |= {node.name: f"n{index}" for index, node in enumerate(function.node_def)}
                lines = [of_node(node, names) for node in function.node_def]
                lines += [renamed_in_body(function.ret[arg.name], names) for arg in function.signature.output_arg]
                lines += [str(arg.type) for arg in function.signature.input_arg]
                hashes[name] = _hash("\n".join(lines))
        return hashes[name]

    def of_attr(value: Any) -> str:
        if value.HasField("func"):
            return of_function(value.func.name)
        if value.HasField("list") and value.list.func:
            return ",".join(of_function(function.name) for function in value.list.func)
        return str(value.SerializeToString(deterministic=True).hex())

    def of_node(node: NodeDef, names: Mapping[str, str]) -> str:
        attrs = [
            f"{key}={of_attr(node.attr[key])}"
            for key in sorted(node.attr)
            # Hints and roles; the calls' positions are part of the key as far as they matter.
            if not key.startswith("_") and key != POSITION_ATTR
        ]
        return " ".join([names[node.name], node.op, *(renamed_in_body(text, names) for text in node.input), *attrs])

    names = {node.name: f"n{index}" for index, node in enumerate(program.graph.node)}
    roles = program.roles
    results = [roles.loss, *(variable.update for variable in roles.variables)]
    lines = [of_node(node, names) for node in program.graph.node]
    lines += ["" if ref is None else f"{names[ref.node]}:{ref.output}" for ref in results]
    return _hash("\n".join(lines))
