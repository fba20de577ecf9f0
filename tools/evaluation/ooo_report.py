"""The evaluation of Out-Of-Order BackProp as a document and a JSON file."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dapple_tf.tools.evaluation.ooo_claims import (
    NEAR,
    NOT,
    OTHERWISE,
    REPRODUCED,
    STATUSES,
    Claim,
    Record,
    Records,
    claims,
    number_of,
    only,
    ratio,
)
from dapple_tf.tools.evaluation.ooo_measured import measurements, section
from dapple_tf.tools.evaluation.ooo_parallel import APART, FITTED_4, RING, RUNS
from dapple_tf.tools.evaluation.paper_report import Cell, Table

COMMAND = "python -m tools.evaluation.reproduce_ooo"
MEASURED = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"
"""Folder with what was measured on hosts."""
BETTER = 0.01
"""Fraction by which our plan's step must be shorter to count as better."""

_TITLE = f"""# Out-Of-Order BackProp's evaluation, simulated again

Written by `{COMMAND} --write`, and computed again and compared by
`make results-ooo`, in a minute or two of one core of any machine, with the same result on each; don't edit. The paper is
Oh et al., EuroSys'22. **Simulated**, but for figure 7,
which is arithmetic, and the section *Measured*, of two CPU cores, in which no claim is made: no GPU was there. The same
numbers are in [ooo.json](ooo.json).

"""

_LIMITS = """## What no experiment here can show

Seconds of a V100, a P100 or a Titan XP, and images and sequences in a second: only ratios are compared. What the
paper's TensorFlow, XLA, BytePS, Horovod and GPipe do besides computing and sending. Accuracy isn't at issue: orders of
tasks don't change results, which tests of this repository show to the last bit.

**One GPU** (section 8.2). Figure 7 is arithmetic here: the starts of kernels, 4 us each, that are waited for or not.
Figures 1, 2, 8 and 9 aren't tried. What else they show comes from SMs that a kernel leaves idle, which follows from no
published shape: it takes each kernel's thread blocks and how a GPU shares its SMs between two streams, and a model with
these numbers free would be fitted to the very figures. `joint` (algorithm 1) is here, tested, and was measured on CPU
cores, where it gains nothing beyond the noise: [decision 0010](../decisions/0010-two-streams-on-one-device.md).
"""

_ASSUMED = """## What was assumed

* **Profiles.** The paper's aren't published. A kernel takes 4 us and the longer of its operations at a share of the
  peak and its bytes at a share of the bandwidth. Peaks and bandwidths are those of data sheets (V100 15.7 TFLOPS and
  900 GB/s, P100 9.3 and 732, Titan Xp 12.15 and 548, single precision); the shares are fitted to another paper (FD-DPS,
  table 6). Layers are those of the networks' own papers, with a profile for each convolution and each transformer.
* **Settings of the text**: batches of sections 8.1 to 8.4, networks of 50, 16 and 1 GB/s for figure 11 (8.4.1), line
  rates for table 2 (at first 1 GB/s was tried there, too; line rates were taken after some rows had been seen).
  **Settings of the published scripts** (github.com/mlsys-seo/ooo-backprop) where the text has
  none: 4 micro-batches for fine-tuning; BERT-12, 24, 36 and 48 with batches of 480, 320, 380 and 320 in 30, 32, 38 and
  40 micro-batches on 8, 16, 24 and 32 GPUs; BERT-12 768 wide, the others 1024; k = 45.
* **Guesses**, where neither has anything: FFNN's layers have 2048 units and its batch is 1024; RNN's cells have 1024
  units and read 64 tokens.
* **The same for every column**: two ways to share out blocks (as many on each device, or equal times), recomputation
  wherever it helps, 15 GB of a V100. "Best" is each system's own best number of micro-batches.
* OOO-Pipe1 is our policy `fast_forward`, OOO-Pipe2 `modulo`. Times of PipeDream are a bound: micro-batches times the
  longest stage, without any bubble, which asynchronous training may come to and a synchronous pipeline can't.
* **Data parallelism.** Up to 32 chunks of a network, reduced one by one. *Wait-free*: before the next step.
  *Prioritised*: any number of updates carried over into the next forward, whose first chunks are reduced first, or in
  the order of completion, whichever is faster. *Reverse first-k*: the same, and any k. The step is what our runtime
  runs (`Plan.carried_updates`); "section 2" is the paper's own problem, in which a reduction may lie across the
  border of two steps, and stands in the tables for comparison only.
* **Traffic.** *One all-reduce* is the fastest of ours, at line rate. The published scripts start a BytePS worker for
  each GPU, and each sends its gradients by itself, so that a machine's card carries four times as much: *each GPU's by
  itself*. They also leave no update over to the next step when k = 0: what they call BytePS is wait-free here.
* **Bands**: within 10 % of the paper's number is reproduced, within 25 % near; of a speedup the gain over 1 must also
  be between half and twice the paper's (near: a third and three times). Too large isn't reproduced either.
  Another setting counts by itself ("otherwise"); it was looked for only where the first one isn't reproduced.
"""


def write(records: Records, directory: pathlib.Path) -> list[Claim]:
    """Writes ooo.md and ooo.json; returns the claims."""
    directory.mkdir(parents=True, exist_ok=True)
    records = rounded(records)
    judged = claims(records)
    (directory / "ooo.json").write_text(to_json(records, judged), encoding="utf-8")
    text = document(records, judged, measurements(MEASURED))
    (directory / "ooo.md").write_text(text, encoding="utf-8")
    return judged


def rounded(records: Records) -> dict[str, list[dict[str, Any]]]:
    """Returns the records with numbers of six digits, as they are stored."""
    return {
        name: [
            {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}
            for row in rows
        ]
        for name, rows in records.items()
    }


def claim_records(judged: Iterable[Claim]) -> list[dict[str, str | float | None]]:
    """Returns claims as they are stored."""
    return [
        {
            "claim": claim.name,
            "place": claim.place,
            "paper": claim.paper,
            "ours": None if claim.ours is None else float(f"{claim.ours:.4g}"),
            "status": claim.status,
            "remark": claim.remark,
        }
        for claim in judged
    ]


def to_json(records: Records, judged: Sequence[Claim]) -> str:
    """Returns the text of ooo.json, a line for each record."""
    groups: Mapping[str, Sequence[Mapping[str, Any]]] = {**records, "claims": claim_records(judged)}
    parts = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for name, rows in groups.items()
    ]
    return "{\n" + ",\n".join([f' "command": {json.dumps(COMMAND)}', ' "kind": "simulated"', *parts]) + "\n}\n"


def document(records: Records, judged: Sequence[Claim], measured: Mapping[str, Any]) -> str:
    """Returns the text of ooo.md.

    Args:
        records: computed records.
        judged: their claims.
        measured: see `ooo_measured.measurements`.
    """
    parts = [_TITLE + _summary(records, judged), section(measured), _LIMITS, _ASSUMED]
    rows: list[list[Cell]] = [
        [claim.name, claim.place, claim.paper, _digits(claim.ours, 4), claim.status, claim.remark] for claim in judged
    ]
    header = ["claim", "where", "paper", "ours", "status", "how, or why not"]
    parts += [_section(Table("claims", "Claims", header, rows))]
    parts += [_section(table, text) for table, text in _tables(records)]
    return "\n".join(parts)


def _section(table: Table, text: str = "") -> str:
    return f"## {table.title}\n\n{text}{table.markdown()}\n"


_MEANING = {
    REPRODUCED: "within 10 %",
    NEAR: "within 25 %",
    OTHERWISE: "under another setting, named below",
    NOT: "further off, whether too small or too large",
}


def better(records: Records) -> list[tuple[Record, float]]:
    """Returns the settings in which our planner's step is shorter than the paper's best, and by which factor."""
    pairs = [(row, number_of(row, "OOO-Pipe") / number_of(row, "ours")) for row in records["ours"]]
    return [(row, factor) for row, factor in pairs if factor > 1 + BETTER]


def _summary(records: Records, judged: Sequence[Claim]) -> str:
    counts: list[list[Cell]] = [
        [status, sum(claim.status == status for claim in judged), _MEANING[status]] for status in STATUSES
    ]
    ahead = better(records)
    counts.append(
        ["better than the paper", len(ahead), f"of {len(records['ours'])} settings of figure 11, by our planner's plan"]
    )
    lines = [Table("", "", ["", "count", "what"], counts).markdown(), ""]
    for status in STATUSES:
        lines += [f"**{status.capitalize()}** (the paper's number, ours)", ""]
        groups: dict[str, list[str]] = {}
        for claim in judged:
            if claim.status == status:
                groups.setdefault(_reason(claim), []).append(_line(claim))
        lines += [f"* {reason}{'; '.join(texts)}" for reason, texts in groups.items()] + [""]
    lines += ["**Better than the paper** (our planner's plan, each system with its best micro-batches)", ""]
    lines += [f"* {row['model']}, {row['network']}: {factor:.2f} times as fast: {row['plan']}" for row, factor in ahead]
    lines += ["", _bubbles(records), "", _parts(records)]
    fitted = ", ".join(str(records["figure_4"][0][name]) for name in records["figure_4"][0] if name[1:2] == ":")
    lines += [
        "",
        f"**Fitted, not counted**: figure 4's numbers ({fitted} units), from which the times of its tasks were "
        "worked out, since its picture isn't in the text.",
        "",
        "**Not tried**: figures 1, 2, 8 and 9, for reasons below; the margins over Nimble; those over PipeDream "
        "(1.63x, 1.14x to 1.25x and 1.31x on average), which trains asynchronously, as nothing here does: figure 13's "
        "table has a bound of it without any bubble. GPT-3 has no number in the text, but a table here.",
        "",
    ]
    return "\n".join(lines)


def _bubbles(records: Records) -> str:
    """Returns what modulo allocation gains over GPipe if each system has its best number of micro-batches."""
    four, best = (only(records["fine_tuning"], model="BERT-24", network="NVLink", M=m) for m in (4, "best"))
    rows = [row for row in records["pre_training"] if row["setting"] == "best"]
    gains = [f"{ratio(row, 'GPipe', 'OOO-Pipe2'):.2f}x on {row['GPUs']}" for row in rows]
    name = "OOO-Pipe2, groups of 1"
    return (
        f"**What pipelines gain from**: OOO-Pipe2's {ratio(four, 'GPipe', name):.2f}x over GPipe for BERT-24 on four "
        f"V100s is that of the paper's 4 micro-batches. If each system has its best number of micro-batches, it is "
        f"{ratio(best, 'GPipe', name):.2f}x; and in figure 13 (a) {', '.join(gains)} GPUs."
    )


def _parts(records: Records) -> str:
    """Returns what the gain over a wait-free step is made of where the paper has its largest one with V100s."""
    row = only(
        records["figure_10"], network="ResNet-50", GPUs=16, cluster="Pub-A", traffic=APART, step=RUNS
    )  # fmt: skip
    carried, reversed_too = ratio(row, "wait-free", "prioritised"), ratio(row, "wait-free", "reverse first-k")
    line = only(records["figure_10"], network="ResNet-50", GPUs=16, cluster="Pub-A", traffic=RING, step=RUNS)
    return (
        f"**What data parallelism gains from**: of {reversed_too:.2f}x for ResNet-50 on 16 V100s, over BytePS and with "
        f"the traffic of the published scripts, {carried:.2f}x come from updates that are carried over into the next "
        f"forward, in its order, and {reversed_too / carried:.3f}x from reversing weight gradients. With one "
        f"all-reduce at line rate both together gain {ratio(line, 'wait-free', 'reverse first-k'):.2f}x."
    )


def _reason(claim: Claim) -> str:
    """Returns how a claim is reproduced, or why it isn't, as the beginning of a line."""
    if claim.otherwise is not None and claim.status == OTHERWISE:
        return f"*{claim.otherwise[0]}*: "
    if claim.status == REPRODUCED:
        return f"{claim.place[0].upper()}{claim.place[1:]}: "
    return f"*{claim.why}*: "


def _line(claim: Claim) -> str:
    ours = claim.otherwise[1] if claim.otherwise is not None and claim.status == OTHERWISE else claim.ours
    place = "" if claim.status == REPRODUCED else f" ({claim.place})"
    return f"{claim.name}{place}: {claim.paper}, {_digits(ours, 3)}"


# ---- tables


def _tables(records: Records) -> list[tuple[Table, str]]:
    return [
        (
            _plain("units", "Figures 5, 6 and 12: units", records["units"]),
            "F, Bx and Bw of a layer take one unit each. Figures 6 and 12 have no number in the text.\n\n",
        ),
        (
            _plain("figure_4", "Figure 4: data parallelism in units", records["figure_4"]),
            f"Five layers; dO and dW take one unit. The first row's times (F {FITTED_4[0]:g}) are fitted to the text's "
            "four numbers, the others to nothing.\n\n",
        ),
        (
            _plain("one_gpu", "Figure 7: starts of kernels on one V100", records["one_gpu"], _ONE_GPU),
            "Milliseconds of a step, by arithmetic, not simulated: with all starts waited for (XLA), without those of "
            "weight gradients (two streams), and without any (both).\n\n",
        ),
        (
            _plain("fine_tuning", "Figure 11: fine-tuning on four V100s", records["fine_tuning"], _FINE),
            "Milliseconds of a step, and GB of the fullest device. M = 4, then each system at its best M. MP is "
            "cross-layer model parallelism, without micro-batches.\n\n",
        ),
        (_plain("transfers", "Section 8.4.1: transfers over computation", records["transfers"]), ""),
        (
            _plain("ours", "Our planner on figure 11's settings", records["ours"], ("OOO-Pipe", "ours")),
            "Milliseconds of a step; both at their best number of micro-batches.\n\n",
        ),
        (
            _plain("pre_training", "Figure 13 (a): pre-training, weak scaling", records["pre_training"], _PRE),
            "Milliseconds of a step with the scripts' micro-batches, with as many as GPUs, and with each system's best "
            "number.\n\n",
        ),
        (
            _plain("strong", "Figure 13 (b): pre-training, strong scaling", records["strong"], _STRONG),
            "Milliseconds of a step. Megatron needs as many transformers on each GPU, as in the paper.\n\n",
        ),
        (
            _plain("gpt_3", "Figure 13 (b): GPT-3 medium", records["gpt_3"], ("seconds",)),
            "Milliseconds of a step. The text says that scaling from 8 to 16 GPUs and from 24 to 32 is limited, as 24 "
            f"transformers can't be shared out evenly: here it is {_scaling(records, 8, 16):.2f}x and "
            f"{_scaling(records, 24, 32):.2f}x.\n\n",
        ),
        (
            _plain("figure_10", "Figure 10: data parallelism", records["figure_10"], _PARALLEL),
            "Milliseconds of a step; k in chunks. Where nothing is left to hide, all columns are equal and k is 0.\n\n",
        ),
        (
            _plain("k_45", "Section 8.3: k = 45", records["k_45"], _K_45),
            "ResNet-50 on 16 V100s, a chunk for each of its 54 layers; milliseconds.\n\n",
        ),
    ]


def _scaling(records: Records, few: int, many: int) -> float:
    first, second = (number_of(only(records["gpt_3"], GPUs=count), "seconds") for count in (few, many))
    return first / second


_ONE_GPU = ("XLA", "two streams", "both")
_FINE = ("single", "MP", "GPipe", "OOO-Pipe1", "OOO-Pipe2, groups of 1", "OOO-Pipe2, groups of 2")
_PRE = ("GPipe", "PipeDream's bound", "OOO-Pipe1", "OOO-Pipe2")
_STRONG = ("GPipe", "DAPPLE", "Megatron", "fast-forwarded Megatron", "OOO-Pipe2")
_PARALLEL = ("compute", "wait-free", "prioritised", "reverse first-k")
_K_45 = (
    "compute", "wait-free", "prioritised", "k = 45", "waiting, wait-free", "waiting, prioritised", "waiting, k = 45",
    "Bw of layers 2 to 45",
)  # fmt: skip


def _plain(name: str, title: str, rows: Sequence[Record], milliseconds: Sequence[str] = ()) -> Table:
    """Returns a table of records, in which these columns are seconds, given in milliseconds."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    cells: list[list[Cell]] = [
        [_cell(row.get(key), 1e3 if key in milliseconds else 1.0) for key in header] for row in rows
    ]
    return Table(name, title, header, cells)


def _cell(value: str | float | int | None, factor: float) -> Cell:
    return _digits(value * factor, 4) if isinstance(value, float) else value


def _digits(number: float | None, digits: int) -> str:
    if number is None:
        return "-"
    if number == round(number):
        return f"{number:.0f}"
    decimals = max(0, digits - len(f"{abs(number):.0f}")) if abs(number) >= 1 else digits
    return f"{number:.{decimals}f}"
