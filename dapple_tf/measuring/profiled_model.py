"""The basis of every way of profiling a model: its graph with a stage for each layer, and the optimizer's part."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np

from dapple_tf.common.memory import without_collection
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.execution.runtime import StepsApart
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.host_part import on_host
from dapple_tf.frontend.layer_cuts import LayerStages, layer_stages, with_functions
from dapple_tf.frontend.metrics import RunningMetrics
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.timed_step import TimedSession
from dapple_tf.variables.parameter_groups import group_updates
from graph_passes.ir.graph import Ref
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.program import Program


@dataclasses.dataclass(frozen=True, eq=False)
class ProfiledModel:
    """A model, and the data, sizes and devices to measure it with.

    Attributes:
        model: the model, built and compiled.
        table: its variables.
        flat: its captured training graph.
        example: its batches.
        sizes: samples of the measured slices, the smallest first.
        cluster: real devices.
        device: index of the measured device.
        repeats: number of measurements of each time; None for as many as there is time for.
    """

    model: keras.Model
    table: VariableTable
    flat: Program
    example: ExampleBatch
    sizes: tuple[int, ...]
    cluster: Cluster
    device: int
    repeats: int | None

    @property
    def device_name(self) -> str:
        """Name of the measured device."""
        return self.cluster.device_names[self.device]

    @property
    def on_gpu(self) -> bool:
        """Whether the measured device is a GPU."""
        return self.cluster.all_gpus([self.device])

    @functools.cached_property
    @without_collection
    def stages(self) -> LayerStages:
        """The layers that can be cut apart, with gradients."""
        spec = BatchSpec(self.example.spec.x)
        inference = capture(self.model, self.table, Mode.PREDICT, spec, gpus=self.on_gpu)
        return layer_stages(self.model, self.flat, inference)

    @functools.cached_property
    @without_collection
    def program(self) -> Program:
        """A stage for each layer, with functions."""
        return with_functions(self.stages.program, "layers_", on_gpu=self.on_gpu)

    @functools.cached_property
    @without_collection
    def updates(self) -> tuple[GroupUpdate, ...]:
        """The optimizer's part for each parameter group of `program`."""
        return group_updates(self.model, self.table, self.program)

    @functools.cached_property
    def sample_shapes(self) -> list[tuple[int, ...]]:
        """The shape of one sample of each of the program's inputs: devices receive strings as numbers."""
        return [array.shape[1:] for array in on_host(self.flat, self.example.batch(1))]

    def batch(self, samples: int) -> dict[Ref, np.ndarray]:
        """Returns batch input -> values for ``samples`` samples."""
        arrays = on_host(self.flat, self.example.batch(samples))
        return dict(zip(self.flat.roles.inputs, arrays, strict=True))

    @contextlib.contextmanager
    def session(self, updates: Sequence[GroupUpdate], program: Program | None = None) -> Iterator[TimedSession]:
        """Opens a session with the values of the model's and the optimizer's variables.

        Args:
            updates: the optimizer's part.
            program: the stages that read variables; None for `program`.
        """
        stages = (self.program if program is None else program).stages
        metrics: Mapping[str, tuple[np.ndarray, np.ndarray]] = RunningMetrics(self.model, self.table).feeds()
        with TimedSession(self.cluster, self.device_name, metrics) as session:
            read = {name for stage in stages for name in stage.reads}
            variables = {name: self.table.describe(name) for name in sorted(read)}
            variables |= {v.storage_name: v for update in updates for v in update.apply.variables.values()}
            session.load(self.table, list(variables.values()))
            yield session

    @contextlib.contextmanager
    def engine_step(self, samples: int, micro_batches: int) -> Iterator[Callable[[], float]]:
        """Prepares a real training step on the device; yields a function that runs it and returns its seconds.

        Args:
            samples: samples of a micro-batch.
            micro_batches: micro-batches of the step.
        """
        batch = samples * micro_batches
        plan = Plan.data_parallel([self.device], batch, micro_batches=micro_batches)
        steps = StepsApart(self.model, self.cluster, plan)
        data = self.example.trees(batch)
        try:
            yield lambda: steps.seconds(*data)
        finally:
            steps.close()


@contextlib.contextmanager
def kept_metrics(model: keras.Model) -> Iterator[None]:
    """Restores the metrics' values afterwards; metrics that are built meanwhile are reset."""
    before = [(variable, np.asarray(variable.value)) for variable in model.metrics_variables]
    known = {id(variable) for variable, _ in before}
    try:
        yield
    finally:
        for metric in model.metrics:
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()
        for variable, value in before:
            variable.assign(value)
