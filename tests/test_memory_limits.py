"""Micro-batches that fit: counted by the slices of each device, and of all its stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from schedule_runs import vee

import dapple_tf as dapple
from dapple_tf.execution.memory_limits import residuals_held
from graph_passes.ir.program import Layout


def test_the_runtime_counts_each_devices_own_slices() -> None:
    """12 samples of 10 bytes: 9 on a device of 200 bytes, 3 on one of 100."""
    sizes = {"residual_bytes": 10, "fixed_residual_bytes": 0, "delayed_bytes": 0, "fixed_delayed_bytes": 0}
    program: Any = SimpleNamespace(stages=[SimpleNamespace(index=0, **sizes)])
    devices = [dapple.Device(f"/device:CPU:{index}", 0, memory) for index, memory in enumerate((200, 100))]
    cluster = dapple.Cluster(tuple(devices), real=False)
    for shares, held in (([[3, 1]], 2), ([[1, 1]], 1)):
        plan = dapple.Plan.data_parallel(2, 48, 4, shares=shares)
        layout = Layout([["a", "b"]], 48, 48, 4, shares=plan.shares)
        assert residuals_held(plan, cluster, program, layout, lambda device: 0) == (held,)


@pytest.mark.parametrize(("policy", "held"), [("v_min", 5), ("zb_v", 2)])
def test_the_runtime_counts_slices_of_any_of_a_devices_stages(policy: str, held: int) -> None:
    """Five slices fit beside the variables, each of at most 200 bytes: two micro-batches of both stages."""
    sizes = {"fixed_residual_bytes": 0, "delayed_bytes": 50, "fixed_delayed_bytes": 0}
    program: Any = SimpleNamespace(
        stages=[SimpleNamespace(index=stage, residual_bytes=size, **sizes) for stage, size in enumerate([200, 150] * 2)]
    )
    plan = dapple.Plan.manual([f"hidden_{stage}" for stage in range(3)], vee(2), 8, 8, policy)
    cluster = dapple.Cluster.local(2, memory_bytes=2000, kind="cpu")
    layout = Layout([["a"], ["b"], ["b"], ["a"]], 8, 8, 8)
    assert residuals_held(plan, cluster, program, layout, lambda device: 1000) == (held,) * 4
    assert residuals_held(plan, cluster, program, layout, lambda device: 1650) == (2 if policy == "v_min" else 1,) * 4
    with pytest.raises(dapple.DappleError, match=r"stages \[0, 3\] together need 2,050 bytes"):
        residuals_held(plan, cluster, program, layout, lambda device: 1700)
