"""Which stages, and which steps, are one function: by plan and kind of step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from models_for_tests import classifier, plan, samples, transform
from programs import mlp, two_layers

import dapple_tf as dapple
from dapple_tf.execution.builds import Build
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode
from graph_passes.ir.program import Program
from graph_passes.pass_manager import run_passes
from graph_passes.passes.partition import Partition


def passes(cuts: tuple[str, ...], devices: list[list[int]], micro_batches: int, **options: Any) -> StepPasses:
    plan = dapple.Plan.manual(cuts, devices, micro_batches, 12, **options)
    count = 1 + max(map(max, plan.devices))
    return StepPasses(plan, dapple.Cluster.local(count, kind="cpu"))


def fused(made: StepPasses, mode: Mode = Mode.TRAIN) -> set[int]:
    partition = made.stage_passes(mode, "")[-1]
    assert isinstance(partition, Partition)
    return {stage for stage, form in enumerate(partition.forms) if form.fuse}


@pytest.mark.parametrize(
    ("cuts", "devices", "micro_batches", "schedule", "expected"),
    [
        ((), [[0]], 1, "gpipe", {0}),
        ((), [[0]], 4, "gpipe", set()),  # All F, then all B.
        ((), [[0, 1]], 4, "dapple_a", {0}),
        (("a",), [[0], [1]], 1, "gpipe", {0, 1}),  # Its B waits for another device, but nothing is done meanwhile.
        (("a",), [[0], [1]], 4, "gpipe", set()),
        (("a",), [[0, 1], [2]], 4, "dapple_b", {1}),
        (("a",), [[0], [0]], 1, "dapple_a", {1}),  # The first stage's B comes after the second's.
        (("a",), [[0], [1]], 4, "zb_h1", set()),  # B is in two parts.
        (("a", "b", "c"), [[0], [1], [0], [1]], 4, "interleaved", {3}),
    ],
)
def test_stages_that_do_nothing_between_forward_and_backward(
    cuts: tuple[str, ...], devices: list[list[int]], micro_batches: int, schedule: str, expected: set[int]
) -> None:
    made = passes(cuts, devices, micro_batches, schedule=schedule, jit_compile=True)
    assert fused(made) == expected
    assert not fused(made, Mode.TEST) and not fused(made, Mode.PREDICT)
    assert not fused(passes(cuts, devices, micro_batches, schedule=schedule))


def built(made: StepPasses, program: Program, mode: Mode = Mode.TRAIN) -> Build:
    """The stage functions of a program by these passes."""
    staged = run_passes(program, made.stage_passes(mode, "own_"))
    return Build(mode, BatchSpec(None), staged, (), "own_", carried=())


@pytest.mark.parametrize(
    ("cuts", "devices", "options", "samples", "expected"),
    [
        ((), [[0]], {}, 12, True),
        (("dense_0",), [[0], [0]], {}, 12, True),
        (("dense_0",), [[0], [0]], {"jit_compile": True}, 12, False),  # The first stage's B is apart from its F.
        ((), [[0, 1]], {}, 1, False),  # The other replica has no samples, but parameters.
        (("dense_0",), [[0], [1]], {}, 12, False),
        ((), [[0]], {"micro_batches": 2}, 12, False),
        ((), [[0]], {"micro_batches": 2}, 6, True),  # A batch of half the size is one micro-batch.
        ((), [[0]], {}, 13, False),
    ],
)
def test_steps_that_are_one_function(
    cuts: tuple[str, ...], devices: list[list[int]], options: dict[str, Any], samples: int, expected: bool
) -> None:
    micro_batches = options.pop("micro_batches", 1)
    made = passes(cuts, devices, micro_batches, **options)
    assert made.joins(built(made, mlp(2) if cuts else two_layers()), samples) is expected


def test_only_training_steps_are_one_function() -> None:
    made = passes((), [[0]], 1)
    assert not made.joins(built(made, mlp(2, Mode.TEST), Mode.TEST), 12)


def test_a_step_whose_operators_are_placed_one_by_one_is_not_one_function() -> None:
    made = passes((), [[0]], 1)
    placed = dataclasses.replace(made, plan=made.plan.with_placed_operators())
    assert not placed.joins(built(made, two_layers()), 12)


@pytest.mark.parametrize("gpus", [False, True])
def test_evaluation_and_prediction_on_gpus_have_functions_of_one_size(
    gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shape that a forward computed was copied to the host, which waits for all kernels before it."""
    monkeypatch.setattr(StepPasses, "on_gpus", frozenset(range(2)) if gpus else frozenset())
    pipelined = transform(classifier(metrics=["accuracy"]), plan(devices=[[0, 1], [2]]))
    x, y, _ = samples(19)
    np.testing.assert_allclose(
        pipelined.predict(x, batch_size=8, verbose=0), pipelined.model.predict(x, batch_size=8, verbose=0), rtol=1e-5
    )
    own, plain = (model.evaluate(x, y, batch_size=8, verbose=0) for model in (pipelined, pipelined.model))
    assert own == pytest.approx(plain, rel=1e-5)
    graph, _ = pipelined.session_graph()
    forwards = [name for f in graph.library.function if (name := f.signature.name).endswith("forward")]
    assert any("_of" in name for name in forwards) == gpus, forwards
    pipelined.close()
