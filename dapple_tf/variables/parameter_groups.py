"""Parameter groups: variables that the same stages read, the optimizer's part for them, and where they are kept."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from dapple_tf.frontend.optimizer import ShardsAsked, capture_updates
from dapple_tf.frontend.optimizer_checks import check_averages, check_optimizer
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.variables.device_values import Holding
from graph_passes.ir.graph import Graph
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Program, Variable, VariableKind
from graph_passes.passes.row_gradients import index_dtype

StorageDevices: TypeAlias = Mapping[tuple[int, str], tuple[str, ...]]
"""(Stage, name of a variable's storage) -> names of the devices that keep it for that stage, one of each replica."""


def group_updates(
    model: keras.Model,
    table: VariableTable,
    program: Program,
    shards: Callable[[Sequence[int]], int] | None = None,
    *,
    dense: bool = True,
    compiled: bool = False,
) -> tuple[GroupUpdate, ...]:
    """Returns the optimizer's part for each parameter group of a program with stage functions, and extends the table.

    Args:
        model: the compiled model.
        table: names of its variables.
        program: the program.
        shards: stages of a group -> number of devices that update it together, a shard each; None for groups that each
            device updates whole.
        dense: whether all parameters are updated so, rather than the tables alone whose rows are looked up before
            stages.
        compiled: whether XLA compiles the optimizer.

    Raises:
        CaptureError: the optimizer can't be split over groups.
    """
    optimizer = model.optimizer
    check_optimizer(optimizer, model.trainable_variables)
    table.add_optimizer(optimizer)
    dtypes = {variable.name: index_dtype(program, variable) for variable in program.roles.variables}
    sliced = {name: tf.dtypes.as_dtype(dtype) for name, dtype in dtypes.items() if dtype is not None}
    trained = sliced.keys() | {v.name for stage in program.stages for _, v, _ in stage.gradients}
    check_averages(optimizer, table, trained)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, stages in readers_of(program).items():
        if name in trained:
            groups.setdefault(stages, []).append(name)
    loss = program.roles.loss
    assert loss is not None
    loss_dtype = tf.dtypes.as_dtype(dtype_of(Graph(program.graph), loss))
    counts = {} if shards is None else {stages: count for stages in groups if (count := shards(stages)) > 1}
    tables = frozenset(itertools.chain.from_iterable(stage.looked_up for stage in program.stages))
    asked = ShardsAsked(counts, dense, tables, compiled)
    return capture_updates(optimizer, table, groups, sliced, loss_dtype, asked)


def readers_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the stages that read each variable of the model, ascending; variables in the model's order.

    State that is assigned but not read (the last batch's mean, say) belongs to the stage that computes it.
    """
    reads: dict[str, tuple[int, ...]] = {}
    for stage in program.stages:
        for name in stage.reads:
            reads[name] = (*reads.get(name, ()), stage.index)
    for variable in program.roles.variables:
        if variable.kind is VariableKind.STATE and variable.update is not None:
            reads.setdefault(variable.name, (program.node_stage.get(variable.update.node, len(program.stages) - 1),))
    return {variable.name: reads[variable.name] for variable in program.roles.variables if variable.name in reads}


def whole_tables(table: VariableTable, program: Program, updates: Sequence[GroupUpdate]) -> dict[str, str]:
    """Returns the parameters of which rows are looked up, but which each device keeps whole, and why.

    Args:
        table: names of the variables.
        program: stages with functions that take rows looked up before them, where they need nothing else.
        updates: the optimizer's parts.
    """
    reasons: dict[str, str] = {}
    for stage in program.stages:
        reasons |= stage.whole_tables
    for name in sorted(frozenset().union(*(stage.looked_up for stage in program.stages)) - _stored_in_shards(updates)):
        constraint = table.keras_variables[name].constraint
        if constraint is not None:
            reasons[name] = f"its constraint, {type(constraint).__name__}, may compare rows"
        else:
            reasons[name] = "the optimizer isn't known to update each of its rows by itself"
    return reasons


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The decision which stages, and so which devices, keep which variables.

    Attributes:
        owners: variable of the model -> the stages that keep it.
        optimizer: stages -> the optimizer's variables of their parameter group.
        in_shards: the variables of the model of which each of their devices keeps a shard.
        storage_devices: the devices of variables that were placed one by one.
    """

    owners: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    optimizer: Mapping[tuple[int, ...], Sequence[Variable]] = dataclasses.field(default_factory=dict)
    in_shards: frozenset[str] = frozenset()
    storage_devices: StorageDevices = dataclasses.field(default_factory=dict)

    def extended(self, program: Program, updates: Sequence[GroupUpdate]) -> Arrangement:
        """Returns the arrangement for the variables of another program, too. Training decides, by its ``updates``."""
        reads = readers_of(program)
        if not updates:
            return dataclasses.replace(self, owners={**reads, **self.owners})
        owners = {**{name: stages for name, stages in self.owners.items() if name not in reads}, **reads}
        optimizer = {
            update.stages: tuple(
                dict.fromkeys(v for v in update.apply.variables.values() if v.kind is VariableKind.OPTIMIZER)
            )
            for update in updates
        }
        return Arrangement(owners, optimizer, _stored_in_shards(updates), self.storage_devices)

    def holdings(self, table: VariableTable, stage_devices: Sequence[Sequence[str]]) -> list[Holding]:
        """Returns the variables that devices keep.

        Args:
            table: names of the variables.
            stage_devices: for each stage the names of its devices.
        """
        by_stages: dict[tuple[int, ...], list[Variable]] = {}
        for name, stages in self.owners.items():
            variable = table.describe(name)
            if name in self.in_shards:
                count = len({device for stage in stages for device in stage_devices[stage]})
                variable = dataclasses.replace(variable, shards=count)
            by_stages.setdefault(stages, []).append(variable)
        for stages, variables in self.optimizer.items():
            by_stages.setdefault(stages, []).extend(variables)
        held = []
        for stages, variables in sorted(by_stages.items()):
            together: dict[tuple[tuple[str, ...], int], list[Variable]] = {}
            for variable in variables:
                placed = [self.storage_devices.get((stage, variable.storage_name)) for stage in stages]
                devices = [
                    device
                    for stage, own in zip(stages, placed, strict=True)
                    for device in (stage_devices[stage] if own is None else own)
                ]
                together.setdefault((tuple(dict.fromkeys(devices)), variable.shards), []).append(variable)
            for part, ((kept_on, _), group) in enumerate(together.items()):
                held.append(Holding(stages, kept_on, tuple(group), part))
        return held


def _stored_in_shards(updates: Sequence[GroupUpdate]) -> frozenset[str]:
    """Returns the parameters of which devices keep only their shards."""
    return frozenset(
        itertools.chain.from_iterable(update.shards.stored for update in updates if update.shards is not None)
    )
