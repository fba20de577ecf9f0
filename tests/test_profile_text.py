"""The text format of the DAPPLE planner's profiles: the published files, what brackets mean, round trips and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dapple_tf.describe.layer_profile import Cost, LayerProfile, ProfileError
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
from dapple_tf.describe.profile_text import PUBLISHED, load_text, parse_text, to_text

LAYERS = {
    "amoeba-36": 44,
    "bert-48": 53,
    "bert-large": 29,
    "gnmt-16": 96,
    "resnet-50": 177,
    "vgg-19": 26,
    "xlnet-36": 43,
}


def line(
    number: int, description: str = "", activation: object = 8, parameters: object = 0, forward: object = 1
) -> str:
    return (
        f"node{number} -- {description} -- forward_compute_time={forward}, backward_compute_time=2, "
        f"activation_size={activation}, parameter_size={parameters}"
    )


def text(lines: list[str], edges: str = "") -> str:
    """Lines of nodes, and edges such as ``1-2 1-3``."""
    pairs = (edge.split("-") for edge in edges.split())
    return "\n".join([*lines, *(f"\tnode{first} -- node{second}" for first, second in pairs)])


def parsed(lines: list[str], edges: str = "", batch_size: int = 1) -> Profile:
    return parse_text(text(lines, edges), batch_size=batch_size, model="m", source="file")


def names(profile: Profile) -> list[str]:
    return [layer.name for layer in profile.layers]


def sizes(profile: Profile) -> list[tuple[int, tuple[int, ...], float]]:
    return [(tensor.producer, tensor.consumers, tensor.bytes.at(profile.batch_sizes[0])) for tensor in profile.tensors]


# ---- the published files


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_profile_has_the_totals_of_its_file_and_comes_back_equal(name: str) -> None:
    profile = load_text(name)
    content = PUBLISHED[name].read_text()
    batch_size = profile.batch_sizes[0]
    assert profile.model == PUBLISHED[name].stem
    assert len(profile.layers) == LAYERS[name]
    for field, attribute in (("forward_compute_time", "forward"), ("backward_compute_time", "backward")):
        total = sum(map(float, re.findall(rf"{field}=([\d.]+)", content)))
        assert profile.total(attribute).at(batch_size) == pytest.approx(total / 1000, rel=1e-12)
        assert profile.total(attribute).fixed == 0
    assert profile.parameter_bytes == sum(map(float, re.findall(r"parameter_size=([\d.]+)", content)))
    edges = re.findall(r"^\s+node(\d+) -- node(\d+)$", content, flags=re.MULTILINE)
    assert sum(len(tensor.consumers) for tensor in profile.tensors) == len(edges)
    assert parse_text(to_text(profile), batch_size=batch_size, model=profile.model) == profile


def test_a_cell_of_amoebanet_sends_one_tensor_to_both_readers() -> None:
    profile = load_text("amoeba-36")
    cell, before = profile.index["cell_12"], profile.index["reduction_cell_0"]
    assert [tensor for tensor in profile.tensors if tensor.producer == cell] == [
        Tensor(cell, (cell + 1, cell + 2), Cost(0.0, 3211264.0))
    ]
    labels = 4004
    assert profile.crossing[cell][0].at(1) == 3211264 + 2408448 + labels
    assert profile.crossing[cell][1].at(1) == 3211264 + 2408448
    assert profile.layers[before].residual_bytes == Cost(0.0, 2408448.0)


def test_a_getitem_reads_one_tensor_of_gnmts_lstm() -> None:
    profile = load_text("gnmt-16")
    lstm, first, second = (profile.index[name] for name in ("LSTM(2048, 1024)", "__getitem__(0)", "__getitem__(1)"))
    read = [size for size in sizes(profile) if size[0] == lstm]
    assert read == [(lstm, (first,), 9175040.0), (lstm, (second,), 262144.0)]
    assert profile.layers[lstm].output_bytes.at(64) == 9175040 + 2 * 262144
    attention = next(index for index, layer in enumerate(profile.layers) if layer.name.startswith("RecurrentAttention"))
    assert sum(size for producer, _, size in sizes(profile) if producer == attention) == 2 * (9437184 + 262144)


# ---- order and names


def test_names_are_made_unique_and_an_empty_one_is_the_nodes_id() -> None:
    profile = parsed([line(1, "x"), line(2, ""), line(3, "x"), line(4, "x#2"), line(5, "x"), line(6, "y (a, b) [c]")])
    assert names(profile) == ["x", "node2", "x#3", "x#2", "x#4", "y (a, b) [c]"]


def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text(line(1, "a"), encoding="utf-8-sig")
    profile = load_text(tmp_path / "tiny.txt", batch_size=1, device="V100")
    assert (profile.model, profile.device, names(profile)) == ("tiny", "V100", ["a"])


# ---- costs


def test_times_become_seconds_and_all_but_parameters_grow_with_samples() -> None:
    profile = parsed([line(1, "a", activation="[64; 16]", parameters="12.000", forward="1.5e1")], batch_size=4)
    assert profile == Profile(
        model="m",
        device="unknown",
        batch_sizes=(4,),
        layers=(
            LayerProfile(
                "a",
                Cost(0.0, 0.015 / 4),
                Cost(0.0, 0.0005),
                residual_bytes=Cost(0.0, 20.0),
                output_bytes=Cost(0.0, 20.0),
                parameter_bytes=12,
            ),
        ),
        tensors=(),
    )


@pytest.mark.parametrize(
    ("size", "expected", "output"),
    [
        ("[8]", [(0, (1, 2, 3), 8)], 8),
        ("[8; 4; 2]", [(0, (1,), 8), (0, (2,), 4), (0, (3,), 2)], 14),
        ("[8; 4; 8]", [(0, (1, 3), 8), (0, (2,), 4)], 12),
        ("[8; 4]", [(0, (1, 2, 3), 12)], 12),
    ],
)
def test_what_a_bracket_hands_to_three_readers(
    size: str, expected: list[tuple[int, tuple[int, ...], float]], output: float
) -> None:
    profile = parsed([line(1, "a", activation=size), line(2, "b"), line(3, "c"), line(4, "d")], "1-4 1-3 1-2")
    assert sizes(profile) == expected
    assert profile.layers[0].output_bytes == profile.layers[0].residual_bytes == Cost(0.0, output)


@pytest.mark.parametrize(
    ("size", "selected", "expected", "output"),
    [
        ("[8; 4; 2]", (2, 0), [(0, (1,), 2), (0, (2,), 8)], 14),
        ("[8; 4]", (1, 1), [(0, (1, 2), 4)], 12),
        ("[8; 4]", (1, 2), [(0, (1,), 8), (0, (2,), 4)], 12),
    ],
)
def test_what_a_bracket_hands_to_two_getitems(
    size: str, selected: tuple[int, int], expected: list[tuple[int, tuple[int, ...], float]], output: float
) -> None:
    children = [line(number, f"__getitem__({entry})") for number, entry in zip((2, 3), selected, strict=True)]
    profile = parsed([line(1, "a", activation=size), *children], "1-2 1-3")
    assert sizes(profile) == expected
    assert profile.layers[0].output_bytes == Cost(0.0, output)


def test_gradients_flow_back_from_where_parameters_were_used() -> None:
    lines = [line(1, "image"), line(2, "mask"), line(3, "scale", parameters=4), line(4, "add"), line(5, "loss")]
    profile = parsed(lines, "1-3 3-4 2-4 4-5")
    assert [(tensor.producer, tensor.differentiable) for tensor in profile.tensors] == [
        (0, False),
        (1, False),
        (2, True),
        (3, True),
    ]


# ---- round trips


RICH = Profile(
    model="rich",
    device="cpu",
    batch_sizes=(2, 4),
    layers=(
        LayerProfile(
            "first\nof two ", Cost(1.0, 0.5), Cost(2.0, 1.0), Cost(1.0, 0.25), output_bytes=Cost(0, 99), slot_bytes=7
        ),
        LayerProfile("b", Cost(), Cost(0.0, 0.125), parameter_bytes=3),
        LayerProfile("c", Cost(), Cost()),
    ),
    tensors=(Tensor(0, (1, 2), Cost(16, 4)), Tensor(0, (2,), Cost(0, 4), differentiable=False)),
    shared=(SharedParameters((0, 2), 40),),
)


def test_more_than_the_format_holds_is_written_for_one_batch() -> None:
    def expected(forward: int, backward: int, size: int, last: int) -> str:
        return (
            f"node1 -- first of two -- forward_compute_time={forward}, backward_compute_time={backward}, "
            f"activation_size={size}, parameter_size=40\n"
            f"node2 -- b -- forward_compute_time=0, backward_compute_time={last}, activation_size=0, parameter_size=3\n"
            "node3 -- c -- forward_compute_time=0, backward_compute_time=0, activation_size=0, parameter_size=0\n"
            "\tnode1 -- node2\n\tnode1 -- node3\n"
        )

    assert to_text(RICH) == expected(2000, 4000, 16 + 8 + 8, 250)
    assert to_text(RICH, samples=4) == expected(3000, 6000, 16 + 16 + 16, 500)


# ---- errors

GOOD = [line(1, "a"), line(2, "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "file: no line describes a node; give 'nodeN -- description -- forward_compute_time=..., ...'"),
        (text(GOOD, "1-3"), "file:3: an edge names 'node3', which no line describes; add a line for it"),
        (text(GOOD, "0-1"), "file:3: an edge names 'node0', which no line describes; add a line for it"),
        (text(GOOD, "1-2 2-1"), "file: the edges form a cycle: node1 -- node2 -- node1; remove one of them"),
        (text([*GOOD, line(1, "c")]), "file:3: 'node1' is described a second time, after line 1"),
        (text(GOOD) + "\n# made by hand", "file:3: '# made by hand' isn't 'nodeN -- description -- forward_compute"),
        (text(GOOD) + "\n\tnode1", "file:3: 'node1' is indented, but no edge 'nodeA -- nodeB'; don't indent"),
        (line(1, "a", forward="nan"), "file:1: forward_compute_time is 'nan'; it must be a number"),
        (line(1, "a", forward="-1"), "file:1: forward_compute_time is '-1'; it must be at least 0 and below 1e30"),
        (line(1, "a", activation="[1; x]"), "file:1: activation_size is 'x'; it must be a number"),
        (line(1, "a") + ", memory=4", "file:1: 'memory=4' isn't one of the fields forward_compute_time, backward_"),
        (line(1, "a") + ", parameter_size=4", "file:1: parameter_size is given twice, as '0' and '4'"),
        (line(1, "a").replace(", parameter_size=0", ""), "file:1: parameter_size is missing"),
    ],
)
def test_a_wrong_text_is_refused_with_its_line(content: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_text(content, batch_size=1, model="m", source="file")
    assert str(caught.value).startswith(message)
