"""The models of FD-DPS's experiments (Mathematics 2022, 10, 4788, table 3), and the operators of their training steps.

The paper took them from TF-Slim, for TensorFlow 1.14; here they are keras.applications', ResNet-200 and PNASNet-5
mobile our own. It names CIFAR-10, but its time of VGG-16's Conv1_2 (table 6) is that of 224 x 224 pixels: images are of
the size that a model is made for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
import graph_passes
from dapple_tf.execution.builds import Build, StepKind
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.batch import spec_of
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.garbage import without_collection
from dapple_tf.models import pnasnet, resnet
from dapple_tf.operators import step_placer
from dapple_tf.variables.parameter_groups import group_updates, readers_of
from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.tensorflow_bridge import Shape
from graph_passes.pass_manager import run_passes

logger = logging.getLogger(__name__)

CACHE = pathlib.Path(__file__).resolve().parents[2] / "build" / "operator_steps"
"""Cache of flat graphs; the large ones take a minute."""


@dataclass(frozen=True)
class OperatorModel:
    """A model of table 3.

    Attributes:
        name: its name here.
        paper: its name in the paper.
        batch: images of a step.
        operators: number of operators of its graph in the paper.
        edges: number of edges of its graph in the paper.
        build: function that returns the model, with random weights.
    """

    name: str
    paper: str
    batch: int
    operators: int
    edges: int
    build: Callable[[], keras.Model]


@dataclass(frozen=True)
class FlatStep:
    """The operators of a training step.

    Attributes:
        graph: the flat training graph: forward, backward, update.
        shapes: shapes of all its tensors.
        seconds: processor seconds of making it.
    """

    graph: GraphDef
    shapes: Mapping[Ref, Shape | None]
    seconds: float


def _application(name: str) -> Callable[[], keras.Model]:
    return lambda: getattr(keras.applications, name)(weights=None)


def _resnet_200() -> keras.Model:
    return resnet.deep_resnet(200, classifier_activation="softmax")


MODELS: Mapping[str, OperatorModel] = {
    model.name: model
    for model in (
        OperatorModel("VGG-16", "Vgg_16", 64, 3932, 5461, _application("VGG16")),
        OperatorModel("Inception-V3", "InceptionV3", 64, 12745, 21928, _application("InceptionV3")),
        OperatorModel("ResNet-50", "ResNet_50", 64, 12692, 24345, _application("ResNet50")),
        OperatorModel("ResNet-200", "ResNet_200", 16, 45472, 82347, _resnet_200),
        OperatorModel("PNASNet-mobile", "PnasNet_mobile", 64, 62192, 91957, pnasnet.pnasnet_mobile),
        OperatorModel("NASNet-large", "NasNet_large", 16, 83206, 148548, _application("NASNetLarge")),
    )
}
"""Models by name."""


@without_collection
def flatten_step(model: keras.Model, batch: int, plan: dapple.Plan, cluster: dapple.Cluster) -> FlatStep:
    """Returns the operators of a step, by the passes of real training; nothing is run.

    Args:
        model: a compiled classifier of images with integer labels.
        batch: images of a step.
        plan: a plan of one stage on one device.
        cluster: a cluster with that device; may be a description.
    """
    started = time.process_time()
    images = np.broadcast_to(np.zeros((), model.input_dtype), (batch, *model.input_shape[1:]))
    labels = np.zeros(batch, "int32")
    spec, table, passes = spec_of(model, images, labels), VariableTable(model), StepPasses(plan, cluster)
    build(model, table, spec)
    program = run_passes(
        capture(model, table, Mode.TRAIN, spec, training=True), passes.stage_passes(Mode.TRAIN, "train_")
    )
    built = Build(Mode.TRAIN, spec, program, group_updates(model, table, program), "train_")
    chosen = passes.step_passes(built, StepKind(batch), plan.order_tasks(), readers_of(program))
    step = run_passes(program, chosen, complete=True)
    flat = step_placer.flat_step(step, built.input_shapes(StepKind(batch)))
    return FlatStep(flat.program.graph, flat.shapes, time.process_time() - started)


def flat_step(model: OperatorModel, cache: pathlib.Path | None) -> FlatStep:
    """Returns the operators of a model's training step with momentum SGD, as in the paper: one copy of the model.

    Args:
        model: the model.
        cache: folder of cached graphs; None makes the graph anew. The name contains a hash of everything it depends on.
    """
    path = None if cache is None else cache / f"{model.name}-{model.batch}-{_digest()}.json"
    if path is not None and path.exists():
        return _load(path)
    logger.info("building %s", model.name)
    keras.utils.set_random_seed(0)
    built = model.build()
    built.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy())
    cluster = dapple.Cluster.from_json(
        '{"format": "dapple_tf.cluster/1", "servers": [{"devices": 1}], "intra_bandwidth": 12e9}'
    )
    step = flatten_step(built, model.batch, dapple.Plan.by_operators(1, model.batch), cluster)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{model.name}-*"):
            old.unlink()
        _save(step, path)
    return step


def _save(step: FlatStep, path: pathlib.Path) -> None:
    """Writes the graph and then the file of its shapes, which shows that both are complete."""
    path.with_suffix(".pb").write_bytes(step.graph.SerializeToString())
    shapes = {str(ref): shape for ref, shape in step.shapes.items()}
    path.write_text(json.dumps({"seconds": step.seconds, "shapes": shapes}), encoding="utf-8")


def _load(path: pathlib.Path) -> FlatStep:
    graph = GraphDef.FromString(path.with_suffix(".pb").read_bytes())
    stored = json.loads(path.read_text(encoding="utf-8"))
    shapes = {Ref.parse(name): None if shape is None else tuple(shape) for name, shape in stored["shapes"].items()}
    return FlatStep(graph, shapes, stored["seconds"])


def _digest() -> str:
    """Returns a hash of what makes a step: TensorFlow, Keras, the passes and their callers; not the searches."""
    digest = hashlib.sha256(f"{tf.__version__} {keras.__version__}".encode())
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def sources() -> list[pathlib.Path]:
    """Returns the files whose changes make cached steps invalid."""
    root = pathlib.Path(graph_passes.__file__).parents[1]
    searches = root / "dapple_tf" / "operators"
    files = [path for name in ("graph_passes", "dapple_tf") for path in (root / name).rglob("*.py")]
    own = [pathlib.Path(str(path)) for path in (__file__, pnasnet.__file__, resnet.__file__, step_placer.__file__)]
    return sorted([*(path for path in files if searches not in path.parents), *own])
