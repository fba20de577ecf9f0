"""The models, hardware and plans of DAPPLE's evaluation (PPoPP'21, section 6), and what we assume beyond.

The profiles are those that the authors published (docs/profiles.md). They hold times, activations and parameters. This
module mends what is known to be wrong in them, and adds from the paper's tables what they lack: memory and the time of
the optimizer's update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.devices import Link, ReductionLinks
from dapple_tf.describe.layer_profile import Cost
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.describe.profile_text import load_text

NVLINK = 130e9
"""Bytes/s between two V100s of a server, in each direction. "Up to 130 GB/s", says DAPPLE's arXiv version, which is
what NCCL's all-reduce gets out of a V100's six links; between two devices there are one or two, of 25 GB/s each."""
NVLINK_LATENCY = 5e-6
ETHERNET_LATENCY = 30e-6
USABLE_MEMORY = 15_000_000_000
"""Bytes of a 16 GB V100 that a model can use: TensorFlow and CUDA keep about 1 GB. Table 5 bounds it: 13.2 GB fit, but
not GPipe with 3 micro-batches, for which 15.1 GB follow from the other lines."""


def gpus(
    servers: int,
    each: int,
    inside: Link,
    between: Link,
    memory: int | None = USABLE_MEMORY,
    reductions: ReductionLinks | None = None,
) -> Cluster:
    """Returns servers of GPUs.

    Args:
        servers: their number.
        each: GPUs of a server.
        inside: link between two GPUs of a server.
        between: link between two servers.
        memory: bytes of a GPU that a model can use; None for unknown.
        reductions: links of all-reduces where they aren't these.
    """
    names = itertools.product(range(servers), range(each))
    return Cluster(
        tuple(Device(f"/job:worker/task:{server}/device:GPU:{i}", server, memory) for server, i in names),
        intra_bandwidth=inside.bandwidth,
        intra_latency=inside.latency,
        inter_bandwidth=between.bandwidth,
        inter_latency=between.latency,
        real=False,
        reductions=reductions or ReductionLinks(),
    )


def hardware(servers: int, devices: int, gigabits: float) -> Cluster:
    """Servers of V100s on an Ethernet of so many Gbit/s."""
    return gpus(servers, devices, Link(NVLINK, NVLINK_LATENCY), Link(gigabits * 1e9 / 8, ETHERNET_LATENCY))


def released_links(cluster: Cluster) -> Cluster:
    """Returns a cluster with the constants of DAPPLE's released planner (HPGO), which are no line rates.

    There 25 Gbit/s are 1 GB/s for transfers and 3 GB/s for all-reduces, and NVLink has 25 GB/s.
    """
    slower = (cluster.inter_bandwidth or 0.0) / 25e9 * 8
    between, inside = Link(3e9 * slower, ETHERNET_LATENCY), Link(100e9, NVLINK_LATENCY)
    reductions = ReductionLinks(between=between, inside=inside)
    return dataclasses.replace(cluster, inter_bandwidth=1e9 * slower, intra_bandwidth=25e9, reductions=reductions)


CONFIGS = {"A": hardware(2, 8, 25), "B": hardware(16, 1, 25), "C": hardware(16, 1, 10)}
"""Table 2, with 16 devices each as in Table 4."""


# ---- Table 5, from which two things are calibrated


@dataclass(frozen=True)
class Measured:
    """A line of Table 5: BERT-48 on two devices of config B, two samples per micro-batch. None stands for OOM."""

    schedule: str
    recompute: str
    micro_batches: int
    throughput: float | None
    gigabytes: float | None

    @property
    def key(self) -> str:
        """Its name, such as ``gpipe + RC, M=2``."""
        return f"{self.schedule}{' + RC' if self.recompute != 'none' else ''}, M={self.micro_batches}"


TABLE_5 = (
    Measured("gpipe", "none", 2, 5.10, 12.1),
    Measured("gpipe", "none", 3, None, None),
    Measured("gpipe", "boundary", 2, 4.00, 9.9),
    Measured("gpipe", "boundary", 5, 5.53, 13.2),
    Measured("gpipe", "boundary", 8, None, None),
    Measured("dapple_a", "none", 2, 5.10, 10.6),
    Measured("dapple_a", "none", 8, 7.60, 10.6),
    Measured("dapple_a", "none", 16, 8.18, 10.6),
    Measured("dapple_a", "boundary", 2, 4.24, 8.5),
    Measured("dapple_a", "boundary", 8, 6.23, 8.5),
    Measured("dapple_a", "boundary", 16, 6.77, 8.5),
)
STAGE_RESIDUALS = 2 * (12.1e9 - 10.6e9)
"""Bytes that a micro-batch keeps on a stage: with M = 2 two are in flight, but on the last stage of DAPPLE one."""


def apply_share() -> float:
    """Returns the optimizer's update in Table 5, as a part of a stage's F + B.

    A step of two equal stages takes (M + 1) (F + B) + c: least squares over DAPPLE's three lines give both.
    """
    lines = [line for line in TABLE_5 if line.schedule == "dapple_a" and line.recompute == "none"]
    seconds = [2 * line.micro_batches / (line.throughput or 1.0) for line in lines]
    slope, rest = np.polyfit([line.micro_batches + 1 for line in lines], seconds, 1)
    return float(rest / slope)


@functools.cache
def apply_seconds_per_parameter() -> float:
    """Seconds of the optimizer's update per parameter: `apply_share` of BERT-48's profile, per parameter."""
    profile = load_text("bert-48")
    seconds = profile.total("forward").at(2) + profile.total("backward").at(2)
    return apply_share() * seconds / (profile.parameter_bytes / 4)


# ---- corrections


def _resized(profile: Profile, factors: Mapping[int, float]) -> Profile:
    """Activations of these layers, multiplied by factors."""
    layers = list(profile.layers)
    for index, factor in factors.items():
        layer = layers[index]
        output, residual = layer.output_bytes * factor, layer.residual_bytes * factor
        layers[index] = dataclasses.replace(layer, output_bytes=output, residual_bytes=residual)
    tensors = [
        dataclasses.replace(tensor, bytes=tensor.bytes * factors.get(tensor.producer, 1.0))
        for tensor in profile.tensors
    ]
    return dataclasses.replace(profile, layers=tuple(layers), tensors=tuple(tensors))


def correct_bert_48(profile: Profile) -> Profile:
    """Returns each layer's output without the mask that was counted with it; inputs and mask for 2 samples, not 6."""
    factors = {}
    for index, layer in enumerate(profile.layers):
        if layer.name in ("input_ids", "attention_mask"):
            factors[index] = 1 / 3
        elif layer.output_bytes.at(2) == 4_325_376:
            factors[index] = 9_437_184 / (9_437_184 + 3_538_944)
    return _resized(profile, factors)


def correct_vgg_19(profile: Profile) -> Profile:
    """Sizes are MiB x 1e6."""
    factor = 2**20 / 1e6
    resized = _resized(profile, dict.fromkeys(range(len(profile.layers)), factor))
    layers = [
        dataclasses.replace(layer, parameter_bytes=round(layer.parameter_bytes * factor)) for layer in resized.layers
    ]
    return dataclasses.replace(resized, layers=tuple(layers))


def correct_gnmt_16(profile: Profile) -> Profile:
    """Backward times go to the layers that take them.

    The first embedding's 11.7 ms are those of the bidirectional LSTM behind it and the other way round; what the last
    LSTM takes longer than the one before it belongs to the classifier behind it.
    """
    layers = list(profile.layers)
    embedding, bidirectional = layer_index(profile, "Embedding"), layer_index(profile, "EmuBidirLSTM")
    *_, before, last = (index for index, layer in enumerate(layers) if layer.name.startswith("LSTM"))
    surplus = Cost(0.0, layers[last].backward.per_sample - layers[before].backward.per_sample)
    for index, backward in (
        (embedding, profile.layers[bidirectional].backward),
        (bidirectional, profile.layers[embedding].backward),
        (last, profile.layers[before].backward),
        (len(layers) - 1, profile.layers[-1].backward + surplus),
    ):
        layers[index] = dataclasses.replace(layers[index], backward=backward)
    return _without_residuals(dataclasses.replace(profile, layers=tuple(layers)), r"__getitem__")


def correct_amoeba_36(profile: Profile) -> Profile:
    """Returns the labels go to the loss, not to cell_20."""
    loss = profile.index["softmax_loss"]
    tensors = [
        dataclasses.replace(tensor, consumers=(loss,)) if tensor.consumers == (profile.index["cell_20"],) else tensor
        for tensor in profile.tensors
    ]
    return dataclasses.replace(profile, tensors=tuple(tensors))


def correct_resnet_50(profile: Profile) -> Profile:
    """Returns what works in place keeps no residual of its own."""
    return _without_residuals(profile, r"ReLU\(inplace\)|Add\(inplace\)|View|Size")


def _without_residuals(profile: Profile, pattern: str) -> Profile:
    layers = [
        dataclasses.replace(layer, residual_bytes=Cost()) if re.match(pattern, layer.name) else layer
        for layer in profile.layers
    ]
    return dataclasses.replace(profile, layers=tuple(layers))


# ---- models


@dataclass(frozen=True)
class Model:
    """A model of Table 1.

    Attributes:
        name: as we write it.
        samples: the batch of its profile.
        bytes_per_parameter: weights, gradients and the optimizer's variables.
        memory: Table 1's memory cost in bytes, of a whole step at the profile's batch; None where it isn't used.
        correct: mends the profile.
    """

    name: str
    samples: int
    bytes_per_parameter: int
    memory: float | None
    correct: Callable[[Profile], Profile] | None = None

    def published(self) -> Profile:
        """Returns the profile as its authors published it."""
        return load_text(self.name, model=self.name, device="V100")

    def corrected(self) -> Profile:
        """Returns the profile with its errors mended; residuals are still outputs."""
        return self.published() if self.correct is None else self.correct(self.published())

    def profile(self, residuals: float | None = None, workspace: float = 0.0) -> Profile:
        """Returns the profile to plan from: errors mended, with memory and the time of Apply.

        Args:
            residuals: bytes that the whole model keeps for one batch of the profile; None is what Table 1 leaves beside
                the parameters. Layers share it in proportion to their outputs.
            workspace: bytes that a running backward needs beyond that.
        """
        profile = self.corrected()
        known = profile.total("residual_bytes").at(self.samples)
        if residuals is None:
            parameters = profile.parameter_bytes / 4 * self.bytes_per_parameter
            residuals = known if self.memory is None else self.memory - parameters
        factor = residuals / known
        layers = [
            dataclasses.replace(
                layer,
                residual_bytes=layer.residual_bytes * factor,
                temporary_bytes=Cost(workspace),
                slot_bytes=round(layer.parameter_bytes * (self.bytes_per_parameter / 4 - 2)),
                apply_seconds=layer.parameter_bytes / 4 * apply_seconds_per_parameter(),
            )
            for layer in profile.layers
        ]
        return dataclasses.replace(profile, layers=tuple(layers))


MODELS = {
    model.name: model
    for model in (
        Model("resnet-50", 128, 12, None, correct_resnet_50),
        Model("vgg-19", 32, 12, 5.6e9, correct_vgg_19),
        Model("gnmt-16", 64, 12, 3.9e9, correct_gnmt_16),
        Model("bert-48", 2, 16, 11.4e9, correct_bert_48),
        Model("xlnet-36", 1, 16, 12e9),
        Model("amoeba-36", 1, 16, 20e9, correct_amoeba_36),
        Model("bert-large", 6, 16, None),
    )
}


# ---- plans


@dataclass(frozen=True)
class Partition:
    """Where a model is cut and on which devices its stages are; micro-batches and schedule are left open.

    Attributes:
        cuts: index of the last layer of each stage but the last.
        replicas: of each stage, on devices in order.
        places: devices of each stage where they aren't in order.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    places: tuple[tuple[int, ...], ...] | None = None

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage."""
        if self.places is not None:
            return self.places
        ends = list(itertools.accumulate(self.replicas))
        return tuple(tuple(range(end - count, end)) for end, count in zip(ends, self.replicas, strict=True))

    def plan(self, profile: Profile, count: int, batch: int, schedule: str, recompute: str = "none") -> Plan | None:
        """Returns the plan with these micro-batches; None if it isn't legal, as with fewer samples than replicas."""
        cuts = [profile.layers[cut].name for cut in self.cuts]
        policy = schedule if cuts else "dapple_a"
        with contextlib.suppress(PlanError):
            return Plan.manual(cuts, self.devices, count, batch, policy, recompute=recompute)
        return None


@dataclass(frozen=True)
class PaperRow:
    """A row of Table 4 or 6.

    Attributes:
        table: 4 or 6.
        model: name.
        config: A, B or C.
        batch: GBS.
        plan: ``DP``, ``straight`` or the replicas, such as ``8:8``.
        splits: where two stages part: names of the last layers of the first one that the paper's text may mean.
        acr: Table 4's communication ratio; of Table 6's VGG-19 that of section 6.4.
        pipedream: Table 6's plan of PipeDream: (index of the last layer, replicas) of each stage; empty is straight.
    """

    table: int
    model: str
    config: str
    batch: int
    plan: str
    splits: tuple[str, ...] = ()
    acr: float | None = None
    pipedream: tuple[tuple[int, int], ...] | None = None

    @property
    def key(self) -> str:
        """Its name, such as ``vgg-19/A``."""
        return f"table {self.table}: {self.model}/{self.config}"


_GNMT = ("RecurrentAttention", "Dropout(p=0.2)#9", "Concat(2)")
"""9 of 16 LSTM layers: the attention layer is the ninth; small layers behind it may go either way."""
_AMOEBA_24 = ("cell_23", "reduction_cell_1", "cell_24")
_AMOEBA_27 = ("cell_26", "cell_27")
"""24:12 and 27:9: so many cells are before the cut, or the last one before it has this number, from 0."""

TABLE_4 = (
    *(PaperRow(4, "resnet-50", config, 2048, "DP") for config in "ABC"),
    PaperRow(4, "vgg-19", "A", 2048, "DP"),
    PaperRow(4, "vgg-19", "B", 2048, "DP"),
    # 13 of its 19 layers with weights; section 6.3 says between convolutions and dense layers, which are 16:3.
    PaperRow(4, "vgg-19", "C", 2048, "15:1", ("Conv2d_5_1", "MaxPool2d_5"), 0.40),
    PaperRow(4, "gnmt-16", "A", 1024, "8:8", _GNMT, 0.10),
    PaperRow(4, "gnmt-16", "B", 1024, "8:8", _GNMT, 0.10),
    PaperRow(4, "gnmt-16", "C", 1024, "straight", (), 3.75),
    PaperRow(4, "bert-48", "A", 64, "8:8", ("layer_22",), 0.06),
    PaperRow(4, "bert-48", "B", 64, "straight", (), 0.50),
    PaperRow(4, "bert-48", "C", 64, "straight", (), 1.25),
    PaperRow(4, "xlnet-36", "A", 128, "8:8", ("Layer_17",), 0.03),
    PaperRow(4, "xlnet-36", "B", 128, "8:8", ("Layer_17",), 0.03),
    PaperRow(4, "xlnet-36", "C", 128, "straight", (), 0.67),
    PaperRow(4, "amoeba-36", "A", 128, "8:8", _AMOEBA_24, 0.18),
    PaperRow(4, "amoeba-36", "B", 128, "11:5", _AMOEBA_27, 0.14),
    PaperRow(4, "amoeba-36", "C", 128, "11:5", _AMOEBA_27, 0.35),
)

TABLE_6 = (
    PaperRow(
        6, "vgg-19", "A", 1024, "14:2", ("MaxPool2d_4",), 0.16, pipedream=((10, 8), (16, 6), (18, 1), (25, 1)),
    ),
    # Layers 0 to 30 by its text; Table 4's split of the same model, batch and machines is two layers earlier.
    PaperRow(6, "amoeba-36", "A", 128, "8:8", _AMOEBA_24[::-1], pipedream=()),
    # The paper counts 27 layers, 0 to 26; our file has 29: two more before layer_0.
    PaperRow(
        6, "bert-large", "A", 128, "8:8", ("layer_11",),
        pipedream=((5, 2), (14, 6), (17, 2), (20, 2), (23, 2), (28, 2)),
    ),
    # 42 layers in the paper, 43 in our file: one more before Layer_0.
    PaperRow(6, "xlnet-36", "A", 128, "8:8", ("Layer_17",), pipedream=()),
)  # fmt: skip

FIGURE_14 = {"gnmt-16": 1024, "bert-48": 64, "xlnet-36": 128, "amoeba-36": 256}
"""Figure 14's models and batches. The paper gives the last; the others' are Table 4's."""
FIGURE_11_MODELS = ("vgg-19", "gnmt-16", "bert-48", "xlnet-36")
"""The fifth, AmoebaNet-36, has no data parallelism to compare with: it doesn't fit in a device's memory."""

TABLE_3 = {"bert-48": 1.0, "xlnet-36": 1.02, "vgg-19": 1.1, "gnmt-16": 1.31}
"""Throughput of P_B over that of P_A, in config A."""
FIGURE_11 = {"A": 1.71, "B": 1.37, "C": 1.79}
"""Average speedup of the best hybrid plan over data parallelism with overlap."""
FIGURE_11_LARGEST = 2.32
"""The largest of these speedups: GNMT-16 in config C."""
SAME_CUTS = "same cuts and replicas"
SAME_CUTS_OTHERWISE = "same if its split is read otherwise"
"""How a plan of our planner compares with the paper's."""
PIPEDREAM_LARGEST = 3.23
"""The most that the planner's plans gain over PipeDream's; of the abstract, for models and sizes of figure 12."""


RATIO_5 = {"throughput": 1.6, "memory": 0.88}
"""Section 6.5: DAPPLE with M = 16 against GPipe with M = 2, both without recomputation."""

TABLE_7 = {1: 48, 2: 106, 4: 215, 8: 428}
"""Devices -> layers of the largest BERT."""


def measured_bert() -> Profile:
    """BERT-48 with the memory of Table 5 rather than of Table 1: see docs/results."""
    model = MODELS["bert-48"]
    parameters = model.published().parameter_bytes / 4 * model.bytes_per_parameter
    return model.profile(2 * STAGE_RESIDUALS, 12.1e9 - 2 * STAGE_RESIDUALS - parameters / 2)


def deep_bert(layers: int) -> Profile:
    """`measured_bert` with so many encoder layers."""
    profile = measured_bert()
    first, last = profile.index["layer_0"], profile.index["layer_47"]
    encoder = [dataclasses.replace(profile.layers[first], name=f"layer_{index}") for index in range(layers)]
    end = first + layers
    tensors = []
    for tensor in profile.tensors:
        if tensor.producer < first:
            readers = [layer for layer in tensor.consumers if layer < first]
            if len(tensor.consumers) > 40:  # the mask
                readers += range(first, end)
            elif last >= tensor.consumers[-1] >= first:
                readers.append(first)
            tensors.append(dataclasses.replace(tensor, consumers=tuple(readers)))
    size = next(tensor.bytes for tensor in profile.tensors if tensor.producer == first)
    tensors += [Tensor(index, (index + 1,), size) for index in range(first, end)]
    return dataclasses.replace(
        profile,
        model=f"bert-{layers}",
        layers=(*profile.layers[:first], *encoder, *profile.layers[last + 1 :]),
        tensors=tuple(tensors),
    )


def straight(profile: Profile, stages: int) -> Partition:
    """The straight pipeline whose longest stage is as short as can be, and of these the one that transfers least.

    Glue that takes next to no time goes to either side of a cut, as fewer bytes cross.
    """
    samples = profile.batch_sizes[-1]
    times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers]
    sums = [0.0, *itertools.accumulate(times)]
    crossing = [sum(cost.at(samples) for cost in pair) for pair in profile.crossing]
    count = len(times)
    step = max(times) / 50  # stages that differ by less count as equal
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        stop: (sums[stop], 0.0, ()) for stop in range(1, count + 1)
    }
    for stage in range(2, stages + 1):
        best = {
            stop: min(
                (
                    (max(best[cut][0], sums[stop] - sums[cut]), best[cut][1] + crossing[cut - 1], (*best[cut][2], cut))
                    for cut in range(stage - 1, stop)
                ),
                key=lambda entry: (round(entry[0] / step), entry[1], entry[0]),
            )
            for stop in range(stage, count + 1)
        }
    return Partition(tuple(cut - 1 for cut in best[count][2]), (1,) * stages)


def lstm_per_device(profile: Profile) -> Partition:
    """GNMT-16's straight plan: one LSTM layer on each device, cut where least crosses between two of them."""
    marks = ("LSTM", "EmuBidirLSTM", "RecurrentAttention")
    heavy = [index for index, layer in enumerate(profile.layers) if layer.name.startswith(marks)]
    samples = profile.batch_sizes[-1]

    def crossing(index: int) -> float:
        return sum(cost.at(samples) for cost in profile.crossing[index])

    cuts = [min(range(first, second), key=crossing) for first, second in itertools.pairwise(heavy)]
    return Partition(tuple(cuts), (1,) * len(heavy))


def layer_index(profile: Profile, name: str) -> int:
    """Returns the index of a layer by its name, or by the beginning of its description."""
    if name in profile.index:
        return profile.index[name]
    return next(index for index, layer in enumerate(profile.layers) if layer.name.startswith(name))


def paper_partitions(row: PaperRow, profile: Profile) -> Sequence[Partition]:
    """Returns the paper's plan of a row; several where its text may be read in several ways."""
    devices = CONFIGS[row.config].num_devices
    if row.plan == "DP":
        return (Partition((), (devices,)),)
    if row.plan == "straight":
        return (lstm_per_device(profile),) if row.model == "gnmt-16" else (straight(profile, devices),)
    replicas = tuple(int(count) for count in row.plan.split(":"))
    return tuple(Partition((layer_index(profile, name),), replicas) for name in row.splits)


def pipedream_partitions(row: PaperRow, profile: Profile) -> tuple[Partition, ...]:
    """PipeDream's plan of a row of Table 6, as its ranges may be read; empty for a row of Table 4.

    In ``(0,11) (11,17)`` layer 11 may begin the second stage, which is the first reading, or end the first one, which
    is how the last range is meant.
    """
    if row.pipedream is None:
        return ()
    if not row.pipedream:
        return (straight(profile, CONFIGS[row.config].num_devices),)
    replicas = tuple(count for _, count in row.pipedream)
    return tuple(Partition(tuple(last + more for last, _ in row.pipedream[:-1]), replicas) for more in (0, 1))
