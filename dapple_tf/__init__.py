"""Pipelined data-parallel training for TensorFlow 2 and Keras 3, by rewriting the training graph.

Names are imported on first use: planning and simulating never load TensorFlow.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from dapple_tf.version import VERSION

if TYPE_CHECKING:
    from dapple_tf.checkpoints.checkpoint import latest_checkpoint, load_checkpoint
    from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
    from dapple_tf.checkpoints.checkpointing import Checkpointing
    from dapple_tf.describe.cluster import Cluster, ClusterError, Device
    from dapple_tf.describe.faults import FaultPolicy
    from dapple_tf.describe.layer_profile import ProfileError
    from dapple_tf.describe.plan import Plan, PlanError
    from dapple_tf.describe.profile import Profile
    from dapple_tf.errors import (
        CaptureError,
        DappleError,
        DataError,
        NonFiniteLossError,
        StepError,
        VerificationError,
        WorkerLostError,
    )
    from dapple_tf.front.verification import Verification
    from dapple_tf.frontend.initialization import deferred_init
    from dapple_tf.frontend.on_workers import OnWorkers, on_workers
    from dapple_tf.measuring.device_speeds import measure_speeds
    from dapple_tf.measuring.emulated_waits import EmulationError
    from dapple_tf.measuring.emulator import Emulation, emulate
    from dapple_tf.measuring.links import measure_links
    from dapple_tf.measuring.measured_steps import tune_reverse_first_k
    from dapple_tf.measuring.operator_profiler import profile_operators
    from dapple_tf.measuring.profiler import profile
    from dapple_tf.operators.op_costs import OperatorCosts
    from dapple_tf.planning.planner import plan
    from dapple_tf.planning.reductions import fastest_reductions, reduced_early
    from dapple_tf.planning.shares import with_shares
    from dapple_tf.planning.stage_cuts import chunked
    from dapple_tf.schedules.policy import Policy
    from dapple_tf.simulation.simulator import Simulation, simulate
    from dapple_tf.tracing.monitoring import PipelineMonitor
    from dapple_tf.tracing.prediction import Prediction
    from dapple_tf.tracing.step_profile import StepProfile
    from dapple_tf.trainer import PipelinedModel
    from dapple_tf.transformation import transform
    from graph_passes.errors import PassError
    from graph_passes.pass_manager import After, Before

__version__ = VERSION

_MODULES = {
    name: module
    for module, names in {
        "dapple_tf.checkpoints.checkpoint": "latest_checkpoint load_checkpoint",
        "dapple_tf.checkpoints.checkpoint_manifest": "CheckpointError",
        "dapple_tf.checkpoints.checkpointing": "Checkpointing",
        "dapple_tf.describe.cluster": "Cluster ClusterError Device",
        "dapple_tf.describe.faults": "FaultPolicy",
        "dapple_tf.describe.plan": "Plan PlanError",
        "dapple_tf.describe.layer_profile": "ProfileError",
        "dapple_tf.describe.profile": "Profile",
        "dapple_tf.errors": "CaptureError DappleError DataError NonFiniteLossError StepError "
        "VerificationError WorkerLostError",
        "dapple_tf.frontend.initialization": "deferred_init",
        "dapple_tf.frontend.on_workers": "OnWorkers on_workers",
        "dapple_tf.measuring.device_speeds": "measure_speeds",
        "dapple_tf.measuring.emulated_waits": "EmulationError",
        "dapple_tf.measuring.emulator": "Emulation emulate",
        "dapple_tf.measuring.links": "measure_links",
        "dapple_tf.measuring.measured_steps": "tune_reverse_first_k",
        "dapple_tf.measuring.operator_profiler": "profile_operators",
        "dapple_tf.measuring.profiler": "profile",
        "dapple_tf.operators.op_costs": "OperatorCosts",
        "dapple_tf.planning.planner": "plan",
        "dapple_tf.planning.reductions": "fastest_reductions reduced_early",
        "dapple_tf.planning.shares": "with_shares",
        "dapple_tf.planning.stage_cuts": "chunked",
        "dapple_tf.schedules.policy": "Policy",
        "dapple_tf.simulation.simulator": "Simulation simulate",
        "dapple_tf.tracing.monitoring": "PipelineMonitor",
        "dapple_tf.tracing.prediction": "Prediction",
        "dapple_tf.tracing.step_profile": "StepProfile",
        "dapple_tf.trainer": "PipelinedModel",
        "dapple_tf.transformation": "transform",
        "dapple_tf.front.verification": "Verification",
        "graph_passes.errors": "PassError",
        "graph_passes.pass_manager": "After Before",
    }.items()
    for name in names.split()
}
"""Public name -> the module that defines it."""

_IMPORTING = threading.RLock()
"""Held while something is imported: TensorFlow can't be imported by several threads at once, each from another end."""

__all__ = [
    "After",
    "Before",
    "CaptureError",
    "CheckpointError",
    "Checkpointing",
    "Cluster",
    "ClusterError",
    "DappleError",
    "DataError",
    "Device",
    "Emulation",
    "EmulationError",
    "FaultPolicy",
    "NonFiniteLossError",
    "OnWorkers",
    "OperatorCosts",
    "PassError",
    "PipelineMonitor",
    "PipelinedModel",
    "Plan",
    "PlanError",
    "Policy",
    "Prediction",
    "Profile",
    "ProfileError",
    "Simulation",
    "StepError",
    "StepProfile",
    "Verification",
    "VerificationError",
    "WorkerLostError",
    "chunked",
    "deferred_init",
    "emulate",
    "fastest_reductions",
    "latest_checkpoint",
    "load_checkpoint",
    "measure_links",
    "measure_speeds",
    "on_workers",
    "plan",
    "profile",
    "profile_operators",
    "reduced_early",
    "simulate",
    "transform",
    "tune_reverse_first_k",
    "with_shares",
]


def __getattr__(name: str) -> Any:
    """Imports a public name from its module on first use, and keeps it here."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _IMPORTING:
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
