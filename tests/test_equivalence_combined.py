"""Relays, unlike slices, all-reduces by server and orders of tasks together: training gives what plain Keras gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from equivalence import TOLERANCE, assert_same_training, device_lists, pair, use_float64
from skip_models import skip_batch, skips
from test_equivalence_reductions import cluster_of
from zoo import ZOO

import dapple_tf as dapple

BY_SERVER = {"all_reduce": "hierarchical"}
CASES: dict[str, tuple[str, list[int], list[int], dict[str, Any]]] = {
    "relays in pieces": (
        *("skips", [2, 3], [2, 3]),
        {**BY_SERVER, "relays": [0, 1], "backward_cuts": ["positions", "block_2"], "bucket_bytes": 100},
    ),
    "unlike slices, 2 to 3": (
        *("skips", [2, 3, 1], [3, 3]),
        {**BY_SERVER, "relays": [1, 2], "shares": [[2, 1], [3, 1, 2], [1]]},
    ),
    "split backwards": (
        *("skips", [1, 3, 2], [2, 2, 2]),
        {"schedule": "zb_h1", "relays": [1], "shares": [[1], [1, 2, 2], [3, 1]]},
    ),
    "carried": (
        *("skips", [3, 3], [2, 2, 2]),
        {
            **{**BY_SERVER, "relays": [0, 1], "shares": [[1, 2, 1], [2, 1, 1]]},
            **{"carried_updates": 2, "reduction_order": "first_layers"},
        },
    ),
    "stages there and back": (
        *("skips", [[0, 3], [1, 2], [0, 3], [1, 2]], [2, 2]),
        {
            **{"schedule": "interleaved", "relays": [0, 1, 2], "shares": [[2, 1], [1, 1], [1, 3], [1, 2]]},
            "all_reduce": ["hierarchical", "flat", "hierarchical", "flat"],
        },
    ),
    "tied weights": (
        *("tied", [3, 2], [2, 3]),
        {**BY_SERVER, "schedule": "zb_h1", "shares": [[2, 1, 1], [1, 3]], "relays": [0, 1], "bucket_bytes": 64},
    ),
    "recomputed": (
        *("branches", [2, 3, 1], [3, 3]),
        {**BY_SERVER, "recompute": "boundary", "shares": [[1, 2], [1, 1, 2], [1]], "relays": [1]},
    ),
}
KEPT = ("split backwards",)


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_training_is_the_same(name: str) -> None:
    use_float64()
    model_name, replicas, servers, options = CASES[name]
    own = model_name == "skips"
    build = skips if own else ZOO[model_name].build
    devices = device_lists(replicas) if isinstance(replicas[0], int) else replicas
    cuts = [f"block_{stage}" for stage in range(len(devices) - 1)] if own else ZOO[model_name].cuts_for(len(devices))
    plan = dapple.Plan.manual(cuts, devices, 2, 24, **options)
    model, plain = pair(build)
    pipelined = dapple.transform(model, cluster_of(servers), plan)
    rng = np.random.default_rng(0)
    batches = [(*skip_batch(rng, n), None) if own else ZOO[model_name].batch(rng, n) for n in (24, 24, 3)]
    assert_same_training(pipelined, plain, batches)
    x, y, weights = batches[2]
    own_logs, logs = (
        keras_model.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0, return_dict=True)
        for keras_model in (pipelined, plain)
    )
    assert own_logs["loss"] == pytest.approx(logs["loss"], rel=2e-5)
    np.testing.assert_allclose(
        pipelined.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=0, atol=TOLERANCE["float64"]
    )
