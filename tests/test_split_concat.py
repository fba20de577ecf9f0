"""Pass 7: slices travel between the replicas of stages, whatever their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_trains_as_keras
from flat_programs import Steps
from models_for_tests import Computed
from program_text import read_program
from programs import apply, connected, layout, replicated, show_changes, staged, two_stages, updated

from graph_passes.ir.batching import split_by_shares
from graph_passes.ir.program import Program
from graph_passes.ir.text import graph_text
from graph_passes.passes.split_concat import SplitConcat

# ---- structure


def test_what_is_changed_in_a_step(golden: Callable[[str, str], None]) -> None:
    before = replicated(two_stages(), layout([3, 2], 5))
    after = apply(before, SplitConcat())
    golden("split_concat.txt", show_changes(graph_text(before.graph), graph_text(after.graph)))


# ---- who gets what: each replica its own samples, and gradients mirrored

SENT = {
    "rows": ("Identity(a/scaled)", "Identity(x)"),
    "time_major": ("Transpose(a/scaled, [1, 0])", "Transpose(x, [1, 0])"),
    "merged": ("Reshape(a/scaled, [-1])", "Reshape(x, [-1])"),
    "heads": ("Reshape(a/turned, [-1])", "Reshape(b/turned, [-1])"),
    "mean": ("Mean(a/scaled, [0, 1])", "Identity(x)"),
    "parameters": ("Identity(u)", "Identity(x)"),
}
"""What the first of four stages sends to all others, and their own samples in that layout."""


def program_of(kind: str) -> Program:
    """Four stages, each of which multiplies what the first one sends by its own samples."""
    sent, own = SENT[kind.removesuffix("_unknown")]
    width = "?" if kind.endswith("_unknown") else 3
    return read_program(f"""
        x[?, {width}], u[1], w[1], v[1], t[1], s[1]
        a/scaled = Mul(x, w)
        a/turned = Transpose(a/scaled, [1, 0])
        a/sent = {sent}
        b/turned = Transpose(x, [1, 0])
        b/own = {own}
        b/scaled = Mul(b/own, v)
        b/product = Mul(b/scaled, a/sent)
        c/scaled = Mul(b/product, t)
        c/product = Mul(c/scaled, a/sent)
        d/scaled = Mul(c/product, s)
        d/product = Mul(d/scaled, a/sent)
        loss = L2Loss(d/product)
    """)


def of_whole_batch(program: Program, x: np.ndarray, values: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """The loss and gradients of a flat program, by TensorFlow."""
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(program.graph, name="")
        tensors = {name: graph.get_tensor_by_name(f"{name}:0") for name in ("x", "loss", *values)}
        loss = tensors.pop("loss")
        gradients = dict(
            zip(
                values,
                tf.gradients(loss, [tensors[name] for name in values], unconnected_gradients="zero"),
                strict=True,
            )
        )
        with tf.compat.v1.Session(graph=graph) as session:
            given = {tensors[name]: value for name, value in {"x": x, **values}.items()}
            computed: tuple[float, dict[str, Any]] = session.run((loss, gradients), given)
    return computed


@pytest.mark.parametrize(
    ("kind", "replicas", "batch", "micro_batches", "relays"),
    [
        ("rows", (1, 4, 1, 2), 7, 2, ()),
        ("rows", (5, 6, 2, 3), 13, 2, (1, 2)),
        ("rows", (6, 1, 3, 1), 3, 2, (0, 1, 2, 3)),  # Some replicas have no samples.
        ("rows", ((2, 1), (1, 3), (1,), (3, 2, 1)), 31, 1, (1,)),
        ("time_major", ((3, 2, 1), (1,), (1, 1), (1, 15)), 31, 1, ()),
        ("time_major", (1, 5, 2, 3), 13, 2, (2,)),
        ("merged", ((11, 5), (1,), (1, 1, 1), (2, 1)), 31, 1, ()),
        ("merged_unknown", ((1, 4), (2, 2, 5), (1,), (1, 1)), 31, 1, (1,)),
        ("heads", (3, 2, 1, 3), 13, 2, ()),
        ("heads", ((5, 1), (1, 5), (1,), (2, 1)), 31, 1, (1, 2)),
        ("mean", (3, 2, 1, 4), 7, 1, ()),  # the mean by samples, whose gradient is shared out
        ("mean", (2, 3, 2, 1), 7, 1, (1, 2)),
        ("parameters", (2, 1, 3, 2), 7, 2, (1, 2)),
    ],
)
def test_slices_give_the_loss_and_gradients_of_the_whole_batch(
    kind: str, replicas: Sequence[Any], batch: int, micro_batches: int, relays: Sequence[int]
) -> None:
    counts = [own if isinstance(own, int) else len(own) for own in replicas]
    cut = layout(counts, batch, micro_batches)
    if not isinstance(replicas[0], int):
        cut = dataclasses.replace(cut, shares=replicas)
        assert [part.size for part in cut.slices(0, 0)] == list(split_by_shares(batch, replicas[0]))
    flat = program_of(kind)
    x = np.random.default_rng(0).uniform(0.5, 1.5, (batch, 3))
    with Steps(updated(staged(flat, *"abc"), cut, relays=relays), sum(counts)) as steps:
        steps.load()
        values = {name: value[0] for name, value in steps.values().items()}
        for _ in range(2):  # Accumulators begin anew in each step.
            made = steps.run([x], gradients=True)
    loss, gradients = of_whole_batch(flat, x, values)
    np.testing.assert_allclose(made["loss"], [loss], rtol=1e-12)
    for name, (gradient,) in made["gradients"].items():
        np.testing.assert_allclose(gradient, gradients[name], rtol=1e-12, err_msg=name)


# ---- several readers


def test_a_boundary_tensor_that_its_reader_turns_out_not_to_need_is_not_sent() -> None:
    """A node that nothing needs (its result's shape was all that was read, say) left a SplitV of no parts behind."""
    program = read_program("""
        x[?, 2], w[1], v[1]
        a/scaled = Mul(x, w)
        a/unneeded = Square(a/scaled)
        b/nowhere = Square(a/unneeded)
        b/scaled = Mul(a/scaled, v)
        loss = L2Loss(b/scaled)
    """)
    program = connected(staged(program, "a"), layout([2, 1], 4))
    assert all(each.attr["num_split"].i for each in program.graph.node if each.op == "SplitV")
    assert "unneeded" not in "".join(each.name for each in program.graph.node)


def routed() -> keras.Model:
    """A stage's layer tells the next one an expert's number, a mask and int32 numbers, besides its features."""
    features = keras.Input((4,))
    first = keras.layers.Dense(4, name="first")(features)
    told = Computed(lambda z: (z, tf.argmax(z, -1), z > 0, tf.cast(z * 4, tf.int32)), name="told")(first)

    def routed_by(z: Any, expert: Any, mask: Any, numbers: Any) -> Any:
        scale = tf.gather(tf.constant([1.0, 2.0, 3.0, 4.0], z.dtype), expert)[:, None]
        return scale * tf.where(mask, z, tf.cast(numbers, z.dtype))

    model = keras.Model(features, keras.layers.Dense(2, name="last")(Computed(routed_by, name="routed")(*told)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_integers_and_masks_are_cut_for_other_numbers_of_replicas() -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(count, 4)), rng.normal(size=(count, 2)), None) for count in (10, 7)]
    assert_trains_as_keras(routed, ["told"], (2, 3), 2, batches)
