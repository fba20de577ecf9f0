"""Optimizers that can't be divided over stages, devices or shards, refused before tracing."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import keras

from dapple_tf.common.keras_private import inner_optimizer, parameters_of
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.alike_groups import COUPLING
from dapple_tf.frontend.initialization import deferred_like
from dapple_tf.frontend.variables import VariableTable


def check_optimizer(optimizer: Any, parameters: Sequence[keras.Variable]) -> None:
    """Builds the optimizer and refuses settings that can't be split over stages.

    Raises:
        CaptureError: a setting or variable doesn't allow it; the text names it.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise CaptureError(f"optimizer is a {type(optimizer).__name__}; use a Keras 3 optimizer (keras.optimizers)")
    if not optimizer.built:
        with deferred_like(parameters):
            optimizer.build(list(parameters))
    for variable in parameters:
        if getattr(variable, "overwrite_with_gradient", False):
            raise CaptureError(
                f"variable {variable.path!r} is overwritten with its gradient (quantized float8 training), which "
                f"can't be accumulated over micro-batches; use another dtype policy"
            )
    tracked = {id(variable) for variable in parameters_of(inner_optimizer(optimizer))}
    unknown = [variable.path for variable in parameters if id(variable) not in tracked]
    if unknown:
        raise CaptureError(
            f"the optimizer was built for other variables: it doesn't know {unknown[0]!r} (and {len(unknown) - 1} "
            f"more); compile the model again with a new optimizer"
        )


def check_averages(optimizer: keras.optimizers.Optimizer, table: VariableTable, trained: Container[str]) -> None:
    """Refuses moving averages (``use_ema``) of variables without a gradient, which no stage's optimizer would update.

    Keras updates them, too: those of layers that were frozen when the optimizer was built already, say.

    Args:
        optimizer: a built optimizer.
        table: names of the model's and the optimizer's variables.
        trained: names of the variables that have a gradient.

    Raises:
        CaptureError: there is one; the text names it.
    """
    if not inner_optimizer(optimizer).use_ema:
        return
    for variable in parameters_of(inner_optimizer(optimizer)):
        if not table.knows(variable) or table.name_of(variable) not in trained:
            raise CaptureError(
                f"the optimizer keeps a moving average (use_ema) of {variable.path!r}, which has no gradient; if it is "
                f"frozen, compile the model with an optimizer that is built after that"
            )


def needs_all_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer needs the gradients of all stages before its first update, to clip their norm, say."""
    return bool(inner_optimizer(optimizer).global_clipnorm) or isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    )


def check_clipping(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses, for parameters in several stages or in shards, a global norm of accumulated gradients.

    Keras clips what it has accumulated, but groups add up the norm of each step's gradients.

    Raises:
        CaptureError: the optimizer clips so.
    """
    inner = inner_optimizer(optimizer)
    if inner.global_clipnorm and inner.gradient_accumulation_steps:
        raise CaptureError(
            f"optimizer {type(inner).__name__} clips by the norm of all gradients (global_clipnorm="
            f"{inner.global_clipnorm:g}) that it has accumulated (gradient_accumulation_steps="
            f"{inner.gradient_accumulation_steps}), but no stage or shard has all of them; use larger batches in more "
            f"micro-batches in place of gradient_accumulation_steps, clip by clipvalue, or use one stage without "
            f"optimizer_shards and row_shards"
        )


def check_shards(optimizer: Any, option: str = "optimizer_shards") -> None:
    """Refuses, for updates in shards, optimizers and settings that are known to need all elements of a gradient.

    Args:
        optimizer: the optimizer.
        option: the plan's option that asks for shards.

    Raises:
        CaptureError: there is one; the text names it.
    """
    inner = inner_optimizer(optimizer)
    if type(inner) in COUPLING:
        raise CaptureError(
            f"optimizer {type(inner).__name__} updates an element of a parameter by all others, but with "
            f"{option}=True a device has only a part of them; use an optimizer that updates each element by "
            f"itself, such as SGD, Adam or AdamW, or leave {option} out"
        )
    if inner.clipnorm:
        raise CaptureError(
            f"optimizer {type(inner).__name__} clips the norm of each gradient (clipnorm={inner.clipnorm:g}), but with "
            f"{option}=True a device has only a part of it; clip by clipvalue or global_clipnorm, or leave "
            f"{option} out"
        )
