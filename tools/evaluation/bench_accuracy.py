"""Benchmarks of predictions: simulated steps beside TensorFlow's executor, real training, and allocation records."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence

import keras

import dapple_tf as dapple
from dapple_tf.automatic import plan_model, slice_sizes
from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.measuring.emulator import MAX_DEVICES
from dapple_tf.planning.reductions import reduced_early
from dapple_tf.schedules.policy import Placement, Policy
from dapple_tf.schedules.schedules import POLICIES, policy_of
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench import Case, Numbers, Settings, Turn, each
from dapple_tf.tools.evaluation.bench_models import MODELS, BenchModel

Stack = contextlib.ExitStack


# ---- TensorFlow's executor

_FORWARD, _BACKWARD, _APPLY = 0.010, 0.020, 0.005
SAMPLES = 6
"""Samples of a micro-batch."""


def pipeline(
    stages: int, micro_batches: int, schedule: str | Policy, replicas: Sequence[int], network: float
) -> tuple[dapple.Plan, Profile, Cluster]:
    """Returns a pipeline of equal stages, each on its own server, or two where the policy goes there and back.

    Args:
        stages: S; even where the policy goes there and back.
        micro_batches: M.
        schedule: the policy.
        replicas: of each server's stages, repeated.
        network: time to send a whole micro-batch to the next stage, relative to F's; 0 for free links.
    """
    sent = Cost(0.0, 1.0)
    times = Cost(_FORWARD), Cost(_BACKWARD)
    layer = LayerProfile("layer", *times, output_bytes=sent, parameter_bytes=100, apply_seconds=_APPLY)
    layers = [dataclasses.replace(layer, name=f"layer{stage}") for stage in range(stages)]
    tensors = tuple(Tensor(stage, (stage + 1,), sent) for stage in range(stages - 1))
    profile = Profile("pipeline", "none", (1, SAMPLES), tuple(layers), tensors)
    vee = policy_of(schedule).planning.placements == (Placement.VEE,)
    servers = stages // 2 if vee else stages
    counts = itertools.islice(itertools.cycle(replicas), servers)
    server_of = [server for server, count in enumerate(counts) for _ in range(count)]
    devices = tuple(Device(f"device{index}", server) for index, server in enumerate(server_of))
    cluster = Cluster(devices, real=False)
    if network:
        bandwidth = SAMPLES / (network * _FORWARD)
        cluster = Cluster(devices, intra_bandwidth=1e4, inter_bandwidth=bandwidth, inter_latency=1e-4, real=False)
    groups = [[index for index, owner in enumerate(server_of) if owner == server] for server in range(servers)]
    groups += groups[::-1] if vee else []
    cuts = [layer.name for layer in layers[:-1]]
    return dapple.Plan.manual(cuts, groups, micro_batches, SAMPLES * micro_batches, schedule), profile, cluster


def simulator(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """Steps of pipelines of S stages and M micro-batches, simulated, and emulated with timed waits on logical devices.

    Other programs delay the waits: leave the machine alone meanwhile.
    """

    def turn(plan: dapple.Plan, profile: Profile, cluster: Cluster) -> Numbers:
        if settings["reduce_early"]:
            plan = reduced_early(plan, profile, cluster)
        scale, steps, catch_up = settings["scale"] or None, settings["steps"], settings["catch_up"]
        emulation = dapple.emulate(plan, profile, cluster, steps=steps, scale=scale, catch_up=catch_up)
        times = {"simulated_ms": emulation.simulated.latency, "emulated_ms": emulation.latency}
        times["late_ms"] = emulation.lateness
        return {**{name: 1e3 * seconds for name, seconds in times.items()}, "error": emulation.error}

    turns: dict[str, Turn] = {}
    axes = (each(settings, name) for name in ("shapes", "schedules", "replicas", "networks"))
    for shape, schedule, replicas, network in itertools.product(*axes):
        name = f"{shape}, {schedule}, {replicas} replicas, network {network}"
        (stages, count), counts = map(int, shape.split("x")), [*map(int, replicas.split(":"))]
        try:
            described = pipeline(stages, count, schedule, counts, float(network))
        except dapple.PlanError as error:  # Some policies need more stages than others.
            command.say(f"{name}: {error}")
            continue
        if (devices := described[2].num_devices) > MAX_DEVICES:
            command.say(f"{name}: {devices} devices, more than {MAX_DEVICES}")
            continue
        turns[name] = functools.partial(turn, *described)
    return turns


# ---- real training


def prediction(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """Steps of plans beside their simulation by a profile and links that are measured before.

    The ratio of predicted_of_measured to the first variant's, which has one device, is free of the machine's drift.
    Devices are local, or those of ``workers``, such as the hosts of `tools.hosts` behind slow links.
    """
    described, devices, batch = MODELS[settings["model"]], settings["devices"], settings["batch"]
    addresses = each(settings, "workers")
    cluster = dapple.Cluster.of_servers(addresses) if addresses else dapple.Cluster.local(devices, kind="cpu")
    profiled = dapple.profile(described.make(), slice_sizes(batch, devices), cluster=cluster, cache=False)
    planned = plan_model(described.make(), cluster, batch, profiled=profiled)
    profile, cluster = planned.profile, planned.cluster
    plans = {
        "one device": dapple.Plan.data_parallel(1, batch),
        "the planner's": planned.plan,
        "one device, M = 4": dapple.Plan.data_parallel(1, batch, 4),
        "data parallel": dapple.Plan.data_parallel(devices, batch, 2),
    }
    for schedule in each(settings, "schedules"):
        plans[schedule] = described.pipeline(devices, 4, batch, schedule)
    for recompute in ("boundary", "min_cut"):
        plans[f"dapple_a, {recompute}"] = described.pipeline(devices, 4, batch, "dapple_a", recompute=recompute)

    def way(plan: dapple.Plan) -> Turn:
        pipelined = stack.enter_context(contextlib.closing(dapple.transform(described.make(), cluster, plan)))
        predicted, (x, y) = dapple.simulate(plan, profile, cluster).latency, described.batch(batch)

        def turn() -> Numbers:
            for _ in range(3):  # The first ones get their data back into the caches.
                pipelined.train_on_batch(x, y)
            measured = pipelined.last_step_seconds
            numbers = {"step_ms": 1e3 * measured, "predicted_ms": 1e3 * predicted}
            return numbers | {"predicted_of_measured": predicted / measured}

        return turn

    return {name: way(plan) for name, plan in plans.items()}


# ---- allocation records


def plans_of(described: BenchModel, settings: Settings) -> dict[str, dapple.Plan]:
    """Returns pipelines by schedule and number of micro-batches of a fixed size, and plans with further options."""
    devices, samples = settings["devices"], settings["samples"]
    plans = {}
    for count, name in itertools.product(map(int, each(settings, "micro_batches")), each(settings, "schedules")):
        schedule, _, mode = name.partition("+")
        plan = described.pipeline(devices, count, count * samples, schedule, recompute=mode or "none")
        plans[f"{name}, M = {count}"] = plan
    manual = functools.partial(dapple.Plan.manual, schedule="dapple_a")
    replicas = functools.partial(manual, described.cuts(2), [[0, 1], [2]], 4, 4 * samples)
    chunks = functools.partial(manual, described.cuts(4), [[0, 1]] * 4, 1, 2 * samples)
    return plans | {
        "shares": replicas(shares=((3, 1), (1,))),
        "pieces": replicas(backward_cuts=described.cuts(4)[:1]),
        "conventional": chunks(wait_free=False),
        "wait_free": chunks(),
        "reverse_first_2": chunks(reverse_first_k=2),
        "carried_updates": chunks(reverse_first_k=2, carried_updates=2),
    }


def memory(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """The fullest device's peak, measured and simulated, and the largest error of a device.

    A measured peak is that of the allocation records of a traced step, on top of what stays between steps: variables,
    the optimizer's slots and gradient accumulators. It is the median of several steps.
    """
    described, samples = MODELS[settings["model"]], settings["samples"]
    cluster = dapple.Cluster.local(max(3, settings["devices"]), kind="cpu")
    profile = dapple.profile(
        described.make(), sorted({max(1, samples // 2), samples}), cluster=cluster, cache=False, repeats=2
    )

    def turn(plan: dapple.Plan) -> Numbers:
        x, y = described.batch(plan.global_batch_size)
        pipelined = dapple.transform(described.make(), cluster, plan)
        for _ in range(3):  # Slots and accumulators exist after the first step.
            pipelined.train_on_batch(x, y)
        steps = [pipelined.profile_step(x, y, warm_up=0, train=True).peak_bytes for _ in range(settings["steps"])]
        pipelined.close()
        keras.backend.clear_session(free_memory=True)
        simulated = dapple.simulate(plan, profile, cluster).peak_bytes
        used = {device for group in plan.devices for device in group}
        measured = {device: statistics.median(step[device] for step in steps) for device in used}
        error = max((simulated[device] / measured[device] - 1 for device in used), key=abs)
        peaks = {"peak_mb": max(measured.values()) / 1e6, "simulated_mb": max(simulated.values()) / 1e6}
        return {**peaks, "error": error}

    return {name: functools.partial(turn, plan) for name, plan in plans_of(described, settings).items()}


CASES = {
    "simulator": Case(
        "the simulator beside TensorFlow's executor",
        simulator,
        {"shapes": "2x8,4x16,8x16,16x32", "schedules": ",".join(POLICIES), "replicas": "1,2:1,2"}
        | {"networks": "0,0.1,0.5", "reduce_early": False, "catch_up": True, "scale": 0.0, "steps": 3},
        rounds=1,
        limits={"error": 0.05},
    ),
    "prediction": Case(
        "simulated steps beside real ones",
        prediction,
        {"model": "gpt:small", "devices": 2, "workers": "", "batch": 32, "schedules": ",".join(POLICIES)},
        rounds=15,
    ),
    "memory": Case(
        "peak memory by schedule, micro-batches and options of plans",
        memory,
        {"model": "gpt", "devices": 2, "samples": 4, "micro_batches": "4,16", "steps": 3}
        | {"schedules": "dapple_a+boundary," + ",".join(POLICIES)},
        rounds=1,
        limits={"error": 0.1},
    ),
}
