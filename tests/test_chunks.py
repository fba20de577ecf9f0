"""Replicated stages cut into chunks."""

from __future__ import annotations

import pytest
from hardware import linked

from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, SharedParameters
from dapple_tf.planning.stage_cuts import chunked


def profile_of(
    parameters: list[int], crossing: list[float] | None = None, shared: tuple[SharedParameters, ...] = ()
) -> Profile:
    """Layers of F = 1 s and B = 2 s a sample, with so many bytes of parameters each."""
    layers = [
        LayerProfile(f"layer_{index}", Cost(0.0, 1.0), Cost(0.0, 2.0), parameter_bytes=size)
        for index, size in enumerate(parameters)
    ]
    return linked(layers, crossing or 1.0, shared=shared)


def test_equal_layers_make_equal_chunks() -> None:
    plan = Plan.data_parallel(2, 8)
    in_chunks = chunked(plan, profile_of([10] * 8), 4)
    assert in_chunks.cuts == ("layer_1", "layer_3", "layer_5")
    assert in_chunks.devices == ((0, 1),) * 4
    assert (in_chunks.micro_batches, in_chunks.schedule) == (plan.micro_batches, plan.schedule)


def test_chunks_recompute_what_their_stage_does() -> None:
    plan = Plan.manual(["layer_3"], [[0, 1], [2]], 2, 8, recompute=("boundary", "none"))
    assert chunked(plan, profile_of([10] * 8), 2).options["recompute"] == ("boundary", "boundary", "none")


def test_stages_that_arent_replicated_stay_whole() -> None:
    plan = Plan.manual(["layer_3"], [[0, 1], [2]], 2, 8)
    assert chunked(plan, profile_of([10] * 8), 2).cuts == ("layer_1", "layer_3")
    straight = Plan.straight(["layer_3"], 8, 2)
    assert chunked(straight, profile_of([10] * 8), 2) is straight


def test_of_cuts_that_are_about_as_good_few_bytes_cross() -> None:
    crossing = [9.0] * 7
    crossing[4] = 1.0
    assert chunked(Plan.data_parallel(2, 8), profile_of([10] * 8, crossing), 2).cuts == ("layer_4",)


def test_every_chunk_has_parameters() -> None:
    assert chunked(Plan.data_parallel(2, 8), profile_of([0, 0, 10, 0, 0, 10, 0, 0]), 8).num_stages == 2
    bare = Plan.data_parallel(2, 8)
    assert chunked(bare, profile_of([0] * 4), 4) is bare
    assert chunked(bare, profile_of([0, 10, 0, 0]), 4) is bare


def test_what_is_said_of_a_stage_holds_for_its_chunks() -> None:
    plan = Plan.manual(
        ["layer_3"],
        [[0, 1], [2, 3]],
        4,
        8,
        "fast_forward_a",
        warm_up=(3, 2),
        reverse_first_k=1,
        task_seconds=((1.0, 2.0, 4.0), (1.0, 1.0, 1.0)),
    )
    in_chunks = chunked(plan, profile_of([10] * 8), 2)
    assert in_chunks.warm_up == (3, 3, 2, 2)
    assert in_chunks.reverse_first_k == 2
    assert in_chunks.options["task_seconds"] == ((0.5, 1.0, 2.0), (0.5, 1.0, 2.0), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("chunks", "cut", "text"),
    [
        (0, "layer_3", "chunks is 0; it must be at least 1"),
        (1.5, "layer_3", r"chunks: 1\.5 isn't a whole number"),
        (2, "block", "cuts after 'block', which isn't a layer of the profile of 'model'"),
    ],
)
def test_a_wrong_request_is_refused(chunks: int, cut: str, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        chunked(Plan.manual([cut], [[0, 1], [2]], 1, 8), profile_of([10] * 8), chunks)
