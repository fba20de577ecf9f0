"""Out-Of-Order BackProp's experiments with pipelines (EuroSys'22, sections 5.2 and 8.4), simulated.

Figures 5, 6, 11, 12 and 13. What the paper calls OOO-Pipe1 is the policy ``fast_forward`` on GPipe's stages; OOO-Pipe2
is ``modulo``, with each group of blocks on the device of its number modulo the number of devices. Each system has
recomputation where memory is short, and its best way to share out the blocks, of those that its kind of pipeline has:
one stage on each device takes as many blocks or as much time (`straight`), Megatron's several stages on each take as
much time (`interleaved`), and modulo allocation leaves open where the head goes (`modulo`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.features import FEATURES
from dapple_tf.planning.planner import plan as best_plan
from dapple_tf.planning.stage_cuts import by_time
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Simulation, simulate
from dapple_tf.tools.evaluation.ooo_models import (
    BERTS,
    FINE_TUNED,
    FOUR,
    GPT_3_MEDIUM,
    PUB_B,
    ffnn,
    rnn,
    units,
)

Record = Mapping[str, str | float | int | None]

_PER_DEVICE = (2, 3, 4, 6)
"""Stages on each device in Megatron's interleaved pipelines."""


@dataclass(frozen=True)
class Layout:
    """Where a profile is cut, and the device of each stage."""

    ends: tuple[int, ...]
    devices: tuple[int, ...]

    def plan(self, profile: Profile, batch: int, count: int, policy: str, recompute: str = "none") -> Plan:
        """Returns a plan; its policy knows the times of the stages' tasks."""
        cuts = [profile.layers[end - 1].name for end in self.ends[:-1]]
        return Plan.manual(cuts, [[device] for device in self.devices], count, batch, policy, recompute=recompute)


def blocks_of(profile: Profile) -> range:
    """Returns the layers that are shared out: all but an embedding and a head."""
    names = profile.index
    return range(int("embedding" in names), len(profile.layers) - int("head" in names))


def layout(profile: Profile, sizes: Sequence[int], devices: Sequence[int], head: int | None = None) -> Layout:
    """Returns the layout with ``sizes`` blocks in the stages; an embedding joins the first, a head the last.

    Args:
        profile: the model.
        sizes: number of blocks of each stage.
        devices: device of each stage.
        head: device of the head, as a stage of its own; None joins it to the last stage.
    """
    blocks = blocks_of(profile)
    ends = [blocks.start + end for end in itertools.accumulate(sizes)]
    if head is None or blocks.stop == len(profile.layers):
        return Layout((*ends[:-1], len(profile.layers)), tuple(devices))
    return Layout((*ends, len(profile.layers)), (*devices, head))


def straight(profile: Profile, count: int) -> list[Layout]:
    """Returns pipelines with a stage on each device: as many blocks each, as in its scripts, or equal times."""
    each, more = divmod(len(blocks_of(profile)), count)
    even = layout(profile, [each + (stage < more) for stage in range(count)], range(count)) if each else None
    cuts = by_time(profile, count, [1.0] * count)
    timed = Layout((*(profile.index[cut] + 1 for cut in cuts), len(profile.layers)), tuple(range(count)))
    return [timed] if even is None else list(dict.fromkeys([even, timed]))


def modulo(profile: Profile, count: int, group: int = 1) -> list[Layout]:
    """Returns modulo allocations: group i on device i mod ``count``, the head with the last or on the next device."""
    whole, rest = divmod(len(blocks_of(profile)), group)
    sizes = [group] * whole + [rest] * bool(rest)
    devices = [index % count for index in range(len(sizes))]
    return list(dict.fromkeys(layout(profile, sizes, devices, head) for head in (None, len(sizes) % count)))


def interleaved(profile: Profile, count: int) -> list[Layout]:
    """Returns Megatron's pipelines: several stages of equal times on each device, repeating."""
    layouts = []
    for per_device in _PER_DEVICE:
        stages = per_device * count
        if stages <= len(blocks_of(profile)):
            cuts = by_time(profile, stages, [1.0] * stages)
            ends = (*(profile.index[cut] + 1 for cut in cuts), len(profile.layers))
            layouts.append(Layout(ends, tuple(index % count for index in range(stages))))
    return layouts


def timed(plan: Plan, profile: Profile, cluster: Cluster) -> Simulation:
    """Simulates a plan, whose policy orders tasks by the times of its stages.

    Raises:
        PlanError: it doesn't fit the devices' memory.
    """
    if plan.policy.planning.by_seconds:
        plan = dataclasses.replace(plan, task_seconds=CostModel(plan, profile, cluster).task_seconds)
    return simulate(plan, profile, cluster)


def fastest(
    layouts: Iterable[Layout],
    profile: Profile,
    cluster: Cluster,
    batch: int,
    counts: Iterable[int],
    policies: Sequence[str],
) -> Simulation | None:
    """Returns the fastest step of any layout, number of micro-batches and policy that fits; None if none does."""
    best: Simulation | None = None
    for place, count, policy in itertools.product(list(layouts), counts, policies):
        for recompute in ("none", "boundary"):
            with contextlib.suppress(PlanError, ScheduleError):
                run = timed(place.plan(profile, batch, count, policy, recompute), profile, cluster)
                if run.fits and (best is None or run.latency < best.latency):
                    best = run
                if run.fits and min(run.costs.holds or (count,)) >= count:
                    break  # memory doesn't limit what is in flight
    return best


# ---- figures 5, 6 and 12: units


def unit_steps() -> list[Record]:
    """Figures 5, 6 and 12, and the 16 layers of section 8.4.1: steps in units, on links that take no time."""
    cases = (
        ("figure 5", 8, 2, 1),
        ("figure 6", 8, 2, 2),
        ("figure 12", 8, 4, 4),
        ("section 8.4.1", 16, 4, 4),
    )
    records: list[Record] = []
    for name, layers, devices, count in cases:
        profile = units(layers)
        cluster = Cluster(tuple(Device(f"/device:GPU:{index}", 0) for index in range(devices)), real=False)
        even = straight(profile, devices)[:1]
        ways = (("gpipe", even), ("fast_forward", even), ("modulo", modulo(profile, devices)))
        record: dict[str, str | float | int | None] = {
            "figure": name, "layers": layers, "GPUs": devices, "M": count,
        }  # fmt: skip
        for policy, layouts in ways:
            run = fastest(layouts, profile, cluster, count, [count], [policy])
            assert run is not None, name
            record[policy] = run.latency
        records.append(record)
    return records


# ---- figure 11: fine-tuning on four GPUs


FINE_TUNING = 4
"""Number of micro-batches, as in the scripts for fine-tuning and in figure 12."""
FINE_COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers that a system may choose from where it has its best one."""


FINE_TUNED_MODELS = ("BERT-24", "RNN", "FFNN")


def fine_tuned(model: str) -> tuple[Profile, int]:
    """Returns a model of figure 11 and its batch; the paper doesn't say FFNN's, which is RNN's here."""
    return {"BERT-24": (FINE_TUNED.profile(), 96), "RNN": (rnn(), 1024), "FFNN": (ffnn(), 1024)}[model]


def fine_tuning(model: str, network: str, counts: Sequence[int], groups: Sequence[int] = (1, 2)) -> Record:
    """Figure 11: a model on four V100s.

    Args:
        model: of `fine_tuned`.
        network: one of `FOUR`.
        counts: numbers of micro-batches; each system takes its best. Cross-layer model parallelism has one.
        groups: blocks of a group under modulo allocation.
    """
    profile, batch = fine_tuned(model)
    cluster = FOUR[network].cluster(4)
    even = straight(profile, 4)
    record: dict[str, str | float | int | None] = {
        "model": model,
        "network": network,
        "setting": "best" if len(counts) > 1 else "paper",
        "single": _single(profile, cluster, batch),
    }
    # Section 8.4.1: "Our optimizations are applied without micro-batch for the RNN model."
    own = counts if len(counts) > 1 or model != "RNN" else (1,)
    ways = [("MP", even, (1,), "gpipe"), ("GPipe", even, counts, "gpipe"), ("OOO-Pipe1", even, own, "fast_forward")]
    ways += [(f"OOO-Pipe2, groups of {group}", modulo(profile, 4, group), own, "modulo") for group in groups]
    for name, layouts, chosen, policy in ways:
        run = fastest(layouts, profile, cluster, batch, chosen, [policy])
        record[name] = None if run is None else run.latency
        record[f"{name} M"] = None if run is None else run.costs.plan.micro_batches
        record[f"{name} GB"] = None if run is None else max(run.peak_bytes.values()) / 1e9
    return record


def _single(profile: Profile, cluster: Cluster, batch: int) -> float | None:
    """Returns the seconds of a step on one device, with the best number of micro-batches."""
    whole = Layout((len(profile.layers),), (0,))
    run = fastest([whole], profile, cluster, batch, FINE_COUNTS, ["dapple_a"])
    return None if run is None else run.latency


TRANSFERS = {"NVLink": 0.05, "PCIe": 0.16, "Ethernet": 1.8}
"""Network -> section 8.4.1's "time of output transfer" of a transformer of BERT-24, over that of its computation."""


def transfer(network: str) -> Record:
    """Section 8.4.1: the time of a block's output on a network over the block's F, for a micro-batch of figure 11."""
    profile, batch = fine_tuned("BERT-24")
    block = profile.layers[profile.index["block_1"]]
    samples = batch / FINE_TUNING
    seconds = block.output_bytes.at(samples) / FOUR[network].cluster(4).link(0, 1).bandwidth
    return {"network": network, "transfer / F": seconds / block.forward.at(samples), "paper": TRANSFERS[network]}


# ---- figure 13: pre-training


SCRIPTS = {8: (12, 480, 30), 16: (24, 320, 32), 24: (36, 380, 38), 32: (48, 320, 40)}
"""GPUs -> blocks of BERT, batch and number of micro-batches in the published scripts for pre-training."""
STRONG = {24: (320, 32), 48: (320, 40)}
"""Blocks of BERT -> batch and micro-batches on any number of GPUs: those of its script."""
BATCHES = (512, 1872)
"""The ends of the range of sections 8.1 and 8.4.2; in the setting ``best`` each system has the better one."""
SETTINGS = ("scripts", "figure 12", "best")
"""Which batches and numbers of micro-batches systems have, see `batches` and `micro_batches`."""
GPT_3_DEVICES = (8, 12, 16, 24, 32)
POLICIES = {
    "GPipe": ("gpipe",),
    "DAPPLE": ("dapple_a", "dapple_b"),
    "Megatron": ("interleaved",),
    "fast-forwarded Megatron": ("modulo",),
    "OOO-Pipe1": ("fast_forward",),
    "OOO-Pipe2": ("modulo",),
}


def micro_batches(setting: str, script: int, devices: int, batch: int) -> tuple[int, ...]:
    """Returns the numbers of micro-batches of a setting.

    Args:
        setting: ``scripts``; ``figure 12``: as many as devices; or ``best``: each system's best of as many, twice and
            four times as many, and those of the script's size.
        script: their number if they have the script's size.
        devices: number of devices.
        batch: samples of a step.
    """
    if setting == "scripts":
        return (script,)
    if setting == "figure 12":
        return (devices,)
    return tuple(sorted({count for count in (script, devices, 2 * devices, 4 * devices) if count <= batch}))


def batches(setting: str, script: int, script_count: int, devices: int) -> dict[int, tuple[int, ...]]:
    """Returns the batches of a setting, each with its numbers of micro-batches.

    Args:
        setting: one of `SETTINGS`.
        script: the script's batch.
        script_count: its number of micro-batches.
        devices: number of devices.
    """
    sizes = BATCHES if setting == "best" else (script,)
    return {size: micro_batches(setting, max(1, round(size * script_count / script)), devices, size) for size in sizes}


def pre_training(blocks: int, devices: int, batch: int, script: int, setting: str, systems: Sequence[str]) -> Record:
    """Figure 13: BERT on servers of Pub-B; seconds that each system takes for the script's batch.

    Where a system's step has another batch, its seconds are those of as many samples. PipeDream's are a bound: M times
    the longest stage, which asynchronous training without any bubble takes.
    """
    profile = BERTS[blocks].profile()
    cluster = PUB_B.cluster(devices)
    chosen = batches(setting, batch, script, devices)
    record: dict[str, str | float | int | None] = {
        "model": f"BERT-{blocks}", "GPUs": devices, "batch": batch, "setting": setting,
    }  # fmt: skip
    for system in systems:
        if system == "PipeDream's bound":
            record[system] = min(
                _bound(each, profile, cluster, size, count) * batch / size
                for each in straight(profile, devices)
                for size, counts in chosen.items()
                for count in counts
            )
            continue
        layouts = {"OOO-Pipe2": modulo, "Megatron": interleaved, "fast-forwarded Megatron": interleaved}.get(
            system, straight
        )(profile, devices)
        runs = (
            fastest(layouts, profile, cluster, size, _legal(system, counts, devices, size), POLICIES[system])
            for size, counts in chosen.items()
        )
        steps = {run.latency * batch / run.costs.plan.global_batch_size: run for run in runs if run is not None}
        record[system] = min(steps, default=None)
        plan = steps[min(steps)].costs.plan if steps else None
        record[f"{system} M"] = None if plan is None else plan.micro_batches
        if setting == "best":
            record[f"{system} batch"] = None if plan is None else plan.global_batch_size
    return record


def _legal(system: str, counts: Sequence[int], devices: int, batch: int) -> list[int]:
    """Returns the numbers of micro-batches that a system runs: Megatron's interleaving needs multiples of the devices.

    Others take the next larger multiple there.
    """
    if "Megatron" not in system:
        return list(counts)
    return sorted({count for each in counts if (count := -(-each // devices) * devices) <= batch})


def _bound(place: Layout, profile: Profile, cluster: Cluster, batch: int, count: int) -> float:
    costs = CostModel(place.plan(profile, batch, count, "dapple_a"), profile, cluster)
    return count * max(f + x + w for f, x, w in costs.task_seconds)


def weak_scaling(devices: int, setting: str) -> Record:
    """Figure 13 (a): the BERT of the script for ``devices`` GPUs."""
    blocks, batch, script = SCRIPTS[devices]
    return pre_training(
        blocks, devices, batch, script, setting, ("GPipe", "PipeDream's bound", "OOO-Pipe1", "OOO-Pipe2")
    )


def strong_settings() -> list[tuple[int, int, str]]:
    """Returns (blocks, devices, setting) of figure 13 (b)'s BERTs."""
    return [(blocks, devices, setting) for blocks in STRONG for setting in SETTINGS for devices in SCRIPTS]


def strong_scaling(blocks: int, devices: int, setting: str) -> Record:
    """Figure 13 (b): a BERT on more and more GPUs; only BERT-48 has opponents in the paper."""
    batch, script = STRONG[blocks]
    systems = ("GPipe", "DAPPLE", "Megatron", "fast-forwarded Megatron", "OOO-Pipe2")
    return pre_training(blocks, devices, batch, script, setting, systems if blocks == 48 else ("GPipe", "OOO-Pipe2"))


def gpt_3(devices: int) -> Record:
    """Figure 13 (b): GPT-3 medium, its blocks on ``devices`` GPUs and embedding and head on four others.

    The paper splits the head between these four by words; here each has a quarter of the samples.
    """
    profile = GPT_3_MEDIUM.profile()
    cluster = PUB_B.cluster(devices + 4)
    batch, count = 216, 54
    blocks = blocks_of(profile)
    cuts = [profile.layers[index].name for index in range(blocks.stop)]
    others = list(range(devices, devices + 4))
    places = [others, *([index % devices] for index in range(len(blocks))), others]
    run: Simulation | None = None
    for recompute in ("none", "boundary"):
        with contextlib.suppress(PlanError):
            plan = Plan.manual(cuts, places, count, batch, "modulo", recompute=recompute)
            run = timed(plan, profile, cluster)
            if run.fits:
                break
    return {
        "model": GPT_3_MEDIUM.name, "GPUs": devices, "with embedding": devices + 4, "batch": batch, "M": count,
        "OOO-Pipe2": None if run is None or not run.fits else run.latency,
    }  # fmt: skip


# ---- our planner


_ALLOWED = tuple(feature for feature in FEATURES if feature.name != "carried_updates")
"""All features but the one that moves updates into the next step, which OOO-Pipe hasn't."""


def ours(model: str, network: str) -> Record:
    """Our planner's plan for a model of figure 11, against the best of OOO-Pipe1 and 2 with the same micro-batches.

    Our planner has all policies, data parallelism and `_ALLOWED`; OOO-Pipe its own two policies.
    """
    profile, batch = fine_tuned(model)
    cluster = FOUR[network].cluster(4)
    chosen = best_plan(
        profile, cluster, batch, micro_batches=FINE_COUNTS, schedule="auto", least_gain=0.0,
        only=[feature.name for feature in _ALLOWED],
    )  # fmt: skip
    theirs = [*straight_and_modulo(profile, 4, groups=(1, 2))]
    runs = [fastest(layouts, profile, cluster, batch, FINE_COUNTS, [policy]) for layouts, policy in theirs]
    paper = min(run.latency for run in runs if run is not None)
    run = simulate(chosen, profile, cluster)
    return {"model": model, "network": network, "OOO-Pipe": paper, "ours": run.latency, "plan": described(chosen)}


def described(plan: Plan) -> str:
    """Returns a plan's stages, policy, micro-batches and all its features."""
    if len(set(plan.devices)) == 1:
        text = f"data parallelism in {plan.num_stages} chunks" if plan.num_stages > 1 else "data parallelism"
    else:
        text = f"{plan.num_stages} stages, replicas {' '.join(map(str, plan.replicas))}, {plan.policy}"
    values = {"first_k": f"reverse first-{plan.reverse_first_k}", "pieces": f"{len(plan.backward_cuts) + 1} pieces"}
    used = [feature.name for feature in FEATURES if feature.used(plan) and feature.name != "chunks"]
    return ", ".join([text, f"M={plan.micro_batches}", *(values.get(name, name.replace("_", " ")) for name in used)])


def straight_and_modulo(profile: Profile, count: int, groups: Sequence[int]) -> Iterator[tuple[list[Layout], str]]:
    """Yields the layouts and policies of OOO-Pipe1 and OOO-Pipe2."""
    yield straight(profile, count), "fast_forward"
    for group in groups:
        yield modulo(profile, count, group), "modulo"
