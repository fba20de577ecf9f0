"""What ranges of layers take on groups of devices: F, B and what there is once in a step."""

from __future__ import annotations

import keras
from test_combined_training import SLOW

import dapple_tf as dapple
from dapple_tf.describe.group_costs import PlacedRange
from dapple_tf.measuring.group_profiler import GroupProfiler
from dapple_tf.tools.evaluation.combined import estimated_profile

_WIDTH, _INSIDE = 256, 1e6


def ranges() -> dict[tuple[int, int], PlacedRange]:
    """Returns (samples, devices) -> what a dense layer takes, half of whose kernel is sent in a sample's time."""
    x = inputs = keras.Input((16,))
    x = keras.layers.Dense(_WIDTH, activation="tanh", name="wide")(x)
    model = keras.Model(inputs, keras.layers.Dense(16, name="narrow")(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    cluster = dapple.Cluster.from_json(
        f'{{"format": "dapple_tf.cluster/1", "servers": [{{"devices": 2}}], "intra_bandwidth": {_INSIDE}, '
        f'"intra_latency": 1e-6, "inter_bandwidth": 1e6, "inter_latency": 1e-3}}'
    )
    costs = dapple.OperatorCosts({"GPU": SLOW, "CPU": SLOW})
    profile = estimated_profile(model, (1, 4), cluster.device_names[0], costs)
    groups = GroupProfiler(model, profile, cluster, costs, (1, 4)).pieces().groups
    assert groups is not None
    return {(entry.samples, entry.devices): entry for entry in groups.ranges}


def test_parts_of_variables_are_sent_once_in_a_step() -> None:
    """F of each micro-batch counted the sending of its kernels' parts, which `SplitOperators` makes once for all."""
    entries = ranges()
    alone, placed = entries[4, 1], entries[4, 2]
    sending = 4 * 16 * _WIDTH / 2 / _INSIDE  # seconds of half a float32 kernel
    assert placed.forward < 0.6 * alone.forward < alone.forward / 2 + sending / 2
    assert placed.sent > sending / 2 and alone.sent == 0
    assert sum(placed.copies) >= 4 * 16 * _WIDTH / 2 and sum(alone.copies) == 0
    # In a step of one slice, where nothing is repeated, it counts as ever.
    assert placed.whole < alone.whole
