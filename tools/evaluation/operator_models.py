"""The models of FD-DPS's experiments (Mathematics 2022, 10, 4788, table 3), and the operators of their training steps.

The paper took them from TF-Slim, for TensorFlow 1.14; here they are keras.applications', ResNet-200 and PNASNet-5
mobile our own. It names CIFAR-10, but its time of VGG-16's Conv1_2 (table 6) is that of 224 x 224 pixels: images are of
the size that a model is made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.common.memory import without_collection
from dapple_tf.execution.builds import Build, StepKind
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.batch import spec_of
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.models import pnasnet, resnet
from dapple_tf.operators import step_placer
from dapple_tf.variables.parameter_groups import group_updates, readers_of
from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.tensorflow_bridge import Shape
from graph_passes.pass_manager import run_passes

FlatStep = tuple[GraphDef, Mapping[Ref, Shape | None]]
"""The operators of a training step (forward, backward, update), and the shapes of all its tensors."""


class OperatorModel(NamedTuple):
    """A model of table 3.

    Attributes:
        batch: images of a step.
        operators: number of operators of its graph in the paper.
        build: function that returns the model, with random weights.
    """

    batch: int
    operators: int
    build: Callable[[], keras.Model]


MODELS: Mapping[str, OperatorModel] = {
    "VGG-16": OperatorModel(64, 3932, lambda: keras.applications.VGG16(weights=None)),
    "Inception-V3": OperatorModel(64, 12745, lambda: keras.applications.InceptionV3(weights=None)),
    "ResNet-50": OperatorModel(64, 12692, lambda: keras.applications.ResNet50(weights=None)),
    "ResNet-200": OperatorModel(16, 45472, lambda: resnet.deep_resnet(200, classifier_activation="softmax")),
    "PNASNet-mobile": OperatorModel(64, 62192, pnasnet.pnasnet_mobile),
    "NASNet-large": OperatorModel(16, 83206, lambda: keras.applications.NASNetLarge(weights=None)),
}


def wide_towers() -> keras.Model:
    """Returns four compiled towers of wide dense layers, whose gradients outweigh what the towers read."""
    layers = keras.layers
    vector = keras.Input((512,), name="vector")
    ends = []
    for tower in range(4):
        x = vector
        for number in range(3):
            x = layers.Dense(1024, activation="relu", name=f"tower_{tower}_dense_{number}")(x)
        ends.append(layers.Dense(16, name=f"tower_{tower}_end")(x))
    x = layers.Concatenate(name="joined")(ends)
    model = keras.Model(vector, layers.Dense(10, name="logits")(x), name="wide_towers")
    model.compile(keras.optimizers.SGD(1e-3, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@without_collection
def flatten_step(model: keras.Model, batch: int) -> FlatStep:
    """Returns the operators of a step by the passes of real training; nothing is run.

    Args:
        model: a compiled classifier with integer labels.
        batch: samples of a step.
    """
    inputs = np.broadcast_to(np.zeros((), model.input_dtype), (batch, *model.input_shape[1:]))
    plan, cluster = dapple.Plan.by_operators(1, batch), dapple.Cluster((dapple.Device("/device:GPU:0", 0),), real=False)
    spec, table = spec_of(model, inputs, np.zeros(batch, "int32")), VariableTable(model)
    passes = StepPasses(plan, cluster)
    build(model, table, spec)
    program = run_passes(
        capture(model, table, Mode.TRAIN, spec, training=True), passes.stage_passes(Mode.TRAIN, "train_")
    )
    built = Build(Mode.TRAIN, spec, program, group_updates(model, table, program), "train_")
    chosen = passes.step_passes(built, StepKind(batch), plan.order_tasks(), readers_of(program))
    step = run_passes(program, chosen, complete=True)
    flat = step_placer.flat_step(step, built.input_shapes(StepKind(batch)))
    return flat.program.graph, flat.shapes


def flat_step(name: str) -> FlatStep:
    """Returns the operators of a step of one of `MODELS` with momentum SGD."""
    keras.utils.set_random_seed(0)
    model = MODELS[name]
    built = model.build()
    built.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy())
    return flatten_step(built, model.batch)
