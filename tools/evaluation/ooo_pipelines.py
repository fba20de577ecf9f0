"""Out-Of-Order BackProp's experiments with pipelines (EuroSys'22, sections 5.2 and 8.4), simulated.

Figures 5, 6, 11, 12 and 13. What the paper calls OOO-Pipe1 is the policy ``fast_forward`` on GPipe's stages; OOO-Pipe2
is ``modulo``, with each group of blocks on the device of its number modulo the number of devices. Each system has
recomputation where memory is short, and its best way to share out the blocks, of those that its kind of pipeline has:
one stage on each device takes as many blocks or as much time (`straight`), Megatron's several stages on each take as
much time (`interleaved`), and modulo allocation leaves open where the head goes (`modulo`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.stage_cuts import by_time
from dapple_tf.simulation.simulator import Simulation
from dapple_tf.tools.evaluation.ooo_models import BERTS, CLUSTERS, FINE_TUNED, FOUR, ffnn, rnn, units
from dapple_tf.tools.evaluation.paper_models import Partition
from dapple_tf.tools.evaluation.paper_plans import best
from dapple_tf.tools.evaluation.results import Record

_PER_DEVICE = (2, 3, 4, 6)
"""Stages on each device in Megatron's interleaved pipelines."""


def blocks_of(profile: Profile) -> range:
    """Returns the layers that are shared out: all but an embedding and a head."""
    names = profile.index
    return range(int("embedding" in names), len(profile.layers) - int("head" in names))


def layout(profile: Profile, sizes: Sequence[int], devices: Sequence[int], head: int | None = None) -> Partition:
    """Returns the stages with ``sizes`` blocks; an embedding joins the first, a head the last.

    Args:
        profile: the model.
        sizes: number of blocks of each stage.
        devices: device of each stage.
        head: device of the head, as a stage of its own; None joins it to the last stage.
    """
    blocks = blocks_of(profile)
    cuts = [blocks.start + end - 1 for end in itertools.accumulate(sizes)]
    apart = head is not None and blocks.stop < len(profile.layers)
    places = [(device,) for device in (*devices, *([head] if head is not None and apart else []))]
    return Partition(tuple(cuts if apart else cuts[:-1]), (1,) * len(places), tuple(places))


def timed(profile: Profile, stages: int, devices: int) -> Partition:
    """Returns stages of equal times, stage i on device i modulo ``devices``."""
    cuts = tuple(profile.index[cut] for cut in by_time(profile, stages))
    return Partition(cuts, (1,) * stages, tuple((index % devices,) for index in range(stages)))


def straight(profile: Profile, count: int) -> list[Partition]:
    """Returns pipelines with a stage on each device: as many blocks each, as in its scripts, or equal times."""
    each, more = divmod(len(blocks_of(profile)), count)
    even = [layout(profile, [each + (stage < more) for stage in range(count)], range(count))] if each else []
    return list(dict.fromkeys([*even, timed(profile, count, count)]))


def modulo(profile: Profile, count: int, group: int = 1) -> list[Partition]:
    """Returns modulo allocations: group i on device i mod ``count``, the head with the last or on the next device."""
    whole, rest = divmod(len(blocks_of(profile)), group)
    sizes = [group] * whole + [rest] * bool(rest)
    devices = [index % count for index in range(len(sizes))]
    return list(dict.fromkeys(layout(profile, sizes, devices, head) for head in (None, len(sizes) % count)))


def interleaved(profile: Profile, count: int) -> list[Partition]:
    """Returns Megatron's pipelines: several stages of equal times on each device, repeating."""
    blocks = len(blocks_of(profile))
    return [timed(profile, each * count, count) for each in _PER_DEVICE if each * count <= blocks]


def fastest(
    partitions: Iterable[Partition],
    profile: Profile,
    cluster: Cluster,
    batch: int,
    counts: Sequence[int],
    policies: Sequence[str],
) -> Simulation | None:
    """Returns the fastest step of any stages, number of micro-batches and policy that fits; None if none does."""
    outcome = best(partitions, profile, cluster, batch, counts, schedules=policies, short_last=False)
    return outcome.simulation if outcome is not None and outcome.fits else None


# ---- figures 5, 6 and 12: units


def unit_steps() -> Record:
    """Figures 5, 6 and 12, and the 16 layers of section 8.4.1: steps in units, on links that take no time."""
    records: Record = {}
    cases = (("figure 5", 8, 2, 1), ("figure 6", 8, 2, 2), ("figure 12", 8, 4, 4), ("section 8.4.1", 16, 4, 4))
    for name, layers, devices, count in cases:
        profile = units(layers)
        cluster = Cluster(tuple(Device(f"/device:GPU:{index}", 0) for index in range(devices)), real=False)
        even = straight(profile, devices)[:1]
        ways = (("gpipe", even), ("fast_forward", even), ("modulo", modulo(profile, devices)))
        runs = {policy: fastest(layouts, profile, cluster, count, [count], [policy]) for policy, layouts in ways}
        records[name] = {policy: run.latency for policy, run in runs.items() if run is not None}
    return records


# ---- figure 11: fine-tuning on four GPUs


FINE_TUNING = 4
"""Number of micro-batches, as in the scripts for fine-tuning and in figure 12."""
FINE_COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers that a system may choose from where it has its best one."""


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
    # Section 8.4.1: "Our optimizations are applied without micro-batch for the RNN model."
    own = counts if len(counts) > 1 or model != "RNN" else (1,)
    ways: list[tuple[str, list[Partition], Sequence[int], str]] = [
        ("single", [Partition((), (1,))], FINE_COUNTS, "dapple_a"),
        ("MP", even, (1,), "gpipe"),
        ("GPipe", even, counts, "gpipe"),
        ("OOO-Pipe1", even, own, "fast_forward"),
        *((f"OOO-Pipe2, groups of {group}", modulo(profile, 4, group), own, "modulo") for group in groups),
    ]
    record: Record = {}
    for name, layouts, chosen, policy in ways:
        run = fastest(layouts, profile, cluster, batch, chosen, [policy])
        record[name] = None if run is None else run.latency
        if name in ("GPipe", "OOO-Pipe1"):
            record[f"{name} GB"] = None if run is None else max(run.peak_bytes.values()) / 1e9
    return record


def transfers() -> Record:
    """Section 8.4.1: network -> the time of a block's output over the block's F, for a micro-batch of figure 11."""
    profile, batch = fine_tuned("BERT-24")
    block = profile.layers[profile.index["block_1"]]
    samples = batch / FINE_TUNING
    return {
        network: block.output_bytes.at(samples) / hardware.cluster(4).link(0, 1).bandwidth / block.forward.at(samples)
        for network, hardware in FOUR.items()
    }


# ---- figure 13: pre-training


SCRIPTS = {8: (12, 480, 30), 16: (24, 320, 32), 24: (36, 380, 38), 32: (48, 320, 40)}
"""GPUs -> blocks of BERT, batch and number of micro-batches in the published scripts for pre-training."""
STRONG = {24: (320, 32), 48: (320, 40)}
"""Blocks of BERT -> batch and micro-batches on any number of GPUs, by its script."""
BATCHES = (512, 1872)
"""The ends of the range of sections 8.1 and 8.4.2; in the setting ``best`` each system has the better one."""
POLICIES = {
    "GPipe": ("gpipe",),
    "DAPPLE": ("dapple_a", "dapple_b"),
    "Megatron": ("interleaved",),
    "fast-forwarded Megatron": ("modulo",),
    "OOO-Pipe2": ("modulo",),
}


def batches(setting: str, script: int, script_count: int, devices: int) -> dict[int, tuple[int, ...]]:
    """Returns the batches of a setting, each with its numbers of micro-batches.

    Args:
        setting: ``scripts``; ``figure 12``: as many micro-batches as devices; or ``best``: each system's best of as
            many, twice and four times as many, and those of the script's size.
        script: the script's batch.
        script_count: its number of micro-batches.
        devices: number of devices.
    """
    if setting != "best":
        return {script: (script_count if setting == "scripts" else devices,)}
    alike = {size: max(1, round(size * script_count / script)) for size in BATCHES}
    return {size: tuple(sorted({count, devices, 2 * devices, 4 * devices})) for size, count in alike.items()}


def pre_training(blocks: int, devices: int, batch: int, script: int, setting: str, systems: Sequence[str]) -> Record:
    """Figure 13: BERT on servers of Pub-B; seconds that each system takes for the script's batch.

    Where a system's step has another batch, its seconds are those of as many samples.
    """
    profile = BERTS[blocks].profile()
    cluster = CLUSTERS["Pub-B"].cluster(devices)
    chosen = batches(setting, batch, script, devices)
    record: Record = {}
    for system in systems:
        layouts = {"OOO-Pipe2": modulo, "Megatron": interleaved, "fast-forwarded Megatron": interleaved}.get(
            system, straight
        )(profile, devices)
        runs = (
            fastest(layouts, profile, cluster, size, _legal(system, counts, devices, size), POLICIES[system])
            for size, counts in chosen.items()
        )
        steps = {run.latency * batch / run.costs.plan.global_batch_size: run for run in runs if run is not None}
        record[system] = min(steps, default=None)
        record[f"{system} M"] = steps[min(steps)].costs.plan.micro_batches if steps else None
    return record


def _legal(system: str, counts: Sequence[int], devices: int, batch: int) -> list[int]:
    """Returns the numbers of micro-batches that a system runs: Megatron's interleaving needs multiples of the devices.

    Others take the next larger multiple there.
    """
    if "Megatron" not in system:
        return list(counts)
    return sorted({count for each in counts if (count := -(-each // devices) * devices) <= batch})


def weak_scaling(devices: int, setting: str) -> Record:
    """Figure 13 (a): the BERT of the script for ``devices`` GPUs."""
    blocks, batch, script = SCRIPTS[devices]
    return pre_training(blocks, devices, batch, script, setting, ("GPipe", "OOO-Pipe2"))


def strong_scaling(blocks: int, devices: int, setting: str) -> Record:
    """Figure 13 (b): a BERT on more and more GPUs; only BERT-48 has opponents in the paper."""
    batch, script = STRONG[blocks]
    others = ("DAPPLE", "Megatron", "fast-forwarded Megatron") if blocks == 48 else ()
    return pre_training(blocks, devices, batch, script, setting, (*others, "OOO-Pipe2"))
