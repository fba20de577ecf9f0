"""The engine: builds step graphs for a model, a cluster and a plan, and runs them in one session."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.batch import BatchSpec
from dapple_tf.capture import Mode, build, capture, output_structure
from dapple_tf.cluster import Cluster
from dapple_tf.device_values import DeviceValues, Holding, load_one
from dapple_tf.errors import DappleError
from dapple_tf.optimizer import needs_all_gradients
from dapple_tf.parameter_groups import group_updates, holdings, optimizer_variables, readers_of
from dapple_tf.plan import Plan
from dapple_tf.session import add_to_graph, session_config
from dapple_tf.variables import VariableTable
from graph_passes.accumulate import Accumulate, accumulated_gradients
from graph_passes.assign_stages import AssignStages
from graph_passes.build_backward import BuildBackward
from graph_passes.build_forward import BuildForward
from graph_passes.graph import GraphDef, Ref
from graph_passes.group_update import GroupUpdate, reduction_order
from graph_passes.partition import Partition
from graph_passes.pass_manager import Dump, Pass, Timing, run_passes
from graph_passes.program import Layout, Program, Stage, Step, Variable
from graph_passes.replicate import Replicate
from graph_passes.schedule import OrderTasks
from graph_passes.split_concat import SplitConcat
from graph_passes.storage import by_dtype
from graph_passes.tasks import Schedule
from graph_passes.tensorflow_bridge import dtype_size
from graph_passes.update import Update, flush
from graph_passes.verify import verify

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: mean loss over the batch, regularizers and the like included; None for prediction.
        metrics: metric variable -> its new value.
        outputs: the model's outputs for the whole batch; empty unless predicting.
        gradients: parameter -> gradient; empty unless asked for.
        trace: TensorFlow's step stats; None unless asked for.
    """

    loss: float | None
    metrics: Mapping[str, np.ndarray]
    outputs: tuple[np.ndarray, ...]
    gradients: Mapping[str, np.ndarray]
    trace: Any = None


class _Kind(NamedTuple):
    """What a step graph is for.

    Attributes:
        samples: of its batch.
        carries: whether it leaves updates to the next step.
        head: whether it begins with those that the step before has left.
    """

    samples: int
    carries: bool = False
    head: bool = False


@dataclasses.dataclass
class _Build:
    """The stage functions of one mode and batch structure, and the steps made of them so far.

    Attributes:
        carried: the parameter groups whose updates steps leave to the next one, by their stages.
        flush: node that makes these updates without a step; None as long as there is none.
    """

    mode: Mode
    spec: BatchSpec
    program: Program
    updates: tuple[GroupUpdate, ...]
    prefix: str
    steps: dict[_Kind, tuple[str, Step]] = dataclasses.field(default_factory=dict)
    carried: tuple[tuple[int, ...], ...] = ()
    flush: str | None = None


class Engine:
    """Owns the session, the graph and the devices' variables.

    Attributes:
        plan: the plan.
        cluster: the cluster.
        table: names of the model's variables.
        timing: seconds of each pass so far.
        generation: how often the devices' variables have been dropped; they need ``load`` after each time.
        ahead: whether the devices have newer values than the Keras model.
    """

    def __init__(self, model: keras.Model, cluster: Cluster, plan: Plan) -> None:
        plan.validate_on(cluster)
        if not cluster.real:
            raise DappleError(
                "this cluster is a description without real devices: it can be planned for, not trained on"
            )
        if plan.carried_updates and plan.num_stages > 1 and needs_all_gradients(model.optimizer):
            raise DappleError(
                f"carried_updates is {plan.carried_updates}, but the optimizer needs all gradients before it updates "
                f"anything (global_clipnorm, or the loss scale's check for non-finite gradients): set carried_updates=0"
            )
        self.model, self.cluster, self.plan = model, cluster, plan
        self.table = VariableTable(model)
        self.timing = Timing()
        self._hosts: dict[str, tuple[int, ...]] = {}
        self._optimizer_variables: dict[tuple[int, ...], tuple[Variable, ...]] = {}
        self._builds: dict[tuple[Mode, str, bool], _Build] = {}
        self.generation = 0
        self.ahead = False
        self._numbers = itertools.count()
        self._structures: dict[str, Any] = {}
        self._open()

    def _open(self) -> None:
        """A fresh graph and session. The devices' variables are empty until ``load``."""
        self._graph = tf.Graph()
        self._library: set[str] = set()
        self._session = tf.compat.v1.Session(
            self.cluster.target, graph=self._graph, config=session_config(self.cluster)
        )
        self._storage: DeviceValues | None = None
        self._pushed_learning_rate: float | None = None
        self._left_over: str | None = None  # node that makes the updates which the last step has left

    def close(self) -> None:
        """Frees the devices' memory."""
        self._session.close()

    @property
    def devices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the devices of each stage's replicas."""
        return self._names(self.plan.devices)

    @property
    def homes(self) -> tuple[tuple[str, ...], ...]:
        """Names of the devices that keep the variables of each stage's replicas."""
        return self._names(self.plan.devices if self.plan.weight_devices is None else self.plan.weight_devices)

    def _names(self, devices: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
        names = self.cluster.device_names
        return tuple(tuple(names[device] for device in replicas) for replicas in devices)

    # ---- building

    def prepare(self, mode: Mode, spec: BatchSpec, *, training: bool | None = None) -> _Build:
        """The stage functions for batches of this structure; made once."""
        flag = mode is Mode.TRAIN if training is None else training
        key = (mode, spec.key, flag)
        if key not in self._builds:
            self._builds[key] = self._build(mode, spec, flag)
        return self._builds[key]

    def _build(self, mode: Mode, spec: BatchSpec, training: bool) -> _Build:
        start = time.perf_counter()
        if mode is not Mode.PREDICT:
            build(self.model, self.table, spec)
        program = capture(self.model, self.table, mode, spec, training=training)
        prefix = f"{mode.value}{next(self._numbers)}_"
        program = run_passes(program, self._stage_passes(mode, prefix), instruments=[self.timing])
        updates = group_updates(self.model, self.table, program) if mode is Mode.TRAIN else ()
        self._host(program, updates)
        carried = self._carried(updates)
        logger.info("prepared %s for %s in %.2f s", mode.value, spec.key, time.perf_counter() - start)
        return _Build(mode, spec, program, updates, prefix, carried=carried)

    def _carried(self, updates: Sequence[GroupUpdate]) -> tuple[tuple[int, ...], ...]:
        """The parameter groups that are updated during the next step's forward, in the order of their reduction."""
        count = self.plan.carried_updates
        if not count or not updates:
            return ()
        keys = [update.stages for update in updates]
        order = reduction_order(keys, self.plan.order_tasks(), self.plan.weight_devices or self.plan.devices)
        return tuple(keys[index] for index in order[-count:] if not updates[index].apply.slices)

    def _stage_passes(self, mode: Mode, prefix: str) -> list[Pass]:
        """Passes 1 to 4: from the captured graph to stage functions."""
        training = mode is Mode.TRAIN
        return [
            AssignStages(self.plan.cuts),
            BuildForward(want_outputs=mode is Mode.PREDICT),
            *([BuildBackward()] if training else []),
            Partition(self.plan.recompute, self.plan.jit_compile, training, prefix, self.plan.split_stages),
        ]

    def _step_passes(self, built: _Build, kind: _Kind) -> list[Pass]:
        """Passes 5 to 9: from stage functions to a step."""
        layout = self.layout(built, kind.samples)
        order = OrderTasks(self.schedule(built, layout), self.cluster.device_names)
        replicate = Replicate(layout, self.cluster.host_device, self._hosts, built.prefix)
        if built.mode is not Mode.TRAIN:
            return [replicate, SplitConcat(), order]
        update = Update(
            built.updates,
            self._hosts,
            self.cluster.host_device,
            self.plan.bucket_bytes,
            next(_COLLECTIVE_KEYS),
            built.prefix,
            self.plan.wait_free,
            want_gradients=not kind.carries,
            carried=built.carried if kind.carries else (),
            head=kind.head,
        )
        return [replicate, SplitConcat(), Accumulate(built.prefix), order, update]

    def _host(self, program: Program, updates: Sequence[GroupUpdate]) -> None:
        """Settles which stages keep which variables. Training decides; what was built before it is built again."""
        reads, optimizer = readers_of(program), optimizer_variables(updates)
        if updates:
            hosts = {**{name: stages for name, stages in self._hosts.items() if name not in reads}, **reads}
        else:
            hosts = {**reads, **self._hosts}
        if hosts == self._hosts and (not updates or optimizer == self._optimizer_variables):
            return
        if self._storage is not None:
            if self.ahead:
                self.save()
            self._session.close()
            self._builds = {}
            self.generation += 1
            self._open()
        self._hosts = hosts
        self._optimizer_variables = optimizer or self._optimizer_variables

    def step(self, built: _Build, kind: _Kind) -> tuple[str, Step]:
        """A step graph; made once. Returns its prefix in the session's graph, too."""
        if kind not in built.steps:
            built.steps[kind] = self._make_step(built, kind)
        return built.steps[kind]

    def layout(self, built: _Build, samples: int) -> Layout:
        """How a batch of ``samples`` samples is cut. Evaluation may take larger batches than training."""
        batch, micro_batches = self.plan.global_batch_size, self.plan.micro_batches
        if samples > batch:
            micro_batches, batch = -(-samples * micro_batches // batch), samples
        homes = None if self.plan.weight_devices is None else self.homes
        return Layout(self.devices, samples, batch, micro_batches, homes)

    def schedule(self, built: _Build, layout: Layout) -> Schedule:
        """The order of tasks for a batch."""
        micro_batches = len(layout.micro_batch_intervals)
        training = built.mode is Mode.TRAIN
        holds = self.holds(built, layout) if training else None
        return self.plan.order_tasks(micro_batches, holds=holds, active=layout.active, forward_only=not training)

    def holds(self, built: _Build, layout: Layout) -> tuple[int, ...] | None:
        """D of each stage: how many micro-batches' residuals its devices' memory holds; None without a memory limit.

        A device that runs several stages holds as many micro-batches in each; one that computes weight gradients of
        another's stage, what Bx hands to it.

        Raises:
            DappleError: not even one micro-batch fits.
        """
        homes = self.plan.weight_devices or self.plan.devices
        limits = {d: self.cluster.devices[d].memory_bytes for devices in (*self.plan.devices, *homes) for d in devices}
        known = {device: limit for device, limit in limits.items() if limit is not None}
        if not known:
            return None
        found = [len(layout.micro_batch_intervals)] * self.plan.num_stages
        for device, limit in known.items():
            places = enumerate(zip(self.plan.devices, homes, strict=True))
            stages = [index for index, (own, weights) in places if device in (*own, *weights)]
            fixed = self._stored_bytes(built.program, self.cluster.device_names[device])
            residual = max(1, sum(self._slice_bytes(built.program.stages[stage], layout) for stage in stages))
            count = (limit - fixed) // residual
            if count < 1:
                shown = f"stage {stages[0]} needs" if len(stages) == 1 else f"stages {stages} together need"
                raise DappleError(
                    f"{shown} {fixed + residual:,} bytes for variables, gradients and the residuals of one "
                    f"micro-batch, but device {device} has {limit:,}: use more stages, more replicas, smaller "
                    f"micro-batches or recompute='boundary'"
                )
            for stage in stages:
                found[stage] = min(found[stage], count)
        return tuple(found)

    def _slice_bytes(self, stage: Stage, layout: Layout) -> int:
        """Bytes that a stage keeps of a slice until its last backward task."""
        samples = max(interval.size for interval in layout.slices(stage.index, 0))
        kept = stage.residual_bytes * samples + stage.fixed_residual_bytes
        return max(kept, stage.delayed_bytes * samples + stage.fixed_delayed_bytes)

    def _stored_bytes(self, program: Program, device: str) -> int:
        """Bytes of the variables, optimizer slots and gradient accumulators on a device."""
        stored = [v for holding in self._holdings() if device in holding.devices for v in holding.variables]
        for stage in program.stages:
            if device in self.homes[stage.index]:
                stored += [v for _, v in accumulated_gradients(program, stage)]
        return sum(math.prod(v.shape) * dtype_size(v.dtype) for v in stored)

    def _make_step(self, built: _Build, kind: _Kind) -> tuple[str, Step]:
        passes = self._step_passes(built, kind)
        program = run_passes(built.program, passes, first=5, instruments=[self.timing])
        verify(program, complete=True)
        name = f"{built.prefix}{kind.samples}" + "_carries" * kind.carries + "_head" * kind.head
        self._import(program.graph, name)
        if kind.carries and built.flush is None:
            update = passes[-1]
            assert isinstance(update, Update)
            graph, node = flush(dataclasses.replace(update, first_key=next(_COLLECTIVE_KEYS)), program)
            self._import(graph, f"{built.prefix}flush")
            built.flush = f"{built.prefix}flush/{node}"
        assert program.step is not None
        return name, program.step

    def _import(self, graph: GraphDef, name: str) -> None:
        add_to_graph(self._graph, self._library, graph, name)

    # ---- running

    def run(
        self,
        mode: Mode,
        spec: BatchSpec,
        arrays: Sequence[np.ndarray],
        *,
        training: bool | None = None,
        metrics: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
        want_gradients: bool = False,
        trace: bool = False,
    ) -> StepResult:
        """Runs one step on a batch.

        Args:
            mode: TRAIN also updates the variables, unless gradients are wanted.
            spec: structure of the batch.
            arrays: its leaves.
            training: as for :func:`dapple_tf.capture.capture`.
            metrics: metric variable -> (value before the step, value after a reset).
            want_gradients: return reduced gradients and leave the variables alone.
            trace: collect step stats.
        """
        built = self.prepare(mode, spec, training=training)
        if mode is Mode.TRAIN and not want_gradients:
            self._push_learning_rate()
        carries = mode is Mode.TRAIN and not want_gradients and bool(built.carried)
        if self._left_over != (built.flush if carries else None):
            self.flush()
        prefix, step = self.step(built, _Kind(arrays[0].shape[0], carries, self._left_over is not None))

        def name(ref: Ref) -> str:
            return f"{prefix}/{ref.node}:{ref.output}"

        feed = {name(step.feeds[ref]): array for ref, array in zip(built.program.roles.inputs, arrays, strict=True)}
        for variable, placeholders in step.metric_feeds.items():
            assert metrics is not None
            feed |= {name(place): value for place, value in zip(placeholders, metrics[variable], strict=True)}
        fetch: dict[str, Any] = {
            "metrics": {key: [name(ref) for ref in refs] for key, refs in step.metric_results.items()},
            "outputs": [[name(ref) for ref in refs] for refs in step.outputs],
            "gradients": {key: name(ref) for key, ref in step.gradients.items()} if want_gradients else {},
        }
        if step.loss is not None:
            fetch["loss"] = name(step.loss)
        if step.train is not None and not want_gradients:
            fetch["train"] = f"{prefix}/{step.train}"
        metadata = tf.compat.v1.RunMetadata() if trace else None
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE) if trace else None
        self.ahead |= "train" in fetch
        result = self._session.run(fetch, feed, options=options, run_metadata=metadata)
        if carries:
            self._left_over = built.flush
        return StepResult(
            loss=float(result["loss"]) if "loss" in result else None,
            metrics={key: _merged(parts, (metrics or {})[key][1]) for key, parts in result["metrics"].items()},
            outputs=tuple(
                np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in result["outputs"] if parts
            ),
            gradients=result["gradients"],
            trace=metadata.step_stats if metadata is not None else None,
        )

    def output_structure(self, spec: BatchSpec) -> Any:
        """The structure of the model's outputs for batches of this structure."""
        if spec.key not in self._structures:
            self._structures[spec.key] = output_structure(self.model, spec)
        return self._structures[spec.key]

    def flush(self) -> None:
        """Makes the updates that the last step has left to the next one."""
        if self._left_over is not None:
            node, self._left_over = self._left_over, None
            self._session.run(node)

    # ---- variables

    def _holdings(self) -> list[Holding]:
        """The variables that devices keep, by the stages that read them."""
        return holdings(self.table, self._hosts, self._optimizer_variables, self.homes)

    def _stores(self) -> DeviceValues:
        if self._storage is None:
            self._storage = DeviceValues(self._holdings())
            self._import(self._storage.graph, DeviceValues.PREFIX)
        return self._storage

    def load(self) -> None:
        """Keras values -> devices; updates that a step has left to the next one are dropped."""
        self.ahead = False
        self._left_over = None
        storage = self._stores()
        for holding, feeds, loads in zip(storage.holdings, storage.feeds, storage.loads, strict=True):
            feed = {}
            for place, (_, group) in zip(feeds, by_dtype(holding.variables).items(), strict=True):
                values = self.table.values(variable.name for variable in group)
                feed[f"{DeviceValues.PREFIX}/{place}:0"] = np.concatenate([value.ravel() for value in values])
            if feed:
                self._session.run([f"{DeviceValues.PREFIX}/{node}" for node in loads], feed)
        rate = self.learning_rate
        self._pushed_learning_rate = None if rate is None else float(rate.numpy())

    def save(self) -> None:
        """Devices -> Keras values, each variable from the first device that keeps it.

        Not the learning rate: devices get it from Keras, and what a callback has assigned last may not be there yet.
        """
        self.flush()
        storage = self._stores()
        rate = self.learning_rate
        seen = {self.table.name_of(rate)} if rate is not None and self.table.knows(rate) else set()
        for holding, names in zip(storage.holdings, storage.saves, strict=True):
            vectors = self._session.run([f"{DeviceValues.PREFIX}/{ref.node}:{ref.output}" for ref in names])
            for vector, group in zip(vectors, by_dtype(holding.variables).values(), strict=True):
                sizes = [math.prod(variable.shape) for variable in group]
                parts = np.split(vector, np.cumsum(sizes)[:-1])
                for variable, part in zip(group, parts, strict=True):
                    if variable.name not in seen:
                        seen.add(variable.name)
                        self.table.keras_variables[variable.name].assign(part.reshape(variable.shape))
        self.ahead = False

    @property
    def learning_rate(self) -> keras.Variable | None:
        """The learning rate where it is a plain variable, which callbacks may assign in mid-training."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        rate = getattr(optimizer, "_learning_rate", None)
        return rate if isinstance(rate, keras.Variable) else None

    def _push_learning_rate(self) -> None:
        rate = self.learning_rate
        if rate is None or not self.table.knows(rate):
            return
        value = float(rate.numpy())
        if value == self._pushed_learning_rate:
            return
        self.flush()  # with the rate of its own step
        self._pushed_learning_rate = value
        name = self.table.name_of(rate)
        storage = self._stores()
        if storage.rate is None:
            graph, feed, nodes = load_one(name, storage.holdings)
            self._import(graph, "learning_rate")
            storage.rate = (feed, nodes)
        feed, nodes = storage.rate
        if nodes:
            self._session.run([f"learning_rate/{node}" for node in nodes], {f"learning_rate/{feed}:0": [value]})

    def dump(self, directory: pathlib.Path) -> None:
        """Writes the graph after every pass, for each mode and batch structure that has been used so far."""
        for built in self._builds.values():
            training = built.mode is Mode.TRAIN
            captured = capture(self.model, self.table, built.mode, built.spec, training=training)
            place = directory / built.prefix.rstrip("_")
            write = Dump(place)
            write.graph("00_capture", captured.graph)
            run_passes(captured, self._stage_passes(built.mode, built.prefix), instruments=[write])
            kind = max(built.steps, default=_Kind(self.plan.global_batch_size))
            run_passes(built.program, self._step_passes(built, kind), first=5, instruments=[write])
            schedule = self.schedule(built, self.layout(built, kind.samples))
            (place / "schedule.txt").write_text(f"{schedule}\n")


# A step uses one collective key per bucket. Keys of steps mustn't overlap, those of other engines on the same servers
# included.
_COLLECTIVE_KEYS = itertools.count(1, 20_000)


def _merged(parts: Sequence[np.ndarray], initial: np.ndarray) -> np.ndarray:
    """A metric's value over all replicas: the first one's running value plus what the others added to a fresh one."""
    total = parts[0]
    for part in parts[1:]:
        total = total + (part - initial)
    return np.asarray(total)
