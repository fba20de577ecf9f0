"""What Out-Of-Order BackProp (EuroSys'22) claims with a number, and whether our records come to it.

A claim has a setting: that of the paper's text, or else of its published scripts. The bands are the same for all.
A claim is

* reproduced: our figure is within 10 % of the paper's; of a speedup also the gain over 1 is between half and twice
  the paper's, since 1.04 isn't 1.15;
* near: within 25 %, the gain between a third and three times;
* reproduced otherwise: neither, but it is reproduced under the one other setting that counts for all claims of its
  figure (`FIGURE_10`, `FIGURE_13`);
* not reproduced: none of these, whether too small or too large;
* with a part left out: our arithmetic leaves out what could only add to it (`Claim.partial`), and it isn't beyond the
  second band already;
* at a guessed size: it would be one of the first three, but at sizes of a model that the paper doesn't give.

A range over several rows is two claims, about the least and about the most row; where the paper has another claim
about one of these, it is counted once. A number that stands for a range by itself counts by the nearest end.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.tools.evaluation.ooo_parallel import APART, RING, RUNS, SHOWN

BAND, GAIN = 0.10, 2.0
NEAR_BAND, NEAR_GAIN = 0.25, 3.0
REPRODUCED, NEAR, OTHERWISE, NOT = "reproduced", "near", "reproduced otherwise", "not reproduced"
PARTLY, GUESSED, IN_UNITS = "with a part left out", "at a guessed size", "schedules in units"
BANDS = {REPRODUCED: (BAND, GAIN), NEAR: (NEAR_BAND, NEAR_GAIN)}
"""Status -> the fraction of the paper's number that ours may be off, and the most that gains may differ, either way."""
_CLOSE = 0.2
"""Share of a band next to its limits in which a number is close to them."""
STATUSES = (REPRODUCED, NEAR, OTHERWISE, NOT, PARTLY, GUESSED, IN_UNITS)

FIGURE_10 = {
    "one all-reduce, over prioritised communication": (RING, "prioritised"),
    "each GPU's by itself, over prioritised communication": (APART, "prioritised"),
    "one all-reduce, over wait-free communication": (RING, "wait-free"),
    "each GPU's by itself, over wait-free communication (as the scripts)": (APART, "wait-free"),
}
"""Section 8.3: setting -> traffic and BytePS. The second has the scripts' traffic, and counts otherwise.

Section 8.3 says that BytePS prioritises communication, so that a wait-free one is too weak an opponent to count. The
scripts start a BytePS worker for each GPU, which sends its gradients by itself, and leave no update over to the next
step where k = 0.
"""
FIGURE_13 = {
    "the text's batches, best of its ends": "best",
    "the scripts' micro-batches": "scripts",
    "as many micro-batches as GPUs (figure 12)": "figure 12",
}
"""Section 8.4.2: setting -> that of the records. The first is the text's rule, the second counts otherwise."""

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
        others: (setting, number) under other settings; only the first one counts.
        why: why it isn't reproduced.
        partial: whether our number leaves out what could only add to it; then it doesn't count, unless it is
            too large for the wider band already.
        guessed: whether sizes of the model are guesses.
        units: whether it is about a schedule in units of time, which no model of hardware is in.
    """

    name: str
    place: str
    low: float
    high: float
    ours: float | None
    speedup: bool = True
    others: tuple[tuple[str, float], ...] = ()
    why: str = ""
    partial: bool = False
    guessed: bool = False
    units: bool = False

    @property
    def paper(self) -> str:
        """The paper's number as a text."""
        return f"{self.low:.4g}" + (f" to {self.high:.4g}" if self.high != self.low else "")

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.partial:
            too_large = self.ours is None or self.ours > (1 + NEAR_BAND) * self.high
            return NOT if too_large else PARTLY
        status = self.verdict(self.ours)
        if status == NOT and self.others and self.verdict(self.others[0][1]) == REPRODUCED:
            status = OTHERWISE
        if self.units and status == REPRODUCED:
            return IN_UNITS
        return GUESSED if self.guessed and status != NOT else status

    @property
    def remark(self) -> str:
        """How it is reproduced otherwise, or why it isn't."""
        if self.status == OTHERWISE:
            setting, number = self.others[0]
            return f"{setting}: {number:.3f}"
        if self.partial and self.ours is not None and self.ours >= self.high:
            return f"as large without that part, which could only add to it: {self.why}"
        return "" if self.status in (REPRODUCED, IN_UNITS) else self.why

    @property
    def is_close(self) -> bool:
        """Whether it is within its band, and wouldn't be if that were a fifth narrower."""
        if self.status not in BANDS or self.ours is None:
            return False
        band, gain = BANDS[self.status]
        return not self._within(self.ours, (1 - _CLOSE) * band, gain ** (1 - _CLOSE))

    def verdict(self, number: float | None) -> str:
        """Returns the status of a number by itself: reproduced, near or not reproduced."""
        if number is None:
            return NOT
        return next((status for status, band in BANDS.items() if self._within(number, *band)), NOT)

    def _within(self, number: float, band: float, gain: float) -> bool:
        nearest = min(max(number, self.low), self.high)
        if abs(number - nearest) > band * abs(nearest):
            return False
        if not self.speedup or number == nearest or nearest <= 1:
            return True
        return 1 / gain <= (number - 1) / (nearest - 1) <= gain


def by_setting(judged: Iterable[Claim], settings: Iterable[str]) -> dict[str, Counter[str]]:
    """Returns setting -> how many claims of a figure are reproduced, near and not reproduced if only it counted.

    Args:
        judged: claims.
        settings: the settings of the figure; claims without them don't count.
    """
    first, *others = settings
    counts: dict[str, Counter[str]] = {setting: Counter() for setting in (first, *others)}
    for claim in with_settings(judged, (first, *others)):
        for setting, number in ((first, claim.ours), *claim.others):
            counts[setting][claim.verdict(number)] += 1
    return counts


def with_settings(judged: Iterable[Claim], settings: Iterable[str]) -> list[Claim]:
    """Returns the claims that have numbers under these settings, the first of which is their own."""
    _, *others = settings
    return [claim for claim in judged if [setting for setting, _ in claim.others] == others]


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
        yield Claim(f"eight layers in units, {names[policy]} over none", "figure 5", number, number, ours, units=True)
    sixteen = only(records["units"], figure="section 8.4.1")
    for policy, number in (("fast_forward", 1.22), ("modulo", 1.62)):
        ours = ratio(sixteen, "gpipe", policy)
        name = f"FFNN of 16 layers in units, {names[policy]} over GPipe"
        yield Claim(name, "8.4.1", number, number, ours, units=True)


_ISSUE = (
    "only issuing kernels in advance is in the arithmetic; the paper's number has two streams, too, which fill idle SMs"
)


def _one_gpu(records: Records) -> Iterator[Claim]:
    rows, ours = records["one_gpu"], "issued in advance over XLA"
    cases = (
        ("DenseNet-121", 1.09, 1.21, "figure 7"), ("MobileNetV3", 1.07, 1.19, "figure 7"),
        ("ResNet", 1.03, 1.06, "figure 7"), ("MobileNetV3", 1.04, 1.09, "8.2"),
    )  # fmt: skip
    for family, least, most, place in cases:
        large = place == "8.2"
        shown = [row for row in rows if str(row["network"]).startswith(family)]
        shown = [row for row in shown if row["samples"] == 128] if large else [*filter(_in_figure_7, shown)]
        gains = [number_of(row, ours) for row in shown]
        for word, number, gain in (("least", least, min(gains)), ("most", most, max(gains))):
            name = f"{family} on one GPU{', 128 images' if large else ''}, OOO-XLA over XLA, {word}"
            yield Claim(name, place, number, number, gain, why=_ISSUE, partial=True)
    for network, number in (("DenseNet-121, k = 12", 1.54), ("MobileNetV3, alpha = 0.25", 1.58)):
        gain = number_of(only(rows, network=network, samples=32), ours)
        yield Claim(
            f"{network}, on one GPU, OOO-XLA over XLA", "8.2", number, number, gain, why=_ISSUE, partial=True
        )  # fmt: skip
    why = "where kernels are issued in advance the arithmetic leaves nothing to a second stream: 1 by construction"
    for name, low, high in (("ResNet, least", 1.01, 1.02), ("MobileNetV3, alpha = 0.25, most", 1.15, 1.15)):
        yield Claim(
            f"{name}, on one GPU, two streams over one, issued in advance", "8.2", low, high, 1.0, why=why, partial=True
        )  # fmt: skip


def _in_figure_7(row: Record) -> bool:
    return row["network"] not in ("DenseNet-121, k = 12", "MobileNetV3, alpha = 0.25") and row["samples"] in (32, 64)


_PIPE_2 = "OOO-Pipe2, groups of 1"
_GUESSES = "the paper doesn't give the model's sizes, which are guesses here"
_FEW = "its gain is that of filling GPipe's bubble, which more micro-batches make smaller"


def _fine_tuning(records: Records) -> Iterator[Claim]:
    rows = records["fine_tuning"]
    bert = only(rows, model="BERT-24", network="NVLink", setting="paper")
    yield Claim("BERT-24, OOO-Pipe1 over GPipe", "figure 11 (a)", 1.15, 1.15, ratio(bert, "GPipe", "OOO-Pipe1"))
    yield Claim(
        "BERT-24, OOO-Pipe2 over GPipe, NVLink", "figure 11 (a) and (b)", 1.59, 1.70, ratio(bert, "GPipe", _PIPE_2)
    )
    yield Claim(
        "BERT-24, OOO-Pipe2 over one GPU", "figure 11 (a)", 3.2, 3.2, ratio(bert, "single", _PIPE_2),
        why="what one GPU and four do besides computing, such as starting a step, isn't in the simulation",
    )  # fmt: skip
    cell = only(rows, model="RNN", network="NVLink", setting="paper")
    yield Claim(
        "RNN, OOO-Pipe2 over cross-layer model parallelism", "figure 11 (a)", 1.47, 1.47, ratio(cell, "MP", _PIPE_2),
        why=_GUESSES, guessed=True,
    )  # fmt: skip
    yield Claim(
        "RNN, OOO-Pipe2 over GPipe", "figure 11 (a)", 1.99, 1.99, ratio(cell, "GPipe", _PIPE_2), guessed=True,
        why="the paper's GPipe is slower than no pipeline at all, since kernels that need no state delay those that do "
        "(8.4.1); the simulator runs a stage's kernels one after the other, and pipelining helps",
    )  # fmt: skip
    dense = only(rows, model="FFNN", network="NVLink", setting="paper")
    for name, place, number, system in (
        ("OOO-Pipe1", "8.4.1", 1.18, "OOO-Pipe1"), ("OOO-Pipe2", "figure 11 (a)", 1.5, _PIPE_2),
    ):  # fmt: skip
        gain = ratio(dense, "GPipe", system)
        yield Claim(f"FFNN, {name} over GPipe", place, number, number, gain, why=_GUESSES, guessed=True)
    row = only(rows, model="BERT-24", network="PCIe", setting="paper")
    yield Claim("BERT-24, OOO-Pipe2 over GPipe, PCIe", "figure 11 (b)", 1.58, 1.58, ratio(row, "GPipe", _PIPE_2))
    slow = only(rows, model="BERT-24", network="Ethernet", setting="paper")
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
    # Ours are one number, over three bandwidths: the one that is farthest off counts.
    transfers = [
        (str(row["network"]), number_of(row, "paper"), number_of(row, "transfer / F")) for row in records["transfers"]
    ]
    network, number, ours = max(transfers, key=lambda each: abs(each[2] / each[1] - 1))
    yield Claim(
        f"BERT-24, a transformer's transfer over its computation, {network} (of three networks)", "8.4.1", number,
        number, ours, False,
        why="bytes at the paper's bandwidths; the paper's own three ratios aren't in proportion to them either",
    )  # fmt: skip
    yield Claim(
        "BERT-24, memory of OOO-Pipe1 over GPipe's, at most", "8.4.1", 1.11, 1.11,
        ratio(bert, "OOO-Pipe1 GB", "GPipe GB"),
        why="GPipe's peak is before the first backward, when nothing is delayed yet",
    )  # fmt: skip


Number = Callable[[str], float]
"""Setting of the records -> our number."""


def _pre_training(records: Records) -> Iterator[Claim]:
    weak, strong = records["pre_training"], records["strong"]

    def over(rows: Sequence[Record], model: str, devices: int, above: str, below: str) -> Number:
        return lambda setting: ratio(only(rows, model=model, GPUs=devices, setting=setting), above, below)

    def of_all(choose: Callable[[list[float]], float], numbers: Sequence[Number]) -> Number:
        return lambda setting: choose([number(setting) for number in numbers])

    def scaling(model: str) -> Number:
        def number(setting: str) -> float:
            few, many = (only(strong, model=model, GPUs=count, setting=setting) for count in (8, 32))
            return number_of(few, "OOO-Pipe2") / number_of(many, "OOO-Pipe2")

        return number

    def claim(name: str, place: str, number: float, ours: Number, why: str) -> Claim:
        first, *others = ((text, ours(setting)) for text, setting in FIGURE_13.items())
        return Claim(name, place, number, number, first[1], True, tuple(others), why)

    small = over(weak, "BERT-12", 8, "GPipe", "OOO-Pipe2")
    yield claim("BERT-12 on 8 GPUs, OOO-Pipe2 over GPipe", "figure 13 (a)", 1.73, small, _FEW)
    models = (("BERT-24", 16), ("BERT-36", 24), ("BERT-48", 32))
    larger = [over(weak, *model, "GPipe", "OOO-Pipe2") for model in models]
    for word, number, choose in (("least", 1.41, min), ("most", 1.45, max)):
        name = f"BERT-24, 36 and 48 on 16, 24 and 32 GPUs, OOO-Pipe2 over GPipe, {word}"
        yield claim(name, "figure 13 (a)", number, of_all(choose, larger), _FEW)
    for model, layers in (("BERT-24", 24), ("BERT-48", 48)):
        most, least = -(-layers // 32), -(-layers // 8)
        why = (
            f"{layers} transformers keep {min(layers, 32)} of 32 GPUs busy, at most {most} on each, {least} on each of "
            f"8, which is no more than {least / most:g} times as fast; the bubble takes the rest"
        )
        yield claim(f"{model}, OOO-Pipe2 on 32 GPUs over 8", "figure 13 (b)", 2.5, scaling(model), why)
    why = "the more micro-batches, the smaller DAPPLE's bubble of (n - 1) / (M + n - 1)"
    for devices, number in ((8, 1.47), (16, 1.29)):
        ours = over(strong, "BERT-48", devices, "DAPPLE", "OOO-Pipe2")
        yield claim(f"BERT-48 on {devices} GPUs, OOO-Pipe2 over DAPPLE", "8.4.2", number, ours, why)
    against, alone = (
        [over(strong, "BERT-48", count, "Megatron", below) for count in (8, 16, 24)]
        for below in ("OOO-Pipe2", "fast-forwarded Megatron")
    )
    why = "interleaved stages leave a bubble of a few per cent at the scripts' micro-batches, and less at the best ones"
    for name, number, ours in (
        ("OOO-Pipe2 over Megatron 2, least of 8, 16 and 24 GPUs", 1.136, of_all(min, against)),
        ("OOO-Pipe2 over Megatron 2, most of 8, 16 and 24 GPUs", 1.292, of_all(max, against)),
        ("fast-forwarding in Megatron 2, average", 1.204, of_all(statistics.fmean, alone)),
        ("fast-forwarding in Megatron 2, most", 1.275, of_all(max, alone)),
    ):
        yield claim(f"BERT-48, {name}", "8.4.2", number, ours, why)


_LINE = "an all-reduce at line rate ends with the backward, and nothing is left to hide"
_HIDDEN = "prioritised communication hides what there is to hide, or the link is the limit whatever the order"
Chosen = Callable[[Record], bool]
"""Record -> whether it is one of those that a claim is about."""


def gains(rows: Sequence[Record], setting: str, chosen: Chosen) -> list[float]:
    """Returns the gains of reverse first-k in figure 10 under a setting of `FIGURE_10`.

    Args:
        rows: the figure's records. Where GPUs have a server each, all settings have the same traffic.
        setting: the setting.
        chosen: which records count.
    """
    traffic, above = FIGURE_10[setting]
    rows = [row for row in rows if row["step"] == RUNS and chosen(row)]
    both = {_place(row) for row in rows if row["traffic"] == APART}
    fitting = [row for row in rows if row["traffic"] == (traffic if _place(row) in both else RING)]
    return [ratio(row, above, "reverse first-k") for row in fitting]


def _place(row: Record) -> tuple[object, ...]:
    return row["network"], row["cluster"], row["GPUs"]


def _at(cluster: str, counts: Sequence[int], networks: Sequence[str] = SHOWN) -> Chosen:
    return lambda row: row["cluster"] == cluster and row["GPUs"] in counts and row["network"] in networks


def _either(*choices: Chosen) -> Chosen:
    return lambda row: any(chosen(row) for chosen in choices)


def _rows_of(rows: Sequence[Record], chosen: Chosen) -> int:
    return len(gains(rows, next(iter(FIGURE_10)), chosen))


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"


def _of(family: str) -> Chosen:
    return lambda row: str(row["network"]).startswith(family)


def _parallel(records: Records) -> Iterator[Claim]:
    rows = records["figure_10"]

    def claim(
        name: str, number: float, chosen: Chosen, choose: Callable[[list[float]], float] = max, why: str = _LINE
    ) -> Claim:
        first, *others = ((setting, choose(gains(rows, setting, chosen))) for setting in FIGURE_10)
        return Claim(f"{name}, OOO-BytePS over BytePS", "8.3", number, number, first[1], True, tuple(others), why)

    for device, cluster, network, count, number in (
        ("Titan XP", "Priv-A", "ResNet-101", 8, 1.153), ("P100", "Priv-B", "ResNet-101", 20, 1.271),
        ("V100", "Pub-A", "ResNet-50", 16, 1.265), ("V100", "Pub-A", "ResNet-101", 8, 1.198),
    ):  # fmt: skip
        yield claim(f"{device}, {network} on {count} GPUs", number, _at(cluster, [count], [network]))
    p100, v100, nvlink = (16, 20), (16, 32, 48), (2, 4)
    ethernet = _either(_at("Priv-B", p100), _at("Pub-A", v100))
    name = f"P100 on {_listed(p100)} and V100 on {_listed(v100)} GPUs"
    yield claim(f"{name}, least of {_rows_of(rows, ethernet)} rows", 1.1, ethernet, min)
    chosen = _at("Pub-A", nvlink)
    name = f"V100 on {_listed(nvlink)} GPUs with NVLink"
    for word, number, choose in (("least", 1.01, min), ("most", 1.05, max)):
        yield claim(f"{name}, {word} of {_rows_of(rows, chosen)} rows", number, chosen, choose)
    for family, number in (("DenseNet", 1.10), ("MobileNet", 1.053)):
        yield claim(f"{family}, most of all clusters", number, _of(family), why=_HIDDEN)
    why = "Horovod is taken as wait-free at line rate; the paper's is far from it, and doesn't say why"
    for device, cluster, count, number in (("Titan XP", "Priv-A", 8, 1.89), ("P100", "Priv-B", 20, 3.5)):
        row = only(rows, network="ResNet-101", cluster=cluster, GPUs=count, traffic=RING, step=RUNS)
        ours = ratio(row, "wait-free", "reverse first-k")
        name = f"{device}, ResNet-101 on {count} GPUs, OOO-BytePS over Horovod"
        yield Claim(name, "8.3", number, number, ours, why=why)


def _k_45(records: Records) -> Iterator[Claim]:
    rows = {traffic: only(records["k_45"], traffic=traffic, step=RUNS) for traffic in (RING, APART)}
    ring = rows[RING]
    yield Claim(
        "Bw of layers 2 to 45 over a step's computation (85 of 380 ms)", "8.3", 85 / 380, 85 / 380,
        ratio(ring, "Bw of layers 2 to 45", "compute"), False,
    )  # fmt: skip
    for name, milliseconds, own in (("BytePS (350 of 380 ms)", 350, ""), ("k = 45 (200 of 380 ms)", 200, "k = 45")):
        number = milliseconds / 380
        first, *others = (
            (setting, ratio(rows[traffic], f"waiting, {own or below}", "compute"))
            for setting, (traffic, below) in FIGURE_10.items()
        )
        yield Claim(
            f"waiting with {name}, over computation", "8.3", number, number, first[1], False, tuple(others), _LINE
        )
