"""Sums over the replicas of a micro-batch, which layers make by ``tf.distribute``.

``keras.layers.BatchNormalization(synchronized=True)`` adds up sums, squares and counts by
``tf.distribute.get_replica_context().all_reduce``, and so may any layer. Without a strategy that does nothing; while a
model is captured it becomes a collective operation, whose members the step provides (`Peers`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.patching import replaced
from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Peers

_GRADIENT = "DappleSumOverReplicas"


class ReplicaSums:
    """Collects the sums over replicas while a model is captured.

    Attributes:
        peers: the inputs that name the replicas of a sum; None as long as there are no sums.
    """

    def __init__(self, graph: tf.Graph, samples: tf.Tensor) -> None:
        """Starts without sums.

        Args:
            graph: the graph into which the model is traced.
            samples: samples of the slice (an int32 scalar).
        """
        self._graph = graph
        self._samples = samples
        self.peers: Peers | None = None
        self._scalars: list[tf.Tensor] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Makes layers' all-reduce sum over the replicas of the same micro-batch, inside the context."""

        def reduced(_: Callable[..., Any]) -> Callable[..., Any]:
            def all_reduce(context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
                operation = tf.distribute.ReduceOp(reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
                return tf.nest.map_structure(lambda tensor: self._reduced(operation, tensor), value)

            return all_reduce

        def masked(original: Callable[..., Any]) -> Callable[..., Any]:
            def moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> Any:
                if mask is None or not layer.synchronized:
                    return original(layer, inputs, mask)
                with self._summing(layer):
                    return original(layer, inputs, mask)

            return moments

        with (
            replaced(tf.distribute.ReplicaContext, "all_reduce", reduced),
            replaced(keras.layers.BatchNormalization, "_moments", masked),
        ):
            yield

    @contextlib.contextmanager
    def _summing(self, layer: keras.layers.BatchNormalization) -> Iterator[None]:
        """Makes Keras' own sums go over all replicas inside the context: masked moments don't use all-reduce."""
        sums = 0

        def over_replicas(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
            def call(*args: Any, **kwargs: Any) -> tf.Tensor:
                nonlocal sums
                sums += 1
                return self._sum(original(*args, **kwargs))

            return call

        operations = sys.modules[keras.layers.BatchNormalization.__module__].ops
        with replaced(operations, "sum", over_replicas):
            yield
        if not sums:
            raise CaptureError(
                f"layer {layer.name!r} has synchronized=True and a mask, but Keras {keras.__version__} computes masked "
                f"moments in an unknown way; set synchronized=False, or use another version of Keras"
            )

    def _reduced(self, operation: tf.distribute.ReduceOp, value: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(value)  # rows of an embedding's gradient, too
        if operation is tf.distribute.ReduceOp.SUM:
            return self._sum(tensor)
        share = self._samples / self._sum(self._samples)  # 1 for a replica that is alone
        return self._sum(tensor * tf.cast(share, tensor.dtype))

    def _sum(self, tensor: tf.Tensor) -> tf.Tensor:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise CaptureError(
                "something is added up over replicas (synchronized=True, say) inside a loop, a branch or a vectorized "
                "map, where replicas couldn't tell which sum is which; move it outside, or set synchronized=False"
            )
        if self.peers is None:
            names = "peers_count", "peers_group", "peers_instance"
            self._scalars = [tf.compat.v1.placeholder(tf.int32, [], name=name) for name in names]
            count, group, instance = (Ref.parse(scalar.name) for scalar in self._scalars)
            self.peers = Peers(count, group, instance, keys=0)
        members, devices, first = self._scalars
        key = first + self.peers.keys
        self.peers = dataclasses.replace(self.peers, keys=self.peers.keys + 2)
        with self._graph.gradient_override_map({"CollectiveReduceV2": _GRADIENT}):
            return _all_reduce(tensor, members, devices, key)


def _all_reduce(tensor: tf.Tensor, count: tf.Tensor, group: tf.Tensor, instance: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=count,
        group_key=group,
        instance_key=instance,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
        # A timeout would start a thread that sleeps until it is over.
        timeout_seconds=0.0,
        name="sum_over_replicas",
    )


@tf.RegisterGradient(_GRADIENT)
def _differentiate(operation: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    """Returns the sum of all replicas' gradients, as each replica's part is in all replicas' results."""
    _, count, group, instance = operation.inputs
    return [_all_reduce(tf.convert_to_tensor(gradient), count, group, instance + 1), None, None, None]


@tf.RegisterGradient("CollectiveReduceV2")
def _refuse(operation: tf.Operation, *_: tf.Tensor) -> None:
    """Refuses gradients by the model's own tapes, for which TensorFlow has none, either."""
    raise CaptureError(
        "the model itself takes a gradient (by a tf.GradientTape, say) through a sum over replicas, as layers with "
        "synchronized=True make them, and that gradient's sums would have the keys of others; set synchronized=False"
    )
