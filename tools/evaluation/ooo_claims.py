"""What Out-Of-Order BackProp (EuroSys'22) claims with a number, and whether our records come to it.

A claim has a setting: that of the paper's text, or else of its published scripts. The bands are the same for all.
A claim is

* reproduced: our figure is within 10 % of the paper's; of a speedup also the gain over 1 is between half and twice
  the paper's, since 1.04 isn't 1.15;
* near: within 25 %, the gain between a third and three times;
* reproduced otherwise: neither, but it is reproduced under another setting that a figure or the scripts have. These
  were looked for where the first one doesn't come to the paper's number, which is why they count by themselves;
* not reproduced: none of these, whether too small or too large.

Where the paper gives a range, the nearest end counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.tools.evaluation.ooo_parallel import APART, RING, RUNS, SHOWN

BAND, GAIN = 0.10, 2.0
NEAR_BAND, NEAR_GAIN = 0.25, 3.0
REPRODUCED, NEAR, OTHERWISE, NOT = "reproduced", "near", "reproduced otherwise", "not reproduced"
STATUSES = (REPRODUCED, NEAR, OTHERWISE, NOT)

Record = Mapping[str, str | float | int | None]
Records = Mapping[str, Sequence[Record]]


@dataclass(frozen=True)
class Claim:
    """A number of the paper's beside ours.

    Attributes:
        name: what it is.
        place: its section or figure.
        low: the paper's number, or the lower end of its range.
        high: the upper end.
        ours: our number; None if there is none.
        speedup: whether it is a speedup, so that the gain over 1 counts, too.
        others: (how, number) under other settings.
        why: why it isn't reproduced.
    """

    name: str
    place: str
    low: float
    high: float
    ours: float | None
    speedup: bool = True
    others: tuple[tuple[str, float], ...] = ()
    why: str = ""

    @property
    def paper(self) -> str:
        """The paper's number as a text."""
        return f"{self.low:.4g}" + (f" to {self.high:.4g}" if self.high != self.low else "")

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.ours is not None:
            if self._within(self.ours, BAND, GAIN):
                return REPRODUCED
            if self._within(self.ours, NEAR_BAND, NEAR_GAIN):
                return NEAR
        return NOT if self.otherwise is None else OTHERWISE

    @property
    def otherwise(self) -> tuple[str, float] | None:
        """The first other setting under which it is reproduced, and its number."""
        return next(((how, number) for how, number in self.others if self._within(number, BAND, GAIN)), None)

    @property
    def remark(self) -> str:
        """How it is reproduced otherwise, or why it isn't."""
        if self.status == REPRODUCED:
            return ""
        others = self.others if self.status != OTHERWISE or self.otherwise is None else (self.otherwise,)
        texts = [f"{how}: {number:.3f}" for how, number in others]
        return "; ".join(texts if self.status == OTHERWISE else [self.why, *texts])

    def _within(self, number: float, band: float, gain: float) -> bool:
        nearest = min(max(number, self.low), self.high)
        if abs(number - nearest) > band * abs(nearest):
            return False
        if not self.speedup or number == nearest or nearest <= 1:
            return True
        return 1 / gain <= (number - 1) / (nearest - 1) <= gain


def claims(records: Records) -> list[Claim]:
    """Returns all claims about these records."""
    parts: Sequence[Callable[[Records], Iterator[Claim]]] = (
        _units,
        _one_gpu,
        _fine_tuning,
        _pre_training,
        _parallel,
        _k_45,
    )
    return [claim for part in parts for claim in part(records)]


def only(rows: Sequence[Record], **values: str | float) -> Record:
    """Returns the one record with these values; underscores in names stand for spaces.

    Raises:
        ValueError: there is none, or there are several.
    """
    wanted = {name.replace("_", " "): value for name, value in values.items()}
    fitting = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if len(fitting) != 1:
        raise ValueError(f"{len(fitting)} records have {wanted}; there must be one")
    return fitting[0]


def ratio(row: Record, above: str, below: str) -> float:
    """Returns the ratio of two numbers of a record.

    Raises:
        ValueError: one is missing.
    """
    return number_of(row, above) / number_of(row, below)


def number_of(row: Record, name: str) -> float:
    """Returns a number of a record.

    Raises:
        ValueError: it is missing.
    """
    value = row.get(name)
    if not isinstance(value, int | float):
        raise ValueError(f"record {dict(row)} has no number {name!r}")
    return float(value)


def _units(records: Records) -> Iterator[Claim]:
    names = {"fast_forward": "fast-forwarding", "modulo": "modulo allocation"}
    figure_5 = only(records["units"], figure="figure 5")
    for policy, number in (("fast_forward", 23 / 19), ("modulo", 23 / 16)):
        ours = ratio(figure_5, "gpipe", policy)
        yield Claim(f"eight layers in units, {names[policy]} over none", "figure 5", number, number, ours)
    sixteen = only(records["units"], figure="section 8.4.1")
    for policy, number in (("fast_forward", 1.22), ("modulo", 1.62)):
        ours = ratio(sixteen, "gpipe", policy)
        yield Claim(f"FFNN of 16 layers in units, {names[policy]} over GPipe", "8.4.1", number, number, ours)


def _one_gpu(records: Records) -> Iterator[Claim]:
    rows = records["one_gpu"]
    both, streams = "both over XLA", "two streams over one"
    why = "idle SMs, and whatever else than 4 us a kernel's start costs, aren't in the profiles"
    for family, least, most in (("DenseNet-121", 1.09, 1.21), ("MobileNetV3", 1.07, 1.19), ("ResNet", 1.03, 1.06)):
        shown = [row for row in rows if str(row["network"]).startswith(family) and not _outside_figure_7(row)]
        gains = [number_of(row, both) for row in shown]
        for word, number, ours in (("least", least, min(gains)), ("most", most, max(gains))):
            yield Claim(f"{family} on one GPU, OOO-XLA over XLA, {word}", "figure 7", number, number, ours, why=why)
    for network, number in (("DenseNet-121, k = 12", 1.54), ("MobileNetV3, alpha = 0.25", 1.58)):
        ours = number_of(only(rows, network=network, samples=32), both)
        yield Claim(f"{network}, on one GPU, OOO-XLA over XLA", "8.2", number, number, ours, why=why)
    least = min(number_of(only(rows, network=network, samples=64), streams) for network in ("ResNet-50", "ResNet-101"))
    yield Claim("ResNet on one GPU, two streams over one, least", "8.2", 1.01, 1.02, least, why=why)
    most = number_of(only(rows, network="MobileNetV3, alpha = 0.25", samples=32), streams)
    yield Claim("MobileNetV3, alpha = 0.25, on one GPU, two streams over one", "8.2", 1.15, 1.15, most, why=why)


def _outside_figure_7(row: Record) -> bool:
    return row["network"] in ("DenseNet-121, k = 12", "MobileNetV3, alpha = 0.25")


_PIPE_2 = "OOO-Pipe2, groups of 1"
_FEW = "its gain is that of filling GPipe's bubble, which more micro-batches make smaller"


def _fine_tuning(records: Records) -> Iterator[Claim]:
    rows = records["fine_tuning"]
    bert = only(rows, model="BERT-24", network="NVLink", M=4)
    yield Claim("BERT-24, OOO-Pipe1 over GPipe", "figure 11 (a)", 1.15, 1.15, ratio(bert, "GPipe", "OOO-Pipe1"))
    yield Claim("BERT-24, OOO-Pipe2 over GPipe", "figure 11 (a)", 1.59, 1.59, ratio(bert, "GPipe", _PIPE_2))
    yield Claim(
        "BERT-24, OOO-Pipe2 over one GPU", "figure 11 (a)", 3.2, 3.2, ratio(bert, "single", _PIPE_2),
        why="what one GPU and four do besides computing, such as starting a step, isn't in the simulation",
    )  # fmt: skip
    cell = only(rows, model="RNN", network="NVLink", M=4)
    yield Claim(
        "RNN, OOO-Pipe2 over cross-layer model parallelism", "figure 11 (a)", 1.47, 1.47, ratio(cell, "MP", _PIPE_2),
        why="widths and lengths are guesses",
    )  # fmt: skip
    yield Claim(
        "RNN, OOO-Pipe2 over GPipe", "figure 11 (a)", 1.99, 1.99, ratio(cell, "GPipe", _PIPE_2),
        why="the paper's GPipe is slower than no pipeline at all, since kernels that need no state delay those that do "
        "(8.4.1); the simulator runs a stage's kernels one after the other, and pipelining helps",
    )  # fmt: skip
    dense = only(rows, model="FFNN", network="NVLink", M=4)
    yield Claim("FFNN, OOO-Pipe1 over GPipe", "8.4.1", 1.18, 1.18, ratio(dense, "GPipe", "OOO-Pipe1"))
    yield Claim("FFNN, OOO-Pipe2 over GPipe", "figure 11 (a)", 1.5, 1.5, ratio(dense, "GPipe", _PIPE_2))
    for network, number in (("NVLink", 1.70), ("PCIe", 1.58)):
        row = only(rows, model="BERT-24", network=network, M=4)
        yield Claim(
            f"BERT-24, OOO-Pipe2 over GPipe, {network}", "figure 11 (b)", number, number, ratio(row, "GPipe", _PIPE_2)
        )
    slow = only(rows, model="BERT-24", network="Ethernet", M=4)
    two = "OOO-Pipe2, groups of 2"
    yield Claim(
        "BERT-24, OOO-Pipe2 in groups of two over GPipe, Ethernet", "figure 11 (b)", 1.48, 1.48,
        ratio(slow, "GPipe", two),
        why="at 1 GB/s a group's output takes as long as its forward, so that transfers hold up most tasks",
    )  # fmt: skip
    yield Claim(
        "BERT-24, groups of one over groups of two, Ethernet (throughput)", "8.4.1", 0.5, 0.5,
        ratio(slow, two, _PIPE_2), False,
        why="twice the bytes cost less than twice the time, as a part hides behind computation",
    )  # fmt: skip
    for network, number in (("NVLink", 0.05), ("PCIe", 0.16), ("Ethernet", 1.8)):
        row = only(records["transfers"], network=network)
        yield Claim(
            f"BERT-24, a transformer's transfer over its computation, {network}", "8.4.1", number, number,
            number_of(row, "transfer / F"), False,
            why="bytes at the paper's bandwidths; the paper's own three ratios aren't in proportion to them either",
        )  # fmt: skip
    yield Claim(
        "BERT-24, memory of OOO-Pipe1 over GPipe's, at most", "8.4.1", 1.11, 1.11,
        ratio(bert, "OOO-Pipe1 GB", "GPipe GB"),
        why="GPipe's peak is before the first backward, when nothing is delayed yet",
    )  # fmt: skip
    yield Claim(
        "BERT-24, memory of OOO-Pipe2 over GPipe's (\"similar\")", "8.4.1", 1.0, 1.0,
        ratio(bert, f"{_PIPE_2} GB", "GPipe GB"),
    )  # fmt: skip


def _pre_training(records: Records) -> Iterator[Claim]:
    rows = records["pre_training"]
    for model, devices, number in (
        ("BERT-12", 8, (1.73, 1.73)), ("BERT-24", 16, (1.41, 1.45)), ("BERT-36", 24, (1.41, 1.45)),
        ("BERT-48", 32, (1.41, 1.45)),
    ):  # fmt: skip
        yield _of_settings(
            rows, f"{model} on {devices} GPUs, OOO-Pipe2 over GPipe", "figure 13 (a)", number, model, devices,
            "GPipe", _FEW,
        )  # fmt: skip
    strong = records["strong"]
    for model in ("BERT-24", "BERT-48"):
        first, last = (only(strong, model=model, GPUs=count, setting="scripts") for count in (8, 32))
        ours = number_of(first, "OOO-Pipe2") / number_of(last, "OOO-Pipe2")
        yield Claim(
            f"{model}, OOO-Pipe2 on 32 GPUs over 8", "figure 13 (b)", 2.5, 2.5, ours,
            why="24 transformers keep 24 GPUs busy; with as much work on each the bubble is all that scales badly",
        )  # fmt: skip
    for devices, speedup in ((8, 1.47), (16, 1.29)):
        yield _of_settings(
            strong, f"BERT-48 on {devices} GPUs, OOO-Pipe2 over DAPPLE", "8.4.2", (speedup, speedup), "BERT-48",
            devices, "DAPPLE", "DAPPLE with the same micro-batches has a bubble of (n - 1) / (M + n - 1)",
        )  # fmt: skip
    settings = ("scripts", "figure 12")
    against, alone = (
        {
            setting: [
                ratio(only(strong, model="BERT-48", GPUs=count, setting=setting), "Megatron", below)
                for count in (8, 16, 24)
            ]
            for setting in settings
        }
        for below in ("OOO-Pipe2", "fast-forwarded Megatron")
    )
    why = "interleaved stages leave a bubble of a few per cent at the scripts' number of micro-batches"
    for name, low, numbers, reduce in (
        ("OOO-Pipe2 over Megatron 2, least of 8, 16 and 24 GPUs", 1.136, against, min),
        ("OOO-Pipe2 over Megatron 2, most of 8, 16 and 24 GPUs", 1.292, against, max),
        ("fast-forwarding in Megatron 2, average", 1.204, alone, lambda values: sum(values) / len(values)),
        ("fast-forwarding in Megatron 2, most", 1.275, alone, max),
    ):
        others = (("with as many micro-batches as GPUs (figure 12)", reduce(numbers["figure 12"])),)
        yield Claim(f"BERT-48, {name}", "8.4.2", low, low, reduce(numbers["scripts"]), True, others, why)


def _of_settings(
    rows: Sequence[Record], name: str, place: str, number: tuple[float, float], model: str, devices: int, above: str,
    why: str,
) -> Claim:  # fmt: skip
    """Returns a claim under the scripts' micro-batches, with figure 12's as another setting."""
    scripts, twelve = (only(rows, model=model, GPUs=devices, setting=setting) for setting in ("scripts", "figure 12"))
    others = (("with as many micro-batches as GPUs (figure 12)", ratio(twelve, above, "OOO-Pipe2")),)
    return Claim(name, place, *number, ratio(scripts, above, "OOO-Pipe2"), True, others, why)


_BARRIER = "against BytePS as the scripts run it, all updates before the next step"
_APART = "each GPU's gradients sent by itself, as the scripts do"
_LINE = "an all-reduce at line rate ends with the backward, and nothing is left to hide"


def _parallel(records: Records) -> Iterator[Claim]:
    rows = records["figure_10"]

    def gains(traffic: str, above: str, **values: str | int) -> list[float]:
        """Returns the gains of the records with these values, of the figure's ResNets if no network is given."""
        fitting = [
            row
            for row in rows
            if row["traffic"] == traffic
            and row["step"] == RUNS
            and ("network" in values or row["network"] in SHOWN)
            and all(row[name] == value for name, value in values.items())
        ]
        return [ratio(row, above, "reverse first-k") for row in fitting]

    def claim(
        name: str, number: tuple[float, float], choose: Callable[[list[float]], float], **values: str | int
    ) -> Claim:
        others = [(_BARRIER, choose(gains(RING, "wait-free", **values)))]
        apart = gains(APART, "wait-free", **values)
        if apart:
            others += [
                (_APART, choose(gains(APART, "prioritised", **values))),
                (f"{_APART}, {_BARRIER}", choose(apart)),
            ]
        ours = choose(gains(RING, "prioritised", **values))
        return Claim(f"{name}, OOO-BytePS over BytePS", "8.3", *number, ours, True, tuple(others), _LINE)

    yield claim("Titan XP, most (8 GPUs)", (1.153, 1.153), max, cluster="Priv-A", GPUs=8)
    yield claim("P100, ResNet-101 on 20 GPUs", (1.271, 1.271), max, cluster="Priv-B", GPUs=20, network="ResNet-101")
    yield claim("V100, ResNet-50 on 16 GPUs", (1.265, 1.265), max, cluster="Pub-A", GPUs=16, network="ResNet-50")
    yield claim("V100, ResNet-101 on 8 GPUs", (1.198, 1.198), max, cluster="Pub-A", GPUs=8, network="ResNet-101")
    for network in ("ResNet-50", "ResNet-101"):
        for devices in (16, 32, 48) if network == "ResNet-101" else (32, 48):
            yield claim(
                f"V100, {network} on {devices} GPUs", (1.1, 1.27), max, cluster="Pub-A", GPUs=devices, network=network
            )
        yield claim(
            f"V100, {network} on 4 GPUs with NVLink", (1.01, 1.05), max, cluster="Pub-A", GPUs=4, network=network
        )
    for name, number, networks in (
        ("DenseNet", 1.10, ("DenseNet-121", "DenseNet-169")), ("MobileNet", 1.053, ("MobileNetV3",)),
    ):  # fmt: skip
        least = [claim("", (number, number), max, network=network) for network in networks]
        best = max(least, key=lambda each: each.ours or 0.0)
        yield dataclasses.replace(best, name=f"{name}, most of all clusters, OOO-BytePS over BytePS")
    for name, number, values in (
        ("Titan XP, ResNet-101 on 8 GPUs", 1.89, {"cluster": "Priv-A", "GPUs": 8}),
        ("P100, ResNet-101 on 20 GPUs", 3.5, {"cluster": "Priv-B", "GPUs": 20}),
    ):
        ours = max(gains(RING, "wait-free", network="ResNet-101", **values))  # type: ignore[arg-type]
        why = "Horovod is taken as wait-free at line rate; the paper's is far from it, and doesn't say why"
        yield Claim(f"{name}, OOO-BytePS over Horovod", "8.3", number, number, ours, why=why)


def _k_45(records: Records) -> Iterator[Claim]:
    rows = records["k_45"]
    ring, apart = (only(rows, traffic=traffic, step=RUNS) for traffic in (RING, APART))
    yield Claim(
        "Bw of layers 2 to 45 over a step's computation (85 of 380 ms)", "8.3", 85 / 380, 85 / 380,
        ratio(ring, "Bw of layers 2 to 45", "compute"), False,
    )  # fmt: skip
    for name, number, ours, barrier in (
        ("waiting with BytePS (350 of 380 ms)", 350 / 380, "waiting, prioritised", "waiting, wait-free"),
        ("waiting with k = 45 (200 of 380 ms)", 200 / 380, "waiting, k = 45", None),
    ):
        others = [(_APART, ratio(apart, ours, "compute"))]
        if barrier is not None:
            others.append((f"{_APART}, {_BARRIER}", ratio(apart, barrier, "compute")))
        yield Claim(
            f"{name}, over computation",
            "8.3",
            number,
            number,
            ratio(ring, ours, "compute"),
            False,
            tuple(others),
            _LINE,
        )
    others = [(_APART, ratio(apart, "prioritised", "k = 45"))]
    others += [(f"{_APART}, {_BARRIER}", ratio(apart, "wait-free", "k = 45"))]
    speedup = ratio(ring, "prioritised", "k = 45")
    yield Claim("speedup of k = 45", "8.3", 1.27, 1.27, speedup, True, tuple(others), _LINE)
    yield Claim(
        "memory of reverse first-k over that without, less than", "8.3", 1.0, 1.01,
        ratio(ring, "GB, k = 45", "GB, k = 0"),
    )  # fmt: skip
