"""Searches what ranges of a model's layers take on groups of devices, for plans of stages whose operators are placed.

FD-DPS is asked once for each of a few pieces of the model, on each size of a group, and for slices of one or two sizes:
not for each of the n (n + 1) / 2 ranges of n pieces, which `dapple_tf.simulation.placed_stages` composes of them. The
ranges that a plan has are then searched as a whole (`GroupProfiler.searched`), as the step's own search will.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import keras
import numpy as np

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.group_costs import GroupCosts, PlacedRange
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.execution.builds import Build, StepKind
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.capture import Mode, build, capture, check_model
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.garbage import without_collection
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.profiler import kept_metrics
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import Topology
from dapple_tf.operators.range_costs import range_costs
from dapple_tf.operators.step_placer import OwnOperators, flat_step, own_operators
from dapple_tf.planning.search import coarsened
from dapple_tf.progress import Progress
from dapple_tf.variables.parameter_groups import group_updates, readers_of
from graph_passes.analysis.split_rules import split_rules
from graph_passes.pass_manager import run_passes

logger = logging.getLogger(__name__)

SIZES = (2, 4)
"""Numbers of devices of groups."""
_PIECES = 8
"""The most pieces of a model."""
_PIECE_EFFORT = 0.2
"""Share of the search for pieces, relative to that for ranges that a plan has."""


def profile_groups(
    model: keras.Model,
    profile: Profile,
    cluster: Cluster,
    costs: OperatorCosts,
    samples: int | Sequence[int],
    *,
    sizes: Sequence[int] = SIZES,
    pieces: int = _PIECES,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    length: int | None = None,
) -> Profile:
    """Returns a profile that also says what ranges of layers take on groups of devices (`Profile.groups`).

        profile = dapple.profile_groups(model, profile, cluster, operator_costs, samples=16)
        plan = dapple.plan(profile, cluster, 64)        stages may now place their operators on groups

    Args:
        model: a built and compiled Keras model; nothing is run.
        profile: the model's profile.
        cluster: the devices, real or described, for the links between devices of a server.
        costs: times of operators on the cluster's kind of devices, measured or estimated.
        samples: samples of a slice, one size or several; between them costs change in proportion.
        sizes: numbers of devices of groups, each more than 1; those that no server has enough like devices for are left
            out.
        pieces: the most pieces that are searched one by one, of which longer ranges are composed.
        x: example inputs, as for :func:`dapple_tf.profile`.
        y: example labels.
        sample_weight: example weights.
        length: length of axes that the model leaves open.

    Raises:
        ProfileError: no server has two like devices, a number of samples, pieces or devices is too small, or inputs
            can't be guessed.
        CaptureError: the model isn't built or compiled, or can't be captured.
        TypeError: profile, cluster or costs are of another class.
    """
    _check_pieces(pieces)
    profiler = GroupProfiler(
        model, profile, cluster, costs, samples, sizes=sizes, x=x, y=y, sample_weight=sample_weight, length=length
    )
    return profiler.pieces(pieces)


class GroupProfiler:
    """A model whose operators are placed on groups of devices by search.

    Its arguments are those of `profile_groups`, and ``effort``: the share of a real step's search that the ranges of a
    plan get.

    Attributes:
        known: what has been searched with these times of operators.
    """

    def __init__(
        self,
        model: keras.Model,
        profile: Profile,
        cluster: Cluster,
        costs: OperatorCosts,
        samples: int | Sequence[int],
        *,
        sizes: Sequence[int] = SIZES,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        length: int | None = None,
        effort: float = 1.0,
    ) -> None:
        """Captures the model."""
        _check_types(profile=profile, cluster=cluster, costs=costs)
        counts = _numbers(samples, 1)
        if not counts:
            raise ProfileError(f"samples is {samples!r}; give a whole number of at least 1, or several")
        groups = _numbers(sizes, 2) if isinstance(sizes, Iterable) else []
        if not groups:
            raise ProfileError(f"sizes is {sizes!r}; give numbers of devices of groups, each at least 2")
        self.topologies = group_topologies(cluster, groups)
        if not self.topologies:
            raise ProfileError(
                f"no server has {min(groups)} devices of the same speed and memory: there are no groups on which "
                f"operators could be placed"
            )
        check_model(model, training=True)
        self.model, self.profile, self.costs, self.effort = model, profile, costs, effort
        self.samples = tuple(sorted({*counts}))
        self.known: dict[tuple[object, ...], PlacedRange] = {}
        with kept_metrics(model):
            self._example = ExampleBatch.of(model, x, y, sample_weight, length=length)
            self._table = VariableTable(model)
            build(model, self._table, self._example.spec)
            gpus = cluster.all_gpus(range(cluster.num_devices))
            self._captured = capture(model, self._table, Mode.TRAIN, self._example.spec, training=True, gpus=gpus)
        self._alone = Topology.of(cluster, [_class_of(cluster)[0][0]])

    def pieces(self, most: int = _PIECES) -> Profile:
        """Returns the profile with the costs of its pieces, at most ``most``, on one device and on groups."""
        _check_pieces(most)
        ends = piece_ends(self.profile, most)
        ranges = self._searched(list(itertools.pairwise((0, *ends))), _PIECE_EFFORT * self.effort)
        return dataclasses.replace(self.profile, groups=GroupCosts(ends, tuple(ranges)))

    def with_costs(self, costs: OperatorCosts) -> GroupProfiler:
        """Returns the same with other times of operators, which has searched nothing yet."""
        other = copy.copy(self)
        other.costs, other.known = costs, {}
        return other

    def searched(self, profile: Profile, plan: Plan) -> Profile | None:
        """Returns a profile with the ranges of a plan's placed stages, too, each searched as a whole.

        Args:
            profile: a profile with the costs of pieces.
            plan: a plan made from it.

        Returns:
            None if the profile has all of them already.
        """
        groups = profile.groups
        assert groups is not None
        bounds = [0, *map(profile.position_after, plan.cuts), len(profile.layers)]
        missing = [
            (first, stop)
            for stage, (first, stop) in enumerate(itertools.pairwise(bounds))
            if stage in plan.spread_stages
            for devices in [len((plan.operator_devices or ())[stage][0])]
            if devices in groups.sizes and not groups.knows(first, stop, devices)
        ]
        if not missing:
            return None
        wanted = {len(own[0]) for own in plan.operator_devices or ()}
        ranges = self._searched(missing, self.effort, [size for size in self.topologies if size in wanted], bounds)
        return dataclasses.replace(profile, groups=GroupCosts(groups.ends, (*groups.ranges, *ranges)))

    def whole_seconds(self, cluster: Cluster, samples: int, devices: Sequence[int] | None = None) -> float:
        """Returns the seconds of a step whose operators are all placed on some devices, without stages or tasks.

        Args:
            cluster: the devices and links.
            samples: samples of the step, in one slice.
            devices: the devices; None for all.
        """
        profile, layers = self.profile, (0, len(self.profile.layers))
        own = self.operators([*layers], samples)[layers]
        topology = Topology.of(cluster, devices)
        graph = build_op_graph(own.bare, topology, self.costs, own.shapes, rules=split_rules)
        with Progress(f"placing operators on {topology.count} devices", 100) as bar:
            placement = fd_dps(graph, topology, effort=self.effort, progress=bar.at)
        alone = (profile.total("forward") + profile.total("backward")).at(samples)
        alone += sum(layer.apply_seconds for layer in profile.layers)
        started = profile.step_seconds + 2 * profile.task_seconds
        return started + alone * placement.seconds / float(graph.seconds[:, 0].sum())

    def _searched(
        self,
        wanted: Sequence[tuple[int, int]],
        effort: float,
        sizes: Sequence[int] | None = None,
        bounds: Sequence[int] | None = None,
    ) -> list[PlacedRange]:
        """Searches ranges of layers on one device and on groups, for slices of all sizes.

        Args:
            wanted: first layer of each, and the one after its last.
            effort: share of the usual search.
            sizes: numbers of devices of the groups; None for all.
            bounds: ends of the stages of which these are some, with 0; None for those of ``wanted``.
        """
        chosen = self.topologies if sizes is None else {size: self.topologies[size] for size in sizes}
        stops = bounds or [0, *(stop for _, stop in wanted)]
        searches = [
            _Wanted(own, samples, topology, effort)
            for samples in self.samples
            for own in wanted
            for topology in (self._alone, *chosen.values())
        ]
        missing = [search for search in searches if search.key not in self.known]
        stages: Mapping[tuple[int, int], OwnOperators] = {}
        with Progress("searching groups of devices", len(missing)) as bar:
            for number, search in enumerate(missing):
                if not number or search.samples != missing[number - 1].samples:
                    bar.step(f"operators for slices of {search.samples}", now=True)
                    stages = self.operators(stops, search.samples)
                bar.at(str(search), number / len(missing))
                own, topology = stages[search.layers], search.topology
                placed = range_costs(own, search.layers, search.samples, topology, self.costs, effort=effort)
                self.known[search.key] = placed
                logger.debug("%s: %s", search, placed)
        logger.info("searched %d ranges of model %r on groups of devices", len(missing), self.model.name)
        return [self.known[search.key] for search in searches]

    @without_collection
    def operators(self, bounds: Sequence[int], samples: int) -> Mapping[tuple[int, int], OwnOperators]:
        """Returns the operators of ranges of layers, in a step in which each range is a stage.

        Args:
            bounds: ends of the ranges, with 0.
            samples: samples of the step, in one slice.
        """
        cuts = [self.profile.layers[stop - 1].name for stop in bounds[1:-1]]
        stages = len(cuts) + 1
        devices = f'{{"format": "dapple_tf.cluster/1", "servers": [{{"devices": {stages}}}]}}'
        cluster = Cluster.from_json(devices)
        plan = Plan.straight(cuts, samples, 1).with_placed_operators()
        passes = StepPasses(plan, cluster)
        program = run_passes(self._captured, passes.stage_passes(Mode.TRAIN, "train_"))
        updates = group_updates(self.model, self._table, program)
        built = Build(Mode.TRAIN, self._example.spec, program, updates, "train_")
        kind = StepKind(samples)
        step_passes = passes.step_passes(built, kind, plan.order_tasks(), readers_of(program))
        complete = run_passes(program, step_passes, complete=True)
        flat = flat_step(complete, built.input_shapes(kind), keep_tasks=True)
        names = cluster.device_names
        ranges = itertools.pairwise(bounds)
        return {own: own_operators(flat, names[stage]) for stage, own in enumerate(ranges)}


_CLASSES = {
    "profile": (Profile, "a dapple_tf.Profile, by dapple_tf.profile(...) or Profile.load(path)"),
    "cluster": (Cluster, "a dapple_tf.Cluster: Cluster.local(2), say"),
    "costs": (OperatorCosts, "dapple_tf.OperatorCosts, by dapple_tf.profile_operators(...) or OperatorCosts.p100()"),
}
"""Name of an argument -> its class, and how to come by one."""


def _check_types(**arguments: object) -> None:
    """Checks the classes of the arguments that describe the model and the devices.

    Raises:
        TypeError: one has another class, because two of them are swapped, say.
    """
    for name, value in arguments.items():
        kind, way = _CLASSES[name]
        if not isinstance(value, kind):
            shown = type(value).__name__ if isinstance(value, (Profile, Cluster, OperatorCosts)) else f"{value!r:.60}"
            raise TypeError(f"operators can't be placed on groups: {name} is {shown}; give {way}")


def _check_pieces(pieces: object) -> None:
    if not _numbers(pieces, 1) or isinstance(pieces, Iterable):
        raise ProfileError(f"pieces is {pieces!r}; give a whole number of at least 1")


def _numbers(value: object, least: int) -> list[int]:
    """Returns a whole number, or several, as a list; an empty one if any isn't a whole number of at least ``least``."""
    if isinstance(value, (str, bytes, Mapping)):
        return []
    try:
        numbers = [*cast(Iterable[object], value)]
    except TypeError:  # It is one, or an array or a tensor without axes.
        numbers = [value]
    whole = [number for number in numbers if isinstance(number, int | np.integer) and not isinstance(number, bool)]
    usable = len(whole) == len(numbers) and all(number >= least for number in whole)
    return [int(number) for number in whole] if usable else []


def piece_ends(profile: Profile, most: int) -> tuple[int, ...]:
    """Returns the layer after the last of each piece, at most ``most``.

    Pieces end where a single tensor crosses, as far as there are such places: parallel branches stay together, of which
    a part says little about the whole.
    """
    crossing = [0] * len(profile.layers)
    for tensor in profile.tensors:
        for layer in range(tensor.producer, tensor.consumers[-1]):
            crossing[layer] += 1
    narrow = [layer + 1 for layer, count in enumerate(crossing[:-1]) if count <= 1]
    return coarsened(profile, most, [*narrow, len(profile.layers)] if narrow else None)


class _Wanted(NamedTuple):
    """A search: the first layer and the one after the last, samples of a slice, the devices, and the effort."""

    layers: tuple[int, int]
    samples: int
    topology: Topology
    effort: float

    @property
    def key(self) -> tuple[object, ...]:
        """What tells searches of a profiler apart."""
        return self.layers, self.samples, self.topology.count, self.effort

    def __str__(self) -> str:
        first, stop = self.layers
        return f"layers {first} to {stop - 1} on {self.topology.count} devices, slices of {self.samples}"


def group_topologies(cluster: Cluster, sizes: Iterable[int]) -> dict[int, Topology]:
    """Returns number of devices -> the devices and links of such a group, as slow as the slowest of the cluster's.

    Groups are of like devices of one server. What they store doesn't limit them: that is the planner's concern.
    """
    topologies = {}
    for size in sorted({*sizes}):
        windows = [
            group[start : start + size]
            for group in _class_of(cluster)
            for start in range(0, len(group) - size + 1, size)
        ]
        if windows:
            topology = Topology.of_groups(cluster, windows)
            topologies[size] = dataclasses.replace(topology, memory_bytes=np.full(size, np.inf))
    return topologies


def _class_of(cluster: Cluster) -> list[tuple[int, ...]]:
    """Returns each server's like devices of the kind of which there are most."""
    kinds = [{*members} for members in cluster.device_classes]
    most = max(kinds, key=len)
    groups = [tuple(device for device in group if device in most) for group in cluster.device_groups]
    return [group for group in groups if group]
