"""The text format of the DAPPLE planner's profiles: the published files, what brackets mean, round trips and errors."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from conftest import Within
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_the_published_profiles_are_all_there() -> None:
    assert list(PUBLISHED) == list(LAYERS)
    with pytest.raises(FileNotFoundError):
        load_text("bert-84")


@pytest.mark.parametrize("name", LAYERS)
def test_totals_are_those_of_the_file(name: str) -> None:
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


@pytest.mark.parametrize("name", LAYERS)
def test_published_profiles_come_back_equal(name: str) -> None:
    profile = load_text(name)
    again = parse_text(to_text(profile), batch_size=profile.batch_sizes[0], model=profile.model)
    assert again == profile


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


def test_labels_of_amoebanet_go_where_the_loss_was_when_it_had_18_cells() -> None:
    profile = load_text("amoeba-36")
    assert sizes(profile)[:2] == [(0, (1,), 602112.0), (0, (profile.index["cell_20"],), 4004.0)]


def test_a_getitem_reads_one_tensor_of_gnmts_lstm() -> None:
    profile = load_text("gnmt-16")
    lstm, first, second = (profile.index[name] for name in ("LSTM(2048, 1024)", "__getitem__(0)", "__getitem__(1)"))
    read = [size for size in sizes(profile) if size[0] == lstm]
    assert read == [(lstm, (first,), 9175040.0), (lstm, (second,), 262144.0)]
    assert profile.layers[lstm].output_bytes.at(64) == 9175040 + 2 * 262144
    attention = next(index for index, layer in enumerate(profile.layers) if layer.name.startswith("RecurrentAttention"))
    assert sum(size for producer, _, size in sizes(profile) if producer == attention) == 2 * (9437184 + 262144)


def test_berts_attention_mask_crosses_every_cut_once_and_has_no_gradient() -> None:
    profile = load_text("bert-48")
    cut = profile.index["layer_20"]
    forward, backward = profile.crossing[cut]
    assert (forward.at(2), backward.at(2)) == (4325376 + 3538944, 4325376)


def test_layers_of_resnet_run_in_the_order_of_its_ids() -> None:
    profile = load_text("resnet-50")
    assert names(profile)[:3] == [
        "Input",
        "Conv2d(3, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)",
        "BatchNorm2d(64, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)",
    ]
    assert names(profile)[-1] == "Linear(in_features=2048, out_features=1000, bias=True)"


# ---- order and names


def test_order_is_the_files_as_far_as_edges_allow() -> None:
    profile = parsed([line(9, "loss"), line(3, "a"), line(7, "b"), line(1, "c")], "1-7 7-9 3-9")
    assert names(profile) == ["a", "c", "b", "loss"]


def test_a_residual_edge_is_an_edge() -> None:
    profile = parsed([line(1, "a"), line(2, "b"), line(3, "c"), line(4, "d")], "1-2 2-3 3-4 1-4")
    assert sizes(profile) == [(0, (1, 3), 8), (1, (2,), 8), (2, (3,), 8)]
    assert [cut[0].at(1) for cut in profile.crossing] == [8, 16, 16, 0]


def test_names_are_made_unique_and_an_empty_one_is_the_nodes_id() -> None:
    profile = parsed([line(1, "x"), line(2, ""), line(3, "x"), line(4, "x#2"), line(5, "x"), line(6, "y (a, b) [c]")])
    assert names(profile) == ["x", "node2", "x#3", "x#2", "x#4", "y (a, b) [c]"]


def test_descriptions_may_hold_what_lines_are_made_of() -> None:
    profile = parsed([line(1, "a -- b=1, [2; 3]"), line(2, "node1"), line(3) + " -- stage_id=2"])
    assert names(profile) == ["a -- b=1, [2; 3]", "node1", "node3"]


def test_line_ends_blank_lines_and_indents_of_any_kind() -> None:
    content = f"{line(1, 'a')}\r\n\r\n{line(2, 'b')}\r\n  node1 -- node2  \r\n\t\r\n"
    assert sizes(parse_text(content, batch_size=1, model="m")) == [(0, (1,), 8)]


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
        ("8", [(0, (1, 2, 3), 8)], 8),
        ("[8]", [(0, (1, 2, 3), 8)], 8),
        ("[8; 4; 2]", [(0, (1,), 8), (0, (2,), 4), (0, (3,), 2)], 14),
        ("[8; 4; 8]", [(0, (1, 3), 8), (0, (2,), 4)], 12),
        ("[8;8; 8]", [(0, (1, 2, 3), 8)], 8),
        ("[8; 4]", [(0, (1, 2, 3), 12)], 12),
        ("[8; 4; 2; 1]", [(0, (1, 2, 3), 15)], 15),
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
        ("[4; 4; 2]", (0, 1), [(0, (1,), 4), (0, (2,), 4)], 10),
        ("[8; 4]", (1, 1), [(0, (1, 2), 4)], 12),
        ("[8; 4]", (1, 2), [(0, (1,), 8), (0, (2,), 4)], 12),
        ("[8; 4; 2]", (0, 3), [(0, (1, 2), 14)], 14),
        ("8", (0, 1), [(0, (1, 2), 8)], 8),
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


def test_a_large_graph_loads_at_once(within: Within) -> None:
    generator = random.Random(3)
    count = 1500
    lines, edges = [], []
    for number in range(count):
        size = generator.choice(["1024", "[1024; 512]", "[1024.0; 64.0; 64.0]"])
        lines.append(line(number, f"Block({number % 40}, {'x' * 1000})", activation=size, parameters=number))
        edges += (
            [f"{before}-{number}" for before in {number - 1, generator.randrange(number)} if number] if number else []
        )
    generator.shuffle(lines)
    content = text(lines, " ".join(edges))
    assert len(content) > 1_500_000
    with within(1):
        profile = parse_text(content, batch_size=8, model="large")
    assert len(profile.layers) == count
    assert parse_text(to_text(profile), batch_size=8, model="large") == profile


# ---- round trips


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Graphs in the format, with numbers such as a file has."""
    count = draw(st.integers(1, 8))
    number = st.one_of(st.integers(0, 10**12).map(str), st.floats(0, 1e9).map(lambda value: f"{value:.12g}"))
    entry = st.one_of(st.sampled_from(["0", "4", "8"]), number)
    activation = st.one_of(number, st.lists(entry, min_size=1, max_size=4).map(lambda items: f"[{'; '.join(items)}]"))
    description = st.one_of(
        st.sampled_from(["", "x", "x#2", "Add", *(f"__getitem__({i})" for i in range(4)), "__getitem__(999)"]),
        st.text("abc ()[]-#=,;\t\x85", max_size=6),
    )
    lines = [
        line(node, draw(description), draw(activation), draw(st.sampled_from([0, 0, 4, "8.000"])), draw(number))
        for node in range(count)
    ]
    pairs = [(first, second) for second in range(count) for first in range(second)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=16)) if pairs else []
    order = draw(st.permutations(lines))
    return text(order, " ".join(f"{first}-{second}" for first, second in edges))


@pytest.mark.thorough
@pytest.mark.slow
@settings(max_examples=500, deadline=None, derandomize=True)
@given(texts(), st.sampled_from([1, 2, 3, 6, 7, 128]))
def test_what_was_read_is_written_and_read_back_equal(content: str, batch_size: int) -> None:
    profile = parse_text(content, batch_size=batch_size, model="m")
    again = to_text(profile)
    assert parse_text(again, batch_size=batch_size, model="m") == profile
    assert to_text(parse_text(again, batch_size=batch_size, model="m")) == again


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1e20), min_size=3, max_size=3), st.integers(1, 300))
def test_costs_of_any_digits_come_back_equal(costs: list[float], batch_size: int) -> None:
    forward, backward, size = (Cost(0.0, cost) for cost in costs)
    layers = (
        LayerProfile("a", forward, backward, residual_bytes=size, output_bytes=size, parameter_bytes=1),
        LayerProfile("b", forward, backward),
    )
    profile = Profile("m", "unknown", (batch_size,), layers, (Tensor(0, (1,), size),))
    assert parse_text(to_text(profile), batch_size=batch_size, model="m") == profile


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


def test_what_the_format_cannot_tell_apart_never_lessens_what_crosses() -> None:
    generator = random.Random(5)
    for _ in range(200):
        count = generator.randint(2, 6)
        tensors = []
        for _ in range(generator.randint(1, 6)):
            producer = generator.randrange(count - 1)
            later = range(producer + 1, count)
            readers = tuple(sorted(generator.sample(later, generator.randint(1, len(later)))))
            tensors.append(Tensor(producer, readers, Cost(0.0, generator.choice([4.0, 8.0]))))
        description = generator.choice(["layer{}", "__getitem__({})"])
        layers = tuple(LayerProfile(description.format(index), Cost(), Cost()) for index in range(count))
        profile = Profile("m", "unknown", (1,), layers, tuple(tensors))
        again = parse_text(to_text(profile), batch_size=1, model="m")
        for before, after in zip(profile.crossing, again.crossing, strict=True):
            assert after[0].at(1) >= before[0].at(1)


# ---- errors

GOOD = [line(1, "a"), line(2, "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "file: no line describes a node; give 'nodeN -- description -- forward_compute_time=..., ...'"),
        (text(GOOD, "1-3"), "file:3: an edge names 'node3', which no line describes; add a line for it"),
        (text(GOOD, "0-1"), "file:3: an edge names 'node0', which no line describes; add a line for it"),
        (text(GOOD, "1-2 2-1"), "file: the edges form a cycle: node1 -- node2 -- node1; remove one of them"),
        (text(GOOD, "2-2"), "file: the edges form a cycle: node2 -- node2; remove one of them"),
        (text([*GOOD, line(1, "c")]), "file:3: 'node1' is described a second time, after line 1"),
        (text([*GOOD, " " + line(3, "c")]), "file:3: 'node3 -- c -- forward_compute_time=1, "),
        (text(GOOD) + "\nnode1 -- node2", "file:3: 'node1 -- node2' isn't 'nodeN -- description -- "),
        (text(GOOD) + "\n# made by hand", "file:3: '# made by hand' isn't 'nodeN -- description -- forward_compute"),
        (text(GOOD) + "\n\tnode1", "file:3: 'node1' is indented, but no edge 'nodeA -- nodeB'; don't indent"),
        (line(1, "a", forward="fast"), "file:1: forward_compute_time is 'fast'; it must be a number"),
        (line(1, "a", forward=""), "file:1: forward_compute_time is ''; it must be a number"),
        (line(1, "a", forward="nan"), "file:1: forward_compute_time is 'nan'; it must be a number"),
        (line(1, "a", forward="1_0"), "file:1: forward_compute_time is '1_0'; it must be a number"),
        (line(1, "a", forward="-1"), "file:1: forward_compute_time is '-1'; it must be at least 0 and below 1e30"),
        (line(1, "a", forward="1e999"), "file:1: forward_compute_time is '1e999'; it must be at least 0 and below"),
        (line(1, "a", activation="[]"), "file:1: activation_size is ''; it must be a number"),
        (line(1, "a", activation="[1; x]"), "file:1: activation_size is 'x'; it must be a number"),
        (line(1, "a", activation="[1; 2"), "file:1: activation_size is '[1; 2'; it must be a number"),
        (line(1, "a", activation="[1; -2]"), "file:1: activation_size is '-2'; it must be at least 0 and below 1e30"),
        (line(1, "a", parameters=-4), "file:1: parameter_size is '-4'; it must be at least 0 and below 1e30"),
        (line(1, "a") + ", memory=4", "file:1: 'memory=4' isn't one of the fields forward_compute_time, backward_"),
        (line(1, "a") + ", parameter_size=4", "file:1: parameter_size is given twice, as '0' and '4'"),
        (line(1, "a").replace(", parameter_size=0", ""), "file:1: parameter_size is missing"),
        (line(1, "a").replace("backward_compute_time=2, ", ""), "file:1: backward_compute_time is missing"),
    ],
)
def test_a_wrong_text_is_refused_with_its_line(content: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_text(content, batch_size=1, model="m", source="file")
    assert str(caught.value).startswith(message)


def test_a_long_cycle_is_shown_in_part() -> None:
    edges = " ".join(f"{number}-{(number + 1) % 40}" for number in range(40))
    with pytest.raises(ProfileError, match=r"a cycle: node\d+ -- .* -- \.\.\. \(40 nodes\) -- node\d+; remove one"):
        parsed([line(number) for number in range(40)], edges)


def test_a_long_line_is_shown_in_part() -> None:
    with pytest.raises(ProfileError) as caught:
        parsed(["x" * 10**6])
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_a_batch_is_a_whole_number_of_samples(size: int) -> None:
    with pytest.raises(ProfileError, match=f"batch_size is {size}; it must be a whole number of at least 1"):
        parsed(GOOD, batch_size=size)
    with pytest.raises(ProfileError, match=f"samples is {size}; it must be a whole number of at least 1"):
        to_text(RICH, samples=size)
