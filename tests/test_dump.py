"""What a dump writes, and what it leaves alone."""

from __future__ import annotations

import html.parser
import pathlib
from collections.abc import Sequence

import keras
import pytest
from models_for_tests import classifier, layers, plan, samples, transform

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.dumps.dump import dump_model
from dapple_tf.dumps.output_folder import LIST, FolderError
from graph_passes.ir.tasks import Schedule

X, Y, _ = samples(7)
DRAWINGS = [
    *("graph.html", "graph.svg", "schedule.txt"),
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


def test_before_the_first_step_training_is_dumped_as_the_model_declares_it(tmp_path: pathlib.Path) -> None:
    pipelined = transform(classifier())
    pipelined.dump(tmp_path)
    own = ["plan.json", "index.html", LIST]
    assert files(tmp_path) == sorted([*own, *expected("train", TRAINING, DRAWINGS)])
    assert dapple.Plan.load(tmp_path / "plan.json") == pipelined.plan
    assert Schedule.parse((tmp_path / "train/schedule.txt").read_text()).orders == plan().order_tasks().orders
    text = (tmp_path / "index.html").read_text()
    links = set(Links(text).found)
    assert links == {name for name in files(tmp_path) if not name.startswith("tensorboard") and name not in own[1:]}
    assert f"{(tmp_path / 'train/09_update.pbtxt').stat().st_size:,}" in text
    assert "tensorboard --logdir tensorboard/train" in text
    assert "after schedule: Lowers a schedule to control edges" in text
    assert "There is no schedule.csv: " in text  # stage 1 has two replicas
    assert "There is no profile" in text


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


def test_a_described_cluster_will_do_and_a_profile_adds_the_simulated_step(tmp_path: pathlib.Path) -> None:
    text = '{"format": "dapple_tf.cluster/1", "servers": [{"devices": 2}, {"devices": 1}]}'
    cluster = dapple.Cluster.from_json(text)
    assert (
        dump_model(tmp_path, classifier(), cluster, plan(devices=[[0], [1]]), own_profile()) == tmp_path / "index.html"
    )
    step = (tmp_path / "train/09_update.pbtxt").read_text()
    assert all(f'device: "{name}"' in step for name in cluster.device_names[:2])
    assert (tmp_path / "train/schedule.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    text = (tmp_path / "train/timeline.txt").read_text()
    assert "planned" in text and "simulated" in text
    with pytest.raises(dapple.PlanError, match="plan puts stage 1 on device 3"):
        dump_model(tmp_path, classifier(), cluster, plan(devices=[[0], [3]]))


# ---- what stays as it is


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
