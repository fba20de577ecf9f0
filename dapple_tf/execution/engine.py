"""The engine: builds and runs the steps of a model by a plan, in a session on its devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.clusters.clocks import Offset, WorkerClock
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.errors import DappleError, DataError, reason
from dapple_tf.execution.builds import PREPARED_STEPS, Build, BuiltStep, StepKind, StepResult
from dapple_tf.execution.device_session import DeviceSession
from dapple_tf.execution.step_builder import StepBuilder
from dapple_tf.execution.step_passes import StepPasses, pipeline
from dapple_tf.execution.terminal import Preparation
from dapple_tf.execution.values import LiveValues, Log
from dapple_tf.execution.worker_data import WorkerData
from dapple_tf.frontend.batch import Batch, BatchSpec
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.host_part import CapturedProgram, on_host
from dapple_tf.frontend.metrics import merged
from dapple_tf.frontend.optimizer_checks import check_clipping, check_shards, needs_all_gradients
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.tracing.step_nodes import replaced_bytes
from dapple_tf.tracing.step_trace import MeasuredStep, TracedStep, measured, traced_devices
from graph_passes.ir.graph import GraphDef
from graph_passes.pass_manager import After, Before

logger = logging.getLogger(__name__)


class Engine:
    """Runs steps, built on first use, in one session whose devices keep the variables.

    Attributes:
        model: the model.
        cluster: the devices.
        plan: the plan.
        table: names of the model's variables.
        timing: seconds of each pass so far; reports what is prepared.
        session: the session, and its graph.
        builder: builds steps.
        values: the values on the devices, in the model, and in files.
        data: the batches that workers read themselves.
    """

    def __init__(
        self,
        model: keras.Model,
        cluster: Cluster,
        plan: Plan,
        log: Log,
        operator_costs: OperatorCosts | None = None,
        passes: Sequence[After | Before] = (),
        prepared_steps: int = PREPARED_STEPS,
    ) -> None:
        """Opens a session; nothing is built yet.

        Args:
            model: a compiled model.
            cluster: the devices.
            plan: a plan for them.
            log: what devices get is noted there; its policy says how long to wait for workers.
            operator_costs: costs of single operators, for a plan that places them; None estimates them.
            passes: the user's own passes.
            prepared_steps: number of steps that stay prepared; see `make_room`.

        Raises:
            PlanError: the plan names devices that the cluster lacks.
            DappleError: the cluster or the optimizer can't do what the plan asks for.
            ClusterError: a worker is missing.
        """
        plan.validate_on(cluster)
        if not cluster.real:
            raise DappleError(
                "this cluster is a description without real devices: it can be planned for, not trained on"
            )
        if plan.shards:
            check_shards(model.optimizer, "optimizer_shards" if "optimizer" in plan.shards else "row_shards")
        apart = plan.num_stages > 1 or bool(plan.shards)
        if apart:
            check_clipping(model.optimizer)
        if plan.carried_updates and apart and needs_all_gradients(model.optimizer):
            raise DappleError(
                f"carried_updates is {plan.carried_updates}, but the optimizer needs all gradients before it updates "
                f"anything (global_clipnorm, or the loss scale's check for non-finite gradients): set carried_updates=0"
            )
        self.model, self.cluster, self.plan = model, cluster, plan
        self.table = VariableTable(model)
        self.timing = Preparation()
        own = StepPasses(plan, cluster, pipeline(passes))
        self.builder = StepBuilder(model, own, self.table, self.timing, operator_costs)
        self._most_steps = prepared_steps
        self.session = DeviceSession(cluster, log.policy)
        self.data = WorkerData(cluster, self.session, own.layout(plan.global_batch_size))
        self.values = LiveValues(model, self.table, self.timing, lambda: self.builder.holdings, self.session, log)

    def close(self) -> None:
        """Frees the devices' memory, and workers for others; a snapshot that is being written is finished first."""
        self.values.close()
        self.session.close()

    def reopen(self) -> None:
        """Opens a fresh session on the same graph, after `close`: variables are empty until they are loaded.

        Raises:
            ClusterError: a worker is missing; the call may be repeated.
        """
        self.session.reopen()

    def _add(self, name: str, graph: GraphDef) -> None:
        if name not in self.session.added:
            with self.timing.part("import"):
                self.session.add(graph, name)

    def make_room(self) -> None:
        """Continues in a fresh session, with only those steps that ran most often: half of what may stay prepared.

        TensorFlow's graphs and sessions only grow, and each new step takes the longer the more there are. The devices
        have all values twice until the old session is closed. If their memory is too small for that, the old one stays,
        and may get twice as many steps.

        Raises:
            WorkerLostError: a worker was lost; the old session is still there.
        """
        count = self.builder.num_steps
        self.timing.tell("moving to a fresh session")
        names = self.session.most_run(self._most_steps // 2)
        fresh = self.session.another()
        with self.session.reading:  # until the thread that reads ahead has read its batch
            try:
                self.values.move_to(fresh)
            except tf.errors.ResourceExhaustedError as error:
                fresh.close()
                self._most_steps *= 2
                logger.warning(
                    "%d steps are prepared, but the devices' memory doesn't suffice to leave some out (%s): up to %d "
                    "steps stay prepared",
                    *(count, reason(error), self._most_steps),
                )
                return
            except BaseException:
                fresh.close()
                raise
            old, self.session = self.session, fresh
            self.data.follow(fresh)
            self.builder.leave(names)
            old.close()
        logger.info("%d steps were prepared, as many as may be; %d stay in a fresh session", count, len(names))

    # ---- running

    def prepare(self, mode: Mode, spec: BatchSpec, training: bool | None = None) -> Build:
        """Returns a step's stage functions, once the devices have the newest values of all that they keep."""
        self.values.resolve()
        built = self._prepare(mode, spec, training)
        self.values.supply()
        return built

    def recover(self, spec: BatchSpec) -> None:
        """Brings devices that have lost their values to the base of recovery, to train from there."""
        self._prepare(Mode.TRAIN, spec)
        self.values.recover()

    def _prepare(self, mode: Mode, spec: BatchSpec, training: bool | None = None) -> Build:
        """Returns a step's stage functions, made once; other devices keep the variables if it asks for that."""
        builder, key = self.builder, _key(mode, spec, training)
        if key not in builder.builds:
            built, arrangement = builder.build(mode, spec, key[2])
            if arrangement != builder.arrangement:
                after = arrangement.holdings(self.table, builder.passes.devices)
                if self.values.prepared:
                    builder.builds = {}
                    self.values.rearrange(builder.holdings, after, self.session.renew)
                builder.arrangement, builder.holdings = arrangement, after
            builder.builds[key] = built
        return builder.builds[key]

    def run(
        self,
        mode: Mode,
        batch: Batch,
        *,
        training: bool | None = None,
        metrics: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
        want_gradients: bool = False,
        trace: bool = False,
    ) -> StepResult:
        """Runs one step on a batch.

        Args:
            mode: TRAIN also updates the variables, unless gradients are wanted.
            batch: the batch.
            training: as for :func:`dapple_tf.frontend.capture.capture`.
            metrics: metric variable -> (value before the step, value after a reset).
            want_gradients: whether to return reduced gradients and leave the variables unchanged.
            trace: whether to collect step stats.
        """
        built = self._prepare(mode, batch.spec, training)
        if mode is Mode.TRAIN and not want_gradients:
            self.values.push_learning_rate()
        carried = None if want_gradients else built.flush
        if self.values.left_over != (None if carried is None else carried.node):
            self.values.flush()
        address, fed = batch.address, batch.arrays
        if address is None:
            fed = on_host(built.program, fed)
        else:
            self._check_on_workers(built)
        kind = self._kind(built, batch, want_gradients=want_gradients, trace=trace)
        made = self.builder.step(built, kind)
        name, step = made.name, made.step
        flush = built.flush if kind.carries else None
        self._add(name, made.graph)
        if flush is not None:
            self._add(flush.name, flush.graph)
        if not self.session.has_run(name):
            self.timing.tell("TensorFlow prepares the step")

        request = made.request(built.program, want_gradients)
        running = {} if metrics is None else metrics
        if address is not None:
            assert step.taken is not None
            fed = [np.asarray(self.data.prepare(address, step.taken), np.int64)]
        values = [*fed, *(value for metric in step.metric_feeds for value in running[metric])]
        metadata = tf.compat.v1.RunMetadata() if trace else None
        before = self.session.clocks() if trace else {}
        called = time.time_ns()
        try:
            with self.values.step(trains="train" in request.fetches, left_over=flush and flush.node):
                result = self.session.run_step(name, request, values, metadata)
        except BaseException:
            if address is not None:
                self.data.forget(address)
            raise
        if address is not None and step.taken is not None:
            self.data.taken(address, step.taken.arrays)
        traced = None
        if metadata is not None:
            traced = self._traced(built, made, metadata.step_stats, (called, time.time_ns()), before)
        return StepResult(
            loss=float(result["loss"]) if "loss" in result else None,
            metrics={key: merged(parts, running[key][1]) for key, parts in result["metrics"].items()},
            outputs=tuple(
                built.joined(number, parts, step.layout) for number, parts in enumerate(result["outputs"]) if parts
            ),
            gradients=result["gradients"],
            traced=traced,
        )

    def _check_on_workers(self, built: Build) -> None:
        """Checks that workers can read the batches of a model themselves.

        Raises:
            DataError: they can't.
        """
        if self.plan.places_operators:
            raise DataError(
                "the plan places single operators (operator_devices), for which workers don't read data themselves: "
                "feed the data from this process, or use a plan of stages"
            )
        if isinstance(built.program, CapturedProgram) and built.program.host is not None:
            names = ", ".join(built.program.host.names)
            raise DataError(
                f"{names} of model {self.model.name!r} works on strings or by a table, in this process: do it in the "
                f"dataset, or feed the data from this process"
            )

    def _kind(self, built: Build, batch: Batch, *, want_gradients: bool = False, trace: bool = False) -> StepKind:
        """Returns the kind of the next step, after left-over updates of another kind were flushed."""
        samples, address = batch.spec.parts(batch.samples), batch.address
        apart = want_gradients and self.builder.placer is not None
        apart = apart or ((want_gradients or trace) and self.builder.passes.joins(built, samples))
        return StepKind(
            samples,
            carries=bool(built.carried) and not want_gradients,
            head=self.values.left_over is not None,
            apart=apart,
            on_workers=address is not None,
            in_parts=address is not None and address.source.in_parts,
        )

    def prepared(self, mode: Mode, batch: Batch, *, training: bool | None = None, **options: bool) -> str | None:
        """Returns the name of the prepared step for a batch; None if it must be made.

        Args:
            mode: mode of the step.
            batch: the batch.
            training: as for `run`.
            options: ``want_gradients`` and ``trace``, as for `run`.
        """
        built = self.builder.builds.get(_key(mode, batch.spec, training))
        step = None if built is None else built.steps.get(self._kind(built, batch, **options))
        return None if step is None else step.name

    @property
    def full(self) -> bool:
        """Whether as many steps are prepared as may stay."""
        return self.builder.num_steps >= self._most_steps

    # ---- traces

    def _traced(
        self, built: Build, made: BuiltStep, stats: Any, called: tuple[int, int], before: Mapping[int, Offset]
    ) -> TracedStep:
        """Returns a traced step, from which its times and memory follow.

        Args:
            built: its stage functions.
            made: the step.
            stats: TensorFlow's step stats.
            called: when it was called, and when it was over, in ns by this process's clock.
            before: the workers' clocks before it.
        """
        after = self.session.clocks()
        clocks = {worker: WorkerClock(offset, after[worker]) for worker, offset in before.items()}
        names = enumerate(self.cluster.device_names)
        stored = {index: self.builder.stored_bytes(built.program, device) for index, device in names}
        replaced = replaced_bytes(built.program, made.step) if built.mode is Mode.TRAIN else {}
        first = self.session.first_trace(made.name)
        return TracedStep(stats, made.nodes, made.name, called, clocks, stored, replaced, made.step.layout.batch, first)

    def measured(self, traced: TracedStep) -> MeasuredStep:
        """Returns a traced step's timeline, and where each device's time went."""
        limits = {
            index: float(device.memory_bytes)
            for index, device in enumerate(self.cluster.devices)
            if device.memory_bytes is not None
        }
        return measured(traced, traced_devices(self.cluster), self.plan.device_labels(), limits)


def _key(mode: Mode, spec: BatchSpec, training: bool | None) -> tuple[Mode, str, bool]:
    """Returns the key of stage functions; layers behave as in training if ``training``, or as usual if it is None."""
    return mode, spec.key, mode is Mode.TRAIN if training is None else training
