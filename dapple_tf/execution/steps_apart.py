"""Training steps for measuring, whose values don't become the model's."""

from __future__ import annotations

import time
from typing import Any

import keras

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan import Plan
from dapple_tf.execution.runtime import Runtime
from dapple_tf.frontend.batch import Batches
from dapple_tf.frontend.capture import check_model
from dapple_tf.frontend.optimizer_checks import check_optimizer


class StepsApart:
    """A model's training steps by a plan, which train separate values; the model keeps its own."""

    def __init__(self, model: keras.Model, cluster: Cluster, plan: Plan) -> None:
        """Takes the devices.

        Args:
            model: the model, built and compiled.
            cluster: real devices.
            plan: a plan for them.

        Raises:
            CaptureError: the model isn't built or compiled, or it or its optimizer can't be pipelined.
        """
        check_model(model, training=True)
        check_optimizer(model.optimizer, model.trainable_variables)
        self._model = model
        self._runtime = Runtime(model, cluster, plan, None, FaultPolicy(), quiet=True)
        self._runtime.set_apart()

    def seconds(self, x: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Runs a step on a batch; returns the seconds from feeding the devices to their results.

        Args:
            x: one batch of inputs, as for ``train_on_batch``.
            y: its labels.
            sample_weight: its weights.
        """
        batch = next(Batches(self._model, [(x, y, sample_weight)], cut=self._runtime.engine.plan.cuts_batches))
        started = time.perf_counter()
        self._runtime.train(batch)
        return time.perf_counter() - started

    def close(self) -> None:
        """Frees the devices."""
        self._runtime.close(sync=False)
