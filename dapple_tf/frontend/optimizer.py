"""The user's own Keras optimizer as graphs: one Apply per parameter group, and statistics that groups share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import (
    checks_by_keras,
    inner_optimizer,
    parameters_of,
    restricted,
    slots_by_parameter,
    told_whether_finite,
)
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.alike_groups import ROW_OPTIMIZERS, AlikeGroups, has_own_methods
from dapple_tf.frontend.optimizer_checks import check_clipping, check_shards
from dapple_tf.frontend.patching import replaced
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis.update_flow import CoupledElementsError, gradients_behind, sharded_update
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.group_update import Captured, GroupUpdate, Shards
from graph_passes.ir.program import VariableKind, in_rows
from graph_passes.ir.tensorflow_bridge import make_constant

_ROOTED = frozenset({keras.optimizers.Adadelta, keras.optimizers.Adagrad, keras.optimizers.RMSprop})
"""Optimizers that divide a gradient by roots of means, or sums, of squares."""
_LEAST_EPSILON = 1e-7
"""The least epsilon under such a root for it to stay above zero, in half precision, too."""


def capture_updates(
    optimizer: keras.optimizers.Optimizer,
    table: VariableTable,
    groups: Mapping[tuple[int, ...], Sequence[str]],
    sliced: Mapping[str, tf.DType],
    loss_dtype: tf.DType,
    shards: ShardsAsked | None = None,
) -> tuple[GroupUpdate, ...]:
    """Traces the optimizer for each parameter group.

    Within a group the optimizer's own code does everything. What it computes across all parameters (global_clipnorm,
    the check for non-finite gradients of loss scaling) is an input: each group's statistics add up to totals, from
    which every group computes the same factor. Counters and hyperparameters that several groups use are kept once per
    group, as every group updates its own.

    Args:
        optimizer: a built optimizer.
        table: names of the model's and the optimizer's variables.
        groups: the stages that read some parameters -> the names of the parameters with a gradient.
        sliced: parameters whose gradient is given as rows -> dtype of the rows' indices.
        loss_dtype: dtype of the loss.
        shards: what devices update together; None for groups that each of their devices updates whole.

    Raises:
        CaptureError: the optimizer couples variables or gradients of several groups, or elements that are in different
            shards.
    """
    asked = ShardsAsked({}) if shards is None else shards
    tracer, counts = _Tracer(optimizer, table, sliced, asked), asked.counts
    if counts:
        check_shards(optimizer, asked.option)
    split = len(groups) > 1 or bool(counts)
    if split:
        check_clipping(optimizer)
    if len(groups) > 1 and not _by_keras(optimizer):
        tracer.check_apart(list(groups.values()))
    clip_norm = inner_optimizer(optimizer).global_clipnorm if split else None
    guarded = split and isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
    needs = bool(clip_norm) or guarded
    alike = AlikeGroups(optimizer, table, sliced)

    def loss_scale(gradients: Gradients, totals: tf.Tensor | None) -> list[tf.Tensor]:
        return [tf.cast(_loss_scale(optimizer), loss_dtype)]

    def of_group(stages: tuple[int, ...], names: Sequence[str]) -> GroupUpdate:
        count = counts.get(stages, 1)
        chosen = tracer.chosen(names, count)
        own_rows = chosen & sliced.keys()
        update = functools.partial(tracer.update, clip_norm=clip_norm, guarded=guarded, own_rows=own_rows)
        apply = alike.captured(names, update, own_rows)
        shards = None
        if chosen:
            stored = chosen & asked.tables
            apply = tracer.in_shards(apply, count, own_rows, stored)
            own = [name for name in names if name in chosen]
            statistics = tracer.captured(own, _statistics, of_shards=True) if needs else None
            shards = Shards(chosen, statistics, frozenset(stored))
        whole = [name for name in names if name not in chosen]
        return GroupUpdate(
            stages,
            apply=apply,
            statistics=tracer.captured(whole, _statistics) if needs and whole else None,
            loss_scale=tracer.captured([], loss_scale) if scaled else None,
            shards=shards,
        )

    updates = [of_group(stages, names) for stages, names in groups.items()]
    uses = Counter(v.name for update in updates for v in update.apply.variables.values())
    return tuple(_with_own_counters(update, {name for name, count in uses.items() if count > 1}) for update in updates)


@dataclasses.dataclass(frozen=True)
class ShardsAsked:
    """Which parameters devices are to update together, a shard each.

    Attributes:
        counts: stages of a group -> number of its devices; groups that aren't in it are updated whole by each of their
            devices.
        dense: whether all parameters are, rather than ``tables`` alone.
        tables: the parameters of which devices keep only rows, if the optimizer allows it.
        compiled: whether XLA compiles the optimizer.
    """

    counts: Mapping[tuple[int, ...], int]
    dense: bool = True
    tables: frozenset[str] = frozenset()
    compiled: bool = False

    @property
    def option(self) -> str:
        """The plan's option that asks for it, for messages."""
        return "optimizer_shards" if self.dense else "row_shards"


@dataclasses.dataclass(frozen=True)
class _Tracer:
    """Traces an optimizer for groups of parameters.

    Attributes:
        optimizer: a built optimizer.
        table: names of the model's and the optimizer's variables.
        sliced: parameters whose gradient is given as rows -> dtype of the rows' indices.
        asked: what devices update together.
    """

    optimizer: Any
    table: VariableTable
    sliced: Mapping[str, tf.DType]
    asked: ShardsAsked

    def check_apart(self, groups: Sequence[Sequence[str]]) -> None:
        """Refuses an optimizer that computes anything from gradients of several groups together.

        An example is the norm of all gradients in its own ``apply``, where each group would have a different norm.
        """
        names = [name for group in groups for name in group]
        variables = [self.table.keras_variables[name] for name in names]
        inner = inner_optimizer(self.optimizer)
        by = self.table.applied_by if inner is self.optimizer else "apply"

        def apply(gradients: Gradients, totals: tf.Tensor | None) -> list[tf.Tensor]:
            _apply(inner, by, gradients, variables)
            return []

        with _restricted_to(inner, variables, clips=False):
            captured = self.captured(names, apply)
        number = {name: index for index, group in enumerate(groups) for name in group}
        for variable, gradients in gradients_behind(captured).items():
            several = {number[name]: name for name in sorted(gradients, key=names.index, reverse=True)}
            if len(several) > 1:
                first, second = sorted(several.values(), key=names.index)[:2]
                raise CaptureError(
                    f"optimizer {type(inner).__name__} updates {variable!r} by the gradients of {first!r} and "
                    f"{second!r}: an update that couples variables of several stages isn't supported; put these layers "
                    f"into one stage, or clip by the optimizer's own global_clipnorm"
                )

    def chosen(self, names: Sequence[str], count: int) -> frozenset[str]:
        """Returns the parameters of a group that ``count`` devices update together.

        Those of fewer elements are updated whole by each device, and so are those whose gradient is rows unless they
        have many rows and no constraint, the optimizer is known to update each by itself, and XLA isn't to compile it:
        it would for each number of rows in a shard. It doesn't compile groups with tables of which devices keep only
        rows.
        """
        if count == 1:
            return frozenset()
        optimizer, asked = self.optimizer, self.asked
        inner = inner_optimizer(optimizer)
        by_keras = inner is optimizer or checks_by_keras(optimizer)
        by_row = type(inner) in ROW_OPTIMIZERS and by_keras and not has_own_methods(inner)
        chosen = set()
        for name in names:
            variable = self.table.keras_variables[name]
            if name in self.sliced:
                wanted = name in asked.tables or (asked.dense and not asked.compiled)
                wanted = wanted and by_row and in_rows(variable.shape, count) and variable.constraint is None
            else:
                wanted = asked.dense and math.prod(variable.shape) >= count
            if wanted:
                chosen.add(name)
        return frozenset(chosen)

    def update(
        self, names: Sequence[str], clip_norm: float | None, *, guarded: bool, own_rows: Container[str]
    ) -> Captured:
        """Traces the update of some parameters.

        Args:
            names: the parameters.
            clip_norm: the largest norm of all groups' gradients together; None for what isn't clipped so.
            guarded: whether it leaves out steps in which any group's gradient isn't finite.
            own_rows: the parameters whose gradient is given as rows of a shard.
        """
        optimizer, table = self.optimizer, self.table
        variables = [table.keras_variables[name] for name in names]

        def apply(gradients: Gradients, totals: tf.Tensor | None) -> list[tf.Tensor]:
            if clip_norm:
                assert totals is not None
                factor = _clip_factor(tf.sqrt(totals[0]) / tf.cast(_loss_scale(optimizer), tf.float64), clip_norm)
                # As in Keras, which thereby makes rows a dense gradient (IndexedSlices has no product of its own).
                gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
            if not guarded:
                _apply(optimizer, table.applied_by, gradients, variables)
                return []
            # If a gradient of another stage, or of another device's shard, isn't finite, this part must skip the step,
            # too.
            assert totals is not None
            if checks_by_keras(optimizer):
                with told_whether_finite(optimizer, tf.equal(totals[1], 0.0)):
                    _apply(optimizer, table.applied_by, gradients, variables)
                return []
            poison = tf.where(totals[1] > 0, tf.constant(float("nan"), tf.float64), tf.zeros([], tf.float64))
            gradients = _mapped(gradients, lambda gradient: gradient + tf.cast(poison, gradient.dtype))
            _apply(optimizer, table.applied_by, gradients, variables)
            return []

        with _restricted_to(optimizer, variables, clips=clip_norm is None), _without_row_scans(optimizer):
            captured = self.captured(names, apply, wants_totals=bool(clip_norm) or guarded, own_rows=own_rows)
        variables_read = captured.variables.values()
        foreign = [v.name for v in variables_read if v.kind is not VariableKind.OPTIMIZER and v.name not in names]
        if foreign:
            raise CaptureError(
                f"optimizer {type(optimizer).__name__} touches {foreign[0]!r} while it updates {', '.join(names[:2])}: "
                f"an update that couples variables of several stages isn't supported; put these layers into one stage"
            )
        return captured

    def in_shards(self, apply: Captured, count: int, own_rows: Collection[str], stored: Container[str]) -> Captured:
        """Returns the optimizer's part for a group of which each of ``count`` devices updates a shard."""
        inner, table, asked = inner_optimizer(self.optimizer), self.table, self.asked
        by_row, apart = set(own_rows), set[str]()
        for _, slot, parameter in slots_by_parameter(inner):
            if table.knows(slot) and table.knows(parameter) and table.name_of(parameter) in apply.slices:
                (by_row if table.name_of(parameter) in own_rows else apart).add(table.name_of(slot))
        try:
            return sharded_update(apply, count, by_row, apart, dense=asked.dense, stored=stored)
        except CoupledElementsError as error:
            constraints = [(table.keras_variables[name].constraint, name) for name in apply.gradients]
            own = [
                f"{type(constraint).__name__} of {name!r}" for constraint, name in constraints if constraint is not None
            ]
            constrained = f" or a constraint, such as {own[0]}," if own else ""
            without = ", and constraints that do" if own else ""
            raise CaptureError(
                f"optimizer {type(inner).__name__}{constrained} computes {error.computation}, but with "
                f"{asked.option}=True a device has only a part of them; use an optimizer that updates each element by "
                f"itself, such as SGD, Adam or AdamW{without}, or leave {asked.option} out"
            ) from error

    def captured(
        self,
        names: Sequence[str],
        computation: Callable[[Gradients, tf.Tensor | None], list[tf.Tensor]],
        *,
        wants_totals: bool = False,
        of_shards: bool = False,
        own_rows: Container[str] = frozenset(),
    ) -> Captured:
        """Traces a computation on gradients and variables.

        Args:
            names: the parameters.
            computation: the computation.
            wants_totals: whether it takes the sum of all groups' statistics.
            of_shards: whether dense gradients are shards of any shape.
            own_rows: the parameters of which the shape that rows belong to is an input, too.
        """
        table, sliced = self.table, self.sliced
        specs: list[tf.TensorSpec] = []
        places: dict[str, tuple[int, ...]] = {}
        for name in names:
            variable = table.keras_variables[name]
            if name in sliced:
                own = [tf.TensorSpec((None, *variable.shape[1:]), variable.dtype), tf.TensorSpec([None], sliced[name])]
                own += [tf.TensorSpec([len(variable.shape)], tf.int32)] if name in own_rows else []
                places[name] = tuple(range(len(specs), len(specs) + len(own)))
                specs += own
            else:
                specs.append(tf.TensorSpec(None if of_shards else variable.shape, variable.dtype))
                places[name] = (len(specs) - 1,)
        if wants_totals:
            specs.append(tf.TensorSpec([2], tf.float64))

        def traced(*arguments: tf.Tensor) -> list[tf.Tensor]:
            gradients: Gradients = []
            for name, place in places.items():
                tensors = [arguments[index] for index in place]
                if len(tensors) == 2:
                    tensors.append(
                        tf.constant(tuple(table.keras_variables[name].shape), tf.int32)
                    )  # GPUs read int64 back
                gradients.append(tf.IndexedSlices(*tensors) if len(tensors) == 3 else tensors[0])
            return computation(gradients, arguments[-1] if wants_totals else None)

        concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)
        graph = concrete.graph
        by_handle = {
            id(variable.value.handle): name
            for name, variable in table.keras_variables.items()
            if hasattr(variable.value, "handle")
        }
        graph_def = graph.as_graph_def()
        nodes = {node.name: node for node in graph_def.node}
        resources = {}
        for external, internal in graph.captures:
            if external.dtype == tf.resource:
                if id(external) not in by_handle:
                    raise CaptureError(
                        f"the optimizer uses a variable that it doesn't track, in {internal.consumers()[0].name}"
                    )
                resources[Ref.parse(internal.name)] = table.describe(by_handle[id(external)])
            else:
                make_constant(nodes[internal.op.name], external.numpy())
        inputs = [Ref.parse(tensor.name) for tensor in graph.inputs[: len(specs)]]
        present = Graph(graph_def)
        # TensorFlow keeps them in a set, whose order differs from run to run.
        effects = [op.name for op in graph.control_outputs if op.name in present and op.type != "NoOp"]
        return Captured(
            graph_def,
            gradients={name: inputs[place[0]] for name, place in places.items() if len(place) == 1},
            variables=resources,
            slices={name: (inputs[place[0]], inputs[place[1]]) for name, place in places.items() if len(place) > 1},
            row_shapes={name: inputs[place[2]] for name, place in places.items() if len(place) > 2},
            totals=inputs[-1] if wants_totals else None,
            outputs=tuple(Ref.parse(tensor.name) for tensor in graph.outputs),
            effects=tuple(present.ordered(effects)),
        )


def _with_own_counters(update: GroupUpdate, shared: Container[str]) -> GroupUpdate:
    """Returns the update with its own storage for variables that other groups use, too."""
    label = "_".join(map(str, update.stages))

    def of_group(captured: Captured | None) -> Captured | None:
        if captured is None:
            return None
        variables = {
            ref: dataclasses.replace(v, storage=f"{v.name}/stage{label}") if v.name in shared else v
            for ref, v in captured.variables.items()
        }
        return dataclasses.replace(captured, variables=variables)

    apply = of_group(update.apply)
    assert apply is not None
    return dataclasses.replace(
        update, apply=apply, statistics=of_group(update.statistics), loss_scale=of_group(update.loss_scale)
    )


def _by_keras(optimizer: Any) -> bool:
    """Whether the optimizer is Keras' own, which updates each parameter by its own gradient."""
    classes = itertools.chain(type(optimizer).__mro__, type(inner_optimizer(optimizer)).__mro__)
    return all(each.__module__.partition(".")[0] in ("keras", "tensorflow", "builtins") for each in classes)


def _apply(optimizer: Any, by: str, gradients: Gradients, variables: Sequence[keras.Variable]) -> None:
    """Applies gradients by the method that steps call."""
    if by == "apply":
        optimizer.apply(gradients, variables)
    else:
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))


Gradients = list[tf.Tensor | tf.IndexedSlices]


def _rows(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns the numbers of a gradient; rows of the same index stay separate, as in Keras' own norm."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _mapped(gradients: Gradients, function: Callable[[tf.Tensor], tf.Tensor]) -> Gradients:
    return [
        tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
        if isinstance(gradient, tf.IndexedSlices)
        else function(gradient)
        for gradient in gradients
    ]


def _statistics(gradients: Gradients, totals: tf.Tensor | None) -> list[tf.Tensor]:
    """Returns (squared norm, number of non-finite tensors) of gradients, in float64 so that nothing overflows."""
    numbers = [_rows(gradient) for gradient in gradients]
    squares = [tf.reduce_sum(tf.square(tf.cast(number, tf.float64))) for number in numbers]
    broken = [tf.cast(tf.reduce_any(~tf.math.is_finite(number)), tf.float64) for number in numbers]
    return [tf.stack([tf.add_n(squares), tf.add_n(broken)])]


@contextlib.contextmanager
def _without_row_scans(optimizer: Any) -> Iterator[None]:
    """Leaves out a branch of Keras' own optimizers inside the context, which stops a GPU until the host has chosen.

    Divisors of a gradient's rows are roots of numbers above zero, or NaN where the variable is, too: Keras needn't look
    for zeros and NaN in all rows of a table.
    """
    inner = inner_optimizer(optimizer)
    known = type(inner) in _ROOTED and not has_own_methods(inner) and not getattr(inner, "centered", False)
    if not known or inner.epsilon < _LEAST_EPSILON:
        yield
        return

    def of_rows(cond: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(pred: Any, true_fn: Any = None, false_fn: Any = None, **options: Any) -> Any:
            if getattr(true_fn, "__name__", "") == "func_for_union_indices":
                return false_fn()
            return cond(pred, true_fn, false_fn, **options)

        return chosen

    with replaced(tf, "cond", of_rows):
        yield


def _clip_factor(norm: tf.Tensor, clip_norm: float) -> tf.Tensor:
    """Returns the factor of ``keras.optimizers`` for ``global_clipnorm``: NaN for a norm that isn't finite."""
    return clip_norm * tf.minimum(1.0 / norm, 1.0 / clip_norm) + (norm - norm)


def _loss_scale(optimizer: Any) -> tf.Tensor:
    return tf.convert_to_tensor(optimizer.scale_loss(tf.ones([], tf.float32)))


@contextlib.contextmanager
def _restricted_to(optimizer: Any, variables: Sequence[keras.Variable], *, clips: bool) -> Iterator[None]:
    """Restricts the optimizer to these variables inside the context, so that its loops over all stay in the stage.

    Keras updates moving averages and resets gradient accumulators for all variables at once, whichever it is given.
    """
    inner = inner_optimizer(optimizer)
    index = [position for position, v in enumerate(parameters_of(inner)) if any(v is own for own in variables)]
    with restricted(inner, index, clips=clips):
        yield
