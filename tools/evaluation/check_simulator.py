"""Compares the simulator with TensorFlow's executor: step times of schedules, emulated with timed waits.

    python -m tools.evaluation.check_simulator                       # the whole sweep, some minutes
    python -m tools.evaluation.check_simulator --shapes=4x16 --replicas=3:2 --schedules=dapple_a --networks=0.5

Each row is a pipeline of S stages and M micro-batches, simulated and emulated on logical CPU devices of this machine.
Leave the machine alone meanwhile: other programs delay the waits. A row that fails is measured again, at most
``--attempts`` times in all. Exits with 1 if a row's error is above ``--tolerance`` each time.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
from collections.abc import Sequence

from absl import app, flags

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.measuring.emulated_waits import EmulationError
from dapple_tf.measuring.emulator import MAX_DEVICES, Emulation, emulate
from dapple_tf.planning.early_reductions import reduced_early
from dapple_tf.schedules.policy import Placement, Policy
from dapple_tf.schedules.schedules import POLICIES, policy_of
from dapple_tf.tools import command

FLAGS = flags.FlagValues()

_SHAPES = flags.DEFINE_list(
    "shapes", ["2x8", "4x16", "8x16", "16x32"], "Pipelines, as stages x micro-batches.", flag_values=FLAGS
)
_SCHEDULES = flags.DEFINE_list("schedules", list(POLICIES), "Schedules to emulate.", flag_values=FLAGS)
_REPLICAS = flags.DEFINE_list(
    "replicas",
    ["1", "2:1", "2"],
    "Replicas of the stages, such as 2:1, repeated over the stages. A stage is a server.",
    flag_values=FLAGS,
)
_NETWORKS = flags.DEFINE_list(
    "networks",
    ["0", "0.1", "0.5"],
    "Time of a transfer between two stages, relative to a forward's; 0 for free links. Uneven replicas share it.",
    flag_values=FLAGS,
)
_REDUCE_EARLY = flags.DEFINE_boolean(
    "reduce_early", False, "All-reduce during last backwards, in pieces, as far as that gains.", flag_values=FLAGS
)
_CATCH_UP = flags.DEFINE_boolean(
    "catch_up", True, "Shorten waits that the executor starts up to 1 ms late by that.", flag_values=FLAGS
)
_SCALE = flags.DEFINE_float(
    "scale", None, "Seconds that are waited for a simulated one; none for as few as is exact.", 1e-3, flag_values=FLAGS
)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps per row; the median counts.", lower_bound=1, flag_values=FLAGS)
_TOLERANCE = flags.DEFINE_float("tolerance", 0.05, "Largest error that passes.", lower_bound=0.0, flag_values=FLAGS)
_ATTEMPTS = flags.DEFINE_integer(
    "attempts", 2, "Maximum measurements of a row that fails.", lower_bound=1, flag_values=FLAGS
)

_ROW = "{:>3} {:>3}  {:<9} {:<8} {:>7}  {:>12} {:>11} {:>7}  {}"

_FORWARD, _BACKWARD, _APPLY = 0.010, 0.020, 0.005
SAMPLES = 6
"""Samples of a micro-batch."""


def pipeline(
    stages: int, micro_batches: int, schedule: str | Policy, replicas: Sequence[int], network: float
) -> tuple[Plan, Profile, Cluster]:
    """Returns a pipeline of equal stages, each on its own server, or two where the policy goes there and back.

    Args:
        stages: S; even where the policy goes there and back.
        micro_batches: M.
        schedule: the policy.
        replicas: of each server's stages, repeated.
        network: time to send a whole micro-batch to the next stage, relative to F's; 0 for free links.
    """
    layers = [
        LayerProfile(
            f"layer{stage}",
            Cost(_FORWARD),
            Cost(_BACKWARD),
            output_bytes=Cost(0.0, 1.0),
            parameter_bytes=100,
            apply_seconds=_APPLY,
        )
        for stage in range(stages)
    ]
    tensors = tuple(Tensor(stage, (stage + 1,), Cost(0.0, 1.0)) for stage in range(stages - 1))
    profile = Profile("pipeline", "none", (1, SAMPLES), tuple(layers), tensors)
    vee = policy_of(schedule).planning.placements == (Placement.VEE,)
    servers = stages // 2 if vee else stages
    counts = list(itertools.islice(itertools.cycle(replicas), servers))
    server_of = [server for server, count in enumerate(counts) for _ in range(count)]
    devices = tuple(Device(f"device{index}", server) for index, server in enumerate(server_of))
    cluster = Cluster(devices, real=False)
    if network:
        bandwidth = SAMPLES / (network * _FORWARD)
        cluster = Cluster(devices, intra_bandwidth=1e4, inter_bandwidth=bandwidth, inter_latency=1e-4, real=False)
    groups = [[index for index, owner in enumerate(server_of) if owner == server] for server in range(servers)]
    groups += groups[::-1] if vee else []
    cuts = [layer.name for layer in layers[:-1]]
    return Plan.manual(cuts, groups, micro_batches, SAMPLES * micro_batches, schedule), profile, cluster


def _measure(plan: Plan, profile: Profile, cluster: Cluster) -> Emulation:
    best: Emulation | None = None
    for _ in range(_ATTEMPTS.value):
        if _REDUCE_EARLY.value:
            plan = reduced_early(plan, profile, cluster)
        emulation = emulate(plan, profile, cluster, steps=_STEPS.value, scale=_SCALE.value, catch_up=_CATCH_UP.value)
        if best is None or abs(emulation.error) < abs(best.error):
            best = emulation
        if abs(best.error) <= _TOLERANCE.value:
            break
    assert best is not None
    return best


def _shapes() -> list[tuple[int, int]]:
    shapes = []
    for shape in _SHAPES.value:
        match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", shape)
        if match is None:
            raise app.UsageError(f"--shapes: {shape!r} isn't a pipeline; write stages x micro-batches, such as 4x16")
        shapes.append((int(match[1]), int(match[2])))
    return shapes


def main() -> None:
    """Prints the table."""
    try:
        patterns = [[int(count) for count in pattern.split(":")] for pattern in _REPLICAS.value]
        networks = [float(network) for network in _NETWORKS.value]
    except ValueError as error:
        raise app.UsageError(
            f"--replicas={','.join(_REPLICAS.value)} or --networks={','.join(_NETWORKS.value)}: {error}"
        ) from error
    for pattern in patterns:
        if not all(1 <= count <= SAMPLES for count in pattern):
            raise app.UsageError(f"--replicas: {pattern}; a micro-batch has {SAMPLES} samples, give 1 to {SAMPLES}")
    if not all(math.isfinite(network) and network >= 0 for network in networks):
        raise app.UsageError(f"--networks: {networks}; give numbers of at least 0")
    command.check_choices(_SCHEDULES, POLICIES)
    began = time.monotonic()
    print(_ROW.format("S", "M", "schedule", "replicas", "network", "simulated ms", "emulated ms", "error", "late ms"))
    worst, failed, rows = 0.0, 0, 0
    for (stages, count), policy, pattern, network in itertools.product(_shapes(), _SCHEDULES.value, patterns, networks):
        name = ":".join(map(str, pattern))
        cells = (stages, count, policy, name, f"{network:.0%}")
        try:
            plan, profile, cluster = pipeline(stages, count, policy, pattern, network)
        except PlanError as error:  # Some policies need more stages than others.
            print(_ROW.format(*cells, "-", "-", "-", error), flush=True)
            continue
        if cluster.num_devices > MAX_DEVICES:
            print(_ROW.format(*cells, "-", "-", "-", f"{cluster.num_devices} devices, more than {MAX_DEVICES}"))
            continue
        try:
            emulation = _measure(plan, profile, cluster)
        except EmulationError as error:
            print(_ROW.format(*cells, "-", "-", "-", error), flush=True)
            failed += 1
            continue
        rows += 1
        worst = max(worst, abs(emulation.error))
        failed += abs(emulation.error) > _TOLERANCE.value
        times = (
            f"{emulation.simulated.latency * 1e3:.1f}",
            f"{emulation.latency * 1e3:.1f}",
            f"{emulation.error:+.2%}",
        )
        print(_ROW.format(*cells, *times, f"{emulation.lateness * 1e3:.2f}"), flush=True)
    seconds = time.monotonic() - began
    if not rows and not failed:
        raise app.UsageError("nothing was checked: no row is left that fits the devices; see --help")
    print(f"{rows} rows in {seconds:.0f} s: largest error {worst:.2%}, {failed} above {_TOLERANCE.value:.0%} or failed")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
