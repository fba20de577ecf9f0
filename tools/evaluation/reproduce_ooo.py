"""Out-Of-Order BackProp's evaluation (EuroSys'22, section 8): its claims, the parts behind them, and the command.

    python -m tools.evaluation.reproduce_ooo

Figures 5, 10 to 13, a part of 7 and the discussion of k = 45. `results` has the flags.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import ooo_networks as networks
from dapple_tf.tools.evaluation import ooo_parallel as parallel
from dapple_tf.tools.evaluation import ooo_pipelines as pipelines
from dapple_tf.tools.evaluation.claims import DATA, GPU, NEAR, SAME, TEXT, UNTOLD, Claim, Value, counts
from dapple_tf.tools.evaluation.document import claimed, counted, table
from dapple_tf.tools.evaluation.ooo_models import FOUR
from dapple_tf.tools.evaluation.results import FLAGS, Evaluation, Record, Results, reproduce

OWN, SCRIPTS, HARDER = "paper", "scripts", "harder"
SETTINGS = {OWN: "the paper's setting", SCRIPTS: "1 GB/s; the scripts' micro-batches", HARDER: "harder"}
_PIPELINES = {OWN: "figure 12", SCRIPTS: "scripts", HARDER: "best"}
"""Setting -> micro-batches of figure 13: as many as GPUs, the published scripts', the best."""
_PARALLEL = {OWN: ("scripts", "wait-free"), SCRIPTS: ("slower", "wait-free"), HARDER: ("one all-reduce", "prioritised")}
"""Setting -> traffic of figure 10, and what BytePS does with k = 0."""

_BEST, _FORWARDED = "reverse first-k", "fast-forwarded Megatron"

Row = Mapping[str, Any]
Choose = Callable[[Sequence[float]], float]


# ---- one GPU


def _one_gpu(results: Results) -> Iterator[Claim]:
    gains: Row = results["one GPU"]
    figure_7 = [key for key in gains if key.endswith((", 32", ", 64")) and "k = 12" not in key and "0.25" not in key]
    claims: list[tuple[str, float, float]] = []
    for family, least, most, keys in (
        ("DenseNet-121", 1.09, 1.21, figure_7),
        ("MobileNetV3", 1.07, 1.19, figure_7),
        ("ResNet", 1.03, 1.06, figure_7),
        ("MobileNetV3, 128 images", 1.04, 1.09, [key for key in gains if key.endswith(", 128")]),
    ):
        shown = [gains[key] for key in keys if key.startswith(family.partition(",")[0])]
        claims.append((f"figure 7: {family}: OOO-XLA over XLA, least", least, min(shown)))
        claims.append((f"figure 7: {family}: OOO-XLA over XLA, most", most, max(shown)))
    for key, paper in (("DenseNet-121, k = 12", 1.54), ("MobileNetV3, alpha = 0.25", 1.58)):
        claims.append((f"section 8.2: {key}: OOO-XLA over XLA", paper, gains[f"{key}, 32"]))
    for model, paper in (("ResNet, least", 1.01), ("MobileNetV3, alpha = 0.25, most", 1.15)):
        claims.append((f"section 8.2: {model}: two streams over one", paper, 1.0))
    for name, paper, ours in claims:
        yield Claim(name, paper, {OWN: ours}, why=GPU, fitted=True)


# ---- pipelines


def units(results: Results) -> list[Claim]:
    """Returns schedules in units of time, which no model of hardware is in: they are counted apart."""
    rows = (
        ("figure 5", "fast_forward", 23 / 19),
        ("figure 5", "modulo", 23 / 16),
        ("section 8.4.1", "fast_forward", 1.22),
        ("section 8.4.1", "modulo", 1.62),
    )
    return [
        Claim(f"{place}: {policy} over GPipe, in units", paper, {OWN: _ratio(results["units"][place], "gpipe", policy)})
        for place, policy, paper in rows
    ]


def _ratio(row: Row, above: str, below: str) -> float:
    return float(row[above] / row[below])


_PIPE_2, _GROUPS = "OOO-Pipe2, groups of 1", "OOO-Pipe2, groups of 2"


def _fine_tuning(results: Results) -> Iterator[Claim]:
    def over(model: str, network: str, above: str, below: str) -> dict[str, Value]:
        rows = {setting: results[f"figure 11: {model}, {network}, {name}"] for setting, name in _FINE.items()}
        return {setting: _ratio(row, above, below) for setting, row in rows.items()}

    bert, sizes = partial(over, "BERT-24"), "the model's sizes"
    yield Claim("figure 11: BERT-24: OOO-Pipe1 over GPipe", 1.15, bert("NVLink", "GPipe", "OOO-Pipe1"))
    both = 1.59, 1.70  # of figure 11 (a) and (b)
    yield Claim("figure 11: BERT-24: OOO-Pipe2 over GPipe", both, bert("NVLink", "GPipe", _PIPE_2))
    why = "starting a step isn't simulated"
    yield Claim("figure 11: BERT-24: OOO-Pipe2 over one GPU", 3.2, bert("NVLink", "single", _PIPE_2), why=why)
    yield Claim("figure 11: BERT-24: OOO-Pipe2 over GPipe, PCIe", 1.58, bert("PCIe", "GPipe", _PIPE_2))
    why = "transfers take as long as a group's forward, and hold up tasks"
    ours = bert("Ethernet", "GPipe", _GROUPS)
    yield Claim("figure 11: BERT-24: OOO-Pipe2 over GPipe, Ethernet", 1.48, ours, why=why)
    why = "a part of twice the bytes hides behind computation"
    ours = bert("Ethernet", _GROUPS, _PIPE_2)
    yield Claim("section 8.4.1: groups of one over two, Ethernet", 0.5, ours, unit="", why=why)
    papers = {"NVLink": 0.05, "PCIe": 0.16, "Ethernet": 1.8}
    transfers = results["transfers"]
    network = max(papers, key=lambda name: abs(transfers[name] / papers[name] - 1))
    why = "the paper's three ratios aren't in proportion to its bandwidths"
    name = f"section 8.4.1: transfer over computation, {network} (of three)"
    yield Claim(name, papers[network], {OWN: transfers[network]}, "", why=why, untold=DATA)
    why = "GPipe's peak is before the first backward"
    memory = {OWN: _ratio(results["figure 11: BERT-24, NVLink, paper"], "OOO-Pipe1 GB", "GPipe GB")}
    yield Claim("section 8.4.1: memory of OOO-Pipe1 over GPipe", 1.11, memory, why=why, less=True)
    why = "kernels that need no state delay those that do on a GPU; here a stage runs them in order"
    yield Claim("figure 11: RNN: OOO-Pipe2 over GPipe", 1.99, over("RNN", "NVLink", "GPipe", _PIPE_2), why=why)
    for name, paper, ours in (
        ("RNN: OOO-Pipe2 over no pipeline", 1.47, over("RNN", "NVLink", "MP", _PIPE_2)),
        ("FFNN: OOO-Pipe1 over GPipe", 1.18, over("FFNN", "NVLink", "GPipe", "OOO-Pipe1")),
        ("FFNN: OOO-Pipe2 over GPipe", 1.5, over("FFNN", "NVLink", "GPipe", _PIPE_2)),
    ):
        yield Claim(f"figure 11: {name}", paper, ours, why=f"{TEXT}: {sizes}", fitted=True)


_FINE = {OWN: "paper", HARDER: "best"}


def _pre_training(results: Results) -> Iterator[Claim]:
    def of(part: str, sizes: Sequence[int], above: str, below: str, choose: Choose) -> dict[str, Value]:
        return {
            setting: choose([
                _ratio(results[f"figure 13 {part.format(count)}, {name}"], above, below) for count in sizes
            ])
            for setting, name in _PIPELINES.items()
        }  # fmt: skip

    few, bubble = (
        "more micro-batches make the bubble that it fills smaller",
        "interleaving leaves a bubble of a few per cent",
    )
    weak: Sequence[tuple[str, Sequence[int], float, Choose]] = (
        ("BERT-12 on 8: OOO-Pipe2 over GPipe", (8,), 1.73, max),
        ("larger BERTs on 16 to 32: OOO-Pipe2 over GPipe, least", (16, 24, 32), 1.41, min),
        ("larger BERTs on 16 to 32: OOO-Pipe2 over GPipe, most", (16, 24, 32), 1.45, max),
    )
    for name, sizes, paper, choose in weak:
        ours = of("(a): {} GPUs", sizes, "GPipe", "OOO-Pipe2", choose)
        yield Claim(f"figure 13: {name}", paper, ours, why=few)
    for blocks in (24, 48):
        eight, more = (f"figure 13 (b): BERT-{blocks} on {count}" for count in (8, 32))
        ours = {
            setting: results[f"{eight}, {name}"]["OOO-Pipe2"] / results[f"{more}, {name}"]["OOO-Pipe2"]
            for setting, name in _PIPELINES.items()
        }
        why = "with M = GPUs, 32 GPUs have four times the micro-batches"
        yield Claim(f"figure 13: BERT-{blocks}: OOO-Pipe2 on 32 over 8", 2.5, ours, why=why)
    three, average = (8, 16, 24), statistics.fmean
    rows: Sequence[tuple[str, Sequence[int], str, str, float, Choose, str]] = (
        (" on 8: OOO-Pipe2 over DAPPLE", (8,), "DAPPLE", "OOO-Pipe2", 1.47, max, few),
        (" on 16: OOO-Pipe2 over DAPPLE", (16,), "DAPPLE", "OOO-Pipe2", 1.29, max, few),
        (": OOO-Pipe2 over Megatron 2, least", three, "Megatron", "OOO-Pipe2", 1.136, min, bubble),
        (": OOO-Pipe2 over Megatron 2, most", three, "Megatron", "OOO-Pipe2", 1.292, max, bubble),
        (": fast-forwarding over Megatron 2, average", three, "Megatron", _FORWARDED, 1.204, average, bubble),
        (": fast-forwarding over Megatron 2, most", three, "Megatron", _FORWARDED, 1.275, max, bubble),
    )
    for name, sizes, above, below, paper, choose, why in rows:
        ours = of("(b): BERT-48 on {}", sizes, above, below, choose)
        yield Claim(f"section 8.4.2: BERT-48{name}", paper, ours, why=why)


# ---- data parallelism


def _data_parallel(results: Results) -> Iterator[Claim]:
    def of(rows: Sequence[parallel.Row], below: Mapping[str, str], choose: Choose = max) -> dict[str, Value]:
        return {
            setting: choose([_ratio(results[figure_10_part(*row)][traffic], below[setting], _BEST) for row in rows])
            for setting, (traffic, _) in _PARALLEL.items()
        }

    every = parallel.figure_10_rows()
    shown = [row for row in every if row[0] in parallel.SHOWN]
    large = [row for row in shown if row[2] >= 16 and row[1] == "Pub-A"]
    p100 = [row for row in shown if row[1] == "Priv-B"]
    small = [row for row in shown if row[2] <= 4]
    families = {name: [row for row in every if row[0].startswith(name)] for name in ("DenseNet", "MobileNet")}
    titan, twenty = ("ResNet-101", "Priv-A", 8), ("ResNet-101", "Priv-B", 20)
    byte_ps = {setting: below for setting, (_, below) in _PARALLEL.items()}
    fast, inside = "at line rate nothing is left to hide", "NVLink hides all"
    more = "the scripts' traffic leaves more to hide than theirs"
    claims: list[tuple[str, float, Sequence[parallel.Row], Choose, str]] = [
        ("Titan Xp, ResNet-101 on 8: over BytePS", 1.153, [titan], max, fast),
        ("P100, ResNet-101 on 20: over BytePS", 1.271, [twenty], max, fast),
        ("V100, ResNet-50 on 16: over BytePS", 1.265, [("ResNet-50", "Pub-A", 16)], max, fast),
        ("V100, ResNet-101 on 8: over BytePS", 1.198, [("ResNet-101", "Pub-A", 8)], max, fast),
        ("V100 on 16 to 48: over BytePS, least", 1.1, large, min, fast),
        ("P100 on 16 and 20: over BytePS, least", 1.1, p100, min, fast),
        ("V100 on 2 and 4, NVLink: over BytePS, least", 1.01, small, min, inside),
        ("V100 on 2 and 4, NVLink: over BytePS, most", 1.05, small, max, inside),
        ("DenseNet: over BytePS, most", 1.10, families["DenseNet"], max, more),
        ("MobileNet: over BytePS, most", 1.053, families["MobileNet"], max, more),
    ]
    for name, paper, rows, choose, why in claims:
        yield Claim(f"section 8.3: {name}", paper, of(rows, byte_ps, choose), why=why)
    horovod = dict.fromkeys(_PARALLEL, "wait-free")
    for name, paper, row in (("Titan Xp, ResNet-101 on 8", 1.89, titan), ("P100, ResNet-101 on 20", 3.5, twenty)):
        why = "Horovod is taken as wait-free at line rate"
        yield Claim(f"section 8.3: {name}: over Horovod", paper, of([row], horovod), why=why)
    waiting = results["k = 45"]
    name = "section 8.3: Bw of layers 2 to 45 over computation (85 of 380 ms)"
    yield Claim(name, 85 / 380, {OWN: waiting["scripts"]["Bw of layers 2 to 45"]}, "")
    for what, milliseconds, key in (("BytePS", 350, ""), ("k = 45", 200, "k = 45")):
        waits = {setting: waiting[traffic][key or below] for setting, (traffic, below) in _PARALLEL.items()}
        name = f"section 8.3: waiting with {what} over computation ({milliseconds} of 380 ms)"
        yield Claim(name, milliseconds / 380, waits, "", less=True)


def figure_10_part(network: str, cluster: str, devices: int) -> str:
    """Returns the name of a part of figure 10."""
    return f"figure 10: {network} on {devices} of {cluster}"


def claims(results: Results) -> list[Claim]:
    """Returns all claims but those in units."""
    groups = (_fine_tuning, _pre_training, _data_parallel, _one_gpu)
    return [claim for group in groups for claim in group(results)]


# ---- the page


def texts(results: Results, all_claims: Sequence[Claim]) -> dict[str, str]:
    """Returns what the page's marks stand for."""
    row, own = results[figure_10_part("ResNet-50", "Pub-A", 16)]["scripts"], counts(all_claims, OWN)
    return {
        "counts": counted(all_claims, SETTINGS),
        "claims": claimed(all_claims, SETTINGS),
        "units": table(["claim", "paper", "ours"], [
            [claim.name, claim.text(claim.paper), claim.text(claim.ours[OWN])] for claim in units(results)
        ]),
        "same": str(own[SAME]),
        "near": str(own[NEAR]),
        "told": str(len(all_claims) - own[UNTOLD]),
        "carried": f"{_ratio(row, 'wait-free', 'prioritised'):.3f}",
        "reversed": f"{_ratio(row, 'prioritised', 'reverse first-k'):.3f}",
    }  # fmt: skip


def parts() -> dict[str, Callable[[], Record]]:
    """Returns all parts: name -> what computes its record. The ones that take long come first."""
    made: dict[str, Callable[[], Record]] = {}
    for setting, devices in itertools.product(("best", "scripts", "figure 12"), pipelines.SCRIPTS):
        for blocks in pipelines.STRONG:
            name = f"figure 13 (b): BERT-{blocks} on {devices}, {setting}"
            made[name] = partial(pipelines.strong_scaling, blocks, devices, setting)
        made[f"figure 13 (a): {devices} GPUs, {setting}"] = partial(pipelines.weak_scaling, devices, setting)
    for model, network in (*(("BERT-24", network) for network in FOUR), ("RNN", "NVLink"), ("FFNN", "NVLink")):
        for name, sizes in (("paper", (pipelines.FINE_TUNING,)), ("best", pipelines.FINE_COUNTS)):
            key = f"figure 11: {model}, {network}, {name}"
            made[key] = partial(pipelines.fine_tuning, model, network, sizes)
    for row in parallel.figure_10_rows():
        made[figure_10_part(*row)] = partial(parallel.figure_10, *row)
    made["k = 45"] = parallel.k_45
    made["one GPU"] = networks.issued_in_advance
    made["transfers"] = pipelines.transfers
    made["units"] = pipelines.unit_steps
    return made


EVALUATION = Evaluation(
    "ooo",
    "Out-Of-Order BackProp: ours beside the paper's",
    SETTINGS,
    parts(),
    lambda results: [*claims(results), *units(results)],
    lambda results, all_claims: texts(results, [claim for claim in all_claims if not claim.name.endswith("in units")]),
    lambda: {"slower": parallel.SLOWER},
)
main = partial(reproduce, EVALUATION)

if __name__ == "__main__":
    command.start(main, FLAGS)
