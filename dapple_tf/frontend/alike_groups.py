"""Parameters, and groups of them, that one trace of an optimizer of Keras serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import decays, inner_optimizer, slots_by_parameter
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis.repeated_update import repeated_update
from graph_passes.ir.graph import Ref
from graph_passes.ir.group_update import Captured
from graph_passes.ir.program import Variable

_NAMES = "SGD RMSprop Adam AdamW Adadelta Adagrad Adamax Nadam Ftrl Lion"
ROW_OPTIMIZERS = frozenset(getattr(keras.optimizers, name) for name in _NAMES.split())
"""Keras' optimizers that may update some rows of an embedding alone. Shards of slots follow from data flow instead."""
_BY_PARAMETER = ROW_OPTIMIZERS | {keras.optimizers.Adafactor, keras.optimizers.Lamb}
"""Optimizers that update each parameter by its own gradient and slots, whatever it is called."""
COUPLING = frozenset(getattr(keras.optimizers, name, None) for name in ("Adafactor", "Lamb", "Muon"))
"""Optimizers that update each element by norms, means or products of all."""


def has_own_methods(optimizer: Any) -> bool:
    """Returns whether methods of an optimizer were replaced, in this object only."""
    return any(callable(value) and hasattr(type(optimizer), name) for name, value in vars(optimizer).items())


class AlikeGroups:
    """Traces an optimizer once for all groups of alike parameters in the same order, and one of each kind in a group.

    A kind is all that an update depends on besides values: models of many equal layers have few.

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
        # Loss scaling and accumulation update all parameters in one branch.
        self._apart = self._inner is optimizer and not self._inner.gradient_accumulation_steps
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
        self,
        names: Sequence[str],
        trace: Callable[[Sequence[str]], Captured],
        in_shards: Container[str] = frozenset(),
    ) -> Captured:
        """Returns the optimizer's part for a group: a trace, or an alike group's with this one's variables.

        Args:
            names: the group's parameters.
            trace: traces the optimizer on some of them.
            in_shards: those whose gradient is given as rows of a shard.
        """
        key = tuple(self._kind(name, name in in_shards) for name in names)
        if not self._shares or None in key:
            return trace(names)
        if key in self._traced:
            renamed = self._renamed(*self._traced[key], names)
            if renamed is not None:
                return renamed
        captured = self._repeated(names, key, trace) or trace(names)
        self._traced.setdefault(key, (names, captured))
        return captured

    def _repeated(
        self, names: Sequence[str], kinds: Sequence[Hashable], trace: Callable[[Sequence[str]], Captured]
    ) -> Captured | None:
        """Returns a group's part from a trace on one parameter of each kind; None if it needs a trace of its own.

        At least two are traced, so that what an optimizer computes from all gradients shows.
        """
        example_of: dict[Hashable, str] = {}
        for name, kind in zip(names, kinds, strict=True):
            example_of.setdefault(kind, name)
        examples = list(example_of.values()) if len(example_of) > 1 else list(names[:2])
        if len(examples) == len(names) or not self._apart:
            return None
        captured = trace(examples)
        owners: dict[Ref, str] = {}
        for ref, variable in captured.variables.items():
            _, owner = self._slots.get(variable.name, ("", variable.name))
            if owner in examples:
                owners[ref] = owner
            elif self._counterpart(variable, {}) is None:
                return None
        copies: dict[str, dict[str, dict[Ref, Variable]]] = {example: {} for example in examples}
        for name, kind in zip(names, kinds, strict=True):
            if name in copies:
                continue
            example = example_of[kind]
            own = {ref: captured.variables[ref] for ref, owner in owners.items() if owner == example}
            variables = {ref: self._counterpart(variable, {example: name}) for ref, variable in own.items()}
            known = {ref: variable for ref, variable in variables.items() if variable is not None}
            if len(known) < len(variables):
                return None
            copies[example][name] = known
        repeated = repeated_update(captured, owners, copies)
        if repeated is None:
            return None
        return dataclasses.replace(
            repeated,
            gradients={name: repeated.gradients[name] for name in names if name in repeated.gradients},
            slices={name: repeated.slices[name] for name in names if name in repeated.slices},
            row_shapes={name: repeated.row_shapes[name] for name in names if name in repeated.row_shapes},
        )

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
        variables = {ref: self._counterpart(variable, now) for ref, variable in captured.variables.items()}
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

    def _counterpart(self, variable: Variable, now: Mapping[str, str]) -> Variable | None:
        """Returns the variable that other parameters have in place of one; None if it can't be told.

        Args:
            variable: a parameter, one of its slots, or a variable for all parameters, which stays.
            now: parameter -> the other one.
        """
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
