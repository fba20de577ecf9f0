"""Cuts into equal stages, against all cuts."""

from __future__ import annotations

import itertools
import random

import pytest

from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.stage_cuts import balanced, by_memory, by_time


def longest(times: list[float], ends: list[int]) -> float:
    return max(sum(times[a:b]) for a, b in itertools.pairwise([0, *ends, len(times)]))


@pytest.mark.parametrize("seed", range(60))
def test_no_cuts_have_a_shorter_longest_stage(seed: int) -> None:
    draw = random.Random(seed)
    times = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(draw.randrange(1, 9))]
    stages = draw.randrange(1, len(times) + 1)
    cuts = balanced(times, stages)
    assert len(cuts) == stages - 1
    assert cuts == sorted(set(cuts))
    assert all(0 < end < len(times) for end in cuts)
    best = min(longest(times, list(ends)) for ends in itertools.combinations(range(1, len(times)), stages - 1))
    assert longest(times, cuts) == pytest.approx(best)


def profile_of(seconds: list[float], parameters: list[int]) -> Profile:
    layers = [
        LayerProfile(f"l{i}", Cost(0.0, time), Cost(0.0, 2 * time), parameter_bytes=size)
        for i, (time, size) in enumerate(zip(seconds, parameters, strict=True))
    ]
    return Profile("p", "none", (1,), tuple(layers), ())


def test_by_time_names_the_last_layer_of_each_stage_but_the_last() -> None:
    assert by_time(profile_of([1, 1, 1, 3], [0] * 4), 2) == ["l2"]
    assert by_time(profile_of([1, 1, 1, 3], [0] * 4), 1) == []
    assert by_time(profile_of([1, 1, 1, 3], [0] * 4), 4) == ["l0", "l1", "l2"]


def test_by_memory_goes_by_stored_bytes() -> None:
    assert by_memory(profile_of([1, 1, 1, 3], [30, 10, 10, 10]), 2) == ["l0"]
    assert by_memory(profile_of([1, 1, 1, 3], [0, 0, 0, 90]), 3) == ["l1", "l2"]
