"""Devices, clusters and sequence models of Out-Of-Order BackProp's evaluation (EuroSys'22, section 8), as profiles.

No profile of the paper's is published. Times follow from the layers' published shapes and from data sheets: a kernel
takes a launch and the longer of its operations at a share of the peak and its bytes at a share of the bandwidth
(`dapple_tf.operators.rooflines`). The shares are those fitted to another paper's table (FD-DPS, table 6); nothing here
is fitted to this paper. Batches and numbers of micro-batches are those of its text and of its published scripts
(github.com/mlsys-seo/ooo-backprop).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.devices import Link, ReductionLinks
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.operators.rooflines import MATMUL, MEMORY, Roofline, Work
from dapple_tf.operators.rooflines import P100 as P100_SXM2
from dapple_tf.tools.evaluation.paper_models import ETHERNET_LATENCY, NVLINK_LATENCY, USABLE_MEMORY, gpus

FLOAT = 4
"""Bytes of a number: the paper trains in single precision."""

V100 = dataclasses.replace(P100_SXM2, flops=15.7e12, bandwidth=900e9)
"""Tesla V100 SXM2 by its data sheet."""
P100 = dataclasses.replace(P100_SXM2, flops=9.3e12)
"""Tesla P100 for PCIe by its data sheet."""
TITAN_XP = dataclasses.replace(P100_SXM2, flops=12.15e12, bandwidth=547.7e9)
"""Titan Xp by its data sheet."""

NVLINK = 50e9
"""Bytes/s, section 8.4.1: "NVLink (50GB), PCIe 3.0 (16GB), and 10Gb Ethernet (1GB)"."""
PCIE = 16e9
ETHERNET = 1e9
GIGABIT = 1e9 / 8
"""Bytes/s of table 2's Ethernets, which stand there by their line rates, for each Gbit/s."""

MOMENTUM, ADAM = 1, 2
"""Numbers that an optimizer keeps for each parameter (section 8.1: momentum for CNNs, Adam for BERT and GPT)."""


class Hardware(NamedTuple):
    """A kind of cluster.

    Attributes:
        device: the roofline of its GPUs.
        per_server: GPUs of a server.
        inside: bytes/s between two of them.
        outside: bytes/s of a server's network card.
        memory: bytes of a GPU that a model can use; None for unknown.
    """

    device: Roofline
    per_server: int
    inside: float
    outside: float
    memory: int | None = USABLE_MEMORY

    def cluster(self, devices: int, *, apart: bool = False) -> Cluster:
        """Returns ``devices`` GPUs, on as few servers as they fill.

        Args:
            devices: their number.
            apart: whether each GPU's gradients go over its server's network card by themselves, as in the published
                BytePS scripts, which start a worker for each GPU and a parameter server for each machine. A card then
                carries, each way, what a ring through the servers does, as often as the server has GPUs.
        """
        each = min(devices, self.per_server)
        inside, between = Link(self.inside, NVLINK_LATENCY), Link(self.outside, ETHERNET_LATENCY)
        shared = ReductionLinks(between=Link(self.outside / self.per_server, ETHERNET_LATENCY))
        reductions = shared if apart and devices > each else None
        return gpus(devices // each, each, inside, between, self.memory, reductions)


CLUSTERS = {
    "Priv-A": Hardware(TITAN_XP, 1, PCIE, 10 * GIGABIT, None),
    "Priv-B": Hardware(P100, 1, PCIE, 20 * GIGABIT, None),
    "Pub-A": Hardware(V100, 4, NVLINK, 10 * GIGABIT, None),
    "Pub-B": Hardware(V100, 8, NVLINK, 25 * GIGABIT),
}
"""Table 2. What data parallelism has in memory is known to fit, as the paper trains it; its own sizes don't count."""
FOUR = {
    "NVLink": Hardware(V100, 4, NVLINK, ETHERNET),
    "PCIe": Hardware(V100, 4, PCIE, ETHERNET),
    "Ethernet": Hardware(V100, 1, NVLINK, ETHERNET),
}
"""Section 8.4.1: four V100s in three networks; the first two are in one server."""


# ---- layers from kernels


def product(rows: float, depth: float, columns: float) -> Work:
    """Returns a sample's matrix product [rows, depth] x [depth, columns]; the weights' own bytes don't count."""
    return Work(MATMUL, 2.0 * rows * depth * columns, FLOAT * rows * (depth + columns), depth)


def passes(count: float, numbers: float) -> Work:
    """Returns a sample's elementwise kernel that reads or writes ``numbers`` numbers ``count`` times."""
    return Work(MEMORY, numbers, FLOAT * count * numbers)


def cost(device: Roofline, works: Iterable[Work]) -> Cost:
    """Returns the seconds of kernels, whose works are for one sample."""
    kernels = list(works)
    return Cost(device.launch * len(kernels), sum(device.seconds(work) - device.launch for work in kernels))


def layer(
    name: str,
    device: Roofline,
    forward: Sequence[Work],
    inputs: Sequence[Work],
    weights: Sequence[Work],
    *,
    parameters: float,
    output: float,
    residual: float,
    delayed: float,
    slots: int,
) -> LayerProfile:
    """Returns a layer's profile.

    Args:
        name: its name.
        device: what it runs on.
        forward: a sample's kernels of F.
        inputs: those of the gradients of its inputs (Bx).
        weights: those of the gradients of its weights (Bw).
        parameters: number of parameters.
        output: numbers of a sample that it hands on.
        residual: numbers of a sample kept from F to Bx.
        delayed: numbers of a sample kept from Bx to Bw.
        slots: numbers that the optimizer keeps for each parameter.
    """
    weight = cost(device, weights)
    update = parameters * FLOAT * (3 + 2 * slots) / (device.bandwidth * device.memory)
    return LayerProfile(
        name,
        cost(device, forward),
        cost(device, inputs) + weight,
        weight,
        residual_bytes=Cost(0.0, FLOAT * residual),
        delayed_bytes=Cost(0.0, FLOAT * delayed),
        output_bytes=Cost(0.0, FLOAT * output),
        parameter_bytes=round(FLOAT * parameters),
        slot_bytes=round(FLOAT * slots * parameters),
        apply_seconds=update,
    )


def chain(name: str, layers: Sequence[LayerProfile]) -> Profile:
    """Returns layers one after the other, each of which reads the output of the one before it."""
    tensors = [Tensor(i, (i + 1,), before.output_bytes) for i, (before, _) in enumerate(itertools.pairwise(layers))]
    return Profile(name, "", (1, 2), tuple(layers), tuple(tensors))


# ---- models


def units(layers: int) -> Profile:
    """Returns layers whose F, Bx and Bw take a unit of time each (figures 5, 6 and 12); the first needs no Bx."""
    return chain(
        f"{layers} layers",
        [
            LayerProfile(
                f"{index}", Cost(1.0), Cost(2.0 if index else 1.0), Cost(1.0), residual_bytes=Cost(1.0),
                delayed_bytes=Cost(1.0), parameter_bytes=1,
            )
            for index in range(layers)
        ],
    )  # fmt: skip


@dataclass(frozen=True)
class Transformer:
    """A stack of transformer blocks between an embedding and a head.

    Attributes:
        name: its name.
        blocks: their number.
        width: H.
        tokens: of a sample.
        words: of the vocabulary.
        predicted: tokens of a sample whose words are predicted; 0 for a classifier of whole samples.
    """

    name: str
    blocks: int
    width: int = 1024
    tokens: int = 128
    words: int = 30522
    predicted: int = 20

    def block(self, name: str, device: Roofline) -> LayerProfile:
        """Returns a block: attention and two dense layers, each with dropout, a residual connection and a norm.

        Attention heads have 64 numbers each.
        """
        t, h, scores = self.tokens, self.width, float(self.width // 64 * self.tokens**2)
        dense = [product(t, h, 3 * h), product(t, h, h), product(t, h, 4 * h), product(t, 4 * h, h)]
        attention = [
            Work(MATMUL, 2.0 * scores * 64, FLOAT * (scores + 2 * t * h), 64),
            Work(MATMUL, 2.0 * scores * 64, FLOAT * (scores + 2 * t * h), t),
        ]
        small = [passes(4, scores), passes(6, t * h), passes(2, 4 * t * h), passes(6, t * h)]
        return layer(
            name,
            device,
            [*dense, *attention, *small],
            [*dense, *attention, *attention, *small, *small],
            dense,
            parameters=12 * h * h + 13 * h,
            output=t * h,
            residual=16 * t * h + 2.25 * scores,
            delayed=16 * t * h,
            slots=ADAM,
        )

    def profile(self, device: Roofline = V100) -> Profile:
        """Returns embedding, blocks and head; the two share no parameters."""
        t, h = self.tokens, self.width
        look_up = [passes(4, t * h), passes(6, t * h)]
        embedding = layer(
            "embedding", device, look_up, [], look_up, parameters=(self.words + 512 + 2) * h, output=t * h,
            residual=t * h, delayed=2 * t * h, slots=ADAM,
        )  # fmt: skip
        hidden = [product(max(1, self.predicted), h, h)]
        logits = [product(self.predicted, h, self.words)] if self.predicted else []
        loss = [passes(4, self.predicted * self.words)] if self.predicted else []
        head = layer(
            "head", device, [*hidden, *logits, *loss], [*hidden, *logits, *loss], [*hidden, *logits],
            parameters=h * h + (self.words * h if self.predicted else 2 * h), output=1,
            residual=self.predicted * (self.words + 2 * h), delayed=self.predicted * (self.words + 2 * h), slots=ADAM,
        )  # fmt: skip
        blocks = [self.block(f"block_{index}", device) for index in range(self.blocks)]
        return chain(self.name, [embedding, *blocks, head])


FINE_TUNED = Transformer("BERT-24", 24, predicted=0)
"""Fine-tuning on MNLI: a classifier of whole samples."""
BERTS = {
    12: Transformer("BERT-12", 12, 768),  # the script's width
    24: Transformer("BERT-24", 24),
    36: Transformer("BERT-36", 36),
    48: Transformer("BERT-48", 48),
}

FFNN_WIDTH = 2048
"""Units of each layer of FFNN-16, as in `dapple_tf.models.ffnn`; the paper doesn't say."""
RNN_WIDTH = 1024
"""Units of each cell of RNN-16, as in `dapple_tf.models.rnn`; the paper doesn't say."""
RNN_TOKENS = 64


def ffnn(device: Roofline = V100, layers: int = 16) -> Profile:
    """Returns FFNN-16: fully connected layers with ReLU."""
    w = FFNN_WIDTH
    dense, relu = product(1, w, w), passes(2, w)
    return chain(
        "FFNN",
        [
            layer(
                f"layer_{index}", device, [dense, relu], [dense, relu], [dense], parameters=w * w, output=w,
                residual=w, delayed=2 * w, slots=MOMENTUM,
            )
            for index in range(layers)
        ],
    )  # fmt: skip


def rnn(device: Roofline = V100, cells: int = 16) -> Profile:
    """Returns RNN-16: cells that are LSTMs over all tokens.

    The product with the inputs is one kernel for all tokens, that with the state one for each token, as is the
    elementwise part.
    """
    w, t = RNN_WIDTH, RNN_TOKENS
    inputs, states = product(t, w, 4 * w), [product(1, w, 4 * w)] * t
    small = [passes(12, w)] * t
    return chain(
        "RNN",
        [
            layer(
                f"cell_{index}", device, [inputs, *states, *small], [inputs, *states, *small],
                [inputs, product(t, w, 4 * w)], parameters=8 * w * w, output=t * w, residual=7 * t * w,
                delayed=6 * t * w, slots=MOMENTUM,
            )
            for index in range(cells)
        ],
    )  # fmt: skip
