"""The engine: builds step graphs for a model, a cluster and a plan, and runs them in one session."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.clusters.clocks import Offset, WorkerClock, estimate
from dapple_tf.clusters.connection import connected, open_session
from dapple_tf.clusters.remote_session import RemoteSession
from dapple_tf.clusters.session import PreparedRun, add_to_graph, collective_keys
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan import Plan
from dapple_tf.errors import CaptureError, DappleError, WorkerLostError
from dapple_tf.execution.builds import Build, Kind, StepRequest, StepResult, StepSource
from dapple_tf.execution.device_state import DeviceState
from dapple_tf.execution.notes import NoteLog, notes_of, pairs
from dapple_tf.execution.preparation import Preparation
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.execution.terminal import without_profiler_lines
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.host_part import on_host
from dapple_tf.frontend.metrics import merged
from dapple_tf.frontend.optimizer import needs_all_gradients
from dapple_tf.frontend.py_functions import check_py_functions
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.garbage import without_collection
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpPlacement
from dapple_tf.operators.step_placer import PlacedStep, StepPlacer
from dapple_tf.tracing.step_nodes import replaced_bytes, step_nodes
from dapple_tf.tracing.step_trace import MeasuredStep, Place, TracedStep, measured
from dapple_tf.variables.device_values import Holding
from dapple_tf.variables.parameter_groups import Places, group_updates, holdings, optimizer_variables, readers_of
from graph_passes.ir.graph import GraphDef, PassError
from graph_passes.ir.program import Layout, Program, Step, Variable
from graph_passes.ir.storage import bytes_of
from graph_passes.ir.tasks import Schedule
from graph_passes.pass_manager import Pass, Pipeline, run_passes
from graph_passes.passes.replicate import sum_keys
from graph_passes.passes.update import Update, flush

logger = logging.getLogger(__name__)

_LEAST_PATIENCE = 60.0
"""Seconds."""
_LOCAL_SEQUENCE = 1
"""Numbers the steps with collective operations of a session of this process; any number but 0."""


class Engine:
    """Owns the session, the graph and the devices' variables.

    Attributes:
        plan: the plan.
        cluster: the cluster.
        passes: what they ask for.
        placer: places single operators; None where stages run as a whole.
        faults: how patient to be with its workers.
        table: names of the model's variables.
        timing: seconds of each pass so far; tells what is prepared.
        state: the values that devices have.
        running: whether a step is.
        notes: where training isn't the same as plain Keras.
    """

    def __init__(
        self,
        model: keras.Model,
        cluster: Cluster,
        plan: Plan,
        faults: FaultPolicy,
        operator_costs: OperatorCosts | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
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
        self.model, self.cluster, self.plan, self.faults = model, cluster, plan, faults
        self.passes = StepPasses(plan, cluster) if pipeline is None else StepPasses(plan, cluster, pipeline)
        self.placer: StepPlacer | None = None
        if plan.operator_devices is not None:
            self.placer = StepPlacer(plan, cluster, operator_costs or OperatorCosts(), self.passes.pipeline)
        self._places: Places = {}
        self._trained_places = False
        self.table = VariableTable(model)
        self.timing = Preparation()
        self._hosts: dict[str, tuple[int, ...]] = {}
        self._optimizer_variables: dict[tuple[int, ...], tuple[Variable, ...]] = {}
        self._builds: dict[tuple[Mode, str, bool], Build] = {}
        self.notes = NoteLog(model.name)
        self.running = False
        self._numbers = itertools.count()
        self._longest: dict[str, float] = {}  # step graph -> seconds
        self._connected = contextlib.ExitStack()
        self._connection = self._connected.enter_context(connected(cluster, faults))
        self._open()
        self.state = DeviceState(
            model, self.table, self.timing, self._holdings, self._run, self._import, self._run_update
        )

    def _open(self) -> None:
        """A fresh graph and session."""
        self._graph = tf.Graph()
        self._library: set[str] = set()
        self._session = open_session(self.cluster, self._graph, self._connection)
        self._prepared: dict[StepRequest, PreparedRun] = {}
        self._traced_before: set[str] = set()  # names of steps

    def close(self) -> None:
        """Frees the devices' memory, and workers for others; a snapshot that is being written is finished first."""
        self._close_session()
        self._connected.close()

    def _close_session(self) -> None:
        """Frees the devices' memory; workers stay this process's."""
        self.state.close()
        self._prepared.clear()
        self._session.close()

    def reopen(self) -> None:
        """A fresh session on the same graph, after `close`: variables are empty until they are loaded.

        Raises:
            ClusterError: not all workers are there; it may be tried again.
        """
        self._connection = self._connected.enter_context(connected(self.cluster, self.faults))
        self._session = open_session(self.cluster, self._graph, self._connection)
        self._traced_before.clear()
        self.state.left_over = None

    @property
    def lost(self) -> WorkerLostError | None:
        """The worker that its session has lost; None if all are there."""
        return self._session.connection.lost if isinstance(self._session, RemoteSession) else None

    @property
    def freed(self) -> bool:
        """Whether its session is gone, though it hasn't been closed: Python is collecting both."""
        return isinstance(self._session, RemoteSession) and self._session.closed

    # ---- building

    def prepare(self, mode: Mode, spec: BatchSpec, *, training: bool | None = None) -> Build:
        """The stage functions for batches of this structure; made once."""
        flag = mode is Mode.TRAIN if training is None else training
        key = (mode, spec.key, flag)
        if key not in self._builds:
            self._builds[key] = self._build(mode, spec, flag)
        return self._builds[key]

    @without_collection
    def _build(self, mode: Mode, spec: BatchSpec, training: bool) -> Build:
        start = time.perf_counter()
        if mode is not Mode.PREDICT:
            with self.timing.part("build losses and metrics"):
                build(self.model, self.table, spec)
        with self.timing.part("capture"):
            program = capture(self.model, self.table, mode, spec, training=training, predict_step=mode is Mode.PREDICT)
            check_py_functions(program.graph, self.cluster.addresses)
        prefix = f"{mode.value}{next(self._numbers)}_"
        captured, slices = program, self.passes.slices
        try:
            passes = self.passes.stage_passes(mode, prefix)
            first = self.passes.pipeline.number(passes[0])
            program = run_passes(captured, passes, first=first, instruments=self.timing.of_passes(passes, first))
        except PassError as error:
            why = pairs(captured, slices)
            if not why:
                raise
            raise PassError(f"{error}; {why}") from error
        if mode is Mode.PREDICT and (why := pairs(program, slices)):
            raise CaptureError(f"model {self.model.name!r} can't predict by slices of a batch: {why}")
        with self.timing.part("capture optimizer"):
            updates = group_updates(self.model, self.table, program) if mode is Mode.TRAIN else ()
        built = Build(mode, spec, program, updates, prefix, carried=self.passes.carried(updates))
        if mode is Mode.TRAIN and training:
            self.notes.take(notes_of(program, slices, self.plan.micro_batches))
        reads = readers_of(program)
        if updates:
            hosts = {**{name: stages for name, stages in self._hosts.items() if name not in reads}, **reads}
        else:
            hosts = {**reads, **self._hosts}
        places = self._places if self.placer is None else self._placed(self.placer, built, hosts)
        self._host(hosts, optimizer_variables(updates), places)
        logger.info("prepared %s for %s in %.2f s", mode.value, spec.key, time.perf_counter() - start)
        return built

    def _placed(self, placer: StepPlacer, built: Build, hosts: Mapping[str, tuple[int, ...]]) -> Places:
        """Places the operators of a step of a full batch; where variables are then. Training decides over them."""
        kind = Kind(self.plan.global_batch_size)
        decides = built.mode is Mode.TRAIN and not self._trained_places
        built.placed[kind] = self._place(placer, built, kind, hosts, {} if decides else self._places)
        self._trained_places |= decides
        return {**self._places, **built.placed[kind].places}

    def _place(
        self, placer: StepPlacer, built: Build, kind: Kind, hosts: Mapping[str, tuple[int, ...]], places: Places
    ) -> PlacedStep:
        complete, _ = self._complete(built, kind, hosts)
        return placer.place(complete, built.input_shapes(kind), places, [self.timing])

    def _host(
        self,
        hosts: dict[str, tuple[int, ...]],
        optimizer: dict[tuple[int, ...], tuple[Variable, ...]],
        places: Places,
    ) -> None:
        """Settles which stages keep which variables. Training decides; what was built before it is built again."""
        if (hosts, optimizer or self._optimizer_variables, places) == (
            self._hosts,
            self._optimizer_variables,
            self._places,
        ):
            return
        before = self._holdings()
        stays = self.state.ahead and self.state.deferred  # The model has no place for the values that devices have.
        if stays:
            self.state.flush()
            self._builds = {}
        elif self.state.has_values:
            if self.state.ahead:
                self.state.save()
            self._close_session()
            self._builds = {}
            self._open()
            self.state.reset()
        self._hosts, self._places = hosts, places
        self._optimizer_variables = optimizer or self._optimizer_variables
        if stays:
            self.state.rearrange(before)

    def step(self, built: Build, kind: Kind) -> tuple[str, Step]:
        """A step graph; made once. Returns its prefix in the session's graph, too."""
        if kind not in built.steps:
            built.steps[kind] = self._make_step(built, kind)
        return built.steps[kind]

    def layout(self, built: Build, samples: int) -> Layout:
        """How a batch of ``samples`` samples is cut. Evaluation may take larger batches than training."""
        return self.passes.layout(samples)

    def schedule(self, built: Build, layout: Layout) -> Schedule:
        """The order of tasks for a batch."""
        return self.passes.schedule(built, layout, self._holdings())

    def _stored_bytes(self, program: Program, device: str) -> int:
        """Bytes of the variables, optimizer slots and gradient accumulators on a device."""
        if self.placer is None:
            return self.passes.stored_bytes(program, self._holdings(), device)
        kept = [v for holding in self._holdings() if device in holding.devices for v in holding.variables]
        for stage in program.stages if self.plan.accumulates() else ():
            accumulators = (variable for _, variable, _ in stage.gradients)
            kept += [v for v in accumulators if self._places.get((stage.index, v.place)) == device]
        return bytes_of(kept)

    @without_collection
    def _make_step(self, built: Build, kind: Kind) -> tuple[str, Step]:
        if self.placer is not None:
            placed = built.placed.pop(kind, None) or self._place(self.placer, built, kind, self._hosts, self._places)
            program, passes = placed.program, list[Pass]()
            built.placements[kind] = placed.placements
        else:
            program, passes = self._complete(built, kind, self._hosts)
        name = f"{built.prefix}{kind.samples}" + "".join(f"_{told}" for told in kind._fields[1:] if getattr(kind, told))
        self._import(program.graph, name)
        if kind.carries and built.flush is None:
            update = next(item for item in passes if isinstance(item, Update))
            graph, node = flush(dataclasses.replace(update, first_key=collective_keys()), program)
            self._import(graph, f"{built.prefix}flush")
            built.flush = f"{built.prefix}flush/{node}"
        built.nodes[name] = step_nodes(program)
        return name, program.own_step

    def _complete(self, built: Build, kind: Kind, hosts: Mapping[str, tuple[int, ...]]) -> tuple[Program, list[Pass]]:
        """A complete step of stage functions, and the passes that made it."""
        layout = self.layout(built, kind.samples)
        keys = collective_keys(sum_keys(built.program, layout))
        passes = self.passes.step_passes(built, kind, self.schedule(built, layout), hosts, keys)
        first = self.passes.pipeline.number(passes[0])
        instruments = self.timing.of_passes(passes, first)
        program = run_passes(built.program, passes, first=first, instruments=instruments, complete=True)
        return program, passes

    def _import(self, graph: GraphDef, name: str) -> None:
        with self.timing.part("import"):
            add_to_graph(self._graph, self._library, graph, name)

    def _holdings(self) -> list[Holding]:
        """The variables that devices keep, by the stages that read them."""
        return holdings(self.table, self._hosts, self._optimizer_variables, self.passes.homes, self._places)

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
            training: as for :func:`dapple_tf.frontend.capture.capture`.
            metrics: metric variable -> (value before the step, value after a reset).
            want_gradients: return reduced gradients and leave the variables alone.
            trace: collect step stats.
        """
        built = self.prepare(mode, spec, training=training)
        if mode is Mode.TRAIN and not want_gradients:
            self.state.push_learning_rate()
        carries = self._carries(built, want_gradients)
        if self.state.left_over != (built.flush if carries else None):
            self.state.flush()
        arrays = on_host(built.program, arrays)
        samples = arrays[0].shape[0]
        prefix, step = self.step(built, self._kind(built, samples, want_gradients=want_gradients, trace=trace))
        if prefix not in self._longest:
            self.timing.tell("TensorFlow prepares the step")

        request = StepRequest.of(built, prefix, step, want_gradients)
        running = {} if metrics is None else metrics
        values = [*arrays, *(value for name in step.metric_feeds for value in running[name])]
        metadata = tf.compat.v1.RunMetadata() if trace else None
        before = self._clocks() if trace else {}
        self.state.ahead |= "train" in request.fetches
        if carries:
            self.state.left_over = built.flush  # also if Ctrl-C comes in place of the result
        called = time.time_ns()
        self.running = True
        try:
            result = self._timed(prefix, lambda seconds: self._run_step(request, values, metadata, seconds))
        finally:
            self.running = False
        traced = None
        if metadata is not None:
            times = called, time.time_ns()
            after = self._clocks()
            clocks = {worker: WorkerClock(offset, after[worker]) for worker, offset in before.items()}
            traced = self._traced(built, prefix, step, metadata.step_stats, times, clocks)
        return StepResult(
            loss=float(result["loss"]) if "loss" in result else None,
            metrics={key: merged(parts, running[key][1]) for key, parts in result["metrics"].items()},
            outputs=tuple(
                np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in result["outputs"] if parts
            ),
            gradients=result["gradients"],
            traced=traced,
        )

    def _carries(self, built: Build, want_gradients: bool) -> bool:
        """Whether a step leaves updates to the next one."""
        return built.mode is Mode.TRAIN and not want_gradients and bool(built.carried)

    def _kind(self, built: Build, samples: int, *, want_gradients: bool = False, trace: bool = False) -> Kind:
        """The step that is next, when what another kind has left has been flushed."""
        apart = want_gradients and self.placer is not None
        apart = apart or ((want_gradients or trace) and self.passes.joins(built, samples))
        head = self.state.left_over is not None
        return Kind(samples, self._carries(built, want_gradients), head, apart)

    def has_run(
        self, mode: Mode, spec: BatchSpec, samples: int, *, training: bool | None = None, **options: bool
    ) -> bool:
        """Whether such a step has run already, so that nothing needs to be prepared.

        Args:
            mode: of the step.
            spec: structure of the batch.
            samples: of the batch.
            training: as for `run`.
            options: ``want_gradients`` and ``trace``, as for `run`.
        """
        built = self._builds.get((mode, spec.key, mode is Mode.TRAIN if training is None else training))
        if built is None:
            return False
        step = built.steps.get(self._kind(built, samples, **options))
        return step is not None and step[0] in self._longest

    def _run_step(self, request: StepRequest, values: Sequence[Any], metadata: Any, seconds: float | None) -> Any:
        """What a step gives for these values of its placeholders."""
        if metadata is None and not isinstance(self._session, RemoteSession):
            if request not in self._prepared:
                options = self._step_options(request.sums)
                self._prepared[request] = PreparedRun(self._session, request.fetches, request.feeds, options)
            return self._prepared[request](values)
        options = self._step_options(request.sums)
        feed = dict(zip(request.feeds, values, strict=True))
        if metadata is None:
            return self._run(request.fetches, feed, options, metadata, seconds)
        options.trace_level = self._trace_level
        profiled = options.trace_level == options.FULL_TRACE
        with without_profiler_lines() if profiled else contextlib.nullcontext():
            return self._run(request.fetches, feed, options, metadata, seconds)

    @property
    def _trace_level(self) -> Any:
        """Only GPUs need TensorFlow's profiler, which costs time; a server knows no other level."""
        levels = tf.compat.v1.RunOptions
        here = all("device:CPU" in device.name for device in self.cluster.devices)
        return levels.SOFTWARE_TRACE if here and not isinstance(self._session, RemoteSession) else levels.FULL_TRACE

    def _clocks(self) -> dict[int, Offset]:
        """Worker -> by how much its clock is ahead; empty where devices are this process's."""
        if not isinstance(self._session, RemoteSession):
            return {}
        asked = self._session.connection.clocks()
        return {worker: estimate(samples) for worker, samples in asked.items()}

    def _traced(
        self,
        built: Build,
        prefix: str,
        step: Step,
        stats: Any,
        called: tuple[int, int],
        clocks: Mapping[int, WorkerClock],
    ) -> TracedStep:
        names = self.cluster.device_names
        stored = {index: self._stored_bytes(built.program, name) for index, name in enumerate(names)}
        replaced = replaced_bytes(built.program, step) if built.mode is Mode.TRAIN else {}
        first = prefix not in self._traced_before
        self._traced_before.add(prefix)
        return TracedStep(
            stats, built.nodes[prefix], prefix, called, clocks, stored, replaced, step.layout.batch, first
        )

    def measured(self, traced: TracedStep) -> MeasuredStep:
        """A traced step as a timeline, and where each device's time went."""
        devices = enumerate(self.cluster.devices)
        places = {device.name: Place(index, device.server) for index, device in devices}
        limits = {
            index: float(device.memory_bytes)
            for index, device in enumerate(self.cluster.devices)
            if device.memory_bytes is not None
        }
        return measured(traced, places, self.plan.device_labels(), limits)

    def output_structure(self, spec: BatchSpec) -> Any:
        """The structure of what prediction has given for batches of this structure."""
        return self.table.outputs[spec.key]

    def _run_update(self, node: str) -> None:
        self._run(node, options=self._step_options())

    def _step_options(self, sums: bool = False) -> tf.compat.v1.RunOptions:
        """For what may have collective operations; ``sums`` tells of some inside tasks.

        TensorFlow numbers the runs of such graphs one after the other, each session's from where another's has stopped.
        A run that was left behind when a worker was lost may still be there: with the same number in a new session, the
        one's end would cancel the other, or take its tensors. So each session has a sequence of its own. On devices of
        this process TensorFlow looks for collective operations itself, but not inside functions.
        """
        options = tf.compat.v1.RunOptions()
        if isinstance(self._session, RemoteSession):
            options.experimental.collective_graph_key = self._session.sequence
        elif sums:
            options.experimental.collective_graph_key = _LOCAL_SEQUENCE
        return options

    def _run(
        self,
        fetches: Any,
        feed: Mapping[str, Any] | None = None,
        options: Any = None,
        metadata: Any = None,
        seconds: float | None = None,
    ) -> Any:
        """What the session gives for nodes of its graph: the one way in which anything is run.

        On workers it counts as hung after so many seconds.
        """
        if isinstance(self._session, RemoteSession):
            return self._session.run(fetches, feed, options, metadata, seconds)
        return self._session.run(fetches, feed, options=options, run_metadata=metadata)

    def _timed(self, prefix: str, run: Callable[[float | None], Any]) -> Any:
        """Runs a step that counts as hung after ten times as long as it has ever taken, the first time included."""
        longest = self._longest.get(prefix)
        started = time.monotonic()
        result = run(None if longest is None else max(_LEAST_PATIENCE, 10 * longest))
        self._longest[prefix] = max(longest or 0.0, time.monotonic() - started)
        return result

    # ---- looking inside

    @property
    def placements(self) -> Mapping[int, OpPlacement]:
        """Stage -> where the operators of the largest training step are; empty as long as there is none."""
        found = {
            kind.samples: placements
            for built in self._builds.values()
            if built.mode is Mode.TRAIN
            for kind, placements in built.placements.items()
        }
        return found[max(found)] if found else {}

    @property
    def sources(self) -> list[StepSource]:
        """What the steps are made of that have been prepared so far, for each mode and structure of batches."""
        return [
            StepSource(built, training, max(built.steps, default=None), self._hosts, self._holdings())
            for (_, _, training), built in self._builds.items()
        ]
