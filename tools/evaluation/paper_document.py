"""The document of DAPPLE's evaluation: a front page with the claims, then the tables; and the CSV files beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from dapple_tf.tools.evaluation import paper_figure_11
from dapple_tf.tools.evaluation.paper_figures import TIE, ahead, better, claims, other_steps, unfit
from dapple_tf.tools.evaluation.paper_models import SAME_CUTS, SAME_CUTS_OTHERWISE, TABLE_4
from dapple_tf.tools.evaluation.paper_outcomes import Record
from dapple_tf.tools.evaluation.paper_report import Table, of_commit, plan_text, schedule_text, tables
from dapple_tf.tools.evaluation.paper_verdicts import (
    COUNTED,
    FAILS,
    FITTED,
    HOLDS,
    NEAR,
    NOT,
    OTHERWISE,
    REPRODUCED,
    Claim,
    Results,
    counts,
)

PLOTS = {
    "table4_speedups": "speedups",
    "table6_speedups": "pipedream",
    "figure11_averages": "figure11",
    "figure14": "scaling",
    "table5": "gpipe",
    "table7": "largest_bert",
}
"""Table -> the plot that stands below it."""

_TITLE = f"""# DAPPLE's evaluation, planned and simulated again

{of_commit("results-dapple")}
Written by `python -m tools.evaluation.reproduce_dapple --write` from [results.json](results.json); don't edit.
`make results-dapple` computes everything again and compares; it writes nothing. Simulated, on no particular machine:
the numbers are the same everywhere. [README.md](README.md) says what was assumed, what was mended in the data, and how
to read the tables, which are also in the CSV files beside this one.

**What no experiment here can show:** seconds on V100s. Nothing here ran on a GPU. Layers' times, sizes and parameters
are those that the paper's authors measured and published; steps are simulated from them. Ratios can be compared with
the paper's, seconds and samples per second can't. The paper gives figures 11, 12 and 14 as drawings; of these only the
numbers that its text mentions are claims here.

Bands: a figure within 10 % of the paper's is reproduced, within 25 % near, otherwise not reproduced, also where ours
is the better one; for Table 3, gains of a few percent, it is 2 % and 5 %. Of a ratio (its band says "gain") the gain
over 1, or the loss below it, must also be between half and twice the paper's to be reproduced, between a third and
three times to be near: 1.04 isn't 1.15. A plan with the paper's cuts and replicas is reproduced. Where ours is another,
but the paper's is as fast within 1 % in the same simulation, it counts as reproduced otherwise; else it is near with
the same replicas, however much faster, and not reproduced with others. What was fitted to a table isn't counted, what
holds by construction isn't a claim, and what rests on one number of ours is counted once.

The 10 and 25 % were fixed before this evaluation was computed, when an older one's results were known. Chosen later,
with results in sight: Table 3's bands (3 and 8 % at first) and the M at which it is judged, the rule for gains, times
in proportion below the profiled batch in Table 6 and figures 11 and 12, both rules for them in Table 3, where the worse
verdict counts, 256 rather than 64 micro-batches at most, which made two figures reproduced and one not, the 10 % by
which an efficiency in figure 14 must change to count and what it is compared with, and the other setting that stands
beside the first. That one is named for what it changes, and is the same for all claims of a table or figure.
"""
_IDLE = (
    "Last of what was chosen later, after reviews: data parallelism as an opponent has its fastest number of devices, "
    "since our planner and GPipe may leave devices idle, too, and all of them, as in the paper. Figures 11 and 14 are "
    "judged by both, and the worse verdict counts; figure 11's also with the paper's plans, which it is about. Before "
    "that the first counted in figure 11 and the second in figure 14, by which two more had been reproduced. What the "
    "one and the other make of our plans' numbers at GBS 128:"
)


def document(results: Results) -> str:
    """Returns the document."""
    all_claims = claims(results)
    chosen = [f"{_IDLE} {paper_figure_11.by_opponent(results)}.", f"Figure 14's limit: {other_steps(results)}."]
    parts = [_TITLE, *map(_paragraph, chosen), _front_page(all_claims, results)]
    for table in tables(results):
        note = f"{table.note}\n\n" if table.note else ""
        parts.append(f"## {table.title}\n\n{note}{table.markdown()}\n")
        if table.name in PLOTS:
            parts.append(f"![{table.title}]({PLOTS[table.name]}.svg)\n")
    return "\n".join(parts)


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False) + "\n"


def _front_page(all_claims: Sequence[Claim], results: Results) -> str:
    numbers = counts(all_claims)
    faster = better(results)
    chosen = [results[row.key]["choice"] for row in TABLE_4 if row.key in results]
    tally = ", ".join(
        f"{chosen.count(name)} {name}" for name in (SAME_CUTS, SAME_CUTS_OTHERWISE, "same replicas", "other")
    )
    lines = [
        "## What comes of the paper's claims\n",
        "| | count |",
        "| --- | --- |",
        f"| reproduced | {numbers[REPRODUCED]} |",
        f"| near: within 25 % | {numbers[NEAR]} |",
        f"| reproduced otherwise: in the one other setting that stands beside it, by chance, as its reason says, or by "
        f"another plan where the paper's is as fast within 1 % | {numbers[OTHERWISE]} |",
        f"| not reproduced: the reason stands beside it | {numbers[NOT]} |",
        f"| together | {sum(numbers[verdict] for verdict in COUNTED)} |",
        f"| not of equals: rows of Tables 4 and 6 where our plan with everything is faster than the paper's under the "
        f"paper's schedules | {len(faster)} |",
        f"| not counted: fitted to the table itself | {numbers[FITTED]} |",
        f"| not of the paper: our planner's checks that hold, and that don't | {numbers[HOLDS]}, {numbers[FAILS]} |",
        "",
        _ahead(results),
        f"Table 4's plans, under the same schedules: {tally}.",
        "",
        "Counted once: an ACR of one plan at two speeds of the network (A and B have the same, C 2.5 times as much), "
        "also VGG-19's 0.16 of section 6.4, which is 0.40 / 2.5; Table 6's rows whose batch and replicas Table 4 has, "
        "too; Table 5's throughput with recomputation over that without, and what more micro-batches take of memory "
        "with it. Where the paper has several numbers for one of ours, the worst verdict counts.",
        "",
        "Not tried: sentences of sections 5.3, 6.3 and 6.4 about measurements and models, not plans: that P_B is the "
        "better one for AmoebaNet-36; that GNMT-16's decoder takes 1.45 times as long as its encoder; that the last "
        "third of AmoebaNet-36 has 73 % of its parameters, and, in the arXiv version, the ratios of its stages 24:12.",
        "",
    ]
    for verdict, title in (
        (REPRODUCED, "Reproduced"),
        (NEAR, "Near"),
        (OTHERWISE, "Reproduced otherwise"),
        (NOT, "Not reproduced"),
        (FITTED, "Fitted, not counted"),
    ):
        lines += _listed(title, [claim for claim in all_claims if claim.verdict == verdict])
    lines += ["### Not of equals\n"]
    lines += ["Our plan with every policy and feature, against the paper's as published under its own schedules.\n"]
    lines += ["| row | times as fast | our plan | policy |", "| --- | --- | --- | --- |"]
    for row, factor in faster:
        record: Record = results[row.key]["everything"]
        lines.append(f"| {row.key} | {factor:.2f} | {plan_text(record)} | {schedule_text(record)} |")
    if rows := unfit(results):
        names = ", ".join(row.key for row in rows)
        lines += ["", f"Not among them, as the paper's plan doesn't fit by our model of memory: {names}."]
    lines += ["", *_listed("Checks of our planner", [c for c in all_claims if c.verdict in (HOLDS, FAILS)])]
    return "\n".join(lines)


def _ahead(results: Results) -> str:
    """Returns which opponents are ahead of our plans by less than counts."""
    rows = [f"{who}'s for {row} (ours is {factor:.3f} times as fast)" for row, (who, factor) in ahead(results).items()]
    return _paragraph(
        f"That all checks of no opponent being faster hold is by the tie of {TIE:.0%}, by which two plans count as "
        f"equally fast. Within it, ahead of ours are {', '.join(rows)}."
        if rows
        else "No opponent of Table 4's rows is ahead of ours, not even within the tie."
    )


def _listed(title: str, some: Sequence[Claim]) -> Iterator[str]:
    if some:
        yield f"### {title}\n"
        yield "| claim | paper | ours | band | |"
        yield "| --- | --- | --- | --- | --- |"
        for claim in some:
            note = claim.why or ("" if claim.verdict != FAILS else "**doesn't hold**")
            yield f"| {claim.name} | {claim.paper} | {claim.ours} | {claim.band} | {note} |"
        yield ""


def claim_table(results: Results) -> Table:
    """Returns the table of claims, for a CSV file."""
    header = ["claim", "paper", "ours", "verdict", "band", "why"]
    rows = [[c.name, c.paper, c.ours, c.verdict, c.band, c.why] for c in claims(results)]
    return Table("claims", "Claims", header, rows)


def files(results: Results) -> dict[str, str]:
    """Returns the text of each file beside the plots, but for the stored records themselves."""
    made = {f"{table.name}.csv": table.csv() for table in (claim_table(results), *tables(results))}
    return {"dapple.md": document(results), **made}
