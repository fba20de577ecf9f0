"""Those who read graphs read dumps: TensorFlow itself and TensorBoard."""

from __future__ import annotations

import functools
import pathlib

import keras
import pytest
import tensorflow as tf
from google.protobuf import text_format

import dapple_tf as dapple
from dapple_tf.dumps.dump import dump_model
from graph_passes.ir.graph import GraphDef
from graph_passes.ir.text import readable

layers = keras.layers

STEP = "train/09_update"


def model() -> keras.Model:
    """With what graphs are hardest to read by: loops and functions with gradients of their own, rows of gradients."""
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(6, 3, mask_zero=True, name="embedding")(tokens)
    x = layers.LSTM(3, return_sequences=True, name="lstm")(x)
    x = layers.Dropout(0.2, name="dropout")(layers.BatchNormalization(name="norm")(x))
    made = keras.Model(tokens, layers.Dense(6, activation="gelu", name="logits")(x), name="reader")
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A dump of a step with replicas and split backwards."""
    folder = tmp_path_factory.mktemp("dump")
    plan = dapple.Plan.manual(["lstm"], [[0, 1], [2]], 2, 8, "zb_h1")
    dump_model(folder, model(), dapple.Cluster.local(3, kind="cpu"), plan)
    return folder


@functools.cache
def graphs(folder: pathlib.Path) -> dict[str, GraphDef]:
    """The graphs that were written as text."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): text_format.Parse(path.read_text(), GraphDef())
        for path in sorted(folder.rglob("*.pbtxt"))
    }


def check_import(graph: GraphDef) -> None:
    """TensorFlow takes a graph, with its functions."""
    assert graph.versions.producer > 0
    own = GraphDef.FromString(graph.SerializeToString())  # It is given default attributes.
    with tf.Graph().as_default() as scope:
        tf.graph_util.import_graph_def(own, name="")
    assert len(scope.get_operations()) == len(graph.node)


def test_tensorflow_imports_every_graph(dumped: pathlib.Path) -> None:
    by_name = graphs(dumped)
    assert len(by_name) == 10 + 2 * 3
    for graph in by_name.values():
        assert len({node.name for node in graph.node}) == len(graph.node)
        check_import(graph)
    assert len(by_name[STEP].library.function) > 20
    assert any(node.op in ("While", "StatelessWhile") for node in by_name["train/00_capture"].node)


def test_tensorboards_accumulator_has_the_graph(dumped: pathlib.Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard isn't installed (make venv)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = EventAccumulator(str(dumped / "tensorboard" / STEP)).Reload()
    assert run.Tags()["graph"]
    # Serialized, as NaN differs from itself.
    read = GraphDef.FromString(run.Graph().SerializeToString())
    pair = (readable(read), graphs(dumped)[STEP])
    assert len({graph.SerializeToString(deterministic=True) for graph in pair}) == 1
