"""However gradients are all-reduced: training gives what plain Keras gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from equivalence import assert_same_training, device_lists, pair, use_float64
from zoo import ZOO

import dapple_tf as dapple

CASES: dict[str, tuple[str, list[int], list[int], dict[str, Any]]] = {
    "data parallel": ("branches", [4], [2, 2], {"all_reduce": "hierarchical"}),
    "unequal servers": ("branches", [5], [3, 2], {"all_reduce": "hierarchical", "bucket_bytes": 64}),
    "in pieces": ("branches", [4], [2, 2], {"all_reduce": "hierarchical", "pieces": True}),
    "in pieces on unequal servers": (
        *("branches", [3], [2, 1]),
        {"all_reduce": "hierarchical", "bucket_bytes": 64, "pieces": True},
    ),
    "one stage of two": ("branches", [3, 3], [2, 2, 2], {"all_reduce": ["flat", "hierarchical"]}),
    "tied weights": ("tied", [2, 2], [1, 3], {"all_reduce": "hierarchical"}),
    "split backwards": ("branches", [4, 1], [2, 3], {"all_reduce": "hierarchical", "schedule": "zb_h1"}),
    "carried": ("branches", [4], [2, 2], {"all_reduce": "hierarchical", "carried_updates": 1}),
    "carried in the order of layers": (
        *("branches", [2, 2], [2, 2]),
        {"all_reduce": "hierarchical", "carried_updates": 2, "reduction_order": "first_layers"},
    ),
}
KEPT = ("in pieces on unequal servers",)
"""Both stages and pieces, whole vectors and parts of them, and updates at the head of a step."""


def cluster_of(servers: list[int]) -> dapple.Cluster:
    """Local devices, as if they were in servers of this many."""
    numbers = [server for server, count in enumerate(servers) for _ in range(count)]
    local = dapple.Cluster.local(len(numbers), kind="cpu")
    devices = (
        dataclasses.replace(device, server=server) for device, server in zip(local.devices, numbers, strict=True)
    )
    return dataclasses.replace(local, devices=tuple(devices))


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_training_is_the_same(name: str) -> None:
    use_float64()
    model_name, replicas, servers, options = CASES[name]
    specimen = ZOO[model_name]
    model, plain = pair(specimen.build)
    options = dict(options)
    cuts = specimen.cuts_for(len(replicas))
    if options.pop("pieces", False):
        options["backward_cuts"] = specimen.cuts[:1]
    plan = dapple.Plan.manual(cuts, device_lists(replicas), 2, 24, **options)
    pipelined = dapple.transform(model, cluster_of(servers), plan)
    rng = np.random.default_rng(0)
    # Updates that are carried over meet a batch of another size.
    sizes = (24, 24, 11) if plan.carried_updates else (24, 24)
    assert_same_training(pipelined, plain, [specimen.batch(rng, size) for size in sizes])
