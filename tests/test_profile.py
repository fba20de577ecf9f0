"""Profiles: costs, what they refuse, what crosses a cut, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from dapple_tf.describe.layer_profile import Cost, LayerProfile, NeededLater, ProfileError
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor

FULL = LayerProfile(
    name="dense, größer",
    forward=Cost(1e-5, 2e-6),
    backward=Cost(3e-5, 5e-6),
    backward_weight=Cost(1e-5, 2e-6),
    residual_bytes=Cost(64, 1024.5),
    min_cut_residual_bytes=Cost(0, 128),
    delayed_bytes=Cost(0, 96),
    temporary_bytes=Cost(0, 1 / 3),
    output_bytes=Cost(4, 256),
    parameter_bytes=4096,
    slot_bytes=8192,
    state_bytes=12,
    apply_seconds=1e-6,
    spread=0.125,
    recomputation=Cost(8e-6, 1e-6),
    needed_later=(NeededLater(1, 0.25), NeededLater(3, 0.5)),
)


def bare(name: str) -> LayerProfile:
    return LayerProfile(name, Cost(0.0, 1.0), Cost(0.0, 2.0))


def chain(count: int, *tensors: Tensor, **fields: Any) -> Profile:
    layers = tuple(bare(f"layer{index}") for index in range(count))
    return Profile(**({"model": "m", "device": "cpu", "batch_sizes": (4,)} | fields), layers=layers, tensors=tensors)


PROFILE = Profile(
    model="model",
    device="V100",
    batch_sizes=(2, 4),
    layers=(FULL, bare("b"), bare("c")),
    tensors=(Tensor(0, (1, 2), Cost(4, 256)), Tensor(1, (2,), Cost(0, 8), differentiable=False)),
    shared=(SharedParameters((0, 2), 400, 800),),
    step_seconds=1e-3,
    task_seconds=1e-4,
    key="0123abcd",
)


# ---- costs


def test_a_cost_grows_with_samples() -> None:
    assert Cost(3, 2).at(5) == 13
    assert Cost(3, 2) + Cost(1, 1) == Cost(4, 3)
    assert Cost(3, 2) * 0.5 == Cost(1.5, 1.0)


@pytest.mark.parametrize("part", ["fixed", "per_sample"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "part is -1; it must be finite and at least 0"),
        (math.nan, "part is nan; it must be finite"),
        ("1", "part is '1'; it must be a number"),
    ],
)
def test_a_cost_out_of_range_is_refused(part: str, value: Any, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        Cost(**{part: value})
    assert str(caught.value).startswith(f"a cost's {part} part is ")
    assert message in str(caught.value)


# ---- profiles


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": ()}, "the profile of 'model' has no layers"),
        ({"batch_sizes": ()}, "batch_sizes is []; give at least one whole number of samples of at least 1"),
        ({"batch_sizes": (4, 0)}, "batch_sizes is [4, 0]; give at least one whole number of samples of at least 1"),
        ({"layers": (FULL, bare("b"), bare("b"))}, "layers 1 and 2 are both named 'b'"),
        ({"tensors": (Tensor(0, (), Cost()),)}, "a tensor goes from layer 0 to layers []; these must be later layers"),
        ({"tensors": (Tensor(0, (2, 1), Cost()),)}, "a tensor goes from layer 0 to layers [2, 1]; these must be"),
        (
            {"tensors": (Tensor(0, (3,), Cost()),)},
            "a tensor goes from layer 0 to layers [3]; these must be later layers of the 3",
        ),
        ({"shared": (SharedParameters((1,), 4),)}, "shared parameters are used by layers [1]; give at least two"),
        ({"shared": (SharedParameters((1, 3), 4),)}, "shared parameters are used by layers [1, 3], but there are 3"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        dataclasses.replace(PROFILE, **fields)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ((NeededLater(4, 0.5),), "a part of layer 1, 'b', is needed later by layer 4; this must be 2 to 3, the number"),
        ((NeededLater(2, 0.7), NeededLater(3, 0.6)), "the shares of layer 'b' that are needed later add up to 1.3"),
    ],
)
def test_parts_that_are_needed_by_no_later_layer_are_refused(later: tuple[NeededLater, ...], message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        dataclasses.replace(PROFILE, layers=(FULL, dataclasses.replace(bare("b"), needed_later=later), bare("c")))
    assert str(caught.value).startswith(message)
    with pytest.raises(ProfileError, match=r"the share of F that is needed later is -0\.5; it must be a finite number"):
        NeededLater(2, -0.5)


def test_what_a_stage_computes_again_ends_where_it_ends() -> None:
    assert PROFILE.recomputed(0, 1) == FULL.recomputation * 0.25
    assert PROFILE.recomputed(0, 2) == FULL.recomputation * 0.5 + Cost(0.0, 1.0)
    assert PROFILE.recomputed(0, 3) == FULL.recomputation * 0.5 + Cost(0.0, 2.0)
    assert PROFILE.recomputed(1, 3) == Cost(0.0, 2.0)


def test_scaling_changes_times_and_nothing_else() -> None:
    scaled = PROFILE.scaled(2.0, device="slower")
    assert scaled.device == "slower"
    assert scaled.total("backward") == PROFILE.total("backward") * 2
    assert scaled.layers[0].backward_weight == Cost(2e-5, 4e-6)
    assert scaled.layers[0].apply_seconds == 2e-6
    assert scaled.recomputed(0, 1) == PROFILE.recomputed(0, 1) * 2
    assert PROFILE.scaled(2.0).scaled(0.5) == PROFILE


def test_a_profile_prints_a_table() -> None:
    lines = str(PROFILE).splitlines()
    assert lines[0] == "Profile of 'model' on V100: 3 layers, measured at 2, 4 samples; below, a slice of 4"
    assert " ".join(lines[1].split()) == "layer F ms B ms Bw ms output MB residual MB parameters MB apply ms spread"
    assert lines[2].split()[2:] == ["0.018", "0.050", "0.018", "0.001", "0.004", "0.004", "0.001", "12%"]
    assert lines[3].split()[3] == "?"
    assert len({len(line) for line in lines[1:]}) == 1


# ---- cuts


@pytest.mark.parametrize("seed", range(10))
def test_what_crosses_is_what_is_made_before_and_read_after(seed: int) -> None:
    generator = random.Random(seed)
    count = generator.randint(1, 30)
    tensors = []
    for _ in range(generator.randint(0, 60) if count > 1 else 0):
        producer = generator.randrange(count - 1)
        later = range(producer + 1, count)
        readers = tuple(sorted(generator.sample(later, generator.randint(1, min(4, len(later))))))
        size = Cost(generator.random() * 10 ** generator.randint(-3, 12), generator.choice([0.0, generator.random()]))
        tensors.append(Tensor(producer, readers, size, generator.random() < 0.5))
    profile = chain(count, *tensors)
    for cut, costs in enumerate(profile.crossing):
        crossing = [tensor for tensor in tensors if tensor.producer <= cut < max(tensor.consumers)]
        returning = [tensor for tensor in crossing if tensor.differentiable]
        assert costs == tuple(
            Cost(math.fsum(t.bytes.fixed for t in there), math.fsum(t.bytes.per_sample for t in there))
            for there in (crossing, returning)
        )
    assert profile.crossing[-1] == (Cost(), Cost())


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (
            ["layer9"],
            "the plan cuts after 'layer9', which isn't a layer of the profile of 'm'; its layers are layer0, layer1, ",
        ),
        (["layer1", "layer1"], "cuts leave stage 1 without a layer; give cuts in the order of layers, none after"),
    ],
)
def test_wrong_cuts_are_refused(cuts: list[str], message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        chain(4).stage_of_layers(cuts)
    assert str(caught.value).startswith(message)


# ---- JSON


def test_json_has_a_line_for_each_layer_and_no_defaults(golden: Callable[[str, str], None]) -> None:
    golden("profile.json", PROFILE.to_json())


def changed(*path: str | int, value: Any = None, remove: bool = False) -> str:
    """PROFILE's JSON text with one value replaced or removed."""
    data = json.loads(PROFILE.to_json())
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(data)


WHOLE_ERROR = "it must be a whole number of at least 0 and below 2**63"
NUMBER_ERROR = "it must be a finite number of at least 0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("format", value="other"), ": 'format' is 'other'; this version reads 'dapple_tf.profile/1'"),
        (changed("extra", value=1), ": unknown key 'extra'; the keys are model, device, batch_sizes, layers, "),
        (changed("batch_sizes", 1, value=True), f": batch_sizes[1] is True; {WHOLE_ERROR}"),
        (changed("step_seconds", value=math.nan), f": step_seconds is nan; {NUMBER_ERROR}"),
        (changed("tensors", 0, "kept", value=[3]), ": a tensor of layer 0 is kept by layer 3, but there are 3"),
        (
            changed("tensors", 0, "delayed", value=[0, 7]),
            ": a tensor of layer 0 is delayed by layer 7, but there are 3",
        ),
        (changed("shared", 0, "layers", value=[1]), ": shared parameters are used by layers [1]; give at least two"),
    ],
)
def test_a_wrong_text_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(text, source="mine")
    assert str(caught.value).startswith(f"mine{message}")
