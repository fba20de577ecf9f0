"""The words of the document on FD-DPS's experiments; the numbers in them are computed from its rows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from dapple_tf.tools.evaluation.operator_claims import (
    AS_FAST,
    NEAR_GAIN,
    NEAR_WITHIN,
    REPRODUCED_GAIN,
    REPRODUCED_WITHIN,
    SAME_STEP,
    least_possible,
    margin,
    sign,
    went_back,
)
from dapple_tf.tools.evaluation.operator_experiments import (
    DOCKER_BANDWIDTH,
    DOCKER_LATENCY,
    LINK_BANDWIDTH,
    LINK_LATENCY,
    MEMORY_BYTES,
    Row,
    with_rounds_of,
)
from dapple_tf.tools.evaluation.operator_paper import FIGURE_4, TABLE_5, TABLE_7
from dapple_tf.tools.evaluation.paper_report import of_commit

TITLE = f"""# FD-DPS's experiments, placed and simulated again

{of_commit("results-operators")}
Written by `python -m tools.evaluation.reproduce_fd_dps --write`, and computed again and compared by `make
results-operators`; don't edit. The rows that it is made of are in [fd_dps.json](fd_dps.json). Everything here is
simulated, from times that a roofline estimates, on no particular machine, but for figure 5's seconds of searching,
which are of the machine that stored them; nothing has run on a GPU, and the seconds of P100s can't be shown. Real
steps of placed operators, on CPU cores, are in [operator_workers.md](operator_workers.md).
"""

BANDS = f"""## What is reproduced

A figure is *reproduced* if ours is within {REPRODUCED_WITHIN:.0%} of the paper's, above or below, *near* within
{NEAR_WITHIN:.0%}. Steps in units of another's, DP's (the faster of its two forms, see below) or, in margins, the
opponent's, are near 1 in most rows; so the gain, 1 - the step, has to be on the same side of 0 as the paper's, too, and
between 1/{REPRODUCED_GAIN:.0f} and {REPRODUCED_GAIN:.0f} times as large, for *near* between 1/{NEAR_GAIN:.0f} and
{NEAR_GAIN:.0f} times, as in [ooo.md](ooo.md) and [dapple.md](dapple.md).

*Reproduced otherwise* is within the first bands, but in another way than the paper's, which the reason names: a
strategy's step, or a margin over it, where that step, before rounds of ours, is DP's graph's within {SAME_STEP:.0%};
or FD-DPS's own step, which has improvement rounds that aren't in the paper. Nothing more than a number agrees then,
which may be chance. What is only near in such a way isn't reproduced. Nor is a margin that is too large: it shows a
weak opponent. What stands against one number of ours, in one table or in several, is one figure with the worst verdict,
and so is what the paper has two numbers for.

Table 6's milliseconds fitted the roofline, and aren't counted; its six decisions are one figure, which splitting
everything doesn't reproduce. That NASNet-large is OOM on one device isn't counted: the usable memory was taken over
when this need was known. Figure 5 isn't: which search takes less time follows from the bound on visited operators
that we chose, and from our own MP-DPS. Figure 4 isn't: how fast its dockers' links were, and which devices shared
them, isn't said, so that ours are guesses (see below). Nor is counted what holds by construction: FD-DPS isn't slower
than FastT, one device and DP's graph, which are among its candidates.

Both bands were fixed before these rows were computed, though not before earlier runs of the same experiments, with a
weaker data parallelism and weaker opponents, had been seen. A review of the results brought the rule on gains, that on
margins over DP's graph and on too large ones, and table 6 as one figure, all of which only take away; and the usable
memory. A second one brought data parallelism's direct all-reduce and own statistics, and took figure 5 and an OOM away;
and it gave FD-DPS's improvement rounds to the strategies over which it has margins. A third one made one figure of one
device's ten, and brought the rules on steps within {SAME_STEP:.0%} of DP's graph's and on FD-DPS's own rounds. A fourth
one made one figure of table 5's margins and table 7's where ours are one number, judged opponents by their steps before
rounds, and took away a second try at table 7's figures, over one copy. A fifth one made the faster of two forms of data
parallelism the unit of steps: three figures had been reproduced otherwise only in units of the form with copies of
variables, all of which it updates. A sixth one took figure 4 away, and gave table 7's second number to FD-DPS's step.
A seventh one joined figures of a row that are written alike and whose steps differ by less than 1%.

The paper's algorithms 1 to 3 alone have no column: FD-DPS here has FastT's placement, HEFT's and DP's graph among its
candidates, and rounds at its end.
"""

_RATIOS = [
    d_dps / seconds
    for name, (d_dps, _, _) in TABLE_7.items()
    if (seconds := TABLE_5[name, 4].data_parallel) is not None
]
_D_DPS = f"{min(_RATIOS):.2f} to {max(_RATIOS):.2f}"
_OF_FIGURE_4 = FIGURE_4["PNASNet-mobile"]
_LEAD = 1 - (1 - _OF_FIGURE_4["fd_dps", "fast_t"]) / (1 - _OF_FIGURE_4["mp_dps", "fast_t"])

ASSUMED = f"""## What was done, and what it can be compared with

**Simulated, all of it.** Each model is built by Keras, captured, and goes through the passes of real training, with
one stage, one replica and one micro-batch; the flat graph of its operators is what is placed. Of a batch of table 3 N
devices have 1/N each, where each clone of TF-Slim's training script has all of it (see *The paper's seconds*): our rows
aren't the paper's setting, and only steps in units of DP's are compared. An operator takes what
`OperatorCosts.p100()` says, a roofline fitted to the six times of the paper's table 6, a tensor
{LINK_LATENCY * 1e6:.0f} us and its bytes at {LINK_BANDWIDTH / 1e9:.0f} GB/s (PCIe 3.0 x16, a link for each ordered pair
of devices). Two dockers have four devices each and {DOCKER_BANDWIDTH / 1e9:.0f} GB/s and {DOCKER_LATENCY * 1e6:.0f} us
between them; the paper doesn't say what it measured there. Each pair of devices has a link of its own, between
dockers, too: that idealises all that send over many at once, DP's direct exchange of gradients first. If dockers had
one link, DP over both would take longer than it does here, and use one of them. Of a device's 16 GB
{MEMORY_BYTES / 1e9:.1f} can be used, as of DAPPLE's V100s ([README](README.md#hardware)); what the paper's TensorFlow
left isn't known. A device runs one operator at a time in the order of its queue; a tensor is sent once to each device
that reads it; transfers over a link go one after another. Memory is a hard limit of FD-DPS's placements only.

Columns; all but one compute the step that one device computes, up to rounding:

* **single**: everything on one device. **even shares**: its time over the number of devices, which nothing undercuts.
* **DP**: data parallelism, 1/N of the batch on each device, which keeps a copy of each variable. Gradients are reduced
  while the backward goes on, in buckets of the best size, in a ring or directly between all devices, whichever is
  faster, and added as fast as other sums; sums over the batch within the step, those of BatchNormalization, are
  exchanged where they are made; nothing else runs meanwhile, where a placement may run others, which own statistics
  bound. Updates begin when all gradients are reduced; a placement may update each variable as
  soon as its gradient is there. **DP, own statistics**: the same, but each replica normalises its own samples. That is
  what is mostly run, TF-Slim's clones do it, is faster, and trains another way; no placement may do that. **Updates
  shared out**: the same, if each device made 1/N of the updates, as with ZeRO-1, and a reduce-scatter and an all-gather
  sent as many bytes: its step less (1 - 1/N) of the updates. That is arithmetic, not simulated, and counts nowhere.
* **DP's graph**: operators on samples split by the batch, part k on device k, as a placement: each variable is on one
  device, which sends it to the others, adds their gradients and updates it once. Regions that aren't linked with the
  heaviest operator by tensors that are cut alike, such as vectors of channels, are split all or only where that seems
  cheaper, by the shorter step. That is where FastT, MP-DPS and D-DPS(-F) begin. TF-Slim's clones have one copy and one
  update, too, but on the host's CPU (its `model_deploy.py` has variables and the optimizer on `/device:CPU:0`), which
  isn't among our devices. **DP's step**, the unit below, is the faster of this form and own statistics, in each row.
  In the paper D-DPS(-F), which splits nothing itself, takes {_D_DPS} of data parallelism's step (tables 7 and 5), as
  only a graph that is divided already can: one copy placed without splits takes much longer (table 7, here).
* **DPOS**: FastT's placement and order of that graph alone. **FastT**: with OS-DPOS, which splits operators on the
  critical path one at a time, and going back to data parallelism's graph where that is faster, as FastT does.
* **MP-DPS**: merged nodes and predicted paths, by the same group; rebuilt from FD-DPS's description of it
  (`dapple_tf/operators/mp_dps.py`), since its paper isn't at hand; it may go back as FastT does.
* **D-DPS(-F)**: FD-DPS on data parallelism's graph, without other splits. **FD-DPS**: with all of them; data
  parallelism's graph is one of its candidates. Both end with rounds that move what bounds the simulated step, which
  aren't in the paper's algorithms.
* **FastT, rounds** and **MP-DPS, rounds**: the same rounds at the end of those two, with all of the work that a search
  of FD-DPS may take. Margins are over these, and of these, so that nobody's are ours rather than the strategy's.
* Table 7 also has one copy placed without splits, and with splits of one operator at a time while its neighbours are
  whole, as the paper splits. In two dockers DP, FastT and MP-DPS may use one docker only, as FD-DPS may.
* Times are ms of a step. In parentheses: needs more memory than a device has, simulated as if it hadn't.
* "faster" is 1 - t/t' as in the paper's tables: 20 % are 1.25 times as many steps in a second.

**The paper's seconds.** With more devices most of its steps take *longer*: ResNet-50 0.394 s on one, 0.895 s with DP on
four, 1.983 s on eight; all do from four to eight, and only ResNet-200's are shorter than on one. TF-Slim's training
script explains it: each clone takes a whole batch from the queue (`train_image_classifier.py`: `tf.train.batch` of
`batch_size`, a `dequeue` in each clone), so that N devices do N times the work, and variables and the sums of gradients
are on the host's CPU. That fits NASNet-large, too, which is OOM with DP on four and eight devices. Seconds of one
device and of several aren't of one batch then; steps are compared in units of DP's.

**Where the paper doesn't agree with itself.** "Speedup 1" of table 5 is called MP-DPS over FastT, but is FD-DPS
over MP-DPS: 1 - 1.051/1.066 is its 1.41 % for VGG-16 on two devices. PnasNet_mobile takes 1.384 s on four devices
in table 5 and 1.314 s in table 7; its gain over FastT there is printed as 14.59 %, but is
{100 * TABLE_5["PNASNet-mobile", 4].faster("fast_t"):.2f} % by its seconds, which is what we compare with. The
abstract's 11.78 % of ResNet_200 is 11.87 % in table 5. Of figure 4 the text says that FD-DPS is 11.1 % better than
MP-DPS, the difference of 16.0 % and 4.9 %, by which it is {100 * _LEAD:.1f} % faster.

**Models.** PNASNet-5 mobile has TF-Slim's cells, without its auxiliary classifier. The paper names CIFAR-10, but its
times are those of the images that the models are made for: 224 x 224 (Inception-V3 299, NASNet-large 331). Our graphs
have fewer operators: constants and fed placeholders aren't counted, and Keras makes fewer of them than TF-Slim, whose
graphs have summaries, queues and initializers, too.
"""


def reasons(rows: Sequence[Row]) -> str:
    """Returns what is behind the verdicts, with numbers from the rows."""
    plain = [row for row in rows if row.setting.dockers == 1]
    if not plain:
        return ""
    paragraphs = [
        _single(plain),
        _memory(rows),
        _opponents(rows),
        _margins(rows),
        _one_copy(plain),
        _against_dp(rows),
        _against_d_dps(plain),
        _table_6(plain),
        _search(plain),
    ]
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def _bullet(text: str) -> str:
    return (
        textwrap.fill(f"* {text}", 118, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) + "\n"
    )


def _span(values: Sequence[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def of_paper(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that table 5 has, too, with a step of data parallelism."""
    papers = [TABLE_5.get((row.setting.model, row.setting.devices)) for row in rows]
    return [
        row for row, paper in zip(rows, papers, strict=True) if paper is not None and paper.data_parallel is not None
    ]


def _single(rows: Sequence[Row]) -> str:
    ours = [1 / row.over("single") for row in of_paper(rows)]
    if not ours:
        return ""
    theirs = [1 / ratio for paper in TABLE_5.values() if (ratio := paper.over("single")) is not None]
    return _bullet(
        f"**One device against data parallelism**, one figure of all rows, isn't reproduced: our DP's step is "
        f"{_span(ours)} of one device's, the paper's {_span(theirs)} times one device's. See *The paper's seconds*."
    )


def _memory(rows: Sequence[Row]) -> str:
    full = {row.setting.model: row.outcomes["single"] for row in rows if not row.outcomes["single"].fits}
    if not full:
        return ""
    needs = " and ".join(f"{outcome.peak_bytes / 1e9:.1f} GB for {name}" for name, outcome in full.items())
    most = max(outcome.peak_bytes for row in rows for outcome in row.outcomes.values() if outcome.fits)
    return _bullet(
        f"**Memory.** One device would need {needs}, and has {MEMORY_BYTES / 1e9:.1f}; all of a card's 16 GB would be "
        f"enough, so that this OOM isn't counted. All else needs at most {most / 1e9:.1f} GB, data parallelism with "
        f"its share of the batch, too, which is OOM in the paper."
    )


def _of_copies(row: Row, what: str) -> float:
    """Returns the ratio of a step and that of data parallelism with copies of variables, which computes the same."""
    return row.outcomes[what].seconds / row.outcomes["data_parallel"].seconds


def _opponents(all_rows: Sequence[Row]) -> str:
    rows, dockers = ([row for row in all_rows if (row.setting.dockers > 1) == slow] for slow in (False, True))
    fast_t = [row.over("fast_t") for row in of_paper(rows) or rows]
    theirs = [ratio for paper in TABLE_5.values() if (ratio := paper.over("fast_t")) is not None]
    beside = [row for row in rows if not 0.85 <= row.over("fast_t") <= 1.2]
    on_one = sum(row.outcomes["fast_t"].used * row.setting.dockers <= row.setting.devices for row in dockers)
    back, merged = (sum(went_back(row, name) for row in rows) for name in ("fast_t", "mp_dps"))
    alone = [row.outcomes["dpos"].seconds / row.outcomes["split_by_batch"].seconds for row in rows]
    names, slow = (
        ", ".join(f"{row.setting} {row.over('fast_t'):.2f} ({_of_copies(row, 'fast_t'):.2f})" for row in some) or "none"
        for some in (beside, dockers)
    )
    return _bullet(
        f"**FastT** takes {_span(fast_t)} of DP's step in the {len(fast_t)} rows that the paper has, in the paper "
        f"{_span(theirs)}; outside 0.85 to 1.2 on one server, with its ratio to copies that compute the same step "
        f"in parentheses: {names}; with slow links between dockers, where it stays on one of them in {on_one} of "
        f"{len(dockers)} rows: {slow}. "
        f"Where both are above 1.1, large variables are the reason, VGG-16's: DP's graph has each on one device, "
        f"whose links carry it once for every other device and its gradients back, where direct exchanges send even "
        f"shares; where only the first is, DP's replicas don't wait for sums over the batch. In {back} "
        f"of {len(rows)} rows FastT goes back to DP's graph, MP-DPS in {merged}: DPOS alone takes {_span(alone)} "
        f"times as long. It counts a link as free whenever it is needed, and takes parts away from what they "
        f"read, which sends many times as much; then transfers wait for each other. So here its gain over data "
        f"parallelism (up to {1 - min(theirs):.1%} in the paper) is missing."
    )


def _margins(rows: Sequence[Row]) -> str:
    opponent = with_rounds_of("fast_t")
    most = [1 - least_possible(row) / row.outcomes[opponent].seconds for row in rows]
    same = sum(row.outcomes[opponent].seconds == row.outcomes[with_rounds_of("mp_dps")].seconds for row in rows)
    of_table_7 = [
        str(row.setting)
        for row in rows
        if row.setting.devices == 4
        and row.setting.dockers == 1
        and row.outcomes["d_dps"].seconds == row.outcomes[opponent].seconds
    ]
    gained = [row.faster("fast_t", opponent) for row in rows]
    margins = [margin(row, "fd_dps", "fast_t") for row in rows]
    lost = sum(gain < -AS_FAST for gain in margins)
    return _bullet(
        f"**Margins** over FastT and over MP-DPS, both with rounds, are one number in {same} of {len(rows)} rows, "
        f"since both go back to DP's graph and are improved from there, and are compared with two numbers of the "
        f"paper; at best they are reproduced otherwise. Table 7's, over D-DPS(-F), is that number as well for "
        f"{', '.join(of_table_7) or 'no row'}. Rounds make FastT's step {_span(gained, '.1%')} shorter; over "
        f"that FD-DPS gains {_span(margins, '.1%')}, and loses more than {AS_FAST:.0%} in {lost} rows. Even "
        f"shares of one device's time would be {_span(most, '.1%')} faster than FastT with rounds, the most that any "
        f"placement could gain; where that is much, it is mostly what a smaller slice doesn't shorten, such as starts "
        f"of operators."
    )


def _one_copy(rows: Sequence[Row]) -> str:
    four = [row for row in rows if row.setting.devices == 4]
    if not four:
        return ""
    gains, over = ([row.faster("one_copy", "alone") for row in four], [row.over("one_copy") for row in four])
    return _bullet(
        f"**Splits of one operator at a time** gain {_span(gains, '.1%')} over one copy placed without splits. That is "
        f"shown in table 7, and not counted: it would be a second try at the figures that D-DPS(-F) has, over a weak "
        f"opponent, which takes {_span(over)} of DP's step."
    )


def _against_dp(rows: Sequence[Row]) -> str:
    forms = (("data_parallel", "the same step"), ("own_statistics", "replicas' own statistics"))
    ratios = [row.over("fd_dps") for row in rows]
    of_unit = [sign(ratio, 1.0) for ratio in ratios]
    behind = "; ".join(
        f"{row.setting} {ratio:.2f}" for row, ratio, own in zip(rows, ratios, of_unit, strict=True) if own < 0
    )
    texts, shared = [], []
    ahead = list(rows)
    for than, words in forms:
        signs = [sign(row.outcomes["fd_dps"].seconds, row.outcomes[than].seconds) for row in rows]
        which = "; ".join(
            f"{row.setting} by {-row.faster(than):.1%}" for row, own in zip(rows, signs, strict=True) if own < 0
        )
        gains = _span([row.faster(than) for row in rows], ".1%")
        texts.append(f"with {words}: {gains} faster; {_counted(signs)} ({which or 'none'})")
        others = [sign(row.outcomes["fd_dps"].seconds, row.outcomes[than].shared_seconds) for row in rows]
        ahead = [row for row in ahead if others[rows.index(row)] > 0]
        shared.append(f"with {words}: {_counted(others)}")
    return _bullet(
        f"**FD-DPS against data parallelism**: {_span(ratios)} of DP's step, the faster of its two forms; "
        f"{_counted(of_unit)} ({behind or 'none'}). Against copies of variables, {'; '.join(texts)}; VGG-16 has no "
        f"statistics, so that both are one there. Steps that differ by less than {AS_FAST:.0%} count "
        f"as equally fast. Data parallelism with copies of variables isn't a "
        f"placement, so that the search can't choose it. It is ahead where its devices exchange even shares of all "
        f"gradients over all links at once, and a placement sends each variable from the device that has it; and "
        f"where replicas needn't wait for sums over the whole batch. FD-DPS is ahead where it updates each variable "
        f"once and data parallelism on each device. "
        f"If its devices shared the updates out, which sends as many bytes, FD-DPS would be, "
        f"{'; '.join(shared)}; it stays ahead of both in {', '.join(str(row.setting) for row in ahead) or 'none'}."
    )


def _counted(signs: Sequence[int]) -> str:
    ahead, alike, behind = (signs.count(own) for own in (1, 0, -1))
    return f"ahead in {ahead} of {len(signs)} rows, as fast in {alike}, behind in {behind}"


def _against_d_dps(rows: Sequence[Row]) -> str:
    slower = [row for row in rows if row.faster("d_dps") < -AS_FAST]
    if not slower:
        return ""
    which = "; ".join(f"{row.setting} by {-row.faster('d_dps'):.2%}" for row in slower)
    return _bullet(
        f"**FD-DPS loses to D-DPS(-F)**, itself without other splits, by more than {AS_FAST:.0%} in {len(slower)} of "
        f"{len(rows)} rows ({which}). "
        f"D-DPS(-F)'s result isn't one of its candidates: it begins with the same graph, but the work of a search is "
        f"bounded, and what FD-DPS spends on splits is missing for moving the operators of that graph."
    )


def _table_6(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if row.lines_alone), None)
    if row is None:
        return ""
    size, devices = 64 * 224 * 224 * 64 * 4, row.setting.devices
    sent = size * (devices - 1) / devices / LINK_BANDWIDTH / (devices - 1)
    saved = row.lines["Conv1_2"].seconds * (1 - 1 / devices)
    copied = 2 * size / 560e9
    return _bullet(
        f"**Table 6.** Our regions split convolutions together with what is around them, so that nothing is cut "
        f"or joined between, light operators too. One at a time, Conv1_2 stays whole: its input and its output "
        f"of {size / 1e6:.0f} MB each take {sent * 1e3:.0f} ms over each link, one after the other, and about "
        f"{copied * 1e3:.0f} ms to be cut and joined, and splitting it saves {saved * 1e3:.1f} ms. The paper "
        f"doesn't say what its split convolutions send."
    )


def _search(rows: Sequence[Row]) -> str:
    most = max(row.setting.devices for row in rows)
    largest = [row for row in rows if row.setting.devices == most]
    searches = [{name: outcome.search_seconds for name, outcome in row.outcomes.items()} for row in largest]
    times = [each["fd_dps"] / max(each["fast_t"], 1e-3) for each in searches]
    one = [each["split_by_batch"] for each in searches]
    graphs = [each["fd_dps"] / max(each["split_by_batch"], 1e-3) for each in searches]
    return _bullet(
        f"**Figure 5**, not counted. FD-DPS's search takes {_span(times, '.0f')} times FastT's, in the paper less for "
        f"large models. To make one divided graph, place and simulate it takes {_span(one)} s; FastT does that once or "
        f"twice and places by DPOS; FD-DPS has FastT's placement among its candidates, does the same for several ways "
        f"to split, and moves what bounds the best: as long as {_span(graphs, '.0f')} such graphs. The paper's FastT "
        f"takes minutes; it doesn't say what for."
    )
