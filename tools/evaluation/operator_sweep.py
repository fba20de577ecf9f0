"""Where FD-DPS begins to be faster than data parallelism: four towers of dense layers, simulated on P100s.

More samples make the towers' work longer and what they read larger, while the bytes of gradients stay the same.
"""

from __future__ import annotations

from typing import NamedTuple

import dapple_tf as dapple
from dapple_tf.operators.baselines import data_parallel, single_device
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import Topology
from dapple_tf.tools.evaluation.operator_experiments import SEARCHES, cluster_of
from dapple_tf.tools.evaluation.operator_models import flatten_step
from dapple_tf.tools.evaluation.tower_models import model_of

MODEL = "wide_towers"
SAMPLES = (16, 64, 256, 1024, 4096, 16384)
"""Batches."""
DEVICES = (2, 4)


class Towers(NamedTuple):
    """Simulated steps of the towers, in seconds.

    Attributes:
        samples: the batch.
        devices: number of devices.
        gradient_bytes: bytes of all gradients.
        single: on one device.
        copies: data parallelism with copies of variables.
        graph: data parallelism's graph, with one copy.
        shared: data parallelism with copies, if its devices shared the updates out.
        fd_dps: placed by FD-DPS.
    """

    samples: int
    devices: int
    gradient_bytes: float
    single: float
    copies: float
    graph: float
    shared: float
    fd_dps: float

    @property
    def best(self) -> float:
        """The step of the fastest data parallelism that is simulated."""
        return min(self.copies, self.graph)


def sweep() -> list[Towers]:
    """Returns the steps for all of `SAMPLES` on all of `DEVICES`."""
    return [step for samples in SAMPLES for step in towers(samples)]


def towers(samples: int) -> list[Towers]:
    """Returns the steps of a batch on all of `DEVICES`."""
    model, _, _ = model_of(MODEL)
    step = flatten_step(model, samples, dapple.Plan.manual([], [[0]], 1, samples), cluster_of(1))
    rows = []
    for devices in DEVICES:
        topology = Topology.of(cluster_of(devices))
        graph = build_op_graph(step.graph, topology, OperatorCosts.p100(), step.shapes)
        copies = data_parallel(graph, topology)
        rows.append(
            Towers(
                samples,
                devices,
                gradient_bytes=copies.gradient_bytes,
                single=single_device(graph, topology).seconds,
                copies=copies.seconds,
                graph=SEARCHES["split_by_batch"](graph, topology).seconds,
                shared=copies.seconds - copies.update_seconds * (1 - 1 / devices),
                fd_dps=fd_dps(graph, topology).seconds,
            )
        )
    return rows
