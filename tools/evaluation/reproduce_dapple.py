"""DAPPLE's evaluation (PPoPP'21, section 6): its claims, the parts that they are computed from, and the command.

    python -m tools.evaluation.reproduce_dapple

From docs/profiles.md: Tables 3 to 7, figures 11, 12 and 14, our plans beside strong opponents. `results` has the flags.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dapple_tf.common.text import counted as of_number
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import paper_experiments as experiments
from dapple_tf.tools.evaluation import paper_models as models
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.claims import BETTER, DATA, NEAR, SAME, WORSE, Band, Claim, Judged, Value
from dapple_tf.tools.evaluation.document import claimed, counted, table
from dapple_tf.tools.evaluation.paper_models import SAME_CUTS, SAME_CUTS_OTHERWISE, TABLE_4, TABLE_5, TABLE_6, PaperRow
from dapple_tf.tools.evaluation.paper_plans import times_of
from dapple_tf.tools.evaluation.results import FLAGS, FOLDER, Evaluation, Record, Results, reproduce

OWN, LINKS, HARDER = "paper", "links", "harder"
SETTINGS = {OWN: "the paper's setting", LINKS: "links of its released planner", HARDER: "harder"}
GAIN = Band(0.02, 0.05)
"""For Table 3, where 10 % is all that P_B gains in one of four models: there, no gain isn't the same gain."""
TIE, STEP, MORE = 0.01, 0.10, 1.05
"""Plans that differ by less are as fast; what counts as a change of efficiency; times as much that is more."""

_HEAVY_END = "the classifier takes as long as three LSTM layers, and counts with them here"
_SMALL = "of 128 samples a pipeline uses more devices than data parallelism can; Table 4's batch stands under the links"
_WHY = {
    "4/vgg-19/B": "one device for the dense layers has nothing to all-reduce",
    "4/vgg-19/C": "the text's cut; the numbers of the split mean another layer",
    "4/gnmt-16/A": _HEAVY_END,
    "4/gnmt-16/B": "four stages all-reduce less each",
    "4/gnmt-16/C": f"straight, the last device takes 4 times as long: {_HEAVY_END}",
    "4/bert-48/A": "a longer first stage fills the bubble of M = 4",
    "4/bert-48/B": "straight, too, with other cuts",
    "4/bert-48/C": "straight, too, with other cuts",
    "4/xlnet-36/B": "pairs all-reduce an eighth of the model each",
    "4/xlnet-36/C": "sixteen stages hand 7 MB of inputs on",
    "4/amoeba-36/A": "four stages have more micro-batches in flight",
    "4/amoeba-36/B": "11:5 must recompute by Table 1's memory, and doesn't divide 128 samples",
    "4/amoeba-36/C": "11:5 must recompute by Table 1's memory, and doesn't divide 128 samples",
    "6/vgg-19/A": "one device is enough for the dense layers",
    "6/bert-large/A": "four stages of four are as fast",
}


# ---- plans


def rows_once() -> Iterator[PaperRow]:
    """Yields the rows of Tables 4 and 6, without Table 6's repetitions of Table 4."""
    known = {(row.model, row.config, row.batch, row.plan) for row in TABLE_4}
    yield from TABLE_4
    yield from (row for row in TABLE_6 if (row.model, row.config, row.batch, row.plan) not in known)


def judged_plan(choice: str, plan: str, factor: float, *, fits: bool = True) -> Judged:
    """Returns the verdict about our planner's choice.

    Args:
        choice: how it compares with the paper's plan.
        plan: ours, as it is shown.
        factor: how many times as fast ours is.
        fits: whether the paper's has the memory.
    """
    verdict = BETTER if factor > 1 + TIE else WORSE
    if choice in (SAME_CUTS, SAME_CUTS_OTHERWISE) or (abs(factor - 1) <= TIE and fits):
        verdict = SAME
    elif choice == "same replicas":
        verdict = NEAR
    return Judged(f"{plan}, {factor:.2f}x" if choice != SAME_CUTS else plan, verdict)


def _plans(results: Results) -> Iterator[Claim]:
    for row in rows_once():
        whole, released = results[row.key], results[f"released, {row.key}"]
        own = judged_plan(released["choice"], released["ours"]["plan"], released["paper ms"] / released["ours"]["ms"])
        fastest = min(whole["ours"]["ms"], whole["ours from fewer ms"])
        factor = whole["paper"]["ms"] / fastest
        harder = judged_plan(whole["choice"], whole["ours"]["plan"], factor, fits=whole["paper"]["fits"])
        why = _WHY.get(row.key.replace("table ", "").replace(": ", "/"), "")
        yield Claim(f"{row.key}: plan", row.plan, {OWN: own, HARDER: harder}, why=why)


# ---- communication


def _ratios(results: Results) -> Iterator[Claim]:
    """Yields the ACRs; where only the network's speed differs, and the paper's as much, they are one."""
    known = set()
    for row in (*TABLE_4, *TABLE_6):
        if row.acr is None:
            continue
        speed = models.CONFIGS[row.config].inter_bandwidth or 0.0
        same = (row.model, row.plan, row.splits, round(row.acr * speed))
        if same not in known:
            known.add(same)
            ours: dict[str, Value] = {OWN: results[row.key]["ACR"], LINKS: results[f"links, {row.key}"]["ACR"]}
            why = "bytes of the profile over the network's rate"
            if row.model == "xlnet-36":
                why = "by chance: 11 of the 15 MB that cross are inputs that each layer reads"
            chance = row.model == "xlnet-36"
            yield Claim(f"{row.key}: ACR", row.acr, ours, "", why=why, untold=DATA, less=True, fitted=chance)


def _table_3(results: Results) -> Iterator[Claim]:
    for model, paper in models.TABLE_3.items():
        record = results[f"table 3: {model}"]
        own, smaller = _gain_of_p_b(record["steps"]), _gain_of_p_b(record["in proportion"] or {})
        why = "an ACR of 0.1 leaves P_A less to wait for" if paper > 1.25 else "our transfers take longer"
        yield Claim(f"table 3: {model}: P_B over P_A", paper, {OWN: own, HARDER: smaller}, band=GAIN, why=why)


def _gain_of_p_b(steps: Mapping[str, Any]) -> float | None:
    """Returns the gain at the fastest M at which P_A and P_B are two schedules; None if there is none."""
    apart = [step for step in steps.values() if step["P_A warm-up"] != step["P_B warm-up"]]
    fastest = min(apart, key=lambda step: float(step["P_B ms"]), default=None)
    return None if fastest is None else fastest["P_A ms"] / fastest["P_B ms"]


# ---- figures 11, 12 and 14

_PARALLEL = {(row.model, row.config) for row in TABLE_4 if row.plan == "DP"}


def speedup(results: Results, part: str, model: str, config: str, opponent: str) -> float:
    """Returns the speedup of the paper's plan over data parallelism, which is the paper's plan for some."""
    record = results[f"{part}{model}/{config}"]
    return 1.0 if (model, config) in _PARALLEL else times_of(record["paper"], record[opponent])


def _figure_11(results: Results) -> Iterator[Claim]:
    ways = {
        OWN: ("figure 11, GBS 128: ", "overlap"),
        LINKS: ("links, table 4: ", "overlap"),
        HARDER: ("figure 11, GBS 128: ", "data parallelism"),
    }

    for config, paper in models.FIGURE_11.items():
        averages = {
            setting: statistics.fmean(speedup(results, part, model, config, other) for model in models.FIGURE_11_MODELS)
            for setting, (part, other) in ways.items()
        }
        yield Claim(f"figure 11: over DP, average in {config}", paper, averages, why=_SMALL)
    largest = {setting: speedup(results, part, "gnmt-16", "C", other) for setting, (part, other) in ways.items()}
    yield Claim("figure 11: over DP, gnmt-16 in C", models.FIGURE_11_LARGEST, largest, why=_SMALL)
    for model in ("bert-48", "xlnet-36"):
        gains = {
            setting: speedup(results, part, model, "C", other) > MORE * speedup(results, part, model, "B", other)
            for setting, (part, other) in ways.items()
        }
        yield Claim(f"section 6.3: {model} gains more the slower the network", "more", gains)


def _pipedream(results: Results) -> Iterator[Claim]:
    def over(prefix: str, reading: str) -> dict[str, float]:
        """Returns model -> speedup of the paper's plan over PipeDream's."""
        keys = {row.model: f"{prefix}{row.key}" for row in TABLE_6}
        return {model: times_of(results[key]["paper"], results[key][reading]) for model, key in keys.items()}

    factors = {
        OWN: over("", "pipedream, first reading"),
        LINKS: over("links, ", "pipedream"),
        HARDER: over("", "pipedream"),
    }
    most = {setting: max(of_models.values()) for setting, of_models in factors.items()}
    why = "as PipeDream means its ranges, the gain is smaller"
    yield Claim("figure 12: most over PipeDream", models.PIPEDREAM_LARGEST, most, why=why)
    all_faster = {setting: min(of_models.values()) > 1 + TIE for setting, of_models in factors.items()}
    yield Claim("figure 12: faster than PipeDream for all models", "consistently", all_faster, why="not for amoeba-36")
    plans = results["PipeDream's planner"]
    for row in TABLE_6:
        ends = ",".join(map(str, released_ends(row)))
        replicas = ":".join(str(count) for _, count in row.pipedream or ()) or ":".join(["1"] * 16)
        tried = [plans[f"{row.model}, {links}"] for links in ("130 GB/s, transfers", "130 GB/s", "25 GB/s")]
        same = (plan for plan in tried if plan["replicas"] == replicas and plan["ends"] == (ends or plan["ends"]))
        found = {OWN: next(same, tried[0]), HARDER: plans[f"{row.model}, formula"]}
        ours: dict[str, Value] = {setting: _short(plan["replicas"]) for setting, plan in found.items()}
        yield Claim(f"{row.key}: PipeDream's plan", _short(replicas), ours)


def released_ends(row: PaperRow) -> list[int]:
    """Returns where Table 6's stages of PipeDream end in its own count, which has no input layers."""
    shift = 1 if row.model == "bert-large" else -1
    return [last - shift for last, _ in (row.pipedream or ())[:-1]]


def _short(replicas: str) -> str:
    counts = replicas.split(":")
    return f"straight ({len(counts)})" if set(counts) == {"1"} and len(counts) > 4 else replicas


def _lost(record: Record, column: str, ten: str = "10") -> float:
    """Returns the efficiency lost from 8 to 10 devices as a fraction; not a number where something doesn't fit."""
    milliseconds = (record[devices][column] for devices in ("8", ten))
    eight, more = (math.nan if step is None else step["ms"] for step in milliseconds)
    return 1 - 0.8 * float(eight / more)


def for_the_ethernet(record: Record, column: str) -> float:
    """Returns the part of a lost efficiency that ten devices in one server don't lose."""
    return 1 - (1 - _lost(record, column)) / (1 - _lost(record, column, "ten in one server"))


def _figure_14(results: Results) -> Iterator[Claim]:
    for model in models.FIGURE_14:
        record = results[f"figure 14: {model}"]
        slower = {OWN: for_the_ethernet(record, "overlap"), HARDER: for_the_ethernet(record, "data parallelism")}
        if not math.isnan(slower[OWN]):
            drops = {setting: _by(value, value >= STEP) for setting, value in slower.items()}
            yield Claim(f"figure 14: {model}: DP scales worse from 8 to 10 devices", "drops", drops)
        hybrid = _lost(record, "ours")
        smooth = {OWN: _by(hybrid, abs(hybrid) < STEP)}
        why = "the link between the servers is slow"
        yield Claim(f"figure 14: {model}: hybrid plans scale smoothly", "smoothly", smooth, why=why)


def _by(change: float, holds: bool) -> Judged:
    return Judged(f"by {change:.1%}", SAME if holds else WORSE)


# ---- tables 5 and 7


def predicted_sixteen() -> float:
    """Returns Table 5's throughput of DAPPLE with M = 16 over GPipe with M = 2, from its lines of M = 2 and 8 alone."""
    lines = {line.key: line for line in TABLE_5}
    few, more = (lines[f"dapple_a, M={count}"] for count in (2, 8))
    assert few.throughput and more.throughput
    seconds = [2 * line.micro_batches / line.throughput for line in (few, more) if line.throughput]
    sixteen = seconds[1] + 8 * (seconds[1] - seconds[0]) / 6
    return 32 / sixteen / few.throughput


def _table_5(results: Results) -> Iterator[Claim]:
    ours, paper = results["table 5"], {line.key: line for line in TABLE_5}
    fit = "the update's time and the memory of a micro-batch were solved from these lines"
    throughput = ours["dapple_a, M=16"]["samples/s"] / ours["gpipe, M=2"]["samples/s"]
    both: dict[str, Value] = {OWN: predicted_sixteen(), HARDER: throughput}
    yield Claim("table 5: throughput, DAPPLE M = 16 over GPipe M = 2", models.RATIO_5["throughput"], both)
    memory = {OWN: ours["dapple_a, M=16"]["GB"] / ours["gpipe, M=2"]["GB"]}
    yield Claim("table 5: memory, DAPPLE over GPipe", models.RATIO_5["memory"], memory, why=fit, fitted=True)
    for scheme, count in (("gpipe", 2), ("dapple_a", 2), ("dapple_a", 16)):
        first, second = f"{scheme} + RC, M={count}", f"{scheme}, M={count}"
        theirs = (paper[first].throughput or 0.0) / (paper[second].throughput or 1.0)
        ratio = ours[first]["samples/s"] / ours[second]["samples/s"]
        why = "B recomputes F, which is 38 % of F + B in the profile"
        yield Claim(f"table 5: {scheme}, M = {count}: throughput with RC over without", theirs, {OWN: ratio}, why=why)
    few, five = "gpipe + RC, M=2", "gpipe + RC, M=5"
    theirs = ((paper[five].gigabytes or 0.0) - (paper[few].gigabytes or 0.0)) / 3
    each = (ours[five]["GB"] - ours[few]["GB"]) / 3
    why = "4 MB cross the boundary, and nothing else of a micro-batch is kept"
    yield Claim(
        "table 5: GPipe + RC: memory of a micro-batch", theirs, {OWN: each}, " GB", why=why, untold=DATA, less=True
    )


def _table_7_part(devices: int) -> str:
    return f"table 7: {of_number(devices, 'device')}"


def _table_7(results: Results) -> Iterator[Claim]:
    for devices, paper in models.TABLE_7.items():
        part = _table_7_part(devices)
        why = "the samples of a micro-batch aren't in the text"
        layers = {OWN: float(results[part]["layers"])}
        yield Claim(f"{part}: layers of the largest BERT", float(paper), layers, "", why=why, fitted=True)


def claims(results: Results) -> list[Claim]:
    """Returns all claims."""
    groups = (_plans, _table_3, _figure_11, _pipedream, _figure_14, _table_5, _table_7, _ratios)
    return [claim for group in groups for claim in group(results)]


# ---- the page


def _over_opponents(results: Results, row: PaperRow) -> dict[str, float]:
    """Returns whose -> how many times as long the step of their best plan takes as ours."""
    record = results[f"opponents, {row.key}"]
    return {who: times_of(record["ours"], other) for who, other in record.items() if who != "ours" and other}


def _opponents(results: Results) -> str:
    rows = []
    for row in TABLE_4:
        over, ours = _over_opponents(results, row), results[f"opponents, {row.key}"]["ours"]
        who = min(over, key=lambda name: over[name])
        plan = f"{ours['plan']}, M = {ours['M']}, {ours['schedule']}"
        as_fast = times_of(ours, results[row.key]["paper"])
        rows.append([row.key.removeprefix("table 4: "), plan, ours["ms"], as_fast, who, f"{over[who]:.3f}"])
    header = ["row", "our plan with everything", "ms", "times as fast as the paper's", "strongest opponent", "over it"]
    return table(header, rows)


def texts(results: Results, all_claims: Sequence[Claim]) -> dict[str, str]:
    """Returns what the page's marks stand for."""
    plans = [claim for claim in all_claims if claim.name.endswith(": plan")]
    choices = [results[f"released, {row.key}"]["choice"] for row in TABLE_4]
    paper_replicas = sum(choice in (SAME_CUTS, SAME_CUTS_OTHERWISE, "same replicas") for choice in choices)
    same_cuts = sum(choice in (SAME_CUTS, SAME_CUTS_OTHERWISE) for choice in choices)
    whole = [times_of(results[row.key]["ours"], results[row.key]["paper"]) for row in TABLE_4]
    least = min(over for row in TABLE_4 for over in _over_opponents(results, row).values())
    over = {
        row.model: times_of(results[f"links, {row.key}"]["paper"], results[f"links, {row.key}"]["pipedream"])
        for row in TABLE_6
    }
    measured = read_results(FOLDER / "dapple_measured.json")["table_5"]
    gpipe, _, dapple = measured["records"]
    gain = dapple["samples_per_s_ratio"]
    return {
        "measured count": gpipe["variant"].rpartition(" ")[2],
        "measured limit": f"{gpipe['limit_mb']['median']:.0f}",
        "measured gpipe": f"{gpipe['peak_mb']['median']:.0f}",
        "measured dapple": f"{dapple['peak_mb']['median']:.0f}",
        "measured gain": f"{gain['median']:.2f}x ({gain['low']:.2f} to {gain['high']:.2f})",
        "measured load": f"{measured['machine']['load_1min']:.0f}",
        "counts": counted(all_claims, SETTINGS),
        "plans": claimed(plans, {OWN: "in the released planner's space", HARDER: "in all of ours"}),
        "claims": claimed([claim for claim in all_claims if claim not in plans], SETTINGS),
        "opponents": _opponents(results),
        "replicas": str(paper_replicas),
        "cuts": str(same_cuts),
        "most": f"{max(whole):.2f}",
        "least": f"{100 * (1 - least):.1f}",
        "over pipedream": ", ".join(f"{model} {factor:.2f}x" for model, factor in over.items()),
    }


def parts() -> dict[str, Callable[[], Record]]:
    """Returns all parts: name -> what computes its record. The ones that take long come first."""
    of = functools.partial
    return {
        **{f"opponents, {row.key}": of(experiments.run_opponents, row) for row in TABLE_4},
        **{f"released, {row.key}": of(experiments.run_released, row) for row in rows_once()},
        **{row.key: of(experiments.run_row, row) for row in (*TABLE_4, *TABLE_6)},
        **{
            f"links, {row.key}": of(experiments.run_links, row)
            for row in (*TABLE_4, *TABLE_6)
            if row.model != "resnet-50"
        },
        **{f"figure 14: {model}": of(experiments.run_scaling, model) for model in models.FIGURE_14},
        **{
            f"figure 11, GBS 128: {row.model}/{row.config}": of(experiments.run_small_batch, row)
            for row in TABLE_4
            if row.model in models.FIGURE_11_MODELS
        },
        **{f"table 3: {model}": of(experiments.run_policies, model) for model in models.TABLE_3},
        "PipeDream's planner": experiments.run_pipedream,
        "table 5": experiments.run_table_5,
        **{_table_7_part(devices): of(experiments.run_table_7, devices) for devices in models.TABLE_7},
    }


EVALUATION = Evaluation(
    "dapple",
    "DAPPLE: ours beside the paper's figures",
    SETTINGS,
    parts(),
    claims,
    texts,
    lambda: {"as fast": TIE, "a change of efficiency": STEP, "more": MORE, "DP of figure 11": len(_PARALLEL)},
)
main = functools.partial(reproduce, EVALUATION)

if __name__ == "__main__":
    command.start(main, FLAGS)
