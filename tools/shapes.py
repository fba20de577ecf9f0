"""Plans by their shape: ``3:1`` is three replicas of a first stage and one of a second, with cuts that fit."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import dapple_tf as dapple
from dapple_tf.planning.stage_cuts import balanced, by_time

if TYPE_CHECKING:
    import keras

    from dapple_tf.frontend.layer_cuts import LayerStages
    from dapple_tf.frontend.variables import VariableTable


def parse_shape(shape: str) -> tuple[int, ...]:
    """Returns the replicas of each stage: ``"3:1"`` is (3, 1).

    Raises:
        ValueError: not whole numbers of at least 1, separated by colons.
    """
    parts = shape.split(":")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(f"--plan={shape}: need replicas per stage with colons between them, such as 3:1")
    return tuple(int(part) for part in parts)


def is_shape(text: str) -> bool:
    """Returns whether a text is meant as a shape, right or wrong: digits with colons, even ``1:x``."""
    return not text.endswith(".json") and re.match(r"\d+(:|$)|:", text) is not None


def devices_of(replicas: Sequence[int]) -> list[list[int]]:
    """Returns the device numbers of each stage, from 0 on."""
    numbers = itertools.count()
    return [list(itertools.islice(numbers, count)) for count in replicas]


def cuts_by_profile(profile: dapple.Profile, replicas: Sequence[int]) -> list[str]:
    """Returns the layers to cut after so that stages with these replicas take about equally long.

    Raises:
        PlanError: more stages than layers.
    """
    _check(profile.model, len(profile.layers), replicas)
    return by_time(profile, len(replicas), replicas)


def cuts_by_parameters(model: keras.Model, replicas: Sequence[int]) -> list[str]:
    """Returns cuts as `cuts_by_profile` without measurements: parameters are shared out in proportion to replicas.

    Args:
        model: built and compiled.
        replicas: of each stage.

    Raises:
        CaptureError: the model can't be captured.
        PlanError: more stages than layers.
    """
    from dapple_tf.frontend.batch import BatchSpec
    from dapple_tf.frontend.capture import Mode, build, capture, check_model
    from dapple_tf.frontend.layer_cuts import layer_stages
    from dapple_tf.frontend.variables import VariableTable
    from dapple_tf.measuring.example_batch import ExampleBatch
    from dapple_tf.measuring.profiled_model import kept_metrics

    if len(replicas) == 1:
        return []
    check_model(model, training=True)
    with kept_metrics(model):
        example = ExampleBatch.of(model)
        table = VariableTable(model)
        build(model, table, example.spec)
        training = capture(model, table, Mode.TRAIN, example.spec)
        inference = capture(model, table, Mode.PREDICT, BatchSpec(example.spec.x))
        stages = layer_stages(model, training, inference)
    return even_cuts(model.name, stages, table, replicas)


def even_cuts(model: str, stages: LayerStages, table: VariableTable, replicas: Sequence[int]) -> list[str]:
    """Returns `cuts_by_parameters` of a model whose layers are already known.

    Args:
        model: its name, for errors.
        stages: one stage for each layer.
        table: variables of the model.
        replicas: of each stage.

    Raises:
        PlanError: more stages than layers.
    """
    _check(model, len(stages.names), replicas)
    sizes = [sum(math.prod(table.describe(name).shape) for name in stage.reads) for stage in stages.program.stages]
    # A layer without parameters isn't free, but its cost isn't known.
    least = sum(sizes) / (10 * len(sizes)) or 1.0
    ends = balanced([max(size, least) for size in sizes], len(replicas), [float(count) for count in replicas])
    return [stages.names[end - 1] for end in ends]


def _check(model: str, layers: int, replicas: Sequence[int]) -> None:
    if layers < len(replicas):
        raise dapple.PlanError(
            f"model {model!r} has {layers} layers that can be cut apart, too few for {len(replicas)} stages; use a "
            f"shape of fewer stages"
        )
