"""Pipelined training gives what plain Keras gives on one device: loss, every gradient, every variable after two or
three steps.

The sweep takes every list of replicas three times, with all that varies going round: each pair of values meets, of
models, numbers of stages, micro-batches, schedules and recomputation, and of replicas and each but the model.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from equivalence import assert_equal_training, device_lists, use_float64
from references import SAMPLES, reference
from selection import one_of_each, sampled, thorough
from zoo import ZOO

import dapple_tf as dapple

TURNS = {
    (1,): ("tied", "transformer", "branches"),
    (3,): ("lstm", "cnn", "multi_output"),
    (1, 1): ("transformer", "branches", "tied"),
    (3, 1): ("branches", "multi_output", "cnn"),
    (2, 3): ("cnn", "lstm", "multi_output"),
    (1, 1, 1): ("tied", "cnn", "lstm"),
    (1, 2, 3): ("transformer", "branches", "multi_output"),
    (1, 1, 1, 1): ("multi_output", "cnn", "lstm"),
    (2, 1, 3, 1): ("branches", "tied", "transformer"),
}
"""Lists of replicas, and the models that take them in turn; those that take long come least often."""
REPLICAS = tuple(TURNS)
MICRO_BATCHES = (1, 4, 7)
SCHEDULES = ("gpipe", "dapple_a", "dapple_b")
RECOMPUTE = ("none", "boundary", "min_cut")


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    replicas: tuple[int, ...]
    micro_batches: int
    schedule: str
    recompute: str | tuple[str, ...]

    def __str__(self) -> str:
        replicas = ":".join(map(str, self.replicas))
        return f"{self.model}-{replicas}-M{self.micro_batches}-{self.schedule}-{self.recompute}"


def sweep() -> list[Case]:
    """All pairs in as few cases as there can be: 9 lists of replicas, each with all three values of an option."""
    cases = []
    for turn, (index, (replicas, models)) in itertools.product(range(3), enumerate(TURNS.items())):
        options = MICRO_BATCHES[turn], SCHEDULES[(index + turn) % 3], RECOMPUTE[(index // 3 + turn) % 3]
        cases.append(Case(models[turn], replicas, *options))
    return cases


def test_the_sweep_meets_every_pair_and_all_options_together() -> None:
    options = list(itertools.product(MICRO_BATCHES, SCHEDULES, RECOMPUTE))
    assert {(case.micro_batches, case.schedule, case.recompute) for case in sweep()} == set(options)
    for values, field in ((MICRO_BATCHES, "micro_batches"), (SCHEDULES, "schedule"), (RECOMPUTE, "recompute")):
        met = [(case.model, case.replicas, getattr(case, field)) for case in sweep()]
        assert {(model, value) for model, _, value in met} == set(itertools.product(ZOO, values))
        assert {(replicas, value) for _, replicas, value in met} == set(itertools.product(REPLICAS, values))
    stages = {(case.model, len(case.replicas)) for case in sweep()}
    assert stages == set(itertools.product(ZOO, range(1, 5)))


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dapple.Plan.manual(
        ZOO[case.model].cuts_for(len(case.replicas)),
        device_lists(case.replicas),
        case.micro_batches,
        SAMPLES,
        schedule=case.schedule,
        recompute=case.recompute,
    )
    cluster = dapple.Cluster.local(sum(case.replicas), kind="cpu")
    # A batch of another size takes as long to prepare again: with one of the schedules there is one.
    steps = 3 if case.schedule == "dapple_a" else 2
    assert_equal_training(ZOO[case.model], cluster, plan, reference(case.model), monkeypatch, steps=steps)


def in_float64() -> list[Any]:
    """One case of each model, from the middle of the sweep: of several micro-batches, and with all other options.

    The transformer and the LSTM take as long as all others.
    """
    cases = sweep()[13:] + sweep()[:13]
    slow = ("transformer", "lstm")
    quick = one_of_each([case for case in cases if case.model not in slow], lambda case: case.model)
    return [*quick, *(thorough(case) for case in cases if case.model in slow)]


@pytest.mark.slow
@pytest.mark.parametrize("case", in_float64(), ids=str)
def test_every_structure_trains_as_plain_keras_in_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64()
    check(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dapple_b", "zb_h1"])
def test_stages_that_recompute_different_things(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64()
    check(Case("cnn", (1, 2, 1), 4, schedule, ("boundary", "none", "min_cut")), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "jit_compile"),
    [
        *(thorough((name, False)) for name in ("multi_output", "transformer", "lstm")),
        *sampled(((name, True) for name in ("tied", "cnn", "branches")), 3),
    ],
)
def test_every_structure_trains_as_plain_keras_where_a_step_is_one_function(
    model: str, jit_compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_float64()
    plan = dapple.Plan.data_parallel(1, SAMPLES, 1, jit_compile=jit_compile)
    assert_equal_training(ZOO[model], dapple.Cluster.local(1, kind="cpu"), plan, reference(model), monkeypatch)


def in_pieces() -> list[Any]:
    """Cases whose last backwards are cut: (model, replicas, micro-batches, schedule)."""
    cases = [
        ("branches", (2, 2), 4, "dapple_a"),
        ("tied", (3,), 1, "dapple_a"),
        *(("cnn", (1, 2), 7, "zb_h1"), ("lstm", (3, 1), 4, "gpipe")),
        *(("multi_output", (2, 3), 1, "zb_h2"), ("transformer", (2, 1), 4, "dapple_b")),
    ]
    return [*cases[:3], *map(thorough, cases[3:])]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "replicas", "micro_batches", "schedule"), in_pieces())
def test_backwards_in_pieces_train_as_plain_keras(
    model: str, replicas: tuple[int, ...], micro_batches: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_float64()
    cuts = ZOO[model].cuts_for(len(replicas))
    pieces = [cut for cut in ZOO[model].cuts_for(4) if cut not in cuts]
    plan = dapple.Plan.manual(
        cuts, device_lists(replicas), micro_batches, SAMPLES, schedule, backward_cuts=pieces, bucket_bytes=100
    )
    cluster = dapple.Cluster.local(sum(replicas), kind="cpu")
    assert_equal_training(ZOO[model], cluster, plan, reference(model), monkeypatch, steps=2)


# The example trains a transformer in float32, and verifies it: test_train_gpt.py.
@pytest.mark.parametrize("model", sampled((name for name in ZOO if name != "transformer"), 5))
def test_every_structure_trains_as_plain_keras_in_float32(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Case(model, (3, 1), 4, "dapple_a", "none"), monkeypatch)
