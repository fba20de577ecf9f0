"""Pipelined training gives what plain Keras gives on one device: loss, every gradient, every variable after three
steps.

The sweep takes every model of the zoo over stages and replicas; micro-batches, schedule and recomputation go round in
turn, so that each pair of their values meets several models. One cheap model goes through their whole product.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from equivalence import Reference, assert_equal_training, device_lists, use_float64
from zoo import ZOO

import dapple_tf as dapple

REPLICAS = {
    1: [(1,), (3,)],
    2: [(1, 1), (3, 1), (1, 3), (2, 3)],
    3: [(1, 1, 1), (3, 1, 2), (1, 2, 3)],
    4: [(1, 1, 1, 1), (2, 1, 3, 1), (1, 3, 2, 2)],
}
MICRO_BATCHES = (1, 4, 7)
SCHEDULES = ("gpipe", "dapple_a", "dapple_b")
RECOMPUTE = ("none", "boundary", "min_cut")
OPTIONS = list(itertools.product(MICRO_BATCHES, SCHEDULES, RECOMPUTE))


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    replicas: tuple[int, ...]
    micro_batches: int
    schedule: str
    recompute: str

    def __str__(self) -> str:
        replicas = ":".join(map(str, self.replicas))
        return f"{self.model}-{replicas}-M{self.micro_batches}-{self.schedule}-{self.recompute}"

    @property
    def batch(self) -> int:
        """Never a multiple of the number of micro-batches, nor these of the replicas."""
        return 22 if self.micro_batches * max(self.replicas) > 13 else 13


def sweep() -> list[Case]:
    """Models x stages x replicas; 10 is prime to 27, so that consecutive cases differ in all three options."""
    cases = []
    for model, replicas in itertools.product(ZOO, itertools.chain(*REPLICAS.values())):
        micro_batches, schedule, recompute = OPTIONS[10 * len(cases) % len(OPTIONS)]
        cases.append(Case(model, replicas, micro_batches, schedule, recompute))
    # Building a recurrent model takes longer than all else together: every other case of it.
    return [case for index, case in enumerate(cases) if case.model != "lstm" or index % 2]


@pytest.fixture(scope="module")
def reference() -> Callable[[str, int, str], Reference]:
    """Plain training, once for each model, batch size and float type."""
    known: dict[tuple[str, int, str], Reference] = {}

    def train(name: str, samples: int, floatx: str) -> Reference:
        if (name, samples, floatx) not in known:
            known[name, samples, floatx] = Reference.of(ZOO[name], samples)
        return known[name, samples, floatx]

    return train


def check(case: Case, plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dapple.Plan.manual(
        ZOO[case.model].cuts_for(len(case.replicas)),
        device_lists(case.replicas),
        case.micro_batches,
        case.batch,
        schedule=case.schedule,
        recompute=case.recompute,
    )
    cluster = dapple.Cluster.local(sum(case.replicas), kind="cpu")
    assert_equal_training(ZOO[case.model], cluster, plan, plain, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(), ids=str)
def test_every_structure_trains_as_plain_keras_in_float64(
    case: Case, reference: Callable[[str, int, str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_float64()
    check(case, reference(case.model, case.batch, "float64"), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "M{}-{}-{}".format(*options))
def test_all_options_together_on_one_model(
    options: tuple[int, str, str], reference: Callable[[str, int, str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_float64()
    case = Case("branches", (2, 1, 3), *options)
    check(case, reference(case.model, case.batch, "float64"), monkeypatch)


@pytest.mark.parametrize(
    "model", [name if name in ("cnn", "branches") else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_every_structure_trains_as_plain_keras_in_float32(
    model: str, reference: Callable[[str, int, str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(model, (3, 1), 4, "dapple_a", "none")
    check(case, reference(model, case.batch, "float32"), monkeypatch)
