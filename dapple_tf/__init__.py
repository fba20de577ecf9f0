"""Pipelined data-parallel training for TensorFlow 2 and Keras 3, by rewriting the training graph.

Names are imported on first use: planning and simulating never load TensorFlow.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from dapple_tf.version import VERSION

if TYPE_CHECKING:  # Names that are given anew are public for type checkers.
    from dapple_tf.checkpoints.checkpoint import latest_checkpoint as latest_checkpoint
    from dapple_tf.checkpoints.checkpoint import load_checkpoint as load_checkpoint
    from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError as CheckpointError
    from dapple_tf.checkpoints.checkpointing import Checkpointing as Checkpointing
    from dapple_tf.describe.cluster import Cluster as Cluster
    from dapple_tf.describe.cluster import ClusterError as ClusterError
    from dapple_tf.describe.cluster import Device as Device
    from dapple_tf.describe.faults import FaultPolicy as FaultPolicy
    from dapple_tf.describe.layer_profile import ProfileError as ProfileError
    from dapple_tf.describe.plan import Plan as Plan
    from dapple_tf.describe.plan import PlanError as PlanError
    from dapple_tf.describe.profile import Profile as Profile
    from dapple_tf.errors import CaptureError as CaptureError
    from dapple_tf.errors import DappleError as DappleError
    from dapple_tf.errors import DataError as DataError
    from dapple_tf.errors import NonFiniteLossError as NonFiniteLossError
    from dapple_tf.errors import StepError as StepError
    from dapple_tf.errors import VerificationError as VerificationError
    from dapple_tf.errors import WorkerLostError as WorkerLostError
    from dapple_tf.front.verification import Verification as Verification
    from dapple_tf.frontend.initialization import deferred_init as deferred_init
    from dapple_tf.frontend.on_workers import OnWorkers as OnWorkers
    from dapple_tf.frontend.on_workers import on_workers as on_workers
    from dapple_tf.measuring.device_speeds import measure_speeds as measure_speeds
    from dapple_tf.measuring.emulated_waits import EmulationError as EmulationError
    from dapple_tf.measuring.emulator import Emulation as Emulation
    from dapple_tf.measuring.emulator import emulate as emulate
    from dapple_tf.measuring.links import measure_links as measure_links
    from dapple_tf.measuring.measured_steps import tune_reverse_first_k as tune_reverse_first_k
    from dapple_tf.measuring.operator_profiler import profile_operators as profile_operators
    from dapple_tf.measuring.profiler import profile as profile
    from dapple_tf.operators.op_costs import OperatorCosts as OperatorCosts
    from dapple_tf.planning.planner import plan as plan
    from dapple_tf.planning.reductions import fastest_reductions as fastest_reductions
    from dapple_tf.planning.reductions import reduced_early as reduced_early
    from dapple_tf.planning.shares import with_shares as with_shares
    from dapple_tf.planning.stage_cuts import chunked as chunked
    from dapple_tf.schedules.policy import Policy as Policy
    from dapple_tf.simulation.simulator import Simulation as Simulation
    from dapple_tf.simulation.simulator import simulate as simulate
    from dapple_tf.tracing.monitoring import PipelineMonitor as PipelineMonitor
    from dapple_tf.tracing.prediction import Prediction as Prediction
    from dapple_tf.tracing.step_profile import StepProfile as StepProfile
    from dapple_tf.trainer import PipelinedModel as PipelinedModel
    from dapple_tf.transformation import transform as transform
    from graph_passes.errors import PassError as PassError
    from graph_passes.pass_manager import After as After
    from graph_passes.pass_manager import Before as Before

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

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name from its module on first use, and keeps it here."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _IMPORTING:
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
