"""Parameter groups that one trace of an optimizer of Keras serves: those of stages of equal layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.frontend.variables import VariableTable
from dapple_tf.keras_private import decays, inner_optimizer, slots_by_parameter
from graph_passes.ir.group_update import Captured
from graph_passes.ir.program import Variable

_NAMES = "SGD RMSprop Adam AdamW Adadelta Adagrad Adamax Nadam Ftrl Lion"
BY_ELEMENT = frozenset(getattr(keras.optimizers, name) for name in _NAMES.split())
"""Optimizers that update each element of a parameter by those of its gradient and slots, rows included."""
_BY_PARAMETER = BY_ELEMENT | {keras.optimizers.Adafactor, keras.optimizers.Lamb}
"""Optimizers that update each parameter by its own gradient and slots, whatever it is called."""
COUPLING = frozenset(getattr(keras.optimizers, name, None) for name in ("Adafactor", "Lamb", "Muon"))
"""Optimizers that update each element by norms, means or products of all."""


def has_own_methods(optimizer: Any) -> bool:
    """Returns whether methods of an optimizer were replaced, in this object only."""
    return any(callable(value) and hasattr(type(optimizer), name) for name, value in vars(optimizer).items())


class AlikeGroups:
    """Traces an optimizer once for all groups of alike parameters in the same order.

    Args:
        optimizer: a built optimizer. If it, or what it wraps, is a user's own, each group has its own trace.
        table: names of the model's and the optimizer's variables.
        sliced: parameters whose gradient is given as rows -> dtype of the rows' indices.
    """

    def __init__(self, optimizer: Any, table: VariableTable, sliced: Mapping[str, tf.DType]) -> None:
        self._inner = inner_optimizer(optimizer)
        wrapped = self._inner is optimizer or type(optimizer) is keras.optimizers.LossScaleOptimizer
        self._shares = type(self._inner) in _BY_PARAMETER and wrapped
        self._shares &= not any(map(has_own_methods, (optimizer, self._inner)))
        self._own = {id(value) for each in (optimizer, self._inner) for value in vars(each).values()}
        self._table, self._sliced = table, sliced
        self._slots: dict[str, tuple[str, str]] = {}
        self._slot_of: dict[tuple[str, str], str] = {}
        for what, slot, parameter in slots_by_parameter(self._inner) if self._shares else ():
            if table.knows(slot) and table.knows(parameter):
                place, name = (what, table.name_of(parameter)), table.name_of(slot)
                self._shares &= name not in self._slots  # in two lists: whose it is can't be told
                self._slots[name], self._slot_of[place] = place, name
        self._traced: dict[Hashable, tuple[Sequence[str], Captured]] = {}

    def captured(
        self, names: Sequence[str], trace: Callable[[], Captured], in_shards: Container[str] = frozenset()
    ) -> Captured:
        """Returns the optimizer's part for a group: a trace, or an alike group's with this one's variables.

        Args:
            names: the group's parameters.
            trace: traces the optimizer on them.
            in_shards: those whose gradient is given as rows of a shard.
        """
        key = tuple(self._kind(name, name in in_shards) for name in names)
        if not self._shares or None in key:
            return trace()
        if key in self._traced:
            renamed = self._renamed(*self._traced[key], names)
            if renamed is not None:
                return renamed
        captured = trace()
        self._traced.setdefault(key, (names, captured))
        return captured

    def _kind(self, name: str, in_shards: bool) -> Hashable:
        """Returns what an update of a parameter depends on besides values; None if that can't be told."""
        variable = self._table.keras_variables[name]
        if type(variable) is not keras.Variable or variable.constraint is not None:
            return None
        rows = self._sliced.get(name), in_shards
        return tuple(variable.shape), variable.dtype, rows, decays(self._inner, variable)

    def _renamed(self, others: Sequence[str], captured: Captured, names: Sequence[str]) -> Captured | None:
        """Returns the part of a group with the variables of another one; None if one of them can't be told."""
        now = dict(zip(others, names, strict=True))

        def of_group(variable: Variable) -> Variable | None:
            name = variable.name
            if name in now:
                name = now[name]
            elif name in self._slots:
                what, parameter = self._slots[name]
                name = self._slot_of.get((what, now.get(parameter, "")), "")
            elif id(self._table.keras_variables[name]) not in self._own:
                return None  # neither a slot in a list by parameter nor one for all
            other = self._table.describe(name) if name else variable
            return other if name and (other.dtype, other.shape) == (variable.dtype, variable.shape) else None

        variables = {ref: of_group(variable) for ref, variable in captured.variables.items()}
        known = {ref: variable for ref, variable in variables.items() if variable is not None}
        if len(known) < len(variables):
            return None
        return dataclasses.replace(
            captured,
            gradients={now[name]: ref for name, ref in captured.gradients.items()},
            slices={now[name]: refs for name, refs in captured.slices.items()},
            row_shapes={now[name]: ref for name, ref in captured.row_shapes.items()},
            variables=known,
        )
