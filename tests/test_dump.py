"""What a dump writes, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import html.parser
import pathlib
import shutil
from collections.abc import Sequence

import keras
import numpy as np
import pytest
from models_for_tests import classifier, layers, plan, samples, transform, values

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.dumps.dump import dump_model
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.placement_report import placements_report
from dapple_tf.output_folder import LIST, FolderError
from graph_passes.ir.tasks import Schedule

X, Y, _ = samples(7)
DRAWINGS = [
    *("graph.dot", "graph.html", "schedule.txt"),
    *(["graph.svg"] if shutil.which("dot") else []),  # drawn by Graphviz
    *("timeline.html", "timeline.png", "timeline.svg", "timeline.txt", "trace.json"),
]


def files(folder: pathlib.Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def passes(*names: str, stages: int, first: int = 0) -> list[str]:
    """Names of the graphs of passes; those that build stages have each stage's, too."""
    graph_names = []
    for number, name in enumerate(names, start=first):
        graph_names.append(f"{number:02d}_{name}")
        if name in ("build_forward", "build_backward", "partition"):
            graph_names += [f"{number:02d}_{name}.stage{stage}" for stage in range(stages)]
    return graph_names


TRAINING = [
    *passes("capture", "assign_stages", "build_forward", "build_backward", "partition", stages=2),
    *passes("replicate", "split_concat", "accumulate", "schedule", "update", stages=2, first=5),
]
PLACING = passes("flatten", "fold_shapes", "share_values", "split_operators", "place_operators", stages=2, first=14)
PREDICTION = [
    *passes("capture", "assign_stages", "build_forward", "partition", stages=2),
    *passes("replicate", "split_concat", "schedule", stages=2, first=5),
]


def runs(names: Sequence[str]) -> list[str]:
    """The runs of TensorBoard for these graphs: those of stages are together."""
    return [name for name in names if ".stage" not in name]


def expected(place: str, names: Sequence[str], drawings: Sequence[str]) -> list[str]:
    events = [f"tensorboard/{place}/{name}/events.out.tfevents.0.graph" for name in runs(names)]
    return [*events, *(f"{place}/{name}.pbtxt" for name in names), *(f"{place}/{name}" for name in drawings)]


class Links(html.parser.HTMLParser):
    """The addresses that a page links to or shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


def own_profile() -> Profile:
    """Of the classifier."""
    cost = Cost(1e-3, 1e-4)
    names = ("first", "second", "logits")
    layer_profiles = [LayerProfile(name=name, forward=cost, backward=cost, output_bytes=Cost(0, 24)) for name in names]
    tensors = [Tensor(layer, (layer + 1,), Cost(0, 24), True) for layer in range(2)]
    return Profile(
        model="classifier", device="CPU", batch_sizes=(4,), layers=tuple(layer_profiles), tensors=tuple(tensors)
    )


# ---- what is there


@pytest.mark.slow
def test_before_the_first_step_training_is_dumped_as_the_model_declares_it(tmp_path: pathlib.Path) -> None:
    pipelined = transform(classifier())
    pipelined.dump(tmp_path)
    own = ["plan.json", "index.html", LIST]
    assert files(tmp_path) == sorted([*own, *expected("train", TRAINING, DRAWINGS)])
    assert dapple.Plan.load(tmp_path / "plan.json") == pipelined.plan
    assert Schedule.parse((tmp_path / "train/schedule.txt").read_text()).orders == plan().order_tasks().orders


@pytest.mark.slow
def test_each_kind_of_step_that_was_run_is_dumped(tmp_path: pathlib.Path) -> None:
    pipelined = transform(classifier())
    pipelined.predict_on_batch(X)
    pipelined.dump(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"predict0", "train", "tensorboard"}
    own = ["plan.json", "index.html", LIST]
    prediction = expected("predict0", PREDICTION, [name for name in DRAWINGS if name[:4] in ("grap", "sche")])
    assert files(tmp_path) == sorted([*own, *prediction, *expected("train", TRAINING, DRAWINGS)])
    pipelined.train_on_batch(X, Y)
    pipelined.train_on_batch(X[:3], Y[:3])
    pipelined.dump(tmp_path)
    assert files(tmp_path) == sorted([*own, *expected("train1", TRAINING, DRAWINGS)])  # predicting begins anew now
    assert "Training, 7 samples" in (tmp_path / "index.html").read_text()


@pytest.mark.slow
def test_the_first_page_names_every_file_and_its_size(tmp_path: pathlib.Path) -> None:
    pipelined = transform(classifier())
    pipelined.dump(tmp_path)
    text = (tmp_path / "index.html").read_text()
    links = set(Links(text).found)
    own = ("index.html", LIST)
    assert links == {name for name in files(tmp_path) if not name.startswith("tensorboard") and name not in own}
    assert f"{(tmp_path / 'train/09_update.pbtxt').stat().st_size:,}" in text
    assert "tensorboard --logdir tensorboard/train" in text
    assert "after schedule: Lowers a schedule to control edges" in text
    assert "There is no schedule.csv: " in text  # stage 1 has two replicas
    assert "There is no profile" in text


@pytest.mark.slow
def test_a_schedule_without_replicas_is_there_as_csv(tmp_path: pathlib.Path) -> None:
    dump_model(tmp_path, classifier(), dapple.Cluster.local(2, kind="cpu"), plan(devices=[[0], [1]]))
    assert (tmp_path / "train/schedule.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.slow
def test_with_a_profile_the_simulated_step_is_beside_the_planned_one(tmp_path: pathlib.Path) -> None:
    cluster = dapple.Cluster.local(3, kind="cpu")
    dump_model(tmp_path, classifier(), cluster, plan(), own_profile())
    text = (tmp_path / "train/timeline.txt").read_text()
    assert "planned" in text
    assert "simulated" in text


@pytest.mark.slow
def test_a_profile_of_another_model_is_told_of(tmp_path: pathlib.Path) -> None:
    other = own_profile()
    layer = dataclasses.replace(other.layers[0], name="another")
    other = dataclasses.replace(other, layers=(layer, *other.layers[1:]))
    dump_model(tmp_path, classifier(), dapple.Cluster.local(3, kind="cpu"), plan(), other)
    assert "There are no timelines: " in (tmp_path / "index.html").read_text()
    assert (tmp_path / "train/graph.html").exists()


@pytest.mark.thorough
@pytest.mark.slow
def test_carried_updates_are_in_the_steady_step(tmp_path: pathlib.Path) -> None:
    own = plan(carried_updates=1)
    dump_model(tmp_path, classifier(), dapple.Cluster.local(3, kind="cpu"), own)
    text = (tmp_path / "train/09_update.pbtxt").read_text()
    assert '"carried_apply"' in text
    assert '"gradients"' not in text


@pytest.mark.slow
def test_a_described_cluster_will_do(tmp_path: pathlib.Path) -> None:
    text = '{"format": "dapple_tf.cluster/1", "servers": [{"devices": 2}, {"devices": 1}]}'
    cluster = dapple.Cluster.from_json(text)
    page = dump_model(tmp_path, classifier(), cluster, plan())
    assert page == tmp_path / "index.html"
    step = (tmp_path / "train/09_update.pbtxt").read_text()
    assert all(f'device: "{name}"' in step for name in cluster.device_names)
    with pytest.raises(dapple.PlanError, match="plan puts stage 1 on device 3"):
        dump_model(tmp_path, classifier(), cluster, plan(devices=[[0], [3]]))


@pytest.mark.thorough
@pytest.mark.slow
def test_placed_operators_are_told_of_as_they_are_placed(tmp_path: pathlib.Path) -> None:
    own = plan(devices=[[0, 2], [1]]).with_placed_operators()
    pipelined = transform(classifier(), own, operator_costs=OperatorCosts())
    assert not pipelined.placement
    pipelined.train_on_batch(X[:3], Y[:3])
    pipelined.train_on_batch(X, Y)
    pipelined.dump(tmp_path)
    names = ["plan.json", "index.html", LIST, *expected("train0", [*TRAINING, *PLACING], [*DRAWINGS, "operators.txt"])]
    assert sorted({*files(tmp_path)} - {"train0/schedule.csv"}) == sorted(names)
    assert (tmp_path / "train0/operators.txt").read_text() == placements_report(pipelined.placement, [[[0, 2]], [[1]]])
    assert set(pipelined.placement) == {0, 1}
    placed = (tmp_path / "train0/18_place_operators.pbtxt").read_text()
    for stage, devices in enumerate([[0, 2], [1]]):
        used = {pipelined.cluster.device_names[devices[one]] for one in pipelined.placement[stage].devices.values()}
        assert all(f'device: "{name}"' in placed for name in used)
    assert "where each operator runs" in (tmp_path / "index.html").read_text()


@pytest.mark.thorough
@pytest.mark.slow
def test_before_the_first_step_operators_are_placed_as_they_would_be(tmp_path: pathlib.Path) -> None:
    own = dapple.Plan.by_operators(2, 7)
    dump_model(tmp_path, classifier(), dapple.Cluster.local(2, kind="cpu"), own)
    text = (tmp_path / "train/operators.txt").read_text()
    assert text.startswith("stage 0 on devices 0 1: ")
    assert "stage0/replica0/forward0/" in text


# ---- what stays as it is


def dropout() -> keras.Model:
    keras.utils.set_random_seed(1)
    features = keras.Input((4,))
    x = layers.BatchNormalization(name="norm")(layers.Dense(6, name="first")(features))
    x = layers.Dropout(0.5, name="dropout")(x)
    model = keras.Model(features, layers.Dense(3, name="logits")(x), name="dropout")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
    return model


@pytest.mark.thorough
@pytest.mark.slow
def test_training_goes_on_as_without_dumps(tmp_path: pathlib.Path) -> None:
    logs, trained = [], []
    for dumps in (False, True):
        model = dropout()
        pipelined = transform(model)
        seen = []
        for number in range(3):
            if dumps and number < 2:  # before the first step, and in the middle
                pipelined.dump(tmp_path)
            seen.append(pipelined.train_on_batch(X, Y))
        seen.append(pipelined.test_on_batch(X, Y))
        pipelined.sync()
        logs.append([np.asarray(each).tolist() for each in seen])
        trained.append(values(model))
    assert logs[0] == logs[1]
    for own, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_model_that_was_compiled_again_is_dumped_as_it_is_now(tmp_path: pathlib.Path) -> None:
    model = classifier()
    pipelined = transform(model)
    pipelined.train_on_batch(X, Y)
    model.get_layer("second").trainable = False
    pipelined.dump(tmp_path)
    text = (tmp_path / "train/09_update.pbtxt").read_text()
    assert "first/kernel/gradient" in text
    assert "second/kernel/gradient" not in text
    pipelined.close()
    pipelined.dump(tmp_path)


@pytest.mark.slow
def test_a_dump_is_replaced_and_what_else_is_there_left(tmp_path: pathlib.Path) -> None:
    pipelined = transform(classifier())
    pipelined.dump(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    pipelined.train_on_batch(X, Y)
    pipelined.dump(tmp_path)
    assert not (tmp_path / "train").exists()
    assert (tmp_path / "train0").is_dir()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "plan.json").write_text("{}")
    before = files(tmp_path)
    with pytest.raises(FolderError, match=r"plan\.json would be overwritten"):
        pipelined.dump(tmp_path)
    assert files(tmp_path) == before


# ---- what can't be known


class Undeclared(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="undeclared")
        self.first, self.second = layers.Dense(3, name="first"), layers.Dense(3, name="second")

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.first.build(shape)
        self.second.build((None, 3))

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return self.second(self.first(x))


def undeclared() -> keras.Model:
    model = Undeclared()
    model.build((None, 4))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
def test_without_a_step_a_model_must_declare_its_inputs(tmp_path: pathlib.Path) -> None:
    pipelined = transform(undeclared())
    with pytest.raises(dapple.DataError, match=r"isn't known yet: train a step first, pipelined\.train_on_batch"):
        pipelined.dump(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pipelined.predict_on_batch(X)
    pipelined.dump(tmp_path / "out")
    assert "Training isn't here" in (tmp_path / "out/index.html").read_text()
    pipelined.train_on_batch(X, Y)
    pipelined.dump(tmp_path / "out")
    assert "Training isn't here" not in (tmp_path / "out/index.html").read_text()
    assert (tmp_path / "out/train1/09_update.pbtxt").exists()


@pytest.mark.thorough
@pytest.mark.slow
def test_large_plans_have_no_pictures_but_pages(tmp_path: pathlib.Path) -> None:
    own = plan(micro_batches=70, global_batch_size=140)
    dump_model(tmp_path, classifier(), dapple.Cluster.local(3, kind="cpu"), own)
    text = (tmp_path / "index.html").read_text()
    assert "isn't drawn (up to 400 and 2000 are): open graph.html instead" in text
    assert not (tmp_path / "train/graph.svg").exists()
    assert (tmp_path / "train/graph.dot").exists()
