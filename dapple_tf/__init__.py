"""Pipelined data-parallel training for TensorFlow 2 and Keras 3, by rewriting the training graph."""

from dapple_tf.checkpoints.checkpoint import latest_checkpoint, load_checkpoint
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.checkpoints.checkpointing import Checkpointing
from dapple_tf.describe.cluster import Cluster, ClusterError, Device
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, ProfileError
from dapple_tf.errors import (
    CaptureError,
    DappleError,
    DataError,
    NonFiniteLossError,
    StepError,
    VerificationError,
    WorkerLostError,
)
from dapple_tf.frontend.initialization import deferred_init
from dapple_tf.measuring.emulated_waits import EmulationError
from dapple_tf.measuring.emulator import Emulation, emulate
from dapple_tf.measuring.links import measure_links
from dapple_tf.measuring.measured_steps import tune_reverse_first_k
from dapple_tf.measuring.operator_profiler import profile_operators
from dapple_tf.measuring.profiler import profile
from dapple_tf.measuring.stream_speedups import StreamProfile, measure_speedups, plan_streams
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.planning.chunks import chunked
from dapple_tf.planning.planner import plan
from dapple_tf.simulation.simulator import Simulation, simulate
from dapple_tf.tracing.monitoring import PipelineMonitor
from dapple_tf.tracing.prediction import Prediction
from dapple_tf.tracing.step_profile import StepProfile
from dapple_tf.trainer import PipelinedModel
from dapple_tf.transformation import transform
from dapple_tf.verification import Verification
from graph_passes.ir.graph import PassError
from graph_passes.pass_manager import After, Before

__version__ = "0.1.0"

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
    "OperatorCosts",
    "PassError",
    "PipelineMonitor",
    "PipelinedModel",
    "Plan",
    "PlanError",
    "Prediction",
    "Profile",
    "ProfileError",
    "Simulation",
    "StepError",
    "StepProfile",
    "StreamProfile",
    "Verification",
    "VerificationError",
    "WorkerLostError",
    "chunked",
    "deferred_init",
    "emulate",
    "latest_checkpoint",
    "load_checkpoint",
    "measure_links",
    "measure_speedups",
    "plan",
    "plan_streams",
    "profile",
    "profile_operators",
    "simulate",
    "transform",
    "tune_reverse_first_k",
]
